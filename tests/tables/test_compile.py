"""Plain tables under torch.compile: whole graphs that train as eager code does, known breaks."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.testing import assert_close

from emblib import (
    BoundsCheck,
    CacheConfig,
    Placement,
    Precision,
    StochasticRounding,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTEmbeddingBag,
    TTSpec,
    optim,
)
from emblib.collections.optimizers import FusedOptimizer
from emblib.ops import autograd
from emblib.tables.graph_break import run_uncompiled
from tests import nightly, optimizer_cases
from tests.conftest import needs_python_headers
from tests.tbe_cases import CASES, Case

PLAIN = replace(CASES["plain"], batch=4)
# One of every kind, and those that have a part outside the update; the last ones have the states of
# others.
TRACED: dict[str, optim.Optimizer] = {
    name: optimizer_cases.CASES[name]
    for name in ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "ftrl")
}
TRACED |= {
    "cowclip": optimizer_cases.CASES["cowclip"],
    "global_decay": optimizer_cases.CASES["global_decay"],
    "max_gradient": optim.Adam(0.1, max_gradient=0.5),
    **{name: optimizer_cases.CASES[name] for name in ("lamb", "partial_rowwise_lamb", "lars")},
}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Modules of other tests count towards the limit of recompilations."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Twins:
    """Two equal modules: one runs as it is, the other in compiled graphs, which are counted."""

    def __init__(
        self, make: Callable[[], nn.Module], backend: str = "aot_eager", **options: Any
    ) -> None:
        from torch._dynamo.testing import CompileCounterWithBackend  # imports networkx

        self.eager, self.other = make(), make()
        self._graphs = CompileCounterWithBackend(backend)
        self.compiled = torch.compile(
            self.other, backend=self._graphs, **{"fullgraph": True, **options}
        )

    @property
    def graphs(self) -> int:
        """Graphs of forward so far."""
        return self._graphs.frame_count

    def step(self, *arguments: Any, **options: Any) -> None:
        """Forward and backward of both on one batch; they must return the same."""
        results = []
        for module in (self.eager, self.compiled):
            mine = [a.clone().requires_grad_() if is_weight(a) else a for a in arguments]
            out = module(*mine, **options)
            grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
            out.backward(grad.to(out.dtype))
            results.append([out.detach(), *(a.grad for a in mine if is_weight(a))])
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)

    def check_same(self) -> None:
        """The tables, their states and numbers must be the same, bit for bit."""
        expected, got = self.eager.state_dict(), self.other.state_dict()
        torch.testing.assert_close(expected, got, rtol=0, atol=0)


def is_weight(argument: Any) -> bool:
    return isinstance(argument, Tensor) and argument.is_floating_point()


def batch(case: Case, seed: int) -> tuple[Tensor, ...]:
    return tuple(t for t in replace(case, seed=seed).batch_of() if t is not None)


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        ("weighted", "eager"),
        *((case, "aot_eager") for case in ("weighted", "none", "shared_table", "mixed_dims")),
        *((case, "aot_eager") for case in ("bf16", "int32", "invalid")),
    ],
)
def test_one_graph_does_what_eager_code_does(case: str, backend: str) -> None:
    twins = Twins(lambda: CASES[case].module(optim.SGD(0.1)), backend, dynamic=True)
    for seed in range(3):
        twins.step(*batch(CASES[case], seed))
    twins.check_same()
    assert twins.graphs == 1


@pytest.mark.parametrize("optimizer", list(TRACED)[: nightly.number(9, len(TRACED))])
def test_training_equals_eager(optimizer: str) -> None:
    case = replace(PLAIN, weighted=True)
    twins = Twins(lambda: case.module(TRACED[optimizer]), dynamic=True)
    twins.step(*batch(case, 0))
    graphs = twins.graphs
    for seed in range(1, 4):
        twins.step(*batch(case, seed))
    twins.check_same()
    assert twins.graphs == graphs, "compiled again"


@needs_python_headers
def test_inductor_updates_tables_in_place() -> None:
    case = replace(PLAIN, rows=(503, 7), weighted=True)
    twins = Twins(lambda: case.module(optim.Adagrad(0.1)), "inductor", dynamic=True)

    def train() -> None:
        for seed in range(3):
            twins.step(*batch(case, seed))

    _, code = run_and_get_code(train)
    twins.check_same()
    assert twins.graphs == 1
    updates = [text for text in code if "emblib.tbe_update_.default" in text]
    assert updates
    elements = twins.eager.weights.numel()
    copies = re.compile(rf"empty_strided\w*\(\({elements},|\bclone\(")
    assert not any(copies.search(text) for text in updates), "a copy of a whole table"


@needs_python_headers
def test_inductor_compiles_a_model_with_its_loss() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Model(PLAIN.module(optim.RowwiseAdagrad(0.1)))

    twins = Twins(model, "inductor")
    optimizers = [torch.optim.SGD(m.top.parameters(), lr=0.1) for m in (twins.eager, twins.other)]
    for seed in range(2):
        losses = []
        for module, optimizer in zip((twins.eager, twins.compiled), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(module(*batch(replace(PLAIN, lengths=(2,) * 8), seed)))
            losses[-1].backward()
            optimizer.step()
        assert_close(*losses)
    for got, want in zip(twins.other.parameters(), twins.eager.parameters(), strict=True):
        assert_close(got, want)
    assert twins.graphs == 1


class Model(nn.Module):
    """Tables below a linear layer, with a loss."""

    def __init__(self, tables: TableBatchedEmbeddingBags | TTEmbeddingBag) -> None:
        super().__init__()
        self.tables = tables
        self.top = nn.Linear(tables.output_dim, 1)

    def forward(self, indices: Tensor, offsets: Tensor) -> Tensor:
        return self.top(self.tables(indices, offsets)).square().mean()


def test_new_numbers_do_not_recompile() -> None:
    twins = Twins(lambda: PLAIN.module(optim.Adam(0.05, eps=1e-3)))
    changes: list[Callable[[TableBatchedEmbeddingBags], None]] = [
        lambda module: module.set_learning_rate(0.5),
        lambda module: module.set_step(100),
        lambda module: module.hyperparams[0].mul_(0.9),
        lambda module: module.set_hyperparameters(betas=(0.5, 0.6), eps=1e-2),
    ]
    twins.step(*batch(PLAIN, 0))
    for change in changes:
        for module in (twins.eager, twins.other):
            change(module)
        twins.step(*batch(PLAIN, 0))
        twins.check_same()
    assert twins.graphs == 1


def test_new_sizes_recompile_once() -> None:
    twins = Twins(lambda: PLAIN.module(optim.SGD(0.1)))
    for seed in range(5):
        twins.step(*batch(PLAIN, seed))
    assert twins.graphs == 2, "the second number of lookups makes it dynamic"
    for size in (5, 7, 30):
        twins.step(*batch(replace(PLAIN, batch=size), 0))
    assert twins.graphs == 3, "and so does the second batch size"
    twins.check_same()


VARIABLE = [
    [[2, 3], [4, 5]],
    [[4, 2], [2, 3]],
    [[7, 9], [5, 4]],
    [[0, 8], [6, 1]],
    [[3, 0], [0, 2]],
]


def variable_batch(sizes: list[list[int]], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (sum(map(sum, sizes)),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.randint(0, 7, (int(offsets[-1]),), generator=generator), offsets


def test_variable_batches_recompile_until_all_sizes_have_changed() -> None:
    twins = Twins(lambda: PLAIN.module(optim.Adagrad(0.1)))
    for seed, sizes in enumerate(VARIABLE):
        twins.step(*variable_batch(sizes, seed), batch_sizes=sizes)
    twins.check_same()
    assert twins.graphs <= 3


def test_two_lookups_in_one_graph_are_two_updates() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = PLAIN.module(optim.Adagrad(0.1))

        def forward(self, *batches: Tensor) -> Tensor:
            return self.tables(*batches[:2]) + 2 * self.tables(*batches[2:])

    twins = Twins(Two, dynamic=True)
    for seed in range(3):
        twins.step(*batch(PLAIN, seed), *batch(PLAIN, seed + 10))
        twins.check_same()
    assert twins.graphs == 1
    assert twins.other.tables.step == 6


def test_a_dense_gradient_comes_from_one_graph() -> None:
    external = optim.External(gradient=optim.Gradient.DENSE)
    case = replace(PLAIN, dims=(16, 5), weighted=True)
    twins = Twins(lambda: case.module(external), dynamic=True)
    optimizers = [torch.optim.Adam(m.parameters(), 0.1) for m in (twins.eager, twins.other)]
    for seed in range(3):
        twins.step(*batch(case, seed))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    twins.check_same()
    assert twins.graphs == 1


def test_a_sparse_gradient_breaks_the_graph() -> None:
    twins = Twins(lambda: PLAIN.module(optim.External()), fullgraph=False)
    for seed in range(3):
        twins.step(*batch(PLAIN, seed))
        got, want = (module.weights.grad for module in (twins.other, twins.eager))
        assert got.is_sparse
        assert torch.equal(got.to_dense(), want.to_dense())
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(twins.other, backend="eager", fullgraph=True)(*batch(PLAIN, 0))


@pytest.mark.parametrize("kind", ["plain", "tensor train"])
def test_deferred_updates_do_not_recompile(kind: str) -> None:
    """Rate, step, batch and number of accumulated batches change; the bits are those of eager."""
    adam = optim.Adam(0.05, eps=1e-3, deferred=True)

    def make() -> nn.Module:
        torch.manual_seed(1)
        if kind == "plain":
            return Model(PLAIN.module(adam))
        return Model(TTEmbeddingBag(TTSpec(100, 8, (2,)), adam))

    twins = Twins(make, fullgraph=False, dynamic=True)
    modules = (twins.eager, twins.other)
    optimizers = [FusedOptimizer.of(module) for module in modules]
    graphs = 0
    for step, accumulated in enumerate([1, 1, 4, 2, 3]):
        for micro in range(accumulated):
            seed = 10 * step + micro
            if kind == "plain":
                twins.step(*batch(replace(PLAIN, batch=5 + step), seed))
            else:
                generator = torch.Generator().manual_seed(seed)
                lengths = torch.randint(2, 5, (5 + step,), generator=generator)
                offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
                ids = torch.randint(100, (int(offsets[-1]),), generator=generator)
                twins.step(ids, offsets)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.05 / (step + 1)
            optimizer.step()
            optimizer.zero_grad()
        twins.check_same()
        graphs = graphs or twins.graphs
    assert twins.graphs == graphs, "compiled again"
    assert twins.other.tables.step == 5


@pytest.mark.parametrize("optimizer", ["ensemble_rowwise_adagrad", "counter_last"])
def test_optimizers_that_count_forwards_break_the_graph(optimizer: str) -> None:
    chosen = optimizer_cases.CASES[optimizer]
    twins = Twins(lambda: PLAIN.module(chosen), fullgraph=False)
    for seed in range(4):
        twins.step(*batch(PLAIN, seed))
    twins.check_same()


def tiered(placements: tuple[Placement, ...]) -> TableBatchedEmbeddingBags:
    torch.manual_seed(0)
    specs = [
        TableSpec(rows, 8, f"t{t}", placement)
        for t, (rows, placement) in enumerate(zip((50, 300), placements, strict=True))
    ]
    return TableBatchedEmbeddingBags(
        specs, optim.Adam(0.1), cache=CacheConfig(sets=2), bounds_check=BoundsCheck.IGNORE
    )


def test_a_managed_table_is_in_one_graph() -> None:
    twins = Twins(lambda: tiered((Placement.DEVICE, Placement.MANAGED)), dynamic=True)
    for seed in range(3):
        twins.step(*batch(PLAIN, seed))
    twins.check_same()
    assert twins.graphs == 1


def test_a_cached_table_breaks_the_graph_and_trains_the_same() -> None:
    class Prefetched(nn.Module):
        """Prefetches the next batch while it has this one."""

        def __init__(self) -> None:
            super().__init__()
            self.tables = tiered((Placement.MANAGED, Placement.MANAGED_CACHING))
            self.scale = 2.0

        def forward(self, *batches: Tensor) -> Tensor:
            self.tables.prefetch(*batches[:2])
            self.tables.prefetch(*batches[2:])
            first = self.tables(*batches[:2]) * self.scale
            return first + self.tables(*batches[2:])

    twins = Twins(Prefetched, fullgraph=False)
    case = replace(PLAIN, rows=(50, 300))
    for seed in range(4):
        twins.step(*batch(case, seed), *batch(case, seed + 10))
        stats = [module.tables.cache_stats() for module in (twins.eager, twins.other)]
        assert stats[0] == stats[1]
    twins.check_same()
    assert twins.graphs > 0, "what is around the tables is still compiled"
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        torch.compile(twins.other.tables, backend="eager", fullgraph=True)(*batch(case, 0))


def test_evaluation_is_compiled_too() -> None:
    twins = Twins(lambda: PLAIN.module(optim.SGD(0.1)), dynamic=True)
    for seed in range(3):
        twins.step(*batch(PLAIN, seed))
        with torch.no_grad():
            results = [module(*batch(PLAIN, 9)) for module in (twins.eager, twins.compiled)]
        assert torch.equal(*results)
        assert not results[1].requires_grad
    assert twins.graphs == 2, "one for training, one for evaluation"


def test_a_compiled_module_counts_what_is_out_of_bounds() -> None:
    module = PLAIN.module(optim.SGD(0.1))
    module.bounds_check = BoundsCheck.WARNING
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    indices, offsets = batch(PLAIN, 0)
    for _ in range(2):
        compiled(indices + 49, offsets).sum().backward()
    expected = 2 * int(
        (indices + 49 >= torch.tensor([50, 7]).repeat_interleave(offsets[[0, 4, 8]].diff())).sum()
    )
    assert module.bounds_violations.tolist() == [expected, 0]


def test_a_compiled_module_raises_before_it_writes() -> None:
    module = PLAIN.module(optim.SGD(0.1))
    module.bounds_check = BoundsCheck.FATAL
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    indices, offsets = batch(PLAIN, 0)
    before = module.weights.detach().clone()
    with pytest.raises(RuntimeError, match=r"must be in \[0, 50\)"):
        compiled(indices + 50, offsets)
    assert torch.equal(module.weights, before)
    assert module.step == 0


def test_uncompiled_calls_do_not_recompile_each_other() -> None:
    negate, square = run_uncompiled(lambda x: -x), run_uncompiled(lambda x: x * x)

    def compute(values: Tensor) -> Tensor:
        return square(negate(values) + 1.0)

    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        result = torch.compile(compute, backend="eager")(torch.ones(2))
    assert result.tolist() == [0.0, 0.0]


def test_the_compiler_is_loaded_by_those_who_compile() -> None:
    """It takes longer to import than the rest of emblib; then graphs break where they must."""
    program = """
import sys, torch, emblib
module = emblib.TableBatchedEmbeddingBags(
    [emblib.TableSpec(50, 4, placement=emblib.Placement.MANAGED_CACHING)],
    emblib.optim.SGD(0.5), cache=emblib.CacheConfig(sets=1),
)
batch = torch.arange(5), torch.arange(6)
module.prefetch(*batch)
module(*batch).sum().backward()
assert "torch._dynamo" not in sys.modules
compiled = torch.compile(module, backend="aot_eager")
compiled(*batch).sum().backward()
assert module.step == 2
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_options_of_precision() -> None:
    def module() -> TableBatchedEmbeddingBags:
        torch.manual_seed(0)
        precision = Precision(
            torch.bfloat16, states=torch.float16, stochastic_rounding=StochasticRounding(3)
        )
        return TableBatchedEmbeddingBags(
            [TableSpec(50, 8), TableSpec(7, 8)],
            optim.Adam(0.01),
            precision=precision,
            bounds_check=BoundsCheck.IGNORE,
        )

    case = replace(PLAIN, weighted=True)
    twins = Twins(module, dynamic=True)
    for seed in range(3):
        twins.step(*batch(case, seed))
    twins.check_same()
    assert twins.graphs == 1


def test_functions_are_passed_no_dataclass(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.10 makes a dataclass again from symbols ("must be real number, not Proxy")."""
    passed: list[Any] = []
    for function in (autograd.FusedLookup, autograd.GradientLookup):
        apply = function.apply
        monkeypatch.setattr(function, "apply", lambda *a, f=apply: (passed.extend(a), f(*a))[1])
    for optimizer in (optim.Adam(0.1, max_gradient=0.5), optim.External()):
        bags = TableBatchedEmbeddingBags([TableSpec(10, 4)], optimizer)
        bags(torch.tensor([1]), torch.tensor([0, 1])).sum().backward()
    assert len(passed) > 6
    assert not [value for value in passed if is_dataclass(value)]
