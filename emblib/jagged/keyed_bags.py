"""What a batch of several features holds, and what is told of it without touching its values."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Self

import torch
from torch import Tensor

from emblib.jagged.jagged_tensor import (
    check_content,
    check_reach,
    flat_integers,
    no_bags,
    no_tensor,
    running_sums,
    too_few_weights,
    wrong_offsets,
)


def bounds_of(lengths: Sequence[int]) -> list[int]:
    """Where pieces of `lengths` begin, and the last one ends."""
    return list(accumulate(lengths, initial=0))


def places_of(keys: Sequence[str]) -> dict[str, int]:
    """The place of each key; of one that comes twice, the first."""
    index: dict[str, int] = {}
    for place, key in enumerate(keys):
        index.setdefault(key, place)
    return index


def is_run(order: Sequence[int]) -> bool:
    """Whether pieces in this order lie in one place already (so do none)."""
    return all(second == first + 1 for first, second in pairwise(order))


def span(tensor: Tensor, bounds: Sequence[int], order: Sequence[int]) -> Tensor:
    """The pieces of an `order` that is a run, as a view."""
    if not order:
        return tensor.narrow(0, 0, 0)
    start = bounds[order[0]]
    return tensor.narrow(0, start, bounds[order[-1] + 1] - start)


def list_of_keys(keys: Sequence[str]) -> list[str]:
    """`keys` as a list of its own.

    Raises:
        TypeError: one string, whose letters are hardly meant.
    """
    if isinstance(keys, str):
        raise TypeError(f"keys must be a list of names, got {keys!r}: write [{keys!r}]")
    return list(keys)


def lists_of(strides: Sequence[Sequence[int]] | Tensor) -> list[list[int]]:
    """`stride_per_key_per_rank` as `[F][R]` numbers of the host."""
    if isinstance(strides, Tensor):
        return strides.tolist()
    return [list(row) for row in strides]


def bags_per_key(strides: list[list[int]], keys: int, bags: int) -> list[int]:
    """The bags of each feature over all ranks.

    Raises:
        ValueError: not one list a key, lists of different lengths, a negative number, or another
            sum than there are bags.
    """
    if len(strides) != keys or len({len(row) for row in strides}) > 1:
        raise ValueError(
            f"stride_per_key_per_rank must have one list a key = {keys}, of the same number of "
            f"ranks, got {len(strides)} of {sorted({len(row) for row in strides})}"
        )
    sums = [sum(row) for row in strides]
    if sum(sums) != bags or any(bags_here < 0 for row in strides for bags_here in row):
        raise ValueError(
            "stride_per_key_per_rank must be >= 0 and add up to the number of bags = "
            f"{bags}, got {strides}"
        )
    return sums


def refuse_stride(stride: int, keys: int, bags: int) -> None:
    """Raise the ValueError of `bags` that are not `stride` for each key."""
    raise ValueError(
        f"lengths must have the same number of bags for every key, got {bags} for {keys} keys"
        + (f" with stride {stride}" if bags == 0 or bags % max(keys, 1) == 0 else "")
        + ": where features differ in it give stride_per_key_per_rank"
    )


def check_inverse(inverse: tuple[list[str], Tensor], bags: dict[str, int]) -> None:
    """Raise ValueError unless `inverse` has a row of bags for each key (reads the device).

    It may have rows of other keys, which a part of a batch keeps.
    """
    keys, indices = inverse
    if not bags.keys() <= set(keys) or indices.dim() != 2 or indices.size(0) != len(keys):
        raise ValueError(
            f"inverse_indices must be keys and one row for each, of {sorted(bags)} at least, got "
            f"{sorted(keys)} and {list(indices.shape)}"
        )
    for key, row in zip(keys, indices, strict=True):
        if key in bags and row.numel() and not 0 <= int(row.min()) <= int(row.max()) < bags[key]:
            raise ValueError(
                f"the inverse indices of {key!r} must be bags 0 to {bags[key] - 1}, got "
                f"{int(row.min())} to {int(row.max())}"
            )


_INT64 = torch.int64

Strides = Sequence[Sequence[int]] | Tensor
InverseIndices = tuple[list[str], Tensor]


class KeyedBags:
    """The tensors of a `KeyedJaggedTensor` and its numbers; arguments are told there."""

    __slots__ = (
        "__weakref__",
        "_index",
        "_inverse",
        "_keys",
        "_length_per_key",
        "_lengths",
        "_offset_per_key",
        "_offsets",
        "_stride",
        "_stride_per_key",
        "_strides",
        "_values",
        "_weights",
    )

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
    ) -> None:
        # On the path of every step: each tensor is asked as little as will do.
        self._keys = keys if type(keys) is list else list_of_keys(keys)
        if not isinstance(values, Tensor):
            raise no_tensor("values", values)
        if lengths is not None:
            if not isinstance(lengths, Tensor):
                raise no_tensor("lengths", lengths)
            if lengths.dtype is not _INT64 or lengths.dim() != 1:
                lengths = flat_integers(lengths, "lengths")
                check_reach(lengths, values.size(0), "lengths")
            bags = lengths.numel()
        elif offsets is None:
            raise no_bags("a KeyedJaggedTensor")
        if offsets is not None:
            if offsets.dtype is not _INT64 or offsets.dim() != 1:
                offsets = flat_integers(offsets, "offsets")
                check_reach(offsets, values.size(0), "offsets")
            ends = offsets.numel() - 1
            if ends < 0 or (lengths is not None and ends != bags):
                raise wrong_offsets(offsets, lengths)
            bags = ends
        if weights is not None and weights.size(0) != values.size(0):
            raise too_few_weights(values, weights)
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._inverse = inverse_indices
        self._strides: list[list[int]] | None = None
        self._stride_per_key: list[int] | None = None
        self._index: dict[str, int] | None = None
        self._length_per_key: list[int] | None = None
        self._offset_per_key: list[int] | None = None
        if stride_per_key_per_rank is None:
            count = len(self._keys)
            if stride is None:
                stride = bags // count if count else 0
            if stride * count != bags:
                refuse_stride(stride, count, bags)
            self._stride = stride
        else:
            self._vary(lists_of(stride_per_key_per_rank), bags, stride)

    def _vary(self, strides: list[list[int]], bags: int, stride: int | None) -> None:
        """Features differ in their bags; the batch is what the inverse indices are for."""
        self._strides = strides
        self._stride_per_key = bags_per_key(strides, len(self._keys), bags)
        if stride is None:
            if self._inverse is not None:
                stride = self._inverse[1].size(-1)
            else:
                stride = max(self._stride_per_key, default=0)
        self._stride = stride

    @classmethod
    def _of(
        cls,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None,
        stride: int,
        inverse: InverseIndices | None = None,
        strides: list[list[int]] | None = None,
    ) -> Self:
        """What is known to be right already."""
        made = cls.__new__(cls)
        made._keys = keys
        made._values = values
        made._weights = weights
        made._lengths = lengths
        made._offsets = offsets
        made._inverse = inverse
        made._stride = stride
        made._strides = strides
        made._stride_per_key = None if strides is None else [sum(row) for row in strides]
        made._index = made._length_per_key = made._offset_per_key = None
        return made

    # Tensors

    def values(self) -> Tensor:
        """`[L, ...]`, feature after feature and bag after bag."""
        return self._values

    def weights(self) -> Tensor:
        """`[L, ...]`; ValueError where there are none."""
        if self._weights is None:
            raise ValueError("this KeyedJaggedTensor has no weights: make it with weights=...")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """`[L, ...]` if there are weights."""
        return self._weights

    def lengths(self) -> Tensor:
        """`[bags]`, made of the offsets the first time."""
        lengths = self._lengths
        if lengths is None:
            assert self._offsets is not None
            lengths = self._lengths = self._offsets.diff()
        return lengths

    def lengths_or_none(self) -> Tensor | None:
        """`[bags]` if they were given or asked for."""
        return self._lengths

    def offsets(self) -> Tensor:
        """`[bags + 1]`, made of the lengths the first time, in their dtype."""
        offsets = self._offsets
        if offsets is None:
            assert self._lengths is not None
            offsets = self._offsets = running_sums(self._lengths)
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        """`[bags + 1]` if they were given or asked for."""
        return self._offsets

    def inverse_indices(self) -> InverseIndices:
        """Keys and `[F, B]`; ValueError where there are none."""
        if self._inverse is None:
            raise ValueError(
                "this KeyedJaggedTensor has no inverse indices: make it with inverse_indices="
                "(keys, indices)"
            )
        return self._inverse

    def inverse_indices_or_none(self) -> InverseIndices | None:
        """Keys and `[F, B]` if there are inverse indices."""
        return self._inverse

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def size_in_bytes(self) -> int:
        """Of all the tensors it holds."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        inverse = None if self._inverse is None else self._inverse[1]
        every = (self._values, self._weights, self._lengths, self._offsets, inverse)
        return [tensor for tensor in every if tensor is not None]

    # Numbers

    def keys(self) -> list[str]:
        """The name of each feature: this object's own list, not to be changed."""
        return self._keys

    def stride(self) -> int:
        """Examples in the batch: the bags of every feature, or of the inverse indices."""
        return self._stride

    def variable_stride_per_key(self) -> bool:
        """Whether it was made with `stride_per_key_per_rank`."""
        return self._strides is not None

    def stride_per_key(self) -> list[int]:
        """The bags of each feature."""
        varied = self._stride_per_key
        return [self._stride] * len(self._keys) if varied is None else varied

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """`[F][R]`, empty where all features have `stride()` bags."""
        return [] if self._strides is None else self._strides

    def lengths_offset_per_key(self) -> list[int]:
        """Where each feature's bags begin in `lengths()`, and the last one's end."""
        return bounds_of(self.stride_per_key())

    def offset_per_key(self) -> list[int]:
        """Where each feature's values begin, and the last one's end; read back the first time."""
        bounds = self._offset_per_key
        if bounds is None:
            bounds = self._offset_per_key = self._read_bounds()
        return bounds

    def length_per_key(self) -> list[int]:
        """How many values each feature has; read back the first time."""
        lengths = self._length_per_key
        if lengths is None:
            bounds = self.offset_per_key()
            lengths = [end - start for start, end in pairwise(bounds)]
            self._length_per_key = lengths
        return lengths

    def offset_per_key_or_none(self) -> list[int] | None:
        """What `offset_per_key` says, if it is known on the host."""
        return self._offset_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        """What `length_per_key` says, if it is known on the host."""
        return self._length_per_key

    def index_per_key(self) -> dict[str, int]:
        """The place of each key; of one that `permute` repeated, the first."""
        index = self._index
        if index is None:
            index = self._index = places_of(self._keys)
        return index

    def sync(self) -> Self:
        """Itself, with the numbers that are told on the host read back."""
        self.length_per_key()
        return self

    def unsync(self) -> Self:
        """Itself, with those numbers forgotten, e.g. because its lengths were overwritten."""
        self._length_per_key = self._offset_per_key = None
        return self

    def _read_bounds(self) -> list[int]:
        offsets = self.offsets()
        if self._strides is None:
            if not self._stride:
                return [0] * (len(self._keys) + 1)
            return offsets[:: self._stride].tolist()
        at = torch.tensor(self.lengths_offset_per_key(), device=offsets.device)
        return offsets[at].tolist()

    def validate(self) -> Self:
        """Itself, after all of its content was read.

        Raises:
            ValueError: lengths or offsets that do not fit the values, tensors on several devices,
                a key twice, or inverse indices of other keys, or of bags that are not there.
        """
        check_content(self._values, self._lengths, self._offsets)
        devices = {str(tensor.device) for tensor in self._tensors()}
        if len(devices) > 1:
            raise ValueError(f"all tensors must be on one device, got {sorted(devices)}")
        if len(set(self._keys)) != len(self._keys):
            raise ValueError(f"keys must differ from each other, got {self._keys}")
        if self._inverse is not None:
            check_inverse(self._inverse, dict(zip(self._keys, self.stride_per_key(), strict=True)))
        return self
