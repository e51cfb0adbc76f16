"""Memory of tables and states under FBGEMM's names, prepared inputs, INT8 rows, the fallback."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.compat import fbgemm as ours
from emblib.compat.fbgemm import (
    EmbeddingLocation,
    OptimType,
    PoolingMode,
    SparseType,
)
from emblib.compat.fbgemm_modules import Installation
from emblib.compat.fbgemm_operators import rowwise
from emblib.compat.fbgemm_tables import DoesNotHavePrefix
from tests.compat.peer import fbgemm

SIZES = [(5, 4), (7, 8)]
INDICES, OFFSETS = torch.tensor([0, 4, 2, 6, 3]), torch.tensor([0, 1, 3, 3, 5])


def made(names: Any = ours, **options: Any) -> Any:
    place = (names.EmbeddingLocation.HOST, names.ComputeDevice.CPU)
    return names.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, *place) for rows, dim in SIZES], **options
    )


def buffers(momentum: int = 12) -> dict[str, Tensor]:
    return {"weights": torch.rand(76), "momentum1": torch.zeros(momentum)}


def test_tables_are_in_the_memory_that_is_given() -> None:
    given = buffers()
    first = given["weights"].clone()
    module = made(optimizer=OptimType.EXACT_ROWWISE_ADAGRAD, preallocated_host_buffers=given)
    assert module.weights_host.data_ptr() == given["weights"].data_ptr()
    assert module.momentum1_host.data_ptr() == given["momentum1"].data_ptr()
    assert torch.equal(module.split_embedding_weights()[1].flatten(), first[20:])
    other = made(optimizer=OptimType.EXACT_ROWWISE_ADAGRAD)
    for table, mine in zip(
        other.split_embedding_weights(), module.split_embedding_weights(), strict=True
    ):
        table.data.copy_(mine)
    for _ in range(2):
        outputs = [m(INDICES, OFFSETS) for m in (module, other)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
    assert torch.equal(given["momentum1"], other.momentum1_host)
    assert torch.equal(given["weights"], other.weights_host)
    assert not torch.equal(given["weights"], first)


@pytest.mark.parametrize(
    ("name", "buffer"),
    [
        ("weights", torch.zeros(75)),
        ("weights", torch.zeros(76).half()),
        ("weights", torch.zeros(152)[::2]),
        ("weights", torch.zeros(2, 38)),
        ("weight", torch.zeros(76)),
        ("momentum1", torch.zeros(76)),
        ("momentum2", torch.zeros(12)),
    ],
)
def test_memory_that_does_not_fit_raises(name: str, buffer: Tensor) -> None:
    with pytest.raises(AssertionError, match=name):
        made(
            optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
            preallocated_host_buffers={name: buffer},
        )
    with pytest.raises(AssertionError, match="momentum1"):
        made(preallocated_host_buffers=buffers())


def states_of(names: Any, kind: str) -> list[tuple[Tensor, ...]]:
    module = made(names, optimizer=names.EmbOptimType[kind])
    return list(module.get_all_states())


@pytest.mark.parametrize("kind", ["EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"])
def test_states_are_laid_out_as_those_of_fbgemm(kind: str) -> None:
    peer = fbgemm()
    mine, theirs = states_of(ours, kind), states_of(peer, kind)
    assert len(mine) == len(theirs)
    for state, other in zip(mine, theirs, strict=True):
        for tensor, their_tensor in zip(state, other, strict=True):
            assert tensor.shape == their_tensor.shape
            assert tensor.dtype == their_tensor.dtype
        assert torch.equal(state[3], other[3])
        assert torch.equal(state[4], other[4])


def test_states_by_prefix() -> None:
    module = made(optimizer=OptimType.ADAM)
    device, host, uvm, placements, offsets = module.get_states("momentum2")
    assert [x.numel() for x in (device, host, uvm)] == [0, 76, 0]
    assert placements.tolist() == [EmbeddingLocation.HOST] * 2
    assert offsets.tolist() == [0, 20]
    assert host.data_ptr() == module.split_optimizer_states()[0][1].data_ptr()
    assert len(module.get_all_states()) == 3
    with pytest.raises(DoesNotHavePrefix, match="momentum3"):
        module.get_states("momentum3")
    with pytest.raises(AttributeError, match="row_counter_dev"):
        module.row_counter_dev  # noqa: B018


def test_inputs_are_prepared() -> None:
    module = made(embedding_table_index_type=torch.int32)
    ids = torch.tensor([0, 99, 2, 6, -5])
    with pytest.warns(UserWarning, match="repaired 2"):
        found = module.prepare_inputs(ids, OFFSETS, torch.rand(5).double(), [[1, 1], [1, 1]])
    assert found[0].tolist() == [0, 0, 2, 6, 0]
    assert ids.tolist() == [0, 99, 2, 6, -5]
    assert [x.dtype for x in found[:3]] == [torch.int32, torch.int32, torch.float32]
    layout = found[3]
    assert layout.B_offsets.tolist() == [0, 2, 4]
    assert layout.B_offsets_rank_per_feature.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert layout.output_offsets_feature_rank.tolist() == [0, 4, 12, 16, 24]
    assert (layout.max_B, layout.max_B_feature_rank, layout.output_size) == (2, 1, 24)
    assert module.prepare_inputs(INDICES, OFFSETS)[3].B_offsets is None
    for batch_sizes in ([], [[2]], [[1, 1], [2]], [[], []]):
        with pytest.raises(ValueError, match=r"must be \[F\]\[ranks\], of 2 features"):
            module.prepare_inputs(INDICES, OFFSETS, None, batch_sizes)


def filled(names: Any, **options: Any) -> Any:
    module = made(names, weights_precision=names.SparseType.INT8, **options)
    generator = torch.Generator().manual_seed(0)
    for table, (rows, dim) in zip(module.split_embedding_weights(), SIZES, strict=True):
        table.copy_(rowwise.to_fused_8bit(torch.randn(rows, dim, generator=generator)))
    return module


@pytest.mark.parametrize("mode", ["SUM", "MEAN"])
@pytest.mark.parametrize("weighted", [False, True])
def test_int8_rows_are_looked_up(mode: str, weighted: bool) -> None:
    module = filled(ours, pooling_mode=PoolingMode[mode])
    weights = torch.rand(5) if weighted else None
    tables = [rowwise.fused_8bit_to_float(t) for t in module.split_embedding_weights()]
    found = module(INDICES, OFFSETS, weights)
    for feature, sample in ((0, 0), (0, 1), (1, 0), (1, 1)):
        first, last = OFFSETS[2 * feature + sample : 2 * feature + sample + 2].tolist()
        rows = tables[feature][INDICES[first:last]]
        if weights is not None:
            rows = rows * weights[first:last, None]
        count = max(last - first, 1) if mode == "MEAN" else 1
        column = 4 * feature
        torch.testing.assert_close(
            found[sample, column : column + SIZES[feature][1]], rows.sum(0) / count
        )
    with pytest.raises(NotImplementedError, match="not trained"):
        found.sum().backward()
    with pytest.raises(NotImplementedError, match="not trained"):
        module.set_learning_rate(0.1)
    masked = module(INDICES, OFFSETS, weights, feature_requires_grad=torch.tensor([1, 0]))
    torch.testing.assert_close(masked, found)
    assert module(INDICES[:0], torch.zeros(5).long()).eq(0).all()
    module.init_embedding_weights_uniform(2.0, 3.0)
    for table in module.split_embedding_weights():
        assert (rowwise.fused_8bit_to_float(table).round() - 2.5).abs().le(0.5).all()
    unpooled = made(weights_precision=ours.SparseType.INT8, pooling_mode=PoolingMode.NONE)
    with pytest.raises(RuntimeError, match="with NONE, scale the output"):
        unpooled(INDICES, OFFSETS, torch.rand(5))


@pytest.mark.parametrize("mode", ["SUM", "MEAN"])
def test_int8_lookups_of_fbgemm(mode: str) -> None:
    peer = fbgemm()
    theirs = filled(peer, pooling_mode=peer.PoolingMode[mode])
    mine = filled(ours, pooling_mode=PoolingMode[mode])
    found = [module(INDICES.clone(), OFFSETS.clone()) for module in (mine, theirs)]
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@pytest.fixture
def peer_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small package in place of FBGEMM's Python files."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "fbgemm_gpu" or name.startswith("_copy_of_"):
            monkeypatch.delitem(sys.modules, name)
    files = {
        "__init__.py": "raise AssertionError('its libraries would be loaded')",
        "metrics.py": "from fbgemm_gpu.split_embedding_configs import SparseType, Lacking",
        "split_embedding_configs.py": "class Lacking: pass\nSparseType = None",
        "tbe/__init__.py": "",
        "tbe/ssd/__init__.py": "SSDTableBatchedEmbeddingBags = 'theirs'",
    }
    for path, text in files.items():
        file = tmp_path / "fbgemm_gpu" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr("emblib.compat.fbgemm_operators.foreign_operators", list)
    monkeypatch.setattr("emblib.compat.fbgemm_operators.register", lambda: None)


@pytest.mark.usefixtures("peer_files")
def test_what_emblib_lacks_comes_from_the_files_of_fbgemm() -> None:
    installation = Installation({name: getattr(ours, name) for name in ours.__all__})
    before = dict(sys.modules)
    try:
        installation.install()
        with pytest.raises(ImportError, match="metrics"):
            importlib.import_module("fbgemm_gpu.metrics")
        installation.install(fallback=True)
        import fbgemm_gpu.metrics as metrics
        from fbgemm_gpu.tbe.ssd import SSDTableBatchedEmbeddingBags

        assert metrics.SparseType is SparseType
        assert metrics.Lacking.__name__ == "Lacking"
        with pytest.raises(ImportError, match="Nowhere"):
            from fbgemm_gpu.split_embedding_configs import Nowhere  # noqa: F401
        with pytest.raises(NotImplementedError, match="docs/tiers"):
            SSDTableBatchedEmbeddingBags()
    finally:
        for name in set(sys.modules) - set(before):
            if name.partition(".")[0] == "fbgemm_gpu" or name.startswith("_copy_of_"):
                del sys.modules[name]
