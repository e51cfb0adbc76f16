"""The joint input_dist of a plain training loop: one exchange for all collections of a model.

`DistributedModelParallel` starts it before its forward, for the inputs that are objects of the
forward's arguments. The first forward of each mode (training or eval, with or without gradients) is
searched for these inputs. If all ranks find the same inputs, later forwards send their ids
together. The first collection that the model calls looks up the batches of all, so that their rows
return in one output_dist. Collections in checkpointed regions look up separately.

If a rank does not find its inputs in a later forward, it tells the other ranks in its message of
sizes. In that forward each collection then sends its own ids, and all ranks search it again. A mode
is searched up to `_MAX_SEARCHES` times. A collection that a forward leaves out, after its batch was
looked up with the others, exchanges by itself from the next search on.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from emblib.grad_mode import in_grad_mode
from emblib.sharding.awaitables import Awaitable
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
    is_jagged,
    is_keyed,
    is_same_input,
    item_at,
    leaves,
    path_to,
)
from emblib.sharding.pipelines.inputs import sharded_modules
from emblib.sharding.ranks import RankGroup
from emblib.tables.graph_break import run_uncompiled

_LOG = logging.getLogger(__name__)
_MAX_SEARCHES = 4
"""Maximum number of searched forwards per mode; after them collections exchange separately."""

Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class _CallPath(NamedTuple):
    """A call of a collection whose ids can be sent before the forward.

    Attributes:
        module: the collection.
        path: path of its input in the arguments.
        input_class: class of the input.
        is_separate: whether it looks up separately. It does if gradients are enabled in the call
            and not in the forward, or the reverse; and in a checkpointed region, which repeats only
            its own lookup.
    """

    module: Any
    path: ItemPath
    input_class: type
    is_separate: bool


class _SeenCall(NamedTuple):
    """A call in a searched forward.

    Attributes:
        call: the collection and its input.
        has_changed: whether the model has changed the input in place, or made it itself.
        is_separate: whether it looks up separately, as in `_CallPath`.
    """

    call: InputCall
    has_changed: bool
    is_separate: bool


@dataclass
class _ForwardMode:
    """Lookups found in earlier forwards in train or eval mode, with or without gradients.

    Attributes:
        calls: calls whose inputs are sent together; empty if collections exchange separately. None
            if the next forward is searched.
        searches: number of forwards that were searched.
        made_other_calls: whether a later forward made other calls, so that the next is searched.
    """

    calls: list[_CallPath] | None = None
    searches: int = 0
    made_other_calls: bool = False


@dataclass
class _RunningForward:
    """The running forward, which is either searched for inputs or has ids that were sent before it.

    Attributes:
        arguments: arguments of the forward.
        mode: calls that forwards of this mode make.
        with_grad: whether gradients are enabled.
        is_searched: whether this forward is searched for the inputs of collections.
        leaf_versions: version counters of all leaves of the arguments of a searched forward, by
            `_identity`.
        seen_calls: calls of a searched forward so far.
        calls: calls whose ids were sent.
        sent_versions: version counters of the sent inputs, by number of the call.
        ids: ids in flight, by number of the call.
        waiting: numbers of the calls that were sent and not made yet, by module.
        outputs: functions that return the output of a call, by its number; None before the lookup.
    """

    arguments: Arguments
    mode: _ForwardMode
    with_grad: bool
    is_searched: bool = False
    leaf_versions: dict[int, tuple[int, ...]] = field(default_factory=dict)
    seen_calls: list[_SeenCall] = field(default_factory=list)
    calls: list[InputCall] = field(default_factory=list)
    sent_versions: list[tuple[int, ...]] = field(default_factory=list)
    ids: list[Awaitable[Any]] = field(default_factory=list)
    waiting: dict[Any, deque[int]] = field(default_factory=dict)
    outputs: dict[int, Callable[[], Any]] | None = None


class JointDist:
    """Sends the ids of a model's collections together, before its forward.

    `DistributedModelParallel` calls `start` before each forward, and `end` after it unless it
    failed, which the next `start` finds; collections call `take`. Belongs to one thread.

    Args:
        model: the model without any wrapper. If it is a collection itself, nothing is sent ahead.
        ranks: the ranks of the sharded collections; collections over another process group exchange
            separately.

    Attributes:
        enabled: whether collections exchange together; the same on all ranks. Turn it off for a
            model whose forward changes its arguments in place in some steps only.
    """

    def __init__(self, model: nn.Module, ranks: RankGroup) -> None:
        self.enabled = True
        self._model, self._ranks = model, ranks
        self._names = {
            module: name
            for name, module in sharded_modules(model).items()
            if name and module.ranks.group is ranks.group
        }
        self._modes: dict[tuple[bool, bool], _ForwardMode] = {}
        self._running: _RunningForward | None = None
        self._reasons: dict[str, str] = {}
        self._left_out: set[Any] = set()  # collections that some forward did not call

    @property
    def joint_paths(self) -> list[str]:
        """Return the paths of the collections whose ids are sent together."""
        calls = [call for mode in self._modes.values() for call in mode.calls or ()]
        return sorted({self._names[call.module] for call in calls})

    @property
    def separate_reasons(self) -> dict[str, str]:
        """Return {path: reason} of the called collections that exchange separately."""
        return dict(self._reasons)

    @run_uncompiled
    def start(self, arguments: Arguments) -> None:
        """Send the ids of a forward with these arguments, or start to search it.

        All ranks call this. It waits for the sizes of all ranks if anything is sent. It does
        nothing if `enabled` is False, on one rank, while a pipeline sends the ids, or if no inputs
        of this mode can be sent.
        """
        self._finish_failed()
        self.abandon()
        if not self.enabled or self._ranks.size == 1 or not self._names:
            return
        if any("forward" in module.__dict__ for module in self._names):
            return  # a pipeline has sent them
        with_grad = torch.is_grad_enabled()
        mode = self._modes.setdefault((self._model.training, with_grad), _ForwardMode())
        running = _RunningForward(arguments, mode, with_grad)
        if mode.calls is None:
            self._search(running)
        elif mode.calls:
            self._send(running, mode.calls)
        else:
            return
        self._running = running
        for module in self._names:
            module.sent_ahead = self

    def _search(self, running: _RunningForward) -> None:
        """Start to search a forward: remember its arguments and their versions."""
        running.mode.searches += 1
        running.is_searched = True
        running.leaf_versions = {
            _identity(leaf): _versions(leaf) for leaf in leaves(running.arguments)
        }

    def _send(self, running: _RunningForward, mode_calls: Sequence[_CallPath]) -> None:
        """Send the ids, or search this forward if any rank does not find its inputs.

        After `_MAX_SEARCHES` searches the collections of the mode exchange separately instead.
        """
        inputs = [_input_at(running.arguments, call_path) for call_path in mode_calls]
        is_known = not running.mode.made_other_calls and all(
            features is not None for features in inputs
        )
        calls = [
            InputCall(call_path.module, features if is_known else None)
            for call_path, features in zip(mode_calls, inputs, strict=True)
        ]
        ids = start_joint_input_dist(calls).wait()
        if ids is None:
            running.mode.calls, running.mode.made_other_calls = None, False
            if running.mode.searches >= _MAX_SEARCHES:
                running.mode.calls = []
                reason = "the inputs were not at the same paths in all forwards"
                self._set_reasons(dict.fromkeys(self._names.values(), reason))
                return
            self._search(running)
            return
        running.calls, running.ids = calls, ids
        running.sent_versions = [_versions(call.features) for call in calls]
        for index, call in enumerate(calls):
            running.waiting.setdefault(call.module, deque()).append(index)

    def take(self, module: Any, features: Any) -> Any:
        """Return the output of a collection for this input; None if it was not sent ahead.

        In a searched forward, record the call and return None.

        Raises:
            RuntimeError: the model has changed the input since it was sent, or the collection is in
                a checkpointed region only now.
        """
        running = self._running
        if running is None:
            return None
        if running.is_searched:
            has_changed = running.leaf_versions.get(_identity(features)) != _versions(features)
            is_separate = torch.is_grad_enabled() != running.with_grad or is_checkpointed(module)
            running.seen_calls.append(
                _SeenCall(InputCall(module, features), has_changed, is_separate)
            )
            return None
        queue = running.waiting.get(module)
        if queue is None and self._names[module] not in self._reasons:
            running.mode.made_other_calls = True  # the searched forward did not call it
        if not queue or not is_same_input(running.calls[queue[0]].features, features):
            return None
        index = queue.popleft()
        if running.sent_versions[index] != _versions(running.calls[index].features):
            raise RuntimeError(
                f"the model changed the input of {self._names[module]} in place, but its ids were "
                "sent before its forward: copy the input, or set joint_dist.enabled = False of "
                "the model on all ranks"
            )
        return self._output(running, index)

    def _output(self, running: _RunningForward, index: int) -> Any:
        """Return the output of a call. The first joint call looks up the batches of all of them."""
        mode_calls = running.mode.calls
        assert mode_calls is not None
        if mode_calls[index].is_separate:
            return look_up_separately(mode_calls[index].module, running.ids[index].wait())
        if is_checkpointed(mode_calls[index].module):
            raise RuntimeError(
                f"{self._names[mode_calls[index].module]} is in a checkpointed region, and was not "
                "in the first forward of this mode, after which it exchanges with other "
                "collections: set joint_dist.enabled = False of the model on all ranks"
            )
        if running.outputs is None:
            running.outputs = {}
            joint_calls = [i for i, call in enumerate(mode_calls) if not call.is_separate]
            outputs = in_grad_mode(_look_up, enabled=running.with_grad)(running, joint_calls)
            running.outputs = dict(zip(joint_calls, outputs, strict=True))
        return running.outputs.pop(index)()

    @run_uncompiled
    def end(self) -> None:
        """End a forward; after a searched forward, all ranks compare their findings (a collective).

        If the model did not make a call whose input was sent, all ranks search the next forward.
        """
        running = self._running
        self.abandon()
        if running is None:
            return
        if running.is_searched:
            self._agree_on_calls(running)
        elif any(running.waiting.values()):
            self._left_out |= {module for module, calls in running.waiting.items() if calls}
            running.mode.made_other_calls = True  # all ranks search the next forward

    def _finish_failed(self) -> None:
        """Look up the batches of a forward that failed before it called its collections.

        Other ranks that have not failed wait for the rows, which follow the ids without a header.
        The next header then tells all ranks that they are not in step.
        """
        running = self._running
        if running is None:
            return
        mode_calls = running.mode.calls or ()  # none in a searched forward
        for index in sorted(index for calls in running.waiting.values() for index in calls):
            if running.outputs is None or mode_calls[index].is_separate:
                self._output(running, index).wait()

    def abandon(self) -> None:
        """Forget the running forward, e.g. after it has failed; ranks compare nothing."""
        self._running = None
        for module in self._names:
            module.sent_ahead = None

    def _agree_on_calls(self, running: _RunningForward) -> None:
        """Agree with the other ranks on the calls of this mode, after a searched forward."""
        calls, reasons = self._find_calls(running)
        descriptions = [
            (self._names[call.module], repr(call.path), call.is_separate) for call in calls
        ]
        findings = self._ranks.gather_objects((descriptions, reasons))
        if any(finding != findings[0] for finding in findings):
            calls = []
            reasons = dict.fromkeys(
                self._names.values(), "ranks found its input at different places, or not at all"
            )
        is_settled = bool(calls) or running.mode.searches >= _MAX_SEARCHES
        running.mode.calls = calls if is_settled else None
        self._reasons = {
            path: reason for path, reason in self._reasons.items() if path not in self.joint_paths
        }
        self._set_reasons(reasons)
        if calls:
            names = [self._names[call.module] for call in calls]
            _LOG.info("collections that exchange together: %s", ", ".join(names))

    def _find_calls(self, running: _RunningForward) -> tuple[list[_CallPath], dict[str, str]]:
        """Return the calls whose input can be sent ahead, and the reasons of others by path."""
        reason = "a forward left it out, after its batch had been sent"
        calls, reasons = [], {self._names[module]: reason for module in self._left_out}
        for call, has_changed, is_separate in running.seen_calls:
            path = path_to(running.arguments, call.features)
            if path is None:
                reasons[self._names[call.module]] = (
                    "the model makes its input, which is not an object of the forward's arguments"
                )
            elif has_changed:
                reasons[self._names[call.module]] = "the model changes its input in place"
            else:
                calls.append(_CallPath(call.module, path, type(call.features), is_separate))
        # Calls of a module are matched by their order, so all of its inputs must be known.
        return [
            path_call for path_call in calls if self._names[path_call.module] not in reasons
        ], reasons

    def _set_reasons(self, reasons: Mapping[str, str]) -> None:
        """Record and log why collections exchange separately."""
        for path, reason in reasons.items():
            if self._reasons.get(path) != reason:
                _LOG.info("%s exchanges by itself: %s", path, reason)
        self._reasons.update(reasons)


def _look_up(running: _RunningForward, indices: Sequence[int]) -> list[Callable[[], Any]]:
    """Look up the batches of several collections and start to return their rows."""
    calls = []
    for index in indices:
        module, received = running.calls[index].module, running.ids[index].wait()
        calls.append(OutputCall(module, module.compute(received), received))
    return start_joint_output_dist(calls)


def _input_at(arguments: Arguments, call: _CallPath) -> Any:
    """Return the input at a path of the arguments; None if there is none of this kind."""
    try:
        features = item_at(arguments, call.path)
    except (LookupError, AttributeError, TypeError):
        return None
    return features if type(features) is call.input_class else None


def _identity(features: Any) -> int:
    """Return a number that is equal for all wrappers of one input."""
    return id(features.values()) if is_keyed(features) or is_jagged(features) else id(features)


def _versions(features: Any) -> tuple[int, ...]:
    """Return the version counters of an input's tensors; changes in place increase them."""
    tensors = [features]
    if is_keyed(features) or is_jagged(features):
        tensors = [features.values(), features.lengths(), features.weights_or_none()]
    return tuple(
        tensor._version
        for tensor in tensors
        if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
    )
