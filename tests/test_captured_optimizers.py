"""Captured steps with optimizers of torch: scaled, scheduled, replaced and reduced over ranks."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from emblib import (
    CapturedStep,
    optim,
)
from emblib.collections.optimizers import FusedOptimizer
from tests.captured_cases import (
    NEEDS_A_GPU,
    SIZES,
    Problem,
    Training,
    check_loop,
    check_same,
    twins,
)


@NEEDS_A_GPU
@pytest.mark.cuda
def test_numbers_of_a_captured_optimizer() -> None:
    problem, device = Problem(optim.Adam(0.05)), torch.device("cuda")
    one, other = twins(problem, device)
    step = CapturedStep(other.step, [8], device=device)

    def train() -> None:
        one.step(problem.batch(5, device))
        step(problem.batch(5))

    for _ in range(5):
        train()
    for training in (one, other):
        training.model["tables"].set_learning_rate(0.02)  # the kernels read it
        training.optimizer.param_groups[0]["lr"] = 0.01
    before = other.values()
    with pytest.raises(RuntimeError, match=r"'lr' of group 0 of Adam was 0\.05.*reset\(\)"):
        step(problem.batch(5))
    for key, value in other.values().items():
        assert torch.equal(value, before[key])
    step.reset()
    assert step.captured_bounds == []
    for _ in range(5):
        train()
    assert step.captured_bounds == [8]
    check_same(one, other)


@NEEDS_A_GPU
@pytest.mark.cuda
def test_a_grad_scaler() -> None:
    """Of a fused optimizer: a step whose gradient overflows is skipped, without a wait."""
    problem, device, scalers = Problem(optim.Adam(0.05)), torch.device("cuda"), []
    trainings = []
    for _ in range(2):
        training = Training(problem.model(device))
        training.optimizer = torch.optim.Adam(
            training.model["top"].parameters(), 0.05, fused=True, capturable=True
        )
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=3)

        def step(
            batch: dict[str, Any], training: Training = training, scaler: Any = scaler
        ) -> Tensor:
            training.optimizer.zero_grad()
            bags = batch["bags"]
            rows = training.model["tables"](bags.values(), bags.offsets())
            loss = nn.functional.mse_loss(training.model["top"](rows), batch["labels"])
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
            return loss

        trainings.append(training)
        scalers.append(scaler)
        training.step = step  # type: ignore[method-assign]
    batches = [(problem.batch(size, device), problem.batch(size)) for size in SIZES]
    for k in (5, 9, 11):
        for batch in batches[k]:
            batch["labels"][0] = float("inf")
    check_loop(*trainings, batches)
    assert scalers[0].get_scale() == scalers[1].get_scale() != 1024.0


@NEEDS_A_GPU
@pytest.mark.cuda
def test_a_grad_scaler_of_another_optimizer_is_refused() -> None:
    training = Training(Problem().model(torch.device("cuda")))
    scaler = torch.amp.GradScaler("cuda")

    def train(batch: dict[str, Any]) -> None:
        training.optimizer.zero_grad()
        bags = batch["bags"]
        rows = training.model["tables"](bags.values(), bags.offsets())
        scaler.scale(training.model["top"](rows).sum()).backward()
        scaler.step(training.optimizer)
        scaler.update()

    step = CapturedStep(train, [8], device="cuda", warmup=1)
    step(Problem().batch(3))
    with pytest.raises(
        RuntimeError, match=r"(item|capturing); at .*scaler\.step.*GradScaler fused=True"
    ):
        step(Problem().batch(3))
    step.run_eagerly(Problem().batch(3))  # ends the step of the scaler, too
    # CUDA ended the capture, and torch would go on counting random numbers for it.
    assert torch.rand(3, device="cuda").numel() == 3


def test_a_distributed_dense_part(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose dense part is reduced over ranks: its collectives are part of the graph."""
    is_cuda = device.type == "cuda"
    if is_cuda and not torch.distributed.is_nccl_available():
        pytest.skip("needs NCCL")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    torch.distributed.init_process_group(
        "nccl" if is_cuda else "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        problem = Problem(optim.Adam(0.05))
        trainings = twins(problem, device)
        with torch.cuda.stream(torch.cuda.Stream()) if is_cuda else nullcontext():
            for training in trainings:
                top = DistributedDataParallel(training.model["top"])
                training.model = nn.ModuleDict({"tables": training.model["tables"], "top": top})
        one, other = trainings
        step = CapturedStep(other.step, [24], device=device, warmup=11)
        for size in (5, 24, 0, 8, 21, 3, 9, 8, 9, 7, 1, 22, 6, 4):
            want, loss = one.step(problem.batch(size, device)), step(problem.batch(size))
            assert torch.equal(want, loss)
        check_same(one, other)
        assert step.captured_bounds == ([24] if is_cuda else [])
    finally:
        torch.distributed.destroy_process_group()


@NEEDS_A_GPU
@pytest.mark.cuda
def test_rates_of_a_fused_optimizer() -> None:
    """A schedule writes the groups of tables, which the kernels read."""
    device, trainings, schedules = torch.device("cuda"), [], []
    for _ in range(2):
        training = Training(Problem(optim.Adam(0.05)).model(device))
        tables = FusedOptimizer.of(training.model)
        schedules.append(torch.optim.lr_scheduler.StepLR(tables, 2, 0.5))

        def step(batch: Any, plain: Any = training.step, tables: FusedOptimizer = tables) -> Tensor:
            tables.zero_grad()
            loss: Tensor = plain(batch)
            tables.step()
            return loss

        training.step = step  # type: ignore[method-assign]
        trainings.append(training)
    captured = CapturedStep(trainings[1].step, [8], device=device)
    for _ in range(8):
        want = trainings[0].step(Problem().batch(5, device))
        assert torch.equal(want, captured(Problem().batch(5)))
        for schedule in schedules:
            schedule.step()
    check_same(*trainings)
    assert captured.captured_bounds == [8]


@NEEDS_A_GPU
@pytest.mark.cuda
@pytest.mark.parametrize("what", ["states", "parameters"])
def test_replaced_tensors_are_noticed(what: str) -> None:
    device = torch.device("cuda")
    training = Training(Problem().model(device))
    step = CapturedStep(training.step, [8], device=device)
    for _ in range(5):
        step(Problem().batch(5))
    if what == "states":
        training.optimizer.load_state_dict(training.optimizer.state_dict())
    else:
        weight = training.model["top"].weight
        weight.data = weight.data.clone()
    before = training.values()
    with pytest.raises(RuntimeError, match=rf"{what} of Adam .*reset\(\)"):
        step(Problem().batch(5))
    for key, value in training.values().items():
        assert torch.equal(value, before[key])
    step.reset()
    for _ in range(5):
        step(Problem().batch(5))
    assert step.captured_bounds == [8]


@NEEDS_A_GPU
@pytest.mark.cuda
def test_a_schedule_of_a_tensor() -> None:
    device = torch.device("cuda")
    trainings = [
        Training(Problem().model(device), lr=torch.tensor(0.05, device=device)) for _ in range(2)
    ]
    schedules = [torch.optim.lr_scheduler.StepLR(t.optimizer, 2, 0.5) for t in trainings]
    step = CapturedStep(trainings[1].step, [8], device=device)
    for _ in range(8):
        trainings[0].step(Problem().batch(5, device))
        step(Problem().batch(5))
        for schedule in schedules:
            schedule.step()
    check_same(*trainings)
