"""DynamicEmb's memory options: rows that do not fit the device are behind it, with one result."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from emblib import DiskRows, Eviction, HostRows, TierMode
from emblib.compat.dynamicemb import (
    BatchedDynamicEmbeddingTablesV2,
    DynamicEmbDump,
    DynamicEmbLoad,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EmbOptimType,
)
from tests.compat.dynamicemb_cases import look_up, one_table, rows_of

ROW = 4 * (4 + 4)  # bytes: four weights and their sums of squares
MODES = [(True, TierMode.CACHING), (False, TierMode.HYBRID)]


def two_tiers(**changes: Any) -> BatchedDynamicEmbeddingTablesV2:
    """640 rows, of which the memory of the device has room for 35, and takes one bucket."""
    given = {
        "max_capacity": 640,
        "local_hbm_for_values": 35 * ROW,
        "optimizer": EmbOptimType.EXACT_ADAGRAD,
        "learning_rate": 0.5,
        **changes,
    }
    return one_table(**given)


def train(module: BatchedDynamicEmbeddingTablesV2, steps: int = 12) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        ids = torch.randint(-150, 150, (20,), generator=generator)
        rows = look_up(module, ids)
        rows.backward(torch.randn(rows.shape, generator=generator))


def test_rows_are_in_a_store_of_the_caller(tmp_path: Path) -> None:
    store = DiskRows(tmp_path)
    module = two_tiers(external_storage=store)
    plain = one_table(max_capacity=640, optimizer=EmbOptimType.EXACT_ADAGRAD, learning_rate=0.5)
    for each in (module, plain):
        train(each)
    assert module.bags.backing is not None
    assert module.bags.backing.store.wrapped_store is store
    ids = torch.arange(-150, 150)
    assert torch.equal(rows_of(module, ids), rows_of(plain, ids))
    assert store.size(0) > 0


@pytest.mark.parametrize(("caching", "mode"), MODES, ids=["caching", "hybrid"])
def test_results_are_those_of_one_tier(caching: bool, mode: TierMode) -> None:
    module, plain = (
        two_tiers(caching=caching),
        one_table(max_capacity=640, optimizer=EmbOptimType.EXACT_ADAGRAD, learning_rate=0.5),
    )
    assert module.bags.backing is not None
    assert module.bags.backing.mode is mode
    assert module.bags.tables[0].capacity == 32
    store = module.bags.backing.store.wrapped_store
    assert isinstance(store, HostRows)
    assert store.capacity == (608,)
    for each in (module, plain):
        train(each)
    ids = torch.arange(-150, 150)
    assert torch.equal(rows_of(module, ids), rows_of(plain, ids))
    demoted = module.bags.tier_stats()["t0"].demoted
    assert demoted > 0
    assert module.bags.size(0) == plain.bags.size(0) > 32


def test_prefetch_and_flush_change_nothing() -> None:
    module, other = two_tiers(caching=True), two_tiers(caching=True)
    for step in range(8):
        ids = torch.arange(step * 10, step * 10 + 20) % 70
        module.prefetch(ids, torch.arange(21))
        for each in (module, other):
            look_up(each, ids).sum().backward()
        module.flush()
        module.reset_cache_states()
    assert torch.equal(rows_of(module, range(70)), rows_of(other, range(70)))


def test_dumps_have_both_tiers(tmp_path: Path) -> None:
    first, second = two_tiers(caching=True), two_tiers(caching=False, max_capacity=1000)
    train(first)
    DynamicEmbDump(str(tmp_path), first, optim=True)
    DynamicEmbLoad(str(tmp_path), second, optim=True)
    assert second.bags.size(0) == first.bags.size(0) > 32
    for each in (first, second):
        train(each, 2)
    ids = torch.arange(-150, 150)
    assert_close(rows_of(first, ids), rows_of(second, ids))


def test_changes_are_told_of_both_tiers() -> None:
    module = two_tiers()
    look_up(module, range(60))
    since = module.get_score()
    look_up(module, [100, 3, 59])
    found, _ = module.incremental_dump(since)
    assert found["t0"][0].tolist() == [3, 59, 100]
    assert_close(found["t0"][1][:, 0], torch.tensor([3.0, 59.0, 100.0]))
    everything, _ = module.incremental_dump({"t0": 0})
    assert everything["t0"][0].tolist() == [*range(60), 100]


@pytest.mark.parametrize(
    "changes",
    [
        {"local_hbm_for_values": 0},
        {"local_hbm_for_values": 640 * ROW},
        {"local_hbm_for_values": 640 * ROW, "caching": True},
        {"local_hbm_for_values": 0, "global_hbm_for_values": 640 * ROW},
        {"enforce_hbm": True},
    ],
    ids=str,
)
def test_tables_that_fit_have_one_tier(changes: dict[str, Any]) -> None:
    module = two_tiers(**changes)
    assert module.bags.backing is None
    assert module.bags.tables[0].capacity == 640


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"score_strategy": DynamicEmbScoreStrategy.NO_EVICTION},
            NotImplementedError,
            "NO_EVICTION and 640 rows, of which 32",
        ),
    ],
    ids=str,
)
def test_memory_that_cannot_do_is_refused(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        two_tiers(**changes)


@pytest.mark.parametrize("caching", [True, False])
def test_a_budget_below_a_bucket_is_rounded_up(caching: bool) -> None:
    given = 0 if caching else 31 * ROW
    with pytest.warns(UserWarning, match=f"is {given} bytes, and a bucket of 32 rows takes 1024"):
        module = two_tiers(local_hbm_for_values=given, caching=caching)
    assert module.bags.tables[0].capacity == 32
    train(module)
    assert module.bags.size(0) > 32


def test_all_scores_order_both_tiers() -> None:
    """What leaves the lower tier is the least of it by the strategy of the table."""
    module = two_tiers(score_strategy=DynamicEmbScoreStrategy.LFU, max_capacity=64)
    store = module.bags.backing.store.wrapped_store
    assert store.eviction is Eviction.LFU
    look_up(module, [*range(30)] * 3)
    for start in range(100, 200, 20):
        look_up(module, range(start, start + 20))
    assert (rows_of(module, range(1, 30))[:, 0] != 0).all()
    assert module.bags.size(0) == 64


def test_a_module_moves_within_a_model() -> None:
    model = nn.ModuleDict({"t": two_tiers(caching=True)})
    train(model["t"], 3)
    state = model.state_dict()
    other = nn.ModuleDict({"t": two_tiers(caching=True)})
    other.load_state_dict(state)
    ids = torch.arange(-150, 150)
    assert torch.equal(rows_of(other["t"], ids), rows_of(model["t"], ids))


def test_the_warning_of_a_small_budget_names_the_caller() -> None:
    options = DynamicEmbTableOptions(
        embedding_dtype=torch.float32, dim=4, max_capacity=640, local_hbm_for_values=1
    )
    with pytest.warns(UserWarning, match="rounded up to one bucket") as warned:
        BatchedDynamicEmbeddingTablesV2([options])
    assert [warning.filename for warning in warned] == [__file__]


@pytest.mark.parametrize("ids", [torch.tensor([1.5]), torch.tensor([True])], ids=str)
def test_ids_that_are_not_integers_are_refused(ids: torch.Tensor) -> None:
    module, offsets = two_tiers(), torch.tensor([0, 1])
    for call in (module, module.prefetch):
        with pytest.raises(TypeError, match="indices must be integers"):
            call(ids, offsets)
    assert module.num_prefetched == 0
