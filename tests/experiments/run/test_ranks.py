"""Ranks stay synchronised: a time or failure of one is every rank's; a rank's death is a row.

Most tests are threads that pretend to be ranks, with clocks that only pretend to measure.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import configure
from experiments.config.schema import Mode, TimingConfig
from experiments.config.sweep import Arm
from experiments.machine.telemetry import Telemetry
from experiments.measure.outcome import Outcome
from experiments.measure.process import ChildDied
from experiments.results.store import read_records
from experiments.run import ranks as ranks_module
from experiments.run.ranks import FailedElsewhere, Peers, ProcessSync, RankProcesses
from experiments.timing.clock import Clock, Phase, Reading, SampleTask
from experiments.timing.race import Race, RaceResult
from tests.experiments.smoke_host import SmokeHost

RANKS = 3
TIMING = TimingConfig(
    pool=2, warmup=1, warmup_seconds=0, min_seconds=0, min_rounds=6, max_rounds=8, cell_seconds=1e9
)


class Meeting:
    """Where threads wait for each other; one that does not come fails the test."""

    def __init__(self) -> None:
        self.door = threading.Barrier(RANKS, timeout=20)
        self.brought: list[Any] = [None] * RANKS


class ThreadPeers(Peers):
    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size, self.meeting = rank, RANKS, meeting

    def barrier(self) -> None:
        self.exchange(None)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        return self.exchange([float(v) for v in values])

    def exchange(self, value: Any) -> list[Any]:
        self.meeting.brought[self.rank] = value
        self.meeting.door.wait()
        found = list(self.meeting.brought)
        self.meeting.door.wait()
        return found


def on_every_rank(work: Callable[[ProcessSync], Any]) -> list[Any]:
    """`work` in a thread for each rank; their results, or the first error."""
    meeting, results = Meeting(), [None] * RANKS
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            results[rank] = work(ProcessSync(ThreadPeers(rank, meeting)))
        except BaseException as error:
            errors.append(error)
            meeting.door.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors, "the ranks parted ways"
    return results


class Scripted(Clock):
    """Each rank's samples take as long as the test says; the n-th may fail in the clock itself."""

    mode = Mode.hot

    def __init__(self, rank: int, fails_at: int | None = None) -> None:
        self.rank, self.fails_at, self.taken = rank, fails_at, 0

    def time(self, work: Callable[[], object]) -> float:
        raise NotImplementedError

    def read(self, tasks: Iterable[SampleTask]) -> list[Reading]:
        return [self._one(task) for task in tasks]

    def _one(self, task: SampleTask) -> Reading:
        task.call()
        self.taken += 1
        if self.taken == self.fails_at:
            raise RuntimeError("illegal memory access")
        # The slowest rank is another for every sample.
        seconds = 1e-3 * (1 + (self.taken + self.rank) % RANKS)
        return Reading(seconds, seconds, seconds)


def race(
    ranks: ProcessSync,
    broken: Mapping[str, Phase] | None = None,
    *,
    clock: Clock | None = None,
    telemetry: Telemetry | None = None,
    counters: Callable[[str], Mapping[str, int]] = lambda name: {},
) -> tuple[dict[str, RaceResult], Race]:
    """Arms a and b; `broken` takes the place of b's phases."""
    good: dict[str, Phase] = {"forward": lambda n: None, "step": lambda n: None}
    arms = {"a": ranks.phases("a", good), "b": ranks.phases("b", dict(broken or good))}
    run = Race(
        arms,
        TIMING,
        ranks.clock(clock or Scripted(ranks.rank)),
        seed=1,
        counters=lambda name: ranks.sum_over_ranks(counters(name)),
        telemetry=ranks.telemetry(telemetry or Telemetry()),
        sleep=lambda seconds: None,
    )
    return run.run(), run


def test_a_sample_is_the_slowest_ranks_and_all_ranks_have_it() -> None:
    found = on_every_rank(lambda ranks: (race(ranks)[0], ranks))
    first = found[0][0]
    assert all(s == 3e-3 for m in first.values() for taken in m.samples.values() for _, s in taken)
    assert len(first["a"].samples["step"]) >= 2 * TIMING.min_rounds
    for results, _ in found[1:]:
        assert {k: (m.samples, m.stop_reason) for k, m in results.items()} == {
            k: (m.samples, m.stop_reason) for k, m in first.items()
        }


@pytest.mark.parametrize("call", [1, 3, 9])  # in the warm-up and in the race
@pytest.mark.parametrize("where", [0, 2])
def test_an_arm_that_fails_on_one_rank_has_failed_on_all(where: int, call: int) -> None:
    def work(ranks: ProcessSync) -> dict[str, RaceResult]:
        calls = 0

        def step(number: int) -> None:
            nonlocal calls
            calls += 1
            if ranks.rank == where and calls == call:
                raise ValueError("row out of range")

        return race(ranks, {"forward": lambda n: None, "step": step})[0]

    for rank, results in enumerate(on_every_rank(work)):
        assert len(results["a"].samples["step"]) >= 2 * TIMING.min_rounds
        error = results["b"].error
        if rank == where:
            assert isinstance(error, ValueError)
        else:
            assert isinstance(error, FailedElsewhere)
            assert str(error) == f"rank {where}: ValueError: row out of range"


def test_a_lack_of_memory_stays_one_on_the_other_ranks() -> None:
    def work(ranks: ProcessSync) -> str:
        def step(number: int) -> None:
            if ranks.rank == 1:
                raise torch.OutOfMemoryError("tried to allocate")

        outcome = Outcome(Arm("b"))
        error = race(ranks, {"forward": lambda n: None, "step": step})[0]["b"].error
        assert error is not None
        outcome.fail(error)
        return outcome.status

    assert on_every_rank(work) == ["oom"] * RANKS


def test_a_clock_that_fails_takes_all_arms_of_the_round_on_all_ranks() -> None:
    """As after a CUDA error, which shows later than in the call that made it."""

    def work(ranks: ProcessSync) -> dict[str, RaceResult]:
        return race(ranks, clock=Scripted(ranks.rank, 30 if ranks.rank == 1 else None))[0]

    for results in on_every_rank(work):
        assert all("illegal memory access" in str(m.error) for m in results.values())


def test_a_clock_that_fails_with_the_call_takes_all_arms_too() -> None:
    """As after a CUDA error that breaks the call and every later use of the GPU."""

    class Broken(Scripted):
        def _one(self, task: SampleTask) -> Reading:
            reading = super()._one(task)
            if broken and self.rank == 1:
                raise RuntimeError("illegal memory access")
            return reading

    broken: list[int] = []

    def work(ranks: ProcessSync) -> dict[str, RaceResult]:
        calls = 0

        def step(number: int) -> None:
            nonlocal calls
            calls += 1
            if ranks.rank == 1 and calls == 9:
                broken.append(calls)
                raise RuntimeError("illegal memory access in step")

        phases = {"forward": lambda n: None, "step": step}
        return race(ranks, phases, clock=Broken(ranks.rank))[0]

    for results in on_every_rank(work):
        assert all("illegal memory access" in str(m.error) for m in results.values())


def test_ranks_repeat_a_round_together() -> None:
    class Slowed(Telemetry):
        def __init__(self, *, slow: bool) -> None:
            self.left = 2 if slow else 0

        def check(self) -> list[str]:
            self.left -= 1
            return ["cpu_thermal"] if self.left >= 0 else []

    found = on_every_rank(
        lambda r: race(r, telemetry=Slowed(slow=r.rank == 2))[0]["a"].throttled_samples
    )
    assert found[0]["step"] == found[1]["step"] == found[2]["step"]
    assert len(found[0]["step"]) == 4  # two samples of two throttled attempts


def test_counters_are_those_of_all_ranks() -> None:
    def work(ranks: ProcessSync) -> Mapping[str, int]:
        assert ranks.sum_over_ranks({}) == {}
        return ranks.sum_over_ranks({"lookups": 100, "lookup_hits": 10 * ranks.rank})

    assert on_every_rank(work) == [{"lookups": 300, "lookup_hits": 30}] * RANKS


def test_warm_up_ends_on_all_ranks_at_once_although_their_hit_rates_differ() -> None:
    def work(ranks: ProcessSync) -> int:
        lookups = hits = 0

        def counters(name: str) -> Mapping[str, int]:
            nonlocal lookups, hits
            lookups += 100
            hits += 50 if ranks.rank or lookups > 500 else lookups // 10
            return {"lookups": lookups, "lookup_hits": hits}

        warm = race(ranks, counters=counters)[0]["a"].warm_up_result
        assert warm is not None
        return warm.passes

    passes = on_every_rank(work)
    assert len(set(passes)) == 1
    assert passes[0] > 1


def test_an_arm_that_could_not_be_built_on_one_rank_is_built_on_none() -> None:
    def work(ranks: ProcessSync) -> list[tuple[str, str]]:
        outcomes = {key: Outcome(Arm(key)) for key in ("a", "b")}
        if ranks.rank == 1:
            outcomes["b"].fail(MemoryError("no room"))
        ranks.share_failures(outcomes)
        return [(o.status, o.reason) for o in outcomes.values()]

    found = on_every_rank(work)
    assert found[0] == found[2] == [("ok", ""), ("oom", "rank 1: no room")]
    assert found[1] == [("ok", ""), ("oom", "no room")]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["device.ranks=0"], r"device.ranks must be in \[1, 1024\], got 0"),
        (["device.ranks=2", "+experiment=cache_hit_rate"], "only kind=time has ranks"),
    ],
)
def test_impossible_ranks_are_a_usage_error(words: list[str], error: str) -> None:
    with pytest.raises(configure.UsageError, match=error):
        configure.load([*words] if len(words) > 1 else ["+experiment=tt_vs_tbe", *words])


# With processes

CONTENDERS = '''"""Contenders that do something to rank 1."""

import os
import signal

from experiments.contenders.torch_bag import TorchBags


class FailsInStep(TorchBags):
    """Whose third step fails there."""

    calls = 0

    def step(self, prepared):
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls == 3:
            raise ValueError("not on this rank")
        super().step(prepared)


class Dies(TorchBags):
    """Whose third step is its last there."""

    calls = 0

    def step(self, prepared):
        self.calls += 1
        if os.environ["RANK"] == "1" and self.calls == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        super().step(prepared)
'''


TABLE = """
fails_in_step: {class: "harmful:FailsInStep", label: fails in step}
dies: {class: "harmful:Dies", label: dies}
"""


class ScriptedChild:
    """A child that answers or dies after some seconds, counted from the end of child `after`."""

    def __init__(
        self,
        note: str,
        seconds: float,
        end: ChildDied | list[Any],
        after: ScriptedChild | None = None,
    ) -> None:
        self.note, self.seconds, self.end, self.after = note, seconds, end, after
        self.killed, self.ended = threading.Event(), threading.Event()

    def receive(self, watch: Callable[[str], object] | None) -> list[Any]:
        try:
            return self._receive()
        finally:
            self.ended.set()

    def _receive(self) -> list[Any]:
        if self.after is not None:
            self.after.ended.wait()
        if self.killed.wait(self.seconds):
            raise ChildDied("error", "the process crashed (SIGKILL)")
        if isinstance(self.end, ChildDied):
            raise self.end
        return self.end

    def kill(self) -> None:
        self.killed.set()


def receive(*children: ScriptedChild) -> tuple[Any, str]:
    """What `RankProcesses.receive` returns or raises, and its note."""
    processes = object.__new__(RankProcesses)
    processes.children, processes.note = list(children), ""  # type: ignore[arg-type]
    try:
        return processes.receive(), processes.note
    except ChildDied as death:
        return (death.status, str(death)), processes.note


LOST = ChildDied("error", "RuntimeError: Connection closed by peer", answered=True)
KILLED = ChildDied("oom", "the process was killed from outside (SIGKILL)")


@pytest.mark.parametrize("first", [0.0, 0.2])  # the lost connection is noticed before the death
def test_a_death_is_that_of_the_arm_the_dead_rank_was_at(first: float) -> None:
    """Rank 0 may be at the next one already, or still at the one before."""
    found = receive(
        ScriptedChild("tbe|building", first, LOST), ScriptedChild("dies|checking", 0.1, KILLED)
    )
    assert found == (("oom", f"rank 1: {KILLED}"), "dies|checking")


def test_the_rank_that_failed_first_is_named_and_the_others_are_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranks_module, "GRACE_SECONDS", 1.0)
    waiting = ScriptedChild("waits", 600.0, [])
    failed = ChildDied("error", "ValueError: a bad batch", answered=True)
    fails = ScriptedChild("fails", 0.0, failed)
    found = receive(ScriptedChild("tbe", 0.3, LOST, after=fails), fails, waiting)
    assert found == (("error", "rank 1: ValueError: a bad batch"), "fails")
    assert waiting.killed.is_set()


def test_the_records_are_those_of_the_first_rank() -> None:
    assert receive(ScriptedChild("", 0.1, ["record"]), ScriptedChild("", 0.0, [])) == (
        ["record"],
        "",
    )


def test_an_interrupt_ends_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the pool would wait for its threads, which wait for the ranks' records."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ranks_module, "wait", interrupted)
    children = ScriptedChild("tbe", 5.0, []), ScriptedChild("tbe", 5.0, [])
    with pytest.raises(KeyboardInterrupt):
        receive(*children)
    assert all(child.killed.is_set() for child in children)


@pytest.mark.slow
def test_two_ranks_of_a_run(tmp_path: Path, smoke_host: SmokeHost) -> None:
    """A failure and a death on rank 1 are rows; the rest is measured on both ranks."""
    (tmp_path / "harmful.py").write_text(CONTENDERS)
    (tmp_path / "contenders.yaml").write_text(TABLE)
    words = ["+experiment=tbe_vs_torch", "timing=smoke", "device=cpu", "device.ranks=2"]
    words += ["timing.max_cells=1", "contenders=[tbe,fails_in_step,dies]"]
    words += ["report=tables", f"report.folder={tmp_path}/runs"]
    variables = {"EMBLIB_CONTENDERS": str(tmp_path)}
    status, output, errors = smoke_host.run(words, tmp_path, variables)
    assert status == 5, output + errors
    (points,) = (tmp_path / "runs").glob("*/*/points.jsonl")
    by_arm = {r["arm"]: r for r in read_records(points.parent)}
    assert by_arm["dies"]["status"] == "oom"
    assert "rank 1: the process was killed from outside" in by_arm["dies"]["reason"]
    assert by_arm["fails_in_step"]["status"] == "error"
    assert "rank 1: ValueError: not on this rank" in by_arm["fails_in_step"]["reason"]
    good = by_arm["tbe"]
    assert (good["status"], good["world_size"]) == ("ok", 2)
    assert good["samples"]["step"]
