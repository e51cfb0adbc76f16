"""Gradients clipped before every step."""

from __future__ import annotations

from typing import Any

import torch

from emblib.collections.optimizers.keyed import KeyedOptimizer, OptimizerWrapper
from emblib.specs import Choice


class GradientClipping(Choice):
    """What is bounded: the NORM of all gradients together, each VALUE, or nothing (NONE)."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """Clips the gradients of its parameters before every step.

    Tables with a fused optimizer have no gradients here: `max_gradient` of theirs clips.

    Args:
        optimizer: whose parameters they are.
        clipping: what is bounded.
        max_gradient: the bound.
        norm_type: of the norm; `inf` for the largest value.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float = 2.0,
    ) -> None:
        super().__init__(optimizer)
        self.clipping, self.max_gradient = GradientClipping(clipping), max_gradient
        self.norm_type = float(norm_type)

    def step(self, closure: Any = None) -> Any:
        """Clip, then a step of the optimizer."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.clipping is GradientClipping.NORM:
            torch.nn.utils.clip_grad_norm_(parameters, self.max_gradient, self.norm_type)
        elif self.clipping is GradientClipping.VALUE:
            torch.nn.utils.clip_grad_value_(parameters, self.max_gradient)
        return super().step(closure)
