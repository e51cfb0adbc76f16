"""Losses that a `GradScaler` has scaled, over ranks: all of them skip a step, or none does."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib import optim
from emblib.collections.optimizers import FusedOptimizer
from emblib.sharding import input_dist
from emblib.sharding.ranks import RankGroup
from emblib.specs import Pooling
from emblib.storage import TensorTrain
from tests.sharding import worlds
from tests.sharding.sharded_cases import (
    Case,
    batch,
    compare_tables,
    flat,
    make_sharded,
    make_source,
    sequences,
    step_of_all,
    tables,
)

ADAM = optim.Adam(0.1, eps=1e-3)
POOLED = Case(tables(Pooling.SUM), ("rw",) * 4, optimizer=ADAM)
CASES = {
    **{
        "-".join(plan): replace(POOLED, plan=plan)
        for plan in (("rw",) * 4, ("tw",) * 4, ("dp",) * 4, ("cw", "rw", "dp", "tw"))
    },
    "all bags sent": replace(POOLED, least_saved=1 << 40),
    "sequences": replace(POOLED, configs=sequences(tables(Pooling.SUM)), plan=("rw", "dp") * 2),
    "trains": replace(
        POOLED,
        configs=tables(Pooling.SUM, storage=TensorTrain((2, 2)), dims=(8, 8, 8, 8)),
        optimizer=optim.SGD(0.1),
        tolerance=1e-4,
    ),
}


def upstream(output: Tensor, number: int) -> Tensor:
    """The gradient of an output, for a number of a batch."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(output.shape, generator=generator).to(output.device)


def scaled_backward(scaler: Any, module: Any, features: Any, number: int, value: float) -> None:
    """Backward of a scaled loss whose gradient has `value` in one element."""
    output = flat(module(features))
    grad = upstream(output, number)
    if grad.numel():
        grad.view(-1)[-1] *= value
    scaler.scale((output * grad).sum()).backward()


def _one_overflows(ranks: RankGroup, case: Case) -> None:
    """One element of one rank's gradient is infinite in the second step, which no rank makes."""
    input_dist._MIN_SAVED_ELEMENTS = case.least_saved
    oracle = make_source(case).to(ranks.device)
    module = make_sharded(case, ranks, copy.deepcopy(oracle))
    fused = FusedOptimizer.of(module)
    scaler = torch.amp.GradScaler(ranks.device.type, init_scale=64.0)
    for step in range(3):
        batches = [
            batch(case, 10 * step + r, case.batches[r]).to(ranks.device) for r in range(ranks.size)
        ]
        overflows = step == 1
        if not overflows:
            grads = [upstream(flat(oracle(one)), 10 * step + r) for r, one in enumerate(batches)]
            step_of_all(case, oracle, batches, grads)
        value = torch.inf if overflows and ranks.rank == 1 else 1.0
        scaled_backward(scaler, module, batches[ranks.rank], 10 * step + ranks.rank, value)
        scaler.step(fused)
        scaler.update()
        fused.zero_grad()
        compare_tables(module, oracle, case.tolerance)
        steps = {
            table_module.step for entry in module.fused_tables() for table_module in entry.modules
        }
        assert steps <= {[1, 1, 2][step]}
        assert scaler.get_scale() == [64.0, 32.0, 32.0][step]


@pytest.mark.parametrize("case", CASES)
def test_no_rank_makes_a_step_that_overflows_on_one(case: str) -> None:
    worlds.run(2, _one_overflows, CASES[case])


def _scaled_differently(ranks: RankGroup, scales: tuple[float | None, ...]) -> str:
    case = POOLED
    source = make_source(case).to(ranks.device)
    module = make_sharded(case, ranks, copy.deepcopy(source))
    scale = scales[ranks.rank]
    scaler = torch.amp.GradScaler(ranks.device.type, init_scale=scale or 1.0)
    output = flat(module(batch(case, ranks.rank, 4).to(ranks.device)))
    loss = output.sum() if scale is None else scaler.scale(output.sum())
    message = "skipped"
    if ranks.device.type == "cpu":
        with pytest.raises(RuntimeError) as error:
            loss.backward()
        message = str(error.value)
    else:  # to compare scales, the host would have to wait for the device
        loss.backward()
        compare_tables(module, source, 0.0)
    if scale is not None:
        scaler.update(scale)  # until then, backwards of this process that it did not scale raise
    return message


def test_scales_that_differ_raise_on_all_ranks() -> None:
    messages = worlds.run(2, _scaled_differently, (64.0, 32.0))
    words = "skipped" if worlds.ON_GPUS else "different scales, 32.0 to 64.0"
    assert all(words in message for message in messages)


@pytest.mark.skipif(worlds.ON_GPUS, reason="ranks with GPUs do not compare headers")
def test_a_loss_scaled_on_some_ranks_raises_on_all() -> None:
    messages = worlds.run(2, _scaled_differently, (None, 64.0))
    assert all("scaled the loss of rank 1 and not that of rank 0" in m for m in messages)
