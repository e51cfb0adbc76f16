"""Migration of FBGEMM's modules: they train on as FBGEMM would have, and can go back."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

import emblib
from emblib.compat import fbgemm as ours
from tests.compat.peer import fbgemm, peer_module

ROWS, DIMS = (100, 30), (4, 8)
FEATURES = [0, 0, 1]


@pytest.fixture
def names() -> SimpleNamespace:
    return fbgemm()


def options(names: SimpleNamespace, kind: str) -> dict[str, Any]:
    """Return the arguments of a kind of training."""
    rowwise = {"optimizer": names.EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    modes = names.WeightDecayMode
    counter = names.CounterBasedRegularizationDefinition(
        counter_weight_decay_mode=names.CounterWeightDecayMode.L2,
        counter_halflife=3,
        adjustment_iter=2,
        learning_rate_mode=names.LearningRateMode.TAIL_ID_LR_INCREASE,
        tail_id_threshold=names.TailIdThreshold(2.0, is_ratio=False),
        max_counter_update_freq=2,
    )
    found: dict[str, dict[str, Any]] = {
        "sgd": {"optimizer": names.EmbOptimType.EXACT_SGD, "gradient_clipping": True},
        "adagrad": {"optimizer": names.EmbOptimType.EXACT_ADAGRAD, "eps": 1e-3},
        "rowwise": {**rowwise, "pooling_mode": names.PoolingMode.MEAN, "weight_decay": 0.1},
        "average": {"optimizer": names.EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD},
        "counter": {
            **rowwise,
            "weight_decay": 0.1,
            "weight_decay_mode": modes.COUNTER,
            "counter_based_regularization": counter,
        },
        "half": {
            "optimizer": names.EmbOptimType.EXACT_ADAGRAD,
            "weights_precision": names.SparseType.FP16,
            "output_dtype": names.SparseType.FP16,
            "stochastic_rounding": False,
        },
    }
    return found[kind]


def module_of(names: SimpleNamespace, features: list[int] = FEATURES, **arguments: Any) -> Any:
    """Return FBGEMM's module with two tables."""
    host, cpu = names.EmbeddingLocation.HOST, names.ComputeDevice.CPU
    specs = [(rows, dim, host, cpu) for rows, dim in zip(ROWS, DIMS, strict=True)]
    module = names.SplitTableBatchedEmbeddingBagsCodegen(specs, features, **arguments)
    torch.manual_seed(0)
    for rows in module.split_embedding_weights():
        rows.copy_(torch.rand(rows.shape))
    return module


def train(module: Any, steps: int, features: int = 3) -> None:
    """Make training steps with equal ids; some are weighted, where FBGEMM divides as it should."""
    generator = torch.Generator().manual_seed(1)
    indices = torch.randint(30, (features * 20,), generator=generator)
    offsets = torch.arange(0, len(indices) + 1, 4)
    for number in range(steps):
        weights = None
        if number % 2 and module.pooling_mode.name == "SUM":
            weights = torch.rand(len(indices), generator=generator)
        module(indices, offsets, weights).float().square().sum().backward()


KINDS = ["sgd", "adagrad", "rowwise", "average", "counter", "half"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_trains_on(kind: str, names: SimpleNamespace) -> None:
    other = module_of(names, **options(names, kind))
    model = nn.ModuleDict({"tables": module_of(names, **options(names, kind))})
    close = {"rtol": 1e-5, "atol": 1e-6} if kind != "half" else {"rtol": 2e-3, "atol": 2e-3}
    migration: Any = None
    for stage in range(3):  # of FBGEMM, migrated, and of FBGEMM again
        if stage == 1:
            migration = emblib.migrate(model)
            assert isinstance(model["tables"], ours.SplitTableBatchedEmbeddingBagsCodegen)
            differences = migration.check()
            assert differences[0].output < 1e-2 * close["rtol"] + 1e-6
            assert differences[0].rows < (2e-3 if kind == "half" else 1e-6)
        elif stage == 2:
            migration.undo()
        for module in (other, model["tables"]):
            module.set_learning_rate(0.1 / (stage + 1))
            train(module, 3)
        now = (model["tables"].split_embedding_weights(), other.split_embedding_weights())
        for rows, expected in zip(*now, strict=True):
            torch.testing.assert_close(rows, expected, **close)
    assert model["tables"].get_learning_rate() == pytest.approx(0.1 / 3)
    with pytest.raises(RuntimeError, match="undone already"):
        migration.load_state_dict({})


def test_memory_and_time_are_predicted(names: SimpleNamespace) -> None:
    model = nn.ModuleDict({"tables": module_of(names, **options(names, "rowwise"))})
    with emblib.TraceRecorder(model) as recorder:
        train(model["tables"], 1)
    migration = emblib.migrate(model)
    cost = migration.predict(recorder.trace, batch_size=5, rounds=2)
    assert cost.after == cost.before
    assert cost.after.total == migration.replaced[0].measured_nbytes == 640 * 4 + 130 * 4
    assert "training step" in str(cost)
    assert "memory: 3.08 kB (rows 2.56 kB + 520 B states)" in str(cost)


def test_an_old_state_dict_is_loaded(names: SimpleNamespace) -> None:
    saved = nn.ModuleDict({"tables": module_of(names, **options(names, "adagrad"))})
    train(saved["tables"], 2)
    model = nn.ModuleDict({"tables": module_of(names, **options(names, "adagrad"))})
    migration = emblib.migrate(model)
    migration.load_state_dict(saved.state_dict())
    for module in (saved["tables"], model["tables"]):
        train(module, 2)
    pairs = zip(
        saved["tables"].split_embedding_weights(),
        model["tables"].split_embedding_weights(),
        strict=True,
    )
    for expected, rows in pairs:
        torch.testing.assert_close(rows, expected)


def test_what_fbgemm_ignores_on_a_cpu_is_left_out(names: SimpleNamespace) -> None:
    decay = {"weight_decay": 0.1, "weight_decay_mode": names.WeightDecayMode.L2, "max_norm": 0.01}
    optimizer = names.EmbOptimType.EXACT_ROWWISE_ADAGRAD
    model = nn.ModuleDict({"tables": module_of(names, [0, 1], optimizer=optimizer, **decay)})
    other = module_of(names, [0, 1], optimizer=optimizer, **decay)
    migration = emblib.migrate(model)
    text = "max_norm is left out: FBGEMM ignores it on a CPU; weight_decay is left out"
    assert text in str(migration)
    for module in (other, model["tables"]):
        train(module, 2, features=2)
    rows = model["tables"].split_embedding_weights()[0]
    torch.testing.assert_close(rows, other.split_embedding_weights()[0])


@pytest.mark.parametrize("make", [torch.optim.Adam, None])
def test_a_dense_module_keeps_its_optimizer(make: Any, names: SimpleNamespace) -> None:
    def dense() -> nn.ModuleDict:
        torch.manual_seed(0)
        specs = list(zip(ROWS, DIMS, strict=True))
        kind = names.DenseTableBatchedEmbeddingBagsCodegen
        return nn.ModuleDict({"tables": kind(specs, FEATURES, use_cpu=True)})

    def step(model: nn.ModuleDict, optimizer: Any) -> Tensor:
        indices, offsets = torch.arange(30), torch.arange(0, 31, 2)
        out: Tensor = model["tables"](indices, offsets)
        if optimizer is not None:
            optimizer.zero_grad()
            out.square().sum().backward()
            optimizer.step()
        return out.detach()

    model, other = dense(), dense()
    optimizers = [make and make(one.parameters(), 0.1) for one in (model, other)]
    for one, optimizer in zip((model, other), optimizers, strict=True):
        step(one, optimizer)
    migration = emblib.migrate(model, () if make is None else optimizers[0])
    difference = migration.check()[0]
    assert difference.output < 1e-6
    assert (difference.rows is None) is (make is None)
    for one, optimizer in zip((model, other), optimizers, strict=True):
        step(one, optimizer)
    torch.testing.assert_close(step(model, optimizers[0]), step(other, optimizers[1]))
    migration.undo()
    torch.testing.assert_close(step(model, optimizers[0]), step(other, optimizers[1]))


@pytest.mark.parametrize("kind", ["INT8", "INT4", "FP16"])
def test_rows_for_inference_have_the_same_bytes(kind: str, names: SimpleNamespace) -> None:
    inference = peer_module("fbgemm_gpu.split_table_batched_embeddings_ops_inference")
    specs = [
        ("", rows, dim, names.SparseType[kind], names.EmbeddingLocation.HOST)
        for rows, dim in zip(ROWS, DIMS, strict=True)
    ]
    old = inference.IntNBitTableBatchedEmbeddingBagsCodegen(specs, FEATURES, device="cpu")
    old.fill_random_weights()
    for rows, scales in old.split_embedding_weights():
        if scales is not None:
            scales.view(torch.float16).fill_(0.25)
        else:
            rows.view(torch.float16).fill_(0.5)
    indices, offsets = torch.arange(30, dtype=torch.int32), torch.arange(0, 31, 2).int()
    expected = old(indices, offsets)
    model = nn.ModuleDict({"tables": old})
    migration = emblib.migrate(model)
    assert isinstance(model["tables"], nn.Module)
    assert type(model["tables"]).__module__.startswith("emblib.")
    assert torch.equal(model["tables"](indices, offsets), expected)
    assert migration.check()[0].output == 0
    assert migration.replaced[0].measured_nbytes == migration.replaced[0].memory[0].total


def test_what_is_recorded_stays(names: SimpleNamespace) -> None:
    metrics = names.RecordCacheMetrics(
        record_cache_miss_counter=True, record_tablewise_cache_miss=True
    )
    reporter = Mock()
    reporter.should_report.return_value = True
    old = module_of(
        names,
        gather_uvm_cache_stats=True,
        record_cache_metrics=metrics,
        stats_reporter_config=SimpleNamespace(create_reporter=lambda: reporter),
    )
    model = nn.ModuleDict({"tables": old})
    emblib.migrate(model)
    new: Any = model["tables"]
    assert new.stats_reporter is reporter
    reporter.reset_mock()
    train(new, 1)
    assert reporter.report_data_amount.called
    assert new.get_uvm_cache_stats().numel() == 6
    assert new.get_table_wise_cache_miss().tolist() == [0, 0]


def test_what_has_no_counterpart_is_left(names: SimpleNamespace) -> None:
    class Named(names.SplitTableBatchedEmbeddingBagsCodegen):  # type: ignore[name-defined,misc]
        """A subclass."""

    host, cpu = names.EmbeddingLocation.HOST, names.ComputeDevice.CPU
    model = nn.ModuleDict({"tables": Named([(4, 4, host, cpu)])})
    migration = emblib.migrate(model)
    assert isinstance(model["tables"], Named)
    assert "Named is a subclass" in migration.left[0].reason
