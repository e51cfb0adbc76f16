"""Cached tensor trains in a collection: the module of several tables, and their handles.

`CachedTTModule` is a `CachedTTEmbeddingBags` of several tables. Besides its cores each table has
stored rows (cached ones and, with `SPILL`, evicted ones) and a count of lookups per id. The handle
of a table, `CachedTTHandle`, has the cores as parameters and two children: `cache` (stored rows and
their ids) and `counts`. State dicts have all of these per table, so they do not depend on which
tables share a module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from emblib.attribute_errors import shows_attribute_errors
from emblib.dynamic import CachedTTEmbeddingBags, RowEviction, TTCache, TTCacheStats
from emblib.dynamic.hash_index import MAX_TICK
from emblib.dynamic.hash_table import TableRows
from emblib.grad_mode import without_gradients
from emblib.ops import autograd
from emblib.ops.hash import bytes_per_slot
from emblib.optim import Optimizer
from emblib.specs import (
    BoundsCheck,
    DynamicSpec,
    Pooling,
    format_config,
)
from emblib.storage.base import MemoryBytes, TableSlice, distinct_names, precision_of
from emblib.storage.dense import Dense, DenseHandle, DenseModule
from emblib.storage.tt_module import TTHandle, TTModule, core_views
from emblib.tables import state_dicts

_WORD_BYTES = 8  # of a key or the number of a row
_STATISTICS = ("counters", "changes", "since")  # entries of `cache` that are not by row


def check_cache(cache: Any) -> None:
    """Raise TypeError or ValueError unless `cache` is a valid cache of one table."""
    if not isinstance(cache, TTCache):
        raise TypeError(f"cache must be None or a TTCache, e.g. TTCache(10_000), got {cache!r}")
    for name in ("rows", "spill_rows"):
        value = getattr(cache, name)
        if value is not None and not isinstance(value, int):
            raise ValueError(
                f"{name} of the cache of a table must be one number, got {value!r}: give each "
                "table a TTCache of its own; tables that agree in the rest share a module anyway"
            )


def check_optimizer(slices: Sequence[TableSlice], cache: TTCache, optimizer: Optimizer) -> None:
    """Raise ValueError for an optimizer that cannot update both stored rows and cores."""
    names = ", ".join(repr(table_slice.config.name) for table_slice in slices)
    if optimizer.deferred:
        raise ValueError(
            f"{format_config(optimizer)} applies gradients when the cache of {names} may have "
            "replaced rows since the lookup: leave deferred out, or the cache of "
            "storage.TensorTrain"
        )
    if cache.eviction is RowEviction.SPILL and not autograd.updates_in_backward(optimizer):
        raise ValueError(
            f"{format_config(optimizer)} leaves gradients, and rows that {names} spill to host "
            "memory have none: give the collection or these tables one of emblib.optim, e.g. "
            "optimizer=optim.SGD(lr=0.1), or the cache another eviction"
        )


def joint_cache(slices: Sequence[TableSlice]) -> TTCache:
    """Return one `TTCache` for all tables of a module, with their rows in the order of `slices`."""
    caches = [_cache_of(table_slice) for table_slice in slices]
    first_cache = caches[0]
    counted_rows = None
    if any(cache.counted for cache in caches):
        caches_and_slices = zip(caches, slices, strict=True)
        counted_rows = sum(
            cache.counted_of([table_slice.spec]) for cache, table_slice in caches_and_slices
        )
    spilled_rows = None
    if first_cache.eviction is RowEviction.SPILL:
        caches_and_slices = zip(caches, slices, strict=True)
        spilled_rows = [
            _spilled_rows(cache, table_slice) for cache, table_slice in caches_and_slices
        ]
    # `check_cache` allows one number per table.
    cached_rows = [rows for cache in caches if isinstance(rows := cache.rows, int)]
    return TTCache(cached_rows, first_cache.eviction, counted_rows, first_cache.every, spilled_rows)


def _cache_of(table_slice: TableSlice) -> TTCache:
    """Return the cache of a slice's storage."""
    storage: Any = table_slice.storage
    cache: TTCache = storage.cache
    return cache


def _spilled_rows(cache: TTCache, table_slice: TableSlice) -> int:
    """Return the maximum number of spilled rows of a table; cached rows are not counted."""
    (num_stored,), (num_cached,) = (
        cache.stored_rows_of([table_slice.spec]),
        cache.rows_of([table_slice.spec]),
    )
    return num_stored - num_cached


def stored_rows_slice(table_slice: TableSlice, num_rows: int, storage: Dense) -> TableSlice:
    """Return the stored rows of a table as a slice of a dense table; initial values are zeros."""
    config: Any = table_slice.config
    rows_config = replace(
        config, num_embeddings=num_rows, storage=storage, weight_init_min=0.0, weight_init_max=0.0
    )
    return TableSlice.whole(rows_config)


def nbytes(table_slice: TableSlice, optimizer: Optimizer | None, device: str) -> MemoryBytes:
    """Return the bytes of stored rows, their states and index, and counts of ids, without cores.

    Spilled rows in host memory count as host bytes if `device` is "cuda", else as device bytes.
    """
    cache, spec = _cache_of(table_slice), table_slice.spec
    (num_rows,) = cache.stored_rows_of([spec])
    storage = Dense(cache.placement, cache.row_cache([spec]))
    sizes = storage.nbytes(stored_rows_slice(table_slice, num_rows, storage), optimizer, device)
    index, counts = cache.index_specs([spec])
    # The key of each row, and the row of each slot.
    word_bytes = _WORD_BYTES * (num_rows + index.rows)
    return sizes._replace(device=sizes.device + word_bytes + _index_bytes(index, counts, device))


def _index_bytes(index: DynamicSpec, counts: DynamicSpec, device: str) -> int:
    """Return the bytes of the slots of both hash tables."""
    return sum(spec.rows * bytes_per_slot(spec.eviction.order, device) for spec in (index, counts))


class CachedTTModule(CachedTTEmbeddingBags):
    """Cached tensor trains of a collection; initial cores are those of trains without a cache.

    Arguments are those of `TTModule`; all slices are whole tables with a cache.
    """

    def __init__(
        self,
        slices: Sequence[TableSlice],
        feature_tables: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> None:
        self._slices, self._seeds = tuple(slices), tuple(seeds)
        self._feature_tables = tuple(feature_tables)
        names = distinct_names([table_slice.config.name for table_slice in slices])
        super().__init__(
            [table_slice.spec_named(name) for table_slice, name in zip(slices, names, strict=True)],
            joint_cache(slices),
            optimizer,
            pooling=pooling,
            feature_tables=feature_tables,
            precision=precision_of(slices[0]),
            device=device,
        )

    def _make_trains(
        self, optimizer: Optimizer | None, init: str, options: dict[str, Any]
    ) -> TTModule:
        return make_trains(
            self._slices,
            self._feature_tables,
            optimizer,
            options["pooling"],
            self._seeds,
            options["device"],
        )

    def _make_rows(self, optimizer: Optimizer | None, options: dict[str, Any]) -> DenseModule:
        return make_rows(
            self._slices,
            self._feature_tables,
            optimizer,
            options["pooling"],
            self.cache,
            options["device"],
        )

    @property
    def hyperparams(self) -> Tensor:
        """Return the optimizer's numbers, float64, equal for cores and stored rows."""
        return self.trains.hyperparams

    def redraw(self, seeds: Sequence[int]) -> None:
        """Draw the cores again with one seed per table, and empty the cache."""
        trains: Any = self.trains
        trains.seeds = tuple(seeds)  # with which `reset_parameters` draws
        self.reset_parameters()

    # Access to one table, by its ids; inside the module, keys number the ids of all tables

    def stored_ids(self, table: int) -> Tensor:
        """Return the id of each stored row of a table, int64 `[rows]`; -1 marks free rows."""
        keys = self._stored_keys(table)
        return torch.where(keys < 0, keys, keys - self._first_keys[table])

    @without_gradients
    def set_stored_ids(self, table: int, ids: Tensor) -> None:
        """Set the id of each stored row, int64 `[rows]`, -1 for free rows.

        Backward through an earlier lookup raises afterwards.
        """
        stored_keys, ids = self._stored_keys(table), ids.to(self.key_of_row.device)
        keys = torch.where(ids < 0, -1, ids + self._first_keys[table])
        self._invalidate_choice()
        stored_keys.copy_(keys)
        self._rebuild_index()

    def lookup_counts(self, table: int) -> dict[str, Tensor]:
        """Return `keys` (ids, ascending), `stamps` and `scores` (uses) of a table, int64 `[n]`."""
        rows = self._counted_ids(table)
        ids = rows.keys - self._first_keys[table]
        order = ids.argsort()
        return {"keys": ids[order], "stamps": rows.stamps[order], "scores": rows.scores[order]}

    @without_gradients
    def set_lookup_counts(self, table: int, counts: Mapping[str, Tensor], tick: int) -> None:
        """Replace the counts of a table by the result of `lookup_counts` at clock `tick`.

        The clock of all tables becomes at least `tick`. The tensors may be on any device.
        """
        tick = max(self.counts.index.tick, tick)  # `load` below must not advance the clock
        self._forget_counts(table)
        device = self.key_of_row.device
        keys, stamps, uses = (counts[name].to(device) for name in ("keys", "stamps", "scores"))
        values = torch.zeros(len(keys), 1, device=device)
        self.counts.load(TableRows(keys + self._first_keys[table], values, stamps, uses))
        self.counts.index.set_tick(tick)

    def statistics(self, table: int) -> dict[str, Tensor]:
        """Return the statistics of a table by name.

        `counters`, an int64 view, has the counts of `cache_stats`. `changes`, a float64 view `[2]`,
        has the sums over evicted rows of their squared difference from the rows that the cores
        compute: before the eviction, and after it. `since`, a new int64 scalar, is the number of
        training lookups since the last `populate`.
        """
        num_lookups = torch.tensor(self._lookups_since[table], device="cpu")
        values = (self.counters[table], self.changes[table], num_lookups)
        return dict(zip(_STATISTICS, values, strict=True))

    def set_statistics(self, table: int, statistics: Mapping[str, Tensor]) -> None:
        """Set those `statistics` of a table that are in `statistics`; other entries are ignored."""
        for name in ("counters", "changes"):
            if name in statistics:
                getattr(self, name)[table] = statistics[name].to(self.counters.device)
        if "since" in statistics:
            self._lookups_since[table] = int(statistics["since"])

    def _fill_layout(self) -> None:
        """Recompute buffers, and empty rows and hash tables, whose memory is new."""
        super()._fill_layout()
        # The memory is new: neither rows nor hash tables have their values any more.
        self._invalidate_choice()
        self.key_of_row.fill_(-1)
        self._rebuild_index()
        self.counts.clear()
        self.reset_cache_stats()
        self._lookups_since = [0] * len(self.tables)


def make_trains(
    slices: Sequence[TableSlice],
    feature_tables: Sequence[int],
    optimizer: Any,
    pooling: Pooling,
    seeds: Sequence[int],
    device: torch.device,
) -> TTModule:
    """Return the module of the cores, without bounds checks: the cached module makes them."""
    trains = TTModule(slices, feature_tables, optimizer, pooling, seeds, device)
    trains.bounds_check = BoundsCheck.NONE
    return trains


def make_rows(
    slices: Sequence[TableSlice],
    feature_tables: Sequence[int],
    optimizer: Any,
    pooling: Pooling,
    cache: TTCache,
    device: torch.device,
) -> DenseModule:
    """Return the module of the stored rows, without bounds checks, see `make_trains`."""
    specs = [table_slice.spec for table_slice in slices]
    row_cache = cache.row_cache(specs)
    row_slices = [
        stored_rows_slice(table_slice, num_rows, Dense(cache.placement, row_cache))
        for table_slice, num_rows in zip(slices, cache.stored_rows_of(specs), strict=True)
    ]
    stored_rows = DenseModule(
        row_slices, feature_tables, optimizer, pooling, [0] * len(row_slices), row_cache, device
    )
    stored_rows.bounds_check = BoundsCheck.NONE
    return stored_rows


class CachedTTPlaceholder(nn.Module):
    """Placeholder on meta for a `CachedTTModule`, whose hash tables cannot be there."""

    def __init__(
        self,
        slices: Sequence[TableSlice],
        feature_tables: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> None:
        super().__init__()
        self.optimizer, self.output_dtype = optimizer, torch.float32
        self.trains = make_trains(slices, feature_tables, optimizer, pooling, seeds, device)
        self.rows = make_rows(
            slices, feature_tables, optimizer, pooling, joint_cache(slices), device
        )

    def forward(self, *arguments: Any, **options: Any) -> None:
        """Raise RuntimeError: there is no cache to look rows up in."""
        as_cached_module(self)

    @property
    def hyperparams(self) -> Tensor:
        """Return the numbers of the optimizer, on meta."""
        return self.trains.hyperparams

    def nbytes(self) -> dict[str, int]:
        """Return an empty dict: there is no memory."""
        return {}


def table_views(module: Any) -> list[dict[str, Tensor]]:
    """Return per table the views of cores, stored rows (`cache.weight`) and optimizer states.

    The row cache on the device, if there is one, is flushed and emptied first.
    """
    module.rows.flush_and_empty()
    return [
        {
            **core_views(module.trains, t),
            **{f"cache.{name}": view for name, view in row_views.items()},
        }
        for t, row_views in enumerate(module.rows.table_views())
    ]


class CachedTTHandle(TTHandle):
    """A tensor train with a cache of rows: `cores.0`, ..., and `cache.weight`, its stored rows.

    Its state dict also has `cache.keys` (the id of each stored row, -1 for free rows),
    `cache.<state>` (optimizer states of stored rows), statistics, and `counts` (lookups per id). It
    loads into a table with another number of stored rows, if the saved rows fit. A state dict with
    cores but without `cache.keys` empties the cache.

    Example:
        >>> storage = emblib.storage.TensorTrain((8, 8), cache=emblib.TTCache(100))
        >>> table = emblib.EmbeddingBagConfig(1_000, 16, "query", storage=storage)
        >>> bags = emblib.EmbeddingBagCollection([table], optimizer=emblib.optim.SGD(0.1))
        >>> train = bags.handles()["query"]
        >>> train.populate()  # store the rows that were used most
        >>> train.cache_stats().hit_rate  # nothing was looked up so far
        nan
    """

    cache: StoredRowsHandle
    counts: CountsHandle

    def attach(self, module: Any, index: int) -> None:
        """Attach to table `index` of `module`, and register its cores and stored rows."""
        self._module_tuple = (module,)  # a tuple, so that it is not a child of this module
        super().attach(module.trains, index)
        if "cache" in self._modules:
            self.cache.attach(module, index)
            self.counts.attach(module, index)
        else:
            self.cache = StoredRowsHandle(self._storage, module, index)
            self.counts = CountsHandle(module, index)

    @property
    def _cached_module(self) -> Any:
        """Return the `CachedTTModule` of this table; on meta its placeholder."""
        return self._module_tuple[0]

    @property
    @shows_attribute_errors
    def bags(self) -> CachedTTModule:
        """Return the module that stores this table.

        Raises:
            RuntimeError: the table is on meta, where it has no cache.
        """
        return as_cached_module(self._cached_module)

    def set_owner(self, owner: nn.Module, name: str) -> None:
        """Become the handle of the table `name` of a collection."""
        super().set_owner(owner, name)
        self.cache.set_owner(owner, name)

    def bind(self) -> None:
        """Register the cores with this handle, and make the stored rows a parameter."""
        super().bind()
        self.cache.bind()

    def checked_modules(self) -> list[nn.Module]:
        """Return the module whose parameter is a view of memory."""
        return [self.cache]

    def fused_modules(self) -> list[Any]:
        """Return the module of the cores and the module of the stored rows."""
        return [self.module, self._cached_module.rows]

    def views(self) -> dict[str, Tensor]:
        """Return cores, stored rows and optimizer states, as views."""
        return table_views(self._cached_module)[self.index]

    def dense_rows(self) -> Tensor:
        """Return all rows `[rows, dim]`; rows that are not stored are computed from the cores."""
        return self.bags.to_dense(self.index)

    def dense_blocks(self) -> Iterator[Tensor]:
        """Yield all rows in blocks, in order."""
        yield from self.bags.dense_blocks(self.index)

    # The cache

    def populate(self) -> None:
        """Cache the most used rows of this table, see `CachedTTEmbeddingBags.populate`."""
        self.bags.populate(self.index)

    def empty_cache(self) -> None:
        """Remove stored rows and counts of this table, see `CachedTTEmbeddingBags.empty_cache`."""
        self.bags.empty_cache(self.index)

    def cached_ids(self) -> Tensor:
        """Return the ids whose rows are stored, cached or spilled, int64 `[n]`."""
        return self.bags.cached_ids(self.index)

    def spilled_ids(self) -> Tensor:
        """Return the ids of rows stored outside the cache, int64 `[n]`; empty without `SPILL`."""
        return self.bags.spilled_ids(self.index)

    def cache_stats(self) -> TTCacheStats:
        """Return the lookups, hits and losses of this table (reads the device)."""
        return self.bags.cache_stats().tables[self.bags.rows.table_names[self.index]]

    def reset_cache_stats(self) -> None:
        """Set the counts of `cache_stats` to zero, except for `spilled`."""
        self.bags.reset_cache_stats(self.index)

    # Copies and state dicts

    def adopt(self, other: TTHandle) -> None:
        """Take over the parameters of another handle, and copy its cache unless one is on meta.

        Stored rows and their ids, the counts of lookups and the statistics are copied; optimizer
        states are not.
        """
        super().adopt(other)
        assert isinstance(other, CachedTTHandle)
        self.cache.adopt(other.cache)
        if has_cache(self._cached_module) and has_cache(other._cached_module):  # noqa: SLF001 - of the same class
            target, source, index = self.bags, other.bags, other.index
            target.set_stored_ids(self.index, source.stored_ids(index))
            target.set_lookup_counts(
                self.index, source.lookup_counts(index), source.counts.index.tick
            )
            target.set_statistics(self.index, source.statistics(index))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        cache_prefix = f"{prefix}cache."
        if state_dicts.refuse_invalid(self, state_dict, prefix, arguments[-1]):
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if f"{prefix}cores.0" in state_dict and f"{cache_prefix}keys" not in state_dict:
            self.cache.clear()


def has_cache(module: Any) -> bool:
    """Return whether a module is no `CachedTTPlaceholder`, which has no cache."""
    return not isinstance(module, CachedTTPlaceholder)


def as_cached_module(module: Any) -> CachedTTModule:
    """Return `module`; raise RuntimeError if it is a placeholder on meta."""
    if not has_cache(module):
        raise RuntimeError(
            "a tensor train has no cache of rows on meta: move the collection with "
            "to_empty(device=...) first"
        )
    cached_module: CachedTTModule = module
    return cached_module


class StoredRowsHandle(DenseHandle):
    """The stored rows of a cached train: `weight` `[stored rows, dim]`, in the order of `keys`."""

    def attach(self, module: Any, index: int) -> None:
        """Attach to the stored rows of table `index` of a module."""
        self._module_tuple = (module,)  # a tuple, as in `CachedTTHandle`
        super().attach(module.rows, index)

    @property
    def _cached_module(self) -> Any:
        """Return the `CachedTTModule` of these rows, or its placeholder on meta."""
        return self._module_tuple[0]

    def adopt(self, other: DenseHandle) -> None:
        """Take over the other handle's parameter and, unless on meta, copy its values."""
        if self.weight.is_meta:
            self._parameters["weight"] = other.get_parameter("weight")
        else:
            super().adopt(other)

    def clear(self) -> None:
        """Remove all stored rows, losing their updates."""
        if has_cache(self._cached_module):
            bags = self._cached_module
            bags.set_stored_ids(self.index, torch.full_like(bags.stored_ids(self.index), -1))

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the stored rows in a state dict."""
        key = f"{prefix}keys"
        if not has_cache(self._cached_module):
            return
        bags: CachedTTModule = self._cached_module
        tensors = self._tensors()
        if key in state_dict:
            keys = state_dict[key]
            problem = state_dicts.key_problem(keys, bags.tables[self.index].rows)
            if not problem and f"{prefix}weight" not in state_dict:
                problem = "there is no weight of these ids"
            if not problem and int((keys >= 0).sum()) > len(tensors["weight"]):
                problem = (
                    f"the state dict has {int((keys >= 0).sum())} stored rows of table "
                    f"{self.name!r}, here it has {len(tensors['weight'])}: give "
                    "storage.TensorTrain a larger TTCache, or call empty_cache() of the table "
                    "before saving"
                )
            if problem:
                yield f"{key}: {problem}"
                return
            for name, view in tensors.items():
                if prefix + name in state_dict:
                    shape = (len(keys), *view.shape[1:])
                    problem = state_dicts.tensor_problem(state_dict[prefix + name], view, shape)
                    if problem:
                        yield f"{prefix}{name}: {problem}"
        statistics = {prefix + name: value for name, value in bags.statistics(self.index).items()}
        yield from state_dicts.count_problems(state_dict, statistics)

    def _tensors(self) -> dict[str, Tensor]:
        """Return views of `weight` and optimizer states; rows in a device cache may be newer."""
        module: DenseModule = self.module
        return module.view_of(self.index)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not has_cache(self._cached_module):
            return
        bags: CachedTTModule = self._cached_module
        destination[f"{prefix}keys"] = bags.stored_ids(self.index)
        for name, view in self._tensors().items():
            if name != "weight":
                destination[prefix + name] = view
        for name, values in bags.statistics(self.index).items():
            destination[prefix + name] = values

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Load stored rows: at their positions if the sizes agree, else into the first rows."""
        _, _, missing_keys, unexpected_keys, errors = arguments
        if state_dicts.refuse_invalid(self, state_dict, prefix, errors):
            return
        if self._refuses_load_on_meta(state_dict, prefix, errors) or not has_cache(
            self._cached_module
        ):
            missing_keys.append(f"{prefix}keys")
            return
        names = self._entry_names()
        saved_entries = state_dicts.entries_under(prefix, state_dict)
        missing_keys.extend(prefix + name for name in names if name not in saved_entries)
        unexpected_keys.extend(prefix + name for name in sorted(saved_entries.keys() - set(names)))
        if "keys" in saved_entries:
            self._write_rows(saved_entries)

    @without_gradients
    def _write_rows(self, saved_entries: Mapping[str, Tensor]) -> None:
        """Replace the stored rows by saved ones."""
        bags: CachedTTModule = self._cached_module
        ids = saved_entries["keys"]
        bags.rows.flush_and_empty()
        with bags.rows.overwriting():
            tensors = self._tensors()
            capacity = len(tensors["weight"])
            stored_positions = (ids >= 0).nonzero().squeeze(1)
            if len(ids) != capacity:
                ids = torch.cat(
                    [ids[stored_positions], ids.new_full((capacity - len(stored_positions),), -1)]
                )
            for name, view in tensors.items():
                values = saved_entries.get(name)
                if values is None:
                    view.zero_()
                elif len(values) == capacity:
                    view.copy_(values)
                else:
                    view.zero_()
                    view[: len(stored_positions)] = values[stored_positions.to(values.device)].to(
                        view
                    )
        bags.set_stored_ids(self.index, ids)
        bags.set_statistics(self.index, saved_entries)

    def _entry_names(self) -> list[str]:
        return ["keys", *self._tensors(), *_STATISTICS]

    @property
    @shows_attribute_errors
    def _names_in_checkpoints(self) -> SimpleNamespace:
        return SimpleNamespace(**dict.fromkeys(self._entry_names(), 0))

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell `torch.distributed.checkpoint.state_dict` which attribute a key begins with."""
        names = [name for name in self._entry_names() if name != "weight"]
        return dict.fromkeys(names, "_names_in_checkpoints")


class CountsHandle(nn.Module):
    """Lookups per id of a cached train; the state dict has `keys`, `stamps`, `scores`, `tick`."""

    def __init__(self, module: Any, index: int) -> None:
        super().__init__()
        self.attach(module, index)

    def attach(self, module: Any, index: int) -> None:
        """Attach to the counts of table `index` of a module."""
        self._module_and_index = (module, index)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        module, index = self._module_and_index
        if has_cache(module):
            for name, values in module.lookup_counts(index).items():
                destination[prefix + name] = values
            destination[f"{prefix}tick"] = module.counts.index.clock.clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Replace the counts of the table if all entries are there, but none on meta."""
        _, _, missing_keys, unexpected_keys, errors = arguments
        if state_dicts.refuse_invalid(self, state_dict, prefix, errors):
            return
        module, index = self._module_and_index
        saved_entries = state_dicts.entries_under(prefix, state_dict)
        missing_names = [name for name in _COUNT_ENTRIES if name not in saved_entries]
        missing_keys.extend(prefix + name for name in missing_names)
        unexpected_keys.extend(
            prefix + name for name in sorted(saved_entries.keys() - set(_COUNT_ENTRIES))
        )
        if has_cache(module) and not missing_names:
            module.set_lookup_counts(index, saved_entries, int(saved_entries["tick"]))

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the counts in a state dict."""
        module, index = self._module_and_index
        if not has_cache(module):
            return
        key, num_ids = f"{prefix}keys", 0
        if key in state_dict:
            keys = state_dict[key]
            problem = state_dicts.key_problem(keys, module.tables[index].rows)
            if not problem and bool((keys < 0).any()):
                problem = f"must be ids, got {keys}"
            if problem:
                yield f"{key}: {problem}"
                return
            num_ids = len(keys)
        target = torch.empty(num_ids, dtype=torch.int64, device="cpu")
        targets = {prefix + name: target for name in ("stamps", "scores")}
        yield from state_dicts.count_problems(state_dict, targets)
        yield from state_dicts.number_problems(state_dict, f"{prefix}tick", below=MAX_TICK)

    @property
    def _names_in_checkpoints(self) -> SimpleNamespace:
        return SimpleNamespace(**dict.fromkeys(_COUNT_ENTRIES, 0))

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell `torch.distributed.checkpoint.state_dict` which attribute a key begins with."""
        return dict.fromkeys(_COUNT_ENTRIES, "_names_in_checkpoints")


_COUNT_ENTRIES = ("keys", "stamps", "scores", "tick")
"""The entries of `counts` in a state dict."""
