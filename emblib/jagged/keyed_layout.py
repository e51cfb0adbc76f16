"""Keys, strides and offsets of keyed batches: checks, and the arguments of joined batches."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

from emblib.jagged.jagged_tensor import JaggedTensor, drop_first, num_padding
from emblib.specs.checks import check_bool

Strides = Sequence[Sequence[int]] | Tensor
"""Number of bags per feature and rank, `[F][R]`."""

InverseIndices = tuple[list[str], Tensor]
"""F keys, and the bag of each of B examples per key, int64 `[F, B]`."""


def block_offsets(lengths: Sequence[int]) -> list[int]:
    """Return the offsets of blocks with these lengths: each start, and the end of the last."""
    return list(accumulate(lengths, initial=0))


def num_padding_of(batch: Any) -> int:
    """Return the number of values of a KeyedJaggedTensor before its first bag.

    It is read as `num_padding` reads it, unless the host knows it.
    """
    value_offsets = batch.offset_per_key_or_none()
    if value_offsets is None or torch.compiler.is_compiling():
        return num_padding(batch.offsets_or_none())
    return max(int(value_offsets[0]), 0)


def first_position_of_keys(keys: Sequence[str]) -> dict[str, int]:
    """Return the position of each key; the first position of a repeated key."""
    first_position: dict[str, int] = {}
    for position, key in enumerate(keys):
        first_position.setdefault(key, position)
    return first_position


def is_consecutive(positions: Sequence[int]) -> bool:
    """Return whether positions ascend without gaps, or are empty."""
    return all(second == first + 1 for first, second in pairwise(positions))


def consecutive_blocks(tensor: Tensor, offsets: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Return the blocks at `positions` as one view; block f starts at `offsets[f]`.

    `is_consecutive(positions)` must hold; not checked.
    """
    if not positions:
        return tensor.narrow(0, 0, 0)
    start = offsets[positions[0]]
    return tensor.narrow(0, start, offsets[positions[-1] + 1] - start)


def list_of_keys(keys: Sequence[str]) -> list[str]:
    """Return `keys` as a new list.

    Raises:
        TypeError: `keys` is one string, or not iterable.
    """
    if isinstance(keys, str):
        raise TypeError(f"keys must be a list of names, got {keys!r}: write [{keys!r}]")
    if not isinstance(keys, Iterable):
        raise TypeError(f"keys must be a list of names, got {keys!r}")
    return list(keys)


def checked_lengths(lengths: Sequence[int], keys: Sequence[str], num_values: int) -> list[int]:
    """Return `length_per_key` as a list; `num_values` is the number of values of the batch.

    Raises:
        ValueError: there is not one length per key, or their sum is not the number of values.
    """
    counts = list(lengths)
    if len(counts) != len(keys) or sum(counts) != num_values:
        raise ValueError(
            f"length_per_key must have one entry per key = {len(keys)} and add up to the number of "
            f"values = {num_values}, got {counts}"
        )
    return counts


def stride_lists(strides: Sequence[Sequence[int]] | Tensor) -> list[list[int]]:
    """Return `stride_per_key_per_rank` as new lists `[F][R]`; a tensor is read from its device."""
    if isinstance(strides, Tensor):
        return strides.tolist()
    return [list(row) for row in strides]


def bags_per_key(strides: list[list[int]], num_keys: int, num_bags: int) -> list[int]:
    """Return the number of bags of each feature over all ranks.

    Args:
        strides: number of bags per feature and rank, `[F][R]`.
        num_keys: number of features of the batch.
        num_bags: number of bags of the batch.

    Raises:
        ValueError: there is not one list per key, the lists differ in length, a number is negative,
            or the sum is not the number of bags.
    """
    if len(strides) != num_keys or len({len(row) for row in strides}) > 1:
        raise ValueError(
            f"stride_per_key_per_rank must have one list per key = {num_keys}, of the same number "
            f"of ranks, got {len(strides)} of {sorted({len(row) for row in strides})}"
        )
    num_bags_of_keys = [sum(row) for row in strides]
    if sum(num_bags_of_keys) != num_bags or any(count < 0 for row in strides for count in row):
        raise ValueError(
            "stride_per_key_per_rank must be >= 0 and add up to the number of bags = "
            f"{num_bags}, got {strides}"
        )
    return num_bags_of_keys


def cached_strides(
    stride: int | None,
    strides: Strides | None,
    stride_per_key: Sequence[int] | None = None,
    lengths_offset_per_key: object = None,
    offset_per_key: object = None,
    index_per_key: object = None,
    jt_dict: object = None,
) -> Strides | None:
    """Return `stride_per_key_per_rank` of a batch with the fields that TorchRec's batches cache.

    If `stride` or `strides` is not None, or `stride_per_key` is None, return `strides`. Otherwise
    return `[[bags] of each feature]`, or None if all features have the same number of bags. The
    other fields are ignored; a field of another name raises TypeError.
    """
    if stride is not None or strides is not None or stride_per_key is None:
        return strides
    return [[count] for count in stride_per_key] if len(set(stride_per_key)) > 1 else None


def refuse_stride(stride: int, num_keys: int, num_bags: int) -> NoReturn:
    """Raise ValueError: the number of bags is not `stride` per key."""
    raise ValueError(
        f"lengths must have the same number of bags for every key, got {num_bags} for "
        f"{num_keys} keys"
        + (f" with stride {stride}" if num_bags == 0 or num_bags % max(num_keys, 1) == 0 else "")
        + ": where features differ in it give stride_per_key_per_rank"
    )


def as_inverse_indices(inverse: Any) -> InverseIndices:
    """Return `inverse`; raise TypeError unless it is a pair of keys and a tensor."""
    is_pair = isinstance(inverse, tuple | list) and len(inverse) == 2
    if not is_pair or not isinstance(inverse[1], Tensor):
        raise TypeError(
            f"inverse_indices must be a pair of keys and a tensor [F, B], got {inverse!r}"
        )
    pair: InverseIndices = inverse
    return pair


def keys_and_shape(inverse: InverseIndices | None) -> Any:
    """Return what inverse indices must share to be copied; None without them."""
    return inverse and (list(inverse[0]), inverse[1].shape)


def implied_stride(num_bags_of_keys: Sequence[int], inverse: InverseIndices | None) -> int:
    """Return the batch size that inverse indices `[F, B]` have; without them the most bags."""
    return max(num_bags_of_keys, default=0) if inverse is None else inverse[1].size(-1)


def check_inverse(inverse: InverseIndices, num_bags: dict[str, int]) -> None:
    """Raise ValueError unless `inverse` has a row of valid bags for each key; reads the device.

    `num_bags` is the number of bags by key. Rows of further keys are allowed: after a split of a
    batch they belong to its other parts.
    """
    keys, indices = inverse
    if not num_bags.keys() <= set(keys) or indices.dim() != 2 or indices.size(0) != len(keys):
        raise ValueError(
            f"inverse_indices must be keys and one row for each, of {sorted(num_bags)} at least, "
            f"got {sorted(keys)} and {list(indices.shape)}"
        )
    for key, row in zip(keys, indices, strict=True):
        if (
            key in num_bags
            and row.numel()
            and not 0 <= int(row.min()) <= int(row.max()) < num_bags[key]
        ):
            raise ValueError(
                f"the inverse indices of {key!r} must be bags 0 to {num_bags[key] - 1}, got "
                f"{int(row.min())} to {int(row.max())}"
            )


def dict_arguments(
    jagged: Mapping[str, JaggedTensor], *, force_variable_stride: bool
) -> dict[str, Any]:
    """Return the arguments of the `KeyedJaggedTensor` of one JaggedTensor per feature.

    Strides per key are passed if the features differ in their bags, or with
    `force_variable_stride`.

    Raises:
        TypeError: `jagged` is not a dict, `force_variable_stride` is not a bool, or a value is not
            a JaggedTensor.
        ValueError: there are no features, or only some of them have weights.
    """
    check_bool("force_variable_stride", force_variable_stride)
    if not isinstance(jagged, Mapping):
        raise TypeError(f"jt_dict must be a dict of one JaggedTensor per feature, got {jagged!r}")
    if not jagged:
        raise ValueError("from_jt_dict needs a feature, got none: use KeyedJaggedTensor.empty()")
    tensors = [JaggedTensor.adopt(tensor) for tensor in jagged.values()]
    lengths = [tensor.lengths() for tensor in tensors]
    strides = [tensor.numel() for tensor in lengths]
    has_variable_stride = force_variable_stride or len(set(strides)) > 1
    paddings = [num_padding(tensor.offsets_or_none()) for tensor in tensors]
    return {
        "keys": list(jagged),
        **_join_values(tensors, paddings),
        "lengths": torch.cat(lengths),
        "stride_per_key_per_rank": [[stride] for stride in strides]
        if has_variable_stride
        else None,
    }


def concat_arguments(batches: Sequence[Any]) -> dict[str, Any]:
    """Return the arguments of the `KeyedJaggedTensor` that combines batches of the same examples.

    Raises:
        ValueError: there are no batches, only some of them have weights, or strides, numbers of
            ranks or inverse indices do not fit each other.
    """
    if not batches:
        raise ValueError("concat needs a batch, got none: use KeyedJaggedTensor.empty()")
    # `KeyedJaggedTensor.empty()` fits any number of examples.
    strides = {batch.stride() for batch in batches if batch.keys() or batch.stride()}
    has_variable_stride = any(batch.variable_stride_per_key() for batch in batches)
    has_inverse = any(batch.inverse_indices_or_none() is not None for batch in batches)
    lengths_of_batches = [batch.length_per_key_or_none() for batch in batches]
    paddings = [num_padding_of(batch) for batch in batches]
    if len(strides) > 1 and (not has_variable_stride or has_inverse):
        raise ValueError(f"batches must have the same stride, got {sorted(strides)}")
    return {
        "keys": [key for batch in batches for key in batch.keys()],  # noqa: SIM118
        **_join_values(batches, paddings),
        "lengths": torch.cat([batch.lengths() for batch in batches]),
        "stride": max(strides, default=0),
        "stride_per_key_per_rank": _join_strides(batches) if has_variable_stride else None,
        "inverse_indices": _join_inverse(batches) if has_inverse else None,
        "length_per_key": None
        if None in lengths_of_batches
        else [length for lengths in lengths_of_batches for length in lengths or ()],
    }


def empty_arguments(batch: Any) -> dict[str, Any]:
    """Return the arguments of `KeyedJaggedTensor.from_valid` for a batch without features.

    It has the dtypes, the device and the stride of `batch`.
    """
    weights = batch.weights_or_none()
    return {
        "keys": [],
        "values": batch.values().new_empty(0),
        "weights": None if weights is None else weights.new_empty(0),
        "lengths": batch.lengths().new_empty(0),
        "offsets": None,
        "stride": batch.stride(),
        "strides": [] if batch.variable_stride_per_key() else None,
    }


def _join_strides(batches: Sequence[Any]) -> list[list[int]]:
    """Join `stride_per_key_per_rank` of batches; a batch of equal strides counts as one rank.

    Raises ValueError if the numbers of ranks differ.
    """
    rank_counts = {len(row) for batch in batches for row in batch.stride_per_key_per_rank()}
    has_equal_strides = any(
        batch.keys() and not batch.variable_stride_per_key() for batch in batches
    )
    if len(rank_counts) > 1 or (has_equal_strides and rank_counts != {1}):
        raise ValueError(
            "batches of variable stride must have the same number of ranks, got "
            f"{[len(row) for batch in batches for row in batch.stride_per_key_per_rank()[:1]]}: "
            "give all of them stride_per_key_per_rank"
        )
    joined_strides: list[list[int]] = []
    for batch in batches:
        strides = batch.stride_per_key_per_rank()
        joined_strides += strides or [[stride] for stride in batch.stride_per_key()]
    return joined_strides


def _join_inverse(batches: Sequence[Any]) -> InverseIndices:
    """Join the inverse indices of batches.

    A batch of equal strides may have none. Raises ValueError if one of variable stride has none, or
    if those of a batch lack one of its keys.
    """
    keys: list[str] = []
    index_rows: list[Tensor] = []
    for batch in batches:
        batch_keys, inverse = batch.keys(), batch.inverse_indices_or_none()
        if not batch_keys:
            continue
        if inverse is None:
            if batch.variable_stride_per_key():
                raise ValueError(
                    "inverse_indices must be in all batches of variable stride or in none, "
                    f"{batch!r} has none"
                )
            # Without inverse indices every example has its own bag.
            identity = torch.arange(batch.stride(), device=batch.device())
            index_rows.append(identity.expand(len(batch_keys), -1))
        elif inverse[0] == batch_keys:
            index_rows.append(inverse[1])
        else:
            position_by_key = first_position_of_keys(inverse[0])
            if not set(batch_keys) <= position_by_key.keys():
                raise ValueError(
                    f"inverse_indices must have a row per key, {batch_keys}, got {inverse[0]}"
                )
            index_rows.append(inverse[1][[position_by_key[key] for key in batch_keys]])
        keys += batch_keys
    if not index_rows:
        return next(batch.inverse_indices() for batch in batches if batch.inverse_indices_or_none())
    return keys, torch.cat(index_rows)


def _join_values(tensors: Sequence[Any], paddings: Sequence[int]) -> dict[str, Tensor | None]:
    """Return "values" and "weights" of jagged tensors, concatenated without their padding.

    The weights are None if no tensor has any. Raises ValueError if only some have.
    """
    pairs = list(zip(tensors, paddings, strict=True))
    weights = [
        drop_first(tensor.weights_or_none(), padding)
        for tensor, padding in pairs
        if tensor.weights_or_none() is not None
    ]
    if weights and len(weights) != len(pairs):
        raise ValueError(
            f"all or none must have weights, got them in {len(weights)} of {len(pairs)}"
        )
    return {
        "values": torch.cat([drop_first(tensor.values(), padding) for tensor, padding in pairs]),
        "weights": torch.cat(weights) if weights else None,
    }
