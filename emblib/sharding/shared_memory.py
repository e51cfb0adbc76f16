"""All-to-alls between the CPU processes of one machine: through memory that they share.

Over the loopback device messages go through the kernel, by threads that must first wake up. Here a
rank copies what it sends into memory of its own that the others have mapped, and each of them
copies its part out. Nothing but the first meeting needs the process group.

Every rank has one anonymous file, as large as the memory of the machine but empty where nothing was
written, which all have mapped from the start: what a rank has posted is there for the others also
when it is gone. It begins with a *board* of words: how many all-to-alls the rank has posted, and
for each of the last `_ENTRIES` in which *slab* of the file the data are, and where the part of each
rank begins and how large it is: that of all ranks may be the same. Who has copied its part marks
the slab with the number of the all-to-all. A slab is used again when everybody has; while none is
free, or none is large enough, there is another one, so that nobody who starts an all-to-all ever
waits.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import struct
import time
import uuid
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from emblib.ops.signals import signal_set_, signal_wait
from emblib.sharding.failures import is_gone
from emblib.sharding.groups_of_ranks import Ranks, sends_from_hosts

_ENTRIES = 1024  # all-to-alls that a board remembers
_ENTRY_WORDS = 3  # of an entry, before where the parts begin: number, slab, content
_SLABS = 256
_LEAST_BYTES = 1 << 14  # of a slab
_LARGE_BYTES = 1 << 18  # worth more than one thread
_LOOK_SECONDS = 0.1  # between two looks whether the others live, and at signals of this process
_POSTED, _CLOSED, _NAME, _MARKS = 0, 1, 2, 8  # words of a board


class Content(enum.IntEnum):
    """What an all-to-all sends. Ranks that send unlike things have lost step with each other."""

    VALUES = 0
    SIZES = 1
    IDS = 2
    WEIGHTS = 3
    ROWS = 4
    GRADIENTS = 5
    NUMBERS = 6

    @property
    def words(self) -> str:
        """Its name in a message."""
        return {
            Content.SIZES: "the sizes of a batch",
            Content.IDS: "the ids of a batch",
            Content.WEIGHTS: "the weights of ids",
            Content.ROWS: "rows",
            Content.GRADIENTS: "gradients of rows",
            Content.NUMBERS: "numbers of a pipeline",
        }.get(self, "values")


class _Memory:
    """The file of one rank, mapped here: words of its board, and bytes of its slabs."""

    def __init__(self, file: int, size: int) -> None:
        self.map = mmap.mmap(file, os.fstat(file).st_size)
        self.words = memoryview(self.map).cast("q")
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.signals = self.bytes[: self.board_bytes(size)].view(torch.int64)
        self._size = size
        self._entry = struct.Struct(f"={_ENTRY_WORDS + 2 * size}q")

    @staticmethod
    def board_bytes(size: int) -> int:
        """Of the board of one of `size` ranks, in whole pages."""
        words = _MARKS + _SLABS * size + _ENTRIES * (_ENTRY_WORDS + 2 * size)
        return _pages(8 * words)

    def mark_of(self, slab: int, rank: int) -> int:
        """The word in which a rank says with which all-to-all it has read a slab."""
        return _MARKS + slab * self._size + rank

    def _entry_at(self, number: int) -> int:
        return 8 * self.mark_of(_SLABS, 0) + number % _ENTRIES * self._entry.size

    def post(
        self,
        number: int,
        slab: int,
        content: Content,
        firsts: Sequence[int],
        sizes: Sequence[int],
    ) -> None:
        """Tell of an all-to-all whose data are in place: rank r has `sizes[r]` from `firsts[r]`."""
        entry = (number, slab, content, *firsts, *sizes)
        self._entry.pack_into(self.map, self._entry_at(number), *entry)
        signal_set_(self.signals, _POSTED, number + 1)

    def read(self, number: int, rank: int) -> tuple[int, Content, int, int]:
        """The slab, what is in it, and where the part of `rank` begins and how large it is."""
        found, slab, content, *parts = self._entry.unpack_from(self.map, self._entry_at(number))
        if found != number:
            raise RuntimeError(
                f"an all-to-all was waited for after {_ENTRIES} later ones had been started"
            )
        return slab, Content(content), parts[rank], parts[self._size + rank]


class _Peer(NamedTuple):
    """Another rank, as this one sees it."""

    rank: int
    process: int
    memory: _Memory


@dataclass
class _Slab:
    """A part of this rank's file, and the all-to-all that is in it."""

    first: int
    nbytes: int
    number: int = -1


def _copy(to: Tensor, at: int, source: Tensor, first: int, nbytes: int) -> None:
    """Bytes from `first` on of one tensor to those from `at` on of another, both in one piece."""
    if nbytes == 0:
        return
    if nbytes < _LARGE_BYTES:
        # A tenth of what torch takes to slice and copy a few bytes.
        ctypes.memmove(to.data_ptr() + at, source.data_ptr() + first, nbytes)
        return
    # By all threads. It may be waited for in another mode than it was started in.
    with torch.inference_mode(to.is_inference()):
        part = source.view(-1).view(torch.uint8)[first : first + nbytes]
        to.view(-1).view(torch.uint8)[at : at + nbytes].copy_(part)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


class Link:
    """The ranks of a group that share memory; made by all of them together (`link_of`)."""

    def __init__(self, ranks: Ranks, own: _Memory, peers: Sequence[_Peer], seconds: float) -> None:
        self._rank, self._seconds = ranks.rank, seconds
        self._memory, self._peers = own, peers
        self._slabs: list[_Slab] = []
        self._end = own.board_bytes(ranks.size)
        self._number = 0
        self._dropped: list[int] = []
        weakref.finalize(self, _say_goodbye, own.signals, os.getpid())

    @property
    def nbytes(self) -> int:
        """Of the slabs of this rank."""
        return sum(slab.nbytes for slab in self._slabs)

    def start(
        self,
        sent: Tensor,
        sizes: Sequence[int],
        received: Tensor,
        came: Sequence[int],
        content: Content = Content.VALUES,
    ) -> Transfer:
        """Send the parts of `sent`; those for this rank go to `received`. Both are contiguous."""
        each, rank = sent.element_size(), self._rank
        sizes, came = [n * each for n in sizes], [n * each for n in came]
        self._check(sent, sum(sizes), sizes[rank], received, came)
        outward = sum(sizes) - sizes[rank]
        first = sum(sizes[:rank])
        number, place, slab = self._next_slab(outward)
        _copy(self._memory.bytes, slab.first, sent, 0, first)
        _copy(self._memory.bytes, slab.first + first, sent, first + sizes[rank], outward - first)
        others = (n if r != rank else 0 for r, n in enumerate(sizes))
        firsts = list(accumulate(others, initial=slab.first))[:-1]
        self._memory.post(number, place, content, firsts, sizes)
        _copy(received, sum(came[:rank]), sent, first, sizes[rank])
        return Transfer(self, number, received, came, content)

    def start_all_gather(
        self,
        sent: Tensor,
        received: Tensor,
        came: Sequence[int],
        content: Content = Content.VALUES,
    ) -> Transfer:
        """Send all of `sent` to every rank, also to this one."""
        came = [n * sent.element_size() for n in came]
        self._check(sent, sent.nbytes, sent.nbytes, received, came)
        number, place, slab = self._next_slab(sent.nbytes)
        _copy(self._memory.bytes, slab.first, sent, 0, sent.nbytes)
        firsts, sizes = [slab.first] * len(came), [sent.nbytes] * len(came)
        self._memory.post(number, place, content, firsts, sizes)
        _copy(received, sum(came[: self._rank]), sent, 0, sent.nbytes)
        return Transfer(self, number, received, came, content)

    def _check(
        self, sent: Tensor, nbytes: int, own: int, received: Tensor, came: Sequence[int]
    ) -> None:
        """Raise ValueError before anything is read or written where there is no tensor."""
        if nbytes != sent.nbytes or sum(came) != received.nbytes or own != came[self._rank]:
            raise ValueError(
                f"sizes must add up to what is sent and received, {sent.nbytes} and "
                f"{received.nbytes} bytes, and be the same for a rank's part for itself; got "
                f"{nbytes} and {sum(came)}, and {own} and {came[self._rank]} for rank {self._rank}"
            )

    def _next_slab(self, nbytes: int) -> tuple[int, int, _Slab]:
        """The number of the next all-to-all, and the slab that it may use."""
        place = self._free_slab(nbytes)
        slab = self._slabs[place]
        slab.number = number = self._number
        self._number += 1
        return number, place, slab

    def _free_slab(self, nbytes: int) -> int:
        """A slab that everybody has read and that is large enough: the smallest such, or new."""
        free = [place for place, slab in enumerate(self._slabs) if self._is_free(place, slab)]
        free.sort(key=lambda place: self._slabs[place].nbytes)
        for place in free:
            if self._slabs[place].nbytes >= nbytes:
                return place
        # A fourth more than asked for: sizes that vary a little need no other slab each time.
        slab = _Slab(self._end, _pages(max(_LEAST_BYTES, nbytes + nbytes // 4)))
        if slab.first + slab.nbytes > len(self._memory.map):
            raise MemoryError(f"{self.nbytes} bytes were sent that not all ranks have waited for")
        self._end += slab.nbytes
        if free:
            place = free[-1]
            old, self._slabs[place] = self._slabs[place], slab
            self._memory.map.madvise(mmap.MADV_REMOVE, old.first, old.nbytes)
            return place
        if len(self._slabs) == _SLABS:
            raise RuntimeError(f"more than {_SLABS} all-to-alls were started and not waited for")
        self._slabs.append(slab)
        return len(self._slabs) - 1

    def _is_free(self, place: int, slab: _Slab) -> bool:
        words, at = self._memory.words, self._memory.mark_of(place, 0)
        return all(words[at + peer.rank] > slab.number for peer in self._peers)

    def receive(self, number: int, received: Tensor, came: Sequence[int], content: Content) -> None:
        """Wait for the parts of the others and copy them."""
        for peer in self._peers:
            self._await(peer, number)
            slab, sent, first, nbytes = peer.memory.read(number, self._rank)
            if sent is not content:
                raise _out_of_step(peer.rank, sent, self._rank, content)
            if nbytes != came[peer.rank]:
                raise RuntimeError(
                    f"rank {peer.rank} sent {nbytes} bytes where rank {self._rank} "
                    f"expected {came[peer.rank]}: the ranks of a process group must call the same "
                    "collectives in the same order, with sizes that agree"
                )
            _copy(received, sum(came[: peer.rank]), peer.memory.bytes, first, nbytes)
            self._mark(peer, slab, number)
        if self._dropped:
            self._mark_dropped()

    def _mark(self, peer: _Peer, slab: int, number: int) -> None:
        # Nobody sleeps until this word changes, but what was read before must have been.
        # Where a wait failed at another rank, this slab may have later marks already.
        at = peer.memory.mark_of(slab, self._rank)
        if peer.memory.words[at] <= number:
            signal_set_(peer.memory.signals, at, number + 1)

    def drop(self, number: int) -> None:
        """Nobody will wait for this all-to-all."""
        self._dropped.append(number)

    def _mark_dropped(self) -> None:
        dropped, self._dropped = self._dropped, []
        for number in dropped:
            if all(signal_wait(p.memory.signals, _POSTED, 0, 0.0) > number for p in self._peers):
                for peer in self._peers:
                    self._mark(peer, peer.memory.read(number, self._rank)[0], number)
            else:
                self._dropped.append(number)

    def _await(self, peer: _Peer, number: int) -> None:
        """Return when a rank has posted an all-to-all; raise if it cannot any more."""
        words = peer.memory.signals
        end = time.monotonic() + self._seconds
        while signal_wait(words, _POSTED, number + 1, _LOOK_SECONDS) <= number:
            left = peer.memory.words[_CLOSED] != 0
            if left or is_gone(peer.process):
                if signal_wait(words, _POSTED, number + 1, 0.0) > number:
                    return
                raise dist.DistBackendError(
                    f"rank {peer.rank} of the process group (process {peer.process}) "
                    f"{'has left it' if left else 'has ended'} and will not come to an all-to-all"
                )
            if time.monotonic() > end:
                raise dist.DistBackendError(
                    f"rank {peer.rank} of the process group (process {peer.process}) has not come "
                    f"to an all-to-all within {self._seconds:g} s"
                )


def _out_of_step(peer: int, sent: Content, rank: int, expected: Content) -> RuntimeError:
    """Return the error of ranks that send unlike things."""
    message = (
        f"rank {peer} sent {sent.words} where rank {rank} expected {expected.words}: the ranks of "
        "a process group must call the same collectives in the same order"
    )
    if Content.GRADIENTS in (sent, expected):
        absent = peer if expected is Content.GRADIENTS else rank
        message += (
            f". The last loss of rank {absent} left out the output of a sharded collection, which "
            "that of the other rank used: every rank's loss must use it, if only times 0"
        )
    return RuntimeError(message)


class Transfer:
    """An all-to-all under way."""

    def __init__(
        self, link: Link, number: int, received: Tensor, came: Sequence[int], content: Content
    ) -> None:
        self._link: Link | None = link
        self._call = number, received, came, content
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Return when all has been received; what failed cannot be tried again."""
        if self._error is not None:
            raise self._error
        if self._link is not None:
            try:
                self._link.receive(*self._call)
            except BaseException as error:
                self._error = error
                self._link.drop(self._call[0])
                raise
            finally:
                self._link = None

    def __del__(self) -> None:
        if self._link is not None:
            self._link.drop(self._call[0])


_links: weakref.WeakKeyDictionary[dist.ProcessGroup, Link | None] = weakref.WeakKeyDictionary()


def link_of(ranks: Ranks) -> Link | None:
    """What these ranks share; None where they are not processes of one Linux machine, over gloo.

    The first call for a process group is collective over it.
    """
    group = ranks.group
    if group is None:
        return None
    if group not in _links:
        for left in [known for known in _links if not _is_registered(known)]:
            del _links[left]
        _links[group] = _meet(ranks)
    return _links[group]


def _is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether torch knows a group: it forgets those that are destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return False
    return True


class _Name(NamedTuple):
    """How the others find a rank's file, and know that it is this one."""

    machine: str
    process: int
    file: int
    name: int


def _meet(ranks: Ranks) -> Link | None:
    group = ranks.group
    assert group is not None
    file, own, told = -1, None, None
    try:
        if ranks.shared_memory and sends_from_hosts(group):
            with suppress(OSError, AttributeError):  # not Linux, or limits that forbid it
                file = os.memfd_create("emblib")
                os.ftruncate(file, os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE)
                own = _Memory(file, ranks.size)
                own.words[_NAME] = uuid.uuid4().int >> 65
                machine = Path("/proc/sys/kernel/random/boot_id").read_text()
                told = _Name(machine, os.getpid(), file, own.words[_NAME])
        every = ranks.gather_objects(told)
        peers = None if own is None else _find(every, ranks)
        if not all(ranks.gather_objects(peers is not None)):
            return None
    finally:
        if file >= 0:
            os.close(file)  # everybody has it who wants it
    assert own is not None
    assert peers is not None
    # The next rank first: not all wait for the same one.
    peers = peers[ranks.rank :] + peers[: ranks.rank]
    backend = group._get_backend(torch.device("cpu"))
    return Link(ranks, own, peers, backend.options._timeout.total_seconds())


def _find(every: Sequence[_Name | None], ranks: Ranks) -> list[_Peer] | None:
    """The files of the others, if all of them can be mapped."""
    peers = []
    for rank, told in enumerate(every):
        if told is None or every[0] is None or told.machine != every[0].machine:
            return None
        if rank == ranks.rank:
            continue
        try:
            memory = _open(told, ranks.size)
        except (OSError, ValueError):  # another container's, or another user's
            return None
        if memory.words[_NAME] != told.name:
            return None
        peers.append(_Peer(rank, told.process, memory))
    return peers


def _open(told: _Name, size: int) -> _Memory:
    file = os.open(f"/proc/{told.process}/fd/{told.file}", os.O_RDWR)
    try:
        return _Memory(file, size)
    finally:
        os.close(file)


def _say_goodbye(board: Tensor, process: int) -> None:
    if os.getpid() == process:
        signal_set_(board, _CLOSED, 1)
