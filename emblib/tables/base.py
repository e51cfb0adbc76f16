"""Shared parts of the table modules: the base class `FusedTables`, checks and names of tables.

`FusedTables` manages what all trained modules have: features, optimizer, hyperparameters, freezing
and state dicts.

State dicts of dense tables have entries per table, so they load into any placement and device:
`<table>.weight` `[R, D]`, `<table>.<state>` `[R, D]` or `[R]` for each state of the optimizer, and
`hyper`, the numbers of the optimizer. The tensors are views of the module's memory, into which
`torch.distributed.checkpoint.load` writes. Lookups then read the new values, except in tables with
a row cache, which need a following `load_state_dict`.
"""

import operator
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.attribute_errors import shows_attribute_errors
from emblib.columns import FeatureColumn, Hyper
from emblib.grad_mode import without_gradients
from emblib.ops import autograd, tbe
from emblib.optim import FUSED, NO_UPDATE, External, Gradient, Optimizer, check_learning_rate
from emblib.optim.base import scheduled_rate
from emblib.specs import (
    BoundsCheck,
    MatmulPrecision,
    Pooling,
    Precision,
    check_bool,
    check_count,
    format_config,
)
from emblib.tables import batches, hyperparameters, parameters, state_dicts
from emblib.tables.bounds_report import report_of
from emblib.tables.locks import ModuleLock, atomic
from emblib.tables.parameters import caller_level
from emblib.torch_names import refuse_names_of_torch


class SpecKind(NamedTuple):
    """The class of specs that a module accepts.

    Attributes:
        spec_class: the class.
        example: a spec, for error messages.
        advice: advice for specs of another class.
    """

    spec_class: type
    example: str
    advice: str


class FusedTables(nn.Module):
    """Base of modules of T tables that F features read, usually with a fused optimizer.

    The constructor checks the common arguments, which `TableBatchedEmbeddingBags` documents; the
    subclass then locates the tables, sets `_layout` with `_feature_rows` and registers its memory.

    Backward applies a fused optimizer to the weights immediately, so they never have a `.grad`, and
    neither `torch.optim` nor gradient clipping or accumulation affects them. Gradients scaled by a
    `GradScaler` are divided by its scale, and not applied if they overflowed. An optimizer with
    `deferred=True` leaves gradients instead, which `FusedOptimizer.step` or `apply_gradients`
    applies. `requires_grad_(False)`, of this module or a parent, freezes the tables: from the next
    forward on there is no update, and no step is counted; `requires_grad_(True)` resumes training.
    `state_dict` includes the optimizer's numbers, float64 on the device; loading one restores them.

    `grad_anchor` is a scalar that requires grad; it ties outputs to autograd while the weights,
    which backward mutates in place, stay out of it.
    """

    weights: nn.Parameter  # the device tier, see `_register_row_buffers`; tensor trains have none
    features: Tensor  # int64 `[F, 8]`, see `FeatureColumn`; `[3 F, 8]` of tensor trains
    grad_anchor: Tensor  # scalar, see above
    bounds_violations: Tensor  # int64 `[2]`, invalid indices and offsets so far
    include_last_offset: bool

    __new__ = refuse_names_of_torch
    tables: tuple[Any, ...]  # specs of the class `spec_kind.spec_class`
    total_rows: int  # rows of all tables
    spec_kind: ClassVar[SpecKind]
    has_row_gradients: ClassVar[bool] = True
    """Whether gradients are of rows, so that External() leaves sparse ones."""
    has_matrix_products: ClassVar[bool] = False
    """Whether rows are products of matrices, which `Precision.matmul` is about."""
    fixed_buffers: ClassVar[tuple[str, ...]] = ("features",)
    """Buffers that depend only on constructor arguments."""
    _stored_buffers: parameters.FixedBuffers
    parameter_class: type[parameters.TableParameter] = parameters.TableParameter
    """The class of parameters that backward updates."""
    _layout: list[tuple[int, ...]]  # the values of `features`
    _frozen: bool = False
    """Whether all tables are frozen: nothing is updated, and no step is counted."""
    _frozen_tables: frozenset[int] = frozenset()
    """See `frozen_tables`."""

    def __init__(
        self,
        tables: Sequence[Any],
        optimizer: Optimizer | None,
        pooling: Pooling,
        feature_tables: Sequence[int] | None,
        precision: Precision | None,
        bounds_check: BoundsCheck,
    ) -> None:
        super().__init__()
        precision = Precision() if precision is None else precision
        if not isinstance(precision, Precision):
            raise TypeError(
                "precision must be a Precision, e.g. Precision(weights=torch.float16), got "
                f"{precision!r}"
            )
        if not self.has_matrix_products and precision.matmul is not MatmulPrecision.FLOAT32:
            raise ValueError(
                f"Precision(matmul={precision.matmul.value!r}) is for tensor trains, whose rows "
                f"are products of matrices; {type(self).__name__} has none: leave matmul out"
            )
        self._lock = ModuleLock()  # for changes of more than the weights of the rows of a lookup
        self.optimizer = NO_UPDATE if optimizer is None else optimizer
        self._unstepped_gradients = parameters.UnsteppedGradients(watch=optimizer is None)
        if not isinstance(self.optimizer, Optimizer):
            choices = ", ".join(cls.__name__ for cls in (*FUSED.values(), External))
            raise TypeError(
                f"optimizer must be an instance of one of emblib.optim's {choices}, e.g. "
                f"optim.SGD(lr=0.01), got {optimizer!r}; for one of torch.optim leave it out and "
                "give it the parameters"
            )
        self.pooling = Pooling(pooling)
        self.bounds_check = BoundsCheck(bounds_check)
        self.precision = precision
        self.output_dtype = precision.output
        self.tables = self._as_tuple(tables)
        self.feature_tables = table_numbers(feature_tables, len(self.tables))
        self._check_tables()
        self.table_names = table_names([spec.name for spec in self.tables])
        self._dims = [self.tables[t].dim for t in self.feature_tables]
        self.output_dim = sum(self._dims)
        if self.pooling is Pooling.NONE:
            self.output_dim = max(self._dims, default=0)

    def _as_tuple(self, tables: Any) -> tuple[Any, ...]:
        """Return one spec, or a sequence of specs, as a tuple."""
        kind = self.spec_kind
        if isinstance(tables, kind.spec_class):
            return (tables,)
        if not isinstance(tables, Iterable):
            raise TypeError(
                f"tables must be a list of {kind.spec_class.__name__}, e.g. [{kind.example}], got "
                f"{tables!r}"
            )
        return tuple(tables)

    def _check_tables(self) -> None:
        kind = self.spec_kind
        for t, spec in enumerate(self.tables):
            if not isinstance(spec, kind.spec_class):
                raise TypeError(
                    f"tables[{t}] must be a {kind.spec_class.__name__}, e.g. {kind.example}, got "
                    f"{spec!r}; {kind.advice}"
                )
        check_features(self.tables, self.feature_tables, self.pooling)
        dims = sorted({spec.dim for spec in self.tables})
        is_sparse = self.optimizer.leaves_gradient is Gradient.SPARSE
        if len(dims) > 1 and is_sparse and self.has_row_gradients:
            raise ValueError(
                f"a sparse gradient is [rows, dim], so {format_config(self.optimizer)} needs one "
                f"dim for all tables, got {dims}; make one module per dim, a collection, or use "
                "External(gradient=Gradient.DENSE)"
            )

    def _feature_rows(
        self, make_row: Callable[[int, int], tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        """Return the rows of `features`: `make_row(table, first output column)` per feature."""
        column, rows = 0, []
        for t, dim in zip(self.feature_tables, self._dims, strict=True):
            rows.append(make_row(t, column))
            column += 0 if self.pooling is Pooling.NONE else dim
        return rows

    def _register_row_buffers(
        self, weights: Tensor, states: Sequence[Tensor], *, persistent: bool = True
    ) -> None:
        """Register weights `[sum rows * dim]` as a parameter and states as buffers.

        If backward leaves gradients and all tables have one dim, weights are `[rows, dim]`, else
        flat.
        """
        has_gradient = not autograd.updates_in_backward(self.optimizer)
        dims = {spec.dim for spec in self.tables}
        if has_gradient and len(dims) == 1:
            weights = weights.view(-1, *dims)
        self.weights = nn.Parameter(weights)
        for state, tensor in zip(self.optimizer.states, states, strict=True):
            self.register_buffer(f"state_{state.name}", tensor, persistent=persistent)

    def _register_common(self, device: torch.device) -> None:
        """Register the common buffers: `features`, `hyper`, `grad_anchor`, `bounds_violations`.

        `features` tells kernels the location of each table. Modules that save it use it only to
        refuse a checkpoint of other tables; its values always come from `_layout`.
        """
        features = torch.empty(
            len(self._layout), len(FeatureColumn), dtype=torch.int64, device=device
        )
        self.register_buffer("features", features)
        self.register_buffer("hyper", self.initial_hyperparams().to(device))
        grad_anchor = torch.zeros((), device=device, requires_grad=True)
        self.register_buffer("grad_anchor", grad_anchor, persistent=False)
        violations = torch.zeros(2, dtype=torch.int64, device=device)
        self.register_buffer("bounds_violations", violations, persistent=False)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, and mark it as owned by this module if its optimizer is fused.

        Raises:
            RuntimeError: it would replace one that has only some of the tables.
        """
        if name in self._parameters and self.parameter_class is parameters.IncompleteParameter:
            parameters.refuse_incomplete()
        super().register_parameter(name, param)
        if param is not None:
            self._mark_parameter(param)

    def _mark_parameters(self) -> None:
        for parameter in self.parameters(recurse=True):
            self._mark_parameter(parameter)

    def _mark_parameter(self, parameter: nn.Parameter) -> None:
        """Prepare a parameter for the optimizer of the tables.

        A parameter that backward updates notifies this module when it is frozen. With a deferred
        optimizer it takes float32 gradients, and no other optimizer may step it.
        """
        if autograd.updates_in_backward(self.optimizer):
            parameters.set_owner(parameter, self, self.parameter_class)
        elif self.optimizer.deferred:
            parameters.ask_for_float32_gradient(parameter)
            any_parameter: Any = parameter
            if type(parameter) is nn.Parameter:
                any_parameter.__class__ = parameters.DeferredParameter
            any_parameter._in_backward_optimizers = [self.optimizer]

    def _check_not_wrapped(self, weights: Iterable[Any]) -> None:
        """Raise RuntimeError if a wrapper of torch has replaced or replicated the tables.

        `weights` are the parameters that lookups read.
        """
        parameters.check_not_replicated(self.features)
        if parameters.is_any_replaced(weights):
            raise RuntimeError(
                "the weights of a table with a fused optimizer were replaced, as fully_shard does: "
                "updates would go to a copy. Use emblib.sharding.DistributedModelParallel, with "
                'wrap="fully_shard" for the dense part, or give fully_shard the parameters of '
                "tables as ignored_params; write values with load_state_dict"
            )

    def lay_out_bags(
        self, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> tuple[Tensor | None, int]:
        """Return `bag_layout` and `output_dim` of a batch, see `batches.lay_out_bags`."""
        device = self.features.device
        return batches.lay_out_bags(self.pooling, self._dims, offsets, batch_sizes, device)

    def _states(self) -> list[Tensor]:
        return [getattr(self, f"state_{state.name}") for state in self.optimizer.states]

    @property
    def hyperparams(self) -> Tensor:
        """Return the optimizer's numbers (`Hyper`), float64; `hyper` in state dicts."""
        hyperparams = self._buffers["hyper"]
        assert hyperparams is not None
        return hyperparams

    @property
    @shows_attribute_errors
    def step(self) -> int:
        """Return the number of updates so far (reads the device)."""
        report_of(self).poll()
        return int(self.hyperparams[Hyper.STEP])

    @atomic
    def set_step(self, step: int) -> None:
        """Continue counting from `step`, which bias corrections and row counters use.

        Raises:
            TypeError: `step` is not an int.
            ValueError: `step` is negative.
        """
        step = check_count("step", step, minimum=0)
        self.hyperparams[Hyper.STEP].fill_(step)

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the fused optimizer, 0 without one (reads the device)."""
        return float(self.hyperparams[Hyper.LEARNING_RATE])

    @atomic
    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate, from the next update on; `optimizer.lr` does not change.

        Raises:
            RuntimeError: the tables leave gradients for another optimizer.
            ValueError: `lr` is not a number >= 0 that is finite in float32.
        """
        if not autograd.is_fused(self.optimizer):
            raise RuntimeError(
                "these tables leave gradients for your own optimizer: set its learning rate"
            )
        lr = scheduled_rate(lr)
        check_learning_rate(lr)
        lr = float(lr)  # of a tensor of one number, as of torch.optim
        # A kernel argument; `= lr` might copy from the host, and wait for the GPU.
        self.hyperparams[Hyper.LEARNING_RATE].fill_(lr)
        hyperparameters.notify_observers(self, lr)

    @atomic
    def set_hyperparameters(self, **changes: Any) -> None:
        """Change numbers of the optimizer: any fields of its dataclass, e.g. `eps=1e-6`.

        `optimizer` becomes a changed copy, with effect from the next update on. The step count is
        kept, and so is a learning rate that is not among the changes. The kind of the optimizer
        cannot change.

        Raises:
            RuntimeError: the tables leave gradients for another optimizer.
            TypeError: the optimizer has no such field, or a field has a value of another type.
            ValueError: a field cannot have its value, or the value would make it another kind of
                optimizer.
        """
        if not autograd.is_fused(self.optimizer):
            raise RuntimeError(
                "these tables leave gradients for your own optimizer: set its numbers"
            )
        hyperparameters.set_fields(self, changes)

    @without_gradients
    def load_hyperparams(self, values: Tensor) -> None:
        """Overwrite `hyperparams`, including the step, with saved values.

        `values` is `[n]` as `hyperparams` is, with the entries of `emblib.columns.Hyper`; its dtype
        and device may differ. The host waits for a GPU that has it.

        Raises:
            TypeError: `values` is not a tensor.
            ValueError: the optimizer cannot have the numbers; nothing is changed.
        """
        batches.check_tensor("values", values)
        hyperparameters.set_fields_from_hyperparams(self, values)
        self.hyperparams.copy_(values)

    def initial_hyperparams(self) -> Tensor:
        """Return `hyperparams` of `optimizer` before its first step, float64 on the CPU."""
        hyper = self.optimizer.hyperparams("cpu")
        if self.precision.stochastic_rounding is not None:
            hyper[Hyper.SEED] = float(self.precision.stochastic_rounding.seed)
        return hyper

    @atomic
    @without_gradients
    def apply_gradients(self) -> None:
        """Make one step of a deferred optimizer with the gradients that backward left.

        Gradients stay as they are, so call `zero_grad` before the next backward. Tables without a
        gradient do not change; without any there is no step. `FusedOptimizer.step` calls this.

        Raises:
            RuntimeError: the optimizer is not deferred.
        """
        if not autograd.is_fused(self.optimizer):
            raise RuntimeError(
                "these tables leave gradients for your own optimizer: call its step()"
            )
        if not self.optimizer.deferred:
            raise RuntimeError(
                f"{format_config(self.optimizer)} leaves no gradients to apply: backward makes the "
                "update; pass deferred=True to the optimizer to make it later"
            )
        self._apply_gradients()

    def _apply_gradients(self) -> None:
        """Apply the gradients that are on the parameters of deferred tables."""
        gradients_of_features = [
            (feature, parameter.grad)
            for feature, parameter in self._parameters_by_feature()
            if parameter.grad is not None
        ]
        if not gradients_of_features:
            return
        features, gradients = zip(*gradients_of_features, strict=True)
        device = self.hyperparams.device
        rows, values = zip(*(_rows_and_values(grad.to(device)) for grad in gradients), strict=True)
        batch = autograd.lookup_of_rows(features, rows, self.total_rows)
        locations = self._locate(autograd.groups_of(batch))
        autograd.apply_row_gradients(
            self._tiers(), self.optimizer, batch, locations, torch.cat(values)
        )

    def _parameters_by_feature(self) -> list[tuple[tuple[int, ...], nn.Parameter]]:
        """Return the parameters that get gradients, with their rows of `features`."""
        feature = [0] * len(FeatureColumn)
        feature[FeatureColumn.ROWS], feature[FeatureColumn.DIM] = self.weights.shape
        return [(tuple(feature), self.weights)]

    def _locate(self, groups: tbe.Groups) -> autograd.RowLocations:
        """Return the current locations of the rows that an update writes."""
        return autograd.RowLocations(groups)

    def _tiers(self) -> autograd.Tiers:
        """Return weights, optimizer states and hyperparameters, in the form that ops take."""
        raise NotImplementedError

    def begin_step(self, *, is_joint: bool) -> None:
        """Do nothing; a subclass runs the periodic part of its optimizer."""

    def set_trained(self, parameter: nn.Parameter, *, trained: bool) -> None:
        """Train all tables, which share the parameter, from the next forward on, or freeze them."""
        self._frozen = not trained

    def before_read(self) -> None:
        """Do nothing: the parameters are the memory that lookups read."""

    def before_write(self) -> None:
        """Do nothing: the parameters are the memory that lookups read."""

    def table_number(self, table: int | str) -> int:
        """Return the number of a table that is given by number or name.

        Raises:
            KeyError, IndexError: there is no such table.
            TypeError: neither a number nor a name.
        """
        return table_number(self.table_names, table)

    def set_table_trained(self, table: int | str, *, trained: bool) -> None:
        """Train a table from the next forward on, or freeze it; see `table_number` for errors."""
        check_bool("trained", trained)
        table = self.table_number(table)
        frozen_tables = self._frozen_tables - {table}
        self._frozen_tables = frozen_tables if trained else frozen_tables | {table}
        self._frozen = len(self._frozen_tables) == len(self.tables)

    @property
    def frozen_tables(self) -> frozenset[int]:
        """Return the numbers of frozen tables, in modules that freeze tables one by one.

        Empty in a module whose tables share one parameter: `is_frozen` tells whether they train.
        """
        return self._frozen_tables

    @property
    def is_frozen(self) -> bool:
        """Return whether all tables are frozen: backward updates nothing and counts no step."""
        return self._frozen

    def _reset_common(self) -> None:
        self.load_hyperparams(self.initial_hyperparams())
        self._restore()

    def _restore(self) -> None:
        """Recompute buffers that depend only on constructor arguments, after a move or a load.

        On the same device they keep their memory, which captured graphs read. After a move the
        count of violations starts from zero.
        """
        self._mark_parameters()
        device = self.hyperparams.device
        layout = torch.tensor(self._layout, dtype=torch.int64, device="cpu").view(
            -1, len(FeatureColumn)
        )
        if (
            self.features.device == device
            and self.grad_anchor.requires_grad
            and self.grad_anchor.is_leaf
        ):
            self.features.copy_(layout)  # a captured CUDA graph has its address
        else:
            self.features = layout if device.type == "cpu" else layout.to(device)
            self.grad_anchor = torch.zeros((), device=device, requires_grad=True)
            self.bounds_violations = torch.zeros(2, dtype=torch.int64, device=device)
        self._store_fixed_buffers()

    def _store_fixed_buffers(self) -> None:
        """Store the values that `fixed_buffers` have now, for `check_layout`."""
        self._stored_buffers = parameters.FixedBuffers(
            getattr(self, name) for name in self.fixed_buffers
        )

    def check_layout(self) -> None:
        """Restore the fixed buffers if code outside this library has written them."""
        if not self._stored_buffers.are_intact():
            self._stored_buffers.restore()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict, or nothing of it if an entry is invalid.

        Raises:
            RuntimeError: an entry is invalid or, with `strict`, a key is missing or unexpected.
        """
        if strict:
            state_dicts.check_keys(self._expected_keys(state_dict), state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    def _expected_keys(self, state_dict: Mapping[str, Any]) -> Iterable[str]:
        """Return the keys that a strict load of `state_dict` requires."""
        raise NotImplementedError

    @ops.keeping_parameters()
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        if state_dicts.refuse_invalid(self, state_dict, prefix, arguments[-1]):
            return
        hyperparams = state_dict.get(f"{prefix}hyper")
        if isinstance(hyperparams, Tensor) and hyperparams.shape == self.hyperparams.shape:
            hyperparameters.set_fields_from_hyperparams(self, hyperparams)
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._restore()

    def _checkpoint(self) -> dict[str, Tensor]:
        """Return the tensors of the state dict of the module, without those of its children."""
        return state_dicts.loadable_tensors(self, "")

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the module in a state dict."""
        tensors = {prefix + key: tensor for key, tensor in self._checkpoint().items()}
        features = tensors.pop(f"{prefix}features", None)
        if features is not None and f"{prefix}features" in state_dict:
            saved_features = state_dict[f"{prefix}features"]
            problem = state_dicts.tensor_problem(saved_features, features)
            if not problem and saved_features.tolist() != [list(row) for row in self._layout]:
                problem = (
                    "the checkpoint is of other tables; its (weight_offset, row_base, rows, dim, "
                    f"column, ...) by feature are {saved_features.tolist()[:4]}, this module's are "
                    f"{self._layout[:4]}"
                )
            if problem:
                yield f"{prefix}features: {problem}"
        problems = list(state_dicts.entry_problems(state_dict, tensors))
        yield from problems
        if not problems and (hyper_key := f"{prefix}hyper") in state_dict:
            try:
                hyperparameters.with_saved_hyperparams(self.optimizer, state_dict[hyper_key])
            except ValueError as error:
                yield f"{hyper_key}: {error}"

    @ops.keeping_parameters()
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        warn_of_dtype(fn, "precision=Precision(weights=...)")
        loses_values = self.hyperparams.is_meta or parameters.loses_values(fn)
        anchor = self.grad_anchor
        # `IncompleteParameter` overrides torch functions.
        with torch._C.DisableTorchFunctionSubclass():
            super()._apply(ops.keep_dtype(fn), recurse)
        if loses_values and not self.hyperparams.is_meta:
            self.load_hyperparams(self.initial_hyperparams())
        self._restore()
        # It stays the same object, as parameters do: optimizers made before a move have it.
        if torch._has_compatible_shallow_copy_type(anchor, self.grad_anchor):
            anchor.data, anchor.grad = self.grad_anchor.data, None
            self.grad_anchor = anchor
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stored_buffers.restore()
        self._mark_parameters()

    def _describe_size(self, spec: Any) -> str:
        """Describe a table for `extra_repr`."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Describe tables, optimizer and options."""
        sizes = ", ".join(
            f"{name}: {self._describe_size(spec)}"
            for name, spec in zip(self.table_names[:4], self.tables, strict=False)
        )
        omitted = f", ... {len(self.tables)} tables" if len(self.tables) > 4 else ""
        fields = [
            f"[{sizes}{omitted}]",
            format_config(self.optimizer),
            f"pooling={self.pooling.value}",
        ]
        if self.precision != Precision():
            fields.append(format_config(self.precision))
        return ", ".join(fields)


def _rows_and_values(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows `[N]` and values `[N, dim]` of a sparse or dense gradient."""
    if not gradient.is_sparse:
        return torch.arange(gradient.shape[0], device=gradient.device), gradient
    return gradient._indices()[0], gradient._values()


class _LastWarning:
    """The last function of `nn.Module._apply` that tables warned of, with the named arguments."""

    fn: Callable[[Tensor], Tensor] | None = None
    arguments: ClassVar[set[str]] = set()


def _note_warning(fn: Callable[[Tensor], Tensor], argument: str) -> bool:
    """Note a warning of `fn` and `argument`; return whether another table has given it already."""
    if _LastWarning.fn is not fn:
        _LastWarning.fn = fn
        _LastWarning.arguments.clear()
    has_warned = argument in _LastWarning.arguments
    _LastWarning.arguments.add(argument)
    return has_warned


def warn_of_dtype(fn: Callable[[Tensor], Tensor], argument: str) -> None:
    """Warn where a function of `nn.Module._apply` would change the dtype of a table.

    A model calls one function for all its tables: the first one with this `argument` warns. It is
    the argument of the module's constructor that selects the dtype, for the message.
    """
    requested_dtype = fn(torch.empty(0, dtype=torch.float32, device="cpu")).dtype
    if requested_dtype != torch.float32 and not _note_warning(fn, argument):
        warnings.warn(
            f"emblib: tables keep their dtypes, {requested_dtype} is ignored; choose them when "
            f"making one: {argument}, in a collection data_type= of the configuration",
            stacklevel=caller_level(),
        )


def table_numbers(feature_tables: Sequence[int] | None, num_tables: int) -> tuple[int, ...]:
    """Return the table of each feature; None gives feature i table i.

    Raises:
        TypeError: `feature_tables` is not a sequence of integers.
    """
    if feature_tables is None:
        return tuple(range(num_tables))
    try:
        return tuple(operator.index(table) for table in feature_tables)
    except TypeError:
        raise TypeError(
            "feature_tables must be the number of a table for each feature, e.g. [0, 0, 1], got "
            f"{feature_tables!r}"
        ) from None


def check_features(tables: Sequence[Any], feature_tables: Sequence[int], pooling: Pooling) -> None:
    """Raise ValueError for features of missing tables, or tables of different dims for NONE."""
    for feature, table in enumerate(feature_tables):
        if not 0 <= table < len(tables):
            raise ValueError(
                f"feature_tables[{feature}] must be in [0, {len(tables)}), the number of tables, "
                f"got {table}"
            )
    dims = sorted({spec.dim for spec in tables})
    if len(dims) > 1 and pooling is Pooling.NONE:
        raise ValueError(
            f"pooling NONE needs one dim for all tables, got {dims}; make one module per dim"
        )


def table_names(names: Sequence[str]) -> list[str]:
    """Return the name of each table in state dicts: its own, or `table_<i>` if it has none.

    Raises:
        ValueError: two tables have the same name.
    """
    filled_names = [name or f"table_{t}" for t, name in enumerate(names)]
    for name in filled_names:
        if filled_names.count(name) > 1:
            raise ValueError(f"tables of a module must differ in name, got {name!r} twice")
    return filled_names


def table_number(names: Sequence[str], table: int | str) -> int:
    """Return the number of a table that is given by number or name.

    Args:
        names: the names of all tables of a module.
        table: a number from 0 on, or one of `names`.

    Raises:
        KeyError, IndexError: there is no such table.
        TypeError: neither a number nor a name.
    """
    if isinstance(table, str):
        if table not in names:
            raise KeyError(f"there is no table {table!r}; have {', '.join(names)}")
        return names.index(table)
    if isinstance(table, bool) or not hasattr(table, "__index__"):
        raise TypeError(f"a table is given by number or name, got {table!r}")
    if not 0 <= table < len(names):
        raise IndexError(f"table must be in [0, {len(names)}), the number of tables, got {table}")
    return operator.index(table)


# Per table its `weight` and optimizer states by name, as views of the module's memory.
TableViews = list[dict[str, Tensor]]


def state_entries(names: Sequence[str], views: TableViews) -> Iterator[tuple[str, Tensor]]:
    """Yield (`<table>.<entry>`, tensor) of the views, table after table."""
    for name, tensors in zip(names, views, strict=True):
        for key, tensor in tensors.items():
            yield f"{name}.{key}", tensor
