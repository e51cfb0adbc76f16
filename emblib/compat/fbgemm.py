"""FBGEMM's training modules, implemented by emblib's, with the same names, arguments and methods.

Change the import and keep the code:

    from emblib.compat.fbgemm import ComputeDevice, EmbeddingLocation, OptimType
    from emblib.compat.fbgemm import SplitTableBatchedEmbeddingBagsCodegen

`docs/options.md` says what each option does here. Differences from FBGEMM: `state_dict` has one
entry per table for the weights and for each optimizer state; the optimizer's step counts updates,
not forwards; the caller's indices and offsets are never written to. FBGEMM's own enum members and
option objects are accepted as well. TorchScript and the tensors inside FBGEMM's cache are missing.

`install()` makes `import fbgemm_gpu` import these names, so that an unmodified TorchRec uses them.
"""

import contextlib
import functools
import itertools
import logging
import uuid
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from emblib import Pooling, Precision, TableBatchedEmbeddingBags, TableSpec, optim
from emblib.compat import fbgemm_arguments, fbgemm_modules
from emblib.compat.checks import check_flags
from emblib.compat.fbgemm_gradients import keep_first_lookups, mask_gradients
from emblib.compat.fbgemm_int8 import Int8Tables
from emblib.compat.fbgemm_operators import bucketize, jagged
from emblib.compat.fbgemm_reporting import (
    CacheCounters,
    ModuleReport,
    StdLogStatsReporter,
    StdLogStatsReporterConfig,
    TBEStatsReporter,
    TBEStatsReporterConfig,
    Timer,
    prefetch_passes,
)
from emblib.compat.fbgemm_tables import TableViews
from emblib.compat.fbgemm_types import (
    BoundsCheckMode,
    CacheAlgorithm,
    ComputeDevice,
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    EmainplaceModeDefinition,
    EmbeddingLocation,
    EmbOptimType,
    EnsembleModeDefinition,
    GlobalWeightDecayDefinition,
    GradSumDecay,
    LearningRateMode,
    MultiPassPrefetchConfig,
    OptimType,
    PoolingMode,
    RecordCacheMetrics,
    RESParams,
    SparseType,
    StepMode,
    TailIdThreshold,
    UserEnabledConfigDefinition,
    UVMCacheStatsIndex,
    VBEMetadata,
    WeightDecayMode,
    as_member,
)

__all__ = [
    "BoundsCheckMode",
    "CacheAlgorithm",
    "ComputeDevice",
    "CounterBasedRegularizationDefinition",
    "CounterWeightDecayMode",
    "CowClipDefinition",
    "DenseTableBatchedEmbeddingBagsCodegen",
    "EmainplaceModeDefinition",
    "EmbOptimType",
    "EmbeddingLocation",
    "EnsembleModeDefinition",
    "GlobalWeightDecayDefinition",
    "GradSumDecay",
    "LearningRateMode",
    "MultiPassPrefetchConfig",
    "OptimType",
    "PoolingMode",
    "RESParams",
    "RecordCacheMetrics",
    "SparseType",
    "SplitTableBatchedEmbeddingBagsCodegen",
    "StdLogStatsReporter",
    "StdLogStatsReporterConfig",
    "StepMode",
    "TBEStatsReporter",
    "TBEStatsReporterConfig",
    "TailIdThreshold",
    "UVMCacheStatsIndex",
    "UserEnabledConfigDefinition",
    "WeightDecayMode",
    "install",
]

_logger = logging.getLogger(__name__)


class DenseTableBatchedEmbeddingBagsCodegen(nn.Module):
    """Table-batched embeddings with a dense gradient, with the interface of FBGEMM's class.

    `weights` is one flat parameter for any optimizer of `torch.optim`. Initial values are normal.

    Args:
        embedding_specs: (rows, dim) of each table.
        feature_table_map: the table of each feature; by default feature i reads table i.
        weights_precision: number format of the rows: FP32, FP16 or BF16.
        pooling_mode: SUM, MEAN, or NONE for one row per lookup.
        use_cpu: whether the tables are on the CPU, not on the current GPU.
        output_dtype: number format of the output: FP32, FP16 or BF16.
        use_mtia: flag that must be False.

    Raises:
        NotImplementedError: `use_mtia` is set, or a number format is another one.
        RuntimeError: `use_cpu` is not set, and torch sees no GPU.
        TypeError: a number of rows or a dim, or the table of a feature, is not an int, or a flag is
            text.
        ValueError: there is no table, the table of a feature does not exist, or `pooling_mode` is
            unknown.
    """

    def __init__(
        self,
        embedding_specs: list[tuple[int, int]],
        feature_table_map: list[int] | None = None,
        weights_precision: SparseType = SparseType.FP32,
        pooling_mode: PoolingMode = PoolingMode.SUM,
        use_cpu: bool = False,
        output_dtype: SparseType = SparseType.FP32,
        use_mtia: bool = False,
    ) -> None:
        super().__init__()
        check_flags(use_cpu=use_cpu, use_mtia=use_mtia)
        if use_mtia:
            raise NotImplementedError("MTIA is an accelerator emblib has no kernels for")
        if not embedding_specs:
            raise ValueError("embedding_specs must have at least one table")
        if not use_cpu and not torch.cuda.is_available():
            raise RuntimeError("this module is for a GPU, and torch sees none; pass use_cpu=True")
        self.embedding_specs = list(embedding_specs)
        self.pooling_mode = as_member(PoolingMode, pooling_mode)
        self.weights_precision = as_member(SparseType, weights_precision)
        output = as_member(SparseType, output_dtype)
        self.output_dtype: int = output.as_int()
        self.use_cpu = use_cpu
        self.uuid = str(uuid.uuid4())
        self.bags = TableBatchedEmbeddingBags(
            [TableSpec(rows, dim) for rows, dim in embedding_specs],
            optim.External(gradient=optim.Gradient.DENSE),
            pooling=Pooling(self.pooling_mode.name.lower()),
            feature_tables=feature_table_map,
            precision=Precision(
                weights=fbgemm_arguments.float_dtype("weights_precision", self.weights_precision),
                output=fbgemm_arguments.float_dtype("output_dtype", output),
            ),
            device="cpu" if use_cpu else "cuda",
        )
        self.bags.weights = nn.Parameter(self.bags.weights.detach().view(-1))
        self.current_device = self.bags.weights.device
        dims = [self.embedding_specs[t][1] for t in self.bags.feature_tables]
        self.total_D = sum(dims)
        self.max_D = max(dims, default=0)
        self.weights_physical_offsets = [
            table.storage_offset() for table in self.split_embedding_weights()
        ]
        offsets = torch.tensor([0, *itertools.accumulate(dims)], dtype=torch.int32, device="cpu")
        self.register_buffer("D_offsets", offsets.to(self.current_device), persistent=False)
        with torch.no_grad():
            self.weights.normal_()

    @property
    def weights(self) -> nn.Parameter:
        """The parameter: the rows of all tables, concatenated and flat."""
        return self.bags.weights

    def log(self, msg: str) -> None:
        """Log `msg` and the module's id, `uuid`, at level INFO."""
        _logger.info("[TBE=%s] %s", self.uuid, msg)

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
    ) -> Tensor:
        """Look up and pool; arguments, result and errors as in `TableBatchedEmbeddingBags.forward`.

        Args:
            indices: int32 or int64 `[L]`.
            offsets: int32 or int64 `[F * B + 1]`.
            per_sample_weights: `[L]`, converted to float32; None for ones.
            feature_requires_grad: `[F]` of any dtype, 0 for features whose sample weights get no
                gradient; None if the weights of all features get one.
            batch_size_per_feature_per_rank: number of bags per feature and rank; None if all
                features have B bags.
        """
        batch_sizes = batch_size_per_feature_per_rank
        weights = None if per_sample_weights is None else per_sample_weights.float()
        weights = mask_gradients(weights, feature_requires_grad, offsets, batch_sizes, self.bags)
        return self.bags(indices, offsets, weights, batch_sizes=batch_sizes)

    def split_embedding_weights(self) -> list[Tensor]:
        """Return the tables as views `[rows, dim]`."""
        return self.bags.table_weights()

    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Draw all weights from [min_val, max_val), with torch's generator."""
        with torch.no_grad():
            for weights in self.split_embedding_weights():
                weights.uniform_(min_val, max_val)


class SplitTableBatchedEmbeddingBagsCodegen(TableViews):
    """Table-batched embeddings that are updated in backward, with the interface of FBGEMM's class.

    The arguments are FBGEMM's; `docs/options.md` lists what each does here. `bags` has the tables:
    an `emblib.TableBatchedEmbeddingBags`, or `Int8Tables` for INT8 rows. Weights are zero at first;
    `init_embedding_weights_uniform` draws them, and the views of `split_embedding_weights()` may be
    written to. With `preallocated_host_buffers` the weights are the values in the buffers.

    Raises:
        AssertionError: `preallocated_host_buffers` do not fit the module.
        NotImplementedError: an argument, or its value, is not supported.
        RuntimeError: tables are for a GPU, and torch sees none.
        TypeError: rows, a dim or the table of a feature is not an integer, a flag is text, or
            `table_names` are not a sequence.
        ValueError: an argument has an invalid value, or arguments contradict each other.
    """

    def __init__(
        self,
        embedding_specs: Sequence[tuple[int, int, EmbeddingLocation, ComputeDevice]],
        feature_table_map: list[int] | None = None,
        cache_algorithm: CacheAlgorithm = CacheAlgorithm.LRU,
        cache_load_factor: float = 0.2,
        cache_sets: int = 0,
        cache_reserved_memory: float = 0.0,
        cache_precision: SparseType | None = None,
        weights_precision: SparseType = SparseType.FP32,
        output_dtype: SparseType = SparseType.FP32,
        enforce_hbm: bool = False,
        optimizer: EmbOptimType = EmbOptimType.EXACT_SGD,
        record_cache_metrics: RecordCacheMetrics | None = None,
        gather_uvm_cache_stats: bool | None = False,
        stochastic_rounding: bool = True,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        max_norm: float = 0.0,
        learning_rate: float = 0.01,
        eps: float = 1.0e-8,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE,
        ar_alpha: float = 0.0,
        ema_beta: float = 0.99,
        min_shrinkage: float = 0.1,
        eta: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        ensemble_mode: EnsembleModeDefinition | None = None,
        emainplace_mode: EmainplaceModeDefinition | None = None,
        counter_based_regularization: CounterBasedRegularizationDefinition | None = None,
        cowclip_regularization: CowClipDefinition | None = None,
        pooling_mode: PoolingMode = PoolingMode.SUM,
        device: str | int | torch.device | None = None,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.WARNING,
        uvm_non_rowwise_momentum: bool = False,
        use_experimental_tbe: bool = False,
        prefetch_pipeline: bool = False,
        stats_reporter_config: TBEStatsReporterConfig | None = None,
        table_names: list[str] | None = None,
        optimizer_state_dtypes: dict[str, SparseType] | None = None,
        multipass_prefetch_config: MultiPassPrefetchConfig | None = None,
        global_weight_decay: GlobalWeightDecayDefinition | None = None,
        uvm_host_mapped: bool = False,
        extra_optimizer_config: UserEnabledConfigDefinition | None = None,
        tbe_input_multiplexer_config: Any = None,
        embedding_table_index_type: torch.dtype = torch.int64,
        embedding_table_offset_type: torch.dtype = torch.int64,
        embedding_shard_info: list[tuple[int, int, int, int]] | None = None,
        enable_raw_embedding_streaming: bool = False,
        res_params: RESParams | None = None,
        is_qr_tbe: bool = False,
        preallocated_host_buffers: dict[str, Tensor] | None = None,
    ) -> None:
        arguments = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__()
        self._initialise(fbgemm_arguments.normalise(arguments))

    def _initialise(self, arguments: SimpleNamespace) -> None:
        """Make the tables and all attributes; `arguments` is the result of `normalise`."""
        self.bags = _make_bags(arguments)
        with torch.no_grad():
            for weights in self.bags.table_weights():
                weights.zero_()
        self._arguments = arguments
        self._set_attributes(arguments)
        self._use_buffers(arguments.preallocated_host_buffers or {})
        self._counters = CacheCounters(self.bags, arguments)
        self._averaging = fbgemm_arguments.in_place_average(arguments)
        self.uuid = str(uuid.uuid4())
        self.step = 0
        self.prefetch_stream: torch.cuda.Stream | None = None
        self._num_prefetched = 0  # batches prefetched and not looked up yet
        config = arguments.stats_reporter_config
        self.stats_reporter = config.create_reporter() if config is not None else None
        names = (self.logging_table_name, self.uuid)
        reporter = self.stats_reporter
        self._report = None if reporter is None else ModuleReport(reporter, names, self._counters)
        self.log(f"tables {self.logging_table_name}: {self.bags}")

    def log(self, msg: str) -> None:
        """Log `msg` and the module's id, `uuid`, at level INFO."""
        _logger.info("[TBE=%s] %s", self.uuid, msg)

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        total_unique_indices: int | None = None,
        hash_zch_identities: Tensor | None = None,
        hash_zch_runtime_meta: Tensor | None = None,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Tensor | None = None,
    ) -> Tensor:
        """Look up and pool; the backward pass updates the tables.

        See `emblib.TableBatchedEmbeddingBags.forward` for the output and further errors.

        Args:
            indices: int32 or int64 `[L]`.
            offsets: int32 or int64 `[F * B + 1]`.
            per_sample_weights: `[L]`, converted to float32; None for ones.
            feature_requires_grad: `[F]` of any dtype, 0 for features whose sample weights get no
                gradient; None if the weights of all features get one.
            batch_size_per_feature_per_rank: number of bags per feature and rank; None if all
                features have B bags.
            total_unique_indices: number of distinct rows in the batch, if known. Only
                OptimType.NONE uses it.
            hash_zch_identities: ignored.
            hash_zch_runtime_meta: ignored.
            vbe_output: contiguous tensor that the output is written to, converted to its dtype, and
                that is returned. It must be on the device of the output.
            vbe_output_offsets: index in the flattened `vbe_output` of the first element of each
                rank and feature, int64 `[ranks, F]`.

        Raises:
            IndexError: on a CPU, an element of the output has no place in `vbe_output`.
            NotImplementedError: there are batch sizes, and rows are INT8 or
                `use_writeback_bwd_prehook` is set.
            ValueError: only some of `vbe_output`, its offsets and batch sizes are passed, or the
                offsets are not `[ranks, F]`.
        """
        vbe_arguments_given = vbe_output is not None, vbe_output_offsets is not None
        if any(vbe_arguments_given) and not (
            all(vbe_arguments_given) and batch_size_per_feature_per_rank
        ):
            raise ValueError(
                "vbe_output, vbe_output_offsets and batch_size_per_feature_per_rank go together"
            )
        block_sizes = torch.empty(0, device="cpu")
        if vbe_output_offsets is not None:
            # Elements per rank and feature; `output` has the blocks rank after rank.
            block_sizes = torch.tensor(
                batch_size_per_feature_per_rank, device="cpu"
            ).t() * torch.tensor([self.dims[t] for t in self.feature_table_map], device="cpu")
            if vbe_output_offsets.shape != block_sizes.shape:
                raise ValueError(
                    f"vbe_output_offsets must be [ranks, F] = {list(block_sizes.shape)}, got "
                    f"{list(vbe_output_offsets.shape)}"
                )
        output = self._look_up(
            indices,
            offsets,
            per_sample_weights,
            feature_requires_grad,
            batch_size_per_feature_per_rank,
            total_unique_indices,
        )
        if vbe_output is None or vbe_output_offsets is None:
            return output
        block_sizes = block_sizes.flatten().to(output.device)
        starts = vbe_output_offsets.to(output.device, torch.int64).flatten()
        positions = jagged.segment_positions(starts, block_sizes, output.numel())
        flat_output = vbe_output if vbe_output.dim() == 1 else vbe_output.view(-1)
        flat_output.index_copy_(0, positions, output.to(vbe_output.dtype))
        return vbe_output

    def _look_up(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
        feature_requires_grad: Tensor | None,
        batch_size_per_feature_per_rank: list[list[int]] | None,
        total_unique_indices: int | None,
    ) -> Tensor:
        """Look up and pool; also count and report the step, and register the hooks of options.

        In a compiled graph of a module without reports and hooks, only look up.
        """
        indices = self._cast_indices(indices)
        batch_sizes = batch_size_per_feature_per_rank
        weights = None if per_sample_weights is None else per_sample_weights.float()
        weights = mask_gradients(weights, feature_requires_grad, offsets, batch_sizes, self.bags)
        if self.optimizer is EmbOptimType.NONE:
            # The size of the sparse gradient; without it, backward would wait for the device.
            self.bags.num_distinct_rows = total_unique_indices
        lookup = functools.partial(self.bags, indices, offsets, weights, batch_sizes=batch_sizes)
        if torch.compiler.is_compiling() and not self._needs_python_hooks():
            return lookup()
        self._begin_forward(indices)
        with self._counters.counting():
            output = lookup()
        if self._num_prefetched:
            self._num_prefetched -= 1
        else:
            self._report_cache(indices)
        self._report_output(output)
        extra = self._arguments.extra_optimizer_config
        if extra.use_writeback_bwd_prehook:
            if batch_sizes is not None:
                raise NotImplementedError("use_writeback_bwd_prehook needs one batch size")
            keep_first_lookups(
                output,
                indices,
                offsets,
                self.feature_table_map,
                None if self.pooling_mode is PoolingMode.NONE else self.feature_dims.tolist(),
                first_feature_only=extra.writeback_first_feature_only,
            )
        return output

    def prepare_inputs(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        force_cast_input_types: bool = True,
        prefetch_pipeline: bool = False,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, VBEMetadata]:
        """Check and repair a batch; return its indices, offsets, weights and VBE metadata.

        `forward` does not need this call. `bounds_check_mode` decides whether invalid input raises,
        is repaired or, with NONE, is returned as it is. The host waits for a GPU.

        Args:
            indices: int32 or int64 `[L]`; copied.
            offsets: int32 or int64 `[F * B + 1]`; copied, in the dtype of the indices.
            per_sample_weights: `[L]`; converted to float32.
            batch_size_per_feature_per_rank: number of bags per feature and rank, or None.
            force_cast_input_types: ignored.
            prefetch_pipeline: ignored.
            vbe_output: output tensor, stored in the metadata.
            vbe_output_offsets: offsets as for `forward`, stored in the metadata.

        Raises:
            RuntimeError: tensors do not fit each other, or an index or offset is invalid in mode
                FATAL.
        """
        batch_sizes = batch_size_per_feature_per_rank
        indices = self._cast_indices(indices).clone()
        offsets = offsets.to(indices.dtype, copy=True)
        vbe_metadata = VBEMetadata.from_batch_sizes(
            batch_sizes, [self.dims[t] for t in self.feature_table_map]
        )._replace(vbe_output=vbe_output, vbe_output_offsets=vbe_output_offsets)
        mode = self._arguments.bounds_check_mode.name.removeprefix("V2_")
        bucketize.bounds_check_indices(
            self.rows_per_table,
            indices,
            offsets,
            BoundsCheckMode[mode].value,
            torch.zeros(1, dtype=torch.int64, device=indices.device),
            per_sample_weights,
            vbe_metadata.B_offsets,
        )
        weights = None if per_sample_weights is None else per_sample_weights.float()
        device = indices.device
        moved_fields: list[Any] = [
            field.to(device) if isinstance(field, Tensor) else field for field in vbe_metadata
        ]
        return indices, offsets, weights, VBEMetadata(*moved_fields)

    def _needs_python_hooks(self) -> bool:
        """Return whether a forward runs other Python code than the lookup, which breaks a graph."""
        writes_back = self._arguments.extra_optimizer_config.use_writeback_bwd_prehook
        is_reported = self._report is not None or self._counters.is_active
        return is_reported or writes_back or self._averaging is not None

    def _begin_forward(self, indices: Tensor) -> None:
        """Count a forward, average rows if it is time to, and report the input."""
        self.step += 1
        if self._averaging is not None and self.training:
            self._averaging.step(self.bags)
        if self._report is not None:
            self._report.step = self.step
            self._report.report_tensor("fwd_input", indices)
            self._report.report_memory(self.bags)

    def _report_output(self, output: Tensor) -> None:
        """Report the output; in backward, wait for the prefetch stream and report the time."""
        report, stream = self._report, self.prefetch_stream
        if report is None:
            return
        report.report_tensor("fwd_output", output)
        if stream is None or not output.requires_grad:
            return

        def wait_for_prefetch(gradient: Tensor) -> None:
            with report.wait_timer.recording(self.step, gradient.device):
                torch.cuda.current_stream(gradient.device).wait_stream(stream)

        output.register_hook(wait_for_prefetch)

    def _cast_indices(self, indices: Tensor) -> Tensor:
        """Return indices as int32 if `embedding_table_index_type` is int32, else as they are."""
        is_int32 = self._arguments.embedding_table_index_type == torch.int32
        return indices.to(torch.int32) if is_int32 else indices

    # Cache

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        forward_stream: torch.cuda.Stream | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
    ) -> None:
        """Load the rows of a batch into the cache; `forward` must get the batches in this order.

        Args:
            indices: int32 or int64 `[L]`.
            offsets: int32 or int64 `[F * B + 1]`.
            forward_stream: stream on which `forward` will run; the current stream prefetches.
            batch_size_per_feature_per_rank: number of bags per feature and rank, or None.

        Raises:
            ValueError: `forward_stream` is the current stream. Only calls until the first one with
                another `forward_stream` are checked.
        """
        if forward_stream is not None and self.prefetch_stream is None:
            prefetch_stream = torch.cuda.current_stream(self.current_device)
            if prefetch_stream == forward_stream:
                raise ValueError(
                    "prefetch and forward_stream must be on different streams: call "
                    "prefetch within torch.cuda.stream(another)"
                )
            self.prefetch_stream = prefetch_stream
        indices = self._cast_indices(indices)
        timer_context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._report is not None and self._counters.has_cache:
            timer_context = self._report.prefetch_timer.recording(self.step, indices.device)
        with self._counters.counting(), timer_context:
            self.bags.prefetch(indices, offsets, batch_sizes=batch_size_per_feature_per_rank)
        self._num_prefetched += 1
        self._report_cache(indices)
        if forward_stream is not None and indices.is_cuda:
            for tensor in (indices, offsets):
                tensor.record_stream(torch.cuda.current_stream(self.current_device))

    def _report_cache(self, indices: Tensor) -> None:
        """Report the cache after a prefetch of a batch, if there are a cache and a reporter."""
        if self._report is not None and self._counters.has_cache:
            dtype = self.bags.cache.dtype or self.bags.precision.weights
            self._report.report_prefetch(indices, dtype.itemsize * self.max_D_cache)

    @property
    def prefetch_duration_timer(self) -> Timer | None:
        """Timer of `prefetch`; None without a reporter."""
        return None if self._report is None else self._report.prefetch_timer

    @property
    def bwd_wait_prefetch_timer(self) -> Timer | None:
        """Timer of the time that backward waits for `prefetch`; None without a reporter."""
        return None if self._report is None else self._report.wait_timer

    get_prefetch_passes = staticmethod(prefetch_passes)

    def flush(self) -> None:
        """Write the rows in the cache back to their tables."""
        self.bags.flush()

    def reset_cache_states(self) -> None:
        """Discard the cache, without writing it back."""
        self.bags.reset_cache_states()

    def get_uvm_cache_stats(self, use_local_cache: bool = False) -> Tensor:
        """Return the counts of `UVMCacheStatsIndex`, int64 `[6]`, since the last reset.

        With `use_local_cache` they are the counts of the last batch.

        Raises:
            RuntimeError: `gather_uvm_cache_stats` is not set.
        """
        return self._counters.uvm_stats(local=use_local_cache)

    def reset_uvm_cache_stats(self) -> None:
        """Reset the counts of `get_uvm_cache_stats` to zero.

        Raises:
            RuntimeError: `gather_uvm_cache_stats` is not set.
        """
        self._counters.reset()

    def print_uvm_cache_stats(self, use_local_cache: bool = False) -> None:
        """Log the counts per batch since the last log, or the counts of the last batch.

        Raises:
            RuntimeError: `gather_uvm_cache_stats` is not set.
        """
        self.log(f"uvm_cache_stats={self._counters.counts_per_call(local=use_local_cache)}")

    def get_cache_miss_counter(self) -> Tensor:
        """Return the number of batches with a miss, and of distinct rows missed, int64 `[2]`.

        Both are 0 without `record_cache_miss_counter`.
        """
        return self._counters.cache_miss_counter

    def get_table_wise_cache_miss(self) -> Tensor:
        """Return the distinct rows missed per table, int64 `[T]`.

        The result is empty without `record_tablewise_cache_miss`.
        """
        return self._counters.table_wise_cache_miss

    # Optimizer

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next and later updates.

        Raises:
            NotImplementedError: rows are INT8, or the optimizer is OptimType.NONE.
            ValueError: `lr` is negative or not finite in float32.
        """
        self._require_fused("set_learning_rate")
        self.bags.set_learning_rate(lr)

    def get_learning_rate(self) -> float:
        """Return the learning rate; on the meta device the argument, for OptimType.NONE 0.0."""
        return float(self.optimizer_args.learning_rate)

    def set_optimizer_step(self, step: int) -> None:
        """Set the number of updates so far.

        Raises:
            NotImplementedError: rows are INT8, or the optimizer is OptimType.NONE.
            TypeError: `step` is not an int.
            ValueError: `step` is outside [0, 2^63).
        """
        self._require_fused("set_optimizer_step")
        self.bags.set_step(step)
        if self._averaging is not None:
            self._averaging.iterations = step

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        if self._averaging is not None:
            self._averaging.iterations = 0  # continue from the step in the state dict

    def update_hyper_parameters(self, params_dict: dict[str, float]) -> None:
        """Change some of `lr`, `eps`, `beta1`, `beta2`, `weight_decay` and `lower_bound`.

        For a hyperparameter that the optimizer does not have, a warning is given, and nothing
        changes.

        Raises:
            NotImplementedError: `params_dict` has another name, rows are INT8, or the optimizer is
                OptimType.NONE.
            ValueError: a number is out of range, or the module's `weight_decay_mode` would ignore
                the weight decay.
        """
        self._require_fused("update_hyper_parameters")
        fbgemm_arguments.update_hyperparameters(self.bags, self._arguments, params_dict)


def _make_bags(arguments: SimpleNamespace) -> Any:
    """Return the tables that `arguments` describe; they are the result of `normalise`."""
    if arguments.weights_precision is SparseType.INT8:
        return Int8Tables(arguments)
    return TableBatchedEmbeddingBags(
        fbgemm_arguments.tables(arguments),
        fbgemm_arguments.optimizer(arguments),
        pooling=fbgemm_arguments.pooling(arguments),
        feature_tables=arguments.feature_table_map,
        precision=fbgemm_arguments.precision(arguments),
        bounds_check=fbgemm_arguments.bounds_check(arguments),
        cache=fbgemm_arguments.cache(arguments),
        device=arguments.device,
    )


_installation = fbgemm_modules.Installation(
    {name: value for name, value in globals().items() if name in __all__ and name != "install"}
)


def install(*, fallback: bool = False) -> None:
    """Make `import fbgemm_gpu` import emblib's classes, and register `torch.ops.fbgemm`.

    TorchRec then trains on emblib's kernels. The installation lasts for the rest of the process; a
    second call does nothing, except that it may add the fallback.

    Args:
        fallback: whether an installed FBGEMM's Python files serve the modules and names that emblib
            does not have. FBGEMM's libraries are never loaded.

    Raises:
        ModuleNotFoundError: `fallback` is set, and FBGEMM is not installed.
        RuntimeError: the real fbgemm_gpu was imported before, or its operators are registered.
    """
    _installation.install(fallback=fallback)
