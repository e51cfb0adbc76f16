"""Compare old and new modules: outputs, one training step, and time on recorded lookups.

The compared modules are copies: `Replaced.sample` copies the old module twice, with its current
rows and states, and `migrate` migrates the second copy. So a comparison includes the migration.
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

_CHECKED_ROWS = 64  # rows per table in copies whose outputs are compared
_CHECKED_BAGS, _IDS_PER_BAG = 16, 4  # per feature of the batch that both copies look up
_WARM_UP_ROUNDS = 2  # first rounds, which are not timed
Migrate = Callable[[nn.Module, Sequence[Any]], Any]
"""Function that migrates the tables in a module, and its optimizers, in place."""


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
    """Times per call of the old and the new module, which were called alternately.

    Attributes:
        old_s, new_s: medians in seconds.
        ratio: median of old ÷ new over pairs of calls; above 1, the new module is faster.
        low, high: first and third quartile of old ÷ new over pairs of calls.
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
        """Return the time of a lookup in the old module ÷ in the new module."""
        return self.lookup_times.ratio

    @property
    def step(self) -> float | None:
        """Return the time of a training step of the old module ÷ of the new module, or None."""
        return None if self.step_times is None else self.step_times.ratio


@dataclass(frozen=True)
class MigrationCost:
    """Memory and time of training before and after a migration; print it.

    Attributes:
        before: bytes of the old modules in training.
        after: bytes of the new modules in training.
        speeds: times per module, measured on recorded lookups.
        machine: architecture, threads and device of the measurement.
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


class _Copies:
    """Two copies of an old module, with optimizers in equal states: "old", and "new", migrated.

    Args:
        replaced: the old module and its features.
        migrate: function that migrates the copy "new".
        max_rows: number of rows per table, see `Replaced.sample`; None copies all.
        seed: seed of the selection of rows.
    """

    def __init__(
        self, replaced: Replaced, migrate: Migrate, max_rows: int | None, seed: int
    ) -> None:
        self.replaced = replaced
        self.modules: dict[str, nn.ModuleDict] = {}
        self.optimizers: dict[str, list[Any]] = {}
        for name in ("old", "new"):
            module, optimizers = replaced.sample(max_rows, seed)
            self.modules[name] = nn.ModuleDict({"table": module})
            self.optimizers[name] = optimizers
        migrate(self.modules["new"], self.optimizers["new"])
        self.device = replaced.rows(self.modules["old"]["table"])[0].device

    @without_gradients
    def look_up(self, name: str, bags: Sequence[Bags]) -> Tensor:
        """Return the output of the copy `name` for a batch, without gradients."""
        return self.replaced.call(self.modules[name]["table"], bags)

    def step(self, name: str, bags: Sequence[Bags]) -> Tensor:
        """Make a training step of the copy `name`, always with one gradient; return its output."""
        for optimizer in self.optimizers[name]:
            optimizer.zero_grad()
        output = self.replaced.call(self.modules[name]["table"], bags)
        generator = torch.Generator().manual_seed(1)
        output.backward(torch.randn(output.shape, generator=generator, device="cpu").to(output))
        for optimizer in self.optimizers[name]:
            optimizer.step()
        return output.detach()

    def rows(self, name: str) -> list[Tensor]:
        """Return the rows of each table of the copy `name`."""
        return self.replaced.rows(self.modules[name]["table"])


def compare(replaced: Replaced, migrate: Migrate, seed: int) -> Difference:
    """Return the largest differences between the old and the new module, on a sample of rows.

    If the old module was trained, its training step is compared, else its lookup. `seed` selects
    the rows and the ids.
    """
    copies = _Copies(replaced, migrate, _CHECKED_ROWS, seed)
    generator = torch.Generator().manual_seed(seed)
    table_rows, bags = copies.rows("old"), []
    # Ids must be rows of each table that the feature reads, so the smallest table counts.
    num_ids: dict[tuple[str, ...], int] = {}
    for names, table in replaced.features():
        num_ids[names] = min(len(table_rows[table]), num_ids.get(names, len(table_rows[table])))
    for names, _ in replaced.features():
        num_lookups = _CHECKED_BAGS * _IDS_PER_BAG
        ids = torch.randint(num_ids[names], (num_lookups,), generator=generator, device="cpu")
        lengths = torch.full((_CHECKED_BAGS,), _IDS_PER_BAG, device=copies.device)
        bags.append((ids.to(copies.device), lengths))
    call = copies.step if replaced.is_trained else copies.look_up
    output_difference = _max_difference([(call("old", bags), call("new", bags))])
    if not replaced.is_trained:
        return Difference(replaced.paths[0], output_difference, None)
    row_pairs = list(zip(copies.rows("old"), copies.rows("new"), strict=True))
    return Difference(replaced.paths[0], output_difference, _max_difference(row_pairs))


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

    Training steps are timed if the old module was trained, then lookups. In each of `rounds` timed
    rounds both modules are called once; they take turns in being called first. `batch_size` is the
    number of bags per feature of a batch.
    """
    batches = _full_batches(trace, replaced, batch_size)
    if not batches:
        return None
    copies = _Copies(replaced, migrate, None, 0)

    def time_alternately(call: Callable[[str, Sequence[Bags]], Tensor]) -> Times:
        seconds: dict[str, list[float]] = {"old": [], "new": []}
        for round_index in range(-_WARM_UP_ROUNDS, rounds):
            for name in ("old", "new") if round_index % 2 else ("new", "old"):
                start_s = time.perf_counter()
                call(name, batches[round_index % len(batches)])
                if copies.device.type == "cuda":
                    torch.cuda.synchronize(copies.device)
                if round_index >= 0:
                    seconds[name].append(time.perf_counter() - start_s)
        ratios = [old / new for old, new in zip(seconds["old"], seconds["new"], strict=True)]
        quartiles = statistics.quantiles(ratios) if len(ratios) > 1 else ratios * 3
        old_s, new_s = (statistics.median(seconds[name]) for name in ("old", "new"))
        return Times(old_s, new_s, statistics.median(ratios), quartiles[0], quartiles[2])

    step_times = time_alternately(copies.step) if replaced.is_trained else None
    return Speed(replaced.paths[0], time_alternately(copies.look_up), step_times)


def _full_batches(trace: LookupTrace, replaced: Replaced, batch_size: int) -> list[list[Bags]]:
    """Return the full batches of a trace for all features of a module, on its device.

    Return [] if the trace lacks a feature of the module.
    """
    traced_names = [feature.name for feature in trace.features]
    device = replaced.rows(replaced.old)[0].device
    bags_by_feature: list[list[Bags]] = []
    for names_in_trace, _ in replaced.features():
        feature_index = next(
            (traced_names.index(name) for name in names_in_trace if name in traced_names), None
        )
        if feature_index is None:
            return []
        lengths = trace.lengths[feature_index].long()
        first_ids = pad(lengths.cumsum(0), (1, 0)).tolist()
        bags = []
        for bag in range(0, len(lengths) - batch_size + 1, batch_size):
            ids = trace.ids[feature_index][first_ids[bag] : first_ids[bag + batch_size]]
            bags.append((ids.long().to(device), lengths[bag : bag + batch_size].to(device)))
        bags_by_feature.append(bags)
    return [list(batch) for batch in zip(*bags_by_feature, strict=False)]


def describe_machine(device: torch.device) -> str:
    """Return architecture, number of threads and device of a measurement as text."""
    cpu = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return f"{torch.cuda.get_device_name(device)}, {cpu}" if device.type == "cuda" else cpu
