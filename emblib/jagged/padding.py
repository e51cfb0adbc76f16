"""Removal of padding ids from batches, as `nn.EmbeddingBag` leaves `padding_idx` out.

Tables whose ids are row numbers skip the id -1: it adds nothing and is not trained, but counts in
the length of its bag, by which MEAN divides. For hash tables -1 is a key as any other. A removed id
neither counts nor is looked up. No function of this file changes the tensors of its arguments.
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

    On a GPU the host waits for the number of remaining ids.

    Args:
        indices: int32 or int64 `[L]`.
        offsets: int32 or int64 `[bags + 1]`, from 0 to L.
        padding_idx: the id to remove, as it is in the batch; unlike in `nn.EmbeddingBag` a negative
            one is not counted from the end of the table.
        per_sample_weights: `[L]`, one per id; differentiable.

    Returns:
        `indices`, `offsets` and `per_sample_weights` of the remaining ids, copied, in their dtypes;
        the weights are None if `per_sample_weights` is.

    Example:
        >>> ids, offsets = torch.tensor([3, 0, 0, 5]), torch.tensor([0, 2, 4])
        >>> emblib.jagged.drop_padding_from_bags(ids, offsets, padding_idx=0)[:2]
        (tensor([3, 5]), tensor([0, 1, 2]))
    """
    is_valid = indices != padding_idx
    positions = is_valid.nonzero().squeeze(1)  # the only wait for a GPU
    weights = None if per_sample_weights is None else per_sample_weights[positions]
    return indices[positions], _remaining_offsets(is_valid, offsets), weights


def drop_padding(
    batch: KeyedJaggedTensor, padding_idx: int | Mapping[str, int] = -1
) -> KeyedJaggedTensor:
    """Return a batch without the padding ids of its features; bags become shorter.

    On a GPU the host waits for the number of remaining ids and, with `padding_idx` by key, for the
    offsets of the keys if the batch has not read them.

    Args:
        batch: ids `[L]`, with or without weights.
        padding_idx: the id to remove, from all features or by key; other keys keep all ids.

    Raises:
        KeyError: the batch does not have the key.

    Example:
        >>> batch = emblib.KeyedJaggedTensor(
        ...     ["user", "seen"], torch.tensor([0, 0, 7]), lengths=torch.tensor([1, 2])
        ... )
        >>> emblib.jagged.drop_padding(batch, {"seen": 0})["seen"].values()
        tensor([7])
    """
    values = batch.values()
    if isinstance(padding_idx, Mapping):
        unknown_keys = sorted(padding_idx.keys() - set(batch.keys()))
        if unknown_keys:
            raise KeyError(f"padding_idx names {unknown_keys}, which are not among {batch.keys()}")
        is_valid = torch.ones_like(values, dtype=torch.bool)
        value_offsets = batch.offset_per_key()
        for key, begin, end in zip(
            batch.keys(), value_offsets[:-1], value_offsets[1:], strict=True
        ):
            if key in padding_idx:
                is_valid[begin:end] = values[begin:end] != padding_idx[key]
    else:
        is_valid = values != padding_idx
    positions = is_valid.nonzero().squeeze(1)
    weights = batch.weights_or_none()
    has_variable_stride = batch.variable_stride_per_key()
    return KeyedJaggedTensor(
        batch.keys(),
        values[positions],
        None if weights is None else weights[positions],
        offsets=_remaining_offsets(is_valid, batch.offsets()),
        stride=batch.stride(),
        stride_per_key_per_rank=batch.stride_per_key_per_rank() if has_variable_stride else None,
        inverse_indices=batch.inverse_indices_or_none(),
    )


def _remaining_offsets(is_valid: Tensor, offsets: Tensor) -> Tensor:
    """Return the offsets after removing the ids for which `is_valid`, bool `[L]`, is false."""
    num_before = torch.cat([is_valid.new_zeros(1, dtype=torch.int64), is_valid.cumsum(0)])
    return num_before[offsets.to(torch.int64)].to(offsets.dtype)
