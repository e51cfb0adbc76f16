"""Tensor-train ops on cores in 16 bits: the bits of float32 cores of equal values, then rounded."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.columns import Hyper
from emblib.ops.codes import OPTIMIZER
from emblib.optim import Optimizer
from emblib.reference import optim as reference
from emblib.reference import tt
from tests.ops.test_tt import CASES, Case, Run, every_case, make, seeded
from tests.optimizer_cases import CASES as OPTIMIZERS
from tests.simt import emulated

ops = torch.ops.emblib

DTYPES = (torch.float16, torch.bfloat16)
SEEDS = (-1, 7)  # to nearest, and stochastically


pytestmark = pytest.mark.usefixtures("on_device")


def narrow(case: Case, seed: int, dtype: torch.dtype) -> list[Tensor]:
    return [core.to(dtype) for core in case.cores(seeded(seed))]


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.float() for tensor in tensors]


def random_case(seed: int) -> Case:
    generator = torch.Generator(device="cpu").manual_seed(seed)

    def draw(low: int, high: int, count: int) -> tuple[int, ...]:
        return tuple(
            torch.randint(low, high + 1, (count,), generator=generator, device="cpu").tolist()
        )

    (cores,) = draw(2, 4, 1)
    (lookups,) = draw(0, 70, 1)
    return Case(draw(1, 9, cores), draw(1, 6, cores), draw(1, 20, cores - 1), lookups)


def num_saved(case: Case, seed: int) -> int:
    return 0 if len(case.p) == 2 else seed % 20


def gradients(case: Case, run: Run, cores: list[Tensor], seed: int) -> tuple[Any, ...]:
    """Return the arguments of `tt_update_` from the plan on."""
    dim = case.layout.dim
    grads = torch.randn(case.lookups, dim, generator=seeded(seed))
    return (list(run.made.plan), run.made.left_values, grads, *case.layout[:3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", range(10))
def test_rows_and_gradients_have_the_bits_of_float_cores(dtype: torch.dtype, block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):
        case = random_case(seed)
        cores, ids = narrow(case, seed, dtype), case.ids(seeded(seed))
        mine = make(cores, case, ids, num_saved(case, seed))
        want = make(wide(cores), case, ids, num_saved(case, seed))
        count = mine.count
        assert mine.made.rows.dtype == mine.made.left_values.dtype == torch.float32
        assert torch.equal(mine.made.rows[:count], want.made.rows[:count]), seed
        exact = tt.rows([core.double() for core in cores], mine.ids, case.p, case.q)
        scale = max(1e-3, float(exact.abs().max()) if exact.numel() else 0.0)
        torch.testing.assert_close(
            mine.made.rows[:count].double(), exact, rtol=2e-5, atol=2e-5 * scale
        )
        rest = gradients(case, mine, cores, seed)
        got, wanted = ops.tt_core_grads(cores, *rest), ops.tt_core_grads(wide(cores), *rest)
        assert all(g.dtype == torch.float32 for g in got)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), seed


@every_case()
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_shape(case: Case, dtype: torch.dtype) -> None:
    cores, ids = narrow(case, 1, dtype), case.ids(seeded(1))
    mine, want = (make(c, case, ids, num_saved(case, 17)) for c in (cores, wide(cores)))
    assert torch.equal(mine.made.rows[: mine.count], want.made.rows[: mine.count])
    rest = gradients(case, mine, cores, 1)
    got, wanted = ops.tt_core_grads(cores, *rest), ops.tt_core_grads(wide(cores), *rest)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def rounded(values: Tensor, dtype: torch.dtype, hyper: Tensor, rows: Tensor, tensor: int) -> Tensor:
    """Return matrices of float32 as an update stores them; what has one number a row stays."""
    if values.dim() == 1 or dtype == torch.float32:
        return values
    if hyper[Hyper.SEED] < 0:
        return values.to(dtype)
    seed, step = int(hyper[Hyper.SEED]), int(hyper[Hyper.STEP])
    with torch.device("cpu"):
        random = reference.rounding_words(seed, rows.cpu(), values.size(1), step, tensor)
    return reference.round_stochastically(values, dtype, random.to(values.device))


class Matrix:
    """A core with states of an optimizer, stored in 16 bits, and float copies of the values."""

    def __init__(
        self, optimizer: Optimizer, core: Tensor, states: torch.dtype, generator: torch.Generator
    ) -> None:
        self.core = core
        self.states = []
        for kept in optimizer.states:
            shape = core.shape[:1] if kept.per_row else core.shape
            values = (
                torch.zeros(shape)
                if kept.name == "prev_iter"
                else torch.rand(shape, generator=generator)
            )
            self.states.append(values if kept.per_row else values.to(states))
        self.float_core = core.float().clone()
        self.float_states = [state.float().clone() for state in self.states]

    def assert_rounded(self, touched: Tensor, first_row: int, hyper: Tensor, old: Tensor) -> None:
        """Compare with what the update of the float copies made, rounded where it wrote."""
        rows = first_row + torch.arange(self.core.size(0))
        want = rounded(self.float_core, self.core.dtype, hyper, rows, 0)
        assert torch.equal(self.core[touched], want[touched])
        assert torch.equal(self.core[~touched], old[~touched])
        for number, (state, values) in enumerate(zip(self.states, self.float_states, strict=True)):
            want = rounded(values, state.dtype, hyper, rows, 1 + number)
            assert torch.equal(state[touched], want[touched])


def hyper_of(optimizer: Optimizer, seed: int) -> Tensor:
    hyper = optimizer.hyperparams()
    hyper[Hyper.STEP], hyper[Hyper.SEED] = 3.0, seed
    return hyper.to(torch.get_default_device())


TRAINED = {
    name: optimizer
    for name, optimizer in OPTIMIZERS.items()
    if "counter" not in name and "global" not in name and "adagradw" not in name
}


# Each optimizer rounds one dtype to nearest and the other stochastically.
@pytest.mark.parametrize(
    ("name", "dtype", "seed"),
    [
        (name, dtype, SEEDS[(number + i) % 2])
        for number, name in enumerate(TRAINED)
        for i, dtype in enumerate(DTYPES)
    ],
)
def test_an_update_rounds_what_it_writes(name: str, dtype: torch.dtype, seed: int) -> None:
    """For every optimizer, and states in the other 16-bit dtype or in float32."""
    optimizer, case = TRAINED[name], CASES["ranks_odd"]
    for states in (torch.float32, DTYPES[dtype == DTYPES[0]]):
        generator = seeded(5)
        cores, ids = narrow(case, 5, dtype), case.ids(generator)
        run = make(cores, case, ids, 9)
        rest = gradients(case, run, cores, 6)
        matrices = [Matrix(optimizer, core, states, generator) for core in cores]
        before = [core.clone() for core in cores]
        hyper, number = hyper_of(optimizer, seed), OPTIMIZER[optimizer.name]
        dense = ops.tt_core_grads(cores, *rest)
        all_states = [state for m in matrices for state in m.states]
        ops.tt_update_(cores, all_states, hyper, number, *rest)
        first = 0
        for m, old, grad in zip(matrices, before, dense, strict=True):
            ops.update_rows_(m.float_core, m.float_states, hyper, number, grad)
            touched = grad.ne(0).any(1)
            m.assert_rounded(touched, first, hyper, old)
            first += old.size(0)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_updates_of_random_shapes(dtype: torch.dtype, seed: int) -> None:
    """The op on whole trains is that on each core; rows without a lookup keep their bits."""
    for number in range(60):
        case = random_case(1000 + number)
        cores, ids = narrow(case, number, dtype), case.ids(seeded(number))
        run = make(cores, case, ids, num_saved(case, number))
        rest = gradients(case, run, cores, number)
        optimizer = OPTIMIZERS["adam"]
        hyper = hyper_of(optimizer, seed)
        states = [torch.rand(c.shape, generator=seeded(3)) for c in cores for _ in range(2)]
        mine, mine_states = ([t.clone() for t in some] for some in (cores, states))
        dense = ops.tt_core_grads(cores, *rest)
        ops.tt_update_(mine, mine_states, hyper, OPTIMIZER["adam"], *rest)
        digits = tt.digits(ids, case.p)
        first = 0
        for k, (core, grad) in enumerate(zip(cores, dense, strict=True)):
            unused = torch.ones(core.size(0), dtype=torch.bool)
            unused[digits[k]] = False
            assert torch.equal(mine[k][unused], core[unused])
            own = states[2 * k : 2 * k + 2]
            ops.update_rows_(core, own, hyper, OPTIMIZER["adam"], grad, first)
            assert torch.equal(mine[k], core), number
            first += core.size(0)
        assert all(torch.equal(a, b) for a, b in zip(states, mine_states, strict=True))


@pytest.mark.parametrize("seed", SEEDS)
def test_same_bits_on_any_number_of_threads(seed: int) -> None:
    case = CASES["readme_small"]
    threads, results = torch.get_num_threads(), []
    optimizer = OPTIMIZERS["adagrad"]
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            cores, ids = narrow(case, 2, torch.bfloat16), case.ids(seeded(2))
            run = make(cores, case, ids, 5)
            states = [torch.zeros_like(core) for core in cores]
            rest = gradients(case, run, cores, 2)
            hyper = hyper_of(optimizer, seed)
            ops.tt_update_(cores, states, hyper, OPTIMIZER["adagrad"], *rest)
            results.append([run.made.rows[: run.count], *cores, *states])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


UPDATES = {"cpu": ops.update_rows_, "emulated": emulated.update_rows_}


@pytest.mark.parametrize("kind", UPDATES)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 1), (30, 5), (3, 700), (0, 4), (20, 64)], ids=str)
def test_update_rows_matches_the_reference(
    kind: str, dtype: torch.dtype, shape: tuple[int, int], seed: int
) -> None:
    """SGD of steps that float32 represents exactly, so that rounding alone decides the bits."""
    if torch.get_default_device().type != "cpu":
        pytest.skip("emulated kernels run on the host")
    generator = seeded(5)
    optimizer = replace(OPTIMIZERS["sgd"], lr=2.0**-12)
    weights = (torch.randint(-64, 65, shape, generator=generator) / 64).to(dtype)
    want = weights.clone()
    grads = torch.randint(-3, 4, shape, generator=generator).float()
    grads[::3] = 0.0
    hyper = hyper_of(optimizer, seed)
    UPDATES[kind](weights, [], hyper, OPTIMIZER["sgd"], grads, 11)
    reference.update_rows_(want, [], hyper, "sgd", grads, 11)
    assert torch.equal(weights, want)


def test_stochastic_rounding_is_unbiased() -> None:
    """Steps of an eighth of the spacing: nearest keeps the core, the mean of random ones moves."""
    optimizer = replace(OPTIMIZERS["sgd"], lr=1.0)
    grads = torch.full((32, 128), -(2.0**-10))  # the spacing of bfloat16 at 1 is 2^-7
    for seed, moved in ((-1, 0.0), (5, 1.0)):
        core, steps = torch.ones(32, 128, dtype=torch.bfloat16), 32
        hyper = hyper_of(optimizer, seed)
        for step in range(1, steps + 1):
            hyper[Hyper.STEP] = step
            ops.update_rows_(core, [], hyper, OPTIMIZER["sgd"], grads)
        mean = float((core.float() - 1.0).mean())
        # The deviation of a mean of 4,096 values, each of 32 roundings within 2^-7, is below 4e-4.
        assert abs(mean - moved * steps * 2.0**-10) < 2e-3


def test_a_seed_gives_the_same_bits_again_and_another_seed_others() -> None:
    case, optimizer, found = CASES["two_cores"], OPTIMIZERS["sgd"], []
    for seed in (3, 3, 4):
        cores, ids = narrow(case, 2, torch.float16), case.ids(seeded(2))
        run = make(cores, case, ids, 0)
        rest = gradients(case, run, cores, 2)
        ops.tt_update_(cores, [], hyper_of(optimizer, seed), OPTIMIZER["sgd"], *rest)
        found.append(torch.cat([core.flatten() for core in cores]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_cores_of_several_dtypes_are_refused() -> None:
    case = CASES["ranks_one"]
    cores = narrow(case, 1, torch.float16)
    run = make(cores, case, case.ids(seeded(1)), 0)
    before = [core.clone() for core in cores]
    mixed = [cores[0], cores[1].float(), cores[2]]
    with pytest.raises(
        RuntimeError, match="all cores must have one dtype, got float16 and float32"
    ):
        ops.tt_rows(mixed, list(run.made.plan), *case.layout[:3], 0)
    states = [torch.zeros(core.size(0)).half() for core in cores]
    hyper = hyper_of(OPTIMIZERS["rowwise_adagrad"], -1)
    with pytest.raises(RuntimeError, match="one number per row must be float32"):
        ops.tt_update_(
            cores, states, hyper, OPTIMIZER["rowwise_adagrad"], *gradients(case, run, cores, 1)
        )
    assert all(torch.equal(a, b) for a, b in zip(cores, before, strict=True))


@pytest.mark.parametrize("name", ["tt_rows", "tt_core_grads", "tt_update_", "update_rows_"])
def test_opcheck(name: str) -> None:
    case = Case((5, 6, 7), (2, 2, 4), (3, 5), 0)
    cores, ids = narrow(case, 4, torch.bfloat16), torch.randperm(210, generator=seeded(4))[:40]
    run = make(cores, case, ids, 8)
    case = case._replace(lookups=40)
    shape = [list(part) for part in case.layout[:3]]
    plan, left_values, grads, *_ = gradients(case, run, cores, 4)
    hyper = hyper_of(OPTIMIZERS["adam"], 3)
    moments = [torch.zeros_like(core) for core in cores for _ in range(2)]
    calls: dict[str, tuple[Any, ...]] = {
        "tt_rows": (cores, plan, *shape, 8),
        "tt_core_grads": (cores, plan, left_values, grads, *shape),
        "tt_update_": (cores, moments, hyper, OPTIMIZER["adam"], plan, left_values, grads, *shape),
        "update_rows_": (
            cores[0],
            moments[:2],
            hyper,
            OPTIMIZER["adam"],
            torch.randn(cores[0].shape),
            5,
        ),
    }
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if not cores[0].is_cuda:  # there the ends of tensors that are returned are unspecified
        checks.append("test_aot_dispatch_dynamic")
    elif name == "tt_core_grads":  # the gradients are parts of one tensor
        checks.remove("test_faketensor")
    torch.library.opcheck(getattr(ops, name).default, calls[name], test_utils=checks)
