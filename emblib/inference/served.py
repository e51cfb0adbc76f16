"""Collections for inference: the features of a batch, looked up in read-only tables.

A *part* is one module: tables with the same pooling, or, without pooling, with the same dim. A
lookup is one call per part.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.collections.checked_batch import check_ids, checked_batch
from emblib.collections.configs import table_features
from emblib.collections.modules import TableCollection
from emblib.dynamic.handles import DynamicTable
from emblib.inference.composed import (
    ComposedEmbeddingBags,
    component_names,
    component_specs,
    composed_key,
    lookup_options,
)
from emblib.inference.indexed import InferenceEmbeddingBags, RowIndex
from emblib.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from emblib.jagged.jagged_tensor import drop_first
from emblib.jagged.keyed_layout import num_padding_of
from emblib.specs import BoundsCheck, Pooling, TableSpec
from emblib.storage import Dense, Quantized
from emblib.storage.composed import ComposedStorage
from emblib.tables import QuantizedEmbeddingBags, RowFormat
from emblib.tables.optimizer_hooks import rows_as_read
from emblib.tables.quantized import FloatTables, Formats, formats_of

_ROWS_PER_BLOCK = 1 << 16  # rows that are converted at a time
FORMAT_OF = {
    torch.float32: RowFormat.FP32,
    torch.float16: RowFormat.FP16,
    torch.bfloat16: RowFormat.BF16,
}
"""The formats that keep the dtypes of rows."""

ReadOnly = QuantizedEmbeddingBags | InferenceEmbeddingBags | ComposedEmbeddingBags


class RowsByKey(NamedTuple):
    """Copies on the CPU of the keys and rows of a dynamic table, and the rows that other keys read.

    Attributes:
        keys: int64 `[n]`, ascending.
        rows: `[n, dim]`, the row of each key.
        shared_rows: `[m, dim]`, rows that other keys read: fallback rows, or one of the default
            value.
        has_fallback: whether `shared_rows` has fallback rows, one of which a hash selects per key.
    """

    keys: Tensor
    rows: Tensor
    shared_rows: Tensor
    has_fallback: bool

    @classmethod
    def of(cls, table: DynamicTable, default_value: float) -> "RowsByKey":
        """Return the entries of a table, sorted by key; a collective if it is sharded."""
        entries, fallback = table.entries(), table.fallback_rows()
        order = entries.keys.argsort()
        rows: Any = entries.rows["weight"]
        rows = rows[order].detach()
        if fallback:
            return cls(entries.keys[order], rows, fallback["weight"], True)
        default_rows = rows.new_full((int(default_value != 0.0), rows.size(1)), default_value)
        return cls(entries.keys[order], rows, default_rows, False)

    def make_index(self) -> tuple[RowIndex, Tensor]:
        """Return the index, and the rows that it refers to: the shared ones come last."""
        index = RowIndex.of_keys(
            self.keys,
            missing=self.keys.numel() if self.shared_rows.size(0) else -1,
            fallback=self.shared_rows.size(0) if self.has_fallback else 0,
        )
        return index, torch.cat([self.rows, self.shared_rows])


class RowReader(NamedTuple):
    """The rows of a table, or of a component of a composed one.

    Attributes:
        format: format that keeps the rows as they are.
        blocks: function that yields them as floats, blocks `[n, dim]` from row 0 on.
        rows_by_key: keys and rows of a dynamic table; None for a table whose ids are row numbers.
        packed: uint8 `[rows, row_bytes]`, rows that are in `format` already; None for floats.
    """

    format: RowFormat
    blocks: Callable[[], Iterable[Tensor]]
    rows_by_key: RowsByKey | None = None
    packed: Tensor | None = None


class _RowBlocks:
    """Several tables that are read block by block, for `FloatTables`."""

    def __init__(self, blocks: Sequence[Callable[[], Iterable[Tensor]]]) -> None:
        self._blocks = blocks

    def dense_blocks(self, table: int) -> Iterator[Tensor]:
        """Yield the rows of a table."""
        yield from self._blocks[table]()


def is_collection(source: Any) -> bool:
    """Return whether a module is a collection of tables, sharded or not."""
    return any(hasattr(source, f"{name}_configs") for name in ("embedding_bag", "embedding"))


def configs_of(source: Any) -> Sequence[Any]:
    """Return the configurations of the tables of a collection."""
    is_pooled = hasattr(source, "embedding_bag_configs")
    configs: Sequence[Any] = (
        source.embedding_bag_configs() if is_pooled else source.embedding_configs()
    )
    return configs


def readers_of(source: Any) -> dict[str, RowReader]:
    """Return the row reader of each table of a collection, by name; collective if it is sharded.

    A composed table has a reader per component, `table.component`.

    Raises:
        TypeError: the rows of a table cannot be read.
    """
    keyed_tables = source.table_handles()
    readers = {}
    for config in configs_of(source):
        if config.storage.is_keyed:
            rows_by_key = RowsByKey.of(keyed_tables[config.name], config.storage.default_value)
            blocks = partial(rows_by_key.rows.split, _ROWS_PER_BLOCK)
            format = FORMAT_OF[rows_by_key.rows.dtype]
            readers[config.name] = RowReader(format, blocks, rows_by_key)
            continue
        if not isinstance(source, TableCollection):
            raise TypeError(
                f"table {config.name!r} has rows on other ranks: write checkpoints.export(...) on "
                "all ranks, load it into the unsharded collection, and convert that"
            )
        readers |= _readers_of_table(config, source.handles()[config.name])
    return readers


def _readers_of_table(config: Any, handle: Any) -> dict[str, RowReader]:
    """Return the row readers of a table without keys by name, given its handle."""
    storage, format = config.storage, FORMAT_OF[config.data_type]
    if isinstance(storage, ComposedStorage):
        views = handle.views()
        return {
            f"{config.name}.{component.name}": RowReader(
                format,
                partial(rows_as_read(handle.module, views, component.name).split, _ROWS_PER_BLOCK),
            )
            for component in storage.components(config.num_embeddings)
        }
    if isinstance(storage, Quantized):
        blocks = partial(handle.module.dense_blocks, handle.index)
        format = RowFormat(f"int{storage.bits}")
        return {config.name: RowReader(format, blocks, packed=handle.views()["packed"])}
    if not storage.has_dense_rows:
        raise TypeError(
            f"table {config.name!r} is stored as {storage}, whose rows for_inference cannot read: "
            "export the collection itself, in eval mode, with torch.export"
        )
    is_dense = isinstance(storage, Dense)  # rows of tensor trains are computed
    return {config.name: RowReader(format if is_dense else RowFormat.FP32, handle.dense_blocks)}


class ServedFeature(NamedTuple):
    """A feature of a batch that is looked up in one table.

    Attributes:
        feature: key of the feature in batches.
        name: key of the feature in the output.
        dim: elements per row of the table.
    """

    feature: str
    name: str
    dim: int


class InferenceCollection(nn.Module):
    """Base of collections for inference: their parts, and the features that each looks up.

    The constructor has the parts name the features in their warnings and errors.

    Args:
        features: features of the collection, in the order of its output.
        parts: read-only tables, each with the positions in `features` of its features, in order.

    Attributes:
        features: the features.
        parts: the modules of the parts.
        positions: positions in `features` of the features of each part.
    """

    def __init__(
        self,
        features: Sequence[ServedFeature],
        parts: Sequence[tuple[ReadOnly, Sequence[int]]],
    ) -> None:
        super().__init__()
        self.features = tuple(features)
        self.parts = nn.ModuleList([tables for tables, _ in parts])
        self.positions = [list(positions) for _, positions in parts]
        self._all_indexed, self._bounds_check = True, BoundsCheck.WARNING
        for tables, positions in parts:
            rows = tables.rows if isinstance(tables, InferenceEmbeddingBags) else tables
            self._all_indexed &= rows is not tables
            self._bounds_check = rows.bounds_check
            rows.feature_labels = [
                f"feature {features[position].feature!r}, table {rows.table_names[table]!r}"
                for position, table in zip(positions, rows.feature_tables, strict=True)
            ]
        self._names = [feature.name for feature in features]
        self._dims = [feature.dim for feature in features]

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the rows, `weights`, and of the `index` of keys, if there is one."""
        total: dict[str, int] = {}
        for module in self.parts:
            any_part: Any = module
            for name, num_bytes in any_part.nbytes().items():
                total[name] = total.get(name, 0) + num_bytes
        return total

    def _part_batches(self, features: Any) -> Iterator[tuple[Any, list[int], KeyedJaggedTensor]]:
        """Yield each part, the positions of its features, and the batch of these features."""
        batch = KeyedJaggedTensor.adopt(features)
        if batch.variable_stride_per_key():
            raise ValueError(
                "collections for inference take batches with as many bags for every feature, got "
                f"{batch.stride_per_key()}: expand the batch, or look it up in the collection that "
                "was converted"
            )
        position_of_key = batch.index_per_key()
        missing = sorted({feature.feature for feature in self.features} - set(position_of_key))
        if missing:
            raise KeyError(
                f"the batch must have the features of all tables: missing are {missing}, there are "
                f"{batch.keys()}"
            )
        check_ids(batch.values(), allow_uint64=self._all_indexed)
        batch = checked_batch(batch, self._bounds_check)
        for tables, positions in zip(self.parts, self.positions, strict=True):
            keys = [self.features[position].feature for position in positions]
            feature_order = [position_of_key[key] for key in keys]
            if feature_order == list(range(len(batch.keys()))):
                yield tables, positions, batch
            else:
                yield tables, positions, batch.permute(feature_order)


class InferenceEmbeddingBagCollection(InferenceCollection):
    """Look up and pool the features of a batch as the `EmbeddingBagCollection` that it was made of.

    `emblib.inference.for_inference` makes it. Outputs have the same names and columns.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(1_000, 16, "item")])
        >>> batch = emblib.KeyedJaggedTensor(
        ...     ["item"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1])
        ... )
        >>> served = emblib.inference.for_inference(bags)
        >>> torch.equal(served(batch).values(), bags(batch).values())
        True
    """

    is_weighted = False

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return pooled rows `[B, sum of dims]`: one block of columns per feature.

        The dtype is the output dtype of the parts.

        Raises:
            KeyError: the batch lacks a feature of a table.
            RuntimeError: an id or length is invalid, with `BoundsCheck.FATAL`; for some lengths
                also with WARNING (see `BoundsCheck`). Or weights require a gradient where gradients
                are enabled.
            TypeError: `features` is no KeyedJaggedTensor, or the ids are not int32 or int64; uint64
                is allowed too if all tables are dynamic.
            ValueError: features differ in their number of bags, a weighted collection gets no
                weights, or the ids are not one-dimensional.
        """
        if not self._names:
            batch = KeyedJaggedTensor.adopt(features)
            return KeyedTensor(
                [], [], torch.empty(batch.stride(), 0, dtype=torch.float32, device=batch.device())
            )
        blocks: dict[int, Tensor] = {}
        for tables, positions, batch in self._part_batches(features):
            weights = batch.weights_or_none() if self.is_weighted else None
            if self.is_weighted and weights is None:
                raise ValueError(
                    "this collection is weighted, so batches must have weights: make the "
                    "KeyedJaggedTensor with weights=..."
                )
            weights = None if weights is None else weights.float()
            output = tables(batch.values(), batch.offsets(), weights)
            if positions == list(range(len(self._names))):
                return KeyedTensor(self._names, self._dims, output)
            columns = output.split([self._dims[position] for position in positions], 1)
            blocks |= dict(zip(positions, columns, strict=True))
        values = torch.cat([blocks[position] for position in range(len(self._names))], 1)
        return KeyedTensor(self._names, self._dims, values)


class InferenceEmbeddingCollection(InferenceCollection):
    """Look up every id of a batch as the `EmbeddingCollection` that it was made of.

    `emblib.inference.for_inference` makes it. Outputs have the same names.

    Example:
        >>> history = emblib.EmbeddingCollection([emblib.EmbeddingConfig(1_000, 16, "item")])
        >>> batch = emblib.KeyedJaggedTensor(
        ...     ["item"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1])
        ... )
        >>> served = emblib.inference.for_inference(history, "int8")
        >>> served(batch)["item"].values().shape
        torch.Size([3, 16])
    """

    need_indices = False  # whether the result has the ids as its weights

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the vectors `[L, D]` by feature, as jagged as the ids.

        Raises:
            KeyError, RuntimeError, TypeError: see `InferenceEmbeddingBagCollection.forward`.
            ValueError: features differ in their number of bags, or the ids are not one-dimensional.
        """
        by_position: dict[int, JaggedTensor] = {}
        for tables, positions, batch in self._part_batches(features):
            sizes = batch.length_per_key()
            padding = num_padding_of(batch)
            vectors = drop_first(tables(batch.values(), batch.offsets()), padding).split(sizes)
            ids = drop_first(batch.values(), padding).split(sizes)
            lengths = batch.lengths().split(batch.stride_per_key())
            for position, rows, feature_ids, feature_lengths in zip(
                positions, vectors, ids, lengths, strict=True
            ):
                weights = feature_ids if self.need_indices else None
                by_position[position] = JaggedTensor.from_valid(
                    rows, weights, feature_lengths, None
                )
        return {name: by_position[position] for position, name in enumerate(self._names)}


def convert(
    source: Any, formats: Formats | None, output_dtype: torch.dtype | None
) -> InferenceEmbeddingBagCollection | InferenceEmbeddingCollection:
    """Copy a collection into one for inference; collective if it is sharded.

    Args:
        source: the collection.
        formats: format of the rows of all tables, or of each; None keeps their dtypes.
        output_dtype: dtype of the output; None keeps the collection's, float32 if it is sharded.

    Raises:
        TypeError: the rows of a table cannot be read.
        ValueError: a format is unknown or does not hold the rows, the numbers of formats and tables
            differ, quantised rows have another format, or `output_dtype` is another dtype.
    """
    configs, readers = configs_of(source), readers_of(source)
    features = table_features(configs)
    is_pooled = hasattr(source, "embedding_bag_configs")
    row_formats = (
        [None] * len(configs) if formats is None else formats_of(len(configs), None, formats)
    )
    groups: dict[Any, list[int]] = {}  # tables by what the tables of a part have in common
    for table, config in enumerate(configs):
        pooling = config.pooling if is_pooled else Pooling.NONE
        part_key: tuple[Any, ...] = (pooling, 0 if is_pooled else config.embedding_dim)
        if isinstance(config.storage, ComposedStorage):
            part_key = (*part_key, composed_key(config.storage, config.embedding_dim, pooling))
        groups.setdefault(part_key, []).append(table)
    dtype, device = torch.float32, torch.device("cpu")  # where entries of all ranks are
    if isinstance(source, TableCollection):
        dtype, device = source.groups.output_dtype, source.device
    parts = []
    for (pooling, *_), tables in groups.items():
        positions = [i for i, feature in enumerate(features) if feature.table in tables]
        module = _convert_part(
            [configs[table] for table in tables],
            readers,
            device,
            [row_formats[table] for table in tables],
            pooling=pooling,
            feature_tables=[tables.index(features[position].table) for position in positions],
            output_dtype=dtype if output_dtype is None else output_dtype,
            bounds_check=getattr(source, "bounds_check", BoundsCheck.WARNING),
        )
        parts.append((module, positions))
    served = [
        ServedFeature(feature.feature, feature.name, configs[feature.table].embedding_dim)
        for feature in features
    ]
    if not is_pooled:
        sequences = InferenceEmbeddingCollection(served, parts)
        sequences.need_indices = source.need_indices()
        return sequences
    bags = InferenceEmbeddingBagCollection(served, parts)
    bags.is_weighted = source.is_weighted()
    return bags


def _convert_part(
    configs: Sequence[Any],
    readers: dict[str, RowReader],
    device: torch.device,
    formats: Sequence[RowFormat | None],
    *,
    feature_tables: Sequence[int],
    pooling: Pooling,
    output_dtype: torch.dtype,
    bounds_check: BoundsCheck,
) -> ReadOnly:
    """Convert the tables of a part; a format of None keeps the rows as they are."""
    specs = [TableSpec(c.num_embeddings, c.embedding_dim, c.name) for c in configs]
    storages = [c.storage for c in configs if isinstance(c.storage, ComposedStorage)]
    if not storages:
        tables = FloatTables(specs, [], pooling, feature_tables, output_dtype, device)
        return _store(tables, [readers[spec.name] for spec in specs], formats, bounds_check)
    options = lookup_options(specs, storages, feature_tables, pooling)
    stored_specs = component_specs(specs, storages)
    formats = [
        format
        for spec, storage, format in zip(specs, storages, formats, strict=True)
        for _ in storage.components(spec.rows)
    ]
    tables = FloatTables(stored_specs, [], output_dtype=torch.float32, device=device, **options)
    component_readers = [readers[name] for name in component_names(specs, storages)]
    rows: Any = _store(tables, component_readers, formats, BoundsCheck.NONE)
    return ComposedEmbeddingBags(
        rows,
        specs,
        storages,
        feature_tables=feature_tables,
        pooling=pooling,
        bounds_check=bounds_check,
        output_dtype=output_dtype,
    )


def _store(
    tables: FloatTables,
    readers: Sequence[RowReader],
    formats: Sequence[RowFormat | None],
    bounds_check: BoundsCheck,
) -> QuantizedEmbeddingBags | InferenceEmbeddingBags:
    """Store the rows that `readers` read, for tables described by `tables`, whose `tensors` is [].

    A format of None keeps the rows as they are.
    """
    specs, blocks, indexes = [], [], list[RowIndex | None]()
    for spec, reader, format in zip(tables.specs, readers, formats, strict=True):
        index, row_blocks, num_rows = None, reader.blocks, spec.rows
        if reader.rows_by_key is not None:
            index, indexed_rows = reader.rows_by_key.make_index()
            # At least one row, of zeros, so that no table is without memory.
            num_rows = max(len(indexed_rows), 1)
            row_blocks = partial(indexed_rows.split, _ROWS_PER_BLOCK)
        if reader.packed is not None:
            if format not in (None, reader.format):
                raise ValueError(
                    f"table {spec.name!r} has rows in {reader.format.value} already: leave its "
                    f"format at that, or convert the collection that it was quantised from"
                )
            row_blocks = tuple  # no blocks: the bytes are copied below
        specs.append(TableSpec(num_rows, spec.dim, spec.name))
        blocks.append(row_blocks)
        indexes.append(index)
    any_blocks: Any = _RowBlocks(blocks)
    rows = QuantizedEmbeddingBags.from_float(
        tables._replace(specs=specs, tensors=any_blocks),
        formats=[format or reader.format for format, reader in zip(formats, readers, strict=True)],
        bounds_check=bounds_check,
    )
    for view, reader in zip(rows.table_views(), readers, strict=True):
        if reader.packed is not None:
            view["packed"].copy_(reader.packed)
    has_no_index = all(index is None for index in indexes)
    return rows if has_no_index else InferenceEmbeddingBags(rows, indexes)
