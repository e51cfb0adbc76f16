"""`migrate`: swap the embeddings of a model for tables of emblib, in place.

First `migrate` decides on each module: *fused*, if backward can make the updates that were made
before; *parameter replaced*, if the optimizer of torch stays and gets another parameter with
the same values and states; or *left*, with the reason. Nothing is changed until all decisions are
made, and all rows and states are copied. Then it swaps each module for one that takes the same
calls, and changes the groups of the optimizer.
"""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer as TorchOptimizer

from emblib.grad_mode import in_grad_mode, without_gradients
from emblib.migration import checks
from emblib.migration.base import Left, NotMigrated, Replaced, TrainingMemory
from emblib.migration.checks import Difference, MigrationCost, Speed
from emblib.migration.torch_modules import ReplacedEmbedding
from emblib.ops import autograd
from emblib.optim import Optimizer
from emblib.specs import check_count, check_module
from emblib.trace import LookupTrace

Factory = Callable[..., Replaced]
"""Function of paths, module, optimizers of torch and `tables`, see `migrate`.

It returns a `Replaced`, or raises `NotMigrated`.
"""

# Python modules whose `FACTORIES` replace modules of a library, by class name. They belong to a
# layer above this one, so they are imported only when a model has a module of their library.
_LIBRARIES = {
    "fbgemm_gpu": "emblib.compat.fbgemm_migration",
    "torchrec": "emblib.compat.torchrec_migration",
}
# Modules that are not migrated, and the advice for each.
_ADVICE = {
    ("dynamicemb", "BatchedDynamicEmbeddingTables"): "import it from emblib.compat.dynamicemb, "
    "whose DynamicEmbLoad reads the files of DynamicEmbDump",
    ("dynamicemb", "BatchedDynamicEmbeddingTablesV2"): "import it from emblib.compat.dynamicemb, "
    "whose DynamicEmbLoad reads the files of DynamicEmbDump",
    ("tt_embeddings_ops", "TTEmbeddingBag"): "import it from emblib.compat.fbtt and load its state "
    "dict",
    ("tt_embeddings_ops", "TableBatchedTTEmbeddingBag"): "import it from emblib.compat.fbtt and "
    "load its state dict",
}

_SCHEDULER_WARNING = "a scheduler over"


class Migration:
    """Result of `migrate`: print it, check it, predict with it, or undo it.

    Attributes:
        replaced: the modules that were swapped.
        left: embeddings that were not swapped, with the reasons.
        warnings: changes that the surrounding program needs, a sentence each.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8))
        >>> migration = emblib.migrate(model)
        >>> type(model[0]).__module__.partition(".")[0]
        'emblib'
        >>> migration.undo()
        >>> type(model[0]).__name__
        'EmbeddingBag'
    """

    def __init__(
        self,
        model: nn.Module,
        replaced: Sequence[Replaced],
        left: Sequence[Left],
        optimizers: Sequence[TorchOptimizer],
        tables: Optimizer | None,
    ) -> None:
        self._model, self._tables = model, tables
        self._is_undone = self._is_undoing = False
        self.replaced, self.left = tuple(replaced), tuple(left)
        self.warnings = tuple(self._warnings(optimizers))

    def _warnings(self, optimizers: Sequence[TorchOptimizer]) -> list[str]:
        """Return what users of fused tables must know, one sentence each."""
        fused = [replaced for replaced in self.replaced if replaced.is_fused]
        if not fused:
            return []
        warnings = [
            "fused tables have no .grad: each backward is an update, clip_grad_norm_ and "
            "Adam(model.parameters()) do not reach them, and schedules use the groups of "
            "emblib.collections.optimizers.FusedOptimizer.of(model); a penalty on their weight, a "
            "view without gradient, has no effect"
        ]
        warnings += _scheduler_warnings(optimizers)
        num_single = sum(isinstance(replaced, ReplacedEmbedding) for replaced in fused)
        if num_single > 1:
            warnings.append(
                f"{num_single} tables are called one by one: one TableBatchedEmbeddingBags or "
                "EmbeddingBagCollection looks all of them up in one kernel (and only a collection "
                "can be sharded)"
            )
        return warnings

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} embeddings replaced, {len(self.left)} left"]
        for replaced in self.replaced:
            before, after = replaced.memory
            lines.append(
                f"  {', '.join(replaced.paths)}: {replaced.sizes()}; "
                f"{replaced.describe_training()}; {before} -> {after}"
            )
            if replaced.note:
                lines.append(f"    {replaced.note}")
        lines += [f"  left {left.path}: {left.reason}" for left in self.left]
        if self.replaced:
            before, after = self._memory()
            lines.append(f"memory in training: {before} -> {after}")
        return "\n".join([*lines, *self.warnings])

    def _memory(self) -> tuple[TrainingMemory, TrainingMemory]:
        """Return the bytes of all replaced modules, and of those that replace them."""
        memories = [replaced.memory for replaced in self.replaced]
        before, after = zip(*memories, strict=True)
        return sum(before, TrainingMemory()), sum(after, TrainingMemory())

    def _migrate_sample(self, model: nn.Module, optimizers: Sequence[TorchOptimizer]) -> None:
        migrate(model, optimizers, tables=self._tables)

    def check(self, seed: int = 0) -> list[Difference]:
        """Compare old and new modules, on copies of some rows of each table and of their states.

        Both look up the same random ids. Modules that were trained before the migration then make a
        training step with the same gradient. The model is not changed.

        Raises:
            RuntimeError: the migration was undone, or a new module has been replaced since.
        """
        self._require_migrated()
        return [checks.compare(replaced, self._migrate_sample, seed) for replaced in self.replaced]

    def measure(self, trace: LookupTrace, batch_size: int, rounds: int = 20) -> list[Speed]:
        """Time old and new modules in turn on recorded lookups.

        It needs memory for two more copies of one module at a time. The model is not changed.

        Args:
            trace: trace of the model before it was migrated, by `TraceRecorder`; its features have
                the names of the modules.
            batch_size: samples per call.
            rounds: timed lookups, and training steps, per module; batches come in turn.

        Raises:
            TypeError: `trace` is not a `LookupTrace`, or `batch_size` or `rounds` is not an int.
            ValueError: one of them is below 1, or the trace has no full batch of any replaced
                module.
            RuntimeError: the migration was undone, or a new module has been replaced since.
        """
        self._require_migrated()
        if not isinstance(trace, LookupTrace):
            raise TypeError(
                f"trace must be a LookupTrace, as TraceRecorder.trace is, got {trace!r}"
            )
        batch_size = check_count("batch_size", batch_size)
        rounds = check_count("rounds", rounds)
        measured_speeds = (
            checks.time_modules(replaced, self._migrate_sample, trace, batch_size, rounds)
            for replaced in self.replaced
        )
        speeds = [speed for speed in measured_speeds if speed is not None]
        if not speeds:
            names = [feature.name for feature in trace.features]
            raise ValueError(f"the trace has no {batch_size} samples of a module; it has {names}")
        return speeds

    def predict(self, trace: LookupTrace, batch_size: int, rounds: int = 20) -> MigrationCost:
        """Return memory and time of training before and after, from recorded lookups.

        Arguments, times and errors are as for `measure`. Bytes are those of rows, states and
        gradients of the old modules after their first step, and the memory of the new modules; the
        rest of the model is left out. Optimizer states with another number of entries than one per
        element or row are not counted.
        """
        speeds = self.measure(trace, batch_size, rounds)
        device = self.replaced[0].rows(self.replaced[0].old)[0].device
        return MigrationCost(*self._memory(), tuple(speeds), checks.describe_machine(device))

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> Any:
        """Load a state dict that the model had before it was migrated.

        The migration changes the keys of swapped modules; this method loads through the old ones.
        Optimizer states of torch are not in the state dict: to continue a training, load model and
        optimizer first, then migrate.

        Args:
            state_dict: result of `state_dict()` of the model before.
            strict: whether missing and unexpected keys raise.

        Returns:
            The result of `nn.Module.load_state_dict`.

        Raises:
            RuntimeError: keys or shapes do not fit the model, as in `nn.Module.load_state_dict`;
                the migration was undone, or a new module has been replaced since.

        Example:
            >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8))
            >>> saved = model.state_dict()
            >>> migration = emblib.migrate(model)
            >>> migration.load_state_dict(saved)
            <All keys matched successfully>
        """
        self._require_migrated()
        old_tensors = [
            tensor for replaced in self.replaced for tensor in replaced.old.state_dict().values()
        ]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in old_tensors}
        # `copy_values` below overwrites the old modules, so values in their memory are cloned.
        state_dict = {
            name: value.clone()
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() in addresses
            else value
            for name, value in state_dict.items()
        }
        put_back: list[Any] = []  # replaced modules whose old one has the values of the new one
        try:
            for replaced in self.replaced:
                replaced.copy_values(replaced.new, replaced.old)
                put_back.append(replaced)
                _set_module(self._model, replaced.paths, replaced.old)
            return self._model.load_state_dict(state_dict, strict=strict)
        finally:
            for replaced in put_back:
                replaced.copy_values(replaced.old, replaced.new)
                _set_module(self._model, replaced.paths, replaced.new)

    @without_gradients
    def undo(self) -> None:
        """Put the old modules back, with the current rows and states of the tables.

        If it is interrupted, call it again: it puts back the modules that are left.

        Raises:
            RuntimeError: the migration was undone, or a new module has been replaced since.
        """
        self._check_modules()
        self._is_undoing = True
        for replaced in self.replaced:
            modules = dict(self._model.named_modules(remove_duplicate=False))
            if any(modules.get(path) is replaced.new for path in replaced.paths):
                replaced.carry_back()
                replaced.old.train(replaced.new.training)
                _set_module(self._model, replaced.paths, replaced.old)
        self._is_undone = True

    def _require_migrated(self) -> None:
        """Raise RuntimeError unless all new modules are in the model."""
        self._check_modules()
        if self._is_undoing:
            raise RuntimeError("undo() was interrupted: call it again")

    def _check_modules(self) -> None:
        """Raise RuntimeError if the migration was undone, or a module was replaced since."""
        if self._is_undone:
            raise RuntimeError("the migration was undone already")
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for replaced in self.replaced:
            for path in replaced.paths:
                if self._is_undoing and modules.get(path) is replaced.old:
                    continue
                if modules.get(path) is not replaced.new:
                    raise RuntimeError(
                        f"the module that migrate put at {path} has been replaced since, e.g. by "
                        "sharding: the migration knows nothing of the rows of the new one. Check, "
                        "load old states and undo before that; a checkpoint of a sharded model "
                        "(emblib.sharding.checkpoints) loads into a migrated one as well"
                    )


def migrate(
    model: nn.Module,
    optimizer: TorchOptimizer | Sequence[TorchOptimizer] = (),
    *,
    tables: Optimizer | None = None,
) -> Migration:
    """Swap the embeddings of a model for tables of emblib, in place, and report the result.

    What cannot be swapped, e.g. a module with hooks, is left, see `Migration.left`. A scheduler
    that was made before does not reach tables that backward updates: `migrate` warns of one whose
    optimizer is passed.

    `nn.EmbeddingBag` (sum, mean), `nn.Embedding`, the table-batched modules of FBGEMM and the
    unsharded collections of TorchRec become modules with the same rows that take the same calls. If
    their optimizer has a counterpart that makes the same updates, backward applies it, the states
    move into the table, and the weight leaves the optimizer's groups. These have one: optimizers
    fused into FBGEMM's modules; and, without weight decay and `maximize`, SparseAdam (but for the
    place of eps), SGD without momentum, and Adagrad and TorchRec's RowWiseAdagrad without
    `lr_decay`. Any other optimizer
    trains the new parameter as it trained the old one; a module is left if torch applies such an
    optimizer in backward and `tables` is None.

    Args:
        model: model to change. A module that occurs twice is swapped for one module.
        optimizer: the optimizers of `torch.optim` that train the model, if it is trained;
            optimizers that torch applies in backward are found on the parameters.
        tables: optimizer that backward applies to every table of torch or TorchRec, instead of the
            counterpart of its old optimizer. E.g. `optim.Adam(1e-3)` updates the rows of a batch,
            whereas `torch.optim.Adam` changes all rows. States of equal names move into the table;
            a state with one number per row gets the mean of those of its elements.

    Raises:
        TypeError: `model` is not a module, or is an embedding itself, backward does not apply
            `tables`, or `optimizer` has something else than optimizers of torch, or a wrapper of
            TorchRec.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.EmbeddingBag(100, 8), torch.nn.Linear(8, 1))
        >>> migration = emblib.migrate(model, torch.optim.Adagrad(model.parameters(), 0.1))
        >>> print(str(migration).partition(";")[0])
        1 embeddings replaced, 0 left
          0: 100, 8
        >>> model(torch.tensor([[1, 2], [3, 4]])).shape
        torch.Size([2, 1])
        >>> max(difference.rows for difference in migration.check()) < 1e-6
        True
    """
    if tables is not None and not (
        isinstance(tables, Optimizer) and autograd.updates_in_backward(tables)
    ):
        raise TypeError(f"tables must be an optimizer that backward applies, got {tables!r}")
    check_module("model", model)
    optimizers = _as_list(optimizer)
    for torch_optimizer in optimizers:
        if type(torch_optimizer).__module__.startswith("torchrec.optim.") and hasattr(
            torch_optimizer, "params"
        ):
            raise TypeError(
                f"{type(torch_optimizer).__name__} names its parameters, which would be stale: "
                "migrate with the optimizer inside it, then wrap that one again"
            )
    embeddings = _find_embeddings(model)
    if any("" in paths for _, paths, _ in embeddings):
        raise TypeError("model is an embedding itself: put it into a module, e.g. nn.ModuleList")
    owners = _count_owners(model)
    replaced, left_modules = [], []
    with torch.random.fork_rng(devices=[]):  # initial values are drawn, and overwritten
        for module, paths, factory in embeddings:
            try:
                _check_unshared(module, owners)
                replaced.append(factory(paths, module, optimizers, tables))
            except NotMigrated as reason:
                left_modules.append(Left(paths[0], str(reason)))
    for replacement in replaced:  # may raise, so before the first change of model or optimizers
        in_grad_mode(replacement.carry_over, enabled=False)()
    for replacement in replaced:
        replacement.replace_in_optimizers()
        _set_module(model, replacement.paths, replacement.new)
    migration = Migration(model, replaced, left_modules, optimizers, tables)
    for text in migration.warnings:
        if text.startswith(_SCHEDULER_WARNING):  # training goes on at a wrong rate, so it is shown
            warnings.warn(f"emblib: {text}", stacklevel=2)
    return migration


def _scheduler_warnings(optimizers: Sequence[TorchOptimizer]) -> list[str]:
    """Return a sentence per optimizer that has a scheduler: it does not reach fused tables."""
    # This scheduler, unlike others, leaves no mark on its optimizer. Not `isinstance`, which would
    # read an attribute of each object of the process.
    on_plateau = {
        id(vars(object_).get("optimizer"))
        for object_ in gc.get_objects()
        if issubclass(type(object_), torch.optim.lr_scheduler.ReduceLROnPlateau)
    }
    return [
        f"{_SCHEDULER_WARNING} {type(optimizer).__name__} no longer sets the rates of the fused "
        "tables: make a second one over emblib.collections.optimizers.FusedOptimizer.of(model)"
        for optimizer in optimizers
        if hasattr(optimizer.step, "_wrapped_by_lr_sched") or id(optimizer) in on_plateau
    ]


def _as_list(optimizer: Any) -> list[TorchOptimizer]:
    """Return one optimizer or several as a list; raise TypeError for anything else."""
    is_sequence = isinstance(optimizer, Sequence)
    optimizers = list(optimizer) if is_sequence else [optimizer]
    for torch_optimizer in optimizers:
        if not hasattr(torch_optimizer, "param_groups"):
            raise TypeError(
                "optimizer must be an optimizer of torch.optim that trains the model, or a list "
                f"of them, got {torch_optimizer!r}; tables= takes one of emblib.optim"
            )
    return optimizers


def _factory_of(module: nn.Module) -> Factory | None:
    """Return the class or function that replaces a module; None for other modules."""
    if isinstance(module, nn.EmbeddingBag | nn.Embedding):
        return ReplacedEmbedding
    for base_class in type(module).__mro__:
        root = base_class.__module__.partition(".")[0]
        if (root, base_class.__name__) in _ADVICE:
            return _refuse(f"{base_class.__name__} of {root}: {_ADVICE[root, base_class.__name__]}")
        library = _LIBRARIES.get(root)
        if library is not None:
            factories: Mapping[str, Factory] = importlib.import_module(library).FACTORIES
            if base_class.__name__ in factories:
                return factories[base_class.__name__]
    return None


def _refuse(reason: str) -> Factory:
    """Return a factory that raises `NotMigrated` with a reason."""

    def refuse(*arguments: Any) -> Replaced:
        raise NotMigrated(reason)

    return refuse


def _find_embeddings(model: nn.Module) -> list[tuple[nn.Module, list[str], Factory]]:
    """Return the outermost embeddings of a model, each with its names and its factory."""
    embeddings: dict[nn.Module, tuple[list[str], Factory]] = {}
    inner_prefixes: tuple[str, ...] = ()
    for path, module in model.named_modules(remove_duplicate=False):
        if path.startswith(inner_prefixes):
            continue
        factory = _factory_of(module)
        if factory is not None:
            embeddings.setdefault(module, ([], factory))[0].append(path)
            inner_prefixes = (*inner_prefixes, f"{path}." if path else "")
    return [(module, paths, factory) for module, (paths, factory) in embeddings.items()]


def _count_owners(model: nn.Module) -> dict[int, int]:
    """Return the number of modules that have each parameter, by id, to find tied weights."""
    num_owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            num_owners[id(parameter)] = num_owners.get(id(parameter), 0) + 1
    return num_owners


def _check_unshared(module: nn.Module, owners: dict[int, int]) -> None:
    """Raise NotMigrated for a module that shares weights with another, or has hooks on calls.

    Hooks of its state dict are not looked for.
    """
    for child in module.modules():
        weights = list(child.parameters(recurse=False))
        if any(owners[id(weight)] > 1 for weight in weights):
            raise NotMigrated(
                "its weight is tied to another module, which would not see updates in backward"
            )
        module_hooks = (
            child._forward_hooks,
            child._forward_pre_hooks,
            child._backward_hooks,
            child._backward_pre_hooks,
        )
        if any(module_hooks) or any(
            weight._backward_hooks or weight._post_accumulate_grad_hooks for weight in weights
        ):
            raise NotMigrated("it has hooks: remove them first")


def _set_module(model: nn.Module, paths: Sequence[str], module: nn.Module) -> None:
    """Set a module at all of its paths in a model."""
    for path in paths:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)
