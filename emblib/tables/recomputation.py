"""Side effects of forwards that activation checkpointing repeats.

`torch.utils.checkpoint` runs a function in forward and again in backward. The output of a lookup
may be computed twice, but a key must be inserted, an id counted and a warning given only once. So a
lookup that changes state calls `checkpointed_forward`. In the first forward it stores values that
the repetition needs with `note`, e.g. the rows of its keys. In the repetition it gets them with
`recall`, in the order of the calls, and changes nothing.

The checkpointed regions around a lookup are found on the call stack: torch does not say whether a
running function is checkpointed or repeated. The notes are stored on torch's own object of a
region, so they live as long as the graph that may repeat the region.

- With `use_reentrant=True` the first forward runs under `no_grad`. It must look up as in training,
  unless no input of the region requires a gradient: then nothing is repeated.
- Regions nest. Repeating the outer one runs the inner one as a first forward again. That counts as
  a repetition too, and the values that it gets are noted again for the new inner region.
- A backward within a region does not belong to it: the search ends where autograd was called.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch.autograd import graph
from torch.utils import checkpoint

_REENTRANT_FORWARD = checkpoint.CheckpointFunction.forward.__code__
_REENTRANT_BACKWARD = checkpoint.CheckpointFunction.backward.__code__
_CHECKPOINT_FILE = _REENTRANT_FORWARD.co_filename
_CALL_OF_AUTOGRAD = graph._engine_run_backward.__code__
_NO_TASK = -1


class CheckpointedForward:
    """A running forward within checkpointed regions, and the notes for its repetition.

    Attributes:
        is_recomputation: whether backward repeats an earlier forward.
        trains_without_grad: whether a lookup without gradients trains, because a region disables
            them in its first forward.
        regions: regions that may repeat this forward, innermost first.
    """

    def __init__(self) -> None:
        self.is_recomputation = False
        self.trains_without_grad = False
        self._repeated_region: _Region | None = None
        self.regions: list[_Region] = []

    def note(self, owner: object, value: Any) -> None:
        """Store a value that the repetition of this call of `owner` needs.

        `owner` must be hashable, and is only weakly referred to.
        """
        for region in self.regions:
            region.notes_by_owner.setdefault(owner, []).append(value)

    def recall(self, owner: object) -> Any:
        """Return the value that the first forward noted at this call of `owner`, or None.

        Call it only if `is_recomputation`, and once per call of `owner`: it counts the calls.
        """
        assert self._repeated_region is not None
        note = self._repeated_region.next_note(owner)
        if note is not None:
            self.note(owner, note)
        return note

    def add_region_of(self, frame: FrameType) -> None:
        """Add the region of a stack frame in torch's file, if the frame belongs to a region."""
        code, variables = frame.f_code, frame.f_locals
        if code is _REENTRANT_FORWARD:
            if variables["ctx"].next_functions:  # otherwise there is no graph to repeat it
                self.regions.append(_region_of(variables["ctx"]))
                self._set_trains_without_grad()
        elif code is _REENTRANT_BACKWARD:
            self._begin_repetition(_region_of(variables["ctx"]), torch._C._current_graph_task_id())
            self._set_trains_without_grad()
        elif "gen" in variables:
            # The generator around a first forward has the region as a variable. The function that
            # runs it is `checkpoint` up to torch 2.13, `_checkpoint_impl` from 2.14 on.
            variables = variables["gen"].gi_frame.f_locals
            self.regions.append(_region_of(variables["new_frame"]))
        elif code.co_name == "unpack_hook" and "gid" in variables:
            self._begin_repetition(_region_of(variables["frame"]), variables["gid"])

    def _set_trains_without_grad(self) -> None:
        self.trains_without_grad = not torch.is_inference_mode_enabled()

    def _begin_repetition(self, region: _Region, run_id: object) -> None:
        region.begin(run_id)
        self._repeated_region, self.is_recomputation = region, True


class _Region:
    """Notes of the lookups of a checkpointed region, by owner in the order of its calls."""

    def __init__(self) -> None:
        self.notes_by_owner: weakref.WeakKeyDictionary[object, list[Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._run_id: object = None
        self._num_calls: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def begin(self, run_id: object) -> None:
        """Restart from the first notes, unless this repetition of the region has begun already."""
        if self._run_id != run_id:
            self._run_id = run_id
            self._num_calls.clear()

    def next_note(self, owner: object) -> Any:
        """Return the next note of `owner`, or None if there are no more."""
        notes, call_number = self.notes_by_owner.get(owner, []), self._num_calls.get(owner, 0)
        self._num_calls[owner] = call_number + 1
        return notes[call_number] if call_number < len(notes) else None


def _region_of(holder: Any) -> _Region:
    """Return the region of torch's checkpointing object."""
    region: _Region = vars(holder).setdefault("_emblib_region", _Region())
    return region


def checkpointed_forward(*, training: bool = True) -> CheckpointedForward | None:
    """Return the running forward with the regions around it; None outside of checkpointing.

    Outside of checkpointing this costs three reads of torch's state. The call stack is searched
    only within a backward, within hooks of saved tensors, and in `training` without gradients.

    Args:
        training: whether the caller would train with gradients.
    """
    if (
        torch._C._current_graph_task_id() == _NO_TASK
        and (torch.is_grad_enabled() or not training)
        and torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    ):
        return None
    forward = CheckpointedForward()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _CALL_OF_AUTOGRAD:
        if frame.f_code.co_filename == _CHECKPOINT_FILE:
            forward.add_region_of(frame)
            if forward.is_recomputation:
                break
        frame = frame.f_back
    return forward if forward.is_recomputation or forward.regions else None


def is_first_training_forward(*, training: bool) -> bool:
    """Return whether the running forward trains, and is not a repetition of an earlier one.

    A forward that a backward makes repeats one, as for replicas of a table (`GradientSink`).
    `training` is as in `checkpointed_forward`.
    """
    forward = checkpointed_forward(training=training)
    if forward is None:
        return torch.is_grad_enabled() and torch._C._current_graph_task_id() == _NO_TASK
    return not forward.is_recomputation and (torch.is_grad_enabled() or forward.trains_without_grad)


def is_recomputation() -> bool:
    """Return whether backward repeats the running forward."""
    forward = checkpointed_forward(training=False)
    return forward is not None and forward.is_recomputation
