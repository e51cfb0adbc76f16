"""Checks of the arguments of operators; they raise RuntimeError, as FBGEMM's checks do."""

from collections.abc import Sized

import torch
from torch import Tensor

DTYPES = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}
"""The dtypes that outputs can have, by the codes of `SparseType.as_int`."""


def check(condition: bool, message: str) -> None:
    """Raise RuntimeError with `message` unless the condition holds."""
    if not condition:
        raise RuntimeError(message)


def check_one_per(name: str, tensor: Tensor | None, thing: str, count: int) -> None:
    """Raise RuntimeError unless `tensor` is None or has `count` entries, one per `thing`."""
    if tensor is not None and tensor.numel() != count:
        raise RuntimeError(
            f"{name} must have one entry per {thing} = {count}, got {tensor.numel()}"
        )


def check_same_length(**arguments: Sized) -> None:
    """Raise RuntimeError, with the names, unless all arguments have the same length."""
    lengths = [len(argument) for argument in arguments.values()]
    check(
        len(set(lengths)) == 1, f"{', '.join(arguments)} must have the same length, got {lengths}"
    )


def check_ids(name: str, tensor: Tensor) -> None:
    """Raise RuntimeError unless `tensor` is int32 or int64 `[N]`."""
    if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(
            f"{name} must be int32 or int64 with 1 dimension, got {tensor.dtype} "
            f"{list(tensor.shape)}: flatten or convert it"
        )


def check_offsets(name: str, offsets: Tensor) -> None:
    """Raise RuntimeError unless `offsets` is int32 or int64 with 1 dimension, and not empty."""
    check_ids(name, offsets)
    check(offsets.numel() > 0, f"{name} must have one entry more than there are bags, got none")


def check_rows(name: str, tensor: Tensor, *, min_dim: int = 2) -> None:
    """Raise RuntimeError unless `tensor` has at least `min_dim` dimensions, `[..., D]`."""
    check(tensor.dim() >= min_dim, f"{name} must be rows [..., D], got {list(tensor.shape)}")
