"""Entries into tables of other capacities and orders: all that fit, the best where not all do."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emblib.dynamic.hash_index import HashIndex, RowBuffers
from emblib.dynamic.rows import RowLayout
from emblib.dynamic.saving import entries as of_entries
from emblib.dynamic.saving import loading
from emblib.dynamic.saving import loading as cuckoo
from emblib.dynamic.saving.entries import Entries
from emblib.dynamic.saving.loading import Loaded, TableTarget
from emblib.ops.hash import Keys
from emblib.optim import PartialRowwiseAdam
from emblib.specs import DynamicSpec, Eviction, Precision
from tests.dynamic import entry_cases
from tests.dynamic.entry_cases import assert_rows_tell_keys, assert_same, make

CPU = torch.device("cpu")
STATES = PartialRowwiseAdam(0.1).states
EVICTIONS = [Eviction.NONE, Eviction.LRU, Eviction.LFU, Eviction.LRU_LFU, Eviction.CUSTOM]


def target(
    capacity: int,
    eviction: Eviction = Eviction.LRU,
    precision: Precision | None = None,
    **more: object,
) -> TableTarget:
    """The second of two tables, so that offsets matter; the first has keys that must stay."""
    specs = [
        DynamicSpec(64, 3, eviction=eviction),
        DynamicSpec(capacity, 6, eviction=eviction, **more),  # type: ignore[arg-type]
    ]
    layout = RowLayout(specs, ["other", "items"], STATES, precision or Precision())
    index = HashIndex(specs)
    planes = layout.allocate(CPU)
    rows = RowBuffers(planes, layout.byte_layout(CPU))
    given = torch.zeros(2, dtype=torch.int64) if eviction is Eviction.CUSTOM else None
    index.insert(keys_of(torch.arange(40), 0), batch_scores=given, rows=rows)
    return TableTarget(index, 1, "items", layout.views(planes, 1), rows)


def keys_of(keys: Tensor, table: int) -> Keys:
    return Keys(keys, torch.tensor([0, keys.numel()]), torch.tensor([table]))


def scored(eviction: Eviction) -> bool:
    return eviction.order in ("lfu", "lru_lfu", "assigned")


@pytest.mark.parametrize("eviction", EVICTIONS)
@pytest.mark.parametrize(
    ("capacity", "initial"), [(512, None), (512, 32), (4096, None), (4096, 64), (100_000, 32)]
)
def test_all_fit_where_there_is_room(
    eviction: Eviction, capacity: int, initial: int | None
) -> None:
    given = make(330, scored=scored(eviction))
    there = target(capacity, eviction, initial_capacity=initial)
    assert loading.replace(there, given) == Loaded(330, 0, 0)
    assert_same(loading.export(there), given)
    assert there.index.size(0) == 40
    assert there.index.tick == 49, "the largest stamp"
    counted = there.index.stats()[1]
    assert set(counted.values()) == {0}, "loading is not a use of a table"


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_the_best_stay_where_not_all_fit(eviction: Eviction) -> None:
    given = make(1000, scored=scored(eviction))
    there = target(256, eviction)
    done = loading.replace(there, given)
    assert done == Loaded(256, 744, 0)
    kept = loading.export(there)
    assert_rows_tell_keys(kept)
    best = given.keys[of_entries.best_first(given, eviction.order)[:256]]
    assert set(kept.keys.tolist()) == set(best.tolist())


@pytest.mark.parametrize("buckets", [1, 2, 3, 5, 64, 100])
def test_a_full_table_has_a_place_for_every_entry(buckets: int) -> None:
    """Also where training would have kept some out; and all of them are where they are found."""
    count = 32 * buckets
    given = make(count, seed=buckets)
    there = target(count)
    assert loading.replace(there, given) == Loaded(count, 0, 0)
    assert_same(loading.export(there), given)
    slots = there.index.find(keys_of(given.keys, 1))
    assert torch.equal(slots.sort().values, torch.arange(count))
    of = cuckoo.buckets_of(given.keys, buckets, there.index.hash_key(1))
    assert bool((of == slots // 32).any(0).all())
    assert torch.equal(
        there.index.table_tags(1)[slots], cuckoo.tags_of(given.keys, there.index.hash_key(1))
    )
    # Training goes on: what is new displaces, what is there is found.
    some = torch.cat([given.keys[:16], entry_cases.keys(28, seed=99)[20:]])
    inserted = there.index.insert(keys_of(some, 1), rows=there.rows)
    assert torch.equal(inserted.slots[:16], slots[:16])
    assert there.index.size(1) == count


def test_only_what_no_arrangement_has_room_for_stays_out() -> None:
    """Where the number of buckets is not a power of 2, some buckets are those of few keys."""
    given = make(33 * 32, seed=33)
    there = target(33 * 32)
    done = loading.replace(there, given)
    of = cuckoo.buckets_of(given.keys, 33, there.index.hash_key(1))
    keys_of_bucket = torch.bincount(torch.cat([of[0], of[1][of[0] != of[1]]]), minlength=33)
    assert done.left_out == int((32 - keys_of_bucket).clamp(min=0).sum()) > 0


def test_rooms_with_few_holes_are_filled() -> None:
    """From nothing, and from a state in which all that is left is far from where it is wanted."""
    keys = entry_cases.keys(4096)
    slots = cuckoo.assign_slots(keys, torch.full_like(keys, -1), 128, 0)
    assert torch.equal(slots.sort().values, torch.arange(4096))
    again = cuckoo.assign_slots(keys, torch.where(slots % 32 == 5, -1, slots), 128, 0)
    assert torch.equal(again.sort().values, torch.arange(4096))


def test_more_keys_than_slots_leave_the_last_out() -> None:
    keys = entry_cases.keys(300)
    slots = cuckoo.assign_slots(keys, torch.full_like(keys, -1), 8, 0)
    taken = slots[slots >= 0]
    assert taken.numel() == taken.unique().numel() == 256


@pytest.mark.parametrize("eviction", EVICTIONS[1:])
def test_eviction_goes_on_as_before(eviction: Eviction) -> None:
    """Two tables of the same entries, one loaded from the other, evict the same keys."""
    given = torch.tensor([0, 5])
    one, other = target(32, eviction), target(32, eviction)
    assigned = given if eviction is Eviction.CUSTOM else None
    generator = torch.Generator().manual_seed(3)
    draw: Callable[[], Tensor] = lambda: torch.randint(0, 60, (20,), generator=generator)  # noqa: E731
    for _ in range(9):
        given[1] += 1
        one.index.insert(keys_of(draw(), 1), batch_scores=assigned, rows=one.rows)
    loading.replace(other, loading.export(one))
    assert other.index.tick <= one.index.tick
    other.index.set_tick(one.index.tick)
    for _ in range(9):
        given[1] += 1
        batch = keys_of(draw(), 1)
        for each in (one, other):
            each.index.insert(batch, batch_scores=assigned, rows=each.rows)
        ours, theirs = loading.export(one), loading.export(other)
        assert torch.equal(ours.sorted().keys, theirs.sorted().keys)
        assert torch.equal(ours.sorted().stamps, theirs.sorted().stamps)


def test_what_was_there_is_gone_after_replace_and_stays_after_put() -> None:
    first, second = make(100, seed=1), make(100, seed=2)
    there = target(512)
    loading.replace(there, first)
    loading.replace(there, second)
    assert_same(loading.export(there), second)
    loading.put(there, first)
    found = loading.export(there)
    assert set(found.keys.tolist()) == {*first.keys.tolist(), *second.keys.tolist()}
    assert_rows_tell_keys(found)


def test_put_overwrites_all_of_an_entry() -> None:
    there = target(512)
    loading.replace(there, make(100))
    changed = make(100)
    doubled = {name: torch.as_tensor(rows) * 2 + 1 for name, rows in changed.rows.items()}
    changed = Entries(changed.keys, changed.stamps + 7, None, doubled)
    assert loading.put(there, changed) == Loaded(100, 0, 0)
    assert_same(loading.export(there), changed)


def test_put_into_a_full_table_displaces_the_least() -> None:
    there = target(64)
    old, new = make(64, seed=1), make(64, seed=2)
    loading.replace(there, replace(old, stamps=torch.arange(1, 65)))
    fresh = new.take((~torch.isin(new.keys, old.keys)).nonzero().view(-1)[:10])
    done = loading.put(there, replace(fresh, stamps=fresh.stamps * 0 + 100))
    assert done == Loaded(10, 0, 10)
    found = loading.export(there)
    assert set(fresh.keys.tolist()) <= set(found.keys.tolist())
    gone = ~torch.isin(old.keys, found.keys)
    assert int(gone.nonzero().max()) < 40, "none of the last used"
    assert there.index.tick == 100
    assert_rows_tell_keys(found)


def test_put_of_more_than_fits_counts_what_the_table_had_before() -> None:
    """Entries of one import that take slots from each other are left out, not displaced."""
    there = target(64)
    old, new = make(300, seed=1), make(300, seed=2)
    loading.replace(there, old.take(torch.arange(40)))
    before = loading.export(there).keys
    done = loading.put(there, new)
    after = loading.export(there).keys
    new_keys = torch.isin(after, new.keys)
    others_before = ~torch.isin(before, new.keys)
    assert done.loaded == int(new_keys.sum())
    assert done.left_out == len(new) - done.loaded
    assert done.displaced == int(others_before.sum()) - int((~new_keys).sum())


def test_put_into_a_full_table_that_evicts_nothing_leaves_out() -> None:
    there = target(32, Eviction.NONE)
    loading.replace(there, make(32, seed=1))
    new = make(60, seed=2)
    fresh = new.take((new.keys.abs() > 10).nonzero().view(-1)[12:20])
    assert loading.put(there, fresh) == Loaded(0, 8, 0)


@pytest.mark.parametrize("weights", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_converted_to_the_dtypes_of_the_table(weights: torch.dtype) -> None:
    there = target(512, precision=Precision(weights=weights, states=torch.float16))
    loading.replace(there, make(100))
    found = loading.export(there)
    assert found.rows["weight"].dtype == weights
    assert_rows_tell_keys(found)


def test_entries_of_weights_alone_leave_states_at_their_first_value() -> None:
    there = target(512)._replace(initial_state=0.5)
    loading.replace(there, make(100, seed=4))
    given = make(100)
    loading.replace(there, replace(given, rows={"weight": given.rows["weight"]}))
    found = loading.export(there)
    assert_rows_tell_keys(found)
    for name in ("exp_avg", "exp_avg_sq"):
        assert set(found.rows[name][torch.arange(100)].flatten().tolist()) == {0.5}


EDGE_KEYS = st.sampled_from(entry_cases.EDGES) | st.integers(-(2**63), 2**63 - 1)
BATCHES = st.lists(
    st.tuples(
        st.sampled_from(["replace", "put", "erase"]),
        st.dictionaries(
            EDGE_KEYS, st.tuples(st.integers(0, 2**62 - 1), st.integers(-9, 9)), max_size=40
        ),
    ),
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(BATCHES, st.sampled_from([Eviction.LRU, Eviction.CUSTOM]), st.sampled_from([32, 64, 512]))
def test_any_calls_in_a_row(
    calls: list[tuple[str, dict[int, tuple[int, int]]]], eviction: Eviction, initial: int
) -> None:
    """A dict of what each key came with last."""
    there, model = target(512, eviction, initial_capacity=initial), dict[int, tuple[int, int]]()
    for call, batch in calls:
        found = torch.tensor(list(batch), dtype=torch.int64)
        if call == "erase":
            assert loading.erase(there, found) == len(model.keys() & batch.keys())
            model = {key: value for key, value in model.items() if key not in batch}
            continue
        stamps, scores = torch.tensor(list(batch.values()), dtype=torch.int64).view(-1, 2).unbind(1)
        rows = {"weight": entry_cases.row_of(found, 6)}
        entries = Entries(found, stamps, scores if scored(eviction) else None, rows)
        assert getattr(loading, call)(there, entries) == Loaded(len(batch), 0, 0)
        model = {**({} if call == "replace" else model), **batch}
        assert there.index.tick >= max([0, *(stamp for stamp, _ in batch.values())])
    out = loading.export(there)
    assert_rows_tell_keys(out)
    assert dict(zip(out.keys.tolist(), out.stamps.tolist(), strict=True)) == {
        key: stamp for key, (stamp, _) in model.items()
    }
    if out.scores is not None:
        assert out.scores.tolist() == [model[key][1] for key in out.keys.tolist()]


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    there = target(512, Eviction.LFU)
    given = make(50, scored=True)
    loading.replace(there, given)
    rows = dict(given.rows)
    twice = torch.cat([given.keys[:49], given.keys[:1]])
    bad = {
        "needs a score": replace(given, scores=None),
        "distinct": replace(given, keys=twice),
        "stamps are ticks": replace(given, stamps=given.stamps - 50),
        r"in \[0, 2\^62\)": replace(given, stamps=given.stamps + 2**62),
        "must have the rows": replace(given, rows={**rows, "sum": rows["weight"]}),
        "rows of shape": replace(given, rows={**rows, "exp_avg_sq": rows["exp_avg"]}),
    }
    for message, entries in bad.items():
        for change in (loading.replace, loading.put):
            with pytest.raises(ValueError, match=message):
                change(there, entries)
    assert_same(loading.export(there), given)


def test_erase_and_absent() -> None:
    there = target(512)
    given = make(100)
    loading.replace(there, given)
    some = torch.cat([given.keys[:5], torch.tensor([123456])])
    assert loading.erase(there, some) == 5
    assert torch.equal(loading.absent_keys(there, given.keys), given.keys[:5])
