"""`JaggedTensor`: the bags of one feature, and functions on lengths, offsets and padding."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy, ProxyableClassMeta

from emblib.jagged import convert
from emblib.specs.checks import check_bool
from emblib.tables.bounds_report import is_padded

_INT32, _INT64 = torch.int32, torch.int64
_MAX_INT32 = 2**31 - 1
_MAX_BAGS_SHOWN = 16
_MAX_VALUES_SHOWN = 16  # per bag


class TracedClass(ProxyableClassMeta):
    """Type of classes whose construction from values of a trace is one call in the graph."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Record the call if an argument is traced, else construct an object."""
        for argument in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(argument, Proxy):
                return super().__call__(*args, **kwargs)
        return type.__call__(cls, *args, **kwargs)


class JaggedTensor(metaclass=TracedClass):
    """B bags of values: bag b is `values[offsets[b]:offsets[b + 1]]`.

    Tensors are not copied. Do not change lengths or offsets in place once one was computed from the
    other.

    Args:
        values: `[L]` ids or `[L, ...]` rows of all bags, concatenated.
        weights: `[L, ...]`, one weight per value; None for bags without weights.
        lengths: int32 or int64 `[B]`. If lengths or offsets is None, it is computed from the other
            on first use.
        offsets: int32 or int64 `[B + 1]`, from 0 to L.

    Raises:
        ValueError: there are neither lengths nor offsets, sizes do not match, or lengths or offsets
            are int32 for 2^31 values or more.
        TypeError: an argument is not a tensor, or lengths or offsets are not integers.

    Example:
        >>> bags = emblib.JaggedTensor(torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 0, 1]))
        >>> bags.offsets()
        tensor([0, 2, 2, 3])
        >>> bags.to_dense()
        [tensor([3, 1]), tensor([], dtype=torch.int64), tensor([4])]
    """

    __slots__ = ("__weakref__", "_lengths", "_offsets", "_values", "_weights")

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        if not isinstance(values, Tensor):
            raise tensor_type_error("values", values)
        for name, tensor in (("lengths", lengths), ("offsets", offsets)):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise tensor_type_error(name, tensor)
        if lengths is not None:
            if lengths.dtype is not _INT64 or lengths.dim() != 1:
                lengths = flat_integers(lengths, "lengths")
                check_int32_range(lengths, values.size(0), "lengths")
        elif offsets is None:
            raise missing_bags_error("a JaggedTensor")
        if offsets is not None:
            if offsets.dtype is not _INT64 or offsets.dim() != 1:
                offsets = flat_integers(offsets, "offsets")
                check_int32_range(offsets, values.size(0), "offsets")
            num_bags = offsets.numel() - 1
            if num_bags < 0 or (lengths is not None and lengths.numel() != num_bags):
                raise offset_count_error(offsets, lengths)
        if weights is not None and not are_weights_of(values, weights):
            raise weights_error(values, weights)
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

    @classmethod
    def from_valid(
        cls, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None
    ) -> "JaggedTensor":
        """Construct without checks; lengths `[B]` or offsets `[B + 1]` may be None, not both."""
        jagged = cls.__new__(cls)
        jagged._values = values
        jagged._weights = weights
        jagged._lengths = lengths
        jagged._offsets = offsets
        return jagged

    # Construction

    @staticmethod
    def empty(
        *,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "JaggedTensor":
        """Return an object without bags and values; None is torch's default dtype or device."""
        check_bool("is_weighted", is_weighted)
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        lengths = torch.empty(0, dtype=lengths_dtype, device=device)
        values = torch.empty(0, dtype=values_dtype, device=device)
        return JaggedTensor(values, weights, lengths)

    @staticmethod
    def empty_like(jt: "JaggedTensor", device: torch.device | str | None = None) -> "JaggedTensor":
        """Return an object without bags, with the dtypes of `jt`.

        With a `device`, return instead an object of uninitialised tensors there, of the sizes of
        `jt`, as a target for `copy_`.
        """
        jagged = JaggedTensor.adopt(jt)
        if device is not None:
            return jagged._map_tensors(lambda tensor: torch.empty_like(tensor, device=device))
        weights = None if jagged._weights is None else jagged._weights.new_empty(0)
        return JaggedTensor(jagged._values.new_empty(0), weights, jagged.lengths().new_empty(0))

    @staticmethod
    def from_dense(
        values: Sequence[Tensor], weights: Sequence[Tensor] | None = None
    ) -> "JaggedTensor":
        """Concatenate a list of bags, one tensor each; lengths are int32.

        Raises:
            ValueError: there are no bags, or those of `weights` and `values` differ in length.
        """
        values = list(values)  # an iterator is read once
        all_values, lengths = concatenate_bags(values)
        if weights is None:
            return JaggedTensor(all_values, None, lengths)
        weights = list(weights)
        if [bag.size(0) for bag in weights] != [bag.size(0) for bag in values]:
            raise ValueError("weights must have the lengths of the values, bag by bag")
        return JaggedTensor(all_values, torch.cat(weights), lengths)

    @staticmethod
    def from_dense_lengths(
        values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> "JaggedTensor":
        """Take the first `lengths[b]` entries of `values[b]` as bag b; waits for a GPU.

        `values` and `weights` are `[B, N, ...]`, `lengths` int32 or int64 `[B]`. Lengths must be in
        [0, N], which is not checked. Raises ValueError if there are not B lengths.
        """
        return JaggedTensor(unpad(values, lengths), unpad(weights, lengths), lengths)

    @staticmethod
    def from_nested(nested: Tensor, weights: Tensor | None = None) -> "JaggedTensor":
        """Take the bags of a `torch.nested` tensor of jagged layout.

        The values share memory with `nested`, unless it has holes between its bags: then they are
        copied. Waits for a GPU if there are holes, or weights, whose lengths are compared.

        Args:
            nested: `[B, j, ...]`.
            weights: another nested tensor of the same lengths; None for bags without weights.

        Raises:
            TypeError: `nested` is not a nested tensor, has another layout, or is ragged in another
                dimension.
            ValueError: the weights have other lengths.
        """
        return JaggedTensor(*convert.tensors_of_nested(nested, weights))

    @staticmethod
    def adopt(other: Any) -> "JaggedTensor":
        """Convert an object with TorchRec's accessors, e.g. a torchrec.JaggedTensor; copy nothing.

        A `JaggedTensor` of emblib is returned as it is.

        Raises:
            TypeError: the object has no `values()` or no `lengths()`.
        """
        if isinstance(other, JaggedTensor):
            return other
        return JaggedTensor(*convert.jagged_tensors(other))

    # Contents

    def values(self) -> Tensor:
        """Return the values `[L, ...]`, bag after bag."""
        return self._values

    def weights(self) -> Tensor:
        """Return the weights `[L, ...]`; raise ValueError if there are none."""
        if self._weights is None:
            raise ValueError("this JaggedTensor has no weights: make it with weights=...")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return the weights `[L, ...]`; None if there are none."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the lengths `[B]`, computed from the offsets on first use."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = as_normal_tensor(torch.diff, self._offsets)
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths `[B]`; None if they were not passed and not computed yet."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return the offsets `[B + 1]`, computed from the lengths on first use."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = as_normal_tensor(running_sums, self._lengths)
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets `[B + 1]`; None if they were not passed and not computed yet."""
        return self._offsets

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def size_in_bytes(self) -> int:
        """Return the bytes of all tensors, with lengths or offsets that were computed."""
        return sum(t.numel() * t.element_size() for t in self._tensors())

    def validate(self) -> "JaggedTensor":
        """Return self; raise ValueError unless the bags cover the values in order.

        Waits for a GPU.
        """
        check_content(self._values, self._lengths, self._offsets)
        return self

    # Conversion

    def to_dense(self) -> list[Tensor]:
        """Return one view of the values per bag; read the lengths from the device."""
        return bag_views(self._values, self.lengths(), num_padding(self._offsets))

    def to_dense_weights(self) -> list[Tensor] | None:
        """Return one view of the weights per bag; None without weights."""
        if self._weights is None:
            return None
        return bag_views(self._weights, self.lengths(), num_padding(self._offsets))

    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """Return the values `[B, N, ...]`, each bag cut or padded to N = `desired_length`.

        None is the length of the longest bag, which is read from the device.

        Raises:
            ValueError: `desired_length` is below 0.
        """
        return self._pad_dense(self._values, desired_length, padding_value)

    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """Return the weights as `to_padded_dense` returns the values; None without weights."""
        if self._weights is None:
            return None
        return self._pad_dense(self._weights, desired_length, padding_value)

    def _pad_dense(self, values: Tensor, num_columns: int | None, padding: float) -> Tensor:
        """Return `[B, num_columns, ...]`, bags padded or cut; None is the longest length."""
        lengths = self.lengths()
        if num_columns is None:
            num_columns = int(lengths.max()) if lengths.numel() else 0
        elif num_columns < 0:
            raise ValueError(f"desired_length must be >= 0, got {num_columns}")
        return pad(values, lengths, self.offsets(), num_columns, padding)

    def to_nested(self) -> Tensor:
        """Return the values as a jagged `torch.nested` tensor `[B, j, ...]`, sharing memory."""
        values, offsets, padding = self._values, self.offsets(), num_padding(self._offsets)
        if padding:
            values, offsets = drop_first(values, padding), offsets - padding
        return torch.nested.nested_tensor_from_jagged(values, offsets)

    def as_type(self, kind: Any) -> Any:
        """Construct an object of class `kind`, e.g. torchrec.JaggedTensor; copy no tensor."""
        return kind(
            values=self._values,
            weights=self._weights,
            lengths=self._lengths,
            offsets=self._offsets,
        )

    # Devices

    def to(self, device: torch.device | str, non_blocking: Any = False) -> "JaggedTensor":
        """Return the bags on `device`, as `Tensor.to` does; tensors already there are shared.

        Raises:
            TypeError: `device` is a dtype.
        """
        refuse_dtype(device)
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "JaggedTensor":
        """Return copies in page-locked memory, for asynchronous copies to a GPU; needs a GPU."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until the work queued on `stream` is done; all tensors are on a GPU."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def copy_(self, jt: "JaggedTensor", *, non_blocking: bool = False) -> "JaggedTensor":
        """Overwrite every tensor with that of `jt`, computed if it has none; return self.

        Raises:
            TypeError: `jt` is not a JaggedTensor.
            ValueError: values or weights differ in shape, only one of the two has weights, or the
                numbers of bags differ; nothing is changed.
        """
        if not isinstance(jt, JaggedTensor):
            raise TypeError(f"copy_ needs a JaggedTensor, got {jt!r}")
        shapes, num_bags = self._shapes(), self._num_bags()
        other_shapes, other_num_bags = jt._shapes(), jt._num_bags()
        if shapes != other_shapes or num_bags != other_num_bags:
            raise ValueError(
                f"copy_ needs values and weights of shapes {shapes} in {num_bags} bags, got "
                f"{other_shapes} in {other_num_bags}"
            )
        self._values.copy_(jt._values, non_blocking=non_blocking)
        if self._weights is not None:
            self._weights.copy_(jt.weights(), non_blocking=non_blocking)
        if self._lengths is not None:
            self._lengths.copy_(jt.lengths(), non_blocking=non_blocking)
        if self._offsets is not None:
            self._offsets.copy_(jt.offsets(), non_blocking=non_blocking)
        return self

    def _shapes(self) -> list[list[int] | None]:
        """Return the shapes of values and weights; None for no weights."""
        return [
            None if tensor is None else list(tensor.shape)
            for tensor in (self._values, self._weights)
        ]

    def _num_bags(self) -> int:
        if self._lengths is not None:
            return self._lengths.numel()
        assert self._offsets is not None
        return self._offsets.numel() - 1

    def _tensors(self) -> list[Tensor]:
        optional_tensors = (self._values, self._weights, self._lengths, self._offsets)
        return [tensor for tensor in optional_tensors if tensor is not None]

    def _map_tensors(self, function: Any) -> "JaggedTensor":
        """Return a jagged tensor of the results of `function` for each tensor."""
        lengths, offsets = self._lengths, self._offsets
        return JaggedTensor.from_valid(
            function(self._values),
            None if self._weights is None else function(self._weights),
            None if lengths is None else function(lengths),
            None if offsets is None else function(offsets),
        )

    def __reduce__(self) -> Any:
        return JaggedTensor, (self._values, self._weights, self._lengths, self._offsets)

    def __str__(self) -> str:
        padding, weights = num_padding(self._offsets), self._weights
        weights = None if weights is None else drop_first(weights, padding)
        text = bags_text(drop_first(self._values, padding), weights, self.lengths())
        return f"JaggedTensor({text if self._weights is not None else in_braces([text])})\n"

    def __repr__(self) -> str:
        weighted = "" if self._weights is None else ", weighted"
        values_text = f"{list(self._values.shape)} {self._values.dtype}{weighted}, {self.device()}"
        return f"JaggedTensor({self.lengths().numel()} bags, {values_text})"


def bag_views(values: Tensor, lengths: Tensor, padding: int) -> list[Tensor]:
    """Return one view of `values` per bag, after `padding` values; wait for a GPU."""
    return list(drop_first(values, padding).split(lengths.tolist()))


def num_padding(offsets: Tensor | None) -> int:
    """Return the number of values before the first bag: padding, see `static_batches`.

    It is read from offsets `[bags + 1]` on the CPU, and in a `CapturedStep`, where the host waits
    for a GPU. Elsewhere it is not read, and 0 is returned: there offsets must begin with 0. Offsets
    that were computed from lengths (None) do.
    """
    if offsets is None or torch.compiler.is_compiling() or type(offsets) is not Tensor:
        return 0
    is_read = offsets.is_cpu or (offsets.is_cuda and is_padded())
    return max(int(offsets[0]), 0) if is_read else 0


def drop_first(tensor: Tensor, count: int) -> Tensor:
    """Return a tensor without its first `count` entries, as a view."""
    return tensor[count:] if count else tensor


def concatenate_bags(bags: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the bags concatenated, and their lengths, int32.

    The bags must have the same shape apart from dimension 0.

    Raises:
        ValueError: there are no bags, so the dtype is unknown.
    """
    if not bags:
        raise ValueError("a list of bags must not be empty: use JaggedTensor.empty()")
    values = torch.cat(bags)
    lengths = [bag.size(0) for bag in bags]
    return values, torch.tensor(lengths, dtype=torch.int32, device=values.device)


def unpad(padded: Tensor | None, lengths: Tensor) -> Any:
    """Return the first `lengths[b]` entries of each `padded[b]`, concatenated; waits for a GPU.

    `padded` is `[B, N, ...]`; for None return None. Lengths beyond N count as N. Raises ValueError
    if there are not B lengths.
    """
    if padded is None:
        return None
    if padded.dim() < 2 or padded.size(0) != lengths.numel():
        raise ValueError(
            f"padded must be [{lengths.numel()}, N, ...] for {lengths.numel()} lengths, got "
            f"{list(padded.shape)}"
        )
    columns = torch.arange(padded.size(1), device=padded.device)
    return padded[columns < lengths.unsqueeze(1)]


def pad(
    values: Tensor, lengths: Tensor, offsets: Tensor, num_columns: int, padding: float
) -> Tensor:
    """Return `[B, num_columns, ...]` with bag b in row b, cut or padded; no wait for a GPU."""
    shape = (lengths.numel(), num_columns, *values.shape[1:])
    if not values.size(0):
        return values.new_full(shape, padding)
    columns = torch.arange(num_columns, device=values.device)
    positions = offsets[:-1].unsqueeze(1) + columns
    # Positions beyond the last value are padding, so any valid value will do.
    padded = values[positions.clamp(max=values.size(0) - 1)]
    is_value = (columns < lengths.unsqueeze(1)).reshape(*shape[:2], *([1] * (values.dim() - 1)))
    return torch.where(is_value, padded, padded.new_full((), padding))


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Return offsets `[N + 1]` of bags with N `lengths`, of any shape, in the same dtype.

    Reads the device, for the checks.

    Raises:
        ValueError: lengths are not int32 or int64, a length is negative, or the sum of int32
            lengths is not an int32.

    Example:
        >>> emblib.jagged.offsets_from_lengths(torch.tensor([2, 0, 1]))
        tensor([0, 2, 2, 3])
    """
    if lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lengths must be int32 or int64, got {lengths.dtype}")
    lengths = lengths.flatten()
    if lengths.numel() and int(lengths.min()) < 0:
        raise ValueError(f"lengths must be >= 0, got {int(lengths.min())}")
    if lengths.dtype is _INT32:
        check_int32_range(lengths, int(lengths.sum(dtype=_INT64)), "lengths")
    return running_sums(lengths)


def lengths_from_offsets(offsets: Tensor) -> Tensor:
    """Return the lengths `[N]` of bags with `offsets` `[N + 1]`.

    Example:
        >>> emblib.jagged.lengths_from_offsets(torch.tensor([0, 2, 2, 3]))
        tensor([2, 0, 1])
    """
    return offsets.diff()


def running_sums(lengths: Tensor) -> Tensor:
    """Return offsets `[N + 1]` of unchecked `lengths` `[N]`, without reading the device."""
    # Sums go directly into the result, which is a third faster than cumsum and cat.
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, dtype=lengths.dtype, out=offsets[1:])
    return offsets


def as_normal_tensor(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Call a function of a tensor outside of inference mode, so that its result may be stored.

    Backward cannot save inference tensors, and training may use a result that an evaluation in
    `torch.inference_mode()` has stored.
    """
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return function(tensor)
    with torch.inference_mode(mode=False):
        return function(tensor)


def refuse_dtype(device: Any) -> None:
    """Raise TypeError for a dtype in place of a device, which would cast ids and lengths."""
    if isinstance(device, torch.dtype):
        raise TypeError(
            f"a batch moves to a device, got {device}, which would cast ids and lengths too; "
            "construct a batch from the tensors that you convert"
        )


def flat_integers(tensor: Tensor, name: str) -> Tensor:
    """Return a tensor of N integers as `[N]`; an empty tensor of another dtype becomes int64.

    Raises:
        TypeError: the tensor has elements, and is neither int32 nor int64.
    """
    if tensor.dtype not in (_INT32, _INT64):
        if tensor.numel():
            raise TypeError(
                f"{name} must be int32 or int64, got {tensor.dtype}: convert it, e.g. "
                f"{name}.to(torch.int64)"
            )
        tensor = tensor.to(_INT64)
    return tensor.reshape(-1)


def check_int32_range(tensor: Tensor, num_values: int, name: str) -> None:
    """Raise ValueError if `tensor` is int32, which cannot count `num_values`."""
    if num_values > _MAX_INT32 and tensor.dtype is _INT32:
        raise ValueError(
            f"int32 {name} count up to {_MAX_INT32} values, got {num_values}: give {name}.long()"
        )


def tensor_type_error(name: str, argument: object) -> TypeError:
    """Return the error for an argument that is not a tensor."""
    return TypeError(
        f"{name} must be a tensor, got {type(argument).__name__}: e.g. {name}=torch.tensor(...)"
    )


def missing_bags_error(name: str) -> ValueError:
    """Return the error for an object constructed without lengths and offsets."""
    return ValueError(f"{name} needs lengths or offsets, got neither")


def are_weights_of(values: Tensor, weights: object) -> bool:
    """Return whether `weights` is a tensor with one entry per value."""
    return isinstance(weights, Tensor) and weights.size(0) == values.size(0)


def weights_error(values: Tensor, weights: Tensor) -> TypeError | ValueError:
    """Return the error for weights that are not a tensor with one entry per value."""
    if not isinstance(weights, Tensor):
        return tensor_type_error("weights", weights)
    return ValueError(
        f"weights must be one per value, got {weights.size(0)} for {values.size(0)} values"
    )


def offset_count_error(offsets: Tensor, lengths: Tensor | None) -> ValueError:
    """Return the error for a number of offsets other than the number of bags + 1."""
    expected = "" if lengths is None else f" = {lengths.numel()} + 1"
    return ValueError(
        f"offsets must have one entry more than there are bags{expected}, got {offsets.numel()}"
    )


def check_content(values: Tensor, lengths: Tensor | None, offsets: Tensor | None) -> None:
    """Raise ValueError unless the bags cover `values` in order; reads the device.

    `values` is `[N, ...]`, `lengths` `[B]`, `offsets` `[B + 1]`.
    """
    num_values = values.size(0)
    if offsets is not None:
        bag_lengths = offsets.diff()
        if not offsets.numel() or int(offsets[0]) != 0 or int(offsets[-1]) != num_values:
            first_and_last = (int(offsets[0]), int(offsets[-1])) if offsets.numel() else "none"
            raise ValueError(
                f"offsets must go from 0 to the number of values = {num_values}, they go from/to "
                f"{first_and_last}"
            )
        if bag_lengths.numel() and int(bag_lengths.min()) < 0:
            bag = int(bag_lengths.argmin())
            raise ValueError(
                f"offsets must not decrease, they do after bag {bag}: "
                f"{offsets[bag : bag + 2].tolist()}"
            )
        if lengths is not None and not torch.equal(bag_lengths.to(lengths.dtype), lengths):
            raise ValueError("lengths and offsets must describe the same bags: give only one")
    elif lengths is not None:
        if lengths.numel() and int(lengths.min()) < 0:
            raise ValueError(f"lengths must be >= 0, got {int(lengths.min())}")
        if int(lengths.sum()) != num_values:
            raise ValueError(
                f"lengths must add up to the number of values = {num_values}, got "
                f"{int(lengths.sum())}"
            )


def bags_text(values: Tensor, weights: Tensor | None, lengths: Tensor, indent: str = "") -> str:
    """Format bags as `[[1, 2], [], [3]]`; with weights, format values and weights by name.

    `indent` precedes each line but the first.
    """
    if weights is None:
        return nested_text(values, lengths)
    text_by_name = {
        "values": nested_text(values, lengths),
        "weights": nested_text(weights, lengths),
    }
    return in_braces([f'"{name}": {text}' for name, text in text_by_name.items()], indent)


def keyed_text(name: str, entries: dict[str, str]) -> str:
    """Format the entries of a `name`, one line per key."""
    lines = [f'"{key}": {text}' for key, text in entries.items()]
    return f"{name}({in_braces(lines) if lines else ''})\n"


def in_braces(lines: Sequence[str], indent: str = "") -> str:
    """Format lines within braces; `indent` precedes each line but the first."""
    text = ",\n".join(f"{indent}    {line}" for line in lines)
    return f"{{\n{text}\n{indent}}}"


def nested_text(values: Tensor, lengths: Tensor) -> str:
    """Format the first bags, and the first values of each; reads the device."""
    lengths_shown = lengths[:_MAX_BAGS_SHOWN].tolist()
    bag_texts, first_value = [], 0
    for length in lengths_shown:
        entries = [
            _format_value(value)
            for value in values[first_value : first_value + min(length, _MAX_VALUES_SHOWN)].tolist()
        ]
        ellipsis = [f"... ({length} in all)"] if length > _MAX_VALUES_SHOWN else []
        bag_texts.append(f"[{', '.join(entries + ellipsis)}]")
        first_value += length
    if lengths.numel() > len(lengths_shown):
        bag_texts.append(f"... ({lengths.numel()} bags in all)")
    return f"[{', '.join(bag_texts)}]"


def _format_value(value: float | list[float]) -> str:
    """Format a number or nested list of numbers for `str`, floats with 6 digits."""
    if isinstance(value, list):
        return f"[{', '.join(_format_value(number) for number in value)}]"
    return str(float(f"{value:.6g}") if isinstance(value, float) else value)


# `unpad` is one call in a traced graph, since its branches depend on sizes of its arguments.
torch.fx.wrap("unpad")
