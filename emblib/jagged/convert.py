"""Convert `torch.nested` tensors and the jagged types of other libraries.

Other types are recognised by TorchRec's accessors, not by their class.
"""

from typing import Any

import torch
from torch import Tensor

JaggedTensors = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Values, weights, lengths and offsets: the arguments of `JaggedTensor`, in its order."""


def tensors_of_nested(nested: Tensor, weights: Tensor | None) -> JaggedTensors:
    """Return the tensors of jagged `nested` `[B, j, ...]`, and of `weights` of the same lengths.

    They share the memory of the arguments unless there are holes between bags. With weights or
    holes the function waits for a GPU, to compare the lengths or to pack the bags.

    Raises:
        TypeError: `nested` is not a nested tensor, has another layout, or is ragged in another
            dimension.
        ValueError: the weights have other lengths.
    """
    values, lengths, offsets = _unpack_nested(nested)
    if weights is None:
        return values, None, lengths, offsets
    weight_values, raw_weight_lengths, weight_offsets = _unpack_nested(weights)
    value_lengths = offsets.diff() if lengths is None else lengths
    weight_lengths = weight_offsets.diff() if raw_weight_lengths is None else raw_weight_lengths
    if not torch.equal(value_lengths, weight_lengths):
        raise ValueError("weights must have the lengths of the values")
    return values, weight_values, lengths, offsets


def _unpack_nested(nested: Any) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return packed values, lengths (None unless the values had holes) and offsets."""
    is_tensor = isinstance(nested, Tensor)
    if not is_tensor or not nested.is_nested or nested.layout is not torch.jagged:
        kind = f"a {type(nested).__name__}"
        if is_tensor:
            kind = f"a {'nested ' if nested.is_nested else ''}tensor of layout {nested.layout}"
        raise TypeError(
            f"the tensor must be nested, of layout torch.jagged, got {kind}: make it with "
            "torch.nested.nested_tensor(rows, layout=torch.jagged)"
        )
    ragged_dim = getattr(nested, "_ragged_idx", 1)
    if ragged_dim != 1:
        raise TypeError(f"bags must be ragged in dimension 1, got dimension {ragged_dim}")
    values, offsets, lengths = nested.values(), nested.offsets(), nested.lengths()
    if lengths is None:
        return values, None, offsets
    # A view into a larger tensor: copy only the values of the bags.
    packed_offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    shifts = torch.repeat_interleave(offsets[:-1] - packed_offsets[:-1], lengths)
    return (
        values[shifts + torch.arange(shifts.numel(), device=values.device)],
        lengths,
        packed_offsets,
    )


def require_accessors(other: Any, kind: str, *names: str) -> None:
    """Raise TypeError unless an object has all methods `names` of a `kind` of tensor."""
    missing_names = [name for name in names if not callable(getattr(other, name, None))]
    if missing_names:
        raise TypeError(
            f"a {kind} must have {', '.join(f'{name}()' for name in names)}; "
            f"{type(other).__name__} has no {', '.join(f'{name}()' for name in missing_names)}"
        )


def _call_accessor(other: Any, name: str, default: Any = None) -> Any:
    """Return `other.name()`, or the default if there is no such method."""
    accessor = getattr(other, name, None)
    return accessor() if callable(accessor) else default


def jagged_tensors(other: Any) -> JaggedTensors:
    """Return the tensors of an object with the accessors of a JaggedTensor, without copying them.

    Raises:
        TypeError: the object has no `values()` or no `lengths()`.
    """
    require_accessors(other, "JaggedTensor", "values", "lengths")
    return other.values(), _call_accessor(other, "weights_or_none"), other.lengths(), None


def keyed_jagged_arguments(other: Any) -> dict[str, Any]:
    """Return arguments of `KeyedJaggedTensor` from an object with its accessors; copy no tensors.

    Raises:
        TypeError: the object has no `keys()`, `values()` or `lengths()`.
    """
    require_accessors(other, "KeyedJaggedTensor", "keys", "values", "lengths")
    keys = list(other.keys())
    arguments = {
        "keys": keys,
        "values": other.values(),
        "weights": _call_accessor(other, "weights_or_none"),
        "lengths": other.lengths(),
    }
    if _call_accessor(other, "variable_stride_per_key", False):
        strides = _call_accessor(other, "stride_per_key_per_rank")
        arguments["stride_per_key_per_rank"] = (
            [[stride] for stride in other.stride_per_key()] if strides is None else strides
        )
        arguments["inverse_indices"] = _call_accessor(other, "inverse_indices_or_none")
    elif not keys:
        arguments["stride"] = _call_accessor(other, "stride")
    return arguments


def keyed_arguments(other: Any) -> dict[str, Any]:
    """Return arguments of `KeyedTensor` from an object with its accessors; copy no tensors.

    Raises:
        TypeError: the object has no `keys()`, `length_per_key()` or `values()`.
    """
    require_accessors(other, "KeyedTensor", "keys", "length_per_key", "values")
    return {
        "keys": list(other.keys()),
        "length_per_key": list(other.length_per_key()),
        "values": other.values(),
        "key_dim": _call_accessor(other, "key_dim", 1),
    }
