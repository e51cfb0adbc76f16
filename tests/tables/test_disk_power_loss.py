"""A DiskStore after power failures: every order in which writes may have reached the disk."""

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
from emblib.tables.disk import DiskStore
from tests.tables.power_loss import Point, Recorder, Replay

Images = list[Tensor]


class Expected(NamedTuple):
    """What may be found: commit `acknowledged`, or the next one; or a refusal."""

    acknowledged: int  # -1: nothing, 0: a new store
    under_way: bool = False
    may_refuse: bool = False


class History:
    """A store that is written to, with what each commit left."""

    def __init__(self, directory: Path, tables: list[TableSpec], patch: pytest.MonkeyPatch) -> None:
        self.tables, self.commits = tables, {}
        self.recorder = Recorder(directory)
        self.recorder.on_sync = self._on_sync
        self.recorder.expected = Expected(0)
        directory.mkdir(parents=True)
        self.recorder.start(patch)
        self.store = self.open(directory)
        self.epoch = 0
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
        """From when the journal is on the disk as a whole, a commit can be undone or completed."""
        expected = self.recorder.expected
        assert isinstance(expected, Expected)
        if expected.under_way and path.name == "journal":
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
        with self.store.writing_everything():
            for tensor in (self.store.weights, *self.store.states):
                tensor.copy_(self.random(tensor.numel()))
                self.recorder.look("overwritten")

    def commit(self, *, bulk: bool = False) -> None:
        """A commit, and what must be found from then on."""
        self._note(self.epoch + 1)
        expected = Expected(self.epoch, under_way=True, may_refuse=True)
        if bulk and self.epoch == 0:
            expected = expected._replace(may_refuse=False)
        self.recorder.expect(expected)
        self.store.commit([float(self.epoch + 1)])
        self.epoch += 1
        self.recorder.expect(Expected(self.epoch))

    def judge(self, directory: Path, expected: object, label: str) -> str:
        """Open what a failure left; fail where it is anything that it must not be."""
        assert isinstance(expected, Expected)
        where = f"at {label!r}, expected {expected}"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                store = self.open(directory)
            store.check_all()
        except (RuntimeError, ValueError) as error:
            if not expected.may_refuse:
                raise AssertionError(f"refused {where}") from error
            return "refused"
        found = 0 if store.created else int(store.committed_numbers[0])
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


def test_every_order_of_writes_of_a_small_store(tmp_path: Path) -> None:
    tables = [TableSpec(3, 4, "a"), TableSpec(2, 8, "b")]
    with pytest.MonkeyPatch.context() as patch:
        history = History(tmp_path / "live", tables, patch)
        history.overwrite()
        history.commit(bulk=True)
        history.write(0, 4)
        history.write(1)
        history.commit()
        history.write(4)
        history.commit()
        replay, points = failures(history, tmp_path / "replayed", most=3000)
    with pytest.MonkeyPatch.context() as patch:
        replay.run(points, patch)
    print(len(points), replay.done)
    assert "sampled" not in replay.done
    assert all(replay.done[f"commit {n}"] for n in range(4))
    assert replay.done["refused"]
