"""Convert `torch.nested` tensors and the jagged types of other libraries.

Other types are recognised by TorchRec's accessors, not by their class.
"""

from typing import Any

import torch
from torch import Tensor

JaggedTensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""values, weights, lengths, offsets"""


def tensors_of_nested(nested: Tensor, weights: Tensor | None) -> JaggedTensors:
    """Return the tensors of jagged `nested` `[B, j, ...]`, and of `weights` of the same lengths.

    Raises:
        TypeError: another layout, or raggedness in another dimension.
        ValueError: weights of other lengths.
    """
    values, lengths, offsets = _ragged(nested)
    if weights is None:
        return values, None, lengths, offsets
    weight_values, their_lengths, their_offsets = _ragged(weights)
    own_lengths = offsets.diff() if lengths is None else lengths
    other_lengths = their_offsets.diff() if their_lengths is None else their_lengths
    if not torch.equal(own_lengths, other_lengths):
        raise ValueError("weights must have the lengths of the values")
    return values, weight_values, lengths, offsets


def _ragged(nested: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (packed values, lengths if there were holes, offsets)."""
    if not nested.is_nested or nested.layout is not torch.jagged:
        kind = f"a {'nested ' if nested.is_nested else ''}tensor of layout {nested.layout}"
        raise TypeError(
            f"the tensor must be nested, of layout torch.jagged, got {kind}: make it with "
            "torch.nested.nested_tensor(rows, layout=torch.jagged)"
        )
    ragged = getattr(nested, "_ragged_idx", 1)
    if ragged != 1:
        raise TypeError(f"bags must be ragged in dimension 1, got dimension {ragged}")
    values, offsets, lengths = nested.values(), nested.offsets(), nested.lengths()
    if lengths is None:
        return values, None, offsets
    # A view into a larger tensor: copy only the values of the bags.
    packed = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    first_positions = torch.repeat_interleave(offsets[:-1] - packed[:-1], lengths)
    return (
        values[first_positions + torch.arange(first_positions.numel(), device=values.device)],
        lengths,
        packed,
    )


def _need(other: Any, kind: str, *names: str) -> None:
    missing_names = [name for name in names if not callable(getattr(other, name, None))]
    if missing_names:
        raise TypeError(
            f"a {kind} must have {', '.join(f'{n}()' for n in names)}; {type(other).__name__} has "
            f"no {', '.join(f'{n}()' for n in missing_names)}"
        )


def _ask(other: Any, name: str, otherwise: Any = None) -> Any:
    accessor = getattr(other, name, None)
    return accessor() if callable(accessor) else otherwise


def jagged_tensors(other: Any) -> JaggedTensors:
    """Return the tensors of an object like a JaggedTensor.

    Raises:
        TypeError: no `values()` or no `lengths()`.
    """
    _need(other, "JaggedTensor", "values", "lengths")
    return other.values(), _ask(other, "weights_or_none"), other.lengths(), None


def keyed_jagged_arguments(other: Any) -> dict[str, Any]:
    """Return the contents of an object like a KeyedJaggedTensor, as constructor arguments.

    Raises:
        TypeError: no `keys()`, `values()` or `lengths()`.
    """
    _need(other, "KeyedJaggedTensor", "keys", "values", "lengths")
    keys = list(other.keys())
    arguments = {
        "keys": keys,
        "values": other.values(),
        "weights": _ask(other, "weights_or_none"),
        "lengths": other.lengths(),
    }
    if _ask(other, "variable_stride_per_key", False):
        strides = _ask(other, "stride_per_key_per_rank")
        arguments["stride_per_key_per_rank"] = (
            [[stride] for stride in other.stride_per_key()] if strides is None else strides
        )
        arguments["inverse_indices"] = _ask(other, "inverse_indices_or_none")
    elif not keys:
        arguments["stride"] = _ask(other, "stride")
    return arguments


def keyed_arguments(other: Any) -> dict[str, Any]:
    """Return the contents of an object like a KeyedTensor, as constructor arguments.

    Raises:
        TypeError: no `keys()`, `length_per_key()` or `values()`.
    """
    _need(other, "KeyedTensor", "keys", "length_per_key", "values")
    return {
        "keys": list(other.keys()),
        "length_per_key": list(other.length_per_key()),
        "values": other.values(),
        "key_dim": _ask(other, "key_dim", 1),
    }
