"""Where pieces of a tensor lie, as the host knows it, and those that lie together."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import Tensor


def bounds_of(lengths: Sequence[int]) -> list[int]:
    """Where pieces of `lengths` begin, and the last one ends."""
    return list(accumulate(lengths, initial=0))


def places_of(keys: Sequence[str]) -> dict[str, int]:
    """The place of each key; of one that comes twice, the first."""
    index: dict[str, int] = {}
    for place, key in enumerate(keys):
        index.setdefault(key, place)
    return index


def is_run(order: Sequence[int]) -> bool:
    """Whether pieces in this order lie in one place already (so do none)."""
    return all(second == first + 1 for first, second in pairwise(order))


def span(tensor: Tensor, bounds: Sequence[int], order: Sequence[int]) -> Tensor:
    """The pieces of an `order` that is a run, as a view."""
    if not order:
        return tensor.narrow(0, 0, 0)
    start = bounds[order[0]]
    return tensor.narrow(0, start, bounds[order[-1] + 1] - start)
