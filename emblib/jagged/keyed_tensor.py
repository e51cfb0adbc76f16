"""Pooled embeddings by feature: one matrix, its columns named."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree as pytree

from emblib.jagged import convert
from emblib.jagged.jagged_tensor import JaggedTensor, keyed_text
from emblib.jagged.keyed_bags import bounds_of, places_of
from emblib.jagged.keyed_jagged_tensor import KeyedJaggedTensor


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


class KeyedTensor:
    """`[B, sum of lengths]`: the columns of each key, one key after the other.

    Args:
        keys: the name of each piece.
        length_per_key: columns of each.
        values: the matrix, or any tensor with these pieces along `key_dim`.
        key_dim: the dimension that the pieces share.

    Raises:
        ValueError: not one length a key.
    """

    __slots__ = (
        "__weakref__",
        "_index",
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
                f"length_per_key must have one entry a key = {len(self._keys)}, got "
                f"{len(self._length_per_key)}"
            )
        self._values = values
        self._key_dim = key_dim
        self._offset_per_key: list[int] | None = None
        self._index: dict[str, int] | None = None

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> "KeyedTensor":
        """Of one tensor a key, joined along `cat_dim`."""
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, lengths, torch.cat(list(tensors), dim=cat_dim), key_dim)

    @staticmethod
    def adopt(other: Any) -> "KeyedTensor":
        """What any object with TorchRec's accessors holds, e.g. a torchrec.KeyedTensor."""
        return KeyedTensor(**convert.keyed_arguments(other))

    def keys(self) -> list[str]:
        """The name of each piece: this object's own list, not to be changed."""
        return self._keys

    def values(self) -> Tensor:
        """All pieces in one tensor."""
        return self._values

    def key_dim(self) -> int:
        """The dimension that the pieces share."""
        return self._key_dim

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Columns of each piece."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Where each piece begins, and the last one ends."""
        bounds = self._offset_per_key
        if bounds is None:
            bounds = self._offset_per_key = bounds_of(self._length_per_key)
        return bounds

    def index_per_key(self) -> dict[str, int]:
        """The place of each key; of one that comes twice, the first."""
        index = self._index
        if index is None:
            index = self._index = places_of(self._keys)
        return index

    def size_in_bytes(self) -> int:
        """Of its values."""
        return self._values.numel() * self._values.element_size()

    def validate(self) -> "KeyedTensor":
        """Itself; ValueError unless the lengths add up to the values' and the keys differ."""
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
        """The piece of `key`, as a view."""
        place = self.index_per_key().get(key)
        if place is None:
            raise KeyError(f"no key {key!r}; there are {self._keys}")
        start = self.offset_per_key()[place]
        return self._values.narrow(self._key_dim, start, self._length_per_key[place])

    def to_dict(self) -> dict[str, Tensor]:
        """The piece of each key, as views; cheaper to differentiate than one at a time."""
        pieces = self._values.split(self._length_per_key, dim=self._key_dim)
        return dict(zip(self._keys, pieces, strict=True)) if self._keys else {}

    @staticmethod
    def regroup(tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """For each group, the pieces of its keys side by side, of whichever tensor has them.

        Raises:
            KeyError: a key that none of them has.
            ValueError: a key that several have.
        """
        return regroup(tensors, groups)

    @staticmethod
    def regroup_as_dict(
        tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """`regroup`, with a name for each group."""
        return dict(zip(keys, regroup(tensors, groups), strict=True))

    def as_type(self, kind: Any) -> Any:
        """The same tensor in another class with this constructor, e.g. torchrec.KeyedTensor."""
        return kind(
            keys=self._keys,
            length_per_key=self._length_per_key,
            values=self._values,
            key_dim=self._key_dim,
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "KeyedTensor":
        """On `device`."""
        return self._with(self._values.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "KeyedTensor":
        """In page-locked memory, from where copies to a GPU need not wait."""
        return self._with(self._values.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until what `stream` has to do is done."""
        self._values.record_stream(stream)

    def _with(self, values: Tensor) -> "KeyedTensor":
        made = KeyedTensor(self._keys, self._length_per_key, values, self._key_dim)
        made._index, made._offset_per_key = self._index, self._offset_per_key
        return made

    def __reduce__(self) -> Any:
        return KeyedTensor, (self._keys, self._length_per_key, self._values, self._key_dim)

    def __str__(self) -> str:
        return keyed_text("KeyedTensor", {k: str(v) for k, v in self.to_dict().items()})

    def __repr__(self) -> str:
        pieces = dict(zip(self._keys, self._length_per_key, strict=True))
        values = self._values
        return f"KeyedTensor({pieces}, {list(values.shape)} {values.dtype}, {values.device})"


class KTRegroupAsDict(nn.Module):
    """`KeyedTensor.regroup_as_dict` of groups that are fixed.

    Args:
        groups: the keys of each group.
        keys: the name of each group.
    """

    def __init__(self, groups: Sequence[Sequence[str]], keys: Sequence[str]) -> None:
        super().__init__()
        if len(groups) != len(keys):
            raise ValueError(f"keys must name every group = {len(groups)}, got {len(keys)}")
        self.groups = [list(group) for group in groups]
        self.keys = list(keys)

    def forward(self, tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
        """The pieces of each group side by side."""
        return KeyedTensor.regroup_as_dict(tensors, self.groups, self.keys)


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
