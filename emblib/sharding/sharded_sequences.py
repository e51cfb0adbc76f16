"""The sharded embedding collection: one vector per id.

The counterpart of `emblib.sharding.sharded_bags` for unpooled rows. A *vector* is the row of an id.
It is sent in *slices* of `width` columns, because a shard may have only some of its columns.
`SequenceTables` are the tables of one dim and one width, which share messages. Each received slice
is written to the position of its id. `ShardedEmbeddingCollection` has one `SequenceTables` per pair
of dim and width.

Ids are sent rank by rank, for each rank unit by unit (see `emblib.sharding.layout`), and vectors
return in the same order. Ids of replicated tables may be sent too, for the update, as the last
units of each rank. Their vectors are not sent: every rank looks up its own batch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.attribute_errors import shows_attribute_errors
from emblib.collections.fused_states import RemoteOptimizer
from emblib.collections.groups import TableGroups
from emblib.collections.modules import EmbeddingCollection
from emblib.grad_mode import in_grad_mode
from emblib.jagged import JaggedTensor, KeyedJaggedTensor
from emblib.jagged.jagged_tensor import running_sums
from emblib.ops import route
from emblib.optim import Optimizer
from emblib.sharding.awaitables import Awaitable, LazyAwaitable, LazyDeferredAwaitable
from emblib.sharding.checkpoints.saved_tables import StateOfTables
from emblib.sharding.codecs import (
    CommPrecision,
    LocalSlice,
    ReceivedValues,
    SentValues,
    local_slice,
    without_local_size,
)
from emblib.sharding.input_dist import IncomingBatch, as_int64
from emblib.sharding.layout import Config
from emblib.sharding.layout_buffers import LayoutBuffers, int64_tensor
from emblib.sharding.lookup import (
    CollectionRequests,
    CollectionSteps,
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
    agree_on_settings,
)
from emblib.sharding.sharding_types import ParameterSharding, Rule
from emblib.sharding.shared_shards import SharedShards
from emblib.tables.graph_break import run_uncompiled

# A pair: the vectors that this rank has looked up for all ranks, in the order of the received ids;
# and the vectors of replicated tables for its own batch, `[n, dim]`, None without such tables.
LookedUpRows = tuple[Tensor, Tensor | None]


class VectorFormat(NamedTuple):
    """Format of sent vectors: their codecs, and the number of columns of a slice."""

    comm_precision: CommPrecision
    width: int


@dataclass(frozen=True)
class _SequenceRoute:
    """Route of the vectors of one batch. Tensors are int64; slices have `width` columns.

    Attributes:
        send_order: `[slices sent]`, index of each slice to send, rank by rank, among the slices
            that were looked up, unit by unit.
        output_slices: `[slices received]`, index of each received slice among the
            `L * dim / width` slices of the output.
        replica_positions: `[n]`, positions in the batch of the ids of replicated tables; None
            without such tables.
        replica_order: index of each vector of replicated tables in the order of
            `ReplicatedTables.gradient_sink`, unit by unit, among the gathered vectors of all
            ranks, rank by rank.
        num_sent_slices: number of slices to each rank.
        num_received_slices: number of slices from each rank.
        num_replica_rows: number of vectors of replicated tables in the batch of each rank; 0 if
            their ids were not sent.
        num_ids: number of ids of the batch, `L`.
    """

    send_order: Tensor
    output_slices: Tensor
    replica_positions: Tensor | None
    replica_order: Tensor
    num_sent_slices: list[int]
    num_received_slices: list[int]
    num_replica_rows: list[int]
    num_ids: int


class SequenceTables(ShardedTables):
    """Tables of one dim, sharded in blocks of columns that are multiples of one width.

    Arguments are as for `ShardedTables`; `vector_format` has the width.
    """

    def __init__(
        self,
        source: Any,
        configs: Sequence[Config],
        plan: Mapping[str, ParameterSharding],
        ranks: RankGroup,
        *,
        optimizer: Optimizer | None,
        gradients: GradientReduction,
        vector_format: VectorFormat,
        shared: SharedShards,
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
        self.vector_format = vector_format
        self.dim = configs[0].embedding_dim
        all_units = [unit for rank in self.layout.ranks for unit in rank.all_units]
        width = vector_format.width
        self._slices_per_unit = [unit.columns // width for unit in self._local_layout.units]
        self._has_equal_widths = len({unit.columns for unit in all_units}) <= 1
        unit_buffers: dict[str, list[int]] = {
            "first": [unit.shard.columns[0] // width for unit in all_units],
            "count": [unit.columns // width for unit in all_units],
            "is_sharded": [
                unit_index < len(rank.units)
                for rank in self.layout.ranks
                for unit_index in range(len(rank.all_units))
            ],
        }
        # Int64 `[units of all ranks]`. A unit has the `count` slices of a vector from slice `first`
        # on. `is_sharded` is 0 for units of replicated tables, the last of each rank, which return
        # no slices, and else 1.
        self._unit_slices = LayoutBuffers()
        for name, values in unit_buffers.items():
            self._unit_slices.register_layout(name, int64_tensor(values), ranks.device)

    def compute(self, received: IncomingBatch) -> LookedUpRows:
        """Look up the vectors of this rank's units, and its batch in the replicated tables.

        Without units the first result is `[0, width]`.
        """
        replica_rows = None if self.replicated is None else self.replicated(received.inputs)
        rows = self.look_up_rows(received)
        if not self._local_layout.units:
            rows = rows.new_empty(0, self.vector_format.width)
        return rows, replica_rows

    def output_step(self, rows: LookedUpRows, received: IncomingBatch) -> OutputStep | Tensor:
        """Return the step that sends the vectors of a batch; or the output if nothing was sent.

        The output is `[L, dim]` in the order of the batch.
        """
        local_rows, replica_rows = rows
        if received.sent is None:
            return self._local_output(local_rows, received)
        vector_route = in_grad_mode(self._route, enabled=False)(received)
        gradient_sink = None
        if (
            self.replicated is not None
            and self.replicated.is_synchronised
            and torch.is_grad_enabled()
        ):
            gradient_sink = self.replicated.gradient_sink(
                received, (sum(vector_route.num_replica_rows), self.dim)
            )
        return _SequenceStep(
            local_rows,
            replica_rows,
            gradient_sink,
            vector_route,
            self,
            merges_rows=received.merges_rows,
        )

    def _local_output(self, local: Tensor, received: IncomingBatch) -> Tensor:
        """Reorder vectors that were not sent from the modules' order to that of the batch."""
        unit_features = [unit.feature for unit in self._local_layout.units]
        if unit_features == sorted(unit_features):
            return local
        id_counts = received.inputs.count_ids()
        unit_rows = local.split([id_counts[feature] for feature in unit_features])
        return torch.cat([unit_rows[i] for i in map(unit_features.index, sorted(unit_features))])

    def _route(self, received: IncomingBatch) -> _SequenceRoute:
        """Return the route of the vectors of a batch."""
        sent, inputs = received.sent, received.inputs
        assert sent is not None
        num_units = len(self._local_layout.units)
        num_slices = received.ids_per_segment[:, :num_units]  # by sending rank and unit
        replica_counts = received.ids_per_segment[:, num_units:]
        positions = self._input_dist.positions(received)
        if self._has_equal_widths and self.dim == self.vector_format.width:
            # Every vector is one slice.
            num_sent_slices, output_slices = received.num_ids, positions
            num_received_slices = [num_ids - sent.num_replicated_ids for num_ids in sent.num_ids]
        else:
            num_slices = num_slices * num_slices.new_tensor(self._slices_per_unit)
            num_sent_slices = num_slices.sum(1).tolist()
            output_slices, num_received_slices = self._output_slices(positions, received)
        return _SequenceRoute(
            send_order=_transposed_order(num_slices.t(), sum(num_sent_slices)),
            output_slices=output_slices,
            replica_positions=self._replica_positions(received),
            replica_order=_transposed_order(replica_counts, received.num_replicated_ids),
            num_sent_slices=num_sent_slices,
            num_received_slices=num_received_slices,
            num_replica_rows=replica_counts.sum(1).tolist(),
            num_ids=inputs.ids.numel(),
        )

    def _output_slices(
        self, positions: Tensor, received: IncomingBatch
    ) -> tuple[Tensor, list[int]]:
        """Return the output slices of the ids sent, in the order of sending, and their counts.

        If a unit has slices `first` to `first + count` of its vectors, its k-th slice for the id at
        position i of the batch is the output slice `i * (dim / width) + first + k`.

        Args:
            positions: int64, position in the batch of each id sent, without replicated tables.
            received: the batch.

        Returns:
            Int64 `[slices received]`, and the number of slices from each rank.
        """
        sent = received.sent
        assert sent is not None
        ids_per_unit = torch.as_tensor(sent.unit_starts, device=positions.device).diff().long()
        self._unit_slices.restore_layout()
        ids_per_unit *= self._unit_slices.get_buffer("is_sharded")
        slices_per_unit = (ids_per_unit * self._unit_slices.get_buffer("count")).tolist()
        unit_bounds = accumulate((len(rank.all_units) for rank in self.layout.ranks), initial=0)
        num_received_slices = [
            sum(slices_per_unit[begin:end]) for begin, end in pairwise(unit_bounds)
        ]
        # Per id: its first slice in the output, and the number of its slices from the unit.
        first_slices = torch.repeat_interleave(self._unit_slices.get_buffer("first"), ids_per_unit)
        first_slices += positions * (self.dim // self.vector_format.width)
        num_slices = torch.repeat_interleave(self._unit_slices.get_buffer("count"), ids_per_unit)
        slices_before = num_slices.cumsum(0) - num_slices
        # Per slice: its number among the slices of its id.
        slice_numbers = torch.arange(sum(num_received_slices), device=positions.device)
        slice_numbers -= torch.repeat_interleave(slices_before, num_slices)
        slice_numbers += torch.repeat_interleave(first_slices, num_slices)
        return slice_numbers, num_received_slices

    def _replica_positions(self, received: IncomingBatch) -> Tensor | None:
        """Return the positions of the ids of replicated tables, int64; None without any."""
        if self.replicated is None:
            return None
        inputs = received.inputs
        all_positions = torch.arange(inputs.ids.numel(), device=inputs.ids.device)
        return self.replicated.select_entries(inputs, all_positions)


def _transposed_order(counts: Tensor, total: int) -> Tensor:
    """Return the order, int64 `[total]`, that transposes segments of rows.

    The rows lie in segments (0, 0), (0, 1), ...; segment (a, b) has `counts[a, b]` rows, `total` in
    all. The result lists the rows of segments (0, 0), (1, 0), ..., (0, 1), and so on.
    """
    num_segment_rows, num_columns = counts.shape
    starts = running_sums(counts.reshape(-1).long())
    order = (
        torch.arange(num_segment_rows * num_columns, device=counts.device)
        .view(num_segment_rows, num_columns)
        .t()
        .reshape(-1)
    )
    return route.gather_segments(torch.arange(total, device=counts.device), starts, order, total)


class _SequenceStep(OutputStep):
    """The vectors of a batch, which return to the positions of their ids; see `OutputStep`."""

    def __init__(
        self,
        local: Tensor,
        replica_rows: Tensor | None,
        gradient_sink: Tensor | None,
        vector_route: _SequenceRoute,
        tables: SequenceTables,
        *,
        merges_rows: bool,
    ) -> None:
        replica_sizes = [count * tables.dim for count in vector_route.num_replica_rows]
        super().__init__(local, replica_rows, gradient_sink, replica_sizes, merges_rows=merges_rows)
        self._route, self._tables, self.hyperparams = vector_route, tables, tables.hyperparams
        # Elements to and from each rank; the route has the numbers of slices.
        width = tables.vector_format.width
        self._sent_sizes = [count * width for count in vector_route.num_sent_slices]
        self._received_sizes = [count * width for count in vector_route.num_received_slices]
        # Gradients of this rank's own vectors that are not sent, from `backward` to
        # `local_gradient`.
        self._local_grads: Tensor | None = None

    def rows_to_send(self) -> SentValues:
        """Return the rows to send, for each rank in the order of the ids that it sent."""
        assert self.local is not None
        rows = self.local.detach().reshape(-1, self._tables.vector_format.width)
        sent_rows = rows.index_select(0, self._route.send_order).view(-1)
        codec = self._tables.vector_format.comm_precision.forward
        return SentValues(sent_rows, self._sent_sizes, self._received_sizes, codec)

    def assemble(self, received: ReceivedValues, replica_rows: Tensor | None) -> Tensor:
        """Return the vectors of this rank's ids, `[L, dim]`, from received and replicated rows."""
        width, dim = self._tables.vector_format.width, self._tables.dim
        output = torch.empty(
            self._route.num_ids, dim, dtype=torch.float32, device=received.values.device
        )
        output_slices, all_slices = self._route.output_slices, output.view(-1, width)
        if received.local is not None:
            # This rank's own vectors, which were not sent.
            first_slice = received.local_begin // width
            kept_slice = LocalSlice(first_slice, first_slice + received.local.numel() // width)
            local_slices = received.local.view(-1, width).float()
            all_slices.index_copy_(0, kept_slice.select(output_slices), local_slices)
            output_slices = kept_slice.select_others(output_slices)
        all_slices.index_copy_(0, output_slices, received.values.view(-1, width).float())
        if replica_rows is not None and self._route.replica_positions is not None:
            output.index_copy_(0, self._route.replica_positions, replica_rows.detach().float())
        return output

    def gradient_nbytes(self) -> tuple[list[int], list[int]]:
        return self._gradients(torch.empty(0, dtype=torch.float32, device="cpu")).nbytes()

    def _gradients(self, flat: Tensor) -> SentValues:
        codec = self._tables.vector_format.comm_precision.backward
        return SentValues(flat, self._received_sizes, self._sent_sizes, codec)

    def backward(self, grad: Tensor, *, keeps_local: bool) -> tuple[SentValues, Tensor | None]:
        """Return the gradients of vectors to send, and those of replicated tables' vectors.

        With `keeps_local`, gradients of this rank's own vectors may be kept for `local_gradient`.
        """
        scale, grad = self._tables.scale, grad.contiguous()
        width, ranks = self._tables.vector_format.width, self._tables.ranks
        slice_grads = grad.view(-1, width).index_select(0, self._route.output_slices)
        if scale != 1.0:
            slice_grads.mul_(scale)
        replica_grads = None
        if self.replica_shape is not None:
            assert self._route.replica_positions is not None
            replica_grads = grad.index_select(0, self._route.replica_positions)
            # Without a sink these gradients are averaged with those of the dense part.
            if self.sink_shape is not None and scale != 1.0:
                replica_grads.mul_(scale)
            replica_grads = replica_grads.view(-1)
        codec = self._tables.vector_format.comm_precision.backward
        kept_slice = None
        if keeps_local and codec.is_identity:
            kept_slice = local_slice(self._route.num_received_slices, ranks)
        if kept_slice is None:
            return self._gradients(slice_grads.view(-1)), replica_grads
        self._local_grads = kept_slice.select(slice_grads)
        values = SentValues(
            kept_slice.select_others(slice_grads).view(-1),
            without_local_size(self._received_sizes, ranks),
            without_local_size(self._sent_sizes, ranks),
            codec,
        )
        return values, replica_grads

    def local_gradient(self, received: Tensor) -> Tensor:
        """Return the gradient of the local lookup, from the received gradients, flat.

        It must be called once after each `backward`: it takes the gradients that `backward` kept.
        """
        received_grads = received.view(-1, self._tables.vector_format.width)
        send_order = self._route.send_order
        local_grads = received_grads.new_empty((send_order.numel(), received_grads.size(1)))
        kept_grads, self._local_grads = self._local_grads, None
        if kept_grads is not None:
            kept_slice = local_slice(self._route.num_sent_slices, self._tables.ranks)
            assert kept_slice is not None
            local_grads.index_copy_(0, kept_slice.select(send_order), kept_grads)
            send_order = kept_slice.select_others(send_order)
        return local_grads.index_copy_(0, send_order, received_grads).view(self.local_shape)

    def sink_gradient(self, gathered: Tensor) -> Tensor:
        return gathered.view(-1, self._tables.dim).index_select(0, self._route.replica_order)


class ShardedEmbeddingCollection(StateOfTables):
    """An `EmbeddingCollection` sharded over ranks, with the same vectors for this rank's batch.

    All ranks call it together, as for `ShardedEmbeddingBagCollection`. Tables share messages if
    they have the same dim and the same width. The width of a table is the largest number that
    divides the columns of all its shards.

    Args:
        source: an `EmbeddingCollection`; its weights and optimizer state are kept.
        plan: sharding of each table, or a rule that makes it, e.g. `row_wise()`, by table name.
        ranks: the processes; None for all.
        comm_precision: the codecs of vectors and gradients in transit; None for float32.
        gradients: whether gradients are the mean or the sum over ranks.
        optimizer: optimizer of tables whose configuration has none; None uses that of `source`.
        shared: the shards of tables that other collections read too, by name, which `shard` passes;
            None if there are no such tables.
        dedup: whether each id of a feature is sent once per batch, and its vector returned once.
            Messages are smaller if ids repeat within the batch of a rank. The gradients of equal
            ids are added up before they are sent. Hash tables that count uses, for eviction or
            admission, also get the number of occurrences of each id, 8 bytes per distinct id.

    Raises:
        ValueError: tables, plans or settings differ between ranks, or do not fit together.
        TypeError: an argument is of a wrong type, or `shared` lacks a table.
        RuntimeError: another rank raised one of these errors.

    Example:
        >>> history = emblib.EmbeddingCollection([emblib.EmbeddingConfig(8, 4, "item")])
        >>> sharded = emblib.sharding.ShardedEmbeddingCollection(
        ...     history, {"item": emblib.sharding.row_wise()}, emblib.sharding.RankGroup.single()
        ... )
        >>> batch = emblib.KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1]))
        >>> torch.equal(sharded(batch)["item"].values(), history(batch)["item"].values())
        True
    """

    handles_name = "embeddings"  # attribute with the `ShardParameters`, see `StateOfTables`
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
        dedup: bool = False,
    ) -> None:
        super().__init__()
        self.dedup = dedup
        self.ranks = RankGroup.from_value(ranks)
        settings = agree_on_settings(
            source,
            plan,
            self.ranks,
            comm_precision=comm_precision,
            gradients=gradients,
            optimizer=optimizer,
            shared=shared or {},
            kind=EmbeddingCollection,
            dedup=dedup,
        )
        self.shared = dict(shared or {})
        self.configs, self.plan = settings.configs, settings.plan
        self.comm_precision, self.gradients = settings.comm_precision, settings.gradients
        self._need_indices = source.need_indices()
        configs_by_shape: dict[tuple[int, int], list[Config]] = {}  # by dim and width
        for config in self.configs:
            shape = config.embedding_dim, _slice_width(config, self.plan[config.name])
            configs_by_shape.setdefault(shape, []).append(config)
        self.tables_by_shape = nn.ModuleList(
            SequenceTables(
                source,
                configs,
                {config.name: self.plan[config.name] for config in configs},
                self.ranks,
                optimizer=settings.optimizer,
                gradients=self.gradients,
                vector_format=VectorFormat(self.comm_precision, width),
                shared=self.shared,
            )
            for (_, width), configs in configs_by_shape.items()
        )
        handles = [handle for tables in self._sequence_tables() for handle in tables.handles()]
        self.embeddings = ShardParameters(handles, self.ranks)
        self._outputs = self._find_outputs()

    def _find_outputs(self) -> list["_FeatureOutput"]:
        """Return the outputs in the order of the configurations and their features."""
        table_numbers = {config.name: number for number, config in enumerate(self.configs)}
        keys = [key for config in self.configs for key in config.feature_names]
        sorting_entries = []
        for tables_index, tables in enumerate(self._sequence_tables()):
            for feature_index, feature in enumerate(tables.layout.features):
                table = tables.configs[feature.table].name
                name = f"{feature.key}@{table}" if keys.count(feature.key) > 1 else feature.key
                output = _FeatureOutput(tables_index, feature_index, feature.key, name)
                sorting_entries.append((table_numbers[table], feature_index, output))
        return [output for _, _, output in sorted(sorting_entries)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.embeddings.register_parameters()
        return self

    @property
    @shows_attribute_errors
    def groups(self) -> TableGroups:
        """Return the table groups of the first pair of dim and width."""
        return self._sequence_tables()[0].groups

    def _sequence_tables(self) -> list["SequenceTables"]:
        return [tables for tables in self.tables_by_shape if isinstance(tables, SequenceTables)]

    def embedding_configs(self) -> tuple[Any, ...]:
        """Return the configurations of the tables."""
        return self.configs

    def need_indices(self) -> bool:
        """Return whether results have the ids as weights."""
        return self._need_indices

    def local_shards(self) -> list[LocalShard]:
        """Return the table shards on this rank, including replicas."""
        return [shard for tables in self._sequence_tables() for shard in tables.local_shards()]

    def storage_config(self, table: str) -> Config:
        """Return the configuration of a table with the storage that the plan selects.

        Raises:
            KeyError: there is no table of this name.
        """
        return self._tables_with(table).storage_config(table)

    def remote_optimizer(self, table: str) -> RemoteOptimizer | None:
        """Return the optimizer of a table that no module on this rank updates, else None."""
        return self._tables_with(table).remote_optimizer(table)

    def _tables_with(self, table: str) -> "SequenceTables":
        """Return the tables among which a table is; raise KeyError if there is none of its name."""
        for tables in self._sequence_tables():
            if table in tables.plan:
                return tables
        raise KeyError(f"there is no table {table!r}; the tables are {', '.join(self.plan)}")

    def input_dist(self, features: KeyedJaggedTensor) -> Awaitable[Awaitable[Any]]:
        """Start to send ids to the ranks that store their rows.

        The first `wait` receives the sizes and sends the ids; `wait` on its result receives the ids
        of all ranks. All ranks must call this in the same order. It raises as `forward` does, the
        errors of other ranks in the first `wait`.
        """
        return start_input_dist(self, features)

    def collection_requests(self, features: KeyedJaggedTensor | None) -> CollectionRequests:
        """Return the requests to send a batch; for None all ranks stop a joint input_dist.

        Raises:
            Exception: see `ShardedTables.input_request`.
        """
        repeated_ids = use_counts = None
        if self.dedup and features is not None:
            batch = self._sequence_tables()[0].check_batch(KeyedJaggedTensor.adopt(features))
            features, repeated_ids = _deduplicate(batch, self._features())
            use_counts = {key: ids.counts for key, ids in repeated_ids.items()}
        requests = [
            tables.input_request(features, use_counts) for tables in self._sequence_tables()
        ]
        return CollectionRequests(requests, partial(_SequenceBatch, repeated_ids=repeated_ids))

    def _features(self) -> list[str]:
        """Return the features of all tables, each once."""
        return list(dict.fromkeys(key for config in self.configs for key in config.feature_names))

    def prefetch(self, received: "_SequenceBatch") -> None:
        """Prefetch the rows of a batch into the caches of their tables."""
        for tables, batch in zip(self._sequence_tables(), received.batches, strict=True):
            tables.prefetch(batch)

    def compute(self, received: "_SequenceBatch") -> list[LookedUpRows]:
        """Return vectors looked up for all ranks, and replicated tables' vectors of this batch.

        There is one entry per `SequenceTables`.
        """
        return [
            tables.compute(batch)
            for tables, batch in zip(self._sequence_tables(), received.batches, strict=True)
        ]

    def output_dist(
        self, rows: Sequence[LookedUpRows], received: "_SequenceBatch"
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Start to return vectors to the ranks that own the ids; all ranks call this."""
        return start_output_dist(self, rows, received)

    def compute_and_output_dist(
        self, received: "_SequenceBatch"
    ) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Look up the received ids and start the output all-to-all."""
        return self.output_dist(self.compute(received), received)

    def collection_steps(
        self, rows: Sequence[LookedUpRows], received: "_SequenceBatch"
    ) -> CollectionSteps:
        """Return the lookups whose rows can be sent, one per `SequenceTables`.

        Their outputs are joined to a `JaggedTensor` per feature.
        """

        def join(
            outputs: list[Awaitable[Tensor]],
        ) -> LazyAwaitable[dict[str, JaggedTensor]]:
            output = partial(self._output, outputs, received)
            return LazyDeferredAwaitable(in_grad_mode(output, enabled=torch.is_grad_enabled()))

        steps = [
            tables.output_step(vectors, batch)
            for tables, vectors, batch in zip(
                self._sequence_tables(), rows, received.batches, strict=True
            )
        ]
        return CollectionSteps(steps, join)

    @run_uncompiled
    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[dict[str, JaggedTensor]]:
        """Return float32 `[L, dim]` by feature, one vector per id, in the order of the tables.

        The feature of several tables is named `key@table`. All ranks call this.

        Raises:
            KeyError, TypeError, ValueError: see `ShardedTables.input_request`.
            RuntimeError: see there; or a parameter was replaced, the batch of another rank is
                wrong, ids differ in dtype between ranks, or only some ranks have features of
                different batch sizes.
        """
        self.embeddings.check_not_replaced()
        return look_up(self, features)

    def _output(
        self, pending: Sequence[Awaitable[Tensor]], received: "_SequenceBatch"
    ) -> dict[str, JaggedTensor]:
        """Wait for the vectors, and return them by feature."""
        vectors_of_tables = [awaitable.wait() for awaitable in pending]
        features_of_tables = [
            _split_by_feature(values, batch)
            for values, batch in zip(vectors_of_tables, received.batches, strict=True)
        ]
        outputs = {}
        for tables_index, feature, key, name in self._outputs:
            values, lengths, ids = features_of_tables[tables_index][feature]
            if received.repeated_ids is not None:
                values, lengths, ids = received.repeated_ids[key].expand(values)
            outputs[name] = JaggedTensor(
                values, lengths=lengths, weights=ids if self._need_indices else None
            )
        return outputs


class _FeatureOutput(NamedTuple):
    """An output of the collection.

    Attributes:
        tables_index: index of the `SequenceTables` that look up the feature.
        feature: index of the feature in their layout.
        key: key of the feature's ids in a batch.
        name: name of the output, `key@table` if several tables read the key.
    """

    tables_index: int
    feature: int
    key: str
    name: str


class _RepeatedIds(NamedTuple):
    """The ids of a feature before deduplication.

    Attributes:
        ids: `[L]`.
        lengths: `[bags]`, ids per bag.
        inverse: int64 `[L]`, index of each id among the distinct ids.
        counts: int64 `[distinct]`, number of occurrences of each distinct id.
    """

    ids: Tensor
    lengths: Tensor
    inverse: Tensor
    counts: Tensor

    def expand(self, vectors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the vector of every id `[L, dim]`, the lengths of bags and the ids.

        `vectors` are the vectors of the distinct ids, `[n, dim]`.
        """
        # `embedding`, because its backward adds in a fixed order on a GPU; index_select's does not.
        return nn.functional.embedding(self.inverse, vectors), self.lengths, self.ids


class _SequenceBatch(NamedTuple):
    """The received batches of a collection.

    Attributes:
        batches: one batch per `SequenceTables`.
        repeated_ids: the ids of this rank before `dedup`, by feature; None without it.
    """

    batches: list[IncomingBatch]
    repeated_ids: Mapping[str, _RepeatedIds] | None


def _deduplicate(
    batch: KeyedJaggedTensor, keys: Sequence[str]
) -> tuple[KeyedJaggedTensor, dict[str, _RepeatedIds]]:
    """Return a batch with each feature's distinct ids in one bag, and the original ids by feature.

    The batch has the features `keys`, in this order, and no weights. The host waits for a GPU.

    Raises:
        KeyError: the batch lacks a feature.
    """
    distinct_ids, repeated_ids = [], {}
    for key in keys:
        jagged = batch[key]
        ids = as_int64(jagged.values())
        ids, inverse, counts = ids.unique(return_inverse=True, return_counts=True)
        distinct_ids.append(ids)
        repeated_ids[key] = _RepeatedIds(jagged.values(), jagged.lengths(), inverse, counts)
    num_ids = [ids.numel() for ids in distinct_ids]
    lengths = torch.tensor(num_ids, device=batch.device())
    values = torch.cat(distinct_ids) if distinct_ids else batch.values()[:0]
    return KeyedJaggedTensor(keys, values, lengths=lengths, length_per_key=num_ids), repeated_ids


def _split_by_feature(
    values: Tensor, received: IncomingBatch
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the vectors `[L, dim]`, lengths of bags and ids of each feature.

    `values` are the vectors of all features, in the order of the batch.
    """
    inputs = received.inputs
    lengths = inputs.lengths.split(inputs.bag_counts)
    id_counts = inputs.count_ids()
    return list(zip(values.split(id_counts), lengths, inputs.ids.split(id_counts), strict=True))


def _slice_width(config: Config, sharding: ParameterSharding) -> int:
    """Return the largest number that divides the columns of all shards of a table."""
    edges = (edge for shard in sharding.shards for edge in shard.columns)
    return math.gcd(config.embedding_dim, *edges)
