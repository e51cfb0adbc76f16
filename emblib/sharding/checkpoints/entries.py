"""One tensor of a table: how it is cut into boxes, and the memory of those that are here."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from emblib.sharding.boxes import Box
from emblib.sharding.checkpoints.sharded_table import RowStates, ShardedTable
from emblib.sharding.groups_of_ranks import Ranks


@dataclass
class Entry:
    """One tensor of a table: how it is cut, and the memory of the boxes that are here.

    `memory` has, by number in `boxes`, the tensors of a box: several where slices share one.
    Without boxes every rank has the whole, which is number 0 then.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    ranks: Ranks
    memory: dict[int, list[Tensor]] = field(default_factory=dict)
    cuts: tuple[int, ...] | None = None

    def tensor(self) -> Tensor:
        """Views of the memory, or copies of row states that are cut by columns."""
        if not self.boxes:
            return self.memory[0][0]
        parts = {i: tensors[0] for i, tensors in self.memory.items()}
        if self.cuts is None:
            return ShardedTable(self.size, self.boxes, parts, self.ranks, self.dtype)
        parts = {
            i: part.view(-1, 1).expand(self.boxes[i].shape).contiguous()
            for i, part in parts.items()
        }
        states = RowStates(self.size, self.boxes, parts, self.ranks, self.dtype)
        states.cuts = self.cuts
        return states

    def parts_of(self, value: Tensor, name: str) -> dict[int, Tensor]:
        """What of `value` goes to each box that is here: of what `tensor` gives, or of the whole.

        Raises:
            ValueError: it is of another size, or cut in another way.
        """
        return {i: self._part(value, i, name) for i in self.memory}

    def write(self, parts: Mapping[int, Tensor]) -> None:
        """Into the memory of the boxes, what `parts_of` gave."""
        for i, part in parts.items():
            for tensor in self.memory[i]:
                if tensor.data_ptr() != part.data_ptr():
                    tensor.copy_(part)

    def _part(self, value: Tensor, number: int, name: str) -> Tensor:
        size = self.size[:1] if self.cuts else self.size
        if isinstance(value, ShardedTable):
            if value.boxes != self.boxes or tuple(value.size()) != self.size:
                raise ValueError(
                    f"{name} is {value!r}, but its boxes here are {list(self.boxes)} of "
                    f"{self.size}: load it with emblib.sharding.checkpoints.load"
                )
            part = value.parts[number]
            return part[:, 0] if self.cuts else part
        if tuple(value.shape) != size:
            raise ValueError(f"{name} must be of shape {size}, got {tuple(value.shape)}")
        if not self.boxes:
            return value
        box = self.boxes[number]
        rows = value[slice(*box.rows)]
        return rows if self.cuts or value.dim() == 1 else rows[:, slice(*box.columns)]
