"""Optimizers with state dicts by parameter name, and wrappers: clipping and combination.

`KeyedOptimizer` is the base. `KeyedOptimizerWrapper` makes one of an optimizer of `torch.optim`,
`GradientClippingOptimizer` clips before its steps, and `CombinedOptimizer` steps several.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from emblib.collections.optimizers.gradient_norms import (
    GradientRanks,
    clip_grad_norm_,
    clip_grad_value_,
    ranks_of_parameters,
)
from emblib.collections.optimizers.torch_states import with_names, without_params
from emblib.grad_mode import without_gradients
from emblib.optim.base import number_or_nan
from emblib.specs import OptionEnum, check_bool, check_count
from emblib.tables.parameters import is_updated_in_backward

State = dict[str, dict[str, Any]]  # states by name, by the name of their parameter


class KeyedOptimizer(TorchOptimizer):
    """Base of optimizers with a state dict by name: `state` by parameter, and `param_groups`.

    It is a `torch.optim.Optimizer`: learning-rate schedulers work on its `param_groups`, and its
    hooks are called. Loading updates the dicts of the groups, and writes into state tensors of
    equal shape. A subclass whose state dict differs overrides `_make_state_dict` and
    `_load_checked`, and `check_state_dict`.

    Args:
        params: the parameters by name.
        groups: parameter groups, as in `torch.optim`.

    Attributes:
        extra_state_names: keys of `state` in state dicts that are not names of parameters.
    """

    extra_state_names: tuple[str, ...] = ()

    def __init__(
        self, params: Mapping[str, nn.Parameter], groups: Sequence[dict[str, Any]]
    ) -> None:
        super().__init__(list(groups) or [{"params": []}], {})
        self.params = dict(params)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group at construction; raise RuntimeError later: its parameters have no names."""
        if hasattr(self, "params"):
            raise RuntimeError(
                f"{type(self).__name__} has the parameters that it was constructed with: give "
                "others a KeyedOptimizerWrapper of their own, and use CombinedOptimizer to step all"
            )
        super().add_param_group(param_group)

    def group_names(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        names = {id(parameter): name for name, parameter in self.params.items()}
        return [
            [names[id(parameter)] for parameter in group["params"]] for group in self.param_groups
        ]

    def gradient_ranks(self) -> GradientRanks | None:
        """Return the ranks over which gradients are sharded, see `clip_grad_norm_`.

        None means that all gradients are on this rank, or that this rank has no parameters; the
        optimizers of sharded tables return the ranks then too.

        Raises:
            ValueError: the parameters are over several groups of ranks.
        """
        return ranks_of_parameters(
            [parameter for group in self.param_groups for parameter in group["params"]]
        )

    def keyed_state(self) -> State:
        """Return the state by parameter name; its tensors are not copied."""
        names = {id(parameter): name for name, parameter in self.params.items()}
        return {names[id(parameter)]: dict(values) for parameter, values in self.state.items()}

    def load_keyed_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load the state of some parameters, by name; a state of another shape is replaced."""
        # Of these parameters the step is on their device, so that no kernel waits for the host.
        has_step_on_device = {
            id(parameter)
            for group in self.param_groups
            if group.get("capturable") or group.get("fused")
            for parameter in group["params"]
        }
        for name, saved_states in state.items():
            parameter = self.params[name]
            states = self.state[parameter]
            for key, value in saved_states.items():
                current = states.get(key)
                are_tensors = isinstance(current, Tensor) and isinstance(value, Tensor)
                if are_tensors and current.shape == value.shape:
                    current.copy_(value)
                elif key == "step" and id(parameter) not in has_step_on_device:
                    states[key] = value.clone() if isinstance(value, Tensor) else value
                else:
                    states[key] = _copy_for(parameter, value, is_step=key == "step")

    def state_dict(self) -> dict[str, Any]:
        """Return `state` by parameter name, and `param_groups` with parameter names.

        The state-dict hooks of torch are called, before and after.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state_dict = self._make_state_dict()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            hook_result = post_hook(self, state_dict)
            state_dict = state_dict if hook_result is None else hook_result
        return state_dict

    def _make_state_dict(self) -> dict[str, Any]:
        """Return the state dict, before hooks change it."""
        groups = [
            {"params": names, **without_params(group)}
            for names, group in zip(self.group_names(), self.param_groups, strict=True)
        ]
        return {"state": self.keyed_state(), "param_groups": groups}

    @without_gradients
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict; if its parameters or groups are not the same, nothing is loaded.

        Parameters without a state in it lose theirs, as in torch. A state dict without
        `param_groups` leaves the groups unchanged. The load hooks of torch are called: pre-hooks
        with a shallow copy of the state dict, post-hooks after all is loaded.

        Raises:
            KeyError: the state dict has other parameters, or other groups of them.
        """
        state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            hook_result = pre_hook(self, state_dict)
            state_dict = state_dict if hook_result is None else hook_result
        self._load_checked(state_dict)
        self.post_load_state_dict()
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def post_load_state_dict(self) -> None:
        """Do nothing; subclasses may define what happens at the end of `load_state_dict`."""

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of steps of tables that backward updates; other steps stay.

        Raises:
            TypeError: `step` is not an int.
            ValueError: `step` is negative.
        """
        check_count("step", step, minimum=0)

    def _load_checked(self, state_dict: Mapping[str, Any]) -> None:
        """Check a state dict, then load it; hooks have changed it already."""
        state_dict = self.check_state_dict(state_dict)
        for name, parameter in self.params.items():
            if name not in state_dict["state"]:  # as in torch: it had no state when it was saved
                self.state.pop(parameter, None)
        self.load_keyed_state(state_dict["state"])
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            entries = without_params(saved_group)
            group.update({name: copy.deepcopy(value) for name, value in entries.items()})

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raise what `load_state_dict` would raise, writing nothing; return the dict by name.

        `CombinedOptimizer` checks all of its optimizers before it loads the first one. Hooks are
        not called.
        """
        state_dict = with_names(state_dict, self.group_names())
        group_names = [sorted(names) for names in self.group_names()]
        saved_names = [sorted(group["params"]) for group in state_dict["param_groups"]]
        if group_names != saved_names:
            raise KeyError(
                f"the state dict is of other parameters or groups: it has {saved_names}, this "
                f"optimizer has {group_names}"
            )
        unknown_names = state_dict["state"].keys() - {
            name for names in group_names for name in names
        }
        _refuse_unknown(unknown_names)
        return state_dict

    def init_state(self, sparse_grad_parameter_names: Iterable[str] | None = None) -> None:
        """Make a step with gradients of zero, some of them sparse, so that all states exist.

        They replace the present gradients, and are not removed after the step; weight decay and
        momentum change parameters. The parameters `sparse_grad_parameter_names` get sparse
        gradients. Parameters that are frozen, or that backward updates, get none.

        Raises:
            TypeError: `sparse_grad_parameter_names` is one string.
        """
        if isinstance(sparse_grad_parameter_names, str):
            name = sparse_grad_parameter_names
            raise TypeError(f"sparse_grad_parameter_names must be names, got {name!r}: [{name!r}]")
        sparse_names = set(sparse_grad_parameter_names or ())
        for name, parameter in self.params.items():
            if parameter.requires_grad and not is_updated_in_backward(parameter):
                zeros = torch.zeros_like(parameter)
                parameter.grad = zeros.to_sparse(1) if name in sparse_names else zeros
        self.step(closure=None)

    def save_param_groups(self, save: Any) -> None:
        """Do nothing for True: state dicts have `param_groups`, and load without them too.

        Raises:
            ValueError: `save` is False.
        """
        if not save:
            raise ValueError("state dicts always have param_groups, and load without them, too")

    def __getstate__(self) -> dict[str, Any]:
        # As in torch, hooks and a `step` that a scheduler wrapped are not copied.
        skipped = ("step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in skipped
            and not name.endswith("_dict_pre_hooks")
            and not name.endswith("_dict_post_hooks")
        }

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.params)} parameters, {self.group_names()})"


def _refuse_unknown(names: Collection[str]) -> None:
    if names:
        raise KeyError(
            f"the state dict has states of parameters that are not here: {sorted(names)}"
        )


def cycled_defaults(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the `defaults` that torch's cyclic schedulers read: those of the first group.

    These are `betas` or else `momentum`, if all groups have it; otherwise the dict is empty.
    """
    group_list = list(groups)
    for name in ("betas", "momentum"):
        if group_list and all(name in group for group in group_list):
            return {name: group_list[0][name]}
    return {}


def _copy_for(parameter: Tensor, value: Any, *, is_step: bool) -> Any:
    """Copy a floating-point state to the device and the dtype of its parameter, as torch does.

    A step is float32 whatever the parameter is. Other tensors are copied where they are, and
    numbers are returned as they are.
    """
    if not isinstance(value, Tensor):
        return value
    if not value.is_floating_point():
        return value.clone()
    dtype = torch.float32 if is_step or not parameter.is_floating_point() else parameter.dtype
    return value.to(parameter.device, dtype, copy=True)


class KeyedOptimizerWrapper(KeyedOptimizer):
    """A `KeyedOptimizer` around an optimizer of `torch.optim`.

    Args:
        params: the parameters by name.
        factory: function that constructs the optimizer from a list of parameters, e.g.
            `partial(torch.optim.Adam, lr=1e-3)`.
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
        self.wrapped.register_load_state_dict_post_hook(self._keep_groups)

    _optimizer = property(attrgetter("wrapped"))  # subclasses written for TorchRec read it

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.wrapped.register_load_state_dict_post_hook(self._keep_groups)

    def _keep_groups(self, wrapped: TorchOptimizer) -> None:
        """Keep the groups and the state that are here: loading gives `wrapped` new objects.

        Schedulers, and the optimizers around this one, write to the groups that are here.
        """
        if wrapped.param_groups is self.param_groups:
            return
        for group, loaded_group in zip(self.param_groups, wrapped.param_groups, strict=True):
            group.clear()
            group.update(loaded_group)
        self.state.clear()
        self.state.update(wrapped.state)
        wrapped.param_groups, wrapped.state = self.param_groups, self.state

    def step(self, closure: Any = None) -> Any:
        """Make one step of the wrapped optimizer."""
        return self.wrapped.step(closure)

    def zero_grad(self, set_to_none: Any = True) -> None:
        """Reset the gradients."""
        self.wrapped.zero_grad(set_to_none)


def keyed(optimizer: Any) -> KeyedOptimizer:
    """Return `optimizer`, checked to be a `KeyedOptimizer`.

    Raises:
        TypeError: the optimizer is of another class, whose parameters have no names.
    """
    if not isinstance(optimizer, KeyedOptimizer):
        raise TypeError(
            f"an optimizer must be a KeyedOptimizer, got {type(optimizer).__name__}: for one of "
            "torch.optim KeyedOptimizerWrapper(dict(model.named_parameters()), factory)"
        )
    return optimizer


class OptimizerWrapper(KeyedOptimizer):
    """Base of optimizers that wrap the steps of a keyed optimizer."""

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        self.wrapped = keyed(optimizer)
        super().__init__(optimizer.params, [])
        self.extra_state_names = optimizer.extra_state_names
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.defaults = optimizer.defaults

    _optimizer = property(attrgetter("wrapped"))  # subclasses written for TorchRec read it

    def __getstate__(self) -> dict[str, Any]:
        return without_params(super().__getstate__())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.params = self.wrapped.params

    def step(self, closure: Any = None) -> Any:
        """Make one step of the wrapped optimizer."""
        return self.wrapped.step(closure)

    def zero_grad(self, set_to_none: Any = True) -> None:
        """Reset the gradients."""
        self.wrapped.zero_grad(set_to_none)

    def post_load_state_dict(self) -> None:
        """Call `post_load_state_dict` of the wrapped optimizer."""
        self.wrapped.post_load_state_dict()

    def set_optimizer_step(self, step: int) -> None:
        """Set the step of tables that the wrapped optimizer has."""
        self.wrapped.set_optimizer_step(step)

    def gradient_ranks(self) -> GradientRanks | None:
        """Return the ranks over which the gradients of the wrapped optimizer are sharded."""
        return self.wrapped.gradient_ranks()

    def group_names(self) -> list[list[str]]:
        """Return the names of the parameters of each group of the wrapped optimizer."""
        return self.wrapped.group_names()

    def keyed_state(self) -> State:
        """Return the state of the wrapped optimizer by parameter name."""
        return self.wrapped.keyed_state()

    def load_keyed_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load the state of some parameters of the wrapped optimizer, by name."""
        self.wrapped.load_keyed_state(state)

    def _make_state_dict(self) -> dict[str, Any]:
        return self.wrapped.state_dict()

    def _load_checked(self, state_dict: Mapping[str, Any]) -> None:
        self.wrapped.load_state_dict(state_dict)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check a state dict without the entries that this wrapper adds to it."""
        added_names = set(self.extra_state_names) - set(self.wrapped.extra_state_names)
        states = {
            name: values for name, values in state_dict["state"].items() if name not in added_names
        }
        return self.wrapped.check_state_dict({**state_dict, "state": states})


class GradientClipping(OptionEnum):
    """Quantity to clip: the NORM of all gradients together, each VALUE, or nothing (NONE)."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """Clip the gradients of all parameters before every step, those that a closure computes too.

    The norm is taken over the whole model, the same on all ranks: shards of tables count on the
    rank that has them, everything else once. All ranks must step together.

    Tables that backward updates have no gradients: `step` raises ValueError for them if it clips or
    computes the norm. Make their optimizer `deferred`, or set its `max_gradient`; or wrap the
    optimizer of the other parameters alone.

    Args:
        optimizer: the wrapped optimizer.
        clipping: quantity to clip: nothing, the norm of all gradients, or each value.
        max_gradient: bound of the norm or of the absolute values.
        norm_type: exponent of the norm, above 0; `inf` for the maximum.
        track_grad_norm: whether `last_total_grad_norm` is computed if the norm is not clipped.

    Raises:
        TypeError: `optimizer` is not a `KeyedOptimizer`, or `track_grad_norm` is not a bool.
        ValueError: `max_gradient` is negative or NaN, `norm_type` is not above 0, or `clipping` is
            unknown.

    Attributes:
        last_total_grad_norm: norm of all gradients before the last step clipped them; None before
            the first step, and if it is not computed.
    """

    last_total_grad_norm: Tensor | None = None

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float = 2.0,
        *,
        track_grad_norm: bool = False,
    ) -> None:
        check_bool("track_grad_norm", track_grad_norm)
        super().__init__(optimizer)
        if not number_or_nan(max_gradient) >= 0.0:
            raise ValueError(f"max_gradient must be >= 0, got {max_gradient!r}")
        if not number_or_nan(norm_type) > 0.0:
            raise ValueError(f"norm_type must be above 0, inf for the maximum; got {norm_type!r}")
        self.clipping, self.max_gradient = GradientClipping(clipping), max_gradient
        self.norm_type, self.track_grad_norm = float(norm_type), track_grad_norm

    def _parameters(self) -> list[Tensor]:
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        return [parameter for parameter in parameters if not parameter.is_meta]

    def clip_grad_norm_(self) -> Tensor:
        """Clip the norm of all gradients now; return the norm before, a scalar tensor.

        All ranks of the model call this together.
        """
        return self._clip_norm(self.max_gradient)

    def _clip_norm(self, max_norm: float) -> Tensor:
        return clip_grad_norm_(
            self._parameters(), max_norm, self.norm_type, ranks=self.gradient_ranks()
        )

    def step(self, closure: Any = None) -> Any:
        """Clip the gradients, with a `closure` those that it computes, then make a step."""
        if closure is None:
            self._clip()
            return super().step()

        def compute_and_clip() -> Any:
            loss = closure()
            self._clip()
            return loss

        return super().step(compute_and_clip)

    def _clip(self) -> None:
        """Clip the present gradients, and compute `last_total_grad_norm` if it is asked for."""
        self.last_total_grad_norm = None
        is_clipped = self.clipping is GradientClipping.NORM
        # A rank without parameters takes part: the others wait for it.
        takes_part = bool(self._parameters()) or self.gradient_ranks() is not None
        if takes_part and (is_clipped or self.track_grad_norm):
            self.last_total_grad_norm = self._clip_norm(
                self.max_gradient if is_clipped else math.inf
            )
        if self.clipping is GradientClipping.VALUE:
            clip_grad_value_(self._parameters(), self.max_gradient)


class CombinedOptimizer(KeyedOptimizer):
    """Several optimizers as one; their parameters have different names.

    Args:
        optimizers: optimizers, or pairs (prefix, optimizer): state dicts have `<prefix>.<name>` for
            the names of the optimizer.

    Raises:
        TypeError: an optimizer is not a `KeyedOptimizer`, or a tuple is not such a pair.
        ValueError: two optimizers have a parameter or a state of the same name.
    """

    def __init__(self, optimizers: Sequence[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optimizers = [_with_prefix(optimizer) for optimizer in optimizers]
        parameters_by_name: dict[str, Any] = {}
        for prefix, optimizer in self._optimizers:
            extra_names = dict.fromkeys(optimizer.extra_state_names)
            for name, parameter in {**optimizer.params, **extra_names}.items():
                if (key := _add_prefix(prefix, name)) in parameters_by_name:
                    raise ValueError(
                        "optimizers must have different parameters and states, got "
                        f"{key!r} twice; give them prefixes"
                    )
                parameters_by_name[key] = parameter
        extra_state_names = [
            name for name in parameters_by_name if parameters_by_name[name] is None
        ]
        for name in extra_state_names:
            del parameters_by_name[name]
        super().__init__(parameters_by_name, [])
        self.extra_state_names = tuple(extra_state_names)
        groups = [group for _, optimizer in self._optimizers for group in optimizer.param_groups]
        self.param_groups, self.defaults = groups, cycled_defaults(groups)

    def __getstate__(self) -> dict[str, Any]:
        return without_params(super().__getstate__())

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.params = {
            _add_prefix(prefix, name): parameter
            for prefix, optimizer in self._optimizers
            for name, parameter in optimizer.params.items()
        }

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """Return the optimizers, each with its prefix."""
        return list(self._optimizers)

    _optims = optimizers  # programs for TorchRec read it

    def post_load_state_dict(self) -> None:
        """Call `post_load_state_dict` of all optimizers."""
        for _, optimizer in self._optimizers:
            optimizer.post_load_state_dict()

    def set_optimizer_step(self, step: int) -> None:
        """Set the step of tables that any of the optimizers has."""
        for _, optimizer in self._optimizers:
            optimizer.set_optimizer_step(step)

    def group_names(self) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        return [
            [_add_prefix(prefix, name) for name in names]
            for prefix, optimizer in self._optimizers
            for names in optimizer.group_names()
        ]

    def gradient_ranks(self) -> GradientRanks | None:
        """Return the ranks over which the gradients of any of the optimizers are sharded."""
        all_ranks = (optimizer.gradient_ranks() for _, optimizer in self.optimizers)
        return super().gradient_ranks() or next(
            (ranks for ranks in all_ranks if ranks is not None), None
        )

    def keyed_state(self) -> State:
        """Return the states of all optimizers."""
        return {
            _add_prefix(prefix, name): values
            for prefix, optimizer in self._optimizers
            for name, values in optimizer.keyed_state().items()
        }

    def load_keyed_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load the state of some parameters, by name, into their optimizers."""
        for prefix, optimizer in self._optimizers:
            names = chain.from_iterable(optimizer.group_names())
            prefixed_names = {name: _add_prefix(prefix, name) for name in names}
            optimizer_state = {
                name: state[prefixed]
                for name, prefixed in prefixed_names.items()
                if prefixed in state
            }
            if optimizer_state:
                optimizer.load_keyed_state(optimizer_state)

    def _make_state_dict(self) -> dict[str, Any]:
        """Return `state` and `param_groups` of all optimizers."""
        states: State = {}
        groups = []
        for prefix, optimizer in self._optimizers:
            optimizer_state = optimizer.state_dict()
            for name, values in optimizer_state["state"].items():
                states[_add_prefix(prefix, name)] = values
            for group in optimizer_state["param_groups"]:
                names = [_add_prefix(prefix, name) for name in group["params"]]
                groups.append({**group, "params": names})
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state of each optimizer, after each has checked its own.

        The check precedes the load hooks of these optimizers, which get parts that are valid.

        Raises:
            KeyError: the state dict has other parameters, or other groups of them.
            ValueError: one of the optimizers cannot have a state.
        """
        super().load_state_dict(state_dict)

    def _load_checked(self, state_dict: Mapping[str, Any]) -> None:
        state_dict = self.check_state_dict(state_dict)
        for optimizer, optimizer_state in self._parts_of(state_dict):
            optimizer.load_state_dict(optimizer_state)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raise what `load_state_dict` would raise, writing nothing; return the dict by name."""
        state_dict = with_names(state_dict, self.group_names())
        checked_names: set[str] = set()
        for (prefix, _), (optimizer, optimizer_state) in zip(
            self._optimizers, self._parts_of(state_dict), strict=True
        ):
            optimizer.check_state_dict(optimizer_state)
            checked_names |= {_add_prefix(prefix, name) for name in optimizer_state["state"]}
        _refuse_unknown(state_dict["state"].keys() - checked_names)
        return state_dict

    def _parts_of(
        self, state_dict: Mapping[str, Any]
    ) -> Iterator[tuple[KeyedOptimizer, dict[str, Any]]]:
        """Yield each optimizer with its part of a state dict by name."""
        num_groups, groups = len(self.group_names()), list(state_dict["param_groups"])
        if num_groups != len(groups):
            raise KeyError(
                f"the state dict has {len(groups)} groups of parameters, this optimizer "
                f"{num_groups}"
            )
        first_group = 0
        for prefix, optimizer in self._optimizers:
            num_optimizer_groups = len(optimizer.group_names())
            optimizer_groups = groups[first_group : first_group + num_optimizer_groups]
            first_group += num_optimizer_groups
            names = {name for group in optimizer_groups for name in group["params"]}
            names |= {_add_prefix(prefix, name) for name in optimizer.extra_state_names}
            states = {
                _strip_prefix(prefix, name): values
                for name, values in state_dict["state"].items()
                if name in names
            }
            optimizer_groups = [
                {**group, "params": [_strip_prefix(prefix, name) for name in group["params"]]}
                for group in optimizer_groups
            ]
            yield optimizer, {"state": states, "param_groups": optimizer_groups}

    def step(self, closure: Any = None) -> Any:
        """Make a step of each optimizer; only the first calls `closure`."""
        results = [
            optimizer.step(closure if i == 0 else None)
            for i, (_, optimizer) in enumerate(self._optimizers)
        ]
        return results[0] if results else None

    def zero_grad(self, set_to_none: Any = True) -> None:
        """Reset the gradients of all optimizers."""
        for _, optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)


def _with_prefix(optimizer: Any) -> tuple[str, KeyedOptimizer]:
    """Return an optimizer with its prefix, "" for one without."""
    pair = optimizer if isinstance(optimizer, tuple) else ("", optimizer)
    if len(pair) != 2 or not isinstance(pair[0], str):
        raise TypeError(f"optimizers must be optimizers or pairs (prefix, optimizer), got {pair}")
    return pair[0], keyed(pair[1])


def _add_prefix(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _strip_prefix(prefix: str, name: str) -> str:
    return name.removeprefix(f"{prefix}.") if prefix else name
