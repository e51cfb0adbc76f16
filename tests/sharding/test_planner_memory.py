"""The predicted memory of tables and batches against what is allocated: within 5 %."""

from pathlib import Path
from typing import Any

import pytest
import torch

from emblib import optim
from emblib.collections.configs import EmbeddingBagConfig
from emblib.collections.groups import TableGroups
from emblib.specs import (
    CacheConfig,
    CachePolicy,
    CountMinSketch,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    Placement,
    Pooling,
)
from emblib.storage import Dense, Hash, Quantized, Storage, TableSlice, TensorTrain
from tests.optimizer_cases import CASES
from tests.sharding import worlds
from tests.sharding.planner_cases import allocated, step_bytes

ROWS, DIM = 3000, 32
CACHED = Placement.MANAGED_CACHING
KINDS: dict[str, Storage] = {
    "plain": Dense(),
    "host": Dense(Placement.MANAGED),
    "cached": Dense(CACHED),
    "cached_lfu": Dense(CACHED, CacheConfig(policy=CachePolicy.LFU, load_factor=0.5)),
    "cached_half": Dense(CACHED, CacheConfig(sets=20, dtype=torch.float16)),
    "tensor_train": TensorTrain((16, 16)),
    "tensor_train_8": TensorTrain((8, 8)),
    "tensor_train_2": TensorTrain((24,)),
    "dynamic": Hash(),
    "dynamic_lfu": Hash(eviction=Eviction.LFU),
    "dynamic_none": Hash(eviction=Eviction.NONE),
    "admission": Hash(admission=FrequencyAdmission(2, ExactCounter(5000))),
    "sketch": Hash(admission=FrequencyAdmission(300, CountMinSketch(4096))),
}
TOLERANCE = 0.05
OWN_ROWS = 0.06  # the model counts the rows of a rank for itself, though large ones stay in place


def _both(config: EmbeddingBagConfig, part: TableSlice, optimizer: Any) -> tuple[float, int]:
    """Predicted, and allocated."""
    groups = TableGroups([part], [0], pooling=Pooling.SUM, optimizer=optimizer)
    need = part.storage.nbytes(part, optimizer, "cpu")
    gradients = 0
    if optimizer is None or isinstance(optimizer, optim.External):
        # A dense gradient is there once there was a backward.
        ids = torch.zeros(1, dtype=torch.int64)
        out = groups(ids, torch.tensor([0, 1]))
        out.sum().backward()
        for handle in groups.handles:
            gradients += sum(
                p.grad.nbytes
                for p in handle.parameters()
                if p.grad is not None and not p.grad.is_sparse
            )
    return sum(need), sum(allocated(module) for module in groups._table_modules) + gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", [optim.SGD(0.1), optim.RowwiseAdagrad(0.1), optim.Adam(0.1)])
def test_tables_of_every_kind(kind: str, optimizer: Any) -> None:
    config = EmbeddingBagConfig(ROWS, DIM, "t", storage=KINDS[kind])
    predicted, real = _both(config, TableSlice.whole(config), optimizer)
    assert predicted == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_tables_with_every_optimizer(name: str) -> None:
    config = EmbeddingBagConfig(ROWS, DIM, "t")
    predicted, real = _both(config, TableSlice.whole(config), CASES[name])
    assert predicted == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.parametrize("optimizer", [None, optim.External(gradient=optim.Gradient.DENSE)])
def test_tables_that_leave_dense_gradients(optimizer: Any) -> None:
    config = EmbeddingBagConfig(ROWS, DIM, "t")
    predicted, real = _both(config, TableSlice.whole(config), optimizer)
    assert predicted == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("optimizer", [optim.SGD(0.1), optim.Adam(0.1)])
def test_tables_in_16_bits(dtype: torch.dtype, optimizer: Any) -> None:
    config = EmbeddingBagConfig(ROWS, DIM, "t", data_type=dtype)
    predicted, real = _both(config, TableSlice.whole(config), optimizer)
    assert predicted == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["plain", "cached", "tensor_train_8"])
def test_parts_of_tables(kind: str) -> None:
    config = EmbeddingBagConfig(4096, DIM, "t", storage=KINDS[kind])
    rows, columns = (0, 2048), (16, 32)
    if kind == "tensor_train_8":
        spec: Any = config.spec()
        rows = (0, spec.row_factors[1] * spec.row_factors[2] * 8)
        columns = (0, DIM // spec.dim_factors[0])
    part = TableSlice(config, rows, columns)
    predicted, real = _both(config, part, optim.Adagrad(0.1))
    assert predicted == pytest.approx(real, rel=TOLERANCE)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantised_tables(bits: int) -> None:
    config = EmbeddingBagConfig(ROWS, DIM, "t", storage=Quantized(bits))
    part = TableSlice.whole(config)
    groups = TableGroups([part], [0], pooling=Pooling.SUM)
    assert sum(part.storage.nbytes(part, None, "cpu")) == pytest.approx(
        sum(allocated(module) for module in groups._table_modules), rel=TOLERANCE
    )


def test_tables_on_disk_count_as_disk(tmp_path: Path) -> None:
    storage = Dense(Placement.DISK, CacheConfig(directory=tmp_path, load_factor=0.1))
    config = EmbeddingBagConfig(ROWS, DIM, "t", storage=storage)
    need = storage.nbytes(TableSlice.whole(config), optim.Adam(0.1), "cpu")
    assert need.disk == 3 * ROWS * DIM * 4
    predicted, real = _both(config, TableSlice.whole(config), optim.Adam(0.1))
    assert predicted == pytest.approx(real, rel=TOLERANCE)


def test_tables_behind_a_gpu_count_as_host_memory() -> None:
    config = EmbeddingBagConfig(ROWS, DIM, "t", storage=Dense(CACHED))
    part, optimizer = TableSlice.whole(config), optim.RowwiseAdagrad(0.1)
    on_gpu, on_cpu = (part.storage.nbytes(part, optimizer, device) for device in ("cuda", "cpu"))
    assert on_gpu.host == ROWS * (DIM + 1) * 4
    assert on_gpu.device + on_gpu.host == on_cpu.device
    managed = EmbeddingBagConfig(ROWS, DIM, "t", storage=Dense(Placement.MANAGED))
    assert managed.storage.nbytes(TableSlice.whole(managed), optimizer, "cuda").device == 0


@pytest.mark.parametrize("way", ["table_wise", "on_rank_0", "row_wise", "column_wise"])
@pytest.mark.parametrize(("pooling_factor", "dim"), [(1.0, 64), (10.0, 16)])
def test_a_step_of_pooled_tables(way: str, pooling_factor: float, dim: int) -> None:
    _check_step(2, way, pooling_factor, dim, "pooled")


def test_a_step_of_tables_in_several_ways() -> None:
    _check_step(2, "mixed", 10.0, 16, "pooled")


@pytest.mark.parametrize(
    ("world", "way"),
    [
        (1, "table_wise"),
        (1, "data_parallel"),
        (3, "mixed"),
        (2, "data_parallel"),
        (3, "data_parallel"),
    ],
)
def test_a_step_in_other_worlds(world: int, way: str) -> None:
    _check_step(world, way, 5.0, 32, "pooled")


@pytest.mark.parametrize("world", [1, 2])
def test_a_step_of_weighted_bags(world: int) -> None:
    _check_step(world, "table_wise", 20.0, 16, "weighted")


def test_a_step_whose_rows_nodes_sum() -> None:
    for real, predicted in worlds.run(4, step_bytes, "table_row_wise", 5.0, 32, "pooled", 2):
        assert real <= predicted * (1 + TOLERANCE) <= 1.3 * real


@pytest.mark.parametrize("way", ["table_wise", "row_wise", "data_parallel"])
def test_a_step_of_sequences(way: str) -> None:
    _check_step(2, way, 4.0, 16, "sequences")


def _check_step(world: int, way: str, pooling_factor: float, dim: int, kind: str) -> None:
    for real, predicted in worlds.run(world, step_bytes, way, pooling_factor, dim, kind):
        assert real * (1 - TOLERANCE) <= predicted <= real * (1 + TOLERANCE + OWN_ROWS)
