"""Features of a shared table with thresholds and times to live of their own."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib import (
    BackingStore,
    CountMinSketch,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    ExactCounter,
    FrequencyAdmission,
    HostRows,
    KeyedJaggedTensor,
    KeyStatus,
    PerFeature,
    optim,
)
from emblib.dynamic.saving.checkpoint import set_table_entries, table_entries
from emblib.reference.hash import is_admitted, is_alive
from emblib.sharding import DistributedModelParallel
from emblib.storage import Hash
from tests.dynamic.dynamic_cases import COPIES, assert_same_content

TABLES = [0, 1, 0, 0]  # feature 1 reads another table
TTLS = (16, 70, 30)  # of features 0, 2 and 3
PER_FEATURE = PerFeature(*TTLS)


def make(
    ttl: Any = PER_FEATURE, device: torch.device | str = "cpu", **options: Any
) -> DynamicEmbeddingBags:
    specs = [
        DynamicSpec(512, 4, name="a", initial_capacity=32, ttl=ttl, **options),
        DynamicSpec(512, 4, name="b", initial_capacity=32),
    ]
    return DynamicEmbeddingBags(specs, optim.SGD(0.1), feature_tables=TABLES, seed=0, device=device)


class Model:
    """Keys of table a, and the last use of each by feature of the table."""

    def __init__(self) -> None:
        self.tick = 0
        self.last_uses: dict[int, dict[int, int]] = {}

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One bag per feature, of few keys; the model notes its uses."""
        self.tick += 1
        parts = []
        for keys in (40, 90, 90, 60):
            count = int(torch.randint(0, 5, (), generator=generator))
            parts.append((torch.rand(count, generator=generator) ** 2 * keys).long() - 20)
        for feature, part in zip(range(3), (parts[0], parts[2], parts[3]), strict=True):
            for key in part.tolist():
                self.last_uses.setdefault(key, {})[feature] = self.tick
        lengths = torch.tensor([0, *(len(part) for part in parts)])
        return torch.cat(parts), lengths.cumsum(0)

    def alive(self, ttls: tuple[int | None, ...]) -> set[int]:
        return {key for key, uses in self.last_uses.items() if is_alive(uses, ttls, self.tick)}


def present(module: DynamicEmbeddingBags) -> set[int]:
    return set(table_entries(module, 0).keys.tolist())


def step(module: DynamicEmbeddingBags, ids: Tensor, offsets: Tensor) -> None:
    device = module.hyperparams.device
    module(ids.to(device), offsets.to(device)).sum().backward()


@pytest.mark.parametrize("ttls", [TTLS, (20, None, 20), (None, 16, 40)])
@pytest.mark.parametrize("unit", [None, timedelta(seconds=1)], ids=["steps", "seconds"])
def test_keys_live_by_the_features_that_use_them(
    device: torch.device, ttls: tuple[int | None, ...], unit: timedelta | None
) -> None:
    """Like the reference at each call of `expire_keys`, by the clock within a 16th of the ttl.

    Training alone is late by an eighth.
    """
    given = [None if ttl is None or unit is None else (ttl + 0.5) * unit for ttl in ttls]
    longest = tuple(None if ttl is None or unit is None else ttl * 17 // 16 + 1 for ttl in ttls)
    module = make(PerFeature(*(ttls if unit is None else given)), device)
    now = 1e9
    if unit is not None:
        module.set_clock(lambda: now)
    model, generator = Model(), torch.Generator().manual_seed(3)
    expired = 0
    for number in range(80):
        step(module, *model.batch(generator))
        keys = present(module)
        assert keys >= model.alive(ttls)
        if number % 7 == 6:
            expired += module.expire_keys()["a"]
            keys = present(module)
            assert model.alive(ttls) <= keys <= model.alive(ttls if unit is None else longest)
        model.last_uses = {key: uses for key, uses in model.last_uses.items() if key in keys}
        now += 1
    stats = module.stats()["a"]
    assert (stats["expired"], stats["erased"]) == (stats["inserted"] - module.size(0), 0)
    assert stats["expired"] > max(expired, 20)
    assert module.capacity(0) > 32


def test_a_key_that_returns_starts_anew() -> None:
    """What an evicted key was used by does not count for the next key of its slot."""
    module = make(PerFeature(1, 50, 1))
    offsets = torch.tensor([0, 0, 0, 1, 1])  # of feature 2, the long one
    step(module, torch.tensor([7]), offsets)
    module.erase("a", torch.tensor([7]))
    short = torch.tensor([0, 1, 1, 1, 1])
    step(module, torch.tensor([7]), short)
    for _ in range(3):
        step(module, torch.tensor([8]), short)
    assert present(module) == {8}


def test_no_memory_without_it() -> None:
    """Features that agree need no last uses; a table that has them pays 8 bytes per level."""
    plain, same = make(9), make(PerFeature(9, 9, 9))
    assert same.state.last_uses is None
    assert list(same.state_dict()) == list(plain.state_dict())
    assert make().nbytes()["index"] == plain.nbytes()["index"] + 2 * 8 * 32


@pytest.mark.parametrize("way", COPIES)
def test_copies_go_on_alike(way: str, tmp_path: Path) -> None:
    model, generator, module = Model(), torch.Generator().manual_seed(4), make()
    for _ in range(25):
        step(module, *model.batch(generator))
    other = COPIES[way](module, make, tmp_path)
    for _ in range(25):
        batch = model.batch(generator)
        for either in (module, other):
            step(either, *batch)
            either.expire_keys()
    assert_same_content(module, other)


def test_entries_without_them_count_as_used_by_all() -> None:
    """A checkpoint of a table with one ttl: no key expires early."""
    plain, module = make(70), make()
    step(plain, torch.tensor([7]), torch.tensor([0, 1, 1, 1, 1]))
    module.load_state_dict(plain.state_dict(), strict=False)
    for _ in range(65):
        step(module, torch.tensor([8]), torch.tensor([0, 1, 1, 1, 1]))
    assert present(module) == {7, 8}
    plain.load_state_dict({k: v for k, v in module.state_dict().items() if "last_uses" not in k})
    for_ever, entries = make(PerFeature(2, 2, None)), table_entries(module, 0)
    uses = entries.rows["last_uses"]
    rows = {"weight": entries.rows["weight"], "last_uses": uses[torch.arange(2)].float()}
    with pytest.raises(ValueError, match="last_uses of 'a' are ticks in int64"):
        set_table_entries(for_ever, 0, replace(entries, rows=rows))
    del rows["last_uses"]
    oldest = replace(entries, stamps=torch.zeros(2, dtype=torch.int64), rows=rows)
    set_table_entries(for_ever, 0, oldest)
    for _ in range(8):
        step(for_ever, torch.tensor([9]), torch.tensor([0, 1, 1, 1, 1]))
    assert present(for_ever) == {7, 8, 9}


@pytest.mark.parametrize(
    "counter", [ExactCounter(512), CountMinSketch(1 << 16)], ids=["exact", "sketch"]
)
def test_the_least_threshold_admits(
    device: torch.device, counter: ExactCounter | CountMinSketch
) -> None:
    thresholds = (5, 1, 3)
    admission = FrequencyAdmission(PerFeature(*thresholds), counter)
    module = make(None, device, admission=admission)
    model, generator = Model(), torch.Generator().manual_seed(5)
    uses: dict[int, int] = {}
    admitted: set[int] = set()
    for _ in range(25):
        ids, offsets = model.batch(generator)
        by_key: dict[int, set[int]] = {}
        for feature, number in ((0, 0), (1, 2), (2, 3)):
            for key in ids[offsets[number] : offsets[number + 1]].tolist():
                uses[key] = uses.get(key, 0) + 1
                by_key.setdefault(key, set()).add(feature)
        for key, features in by_key.items():
            if is_admitted(uses[key], features, thresholds):
                admitted.add(key)
        step(module, ids, offsets)
        assert present(module) == admitted
        status = module.key_status()[: int(offsets[1])].tolist()
        of_feature = ids[: int(offsets[1])].tolist()
        for key, outcome in zip(of_feature, status, strict=True):
            assert (outcome == KeyStatus.NOT_ADMITTED) == (key not in admitted)
    assert len(uses) > len(admitted) > 20


def test_in_collections() -> None:
    """In the order of a table's features; a copy of a slice has the last uses."""
    storage = Hash(ttl=PerFeature(1, 40), seed=1)
    tables = [EmbeddingBagConfig(64, 4, "item", ["short", "long"], storage=storage)]
    bags = EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1))

    def use(collection: Any, short: int, long: int) -> None:
        ids, lengths = torch.tensor([short, long]), torch.tensor([1, 1])
        batch = KeyedJaggedTensor(["short", "long"], ids, lengths=lengths)
        collection(batch).values().sum().backward()

    use(bags, 1, 2)
    other = EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1))
    other.load_state_dict(bags.state_dict())
    for collection in (other, DistributedModelParallel(bags)):
        for _ in range(4):
            use(collection, 3, 3)
        handle = collection.tables["item"]
        assert handle.contains(torch.tensor([1, 2, 3])).tolist() == [False, True, True]


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match=r"ttl of table 'a' has 2 values, and 3 features read"):
        make(PerFeature(1, 2))
    with pytest.raises(ValueError, match="threshold of table 'a' has 1 values"):
        make(admission=FrequencyAdmission(PerFeature(1), ExactCounter(32)))
    with pytest.raises(ValueError, match="must be in steps, or of all in time"):
        DynamicSpec(32, 4, ttl=PerFeature(1, timedelta(1)))
    with pytest.raises(ValueError, match="ttl must be >= 1"):
        DynamicSpec(32, 4, ttl=PerFeature(1, 0))
    with pytest.raises(ValueError, match="needs a value per feature"):
        PerFeature()
    with pytest.raises(ValueError, match="those per feature have no effect"):
        FrequencyAdmission(PerFeature(1, 2), ExactCounter(32), rule=lambda keys, counts: counts > 0)
    spec, backing = DynamicSpec(32, 4, ttl=PerFeature(1, 2)), BackingStore(HostRows(64))
    with pytest.raises(ValueError, match="a backing store knows one last use per row"):
        DynamicEmbeddingBags([spec], optim.SGD(0.1), feature_tables=[0, 0], backing=backing)
    module, damaged = make(), dict(make().state_dict())
    damaged["a.last_uses"] = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=r"a.last_uses: size mismatch"):
        module.load_state_dict(damaged)
    step(module, torch.tensor([7]), torch.tensor([0, 1, 1, 1, 1]))
    before = dict(module.state_dict())
    for tick in (-1, 1 << 40):  # a key with a later tick would never expire
        damaged = before | {"a.last_uses": torch.full_like(before["a.last_uses"], tick)}
        with pytest.raises(RuntimeError, match="last_uses of 'a' must be ticks up to its newest"):
            module.load_state_dict(damaged)
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    one_ttl = make(3)
    one_ttl.load_state_dict(module.state_dict(), strict=False)  # has no use for them
