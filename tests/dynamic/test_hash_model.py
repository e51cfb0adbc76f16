"""The index of dynamic tables against the model of the reference, called in any order."""

import copy
import pickle

import hypothesis.strategies as st
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import Tensor

from emblib.dynamic.hash_index import HashIndex, RowBuffers
from emblib.ops.hash import Keys, Misses
from emblib.reference.hash import SLOTS_PER_BUCKET, HashModel, ReferenceHashTable
from emblib.specs import DynamicSpec, Eviction, InsertPolicy
from tests.hash_cases import EDGE_KEYS, HASH_KEYS, Batch

TABLES = 2
POOL = 300
WILD = torch.randint(-(2**63), 2**63 - 1, (POOL,), generator=torch.Generator().manual_seed(1))
KEYS = torch.cat([torch.tensor(EDGE_KEYS), WILD])

tables = st.integers(0, TABLES - 1)
sizes = st.tuples(st.integers(1, 4), st.integers(0, 3)).map(lambda size: (size[0], sum(size)))


def _segment(table: int, n: int, keys: int, seed: int) -> tuple[int, list[int]]:
    drawn = torch.randint(0, keys, (n,), generator=torch.Generator().manual_seed(seed))
    return table, KEYS[drawn].tolist()


# Batches of sizes at which kernels may change their ways, one larger than any table, some repeats.
segments = st.one_of(
    st.tuples(tables, st.lists(st.sampled_from(EDGE_KEYS), max_size=6)),
    st.builds(
        _segment,
        tables,
        st.sampled_from([0, 1, 31, 32, 33, 250]),
        st.sampled_from([len(EDGE_KEYS), 80, len(KEYS)]),
        st.integers(0, 1000),
    ),
)
batches = st.lists(segments, max_size=4).map(lambda given: Batch.of(*given))


class IndexMachine(RuleBasedStateMachine):
    """An index whose rows are the keys they belong to, and the model of it."""

    @initialize(
        sizes=st.lists(sizes, min_size=TABLES, max_size=TABLES),
        eviction=st.sampled_from(list(Eviction)),
        insert_policy=st.sampled_from(list(InsertPolicy)),
        load=st.sampled_from([0.3, 0.8, 1.0]),
    )
    def make(
        self,
        sizes: list[tuple[int, int]],
        eviction: Eviction,
        insert_policy: InsertPolicy,
        load: float,
    ) -> None:
        self.specs = [
            DynamicSpec(
                most * SLOTS_PER_BUCKET,
                8,
                initial_capacity=buckets * SLOTS_PER_BUCKET,
                max_load=load,
                eviction=eviction,
                insert_policy=insert_policy,
            )
            for buckets, most in sizes
        ]
        self._start(HashIndex(self.specs, hash_keys=HASH_KEYS[:TABLES]))

    def _start(self, index: HashIndex) -> None:
        """An empty index and its model."""
        self.index, rows = index, sum(spec.rows for spec in self.specs)
        self.rows = RowBuffers([torch.zeros(rows, dtype=torch.int64)], self._layout())
        self._empty_model()

    def _empty_model(self) -> None:
        each = [
            ReferenceHashTable(x.buckets, x.max_buckets, x.max_load_1024ths, key)
            for x, key in zip(self.specs, HASH_KEYS, strict=False)
        ]
        self.model = HashModel(each, self.index.order, self.index.insert_policy)

    def _layout(self) -> Tensor:
        return torch.tensor([[[8 * 32 * int(self.index.tables[t, 0]), 8]] for t in range(TABLES)])

    @property
    def _scored(self) -> bool:
        return self.index.entries.shape[1] == 3

    @rule(batch=batches)
    def find(self, batch: Batch) -> None:
        version = self.index.versions.current
        assert self.index.find(Keys(*batch.keys)).tolist() == self.model.find(batch.positions)
        assert self.index.versions.current == version

    @rule(
        batch=batches,
        scores=st.tuples(st.integers(-3, 3), st.integers(-3, 3)),
        repeats=st.sampled_from([None, 1, 7]),
        keeps=st.sampled_from([None, 2, 3]),
    )
    def insert(
        self, batch: Batch, scores: tuple[int, int], repeats: int | None, keeps: int | None
    ) -> None:
        """Some of the missing keys are admitted; every use may stand for several."""
        n = batch.ids.numel()
        batch.counts = None if repeats is None else torch.arange(n) % repeats + 1
        chosen = torch.arange(n) % (keeps or 1) == 0

        def admit(keys: Keys, misses: Misses) -> Tensor | None:
            return None if keeps is None else chosen

        given = torch.tensor(scores)
        found = self.index.insert(
            Keys(*batch.keys), batch.counts, batch_scores=given, admit=admit, rows=self.rows
        )
        slots = self.model.touch(batch.positions, batch.uses, scores)
        misses = self.model.misses(batch.positions, slots, batch.uses)
        flat = [miss for missing in misses for miss in missing]
        for miss, into in zip(flat, chosen.tolist(), strict=False):
            miss.admitted = into
        self.model.grow(misses)
        self.model.insert(misses, scores)
        for miss in flat:
            for position in miss.positions:
                t = batch.positions[position][0]
                if miss.slot >= 0:
                    self.rows.buffers[0][32 * int(self.index.tables[t, 0]) + miss.slot] = miss.key
        assert found.slots.tolist() == self.model.find(batch.positions)
        if found.result is not None:
            assert found.result.status.tolist()[: len(flat)] == [miss.status for miss in flat]

    @rule(
        step=st.integers(1, 5),
        new=st.lists(st.sampled_from(EDGE_KEYS), max_size=3),
        scores=st.tuples(st.integers(-3, 3), st.integers(-3, 3)),
        repeats=st.sampled_from([None, 7]),
    )
    def insert_again(
        self, step: int, new: list[int], scores: tuple[int, int], repeats: int | None
    ) -> None:
        """Many keys that are there, twice, and a few others."""
        there = [[e.key for e in table.slots if e is not None] for table in self.model.tables]
        segments = [(t, keys[::step]) for t, keys in enumerate(there)]
        self.insert(Batch.of(*segments, (0, new), *segments), scores, repeats, None)

    @rule(batch=batches)
    def erase(self, batch: Batch) -> None:
        freed = self.index.erase(Keys(*batch.keys))
        assert freed.tolist() == self.model.erase(batch.positions)

    @rule(table=tables, first=st.integers(0, 6), buckets=st.integers(0, 7), age=st.integers(0, 4))
    def expire(self, table: int, first: int, buckets: int, age: int) -> None:
        first = min(first, self.specs[table].max_buckets)
        window = (first, min(buckets, self.specs[table].max_buckets - first))
        slots = [e for e in self.model.tables[table].slots]
        before = self.model.clock - age
        gone = self.index.expire(table, before, *window)
        freed = self.model.expire(table, window, before)
        assert gone.tolist() == [slots[slot].key for slot in freed]

    @rule(table=tables, keys=st.integers(0, 300))
    def reserve(self, table: int, keys: int) -> None:
        self.index.reserve(table, keys, self.rows)
        own = self.model.tables[table]
        own.grow(max(keys, own.size))

    @rule(table=tables, age=st.integers(0, 4))
    def export(self, table: int, age: int) -> None:
        since = self.model.clock - age
        found = self.index.export(table, since)
        slots = enumerate(self.model.tables[table].slots)
        there = [(slot, e) for slot, e in slots if e is not None and e.stamp >= since]
        assert found.slots.tolist() == [slot for slot, _ in there]
        assert found.keys.tolist() == [e.key for _, e in there]
        assert found.stamps.tolist() == [e.stamp for _, e in there]
        assert (found.scores is not None) == self._scored
        if found.scores is not None:
            assert found.scores.tolist() == [e.score for _, e in there]

    @rule(how=st.sampled_from(["deepcopy", "pickle", "restore"]))
    def move_house(self, how: str) -> None:
        """Another index of the same: every slot is what it was."""
        if how == "deepcopy":
            self.index = copy.deepcopy(self.index)
        elif how == "pickle":
            self.index = pickle.loads(pickle.dumps(self.index))
        else:
            other = HashIndex(self.specs)
            other.restore(self.index.snapshot())
            self.index = other

    @rule()
    def load(self) -> None:
        """What is exported and inserted again, into tables as they were made, with its stamps."""
        exports = [self.index.export(t) for t in range(TABLES)]
        tick = self.index.tick
        self._start(HashIndex(self.specs, hash_keys=HASH_KEYS[:TABLES]))
        self.insert(
            Batch.of(*((t, found.keys.tolist()) for t, found in enumerate(exports))),
            (0, 0),
            None,
            None,
        )
        for t, found in enumerate(exports):
            slots = self.index.find(Keys(*Batch.of((t, found.keys.tolist())).keys))
            there = slots >= 0
            scores = None if found.scores is None else found.scores[there]
            self.index.set_entries(t, slots[there], found.stamps[there], scores)
            for n, slot in enumerate(slots.tolist()):
                if slot >= 0:
                    entry = self.model.tables[t].slots[slot]
                    entry.stamp = int(found.stamps[n])
                    entry.score = 0 if found.scores is None else int(found.scores[n])
        self.index.set_tick(tick)
        self.model.clock = tick

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self._empty_model()

    @invariant()
    def same(self) -> None:
        """Everything that means something, bit by bit; rows are the keys they belong to."""
        if not hasattr(self, "model"):
            return
        tags, entries, *rest = self.model.index()
        mine = self.index.tensors()[:5]  # without the eviction queues
        used = tags != 0
        assert torch.equal(mine[0], tags)
        assert torch.equal(mine[1][used], entries[used])
        assert all(torch.equal(a, b) for a, b in zip(mine[2:], rest, strict=True))
        assert torch.equal(self.rows.buffers[0][used], entries[used][:, 0])
        assert [self.index.size(t) for t in range(TABLES)] == [x.size for x in self.model.tables]


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
