"""The outcome of a contender as a record, whether it was measured or failed.

`verify` compares a contender with the reference before it is timed. An `Outcome` then collects what
happened to an arm in a mode, and `make_record` turns it into a record (`results.store.Record`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from experiments.config.schema import Mode
from experiments.config.sweep import Arm, Cell
from experiments.contenders import registry
from experiments.contenders.base import Contender, update_rounding
from experiments.contenders.registry import MissingLibrary, Unsupported, WrongResult
from experiments.measure.process import ChildDied, describe_error, is_out_of_memory
from experiments.measure.session import Session
from experiments.results.store import Record
from experiments.timing.clock import UnsupportedMode
from experiments.timing.race import RaceResult
from experiments.workloads.workload import Batch, Pool, dense_bytes, table_shapes

Built = TypeVar("Built")  # a contender or table that was built for an arm
# Tolerance ÷ largest element, for float32 sums of thousands of terms in another order.
MAX_ERROR = 1e-3
ROUNDING = 5e-7  # error of adding an update to a float32 weight ÷ largest weight


def verify(contender: Contender, batch: Batch) -> None:
    """Compare a forward and a step of a contender with the reference.

    The contender must not have made a step before. Afterwards its parameters are updated by one.

    Raises:
        WrongResult: an output or an update differs by more than rounding explains, or is not
            finite.
    """
    state_before = contender.observe(batch)
    output, expected_state = contender.expect(batch, state_before)
    prepared = contender.prepare(batch)
    _compare("forward", contender.forward(prepared), output, torch.zeros(()))
    contender.step(prepared)
    observed_state = contender.observe(batch)
    for index, (state_at_start, actual, expected) in enumerate(
        zip(state_before, observed_state, expected_state, strict=True)
    ):
        update = (expected - state_at_start).float()
        tolerance = update_rounding(contender.task.optimizer, update, contender.task.lr)
        if state_at_start.numel():
            tolerance += ROUNDING * float(state_at_start.abs().max())
        _compare(f"update of parameters {index}", actual - state_at_start, update, tolerance)


def _compare(subject: str, actual: Tensor, expected: Tensor, tolerance: Tensor) -> None:
    """Raise WrongResult unless the tensors have the same shape and are equal within the tolerance.

    The permitted error is `tolerance` (a scalar or of that shape) plus MAX_ERROR times the largest
    expected element, which must be finite. `expected` is on the CPU, `actual` on any device.
    `subject` begins the message.
    """
    actual, expected = actual.detach().cpu().float(), expected.float()
    if actual.shape != expected.shape:
        raise WrongResult(
            f"{subject}: shape {tuple(actual.shape)}, reference has {tuple(expected.shape)}"
        )
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    error = (actual - expected).abs()
    if not (error <= MAX_ERROR * scale + tolerance).all():  # also catches NaN
        worst = float(error.max())
        raise WrongResult(
            f"{subject}: differs from the reference by up to {worst:.3g} of {scale:.3g}"
        )
    if not torch.isfinite(expected).all():
        raise WrongResult(f"{subject}: the reference itself is not finite")


@dataclass
class Outcome:
    """The outcome of an arm in a mode: its status, "ok" until `fail`, and what was measured.

    Attributes:
        arm: the arm.
        mode: mode of the samples.
        status: "ok", "missing", "unsupported", "wrong", "oom", "timeout" or "error".
        reason: message of the error; "" for "ok".
        race_result: samples, and what was observed with them.
        peak_bytes: peak memory of a step (`memory.peak_bytes`); None if it was not measured.
        nbytes: bytes of parameters, optimizer state and cache, see `Contender.nbytes`; {} if they
            were not measured.
        counters: counts of the cache in one pass over all batches, see `Contender.counters`; {}
            without a cache.
        flops: floating-point operations per phase, mean over the batches; {} if unknown.
    """

    arm: Arm
    mode: Mode = Mode.hot
    status: str = "ok"
    reason: str = ""
    race_result: RaceResult = field(default_factory=RaceResult)
    peak_bytes: int | None = None
    nbytes: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)

    def fail(self, error: Exception) -> None:
        """Set status and reason by an error. The reason of an unexpected one has file and line."""
        self.status = status_of(error)
        is_unexpected = self.status == "error" and not isinstance(error, ChildDied)
        message = str(error).strip() or type(error).__name__
        self.reason = describe_error(error) if is_unexpected else message

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Return a context that turns an `Exception` into this arm's failure: other arms go on."""
        try:
            yield
        except Exception as error:
            self.fail(error)


def build_arms(
    cell: Cell, session: Session, build: Callable[[Arm], Built]
) -> tuple[dict[str, Outcome], dict[str, Built]]:
    """Call `build` with each arm of a cell; return the outcomes and the results by the arms' keys.

    The outcome of an arm is "ok", or the error of `build`; the results lack an arm with an error.
    The order of building is random (by the session's seed), because memory that is allocated first
    can be faster.
    """
    outcomes = {arm.key: Outcome(arm) for arm in cell.arms}
    results: dict[str, Built] = {}
    for arm in random.Random(session.seed).sample(cell.arms, len(cell.arms)):
        with outcomes[arm.key].catching():
            session.note(f"{arm.key}|building")
            results[arm.key] = build(arm)
    return outcomes, results


def status_of(error: Exception) -> str:
    """Return the status of a contender that raised this error."""
    if isinstance(error, ChildDied):
        return error.status
    if isinstance(error, MissingLibrary):
        return "missing"
    if isinstance(error, Unsupported | UnsupportedMode):
        return "unsupported"
    if isinstance(error, WrongResult):
        return "wrong"
    return "oom" if is_out_of_memory(error) else "error"


def pool_entries(pool: Pool) -> dict[str, Any]:
    """Return the entries of a record about its batches.

    `lookups` and `unique_rows` are means per batch, `pool_sha256` is the fingerprint of all ids,
    `pool_batches` the number of batches, `pool_folded` the number of ids outside their tables.
    """
    return {
        "lookups": pool.lookups_per_batch,
        "unique_rows": pool.unique_rows_per_batch,
        "pool_sha256": pool.fingerprint,
        "pool_batches": len(pool.batches),
        "pool_folded": pool.num_folded,
    }


def make_record(cell: Cell, outcome: Outcome, session: Session) -> Record:
    """Return the record of an arm's outcome, from the cell, the outcome and the session alone.

    The contender is not needed, because its process may have died. Entries about the batches are
    preliminary: `lookups` is B * L per feature, `unique_rows` and `pool_sha256` are None. Callers
    with a pool replace them by `pool_entries`.
    """
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    arm, race_result, workload = outcome.arm, outcome.race_result, cell.workload
    params = {
        name: getattr(value, "value", value) for name, value in dataclasses.asdict(workload).items()
    }
    # The path is private; sha256 identifies the file.
    params["file"] = Path(workload.file).name if workload.file else ""
    race_entries, contender = race_result.entries(), registry.entry_of(arm.contender)
    return {
        "run_id": session.run_id,
        **session.identity,
        "replicate": session.replicate,
        "order": session.order,
        "experiment": session.config.name,
        "kind": cell.kind,
        "section": cell.section,
        "title": cell.title,
        "cell": cell.key,
        "params": params,
        "contender": arm.contender,
        "rank": arm.rank,
        "cache": arm.cache,
        "arm": arm.key,
        "label": arm.label,
        "mode": outcome.mode.value,
        "optimizer": session.config.optimizer.value,
        "status": outcome.status,
        "reason": outcome.reason,
        **race_entries,
        "flags": [*race_entries["flags"], *contender.unknown_versions()],
        "packages": contender.versions(),
        "seed": session.seed,
        "world_size": session.config.device.ranks,
        "rows_scale": cell.rows_scale,
        "features": len(shapes),
        "columns": sum(shape.dim for shape in shapes),
        "rows": sum(shape.rows for shape in shapes),
        "lookups": len(shapes) * workload.B * workload.L,
        "unique_rows": None,
        "pool_sha256": None,
        "dense_bytes": dense_bytes(shapes),
        "weights_bytes": outcome.nbytes.get("weights"),
        "optimizer_state_bytes": outcome.nbytes.get("optimizer_state"),
        "cache_bytes": outcome.nbytes.get("cache", 0),
        "peak_bytes": outcome.peak_bytes,
        "samples": race_result.samples,
        "counters": outcome.counters,
        "flops": outcome.flops,
    }
