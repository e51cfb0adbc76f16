"""Nested state dicts as trees, with the names that torch.distributed.checkpoint gives to leaves.

Also `CheckpointError`, and `run_on_all_ranks`, which raises an error of one rank on all ranks.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from emblib.sharding.headers import Content, check_call
from emblib.sharding.ranks import RankGroup

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete or damaged, or it belongs to another model."""


class Leaf(NamedTuple):
    """A value of a nested state dict, which is `container[key]` and has a dotted name."""

    name: str
    value: Any
    container: Any
    key: Any

    def replace(self, value: Any) -> None:
        """Replace the value in its container; `self.value` stays the old one."""
        self.container[self.key] = value


def leaves(tree: MutableMapping[Any, Any], prefix: str = "") -> Iterator[Leaf]:
    """Yield the leaves of a tree: all values in dicts, and in lists that have tensors or dicts.

    A list without tensors and dicts at any depth is one leaf, and so is a tuple. Names begin with
    `prefix`.
    """
    for key, value in list(tree.items()):
        yield from _leaves_of(f"{prefix}{key}", value, tree, key)


def _leaves_of(name: str, value: Any, container: Any, key: Any) -> Iterator[Leaf]:
    """Yield the leaves of a value, which is `container[key]` and has the dotted `name`."""
    if isinstance(value, Mapping):
        for inner_key, element in list(value.items()):
            yield from _leaves_of(f"{name}.{inner_key}", element, value, inner_key)
    elif isinstance(value, list) and not _is_single_value(value):
        for inner_key, element in enumerate(value):
            yield from _leaves_of(f"{name}.{inner_key}", element, value, inner_key)
    else:
        yield Leaf(name, value, container, key)


def _is_single_value(elements: list[Any]) -> bool:
    """Return whether a list is one value: it and the lists in it have no tensors and no dicts."""
    return not any(
        isinstance(element, Tensor | Mapping)
        or (isinstance(element, list) and not _is_single_value(element))
        for element in elements
    )


def map_values(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return a tree of new dicts and lists with `function(value)` for each value in them.

    A tuple or another container is one value.
    """
    if isinstance(tree, Mapping):
        return {key: map_values(value, function) for key, value in tree.items()}
    if isinstance(tree, list):
        return [map_values(value, function) for value in tree]
    return function(tree)


def is_stateful(value: Any) -> bool:
    """Return whether a value has `state_dict` and `load_state_dict`, as a module does."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def expand_state_dicts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `state` in which modules and optimizers are replaced by their state dicts.

    Only values of `state` itself are replaced, not those in nested dicts. Dicts and lists are new;
    tensors are not copied.

    Raises:
        TypeError: `state` is not a dict.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f'state must be a dict, e.g. {{"model": model, "step": 1}}, got {type(state).__name__}'
        )
    return {
        key: map_values(value.state_dict() if is_stateful(value) else value, lambda leaf: leaf)
        for key, value in state.items()
    }


def run_on_all_ranks(ranks: RankGroup, function: Callable[[], T]) -> T:
    """Return `function()` of this rank; if it raises on any rank, raise on every rank.

    A collective. If `function` itself communicates and one rank raises before that, the other ranks
    wait for it.

    Raises:
        Exception: `function` raised it on this rank.
        CheckpointError: `function` raised an Exception on other ranks, which the message names.
    """
    check_call(Content.OBJECTS, ranks)  # before `function`, which may raise on some ranks only
    error: Exception | None = None
    value: Any = None
    try:
        value = function()
    except Exception as raised:
        error = raised
    messages = ranks.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    messages_by_rank = {rank: text for rank, text in enumerate(messages) if text is not None}
    if messages_by_rank:
        raise CheckpointError(
            "; ".join(f"rank {rank}: {text}" for rank, text in messages_by_rank.items())
        )
    result: T = value
    return result


def is_tensor_of_size(value: Any, size: torch.Size) -> bool:
    """Return whether a value is a tensor of this size."""
    return isinstance(value, Tensor) and value.size() == size
