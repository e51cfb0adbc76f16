"""Removal of padding ids from batches, as `padding_idx` of `nn.EmbeddingBag` leaves them out.

Tables skip the id -1: it adds nothing and is not trained, but MEAN divides by the length of the bag
with it. A padding id that is removed does not count in MEAN either.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from emblib.jagged.keyed_jagged_tensor import KeyedJaggedTensor


def drop_padding_from_bags(
    indices: Tensor,
    offsets: Tensor,
    padding_idx: int = -1,
    per_sample_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a batch without its padding ids; bags become shorter, none disappears.

    On a GPU the host waits for the number of ids that stay.

    Args:
        indices: int32 or int64 `[L]`.
        offsets: int32 or int64 `[bags + 1]`, from 0 to L.
        padding_idx: the id to remove.
        per_sample_weights: `[L]`, of the ids.

    Returns:
        `indices`, `offsets` and `per_sample_weights` of the ids that stay.

    Example:
        >>> ids, offsets = torch.tensor([3, 0, 0, 5]), torch.tensor([0, 2, 4])
        >>> emblib.jagged.drop_padding_from_bags(ids, offsets, padding_idx=0)[:2]
        (tensor([3, 5]), tensor([0, 1, 2]))
    """
    stay = indices != padding_idx
    weights = None if per_sample_weights is None else per_sample_weights[stay]
    return indices[stay], _offsets_of(stay, offsets), weights


def drop_padding(
    batch: KeyedJaggedTensor, padding_idx: int | Mapping[str, int] = -1
) -> KeyedJaggedTensor:
    """Return a batch without the padding ids of its features; bags become shorter.

    On a GPU the host waits for the number of ids that stay.

    Args:
        batch: ids, with or without weights.
        padding_idx: the id to remove, of all features or by key; other keys keep all ids.

    Raises:
        KeyError: the key of no feature.

    Example:
        >>> batch = emblib.KeyedJaggedTensor(
        ...     ["user", "seen"], torch.tensor([0, 0, 7]), lengths=torch.tensor([1, 2])
        ... )
        >>> emblib.jagged.drop_padding(batch, {"seen": 0})["seen"].values()
        tensor([7])
    """
    values, bounds = batch.values(), batch.offset_per_key()
    if isinstance(padding_idx, Mapping):
        unknown = sorted(padding_idx.keys() - set(batch.keys()))
        if unknown:
            raise KeyError(f"padding_idx names {unknown}, which are not among {batch.keys()}")
        stay = torch.ones_like(values, dtype=torch.bool)
        for key, begin, end in zip(batch.keys(), bounds[:-1], bounds[1:], strict=True):
            if key in padding_idx:
                stay[begin:end] = values[begin:end] != padding_idx[key]
    else:
        stay = values != padding_idx
    weights = batch.weights_or_none()
    is_varied = batch.variable_stride_per_key()
    return KeyedJaggedTensor(
        batch.keys(),
        values[stay],
        None if weights is None else weights[stay],
        offsets=_offsets_of(stay, batch.offsets()),
        stride=None if is_varied else batch.stride(),
        stride_per_key_per_rank=batch.stride_per_key_per_rank() if is_varied else None,
        inverse_indices=batch.inverse_indices_or_none(),
    )


def _offsets_of(stay: Tensor, offsets: Tensor) -> Tensor:
    """Return the offsets after dropping the ids for which `stay`, bool `[L]`, is false."""
    num_before = torch.cat([stay.new_zeros(1, dtype=torch.int64), stay.cumsum(0)])
    return num_before[offsets.to(torch.int64)].to(offsets.dtype)
