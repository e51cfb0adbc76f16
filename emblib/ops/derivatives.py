"""Refuse derivatives and transforms that lookups do not have.

If an op has no forward-mode formula, torch drops the tangents of its arguments. Torch's
`once_differentiable` cuts the graph, so `torch.autograd.functional.jvp`, which differentiates
twice, sees a result that does not depend on its input and returns zeros. Transforms of `torch.func`
fail with errors of torch that name no alternative.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from emblib.grad_mode import in_grad_mode


def refuse_tangents(subject: str, *tensors: Tensor | None) -> None:
    """Raise NotImplementedError if one of the tensors has a tangent, which an op would drop.

    Outside of forward mode this reads one number. In compiled code it does nothing.

    Args:
        subject: name of the tensors in the error.
        tensors: the differentiable arguments of an op; None is skipped.
    """
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"forward-mode differentiation of {subject} (torch.func.jvp and jacfwd, dual "
                "tensors) is not supported, with or without no_grad: use reverse mode, e.g. "
                "backward(); or look up with the tangent as the sample weights, in which the "
                "output is linear"
            )


class FreezableTables(Protocol):
    """A module of tables that may be frozen."""

    @property
    def is_frozen(self) -> bool:
        """Return whether no table is trained."""


def refuse_transforms(
    subject: str, *tensors: Tensor | None, module: FreezableTables | None = None
) -> None:
    """Raise NotImplementedError for a lookup in a transform of `torch.func` that it does not have.

    Refuses tangents, see `refuse_tangents`, tensors that `vmap` has batched, and, in any transform,
    lookups that autograd records. In compiled code it does nothing.

    Args:
        subject: name of the differentiable arguments in the error for a tangent.
        tensors: tensors of the batch, and parameters that autograd records; None is skipped.
        module: module whose lookups autograd records unless it is frozen; None if autograd records
            only what requires grad among `tensors`.
    """
    interpreter = torch._C._functorch.peek_interpreter_stack()
    if (interpreter is None and forward_ad._current_level < 0) or torch.compiler.is_compiling():
        return
    refuse_tangents(subject, *tensors)
    if interpreter is None:
        return
    arguments = [tensor for tensor in tensors if tensor is not None]
    is_recorded = torch.is_grad_enabled() and (
        (module is not None and not module.is_frozen) or any(t.requires_grad for t in arguments)
    )
    if is_recorded or any(map(_is_batched, arguments)):
        raise NotImplementedError(
            "lookups have no rules for the transforms of torch.func (vmap, grad, jacrev, ...): "
            "differentiate with backward(), or with torch.autograd.grad or "
            "torch.autograd.functional.jacobian after requires_grad_(False) of fused tables, which "
            "every backward updates; in place of vmap look up in a loop, or once for a larger "
            "batch. Lookups that need no gradient may be under torch.no_grad() in a "
            "transform of other tensors"
        )


def _is_batched(tensor: Any) -> bool:
    """Return whether `vmap` or `is_grads_batched=True` has batched a tensor."""
    functorch = torch._C._functorch
    return isinstance(tensor, Tensor) and (
        functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
    )


Backward = Callable[..., Any]


def once_differentiable(backward: Backward) -> Backward:
    """Wrap the backward of a Function so that differentiating or batching its results raises.

    Unlike with `torch.autograd.function.once_differentiable`, the results depend on the incoming
    gradients, so a derivative in these gradients raises too instead of being zero. A second
    derivative raises RuntimeError, batched gradients raise NotImplementedError.
    """

    @wraps(backward)
    def guarded_backward(ctx: Any, *grads: Any) -> Any:
        is_recorded = torch.is_grad_enabled()  # create_graph=True
        run = in_grad_mode(backward, enabled=False) if is_recorded else backward
        try:
            results = run(ctx, *grads)
        except RuntimeError as error:
            if not any(map(_is_batched, grads)):
                raise
            raise NotImplementedError(
                "the backward of lookups takes one gradient at a time: call it in a loop in place "
                "of is_grads_batched=True and vmap, or use torch.autograd.functional.jacobian "
                "without vectorize=True, after requires_grad_(False) of fused tables, which every "
                "backward updates"
            ) from error
        if not is_recorded:
            return results
        sources = [grad for grad in grads if isinstance(grad, Tensor) and grad.requires_grad]
        result_grads = results if isinstance(results, tuple) else (results,)
        tensors = [grad for grad in result_grads if grad is not None]
        if not sources or not tensors:
            return results
        guarded = iter(_RefuseDerivative.apply(len(tensors), *tensors, *sources))
        return tuple(None if grad is None else next(guarded) for grad in result_grads)

    return guarded_backward


class _RefuseDerivative(torch.autograd.Function):
    """Function that returns its first `count` tensors; a derivative of them raises RuntimeError.

    They depend on all `tensors`.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.detach() for grad in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "trying to differentiate twice a function that was marked with @once_differentiable: "
            "lookups have no second derivatives"
        )
