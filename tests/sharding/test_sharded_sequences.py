"""Deduplication of a sharded embedding collection: hash tables count the uses of ids as without."""

from typing import Any

import pytest
import torch

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    optim,
)
from emblib.jagged import KeyedJaggedTensor
from emblib.sharding import (
    RankGroup,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    World,
    construct_module_plan,
    input_messages,
    row_wise,
    table_wise,
)
from emblib.storage import Hash
from tests.sharding import worlds


def collection() -> EmbeddingCollection:
    """Return hash tables of two dims: LFU with two features, LRU_LFU, late admission, and LRU."""
    admission = FrequencyAdmission(9, ExactCounter(256))
    tables = {
        "lfu": (4, ("f", "g"), Hash(eviction=Eviction.LFU, seed=1)),
        "lru_lfu": (8, ("h",), Hash(eviction=Eviction.LRU_LFU, seed=1)),
        "admission": (4, ("g",), Hash(admission=admission, seed=1)),
        "lru": (4, ("f",), Hash(seed=1)),
    }
    configs = [
        EmbeddingConfig(640, dim, name, features, storage=storage)
        for name, (dim, features, storage) in tables.items()
    ]
    return EmbeddingCollection(configs, optimizer=optim.SGD(0.1))


def batch(rank: int, step: int, dtype: torch.dtype) -> KeyedJaggedTensor:
    """Return three features of four bags, with repeated ids, in another order than the tables'."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 6, (12,), generator=generator)
    draws = torch.rand(int(lengths.sum()), generator=generator)
    return KeyedJaggedTensor(["h", "g", "f"], (draws.square() * 6).to(dtype), lengths=lengths)


def entries(ranks: RankGroup, plan: str, dtype: torch.dtype, *, dedup: bool) -> dict[str, Any]:
    """Train three steps; return the scores, or stamps, of the keys of every table."""
    made = collection()
    shardings = {
        config.name: row_wise() if plan == "row-wise" else table_wise(t % ranks.size)
        for t, config in enumerate(made.embedding_configs())
    }
    modules = construct_module_plan(made, shardings, World(ranks.size, ranks.size))
    sharded = ShardedEmbeddingCollection(made, modules, ranks, dedup=dedup)
    for step in range(3):
        out = sharded(batch(ranks.rank, step, dtype)).wait()
        torch.stack([one.values().sum() for one in out.values()]).sum().backward()
    found = {}
    for name in ("lfu", "lru_lfu", "admission", "lru"):
        table = sharded.tables[name].entries()
        counted = table.stamps if table.scores is None else table.scores
        found[name] = dict(sorted(zip(table.keys.tolist(), counted.tolist(), strict=True)))
    return found


def both(ranks: RankGroup, plan: str, dtype: torch.dtype, max_merged: int) -> tuple[Any, Any]:
    """Return the entries without and with deduplication."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(input_messages, "_MAX_MERGED_NBYTES", max_merged)
        plain = entries(ranks, plan, dtype, dedup=False)
        return plain, entries(ranks, plan, dtype, dedup=True)


@pytest.mark.parametrize("max_merged", [-1, 1 << 19])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("plan", ["row-wise", "table-wise"])
@pytest.mark.parametrize("size", [1, 2])
def test_deduplicated_ids_are_counted(
    size: int, plan: str, dtype: torch.dtype, max_merged: int
) -> None:
    if size == 1 and max_merged < 0:
        return  # nothing is sent
    for plain, deduplicated in worlds.run(size, both, plan, dtype, max_merged):
        assert deduplicated == plain
        assert max(plain["lfu"].values()) > 9  # ids repeat
        assert plain["admission"]


def outputs_of(ranks: RankGroup, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    """Return vectors and ids of sharded hash tables, and pooled rows, for the same keys."""
    keys = torch.tensor([3, 3, 2**62 + 1, 5, -9])
    lengths = torch.tensor([2, 0, 1, 1, 0, 1])
    kjt = KeyedJaggedTensor(["a", "b", "c"], keys.view(dtypes[ranks.rank]), lengths=lengths)
    # The tables of one dim are looked up together, so in another order than that of the batch.
    dims, storage = {"a": 4, "b": 8, "c": 4}, Hash(seed=1)
    plans = (
        {"a": row_wise(), "b": table_wise(0), "c": table_wise(0)},
        dict.fromkeys("abc", row_wise()),
    )
    outputs = []
    for plan in plans:
        for dedup in (False, True):
            configs = [
                EmbeddingConfig(64, dim, name, storage=storage) for name, dim in dims.items()
            ]
            source = EmbeddingCollection(configs, optimizer=optim.SGD(0.1), need_indices=True)
            result = ShardedEmbeddingCollection(source, plan, ranks, dedup=dedup)(kjt).wait()
            for vectors in result.values():
                assert vectors.weights().dtype is kjt.values().dtype
                outputs += [vectors.values(), vectors.weights().view(torch.int64)]
        tables = [EmbeddingBagConfig(64, dim, name, storage=storage) for name, dim in dims.items()]
        bags = EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1))
        outputs.append(ShardedEmbeddingBagCollection(bags, plan, ranks)(kjt).values())
    return [out.detach() for out in outputs]


@pytest.mark.parametrize("size", [1, 2])
def test_keys_may_be_uint64(size: int) -> None:
    expected = worlds.run(size, outputs_of, [torch.int64] * size)
    for dtypes in ([torch.uint64] * size, [torch.int64, torch.uint64][-size:]):
        for outputs, expected_outputs in zip(
            worlds.run(size, outputs_of, dtypes), expected, strict=True
        ):
            assert all(map(torch.equal, outputs, expected_outputs))


@pytest.mark.parametrize("pooled", [False, True])
def test_the_configuration_of_an_unknown_table_is_a_key_error(pooled: bool) -> None:
    if pooled:
        bags = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "lfu")])
        sharded: Any = ShardedEmbeddingBagCollection(bags, {"lfu": row_wise()}, RankGroup.single())
    else:
        source = collection()
        plan = {config.name: row_wise() for config in source.embedding_configs()}
        sharded = ShardedEmbeddingCollection(source, plan, RankGroup.single())
    assert sharded.storage_config("lfu").name == "lfu"
    with pytest.raises(KeyError, match="no table 'item'; the tables are lfu"):
        sharded.storage_config("item")
