"""Parameters whose optimizer runs in backward: saying so, and finding out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from emblib.collections.configs import TableConfig
from emblib.collections.handles import TableHandle, handle_of, is_marked_by_torch
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
        _check_not_marked_by_torch(parameter)
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


def _check_not_marked_by_torch(parameter: nn.Parameter) -> None:
    if is_marked_by_torch(parameter):
        raise TypeError(
            "a parameter already has an optimizer in backward, from torch's own "
            "_apply_optimizer_in_backward; give it to one call only"
        )


def trained_configs(collection: Any) -> tuple[TableConfig, ...]:
    """Return the configurations of a collection, with the optimizers that torch gave its tables.

    `torch.distributed.optim._apply_optimizer_in_backward` steps a parameter in a hook of its
    gradient. A sharded table has other parameters, so it runs the same optimizer fused instead.

    Raises:
        TypeError: an optimizer that tables do not run.
        ValueError: an argument that they do not have, several optimizers of one table, or one that
            has made steps, whose state would be lost.
    """
    configs, handles = [], collection.handles()
    for config in collection.configs:
        found = _given_by_torch(config.name, handles[config.name])
        configs.append(config if found is None else replace(config, optimizer=found))
    return tuple(configs)


def _given_by_torch(table: str, handle: TableHandle) -> Optimizer | None:
    """Return the optimizer that torch's own function gave the parameters of a table."""
    parameters: list[Any] = list(handle.parameters())
    found: list[list[Optimizer]] = []
    for parameter in parameters:
        steppers = getattr(parameter, _MARK) if is_marked_by_torch(parameter) else []
        if any(float(s.state.get(parameter, {}).get("step", 0)) > 0 for s in steppers):
            raise ValueError(
                f"the optimizer in backward of table {table!r} has made steps, and its state would "
                "be lost: shard the model before it is trained"
            )
        try:
            found.append([_as_fused(s, parameter, k) for k, s in enumerate(steppers)])
        except (TypeError, ValueError) as error:
            error.add_note(f"(of table {table!r}, by torch's own _apply_optimizer_in_backward)")
            raise
    if not any(found):
        return None
    if len(found[0]) != 1 or any(one != found[0] for one in found):
        raise ValueError(
            f"table {table!r} must have one optimizer, and torch's own "
            f"_apply_optimizer_in_backward gave its parameters {found}"
        )
    return found[0][0]


def _as_fused(stepper: Any, parameter: Any, number: int) -> Optimizer:
    """Return optimizer `number` that torch gave a parameter, with the numbers that it has now."""
    arguments, now = parameter._optimizer_kwargs[number], stepper.param_groups[0]
    numbers = {"lr": now["lr"], **{name: now.get(name, arguments[name]) for name in arguments}}
    return from_torch(parameter._optimizer_classes[number], numbers)


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
