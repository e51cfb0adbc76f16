"""Correctness before speed: a contender's first output and first update against plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.contenders import Contender
from experiments.work.workload import Batch

RTOL = 1e-3  # of the largest element; float32 sums of a few thousand terms in another order
ROUNDING = 5e-7  # of the largest weight: what an update loses when it is added to a float32 weight


class Wrong(Exception):
    """The contender computed something else; it is reported as wrong and not timed."""


def verify(contender: Contender, batch: Batch) -> None:
    """Run one forward and one step on a fresh contender; raise Wrong with the largest deviation."""
    before = contender.observe(batch)
    output, after = contender.expect(batch, before)
    prepared = contender.prepare(batch)
    _compare("forward", contender.forward(prepared), output, 0.0)
    contender.step(prepared)
    observed = contender.observe(batch)
    for number, (start, got, want) in enumerate(zip(before, observed, after, strict=True)):
        slack = ROUNDING * float(start.abs().max()) if start.numel() else 0.0
        _compare(f"update of parameters {number}", got - start, want - start, slack)


def _compare(what: str, got: Tensor, want: Tensor, slack: float) -> None:
    got, want = got.detach().cpu().float(), want.float()
    if got.shape != want.shape:
        raise Wrong(f"{what}: shape {tuple(got.shape)}, reference has {tuple(want.shape)}")
    scale = float(want.abs().max()) if want.numel() else 0.0
    worst = float((got - want).abs().max()) if want.numel() else 0.0
    if not worst <= RTOL * scale + slack:  # also catches NaN
        raise Wrong(f"{what}: differs from the reference by up to {worst:.3g} of {scale:.3g}")
    if not torch.isfinite(want).all():
        raise Wrong(f"{what}: the reference itself is not finite")
