"""The context of a part of the benchmarks: device, sizes, time; and the figures it measures."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.machine import environment
from tests.bench.gpu.watch import POOL, Call, Times, Watch, race

MEMORY_SHARE = 0.8  # bytes of the tables of a point ÷ free memory, at most


@dataclass
class Bench:
    """A part of the benchmarks.

    Attributes:
        part: name of the part.
        device: device of the tables.
        tiny: whether sizes are tiny, to see that the code works.
        seconds: time after which no further point begins.
        rounds: maximum number of rounds of a race.
        figures: measured values by their names in aims.yaml.
        rows: rows of the part's table.
        notes: remarks above the table.
        began: time.monotonic() at the beginning.
    """

    part: str
    device: torch.device
    tiny: bool = False
    seconds: float = 60.0
    rounds: int = 15
    figures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.watch = Watch(self.device)
        self.environment = environment.environment_content(
            self.device, sys.argv[1:], program="tests.bench.gpu"
        )

    def left(self) -> float:
        """Return the remaining seconds of the part."""
        return self.seconds - (time.monotonic() - self.began)

    def size(self, number: int, tiny: int) -> int:
        """Return a size, or the tiny one where only the code is tried."""
        return tiny if self.tiny else number

    def fit_rows(self, rows: int, bytes_per_row: float) -> int:
        """Return as many rows as fit into the free memory, with a note where those are fewer."""
        if self.device.type != "cuda" or self.tiny:
            return rows
        free, _ = torch.cuda.mem_get_info(self.device)
        max_rows = int(MEMORY_SHARE * free / bytes_per_row)
        if max_rows < rows:
            self.notes.append(f"tables of {rows:,} rows have {max_rows:,}: there is no more memory")
        return min(rows, max_rows)

    def race(self, calls: dict[str, Call], *, share: float = 0.2) -> dict[str, Times]:
        """Time calls for at most a share of the time that is left."""
        rounds = 3 if self.tiny else self.rounds
        return race(self.watch, calls, rounds, share * max(0.0, self.left()))

    def figure(self, name: str, value: float | None) -> None:
        """Store a figure by its name in aims.yaml; ignore None."""
        if value is not None:
            self.figures[name] = value

    def row(self, **values: Any) -> None:
        """Store and print a row of the part's table."""
        self.rows.append(values)
        print(
            " · ".join(f"{k} {_shown(v)}" for k, v in values.items() if v is not None), flush=True
        )

    def attempt(self, what: str, work: Callable[[], object]) -> None:
        """Measure a point; a failure becomes a row, a point without remaining time a note."""
        if self.left() <= 0:
            self.notes.append(f"{what}: not reached, the part's time was up")
            return
        try:
            work()
        except Exception as error:
            traceback.print_exc(limit=4)
            words = str(error).strip().partition("\n")[0]
            self.row(point=what, status=f"{type(error).__name__}: {words}"[:200])
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def write(self, folder: Path) -> None:
        """Write PART.json and PART.md."""
        folder.mkdir(parents=True, exist_ok=True)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        content = {
            "part": self.part,
            "device": name,
            "torch": torch.__version__,
            "tiny": self.tiny,
            "load": os.getloadavg(),
            "environment": self.environment,
            "figures": self.figures,
            "notes": self.notes,
            "rows": self.rows,
        }
        (folder / f"{self.part}.json").write_text(json.dumps(content, indent=1, default=str) + "\n")
        (folder / f"{self.part}.md").write_text(self.markdown(name))

    def markdown(self, device: str) -> str:
        """Return the page of the part."""
        lines = [f"# {self.part} on {device}", ""]
        if self.tiny:
            lines += ["Tiny sizes: these numbers mean nothing.", ""]
        lines += [f"- {note}" for note in self.notes] + [""] * bool(self.notes)
        heads = list(dict.fromkeys(key for row in self.rows for key in row))
        if heads:
            lines += [f"| {' | '.join(heads)} |", "| --- |" + " ---: |" * (len(heads) - 1)]
            lines += [
                f"| {' | '.join(_shown(row.get(head)) for head in heads)} |" for row in self.rows
            ]
        return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


@dataclass(frozen=True)
class Shape:
    """Tables of equal size and a batch of lookups; ids are uniform, or `zipf` is their exponent.

    `batch` is bags per table, `length` lookups per bag.
    """

    tables: int
    rows: int
    dim: int
    batch: int
    length: int = 1
    zipf: float | None = None

    @property
    def name(self) -> str:
        """Return e.g. `T26 D64 B65536 L1`."""
        skew = f" s{self.zipf:g}" if self.zipf else ""
        return f"T{self.tables} D{self.dim} B{self.batch} L{self.length}{skew}"

    @property
    def lookups(self) -> int:
        """Return the lookups of a batch."""
        return self.tables * self.batch * self.length

    def batches(self, device: torch.device, count: int = POOL) -> list[tuple[Tensor, Tensor]]:
        """Draw `count` batches: ids `[lookups]` and offsets `[tables * batch + 1]`, int64."""
        offsets = torch.arange(0, self.lookups + 1, self.length, device=device)
        return [(self._ids(device, seed), offsets) for seed in range(count)]

    def _ids(self, device: torch.device, seed: int) -> Tensor:
        generator = torch.Generator(device=device).manual_seed(seed + 1)
        size = (self.lookups,)
        if self.zipf is None:
            return torch.randint(self.rows, size, device=device, generator=generator)
        # A bounded power law by the inverse of its distribution; ids scattered over the rows.
        u = torch.rand(size, device=device, dtype=torch.float64, generator=generator)
        power = 1 - self.zipf
        ranks = (((self.rows**power - 1) * u + 1) ** (1 / power)).long()
        return ranks * 2654435761 % self.rows

    def gradient(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a gradient of the output, `[batch, tables * dim]`."""
        generator = torch.Generator(device=device).manual_seed(0)
        size = (self.batch, self.tables * self.dim)
        return torch.randn(size, device=device, generator=generator).to(dtype) * 1e-3

    def small(self) -> Shape:
        """Return the shape at a tiny size."""
        return Shape(
            min(self.tables, 2), 200, self.dim, min(self.batch, 8), min(self.length, 3), self.zipf
        )


def sized(bench: Bench, shapes: Sequence[Shape]) -> list[Shape]:
    """Return the shapes of a part, small where only the code is tried."""
    return [shape.small() if bench.tiny else shape for shape in shapes]
