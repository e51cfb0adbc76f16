"""DynamicEmb's module of batched tables over `emblib.DynamicEmbeddingBags`."""

import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
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

_BUCKET_ROWS = 32  # of emblib's hash tables


def split_tiers(
    options: Sequence[DynamicEmbTableOptions],
    specs: Sequence[DynamicSpec],
    rule: optim.Optimizer,
    device: torch.device,
) -> tuple[list[DynamicSpec], BackingStore | None]:
    """Return the specs of the tables on the device, and a backing store if they do not fit.

    A store in host memory has the rows of max_capacity that are not on the device, at least 1 per
    table; `external_storage` takes all rows that the device evicts. On a CPU, a table without
    `caching` and with local and global_hbm_for_values = 0 is on the device as a whole.

    Args:
        options: options of each table of a module.
        specs: the same tables, each with all its rows.
        rule: the optimizer, whose states take memory.
        device: device of the tables.

    Raises:
        NotImplementedError: a GPU has no memory for values and no `caching`; or tables without
            eviction do not fit.
    """
    fast_rows_of_tables = [
        _num_fast_rows(o, s, rule, device) for o, s in zip(options, specs, strict=True)
    ]
    store = options[0].external_storage
    if store is None and all(
        fast_rows >= s.rows for fast_rows, s in zip(fast_rows_of_tables, specs, strict=True)
    ):
        return list(specs), None
    for fast_rows, s in zip(fast_rows_of_tables, specs, strict=True):
        if s.eviction is Eviction.NONE and fast_rows < s.rows:
            raise NotImplementedError(
                f"table {s.name!r} has NO_EVICTION and {s.rows} rows, of which {fast_rows} are in "
                "local_hbm_for_values: rows that do not fit would be evicted; make it larger"
            )
    slow_rows = [
        max(s.rows - fast_rows, 1) for fast_rows, s in zip(fast_rows_of_tables, specs, strict=True)
    ]
    mode = TierMode.CACHING if options[0].caching else TierMode.HYBRID
    fast_specs = [
        replace(
            s, capacity=fast_rows, initial_capacity=min(s.initial_capacity or fast_rows, fast_rows)
        )
        for fast_rows, s in zip(fast_rows_of_tables, specs, strict=True)
    ]
    if store is None:
        store = HostRows(slow_rows, specs[0].eviction)
    return fast_specs, BackingStore(store, mode)


def _num_fast_rows(
    options: DynamicEmbTableOptions,
    spec: DynamicSpec,
    rule: optim.Optimizer,
    device: torch.device,
) -> int:
    """Return the number of rows of a table in device memory, a multiple of a bucket or all rows.

    As in DynamicEmb, a budget below one bucket is rounded up to it, with a warning. A bucket of
    emblib is 32 rows. On a CPU, a table without a budget and without `caching` has all its rows.
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
            stacklevel=3,
        )
    return min(max(budget_bytes // row_bytes // _BUCKET_ROWS, 1) * _BUCKET_ROWS, spec.rows)


def bytes_per_row(dtype: torch.dtype, dim: int, rule: optim.Optimizer) -> int:
    """Return the bytes of a row of `dim` numbers of `dtype` and of its float32 states."""
    return dim * dtype.itemsize + 4 * num_state_values(rule, dim)


def num_state_values(rule: optim.Optimizer, dim: int) -> int:
    """Return how many numbers of optimizer state a row of `dim` numbers has."""
    return sum(1 if state.per_row else dim for state in rule.states)


class _Prefetched(NamedTuple):
    """The properties of a batch that `prefetch` fixes."""

    scores: Tensor | None  # int64 [T], of its keys by table; None if the tables have no scores
    counts: Tensor | None  # int64 [L], uses per lookup; None: those of `forward`


class Cache:
    """Lookups and hits of the fast tier in the last training forward of tables with `caching`."""

    def __init__(self, bags: DynamicEmbeddingBags) -> None:
        self._bags = bags
        self._hooks: list[Any] = []
        self._totals_before = self._totals_after = (0, 0)

    def set_record_cache_metrics(self, record: bool) -> None:
        """Start or stop counting; each forward then waits for the device."""
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
        """Lookups of the last forward, and how many were of keys in the fast tier, int64 `[2]`.

        Both are 0 before `set_record_cache_metrics(True)` and a forward, and after a forward in
        evaluation. This counts positions of the batch; DynamicEmb counts distinct keys.
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
    """Dynamic tables with a fused optimizer, as DynamicEmb's class of this name.

    The arguments are DynamicEmb's; `docs/dynamicemb.md` lists what each option does here.
    `self.bags` is the `emblib.DynamicEmbeddingBags` that does the work; its seed is drawn from
    torch's generator. In place, it sets `evict_strategy` and `init_capacity` of `table_options`.

    Raises:
        NotImplementedError: emblib does not have an option or the optimizer.
        TypeError: table options or an admission strategy have another class.
        ValueError: options contradict each other, or tables differ in options that must be equal
            (`DynamicEmbTableOptions.get_grouped_key`).
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
        self._options = _checked_options(table_options)
        self._names = _unique_names(table_names, len(self._options))
        self.pooling_mode = DynamicEmbPoolingMode(pooling_mode)
        self.output_dtype = output_dtype
        self.index_type = self._options[0].index_type or torch.int64
        self.use_index_dedup = use_index_dedup
        self.prefetch_pipeline = prefetch_pipeline
        self.bags = self._make_bags(arguments)
        has_cache = self._options[0].caching and self.bags.backing is not None
        self._cache = Cache(self.bags) if has_cache else None
        self._prefetched: deque[_Prefetched] = deque()  # and not looked up yet
        for options in self._options:
            options.evict_strategy = dynamicemb_arguments.evict_strategy(options.score_strategy)
            if options.init_capacity is None:
                options.init_capacity = options.max_capacity

    def _make_bags(self, args: SimpleNamespace) -> DynamicEmbeddingBags:
        """Return the module that does the work, given the arguments of the constructor."""
        optimizer, state = dynamicemb_arguments.optimizer(args), args.initial_accumulator_value
        if not self._options[0].training:
            optimizer, state = optim.SGD(args.learning_rate), 0.0  # SGD has no state
        specs = [
            dynamicemb_arguments.spec(options, name, state)
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
        """Pool rows to `[B, sum D]`, or return `[L, D]` for pooling NONE.

        Args:
            indices: integer ids, of which uint64 ones keep their bits.
            offsets: `[F * B + 1]`, feature-major.
            per_sample_weights: number of uses that each lookup stands for, `[L]`; only with scores
                that count uses (LFU, or TIMESTAMP and LFU).
            feature_requires_grad: argument that must be None.
            batch_size_per_feature_per_rank: argument that must be None.
            total_unique_indices: argument that must be None.
            pooling_weights: factors of the rows, `[L]`, for SUM and MEAN.

        Raises:
            NotImplementedError: an argument must be None and is not.
            RuntimeError: tables with `training=False` are trained, or CUSTOMIZED ones without a
                score.
            ValueError: the pooling mode or the score strategy does not use the weights; or, on a
                CPU, they are fractions of uses.
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
    def _scores_at(self, prefetched: _Prefetched) -> Iterator[None]:
        """Use the scores of the batch's prefetch inside the context; the step count stays."""
        scores = self.bags.scores
        if scores is None or prefetched.scores is None:
            yield
            return
        current = scores.values.clone()
        scores.values.copy_(prefetched.scores)
        try:
            yield
        finally:
            scores.values.copy_(current)

    def _as_int64(self, indices: Tensor) -> Tensor:
        """Return ids as int64; uint64 ids keep their bits."""
        if indices.dtype is torch.uint64:
            return indices.view(torch.int64)
        return indices.long()

    def _use_counts(self, weights: Tensor) -> Tensor:
        """Return uses per lookup as int64; raise ValueError where they would not count.

        Fractions raise on a CPU; on a GPU, where that would wait, they are cut off.
        """
        strategy = self._options[0].score_strategy
        if strategy is not DynamicEmbScoreStrategy.LFU and not is_compound(strategy):
            raise ValueError(
                "per_sample_weights are how many uses a lookup stands for, which only LFU and "
                f"(TIMESTAMP, LFU) count; score_strategy is {strategy!r}. Weights of pooling are "
                "pooling_weights=..."
            )
        counts = weights.long()
        if weights.is_floating_point() and not weights.is_cuda and bool((counts != weights).any()):
            raise ValueError(
                "per_sample_weights are how many uses a lookup stands for and must be whole "
                "numbers; weights of pooling are pooling_weights=..."
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
        """Fix the scores of a later batch, and read its rows from the backing store.

        In training, a prefetched batch keeps the scores of the time of `prefetch`, even if others
        are set before its `forward`, and counts as a step: the next batch has the next STEP score.
        The caller must pass prefetched batches to training forwards in the same order; not checked.
        Keys get their rows in `forward`. In evaluation this only reads rows.

        Args:
            indices: ids, as in `forward`.
            offsets: offsets of the bags, as `forward` takes them.
            forward_stream: ignored: work runs on the current stream.
            batch_size_per_feature_per_rank: argument that must be None.
            frequency_counters: number of uses that each lookup stands for, instead of
                `per_sample_weights` of `forward`.
        """
        _refuse(batch_size_per_feature_per_rank=batch_size_per_feature_per_rank)
        counts = None if frequency_counters is None else self._use_counts(frequency_counters)
        if self.training:
            scores = self.bags.scores
            values = None if scores is None else scores.batch_scores()
            if scores is not None:
                scores.advance()
            self._prefetched.append(_Prefetched(values, counts))
        self.bags.prefetch(self._as_int64(indices), offsets)

    @property
    def num_prefetched(self) -> int:
        """Return the number of batches prefetched and not yet looked up; they count as steps."""
        return len(self._prefetched)

    @property
    def cache(self) -> "Cache | None":
        """The hit counter of the fast tier; None unless tables have `caching` and a store."""
        return self._cache

    def set_record_cache_metrics(self, record: bool) -> None:
        """Start or stop counting hits of `cache`, if there is one; each forward then waits."""
        if self._cache is not None:
            self._cache.set_record_cache_metrics(record)

    @property
    def enable_prefetch(self) -> bool:
        """Return True: `prefetch` may always be called, and setting this changes nothing."""
        return True

    @enable_prefetch.setter
    def enable_prefetch(self, value: bool) -> None:
        del value

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer, as emblib describes it; `opt_args` has its numbers under DynamicEmb's."""
        return self.bags.optimizer

    @property
    def tables(self) -> Any:
        """Emblib's handles of the tables by name: sizes, exports, reads, statistics."""
        return self.bags.table_handles()

    def reset_cache_states(self) -> None:
        """Do nothing: a row is in one tier only, so there are no copies to drop."""

    @property
    def table_names(self) -> list[str]:
        """Return the names of the tables."""
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
        """Set the learning rate, from the next backward on."""
        self.bags.set_learning_rate(lr)

    def split_embedding_weights(self) -> list[Tensor]:
        """Return an uninitialised `[1, 1]` tensor per table in place of its rows, as DynamicEmb."""
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
    if isinstance(options, DynamicEmbTableOptions):
        raise TypeError("table_options must be a list, one DynamicEmbTableOptions per table")
    if not options:
        raise ValueError("table_options must have at least one DynamicEmbTableOptions")
    for i, other in enumerate(options):
        if not isinstance(other, DynamicEmbTableOptions):
            raise TypeError(f"table_options[{i}] must be DynamicEmbTableOptions, got {other!r}")
        if other != options[0]:
            names = [
                n
                for n, v in other.get_grouped_key().items()
                if v != options[0].get_grouped_key()[n]
            ]
            raise ValueError(
                f"tables of a module must be equal in {', '.join(options[0].get_grouped_key())}; "
                f"table_options[{i}] differs in {', '.join(names)}; make a module for each"
            )
    return list(options)


def _unique_names(names: list[str] | None, count: int) -> list[str]:
    names = [f"t{i}" for i in range(count)] if names is None else list(names)
    if len(names) != count or len(set(names)) != count:
        raise ValueError(f"table_names must be {count} different names, got {names}")
    return names
