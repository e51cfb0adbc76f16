"""What a module of dynamic tables does with keys: rows for new ones, and what has none reads."""

import gc
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib import (
    DynamicEmbeddingBags,
    DynamicSpec,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    HashTable,
    OnInsertFailure,
    Pooling,
    TableSpec,
    optim,
)
from emblib.checkpoints import table_entries
from emblib.dynamic.hash_index import HashIndex
from emblib.dynamic.keys import hash_key_of
from emblib.dynamic.saving import loading
from emblib.dynamic.saving.checkpoint import target_of
from emblib.dynamic.slot_versions import LastInsertion
from emblib.init import Constant, KeyModulo, Normal
from emblib.ops.hash import Keys
from tests.hash_cases import crowd

NONE = Pooling.NONE


def _each(ids: list[int] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A bag an id."""
    ids = torch.as_tensor(ids, device=device)
    return ids, torch.arange(ids.numel() + 1, device=device)


def _one(spec: DynamicSpec, device: torch.device, **options: Any) -> DynamicEmbeddingBags:
    options.setdefault("optimizer", optim.SGD(lr=0.1))
    return DynamicEmbeddingBags([spec], device=device, **options)


def test_training_inserts_and_reading_does_not(device: torch.device) -> None:
    table = _one(DynamicSpec(64, 4, initializer=KeyModulo(), default_value=-7.0), device)
    batch = _each([5, 100_003, -1], device)
    with torch.no_grad():
        assert table(*batch)[:, 0].tolist() == [-7.0] * 3
    table.eval()
    assert table(*batch)[:, 0].tolist() == [-7.0] * 3
    assert table.size(0) == 0
    assert not table(*batch).requires_grad
    table.train()
    assert table(*batch)[:, 0].tolist() == [5.0, 3.0, float((2**64 - 1) % 100_000)]
    assert table.size(0) == 3
    table.eval()
    stats, tick = table.stats(), table.index.tick
    assert table(*_each([100_003, 4], device))[:, 0].tolist() == [3.0, -7.0]
    assert (table.stats(), table.index.tick) == (stats, tick), "eval leaves no trace"


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
def test_missing_ids_are_pooled_like_others(device: torch.device, pooling: Pooling) -> None:
    spec = DynamicSpec(64, 4, initializer=Constant(3.0))
    ids = torch.tensor([1, 2, 1, 2, 9, 9], device=device)
    offsets = torch.tensor([0, 2, 6], device=device)
    for missing in (0.0, 1.0):
        table = _one(replace(spec, default_value=missing), device, pooling=pooling)
        table(*_each([1, 2], device))
        table.eval()
        sums = [6.0, 6.0 + 2 * missing]
        divisors = [2, 4] if pooling is Pooling.MEAN else [1, 1]
        want = [total / n for total, n in zip(sums, divisors, strict=True)]
        assert table(ids, offsets)[:, 0].tolist() == want


def test_refused_keys_read_missing_and_are_not_trained(device: torch.device) -> None:
    spec = DynamicSpec(32, 4, eviction="none", default_value=2.5, initializer=Constant(1.0))
    table = _one(spec, device)
    ids = torch.arange(40, device=device)
    for step in range(3):
        out = table(*_each(ids, device))
        refused = table.find(0, ids) < 0
        assert int(refused.sum()) == 8
        assert (out[refused] == 2.5).all()
        assert torch.allclose(out[~refused], torch.tensor(1.0 - 0.1 * step, device=device))
        out.sum().backward()
    assert table.stats()["table_0"]["refused"] == 24


@pytest.mark.parametrize("missing", [0.0, 1.0])
def test_a_key_without_a_row_never_meets_garbage(device: torch.device, missing: float) -> None:
    """Every plane begins as NaN; keys come, are evicted, refused, kept out; tables grow."""
    generator = torch.Generator().manual_seed(0)
    admission = FrequencyAdmission(2, ExactCounter(64), reads=Normal() if missing else None)
    specs = [
        DynamicSpec(96, 6, initial_capacity=32, default_value=missing),
        DynamicSpec(32, 3, default_value=missing, admission=admission),
    ]
    table = DynamicEmbeddingBags(specs, optim.Adam(lr=0.01), feature_tables=[0, 1], device=device)
    for plane in table.state.row_buffers:
        plane.fill_(float("nan"))
    for _ in range(30):
        ids = torch.randint(-200, 200, (120,), generator=generator).to(device)
        weights = torch.rand(120, generator=generator).to(device).requires_grad_()
        offsets = torch.arange(0, 121, 3, device=device)
        out = table(ids, offsets, weights)
        assert out.isfinite().all()
        out.square().sum().backward()
        assert weights.grad is not None
        assert weights.grad.isfinite().all()
        with torch.no_grad():
            assert table(ids + 50, offsets).isfinite().all()
    stats = table.stats()
    assert stats["table_0"]["evicted"] > 0
    assert stats["table_1"]["not_admitted"] > 0
    assert stats["table_1"]["refused"] + stats["table_1"]["evicted"] > 0
    for t in range(2):
        slots = table.find(t, torch.arange(-300, 300))
        for rows in table.table_rows(t).values():
            assert rows[slots[slots >= 0]].isfinite().all()


def test_a_key_that_comes_back_starts_anew(device: torch.device) -> None:
    table = _one(DynamicSpec(32, 4, initializer=Normal()), device, optimizer=optim.Adam(lr=0.1))
    table(*_each([1], device)).sum().backward()
    first = table(*_each([1], device)).detach().clone()
    for key in range(100, 132):
        table(*_each([key], device))
    assert table.find(0, torch.tensor([1])).tolist() == [-1]
    again = table(*_each([1], device))
    assert not torch.equal(again, first)
    fresh = _one(DynamicSpec(32, 4, initializer=Normal()), device)
    assert torch.equal(again, fresh(*_each([1], device))), "a row depends on its key alone"
    slot = table.find(0, torch.tensor([1]))
    for name, rows in table.table_rows(0).items():
        assert name == "weight" or not rows[slot].any(), "its state is new as well"


def test_first_values_are_those_of_table_key_and_seed(device: torch.device) -> None:
    specs = [DynamicSpec(64, 8, name="a"), DynamicSpec(320, 8, name="b", initial_capacity=32)]
    both = DynamicEmbeddingBags(specs, optim.SGD(0.01), seed=3, device=device)
    alone = DynamicEmbeddingBags([DynamicSpec(320, 8, name="b")], seed=3, device=device)
    other = DynamicEmbeddingBags([DynamicSpec(320, 8, name="b")], seed=4, device=device)
    ids = torch.arange(5, 45, device=device)
    batch = torch.cat([ids, ids.flip(0)]), torch.arange(81, device=device)
    rows = both(*batch).view(40, 2, 8)
    assert torch.equal(rows[:, 1].flip(0), alone(*_each(ids, device)))
    assert not torch.equal(alone(*_each(ids, device)), other(*_each(ids, device)))
    assert not torch.equal(rows[:, 0], alone(*_each(ids, device)))


def test_initial_state(device: torch.device) -> None:
    table = _one(DynamicSpec(32, 4, initial_state=0.25), device, optimizer=optim.Adagrad(lr=0.1))
    table(*_each([7], device))
    states = table.table_rows(0)
    slot = table.find(0, torch.tensor([7]))
    (name,) = set(states) - {"weight"}
    assert states[name][slot].tolist() == [[0.25] * 4]


def test_admission_reads_and_learns_later(device: torch.device) -> None:
    for reads, want in ((None, 9.0), (KeyModulo(), 77.0)):
        admission = FrequencyAdmission(3, ExactCounter(32), reads=reads)
        spec = DynamicSpec(32, 4, initializer=Constant(1.0), default_value=9.0, admission=admission)
        table = _one(spec, device)
        for _ in range(2):
            out = table(*_each([77], device))
            assert out[0].tolist() == [want] * 4
            out.sum().backward()
        assert table.size(0) == 0
        assert table(*_each([77], device))[0].tolist() == [1.0] * 4
        assert table.size(0) == 1


def test_shared_table_and_duplicates(device: torch.device) -> None:
    """A key of several features and positions has one row, and one update."""
    table = DynamicEmbeddingBags(
        [DynamicSpec(32, 2, initializer=Constant(0.0))],
        optim.SGD(lr=1.0),
        feature_tables=[0, 0],
        device=device,
    )
    ids = torch.tensor([4, 4, 6, 4], device=device)
    out = table(ids, torch.tensor([0, 2, 2, 3, 4], device=device))
    out.sum().backward()
    assert table.size(0) == 2
    assert table.stats()["table_0"]["inserted"] == 2
    rows = table.table_rows(0)["weight"][table.find(0, torch.tensor([4, 6]))]
    assert rows.tolist() == [[-3.0, -3.0], [-1.0, -1.0]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint64])
def test_dtypes_of_ids(device: torch.device, dtype: torch.dtype) -> None:
    table = _one(DynamicSpec(32, 2, initializer=KeyModulo()), device)
    ids, offsets = _each([1, 2, 3], device)
    assert torch.equal(table(ids.to(dtype), offsets), table(ids, offsets))
    if dtype is torch.uint64:
        largest = torch.tensor([2**64 - 1], dtype=dtype, device=device)
        out = table(largest, offsets[:2])
        assert torch.equal(out, table(*_each([-1], device)))
    assert table.size(0) == 3 + (dtype is torch.uint64)


def test_empty_batches(device: torch.device) -> None:
    table = _one(DynamicSpec(32, 2), device, feature_tables=[0, 0])
    none = torch.empty(0, dtype=torch.int64, device=device)
    for bags in (0, 6):
        out = table(none, torch.zeros(bags + 1, dtype=torch.int64, device=device))
        assert out.shape == (bags // 2, 4)
        out.sum().backward()
    assert table.size(0) == 0


@pytest.mark.parametrize("change", ["evict", "grow", "erase", "none"])
def test_backward_after_another_forward(device: torch.device, change: str) -> None:
    """Rows that moved are found; those that left are not updated, and counted."""
    spec = DynamicSpec(
        320 if change == "grow" else 32, 2, initial_capacity=32, initializer=Constant(0.0)
    )
    table = _one(spec, device, optimizer=optim.SGD(lr=1.0))
    ids = torch.arange(20, device=device)
    first = table(*_each(ids, device))
    if change == "evict":
        table(*_each(torch.arange(100, 120), device))
    elif change == "grow":
        table(*_each(torch.arange(100, 300), device))
        assert table.capacity(0) > 32
    elif change == "erase":
        assert table.erase(0, ids[:3]).all()
    first.sum().backward()
    slots = table.find(0, ids)
    rows = table.table_rows(0)["weight"]
    assert (rows[slots[slots >= 0]] == -1.0).all()
    gone = int((slots < 0).sum())
    assert gone == {"evict": 8, "grow": 0, "erase": 3, "none": 0}[change]
    assert int(table.dropped_updates) == gone
    assert float(rows.sum()) == -2.0 * (20 - gone), "and no other row was updated"


@pytest.mark.parametrize("change", ["evict", "erase", "clear", "load"])
def test_a_key_that_left_and_came_again_gets_no_update(device: torch.device, change: str) -> None:
    """Its row is a new one; the same id in another table has not left."""
    specs = [DynamicSpec(rows, 2, initializer=Constant(0.0)) for rows in (32, 64)]
    table = DynamicEmbeddingBags(
        specs, optim.SGD(lr=1.0), pooling=NONE, feature_tables=[0, 1], device=device
    )
    ids = torch.arange(8, device=device)
    first = table(ids.repeat(2), torch.arange(17, device=device))
    saved = table.state_dict()
    if change == "evict":
        for start in (100, 200):
            alone = torch.arange(start, start + 32, device=device)
            table(alone, torch.tensor([*range(33)] + [32] * 32, device=device))
    elif change == "erase":
        table.erase(0, ids)
    elif change == "clear":
        table.clear()
    else:
        table.load_state_dict(saved)
    offsets = torch.tensor([*range(5), *[4] * 4], device=device)
    kept = table(ids[:4], offsets)  # into table 0 again
    assert int((table.find(0, ids[:4]) >= 0).sum()) == 4
    first.sum().backward()
    both = change in ("clear", "load")
    assert not table.table_rows(0)["weight"].any(), "neither those that came again nor others"
    assert float(table.table_rows(1)["weight"].sum()) == (0 if both else -16)
    assert int(table.dropped_updates) == (16 if both else 8)
    kept.sum().backward()
    assert float(table.table_rows(0)["weight"].sum()) == -8


def test_ids_overwritten_after_an_insertion_hide_no_key_that_left(device: torch.device) -> None:
    """The next forward notes which slots the last one gave to new keys."""
    table = _one(DynamicSpec(64, 1, initializer=Constant(0.0)), device, optimizer=optim.SGD(1.0))
    other, waits = table(*_each([1], device)), table(*_each([7], device))
    table.erase(0, torch.tensor([7]))
    ids, offsets = _each([7], device)
    for key in (7, 1):
        table(ids.fill_(key), offsets)
    waits.sum().backward()
    other.sum().backward()
    assert table.eval()(*_each([1, 7], device)).view(-1).tolist() == [-1.0, 0.0]
    assert int(table.dropped_updates) == 1


def test_a_graph_that_is_kept_makes_the_index_keep_no_batches(device: torch.device) -> None:
    """Nor its backward look at them one by one."""
    table = _one(DynamicSpec(320, 2), device)
    held = [table(*_each([1], device))]
    held[0].sum().backward(retain_graph=True)
    for waits in (False, True):
        if waits:
            held.append(table(*_each([2], device)))
        for start in range(0, 400, 20):
            table(*_each(torch.arange(start, start + 20), device)).sum().backward()
        gc.collect()
        assert sum(type(o) is LastInsertion for o in gc.get_objects()) <= 1
    held[-1].sum().backward()


def test_training_steps_that_do_not_overlap_write_no_versions(device: torch.device) -> None:
    """The graph of the step before is often still there."""
    table = _one(DynamicSpec(64, 2), device)
    usual = table.index.nbytes()
    for start in range(0, 200, 20):
        out = table(*_each(torch.arange(start, start + 20), device))
        out.sum().backward()
    assert table.index.nbytes() == usual
    waits = out
    for start in range(0, 60, 20):
        out = table(*_each(torch.arange(start, start + 20), device))
    assert table.index.nbytes() == usual + 8 * 64
    table.clear()
    assert table.index.nbytes() == usual
    del waits


@pytest.mark.parametrize("grows", [False, True])
def test_what_left_in_between_is_what_a_model_says(device: torch.device, grows: bool) -> None:
    """Many steps overlap, in two tables that evict, erase, grow and are filled otherwise."""
    spec = {"initial_capacity": 32} if grows else {}
    specs = [DynamicSpec(rows, 1, initializer=Constant(0.0), **spec) for rows in (96, 320)]
    table = DynamicEmbeddingBags(
        specs, optim.SGD(lr=1.0), pooling=NONE, feature_tables=[0, 1], device=device
    )
    generator = torch.Generator().manual_seed(int(grows))
    born: dict[tuple[int, int], int] = {}  # in which step each key that is there came
    waiting: list[tuple[Tensor, list[tuple[int, int]], list[int]]] = []
    lost = updated = 0
    for step in range(150):
        ids = torch.randint(0, 150 if step % 50 < 25 else 400, (40,), generator=generator)
        out = table(ids.to(device), torch.arange(41, device=device))
        there = {(t, k) for t in (0, 1) for k in table_entries(table, t).keys.tolist()}
        born = {key: born.get(key, step) for key in there}
        keys = [(int(i >= 20), k) for i, k in enumerate(ids.tolist())]
        waiting.append((out, keys, [born.get(key, -1) for key in keys]))
        if step % 7 == 0:
            gone = ids[:3]
            table.erase(0, gone)
            for key in gone.tolist():
                born.pop((0, key), None)
        if step % 11 == 0:
            entries = table_entries(table, 1)
            loading.put(target_of(table, 1), entries.take(torch.arange(len(entries)).flip(0)))
        while waiting and torch.rand((), generator=generator) < 0.45:
            which = int(torch.randint(len(waiting), (), generator=generator))
            out, keys, came = waiting.pop(which)
            weights = [table.table_rows(t)["weight"].clone() for t in (0, 1)]
            out.sum().backward()
            want = [torch.zeros_like(w) for w in weights]
            for key, at in zip(keys, came, strict=True):
                if at < 0:
                    continue
                if born.get(key) != at:
                    lost += 1
                    continue
                updated += 1
                want[key[0]][table.find(key[0], torch.tensor([key[1]]))] -= 1
            for t in (0, 1):
                assert torch.equal(table.table_rows(t)["weight"] - weights[t], want[t])
            assert int(table.dropped_updates) == lost
    assert lost > 200
    assert updated > 200


def test_keys_that_came_again_by_a_call_of_their_own_get_no_update(device: torch.device) -> None:
    """In whatever slots; keys that these calls move to their other buckets have not left."""
    spec = DynamicSpec(1024, 1, eviction="none", initializer=Constant(0.0))
    table = _one(spec, device, optimizer=optim.SGD(lr=1.0), seed=0)
    ids = torch.arange(900, device=device)
    table(*_each(ids, device))
    waits = table(*_each(ids, device))
    there = table.find(0, ids) >= 0
    before = table.find(0, ids)
    entries = table_entries(table, 0)
    table.erase(0, ids[:300])
    table(*_each(torch.arange(1000, 1003), device))  # of later steps
    table.erase(0, torch.arange(1000, 1003))
    gone = torch.isin(entries.keys, ids[:300].cpu()).nonzero().view(-1)
    kept = entries.take(gone)
    new = replace(kept, keys=kept.keys + 5000)
    loading.put(target_of(table, 0), kept)
    loading.put(target_of(table, 0), new)
    more = entries.take(torch.arange(len(entries)))
    filler = replace(more, keys=more.keys + 9000).take(torch.arange(1024 - table.size(0)))
    loading.put(target_of(table, 0), filler)
    assert table.size(0) == 1024
    after = table.find(0, ids)
    assert bool(((before != after) & there)[:300].any()), "some had to move"
    waits.sum().backward()
    rows = table.table_rows(0)["weight"][:, 0]
    want = torch.where(there & (ids >= 300), -1.0, 0.0)
    assert torch.equal(rows[after[there]], want[there])
    assert int(table.dropped_updates) == int(there[:300].sum())


def test_what_came_again_before_the_table_grew_gets_no_update(device: torch.device) -> None:
    """It is known by its slot, which is another one then."""
    spec = DynamicSpec(640, 1, initial_capacity=64, initializer=Constant(0.0))
    table = _one(spec, device, optimizer=optim.SGD(lr=1.0), seed=0)
    ids = torch.arange(40, device=device)
    waits = table(*_each(ids, device))
    table.erase(0, ids[:20])
    for batch in (ids[:20], ids[:1], torch.arange(100, 600)):
        table(*_each(batch, device))
    assert table.capacity(0) > 64
    waits.sum().backward()
    rows = table.table_rows(0)["weight"][table.find(0, ids), 0]
    assert rows.tolist() == [0.0] * 20 + [-1.0] * 20
    assert int(table.dropped_updates) == 20


def test_a_key_that_had_no_row_in_forward_gets_no_update(device: torch.device) -> None:
    table = _one(DynamicSpec(32, 2, eviction="none", initializer=Constant(0.0)), device)
    table(*_each(torch.arange(32), device))
    refused = table(*_each([99], device))
    table.erase(0, torch.tensor([5]))
    while int(table.find(0, torch.tensor([99]))) < 0:
        table(*_each([99], device))
    refused.sum().backward()
    assert not table.table_rows(0)["weight"].any()
    assert int(table.dropped_updates) == 0


def test_key_check_tells(device: torch.device) -> None:
    """The caller is named, also where the compiler is loaded and stands in between."""
    assert torch._dynamo is not None
    ids = torch.arange(40)
    quiet = _one(DynamicSpec(32, 2, eviction="none"), device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet(*_each(ids, device))
    warned = _one(
        DynamicSpec(32, 2, name="users", eviction="none", on_insert_failure="warning"), device
    )
    with pytest.warns(UserWarning, match="8 keys found no slot in table 'users'") as caught:
        warned(*_each(ids, device))
    assert caught[0].filename == __file__
    strict = _one(
        DynamicSpec(32, 2, eviction="none", on_insert_failure=OnInsertFailure.RAISE), device
    )
    with pytest.raises(RuntimeError, match="larger capacity, or smaller batches"):
        strict(*_each(ids, device))
    strict(*_each(strict.index.export(0).keys, device)).sum().backward()


def test_frequent_keys_stay(device: torch.device) -> None:
    """LFU, with counts told for ids that were made distinct before."""
    table = _one(DynamicSpec(32, 2, eviction="lfu"), device)
    ids, offsets = _each(torch.arange(32), device)
    counts = torch.where(ids < 4, 100, 1)
    table(ids, offsets, counts=counts)
    for start in range(100, 200, 20):
        table(*_each(torch.arange(start, start + 20), device))
    assert (table.find(0, torch.arange(4)) >= 0).all()
    assert table.stats()["table_0"]["evicted"] == 100


def test_ttl(device: torch.device) -> None:
    table = _one(DynamicSpec(64, 2, ttl=8), device)
    table.track_evictions()
    table(*_each([1, 2, 3], device))
    for _ in range(12):
        table(*_each([1], device)).sum().backward()
    assert table.find(0, torch.tensor([1, 2, 3])).ge(0).tolist() == [True, False, False]
    assert table.stats()["table_0"]["expired"] == 2
    assert table.eviction_log is not None
    assert table.eviction_log.since(0, 0).tolist() == [2, 3]
    assert int(table.dropped_updates) == 0


def test_removals_are_logged(device: torch.device) -> None:
    specs = [DynamicSpec(32, 2), DynamicSpec(32, 2)]
    table = DynamicEmbeddingBags(specs, device=device)
    log = table.track_evictions()
    both = torch.cat([torch.arange(32), torch.arange(100, 132)]).to(device)
    table(both, torch.arange(65, device=device))
    table(both + 50, torch.arange(65, device=device))
    assert log.since(0, 0).tolist() == list(range(32))
    assert log.since(1, 0).tolist() == list(range(100, 132))
    table.erase(1, torch.tensor([150, 150, 1]))
    assert log.since(1, 0).tolist() == [*range(100, 132), 150]


def test_what_is_refused(device: torch.device) -> None:
    spec = DynamicSpec(32, 4)
    for error, message, make in (
        (TypeError, "DynamicSpec", lambda: DynamicEmbeddingBags([TableSpec(10, 4)])),
        (ValueError, "feature_tables", lambda: _one(spec, device, feature_tables=[1])),
        (ValueError, "reads whole tables", lambda: _one(spec, device, optimizer=_ENSEMBLE)),
        (ValueError, "initial_capacity", lambda: _one(_GROWING, device, optimizer=_EXTERNAL)),
        (ValueError, "meta", lambda: _one(spec, torch.device("meta"))),
        (ValueError, "twice", lambda: DynamicEmbeddingBags([_NAMED, _NAMED])),
        (ValueError, "one dim", lambda: DynamicEmbeddingBags([spec, _WIDE], pooling=NONE)),
        (ValueError, "2\\^31 buckets", lambda: _one(DynamicSpec(1 << 40, 4), device)),
        (ValueError, "eviction must be|Eviction must be", lambda: DynamicSpec(3, 4, eviction="x")),
        (ValueError, "initial_capacity", lambda: DynamicSpec(3, 4, initial_capacity=4)),
        (ValueError, "max_load", lambda: DynamicSpec(3, 4, max_load=1.5)),
    ):
        with pytest.raises(error, match=message):
            make()
    table = _one(spec, device)
    with pytest.raises(TypeError, match="float32"):
        table(torch.rand(3, device=device), torch.arange(4, device=device))
    with pytest.raises(RuntimeError, match="int32 or int64"):
        table(torch.arange(3, device=device), torch.rand(4, device=device))


_ENSEMBLE = optim.EnsembleRowwiseAdagrad(0.1)
_EXTERNAL = optim.External()
_GROWING = DynamicSpec(320, 4, initial_capacity=32)
_NAMED, _WIDE = DynamicSpec(32, 4, name="a"), DynamicSpec(32, 8)


def test_keys_made_for_one_bucket_find_places(device: torch.device) -> None:
    """The hash depends on a number of the table, which follows from its seed and name."""
    keys = torch.tensor(crowd(2_000))
    bare = HashIndex([DynamicSpec(10_000, 1, eviction=Eviction.NONE)], device)
    assert int((bare.insert(Keys.from_ids(keys.to(device))).slots >= 0).sum()) == 64, (
        "as they were made"
    )
    for name, seed in (("a", 0), ("b", 0), ("a", 1)):
        spec = DynamicSpec(10_000, 4, name=name, eviction=Eviction.NONE)
        table = _one(spec, device, seed=seed)
        table(*_each(keys, device))
        assert table.stats()[name]["refused"] == 0
    one, other, third = (
        _one(DynamicSpec(64, 4, name=name), device, seed=seed)
        for name, seed in (("a", 0), ("b", 0), ("a", 1))
    )
    assert len({table.index.hash_key(0) for table in (one, other, third)}) == 3
    same = _one(DynamicSpec(128, 8, name="a"), device, seed=0)
    assert one.index.hash_key(0) == same.index.hash_key(0)


def test_the_hash_is_by_a_seed_of_torchs_generator_or_one_that_is_given(
    device: torch.device,
) -> None:
    """First values are those of seed 0 where none is given, and of one given for both."""
    specs = [DynamicSpec(64, 4, name=name) for name in "ab"]

    def hashed(drawn: int, **options: Any) -> list[int]:
        torch.manual_seed(drawn)
        module = DynamicEmbeddingBags(specs, device=device, **options)
        return module.index.hash_keys.tolist()

    assert hashed(1) == hashed(1)
    every = [*hashed(1), *hashed(2), *(hash_key_of(0, name) for name in "ab")]
    assert len(set(every)) == 6
    assert hashed(1, seed=5) == hashed(2, seed=5) == [hash_key_of(5, name) for name in "ab"]
    given = hashed(1, seed=5, hash_seeds=[7, 8])
    assert given == [hash_key_of(7, "a"), hash_key_of(8, "b")]
    ids = torch.arange(3, device=device), torch.arange(4, device=device)
    by_seed = [
        _one(specs[0], device, **options)(*ids)
        for options in ({}, {"seed": 0}, {"hash_seeds": [9]}, {"seed": 9})
    ]
    assert torch.equal(by_seed[0], by_seed[1])
    assert torch.equal(by_seed[0], by_seed[2])
    assert not torch.equal(by_seed[0], by_seed[3])
    for wrong, said in (([1], r"one per table = 2, got 1"), ([1, -1], "hash_seeds must be >= 0")):
        with pytest.raises(ValueError, match=said):
            DynamicEmbeddingBags(specs, device=device, hash_seeds=wrong)
    scored = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        scored.append(HashTable(specs[0], device=device).index.hash_key(0))
    assert scored[0] == scored[1] != scored[2]


def test_hot_keys_stay_when_their_counts_are_full(device: torch.device) -> None:
    table = _one(DynamicSpec(32, 4, eviction=Eviction.LFU), device)
    hot = torch.full((32,), 2**62, device=device)
    for _ in range(3):
        table(*_each(list(range(32)), device), counts=hot)
    table(*_each([50], device), counts=hot[:1])
    table(*_each([51], device))
    assert set(range(1, 32)) <= set(table_entries(table, 0).keys.tolist())
    assert int(table_entries(table, 0).scores.max()) == 2**63 - 1
