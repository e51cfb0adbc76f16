"""The tables of a follower, which take the rows of records.

`prepare` checks a change and converts its rows; it may fail, and changes nothing. It returns a
function that writes them, which the follower calls while there is no reader.

Read-only tables of keys have a hash table that is built once. Its entries are sorted by the hash of
their key, and a search ends at the key or at an empty entry. A follower also inserts new keys, at
the empty entry where their search ends. A removed key keeps its entry, with the row of the default
value, so that no search ends early. Where rows or entries run out, a larger table is built.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from emblib.columns import IndexKind
from emblib.dynamic.dynamic_tables import tables_of
from emblib.dynamic.handles import DynamicTable
from emblib.dynamic.keys import range_indices
from emblib.dynamic.saving import fallback
from emblib.dynamic.saving.checkpoint import check_entries, replace_entries
from emblib.dynamic.saving.entries import Changes, Entries, Rows
from emblib.dynamic.saving.table_dumps import ChangeSet, apply_changes
from emblib.grad_mode import without_gradients
from emblib.inference import HostEmbeddingBags, InferenceEmbeddingBags, RowIndex
from emblib.online.records import LogError, TableChange
from emblib.online.tables import PlainTable, find_tables
from emblib.ops import quant
from emblib.specs import Placement, TableSpec
from emblib.tables import QuantizedEmbeddingBags, TableBatchedEmbeddingBags

Write = Callable[[], None]
"""Function that writes a prepared change; the follower calls it once, without readers.

It may raise, e.g. for lack of memory, and then may have written a part of the change.
"""

# Not measured.
_SPARE_ENTRIES = 64  # empty entries at the end of a hash table, for keys that hash there
_MAX_LOAD = 0.7  # used entries per value of the hash, above which a larger table is built
_GROWTH_FACTOR = 1.5  # factor by which the number of rows grows, at least

_KEY, _ROW = 0, 1  # columns of the entries of a hash table; the row is -1 for an empty entry


class ServedTable(Protocol):
    """A table of a follower, which must write changes in the order in which it prepared them.

    Methods raise LogError if the change is of another table, and ValueError for rows that the
    table does not accept, e.g. that its format does not hold; nothing is written then. The function
    of `prepare_whole` raises LogError, after it has written, if a dynamic table has too few slots
    for the keys.
    """

    def prepare(self, change: TableChange) -> Write:
        """Check a change; return the function that applies it."""

    def prepare_whole(self, change: TableChange) -> Write:
        """Check a change with all rows; return the function that replaces the table by them."""


def served_tables(model: nn.Module, names: Collection[str] | None = None) -> dict[str, ServedTable]:
    """Return the tables of a model by name: those of `names`, or (None) all.

    Raises:
        KeyError: the model lacks one of `names`.
        TypeError: the model is sharded, or has no tables that rows can describe.
        ValueError: two of these tables have one name and are not known to be copies, one was
            pruned, is in a `HostEmbeddingBags`, has an index in shared memory, or is a float table
            on disk.
    """
    model_tables = find_tables(model)
    if model_tables.ranks.size > 1:
        raise TypeError(
            "a follower has whole tables in one process, and this model is sharded: give it the "
            "unsharded model, or emblib.inference.for_inference of its tables"
        )
    # Per table its name, the function that serves it, and the runs that its module names.
    tables: list[tuple[str, Callable[[], ServedTable], set[str]]] = [
        (t.name, partial(_serve_plain, t), _log_runs(t.module)) for t in model_tables.tables
    ]
    tables += [(n, partial(DynamicRows, handle), set()) for n, handle in tables_of(model).items()]
    for module in model.modules():
        if isinstance(module, InferenceEmbeddingBags):
            for t, name in enumerate(module.rows.table_names):
                serve_indexed = partial(_serve_indexed, module, t, name)
                tables.append((name, serve_indexed, _log_runs(module.rows)))
        elif isinstance(module, HostEmbeddingBags):
            names_in_host = module.rows.table_names
            tables += [(name, partial(_refuse_in_host, name), set()) for name in names_in_host]
    if not tables:
        raise TypeError(
            f"{type(model).__name__} has no tables that a follower can serve: pass the model with "
            "the tables, e.g. for_inference(...) of them; tensor trains cannot be followed"
        )
    known_names = {name for name, *_ in tables}
    if unknown_names := sorted(set(names or ()) - known_names):
        raise KeyError(f"the model has no tables {unknown_names}, only {sorted(known_names)}")
    copies: dict[str, list[ServedTable]] = {}
    runs_of_copies: dict[str, set[str]] = {}  # those that all copies name
    for name, serve, runs in tables:
        if names is None or name in names:
            copies.setdefault(name, []).append(serve())
            runs_of_copies[name] = runs_of_copies.get(name, runs) & runs
    repeated_names = [name for name in copies if len(copies[name]) > 1]
    if unknown_names := sorted(name for name in repeated_names if not runs_of_copies[name]):
        raise ValueError(
            f"tables of a follower must differ in name, and there are several {unknown_names}; "
            "read-only copies of one table, e.g. of SharedTables, may have one name if they were "
            "frozen or converted while the ChangeLog of the table was open; or make a follower of "
            "each module, or leave them out with tables="
        )
    return {
        name: _RowCopies(found) if len(found) > 1 else found[0] for name, found in copies.items()
    }


def _log_runs(module: nn.Module) -> set[str]:
    """Return the runs that a module of rows names; of one run, tables of one name are copies."""
    return set(module.log_runs) if isinstance(module, QuantizedEmbeddingBags) else set()


class _RowCopies:
    """Read-only copies of one table, which take the same changes."""

    def __init__(self, tables: Sequence[ServedTable]) -> None:
        self._tables = tables

    def prepare(self, change: TableChange) -> Write:
        """Check a change for all copies."""
        return self._write_all([table.prepare(change) for table in self._tables])

    def prepare_whole(self, change: TableChange) -> Write:
        """Check all rows for all copies."""
        return self._write_all([table.prepare_whole(change) for table in self._tables])

    def _write_all(self, functions: Sequence[Write]) -> Write:
        def write() -> None:
            for function in functions:
                function()

        return write


def _serve_plain(table: PlainTable) -> ServedTable:
    """Return the served table of a float or quantised table without index."""
    if isinstance(table.module, QuantizedEmbeddingBags):
        return QuantizedRows(table.name, lambda: table.module, table.number)
    return FloatRows(table)


def _serve_indexed(served: InferenceEmbeddingBags, table: int, name: str) -> ServedTable:
    """Return the served table of a table whose ids an index may map to rows."""
    index = served.indexes[table]
    if index is None:
        return QuantizedRows(name, lambda: served.rows, table)
    if index.kind is not IndexKind.HASH or index.num_ids >= 0:
        raise ValueError(
            f"table {name!r} was pruned, and a follower needs all rows: prune a copy from time to "
            "time, follow the table before it is pruned, or leave it out with tables="
        )
    if served.index.is_cpu and served.index.is_shared():
        raise ValueError(
            f"table {name!r} has its index in memory that several processes share, as torch sends "
            "modules to spawned ones: open the frozen file in each process, or follow "
            "copy.deepcopy(module)"
        )
    return IndexedRows(name, served, table)


def _refuse_in_host(name: str) -> NoReturn:
    raise ValueError(
        f"table {name!r} is in a HostEmbeddingBags, whose copies of rows stay as they are: follow "
        "the tables that it was made of, and make another one of them from time to time"
    )


def _check_fallback(name: str, change: TableChange, num_rows: int) -> None:
    """Raise LogError unless a change has `num_rows` fallback rows."""
    has_rows = bool(change.fallback)
    if has_rows != bool(num_rows) or (
        has_rows and not fallback.are_fallback_keys(change.fallback["keys"], num_rows)
    ):
        raise LogError(
            f"table {name!r} has {num_rows} fallback rows, and that of the log has "
            f"{'another number' if has_rows else 'none'}: they are different tables"
        )


def _check_rows(name: str, change: TableChange, num_rows: int, dim: int) -> None:
    """Raise LogError unless a change is of a table with these rows and columns."""
    if change.is_keyed:
        raise LogError(f"table {name!r} of the log has keys, that of the follower row numbers")
    keys = change.keys
    if keys.numel() and not 0 <= int(keys.min()) <= int(keys.max()) < num_rows:
        raise LogError(
            f"table {name!r} has {num_rows} rows, and the log has row {int(keys.max())}: they are "
            "different tables"
        )
    _check_dim(name, change, dim)


def _check_whole(name: str, change: TableChange, num_rows: int) -> None:
    """Raise LogError unless a change has all rows of a table."""
    if change.keys.numel() != num_rows:
        raise LogError(
            f"table {name!r} has {num_rows} rows, a snapshot in the log {change.keys.numel()}: "
            "they are different tables"
        )


def _check_dim(name: str, change: TableChange, dim: int) -> None:
    """Raise LogError unless the rows of a change are of a table with `dim` columns."""
    if change.dim != dim:
        raise LogError(
            f"table {name!r} has rows of {dim} values, in the log they have {change.dim}"
        )


class FloatRows:
    """A float table whose ids are row numbers.

    Raises:
        ValueError: the table is on disk.
    """

    def __init__(self, table: PlainTable) -> None:
        if table.module.tables[table.number].placement is Placement.DISK:
            raise ValueError(
                f"table {table.name!r} is on disk, where single rows are not written: follow with "
                "another placement, or with emblib.open_frozen"
            )
        self._table = table

    def prepare(self, change: TableChange) -> Write:
        """Check whole rows; states and hyperparameters are written if the table has the same.

        A change may also have some columns of the rows, from `first_column` on.
        """
        table = self._table
        _check_rows(table.name, change, table.num_rows, table.dim)

        @without_gradients
        def write() -> None:
            module: TableBatchedEmbeddingBags = table.module
            begin, end = change.first_column, change.first_column + change.weight.size(1)
            module.flush_and_empty()
            views = module.table_views()[table.number]
            for name, rows in change.rows().items():
                if name in views:
                    view = views[name]
                    view = view[:, begin:end] if name == "weight" else view
                    view[change.keys.to(view.device)] = rows.to(view)
            hyperparams = change.hyperparams
            if hyperparams is not None and hyperparams.shape == module.hyperparams.shape:
                module.load_hyperparams(hyperparams)

        return write

    def prepare_whole(self, change: TableChange) -> Write:
        """Check all rows."""
        _check_whole(self._table.name, change, self._table.num_rows)
        return self.prepare(change)


class QuantizedRows:
    """A read-only table whose ids are row numbers; `prepare` quantises rows.

    Args:
        name: name of the table.
        get_module: function that returns its module, which may be replaced by a larger one.
        table: number of the table there.
    """

    def __init__(
        self, name: str, get_module: Callable[[], QuantizedEmbeddingBags], table: int
    ) -> None:
        self._name, self._get_module, self._number = name, get_module, table

    def prepare(self, change: TableChange) -> Write:
        """Quantise whole rows."""
        module = self._get_module()
        spec = module.tables[self._number]
        _check_rows(self._name, change, spec.rows, spec.dim)
        packed = _pack_rows(module, self._number, change.weight)

        def write() -> None:
            view = self._get_module().table_views()[self._number]["packed"]
            view[change.keys.to(view.device)] = packed

        return write

    def prepare_whole(self, change: TableChange) -> Write:
        """Quantise all rows."""
        _check_whole(self._name, change, self._get_module().tables[self._number].rows)
        return self.prepare(change)


def _pack_rows(module: QuantizedEmbeddingBags, table: int, weight: Tensor) -> Tensor:
    """Return rows `[n, dim]` in the format of a table, uint8 `[n, row_bytes]` on its device."""
    name, spec = module.table_names[table], module.tables[table]
    packer = QuantizedEmbeddingBags(
        [TableSpec(max(weight.size(0), 1), spec.dim, name)],
        formats=[module.formats[table]],
        device=module.packed.device,
    )
    packer.write_rows(0, weight)
    return packer.table_views()[0]["packed"][: weight.size(0)]


class IndexedRows:
    """A read-only table of keys, see the beginning of this file.

    Args:
        name: name of the table.
        served: the module of the table; its rows and index are replaced when the table grows.
        table: number of the table there.
    """

    def __init__(self, name: str, served: InferenceEmbeddingBags, table: int) -> None:
        self._name, self._served, self._number = name, served, table
        # int64: rows without a key at the first change, None before it; rows of keys removed since.
        self._unused_rows: Tensor | None = None
        self._freed_rows = torch.empty(0, dtype=torch.int64, device="cpu")
        self._removed_row = -1  # row of the entries of removed keys; -1: not allocated yet
        self._num_used = 0  # entries of the index that are not empty

    def prepare(self, change: TableChange) -> Write:
        """Quantise the rows of keys."""
        module = self._served.rows
        if not change.is_keyed:
            raise LogError(f"table {self._name!r} of the log has row numbers, not keys")
        _check_dim(self._name, change, module.tables[self._number].dim)
        _check_fallback(self._name, change, self._index.fallback)
        packed = _pack_rows(module, self._number, change.weight)
        device = module.packed.device
        removed_keys, keys = change.removed.to(device), change.keys.to(device)
        if not change.fallback:
            return lambda: self._apply(removed_keys, keys, packed)
        fallback_indices = range_indices(change.fallback["keys"], self._index.fallback).to(device)
        fallback_rows = _pack_rows(module, self._number, change.fallback["weight"])

        def write() -> None:
            self._apply(removed_keys, keys, packed)
            self._view()[self._index.missing + fallback_indices] = fallback_rows

        return write

    def prepare_whole(self, change: TableChange) -> Write:
        """Quantise the rows of all keys."""
        write = self.prepare(change)

        def write_whole() -> None:
            _, keys, _ = self._live_entries()
            removed_keys = keys[~torch.isin(keys, change.keys.to(keys.device))]
            self._apply(removed_keys, change.keys.to(keys.device)[:0], self._view()[:0])
            write()

        return write_whole

    @property
    def _index(self) -> RowIndex:
        index = self._served.indexes[self._number]
        assert index is not None
        return index

    def _view(self) -> Tensor:
        """Return the rows of the table, uint8 `[rows, row_bytes]`, as a view."""
        return self._served.rows.table_views()[self._number]["packed"]

    def _entries(self) -> Tensor:
        """Return the entries of the index, int64 `[n, 2]`, as a view."""
        return self._index.entries.view(-1, 2)

    def _live_entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the positions of the keys in the index, the keys, and their rows; int64 `[n]`."""
        entries = self._entries()
        is_live = (entries[:, _ROW] >= 0) & (entries[:, _ROW] != self._removed_row)
        positions = is_live.nonzero().view(-1)
        return positions, entries[positions, _KEY], entries[positions, _ROW]

    def _apply(self, removed_keys: Tensor, keys: Tensor, packed: Tensor) -> None:
        """Remove keys, then write rows, so that rows of `removed_keys` are free for new `keys`.

        `removed_keys` and `keys` are int64 `[n]`, `packed` uint8 `[len(keys), row_bytes]`.
        """
        if self._unused_rows is None:
            self._find_free_rows()
        assert self._unused_rows is not None
        positions, is_found = _search_entries(self._entries(), self._index.hash_bits, removed_keys)
        positions = positions[is_found]
        rows = self._entries()[positions, _ROW]
        self._freed_rows = torch.cat([self._freed_rows, rows[rows != self._removed_row]])
        self._entries()[positions, _ROW] = self._removed_row
        positions, is_found = _search_entries(self._entries(), self._index.hash_bits, keys)
        rows = torch.full_like(keys, -1)
        rows[is_found] = self._entries()[positions[is_found], _ROW]
        has_row = is_found & (rows != self._removed_row)
        rows[~has_row] = self._take_rows(int((~has_row).sum()))
        self._view()[rows] = packed
        self._entries()[positions[is_found], _ROW] = rows[is_found]
        self._insert(keys[~is_found], rows[~is_found])

    def _take_rows(self, num_rows: int) -> Tensor:
        """Take rows that have no key, int64 `[num_rows]`: first those of removed keys.

        Builds a larger table if there are too few.
        """
        freed_rows, self._freed_rows = self._freed_rows[:num_rows], self._freed_rows[num_rows:]
        assert self._unused_rows is not None
        num_rows -= freed_rows.numel()
        if num_rows > self._unused_rows.numel():
            self._grow(num_rows - self._unused_rows.numel())
        fresh_rows, self._unused_rows = self._unused_rows[:num_rows], self._unused_rows[num_rows:]
        return torch.cat([freed_rows, fresh_rows])

    def _find_free_rows(self) -> None:
        """Find the rows without a key, and a row for removed keys."""
        spec, index = self._served.rows.tables[self._number], self._index
        device = self._served.rows.packed.device
        _, _, rows = self._live_entries()
        self._num_used = rows.numel()
        rows, counts = rows.unique(return_counts=True)
        is_free = torch.ones(spec.rows, dtype=torch.bool, device=device)
        is_free[rows] = False
        if index.missing >= 0:
            is_free[index.missing : index.missing + max(index.fallback, 1)] = False
        self._unused_rows = is_free.nonzero().view(-1)
        self._freed_rows = self._unused_rows[:0]
        self._removed_row = index.missing
        # Only the row of removed keys has several keys, if an earlier follower has removed several.
        repeated_rows = rows[counts > 1].tolist()
        if index.missing < 0 and repeated_rows:
            (self._removed_row,) = repeated_rows
        elif index.missing < 0:
            if not self._unused_rows.numel():
                self._grow(1)
            self._removed_row, self._unused_rows = int(self._unused_rows[0]), self._unused_rows[1:]
            zeros = torch.zeros(1, spec.dim, device="cpu")
            self._view()[self._removed_row] = _pack_rows(self._served.rows, self._number, zeros)[0]

    def _grow(self, num_rows: int) -> None:
        """Build a larger table; the rows of all tables of the module are copied."""
        old_module, free_rows = self._served.rows, self._unused_rows
        assert free_rows is not None
        row_counts = [spec.rows for spec in old_module.tables]
        rows_before = row_counts[self._number]
        row_counts[self._number] = max(int(rows_before * _GROWTH_FACTOR), rows_before + num_rows)
        module = old_module.with_rows(row_counts)
        for view, old_view in zip(module.table_views(), old_module.table_views(), strict=True):
            view["packed"][: old_view["packed"].size(0)] = old_view["packed"]
        self._served.rows = module
        added_rows = torch.arange(rows_before, row_counts[self._number], device=free_rows.device)
        self._unused_rows = torch.cat([free_rows, added_rows])

    def _insert(self, keys: Tensor, rows: Tensor) -> None:
        """Add keys with their rows, int64 `[n]` each, to the index, rebuilding it if it is full."""
        entries, bits = self._entries(), self._index.hash_bits
        self._num_used += keys.numel()
        is_full = keys.numel() > 0 and self._num_used > _MAX_LOAD * (1 << bits)
        if is_full or not _insert_entries(entries, bits, keys, rows):
            _, live_keys, live_rows = self._live_entries()
            is_waiting = ~torch.isin(keys, live_keys)  # some may be in already
            self._build(
                torch.cat([live_keys, keys[is_waiting]]), torch.cat([live_rows, rows[is_waiting]])
            )

    def _build(self, keys: Tensor, rows: Tensor) -> None:
        """Build the index again; the indexes of all tables of the module are copied."""
        self._num_used = keys.numel()
        entries, bits = quant.hash_entries(keys, rows)
        padding = torch.full((_SPARE_ENTRIES, 2), -1, dtype=torch.int64, device=entries.device)
        entries = torch.cat([entries, padding])
        served, indexes = self._served, list(self._served.indexes)
        indexes[self._number] = replace(
            self._index, entries=entries.flatten(), num_entries=entries.size(0), hash_bits=bits
        )
        rebuilt = InferenceEmbeddingBags(served.rows, indexes)
        served.index, served.index_tables = rebuilt.index, rebuilt.index_tables
        served.indexes = rebuilt.indexes


def _search_entries(entries: Tensor, bits: int, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entry at which the search of each key ends, and whether it has the key.

    A search that meets neither the key nor an empty entry ends behind the last entry.

    `entries` is int64 `[n, 2]` (key; row, -1 for an empty entry), `keys` int64 `[k]`; results are
    int64 and bool `[k]`. The first `bits` bits of the hash that `quant.hash_entries` uses choose
    the first entry.
    """
    positions = (keys ^ (keys >> 32 & 0xFFFFFFFF)) * quant.HASH_FACTOR
    positions = positions >> (64 - bits) & ((1 << bits) - 1) if bits else torch.zeros_like(keys)
    is_found = torch.zeros_like(keys, dtype=torch.bool)
    open_searches = torch.arange(keys.numel(), device=keys.device)
    while open_searches.numel():
        reached_entries = entries[positions[open_searches]]
        is_key = (reached_entries[:, _ROW] >= 0) & (reached_entries[:, _KEY] == keys[open_searches])
        is_found[open_searches[is_key]] = True
        open_searches = open_searches[(reached_entries[:, _ROW] >= 0) & ~is_key]
        positions[open_searches] += 1
        open_searches = open_searches[positions[open_searches] < entries.size(0)]
    return positions, is_found


def _insert_entries(entries: Tensor, bits: int, keys: Tensor, rows: Tensor) -> bool:
    """Insert distinct keys that are not in the table; return whether there was an entry for each.

    If not, some of the keys are inserted. Shapes are as in `_search_entries`; `rows` is int64
    `[k]`. Keys whose searches end at one entry are inserted one per round.
    """
    while keys.numel():
        positions, _ = _search_entries(entries, bits, keys)
        if int(positions.max()) >= entries.size(0):
            return False
        order = positions.argsort(stable=True)
        is_first = torch.ones_like(order, dtype=torch.bool)
        is_first[1:] = positions[order[1:]] != positions[order[:-1]]
        inserted = order[is_first]
        entries[positions[inserted]] = torch.stack([keys[inserted], rows[inserted]], dim=1)
        postponed = order[~is_first]
        keys, rows = keys[postponed], rows[postponed]
    return True


class DynamicRows:
    """A dynamic table that has one shard.

    Args:
        handle: handle of the table.
    """

    def __init__(self, handle: DynamicTable) -> None:
        self._name = handle.name
        (location,) = handle.shards.values()
        self._location: Any = location

    def _entries(self, change: TableChange) -> Entries:
        """Return the entries of a change, with its states if the table has the same states."""
        if not change.is_keyed:
            raise LogError(f"table {self._name!r} of the log has row numbers, not keys")
        state, number = self._location.module.state, self._location.index
        _check_dim(self._name, change, state.specs[number].dim)
        _check_fallback(self._name, change, state.specs[number].fallback_rows)
        fallback.check_rows(state, number, change.fallback)
        rows: dict[str, Rows] = dict(change.rows())
        if set(rows) != set(state.table_rows(number)):
            rows = {"weight": change.weight}
        assert change.stamps is not None
        entries = Entries(change.keys, change.stamps, change.scores, rows)
        check_entries(state, number, entries)
        return entries

    def _hyperparams(self, change: TableChange) -> Tensor:
        """Return the hyperparameters of a change if they fit the optimizer, else its own."""
        current, logged = self._location.module.state.hyperparams.cpu(), change.hyperparams
        return current if logged is None or logged.shape != current.shape else logged

    def prepare(self, change: TableChange) -> Write:
        """Check the entries."""
        entries = self._entries(change)

        def write() -> None:
            state, number = self._location.module.state, self._location.index
            hash_key = change.hash_key
            # First, since `apply_changes` warns of keys that expire in tables it does not change:
            # the other tables of the module have changes of the same boundary.
            state.index.set_tick(max(change.tick, state.index.tick))
            changes = ChangeSet(
                0,
                state.index.tick,
                {state.table_names[number]: Changes(entries, change.removed)},
                self._hyperparams(change),
                None if hash_key is None else torch.tensor([hash_key], device="cpu"),
                {state.table_names[number]: change.fallback},
            )
            apply_changes(state, changes)

        return write

    def prepare_whole(self, change: TableChange) -> Write:
        """Check all entries."""
        entries = self._entries(change)

        def write() -> None:
            state, number = self._location.module.state, self._location.index
            # Without a warning of other tables of the module, whose records follow.
            result = replace_entries(state, number, entries, hash_key=change.hash_key)
            fallback.write_rows(state, number, change.fallback)
            if result.left_out:
                raise LogError(
                    f"table {self._name!r} has no slot for {result.left_out} keys of the log: give "
                    "it the capacity of the tables that it follows"
                )
            state.load_hyperparams(self._hyperparams(change))
            state.restart_eviction_log()

        return write


def join_columns(changes: Sequence[TableChange]) -> list[TableChange]:
    """Join shards of one table by columns to whole rows; others stay as they are.

    Args:
        changes: changes of one table; the changes of a shard must be in the order of their steps.

    Raises:
        LogError: some columns are missing, or the shards have different rows.
    """
    if all(change.weight.size(1) == change.dim for change in changes):
        return list(changes)
    blocks: dict[int, list[TableChange]] = {}
    for change in changes:
        blocks.setdefault(change.first_column, []).append(change)
    shards = [_newest_rows(block_changes) for _, block_changes in sorted(blocks.items())]
    first_shard, weight = shards[0], torch.cat([shard.weight for shard in shards], dim=1)
    if any(not torch.equal(shard.keys, first_shard.keys) for shard in shards):
        raise LogError("the shards of a table by columns have logged different rows")
    if weight.size(1) != first_shard.dim:
        raise LogError(f"the log has {weight.size(1)} of the {first_shard.dim} columns of a table")
    return [first_shard._replace(weight=weight, first_column=0)]


def _newest_rows(changes: Sequence[TableChange]) -> TableChange:
    """Return one change with the last row of each key."""
    keys = torch.cat([change.keys for change in changes])
    weight = torch.cat([change.weight for change in changes])
    distinct_keys, key_of_row = keys.unique(return_inverse=True)
    last_rows = torch.zeros_like(distinct_keys)
    last_rows.scatter_reduce_(0, key_of_row, torch.arange(keys.numel(), device="cpu"), "amax")
    return changes[0]._replace(keys=distinct_keys, weight=weight[last_rows])


def concatenate(changes: Sequence[TableChange]) -> TableChange:
    """Concatenate the shards of a table, each with whole rows; `removed` is the first shard's.

    It is for changes with all rows, in which no keys are removed.
    """
    if len(changes) == 1:
        return changes[0]
    first_change = changes[0]
    optional_columns: dict[str, Any] = {}
    for name in ("stamps", "scores"):
        columns = [column for change in changes if (column := getattr(change, name)) is not None]
        optional_columns[name] = torch.cat(columns) if len(columns) == len(changes) else None
    hash_keys = {change.hash_key for change in changes}
    fallback_rows = {
        name: torch.cat([change.fallback[name] for change in changes])
        for name in first_change.fallback
    }
    return first_change._replace(
        keys=torch.cat([change.keys for change in changes]),
        weight=torch.cat([change.weight for change in changes]),
        states={
            name: torch.cat([change.states[name] for change in changes])
            for name in first_change.states
        },
        tick=max(change.tick for change in changes),
        hash_key=first_change.hash_key if len(hash_keys) == 1 else None,
        fallback=fallback_rows,
        **optional_columns,
    )
