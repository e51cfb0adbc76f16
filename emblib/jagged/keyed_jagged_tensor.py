"""The bags of several features: a batch of a recommender system's sparse inputs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from emblib.jagged import convert
from emblib.jagged.jagged_tensor import JaggedTensor, bags_text, keyed_text
from emblib.jagged.keyed_bags import InverseIndices, KeyedBags, Strides, is_run, span
from emblib.ops.route import gather_segments


def _join_weights(weights: Sequence[Tensor | None]) -> Tensor | None:
    present = [tensor for tensor in weights if tensor is not None]
    if not present:
        return None
    if len(present) != len(weights):
        raise ValueError(
            f"weights must be in all or in none, got them in {len(present)} of {len(weights)}"
        )
    return torch.cat(present)


def dict_arguments(
    jagged: Mapping[str, JaggedTensor], *, force_variable_stride: bool
) -> dict[str, Any]:
    """Of one JaggedTensor a feature.

    Raises:
        ValueError: none at all, or weights in some of them only.
    """
    if not jagged:
        raise ValueError("from_jt_dict needs a feature, got none: use KeyedJaggedTensor.empty()")
    lengths = [one.lengths() for one in jagged.values()]
    strides = [one.numel() for one in lengths]
    varied = force_variable_stride or len(set(strides)) > 1
    return {
        "keys": list(jagged),
        "values": torch.cat([one.values() for one in jagged.values()]),
        "weights": _join_weights([one.weights_or_none() for one in jagged.values()]),
        "lengths": torch.cat(lengths),
        "stride_per_key_per_rank": [[stride] for stride in strides] if varied else None,
    }


def concat_arguments(batches: Sequence[KeyedBags]) -> dict[str, Any]:
    """Of several batches of the same examples.

    Raises:
        ValueError: no batches, different strides, or weights in some of them only.
    """
    if not batches:
        raise ValueError("concat needs a batch, got none: use KeyedJaggedTensor.empty()")
    # A batch without features has no examples to differ in.
    strides = {batch.stride() for batch in batches if batch.keys()}
    varied = any(batch.variable_stride_per_key() for batch in batches)
    merged = any(batch.inverse_indices_or_none() is not None for batch in batches)
    if len(strides) > 1 and (not varied or merged):
        raise ValueError(f"batches must have the same stride, got {sorted(strides)}")
    return {
        "keys": [key for batch in batches for key in batch.keys()],  # noqa: SIM118
        "values": torch.cat([batch.values() for batch in batches]),
        "weights": _join_weights([batch.weights_or_none() for batch in batches]),
        "lengths": torch.cat([batch.lengths() for batch in batches]),
        "stride": None if varied else max(strides, default=0),
        "stride_per_key_per_rank": _join_strides(batches) if varied else None,
        "inverse_indices": _join_inverse(batches) if merged else None,
    }


def _join_strides(batches: Sequence[KeyedBags]) -> list[list[int]]:
    ranks = {len(row) for batch in batches for row in batch.stride_per_key_per_rank()}
    if len(ranks) > 1 or (ranks != {1} and not all(b.variable_stride_per_key() for b in batches)):
        raise ValueError(
            "batches of variable stride must tell of the same number of ranks, got "
            f"{[len(row) for b in batches for row in b.stride_per_key_per_rank()[:1]]}: give all "
            "of them stride_per_key_per_rank"
        )
    joined: list[list[int]] = []
    for batch in batches:
        own = batch.stride_per_key_per_rank()
        joined += own or [[stride] for stride in batch.stride_per_key()]
    return joined


def _join_inverse(batches: Sequence[KeyedBags]) -> InverseIndices:
    keys: list[str] = []
    rows: list[Tensor] = []
    for batch in batches:
        own, inverse = batch.keys(), batch.inverse_indices_or_none()
        if inverse is None:
            if batch.variable_stride_per_key():
                raise ValueError(
                    "inverse_indices must be in all batches of variable stride or in none, "
                    f"{batch!r} has none"
                )
            # Every example is a bag of its own.
            every = torch.arange(batch.stride(), device=batch.device())
            rows.append(every.expand(len(own), -1))
        elif inverse[0] == own:
            rows.append(inverse[1])
        else:
            place = {key: i for i, key in enumerate(inverse[0])}
            rows.append(inverse[1][[place[key] for key in own]])
        keys += own
    return keys, torch.cat(rows)


class KeyedJaggedTensor(KeyedBags):
    """F features of B examples each: a bag of values for every feature of every example.

    Key-major: bag `f * B + b` is that of feature f and example b, and lies at
    `values[offsets[f * B + b]:offsets[f * B + b + 1]]`. B is called the stride. Where features
    differ in it (VBE, e.g. because equal examples were merged), `stride_per_key_per_rank` says how
    many bags each has, and `inverse_indices` which of them each example of the whole batch means.

    What is told on the host (`length_per_key` and its like) is read back from the device once, and
    goes along to what is made of this object. Tensors are not copied. Overwrite the lengths of one
    that was asked for these numbers or its offsets with `copy_` only.

    Args:
        keys: the name of each feature.
        values: `[L]` ids or `[L, ...]` rows of all bags, one after the other.
        weights: `[L, ...]`, one a value.
        lengths: int32 or int64 `[F * B]`. Of lengths and offsets one is enough, the other is made
            when it is asked for.
        offsets: int32 or int64 `[F * B + 1]`, from 0 to L.
        stride: B; left out, it is as many bags as there are per key.
        stride_per_key_per_rank: `[F][R]` on the host, where features differ in their bags.
        inverse_indices: keys and int64 `[F, B]`, the bag of each feature that an example means.

    Raises:
        ValueError: neither lengths nor offsets, or sizes that do not go together.
        TypeError: lengths or offsets that are not integers.
    """

    __slots__ = ()

    # Ways to make one

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
        """Of `lengths`, with `length_per_key` read back at once."""
        rest = (stride, stride_per_key_per_rank, inverse_indices)
        return KeyedJaggedTensor(keys, values, weights, lengths, None, *rest).sync()

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
        """Of `offsets`, with `length_per_key` read back at once."""
        rest = (stride, stride_per_key_per_rank, inverse_indices)
        return KeyedJaggedTensor(keys, values, weights, None, offsets, *rest).sync()

    @staticmethod
    def from_jt_dict(
        jagged: Mapping[str, JaggedTensor], *, force_variable_stride: bool = False
    ) -> "KeyedJaggedTensor":
        """Of one JaggedTensor a feature; where they differ in bags, of variable stride."""
        arguments = dict_arguments(jagged, force_variable_stride=force_variable_stride)
        return KeyedJaggedTensor(**arguments)

    @staticmethod
    def from_nested(nested: Mapping[str, Tensor]) -> "KeyedJaggedTensor":
        """Of one `torch.nested` tensor of jagged layout `[B, j, ...]` a feature."""
        jagged = {key: JaggedTensor.from_nested(tensor) for key, tensor in nested.items()}
        return KeyedJaggedTensor.from_jt_dict(jagged)

    @staticmethod
    def adopt(other: Any) -> "KeyedJaggedTensor":
        """What any object with TorchRec's accessors holds, e.g. a torchrec.KeyedJaggedTensor."""
        if isinstance(other, KeyedJaggedTensor):
            return other
        return KeyedJaggedTensor(**convert.keyed_jagged_arguments(other))

    @staticmethod
    def concat(batches: Sequence["KeyedJaggedTensor"]) -> "KeyedJaggedTensor":
        """The features of all `batches`, of the same examples.

        Raises:
            ValueError: no batches, different strides, or weights in some of them only.
        """
        made = KeyedJaggedTensor(**concat_arguments(batches))
        known = [batch._length_per_key for batch in batches]
        if all(lengths is not None for lengths in known):
            made._length_per_key = [length for lengths in known for length in lengths or ()]
        return made

    @staticmethod
    def empty(
        *,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """No features and no values."""
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        lengths = torch.empty(0, dtype=lengths_dtype, device=device)
        values = torch.empty(0, dtype=values_dtype, device=device)
        return KeyedJaggedTensor([], values, weights, lengths, stride=0)

    @staticmethod
    def empty_like(
        batch: "KeyedJaggedTensor", device: torch.device | str | None = None
    ) -> "KeyedJaggedTensor":
        """No features, in the dtypes of `batch`; with a `device`, its keys and shapes, unfilled.

        The second is a place on that device for `copy_`.
        """
        if device is not None:
            return batch._mapped(lambda t: torch.empty_like(t, device=device))
        weights = None if batch._weights is None else batch._weights.new_empty(0)
        lengths = batch.lengths().new_empty(0)
        return KeyedJaggedTensor([], batch._values.new_empty(0), weights, lengths, stride=0)

    # Parts of it

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of one feature, as views."""
        place = self.index_per_key().get(key)
        if place is None:
            raise KeyError(f"no feature {key!r}; there are {self._keys}")
        ends = self.offset_per_key()
        start, end = ends[place], ends[place + 1]
        if self._strides is None:
            first, last = place * self._stride, (place + 1) * self._stride
        else:
            first, last = self.lengths_offset_per_key()[place : place + 2]
        weights = None if self._weights is None else self._weights[start:end]
        return JaggedTensor._of(self._values[start:end], weights, self.lengths()[first:last], None)

    def to_dict(self) -> dict[str, JaggedTensor]:
        """The bags of each feature, as views."""
        sizes = self.length_per_key()
        values = self._values.split(sizes)
        weights = [None] * len(sizes) if self._weights is None else self._weights.split(sizes)
        lengths = self.lengths().split(self.stride_per_key())
        of = JaggedTensor._of
        parts = zip(self._keys, values, weights, lengths, strict=True)
        return {key: of(v, w, n, None) for key, v, w, n in parts} if sizes else {}

    def split(self, segments: Sequence[int]) -> list["KeyedJaggedTensor"]:
        """The first `segments[0]` features, the next `segments[1]`, ...; all of them, as views.

        Raises:
            ValueError: segments that do not add up to the number of keys.
        """
        if sum(segments) != len(self._keys) or any(count < 0 for count in segments):
            raise ValueError(
                f"segments must be >= 0 and add up to the number of keys = {len(self._keys)}, got "
                f"{list(segments)}"
            )
        parts, first = [], 0
        for count in segments:
            parts.append(self._part(range(first, first + count)))
            first += count
        return parts

    def permute(
        self, indices: Sequence[int], indices_tensor: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """The features with these places, in this order; omissions and repeats are welcome.

        Features that follow each other here already are views. `indices_tensor`: the same on the
        device, for those who have it.

        Raises:
            IndexError: a place that is not there.
        """
        if any(not 0 <= i < len(self._keys) for i in indices):
            raise IndexError(f"places must be 0 to {len(self._keys) - 1}, got {list(indices)}")
        return self._part(indices, indices_tensor)

    def _part(self, order: Sequence[int], place: Tensor | None = None) -> "KeyedJaggedTensor":
        sizes = self.length_per_key()
        part = self._span(order) if is_run(order) else self._gathered(order, place)
        keys, strides = self._keys, self._strides
        made = KeyedJaggedTensor._of(
            [keys[i] for i in order],
            *part,
            None,
            self._stride,
            self._inverse,
            None if strides is None else [strides[i] for i in order],
        )
        made._length_per_key = [sizes[i] for i in order]
        return made

    def _span(self, order: Sequence[int]) -> tuple[Tensor, Tensor | None, Tensor]:
        """Values, weights and lengths of features that follow each other, as views."""
        ends, weights = self.offset_per_key(), self._weights
        return (
            span(self._values, ends, order),
            None if weights is None else span(weights, ends, order),
            span(self.lengths(), self.lengths_offset_per_key(), order),
        )

    def _gathered(
        self, order: Sequence[int], place: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Values, weights and lengths of the features of `order`, copied."""
        values, weights, lengths = self._values, self._weights, self.lengths()
        if place is None:
            place = torch.tensor(order, device=values.device)
        else:
            place = place.to(torch.int64)
        bags, sizes = self.stride_per_key(), self.length_per_key()
        if self._strides is None and self._stride and self._offsets is not None:
            starts = self._offsets[:: self._stride]
        else:
            starts = torch.tensor(self.offset_per_key(), device=values.device)
        if self._strides is None:
            taken = lengths.view(len(sizes), -1).index_select(0, place).view(-1)
        else:
            first_bags = torch.tensor(self.lengths_offset_per_key(), device=values.device)
            taken = gather_segments(lengths, first_bags, place, sum(bags[i] for i in order))
        total = sum(sizes[i] for i in order)
        return (
            gather_segments(values, starts, place, total),
            None if weights is None else gather_segments(weights, starts, place, total),
            taken,
        )

    def flatten_lengths(self) -> "KeyedJaggedTensor":
        """Itself: lengths are `[F * B]` always."""
        return self

    # As other things

    def to_nested(self) -> dict[str, Tensor]:
        """One `torch.nested` tensor of jagged layout `[B, j, ...]` a feature, sharing memory."""
        return {key: jagged.to_nested() for key, jagged in self.to_dict().items()}

    def as_type(self, kind: Any) -> Any:
        """The same tensors in another class with this constructor, e.g. TorchRec's own."""
        strides = None if self._strides is None else torch.tensor(self._strides)
        return kind(
            keys=self._keys,
            values=self._values,
            weights=self._weights,
            lengths=self._lengths,
            offsets=self._offsets,
            stride=self._stride if strides is None else None,
            stride_per_key_per_rank=strides,
            inverse_indices=self._inverse,
        )

    # Devices

    def to(
        self,
        device: torch.device | str,
        *,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> "KeyedJaggedTensor":
        """On `device`, weights as `dtype`."""
        moved = self._mapped(lambda t: t.to(device, non_blocking=non_blocking))
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        return moved

    def pin_memory(self) -> "KeyedJaggedTensor":
        """In page-locked memory, from where copies to a GPU need not wait."""
        return self._mapped(lambda t: t.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until what `stream` has to do is done."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def copy_(
        self, other: "KeyedJaggedTensor", *, non_blocking: bool = False
    ) -> "KeyedJaggedTensor":
        """Overwrite every tensor it holds with that of `other`, of equal keys and sizes.

        Raises:
            ValueError: other keys or strides, or weights or inverse indices in one of them only.
        """
        same = (
            self._keys == other._keys
            and self.stride_per_key() == other.stride_per_key()
            and self._values.shape == other._values.shape
            and (self._weights is None) == (other._weights is None)
            and (self._inverse is None) == (other._inverse is None)
        )
        if not same:
            raise ValueError(
                f"copy_ needs a batch like {self!r}, got {other!r}: make the place for it with "
                "empty_like(batch, device)"
            )
        self._values.copy_(other._values, non_blocking=non_blocking)
        if self._weights is not None:
            self._weights.copy_(other.weights(), non_blocking=non_blocking)
        if self._lengths is not None:
            self._lengths.copy_(other.lengths(), non_blocking=non_blocking)
        if self._offsets is not None:
            self._offsets.copy_(other.offsets(), non_blocking=non_blocking)
        if self._inverse is not None:
            self._inverse[1].copy_(other.inverse_indices()[1], non_blocking=non_blocking)
        self._length_per_key, self._offset_per_key = other._length_per_key, other._offset_per_key
        return self

    def clear_storage(self) -> int:
        """Give the memory of its tensors back now, whoever else sees it; returns how many bytes."""
        freed = self.size_in_bytes()
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)
        return freed

    def _mapped(self, change: Callable[[Tensor], Tensor]) -> "KeyedJaggedTensor":
        weights, lengths, offsets = self._weights, self._lengths, self._offsets
        inverse = self._inverse
        made = KeyedJaggedTensor._of(
            self._keys,
            change(self._values),
            None if weights is None else change(weights),
            None if lengths is None else change(lengths),
            None if offsets is None else change(offsets),
            self._stride,
            None if inverse is None else (inverse[0], change(inverse[1])),
            self._strides,
        )
        made._index = self._index
        made._length_per_key, made._offset_per_key = self._length_per_key, self._offset_per_key
        return made

    def __reduce__(self) -> Any:
        return KeyedJaggedTensor, (
            *(self._keys, self._values, self._weights, self._lengths, self._offsets),
            *(None if self._strides else self._stride, self._strides, self._inverse),
        )

    def __str__(self) -> str:
        of = {
            k: bags_text(j.values(), j.weights_or_none(), j.lengths())
            for k, j in self.to_dict().items()
        }
        return keyed_text("KeyedJaggedTensor", of)

    def __repr__(self) -> str:
        weighted = "" if self._weights is None else ", weighted"
        bags = self._stride if self._strides is None else self._stride_per_key
        return (
            f"KeyedJaggedTensor({self._keys}, {bags} bags each, {list(self._values.shape)} "
            f"{self._values.dtype}{weighted}, {self.device()})"
        )
