"""The types as nodes of `torch.utils._pytree`: the tensors they hold, and what else there is.

Bags are told by their lengths, however they were given, so that two batches of the same features
have the same structure. Numbers that were read back stay behind: the leaves may be changed.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import Tensor
from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree as pytree

from emblib.jagged.jagged_tensor import JaggedTensor
from emblib.jagged.keyed_jagged_tensor import KeyedJaggedTensor
from emblib.jagged.keyed_tensor import KeyedTensor

# Lists, not tuples: a saved structure comes back from JSON as lists.
Context = list[Any]
# The leaves of a node by the names of its attributes, and what they do not tell.
Taken = tuple[dict[str, Any], Context]


def _of_jagged(jagged: JaggedTensor) -> Taken:
    leaves = {"_values": jagged._values, "_lengths": jagged.lengths()}
    if jagged._weights is not None:
        leaves["_weights"] = jagged._weights
    return leaves, [jagged._weights is not None]


def _to_jagged(leaves: Iterable[Any], context: Context) -> JaggedTensor:
    values, lengths, *weights = leaves
    return JaggedTensor._of(values, weights[0] if context[0] else None, lengths, None)


def _of_keyed_jagged(batch: KeyedJaggedTensor) -> Taken:
    leaves = {"_values": batch._values, "_lengths": batch.lengths()}
    if batch._weights is not None:
        leaves["_weights"] = batch._weights
    inverse_keys = None
    if batch._inverse is not None:
        inverse_keys, leaves["_inverse"] = batch._inverse
    # The stride is in the lengths, unless there are no features.
    stride = None if batch._keys else batch._stride
    return leaves, [batch._keys, batch._strides, stride, batch._weights is not None, inverse_keys]


def _to_keyed_jagged(leaves: Iterable[Any], context: Context) -> KeyedJaggedTensor:
    keys, strides, stride, weighted, inverse_keys = context
    values, lengths, *rest = leaves
    inverse = None if inverse_keys is None else (inverse_keys, rest[-1])
    if stride is None:
        # Leaves may be anything while a tree is mapped.
        if strides is None:
            stride = lengths.numel() // len(keys) if isinstance(lengths, Tensor) else 0
        elif inverse is not None and isinstance(inverse[1], Tensor):
            stride = inverse[1].size(-1)
        else:
            stride = max(map(sum, strides))
    weights = rest[0] if weighted else None
    of = KeyedJaggedTensor._of
    return of(keys, values, weights, lengths, None, stride, inverse, strides)


def _of_keyed(tensor: KeyedTensor) -> Taken:
    return {"_values": tensor._values}, [tensor._keys, tensor._length_per_key, tensor._key_dim]


def _to_keyed(leaves: Iterable[Any], context: Context) -> KeyedTensor:
    keys, lengths, dim = context
    (values,) = leaves
    return KeyedTensor(keys, lengths, values, dim)


def _flatten(take: Callable[[Any], Taken], node: Any) -> tuple[list[Any], Context]:
    leaves, context = take(node)
    return list(leaves.values()), context


def _flatten_with_keys(
    take: Callable[[Any], Taken], node: Any
) -> tuple[list[tuple[pytree.KeyEntry, Any]], Context]:
    leaves, context = take(node)
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in leaves.items()], context


def _flatten_as(take: Callable[[Any], Taken], node: Any, spec: Any) -> list[Any]:
    return list(take(node)[0].values())


_NODES: tuple[tuple[type, Callable[[Any], Taken], Callable[[Iterable[Any], Any], Any]], ...] = (
    (JaggedTensor, _of_jagged, _to_jagged),
    (KeyedJaggedTensor, _of_keyed_jagged, _to_keyed_jagged),
    (KeyedTensor, _of_keyed, _to_keyed),
)


def register() -> None:
    """Make the three types nodes of torch's trees, of eager and traced ones."""
    for kind, take, make in _NODES:
        pytree.register_pytree_node(
            kind,
            partial(_flatten, take),
            make,
            serialized_type_name=f"emblib.{kind.__name__}",
            flatten_with_keys_fn=partial(_flatten_with_keys, take),
        )
        fx_pytree.register_pytree_flatten_spec(kind, partial(_flatten_as, take))
