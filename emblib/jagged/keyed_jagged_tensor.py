"""`KeyedJaggedTensor`: the bags of several features, the sparse inputs of a recommender."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from emblib.jagged import convert
from emblib.jagged.jagged_tensor import (
    JaggedTensor,
    TracedClass,
    are_weights_of,
    as_normal_tensor,
    bags_text,
    check_content,
    check_int32_range,
    drop_first,
    flat_integers,
    keyed_text,
    missing_bags_error,
    num_padding,
    offset_count_error,
    refuse_dtype,
    running_sums,
    tensor_type_error,
    weights_error,
)
from emblib.jagged.keyed_layout import (
    InverseIndices,
    Strides,
    as_inverse_indices,
    bags_per_key,
    block_offsets,
    cached_strides,
    check_inverse,
    checked_lengths,
    concat_arguments,
    consecutive_blocks,
    dict_arguments,
    empty_arguments,
    first_position_of_keys,
    implied_stride,
    is_consecutive,
    keys_and_shape,
    list_of_keys,
    num_padding_of,
    refuse_stride,
    stride_lists,
)
from emblib.ops.route import gather_segments, is_captured, segments_at_end, take_or_fill
from emblib.specs.checks import check_bool, check_count

_INT64 = torch.int64

# Named types: TorchScript resolves the types within a class, and supports no nested unions.
_Tensors = tuple[Tensor, Tensor | None, Tensor]
_TensorMap = Callable[[Tensor], Tensor]


class KeyedJaggedTensor(metaclass=TracedClass):
    """The sparse inputs of a batch of B examples with F features: one bag of values per pair.

    Bags are ordered by feature. Usually every feature has B bags, and the bag of feature f and
    example b is `values[offsets[f * B + b]:offsets[f * B + b + 1]]`. B is called the stride. If
    features differ in their number of bags (variable batch sizes, e.g. because equal examples were
    merged), `stride_per_key_per_rank` has these numbers, and `inverse_indices` the bag of each
    example.

    `length_per_key` and other numbers on the host are read from the device once. Moved batches,
    splits and permutations have them too, except a permutation that a CUDA graph captures; pickled
    and deep copies, and `as_type`, read them again. The constructor does not copy tensors. After
    these numbers or the offsets were read, overwrite the lengths only with `copy_`.

    Args:
        keys: the name of each feature. A list is not copied: do not change it afterwards.
        values: `[L]` ids or `[L, ...]` rows of all bags, concatenated.
        weights: `[L, ...]`, an entry per value; None for a batch without weights.
        lengths: int32 or int64 `[F * B]`. One of lengths and offsets suffices; the other is
            computed on first use. Int32 only for L below 2^31.
        offsets: int32 or int64 `[F * B + 1]`, from 0 to L; contents are checked by `validate` only.
            A first offset above 0 is a number of padding ids, see docs/captured_steps.md.
        stride: batch size B. None computes it: the number of bags per key or, if that varies, the
            columns of the inverse indices, without these the largest number.
        stride_per_key_per_rank: number of bags per feature and rank, `[F][R]` on the host, if
            features differ in it.
        inverse_indices: keys and int64 `[F, B]`, the bag of each feature and example.
        length_per_key: number of values per feature, if the caller knows it, so that it is not read
            from the device. It is trusted; `validate` compares it with the lengths.
        cached: other fields that TorchRec's class caches, e.g. `stride_per_key`; they are derived
            from the other arguments.

    Raises:
        ValueError: lengths and offsets are missing, sizes do not match, `stride` is negative, or
            L >= 2^31 with int32.
        TypeError: values, weights, lengths or offsets are not tensors, lengths, offsets or `stride`
            are not integers, `inverse_indices` are not as above, or there is another argument.

    Example:
        >>> batch = emblib.KeyedJaggedTensor(  # 2 features of 2 samples: 4 bags
        ...     ["user", "item"], torch.tensor([7, 8, 3, 1, 4]), lengths=torch.tensor([1, 1, 3, 0])
        ... )
        >>> batch.stride(), batch.length_per_key()
        (2, [2, 3])
        >>> batch["item"].lengths()
        tensor([3, 0])
        >>> batch.permute([1])
        KeyedJaggedTensor(['item'], 2 bags each, [3] torch.int64, cpu)
    """

    __slots__ = (
        "__weakref__",
        "_index_per_key",
        "_inverse",
        "_keys",
        "_length_per_key",
        "_lengths",
        "_offset_per_key",
        "_offsets",
        "_stride",
        "_stride_per_key",
        "_stride_per_key_per_rank",
        "_values",
        "_weights",
    )

    # Runs in every step, so it reads as few attributes of tensors as possible.
    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides | None = None,
        inverse_indices: InverseIndices | None = None,
        *,
        length_per_key: Sequence[int] | None = None,
        **cached: Any,
    ) -> None:
        if cached:
            stride_per_key_per_rank = cached_strides(stride, stride_per_key_per_rank, **cached)
        self._keys = keys if type(keys) is list else list_of_keys(keys)
        if not isinstance(values, Tensor):
            raise tensor_type_error("values", values)
        if lengths is not None:
            if not isinstance(lengths, Tensor):
                raise tensor_type_error("lengths", lengths)
            if lengths.dtype is not _INT64 or lengths.dim() != 1:
                lengths = flat_integers(lengths, "lengths")
                check_int32_range(lengths, values.size(0), "lengths")
            num_bags = lengths.numel()
        elif offsets is None:
            raise missing_bags_error("a KeyedJaggedTensor")
        if offsets is not None:
            if not isinstance(offsets, Tensor):
                raise tensor_type_error("offsets", offsets)
            if offsets.dtype is not _INT64 or offsets.dim() != 1:
                offsets = flat_integers(offsets, "offsets")
                check_int32_range(offsets, values.size(0), "offsets")
            num_intervals = offsets.numel() - 1
            if num_intervals < 0 or (lengths is not None and num_intervals != num_bags):
                raise offset_count_error(offsets, lengths)
            num_bags = num_intervals
        if weights is not None and not are_weights_of(values, weights):
            raise weights_error(values, weights)
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._inverse = None if inverse_indices is None else as_inverse_indices(inverse_indices)
        self._stride_per_key_per_rank: list[list[int]] | None = None
        self._stride_per_key: list[int] | None = None
        self._index_per_key: dict[str, int] | None = None
        self._length_per_key: list[int] | None = None
        self._offset_per_key: list[int] | None = None
        if length_per_key is not None:
            self._length_per_key = checked_lengths(length_per_key, self._keys, values.size(0))
            self._offset_per_key = block_offsets(self._length_per_key)
        is_checked = stride is None or isinstance(stride, torch.SymInt)
        if not is_checked and (type(stride) is not int or stride < 0):
            stride = check_count("stride", stride, minimum=0)  # type: ignore[arg-type]
        if stride_per_key_per_rank is None:
            num_keys = len(self._keys)
            if stride is None:
                stride = num_bags // num_keys if num_keys else 0
            if stride * num_keys != num_bags:
                refuse_stride(stride, num_keys, num_bags)
            self._stride = stride
        else:
            self._set_strides(stride_lists(stride_per_key_per_rank), num_bags, stride)

    def _set_strides(self, strides: list[list[int]], num_bags: int, stride: int | None) -> None:
        """Set strides that may differ by feature; a `stride` of None is computed, see the class."""
        self._stride_per_key_per_rank = strides
        num_bags_of_keys = self._stride_per_key = bags_per_key(strides, len(self._keys), num_bags)
        self._stride = implied_stride(num_bags_of_keys, self._inverse) if stride is None else stride

    @classmethod
    def from_valid(
        cls,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int,
        inverse: InverseIndices | None = None,
        strides: list[list[int]] | None = None,
    ) -> "KeyedJaggedTensor":
        """Construct without checks; the caller must pass lengths, offsets, or both.

        `strides` is `stride_per_key_per_rank`; the lists are not copied.
        """
        batch = cls.__new__(cls)
        batch._keys = keys
        batch._values = values
        batch._weights = weights
        batch._lengths = lengths
        batch._offsets = offsets
        batch._inverse = inverse
        batch._stride = stride
        batch._stride_per_key_per_rank = strides
        batch._stride_per_key = None if strides is None else [sum(row) for row in strides]
        batch._index_per_key = batch._length_per_key = batch._offset_per_key = None
        return batch

    # Construction

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> "KeyedJaggedTensor":
        """Construct from lengths, and read `length_per_key` from the device."""
        layout = (stride, stride_per_key_per_rank, inverse_indices)
        return KeyedJaggedTensor(keys, values, weights, lengths, None, *layout).sync()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Strides | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> "KeyedJaggedTensor":
        """Construct from offsets, and read `length_per_key` from the device."""
        layout = (stride, stride_per_key_per_rank, inverse_indices)
        return KeyedJaggedTensor(keys, values, weights, None, offsets, *layout).sync()

    @staticmethod
    def from_jt_dict(
        jt_dict: Mapping[str, JaggedTensor], *, force_variable_stride: bool = False
    ) -> "KeyedJaggedTensor":
        """Construct from one JaggedTensor per feature; if they differ in bags, strides vary.

        Values are concatenated, so copied. Raises ValueError without features, or if only some of
        them have weights; TypeError unless the arguments are a dict of JaggedTensors and a bool.
        """
        arguments = dict_arguments(jt_dict, force_variable_stride=force_variable_stride)
        return KeyedJaggedTensor(**arguments)

    @staticmethod
    def from_nested(nested: Mapping[str, Tensor]) -> "KeyedJaggedTensor":
        """Copy a nested tensor `[B, j, ...]` per feature, see `JaggedTensor.from_nested`."""
        jagged_by_key = {key: JaggedTensor.from_nested(tensor) for key, tensor in nested.items()}
        return KeyedJaggedTensor.from_jt_dict(jagged_by_key)

    @staticmethod
    def adopt(other: Any) -> "KeyedJaggedTensor":
        """Convert an object with TorchRec's accessors, e.g. a torchrec.KeyedJaggedTensor.

        Tensors are not copied. A `KeyedJaggedTensor` of emblib is returned as it is.
        """
        if isinstance(other, KeyedJaggedTensor):
            return other
        return KeyedJaggedTensor(**convert.keyed_jagged_arguments(other))

    @staticmethod
    def concat(kjt_list: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """Combine the features of batches of the same examples; values are copied.

        Raises:
            TypeError: an entry of the list is not a batch.
            ValueError: there are no batches, only some of them have weights, or strides, numbers of
                ranks or inverse indices do not fit each other.
        """
        return concat_batches(kjt_list)

    @staticmethod
    def empty(
        *,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """Return a batch without features and values; None is torch's default dtype or device."""
        check_bool("is_weighted", is_weighted)
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        lengths = torch.empty(0, dtype=lengths_dtype, device=device)
        values = torch.empty(0, dtype=values_dtype, device=device)
        return KeyedJaggedTensor([], values, weights, lengths, stride=0)

    @staticmethod
    def empty_like(
        kjt: "KeyedJaggedTensor", device: torch.device | str | None = None
    ) -> "KeyedJaggedTensor":
        """Return a batch without features, with the dtypes and the stride of `kjt`.

        With a `device`, return its keys and uninitialised tensors of its sizes there, as a target
        for `copy_`. Raises TypeError if `kjt` is not a batch of TorchRec or emblib.
        """
        if device is None:
            return empty_batch_like(kjt)
        batch = KeyedJaggedTensor.adopt(kjt)
        return batch._map_tensors(lambda tensor: torch.empty_like(tensor, device=device))

    # Tensors

    def values(self) -> Tensor:
        """Return the values `[L, ...]`, feature after feature and bag after bag."""
        return self._values

    def weights(self) -> Tensor:
        """Return the weights `[L, ...]`; raise ValueError if there are none."""
        if self._weights is None:
            raise ValueError("this KeyedJaggedTensor has no weights: make it with weights=...")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return the weights `[L, ...]`; None if there are none."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the lengths `[bags]`, computed from the offsets on first use."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = as_normal_tensor(torch.diff, self._offsets)
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths `[bags]`; None if neither passed to the constructor nor computed."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return the offsets `[bags + 1]`, computed from the lengths on first use."""
        offsets = self._offsets
        if offsets is None:
            assert self._lengths is not None
            offsets = self._offsets = as_normal_tensor(running_sums, self._lengths)
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets `[bags + 1]`; None if neither constructed with them nor computed."""
        return self._offsets

    def inverse_indices(self) -> InverseIndices:
        """Return keys and indices `[F, B]`; raise ValueError if there are none."""
        if self._inverse is None:
            raise ValueError(
                "this KeyedJaggedTensor has no inverse indices: make it with inverse_indices="
                "(keys, indices)"
            )
        return self._inverse

    def inverse_indices_or_none(self) -> InverseIndices | None:
        """Return keys and indices `[F, B]`; None without inverse indices."""
        return self._inverse

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def size_in_bytes(self) -> int:
        """Return the bytes of all tensors, computed lengths or offsets included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        inverse = None if self._inverse is None else self._inverse[1]
        optional_tensors = (self._values, self._weights, self._lengths, self._offsets, inverse)
        return [tensor for tensor in optional_tensors if tensor is not None]

    # Numbers

    def keys(self) -> list[str]:
        """Return the name of each feature; do not modify the list."""
        return self._keys

    def stride(self) -> int:
        """Return the batch size: bags per feature or, if these vary, see `stride` of the class."""
        return self._stride

    def variable_stride_per_key(self) -> bool:
        """Return whether features may differ in bags (`stride_per_key_per_rank`)."""
        return self._stride_per_key_per_rank is not None

    def stride_per_key(self) -> list[int]:
        """Return the number of bags of each feature; do not modify the list."""
        strides = self._stride_per_key
        return [self._stride] * len(self._keys) if strides is None else strides

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return the bags per feature and rank, `[F][R]`; [] for a batch constructed without."""
        return [] if self._stride_per_key_per_rank is None else self._stride_per_key_per_rank

    def lengths_offset_per_key(self) -> list[int]:
        """Return the offset of each feature's bags in `lengths()`, and the number of bags."""
        return block_offsets(self.stride_per_key())

    def offset_per_key(self) -> list[int]:
        """Return the offset of each feature's values, and L; read from the device on first use.

        On the meta device, the values are assumed to be divided evenly.
        """
        bounds = self._offset_per_key
        if bounds is None:
            bounds = self._offset_per_key = self._read_bounds()
        return bounds

    def length_per_key(self) -> list[int]:
        """Return the number of values per feature, as `offset_per_key` reads or assumes it."""
        lengths = self._length_per_key
        if lengths is None:
            lengths = [end - start for start, end in pairwise(self.offset_per_key())]
            self._length_per_key = lengths
        return lengths

    def offset_per_key_or_none(self) -> list[int] | None:
        """Return `offset_per_key` if the host knows it, else None."""
        return self._offset_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        """Return `length_per_key` if the host knows it, else None."""
        return self._length_per_key

    def index_per_key(self) -> dict[str, int]:
        """Return the position of each key; the first position of a repeated key."""
        position_by_key = self._index_per_key
        if position_by_key is None:
            position_by_key = self._index_per_key = first_position_of_keys(self._keys)
        return position_by_key

    _key_indices = index_per_key  # the name that TorchRec's modules call

    def sync(self) -> "KeyedJaggedTensor":
        """Read `length_per_key` from the device, and return self."""
        self.length_per_key()
        return self

    def unsync(self) -> "KeyedJaggedTensor":
        """Forget `length_per_key` and `offset_per_key`, so that they are read again; return self.

        Computed lengths and offsets are not forgotten.
        """
        self._length_per_key = self._offset_per_key = None
        return self

    def _read_bounds(self) -> list[int]:
        """Return the first position of each key's values, then their number; waits for a GPU."""
        offsets = self.offsets()
        if offsets.is_meta:  # no data to read: assume features of about the same size
            num_keys = max(len(self._keys), 1)
            return [self._values.size(0) * i // num_keys for i in range(len(self._keys) + 1)]
        if self._stride_per_key_per_rank is None:
            if not self._stride:
                return [num_padding(offsets)] * (len(self._keys) + 1)
            return offsets[:: self._stride].tolist()
        first_bags = torch.tensor(self.lengths_offset_per_key(), device=offsets.device)
        return offsets[first_bags].tolist()

    def validate(self) -> "KeyedJaggedTensor":
        """Read and check the whole content, and return self.

        Raises:
            ValueError: lengths or offsets do not fit the values, tensors are on several devices, a
                key is repeated, or inverse indices have other keys or bags that do not exist.
        """
        check_content(self._values, self._lengths, self._offsets)
        length_per_key, bounds = self._length_per_key, self._read_bounds()
        if length_per_key is not None and block_offsets(length_per_key) != bounds:
            raise ValueError(
                f"length_per_key must be the values per key, {[b - a for a, b in pairwise(bounds)]}"
                f" by the offsets, got {length_per_key}"
            )
        devices = {str(tensor.device) for tensor in self._tensors()}
        if len(devices) > 1:
            raise ValueError(f"all tensors must be on one device, got {sorted(devices)}")
        if len(set(self._keys)) != len(self._keys):
            raise ValueError(f"keys must differ from each other, got {self._keys}")
        if self._inverse is not None:
            check_inverse(self._inverse, dict(zip(self._keys, self.stride_per_key(), strict=True)))
        return self

    # Features

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return the bags of one feature, as views; read `offset_per_key` if it is not known.

        Raises:
            KeyError: the batch does not have the key.
        """
        position = self.index_per_key().get(key)
        if position is None:
            raise KeyError(f"no feature {key!r}; there are {self._keys}")
        bounds = self.offset_per_key()
        start, end = bounds[position], bounds[position + 1]
        if self._stride_per_key_per_rank is None:
            first_bag, end_bag = position * self._stride, (position + 1) * self._stride
        else:
            first_bag, end_bag = self.lengths_offset_per_key()[position : position + 2]
        weights = None if self._weights is None else self._weights[start:end]
        return JaggedTensor.from_valid(
            self._values[start:end], weights, self.lengths()[first_bag:end_bag], None
        )

    def to_dict(self, compute_offsets: Any = True) -> dict[str, JaggedTensor]:
        """Return the bags of each feature as views; of a repeated key, of its last feature.

        Reads `length_per_key` from the device if it is not known. `compute_offsets` is an argument
        of TorchRec's method, and ignored.
        """
        sizes = self.length_per_key()
        if not sizes:
            return {}
        padding, weights = num_padding_of(self), [None] * len(sizes)
        values = drop_first(self._values, padding).split(sizes)
        if self._weights is not None:
            weights = drop_first(self._weights, padding).split(sizes)
        lengths = self.lengths().split(self.stride_per_key())
        make, parts = JaggedTensor.from_valid, zip(values, weights, lengths, strict=True)
        return dict(zip(self._keys, (make(*part, None) for part in parts), strict=True))

    def split(self, segments: Sequence[int]) -> list["KeyedJaggedTensor"]:
        """Split into the first `segments[0]` features, the next `segments[1]`, ..., as views.

        Reads an unknown `length_per_key`. Every part has all inverse indices of the batch.

        Raises:
            ValueError: segments are negative or do not add up to the number of keys.
        """
        if sum(segments) != len(self._keys) or any(num_keys < 0 for num_keys in segments):
            raise ValueError(
                f"segments must be >= 0 and add up to the number of keys = {len(self._keys)}, got "
                f"{list(segments)}"
            )
        batches, begin = [], 0
        for num_keys in segments:
            batches.append(self._select_keys(range(begin, begin + num_keys)))
            begin += num_keys
        return batches

    def permute(
        self, indices: Sequence[int], indices_tensor: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """Select features by position, in this order; positions may be omitted or repeated.

        Usually, consecutive features become views and other selections are copied, and
        `length_per_key` is read from the device if it is not known. During the capture of a CUDA
        graph, unknown lengths are not read if strides are equal and `indices_tensor` is passed.
        Then the result is a copy as large as this batch times the largest number of repetitions of
        a feature, with padding (-1; weights 0) before its first offset. The result has all inverse
        indices of the batch.

        Args:
            indices: positions of the features.
            indices_tensor: the same numbers, int32 or int64 `[n]`, on the device of the values;
                None copies them there.

        Raises:
            IndexError: a position is out of range.
        """
        if any(not 0 <= i < len(self._keys) for i in indices):
            raise IndexError(f"positions must be 0 to {len(self._keys) - 1}, got {list(indices)}")
        is_unread = self._length_per_key is None and not self.variable_stride_per_key()
        if indices_tensor is not None and is_unread and self._stride and is_captured(self._values):
            return self._select_padded(indices, indices_tensor)
        return self._select_keys(indices, indices_tensor)

    def _select_padded(self, order: Sequence[int], order_tensor: Tensor) -> "KeyedJaggedTensor":
        """Select features during the capture of a CUDA graph, when their sizes are unknown.

        `permute` describes the size of the result, and the padding before its first offset.
        """
        num_values = self._values.size(0) * max(Counter(order).values(), default=0)
        value_offsets = self.offsets()[:: self._stride]
        sources, first_values = segments_at_end(value_offsets, order_tensor, num_values)
        lengths = self.lengths().view(len(self._keys), -1).index_select(0, order_tensor).view(-1)
        return KeyedJaggedTensor.from_valid(
            [self._keys[i] for i in order],
            take_or_fill(self._values, sources, -1),
            None if self._weights is None else take_or_fill(self._weights, sources, 0),
            lengths,
            (running_sums(lengths) + first_values[:1]).to(lengths.dtype),
            self._stride,
            self._inverse,
        )

    def _select_keys(
        self, order: Sequence[int], order_tensor: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """Return the features at the positions `order`; `order_tensor` has them on the device."""
        sizes = self.length_per_key()
        tensors = self._view(order) if is_consecutive(order) else self._gather(order, order_tensor)
        keys, strides = self._keys, self._stride_per_key_per_rank
        selected = KeyedJaggedTensor.from_valid(
            [keys[i] for i in order],
            *tensors,
            None,
            self._stride,
            self._inverse,
            None if strides is None else [strides[i] for i in order],
        )
        selected._length_per_key = [sizes[i] for i in order]
        selected._offset_per_key = block_offsets(selected._length_per_key)
        return selected

    def _view(self, order: Sequence[int]) -> _Tensors:
        """Return values, weights and lengths of consecutive features, as views."""
        bounds, weights = self.offset_per_key(), self._weights
        return (
            consecutive_blocks(self._values, bounds, order),
            None if weights is None else consecutive_blocks(weights, bounds, order),
            consecutive_blocks(self.lengths(), self.lengths_offset_per_key(), order),
        )

    def _gather(self, order: Sequence[int], order_tensor: Tensor | None) -> _Tensors:
        """Return values, weights and lengths of the features of `order`, copied."""
        values, weights, lengths = self._values, self._weights, self.lengths()
        order_tensor = torch.as_tensor(
            order if order_tensor is None else order_tensor, dtype=_INT64, device=values.device
        )
        strides, sizes = self.stride_per_key(), self.length_per_key()
        if self._stride_per_key_per_rank is None and self._stride and self._offsets is not None:
            starts = self._offsets[:: self._stride]
        else:
            starts = torch.tensor(self.offset_per_key(), device=values.device)
        if self._stride_per_key_per_rank is None:
            selected_lengths = lengths.view(len(sizes), -1).index_select(0, order_tensor).view(-1)
        else:
            first_bags = torch.tensor(self.lengths_offset_per_key(), device=values.device)
            selected_lengths = gather_segments(
                lengths, first_bags, order_tensor, sum(strides[i] for i in order)
            )
        num_values = sum(sizes[i] for i in order)
        return (
            gather_segments(values, starts, order_tensor, num_values),
            None if weights is None else gather_segments(weights, starts, order_tensor, num_values),
            selected_lengths,
        )

    def flatten_lengths(self) -> "KeyedJaggedTensor":
        """Return self: lengths always have one dimension."""
        return self

    # Conversion

    def to_nested(self) -> dict[str, Tensor]:
        """Return one `torch.nested` tensor of jagged layout per feature, sharing memory."""
        return {key: jagged.to_nested() for key, jagged in self.to_dict().items()}

    def as_type(self, kind: Any) -> Any:
        """Construct an object of class `kind`, e.g. torchrec.KeyedJaggedTensor; copy no tensor."""
        strides = self._stride_per_key_per_rank
        strides_tensor = None if strides is None else torch.tensor(strides, device="cpu")
        return kind(
            keys=self._keys,
            values=self._values,
            weights=self._weights,
            lengths=self._lengths,
            offsets=self._offsets,
            stride=self._stride if strides is None else None,
            stride_per_key_per_rank=strides_tensor,
            inverse_indices=self._inverse,
        )

    # Devices

    def to(
        self,
        device: torch.device | str,
        non_blocking: Any = False,
        dtype: torch.dtype | None = None,
    ) -> "KeyedJaggedTensor":
        """Return the batch on `device`, with weights of `dtype` if given, as `Tensor.to` does.

        Tensors that are there already are shared, not copied. Ids keep their dtype.

        Raises:
            TypeError: `device` is a dtype.
        """
        refuse_dtype(device)
        on_device = self._map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if dtype is not None and on_device._weights is not None:
            on_device._weights = on_device._weights.to(dtype)
        return on_device

    def pin_memory(self) -> "KeyedJaggedTensor":
        """Copy to page-locked memory, so that copies to a GPU can be asynchronous; needs a GPU."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until the work queued on `stream` is done; for tensors on a GPU only."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def copy_(self, kjt: "KeyedJaggedTensor", *, non_blocking: bool = False) -> "KeyedJaggedTensor":
        """Overwrite tensors and numbers known on the host by what `kjt` has; return self.

        Raises:
            ValueError: `kjt` is not a batch, keys (also of inverse indices), strides (also per
                rank) or shapes differ, or only one has weights or inverse indices; nothing changes.
        """
        is_compatible = (
            isinstance(kjt, KeyedJaggedTensor)
            and self._keys == kjt._keys
            and self._stride == kjt._stride
            and self._stride_per_key_per_rank == kjt._stride_per_key_per_rank
            and self._values.shape == kjt._values.shape
            and getattr(self._weights, "shape", None) == getattr(kjt._weights, "shape", None)
            and keys_and_shape(self._inverse) == keys_and_shape(kjt._inverse)
        )
        if not is_compatible:
            raise ValueError(
                f"copy_ needs a batch like {self!r}, also in strides per rank and keys of inverse "
                f"indices, got {kjt!r}: make the target with empty_like(batch, device)"
            )
        self._values.copy_(kjt._values, non_blocking=non_blocking)
        if self._weights is not None:
            self._weights.copy_(kjt.weights(), non_blocking=non_blocking)
        if self._lengths is not None:
            self._lengths.copy_(kjt.lengths(), non_blocking=non_blocking)
        if self._offsets is not None:
            self._offsets.copy_(kjt.offsets(), non_blocking=non_blocking)
        if self._inverse is not None:
            self._inverse[1].copy_(kjt.inverse_indices()[1], non_blocking=non_blocking)
        self._length_per_key, self._offset_per_key = kjt._length_per_key, kjt._offset_per_key
        return self

    def clear_storage(self) -> int:
        """Free the storages of all tensors, for other views of them too; return their bytes."""
        num_freed_bytes = self.size_in_bytes()
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)
        return num_freed_bytes

    def _map_tensors(self, change: _TensorMap) -> "KeyedJaggedTensor":
        """Return a batch in which `change` has replaced each tensor; known numbers are kept."""
        weights, lengths, offsets = self._weights, self._lengths, self._offsets
        batch = KeyedJaggedTensor.from_valid(
            self._keys,
            change(self._values),
            None if weights is None else change(weights),
            None if lengths is None else change(lengths),
            None if offsets is None else change(offsets),
            self._stride,
            None if self._inverse is None else (self._inverse[0], change(self._inverse[1])),
            self._stride_per_key_per_rank,
        )
        batch._index_per_key = self._index_per_key
        batch._length_per_key, batch._offset_per_key = self._length_per_key, self._offset_per_key
        return batch

    def __reduce__(self) -> Any:
        layout = (self._stride, self._stride_per_key_per_rank, self._inverse)
        tensors = (self._values, self._weights, self._lengths, self._offsets)
        return KeyedJaggedTensor, (self._keys, *tensors, *layout)

    def __str__(self) -> str:
        text_by_key = {
            key: bags_text(jagged.values(), jagged.weights_or_none(), jagged.lengths(), "    ")
            for key, jagged in self.to_dict().items()
        }
        return keyed_text("KeyedJaggedTensor", text_by_key)

    def __repr__(self) -> str:
        weighted = "" if self._weights is None else ", weighted"
        num_bags = self._stride if self._stride_per_key_per_rank is None else self._stride_per_key
        return (
            f"KeyedJaggedTensor({self._keys}, {num_bags} bags each, {list(self._values.shape)} "
            f"{self._values.dtype}{weighted}, {self.device()})"
        )


def concat_batches(batches: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Combine the features of batches, see `KeyedJaggedTensor.concat`."""
    return KeyedJaggedTensor(**concat_arguments(list(map(KeyedJaggedTensor.adopt, batches))))


def empty_batch_like(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return a batch without features, see `KeyedJaggedTensor.empty_like`."""
    return KeyedJaggedTensor.from_valid(**empty_arguments(KeyedJaggedTensor.adopt(kjt)))


# Each is one call in a traced graph, which does not know how many features a batch has.
torch.fx.wrap("concat_batches")
torch.fx.wrap("empty_batch_like")
