"""A cell of kind sharding: collections over the ranks of one world, their steps and parts timed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from experiments.config.sweep import Cell
from experiments.contenders import Contender
from experiments.results.store import Record
from experiments.run.cell import measure_cell, whole_steps
from experiments.run.session import Session
from experiments.sharding.predict import Predictor
from experiments.timing.race import Phase
from experiments.work.workload import Pool


def sharding_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """One record per arm and mode: measure_cell's, with the parts of a step and the prediction.

    The constants of the prediction are measured first, in this process and by the same ranks, while
    nothing else has touched the machine's caches or memory.
    """
    session.note("|calibrating")
    predictor = Predictor.calibrated(cell, session)
    records = measure_cell(cell, session, seconds, steps_and_parts)
    known = {"scaling": cell.scaling.value, "threads": torch.get_num_threads()}
    return [record | known | predictor.of(record["contender"]) for record in records]


def steps_and_parts(contender: Contender, pool: Pool) -> dict[str, Phase]:
    """Whole steps, and what of a step the contender can do by itself.

    A contender that fails at its parts has failed: every phase of it says why.
    """
    phases = whole_steps(contender, pool)
    try:
        each = [contender.parts(contender.prepare(batch)) for batch in pool.batches]
    except Exception as error:
        return dict.fromkeys(phases, partial(_fail, error))
    return phases | {name: partial(_at, [parts[name] for parts in each]) for name in each[0]}


def _at(works: list[Callable[[], object]], number: int) -> object:
    return works[number]()


def _fail(error: Exception, number: int) -> object:
    raise error
