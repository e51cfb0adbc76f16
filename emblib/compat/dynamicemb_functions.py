"""DynamicEmb's functions of the tables of one module or sharded collection.

`DynamicEmbTables` is the base of both. Its methods dump, load, fill and export tables, and set
scores. The *numbers* of a table (`opt_args`) are the hyperparameters, the step and the options that
DynamicEmb saves with it in a JSON file.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emblib import DynamicEmbeddingBags, optim
from emblib.checkpoints import table_entries
from emblib.compat.dynamicemb_arguments import evict_strategy
from emblib.compat.dynamicemb_types import (
    BATCH_SIZE_PER_DUMP,
    COMPOUND,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    warns_of_lower_scores,
)
from emblib.dynamic.saving import dynamicemb_files
from emblib.dynamic.saving.dumps import DumpError, entry_of
from emblib.dynamic.saving.dynamicemb import export_dynamicemb
from emblib.dynamic.saving.dynamicemb_files import DynamicEmbTable
from emblib.sharding.ranks import RankGroup

_OPTIMIZER_NAMES_IN_DUMPS = {
    optim.SGD: "sgd",
    optim.Adam: "adam",
    optim.Adagrad: "exact_adagrad",
    optim.RowwiseAdagrad: "exact_row_wise_adagrad",
}


def arguments_in_dumps(
    bags: DynamicEmbeddingBags, table: int, options: DynamicEmbTableOptions
) -> dict[str, Any]:
    """Return the numbers of a table, by DynamicEmb's names. Waits for a GPU.

    Args:
        bags: module with the table.
        table: number of the table in `bags`.
        options: options of the table.

    Raises:
        NotImplementedError: DynamicEmb does not have the optimizer, or its weight decay.
    """
    optimizer: Any = bags.optimizer
    if type(optimizer) not in _OPTIMIZER_NAMES_IN_DUMPS:
        raise NotImplementedError(
            f"DynamicEmb has no {type(optimizer).__name__}, so its files cannot name the "
            "optimizer: use emblib.sharding.checkpoints"
        )
    decay = optimizer.weight_decay.rate if optimizer.weight_decay else 0.0
    has_saved_decay = isinstance(optimizer, optim.Adam) and isinstance(
        optimizer.weight_decay, optim.Decoupled
    )
    if decay and not has_saved_decay:
        raise NotImplementedError(
            "DynamicEmb decays rows only in Adam, and decoupled, so its files cannot name the "
            f"{optimizer.weight_decay} of {type(optimizer).__name__}: use "
            "emblib.sharding.checkpoints"
        )
    arguments: dict[str, Any] = {
        "opt_type": _OPTIMIZER_NAMES_IN_DUMPS[type(optimizer)],
        "lr": bags.learning_rate,
    }
    if isinstance(optimizer, optim.Adam):
        arguments |= {"iters": bags.step, "beta1": optimizer.betas[0], "beta2": optimizer.betas[1]}
        arguments |= {"eps": optimizer.eps, "weight_decay": decay}
    elif not isinstance(optimizer, optim.SGD):
        initial_state = bags.tables[table].initial_state
        arguments |= {"eps": optimizer.eps, "initial_accumulator_value": initial_state}
    if not isinstance(options.score_strategy, tuple):
        name = evict_strategy(options.score_strategy).name.title()
        arguments["evict_strategy"] = f"EvictStrategy.K{name}"
    arguments["dist_type"] = dist_type_of_files(options)
    return arguments


def dist_type_of_files(options: DynamicEmbTableOptions) -> str:
    """Return the rule that routes the keys of a table to the files of ranks.

    For "continuous" it is "roundrobin". DynamicEmb's own files of "continuous" have remainders of
    keys, which `check_same_kind` refuses; files written here have whole keys.
    """
    return "roundrobin" if options.dist_type == "continuous" else options.dist_type


# Number of keys that `fill_table` draws at a time; of so many, a rank of thousands owns some.
_NUM_DRAWN_KEYS = 1 << 18


@dataclass(frozen=True)
class SavedNumbers:
    """Numbers of a file, checked, from which a table and its optimizer continue.

    Attributes:
        hyperparameters: arguments for `set_hyperparameters`.
        step: argument for `set_step`; None leaves the step unchanged.
        step_score: argument for `set_eviction_step`; None leaves the score unchanged.
    """

    hyperparameters: Mapping[str, Any]
    step: int | None
    step_score: int | None


def check_same_kind(
    table: str,
    path: Path,
    content: Mapping[str, Any],
    current_arguments: Mapping[str, Any],
    with_optimizer: bool,
) -> None:
    """Check that a dumped table has the same kind of eviction and optimizer as one that loads it.

    Args:
        table: name of the table.
        path: path of the file, for error messages.
        content: parsed content of the file, a result of `arguments_in_dumps` at the time.
        current_arguments: result of `arguments_in_dumps` for the table that loads.
        with_optimizer: whether the optimizer must be the same.

    Raises:
        DumpError: the name of an eviction strategy, optimizer or routing rule is not a string.
        ValueError: the eviction strategy or the optimizer differs, or the files have remainders of
            keys (`dist_type` continuous).
    """
    names = ["evict_strategy", *(["opt_type"] if with_optimizer else [])]
    for name in names:
        if name not in content or name not in current_arguments:
            continue
        saved_value = entry_of(path, content, name, str)
        if saved_value != current_arguments[name]:
            raise ValueError(
                f"{name} of table {table!r} is {saved_value} in the dump and "
                f"{current_arguments[name]} here; load into a table of the same options"
                + (", or with optim=False" if name == "opt_type" else "")
            )
    if "dist_type" in content and entry_of(path, content, "dist_type", str) == "continuous":
        raise ValueError(
            f"table {table!r} was dumped with dist_type continuous, whose files have remainders of "
            "keys instead of the keys; dump it with another dist_type"
        )


def _warn_of_initial_state(
    table: str, path: Path, content: Mapping[str, Any], current_arguments: Mapping[str, Any]
) -> None:
    """Warn if new rows of the dumped table had another initial optimizer state than here.

    Raises:
        DumpError: the saved state is not a number.
    """
    name = "initial_accumulator_value"
    if name not in content or name not in current_arguments:
        return
    saved_value = entry_of(path, content, name, int, float)
    if saved_value != current_arguments[name]:
        warnings.warn(
            f"{name} of table {table!r} is {saved_value} in the dump and stays "
            f"{current_arguments[name]} here: make the module with that of the dump to continue "
            "its training",
            stacklevel=5,  # the caller of `DynamicEmbLoad`
        )


def checked_numbers(
    path: Path, content: Mapping[str, Any], optimizer: Any, *, counts_steps: bool = False
) -> SavedNumbers:
    """Return the numbers of a file from which a table continues; numbers may be missing.

    Args:
        path: path of the file, for error messages.
        content: parsed content of the file.
        optimizer: optimizer of the table; None leaves its numbers out.
        counts_steps: whether the score of the table counts steps.

    Raises:
        DumpError: a number is of the wrong type or out of range, or only one beta is there.
    """
    hyperparameters = {} if optimizer is None else _hyperparameter_changes(path, content, optimizer)
    step = step_score = None
    if optimizer is not None and "iters" in content:
        step = _whole_number(path, content, "iters", 0, 2**53)
    if counts_steps and "step_score" in content:
        step_score = _whole_number(path, content, "step_score", -(2**63), 2**62 - 1)
    return SavedNumbers(hyperparameters, step, step_score)


def _hyperparameter_changes(
    path: Path, content: Mapping[str, Any], optimizer: Any
) -> dict[str, Any]:
    """Return the arguments for `set_hyperparameters` that a file has for `optimizer`.

    Raises:
        DumpError: a number is of the wrong type or out of range, or only one beta is there.
    """

    def number(name: str) -> float:
        return float(entry_of(path, content, name, int, float))

    def parse_decay() -> dict[str, Any]:
        rate = number("weight_decay")
        return {"weight_decay": optim.Decoupled(rate) if rate else None}

    parsers: dict[tuple[str, ...], Callable[[], dict[str, Any]]] = {
        ("lr",): lambda: {"lr": number("lr")}
    }
    if not isinstance(optimizer, optim.SGD):
        parsers["eps",] = lambda: {"eps": number("eps")}
    if isinstance(optimizer, optim.Adam):
        parsers["beta1", "beta2"] = lambda: {"betas": (number("beta1"), number("beta2"))}
        parsers["weight_decay",] = parse_decay
    changes: dict[str, Any] = {}
    for names, parse in parsers.items():
        if not any(name in content for name in names):
            continue
        try:
            parsed_changes = parse()
            replace(optimizer, **parsed_changes)  # checks ranges
        except (TypeError, ValueError, OverflowError) as error:
            quoted_names = " and ".join(map(repr, names))
            raise DumpError(f"{path} is malformed: {quoted_names}: {error}") from error
        changes |= parsed_changes
    return changes


def _whole_number(
    path: Path, content: Mapping[str, Any], name: str, minimum: int, maximum: int
) -> int:
    number: int = entry_of(path, content, name, int)
    if not minimum <= number <= maximum:
        raise DumpError(
            f"{path} is malformed: {name!r} must be in [{minimum}, {maximum}], is {number}"
        )
    return number


class DynamicEmbTables:
    """Base of modules and sharded collections with DynamicEmb's tables.

    The tables of this rank are in one or more `emblib.DynamicEmbeddingBags`.
    """

    @property
    def table_names(self) -> list[str]:
        """Names of the tables."""
        raise NotImplementedError

    def table_module_of(self, name: str) -> tuple[DynamicEmbeddingBags, int]:
        """Return the module that has a table, and the number of the table there."""
        raise NotImplementedError

    def options_of(self, name: str) -> DynamicEmbTableOptions:
        """Return the options of a table; those that were None have their defaults."""
        raise NotImplementedError

    @property
    def num_prefetched(self) -> int:
        """Number of batches that are prefetched and not looked up yet; they count as steps."""
        return 0

    def _check_name(self, name: str) -> None:
        if name not in self.table_names:
            raise ValueError(f"no table is called {name!r}, there are {self.table_names}")

    def saved_entries(
        self, name: str, ranks: RankGroup, leave_out: Sequence[str]
    ) -> DynamicEmbTable:
        """Return the entries of a table that this rank writes. All ranks must call this.

        Args:
            name: name of the table.
            ranks: ranks that dump.
            leave_out: parts that are not written, "states" or "counts".
        """
        module, index = self.table_module_of(name)
        return export_dynamicemb(module, index, {}, leave_out=leave_out)

    def select_owned(self, name: str, ranks: RankGroup, dump: DynamicEmbTable) -> DynamicEmbTable:
        """Return the entries of a dump whose keys belong to this rank, by the dump's `dist_type`.

        For a dump without a `dist_type`, that of the table `name` is used.
        """
        dist_type = str(dump.arguments.get("dist_type", self.dist_type(name)))
        return dump.owned(
            lambda keys: dynamicemb_files.owner_ranks(keys, ranks.size, dist_type) == ranks.rank
        )

    @property
    def reads_own_files(self) -> bool:
        """True if the file of rank r has all keys of rank r, when as many ranks dumped as load."""
        return True

    def flush(self) -> None:
        """Write all rows to the backing store, and wait for it; do nothing without a store."""
        for module in {
            id(module): module for module, _ in map(self.table_module_of, self.table_names)
        }.values():
            module.flush()

    def export_keys_values(
        self, table_name: str, device: torch.device | str, batch_size: int = 65536
    ) -> tuple[Tensor, Tensor]:
        """Return the keys of this rank, int64 `[N]`, and their rows, float32 `[N, D]`.

        Args:
            table_name: name of the table.
            device: device of both tensors.
            batch_size: number of rows that are copied at a time.

        Raises:
            ValueError: the table does not exist.
        """
        self._check_name(table_name)
        module, index = self.table_module_of(table_name)
        entries = export_dynamicemb(module, index, {}, leave_out=["states"]).entries
        rows = entries.rows["weight"]
        row_blocks = [
            rows[block_positions].to(device, torch.float32)
            for block_positions in torch.arange(len(entries), device="cpu").split(batch_size)
        ]
        return entries.keys.to(device), torch.cat(row_blocks)

    def fill_tables(
        self, load_factor: float = 0.95, tolerance: float = 1e-5, seed: int = 0
    ) -> None:
        """Insert random keys until each table of this rank is filled.

        Up to 65536 keys at a time are inserted by a forward in training mode without an update,
        which counts as a training step. Rows get their initial values. If a forward inserts no key,
        the table stays as it is.

        Args:
            load_factor: share of max_capacity up to which a table is filled, in (0, 1].
            tolerance: share of max_capacity that may be missing.
            seed: seed of the keys; table i uses `seed + i`.

        Raises:
            RuntimeError: a CUSTOMIZED table has no score.
            ValueError: `load_factor` is outside (0, 1], `tolerance` is negative, or no feature
                reads a table.
        """
        if not tolerance >= 0.0:  # true for NaN
            raise ValueError(f"tolerance must be at least 0, got {tolerance}")
        if not 0.0 < load_factor <= 1.0:
            raise ValueError(f"load_factor must be in (0, 1], got {load_factor}")
        for number, name in enumerate(self.table_names):
            module, index = self.table_module_of(name)
            capacity = self.options_of(name).max_capacity
            assert capacity is not None
            generator = torch.Generator().manual_seed(seed + number)
            target_size = int(capacity * load_factor)
            if target_size - module.size(index) > tolerance * capacity:
                fill_table(module, index, target_size, generator, self.owns)

    def owns(self, keys: Tensor) -> Tensor:
        """Return whether each key may be on this rank, bool `[N]`."""
        return torch.ones_like(keys, dtype=torch.bool)

    def dump(
        self,
        save_dir: str,
        optim: bool = False,
        counter: bool = False,
        table_names: Sequence[str] | None = None,
        pg: Any = None,
    ) -> None:
        """Write the tables `table_names`, None for all, to the directory `save_dir`.

        Arguments and errors are those of `DynamicEmbDump`; older files are replaced.
        """
        from emblib.compat.dynamicemb_dump import dump_module

        dump_module(save_dir, self, table_names, optim=optim, counter=counter, pg=pg)

    def load(
        self,
        save_dir: str,
        optim: bool = False,
        counter: bool = False,
        table_names: Sequence[str] | None = None,
        pg: Any = None,
    ) -> None:
        """Read the files of `dump`; arguments and errors are those of `DynamicEmbLoad`."""
        from emblib.compat.dynamicemb_dump import load_module

        load_module(save_dir, self, table_names, optim=optim, counter=counter, pg=pg)

    def set_score(self, named_score: Mapping[str, int]) -> None:
        """Set the scores that keys of the next batches get in CUSTOMIZED tables, by table.

        A score below the previous one warns, unless `warns_of_lower_scores()` is False.

        Raises:
            TypeError: `named_score` is not a mapping, or a score is not an int.
            ValueError: a score is 0, which DynamicEmb reserves, or a table does not exist or is not
                CUSTOMIZED. Scores of other modules may be set by then.
        """
        if not isinstance(named_score, Mapping):
            raise TypeError(f"scores must be ints by name of a table, got {named_score!r}")
        scores_before: dict[str, int] = self.get_score()
        scores: dict[int, tuple[DynamicEmbeddingBags, dict[int, int]]] = {}
        for name, score in named_score.items():
            self._check_name(name)
            if score == 0:
                raise ValueError("a score must not be 0, which DynamicEmb reserves")
            module, index = self.table_module_of(name)
            scores.setdefault(id(module), (module, {}))[1][index] = score
        for module, scores_by_index in scores.values():
            module.set_eviction_score(scores_by_index)
        for name, score in named_score.items():
            if name in scores_before and score < scores_before[name] and warns_of_lower_scores():
                warnings.warn(
                    f"the score of table {name!r} is less than before: "
                    f"{score} < {scores_before[name]}",
                    stacklevel=2,
                )

    def get_score(self) -> dict[str, int]:
        """Return the score of the next batch's keys, by table.

        A CUSTOMIZED table without a score is left out. LFU tables have 1.
        """
        scores = {}
        for name in self.table_names:
            module, index = self.table_module_of(name)
            score = module.eviction_score(index)
            strategy = self.options_of(name).score_strategy
            if strategy is DynamicEmbScoreStrategy.LFU:
                score = 1
            elif score is None and strategy is not DynamicEmbScoreStrategy.CUSTOMIZED:
                score = module.num_training_steps + self.num_prefetched + 1
            if score is not None:
                scores[name] = score
        return scores

    def opt_args(self, table: str) -> dict[str, Any]:
        """Return the numbers of a table, by DynamicEmb's names. Waits for a GPU.

        Raises:
            NotImplementedError: DynamicEmb does not have the optimizer, or its weight decay.
        """
        options = self.options_of(table)
        arguments = arguments_in_dumps(*self.table_module_of(table), options)
        if options.score_strategy is DynamicEmbScoreStrategy.STEP:
            arguments["step_score"] = self.get_score()[table]
        return arguments

    def check_opt_args(
        self, table: str, path: Path, content: Mapping[str, Any], *, with_optimizer: bool
    ) -> SavedNumbers:
        """Check the saved numbers of a table, and return them for `set_opt_args`; change nothing.

        Args:
            table: name of the table.
            path: path of the file, for error messages.
            content: parsed content of the file.
            with_optimizer: whether to return the numbers of the optimizer.

        Raises:
            DumpError: an entry is of the wrong type or out of range, or only one beta is there.
            ValueError: the table was saved with another eviction strategy or optimizer.
        """
        options, (module, index) = self.options_of(table), self.table_module_of(table)
        current_arguments = arguments_in_dumps(module, index, options)
        check_same_kind(table, path, content, current_arguments, with_optimizer)
        if with_optimizer:
            _warn_of_initial_state(table, path, content, current_arguments)
        counts_steps = options.score_strategy is DynamicEmbScoreStrategy.STEP
        optimizer = module.optimizer if with_optimizer else None
        return checked_numbers(path, content, optimizer, counts_steps=counts_steps)

    def set_opt_args(self, table: str, saved_numbers: SavedNumbers) -> None:
        """Set the numbers of a table, and of the optimizer of its module; see `check_opt_args`."""
        module, index = self.table_module_of(table)
        if saved_numbers.step_score is not None:
            module.set_eviction_step(index, saved_numbers.step_score)
        if saved_numbers.hyperparameters:
            module.set_hyperparameters(**saved_numbers.hyperparameters)
        if saved_numbers.step is not None:
            module.set_step(saved_numbers.step)

    def incremental_dump(
        self, named_thresholds: Mapping[str, int], pg: Any = None
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, int]]:
        """Return the keys with scores from a threshold on, of all ranks, and the next thresholds.

        All ranks must call this, with the same tables in the same order.

        Args:
            named_thresholds: minimum score, by table.
            pg: process group of the ranks; None is all processes.

        Returns:
            keys, sorted int64 `[N]`, and rows `[N, D]` by table, on the CPU; and the score of the
            next batch by table, the threshold for the next call. A CUSTOMIZED table without a score
            has none.

        Raises:
            ValueError: a table does not exist.
        """
        ranks = RankGroup.from_value(pg)
        entries_by_table: dict[str, tuple[Tensor, Tensor]] = {}
        for name, threshold in named_thresholds.items():
            self._check_name(name)
            local_rows = self._rows_since(name, threshold)
            rows_by_rank = ranks.gather_objects(local_rows)
            keys, rows = (torch.cat(parts) for parts in zip(*rows_by_rank, strict=True))
            order = keys.argsort()
            entries_by_table[name] = (keys[order], rows[order])
        scores = self.get_score()
        return entries_by_table, {name: scores[name] for name in named_thresholds if name in scores}

    def _rows_since(self, name: str, threshold: int) -> tuple[Tensor, Tensor]:
        entries = table_entries(*self.table_module_of(name))
        uses_stamps = is_compound(self.options_of(name).score_strategy)
        scores = entries.stamps if entries.scores is None or uses_stamps else entries.scores
        positions = (scores >= threshold).nonzero().view(-1)
        return entries.keys[positions], entries.rows["weight"][positions].cpu()

    def has_uses_first(self, table: str) -> bool:
        """Return whether files have the uses of a key before its time, as for (LFU, TIMESTAMP)."""
        strategy = self.options_of(table).score_strategy
        return isinstance(strategy, tuple) and strategy[0] is DynamicEmbScoreStrategy.LFU

    def dist_type(self, table: str) -> str:
        """Return the rule that routes the keys of a table to the files of ranks."""
        return dist_type_of_files(self.options_of(table))


def is_compound(strategy: Any) -> bool:
    """Return whether a score strategy is a tuple of TIMESTAMP and LFU."""
    return isinstance(strategy, tuple) and frozenset(strategy) == COMPOUND


def raise_on_all_ranks(ranks: RankGroup, error: Exception | None, outcome: str) -> None:
    """Raise on every rank if any rank failed. All ranks must call this, and wait for each other.

    Args:
        ranks: the ranks.
        error: error of this rank, which this rank raises; None for none.
        outcome: state of the tables after a failure, for the message of the other ranks.

    Raises:
        RuntimeError: only another rank failed.
    """
    messages = ranks.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message is not None:
            raise RuntimeError(f"rank {rank} failed, {outcome}: {message}")


def fill_table(
    module: DynamicEmbeddingBags,
    index: int,
    target_size: int,
    generator: torch.Generator,
    owns: Callable[[Tensor], Tensor],
) -> None:
    """Insert random keys until a table has `target_size` keys, or a forward inserts none.

    Args:
        module: module with the table, which runs training forwards without an update.
        index: number of the table in `module`.
        target_size: number of keys.
        generator: generator of the keys, on the CPU.
        owns: function that returns which keys may be inserted, bool `[N]`.

    Raises:
        ValueError: no feature reads the table.
    """
    if index not in module.feature_tables:
        raise ValueError(
            f"table {module.tables[index].name!r} cannot be filled, as no feature reads it: "
            f"feature_table_map is {list(module.feature_tables)}"
        )
    feature = module.feature_tables.index(index)
    spec, was_training = module.tables[index], module.training
    module.train()
    try:
        while (num_missing := target_size - module.size(index)) > 0:
            keys = torch.randint(2**62, (_NUM_DRAWN_KEYS,), generator=generator, device="cpu")
            keys = keys[owns(keys)][: min(num_missing, BATCH_SIZE_PER_DUMP)]
            offsets = torch.zeros(len(module.feature_tables) + 1, dtype=torch.int64, device="cpu")
            offsets[feature + 1 :] = keys.numel()
            uses_per_key = 1 if spec.admission is None else spec.admission.max_threshold
            counts = torch.full_like(keys, uses_per_key)
            size_before, device = module.size(index), module.weights.device
            with torch.enable_grad():
                module(keys.to(device), offsets.to(device), counts=counts.to(device))
            if module.size(index) <= size_before:
                return
    finally:
        module.train(was_training)
