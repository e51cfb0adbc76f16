"""Random calls of a large dynamic module and a tiered one: whatever comes in whatever order."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emblib import BackingStore, DynamicEmbeddingBags, TierMode, optim
from emblib.specs import Eviction, ExactCounter, FrequencyAdmission
from tests.dynamic.tier_cases import STORES, batch, prefetched, specs

OPTIMIZERS = (optim.Adam(0.1), optim.SGD(0.1), optim.RowwiseAdagrad(0.1))
CALLS = (
    "forward",
    "forward",
    "forward",
    "backward",
    "backward",
    "evaluate",
    "erase",
    "prefetch",
    "flush",
    "compare",
    "reopen",
)


class Calls:
    """Both modules, and the batches between their forward and their backward."""

    def __init__(self, seed: int, directory: Path, *, write_behind: bool) -> None:
        self.chance = chance = random.Random(seed)
        self.write_behind = write_behind
        self.kind = chance.choice(list(STORES))
        self.directory, self.optimizer = directory, chance.choice(OPTIMIZERS)
        self.mode = chance.choice(list(TierMode))
        evictions = (Eviction.LRU, Eviction.LFU, Eviction.LRU_LFU, Eviction.NONE)
        self.rules: dict[str, object] = {
            "eviction": chance.choice(evictions),
            "default_value": chance.choice([0.0, 0.5]),
        }
        if chance.random() < 0.3:
            self.rules["admission"] = FrequencyAdmission(chance.randrange(2, 4), ExactCounter(4096))
        sizes = (1, 32, 64, 96, 300)
        self.capacities = (chance.choice(sizes), chance.choice(sizes))
        self.begins_small = chance.random() < 0.5
        made = {"feature_tables": (0, 1, 0), "seed": 3}
        tables = specs((8192, 8192), **self.rules)
        self.big = DynamicEmbeddingBags(tables, self.optimizer, **made)  # type: ignore[arg-type]
        self.small = self.make()
        self.flights: list[tuple[list[Tensor], int]] = []

    def make(self) -> DynamicEmbeddingBags:
        tables = specs(self.capacities, **self.rules)
        if self.begins_small:
            tables = [replace(spec, initial_capacity=1) for spec in tables]
        store = STORES[self.kind](self.directory)
        tiers = BackingStore(store, self.mode, write_behind=self.write_behind)
        return prefetched(
            DynamicEmbeddingBags(
                tables, self.optimizer, backing=tiers, feature_tables=(0, 1, 0), seed=3
            )
        )

    def forward(self, lookups: int) -> list[Tensor]:
        seed = self.chance.randrange(10**6)
        outs = [module(*batch(seed, lookups)) for module in (self.big, self.small)]
        assert torch.equal(*outs)
        return outs

    def call(self, name: str, number: int) -> None:
        chance = self.chance
        match name:
            case "forward":
                self.flights.append((self.forward(chance.choice((0, 1, 10, 120, 400))), number))
            case "backward" if self.flights:
                outs, seed = self.flights.pop(chance.randrange(len(self.flights)))
                generator = torch.Generator().manual_seed(seed)
                grad = torch.randn(outs[0].shape, generator=generator)
                for out in outs:
                    out.backward(grad)
            case "evaluate":
                with torch.no_grad():
                    self.forward(150)
            case "erase":
                table, first = chance.randrange(2), chance.randrange(200)
                ids = torch.arange(first, first + chance.randrange(40))
                erased = [module.erase(table, ids) for module in (self.big, self.small)]
                assert torch.equal(*erased)
            case "prefetch":
                self.small.prefetch(*batch(chance.randrange(10**6)))
            case "flush":
                self.small.flush()
            case "compare":
                self.compare()
            case "reopen" if not self.flights and self.kind != "host":
                if "admission" not in self.rules:  # its counts are not in the store
                    self.small.flush()
                    self.small.close()
                    self.small = self.make()

    def compare(self) -> None:
        mine, theirs = self.small.state_dict(), self.big.state_dict()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
        for t in range(2):
            assert self.small.size(t) == self.big.size(t)


@pytest.mark.parametrize("write_behind", [False, True], ids=["", "write_behind"])
@pytest.mark.parametrize("seed", range(8))
def test_any_calls_in_any_order(seed: int, write_behind: bool, tmp_path: Path) -> None:
    calls = Calls(seed, tmp_path, write_behind=write_behind)
    for number in range(30):
        calls.call(calls.chance.choice(CALLS), number)
    calls.compare()
    assert all(line.dropped == 0 for line in calls.small.tier_stats().values())
    calls.small.close()
