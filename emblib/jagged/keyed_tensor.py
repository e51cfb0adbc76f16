"""`KeyedTensor`: one matrix of named blocks of columns, such as pooled rows by feature."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from emblib.jagged import convert
from emblib.jagged.jagged_tensor import TracedClass, keyed_text, nested_text
from emblib.jagged.keyed_layout import block_offsets, list_of_keys


class KeyedTensor(metaclass=TracedClass):
    """A matrix `[B, sum of lengths]` of named blocks of columns, e.g. pooled rows by feature.

    Args:
        keys: the name of each block. If a key is repeated, all methods use its last block.
        length_per_key: size of each block along `key_dim`. Lists here and in `keys` are not copied:
            do not change them afterwards.
        values: the matrix, or any tensor with these blocks along `key_dim`; not copied. Only
            `validate` checks that the lengths fit it.
        key_dim: the dimension that is divided into blocks; by default the columns.

    Raises:
        TypeError: `keys` is one string.
        ValueError: there is not one length per key.

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
        self._keys = keys if type(keys) is list else list_of_keys(keys)
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
        """Construct from one tensor per key, concatenated along `cat_dim`.

        `cat_dim` must be `key_dim`; not checked.

        Raises:
            TypeError: `keys` is one string.
            ValueError: there are no tensors, not one per key, or one without the dimension
                `key_dim`.
            RuntimeError: the tensors differ in another dimension.
        """
        if any(tensor.dim() <= key_dim for tensor in tensors):
            shapes = [list(tensor.shape) for tensor in tensors]
            raise ValueError(f"tensors must have the dimension key_dim = {key_dim}, got {shapes}")
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, lengths, torch.cat(list(tensors), dim=cat_dim), key_dim)

    @staticmethod
    def adopt(other: Any) -> "KeyedTensor":
        """Convert an object with TorchRec's accessors, e.g. a torchrec.KeyedTensor; copy no tensor.

        Raises:
            TypeError: the object has no `keys()`, `length_per_key()` or `values()`.
        """
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
        """Return the size of each block along `key_dim`; do not modify the list."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return the offset of each block, and the end of the last; do not modify the list."""
        bounds = self._offset_per_key
        if bounds is None:
            bounds = self._offset_per_key = block_offsets(self._length_per_key)
        return bounds

    def index_per_key(self) -> dict[str, int]:
        """Return the last position of each key; do not modify the dictionary."""
        position_by_key = self._index_per_key
        if position_by_key is None:
            position_by_key = {key: position for position, key in enumerate(self._keys)}
            self._index_per_key = position_by_key
        return position_by_key

    _key_indices = index_per_key  # the name that TorchRec's modules call

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
        """Return the block of `key`, usually `[B, dim]`, as a view.

        Raises:
            KeyError: the tensor does not have the key.
        """
        position = self.index_per_key().get(key)
        if position is None:
            raise KeyError(f"no key {key!r}; there are {self._keys}")
        start = self.offset_per_key()[position]
        return self._values.narrow(self._key_dim, start, self._length_per_key[position])

    def to_dict(self) -> dict[str, Tensor]:
        """Return the block of each key, as views; backward is cheaper than with `[key]` per key."""
        if not self._keys:
            return {}
        blocks = self._values.split(self._length_per_key, dim=self._key_dim)
        return dict(zip(self._keys, blocks, strict=True))

    @staticmethod
    def regroup(
        keyed_tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]]
    ) -> list[Tensor]:
        """Return one tensor per group: the blocks of its keys, copied and joined along `key_dim`.

        The keys of a group may be in different tensors, of equal other dimensions. A group without
        keys has size 0 along `key_dim`.

        Raises:
            KeyError: no tensor has one of the keys.
            TypeError: an argument or a group is not iterable, a group is one string, or an entry of
                `keyed_tensors` is not a keyed tensor.
            ValueError: several tensors have a key of a group, there are no tensors, or they differ
                in `key_dim`.
        """
        return regroup(keyed_tensors, groups)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence["KeyedTensor"], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return the results of `regroup` by the name of each group, `keys`.

        Raises:
            KeyError: no tensor has one of the keys.
            TypeError: `keys` or a group is one string.
            ValueError: see `regroup`; or there is not one name per group, or several groups have
                one name.
        """
        return regroup_by_name(keyed_tensors, groups, keys)

    def as_type(self, kind: Any) -> Any:
        """Construct an object of class `kind`, e.g. torchrec.KeyedTensor; copy no tensor."""
        return kind(
            keys=self._keys,
            length_per_key=self._length_per_key,
            values=self._values,
            key_dim=self._key_dim,
        )

    def to(self, device: torch.device | str, non_blocking: Any = False) -> "KeyedTensor":
        """Return a tensor with the values on `device`, not copied if they are there already."""
        return self._with_values(self._values.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "KeyedTensor":
        """Copy to page-locked memory, so that copies to a GPU can be asynchronous; needs a GPU."""
        return self._with_values(self._values.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Keep the values, on a GPU, in memory until the work queued on `stream` is done."""
        self._values.record_stream(stream)

    def _with_values(self, values: Tensor) -> "KeyedTensor":
        """Return a tensor of the same keys, lengths and `key_dim` with other values."""
        keyed = KeyedTensor(self._keys, self._length_per_key, values, self._key_dim)
        keyed._index_per_key, keyed._offset_per_key = self._index_per_key, self._offset_per_key
        return keyed

    def __reduce__(self) -> Any:
        return KeyedTensor, (self._keys, self._length_per_key, self._values, self._key_dim)

    def __str__(self) -> str:
        return keyed_text(
            "KeyedTensor", {key: _rows_text(block) for key, block in self.to_dict().items()}
        )

    def __repr__(self) -> str:
        num_columns = dict(zip(self._keys, self._length_per_key, strict=True))
        values = self._values
        return f"KeyedTensor({num_columns}, {list(values.shape)} {values.dtype}, {values.device})"


def _rows_text(block: Tensor) -> str:
    rows = block.flatten(1) if block.dim() > 1 else block.unsqueeze(0)
    return nested_text(rows.flatten(), torch.tensor([rows.size(1)] * rows.size(0), device="cpu"))


class KTRegroupAsDict(nn.Module):
    """Module form of `KeyedTensor.regroup_as_dict`, with fixed groups.

    Args:
        groups: the keys of each group.
        keys: the name of each group.

    Raises:
        TypeError: `keys` or a group is one string.
        ValueError: there is not one name per group, or several groups have the same name.

    Example:
        >>> pooled = emblib.KeyedTensor(["user", "item", "ad"], [2, 3, 1], torch.rand(4, 6))
        >>> regroup = emblib.KTRegroupAsDict([["user"], ["item", "ad"]], ["left", "right"])
        >>> {name: tuple(tensor.shape) for name, tensor in regroup([pooled]).items()}
        {'left': (4, 2), 'right': (4, 4)}
    """

    def __init__(self, groups: Sequence[Sequence[str]], keys: Sequence[str]) -> None:
        super().__init__()
        _check_names(groups, keys)
        self.groups = [list_of_keys(group) for group in groups]
        self.keys = list(keys)

    def forward(self, keyed_tensors: list[KeyedTensor]) -> dict[str, Tensor]:
        """Return the joined blocks of each group by its name; raises as `regroup_as_dict`."""
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
    """Concatenate the blocks of each group's keys; see `KeyedTensor.regroup` for errors.

    Each tensor is split only once, so that backward builds one gradient for it.
    """
    tensors = _as_list("tensors of regroup", "keyed tensors", tensors)
    for tensor in tensors:
        convert.require_accessors(tensor, "KeyedTensor", "keys", "length_per_key", "key_dim")
    dims = {tensor.key_dim() for tensor in tensors}
    if len(dims) != 1:
        raise ValueError(
            f"regroup needs keyed tensors with the same key_dim, got {len(tensors)} with "
            f"{sorted(dims)}"
        )
    dim = dims.pop()
    block_by_key: dict[str, Tensor] = {}
    repeated_keys: set[str] = set()
    for tensor in tensors:
        keys = tensor.keys()
        if keys:
            # torch 2.11 cannot compile `block_by_key.keys() & keys`.
            repeated_keys.update(filter(block_by_key.__contains__, keys))
            blocks = tensor.values().split(tensor.length_per_key(), dim=dim)
            block_by_key.update(zip(keys, blocks, strict=True))
    groups = _as_list("groups", "lists of keys", groups)
    for group in groups:
        if isinstance(group, str):
            raise TypeError(f"a group must be a list of keys, got {group!r}: write [{group!r}]")
    groups = [_as_list("a group", "keys", group) for group in groups]
    try:
        grouped_blocks = [[block_by_key[key] for key in group] for group in groups]
    except KeyError as error:
        raise KeyError(f"no key {error.args[0]!r}; there are {list(block_by_key)}") from None
    ambiguous_keys = sorted(key for key in repeated_keys if any(key in group for group in groups))
    if ambiguous_keys:
        raise ValueError(f"each key must be in one KeyedTensor, several have {ambiguous_keys}")
    empty = tensors[0].values().narrow(dim, 0, 0)
    return [torch.cat(group or [empty], dim=dim) for group in grouped_blocks]


def _as_list(name: str, content: str, argument: Any) -> list[Any]:
    """Return an argument as a list; raise TypeError unless it is iterable, a list of `content`."""
    if not isinstance(argument, Iterable):
        raise TypeError(f"{name} must be a list of {content}, got {argument!r}")
    return list(argument)


def regroup_by_name(
    tensors: Sequence[HasNamedBlocks], groups: Sequence[Sequence[str]], names: Sequence[str]
) -> dict[str, Tensor]:
    """Return the results of `regroup` by name; see `KeyedTensor.regroup_as_dict` for errors."""
    _check_names(groups, names)
    return dict(zip(names, regroup(tensors, groups), strict=True))


def _check_names(groups: Sequence[Sequence[str]], names: Sequence[str]) -> None:
    """Raise TypeError for one string, ValueError unless each group has a name of its own."""
    names = list_of_keys(names)
    if len(groups) != len(names):
        raise ValueError(f"keys must name every group = {len(groups)}, got {len(names)}")
    if len(set(names)) < len(names):
        raise ValueError(f"the keys of groups must differ, got {names}")


# Each is one call in a traced graph, because tracing cannot read the keys of a traced tensor.
torch.fx.wrap("regroup")
torch.fx.wrap("regroup_by_name")
