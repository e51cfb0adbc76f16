"""Parameters whose optimizer runs in backward: saying so, and finding out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from emblib.collections.handles import handle_of
from emblib.collections.optimizers.fused_params import from_torch
from emblib.optim import Optimizer

_MARK = "_in_backward_optimizers"


def apply_optimizer_in_backward(
    optimizer: Any,
    params: Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Let backward update parameters, so that they never have a gradient outside of it.

    Tables of collections get a fused optimizer: their weights stay, the states of optimizers they
    had do not. That is for collections that are not spread over ranks yet. Any other parameter is
    stepped as soon as its gradient is complete, and the gradient is dropped.

    Args:
        optimizer: a class of `torch.optim` (for tables SGD, Adagrad, Adam or AdamW), or an
            optimizer of `emblib.optim`, or a class of those.
        params: the parameters.
        optimizer_kwargs: arguments of the class.

    Raises:
        TypeError: a parameter that cannot have this optimizer.
    """
    arguments = dict(optimizer_kwargs or {})
    tables: dict[int, tuple[Any, dict[str, Optimizer]]] = {}
    others = []
    for parameter in params:
        handle = handle_of(parameter)
        owner = None if handle is None else handle.owner()
        if handle is None or owner is None:
            others.append(parameter)
            continue
        fused = optimizer if isinstance(optimizer, Optimizer) else from_torch(optimizer, arguments)
        _, wanted = tables.setdefault(id(owner), (owner, {}))
        wanted[handle.name] = fused
    if others:
        _check_of_torch(optimizer)
    for parameter in others:
        _step_in_backward(parameter, optimizer, arguments)
    for owner, wanted in tables.values():
        owner.set_optimizers(wanted)


def _check_of_torch(optimizer: Any) -> None:
    if isinstance(optimizer, Optimizer) or (
        isinstance(optimizer, type) and issubclass(optimizer, Optimizer)
    ):
        raise TypeError(
            f"{optimizer!r} is of emblib.optim, which updates tables of collections; for other "
            "parameters give a class of torch.optim"
        )


def _step_in_backward(parameter: nn.Parameter, make: Any, arguments: dict[str, Any]) -> None:
    stepper = make([parameter], **arguments)
    marked: Any = parameter
    if hasattr(marked, _MARK):
        raise TypeError(
            "a parameter already has an optimizer in backward; give it to one call only"
        )
    setattr(marked, _MARK, [stepper])

    def step(ready: Any) -> None:
        stepper.step()
        ready.grad = None

    parameter.register_post_accumulate_grad_hook(step)


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], *, include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters without an optimizer in backward; with `include`, those that have one."""
    for name, parameter in named_parameters:
        if hasattr(parameter, _MARK) is include:
            yield name, parameter
