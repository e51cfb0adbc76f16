"""Collectives of embeddings, as functions with gradients.

Each function starts a collective and returns an `Awaitable`, so other work overlaps until `wait`.
In host memory the function returns once all ranks have called it (see headers in
`emblib.sharding.all_to_all`). Backward overlaps too: it sends the gradient of the output as soon as
it is known, and waits when the gradient of the input is needed. Messages may be empty or uneven.
Sums are float32 (float64 for float64) in rank order, so they are reproducible. Sharded collections
do not use these functions, but `emblib.sharding.lookup`.

Every rank must call the same collectives in the same order, and either all ranks or none must pass
tensors that require gradients; a rank without values passes an empty tensor that does. The
functions have these arguments in common:

- `values`: floating-point, on the device of the ranks; must not change before `wait`. Results have
  their dtype and device.
- `ranks`: the processes; W is their number.
- `comm_precision`: the codecs in both directions, equal on all ranks.
- `gradients`: whether backward divides by the number of ranks (`MEAN`, which matches DDP's averaged
  gradients of the dense part) or not (`SUM`, the gradient of the sum of all ranks' losses).

In shapes, B[r] is the number of examples of rank r, D the number of columns, and `rank` this rank.

Arguments of a rank that do not fit together raise ValueError, and a dtype that is not
floating-point raises TypeError. They raise on that rank alone, before it sends anything, and the
other ranks wait for it. Sizes to send and to receive that differ raise RuntimeError, on all ranks.
With several ranks, sizes are compared only in host memory.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

import torch
from torch import Tensor

from emblib.ops.derivatives import once_differentiable
from emblib.sharding.all_to_all import start_all_gather, start_all_to_all
from emblib.sharding.awaitables import Awaitable
from emblib.sharding.codecs import Codec, CommPrecision, check_comm_precision
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharded_tables import GradientReduction
from emblib.specs import OptionEnum

_FLOAT32 = CommPrecision()


def alltoall_pooled(
    values: Tensor,
    batch_sizes: Sequence[int],
    columns: Sequence[int],
    ranks: RankGroup,
    *,
    comm_precision: CommPrecision = _FLOAT32,
    gradients: GradientReduction | str = GradientReduction.MEAN,
) -> Awaitable[Tensor]:
    """Send pooled rows to the ranks that own the examples, and concatenate features of all ranks.

    Args:
        values: `[sum B, columns[rank]]`, the features of this rank for the examples of all ranks,
            rank after rank.
        batch_sizes: B, the number of examples per rank.
        columns: number of columns of the features of each rank.
        ranks: the processes, which all call this.
        comm_precision: the codecs.
        gradients: the mean or the sum over ranks.

    Returns:
        An awaitable of `[B[rank], sum columns]`: the features of rank 0, 1, ... side by side, for
        the examples of this rank.
    """
    _check_ranks("batch_sizes", batch_sizes, ranks)
    _check_ranks("columns", columns, ranks)
    _check_matrix(values, sum(batch_sizes), "the sum of batch_sizes")
    num_local_columns, num_examples = columns[ranks.rank], batch_sizes[ranks.rank]
    if values.size(1) != num_local_columns:
        raise ValueError(
            f"values must have {num_local_columns} columns, columns[{ranks.rank}] of this rank: "
            f"got {values.size(1)}"
        )
    received_elements = [num_examples * num_columns for num_columns in columns]

    def join_columns(received: Tensor) -> Tensor:
        blocks = zip(received.split(received_elements), columns, strict=True)
        return torch.cat(
            [block.view(num_examples, num_columns) for block, num_columns in blocks], 1
        )

    return _start_collective(
        values,
        [batch_size * num_local_columns for batch_size in batch_sizes],
        received_elements,
        ranks,
        pattern=_Pattern.PARTS,
        comm_precision=comm_precision,
        gradients=gradients,
    ).then(join_columns)


def alltoallv(
    values: Sequence[Tensor],
    batch_sizes: Sequence[int],
    columns: Sequence[Sequence[int]],
    ranks: RankGroup,
    *,
    comm_precision: CommPrecision = _FLOAT32,
    gradients: GradientReduction | str = GradientReduction.MEAN,
    dtype: torch.dtype = torch.float32,
) -> Awaitable[list[Tensor]]:
    """Do the same as `alltoall_pooled`, with one tensor per table in arguments and result.

    Args:
        values: a tensor `[sum B, columns[rank][i]]` for each table i of this rank.
        batch_sizes: B, the number of examples per rank.
        columns: number of columns of each table of each rank.
        ranks: the processes, which all call this.
        comm_precision: the codecs.
        gradients: the mean or the sum over ranks.
        dtype: dtype of all tensors, also of a rank without tables.

    Returns:
        An awaitable of a list with a tensor `[B[rank], n]` for each number n of `columns[0]`,
        `columns[1]`, and so on.

    Raises:
        TypeError: `values` are not of `dtype`, or it is not floating-point.
    """
    _check_ranks("batch_sizes", batch_sizes, ranks)
    _check_ranks("columns", columns, ranks)
    _check_floating(dtype)
    for tensor in values:
        _check_matrix(tensor, sum(batch_sizes), "the sum of batch_sizes")
    local_columns = [tensor.size(1) for tensor in values]
    if local_columns != list(columns[ranks.rank]):
        raise ValueError(
            f"values must have the columns {list(columns[ranks.rank])} of columns[{ranks.rank}]: "
            f"got {local_columns}"
        )
    if any(tensor.dtype != dtype for tensor in values):
        raise TypeError(
            f"values must all be {dtype}, got {[tensor.dtype for tensor in values]}: give the "
            "dtype that all ranks' values have"
        )
    empty = torch.empty(sum(batch_sizes), 0, dtype=dtype, device=ranks.device, requires_grad=True)
    joined = torch.cat(list(values), 1) if values else empty
    columns_of_tables = list(itertools.chain(*columns))
    awaitable = alltoall_pooled(
        joined,
        batch_sizes,
        [sum(table_columns) for table_columns in columns],
        ranks,
        comm_precision=comm_precision,
        gradients=gradients,
    )
    return awaitable.then(lambda received: list(received.split(columns_of_tables, 1)))


def variable_batch_alltoall_pooled(
    values: Tensor,
    batch_sizes: Sequence[Sequence[int]],
    local_batch_sizes: Sequence[int],
    columns: Sequence[Sequence[int]],
    ranks: RankGroup,
    *,
    comm_precision: CommPrecision = _FLOAT32,
    gradients: GradientReduction | str = GradientReduction.MEAN,
) -> Awaitable[Tensor]:
    """Send pooled rows of features with different batch sizes, flat in argument and result.

    Args:
        values: flat; for each rank r, for each feature f of this rank, `batch_sizes[r][f]` rows of
            `columns[rank][f]` columns.
        batch_sizes: `batch_sizes[r][f]` is the number of examples of rank r for feature f of this
            rank.
        local_batch_sizes: number of examples of this rank for each feature of rank 0, 1, and so on.
        columns: number of columns of each feature of each rank.
        ranks: the processes, which all call this.
        comm_precision: the codecs.
        gradients: the mean or the sum over ranks.

    Returns:
        An awaitable of a flat tensor: for each feature of rank 0, 1, and so on, the rows of this
        rank's examples, as many as `local_batch_sizes` says.
    """
    _check_ranks("batch_sizes", batch_sizes, ranks)
    _check_ranks("columns", columns, ranks)
    local_columns = columns[ranks.rank]
    for rank, rank_batch_sizes in enumerate(batch_sizes):
        if len(rank_batch_sizes) != len(local_columns):
            raise ValueError(
                f"batch_sizes[{rank}] must have an entry for each of the {len(local_columns)} "
                f"features of this rank, as columns[{ranks.rank}] has: got {list(rank_batch_sizes)}"
            )
    sent_elements = [
        sum(map(mul, rank_batch_sizes, local_columns)) for rank_batch_sizes in batch_sizes
    ]
    if list(values.shape) != [sum(sent_elements)]:
        raise ValueError(
            f"values must be flat and have {sum(sent_elements)} elements, batch_sizes times "
            f"columns[{ranks.rank}]: got {list(values.shape)}"
        )
    num_features = sum(map(len, columns))
    if len(local_batch_sizes) != num_features:
        raise ValueError(
            f"local_batch_sizes must have an entry for each of the {num_features} features of all "
            f"ranks: got {len(local_batch_sizes)}"
        )
    sizes = iter(local_batch_sizes)
    received_elements = [
        sum(next(sizes) * num_columns for num_columns in rank_columns) for rank_columns in columns
    ]
    return _start_collective(
        values,
        sent_elements,
        received_elements,
        ranks,
        pattern=_Pattern.PARTS,
        comm_precision=comm_precision,
        gradients=gradients,
    )


def alltoall_sequence(
    values: Tensor,
    sizes: Sequence[int],
    received_sizes: Sequence[int],
    ranks: RankGroup,
    *,
    comm_precision: CommPrecision = _FLOAT32,
    gradients: GradientReduction | str = GradientReduction.MEAN,
) -> Awaitable[Tensor]:
    """Send unpooled rows to other ranks.

    Args:
        values: `[sum sizes, D]`, the rows for rank 0, 1, and so on.
        sizes: number of rows to each rank.
        received_sizes: number of rows from each rank.
        ranks: the processes, which all call this.
        comm_precision: the codecs.
        gradients: the mean or the sum over ranks.

    Returns:
        An awaitable of `[sum received_sizes, D]`, the rows from rank 0, 1, and so on.
    """
    _check_ranks("sizes", sizes, ranks)
    _check_ranks("received_sizes", received_sizes, ranks)
    _check_matrix(values, sum(sizes), "the sum of sizes")
    num_columns = values.size(1)
    sent_elements = [size * num_columns for size in sizes]
    received_elements = [size * num_columns for size in received_sizes]
    num_rows = sum(received_sizes)
    return _start_collective(
        values,
        sent_elements,
        received_elements,
        ranks,
        pattern=_Pattern.PARTS,
        comm_precision=comm_precision,
        gradients=gradients,
    ).then(lambda received_rows: received_rows.view(num_rows, num_columns))


def reduce_scatter_pooled(
    values: Sequence[Tensor],
    ranks: RankGroup,
    *,
    comm_precision: CommPrecision = _FLOAT32,
    gradients: GradientReduction | str = GradientReduction.MEAN,
) -> Awaitable[Tensor]:
    """Sum rows over ranks: `values[r]`, `[B[r], D]`, are the rows of this rank for rank r.

    D is equal for all r. The other arguments are those of `reduce_scatter_v_pooled`.

    Returns:
        An awaitable of `[B[rank], D]`, the sum of the rows of all ranks for this rank.
    """
    _check_ranks("values", values, ranks)
    shapes = [list(tensor.shape) for tensor in values]
    if any(len(shape) != 2 or shape[1] != shapes[0][1] for shape in shapes):
        raise ValueError(f"values must be matrices [B[r], D] of one D, got shapes {shapes}")
    batch_sizes = [tensor.size(0) for tensor in values]
    all_values = torch.cat(list(values))
    return reduce_scatter_v_pooled(
        all_values, batch_sizes, ranks, comm_precision=comm_precision, gradients=gradients
    )


def reduce_scatter_base_pooled(
    values: Tensor,
    ranks: RankGroup,
    *,
    comm_precision: CommPrecision = _FLOAT32,
    gradients: GradientReduction | str = GradientReduction.MEAN,
) -> Awaitable[Tensor]:
    """Sum rows over ranks, with an equal number B of rows for each rank.

    Args:
        values: `[W * B, D]`, the rows of this rank for rank 0, 1, and so on.
        ranks: the processes, which all call this.
        comm_precision: the codecs.
        gradients: the mean or the sum over ranks.

    Returns:
        An awaitable of `[B, D]`, the sum of the rows of all ranks for this rank.
    """
    _check_matrix(values)
    if values.size(0) % ranks.size:
        raise ValueError(
            f"values must have as many rows for each of {ranks.size} ranks, got {values.size(0)} "
            "in all; with other numbers use reduce_scatter_v_pooled"
        )
    batch_sizes = [values.size(0) // ranks.size] * ranks.size
    return reduce_scatter_v_pooled(
        values, batch_sizes, ranks, comm_precision=comm_precision, gradients=gradients
    )


def reduce_scatter_v_pooled(
    values: Tensor,
    batch_sizes: Sequence[int],
    ranks: RankGroup,
    *,
    comm_precision: CommPrecision = _FLOAT32,
    gradients: GradientReduction | str = GradientReduction.MEAN,
) -> Awaitable[Tensor]:
    """Sum rows over ranks.

    Args:
        values: `[sum B, D]`, the rows of this rank for rank 0, 1, and so on.
        batch_sizes: B, the number of rows for each rank.
        ranks: the processes, which all call this.
        comm_precision: the codecs.
        gradients: the mean or the sum over ranks.

    Returns:
        An awaitable of `[B[rank], D]`, the sum of the rows of all ranks for this rank.
    """
    _check_ranks("batch_sizes", batch_sizes, ranks)
    _check_matrix(values, sum(batch_sizes), "the sum of batch_sizes")
    num_columns, num_examples = values.size(1), batch_sizes[ranks.rank]
    return _start_collective(
        values,
        [size * num_columns for size in batch_sizes],
        [num_examples * num_columns] * ranks.size,
        ranks,
        pattern=_Pattern.SUMS,
        comm_precision=comm_precision,
        gradients=gradients,
    ).then(lambda sums: sums.view(num_examples, num_columns))


def all_gather_base_pooled(
    values: Tensor,
    ranks: RankGroup,
    *,
    batch_sizes: Sequence[int] | None = None,
    comm_precision: CommPrecision = _FLOAT32,
    gradients: GradientReduction | str = GradientReduction.MEAN,
) -> Awaitable[Tensor]:
    """Gather the rows of all ranks on every rank; backward sums their gradients over ranks.

    Args:
        values: `[B[rank], D]`, the rows of this rank.
        ranks: the processes, which all call this.
        batch_sizes: B, the number of rows of each rank; None if all ranks have as many.
        comm_precision: the codecs.
        gradients: the mean or the sum over ranks.

    Returns:
        An awaitable of `[sum B, D]`, the rows of rank 0, 1, and so on.
    """
    _check_matrix(values)
    sizes = [values.size(0)] * ranks.size if batch_sizes is None else list(batch_sizes)
    _check_ranks("batch_sizes", sizes, ranks)
    _check_matrix(values, sizes[ranks.rank], f"batch_sizes[{ranks.rank}] of this rank")
    num_columns, num_rows = values.size(1), sum(sizes)
    return _start_collective(
        values,
        [values.numel()] * ranks.size,
        [size * num_columns for size in sizes],
        ranks,
        pattern=_Pattern.COPIES,
        comm_precision=comm_precision,
        gradients=gradients,
    ).then(lambda received_rows: received_rows.view(num_rows, num_columns))


def _start_collective(
    values: Tensor,
    sent_elements: Sequence[int],
    received_elements: Sequence[int],
    ranks: RankGroup,
    *,
    pattern: _Pattern,
    comm_precision: CommPrecision,
    gradients: GradientReduction | str,
) -> Awaitable[Tensor]:
    """Start a collective whose backward is the opposite one; numbers of elements are per rank."""
    comm_precision = check_comm_precision(comm_precision)
    _check_floating(values.dtype)
    sent_sizes, received_sizes = tuple(sent_elements), tuple(received_elements)
    directions = (
        _Direction(pattern, sent_sizes, received_sizes, comm_precision.forward, ranks),
        _Direction(
            _BACKWARD_PATTERNS[pattern], received_sizes, sent_sizes, comm_precision.backward, ranks
        ),
    )
    return _CollectiveAwaitable(values, _CollectiveState(directions, GradientReduction(gradients)))


class _Pattern(OptionEnum):
    """The part of a rank's values that each other rank gets."""

    PARTS = "parts"  # each rank gets another part
    COPIES = "copies"  # each rank gets all values
    SUMS = "sums"  # each rank gets another part, and adds up the parts from all ranks


_BACKWARD_PATTERNS = {
    _Pattern.PARTS: _Pattern.PARTS,
    _Pattern.COPIES: _Pattern.SUMS,
    _Pattern.SUMS: _Pattern.COPIES,
}


@dataclass(frozen=True)
class _Direction:
    """One direction of a collective.

    The sizes are numbers of values sent to and received from each rank; `codec` encodes them.
    """

    pattern: _Pattern
    sent_sizes: tuple[int, ...]
    received_sizes: tuple[int, ...]
    codec: Codec
    ranks: RankGroup

    def start(self, values: Tensor) -> Any:
        """Start to send flat `values`: those for each rank, or for COPIES those for all ranks."""
        splits, encoding = self.codec.payload_splits, _encoding_checksum(self.codec, values.dtype)
        if self.pattern is _Pattern.COPIES:
            payload = self.codec.encode(values, self.sent_sizes[:1])
            received_sizes = splits(self.received_sizes)
            return start_all_gather(payload, received_sizes, self.ranks, encoding=encoding)
        payload = self.codec.encode(values, self.sent_sizes)
        sent_sizes, received_sizes = splits(self.sent_sizes), splits(self.received_sizes)
        return start_all_to_all(payload, sent_sizes, received_sizes, self.ranks, encoding=encoding)

    def finish(self, pending: Any, dtype: torch.dtype) -> Tensor:
        """Wait for the collective; return the values of all ranks, or their sum, in `dtype`."""
        if self.pattern is not _Pattern.SUMS:
            return self.codec.decode(pending.wait(), self.received_sizes, dtype)
        sum_dtype = torch.promote_types(dtype, torch.float32)
        values = self.codec.decode(pending.wait(), self.received_sizes, sum_dtype)
        values_by_rank = values.view(self.ranks.size, -1)
        total = values_by_rank[0].clone()
        for rank_values in values_by_rank[1:]:
            total.add_(rank_values)
        return total.to(dtype)


class _CollectiveState:
    """State of a collective between its start and its end, in either direction.

    `pending` is the collective in flight: of the values, later of their gradient; None between.
    Values and gradient have the `dtype`.
    """

    def __init__(
        self, directions: tuple[_Direction, _Direction], gradients: GradientReduction
    ) -> None:
        self.forward, self.backward = directions
        self.divisor = directions[0].ranks.size if gradients is GradientReduction.MEAN else 1
        self.pending: Any = None
        self.dtype = torch.float32


class _StartNode(torch.autograd.Function):
    """Sends values; backward waits for their gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, state: _CollectiveState) -> Tensor:
        """Return an empty tensor, which connects the end to the start in autograd."""
        ctx.state = state
        state.pending, state.dtype = state.forward.start(values), values.dtype
        return values.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Wait for the gradient of the sent values."""
        state: _CollectiveState = ctx.state
        pending, state.pending = state.pending, None
        result = state.backward.finish(pending, state.dtype)
        return (result.div_(state.divisor) if state.divisor > 1 else result), None


class _EndNode(torch.autograd.Function):
    """Waits for values; backward sends their gradient."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, state: _CollectiveState) -> Tensor:
        """Wait for the values."""
        ctx.state = state
        pending, state.pending = state.pending, None
        return state.forward.finish(pending, state.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Start sending the gradient; `_StartNode.backward` waits for it."""
        ctx.state.pending = ctx.state.backward.start(grad.contiguous().view(-1))
        return grad.new_empty(0), None


class _CollectiveAwaitable(Awaitable[Tensor]):
    """A collective with a gradient; its result is flat."""

    def __init__(self, values: Tensor, state: _CollectiveState) -> None:
        super().__init__()
        self._state = state
        self._token: Tensor = _StartNode.apply(values.reshape(-1), state)

    def _wait_impl(self) -> Tensor:
        result: Tensor = _EndNode.apply(self._token, self._state)
        return result


def _encoding_checksum(codec: Codec, dtype: torch.dtype) -> int:
    """Return a checksum of a codec and the dtype of its values, the same in all processes."""
    text = str(codec)
    name = type(codec).__name__ if " at 0x" in text else text
    return zlib.crc32(f"{name} {dtype}".encode())


def _check_ranks(name: str, values_by_rank: Sequence[Any], ranks: RankGroup) -> None:
    if len(values_by_rank) != ranks.size:
        raise ValueError(
            f"{name} must have an entry for each of {ranks.size} ranks: got {values_by_rank}"
        )
    if any(isinstance(value, int | float) and value < 0 for value in values_by_rank):
        raise ValueError(f"{name} must be >= 0, got {values_by_rank}")


def _check_floating(dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(f"values must be floating, got {dtype}")


def _check_matrix(values: Tensor, num_rows: int | None = None, num_rows_name: str = "") -> None:
    """Raise ValueError unless `values` is a matrix, of `num_rows` rows if it is not None.

    `num_rows_name` names the number of rows by the arguments of the caller.
    """
    if values.dim() != 2 or num_rows not in (None, values.size(0)):
        expected = "" if num_rows is None else f" and {num_rows} rows, {num_rows_name}"
        raise ValueError(f"values must have 2 dimensions{expected}: got {list(values.shape)}")
