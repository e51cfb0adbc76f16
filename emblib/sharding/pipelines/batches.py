"""Batches of pipelines: nested tensors that are copied to a device, or emptied.

A batch may be a tensor, a jagged tensor, a tuple, list or dict of batches, or a dataclass or other
object with batches as attributes. Two kinds of items are not found: those of sets, and attributes
whose names begin with `__`. Batches must not contain themselves.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor


def is_keyed(value: Any) -> bool:
    """Return whether a value has the methods by which a `KeyedJaggedTensor` is recognised."""
    return hasattr(value, "stride_per_key") and hasattr(value, "lengths")


def is_jagged(value: Any) -> bool:
    """Return whether a value has the methods by which a `JaggedTensor` is recognised."""
    return not is_keyed(value) and hasattr(value, "lengths") and hasattr(value, "weights_or_none")


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Tensor) or is_keyed(value) or is_jagged(value)


def items_of(value: Any) -> list[tuple[Any, Any]]:
    """Return the items of a batch as pairs (key, item).

    The key is an index, a key of a mapping, or the name of an attribute. Leaves (tensors and jagged
    tensors), strings, bytes, types and modules have no items.
    """
    if _is_leaf(value) or isinstance(value, str | bytes | type | torch.nn.Module):
        return []
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    slots = [vars(base).get("__slots__", ()) for base in type(value).__mro__]
    slot_lists = [[names] if isinstance(names, str) else names for names in slots]
    names = [*getattr(value, "__dict__", ()), *chain.from_iterable(slot_lists)]
    return [
        (name, getattr(value, name))
        for name in names
        if hasattr(value, name) and not name.startswith("__")
    ]


def item_of(value: Any, key: Any) -> Any:
    """Return the item of a batch that `items_of` lists under `key`."""
    if isinstance(value, Mapping | tuple | list):
        return value[key]
    return getattr(value, key)


def leaves(value: Any, visited: set[int] | None = None) -> Iterator[Any]:
    """Iterate over the tensors and jagged tensors of a batch in order, each object once."""
    visited = set() if visited is None else visited
    if id(value) in visited:
        return
    visited.add(id(value))
    if _is_leaf(value):
        yield value
    for _, inner in items_of(value):
        yield from leaves(inner, visited)


def _map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return the batch with `function(leaf)` for every leaf.

    A batch or item of which no leaf changes is returned itself, any other is copied.
    """
    if _is_leaf(value):
        return function(value)
    new_items = {key: _map_leaves(element, function) for key, element in items_of(value)}
    if all(new_item is item_of(value, key) for key, new_item in new_items.items()):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*new_items.values())
    if isinstance(value, tuple | list):
        return type(value)(new_items.values())
    new_value = copy.copy(value)
    for key, new_item in new_items.items():
        if isinstance(value, Mapping):
            new_value[key] = new_item
        else:
            object.__setattr__(new_value, key, new_item)  # also where the dataclass is frozen
    return new_value


def device_of(leaf: Any) -> torch.device:
    """Return the device of a tensor or a jagged tensor."""
    return (leaf if isinstance(leaf, Tensor) else leaf.values()).device


def to_device(batch: Any, device: torch.device) -> Any:
    """Copy a batch to a device; leaves that are there already are not copied.

    Copies from pinned memory to a GPU may still run on the current stream on return. If the batch
    itself, not one of its items, has a method `to`, that method copies it; if it has no argument
    `non_blocking`, it may wait. A leaf that occurs twice is copied twice.
    """
    if not _is_leaf(batch) and hasattr(batch, "to"):
        parameters = inspect.signature(batch.to).parameters.values()
        if any(
            parameter.name == "non_blocking" or parameter.kind is parameter.VAR_KEYWORD
            for parameter in parameters
        ):
            return batch.to(device, non_blocking=True)
        return batch.to(device)
    return _map_leaves(
        batch,
        lambda leaf: leaf if device_of(leaf) == device else leaf.to(device, non_blocking=True),
    )


def empty_batch(batch: Any) -> Any:
    """Return the batch without examples, for a rank that has no data left.

    The first dimension of tensors becomes 0, and jagged tensors lose all bags. Scalar tensors and
    values that are not tensors stay. A batch whose examples lie along another dimension needs a
    function of its own, see `DrainAll`.

    Example:
        >>> batch = emblib.KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1]))
        >>> emblib.sharding.empty_batch((batch, torch.rand(1, 13)))[1].shape
        torch.Size([0, 13])
    """
    return _map_leaves(batch, _empty_like)


def _empty_like(leaf: Any) -> Any:
    """Return a tensor or jagged tensor of no examples; scalars are returned as they are."""
    if isinstance(leaf, Tensor):
        return leaf[:0] if leaf.dim() else leaf
    weights, values, lengths = leaf.weights_or_none(), leaf.values()[:0], leaf.lengths()[:0]
    weights = None if weights is None else weights[:0]
    if is_jagged(leaf):
        return type(leaf)(values, weights, lengths)
    keys = list(leaf.keys())
    if not leaf.variable_stride_per_key():
        return type(leaf)(keys, values, weights, lengths, stride=0)
    inverse = leaf.inverse_indices_or_none()
    return type(leaf)(
        keys,
        values,
        weights,
        lengths,
        stride_per_key_per_rank=[[0]] * len(keys),
        inverse_indices=None if inverse is None else (inverse[0], inverse[1][:, :0]),
    )


def num_examples(batch: Any) -> int:
    """Return the number of examples of the first keyed jagged tensor, else of the first leaf.

    Scalar tensors do not count as leaves here. A batch without leaves has 0 examples.
    """
    num_rows = None
    for leaf in leaves(batch):
        if is_keyed(leaf):
            inverse = leaf.inverse_indices_or_none()
            return int(leaf.stride() if inverse is None else inverse[1].shape[-1])
        sizes = leaf if isinstance(leaf, Tensor) else leaf.lengths()
        if num_rows is None and sizes.dim():
            num_rows = int(sizes.shape[0])
    return num_rows or 0


ItemPath = tuple[Any, ...]
"""The path of an item in a batch: indices, keys and attribute names, outermost first."""


def path_to(batch: Any, target: Any) -> ItemPath | None:
    """Return the path of the first item that `is_same_input` as `target`; None if there is none."""
    if is_same_input(batch, target):
        return ()
    for key, element in items_of(batch):
        item_path = path_to(element, target)
        if item_path is not None:
            return (key, *item_path)
    return None


def item_at(batch: Any, path: ItemPath) -> Any:
    """Return the item of a batch at a path, see `path_to`.

    Raises:
        LookupError, AttributeError, TypeError: the batch has no such item.
    """
    for key in path:
        batch = item_of(batch, key)
    return batch


def is_same_input(first: Any, second: Any) -> bool:
    """Return whether both are one object, or keyed jagged tensors of the same tensor objects.

    A wrapper of the model may make a new jagged tensor of the same tensors.
    """
    if first is second:
        return True
    if not (is_keyed(first) and is_keyed(second)):
        return False
    return (
        first.values() is second.values()
        and first.weights_or_none() is second.weights_or_none()
        and first.lengths() is second.lengths()
        and list(first.keys()) == list(second.keys())
    )


S = TypeVar("S")
T = TypeVar("T")


class Staged(NamedTuple, Generic[T]):
    """A value that a stream may still compute, and the event after which it is ready.

    The event is None if the value is ready.
    """

    value: T
    ready_event: torch.cuda.Event | None = None

    def take(self) -> T:
        """Return the value, for use on the current stream, which waits for the event."""
        if self.ready_event is not None:
            stream = torch.cuda.current_stream(self.ready_event.device)
            stream.wait_event(self.ready_event)
            _record_use(self.value, stream)
        return self.value


class Lane:
    """Runs the work of one stage of a pipeline in order.

    On a GPU it runs on a stream of its own, which waits only for the input of the work. If the
    stream waited for the current stream, the work would not overlap with the running step. On the
    CPU the work runs at once.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[S], T], staged: Staged[S]) -> Staged[T]:
        """Return `work(value)`, staged; on a GPU the lane's stream runs it when the value is ready.

        An error of `work` is raised here.
        """
        if self._stream is None:
            return Staged(work(staged.value))
        with torch.cuda.stream(self._stream):
            value = work(staged.take())
            return Staged(value, self._stream.record_event())


def _record_use(value: Any, stream: torch.cuda.Stream) -> None:
    """Keep memory that another stream has allocated until `stream` has used it."""
    for leaf in leaves(value):
        if device_of(leaf).type == "cuda":
            leaf.record_stream(stream)
