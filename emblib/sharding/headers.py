"""Headers: numbers with which ranks agree on a collective before they make it.

The ranks of a process group match collectives by the order of their calls. If a rank calls another
collective than its peers, gloo aborts the process. So for tensors in host memory ranks first
exchange a header that describes the collective, and all ranks raise if headers disagree
(`Headers`). All headers of a process group have the same size, so even ranks that disagree can
exchange them. A rank that calls a collective without a header, such as `dist.barrier`, is not
detected.
"""

from __future__ import annotations

import enum
import threading
import weakref
from array import array
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class HeaderRanks(Protocol):
    """The ranks that exchange headers: a `RankGroup`, whose module imports this one."""

    @property
    def rank(self) -> int:
        """Number of this process in the group."""

    @property
    def size(self) -> int:
        """Number of processes."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors that this rank sends."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; None for this process alone."""


class Content(enum.IntEnum):
    """The kind of data that a collective sends; its header, if it has one, carries this number."""

    VALUES = 0
    SIZES = 1
    IDS = 2
    WEIGHTS = 3
    ROWS = 4
    GRADIENTS = 5
    NUMBERS = 6
    OBJECTS = 7
    BARRIER = 8

    @property
    def description(self) -> str:
        """Describe the content in an error message."""
        return {
            Content.SIZES: "the sizes of a batch",
            Content.IDS: "the ids of a batch",
            Content.WEIGHTS: "the weights of ids",
            Content.ROWS: "rows",
            Content.GRADIENTS: "gradients of rows",
            Content.NUMBERS: "numbers of a pipeline",
            Content.OBJECTS: "what a checkpoint, a state dict or a handle of a table collects",
            Content.BARRIER: "a barrier",
        }.get(self, "values")


class Mode(enum.IntFlag):
    """The modes in which a rank looks up a batch of several collections."""

    GRADIENTS = 1  # gradients are enabled
    TRAINING = 2  # a collection is in training mode
    EVAL = 4  # a collection is in eval mode

    @property
    def description(self) -> str:
        """Describe the modes in an error message."""
        names = {Mode.TRAINING: "training", Mode.EVAL: "eval"}
        modes = " and ".join(name for mode, name in names.items() if mode in self)
        return f"in {modes} mode with{'' if Mode.GRADIENTS in self else 'out'} gradients"


ALL_TO_ALL, ALL_GATHER = range(2)


class _KindEntry(enum.IntEnum):
    """First entries of a header, which must be equal on all ranks; the sizes follow."""

    CONTENT = 0  # a `Content`
    COLLECTIVE = 1  # ALL_TO_ALL or ALL_GATHER
    # GRADIENTS: a bit mask of outputs and the `_SCALED_BIT`; SIZES: the number of lists, and a
    # `Mode` from `MODE_BIT` on; VALUES: a number of their encoding; else 0.
    DETAILS = 2


class Headers:
    """The headers of one collective, exchanged between all ranks.

    Every rank gets the headers of all ranks and compares all pairs. So all ranks decide alike, and
    none waits in the collective for a rank that has raised. The constructor sends the header, and
    registers a collective (`enter_collective`) for as long as the object lives. The caller must
    call `check` once.

    Args:
        kind: the first entries of the header, see `_KindEntry`; missing entries are 0.
        nbytes: `nbytes[r]` is the number of bytes that this rank sends to rank r.
        received_nbytes: the number of bytes that this rank expects from each rank.
        ranks: the ranks, at least two, which exchange tensors in host memory.
        numbers: int64 numbers to send in the header; left out if there are more than `MAX_NUMBERS`.

    Raises:
        RuntimeError: two threads use the process group, see `enter_collective`.
    """

    MAX_NUMBERS = 124  # not measured; a header has 1 KiB and 16 bytes per rank

    def __init__(
        self,
        kind: Sequence[int],
        nbytes: Sequence[int],
        received_nbytes: Sequence[int],
        ranks: HeaderRanks,
        numbers: Sequence[int] = (),
    ) -> None:
        self._ranks = ranks
        self._in_flight = enter_collective(ranks)
        fits = len(numbers) <= self.MAX_NUMBERS
        header = [*kind, *(0,) * (len(_KindEntry) - len(kind)), *nbytes, *received_nbytes]
        header += [len(numbers), *numbers] if fits else [-1]
        header += (0,) * (len(_KindEntry) + 2 * ranks.size + 1 + self.MAX_NUMBERS - len(header))
        # From an array: torch.tensor would convert the list number by number, which is slow.
        self._sent = torch.frombuffer(array("q", header * (ranks.size - 1)), dtype=torch.int64)
        self._received = torch.empty_like(self._sent)
        self._header, sizes = header, [len(header)] * ranks.size
        sizes[ranks.rank] = 0
        self._work = dist.all_to_all_single(
            self._received, self._sent, sizes, sizes, group=ranks.group, async_op=True
        )

    def check(self) -> list[list[int]] | None:
        """Wait for the headers and compare them.

        Returns:
            The numbers of each rank; None if a rank had more numbers than fit.

        Raises:
            RuntimeError: the ranks disagree about the collective, on every rank.
        """
        self._work.wait()
        num_ranks, length = self._ranks.size, len(self._header)
        entries = self._received.tolist()
        headers = [entries[i : i + length] for i in range(0, len(entries), length)]
        headers.insert(self._ranks.rank, self._header)
        begin = len(_KindEntry) + 2 * num_ranks
        sent_sizes = [header[len(_KindEntry) : len(_KindEntry) + num_ranks] for header in headers]
        expected = [header[len(_KindEntry) + num_ranks : begin] for header in headers]
        kinds = [header[: len(_KindEntry)] for header in headers]
        if (
            kinds.count(kinds[0]) < num_ranks
            or list(map(list, zip(*sent_sizes, strict=True))) != expected
        ):
            matrices = (torch.tensor(rows, device="cpu") for rows in (kinds, sent_sizes, expected))
            _raise_difference(*matrices, ranks=self._ranks)
        if any(header[begin] < 0 for header in headers):
            return None
        return [header[begin + 1 : begin + 1 + header[begin]] for header in headers]


def gradient_headers(
    indices: Sequence[int],
    nbytes: Sequence[tuple[Sequence[int], Sequence[int]]],
    ranks: HeaderRanks,
    *,
    is_scaled: bool,
    numbers: Sequence[int],
) -> Headers | None:
    """Send the header of the gradients of one backward; return it for the caller to `check`.

    All ranks call this. With one rank and on a GPU nothing is compared, and the result is None.

    Args:
        indices: indices of the outputs that the loss uses, among the outputs of one output_dist.
            Ranks compare them modulo `_SCALED_BIT`.
        nbytes: number of bytes (to each rank, from each rank) of each output; at least one output.
        ranks: the ranks.
        is_scaled: whether a `GradScaler` has scaled the loss.
        numbers: numbers to send in the header, see `Headers`.

    Raises:
        RuntimeError: two threads use the process group, see `enter_collective`.
    """
    if ranks.size == 1 or ranks.device.type != "cpu":
        return None
    outputs = sum({1 << (index % _SCALED_BIT) for index in indices}) | is_scaled << _SCALED_BIT
    sent_nbytes, received_nbytes = (
        [sum(rank_nbytes) for rank_nbytes in zip(*by_output, strict=True)]
        for by_output in zip(*nbytes, strict=True)
    )
    return Headers(
        [Content.GRADIENTS, ALL_TO_ALL, outputs], sent_nbytes, received_nbytes, ranks, numbers
    )


def check_call(content: Content, ranks: HeaderRanks) -> None:
    """Compare headers before collectives that have none; do nothing on a GPU or with one rank.

    All ranks call this before they exchange data of the kind `content`.

    Raises:
        RuntimeError: another rank exchanges something else, on every rank; or two threads use the
            process group, see `enter_collective`.
    """
    if ranks.size > 1 and ranks.device.type == "cpu":
        no_bytes = [0] * ranks.size
        Headers([content, ALL_TO_ALL], no_bytes, no_bytes, ranks).check()


_SCALED_BIT = 62  # bit of `_KindEntry.DETAILS` for gradients of a scaled loss
MODE_BIT = 32  # first bit of a `Mode` in `_KindEntry.DETAILS`


def _raise_difference(
    kinds: Tensor, sent_nbytes: Tensor, expected_nbytes: Tensor, *, ranks: HeaderRanks
) -> None:
    """Raise RuntimeError for one pair of headers that disagree, if possible a pair with this rank.

    `kinds` is `[W, 3]`, see `_KindEntry`; `sent_nbytes[r, p]` is the number of bytes that rank r
    sends to rank p, `expected_nbytes[r, p]` the number that rank r expects from rank p. At least
    one pair must disagree.
    """
    # By receiver and sender.
    differs = (kinds[:, None] != kinds[None]).any(dim=2) | (expected_nbytes != sent_nbytes.T)
    rank = ranks.rank if differs[ranks.rank].any() else int(differs.any(dim=1).nonzero()[0])
    peer = int(differs[rank].nonzero()[0])
    contents = kinds[:, _KindEntry.CONTENT].tolist()
    if contents[rank] != contents[peer]:
        raise _content_error(peer, Content(contents[peer]), rank, Content(contents[rank]))
    collectives = kinds[:, _KindEntry.COLLECTIVE].tolist()
    if collectives[rank] != collectives[peer]:
        collective_names = ("an all-to-all", "an all-gather")
        raise RuntimeError(
            f"rank {peer} called {collective_names[collectives[peer]]} where rank {rank} called "
            f"{collective_names[collectives[rank]]}: {_SAME_ORDER}"
        )
    details = kinds[:, _KindEntry.DETAILS].tolist()
    if contents[rank] == Content.GRADIENTS and (
        details[rank] >> _SCALED_BIT != details[peer] >> _SCALED_BIT
    ):
        scaled_rank, unscaled_rank = sorted((rank, peer), key=details.__getitem__, reverse=True)
        raise RuntimeError(
            f"a torch.amp.GradScaler has scaled the loss of rank {scaled_rank} and not that of "
            f"rank {unscaled_rank}: use one on all ranks, or on none"
        )
    if details[rank] != details[peer] and contents[rank] == Content.GRADIENTS:
        raise RuntimeError(
            f"the losses of rank {peer} and rank {rank} used the outputs of different sharded "
            "collections: every rank's loss must use all of them, if only times 0"
        )
    if details[rank] != details[peer] and contents[rank] == Content.VALUES:
        raise RuntimeError(
            f"rank {peer} sent values in another dtype or with another codec than rank {rank}: all "
            "ranks must call a collective with one dtype and one CommPrecision"
        )
    modes = {number: Mode(details[number] >> MODE_BIT) for number in sorted((rank, peer))}
    if modes[rank] != modes[peer]:
        (first, mode), (second, other_mode) = modes.items()
        raise RuntimeError(
            f"rank {first} looks up {mode.description}, and rank {second} "
            f"{other_mode.description}: call train() or eval() of the model, and enable or disable "
            "gradients, on all ranks alike"
        )
    if details[rank] != details[peer]:
        raise RuntimeError(
            f"rank {peer} sent {Content(contents[peer]).description} of other collections than "
            f"rank {rank}: {_SAME_ORDER}"
        )
    raise RuntimeError(
        f"rank {peer} sent {int(sent_nbytes[peer, rank])} bytes where rank {rank} expected "
        f"{int(expected_nbytes[rank, peer])}: {_SAME_ORDER}, with sizes that agree"
    )


_SAME_ORDER = "the ranks of a process group must call the same collectives in the same order"


def _content_error(peer: int, sent: Content, rank: int, expected: Content) -> RuntimeError:
    message = (
        f"rank {peer} sent {sent.description} where rank {rank} expected {expected.description}: "
        f"{_SAME_ORDER}"
    )
    if Content.OBJECTS in (sent, expected):
        message += (
            ". All ranks must make a checkpoint, and call state_dict() of a model with hash "
            "tables, the methods of their handles and full_tensor() of a sharded table, together"
        )
    elif Content.GRADIENTS in (sent, expected):
        missing_rank = peer if expected is Content.GRADIENTS else rank
        message += (
            f". The last loss of rank {missing_rank} left out the output of a sharded collection, "
            "which that of the other rank used: every rank's loss must use it, if only times 0. Or "
            f"an error ended the step of rank {missing_rank} before its backward"
        )
    return RuntimeError(message)


class _CollectiveThread:
    """A thread with `in_flight` collectives in flight; until these end, no other may start any."""

    def __init__(self, thread: threading.Thread) -> None:
        self.thread, self.in_flight = thread, 0


class _Collective:
    """A collective in flight, until the object is freed."""

    __slots__ = ("_owner",)

    def __init__(self, owner: _CollectiveThread) -> None:
        self._owner = owner
        owner.in_flight += 1

    def __del__(self) -> None:
        self._owner.in_flight -= 1


class _GroupState:
    """The thread that uses a process group; and the error if two used it at once, else ""."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.owner = _CollectiveThread(threading.current_thread())
        self.error = ""


_group_states: weakref.WeakKeyDictionary[dist.ProcessGroup, _GroupState] = (
    weakref.WeakKeyDictionary()
)
_group_states_lock = threading.Lock()


def enter_collective(ranks: HeaderRanks) -> _Collective:
    """Register a collective of this thread, which lasts as long as the returned object.

    Ranks match collectives by their order in the group. Two threads could call them in different
    orders on different ranks. Messages would then reach the wrong table, and gloo aborts a process
    that gets more bytes than it expects. Callers do not register collectives of tensors on a GPU,
    because torch runs their backward in other threads.

    Raises:
        RuntimeError: another living thread has a collective in flight, or had one at an earlier
            call for this group.
    """
    group = ranks.group
    assert group is not None
    with _group_states_lock:
        state = _group_states.setdefault(group, _GroupState())
    thread = threading.current_thread()
    with state.lock:
        other_thread = state.owner.thread
        if other_thread is not thread:
            if not state.error and state.owner.in_flight and other_thread.is_alive():
                state.error = (
                    f"threads {other_thread.name!r} and {thread.name!r} exchange over one process "
                    "group at the same time, which mixes up their messages: give every thread a "
                    "process group of its own (torch.distributed.new_group, made in the same "
                    "order on all ranks, and RankGroup(group)), or let one thread use it"
                )
            state.owner = _CollectiveThread(thread)
        if state.error:
            raise RuntimeError(state.error)
        return _Collective(state.owner)
