"""A large dynamic module and a tiered one that do the same, for the tests of tiers."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from emblib import BackingStore, DynamicEmbeddingBags, TierMode, optim
from emblib.dynamic.tiers.disk import DiskRows
from emblib.dynamic.tiers.host import HostRows
from emblib.dynamic.tiers.sqlite import SqliteRows
from emblib.dynamic.tiers.store import RowStore
from emblib.init import Normal
from emblib.specs import DynamicSpec

KEYS, BAGS = 500, 8


def specs(capacities: tuple[int, ...], **options: object) -> list[DynamicSpec]:
    """Tables a and b; first values that do not follow the capacity."""
    options = {"initializer": Normal(), **options}
    dims = (options.pop("dim", 6), options.pop("dim", 4))
    return [
        DynamicSpec(capacity, dim, name=name, **options)  # type: ignore[arg-type]
        for capacity, dim, name in zip(capacities, dims, "ab", strict=True)
    ]


def batch(seed: int, lookups: int = 120, features: int = 3) -> tuple[Tensor, Tensor]:
    """Some keys come often, and all of int64 may come."""
    generator = torch.Generator().manual_seed(seed)
    ids = (torch.rand(lookups, generator=generator) ** 3 * KEYS).long() - 5
    ids[torch.rand(lookups, generator=generator) < 0.03] = -(2**63)
    cuts = torch.randint(0, lookups + 1, (features * BAGS - 1,), generator=generator).sort().values
    return ids, torch.cat([torch.tensor([0]), cuts, torch.tensor([lookups])])


def prefetched(module: DynamicEmbeddingBags) -> DynamicEmbeddingBags:
    """Return a module after it was told to prefetch from `HostRows` on the CPU too."""
    assert module.state.backing is not None
    module.state.backing.gains_from_prefetch = True
    return module


class Pair:
    """One large module and a tiered one, which do the same."""

    def __init__(
        self, store: RowStore, mode: TierMode = TierMode.CACHING, **options: object
    ) -> None:
        names = ("eviction", "admission", "ttl", "fallback_rows")
        rules = {k: options.pop(k) for k in names if k in options}
        made = {"feature_tables": (0, 1, 0), "seed": 3, **options}
        optimizer = made.pop("optimizer", optim.Adam(0.1))
        self.big = DynamicEmbeddingBags(specs((4096, 4096), **rules), optimizer, **made)
        self.small = prefetched(
            DynamicEmbeddingBags(
                specs((32, 64), **rules), optimizer, backing=BackingStore(store, mode), **made
            )
        )

    def forward(self, seed: int, **options: object) -> tuple[Tensor, Tensor]:
        outs = [module(*batch(seed), **options) for module in (self.big, self.small)]
        assert torch.equal(*outs)
        return outs[0], outs[1]

    def backward(self, outs: tuple[Tensor, Tensor], seed: int) -> None:
        grad = torch.randn(outs[0].shape, generator=torch.Generator().manual_seed(seed))
        for out in outs:
            out.backward(grad.to(out.dtype))

    def train(self, seed: int) -> None:
        self.backward(self.forward(seed), seed)

    def compare(self, *, stamps: bool = True) -> None:
        """All keys, stamps, scores, rows and states."""
        mine, theirs = self.small.state_dict(), self.big.state_dict()
        assert mine.keys() == theirs.keys()
        for key in theirs:
            if stamps or "stamps" not in key:
                assert torch.equal(mine[key], theirs[key]), key
        for t in range(2):
            assert self.small.size(t) == self.big.size(t)


STORES: dict[str, Callable[[Path], RowStore]] = {
    "host": lambda path: HostRows(4096),
    "disk": lambda path: DiskRows(path / "rows"),
    "sqlite": lambda path: SqliteRows(path / "rows.db"),
}
