"""Learning rates in stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from emblib.collections.optimizers.keyed import KeyedOptimizer, OptimizerWrapper
from emblib.specs import Choice

_STATE = "__warmup"


class WarmupPolicy(Choice):
    """How the rate follows the step i of a stage, with its `value` v and `decay_iters` d.

    =============================  =========================================================
    NONE                           1
    LINEAR                         v + (1 - v) * i / max_iters
    CONSTANT                       v
    POLY                           (1 - i / d) ** v
    STEP                           v ** floor(i / d)
    INVSQRT                        1 / sqrt(i)
    COSINE_ANNEALING_WARM_RESTARTS v + (1 - v) * (1 + cos(pi * (i mod sgdr_period) /
                                   sgdr_period)) / 2
    INTERPOLATE                    v + (end_value - v) * (i - start) / (max_iters - start), with
                                   start = `start_interpolating_iters`
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
    """Steps up to `max_iters`, counted from the first stage on; rates are times `lr_scale` too."""

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
        if self.decay_iters <= 0:
            steps = 1 if self.policy is WarmupPolicy.STEP else self.max_iters
            object.__setattr__(self, "decay_iters", steps)
        if self.policy is WarmupPolicy.INTERPOLATE:
            start, end = self.start_interpolating_iters, self.end_value
            if start is None or end is None or start >= self.max_iters:
                raise ValueError(
                    "INTERPOLATE needs end_value and start_interpolating_iters < max_iters = "
                    f"{self.max_iters}, got {end} and {start}"
                )

    def multiplier(self, step: int) -> float:
        """What the rate is multiplied by at step `step`."""
        return self.lr_scale * self._of_policy(step)

    def _of_policy(self, step: int) -> float:
        policy, value = self.policy, self.value
        if policy is WarmupPolicy.LINEAR:
            return value + (1.0 - value) * step / self.max_iters
        if policy is WarmupPolicy.CONSTANT:
            return value
        if policy is WarmupPolicy.POLY:
            return float((1 - step / self.decay_iters) ** value)
        if policy is WarmupPolicy.STEP:
            return float(value ** (step // self.decay_iters))
        if policy is WarmupPolicy.INVSQRT:
            return 1.0 / math.sqrt(max(step, 1))
        if policy is WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS:
            turn = math.pi * (step % self.sgdr_period) / self.sgdr_period
            return value + (1.0 - value) * 0.5 * (1 + math.cos(turn))
        if policy is WarmupPolicy.INTERPOLATE:
            start, end = self.start_interpolating_iters, self.end_value
            assert start is not None
            assert end is not None
            return value + (end - value) * (step - start) / (self.max_iters - start)
        return 1.0


class WarmupOptimizer(OptimizerWrapper):
    """Sets the learning rate of all groups, stage after stage; after the last one it is `lr`.

    It sets the rate at every step, so a scheduler on the same groups has no effect beside it: let a
    stage say how the rate falls. Where it is goes into the state dict.

    Args:
        optimizer: whose rates are set.
        stages: in order, `max_iters` ascending.
        lr: what stages multiply, for all groups; left out, what each group has now.
        lr_param: the key of the rate in the groups.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        stages: Sequence[WarmupStage],
        lr: float | None = None,
        lr_param: str = "lr",
    ) -> None:
        super().__init__(optimizer)
        ends = [stage.max_iters for stage in stages]
        if ends != sorted(set(ends)) or any(end <= 0 for end in ends):
            raise ValueError(f"max_iters of the stages must be > 0 and ascend, got {ends}")
        self.stages = (*stages, WarmupStage(WarmupPolicy.NONE, 1 << 62))
        self._lr_param = lr_param
        self._rates = [group.get(lr_param) if lr is None else lr for group in self.param_groups]
        self._step = self._stage = 0
        self._set_rate()

    def _set_rate(self) -> None:
        factor = self.stages[self._stage].multiplier(self._step)
        for group, rate in zip(self.param_groups, self._rates, strict=True):
            if rate is not None:  # a group without parameters may have none
                group[self._lr_param] = rate * factor

    def step(self, closure: Any = None) -> Any:
        """A step of the optimizer, then the rate of the next one."""
        result = super().step(closure)
        self._step += 1
        if self._step > self.stages[self._stage].max_iters:
            self._stage += 1
        self._set_rate()
        return result

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer, and where the stages are."""
        saved = super().state_dict()
        at = torch.tensor([self._step, self._stage])
        return {**saved, "state": {**saved["state"], _STATE: {"warmup": at}}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from where it was saved."""
        states = dict(state_dict["state"])
        at = states.pop(_STATE, None)
        super().load_state_dict({**state_dict, "state": states})
        if at is not None:
            self._step, self._stage = at["warmup"].tolist()
        self._set_rate()
