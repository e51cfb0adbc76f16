"""Dynamic tables in two tiers: the same bits as one large table, whatever moves where."""

import random
import warnings
from typing import Any

import pytest
import torch

from emblib import (
    BackingStore,
    DynamicEmbeddingBags,
    KeyStatus,
    Pooling,
    Precision,
    TierMode,
    optim,
)
from emblib.checkpoints import table_entries
from emblib.dynamic.saving.table_dumps import apply_changes, changes_since
from emblib.dynamic.tiers.host import HostRows
from emblib.init import Constant
from emblib.specs import CountMinSketch, DynamicSpec, Eviction, ExactCounter, FrequencyAdmission
from tests.dynamic.tier_cases import Pair, batch, specs


@pytest.mark.parametrize("mode", TierMode)
@pytest.mark.parametrize("eviction", Eviction)
def test_two_tiers_are_one_table(eviction: Eviction, mode: TierMode) -> None:
    """With rows that move both ways, evaluation in between, and several batches in flight."""
    store = HostRows(4096, "lru" if eviction is Eviction.NONE else eviction)
    pair, chance = Pair(store, mode, eviction=eviction), random.Random(1)
    for step in range(14):
        if eviction is Eviction.CUSTOM:
            score = chance.randrange(-5, 5)
            pair.big.set_eviction_score(score)
            pair.small.set_eviction_score(score)
        match step % 4:
            case 0:
                pair.train(step)
            case 1:  # two batches in flight
                first, second = pair.forward(step), pair.forward(1000 + step)
                pair.backward(first, step)
                pair.backward(second, 1000 + step)
            case 2:  # evaluation between forward and backward, and a forward without one
                outs = pair.forward(step)
                with torch.no_grad():
                    pair.forward(2000 + step)
                pair.forward(3000 + step)
                pair.backward(outs, step)
            case 3:
                pair.small.prefetch(*batch(step))
                pair.train(step)
    pair.compare()
    stats = pair.small.tier_stats()
    assert all(line.dropped == 0 for line in stats.values())
    assert all(line.backing_hits for line in stats.values())
    assert stats["a"].served_in_place
    if eviction is not Eviction.NONE:
        assert all(line.promoted and line.demoted for line in stats.values())
    assert all(pair.small.index.size(t) < pair.big.size(t) for t in range(2))


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": optim.SGD(0.1), "pooling": Pooling.MEAN},
        {"optimizer": optim.RowwiseAdagrad(0.1)},
        {
            "optimizer": optim.Adagrad(0.1),
            "precision": Precision(weights=torch.float16, states=torch.bfloat16),
        },
    ],
    ids=["sgd", "rowwise_adagrad", "adagrad_half"],
)
def test_any_optimizer_moves_its_state(options: dict[str, object]) -> None:
    pair = Pair(HostRows(4096), **options)
    for step in range(8):
        pair.train(step)
    pair.compare()


def test_weights_of_samples_get_their_gradient() -> None:
    pair = Pair(HostRows(4096))
    for step in range(6):
        weights = [torch.rand(120, generator=torch.Generator().manual_seed(step)) for _ in "ab"]
        outs = []
        for module, weight in zip((pair.big, pair.small), weights, strict=True):
            outs.append(module(*batch(step), weight.requires_grad_()))
        assert torch.equal(*outs)
        pair.backward((outs[0], outs[1]), step)
        assert torch.equal(weights[0].grad, weights[1].grad)
    pair.compare()


def test_keys_that_went_down_and_up_have_not_left() -> None:
    """Into slots that were new keys' in between."""
    module = DynamicEmbeddingBags(
        [DynamicSpec(32, 1, initializer=Constant(0.0))],
        optim.SGD(1.0),
        backing=BackingStore(HostRows(512)),
    )
    ids, offsets = torch.arange(32), torch.arange(33)
    waits = module(ids, offsets)
    for some in (ids + 100, ids, ids[:1]):
        module(some, offsets[: some.numel() + 1])
    waits.sum().backward()
    assert int(module.dropped_updates) == 0
    assert module.eval()(ids, offsets).view(-1).tolist() == [-1.0] * 32


@pytest.mark.parametrize("removal", ["erase", "drop", "expire", "erase often"])
def test_a_key_that_returned_gets_no_update_of_its_old_row(removal: str) -> None:
    """Where it is in the store at the backward, or was, which holds rows without their versions."""
    module = DynamicEmbeddingBags(
        [DynamicSpec(32, 1, initializer=Constant(0.0), ttl=1 if removal == "expire" else None)],
        optim.SGD(1.0),
        backing=BackingStore(HostRows(32 if removal == "drop" else 512)),
    )
    key, offset, offsets = torch.tensor([7]), torch.tensor([0, 1]), torch.arange(33)
    waits = module(key, offset)
    for first in (100, 200):
        module(torch.arange(first, first + 32), offsets)
    if removal.startswith("erase"):
        assert module.erase(0, key).all()
    for other in range(200, 264) if removal == "erase often" else ():
        module.erase(0, torch.tensor([other]))
    assert not bool(module.table_handles()["table_0"].contains(key))
    returned = module(key, offset)
    module(torch.arange(100, 132), offsets)
    waits.sum().backward()
    assert int(module.dropped_updates) == 1
    returned.sum().backward()
    assert module.eval()(key, offset).item() == -1.0
    assert int(module.dropped_updates) == 1


@pytest.mark.parametrize("removal", ["erase", "drop"])
def test_changes_remove_keys_behind_a_store(removal: str) -> None:
    """As `test_a_key_that_returned_gets_no_update_of_its_old_row`."""
    spec = DynamicSpec(32, 1, name="t", initializer=Constant(0.0))
    store = HostRows(32 if removal == "drop" else 512)
    module = DynamicEmbeddingBags([spec], optim.SGD(1.0), backing=BackingStore(store))
    source = DynamicEmbeddingBags([DynamicSpec(512, 1, name="t")], optim.SGD(1.0))
    source.track_evictions()
    key, offset, offsets = torch.tensor([7]), torch.tensor([0, 1]), torch.arange(33)
    source(key if removal == "erase" else key + 1, offset)
    waits, since = module(key, offset), source.num_training_steps
    if removal == "erase":
        source.erase(0, key)
    else:
        module(torch.arange(100, 132), offsets)  # demotes 7
    source(torch.arange(200, 232), offsets)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* had no slot for all keys")
        apply_changes(module, changes_since(source, since))
    assert not bool(module.table_handles()["t"].contains(key))
    module(key, offset)
    module(torch.arange(400, 432), offsets)
    waits.sum().backward()
    assert int(module.dropped_updates) == 1


def test_a_key_that_was_below_was_there() -> None:
    module = DynamicEmbeddingBags(
        [DynamicSpec(32, 4)], optim.SGD(0.01), backing=BackingStore(HostRows(4096))
    )
    ids, offsets = torch.arange(200), torch.tensor([0, 200])
    module(ids, offsets)
    assert (module.key_status() == KeyStatus.NEW).all()
    module(ids, offsets)
    assert (module.key_status() == KeyStatus.HIT).all()


@pytest.mark.parametrize("mode", TierMode)
@pytest.mark.parametrize(
    "counter", [ExactCounter(2048), CountMinSketch(4096, halve_every=3)], ids=["exact", "sketch"]
)
def test_admission_counts_only_keys_that_are_in_no_tier(
    counter: ExactCounter | CountMinSketch, mode: TierMode
) -> None:
    admission = FrequencyAdmission(3, counter, reads=Constant(2.0))
    pair = Pair(HostRows(4096, "lfu"), mode, admission=admission, eviction="lfu")
    for step in range(12):
        pair.train(step)
    pair.compare()


def test_unused_keys_expire_in_both_tiers() -> None:
    pair = Pair(HostRows(4096), ttl=16)
    for step in range(60):
        for module in (pair.big, pair.small):
            module(*batch(step % 6 if step < 10 else 100 + step % 3)).sum().backward()
    small, big = (table_entries(module, 0) for module in (pair.small, pair.big))
    assert set(small.keys.tolist()) == set(big.keys.tolist())
    oldest = pair.small.index.tick - 16 - 2
    assert int(small.stamps.min()) >= oldest
    assert set(batch(2)[0].tolist()) - set(small.keys.tolist())


def test_state_dicts_go_between_one_tier_and_two() -> None:
    pair, other = Pair(HostRows(4096)), Pair(HostRows(4096))
    for step in range(6):
        pair.train(step)
    other.small.train()
    other.small.load_state_dict(pair.big.state_dict())
    other.big.load_state_dict(pair.small.state_dict())
    other.compare()
    for step in range(6, 9):
        pair.train(step)
        other.train(step)
    other.compare()
    pair.compare()


def test_copies_follow_by_changes() -> None:
    """What moves down is not a removal; what is erased, or leaves the last tier, is."""
    source = DynamicEmbeddingBags(
        specs((32, 32)),
        optim.SGD(0.01),
        backing=BackingStore(HostRows(256)),
        feature_tables=(0, 1, 0),
    )
    follower = DynamicEmbeddingBags(
        specs((32, 64)),
        optim.SGD(0.01),
        backing=BackingStore(HostRows(4096)),
        feature_tables=(0, 1, 0),
    )
    source.track_evictions()
    tick = source.num_training_steps
    for step in range(12):
        source(*batch(step)).sum().backward()
        if step % 3 == 2:
            source.erase(0, torch.arange(step))
            changes = changes_since(source, tick)
            apply_changes(follower, changes)
            tick = changes.until
            mine, theirs = follower.state_dict(), source.state_dict()
            assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert source.tier_stats()["a"].dropped


def test_hybrid_promotes_what_ranks_above() -> None:
    """By count: keys that are used once do not push out those that are used often."""
    module = DynamicEmbeddingBags(
        [DynamicSpec(32, 4, eviction="lfu")],
        optim.SGD(0.01),
        backing=BackingStore(HostRows(4096, "lfu"), "hybrid"),
    )
    often = torch.arange(32)
    for _ in range(3):
        module(often, torch.tensor([0, 32])).sum().backward()
    module(torch.arange(100, 164), torch.tensor([0, 64])).sum().backward()
    assert module.index.size(0) == 32
    assert (module.find(0, often) >= 0).all()
    assert module.size(0) == 96
    for _ in range(5):  # by now they are used more often
        module(torch.arange(100, 116), torch.tensor([0, 16])).sum().backward()
    assert (module.find(0, torch.arange(100, 116)) >= 0).all()
    assert module.size(0) == 96


@pytest.mark.parametrize("mode", TierMode)
def test_tiers_on_any_device(device: torch.device, mode: TierMode) -> None:
    """Rows of 14 bytes in 16 bits move like others, also one alone."""
    rules: dict[str, object] = {"eviction": "lfu", "dim": 7}
    options: dict[str, Any] = {
        "feature_tables": (0, 1, 0),
        "seed": 3,
        "device": device,
        "precision": Precision(weights=torch.bfloat16),
    }
    backing = BackingStore(HostRows(4096), mode)
    modules = (
        DynamicEmbeddingBags(specs((4096, 4096), **rules), optim.RowwiseAdagrad(0.1), **options),
        DynamicEmbeddingBags(
            specs((32, 64), **rules), optim.RowwiseAdagrad(0.1), backing=backing, **options
        ),
    )
    for seed in range(6):
        ids, offsets = (tensor.to(device) for tensor in batch(seed))
        outs = [module(ids, offsets) for module in modules]
        assert torch.equal(*outs)
        for out in outs:
            out.backward(torch.ones_like(out))
    key = next(backing.store.iterate(0)).keys[:1].to(device)
    with torch.no_grad():
        offsets = torch.tensor([0, 1, 1, 1], device=device)
        assert torch.equal(modules[0](key, offsets), modules[1](key, offsets))
    stats = modules[1].tier_stats().values()
    assert all(s.promoted and s.demoted for s in stats)
    assert any(s.served_in_place for s in stats)
