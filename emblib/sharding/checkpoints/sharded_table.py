"""A tensor whose values are spread over ranks as boxes: what state dicts of sharded modules hold.

`torch.distributed.checkpoint` asks a tensor for its chunks by three methods; `ShardedTable` has
them, so that what was saved with one plan and number of ranks loads into any other.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from emblib.sharding.boxes import Box
from emblib.sharding.groups_of_ranks import Ranks

PIECE_BYTES = 1 << 26
"""Boxes are written and read in pieces of whole rows, of at most about this many bytes."""


class ShardedTable(Tensor):
    """A `[rows, columns]` or `[rows]` tensor of which this rank has some boxes.

    It has the size of the whole and the memory of the parts. Nothing is computed with it: it can be
    cloned, moved, saved with `torch.distributed.checkpoint`, and made whole by `full_tensor`.

    Args:
        size: of the whole.
        boxes: of all ranks; they tile the whole. Columns are (0, 1) where it has no columns.
        parts: the values of the boxes of this rank, by their number in `boxes`.
        ranks: who has the boxes.
        dtype: of the values; ranks without a part need to know it, too.
    """

    boxes: tuple[Box, ...]
    parts: dict[int, Tensor]
    ranks: Ranks

    @staticmethod
    def __new__(
        cls: type,
        size: Sequence[int],
        boxes: Sequence[Box],
        parts: Mapping[int, Tensor],
        ranks: Ranks,
        dtype: torch.dtype,
    ) -> "ShardedTable":
        """A tensor without memory of its own."""
        devices = {part.device for part in parts.values()} or {ranks.device}
        return torch.Tensor._make_wrapper_subclass(
            cls, tuple(size), dtype=dtype, device=sorted(devices, key=str)[0], requires_grad=False
        )

    def __init__(
        self,
        size: Sequence[int],
        boxes: Sequence[Box],
        parts: Mapping[int, Tensor],
        ranks: Ranks,
        dtype: torch.dtype,
    ) -> None:
        self.boxes = tuple(boxes)
        self.parts = dict(parts)
        self.ranks = ranks
        mine = [i for i, box in enumerate(self.boxes) if box.rank == ranks.rank]
        if sorted(self.parts) != mine:
            raise ValueError(
                f"rank {ranks.rank} has the boxes {mine} of {list(self.boxes)}, got parts for "
                f"{sorted(self.parts)}"
            )
        for i, part in self.parts.items():
            wanted = self.boxes[i].shape[: self.dim()]
            if tuple(part.shape) != wanted or part.dtype != dtype:
                raise ValueError(
                    f"{self.boxes[i]} is a {dtype} tensor of shape {wanted}, got {part.dtype} "
                    f"{tuple(part.shape)}"
                )

    def with_parts(
        self, parts: Mapping[int, Tensor], dtype: torch.dtype | None = None
    ) -> "ShardedTable":
        """The same boxes with other memory."""
        return ShardedTable(self.size(), self.boxes, parts, self.ranks, dtype or self.dtype)

    def map(self, function: Callable[[Tensor], Tensor]) -> "ShardedTable":
        """The same boxes, each part made from the part that is here."""
        parts = {i: function(part) for i, part in self.parts.items()}
        dtypes = {part.dtype for part in parts.values()}
        return self.with_parts(parts, dtypes.pop() if dtypes else function(self._nothing()).dtype)

    def _nothing(self) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=self.device)

    def pieces(self) -> list[tuple[tuple[int, ...], Tensor]]:
        """Offsets and values of what this rank has, cut into pieces; without empty ones.

        A tensor without values has one empty piece, since metadata knows a tensor by its pieces.
        """
        if 0 in self.size():
            return [((0,) * self.dim(), self.parts[0])] if 0 in self.parts else []
        return [
            (offsets, self.parts[i][start - self.boxes[i].rows[0] :][: sizes[0]])
            for i in self.parts
            for offsets, sizes in pieces_of(self.boxes[i], self.dim(), self.element_size())
            for start in offsets[:1]
        ]

    def full_tensor(self, rank: int | None = None) -> Tensor:
        """The whole, on the CPU, on `rank` or on every rank; all ranks of `ranks` call this.

        Where `rank` is given, the others get an empty tensor.
        """
        from emblib.sharding.checkpoints.gathering import gathered

        return gathered(self, rank)

    # What torch.distributed.checkpoint asks for

    def __create_write_items__(self, fqn: str, value: object) -> list[Any]:
        """One item a piece."""
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
                    chunk=ChunkStorageMetadata(torch.Size(offsets), piece.size()),
                    properties=TensorProperties(dtype=self.dtype),
                    size=self.size(),
                ),
            )
            for offsets, piece in self.pieces()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """Where the pieces are in the whole."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [
            ChunkStorageMetadata(torch.Size(offsets), piece.size())
            for offsets, piece in self.pieces()
        ]

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        """The piece that begins at `index.offset`."""
        for offsets, piece in self.pieces():
            if torch.Size(offsets) == index.offset:
                return piece
        raise ValueError(f"{index.fqn}: no piece of this rank begins at {index.offset}")

    # What a tensor can do

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Copies of all kinds; anything else would be of the whole, which is not here."""
        aten = torch.ops.aten
        kwargs = kwargs or {}
        if func in _COPIES:
            return args[0].map(lambda part: func(part, *args[1:], **kwargs))
        if func is aten.new_empty.default and tuple(args[1]) == tuple(args[0].size()):
            return args[0].map(lambda part: torch.empty_like(part, **kwargs))
        if func is aten.copy_.default and _alike(*args[:2]):
            for i, part in args[0].parts.items():
                part.copy_(args[1].parts[i])
            return args[0]
        # No TypeError: of one, torch would only tell that operands are not supported.
        raise NotImplementedError(
            f"a ShardedTable holds parts of a table, so {func} of it is not known; full_tensor() "
            "gathers the table, and parts has what is on this rank"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "ShardedTable":
        return self.map(torch.clone)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a ShardedTable is spread over ranks and cannot be pickled; save it with "
            "emblib.sharding.checkpoints.save, or export for one file with whole tables"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        mine = [box for box in self.boxes if box.rank == self.ranks.rank]
        return (
            f"{type(self).__name__}({tuple(self.size())}, {self.dtype}, {len(self.boxes)} boxes, "
            f"on this rank {mine})"
        )


_COPIES = {
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
}


class RowStates(ShardedTable):
    """One number a row and column box: a row-wise state of a table that is cut by columns.

    Each column box counts its own gradients, so the state has a column for each stretch of columns
    that no box cuts: `cuts`, of the table, are where they begin, and the end. A box that spans
    several has its number in each of them.
    """

    cuts: tuple[int, ...]

    def with_parts(
        self, parts: Mapping[int, Tensor], dtype: torch.dtype | None = None
    ) -> "RowStates":
        """The same boxes with other memory."""
        new = RowStates(self.size(), self.boxes, parts, self.ranks, dtype or self.dtype)
        new.cuts = self.cuts
        return new


class KeyedRows(ShardedTable):
    """One row a key of a dynamic table, sorted by route: box k of K has the keys that part k owns.

    See `emblib.dynamic.saving.routing`: the parts of a table, one after the other, are the table in
    the order that all checkpoints have, for any K.
    """

    def with_parts(
        self, parts: Mapping[int, Tensor], dtype: torch.dtype | None = None
    ) -> "KeyedRows":
        """The same boxes with other memory."""
        return KeyedRows(self.size(), self.boxes, parts, self.ranks, dtype or self.dtype)


def _alike(one: Any, other: Any) -> bool:
    return isinstance(other, ShardedTable) and one.boxes == other.boxes


def pieces_of(box: Box, dims: int, itemsize: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of the pieces of a box."""
    height, width = box.shape
    if not height or not width:
        return []
    step = max(PIECE_BYTES // (width * itemsize), 1)
    starts = [*range(box.rows[0], box.rows[1], step), box.rows[1]]
    return [
        ((start, box.columns[0])[:dims], (end - start, width)[:dims])
        for start, end in itertools.pairwise(starts)
    ]
