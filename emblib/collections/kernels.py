"""The modules of tables as parts of a collection: first values by slice, gradients by table."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from emblib.collections.configs import Dynamic, Plain, Quantized, Spec, TableConfig, TensorTrain
from emblib.dynamic import DynamicEmbeddingBags
from emblib.ops import primitives
from emblib.ops.hash import SCORED
from emblib.optim import External, Gradient, Optimizer
from emblib.specs import (
    CacheConfig,
    Constant,
    DynamicSpec,
    Placement,
    Pooling,
    Precision,
    TableSpec,
    TTSpec,
    Uniform,
)
from emblib.tables import QuantizedEmbeddingBags, TableBatchedEmbeddingBags, TTEmbeddingBag
from emblib.tables.locks import atomic
from emblib.tt.initializers import INITIALIZERS, CoreLayout
from emblib.tt.shapes import check_ranks

_BLOCK = 1 << 22  # elements that are drawn at a time


@dataclass(frozen=True)
class TableSlice:
    """Rows `[r0, r1)` and columns `[c0, c1)` of a table.

    The rows of a dynamic table are room for keys, and not a range of them. A slice of a tensor
    train is one of its first core: rows and columns are multiples of the product of the other
    factors, as far as they do not end with the table.
    """

    config: TableConfig
    rows: tuple[int, int]
    columns: tuple[int, int]

    @staticmethod
    def whole(config: TableConfig) -> TableSlice:
        """All of a table."""
        return TableSlice(config, (0, config.num_embeddings), (0, config.embedding_dim))

    def __post_init__(self) -> None:
        sizes = (self.config.num_embeddings, self.config.embedding_dim)
        for name, (begin, end), size in zip(
            ("rows", "columns"), (self.rows, self.columns), sizes, strict=True
        ):
            if not 0 <= begin < end <= size:
                raise ValueError(
                    f"{name} of a slice of {self.config.name!r} must be a range that is not empty "
                    f"within [0, {size}), got [{begin}, {end})"
                )
        if isinstance(self.config.kind, Dynamic) and self.columns != (0, sizes[1]):
            raise ValueError(
                f"dynamic table {self.config.name!r} is not divided by columns, got columns "
                f"{self.columns} of {sizes[1]}: every part would have to take in the same keys"
            )
        if isinstance(self.config.kind, Quantized) and self.columns != (0, sizes[1]):
            raise ValueError(
                f"quantised table {self.config.name!r} is not divided by columns, got columns "
                f"{self.columns} of {sizes[1]}: a row has one scale"
            )
        if isinstance(self.config.kind, TensorTrain) and not self.is_whole:
            self._core_part()

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the table."""
        sizes = (self.config.num_embeddings, self.config.embedding_dim)
        return (self.num_rows, self.dim) == sizes

    @property
    def num_rows(self) -> int:
        """How many rows."""
        return self.rows[1] - self.rows[0]

    @property
    def dim(self) -> int:
        """How many columns."""
        return self.columns[1] - self.columns[0]

    @property
    def spec(self) -> Spec:
        """The part as a table of its own."""
        return self.named(self.config.name)

    def named(self, name: str) -> Spec:
        """The part as a table of its own, of another name."""
        config = self.config
        if isinstance(config.kind, TensorTrain) and not self.is_whole:
            return replace(self._core_part(), name=name)
        spec = config.kind.spec(self.num_rows, self.dim, name)
        if isinstance(config.kind, Dynamic) and config.kind.initializer == Uniform():
            # Bounds of the whole table, so that they do not depend on how it is divided.
            low, high = config.bounds
            first = Uniform(low, high) if low < high else Constant(low)
            assert isinstance(spec, DynamicSpec)
            return replace(spec, initializer=first)
        return spec

    def core_range(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of a tensor train: which of the first row factor and of the first dim factor it has.

        The factors may make more rows than there are; what ends with the table has those, too.
        """
        whole = self.config.spec()
        assert isinstance(whole, TTSpec)
        rest = math.prod(whole.row_factors[1:]), math.prod(whole.dim_factors[1:])
        ends = self.config.num_embeddings, self.config.embedding_dim
        factors = whole.row_factors[0], whole.dim_factors[0]
        ranges = []
        for name, (begin, end), step, last, factor in zip(
            ("rows", "columns"), (self.rows, self.columns), rest, ends, factors, strict=True
        ):
            if begin % step or (end % step and end != last):
                raise ValueError(
                    f"{name} of a slice of tensor train {self.config.name!r} must be multiples of "
                    f"{step}, the product of the factors of all cores but the first, got "
                    f"[{begin}, {end}) of {last}"
                )
            ranges.append((begin // step, factor if end == last else end // step))
        return ranges[0], ranges[1]

    def _core_part(self) -> TTSpec:
        whole = self.config.spec()
        assert isinstance(whole, TTSpec)
        (p0, p1), (q0, q1) = self.core_range()
        return TTSpec(
            self.num_rows,
            self.dim,
            whole.ranks,
            (p1 - p0, *whole.row_factors[1:]),
            (q1 - q0, *whole.dim_factors[1:]),
        )

    def cores_of(self, cores: list[Tensor]) -> list[Tensor]:
        """The part of each core of the whole table: of the first a slice, the others as they are.

        Serves whatever is laid out as the cores are, optimizer states among them; of one number a
        core row (`[p]`) it is the rows.
        """
        whole = self.config.spec()
        assert isinstance(whole, TTSpec)
        (p0, p1), (q0, q1) = self.core_range()
        first = cores[0][p0:p1]
        if first.dim() == 2:
            rank = whole.ranks[0]
            first = first[:, q0 * rank : q1 * rank]
        return [first, *cores[1:]]

    def part_of(self, table: Tensor) -> Tensor:
        """The view of what has one row a row of the whole table: `[rows, dim]` or `[rows]`."""
        part = table[self.rows[0] : self.rows[1]]
        return part if part.dim() == 1 else part[:, self.columns[0] : self.columns[1]]


@torch.no_grad()
def draw(part: TableSlice, weight: Tensor, seed: int) -> None:
    """Write first values of a plain table: the same for an element however the table is divided.

    `init_fn` makes the whole table to begin with, and sees torch's generator seeded.
    """
    config = part.config
    if weight.is_meta:
        return
    if config.init_fn is not None:
        with _seeded(weight.device, seed):
            if part.is_whole:
                config.init_fn(weight)
                return
            whole = torch.empty(
                config.num_embeddings, config.embedding_dim, dtype=weight.dtype, device="cpu"
            )
            config.init_fn(whole)
        weight.copy_(part.part_of(whole))
        return
    for rows, block_seed in _blocks(part, seed):
        _draw_block(part, weight, rows, block_seed)


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Torch's generators begin with `seed`, and are as they were afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for cuda in devices:
            with torch.cuda.device(cuda):
                torch.cuda.manual_seed(seed)
        yield


def _rows_of_block(config: TableConfig) -> int:
    return max(1, _BLOCK // config.embedding_dim)


def _blocks(part: TableSlice, seed: int) -> Iterator[tuple[range, int]]:
    """Blocks of rows of the whole table that the part meets, and the seed of each."""
    step, rows = _rows_of_block(part.config), part.config.num_embeddings
    for number in range(part.rows[0] // step, -(-part.rows[1] // step)):
        block_seed = (seed + number * 0x9E3779B97F4A7C15) % (2**63 - 1)
        yield range(number * step, min((number + 1) * step, rows)), block_seed


def _draw_block(part: TableSlice, weight: Tensor, rows: range, seed: int) -> None:
    begin, end = max(rows.start, part.rows[0]), min(rows.stop, part.rows[1])
    target = weight[begin - part.rows[0] : end - part.rows[0]]
    low, high = part.config.bounds
    all_columns = part.dim == part.config.embedding_dim
    if all_columns and begin == rows.start and target.is_contiguous():
        primitives.fill_uniform_(
            target, low, high, seed
        )  # a value depends on its place in the block
        return
    block = target.new_empty(end - rows.start, part.config.embedding_dim)
    primitives.fill_uniform_(block, low, high, seed)
    target.copy_(block[begin - rows.start :, part.columns[0] : part.columns[1]])


@torch.no_grad()
def draw_cores(part: TableSlice, cores: list[Tensor], seed: int) -> None:
    """Write first values of the cores of a tensor train, by the same rule."""
    config, whole = part.config, part.config.spec()
    assert isinstance(whole, TTSpec)
    assert isinstance(config.kind, TensorTrain)
    if cores[0].is_meta:
        return
    layout = CoreLayout(whole.row_factors, whole.dim_factors, whole.full_ranks, torch.device("cpu"))
    with _seeded(layout.device, seed):
        values = INITIALIZERS[config.kind.init](layout, 1.0 / math.sqrt(3.0 * whole.rows))
    for core, value in zip(cores, part.cores_of(values), strict=True):
        core.copy_(value)


class Rows(NamedTuple):
    """Where a table lies in the weights of a module: elements from `begin`, its first row, size."""

    begin: int
    first_row: int
    rows: int
    dim: int


class JoinedTables(torch.autograd.Function):
    """The weights of a module as its tables' parameters make them, so that each has its gradient.

    `weights` is the memory that the parameters are views of; nothing is copied.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, places: Sequence[Rows], *tables: Tensor) -> Tensor:
        """`weights`."""
        ctx.places = places
        return weights.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The part of each table: views of a dense gradient, slices of a sparse one."""
        split = _split_sparse if grad.is_sparse else _split_dense
        return None, None, *split(grad, ctx.places)


def _split_dense(grad: Tensor, places: Sequence[Rows]) -> list[Tensor]:
    flat = grad.reshape(-1)
    return [flat[p.begin : p.begin + p.rows * p.dim].view(p.rows, p.dim) for p in places]


def _split_sparse(grad: Tensor, places: Sequence[Rows]) -> list[Tensor]:
    """Rows ascend, so those of a table are neighbours; reads where they begin from the device."""
    rows, values = grad._indices()[0], grad._values()
    firsts = torch.tensor([p.first_row for p in places], device=rows.device)
    counts = torch.tensor([p.rows for p in places], device=rows.device)
    begins = torch.searchsorted(rows, torch.stack([firsts, firsts + counts])).tolist()
    return [
        torch.sparse_coo_tensor(
            (rows[begin:end] - p.first_row).unsqueeze(0),
            values[begin:end],
            (p.rows, p.dim),
            is_coalesced=True,
            check_invariants=False,
        )
        for p, begin, end in zip(places, *begins, strict=True)
    ]


class PartTables(TableBatchedEmbeddingBags):
    """Plain tables that are slices; with `optim.External`, a parameter a table gets its gradient.

    `weights` is a buffer here: the parameters that users see are views of it, see `TableGroups`.
    """

    def __init__(
        self,
        parts: Sequence[TableSlice],
        names: Sequence[str],
        feature_tables: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        cache: CacheConfig | None,
        device: torch.device,
    ) -> None:
        self._parts, self._seeds, self.parameters_by_table = list(parts), list(seeds), []
        specs = [part.named(name) for part, name in zip(parts, names, strict=True)]
        super().__init__(
            [spec for spec in specs if isinstance(spec, TableSpec)],
            optimizer,
            pooling=pooling,
            feature_tables=feature_tables,
            precision=Precision(weights=parts[0].config.data_type),
            cache=cache,
            device=device,
        )
        weights = self._parameters.pop("weights")
        assert weights is not None
        self.register_buffer("weights", weights.detach(), persistent=False)
        self._places = [
            Rows(place.weight_offset, place.row_base, place.rows, place.dim)
            for place in self._memory.layout.places
        ]

    parameters_by_table: list[nn.Parameter]

    def _draw(self, table: int, weight: Tensor) -> None:
        draw(self._parts[table], weight, self._seeds[table])

    @atomic
    def view_of(self, table: int) -> dict[str, Tensor]:
        """`weight` and optimizer states of a table, without what a cache has of them."""
        self._memory.verify()  # whoever gets the views may read them at any time
        return self._memory.view(table, self.weights.detach(), self._states())

    def redraw(self, seeds: Sequence[int]) -> None:
        """First values anew, from these seeds."""
        self._seeds = list(seeds)
        self.reset_parameters()

    def _trained_weights(self) -> Tensor:
        if not torch.is_grad_enabled():
            return self.weights
        return JoinedTables.apply(self.weights, self._places, *self.parameters_by_table)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "parameters_by_table": []}  # set again by who has the tables


class PartTT(TTEmbeddingBag):
    """A tensor-train table that is a slice, read by any number of features."""

    def __init__(
        self, part: TableSlice, optimizer: Optimizer, pooling: Pooling, seed: int, device: Any
    ) -> None:
        self._part, self._seed = part, seed
        spec = part.spec
        assert isinstance(spec, TTSpec)
        init = part.config.kind.init if isinstance(part.config.kind, TensorTrain) else "gaussian"
        super().__init__(spec, optimizer, pooling=pooling, init=init, device=device)

    def _check_ranks(self) -> None:
        # What ranks can use is a matter of the whole table, not of how it is divided.
        whole = self._part.config.spec()
        assert isinstance(whole, TTSpec)
        check_ranks(whole.ranks, whole.row_factors, whole.dim_factors)

    def redraw(self, seeds: Sequence[int]) -> None:
        """First values anew, from this seed."""
        (self._seed,) = seeds
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the cores anew; optimizer state, step and learning rate as at construction."""
        with torch.no_grad():
            draw_cores(self._part, list(self.cores), self._seed)
            for states in self._states():
                for state in states:
                    state.zero_()
            self._reset_common()


class PartQuantized(QuantizedEmbeddingBags):
    """Quantised tables that are slices. First values are those of plain tables, quantised."""

    optimizer: Optimizer = External(gradient=Gradient.DENSE)  # nothing is trained

    def __init__(
        self,
        parts: Sequence[TableSlice],
        names: Sequence[str],
        feature_tables: Sequence[int],
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> None:
        kind = parts[0].config.kind
        assert isinstance(kind, Quantized)
        self._parts, self._seeds = list(parts), list(seeds)
        specs = [kind.spec(p.num_rows, p.dim, name) for p, name in zip(parts, names, strict=True)]
        super().__init__(
            specs, kind.bits, pooling=pooling, feature_tables=feature_tables, device=device
        )

    def redraw(self, seeds: Sequence[int]) -> None:
        """First values anew, from these seeds."""
        self._seeds = list(seeds)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """First values of all tables."""
        super().reset_parameters()
        if self.values.is_meta:
            return
        for table, (part, seed) in enumerate(zip(self._parts, self._seeds, strict=True)):
            step = part.num_rows if part.config.init_fn is not None else _ROWS
            for first in range(*part.rows, step):
                rows = (first, min(first + step, part.rows[1]))
                some = replace(part, rows=rows)
                weight = torch.empty(some.num_rows, some.dim, device=self.values.device)
                draw(some, weight, seed)
                self.write_rows(table, weight, first - part.rows[0])


_ROWS = 1 << 16  # of a quantised table, drawn as floats at a time


def fresh_seeds(parts: Sequence[TableSlice]) -> dict[str, int]:
    """A seed a table, drawn from torch's generator in the order of the tables."""
    return {name: primitives.new_seed() for name in dict.fromkeys(p.config.name for p in parts)}


def is_sparse(optimizer: Optimizer) -> bool:
    """Whether the gradient that is handed out has the rows of the batch only."""
    return isinstance(optimizer, External) and optimizer.gradient.value == "sparse"


NO_UPDATE = External(gradient=Gradient.DENSE)
"""What stands for no optimizer: gradients are left to torch.optim."""


@dataclass(frozen=True)
class Grouping:
    """Slices that share a kernel, and the units (features of a place) that read them."""

    slices: tuple[int, ...]
    units: tuple[int, ...]
    optimizer: Optimizer


def optimizer_of(part: TableSlice, optimizer: Optimizer | None) -> Optimizer:
    """Of a table: its own, that of its collection, or none."""
    return part.config.optimizer or optimizer or NO_UPDATE


def group(
    slices: Sequence[TableSlice],
    reads: Sequence[int],
    optimizer: Optimizer | None,
    pooling: Pooling,
) -> list[Grouping]:
    """The kernels, in the order in which units first need them; those nobody reads come last."""
    keys = [_key(i, part, optimizer, pooling) for i, part in enumerate(slices)]
    seen: dict[Hashable, set[str]] = {}
    for i, part in enumerate(slices):
        names = seen.setdefault(keys[i], set())
        if isinstance(part.config.kind, Dynamic) and part.config.name in names:
            keys[i] = (keys[i], i)  # first values of rows go by the name of the table
        names.add(part.config.name)
    order = dict.fromkeys([keys[s] for s in reads] + keys)
    result = []
    for key in order:
        of_key = tuple(i for i in range(len(slices)) if keys[i] == key)
        units = tuple(u for u, s in enumerate(reads) if keys[s] == key)
        result.append(Grouping(of_key, units, optimizer_of(slices[of_key[0]], optimizer)))
    return result


def _key(
    number: int, part: TableSlice, optimizer: Optimizer | None, pooling: Pooling
) -> tuple[Hashable, ...]:
    """Equal for what can be in one kernel."""
    config = part.config
    kind, update = config.kind, optimizer_of(part, optimizer)
    dim = part.dim if pooling is Pooling.NONE else 0
    if isinstance(kind, TensorTrain):
        return ("tensor_train", number)
    if isinstance(kind, Quantized):
        return ("quantized", kind.bits, dim)
    if isinstance(kind, Plain):
        cached = (kind.placement.cached, kind.cache)
        dim = part.dim if is_sparse(update) else dim
        return ("plain", config.data_type, update, cached, dim)
    # Counters and scores belong to a module, and so do the states that an optimizer has outside.
    order = kind.eviction.order
    alone = kind.admission is not None or order in _ASSIGNED or isinstance(update, External)
    rules = (order, kind.newcomer, kind.seed, number if alone else -1)
    return ("dynamic", config.data_type, update, rules, dim)


_ASSIGNED = frozenset({"assigned"} & set(SCORED))


class MetaPlaceholder(nn.Module):
    """Stands for a kernel that cannot be on meta, until the collection leaves it."""

    def __init__(self, parts: Sequence[TableSlice], optimizer: Optimizer) -> None:
        super().__init__()
        self.shapes = [(part.num_rows, part.dim) for part in parts]
        self.optimizer, self.output_dtype = optimizer, torch.float32
        self.grad_anchor = torch.empty((), device="meta")


def _check_update(parts: Sequence[TableSlice], optimizer: Optimizer) -> None:
    away = {
        part.config.name: str(part.config.kind.placement)
        for part in parts
        if isinstance(part.config.kind, Plain)
        and part.config.kind.placement not in (Placement.DEVICE, Placement.HOST)
    }
    if away and isinstance(optimizer, External):
        raise ValueError(
            "tables outside the device have no gradients to leave for torch.optim, so backward "
            f"must update them; without an optimizer are {away}: give the collection or these "
            "tables one of emblib.optim, e.g. optimizer=optim.SGD(lr=0.1)"
        )


def make_kernel(
    parts: Sequence[TableSlice],
    reads: Sequence[int],
    optimizer: Optimizer,
    pooling: Pooling,
    seeds: Sequence[int],
    device: torch.device,
) -> nn.Module:
    """The module of one group; feature f of it reads `parts[reads[f]]`."""
    config = parts[0].config
    kind = config.kind
    if isinstance(kind, TensorTrain):
        return PartTT(parts[0], optimizer, pooling, seeds[0], device)
    names = distinct_names([part.config.name for part in parts])
    if isinstance(kind, Quantized):
        return PartQuantized(parts, names, reads, pooling, seeds, device)
    if isinstance(kind, Plain):
        _check_update(parts, optimizer)
        return PartTables(parts, names, reads, optimizer, pooling, seeds, kind.cache, device)
    if device.type == "meta":
        return MetaPlaceholder(parts, optimizer)
    specs: list[Any] = [part.named(name) for part, name in zip(parts, names, strict=True)]
    assert all(isinstance(spec, DynamicSpec) for spec in specs)
    assert isinstance(kind, Dynamic)
    return DynamicEmbeddingBags(
        specs,
        optimizer,
        pooling=pooling,
        feature_tables=reads,
        precision=Precision(weights=config.data_type),
        seed=kind.seed,
        device=device,
        hash_seeds=seeds if kind.seed is None else None,
    )


def distinct_names(names: Sequence[str]) -> list[str]:
    """The names, with a number behind those that were there before."""
    taken: set[str] = set(names)
    seen: set[str] = set()
    result = []
    for name in names:
        unique, number = name, 1
        while unique in seen or (unique != name and unique in taken):
            number += 1
            unique = f"{name}_{number}"
        seen.add(unique)
        result.append(unique)
    return result
