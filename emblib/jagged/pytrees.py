"""torch's pytrees and the jagged types: how each is split into tensors and rebuilt.

A node is flattened to leaves, its tensors by the names of its attributes, and a context, a list of
its other fields. `torch.utils._pytree` flattens eager code and exported programs, and
`torch.fx._pytree` the inputs of a traced graph. The latter passes the structure with which the
graph was traced: keys of an input in another order are reordered to it.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree as pytree

from emblib.jagged.jagged_tensor import JaggedTensor, drop_first, num_padding, running_sums
from emblib.jagged.keyed_jagged_tensor import KeyedJaggedTensor
from emblib.jagged.keyed_layout import num_padding_of
from emblib.jagged.keyed_tensor import KeyedTensor, regroup
from emblib.tables.bounds_report import is_padded

Context = list[Any]
"""The fields of a node besides its tensors, in the order of `_NodeType.context_names`.

Exported programs save it as JSON, from which it is loaded as lists, never tuples: its entries and
their order are a file format.
"""

Flattened = tuple[dict[str, Any], Context]
"""The leaves of a node by the names of its attributes, and its context.

The order of the leaves is the contract with `unflatten`, which gets them without names; optional
leaves come last.
"""


def _flatten_tensors(jagged: JaggedTensor | KeyedJaggedTensor, padding: int) -> dict[str, Any]:
    """Return values, lengths and, if any, weights, without `padding` values before the first bag.

    A `CapturedStep` keeps this padding, because sizes are fixed there; `_padded_offsets` finds it
    again.
    """
    if torch.compiler.is_compiling() or is_padded():
        padding = 0
    leaves = {"_values": drop_first(jagged._values, padding), "_lengths": jagged.lengths()}
    if jagged._weights is not None:
        leaves["_weights"] = drop_first(jagged._weights, padding)
    return leaves


def _flatten_jagged(jagged: JaggedTensor) -> Flattened:
    """Return the tensors of a jagged tensor; the context is `[is weighted]`."""
    return _flatten_tensors(jagged, num_padding(jagged._offsets)), [jagged._weights is not None]


def _unflatten_jagged(leaves: Iterable[Any], context: Context) -> JaggedTensor:
    values, lengths, *weights = leaves
    offsets = _padded_offsets(values, lengths)
    return JaggedTensor.from_valid(values, weights[0] if context[0] else None, lengths, offsets)


def _padded_offsets(values: Any, lengths: Any) -> Tensor | None:
    """Return the offsets of bags that end at the last value, in a `CapturedStep`; else None.

    There the values before the first bag are padding. The host does not wait for a GPU.
    """
    if torch.compiler.is_compiling() or not is_padded():
        return None
    if not (isinstance(values, Tensor) and isinstance(lengths, Tensor)):
        return None  # in `tree_map` leaves may be any objects
    if values.dim() == 0 or lengths.dim() != 1:
        return None
    offsets = running_sums(lengths)
    return offsets + (values.size(0) - offsets[-1:])


def _flatten_keyed_jagged(batch: KeyedJaggedTensor) -> Flattened:
    """Return the tensors of a batch, and keys and strides as context (`_NODES` names them)."""
    leaves, inverse_keys = _flatten_tensors(batch, num_padding_of(batch)), None
    if batch._inverse is not None:
        inverse_keys, leaves["_inverse"] = batch._inverse
    # A stride that lengths or inverse indices imply is left out: it may differ between batches.
    has_equal_strides = batch._keys and batch._stride_per_key_per_rank is None
    stride = None if batch._inverse is not None or has_equal_strides else batch._stride
    return leaves, [
        batch._keys,
        batch._stride_per_key_per_rank,
        stride,
        batch._weights is not None,
        inverse_keys,
    ]


def _unflatten_keyed_jagged(leaves: Iterable[Any], context: Context) -> KeyedJaggedTensor:
    """Build a batch again; `leaves` may be anything that pytrees put in place of tensors."""
    keys, strides, stride, is_weighted, inverse_keys = context
    values, lengths, *optional_leaves = leaves
    inverse = None if inverse_keys is None else (inverse_keys, optional_leaves[-1])
    if stride is None:
        # In `tree_map` leaves may be any objects, not only tensors.
        if keys and strides is None:
            stride = lengths.numel() // len(keys) if isinstance(lengths, Tensor) else 0
        elif inverse is not None and isinstance(inverse[1], Tensor):
            stride = inverse[1].size(-1)
        else:
            stride = max(map(sum, strides or []), default=0)
    weights = optional_leaves[0] if is_weighted else None
    offsets = _padded_offsets(values, lengths)
    construct = KeyedJaggedTensor.from_valid
    return construct(keys, values, weights, lengths, offsets, stride, inverse, strides)


def _flatten_keyed(tensor: KeyedTensor) -> Flattened:
    return {"_values": tensor._values}, [tensor._keys, tensor._length_per_key, tensor._key_dim]


def _unflatten_keyed(leaves: Iterable[Any], context: Context) -> KeyedTensor:
    keys, lengths, dim = context
    (values,) = leaves
    return KeyedTensor(keys, lengths, values, dim)


def _flatten(flatten: Callable[[Any], Flattened], node: Any) -> tuple[list[Any], Context]:
    leaves, context = flatten(node)
    return list(leaves.values()), context


def _flatten_with_keys(
    flatten: Callable[[Any], Flattened], node: Any
) -> tuple[list[tuple[pytree.KeyEntry, Any]], Context]:
    leaves, context = flatten(node)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in leaves.items()], context


def _reorder_jagged(jagged: JaggedTensor, context: Context) -> JaggedTensor:
    """Return the tensor itself, which has no keys."""
    return jagged


def _reorder_keyed_jagged(batch: KeyedJaggedTensor, context: Context) -> KeyedJaggedTensor:
    """Reorder features and rows of the inverse indices as in `context`."""
    keys, *_, inverse_keys = context
    if batch._keys != keys:
        batch = batch.permute([_require_position(key, batch._keys) for key in keys])
    inverse = batch._inverse
    if inverse is not None and inverse_keys is not None and inverse[0] != inverse_keys:
        rows = [_require_position(key, inverse[0]) for key in inverse_keys]
        batch = batch.permute(range(len(keys)))  # a new object, so that the caller's is unchanged
        batch._inverse = inverse_keys, inverse[1][rows]
    return batch


def _reorder_keyed(tensor: KeyedTensor, context: Context) -> KeyedTensor:
    """Select the blocks of the keys of `context`, in its order."""
    keys = context[0]
    for key in keys:
        _require_position(key, tensor._keys)  # raises KeyError
    lengths = [tensor._length_per_key[tensor.index_per_key()[key]] for key in keys]
    return KeyedTensor(keys, lengths, regroup([tensor], [keys])[0], tensor._key_dim)


def _require_position(key: str, keys: list[str]) -> int:
    """Return the position of a key; raise KeyError if an input of a graph lacks it."""
    if key not in keys:
        raise KeyError(f"a graph was made for inputs with the key {key!r}; there are {keys}")
    return keys.index(key)


def _flatten_as(node_type: "_NodeType", node: Any, spec: Any) -> list[Any]:
    """Return the leaves of a node, reordered for a graph traced with the `TreeSpec` `spec`.

    Raises:
        KeyError: the node lacks a key of `spec`.
        ValueError: the node differs from `spec` in more than the order of keys or further keys.
    """
    leaves, context = node_type.flatten(node)
    if context != spec.context:
        leaves, context = node_type.flatten(node_type.reorder(node, spec.context))
    if context != spec.context:
        names = node_type.context_names
        differences = [
            f"{name} {value!r} instead of {spec_value!r}"
            for name, value, spec_value in zip(names, context, spec.context, strict=True)
            if value != spec_value
        ]
        raise ValueError(
            f"a {node_type.kind.__name__} must be like the one that the graph was made for, got "
            f"{', '.join(differences)}: pass one like it, or trace the model again with this one"
        )
    return list(leaves.values())


class _NodeType(NamedTuple):
    """Functions that split objects of one class into leaves and a context, and rebuild them.

    Attributes:
        kind: the class.
        flatten: function of an object to its tensors by name, and a context.
        unflatten: function of leaves and context that builds an object.
        reorder: function that gives an object the order of keys of a context.
        context_names: names of the entries of a context.
    """

    kind: type
    flatten: Callable[[Any], Flattened]
    unflatten: Callable[[Iterable[Any], Any], Any]
    reorder: Callable[[Any, Context], Any]
    context_names: tuple[str, ...]


_NODES = (
    _NodeType(JaggedTensor, _flatten_jagged, _unflatten_jagged, _reorder_jagged, ("is weighted",)),
    _NodeType(
        KeyedJaggedTensor,
        _flatten_keyed_jagged,
        _unflatten_keyed_jagged,
        _reorder_keyed_jagged,
        ("keys", "stride_per_key_per_rank", "stride", "is weighted", "keys of inverse_indices"),
    ),
    _NodeType(
        KeyedTensor,
        _flatten_keyed,
        _unflatten_keyed,
        _reorder_keyed,
        ("keys", "length_per_key", "key_dim"),
    ),
)


def register() -> None:
    """Register the three types with torch's pytrees, eager and traced.

    Call this once: torch raises ValueError for a type that is registered already.
    """
    for node_type in _NODES:
        pytree.register_pytree_node(
            node_type.kind,
            partial(_flatten, node_type.flatten),
            node_type.unflatten,
            serialized_type_name=f"emblib.{node_type.kind.__name__}",
            flatten_with_keys_fn=partial(_flatten_with_keys, node_type.flatten),
        )
        fx_pytree.register_pytree_flatten_spec(node_type.kind, partial(_flatten_as, node_type))
