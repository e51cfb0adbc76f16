"""Tables of no rows, as FBGEMM accepts them: every index is out of their bounds."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from emblib import (
    BoundsCheck,
    CacheConfig,
    Placement,
    Pooling,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from emblib.compat import fbgemm as ours
from emblib.optim import Optimizer
from tests.compat.peer import fbgemm
from tests.optimizer_cases import CASES

INDICES = torch.tensor([7, 3, 2, 2, 9])
OFFSETS = torch.tensor([0, 2, 2, 3, 3, 5, 5])
"""Three features of two bags each; the second one reads the table without rows."""

OPTIMIZERS: dict[str, Optimizer] = {
    "adam": optim.Adam(0.1),
    "sparse": optim.External(),
    "dense": optim.External(gradient=optim.Gradient.DENSE),
    **{name: CASES[name] for name in ("counter", "global_decay", "ensemble_rowwise_adagrad")},
}


def module(
    rows: tuple[int, ...],
    optimizer: Optimizer,
    placement: Placement,
    cache: CacheConfig | None = None,
) -> TableBatchedEmbeddingBags:
    torch.manual_seed(0)
    specs = [TableSpec(count, 4, placement=placement) for count in rows]
    options: Any = {"cache": cache, "bounds_check": BoundsCheck.IGNORE}
    return TableBatchedEmbeddingBags(specs, optimizer, **options)


def train(tables: TableBatchedEmbeddingBags) -> None:
    for _ in range(2):
        tables.prefetch(INDICES, OFFSETS)
        weights = torch.ones(5, requires_grad=True)
        tables(INDICES, OFFSETS, weights).square().sum().backward()
        assert weights.grad is not None
        assert weights.grad[2] == 0


@pytest.mark.parametrize(
    ("placement", "name"),
    [*((place, "adam") for place in Placement), *((Placement.DEVICE, n) for n in OPTIMIZERS)],
    ids=str,
)
def test_a_table_without_rows_among_others(placement: Placement, name: str, tmp_path: Path) -> None:
    caches = [
        CacheConfig(directory=tmp_path / str(t)) if placement is Placement.DISK else None
        for t in (0, 1)
    ]
    got = module((10, 0, 12), OPTIMIZERS[name], placement, caches[0])
    want = module((10, 1, 12), OPTIMIZERS[name], placement, caches[1])
    with torch.no_grad():
        for mine, theirs in zip(got.table_weights(), want.table_weights(), strict=True):
            theirs[: len(mine)].copy_(mine)
        want.table_weights()[1].zero_()
    out = got(INDICES, OFFSETS)
    assert_close(out, want(INDICES, OFFSETS))
    assert not out[:, 4:8].any()
    del out
    train(got)
    train(want)
    for mine, theirs in zip(got.table_weights(), want.table_weights(), strict=True):
        assert_close(mine, theirs[: len(mine)])
    assert got.table_weights()[1].shape == (0, 4)
    assert got.state_dict()["table_1.weight"].shape == (0, 4)
    saved = {key: value.clone() for key, value in got.state_dict().items()}
    got.reset_parameters()
    got.load_state_dict(saved)
    assert all(torch.equal(value, saved[key]) for key, value in got.state_dict().items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_module_without_any_row(name: str) -> None:
    tables = module((0, 0, 0), OPTIMIZERS[name], Placement.DEVICE)
    train(tables)
    for other in (copy.deepcopy(tables), pickle.loads(pickle.dumps(tables))):
        assert not other(INDICES, OFFSETS).any()
    assert tables.nbytes()["weights"] == 0


def test_a_store_whose_last_tables_have_no_rows(tmp_path: Path) -> None:
    specs = [TableSpec(r, d, placement=Placement.DISK) for r, d in ((9, 4), (0, 8))]
    for _ in range(2):  # made, and opened again
        tables = TableBatchedEmbeddingBags(
            specs, optim.Adam(0.1), cache=CacheConfig(directory=tmp_path)
        )
        out = tables(torch.tensor([1]), torch.tensor([0, 1, 1]))
        out.sum().backward()
        tables.flush()
        del tables, out


@pytest.mark.parametrize("pooling", list(Pooling))
def test_bounds_checks_of_a_table_without_rows(pooling: Pooling) -> None:
    def make(check: BoundsCheck) -> TableBatchedEmbeddingBags:
        return TableBatchedEmbeddingBags([TableSpec(0, 4)], pooling=pooling, bounds_check=check)

    batch = (torch.tensor([0, -1]), torch.tensor([0, 1, 2]))
    with pytest.raises(RuntimeError, match=r"must be in \[0, 0\)"):
        make(BoundsCheck.FATAL)(*batch)
    with pytest.warns(UserWarning, match="1 indices"):
        assert not make(BoundsCheck.WARNING)(*batch).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruned = (torch.tensor([-1, -1]), batch[1])
        assert not make(BoundsCheck.FATAL)(*pruned).any()
        assert make(BoundsCheck.FATAL)(INDICES[:0], torch.tensor([0, 0])).numel() in (0, 4)


def test_invalid_offsets_of_a_module_without_features() -> None:
    tables = TableBatchedEmbeddingBags([], optim.SGD(0.1))
    with pytest.warns(UserWarning, match="0 indices and 1 offsets"):
        assert tables(INDICES[:0], torch.tensor([3])).shape == (0, 0)


def test_quantized_tables_without_rows() -> None:
    plain = module((10, 0, 12), optim.SGD(0.1), Placement.DEVICE)
    tables = QuantizedEmbeddingBags.from_float(plain)
    tables.bounds_check = BoundsCheck.IGNORE
    assert_close(tables(INDICES, OFFSETS), plain(INDICES, OFFSETS), rtol=0, atol=0.01)
    assert [tables.to_dense(t).shape[0] for t in range(3)] == [10, 0, 12]
    tables.load_state_dict(tables.state_dict())


def test_fbgemm_accepts_them_too() -> None:
    def make(library: Any) -> Any:
        place = (library.EmbeddingLocation.HOST, library.ComputeDevice.CPU)
        tables = library.SplitTableBatchedEmbeddingBagsCodegen(
            [(0, 4, *place), (10, 4, *place)],  # as the last one, FBGEMM 1.8.0 reads past its sizes
            optimizer=library.OptimType.EXACT_SGD,
            learning_rate=0.5,
        )
        tables.split_embedding_weights()[1].copy_(torch.arange(40.0).view(10, 4))
        tables(torch.tensor([1, 2]), torch.tensor([0, 0, 2])).sum().backward()
        return tables.split_embedding_weights()

    for mine, theirs in zip(make(ours), make(fbgemm()), strict=True):
        assert_close(mine, theirs)
