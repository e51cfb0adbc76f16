"""Hash tables for the tests of the ops, of emulated kernels and of modules: keys, batches, twins.

A `Twin` is the tensors of an index and the model of `emblib.reference.hash`. Every call is made
on both, and afterwards they must agree about everything: results, tags, entries, sizes, counters.
Rows of values say whose they are, so that a row that was lost, shared or left behind is noticed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from emblib.ops.codes import HASH_ORDER, INSERT_POLICY
from emblib.reference.hash import (
    EVICTING,
    HIT,
    NEW,
    SLOTS_PER_BUCKET,
    HashModel,
    Miss,
    ReferenceHashTable,
    addresses,
    batch_of,
    fill_slots,
    mix,
)

Op = Callable[..., Any]
OPS = ("find", "touch_", "grow_", "insert_", "erase_", "expire_")

# Keys at the ends of the range and around zero; -1 is also the greatest unsigned one.
EDGE_KEYS = (*range(-4, 5), -(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1)
HASH_KEYS = (0x123456789ABCDEF, -(2**63), -77)
BATCH_SIZES = (0, 1, 31, 32, 33, 100)


def on(device: torch.device, op: Op) -> Op:
    """`op` for tensors in host memory: they travel to `device` and back, with what was changed."""
    if device.type == "cpu":
        return op

    def travel(value: Any, to: torch.device = device) -> Any:
        if isinstance(value, list):
            return [travel(tensor, to) for tensor in value]
        return value.to(to) if isinstance(value, Tensor) else value

    def call(*arguments: Any) -> Any:
        given = [travel(argument) for argument in arguments]
        result = op(*given)
        for before, after in zip(arguments, given, strict=True):
            pairs = (
                zip(before, after, strict=True) if isinstance(before, list) else [(before, after)]
            )
            for old, new in pairs:
                if isinstance(old, Tensor):
                    old.copy_(new)
        if isinstance(result, tuple):
            found = [travel(value, torch.device("cpu")) for value in result]
            return type(result)(*found) if hasattr(result, "_fields") else tuple(found)
        return result.cpu() if isinstance(result, Tensor) else result

    return call


@dataclass(frozen=True)
class Tables:
    """The tables: (buckets, most buckets, load in 1024ths) of each, and what is evicted.

    `hash_keys` are the numbers that their hashes depend on, 0 for tables beyond them. `queues` says
    whether the index has eviction queues, which the CPU keeps from call to call.
    """

    sizes: tuple[tuple[int, int, int], ...] = ((1, 3, 819), (2, 2, 1024))
    order: str = "lru"
    insert_policy: str = "wins"
    hash_keys: tuple[int, ...] = ()
    queues: bool = False

    @property
    def scored(self) -> bool:
        """Whether entries have a third word."""
        return self.order in ("lfu", "lru_lfu", "assigned")

    def model(self) -> HashModel:
        """Empty tables for the reference."""
        keys = (*self.hash_keys, *(0 for _ in self.sizes))
        tables = [
            ReferenceHashTable(*size, key) for size, key in zip(self.sizes, keys, strict=False)
        ]
        return HashModel(tables, self.order, self.insert_policy)

    def index(self, seed: int = 0) -> list[Tensor]:
        """The same for the ops; entries mean nothing yet and hold keys that may be asked for."""
        tags, entries, *rest = self.model().index()
        generator = torch.Generator().manual_seed(seed)
        keys = torch.tensor(EDGE_KEYS)
        garbage = keys[torch.randint(0, len(keys), entries.shape, generator=generator)]
        queues = torch.zeros(tags.numel() // SLOTS_PER_BUCKET, 8, dtype=torch.int64)
        return [tags, garbage, *rest, *[queues][: self.queues]]


@dataclass
class Batch:
    """Keys by segment, as the ops take them; `counts` and `batch_scores` may be None."""

    ids: Tensor
    starts: Tensor
    tables: Tensor
    counts: Tensor | None = None
    batch_scores: Tensor | None = None

    @classmethod
    def of(
        cls, *segments: tuple[int, Sequence[int]], batch_scores: Sequence[int] | None = None
    ) -> "Batch":
        """One segment for every (table, keys)."""
        lengths = torch.tensor([0, *(len(keys) for _, keys in segments)])
        return cls(
            torch.tensor([key for _, keys in segments for key in keys], dtype=torch.int64),
            lengths.cumsum(0),
            torch.tensor([table for table, _ in segments], dtype=torch.int64),
            batch_scores=None if batch_scores is None else torch.tensor(batch_scores),
        )

    @property
    def keys(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that say which keys there are."""
        return self.ids, self.starts, self.tables

    @property
    def positions(self) -> list[tuple[int, int]]:
        """(table, key) of every position."""
        return batch_of(*self.keys)

    @property
    def uses(self) -> list[int]:
        """How many uses every position stands for."""
        return [1] * self.ids.numel() if self.counts is None else self.counts.tolist()

    def scores(self, num_tables: int) -> list[int]:
        """The score by table; 0 where none is given."""
        return [0] * num_tables if self.batch_scores is None else self.batch_scores.tolist()


@dataclass
class Draws:
    """Random batches: how many keys there are, how skewed, how many segments."""

    num_tables: int
    keys: int = 150
    skew: float = 2.0
    most: int = 100  # keys of a batch
    seed: int = 0
    generator: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        self.generator.manual_seed(self.seed)
        wild = torch.randint(-(2**63), 2**63 - 1, (self.keys,), generator=self.generator)
        pool = torch.cat([torch.tensor(EDGE_KEYS), wild])
        self.pool = pool[torch.randperm(len(pool), generator=self.generator)]

    def below(self, high: int) -> int:
        """A number in [0, high)."""
        return int(torch.randint(0, high, (), generator=self.generator))

    def batch(self) -> Batch:
        """The next batch; a third of them have a size at which kernels may change their ways."""
        some = self.generator
        segments = self.below(4) if self.below(8) else 0
        edge = self.below(3) == 0
        n = BATCH_SIZES[self.below(len(BATCH_SIZES))] if edge else self.below(self.most + 1)
        n = n if segments else 0
        ranks = (torch.rand(n, generator=some) ** self.skew * len(self.pool)).long()
        cuts = torch.randint(0, n + 1, (max(0, segments - 1),), generator=some).sort().values
        starts = torch.cat([torch.zeros(1), cuts, torch.tensor([n] * min(1, segments))]).long()
        tables = torch.randint(0, self.num_tables, (segments,), generator=some)
        counts = torch.randint(1, 5, (n,), generator=some) if self.below(2) else None
        scores = torch.randint(-9, 10, (self.num_tables,), generator=some)
        return Batch(self.pool[ranks], starts, tables, counts, scores)

    def admitted(self, n: int) -> Tensor | None:
        """Who is admitted of n misses, or None for all."""
        return torch.rand(n, generator=self.generator) < 0.7 if self.below(2) else None


class Rows:
    """Two buffers of values: floats, as many a row as the table is wide, and three bytes a row."""

    def __init__(self, tables: Tables) -> None:
        self._dims = [5 + 3 * t for t in range(len(tables.sizes))]
        self._rows_of = [most * SLOTS_PER_BUCKET for _, most, _ in tables.sizes]
        layout, floats, rows = [], 0, 0
        for dim, (_, most, _) in zip(self._dims, tables.sizes, strict=True):
            layout.append([(4 * floats, 4 * dim), (3 * rows, 3)])
            floats += most * SLOTS_PER_BUCKET * dim
            rows += most * SLOTS_PER_BUCKET
        self.layout = torch.tensor(layout).view(-1, 2, 2)
        self.row_buffers = [torch.full((floats,), -1.0), torch.zeros(3 * rows, dtype=torch.uint8)]
        self._written = 0
        self._numbers: list[dict[int, int]] = [{} for _ in tables.sizes]  # what a key's row says

    def _views(self, t: int) -> tuple[Tensor, Tensor]:
        """The rows of a table in both row_buffers."""
        starts = [base // plane.element_size() for (base, _), plane in self._both(t)]
        values, marks = (
            plane[start:] for start, plane in zip(starts, self.row_buffers, strict=True)
        )
        rows, dim = self._rows_of[t], self._dims[t]
        return values[: rows * dim].view(rows, dim), marks[: rows * 3].view(rows, 3)

    def _both(self, t: int) -> list[tuple[list[int], Tensor]]:
        return list(zip(self.layout[t].tolist(), self.row_buffers, strict=True))

    def _content(self, t: int, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Rows that are unlike any with another number."""
        number = torch.tensor(numbers, dtype=torch.int64).view(-1, 1)
        marks = torch.cat([number % 251, number // 251 % 251, number * 0 + 7], dim=1)
        return (number + torch.arange(self._dims[t])).float(), marks.byte()

    def write(self, t: int, slots: list[int], keys: list[int]) -> None:
        """New rows for keys, each unlike every other."""
        numbers = list(range(self._written + 1, self._written + 1 + len(keys)))
        self._written += len(keys)
        self._numbers[t].update(zip(keys, numbers, strict=True))
        for view, content in zip(self._views(t), self._content(t, numbers), strict=True):
            view[slots] = content

    def check(self, t: int, slots: list[int], keys: list[int]) -> None:
        """That rows are the ones that were written for the keys."""
        numbers = [self._numbers[t][key] for key in keys]
        for view, content in zip(self._views(t), self._content(t, numbers), strict=True):
            assert torch.equal(view[slots], content), t


def _flat(misses: list[list[Miss]]) -> list[Miss]:
    return [miss for missing in misses for miss in missing]


class Twin:
    """The tensors of an index and the model, and whether they agree."""

    def __init__(self, tables: Tables, ops: dict[str, Op], seed: int = 0) -> None:
        self.tables, self.ops = tables, ops
        self.index, self.model = tables.index(seed), tables.model()
        self.rows = Rows(tables)

    def compare(self) -> None:
        """Everything that means something, bit by bit, and that every key has its own row."""
        tags, entries, *rest = self.model.index()
        assert torch.equal(self.index[0], tags)
        used = tags != 0
        assert torch.equal(self.index[1][used], entries[used])
        for mine, theirs in zip(self.index[2:5], rest, strict=True):
            assert mine.tolist() == theirs.tolist()
        self._check_queues()
        for t, table in enumerate(self.model.tables):
            there = [(slot, e.key) for slot, e in enumerate(table.slots) if e is not None]
            assert all(slot // SLOTS_PER_BUCKET in table.addresses(key) for slot, key in there)
            self.rows.check(t, [slot for slot, _ in there], [key for _, key in there])

    def _check_queues(self) -> None:
        """That only full buckets have a queue, and its elements are distinct slots."""
        for bucket, line in enumerate(
            self.index[5].view(torch.uint8).tolist() if self.tables.queues else ()
        ):
            size, elements = (
                line[8],
                [element % SLOTS_PER_BUCKET for element in line[24 : 24 + line[8]]],
            )
            assert len(set(elements)) == size
            assert (
                size == 0
                or self.index[0][bucket * SLOTS_PER_BUCKET : (bucket + 1) * SLOTS_PER_BUCKET].all()
            )

    def find(self, batch: Batch) -> Tensor:
        """Looks keys up, which changes nothing."""
        slots = self.ops["find"](self.index, *batch.keys)
        assert slots.tolist() == self.model.find(batch.positions)
        self.compare()
        return slots

    def train(self, batch: Batch, admitted: Tensor | None = None) -> list[list[Miss]]:
        """A training step as far as the index goes; the misses say what became of them."""
        scores = batch.scores(len(self.tables.sizes))
        arguments = (batch.counts, batch.batch_scores, HASH_ORDER[self.tables.order])
        slots, *found = self.ops["touch_"](self.index, *batch.keys, *arguments)
        want = self.model.touch(batch.positions, batch.uses, scores)
        assert slots.tolist() == want
        self.compare()
        misses = self.model.misses(batch.positions, want, batch.uses)
        self._compare_misses(found, misses)
        first, groups, totals, offsets = found
        if admitted is not None:
            for miss, into in zip(_flat(misses), admitted.tolist(), strict=False):
                miss.admitted = into
        self._grow(batch, (slots, offsets, admitted), misses)
        ways = (admitted, batch.batch_scores, HASH_ORDER[self.tables.order])
        ways += (INSERT_POLICY[self.tables.insert_policy],)
        call = (self.index, batch.ids, first, totals, offsets, *ways, slots, groups)
        *placed, filled, statuses = self.ops["insert_"](*call)
        self.model.insert(misses, scores)
        self._compare_placed(placed, misses)
        assert filled.tolist() == fill_slots(slots, placed[0], groups).tolist()
        hits = torch.full_like(statuses, HIT)
        assert statuses.tolist() == fill_slots(hits, placed[1], groups).tolist()
        for t, missing in enumerate(misses):
            gone = [(miss.slot, miss.evicted.key) for miss in missing if miss.evicted is not None]
            # Rows of what gave way are still there to be read.
            self.rows.check(t, [slot for slot, _ in gone], [key for _, key in gone])
            new = [(miss.slot, miss.key) for miss in missing if miss.slot >= 0]
            self.rows.write(t, [slot for slot, _ in new], [key for _, key in new])
        self.compare()
        return misses

    def _compare_misses(self, found: Sequence[Tensor], misses: list[list[Miss]]) -> None:
        first, groups, totals, offsets = found
        flat, n = _flat(misses), first.numel()
        padding = [0] * (n - len(flat))
        want_groups = [-1] * n
        for number, miss in enumerate(flat):
            for position in miss.positions:
                want_groups[position] = number
        want_ends = torch.tensor([0, *(len(missing) for missing in misses)]).cumsum(0)
        assert first.tolist() == [miss.positions[0] for miss in flat] + padding
        assert totals.tolist() == [miss.num_uses for miss in flat] + padding
        assert offsets.tolist() == want_ends.tolist()
        assert groups.tolist() == want_groups
        assert groups.dtype == torch.int32

    def _grow(self, batch: Batch, state: tuple[Any, ...], misses: list[list[Miss]]) -> None:
        slots, offsets, admitted = state
        before = list(zip(batch.positions, slots.tolist(), strict=True))
        rows = (self.rows.row_buffers, self.rows.layout)
        self.ops["grow_"](self.index, *rows, *batch.keys, slots, offsets, admitted)
        moved = self.model.grow(misses)
        assert slots.tolist() == [moved[t].get(slot, slot) for (t, _), slot in before]
        self.compare()

    def _compare_placed(self, placed: Sequence[Tensor], misses: list[list[Miss]]) -> None:
        slots, status, evicted = placed
        flat, n = _flat(misses), slots.numel()
        left = n - len(flat)
        gone = [miss.evicted for miss in flat]
        assert slots.tolist() == [miss.slot for miss in flat] + [-1] * left
        assert status.tolist() == [miss.status for miss in flat] + [0] * left
        words = [[e.key, e.stamp, e.score] for e in gone if e is not None]
        assert evicted[status == EVICTING].tolist() == words
        assert all((miss.slot >= 0) == (miss.status in (NEW, EVICTING)) for miss in flat)

    def erase(self, batch: Batch) -> None:
        """Removes keys."""
        freed = self.ops["erase_"](self.index, *batch.keys)
        assert freed.tolist() == self.model.erase(batch.positions)
        self.compare()

    def expire(self, t: int, window: tuple[int, int], before: int) -> None:
        """Removes what was last used before `before` from a window of buckets."""
        mask = self.ops["expire_"](self.index, t, *window, before)
        freed = self.model.expire(t, window, before)
        assert mask.nonzero().flatten().tolist() == [
            slot - window[0] * SLOTS_PER_BUCKET for slot in freed
        ]
        self.compare()

    def step(self, draws: Draws) -> None:
        """A call at random, mostly training."""
        what, batch = draws.below(10), draws.batch()
        if what < 6:
            self.train(batch, draws.admitted(batch.ids.numel()))
        elif what < 8:
            self.erase(batch) if what == 7 else self.find(batch)
        else:
            t = draws.below(draws.num_tables)
            first = draws.below(self.model.tables[t].buckets + 1)
            window = (first, draws.below(self.model.tables[t].buckets - first + 1))
            self.expire(t, window, self.model.clock - draws.below(6))


def keys_in(bucket: int, buckets: int, count: int) -> list[int]:
    """The first keys from 0 on, both of whose buckets are this one."""
    found = (key for key in range(10**6) if addresses(key, buckets) == (bucket, bucket))
    return [next(found) for _ in range(count)]


def crowd(count: int, buckets: int = 1 << 12) -> list[int]:
    """Distinct keys that belong into two buckets of a table without a hash key.

    It may have any number of buckets from 8 up to `buckets`, a power of 2.
    """
    golden, first, second = 0x9E3779B97F4A7C15, 5, 7
    # The low bits of a mix choose the first bucket, bits 33 and on of its product the second.
    low = first * golden % buckets
    products = (low | second << 33 | number * buckets for number in range(count))
    assert count * buckets <= 1 << 33
    return [unmix(product * pow(golden, -1, 2**64) % 2**64) for product in products]


def unmix(mixed: int) -> int:
    """The key, as a signed number, that `mix` makes `mixed` of."""
    x = mixed ^ mixed >> 33
    x = x * pow(0xC4CEB9FE1A85EC53, -1, 2**64) % 2**64
    x ^= x >> 33
    x = x * pow(0xFF51AFD7ED558CCD, -1, 2**64) % 2**64
    x ^= x >> 33
    x = (x - 0x9E3779B97F4A7C15) % 2**64
    assert mix(x) == mixed
    return x - 2**64 * (x >= 2**63)
