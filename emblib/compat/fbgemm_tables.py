"""Attributes and views of FBGEMM's training module: weights, optimizer states and sizes.

`TableViews` is the base of the module in `fbgemm.py`, which constructs `bags` and looks rows up.
FBGEMM numbers the optimizer states, `momentum1`, `momentum2` and so on; emblib names them by their
meaning, e.g. `sum`. `STATE_ORDER` relates the two.
"""

import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from emblib import CachePolicy, TableBatchedEmbeddingBags, optim
from emblib.compat import fbgemm_arguments
from emblib.compat.fbgemm_operators import rowwise
from emblib.compat.fbgemm_types import (
    ComputeDevice,
    CounterWeightDecayMode,
    EmbeddingLocation,
    EmbOptimType,
    SparseType,
    WeightDecayMode,
)

_CACHED_LOCATION = EmbeddingLocation.MANAGED_CACHING
_HOST_LOCATIONS = (EmbeddingLocation.MANAGED, EmbeddingLocation.MANAGED_CACHING)
STATE_ORDER = (
    "sum",
    "exp_avg",
    "momentum_buffer",
    "exp_avg_sq",
    "sparse_ema",
    "prev_iter",
    "row_counter",
)
"""Optimizer states in FBGEMM's order, by emblib's names; `momentum1` is the first one present."""

_MEMORY_SUFFIXES = ("dev", "host", "uvm")
"""Suffixes of FBGEMM's attributes: memory of a GPU, of a CPU, and host memory that a GPU reads."""

States = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""The result of `TableViews.get_states`."""


class DoesNotHavePrefix(Exception):
    """The module has no weights or optimizer state with this name."""


class TableViews(nn.Module):
    """Base of FBGEMM's training module: its attributes and views, without lookups.

    Attributes such as `momentum1_host` and `row_counter_dev` are the first three tensors of
    `get_states`.
    """

    bags: TableBatchedEmbeddingBags
    D_offsets: Tensor
    hash_size_cumsum: Tensor
    rows_per_table: Tensor
    feature_dims: Tensor
    _arguments: SimpleNamespace

    def _set_attributes(self, args: SimpleNamespace) -> None:
        """Set the attributes of FBGEMM's module; `args` is the result of `normalise`."""
        rows_of_tables = [spec.rows for spec in args.embedding_specs]
        self.embedding_specs = args.embedding_specs
        self.feature_table_map: list[int] = list(args.feature_table_map)
        self.dims: list[int] = [spec.dim for spec in args.embedding_specs]
        self.current_device = self.bags.hyperparams.device
        self.use_cpu = args.compute_device is ComputeDevice.CPU
        self.pooling_mode = args.pooling_mode
        self.weights_precision = args.weights_precision
        self.output_dtype: int = args.output_dtype.as_int()
        self.optimizer = args.optimizer
        self.table_names: list[str] | None = args.table_names
        self.logging_table_name = self.get_table_name_for_logging(args.table_names)
        self.embedding_shard_info = args.embedding_shard_info
        self.max_D = max(self.dims)
        cached_dims = [
            spec.dim for spec in args.embedding_specs if spec.location == _CACHED_LOCATION
        ]
        self.max_D_cache = max(cached_dims, default=0)
        dims = [self.dims[t] for t in self.feature_table_map]
        self.total_D = sum(dims)
        self.total_hash_size = sum(rows_of_tables)
        first_row_of_table = [0, *itertools.accumulate(rows_of_tables)]
        first_rows = [
            *(first_row_of_table[t] for t in self.feature_table_map),
            self.total_hash_size,
        ]
        sizes = {
            "D_offsets": torch.tensor(
                [0, *itertools.accumulate(dims)], dtype=torch.int32, device="cpu"
            ),
            "hash_size_cumsum": torch.tensor(first_rows, device="cpu"),
            "rows_per_table": torch.tensor(
                [rows_of_tables[t] for t in self.feature_table_map], device="cpu"
            ),
            "feature_dims": torch.tensor(dims, device="cpu"),
        }
        for name, tensor in sizes.items():
            device = "cpu" if name == "feature_dims" else args.device
            self.register_buffer(name, tensor.to(device), persistent=False)

    @staticmethod
    def get_table_name_for_logging(table_names: list[str] | None) -> str:
        """Return a label of all tables for reports, "<Unknown>" for None; names may be repeated."""
        if table_names is None:
            return "<Unknown>"
        distinct_names = sorted(set(table_names))
        count = len(distinct_names)
        return distinct_names[0] if count == 1 else f"<{count} tables>: {distinct_names}"

    def __getattr__(self, name: str) -> Any:
        memory = self._memory_of_state(name)
        return super().__getattr__(name) if memory is None else memory

    def _memory_of_state(self, name: str) -> Tensor | None:
        """Return the memory of a state, e.g. for the name `momentum1_dev`; None for other names."""
        prefix, _, suffix = name.rpartition("_")
        if suffix in _MEMORY_SUFFIXES and prefix in self._state_of_prefix():
            return self.get_states(prefix)[_MEMORY_SUFFIXES.index(suffix)]
        return None

    # Weights

    def split_embedding_weights(self) -> list[Tensor]:
        """Return the tables as views `[rows, dim]`, which may be written to.

        Views of INT8 tables are uint8 `[rows, dim + 8]`. The cache is written back and emptied.
        Lookups fill it again: if one comes between this call and a write to a cached table, call
        `reset_cache_states()` after the write.
        """
        return self.bags.table_weights()

    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Draw all weights from [min_val, max_val), with torch's generator; empty the cache."""
        with torch.no_grad():
            for weights, dim in zip(self.bags.table_weights(), self.dims, strict=True):
                if self.weights_precision is SparseType.INT8:
                    values = torch.empty(len(weights), dim, device=weights.device)
                    weights.copy_(rowwise.to_fused_8bit(values.uniform_(min_val, max_val)))
                else:
                    weights.uniform_(min_val, max_val)
        self.bags.reset_cache_states()

    @property
    def weights_dev(self) -> Tensor:
        """The tables in device memory, or all tables of a CPU, concatenated and flat."""
        return self.bags.weights

    @property
    def weights_host(self) -> Tensor:
        """`weights_dev` on a CPU, else an empty tensor."""
        return self.bags.weights if self.use_cpu else self.bags.weights.new_empty(0)

    @property
    def weights_uvm(self) -> Tensor:
        """The tables of a GPU in host memory, concatenated and flat; empty if there are none.

        Raises:
            NotImplementedError: the tables lie in several pieces of memory.
        """
        return self.get_states("weights")[2]

    @property
    def weights_physical_offsets(self) -> list[int]:
        """Position of the first element of each table in the flat tensor that has it."""
        return [int(table.storage_offset()) for table in self.bags.table_weights()]

    # Cache

    @property
    def lxu_cache_locking_counter(self) -> Tensor:
        """Slots of the cache whose rows must not be evicted: 1, others 0, int32 `[sets, ways]`.

        Such a row is in use, from the prefetch or forward of a batch until its backward pass.
        Without a cache the tensor is empty.
        """
        cache = self.bags.row_cache
        if cache is None:
            return torch.empty(0, dtype=torch.int32, device=self.current_device)
        stamps, oldest = cache.stamps, cache.oldest_in_flight()
        if cache.layout.policy is CachePolicy.LFU:  # bits 0 to 31 of a stamp are the batch
            return ((stamps >= 0) & (stamps & 0xFFFFFFFF >= oldest)).int()
        return (stamps >= oldest).int()

    # Optimizer state

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """Return the optimizer states of each table as views, in FBGEMM's order; [] without states.

        Raises:
            NotImplementedError: backward does not update the tables.
        """
        self._require_fused("split_optimizer_states")
        return [
            [states[name] for name in STATE_ORDER if name in states]
            for states in self.bags.table_optimizer_states()
            if states
        ]

    def get_optimizer_state(self) -> list[dict[str, Tensor]]:
        """Return the optimizer states of each table by emblib's names; [] without states.

        With global weight decay, and with the counters of AdagradW, `iter` is added.

        Raises:
            NotImplementedError: backward does not update the tables.
        """
        self._require_fused("get_optimizer_state")
        step = {"iter": self.iter} if self._state_has_iter() else {}
        return [
            {name: states[name] for name in STATE_ORDER if name in states} | step
            for states in self.bags.table_optimizer_states()
            if states
        ]

    def _state_has_iter(self) -> bool:
        args = self._arguments
        if args.weight_decay_mode is WeightDecayMode.DECOUPLE_GLOBAL:
            return True
        if args.weight_decay_mode is not WeightDecayMode.COUNTER:
            return False
        mode = args.counter_based_regularization.counter_weight_decay_mode
        return int(mode) == CounterWeightDecayMode.ADAGRADW

    def _state_of_prefix(self) -> dict[str, str]:
        """Return emblib's name of each optimizer state, by FBGEMM's and by emblib's name."""
        if "bags" not in self._modules or self.optimizer is EmbOptimType.NONE:
            return {}
        state_names = {state.name for state in self.bags.optimizer.states}
        names = [name for name in STATE_ORDER if name in state_names]
        return {f"momentum{i}": name for i, name in enumerate(names, 1)} | {n: n for n in names}

    def get_states(self, prefix: str) -> States:
        """Return the memory of the weights, or of an optimizer state, in FBGEMM's layout.

        Args:
            prefix: `weights`, or FBGEMM's or emblib's name of a state, e.g. `momentum1` or `sum`.

        Returns:
            five tensors: the tables in device memory, the tables of a CPU, and the tables of a GPU
            in host memory, each concatenated and flat, or empty; the `EmbeddingLocation` of each
            table, int32 `[T]`; the position of its first element in that flat tensor, int64 `[T]`.
            The first three share memory with the tables.

        Raises:
            DoesNotHavePrefix: the module has no state `prefix`.
            NotImplementedError: the tables of a location lie in several pieces of memory.
        """
        if prefix == "weights":
            views = self.bags.table_weights()
        elif prefix in self._state_of_prefix():
            name = self._state_of_prefix()[prefix]
            views = [states[name] for states in self.bags.table_optimizer_states()]
        else:
            raise DoesNotHavePrefix(
                f"there is no {prefix}, only {['weights', *self._state_of_prefix()]}"
            )
        memories = [views[0].new_empty(0)] * len(_MEMORY_SUFFIXES)
        offsets = [int(view.storage_offset()) for view in views]
        locations = fbgemm_arguments.locations(self._arguments)
        memory_of_table = [
            1 if self.use_cpu else 2 if location in _HOST_LOCATIONS else 0 for location in locations
        ]
        for memory in set(memory_of_table):
            tables = [t for t, table_memory in enumerate(memory_of_table) if table_memory == memory]
            if len({views[t].untyped_storage().data_ptr() for t in tables}) > 1:
                raise NotImplementedError(
                    f"{prefix}_{_MEMORY_SUFFIXES[memory]}: the tables lie in several pieces of "
                    "memory; use split_embedding_weights() or split_optimizer_states()"
                )
            first_element = min(offsets[t] for t in tables)
            num_elements = max(offsets[t] + views[t].numel() for t in tables) - first_element
            memories[memory] = (
                views[tables[0]].detach().as_strided((num_elements,), (1,), first_element)
            )
            for t in tables:
                offsets[t] -= first_element
        return (
            memories[0],
            memories[1],
            memories[2],
            torch.tensor(
                [int(location) for location in locations], dtype=torch.int32, device="cpu"
            ),
            torch.tensor(offsets, device="cpu"),
        )

    def get_all_states(self) -> list[States]:
        """Return `get_states` of the weights and of each optimizer state, in FBGEMM's order."""
        prefixes = [name for name in self._state_of_prefix() if name in STATE_ORDER]
        return [self.get_states(prefix) for prefix in ("weights", *prefixes)]

    def _use_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Make `buffers` the memory of tables and states on a CPU; their values stay.

        Raises:
            AssertionError: the tables are not on a CPU, or a buffer has another name, dtype, device
                or shape than the memory it replaces, or is not contiguous.
        """
        targets = {"weights": "weights"} | {
            name: f"state_{state}"
            for name, state in self._state_of_prefix().items()
            if name in ("momentum1", "momentum2")
        }
        for name, buffer in buffers.items():
            if name not in targets or not self.use_cpu:
                raise AssertionError(
                    f"preallocated_host_buffers may have {[*targets]} of tables on a CPU, got "
                    f"{name!r}"
                )
            memory = getattr(self.bags, targets[name])
            expected_layout = (memory.dtype, memory.device, (memory.numel(),))
            layout = (buffer.dtype, buffer.device, tuple(buffer.shape))
            if layout != expected_layout or not buffer.is_contiguous():
                raise AssertionError(
                    f"preallocated_host_buffers[{name!r}] must be contiguous and of "
                    f"{expected_layout}, got {layout}"
                )
        for name, buffer in buffers.items():
            memory = getattr(self.bags, targets[name])
            memory.data = buffer.view(memory.shape)

    def get_optimizer_buffer(self, state: str) -> Tensor:
        """Return the memory of an optimizer state, or `iter`.

        Args:
            state: `iter`; or a name with memory, e.g. `momentum1_dev`, `momentum1_host` or
                `momentum1_uvm`, for the tables in this memory; or a name without, e.g. `momentum1`
                or `sum`, for the tables in device memory or all tables of a CPU. Steps beyond 2^24
                in `prev_iter` are encoded; `optim.decode_steps` reads them.

        Raises:
            ValueError: the optimizer does not have the state.
            NotImplementedError: backward does not update the tables.
        """
        self._require_fused("get_optimizer_buffer")
        if state == "iter":
            return self.iter
        if (memory := self._memory_of_state(state)) is not None:
            return memory
        name_of_prefix = self._state_of_prefix()
        if state not in name_of_prefix:
            raise ValueError(f"the optimizer's states are {sorted(name_of_prefix)}, got {state!r}")
        return getattr(self.bags, f"state_{name_of_prefix[state]}")

    @property
    def iter(self) -> Tensor:
        """Number of updates so far, float64 `[1]`: a view, which may be written to."""
        return self.bags.hyperparams[optim.Hyper.STEP : optim.Hyper.STEP + 1]

    iter_cpu = iter

    @property
    def max_counter(self) -> Tensor:
        """Maximum of `row_counter` plus 1, float64 `[1]`, as of the last step that computed it.

        With `WeightDecayMode.COUNTER` it is a view, which may be written to; else a new tensor, 1.
        """
        is_counted = self._arguments.weight_decay_mode is WeightDecayMode.COUNTER
        return self.bags.hyperparams[-1:] if is_counted else self.bags.hyperparams.new_ones(1)

    @property
    def optimizer_args(self) -> SimpleNamespace:
        """Copy of the module's arguments, with the current hyperparameters of the optimizer."""
        return fbgemm_arguments.with_current_hyperparameters(self.bags, self._arguments)

    @property
    def gwd_lower_bound(self) -> float:
        """Lower bound of global weight decay; 0 without it."""
        definition = self._arguments.global_weight_decay
        return 0.0 if definition is None else definition.lower_bound

    def reset_embedding_weight_momentum(
        self,
        pruned_indices: Tensor,
        pruned_indices_offsets: Tensor,
        logical_table_ids: Tensor,
        buffer_ids: Tensor,
    ) -> None:
        """Set pruned rows and their optimizer states to zero, and empty the cache.

        Args:
            pruned_indices: rows to reset, buffer after buffer.
            pruned_indices_offsets: first entry of each buffer in `pruned_indices`, and the end.
            logical_table_ids: features whose tables are pruned, `[n]`.
            buffer_ids: buffer that has the rows of each of these features, `[n]`.

        Raises:
            IndexError: a feature, buffer or row does not exist; nothing is changed.
            NotImplementedError: backward does not update the tables.
            ValueError: `logical_table_ids` and `buffer_ids` differ in length.
        """
        self._require_fused("reset_embedding_weight_momentum")
        weights = self.bags.table_weights()
        states = self.bags.table_optimizer_states()
        if logical_table_ids.shape != buffer_ids.shape:
            raise ValueError(
                "logical_table_ids and buffer_ids must have one entry per feature to prune, got "
                f"{list(logical_table_ids.shape)} and {list(buffer_ids.shape)}"
            )
        starts = pruned_indices_offsets.tolist()
        num_features, num_buffers = len(self.feature_table_map), len(starts) - 1
        rows_and_tables = []
        for feature, buffer in zip(logical_table_ids.tolist(), buffer_ids.tolist(), strict=True):
            if not (0 <= feature < num_features and 0 <= buffer < num_buffers):
                raise IndexError(
                    f"feature {feature} or buffer {buffer} does not exist: there are "
                    f"{num_features} features and {num_buffers} buffers"
                )
            rows = pruned_indices[starts[buffer] : starts[buffer + 1]].long()
            table = self.feature_table_map[feature]
            num_rows = len(weights[table])
            if bool(((rows < 0) | (rows >= num_rows)).any()):  # torch would take -1 as the last row
                raise IndexError(f"rows of table {table} must be in [0, {num_rows}), got {rows}")
            rows_and_tables.append((rows, table))
        with torch.no_grad():
            for rows, table in rows_and_tables:
                for tensor in (weights[table], *states[table].values()):
                    tensor[rows.to(tensor.device)] = 0
        self.bags.reset_cache_states()

    def _require_fused(self, what: str) -> None:
        """Raise NotImplementedError, which names `what`, unless backward updates the tables."""
        if self.weights_precision is SparseType.INT8:
            raise NotImplementedError(f"{what} is not supported: INT8 rows are not trained")
        if self.optimizer is EmbOptimType.NONE:
            raise NotImplementedError(
                f"{what} is not supported for {EmbOptimType.NONE!r}: the gradient is left to an "
                "optimizer of your own, which has the numbers and the state"
            )
