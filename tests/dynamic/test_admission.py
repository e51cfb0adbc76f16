"""Admission: exact counts and sketches against counting in Python, on any number of threads."""

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from emblib.dynamic.admission import Admission, MissingKeys, missing_keys_of
from emblib.dynamic.keys import hash_key_of
from emblib.dynamic.module import DynamicEmbeddingBags
from emblib.ops.hash import Keys, Misses, hash_count_
from emblib.ops.hash import sketch_count_ as native_sketch_count_
from emblib.reference.hash import sketch_count_
from emblib.specs import CountMinSketch, DynamicSpec, ExactCounter, FrequencyAdmission
from tests.hash_cases import Tables, unmix

EDGES = [0, -1, -4, 4, -(2**63), 2**63 - 1]
BATCH = list[tuple[int, int]]  # (table, key) of each position, table after table


def spec(counter: ExactCounter | CountMinSketch | None, threshold: int = 3) -> DynamicSpec:
    admission = None if counter is None else FrequencyAdmission(threshold, counter)
    return DynamicSpec(1024, 4, admission=admission)


def misses_of(
    batch: BATCH, num_tables: int, device: torch.device, each: int = 1
) -> tuple[Keys, Misses]:
    """A batch all of whose keys are missing, as `emblib.ops.hash.misses` describes it."""
    ids = torch.tensor([key for _, key in batch], dtype=torch.int64)
    totals = Counter(batch)
    numbers = {miss: n for n, miss in enumerate(dict.fromkeys(batch))}
    pad = [0] * (len(batch) - len(numbers))
    ends = [sum(table < t for table, _ in numbers) for t in range(num_tables + 1)]
    misses = Misses(
        first=torch.tensor([batch.index(miss) for miss in numbers] + pad, dtype=torch.int64),
        groups=torch.tensor([numbers[miss] for miss in batch], dtype=torch.int32),
        counts=torch.tensor([each * totals[miss] for miss in numbers] + pad, dtype=torch.int64),
        offsets=torch.tensor(ends),
    )
    sizes = torch.tensor([0, *(sum(table == t for table, _ in batch) for t in range(num_tables))])
    keys = Keys(ids, sizes.cumsum(0), torch.arange(num_tables))
    return (
        Keys(*(part.to(device) for part in keys)),
        Misses(*(part.to(device) for part in misses)),
    )


def admitted_of(
    admission: Admission, batch: BATCH, device: torch.device, each: int = 1
) -> dict[tuple[int, int], bool]:
    """What is said of every distinct miss."""
    keys, misses = misses_of(batch, len(admission.specs), device, each)
    admitted = admission.admit(keys, misses)
    distinct = list(dict.fromkeys(batch))
    if admitted is None:
        return dict.fromkeys(distinct, True)
    return dict(zip(distinct, admitted.tolist(), strict=False))


def random_batches(
    seed: int, tables: Sequence[int], keys: int, count: int, size: int
) -> Iterator[BATCH]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        batch = []
        for table in tables:
            drawn = torch.randint(keys, (size,), generator=generator).tolist()
            batch += [(table, EDGES[k] if k < len(EDGES) else k * 7919) for k in drawn]
        yield batch


def test_without_admission_nothing_is_asked(device: torch.device) -> None:
    admission = Admission([spec(None), spec(None)], device)
    keys, misses = misses_of([(0, 5), (1, 5)], 2, device)
    assert admission.admit(keys, misses) is None


@pytest.mark.parametrize("counter", [ExactCounter(4096), CountMinSketch(1 << 16)], ids=type)
def test_keys_enter_at_the_threshold(
    counter: ExactCounter | CountMinSketch, device: torch.device
) -> None:
    """Tables count apart from each other, and one without admission takes every key at once."""
    admission = Admission([spec(counter, 3), spec(None), spec(counter, 5)], device)
    seen: Counter[tuple[int, int]] = Counter()
    thresholds = {0: 3, 1: 0, 2: 5}
    decisions = set()
    for batch in random_batches(1, (0, 1, 2), 60, 12, 25):
        seen.update(batch)
        want = {miss: seen[miss] >= thresholds[miss[0]] for miss in batch}
        assert admitted_of(admission, batch, device) == want
        decisions |= {(table, ok) for (table, _), ok in want.items()}
        # What entered is no longer missing; an exact counter has forgotten it.
        if isinstance(counter, ExactCounter):
            for miss in [miss for miss, ok in want.items() if ok]:
                del seen[miss]
    assert decisions == {(0, True), (0, False), (1, True), (2, True), (2, False)}


def test_duplicates_of_a_batch_count_each(device: torch.device) -> None:
    admission = Admission([spec(ExactCounter(64), 3)], device)
    assert admitted_of(admission, [(0, 7), (0, 8), (0, 7), (0, 7)], device) == {
        (0, 7): True,
        (0, 8): False,
    }


def test_a_full_counter_loads_whole(device: torch.device) -> None:
    specs = [spec(ExactCounter(1024), 10)]
    admission, other = Admission(specs, device), Admission(specs, device)
    for start in range(0, 2048, 128):
        admitted_of(admission, [(0, key) for key in range(start, start + 128)], device)
    saved = admission.state_dict()
    assert saved["counter.0.keys"].numel() == 1024
    other.load_state_dict(saved)
    assert all(torch.equal(other.state_dict()[name], value) for name, value in saved.items())


def test_empty_batches_are_nothing(device: torch.device) -> None:
    admission = Admission([spec(ExactCounter(64)), spec(CountMinSketch(64))], device)
    keys, misses = misses_of([], 2, device)
    admitted = admission.admit(keys, misses)
    assert admitted is not None
    assert admitted.shape == (0,)


def test_keys_missing_longest_ago_give_way(device: torch.device) -> None:
    """In a counter of one bucket, 12 new keys leave those that were missing last."""
    admission = Admission([spec(ExactCounter(32), 10)], device)
    admitted_of(admission, [(0, key) for key in range(20)] * 2, device)
    admitted_of(admission, [(0, key) for key in range(100, 112)], device)
    admitted_of(admission, [(0, key) for key in range(200, 212)], device)
    keys, counts = admission.counts(0)
    held = dict(zip(keys.tolist(), counts.tolist(), strict=True))
    kept = {**dict.fromkeys(range(12, 20), 2), **dict.fromkeys(range(100, 112), 1)}
    assert held == {**kept, **dict.fromkeys(range(200, 212), 1)}


def test_keys_that_never_return_do_not_fill_a_counter(device: torch.device) -> None:
    """A key is admitted at its third use after any number of keys that have two, or one."""
    admission = Admission([spec(ExactCounter(1024))], device)
    generator = torch.Generator().manual_seed(0)
    often: list[torch.Tensor] = []
    for step in range(120):
        new = torch.randint(-(2**63), 2**63 - 1, (90,), generator=generator)
        often.append(new[:10])
        again = often[-4:-8:-3]  # three and six steps ago
        twice = new[10:20].repeat(2)
        keys = torch.cat([new[:10], *again, twice, new[20:]]).tolist()
        admitted = admitted_of(admission, [(0, key) for key in keys], device)
        if step >= 6:
            assert [key for (_, key), ok in admitted.items() if ok] == often[-7].tolist()


@pytest.mark.parametrize("queues", [False, True])
def test_exact_counts_are_those_of_the_reference(*, queues: bool) -> None:
    """Full and growing tables, keys of no table, counts that saturate."""
    tables = Tables(((1, 1, 1024), (2, 3, 1024)), "lru", hash_keys=(5, -7), queues=queues)
    model = tables.model()
    index = [*model.index(has_scores=True), *tables.index()[5:]]
    generator = torch.Generator().manual_seed(3)
    outcomes = Counter[str]()
    for step in range(40):
        rows = torch.randperm(140, generator=generator)[: 3 * step + 5]
        numbers = torch.randint(-1, 2, rows.shape, generator=generator).sort().values
        uses = torch.randint(0, 4, rows.shape, generator=generator)
        uses[::7] = 2**62
        keys = torch.where(rows < 6, torch.tensor(EDGES)[rows.clamp(max=5)], rows * 7919)
        before = [tensor.clone() for tensor in index]
        results = hash_count_(index, keys, uses, numbers)
        counted = [n for n, number in enumerate(numbers.tolist()) if number >= 0]
        batch = [(int(numbers[n]), int(keys[n])) for n in counted]
        want = torch.zeros_like(keys)
        grown = model.tables[1].buckets
        want[counted] = torch.tensor(model.count(batch, uses[counted].tolist()), dtype=torch.int64)
        if model.tables[1].buckets > grown:
            assert results == []
            assert all(map(torch.equal, before, index))
            index = [*model.index(has_scores=True), *tables.index()[5:]]
            outcomes["declined"] += 1
            continue
        assert torch.equal(results[0], want)
        tags, entries, *rest = model.index(has_scores=True)
        assert torch.equal(index[0], tags)
        assert torch.equal(index[1][tags != 0], entries[tags != 0])
        assert all(map(torch.equal, index[2:5], rest))
        outcomes["saturated"] += int((want == 2**63 - 1).sum())
    outcomes.update(model.tables[0].counters)
    assert all(outcomes[name] for name in ("declined", "saturated", "refused", "evicted"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tables": torch.tensor([0, 2])}, "tables must be below 2, got 2"),
        ({"counts": torch.tensor([1])}, "counts must be a contiguous vector of one number per key"),
        ({"keys": torch.tensor([1, 2], dtype=torch.int32)}, "keys must be int64"),
        ({"has_scores": False}, r"entries must have scores, \[S, 3\]"),
    ],
)
def test_wrong_arguments_of_exact_counts_are_refused(
    wrong: dict[str, Tensor | bool], message: str
) -> None:
    has_scores = wrong.pop("has_scores", True)
    index = Tables(order="lru").model().index(has_scores=bool(has_scores))
    before = [tensor.clone() for tensor in index]
    ones = torch.ones(2, dtype=torch.int64)
    arguments = {"keys": torch.tensor([4, 5]), "counts": ones, "tables": ones, **wrong}
    with pytest.raises(RuntimeError, match=message):
        hash_count_(index, *arguments.values())
    assert all(map(torch.equal, before, index))


def test_a_full_counter_decides_by_the_batch_alone(device: torch.device) -> None:
    """Keys that find no place among those of their own batch count from 0, and may still enter."""
    admission = Admission([spec(ExactCounter(32), 2)], device)
    batch = [(0, key) for key in range(40)] + [(0, 39)]
    admitted = admitted_of(admission, batch, device)
    assert [key for (_, key), ok in admitted.items() if ok] == [39]


def test_counts_come_and_go(device: torch.device) -> None:
    """What is exported may be loaded elsewhere and goes on from there."""
    specs = [spec(None), spec(ExactCounter(128), 5)]
    first, second = Admission(specs, device), Admission(specs, device)
    admitted_of(first, [(1, key) for key in (*EDGES, *EDGES, 9, 9, 9)], device)
    second.set_counts(1, *first.counts(1))
    assert admitted_of(second, [(1, 9), (1, -1), (1, 9)], device) == {(1, 9): True, (1, -1): False}
    with pytest.raises(ValueError, match="table 0 has no exact counter"):
        first.counts(0)
    first.clear()
    assert first.counts(1)[0].numel() == 0


def test_only_the_largest_counts_are_taken_in(device: torch.device) -> None:
    admission = Admission([spec(ExactCounter(32))], device)
    admission.set_counts(0, torch.arange(100), torch.arange(100) + 1)
    assert sorted(admission.counts(0)[0].tolist()) == list(range(68, 100))


def test_state_goes_with_the_module(device: torch.device) -> None:
    specs = [spec(ExactCounter(64)), spec(CountMinSketch(256))]
    first, second = Admission(specs, device), Admission(specs, device)
    batch = [(t, key) for t in (0, 1) for key in (*EDGES, *EDGES)]
    admitted_of(first, batch, device)
    second.load_state_dict(first.state_dict())
    assert set(admitted_of(second, batch, device).values()) == {True}


@pytest.mark.parametrize(("threshold", "each"), [(4, 1), (400, 100)], ids=["uint8", "int32"])
def test_sketches_are_count_min(threshold: int, each: int, device: torch.device) -> None:
    """Narrow enough to err, in two tables of different shapes."""
    shapes = [(53, 3), (31, 4)]
    hash_keys = [5, -(2**63)]
    specs = [spec(CountMinSketch(*shape), threshold) for shape in shapes]
    admission = Admission(specs, device, hash_keys)
    layout = torch.tensor([[0, 53, 3, threshold, 5], [159, 31, 4, threshold, -(2**63)]])
    counters = torch.zeros(159 + 124, dtype=torch.int64)
    seen: Counter[tuple[int, int]] = Counter()
    too_early = 0
    for batch in random_batches(2, (0, 1), 200, 14, 120):
        uses = Counter(batch * each)
        seen.update(uses)
        tables, keys = torch.tensor(list(uses)).unbind(1)
        counts = torch.tensor(list(uses.values()))
        counts = sketch_count_(counters, layout, keys, counts, tables)
        got = admitted_of(admission, batch, device, each)
        assert got == dict(zip(uses, (counts >= threshold).tolist(), strict=True))
        assert all(got[miss] for miss in batch if seen[miss] >= threshold)  # never too late
        too_early += sum(got[miss] and seen[miss] < threshold for miss in got)
    assert too_early > 0
    sketches = admission.sketches
    assert sketches is not None
    assert sketches.counters[:-1].tolist() == counters.tolist()


@pytest.mark.parametrize(
    "row", [(1, 4, 2, 3, 5), (0, 0, 1, 3, 5), (-1, 4, 1, 3, 5), (0, 4, -1, 3, 5), (9, 1, 1, 3, 5)]
)
def test_a_sketch_beyond_the_counters_is_refused(row: tuple[int, ...]) -> None:
    counters, keys = torch.zeros(8, dtype=torch.uint8), torch.tensor([7])
    with pytest.raises(RuntimeError, match="layout must place the sketch of table 0 inside"):
        native_sketch_count_(counters, torch.tensor([row]), keys, keys, keys * 0)
    assert not counters.any()


def test_a_key_of_no_table_is_refused() -> None:
    counters, keys = torch.zeros(8, dtype=torch.uint8), torch.tensor([7])
    with pytest.raises(RuntimeError, match=r"tables must hold rows of layout, in \[0, 1\), got 1"):
        native_sketch_count_(counters, torch.tensor([(0, 4, 2, 3, 5)]), keys, keys, keys // 7)
    assert not counters.any()


def sharing_counters() -> list[int]:
    """Return 2,000 keys that share all counters of a `CountMinSketch(1 << 16)` with hash key 0."""
    mixed = [1 << 33 | low << 31 | t for t in range(500) for low in range(4)]
    return [unmix(x) for x in mixed]


def test_keys_made_to_share_counters_are_told_apart(device: torch.device) -> None:
    """Each is seen once; where the hash key is known they count as one key."""
    specs = [spec(CountMinSketch(1 << 16), 10)]
    hash_keys = [hash_key_of(12345, "a")]
    for admission, least, most in (
        (Admission(specs, device), 1_000, 2_000),
        (Admission(specs, device, hash_keys), 0, 0),
    ):
        admitted = 0
        for start in range(0, 2_000, 50):
            batch = [(0, key) for key in sharing_counters()[start : start + 50]]
            admitted += sum(admitted_of(admission, batch, device).values())
        assert least <= admitted <= most


def test_sketches_keep_their_hash_keys(device: torch.device) -> None:
    """They are saved with the counters; those of earlier versions were hashed with 0."""
    specs = [spec(None), spec(CountMinSketch(256)), spec(CountMinSketch(64))]
    first = Admission(specs, device, [1, 2, 3])
    batch = [(t, key) for t in (1, 2) for key in (*EDGES, *EDGES)]
    admitted_of(first, batch, device)
    state = first.state_dict()
    assert state["sketches.hash_keys"].tolist() == [0, 2, 3]
    for load in (lambda a: a.load_state_dict(state), lambda a: a.restore(first.snapshot())):
        second = Admission(specs, device, [4, 5, 6])
        load(second)
        assert torch.equal(second.sketches.hash_keys, first.sketches.hash_keys)
        assert set(admitted_of(second, batch, device).values()) == {True}
    before = Admission(specs, device)
    admitted_of(before, batch, device)
    old = dict(before.state_dict())
    del old["sketches.hash_keys"]
    second = Admission(specs, device, [4, 5, 6])
    second.load_state_dict(old)
    assert second.state_dict()["sketches.hash_keys"].tolist() == [0, 0, 0]
    assert set(admitted_of(second, batch, device).values()) == {True}
    with pytest.raises(RuntimeError, match=r"sketches.hash_keys: size mismatch"):
        second.load_state_dict({**state, "sketches.hash_keys": torch.zeros(2)})


def test_counters_are_halved_once_in_a_while(device: torch.device) -> None:
    period = 7
    admission = Admission(
        [spec(CountMinSketch(50, 2, period), 200), spec(CountMinSketch(20, 2), 200)], device
    )
    sketches = admission.sketches
    assert sketches is not None
    sketches.counters.fill_(101)
    empty = misses_of([], 2, device)
    for turn in range(period):
        admission.admit(*empty)
        halved = (sketches.counters[:100] == 50).sum()
        assert int(halved) == 100 * (turn + 1) // period
    assert (sketches.counters[100:140] == 101).all()
    for _ in range(period):
        admission.admit(*empty)
    assert (sketches.counters[:100] == 25).all()


def test_counters_are_halved_no_more_often_than_asked(device: torch.device) -> None:
    admission = Admission([spec(CountMinSketch(2, 2, 12), 200)], device)
    sketches = admission.sketches
    assert sketches is not None
    sketches.counters.fill_(101)
    empty = misses_of([], 1, device)
    for turn in range(12):  # with fewer counters than batches, most batches halve none
        admission.admit(*empty)
        assert int((sketches.counters[:4] == 50).sum()) == (turn + 1) // 3


def test_batches_without_misses_halve_counters(device: torch.device) -> None:
    tables = DynamicEmbeddingBags([spec(CountMinSketch(2, 1, 2), 1)], device=device)
    ids, offsets = torch.tensor([7], device=device), torch.tensor([0, 1], device=device)
    tables(ids, offsets)
    sketches = tables.admission.sketches
    sketches.counters.fill_(101)
    for _ in range(2):
        tables(ids, offsets)
    assert sketches.batches.tolist() == [3]
    assert sketches.counters[:2].tolist() == [50, 50]


@pytest.mark.parametrize("counter", [ExactCounter(256), CountMinSketch(97, 3, 5)], ids=type)
def test_threads_do_not_matter(
    counter: ExactCounter | CountMinSketch, thread_counts: list[int], device: torch.device
) -> None:
    def run(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        admission = Admission([spec(counter)], device)
        decisions = []
        for batch in batches:
            admitted = admission.admit(*batch)
            assert admitted is not None
            decisions.append(admitted)
        return [*decisions, *admission.state_dict().values()]

    batches = [misses_of(batch, 1, device) for batch in random_batches(3, (0,), 3000, 4, 2000)]
    want = run(1)
    for threads in thread_counts:
        assert all(torch.equal(a, b) for a, b in zip(want, run(threads), strict=True))


def test_sketches_are_checked() -> None:
    with pytest.raises(ValueError, match="width of CountMinSketch must be below"):
        CountMinSketch(2**31)
    with pytest.raises(ValueError, match="halve_every must be >= 1, got 0"):
        CountMinSketch(16, halve_every=0)


@pytest.mark.parametrize("counter", [ExactCounter(128), CountMinSketch(97, 3)], ids=type)
def test_entries_without_a_table_are_nothing(
    counter: ExactCounter | CountMinSketch, device: torch.device
) -> None:
    """CUDA has as many entries as the batch has positions; the CPU only those of misses."""
    specs = [spec(None), spec(counter), spec(counter, 2)]
    short, long = Admission(specs, device), Admission(specs, device)
    for batch in random_batches(4, (0, 1, 2), 40, 6, 12):
        keys, misses = misses_of(batch, 3, device)
        count = len(set(batch))
        missing = missing_keys_of(keys.ids, misses)
        few = MissingKeys(*(part[:count] for part in missing))
        pad = 50
        many = MissingKeys(
            nn.functional.pad(few.keys, (0, pad), value=7),
            nn.functional.pad(few.counts, (0, pad), value=9),
            nn.functional.pad(few.tables, (0, pad), value=3),
        )
        assert torch.equal(short.decide(few), long.decide(many)[:count])
    for table in (1, 2):
        if isinstance(counter, ExactCounter):
            held = [
                dict(zip(*(part.tolist() for part in a.counts(table)), strict=True))
                for a in (short, long)
            ]
            assert held[0] == held[1] != {}
    if short.sketches is not None and long.sketches is not None:
        assert torch.equal(short.sketches.counters, long.sketches.counters)
