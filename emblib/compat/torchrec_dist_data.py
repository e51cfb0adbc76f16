"""TorchRec's modules that send batches and pooled rows, and its functions of ranks and nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from emblib.compat import torchrec_comms as comms
from emblib.compat.torchrec_comms import QuantizedCommCodecs
from emblib.jagged import KeyedJaggedTensor, KeyedTensor
from emblib.sharding import RankGroup
from emblib.sharding.all_to_all import start_all_to_all
from emblib.sharding.awaitables import Awaitable, DeferredAwaitable
from emblib.sharding.headers import Content
from emblib.sharding.ranks import invoke_on_rank_and_broadcast_result as invoke_on_rank
from emblib.sharding.ranks import make_node_groups

T = TypeVar("T")


# Ranks and nodes


def is_leader(pg: Any, leader_rank: int = 0) -> bool:
    """Return whether this process is rank `leader_rank` of `pg`; True if `pg` is None."""
    return pg is None or RankGroup.from_value(pg).rank == leader_rank


def invoke_on_rank_and_broadcast_result(
    pg: Any, rank: int, func: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Call a function on one rank, and return its result on every rank."""
    return invoke_on_rank(RankGroup.from_value(pg), rank, func, *args, **kwargs)


def run_on_leader(pg: Any, rank: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorate a function so that rank `rank` runs it and every rank gets the result."""

    def decorate(func: Callable[..., T]) -> Callable[..., T]:
        @wraps(func)
        def call(*args: Any, **kwargs: Any) -> T:
            return invoke_on_rank_and_broadcast_result(pg, rank, func, *args, **kwargs)

        return call

    return decorate


def get_local_size(world_size: int | None = None) -> int:
    """Return the number of ranks per node: LOCAL_WORLD_SIZE if it divides the world, else all."""
    num_ranks = RankGroup().size if world_size is None else world_size
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    is_divisor = 0 < local_size <= num_ranks and num_ranks % local_size == 0
    return local_size if is_divisor else num_ranks


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return the number of a rank on its node; by default the number of this process."""
    return (RankGroup().rank if rank is None else rank) % get_local_size(world_size)


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return the number of the node of a rank; by default of this process."""
    return (RankGroup().rank if rank is None else rank) // get_local_size(world_size)


def get_num_groups(world_size: int | None = None) -> int:
    """Return the number of nodes."""
    size = RankGroup().size if world_size is None else world_size
    return size // get_local_size(size)


def intra_and_cross_node_pg(
    device: torch.device | None = None, backend: str | None = None
) -> tuple[Any, Any]:
    """Return new process groups: the ranks of this node, and the ranks with this local number.

    All processes call this together; unlike TorchRec's, each call makes new groups, of a single
    rank too. For a `device` on `meta` both are None.

    Raises:
        ValueError: a `backend` is passed: the groups use the backend of all processes.
    """
    if device is not None and device.type == "meta":
        return None, None
    if backend is not None:
        raise ValueError("the groups use the backend of all processes: leave backend out")
    return make_node_groups(RankGroup(local_size=get_local_size()))


# Batches


class KJTAllToAll(nn.Module):
    """Send `splits[r]` features of a batch to rank r, and receive those of this rank from all.

    The result has this rank's features of the examples of all ranks, rank 0 first.

    Args:
        pg: the process group.
        splits: features for each rank, in the order of the batch.
        stagger: number that must be 1: batches of ranks follow each other in rank order.

    Raises:
        ValueError: the numbers of splits and ranks differ, or `stagger` has another value.
    """

    def __init__(self, pg: Any, splits: Sequence[int], stagger: int = 1) -> None:
        super().__init__()
        self._ranks, self._splits = RankGroup.from_value(pg), list(splits)
        if len(self._splits) != self._ranks.size:
            raise ValueError(f"splits must be one per rank of {self._ranks.size}, got {splits}")
        if stagger != 1:
            raise ValueError(
                f"stagger must be 1, got {stagger}: sharded collections of emblib order the ranks "
                "of table_row_wise tables themselves"
            )

    def forward(self, input: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        """Start to send the sizes of a batch; the first `wait` sends ids, the second receives them.

        The first `wait` raises RuntimeError, on all ranks, if dtypes of ids or weights differ in
        their size, or if only some batches have weights.

        Raises:
            ValueError: features differ in batch size, or are not those of `splits`; the other ranks
                then wait.
        """
        batch, ranks = KeyedJaggedTensor.adopt(input), self._ranks
        if batch.variable_stride_per_key():
            raise ValueError(
                "KJTAllToAll needs one batch size for all features; sharded collections take "
                "batches with stride_per_key_per_rank"
            )
        num_features = self._splits[ranks.rank]
        stride = batch.stride()
        rank_batches = batch.split(self._splits)
        weights = batch.weights_or_none()
        item_nbytes = batch.values().itemsize, 0 if weights is None else weights.itemsize
        header = [
            number
            for rank_batch in rank_batches
            for number in (*item_nbytes, stride, *rank_batch.length_per_key())
        ]
        pending = start_all_to_all(
            torch.tensor(header, device=batch.device()),
            [3 + n for n in self._splits],
            [3 + num_features] * ranks.size,
            ranks,
            content=Content.SIZES,
        )
        return DeferredAwaitable(partial(self._send, batch, rank_batches, pending))

    def _send(
        self, batch: KeyedJaggedTensor, rank_batches: Sequence[KeyedJaggedTensor], pending: Any
    ) -> Awaitable[KeyedJaggedTensor]:
        """Receive the sizes, then send lengths, ids and weights: `rank_batches[r]` to rank r.

        A message to a rank is the lengths, then the ids, of its features, in the dtype of the ids.
        """
        ranks, num_features = self._ranks, self._splits[self._ranks.rank]
        header_of_ranks = pending.wait().view(ranks.size, 3 + num_features).tolist()
        _check_item_nbytes([row[:2] for row in header_of_ranks])
        sizes_of_ranks = [row[2:] for row in header_of_ranks]
        strides = [row[0] for row in sizes_of_ranks]
        num_ids_of_ranks = [sum(row[1:]) for row in sizes_of_ranks]
        message_parts = [
            tensor.to(batch.values().dtype)
            for rank_batch in rank_batches
            for tensor in (rank_batch.lengths(), rank_batch.values())
        ]
        sent_sizes = [
            rank_batch.lengths().numel() + rank_batch.values().numel()
            for rank_batch in rank_batches
        ]
        received_sizes = [
            num_features * stride + n for stride, n in zip(strides, num_ids_of_ranks, strict=True)
        ]
        sent = torch.cat(message_parts) if message_parts else batch.values()[:0]
        values = start_all_to_all(sent, sent_sizes, received_sizes, ranks, content=Content.IDS)
        values.wait()  # over one group, collectives of the host follow each other
        weights = None
        if batch.weights_or_none() is not None:
            weights = start_all_to_all(
                torch.cat([rank_batch.weights() for rank_batch in rank_batches]),
                [rank_batch.values().numel() for rank_batch in rank_batches],
                num_ids_of_ranks,
                ranks,
                content=Content.WEIGHTS,
            )
        first_feature = sum(self._splits[: ranks.rank])
        keys = batch.keys()[first_feature : first_feature + num_features]
        return DeferredAwaitable(partial(_to_feature_major, keys, sizes_of_ranks, values, weights))


def _check_item_nbytes(by_rank: Sequence[Sequence[int]]) -> None:
    """Raise RuntimeError unless all ranks have the same bytes per id and per weight."""
    if any(item_nbytes != by_rank[0] for item_nbytes in by_rank):
        texts = [
            f"rank {rank}: ids of {8 * id_nbytes} bits, "
            + (f"weights of {8 * weight_nbytes} bits" if weight_nbytes else "no weights")
            for rank, (id_nbytes, weight_nbytes) in enumerate(by_rank)
        ]
        raise RuntimeError(
            "ids and weights must have the same dtypes on all ranks, and weights must be on all or "
            f"none; got {'; '.join(texts)}"
        )


def _to_feature_major(
    keys: list[str], messages: list[list[int]], values: Any, weights: Any
) -> KeyedJaggedTensor:
    """Return a batch from rank-major messages of lengths and ids.

    Args:
        keys: features of this rank.
        messages: number of bags per feature, then number of ids of each feature, for each rank.
        values: awaitable of the received lengths and ids.
        weights: awaitable of the received weights; None if batches have none.
    """
    strides, num_ids_of_ranks = [row[0] for row in messages], [row[1:] for row in messages]
    num_features = len(keys)
    segment_sizes = [
        n
        for stride, row in zip(strides, num_ids_of_ranks, strict=True)
        for n in [stride] * num_features + row
    ]
    segments = list(values.wait().split(segment_sizes))
    weight_segments = (
        None
        if weights is None
        else list(
            weights.wait().split([n for rank_num_ids in num_ids_of_ranks for n in rank_num_ids])
        )
    )

    def join_by_feature(
        first_segment: int, segments_per_rank: int, tensors: Sequence[Tensor]
    ) -> Tensor:
        ordered = [
            tensors[rank * segments_per_rank + first_segment + feature]
            for feature in range(num_features)
            for rank in range(len(messages))
        ]
        return torch.cat(ordered) if ordered else tensors[0][:0] if tensors else values.wait()

    return KeyedJaggedTensor(
        keys,
        join_by_feature(num_features, 2 * num_features, segments),
        None if weight_segments is None else join_by_feature(0, num_features, weight_segments),
        join_by_feature(0, 2 * num_features, segments).long(),
        stride=sum(strides),
        length_per_key=[sum(row[f] for row in num_ids_of_ranks) for f in range(num_features)],
    )


class KJTList:
    """Batches of several devices."""

    def __init__(self, features: Sequence[Any]) -> None:
        self.features = list(features)

    def __len__(self) -> int:
        return len(self.features)

    def __setitem__(self, key: int, item: Any) -> None:
        self.features[key] = item

    def __getitem__(self, key: int) -> Any:
        return self.features[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.features)

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until the work queued on `stream` is done."""
        for features in self.features:
            features.record_stream(stream)


class ListOfKJTList(KJTList):
    """A `KJTList` per sharding type."""


def rank_device(device_type: str, rank: int) -> torch.device:
    """Return the device of a rank, such as `cuda:rank`; the CPU has no number."""
    return torch.device(device_type) if device_type == "cpu" else torch.device(device_type, rank)


class KJTOneToAll(nn.Module):
    """Copy `splits[r]` features of a batch to device r of this process.

    Args:
        splits: features for each device.
        world_size: the number of devices.
        device: device type of the outputs; None is "cuda" if there are GPUs, else "cpu".

    Raises:
        ValueError: the numbers of splits and devices differ; or, in a call, the features are not
            those of the splits.
    """

    def __init__(
        self, splits: Sequence[int], world_size: int, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self._splits = list(splits)
        if len(self._splits) != world_size:
            raise ValueError(f"splits must be one per device of {world_size}, got {splits}")
        has_gpu = torch.cuda.is_available()
        self._device_type = device.type if device is not None else "cuda" if has_gpu else "cpu"

    def forward(self, kjt: KeyedJaggedTensor) -> KJTList:
        """Return the part of each device."""
        parts = KeyedJaggedTensor.adopt(kjt).split(self._splits)
        if self._device_type == "meta":
            return KJTList(parts)
        return KJTList(
            [
                part.to(rank_device(self._device_type, r), non_blocking=True)
                for r, part in enumerate(parts)
            ]
        )


class _ToOneDevice(nn.Module):
    """Base of modules that bring tensors of several devices to one.

    A call with more than `world_size` tensors raises ValueError; 0 is no limit.
    """

    def __init__(self, device: torch.device, world_size: int = 0) -> None:
        super().__init__()
        self._device, self._world_size = torch.device(device), world_size

    def set_device(self, device_str: str) -> None:
        """Change the device that tensors are brought to."""
        self._device = torch.device(device_str)

    def _move(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._world_size and len(tensors) > self._world_size:
            raise ValueError(
                f"at most {self._world_size} tensors, one per device, got {len(tensors)}"
            )
        return [tensor.to(self._device, non_blocking=True) for tensor in tensors]


class EmbeddingsAllToOne(_ToOneDevice):
    """Concatenate one or more tensors of several devices on one device, along `cat_dim`."""

    def __init__(self, device: torch.device, world_size: int, cat_dim: int) -> None:
        super().__init__(device, world_size)
        self._cat_dim = cat_dim

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the concatenated tensors."""
        return torch.cat(self._move(tensors), self._cat_dim)


class EmbeddingsAllToOneReduce(_ToOneDevice):
    """Add up one or more tensors of several devices on one device, in their order."""

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum."""
        first, *others = self._move(tensors)
        total = first.clone()
        for other in others:
            total += other
        return total


class SeqEmbeddingsAllToOne(_ToOneDevice):
    """Bring tensors of several devices to one, each by itself."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors on the device; those that are there already are not copied."""
        return self._move(tensors)


# Pooled rows


PooledEmbeddingsAwaitable = Awaitable
"""Type that the modules below return; its result is a tensor."""


class _PooledModule(nn.Module):
    """Base of modules that call a collective with pooled rows."""

    def __init__(
        self,
        pg: Any,
        callbacks: Sequence[Callable[[Tensor], Tensor]] | None,
        codecs: QuantizedCommCodecs | None,
    ) -> None:
        super().__init__()
        self._pg, self._codecs, self._callbacks = pg, codecs, list(callbacks or ())

    @property
    def callbacks(self) -> list[Callable[[Tensor], Tensor]]:
        """The functions that replace the result; changes of this list have effect."""
        return self._callbacks

    def _add_callbacks(self, pending: Awaitable[Tensor]) -> Awaitable[Tensor]:
        for callback in self._callbacks:
            pending.then(callback)
        return pending


class PooledEmbeddingsAllToAll(_PooledModule):
    """Send pooled rows `[sum B, D of this rank]`; the result is `[B, sum D]`.

    Args:
        pg: the process group.
        dim_sum_per_rank: columns of each rank.
        device: ignored: outputs are on the device of the input.
        callbacks: functions that replace the result, each called with the one before.
        codecs: encodings of rows and gradients.
    """

    def __init__(
        self,
        pg: Any,
        dim_sum_per_rank: Sequence[Any],
        device: torch.device | None = None,
        callbacks: Sequence[Callable[[Tensor], Tensor]] | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__(pg, callbacks, codecs)
        self._columns = list(dim_sum_per_rank)

    def forward(
        self, local_embs: Tensor, batch_size_per_rank: Sequence[int] | None = None
    ) -> Awaitable[Tensor]:
        """Start to send rows; by default all ranks have the same number of examples."""
        num_ranks = len(self._columns)
        batch_sizes = batch_size_per_rank or [local_embs.size(0) // num_ranks] * num_ranks
        return self._add_callbacks(
            comms.alltoall_pooled(
                local_embs, batch_sizes, self._columns, group=self._pg, codecs=self._codecs
            )
        )


class VariableBatchPooledEmbeddingsAllToAll(PooledEmbeddingsAllToAll):
    """Send pooled rows of features with different batch sizes; both sides are flat.

    `emb_dim_per_rank_per_feature` has the columns of each feature of each rank; the other arguments
    are those of `PooledEmbeddingsAllToAll`.
    """

    def __init__(
        self,
        pg: Any,
        emb_dim_per_rank_per_feature: Sequence[Sequence[int]],
        *more: Any,
        **options: Any,
    ) -> None:
        super().__init__(pg, emb_dim_per_rank_per_feature, *more, **options)

    def forward(  # type: ignore[override]
        self,
        local_embs: Tensor,
        batch_size_per_rank_per_feature: Sequence[Sequence[int]],
        batch_size_per_feature_pre_a2a: Sequence[int],
    ) -> Awaitable[Tensor]:
        """Start to send rows."""
        return self._add_callbacks(
            comms.variable_batch_alltoall_pooled(
                local_embs,
                batch_size_per_rank_per_feature,
                batch_size_per_feature_pre_a2a,
                self._columns,
                group=self._pg,
                codecs=self._codecs,
            )
        )


class PooledEmbeddingsReduceScatter(_PooledModule):
    """Sum over ranks: `[sum B, D]` to `[B of this rank, D]`."""

    def __init__(self, pg: Any, codecs: QuantizedCommCodecs | None = None) -> None:
        super().__init__(pg, None, codecs)

    def forward(
        self, local_embs: Tensor, input_splits: Sequence[int] | None = None
    ) -> Awaitable[Tensor]:
        """Start to add up rows; by default all ranks have the same number of examples."""
        if input_splits:
            return comms.reduce_scatter_v_pooled(
                local_embs, input_splits, group=self._pg, codecs=self._codecs
            )
        return comms.reduce_scatter_base_pooled(local_embs, group=self._pg, codecs=self._codecs)


class PooledEmbeddingsAllGather(_PooledModule):
    """Gather `[B, D]` of all ranks as `[W * B, D]`."""

    def __init__(self, pg: Any, codecs: QuantizedCommCodecs | None = None) -> None:
        super().__init__(pg, None, codecs)

    def forward(self, local_emb: Tensor) -> Awaitable[Tensor]:
        """Start to gather rows."""
        return comms.all_gather_base_pooled(local_emb, group=self._pg, codecs=self._codecs)


SequenceEmbeddingsAwaitable = Awaitable
"""Type that the module below returns; its result is a tensor."""


class SequenceEmbeddingsAllToAll(nn.Module):
    """Send one vector per id back to the ranks that own the ids.

    Args:
        pg: the process group.
        features_per_rank: number of features that each rank looks up.
        device: ignored: outputs are on the device of the input.
        codecs: encodings of vectors and gradients.
    """

    def __init__(
        self,
        pg: Any,
        features_per_rank: Sequence[int],
        device: torch.device | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__()
        self._pg, self._codecs = pg, codecs
        ranks = RankGroup.from_value(pg)
        num_features = features_per_rank[ranks.rank]
        self._rank_major_order = (
            torch.arange(num_features * ranks.size, device="cpu")
            .view(num_features, ranks.size)
            .t()
            .reshape(-1)
        )

    def forward(
        self,
        local_embs: Tensor,
        lengths: Tensor,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        unbucketize_permute_tensor: Tensor | None = None,
        batch_size_per_rank: Sequence[int] | None = None,
        sparse_features_recat: Tensor | None = None,
    ) -> Awaitable[Tensor]:
        """Start to send vectors; arguments are as for `alltoall_sequence`.

        `unbucketize_permute_tensor` has the position of each id of the batch in the result, and
        `sparse_features_recat` the order that received bags were brought into where batch sizes
        differ by rank; `batch_size_per_rank` is ignored.
        """
        order, positions = self._rank_major_order, unbucketize_permute_tensor
        if sparse_features_recat is not None:
            order = sparse_features_recat.argsort()
        pending = comms.alltoall_sequence(
            local_embs,
            order,
            None,
            lengths,
            input_splits,
            output_splits,
            group=self._pg,
            codecs=self._codecs,
        )
        if positions is None:
            return pending
        return pending.then(lambda vectors: vectors.index_select(0, positions))


def construct_output_kt(
    embeddings: Sequence[Tensor], embedding_names: Sequence[str], embedding_dims: Sequence[int]
) -> KeyedTensor:
    """Return pooled rows `[B, D]`, at least one tensor, as one keyed tensor."""
    return KeyedTensor(embedding_names, embedding_dims, torch.cat(list(embeddings), 1))


def embeddings_cat_empty_rank_handle(
    embeddings: Sequence[Tensor], dummy_embs_tensor: Tensor, dim: int = 0
) -> Tensor:
    """Concatenate tensors; without any, return `dummy_embs_tensor`."""
    return torch.cat(list(embeddings), dim) if embeddings else dummy_embs_tensor


def fx_wrap_tensor_view2d(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """Return `x.view(dim0, dim1)`."""
    return x.view(dim0, dim1)


class CommOpGradientScaling(torch.autograd.Function):
    """Multiply the gradient of a tensor; its values stay as they are."""

    @staticmethod
    def forward(ctx: Any, input_tensor: Tensor, scale_gradient_factor: float) -> Tensor:
        """Return the tensor."""
        ctx.scale = scale_gradient_factor
        return input_tensor.view_as(input_tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Scale the gradient."""
        return grad_output * ctx.scale, None
