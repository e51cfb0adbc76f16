"""Compute tensor-train cores from a dense table: TT-SVD, and a fit weighted by access counts.

The algorithm is that of Oseledets (2011). The table is cut between each two cores in turn. At a cut
it is a matrix: its rows are numbered by the digits left of the cut, its columns by the digits right
of it. This matrix is replaced by its best approximation of the rank of the cut. The squared errors
of the cuts add up, so without a fit the error is at most `sqrt(cores - 1)` times the error of the
best tensor train of these ranks, but for rounding.

Singular vectors are eigenvectors of the Gram matrix of the shorter side. Only the first cut has the
size of the table, which it reads in chunks; the remainder has `rank / (p[0] * q[0])` of that size.
In this file p are the row factors, q the dim factors and R the ranks with the 1 at both ends.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.specs import TTSpec, check_count, check_float_dtype
from emblib.tables.batches import check_tensor
from emblib.tt import shapes

_LOG = logging.getLogger(__name__)
_CHUNK_BYTES = 64 << 20  # of float64 rows that are converted at once
_FLOAT64_BYTES = 8
_NUM_FIT_SWEEPS = 3  # fits of the last core, then of the first; not measured
_RIDGE = 1e-6  # of the mean squared regressor, as counted rows may not determine a slice; not tuned


class Decomposition(NamedTuple):
    """Cores of a table, float32 `[p_k, R_k * q_k * R_{k+1}]`, and their errors.

    Attributes:
        spec: the table, with the ranks that were chosen.
        cores: cores of the train.
        error: the norm of the difference to the table, relative to the norm of the table.
        hot_error: the error of the 1% of rows (at least one) with the most accesses; None without
            counts.
    """

    spec: TTSpec
    cores: list[Tensor]
    error: float
    hot_error: float | None


def decompose(
    weight: Tensor,
    spec: TTSpec | None = None,
    *,
    ranks: Sequence[int] | None = None,
    error: float | None = None,
    nbytes: int | None = None,
    counts: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Decomposition:
    """Return the cores of a tensor train that approximates a dense table.

    One of `ranks`, `error` and `nbytes` determines its size; without them, the ranks of `spec` do.

    Args:
        weight: `[rows, dim]`, of any floating dtype.
        spec: factors of rows and dim; None is as `TTSpec` chooses them (without `ranks`, 3 cores).
        ranks: the inner ranks, one per cut between two cores, each at least 1; ranks that the
            cores cannot use are lowered.
        error: relative error that all cuts together may cause, an equal share each, for which the
            smallest ranks are chosen. Rounding the cores to 16 bits adds to it.
        nbytes: maximum bytes of the cores in `dtype`; the largest equal ranks that fit are chosen,
            lowered where the cores cannot use them.
        counts: accesses of each row `[rows]`. Unless all are 0, the first and the last core are
            then fitted to minimise the sum of squared errors of rows, weighted by the counts.
        dtype: dtype to which the values of the cores are rounded: float32, float16 or bfloat16.

    Raises:
        TypeError: `weight` or `counts` is not a tensor, or a rank is not an integer.
        ValueError: none or several of the sizes are set; a size, `counts` or `spec` does not fit
            the table; a dtype is not supported; values or counts are not finite, or the cores
            exceed the range of `dtype`.

    Source: Oseledets, Tensor-Train Decomposition, SIAM J. Sci. Comput. 33 (2011).

    Example:
        >>> from emblib.tables.tt_svd import decompose
        >>> decompose(torch.randn(500, 16), error=0.5).error <= 0.5
        True
    """
    _check_arguments(weight, spec, ranks, error, nbytes, counts)
    check_float_dtype("dtype", dtype)
    rows, dim = weight.shape
    if nbytes is not None:
        initial_spec = TTSpec.for_bytes(rows, dim, nbytes, like=spec, dtype=dtype)
    elif spec is None:
        initial_spec = TTSpec(rows, dim, (1,) * (2 if ranks is None else len(ranks)))
    else:
        initial_spec = spec
    max_ranks = shapes.max_ranks(initial_spec.row_factors, initial_spec.dim_factors)
    requested_ranks = (
        max_ranks
        if error is not None
        else tuple(ranks if ranks is not None else initial_spec.ranks)
    )
    rank_limits = [
        min(rank, max_rank) for rank, max_rank in zip(requested_ranks, max_ranks, strict=True)
    ]
    tt_svd = _TTSVD(weight, initial_spec, rank_limits, error)
    cores = tt_svd.cores()
    result_spec = replace(initial_spec, ranks=tt_svd.ranks)
    if counts is not None and float(counts.sum()) > 0:
        for _ in range(_NUM_FIT_SWEEPS):
            cores = _fit_outer_cores(weight, result_spec, cores, counts)
    cores = [core.to(dtype).float() for core in cores]
    if not all(bool(core.isfinite().all()) for core in cores):
        raise ValueError(
            f"the cores exceed the range of {dtype}: take float32 or bfloat16, or scale the weight"
        )
    decomposition = _measure_errors(weight, result_spec, cores, counts)
    hot_text = (
        ""
        if decomposition.hot_error is None
        else f", of the hottest 1% of rows {decomposition.hot_error:.3g}"
    )
    _LOG.info(
        "made a tensor train of ranks %s from a %d x %d table: relative error %.3g%s",
        result_spec.ranks,
        rows,
        dim,
        decomposition.error,
        hot_text,
    )
    return decomposition


def _check_arguments(
    weight: Tensor,
    spec: TTSpec | None,
    ranks: Sequence[int] | None,
    error: float | None,
    nbytes: int | None,
    counts: Tensor | None,
) -> None:
    """Raise TypeError or ValueError for wrong arguments of `decompose`, except `dtype`."""
    check_tensor("weight", weight)
    if counts is not None:
        check_tensor("counts", counts)
    if ranks is not None and not isinstance(ranks, Sequence):
        raise TypeError(f"ranks must be a list of ints, one per cut between cores, got {ranks!r}")
    if weight.dim() != 2 or not weight.is_floating_point() or not weight.numel():
        raise ValueError(
            f"weight must be a floating-point matrix [rows, dim], got {tuple(weight.shape)} of "
            f"{weight.dtype}"
        )
    sizes = [
        name
        for name, size in (("ranks", ranks), ("error", error), ("nbytes", nbytes))
        if size is not None
    ]
    if len(sizes) > 1 or (not sizes and spec is None):
        raise ValueError(
            f"say once how large the tensor train may be: ranks, error, nbytes or a spec, got "
            f"{', '.join(sizes) or 'none'}"
        )
    if spec is not None and (spec.rows, spec.dim) != tuple(weight.shape):
        raise ValueError(f"weight must be {spec.rows} x {spec.dim}, got {tuple(weight.shape)}")
    if ranks is not None:
        num_cuts = len(ranks) if spec is None else len(spec.ranks)
        if not ranks or len(ranks) != num_cuts:
            raise ValueError(
                f"ranks must be one number per cut between cores, {num_cuts or 'at least 1'}, got "
                f"{tuple(ranks)}"
            )
        for rank in ranks:
            check_count("each of ranks", rank)
    if error is not None and not 0 < error < 1:
        raise ValueError(f"error must be in (0, 1), got {error}")
    if counts is not None and (
        counts.shape != weight.shape[:1] or not bool((counts.isfinite() & (counts >= 0)).all())
    ):
        raise ValueError(
            f"counts must be {weight.shape[0]} finite numbers >= 0, got {tuple(counts.shape)}"
        )
    if not all(bool(chunk.isfinite().all()) for chunk in _row_chunks(weight)):
        raise ValueError("weight must be finite, got a table with nan or inf")


class _TTSVD:
    """TT-SVD of one table.

    Args:
        weight: the table, `[rows, dim]`.
        spec: factors of rows and dim; its ranks are not used.
        rank_limits: maximum rank of each cut.
        error: relative error of all cuts together, for which smaller ranks are chosen; None cuts
            at the limits.

    Attributes:
        ranks: the ranks, once `cores` was called.
    """

    def __init__(
        self, weight: Tensor, spec: TTSpec, rank_limits: Sequence[int], error: float | None
    ) -> None:
        self._weight, self._spec, self._rank_limits = weight, spec, rank_limits
        self._max_squared_error = None
        if error is not None:
            squared_norm = sum(
                float(chunk.double().square().sum()) for chunk in _row_chunks(weight)
            )
            self._max_squared_error = squared_norm * error**2 / len(rank_limits)
        self.ranks: tuple[int, ...] = ()

    def cores(self) -> list[Tensor]:
        """Cut the table into cores `[p[k], R[k] * q[k] * R[k + 1]]`, and set `ranks`."""
        p, q = self._spec.row_factors, self._spec.dim_factors
        basis = self._leading_eigenvectors(self._gram_of_first(), self._rank_limits[0])
        rank = basis.size(1)
        remainder = self._project(basis)  # [rank, prod(p[1:]), prod(q[1:])]
        cores, ranks = [_core_of_basis(basis, p[0], 1, q[0])], [rank]
        for k in range(1, len(p) - 1):
            right_rows, right_columns = math.prod(p[k + 1 :]), math.prod(q[k + 1 :])
            matrix = remainder.view(rank, p[k], right_rows, q[k], right_columns)
            matrix = matrix.permute(1, 0, 3, 2, 4).reshape(p[k] * rank * q[k], -1)
            left_core, right = self._factorise(matrix, self._rank_limits[k])
            cores.append(left_core.reshape(p[k], -1).float())
            remainder, rank = right.reshape(-1, right_rows, right_columns), left_core.size(1)
            ranks.append(rank)
        last_core = remainder.permute(1, 0, 2).reshape(p[-1], -1)
        self.ranks = tuple(ranks)
        return [*cores, last_core.float().contiguous()]

    def _gram_of_first(self) -> Tensor:
        """Return the Gram matrix of (first row digit, first column digit), in float64."""
        p, q = self._spec.row_factors, self._spec.dim_factors
        num_digit_pairs, inner_columns = p[0] * q[0], math.prod(q[1:])
        gram = torch.zeros(
            num_digit_pairs, num_digit_pairs, dtype=torch.float64, device=self._weight.device
        )
        for num_rows, values in _inner_row_chunks(self._weight, self._spec):
            columns = values.double().view(p[0], num_rows, q[0], inner_columns)
            unfolded = columns.permute(0, 2, 1, 3).reshape(
                num_digit_pairs, num_rows * inner_columns
            )
            gram.addmm_(unfolded, unfolded.T)
        return gram

    def _project(self, basis: Tensor) -> Tensor:
        """Return the table in the basis of the first cut: `[rank, rows / p[0], dim / q[0]]`."""
        p, q = self._spec.row_factors, self._spec.dim_factors
        rank, inner_columns = basis.size(1), math.prod(q[1:])
        shape = rank, math.prod(p[1:]), inner_columns
        projected = torch.empty(shape, dtype=torch.float32, device=basis.device)
        begin, projection = 0, basis.T.float()
        for num_rows, values in _inner_row_chunks(self._weight, self._spec):
            columns = values.float().view(p[0], num_rows, q[0], inner_columns)
            unfolded = columns.permute(0, 2, 1, 3).reshape(p[0] * q[0], num_rows * inner_columns)
            end = begin + num_rows
            projected[:, begin:end] = (projection @ unfolded).view(rank, num_rows, inner_columns)
            begin = end
        return projected

    def _factorise(self, matrix: Tensor, rank_limit: int) -> tuple[Tensor, Tensor]:
        """Return float32 factors `[rows, rank]` and `[rank, columns]` that approximate a matrix.

        The columns of the first are orthonormal, so that later cuts of the second cause errors of
        the same size in the product.
        """
        if matrix.size(0) <= matrix.size(1):
            basis = self._leading_eigenvectors(_gram(matrix), rank_limit).float()
            return basis, basis.T @ matrix
        basis = self._leading_eigenvectors(_gram(matrix.T), rank_limit).float()
        left, triangle = torch.linalg.qr(matrix @ basis)
        return left, triangle @ basis.T

    def _leading_eigenvectors(self, gram: Tensor, rank_limit: int) -> Tensor:
        """Return the leading eigenvectors of a Gram matrix, at most `rank_limit`.

        With a maximum error there are as few as it allows, at least 1. `gram` is float64 `[n, n]`;
        the result is `[n, rank]`, orthonormal columns.
        """
        values, vectors = torch.linalg.eigh(gram)
        values, vectors = values.flip(0).clamp(min=0.0), vectors.flip(1)
        rank = min(rank_limit, values.numel())
        if self._max_squared_error is not None:
            # By rank: the sum of the eigenvalues that it leaves out.
            squared_error_of_rank = values.flip(0).cumsum(0).flip(0)
            rank = max(1, min(rank, int((squared_error_of_rank > self._max_squared_error).sum())))
        return vectors[:, :rank].contiguous()


def _gram(matrix: Tensor) -> Tensor:
    """Return `matrix @ matrix.T` in float64, computed by blocks of columns.

    `matrix` is `[n, columns]`; the result is `[n, n]`.
    """
    gram = torch.zeros(matrix.size(0), matrix.size(0), dtype=torch.float64, device=matrix.device)
    columns_per_block = max(1, _CHUNK_BYTES // (_FLOAT64_BYTES * matrix.size(0)))
    for block in matrix.split(columns_per_block, dim=1):
        float64_block = block.double()
        gram.addmm_(float64_block, float64_block.T)
    return gram


def _core_of_basis(basis: Tensor, p: int, rank: int, q: int) -> Tensor:
    """Return a core, float32 `[p, rank * q * next rank]`, from a basis `[n, next rank]`."""
    return basis.reshape(p, rank * q * basis.size(1)).float()


def _row_chunks(weight: Tensor) -> Iterator[Tensor]:
    """Yield the rows of a table in chunks `[n, dim]`."""
    rows_per_chunk = max(1, _CHUNK_BYTES // (_FLOAT64_BYTES * weight.size(1)))
    for begin in range(0, weight.size(0), rows_per_chunk):
        yield weight[begin : begin + rows_per_chunk].detach()


def _inner_row_chunks(weight: Tensor, spec: TTSpec) -> Iterator[tuple[int, Tensor]]:
    """Yield chunks of n inner rows with all first row digits: (n, values `[p[0] * n, D]`).

    An inner row is a row without its first digit; chunks are in the order of inner rows. Rows
    beyond the table, up to the product of the row factors, are zeros.
    """
    p0, inner_rows = spec.row_factors[0], math.prod(spec.row_factors[1:])
    rows_per_chunk = max(1, min(inner_rows, _CHUNK_BYTES // (_FLOAT64_BYTES * p0 * spec.dim)))
    first_row = torch.arange(p0, device=weight.device).unsqueeze(1) * inner_rows
    for begin in range(0, inner_rows, rows_per_chunk):
        num_rows = min(rows_per_chunk, inner_rows - begin)
        rows = (first_row + torch.arange(begin, begin + num_rows, device=weight.device)).view(-1)
        values = weight.detach()[_ids_of_rows(spec, rows.clamp(max=spec.rows - 1))]
        yield num_rows, values.masked_fill_((rows >= spec.rows).unsqueeze(1), 0.0)


def _ids_of_rows(spec: TTSpec, rows: Tensor) -> Tensor:
    """Map rows of the tensor train to ids, int64 `[n]`, the inverse of `_rows_of_ids`."""
    multiplier, offset = shapes.inverse(spec.permutation, spec.rows)
    return (multiplier * rows + offset) % spec.rows


def _rows_of_ids(spec: TTSpec, ids: Tensor) -> Tensor:
    """Map ids to rows of the tensor train, int64 `[n]`, by the permutation of the spec."""
    multiplier, offset = spec.permutation
    return (multiplier * ids + offset) % spec.rows


def _core_products(
    cores: Sequence[Tensor], spec: TTSpec, rows: Tensor, first_core: int, end_core: int
) -> Tensor:
    """Multiply cores `first_core` to `end_core - 1` of rows int64 `[L]`.

    Returns:
        `[L, R[first_core], product of their q, R[end_core]]`.
    """
    full_ranks, q = spec.full_ranks, spec.dim_factors
    products = (
        torch.eye(full_ranks[first_core], dtype=torch.float32, device=rows.device)
        .expand(rows.numel(), -1, -1)
        .unsqueeze(2)
    )
    for k in range(first_core, end_core):
        digit = rows // math.prod(spec.row_factors[k + 1 :]) % spec.row_factors[k]
        core = cores[k][digit].view(rows.numel(), full_ranks[k], q[k], full_ranks[k + 1])
        products = torch.einsum("lacr,lrqs->lacqs", products, core).flatten(2, 3)
    return products


def _fit_outer_cores(
    weight: Tensor, spec: TTSpec, cores: list[Tensor], counts: Tensor
) -> list[Tensor]:
    """Fit the last core to the counted rows, then the first, and return the cores.

    With the other cores fixed, a slice of an outer core is the solution of a least-squares problem
    over the rows that use it, with `rank` unknowns per column.

    `weight` is `[rows, dim]`; `counts` `[rows]`, of any dtype, weights the squared error of a row.
    """
    for outer in (len(cores) - 1, 0):
        rank = spec.full_ranks[1] if outer == 0 else spec.full_ranks[-2]
        p, q = spec.row_factors[outer], spec.dim_factors[outer]
        gram = torch.zeros(p, rank, rank, dtype=torch.float64, device=weight.device)
        target = torch.zeros(p, rank, q, dtype=torch.float64, device=weight.device)
        for ids, values, uses in _counted_chunks(weight, spec, counts):
            rows, values, row_weights = _rows_of_ids(spec, ids), values.double(), uses.double()
            if outer == 0:
                digit = rows // math.prod(spec.row_factors[1:])
                inner_products = (
                    _core_products(cores, spec, rows, 1, len(cores)).squeeze(3).double()
                )  # [L, r, c]
                columns = values.view(rows.numel(), q, -1).transpose(1, 2)  # [L, c, q]
            else:
                digit = rows % p
                inner_products = (
                    _core_products(cores, spec, rows, 0, outer).squeeze(1).transpose(1, 2).double()
                )
                columns = values.view(rows.numel(), -1, q)
            weighted_products = inner_products * row_weights.view(-1, 1, 1)
            gram.index_add_(0, digit, weighted_products @ inner_products.transpose(1, 2))
            target.index_add_(0, digit, weighted_products @ columns)
        mean_diagonal = gram.diagonal(dim1=1, dim2=2).mean(1)
        ridge = torch.where(mean_diagonal > 0, mean_diagonal * _RIDGE, 1.0).view(-1, 1, 1)
        identity = torch.eye(rank, dtype=torch.float64, device=weight.device)
        old_core = cores[outer].double()
        old_core = (
            old_core.view(p, q, rank).transpose(1, 2) if outer == 0 else old_core.view(p, rank, q)
        )
        # The ridge pulls towards the old core, which stays where no counted row determines it.
        solution = torch.linalg.solve(gram + ridge * identity, target + ridge * old_core)
        solution = solution.transpose(1, 2) if outer == 0 else solution
        cores = [*cores]
        cores[outer] = solution.reshape(p, -1).float()
    return cores


def _counted_chunks(
    weight: Tensor, spec: TTSpec, counts: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield (ids `[n]`, values `[n, D]`, counts `[n]`) of chunks of accessed rows."""
    counted_ids = counts.nonzero().squeeze(1).to(weight.device)
    values_per_row = max(spec.ranks) ** 2 * spec.dim
    rows_per_chunk = max(1, _CHUNK_BYTES // (_FLOAT64_BYTES * values_per_row))
    for ids in counted_ids.split(rows_per_chunk):
        yield ids, weight.detach()[ids], counts.to(weight.device)[ids]


def _measure_errors(
    weight: Tensor, spec: TTSpec, cores: list[Tensor], counts: Tensor | None
) -> Decomposition:
    """Compute the errors of the cores, in blocks of rows with one first digit."""
    p, q, rank = spec.row_factors, spec.dim_factors, spec.ranks[0]
    inner_rows, inner_columns = math.prod(p[1:]), math.prod(q[1:])
    inner_product = _product_of_last_cores(cores[1:], spec).reshape(
        rank, inner_rows * inner_columns
    )
    squared_errors = torch.empty(spec.rows, dtype=torch.float64, device=weight.device)
    squared_norms = torch.empty_like(squared_errors)
    for i, core_slice in enumerate(cores[0].view(p[0], q[0], rank)):
        rows = slice(min(i * inner_rows, spec.rows), min((i + 1) * inner_rows, spec.rows))
        row_ids = torch.arange(rows.start, rows.stop, device=weight.device)
        values = weight.detach()[_ids_of_rows(spec, row_ids)].double()
        approximation = (
            (core_slice @ inner_product)
            .view(q[0], inner_rows, inner_columns)
            .transpose(0, 1)[: values.size(0)]
        )
        squared_errors[rows] = (approximation.reshape(values.shape) - values).square().sum(1)
        squared_norms[rows] = values.square().sum(1)
    hot_error = None
    if counts is not None:
        num_hottest = max(1, spec.rows // 100)  # 1 %
        hottest_ids = counts.to(weight.device).argsort(descending=True)[:num_hottest]
        hottest_rows = _rows_of_ids(spec, hottest_ids)
        hot_error = _ratio(squared_errors[hottest_rows], squared_norms[hottest_rows])
    return Decomposition(spec, cores, _ratio(squared_errors, squared_norms), hot_error)


def _product_of_last_cores(cores: Sequence[Tensor], spec: TTSpec) -> Tensor:
    """Multiply the last cores of a train for all combinations of their digits.

    Returns:
        float32 `[R, product of their p, product of their q]`, with R the rank before them.
    """
    full_ranks, p, q = spec.full_ranks, spec.row_factors, spec.dim_factors
    product = torch.ones(1, 1, 1, dtype=torch.float32, device=cores[0].device)
    for k in range(len(p) - 1, len(p) - 1 - len(cores), -1):
        core = cores[k - len(p)].view(p[k], full_ranks[k], q[k], full_ranks[k + 1])
        product = torch.einsum("pacr,rnd->apncd", core, product).flatten(1, 2).flatten(2, 3)
    return product


def _ratio(squared_errors: Tensor, squared_norms: Tensor) -> float:
    """Return the relative error of rows from squared errors and squared norms, `[n]`."""
    squared_norm = float(squared_norms.sum())
    return math.sqrt(float(squared_errors.sum()) / squared_norm) if squared_norm else 0.0
