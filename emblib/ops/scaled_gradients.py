"""Gradients that a `torch.amp.GradScaler` has scaled, in updates during backward.

A scaler multiplies the loss, divides the gradients of the parameters by the same number before the
optimizer steps, and skips steps whose gradients are not finite. Tables that are updated in backward
do the same in backward: they divide by the scale, a tensor on the device, and skip the update of a
gradient that is not finite; the host does not wait. `GradScaler.scale` is wrapped to mark the
losses that it returns; the backward of a marked loss is known by the id of its graph task.

Either all ranks skip a step or none does: sharded collections call `note_finite` with the result of
the other ranks.
"""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.amp import GradScaler

_MARK = "_emblib_scalers"  # attribute of a wrapped method: the record of scalers
# Maximum number of backwards whose scale is stored: nested ones, and those of other threads. A
# further one drops the oldest.
_MAX_TASKS = 64


class _ScalerRecord:
    """A scaler, and whether it has scaled a loss since its last `update`."""

    def __init__(self, scaler: GradScaler) -> None:
        self.reference = weakref.ref(scaler)
        self.has_scaled = False


# The scalers of the process, by id because a subclass may define equality without a hash.
_Scalers = dict[int, _ScalerRecord]


class _BackwardScale:
    """The scale of a backward, and whether gradients of other ranks are finite, if known."""

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale
        self.is_finite: Tensor | None = None


_scale_of_task: OrderedDict[int, _BackwardScale] = OrderedDict()  # by the id of a graph task


def _record_of(scalers: _Scalers, scaler: GradScaler) -> _ScalerRecord:
    """Return the record of a scaler, made at its first use and removed with the scaler."""
    record = scalers.get(id(scaler))
    if record is None or record.reference() is not scaler:
        record = scalers[id(scaler)] = _ScalerRecord(scaler)
        weakref.finalize(scaler, scalers.pop, id(scaler), None)
    return record


def _wrap_method(name: str, method: Callable[..., Any], scalers: _Scalers) -> Callable[..., Any]:
    """Wrap the method `name` of `GradScaler` to record its scaler, and losses that it scales."""

    @functools.wraps(method)
    def call_and_record(self: GradScaler, *arguments: Any, **options: Any) -> Any:
        result = method(self, *arguments, **options)
        if torch.compiler.is_compiling():
            return result
        record = _record_of(scalers, self)
        if name == "scale":
            scale = getattr(self, "_scale", None)
            record.has_scaled = True
            if self.is_enabled() and isinstance(scale, Tensor):
                for loss in _tensors(result):
                    mark_scaled(loss, scale)
        elif name == "update":
            record.has_scaled = False
        return result

    setattr(call_and_record, _MARK, scalers)
    return call_and_record


def _tensors(value: Any) -> Iterable[Tensor]:
    """Yield the tensors in a value or in nested iterables of values."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Iterable):
        for item in value:
            yield from _tensors(item)


def _record_scalers() -> _Scalers:
    """Wrap `GradScaler` and all its subclasses, also future ones, to record every scaler.

    Constructor and unpickling are wrapped to record new scalers, `scale` and `update` to record
    scalers that exist already. Loading this module again wraps nothing twice. Returns the records.
    """
    scalers: _Scalers = getattr(GradScaler.__init__, _MARK, {})
    scaler_classes: list[type] = [GradScaler]
    for cls in scaler_classes:  # grows in the loop
        scaler_classes.extend(cls.__subclasses__())
        _wrap_methods(cls, scalers)
    if "__init_subclass__" not in vars(GradScaler):
        any_class: Any = GradScaler
        any_class.__init_subclass__ = classmethod(functools.partial(_wrap_subclass, scalers))
    return scalers


def _wrap_methods(cls: type, scalers: _Scalers) -> None:
    """Make the methods of a class of scalers record what they do."""
    for name in ("__init__", "__setstate__", "scale", "update"):
        method = vars(cls).get(name)
        if method is not None and not hasattr(method, _MARK):
            setattr(cls, name, _wrap_method(name, method, scalers))


def _wrap_subclass(scalers: _Scalers, cls: type, **options: Any) -> None:
    """Wrap the methods of a new subclass: the `__init_subclass__` of `GradScaler`."""
    base: Any = super
    base(GradScaler, cls).__init_subclass__(**options)
    _wrap_methods(cls, scalers)


_scalers = _record_scalers()


def mark_scaled(loss: Tensor, scale: Tensor) -> None:
    """Record that gradients of every backward from `loss` are multiplied by `scale`, a scalar."""
    _mark_loss(loss, lambda: _BackwardScale(scale))


def _mark_loss(loss: Tensor, make_scale: Callable[[], _BackwardScale]) -> None:
    """Make each backward that begins at `loss` record the scale that `make_scale` returns."""
    if not loss.requires_grad:
        return

    def record_scale(grad: Tensor) -> None:
        _scale_of_task[torch._C._current_graph_task_id()] = make_scale()
        while len(_scale_of_task) > _MAX_TASKS:
            _scale_of_task.popitem(last=False)

    loss.register_hook(record_scale)


def mark_nested(output: Tensor) -> None:
    """Record that a nested backward from `output` has the scale of the running backward."""
    outer_scale = _running_scale()
    if outer_scale is not None:
        _mark_loss(output, lambda: outer_scale)


def note_finite(is_finite: Tensor) -> None:
    """Record whether other gradients of the running, scaled backward are finite, a bool scalar.

    Later updates of this backward are skipped if it is false.
    """
    running_scale = _running_scale()
    assert running_scale is not None
    others = running_scale.is_finite
    running_scale.is_finite = is_finite if others is None else others & is_finite


def _running_scale() -> _BackwardScale | None:
    """Return the recorded scale of the running backward; None if there is none."""
    return _scale_of_task.get(torch._C._current_graph_task_id())


def recorded_scale() -> Tensor | None:
    """Return the recorded scale of the running backward, a scalar tensor; None if there is none."""
    running_scale = _running_scale()
    return None if running_scale is None else running_scale.scale


def scale_of_backward() -> Tensor | None:
    """Return the scale of the running backward, a scalar tensor; None if it is not scaled.

    In a graph that is being compiled this returns None, see `step_increment_if_unscaled`.

    Raises:
        RuntimeError: a scaler is in use, and it is unknown whether it scaled this loss.
    """
    if not (_scalers or _scale_of_task) or torch.compiler.is_compiling():
        return None
    scale = recorded_scale()
    if scale is None:
        for record in list(_scalers.values()):
            scaler = record.reference()
            if scaler is not None and record.has_scaled and scaler.is_enabled():
                raise RuntimeError(
                    "a torch.amp.GradScaler is in use, but this backward did not begin at a loss "
                    "that it returned, so tables that are updated in backward cannot know whether "
                    "to divide by its scale: this happens in a backward within another one (use "
                    "use_reentrant=False in torch.utils.checkpoint), with a scaler that keeps its "
                    "scale elsewhere than GradScaler, and for an unscaled loss between scale() and "
                    "update(); or make the optimizer of the tables deferred=True, and step "
                    "FusedOptimizer with the scaler"
                )
    return scale


class UnscaledGradient(NamedTuple):
    """A gradient divided by its scale.

    Attributes:
        gradient: the float32 gradient, in the shape of the scaled one.
        is_finite: bool scalar on its device: whether it is finite, and the gradients of other ranks
            are, as far as `note_finite` was called.
    """

    gradient: Tensor
    is_finite: Tensor

    def overflow(self) -> Tensor:
        """Return 0, or infinity for a gradient that is not finite: the gradient of an anchor.

        A scaler that finds infinity among the gradients of an optimizer lowers its scale.
        """
        return torch.where(self.is_finite, 0.0, torch.inf)


def unscale(grad: Tensor, scale: Tensor) -> UnscaledGradient:
    """Divide a gradient by its scale, in float32.

    `grad` has any shape, `scale` is a float32 scalar. The host waits only for a scale on another
    device. `is_finite` of the result is also false if gradients of other ranks are not finite, see
    `note_finite`.
    """
    inverse = scale.to(grad.device).double().reciprocal().float()
    gradient = grad.float() * inverse
    is_finite, running_scale = gradient.isfinite().all(), _running_scale()
    if running_scale is not None and running_scale.is_finite is not None:
        is_finite = is_finite & running_scale.is_finite.to(grad.device)
    return UnscaledGradient(gradient, is_finite)


def step_increment_if_unscaled(hyper: Tensor, grad: Tensor) -> Tensor | int:
    """Return 1, the increment of the step; in a compiled graph call an op that returns 1.

    The op raises RuntimeError if gradients are scaled when the graph runs. The graph cannot drop
    the op, because the step depends on it, nor move it out of backward, because it depends on
    `grad`.

    `hyper` are the float64 entries of `emblib.columns.Hyper`.
    """
    if not torch.compiler.is_compiling():
        return 1
    increment: Tensor = torch.ops.emblib_python.one_unless_scaled(hyper, grad)
    return increment


def _one_unless_scaled(hyper: Tensor, grad: Tensor) -> Tensor:
    """Return a scalar 1 like `hyper`; raise RuntimeError if the backward is scaled."""
    if scale_of_backward() is not None:
        raise RuntimeError(
            "the gradients of a compiled graph are scaled by a torch.amp.GradScaler, and updates "
            "in backward are compiled without division by its scale: call the tables outside the "
            "compiled part, make their optimizer deferred=True, or use autocast with bfloat16, "
            "which needs no scaler"
        )
    return hyper.new_ones(())


def _define_op() -> torch.library.Library | None:
    """Define `one_unless_scaled`, which a compiled backward calls; None if it exists."""
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
