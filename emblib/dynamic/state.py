"""The state of a module of dynamic tables: index and rows, and how they move and are copied."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from emblib.dynamic import keys as key_status
from emblib.dynamic.admission import Admission
from emblib.dynamic.hash_index import HashIndex, Inserted, ValueRows
from emblib.dynamic.keys import as_keys
from emblib.dynamic.rows import Reads, RowLayout, Step
from emblib.dynamic.saving import dumps
from emblib.ops.hash import Keys
from emblib.specs import DynamicSpec, Eviction, Precision
from emblib.tables.base import FeatureTables
from emblib.tables.locks import ModuleLock, atomic

_RANGE = (-(2**63), 2**63 - 1)


class Scores(nn.Module):
    """What the keys of the next batch are given as their score, by table.

    STEP counts the training batches of its table, from 1 on. CUSTOM is what `set` was last told.
    """

    values: Tensor
    is_set: Tensor
    steps: Tensor

    def __init__(self, specs: Sequence[DynamicSpec], device: torch.device) -> None:
        super().__init__()
        self._names = [spec.name or str(t) for t, spec in enumerate(specs)]
        self._evictions = [spec.eviction for spec in specs]
        self._unset = {t for t, e in enumerate(self._evictions) if e is Eviction.CUSTOM}
        steps = [int(e is Eviction.STEP) for e in self._evictions]
        tensor = torch.tensor(steps, dtype=torch.int64, device=device)
        self.register_buffer("steps", tensor, persistent=False)
        self.register_buffer("values", tensor.clone())
        self.register_buffer("is_set", tensor.bool())

    def given(self) -> Tensor:
        """int64 `[T]`, of a batch that is about to be used; does not follow later changes.

        Raises:
            RuntimeError: a table with CUSTOM scores was never given one.
        """
        if self._unset:
            names = [self._names[t] for t in sorted(self._unset)]
            raise RuntimeError(
                f"tables with Eviction.CUSTOM need a score before their first batch, got none for "
                f"{names}; call set_score(...)"
            )
        return self.values.clone()

    def advance(self) -> None:
        """One training batch more."""
        self.values += self.steps

    def set(self, scores: int | Mapping[int, int]) -> None:
        """Scores of CUSTOM tables from the next batch on: one for all of them, or by table.

        Raises:
            ValueError: not a CUSTOM table, or a score that is no int64.
            TypeError: a score that is no int.
        """
        if not isinstance(scores, Mapping):
            scores = {t: scores for t, e in enumerate(self._evictions) if e is Eviction.CUSTOM}
            if not scores:
                raise ValueError("scores are set for tables with Eviction.CUSTOM, and none has it")
        for table in scores:
            if self._evictions[table] is not Eviction.CUSTOM:
                raise ValueError(
                    f"only tables with Eviction.CUSTOM are given scores, table "
                    f"{self._names[table]!r} has {self._evictions[table]}"
                )
        numbers = {table: _checked(score) for table, score in scores.items()}
        for table, score in numbers.items():
            self.values[table].fill_(score)
            self.is_set[table].fill_(True)
        self._unset -= set(scores)

    def restart(self, steps: Mapping[int, int]) -> None:
        """Go on from these numbers in STEP tables: what the next batch is given."""
        for table in steps:
            if self._evictions[table] is not Eviction.STEP:
                raise ValueError(
                    f"only tables with Eviction.STEP count steps, table {self._names[table]!r} has "
                    f"{self._evictions[table]}"
                )
        numbers = {table: _checked(step) for table, step in steps.items()}
        for table, step in numbers.items():
            self.values[table].fill_(step)

    def clear(self) -> None:
        """Steps begin anew; what was set stays."""
        for t, eviction in enumerate(self._evictions):
            if eviction is Eviction.STEP:
                self.values[t].fill_(1)

    def get(self) -> list[int | None]:
        """The score of the next batch by table (reads the device); None where there is none."""
        return [
            None if t in self._unset or eviction.order != "assigned" else value
            for t, (eviction, value) in enumerate(
                zip(self._evictions, self.values.tolist(), strict=True)
            )
        ]

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        known = self.is_set.tolist()
        custom = [t for t, e in enumerate(self._evictions) if e is Eviction.CUSTOM]
        self._unset = {t for t in custom if not known[t]}


def _checked(score: Any) -> int:
    """A score as an int; raise TypeError and ValueError unless it is an int64."""
    if isinstance(score, bool) or not hasattr(score, "__index__"):
        raise TypeError(f"a score must be an int, got {score!r}")
    number = operator.index(score)
    if not _RANGE[0] <= number <= _RANGE[1]:
        raise ValueError(f"a score must be in [-2^63, 2^63), got {number}")
    return number


def copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that no longer follow the module."""
    return {name: tensor.clone() for name, tensor in state.items()}


class KeyQuestions:
    """A part of `DynamicEmbeddingBags`."""

    index: HashIndex
    scores: Scores | None
    admission: Admission | None
    last: Inserted | None
    table_names: list[str]
    _lock: ModuleLock

    @property
    def tick(self) -> int:
        """How many training forwards there were (reads the device)."""
        return self.index.tick

    @atomic
    def key_status(self) -> Tensor:
        """What became of each id of the last training forward: uint8 `[L]` of `KeyStatus`.

        Nothing is computed for it before it is asked.
        """
        if self.last is None:
            raise RuntimeError(
                "key_status tells of the last training forward, and there was none; call the "
                "module in training mode, with gradients enabled, first"
            )
        return key_status.of_insertion(self.last)

    @atomic
    def set_score(self, score: int | Mapping[int, int] | Mapping[str, int]) -> None:
        """The score of `Eviction.CUSTOM` tables from the next training forward on.

        Every key that such a batch uses gets it; the keys with the lowest give way first.

        Args:
            score: an int64 for all those tables, or by number or name of the table.

        Raises:
            KeyError, IndexError: there is no such table.
            ValueError: its eviction is another.
            TypeError: not an int.
        """
        if self.scores is None:
            raise ValueError("scores are set for tables with Eviction.CUSTOM, and none has it")
        if isinstance(score, Mapping):
            self.scores.set({self.table_number(table): value for table, value in score.items()})
        else:
            self.scores.set(score)

    @atomic
    def set_eviction_step(self, table: int | str, step: int) -> None:
        """The score that a table with `Eviction.STEP` gives to its next batch; it counts on."""
        if self.scores is None:
            raise ValueError("steps are counted by tables with Eviction.STEP, and none has it")
        self.scores.restart({self.table_number(table): step})

    @atomic
    def score(self, table: int | str) -> int | None:
        """The score that a table gives to the next training batch (reads the device).

        None where eviction is not by scores that are given, or none was set yet.
        """
        number = self.table_number(table)
        return None if self.scores is None else self.scores.get()[number]

    def table_number(self, table: int | str) -> int:
        """Of a table by its number or name."""
        names = self.table_names
        if isinstance(table, str):
            if table not in names:
                raise KeyError(f"there is no table {table!r}; have {', '.join(names)}")
            return names.index(table)
        if isinstance(table, bool) or not hasattr(table, "__index__"):
            raise TypeError(f"a table is given by number or name, got {table!r}")
        if not 0 <= table < len(names):
            raise IndexError(
                f"table must be in [0, {len(names)}), the number of tables, got {table}"
            )
        return table


_SNAPSHOT = ("index", "rows", "hyper", "admission", "scores")


class DynamicState(KeyQuestions, FeatureTables):
    """Base of modules of dynamic tables: keys in `index`, rows by slot in `weights` and states."""

    moves: Tensor
    index: HashIndex
    _zeros: Tensor
    rows: RowLayout
    tables: tuple[DynamicSpec, ...]
    precision: Precision

    def _row_layout(self) -> RowLayout:
        return RowLayout(self.tables, self.table_names, self.optimizer.states, self.precision)

    def _step(self, keys: Keys, slots: Tensor, reads: Reads) -> Step:
        return Step(self._lock, self.index, keys, slots, reads, self.dropped_updates)

    dropped_updates: Tensor
    """Positions whose key had left between their forward and their backward, so far."""

    def _register_rows(self, device: torch.device) -> None:
        """Room for the rows of all tables, of which nothing is written yet."""
        weights, *states = self.rows.allocate(device)
        self._register_row_buffers(weights, states, persistent=False)
        self.register_buffer("moves", self.rows.moves(device), persistent=False)

    def planes(self) -> list[Tensor]:
        """Weights and states as flat tensors, by slot; see `RowLayout`."""
        return [self.weights.detach().view(-1), *self._states()]

    def table_rows(self, table: int | str) -> dict[str, Tensor]:
        """The rows of a table by slot, as views: `weight` `[rows, dim]` and optimizer states.

        Only rows of slots that the index names mean anything. The views go stale when the module
        moves.
        """
        return self.rows.views(self.planes(), self.table_number(table))

    def value_rows(self) -> ValueRows:
        """What the index moves along when a table grows."""
        return ValueRows(self.planes(), self.moves, self._use)

    def _use(self, table: int, before: int, now: int) -> None:
        self.rows.use(self.planes(), table, before, now)

    def keys_of(self, table: int, ids: Tensor) -> Keys:
        """Ids of one table as a batch."""
        return Keys.of(as_keys(ids).to(self.hyperparams.device), self.table_number(table))

    @atomic
    def size(self, table: int) -> int:
        """How many keys a table has (reads the device)."""
        return self.index.size(self.table_number(table))

    @atomic
    def capacity(self, table: int) -> int:
        """How many rows of a table are in use as it has grown so far (reads the device)."""
        return self.index.capacity(self.table_number(table))

    @atomic
    def find(self, table: int, ids: Tensor) -> Tensor:
        """The rows of ids in `table_rows(table)`, int64, -1 for ids that are not there.

        They hold until the next training forward.
        """
        return self.index.find(self.keys_of(table, ids))

    @atomic
    def reserve(self, table: int, rows: int) -> None:
        """Let a table grow at once to what it needs for `rows` keys."""
        self.index.reserve(self.table_number(table), rows, self.value_rows())

    @atomic
    def stats(self) -> dict[str, dict[str, int]]:
        """By table what became of keys since construction or `reset_stats` (reads the device)."""
        return dict(zip(self.table_names, self.index.stats(), strict=True))

    @atomic
    def reset_stats(self) -> None:
        """Count from zero."""
        self.index.reset_stats()

    @atomic
    def nbytes(self) -> dict[str, int]:
        """Bytes in use of `weights`, `optimizer_state` and `index` (reads the device)."""
        weights, *states = self.rows.nbytes(self._capacities())
        return {
            "weights": weights,
            "optimizer_state": sum(states),
            "index": self.index.nbytes(),
        }

    def _capacities(self) -> list[int]:
        return [self.index.capacity(t) for t in range(len(self.tables))]

    @atomic
    def snapshot(self) -> dict[str, Any]:
        """All there is, slot by slot, and nothing of what is not in use.

        For another module of the same tables; `state_dict` fits any capacity.
        """
        return {
            "index": self.index.snapshot(),
            "rows": self.rows.snapshot(self.planes(), self._capacities()),
            "hyper": self.hyperparams.clone(),
            "admission": None if self.admission is None else self.admission.snapshot(),
            "scores": None if self.scores is None else copied(self.scores.state_dict()),
        }

    def _check_snapshot(self, snapshot: Any) -> None:
        """Raise ValueError unless all parts of a snapshot fit this module."""
        parts = dumps.check_entries("the snapshot", snapshot, _SNAPSHOT)
        capacities = self.index.check_snapshot(parts["index"])
        self.rows.check_snapshot(parts["rows"], capacities)
        dumps.check_tensor("hyper", parts["hyper"], self.hyperparams.dtype, self.hyperparams.shape)
        for name, own in (("admission", self.admission), ("scores", self.scores)):
            dumps.check_presence(name, parts[name], own)
        if self.admission is not None:
            self.admission.check_snapshot(parts["admission"])
        if self.scores is not None:
            dumps.check_state("scores", parts["scores"], self.scores.state_dict())

    @atomic
    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Become what `snapshot` was taken of, byte for byte.

        Raises:
            ValueError: it is of tables of other dims, capacities, loads or eviction, of another
                optimizer, precision or admission, or malformed; nothing is changed.
        """
        self._check_snapshot(snapshot)
        with torch.no_grad():
            self.index.restore(snapshot["index"])
            self.rows.restore(self.planes(), snapshot["rows"])
            self.hyperparams.copy_(snapshot["hyper"])
            if self.admission is not None:
                self.admission.restore(snapshot["admission"])
            if self.scores is not None:
                self.scores.load_state_dict(snapshot["scores"])

    @atomic
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        here = self.hyperparams.device
        there = fn(torch.empty(0, device=here)).device
        if here == there:
            return super()._apply(fn, recurse)
        check_device(there)
        self._move(fn, there)
        return self

    def _move(self, fn: Callable[[Tensor], Tensor], there: torch.device) -> None:
        """To another device, with the slots and rows in use."""
        rows = self.rows.snapshot(self.planes(), self._capacities())
        index = HashIndex(self.index.specs, there)
        index.restore(self.index.snapshot())
        index.version = self.index.version + 1
        self.index = index
        # What is reserved and not in use would take memory if it were copied.
        self._set_planes([plane.new_empty(0) for plane in self.planes()])
        self.last = None
        super()._apply(fn)
        self._set_planes(self.rows.allocate(there))
        self.rows.restore(self.planes(), rows)

    def _set_planes(self, planes: Sequence[Tensor]) -> None:
        weights, *states = planes
        if self.weights.dim() == 2:
            dim = self.weights.shape[1]
            weights = weights.view(weights.numel() // dim, dim)
        self.weights.data = weights
        for state, tensor in zip(self.optimizer.states, states, strict=True):
            setattr(self, f"state_{state.name}", tensor)

    @atomic
    def __getstate__(self) -> dict[str, Any]:
        """Rows in use only: copies and pickles are no larger than the tables have grown."""
        state = dict(self.__dict__)
        names = [f"state_{s.name}" for s in self.optimizer.states]
        state["_parameters"] = {**self._parameters, "weights": None}
        state["_buffers"] = {**self._buffers, **dict.fromkeys(names)}
        state["last"] = None  # of the batch at hand
        state["_zeros"] = self._zeros[:0].clone()
        state["_rows_in_use"] = self.rows.snapshot(self.planes(), self._capacities())
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        rows = state.pop("_rows_in_use")
        super().__setstate__(state)
        device = self.hyperparams.device
        self._register_rows(device)
        self.rows.restore(self.planes(), rows)


def check_device(device: torch.device) -> None:
    """Raise ValueError where dynamic tables cannot be."""
    if device.type == "meta":
        raise ValueError("dynamic tables have keys to begin with, so they cannot be on meta")
