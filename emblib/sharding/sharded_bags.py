"""The sharded embedding bag collection."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from emblib.jagged import KeyedJaggedTensor, KeyedTensor
from emblib.optim import Optimizer
from emblib.sharding.awaitables import Awaitable, LazyAwaitable, LazyDeferredAwaitable
from emblib.sharding.checkpoints.kinds import StateOfTables
from emblib.sharding.exchange import CommPrecision
from emblib.sharding.input_dist import IncomingBatch
from emblib.sharding.joint_exchange import (
    Inputs,
    Outputs,
    SentAhead,
    exchange,
    start_input_dist,
    start_output_dist,
)
from emblib.sharding.output_dist import OutputDist
from emblib.sharding.parameters import ShardParameters
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharded_tables import (
    GradientReduction,
    ShardedTables,
    agreed_settings,
    in_this_grad_mode,
)
from emblib.sharding.sharding_types import ParameterSharding, Rule
from emblib.sharding.shared_shards import Shared
from emblib.tables.graph_break import graph_break


class ShardedEmbeddingBagCollection(StateOfTables, ShardedTables):
    """An `EmbeddingBagCollection` sharded over ranks, with the same output for this rank's batch.

    All ranks call it together, each with its own batch: batch sizes may differ and may be 0. The
    columns of the output are in the order of the tables' configurations, whatever the plan, and
    MEAN divides by the lengths of this rank's batch.

    `forward` returns before the rows have arrived. Its result waits when it is used; all ranks must
    use the outputs of several collections in the same order.

    Args:
        source: an `EmbeddingBagCollection`; its weights and optimizer state are kept.
        plan: the sharding of each of its tables, or a rule that makes it, e.g. `row_wise()`.
        ranks: the processes; by default all.
        comm_precision: the codecs of rows and gradients in transit.
        gradients: whether gradients are the mean or the sum over ranks.
        optimizer: optimizer of tables whose configuration has none; None is that of `source`.
        shared: the shards of tables that other collections read too, see `shard`.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 4, "item")])
        >>> sharded = emblib.sharding.ShardedEmbeddingBagCollection(
        ...     bags, {"item": emblib.sharding.row_wise()}, emblib.sharding.RankGroup.single()
        ... )
        >>> batch = emblib.KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1]))
        >>> torch.equal(sharded(batch).values(), bags(batch).values())
        True
    """

    handles_name = "embedding_bags"
    sent_ahead: SentAhead | None = None

    def __init__(
        self,
        source: Any,
        plan: Mapping[str, Rule | ParameterSharding],
        ranks: RankGroup | None = None,
        *,
        comm_precision: CommPrecision | None = None,
        gradients: GradientReduction = GradientReduction.MEAN,
        optimizer: Optimizer | None = None,
        shared: Shared | None = None,
    ) -> None:
        ranks = RankGroup.from_value(ranks)
        settings = agreed_settings(
            source,
            plan,
            ranks,
            comm_precision=comm_precision,
            gradients=gradients,
            optimizer=optimizer,
            shared=shared or {},
        )
        super().__init__(
            source,
            settings.configs,
            settings.plan,
            ranks,
            pooled=True,
            optimizer=settings.optimizer,
            gradients=settings.gradients,
            shared=shared or {},
        )
        self.comm_precision, self.gradients = settings.comm_precision, settings.gradients
        self._output_dist = OutputDist(self.layout, ranks, self.comm_precision, self.scale)
        self.embedding_bags = ShardParameters(self.handles(), ranks)
        self._names = [feature.name for feature in self.layout.features]
        self._dims = [feature.dim for feature in self.layout.features]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.embedding_bags.bind()
        return self

    def embedding_bag_configs(self) -> tuple[Any, ...]:
        """Return the configurations of the tables."""
        return self.configs

    def is_weighted(self) -> bool:
        """Return whether lookups are weighted."""
        return self._is_weighted

    @graph_break
    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Return pooled embeddings `[B, sum D]`, float32, in the order of the tables."""
        self.embedding_bags.check()
        return exchange(self, features)

    def input_dist(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[IncomingBatch]]:
        """Start to send ids to the ranks that store their rows.

        The first `wait` sends the ids, once their sizes have come; `wait` on its result receives
        those of all ranks. All ranks call this in the same order.
        """
        return start_input_dist(self, features)

    def inputs(self, features: KeyedJaggedTensor | None) -> Inputs:
        """Return what to send of a batch; None for a rank that stops a joint exchange."""
        return Inputs([self.input_request(features)], _only)

    def compute(self, received: IncomingBatch) -> tuple[Tensor, Tensor | None]:
        """Return rows pooled for all ranks, and replicated tables' rows of this rank's batch."""
        copies = None if self.replicated is None else self.replicated(received.inputs)
        return self.rows(received), copies

    def output_dist(
        self, rows: tuple[Tensor, Tensor | None], received: IncomingBatch
    ) -> LazyAwaitable[KeyedTensor]:
        """Start to return the rows."""
        return start_output_dist(self, rows, received)

    def compute_and_output_dist(self, received: IncomingBatch) -> LazyAwaitable[KeyedTensor]:
        """Look up the received ids and start the output all-to-all."""
        return self.output_dist(self.compute(received), received)

    def outputs(self, rows: tuple[Tensor, Tensor | None], received: IncomingBatch) -> Outputs:
        """Return the lookup of a batch, whose output is a `KeyedTensor`."""
        local, copies = rows

        def join(outputs: list[Awaitable[Tensor]]) -> LazyAwaitable[KeyedTensor]:
            output = partial(self._output, outputs[0], received)
            return LazyDeferredAwaitable(in_this_grad_mode(output))

        if received.sent is None:
            return Outputs([self._output_dist.local_output(local, received)], join)
        sink = self._gradient_sink(received)
        return Outputs([self._output_dist.step(local, copies, sink, received)], join)

    def _gradient_sink(self, received: IncomingBatch) -> Tensor | None:
        if (
            self.replicated is None
            or not self.replicated.is_synchronised
            or not torch.is_grad_enabled()
        ):
            return None
        return self.replicated.gradient_sink(received, self._output_dist.sink_shape(received))

    def _output(self, pending: Awaitable[Tensor], received: IncomingBatch) -> KeyedTensor:
        values = pending.wait()
        if received.inputs.is_variable:
            values = self._expanded(values, received)
        return KeyedTensor(self._names, self._dims, values)

    def _expanded(self, values: Tensor, received: IncomingBatch) -> Tensor:
        """Expand the rows of distinct bags to the examples that have them, by feature."""
        inputs = received.inputs
        if inputs.inverse is None and len(set(inputs.bags)) > 1:
            raise ValueError(
                "features that differ in their bags need inverse indices to become one batch, got "
                f"{inputs.bags} bags: make the KeyedJaggedTensor with inverse_indices="
            )
        sizes = [count * dim for count, dim in zip(inputs.bags, self._dims, strict=True)]
        blocks = [
            block.view(-1, dim) for block, dim in zip(values.split(sizes), self._dims, strict=True)
        ]
        if inputs.inverse is not None:
            blocks = [
                block.index_select(0, inverse)
                for block, inverse in zip(blocks, inputs.inverse, strict=True)
            ]
        return torch.cat(blocks, dim=1)


def _only(batches: list[IncomingBatch]) -> IncomingBatch:
    (batch,) = batches
    return batch
