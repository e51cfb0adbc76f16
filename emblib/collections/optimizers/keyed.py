"""Optimizers whose state is kept by the name of the parameter, so that it fits any module order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

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
