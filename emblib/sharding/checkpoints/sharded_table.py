"""Tensors whose shards are on several ranks: the values of sharded state dicts.

`torch.distributed.checkpoint` asks a tensor for its chunks by three methods. `ShardedTable`
implements them, so a checkpoint of one plan and number of ranks loads into any other.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import Shard, Span

MAX_BLOCK_BYTES = 1 << 26
"""Shards are written and read in blocks of whole rows, of at most this many bytes if a row fits."""


class ShardedTable(Tensor):
    """A tensor `[rows, columns]` or `[rows]` of which this rank stores some shards.

    It has the size of the full tensor and the memory of the local shards. It can be cloned, moved,
    overwritten by a tensor with the same shards, saved with `torch.distributed.checkpoint`, and
    gathered by `full_tensor`. Other operations on its values raise NotImplementedError, `tolist`
    and `numpy` RuntimeError, and pickling raises TypeError.

    Args:
        size: size of the full tensor.
        shards: the shards of all ranks. They must tile the tensor, or each be a copy of the full
            tensor; not checked. The shards of a vector have the columns (0, 1).
        parts: the values of this rank's shards, by their number in `shards`; not copied.
        ranks: the ranks that store the shards.
        dtype: dtype of the values; ranks without a shard need it, too.

    Raises:
        ValueError: `parts` are not the shards of this rank, or have other shapes or dtypes.
    """

    shards: tuple[Shard, ...]
    parts: dict[int, Tensor]
    ranks: RankGroup

    @staticmethod
    def __new__(
        cls: type,
        size: Sequence[int],
        shards: Sequence[Shard],
        parts: Mapping[int, Tensor],
        ranks: RankGroup,
        dtype: torch.dtype,
    ) -> "ShardedTable":
        """Create a tensor without memory of its own; arguments as for the class."""
        devices = {part.device for part in parts.values()} or {ranks.device}
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(size), dtype=dtype, device=sorted(devices, key=str)[0], requires_grad=False
        )

    def __init__(
        self,
        size: Sequence[int],
        shards: Sequence[Shard],
        parts: Mapping[int, Tensor],
        ranks: RankGroup,
        dtype: torch.dtype,
    ) -> None:
        self.shards = tuple(shards)
        self.parts = dict(parts)
        self.ranks = ranks
        local_indices = [i for i, shard in enumerate(self.shards) if shard.rank == ranks.rank]
        if sorted(self.parts) != local_indices:
            raise ValueError(
                f"rank {ranks.rank} has the shards {local_indices} of {list(self.shards)}, got "
                f"parts for {sorted(self.parts)}"
            )
        for i, part in self.parts.items():
            shard_shape = self.shards[i].shape[: self.dim()]
            if tuple(part.shape) != shard_shape or part.dtype != dtype:
                raise ValueError(
                    f"{self.shards[i]} is a {dtype} tensor of shape {shard_shape}, got "
                    f"{part.dtype} {tuple(part.shape)}"
                )

    def with_parts(
        self, parts: Mapping[int, Tensor], dtype: torch.dtype | None = None
    ) -> "ShardedTable":
        """Return a tensor with the same shards and the memory `parts`.

        `parts` is as for the class. `dtype` must be that of `parts`; None is the dtype of this
        tensor.
        """
        return ShardedTable(self.size(), self.shards, parts, self.ranks, dtype or self.dtype)

    def map(self, function: Callable[[Tensor], Tensor]) -> "ShardedTable":
        """Return a tensor with `function(part)` as the memory of each local shard.

        `function` must keep the shape. On a rank without shards it is called with an empty tensor,
        for the dtype of its result.
        """
        parts = {i: function(part) for i, part in self.parts.items()}
        dtypes = {part.dtype for part in parts.values()}
        return self.with_parts(
            parts, dtypes.pop() if dtypes else function(self._empty_block()).dtype
        )

    def _empty_block(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def blocks(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return (offsets, view) of this rank's non-empty blocks, the chunks of checkpoints.

        A tensor without values has one empty block, on the rank of shard 0, because metadata lists
        a tensor by its blocks.
        """
        if 0 in self.size():
            return [((0,) * self.dim(), self.parts[0])] if 0 in self.parts else []
        return [
            (offsets, self.parts[i][start - self.shards[i].rows[0] :][: sizes[0]])
            for i in self.parts
            for offsets, sizes in row_blocks(self.shards[i], self.dim(), self.element_size())
            for start in offsets[:1]
        ]

    def full_tensor(self, rank: int | None = None) -> Tensor:
        """Gather the full tensor on the CPU, on `rank` or on every rank; a collective over `ranks`.

        If `rank` is given, the other ranks get an empty tensor.

        Raises:
            ValueError, RuntimeError: see `gather_full_tensor`.
        """
        return gather_full_tensor(self, rank)

    # The methods that torch.distributed.checkpoint calls

    def __create_write_items__(self, fqn: str, value: object) -> list[Any]:
        """Return one item per block."""
        from torch.distributed.checkpoint.metadata import (
            ChunkStorageMetadata,
            MetadataIndex,
            TensorProperties,
        )
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(offsets)),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(torch.Size(offsets), block.size()),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.shape,
                ),
            )
            for offsets, block in self.blocks()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """Return the position of each block in the full tensor."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offsets), block.size())
            for offsets, block in self.blocks()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """Return the block that begins at `index.offset`."""
        for offsets, block in self.blocks():
            if torch.Size(offsets) == index.offset:
                return block
        raise ValueError(f"{index.fqn}: no block of this rank begins at {index.offset}")

    # Operations

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run operations that copy shard by shard; refuse others, which need the full tensor."""
        aten = torch.ops.aten
        kwargs = kwargs or {}
        if func in _COPIES:
            return args[0].map(lambda part: func(part, *args[1:], **kwargs))
        if func is aten.new_empty.default and tuple(args[1]) == tuple(args[0].size()):
            return args[0].map(lambda part: torch.empty_like(part, **kwargs))
        if func is aten.copy_.default and _have_same_shards(*args[:2]):
            for i, part in args[0].parts.items():
                part.copy_(args[1].parts[i])
            return args[0]
        # Not a TypeError: torch would replace its message by one about unsupported operands.
        raise NotImplementedError(
            f"a ShardedTable holds parts of a table, so {func} of it is not known; full_tensor() "
            "gathers the table, and parts has the shards of this rank"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTable":
        return self.map(torch.clone)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a ShardedTable is spread over ranks and cannot be pickled; save it with "
            "emblib.sharding.checkpoints.save, or export for one file with whole tables"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        local_shards = [shard for shard in self.shards if shard.rank == self.ranks.rank]
        return (
            f"{type(self).__name__}({tuple(self.size())}, {self.dtype}, {len(self.shards)} shards, "
            f"on this rank {local_shards})"
        )


_COPIES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
}


class RowStates(ShardedTable):
    """A row-wise optimizer state of a table cut by columns: one number per row and column shard.

    Each column shard accumulates its own gradients. So the state has one column per interval of
    table columns that no shard cuts. A shard that spans several intervals has its number in each of
    them. The `columns` of shards are columns of the state: they count intervals.

    Attributes:
        cuts: first columns of the intervals, and the end of the last one. Whoever constructs the
            tensor must set them.
    """

    cuts: tuple[int, ...]

    def with_parts(
        self, parts: Mapping[int, Tensor], dtype: torch.dtype | None = None
    ) -> "RowStates":
        """Return a tensor with the same shards and other memory."""
        row_states = RowStates(self.size(), self.shards, parts, self.ranks, dtype or self.dtype)
        row_states.cuts = self.cuts
        return row_states


class _SizeOfKeyedRows(tuple[int, ...]):
    """Size of `KeyedRows`, whose text says how to load another number of keys.

    torch.distributed.checkpoint compares sizes before it asks a tensor for its chunks, and its
    error has the text of both. `torch.Size` has no subclasses.
    """

    def __str__(self) -> str:
        return (
            f"{torch.Size(self)}, a row per key that the hash table has now "
            "(emblib.sharding.checkpoints.load loads any number of keys)"
        )


class KeyedRows(ShardedTable):
    """One row per key of a dynamic table, sorted by route: block k of K has the keys of shard k.

    See `emblib.dynamic.keys`: the concatenated shards of a table are the table in the order of all
    checkpoints, for any K.
    """

    def size(self, dim: int | None = None) -> Any:
        """Return the size as a tuple, or that of one dimension."""
        return _SizeOfKeyedRows(self.shape) if dim is None else self.shape[dim]

    def with_parts(
        self, parts: Mapping[int, Tensor], dtype: torch.dtype | None = None
    ) -> "KeyedRows":
        """Return a tensor with the same shards and other memory."""
        return KeyedRows(self.size(), self.shards, parts, self.ranks, dtype or self.dtype)


def _have_same_shards(first: Any, second: Any) -> bool:
    return isinstance(second, ShardedTable) and first.shards == second.shards


def row_blocks(
    shard: Shard, num_dims: int, itemsize: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offsets in the full tensor, sizes) of the blocks of a shard; none if it is empty.

    Blocks are limited by `MAX_BLOCK_BYTES`.

    Args:
        shard: the shard.
        num_dims: number of dimensions of the tensor, 1 or 2; offsets and sizes have as many
            numbers.
        itemsize: bytes per value.
    """
    num_rows, num_columns = shard.shape
    if not num_rows or not num_columns:
        return []
    rows_per_block = max(MAX_BLOCK_BYTES // (num_columns * itemsize), 1)
    starts = [*range(shard.rows[0], shard.rows[1], rows_per_block), shard.rows[1]]
    return [
        ((start, shard.columns[0])[:num_dims], (end - start, num_columns)[:num_dims])
        for start, end in itertools.pairwise(starts)
    ]


def cuts_of(shards: Sequence[Shard]) -> tuple[int, ...]:
    """Return the columns at which any shard begins or ends, ascending."""
    return tuple(sorted({edge for shard in shards for edge in shard.columns}))


def interval_range(columns: Span, cuts: Sequence[int]) -> Span:
    """Return the range of the intervals between `cuts` that make up a span of columns.

    Raises ValueError if the span does not begin and end at cuts.
    """
    return cuts.index(columns[0]), cuts.index(columns[1])


def average_columns(states: Tensor, cuts: Sequence[int], columns: Span) -> Tensor:
    """Return the mean of row-wise states over a span of table columns; exact for equal values.

    The mean is weighted by the number of the span's columns in each interval.

    Args:
        states: states `[R, intervals]`; the result is `[R]`, of the same dtype and device.
        cuts: first columns of the intervals, and the end of the last one.
        columns: the span, which must not be empty.
    """
    weights = [
        max(min(end, columns[1]) - max(start, columns[0]), 0)
        for start, end in itertools.pairwise(cuts)
    ]
    weighted_sums = torch.zeros(states.shape[0], dtype=torch.float64, device=states.device)
    for interval, weight in enumerate(weights):
        if weight:
            weighted_sums.add_(states[:, interval], alpha=weight)
    return (weighted_sums / (columns[1] - columns[0])).to(states.dtype)


def gather_full_tensor(table: ShardedTable, rank: int | None = None) -> Tensor:
    """Return the full tensor on the CPU, on `rank` or, if it is None, on all ranks.

    A collective over the ranks of `table`. The other ranks get an empty tensor. Blocks are sent one
    by one, so only ranks that get the full tensor allocate memory of its size.

    Raises:
        ValueError: `rank` is neither None nor one of the ranks, or differs between ranks.
        RuntimeError: another rank exchanges a batch instead; not detected on a GPU.
    """
    ranks = table.ranks
    targets = ranks.gather_objects(rank)
    if any(target != rank for target in targets):
        raise ValueError(f"rank must be the same on all ranks, got {targets}")
    if rank is not None and not 0 <= rank < ranks.size:
        raise ValueError(f"rank must be one of 0 to {ranks.size - 1}, or None for all, got {rank}")
    target_rank = 0 if rank is None else rank
    full_tensor = torch.empty(
        table.size() if ranks.rank == target_rank else (0,), dtype=table.dtype, device="cpu"
    )
    for i, shard in enumerate(table.shards):
        if ranks.rank not in (target_rank, shard.rank):
            continue
        for offsets, sizes in row_blocks(shard, table.dim(), table.element_size()):
            region = tuple(
                slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)
            )
            if shard.rank == ranks.rank:
                first_row = offsets[0] - shard.rows[0]
                block = table.parts[i][first_row : first_row + sizes[0]]
                if ranks.rank == target_rank:
                    full_tensor[region] = block.cpu()
                else:
                    _send_block(block, target_rank, ranks)
            else:
                full_tensor[region] = _receive_block(sizes, table.dtype, shard.rank, ranks)
    if rank is None and ranks.size > 1:
        return _broadcast_blocks(full_tensor, table, ranks)
    return full_tensor


def gather_state(state: Any, rank: int | None = 0) -> Any:
    """Return a copy of `state` with full tensors on the CPU; a collective over all its ranks.

    Rank `rank`, or every rank if it is None, gets the full tensors of `ShardedTable`s; the other
    ranks get empty ones. `RowStates` become one number per row, see `average_columns`. On every
    rank DTensors become full tensors, other tensors are copied, and other values are the same.
    """
    if isinstance(state, ShardedTable):
        full_tensor = state.full_tensor(rank)
        if isinstance(state, RowStates) and full_tensor.numel():
            return average_columns(full_tensor, state.cuts, (0, state.cuts[-1]))
        return full_tensor
    if isinstance(state, Mapping):
        return {key: gather_state(value, rank) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(gather_state(value, rank) for value in state)
    if not isinstance(state, Tensor):
        return state
    gather = getattr(state, "full_tensor", None)  # a DTensor has it
    return (state if gather is None else gather()).detach().to("cpu", copy=True)


def _send_block(block: Tensor, target: int, ranks: RankGroup) -> None:
    """Send a block to rank `target`, from the device of the process group."""
    dist.send(_as_bytes(block.to(ranks.device)), ranks.global_rank(target), group=ranks.group)


def _receive_block(
    sizes: tuple[int, ...], dtype: torch.dtype, source: int, ranks: RankGroup
) -> Tensor:
    """Receive a block of a shape from a rank; return it on the CPU."""
    block = torch.empty(sizes, dtype=dtype, device=ranks.device)
    dist.recv(_as_bytes(block), ranks.global_rank(source), group=ranks.group)
    return block.cpu()


def _broadcast_blocks(full_tensor: Tensor, table: ShardedTable, ranks: RankGroup) -> Tensor:
    """Send rank 0's full tensor to all ranks, block by block; return it on the CPU."""
    if ranks.rank:
        full_tensor = torch.empty(table.size(), dtype=table.dtype, device="cpu")
    rows_per_block = max(
        MAX_BLOCK_BYTES // max(full_tensor[:1].numel() * full_tensor.element_size(), 1), 1
    )
    for rows in full_tensor.split(rows_per_block):
        block = rows.to(ranks.device)
        dist.broadcast(_as_bytes(block), ranks.global_rank(0), group=ranks.group)
        rows.copy_(block)
    return full_tensor


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return a byte view, which every backend can send."""
    return tensor.contiguous().view(-1).view(torch.uint8)
