"""Tensor-train storage: a row is a product of slices of small cores, one slice of each.

A shard is a range of rows and columns, and again a tensor train. Let P and Q be the products of the
row and dim factors of all cores but core 0. The shard with rows `[a * P, b * P)` and columns
`[c * Q, d * Q)` has the slice `[a:b, c * R_1 : d * R_1]` of core 0, and a copy of every other core.
The gradients of the copies are summed over the shards (`emblib.sharding.tensor_train`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from emblib.dynamic import TTCache
from emblib.optim import Optimizer
from emblib.specs import (
    IdOrder,
    MatmulPrecision,
    Pooling,
    TTSpec,
    check_cores,
    check_count,
    check_sequence,
)
from emblib.storage import cached_train
from emblib.storage.base import (
    CutUnits,
    KeyBlock,
    MemoryBytes,
    RowTimes,
    Span,
    Storage,
    TableDescription,
    TableModule,
    TableSlice,
    TensorLayout,
    precision_of,
    row_bytes,
    state_bytes,
)
from emblib.storage.handles import TableHandle
from emblib.storage.tt_module import TTHandle, TTModule, core_views
from emblib.tt import layout_entry
from emblib.tt.initializers import find_initializer

_FLOAT_BYTES = torch.float32.itemsize


@dataclass(frozen=True)
class TensorTrain(Storage):
    """Rows are products of 2 to 4 small cores, see `TTSpec`; cores have the table's `data_type`.

    Args:
        ranks: inner ranks, one fewer than cores.
        row_factors: factors of the number of rows, one per core; () lets `emblib.tt.shapes` choose
            them. One of them may be -1: it is computed from the number of rows and the others.
        dim_factors: factors of the row length, as `row_factors`.
        init: distribution of the initial values, as in `TTEmbeddingBag`.
        ids: order of the ids in the train, see `TTSpec`. A table with permuted ids is not sharded
            by rows.
        seed: seed of the permutation.
        cache: cache that stores the most used rows as dense rows, see `TTCache`; its `rows` and
            `spill_rows` must be one number each. None has no cache. A table with a cache cannot be
            sharded. Tables whose caches agree in `eviction` and `every` share a module and the
            memory of their counts.
        matmul: precision of the products of cores on a GPU, see `MatmulPrecision`.

    Raises:
        TypeError: ranks or factors are not a sequence of ints, `seed` is not an int, or `cache` is
            not a `TTCache`.
        ValueError: a number is out of its range; there are not 2 to 4 cores, or not one factor per
            core; `init`, `ids` or `matmul` is unknown; or the cache has several numbers of rows.
            Factors that do not fit a table are found when its spec is made.

    Example:
        >>> storage = emblib.storage.TensorTrain((8, 8), cache=emblib.TTCache(100, every=1_000))
        >>> table = emblib.EmbeddingBagConfig(10_000, 16, "query", storage=storage)
        >>> bags = emblib.EmbeddingBagCollection([table], optimizer=emblib.optim.SGD(0.1))
        >>> sum(core.numel() for core in bags.handles()["query"].cores)  # instead of 160,000
        3840
    """

    ranks: tuple[int, ...]
    row_factors: tuple[int, ...] = ()
    dim_factors: tuple[int, ...] = ()
    init: str = "gaussian"
    ids: IdOrder = IdOrder.AS_GIVEN
    seed: int = 0
    cache: TTCache | None = None
    matmul: MatmulPrecision = MatmulPrecision.FLOAT32

    plan_name: ClassVar[str] = "TensorTrain"
    is_alternative: ClassVar[bool] = True
    shares_parameters: ClassVar[bool] = True
    updates_need_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("ranks", "row_factors", "dim_factors"):
            value = check_sequence(name, getattr(self, name), "(16, 16)")
            object.__setattr__(self, name, value)
            if getattr(self, name).count(-1) > (name != "ranks"):
                raise ValueError(
                    "one of row_factors and one of dim_factors may be -1, which follows from the "
                    f"others, but {name} is {getattr(self, name)}: write the numbers"
                )
        check_cores(self.ranks, self.row_factors, self.dim_factors, computed=-1)
        for name in ("ranks", "row_factors", "dim_factors"):  # plain ints, for plans in JSON
            object.__setattr__(self, name, tuple(map(int, getattr(self, name))))
        object.__setattr__(self, "seed", check_count("seed", self.seed, minimum=0))
        find_initializer(self.init)
        object.__setattr__(self, "ids", IdOrder(self.ids))
        object.__setattr__(self, "matmul", MatmulPrecision(self.matmul))
        if self.cache is not None:
            cached_train.check_cache(self.cache)

    @classmethod
    def projected(cls, columns: int, init: str = "first_core") -> TensorTrain:
        """Return the storage of short rows `[columns]` that one learned matrix projects to `[dim]`.

        The table is a train of two cores: `cores.0` has the short rows, `cores.1` the matrix
        `[columns, dim]` ("mixed dimensions").

        Args:
            columns: number of stored columns per row, 1 to the smaller of dim and number of rows.
            init: initializer of both cores; see `first_core` in `emblib.tt.initializers`.

        Raises:
            TypeError: `columns` is not an int.
            ValueError: `columns` is below 1, or `init` is unknown.

        Example:
            >>> emblib.storage.TensorTrain.projected(columns=16).ranks
            (16,)
        """
        return cls((check_count("columns", columns),), (-1, 1), (1, -1), init)

    # Configuration

    def check_table(self, table: TableDescription) -> None:
        """Raise ValueError for bounds or an `init_fn` of the table; `init` draws the cores."""
        if table.has_bounds or table.init_fn is not None:
            raise ValueError(
                f"the initial values of the cores of {table.name!r} follow from "
                "storage=TensorTrain(init=...): leave init_fn and bounds out"
            )

    def spec(self, rows: int, dim: int, name: str) -> TTSpec:
        """Return the spec of a table of this storage, for a table module."""
        factors = (
            _complete_factors(self.row_factors, rows),
            _complete_factors(self.dim_factors, dim),
        )
        return TTSpec(rows, dim, self.ranks, *factors, name, self.ids, self.seed)

    def check_slice(self, table_slice: TableSlice) -> None:
        """Raise ValueError for a slice that cannot be a tensor train of its own.

        A slice must end between slices of core 0. Stochastic rounding is refused: its random
        numbers depend on the row's index in the module, so the copies of the other cores would
        differ.
        """
        if table_slice.is_whole:
            return
        if self.cache is not None:
            self.check_sharded(table_slice.config)
        if self._is_rounded_at_random(table_slice.config):
            raise ValueError(
                f"{table_slice.config.name!r} is a tensor train whose updates are rounded at "
                "random, so that it cannot be cut: place it whole, or leave rounding out"
            )
        self.core_range(table_slice)

    def check_sharded(self, table: TableDescription) -> None:
        """Raise ValueError for a table with a cache: its stored rows are of one process."""
        if self.cache is not None:
            raise ValueError(
                f"{table.name!r} is a tensor train with a cache of rows, which is of one process: "
                "use storage.TensorTrain(...) without cache in a sharded collection, or leave "
                "the collection of this table out of the plan"
            )

    @staticmethod
    def _is_rounded_at_random(table: TableDescription) -> bool:
        return table.rounding is not None and table.data_type is not torch.float32

    def slice_spec(self, table_slice: TableSlice, name: str) -> TTSpec:
        """Return the spec of a tensor train that has only this slice."""
        table_spec = table_slice.config.spec()
        if table_slice.is_whole:
            return replace(table_spec, name=name)
        row_range, column_range = self.core_range(table_slice)
        return TTSpec(
            table_slice.num_rows,
            table_slice.dim,
            table_spec.ranks,
            (row_range[1] - row_range[0], *table_spec.row_factors[1:]),
            (column_range[1] - column_range[0], *table_spec.dim_factors[1:]),
            name,
            table_spec.ids,
            table_spec.seed,
        )

    def cut_units(self, table: TableDescription) -> CutUnits:
        """Return the rows and columns of one slice of core 0.

        The unit is all rows if ids are permuted, and the whole table if it has a cache or
        stochastic rounding.
        """
        if self.cache is not None or self._is_rounded_at_random(table):
            return CutUnits(table.num_embeddings, table.embedding_dim)
        spec = table.spec()
        rows = math.prod(spec.row_factors[1:])
        if self.ids is IdOrder.PERMUTED:
            rows = max(rows, table.num_embeddings)
        return CutUnits(rows, math.prod(spec.dim_factors[1:]))

    def core_range(self, table_slice: TableSlice) -> tuple[Span, Span]:
        """Return the ranges of the first row factor and of the first dim factor that a slice has.

        The product of the factors may exceed the table: a slice at its end includes the excess.

        Raises:
            ValueError: the slice does not end between slices of core 0.
        """
        spec = table_slice.config.spec()
        units = self.cut_units(table_slice.config)
        table_sizes = table_slice.config.num_embeddings, table_slice.config.embedding_dim
        factors = spec.row_factors[0], spec.dim_factors[0]
        ranges = []
        for name, (begin, end), unit, size, factor in zip(
            ("rows", "columns"),
            (table_slice.rows, table_slice.columns),
            units,
            table_sizes,
            factors,
            strict=True,
        ):
            if begin % unit or (end % unit and end != size):
                raise ValueError(
                    f"{name} of a slice of tensor train {table_slice.config.name!r} must be "
                    f"multiples of {unit}, the product of the factors of all cores but the first, "
                    f"got [{begin}, {end}) of {size}"
                )
            ranges.append((begin // unit, factor if end == size else end // unit))
        return ranges[0], ranges[1]

    def cores_of(self, table_slice: TableSlice, cores: Sequence[Tensor]) -> list[Tensor]:
        """Return the cores of a slice: its part of core 0, and the other cores of the whole table.

        `cores` may also be optimizer states, laid out like the cores or one number per core row.
        """
        row_range, column_range = self.core_range(table_slice)
        first_core = cores[0][slice(*row_range)]
        if first_core.dim() == 2:
            rank = table_slice.config.spec().ranks[0]
            first_core = first_core[:, column_range[0] * rank : column_range[1] * rank]
        return [first_core, *cores[1:]]

    # Modules

    def group_key(
        self, table_slice: TableSlice, number: int, optimizer: Optimizer, pooling: Pooling
    ) -> Hashable:
        """Return a key that is equal for tables that can share a module.

        Whole tables share one if optimizer, dtype, rounding, `matmul` and cache rule are equal, and
        without pooling the dims. A shard has a module of its own: it sums gradients of cores with
        other shards, which may be on the same rank.
        """
        if not table_slice.is_whole:
            return ("tensor_train", number)
        dim = table_slice.dim if pooling is Pooling.NONE else 0
        cache = self.cache
        cache_rule = None if cache is None else (cache.eviction, cache.every)
        return ("tensor_train", precision_of(table_slice), self.matmul, optimizer, dim, cache_rule)

    def make_module(
        self,
        slices: Sequence[TableSlice],
        feature_tables: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> TableModule:
        """Return the module of slices with equal group keys.

        Raises:
            ValueError: a cache does not support the optimizer.
        """
        if self.cache is None:
            return TTModule(slices, feature_tables, optimizer, pooling, seeds, device)
        cached_train.check_optimizer(slices, self.cache, optimizer)
        on_meta = device.type == "meta"
        make = cached_train.CachedTTPlaceholder if on_meta else cached_train.CachedTTModule
        return make(slices, feature_tables, optimizer, pooling, seeds, device)

    def is_placeholder(self, module: TableModule) -> bool:
        """Return whether `module` is the placeholder of cached trains on meta."""
        return not cached_train.has_cache(module)

    def make_handle(self, module: TableModule, index: int) -> TableHandle:
        """Return the handle of a table, which has the parameters `cores.0`, `cores.1`, ..."""
        if self.cache is None:
            return TTHandle(self, module, index)
        return cached_train.CachedTTHandle(self, module, index)

    def views(self, module: Any) -> list[dict[str, Tensor]]:
        """Return `cores.0`, `cores.1`, ... and the states `<state>.0`, `<state>.1`, ...

        Stored rows are `cache.weight`, and their states `cache.<state>`.
        """
        if self.cache is not None:
            return cached_train.table_views(module)
        return [core_views(module, t) for t in range(len(module.tables))]

    def reset(self, module: Any, seeds: Sequence[int]) -> None:
        """Draw the cores again, and empty the cache; do nothing for a placeholder on meta."""
        if not self.is_placeholder(module):
            module.redraw(seeds)

    # Sharding and checkpoints

    def copy_slice(
        self,
        table_slice: TableSlice,
        source: TableHandle,
        target: TableHandle,
        key_block: KeyBlock | None,
    ) -> None:
        """Copy the slice's part of the cores of `source` and of their optimizer states.

        A slice of a table with a cache is the whole table; its stored rows are copied too.
        """
        source_views, target_views = source.views(), target.views()
        if self.cache is not None:
            target.load_state_dict(source.state_dict())
            target_views = {k: v for k, v in target_views.items() if not k.startswith("cache.")}
        # `cores.0`, `cores.1`, ... and the states `<state>.0`, ... are cut alike.
        stems = {name.rsplit(".", 1)[0] for name in target_views.keys() & source_views.keys()}
        for stem in stems:
            names = sorted(name for name in target_views if name.rsplit(".", 1)[0] == stem)
            values = self.cores_of(table_slice, [source_views[name] for name in names])
            for name, value in zip(names, values, strict=True):
                target_views[name].copy_(value)

    def parameter_layouts(self, table: TableDescription) -> dict[str, TensorLayout]:
        """Return the cores: slices have a region of core 0, and every other core in full."""
        spec, units = table.spec(), self.cut_units(table)
        ranks, rank = spec.full_ranks, spec.ranks[0]
        widths = [r * q * s for r, q, s in zip(ranks, spec.dim_factors, ranks[1:], strict=False)]
        sizes = list(zip(spec.row_factors, widths, strict=True))

        def region(rows: Span, columns: Span) -> tuple[Span, Span]:
            first_core_row = rows[0] // units.rows
            # The product of the factors may exceed the rows; the last slice includes the excess.
            is_at_end = rows[1] == table.num_embeddings
            end_core_row = sizes[0][0] if is_at_end else -(-rows[1] // units.rows)
            first_unit, end_unit = columns[0] // units.columns, -(-columns[1] // units.columns)
            return (first_core_row, end_core_row), (first_unit * rank, end_unit * rank)

        return {
            f"cores.{k}": TensorLayout(size, table.data_type, None if k else region)
            for k, size in enumerate(sizes)
        }

    def state_views(self, parameter: str, optimizer: Optimizer) -> dict[str, str]:
        """Return `<state>.<k>` for each state of `cores.<k>`; the cache saves its own states."""
        if parameter == "cache.weight":
            return {}
        core_number = parameter.rpartition(".")[2]
        return {state.name: f"{state.name}.{core_number}" for state in optimizer.states}

    def metadata_entries(self, table: TableDescription) -> dict[str, Tensor]:
        """Return the layout of the tensor train, see `emblib.tt.layout_entry`."""
        return {layout_entry.NAME: layout_entry.from_spec(table.spec())}

    def check_entries(self, table: TableDescription, entries: Mapping[str, Tensor]) -> None:
        """Raise ValueError for cores of another tensor train."""
        if not entries.keys().isdisjoint(self.parameter_layouts(table)):
            expected_layout = layout_entry.from_spec(table.spec())
            problem = layout_entry.describe_difference(
                entries.get(layout_entry.NAME), expected_layout
            )
            if problem:
                raise ValueError(f"{table.name}.cores: {problem}")

    # Planner

    def nbytes(
        self, table_slice: TableSlice, optimizer: Optimizer | None, device: str
    ) -> MemoryBytes:
        """Return the bytes of the cores, of the cache, and of the optimizer states of both."""
        spec, core_bytes = table_slice.spec, 0
        ranks, itemsize = spec.full_ranks, table_slice.config.data_type.itemsize
        for k, (p, q) in enumerate(zip(spec.row_factors, spec.dim_factors, strict=True)):
            width = ranks[k] * q * ranks[k + 1]
            core_bytes += p * width * itemsize
            core_bytes += state_bytes(optimizer, p, width, itemsize)
        if self.cache is None:
            return MemoryBytes(core_bytes)
        sizes = cached_train.nbytes(table_slice, optimizer, device)
        return sizes._replace(device=sizes.device + core_bytes)

    def lookup_ns(
        self, table_slice: TableSlice, optimizer: Optimizer | None, ids: float, times: RowTimes
    ) -> float:
        """Return the nanoseconds to compute the distinct rows of `ids`, and to look them up."""
        ns_per_row = times.cached_lookup_ns(table_slice.dim * _FLOAT_BYTES)
        compute_ns = (
            _num_distinct_rows(ids, table_slice.num_rows)
            * multiply_adds(table_slice.spec)
            * times.costs.tt_ns
        )
        return float(ids * ns_per_row + compute_ns)

    def update_ns(
        self, table_slice: TableSlice, optimizer: Optimizer | None, ids: float, times: RowTimes
    ) -> float:
        """Return the nanoseconds to update the cores with the gradients of `ids` rows."""
        bytes_per_row = row_bytes(optimizer, table_slice.dim, table_slice.config.data_type.itemsize)
        ns_per_row = times.cached_update_ns(bytes_per_row)
        # The gradients of all cores take twice the multiply-adds of the rows.
        compute_ns = (
            2
            * _num_distinct_rows(ids, table_slice.num_rows)
            * multiply_adds(table_slice.spec)
            * times.costs.tt_ns
        )
        return float(ids * ns_per_row + compute_ns)


def _complete_factors(factors: tuple[int, ...], minimum_product: int) -> tuple[int, ...]:
    """Replace a factor of -1 by the smallest with a product of at least `minimum_product`."""
    if -1 not in factors:
        return factors
    given_product = math.prod(abs(factor) for factor in factors)
    missing_factor = -(-minimum_product // max(given_product, 1))
    return tuple(missing_factor if factor == -1 else factor for factor in factors)


def multiply_adds(spec: TTSpec) -> float:
    """Return the multiply-adds to compute one row from left to right, core after core."""
    ranks, num_multiply_adds, width = spec.full_ranks, 0, spec.dim_factors[0]
    for k in range(1, len(spec.dim_factors)):
        num_multiply_adds += width * ranks[k] * spec.dim_factors[k] * ranks[k + 1]
        width *= spec.dim_factors[k]
    return float(num_multiply_adds)


def _num_distinct_rows(ids: float, num_rows: int) -> float:
    """Return the expected number of distinct rows among uniform ids."""
    return num_rows * -math.expm1(-ids / num_rows)
