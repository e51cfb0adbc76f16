"""Waits of the host on the pretend GPU: counted, and named by the line of Python."""

import pytest
import torch

from tests.conftest import host_waits
from tests.pretend import torch_cuda

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch_cuda.gpu is None, reason="needs the pretend GPU"),
]


def test_a_wait_names_its_line() -> None:
    x = torch.ones(4, device="cuda")
    with host_waits() as waits:
        x.sum().item()
        x.add(1)
    (wait,) = waits
    line = test_a_wait_names_its_line.__code__.co_firstlineno + 3
    assert wait.endswith(f"item, at tests/pretend/test_host_waits.py:{line}")


def test_waits_of_autograd_threads_are_counted() -> None:
    class Peek(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * float(grad.sum())

    x = torch.ones(4, device="cuda", requires_grad=True)
    torch_cuda.gpu.reset_counts()
    Peek.apply(x).backward(torch.ones_like(x))
    assert torch_cuda.gpu.counts()["wait item"] == 1


def test_work_runs_when_it_is_waited_for() -> None:
    gpu = torch_cuda.gpu
    gpu.set_schedule(torch_cuda.Schedule.LAZY)
    try:
        torch.cuda.synchronize()
        x = torch.ones(4, device="cuda")
        assert gpu.num_pending() > 0
        assert x.cpu().tolist() == [1, 1, 1, 1]
        assert gpu.num_pending() == 0
    finally:
        gpu.set_schedule(gpu.settings.schedule, gpu.settings.seed)
