"""One cell: build its contenders, check them, time them interleaved, weigh them, record them."""

from __future__ import annotations

import dataclasses
import gc
import random
import traceback
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from experiments.config.schema import CACHED, Config
from experiments.config.sweep import Arm, Cell
from experiments.contenders import Contender, Task, Unsupported, build
from experiments.results.store import Record
from experiments.run.verify import Wrong, verify
from experiments.timing import memory
from experiments.timing.clock import clock_for
from experiments.timing.race import PHASES, Measured, Phase, Race
from experiments.work.workload import Pool, dense_bytes, make_pool, table_shapes

VERIFY_BATCH = 32  # bags per table in the check, whose reference gathers every lookup's cores
# Contenders that hold the tables uncompressed; pages of a file count as well, while they are used.
DENSE = ("tbe", "torch", "reference_tbe", "managed", *CACHED)


@dataclass(frozen=True)
class Session:
    """What every cell of a run shares."""

    config: Config
    device: torch.device
    run_id: str


def fit_memory(cell: Cell, session: Session) -> Cell:
    """Shrink the tables only if the uncompressed contenders would not fit in the free memory."""
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    copies = sum(a.contender in DENSE for a in cell.arms)
    adagrad = session.config.optimizer.value == "adagrad"
    wanted = max(1, copies) * dense_bytes(shapes) * (2 if adagrad else 1)
    room = memory.available_bytes(session.device) * session.config.device.memory_share
    if wanted <= room:
        return cell
    return dataclasses.replace(cell, rows_scale=cell.rows_scale * room / wanted)


def measure_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """One record per arm, whatever happens to it; `seconds` is the budget for timing them all."""
    gc.collect()  # a failed contender's traceback keeps its tables alive in a cycle
    config = session.config
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    timing = dataclasses.replace(config.timing, cell_seconds=seconds)
    if any(arm.cache for arm in cell.arms):
        timing = dataclasses.replace(timing, pool=cell.cache.pool)
    pool = make_pool(cell.workload, shapes, timing.pool, config.seed)
    outcomes = {arm.key: Outcome(arm) for arm in cell.arms}
    built = _build(cell, outcomes, session)
    arms = {key: _phases(contender, pool) for key, contender in built.items()}
    race = Race(
        arms, timing, clock_for(session.device), config.seed, lambda k: built[k].reset_counters()
    )
    for key, measured in (race.run() if arms else {}).items():
        outcomes[key].measured = measured
        if measured.error:
            outcomes[key].fail(measured.error)
    for key, contender in built.items():
        if outcomes[key].status == "ok":
            outcomes[key].counters = contender.counters()
            outcomes[key].peak = memory.peak_bytes(partial(arms[key]["step"], 0), session.device)
            outcomes[key].nbytes = contender.nbytes()
    return [
        describe(cell, o, pool, session) | {"samples": o.measured.samples, "counters": o.counters}
        for o in (outcomes[a.key] for a in cell.arms)
    ]


def _build(cell: Cell, outcomes: dict[str, Outcome], session: Session) -> dict[str, Contender]:
    """The contenders that exist and compute the right thing; the others' outcomes say why not.

    In random order: memory that is allocated first can be better memory.
    """
    config = session.config
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    small = dataclasses.replace(cell.workload, B=min(VERIFY_BATCH, cell.workload.B))
    check = make_pool(small, shapes, 1, config.seed + 1).batches[0]
    built: dict[str, Contender] = {}
    for arm in random.Random(config.seed).sample(cell.arms, len(cell.arms)):
        try:
            contender = build(arm.contender, task_of(cell, arm, session))
            verify(contender, check)
            built[arm.key] = contender
        except Exception as error:  # whatever it is becomes this contender's row
            outcomes[arm.key].fail(error)
    return built


def _phases(contender: Contender, pool: Pool) -> dict[str, Phase]:
    prepared = [contender.prepare(batch) for batch in pool.batches]

    def phase(name: str) -> Phase:
        work = getattr(contender, name)
        return lambda number: work(prepared[number])

    return {name: phase(name) for name in PHASES}


def task_of(cell: Cell, arm: Arm, session: Session) -> Task:
    """What the contender of an arm is built for."""
    explicit = (
        cell.rows_scale == 1.0
    )  # factors fit the tables they were given for, not smaller ones
    return Task(
        shapes=table_shapes(cell.workload, scale=cell.rows_scale),
        optimizer=session.config.optimizer,
        lr=session.config.lr,
        device=session.device,
        rank=arm.rank,
        tt_tables=cell.tt.tables,
        row_factors=tuple(cell.tt.row_factors) if explicit else (),
        dim_factors=tuple(cell.tt.dim_factors),
        cache=arm.cache,
        directory=cell.cache.directory,
    )


@dataclass
class Outcome:
    """What became of one arm."""

    arm: Arm
    status: str = "ok"
    reason: str = ""
    measured: Measured = dataclasses.field(default_factory=Measured)
    peak: int | None = None
    nbytes: dict[str, int] = dataclasses.field(default_factory=dict)
    counters: dict[str, int] = dataclasses.field(default_factory=dict)

    def fail(self, error: Exception) -> None:
        """Classify; an unexpected error also says where it came from."""
        text = str(error).strip() or type(error).__name__
        if isinstance(error, Unsupported):
            self.status = "unsupported"
        elif isinstance(error, Wrong):
            self.status = "wrong"
        elif isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate" in text:
            self.status = "oom"
        else:
            self.status = "error"
            tail = traceback.extract_tb(error.__traceback__)[-1:]
            text = f"{type(error).__name__}: {text}" + "".join(
                f" ({Path(f.filename).name}:{f.lineno})" for f in tail
            )
        self.reason = text


def describe(cell: Cell, outcome: Outcome, pool: Pool, session: Session) -> Record:
    """Everything about an arm and what became of it, but what was sampled."""
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    params = {k: getattr(v, "value", v) for k, v in dataclasses.asdict(cell.workload).items()}
    arm, measured = outcome.arm, outcome.measured
    return {
        "run_id": session.run_id,
        "experiment": session.config.name,
        "section": cell.section,
        "title": cell.title,
        "cell": cell.key,
        "params": params,
        "contender": arm.contender,
        "rank": arm.rank,
        "cache": arm.cache,
        "arm": arm.key,
        "label": arm.label,
        "optimizer": session.config.optimizer.value,
        "status": outcome.status,
        "reason": outcome.reason,
        "stop_reason": measured.stop_reason,
        "seed": session.config.seed,
        "rows_scale": cell.rows_scale,
        "features": len(shapes),
        "columns": sum(s.dim for s in shapes),
        "rows": sum(s.rows for s in shapes),
        "lookups": pool.lookups,
        "unique_rows": pool.unique_rows,
        "pool_sha256": pool.fingerprint,
        "dense_bytes": dense_bytes(shapes),
        "weights_bytes": outcome.nbytes.get("weights"),
        "optimizer_state_bytes": outcome.nbytes.get("optimizer_state"),
        "cache_bytes": outcome.nbytes.get("cache", 0),
        "peak_bytes": outcome.peak,
    }
