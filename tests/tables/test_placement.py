"""Where a table lies changes no result: placements, caches and prefetching against plain tables."""

import copy
import gc
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from emblib import (
    BoundsCheck,
    CacheConfig,
    CachePolicy,
    MultiPassPrefetch,
    Placement,
    Pooling,
    Precision,
    StochasticRounding,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from emblib.tables.mapped_memory import map_pinned
from tests.saved import saved_and_loaded
from tests.tbe_cases import OPTIMIZERS

ROWS, DIMS = (300, 500, 40, 200), (8, 5, 12, 16)
MIXED = (Placement.DEVICE, Placement.MANAGED_CACHING, Placement.MANAGED, Placement.DISK)
FEATURES = (0, 1, 2, 3, 1)
BATCH = 12
SGD = optim.SGD(0.01)


def make(
    placements: tuple[Placement, ...] = MIXED,
    optimizer: optim.Optimizer = SGD,
    **options: Any,
) -> TableBatchedEmbeddingBags:
    """A module of four tables with the same weights whatever their placement."""
    width = options.pop("dim", None)
    specs = [
        TableSpec(rows, width or dim, f"t{t}", placement)
        for t, (rows, dim, placement) in enumerate(zip(ROWS, DIMS, placements, strict=True))
    ]
    options.setdefault("bounds_check", BoundsCheck.IGNORE)
    module = TableBatchedEmbeddingBags(specs, optimizer, feature_tables=FEATURES, **options)
    generator = torch.Generator().manual_seed(1)
    for table in module.table_weights():
        table.copy_(torch.rand(table.shape, generator=generator))
    module.flush()
    return module


def batch(seed: int, longest: int = 6) -> tuple[Tensor, Tensor]:
    """Indices and offsets; rows of small ids are frequent."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, longest + 1, (len(FEATURES) * BATCH,), generator=generator)
    parts = []
    for f, table in enumerate(FEATURES):
        size = int(lengths[f * BATCH : (f + 1) * BATCH].sum())
        parts.append((torch.rand(size, generator=generator) ** 3 * ROWS[table]).long())
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.cat(parts), offsets


def step(module: TableBatchedEmbeddingBags, seed: int) -> Tensor:
    out = module(*batch(seed))
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    out.backward(grad.to(out.dtype))
    return out.detach()


def same_tables(a: TableBatchedEmbeddingBags, b: TableBatchedEmbeddingBags) -> bool:
    return all(
        torch.equal(x, y) for x, y in zip(a.table_weights(), b.table_weights(), strict=True)
    ) and all(
        torch.equal(x[key], y[key])
        for x, y in zip(a.table_optimizer_states(), b.table_optimizer_states(), strict=True)
        for key in x
    )


PLAIN = (Placement.DEVICE,) * 4


@pytest.mark.parametrize("policy", CachePolicy)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_placement_changes_no_bit(optimizer: str, policy: CachePolicy, tmp_path: Path) -> None:
    plain = make(PLAIN, OPTIMIZERS[optimizer])
    cache = CacheConfig(policy, sets=2, directory=tmp_path)
    mixed = make(MIXED, OPTIMIZERS[optimizer], cache=cache)
    for seed in range(12):
        assert torch.equal(step(plain, seed), step(mixed, seed))
        if seed == 6:
            mixed.flush()
        if seed == 8:
            assert same_tables(plain, mixed)
    assert same_tables(plain, mixed)
    stats = mixed.cache_stats()
    assert stats.unique_misses > 0
    assert stats.conflict_unique_misses > 0, "the cache is meant to be too small here"


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_prefetching_ahead_changes_no_bit(ahead: int, tmp_path: Path) -> None:
    plain = make(PLAIN, optim.Adagrad(0.1))
    mixed = make(MIXED, optim.Adagrad(0.1), cache=CacheConfig(sets=3, directory=tmp_path))
    for seed in range(ahead):
        mixed.prefetch(*batch(seed))
    for seed in range(15):
        out = mixed(*batch(seed))
        mixed.prefetch(*batch(seed + ahead))
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
        out.backward(grad)
        assert torch.equal(step(plain, seed), out.detach())
        if seed == 5:  # reading the tables empties the cache
            assert same_tables(plain, mixed)
        if seed == 9:
            mixed.load_state_dict(copy.deepcopy(mixed.state_dict()))
    assert same_tables(plain, mixed)


def test_large_batches_are_prefetched_in_parts(tmp_path: Path) -> None:
    plain = make(PLAIN, optim.RowwiseAdagrad(0.1))
    cache = CacheConfig(
        sets=3, directory=tmp_path, passes=MultiPassPrefetch(passes=4, min_lookups=20)
    )
    mixed = make(MIXED, optim.RowwiseAdagrad(0.1), cache=cache)
    for seed in range(6):
        assert torch.equal(step(plain, seed), step(mixed, seed))
    assert same_tables(plain, mixed)


def test_batches_must_come_in_the_order_of_prefetch(tmp_path: Path) -> None:
    module = make(cache=CacheConfig(sets=3, directory=tmp_path))
    module.prefetch(*batch(0))
    with pytest.raises(RuntimeError, match="in the order they were prefetched"):
        module(*batch(1))
    module(*batch(0))


def test_a_batch_of_inference_mode_is_prefetched(tmp_path: Path) -> None:
    """Torch counts no writes of such tensors, and raises where their version is read."""
    module = make(cache=CacheConfig(sets=2, directory=tmp_path))
    with torch.inference_mode():
        indices, offsets = (tensor.clone() for tensor in batch(0))
        module.prefetch(indices, offsets)
        out = module(indices, offsets)
    assert torch.equal(out, module(*batch(0)))


def test_a_prefetched_batch_warns_of_bounds_once(tmp_path: Path) -> None:
    cache = CacheConfig(sets=3, directory=tmp_path)
    module = make(cache=cache, bounds_check=BoundsCheck.WARNING)
    indices, offsets = batch(0)
    indices[0] = 1 << 40
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.prefetch(indices, offsets)
    with pytest.warns(UserWarning, match="1 indices and 0 offsets out of bounds"):
        module(indices, offsets)
    assert module.bounds_violations.tolist() == [1, 0]


def test_a_prefetched_batch_must_not_be_written_to(tmp_path: Path) -> None:
    module = make(cache=CacheConfig(sets=3, directory=tmp_path))
    indices, offsets = batch(0)
    module.prefetch(indices, offsets)
    indices.zero_()
    with pytest.raises(RuntimeError, match="was written to since"):
        module(indices, offsets)


def test_evaluation_may_come_between_prefetch_and_forward(tmp_path: Path) -> None:
    plain = make(PLAIN, optim.SGD(0.1))
    mixed = make(MIXED, optim.SGD(0.1), cache=CacheConfig(sets=3, directory=tmp_path))
    indices, offsets = batch(0)
    mixed.prefetch(indices, offsets)
    with torch.no_grad():
        assert torch.equal(mixed(*batch(7)), plain(*batch(7)))
    out = mixed(indices, offsets)
    out.backward(torch.ones_like(out))
    want = plain(indices, offsets)
    want.backward(torch.ones_like(want))
    assert torch.equal(out, want)
    assert same_tables(plain, mixed)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_cache_of_another_dtype(
    dtype: torch.dtype, cache_dtype: torch.dtype, tmp_path: Path
) -> None:
    plain = make(PLAIN, optim.SGD(0.01))
    cache = CacheConfig(sets=2, dtype=cache_dtype, directory=tmp_path)
    mixed = make(MIXED, optim.SGD(0.01), cache=cache, precision=Precision(dtype))
    for seed in range(5):
        assert_close(step(mixed, seed), step(plain, seed), rtol=3e-2, atol=3e-2)
    for got, want in zip(mixed.table_weights(), plain.table_weights(), strict=True):
        assert_close(got.float(), want, rtol=2e-2, atol=2e-2)


def test_evaluation_reads_through_the_cache(tmp_path: Path) -> None:
    plain = make(PLAIN, optim.SGD(0.1))
    mixed = make(MIXED, optim.SGD(0.1), cache=CacheConfig(sets=2, directory=tmp_path))
    for seed in range(6):
        with torch.no_grad():
            assert torch.equal(plain(*batch(seed + 50)), mixed(*batch(seed + 50)))
        step(plain, seed)
        step(mixed, seed)
    assert same_tables(plain, mixed)


def test_sequence_pooling_and_sample_weights(tmp_path: Path) -> None:
    for pooling in (Pooling.NONE, Pooling.MEAN):
        modules = [
            make(placements, optim.SGD(0.1), pooling=pooling, cache=cache, dim=8)
            if pooling is Pooling.NONE
            else make(placements, optim.SGD(0.1), pooling=pooling, cache=cache)
            for placements, cache in (
                (PLAIN, None),
                (MIXED, CacheConfig(sets=2, directory=tmp_path / pooling.value)),
            )
        ]
        for seed in range(4):
            outs = []
            for module in modules:
                weights = None
                if pooling is Pooling.MEAN:
                    generator = torch.Generator().manual_seed(seed)
                    count = batch(seed)[0].numel()
                    weights = torch.rand(count, generator=generator).requires_grad_()
                out = module(*batch(seed), weights)
                out.backward(torch.ones_like(out))
                outs.append((out.detach(), None if weights is None else weights.grad))
            assert torch.equal(outs[0][0], outs[1][0])
            if outs[0][1] is not None:
                assert torch.equal(outs[0][1], outs[1][1])
        assert same_tables(*modules)


def test_state_dicts_fit_any_placement(tmp_path: Path) -> None:
    plain = make(PLAIN, optim.Adam(0.1))
    mixed = make(MIXED, optim.Adam(0.1), cache=CacheConfig(sets=2, directory=tmp_path))
    for seed in range(3):
        step(plain, seed)
    assert mixed.load_state_dict(saved_and_loaded(plain.state_dict())).missing_keys == []
    for seed in range(3, 6):
        step(plain, seed)
        step(mixed, seed)
    back = make(PLAIN, optim.Adam(0.1))
    back.load_state_dict(mixed.state_dict())
    assert same_tables(plain, back)
    assert back.step == 6


def test_copies_and_pickles() -> None:
    placements = (*MIXED[:3], Placement.MANAGED_CACHING)
    module = make(placements, optim.Adagrad(0.1), cache=CacheConfig(sets=2))
    step(module, 0)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    for other in copies:
        step(other, 1)
    step(module, 1)
    for other in copies:
        assert same_tables(module, other)
    step(copies[0], 2)
    assert not same_tables(module, copies[0]), "a copy has memory of its own"


def test_host_tables_are_shared_between_processes() -> None:
    """In a forked process, updates of rows in private memory would be lost."""
    module = make((*MIXED[:3], Placement.HOST), optim.Adagrad(0.1)).share_memory()
    for views in module.table_views():
        assert all(view.is_shared() for view in views.values())


def test_host_tables_have_no_memory_on_meta() -> None:
    """Models too large for one rank are made on meta and sharded."""
    module = make((*MIXED[:3], Placement.HOST), device="meta", bounds_check=BoundsCheck.NONE)
    assert all(table.is_meta for table in copy.deepcopy(module).table_weights())
    saved = make((*MIXED[:3], Placement.HOST))
    module.to_empty(device="cpu").load_state_dict(saved.state_dict())
    assert_close(module(*batch(1)), saved(*batch(1)), rtol=0, atol=0)


def test_a_disk_table_is_not_copied(tmp_path: Path) -> None:
    module = make(cache=CacheConfig(sets=2, directory=tmp_path))
    with pytest.raises(RuntimeError, match="cannot be copied"):
        copy.deepcopy(module)
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        pickle.dumps(module)


def test_a_disk_table_goes_on_where_it_was_flushed(tmp_path: Path) -> None:
    first = make(optimizer=optim.Adam(0.1), cache=CacheConfig(sets=2, directory=tmp_path))
    for seed in range(3):
        step(first, seed)
    first.flush()
    want = [table.clone() for table in first.table_weights()]
    states = [{k: v.clone() for k, v in kept.items()} for kept in first.table_optimizer_states()]
    del first
    specs = [
        TableSpec(rows, dim, f"t{t}", placement)
        for t, (rows, dim, placement) in enumerate(zip(ROWS, DIMS, MIXED, strict=True))
    ]
    again = TableBatchedEmbeddingBags(
        specs, optim.Adam(0.1), cache=CacheConfig(sets=2, directory=tmp_path)
    )
    assert torch.equal(again.table_weights()[3], want[3])
    for key, value in again.table_optimizer_states()[3].items():
        assert torch.equal(value, states[3][key])
    assert again.step == 3


def test_disk_needs_a_directory() -> None:
    with pytest.raises(ValueError, match="need a directory"):
        make()


def test_writing_to_a_view_is_seen(tmp_path: Path) -> None:
    module = make(optimizer=optim.SGD(0.1), cache=CacheConfig(sets=2, directory=tmp_path))
    step(module, 0)
    for table in module.table_weights():
        table.fill_(1.0)
    indices, offsets = batch(0)
    with torch.no_grad():
        out = module(indices, offsets)
    lengths = offsets.diff().view(len(FEATURES), BATCH).float()
    assert torch.equal(out[:, 0], lengths[0])
    assert torch.equal(out[:, -1], lengths[4])


def test_stochastic_rounding_does_not_depend_on_the_cache(tmp_path: Path) -> None:
    precision = Precision(torch.bfloat16, stochastic_rounding=StochasticRounding(3))
    # Random numbers follow the rows of a module, which are numbered by placement: keep the order.
    ascending = (Placement.DEVICE, Placement.MANAGED, Placement.MANAGED_CACHING, Placement.DISK)
    plain = make(PLAIN, optim.SGD(0.01), precision=precision)
    for policy, sets in ((CachePolicy.LRU, 1), (CachePolicy.LFU, 3)):
        cache = CacheConfig(policy, sets=sets, directory=tmp_path / policy.value)
        far = make(ascending, optim.SGD(0.01), precision=precision, cache=cache)
        near = copy.deepcopy(plain)
        for seed in range(5):
            assert torch.equal(step(near, seed), step(far, seed))
        assert same_tables(near, far)


def test_mapped_memory_waits_for_the_gpu_that_was_current(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    current = [1]
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.utils.dlpack, "from_dlpack", lambda capsule: capsule)
    mapped = map_pinned(torch.ones(3), torch.device("cuda"))
    current[0] = 0
    del mapped
    gc.collect()
    assert waited == [torch.device("cuda:1")]
