"""`KeyedTensor`: one matrix of named blocks of columns, such as pooled rows by feature."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree as pytree

from emblib.jagged import convert
from emblib.jagged.jagged_tensor import JaggedTensor, keyed_text
from emblib.jagged.keyed_jagged_tensor import KeyedJaggedTensor
from emblib.jagged.keyed_layout import bounds_of, positions_of


class KeyedTensor:
    """A matrix `[B, sum of lengths]` of named blocks of columns, e.g. pooled rows by feature.

    Args:
        keys: the name of each block.
        length_per_key: number of columns of each block.
        values: the matrix, or any tensor with these blocks along `key_dim`.
        key_dim: the dimension that is divided into blocks.

    Raises:
        ValueError: not one length per key.

    Example:
        >>> pooled = emblib.KeyedTensor(["user", "item"], [2, 3], torch.arange(10.0).view(2, 5))
        >>> pooled["item"]
        tensor([[2., 3., 4.],
                [7., 8., 9.]])
        >>> emblib.KeyedTensor.regroup([pooled], [["item", "user"]])[0].shape
        torch.Size([2, 5])
    """

    __slots__ = (
        "__weakref__",
        "_index_per_key",
        "_key_dim",
        "_keys",
        "_length_per_key",
        "_offset_per_key",
        "_values",
    )

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: Tensor,
        key_dim: int = 1,
    ) -> None:
        self._keys = keys if type(keys) is list else list(keys)
        self._length_per_key = (
            length_per_key if type(length_per_key) is list else list(length_per_key)
        )
        if len(self._keys) != len(self._length_per_key):
            raise ValueError(
                f"length_per_key must have one entry per key = {len(self._keys)}, got "
                f"{len(self._length_per_key)}"
            )
        self._values = values
        self._key_dim = key_dim
        self._offset_per_key: list[int] | None = None
        self._index_per_key: dict[str, int] | None = None

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> "KeyedTensor":
        """Construct from one tensor per key, concatenated along `cat_dim`."""
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, lengths, torch.cat(list(tensors), dim=cat_dim), key_dim)

    @staticmethod
    def adopt(other: Any) -> "KeyedTensor":
        """Convert an object with TorchRec's accessors, e.g. a torchrec.KeyedTensor."""
        return KeyedTensor(**convert.keyed_arguments(other))

    def keys(self) -> list[str]:
        """Return the name of each block; do not modify the list."""
        return self._keys

    def values(self) -> Tensor:
        """Return all blocks in one tensor."""
        return self._values

    def key_dim(self) -> int:
        """Return the dimension that is divided into blocks."""
        return self._key_dim

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Return the columns of each block."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return the offset of each block, and the end of the last."""
        bounds = self._offset_per_key
        if bounds is None:
            bounds = self._offset_per_key = bounds_of(self._length_per_key)
        return bounds

    def index_per_key(self) -> dict[str, int]:
        """Return the position of each key; the first position of a repeated key."""
        index = self._index_per_key
        if index is None:
            index = self._index_per_key = positions_of(self._keys)
        return index

    _key_indices = index_per_key  # for files of TorchRec

    def size_in_bytes(self) -> int:
        """Return the bytes of the values."""
        return self._values.numel() * self._values.element_size()

    def validate(self) -> "KeyedTensor":
        """Return self; raise ValueError unless the lengths match the values and the keys differ."""
        columns = self._values.size(self._key_dim)
        if sum(self._length_per_key) != columns or min(self._length_per_key, default=0) < 0:
            raise ValueError(
                f"length_per_key must be >= 0 and add up to the size of dimension {self._key_dim} "
                f"= {columns}, got {self._length_per_key}"
            )
        if len(set(self._keys)) != len(self._keys):
            raise ValueError(f"keys must differ from each other, got {self._keys}")
        return self

    def __getitem__(self, key: str) -> Tensor:
        """Return the block of `key`, as a view."""
        position = self.index_per_key().get(key)
        if position is None:
            raise KeyError(f"no key {key!r}; there are {self._keys}")
        start = self.offset_per_key()[position]
        return self._values.narrow(self._key_dim, start, self._length_per_key[position])

    def to_dict(self) -> dict[str, Tensor]:
        """Return the block of each key, as views; backward is cheaper than with `[key]` per key."""
        blocks = self._values.split(self._length_per_key, dim=self._key_dim)
        return dict(zip(self._keys, blocks, strict=True)) if self._keys else {}

    @staticmethod
    def regroup(
        keyed_tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]]
    ) -> list[Tensor]:
        """Concatenate the blocks of each group's keys, which may be in different tensors.

        Raises:
            KeyError: a key that no tensor has.
            ValueError: a key that several tensors have.
        """
        return regroup(keyed_tensors, groups)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return the results of `regroup` by the name of each group."""
        return regroup_by_name(keyed_tensors, groups, keys)

    def as_type(self, kind: Any) -> Any:
        """Construct another class with the same arguments, e.g. torchrec.KeyedTensor."""
        return kind(
            keys=self._keys,
            length_per_key=self._length_per_key,
            values=self._values,
            key_dim=self._key_dim,
        )

    def to(self, device: torch.device | str, non_blocking: Any = False) -> "KeyedTensor":
        """Copy to `device`. Arguments are those of `Tensor.to`."""
        return self._with(self._values.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "KeyedTensor":
        """Copy to page-locked memory, so that copies to a GPU can be asynchronous."""
        return self._with(self._values.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until the work queued on `stream` is done."""
        self._values.record_stream(stream)

    def _with(self, values: Tensor) -> "KeyedTensor":
        keyed = KeyedTensor(self._keys, self._length_per_key, values, self._key_dim)
        keyed._index_per_key, keyed._offset_per_key = self._index_per_key, self._offset_per_key
        return keyed

    def __reduce__(self) -> Any:
        return KeyedTensor, (self._keys, self._length_per_key, self._values, self._key_dim)

    def __str__(self) -> str:
        return keyed_text("KeyedTensor", {k: str(v) for k, v in self.to_dict().items()})

    def __repr__(self) -> str:
        width_of_key = dict(zip(self._keys, self._length_per_key, strict=True))
        values = self._values
        return f"KeyedTensor({width_of_key}, {list(values.shape)} {values.dtype}, {values.device})"


class KTRegroupAsDict(nn.Module):
    """Module form of `KeyedTensor.regroup_as_dict`, with fixed groups.

    Args:
        groups: the keys of each group.
        keys: the name of each group.

    Example:
        >>> pooled = emblib.KeyedTensor(["user", "item", "ad"], [2, 3, 1], torch.rand(4, 6))
        >>> regroup = emblib.KTRegroupAsDict([["user"], ["item", "ad"]], ["left", "right"])
        >>> {name: tuple(tensor.shape) for name, tensor in regroup([pooled]).items()}
        {'left': (4, 2), 'right': (4, 4)}
    """

    def __init__(self, groups: Sequence[Sequence[str]], keys: Sequence[str]) -> None:
        super().__init__()
        if len(groups) != len(keys):
            raise ValueError(f"keys must name every group = {len(groups)}, got {len(keys)}")
        self.groups = [list(group) for group in groups]
        self.keys = list(keys)

    def forward(self, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
        """Return the concatenated blocks of each group by its name."""
        return KeyedTensor.regroup_as_dict(keyed_tensors, self.groups, self.keys)


class HasNamedBlocks(Protocol):
    """The accessors of a KeyedTensor that `regroup` uses."""

    def keys(self) -> list[str]:
        """Return the name of each block."""
        ...

    def length_per_key(self) -> list[int]:
        """Return the size of each block."""
        ...

    def values(self) -> Tensor:
        """Return all blocks in one tensor."""
        ...

    def key_dim(self) -> int:
        """Return the dimension that is divided into blocks."""
        ...


def regroup(tensors: Sequence[HasNamedBlocks], groups: Sequence[Sequence[str]]) -> list[Tensor]:
    """Concatenate the blocks of the keys of each group; see `KeyedTensor.regroup` for errors.

    Each tensor is split once, so that backward builds one gradient for it.
    """
    dims = {tensor.key_dim() for tensor in tensors}
    if len(dims) != 1:
        raise ValueError(
            f"regroup needs keyed tensors with the same key_dim, got {len(tensors)} with "
            f"{sorted(dims)}"
        )
    dim = dims.pop()
    block_of_key: dict[str, Tensor] = {}
    repeated_keys: set[str] = set()
    for tensor in tensors:
        keys = tensor.keys()
        if keys:
            repeated_keys.update(block_of_key.keys() & keys)
            blocks = tensor.values().split(tensor.length_per_key(), dim=dim)
            block_of_key.update(zip(keys, blocks, strict=True))
    try:
        grouped_blocks = [[block_of_key[key] for key in group] for group in groups]
    except KeyError as error:
        raise KeyError(f"no key {error.args[0]!r}; there are {list(block_of_key)}") from None
    ambiguous = sorted(key for key in repeated_keys if any(key in group for group in groups))
    if ambiguous:
        raise ValueError(f"each key must be in one KeyedTensor, several have {ambiguous}")
    empty = tensors[0].values().narrow(dim, 0, 0)
    return [torch.cat(group or [empty], dim=dim) for group in grouped_blocks]


def regroup_by_name(
    tensors: Sequence[HasNamedBlocks], groups: Sequence[Sequence[str]], names: Sequence[str]
) -> dict[str, Tensor]:
    """Return the results of `regroup` by the name of each group."""
    return dict(zip(names, regroup(tensors, groups), strict=True))


# Each is one call in a traced graph, because tracing cannot read the keys of a traced tensor.
torch.fx.wrap("regroup")
torch.fx.wrap("regroup_by_name")


# A list, not a tuple: a saved structure is loaded from JSON as lists.
Context = list[Any]
# The leaves of a node by the names of its attributes, and its other fields.
Flattened = tuple[dict[str, Any], Context]


def _flatten_jagged(jagged: JaggedTensor) -> Flattened:
    leaves = {"_values": jagged._values, "_lengths": jagged.lengths()}
    if jagged._weights is not None:
        leaves["_weights"] = jagged._weights
    return leaves, [jagged._weights is not None]


def _unflatten_jagged(leaves: Iterable[Any], context: Context) -> JaggedTensor:
    values, lengths, *weights = leaves
    return JaggedTensor.from_valid(values, weights[0] if context[0] else None, lengths, None)


def _flatten_keyed_jagged(batch: KeyedJaggedTensor) -> Flattened:
    leaves = {"_values": batch._values, "_lengths": batch.lengths()}
    if batch._weights is not None:
        leaves["_weights"] = batch._weights
    inverse_keys = None
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
    construct = KeyedJaggedTensor.from_valid
    return construct(keys, values, weights, lengths, None, stride, inverse, strides)


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
    return jagged


def _reorder_keyed_jagged(batch: KeyedJaggedTensor, context: Context) -> KeyedJaggedTensor:
    """Reorder features and rows of the inverse indices as in `context`."""
    keys, *_, inverse_keys = context
    if batch._keys != keys:
        batch = batch.permute([_position(key, batch._keys) for key in keys])
    inverse = batch._inverse
    if inverse is not None and inverse_keys is not None and inverse[0] != inverse_keys:
        rows = [_position(key, inverse[0]) for key in inverse_keys]
        batch = batch.permute(range(len(keys)))  # a new object, so that the caller's is unchanged
        batch._inverse = inverse_keys, inverse[1][rows]
    return batch


def _reorder_keyed(tensor: KeyedTensor, context: Context) -> KeyedTensor:
    """Select the blocks of the keys of `context`, in its order."""
    keys = context[0]
    lengths = [tensor._length_per_key[_position(key, tensor._keys)] for key in keys]
    return KeyedTensor(keys, lengths, regroup([tensor], [keys])[0], tensor._key_dim)


def _position(key: str, keys: list[str]) -> int:
    if key not in keys:
        raise KeyError(f"a graph was made for inputs with the key {key!r}; there are {keys}")
    return keys.index(key)


def _flatten_as(node_type: "_NodeType", node: Any, spec: Any) -> list[Any]:
    """Return the leaves of a node, reordered for a graph that was traced with `spec`.

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
            f"{name} {own_value!r} instead of {spec_value!r}"
            for name, own_value, spec_value in zip(names, context, spec.context, strict=True)
            if own_value != spec_value
        ]
        raise ValueError(
            f"a {node_type.kind.__name__} must be like the one that the graph was made for, got "
            f"{', '.join(differences)}: pass such a one, or trace or export the model with this one"
        )
    return list(leaves.values())


class _NodeType(NamedTuple):
    """Functions that split objects of one class into leaves and a context, and rebuild them."""

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
    """Register the three types with torch's pytrees, eager and traced."""
    for node_type in _NODES:
        pytree.register_pytree_node(
            node_type.kind,
            partial(_flatten, node_type.flatten),
            node_type.unflatten,
            serialized_type_name=f"emblib.{node_type.kind.__name__}",
            flatten_with_keys_fn=partial(_flatten_with_keys, node_type.flatten),
        )
        fx_pytree.register_pytree_flatten_spec(node_type.kind, partial(_flatten_as, node_type))
