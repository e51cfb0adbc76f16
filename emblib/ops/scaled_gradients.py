"""Refuse gradients that a `torch.amp.GradScaler` has scaled: a fused update cannot undo that.

A scaler multiplies the loss, divides the gradients of the parameters by the same number before the
optimizer steps, and leaves out steps whose gradients overflowed. Fused tables have applied theirs
in backward by then.
"""

import gc
import sys
import weakref
from collections.abc import Iterator

import torch
from torch.amp import GradScaler


class _LiveScalers:
    """The `GradScaler`s of the process, found without changing anything of torch.

    Every instance refers to its class, so the class's reference count says when to look again.
    """

    def __init__(self) -> None:
        self._references = -1
        self._found: list[weakref.ref[GradScaler]] = []

    def __iter__(self) -> Iterator[GradScaler]:
        found = [reference() for reference in self._found]
        if None in found or _references() != self._references:
            self._look()
            found = [reference() for reference in self._found]
        return (scaler for scaler in found if scaler is not None)

    def _look(self) -> None:
        # `type`, not isinstance: proxies answer __class__ with work of their own.
        here = [weakref.ref(x) for x in gc.get_objects() if issubclass(type(x), GradScaler)]
        self._found, self._references = here, _references()


def _references() -> int:
    """Return the number of references to `GradScaler` and its subclasses."""
    classes: list[type] = [GradScaler]
    for cls in classes:
        classes.extend(cls.__subclasses__())
    return sum(sys.getrefcount(cls) for cls in classes)


_scalers = _LiveScalers()


def refuse_scaled_gradients() -> None:
    """Raise RuntimeError where a `GradScaler` that has scaled a loss is in use.

    Which loss it was cannot be seen from a backward, so a scaler of another model counts too. A
    compiled backward does not look.
    """
    if torch.compiler.is_compiling():
        return
    for scaler in _scalers:
        if scaler.is_enabled() and getattr(scaler, "_scale", None) is not None:
            raise RuntimeError(
                "a torch.amp.GradScaler is in use, and tables with a fused optimizer apply their "
                "gradients in backward, before the scaler divides them by its scale or leaves out "
                "a step: use autocast with bfloat16, which needs no scaler (GradScaler(enabled="
                "False)), or train the tables with an optimizer of torch.optim that the scaler "
                "steps (optim.External(); optimizer=None of a collection); a scaler of another "
                "model must be deleted first"
            )
