"""A sharded lookup in three stages: input_dist, lookup, output_dist.

`look_up` runs all stages for one collection:

1. `start_input_dist` sends ids to the ranks that store their rows (`emblib.sharding.input_dist`);
2. `compute` of the collection looks up the received ids (`emblib.sharding.sharded_tables`);
3. `start_output_dist` returns the rows (`emblib.sharding.output_dist`).

`start_joint_input_dist` and `start_joint_output_dist` run a stage for several collections, whose
messages travel together. `ShardedModule` is the interface by which a collection describes them. All
ranks call the functions with the same collections in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from emblib.sharding.awaitables import Awaitable, DeferredAwaitable, LazyAwaitable, ReadyAwaitable
from emblib.sharding.input_dist import IncomingBatch
from emblib.sharding.input_messages import InputRequest, start_input_dists
from emblib.sharding.output_dist import OutputStep, start_output_dists
from emblib.sharding.ranks import RankGroup
from emblib.tables.recomputation import checkpointed_forward


class CollectionRequests(NamedTuple):
    """The requests to send a collection's batch, and the function that joins the received batches.

    `requests` has an awaitable of the batch in place of a request if nothing needs to be sent.
    `join` takes the received batches, in the order of `requests`, and returns the argument of the
    collection's `compute`.
    """

    requests: Sequence[InputRequest | Awaitable[IncomingBatch]]
    join: Callable[[list[IncomingBatch]], Any]


class CollectionSteps(NamedTuple):
    """The lookups of a collection's batch, and the function that joins their outputs.

    `steps` has the output in place of a lookup if its rows are not sent. `join` takes the outputs
    in the order of `steps`, and returns the output of the collection.
    """

    steps: Sequence[OutputStep | Tensor]
    join: Callable[[list[Awaitable[Tensor]]], LazyAwaitable[Any]]


class ShardedModule(Protocol):
    """A sharded collection whose messages may travel with those of other collections."""

    ranks: RankGroup  # the ranks that share the collection
    sent_ahead: SentAhead | None  # set by a model while its forward runs
    training: bool

    def collection_requests(self, features: Any) -> CollectionRequests:
        """Return the requests to send a batch; `features` is None on a rank that has none.

        It sends nothing. It raises if the batch is wrong.
        """

    def input_dist(self, features: Any) -> Awaitable[Awaitable[Any]]:
        """Start to send ids to the ranks that store their rows."""

    def compute(self, received: Any) -> Any:
        """Look up a received batch; return the rows that `collection_steps` takes."""

    def prefetch(self, received: Any) -> None:
        """Prefetch the rows of a batch into the caches of their tables."""

    def compute_and_output_dist(self, received: Any) -> LazyAwaitable[Any]:
        """Look up the received ids and start to return the rows."""

    def collection_steps(self, rows: Any, received: Any) -> CollectionSteps:
        """Return the lookups of a batch, whose rows can then be sent."""


class SentAhead(Protocol):
    """The batches that a model has sent before its forward, for its collections."""

    def take(self, module: ShardedModule, features: Any) -> LazyAwaitable[Any] | None:
        """Return the output of a collection for this input; None if it was not sent ahead."""


def look_up(module: ShardedModule, features: Any) -> LazyAwaitable[Any]:
    """Return the output of a collection: run all stages, or finish a batch that was sent ahead.

    All ranks call this. A checkpointed forward that backward repeats uses the batch that was sent
    ahead of the first one.
    """
    forward = checkpointed_forward(training=module.training)
    if forward is not None and forward.is_recomputation:
        received = forward.recall(module)
        if received is not None:
            return module.compute_and_output_dist(received)
    elif module.sent_ahead is not None:
        output = module.sent_ahead.take(module, features)
        if output is not None:
            return output
    if forward is not None:
        forward.note(module, None)
    return module.compute_and_output_dist(module.input_dist(features).wait().wait())


def is_checkpointed(module: ShardedModule) -> bool:
    """Return whether the running forward of a collection is in a checkpointed region."""
    return checkpointed_forward(training=module.training) is not None


def look_up_separately(module: ShardedModule, received: Any) -> LazyAwaitable[Any]:
    """Look up a batch that was sent ahead, without the batches of other collections.

    In a checkpointed region the batch is noted for the forward that backward repeats.
    """
    forward = checkpointed_forward(training=module.training)
    if forward is not None:
        forward.note(module, received)
    return module.compute_and_output_dist(received)


def start_input_dist(module: ShardedModule, features: Any) -> Awaitable[Awaitable[Any]]:
    """Send the sizes of the batch of one collection, see `start_joint_input_dist`.

    The first `wait` receives the sizes and sends the ids; `wait` on its result receives the
    argument of the collection's `compute`.

    Raises:
        TypeError: `features` is None; a rank without examples sends an empty batch.
        Exception: see `start_joint_input_dist`.
    """
    error = None
    if features is None:
        error = TypeError(
            "a sharded collection takes a KeyedJaggedTensor on every rank, got None; a rank "
            "without examples passes one without bags, e.g. emblib.sharding.empty_batch(batch)"
        )
    sizes = start_joint_input_dist([InputCall(module, features)], error)

    def send_ids() -> Awaitable[Any]:
        ids = sizes.wait()
        assert ids is not None
        return ids[0]

    return DeferredAwaitable(send_ids)


def start_output_dist(module: ShardedModule, rows: Any, received: Any) -> LazyAwaitable[Any]:
    """Start to return the rows of one collection, and return its output."""
    (output,) = start_joint_output_dist([OutputCall(module, rows, received)])
    return output()


# Several collections


class InputCall(NamedTuple):
    """A sharded collection and its batch; `features` is None if there is no batch."""

    module: ShardedModule
    features: Any


def start_joint_input_dist(
    calls: Sequence[InputCall], error: Exception | None = None
) -> Awaitable[list[Awaitable[Any]] | None]:
    """Send the sizes of the batches of several collections.

    The first `wait` receives the sizes and sends the ids; `wait` on each of its results receives
    the argument of that collection's `compute`. If a rank has no batch for a collection, the first
    `wait` returns None on all ranks of that collection.

    A rank whose batch is wrong raises here, and the other ranks of its process group raise
    RuntimeError in the first `wait`. All ranks raise RuntimeError there if their batches are of
    different kinds (`start_input_dists`).

    Args:
        calls: the collections and their batches.
        error: error to raise, because this rank could not find its batches; None if it did.

    Raises:
        Exception: `error`, or that of a batch that is wrong (`ShardedTables.input_request`).
    """
    collections: list[CollectionRequests] = []
    if error is None:
        try:
            collections = [call.module.collection_requests(call.features) for call in calls]
        except Exception as request_error:
            error = request_error
    if error is not None:
        collections = [call.module.collection_requests(None) for call in calls]
    pending: list[tuple[list[tuple[int, int]], Awaitable[Any]]] = []
    for ranks, indices in _group_indices([call.module.ranks for call in calls]):
        sent_requests = [
            ((i, j), request)
            for i in indices
            for j, request in enumerate(collections[i].requests)
            if isinstance(request, InputRequest)
        ]
        if sent_requests:
            positions, requests = zip(*sent_requests, strict=True)
            try:
                pending.append((list(positions), start_input_dists(requests, ranks, error)))
            except Exception as request_error:  # passed on, to tell the other groups as well
                error = request_error
    if error is not None:
        raise error

    def send_ids() -> list[Awaitable[Any]] | None:
        batches_by_call: list[list[Any]] = [list(collection.requests) for collection in collections]
        for positions, sizes in pending:
            batches = sizes.wait()
            if batches is None:
                return None
            for (i, j), batch in zip(positions, batches, strict=True):
                batches_by_call[i][j] = batch
        return [
            DeferredAwaitable(partial(_join_when_received, collection.join, batches))
            for collection, batches in zip(collections, batches_by_call, strict=True)
        ]

    return DeferredAwaitable(send_ids)


def _join_when_received(
    join: Callable[[list[IncomingBatch]], Any], batches: Sequence[Awaitable[IncomingBatch]]
) -> Any:
    """Wait for several batches, and return `join` of them."""
    return join([batch.wait() for batch in batches])


class OutputCall(NamedTuple):
    """A sharded collection, its rows, and the batch that it received."""

    module: ShardedModule
    rows: Any
    received: Any


def start_joint_output_dist(
    calls: Sequence[OutputCall],
) -> list[Callable[[], LazyAwaitable[Any]]]:
    """Start to return the rows of several collections; all ranks call this.

    Returns:
        A function per collection, which returns its output. The output has gradients if they are
        enabled when the function is called.
    """
    collections = [call.module.collection_steps(call.rows, call.received) for call in calls]
    results_by_call: list[list[Any]] = [list(collection.steps) for collection in collections]
    for ranks, indices in _group_indices([call.module.ranks for call in calls]):
        sent_positions = [
            (i, j)
            for i in indices
            for j, step in enumerate(collections[i].steps)
            if isinstance(step, OutputStep)
        ]
        if not sent_positions:
            continue
        steps = [results_by_call[i][j] for i, j in sent_positions]
        pending = start_output_dists(
            steps, ranks, is_merged=all(step.merges_rows for step in steps)
        )
        for (i, j), output in zip(sent_positions, pending, strict=True):
            results_by_call[i][j] = output
    return [
        partial(
            collection.join,
            [
                result if isinstance(result, Awaitable) else ReadyAwaitable(result)
                for result in results
            ],
        )
        for collection, results in zip(collections, results_by_call, strict=True)
    ]


def _group_indices(groups: Sequence[RankGroup]) -> list[tuple[RankGroup, list[int]]]:
    """Return each distinct process group with its positions in `groups`."""
    indices_by_group: dict[Any, tuple[RankGroup, list[int]]] = {}
    for index, ranks in enumerate(groups):
        indices_by_group.setdefault(ranks.group, (ranks, []))[1].append(index)
    return list(indices_by_group.values())
