"""Parameter classes of tables, which forward uses of a parameter to its table, or refuse them.

Kernels read and update memory that parameters only view. So some uses of a parameter would have no
effect on its table, or miss rows, and torch would not say so.

- `TableParameter` freezes or trains its tables with `requires_grad`. If backward updates the
  tables, a gradient that arrives at the parameter raises.
- `ViewParameter` is the parameter of one table of a collection; `.data = ...` raises, too.
- `CachedParameter` is a view behind a row cache, which is written back before the parameter is
  read, and emptied before it is written.
- `IncompleteParameter` lacks the tables of its module that are outside the device; writes raise.
- `DeferredParameter` has gradients, which a deferred optimizer applies outside of backward.

The other functions here raise, with advice, where a wrapper of torch replaces, replicates or
averages tables in a way that they do not support.
"""

import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils.weak import WeakTensorKeyDictionary

from emblib.ops.autograd import HAS_GRAD_DTYPE, updates_in_backward
from emblib.optim import Optimizer


class Owner(Protocol):
    """An object that is notified when one of its parameters is frozen, trained, read or written.

    Reads and writes are those of a `CachedParameter`.
    """

    def set_trained(self, parameter: nn.Parameter, *, trained: bool) -> None:
        """Train the memory of the parameter from the next forward on, or freeze it."""

    def before_read(self) -> None:
        """Write cached rows back, so that the parameter has the newest values."""

    def before_write(self) -> None:
        """Write cached rows back and empty the cache. A RuntimeError refuses the write."""


_owners = WeakTensorKeyDictionary()  # parameter -> weak reference to its owner
_OPTIMIZERS_ATTRIBUTE = "_in_backward_optimizers"


def _optimizers_of(parameter: Any) -> list[Any]:
    """Return the value of `_in_backward_optimizers`; AttributeError if the parameter has none.

    `DistributedDataParallel` would take optimizers of tables for torch's own. It gets an
    AttributeError for tables with gradients, and RuntimeError for tables that backward updates.
    """
    optimizers: list[Any] | None = parameter.__dict__.get(_OPTIMIZERS_ATTRIBUTE)
    if optimizers is None:
        raise AttributeError(_OPTIMIZERS_ATTRIBUTE)
    if sys._getframe(1).f_globals.get("__name__") == DistributedDataParallel.__module__:
        table_optimizers = [
            optimizer for optimizer in optimizers if isinstance(optimizer, Optimizer)
        ]
        if any(map(updates_in_backward, table_optimizers)):
            refuse_replicas()
        if table_optimizers:
            raise AttributeError(_OPTIMIZERS_ATTRIBUTE)
    return optimizers


def _set_optimizers(parameter: Any, optimizers: list[Any]) -> None:
    parameter.__dict__[_OPTIMIZERS_ATTRIBUTE] = optimizers


def _delete_optimizers(parameter: Any) -> None:
    del parameter.__dict__[_OPTIMIZERS_ATTRIBUTE]


class DeferredParameter(nn.Parameter):
    """A parameter of a module outside collections whose optimizer is deferred."""

    _in_backward_optimizers = property(_optimizers_of, _set_optimizers, _delete_optimizers)


class TableParameter(nn.Parameter):
    """A parameter whose `requires_grad` freezes or trains its tables.

    If backward updates the tables (`is_updated_in_backward`), a backward in which a gradient
    arrives at the parameter raises (`refuse_gradients`). Otherwise the parameter gets gradients.
    """

    _in_backward_optimizers = property(_optimizers_of, _set_optimizers, _delete_optimizers)

    def requires_grad_(self, requires_grad: Any = True) -> Any:
        """Train the table from the next forward on, or freeze it."""
        super().requires_grad_(requires_grad)
        if requires_grad:
            refuse_gradients(self)
        _notify_owner(self)
        return self

    def register_hook(self, hook: Any) -> Any:
        """Register a hook of the gradient; RuntimeError if backward updates the table."""
        self._check_gets_gradient()
        return super().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Register a hook of the gradient; RuntimeError if backward updates the table."""
        self._check_gets_gradient()
        return super().register_post_accumulate_grad_hook(hook)

    def _check_gets_gradient(self) -> None:
        if is_updated_in_backward(self):
            raise RuntimeError(
                "backward updates this table and leaves no gradient, so a hook of the gradient "
                "would never run: make the optimizer of the table deferred=True"
            )

    @property
    def requires_grad(self) -> bool:
        """Return whether the parameter is trained.

        `DistributedDataParallel` gets False for a parameter that a module outside collections
        updates in backward: it would wait for a gradient that never comes.
        """
        caller = sys._getframe(1).f_globals.get("__name__")
        if caller == DistributedDataParallel.__module__ and _is_of_bare_module(self):
            return False
        return bool(Tensor.requires_grad.__get__(self))  # type: ignore[attr-defined]

    @requires_grad.setter
    def requires_grad(self, requires_grad: Any) -> None:
        self.requires_grad_(requires_grad)

    if torch.torch_version.TorchVersion(torch.__version__) < "2.13":

        @property
        def is_leaf(self) -> bool:  # type: ignore[override]
            """Return whether the parameter is a leaf.

            Compiled graphs of these versions of torch cannot update a leaf that requires a
            gradient, so they get False.
            """
            caller = sys._getframe(1).f_globals.get("__name__")
            if caller == "torch._subclasses.meta_utils" and is_updated_in_backward(self):
                return False
            return bool(Tensor.is_leaf.__get__(self))  # type: ignore[attr-defined]


_GRAPH_CALLS = "torch._functorch._aot_autograd.runtime_wrappers"  # calls compiled graphs


def _end_graph() -> None:
    """End the graph that is being compiled; the current torch function then runs eagerly.

    With `fullgraph=True` the compiler raises.
    """
    torch._dynamo.graph_break("emblib checks this use of a table's parameter")  # noqa: SLF001


class _RefusesWrites:
    """Mixin of tensors that have only some tables of a module: writing them raises."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func`; raise RuntimeError if it writes. Aliases in its result refuse writes, too."""
        kwargs = kwargs or {}
        target = args[0] if args else next(iter(kwargs.values()), None)
        if _refuses_writes(_written_arguments(func, args, kwargs)):
            if torch.compiler.is_dynamo_compiling():
                _end_graph()
            refuse_incomplete()
        if torch.compiler.is_compiling():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            result = _read_only_array(func, func(*args, **kwargs))
            # Compiled graphs take no subclasses. Before torch 2.13 their calls detach parameters.
            caller = sys._getframe(1).f_globals.get("__name__")
            if isinstance(func, OpOverload) or caller == _GRAPH_CALLS:
                return result
            return _map_aliases(result, target, lambda t: t.as_subclass(IncompleteValues))


class IncompleteValues(_RefusesWrites, Tensor):
    """The values of an `IncompleteParameter`; pickled and copied as a plain tensor."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return _as_plain(self).clone()


class IncompleteParameter(_RefusesWrites, TableParameter):
    """The weights of a module that stores others of its tables outside the device."""


def refuse_incomplete() -> NoReturn:
    """Raise RuntimeError for a write to the parameters of a module that would miss tables."""
    raise RuntimeError(
        "tables of this module are stored outside the device and are not in its parameters, so "
        "writing or replacing parameters would miss them: write the tensors that table_weights() "
        "returns, or load a state dict; averages such as EMA need tables on the device"
    )


def refuse_averages(*, of_buffers: bool = False) -> None:
    """Raise RuntimeError if `AveragedModel` is copying the module whose method calls this.

    The caller is a module whose rows have no average.

    Args:
        of_buffers: whether its rows are buffers, which are averaged only with `use_buffers=True`;
            if not, its rows move as keys come and go.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != AveragedModel.__module__:
        frame = frame.f_back
    if frame is None or (of_buffers and not frame.f_locals.get("use_buffers")):
        return
    reason = (
        "AveragedModel with use_buffers=True would average the codes of quantised rows: leave "
        "use_buffers out, or"
        if of_buffers
        else "AveragedModel averages rows by position, and in a hash table, or a tensor train with "
        "a cache, the position of a key changes as keys come and go, so that rows of different "
        "keys would be mixed:"
    )
    raise RuntimeError(
        f"{reason} average the rest of the model alone, e.g. AveragedModel(model.dense)"
    )


def _written_arguments(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments that a torch function writes, by its name and its keyword arguments.

    A function of `torch.nn.functional` writes if `inplace=True` or, in lookups, if `max_norm` is
    set. Parameter classes do not see the functions that it calls.
    """
    written_arguments = [kwargs.get("out")]
    if kwargs.get("max_norm") is not None:
        written_arguments += args
    elif _writes_first_argument(func) or kwargs.get("inplace"):
        written_arguments += [*args, *kwargs.values()][:1]
    return written_arguments


def _writes_first_argument(func: Any) -> bool:
    """Return whether the name of a torch function says that it writes its first argument."""
    if isinstance(func, OpOverload):  # ops of a compiled graph, among them updates of tables
        return False
    name = getattr(func, "__name__", "")
    if name == "__set__":
        return _attribute_name(func) == "data"
    if name.endswith("__"):
        return name == "__setitem__"
    return name.endswith("_") and name != "requires_grad_"


def _read_only_array(func: Any, result: Any) -> Any:
    """Return the result of a torch function; arrays of NumPy become read-only unless copies."""
    if func in (Tensor.numpy, Tensor.__array__):
        is_copy = result.size > 0 and result.flags.owndata  # an empty array owns its memory
        result.flags.writeable = is_copy
    return result


def _map_aliases(result: Any, target: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    """Return a result with `convert` applied to tensors in it that share memory with `target`.

    A result that is `target` itself stays as it is.
    """
    if isinstance(result, list | tuple) and type(result) in (list, tuple):
        return type(result)(_map_aliases(element, target, convert) for element in result)
    if not isinstance(result, Tensor) or not isinstance(target, Tensor) or result is target:
        return result
    if result.layout is not torch.strided or target.layout is not torch.strided:
        return result
    storage = target.untyped_storage()
    return convert(result) if result.untyped_storage()._cdata == storage._cdata else result


def _attribute_name(func: Any) -> str:
    """Return the name of the attribute that a getter or setter belongs to."""
    name: str = getattr(getattr(func, "__self__", None), "__name__", "")
    return name


def _refuses_writes(value: Any) -> bool:
    """Return whether a value is, or has in nested sequences, a tensor that cannot be written."""
    if isinstance(value, list | tuple):
        return any(map(_refuses_writes, value))
    return isinstance(value, _RefusesWrites)


class ViewParameter(TableParameter):
    """A parameter that views one table in the memory of a module, which lookups read."""

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer_classes":  # what torch's _apply_optimizer_in_backward appends to
            raise AttributeError(
                "backward updates this table by an optimizer that it already has; give "
                "apply_optimizer_in_backward the parameters of a collection made with "
                "optimizer=None, once"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def data(self) -> Tensor:
        """Return the values."""
        values: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return values

    @data.setter
    def data(self, values: Tensor) -> None:
        raise RuntimeError(
            "the parameter of a table is a view of the memory that lookups read, so .data = ... "
            "would have no effect on them: write into it, under torch.no_grad(), with "
            "parameter.copy_(values), or load a state dict"
        )


def _sync_with_cache(
    cls: type, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Run a torch function on a view of a table behind a cache.

    The cache is written back first, and emptied if `func` writes the view. Arrays of NumPy are
    read-only, because their writes are not seen. A graph that is being compiled ends before `func`,
    because a graph cannot contain these steps.
    """
    kwargs = kwargs or {}
    if _is_metadata(func):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling():
        _end_graph()
    target = args[0] if args else next(iter(kwargs.values()), None)
    for owner in _owners_behind(_written_arguments(func, args, kwargs)):
        owner.before_write()
    for owner in _owners_behind((*args, *kwargs.values())):
        owner.before_read()
    with torch._C.DisableTorchFunctionSubclass():
        result = _read_only_array(func, func(*args, **kwargs))
        owners = [weakref.ref(owner) for owner in _owners_behind(target)]
        if isinstance(func, OpOverload) or not owners:  # compiled graphs take no subclasses
            return result
        return _map_aliases(result, target, partial(_as_cached_values, owners[0]))


def _as_cached_values(owner: Any, alias: Tensor) -> Tensor:
    """Return an alias of a cached view, converted to `CachedValues` of the same owner."""
    values = alias.as_subclass(CachedValues)
    values.owner = owner
    return values


class CachedValues(Tensor):
    """The values of a `CachedParameter`; pickled and copied as a plain tensor."""

    owner: Any
    __torch_function__: Any = classmethod(_sync_with_cache)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _as_plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return _as_plain(self).clone()


class CachedParameter(ViewParameter):
    """A view of a table behind a cache, which may have newer rows."""

    __torch_function__: Any = classmethod(_sync_with_cache)


# Attributes and methods that neither read nor write values.
_METADATA = frozenset(
    {
        "dim",
        "element_size",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "is_inference",
        "is_shared",
        "ndimension",
        "nelement",
        "numel",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "size",
        "storage_offset",
        "stride",
        "__hash__",
        "__len__",
    }
)


def _is_metadata(func: Any) -> bool:
    """Return whether a torch function neither reads nor writes values, such as `shape`."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        return _attribute_name(func) not in ("data", "T", "mT", "H", "mH", "real", "imag")
    return name in _METADATA


def _owners_behind(value: Any) -> list[Owner]:
    """Return the owners of the cached views in a value, which may be a nested list or tuple."""
    if isinstance(value, list | tuple):
        return [owner for element in value for owner in _owners_behind(element)]
    reference = None
    if isinstance(value, CachedValues):
        reference = getattr(value, "owner", None)
    elif isinstance(value, CachedParameter):
        reference = _owners.get(value)
    owner = None if reference is None else reference()
    return [] if owner is None else [owner]


def _as_plain(values: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return values.as_subclass(Tensor)


def set_data(parameter: nn.Parameter, values: Tensor) -> None:
    """Make a parameter view the memory of `values`, of any shape; no value is copied."""
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.data.__set__(parameter, values)  # type: ignore[attr-defined]


def ask_for_float32_gradient(parameter: nn.Parameter) -> None:
    """Allow float32 gradients of a parameter of 16-bit weights, where torch has `grad_dtype`."""
    if HAS_GRAD_DTYPE:
        any_parameter: Any = parameter
        any_parameter.grad_dtype = torch.float32


def set_owner(parameter: nn.Parameter, owner: Owner, kind: type[TableParameter]) -> None:
    """Convert a parameter in place to class `kind`, which notifies `owner` and refuses gradients.

    `owner` is only weakly stored.
    """
    if type(parameter) is not kind:
        parameter.__class__ = kind
    _owners[parameter] = weakref.ref(owner)
    refuse_gradients(parameter)


def is_updated_in_backward(parameter: Any) -> bool:
    """Return whether backward updates the table of a parameter, and so leaves no gradient."""
    optimizers = parameter.__dict__.get(_OPTIMIZERS_ATTRIBUTE, ())
    return _is_of_bare_module(parameter) or any(
        isinstance(optimizer, Optimizer) and updates_in_backward(optimizer)
        for optimizer in optimizers
    )


def _is_of_bare_module(parameter: Any) -> bool:
    """Return whether a parameter is of a module outside collections that updates in backward."""
    is_owned = isinstance(parameter, TableParameter) and not isinstance(parameter, ViewParameter)
    return is_owned and _OPTIMIZERS_ATTRIBUTE not in parameter.__dict__


def refuse_gradients(parameter: nn.Parameter) -> None:
    """Make backward raise if a gradient arrives at the parameter of a table that it updates.

    Lookups of such a table leave no gradient. So the gradient is that of a penalty on the weights,
    or of another module that uses them, and would be lost silently. A frozen parameter gets no
    hook: call this function again when it is trained.
    """
    hooks = parameter._backward_hooks or {}
    if not parameter.requires_grad or any(hasattr(hook, "refuses") for hook in hooks.values()):
        return
    reference = weakref.ref(parameter)

    @torch.utils.hooks.unserializable_hook
    def refuse(gradient: Tensor | None) -> None:
        live_parameter = reference()
        if gradient is None or live_parameter is None:  # None: compiled graphs that only read
            return
        if is_updated_in_backward(live_parameter):
            raise RuntimeError(
                "a gradient arrived at the weights of a table that backward updates: a penalty on "
                "them, or a use of them outside lookups, would be dropped. Use weight_decay of "
                "the optimizer for an L2 penalty; deferred=True, so that FusedOptimizer.step "
                "applies all gradients together; or optimizer=None and an optimizer of "
                "torch.optim. To read the weights without a gradient, detach() them"
            )

    refuse.refuses = True
    with torch._C.DisableTorchFunctionSubclass():
        Tensor.register_hook(parameter, refuse)


def disown(parameter: nn.Parameter) -> None:
    """Convert a `TableParameter` in place to an ordinary one; others stay as they are."""
    if isinstance(parameter, TableParameter):
        _owners.pop(parameter, None)
        any_parameter: Any = parameter
        any_parameter.__class__ = nn.Parameter


def _notify_owner(parameter: TableParameter) -> None:
    """Notify the owner of a parameter that `requires_grad` has changed."""
    reference = _owners.get(parameter)
    owner = None if reference is None else reference()
    if owner is not None:
        owner.set_trained(parameter, trained=parameter.requires_grad)


class RegisteredParameter(NamedTuple):
    """A registered parameter, to be compared later by `check_registered`.

    Attributes:
        module: module that has it. Not its dict of parameters, which `torch.export` replaces.
        name: name in the module.
        parameter: the parameter; None if it is registered as None.
    """

    module: nn.Module
    name: str
    parameter: nn.Parameter | None


def registered_parameters(modules: Iterable[nn.Module]) -> list[RegisteredParameter]:
    """Return the parameters of these modules, without those of their children."""
    return [
        RegisteredParameter(module, name, parameter)
        for module in modules
        for name, parameter in module._parameters.items()
    ]


def check_registered(views: Iterable[RegisteredParameter]) -> None:
    """Raise RuntimeError if a parameter was replaced, as by `torch.func.functional_call`.

    Lookups read the memory of the old parameter, and would ignore the new one. In compiled graphs
    nothing is checked.
    """
    if torch.compiler.is_compiling():
        return
    for module, name, parameter in views:
        if module._parameters.get(name) is not parameter:
            refuse_replacement(name)


def refuse_replacement(name: str) -> NoReturn:
    """Raise RuntimeError for a replaced parameter, which lookups and updates would not use."""
    raise RuntimeError(
        f"the parameter {name!r} of a table cannot be replaced, since lookups read the memory that "
        "it is a view of: copy values into it under torch.no_grad(), or load a state dict, also "
        "instead of torch.func.functional_call; parametrizations and pruning need a "
        "TableBatchedEmbeddingBags or TTEmbeddingBag without optimizer; for torch.export convert "
        "the tables with emblib.inference.for_inference; to spread a model over ranks use "
        'emblib.sharding.DistributedModelParallel, with wrap="fully_shard" for its dense part, or '
        "give fully_shard the parameters of tables as ignored_params"
    )


def check_not_replicated(buffer: Tensor) -> None:
    """Raise RuntimeError if `DistributedDataParallel` runs and replicates the module of a buffer.

    For modules whose tables backward updates. In compiled graphs, and in a group of one rank,
    nothing is checked.

    Args:
        buffer: a buffer of the module, which DDP broadcasts unless the module is ignored.
    """
    if torch.compiler.is_compiling():
        return
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is not None and is_replicated_by(ddp, buffer):
        refuse_replicas()


def is_replicated_by(ddp: DistributedDataParallel, buffer: Tensor) -> bool:
    """Return whether `ddp` replicates the module of a buffer on several ranks."""
    return ddp.process_group.size() > 1 and any(
        replicated is buffer for replicated in ddp.modules_buffers
    )


def refuse_replicas() -> NoReturn:
    """Raise RuntimeError for tables in `DistributedDataParallel` that backward updates."""
    raise RuntimeError(
        "DistributedDataParallel replicates these tables, but backward updates each replica "
        "with the gradients of its own rank, so that replicas diverge: use a collection and "
        "emblib.sharding.DistributedModelParallel, which wraps the dense part; tables that "
        "differ between ranks on purpose must be named to "
        "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model"
    )


def check_dense_gradients(tables: Iterable[Tensor]) -> None:
    """Raise RuntimeError if `DistributedDataParallel` runs and would add up gradients of `tables`.

    For tables with sparse gradients, which it cannot add up.
    """
    ddp = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if ddp is None:
        return
    if any(
        replicated is parameter for replicated in ddp._module_parameters for parameter in tables
    ):
        raise RuntimeError(
            "DistributedDataParallel adds up dense gradients, and those of these tables are "
            "sparse: use a collection and emblib.sharding.DistributedModelParallel, or "
            "optim.External(gradient=Gradient.DENSE)"
        )


class UnsteppedGradients:
    """Warns if backward leaves gradients in many passes and no optimizer uses them.

    Args:
        watch: whether to warn. Meant for modules that were made without an optimizer: backward
            updated these in earlier versions of emblib.
    """

    MAX_PASSES = 8  # more passes than most programs accumulate

    def __init__(self, *, watch: bool) -> None:
        self._watch = watch
        self._versions: list[int] = []
        self._num_passes = 0

    def check(self, weights: Iterable[Tensor]) -> None:
        """Warn, once, if more than `MAX_PASSES` forwards find gradients and unchanged weights.

        Call it in every forward, with the weights. Frozen weights, forwards without gradients and
        compiled graphs do not count.
        """
        if not self._watch or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        # Weights that a parametrization computes are not leaves; torch warns if their grad is read.
        trained_weights = [
            weight
            for weight in weights
            if weight.requires_grad and weight.is_leaf and weight.grad is not None
        ]
        versions = list(map(version_of, trained_weights))
        self._num_passes = (
            self._num_passes + 1 if trained_weights and versions == self._versions else 0
        )
        self._versions = versions
        if self._num_passes > self.MAX_PASSES:
            self._watch = False
            warnings.warn(
                f"backward has left gradients on these tables {self.MAX_PASSES} times, and nothing "
                "has changed the weights since: without an optimizer, tables leave gradients for "
                "one of torch.optim, as nn.EmbeddingBag does. Step it, or pass an optimizer that "
                "updates in backward, e.g. emblib.optim.SGD(0.01), the default of earlier versions",
                stacklevel=caller_level(),
            )


class FixedBuffers:
    """The exact values of buffers that depend only on the arguments of a module.

    `AveragedModel(use_buffers=True)` writes all buffers and rounds integers, so that lookups would
    read other rows. `restore` undoes that.

    Args:
        buffers: the buffers, at least one. `are_intact` checks the first only.
    """

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        self._buffers = list(buffers)
        self._values = [buffer.clone() for buffer in self._buffers]
        self._version = version_of(self._buffers[0])

    def are_intact(self) -> bool:
        """Return whether torch has not written the first buffer since construction or `restore`."""
        return version_of(self._buffers[0]) == self._version

    def restore(self) -> None:
        """Write the values into the buffers."""
        for buffer, values in zip(self._buffers, self._values, strict=True):
            buffer.copy_(values)
        self._version = version_of(self._buffers[0])


def version_of(tensor: Tensor) -> int:
    """Return the version of a tensor, which grows with each write; 0 for inference tensors.

    Torch does not count writes to inference tensors, and raises where their version is read.
    """
    return 0 if tensor.is_inference() else tensor._version


def loses_values(fn: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a function of `nn.Module._apply` returns other values, as `to_empty` does.

    `fn` is called for one int64 on the CPU, and the host waits for the result. False for a result
    on meta, or of another dtype: a cast keeps values, rounded.
    """
    # A value that uninitialised memory does not have.
    probe = torch.tensor([time.monotonic_ns()], device="cpu")
    result = fn(probe)
    if result.is_meta or result.dtype != probe.dtype:
        return False
    return int(result) != int(probe)


def is_any_replaced(parameters: Iterable[Any]) -> bool:
    """Return whether a wrapper has replaced a parameter: one is not a `TableParameter`.

    False in compiled graphs, where nothing is checked.
    """
    if torch.compiler.is_compiling():
        return False
    return any(not isinstance(parameter, TableParameter) for parameter in parameters)


def caller_level() -> int:
    """Return the `stacklevel` with which a warning of the caller names code outside emblib.

    Modules, autograd and the compiler of torch, and decorators, are skipped, too.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_INTERNAL_MODULES):
        frame, level = frame.f_back, level + 1
    return level


_INTERNAL_MODULES = (
    "emblib.",
    "torch.autograd.",
    "torch.nn.modules.",
    "torch.utils._contextlib",  # decorators such as torch.no_grad
    "contextlib",  # decorators such as ops.keeping_parameters
    "torch._dynamo.",
)
