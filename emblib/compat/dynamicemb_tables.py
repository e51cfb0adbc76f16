"""DynamicEmb's module of batched tables, implemented by `emblib.DynamicEmbeddingBags`."""

import sys
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib import (
    BackingStore,
    DynamicEmbeddingBags,
    DynamicSpec,
    Eviction,
    HostRows,
    Pooling,
    TierMode,
    optim,
)
from emblib.compat import dynamicemb_arguments
from emblib.compat.checks import check_flags, check_names
from emblib.compat.dynamicemb_functions import DynamicEmbTables, is_compound
from emblib.compat.dynamicemb_types import (
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
)
from emblib.compat.fbgemm_types import (
    BoundsCheckMode,
    CounterBasedRegularizationDefinition,
    CowClipDefinition,
    EmbOptimType,
    WeightDecayMode,
)

_FLAGS = (
    "use_index_dedup",
    "prefetch_pipeline",
    "enforce_hbm",
    "stochastic_rounding",
    "gradient_clipping",
)
_BUCKET_ROWS = 32  # rows per bucket of emblib's hash tables


def split_tiers(
    options: Sequence[DynamicEmbTableOptions],
    specs: Sequence[DynamicSpec],
    rule: optim.Optimizer,
    device: torch.device,
) -> tuple[list[DynamicSpec], BackingStore | None]:
    """Divide tables between the device and a backing store.

    A store in host memory has room for the rows of max_capacity that are not on the device, at
    least 1 per table. An `external_storage` gets all rows that the device evicts. On a CPU, a table
    without a budget (`local_hbm_for_values`, `global_hbm_for_values`) and without `caching` is
    wholly on the device.

    Args:
        options: options of each table of a module.
        specs: specs of the same tables, with all their rows.
        rule: optimizer, whose states take memory.
        device: device of the tables.

    Returns:
        the specs with the rows on the device, and the store; None if all rows are on the device and
        there is no `external_storage`.

    Raises:
        NotImplementedError: on a GPU, a table has neither a budget nor `caching`; or a table
            without eviction does not fit its budget.
    """
    num_fast_rows = [
        _num_fast_rows(option, spec, rule, device)
        for option, spec in zip(options, specs, strict=True)
    ]
    tables = list(zip(specs, num_fast_rows, strict=True))
    store = options[0].external_storage
    if store is None and all(num_rows >= spec.rows for spec, num_rows in tables):
        return list(specs), None
    for spec, num_rows in tables:
        if spec.eviction is Eviction.NONE and num_rows < spec.rows:
            raise NotImplementedError(
                f"table {spec.name!r} has NO_EVICTION and {spec.rows} rows, of which {num_rows} "
                "are in local_hbm_for_values: rows that do not fit would be evicted; make it larger"
            )
    mode = TierMode.CACHING if options[0].caching else TierMode.HYBRID
    fast_specs = [
        replace(
            spec,
            capacity=num_rows,
            initial_capacity=min(spec.initial_capacity or num_rows, num_rows),
        )
        for spec, num_rows in tables
    ]
    if store is None:
        num_slow_rows = [max(spec.rows - num_rows, 1) for spec, num_rows in tables]
        store = HostRows(num_slow_rows, specs[0].eviction)
    return fast_specs, BackingStore(store, mode)


def _num_fast_rows(
    options: DynamicEmbTableOptions,
    spec: DynamicSpec,
    rule: optim.Optimizer,
    device: torch.device,
) -> int:
    """Return the number of rows of a table on the device: whole buckets, or all rows.

    As in DynamicEmb, a budget below one bucket is rounded up to one, with a warning. The arguments
    are those of `split_tiers` for one table.

    Raises:
        NotImplementedError: on a GPU, the table has neither a budget nor `caching`.
    """
    row_bytes = bytes_per_row(options.embedding_dtype or torch.float32, spec.dim, rule)
    budget_bytes = options.local_hbm_for_values or options.global_hbm_for_values
    if not budget_bytes and not options.caching:
        if device.type == "cpu":
            return spec.rows
        raise NotImplementedError(
            f"table {spec.name!r} has local_hbm_for_values = 0, which keeps all rows in host "
            f"memory; give it at least the {row_bytes * _BUCKET_ROWS} bytes of a bucket, and at "
            f"most the {row_bytes * spec.rows} bytes of all rows"
        )
    if budget_bytes < _BUCKET_ROWS * row_bytes:
        warnings.warn(
            f"local_hbm_for_values of table {spec.name!r} is {budget_bytes} bytes, and a bucket of "
            f"{_BUCKET_ROWS} rows takes {_BUCKET_ROWS * row_bytes}: it is rounded up to one bucket",
            stacklevel=_caller_level(),
        )
    return min(max(budget_bytes // row_bytes // _BUCKET_ROWS, 1) * _BUCKET_ROWS, spec.rows)


def _caller_level() -> int:
    """Return the `stacklevel` with which a warning of the caller names code outside emblib."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("emblib."):
        frame, level = frame.f_back, level + 1
    return level


def bytes_per_row(dtype: torch.dtype, dim: int, rule: optim.Optimizer) -> int:
    """Return the bytes of a row of `dim` numbers of `dtype`, and of its float32 states."""
    return dim * dtype.itemsize + 4 * num_state_values(rule, dim)


def num_state_values(rule: optim.Optimizer, dim: int) -> int:
    """Return how many numbers of optimizer state a row of `dim` numbers has."""
    return sum(1 if state.per_row else dim for state in rule.states)


class _PrefetchedUses(NamedTuple):
    """Properties of a batch that `prefetch` determines for its `forward`."""

    scores: Tensor | None  # int64 [T], score of its keys in each table; None without scores
    counts: Tensor | None  # int64 [L], uses per lookup; None for those of `forward`


class CacheMetrics:
    """Counter of lookups and hits of the device in the last training forward.

    Args:
        bags: module with a backing store.
    """

    def __init__(self, bags: DynamicEmbeddingBags) -> None:
        self._bags = bags
        self._hooks: list[Any] = []
        self._totals_before = self._totals_after = (0, 0)

    def set_record_cache_metrics(self, record: bool) -> None:
        """Start or stop counting; each forward then waits for the device."""
        check_flags(record=record)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if record:
            self._hooks = [
                self._bags.register_forward_pre_hook(self._count_before),
                self._bags.register_forward_hook(self._count_after),
            ]

    @property
    def cache_metrics(self) -> Tensor:
        """Number of lookups of the last forward, and of those with rows on the device, int64 `[2]`.

        Both are 0 until `set_record_cache_metrics(True)` and a forward, and after a forward in
        evaluation. Repeated keys count each time; DynamicEmb counts distinct keys.
        """
        pairs = zip(self._totals_after, self._totals_before, strict=True)
        return torch.tensor([after - before for after, before in pairs], device="cpu")

    def _count_before(self, *_: Any) -> None:
        self._totals_before = self._count_totals()

    def _count_after(self, *_: Any) -> None:
        self._totals_after = self._count_totals()

    def _count_totals(self) -> tuple[int, int]:
        stats = self._bags.tier_stats().values()
        return sum(table.lookups for table in stats), sum(table.hits for table in stats)


class BatchedDynamicEmbeddingTablesV2(DynamicEmbTables, nn.Module):
    """Dynamic tables that are updated in backward, with the interface of DynamicEmb's class.

    The arguments are DynamicEmb's; `docs/dynamicemb.md` says what each does here. `bags` has the
    tables, an `emblib.DynamicEmbeddingBags` whose seed is drawn from torch's generator. The
    constructor sets `evict_strategy` and `init_capacity` of `table_options` in place.

    Raises:
        NotImplementedError: an option or the optimizer is not supported.
        TypeError: table options or an admission strategy are objects of another class, a flag is
            text, or `table_names` are not a sequence.
        ValueError: options are missing, invalid or contradict each other, or tables differ in
            options that must be equal (`DynamicEmbTableOptions.get_grouped_key`).
    """

    def __init__(
        self,
        table_options: list[DynamicEmbTableOptions],
        table_names: list[str] | None = None,
        feature_table_map: list[int] | None = None,
        use_index_dedup: bool = False,
        prefetch_pipeline: bool = False,
        pooling_mode: DynamicEmbPoolingMode = DynamicEmbPoolingMode.SUM,
        output_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        enforce_hbm: bool = False,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.WARNING,
        optimizer: EmbOptimType = EmbOptimType.SGD,
        stochastic_rounding: bool = True,
        gradient_clipping: bool = False,
        max_gradient: float = 1.0,
        max_norm: float = 0.0,
        learning_rate: float = 0.01,
        eps: float = 1.0e-8,
        initial_accumulator_value: float = 0.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        weight_decay_mode: WeightDecayMode = WeightDecayMode.NONE,
        eta: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        counter_based_regularization: CounterBasedRegularizationDefinition | None = None,
        cowclip_regularization: CowClipDefinition | None = None,
    ) -> None:
        arguments = SimpleNamespace(**{k: v for k, v in locals().items() if k != "self"})
        super().__init__()
        check_flags(**{name: getattr(arguments, name) for name in _FLAGS})
        self._options = _checked_options(table_options)
        self._names = _unique_names(table_names, len(self._options))
        self.pooling_mode = DynamicEmbPoolingMode(pooling_mode)
        self.output_dtype = output_dtype
        self.index_type = self._options[0].index_type or torch.int64
        self.use_index_dedup = use_index_dedup
        self.prefetch_pipeline = prefetch_pipeline
        self.bags = self._make_bags(arguments)
        has_cache = self._options[0].caching and self.bags.backing is not None
        self._cache = CacheMetrics(self.bags) if has_cache else None
        self._prefetched: deque[_PrefetchedUses] = deque()  # batches that are not looked up yet
        for options in self._options:
            options.evict_strategy = dynamicemb_arguments.evict_strategy(options.score_strategy)
            if options.init_capacity is None:
                options.init_capacity = options.max_capacity

    def _make_bags(self, args: SimpleNamespace) -> DynamicEmbeddingBags:
        """Return the module with the tables; `args` are the arguments of the constructor."""
        optimizer = dynamicemb_arguments.optimizer(args)
        initial_state = args.initial_accumulator_value
        if not self._options[0].training:
            optimizer, initial_state = optim.SGD(args.learning_rate), 0.0  # SGD has no state
        specs = [
            dynamicemb_arguments.spec(options, name, initial_state)
            for options, name in zip(self._options, self._names, strict=True)
        ]
        device = dynamicemb_arguments.device(args.device, self._options)
        backing = None
        if not args.enforce_hbm:
            specs, backing = split_tiers(self._options, specs, optimizer, device)
        return DynamicEmbeddingBags(
            specs,
            optimizer,
            backing=backing,
            pooling=dynamicemb_arguments.POOLINGS[self.pooling_mode],
            feature_tables=args.feature_table_map,
            precision=dynamicemb_arguments.precision(args),
            seed=int(torch.randint(2**53, (), device="cpu")),
            device=device,
        )

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        total_unique_indices: int | None = None,
        pooling_weights: Tensor | None = None,
    ) -> Tensor:
        """Look up and pool to `[B, sum D]`, or return `[L, D]` for pooling NONE.

        Args:
            indices: integer ids `[L]`; uint64 ids keep their bits.
            offsets: int32 or int64 `[F * B + 1]`, feature after feature.
            per_sample_weights: number of uses that each lookup counts as, `[L]`; None for 1. Only
                scores that count uses (LFU, or TIMESTAMP and LFU) may have them.
            feature_requires_grad: argument that must be None.
            batch_size_per_feature_per_rank: argument that must be None.
            total_unique_indices: argument that must be None.
            pooling_weights: factors of the rows in sums and means, `[L]`; None for ones.

        Raises:
            NotImplementedError: an argument that must be None is not.
            TypeError: `indices` are not integers.
            RuntimeError: the module is in training mode, and tables have `training=False` or are
                CUSTOMIZED without a score.
            ValueError: the pooling mode or the score strategy does not use the weights; or, on a
                CPU, numbers of uses are fractions.
        """
        _refuse(
            feature_requires_grad=feature_requires_grad,
            batch_size_per_feature_per_rank=batch_size_per_feature_per_rank,
            total_unique_indices=total_unique_indices,
        )
        if self.training and not self._options[0].training:
            raise RuntimeError(
                "tables with training=False keep no optimizer state and cannot be trained; call "
                "eval() first, or make them with training=True"
            )
        if pooling_weights is not None and self.bags.pooling is Pooling.NONE:
            raise ValueError("pooling_weights need pooling_mode SUM or MEAN, got NONE")
        counts = None if per_sample_weights is None else self._use_counts(per_sample_weights)
        ids = self._as_int64(indices)
        if not self.training or not self._prefetched:
            return self.bags(ids, offsets, pooling_weights, counts=counts)
        prefetched = self._prefetched.popleft()
        counts = counts if prefetched.counts is None else prefetched.counts
        with self._scores_at(prefetched):
            return self.bags(ids, offsets, pooling_weights, counts=counts)

    @contextmanager
    def _scores_at(self, prefetched: _PrefetchedUses) -> Iterator[None]:
        """Use the scores of the batch's prefetch inside the context; then restore the others."""
        scores = self.bags.scores
        if scores is None or prefetched.scores is None:
            yield
            return
        current_scores = scores.values.clone()
        scores.values.copy_(prefetched.scores)
        try:
            yield
        finally:
            scores.values.copy_(current_scores)

    def _as_int64(self, indices: Tensor) -> Tensor:
        """Return ids as int64; uint64 ids keep their bits. Raise TypeError for other numbers."""
        if indices.is_floating_point() or indices.is_complex() or indices.dtype is torch.bool:
            raise TypeError(f"indices must be integers, got {indices.dtype}")
        if indices.dtype is torch.uint64:
            return indices.view(torch.int64)
        return indices.long()

    def _use_counts(self, weights: Tensor) -> Tensor:
        """Return the numbers of uses per lookup as int64.

        On a GPU fractions are cut off: a check would wait for the device.

        Raises:
            ValueError: the score strategy does not count uses, or on a CPU a number is a fraction.
        """
        strategy = self._options[0].score_strategy
        if strategy is not DynamicEmbScoreStrategy.LFU and not is_compound(strategy):
            raise ValueError(
                "per_sample_weights are numbers of uses per lookup, which only LFU and "
                f"(TIMESTAMP, LFU) count; score_strategy is {strategy!r}. Weights of pooling are "
                "pooling_weights=..."
            )
        counts = weights.long()
        if weights.is_floating_point() and not weights.is_cuda and bool((counts != weights).any()):
            raise ValueError(
                "per_sample_weights are numbers of uses per lookup and must be whole numbers; "
                "weights of pooling are pooling_weights=..."
            )
        return counts

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        forward_stream: Any = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
        frequency_counters: Tensor | None = None,
    ) -> None:
        """Determine the scores of a later batch, and read its rows from the backing store.

        In training, the batch gets the scores that are set now, even if others are set before its
        `forward`, and counts as a step: the next batch has the next STEP score. The caller must
        pass prefetched batches to training forwards in the same order, which is not checked. New
        keys get their rows in `forward`. In evaluation only rows are read.

        Args:
            indices: ids `[L]`, as in `forward`.
            offsets: `[F * B + 1]`, as in `forward`.
            forward_stream: ignored: work runs on the current stream.
            batch_size_per_feature_per_rank: argument that must be None.
            frequency_counters: number of uses that each lookup counts as, `[L]`, instead of the
                `per_sample_weights` of `forward`; None for those.

        Raises:
            NotImplementedError: `batch_size_per_feature_per_rank` is not None.
            TypeError: `indices` are not integers.
            ValueError: the score strategy does not count uses, or on a CPU a number is a fraction.
        """
        _refuse(batch_size_per_feature_per_rank=batch_size_per_feature_per_rank)
        counts = None if frequency_counters is None else self._use_counts(frequency_counters)
        ids = self._as_int64(indices)
        if self.training:
            scores = self.bags.scores
            values = None if scores is None else scores.batch_scores()
            if scores is not None:
                scores.advance()
            self._prefetched.append(_PrefetchedUses(values, counts))
        self.bags.prefetch(ids, offsets)

    @property
    def num_prefetched(self) -> int:
        """Number of batches that are prefetched and not looked up yet; they count as steps."""
        return len(self._prefetched)

    @property
    def cache(self) -> "CacheMetrics | None":
        """Counter of lookups and hits of the device; None without `caching` or a backing store."""
        return self._cache

    def set_record_cache_metrics(self, record: bool) -> None:
        """Start or stop counting by `cache`, if there is one; each forward then waits for a GPU."""
        if self._cache is not None:
            self._cache.set_record_cache_metrics(record)

    @property
    def enable_prefetch(self) -> bool:
        """True: `prefetch` may always be called; setting the attribute has no effect."""
        return True

    @enable_prefetch.setter
    def enable_prefetch(self, value: bool) -> None:
        del value

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer, in emblib's form; `opt_args` has its numbers by DynamicEmb's names."""
        return self.bags.optimizer

    @property
    def tables(self) -> Any:
        """Handles of emblib for the tables, by name: sizes, exports, reads, statistics."""
        return self.bags.table_handles()

    def reset_cache_states(self) -> None:
        """Do nothing: changed copies of stored rows are written back before emblib reads them."""

    @property
    def table_names(self) -> list[str]:
        """Names of the tables."""
        return list(self._names)

    def table_module_of(self, name: str) -> tuple[DynamicEmbeddingBags, int]:
        """Return the module that has a table, and its number there."""
        return self.bags, self._names.index(name)

    def options_of(self, name: str) -> DynamicEmbTableOptions:
        """Return the options of a table, with defaults filled in."""
        return self._options[self._names.index(name)]

    @property
    def table_options(self) -> Sequence[DynamicEmbTableOptions]:
        """The options of the tables, with defaults filled in."""
        return self._options

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next and later updates."""
        self.bags.set_learning_rate(lr)

    def split_embedding_weights(self) -> list[Tensor]:
        """Return an uninitialised tensor `[1, 1]` per table, not its rows, as DynamicEmb does."""
        dtype, device = self.bags.weights.dtype, self.bags.weights.device
        return [torch.empty(1, 1, dtype=dtype, device=device) for _ in self._names]


def _refuse(**arguments: Any) -> None:
    """Raise NotImplementedError for arguments that must be None."""
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} has no effect in DynamicEmb and is not supported; leave it out"
            )


def _checked_options(options: Sequence[DynamicEmbTableOptions]) -> list[DynamicEmbTableOptions]:
    """Return the options as a list; raise an error unless the tables can share a module."""
    if isinstance(options, DynamicEmbTableOptions):
        raise TypeError("table_options must be a list, one DynamicEmbTableOptions per table")
    if not options:
        raise ValueError("table_options must have at least one DynamicEmbTableOptions")
    for i, option in enumerate(options):
        if not isinstance(option, DynamicEmbTableOptions):
            raise TypeError(f"table_options[{i}] must be DynamicEmbTableOptions, got {option!r}")
        if option != options[0]:
            names = [
                field
                for field, value in option.get_grouped_key().items()
                if value != options[0].get_grouped_key()[field]
            ]
            raise ValueError(
                f"tables of a module must be equal in {', '.join(options[0].get_grouped_key())}; "
                f"table_options[{i}] differs in {', '.join(names)}; make a module for each"
            )
    return list(options)


def _unique_names(names: list[str] | None, count: int) -> list[str]:
    """Return `count` names, by default t0, t1, ...; raise ValueError unless they are distinct.

    Raise TypeError if `names` is not a sequence.
    """
    if names is None:
        names = [f"t{i}" for i in range(count)]
    names = check_names("table_names", names)
    if len(names) != count or len(set(names)) != count:
        raise ValueError(f"table_names must be {count} different names, got {names}")
    return names
