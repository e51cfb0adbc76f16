"""What users get wrong: nothing is trained by halves, and no number is silently another."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from emblib import (
    DynamicEmbeddingBags,
    DynamicSpec,
    ExactCounter,
    FrequencyAdmission,
    HashTable,
    HostRows,
    InsertPolicy,
    optim,
    storage,
)
from emblib.dynamic.saving.table_dumps import apply_changes, changes_since

IDS, OFFSETS = torch.tensor([7, 8]), torch.tensor([0, 2])


def make(**options: Any) -> DynamicEmbeddingBags:
    return DynamicEmbeddingBags([DynamicSpec(32, 4, name="a", **options)], optim.SGD(0.1))


@pytest.mark.parametrize(
    ("error", "says", "options"),
    [
        (RuntimeError, "1 dimension, got 2", {"indices": IDS[None]}),
        (TypeError, "must be a tensor", {"indices": [7, 8]}),
        (TypeError, "offsets must be a tensor", {"offsets": [0, 2]}),
        (RuntimeError, "begin with 0, got 1", {"offsets": torch.tensor([1, 2])}),
        (RuntimeError, "float32, got", {"per_sample_weights": torch.ones(2).double()}),
        (RuntimeError, "entry per lookup = 2", {"per_sample_weights": torch.ones(1)}),
        (RuntimeError, "int64, got", {"counts": torch.ones(2)}),
        (ValueError, "must be >= 0, got -1", {"counts": torch.tensor([1, -1])}),
    ],
)
def test_a_batch_that_is_refused_gives_no_key_a_row(
    error: type[Exception], says: str, options: dict[str, Any]
) -> None:
    table = make()
    with pytest.raises(error, match=says):
        table(**{"indices": IDS, "offsets": OFFSETS, **options})
    assert (table.size(0), table.num_training_steps) == (0, 0)


def test_tables_that_differ_in_the_insert_policy_are_told_apart() -> None:
    tables = [DynamicSpec(32, 4, insert_policy=policy) for policy in InsertPolicy]
    with pytest.raises(ValueError, match=r"got lru \(ALWAYS_EVICT\), lru \(EVICT_IF_LOWER\); make"):
        DynamicEmbeddingBags(tables)


def test_ids_of_inference_mode_are_trained() -> None:
    """Torch counts no writes of such tensors, and raises where their version is read."""
    with torch.inference_mode():
        ids, offsets = IDS.clone(), OFFSETS.clone()
    table = make()
    out = table(ids, offsets)
    out.sum().backward()
    assert (table.size(0), table.num_training_steps) == (2, 1)
    assert torch.allclose(table(ids, offsets), out - 0.2)


def test_offsets_that_are_repaired_are_told_in_words_that_help() -> None:
    with pytest.warns(UserWarning, match="offsets out of bounds.*end with the number") as told:
        make()(IDS, torch.tensor([0, 5]))
    assert "BoundsCheck" not in str(told[0].message), "dynamic tables have no such option"


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_sample_weights_are_never_those_of_other_keys(training: bool) -> None:
    table = make()
    table(IDS, OFFSETS)
    table.train(training)
    weights = torch.ones(2, requires_grad=True)
    out = table(IDS, OFFSETS, weights)
    table.train()
    table(torch.arange(100, 132), torch.tensor([0, 32]))  # 7 and 8 are evicted
    with pytest.raises(RuntimeError, match="before the next training forward"):
        out.sum().backward()


def test_copies_that_follow_are_told_of_a_clear() -> None:
    table, copy = make(), make()
    table.track_evictions()
    table(IDS, OFFSETS)
    copy.load_state_dict(table.state_dict())
    tick = table.num_training_steps
    table.clear()
    table(IDS + 70, OFFSETS)
    apply_changes(copy, changes_since(table, tick))
    assert copy.find(0, IDS).tolist() == [-1, -1]
    assert copy.size(0) == table.size(0) == 2


@pytest.mark.parametrize("optimizer", [None, optim.SGD(0.1)])
def test_no_tables(optimizer: optim.Optimizer | None) -> None:
    table = DynamicEmbeddingBags([], optimizer)
    assert table(IDS[:0], OFFSETS[:1]).shape == (0, 0)
    assert table.stats() == {}


@pytest.mark.parametrize(
    "make_owner",
    [
        lambda seed: DynamicEmbeddingBags([DynamicSpec(32, 4)], seed=seed),
        lambda seed: HashTable(DynamicSpec(32, 4), seed=seed),
        lambda seed: HostRows(32, seed=seed),
        lambda seed: storage.Hash(seed=seed),
        lambda count: FrequencyAdmission(count, ExactCounter(8)),
    ],
)
def test_numbers_beyond_63_bits_are_refused(make_owner: Callable[[int], object]) -> None:
    make_owner(2**63 - 1)
    for number in (-1, 2**63):
        with pytest.raises(ValueError, match=r"(seed|threshold) must be"):
            make_owner(number)


def test_scores_and_tables_are_whole_numbers() -> None:
    stepped, custom = make(eviction="step"), make(eviction="custom")
    with pytest.raises(TypeError, match=r"must be an int, got 1\.5"):
        stepped.set_eviction_step("a", 1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2\\^63"):
        stepped.set_eviction_step("a", 2**63)
    assert stepped.eviction_score("a") == 1
    custom.set_eviction_score(int(np.int64(4)))
    custom.set_eviction_score(np.int64(5))  # type: ignore[arg-type]
    assert custom.eviction_score(0) == 5
    for table in (0.5, True):
        with pytest.raises(TypeError, match="number or name"):
            custom.size(table)  # type: ignore[arg-type]
    assert custom.table_rows("a")["weight"].shape == (32, 4)
    with pytest.raises(IndexError, match="must be in"):
        custom.table_rows(-1)
    for rows in (-1, 2.5, True):
        with pytest.raises((TypeError, ValueError), match="rows must be"):
            custom.reserve(0, rows)  # type: ignore[arg-type]
    for max_keys in (0, 2.5, True):
        with pytest.raises((TypeError, ValueError), match="max_keys must be"):
            custom.track_evictions(max_keys)  # type: ignore[arg-type]


class Model(nn.Module):
    def __init__(self, optimizer: optim.Optimizer) -> None:
        super().__init__()
        self.bags = DynamicEmbeddingBags([DynamicSpec(32, 4)], optimizer)
        self.over = nn.Linear(4, 1)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.over(self.bags(ids, offsets))


def test_ddp_never_mixes_the_tables_of_its_ranks(tmp_path: Any) -> None:
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        for optimizer, broadcasts, says in (
            (optim.SGD(0.1), True, "broadcast_buffers=False"),
            (optim.External(), False, "by row"),
            (optim.SGD(0.1), False, None),
        ):
            model = DistributedDataParallel(Model(optimizer), broadcast_buffers=broadcasts)
            if says is None:
                model(IDS, OFFSETS).sum().backward()
                assert model.module.bags.size(0) == 2
                continue
            with pytest.raises(RuntimeError, match=says):
                model(IDS, OFFSETS)
            assert model.module.bags.size(0) == 0
    finally:
        dist.destroy_process_group()
