"""A cell of kind calibration: what lookups, updates and messages cost on this machine."""

from __future__ import annotations

import json

import torch

from emblib.sharding.planner import Calibration
from emblib.sharding.planner.measure import Sizes, calibrate
from experiments.config.sweep import Cell
from experiments.contenders.sharded import ranks_of
from experiments.results.store import Record
from experiments.run.outcome import Outcome, describe
from experiments.run.session import Session

SMALL = Sizes(1 << 20, 1)  # of a smoke run


def constants(session: Session) -> Calibration:
    """Measured by the ranks of this session; a collective."""
    session.note("|calibrating")
    sizes = SMALL if session.config.timing.max_rows else Sizes()
    return calibrate(ranks_of(session.device), sizes)


def as_data(found: Calibration) -> Record:
    """As `Calibration.load` reads it."""
    data: Record = json.loads(found.to_json())
    return data


def calibration_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """One record: the constants. `seconds` does not end it: how long it takes is the planner's."""
    outcome = Outcome(cell.arms[0])
    record: Record = {}
    try:
        nodes = ranks_of(session.device).nodes
        record = {"calibration": as_data(constants(session)), "nodes": nodes}
        outcome.measured.stop_reason = "calibrated"
    except Exception as error:  # whatever it is becomes the row
        outcome.fail(error)
    session.team.settle({cell.arms[0].key: outcome})
    return [describe(cell, outcome, session) | record | {"threads": torch.get_num_threads()}]
