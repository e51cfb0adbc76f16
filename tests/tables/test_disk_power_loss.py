"""A DiskStore after power failures: every order in which writes may have reached the disk."""

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from emblib import TableSpec
from emblib.optim import State
from emblib.tables import journal
from emblib.tables.disk import DiskStore
from emblib.tables.durable_files import ChecksumError
from tests.tables.power_loss import (
    Point,
    Recorder,
    Replay,
    every_outcome,
    in_memory,
    put,
)

Images = list[Tensor]


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """A directory in memory, if there is such: thousands of stores are opened in it."""
    with in_memory() as path:
        yield path


class Expected(NamedTuple):
    """What may be found: commit `acknowledged`, or the next one; or a refusal."""

    acknowledged: int  # -1: nothing, 0: a new store
    under_way: bool = False
    may_refuse: bool = False
    refusal: str = ""  # what a refusal must say


class History:
    """A store that is written to, with what each commit left."""

    def __init__(self, directory: Path, tables: list[TableSpec], patch: pytest.MonkeyPatch) -> None:
        self.tables, self.commits = tables, {}
        self.epoch, self.overwritten, self.recovering = 0, False, False
        self.recorder = Recorder(directory)
        self.recorder.on_sync = self._on_sync
        self.recorder.expected = Expected(0)
        directory.mkdir(parents=True)
        self.recorder.start(patch)
        self.store = self.open(directory)
        self._note(0)
        self.generator = torch.Generator().manual_seed(0)

    def open(self, directory: Path) -> DiskStore:
        states = [State("sum", per_row=True)]
        return DiskStore(directory, self.tables, torch.float32, states, torch.float32)

    @staticmethod
    def images(store: DiskStore) -> Images:
        return [t.view(torch.uint8).clone() for t in (store.weights, *store.states)]

    def _note(self, epoch: int) -> None:
        self.commits[epoch] = self.images(self.store)

    def _on_sync(self, path: Path) -> None:
        """Commits and recoveries first sync the journal; from then on all can be undone."""
        expected = self.recorder.expected
        assert isinstance(expected, Expected)
        if (expected.under_way or self.recovering) and not self.overwritten:
            self.recorder.expected = expected._replace(may_refuse=False)

    def write(self, *rows: int) -> None:
        """New bytes in rows, one after the other, as a training step would."""
        numbers = torch.tensor(rows)
        self.store.protect(numbers)
        self.recorder.expect(Expected(self.epoch, may_refuse=True))
        for row in rows:
            first = 0
            for spec, start in self.offsets():
                if first <= row < first + spec.rows:
                    at = start + (row - first) * spec.dim
                    self.store.weights[at : at + spec.dim] = self.random(spec.dim)
                first += spec.rows
            self.store.states[0][row] = self.random(1)[0]
            self.recorder.look(f"row {row}")

    def offsets(self) -> Iterator[tuple[TableSpec, int]]:
        starts = itertools.accumulate((spec.rows * spec.dim for spec in self.tables), initial=0)
        return zip(self.tables, starts, strict=False)

    def random(self, count: int) -> Tensor:
        return torch.rand(count, generator=self.generator)

    def overwrite(self) -> None:
        """New bytes everywhere, without a journal."""
        self.recorder.expect(Expected(self.epoch, may_refuse=self.epoch > 0))
        self.overwritten = True
        with self.store.writing_everything():
            if self.epoch:
                refusal = "mix old and new rows"
                self.recorder.expect(Expected(self.epoch, may_refuse=True, refusal=refusal))
            for tensor in (self.store.weights, *self.store.states):
                tensor.copy_(self.random(tensor.numel()))
                self.recorder.look("overwritten")

    def commit(self) -> None:
        """A commit, and what must be found from then on."""
        self._note(self.epoch + 1)
        expected = Expected(self.epoch, under_way=True, may_refuse=self.epoch > 0)
        self.recorder.expect(expected)
        self.store.commit([float(self.epoch + 1)])
        self.epoch += 1
        self.overwritten = False
        self.recorder.expect(Expected(self.epoch))

    def end_and_recover(self) -> None:
        """The process ends, not the machine; the next one goes back to the last commit."""
        self.store.close()
        self.recorder.expect(Expected(self.epoch, may_refuse=True))
        self.recovering = True
        self.store = self.open(self.recorder.directory)
        self.recovering = False
        assert all(map(torch.equal, self.images(self.store), self.commits[self.epoch]))
        self.recorder.expect(Expected(self.epoch))

    def judge(self, directory: Path, expected: object, label: str) -> str:
        """Open what a failure left; fail where it is anything that it must not be."""
        assert isinstance(expected, Expected)
        where = f"at {label!r}, expected {expected}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                store = self.open(directory)
            store.verify_all()
        except (RuntimeError, ValueError) as error:
            if not expected.may_refuse or expected.refusal not in str(error):
                raise AssertionError(f"refused {where}") from error
            return "refused"
        found = 0 if store.is_new else int(store.committed_numbers[0])
        allowed = {expected.acknowledged} | (
            {expected.acknowledged + 1} if expected.under_way else set()
        )
        assert found in allowed, f"found commit {found} {where}"
        same = all(map(torch.equal, self.images(store), self.commits[found]))
        store.close()
        assert same, f"not what commit {found} left, {where}"
        return f"commit {found}"


def failures(history: History, directory: Path, **options: int) -> tuple[Replay, list[Point]]:
    """A replay of all that was recorded, which has yet to run."""
    history.store.close()
    history.recorder.close()
    return Replay(directory, history.judge, **options), history.recorder.points


def trained(directory: Path, tables: list[TableSpec], patch: pytest.MonkeyPatch) -> History:
    """A new store, its first commit, and two epochs more."""
    history = History(directory, tables, patch)
    history.overwrite()
    history.commit()
    last = sum(spec.rows for spec in tables) - 1
    history.write(0, last)
    history.write(1)
    history.commit()
    history.write(last)
    return history


SMALL = [TableSpec(3, 4, "a"), TableSpec(2, 8, "b")]


def test_every_order_of_writes_of_a_small_store(memory_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        history = trained(memory_path / "live", SMALL, patch)
        history.end_and_recover()
        history.write(4)
        history.commit()
        history.overwrite()
        history.commit()
        replay, points = failures(history, memory_path / "replayed", most=3000)
    with pytest.MonkeyPatch.context() as patch:
        replay.run(points, patch)
    assert "sampled" not in replay.done
    assert all(replay.done[f"commit {n}"] for n in range(5))
    assert replay.done["refused"]


@pytest.mark.parametrize("samples", [4, pytest.param(150, marks=pytest.mark.slow)])
def test_orders_of_writes_of_a_store_of_several_pages(samples: int, memory_path: Path) -> None:
    """Torn pages among them: each sector of a page for itself."""
    with pytest.MonkeyPatch.context() as patch:
        history = trained(memory_path / "live", [TableSpec(70, 32, "a")], patch)
        history.write(*range(3, 70, 5))
        history.commit()
        history.overwrite()
        history.commit()
        replay, points = failures(history, memory_path / "replayed", most=samples, samples=samples)
    with pytest.MonkeyPatch.context() as patch:
        replay.run(points, patch)
    assert replay.done["sampled"] > 20
    assert all(replay.done[f"commit {n}"] for n in range(5))
    assert replay.done["refused"]


def test_power_that_fails_again_while_the_store_recovers(memory_path: Path) -> None:
    """What could be led back to a commit still can, however far the recovery came."""
    with pytest.MonkeyPatch.context() as patch:
        history = trained(memory_path / "live", SMALL, patch)
        _, points = failures(history, memory_path)
    kept = points[-1]
    assert kept.expected == Expected(2, may_refuse=True)
    outcomes = every_outcome(kept, 512, 3000)
    assert outcomes is not None
    recovered, recoveries = 0, []
    for number, outcome in enumerate(outcomes):
        directory = memory_path / str(number)
        put(outcome, directory)
        recorder = Recorder(directory, expected=Expected(2))
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            patch.setattr(journal, "boot_id_of_machine", lambda: b"after the first".ljust(36))
            recorder.start(patch)
            with contextlib.suppress(ChecksumError):
                history.open(directory).close()
                recoveries += recorder.points
                recovered += 1
        recorder.close()
    assert 1 < recovered < len(outcomes)
    replay = Replay(memory_path / "replayed", history.judge, most=3000)
    with pytest.MonkeyPatch.context() as patch:
        replay.run(recoveries, patch)
    assert replay.done.keys() == {"exhaustive", "commit 2"}
