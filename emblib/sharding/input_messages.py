"""The messages of the input_dist, of several collections together.

The ranks first send the numbers of bags and ids that each rank will get, which the host needs to
allocate memory. Then they send lengths of bags and ids, and weights and use counts if there are
any. Small messages of all collections share one collective; of larger messages each kind and
collection has its own. A rank whose batch is wrong says so in place of the numbers, so that no rank
waits for it.
"""

from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from operator import add
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.sharding.all_to_all import (
    DifferentiableAllToAllAwaitable,
    Message,
    start_all_to_alls,
    start_sizes,
)
from emblib.sharding.awaitables import Awaitable, DeferredAwaitable
from emblib.sharding.headers import Content, Mode
from emblib.sharding.input_dist import IncomingBatch, InputDist, LocalBatch, OutgoingBatch
from emblib.sharding.ranks import RankGroup

# Copying larger messages into one costs more than one collective per message.
_MAX_MERGED_NBYTES = 1 << 19


class _CommonEntry(IntEnum):
    """Entries of the numbers that a rank sends to all ranks with the sizes of its batches."""

    STATE = 0  # a `_State`
    ID_NBYTES = 1  # number of bytes that it sends, see `_id_nbytes`
    ROW_NBYTES = 2  # estimated number of bytes of all rows that it will receive


class _State(IntEnum):
    """State of a rank: whether it has batches to send."""

    NO_BATCH = 0  # so all ranks stop
    BATCHES = 1
    ERROR = 2  # its batch is wrong


class InputRequest(NamedTuple):
    """A batch to send, and its `InputDist`; `inputs` is None on a rank that has no batch."""

    input_dist: InputDist
    inputs: LocalBatch | None


class _Outgoing(NamedTuple):
    """The batch of one collection, sorted for sending."""

    input_dist: InputDist
    inputs: LocalBatch
    batch: OutgoingBatch

    @classmethod
    def from_request(cls, request: InputRequest) -> "_Outgoing":
        """Sort the batch of a request that has one."""
        input_dist, inputs = request
        assert inputs is not None
        return cls(input_dist, inputs, input_dist.sort_by_destination(inputs))


InputsInFlight = Awaitable[list[Awaitable[IncomingBatch]] | None]
"""The result of `start_input_dists`."""


def start_input_dists(
    requests: Sequence[InputRequest], ranks: RankGroup, error: Exception | None = None
) -> InputsInFlight:
    """Send the sizes of batches, those of several collections together.

    In host memory the call returns once all ranks have made it. The first `wait` receives the sizes
    and sends the ids; `wait` on each of its results receives the ids of a batch. All ranks must
    pass the batches of the same collections in the same order. If a rank passes a request without a
    batch and no rank has an error, the first `wait` returns None on all ranks. Then, and after an
    error, no ids are sent.

    A rank whose batch is wrong sends this in place of its sizes, and raises here. The first `wait`
    of the other ranks then raises RuntimeError. On all ranks the first `wait` raises RuntimeError
    if ids differ in dtype between ranks, or if only some batches have weights, gradients of
    weights, use counts or features of different batch sizes.

    Args:
        requests: the batches; at least one.
        ranks: the ranks.
        error: error to raise, because the batch of this rank is wrong; None if it is not.

    Raises:
        Exception: `error`, or the error of sorting a batch of this rank.
        RuntimeError: ranks exchange something else at the same time, see `start_all_to_all`, or
            look up in other modes.
    """
    batches: list[_Outgoing] = []
    state = _State.NO_BATCH if error is None else _State.ERROR
    if error is None and all(request.inputs is not None for request in requests):
        try:
            batches = [_Outgoing.from_request(request) for request in requests]
            headers = [batch.input_dist.headers(batch.inputs, batch.batch) for batch in batches]
            row_nbytes = sum(batch.input_dist.row_nbytes(batch.inputs) for batch in batches)
            common = [_State.BATCHES, sum(map(_id_nbytes, batches)), row_nbytes]
            state = _State.BATCHES
        except Exception as sorting_error:
            error, state = sorting_error, _State.ERROR
    if state != _State.BATCHES:
        headers = [request.input_dist.empty_headers() for request in requests]
        common = [state, 0, 0]
    pending = start_sizes(
        common,
        list(zip(*headers, strict=True)),
        [request.input_dist.header_size for request in requests],
        ranks,
        _mode_of(requests),
    )
    if error is not None:
        pending.wait()
        raise error
    return DeferredAwaitable(partial(_send_ids, batches, pending, ranks))


def _mode_of(requests: Sequence[InputRequest]) -> int:
    """Return the `Mode` in which the collections of some requests look up, as an int."""
    training_modes = {request.input_dist.training for request in requests}
    return (
        torch.is_grad_enabled() * Mode.GRADIENTS
        | (True in training_modes) * Mode.TRAINING
        | (False in training_modes) * Mode.EVAL
    )


def _id_nbytes(outgoing: _Outgoing) -> int:
    """Return the number of bytes to send; a weight counts as much as an id."""
    num_ids = sum(outgoing.batch.num_ids)
    elements_per_id = 1 + (outgoing.batch.weights is not None)
    count_nbytes = (
        0
        if outgoing.batch.use_counts is None
        else num_ids * outgoing.batch.use_counts.element_size()
    )
    num_elements = num_ids * elements_per_id + sum(outgoing.batch.num_bags)
    return num_elements * outgoing.inputs.ids.element_size() + count_nbytes


def _send_ids(
    batches: Sequence[_Outgoing],
    pending: Awaitable[list[tuple[list[int], list[list[int]]]]],
    ranks: RankGroup,
) -> list[Awaitable[IncomingBatch]] | None:
    """Receive the sizes, and send lengths, ids, weights and use counts.

    Returns None if a rank has no batch.
    """
    sizes_by_rank = pending.wait()
    states = [common[_CommonEntry.STATE] for common, _ in sizes_by_rank]
    if _State.ERROR in states:
        raise RuntimeError(
            f"rank {states.index(_State.ERROR)} could not send its batch, see its error: nothing "
            "was looked up on any rank"
        )
    if _State.NO_BATCH in states:
        return None
    merges_ids, merges_rows = (
        max(common[entry] for common, _ in sizes_by_rank) <= _MAX_MERGED_NBYTES
        for entry in (_CommonEntry.ID_NBYTES, _CommonEntry.ROW_NBYTES)
    )
    in_flight_batches = [
        outgoing.input_dist.parse_headers(
            outgoing.inputs, outgoing.batch, [headers[i] for _, headers in sizes_by_rank]
        )
        for i, outgoing in enumerate(batches)
    ]
    messages: list[Message] = []
    for (_, _, batch), in_flight in zip(batches, in_flight_batches, strict=True):
        payload = torch.cat(_lengths_and_ids_by_rank(batch))
        sent_sizes = list(map(add, batch.num_bags, batch.num_ids))
        messages.append(Message(payload, sent_sizes, in_flight.message_sizes))
        if batch.weights is not None:
            messages.append(
                Message(batch.weights.detach(), batch.num_ids, in_flight.received_ids())
            )
        if batch.use_counts is not None:
            messages.append(Message(batch.use_counts, batch.num_ids, in_flight.received_ids()))
    payloads = iter(start_all_to_alls(messages, ranks, content=Content.IDS, is_merged=merges_ids))
    results: list[Awaitable[IncomingBatch]] = []
    for (input_dist, _, batch), in_flight in zip(batches, in_flight_batches, strict=True):
        ids, weights = next(payloads), None
        if batch.weights is not None:
            weights = DifferentiableAllToAllAwaitable(
                batch.weights, batch.num_ids, in_flight.received_ids(), ranks, next(payloads)
            )
        use_counts = None if batch.use_counts is None else next(payloads)
        finish = partial(input_dist.sort_received, merges_rows=merges_rows)
        results.append(DeferredAwaitable(partial(finish, in_flight, ids, weights, use_counts)))
    return results


def _lengths_and_ids_by_rank(batch: OutgoingBatch) -> list[Tensor]:
    """Return the lengths and the ids for rank 0, those for rank 1, and so on."""
    assert batch.lengths is not None
    assert batch.ids is not None
    lengths, ids = batch.lengths.split(batch.num_bags), batch.ids.split(batch.num_ids)
    return [tensor for rank_tensors in zip(lengths, ids, strict=True) for tensor in rank_tensors]
