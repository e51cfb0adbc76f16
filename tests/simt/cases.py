"""The edge cases on which every emulated kernel runs, and the results of the reference."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from emblib import optim
from emblib.reference import tbe
from emblib.specs import Pooling

# One optimizer of each kind of state; tests/optimizer_cases.py has them all.
OPTIMIZERS: dict[str, optim.Optimizer] = {
    "sgd": optim.SGD(0.1),
    "adagrad": optim.Adagrad(0.1, eps=1e-6),
    "rowwise_adagrad": optim.RowwiseAdagrad(0.1, eps=1e-6),
    "adam": optim.Adam(0.1, betas=(0.9, 0.99), eps=1e-6),
}


def _at_step(hyper: Tensor, step: int) -> list[float]:
    hyper[1] = step
    return hyper.tolist()


HYPER = {name: _at_step(optimizer.hyperparams(), 3) for name, optimizer in OPTIMIZERS.items()}


@dataclass(frozen=True)
class Case:
    """Tables, features and bags; `lengths` says how full the bags are."""

    name: str
    rows: tuple[int, ...] = (50, 7, 1)
    dims: tuple[int, ...] = (8, 8, 8)
    tables: tuple[int, ...] = (0, 1, 2)  # of each feature
    batch: int = 5
    sizes: tuple[int, ...] | None = None  # bags of each feature of a variable batch
    lengths: str = "mixed"
    broken: bool = False  # indices and offsets out of bounds
    weighted: bool = False
    pooling: Pooling = Pooling.SUM
    index: torch.dtype = torch.int64
    offset: torch.dtype = torch.int64
    weight: torch.dtype = torch.float32
    output: torch.dtype = torch.float32
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def bags(self) -> tuple[int, ...]:
        """Return the bags of each feature."""
        return (self.batch,) * len(self.tables) if self.sizes is None else self.sizes


def _dims(dim: int) -> tuple[int, ...]:
    return (dim, dim, dim)


CASES = [
    *(Case(f"dim{d}", dims=_dims(d)) for d in (1, 3, 4, 20, 64, 128, 200, 1024)),
    *(Case(f"half_dim{d}", dims=_dims(d), weight=torch.float16) for d in (3, 4, 8, 64, 200, 520)),
    Case("bfloat16", dims=_dims(128), weight=torch.bfloat16, output=torch.bfloat16),
    Case("half_out", dims=_dims(20), output=torch.float16),
    Case("half_to_bfloat16", dims=_dims(36), weight=torch.float16, output=torch.bfloat16),
    Case("int32", dims=_dims(4), index=torch.int32, offset=torch.int32),
    Case("int32_indices", index=torch.int32),
    Case("mixed_dims", dims=(4, 128, 3), tables=(2, 0, 1, 0, 1)),
    Case("mixed_wide", dims=(512, 16, 6), tables=(1, 0, 2), weighted=True),
    Case("shared_table", tables=(0, 0, 0, 1), batch=40),
    Case("no_lookups", lengths="none"),
    Case("no_batch", batch=0, lengths="none"),
    Case("no_tables", rows=(), dims=(), tables=(), batch=0, lengths="none"),
    Case("one_bag", rows=(30,), dims=(64,), tables=(0,), batch=1, lengths="long"),
    Case("ones", batch=300, lengths="one"),
    *(Case(f"few_dim{d}", dims=_dims(d), lengths="few", batch=70) for d in (3, 16, 64, 300)),
    Case("few_half", dims=_dims(64), lengths="few", batch=70, weight=torch.float16),
    Case("few_mixed", dims=(4, 128, 3), lengths="few", batch=41, weighted=True),
    Case("few_mean", lengths="few", batch=41, pooling=Pooling.MEAN, broken=True),
    Case("long_bag", dims=_dims(16), lengths="long"),
    Case("hot_row", rows=(40, 1, 3), dims=(32, 20, 4), batch=90, lengths="hot"),
    Case(
        "hot_half", rows=(40, 1, 3), dims=_dims(20), batch=90, lengths="hot", weight=torch.float16
    ),
    Case("broken", broken=True, batch=30),
    Case("broken_wide", broken=True, dims=_dims(260), index=torch.int32, weighted=True),
    Case("mean", pooling=Pooling.MEAN, dims=(20, 4, 64)),
    Case("mean_weighted", pooling=Pooling.MEAN, dims=_dims(20), weighted=True, broken=True),
    Case("mean_hot", pooling=Pooling.MEAN, rows=(2, 1, 3), batch=90, lengths="hot", weighted=True),
    Case("weighted", weighted=True, dims=_dims(33)),
    Case("sequence", pooling=Pooling.NONE, batch=60),
    Case("sequence_dim3", pooling=Pooling.NONE, dims=_dims(3), broken=True),
    Case("sequence_half", pooling=Pooling.NONE, dims=_dims(256), weight=torch.float16),
    Case("sequence_wide", pooling=Pooling.NONE, dims=_dims(200), output=torch.float16),
    Case("sequence_empty", pooling=Pooling.NONE, lengths="none"),
]

VARIABLE = Case("variable", dims=(8, 20, 130), tables=(0, 1, 2, 0), sizes=(7, 0, 30, 2))
VARIABLE_CASES = [
    VARIABLE,
    replace(VARIABLE, name="variable_mean", pooling=Pooling.MEAN, weighted=True, broken=True),
    replace(VARIABLE, name="variable_half", weight=torch.float16, output=torch.bfloat16),
    replace(VARIABLE, name="variable_few", lengths="few", index=torch.int32, weighted=True),
    replace(VARIABLE, name="variable_long", lengths="long", sizes=(1, 0, 2, 1)),
    replace(VARIABLE, name="variable_hot", lengths="hot", offset=torch.int32),
    replace(VARIABLE, name="variable_empty", sizes=(0, 0, 0, 0), lengths="none"),
    replace(VARIABLE, name="variable_sequence", dims=_dims(20), pooling=Pooling.NONE, broken=True),
]


@dataclass
class Data:
    """The tensors of a case; `offsets` of the caller, `repaired` for the kernels."""

    case: Case
    weights: Tensor = field(init=False)
    features: Tensor = field(init=False)
    indices: Tensor = field(init=False)
    offsets: Tensor = field(init=False)
    sample_weights: Tensor | None = field(init=False)
    bag_layout: Tensor | None = field(init=False)
    columns: int = field(init=False)
    total_rows: int = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        generator = torch.Generator().manual_seed(case.seed)
        sizes = [r * d for r, d in zip(case.rows, case.dims, strict=True)]
        self.weights = torch.randn(sum(sizes), generator=generator).to(case.weight)
        self.total_rows = sum(case.rows)
        self.columns, lines = 0, []
        for table in case.tables:
            place = (sum(sizes[:table]), sum(case.rows[:table]))
            lines.append((*place, case.rows[table], case.dims[table], self.columns, 0, place[1], 0))
            self.columns += case.dims[table]
        if case.pooling is Pooling.NONE:
            self.columns = case.dims[0]
        self.features = torch.tensor(lines, dtype=torch.int64).view(-1, 8)
        self.bag_layout = None
        if case.sizes is not None:
            self.bag_layout, elements = layout_of_bags(case, generator)
            self.columns = self.columns if case.pooling is Pooling.NONE else elements
        lengths = _lengths(case, generator)
        self.indices = _indices(case, lengths, generator).to(case.index)
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        if case.broken and ends.numel() > 3:
            ends[0], ends[2], ends[-1] = -5, ends[-1] + 9, ends[-1] - 1
        self.offsets = ends.to(case.offset)
        count = self.indices.numel()
        self.sample_weights = torch.randn(count, generator=generator) if case.weighted else None

    @property
    def repaired(self) -> Tensor:
        return tbe.repair_offsets(self.offsets, self.indices.numel()).to(self.case.offset)

    @property
    def extras(self) -> tbe.Extras:
        """Return the other arguments of the reference."""
        return tbe.Extras(bag_layout=self.bag_layout)

    @property
    def batch(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Indices, repaired offsets and bag layout."""
        return self.indices, self.repaired, self.bag_layout

    def lookup(self, weights: Tensor, sample_weights: Tensor | None) -> Tensor:
        """Return the result of the reference, in the dtype of `weights`."""
        given = (self.features, self.indices, self.offsets, sample_weights)
        return tbe.lookup(weights, *given, self.case.pooling, self.columns, self.extras)

    def gradient(self) -> Tensor:
        """A gradient of the output, in its dtype."""
        pooled = self.case.pooling is not Pooling.NONE
        shape: tuple[int, ...] = (self.indices.numel(), self.columns)
        if pooled:
            shape = (self.case.batch, self.columns)
        if pooled and self.bag_layout is not None:
            shape = (self.columns,)
        generator = torch.Generator().manual_seed(self.case.seed + 1)
        return torch.randn(shape, generator=generator).to(self.case.output)

    def weight_grad(self, grad: Tensor) -> Tensor:
        """The dense gradient of the weights, float64."""
        weights = self.weights.double().requires_grad_()
        if not self.case.tables:
            return weights.detach()
        scales = None if self.sample_weights is None else self.sample_weights.double()
        (self.lookup(weights, scales) * grad.double()).sum().backward()
        return torch.zeros_like(weights) if weights.grad is None else weights.grad


def with_cache_dtypes(cases: Sequence[Case]) -> list[tuple[Case, torch.dtype]]:
    """Return cases with other dtypes of a cache: each pair of dtypes, on cases of all shapes."""
    floats = (torch.float32, torch.float16, torch.bfloat16)
    return [
        (case, dtype)
        for number, case in enumerate(cases)
        for dtype in (floats if case.weight != torch.float32 else floats[1 + number % 2 :][:1])
        if dtype != case.weight
    ]


def layout_of_bags(case: Case, generator: torch.Generator) -> tuple[Tensor, int]:
    """Rows of the output in any order, one after the other; and how many elements they have."""
    dims = [case.dims[table] for table in case.tables]
    feature = torch.arange(len(dims)).repeat_interleave(torch.tensor(case.bags, dtype=torch.int64))
    dim = torch.tensor(dims, dtype=torch.int64)[feature]
    order = torch.randperm(feature.numel(), generator=generator)
    element = torch.empty_like(feature)
    element[order] = dim[order].cumsum(0) - dim[order]
    return torch.stack([feature, element], 1), int(dim.sum())


def _lengths(case: Case, generator: torch.Generator) -> Tensor:
    bags = sum(case.bags)
    if case.lengths == "none":
        return torch.zeros(bags, dtype=torch.int64)
    if case.lengths == "few":
        return torch.randint(0, 4, (bags,), generator=generator)
    if case.lengths == "one":
        return torch.ones(bags, dtype=torch.int64)
    lengths = torch.randint(0, 13, (bags,), generator=generator)
    if case.lengths == "long":
        lengths[bags // 2] = 1300
    if case.lengths == "hot":
        lengths += 20
    return lengths


def _indices(case: Case, lengths: Tensor, generator: torch.Generator) -> Tensor:
    parts = []
    for bags, table in zip(lengths.split(list(case.bags)), case.tables, strict=True):
        count = int(bags.sum())
        part = torch.randint(0, case.rows[table], (count,), generator=generator)
        if case.lengths == "hot":
            part[torch.rand(count, generator=generator) < 0.8] = 0
        if case.broken:
            part[::7] = -1
            part[3::11] = case.rows[table]
            part[5::13] = -2
        parts.append(part)
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
