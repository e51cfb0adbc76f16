"""Bags of different lengths: lengths to offsets and back, and what both must look like."""

import torch
from torch import Tensor

_INT32, _INT64 = torch.int32, torch.int64
_MOST_INT32 = 2**31 - 1


def offsets_from_lengths(lengths: Tensor) -> Tensor:
    """Offsets `[N + 1]` of bags with `lengths` `[...]` (flattened), in the same integer dtype.

    Raises:
        ValueError: lengths that are not integers, or negative (reads the device).
    """
    if lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lengths must be int32 or int64, got {lengths.dtype}")
    flat = lengths.flatten()
    if flat.numel() and int(flat.min()) < 0:
        raise ValueError(f"lengths must be >= 0, got {int(flat.min())}")
    return running_sums(flat)


def lengths_from_offsets(offsets: Tensor) -> Tensor:
    """Lengths `[N]` of the bags between `offsets` `[N + 1]`."""
    return offsets.diff()


def running_sums(lengths: Tensor) -> Tensor:
    """Offsets `[N + 1]` of `lengths` `[N]`, whatever they are: reads nothing back."""
    # One pass into the place the sums belong: a third faster than cumsum and cat.
    offsets = lengths.new_zeros(lengths.numel() + 1)
    torch.cumsum(lengths, 0, dtype=lengths.dtype, out=offsets[1:])
    return offsets


def flat_integers(tensor: Tensor, name: str) -> Tensor:
    """`tensor` as `[N]` of int32 or int64; an empty one of any dtype becomes int64.

    Raises:
        TypeError: another dtype, with elements.
    """
    if tensor.dtype not in (_INT32, _INT64):
        if tensor.numel():
            raise TypeError(
                f"{name} must be int32 or int64, got {tensor.dtype}: convert it, e.g. "
                f"{name}.to(torch.int64)"
            )
        tensor = tensor.to(_INT64)
    return tensor.reshape(-1)


def check_reach(tensor: Tensor, rows: int, name: str) -> None:
    """Raise ValueError if int32 `tensor` cannot count `rows` values."""
    if rows > _MOST_INT32 and tensor.dtype is _INT32:
        raise ValueError(
            f"int32 {name} count up to {_MOST_INT32} values, got {rows}: give {name}.long()"
        )


def no_tensor(name: str, given: object) -> TypeError:
    """The error of a `name` that is no tensor."""
    return TypeError(
        f"{name} must be a tensor, got {type(given).__name__}: e.g. {name}=torch.tensor(...)"
    )


def no_bags(name: str) -> ValueError:
    """The error of a `name` made without lengths and without offsets."""
    return ValueError(f"{name} needs lengths or offsets, got neither")


def too_few_weights(values: Tensor, weights: Tensor) -> ValueError:
    """The error of weights that are not one a value."""
    return ValueError(
        f"weights must be one a value, got {weights.size(0)} for {values.size(0)} values"
    )


def wrong_offsets(offsets: Tensor, lengths: Tensor | None) -> ValueError:
    """The error of offsets that are not one more than the bags."""
    bags = "" if lengths is None else f" = {lengths.numel()} + 1"
    return ValueError(
        f"offsets must have one entry more than there are bags{bags}, got {offsets.numel()}"
    )


def check_content(values: Tensor, lengths: Tensor | None, offsets: Tensor | None) -> None:
    """Raise ValueError unless the bags are `values`, one after the other (reads the device)."""
    rows = values.size(0)
    if offsets is not None:
        steps = offsets.diff()
        if not offsets.numel() or int(offsets[0]) != 0 or int(offsets[-1]) != rows:
            ends = (int(offsets[0]), int(offsets[-1])) if offsets.numel() else "none"
            raise ValueError(
                f"offsets must go from 0 to the number of values = {rows}, they go from/to {ends}"
            )
        if steps.numel() and int(steps.min()) < 0:
            bag = int(steps.argmin())
            raise ValueError(
                f"offsets must not fall, they do after bag {bag}: {offsets[bag : bag + 2].tolist()}"
            )
        if lengths is not None and not torch.equal(steps.to(lengths.dtype), lengths):
            raise ValueError("lengths and offsets must tell of the same bags: give only one")
    elif lengths is not None:
        if lengths.numel() and int(lengths.min()) < 0:
            raise ValueError(f"lengths must be >= 0, got {int(lengths.min())}")
        if int(lengths.sum()) != rows:
            raise ValueError(
                f"lengths must add up to the number of values = {rows}, got {int(lengths.sum())}"
            )
