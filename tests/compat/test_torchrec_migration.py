"""Migration of TorchRec's unsharded collections in a model whose code stays as it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import emblib
from emblib.compat.torchrec_migration import MigratedEmbeddingBagCollection
from emblib.sharding import (
    DistributedModelParallel,
    RankGroup,
    TrainPipelineSparseDist,
    data_parallel,
    row_wise,
    table_wise,
)
from tests.compat.peer import peer_module
from tests.sharding import worlds

torchrec: Any = peer_module("torchrec")
fused_modules: Any = peer_module("torchrec.modules.fused_embedding_modules")
rowwise: Any = peer_module("torchrec.optim.rowwise_adagrad")
backward: Any = peer_module("torchrec.optim.apply_optimizer_in_backward")
keyed: Any = peer_module("torchrec.optim.keyed")

KEYS = ["c", "a", "b"]


def tables(pooling: str = "MEAN") -> list[Any]:
    """Return two tables that share a feature."""
    return [
        torchrec.EmbeddingBagConfig(
            name="t1", embedding_dim=8, num_embeddings=100, feature_names=["a", "b"]
        ),
        torchrec.EmbeddingBagConfig(
            name="t2",
            embedding_dim=8,
            num_embeddings=30,
            feature_names=["c", "a"],
            pooling=torchrec.PoolingType[pooling],
        ),
    ]


class Model(nn.Module):
    """Bags, sequences and a linear layer, written for TorchRec."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bags = torchrec.EmbeddingBagCollection(tables=tables())
        sequence = torchrec.EmbeddingConfig(
            name="s", embedding_dim=4, num_embeddings=30, feature_names=["c"]
        )
        self.history = torchrec.EmbeddingCollection(tables=[sequence], need_indices=True)
        self.top = nn.Linear(32, 1)

    def forward(self, batch: Any) -> Tensor:
        """Return a scalar; the types are those of TorchRec."""
        pooled = torchrec.KeyedTensor.regroup([self.bags(batch)], [["b"], ["c", "a@t1", "a@t2"]])
        rows = self.history(batch)["c"].to_dense()
        return self.top(torch.cat(pooled, 1)).sum() + sum(row.square().sum() for row in rows)


def batch_of(seed: int, library: Any = torchrec) -> Any:
    """Return a batch of 6 samples."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (18,), generator=generator)
    ids = torch.randint(30, (int(lengths.sum()),), generator=generator)
    return library.KeyedJaggedTensor(KEYS, ids, lengths=lengths)


def train(model: Model, optimizers: list[Any], steps: int) -> None:
    """Make training steps; the batches do not depend on the model."""
    for number in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(batch_of(number)).square().backward()
        for optimizer in optimizers:
            optimizer.step()


def apply_in_backward(kind: type[Any], module: nn.Module) -> None:
    """Apply an optimizer in backward, by TorchRec's deprecated name."""
    with pytest.warns(DeprecationWarning, match="deprecated"):
        backward.apply_optimizer_in_backward(kind, module.parameters(), {"lr": 0.02})


def in_backward(model: Model) -> list[Any]:
    """Apply two optimizers in backward; return that of the linear layer."""
    apply_in_backward(rowwise.RowWiseAdagrad, model.bags)
    apply_in_backward(torch.optim.SGD, model.history)
    return [torch.optim.SGD(model.top.parameters(), 0.01)]


OPTIMIZERS: dict[str, Callable[[Model], list[Any]]] = {
    "sgd": lambda m: [torch.optim.SGD(m.parameters(), 0.001)],
    "adagrad": lambda m: [torch.optim.Adagrad(m.parameters(), 0.01)],
    "adam": lambda m: [torch.optim.Adam(m.parameters(), 0.01)],
    "rowwise": lambda m: [
        rowwise.RowWiseAdagrad([*m.bags.parameters(), *m.history.parameters()], 0.01),
        torch.optim.SGD(m.top.parameters(), 0.01),
    ],
    "in backward": in_backward,
}


def assert_equal(model: nn.Module, other: nn.Module) -> None:
    """Compare state dicts, whose keys stay."""
    assert list(model.state_dict()) == list(other.state_dict())
    for name, value in other.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_model_trains_on(name: str) -> None:
    model, other = Model(), Model()
    optimizers, others = OPTIMIZERS[name](model), OPTIMIZERS[name](other)
    for one, its in ((model, optimizers), (other, others)):
        train(one, its, 3)
    migration = emblib.migrate(model, optimizers)
    assert [one.is_fused for one in migration.replaced] == [name != "adam"] * 2
    assert all(d.output < 1e-6 and d.rows < 1e-6 for d in migration.check())
    for one, its in ((model, optimizers), (other, others)):
        train(one, its, 3)
    assert_equal(model, other)
    migration.undo()
    assert type(model.bags) is torchrec.EmbeddingBagCollection
    for one, its in ((model, optimizers), (other, others)):
        train(one, its, 3)
    assert_equal(model, other)


def test_types_are_those_of_the_batch() -> None:
    model = Model()
    emblib.migrate(model)
    assert isinstance(model.bags, MigratedEmbeddingBagCollection)
    assert type(model.bags(batch_of(0))) is torchrec.KeyedTensor
    assert type(model.bags(batch_of(0, emblib))) is emblib.KeyedTensor
    assert type(model.history(batch_of(0))["c"]) is torchrec.JaggedTensor
    assert type(model.history(batch_of(0, emblib))["c"]) is emblib.JaggedTensor
    assert model.history.embedding_dim() == 4


def test_costs_are_predicted_and_old_states_are_loaded() -> None:
    saved = Model()
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())  # its moments come with the first step
    with emblib.TraceRecorder(model) as recorder:
        model(batch_of(0))
    migration = emblib.migrate(model, optimizer, tables=emblib.optim.RowwiseAdagrad(0.1))
    cost = migration.predict(recorder.trace, batch_size=3, rounds=2)
    rows = 4 * (130 * 8 + 30 * 4)
    assert (cost.before.rows, cost.before.states, cost.before.gradient) == (rows, 2 * rows, rows)
    assert cost.after.total == sum(one.measured_nbytes for one in migration.replaced)
    assert [speed.path for speed in cost.speeds] == ["bags", "history"]
    train(saved, [torch.optim.SGD(saved.parameters(), 0.1)], 1)
    migration.load_state_dict(saved.state_dict())
    assert_equal(model, saved)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad, rowwise.RowWiseAdagrad])
def test_a_fused_collection_trains_on(kind: type[Any]) -> None:
    def collection() -> Any:
        torch.manual_seed(0)
        return fused_modules.FusedEmbeddingBagCollection(
            tables=tables("SUM"), optimizer_type=kind, optimizer_kwargs={"lr": 0.02}
        )

    def step(module: Any) -> None:
        module(batch_of(1)).values().square().sum().backward()

    model, other = nn.ModuleDict({"bags": collection()}), nn.ModuleDict({"bags": collection()})
    for one in (model, other):
        step(one["bags"])
    migration = emblib.migrate(model)
    difference = migration.check()[0]
    assert difference.output < 1e-6
    assert difference.rows is not None
    assert difference.rows < 1e-6
    assert migration.replaced[0].memory[0] == migration.replaced[0].memory[1]
    for back in (False, True):
        if back:
            migration.undo()
        for one in (model, other):
            step(one["bags"])
        assert_equal(model, other)


def test_columns_of_a_fused_collection_follow_the_names() -> None:
    """TorchRec 1.8.0 joins the columns pooling by pooling, under names in the order of tables."""
    configs = [*tables(), *tables()[:1]]
    configs[2].name = "t3"
    old = fused_modules.FusedEmbeddingBagCollection(
        tables=configs, optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 0.02}
    )
    expected = old(batch_of(1))
    model = nn.ModuleDict({"bags": old})
    assert "order of the poolings" in str(emblib.migrate(model))
    found = model["bags"](batch_of(1))
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found["a@t1"], expected["a@t1"])
    torch.testing.assert_close(found["a@t3"], expected["c"])


def test_collections_within_other_modules_are_swapped() -> None:
    processors: Any = peer_module("torchrec.modules.feature_processor_")
    processed: Any = peer_module("torchrec.modules.fp_embedding_modules")
    collection = torchrec.EmbeddingBagCollection(tables=tables("SUM"), is_weighted=True)
    weights = processors.PositionWeightedModuleCollection(dict.fromkeys(KEYS, 5))
    model = nn.ModuleDict(
        {"bags": processed.FeatureProcessedEmbeddingBagCollection(collection, weights)}
    )
    expected = model["bags"](batch_of(1)).values()
    migration = emblib.migrate(model)
    assert migration.replaced[0].paths == ("bags._embedding_bag_collection",)
    torch.testing.assert_close(model["bags"](batch_of(1)).values(), expected)
    assert migration.check()[0].output < 1e-6


def test_what_has_no_counterpart_is_left() -> None:
    def other(name: str, module: str) -> nn.Module:
        made: nn.Module = type(name, (nn.Module,), {"__module__": module})()
        made.inner = nn.EmbeddingBag(3, 2)
        return made

    with_adam = Model()
    apply_in_backward(torch.optim.Adam, with_adam.bags)
    model = nn.ModuleDict(
        {
            "adam": with_adam.bags,
            "sharded": other("ShardedEmbeddingBagCollection", "torchrec.distributed.embeddingbag"),
            "quantised": other("EmbeddingBagCollection", "torchrec.quant.embedding_modules"),
            "empty": torchrec.EmbeddingBagCollection(tables=[]),
        }
    )
    migration = emblib.migrate(model)
    reasons = {left.path: left.reason for left in migration.left}
    assert not migration.replaced
    assert "Adam with its settings is applied in backward" in reasons["adam"]
    assert "emblib.compat.fbgemm.install()" in reasons["sharded"]
    assert "call quantized(8)" in reasons["quantised"]
    assert reasons["empty"] == "it has no tables"


def test_a_wrapped_optimizer_is_refused() -> None:
    model = Model()
    wrapped = keyed.KeyedOptimizerWrapper(
        dict(model.named_parameters()), lambda params: torch.optim.SGD(params, 0.1)
    )
    with pytest.raises(TypeError, match="migrate with the optimizer inside it"):
        emblib.migrate(model, wrapped)


def test_tables_of_one_adam_have_one_step() -> None:
    model = Model()
    weights = [table.weight for table in model.bags.embedding_bags.values()]
    optimizer = torch.optim.SparseAdam(weights)
    for weight in weights:
        weight.grad = torch.zeros_like(weight).to_sparse()
    optimizer.step()
    optimizer.state[weights[0]]["step"] = 7
    reasons = [left.reason for left in emblib.migrate(model, optimizer).left]
    assert len(reasons) == 1
    assert "different numbers of steps" in reasons[0]


PLAN = {"bags": {"t1": row_wise(), "t2": table_wise(0)}, "history": {"s": data_parallel()}}


def sharded_and_not(ranks: RankGroup) -> tuple[DistributedModelParallel, Model]:
    """Return a migrated model that is sharded, and its copy that is not, after three steps."""
    models = []
    for _ in range(2):
        model = Model()
        optimizers = OPTIMIZERS["rowwise"](model)
        train(model, optimizers, 3)
        emblib.migrate(model, optimizers)
        models.append(model)
    return DistributedModelParallel(models[0], ranks, plan=PLAN), models[1]


def check_sharded(ranks: RankGroup) -> None:
    """Compare outputs and rows of a sharded and of an unsharded model, on equal batches."""
    model, other = sharded_and_not(ranks)
    for number in range(3):
        loss, expected = model(batch_of(number)), other(batch_of(number))
        torch.testing.assert_close(loss, expected)
        for one in (loss, expected):
            one.square().backward()
    pooled, expected = model.module.bags(batch_of(9)), other.bags(batch_of(9))
    assert type(pooled.wait()) is torchrec.KeyedTensor
    torch.testing.assert_close(pooled.values(), expected.values(), rtol=1e-4, atol=1e-6)
    vectors = model.module.history(batch_of(9))
    assert type(vectors["c"]) is torchrec.JaggedTensor
    assert type(model.module.bags(batch_of(9, emblib)).wait()) is emblib.KeyedTensor


def test_a_migrated_model_is_sharded() -> None:
    check_sharded(RankGroup.single())


def test_a_migrated_model_is_sharded_over_ranks() -> None:
    worlds.run(2, check_sharded)


def test_a_pipeline_keeps_the_types_of_a_migrated_model() -> None:
    model, other = sharded_and_not(RankGroup.single())
    dense = torch.optim.SGD(model.module.top.parameters(), 0.0)
    pipeline = TrainPipelineSparseDist(model, dense, torch.device("cpu"))
    batches = [batch_of(number) for number in range(4)]
    for batch, loss in zip(batches, pipeline.run(iter(batches)), strict=True):
        expected = other(batch)
        torch.testing.assert_close(loss, expected)
        expected.backward()


def test_parameters_of_torch_are_not_sharded() -> None:
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    migration = emblib.migrate(model, optimizer)
    with pytest.raises(ValueError, match="Adam trains the tables as parameters"):
        DistributedModelParallel(model, RankGroup.single(), plan=PLAN)
    assert isinstance(model.bags, MigratedEmbeddingBagCollection)
    fused = emblib.optim.SGD(0.1)
    DistributedModelParallel(model, RankGroup.single(), plan=PLAN, optimizer=fused)
    for undo in (migration.undo, migration.check, lambda: migration.load_state_dict({})):
        with pytest.raises(RuntimeError, match="bags has been replaced since"):
            undo()
