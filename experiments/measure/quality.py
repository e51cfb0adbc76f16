"""Measure a cell of kind quality: train a model per method and share of the bytes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from experiments.config.sweep import PLAIN, Arm, Cell
from experiments.contenders.registry import MissingLibrary
from experiments.measure.outcome import Outcome, make_record
from experiments.measure.session import Session
from experiments.quality import MIN_SAMPLES
from experiments.quality.data import Clicks, DataSource, UnreadableData, load
from experiments.quality.methods import FLOAT_BYTES, StoredTables
from experiments.quality.training import (
    Model,
    TrainedModel,
    TrainingPlan,
    build,
    fit,
    oracle_scores,
    step_samples,
    task_of,
)
from experiments.results.store import Record

SMOKE_SAMPLES = 600  # maximum number of samples in a smoke run


def quality_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return one record per arm: a method with a share of the bytes.

    If the samples cannot be read or are too few, all arms fail. Replicates differ by the seed of
    initial values and of the order of samples. `seconds` is not used: training has no time limit.
    """
    options, plan = cell.options, _training_plan(cell, session)
    outcomes = {arm: Outcome(arm) for arm in cell.arms}
    try:
        session.note("|reading the samples")
        clicks = load(_data_source(cell, session)).to(session.device)
        if (num_samples := len(clicks.labels)) < MIN_SAMPLES:
            raise UnreadableData(f"{clicks.name}: {num_samples} samples, fewer than {MIN_SAMPLES}")
    except (MissingLibrary, UnreadableData) as error:
        for outcome in outcomes.values():
            outcome.fail(error)
        return [make_record(cell, outcome, session) for outcome in outcomes.values()]
    sized_workload = dataclasses.replace(cell.workload, sizes=list(clicks.num_ids))
    cell = dataclasses.replace(cell, workload=sized_workload)
    trained_models = _train_all(cell, session, clicks, plan, outcomes)
    session.note("|timing steps")
    step_times = step_samples(
        [trained.model for trained in trained_models.values()],
        clicks,
        plan,
        1 if _is_smoke(session) else options["timed_steps"],
        time.perf_counter_ns,
    )
    for arm, samples in zip(trained_models, step_times, strict=True):
        outcomes[arm].race_result.samples = {"step": samples}
    data_entries = _data_entries(clicks, plan) | {"lookups": plan.batch * len(clicks.num_ids)}
    return [
        make_record(cell, outcomes[arm], session)
        | data_entries
        | (_model_entries(trained_models[arm]) if arm in trained_models else {})
        for arm in cell.arms
    ]


def _is_smoke(session: Session) -> bool:
    return bool(session.config.timing.max_rows)


def _data_source(cell: Cell, session: Session) -> DataSource:
    options = cell.options
    samples = options["samples"]
    if _is_smoke(session):
        samples = min(samples or SMOKE_SAMPLES, SMOKE_SAMPLES)
    name = options["data"][0]
    # The seed of the run, not of the replicate: all replicates have the same samples.
    return DataSource(name, cell.workload.file, samples, options["scale"], session.config.seed)


def _training_plan(cell: Cell, session: Session) -> TrainingPlan:
    options = cell.options
    return TrainingPlan(
        dim=cell.workload.D,
        batch=cell.workload.B,
        epochs=1 if _is_smoke(session) else options["epochs"],
        rates=tuple(options["rates"][: 1 if _is_smoke(session) else None]),
        large=options["large"],
        seed=session.seed,
    )


def _train_all(
    cell: Cell, session: Session, data: Clicks, plan: TrainingPlan, outcomes: dict[Arm, Outcome]
) -> dict[Arm, TrainedModel]:
    """Train every arm; return the models of those that did not fail.

    The plain tables are trained first, because some methods start from their weights. An error of
    an arm is written into its outcome.
    """
    trained_models: dict[Arm, TrainedModel] = {}
    plain_tables: StoredTables | None = None

    def build_model(arm: Arm, rate: float) -> Model:
        task = task_of(data, plan, arm.cache or 1.0, rate)
        if plain_tables is not None:
            task = dataclasses.replace(task, read_trained_rows=plain_tables.weights)
        return build(data, plan, arm.contender, task).to(session.device)

    def note_of(arm: Arm) -> Callable[[str], object]:
        return lambda activity: session.note(f"{arm.key}|{activity}")

    for arm in sorted(cell.arms, key=lambda arm: arm.contender != PLAIN):
        with outcomes[arm].catching():
            trained_models[arm] = fit(data, plan, partial(build_model, arm), note_of(arm))
            large_tables = trained_models[arm].model.large_tables
            if arm.contender == PLAIN and isinstance(large_tables, StoredTables):
                plain_tables = large_tables
    return trained_models


def _data_entries(data: Clicks, plan: TrainingPlan) -> dict[str, Any]:
    """Return the entries of all records about the data.

    `positive` is the share of samples with label 1, `large_bytes` the bytes of the plain large
    tables. `oracle_auc` and `oracle_loss` are the scores of the true probabilities, or None.
    """
    oracle = oracle_scores(data)
    large_rows = [data.num_ids[field] for field in data.large_fields(plan.large)]
    return {
        "title": data.title,
        "data": data.name,
        "samples_of": {
            "train": data.split_ends[0],
            "valid": data.split_ends[1] - data.split_ends[0],
            "test": len(data.labels) - data.split_ends[1],
        },
        "positive": float(data.labels.mean()),
        "large_tables": len(large_rows),
        "large_bytes": sum(large_rows) * plan.dim * FLOAT_BYTES,
        "oracle_auc": oracle and oracle.auc,
        "oracle_loss": oracle and oracle.loss,
    }


def _model_entries(trained: TrainedModel) -> Record:
    """Return the entries of a record about its trained model."""
    large_tables = trained.model.large_tables
    return {
        "auc": trained.test.auc,
        "log_loss": trained.test.loss,
        "valid_loss": trained.valid.loss,
        "rate": trained.rate,
        "epoch": trained.epoch,
        "weights_bytes": large_tables.trained_bytes,
        "served_bytes": large_tables.served_bytes,
        "ranks": large_tables.ranks or None,
    }
