"""State dicts as trees: their leaves by the names torch.distributed.checkpoint gives them."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from emblib.sharding.ranks import RankGroup

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """There is no whole checkpoint, or it is of another model."""


class Leaf(NamedTuple):
    """A value of a nested state dict, its dotted name, and where it is."""

    name: str
    value: Any
    container: Any
    key: Any

    def replace(self, value: Any) -> None:
        """Put another value in its place."""
        self.container[self.key] = value


def leaves(tree: MutableMapping[Any, Any], prefix: str = "") -> Iterator[Leaf]:
    """All values within dicts, and within lists that hold tensors or dicts."""
    for key, value in list(tree.items()):
        yield from _leaves_of(f"{prefix}{key}", value, tree, key)


def _leaves_of(name: str, value: Any, container: Any, key: Any) -> Iterator[Leaf]:
    if isinstance(value, Mapping):
        for inner, item in list(value.items()):
            yield from _leaves_of(f"{name}.{inner}", item, value, inner)
    elif isinstance(value, list) and not _is_whole(value):
        for inner, item in enumerate(value):
            yield from _leaves_of(f"{name}.{inner}", item, value, inner)
    else:
        yield Leaf(name, value, container, key)


def _is_whole(items: list[Any]) -> bool:
    """Whether a list is one value: it has no tensors and, down to the bottom, no dicts."""
    return not any(
        isinstance(item, Tensor | Mapping) or (isinstance(item, list) and not _is_whole(item))
        for item in items
    )


def mapped(tree: Any, function: Callable[[Any], Any]) -> Any:
    """The same tree with every value made anew; dicts and lists are new, too."""
    if isinstance(tree, Mapping):
        return {key: mapped(value, function) for key, value in tree.items()}
    if isinstance(tree, list):
        return [mapped(value, function) for value in tree]
    return function(tree)


def is_stateful(value: Any) -> bool:
    """Whether it gives and takes a state dict, as modules and optimizers do."""
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def resolved(state: Mapping[str, Any]) -> dict[str, Any]:
    """`state` with the state dicts of modules and optimizers in their place; dicts are new.

    Raises:
        TypeError: something else than a dict.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            'state must be a dict of what is to be kept, e.g. {"model": model, "step": 1}, got '
            f"{type(state).__name__}"
        )
    return {
        key: mapped(value.state_dict() if is_stateful(value) else value, lambda leaf: leaf)
        for key, value in state.items()
    }


def agreed(ranks: RankGroup, function: Callable[[], T]) -> T:
    """What `function()` returns here; if it raises on any rank, every rank raises."""
    error: Exception | None = None
    value: Any = None
    try:
        value = function()
    except Exception as raised:
        error = raised
    told = ranks.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    failed = {rank: text for rank, text in enumerate(told) if text is not None}
    if failed:
        raise CheckpointError("; ".join(f"rank {rank}: {text}" for rank, text in failed.items()))
    result: T = value
    return result


def is_tensor_of_size(value: Any, size: torch.Size) -> bool:
    """Whether a value can take what was saved with this size as it is."""
    return isinstance(value, Tensor) and value.size() == size
