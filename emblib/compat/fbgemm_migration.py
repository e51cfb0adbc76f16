"""Migration of FBGEMM's modules to the classes of the same names in `emblib.compat`.

`_arguments` reconstructs the constructor arguments of a module from its attributes. They make the
new module, and the small copies of the old one that `Migration.check` compares. Old and new modules
have the same methods, so that `_copy_values` copies between any two of them, in either direction.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from emblib import optim
from emblib.compat import fbgemm, fbgemm_inference
from emblib.migration import (
    Bags,
    MigratedTable,
    NotMigrated,
    Replaced,
    TorchWeight,
    Trained,
    TrainingMemory,
    chosen_rows,
)


def _arguments(old: Any) -> dict[str, Any]:
    """Return constructor arguments of a training module of FBGEMM, with FBGEMM's enums."""
    types: Any = sys.modules[type(old).__module__]
    args, optimizer_name = old.optimizer_args, old.optimizer.name
    decay_mode = old.weight_decay_mode.name
    ignored_options = _ignored_options(old)
    has_decay = optimizer_name.startswith(("EXACT_ROWWISE", "ADAM", "PARTIAL", "LAMB", "LARS"))
    if optimizer_name == "EXACT_ROWWISE_ADAGRAD" and decay_mode == "NONE":
        has_decay = False  # FBGEMM ignores the rate
    has_decay = has_decay and "weight_decay" not in ignored_options
    has_max_norm = optimizer_name == "EXACT_ROWWISE_ADAGRAD" and "max_norm" not in ignored_options
    placements = old.weights_physical_placements
    arguments = {
        "embedding_specs": [
            (rows, dim, location, device)
            for (rows, dim, _, device), location in zip(
                old.embedding_specs, placements, strict=True
            )
        ],
        "feature_table_map": list(old.feature_table_map),
        "weights_precision": old.weights_precision,
        "output_dtype": types.SparseType.from_int(old.output_dtype),
        "optimizer": old.optimizer,
        "stochastic_rounding": old.stochastic_rounding,
        "gradient_clipping": args.gradient_clipping,
        "max_gradient": args.max_gradient,
        "max_norm": args.max_norm if has_max_norm else 0.0,
        "learning_rate": _shortest_decimal(old.get_learning_rate()),
        "eps": args.eps,
        "momentum": args.momentum,
        "weight_decay": args.weight_decay if has_decay else 0.0,
        "weight_decay_mode": old.weight_decay_mode,
        "eta": args.eta,
        "beta1": args.beta1,
        "beta2": args.beta2,
        "pooling_mode": old.pooling_mode,
        "device": old.current_device,
        "bounds_check_mode": types.BoundsCheckMode(old.bounds_check_mode_int),
        "table_names": old.table_names,
        "prefetch_pipeline": old.prefetch_pipeline,
        "multipass_prefetch_config": old.multipass_prefetch_config,
        "gather_uvm_cache_stats": old.gather_uvm_cache_stats,
        "record_cache_metrics": old.record_cache_metrics,
        "embedding_table_index_type": old.embedding_table_index_type,
        "embedding_table_offset_type": old.embedding_table_offset_type,
        **_options(old, types),
    }
    if old.max_D_cache:
        arguments["cache_algorithm"] = old.cache_algorithm
        arguments["cache_sets"] = old.lxu_cache_state.size(0)
        dtype = old.lxu_cache_weights.dtype
        arguments["cache_precision"] = types.SparseType.from_dtype(dtype)
    if optimizer_name in ("PARTIAL_ROWWISE_ADAM", "ENSEMBLE_ROWWISE_ADAGRAD"):
        momentum_number = 1 if optimizer_name == "PARTIAL_ROWWISE_ADAM" else 2
        state = getattr(old, f"momentum{momentum_number}_dev")
        state_format = types.SparseType.from_dtype(state.dtype)
        arguments["optimizer_state_dtypes"] = {f"momentum{momentum_number}": state_format}
    return arguments


@dataclass(frozen=True)
class _SameReporter:
    """Configuration whose `create_reporter` returns the reporter of the old module, or None."""

    reporter: Any

    def create_reporter(self) -> Any:
        """Return the reporter."""
        return self.reporter


def _shortest_decimal(number: float) -> float:
    """Return the shortest decimal that rounds to a float32, e.g. 0.05 for 0.05000000074505806."""
    decimal = float(f"{number:.7g}")
    return decimal if torch.tensor(decimal, device="cpu").item() == number else number


def _ignored_options(old: Any) -> list[str]:
    """Return the names of the arguments that FBGEMM ignores because the module is on a CPU."""
    names = []
    if old.use_cpu and old.optimizer_args.max_norm:
        names.append("max_norm")
    has_one_feature_per_table = len(old.feature_table_map) == len(old.embedding_specs)
    if (
        old.use_cpu
        and has_one_feature_per_table
        and old.weight_decay_mode.name in ("L2", "DECOUPLE")
    ):
        names.append("weight_decay")
    return names


def _options(old: Any, types: Any) -> dict[str, Any]:
    """Return the option objects of weight decay and optimizer of a module, by argument.

    `types` is the module of FBGEMM that has their classes.
    """
    args, decay_mode = old.optimizer_args, old.weight_decay_mode.name
    optimizer_name = old.optimizer.name
    private_attributes = vars(old)
    options: dict[str, Any] = {}
    if decay_mode == "COUNTER":
        options["counter_based_regularization"] = types.CounterBasedRegularizationDefinition(
            counter_weight_decay_mode=types.CounterWeightDecayMode(args.weight_decay_mode),
            counter_halflife=args.counter_halflife,
            adjustment_iter=args.adjustment_iter,
            adjustment_ub=args.adjustment_ub,
            learning_rate_mode=types.LearningRateMode(args.learning_rate_mode),
            grad_sum_decay=types.GradSumDecay(args.grad_sum_decay),
            tail_id_threshold=types.TailIdThreshold(
                val=args.tail_id_threshold, is_ratio=bool(args.is_tail_id_thresh_ratio)
            ),
            max_counter_update_freq=private_attributes["_max_counter_update_freq"],
        )
    elif decay_mode == "COWCLIP":
        options["cowclip_regularization"] = types.CowClipDefinition(
            counter_weight_decay_mode=types.CounterWeightDecayMode(args.weight_decay_mode),
            counter_halflife=args.counter_halflife,
            weight_norm_coefficient=args.weight_norm_coefficient,
            lower_bound=args.lower_bound,
        )
    elif decay_mode == "DECOUPLE_GLOBAL":
        options["global_weight_decay"] = types.GlobalWeightDecayDefinition(
            start_iter=old.gwd_start_iter, lower_bound=old.gwd_lower_bound
        )
    if optimizer_name == "ENSEMBLE_ROWWISE_ADAGRAD":
        numbers = private_attributes["_ensemble_mode"]
        mode = types.StepMode(int(numbers["step_mode"]))
        options["ensemble_mode"] = types.EnsembleModeDefinition(**{**numbers, "step_mode": mode})
    elif optimizer_name == "EMAINPLACE_ROWWISE_ADAGRAD":
        options["emainplace_mode"] = types.EmainplaceModeDefinition(
            **private_attributes["_emainplace_mode"]
        )
    if old.use_rowwise_bias_correction or old.use_writeback_bwd_prehook:
        options["extra_optimizer_config"] = types.UserEnabledConfigDefinition(
            use_rowwise_bias_correction=old.use_rowwise_bias_correction,
            use_writeback_bwd_prehook=old.use_writeback_bwd_prehook,
            writeback_first_feature_only=private_attributes["_writeback_first_feature_only"],
            precompute_writeback=private_attributes["_precompute_writeback"],
        )
    return options


def step_of(module: Any) -> int:
    """Return the number of steps of a module of FBGEMM or emblib.

    It is the larger one of two counters, which may differ after FBGEMM loaded a checkpoint.
    """
    return max(int(module.iter), int(module.iter_cpu))


@torch.no_grad()
def _copy_values(
    source: Any, target: Any, row_ids: Sequence[Tensor] | None = None, *, counts_rows: bool
) -> None:
    """Copy rows, optimizer states, step and learning rate from one module to another.

    Args:
        source: training module of FBGEMM or of emblib.
        target: such a module, which is written.
        row_ids: rows of `source` for the rows of `target`, per table; None for all rows.
        counts_rows: whether the optimizer counts how often rows are seen.
    """
    source.flush()
    weights = zip(target.split_embedding_weights(), source.split_embedding_weights(), strict=True)
    states = zip(target.split_optimizer_states(), source.split_optimizer_states(), strict=True)
    pairs_by_table = [[pair] for pair in weights]
    for pairs, (new_states, old_states) in zip(pairs_by_table, states, strict=False):
        pairs += zip(new_states, old_states, strict=True)  # SGD has none
    for t, pairs in enumerate(pairs_by_table):
        for new, old in pairs:
            values = old if row_ids is None else old[row_ids[t].to(old.device)]
            new.copy_(values.view_as(new))
    step = step_of(source)
    if isinstance(target, fbgemm.SplitTableBatchedEmbeddingBagsCodegen):
        target.set_optimizer_step(step)
    else:
        target.iter.fill_(step)
        target.iter_cpu.fill_(step)
    if counts_rows:
        target.max_counter.copy_(source.max_counter)
    target.set_learning_rate(_shortest_decimal(source.get_learning_rate()))
    target.reset_cache_states()


class _ReplacedTBE(Replaced):
    """Base of the replacements of FBGEMM's modules: `old` and `new` have the same interface."""

    _constructor_arguments: dict[str, Any]  # arguments that make the old and the new module

    @property
    def optimizers(self) -> list[optim.Optimizer]:
        """Optimizers that update tables in backward: none."""
        return []

    @property
    def measured_nbytes(self) -> int:
        """Bytes of the new tables and their states, as `nbytes()` counts them."""
        return sum(self.new.bags.nbytes().values())

    def features(self) -> list[tuple[tuple[str, ...], int]]:
        """Return the name of each feature, as `TraceRecorder` has it per path, and its table."""
        return [
            (tuple(f"{path}.{number}" for path in self.paths), table)
            for number, table in enumerate(self._constructor_arguments["feature_table_map"])
        ]

    def call(self, module: Any, bags: Sequence[Bags]) -> Tensor:
        """Look up `bags`, the ids and lengths of each feature, with the old or the new module."""
        lengths = torch.cat([lengths for _, lengths in bags])
        offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
        output: Tensor = module(torch.cat([ids for ids, _ in bags]), offsets)
        return output

    def rows(self, module: Any) -> list[Tensor]:
        """Return the rows of each table of the old or the new module."""
        return [rows.detach() for rows in module.split_embedding_weights()]

    def sizes(self) -> str:
        """Return a text with the numbers of tables and rows."""
        # Specs of inference modules begin with the name of the table.
        specs = self.old.embedding_specs
        row_counts = [spec[1] if isinstance(spec[0], str) else spec[0] for spec in specs]
        return f"{len(row_counts)} tables, {sum(row_counts)} rows"


class ReplacedSplitTBE(_ReplacedTBE):
    """Replacement of FBGEMM's module with a fused optimizer."""

    def __init__(
        self, paths: Sequence[str], old: Any, optimizers: Sequence[TorchOptimizer], tables: Any
    ) -> None:
        _check_class(old)
        if old.optimizer.name == "NONE":
            raise NotMigrated(
                "OptimType.NONE leaves its gradient to an optimizer of your own: make it with "
                "emblib.compat.fbgemm, whose class takes the same arguments"
            )
        self._constructor_arguments = _arguments(old)
        reporter_config: Any = _SameReporter(old.stats_reporter)
        with warnings.catch_warnings():  # of hyperparameters that the optimizer does not have
            warnings.filterwarnings("ignore", "emblib: .* no part", UserWarning)
            try:
                new = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
                    **self._constructor_arguments, stats_reporter_config=reporter_config
                )
            except (NotImplementedError, ValueError) as error:
                raise NotMigrated(str(error)) from error
        self._is_counted = old.weight_decay_mode.name == "COUNTER"
        notes = [
            f"{name} is left out: FBGEMM ignores it on a CPU" for name in _ignored_options(old)
        ]
        if new.bags.precision.stochastic_rounding is not None:
            notes.append("updates are rounded by other random numbers")
        if new.bags.optimizer.weight_decay is not None and old.use_cpu and not self._is_counted:
            notes.append("on a CPU, FBGEMM decays only the tables of several features; here all")
        if old.use_cpu and old.pooling_mode.name == "MEAN":
            notes.append("gradients of weighted means are divided too, unlike FBGEMM's on a CPU")
        self.note = "; ".join(notes)
        super().__init__(paths, old, new)

    @property
    def memory(self) -> tuple[TrainingMemory, TrainingMemory]:
        """Bytes of rows, optimizer states and cache, before and after."""
        old, new = self.old, self.new.bags
        names = ("lxu_cache_weights", "lxu_cache_state", "lxu_state") if old.max_D_cache else ()
        cache = _nbytes([getattr(old, name) for name in names])
        states = [state for table in old.split_optimizer_states() for state in table]
        before = TrainingMemory(_nbytes(old.split_embedding_weights()), _nbytes(states), 0, cache)
        new_states = [state for table in new.table_optimizer_states() for state in table.values()]
        cache = new.nbytes().get("cache", 0)
        return before, TrainingMemory(_nbytes(new.table_weights()), _nbytes(new_states), 0, cache)

    @property
    def optimizers(self) -> list[optim.Optimizer]:
        """The optimizer of all tables."""
        return [self.new.bags.optimizer]

    def copy_values(self, source: Any, target: Any) -> None:
        """Copy rows, states, step and learning rate from one module to the other."""
        _copy_values(source, target, counts_rows=self._is_counted)

    def carry_over(self) -> None:
        """Copy rows, states, step and learning rate into the new module."""
        self.copy_values(self.old, self.new)

    def carry_back(self) -> None:
        """Copy rows, states, step and learning rate into the old module."""
        self.copy_values(self.new, self.old)

    def sample(self, max_rows: int | None, seed: int) -> tuple[nn.Module, list[TorchOptimizer]]:
        """Return a module of FBGEMM with up to `max_rows` rows per table, and no optimizers.

        Its backward updates the rows.
        """
        specs = self._constructor_arguments["embedding_specs"]
        row_ids = [chosen_rows(spec[0], max_rows, seed) for spec in specs]
        smaller_specs = [
            (len(table_ids), *spec[1:]) for table_ids, spec in zip(row_ids, specs, strict=True)
        ]
        module = type(self.old)(**{**self._constructor_arguments, "embedding_specs": smaller_specs})
        _copy_values(self.new, module, row_ids, counts_rows=self._is_counted)
        return module, []


class ReplacedDenseTBE(_ReplacedTBE):
    """Replacement of FBGEMM's module with one dense parameter, which a torch optimizer trains."""

    def __init__(
        self, paths: Sequence[str], old: Any, optimizers: Sequence[TorchOptimizer], tables: Any
    ) -> None:
        _check_class(old)
        types: Any = sys.modules[type(old).__module__]
        self._constructor_arguments = {
            "embedding_specs": list(old.embedding_specs),
            "feature_table_map": self._feature_table_map(old),
            "weights_precision": old.weights_precision,
            "pooling_mode": old.pooling_mode,
            "use_cpu": old.use_cpu,
            "output_dtype": types.SparseType.from_int(old.output_dtype),
        }
        try:
            new = fbgemm.DenseTableBatchedEmbeddingBagsCodegen(**self._constructor_arguments)
        except (NotImplementedError, ValueError) as error:
            raise NotMigrated(str(error)) from error
        if tables is not None:
            raise NotMigrated(
                "tables= has no part in it: a module of FBGEMM that leaves a dense gradient gives "
                "it to its optimizer; use an EmbeddingBagCollection for fused updates"
            )
        self.weight = TorchWeight(old.weights, Trained.of(optimizers, old.weights))
        trained = self.weight.trained
        if trained is not None and trained.in_backward:
            raise NotMigrated("its optimizer is applied in backward, to one weight of all tables")
        super().__init__(paths, old, new)

    @staticmethod
    def _feature_table_map(old: Any) -> list[int]:
        """Return the table of each feature; FBGEMM's module has only its first weight."""
        starts, position = {}, 0
        for number, (rows, dim) in enumerate(old.embedding_specs):
            starts[position] = number
            position += rows * dim
        return [starts[int(start)] for start in old.weights_offsets]

    @property
    def _table(self) -> MigratedTable:
        return MigratedTable(self.new.weights, {}, self.new.bags, self.new.weights)

    @property
    def memory(self) -> tuple[TrainingMemory, TrainingMemory]:
        """Bytes in training, which are the same before and after."""
        return (self.weight.memory,) * 2

    @property
    def is_trained(self) -> bool:
        """True if a torch optimizer trains the weight."""
        return self.weight.trained is not None and self.old.weights.requires_grad

    def carry_over(self) -> None:
        """Copy the rows into the new module."""
        self.weight.carry_over(self._table)

    def replace_in_optimizers(self) -> None:
        """Replace the old parameter by the new one in the group of the optimizer."""
        self.weight.replace_in_optimizer(self._table)

    def carry_back(self) -> None:
        """Copy the rows back, and put the old parameter into the group of the optimizer again."""
        self.weight.carry_back(self._table)

    def sample(self, max_rows: int | None, seed: int) -> tuple[nn.Module, list[TorchOptimizer]]:
        """Return a module of FBGEMM with all rows, and its optimizer, if the weight is trained.

        All rows, as the optimizer state is that of one flat parameter.
        """
        module = type(self.old)(**self._constructor_arguments)
        with torch.no_grad():
            module.weights.copy_(self.new.weights)
        if self.weight.trained is None or not self.is_trained:
            return module, []
        optimizer = self.weight.trained.make_copy([module.weights])
        trained = self.weight.trained
        state = trained.optimizer.state.get(self.new.weights, {})
        if state:
            optimizer.state[module.weights] = copy.deepcopy(state)
        return module, [optimizer]


class ReplacedIntNBitTBE(_ReplacedTBE):
    """Replacement of FBGEMM's module for inference; rows have the same bytes in both."""

    def __init__(
        self, paths: Sequence[str], old: Any, optimizers: Sequence[TorchOptimizer], tables: Any
    ) -> None:
        _check_class(old)
        types: Any = sys.modules[type(old).__module__]
        if any(
            mapping.numel() for mapping in old.buffers() if mapping is old.index_remappings_array
        ):
            raise NotMigrated(
                "maps of pruned tables are not read back: construct the class of "
                "emblib.compat.fbgemm_inference with the same index_remapping"
            )
        self._constructor_arguments = {
            "embedding_specs": list(old.embedding_specs),
            "feature_table_map": list(old.feature_table_map),
            "pooling_mode": old.pooling_mode,
            "device": old.current_device,
            "bounds_check_mode": types.BoundsCheckMode(old.bounds_check_mode_int),
            "output_dtype": types.SparseType.from_int(old.output_dtype),
            "row_alignment": old.row_alignment,
            "scale_bias_size_in_bytes": old.scale_bias_size_in_bytes,
            "feature_names_per_table": old.feature_names_per_table,
            "indices_dtype": old.indices_dtype,
        }
        try:
            new = fbgemm_inference.IntNBitTableBatchedEmbeddingBagsCodegen(
                **self._constructor_arguments
            )
            new.assign_embedding_weights(old.split_embedding_weights())
        except (NotImplementedError, ValueError) as error:
            raise NotMigrated(str(error)) from error
        super().__init__(paths, old, new)

    @property
    def memory(self) -> tuple[TrainingMemory, TrainingMemory]:
        """Bytes of the rows before and after."""
        before, after = (_nbytes(self.rows(module)) for module in (self.old, self.new))
        return TrainingMemory(before), TrainingMemory(after)

    @property
    def measured_nbytes(self) -> int:
        """Bytes of the new rows."""
        return _nbytes(self.rows(self.new))

    def rows(self, module: Any) -> list[Tensor]:
        """Return the encoded rows of each table, uint8 `[rows, row bytes]`."""
        return [rows for rows, _ in module.split_embedding_weights(split_scale_shifts=False)]

    def carry_over(self) -> None:
        """Do nothing: the constructor copied the rows."""

    def carry_back(self) -> None:
        """Do nothing: the rows are not trained."""

    def sample(self, max_rows: int | None, seed: int) -> tuple[nn.Module, list[TorchOptimizer]]:
        """Return a module of FBGEMM with up to `max_rows` rows per table, and no optimizers."""
        specs = self.old.embedding_specs
        row_ids = [chosen_rows(spec[1], max_rows, seed) for spec in specs]
        smaller_specs = [
            (spec[0], len(table_ids), *spec[2:])
            for table_ids, spec in zip(row_ids, specs, strict=True)
        ]
        module = type(self.old)(**{**self._constructor_arguments, "embedding_specs": smaller_specs})
        module.initialize_weights()
        copies = zip(self.rows(module), self.rows(self.new), row_ids, strict=True)
        for target, source, table_ids in copies:
            target.copy_(source[table_ids.to(source.device)])
        return module, []


def _check_class(old: Any) -> None:
    """Raise NotMigrated unless the class of a module is one of FBGEMM's, not a subclass."""
    if type(old).__name__ not in FACTORIES:
        raise NotMigrated(f"{type(old).__name__} is a subclass, whose code would be lost")
    if not type(old).__module__.startswith("fbgemm_gpu."):
        raise NotMigrated(f"{type(old).__name__} is not FBGEMM's class of this name")


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _refuse_disk_tables(paths: Sequence[str], old: Any, optimizers: Any, tables: Any) -> Replaced:
    raise NotMigrated(
        f"{type(old).__name__} has its rows on a disk or a server: use a collection with "
        "storage=emblib.storage.Hash(...) over a BackingStore (docs/tiers.md)"
    )


FACTORIES = {
    "SplitTableBatchedEmbeddingBagsCodegen": ReplacedSplitTBE,
    "DenseTableBatchedEmbeddingBagsCodegen": ReplacedDenseTBE,
    "IntNBitTableBatchedEmbeddingBagsCodegen": ReplacedIntNBitTBE,
    "SSDTableBatchedEmbeddingBags": _refuse_disk_tables,
}
