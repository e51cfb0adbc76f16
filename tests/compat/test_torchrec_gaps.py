"""Arguments and calls of TorchRec's users on several ranks: deduplication, contexts, copies, ..."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import emblib.compat.torchrec as torchrec
from emblib import sharding, share_tables
from emblib.jagged import KeyedJaggedTensor
from emblib.sharding import RankGroup
from tests.compat import torchrec_cases
from tests.compat.torchrec_cases import DIM, batch, collection, pooled, weights_of
from tests.sharding import worlds

ROWS = 12


def sequences() -> torchrec.EmbeddingCollection:
    torch.manual_seed(1)
    tables = [
        torchrec.EmbeddingConfig(
            name=name, embedding_dim=dim, num_embeddings=ROWS, feature_names=features
        )
        for name, dim, features in (("x", 4, ["f", "g"]), ("y", 8, ["f"]))
    ]
    return torchrec.EmbeddingCollection(tables=tables, need_indices=True)


def repeated(rank: int) -> KeyedJaggedTensor:
    """Many ids several times, and bags of other lengths on each rank."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.randint(0, 5, (2 * (3 + rank),), generator=generator)
    values = torch.randint(0, 4, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(["g", "f"], values, lengths=lengths)


RULES = {
    "table_wise": lambda last: torchrec.table_wise(rank=last),
    "row_wise": lambda last: torchrec.row_wise(),
    "column_wise": lambda last: torchrec.column_wise(ranks=[0, last]),
    "data_parallel": lambda last: torchrec.data_parallel(),
}


def _step_of_sequences(ranks: RankGroup, rule: str, *, dedup: bool) -> dict[str, Any]:
    """Results of a batch, and the weights after its step."""
    made = sequences()
    env = torchrec.ShardingEnv.from_process_group(ranks.group)
    rules = torchrec.apply_to_all(made, RULES[rule](ranks.size - 1))
    plan = torchrec.construct_module_sharding_plan(
        made, rules, world_size=ranks.size, local_size=ranks.size, device_type="cpu"
    )
    sharder = torchrec.EmbeddingCollectionSharder(
        fused_params={"optimizer": "exact_adagrad", "learning_rate": 0.5}, use_index_dedup=dedup
    )
    sharded = sharder.shard(made, plan, env)
    out = sharded(repeated(ranks.rank)).wait()
    results = {
        name: (j.values().detach().clone(), j.lengths(), j.weights()) for name, j in out.items()
    }
    loss = torch.stack([(j.values() * (1 + j.values())).sum() for j in out.values()]).sum()
    loss.backward()
    return {"out": results, "weights": weights_of(sharded)}


def _both_ways(ranks: RankGroup, rule: str) -> tuple[Any, Any]:
    first = _step_of_sequences(ranks, rule, dedup=False)
    return first, _step_of_sequences(ranks, rule, dedup=True)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("size", [1, 2])
def test_each_id_once_gives_the_same_step(size: int, rule: str) -> None:
    for plain, once in worlds.run(size, _both_ways, rule):
        assert list(plain["out"]) == list(once["out"]) == ["f@x", "g", "f@y"]
        for name, (values, lengths, ids) in plain["out"].items():
            found = once["out"][name]
            assert torch.equal(found[0], values)
            assert torch.equal(found[1], lengths)
            assert torch.equal(found[2], ids)
        for name, table in plain["weights"].items():
            torch.testing.assert_close(once["weights"][name], table)


def _ids_received(ranks: RankGroup) -> tuple[int, int]:
    counts = []
    for dedup in (False, True):
        made = sharding.ShardedEmbeddingCollection(
            sequences(),
            sharding.construct_module_plan(
                sequences(),
                {"x": sharding.table_wise(0), "y": sharding.table_wise(0)},
                sharding.World(ranks.size, ranks.size),
            ),
            ranks,
            dedup=dedup,
        )
        received = made.input_dist(repeated(ranks.rank)).wait().wait()
        counts.append(sum(one.ids.numel() for one in received.batches))
    return counts[0], counts[1]


def test_repeated_ids_are_not_sent() -> None:
    before, after = worlds.run(2, _ids_received)[0]
    # Features f and g of tables x and y: at most four distinct ids each, from each rank.
    assert after <= 3 * 4 * 2 < before


def _by_contexts(ranks: RankGroup) -> bool:
    made = collection()
    before = weights_of(made)
    env = torchrec.ShardingEnv.from_process_group(ranks.group)
    sharded: Any = torchrec.shard(made, torchrec.row_wise(), env)
    first, second = sharded.create_context(), sharded.create_context()
    # Two batches in flight: each context has its own.
    sent = [sharded.input_dist(ctx, batch(ranks.rank + n)) for n, ctx in enumerate((first, second))]
    received = [one.wait() for one in sent]
    received = [one.wait() for one in received]
    rows = [sharded.compute(ctx, r) for ctx, r in zip((first, second), received, strict=True)]
    out = [sharded.output_dist(ctx, r) for ctx, r in zip((first, second), rows, strict=True)]
    for number, one in enumerate(out):
        torch.testing.assert_close(one.wait().values(), pooled(before, batch(ranks.rank + number)))
    return True


@pytest.mark.parametrize("size", [1, 2])
def test_contexts_belong_to_batches(size: int) -> None:
    assert all(worlds.run(size, _by_contexts))


class Model(nn.Module):
    """Sparse and dense."""

    def __init__(self, device: str = "cpu", *, sequences_too: bool = False) -> None:
        super().__init__()
        self.ebc = collection(device)
        self.over = nn.Linear(2 * DIM, 1, device=device)
        self.ec = sequences() if sequences_too else None

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out: Tensor = self.over(self.ebc(features).values())
        return out


def _left_on_meta(ranks: RankGroup) -> dict[str, bool]:
    env = torchrec.ShardingEnv.from_process_group(ranks.group)
    model = torchrec.DistributedModelParallel(
        Model("meta"), env, init_parameters=False, init_data_parallel=False
    )
    found = {name: p.is_meta for name, p in model.named_parameters()}
    with pytest.raises(RuntimeError, match="is on the meta device"):
        model.init_data_parallel()
    model.module.over.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.module.over.parameters():
            parameter.fill_(0.5)
    model.init_data_parallel()
    assert model(batch(ranks.rank)).shape == (2, 1)
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_dense_parameters_may_stay_on_meta(size: int) -> None:
    for found in worlds.run(size, _left_on_meta):
        assert {name: meta for name, meta in found.items() if name.startswith("over.")} == {
            "over.weight": True,
            "over.bias": True,
        }
        assert not any(meta for name, meta in found.items() if name.startswith("ebc."))


def _gradients(ranks: RankGroup, precision: str | None) -> Tensor:
    torch.manual_seed(3)
    env = torchrec.ShardingEnv.from_process_group(ranks.group)
    wrapper = torchrec.DefaultDataParallelWrapper(allreduce_comm_precision=precision)
    model = torchrec.DistributedModelParallel(Model(), env, data_parallel_wrapper=wrapper)
    model(batch(ranks.rank)).square().sum().backward()
    gradient: Tensor = model.module.over.weight.grad
    return gradient.clone()


def test_dense_gradients_travel_in_fewer_bits() -> None:
    exact = worlds.run(2, _gradients, None)[0]
    for precision, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        one, other = worlds.run(2, _gradients, precision)
        assert torch.equal(one, other)
        assert torch.equal(one, one.to(dtype).float())
        assert not torch.equal(one, exact)
        torch.testing.assert_close(one, exact, rtol=0.02, atol=1e-3)


def _copied(ranks: RankGroup) -> bool:
    env = torchrec.ShardingEnv.from_process_group(ranks.group)
    sharder = torchrec.EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5})
    model = torchrec.DistributedModelParallel(Model(), env, sharders=[sharder])
    made = model.copy(torch.device("cpu"))
    assert type(made) is type(model)
    assert made.module is not model.module
    assert made.module.ebc is model.module.ebc
    assert made.module.over is not model.module.over
    features = batch(ranks.rank)
    before = made(features).detach().clone()
    torch.testing.assert_close(before, model(features).detach())
    model(features).sum().backward()  # a step of the tables, which the copy shares
    assert not torch.equal(made(features), before)
    assert model.copy("meta").module.over.weight.is_meta
    assert not model.module.over.weight.is_meta
    assert set(made.state_dict()) == set(model.state_dict())
    return True


@pytest.mark.parametrize("size", [1, 2])
def test_copies_share_the_tables(size: int) -> None:
    assert all(worlds.run(size, _copied))


def _deduplicated_model(ranks: RankGroup) -> bool:
    env = torchrec.ShardingEnv.from_process_group(ranks.group)
    sharders = [
        torchrec.EmbeddingBagCollectionSharder(),
        torchrec.EmbeddingCollectionSharder(use_index_dedup=True),
    ]
    model = torchrec.DistributedModelParallel(Model(sequences_too=True), env, sharders=sharders)
    assert isinstance(model.plan, torchrec.ShardingPlan)
    assert set(model.plan.get_plan_for_module("ec")) == {"x", "y"}
    found: bool = model.module.ec.dedup
    return found


def test_a_model_takes_the_sharders_deduplication() -> None:
    assert all(worlds.run(2, _deduplicated_model))


def test_a_context_keeps_the_ids_before_deduplication(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {"x": sharding.table_wise(0), "y": sharding.table_wise(0)}
    single = RankGroup.single()
    sharded = sharding.ShardedEmbeddingCollection(sequences(), plan, single, dedup=True)
    context = torchrec.EmbeddingCollectionContext()
    context.received = sharded.input_dist(repeated(0)).wait().wait()
    recorded: list[Tensor] = []
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: recorded.append(tensor))
    context.record_stream(None)
    tensors = [tensor for ids in context.received.repeated_ids.values() for tensor in ids]
    assert tensors
    assert all(any(tensor is one for one in recorded) for tensor in tensors)


def _all_to_all(ranks: RankGroup) -> KeyedJaggedTensor:
    """Features a and b go to rank 0, c to rank 1; rank r has r + 1 examples."""
    stride = ranks.rank + 1
    lengths = torch.arange(3 * stride) % 3
    values = 100 * ranks.rank + torch.arange(int(lengths.sum()))
    features = KeyedJaggedTensor(["a", "b", "c"], values, values.float(), lengths)
    found = torchrec.KJTAllToAll(ranks.group, splits=[2, 1])(features).wait().wait()
    assert torch.equal(found.weights(), found.values().float())
    return found.validate()


def _unequal_batches(ranks: RankGroup, kinds: list[tuple[torch.dtype, bool]]) -> None:
    dtype, is_weighted = kinds[ranks.rank]
    weights = torch.ones(2) if is_weighted else None
    features = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2], dtype=dtype), weights, lengths=torch.tensor([1, 1])
    )
    sent = torchrec.KJTAllToAll(ranks.group, splits=[1, 1])(features)
    with pytest.raises(RuntimeError, match=r"the same dtypes on all ranks.*rank 0: ids of 64 bits"):
        sent.wait()


@pytest.mark.parametrize(
    "second", [(torch.int32, True), (torch.int64, False)], ids=["dtype", "weights"]
)
def test_batches_of_other_kinds_are_refused(second: tuple[torch.dtype, bool]) -> None:
    worlds.run(2, _unequal_batches, [(torch.int64, True), second])


def test_batches_are_sent_by_feature() -> None:
    zero, one = worlds.run(2, _all_to_all)
    assert (zero.keys(), one.keys()) == (["a", "b"], ["c"])
    assert zero.stride() == one.stride() == 3
    # Rank 0 has bags of 0, 1 and 2 ids; rank 1 of 0 and 1, 2 and 0, 1 and 2.
    assert zero.lengths().tolist() == [0, 0, 1, 1, 2, 0]
    assert zero["a"].values().tolist() == [100]
    assert zero["b"].values().tolist() == [0, 101, 102]
    assert one["c"].values().tolist() == [1, 2, 103, 104, 105]


def _vectors_return(ranks: RankGroup) -> Tensor:
    """Two features of rank 0 and one of rank 1; each rank sent two examples of one id."""
    own = [2, 1][ranks.rank]
    # Rank-major within a feature: the vectors of feature f for rank r are 10 f + r.
    numbers = [10.0 * f + r for f in range(own) for r in range(2) for _ in range(2)]
    rows = (torch.tensor(numbers) + 100 * ranks.rank).view(-1, 1).requires_grad_()
    module = torchrec.SequenceEmbeddingsAllToAll(ranks.group, features_per_rank=[2, 1])
    lengths = torch.ones(own, 4, dtype=torch.int64)
    back = module(rows, lengths, input_splits=[4, 2], output_splits=[2 * own] * 2).wait()
    back.sum().backward()
    assert rows.grad is not None
    return back.detach().view(-1)


def test_vectors_return_to_their_ranks() -> None:
    zero, one = worlds.run(2, _vectors_return)
    assert zero.tolist() == [0, 0, 10, 10, 100, 100]
    assert one.tolist() == [1, 1, 11, 11, 101, 101]


def _groups_of_nodes(ranks: RankGroup) -> tuple[list[int], list[int]]:
    import torch.distributed as dist

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        intra, cross = torchrec.intra_and_cross_node_pg()
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    return dist.get_process_group_ranks(intra), dist.get_process_group_ranks(cross)


def test_groups_of_nodes() -> None:
    found = worlds.run(4, _groups_of_nodes)
    assert [intra for intra, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [cross for _, cross in found] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_a_collection_under_two_names_is_quantised_once() -> None:
    model = nn.Module()
    model.first = model.second = collection()
    model = torchrec.quantize_inference_model(model)
    assert model.first is model.second
    assert model.first(batch(0)).values().shape == model.second(batch(0)).values().shape
    assert isinstance(model.first, torchrec.QuantEmbeddingBagCollection)


def _quantised_over_ranks(ranks: RankGroup, rule: str) -> float:
    torch.manual_seed(4)
    source = collection()
    model = torchrec.quantize_inference_model(nn.Sequential(source))
    expected = model[0](batch(ranks.rank)).values()
    env = torchrec.ShardingEnv.from_process_group(ranks.group)
    made: Any = torchrec.shard(model[0], RULES[rule](ranks.size - 1), env)
    found = made(batch(ranks.rank)).wait()
    assert found.keys() == ["product", "user"]
    return float((found.values() - expected).abs().max())


@pytest.mark.parametrize("rule", ["table_wise", "row_wise"])
def test_quantised_collections_over_processes(rule: str) -> None:
    assert max(worlds.run(2, _quantised_over_ranks, rule)) < 1e-6


def test_a_reservation_for_all_memory_says_what_is_left() -> None:
    topology = torchrec.Topology(world_size=1, compute_device="cpu", ddr_cap=1 << 20)
    planner = torchrec.EmbeddingShardingPlanner(
        topology=topology,
        storage_reservation=torchrec.HeuristicalStorageReservation(
            0.0, dense_tensor_estimate=1 << 20
        ),
    )
    with pytest.raises(torchrec.PlannerError):
        planner.plan(torchrec_cases.collection(), [])


class TwoViews(nn.Module):
    """A table that two collections have, as TorchRec's models do: two tables there."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        bag = torchrec.EmbeddingBagConfig(
            name="x", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"]
        )
        sequence = torchrec.EmbeddingConfig(
            name="x", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["g"]
        )
        self.bags = torchrec.EmbeddingBagCollection(tables=[bag])
        self.vectors = torchrec.EmbeddingCollection(tables=[sequence])

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        vectors = self.vectors(features)["g"].values()
        return self.bags(features)["f"].square().sum() + vectors.sin().sum()


def _one_table(ranks: RankGroup) -> Any:
    """The weights of two steps of a model whose duplicates were made one table."""
    torch.manual_seed(2)
    model = TwoViews()
    share_tables(model)
    sharders = [
        made(fused_params={"optimizer": "exact_adagrad", "learning_rate": 0.5})
        for made in (torchrec.EmbeddingBagCollectionSharder, torchrec.EmbeddingCollectionSharder)
    ]
    env = torchrec.ShardingEnv.from_process_group(ranks.group)
    if ranks.rank == 0:
        with pytest.raises(TypeError, match="shard the model with all collections"):
            torchrec.ShardedEmbeddingBagCollection(model.bags, {}, RankGroup.single())
    distributed = torchrec.DistributedModelParallel(model, env=env, sharders=sharders)
    for _ in range(2):
        distributed(repeated(0)).backward()  # the batch of all ranks
    (name,) = [name for name in distributed.state_dict() if name.endswith("x.weight")]
    weight = distributed.state_dict()[name]
    return name, weight.full_tensor() if hasattr(weight, "full_tensor") else weight


def test_one_table_in_two_collections() -> None:
    model = TwoViews()
    share_tables(model)
    weight = model.bags.embedding_bags["x"].weight
    optimizer = torch.optim.Adagrad([weight], lr=0.5)
    for _ in range(2):
        model(repeated(0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for size in (2, 3):
        for name, found in worlds.run(size, _one_table):
            assert name == "bags.embedding_bags.x.weight"
            torch.testing.assert_close(found, weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_norms_of_swish_layers_have_the_dtype_of_the_linear_layers(dtype: torch.dtype) -> None:
    layers = torchrec.MLP(2, [4, 3], activation="swish_layernorm", dtype=dtype)
    assert {parameter.dtype for parameter in layers.parameters()} == {dtype}
    assert layers(torch.ones(5, 2, dtype=dtype)).dtype == dtype
