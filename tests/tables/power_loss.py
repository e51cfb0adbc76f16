"""What a power failure may leave of a store's files: recorded, then replayed.

A `Recorder` looks at the files of a directory before and after every call of
`emblib.tables.durable_files`, and wherever a test asks it to. After a power failure the disk may
hold, for each sector, what it held at the last sync or any content it had since; any size the file
had since; and for each name any file it named since the directory's last sync. All combinations are
legal but one kind: what was written after a file was cut is there only if the cut is.
"""

import contextlib
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from emblib.tables import durable_files, journal

IGNORED = ("lock", ".new")  # nothing is read from them
_CALLS = ("open_file", "write_at", "resize", "allocate", "rename", "remove")


@dataclass(frozen=True)
class Point:
    """A moment at which the power may fail, with all that the disk may hold then."""

    label: str
    names: dict[str, list[int | None]]  # the files that each name may lead to
    contents: dict[int, list[bytes]]  # of each file since its last sync, the oldest first
    expected: object  # as the test said


@dataclass
class Recorder:
    """The files of a directory and what of them is on the disk, at every moment so far."""

    directory: Path
    points: list[Point] = field(default_factory=list)
    expected: object = None
    on_sync: Callable[[Path], None] = lambda path: None
    _contents: dict[int, list[bytes]] = field(default_factory=dict)
    _names: list[dict[str, int]] = field(default_factory=list)
    _open: dict[int, int] = field(default_factory=dict)  # so that no file number comes again

    def start(self, patch: pytest.MonkeyPatch) -> None:
        """Take what is there as being on the disk, and follow all calls from now on."""
        self.look("start")
        self._names = self._names[-1:]
        self._contents = {number: states[-1:] for number, states in self._contents.items()}
        self.points.clear()
        for name in _CALLS:
            self._follow(patch, name)
        self._follow(patch, "sync_file", lambda handle, path: self._sync(path))
        self._follow(patch, "sync_map", lambda mapped, path: self._sync(path))
        self._follow(patch, "sync_directory", lambda directory: self._sync_names())

    def _follow(
        self, patch: pytest.MonkeyPatch, name: str, synced: Callable[..., None] | None = None
    ) -> None:
        original = getattr(durable_files, name)

        def call(*arguments: object) -> object:
            self.look(f"before {name}")
            result = original(*arguments)
            self.look(f"after {name}")
            if synced is not None:
                synced(*arguments)
                self._add(f"synced by {name}")
            return result

        patch.setattr(durable_files, name, call)

    def expect(self, expected: object) -> None:
        """Say what must be found from now on."""
        self.look("before")
        self.expected = expected
        self._add(f"expected {expected}")

    def look(self, label: str) -> None:
        """Note what changed, and that the power may fail now."""
        if not self.directory.exists():
            return
        names, changed = {}, False
        for path in sorted(self.directory.iterdir()):
            if path.name.endswith(IGNORED[1]) or path.name == IGNORED[0]:
                continue
            number, data = path.stat().st_ino, path.read_bytes()
            names[path.name] = number
            if number not in self._contents:
                self._open[number] = os.open(path, os.O_RDONLY)
                self._contents[number] = [b""]
            if self._contents[number][-1] != data:
                self._contents[number].append(data)
                changed = True
        if not self._names or self._names[-1] != names:
            self._names.append(names)
            changed = True
        if changed:
            self._add(label)

    def _sync(self, path: Path) -> None:
        number = path.stat().st_ino
        data = path.read_bytes()
        if number not in self._contents:
            self._open[number] = os.open(path, os.O_RDONLY)
        self._contents[number] = [data]
        self.on_sync(path)

    def _sync_names(self) -> None:
        self._names = self._names[-1:]

    def _add(self, label: str) -> None:
        every = {name for names in self._names for name in names}
        names = {
            name: list(dict.fromkeys(mapping.get(name) for mapping in self._names or [{}]))
            for name in sorted(every)
        }
        used = {number for files in names.values() for number in files if number is not None}
        contents = {number: list(self._contents[number]) for number in used}
        self.points.append(Point(label, names, contents, self.expected))

    def close(self) -> None:
        """Let go of the files."""
        for handle in self._open.values():
            os.close(handle)
        self._open = {}


def _alternatives(states: list[bytes], sector: int) -> list[list[list[bytes | int]]]:
    """For each cut that may have happened: for each sector, and for the size, what it may be."""
    spans: list[list[bytes]] = [[]]
    for state in states:
        if spans[-1] and len(state) < len(spans[-1][-1]):
            spans.append([])
        spans[-1].append(state)
    result = []
    for span in spans:
        longest = max(len(state) for state in span)
        choices: list[list[bytes | int]] = [list(dict.fromkeys(len(state) for state in span))]
        for at in range(0, longest, sector):
            parts = (state[at : at + sector].ljust(sector, b"\0") for state in span)
            choices.append(list(dict.fromkeys(parts)))
        result.append(choices)
    return result


def _made(choice: tuple[bytes | int, ...]) -> bytes:
    size, *sectors = choice
    assert isinstance(size, int)
    return b"".join(part for part in sectors if isinstance(part, bytes))[:size].ljust(size, b"\0")


def _files(states: list[bytes], sector: int, most: int) -> Iterator[bytes] | None:
    """All that a file may hold, or None where that is more than `most`."""
    spans = _alternatives(states, sector)
    total = 0
    for span in spans:
        count = 1
        for choices in span:
            count *= len(choices)
        total += count
    if total > most:
        return None
    return (_made(choice) for span in spans for choice in itertools.product(*span))


def every_outcome(point: Point, sector: int, most: int) -> list[dict[str, bytes]] | None:
    """All that the directory may hold, or None where that is more than `most`."""
    choices: list[list[bytes | None]] = []
    for files in point.names.values():
        found: dict[bytes | None, None] = {}
        for number in files:
            if number is None:
                found[None] = None
                continue
            contents = _files(point.contents[number], sector, most)
            if contents is None:
                return None
            found.update(dict.fromkeys(contents))
        choices.append(list(found))
    count = 1
    for alternatives in choices:
        count *= len(alternatives)
    if count > most:
        return None
    return [_directory(point, choice) for choice in itertools.product(*choices)]


def some_outcomes(
    point: Point, sector: int, count: int, chance: random.Random
) -> list[dict[str, bytes]]:
    """All that reached the disk, nothing that was not synced, and `count` combinations between."""

    def pick(states: list[bytes]) -> bytes:
        how = chance.choice(["oldest", "newest", "any", "any"])
        spans = _alternatives(states, sector)
        if how != "any":
            return states[0] if how == "oldest" else states[-1]
        return _made(tuple(chance.choice(choices) for choices in chance.choice(spans)))

    def outcome(
        which: Callable[[list[int | None]], int | None], pick: Callable[[list[bytes]], bytes]
    ) -> dict[str, bytes]:
        numbers = (which(files) for files in point.names.values())
        picked = [None if n is None else pick(point.contents[n]) for n in numbers]
        return _directory(point, picked)

    result = [outcome(lambda f: f[i], lambda s: s[i]) for i in (0, -1)]  # noqa: B023
    return result + [outcome(chance.choice, pick) for _ in range(count)]


def _directory(
    point: Point, contents: "tuple[bytes | None, ...] | list[bytes | None]"
) -> dict[str, bytes]:
    named = zip(point.names, contents, strict=True)
    return {name: data for name, data in named if data is not None}


@dataclass
class Replay:
    """Opens what power failures may leave. `judge` opens the directory and says what it found."""

    directory: Path
    judge: Callable[[Path, object, str], str]
    sector: int = 512
    most: int = 400
    samples: int = 30
    seed: int = 0
    done: dict[str, int] = field(default_factory=dict)
    _seen: set[int] = field(default_factory=set)

    def run(self, points: list[Point], patch: pytest.MonkeyPatch) -> None:
        """Judge what every point may leave: all of it where that is not too much."""
        patch.setattr(journal, "boot_id_of_machine", lambda: b"after the failure".ljust(36))
        for name in ("sync_file", "sync_map", "sync_directory"):
            patch.setattr(durable_files, name, lambda *_: None)
        chance = random.Random(self.seed)
        for point in points:
            outcomes = every_outcome(point, self.sector, self.most)
            kind = "exhaustive" if outcomes is not None else "sampled"
            if outcomes is None:
                outcomes = some_outcomes(point, self.sector, self.samples, chance)
            self.done[kind] = self.done.get(kind, 0) + 1
            for outcome in outcomes:
                self._open(point, outcome)

    def _open(self, point: Point, outcome: dict[str, bytes]) -> None:
        key = hash((str(point.expected), *sorted(outcome.items())))
        if key in self._seen:
            return
        self._seen.add(key)
        put(outcome, self.directory)
        found = self.judge(self.directory, point.expected, point.label)
        self.done[found] = self.done.get(found, 0) + 1


def put(outcome: dict[str, bytes], directory: Path) -> None:
    """Make `directory` hold these files alone."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, data in outcome.items():
        (directory / name).write_bytes(data)


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A directory in memory, if there is such: what reaches a disk is reckoned, not measured."""
    root = "/dev/shm" if os.path.ismount("/dev/shm") else None
    with tempfile.TemporaryDirectory(dir=root) as name:
        yield Path(name)
