"""Collections in TorchScript, and TorchRec's tracer.

TorchScript can compile neither `KeyedJaggedTensor` nor the tables. `torch.jit.script` calls
`__prepare_scriptable__` of each collection of `emblib.compat.torchrec`, and compiles the result
instead: `ScriptableBags` or `ScriptableVectors`, which look up in the same memory.

`register_classes` registers classes that TorchScript compiles instead of emblib's jagged tensors,
and functions that it compiles instead of their static methods. Scripted code can then receive,
create and return jagged tensors.

A C++ program must load `libemblib_cpu.so` before it loads the model. Only one thread of a process
may trace at a time.
"""

# No `from __future__ import annotations`: TorchScript evaluates the annotations.

import typing
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar, List  # noqa: UP035

import torch
from torch import Tensor, _jit_internal, nn
from torch.nn import functional

from emblib import Pooling, jagged
from emblib import collections as emblib_collections
from emblib.compat.checks import check_names
from emblib.compat.fbgemm_inference import ScriptableLookup
from emblib.compat.torchrec_types import DataType, data_type_to_dtype
from emblib.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from emblib.jagged.keyed_jagged_tensor import empty_batch_like
from emblib.jagged.keyed_tensor import regroup, regroup_by_name
from emblib.ops.autograd import updates_in_backward
from emblib.sharding.checkpoints.saved_tables import StateOfTables
from emblib.storage.dense import DenseModule


def _lengths_of(lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    if lengths is not None:
        return lengths
    assert offsets is not None
    return offsets.diff()


def _offsets_of(lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    if offsets is not None:
        return offsets
    assert lengths is not None
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _pad(
    values: Tensor, lengths: Tensor, offsets: Tensor, num_columns: int | None, padding: float
) -> Tensor:
    if num_columns is None:
        num_columns = int(lengths.max()) if lengths.numel() > 0 else 0
    columns = torch.arange(num_columns, device=values.device)
    is_value = columns < lengths.unsqueeze(1)
    positions = offsets[:-1].unsqueeze(1) + columns
    padded = values.new_full([lengths.numel(), num_columns] + list(values.shape[1:]), padding)  # noqa: RUF005 (TorchScript)
    padded[is_value] = values[positions[is_value]]
    return padded


def _moved(tensor: Tensor | None, device: torch.device, *, non_blocking: bool) -> Tensor | None:
    return None if tensor is None else tensor.to(device, non_blocking=non_blocking)


# If an attribute is None at first, TorchScript takes its type from the return type of a function.
def _no_list_yet() -> list[int] | None:
    return None


def _no_index_yet() -> dict[str, int] | None:
    return None


class ScriptJaggedTensor:
    """Class that TorchScript compiles instead of `JaggedTensor`, with the same attributes."""

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

    values, weights_or_none = JaggedTensor.values, JaggedTensor.weights_or_none
    lengths_or_none, offsets_or_none = JaggedTensor.lengths_or_none, JaggedTensor.offsets_or_none
    device = JaggedTensor.device

    def weights(self) -> Tensor:
        """Return the weights."""
        weights = self._weights
        assert weights is not None
        return weights

    def lengths(self) -> Tensor:
        """Return the lengths of the bags."""
        return _lengths_of(self._lengths, self._offsets)

    def offsets(self) -> Tensor:
        """Return the first value of each bag, and the number of values, `[bags + 1]`."""
        return _offsets_of(self._lengths, self._offsets)

    def to_dense(self) -> list[Tensor]:
        """Return the values of each bag."""
        lengths: list[int] = self.lengths().tolist()
        return list(self._values.split(lengths))

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """Return the values `[B, N, ...]`, each bag cut or padded to N = `desired_length`."""
        return _pad(self._values, self.lengths(), self.offsets(), desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """Return the weights as `to_padded_dense` returns the values; None without weights."""
        weights = self._weights
        if weights is None:
            return None
        return _pad(weights, self.lengths(), self.offsets(), desired_length, padding_value)

    def to(self, device: torch.device, non_blocking: bool = False) -> JaggedTensor:
        """Return the bags on `device`."""
        return JaggedTensor(
            self._values.to(device, non_blocking=non_blocking),
            _moved(self._weights, device, non_blocking=non_blocking),
            _moved(self._lengths, device, non_blocking=non_blocking),
            _moved(self._offsets, device, non_blocking=non_blocking),
        )


class ScriptKeyedJaggedTensor:
    """Class that TorchScript compiles instead of `KeyedJaggedTensor`, with the same attributes.

    All features must have the same batch size.
    """

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: list[list[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
        length_per_key: list[int] | None = None,
    ) -> None:
        self._stride_per_key_per_rank = stride_per_key_per_rank
        self._inverse = inverse_indices
        self._length_per_key = length_per_key
        self._offset_per_key = _no_list_yet()
        self._stride_per_key = _no_list_yet()
        self._index_per_key = _no_index_yet()
        self._keys = keys
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        num_bags = _lengths_of(lengths, offsets).numel()
        self._stride: int = num_bags // max(len(keys), 1) if stride is None else stride

    keys, values = KeyedJaggedTensor.keys, KeyedJaggedTensor.values
    weights_or_none, stride = KeyedJaggedTensor.weights_or_none, KeyedJaggedTensor.stride
    variable_stride_per_key = KeyedJaggedTensor.variable_stride_per_key

    weights = ScriptJaggedTensor.weights
    lengths, offsets = ScriptJaggedTensor.lengths, ScriptJaggedTensor.offsets
    lengths_or_none = KeyedJaggedTensor.lengths_or_none
    offsets_or_none, device = KeyedJaggedTensor.offsets_or_none, KeyedJaggedTensor.device

    def sync(self) -> "KeyedJaggedTensor":
        """Return self; methods compute sizes when they are called."""
        return self  # type: ignore[return-value]

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return the bags per feature and rank; empty if all features have `stride()` bags."""
        no_strides: list[list[int]] = []
        strides = self._stride_per_key_per_rank
        return no_strides if strides is None else strides

    def offset_per_key(self) -> list[int]:
        """Return the position of the first value of each feature, and the number of values."""
        offsets = self.offsets()  # type: ignore[misc]
        return [int(offsets[i * self._stride]) for i in range(len(self._keys) + 1)]

    def length_per_key(self) -> list[int]:
        """Return the number of values of each feature."""
        offsets = self.offset_per_key()
        return [offsets[i + 1] - offsets[i] for i in range(len(self._keys))]

    def split(self, segments: list[int]) -> List["KeyedJaggedTensor"]:  # noqa: UP006
        """Return a batch for each entry of `segments`, the number of consecutive features in it."""
        lengths = self.lengths()  # type: ignore[misc]
        offsets, weights = self.offset_per_key(), self._weights
        batches = [self]  # TorchScript cannot annotate an empty list of this class
        first_feature = 0
        for num_features in segments:
            end_feature = first_feature + num_features
            batches.append(
                KeyedJaggedTensor(  # type: ignore[arg-type]
                    self._keys[first_feature:end_feature],
                    self._values[offsets[first_feature] : offsets[end_feature]],
                    None
                    if weights is None
                    else weights[offsets[first_feature] : offsets[end_feature]],
                    lengths[first_feature * self._stride : end_feature * self._stride],
                    None,
                    self._stride,
                    None,
                    None,
                    length_per_key=None,
                )
            )
            first_feature = end_feature
        return batches[1:]  # type: ignore[return-value]

    def to(self, device: torch.device, non_blocking: bool = False) -> "KeyedJaggedTensor":
        """Return the batch on `device`."""
        return KeyedJaggedTensor(
            self._keys,
            self._values.to(device, non_blocking=non_blocking),
            _moved(self._weights, device, non_blocking=non_blocking),
            _moved(self._lengths, device, non_blocking=non_blocking),
            _moved(self._offsets, device, non_blocking=non_blocking),
            self._stride,
            self._stride_per_key_per_rank,
            self._inverse,
            length_per_key=self._length_per_key,
        )

    def permute(
        self, indices: list[int], indices_tensor: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """Return the features at these positions, in this order."""
        parts = self.split([1] * len(self._keys))
        chosen = [parts[index] for index in indices]
        keys = [self._keys[index] for index in indices]
        values = torch.cat([self._values[:0]] + [part.values() for part in chosen])
        lengths = torch.cat([self.lengths()[:0]] + [part.lengths() for part in chosen])  # type: ignore[misc]
        weights = self._weights
        if weights is not None:
            weights = torch.cat([weights[:0]] + [part.weights() for part in chosen])
        return KeyedJaggedTensor(
            keys, values, weights, lengths, None, self._stride, None, None, length_per_key=None
        )

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Return the bags of each feature."""
        features: dict[str, JaggedTensor] = {}
        for feature_batch in self.split([1] * len(self._keys)):
            features[feature_batch.keys()[0]] = JaggedTensor(
                feature_batch.values(),
                feature_batch.weights_or_none(),
                feature_batch.lengths(),
                None,
            )
        return features

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return the bags of `key`."""
        return self.to_dict()[key]


class ScriptKeyedTensor:
    """Class that TorchScript compiles instead of `KeyedTensor`, with the same attributes."""

    def __init__(self, keys: list[str], length_per_key: list[int], values: Tensor) -> None:
        self._keys = keys
        self._length_per_key = length_per_key
        self._values = values
        self._key_dim = 1
        self._offset_per_key = _no_list_yet()
        self._index_per_key = _no_index_yet()

    keys, values = KeyedTensor.keys, KeyedTensor.values
    length_per_key = KeyedTensor.length_per_key

    def to(self, device: torch.device, non_blocking: bool = False) -> "KeyedTensor":
        """Return the tensor on `device`."""
        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, values)

    def offset_per_key(self) -> list[int]:
        """Return the first column of each block, and the number of columns."""
        return [sum(self._length_per_key[:n]) for n in range(len(self._keys) + 1)]

    def __getitem__(self, key: str) -> Tensor:
        """Return the block of `key`."""
        index = self._keys.index(key)
        first_column = sum(self._length_per_key[:index])
        return self._values[:, first_column : first_column + self._length_per_key[index]]

    def to_dict(self) -> dict[str, Tensor]:
        """Return the block of each key."""
        blocks: dict[str, Tensor] = {}
        first_column = 0
        for index, key in enumerate(self._keys):
            end_column = first_column + self._length_per_key[index]
            blocks[key] = self._values[:, first_column:end_column]
            first_column = end_column
        return blocks


# Functions that TorchScript compiles instead of static methods, with the same arguments


def empty_bags(
    is_weighted: bool = False,
    device: torch.device | None = None,
    values_dtype: torch.dtype | None = None,
    weights_dtype: torch.dtype | None = None,
    lengths_dtype: torch.dtype = torch.int32,
) -> JaggedTensor:
    """Return a jagged tensor without bags, as `JaggedTensor.empty` does."""
    weights: Tensor | None = None
    if is_weighted:
        weights = torch.empty([0], dtype=weights_dtype, device=device)
    values = torch.empty([0], dtype=values_dtype, device=device)
    lengths = torch.empty([0], dtype=lengths_dtype, device=device)
    return JaggedTensor(values, weights, lengths, None)


def empty_batch(
    is_weighted: bool = False,
    device: torch.device | None = None,
    values_dtype: torch.dtype | None = None,
    weights_dtype: torch.dtype | None = None,
    lengths_dtype: torch.dtype = torch.int32,
) -> KeyedJaggedTensor:
    """Return a batch without features, as `KeyedJaggedTensor.empty` does."""
    bags = empty_bags(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
    keys: list[str] = []
    return KeyedJaggedTensor(keys, bags.values(), bags.weights_or_none(), bags.lengths(), None)


def _empty_like(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    weights, keys = kjt.weights_or_none(), kjt.keys()[:0]
    return KeyedJaggedTensor(
        keys,
        kjt.values().new_empty([0]),
        None if weights is None else weights.new_empty([0]),
        kjt.lengths().new_empty([0]),
        None,
        kjt.stride(),
    )


def _from_lengths(
    keys: list[str],
    values: Tensor,
    lengths: Tensor,
    weights: Tensor | None = None,
    stride: int | None = None,
    stride_per_key_per_rank: list[list[int]] | None = None,
) -> KeyedJaggedTensor:
    strides = stride_per_key_per_rank
    return KeyedJaggedTensor(keys, values, weights, lengths, None, stride, strides)


def _from_offsets(
    keys: list[str],
    values: Tensor,
    offsets: Tensor,
    weights: Tensor | None = None,
    stride: int | None = None,
    stride_per_key_per_rank: list[list[int]] | None = None,
) -> KeyedJaggedTensor:
    strides = stride_per_key_per_rank
    return KeyedJaggedTensor(keys, values, weights, None, offsets, stride, strides)


def _regroup(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    blocks: dict[str, Tensor] = {}
    for tensor in keyed_tensors:
        blocks.update(tensor.to_dict())
    return [torch.cat([blocks[name] for name in group], 1) for group in groups]


def _regroup_as_dict(
    keyed_tensors: list[KeyedTensor], groups: list[list[str]], keys: list[str]
) -> dict[str, Tensor]:
    values_by_key: dict[str, Tensor] = {}
    for key, values in zip(keys, _regroup(keyed_tensors, groups)):  # noqa: B905 (TorchScript)
        values_by_key[key] = values
    return values_by_key


# Pairs: a static method or function, and the function that TorchScript compiles instead.
_FUNCTIONS: tuple[tuple[Any, Any], ...] = (
    (JaggedTensor.empty, empty_bags),
    (KeyedJaggedTensor.empty, empty_batch),
    (KeyedJaggedTensor.empty_like, _empty_like),
    (empty_batch_like, _empty_like),
    (KeyedJaggedTensor.from_lengths_sync, _from_lengths),
    (KeyedJaggedTensor.from_offsets_sync, _from_offsets),
    (KeyedTensor.regroup, _regroup),
    (KeyedTensor.regroup_as_dict, _regroup_as_dict),
    (regroup, _regroup),
    (regroup_by_name, _regroup_as_dict),
)


@cache
def register_classes() -> None:
    """Make TorchScript compile the classes and functions above instead of emblib's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole
        for emblib_class, script_class in (
            (JaggedTensor, ScriptJaggedTensor),
            (KeyedJaggedTensor, ScriptKeyedJaggedTensor),
            (KeyedTensor, ScriptKeyedTensor),
        ):
            compiled = torch._C._jit_script_class_compile(  # noqa: SLF001 (a module of torch)
                _jit_internal._qualified_name(emblib_class),  # noqa: SLF001 (a module of torch)
                torch.jit.frontend.get_jit_class_def(script_class, emblib_class.__name__),
                torch.jit.frontend.get_default_args_for_class(script_class),
                _jit_internal.createResolutionCallbackForClassMethods(script_class),
            )
            torch.jit._state._add_script_class(emblib_class, compiled)  # noqa: SLF001 (a module of torch)
        for function, script_function in _FUNCTIONS:
            compiled = torch.jit.script(script_function)
            torch.jit._state._set_jit_function_cache(function, compiled)  # noqa: SLF001


class ScriptableTable(nn.Module):
    """Lookups in a dense table with operators of PyTorch; the module shares its parameter.

    If backward updates the table, lookups need `torch.no_grad()`.

    Args:
        handle: handle of the table, from `handles()` of a collection.
        pooled: whether `forward` returns the sums of bags, not a row per id.
    """

    def __init__(self, handle: Any, *, pooled: bool) -> None:
        super().__init__()
        self.weight, self.is_pooled = handle.weight, pooled
        self.updates_in_backward = updates_in_backward(handle.module.optimizer)

    def forward(self, indices: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return sums of bags `[bags, D]`, or a row per id `[L, D]`, float32.

        Args:
            indices: int32 or int64 `[L]`.
            offsets: `[bags + 1]`.
            weights: factors of the rows in sums, `[L]`; None for ones.

        Raises:
            RuntimeError: gradients are enabled, and backward updates the table.
        """
        if self.updates_in_backward and torch.is_grad_enabled():
            raise RuntimeError("backward updates the tables: TorchScript needs torch.no_grad()")
        if not self.is_pooled:
            return functional.embedding(indices, self.weight).float()
        sample_weights = None if weights is None else weights.to(self.weight.dtype)
        return functional.embedding_bag(
            indices,
            self.weight,
            offsets,
            mode="sum",
            per_sample_weights=sample_weights,
            include_last_offset=True,
        ).float()


class ScriptableBags(nn.Module):
    """Module that TorchScript compiles instead of an embedding bag collection.

    It shares the memory of the collection. A *read* is the lookup of one feature in one table.
    Reads are numbered in the order of the configurations. A kernel does one or more reads in one
    call, with their ids concatenated. The *kernel order* is the order in which the kernels, one
    after another, return the outputs of reads.

    Attributes:
        kernels: modules that look up, one per group of quantised tables or per read of a dense
            table.
        features_of_kernels: feature of each read of each kernel.
        kernel_positions: position of each read in the kernel order.
        dims: number of columns of each read.
        dims_in_kernel_order: the same in the kernel order.
        read_features: feature of each read.
        output_names: name of the output of each read: the feature, or `feature@table` if several
            tables read it.
        is_mean_of_sum: whether the output of a read is a sum that must be divided by the length of
            the bag, in the kernel order.
        is_pooled: whether outputs are pooled bags, not rows of ids.
        is_weighted: whether batches must have weights, the factors of rows in sums.
        need_indices: whether results have the ids as weights (`EmbeddingCollection`).

    Raises:
        TypeError: a table is neither quantised nor dense, or it is cached.
    """

    _RETURNS_BAGS: ClassVar[bool] = True

    def __init__(self, collection: Any) -> None:
        super().__init__()
        self.is_pooled = self._RETURNS_BAGS
        groups, configs, handles = collection.groups, collection.configs, collection.handles()
        reads = [(config, feature) for config in configs for feature in config.feature_names]
        features = [feature for _, feature in reads]
        kernels: list[nn.Module] = []
        reads_of_kernel: list[list[int]] = []
        for group in groups.active:
            if hasattr(group.module, "packed"):
                kernels.append(ScriptableLookup(group.module))
                reads_of_kernel.append(list(group.units))
            elif isinstance(group.module, DenseModule) and group.module.row_cache is None:
                for read in group.units:
                    handle = handles[reads[read][0].name]
                    kernels.append(ScriptableTable(handle, pooled=self.is_pooled))
                    reads_of_kernel.append([read])
            else:
                raise TypeError(
                    "TorchScript compiles collections of quantised tables, or of plain tables in "
                    f"one memory; this collection has a {type(group.module).__name__}: export it "
                    "with torch.export, or quantise all tables"
                )
        kernel_order = [read for kernel_reads in reads_of_kernel for read in kernel_reads]
        self.kernels = nn.ModuleList(kernels)
        self.features_of_kernels: list[list[str]] = [
            [features[read] for read in kernel_reads] for kernel_reads in reads_of_kernel
        ]
        self.kernel_positions: list[int] = [kernel_order.index(read) for read in range(len(reads))]
        self.dims: list[int] = [config.embedding_dim for config, _ in reads]
        self.dims_in_kernel_order: list[int] = [self.dims[read] for read in kernel_order]
        self.read_features: list[str] = features
        self.output_names: list[str] = [
            feature if features.count(feature) == 1 else f"{feature}@{config.name}"
            for config, feature in reads
        ]
        returns_sums = [
            isinstance(kernel, ScriptableTable) or groups.pooling is Pooling.SUM
            for kernel in kernels
        ]
        self.is_mean_of_sum: list[bool] = [
            self.is_pooled and is_sum and reads[read][0].pooling is Pooling.MEAN
            for is_sum, kernel_reads in zip(returns_sums, reads_of_kernel, strict=True)
            for read in kernel_reads
        ]
        self.is_weighted = self.is_pooled and bool(collection.is_weighted())
        self.need_indices = not self.is_pooled and bool(collection.need_indices())

    def look_up(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """Return the output of each read, `[B, D]`, or `[L, D]` without pooling.

        Raises:
            ValueError: features have different batch sizes, or weights are missing.
        """
        if features.variable_stride_per_key():
            raise ValueError("batches must have one batch size for all features in TorchScript")
        keys, stride = features.keys(), features.stride()
        lengths, offsets, values = features.lengths(), features.offsets(), features.values()
        weights = features.weights_or_none()
        if self.is_weighted and weights is None:
            raise ValueError("this collection is weighted, so batches must have weights")
        blocks: list[Tensor] = []
        for kernel_index, kernel in enumerate(self.kernels):
            read_ids: list[Tensor] = []
            read_lengths: list[Tensor] = []
            read_weights: list[Tensor] = []
            for key in self.features_of_kernels[kernel_index]:
                key_index = keys.index(key)
                start = int(offsets[key_index * stride])
                end = int(offsets[(key_index + 1) * stride])
                read_ids.append(values[start:end])
                read_lengths.append(lengths[key_index * stride : (key_index + 1) * stride])
                if self.is_weighted and weights is not None:
                    read_weights.append(weights[start:end].float())
            kernel_lengths = torch.cat(read_lengths)
            bag_offsets = torch.cat([kernel_lengths.new_zeros(1), kernel_lengths.cumsum(0)])
            indices = torch.cat(read_ids)
            kernel_weights: Tensor | None = torch.cat(read_weights) if self.is_weighted else None
            output = kernel(indices, bag_offsets.to(indices.dtype), kernel_weights)
            first_row, first_column = 0, 0
            for bag_lengths, ids in zip(read_lengths, read_ids):  # noqa: B905 (TorchScript)
                if not self.is_pooled:
                    blocks.append(output[first_row : first_row + ids.numel()])
                    first_row += ids.numel()
                    continue
                num_columns = self.dims_in_kernel_order[len(blocks)]
                block = output[:, first_column : first_column + num_columns]
                if self.is_mean_of_sum[len(blocks)]:
                    block = block / bag_lengths.clamp(min=1).unsqueeze(1)
                blocks.append(block)
                first_column += num_columns
        return [blocks[position] for position in self.kernel_positions]

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled rows of a batch, as the collection does.

        An invalid id of a dense table raises; in the collection its `bounds_check` decides.
        """
        return KeyedTensor(self.output_names, self.dims, torch.cat(self.look_up(features), 1))


class ScriptableVectors(ScriptableBags):
    """Module that TorchScript compiles instead of an embedding collection, see `ScriptableBags`."""

    _RETURNS_BAGS = False

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:  # type: ignore[override]
        """Return the rows of the ids of each read, by output name, as the collection does.

        Invalid ids have the effect that they have in `ScriptableBags.forward`.
        """
        vectors: dict[str, JaggedTensor] = {}
        for index, block in enumerate(self.look_up(features)):
            bags = features[self.read_features[index]]
            ids: Tensor | None = bags.values() if self.need_indices else None
            vectors[self.output_names[index]] = JaggedTensor(block, ids, bags.lengths(), None)
        return vectors


class ScriptableRegroup(nn.Module):
    """Module that TorchScript compiles instead of `KTRegroupAsDict`."""

    def __init__(self, groups: list[list[str]], keys: list[str], dtype: torch.dtype | None) -> None:
        super().__init__()
        self.groups: list[list[str]] = groups
        self.keys: list[str] = keys
        self.has_dtype = dtype is not None
        self.dtype: torch.dtype = torch.float32 if dtype is None else dtype

    def forward(self, keyed_tensors: list[KeyedTensor]) -> dict[str, Tensor]:
        """Return the concatenated blocks of each group, by the name of the group."""
        vectors = _regroup_as_dict(keyed_tensors, self.groups, self.keys)
        if self.has_dtype:
            for key in self.keys:
                vectors[key] = vectors[key].to(self.dtype)
        return vectors


class KTRegroupAsDict(jagged.KTRegroupAsDict):
    """`emblib.KTRegroupAsDict` with TorchRec's arguments.

    Args:
        groups: keys of each group.
        keys: name of each group.
        emb_dtype: data type of the results; None keeps that of the tensors.
        multi_device: ignored: the results are on the device of the tensors of a call.

    Raises:
        ValueError: `emb_dtype` is not a float type.
    """

    is_leaf_of_traces: ClassVar[bool] = True

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        keys: Sequence[str],
        emb_dtype: DataType | None = None,
        multi_device: bool = False,
    ) -> None:
        super().__init__(groups, keys)
        self._dtype = None if emb_dtype is None else data_type_to_dtype(emb_dtype)

    def forward(self, keyed_tensors: list[KeyedTensor]) -> dict[str, Tensor]:
        """Return the concatenated blocks of each group, by the name of the group."""
        vectors = super().forward(keyed_tensors)
        return {name: vectors[name].to(self._dtype) for name in vectors} if self._dtype else vectors

    def __prepare_scriptable__(self) -> nn.Module:
        return ScriptableRegroup(self.groups, self.keys, self._dtype)


def scriptable(collection: Any) -> nn.Module:
    """Return the module that TorchScript compiles instead of a collection.

    Raises:
        TypeError: a table is neither quantised nor dense, or it is cached.
    """
    is_pooled = isinstance(collection, emblib_collections.EmbeddingBagCollection)
    return (ScriptableBags if is_pooled else ScriptableVectors)(collection)


# Tracing

_tracing = {"depth": 0}  # number of running traces of `Tracer` in this process


def is_fx_tracing() -> bool:
    """Return whether a `Tracer` of this module is tracing."""
    return _tracing["depth"] > 0


class Tracer(torch.fx.Tracer):
    """Tracer of `torch.fx` that records a collection as one call, quantised and sharded ones, too.

    As in `torch.fx`, a module that is recorded as one call is a *leaf*. If a traced module returns
    an awaitable, the tracer waits for its result.

    Args:
        leaf_modules: names of further classes whose modules are leaves; None for no others.
    """

    def __init__(self, leaf_modules: list[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = check_names("leaf_modules", leaf_modules or ())

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether the graph has a call of module `m`, not the operations inside it."""
        is_named = type(m).__name__ in self._leaf_modules
        return (
            self.is_emblib_leaf(m) or is_named or super().is_leaf_module(m, module_qualified_name)
        )

    @staticmethod
    def is_emblib_leaf(m: nn.Module) -> bool:
        """Return whether `m` is a collection, or another module that is a leaf of every trace."""
        leaf_classes = (
            emblib_collections.EmbeddingBagCollection,
            emblib_collections.EmbeddingCollection,
            StateOfTables,
        )
        return isinstance(m, leaf_classes) or getattr(m, "is_leaf_of_traces", False)

    def trace(
        self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None
    ) -> torch.fx.Graph:
        """Return the graph of a module or a function; of a wrapped model, that of the model inside.

        `concrete_args` are arguments that are constants of the graph, by name.
        """
        if getattr(root, "wraps_module", False):
            wrapper: Any = root
            root = wrapper.module
        _tracing["depth"] += 1
        try:
            graph = super().trace(root, concrete_args)
        finally:
            _tracing["depth"] -= 1
        _resolve_types(graph, root)
        return graph


class _LeafParent(nn.Module):
    """Root with a leaf as its only child: `torch.fx` would trace into a root that is a leaf."""

    def __init__(self, leaf: nn.Module) -> None:
        super().__init__()
        self.whole = leaf  # a name in state dicts of graph modules

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.whole(features)


def _resolve_types(graph: torch.fx.Graph, root: Any) -> None:
    """Evaluate types of nodes that are strings, because of `from __future__ import annotations`."""
    nodes = [node for node in graph.nodes if isinstance(node.type, str)]
    if not nodes:
        return
    function = root.forward if isinstance(root, nn.Module) else root
    try:
        types = typing.get_type_hints(function)
    except NameError:  # of names that only type checkers import
        types = {}
    for node in nodes:
        node.type = types.get("return" if node.op == "output" else str(node.target))


def symbolic_trace(
    root: nn.Module | Callable[..., Any],
    concrete_args: dict[str, Any] | None = None,
    leaf_modules: list[str] | None = None,
) -> torch.fx.GraphModule:
    """Return the graph module of a model, with its collections as leaves (`Tracer`).

    If the model is itself a collection, it is the child `whole` of the graph module. Arguments are
    those of `Tracer` and `Tracer.trace`.
    """
    tracer = Tracer(leaf_modules)
    if isinstance(root, nn.Module) and tracer.is_emblib_leaf(root):
        root = _LeafParent(root)
    graph = tracer.trace(root, concrete_args)
    model: Any = root.module if getattr(root, "wraps_module", False) else root  # type: ignore[union-attr]
    return torch.fx.GraphModule(model if isinstance(model, nn.Module) else nn.Module(), graph)
