"""Migration of a model: its `nn.EmbeddingBag` and `nn.Embedding` become tables of emblib, in place.

`migrate` goes through the modules once and decides for each (`_plan`): *fused*, where backward can
make exactly the updates that the optimizer of `torch.optim` would make; *in place of the weight*,
where the optimizer keeps its work and gets another parameter with the same values and states; or
*left*, with the reason. Nothing is changed before every decision is made. Then each module is
swapped for a drop-in one, which takes the same calls, and the groups of the optimizer follow.
`Migration.check` compares old and new modules, `Migration.measure` times them on recorded lookups.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from emblib import optim
from emblib.jagged.padding import drop_padding_from_bags
from emblib.ops import autograd
from emblib.optim import Optimizer
from emblib.specs import Pooling, Precision, TableSpec, brief
from emblib.tables import TableBatchedEmbeddingBags
from emblib.trace import LookupTrace

__all__ = ["MigratedEmbedding", "MigratedEmbeddingBag", "Migration", "migrate"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_POOLING = {"sum": Pooling.SUM, "mean": Pooling.MEAN}
_CHECKED_ROWS = 64


class _DropIn(nn.Module):
    """A table of emblib that takes the calls of a module of torch."""

    def __init__(self, source: nn.EmbeddingBag | nn.Embedding, optimizer: Optimizer | None) -> None:
        super().__init__()
        pooling = Pooling.NONE
        if isinstance(source, nn.EmbeddingBag):
            pooling = _POOLING[source.mode]
        self.num_embeddings, self.embedding_dim = source.num_embeddings, source.embedding_dim
        self.padding_idx = source.padding_idx
        self.table = TableBatchedEmbeddingBags(
            [TableSpec(source.num_embeddings, source.embedding_dim)],
            optimizer,
            pooling=pooling,
            precision=Precision(weights=source.weight.dtype, output=source.weight.dtype),
            device=source.weight.device,
        )
        self.train(source.training)

    @property
    def weight(self) -> Tensor:
        """Return the rows, `[num_embeddings, embedding_dim]`; without a gradient if fused."""
        return self.table.table_weights()[0]

    def extra_repr(self) -> str:
        """Return rows and columns."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class MigratedEmbeddingBag(_DropIn):
    """A table of emblib that is called as the `nn.EmbeddingBag` whose place it has."""

    def __init__(self, source: nn.EmbeddingBag, optimizer: Optimizer | None) -> None:
        super().__init__(source, optimizer)
        self.mode = source.mode
        self.include_last_offset = source.include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pool each bag to `[B, embedding_dim]`.

        Args:
            input: int32 or int64 ids: `[B, N]`, bags of N, or `[L]` with `offsets`.
            offsets: `[B]`, or `[B + 1]` with `include_last_offset`: where the bags start.
            per_sample_weights: weights of the shape of `input`, for the mode "sum".

        Raises:
            ValueError: `offsets` with ids of two dimensions, or none with ids of one.
        """
        if (input.dim() == 2) is (offsets is not None):
            raise ValueError(
                "ids must be [B, N] without offsets or [L] with them, got ids of shape "
                f"{tuple(input.shape)} and {'no ' * (offsets is None)}offsets"
            )
        if offsets is None:
            batch, width = input.shape
            offsets = torch.arange(batch + 1, device=input.device, dtype=input.dtype) * width
            input = input.flatten()
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights.flatten()
        elif not self.include_last_offset:
            offsets = nn.functional.pad(offsets, (0, 1), value=input.numel())
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.float()
        if self.padding_idx is not None:
            input, offsets, per_sample_weights = drop_padding_from_bags(
                input, offsets, self.padding_idx, per_sample_weights
            )
        out: Tensor = self.table(input, offsets, per_sample_weights)
        return out


class MigratedEmbedding(_DropIn):
    """A table of emblib that is called as the `nn.Embedding` whose place it has."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the vector of each id, `[*, embedding_dim]`; ids are int32 or int64 `[*]`."""
        ids = input.flatten()
        if self.padding_idx is not None:  # whose row is zeros and is not trained
            ids = torch.where(ids == self.padding_idx, -1, ids)
        bounds = torch.arange(2, device=ids.device, dtype=ids.dtype) * ids.numel()
        out: Tensor = self.table(ids, bounds)
        return out.view(*input.shape, self.embedding_dim)


@dataclass(frozen=True)
class Trained:
    """Training of a weight by an optimizer of torch: its group, and the states of the weight."""

    optimizer: TorchOptimizer
    group: dict[str, Any]
    state: dict[str, Any]
    order: list[nn.Parameter]  # of the group's parameters

    @staticmethod
    def of(optimizers: Sequence[TorchOptimizer], weight: nn.Parameter) -> Trained | None:
        """Return how a weight is trained; None if no optimizer has it."""
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                if any(parameter is weight for parameter in group["params"]):
                    state = optimizer.state.get(weight, {})
                    return Trained(optimizer, group, state, list(group["params"]))
        return None

    def replace(self, before: nn.Parameter, after: Sequence[nn.Parameter]) -> None:
        """Put other parameters into the group in place of one."""
        params = self.group["params"]
        number = next(i for i, parameter in enumerate(params) if parameter is before)
        params[number : number + 1] = after
        self.optimizer.state.pop(before, None)

    def restore(self, parameter: nn.Parameter) -> None:
        """Put a parameter that was removed back to its place in the group."""
        params = [*self.group["params"], parameter]
        numbers = {id(one): number for number, one in enumerate(self.order)}
        self.group["params"] = sorted(params, key=lambda p: numbers.get(id(p), len(numbers)))


@dataclass(frozen=True)
class Replaced:
    """A module that was swapped.

    Attributes:
        paths: names of the module in the model; several if it occurs several times.
        old: the module of torch.
        new: the module in its place.
        trained: how `old` was trained; None without an optimizer.
        note: how results may differ; "" for not at all but for the order of sums.
    """

    paths: tuple[str, ...]
    old: Any
    new: Any
    trained: Trained | None
    note: str

    @property
    def is_fused(self) -> bool:
        """Return whether backward updates the table."""
        return autograd.updates_in_backward(self.new.table.optimizer)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Return bytes of rows, optimizer states and dense gradient, before and after."""
        weight = self.old.weight
        states = {} if self.trained is None else _states_of(self.trained.state, weight)
        before = weight.nbytes + sum(state.nbytes for state in states.values())
        before += 0 if self.old.sparse or not weight.requires_grad else weight.nbytes
        return before, sum(self.new.table.nbytes().values()) if self.is_fused else before


@dataclass(frozen=True)
class Left:
    """A module that was not swapped, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Difference:
    """The largest absolute differences between an old and a new module.

    Attributes:
        path: name of the module.
        output: largest difference of the outputs for the same ids.
        rows: largest difference of the rows after a training step; None if no optimizer trains the
            table.
    """

    path: str
    output: float
    rows: float | None


@dataclass(frozen=True)
class Speed:
    """The old module's time ÷ the new one's, medians of alternating calls; above 1, new is faster.

    Attributes:
        path: name of the module.
        lookup: times of lookups without gradients.
        step: times of lookup, backward and update; None if no optimizer trains the table.
    """

    path: str
    lookup: float
    step: float | None


class Migration:
    """Result of `migrate`: print it, check it, measure it, or undo it.

    Attributes:
        replaced: the modules that were swapped.
        left: embeddings that were not, with the reasons.

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
        tables: Optimizer | None,
    ) -> None:
        self._model = model
        self._tables = tables
        self._is_undone = False
        self.replaced, self.left = tuple(replaced), tuple(left)

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} embeddings replaced, {len(self.left)} left"]
        for one in self.replaced:
            before, after = map(_size, one.nbytes)
            table = one.new.table
            how = "its gradient goes to the same optimizer"
            if one.is_fused:
                how = f"backward applies {brief(table.optimizer)}"
            lines.append(
                f"  {', '.join(one.paths)}: {one.new.extra_repr()}; {how}; {before} -> {after}"
            )
            if one.note:
                lines.append(f"    {one.note}")
        lines += [f"  left {one.path}: {one.reason}" for one in self.left]
        if self.replaced:
            sizes = [one.nbytes for one in self.replaced]
            before, after = (_size(sum(column)) for column in zip(*sizes, strict=True))
            lines.append(f"rows, states and dense gradients: {before} -> {after}")
        fused = sum(one.is_fused for one in self.replaced)
        if fused:
            lines.append(
                "fused tables have no .grad: each backward is an update, clip_grad_norm_ does not "
                "see them, and schedules use the groups of FusedOptimizer.of(model)"
            )
        if fused > 1:
            lines.append(
                f"{fused} tables are called one by one: one TableBatchedEmbeddingBags or "
                "EmbeddingBagCollection looks all of them up in one kernel"
            )
        return "\n".join(lines)

    def check(self, seed: int = 0) -> list[Difference]:
        """Compare old and new modules, on copies of 64 rows of each table and of their states.

        Both look up the same random ids, then make a training step with the same gradient. The
        model is not changed.
        """
        return [_compare(_Twins(one, self._tables, seed), one.paths[0]) for one in self.replaced]

    def measure(self, trace: LookupTrace, batch_size: int, rounds: int = 20) -> list[Speed]:
        """Time old and new modules in turn on recorded lookups.

        This needs the memory of two more copies of one table at a time. The model is not changed.

        Args:
            trace: trace of the model before it was migrated, by `TraceRecorder`; its features have
                the names of the modules.
            batch_size: samples per call.
            rounds: calls of each, over the batches of the trace.

        Raises:
            ValueError: the trace has no full batch of any replaced module.
        """
        speeds = []
        for one in self.replaced:
            batches = _batches(trace, one, batch_size)
            if batches:
                speeds.append(_speed(_Twins(one, self._tables), one.paths[0], batches, rounds))
        if not speeds:
            names = [feature.name for feature in trace.features]
            raise ValueError(f"the trace has no {batch_size} samples of a module; it has {names}")
        return speeds

    def undo(self) -> None:
        """Put the modules of torch back, with the rows and states that the tables have now.

        Raises:
            RuntimeError: the migration was undone already.
        """
        if self._is_undone:
            raise RuntimeError("the migration was undone already")
        for one in self.replaced:
            _carry_back(one)
            _put(self._model, one.paths, one.old)
        self._is_undone = True


def migrate(
    model: nn.Module,
    optimizer: TorchOptimizer | Sequence[TorchOptimizer] = (),
    *,
    tables: Optimizer | None = None,
) -> Migration:
    """Swap the embeddings of a model for tables of emblib, in place, and say what was done.

    `nn.EmbeddingBag` (sum, mean) and `nn.Embedding` become drop-in modules with the same rows that
    take the same calls. If their optimizer has a counterpart that makes the same updates (SGD
    without momentum and weight decay, Adagrad, SparseAdam), backward applies it, the states move
    into the table, and the weight leaves the optimizer's groups. Otherwise the optimizer trains the
    new parameter as it trained the old one. Modules of FBGEMM and TorchRec are left:
    `emblib.compat.fbgemm.install()` runs them on emblib's kernels.

    Args:
        model: is changed. A module that occurs twice is swapped for one module.
        optimizer: the optimizers of `torch.optim` that train the model, if it is trained.
        tables: applied in backward to every table instead of the counterpart of its optimizer, e.g.
            `optim.Adam(1e-3)`, which updates the rows of a batch, where `torch.optim.Adam` changes
            all rows. States of equal names move into the table.

    Raises:
        TypeError: `model` is an embedding itself, or backward does not apply `tables`.

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
    if _is_embedding(model):
        raise TypeError("model is an embedding itself: put it into a module, e.g. nn.ModuleList")
    if tables is not None and not autograd.updates_in_backward(tables):
        raise TypeError(f"tables must be an optimizer that backward applies, got {tables!r}")
    optimizers = [optimizer] if isinstance(optimizer, TorchOptimizer) else list(optimizer)
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if _is_embedding(module) or _peer_of(module):
            paths.setdefault(module, []).append(path)
    owners = _owners(model)
    replaced, left = [], []
    for module, names in paths.items():
        reason = _reason_to_leave(module, owners)
        if reason:
            left.append(Left(names[0], reason))
        else:
            replaced.append(_plan(tuple(names), module, optimizers, tables))
    for one in replaced:
        _carry_over(one)
        _put(model, one.paths, one.new)
    return Migration(model, replaced, left, tables)


# Decisions


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.EmbeddingBag | nn.Embedding)


def _peer_of(module: nn.Module) -> str:
    """Return the library of a module of tables that is not torch's; "" for others."""
    library = type(module).__module__.partition(".")[0]
    names = ("EmbeddingBags", "EmbeddingBagCollection", "EmbeddingCollection")
    is_peer = library in ("fbgemm_gpu", "torchrec")
    return library if is_peer and any(name in type(module).__name__ for name in names) else ""


def _owners(model: nn.Module) -> dict[int, int]:
    """Return by parameter the number of modules that have it, to find weights that are tied."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return owners


def _reason_to_leave(module: Any, owners: dict[int, int]) -> str:
    """Return why a module cannot be swapped; "" if it can."""
    peer = _peer_of(module)
    if peer:
        return (
            f"a module of {peer}: with emblib.compat.fbgemm.install() before it is made, it runs "
            "on emblib's kernels"
        )
    if type(module) not in (nn.EmbeddingBag, nn.Embedding):
        return f"{type(module).__name__} is a subclass, whose code would be lost"
    if isinstance(module, nn.EmbeddingBag) and module.mode not in _POOLING:
        return f'mode="{module.mode}" has no counterpart: emblib pools by sum or mean'
    if module.max_norm is not None:
        return "max_norm has no counterpart"
    if module.scale_grad_by_freq:
        return "scale_grad_by_freq has no counterpart"
    if module.weight.dtype not in _DTYPES:
        return f"it has rows of {module.weight.dtype}; emblib has float32, float16 and bfloat16"
    if owners[id(module.weight)] > 1:
        return "its weight is tied to another module, which would not see updates in backward"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return "it has hooks: remove them first"
    is_padded = isinstance(module, nn.Embedding) and module.padding_idx is not None
    if is_padded and module.weight[module.padding_idx].count_nonzero():
        return "its padding row is not zeros, which emblib returns for padding"
    return ""


def _counterpart(trained: Trained) -> tuple[Optimizer | None, str]:
    """Return the optimizer that makes the same updates in backward, and how it differs."""
    group, kind = trained.group, type(trained.optimizer)
    if group.get("maximize") or group.get("weight_decay"):
        return None, ""
    lr = float(group["lr"])
    if kind is torch.optim.SGD and not group["momentum"]:
        return optim.SGD(lr), ""
    if kind is torch.optim.Adagrad and not group["lr_decay"]:
        return optim.Adagrad(lr, eps=group["eps"]), ""
    if kind is torch.optim.SparseAdam:
        note = "eps is added after the bias correction of the second moment, in SparseAdam before"
        return optim.Adam(lr, betas=tuple(group["betas"]), eps=group["eps"]), note
    return None, ""


def _plan(
    paths: tuple[str, ...],
    module: Any,
    optimizers: Sequence[TorchOptimizer],
    tables: Optimizer | None,
) -> Replaced:
    """Return what becomes of a module; only the new module is made."""
    trained = Trained.of(optimizers, module.weight)
    fused, note = tables, ""
    if fused is None and trained is not None and module.weight.requires_grad:
        fused, note = _counterpart(trained)
    if fused is None and module.sparse:
        fused = optim.External()  # leaves a sparse gradient, as before
    kind = MigratedEmbeddingBag if isinstance(module, nn.EmbeddingBag) else MigratedEmbedding
    return Replaced(paths, module, kind(module, fused), trained, note)


# Values and states


def _states_of(state: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
    """Return the states that have the shape of the weight."""
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.shape == weight.shape}


@torch.no_grad()
def _carry_over(one: Replaced) -> None:
    """Copy the rows and their states, and have the group follow."""
    old, table, trained = one.old, one.new.table, one.trained
    table.table_weights()[0].copy_(old.weight)
    if one.is_fused:
        if trained is not None:
            states = _states_of(trained.state, old.weight)
            for name, value in table.table_optimizer_states()[0].items():
                if name in states:
                    value.copy_(states[name])
            table.set_step(int(trained.state.get("step", 0)))
            trained.replace(old.weight, [])
        if not old.weight.requires_grad:
            one.new.requires_grad_(False)
        return
    table.weights.requires_grad_(old.weight.requires_grad)
    if trained is not None:
        trained.replace(old.weight, [table.weights])
        if trained.state:
            trained.optimizer.state[table.weights] = trained.state


@torch.no_grad()
def _carry_back(one: Replaced) -> None:
    """Copy the rows and their states into the old module, and have the group follow."""
    old, table, trained = one.old, one.new.table, one.trained
    old.weight.copy_(table.table_weights()[0])
    if trained is None:
        return
    if not one.is_fused:
        state = trained.optimizer.state.get(table.weights, {})
        trained.replace(table.weights, [old.weight])
        if state:
            trained.optimizer.state[old.weight] = state
        return
    trained.restore(old.weight)
    states = {
        name: value.clone()
        for name, value in table.table_optimizer_states()[0].items()
        if value.shape == old.weight.shape
    }
    if states and table.step:
        is_sparse_adam = type(trained.optimizer) is torch.optim.SparseAdam
        step = table.step if is_sparse_adam else torch.tensor(float(table.step))
        trained.optimizer.state[old.weight] = {**trained.state, "step": step, **states}
    elif trained.state:
        trained.optimizer.state[old.weight] = trained.state


def _put(model: nn.Module, paths: Sequence[str], module: nn.Module) -> None:
    for path in paths:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, module)


# Comparison


class _Twins:
    """Copies of an old module and of the one in its place, with optimizers in equal states.

    Args:
        one: the modules.
        tables: the argument of `migrate`.
        seed: selects `_CHECKED_ROWS` rows of the table; None for all rows.
    """

    def __init__(self, one: Replaced, tables: Optimizer | None, seed: int | None = None) -> None:
        old, table = one.old, one.new.table
        rows = torch.arange(old.num_embeddings)
        if seed is not None:
            rows = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
            rows = rows[:_CHECKED_ROWS]
            if old.padding_idx is not None:
                rows[0] = old.padding_idx
        self.rows = rows = rows.to(old.weight.device)
        padding = None if old.padding_idx is None else int((rows == old.padding_idx).nonzero()[0])
        options: dict[str, Any] = {"padding_idx": padding, "sparse": old.sparse}
        if isinstance(old, nn.EmbeddingBag):
            options["mode"] = old.mode
        module = type(old)(
            len(rows), old.embedding_dim, dtype=old.weight.dtype, device=rows.device, **options
        )
        with torch.no_grad():
            module.weight.copy_(table.table_weights()[0][rows])
        self.old = nn.ModuleDict({"table": module})
        self.old_optimizer: TorchOptimizer | None = None
        if one.trained is not None and old.weight.requires_grad:
            settings = {k: v for k, v in one.trained.group.items() if k != "params"}
            kind: Any = type(one.trained.optimizer)
            self.old_optimizer = kind([{"params": [module.weight], **settings}])
            state = self._state(one, rows)
            if state:
                self.old_optimizer.state[module.weight] = state
        self.new, self.new_optimizer = copy.deepcopy((self.old, self.old_optimizer))
        migrate(self.new, () if self.new_optimizer is None else self.new_optimizer, tables=tables)

    @staticmethod
    def _state(one: Replaced, rows: Tensor) -> dict[str, Any]:
        """Return the state that the optimizer of torch would have of the rows now."""
        assert one.trained is not None
        table, state = one.new.table, dict(one.trained.state)
        if one.is_fused:
            state |= table.table_optimizer_states()[0] if state else {}
            if "step" in state:
                step = state["step"]
                is_tensor = isinstance(step, Tensor)
                state["step"] = torch.full_like(step, table.step) if is_tensor else table.step
        shape = one.old.weight.shape
        return {
            name: value[rows].clone()
            if isinstance(value, Tensor) and value.shape == shape
            else copy.deepcopy(value)
            for name, value in state.items()
        }

    def step(self, which: str, *batch: Tensor) -> Tensor:
        """Make a training step of the "old" or "new" module; return its output."""
        model, optimizer = (
            (self.old, self.old_optimizer) if which == "old" else (self.new, self.new_optimizer)
        )
        assert optimizer is not None
        optimizer.zero_grad()
        out: Tensor = model["table"](*batch)
        generator = torch.Generator().manual_seed(1)
        out.backward(torch.randn(out.shape, generator=generator).to(out))
        optimizer.step()
        return out.detach()


def _compare(twins: _Twins, path: str) -> Difference:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(len(twins.rows), (16, 4), generator=generator).to(twins.rows)
    with torch.no_grad():
        outputs = [model["table"](ids).float() for model in (twins.old, twins.new)]
    output = (outputs[0] - outputs[1]).abs().max().item()
    if twins.old_optimizer is None:
        return Difference(path, output, None)
    twins.step("old", ids)
    twins.step("new", ids)
    old, new = (model["table"].weight for model in (twins.old, twins.new))
    assert isinstance(old, Tensor)
    assert isinstance(new, Tensor)
    return Difference(path, output, (old.float() - new.float()).abs().max().item())


def _batches(trace: LookupTrace, one: Replaced, batch_size: int) -> list[tuple[Tensor, ...]]:
    """Return the full batches that a trace has of a module, as arguments of its calls."""
    names = [feature.name for feature in trace.features]
    number = next((names.index(path) for path in one.paths if path in names), None)
    if number is None:
        return []
    device = one.old.weight.device
    lengths = trace.lengths[number].long()
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    batches: list[tuple[Tensor, ...]] = []
    for first in range(0, len(lengths) - batch_size + 1, batch_size):
        bounds = starts[first : first + batch_size + 1]
        ids = trace.ids[number][int(bounds[0]) : int(bounds[-1])].long().to(device)
        if isinstance(one.old, nn.EmbeddingBag):
            batches.append((ids, (bounds[:-1] - bounds[0]).to(device)))
        else:
            batches.append((ids,))
    return batches


def _speed(twins: _Twins, path: str, batches: Sequence[tuple[Tensor, ...]], rounds: int) -> Speed:
    def look_up(which: str, *batch: Tensor) -> None:
        with torch.no_grad():
            (twins.old if which == "old" else twins.new)["table"](*batch)

    def ratio(call: Callable[..., Any]) -> float:
        times: dict[str, list[float]] = {"old": [], "new": []}
        for number in range(-2, rounds):  # the first two are not counted
            for which in ("old", "new") if number % 2 else ("new", "old"):
                start = time.perf_counter()
                call(which, *batches[number % len(batches)])
                if twins.rows.is_cuda:
                    torch.cuda.synchronize(twins.rows.device)
                if number >= 0:
                    times[which].append(time.perf_counter() - start)
        return statistics.median(times["old"]) / statistics.median(times["new"])

    return Speed(path, ratio(look_up), None if twins.old_optimizer is None else ratio(twins.step))


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000 or unit == "GB":
            break
        nbytes /= 1000
    return f"{nbytes:.3g} {unit}"
