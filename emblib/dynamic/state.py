"""The state of a module of dynamic tables: index and rows, and how they move and are copied."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from emblib.dynamic.hash_index import HashIndex, ValueRows
from emblib.dynamic.key_questions import KeyQuestions, copied
from emblib.dynamic.keys import as_keys
from emblib.dynamic.lookup import Reads, Step
from emblib.dynamic.rows import RowLayout
from emblib.dynamic.saving import snapshots
from emblib.dynamic_specs import DynamicSpec
from emblib.ops.hash import Keys
from emblib.specs import Precision
from emblib.tables.features import FeatureTables
from emblib.tables.locks import atomic

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
        return Step(self._lock, self.index, keys, slots, reads, self.lost)

    lost: Tensor
    """Positions whose key had left between their forward and their backward, so far."""

    def _register_rows(self, device: torch.device) -> None:
        """Room for the rows of all tables, of which nothing is written yet."""
        weights, *states = self.rows.allocate(device)
        self._register_planes(weights, states, persistent=False)
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
        return Keys.of(as_keys(ids).to(self.hyper.device), self.table_number(table))

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
            "hyper": self.hyper.clone(),
            "admission": None if self.admission is None else self.admission.snapshot(),
            "scores": None if self.scores is None else copied(self.scores.state_dict()),
        }

    def _check_snapshot(self, snapshot: Any) -> None:
        """Raise ValueError unless all parts of a snapshot fit this module."""
        parts = snapshots.check_entries("the snapshot", snapshot, _SNAPSHOT)
        capacities = self.index.check_snapshot(parts["index"])
        self.rows.check_snapshot(parts["rows"], capacities)
        snapshots.check_tensor("hyper", parts["hyper"], self.hyper.dtype, self.hyper.shape)
        for name, own in (("admission", self.admission), ("scores", self.scores)):
            snapshots.check_presence(name, parts[name], own)
        if self.admission is not None:
            self.admission.check_snapshot(parts["admission"])
        if self.scores is not None:
            snapshots.check_state("scores", parts["scores"], self.scores.state_dict())

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
            self.hyper.copy_(snapshot["hyper"])
            if self.admission is not None:
                self.admission.restore(snapshot["admission"])
            if self.scores is not None:
                self.scores.load_state_dict(snapshot["scores"])

    @atomic
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        here = self.hyper.device
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
        device = self.hyper.device
        self._register_rows(device)
        self.rows.restore(self.planes(), rows)


def check_device(device: torch.device) -> None:
    """Raise ValueError where dynamic tables cannot be."""
    if device.type == "meta":
        raise ValueError("dynamic tables have keys to begin with, so they cannot be on meta")
