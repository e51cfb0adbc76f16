"""Warm-up: learning rates that follow a schedule of stages, saved with the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emblib.collections.optimizers.keyed import KeyedOptimizer, OptimizerWrapper
from emblib.optim.base import check_learning_rate, number_or_nan
from emblib.specs import OptionEnum

_NO_END = 1 << 62  # a step that no training reaches


class WarmupPolicy(OptionEnum):
    """Formula of the multiplier of the rate at step i of a stage.

    v is the `value` of the stage, d its `decay_iters`. i is counted over all stages, from 0.

    =============================  =========================================================
    NONE                           1
    LINEAR                         v + (1 - v) * i / max_iters
    CONSTANT                       v
    POLY                           max(1 - i / d, 0) ** v
    STEP                           v ** floor(i / d)
    INVSQRT                        1 / sqrt(max(i, 1))
    COSINE_ANNEALING_WARM_RESTARTS v + (1 - v) * (1 + cos(pi * (i mod sgdr_period) /
                                   sgdr_period)) / 2
    INTERPOLATE                    v up to start = `start_interpolating_iters`, then
                                   v + (end_value - v) * (i - start) / (max_iters - start)
    =============================  =========================================================
    """

    NONE = "none"
    LINEAR = "linear"
    CONSTANT = "constant"
    POLY = "poly"
    STEP = "step"
    INVSQRT = "inv_sqrt"
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"
    INTERPOLATE = "interpolate"


@dataclass(frozen=True)
class WarmupStage:
    """A stage of a schedule of learning rates; `WarmupPolicy` has the formulas.

    Attributes:
        policy: formula of the multiplier.
        max_iters: last step of the stage, counted over all stages; `WarmupOptimizer` needs > 0.
        value: v of the formulas.
        lr_scale: further factor of the rates of the stage.
        decay_iters: d of the formulas; a number <= 0 means `max_iters`, or 1 for STEP.
        sgdr_period: steps per period of COSINE_ANNEALING_WARM_RESTARTS.
        start_interpolating_iters, end_value: first step and last value of INTERPOLATE.

    Raises:
        TypeError: one of the other numbers of steps is not a number.
        ValueError: `policy` is unknown; `max_iters` or a factor is not a number, or not finite;
            `value` of POLY is negative; `sgdr_period` is below 1; or INTERPOLATE lacks one of its
            two fields, or starts at `max_iters` or later.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", WarmupPolicy(self.policy))
        for name in ("max_iters", "value", "lr_scale", "end_value"):
            factor = getattr(self, name)
            if factor is not None and not math.isfinite(number_or_nan(factor)):
                raise ValueError(f"{name} must be a finite number, got {factor!r}")
        if self.decay_iters <= 0:
            steps = 1 if self.policy is WarmupPolicy.STEP else self.max_iters
            object.__setattr__(self, "decay_iters", steps)
        if self.policy is WarmupPolicy.POLY and self.value < 0:
            raise ValueError(f"POLY needs value >= 0, got {self.value}")
        if self.sgdr_period < 1:
            raise ValueError(f"sgdr_period must be >= 1, got {self.sgdr_period}")
        if self.policy is WarmupPolicy.INTERPOLATE:
            start, end = self.start_interpolating_iters, self.end_value
            if start is None or end is None or start >= self.max_iters:
                raise ValueError(
                    "INTERPOLATE needs end_value and start_interpolating_iters < max_iters = "
                    f"{self.max_iters}, got {end} and {start}"
                )

    def multiplier(self, step: int) -> float:
        """Return the multiplier of the rate at step `step`, counted over all stages."""
        return self.lr_scale * self._policy_multiplier(step)

    def _policy_multiplier(self, step: int) -> float:
        """Return the multiplier of the policy at a step, without `lr_scale`."""
        policy, value = self.policy, self.value
        if policy is WarmupPolicy.LINEAR:
            return value + (1.0 - value) * step / self.max_iters
        if policy is WarmupPolicy.CONSTANT:
            return value
        if policy is WarmupPolicy.POLY:
            return float(max(1.0 - step / self.decay_iters, 0.0) ** value)
        if policy is WarmupPolicy.STEP:
            return float(value ** (step // self.decay_iters))
        if policy is WarmupPolicy.INVSQRT:
            return 1.0 / math.sqrt(max(step, 1))
        if policy is WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS:
            angle = math.pi * (step % self.sgdr_period) / self.sgdr_period
            return value + (1.0 - value) * 0.5 * (1 + math.cos(angle))
        if policy is WarmupPolicy.INTERPOLATE:
            start, end = self.start_interpolating_iters, self.end_value
            assert start is not None
            assert end is not None
            return value + (end - value) * max(step - start, 0) / (self.max_iters - start)
        return 1.0


class WarmupOptimizer(OptimizerWrapper):
    """Multiply the learning rates of all groups by the multiplier of the current stage.

    After the last stage the multiplier is 1. The rates are written at construction, after each step
    and after loading, which overwrites those of a scheduler on the same groups: let a stage define
    the decay. The state dict has the current step and stage.

    Args:
        optimizer: the wrapped optimizer.
        stages: stages of the schedule, in order of ascending `max_iters`.
        lr: rate that is multiplied, for all groups; None is the rate that each group has now.
        lr_param: key of the rate in the groups.
        param_name: key of the current step and stage in `state`, where names of parameters are.

    Raises:
        TypeError: `optimizer` is not a `KeyedOptimizer`.
        ValueError: `max_iters` of the stages are not > 0 and ascending, `lr` is not a finite number
            >= 0, or `param_name` is that of a parameter, or of another `WarmupOptimizer` within
            `optimizer`.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: Sequence[WarmupStage],
        lr: float | None = None,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer)
        if lr is not None:
            check_learning_rate(lr)
        stages = list(stages)  # an iterator is read once
        last_steps = [stage.max_iters for stage in stages]
        if last_steps != sorted(set(last_steps)) or any(step <= 0 for step in last_steps):
            raise ValueError(f"max_iters of the stages must be > 0 and ascend, got {last_steps}")
        if param_name in self.extra_state_names:
            raise ValueError(
                "the optimizer is in a WarmupOptimizer already: give that all stages, or this one "
                f"another param_name than {param_name!r}"
            )
        if param_name in self.params:
            raise ValueError(f"param_name must not be the name of a parameter, got {param_name!r}")
        self.extra_state_names = (*self.extra_state_names, param_name)
        self._param_name = param_name
        self.stages = (*stages, WarmupStage(WarmupPolicy.NONE, _NO_END))
        self._lr_param = lr_param
        self._rates = [group.get(lr_param) if lr is None else lr for group in self.param_groups]
        self._step = self._stage = 0
        self._set_rate()

    def _set_rate(self) -> None:
        """Write the learning rate of the current step into the groups."""
        factor = self.stages[self._stage].multiplier(self._step)
        for group, rate in zip(self.param_groups, self._rates, strict=True):
            if rate is not None:  # a group without parameters may have no rate
                group[self._lr_param] = rate * factor

    def step(self, closure: Any = None) -> Any:
        """Make a step, then set the rate of the next step."""
        result = super().step(closure)
        self._step += 1
        if self._step > self.stages[self._stage].max_iters:
            self._stage += 1
        self._set_rate()
        return result

    def _make_state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, and the current step and stage."""
        state_dict = super()._make_state_dict()
        progress = torch.tensor([self._step, self._stage], device="cpu")
        return {
            **state_dict,
            "state": {**state_dict["state"], self._param_name: {"warmup": progress}},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of the wrapped optimizer, and continue from the saved step.

        A state dict without a saved step keeps the current one.

        Raises:
            ValueError: the saved stage is none of `stages`; nothing is loaded.
            Exception: `load_state_dict` of the wrapped optimizer raises it.
        """
        super().load_state_dict(state_dict)

    def _load_checked(self, state_dict: Mapping[str, Any]) -> None:
        states = dict(state_dict["state"])
        progress = self._checked_progress(states.pop(self._param_name, None))
        super()._load_checked({**state_dict, "state": states})
        self._step, self._stage = progress
        self._set_rate()

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raise what `load_state_dict` would raise, writing nothing; return the dict by name."""
        self._checked_progress(state_dict["state"].get(self._param_name))
        return super().check_state_dict(state_dict)

    def _checked_progress(self, saved_state: Mapping[str, Tensor] | None) -> tuple[int, int]:
        """Return the saved step and stage, or the current ones if none are saved."""
        if saved_state is None:
            return self._step, self._stage
        step, stage = map(int, saved_state["warmup"].tolist())
        if step < 0 or not 0 <= stage < len(self.stages):
            raise ValueError(
                f"the saved warm-up is at step {step} in stage {stage}, and this one has stages 0 "
                f"to {len(self.stages) - 1}: give it the stages of the saved one"
            )
        return step, stage
