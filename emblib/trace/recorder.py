"""The recorder: hooks on a model's embeddings that copy the ids of their calls.

A `CallReader` is a function of (name, module, args, kwargs) that extracts the bags of a call;
`_find_reader` selects it by the kind of module.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.dynamic import CachedTTEmbeddingBags, DynamicEmbeddingBags
from emblib.reference.tbe import repair_offsets
from emblib.specs import check_count
from emblib.tables import (
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableBatchedTTEmbeddingBags,
    TTEmbeddingBag,
)
from emblib.tables.graph_break import run_uncompiled
from emblib.tables.locks import ModuleLock
from emblib.tables.recomputation import is_recomputation
from emblib.trace.file import INTEGERS, LookupTrace, TracedFeature


class Bags(NamedTuple):
    """The lookups of one call for one feature.

    Attributes:
        feature: the feature.
        ids: integers, L in any shape, on any device; negative ones are left out of the trace.
        lengths: integers `[bags]`, ids per bag, with the sum L; on any device.
    """

    feature: TracedFeature
    ids: Tensor
    lengths: Tensor


_BATCHED = (
    TableBatchedEmbeddingBags,
    TableBatchedTTEmbeddingBags,
    CachedTTEmbeddingBags,
    DynamicEmbeddingBags,
    QuantizedEmbeddingBags,
)
CallReader = Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any]], list[Bags]]


class NamedEmbedding(NamedTuple):
    """An embedding of a model: its name in the trace, and the reader of its calls."""

    name: str
    module: nn.Module
    reader: CallReader


def find_embeddings(roots: Sequence[nn.Module]) -> list[NamedEmbedding]:
    """Return the outermost embeddings in the modules, each once, under its first name.

    A root without embeddings counts as an embedding that is called with a KeyedJaggedTensor.
    """
    embedding_by_module: dict[nn.Module, NamedEmbedding] = {}
    for root in roots:
        for embedding in _outermost_embeddings(root):
            embedding_by_module.setdefault(embedding.module, embedding)
    inner_modules = {
        inner for outer in embedding_by_module for inner in outer.modules() if inner is not outer
    }
    return [named for named in embedding_by_module.values() if named.module not in inner_modules]


def _outermost_embeddings(root: nn.Module) -> list[NamedEmbedding]:
    """Return the outermost embedding modules of a model; the model itself if it has none."""
    # A DistributedModelParallel has the names of the model inside it, as in state dicts.
    model: Any = root.module if getattr(root, "wraps_module", False) else root
    embeddings: list[NamedEmbedding] = []
    outer_paths: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer_path}.") or not outer_path for outer_path in outer_paths):
            continue
        reader = _find_reader(module)
        if reader is not None:
            embeddings.append(NamedEmbedding(path or type(model).__name__, module, reader))
            outer_paths.append(path)
    return embeddings or [NamedEmbedding(type(root).__name__, root, _read_keyed)]


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return distinct names: a repeated name gets its position appended, or a larger number."""
    used_names, new_names = set(names), []
    for position, name in enumerate(names):
        new_name, number = name, position
        while names.count(name) > 1 and new_name in used_names:
            new_name, number = f"{name}-{number}", number + 1
        used_names.add(new_name)
        new_names.append(new_name)
    return new_names


def _find_reader(module: nn.Module) -> CallReader | None:
    """Return the function that reads the lookups of a module's calls; None for other modules."""
    if isinstance(module, nn.EmbeddingBag):
        return _read_bag
    if isinstance(module, nn.Embedding):
        return _read_embedding
    if isinstance(module, TTEmbeddingBag):
        return _read_tensor_train
    if isinstance(module, _BATCHED) or _has_quantised_rows(module):
        return _read_batched
    if hasattr(module, "embedding_specs") and hasattr(module, "feature_table_map"):
        return _read_fbgemm
    return None if _configurations(module) is None else _read_keyed


def _has_quantised_rows(module: nn.Module) -> bool:
    """Return whether a module maps ids to the rows of a `QuantizedEmbeddingBags`.

    `InferenceEmbeddingBags`, with `indexes`, and `ComposedEmbeddingBags` do. They belong to a layer
    above this one, so they are recognised by their attributes.
    """
    return isinstance(getattr(module, "rows", None), QuantizedEmbeddingBags)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


def _first_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    return [_argument(args, kwargs, position, name) for position, name in enumerate(names)]


def _bags_of_one_length(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and lengths, int64 `[samples]`, of bags without offsets: one per sample."""
    if ids.is_nested:
        samples = [sample.reshape(-1) for sample in ids.unbind()]
        return torch.cat(samples), torch.tensor(list(map(len, samples)), device="cpu")
    num_samples = ids.size(0) if ids.dim() else 1
    return ids, torch.full(
        (num_samples,), ids.numel() // max(num_samples, 1), dtype=torch.int64, device="cpu"
    )


def _read_bag(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Bags]:
    """Return the bags of a call of `nn.EmbeddingBag`."""
    assert isinstance(module, nn.EmbeddingBag)
    ids, offsets = _first_arguments(args, kwargs, "input", "offsets")
    if offsets is None:
        ids, lengths = _bags_of_one_length(ids)
    else:
        bounds = offsets if module.include_last_offset else _append_offset(offsets, ids.numel())
        ids, lengths = ids[: int(bounds[-1])], bounds.diff()  # torch ignores ids after the last end
    if module.padding_idx is not None:
        ids = torch.where(ids == module.padding_idx, -1, ids)
    feature = TracedFeature(name, name, module.num_embeddings, module.embedding_dim)
    return [Bags(feature, ids, lengths)]


def _append_offset(offsets: Tensor, end: int) -> Tensor:
    """Return offsets with their last entry, the number of ids, appended."""
    return torch.cat([offsets, offsets.new_full((1,), end)])


def _read_embedding(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Bags]:
    """Return the ids of a call of `nn.Embedding`, one bag per element of dimension 0."""
    assert isinstance(module, nn.Embedding)
    ids = _argument(args, kwargs, 0, "input")
    feature = TracedFeature(name, name, module.num_embeddings, module.embedding_dim)
    return [Bags(feature, *_bags_of_one_length(ids))]


def _read_tensor_train(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Bags]:
    """Return the bags of a call of `TTEmbeddingBag`."""
    assert isinstance(module, TTEmbeddingBag)
    ids, offsets = _first_arguments(args, kwargs, "indices", "offsets")
    spec = module.spec
    feature = TracedFeature(name, spec.name or name, spec.rows, spec.dim)
    if offsets is None:
        return [Bags(feature, *_bags_of_one_length(ids))]
    if not module.include_last_offset:
        offsets = _append_offset(offsets, ids.numel())
    return [Bags(feature, *_ids_and_lengths(ids, offsets))]


def _read_batched(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Bags]:
    """Return the bags of a call of a table-batched module of emblib, feature by feature."""
    is_indexed = hasattr(module, "indexes")  # then there are more ids than rows
    bags: Any = module.rows if is_indexed else module
    features = []
    for feature, table_number in enumerate(bags.feature_tables):
        spec, table = bags.tables[table_number], f"{name}.{bags.table_names[table_number]}"
        features.append(
            TracedFeature(f"{name}.{feature}", table, 0 if is_indexed else spec.rows, spec.dim)
        )
    ids, offsets = _first_arguments(args, kwargs, "indices", "offsets")
    if offsets is None:  # bags of one length, in rows
        offsets = torch.arange(len(ids) + 1, device=ids.device) * (ids.numel() // max(len(ids), 1))
    elif not getattr(bags, "include_last_offset", True):
        offsets = _append_offset(offsets, ids.numel())
    return _bags_of_batch(features, ids.reshape(-1), offsets, kwargs.get("batch_sizes"))


def _read_fbgemm(
    name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Bags]:
    """Return the bags of a call of a table-batched module of FBGEMM, feature by feature."""
    features = []
    for feature, table in enumerate(module.feature_table_map):
        spec = module.embedding_specs[table]
        # Modules for inference have the name before the rows.
        rows_index = int(isinstance(spec[0], str))
        num_rows, dim = (int(number) for number in spec[rows_index : rows_index + 2])
        features.append(TracedFeature(f"{name}.{feature}", f"{name}.{table}", num_rows, dim))
    ids, offsets = _first_arguments(args, kwargs, "indices", "offsets")
    batch_sizes = _argument(args, kwargs, 4, "batch_size_per_feature_per_rank")
    return _bags_of_batch(features, ids, offsets, batch_sizes)


def _bags_of_batch(
    features: Sequence[TracedFeature],
    ids: Tensor,
    offsets: Tensor,
    batch_sizes: Sequence[Sequence[int]] | None,
) -> list[Bags]:
    """Return the bags of a call whose `ids` and `offsets` are ordered by feature.

    `batch_sizes` has the batch sizes of each feature, by rank; None for one size of all features.
    Invalid offsets are repaired as the modules repair them.
    """
    batch_size = (offsets.numel() - 1) // max(len(features), 1)
    bags_per_feature = (
        [sum(sizes) for sizes in batch_sizes]
        if batch_sizes is not None
        else [batch_size] * len(features)
    )
    return _split_by_feature(features, *_ids_and_lengths(ids, offsets), bags_per_feature)


def _ids_and_lengths(ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids from the first bag on, and the lengths of the bags of repaired offsets."""
    bounds = repair_offsets(offsets, ids.numel())
    return ids[int(bounds[0]) :], bounds.diff()


def _split_by_feature(
    features: Sequence[TracedFeature], ids: Tensor, lengths: Tensor, bags_per_feature: Sequence[int]
) -> list[Bags]:
    """Split the bags of a batch by feature."""
    lengths_by_feature = lengths.to("cpu", torch.int64).split(list(bags_per_feature))
    ids_by_feature = ids.split([int(part.sum()) for part in lengths_by_feature])
    return list(map(Bags, features, ids_by_feature, lengths_by_feature))


def _configurations(module: nn.Module) -> list[Any] | None:
    """Return the table configurations of a collection; None of another module.

    They are recognised by TorchRec's attribute names.
    """
    for attribute in ("embedding_bag_configs", "embedding_configs"):
        configs = getattr(module, attribute, None)
        if configs is not None:
            return list(configs() if callable(configs) else configs)
    return None


def _read_keyed(
    name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Bags]:
    """Return the bags of a call with a KeyedJaggedTensor, feature by feature.

    Raises:
        TypeError: the first argument is not a KeyedJaggedTensor.
    """
    jagged = args[0] if args else next(iter(kwargs.values()), None)
    methods = ("keys", "values", "lengths")
    if jagged is None or not all(hasattr(jagged, method) for method in methods):
        raise TypeError(
            f"{name} must be called with a KeyedJaggedTensor (keys(), values(), lengths()) to be "
            f"recorded, got {type(jagged).__name__}: pass the embeddings inside it to TraceRecorder"
        )
    keys, num_bags = list(jagged.keys()), jagged.lengths().numel()
    strides = getattr(jagged, "stride_per_key", None)
    bags_per_key = list(strides()) if strides else [num_bags // max(len(keys), 1)] * len(keys)
    features = [TracedFeature(f"{name}.{key}", f"{name}.{key}") for key in keys]
    ids, lengths = _ids_and_lengths(jagged.values(), _offsets_of(jagged))
    all_bags = _split_by_feature(features, ids, lengths, bags_per_key)
    configs = _configurations(module)
    if configs is None:
        return all_bags
    # A collection looks up a feature once per table that reads it, and ignores other features.
    num_tables_by_feature = Counter(
        feature for config in configs for feature in config.feature_names
    )
    bags_of_tables = []
    for (key, bags), config in product(zip(keys, all_bags, strict=True), configs):
        if key not in config.feature_names:
            continue
        suffix = f"@{config.name}" if num_tables_by_feature[key] > 1 else ""
        feature = TracedFeature(
            f"{name}.{key}{suffix}",
            f"{name}.{config.name}",
            config.num_embeddings,
            config.embedding_dim,
        )
        bags_of_tables.append(bags._replace(feature=feature))
    return bags_of_tables


def _offsets_of(jagged: Any) -> Tensor:
    """Return the offsets `[bags + 1]` of an object with `lengths()`, or with `offsets()` too.

    In a `CapturedStep` the first offset is not 0, but the number of padding ids.
    """
    if callable(getattr(jagged, "offsets", None)):
        offsets: Tensor = jagged.offsets()
        return offsets
    return nn.functional.pad(jagged.lengths().cumsum(0), (1, 0))


class TraceRecorder:
    """Record the lookups of every embedding in `modules` inside a `with` block.

    ```python
    with emblib.TraceRecorder(model) as recorder:
        for batch in loader:
            model(batch)
    recorder.save("lookups.pt")
    ```

    It records `nn.EmbeddingBag`, `nn.Embedding` (dimension 0 counts the samples), modules of tables
    and collections of emblib (of dynamic tables the keys), FBGEMM's modules (recognised by their
    attributes) and TorchRec's collections (by their configurations); of nested modules only the
    outermost. A module in `modules` that contains none of these must be called with a
    KeyedJaggedTensor, or an object with its `keys()`, `values()` and `lengths()`; other calls raise
    TypeError. The recorder leaves out negative ids, the `padding_idx` of an `nn.EmbeddingBag`, and
    forwards that activation checkpointing repeats. Ids are copied to the CPU, so the host waits for
    a GPU. Several threads may call the embeddings; the features of a call are recorded together.
    The block may be entered again, and adds to the trace.

    Args:
        modules: models, or embeddings themselves.
        calls: maximum number of calls to record per embedding and `with` block; 0 records all.

    Raises:
        ValueError: there is no module, or `calls` is negative.
        TypeError: an argument is not a module, or `calls` is not an int.
        RuntimeError: the block is entered inside itself.

    Example:
        >>> model = torch.nn.ModuleDict({"item": torch.nn.EmbeddingBag(1_000, 16)})
        >>> with emblib.TraceRecorder(model) as recorder:
        ...     pooled = model["item"](torch.tensor([[3, 1], [4, 1]]))
        >>> recorder.trace.features[0].name, recorder.trace.ids[0].tolist()
        ('item', [3, 1, 4, 1])
    """

    def __init__(self, *modules: nn.Module, calls: int = 0) -> None:
        if not modules:
            raise ValueError("modules must name at least one model or embedding, got none")
        calls = check_count("calls", calls, minimum=0)
        for module in modules:
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"modules must be nn.Modules, got {type(module).__name__}: "
                    "TraceRecorder(first, second) takes them one by one"
                )
        self._embeddings = find_embeddings(modules)
        self._names = distinct_names([embedding.name for embedding in self._embeddings])
        self._max_calls = calls
        self._recorded: dict[str, list[Bags]] = {}
        self._hooks: list[Any] = []
        self._lock = ModuleLock()  # held while the features of a call are recorded

    def __enter__(self) -> TraceRecorder:
        if self._hooks:
            raise RuntimeError("a recorder is entered once at a time; leave its `with` block first")
        try:
            for name, embedding in zip(self._names, self._embeddings, strict=True):
                hook = _Hook(name, embedding.reader, self._recorded, self._max_calls, self._lock)
                handle = embedding.module.register_forward_pre_hook(hook, with_kwargs=True)
                self._hooks.append(handle)
        except BaseException:
            self._remove_hooks()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        """Remove all hooks, also if an interrupt comes meanwhile: it is raised after that."""
        try:
            for hook in self._hooks:
                hook.remove()
        finally:
            for hook in self._hooks:  # a hook may be removed twice
                hook.remove()
            self._hooks.clear()

    @property
    def trace(self) -> LookupTrace:
        """Return the lookups recorded so far.

        Raises:
            ValueError: nothing was recorded.
        """
        with self._lock:
            calls_by_name = [list(calls) for calls in self._recorded.values()]
        if not calls_by_name:
            raise ValueError(
                f"nothing was recorded: run the model inside the `with` block; it calls "
                f"{', '.join(self._names)} there, unless it is compiled (record it uncompiled)"
            )
        return LookupTrace(
            tuple(calls[0].feature for calls in calls_by_name),
            tuple(
                _to_narrowest_dtype(torch.cat([bags.ids for bags in calls]))
                for calls in calls_by_name
            ),
            tuple(
                _to_narrowest_dtype(torch.cat([bags.lengths for bags in calls]))
                for calls in calls_by_name
            ),
        )

    def save(self, path: str | Path) -> str:
        """Write the lookups recorded so far; return the file's SHA-256, see `LookupTrace.save`.

        Raises:
            ValueError: nothing was recorded.
            OSError: the file could not be written.
        """
        return self.trace.save(path)


class _Hook:
    """Forward pre-hook that records the calls of one embedding; a copy of it does nothing."""

    def __init__(
        self,
        name: str,
        reader: CallReader,
        recorded: dict[str, list[Bags]],
        max_calls: int,
        lock: ModuleLock,
    ) -> None:
        self.name, self.reader, self.recorded, self.lock = name, reader, recorded, lock
        self.calls_left = max_calls or math.inf

    @run_uncompiled
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.calls_left <= 0 or is_recomputation():
            return
        recorded_bags = [
            _valid_lookups(bags) for bags in self.reader(self.name, module, args, kwargs)
        ]
        with self.lock:
            if self.calls_left <= 0:
                return
            self.calls_left -= 1
            for bags in recorded_bags:
                self.recorded.setdefault(bags.feature.name, []).append(bags)

    def __reduce__(self) -> tuple[type[_NoHook], tuple[()]]:
        return _NoHook, ()


class _NoHook:
    """Hook that does nothing; it replaces a `_Hook` in a copied or saved module."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pass


def _valid_lookups(bags: Bags) -> Bags:
    """Move a call's lookups to the CPU, without negative ids."""
    ids = bags.ids.detach().reshape(-1).to("cpu", torch.int64)
    lengths = bags.lengths.detach().reshape(-1).to("cpu", torch.int64)
    is_valid = ids >= 0
    if not bool(is_valid.all()):
        bag_of_lookup = torch.repeat_interleave(
            torch.arange(lengths.numel(), device="cpu"), lengths
        )
        lengths = torch.bincount(bag_of_lookup[is_valid], minlength=lengths.numel())
        ids = ids[is_valid]
    return Bags(
        bags.feature, _to_narrowest_dtype(ids).clone(), _to_narrowest_dtype(lengths).clone()
    )


def _to_narrowest_dtype(values: Tensor) -> Tensor:
    """Convert non-negative values to the narrowest of `INTEGERS` that holds them."""
    largest_value = int(values.max()) if values.numel() else 0
    return values.to(next(dtype for dtype in INTEGERS if largest_value <= torch.iinfo(dtype).max))
