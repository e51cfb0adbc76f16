"""emblib under TorchRec's names against TorchRec 1.8.0: equal where that is right."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

import emblib.compat.torchrec as ours
from emblib.sharding import RankGroup
from tests.compat.peer import peer_module
from tests.sharding import worlds

theirs: Any = peer_module("torchrec")

LR = 0.5
ROWS, DIM = 12, 8
KEYS = ["f0", "f1", "f2"]


def config_of(library: Any, number: int, pooling: str) -> Any:
    """The same table in either library."""
    return library.EmbeddingBagConfig(
        name=f"t{number}",
        embedding_dim=DIM,
        num_embeddings=ROWS + number,
        feature_names=[KEYS[number]],
        pooling=getattr(library.PoolingType, pooling),
    )


def collection_of(library: Any, poolings: list[str], **options: Any) -> Any:
    """One with the same weights in either library."""
    tables = [config_of(library, number, pooling) for number, pooling in enumerate(poolings)]
    found = library.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"), **options)
    for number, bag in enumerate(found.embedding_bags.values()):
        generator = torch.Generator().manual_seed(number)
        bag.weight.data.copy_(torch.randn(ROWS + number, DIM, generator=generator))
    return found


def batch_of(library: Any, rank: int = 0, *, weighted: bool = False) -> Any:
    """Two bags of each feature, as many ids in each as make their mean another number."""
    lengths = torch.tensor([2, 3, 1, 4, 0, 2])
    generator = torch.Generator().manual_seed(40 + rank)
    values = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(len(values), generator=generator) if weighted else None
    return library.KeyedJaggedTensor(keys=KEYS, values=values, lengths=lengths, weights=weights)


@pytest.mark.parametrize("poolings", [["SUM"] * 3, ["MEAN"] * 3, ["SUM", "MEAN", "SUM"]])
def test_collections_are_equal(poolings: list[str]) -> None:
    want = collection_of(theirs, poolings)(batch_of(theirs))
    got = collection_of(ours, poolings)(batch_of(ours))
    assert got.keys() == want.keys()
    assert got.length_per_key() == want.length_per_key()
    torch.testing.assert_close(got.values(), want.values())


def test_weighted_collections_are_equal() -> None:
    want = collection_of(theirs, ["SUM"] * 3, is_weighted=True)(batch_of(theirs, weighted=True))
    got = collection_of(ours, ["SUM"] * 3, is_weighted=True)(batch_of(ours, weighted=True))
    torch.testing.assert_close(got.values(), want.values())


def test_collections_take_torchrecs_own_batches() -> None:
    """By what they have, not by what they are."""
    ebc = collection_of(ours, ["SUM", "MEAN", "SUM"])
    assert torch.equal(ebc(batch_of(theirs)).values(), ebc(batch_of(ours)).values())


def test_state_dicts_go_both_ways() -> None:
    mine, other = (collection_of(library, ["SUM"] * 3) for library in (ours, theirs))
    assert list(mine.state_dict()) == list(other.state_dict())
    with torch.no_grad():
        for weight in other.state_dict().values():
            weight.mul_(2.0)
    mine.load_state_dict(other.state_dict())
    other.load_state_dict(mine.state_dict())
    got, want = mine(batch_of(ours)).values(), other(batch_of(theirs)).values()
    torch.testing.assert_close(got, want)


# Over two ranks


def torchrec_sharded(ranks: RankGroup, poolings: list[str], kinds: list[str]) -> Any:
    """TorchRec's sharded collection with the weights of `collection_of`, SGD in backward."""
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    # It warns whoever builds a sharded collection of a function that TorchRec itself calls.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
    source = collection_of(theirs, poolings)
    values = [bag.weight.detach().clone() for bag in source.embedding_bags.values()]
    apply_optimizer_in_backward(torch.optim.SGD, source.parameters(), {"lr": LR})
    rules = {
        "row_wise": lambda number: sharding_plan.row_wise(compute_kernel="fused"),
        "table_wise": lambda number: sharding_plan.table_wise(
            rank=number % 2, compute_kernel="fused"
        ),
    }
    plan = sharding_plan.construct_module_sharding_plan(
        source,
        {f"t{number}": rules[kind](number) for number, kind in enumerate(kinds)},
        world_size=ranks.size,
        local_size=ranks.size,
        device_type="cpu",
    )
    env = ShardingEnv.from_process_group(ranks.group)
    sharded = EmbeddingBagCollectionSharder().shard(source, plan, env, torch.device("cpu"))
    for number, value in enumerate(sharded.state_dict().values()):
        for shard in value.local_shards():
            row, column = shard.metadata.shard_offsets
            rows, columns = shard.metadata.shard_sizes
            whole = values[number]
            shard.tensor.copy_(whole[row : row + rows, column : column + columns])
    return sharded


def emblib_sharded(ranks: RankGroup, poolings: list[str], kinds: list[str]) -> Any:
    """Ours by the same words."""
    source = collection_of(ours, poolings)
    rules = {
        "row_wise": lambda number: ours.row_wise(),
        "table_wise": lambda number: ours.table_wise(rank=number % 2),
    }
    plan = ours.construct_module_sharding_plan(
        source,
        {f"t{number}": rules[kind](number) for number, kind in enumerate(kinds)},
        world_size=ranks.size,
        local_size=ranks.size,
    )
    sharder = ours.EmbeddingBagCollectionSharder(
        {"optimizer": ours.EmbOptimType.EXACT_SGD, "learning_rate": LR}
    )
    return sharder.shard(source, plan, ours.ShardingEnv.from_process_group(ranks.group))


def by_key(output: Any) -> dict[str, Tensor]:
    """Whatever the order of the features is."""
    keys = list(output.keys())
    return {key: output[key].detach().clone() for key in keys}


def _trained(ranks: RankGroup, poolings: list[str], kinds: list[str]) -> dict[str, Any]:
    """Output, and output after a step: theirs, ours, and what an unsharded collection gives."""
    found: dict[str, Any] = {}
    makers = {"theirs": (theirs, torchrec_sharded), "ours": (ours, emblib_sharded)}
    for name, (library, make) in makers.items():
        sharded = make(ranks, poolings, kinds)
        features = batch_of(library, ranks.rank)
        first = sharded(features).wait()
        kept = by_key(first)
        scale = torch.arange(1.0, DIM + 1)
        sum((first[key] * scale).sum() for key in KEYS).backward()
        found[name] = (list(first.keys()), kept, by_key(sharded(features).wait()))
    whole = collection_of(ours, poolings)(batch_of(ours, ranks.rank))
    return found | {"whole": by_key(whole)}


def _kept(ranks: RankGroup) -> tuple[bool, bool, list[bool]]:
    """Whether `shard` keeps the weights, and whether `fused_params` of a plan by hand train."""
    source = collection_of(theirs, ["SUM"] * 3)
    first = source.embedding_bags["t0"].weight.detach().clone()
    plan = _plan_of_torchrec(source, ranks)
    env = _environment_of_torchrec(ranks)
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": LR})
    sharded = sharder.shard(source, plan, env, torch.device("cpu"))
    weight = next(iter(sharded.state_dict().values()))
    shards = [shard.tensor for shard in weight.local_shards()]
    dropped = [not torch.equal(shard, first) for shard in shards]
    before = [shard.clone() for shard in shards]
    sharded(batch_of(theirs, ranks.rank)).wait().values().sum().backward()
    untrained = all(torch.equal(a, b) for a, b in zip(before, shards, strict=True))
    mine = emblib_sharded(ranks, ["SUM"] * 3, ["table_wise"] * 3)
    out = mine(batch_of(ours, ranks.rank))
    same = torch.equal(
        out["f0"], collection_of(ours, ["SUM"] * 3)(batch_of(ours, ranks.rank))["f0"]
    )
    out.wait().values().sum().backward()
    trained = not torch.equal(mine(batch_of(ours, ranks.rank))["f0"], out["f0"])
    return same and trained, untrained, dropped


def _plan_of_torchrec(source: Any, ranks: RankGroup) -> Any:
    from torchrec.distributed import sharding_plan

    return sharding_plan.construct_module_sharding_plan(
        source,
        {f"t{number}": sharding_plan.table_wise(rank=0) for number in range(3)},
        world_size=ranks.size,
        local_size=ranks.size,
        device_type="cpu",
    )


def _environment_of_torchrec(ranks: RankGroup) -> Any:
    from torchrec.distributed.types import ShardingEnv

    return ShardingEnv.from_process_group(ranks.group)


def test_weights_are_kept_and_fused_params_are_used_with_a_plan_by_hand() -> None:
    """TorchRec draws new weights, and applies no gradients where no kernel is named."""
    found = worlds.run(2, _kept)
    assert all(right for right, _, _ in found)
    assert all(untrained for _, untrained, _ in found)
    assert [dropped for _, _, dropped in found] == [[True], []]


def test_a_bfloat16_table_is_bfloat16() -> None:
    """TorchRec's unsharded collection makes it float16."""
    dtypes = []
    for library in (theirs, ours):
        config = library.EmbeddingBagConfig(
            name="t",
            embedding_dim=DIM,
            num_embeddings=ROWS,
            feature_names=["f"],
            data_type=library.DataType.BF16,
        )
        found = library.EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))
        dtypes.append(found.embedding_bags["t"].weight.dtype)
    assert dtypes == [torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    "kinds", [["table_wise"] * 3, ["row_wise"] * 3, ["row_wise", "table_wise", "row_wise"]]
)
def test_sharded_sums_and_their_training_are_equal(kinds: list[str]) -> None:
    for found in worlds.run(2, _trained, ["SUM"] * 3, kinds):
        _, want, want_after = found["theirs"]
        keys, got, got_after = found["ours"]
        assert keys == KEYS
        for key in KEYS:
            torch.testing.assert_close(got[key], want[key])
            torch.testing.assert_close(got_after[key], want_after[key])
            torch.testing.assert_close(got[key], found["whole"][key])


def test_means_of_mixed_sharding_types_are_right_here() -> None:
    """TorchRec 1.8.0 divides those of table-wise tables by their length twice."""
    kinds = ["row_wise", "table_wise", "row_wise"]
    for found in worlds.run(2, _trained, ["MEAN"] * 3, kinds):
        _, wrong, _ = found["theirs"]
        _, got, _ = found["ours"]
        for key in KEYS:
            torch.testing.assert_close(got[key], found["whole"][key])
        lengths = torch.tensor([[1.0], [4.0]])  # of the bags of f1
        torch.testing.assert_close(wrong["f1"], found["whole"]["f1"] / lengths, rtol=1e-4, atol=0)


def test_the_order_of_features_does_not_depend_on_the_plan() -> None:
    """TorchRec's goes by the ranks of the tables."""
    for found in worlds.run(2, _trained, ["SUM"] * 3, ["table_wise"] * 3):
        assert found["theirs"][0] == ["f0", "f2", "f1"]
        assert found["ours"][0] == KEYS
