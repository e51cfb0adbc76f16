"""Optimizers that torch or emblib applies in backward, as each gradient is complete.

Tables get fused optimizers, and other parameters one of `torch.optim` each, which a hook steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from emblib.collections.configs import TableConfig
from emblib.collections.optimizers.conversions import from_torch
from emblib.optim import NO_UPDATE, Optimizer
from emblib.specs import check_bool, format_config
from emblib.storage.handles import TableHandle, handle_of, is_marked_by_torch
from emblib.tables.parameters import is_updated_in_backward

_IN_BACKWARD_ATTRIBUTE = "_in_backward_optimizers"  # torch sets it too, on the parameter


def apply_optimizer_in_backward(
    optimizer: Any,
    params: Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Update parameters in backward, so that gradients exist only there.

    Tables of collections get a fused optimizer: their weights are kept, their optimizer states are
    reset. Call this before sharding. Any other parameter is updated as soon as its gradient is
    complete, and the gradient is freed.

    Args:
        optimizer: a class of `torch.optim` (for tables one that `from_torch` converts), or an
            optimizer of `emblib.optim`, or a class of those.
        params: parameters to update in backward.
        optimizer_kwargs: arguments of the class; None for an optimizer, which has its own.

    Raises:
        TypeError: a parameter cannot have this optimizer; it already has one in backward, and that
            is from torch, or the parameter is not of a table; or `optimizer` is an optimizer of
            `torch.optim`, or one of `emblib.optim` that has `optimizer_kwargs`.
        ValueError: tables do not support an argument or the optimizer. Tables of a collection
            change together, or not at all; those of collections before it have changed.
    """
    arguments = dict(optimizer_kwargs or {})
    if isinstance(optimizer, Optimizer) and arguments:
        raise TypeError(
            f"optimizer_kwargs {arguments} are for a class, got the optimizer "
            f"{format_config(optimizer)}: set them in it"
        )
    tables: dict[int, tuple[Any, dict[str, Optimizer]]] = {}
    other_parameters = []
    for parameter in params:
        _check_not_marked_by_torch(parameter)
        handle = handle_of(parameter)
        owner = None if handle is None else handle.owner()
        if handle is None or owner is None:
            other_parameters.append(parameter)
            continue
        fused_optimizer = (
            optimizer if isinstance(optimizer, Optimizer) else from_torch(optimizer, arguments)
        )
        _, optimizers_by_name = tables.setdefault(id(owner), (owner, {}))
        optimizers_by_name[handle.name] = fused_optimizer
    if other_parameters:
        _check_of_torch(optimizer)
        _check_without_optimizer(other_parameters)
    torch_optimizers = [
        (parameter, optimizer([parameter], **arguments)) for parameter in other_parameters
    ]
    for owner, optimizers_by_name in tables.values():
        owner.set_optimizers(optimizers_by_name)
    for parameter, torch_optimizer in torch_optimizers:
        _step_in_backward(parameter, torch_optimizer)


def _check_not_marked_by_torch(parameter: nn.Parameter) -> None:
    if is_marked_by_torch(parameter):
        raise TypeError(
            "a parameter already has an optimizer in backward, from torch's own "
            "_apply_optimizer_in_backward; give it to one call only"
        )


def trained_configs(collection: Any, optimizer: Optimizer | None = None) -> tuple[TableConfig, ...]:
    """Return the configurations of a collection, with the optimizers that torch set in backward.

    `torch.distributed.optim._apply_optimizer_in_backward` steps a parameter in a hook of its
    gradient. Sharding replaces the parameters, so a sharded table runs the same optimizer fused. A
    shared table without one has the optimizer of its `SharedTables`, else `optimizer`, else
    `NO_UPDATE`, never the collection's. All other configurations are returned unchanged.

    Args:
        collection: collection of `emblib`; nothing in it is changed.
        optimizer: optimizer that sharding gives to tables without one; None for none.

    Raises:
        TypeError: tables do not support an optimizer that torch set, or `optimizer` is not of
            `emblib.optim`.
        ValueError: tables do not support an argument of an optimizer, a table has several
            optimizers, or its optimizer has made steps, whose state would be lost.
    """
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"optimizer must be None or one of emblib.optim, e.g. optim.SGD(lr=0.01), got "
            f"{optimizer!r}"
        )
    configs, handles = [], collection.handles()
    shared = collection.shared_tables()
    for config in collection.configs:
        optimizer_of_table = _optimizer_set_by_torch(config.name, handles[config.name])
        if optimizer_of_table is None and config.name in shared:
            optimizer_of_table = shared[config.name].config.optimizer or optimizer or NO_UPDATE
        configs.append(
            config if optimizer_of_table is None else replace(config, optimizer=optimizer_of_table)
        )
    return tuple(configs)


def _optimizer_set_by_torch(table: str, handle: TableHandle) -> Optimizer | None:
    """Return the optimizer that `_apply_optimizer_in_backward` set for a table, or None."""
    parameters: list[Any] = list(handle.parameters())
    optimizers: list[list[Optimizer]] = []
    for parameter in parameters:
        torch_optimizers = (
            getattr(parameter, _IN_BACKWARD_ATTRIBUTE) if is_marked_by_torch(parameter) else []
        )
        states = [torch_optimizer.state.get(parameter, {}) for torch_optimizer in torch_optimizers]
        if any(float(state.get("step", 0)) > 0 for state in states):
            raise ValueError(
                f"the optimizer in backward of table {table!r} has made steps, and its state would "
                "be lost: shard the model before it is trained"
            )
        try:
            optimizers.append(
                [
                    _to_fused(torch_optimizer, parameter, index)
                    for index, torch_optimizer in enumerate(torch_optimizers)
                ]
            )
        except (TypeError, ValueError) as error:
            error.add_note(f"(of table {table!r}, by torch's own _apply_optimizer_in_backward)")
            raise
    if not any(optimizers):
        return None
    if len(optimizers[0]) != 1 or any(other != optimizers[0] for other in optimizers):
        raise ValueError(
            f"table {table!r} must have one optimizer, and torch's own "
            f"_apply_optimizer_in_backward gave its parameters {optimizers}"
        )
    return optimizers[0][0]


def _to_fused(torch_optimizer: Any, parameter: Any, index: int) -> Optimizer:
    """Convert the optimizer of this index that torch set for a parameter, as it is now."""
    arguments, options = parameter._optimizer_kwargs[index], torch_optimizer.param_groups[0]
    hyperparameters = {
        "lr": options["lr"],
        **{name: options.get(name, arguments[name]) for name in arguments},
    }
    return from_torch(parameter._optimizer_classes[index], hyperparameters)


def _check_of_torch(optimizer: Any) -> None:
    if isinstance(optimizer, Optimizer) or (
        isinstance(optimizer, type) and issubclass(optimizer, Optimizer)
    ):
        raise TypeError(
            f"{optimizer!r} is of emblib.optim, which updates tables of collections; for other "
            "parameters give a class of torch.optim"
        )
    if not callable(optimizer):
        raise TypeError(
            f"optimizer must be a class, e.g. torch.optim.Adam, got {optimizer!r}: the arguments "
            "are optimizer_kwargs"
        )


def _check_without_optimizer(parameters: Sequence[nn.Parameter]) -> None:
    has_optimizer = any(hasattr(parameter, _IN_BACKWARD_ATTRIBUTE) for parameter in parameters)
    if has_optimizer or len({id(parameter) for parameter in parameters}) < len(parameters):
        raise TypeError(
            "a parameter already has an optimizer in backward; give it to one call only"
        )


def _step_in_backward(parameter: nn.Parameter, torch_optimizer: torch.optim.Optimizer) -> None:
    """Step the optimizer of one parameter when its gradient is complete; free the gradient."""
    marked_parameter: Any = parameter
    setattr(marked_parameter, _IN_BACKWARD_ATTRIBUTE, [torch_optimizer])

    def step(parameter_with_grad: Any) -> None:
        torch_optimizer.step()
        parameter_with_grad.grad = None

    parameter.register_post_accumulate_grad_hook(step)


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], *, include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters without an optimizer in backward; with `include`, those with one.

    Raises TypeError, when the iteration begins, if `include` is not a bool.
    """
    check_bool("include", include)
    for name, parameter in named_parameters:
        is_marked = hasattr(parameter, _IN_BACKWARD_ATTRIBUTE) or is_updated_in_backward(parameter)
        if is_marked is include:
            yield name, parameter
