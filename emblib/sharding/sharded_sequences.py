"""An embedding collection, one vector an id, whose tables are spread over ranks."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from emblib.collections.groups import TableGroups
from emblib.jagged import JaggedTensor, KeyedJaggedTensor
from emblib.optim import Optimizer
from emblib.sharding.awaitable import Awaitable, Deferred, LazyAwaitable, LazyDeferred
from emblib.sharding.boxes import TableSharding
from emblib.sharding.checkpoints.modules import StateOfTables
from emblib.sharding.distribute import Received
from emblib.sharding.groups_of_ranks import Ranks
from emblib.sharding.layout import Config
from emblib.sharding.parameters import HeldParameters
from emblib.sharding.sequence_tables import Rows, SequenceExchange, SequenceTables
from emblib.sharding.sharded_tables import (
    GradientReduction,
    HeldPart,
    agreed_settings,
    in_this_grad_mode,
)
from emblib.sharding.wire import Wire
from emblib.tables.outside import outside_graphs


class ShardedEmbeddingCollection(StateOfTables):
    """An `EmbeddingCollection` in boxes over ranks: the same vectors for this rank's own batch.

    As `ShardedEmbeddingBagCollection`. Tables travel in messages of their own where their dims
    differ, or the width that all their blocks of columns are made of.

    Args:
        source: an `EmbeddingCollection`; its weights and optimizer state are kept.
        plan: the sharding of each of its tables.
        ranks: the processes; left out, all.
        wire: how vectors and gradients are encoded on their way.
        gradients: whether gradients are the mean or the sum over ranks.
        optimizer: of tables that have none of their own; left out, that of `source`.
    """

    handles_name = "embeddings"

    def __init__(
        self,
        source: Any,
        plan: Mapping[str, TableSharding],
        ranks: Ranks | None = None,
        *,
        wire: Wire | None = None,
        gradients: GradientReduction = GradientReduction.MEAN,
        optimizer: Optimizer | None = None,
    ) -> None:
        super().__init__()
        self.plan, self.ranks = dict(plan), Ranks.of(ranks)
        settings = agreed_settings(
            source, plan, self.ranks, wire=wire, gradients=gradients, optimizer=optimizer
        )
        self.configs = settings.configs
        self.wire, self.gradients = settings.wire, settings.gradients
        self._need_indices = source.need_indices()
        classes: dict[tuple[int, int], list[Config]] = {}
        for config in self.configs:
            key = config.embedding_dim, _width(config, plan[config.name])
            classes.setdefault(key, []).append(config)
        self.classes = nn.ModuleList(
            SequenceTables(
                *(source, configs, {c.name: plan[c.name] for c in configs}, self.ranks),
                optimizer=settings.optimizer,
                gradients=self.gradients,
                exchange=SequenceExchange(self.wire, width),
            )
            for (_, width), configs in classes.items()
        )
        handles = [held for one in self._equal() for held in one.handles()]
        self.embeddings = HeldParameters(handles, self.ranks)
        self._places = self._find_places()

    def _find_places(self) -> list[tuple[int, int, str]]:
        """Class, feature there and name of each output, in the order of the configurations."""
        order = {config.name: t for t, config in enumerate(self.configs)}
        keys = [key for config in self.configs for key in config.feature_names]
        places = []
        for c, one in enumerate(self._equal()):
            for f, feature in enumerate(one.layout.features):
                table = one.configs[feature.table].name
                name = f"{feature.key}@{table}" if keys.count(feature.key) > 1 else feature.key
                places.append((order[table], f, c, name))
        return [(c, f, name) for _, f, c, name in sorted(places)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.embeddings.bind()
        return self

    @property
    def groups(self) -> TableGroups:
        """Those of the first class: the optimizer is the same in all."""
        return self._equal()[0].groups

    def _equal(self) -> list["SequenceTables"]:
        return [one for one in self.classes if isinstance(one, SequenceTables)]

    def embedding_configs(self) -> tuple[Any, ...]:
        """The configurations of the tables, as they were given."""
        return self.configs

    def need_indices(self) -> bool:
        """Whether results have the ids as weights."""
        return self._need_indices

    def parts(self) -> list[HeldPart]:
        """The parts of tables that are here, copies of replicated ones among them."""
        return [part for one in self._equal() for part in one.parts()]

    def kept_as(self, table: str) -> Config:
        """The configuration of a table as it is kept, which a plan may have changed."""
        one = next(one for one in self._equal() if table in one.plan)
        return one.kept_as(table)

    def input_dist(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[list[Received]]]:
        """Start the ids on their way, as `ShardedEmbeddingBagCollection.input_dist`."""
        started = [one.input_dist(features) for one in self._equal()]

        def ids() -> Awaitable[list[Received]]:
            pending = [awaitable.wait() for awaitable in started]
            return Deferred(lambda: [awaitable.wait() for awaitable in pending])

        return Deferred(ids)

    def prefetch(self, received: Sequence[Received]) -> None:
        """Bring rows of a batch that will be computed into the caches of their tables."""
        for one, came in zip(self._equal(), received, strict=True):
            one.prefetch(came)

    def compute(self, received: Sequence[Received]) -> list[Rows]:
        """Vectors looked up here for all ranks, and those of copies for this one's own batch."""
        return [one.compute(came) for one, came in zip(self._equal(), received, strict=True)]

    def output_dist(
        self, rows: Sequence[Rows], received: Sequence[Received]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Start the vectors on their way back."""
        pending = [
            one.output_dist(own, came)
            for one, own, came in zip(self._equal(), rows, received, strict=True)
        ]
        return LazyDeferred(in_this_grad_mode(partial(self._output, pending, received)))

    def compute_and_output_dist(
        self, received: Sequence[Received]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Both."""
        return self.output_dist(self.compute(received), received)

    @outside_graphs
    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """By feature, in the order of the tables, one vector an id: float32 `[L, dim]`."""
        self.embeddings.check()
        return self.compute_and_output_dist(self.input_dist(features).wait().wait())

    def _output(
        self, pending: Sequence[Awaitable[Tensor]], received: Sequence[Received]
    ) -> dict[str, JaggedTensor]:
        vectors = [awaitable.wait() for awaitable in pending]
        split = [_by_feature(values, came) for values, came in zip(vectors, received, strict=True)]
        result = {}
        for c, f, name in self._places:
            values, lengths, ids = split[c][f]
            result[name] = JaggedTensor(
                values, lengths=lengths, weights=ids if self._need_indices else None
            )
        return result


def _by_feature(values: Tensor, received: Received) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Vectors, lengths of bags and ids of each feature."""
    inputs = received.inputs
    lengths = inputs.lengths.split(inputs.bags)
    counts = inputs.num_ids()
    return list(zip(values.split(counts), lengths, inputs.ids.split(counts), strict=True))


def _width(config: Config, sharding: TableSharding) -> int:
    """The largest that all blocks of columns are made of."""
    edges = (edge for box in sharding.boxes for edge in box.columns)
    return math.gcd(config.embedding_dim, *edges)
