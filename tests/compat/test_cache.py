"""The cache under FBGEMM's interface: training, prefetch and counts."""

from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.compat import fbgemm
from emblib.compat.fbgemm import (
    OptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
    UVMCacheStatsIndex,
)
from tests.compat.small import CACHED, INDICES, OFFSETS, make, step


def _cached(**options: Any) -> SplitTableBatchedEmbeddingBagsCodegen:
    return make(CACHED, rows=5000, cache_sets=2, **options)


def _batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 5000, (60,), generator=generator), torch.arange(0, 61, 10)


@pytest.mark.parametrize("algorithm", list(fbgemm.CacheAlgorithm))
@pytest.mark.parametrize("ahead", [False, True])
def test_a_cached_module_trains_as_another(algorithm: fbgemm.CacheAlgorithm, ahead: bool) -> None:
    options = {"optimizer": OptimType.ADAM, "learning_rate": 0.1}
    passes = fbgemm.MultiPassPrefetchConfig(num_passes=3, min_splitable_pass_size=7)
    cached = _cached(
        cache_algorithm=algorithm,
        multipass_prefetch_config=passes,
        prefetch_pipeline=True,
        **options,
    )
    plain = make(rows=5000, **options)
    if ahead:
        cached.prefetch(*_batch(0))
    for seed in range(6):
        if ahead:
            cached.prefetch(*_batch(seed + 1))
        outputs = [module(*_batch(seed)) for module in (cached, plain)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.sum().backward()
    if ahead:
        cached(*_batch(6))
    cached.flush()
    pairs = zip(cached.split_embedding_weights(), plain.split_embedding_weights(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_cache_counts() -> None:
    metrics = fbgemm.RecordCacheMetrics(True, True)
    module = make(CACHED, gather_uvm_cache_stats=True, record_cache_metrics=metrics)
    index = UVMCacheStatsIndex
    step(module)
    first = module.get_uvm_cache_stats()
    assert first[index.num_calls] == 1
    assert first[index.num_requested_indices] == 13
    assert first[index.num_unique_indices] == first[index.num_unique_misses] == 8
    assert first[index.num_conflict_misses] == 0
    module.prefetch(INDICES, OFFSETS)
    step(module)
    local = module.get_uvm_cache_stats(use_local_cache=True)
    assert local.tolist() == [1, 13, 8, 0, 0, 0]
    assert module.get_uvm_cache_stats().tolist() == [2, 26, 16, 8, 0, 0]
    assert module.get_cache_miss_counter().tolist() == [1, 8]
    assert module.get_table_wise_cache_miss().tolist() == [3, 5]
    module.print_uvm_cache_stats()
    module.reset_uvm_cache_stats()
    assert module.get_uvm_cache_stats().tolist() == [0] * 6
    module.reset_cache_states()
    step(module)
    assert module.get_uvm_cache_stats()[index.num_unique_misses] == 8
    with pytest.raises(RuntimeError, match="gather_uvm_cache_stats"):
        make(CACHED).get_uvm_cache_stats()


def test_cache_counts_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    module = make(CACHED, gather_uvm_cache_stats=True)
    step(module)
    with caplog.at_level("INFO"):
        module.print_uvm_cache_stats()
    assert "'num_unique_misses': 8.0" in caplog.text


@pytest.mark.parametrize("size", [0, 1, 10, 100])
@pytest.mark.parametrize("passes", [0, 1, 4])
@pytest.mark.parametrize("least", [1, 30])
def test_prefetch_passes_cover_the_batch(size: int, passes: int, least: int) -> None:
    config = fbgemm.MultiPassPrefetchConfig(passes, least)
    values = torch.arange(size)
    parts = SplitTableBatchedEmbeddingBagsCodegen.get_prefetch_passes(config, values, values)
    assert len(parts) <= max(passes, 1)
    assert torch.equal(torch.cat([part for part, _, _ in parts]), values)
    assert all(start == int(part[0]) for part, _, start in parts if part.numel())
    assert all(part.numel() >= least for part, _, _ in parts[:-1])


@pytest.mark.parametrize("algorithm", list(fbgemm.CacheAlgorithm))
def test_rows_of_batches_on_their_way_are_locked(algorithm: fbgemm.CacheAlgorithm) -> None:
    module = _cached(cache_algorithm=algorithm, prefetch_pipeline=True)
    rows = {seed: _batch(seed)[0].view(2, 30) for seed in (0, 1)}

    def locked() -> int:
        counter = module.lxu_cache_locking_counter
        assert counter.shape == (2, 32)
        assert counter.dtype == torch.int32
        assert bool(((counter == 0) | (counter == 1)).all())
        return int(counter.sum())

    def distinct(*seeds: int) -> int:
        batches = torch.cat([rows[seed] + torch.tensor([[0], [5000]]) for seed in seeds])
        return min(64, batches.unique().numel())

    assert locked() == 0
    module.prefetch(*_batch(0))
    first = locked()
    assert 0 < first <= distinct(0)
    module.prefetch(*_batch(1))
    assert first < locked() <= distinct(0, 1)
    for seed in rows:
        module(*_batch(seed)).sum().backward()
    assert locked() == 0
    assert make().lxu_cache_locking_counter.numel() == 0
