"""Compare old and new modules: outputs, one training step, and time on recorded lookups.

Both are copies. `Replaced.sample` copies the old module with its current rows and states, twice;
`migrate` then migrates the second copy, so the comparison includes the migration itself.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from emblib.grad_mode import without_gradients
from emblib.migration.base import Bags, Replaced, TrainingMemory
from emblib.trace import LookupTrace

_CHECKED_ROWS = 64  # rows per table in copies that are compared
_CHECKED_BAGS, _IDS_PER_BAG = 16, 4  # the batch that both look up, per feature
_WARM_UP_ROUNDS = 2  # rounds that are called, but not timed
Migrate = Callable[[nn.Module, Sequence[Any]], Any]
"""Function that migrates a module and its optimizers in place, see `migrate`."""


@dataclass(frozen=True)
class Difference:
    """The largest absolute differences between an old and a new module.

    Attributes:
        path: name of the module.
        output: largest difference of the outputs for the same ids.
        rows: largest difference of the rows after a training step; None if nothing trained the
            old module.
    """

    path: str
    output: float
    rows: float | None


@dataclass(frozen=True)
class Times:
    """Seconds per call of the old and the new module, which were called alternately.

    Attributes:
        old_s, new_s: medians.
        ratio: median of old ÷ new per pair of calls; above 1, the new module is faster.
        low, high: quartiles of these quotients.
    """

    old_s: float
    new_s: float
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return (
            f"{1e6 * self.old_s:.0f} -> {1e6 * self.new_s:.0f} us, {self.ratio:.2f} times as fast "
            f"({self.low:.2f} to {self.high:.2f})"
        )


@dataclass(frozen=True)
class Speed:
    """Times of an old and a new module, on recorded lookups.

    Attributes:
        path: name of the module.
        lookup_times: times of lookups without gradients.
        step_times: times of lookup, backward and update; None if nothing trained the old module.
    """

    path: str
    lookup_times: Times
    step_times: Times | None

    @property
    def lookup(self) -> float:
        """Return the old module's time ÷ the new one's, of a lookup."""
        return self.lookup_times.ratio

    @property
    def step(self) -> float | None:
        """Return the old module's time ÷ the new one's, of a training step."""
        return None if self.step_times is None else self.step_times.ratio


@dataclass(frozen=True)
class MigrationCost:
    """Memory and time of training before and after a migration; print it.

    Attributes:
        before: bytes of the old modules in training.
        after: bytes of the new modules in training.
        speeds: times per module, measured on recorded lookups.
        machine: processor, threads and device of the measurement.
    """

    before: TrainingMemory
    after: TrainingMemory
    speeds: tuple[Speed, ...]
    machine: str

    def __str__(self) -> str:
        lines = [f"memory: {self.before} -> {self.after}", f"measured on {self.machine}"]
        for speed in self.speeds:
            lines.append(f"  {speed.path}: lookup {speed.lookup_times}")
            if speed.step_times is not None:
                lines.append(f"  {speed.path}: training step {speed.step_times}")
        return "\n".join(lines)


class _OldAndNew:
    """Two copies of an old module, of which "new" is migrated, with optimizers in equal states.

    Args:
        replaced: the swapped module.
        migrate: function that migrates one copy.
        max_rows: number of rows per table, see `Replaced.sample`; None copies all.
        seed: seed of the selection of rows.
    """

    def __init__(
        self, replaced: Replaced, migrate: Migrate, max_rows: int | None, seed: int
    ) -> None:
        self.replaced = replaced
        self.modules: dict[str, nn.ModuleDict] = {}
        self.optimizers: dict[str, list[Any]] = {}
        for side in ("old", "new"):
            module, optimizers = replaced.sample(max_rows, seed)
            self.modules[side] = nn.ModuleDict({"table": module})
            self.optimizers[side] = optimizers
        migrate(self.modules["new"], self.optimizers["new"])
        self.device = replaced.rows(self.modules["old"]["table"])[0].device

    @without_gradients
    def look_up(self, side: str, bags: Sequence[Bags]) -> Tensor:
        """Return the output of a module, without gradients."""
        return self.replaced.call(self.modules[side]["table"], bags)

    def step(self, side: str, bags: Sequence[Bags]) -> Tensor:
        """Make a training step of a module; return its output."""
        for optimizer in self.optimizers[side]:
            optimizer.zero_grad()
        out = self.replaced.call(self.modules[side]["table"], bags)
        generator = torch.Generator().manual_seed(1)
        out.backward(torch.randn(out.shape, generator=generator).to(out))
        for optimizer in self.optimizers[side]:
            optimizer.step()
        return out.detach()

    def rows(self, side: str) -> list[Tensor]:
        """Return the rows of each table of a module."""
        return self.replaced.rows(self.modules[side]["table"])


def compare(replaced: Replaced, migrate: Migrate, seed: int) -> Difference:
    """Return the largest differences between the two modules, on samples of their rows.

    A training step is compared if the old module was trained, else a lookup.
    """
    copies = _OldAndNew(replaced, migrate, _CHECKED_ROWS, seed)
    generator = torch.Generator().manual_seed(seed)
    rows, bags = copies.rows("old"), []
    num_ids: dict[tuple[str, ...], int] = {}  # the least, since a feature may read several tables
    for names, table in replaced.features():
        num_ids[names] = min(len(rows[table]), num_ids.get(names, len(rows[table])))
    for names, _ in replaced.features():
        num_lookups = _CHECKED_BAGS * _IDS_PER_BAG
        ids = torch.randint(num_ids[names], (num_lookups,), generator=generator)
        lengths = torch.full((_CHECKED_BAGS,), _IDS_PER_BAG, device=copies.device)
        bags.append((ids.to(copies.device), lengths))
    call = copies.step if replaced.is_trained else copies.look_up
    output = _max_difference([(call("old", bags), call("new", bags))])
    if not replaced.is_trained:
        return Difference(replaced.paths[0], output, None)
    pairs = list(zip(copies.rows("old"), copies.rows("new"), strict=True))
    return Difference(replaced.paths[0], output, _max_difference(pairs))


def _max_difference(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Return the maximum absolute difference over pairs of tensors; 0 without elements."""
    differences = [
        (old.float() - new.float()).abs().max().item() for old, new in pairs if old.numel()
    ]
    return max(differences, default=0.0)


def time_modules(
    replaced: Replaced, migrate: Migrate, trace: LookupTrace, batch_size: int, rounds: int
) -> Speed | None:
    """Time the old and the new module; return None if the trace has no full batch of the module.

    `rounds` is the number of timed lookups of each, and of timed training steps. The modules are
    called in turn, and begin in turn.
    """
    batches = _full_batches(trace, replaced, batch_size)
    if not batches:
        return None
    copies = _OldAndNew(replaced, migrate, None, 0)

    def time_alternately(call: Callable[..., Any]) -> Times:
        seconds: dict[str, list[float]] = {"old": [], "new": []}
        for round_index in range(-_WARM_UP_ROUNDS, rounds):
            for side in ("old", "new") if round_index % 2 else ("new", "old"):
                start = time.perf_counter()
                call(side, batches[round_index % len(batches)])
                if copies.device.type == "cuda":
                    torch.cuda.synchronize(copies.device)
                if round_index >= 0:
                    seconds[side].append(time.perf_counter() - start)
        ratios = [old / new for old, new in zip(seconds["old"], seconds["new"], strict=True)]
        quartiles = statistics.quantiles(ratios) if len(ratios) > 1 else ratios * 3
        old_s, new_s = (statistics.median(seconds[side]) for side in ("old", "new"))
        return Times(old_s, new_s, statistics.median(ratios), quartiles[0], quartiles[2])

    step_times = time_alternately(copies.step) if replaced.is_trained else None
    return Speed(replaced.paths[0], time_alternately(copies.look_up), step_times)


def _full_batches(trace: LookupTrace, replaced: Replaced, batch_size: int) -> list[list[Bags]]:
    """Return the full batches of a trace, for all features of a module; [] if one is missing."""
    names = [feature.name for feature in trace.features]
    device = replaced.rows(replaced.old)[0].device
    bags_by_feature: list[list[Bags]] = []
    for names_in_trace, _ in replaced.features():
        feature_index = next((names.index(name) for name in names_in_trace if name in names), None)
        if feature_index is None:
            return []
        lengths = trace.lengths[feature_index].long()
        starts = pad(lengths.cumsum(0), (1, 0)).tolist()
        bags = []
        for begin in range(0, len(lengths) - batch_size + 1, batch_size):
            ids = trace.ids[feature_index][starts[begin] : starts[begin + batch_size]]
            bags.append((ids.long().to(device), lengths[begin : begin + batch_size].to(device)))
        bags_by_feature.append(bags)
    return [list(batch) for batch in zip(*bags_by_feature, strict=False)]


def describe_machine(device: torch.device) -> str:
    """Describe processor, threads and device of a measurement."""
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name(device)}, {cpu}" if device.type == "cuda" else cpu
