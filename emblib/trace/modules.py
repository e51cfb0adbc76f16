"""Which modules look rows up, and how each kind says what: (name, module, args, kwargs) -> bags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.reference.tbe import repair_offsets
from emblib.tables import TableBatchedEmbeddingBags, TTEmbeddingBag
from emblib.trace.file import TracedFeature


class Bags(NamedTuple):
    """What one call looked up for one feature."""

    feature: TracedFeature
    ids: Tensor
    lengths: Tensor


Reading = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], list[Bags]]


Found = tuple[str, nn.Module, Reading]


def embeddings(roots: Sequence[nn.Module]) -> list[Found]:
    """The outermost embeddings in some modules, each once, under the name that it has first; a
    module that has none in it is one itself."""
    every: dict[int, Found] = {}
    for root in roots:
        for found in _outermost(root):
            every.setdefault(id(found[1]), found)
    within = {id(m) for _, outer, _ in every.values() for m in outer.modules() if m is not outer}
    return [found for key, found in every.items() if key not in within]


def _outermost(root: nn.Module) -> list[Found]:
    found: list[Found] = []
    inside: list[str] = []
    for path, module in root.named_modules():
        if any(path.startswith(f"{outer}.") or not outer for outer in inside):
            continue
        reading = _reading(module)
        if reading is not None:
            found.append((path or type(root).__name__, module, reading))
            inside.append(path)
    return found or [(type(root).__name__, root, _keyed)]


def distinct(names: Sequence[str]) -> list[str]:
    """Names with a number where they are not unique."""
    counts = {name: names.count(name) for name in names}
    return [f"{n}-{i}" if counts[n] > 1 else n for i, n in enumerate(names)]


def _reading(module: nn.Module) -> Reading | None:
    if isinstance(module, nn.EmbeddingBag):
        return _bag
    if isinstance(module, nn.Embedding):
        return _embedding
    if isinstance(module, TableBatchedEmbeddingBags):
        return _batched
    if isinstance(module, TTEmbeddingBag):
        return _tensor_train
    if hasattr(module, "embedding_specs") and hasattr(module, "feature_table_map"):
        return _fbgemm
    return _keyed if _configurations(module) else None


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _one_each(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and lengths where dimension 0 counts the samples, nested tensors' as well."""
    if ids.is_nested:
        rows = [row.reshape(-1) for row in ids.unbind()]
        return torch.cat(rows), torch.tensor([row.numel() for row in rows])
    samples = ids.size(0) if ids.dim() else 1
    return ids, torch.full((samples,), ids.numel() // max(samples, 1), dtype=torch.int64)


def _bag(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Bags]:
    assert isinstance(module, nn.EmbeddingBag)
    ids, offsets = (_argument(args, kwargs, i, n) for i, n in enumerate(("input", "offsets")))
    if offsets is None:
        ids, lengths = _one_each(ids)
    else:
        ends = offsets if module.include_last_offset else _with_end(offsets, ids.numel())
        ids, lengths = ids[: int(ends[-1])], ends.diff()  # torch ignores ids behind the last end
    if module.padding_idx is not None:
        ids = torch.where(ids == module.padding_idx, -1, ids)
    feature = TracedFeature(name, name, module.num_embeddings, module.embedding_dim)
    return [Bags(feature, ids, lengths)]


def _with_end(offsets: Tensor, end: int) -> Tensor:
    return torch.cat([offsets, offsets.new_full((1,), end)])


def _embedding(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Bags]:
    assert isinstance(module, nn.Embedding)
    ids = _argument(args, kwargs, 0, "input")
    feature = TracedFeature(name, name, module.num_embeddings, module.embedding_dim)
    return [Bags(feature, *_one_each(ids))]


def _tensor_train(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Bags]:
    assert isinstance(module, TTEmbeddingBag)
    ids, offsets = (_argument(args, kwargs, i, n) for i, n in enumerate(("indices", "offsets")))
    spec = module.spec
    feature = TracedFeature(name, spec.name or name, spec.rows, spec.dim)
    return [Bags(feature, ids, repair_offsets(offsets, ids.numel()).diff())]


def _batched(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Bags]:
    assert isinstance(module, TableBatchedEmbeddingBags)
    features = []
    for f, t in enumerate(module.feature_tables):
        spec, table = module.tables[t], f"{name}.{module.table_names[t]}"
        features.append(TracedFeature(f"{name}.{f}", table, spec.rows, spec.dim))
    sizes = kwargs.get("batch_sizes")
    return _feature_major(features, args, kwargs, sizes)


def _fbgemm(name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Bags]:
    features = []
    for f, t in enumerate(module.feature_table_map):
        rows, dim = (int(n) for n in module.embedding_specs[t][:2])
        features.append(TracedFeature(f"{name}.{f}", f"{name}.{t}", rows, dim))
    sizes = _argument(args, kwargs, 4, "batch_size_per_feature_per_rank")
    return _feature_major(features, args, kwargs, sizes)


def _feature_major(
    features: Sequence[TracedFeature],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sizes: Sequence[Sequence[int]] | None,
) -> list[Bags]:
    """Ids and offsets of all features in one call; `sizes` where their batches differ. Offsets that
    do not fit are taken as the modules take them."""
    ids, offsets = (_argument(args, kwargs, i, n) for i, n in enumerate(("indices", "offsets")))
    batch = (offsets.numel() - 1) // len(features)
    bags = [sum(s) for s in sizes] if sizes is not None else [batch] * len(features)
    return _split(features, ids, repair_offsets(offsets, ids.numel()).diff(), bags)


def _split(
    features: Sequence[TracedFeature], ids: Tensor, lengths: Tensor, bags: Sequence[int]
) -> list[Bags]:
    by_feature = lengths.to("cpu", torch.int64).split(list(bags))
    own = ids.split([int(part.sum()) for part in by_feature])
    return [Bags(*parts) for parts in zip(features, own, by_feature, strict=True)]


def _configurations(module: nn.Module) -> list[Any]:
    """What a collection says of its tables, by TorchRec's names for it."""
    for attribute in ("embedding_bag_configs", "embedding_configs"):
        found = getattr(module, attribute, None)
        if found is not None:
            return list(found() if callable(found) else found)
    return []


def _keyed(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Bags]:
    jagged = args[0] if args else next(iter(kwargs.values()), None)
    if jagged is None or not all(hasattr(jagged, n) for n in ("keys", "values", "lengths")):
        raise TypeError(
            f"{name} must be called with a KeyedJaggedTensor (keys(), values(), lengths()) to be "
            f"recorded, got {type(jagged).__name__}: pass the embeddings inside it to TraceRecorder"
        )
    tables = {f: c for c in _configurations(module) for f in c.feature_names}
    features = []
    for key in list(jagged.keys()):
        config = tables.get(key)
        rows, dim = (config.num_embeddings, config.embedding_dim) if config else (0, 0)
        table = config.name if config else key
        features.append(TracedFeature(f"{name}.{key}", f"{name}.{table}", rows, dim))
    lengths = jagged.lengths()
    strides = getattr(jagged, "stride_per_key", None)
    bags = list(strides()) if strides else [lengths.numel() // len(features)] * len(features)
    return _split(features, jagged.values(), lengths, bags)
