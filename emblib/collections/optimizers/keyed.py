"""Optimizers whose state is kept by the name of the parameter, so that it fits any module order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer
from torch.utils.weak import WeakTensorKeyDictionary

from emblib.specs import Choice

State = dict[str, dict[str, Any]]


class KeyedOptimizer(TorchOptimizer):
    """Base of optimizers with a state dict by name: `state` by parameter, and `param_groups`.

    It is an optimizer of torch: learning-rate schedulers work on its `param_groups`. Loading keeps
    these dicts, and the tensors of the state where they have the right shape.

    Args:
        params: the parameters by name.
        groups: as of `torch.optim`.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], groups: Sequence[dict[str, Any]]
    ) -> None:
        super().__init__(list(groups) or [{"params": []}], {})
        self.params = dict(params)

    def group_names(self) -> list[list[str]]:
        """The names of the parameters of each group."""
        names = {id(parameter): name for name, parameter in self.params.items()}
        return [[names[id(p)] for p in group["params"]] for group in self.param_groups]

    def keyed_state(self) -> State:
        """The state by name, as it is kept."""
        names = {id(parameter): name for name, parameter in self.params.items()}
        return {names[id(p)]: dict(values) for p, values in self.state.items()}

    def load_keyed_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Take the state of some parameters."""
        for name, given in state.items():
            parameter = self.params[name]
            kept = self.state[parameter]
            for key, value in given.items():
                before = kept.get(key)
                same = isinstance(before, Tensor) and isinstance(value, Tensor)
                if same and before.shape == value.shape:
                    before.copy_(value)
                else:
                    kept[key] = _placed(key, value, parameter)

    def state_dict(self) -> dict[str, Any]:
        """`state` by name of the parameter, and `param_groups` with the names of theirs."""
        groups = [
            {"params": names, **{k: v for k, v in group.items() if k != "params"}}
            for names, group in zip(self.group_names(), self.param_groups, strict=True)
        ]
        return {"state": self.keyed_state(), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Become what `state_dict` was taken of.

        Raises:
            KeyError: it is of other parameters, or of other groups of them.
        """
        own = [sorted(names) for names in self.group_names()]
        given = [sorted(group["params"]) for group in state_dict["param_groups"]]
        if own != given:
            raise KeyError(
                f"the state dict is of other parameters or groups: it has {given}, this optimizer "
                f"has {own}"
            )
        unknown = sorted(state_dict["state"].keys() - {name for names in own for name in names})
        if unknown:
            raise KeyError(f"the state dict has states of parameters that are not here: {unknown}")
        self.load_keyed_state(state_dict["state"])
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.params)} parameters, {self.group_names()})"


def _placed(key: str, value: Any, parameter: Tensor) -> Any:
    """A state as torch's optimizers keep it: with its parameter, but for the step."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" or not value.is_floating_point():
        return value.clone()
    return value.to(device=parameter.device, copy=True)


class KeyedOptimizerWrapper(KeyedOptimizer):
    """An optimizer of `torch.optim` by the names of its parameters.

    Args:
        params: the parameters by name.
        factory: makes the optimizer of a list of parameters, e.g. `partial(torch.optim.Adam,
            lr=1e-3)`.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        factory: Callable[[list[nn.Parameter]], TorchOptimizer],
    ) -> None:
        self.wrapped = factory(list(params.values()))
        super().__init__(params, [{"params": list(params.values())}])
        self.param_groups = self.wrapped.param_groups
        self.state, self.defaults = self.wrapped.state, self.wrapped.defaults

    def step(self, closure: Any = None) -> Any:
        """One step of the optimizer."""
        return self.wrapped.step(closure)

    def zero_grad(self, set_to_none: Any = True) -> None:
        """Forget the gradients."""
        self.wrapped.zero_grad(set_to_none)


def keyed(optimizer: Any) -> KeyedOptimizer:
    """`optimizer`, if it is one.

    Raises:
        TypeError: it has no names for its parameters.
    """
    if not isinstance(optimizer, KeyedOptimizer):
        raise TypeError(
            f"an optimizer must be a KeyedOptimizer, got {type(optimizer).__name__}: for one of "
            "torch.optim KeyedOptimizerWrapper(dict(model.named_parameters()), factory)"
        )
    return optimizer


class OptimizerWrapper(KeyedOptimizer):
    """Base of what does something around the steps of a keyed optimizer."""

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self.wrapped = keyed(optimizer)
        super().__init__(optimizer.params, [])
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure: Any = None) -> Any:
        """One step of the optimizer."""
        return self.wrapped.step(closure)

    def zero_grad(self, set_to_none: Any = True) -> None:
        """As of the optimizer."""
        self.wrapped.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As of the optimizer."""
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As of the optimizer."""
        self.wrapped.load_state_dict(state_dict)


class GradientClipping(Choice):
    """What is bounded: the NORM of all gradients together, each VALUE, or nothing (NONE)."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """Clips the gradients of its parameters before every step.

    The norm is that of the whole model, the same on all ranks: parts of tables count on the rank
    that has them, everything else once. All ranks of such a model step together.

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
            clip_grad_norm_(parameters, self.max_gradient, self.norm_type)
        elif self.clipping is GradientClipping.VALUE:
            torch.nn.utils.clip_grad_value_(parameters, self.max_gradient)
        return super().step(closure)


class GradientShare(Choice):
    """What a rank has of the gradient of a parameter.

    A SHARD, which no other rank has; a REPLICA of what all ranks have; or one that another rank
    has as well and counts (COUNTED_ELSEWHERE).
    """

    SHARD = "shard"
    REPLICA = "replica"
    COUNTED_ELSEWHERE = "counted_elsewhere"


class Peers(Protocol):
    """The ranks that have the other shards; equal if they are the same ranks."""

    def gather_numbers(self, numbers: Tensor) -> Tensor:
        """Return the numbers of all ranks, `[W, n]`; all ranks call this."""
        ...


@dataclass(frozen=True)
class _Mark:
    share: GradientShare
    peers: Peers


# Not attributes of the parameters: those would be pickled with them.
_marks = WeakTensorKeyDictionary()


def mark_gradient(parameter: Tensor, share: GradientShare, peers: Peers) -> None:
    """Note what this rank has of the gradient of a parameter, for `clip_grad_norm_`."""
    _marks[parameter] = _Mark(share, peers)


def is_marked(parameter: Tensor) -> bool:
    """Return whether `mark_gradient` was called for this parameter."""
    return parameter in _marks


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    peers: Peers | None = None,
) -> Tensor:
    """Clip gradients by their norm over all ranks; `peers` are found by the parameters' marks."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    peers = _peers_of(parameters) if peers is None else peers
    if peers is None:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    if not norm_type > 0:
        raise ValueError(
            f"norm_type must be positive over ranks, inf for the largest value; got {norm_type}"
        )
    given = [p for p in parameters if p.grad is not None]
    total = _norm_over_ranks(given, float(norm_type), peers)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the gradients of all ranks have a norm of {float(total)}, which cannot be clipped; "
            "error_if_nonfinite=False scales them nevertheless"
        )
    # Each kind by itself: torch scales no list of both.
    for some in (list(filter(_is_spread, given)), [p for p in given if not _is_spread(p)]):
        torch.nn.utils.clip_grads_with_norm_(some, max_norm, total)
    return total


def _peers_of(parameters: Sequence[Tensor]) -> Peers | None:
    found: list[Peers] = []
    for parameter in parameters:
        mark = _marks.get(parameter)
        if mark is not None and mark.peers not in found:
            found.append(mark.peers)
    if len(found) > 1:
        raise ValueError(
            "the parameters are of tables over several groups of ranks, which have no one norm: "
            "clip those of each group by themselves"
        )
    return found[0] if found else None


def _is_spread(parameter: Tensor) -> bool:
    """Return whether it is a `DTensor`, which knows the other ranks itself (FSDP2)."""
    return hasattr(parameter, "full_tensor")


def _norm_over_ranks(given: Sequence[Tensor], norm_type: float, peers: Peers) -> Tensor:
    shards: list[Tensor] = []
    replicas: list[Tensor] = []
    spread: list[Tensor] = []
    for parameter in given:
        grad, mark = parameter.grad, _marks.get(parameter)
        assert grad is not None
        if _is_spread(parameter):
            spread.append(grad)
        elif mark is None or mark.share is GradientShare.REPLICA:
            replicas.append(grad)
        elif mark.share is GradientShare.SHARD:
            shards.append(grad)
    own = torch.stack([_norm(shards, norm_type), _norm(replicas, norm_type)])
    every = peers.gather_numbers(own)
    # The replicas as the first rank has them: a last bit that differs would not stay the last.
    norms = [every[:, 0], every[:1, 1]]
    if spread:
        whole: Any = torch.nn.utils.get_total_norm(spread, norm_type)
        norms.append(whole.full_tensor().to(every).view(1))
    return torch.linalg.vector_norm(torch.cat(norms), norm_type)


def _norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm in float32 on the host; 0 for none."""
    return torch.nn.utils.get_total_norm(list(grads), norm_type).float().cpu()


class CombinedOptimizer(KeyedOptimizer):
    """Optimizers one after the other; their parameters have different names.

    Args:
        optimizers: each alone, or with a prefix for the names of its parameters.

    Raises:
        ValueError: two have a parameter of the same name.
    """

    def __init__(self, optimizers: Sequence[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optimizers = [o if isinstance(o, tuple) else ("", o) for o in optimizers]
        params: dict[str, Any] = {}
        for prefix, optimizer in self._optimizers:
            for name, parameter in keyed(optimizer).params.items():
                if (key := _prefixed(prefix, name)) in params:
                    raise ValueError(
                        f"optimizers must have different parameters, got {key!r} twice; give them "
                        "prefixes"
                    )
                params[key] = parameter
        super().__init__(params, [])
        groups = [group for _, o in self._optimizers for group in o.param_groups]
        self.param_groups = groups

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """The optimizers, each with its prefix."""
        return list(self._optimizers)

    def group_names(self) -> list[list[str]]:
        """The names of the parameters of each group."""
        return [
            [_prefixed(prefix, name) for name in names]
            for prefix, optimizer in self._optimizers
            for names in optimizer.group_names()
        ]

    def keyed_state(self) -> State:
        """The states of all."""
        return {
            _prefixed(prefix, name): values
            for prefix, optimizer in self._optimizers
            for name, values in optimizer.keyed_state().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """`state` and `param_groups` of all."""
        states: State = {}
        groups = []
        for prefix, optimizer in self._optimizers:
            part = optimizer.state_dict()
            states.update({_prefixed(prefix, k): v for k, v in part["state"].items()})
            for group in part["param_groups"]:
                names = [_prefixed(prefix, name) for name in group["params"]]
                groups.append({**group, "params": names})
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let each have its part.

        Raises:
            KeyError: it is of other parameters, or of other groups of them.
        """
        own, groups = self.state_dict()["param_groups"], list(state_dict["param_groups"])
        if len(own) != len(groups):
            raise KeyError(
                f"the state dict has {len(groups)} groups of parameters, this optimizer {len(own)}"
            )
        first = 0
        for prefix, optimizer in self._optimizers:
            count = len(optimizer.state_dict()["param_groups"])
            mine = groups[first : first + count]
            first += count
            names = {name for group in mine for name in group["params"]}
            names |= set(optimizer.state_dict()["state"])  # what wrappers keep beside parameters
            optimizer.load_state_dict(
                {
                    "state": {
                        _bare(prefix, name): values
                        for name, values in state_dict["state"].items()
                        if name in names or _bare(prefix, name) in names
                    },
                    "param_groups": [
                        {**group, "params": [_bare(prefix, name) for name in group["params"]]}
                        for group in mine
                    ],
                }
            )

    def step(self, closure: Any = None) -> Any:
        """A step of each; `closure` is called by the first alone."""
        results = [
            optimizer.step(closure if i == 0 else None)
            for i, (_, optimizer) in enumerate(self._optimizers)
        ]
        return results[0] if results else None

    def zero_grad(self, set_to_none: Any = True) -> None:
        """As of each."""
        for _, optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)


def _prefixed(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _bare(prefix: str, name: str) -> str:
    return name.removeprefix(f"{prefix}.") if prefix else name


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
