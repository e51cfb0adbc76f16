"""Tables in host memory on a GPU: every way to read them sees the last step.

The kernels of a step run long after the host has enqueued it: on a real GPU behind a kernel that
waits, on the pretend GPU when the host waits.
"""

import copy
import gc
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib import (
    CacheConfig,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    Placement,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
    storage,
)
from emblib.tables.mapped_memory import map_pinned
from tests.conftest import CUDA
from tests.saved import saved_and_loaded

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU or the pretend GPU"),
]
ROWS, DIM, BATCH = 300, 8, 40
PLACEMENTS = (Placement.MANAGED, Placement.MANAGED_CACHING)
_SLEEP_CYCLES = 100_000_000  # some 50 ms


@pytest.fixture(autouse=True)
def late_kernels() -> Iterator[None]:
    """Let the pretend GPU run what the host waits for, not earlier."""
    pretend = sys.modules.get("tests.pretend.torch_cuda")
    if pretend is None or pretend.gpu is None:
        yield
        return
    gpu = pretend.gpu
    gpu.set_schedule(pretend.Schedule.LAZY)
    yield
    gpu.set_schedule(gpu.settings.schedule, gpu.settings.seed)


def delay_kernels() -> None:
    """Let a real GPU work on something else first."""
    if hasattr(torch._C, "_cuda_sleep"):
        torch.cuda._sleep(_SLEEP_CYCLES)


def make(placement: Placement, device: str = CUDA) -> TableBatchedEmbeddingBags:
    """Two tables with the same rows on any device."""
    module = TableBatchedEmbeddingBags(
        [TableSpec(ROWS, DIM, "first", placement), TableSpec(50, DIM, "second", placement)],
        optim.Adagrad(0.5),
        cache=CacheConfig(sets=1),
        device=device,
    )
    generator = torch.Generator().manual_seed(7)
    for weight in module.table_weights():
        weight.copy_(torch.rand(weight.shape, generator=generator))
    return module


def train(module: TableBatchedEmbeddingBags, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50, (2 * BATCH * 3,), generator=generator)
    offsets = torch.arange(0, 2 * BATCH * 3 + 1, 3)
    device = module.hyperparams.device
    batch = ids.to(device), offsets.to(device)
    if device.type == "cuda":
        delay_kernels()
    module(*batch).square().sum().backward()


def rows_on_cpu(placement: Placement, steps: int = 1) -> Tensor:
    """The rows of the first table after steps of the same module on the CPU."""
    module = make(placement, "cpu")
    for seed in range(steps):
        train(module, seed)
    return module.table_weights()[0]


def through_file(tensor: Tensor) -> Tensor:
    return saved_and_loaded(tensor, map_location="cpu")


def printed(tensor: Tensor) -> Tensor:
    values = repr(tensor[0].detach()).partition("[")[2].partition("]")[0]
    return torch.tensor([float(value) for value in values.split(",")])


READS: dict[str, Callable[[Tensor], Tensor]] = {
    "cpu": lambda t: t.detach().cpu(),
    "to": lambda t: t.to("cpu", torch.float64).float(),
    "tolist": lambda t: torch.tensor(t.tolist()),
    "copy": lambda t: torch.empty(t.shape).copy_(t.detach()),
    "numpy": lambda t: torch.from_numpy(t.detach().cpu().numpy()),
    "save": through_file,
    "pickle": lambda t: pickle.loads(pickle.dumps(t.detach())).cpu(),
    "clone": lambda t: t.detach().clone().cpu(),
    "deepcopy": lambda t: copy.deepcopy(t.detach()).cpu(),
    "slice": lambda t: torch.cat([t[:9].detach().cpu(), t[9:].detach().cpu()]),
    "gather": lambda t: t[torch.arange(ROWS, device=t.device)].detach().cpu(),
}


@pytest.mark.parametrize("read", READS)
def test_a_view_has_the_values_of_the_last_step(read: str) -> None:
    module = make(Placement.MANAGED)
    (weight, _) = module.table_weights()
    for seed in range(2):
        train(module, seed)
    torch.testing.assert_close(READS[read](weight), rows_on_cpu(Placement.MANAGED, 2))


def test_values_are_printed_after_the_last_step() -> None:
    module = make(Placement.MANAGED)
    (weight, _) = module.table_weights()
    train(module, 0)
    want = rows_on_cpu(Placement.MANAGED)[0]
    torch.testing.assert_close(printed(weight), want, rtol=0, atol=1e-4)


def module_state(module: TableBatchedEmbeddingBags) -> Tensor:
    return module.state_dict()["first.weight"].cpu()


def module_copy(module: TableBatchedEmbeddingBags) -> Tensor:
    return copy.deepcopy(module).table_weights()[0].cpu()


def module_pickle(module: TableBatchedEmbeddingBags) -> Tensor:
    return pickle.loads(pickle.dumps(module)).table_weights()[0].cpu()


def module_on_cpu(module: TableBatchedEmbeddingBags) -> Tensor:
    return module.to("cpu").table_weights()[0].clone()


def module_there_and_back(module: TableBatchedEmbeddingBags) -> Tensor:
    return module.to("cpu").to(CUDA).table_weights()[0].cpu()


def module_loaded(module: TableBatchedEmbeddingBags) -> Tensor:
    other = make(module.tables[0].placement, "cpu")
    other.load_state_dict(module.state_dict())
    return other.table_weights()[0]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize(
    "read",
    [
        module_state,
        module_copy,
        module_pickle,
        module_on_cpu,
        module_there_and_back,
        module_loaded,
    ],
)
def test_a_module_has_the_values_of_the_last_step(read: Any, placement: Placement) -> None:
    module = make(placement)
    train(module, 0)
    torch.testing.assert_close(read(module), rows_on_cpu(placement))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_optimizer_states_are_those_of_the_last_step(placement: Placement) -> None:
    module, on_cpu = make(placement), make(placement, "cpu")
    for each in (module, on_cpu):
        train(each, 0)
    for got, want in zip(
        module.table_optimizer_states(), on_cpu.table_optimizer_states(), strict=True
    ):
        torch.testing.assert_close({name: state.cpu() for name, state in got.items()}, want)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_parameter_of_a_collection_has_the_last_step(placement: Placement) -> None:
    cache = CacheConfig(sets=1) if placement.cached else None
    config = EmbeddingBagConfig(50, DIM, "t", ["f"], storage=storage.Dense(placement, cache))
    ids = torch.arange(60) % 50
    weights = []
    for device in (CUDA, "cpu"):
        collection = EmbeddingBagCollection([config], optimizer=optim.SGD(0.5), device=device)
        weight = collection.embedding_bags["t"].weight
        with torch.no_grad():
            weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
        batch = KeyedJaggedTensor(["f"], ids, lengths=torch.full((20,), 3)).to(device)
        for _ in range(2):
            if device != "cpu":
                delay_kernels()
            collection(batch).values().square().sum().backward()
        weights.append(weight.detach().cpu().clone())  # before anything else waits
    torch.testing.assert_close(*weights)


def test_writes_of_the_user_and_steps_take_turns() -> None:
    module, on_cpu = make(Placement.MANAGED), make(Placement.MANAGED, "cpu")
    for each in (module, on_cpu):
        weight = each.table_weights()[0]
        train(each, 0)
        weight.mul_(2)
        train(each, 1)
        weight.add_(torch.ones(DIM, device=weight.device))
        train(each, 2)
    torch.testing.assert_close(module.table_weights()[0].cpu(), on_cpu.table_weights()[0])


def test_the_rows_are_loaded_between_two_steps() -> None:
    module, source = make(Placement.MANAGED), make(Placement.MANAGED, "cpu")
    train(source, 5)
    train(module, 0)
    module.load_state_dict(source.state_dict())
    for each in (module, source):
        train(each, 1)
    torch.testing.assert_close(module.table_weights()[0].cpu(), source.table_weights()[0])


def test_views_are_on_the_gpu_and_refuse_what_would_read_early() -> None:
    module = make(Placement.MANAGED)
    weight = module.table_weights()[0]
    assert weight.device == module.hyperparams.device
    with pytest.raises(TypeError, match="cuda"):
        weight.numpy()
    assert module.to("cpu").table_weights()[0].device.type == "cpu"


def test_no_step_waits(no_host_waits: Callable[[], Any]) -> None:
    module = make(Placement.MANAGED)
    ids = torch.arange(6, device=CUDA) % 5
    offsets = torch.arange(0, 7, 3, device=CUDA)
    with no_host_waits():
        module(ids, offsets).sum().backward()


def test_a_view_outlives_its_module() -> None:
    module = make(Placement.MANAGED)
    weight = module.table_weights()[0]
    delay_kernels()
    weight.fill_(3)
    del module
    assert (weight.cpu() == 3).all()
    delay_kernels()
    weight.add_(1)
    total = weight.sum()
    del weight  # which waits: the memory may have another owner now
    gc.collect()
    torch.full((2 * ROWS, DIM), 9.0).pin_memory()
    assert float(total) == 4 * ROWS * DIM


def test_what_is_copied_or_pickled_is_trained_in_host_memory_again() -> None:
    module = make(Placement.MANAGED)
    used = torch.cuda.memory_allocated()
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        train(other, 0)
        torch.testing.assert_close(other.table_weights()[0].cpu(), rows_on_cpu(Placement.MANAGED))
        torch.testing.assert_close(
            module.table_weights()[0].cpu(), rows_on_cpu(Placement.MANAGED, 0)
        )
    assert torch.cuda.memory_allocated() - used < 100_000


@pytest.mark.parametrize("where", [CUDA, "cpu"])
def test_a_module_is_loaded_from_a_file_to_any_device(where: str) -> None:
    module = make(Placement.MANAGED)
    train(module, 0)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    used = torch.cuda.memory_allocated()
    loaded = torch.load(file, map_location=where, weights_only=False)
    assert torch.cuda.memory_allocated() - used < ROWS * DIM * 4
    train(loaded, 1)
    torch.testing.assert_close(loaded.table_weights()[0].cpu(), rows_on_cpu(Placement.MANAGED, 2))


def test_a_compiled_step_updates_the_rows_in_place() -> None:
    module = make(Placement.MANAGED)
    weight = module.table_weights()[0]
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    ids = torch.arange(12, device=CUDA)
    offsets = torch.arange(0, 13, 3, device=CUDA)
    other = copy.deepcopy(module)
    for each in (compiled, other):
        each(ids, offsets).square().sum().backward()
    torch.testing.assert_close(weight.cpu(), other.table_weights()[0].cpu())


def test_only_pinned_memory_is_mapped() -> None:
    with pytest.raises(ValueError, match=r"only pinned host memory.*pin_memory"):
        map_pinned(torch.ones(3), torch.device(CUDA))
    empty = map_pinned(torch.empty(0, dtype=torch.bfloat16), torch.device(CUDA))
    assert empty.device.type == "cuda"
    pinned = torch.arange(6, dtype=torch.bfloat16).pin_memory()
    mapped = map_pinned(pinned, torch.device(CUDA))
    assert mapped.dtype == torch.bfloat16
    mapped.add_(1)
    torch.cuda.synchronize(mapped.device)
    assert pinned.tolist() == [1, 2, 3, 4, 5, 6]
