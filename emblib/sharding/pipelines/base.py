"""Pipelines: loops over batches that overlap copies, the input dist and prefetching.

`TrainPipelineBase` copies the next batch to the device while a batch is trained,
`TrainPipelineSparseDist` also sends the ids of the next batch, and
`PrefetchTrainPipelineSparseDist` also prefetches its rows into caches.
`EvalPipelineSparseDist` runs the model forward only. On the CPU only messages overlap with the
training: copies and prefetching end before the pipeline goes on.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from emblib.grad_mode import in_grad_mode
from emblib.sharding.pipelines.batches import Lane
from emblib.sharding.pipelines.inputs import (
    CallerInputs,
    Inputs,
    LearnedInputs,
    SentBatch,
    SeparateCalls,
    sharded_modules,
)
from emblib.sharding.pipelines.loading import DrainAll, Loader, Meter, Progress, Step, UnevenInputs
from emblib.sharding.ranks import RankGroup
from emblib.specs import check_module


class TrainPipelineBase:
    """Trains one batch per call, and copies the next batch to the device meanwhile.

    `progress(batches)` reads ahead in an iterator and trains its next batch; it raises
    StopIteration when all ranks are drained. While all ranks have batches, results are bit for bit
    those of the loop

        for batch in loader: optimizer.zero_grad(); loss, out = model(batch); loss.backward();
                             optimizer.step()

    A loss of several elements is summed. All ranks construct the pipeline together. A pipeline and
    its model belong to one thread of a process (docs/threads.md).

    Args:
        model: model that `forward` calls; its sharded collections may be anywhere in it.
        optimizer: anything with `zero_grad` and `step`; None for a model in eval mode.
        device: device to which batches are copied; None is the device of the ranks.
        forward: function of a batch that returns (loss, output), or the loss, which is then the
            output too; None is `model`.
        uneven_inputs: reaction to loaders of different lengths over the ranks: `DrainAll()`,
            `StopAtShortest()` or `AssumeEqual()`; None is `DrainAll()`.
        on_progress: function that is called with a `Progress` after every step.
        ranks: ranks that train together; None uses the ranks of the model, or this process alone
            if it has none.

    Raises:
        TypeError: `model` is not a module, `optimizer` lacks `zero_grad` or `step`, `forward` or
            `on_progress` is not a function, `uneven_inputs` or `ranks` has another type.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> def loss_of(batch):
        ...     loss = model(batch).square().mean()
        ...     return loss, loss.detach()
        >>> ranks = emblib.sharding.RankGroup.single()
        >>> optimizer = torch.optim.SGD(model.parameters(), 0.1)
        >>> pipeline = emblib.sharding.TrainPipelineBase(
        ...     model, optimizer, forward=loss_of, ranks=ranks
        ... )
        >>> losses = list(pipeline.run(torch.rand(4, 2) for _ in range(3)))
        >>> len(losses)
        3
    """

    batches_ahead: ClassVar[int] = 1
    """The number of later batches that are read before a batch is trained."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str | None = None,
        *,
        forward: Callable[[Any], Any] | None = None,
        uneven_inputs: UnevenInputs | None = None,
        on_progress: Callable[[Progress], object] | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        check_module("model", model)
        is_optimizer = hasattr(optimizer, "zero_grad") and hasattr(optimizer, "step")
        if optimizer is not None and not is_optimizer:
            raise TypeError(
                "optimizer must have zero_grad and step, or be None where the model is only run "
                f"forward, in eval mode; got {optimizer!r}"
            )
        _check_callable("forward", forward)
        _check_callable("on_progress", on_progress)
        ranks = _ranks_of(model) if ranks is None else RankGroup.from_value(ranks)
        self.model, self.optimizer = model, optimizer
        self.device = torch.device(ranks.device if device is None else device)
        self._forward = model if forward is None else forward
        self._on_progress = on_progress
        self._loader = Loader(
            ranks, DrainAll() if uneven_inputs is None else uneven_inputs, self.device
        )
        self._steps_ahead: deque[Step] = deque()
        self._meter = Meter()

    @property
    def steps(self) -> int:
        """Return the number of finished steps, e.g. for a loader that resumes after them."""
        return self._meter.step

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Train the next batch, call `on_progress`, and return the output of `forward`.

        All ranks must call this equally often. If `dataloader_iter` is another iterator than in the
        last call, batches that were already read from the earlier one are trained first. With
        `DrainAll` a rank without further batches computes an empty batch. A model in eval mode is
        only run forward. After an error of a step, the next call trains the batch after it.

        Raises:
            StopIteration: all ranks are drained (`StopAtShortest`: one is); the next call may pass
                a new iterator.
            ValueError: the model is in training mode, and the pipeline has no optimizer.
            TypeError: `dataloader_iter` is not an iterator or returned None, or `forward` returned
                no loss to train with.
            RuntimeError: another rank could not read its batch; that rank raises its own error.
                With `AssumeEqual` other ranks wait for it instead.
            Exception: the iterator, the model, the optimizer or `on_progress` raised it.
        """
        if self.model.training and self.optimizer is None:
            raise ValueError(
                "a model in training needs an optimizer: give the pipeline one, of tables alone "
                "model.fused_optimizer, or call model.eval()"
            )
        self._meter.begin()
        self._loader.set_iterator(dataloader_iter)
        step = self._next_step()
        if step is None:
            self._meter.pause()
            raise StopIteration
        output = self._train(step)
        progress = self._meter.end(step.count_examples())
        if self._on_progress is not None:
            self._on_progress(progress)
        return output

    def run(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Call `progress` until all ranks are drained; yield the output of every step."""
        iterator = iter(batches)
        self._loader.begin_epoch(iterator)
        while True:
            try:
                output = self.progress(iterator)
            except StopIteration:
                return
            yield output

    def _next_step(self) -> Step | None:
        """Read ahead, then remove and return the step to train; return None at the end of an epoch.

        Waits for the numbers of all ranks for this step, except with `AssumeEqual`.

        Raises:
            Exception: see `Step.raise_failure`; with `AssumeEqual` the iterator raised it.
        """
        while True:
            while len(self._steps_ahead) <= self.batches_ahead:
                self._steps_ahead.append(self._loader.fetch())
            step = self._steps_ahead.popleft()
            if self._loader.decide_to_run(step):
                return step
            step.raise_failure()
            if self._loader.is_last(step, self._steps_ahead[-1]):
                # No rank runs the later steps: receive their messages and drop them.
                while self._steps_ahead:
                    self._loader.decide_to_run(self._steps_ahead.popleft())
                self._loader.end_epoch()
                return None

    def _train(self, step: Step) -> Any:
        """Run forward on the batch of a step; in training mode also backward and the optimizer."""
        assert step.batch is not None
        batch = step.batch.take()
        if self.model.training:
            self.optimizer.zero_grad()
        self._before_forward(step)
        loss, output = self._loss_and_output(self._run_forward(step, batch))
        self._after_forward(step)
        if self.model.training:
            _backward(loss)
            self.optimizer.step()
        return output

    def _run_forward(self, step: Step, batch: Any) -> Any:
        return self._forward(batch)

    def _loss_and_output(self, result: Any) -> tuple[Any, Any]:
        """Split the result of `forward` into loss and output."""
        if isinstance(result, tuple | list) and len(result) == 2:
            return result[0], result[1]
        return result, result

    def _before_forward(self, step: Step) -> None:
        """Start other work before the forward of a step."""

    def _after_forward(self, step: Step) -> None:
        """Start other work between the forward and the backward of a step."""


def _ranks_of(model: nn.Module) -> RankGroup:
    """Return the ranks of the model, else of its first sharded collection, else this process."""
    for module in (model, *sharded_modules(model).values()):
        # Replicated models have more `dense_ranks` than `ranks`, and all of them step together.
        for name in ("dense_ranks", "ranks"):
            if isinstance(ranks := getattr(module, name, None), RankGroup):
                return ranks
    return RankGroup.single(next((p.device for p in model.parameters()), torch.device("cpu")))


def _check_callable(name: str, function: object) -> None:
    """Raise TypeError unless an argument is None or can be called."""
    if function is not None and not callable(function):
        raise TypeError(f"{name} must be a function, got {function!r}")


def _backward(loss: Any) -> None:
    """Run backward from the sum of a loss; raise TypeError unless it is a tensor."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            "the forward of a pipeline must give (loss, output), or a loss, to train with; got "
            f"{type(loss).__name__}"
        )
    loss.sum().backward()


class TrainPipelineSparseDist(TrainPipelineBase):
    """Trains one batch per call, and meanwhile sends the ids of the next batch.

    While batch i is computed, batch i + 2 is copied to the device. The sizes of batch i + 1 are
    sent before the forward of batch i, its ids before the backward. Rows are looked up only in the
    step of their batch, so every step sees the tables as the plain loop does.

    Args:
        model: model, as for `TrainPipelineBase`; so are `optimizer`, `device`, `forward`,
            `uneven_inputs`, `on_progress` and `ranks`.
        inputs: function of a batch that returns {sharded collection, or its path: its input}. The
            inputs must be the objects that the model passes to the collections. For a collection
            that is called several times, the value is a list of inputs, in order of the calls. With
            None, inputs are learned from the first batch: an input that is an attribute or item of
            the batch is expected at the same path in later batches.

    Raises:
        TypeError: see `TrainPipelineBase`; or `inputs` is not a function.

    `progress` also raises:
        ValueError: `inputs` names something that is not a sharded collection of the model.
        RuntimeError: the model passes another input to a collection than was sent, or calls it less
            often; or the batch of another rank is wrong.
        Exception: as a lookup raises for a wrong batch, or as `inputs` raises.

    Example:
        >>> ranks = emblib.sharding.RankGroup.single()
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 4, "item")])
        >>> model = emblib.sharding.DistributedModelParallel(
        ...     bags,
        ...     ranks,
        ...     plan={"": {"item": emblib.sharding.row_wise()}},
        ...     optimizer=emblib.optim.SGD(0.1),
        ... )
        >>> def loss_of(batch):
        ...     return model(batch).values().square().mean()
        >>> batch = emblib.KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1]))
        >>> pipeline = emblib.sharding.TrainPipelineSparseDist(
        ...     model,
        ...     model.fused_optimizer,
        ...     inputs=lambda batch: {model.module: batch},
        ...     forward=loss_of,
        ... )
        >>> len(list(pipeline.run([batch] * 3)))
        3
    """

    batches_ahead: ClassVar[int] = 2
    _num_sent_ahead: ClassVar[int] = 1  # batches whose ids are sent before their own step

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str | None = None,
        *,
        inputs: Inputs | None = None,
        forward: Callable[[Any], Any] | None = None,
        uneven_inputs: UnevenInputs | None = None,
        on_progress: Callable[[Progress], object] | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        super().__init__(
            model,
            optimizer,
            device,
            forward=forward,
            uneven_inputs=uneven_inputs,
            on_progress=on_progress,
            ranks=ranks,
        )
        _check_callable("inputs", inputs)
        self._lane, self._separate_calls = Lane(self.device), SeparateCalls()
        self._inputs: LearnedInputs | CallerInputs = (
            LearnedInputs(model) if inputs is None else CallerInputs(model, inputs)
        )

    def _train(self, step: Step) -> Any:
        """Train as the base class does; if that fails, the following steps run as usual."""
        try:
            return super()._train(step)
        except BaseException:
            self._reset_steps_ahead(step)
            raise

    def _reset_steps_ahead(self, failed_step: Step) -> None:
        """Let later steps send their batches again, as an interrupted wait for ids loses the ids.

        Batches that other ranks take part in stay as they were sent.
        """
        for step in self._steps_ahead:
            if step.sent is not None and step.sent.is_local:
                step.sent = None

    def _run_forward(self, step: Step, batch: Any) -> Any:
        """Run forward with the ids that were sent before it.

        Without `inputs` the first forward learns them; its collections exchange by themselves.
        """
        if isinstance(self._inputs, LearnedInputs) and not self._inputs.is_known:
            return self._inputs.learn_from(batch, self._forward)
        return self._sent_batch(step).run_forward(self._forward, batch)

    def _before_forward(self, step: Step) -> None:
        """Send the sizes of this batch, unless they were sent, then the sizes of the next batches.

        The ids of this batch are sent by `SentBatch.run_forward`. Does nothing until the inputs are
        known.
        """
        if self._inputs.is_known:
            self._sent_batch(step)
            self._send_sizes_of_next()

    def _after_forward(self, step: Step) -> None:
        """Send the ids of later batches."""
        self._send_sizes_of_next()
        for step_ahead in self._steps_to_send():
            self._sent_batch(step_ahead).send_ids()

    def _steps_to_send(self) -> list[Step]:
        """Return the next steps whose sizes and ids are sent now, if the ranks compute them."""
        next_steps = list(self._steps_ahead)[: self._num_sent_ahead]
        return [step for step in next_steps if self._loader.decide_to_run(step)]

    def _send_sizes_of_next(self) -> None:
        for step in self._steps_to_send():
            self._sent_batch(step)

    def _sent_batch(self, step: Step) -> SentBatch:
        """Return the inputs of a step; send their sizes now, unless they were sent before."""
        if step.sent is None:
            assert step.batch is not None
            step.sent = SentBatch(self._inputs, self._lane, step.batch, self._separate_calls)
        sent: SentBatch = step.sent
        return sent


class EvalPipelineSparseDist(TrainPipelineSparseDist):
    """Evaluates one batch per call, and meanwhile sends the ids of the next batch.

    The model must be in eval mode; it runs forward only, without gradients. Hash tables insert
    nothing then.

    Args:
        model: model, as for `TrainPipelineSparseDist`; so are `device`, `inputs`, `forward`,
            `uneven_inputs`, `on_progress` and `ranks`.

    Example:
        >>> ranks = emblib.sharding.RankGroup.single()
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 8, "item")])
        >>> rules = {"item": emblib.sharding.row_wise()}
        >>> sharded = emblib.sharding.ShardedEmbeddingBagCollection(bags, rules, ranks).eval()
        >>> batch = emblib.KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1]))
        >>> pipeline = emblib.sharding.EvalPipelineSparseDist(sharded, ranks=ranks)
        >>> for pooled in pipeline.run([batch] * 2):
        ...     print(pooled.values().shape)
        torch.Size([1, 8])
        torch.Size([1, 8])
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str | None = None,
        *,
        inputs: Inputs | None = None,
        forward: Callable[[Any], Any] | None = None,
        uneven_inputs: UnevenInputs | None = None,
        on_progress: Callable[[Progress], object] | None = None,
        ranks: RankGroup | None = None,
    ) -> None:
        super().__init__(
            model,
            None,
            device,
            inputs=inputs,
            forward=forward,
            uneven_inputs=uneven_inputs,
            on_progress=on_progress,
            ranks=ranks,
        )

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Evaluate the next batch and return the whole result of `forward`.

        Raises:
            ValueError: the model is in training mode.
            Exception: as in training, see `TrainPipelineBase.progress`.
        """
        if self.model.training:
            raise ValueError("the model is in training mode: call model.eval() before evaluation")
        return in_grad_mode(super().progress, enabled=False)(dataloader_iter)

    def _loss_and_output(self, result: Any) -> tuple[Any, Any]:
        return None, result


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist):
    """A `TrainPipelineSparseDist` that also prefetches rows into caches one batch ahead.

    While batch i is computed, the rows of batch i + 1 are loaded into the caches of their tables,
    e.g. with `Placement.MANAGED_CACHING`. The ids of batch i + 2 are sent, and batch i + 3 is
    copied. Updates write to the cache, so a lookup of a prefetched row reads all earlier updates.
    Without cached tables use `TrainPipelineSparseDist`, which has one batch less in memory.

    Arguments and errors are those of `TrainPipelineSparseDist`.

    Example:
        >>> cached = emblib.storage.Dense(emblib.Placement.MANAGED_CACHING)
        >>> table = emblib.EmbeddingBagConfig(1_000, 8, "item", storage=cached)
        >>> model = emblib.sharding.DistributedModelParallel(
        ...     emblib.EmbeddingBagCollection([table], optimizer=emblib.optim.SGD(0.1)),
        ...     emblib.sharding.RankGroup.single(),
        ...     plan={"": {"item": emblib.sharding.row_wise()}},
        ... )
        >>> def loss_of(batch):
        ...     return model(batch).values().square().mean()
        >>> batch = emblib.KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1]))
        >>> pipeline = emblib.sharding.PrefetchTrainPipelineSparseDist(
        ...     model,
        ...     model.fused_optimizer,
        ...     inputs=lambda batch: {model.module: batch},
        ...     forward=loss_of,
        ... )
        >>> len(list(pipeline.run([batch] * 3)))
        3
    """

    batches_ahead: ClassVar[int] = 3
    _num_sent_ahead: ClassVar[int] = 2

    def _reset_steps_ahead(self, failed_step: Step) -> None:
        """Forget prefetched rows, because a cache expects the lookups of the failed step next."""
        for step in (failed_step, *self._steps_ahead):
            if step.sent is not None:
                step.sent.forget_prefetched()
        super()._reset_steps_ahead(failed_step)

    @cached_property
    def _prefetch_lane(self) -> Lane:
        return Lane(self.device)

    def _before_forward(self, step: Step) -> None:
        """Send sizes as the base class does, then prefetch the rows of this and the next batch.

        Until the inputs are known, it prefetches nothing.
        """
        super()._before_forward(step)
        if self._inputs.is_known:
            # In the order of the steps: a cache must get batches in the order of its lookups.
            for next_step in (step, *self._steps_to_send()[:1]):
                self._sent_batch(next_step).prefetch(self._prefetch_lane)
