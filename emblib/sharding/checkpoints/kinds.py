"""One table of a sharded collection by its kind: what of it is here, as tensors, and back."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from emblib.collections.configs import Dynamic, TensorTrain
from emblib.collections.grouping import NO_UPDATE
from emblib.collections.groups import TableGroups
from emblib.collections.kernels import PartTables
from emblib.collections.slices import TableSlice
from emblib.collections.states import HYPER
from emblib.ops import lookups
from emblib.optim import Optimizer
from emblib.sharding.boxes import Box, TableSharding
from emblib.sharding.checkpoints import keyed, row_states
from emblib.sharding.checkpoints.entries import Entry
from emblib.sharding.groups_of_ranks import Ranks
from emblib.specs import TTSpec
from emblib.tt import layout_entry


class Held(Protocol):
    """A part of a table that is here: slice `index` of `groups`."""

    table: str
    box: Box
    groups: TableGroups
    index: int


class Tables(Protocol):
    """Tables over ranks: what is used of a sharded collection."""

    ranks: Ranks
    plan: Mapping[str, TableSharding]
    groups: TableGroups

    def parts(self) -> Sequence[Held]:
        """What is here."""

    def kept_as(self, table: str) -> Any:
        """The configuration of a table as it is kept."""


class Table:
    """A table of a collection, and what of it is here."""

    parameter_keys: tuple[str, ...] = ("weight",)

    def __init__(self, tables: Tables, name: str, held: Sequence[Held]) -> None:
        self.ranks, self.name = tables.ranks, name
        self.config, self.sharding = tables.kept_as(name), tables.plan[name]
        self.optimizer: Optimizer = self.config.optimizer or tables.groups.optimizer or NO_UPDATE
        self.is_fused = lookups.is_fused(self.optimizer)
        self.held = {0 if not self.boxes else self.boxes.index(p.box): p for p in held}

    @property
    def boxes(self) -> tuple[Box, ...]:
        """Of the table; none where every rank has a copy."""
        return self.sharding.boxes

    def kernels(self) -> list[Any]:
        """The modules that have its parts."""
        return [part.groups.module_of(part.index)[0] for part in self.held.values()]

    def fused_parameters(self) -> dict[str, Any]:
        """Of the first part that is here."""
        first = next(iter(self.held.values()), None)
        return {} if first is None else first.groups.handles[first.index].fused_parameters()

    @property
    def numbers(self) -> Entry:
        """Of the optimizer, which every rank with a part has."""
        size = (self.optimizer.hyper().numel(),)
        return self._shared(size, torch.float64, [kernel.hyper for kernel in self.kernels()])

    def _shared(self, size: tuple[int, ...], dtype: torch.dtype, memory: list[Tensor]) -> Entry:
        """What every rank with a part has whole."""
        columns = (0, size[1] if len(size) > 1 else 1)
        boxes = tuple(Box(rank, (0, size[0]), columns) for rank in self.sharding.ranks)
        mine = {i for i, box in enumerate(boxes) if box.rank == self.ranks.rank} or {0}
        return Entry(size, dtype, boxes, self.ranks, dict.fromkeys(mine, memory) if memory else {})

    def parameters(self) -> dict[str, Tensor]:
        """What the state dict of the collection has of it."""
        return {key: entry.tensor() for key, entry in self.entries(self.parameter_names()).items()}

    def parameter_names(self) -> Sequence[str]:
        """Their names."""
        return self.parameter_keys

    def check_parameters(self, given: Mapping[str, Tensor]) -> None:
        """Raise ValueError for parameters of another table, before those of any are written."""

    def set_parameters(self, given: Mapping[str, Tensor]) -> None:
        """Write those that are given."""
        self._write([key for key in self.parameter_names() if key in given], given)

    def states(self) -> dict[str, dict[str, Tensor]]:
        """States of the optimizer by parameter; none where it is not fused."""
        if not self.is_fused:
            return {}
        hyper = self.numbers.tensor().clone()
        return {
            parameter: {
                **{
                    state: entry.tensor()
                    for state, entry in zip(names, self.entries(keys).values(), strict=True)
                },
                HYPER: hyper,
            }
            for parameter, names, keys in self._states_by_parameter()
        }

    def set_states(self, parameter: str, given: Mapping[str, Tensor]) -> None:
        """Write those of a parameter, without the numbers."""
        for of, names, keys in self._states_by_parameter():
            if of == parameter:
                missing = sorted(set(names) - given.keys())
                if missing:
                    raise KeyError(f"the state of {self.name}.{parameter} lacks {missing}")
                self._write(keys, {k: given[n] for n, k in zip(names, keys, strict=True)})

    def fused_names(self) -> list[str]:
        """The parameters that have states and numbers."""
        return [parameter for parameter, *_ in self._states_by_parameter()]

    def _states_by_parameter(self) -> Iterator[tuple[str, list[str], list[str]]]:
        """Parameter, names of its states, and what the views call them."""
        names = [state.name for state in self.optimizer.states]
        yield "weight", names, names

    def _write(self, keys: Sequence[str], given: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            entries = self.entries(keys)
            parts = {k: e.parts_of(given[k], f"{self.name}.{k}") for k, e in entries.items()}
            for key, entry in entries.items():
                entry.write(parts[key])
        for kernel in self.kernels():
            if isinstance(kernel, PartTables):
                with kernel._writing():
                    pass  # a store on disk commits what was written

    def entries(self, keys: Sequence[str]) -> dict[str, Entry]:
        """How these tensors are cut, and their memory."""
        views = {i: part.groups.views(part.index) for i, part in self.held.items()}
        return {key: self._entry(key, {i: v[key] for i, v in views.items()}) for key in keys}

    def _entry(self, key: str, memory: Mapping[int, Tensor]) -> Entry:
        raise NotImplementedError

    def _in_boxes(
        self, size: tuple[int, int], boxes: tuple[Box, ...], key: str, memory: Mapping[int, Tensor]
    ) -> Entry:
        """What lies in boxes of `size`: elements, or a number a row."""
        tensors = {i: [tensor] for i, tensor in memory.items()}
        per_row = {state.name for state in self.optimizer.states if state.per_row}
        dtype = self.config.data_type if key in self.parameter_keys else torch.float32
        if key.split(".")[0] not in per_row:
            return Entry(size, dtype, boxes, self.ranks, tensors)
        cuts = row_states.cuts_of(boxes)
        if len(cuts) <= 2:
            narrow = tuple(box._replace(columns=(0, 1)) for box in boxes)
            return Entry(size[:1], dtype, narrow, self.ranks, tensors)
        by_stretch = tuple(
            box._replace(columns=row_states.stretches(box.columns, cuts)) for box in boxes
        )
        return Entry((size[0], len(cuts) - 1), dtype, by_stretch, self.ranks, tensors, cuts)


class PlainTable(Table):
    """Rows as they are."""

    def _entry(self, key: str, memory: Mapping[int, Tensor]) -> Entry:
        size = (self.config.num_embeddings, self.config.embedding_dim)
        return self._in_boxes(size, self.boxes, key, memory)


class TensorTrainTable(Table):
    """Cores: the first in slices, the others whole on every rank with a part."""

    def __init__(self, tables: Tables, name: str, held: Sequence[Held]) -> None:
        super().__init__(tables, name, held)
        spec = TableSlice.whole(self.config).spec
        assert isinstance(spec, TTSpec)
        ranks = spec.full_ranks
        widths = [r * q * s for r, q, s in zip(ranks, spec.dim_factors, ranks[1:], strict=False)]
        self._sizes = list(zip(spec.row_factors, widths, strict=True))
        self._units = math.prod(spec.row_factors[1:]), math.prod(spec.dim_factors[1:])
        self._rank = spec.ranks[0]
        self._layout = layout_entry.entry(spec)
        self.parameter_keys = tuple(f"cores.{k}" for k in range(len(self._sizes)))

    def parameters(self) -> dict[str, Tensor]:
        """The cores, and which tensor train they are of."""
        return {layout_entry.NAME: self._layout.clone(), **super().parameters()}

    def check_parameters(self, given: Mapping[str, Tensor]) -> None:
        """Raise ValueError for cores of another tensor train."""
        if not given.keys().isdisjoint(self.parameter_keys):
            problem = layout_entry.difference(given.get(layout_entry.NAME), self._layout)
            if problem:
                raise ValueError(f"{self.name}.cores: {problem}")

    def _states_by_parameter(self) -> Iterator[tuple[str, list[str], list[str]]]:
        names = [state.name for state in self.optimizer.states]
        for k, core in enumerate(self.parameter_keys):
            yield core, names, [f"{name}.{k}" for name in names]

    def _entry(self, key: str, memory: Mapping[int, Tensor]) -> Entry:
        name, k = key.rsplit(".", 1)
        size = self._sizes[int(k)]
        if int(k) == 0:
            return self._in_boxes(size, tuple(map(self._core_box, self.boxes)), key, memory)
        per_row = any(state.name == name and state.per_row for state in self.optimizer.states)
        return self._shared(size[:1] if per_row else size, torch.float32, list(memory.values()))

    def _core_box(self, box: Box) -> Box:
        """Where the slice of a box is in the first core `[p, q * rank]`."""
        height, width = self._units
        rows = box.rows[0] // height, -(-box.rows[1] // height)
        columns = box.columns[0] // width, -(-box.columns[1] // width)
        # The factors may make more rows than the table has; the last slice has them.
        last = box.rows[1] == self.config.num_embeddings
        rows = (rows[0], self._sizes[0][0]) if last else rows
        return Box(box.rank, rows, (columns[0] * self._rank, columns[1] * self._rank))


class DynamicTable(Table):
    """Entries by key, part k of K with the keys that it owns; states of the optimizer with them."""

    def _numbered(self) -> dict[int, Any]:
        """The handles of the parts that are here, by number; parts are numbered by rows."""
        order = sorted(range(len(self.boxes)), key=lambda i: self.boxes[i].rows)
        return {
            order.index(i) if self.boxes else 0: part.groups.handles[part.index]
            for i, part in self.held.items()
        }

    def _owners(self) -> list[int]:
        return [box.rank for box in sorted(self.boxes, key=lambda box: box.rows)]

    def parameters(self) -> dict[str, Tensor]:
        """Rows by key over all ranks; of other tensors the largest values of all parts."""
        states = {number: dict(h.state_dict()) for number, h in self._numbered().items()}
        if not self.boxes:
            return states[0]
        return keyed.joined(states, self._owners(), self.ranks)

    def parameter_names(self) -> Sequence[str]:
        """Those without which it cannot be loaded."""
        return ("keys", "weight")

    def set_parameters(self, given: Mapping[str, Tensor]) -> None:
        """Every part takes what it owns."""
        if not {"keys", "weight"} <= given.keys():
            return
        for number, handle in self._numbered().items():
            count = max(len(self.boxes), 1)
            handle.load_state_dict(keyed.part_of(given, number, count))

    def _states_by_parameter(self) -> Iterator[tuple[str, list[str], list[str]]]:
        yield "weight", [], []

    def _entry(self, key: str, memory: Mapping[int, Tensor]) -> Entry:
        raise AssertionError(key)


KINDS = {TensorTrain: TensorTrainTable, Dynamic: DynamicTable}
