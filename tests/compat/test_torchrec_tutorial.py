"""The steps of TorchRec's tutorial with the imports changed: on one rank, and on two over gloo."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import emblib.compat.torchrec as torchrec
from emblib.compat.torchrec import (
    CombinedOptimizer,
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingShardingPlanner,
    EmbOptimType,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    KeyedTensor,
    LazyAwaitable,
    ParameterConstraints,
    PoolingType,
    ShardingEnv,
    ShardingType,
    Topology,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
    in_backward_optimizer_filter,
    row_wise,
    table_wise,
)
from emblib.sharding import RankGroup
from emblib.storage import Dense
from tests.compat.torchrec_cases import (
    DIM,
    PRODUCTS,
    USERS,
    batch,
    collection,
    pooled,
    weights_of,
)
from tests.sharding import worlds

WORLDS = pytest.mark.parametrize("size", [1, 2])


# Tables, jagged tensors, lookups


def test_a_collection_shows_its_tables() -> None:
    ebc = collection()
    assert list(ebc.embedding_bags) == ["product_table", "user_table"]
    assert ebc.embedding_bags["user_table"].weight.shape == (USERS, DIM)
    assert list(ebc.state_dict()) == [
        "embedding_bags.product_table.weight",
        "embedding_bags.user_table.weight",
    ]
    names = [(c.name, c.feature_names[0]) for c in ebc.embedding_bag_configs()]
    assert names == [("product_table", "product"), ("user_table", "user")]


def test_jagged_tensors_of_lengths_and_of_offsets_are_the_same() -> None:
    values = torch.tensor([1, 2, 3, 4])
    by_lengths = JaggedTensor(values=values, lengths=torch.tensor([1, 0, 3]))
    by_offsets = JaggedTensor(values=values, offsets=torch.tensor([0, 1, 1, 4]))
    assert by_lengths.offsets().tolist() == by_offsets.offsets().tolist() == [0, 1, 1, 4]
    assert [d.tolist() for d in by_offsets.to_dense()] == [[1], [], [2, 3, 4]]
    features = batch()
    assert features.keys() == ["product", "user"]
    assert features.stride() == 2
    assert features.to_dict()["user"].lengths().tolist() == [1, 3]
    again = KeyedJaggedTensor.from_jt_dict(features.to_dict())
    assert torch.equal(again.values(), features.values())


def test_a_lookup_gives_a_keyed_tensor() -> None:
    ebc, features = collection(), batch()
    result = ebc(features)
    assert isinstance(result, KeyedTensor)
    assert result.keys() == ["product", "user"]
    torch.testing.assert_close(result.values(), pooled(weights_of(ebc), features))
    assert torch.equal(result["user"], result.values()[:, DIM:])
    assert list(result.to_dict()) == ["product", "user"]
    result.values().sum().backward()
    (untouched,) = {*range(PRODUCTS)} & {0}
    gradient = ebc.embedding_bags["product_table"].weight.grad
    assert gradient[5].tolist() == [1.0] * DIM
    assert gradient[untouched].tolist() == [0.0] * DIM


def test_sequences_give_a_vector_an_id() -> None:
    ec = torchrec.EmbeddingCollection(
        tables=[
            torchrec.EmbeddingConfig(
                name="t", embedding_dim=4, num_embeddings=9, feature_names=["product"]
            )
        ],
        device=torch.device("cpu"),
        need_indices=True,
    )
    found = ec(batch())["product"]
    assert found.values().shape == (3, 4)
    assert found.lengths().tolist() == [2, 1]
    assert found.weights().tolist() == [5, 7, 3]


def test_data_types_are_those_that_were_asked_for() -> None:
    """TorchRec makes float16 of bfloat16."""
    ebc = collection(data_type=DataType.BF16)
    assert ebc.embedding_bags["user_table"].weight.dtype is torch.bfloat16
    config = torchrec.EmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=9, pooling=PoolingType.MEAN
    )
    assert config.feature_names == ("t",)
    assert config.pooling == PoolingType.MEAN
    assert config.pooling is PoolingType.MEAN
    assert config.pooling != PoolingType.SUM
    assert PoolingType("MEAN") is PoolingType.MEAN
    with pytest.raises(
        ValueError, match="Pooling must be one of 'sum', 'mean', 'none', got 'Mean'"
    ):
        PoolingType("Mean")
    assert config.data_type == DataType.FP32
    assert config.data_type != DataType.BF16
    assert {DataType.BF16: 2, torch.float32: 4}[config.data_type] == 4
    assert ebc.embedding_bag_configs()[0].data_type == DataType.BF16
    assert DataType.INT8 not in (None, DataType.INT4, torch.float32)
    assert torchrec.data_type_to_dtype(config.data_type) is torch.float32


@pytest.mark.parametrize("config", [torchrec.EmbeddingBagConfig, torchrec.EmbeddingConfig])
@pytest.mark.parametrize(
    ("asked", "other", "size"),
    [(DataType.INT8, DataType.INT4, 1), (DataType.INT4, DataType.INT8, 0.5)],
)
def test_quantised_data_types_are_those_that_were_asked_for(
    config: Any, asked: DataType, other: DataType, size: float
) -> None:
    made = config(name="t", embedding_dim=8, num_embeddings=100, data_type=asked)
    for one in (made, dataclasses.replace(made, name="u"), copy.deepcopy(made)):
        assert one.data_type == asked
        assert one.data_type not in (other, DataType.FP32, torch.float32)
        assert one.data_type.itemsize == size
    plain = dataclasses.replace(made, storage=Dense())
    assert plain.data_type == DataType.FP32
    assert dataclasses.replace(plain, storage=made.storage).data_type == asked
    with pytest.raises(ValueError, match="quantised or an integer"):
        torchrec.data_type_to_dtype(made.data_type)
    if config is torchrec.EmbeddingBagConfig:
        ebc = torchrec.EmbeddingBagCollection(tables=[made])
        assert ebc.embedding_bag_configs()[0].data_type == asked
        features = KeyedJaggedTensor(["t"], torch.arange(4), lengths=torch.tensor([1, 3]))
        assert ebc(features).values().shape == (2, 8)


# Awaitables


class Later(LazyAwaitable[Tensor]):
    """A result that somebody waits for."""

    def __init__(self, size: list[int]) -> None:
        super().__init__()
        self._size = size
        self.waits = 0

    def _wait_impl(self) -> Tensor:
        self.waits += 1
        return torch.ones(self._size)


def test_a_lazy_awaitable_waits_when_it_is_used() -> None:
    later = Later([3, 2])
    assert later.waits == 0
    assert torch.add(later, later).tolist() == [[2.0, 2.0]] * 3
    assert later.shape == (3, 2)
    assert later.waits == 1


# Plans and sharders


def _planned(ranks: RankGroup) -> None:
    ebc = collection("meta")
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=ranks.size, compute_device="cpu"),
        batch_size=2,
        constraints={"user_table": ParameterConstraints(sharding_types=["row_wise"])},
    )
    sharder = EmbeddingBagCollectionSharder()
    plan = planner.collective_plan(ebc, [sharder], ranks.group)
    tables = plan.plan[""]
    assert set(tables) == {"product_table", "user_table"}
    assert tables["user_table"].sharding_type == ShardingType.ROW_WISE.value
    assert sum(s.shard_sizes[0] for s in tables["user_table"].sharding_spec.shards) == USERS
    assert "user_table" in str(plan)
    sharded = sharder.shard(ebc, tables, ShardingEnv.from_process_group(ranks.group))
    assert sharded(batch(ranks.rank)).keys() == ["product", "user"]


@WORLDS
def test_a_planner_plans_and_a_sharder_shards(size: int) -> None:
    worlds.run(size, _planned)


def _hand_written(ranks: RankGroup, last: int) -> None:
    torch.manual_seed(3)
    ebc = collection()
    before = weights_of(ebc)
    plan = construct_module_sharding_plan(
        ebc,
        {"product_table": table_wise(rank=last), "user_table": row_wise()},
        world_size=ranks.size,
        local_size=ranks.size,
        device_type="cpu",
    )
    assert plan["product_table"].ranks == [last]
    assert plan["user_table"].sharding_type == "row_wise"
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}
    )
    env = ShardingEnv.from_process_group(ranks.group)
    sharded = sharder.shard(ebc, plan, env, torch.device("cpu"))
    features = batch(ranks.rank)
    out = sharded(features)
    assert isinstance(out, LazyAwaitable)
    torch.testing.assert_close(out.wait().values(), pooled(before, features))
    # The optimizer runs in backward, on the mean over ranks.
    out.values().sum().backward()
    after = weights_of(sharded)
    expected = {name: table.clone().requires_grad_() for name, table in before.items()}
    for rank in range(ranks.size):
        (pooled(expected, batch(rank)).sum() / ranks.size).backward()
    for name, table in expected.items():
        torch.testing.assert_close(after[name], (table - 0.5 * table.grad).detach())


@WORLDS
def test_a_plan_by_hand_keeps_the_weights_and_fuses_the_optimizer(size: int) -> None:
    worlds.run(size, _hand_written, size - 1)


# DistributedModelParallel and optimizers


class Model(nn.Module):
    """Sparse and dense."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()
        self.over = nn.Linear(2 * DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        out: Tensor = self.over(self.ebc(features).values())
        return out


def _trained(ranks: RankGroup) -> list[float]:
    torch.manual_seed(5)
    model = Model()
    apply_optimizer_in_backward(
        optimizer_class=torchrec.RowWiseAdagrad,
        params=model.ebc.parameters(),
        optimizer_kwargs={"lr": 0.05},
    )
    model = DistributedModelParallel(
        model, env=ShardingEnv.from_process_group(ranks.group), device=torch.device("cpu")
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    assert set(dense) == {"over.weight", "over.bias"}
    optimizer = CombinedOptimizer(
        [
            model.fused_optimizer,
            KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.05)),
        ]
    )
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(batch(ranks.rank)) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    # State dicts are called as in the model that was not sharded.
    assert set(model.state_dict()) == set(Model().state_dict())
    return losses


def test_models_train_through_distributed_model_parallel() -> None:
    (alone,) = worlds.run(1, _trained)
    assert alone[2] < alone[1] < alone[0]
    both = worlds.run(2, _trained)
    # The first loss is of the weights that both began with, so rank 0 sees what one rank sees.
    assert both[0][0] == pytest.approx(alone[0], rel=1e-5)
    assert all(losses[2] < losses[0] for losses in both)


def _by_default(ranks: RankGroup) -> list[list[float]]:
    """The collection itself, without a plan."""
    torch.manual_seed(7)
    ebc = collection()
    before = weights_of(ebc)
    model = DistributedModelParallel(
        module=ebc, env=ShardingEnv.from_process_group(ranks.group), device=torch.device("cpu")
    )
    features = batch(ranks.rank)
    out = model(features)
    torch.testing.assert_close(out.values(), pooled(before, features))
    return out.wait()["user"].tolist()


@WORLDS
def test_distributed_model_parallel_of_a_collection_itself(size: int) -> None:
    assert len(worlds.run(size, _by_default)) == size


class Doubled(torchrec.EmbeddingBagCollection):
    """Looks up something else."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return super().forward(features)


def test_a_sharder_refuses_what_it_would_not_do() -> None:
    ebc = Doubled(collection().embedding_bag_configs())
    plan = construct_module_sharding_plan(
        ebc, {"product_table": table_wise(rank=0), "user_table": row_wise()}
    )
    says = r"collection at 'sparse\.ebc' is a Doubled, a subclass of .* that changes forward"
    with pytest.raises(TypeError, match=says):
        EmbeddingBagCollectionSharder().shard(
            ebc, plan, ShardingEnv.from_local(1, 0), module_fqn="sparse.ebc"
        )
    with pytest.raises(TypeError, match=r"must be one of EmbeddingBagCollection.*got Linear"):
        EmbeddingBagCollectionSharder().shard(nn.Linear(2, 2), plan, ShardingEnv.from_local(1, 0))


def _given_otherwise(ranks: RankGroup) -> list[str]:
    """What ranks say of which the last was given something else."""
    last, env = ranks.rank == 1, ShardingEnv.from_process_group(ranks.group)
    plan = construct_module_sharding_plan(
        collection(),
        {"product_table": table_wise(rank=0), "user_table": row_wise()},
        world_size=ranks.size,
        local_size=ranks.size,
    )
    whole = torchrec.ShardingPlan({"": plan})
    rates = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.2 if last else 0.1})
    wrong = dataclasses.replace(plan["user_table"], compute_kernel="fast" if last else "fused")
    calls = [
        lambda: DistributedModelParallel(collection(), env, plan=None if last else whole),
        lambda: DistributedModelParallel(collection(), env, init_parameters=not last),
        lambda: DistributedModelParallel(collection(), env, plan=whole, sharders=[rates]),
        lambda: rates.shard(collection(), plan, env),
        lambda: rates.shard(collection(), {**plan, "user_table": wrong}, env),
    ]
    told = []
    for call in calls:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        told.append(str(caught.value))
    return told


def test_ranks_that_were_given_something_else_are_told() -> None:
    zero, one = worlds.run(2, _given_otherwise)
    for number, words in enumerate(
        (
            "plan is given on rank 0 and None on rank 1",
            "init_parameters is True on rank 0 and False on rank 1",
            "table product_table: optimizer.lr is 0.1 on rank 0 and 0.2 on rank 1",
            "table product_table: optimizer.lr is 0.1 on rank 0 and 0.2 on rank 1",
            "compute_kernel must be one of",
        )
    ):
        assert words in zero[number]
        assert words in one[number]


def _in_a_pipeline(ranks: RankGroup, name: str) -> list[float]:
    """Losses of a loop by hand (no name), or of a pipeline: the same model, the same batches."""
    torch.manual_seed(9)
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
    env = ShardingEnv.from_process_group(ranks.group)
    model = DistributedModelParallel(
        Model(), env, torch.device("cpu"), sharders=[sharder], init_data_parallel=False
    )
    model.init_data_parallel()
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))
    batches = [(batch(ranks.rank + step),) for step in range(4)]

    def forward(given: tuple[KeyedJaggedTensor]) -> tuple[Tensor, Tensor]:
        out = model(given[0])
        return out.square().mean(), out.detach()

    found: list[float] = []
    if name:
        make = getattr(torchrec, name)
        pipeline = make(model, optimizer, torch.device("cpu"), custom_model_fwd=forward)
        left = iter(batches)
        for _ in batches:
            found.append(float(pipeline.progress(left).square().mean()))
        with pytest.raises(StopIteration):
            pipeline.progress(left)
        return found
    for given in batches:
        optimizer.zero_grad()
        loss, out = forward(given)
        loss.backward()
        optimizer.step()
        found.append(float(out.square().mean()))
    return found


@pytest.mark.parametrize(
    "name",
    ["TrainPipelineBase", "TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist"],
)
def test_pipelines_train_as_the_loop_does(name: str) -> None:
    assert worlds.run(2, _in_a_pipeline, name) == worlds.run(2, _in_a_pipeline, "")


# What is refused


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: EmbeddingBagCollectionSharder().shard(
                collection(), {}, torchrec.ShardingEnv.from_local(2, 0)
            ),
            "start several processes",
        ),
        (lambda: torchrec.ShardingEnv.from_local(2, 2), "rank must be one of 0 to 1"),
        (lambda: torchrec.column_wise(), "needs ranks or size_per_rank"),
        (
            lambda: EmbeddingBagCollectionSharder(fused_params={"cache_load_factor": 0.1}),
            "have no effect",
        ),
        (lambda: torchrec.data_type_to_dtype(DataType.INT8), "quantised"),
        (
            lambda: torchrec.EmbeddingBagConfig(9, 4, "t", need_pos=True),
            "PositionWeightedModule",
        ),
    ],
)
def test_what_would_have_no_effect_is_an_error(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_table_that_is_dense_by_plan_has_no_fused_optimizer() -> None:
    plan = construct_module_sharding_plan(
        collection("meta"),
        {
            "product_table": table_wise(rank=0, compute_kernel="dense"),
            "user_table": table_wise(rank=0),
        },
        world_size=1,
        local_size=1,
    )
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
    with pytest.raises(ValueError, match=r"DENSE for \['product_table'\]"):
        sharder.shard(collection(), plan, ShardingEnv.from_local(1, 0))
