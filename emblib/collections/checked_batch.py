"""Checks of a batch that its collection reorders, splits or sends, and of the ids of any batch.

Kernels check the offsets that they get. But a collection may first cut the ids of a batch at
offsets that the host has read. Then each kernel gets as many ids as its offsets count, and cannot
notice wrong lengths. So `checked_batch` compares the offsets with the number of ids before the cut,
and raises, warns or repairs as `BoundsCheck` says. For a valid batch it compares only numbers that
the host needs for the cut.
"""

import warnings
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from emblib.jagged import KeyedJaggedTensor
from emblib.ops.route import is_captured
from emblib.specs import BoundsCheck
from emblib.tables.bounds_report import is_padded
from emblib.tables.parameters import caller_level
from emblib.tables.recomputation import is_recomputation

_LENGTHS_MESSAGE = (
    "offsets out of bounds: the lengths of the bags add up to {last_offset}, "
    "but there are {num_ids} ids"
)


def check_ids(ids: Tensor, *, allow_uint64: bool) -> None:
    """Raise unless the values of a batch can be ids; reads no values.

    Args:
        ids: the values.
        allow_uint64: whether uint64 is allowed too.

    Raises:
        TypeError: the dtype is not int32, int64 or, if allowed, uint64.
        ValueError: the number of dimensions is not 1.
    """
    is_integer = ids.dtype is torch.int64 or ids.dtype is torch.int32
    if not is_integer and not (allow_uint64 and ids.dtype is torch.uint64):
        raise TypeError(
            f"ids must be int32 or int64, got values of {ids.dtype}: make the KeyedJaggedTensor "
            "with values.to(torch.int64)"
        )
    if ids.dim() != 1:
        raise ValueError(
            f"ids must have 1 dimension, got values of {list(ids.shape)}: make the "
            "KeyedJaggedTensor with values.reshape(-1)"
        )


def checked_batch(batch: KeyedJaggedTensor, check: BoundsCheck) -> KeyedJaggedTensor:
    """Return a batch whose bags cover its ids in order: the batch itself if it is valid.

    Reads `offset_per_key` from the device if it is not known. The host cannot read it in graphs of
    `torch.compile` and `torch.export`, while a CUDA graph is captured, and of fake tensors: there a
    batch with an unknown `offset_per_key` is returned unchecked. A graph checks only the numbers
    that it knows while it is traced. Offsets that are wrong only within a feature are left to the
    kernels.

    Args:
        batch: the batch.
        check: the reaction to a batch that is not valid. Where it does not raise, a repaired batch
            is returned: offsets are clamped, and the last bag gets the ids after the last offset.

    Raises:
        RuntimeError: in modes FATAL and WARNING: a length is negative; ids other than -1 are before
            the first offset; or, in a batch with one feature, ids are after the last. In mode FATAL
            also another sum of lengths than the number of ids.
    """
    values = batch.values()
    is_unreadable = (
        is_captured(values) or isinstance(values, FakeTensor) or torch.compiler.is_compiling()
    )
    if batch.offset_per_key_or_none() is None and is_unreadable:
        return batch
    id_bounds, num_ids = batch.offset_per_key(), values.size(0)
    is_valid = _cover_ids(id_bounds, num_ids)
    is_valid = is_valid or not any(batch.stride_per_key())  # without bags no id is looked up
    return batch if is_valid else _repair(batch, check)


def _cover_ids(id_bounds: list[int], num_ids: int) -> bool:
    """Return whether bounds of features cover `num_ids` ids in order, or a graph has no numbers."""
    if torch.compiler.is_compiling():
        is_known_true = (
            torch.fx.experimental.symbolic_shapes.guard_or_true
        )  # Dynamo has imported it
        return (
            is_known_true(id_bounds[0] == 0)
            and is_known_true(id_bounds[-1] == num_ids)
            and all(is_known_true(begin <= end) for begin, end in pairwise(id_bounds))
        )
    return id_bounds[0] == 0 and id_bounds[-1] == num_ids and id_bounds == sorted(id_bounds)


def _repair(batch: KeyedJaggedTensor, check: BoundsCheck) -> KeyedJaggedTensor:
    """Return an invalid batch with repaired offsets, or raise as `checked_batch` describes."""
    offsets, values = batch.offsets(), batch.values()
    num_ids, first_offset, last_offset = values.size(0), int(offsets[0]), int(offsets[-1])
    is_reported = check in (BoundsCheck.FATAL, BoundsCheck.WARNING)
    if is_reported:
        _refuse_negative_lengths(batch)
        if first_offset != 0 and not is_padded() and bool((values[:first_offset] != -1).any()):
            raise RuntimeError(
                f"bounds_check: offsets must begin with 0, got {first_offset}: no bag would have "
                "the ids before it (are they offsets, not lengths?)"
            )
    if last_offset != num_ids and is_reported:
        message = _LENGTHS_MESSAGE.format(last_offset=last_offset, num_ids=num_ids)
        if check is BoundsCheck.FATAL or (last_offset < num_ids and len(batch.keys()) == 1):
            raise RuntimeError(f"bounds_check: {message} (are they offsets, not lengths?)")
        if not is_recomputation():
            warnings.warn(
                f"emblib: {message}; offsets are clamped, and the last bag, of feature "
                f"{batch.keys()[-1]!r}, gets ids that no bag has (are they offsets, not lengths? "
                "bounds_check=BoundsCheck.FATAL raises instead)",
                stacklevel=caller_level(),
            )
    clamped_offsets = offsets.clamp(0, num_ids).cummax(0).values
    clamped_offsets[-1] = num_ids
    return KeyedJaggedTensor.from_valid(
        batch.keys(),
        values,
        batch.weights_or_none(),
        None,
        clamped_offsets,
        batch.stride(),
        batch.inverse_indices_or_none(),
        batch.stride_per_key_per_rank() if batch.variable_stride_per_key() else None,
    )


def _refuse_negative_lengths(batch: KeyedJaggedTensor) -> None:
    """Raise RuntimeError if a length is negative: later bags would get ids of other bags."""
    negative_bags = (batch.offsets().diff() < 0).nonzero()
    if not len(negative_bags):
        return
    bag = int(negative_bags[0])
    bag_ends = list(accumulate(batch.stride_per_key()))
    feature_index = next(index for index, end in enumerate(bag_ends) if bag < end)
    length = int(batch.offsets()[bag + 1] - batch.offsets()[bag])
    raise RuntimeError(
        f"bounds_check: lengths must be >= 0, got {length} for bag "
        f"{bag - bag_ends[feature_index] + batch.stride_per_key()[feature_index]} of feature "
        f"{batch.keys()[feature_index]!r} (are they offsets that decrease?)"
    )
