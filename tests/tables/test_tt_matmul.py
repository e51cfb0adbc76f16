"""`Precision(matmul=...)`: how exact products of cores are, on every device and kind of table."""

import logging

import pytest
import torch
from torch import Tensor

import emblib
from emblib import MatmulPrecision, Precision, TTSpec, optim, storage
from emblib.ops.codes import MATMUL_PRECISION
from emblib.reference import tt as reference
from tests.ops.test_tt import CASES, make, seeded

ops = torch.ops.emblib
BITS = {"float32": 21, "tf32": 11, "bf16": 8}
SPECS = [TTSpec(500, 16, (8, 8)), TTSpec(90, 16, (4, 6))]


pytestmark = pytest.mark.usefixtures("on_device")


def is_gpu() -> bool:
    return torch.get_default_device().type == "cuda"


@pytest.mark.parametrize("precision", BITS)
@pytest.mark.parametrize("name", ["readme_small", "four_cores", "ranks_odd", "two_cores"])
def test_errors_are_within_the_stated_bounds(name: str, precision: str) -> None:
    """Rows and gradients are chains of up to four products, each of two rounded operands."""
    case, generator = CASES[name], seeded(1)
    cores, ids = case.cores(generator), case.ids(generator)
    run = make(cores, case, ids, 0)
    plan, code, count = list(run.made.plan), MATMUL_PRECISION[precision], run.count
    num_saved = 0 if len(case.p) == 2 else ids.numel()
    rows, left_values = ops.tt_rows(cores, plan, *case.layout[:3], num_saved, code)
    grads = torch.randn(ids.numel(), case.layout.dim, generator=generator)
    core_grads = ops.tt_core_grads(cores, plan, left_values, grads, *case.layout[:3], code)
    bound = 8 * 2.0 ** -BITS[precision]
    double = [core.double() for core in cores]
    exact = results(double, run.ids, grads[:count].double(), case.p, case.q)
    sizes = results(
        [c.abs() for c in double], run.ids, grads[:count].double().abs(), case.p, case.q
    )
    worst = 0.0
    for got, want, size in zip([rows[:count], *core_grads], exact, sizes, strict=True):
        worst = max(worst, float(((got - want).abs() / size.clamp_min(1e-300)).max()))
    assert worst < bound
    if is_gpu() and precision != "float32":
        assert worst > bound / 2**9
    if not is_gpu():
        assert worst < 8 * 2.0 ** -BITS["float32"]


def results(
    cores: list[Tensor], ids: Tensor, grads: Tensor, p: tuple[int, ...], q: tuple[int, ...]
) -> list[Tensor]:
    return [reference.rows(cores, ids, p, q), *reference.core_grads(cores, ids, grads, p, q)]


@pytest.mark.parametrize("precision", MatmulPrecision)
def test_training_in_each_precision(precision: MatmulPrecision) -> None:
    """Losses fall alike; on a GPU lower precision is another computation, on the CPU it is not."""
    torch.manual_seed(0)
    ids = torch.randint(0, 90, (2 * 64,), generator=seeded(2))
    offsets, target = torch.arange(0, 2 * 64 + 1, 2), torch.randn(32, 32, generator=seeded(3))
    losses = {}
    for matmul in (MatmulPrecision.FLOAT32, precision):
        torch.manual_seed(1)
        bags = emblib.TableBatchedTTEmbeddingBags(
            SPECS, optim.Adagrad(0.05), precision=Precision(matmul=matmul)
        )
        losses[matmul] = []
        for _ in range(20):
            loss = (bags(ids, offsets) - target).square().mean()
            loss.backward()
            losses[matmul].append(float(loss.detach()))
    exact, mine = losses[MatmulPrecision.FLOAT32], losses[precision]
    assert exact[-1] < 0.9 * exact[0]
    assert mine == pytest.approx(exact, rel=2e-2)
    if precision is not MatmulPrecision.FLOAT32:
        assert (mine == exact) != is_gpu()


def test_values_that_backward_makes_again_have_the_precision() -> None:
    """An update between forward and backward makes the values that forward kept stale."""
    ids, offsets = torch.arange(20), torch.arange(21)
    grads = torch.randn(2, 20, 16, generator=seeded(4))
    trained = []
    for is_stale in (True, False):
        torch.manual_seed(1)
        bags = emblib.TTEmbeddingBag(SPECS[0], optim.SGD(0.1), precision=Precision(matmul="bf16"))
        first = bags(ids, offsets)
        second = bags(ids, offsets) if is_stale else None
        first.backward(grads[0])
        (bags(ids, offsets) if second is None else second).backward(grads[1])
        trained.append([core.detach().clone() for core in bags.cores])
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))


def test_lower_precision_is_logged_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "emblib"):
        emblib.TTEmbeddingBag(SPECS[0], precision=Precision(matmul="tf32"))
    logged = [r.getMessage() for r in caplog.records if "float32" in r.getMessage()]
    assert len(logged) == (0 if is_gpu() else 1)
    assert is_gpu() or "tf32" in logged[0]


def test_tables_without_products_refuse_it() -> None:
    match = r"Precision\(matmul='tf32'\) is for tensor trains"
    with pytest.raises(ValueError, match=match):
        emblib.TableBatchedEmbeddingBags(
            [emblib.TableSpec(10, 4)], precision=Precision(matmul="tf32")
        )
    with pytest.raises(
        ValueError, match="MatmulPrecision must be one of 'float32', 'tf32', 'bf16'"
    ):
        Precision(matmul="fp8")


def test_ops_refuse_an_unknown_precision() -> None:
    case = CASES["readme_small"]
    cores, ids = case.cores(seeded(1)), case.ids(seeded(1))
    run = make(cores, case, ids, 0)
    with pytest.raises(RuntimeError, match=r"matmul_precision must be one of 0 \(float32\), 1"):
        ops.tt_rows(cores, list(run.made.plan), *case.layout[:3], 0, 3)


def test_cached_trains_multiply_in_it() -> None:
    precision = Precision(matmul="bf16")
    bags = emblib.CachedTTEmbeddingBags(SPECS, emblib.TTCache(10), precision=precision)
    assert bags.trains.precision.matmul is MatmulPrecision.BF16
    assert bags.rows.precision.matmul is MatmulPrecision.FLOAT32


def test_trains_of_a_collection_multiply_in_it() -> None:
    """Tables of different precision have modules of their own."""
    trains = [storage.TensorTrain((8, 8), matmul=m) for m in ("tf32", "tf32", "float32")]
    configs = [
        emblib.EmbeddingBagConfig(500, 16, f"t{i}", storage=train) for i, train in enumerate(trains)
    ]
    collection = emblib.EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1))
    modules = {id(h.module): h.module for h in collection.handles().values()}.values()
    found = sorted((k.precision.matmul.value, len(k.tables)) for k in modules)
    assert found == [("float32", 1), ("tf32", 2)]
