"""Read-only tables with rows for some ids alone: pruned tables, and tables keyed by any id.

A `QuantizedEmbeddingBags` stores the rows. An index per table maps an id to its row: an array with
an entry per id, or a hash table with an entry per key that has a row. An id without a row reads
zeros, or a row that such ids share. Shared rows are one row of default values, or the fallback rows
of a dynamic table, of which a hash of the key selects one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from emblib.columns import IndexKind
from emblib.dynamic.keys import range_indices
from emblib.dynamic.training import feature_starts
from emblib.ops import quant
from emblib.ops.hash import Keys, tables_of
from emblib.tables import QuantizedEmbeddingBags
from emblib.tables.batches import append_last_offset, check_tensor

_MAX_ARRAY_ROWS = 1 << 31


@dataclass(frozen=True)
class RowIndex:
    """The index of one table.

    Args:
        kind: an array, or a hash table.
        entries: memory of the index, int64 `[n]`.
        num_entries: entries of the array, which are int32, two per int64, or of the hash table,
            which are pairs of int64.
        hash_bits: bits of the hash of a key; 0 for an array.
        num_ids: number of ids, which begin at 0; -1 if any int64 is a key.
        missing: row of an id that has none; -1 reads zeros.
        fallback: number of rows, from `missing` on, among which a hash selects one for a key
            without a row; with 0 all of these keys read the row `missing`.

    Example:
        >>> index = emblib.inference.RowIndex.of_keys(torch.tensor([7, -3, 2**62]))
        >>> index.kind.name, index.num_entries >= 6
        ('HASH', True)
    """

    kind: IndexKind
    entries: Tensor
    num_entries: int
    hash_bits: int = 0
    num_ids: int = -1
    missing: int = -1
    fallback: int = 0

    @classmethod
    def of_keys(
        cls, keys: Tensor, *, num_ids: int = -1, missing: int = -1, fallback: int = 0
    ) -> "RowIndex":
        """Return the hash table of `keys`, int64 `[n]`, of which the i-th has row i.

        The other arguments are the fields of these names. Reads the keys from the device.

        Raises:
            TypeError: `keys` is not a tensor, or has another dtype or shape.
            ValueError: a key occurs twice.
        """
        if not isinstance(keys, Tensor) or keys.dtype is not torch.int64 or keys.dim() != 1:
            kind = f"{keys.dtype} {list(keys.shape)}" if isinstance(keys, Tensor) else type(keys)
            raise TypeError(f"keys must be int64 [n], got {kind}")
        if keys.unique().numel() != keys.numel():
            raise ValueError(f"keys must be distinct, got {keys.numel()} with duplicates")
        rows = torch.arange(keys.numel(), device=keys.device)
        entries, hash_bits = quant.hash_entries(keys, rows)
        size = entries.size(0)
        return cls(IndexKind.HASH, entries.flatten(), size, hash_bits, num_ids, missing, fallback)

    @classmethod
    def of_mask(cls, keep: Tensor) -> "RowIndex":
        """Return the array of ids `[0, len(keep))`, of which those in the bool mask have rows.

        Raises:
            ValueError: there are 2^31 rows or more.
        """
        num_ids = keep.numel()
        rows = torch.full((num_ids + num_ids % 2,), -1, dtype=torch.int32, device=keep.device)
        ids = keep.nonzero().view(-1)
        if ids.numel() >= _MAX_ARRAY_ROWS:
            raise ValueError(f"an array has rows below 2^31, got {ids.numel()}: use index='hash'")
        rows[ids] = torch.arange(ids.numel(), dtype=torch.int32, device=keep.device)
        return cls(IndexKind.ARRAY, rows.view(torch.int64), num_ids, num_ids=num_ids)

    def table_row(self, begin: int) -> list[int]:
        """Return the columns of `IndexColumn`, for entries that begin at `begin` of `index`."""
        return [int(self.kind), begin, self.num_entries, self.hash_bits, self.num_ids, self.missing]


class InferenceEmbeddingBags(nn.Module):
    """Look up F features in T read-only tables that have rows for some ids alone.

    Rows are looked up as in `QuantizedEmbeddingBags`. An id that a pruned table has no row for
    reads zeros, and so does -1; an id outside the table before pruning is handled as its
    `bounds_check` says, where row 0 is the first row that was kept. In a table of keys every int64
    is a key, and a key without a row reads the default value, or its fallback row. Bags are
    averaged over all of their ids, with or without a row.

    Args:
        rows: the stored rows, shared ones included.
        indexes: the index of each table; None for a table whose ids are its rows.
        memory: int64, the entries of all indexes, one after the other, used in place; None copies
            the entries of `indexes`.

    Attributes:
        rows: the stored rows.
        indexes: the index of each table, with views of `index` as entries.

    Raises:
        ValueError: the numbers of indexes and tables differ.

    Example:
        >>> rows = emblib.QuantizedEmbeddingBags.from_float(torch.ones(2, 4))
        >>> index = emblib.inference.RowIndex.of_keys(torch.tensor([2**40, -5]))
        >>> served = emblib.inference.InferenceEmbeddingBags(rows, [index])
        >>> served(torch.tensor([-5, 17]), torch.tensor([0, 1, 2]))[:, 0]
        tensor([1., 0.])
    """

    index: Tensor  # int64 `[n]`, the entries of all indexes
    index_tables: Tensor  # int64 `[F, 6]`, see `IndexColumn`
    shared_rows: Tensor  # int64 `[F, 2]`, first shared row (-1: none), fallback rows

    def __init__(
        self,
        rows: QuantizedEmbeddingBags,
        indexes: Sequence[RowIndex | None],
        memory: Tensor | None = None,
    ) -> None:
        super().__init__()
        if len(indexes) != len(rows.tables):
            raise ValueError(
                f"indexes must have one entry per table, {len(rows.tables)}, got {len(indexes)}"
            )
        self.rows, self.indexes = rows, tuple(indexes)
        device = rows.packed.device
        if memory is None:
            entries = [index.entries.to(device) for index in indexes if index is not None]
            memory = torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *entries])
        rows_by_table, begin = [], 0
        for index in indexes:
            if index is None:
                rows_by_table.append([IndexKind.NONE, 0, 0, 0, -1, -1])
            else:
                rows_by_table.append(index.table_row(begin))
                begin += index.entries.numel()
        table_rows = torch.tensor(rows_by_table, dtype=torch.int64, device="cpu").view(-1, 6)
        feature_rows = table_rows[
            torch.tensor(rows.feature_tables, dtype=torch.int64, device="cpu")
        ]
        self.register_buffer("index", memory)
        self.register_buffer("index_tables", feature_rows.to(device))
        ranges_by_table = [
            (-1, 0) if index is None else (index.missing, index.fallback) for index in indexes
        ]
        self._has_fallback = any(count for _, count in ranges_by_table)
        shared_rows = torch.tensor(
            [ranges_by_table[table] for table in rows.feature_tables], device="cpu"
        ).view(-1, 2)
        self.register_buffer("shared_rows", shared_rows.to(device), persistent=False)
        self.indexes = self._bind_indexes()

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Pool embeddings as `QuantizedEmbeddingBags` does.

        Args:
            indices: int32, int64 or uint64 `[L]`, the id or key of each lookup.
            offsets: int32 or int64 `[F * B + 1]`, feature-major; `[F * B]` if `rows` have no last
                offset (`include_last_offset`).
            per_sample_weights: float32 `[L]`, scales each row.
            batch_sizes: bags per feature and rank, for features of unequal batch sizes.

        Returns:
            `[B, sum of dims]`, with Pooling.NONE `[L, D]`, in the output dtype of `rows`; with
            `batch_sizes` one vector, as `QuantizedEmbeddingBags` returns it.

        Raises:
            Exception: see `QuantizedEmbeddingBags.forward`.
        """
        check_tensor("indices", indices)
        check_tensor("offsets", offsets)
        if indices.dtype == torch.uint64:
            indices = indices.view(torch.int64)
        rows = self.rows
        if not rows.include_last_offset:
            offsets = append_last_offset(indices, offsets)
        bag_layout, _ = rows.lay_out_bags(offsets, batch_sizes)
        row_ids = quant.map_ids(
            self.index, self.index_tables, rows.features, indices, offsets, bag_layout
        )
        if self._has_fallback:
            row_ids = self._with_fallback(indices, offsets, batch_sizes, row_ids)
        if not rows.include_last_offset:
            offsets = offsets[:-1]
        output: Tensor = rows(row_ids, offsets, per_sample_weights, batch_sizes=batch_sizes)
        return output

    def _with_fallback(
        self,
        indices: Tensor,
        offsets: Tensor,
        batch_sizes: Sequence[Sequence[int]] | None,
        row_ids: Tensor,
    ) -> Tensor:
        """Spread the ids without a row over the fallback rows of their tables."""
        features = torch.arange(self.shared_rows.size(0), device=offsets.device)
        starts = feature_starts(offsets, features.numel(), batch_sizes)
        missing, counts = self.shared_rows[tables_of(Keys(indices, starts, features))].unbind(1)
        is_shared = (counts > 0) & (row_ids == missing)
        return torch.where(is_shared, missing + range_indices(indices, counts), row_ids)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the rows, `weights`, and of the `index`."""
        return {**self.rows.nbytes(), "index": self.index.nbytes}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.indexes = self._bind_indexes()
        return self

    def _bind_indexes(self) -> tuple[RowIndex | None, ...]:
        """Return the indexes with entries that are parts of the buffer `index`."""
        begin, bound_indexes = 0, list[RowIndex | None]()
        for index in self.indexes:
            if index is not None:
                num_words = index.entries.numel()
                index = replace(index, entries=self.index[begin : begin + num_words])
                begin += num_words
            bound_indexes.append(index)
        return tuple(bound_indexes)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load rows of the same keys or ids; torch loads `rows` after this.

        Raises:
            RuntimeError: the state dict has another index.
        """
        for name in ("index", "index_tables"):
            tensor, saved_tensor = getattr(self, name), state_dict.get(prefix + name)
            if saved_tensor is not None and not torch.equal(saved_tensor.to(tensor.device), tensor):
                raise RuntimeError(
                    f"{prefix}{name}: the state dict is of tables with another index; freeze() and "
                    "open_frozen() keep rows and index together"
                )
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        """Describe the indexes."""
        kinds = ["none" if index is None else index.kind.name.lower() for index in self.indexes]
        return f"index: {', '.join(kinds)}"


def top_rows(scores: Tensor, share: float) -> Tensor:
    """Return a mask of the `share` of rows with the highest scores; of equal ones the first.

    Args:
        scores: `[rows]`, for example how often each row was looked up, or its norm.
        share: share of the rows to keep, in [0, 1]; their number is rounded up.

    Raises:
        TypeError: the scores are not a tensor of real numbers, or the share is not a number.
        ValueError: the scores are not a vector or have NaN, or the share is out of range.

    Example:
        >>> emblib.inference.top_rows(torch.tensor([3.0, 9.0, 1.0, 9.0]), 0.5)
        tensor([False,  True, False,  True])
    """
    if not isinstance(scores, Tensor) or scores.is_complex():
        kind = scores.dtype if isinstance(scores, Tensor) else type(scores).__name__
        raise TypeError(f"scores must be a tensor of real numbers, got {kind}")
    if scores.dim() != 1:
        raise ValueError(f"scores must be a vector, got {list(scores.shape)}")
    if not isinstance(share, Real):
        raise TypeError(f"share must be a number, got {share!r}")
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}")
    if scores.is_floating_point() and bool(scores.isnan().any()):
        raise ValueError("scores must not be NaN; scores.nan_to_num() makes them so")
    keep = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    # 0.07 of 100 rows are 7, though 100 * 0.07 is more in floating point.
    num_kept = math.ceil(Fraction(str(float(share))) * scores.numel())
    keep[scores.argsort(descending=True, stable=True)[:num_kept]] = True
    return keep


def prune(
    tables: QuantizedEmbeddingBags, keep: Mapping[str, Tensor], *, index: str | None = None
) -> InferenceEmbeddingBags:
    """Copy the rows of a mask; ids of other rows then read zeros.

    Args:
        tables: the tables, of any formats; `for_inference` makes them of trained ones.
        keep: mask by table name, bool `[rows]`, such as `top_rows` returns; tables without a mask
            keep all rows.
        index: "array" with 4 bytes per row of `tables`, "hash" with 32 to 64 bytes per row of the
            result, or None for the smaller one.

    Raises:
        KeyError: a mask is of an unknown table.
        TypeError: `tables` has another class.
        ValueError: a mask does not fit or keeps no row, or `index` is none of these.

    Example:
        >>> tables = emblib.QuantizedEmbeddingBags.from_float({"item": torch.randn(1_000, 16)})
        >>> mask = emblib.inference.top_rows(tables.to_dense(0).norm(dim=1), 0.25)
        >>> emblib.inference.prune(tables, {"item": mask}).rows.tables[0].rows
        250
    """
    if not isinstance(tables, QuantizedEmbeddingBags):
        raise TypeError(
            f"tables must be QuantizedEmbeddingBags, got {type(tables).__name__}: "
            "for_inference(module) makes them of trained tables"
        )
    if index not in (None, "array", "hash"):
        raise ValueError(f"index must be 'array', 'hash' or None, got {index!r}")
    unknown_names = sorted(keep.keys() - set(tables.table_names))
    if unknown_names:
        raise KeyError(f"there are no tables {unknown_names}, only {tables.table_names}")
    masks = [_mask_of(tables, table, keep) for table in range(len(tables.tables))]
    indexes = [None if mask is None else _make_index(mask, index) for mask in masks]
    row_counts = [
        spec.rows if mask is None else int(mask.sum())
        for spec, mask in zip(tables.tables, masks, strict=True)
    ]
    rows = tables.with_rows(row_counts)
    for view, old_view, mask in zip(rows.table_views(), tables.table_views(), masks, strict=True):
        view["packed"].copy_(old_view["packed"] if mask is None else old_view["packed"][mask])
    return InferenceEmbeddingBags(rows, indexes)


def _mask_of(
    tables: QuantizedEmbeddingBags, table: int, keep: Mapping[str, Tensor]
) -> Tensor | None:
    """Return the checked mask of a table, bool `[num_rows]`, on the device of its rows."""
    name = tables.table_names[table]
    if name not in keep:
        return None
    mask, num_rows = keep[name], tables.tables[table].rows
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (num_rows,):
        kind = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else repr(type(mask))
        raise ValueError(f"the mask of table {name!r} must be bool [{num_rows}], got {kind}")
    if not bool(mask.any()):
        raise ValueError(f"table {name!r} must keep at least one row")
    return mask.to(tables.packed.device)


def _make_index(mask: Tensor, index: str | None) -> RowIndex:
    """Return the index of the rows of `mask`: "array", "hash", or the smaller one for None."""
    if index is None:
        hash_bytes = 16 << quant.hash_bits(int(mask.sum()))
        index = "array" if 4 * mask.numel() <= hash_bytes else "hash"
    if index == "array":
        return RowIndex.of_mask(mask)
    return RowIndex.of_keys(mask.nonzero().view(-1), num_ids=mask.numel())
