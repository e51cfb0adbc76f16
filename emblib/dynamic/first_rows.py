"""What is in rows that no training has written: first values of new keys, and what others read."""

import torch
from torch import Tensor, nn

from emblib.dynamic.hash_index import Inserted
from emblib.dynamic.lookup import Reads
from emblib.dynamic.rows import RowLayout
from emblib.dynamic_specs import Constant
from emblib.ops import hash as hash_ops
from emblib.ops import initial
from emblib.ops.hash import Keys, tables_of


class FirstRows(nn.Module):
    """Writes the rows of new keys, and says what keys without a row read.

    Args:
        layout: of the rows.
        seed: of their values.
        device: where they are.
    """

    places: Tensor
    rules: Tensor
    missing: Tensor
    unadmitted_places: Tensor
    unadmitted_rules: Tensor

    def __init__(self, layout: RowLayout, seed: int, device: torch.device) -> None:
        super().__init__()
        self.seed = seed
        specs = layout.specs
        reads = [spec.admission.reads if spec.admission else None for spec in specs]
        self._drawn = any(initializer is not None for initializer in reads)
        self._zeros = not self._drawn and all(spec.missing == 0.0 for spec in specs)
        rules = [
            [initial.rule_of(Constant(spec.missing) if x is None else x, spec)]
            for spec, x in zip(specs, reads, strict=True)
        ]
        missing = torch.tensor([spec.missing for spec in specs]).view(-1, 1)
        missing = missing.expand(-1, layout.stride).to(layout.dtypes[0])
        self._stride = layout.stride
        for name, tensor in (
            ("places", layout.initial_layout(device)),
            ("rules", layout.initial_rules(device)),
            ("missing", missing.contiguous().to(device)),
            ("unadmitted_places", layout.beside_layout(0, device)),
            ("unadmitted_rules", torch.tensor(rules, dtype=torch.float64).view(-1, 1, 7)),
        ):
            self.register_buffer(name, tensor.to(device), persistent=False)

    def write_(self, planes: list[Tensor], keys: Keys, inserted: Inserted) -> None:
        """First values into the rows of the keys that found a place."""
        misses, placed = inserted.misses, inserted.placed
        assert misses is not None
        assert placed is not None
        initial.initial_rows_(
            *(planes, self.places, self.rules, keys.ids, misses.first, misses.ends),
            *(placed.slots, self.seed),
        )

    def reads(self, keys: Keys, inserted: Inserted) -> Reads:
        """What the lookups of a batch read."""
        slots = inserted.slots
        if self._zeros or inserted.misses is None:
            return Reads(slots)
        beside = torch.where(slots < 0, tables_of(keys), -1)
        rows = self.missing.view(-1)
        if self._drawn and inserted.placed is not None and slots.numel():
            status, groups = inserted.placed.status, inserted.misses.groups
            waiting = status == hash_ops.NOT_ADMITTED
            rows = torch.cat([rows, self._draw(keys, inserted, waiting)])
            numbers = groups.clamp(min=0).long()
            drawn = (groups >= 0) & waiting[numbers]
            beside = torch.where(drawn, self.missing.size(0) + numbers, beside)
        return Reads(slots.where(slots >= 0, 0), beside.to(torch.int32), rows)

    def searched(self, keys: Keys, slots: Tensor) -> Reads:
        """What the lookups of a batch read that was only searched."""
        if self._zeros:
            return Reads(slots)
        beside = torch.where(slots < 0, tables_of(keys), -1).to(torch.int32)
        return Reads(slots.where(slots >= 0, 0), beside, self.missing.view(-1))

    def _draw(self, keys: Keys, inserted: Inserted, waiting: Tensor) -> Tensor:
        """Rows by miss, those of waiting keys drawn as their tables say."""
        assert inserted.misses is not None
        count = waiting.numel()
        rows = self.missing.new_zeros(count * self._stride)
        places = self.unadmitted_places.clone()
        places[:, :, 2].fill_(count)
        numbers = torch.arange(count, device=rows.device)
        initial.initial_rows_(
            *([rows], places, self.unadmitted_rules, keys.ids, inserted.misses.first),
            *(inserted.misses.ends, torch.where(waiting, numbers, -1), self.seed),
        )
        return rows
