"""One exchange for several sharded collections: their ids travel together, and their rows back.

A sharded collection describes what it sends, as `JointModule`; the functions here start the
exchange of one or several of them. All ranks call them with the same collections in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from emblib.sharding.awaitables import Awaitable, DeferredAwaitable, LazyAwaitable, ReadyAwaitable
from emblib.sharding.input_dist import IncomingBatch, InputRequest, start_input_dists
from emblib.sharding.output_exchange import OutputExchange, OutputStep
from emblib.sharding.ranks import RankGroup
from emblib.tables.recomputation import running_forward


class Inputs(NamedTuple):
    """Messages that a collection sends for a batch, and its use of the received ones.

    A batch that stays on this rank is an awaitable of itself.
    """

    requests: Sequence[InputRequest | Awaitable[IncomingBatch]]
    join: Callable[[list[IncomingBatch]], Any]


class Outputs(NamedTuple):
    """The lookups of a collection, and the use of their outputs.

    A lookup whose rows stay on this rank is its output.
    """

    steps: Sequence[OutputStep | Tensor]
    join: Callable[[list[Awaitable[Tensor]]], LazyAwaitable[Any]]


class JointModule(Protocol):
    """A sharded collection whose exchange may be that of other collections, too."""

    ranks: RankGroup
    sent_ahead: SentAhead | None

    def inputs(self, features: Any) -> Inputs:
        """Return what to send of a batch; None for a rank that stops the exchange."""

    def compute(self, received: Any) -> Any:
        """Look up the received ids."""

    def outputs(self, rows: Any, received: Any) -> Outputs:
        """Return the lookups of a batch."""


class InputCall(NamedTuple):
    """A sharded collection and the batch that it gets, None for none."""

    module: Any
    features: Any


def start_joint_input_dist(
    calls: Sequence[InputCall],
) -> Awaitable[list[Awaitable[Any]] | None]:
    """Send the sizes of the batches of several collections.

    The first `wait` receives the sizes and sends the ids; `wait` on each of its results receives
    what `compute` of that collection takes. If a rank has no batch for one of them, the first
    `wait` returns None on all ranks.
    """
    inputs = [call.module.inputs(call.features) for call in calls]
    pending: list[tuple[list[tuple[int, int]], Awaitable[Any]]] = []
    for ranks, indices in _by_group([call.module.ranks for call in calls]):
        sent = [
            (i, j)
            for i in indices
            for j, one in enumerate(inputs[i].requests)
            if isinstance(one, InputRequest)
        ]
        if sent:
            requests = [inputs[i].requests[j] for i, j in sent]
            pending.append((sent, start_input_dists(requests, ranks)))

    def send_ids() -> list[Awaitable[Any]] | None:
        received: list[list[Any]] = [list(one.requests) for one in inputs]
        for sent, sizes in pending:
            batches = sizes.wait()
            if batches is None:
                return None
            for (i, j), batch in zip(sent, batches, strict=True):
                received[i][j] = batch
        return [
            DeferredAwaitable(partial(_joined, one.join, batches))
            for one, batches in zip(inputs, received, strict=True)
        ]

    return DeferredAwaitable(send_ids)


def _joined(
    join: Callable[[list[IncomingBatch]], Any], batches: Sequence[Awaitable[IncomingBatch]]
) -> Any:
    return join([batch.wait() for batch in batches])


class OutputCall(NamedTuple):
    """A sharded collection, its rows, and the batch that it received."""

    module: Any
    rows: Any
    received: Any


def start_joint_output_dist(
    calls: Sequence[OutputCall],
) -> list[Callable[[], LazyAwaitable[Any]]]:
    """Start to return the rows of several collections.

    Returns a function per collection that returns its output, connected to autograd where gradients
    are enabled when it is called.
    """
    outputs = [call.module.outputs(call.rows, call.received) for call in calls]
    results: list[list[Any]] = [list(one.steps) for one in outputs]
    for ranks, indices in _by_group([call.module.ranks for call in calls]):
        sent = [
            (i, j)
            for i in indices
            for j, step in enumerate(outputs[i].steps)
            if isinstance(step, OutputStep)
        ]
        if not sent:
            continue
        steps = [results[i][j] for i, j in sent]
        exchange = OutputExchange(steps, ranks, is_merged=all(step.is_small for step in steps))
        for (i, j), output in zip(sent, exchange.outputs(), strict=True):
            results[i][j] = output
    return [
        partial(
            one.join,
            [r if isinstance(r, Awaitable) else ReadyAwaitable(r) for r in own],
        )
        for one, own in zip(outputs, results, strict=True)
    ]


def _by_group(every: Sequence[RankGroup]) -> list[tuple[RankGroup, list[int]]]:
    """Return the positions of each process group, with its ranks."""
    found: dict[Any, tuple[RankGroup, list[int]]] = {}
    for index, ranks in enumerate(every):
        found.setdefault(ranks.group, (ranks, []))[1].append(index)
    return list(found.values())


class SentAhead(Protocol):
    """An exchange that a forward of the model has started for its collections."""

    def take(self, module: Any, features: Any) -> LazyAwaitable[Any] | None:
        """Return the output of a collection for this input, None if it was not sent."""


def start_input_dist(module: Any, features: Any) -> Awaitable[Awaitable[Any]]:
    """Send the sizes of the batch of one collection, see `start_joint_input_dist`."""
    sizes = start_joint_input_dist([InputCall(module, features)])

    def send_ids() -> Awaitable[Any]:
        ids = sizes.wait()
        assert ids is not None
        return ids[0]

    return DeferredAwaitable(send_ids)


def start_output_dist(module: Any, rows: Any, received: Any) -> LazyAwaitable[Any]:
    """Start to return the rows of one collection."""
    (output,) = start_joint_output_dist([OutputCall(module, rows, received)])
    return output()


def exchange(module: Any, features: Any) -> LazyAwaitable[Any]:
    """Return the output of a collection, from the exchange that was started ahead if it was.

    A forward that backward repeats has the batch that was sent ahead for the first one.
    """
    running = running_forward(training=module.training)
    result: LazyAwaitable[Any]
    if running is not None and running.is_repeated:
        received = running.noted(module)
        if received is not None:
            result = module.compute_and_output_dist(received)
            return result
    elif module.sent_ahead is not None:
        output: LazyAwaitable[Any] | None = module.sent_ahead.take(module, features)
        if output is not None:
            return output
    if running is not None:
        running.note(module, None)
    result = module.compute_and_output_dist(module.input_dist(features).wait().wait())
    return result


def is_checkpointed(module: Any) -> bool:
    """Return whether the running forward of a collection is in a checkpointed region."""
    return running_forward(training=module.training) is not None


def look_up_apart(module: Any, received: Any) -> LazyAwaitable[Any]:
    """Look up a batch that was sent ahead, alone, as a checkpointed region repeats it."""
    running = running_forward(training=module.training)
    if running is not None:
        running.note(module, received)
    result: LazyAwaitable[Any] = module.compute_and_output_dist(received)
    return result
