"""What every rank tells the others of itself between two steps: a few numbers, without waiting."""

from collections.abc import Sequence

import torch

from emblib.sharding.awaitable import Awaitable, Deferred, NoWait
from emblib.sharding.exchange import Content, start_all_to_all
from emblib.sharding.groups_of_ranks import Ranks, sends_from_hosts, subgroup


class Agreement:
    """Gathers small numbers of every rank in the background.

    The numbers stay in the memory of the host, so that nobody waits for a GPU. A group that can
    only send from GPUs gets a second one over gloo beside it; making this object is then collective
    over the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = _on_hosts(ranks)

    def gather(self, numbers: Sequence[int]) -> Awaitable[list[list[int]]]:
        """The numbers of every rank, by rank; all ranks call this, with as many numbers each."""
        if self._ranks.size == 1:
            return NoWait([list(numbers)])
        size, sizes = self._ranks.size, [len(numbers)] * self._ranks.size
        own = torch.tensor([*numbers] * size, dtype=torch.int64)
        pending = start_all_to_all(own, sizes, sizes, self._ranks, content=Content.NUMBERS)
        return Deferred(lambda: pending.wait().view(size, -1).tolist())


def _on_hosts(ranks: Ranks) -> Ranks:
    """The same ranks, in a group that sends from the memory of the host."""
    if ranks.group is None or sends_from_hosts(ranks.group):
        return ranks
    return Ranks(subgroup(ranks), local_size=ranks.local_size)
