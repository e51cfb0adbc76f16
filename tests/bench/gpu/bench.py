"""What a part of the benchmarks runs with: device, sizes, time; and the figures that it finds."""

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

MEMORY_SHARE = 0.8  # of the free memory may be used by the tables of a point


@dataclass
class Bench:
    """One part: what it may use, and what it has found."""

    part: str
    device: torch.device
    tiny: bool = False
    seconds: float = 60.0
    rounds: int = 15
    figures: dict[str, float] = field(default_factory=dict)  # name -> value, as in aims.yaml
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.watch = Watch(self.device)
        self.environment = environment.describe(self.device, ())
        self.environment["command"] = " ".join(["python -m tests.bench.gpu", *sys.argv[1:]])

    def left(self) -> float:
        """Return the seconds that the part has left."""
        return self.seconds - (time.monotonic() - self.began)

    def size(self, number: int, tiny: int) -> int:
        """Return a size, or the tiny one where only the code is tried."""
        return tiny if self.tiny else number

    def fit_rows(self, rows: int, bytes_per_row: float) -> int:
        """Return as many rows as fit into the free memory, with a note where those are fewer."""
        if self.device.type != "cuda" or self.tiny:
            return rows
        free, _ = torch.cuda.mem_get_info(self.device)
        room = int(MEMORY_SHARE * free / bytes_per_row)
        if room < rows:
            self.notes.append(f"tables of {rows:,} rows have {room:,}: there is no more memory")
        return min(rows, room)

    def race(self, calls: dict[str, Call], *, share: float = 0.2) -> dict[str, Times]:
        """Time calls for at most a share of the time that is left."""
        rounds = 3 if self.tiny else self.rounds
        return race(self.watch, calls, rounds, share * max(0.0, self.left()))

    def figure(self, name: str, value: float | None) -> None:
        """Keep a figure by its name in aims.yaml; None is left out."""
        if value is not None:
            self.figures[name] = value

    def row(self, **values: Any) -> None:
        """Keep and print a row of the part's table."""
        self.rows.append(values)
        print(
            " · ".join(f"{k} {_shown(v)}" for k, v in values.items() if v is not None), flush=True
        )

    def attempt(self, what: str, work: Callable[[], object]) -> None:
        """Do a point of the part; one that fails is a row, one without time left is a note."""
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
        found = {
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
        (folder / f"{self.part}.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
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
    """T tables of E rows and dim D; B bags of L lookups in each; ids uniform, or a power law."""

    tables: int
    rows: int
    dim: int
    batch: int
    length: int = 1
    zipf: float | None = None

    @property
    def name(self) -> str:
        """Return e.g. `T26 D64 B65536 L1`."""
        law = f" s{self.zipf:g}" if self.zipf else ""
        return f"T{self.tables} D{self.dim} B{self.batch} L{self.length}{law}"

    @property
    def lookups(self) -> int:
        """Return the lookups of a batch."""
        return self.tables * self.batch * self.length

    def batches(self, device: torch.device, count: int = POOL) -> list[tuple[Tensor, Tensor]]:
        """Draw ids and offsets, feature-major, int64."""
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
        """Return a gradient of the output."""
        generator = torch.Generator(device=device).manual_seed(0)
        size = (self.batch, self.tables * self.dim)
        return torch.randn(size, device=device, generator=generator).to(dtype) * 1e-3

    def small(self) -> Shape:
        """Return the shape at a size that a CPU does at once."""
        return Shape(
            min(self.tables, 2), 200, self.dim, min(self.batch, 8), min(self.length, 3), self.zipf
        )


def sized(bench: Bench, shapes: Sequence[Shape]) -> list[Shape]:
    """Return the shapes of a part, small where only the code is tried."""
    return [shape.small() if bench.tiny else shape for shape in shapes]
