"""Sinks: stores of the records of a change log, for one writer and any number of readers.

`DirectorySink` appends records to files, the segments, numbered from 1 on. An incomplete record at
the end of the last segment is being written, or its writer was killed; the next writer cuts it off.
Anywhere else an incomplete record is damage. `RedisSink` adds records to a stream.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from emblib.online.records import PREFIX_BYTES, LogError, body_bytes, is_complete
from emblib.specs import check_count
from emblib.tables.durable_files import name_file, sync_directory

_SUFFIX = ".log"


class StoredRecord(NamedTuple):
    """A record as `Sink.read` yields it.

    Attributes:
        position: position behind the record, to read on from.
        data: bytes of the record.
        location: name of the record in error messages.
    """

    position: str
    data: bytes
    location: str


class Sink(Protocol):
    """A stored log of one rank, for one writer and any number of readers.

    A position is a text that only the sink understands. Methods may raise any exception; the writer
    then calls `append` with the same record again, also if `trim` after it has failed, so a record
    may be there twice. `append`, `trim` and `close` are called by one thread at a time, and `read`
    by any.

    Example:
        >>> import tempfile
        >>> sink: emblib.online.Sink = emblib.online.DirectorySink(tempfile.mkdtemp())
    """

    def append(self, record: bytes, *, starts_segment: bool = False) -> str:
        """Append a record completely or not at all; return the position behind it.

        Args:
            record: bytes of the record.
            starts_segment: whether `trim` may later remove all records before this one.
        """

    def read(self, after: str | None = None) -> Iterator[StoredRecord]:
        """Yield the complete records behind a position, in order; None begins with the oldest.

        Each is an object with the attributes of `StoredRecord`.
        If the records at the position were removed, it begins with the oldest one too; a sink
        should do so for a position behind the end of the log, where a new log has begun. The caller
        must not pass a position of another log. The iterator ends at the newest record.
        """

    def trim(self, before: str) -> None:
        """Remove the records before a record that `append` wrote with `starts_segment`.

        `before` is the position that `append` returned for it.
        """

    def close(self) -> None:
        """Release what `append` has opened; a later `append` opens it again."""


def check_sink(sink: Any) -> Sink:
    """Return `sink`.

    Raises:
        TypeError: it has no method `read`, for example the path of a directory.
    """
    if not callable(getattr(sink, "read", None)):
        raise TypeError(f"a log is in a sink, e.g. DirectorySink(path), got {sink!r}")
    checked_sink: Sink = sink
    return checked_sink


def _mark_of(record: bytes) -> str:
    """Return the checksum of the prefix that a record begins with, which tells segments apart."""
    return record[PREFIX_BYTES - 4 : PREFIX_BYTES].hex()


class DirectorySink:
    """The files of a log in a directory, which trainer and followers share.

    Args:
        directory: directory of the log, created when the first record is written.
        segment_bytes: maximum bytes of a file, unless one record has more; then another is begun.

    Raises:
        TypeError: `directory` is not a path, or `segment_bytes` is not an int.
        ValueError: `segment_bytes` is below 1.
        BlockingIOError: another process writes to the directory; raised by `append`.
        LogError: the last file is damaged; raised by `append`.
        OSError: the record could not be written; raised by `append`.

    Example:
        >>> import tempfile
        >>> sink = emblib.online.DirectorySink(tempfile.mkdtemp())
        >>> len(list(sink.read()))
        0
    """

    def __init__(self, directory: str | Path, segment_bytes: int = 64 << 20) -> None:
        self.directory = Path(directory).expanduser().absolute()
        self._max_segment_bytes = check_count("segment_bytes", segment_bytes)
        self._file = self._lock = -1  # handles of the last segment and of the lock; -1 if not open
        self._process = os.getpid()  # which opened them; a forked one has copies of the handles
        self._segment_number, self._segment_bytes = 0, 0  # of the last segment
        self._segment_mark = ""

    def __repr__(self) -> str:
        return f"DirectorySink({str(self.directory)!r})"

    def append(self, record: bytes, *, starts_segment: bool = False) -> str:
        """See `Sink`; the record is synced to the disk."""
        if self._process != os.getpid():
            self.close()  # what follows finds the lock of the other process
        if self._lock >= 0:
            self._check_files()
        if self._lock < 0:
            self._open()
        num_bytes = self._segment_bytes + len(record)
        is_full = self._segment_bytes > 0 and num_bytes > self._max_segment_bytes
        if self._file < 0 or is_full or (starts_segment and self._segment_bytes):
            self._next_segment()
        os.ftruncate(self._file, self._segment_bytes)  # where an earlier error could not
        try:
            remaining = memoryview(record)
            while remaining:
                remaining = remaining[os.write(self._file, remaining) :]
            os.fsync(self._file)
        except BaseException as error:
            name_file(error, self._segment_path(self._segment_number))
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._segment_bytes)
            raise
        if not self._segment_bytes:
            self._segment_mark = _mark_of(record)
        self._segment_bytes += len(record)
        return f"{self._segment_number}:{self._segment_bytes}:{self._segment_mark}"

    def _check_files(self) -> None:
        """Raise FileNotFoundError if an open file was removed; the next `append` begins another."""
        files = [file for file in (self._lock, self._file) if file >= 0]
        if any(os.fstat(file).st_nlink == 0 for file in files):
            self.close()
            raise FileNotFoundError(
                errno.ENOENT,
                "files of the log were removed while it wrote them; what they had is lost, and "
                "followers need a snapshot: call snapshot(step) of the change log",
                str(self.directory),
            )

    def _open(self) -> None:
        """Take the lock of the writer, and cut off the record that the last one left behind."""
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise BlockingIOError(
                f"another log writes to {self.directory}: each rank needs a directory of its own"
            ) from error
        try:
            segment_numbers = self._stable_segment_numbers()
            if segment_numbers:
                self._segment_number, end = segment_numbers[-1], 0
                for stored in self._read_segment(self._segment_number, 0, is_last=True):
                    end = int(stored.position.split(":")[1])
                os.truncate(self._segment_path(self._segment_number), end)
        except BaseException:
            os.close(lock)
            raise
        self._process, self._lock = os.getpid(), lock

    def _next_segment(self) -> None:
        """Start a new file, whose name is durable before a record is in it."""
        path = self._segment_path(self._segment_number + 1)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        try:
            sync_directory(self.directory)
        except BaseException:
            os.close(file)
            path.unlink(missing_ok=True)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self._segment_number, self._segment_bytes = file, self._segment_number + 1, 0

    def read(self, after: str | None = None) -> Iterator[StoredRecord]:
        """See `Sink`; a position in another log of the directory begins with the oldest record.

        Raises:
            LogError: a record is damaged.
            OSError: a file cannot be read.
        """
        segment_numbers = self._stable_segment_numbers()
        first_segment, first_byte = 0, 0
        if after and segment_numbers:
            segment, byte, mark = after.split(":")
            if self._has_position(int(segment), int(byte), mark, last_segment=segment_numbers[-1]):
                first_segment, first_byte = int(segment), int(byte)
        for number in segment_numbers:
            if number >= first_segment:
                begin = first_byte if number == first_segment else 0
                yield from self._read_segment(number, begin, is_last=number == segment_numbers[-1])

    def _has_position(self, segment: int, byte: int, mark: str, *, last_segment: int) -> bool:
        """Return whether the log has a position, or has trimmed its segment.

        If it has not, the directory was emptied, and has another log.
        """
        try:
            with open(self._segment_path(segment), "rb") as file:
                is_of_log = _mark_of(file.read(PREFIX_BYTES)) == mark
                return is_of_log and byte <= os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return segment < last_segment

    def _read_segment(self, number: int, begin: int, *, is_last: bool) -> Iterator[StoredRecord]:
        """Yield the records of one file from `begin` on; stop at one that is being written."""
        path, offset, mark = self._segment_path(number), begin, ""
        try:
            file = open(path, "rb")  # noqa: SIM115 - closed below
        except FileNotFoundError:
            return  # trimmed since it was listed
        with file:
            num_bytes = os.fstat(file.fileno()).st_size
            mark = _mark_of(file.read(PREFIX_BYTES))
            file.seek(begin)
            while offset < num_bytes:
                location = f"{path} at byte {offset}"
                prefix = file.read(PREFIX_BYTES)
                is_torn = len(prefix) < PREFIX_BYTES
                num_body_bytes = 0 if is_torn else body_bytes(prefix, location)
                data = prefix + file.read(num_body_bytes)
                end = offset + PREFIX_BYTES + num_body_bytes
                if is_torn or end > num_bytes or not is_complete(data):
                    if is_last and end >= num_bytes:
                        return
                    raise LogError(
                        f"{location} is damaged: a record is not whole, and others follow; copy "
                        "the log again, or have the trainer begin another"
                    )
                offset = end
                yield StoredRecord(f"{number}:{offset}:{mark}", data, location)

    def trim(self, before: str) -> None:
        """See `Sink`; files are deleted, the newest first.

        A reader in an older file thus continues with the segment of the position.
        """
        for number in reversed(self._stable_segment_numbers()):
            if number < int(before.split(":")[0]):
                self._segment_path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files, and let another process write; may be repeated.

        A forked process closes its own handles: the parent writes on.
        """
        if self._lock >= 0 and self._process == os.getpid():
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # processes that were forked have it, too
        # Each handle is forgotten before it is closed, so that no interrupt lets it be closed
        # twice: its number may be that of another file by then.
        file, self._file, self._segment_bytes = self._file, -1, 0
        if file >= 0: os.close(file)  # fmt: skip  # noqa: E701
        lock, self._lock = self._lock, -1
        if lock >= 0: os.close(lock)  # fmt: skip  # noqa: E701

    def _stable_segment_numbers(self) -> list[int]:
        """Return the numbers of the files; the writer may delete some while they are listed."""
        numbers, previous_numbers = self._segment_numbers(), None
        while numbers != previous_numbers:
            numbers, previous_numbers = self._segment_numbers(), numbers
        return numbers

    def _segment_numbers(self) -> list[int]:
        """Return the numbers of the existing files, ascending."""
        names = (path.stem for path in self.directory.glob(f"*{_SUFFIX}"))
        return sorted(int(name) for name in names if name.isdigit())

    def _segment_path(self, number: int) -> Path:
        """Return the path of a file by its number."""
        return self.directory / f"{number:012d}{_SUFFIX}"


def _id_numbers(position: str) -> list[int]:
    """Return the time in milliseconds and the number in the id of an entry of a stream."""
    return [*map(int, position.split("-"))]


class RedisSink:
    """The log as a stream of a Redis server.

    A record is one entry of the stream, of at most 512 MB, the limit of Redis. Redis decides when
    it writes to its disk: set `appendonly yes` there for a log that outlives a crash of the server.

    Args:
        client: a `redis.Redis` that returns bytes (no `decode_responses`), or the URL of a server.
        stream: key of the stream, one per rank.

    Raises:
        ImportError: `client` is a URL, and the package `redis` is not installed.
        ValueError: `client` returns texts.
        Exception: methods raise the errors of the client.

    Example:
        >>> client = object()  # redis.Redis(host="localhost")
        >>> emblib.online.RedisSink(client, "model/rank_0").stream
        'model/rank_0'
    """

    _ENTRIES_PER_READ = 16  # not measured

    def __init__(self, client: Any, stream: str) -> None:
        self.stream = stream
        if isinstance(client, str):
            try:
                import redis
            except ImportError as error:
                raise ImportError(
                    "RedisSink needs the client of Redis: pip install redis"
                ) from error
            client = redis.Redis.from_url(client)
        pool = getattr(client, "connection_pool", None)
        if getattr(pool, "connection_kwargs", {}).get("decode_responses"):
            raise ValueError("records are bytes: make the client without decode_responses")
        self._client = client

    def __repr__(self) -> str:
        return f"RedisSink(stream {self.stream!r})"

    def append(self, record: bytes, *, starts_segment: bool = False) -> str:
        """See `Sink`; `starts_segment` has no effect."""
        position = self._client.xadd(self.stream, {b"record": record})
        return str(position.decode())

    def read(self, after: str | None = None) -> Iterator[StoredRecord]:
        """See `Sink`."""
        after = after or "0-0"
        newest = self._client.xrevrange(self.stream, count=1)
        if newest and _id_numbers(newest[0][0].decode()) < _id_numbers(after):
            after = "0-0"  # the stream was deleted, and has a new log by an earlier clock
        while response := self._client.xread({self.stream: after}, count=self._ENTRIES_PER_READ):
            for position, fields in dict(response)[self.stream.encode()]:
                after = position.decode()
                record = fields.get(b"record", b"")  # `decode` refuses the entry of another program
                yield StoredRecord(after, record, f"{self.stream} at {after}")

    def trim(self, before: str) -> None:
        """See `Sink`; records need not have been written with `starts_segment`."""
        self._client.xtrim(self.stream, minid=before, approximate=False)

    def close(self) -> None:
        """Close the connections of the client."""
        self._client.close()
