"""The sharded embedding bag collection: one pooled row per bag.

`emblib.sharding.sharded_tables` sends the ids and looks them up, `emblib.sharding.pooled_output`
returns the pooled rows and assembles the output.
"""

from collections.abc import Callable, Mapping
from functools import partial
from operator import mul
from typing import Any

import torch
from torch import Tensor

from emblib.collections.column_order import bounds_of_means, bounds_output, clip_blocks
from emblib.collections.modules import EmbeddingBagCollection
from emblib.grad_mode import in_grad_mode
from emblib.jagged import KeyedJaggedTensor, KeyedTensor
from emblib.ops.autograd import UpdateRule
from emblib.optim import Optimizer
from emblib.sharding.awaitables import Awaitable, LazyAwaitable, LazyDeferredAwaitable
from emblib.sharding.checkpoints.saved_tables import StateOfTables
from emblib.sharding.codecs import (
    CommPrecision,
)
from emblib.sharding.input_dist import IncomingBatch, LocalBatch
from emblib.sharding.lookup import (
    CollectionRequests,
    CollectionSteps,
    SentAhead,
    look_up,
    start_input_dist,
    start_output_dist,
)
from emblib.sharding.parameters import ShardParameters
from emblib.sharding.pooled_output import PooledOutputDist
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharded_tables import (
    GradientReduction,
    ShardedTables,
    agree_on_settings,
)
from emblib.sharding.sharding_types import ParameterSharding, Rule
from emblib.sharding.shared_shards import SharedShards
from emblib.tables.graph_break import run_uncompiled


class ShardedEmbeddingBagCollection(StateOfTables, ShardedTables):
    """An `EmbeddingBagCollection` sharded over ranks, with the same output for this rank's batch.

    All ranks call it together, each with its own batch: batch sizes may differ and may be 0. The
    columns of the output are in the order of the tables' configurations, whatever the plan, and
    MEAN divides by the lengths of this rank's batch.

    `forward` waits for the ids of all ranks, looks them up, and returns before the rows of this
    rank's batch have arrived. The result waits for them when it is used. All ranks must use the
    outputs of several collections in the same order.

    Args:
        source: an `EmbeddingBagCollection`; its weights and optimizer state are kept.
        plan: the sharding of each of its tables, or a rule that makes it, e.g. `row_wise()`.
        ranks: the processes; None for all.
        comm_precision: the codecs of rows and gradients in transit; None for float32.
        gradients: whether gradients are the mean or the sum over ranks.
        optimizer: optimizer of tables whose configuration has none; None uses that of `source`.
        shared: the shards of tables that other collections read too, by name, which `shard` passes;
            None if there are no such tables.

    Raises:
        ValueError: tables, plans or settings differ between ranks, or do not fit together.
        TypeError: an argument is of a wrong type, or `shared` lacks a table.
        RuntimeError: another rank raised one of these errors.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 4, "item")])
        >>> sharded = emblib.sharding.ShardedEmbeddingBagCollection(
        ...     bags, {"item": emblib.sharding.row_wise()}, emblib.sharding.RankGroup.single()
        ... )
        >>> batch = emblib.KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1]))
        >>> torch.equal(sharded(batch).values(), bags(batch).values())
        True
    """

    handles_name = "embedding_bags"  # attribute with the `ShardParameters`, see `StateOfTables`
    sent_ahead: SentAhead | None = None  # set by a model that sends batches before their forward

    def __init__(
        self,
        source: Any,
        plan: Mapping[str, Rule | ParameterSharding],
        ranks: RankGroup | None = None,
        *,
        comm_precision: CommPrecision | None = None,
        gradients: GradientReduction = GradientReduction.MEAN,
        optimizer: Optimizer | None = None,
        shared: SharedShards | None = None,
    ) -> None:
        ranks = RankGroup.from_value(ranks)
        settings = agree_on_settings(
            source,
            plan,
            ranks,
            comm_precision=comm_precision,
            gradients=gradients,
            optimizer=optimizer,
            shared=shared or {},
            kind=EmbeddingBagCollection,
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
        self._output_dist = PooledOutputDist(self.layout, ranks, self.comm_precision, self.scale)
        self.embedding_bags = ShardParameters(self.handles(), ranks)
        self._names = [feature.name for feature in self.layout.features]
        self._dims = [feature.dim for feature in self.layout.features]
        self._bounded_means = [
            f
            for f, feature in enumerate(self.layout.features)
            if feature.is_mean and bounds_output(self.configs[feature.table])
        ]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.embedding_bags.register_parameters()
        return self

    def embedding_bag_configs(self) -> tuple[Any, ...]:
        """Return the configurations of the tables."""
        return self.configs

    def is_weighted(self) -> bool:
        """Return whether lookups are weighted."""
        return self._is_weighted

    @run_uncompiled
    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Return pooled embeddings `[B, sum D]`, float32, in the order of the tables.

        Variable batches with inverse indices give one row per example. All ranks call this.

        Raises:
            KeyError, TypeError: see `ShardedTables.input_request`.
            ValueError: see there; or lookups are weighted and no rank's batch has weights, or
                features differ in their number of bags and have no inverse indices.
            RuntimeError: see there; or a parameter was replaced, the batch of another rank is
                wrong, ids differ in dtype between ranks, or only some ranks have weights or
                features of different batch sizes.
        """
        self.embedding_bags.check_not_replaced()
        return look_up(self, features)

    def input_dist(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[IncomingBatch]]:
        """Start to send ids to the ranks that store their rows.

        The first `wait` receives the sizes and sends the ids; `wait` on its result receives the ids
        of all ranks. All ranks must call this in the same order. It raises as `forward` does, the
        errors of other ranks in the first `wait`.
        """
        return start_input_dist(self, features)

    def collection_requests(self, features: KeyedJaggedTensor | None) -> CollectionRequests:
        """Return the request to send a batch; for None all ranks stop a joint input_dist.

        Raises:
            Exception: see `ShardedTables.input_request`.
        """
        return CollectionRequests([self.input_request(features)], _only_batch)

    def compute(self, received: IncomingBatch) -> tuple[Tensor, Tensor | None]:
        """Look up a received batch.

        Returns:
            The rows of this rank's shards for the bags of all ranks, see `look_up_rows`, and the
            replicated tables' rows of this rank's batch; None without replicated tables.

        Raises:
            ValueError: the collection is weighted and no rank's batch has weights.
        """
        replica_rows = None if self.replicated is None else self.replicated(received.inputs)
        return self.look_up_rows(received), replica_rows

    def output_dist(
        self, rows: tuple[Tensor, Tensor | None], received: IncomingBatch
    ) -> LazyAwaitable[KeyedTensor]:
        """Start to return looked-up rows to the ranks that own the bags; all ranks call this."""
        return start_output_dist(self, rows, received)

    def compute_and_output_dist(self, received: IncomingBatch) -> LazyAwaitable[KeyedTensor]:
        """Look up the received ids and start the output all-to-all."""
        return self.output_dist(self.compute(received), received)

    def collection_steps(
        self, rows: tuple[Tensor, Tensor | None], received: IncomingBatch
    ) -> CollectionSteps:
        """Return the lookup whose rows can be sent; its output is joined to a `KeyedTensor`."""
        local_rows, replica_rows = rows

        def join(outputs: list[Awaitable[Tensor]]) -> LazyAwaitable[KeyedTensor]:
            output = partial(self._output, outputs[0], received)
            return LazyDeferredAwaitable(in_grad_mode(output, enabled=torch.is_grad_enabled()))

        if received.sent is None:
            return CollectionSteps([self._output_dist.local_output(local_rows, received)], join)
        gradient_sink = self._gradient_sink(received)
        step = self._output_dist.step(local_rows, replica_rows, gradient_sink, received)
        step.hyperparams = self.hyperparams
        return CollectionSteps([step], join)

    def _gradient_sink(self, received: IncomingBatch) -> Tensor | None:
        """Return the tensor through which replicated tables get gradients.

        None if there are no replicated tables, if their parameters get gradients, or if gradients
        are disabled.
        """
        if (
            self.replicated is None
            or not self.replicated.is_synchronised
            or not torch.is_grad_enabled()
        ):
            return None
        return self.replicated.gradient_sink(received, self._output_dist.sink_shape(received))

    def _to_local_batch(self, features: KeyedJaggedTensor) -> LocalBatch:
        """Return the batch as the base class does, if its features can become one output.

        Otherwise raise ValueError, before ids are sent: other ranks would wait in backward.
        """
        inputs = super()._to_local_batch(features)
        if inputs.inverse is None and len(set(inputs.bag_counts)) > 1:
            raise ValueError(
                "features that differ in their bags need inverse indices to become one batch, got "
                f"{inputs.bag_counts} bags: make the KeyedJaggedTensor with inverse_indices="
            )
        return inputs

    def _output(self, pending: Awaitable[Tensor], received: IncomingBatch) -> KeyedTensor:
        """Wait for the pooled rows, and return them as a `KeyedTensor`."""
        values = pending.wait()
        if received.inputs.is_variable:
            values = self._expand(values, received)
        else:
            values = clip_blocks(values, self._dims, self._mean_rules())
        return KeyedTensor(self._names, self._dims, values)

    def _mean_rules(self) -> list[UpdateRule | None]:
        """Return the bounds of the gradients of means, which are divided after the lookup."""
        if not (self._bounded_means and torch.is_grad_enabled()):
            return []
        optimizers = {}
        for f in self._bounded_means:
            table = self.configs[self.layout.features[f].table].name
            optimizer = self.hyperparams.optimizer_of(table)
            if optimizer is not None:
                optimizers[f] = optimizer
        return bounds_of_means(optimizers, len(self._dims), self.scale)

    def _expand(self, values: Tensor, received: IncomingBatch) -> Tensor:
        """Expand flat rows of the bags of each feature to rows of examples, `[B, sum D]`."""
        inputs = received.inputs
        block_sizes = list(map(mul, inputs.bag_counts, self._dims))
        blocks = [
            clip_blocks(block.view(-1, dim), [dim], [rule])
            for block, dim, rule in zip(
                values.split(block_sizes),
                self._dims,
                self._mean_rules() or [None] * len(self._dims),
                strict=True,
            )
        ]
        if inputs.inverse is not None:
            blocks = [
                block.index_select(0, inverse)
                for block, inverse in zip(blocks, inputs.inverse, strict=True)
            ]
        return torch.cat(blocks, dim=1)


def _only_batch(batches: list[IncomingBatch]) -> IncomingBatch:
    """Return the only batch: the collection has one `InputDist`."""
    (batch,) = batches
    return batch
