"""Inputs of sharded collections: find them in a batch, and send their ids ahead.

A sharded collection sends ids to the ranks that look them up, looks up the ids that it receives and
returns the results (`emblib.sharding.lookup`). Ids do not depend on training, so a pipeline sends
them while earlier batches are computed, for all collections together. The model is not rewritten:
while the pipeline runs the model's forward, the `forward` of each collection is replaced by a
function that uses the batch which was sent ahead.
"""

import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from emblib.collections.groups import TableGroups
from emblib.context_values import with_attribute
from emblib.grad_mode import in_grad_mode
from emblib.sharding.awaitables import Awaitable, DeferredAwaitable
from emblib.sharding.dense import unwrapped
from emblib.sharding.lookup import (
    InputCall,
    OutputCall,
    is_checkpointed,
    look_up_separately,
    start_joint_input_dist,
    start_joint_output_dist,
)
from emblib.sharding.pipelines.batches import (
    ItemPath,
    Lane,
    Staged,
    is_same_input,
    item_at,
    path_to,
)
from emblib.tables import TableBatchedEmbeddingBags
from emblib.tables.graph_break import run_uncompiled

Inputs = Callable[[Any], Mapping[Any, Any]]
"""Returns the inputs of a batch: {path of the module in the model, or the module: jagged tensor}.

For a module that one forward calls several times, the value is a list of its inputs in that order.
"""


def sharded_modules(model: nn.Module) -> dict[str, Any]:
    """Return the sharded collections by their paths in the model inside of any wrapper."""
    collections: dict[str, Any] = {}
    for name, module in unwrapped(model).named_modules():
        # Parts of a collection do not count as collections.
        is_inside = any(not path or name.startswith(f"{path}.") for path in collections)
        if hasattr(module, "compute_and_output_dist") and not is_inside:
            collections[name] = module
    return collections


class LearnedInputs:
    """Inputs of collections by their paths in a batch, learned from the first batch.

    The first forward runs unchanged and is observed. An input that is an object in the batch is
    expected at the same path in later batches. For an input that the model computes itself, the
    collection sends its ids in its forward.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in sharded_modules(model).items()}
        self._paths: list[tuple[Any, ItemPath]] | None = None

    @property
    def is_known(self) -> bool:
        """Return whether the inputs were learned: a batch has passed through the model."""
        return self._paths is not None

    def learn_from(self, batch: Any, forward: Callable[[Any], Any]) -> Any:
        """Call `forward` with a batch, learn the inputs from it, and return its result."""
        calls: list[InputCall] = []
        forwards = {module: _recording_forward(module, calls) for module in self._names}
        result = _call_with_forwards(forwards, forward, batch)
        paths = [(call.module, path_to(batch, call.features)) for call in calls]
        # Calls of a module are matched by their order, so all of its inputs must be known.
        unlearned_modules = {module: None for module, path in paths if path is None}
        for module in unlearned_modules:
            warnings.warn(
                f"the input of {self._names[module] or 'the model'} is not an object of the batch, "
                "so its ids are not sent ahead; give the pipeline `inputs` that names it, or put "
                "it into the batch",
                stacklevel=2,
            )
        self._paths = [
            (module, path)
            for module, path in paths
            if path is not None and module not in unlearned_modules
        ]
        return result

    def __call__(self, batch: Any) -> list[InputCall]:
        """Return the calls for a batch, in the order in which the model makes them."""
        assert self._paths is not None
        return [InputCall(module, item_at(batch, path)) for module, path in self._paths]

    def calls_without_inputs(self) -> list[InputCall]:
        """Return the same calls without inputs, for a batch that lacks an input."""
        return [InputCall(module, None) for module, _ in self._paths or ()]


def _recording_forward(module: Any, calls: list[InputCall]) -> Callable[..., Any]:
    """Return a forward for a sharded module that also appends its calls to `calls`."""
    plain_forward = module.forward

    def forward(features: Any) -> Any:
        calls.append(InputCall(module, features))
        return plain_forward(features)

    return forward


class CallerInputs:
    """Inputs of collections that a function of the caller returns, see `Inputs`."""

    is_known = True

    def __init__(self, model: nn.Module, function: Inputs) -> None:
        self._modules = sharded_modules(model)
        self._function = function
        # The collections of the last batch; before the first batch, each collection once.
        self._called_modules = list(self._modules.values())

    def __call__(self, batch: Any) -> list[InputCall]:
        """Return the calls for a batch, in the order of the function's result.

        Raises:
            ValueError: a key of the result is not a sharded collection of the model.
        """
        calls = []
        for key, inputs in self._function(batch).items():
            module = self._modules.get(key) if isinstance(key, str) else key
            if module is None or all(
                module is not known_module for known_module in self._modules.values()
            ):
                raise ValueError(
                    f"inputs must be of the sharded collections {sorted(self._modules)}, got "
                    f"{key if isinstance(key, str) else type(key).__name__!r}"
                )
            inputs_of_module = inputs if isinstance(inputs, Sequence) else [inputs]
            calls += [InputCall(module, features) for features in inputs_of_module]
        self._called_modules = [call.module for call in calls]
        return calls

    def calls_without_inputs(self) -> list[InputCall]:
        """Return the calls of the last batch without inputs, for use after `inputs` has failed."""
        return [InputCall(module, None) for module in self._called_modules]


class SeparateCalls:
    """The calls of a forward that look up separately, because they are in checkpointed regions.

    A region repeats only its own lookup. For the first batch that is sent ahead, all calls look up
    separately; then it is known which of them are in regions.

    Attributes:
        is_learned: whether that batch has passed through the model.
        indices: numbers of the calls of a forward that are in regions.
    """

    def __init__(self) -> None:
        self.is_learned = False
        self.indices: set[int] = set()

    def is_separate(self, index: int, module: Any) -> bool:
        """Return whether the running call, number `index` of the forward, looks up separately.

        Until the calls are learned, it records the index of a call in a checkpointed region.

        Raises:
            RuntimeError: it is in a region, but was not with the first batch that was sent ahead.
        """
        if not is_checkpointed(module):
            return index in self.indices or not self.is_learned
        if index not in self.indices:
            if self.is_learned:
                raise RuntimeError(
                    f"call {index} of a sharded collection is in a checkpointed region, and was "
                    "not with the first batch of the pipeline: checkpoint it from the first batch "
                    "on, or make another pipeline"
                )
            self.indices.add(index)
        return True


class SentBatch:
    """The inputs of all collections for one batch, which are sent to the ranks that look them up.

    The constructor sends the sizes. `send_ids` sends the ids, `prefetch` loads their rows into
    caches, and `run_forward` uses them; the latter two send the ids first if that was not done. In
    the forward the first collection looks up the batches of all collections, so that their rows
    return together as well; calls in checkpointed regions look up separately. All ranks of the
    collections call the same methods in the same order.

    Args:
        inputs: function that returns the collections and their inputs in a batch, in the order of
            the model's calls per collection.
        lane: lane in which messages are sent and received.
        batch: batch that has the inputs, on the device.
        separate_calls: calls that look up separately; shared by all batches of a pipeline.
    """

    def __init__(
        self,
        inputs: LearnedInputs | CallerInputs,
        lane: Lane,
        batch: Staged[Any],
        separate_calls: SeparateCalls,
    ) -> None:
        self._lane = lane
        self._separate_calls = separate_calls
        error: Exception | None = None
        try:
            self._calls = inputs(batch.value)
        except Exception as raised:
            error, self._calls = raised, inputs.calls_without_inputs()
        # The stages of the batch, each None before it is reached. The sizes of all collections are
        # sent together, then the ids of all.
        self._sizes: Staged[Awaitable[Any]] | None = lane.run(
            lambda _: self._send_sizes(error), batch
        )
        self._ids: Staged[list[Awaitable[Any]]] | None = None  # in flight
        self._prefetched: Staged[list[Any]] | None = None  # received, with rows in the caches
        self._is_prefetch_due = True
        self._received: list[Any] | None = None  # ready on the stream of the forward
        self._outputs: dict[int, Callable[[], Any]] = {}  # of joint calls, by number of the call

    def _send_sizes(self, error: Exception | None) -> Awaitable[Any]:
        """Send the sizes; if the batch is wrong, tell the other ranks, and raise nothing.

        `send_ids` raises the error, as it does on the other ranks. Raised here, it would end an
        earlier step on this rank alone, and the other ranks would wait in that step.
        """
        try:
            return start_joint_input_dist(self._calls, error)
        except Exception as raised:
            return DeferredAwaitable(partial(_raise, raised))

    def send_ids(self) -> None:
        """Wait for the sizes and send the ids; do nothing if that was done before.

        Raises:
            Exception: the batch of this rank is wrong, or the caller's `inputs` raised for it.
            RuntimeError: the batch of another rank is wrong.
        """
        if self._sizes is not None:
            self._ids = self._lane.run(lambda sizes: sizes.wait(), self._sizes)
            self._sizes = None

    @property
    def is_local(self) -> bool:
        """Return whether all collections are on this rank alone."""
        return all(call.module.ranks.size == 1 for call in self._calls)

    def prefetch(self, lane: Lane) -> None:
        """Wait for the ids and prefetch their rows into the caches, in `lane`; only once.

        It is done again after `forget_prefetched`.
        """
        if self._is_prefetch_due:
            self._prefetched = lane.run(self._prefetch_rows, self._prefetched or self._receive())
            self._is_prefetch_due = False

    def forget_prefetched(self) -> None:
        """Let the tables of the collections forget all prefetched batches, also those of others.

        Tables expect lookups in the order of prefetches, and a step that failed may have left out
        its own.
        """
        self._is_prefetch_due = True
        modules: list[Any] = [call.module for call in self._calls]
        for submodules in (submodule for module in modules for submodule in module.modules()):
            for handle in submodules.handles if isinstance(submodules, TableGroups) else ():
                if isinstance(handle.module, TableBatchedEmbeddingBags):
                    handle.module.forget_prefetched()

    def _prefetch_rows(self, received: list[Any]) -> list[Any]:
        """Load the rows of received ids into the caches of their modules."""
        for call, call_rows in zip(self._calls, received, strict=True):
            call.module.prefetch(call_rows)
        return received

    def _receive(self) -> Staged[list[Any]]:
        """Send the ids if needed, and wait for them in the lane's stream; return them by call."""
        self.send_ids()
        assert self._ids is not None
        return self._lane.run(_wait_for_each, self._ids)

    def run_forward(self, forward: Callable[[Any], Any], batch: Any) -> Any:
        """Return `forward(batch)`, whose collections use the ids that were sent ahead.

        Sends the ids first if that was not done.

        Raises:
            RuntimeError: the model calls a collection with another input, or less often than its
                inputs were sent.
            Exception: see `send_ids`.
        """
        self.send_ids()
        with_grad = torch.is_grad_enabled()
        queues: dict[Any, deque[tuple[Any, Callable[[], Any]]]] = {}
        for i, call in enumerate(self._calls):
            queue = queues.setdefault(call.module, deque())
            queue.append((call.features, self._make_output_getter(i, with_grad=with_grad)))
        forwards = {module: _forward_from_queue(module, queue) for module, queue in queues.items()}
        result = _call_with_forwards(forwards, forward, batch)
        self._separate_calls.is_learned = True
        for module, queue in queues.items():
            if queue:
                raise RuntimeError(
                    f"the model did not call {type(module).__name__} as often as it was expected "
                    f"to: {len(queue)} of its inputs were sent and not used; give the pipeline "
                    "`inputs` with what every forward uses"
                )
        return result

    def _make_output_getter(self, index: int, *, with_grad: bool) -> Callable[[], Any]:
        """Return a function that returns the output of call `index`.

        The first of these functions that is called looks up the batches of all joint calls.
        """

        def get_output() -> Any:
            if self._received is None:
                self._received = (self._prefetched or self._receive()).take()
            module = self._calls[index].module
            if self._separate_calls.is_separate(index, module):
                return look_up_separately(module, self._received[index])
            if not self._outputs:
                self._outputs = in_grad_mode(self._look_up, enabled=with_grad)(self._received)
            return self._outputs[index]()

        return get_output

    def _look_up(self, received: Sequence[Any]) -> dict[int, Callable[[], Any]]:
        """Look up the batches of collections together and start to return their rows."""
        joint_calls = [i for i in range(len(self._calls)) if i not in self._separate_calls.indices]
        calls = [
            OutputCall(module, module.compute(received[i]), received[i])
            for i in joint_calls
            for module in (self._calls[i].module,)
        ]
        return dict(zip(joint_calls, start_joint_output_dist(calls), strict=True))


def _raise(error: Exception) -> NoReturn:
    raise error


def _wait_for_each(awaitables: list[Awaitable[Any]]) -> list[Any]:
    return [awaitable.wait() for awaitable in awaitables]


def _forward_from_queue(
    module: Any, queue: deque[tuple[Any, Callable[[], Any]]]
) -> Callable[[Any], Any]:
    """Return a forward that takes its output from a queue of (input, output getter)."""

    def forward(features: Any) -> Any:
        if not queue or not is_same_input(queue[0][0], features):
            raise RuntimeError(
                f"{type(module).__name__} got an input that is not the one sent ahead for it; "
                "`inputs` of the pipeline must name the objects that the model passes on"
            )
        return queue.popleft()[1]()

    return forward


def _call_with_forwards(
    forwards: Mapping[Any, Callable[..., Any]], function: Callable[[Any], Any], batch: Any
) -> Any:
    """Return `function(batch)`, during which modules have other forwards; their hooks still run."""
    uncompiled_forwards = {module: run_uncompiled(forward) for module, forward in forwards.items()}
    return with_attribute("forward", uncompiled_forwards, function)(batch)
