"""Managed collision modules of TorchRec's names: hash tables of the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from emblib import Eviction, optim
from emblib.compat import torchrec
from emblib.sharding import RankGroup
from tests.sharding import worlds

WIDE = torch.tensor([2**61, 5, -3, 2**61])


def parts(rows: int = 64, init_fn: Any = None, **module: Any) -> tuple[Any, Any]:
    """Return the configurations of one table, and its managed collision collection."""
    configs = [
        torchrec.EmbeddingBagConfig(
            num_embeddings=rows,
            embedding_dim=4,
            name="t",
            feature_names=["f", "g"],
            init_fn=init_fn,
        )
    ]
    given = {"eviction_policy": torchrec.DistanceLFU_EvictionPolicy(), "eviction_interval": 2}
    managed = torchrec.MCHManagedCollisionModule(
        zch_size=64, device=torch.device("cpu"), **{**given, **module}
    )
    return configs, torchrec.ManagedCollisionCollection({"t": managed}, configs)


def bags(configs: Any, managed: Any, **options: Any) -> Any:
    inner = torchrec.EmbeddingBagCollection(
        tables=configs, device=torch.device("cpu"), optimizer=optim.SGD(0.5)
    )
    return torchrec.ManagedCollisionEmbeddingBagCollection(inner, managed, **options)


def batch(ids: torch.Tensor = WIDE) -> torchrec.KeyedJaggedTensor:
    return torchrec.KeyedJaggedTensor(["f", "g"], ids, lengths=torch.tensor([2, 0, 1, 1]))


def test_any_ids_train() -> None:
    """Rows start within the bounds of the table, and unknown ids read zeros when evaluated."""
    model = bags(*parts())
    with torch.no_grad():
        model.eval()
        assert not model(batch())[0].values().any()
        model.train()
    before, remapped = model(batch())
    assert remapped is None
    assert before.keys() == ["f", "g"]
    assert before.values().abs().max() <= 2 * 0.125
    before.values().sum().backward()
    after = model.eval()(batch())[0].values()
    # The id 2**61 is in the first bag of f and in the last of g: its row moved by two steps of 0.5.
    torch.testing.assert_close(
        before.values() - after, torch.tensor([[1.5] * 4 + [0.5] * 4, [0.0] * 4 + [1.0] * 4])
    )
    table = model._embedding_module.tables["t"]
    assert table.size() == 3
    assert set(model.state_dict()) == {
        f"_embedding_module.{key}" for key in model._embedding_module.state_dict()
    }


def test_ids_are_hashed_before_the_lookup() -> None:
    configs, managed = parts(
        input_hash_size=10, input_hash_func=lambda ids, size: ids.remainder(size)
    )
    model = bags(configs, managed)
    model(batch(torch.tensor([3, 13, 23, 7])))
    assert model._embedding_module.tables["t"].entries().keys.sort().values.tolist() == [3, 7]
    hashed = managed(batch(torch.tensor([3, 13, 23, 7])))
    assert hashed.values().tolist() == [3, 3, 3, 7]
    assert hashed.lengths().tolist() == [2, 0, 1, 1]
    assert managed(torchrec.KeyedJaggedTensor.empty()).keys() == []


@pytest.mark.parametrize(
    ("policy", "eviction"),
    [
        (torchrec.LFU_EvictionPolicy(), Eviction.LFU),
        (torchrec.LRU_EvictionPolicy(decay_exponent=2.0), Eviction.LRU),
        (torchrec.DistanceLFU_EvictionPolicy(), Eviction.LRU_LFU),
    ],
)
def test_policies_evict(policy: Any, eviction: Eviction) -> None:
    _, managed = parts(eviction_policy=policy)
    (config,) = managed.hashed_configs()
    assert config.storage.eviction is eviction
    assert config.num_embeddings == 64


def test_it_is_sharded_as_a_hash_table() -> None:
    configs, managed = parts()
    module: Any = managed._managed_collision_modules["t"]
    assert (module.output_size(), module.buckets()) == (64, 1)
    assert managed.embedding_configs() == configs
    model = bags(configs, managed)
    sharder = torchrec.ManagedCollisionEmbeddingBagCollectionSharder()
    sharded: Any = torchrec.DistributedModelParallel(
        model, device=torch.device("cpu"), sharders=[sharder], init_data_parallel=False
    )
    found, _ = sharded(batch())
    assert found.values().shape == (2, 8)
    inner = sharded.module._embedding_module
    assert isinstance(inner, torchrec.ShardedEmbeddingBagCollection)


def _bag_of_each_rank(ranks: RankGroup) -> tuple[torch.Tensor, int]:
    configs, managed = parts()
    inner = torchrec.EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    model = torchrec.DistributedModelParallel(
        torchrec.ManagedCollisionEmbeddingBagCollection(inner, managed),
        env=torchrec.ShardingEnv.from_process_group(ranks.group),
        device=torch.device("cpu"),
        sharders=[
            torchrec.ManagedCollisionEmbeddingBagCollectionSharder(
                torchrec.EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5})
            )
        ],
        init_data_parallel=False,
    )
    ids = torch.tensor([2**61, 7 + ranks.rank, -3, 2**61])
    found = model(batch(ids))[0].values().detach().clone()
    tables: Any = model.module._embedding_module.tables
    return found, tables["t"].size()


def test_ranks_share_the_rows_of_an_id() -> None:
    (first, size), (second, _) = worlds.run(2, _bag_of_each_rank)
    assert size == 4
    assert torch.equal(first[:, 4:], second[:, 4:])
    assert first[1, 4:].any()
    assert not torch.equal(first[0, :4], second[0, :4])


def test_sequences() -> None:
    configs = [torchrec.EmbeddingConfig(32, 4, "t", feature_names=["f", "g"])]
    managed = torchrec.MCHManagedCollisionModule(
        32, torch.device("cpu"), torchrec.LRU_EvictionPolicy(), 1
    )
    model = torchrec.ManagedCollisionEmbeddingCollection(
        torchrec.EmbeddingCollection(tables=configs, need_indices=True),
        torchrec.ManagedCollisionCollection({"t": managed}, configs),
    )
    found = model(batch())[0]
    assert torch.equal(found["f"].values()[0], found["g"].values()[1])
    assert found["g"].weights().tolist() == [-3, 2**61]
    sharder = torchrec.ManagedCollisionEmbeddingCollectionSharder(fused_params={"learning_rate": 1})
    assert sharder.optimizer is not None
    same = torchrec.ManagedCollisionEmbeddingCollectionSharder(
        sharder, fused_params={"learning_rate": 1}
    )
    assert same.fused_params == sharder.fused_params


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: torchrec.LFU_EvictionPolicy(lambda x: x), "FrequencyAdmission"),
        (lambda: torchrec.DistanceLFU_EvictionPolicy(2.0), "decay_exponent must be 1"),
        (lambda: parts(rows=32), "zch_size of table 't' must be its 32 rows"),
        (lambda: parts(eviction_policy=None), "eviction_policy must be one"),
        (lambda: bags(*parts(), return_remapped_features=True), "no remapped ones"),
        (lambda: bags(parts()[0][:0], parts()[1]), "the same configurations"),
        (lambda: torchrec.ManagedCollisionCollection({}, parts()[0]), "needs an MCHManaged"),
        (lambda: torchrec.ManagedCollisionCollection({"u": None}, []), "no table for the modules"),
        (lambda: bags(*parts(init_fn=torch.nn.init.zeros_)), "weight_init_min"),
        (
            lambda: bags(*parts(input_hash_func=lambda ids, size: ids[:1]))(batch()),
            "an id per id",
        ),
        (
            lambda: torchrec.ManagedCollisionEmbeddingCollectionSharder(
                torchrec.EmbeddingCollectionSharder(), fused_params={"learning_rate": 1}
            ),
            "fused_params must be those of ec_sharder",
        ),
    ],
)
def test_what_it_refuses(call: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()
