"""Training steps as CUDA graphs, for batches whose number of ids varies.

A small step spends its time on the host: Python, autograd and a launch per kernel. The replay of a
CUDA graph is one launch, but it repeats kernels with the shapes and the addresses that they were
captured with. `CapturedStep` gives every batch such fixed shapes:

1. All batches must have one `BatchLayout`, that of the first one; another one raises before
   anything is written. (`run_eagerly` takes any batch.) A first batch whose step raises fixes none.
2. Batches are divided into size classes by `bounds`. A `_SizeClass` has a `StaticBatch` of one
   bound, which pads its batches; one with more ids than all bounds runs uncaptured and unpadded.
3. The first steps of a class run uncaptured, on the stream of the capture. They are the warm-up and
   train, so nothing must be restored. The next step is captured, which runs no kernel, and
   replayed.

On the CPU there are no graphs: a step is padded in the same way and runs at once.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from emblib.collections.optimizers.table_groups import TableGroup
from emblib.jagged.static_batches import BatchLayout, StaticBatch
from emblib.tables.bounds_report import with_padding

__all__ = ["CapturedStep"]

MAX_BOUND = 2**31 - 4096  # kMaxLookups of csrc/core/layout.h

_TORCH_FOLDER = str(Path(torch.__file__).parent)
_EMBLIB_FOLDER = str(Path(__file__).parent)
_CAPTURE_ADVICE = (
    "keep such operations out of the step: return tensors and read them later, use a capturable "
    "optimizer (torch.optim.Adam(..., capturable=True), with a GradScaler fused=True too), and "
    "tables whose lookups wait for nothing; step.run_eagerly(batch) runs it as it is"
)


class CapturedStep:
    """Run a training step as a CUDA graph, for batches of varying numbers of ids.

    `step(batch)` is a whole step of your loop: `zero_grad`, forward, loss, backward, and `step` of
    the optimizers of dense parameters. It must not wait for the device, and must do the same for
    each batch: its Python runs in the first steps of a size class and in the capture, not in
    replays.

    A batch is any tree of lists, tuples and dicts. The values of each `KeyedJaggedTensor` and
    `JaggedTensor` in it may vary in number; other tensors keep their shape, and plain values do not
    change. The step gets an equal tree of static tensors on `device`. Its jagged tensors have as
    many values as the bound of their size class: padding comes first (-1 in integers, 0 in floats
    and weights), then the batch, and `offsets()[0]` is the number of padding values. Modules of
    emblib skip the padding; other code that reads `values()` must skip it too.

    The result is that of the step, with tensors detached. After a replay its tensors are static:
    the next batch of the same size class overwrites them, so clone what you keep. The same holds
    for gradients that the step leaves on parameters.

    Results have the same bits as in an uncaptured loop. Kernels read the hyperparameters of
    emblib's tables, so these may change between steps. Numbers of `torch.optim` are part of a
    graph: make a rate that changes a tensor on the device; any other change raises RuntimeError
    until `reset`. An exception or interrupt leaves tables as before or after the step.

    On a CPU the step runs uncaptured, with the same padding. Calls must come from one thread at a
    time.

    Args:
        step: function of a batch that returns any tree of tensors and other values.
        bounds: ascending numbers of ids, one graph each. A batch uses the smallest bound that is
            not below the ids of any of its jagged tensors; one with more ids than all bounds runs
            uncaptured and unpadded.
        device: device of the static tensors; None is the device of the first batch. Batches may be
            on the host or on the device.
        warmup: uncaptured steps before the first capture, at least 1; `DistributedDataParallel`
            needs 11. Every later size class has one uncaptured step.

    Raises:
        ValueError: `bounds` are empty or not ascending ints in [1, 2^31 - 4096], or `warmup` is not
            an int >= 1.

    Example:
        >>> optimizer = emblib.optim.SGD(0.1)
        >>> table = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(9, 4)], optimizer)
        >>> def train(batch):
        ...     loss = table(batch.values(), batch.offsets()).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> step = emblib.CapturedStep(train, bounds=[8, 64])  # captures on a GPU only
        >>> ids = torch.tensor([3, 1, 4])
        >>> step(emblib.JaggedTensor(ids, lengths=torch.tensor([2, 1]))).shape
        torch.Size([])
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        bounds: Sequence[int],
        *,
        device: torch.device | str | None = None,
        warmup: int = 3,
    ) -> None:
        self.bounds = _check_bounds(bounds)
        if type(warmup) is not int or warmup < 1:
            raise ValueError(f"warmup must be an int >= 1, got {warmup!r}")
        self.warmup = warmup
        self.device = None if device is None else torch.empty(0, device=device).device
        self._step = step
        self._layout: BatchLayout | None = None
        self._size_classes: dict[int, _SizeClass] = {}
        self._num_uncaptured_steps = 0
        self._stream: Any = None
        self._pool: Any = None
        self._optimizers: dict[int, Optimizer] = {}

    def __call__(self, batch: Any) -> Any:
        """Train on a batch and return the result of the step.

        Raises:
            TypeError: a leaf of the batch is neither a tensor, a jagged tensor nor a plain value.
            ValueError: the batch differs from the first one in more than the number of ids, is on
                another device, or has no fixed shape (`BatchLayout.of`).
            RuntimeError: the step cannot be captured; or a number of an optimizer has changed, or a
                parameter or state was replaced, since the capture. In each case no table,
                parameter or state is changed.
            Exception: an uncaptured step raised it.
        """
        is_first, device = self._layout is None, self.device
        layout, leaves = self._check_layout(batch)
        try:
            return self._run_step(layout, leaves)
        except BaseException:
            if is_first:  # the next batch may be the valid one
                self._layout, self.device = None, device
                self._size_classes.clear()
            raise

    def _run_step(self, layout: BatchLayout, leaves: list[Any]) -> Any:
        """Run or replay the step of a batch with the common layout."""
        bound = self._bound_of(layout.num_ids(leaves))
        if bound is None:
            return self._run_eagerly(layout, leaves)
        if self._device.type != "cuda":
            padded = StaticBatch(layout, bound, self._device)
            padded.fill(leaves)
            return with_padding(self._run_detached)(padded.batch())
        size_class = self._size_classes.get(bound)
        if size_class is None:
            inputs = StaticBatch(layout, bound, self._device)
            size_class = self._size_classes[bound] = _SizeClass(inputs)
        if size_class.graph is not None:
            self._check_unchanged(size_class)
        with self._on_stream() as caller_stream:
            size_class.inputs.fill(leaves)
            result = with_padding(self._run_or_replay)(size_class)
            if size_class.graph is not None:
                return result
            return _record_stream(result, caller_stream)

    def run_eagerly(self, batch: Any) -> Any:
        """Train on a batch uncaptured and unpadded, e.g. on the last one, which has fewer samples.

        The batch is moved to `device`, by default its own. It may differ from all other batches.

        Raises:
            TypeError, ValueError: no layout describes the batch, see `BatchLayout.of`.
        """
        layout, leaves = BatchLayout.of(batch)
        if self.device is None:
            self.device = layout.device_of(leaves)
        return self._run_eagerly(layout, leaves)

    def reset(self) -> None:
        """Free all graphs and forget the layout of batches: the next steps are captured again.

        Call it after changes that a graph does not see: numbers in `param_groups`, `train()` or
        `eval()`, frozen or moved parameters, other tables or optimizers, `track_statistics` or
        `track_evictions`.
        """
        if self._stream is not None:
            torch.cuda.synchronize(self._device)  # nothing may use the memory that is freed
        self._size_classes.clear()
        self._layout = self._pool = None
        self._num_uncaptured_steps = 0
        self._optimizers.clear()

    def bound_of(self, batch: Any) -> int | None:
        """Return the bound of the size class of a batch; None if it has more ids than all bounds.

        Raises:
            TypeError, ValueError: no layout describes the batch, see `BatchLayout.of`.
        """
        layout, leaves = BatchLayout.of(batch)
        return self._bound_of(layout.num_ids(leaves))

    @property
    def captured_bounds(self) -> list[int]:
        """Return the bounds whose graphs exist."""
        return sorted(
            bound
            for bound, size_class in self._size_classes.items()
            if size_class.graph is not None
        )

    # Batches

    @property
    def _device(self) -> torch.device:
        assert self.device is not None
        return self.device

    def _check_layout(self, batch: Any) -> tuple[BatchLayout, list[Any]]:
        """Return the common layout and a batch's leaves; raise if they do not fit.

        Raises:
            TypeError, ValueError: see `__call__`.
        """
        layout, leaves = BatchLayout.of(batch)
        if self._layout is not None:
            self._layout.check(layout)
        device = layout.device_of(leaves) if self.device is None else self.device
        layout.check_devices(leaves, device)
        self.device, self._layout = device, self._layout or layout
        return self._layout, leaves

    def _bound_of(self, num_ids: int) -> int | None:
        """Return the smallest bound that is not below `num_ids`; None if all are."""
        return next((bound for bound in self.bounds if num_ids <= bound), None)

    # Steps

    @contextmanager
    def _on_stream(self) -> Any:
        """Run the block on the stream of the captures, in order with the caller's stream.

        Yields the caller's stream.
        """
        with torch.cuda.device(self._device):
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            caller_stream = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(caller_stream)
            try:
                with torch.cuda.stream(self._stream):
                    yield caller_stream
            finally:
                caller_stream.wait_stream(self._stream)

    def _run_eagerly(self, layout: BatchLayout, leaves: list[Any]) -> Any:
        """Run the step uncaptured on a batch, given as `leaves`; its result is detached."""
        if self._device.type != "cuda":
            return self._run_detached(layout.move(leaves, self._device))
        with self._on_stream() as caller_stream:
            result = self._run_detached(layout.move(leaves, self._device))
            return _record_stream(result, caller_stream)

    def _run_detached(self, batch: Any) -> Any:
        """Run the step on a batch; detach its result, whose autograd graph would keep memory."""
        return pytree.tree_map(
            lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, self._step(batch)
        )

    def _run_or_replay(self, size_class: _SizeClass) -> Any:
        """Run a step with the static tensors of its class: uncaptured, or by replay."""
        if size_class.graph is None:
            is_warmup = self._num_uncaptured_steps < self.warmup
            if is_warmup or not size_class.is_warm:
                with self._collect_optimizers(), _collect_waits(size_class.waits):
                    result = self._run_detached(size_class.inputs.batch())
                self._num_uncaptured_steps += 1
                size_class.is_warm = True
                return result
            self._capture(size_class)
        assert size_class.graph is not None
        size_class.graph.replay()
        return size_class.result

    def _capture(self, size_class: _SizeClass) -> None:
        """Capture the step of a class; no kernel runs.

        Raises:
            RuntimeError: the step cannot be captured. Gradients of the optimizers' parameters are
                as before.
        """
        graph = torch.cuda.CUDAGraph()
        gradients = [
            (parameter, parameter.grad)
            for optimizer in self._optimizers.values()
            for parameter in _parameters_of(optimizer)
        ]
        values_before = self._optimizer_values()
        try:
            with (
                self._collect_optimizers(),
                torch.cuda.graph(
                    graph,
                    pool=self._pool,
                    stream=self._stream,
                    capture_error_mode="thread_local",
                ),
            ):
                result = self._run_detached(size_class.inputs.batch())
        except BaseException as error:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            self._end_capture_of_random_numbers()
            if not isinstance(error, Exception):
                raise
            raise RuntimeError(_capture_error_message(error, size_class.waits)) from error
        if self._pool is None:
            self._pool = graph.pool()
        size_class.optimizer_values = {**values_before, **self._optimizer_values()}
        size_class.result = result
        size_class.optimizer_memory = self._optimizer_memory()
        size_class.graph = graph  # last, so that an interrupt before it leads to another capture

    def _end_capture_of_random_numbers(self) -> None:
        """Make an empty capture, so that torch's generator works again after a refused capture.

        Torch ends the capture of its generator only with a graph. Until then every draw of random
        numbers on the device raises "Offset increment outside graph capture".
        """
        with warnings.catch_warnings(), suppress(RuntimeError):
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            with torch.cuda.graph(
                torch.cuda.CUDAGraph(), stream=self._stream, capture_error_mode="thread_local"
            ):
                pass

    # Optimizers

    @contextmanager
    def _collect_optimizers(self) -> Any:
        """Collect the optimizers that make a step in the block."""

        def collect(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._optimizers[id(optimizer)] = optimizer

        handle = register_optimizer_step_pre_hook(collect)
        try:
            yield
        finally:
            handle.remove()

    def _optimizer_memory(self) -> list[_OptimizerMemory]:
        """Return, per optimizer, the tensors whose addresses a graph contains."""
        return [
            _OptimizerMemory(optimizer, vars(optimizer).get("state"), parameters, addresses)
            for optimizer in self._optimizers.values()
            for parameters in [_parameters_of(optimizer)]
            for addresses in [[parameter.data_ptr() for parameter in parameters]]
        ]

    def _optimizer_values(self) -> dict[tuple[int, int, str], Any]:
        """Return the hyperparameters that a graph contains, by optimizer, group and name."""
        return {
            (optimizer_id, number, name): value.tolist() if isinstance(value, Tensor) else value
            for optimizer_id, optimizer in self._optimizers.items()
            for number, group in enumerate(optimizer.param_groups)
            if not isinstance(group, TableGroup)  # kernels read theirs from the device
            for name, value in group.items()
            if name != "params" and not (isinstance(value, Tensor) and value.is_cuda)
        }

    def _check_unchanged(self, size_class: _SizeClass) -> None:
        """Raise RuntimeError if a number or an address that is part of a graph has changed."""
        for memory in size_class.optimizer_memory:
            replaced_part = memory.replaced_part()
            if replaced_part is not None:
                raise RuntimeError(
                    f"the {replaced_part} of {type(memory.optimizer).__name__} were replaced after "
                    "the step was captured, as load_state_dict of an optimizer and .to() of a "
                    "model do: call reset() to capture it again with the new ones"
                )
        current_values = self._optimizer_values()
        if current_values == size_class.optimizer_values:
            return
        for attribute in sorted({*current_values, *size_class.optimizer_values}):
            captured_value, current_value = (
                size_class.optimizer_values.get(attribute),
                current_values.get(attribute),
            )
            if captured_value == current_value:
                continue
            optimizer_id, number, name = attribute
            optimizer = type(self._optimizers[optimizer_id]).__name__
            raise RuntimeError(
                f"{name!r} of group {number} of {optimizer} was {captured_value!r} when the step "
                f"was captured and is {current_value!r} now, which the graph would not see: make "
                f"it a tensor on the device ({name}=torch.tensor({captured_value!r}, "
                "device='cuda'), which schedulers fill in place), or call reset() to capture again"
            )


class _OptimizerMemory(NamedTuple):
    """The tensors of an optimizer at a capture, kept alive because a graph has their addresses.

    Attributes:
        optimizer: the optimizer.
        state: value of `optimizer.state`; None if there is none.
        parameters: parameters of all groups.
        addresses: address of each parameter.
    """

    optimizer: Optimizer
    state: Any
    parameters: list[Tensor]
    addresses: list[int]

    def replaced_part(self) -> str | None:
        """Return "states" or "parameters" if these were replaced since the capture, else None."""
        if vars(self.optimizer).get("state") is not self.state:
            return "states"
        current_addresses = [parameter.data_ptr() for parameter in self.parameters]
        return "parameters" if current_addresses != self.addresses else None


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class _SizeClass:
    """The batches of one bound, and the graph of their step.

    Attributes:
        inputs: the static tensors, of the size of the bound.
        graph: the CUDA graph of the step; None until it is captured.
        result: the static result of the step.
        optimizer_values: the optimizers' hyperparameters at the capture, by optimizer, group, name.
        optimizer_memory: the tensors of optimizers at the capture.
        is_warm: whether a step of this class has run uncaptured.
        waits: descriptions of the device-to-host waits of the uncaptured steps, for the error
            message of a failed capture.
    """

    def __init__(self, inputs: StaticBatch) -> None:
        self.inputs = inputs
        self.graph: Any = None
        self.result: Any = None
        self.optimizer_values: dict[tuple[int, int, str], Any] = {}
        self.optimizer_memory: list[_OptimizerMemory] = []
        self.is_warm = False
        self.waits: list[str] = []


def _record_stream(result: Any, stream: Any) -> Any:
    """Record that `stream` uses a result whose memory another stream allocated."""
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            leaf.record_stream(stream)
    return result


def _check_bounds(bounds: Sequence[int]) -> tuple[int, ...]:
    """Return bounds as a tuple; raise ValueError unless they are as `CapturedStep` needs them."""
    bound_tuple = tuple(bounds) if isinstance(bounds, Sequence) else ()
    is_valid = all(type(bound) is int and 0 < bound <= MAX_BOUND for bound in bound_tuple)
    if not bound_tuple or not is_valid or list(bound_tuple) != sorted(set(bound_tuple)):
        raise ValueError(
            f"bounds must be ascending ints in [1, {MAX_BOUND}], e.g. [4096, 16384], got {bounds!r}"
        )
    return bound_tuple


@contextmanager
def _collect_waits(waits: list[str]) -> Any:
    """Replace `waits` by the device waits of the block, as text; pass other warnings on.

    Nothing happens if torch's debug mode for waits is set already.
    """
    if torch.cuda.get_sync_debug_mode() != 0:  # the caller looks for waits
        yield
        return
    waits.clear()
    caught_warnings: list[Any] = []
    try:
        with warnings.catch_warnings(record=True) as caught_warnings:
            warnings.filterwarnings("always", message=".*synchronizing CUDA operation")
            torch.cuda.set_sync_debug_mode("warn")
            yield
    finally:
        torch.cuda.set_sync_debug_mode(0)
        for warning in caught_warnings:
            message = str(warning.message)
            if "synchronizing CUDA operation" in message:
                waits.append(f"{message} ({warning.filename}:{warning.lineno})")
            elif "Synchronization debug mode" not in message:  # a remark on the mode itself
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )


def _capture_error_message(error: BaseException, waits: Sequence[str]) -> str:
    """Return the error message for a step that cannot be captured: operation, line and advice."""
    while error.__context__ is not None and not error.__suppress_context__:
        error = error.__context__  # ending a capture that has failed raises too
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [
        frame for frame in frames if not frame.filename.startswith((_TORCH_FOLDER, _EMBLIB_FOLDER))
    ]
    locations = [
        f"{frame.filename}:{frame.lineno} ({frame.line})" for frame in (user_frames or frames)[-1:]
    ]
    message = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    clauses = [
        f"the step cannot be captured as a CUDA graph: {message}",
        *(f"at {line}" for line in locations),
    ]
    if waits:
        clauses.append(f"waits of the uncaptured step: {'; '.join(dict.fromkeys(waits))}")
    return "; ".join([*clauses, _CAPTURE_ADVICE])
