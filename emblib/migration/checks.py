"""Old modules against new ones: outputs, one training step, and time on recorded lookups.

Both are copies: `Replaced.sample` makes the old module with the rows and states of now, and
`migrate` makes the new one of a second sample, so that what is compared is what migration does.
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

from emblib.migration.base import Bags, Replaced, TrainingMemory
from emblib.trace import LookupTrace

_CHECKED_ROWS = 64
Migrate = Callable[[nn.Module, Sequence[Any]], Any]


@dataclass(frozen=True)
class Difference:
    """The largest absolute differences between an old and a new module.

    Attributes:
        path: name of the module.
        output: largest difference of the outputs for the same ids.
        rows: largest difference of the rows after a training step; None if nothing trains the
            tables.
    """

    path: str
    output: float
    rows: float | None


@dataclass(frozen=True)
class Times:
    """Seconds per call of the old and the new module, in turn.

    Attributes:
        old_s, new_s: medians.
        ratio: median of the quotients old ÷ new of each turn; above 1, new is faster.
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
    """Times of an old module and of the one in its place, on recorded lookups.

    Attributes:
        path: name of the module.
        lookup_times: times of lookups without gradients.
        step_times: times of lookup, backward and update; None if nothing trains the tables.
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


class _Twins:
    """Samples of an old module and of the one in its place, with optimizers in equal states."""

    def __init__(self, one: Replaced, migrate: Migrate, max_rows: int | None, seed: int) -> None:
        self.one = one
        self.modules: dict[str, nn.ModuleDict] = {}
        self.optimizers: dict[str, list[Any]] = {}
        for which in ("old", "new"):
            module, optimizers = one.sample(max_rows, seed)
            self.modules[which] = nn.ModuleDict({"table": module})
            self.optimizers[which] = optimizers
        migrate(self.modules["new"], self.optimizers["new"])
        self.device = one.rows(self.modules["old"]["table"])[0].device

    def look_up(self, which: str, bags: Sequence[Bags]) -> Tensor:
        """Return the output of a module, without gradients."""
        with torch.no_grad():
            return self.one.call(self.modules[which]["table"], bags)

    def step(self, which: str, bags: Sequence[Bags]) -> Tensor:
        """Make a training step of a module; return its output."""
        for optimizer in self.optimizers[which]:
            optimizer.zero_grad()
        out = self.one.call(self.modules[which]["table"], bags)
        generator = torch.Generator().manual_seed(1)
        out.backward(torch.randn(out.shape, generator=generator).to(out))
        for optimizer in self.optimizers[which]:
            optimizer.step()
        return out.detach()

    def rows(self, which: str) -> list[Tensor]:
        """Return the rows of each table of a module."""
        return self.one.rows(self.modules[which]["table"])


def compare(one: Replaced, migrate: Migrate, seed: int) -> Difference:
    """Return how far two modules are apart, on samples of their rows."""
    twins = _Twins(one, migrate, _CHECKED_ROWS, seed)
    generator = torch.Generator().manual_seed(seed)
    rows, bags = twins.rows("old"), []
    valid: dict[tuple[str, ...], int] = {}  # ids of a feature, which may read several tables
    for names, table in one.features():
        valid[names] = min(len(rows[table]), valid.get(names, len(rows[table])))
    for names, _ in one.features():
        ids = torch.randint(valid[names], (64,), generator=generator)
        bags.append((ids.to(twins.device), torch.full((16,), 4, device=twins.device)))
    call = twins.step if one.is_trained else twins.look_up
    output = _largest([(call("old", bags), call("new", bags))])
    if not one.is_trained:
        return Difference(one.paths[0], output, None)
    pairs = list(zip(twins.rows("old"), twins.rows("new"), strict=True))
    return Difference(one.paths[0], output, _largest(pairs))


def _largest(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    found = [(old.float() - new.float()).abs().max().item() for old, new in pairs if old.numel()]
    return max(found, default=0.0)


def measure(
    one: Replaced, migrate: Migrate, trace: LookupTrace, batch_size: int, rounds: int
) -> Speed | None:
    """Return the times of two modules; None if the trace has no full batch of the module."""
    batches = _batches(trace, one, batch_size)
    if not batches:
        return None
    twins = _Twins(one, migrate, None, 0)

    def times(call: Callable[..., Any]) -> Times:
        taken: dict[str, list[float]] = {"old": [], "new": []}
        for number in range(-2, rounds):  # the first two are not counted
            for which in ("old", "new") if number % 2 else ("new", "old"):
                start = time.perf_counter()
                call(which, batches[number % len(batches)])
                if twins.device.type == "cuda":
                    torch.cuda.synchronize(twins.device)
                if number >= 0:
                    taken[which].append(time.perf_counter() - start)
        ratios = [old / new for old, new in zip(taken["old"], taken["new"], strict=True)]
        quartiles = statistics.quantiles(ratios) if len(ratios) > 1 else ratios * 3
        old_s, new_s = (statistics.median(taken[which]) for which in ("old", "new"))
        return Times(old_s, new_s, statistics.median(ratios), quartiles[0], quartiles[2])

    step = times(twins.step) if one.is_trained else None
    return Speed(one.paths[0], times(twins.look_up), step)


def _batches(trace: LookupTrace, one: Replaced, batch_size: int) -> list[list[Bags]]:
    """Return the full batches that a trace has of all features of a module."""
    names = [feature.name for feature in trace.features]
    device = one.rows(one.old)[0].device
    found: list[list[Bags]] = []
    for known_as, _ in one.features():
        number = next((names.index(name) for name in known_as if name in names), None)
        if number is None:
            return []
        lengths = trace.lengths[number].long()
        starts = pad(lengths.cumsum(0), (1, 0)).tolist()
        bags = []
        for first in range(0, len(lengths) - batch_size + 1, batch_size):
            ids = trace.ids[number][starts[first] : starts[first + batch_size]]
            bags.append((ids.long().to(device), lengths[first : first + batch_size].to(device)))
        found.append(bags)
    return [list(batch) for batch in zip(*found, strict=False)]


def machine(device: torch.device) -> str:
    """Return processor, threads and device, for a measurement."""
    where = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name(device)}, {where}" if device.type == "cuda" else where
