"""DynamicEmb's module of batched tables over `emblib.DynamicEmbeddingBags`."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
from emblib.checkpoints import table_entries
from emblib.compat import dynamicemb_arguments
from emblib.compat.dynamicemb_arguments import evict_strategy
from emblib.compat.dynamicemb_types import (
    COMPOUND,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    warns_of_lower_scores,
)
from emblib.compat.fbgemm_types import (
    BoundsCheckMode,
    CounterBasedRegularizationDefinition,
    CowClipDefinition,
    EmbOptimType,
    WeightDecayMode,
)
from emblib.dynamic.saving.dumps import DumpError, field
from emblib.sharding.ranks import RankGroup


def split(
    options: Sequence[DynamicEmbTableOptions],
    specs: Sequence[DynamicSpec],
    rule: optim.Optimizer,
    device: torch.device,
) -> tuple[list[DynamicSpec], BackingStore | None]:
    """Return the tables as the device holds them, and their backing store if they do not fit.

    Both tiers together have max_capacity rows. On a CPU, local_hbm_for_values = 0 sets no limit.

    Raises:
        ValueError: too little memory for a bucket, or none for a cache.
        NotImplementedError: a GPU without memory for values; tables without eviction that do not
            fit.
    """
    rows = [_rows_there(o, s, rule, device) for o, s in zip(options, specs, strict=True)]
    if all(there >= s.rows for there, s in zip(rows, specs, strict=True)):
        return list(specs), None
    for there, s in zip(rows, specs, strict=True):
        if s.eviction is Eviction.NONE:
            raise NotImplementedError(
                f"table {s.name!r} has NO_EVICTION and {s.rows} rows, of which {there} are in "
                "local_hbm_for_values: rows that do not fit would be evicted; make it larger"
            )
    behind = [max(s.rows - there, 1) for there, s in zip(rows, specs, strict=True)]
    mode = TierMode.CACHING if options[0].caching else TierMode.HYBRID
    fast = [
        replace(s, capacity=there, initial_capacity=min(s.initial_capacity or there, there))
        for there, s in zip(rows, specs, strict=True)
    ]
    return fast, BackingStore(HostRows(behind, specs[0].eviction), mode)


def _rows_there(
    options: DynamicEmbTableOptions,
    spec: DynamicSpec,
    rule: optim.Optimizer,
    device: torch.device,
) -> int:
    """How many rows of a table are in the memory of the device."""
    width = (options.embedding_dtype or torch.float32).itemsize
    states = sum(4 * (1 if state.per_row else spec.dim) for state in rule.states)
    row_bytes = spec.dim * width + states
    given = options.local_hbm_for_values or options.global_hbm_for_values
    if not given and not options.caching:
        if device.type == "cpu":
            return spec.rows
        raise NotImplementedError(
            f"table {spec.name!r} has local_hbm_for_values = 0, which keeps all rows in host "
            f"memory; give it at least the {row_bytes * 32} bytes of a bucket, and at most the "
            f"{row_bytes * spec.rows} bytes of all rows"
        )
    rows = given // row_bytes // 32 * 32
    if rows < 1:
        raise ValueError(
            f"local_hbm_for_values of table {spec.name!r} is {given} bytes"
            f"{' with caching' if options.caching else ''}, a bucket of 32 rows takes "
            f"{row_bytes * 32}; give it more"
        )
    return min(rows, spec.rows)


_SAVED = {
    optim.SGD: "sgd",
    optim.Adam: "adam",
    optim.Adagrad: "exact_adagrad",
    optim.RowwiseAdagrad: "exact_row_wise_adagrad",
}


def opt_args(bags: DynamicEmbeddingBags, options: DynamicEmbTableOptions) -> dict[str, Any]:
    """Return what DynamicEmb saves of an optimizer and a table, by its names."""
    rule: Any = bags.optimizer
    saved: dict[str, Any] = {"opt_type": _SAVED[type(rule)], "lr": bags.learning_rate}
    if isinstance(rule, optim.Adam):
        decay = rule.weight_decay.rate if rule.weight_decay else 0.0
        saved |= {"iters": bags.step, "beta1": rule.betas[0], "beta2": rule.betas[1]}
        saved |= {"eps": rule.eps, "weight_decay": decay}
    elif not isinstance(rule, optim.SGD):
        state = bags.tables[0].initial_state
        saved |= {"eps": rule.eps, "initial_accumulator_value": state}
    if not isinstance(options.score_strategy, tuple):
        name = evict_strategy(options.score_strategy).name.title()
        saved["evict_strategy"] = f"EvictStrategy.K{name}"
    saved["dist_type"] = options.dist_type
    return saved


@dataclass(frozen=True)
class Saved:
    """What a table and its optimizer go on from; all of it is checked.

    Attributes:
        hyper: changes for `set_hyperparameters`.
        step: for `set_step`; None leaves it.
        step_score: for `set_eviction_step`; None leaves it.
    """

    hyper: Mapping[str, Any]
    step: int | None
    step_score: int | None


def check_kind(
    table: str,
    path: Path,
    content: Mapping[str, Any],
    current: Mapping[str, Any],
    with_optimizer: bool,
) -> None:
    """Check that a table was dumped by one of the same kind.

    Raises:
        DumpError: an entry of the file at `path` is no name.
        ValueError: the table is of another kind.
    """
    names = ["evict_strategy", *(["opt_type"] if with_optimizer else [])]
    for name in names:
        if name not in content or name not in current:
            continue
        saved = field(path, content, name, str)
        if saved != current[name]:
            raise ValueError(
                f"{name} of table {table!r} is {saved} in the dump and {current[name]} here; "
                "load into a table of the same options"
                + (", or with optim=False" if name == "opt_type" else "")
            )
    if "dist_type" in content and field(path, content, "dist_type", str) == "continuous":
        raise ValueError(
            f"table {table!r} was dumped with dist_type continuous, whose files have remainders of "
            "keys in place of the keys; dump it with another dist_type"
        )


def checked(
    path: Path, content: Mapping[str, Any], rule: Any, *, counts_steps: bool = False
) -> Saved:
    """Read the numbers of the file at `path` that a table takes.

    Args:
        path: of the file, for errors.
        content: of the file.
        rule: the optimizer of the table; None leaves out its numbers.
        counts_steps: whether the table has a score that counts steps.

    Raises:
        DumpError: a number is missing, of the wrong type or out of range.
    """
    hyper = {} if rule is None else _hyper(path, content, rule)
    step = score = None
    if rule is not None and "iters" in content:
        step = _whole(path, content, "iters", 0, 2**53)
    if counts_steps and "step_score" in content:
        score = _whole(path, content, "step_score", -(2**63), 2**63 - 1)
    return Saved(hyper, step, score)


def _hyper(path: Path, content: Mapping[str, Any], rule: Any) -> dict[str, Any]:
    def number(name: str) -> float:
        return float(field(path, content, name, int, float))

    def decay() -> dict[str, Any]:
        rate = number("weight_decay") if "weight_decay" in content else 0.0
        return {"weight_decay": optim.Decoupled(rate) if rate else None}

    parsers: dict[tuple[str, ...], Callable[[], dict[str, Any]]] = {
        ("lr",): lambda: {"lr": number("lr")}
    }
    if not isinstance(rule, optim.SGD):
        parsers["eps",] = lambda: {"eps": number("eps")}
    if isinstance(rule, optim.Adam):
        parsers["beta1", "beta2"] = lambda: {"betas": (number("beta1"), number("beta2"))}
        parsers["weight_decay", "beta1"] = decay
    hyper: dict[str, Any] = {}
    for names, parse in parsers.items():
        if not any(name in content for name in names):
            continue
        try:
            change = parse()
            replace(rule, **change)  # which checks ranges
        except (TypeError, ValueError, OverflowError) as error:
            words = " and ".join(map(repr, names))
            raise DumpError(f"{path} is malformed: {words}: {error}") from error
        hyper |= change
    return hyper


def _whole(path: Path, content: Mapping[str, Any], name: str, least: int, most: int) -> int:
    number: int = field(path, content, name, int)
    if not least <= number <= most:
        raise DumpError(f"{path} is malformed: {name!r} must be in [{least}, {most}], is {number}")
    return number


class BatchedDynamicEmbeddingTablesV2(nn.Module):
    """Dynamic tables with a fused optimizer, as DynamicEmb's class of this name.

    `self.bags` is the `emblib.DynamicEmbeddingBags` that does the work.
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
        given = SimpleNamespace(**{k: v for k, v in locals().items() if k != "self"})
        super().__init__()
        self._options = _checked(table_options)
        self._names = _names(table_names, len(self._options))
        self.pooling_mode = DynamicEmbPoolingMode(pooling_mode)
        self.output_dtype = output_dtype
        self.index_type = self._options[0].index_type or torch.int64
        self.use_index_dedup = use_index_dedup
        self.prefetch_pipeline = prefetch_pipeline
        self.bags = self._make(given)
        for options in self._options:
            options.evict_strategy = dynamicemb_arguments.evict_strategy(options.score_strategy)
            if options.init_capacity is None:
                options.init_capacity = options.max_capacity

    def _make(self, a: SimpleNamespace) -> DynamicEmbeddingBags:
        optimizer, state = dynamicemb_arguments.optimizer(a), a.initial_accumulator_value
        if not self._options[0].training:
            optimizer, state = optim.SGD(a.learning_rate), 0.0  # which keeps no state
        specs = [
            dynamicemb_arguments.spec(options, name, state)
            for options, name in zip(self._options, self._names, strict=True)
        ]
        device = dynamicemb_arguments.device(a.device, self._options)
        backing = None
        if not a.enforce_hbm:
            specs, backing = split(self._options, specs, optimizer, device)
        return DynamicEmbeddingBags(
            specs,
            optimizer,
            backing=backing,
            pooling=dynamicemb_arguments.POOLINGS[self.pooling_mode],
            feature_tables=a.feature_table_map,
            precision=dynamicemb_arguments.precision(a),
            seed=int(torch.randint(2**53, ())),
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
        """`[B, sum D]`, or `[L, D]` for NONE.

        Args:
            indices: ids, cast to `index_type`.
            offsets: `[F * B + 1]`, feature-major.
            per_sample_weights: how many uses each lookup stands for, where eviction is by them.
            feature_requires_grad: must be None.
            batch_size_per_feature_per_rank: must be None.
            total_unique_indices: must be None.
            pooling_weights: scale the rows, for SUM and MEAN.
        """
        refused = {
            "feature_requires_grad": feature_requires_grad,
            "batch_size_per_feature_per_rank": batch_size_per_feature_per_rank,
            "total_unique_indices": total_unique_indices,
        }
        for name, value in refused.items():
            if value is not None:
                raise NotImplementedError(
                    f"{name} has no effect in DynamicEmb and is not supported; leave it out"
                )
        if self.training and not self._options[0].training:
            raise RuntimeError(
                "tables with training=False keep no optimizer state and cannot be trained; call "
                "eval() first, or make them with training=True"
            )
        if pooling_weights is not None and self.bags.pooling is Pooling.NONE:
            raise ValueError("pooling_weights need pooling_mode SUM or MEAN, got NONE")
        counts = None if per_sample_weights is None else self._counts(per_sample_weights)
        return self.bags(self._ids(indices), offsets, pooling_weights, counts=counts)

    def _ids(self, indices: Tensor) -> Tensor:
        if indices.dtype is torch.uint64:
            return indices.view(torch.int64)
        return indices.long()

    def _counts(self, weights: Tensor) -> Tensor:
        strategy = self._options[0].score_strategy
        if strategy is not DynamicEmbScoreStrategy.LFU and not _is_compound(strategy):
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
    ) -> None:
        """Read the rows of a coming batch that are behind the memory of the device, if any are.

        Results are the same without it; keys get their places in `forward`.
        """
        self.bags.prefetch(self._ids(indices), offsets)

    def flush(self) -> None:
        """Have every update in the memory that it belongs to, as it always is without tiers."""
        self.bags.flush()

    def reset_cache_states(self) -> None:
        """Nothing to do: a row is in one tier alone, so there are no copies to drop."""

    @property
    def table_names(self) -> list[str]:
        """The names of the tables."""
        return list(self._names)

    @property
    def table_options(self) -> Sequence[DynamicEmbTableOptions]:
        """The options of the tables, with what was left out."""
        return self._options

    def set_learning_rate(self, lr: float) -> None:
        """From the next backward on."""
        self.bags.set_learning_rate(lr)

    def split_embedding_weights(self) -> list[Tensor]:
        """Return a matrix of one number per table, as DynamicEmb does: keys select the slots."""
        dtype, device = self.bags.weights.dtype, self.bags.weights.device
        return [torch.empty(1, 1, dtype=dtype, device=device) for _ in self._names]

    def set_score(self, named_score: Mapping[str, int]) -> None:
        """Scores of CUSTOMIZED tables by name, from the next batch on.

        Raises:
            ValueError: 0, which DynamicEmb reserves; no such table; not a CUSTOMIZED one.
        """
        before, scores = self.get_score(), {}
        for name, score in named_score.items():
            if name not in self._names:
                raise ValueError(f"no table is called {name!r}, there are {self._names}")
            if score == 0:
                raise ValueError("a score must not be 0, which DynamicEmb reserves")
            scores[self._names.index(name)] = score
        self.bags.set_eviction_score(scores)
        for name, score in named_score.items():
            if name in before and score < before[name] and warns_of_lower_scores():
                warnings.warn(
                    f"the score of table {name!r} is less than before: {score} < {before[name]}",
                    stacklevel=2,
                )

    def get_score(self) -> dict[str, int]:
        """Return the next batch's score by table; none for CUSTOMIZED tables without a score."""
        scores = {}
        for t, (name, options) in enumerate(zip(self._names, self._options, strict=True)):
            score = self.bags.eviction_score(t)
            strategy = options.score_strategy
            if strategy is DynamicEmbScoreStrategy.LFU:
                score = 1
            elif score is None and strategy is not DynamicEmbScoreStrategy.CUSTOMIZED:
                score = self.bags.num_training_steps + 1
            if score is not None:
                scores[name] = score
        return scores

    def opt_args(self, table: str) -> dict[str, Any]:
        """Return what DynamicEmb saves with a table, as it is now; synchronises with the device."""
        options = self._options[self._names.index(table)]
        saved = opt_args(self.bags, options)
        if options.score_strategy is DynamicEmbScoreStrategy.STEP:
            saved["step_score"] = self.get_score()[table]
        return saved

    def check_opt_args(
        self, table: str, path: Path, content: Mapping[str, Any], *, with_optimizer: bool
    ) -> Saved:
        """Check what was saved with a table, for `take_opt_args`; change nothing.

        Args:
            table: its name.
            path: of the file, for errors.
            content: of the file.
            with_optimizer: whether the numbers of the optimizer are wanted.

        Raises:
            DumpError: an entry is missing, of the wrong type or out of range.
            ValueError: it was saved with another kind of table.
        """
        options = self._options[self._names.index(table)]
        check_kind(table, path, content, opt_args(self.bags, options), with_optimizer)
        counts_steps = options.score_strategy is DynamicEmbScoreStrategy.STEP
        rule = self.bags.optimizer if with_optimizer else None
        return checked(path, content, rule, counts_steps=counts_steps)

    def take_opt_args(self, table: str, saved: Saved) -> None:
        """Go on from what `check_opt_args` returned."""
        if saved.step_score is not None:
            self.bags.set_eviction_step(table, saved.step_score)
        if saved.hyper:
            self.bags.set_hyperparameters(**saved.hyper)
        if saved.step is not None:
            self.bags.set_step(saved.step)

    def incremental_dump(
        self, named_thresholds: Mapping[str, int], pg: Any = None
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, int]]:
        """Keys and rows with a score of at least the threshold, and the scores of the next batch.

        Keys are sorted, rows are `[N, D]`; both are on the CPU. They are those of all ranks of
        `pg`, which all call this; None is all processes.
        """
        ranks = RankGroup.from_value(pg)
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for name, threshold in named_thresholds.items():
            if name not in self._names:
                raise ValueError(f"no table is called {name!r}, there are {self._names}")
            local_rows = self._rows_since(self._names.index(name), threshold)
            every = ranks.gather_objects(local_rows)
            keys, rows = (torch.cat(parts) for parts in zip(*every, strict=True))
            order = keys.argsort()
            found[name] = (keys[order], rows[order])
        scores = self.get_score()
        return found, {name: scores[name] for name in named_thresholds if name in scores}

    def _rows_since(self, table: int, threshold: int) -> tuple[Tensor, Tensor]:
        found = table_entries(self.bags, table)
        scores = found.stamps if found.scores is None or self._is_timed(table) else found.scores
        chosen = (scores >= threshold).nonzero().view(-1)
        return found.keys[chosen], found.rows["weight"][chosen].cpu()

    def uses_first(self, table: str) -> bool:
        """Whether files have the uses of a key before the time, as (LFU, TIMESTAMP) says."""
        strategy = self._options[self._names.index(table)].score_strategy
        return isinstance(strategy, tuple) and strategy[0] is DynamicEmbScoreStrategy.LFU

    def dist_type(self, table: str) -> str:
        """How ids are routed to ranks."""
        return self._options[self._names.index(table)].dist_type

    def _is_timed(self, table: int) -> bool:
        return _is_compound(self._options[table].score_strategy)


def _is_compound(strategy: Any) -> bool:
    return isinstance(strategy, tuple) and frozenset(strategy) == COMPOUND


def _checked(options: Sequence[DynamicEmbTableOptions]) -> list[DynamicEmbTableOptions]:
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


def _names(names: list[str] | None, count: int) -> list[str]:
    names = [f"t{i}" for i in range(count)] if names is None else list(names)
    if len(names) != count or len(set(names)) != count:
        raise ValueError(f"table_names must be {count} different names, got {names}")
    return names


def agree(ranks: RankGroup, error: Exception | None, outcome: str) -> None:
    """Raise on every rank what went wrong on any, and the outcome; all ranks call this."""
    messages = ranks.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"rank {rank} failed, {outcome}: {message}")
