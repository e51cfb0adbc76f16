"""Pieces of several keyed tensors side by side, in another order."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Pieces(Protocol):
    """What is asked of a KeyedTensor."""

    def keys(self) -> list[str]:
        """The name of each piece."""
        ...

    def length_per_key(self) -> list[int]:
        """The size of each piece."""
        ...

    def values(self) -> Tensor:
        """All pieces in one tensor."""
        ...

    def key_dim(self) -> int:
        """The dimension that the pieces share."""
        ...


def regroup(tensors: Sequence[Pieces], groups: Sequence[Sequence[str]]) -> list[Tensor]:
    """For each group, the pieces of its keys side by side; errors are told at KeyedTensor.regroup.

    Each tensor is split once, so that backward puts one gradient of it together.
    """
    dims = {tensor.key_dim() for tensor in tensors}
    if len(dims) != 1:
        raise ValueError(
            f"regroup needs keyed tensors with the same key_dim, got {len(tensors)} with "
            f"{sorted(dims)}"
        )
    dim = dims.pop()
    pieces: dict[str, Tensor] = {}
    twice: set[str] = set()
    for tensor in tensors:
        keys = tensor.keys()
        if keys:
            twice.update(pieces.keys() & keys)
            found = tensor.values().split(tensor.length_per_key(), dim=dim)
            pieces.update(zip(keys, found, strict=True))
    try:
        wanted = [[pieces[key] for key in group] for group in groups]
    except KeyError as error:
        raise KeyError(f"no key {error.args[0]!r}; there are {list(pieces)}") from None
    if twice and (unclear := sorted(key for key in twice if any(key in group for group in groups))):
        raise ValueError(f"each key must be of one KeyedTensor, several have {unclear}")
    nothing = tensors[0].values().narrow(dim, 0, 0)
    return [torch.cat(group or [nothing], dim=dim) for group in wanted]
