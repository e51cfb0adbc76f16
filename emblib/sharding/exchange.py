"""All-to-alls of uneven shards, in flight while the caller goes on.

Everything that sharded collections send goes through here: ids to the ranks that store their rows,
pooled or single rows back, gradients to the ranks that store the rows. Every backend takes empty
and uneven shards and any payload; the receiver sums, in float32 and in rank order. Gradients of
replicated tables, which every rank needs, are gathered.

Collectives pair up by their order in a process group. Over gloo a rank that calls another
collective than the others makes gloo abort the process, so ranks on CPUs first exchange what each
is about to send, and raise on all ranks where that disagrees.
"""

from __future__ import annotations

import enum
import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from emblib.sharding.codecs import FP32, Codec
from emblib.sharding.ranks import RankGroup
from emblib.tables.graph_break import graph_break


class Content(enum.IntEnum):
    """What a collective sends; ranks compare it before they send."""

    VALUES = 0
    SIZES = 1
    IDS = 2
    WEIGHTS = 3
    ROWS = 4
    GRADIENTS = 5
    NUMBERS = 6

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
        }.get(self, "values")


class Pending:
    """An all-to-all under way; `wait` returns what was received."""

    def __init__(
        self,
        received: Tensor,
        work: Any = None,
        sent: Tensor | None = None,
        *,
        turn: Any = None,
    ) -> None:
        self._received, self._work = received, work
        self._turn = turn  # ends with the last reference to it
        self._sent = sent  # must live as long as the collective may read it

    def wait(self) -> Tensor:
        """Parts of all ranks, by rank; the current stream may use them."""
        if self._work is not None:
            self._work.wait()
            self._work = self._sent = self._turn = None
        return self._received


def start_all_to_all(
    sent: Tensor,
    sizes: Sequence[int],
    received_sizes: Sequence[int],
    ranks: RankGroup,
    *,
    received: Tensor | None = None,
    content: Content = Content.VALUES,
) -> Pending:
    """Send part r of `sent` (flat; `sizes[r]` elements) to rank r.

    `received` is where the parts of the others go, one after another by rank; made if not given.
    On CPUs the call returns when all ranks have made it, after comparing `content` and sizes.

    Raises:
        RuntimeError: another thread has an exchange over this process group in flight, or the ranks
            disagree about what is exchanged.
    """
    sent = sent.contiguous()
    if received is None:
        received = sent.new_empty(sum(received_sizes))
    if ranks.size == 1:
        return Pending(received.copy_(sent))
    turn = _take_turn(ranks) if sent.device.type == "cpu" else None
    if turn is not None:
        each = sent.element_size()
        _check_in_step(
            content, [n * each for n in sizes], [n * each for n in received_sizes], ranks
        )
    work = dist.all_to_all_single(
        received, sent, list(received_sizes), list(sizes), group=ranks.group, async_op=True
    )
    return Pending(received, work, sent, turn=turn)


def start_all_gather(
    part: Tensor, sizes: Sequence[int], ranks: RankGroup, *, content: Content = Content.VALUES
) -> Pending:
    """Send all of `part` (flat) to every rank; `sizes[r]` elements come from rank r."""
    part = part.contiguous()
    received = part.new_empty(sum(sizes))
    if ranks.size == 1:
        return Pending(received.copy_(part))
    turn = _take_turn(ranks) if part.device.type == "cpu" else None
    if turn is not None:
        _check_in_step(content, [part.nbytes] * ranks.size, _nbytes(sizes, part.dtype), ranks)
    parts = list(received.split(list(sizes)))
    parts[ranks.rank].copy_(part)
    # Gloo gathers equal parts only.
    works = [
        dist.broadcast(own, ranks.global_rank(rank), group=ranks.group, async_op=True)
        for rank, own in enumerate(parts)
    ]
    return Pending(received, _Together(works), turn=turn)


def _nbytes(sizes: Sequence[int], dtype: torch.dtype) -> list[int]:
    return [size * dtype.itemsize for size in sizes]


def _check_in_step(
    content: Content, nbytes: Sequence[int], received_nbytes: Sequence[int], ranks: RankGroup
) -> None:
    """Raise RuntimeError on every rank unless all ranks agree about the next collective.

    This rank sends `nbytes[r]` bytes of `content` to rank r and expects `received_nbytes[r]`.
    """
    header = torch.tensor([content, *nbytes, *received_nbytes], dtype=torch.int64)
    gathered = header.new_empty(ranks.size * len(header))
    dist.all_gather_into_tensor(gathered, header, group=ranks.group)
    headers = gathered.view(ranks.size, -1)
    contents, sent, expected = headers.split([1, ranks.size, ranks.size], dim=1)
    differs = (contents != contents.T) | (expected != sent.T)  # [receiver, sender]
    if not differs.any():
        return
    # The sender first that concerns this rank, else any: ranks that agree must not wait either.
    row = ranks.rank if differs[ranks.rank].any() else int(differs.any(dim=1).nonzero()[0])
    peer = int(differs[row].nonzero()[0])
    if contents[row] != contents[peer]:
        raise _out_of_step(peer, Content(int(contents[peer])), row, Content(int(contents[row])))
    raise RuntimeError(
        f"rank {peer} sent {int(sent[peer, row])} bytes where rank {row} expected "
        f"{int(expected[row, peer])}: the ranks of a process group must call the same collectives "
        "in the same order, with sizes that agree"
    )


def _out_of_step(peer: int, sent: Content, rank: int, expected: Content) -> RuntimeError:
    """Return the error for ranks that send different contents."""
    message = (
        f"rank {peer} sent {sent.description} where rank {rank} expected {expected.description}: "
        "the ranks of a process group must call the same collectives in the same order"
    )
    if Content.GRADIENTS in (sent, expected):
        absent = peer if expected is Content.GRADIENTS else rank
        message += (
            f". The last loss of rank {absent} left out the output of a sharded collection, which "
            "that of the other rank used: every rank's loss must use it, if only times 0"
        )
    return RuntimeError(message)


class _Turn:
    """An exchange in flight, and the thread that started it."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()


class _Turns:
    """The exchanges in flight over one process group in this process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: weakref.WeakSet[_Turn] = weakref.WeakSet()
        self.error = ""


_all_turns: weakref.WeakKeyDictionary[dist.ProcessGroup, _Turns] = weakref.WeakKeyDictionary()
_all_turns_lock = threading.Lock()


def _take_turn(ranks: RankGroup) -> _Turn:
    """Return what stands for an exchange in flight; raise where another thread has one.

    Exchanges pair up by their order in the group, which two threads would make another one on every
    rank: messages would reach the wrong table, and gloo ends a process that gets more bytes than it
    expects. So the group is of no use from then on. Tensors on a GPU are not asked: torch runs
    their backward in threads of its own.
    """
    group = ranks.group
    assert group is not None
    with _all_turns_lock:
        turns = _all_turns.setdefault(group, _Turns())
    turn = _Turn()
    with turns.lock:
        for other in turns.open:
            if not turns.error and other.thread is not turn.thread and other.thread.is_alive():
                turns.error = (
                    f"threads {other.thread.name!r} and {turn.thread.name!r} exchange over one "
                    "process group at the same time, which mixes up their messages: give every "
                    "thread a process group of its own (torch.distributed.new_group, made in the "
                    "same order on all ranks, and RankGroup(group)), or let one thread use it"
                )
        if turns.error:
            raise RuntimeError(turns.error)
        turns.open.add(turn)
    return turn


class _Together:
    """Collectives that are waited for as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when all have ended."""
        for work in self._works:
            work.wait()


class _AllToAll(torch.autograd.Function):
    """Gradients go back the way the values came."""

    @staticmethod
    def forward(
        ctx: Any, sent: Tensor, pending: Pending, sizes: Any, received_sizes: Any, ranks: RankGroup
    ) -> Tensor:
        """What was received; `sent` only ties it to autograd."""
        ctx.sizes, ctx.received_sizes, ctx.ranks = sizes, received_sizes, ranks
        return pending.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of what this rank sent."""
        pending = start_all_to_all(
            grad.contiguous(),
            ctx.received_sizes,
            ctx.sizes,
            ctx.ranks,
            content=Content.GRADIENTS,
        )
        return pending.wait(), None, None, None, None


class DifferentiableAllToAll:
    """An all-to-all of values that may want gradients: starts at once, ends with `wait`."""

    def __init__(
        self, sent: Tensor, sizes: Sequence[int], received_sizes: Sequence[int], ranks: RankGroup
    ) -> None:
        self._sent = sent
        self._call = tuple(sizes), tuple(received_sizes), ranks
        self._pending = start_all_to_all(sent.detach(), *self._call, content=Content.WEIGHTS)

    def wait(self) -> Tensor:
        """Parts of all ranks, by rank."""
        if not (self._sent.requires_grad and torch.is_grad_enabled()):
            return self._pending.wait()
        result: Tensor = _AllToAll.apply(self._sent, self._pending, *self._call)
        return result


T = TypeVar("T")
S = TypeVar("S")


class Awaitable(Generic[T]):
    """A result that `wait()` returns.

    A kind of its own gives `_wait_impl`, which is called once. If that raises, `wait` raises the
    same error each time: what was under way cannot be tried again.
    """

    def __init__(self) -> None:
        self._result: Any = _NOTHING
        self._callbacks: list[Callable[[Any], Any]] = []

    def wait(self) -> T:
        """The result, when it has come and every callback has had it."""
        if self._result is _NOTHING:
            try:
                self._result = self._finish()
            except Exception as error:
                self._result = _Failed(error)
                raise
        elif type(self._result) is _Failed:
            raise self._result.error
        return self._result

    def then(self, callback: Callable[[T], Any]) -> Awaitable[Any]:
        """Replace the result by `callback(result)` when it is waited for; returns itself.

        Callbacks run once, in the order in which they were added. After the first `wait` they run
        at once.
        """
        if self._result is _NOTHING:
            self._callbacks.append(callback)
        else:
            self._result = callback(self.wait())
        return self

    def _finish(self) -> T:
        result: Any = self._wait_impl()
        for callback in self._callbacks:
            result = callback(result)
        self._callbacks.clear()
        return result

    def _wait_impl(self) -> T:
        raise NotImplementedError(f"{type(self).__name__} must define _wait_impl")


class NoWait(Awaitable[T]):
    """A result that is already there."""

    def __init__(self, value: T) -> None:
        super().__init__()
        self._value = value

    def _wait_impl(self) -> T:
        value = self._value
        del self._value
        return value


class Deferred(Awaitable[T]):
    """The result of `function()`, which is called by the first `wait`."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function = function

    def _wait_impl(self) -> T:
        function = self._function
        del self._function  # what it holds is free once it has run
        return function()


class LazyAwaitable(Awaitable[T]):
    """An awaitable that stands for its result: it waits when it is touched.

    Attributes, items, iteration, operators and torch functions all wait and then act on the result.
    `isinstance` alone tells the two apart; `wait()` gives the result itself.
    """

    # Names of its own, which never wait.
    _result: Any
    _callbacks: list[Callable[[Any], Any]]

    @graph_break
    def wait(self) -> T:
        """The result, as of `Awaitable`; what it waits for is no part of a compiled graph."""
        return super().wait()

    def __getattr__(self, name: str) -> Any:
        # Only called for what is not found here. Private and special names are never of the
        # result: copying or printing something half-made must not wait.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.wait(), name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a torch function with results in the place of awaitables."""
        return function(*map(waited, args), **{k: waited(v) for k, v in (kwargs or {}).items()})

    def __getitem__(self, key: Any) -> Any:
        return self.wait()[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.wait())  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wait())  # type: ignore[call-overload]

    def __contains__(self, item: Any) -> bool:
        return item in self.wait()  # type: ignore[operator]

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return bool(self.wait())

    def __float__(self) -> float:
        return float(self.wait())  # type: ignore[arg-type]

    def __int__(self) -> int:
        return int(self.wait())  # type: ignore[call-overload]


class LazyNoWait(LazyAwaitable[T], NoWait[T]):
    """A result that is already there, in the form that a caller expects to be lazy."""


class LazyDeferred(LazyAwaitable[T], Deferred[T]):
    """The result of `function()`, which is called by the first use."""


def waited(value: Any) -> Any:
    """The value with every awaitable in it, also in lists, tuples and dicts, waited for."""
    if isinstance(value, Awaitable):
        return value.wait()
    if type(value) is tuple or type(value) is list:
        return type(value)(map(waited, value))
    if type(value) is dict:
        return {key: waited(item) for key, item in value.items()}
    return value


class _Nothing:
    """Stands for a result that has not come; None may be one."""


class _Failed:
    def __init__(self, error: Exception) -> None:
        self.error = error


_NOTHING = _Nothing()


def _operator(name: str) -> Callable[..., Any]:
    act = getattr(operator, f"__{name}__")

    def method(self: LazyAwaitable[Any], *others: Any) -> Any:
        return act(self.wait(), *map(waited, others))

    return method


def _reflected(name: str) -> Callable[..., Any]:
    act = getattr(operator, f"__{name}__")

    def method(self: LazyAwaitable[Any], other: Any) -> Any:
        return act(waited(other), self.wait())

    return method


_ARITHMETIC = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
for _name in (*_ARITHMETIC, *("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge")):
    setattr(LazyAwaitable, f"__{_name}__", _operator(_name))
for _name in _ARITHMETIC:
    setattr(LazyAwaitable, f"__r{_name}__", _reflected(_name))


@dataclass(frozen=True)
class CommPrecision:
    """What rows are encoded as on their way (`forward`), and their gradients (`backward`).

    Sums are float32 whatever travels. Ids travel as they are.
    """

    forward: Codec = field(default=FP32())
    backward: Codec = field(default=FP32())

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if not isinstance(getattr(self, name), Codec):
                raise TypeError(
                    f"{name} of a CommPrecision must be a codec, e.g. FP16(), "
                    f"got {getattr(self, name)!r}"
                )


def comm_precision_of(wire: CommPrecision | None) -> CommPrecision:
    """`wire`, or float32 both ways.

    Raises:
        TypeError: something else.
    """
    if wire is not None and not isinstance(wire, CommPrecision):
        raise TypeError(
            "wire must be None or a CommPrecision, e.g. "
            f"CommPrecision(forward=FP16(), backward=BF16()), got {wire!r}"
        )
    return CommPrecision() if wire is None else wire


class CodedPending:
    """Values under way in some form; `wait` returns them as floating numbers."""

    def __init__(
        self,
        values: Tensor,
        sizes: Sequence[int],
        received_sizes: Sequence[int],
        ranks: RankGroup,
        codec: Codec,
        content: Content,
    ) -> None:
        self._codec, self._sizes, self._dtype = codec, list(received_sizes), values.dtype
        payload = codec.encode(values, list(sizes))
        self._pending = start_all_to_all(
            payload,
            codec.payload_splits(sizes),
            codec.payload_splits(received_sizes),
            ranks,
            content=content,
        )

    def wait(self) -> Tensor:
        """What came, by rank: float32, or 16 bits where it travelled so and is read so."""
        payload = self._pending.wait()
        if payload.is_floating_point() and getattr(self._codec, "loss_scale", 1.0) == 1.0:
            return payload
        return self._codec.decode(payload, self._sizes, torch.float32)
