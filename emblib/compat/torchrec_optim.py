"""TorchRec's optimizers: keyed optimizers, and optimizers that backward runs.

Keyed optimizers are those of `emblib.collections.optimizers`, with TorchRec's arguments. Classes
such as `SGD` and `Adam` only name an optimizer of tables, for `apply_optimizer_in_backward`; they
cannot step. `RowWiseAdagrad` is such a name, too, and also an optimizer of dense parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from emblib import optim
from emblib.collections import optimizers
from emblib.compat.checks import check_flags
from emblib.compat.torchrec_types import Interface


class KeyedOptimizer(optimizers.KeyedOptimizer, metaclass=Interface):
    """Optimizer with a state dict by parameter name, with TorchRec's arguments.

    All keyed optimizers of emblib count as instances of it.

    Args:
        params: parameters by name.
        state: optimizer state of each parameter.
        param_groups: parameter groups, as in `torch.optim`.

    Raises:
        ValueError: `state` has a key that is none of the parameters.
    """

    emblib_classes = (optimizers.KeyedOptimizer,)

    def __init__(
        self,
        params: Mapping[str, Any],
        state: Mapping[Any, Any],
        param_groups: Collection[Mapping[str, Any]],
    ) -> None:
        parameter_ids = {id(parameter) for parameter in params.values()}
        if any(id(parameter) not in parameter_ids for parameter in state):
            raise ValueError("All state keys must be params.")
        super().__init__(params, [dict(group) for group in param_groups])
        for parameter, values in state.items():
            self.state[parameter] = values


class KeyedOptimizerWrapper(optimizers.KeyedOptimizerWrapper):
    """`emblib.collections.optimizers.KeyedOptimizerWrapper` with TorchRec's arguments.

    With `pass_params_dict`, `optim_factory` gets the parameters by name, not a list of them.
    """

    def __init__(
        self,
        params: Mapping[str, Any],
        optim_factory: Callable[[Any], torch.optim.Optimizer],
        pass_params_dict: bool = False,
    ) -> None:
        check_flags(pass_params_dict=pass_params_dict)
        super().__init__(
            params, lambda values: optim_factory(params if pass_params_dict else values)
        )


class CombinedOptimizer(optimizers.CombinedOptimizer):
    """`emblib.collections.optimizers.CombinedOptimizer` with TorchRec's argument."""

    def __init__(
        self, optims: Sequence[optimizers.KeyedOptimizer | tuple[str, optimizers.KeyedOptimizer]]
    ) -> None:
        super().__init__(optims)


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one number per row: the sum of the mean squared gradients of the row.

    It is an optimizer of `torch.optim` for dense parameters of two dimensions. For tables,
    `apply_optimizer_in_backward(RowWiseAdagrad, ...)` runs it in backward. States and results are
    those of TorchRec.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        lr_decay: decay of the rate, which is `lr / (1 + (t - 1) * lr_decay)` in step t.
        weight_decay: factor of the parameter that is added to the gradient.
        initial_accumulator_value: initial value of the sums.
        eps: constant that is added to the root of a sum.
        maximize: whether to maximize the loss instead of minimizing it.
        beta1, beta2: ignored, as there, so that one set of arguments does for several optimizers.

    Raises:
        ValueError: a number is negative or NaN.
        RuntimeError: in `step`, a gradient is sparse.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        beta1: float | None = None,
        beta2: float | None = None,
    ) -> None:
        numbers = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        invalid_numbers = {name: value for name, value in numbers.items() if not value >= 0}
        if invalid_numbers:
            raise ValueError(f"the numbers of RowWiseAdagrad must be >= 0, got {invalid_numbers}")
        check_flags(maximize=maximize)
        super().__init__(params, {**numbers, "maximize": maximize})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with initial states; the constructor calls this per group."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            sum_of_squares = parameter.detach().new_full(
                (parameter.shape[0], 1), group["initial_accumulator_value"]
            )
            self.state[parameter] = {"step": torch.tensor(0.0, device="cpu"), "sum": sum_of_squares}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters that have a gradient; return the loss of `closure`, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _rowwise_step(parameter, self.state[parameter], group)
        return loss


def _rowwise_step(parameter: Tensor, state: dict[str, Any], group: Mapping[str, Any]) -> None:
    """Update a parameter and its state in place; `group` has the hyperparameters.

    Raises:
        RuntimeError: the gradient is sparse; nothing is changed.
    """
    grad = parameter.grad
    assert grad is not None
    if grad.is_sparse:
        raise RuntimeError(
            "RowWiseAdagrad takes dense gradients: for tables apply_optimizer_in_backward fuses it "
            "and updates the rows of the batch"
        )
    state["step"] += 1
    if group["maximize"]:
        grad = -grad
    if group["weight_decay"]:
        grad = grad.add(parameter, alpha=group["weight_decay"])
    rate = group["lr"] / (1 + (float(state["step"]) - 1) * group["lr_decay"])
    state["sum"] += grad.square().mean(dim=1, keepdim=True)
    parameter.addcdiv_(grad, state["sum"].sqrt().add_(group["eps"]), value=-rate)


class _FusedOptimizerName(torch.optim.Optimizer):
    """Base of classes that name an optimizer of tables, for `apply_optimizer_in_backward`.

    Attributes:
        fused_class: emblib's optimizer.
        fused_defaults: arguments that it gets unless others are passed.
    """

    fused_class: ClassVar[type[optim.Optimizer]]
    fused_defaults: ClassVar[dict[str, Any]] = {"lr": 0.01}

    def __init__(self, params: Iterable[nn.Parameter], **kwargs: Any) -> None:
        super().__init__(params, {**self.fused_defaults, **kwargs})

    def step(self, closure: Any = None) -> Any:
        """Raise NotImplementedError: backward updates the tables."""
        name = type(self).__name__
        raise NotImplementedError(
            f"{name} names an optimizer of tables, which backward runs: pass the class to "
            f"apply_optimizer_in_backward; for other parameters use one of torch.optim"
        )


def _make_naming_class(name: str, fused_class: type[optim.Optimizer]) -> type[_FusedOptimizerName]:
    """Return a class with TorchRec's name `name` for the optimizer `fused_class` of emblib."""
    doc = f"Names `emblib.optim.{fused_class.__name__}`."
    members = {"fused_class": fused_class, "__doc__": doc, "__module__": __name__}
    return type(name, (_FusedOptimizerName,), members)


SGD = _make_naming_class("SGD", optim.SGD)
LarsSGD = _make_naming_class("LarsSGD", optim.LARS)
LAMB = _make_naming_class("LAMB", optim.LAMB)
PartialRowWiseLAMB = _make_naming_class("PartialRowWiseLAMB", optim.PartialRowwiseLAMB)
Adam = _make_naming_class("Adam", optim.Adam)
PartialRowWiseAdam = _make_naming_class("PartialRowWiseAdam", optim.PartialRowwiseAdam)
Adagrad = _make_naming_class("Adagrad", optim.Adagrad)


class FusedOptimizer(optimizers.KeyedOptimizer, metaclass=Interface):
    """Interface of optimizers that backward runs, such as `sharded.fused_optimizer`."""

    emblib_classes = (optimizers.FusedOptimizer,)


class EmptyFusedOptimizer(FusedOptimizer):
    """A fused optimizer without parameters."""

    def __init__(self) -> None:
        super().__init__({}, [])

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""

    def zero_grad(self, set_to_none: Any = False) -> None:
        """Do nothing."""


@runtime_checkable
class _HasFusedOptimizer(Protocol):
    fused_optimizer: Any


class FusedOptimizerModule(metaclass=Interface):
    """Interface of objects with a `fused_optimizer`, such as sharded collections."""

    emblib_classes = (_HasFusedOptimizer,)


class GradientClippingOptimizer(optimizers.GradientClippingOptimizer):
    """`emblib.collections.optimizers.GradientClippingOptimizer` with TorchRec's arguments.

    `enable_global_grad_clip` and `param_to_pgs` are ignored: the norm is always that of the model
    over all ranks. Tables that backward updates raise ValueError; TorchRec skips them.
    """

    def __init__(
        self,
        optimizer: optimizers.KeyedOptimizer,
        clipping: optimizers.GradientClipping = optimizers.GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[Any, Any] | None = None,
        track_grad_norm: bool = False,
    ) -> None:
        check_flags(track_grad_norm=track_grad_norm)
        super().__init__(
            optimizer, clipping, max_gradient, float(norm_type), track_grad_norm=track_grad_norm
        )


class WarmupOptimizer(optimizers.WarmupOptimizer):
    """`emblib.collections.optimizers.WarmupOptimizer` with TorchRec's default rate of 0.1."""

    def __init__(
        self,
        optimizer: optimizers.KeyedOptimizer,
        stages: Sequence[optimizers.WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer, stages, lr, lr_param, param_name)


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters without an optimizer in backward; with `include`, those with one."""
    check_flags(include=include)
    yield from optimizers.in_backward_optimizer_filter(named_parameters, include=bool(include))


def apply_optimizer_in_backward(
    optimizer_class: Any,
    params: Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Make backward update `params` by an optimizer of `optimizer_class(**optimizer_kwargs)`.

    See `emblib.collections.optimizers.apply_optimizer_in_backward`.
    """
    optimizers.apply_optimizer_in_backward(optimizer_class, params, optimizer_kwargs)
