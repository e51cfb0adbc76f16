"""TorchRec's modules that send batches and rows, and its functions of ranks and nodes.

`pg` is a process group; None is all processes. Modules that send are collectives: all ranks of the
group must construct and call them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from emblib.compat import torchrec_comms as comms
from emblib.compat.checks import check_positive
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
    """Return whether this process is rank `leader_rank` of `pg`; True for None."""
    return pg is None or RankGroup.from_value(pg).rank == leader_rank


def invoke_on_rank_and_broadcast_result(
    pg: Any, rank: int, func: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Call `func` on rank `rank`, and return its result on every rank; all ranks must call this."""
    return invoke_on_rank(RankGroup.from_value(pg), rank, func, *args, **kwargs)


def run_on_leader(pg: Any, rank: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Return a decorator: rank `rank` runs the function, and every rank gets its result."""

    def decorate(func: Callable[..., T]) -> Callable[..., T]:
        @wraps(func)
        def call(*args: Any, **kwargs: Any) -> T:
            return invoke_on_rank_and_broadcast_result(pg, rank, func, *args, **kwargs)

        return call

    return decorate


def get_local_size(world_size: int | None = None) -> int:
    """Return the number of ranks per node: LOCAL_WORLD_SIZE if it divides `world_size`, else all.

    `world_size` None is the number of processes; below 1 it raises ValueError, here and below.
    """
    num_ranks = RankGroup().size if world_size is None else check_positive("world_size", world_size)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    is_divisor = 0 < local_size <= num_ranks and num_ranks % local_size == 0
    return local_size if is_divisor else num_ranks


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return the number of a rank within its node; None is this process."""
    return (RankGroup().rank if rank is None else rank) % get_local_size(world_size)


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Return the number of the node of a rank; None is this process."""
    return (RankGroup().rank if rank is None else rank) // get_local_size(world_size)


def get_num_groups(world_size: int | None = None) -> int:
    """Return the number of nodes; `world_size` None is the number of processes."""
    size = RankGroup().size if world_size is None else world_size
    return size // get_local_size(size)


def intra_and_cross_node_pg(
    device: torch.device | None = None, backend: str | None = None
) -> tuple[Any, Any]:
    """Return two new process groups: the ranks of this node, and the ranks with this local number.

    All processes must call this. Unlike in TorchRec, each call makes new groups, also of a single
    rank. For the device `meta` both are None.

    Raises:
        ValueError: `backend` is not None: the groups use the backend of all processes.
    """
    if device is not None and device.type == "meta":
        return None, None
    if backend is not None:
        raise ValueError("the groups use the backend of all processes: leave backend out")
    return make_node_groups(RankGroup(local_size=get_local_size()))


# Batches


class KJTAllToAll(nn.Module):
    """Send features of a batch to the ranks that look them up.

    The result has the features of this rank, with the examples of all ranks, rank 0 first.

    Args:
        pg: process group.
        splits: number of features for each rank, in the order of the batch.
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

        The first `wait` raises RuntimeError on all ranks if ids or weights have dtypes of different
        sizes on different ranks, or if only some ranks have weights.

        Raises:
            ValueError: features differ in batch size, or their number is not the sum of `splits`.
                Only this rank raises; the others wait for it.
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
            [3 + split for split in self._splits],
            [3 + num_features] * ranks.size,
            ranks,
            content=Content.SIZES,
        )
        return DeferredAwaitable(partial(self._send, batch, rank_batches, pending))

    def _send(
        self, batch: KeyedJaggedTensor, rank_batches: Sequence[KeyedJaggedTensor], pending: Any
    ) -> Awaitable[KeyedJaggedTensor]:
        """Receive the sizes, then send `rank_batches[r]` to rank r.

        The message to a rank has the lengths of its features, then their ids, in the dtype of the
        ids. Weights are a second message.
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
            num_features * stride + num_ids
            for stride, num_ids in zip(strides, num_ids_of_ranks, strict=True)
        ]
        message = torch.cat(message_parts) if message_parts else batch.values()[:0]
        values = start_all_to_all(message, sent_sizes, received_sizes, ranks, content=Content.IDS)
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


def _check_item_nbytes(nbytes_by_rank: Sequence[Sequence[int]]) -> None:
    """Raise RuntimeError unless all ranks have the same bytes per id and per weight.

    `nbytes_by_rank` has both numbers for each rank, 0 bytes for no weights.
    """
    if any(item_nbytes != nbytes_by_rank[0] for item_nbytes in nbytes_by_rank):
        rank_texts = [
            f"rank {rank}: ids of {8 * id_nbytes} bits, "
            + (f"weights of {8 * weight_nbytes} bits" if weight_nbytes else "no weights")
            for rank, (id_nbytes, weight_nbytes) in enumerate(nbytes_by_rank)
        ]
        raise RuntimeError(
            "ids and weights must have the same dtypes on all ranks, and weights must be on all or "
            f"none; got {'; '.join(rank_texts)}"
        )


def _to_feature_major(
    keys: list[str], sizes_of_ranks: list[list[int]], values: Any, weights: Any
) -> KeyedJaggedTensor:
    """Return a batch from rank-major messages of lengths and ids.

    Args:
        keys: features of this rank.
        sizes_of_ranks: number of bags per feature, then numbers of ids of each feature, of each
            rank.
        values: awaitable of the received lengths and ids.
        weights: awaitable of the received weights; None if batches have none.
    """
    strides = [row[0] for row in sizes_of_ranks]
    num_ids_of_ranks = [row[1:] for row in sizes_of_ranks]
    num_features = len(keys)
    segment_sizes = [
        size
        for stride, row in zip(strides, num_ids_of_ranks, strict=True)
        for size in [stride] * num_features + row
    ]
    segments = list(values.wait().split(segment_sizes))
    weight_segments = None
    if weights is not None:
        weight_segments = list(weights.wait().split(list(itertools.chain(*num_ids_of_ranks))))

    def join_by_feature(
        first_segment: int, segments_per_rank: int, tensors: Sequence[Tensor]
    ) -> Tensor:
        feature_major = [
            tensors[rank * segments_per_rank + first_segment + feature]
            for feature in range(num_features)
            for rank in range(len(sizes_of_ranks))
        ]
        if feature_major:
            return torch.cat(feature_major)
        return tensors[0][:0] if tensors else values.wait()

    return KeyedJaggedTensor(
        keys,
        join_by_feature(num_features, 2 * num_features, segments),
        None if weight_segments is None else join_by_feature(0, num_features, weight_segments),
        join_by_feature(0, 2 * num_features, segments).long(),
        stride=sum(strides),
        length_per_key=[sum(row[f] for row in num_ids_of_ranks) for f in range(num_features)],
    )


class KJTList:
    """List of batches, one per device."""

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
        """Keep the memory of all batches until the work queued on `stream` is done."""
        for features in self.features:
            features.record_stream(stream)


class ListOfKJTList(KJTList):
    """A `KJTList` per sharding type."""


def rank_device(device_type: str, rank: int) -> torch.device:
    """Return the device of a rank, e.g. `cuda:3`; a CPU has no number."""
    return torch.device(device_type) if device_type == "cpu" else torch.device(device_type, rank)


class KJTOneToAll(nn.Module):
    """Copy features of a batch to the devices of this process that look them up.

    Args:
        splits: number of features for each device, in the order of the batch.
        world_size: number of devices.
        device: device whose type the outputs have; None is a GPU if there is one, else the CPU.

    Raises:
        ValueError: the numbers of splits and devices differ; or, in a call, the number of features
            is not the sum of `splits`.
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
        """Return the features of each device; on the type `meta` they are not copied."""
        parts = KeyedJaggedTensor.adopt(kjt).split(self._splits)
        if self._device_type == "meta":
            return KJTList(parts)
        return KJTList(
            [
                part.to(rank_device(self._device_type, rank), non_blocking=True)
                for rank, part in enumerate(parts)
            ]
        )


class _ToOneDevice(nn.Module):
    """Base of modules that copy tensors of several devices to one.

    Args:
        device: the one device.
        world_size: maximum number of tensors in a call, else ValueError is raised; 0 for no limit.
    """

    def __init__(self, device: torch.device, world_size: int = 0) -> None:
        super().__init__()
        self._device, self._world_size = torch.device(device), world_size

    def set_device(self, device_str: str) -> None:
        """Set the device that tensors are copied to."""
        self._device = torch.device(device_str)

    def _move(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._world_size and len(tensors) > self._world_size:
            raise ValueError(
                f"at most {self._world_size} tensors, one per device, got {len(tensors)}"
            )
        return [tensor.to(self._device, non_blocking=True) for tensor in tensors]


class EmbeddingsAllToOne(_ToOneDevice):
    """Concatenate tensors of several devices, at least one, on one device along `cat_dim`."""

    def __init__(self, device: torch.device, world_size: int, cat_dim: int) -> None:
        super().__init__(device, world_size)
        self._cat_dim = cat_dim

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the concatenated tensors."""
        return torch.cat(self._move(tensors), self._cat_dim)


class EmbeddingsAllToOneReduce(_ToOneDevice):
    """Add up tensors of several devices, at least one, on one device, in their order."""

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the sum; raise ValueError if there is no tensor."""
        if not tensors:
            raise ValueError("there must be at least one tensor to add up, got none")
        first, *others = self._move(tensors)
        total = first.clone()
        for other in others:
            total += other
        return total


class SeqEmbeddingsAllToOne(_ToOneDevice):
    """Copy tensors of several devices to one device."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors on the device; those that are there already are not copied."""
        return self._move(tensors)


# Pooled rows


PooledEmbeddingsAwaitable = Awaitable
"""Type of the results of the modules below: awaitables of a tensor."""


class _PooledModule(nn.Module):
    """Base of modules that call a collective with pooled rows.

    Args:
        pg: process group.
        callbacks: functions that replace the result, each called with the result of the one before.
        codecs: encodings of rows and gradients; None for none.
    """

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
        """Functions that replace the result; the list may be changed."""
        return self._callbacks

    def _add_callbacks(self, pending: Awaitable[Tensor]) -> Awaitable[Tensor]:
        for callback in self._callbacks:
            pending.then(callback)
        return pending


class PooledEmbeddingsAllToAll(_PooledModule):
    """Send pooled rows `[sum B, D of this rank]` to the ranks of the examples, to `[B, sum D]`.

    Args:
        pg: process group.
        dim_sum_per_rank: number of columns of each rank.
        device: ignored: outputs are on the device of the input.
        callbacks: functions that replace the result, each called with the result of the one before.
        codecs: encodings of rows and gradients; None for none.
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
        """Start to send rows.

        `batch_size_per_rank` are the examples of each rank; None means equal numbers.
        """
        num_ranks = len(self._columns)
        batch_sizes = batch_size_per_rank or [local_embs.size(0) // num_ranks] * num_ranks
        return self._add_callbacks(
            comms.alltoall_pooled(
                local_embs, batch_sizes, self._columns, group=self._pg, codecs=self._codecs
            )
        )


class VariableBatchPooledEmbeddingsAllToAll(PooledEmbeddingsAllToAll):
    """Send pooled rows of features with different batch sizes; input and output are flat.

    `emb_dim_per_rank_per_feature` are the columns of each feature of each rank. Other arguments are
    those of `PooledEmbeddingsAllToAll`. `comms.variable_batch_alltoall_pooled` has the layouts.
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
        """Start to send rows.

        Args:
            local_embs: flat rows of the features of this rank, for the examples of all ranks.
            batch_size_per_rank_per_feature: examples of each rank and feature of this rank.
            batch_size_per_feature_pre_a2a: examples of this rank of each feature of all ranks.
        """
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
    """Add up rows over ranks: `[sum B, D]` to `[B of this rank, D]`."""

    def __init__(self, pg: Any, codecs: QuantizedCommCodecs | None = None) -> None:
        super().__init__(pg, None, codecs)

    def forward(
        self, local_embs: Tensor, input_splits: Sequence[int] | None = None
    ) -> Awaitable[Tensor]:
        """Start to add up rows.

        `input_splits` are the examples of each rank; None means equal numbers.
        """
        if input_splits:
            return comms.reduce_scatter_v_pooled(
                local_embs, input_splits, group=self._pg, codecs=self._codecs
            )
        return comms.reduce_scatter_base_pooled(local_embs, group=self._pg, codecs=self._codecs)


class PooledEmbeddingsAllGather(_PooledModule):
    """Gather rows `[B, D]` of all W ranks: `[W * B, D]`."""

    def __init__(self, pg: Any, codecs: QuantizedCommCodecs | None = None) -> None:
        super().__init__(pg, None, codecs)

    def forward(self, local_emb: Tensor) -> Awaitable[Tensor]:
        """Start to gather rows."""
        return comms.all_gather_base_pooled(local_emb, group=self._pg, codecs=self._codecs)


SequenceEmbeddingsAwaitable = Awaitable
"""Type of the result of the module below: an awaitable of a tensor."""


class SequenceEmbeddingsAllToAll(nn.Module):
    """Send one vector per id back to the ranks whose batches have the ids.

    Args:
        pg: process group.
        features_per_rank: number of features that each rank looks up.
        device: ignored: outputs are on the device of the input.
        codecs: encodings of vectors and gradients; None for none.
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
        """Start to send vectors.

        Args:
            local_embs: vectors `[N, D]`, by feature, then by rank.
            lengths: number of ids per bag, in the order of the vectors.
            input_splits: number of ids that this rank sent to each rank.
            output_splits: number of ids that this rank received from each rank.
            unbucketize_permute_tensor: position in the result of each id of the batch; None for
                the order of the result.
            batch_size_per_rank: ignored.
            sparse_features_recat: order into which the received bags were brought, if batch sizes
                differ by rank; else None.
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
    """Return tensors of pooled rows `[B, D]`, at least one, as one keyed tensor."""
    return KeyedTensor(embedding_names, embedding_dims, torch.cat(list(embeddings), 1))


def embeddings_cat_empty_rank_handle(
    embeddings: Sequence[Tensor], dummy_embs_tensor: Tensor, dim: int = 0
) -> Tensor:
    """Concatenate tensors; if there are none, return `dummy_embs_tensor`."""
    return torch.cat(list(embeddings), dim) if embeddings else dummy_embs_tensor


def fx_wrap_tensor_view2d(x: Tensor, dim0: int, dim1: int) -> Tensor:
    """Return `x.view(dim0, dim1)`."""
    return x.view(dim0, dim1)


class CommOpGradientScaling(torch.autograd.Function):
    """Function that returns a tensor, and multiplies its gradient by a factor."""

    @staticmethod
    def forward(ctx: Any, input_tensor: Tensor, scale_gradient_factor: float) -> Tensor:
        """Return the values of the tensor."""
        ctx.scale = scale_gradient_factor
        return input_tensor.view_as(input_tensor)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Return the gradient times the factor."""
        return grad_output * ctx.scale, None
