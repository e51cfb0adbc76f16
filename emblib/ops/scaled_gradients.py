"""Refuse gradients that a `torch.amp.GradScaler` has scaled: a fused update cannot undo that.

A scaler multiplies the loss, divides the gradients of the parameters by the same number before the
optimizer steps, and leaves out steps whose gradients overflowed. Fused tables have applied theirs
in backward by then.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler

_MARK = "_emblib_scalers"
# The scalers of the process by their id: a subclass may define equality without a hash.
_Scalers = weakref.WeakValueDictionary[int, GradScaler]


def _recording(method: Callable[..., Any], scalers: _Scalers) -> Callable[..., Any]:
    """Wrap a method of `GradScaler` to record its scaler as well."""

    @functools.wraps(method)
    def record(self: GradScaler, *arguments: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            scalers[id(self)] = self
        return method(self, *arguments, **options)

    setattr(record, _MARK, scalers)
    return record


def _record_scalers() -> _Scalers:
    """Record every `GradScaler` when it is made, copied or loaded; return the record.

    Methods that scale record those that were made before: of the base class, and of the subclasses
    there are. Nothing is wrapped twice, also where this module is loaded again.
    """
    scalers: _Scalers = getattr(GradScaler.__init__, _MARK, weakref.WeakValueDictionary())
    classes: list[type] = [GradScaler]
    for cls in classes:
        classes.extend(cls.__subclasses__())
        for name in ("__init__", "__setstate__", "scale"):
            method = vars(cls).get(name)
            if method is not None and not hasattr(method, _MARK):
                setattr(cls, name, _recording(method, scalers))
    return scalers


_scalers = _record_scalers()


def refuse_scaled_gradients() -> None:
    """Raise RuntimeError where a `GradScaler` that has scaled a loss is in use.

    Which loss it was cannot be seen from a backward, so a scaler of another model counts too. In a
    graph that is being compiled this does nothing, see `counted_step`.
    """
    if not torch.compiler.is_compiling():
        _refuse()


def counted_step(hyper: Tensor, grad: Tensor) -> Tensor | int:
    """Return the 1 that an update adds to the step; in a compiled graph it is an op that checks.

    The op raises as `refuse_scaled_gradients` does, whenever the graph runs. The graph keeps it,
    since the step depends on it, and keeps it in backward, since it depends on `grad`.
    """
    if not torch.compiler.is_compiling():
        return 1
    one: Tensor = torch.ops.emblib_python.one_unless_scaled(hyper, grad)
    return one


def _refuse() -> None:
    for reference in _scalers.valuerefs():
        scaler = reference()
        if (
            scaler is not None
            and scaler.is_enabled()
            and getattr(scaler, "_scale", None) is not None
        ):
            raise RuntimeError(
                "a torch.amp.GradScaler is in use, and tables with a fused optimizer apply their "
                "gradients in backward, before the scaler divides them by its scale or leaves out "
                "a step: use autocast with bfloat16, which needs no scaler (GradScaler(enabled="
                "False)), or train the tables with an optimizer of torch.optim that the scaler "
                "steps (optim.External(); optimizer=None of a collection); a scaler of another "
                "model must be deleted first"
            )


def _one_unless_scaled(hyper: Tensor, grad: Tensor) -> Tensor:
    _refuse()
    return hyper.new_ones(())


def _define_op() -> torch.library.Library | None:
    if hasattr(torch.ops.emblib_python, "one_unless_scaled"):  # this module is loaded again
        return None
    # Not `emblib`, which has the ops of csrc.
    library = torch.library.Library("emblib_python", "FRAGMENT")
    library.define("one_unless_scaled(Tensor hyper, Tensor grad) -> Tensor")
    library.impl("one_unless_scaled", _one_unless_scaled, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "emblib_python::one_unless_scaled", lambda hyper, grad: hyper.new_empty(()), lib=library
    )
    return library


_library = _define_op()
