"""Chunks of large tensor-train batches: the same results as at once, within a bound of memory."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib import TableBatchedTTEmbeddingBags, optim
from emblib.ops import tt_layout
from emblib.specs import BoundsCheck, Pooling, Precision, TTSpec
from tests.optimizer_cases import CASES

SPECS = [
    TTSpec(110, 8, (3, 4), (4, 5, 6), (2, 2, 2)),
    TTSpec(90, 12, (5,)),
    TTSpec(200, 16, (2, 3, 2), (3, 4, 5, 4), (2, 2, 2, 2)),
]
LOOKUPS_PER_CHUNK = 9

# Peak memory of a process before and after a step of a batch of many lookups.
_PEAK = """
import resource, torch, emblib
torch.set_num_threads(1)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
spec = emblib.TTSpec(11_000_000, 64, (32, 32), (200, 220, 250), (4, 4, 4))
table = emblib.TTEmbeddingBag(spec, emblib.optim.SGD(0.1))
table(torch.arange(100), torch.tensor([0, 100])).sum().backward()
bags = 30_000
indices = torch.randint(0, spec.rows, (40 * bags,))
offsets = torch.arange(0, 40 * bags + 1, 40)
before = peak()
out = table(indices, offsets)
out.backward(torch.ones_like(out))
print(peak() - before, 2 * out.nbytes + 3 * table.nbytes()["weights"])
"""


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes chunks small."""

    def start() -> None:
        monkeypatch.setattr(tt_layout, "_max_chunk_lookups", lambda *_: LOOKUPS_PER_CHUNK)

    return start


class Inputs:
    """A batch with an empty bag, a skipped id and a bag longer than a chunk."""

    def __init__(self, specs: list[TTSpec], sizes: list[int]) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(0, 6, (sum(sizes),), generator=generator)
        lengths[1], lengths[2] = 0, 25
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids, bag = [], 0
        for spec, size in zip(specs, sizes, strict=True):
            count = int(lengths[bag : bag + size].sum())
            ids.append(torch.randint(0, spec.rows, (count,), generator=generator))
            bag += size
        self.indices = torch.cat(ids)
        self.indices[4] = -1
        self.weights = torch.rand(self.indices.numel(), generator=generator)


def results(
    optimizer: optim.Optimizer,
    inputs: Inputs,
    specs: list[TTSpec],
    *,
    weighted: bool = False,
    batch_sizes: list[list[int]] | None = None,
    **options: Any,
) -> list[Tensor]:
    """Return outputs, gradients of weights, cores and states after two steps."""
    torch.manual_seed(1)
    tables = TableBatchedTTEmbeddingBags(specs, optimizer, **options)
    found = []
    for _ in range(2):
        weights = inputs.weights.clone().requires_grad_() if weighted else None
        out = tables(inputs.indices, inputs.offsets, weights, batch_sizes=batch_sizes)
        found.append(out.detach())
        out.backward(torch.sin(torch.arange(out.numel()).view_as(out).to(out.dtype)))
        if weights is not None:
            assert weights.grad is not None
            found.append(weights.grad)
    with torch.no_grad():
        found.append(tables(inputs.indices, inputs.offsets, batch_sizes=batch_sizes))
    grads = [core.grad for core in tables.cores if core.grad is not None]
    states = [state for states in tables.core_states() for state in states]
    return [*found, *(core.detach() for core in tables.cores), *states, *grads, tables.hyperparams]


def assert_near(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
@pytest.mark.parametrize("sizes", [None, [[3, 1], [0, 4], [2, 2]]])
def test_chunks_are_the_batch(
    small_chunks: Any, weighted: bool, pooling: Pooling, sizes: list[list[int]] | None
) -> None:
    inputs = Inputs(SPECS, [4, 4, 4])
    options = {"pooling": pooling, "weighted": weighted, "batch_sizes": sizes}
    want = results(optim.SGD(0.1), inputs, SPECS, **options)
    small_chunks()
    assert_near(results(optim.SGD(0.1), inputs, SPECS, **options), want)


def test_chunks_without_pooling(small_chunks: Any) -> None:
    specs = [SPECS[0], TTSpec(30, 8, (4,))]
    inputs = Inputs(specs, [5, 5])
    want = results(optim.SGD(0.1), inputs, specs, pooling=Pooling.NONE)
    small_chunks()
    assert_near(results(optim.SGD(0.1), inputs, specs, pooling=Pooling.NONE), want)


@pytest.mark.parametrize(
    "options", [{"precision": Precision(output=torch.bfloat16)}, {"feature_tables": [0, 1, 0]}]
)
def test_chunks_with_options(small_chunks: Any, options: dict[str, Any]) -> None:
    read = [SPECS[t] for t in options.get("feature_tables", [0, 1, 2])]
    inputs = Inputs(read, [4, 4, 4])
    tables = SPECS if len({*map(id, read)}) == 3 else SPECS[:2]
    want = results(optim.SGD(0.1), inputs, tables, **options)
    small_chunks()
    got = results(optim.SGD(0.1), inputs, tables, **options)
    for a, b in zip(got, want, strict=True):
        near = 1e-2 if a.dtype == torch.bfloat16 else 2e-4
        torch.testing.assert_close(a, b, rtol=near, atol=near)


@pytest.mark.parametrize(
    "name",
    [
        "sgd",
        "sgd_l2",
        "adagrad",
        "rowwise_adagrad",
        "adam",
        "partial_rowwise_adam",
        "lamb",
        "partial_rowwise_lamb",
        "lars",
        "ftrl",
    ],
)
def test_chunks_make_one_step_of_every_optimizer(small_chunks: Any, name: str) -> None:
    inputs = Inputs(SPECS, [4, 4, 4])
    want = results(CASES[name], inputs, SPECS)
    torch.manual_seed(1)
    initial = TableBatchedTTEmbeddingBags(SPECS, CASES[name])
    small_chunks()
    got = results(CASES[name], inputs, SPECS)
    assert_near(got, want)
    first = 3  # after the three outputs
    for start, a, b in zip(initial.cores, got[first:], want[first:], strict=False):
        assert torch.equal((a != start).any(1), (b != start).any(1))  # the same rows took part


@pytest.mark.parametrize("clip", [None, 0.1])
def test_chunks_leave_gradients(small_chunks: Any, clip: float | None) -> None:
    inputs = Inputs(SPECS, [4, 4, 4])
    external = optim.External() if clip is None else optim.SGD(0.1, max_gradient=clip)
    want = results(external, inputs, SPECS, weighted=True)
    small_chunks()
    assert_near(results(external, inputs, SPECS, weighted=True), want)


def test_same_bits_on_any_number_of_threads(small_chunks: Any, thread_counts: list[int]) -> None:
    small_chunks()
    found = []
    for count in thread_counts:
        torch.set_num_threads(count)
        found.append(results(optim.Adagrad(0.1), Inputs(SPECS, [4, 4, 4]), SPECS, weighted=True))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_frozen_and_shared_cores(small_chunks: Any) -> None:
    """Gradients of shared cores are passed on once, summed over chunks."""
    small_chunks()
    inputs, calls = Inputs(SPECS, [4, 4, 4]), []
    tables = TableBatchedTTEmbeddingBags(SPECS, optim.SGD(0.1))
    before = [core.clone() for core in tables.cores]

    def share(grads: list[Tensor], use: Any) -> None:
        calls.append(len(grads))
        use(grads)

    tables.shared_gradients[0] = share
    for core in tables.table_cores(1):
        core.requires_grad_(False)
    tables(inputs.indices, inputs.offsets).sum().backward()
    assert calls == [3]
    assert tables.step == 1
    changed = [not torch.equal(a, b) for a, b in zip(tables.cores, before, strict=True)]
    assert changed == [True] * 3 + [False] * 2 + [True] * 4


@pytest.mark.parametrize("check", [BoundsCheck.NONE, BoundsCheck.IGNORE])
def test_invalid_offsets_are_repaired(small_chunks: Any, check: BoundsCheck) -> None:
    inputs = Inputs(SPECS, [4, 4, 4])
    inputs.offsets[-1] += 7
    if check is BoundsCheck.IGNORE:  # the only one that specifies offsets that decrease
        inputs.offsets[5] = inputs.offsets[3]
    want = results(optim.SGD(0.1), inputs, SPECS, bounds_check=check)
    small_chunks()
    assert_near(results(optim.SGD(0.1), inputs, SPECS, bounds_check=check), want)


def test_memory_of_a_large_batch_is_bounded() -> None:
    """1.2 million lookups, whose rows and their gradients alone would take 614 MB."""
    done = subprocess.run(
        [sys.executable, "-c", _PEAK], capture_output=True, text=True, check=True, timeout=300
    )
    grown, outputs = map(int, done.stdout.split())
    assert grown < tt_layout.CHUNK_BYTES + outputs + (40 << 20)
