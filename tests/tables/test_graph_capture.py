"""Training steps in CUDA graphs, and what makes that possible: no step waits for the device.

On a GPU and on the pretend GPU the waits of a step are counted. On the CPU all that can be seen is
which operations of torch a step runs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from emblib import BoundsCheck, Placement, TableBatchedEmbeddingBags, TableSpec, optim
from emblib.ops import autograd
from emblib.tables.optimizer_hooks import is_periodic
from tests.conftest import host_waits
from tests.optimizer_cases import CASES as OPTIMIZERS
from tests.tbe_cases import CASES, Case

CPU = torch.device("cpu")
PLAIN = replace(CASES["plain"], batch=4, lengths=(2,) * 8)
# Those with a part that runs every so many steps, counted in Python.
PERIODIC = [name for name, optimizer in OPTIMIZERS.items() if is_periodic(optimizer)]

# Reading a value or a size from the device, and making a tensor of Python numbers: a copy that a
# graph cannot hold. `index` and `index_put_` do so for masks.
WAITS = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "item",
    "lift_fresh",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}


class Operations(TorchDispatchMode):
    """Collects the operations that would wait for a GPU, or copy from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[str] = []
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        self.all.append(name)
        masks = name.startswith("index") and any(
            isinstance(t, Tensor) and t.dtype is torch.bool for t in args[1] or ()
        )
        if name in WAITS or masks:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def step_of(case: Case, optimizer: optim.Optimizer, device: torch.device) -> Callable[[], None]:
    """Return forward and backward of one step."""
    module = case.module(optimizer, device.type)
    indices, offsets, weights = case.batch_of(device.type)
    if weights is not None:
        weights.requires_grad_()
    grad = torch.ones_like(module(indices, offsets, weights))
    return lambda: module(indices, offsets, weights).backward(grad)


def operations(step: Callable[[], object]) -> Operations:
    """Return what a step runs."""
    # What asks for a value only where the value is at hand is not asked on a GPU.
    with mock.patch.object(autograd, "may_write_weights", return_value=True), Operations() as seen:
        step()
    return seen


def waits(step: Callable[[], object], device: torch.device) -> list[str]:
    """Return what a step waits for."""
    if device.type == "cpu":
        return operations(step).found
    with host_waits() as found:
        step()
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_step_waits_for_the_device(optimizer: str, device: torch.device) -> None:
    step = step_of(replace(PLAIN, weighted=True), OPTIMIZERS[optimizer], device)
    seen = operations(step)
    assert {"bounds_check", "tbe_lookup", "tbe_group", "tbe_update_"} <= set(seen.all)
    assert "tbe_sample_weight_grad" in seen.all
    assert not waits(step, device)


@pytest.mark.parametrize("case", ["plain", "none", "mean", "mixed_dims", "fp16", "invalid"])
def test_no_kind_of_lookup_waits_for_the_device(case: str, device: torch.device) -> None:
    assert not waits(step_of(CASES[case], optim.Adam(0.1, max_gradient=1.0), device), device)


def test_new_numbers_do_not_wait_for_the_device(device: torch.device) -> None:
    module = PLAIN.module(optim.Adam(0.1), device.type)

    def set_numbers() -> None:
        module.set_learning_rate(0.5)
        module.set_step(3)

    assert "fill_" in operations(set_numbers).all
    assert not waits(set_numbers, device)


@pytest.mark.parametrize("gradient", optim.Gradient)
def test_only_a_sparse_gradient_waits_for_the_device(gradient: optim.Gradient) -> None:
    seen = operations(step_of(PLAIN, optim.External(gradient=gradient), CPU)).found
    assert bool(seen) == (gradient is optim.Gradient.SPARSE)
    assert not [name for name in seen if "_local_scalar_dense" not in name]


def test_a_dense_gradient_does_not_wait(
    device: torch.device, no_host_waits: Callable[[], AbstractContextManager[None]]
) -> None:
    external = optim.External(gradient=optim.Gradient.DENSE)
    step = step_of(PLAIN, external, device)
    with no_host_waits():
        step()


@pytest.mark.cuda
def test_waits_are_seen_on_a_gpu(
    no_host_waits: Callable[[], AbstractContextManager[None]],
) -> None:
    values = torch.arange(4, device="cuda")

    waiting: list[Callable[[], object]] = [
        lambda: int(values[0]),
        lambda: values[values > 1],
        values.nonzero,
        values.cpu,
    ]
    for operation in waiting:
        assert waits(operation, values.device)
    assert not waits(lambda: values + 1, values.device)
    with no_host_waits(), pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        int(values[0])


def test_the_guard_sees_what_waits() -> None:
    values = torch.arange(4)
    with Operations() as seen:
        int(values[0])
        values[values > 1]
        values.nonzero()
        torch.tensor([1, 2])
    assert len(seen.found) == 4


def test_tensors_that_a_graph_knows_stay_where_they_are() -> None:
    module = PLAIN.module(optim.Adam(0.1))

    def addresses() -> list[int]:
        return [t.data_ptr() for t in (*module.parameters(), *module.buffers())]

    before = addresses()
    state = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    module(*PLAIN.batch_of()).sum().backward()
    module.load_state_dict(state)
    module.set_learning_rate(0.3)
    module.set_step(5)
    module.set_hyperparameters(eps=1e-3)
    module.reset_parameters()
    module.to("cpu")
    assert addresses() == before


class Captured:
    """Forward and backward of a module as one CUDA graph, for batches of one size."""

    def __init__(self, module: TableBatchedEmbeddingBags, *batch: Tensor) -> None:
        self.batch = [t.clone() for t in batch]
        state = {key: tensor.clone() for key, tensor in module.state_dict().items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            out = module(*self.batch)
            self.grad = torch.zeros_like(out)
            out.backward(self.grad)
        # Nodes of autograd that it keeps alive would run on `side`, which the graph does not know.
        del out
        torch.cuda.current_stream().wait_stream(side)
        module.load_state_dict(state)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = module(*self.batch)
            self.out.backward(self.grad)

    def step(self, grad: Tensor, *batch: Tensor) -> Tensor:
        """One training step on another batch."""
        for mine, given in zip((self.grad, *self.batch), (grad, *batch), strict=True):
            mine.copy_(given)
        self.graph.replay()
        return self.out.detach().clone()


def check_replays(modules: list[TableBatchedEmbeddingBags], case: Case) -> None:
    """A captured module must train as its twin does, also at other rates and on other batches."""
    eager, other = modules
    captured = Captured(other, *case.batch_of("cuda")[:2])
    for seed in range(5):
        indices, offsets, _ = replace(case, seed=seed).batch_of("cuda")
        out = eager(indices, offsets)
        grad = torch.randn(out.shape, device="cuda")
        out.backward(grad)
        assert torch.equal(captured.step(grad, indices, offsets), out)
        for key, tensor in eager.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[key]), key
        for module in modules:
            module.set_learning_rate(0.1 / (seed + 1))


NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@NEEDS_A_GPU
@pytest.mark.cuda
@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name not in PERIODIC])
def test_a_captured_step_trains_as_eager_code_does(optimizer: str) -> None:
    check_replays([PLAIN.module(OPTIMIZERS[optimizer], "cuda") for _ in range(2)], PLAIN)


@NEEDS_A_GPU
@pytest.mark.cuda
def test_an_optimizer_that_counts_forwards_is_not_captured() -> None:
    module = PLAIN.module(OPTIMIZERS[PERIODIC[0]], "cuda")
    with pytest.raises(RuntimeError, match="counts forwards in Python"):
        Captured(module, *PLAIN.batch_of("cuda")[:2])


@NEEDS_A_GPU
@pytest.mark.cuda
@pytest.mark.parametrize("mode", [BoundsCheck.WARNING, BoundsCheck.FATAL, BoundsCheck.NONE])
def test_a_captured_step_checks_bounds(mode: BoundsCheck) -> None:
    modules = [PLAIN.module(optim.SGD(0.1), "cuda") for _ in range(2)]
    for module in modules:
        module.bounds_check = mode
    check_replays(modules, PLAIN)


@NEEDS_A_GPU
@pytest.mark.cuda
@pytest.mark.parametrize("placement", [Placement.MANAGED, Placement.MANAGED_CACHING])
def test_a_captured_step_reads_other_tiers(placement: Placement) -> None:
    torch.manual_seed(0)
    specs = [TableSpec(50, 16), TableSpec(7, 16, placement=placement)]
    first, second = (
        TableBatchedEmbeddingBags(
            specs, optim.Adam(0.1), bounds_check=BoundsCheck.IGNORE, device="cuda"
        )
        for _ in range(2)
    )
    second.load_state_dict(first.state_dict())
    check_replays([first, second], PLAIN)
