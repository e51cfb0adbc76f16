"""TorchRec's optimizers: keyed, fused in backward, and the classes that name an optimizer."""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from emblib import optim
from emblib.collections import optimizers


class _Virtual(ABCMeta):
    """Type of classes whose instances are all those of `emblib_class`, also without inheriting."""

    def __instancecheck__(cls, instance: Any) -> bool:
        kind = cls.__dict__.get("emblib_class")
        return super().__instancecheck__(instance) or (
            kind is not None and isinstance(instance, kind)
        )


class KeyedOptimizer(optimizers.KeyedOptimizer, metaclass=_Virtual):
    """Optimizer with a state dict by parameter name, with TorchRec's arguments.

    All keyed optimizers of emblib are instances of it.

    Args:
        params: the parameters by name.
        state: the states by parameter.
        param_groups: parameter groups, as in `torch.optim`.

    Raises:
        ValueError: a state of a tensor that is not among the parameters.
    """

    emblib_class = optimizers.KeyedOptimizer

    def __init__(
        self,
        params: Mapping[str, Any],
        state: Mapping[Any, Any],
        param_groups: Collection[Mapping[str, Any]],
    ) -> None:
        known = {id(parameter) for parameter in params.values()}
        if any(id(parameter) not in known for parameter in state):
            raise ValueError("state must have tensors of params as keys, got others")
        super().__init__(params, [dict(group) for group in param_groups])
        for parameter, values in state.items():
            self.state[parameter] = values

    def init_state(self, sparse_grad_parameter_names: Iterable[str] | None = None) -> None:
        """Make a step with gradients of zero, so that the states exist.

        Args:
            sparse_grad_parameter_names: the parameters whose gradients are sparse.
        """
        sparse = set(sparse_grad_parameter_names or ())
        for name, parameter in self.params.items():
            if parameter.requires_grad:
                zeros = torch.zeros_like(parameter)
                parameter.grad = zeros.to_sparse(1) if name in sparse else zeros
        self.step(closure=None)


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one sum of squared gradients per row, the mean over the row.

    An optimizer of `torch.optim` for any parameter of two dimensions; for tables,
    `apply_optimizer_in_backward(RowWiseAdagrad, ...)` fuses it. States and results are TorchRec's.

    Args:
        params: parameters or groups of them.
        lr: the learning rate.
        lr_decay: the rate of step t is `lr / (1 + (t - 1) * lr_decay)`.
        weight_decay: factor of the parameter that is added to the gradient.
        initial_accumulator_value: initial value of the sums of squared gradients.
        eps: constant that is added to the root of the sum.
        maximize: whether to ascend.
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
    ) -> None:
        numbers = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
        }
        wrong = {name: value for name, value in numbers.items() if not value >= 0}
        if wrong:
            raise ValueError(f"the numbers of RowWiseAdagrad must be >= 0, got {wrong}")
        super().__init__(params, {**numbers, "maximize": maximize})
        for group in self.param_groups:
            for parameter in group["params"]:
                total = parameter.detach().new_full(
                    (parameter.shape[0], 1), group["initial_accumulator_value"]
                )
                self.state[parameter] = {"step": torch.tensor(0.0), "sum": total}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make a step, and return the loss of `closure` if there is one."""
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


class _FusedOnly(torch.optim.Optimizer):
    """Base of classes that name an optimizer of tables, for `apply_optimizer_in_backward`."""

    fused_class: ClassVar[type[optim.Optimizer]]
    fused_defaults: ClassVar[dict[str, Any]] = {"lr": 0.01}

    def __init__(self, params: Iterable[nn.Parameter], **kwargs: Any) -> None:
        super().__init__(params, {**self.fused_defaults, **kwargs})

    def step(self, closure: Any = None) -> Any:
        """Raise NotImplementedError: tables make the update in backward."""
        name = type(self).__name__
        raise NotImplementedError(
            f"{name} names an optimizer of tables, which backward runs: pass the class to "
            f"apply_optimizer_in_backward; for other parameters use one of torch.optim"
        )


class SGD(_FusedOnly):
    """Names `emblib.optim.SGD`."""

    fused_class = optim.SGD


class LarsSGD(_FusedOnly):
    """Names `emblib.optim.LARS`."""

    fused_class = optim.LARS


class LAMB(_FusedOnly):
    """Names `emblib.optim.LAMB`."""

    fused_class = optim.LAMB


class PartialRowWiseLAMB(_FusedOnly):
    """Names `emblib.optim.PartialRowwiseLAMB`."""

    fused_class = optim.PartialRowwiseLAMB


class Adam(_FusedOnly):
    """Names `emblib.optim.Adam`."""

    fused_class = optim.Adam


class PartialRowWiseAdam(_FusedOnly):
    """Names `emblib.optim.PartialRowwiseAdam`."""

    fused_class = optim.PartialRowwiseAdam


class Adagrad(_FusedOnly):
    """Names `emblib.optim.Adagrad`."""

    fused_class = optim.Adagrad


class FusedOptimizer(optimizers.KeyedOptimizer, metaclass=_Virtual):
    """Base of optimizers that backward runs; `sharded.fused_optimizer` is an instance."""

    emblib_class = optimizers.FusedOptimizer


class EmptyFusedOptimizer(FusedOptimizer):
    """A fused optimizer without parameters."""

    def __init__(self) -> None:
        super().__init__({}, [])

    def step(self, closure: Any = None) -> Any:
        """Do nothing."""

    def zero_grad(self, set_to_none: Any = False) -> None:
        """Do nothing."""


class _HasFusedOptimizer(ABCMeta):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(getattr(instance, "fused_optimizer", None), optimizers.KeyedOptimizer)


class FusedOptimizerModule(metaclass=_HasFusedOptimizer):
    """Modules with a `fused_optimizer`: sharded collections and `DistributedModelParallel`."""


class WarmupOptimizer(optimizers.WarmupOptimizer):
    """Warm up as in `emblib.collections.optimizers`, with TorchRec's default rate of 0.1."""

    def __init__(
        self,
        optimizer: optimizers.KeyedOptimizer,
        stages: Sequence[optimizers.WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
    ) -> None:
        super().__init__(optimizer, stages, lr, lr_param)


def apply_optimizer_in_backward(
    optimizer_class: Any,
    params: Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Update parameters in backward; see `emblib.collections.optimizers`."""
    optimizers.apply_optimizer_in_backward(optimizer_class, params, optimizer_kwargs)
