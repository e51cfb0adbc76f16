"""Refuse derivatives that the ops do not have, where torch would silently return zeros.

If an op has no forward-mode formula, torch drops the tangents of its arguments. Torch's
`once_differentiable` cuts the graph, so `torch.autograd.functional.jvp`, which differentiates
twice, sees a result that does not depend on its input and returns zeros.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from emblib.grad_mode import in_grad_mode


def refuse_tangents(operation: str, *tensors: Tensor | None) -> None:
    """Raise NotImplementedError if one of the tensors has a tangent, which an op would drop.

    Outside of forward mode this reads one number. In compiled code it does nothing.

    Args:
        operation: name of the operation in the error.
        tensors: the differentiable arguments of an op.
    """
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    for tensor in tensors:
        if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"forward-mode differentiation of {operation} (torch.func.jvp and jacfwd, dual "
                "tensors) is not supported, with or without no_grad: use reverse mode, e.g. "
                "backward(); or look up with the tangent as the sample weights, in which the "
                "output is linear"
            )


Backward = Callable[..., Any]


def once_differentiable(backward: Backward) -> Backward:
    """Wrap the backward of a Function so that differentiating its results raises.

    Unlike with `torch.autograd.function.once_differentiable`, the results depend on the incoming
    gradients, so a derivative with respect to these raises too instead of being zero.
    """

    @wraps(backward)
    def call(ctx: Any, *grads: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *grads)
        results = in_grad_mode(backward, enabled=False)(ctx, *grads)
        sources = [grad for grad in grads if isinstance(grad, Tensor) and grad.requires_grad]
        grads_out = results if isinstance(results, tuple) else (results,)
        tensors = [grad for grad in grads_out if grad is not None]
        if not sources or not tensors:
            return results
        guarded = iter(_NotTwice.apply(len(tensors), *tensors, *sources))
        return tuple(None if grad is None else next(guarded) for grad in grads_out)

    return call


class _NotTwice(torch.autograd.Function):
    """Pass on the first `count` tensors; a gradient of them raises."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.detach() for grad in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "trying to differentiate twice a function that was marked with @once_differentiable: "
            "lookups have no second derivatives"
        )
