"""Tensor-train tables in plain PyTorch: the definition of correct.

Core k is `[p_k, R_k * q_k * R_{k+1}]` with `R_0 = R_d = 1`, its rows laid out as
`(R_k, q_k, R_{k+1})`. Row `i` of the table, with mixed-radix digits `i_0 .. i_{d-1}` (i_0 most
significant), is the chain `G_0[i_0] G_1[i_1] ..` flattened to `D = prod(q)` values, the column
digit of core 0 most significant. Decomposition and layout are those of TT-Rec (Yin et al., MLSys
2021). Cores may have any floating dtype and device; `rows`, `to_dense` and `lookup` are
differentiable in the cores. Terms: L ids, D dim, d cores. `row_factors` are the p_k, `dim_factors`
the q_k. `update_rows_` updates a core as a matrix of p_k rows.

A table may permute its ids (`permuted`). Only `keys` does so itself: all other functions take rows,
so callers with a permutation pass `permuted(ids, ...)`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from emblib.columns import FeatureRow
from emblib.reference import tbe
from emblib.reference.optim import update_rows_ as update_rows_
from emblib.specs import MatmulPrecision, Pooling


def ranks(cores: Sequence[Tensor], dim_factors: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks `1, R_1, .., 1` that the widths of the cores imply."""
    full_ranks = [1]
    for core, q in zip(cores, dim_factors, strict=True):
        full_ranks.append(core.size(1) // (full_ranks[-1] * q))
    return tuple(full_ranks)


def digits(ids: Tensor, row_factors: Sequence[int]) -> list[Tensor]:
    """Return the mixed-radix digits of `ids` `[L]`, most significant first, each `[L]`."""
    reversed_digits = []
    for factor in reversed(row_factors):
        reversed_digits.append(ids % factor)
        ids = ids // factor
    return reversed_digits[::-1]


def matmul_operand(values: Tensor, precision: MatmulPrecision) -> Tensor:
    """Round float32 `values` to the precision in which products read their operands.

    TF32 has 11 significant bits, rounded to nearest with ties away from zero, BF16 has 8, with
    ties to even. FLOAT32 reads them as they are.
    """
    if precision is MatmulPrecision.BF16:
        return values.bfloat16().float()
    if precision is MatmulPrecision.FLOAT32:
        return values
    bits = (values.view(torch.int32).long() + 0x1000) & ~0x1FFF  # drop 13 of 24 significant bits
    bits = (bits + 2**31) % 2**32 - 2**31  # the sum for a NaN may change the sign bit
    return torch.where(values.isnan(), values, bits.to(torch.int32).view(torch.float32))


def rows(
    cores: Sequence[Tensor], ids: Tensor, row_factors: Sequence[int], dim_factors: Sequence[int]
) -> Tensor:
    """Return rows `ids` `[L]` of the table, `[L, D]`; ids are not checked."""
    full_ranks = ranks(cores, dim_factors)
    chain = cores[0].new_ones(ids.numel(), 1, 1)
    columns = 1
    for k, digit in enumerate(digits(ids.long(), row_factors)):
        factor = cores[k][digit].view(
            ids.numel(), full_ranks[k], dim_factors[k] * full_ranks[k + 1]
        )
        columns *= dim_factors[k]
        chain = torch.bmm(chain, factor).view(ids.numel(), columns, full_ranks[k + 1])
    return chain.view(ids.numel(), columns)


def to_dense(
    cores: Sequence[Tensor], num_rows: int, row_factors: Sequence[int], dim_factors: Sequence[int]
) -> Tensor:
    """Return the whole table in the order of rows (not of permuted ids), `[num_rows, D]`."""
    ids = torch.arange(num_rows, device=cores[0].device)
    return rows(cores, ids, row_factors, dim_factors)


def permuted(ids: Tensor, num_rows: int, permutation: tuple[int, int]) -> Tensor:
    """Return the rows of valid ids: `(multiplier * id + offset) % num_rows`, without overflow.

    `permutation` is (multiplier, offset). The multiplier must be coprime to `num_rows`, unchecked.
    """
    multiplier, offset = permutation
    rows = [(multiplier * i + offset) % num_rows for i in ids.tolist()]
    return torch.tensor(rows, dtype=torch.int64, device=ids.device)


def keys(
    indices: Tensor,
    num_rows: int,
    row_factors: Sequence[int],
    permutation: tuple[int, int] = (1, 0),
) -> Tensor:
    """Return sort keys of ids, int64 `[L]`: ids with neighbouring keys share slices of cores.

    A key has the digits of the row of an id in another order: with three or more cores the first
    two are swapped, so that the digit of the large second core comes first. -1 stays -1, any other
    id outside the table gets the key of id 0.
    """
    ids = indices.long()
    repaired = torch.where((ids >= 0) & (ids < num_rows), ids, 0)
    id_digits = digits(permuted(repaired, num_rows, permutation), row_factors)
    key = torch.zeros_like(repaired)
    for k in _key_order(len(row_factors)):
        key = key * row_factors[k] + id_digits[k]
    return torch.where(ids == -1, ids, key)


def _key_order(num_cores: int) -> list[int]:
    """Return the cores whose digits make up a sort key, the most significant first."""
    order = list(range(num_cores))
    return [1, 0, *order[2:]] if num_cores > 2 else order


def ids_of_keys(sort_keys: Tensor, row_factors: Sequence[int]) -> Tensor:
    """Return the rows, int64 `[L]`, of sort keys: the inverse of `keys`, up to the permutation.

    A row is an id after its permutation. The keys must not be -1; not checked.
    """
    order = _key_order(len(row_factors))
    id_digits = dict(zip(order, digits(sort_keys, [row_factors[k] for k in order]), strict=True))
    ids = torch.zeros_like(sort_keys)
    for k, factor in enumerate(row_factors):
        ids = ids * factor + id_digits[k]
    return ids


def core_grads(
    cores: Sequence[Tensor],
    ids: Tensor,
    row_grads: Tensor,
    row_factors: Sequence[int],
    dim_factors: Sequence[int],
) -> list[Tensor]:
    """Return the gradients of all cores, in the dtype of `row_grads` `[L, D]`, of rows `ids`."""
    with torch.enable_grad():
        leaves = [core.detach().to(row_grads.dtype).requires_grad_() for core in cores]
        out = rows(leaves, ids, row_factors, dim_factors)
        return list(torch.autograd.grad(out, leaves, row_grads))


def lookup(
    cores: Sequence[Tensor],
    num_rows: int,
    row_factors: Sequence[int],
    dim_factors: Sequence[int],
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None = None,
    pooling: Pooling = Pooling.SUM,
) -> Tensor:
    """Pool each bag of rows: `[B, D]` (`[L, D]` for NONE), with the index rules of `tbe.lookup`."""
    dim = math.prod(dim_factors)
    ids = indices.long()
    repaired = torch.where((ids >= 0) & (ids < num_rows), ids, 0)
    row_of_lookup = rows(cores, repaired, row_factors, dim_factors)  # read as a table
    positions = torch.arange(ids.numel(), device=ids.device)
    positions = torch.where(ids == -1, ids, positions)
    features = torch.tensor([FeatureRow(rows=ids.numel(), dim=dim)], device=ids.device)
    weights = row_of_lookup.flatten()
    return tbe.lookup(weights, features, positions, offsets, sample_weights, pooling, dim)


def split_stored(
    indices: Tensor, ids: Tensor, keys: Tensor, slots: Tensor | None, row_of_slot: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ids to compute from the cores, the stored rows to read, and the keys to count.

    All are int64 `[L]`, -1 for none. If no rows are stored, the first two are empty: the cores
    compute all ids then.

    Args:
        indices: `[L]`, as the batch has them; an index that differs from its id was invalid.
        ids: int64 `[L]`, the repaired indices; -1 for lookups to skip.
        keys: int64 `[L]`, the ids, numbered over all tables; -1 for lookups to skip.
        slots: int64 `[L]`, slots of `keys` in the index of stored rows, less than S, -1 for none;
            None if no rows are stored.
        row_of_slot: int64 `[S]`, the stored row of each slot, -1 for none.
    """
    counted_keys = torch.where(indices == ids, keys, -1)
    if slots is None:
        return ids[:0], ids[:0], counted_keys
    rows = torch.where(slots >= 0, row_of_slot[slots.clamp(min=0)], -1)
    return torch.where(rows < 0, ids, -1), rows, counted_keys


def count_lookups_(
    counted_keys: Tensor, rows: Tensor, starts: Tensor, tables: Tensor, counters: Tensor
) -> None:
    """Add lookups and hits by table to the first two columns of `counters`, int64 `[T, 2 or more]`.

    Args:
        counted_keys: int64 `[L]`, the keys to count, -1 for none.
        rows: int64 `[L]`, stored row of each lookup, -1 for misses; empty: no hits.
        starts: int64 `[F + 1]`, first lookup of each feature; earlier ones are not counted.
        tables: int64 `[F]`, the table of each feature.
        counters: changed in place.
    """
    for f, table in enumerate(tables.tolist()):
        lookups = slice(int(starts[f]), int(starts[f + 1]))
        is_counted = counted_keys[lookups] >= 0
        counters[table, 0] += is_counted.sum()
        if len(rows):
            counters[table, 1] += (is_counted & (rows[lookups] >= 0)).sum()
