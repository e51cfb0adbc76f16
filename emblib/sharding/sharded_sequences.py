"""The sharded embedding collection: one vector per id.

The counterpart of `emblib.sharding.sharded_bags` for unpooled rows. Tables of one dim share
messages: `SequenceTables` returns each vector to the position of its id.
`ShardedEmbeddingCollection` has one `SequenceTables` per combination of dim and slice width.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.collections.groups import TableGroups
from emblib.grad_mode import in_grad_mode
from emblib.jagged import JaggedTensor, KeyedJaggedTensor
from emblib.jagged.jagged_tensor import running_sums
from emblib.ops import route
from emblib.optim import Optimizer
from emblib.sharding.awaitables import Awaitable, LazyAwaitable, LazyDeferredAwaitable
from emblib.sharding.checkpoints.kinds import StateOfTables
from emblib.sharding.codecs import (
    CommPrecision,
    LocalPart,
    Received,
    Values,
    local_part,
    without_local,
)
from emblib.sharding.input_dist import IncomingBatch
from emblib.sharding.layout import Config
from emblib.sharding.lookup import (
    Inputs,
    Outputs,
    SentAhead,
    look_up,
    start_input_dist,
    start_output_dist,
)
from emblib.sharding.output_dist import OutputStep
from emblib.sharding.parameters import ShardParameters
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharded_tables import (
    GradientReduction,
    LocalShard,
    ShardedTables,
    agreed_settings,
)
from emblib.sharding.sharding_types import ParameterSharding, Rule
from emblib.sharding.shared_shards import Shared
from emblib.tables.graph_break import graph_break

Rows = tuple[Tensor, Tensor | None]


class VectorFormat(NamedTuple):
    """Format of sent vectors: their codecs, in slices of `width` columns."""

    comm_precision: CommPrecision
    width: int


@dataclass(frozen=True)
class _SequenceRoute:
    """One batch between its two all-to-alls, as indices of pieces of vectors, int64.

    Attributes:
        order: `[pieces looked up]`, which sorts unit-major pieces (slices of `width` columns) by
            rank.
        index: `[returned pieces]`, the position of each in the output.
        copies: `[n]`, which selects the vectors of replicated tables; None without such tables.
        copies_order: order of those of all ranks, rank-major, by unit.
        sent, num_received: pieces to and from each rank.
        copied: vectors of replicated tables for each rank.
        total: number of ids of the batch.
    """

    order: Tensor
    index: Tensor
    copies: Tensor | None
    copies_order: Tensor
    sent: list[int]
    num_received: list[int]
    copied: list[int]
    total: int


class SequenceTables(ShardedTables):
    """Tables of one dim, sharded in blocks of columns that are multiples of one width."""

    def __init__(
        self,
        source: Any,
        configs: Sequence[Config],
        plan: Mapping[str, ParameterSharding],
        ranks: RankGroup,
        *,
        optimizer: Optimizer | None,
        gradients: GradientReduction,
        format: VectorFormat,
        shared: Shared,
    ) -> None:
        super().__init__(
            source,
            configs,
            plan,
            ranks,
            pooled=False,
            optimizer=optimizer,
            gradients=gradients,
            shared=shared,
        )
        self.format = format
        self.dim = configs[0].embedding_dim
        all_units = [unit for rank in self.layout.ranks for unit in rank.all_units]
        width, device = format.width, ranks.device
        self._pieces = [unit.columns // width for unit in self._layout_here.units]
        self._has_equal_widths = len({unit.columns for unit in all_units}) <= 1
        tables = {
            "first": torch.tensor(
                [u.shard.columns[0] // width for u in all_units], dtype=torch.int64
            ),
            "pieces": torch.tensor([u.columns // width for u in all_units], dtype=torch.int64),
        }
        for name, tensor in tables.items():
            self.register_buffer(name, tensor.to(device), persistent=False)

    first: Tensor  # int64 `[units]`, first piece of a vector that a unit has
    pieces: Tensor  # int64 `[units]`, pieces of a vector that a unit has

    def compute(self, received: IncomingBatch) -> Rows:
        """Return vectors of this rank's units, and of replicated tables for this rank's batch."""
        copies = None if self.replicated is None else self.replicated(received.inputs)
        rows = self.rows(received)
        if not self._layout_here.units:
            rows = rows.new_empty(0, self.format.width)
        return rows, copies

    def output(self, rows: Rows, received: IncomingBatch) -> OutputStep | Tensor:
        """Return the lookup of a batch; its output is `[L, dim]` in the order of the batch."""
        local, copies = rows
        if received.sent is None:
            return self._local_output(local, received)
        vector_route = in_grad_mode(self._route, enabled=False)(received)
        gradient_sink = None
        if (
            self.replicated is not None
            and self.replicated.is_synchronised
            and torch.is_grad_enabled()
        ):
            gradient_sink = self.replicated.gradient_sink(
                received, (sum(vector_route.copied), self.dim)
            )
        is_small = received.merges_rows
        return _SequenceStep(local, copies, gradient_sink, vector_route, self, is_small=is_small)

    def _local_output(self, local: Tensor, received: IncomingBatch) -> Tensor:
        """Reorder vectors that were not sent from the modules' order to that of the batch."""
        order = [unit.feature for unit in self._layout_here.units]
        if order == sorted(order):
            return local
        num_ids = received.inputs.num_ids()
        pieces = local.split([num_ids[f] for f in order])
        return torch.cat([pieces[order.index(f)] for f in range(len(order))])

    def _route(self, received: IncomingBatch) -> _SequenceRoute:
        """Return how the vectors of a batch are sent, and where the received ones go."""
        sent, inputs = received.sent, received.inputs
        assert sent is not None
        units = len(self._layout_here.units)
        counts, replica_grads = received.segments[:, :units], received.segments[:, units:]
        index = self._input_dist.positions(received)
        if self._has_equal_widths and self.dim == self.format.width:
            num_sent = received.num_ids
            num_received = [n - sent.num_replicated_ids for n in sent.num_ids]
        else:
            counts = counts * counts.new_tensor(self._pieces)
            num_sent = counts.sum(1).tolist()
            index, num_received = self._pieces_of(index, received)
        return _SequenceRoute(
            _transposed(counts.t(), sum(num_sent)),
            index,
            self._copies_index(received),
            _transposed(replica_grads, received.num_replicated_ids),
            num_sent,
            num_received,
            replica_grads.sum(1).tolist(),
            inputs.ids.numel(),
        )

    def _pieces_of(self, index: Tensor, received: IncomingBatch) -> tuple[Tensor, list[int]]:
        """Return the targets of the vector slices of ids at `index`, and the slices per rank."""
        sent = received.sent
        assert sent is not None
        starts = torch.as_tensor(sent.unit_starts, device=index.device)
        ids = starts.diff().long()
        ends, copies = [0], self.layout.ranks[0].replicated_units
        is_own = torch.zeros_like(ids, dtype=torch.bool)
        for rank in self.layout.ranks:
            is_own[ends[-1] : ends[-1] + len(rank.units)] = True
            ends.append(ends[-1] + len(rank.units) + len(copies))
        ids = ids * is_own
        first = torch.repeat_interleave(self.first, ids)
        pieces = torch.repeat_interleave(self.pieces, ids)
        begin = index * (self.dim // self.format.width) + first
        ends_of = pieces.cumsum(0)
        piece_in_id = torch.arange(int(pieces.sum()), device=index.device)
        piece_in_id -= torch.repeat_interleave(ends_of - pieces, pieces)
        by_unit = (ids * self.pieces).tolist()
        num_received = [sum(by_unit[a:b]) for a, b in pairwise(ends)]
        return torch.repeat_interleave(begin, pieces) + piece_in_id, num_received

    def _copies_index(self, received: IncomingBatch) -> Tensor | None:
        """Return the positions of the ids of replicated tables, int64; None without any."""
        if self.replicated is None:
            return None
        inputs = received.inputs
        all_positions = torch.arange(inputs.ids.numel(), device=inputs.ids.device)
        return self.replicated.of_features(inputs, all_positions)


def _transposed(counts: Tensor, total: int) -> Tensor:
    """Return the order that makes `total` rows in A-major segments, `counts` `[A, B]`, B-major."""
    num_rows, num_columns = counts.shape
    starts = running_sums(counts.reshape(-1).long())
    order = (
        torch.arange(num_rows * num_columns, device=counts.device)
        .view(num_rows, num_columns)
        .t()
        .reshape(-1)
    )
    return route.gather_segments(torch.arange(total, device=counts.device), starts, order, total)


class _SequenceStep(OutputStep):
    """The vectors of a batch, which return to the positions of their ids."""

    def __init__(
        self,
        local: Tensor,
        copies: Tensor | None,
        gradient_sink: Tensor | None,
        vector_route: _SequenceRoute,
        tables: SequenceTables,
        *,
        is_small: bool,
    ) -> None:
        copied = [n * tables.dim for n in vector_route.copied]
        super().__init__(local, copies, gradient_sink, copied, is_small=is_small)
        self._route, self._tables = vector_route, tables
        width = tables.format.width
        self._sent = [n * width for n in vector_route.sent]
        self._num_received = [n * width for n in vector_route.num_received]
        self._local_grads: Tensor | None = None  # gradients that no rank sends

    def rows(self) -> Values:
        """Return the rows to send, in the order of the ids that were received."""
        assert self.local is not None
        rows = self.local.detach().reshape(-1, self._tables.format.width)
        sent = rows.index_select(0, self._route.order).view(-1)
        codec = self._tables.format.comm_precision.forward
        return Values(sent, self._sent, self._num_received, codec)

    def assemble(self, received: Received, replica_rows: Tensor | None) -> Tensor:
        """Return the vectors of this rank's ids, `[L, dim]`, from received and local rows."""
        width, dim = self._tables.format.width, self._tables.dim
        out = torch.empty(self._route.total, dim, device=received.values.device)
        index, pieces = self._route.index, out.view(-1, width)
        if received.local is not None:
            # This rank's own vectors, which were not sent.
            begin = received.local_begin // width
            part = LocalPart(begin, begin + received.local.numel() // width)
            pieces.index_copy_(0, part.of(index), received.local.view(-1, width).float())
            index = part.others(index)
        pieces.index_copy_(0, index, received.values.view(-1, width).float())
        if replica_rows is not None and self._route.copies is not None:
            out.index_copy_(0, self._route.copies, replica_rows.detach().float())
        return out

    def gradient_nbytes(self) -> tuple[list[int], list[int]]:
        return self._gradients(torch.empty(0)).nbytes()

    def _gradients(self, flat: Tensor) -> Values:
        codec = self._tables.format.comm_precision.backward
        return Values(flat, self._num_received, self._sent, codec)

    def backward(self, grad: Tensor, *, keeps_local: bool) -> tuple[Values, Tensor | None]:
        """Return the gradients of vectors to send, and those of replicated tables' vectors."""
        scale, grad = self._tables.scale, grad.contiguous()
        width, ranks = self._tables.format.width, self._tables.ranks
        sent = grad.view(-1, width).index_select(0, self._route.index)
        if scale != 1.0:
            sent.mul_(scale)
        copies = None
        if self.replica_shape is not None:
            assert self._route.copies is not None
            copies = grad.index_select(0, self._route.copies)
            # Without a sink DistributedDataParallel averages these gradients.
            if self.sink_shape is not None and scale != 1.0:
                copies.mul_(scale)
            copies = copies.view(-1)
        codec = self._tables.format.comm_precision.backward
        part = None
        if keeps_local and codec.is_identity:
            part = local_part(self._route.num_received, ranks)
        if part is None:
            return self._gradients(sent.view(-1)), copies
        self._local_grads = part.of(sent)
        values = Values(
            part.others(sent).view(-1),
            without_local(self._num_received, ranks),
            without_local(self._sent, ranks),
            codec,
        )
        return values, copies

    def local_gradient(self, received: Tensor) -> Tensor:
        """Return the gradient of the local lookup, from the received gradients, flat."""
        grads, order = received.view(-1, self._tables.format.width), self._route.order
        rows = grads.new_empty((order.numel(), grads.size(1)))
        local, self._local_grads = self._local_grads, None
        if local is not None:
            part = local_part(self._route.sent, self._tables.ranks)
            assert part is not None
            rows.index_copy_(0, part.of(order), local)
            order = part.others(order)
        return rows.index_copy_(0, order, grads).view(self.local_shape)

    def sink_gradient(self, gathered: Tensor) -> Tensor:
        return gathered.view(-1, self._tables.dim).index_select(0, self._route.copies_order)


class ShardedEmbeddingCollection(StateOfTables):
    """An `EmbeddingCollection` sharded over ranks, with the same vectors for this rank's batch.

    Works like `ShardedEmbeddingBagCollection`. Tables are sent in separate messages if their dims
    differ, or the width that their blocks of columns are multiples of.

    Args:
        source: an `EmbeddingCollection`; its weights and optimizer state are kept.
        plan: the sharding of each of its tables, or a rule that makes it, e.g. `row_wise()`.
        ranks: the processes; by default all.
        comm_precision: the codecs of vectors and gradients in transit.
        gradients: whether gradients are the mean or the sum over ranks.
        optimizer: optimizer of tables whose configuration has none; None is that of `source`.
        shared: the shards of tables that other collections read too, see `shard`.
        dedup: whether each id of a feature is sent once per batch, and its vector returned once.
            It saves messages where ids repeat within the batch of a rank; the gradients of equal
            ids are added up before they are sent. Hash tables that count uses, for eviction or
            admission, get the number of occurrences of each id, 8 bytes per distinct id.

    Example:
        >>> history = emblib.EmbeddingCollection([emblib.EmbeddingConfig(8, 4, "item")])
        >>> sharded = emblib.sharding.ShardedEmbeddingCollection(
        ...     history, {"item": emblib.sharding.row_wise()}, emblib.sharding.RankGroup.single()
        ... )
        >>> batch = emblib.KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1]))
        >>> torch.equal(sharded(batch)["item"].values(), history(batch)["item"].values())
        True
    """

    handles_name = "embeddings"
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
        dedup: bool = False,
    ) -> None:
        super().__init__()
        self.shared = dict(shared or {})
        self.dedup = dedup
        self.ranks = RankGroup.from_value(ranks)
        settings = agreed_settings(
            source,
            plan,
            self.ranks,
            comm_precision=comm_precision,
            gradients=gradients,
            optimizer=optimizer,
            shared=self.shared,
        )
        self.configs, self.plan = settings.configs, settings.plan
        self.comm_precision, self.gradients = settings.comm_precision, settings.gradients
        self._need_indices = source.need_indices()
        classes: dict[tuple[int, int], list[Config]] = {}
        for config in self.configs:
            key = config.embedding_dim, _width(config, self.plan[config.name])
            classes.setdefault(key, []).append(config)
        self.classes = nn.ModuleList(
            SequenceTables(
                source,
                configs,
                {c.name: self.plan[c.name] for c in configs},
                self.ranks,
                optimizer=settings.optimizer,
                gradients=self.gradients,
                format=VectorFormat(self.comm_precision, width),
                shared=self.shared,
            )
            for (_, width), configs in classes.items()
        )
        handles = [handle for tables in self._sequence_tables() for handle in tables.handles()]
        self.embeddings = ShardParameters(handles, self.ranks)
        self._outputs = self._find_outputs()

    def _find_outputs(self) -> list[tuple[int, int, str]]:
        """Return (class, number of the feature in it, name) of each output, by configuration."""
        order = {config.name: t for t, config in enumerate(self.configs)}
        keys = [key for config in self.configs for key in config.feature_names]
        outputs = []
        for c, tables in enumerate(self._sequence_tables()):
            for f, feature in enumerate(tables.layout.features):
                table = tables.configs[feature.table].name
                name = f"{feature.key}@{table}" if keys.count(feature.key) > 1 else feature.key
                outputs.append((order[table], f, c, name))
        return [(c, f, name) for _, f, c, name in sorted(outputs)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.embeddings.bind()
        return self

    @property
    def groups(self) -> TableGroups:
        """Return the table groups of the first class; all classes have the same optimizer."""
        return self._sequence_tables()[0].groups

    def _sequence_tables(self) -> list["SequenceTables"]:
        return [tables for tables in self.classes if isinstance(tables, SequenceTables)]

    def embedding_configs(self) -> tuple[Any, ...]:
        """Return the configurations of the tables."""
        return self.configs

    def need_indices(self) -> bool:
        """Return whether results have the ids as weights."""
        return self._need_indices

    def local_shards(self) -> list[LocalShard]:
        """Return the table shards on this rank, including replicas."""
        return [part for tables in self._sequence_tables() for part in tables.local_shards()]

    def storage_config(self, table: str) -> Config:
        """Return the configuration of a table with the storage that the plan selects."""
        tables = next(tables for tables in self._sequence_tables() if table in tables.plan)
        return tables.storage_config(table)

    def input_dist(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[Any]]:
        """Start to send ids to the ranks that store their rows.

        The first `wait` sends the ids, once their sizes have come; `wait` on its result receives
        those of all ranks. All ranks call this in the same order.
        """
        return start_input_dist(self, features)

    def inputs(self, features: KeyedJaggedTensor | None) -> Inputs:
        """Return the request to send a batch; None stops a joint input_dist, on all ranks."""
        repeated = counts = None
        if self.dedup and features is not None:
            features, repeated = _without_repeats(features, self._features())
            counts = {key: ids.counts for key, ids in repeated.items()}
        requests = [tables.input_request(features, counts) for tables in self._sequence_tables()]
        return Inputs(requests, partial(_Received, repeated=repeated))

    def _features(self) -> list[str]:
        """Return the features of all tables, each once."""
        return list(dict.fromkeys(key for c in self.configs for key in c.feature_names))

    def prefetch(self, received: Sequence[IncomingBatch]) -> None:
        """Prefetch the rows of a batch into the caches of their tables."""
        for tables, batch in zip(self._sequence_tables(), received, strict=True):
            tables.prefetch(batch)

    def compute(self, received: Sequence[IncomingBatch]) -> list[Rows]:
        """Return vectors looked up for all ranks, and replicated tables' vectors of this batch."""
        return [
            tables.compute(batch)
            for tables, batch in zip(self._sequence_tables(), received, strict=True)
        ]

    def output_dist(
        self, rows: Sequence[Rows], received: Sequence[IncomingBatch]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Start to return the rows."""
        return start_output_dist(self, rows, received)

    def compute_and_output_dist(
        self, received: Sequence[IncomingBatch]
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up the received ids and start the output all-to-all."""
        return self.output_dist(self.compute(received), received)

    def outputs(self, rows: Sequence[Rows], received: Sequence[IncomingBatch]) -> Outputs:
        """Return the lookups of a batch, by class; their output is a jagged tensor by feature."""

        def join(
            outputs: list[Awaitable[Tensor]],
        ) -> LazyAwaitable[dict[str, JaggedTensor]]:
            output = partial(self._output, outputs, received)
            return LazyDeferredAwaitable(in_grad_mode(output, enabled=torch.is_grad_enabled()))

        steps = [
            tables.output(vectors, batch)
            for tables, vectors, batch in zip(self._sequence_tables(), rows, received, strict=True)
        ]
        return Outputs(steps, join)

    @graph_break
    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Return float32 `[L, dim]` by feature, one vector per id, in the order of the tables."""
        self.embeddings.check()
        return look_up(self, features)

    def _output(
        self, pending: Sequence[Awaitable[Tensor]], received: Sequence[IncomingBatch]
    ) -> dict[str, JaggedTensor]:
        """Wait for the vectors, and return them by feature."""
        vectors = [awaitable.wait() for awaitable in pending]
        split = [
            _by_feature(values, batch) for values, batch in zip(vectors, received, strict=True)
        ]
        result = {}
        repeated = getattr(received, "repeated", None)
        layouts = [tables.layout.features for tables in self._sequence_tables()]
        for c, f, name in self._outputs:
            values, lengths, ids = split[c][f]
            if repeated is not None:
                values, lengths, ids = repeated[layouts[c][f].key].expand(values)
            result[name] = JaggedTensor(
                values, lengths=lengths, weights=ids if self._need_indices else None
            )
        return result


class _RepeatedIds(NamedTuple):
    """The ids of a feature before deduplication.

    Attributes:
        ids: `[L]`.
        lengths: `[bags]`, ids per bag.
        inverse: int64 `[L]`, index of each id among the distinct ones.
        counts: int64 `[distinct]`, how often each of these occurs.
    """

    ids: Tensor
    lengths: Tensor
    inverse: Tensor
    counts: Tensor

    def expand(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the vector of every id `[L, dim]`, the lengths of bags and the ids.

        `vectors` are those of the distinct ids, `[n, dim]`.
        """
        # An embedding: its backward adds in a fixed order on a GPU, that of index_select does not.
        return nn.functional.embedding(self.inverse, vectors), self.lengths, self.ids


class _Received(list[IncomingBatch]):
    """The batches of all classes of tables, and the ids of this rank before `dedup`."""

    def __init__(
        self, batches: Sequence[IncomingBatch], repeated: Mapping[str, _RepeatedIds] | None
    ) -> None:
        super().__init__(batches)
        self.repeated = repeated


def _without_repeats(
    features: KeyedJaggedTensor, keys: Sequence[str]
) -> tuple[KeyedJaggedTensor, dict[str, _RepeatedIds]]:
    """Return a batch with each feature's distinct ids in one bag, and the data to expand results.

    Raises:
        KeyError: the batch lacks a feature.
    """
    batch = KeyedJaggedTensor.adopt(features)
    distinct, repeated = [], {}
    for key in keys:
        jagged = batch[key]
        ids, inverse, uses = jagged.values().unique(return_inverse=True, return_counts=True)
        distinct.append(ids)
        repeated[key] = _RepeatedIds(jagged.values(), jagged.lengths(), inverse, uses)
    counts = [ids.numel() for ids in distinct]
    lengths = torch.tensor(counts, device=batch.device())
    values = torch.cat(distinct) if distinct else batch.values()[:0]
    return KeyedJaggedTensor(keys, values, lengths=lengths, length_per_key=counts), repeated


def _by_feature(values: Tensor, received: IncomingBatch) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return vectors, lengths of bags and ids of each feature."""
    inputs = received.inputs
    lengths = inputs.lengths.split(inputs.bags)
    counts = inputs.num_ids()
    return list(zip(values.split(counts), lengths, inputs.ids.split(counts), strict=True))


def _width(config: Config, sharding: ParameterSharding) -> int:
    """Return the largest width that all blocks of columns are multiples of."""
    edges = (edge for shard in sharding.shards for edge in shard.columns)
    return math.gcd(config.embedding_dim, *edges)
