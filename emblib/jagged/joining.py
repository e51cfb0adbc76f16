"""Several jagged tensors as one: the arguments of the KeyedJaggedTensor that holds them all."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from emblib.jagged.jagged_tensor import JaggedTensor
from emblib.jagged.keyed_bags import InverseIndices, KeyedBags


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
