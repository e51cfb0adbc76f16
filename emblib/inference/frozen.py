"""Frozen tables: read-only tables in one file, opened by mapping it."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emblib.columns import IndexKind
from emblib.inference import frozen_file
from emblib.inference.composed import ComposedEmbeddingBags
from emblib.inference.conversion import for_inference
from emblib.inference.indexed import InferenceEmbeddingBags, RowIndex
from emblib.inference.served import (
    InferenceCollection,
    InferenceEmbeddingBagCollection,
    InferenceEmbeddingCollection,
    ReadOnly,
    ServedFeature,
)
from emblib.specs import (
    BoundsCheck,
    IdOrder,
    MatmulPrecision,
    OptionEnum,
    Pooling,
    Precision,
    TableSpec,
    TTSpec,
    check_bool,
)
from emblib.storage import kinds
from emblib.tables import QuantizedEmbeddingBags, RowFormat, TableBatchedTTEmbeddingBags
from emblib.tables.quantized import Formats

_ROWS_KIND, _TRAINS_KIND, _COLLECTION_KIND = "rows", "tensor_trains", "collection"  # kinds of files
# Other kinds of files, so that versions that cannot read composed tables refuse them.
_COMPOSED_KINDS = {_ROWS_KIND: "composed_rows", _COLLECTION_KIND: "collection_with_composed_rows"}

Frozen = (
    ReadOnly
    | TableBatchedTTEmbeddingBags
    | InferenceEmbeddingBagCollection
    | InferenceEmbeddingCollection
)


def freeze(source: Any, path: str | Path, formats: Formats | None = None) -> None:
    """Write tables into a file, from which any number of processes look up at the same time.

    The file replaces `path` when it is complete and synced to the disk; if that fails, for example
    because the disk is full, `path` keeps its content. Optimizer states are not in it.

    Args:
        source: read-only tables, a result of `for_inference`, a `TableBatchedTTEmbeddingBags` (its
            cores are written), or any module, collection or matrices that `for_inference` takes.
            All ranks call this with a sharded collection, each with another path.
        path: path of the file; "~" is the home directory.
        formats: format of the rows of all tables, or of each, as in `for_inference`; tensor trains
            are then written as rows. None keeps the dtype of rows, and the cores of a module of
            tensor trains; trains in a collection and those with a cache are written as rows.

    Raises:
        OSError: the file could not be written. If only the sync of its directory failed, `path` has
            the new content.
        TypeError: the source is of another class, or there are formats for tables that are
            read-only already.
        ValueError: the format does not hold the rows, quantised rows have another format, or there
            is not one format per table.

    Example:
        >>> import tempfile, os
        >>> bags = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(1_000, 8, name="item")])
        >>> ids, offsets = torch.tensor([2**62, -7]), torch.tensor([0, 1, 2])
        >>> pooled = bags(ids, offsets)  # inserts 2 keys
        >>> path = os.path.join(tempfile.mkdtemp(), "item.frozen")
        >>> emblib.freeze(bags, path)
        >>> served = emblib.open_frozen(path)
        >>> torch.equal(served(ids, offsets), bags.eval()(ids, offsets))
        True
    """
    if isinstance(source, TableBatchedTTEmbeddingBags) and formats is None:
        cores = {f"core {k}": core.detach() for k, core in enumerate(source.cores)}
        frozen_file.write(path, _TRAINS_KIND, _trains_config(source), cores)
        return
    served = source if _is_read_only(source) and formats is None else for_inference(source, formats)
    if isinstance(served, InferenceCollection):
        kind, parts, content = _COLLECTION_KIND, [*served.parts], _collection_content(served)
    else:
        kind, parts, content = _ROWS_KIND, [served], _tables_content(served)
    is_composed = any(isinstance(part, ComposedEmbeddingBags) for part in parts)
    frozen_file.write(path, _COMPOSED_KINDS[kind] if is_composed else kind, *content)


def _is_read_only(source: Any) -> bool:
    return isinstance(source, ReadOnly | InferenceCollection)


def open_frozen(path: str | Path, *, verify: bool = True) -> Frozen:
    """Open the tables of a file by mapping it; rows, cores and indexes are not copied.

    The module looks up on the CPU; `.to(device)` copies it to a GPU. Processes that open one file
    share its pages. The file may be replaced or removed meanwhile, but its bytes must not change.
    Writes to the module, such as `load_state_dict`, change the process's copy alone.

    Args:
        path: path of a file that `freeze` wrote; "~" is the home directory.
        verify: whether to compare all checksums, which reads the whole file once.

    Returns:
        `QuantizedEmbeddingBags`, `InferenceEmbeddingBags` for tables with an index,
        `ComposedEmbeddingBags` for tables whose ids share rows, `TableBatchedTTEmbeddingBags` whose
        cores are frozen, or the collection for inference that `for_inference` made of a collection.

    Raises:
        ChecksumError: the file is truncated, or the header or a section that is checked is altered.
        OSError: the file cannot be read, or mapped.
        ValueError: the file does not begin as a frozen file, its version is another one, or its
            tables are of an unknown kind or storage.
        TypeError: `verify` is not a bool.

    Example:
        >>> import tempfile, os
        >>> path = os.path.join(tempfile.mkdtemp(), "tables.frozen")
        >>> emblib.freeze({"item": torch.ones(10, 4)}, path, "float16")
        >>> emblib.open_frozen(path)(torch.tensor([3, 9]), torch.tensor([0, 2]))
        tensor([[2., 2., 2., 2.]])
    """
    check_bool("verify", verify)
    content = frozen_file.read(path, verify=verify)
    with torch.device("cpu"):  # whatever torch's default device is
        if content.kind == _TRAINS_KIND:
            return _open_trains(content.config, content.tensors)
        if content.kind in (_COLLECTION_KIND, _COMPOSED_KINDS[_COLLECTION_KIND]):
            return _open_collection(content.config, content.tensors)
        if content.kind in (_ROWS_KIND, _COMPOSED_KINDS[_ROWS_KIND]):
            return _open_tables(content.config, content.tensors)
    raise ValueError(f"{path} has tables of an unknown kind, {content.kind!r}")


# Headers in JSON: enums are their values (`IndexKind` its name), dtypes their names.


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _options_to_json(module: Any) -> dict[str, Any]:
    """Return the lookup options of a module as JSON values; `_options_from_json` inverts it."""
    return {
        "pooling": module.pooling.value,
        "feature_tables": list(module.feature_tables),
        "bounds_check": module.bounds_check.value,
        "include_last_offset": module.include_last_offset,
    }


def _options_from_json(config: dict[str, Any]) -> dict[str, Any]:
    """Return the constructor's arguments for the result of `_options_to_json`."""
    return {
        "pooling": Pooling(config["pooling"]),
        "feature_tables": config["feature_tables"],
        "bounds_check": BoundsCheck(config["bounds_check"]),
        "include_last_offset": config["include_last_offset"],
    }


def _tables_content(tables: ReadOnly, prefix: str = "") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return `config` and the sections of tables; `prefix` begins the names of the sections."""
    if isinstance(tables, ComposedEmbeddingBags):
        return _composed_config(tables), {f"{prefix}rows": tables.rows.packed}
    rows = tables.rows if isinstance(tables, InferenceEmbeddingBags) else tables
    indexes: list[dict[str, Any] | None] = [None] * len(rows.tables)
    tensors = {f"{prefix}rows": rows.packed}
    if isinstance(tables, InferenceEmbeddingBags):
        indexes = [_index_config(index) for index in tables.indexes]
        tensors[f"{prefix}index"] = tables.index
    config = {**_rows_config(rows), "indexes": indexes}
    return config, tensors


def _open_tables(config: dict[str, Any], tensors: dict[str, Tensor], prefix: str = "") -> ReadOnly:
    """Return the tables of a file, with their indexes if they have any."""
    if "storages" in config:
        return _open_composed(config, tensors[f"{prefix}rows"])
    rows = _open_rows(config, tensors[f"{prefix}rows"])
    index_memory = tensors.get(f"{prefix}index")
    if index_memory is None:
        return rows
    indexes = _open_indexes(config["indexes"], index_memory)
    return InferenceEmbeddingBags(rows, indexes, index_memory)


def _collection_content(
    collection: InferenceCollection,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return `config` and the sections of a collection: those of its parts, numbered."""
    tensors: dict[str, Tensor] = {}
    parts = []
    for part_index, part in enumerate(collection.parts):
        any_part: Any = part
        if not isinstance(part, ReadOnly):
            raise TypeError(
                f"part {part_index} of the collection is {type(part).__name__}, a file has tables "
                "as for_inference makes them"
            )
        tables, sections = _tables_content(any_part, _section_prefix(part_index))
        parts.append({"tables": tables, "positions": collection.positions[part_index]})
        tensors |= sections
    config: dict[str, Any] = {
        "features": [list(feature) for feature in collection.features],
        "parts": parts,
    }
    if isinstance(collection, InferenceEmbeddingBagCollection):
        config["is_weighted"] = collection.is_weighted
    elif isinstance(collection, InferenceEmbeddingCollection):
        config["need_indices"] = collection.need_indices
    return config, tensors


def _open_collection(
    config: dict[str, Any], tensors: dict[str, Tensor]
) -> InferenceEmbeddingBagCollection | InferenceEmbeddingCollection:
    """Return the collection that a configuration describes."""
    features = [ServedFeature(*feature) for feature in config["features"]]
    parts = [
        (_open_tables(part["tables"], tensors, _section_prefix(part_index)), part["positions"])
        for part_index, part in enumerate(config["parts"])
    ]
    if "is_weighted" in config:
        bags = InferenceEmbeddingBagCollection(features, parts)
        bags.is_weighted = config["is_weighted"]
        return bags
    sequences = InferenceEmbeddingCollection(features, parts)
    sequences.need_indices = config["need_indices"]
    return sequences


def _section_prefix(part: int) -> str:
    return f"part {part} "


def _rows_config(rows: QuantizedEmbeddingBags) -> dict[str, Any]:
    """Return what `_open_rows` needs to make the module again, as JSON values."""
    config = {
        **_options_to_json(rows),
        "tables": [[spec.rows, spec.dim, spec.name] for spec in rows.tables],
        "formats": [format.value for format in rows.formats],
        "output_dtype": _dtype_name(rows.output_dtype),
    }
    return {**config, "log_runs": list(rows.log_runs)} if rows.log_runs else config


def _open_rows(config: dict[str, Any], packed: Tensor) -> QuantizedEmbeddingBags:
    """Return quantised tables whose memory is `packed`, uint8 `[n]`."""
    rows = QuantizedEmbeddingBags(
        [TableSpec(*table) for table in config["tables"]],
        formats=[RowFormat(format) for format in config["formats"]],
        output_dtype=getattr(torch, config["output_dtype"]),
        device="meta",
        **_options_from_json(config),
    )
    rows.use_memory(packed)
    rows.log_runs = tuple(config.get("log_runs", ()))
    return rows


def _composed_config(composed: ComposedEmbeddingBags) -> dict[str, Any]:
    """Return what `_open_composed` needs to make the module again, as JSON values."""
    storages: Any = composed.storages
    return {
        **_options_to_json(composed),
        "tables": [[spec.rows, spec.dim, spec.name] for spec in composed.tables],
        "storages": [[storage.plan_name, _storage_fields(storage)] for storage in storages],
        "rows": _rows_config(composed.rows),
        "output_dtype": _dtype_name(composed.output_dtype),
    }


def _open_composed(config: dict[str, Any], packed: Tensor) -> ComposedEmbeddingBags:
    """Return composed tables whose components are in `packed`, uint8 `[n]`."""
    options = _options_from_json(config)
    del options["include_last_offset"]  # always true of composed tables
    return ComposedEmbeddingBags(
        _open_rows(config["rows"], packed),
        [TableSpec(*table) for table in config["tables"]],
        [_open_storage(*storage) for storage in config["storages"]],
        output_dtype=getattr(torch, config["output_dtype"]),
        **options,
    )


def _storage_fields(storage: Any) -> dict[str, Any]:
    fields = asdict(storage).items()
    return {name: value.value if isinstance(value, OptionEnum) else value for name, value in fields}


def _open_storage(name: str, fields: Mapping[str, Any]) -> Any:
    """Return the storage that a file describes."""
    if name not in kinds():
        raise ValueError(
            f"the file has tables of the storage {name!r}, which is not registered: import the "
            "module that registers it, see emblib.storage.register"
        )
    return kinds()[name].from_plan(fields)


def _index_config(index: RowIndex | None) -> dict[str, Any] | None:
    """Return an index as JSON values, its entries as their number; None for no index."""
    if index is None:
        return None
    config = {name: value for name, value in vars(index).items() if name != "entries"}
    if not index.fallback:  # earlier versions refuse the field
        del config["fallback"]
    return {**config, "kind": index.kind.name, "entries": index.entries.numel()}


def _open_indexes(configs: list[dict[str, Any] | None], memory: Tensor) -> list[RowIndex | None]:
    """Return the indexes of tables; their entries follow one another in `memory`."""
    indexes: list[RowIndex | None] = []
    begin = 0
    for config in configs:
        if config is None:
            indexes.append(None)
            continue
        end = begin + config["entries"]
        kind = IndexKind[config["kind"]]
        indexes.append(RowIndex(**{**config, "kind": kind, "entries": memory[begin:end]}))
        begin = end
    return indexes


def _trains_config(trains: TableBatchedTTEmbeddingBags) -> dict[str, Any]:
    """Return what `_open_trains` needs to make the module again, as JSON values."""
    precision = trains.precision
    return {
        **_options_to_json(trains),
        "tables": [{**asdict(spec), "ids": spec.ids.value} for spec in trains.tables],
        "weights": _dtype_name(precision.weights),
        "output_dtype": _dtype_name(precision.output),
        "matmul": precision.matmul.value,
    }


def _open_trains(config: dict[str, Any], tensors: dict[str, Tensor]) -> TableBatchedTTEmbeddingBags:
    """Return tensor-train tables whose cores are `tensors`, without gradients."""
    specs = [TTSpec(**_spec_fields(table)) for table in config["tables"]]
    precision = Precision(
        weights=getattr(torch, config["weights"]),
        output=getattr(torch, config["output_dtype"]),
        matmul=MatmulPrecision(config["matmul"]),
    )
    trains = TableBatchedTTEmbeddingBags(
        specs, precision=precision, device="meta", **_options_from_json(config)
    )
    trains.to_empty(device="cpu")  # draws no values, and touches no memory of the cores
    for k, core in enumerate(trains.cores):
        core.data = tensors[f"core {k}"]
    return trains.requires_grad_(False).eval()


def _spec_fields(table: dict[str, Any]) -> dict[str, Any]:
    lists = {name: tuple(value) for name, value in table.items() if isinstance(value, list)}
    return {**table, **lists, "ids": IdOrder(table["ids"])}
