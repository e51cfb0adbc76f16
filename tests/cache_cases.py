"""Small caches for the tests of the ops and of the emulated kernels: tables, traces, comparison."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from emblib.ops.codes import CACHE_POLICY
from emblib.reference.cache import COUNTERS, WAYS, CacheMemory, CacheModel, CachePlan

Op = Callable[..., Any]
Groups = tuple[Tensor, Tensor, Tensor, Tensor]  # rows, segments, lookups, count

UNCACHED = 7  # rows of the first table, which is not cached
HYPER = torch.tensor([0.1, 3.0, 0.0, 0.0, -1.0], dtype=torch.float64)


def table_rows(sizes: list[tuple[int, int]]) -> Tensor:
    """`tables` for cached tables of (rows, dim), by turns in host and disk tier."""
    stride = -(-max(dim for _, dim in sizes) // 4) * 4
    lines, row_base, used = [(0, 0, UNCACHED, 5, 0, 0, 0, 0)], UNCACHED, [[0, 0], [0, 0]]
    for t, (rows, dim) in enumerate(sizes):
        start = used[t % 2]
        lines.append((start[0], row_base, rows, dim, 0, 1 + t % 2, start[1], stride))
        used[t % 2] = [start[0] + rows * dim, start[1] + rows]
        row_base += rows
    return torch.tensor(lines)


def group(lookups: Tensor) -> Groups:
    """What `tbe_group` makes of linear rows; negative ones are skipped lookups."""
    n = lookups.numel()
    keys = torch.where(lookups < 0, 2**40, lookups)
    order = keys.argsort(stable=True)
    unique, sizes = keys[keys < 2**40].unique(return_counts=True)
    ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).int()
    rows, segments = torch.zeros(n, dtype=torch.int64), torch.full((n + 1,), int(ends[-1])).int()
    rows[: unique.numel()], segments[: ends.numel()] = unique, ends
    return rows, segments, order.int(), torch.tensor([unique.numel()]).int()


def on(device: torch.device, op: Op) -> Op:
    """`op` for tensors in host memory: they travel to `device` and back, but host tiers stay."""
    if device.type == "cpu":
        return op

    def call(*arguments: Any) -> Any:
        given = [_to(argument, device) for argument in arguments]
        result = op(*given)
        for before, after in zip(arguments, given, strict=True):
            for old, new in zip(_tensors(before), _tensors(after), strict=True):
                old.copy_(new)
        found = tuple(tensor.cpu() for tensor in _tensors(result))
        return found if isinstance(result, tuple) else found[0] if found else None

    return call


def _to(argument: Any, device: torch.device) -> Any:
    if isinstance(argument, list):
        size = len(argument) // 4  # tier by tier; those in the middle are memory of the host
        middle = range(size, 3 * size)
        return [t.pin_memory() if i in middle else t.to(device) for i, t in enumerate(argument)]
    return argument.to(device) if isinstance(argument, Tensor) else argument


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, list | tuple) else [value]
    return [tensor for tensor in values if isinstance(tensor, Tensor)]


@dataclass(frozen=True)
class Trace:
    """Random batches: how skewed, how long, and how many are in flight at a time."""

    sizes: tuple[tuple[int, int], ...] = ((90, 5), (60, 3))
    sets: int = 2
    policy: str = "lru"
    batches: int = 12
    lookups: int = 60
    skew: float = 2.0
    ahead: int = 0  # batches that are planned before the first of them is done
    seed: int = 0

    def lookup_batches(self) -> list[Tensor]:
        """Linear rows of each batch, -1 among them."""
        generator = torch.Generator().manual_seed(self.seed)
        total = UNCACHED + sum(rows for rows, _ in self.sizes)
        scramble = torch.randperm(total, generator=generator)
        found = []
        for _ in range(self.batches):
            n = int(torch.randint(0, self.lookups + 1, (), generator=generator))
            rows = scramble[(torch.rand(n, generator=generator) ** self.skew * total).long()]
            rows[torch.rand(n, generator=generator) < 0.1] = -1
            found.append(rows)
        return found


class Twin:
    """The tensors of a cache and the model, and whether they agree."""

    def __init__(self, trace: Trace, plan: Op) -> None:
        self.trace, self._plan = trace, plan
        self.tables = table_rows(list(trace.sizes))
        cached = sum(rows for rows, _ in trace.sizes)
        self.tags = torch.full((trace.sets, WAYS), -1)
        self.stamps = torch.full((trace.sets, WAYS), -1)
        num_counts = cached if trace.policy == "lfu" else 0
        self.counts = torch.zeros(num_counts, dtype=torch.int32)
        self.counters = torch.zeros(len(self.tables) + 1, len(COUNTERS), dtype=torch.int64)
        ranges = [(base, rows) for _, base, rows, *_ in self.tables[1:].tolist()]
        self.model = CacheModel(trace.sets, trace.policy, ranges)
        self.now, self.in_flight = 0, deque[int]()

    def plan(self, lookups: Tensor, groups: Groups) -> tuple[CachePlan, Tensor, Tensor]:
        """Both place a batch; afterwards they must agree about everything."""
        self.now += 1
        self.in_flight.append(self.now)
        while len(self.in_flight) > self.trace.ahead + 1:
            self.in_flight.popleft()
        rows, segments, _, count = groups
        clock = torch.tensor([self.now, self.in_flight[0]])
        row_slots, evicted = self._plan(
            self.tags,
            self.stamps,
            self.counts,
            self.counters,
            clock,
            self.tables,
            rows,
            segments,
            count,
            CACHE_POLICY[self.trace.policy],
        )
        plan = self.model.plan(lookups.tolist(), self.now, self.in_flight[0])
        self._compare_plan(plan, groups, row_slots, evicted)
        self.compare()
        return plan, row_slots, evicted

    def _compare_plan(
        self, plan: CachePlan, groups: Groups, slots: Tensor, evicted: Tensor
    ) -> None:
        unique = int(groups[3])
        for row, slot, old in zip(
            groups[0][:unique].tolist(), slots.tolist(), evicted.tolist(), strict=False
        ):
            want = plan.slots.get(row)
            assert slot == (-1 if want is None else want), row
            moved = plan.fetched.get(row, "stays")
            assert old == (-2 if moved == "stays" else -1 if moved is None else moved), row
        assert (slots[unique:] == -1).all()
        assert (evicted[unique:] == -2).all()

    def compare(self) -> None:
        """Tags, stamps, counts and counters against the model."""
        lfu, counts = self.trace.policy == "lfu", dict(self.model.counts)
        for number, ways in enumerate(self.model.sets):
            tags, stamps = self.tags[number].tolist(), self.stamps[number].tolist()
            for way, tag, stamp in zip(ways, tags, stamps, strict=True):
                assert tag == (-1 if way.row is None else way.row)
                if way.row is None:
                    continue
                used = counts.pop(way.row) << 32 if lfu else 0
                assert stamp == used + way.stamp
        if lfu:
            for row, times in counts.items():  # of rows that are not in the cache
                assert self.counts[row - UNCACHED] == times
        lines = [dict.fromkeys(COUNTERS, 0), *self.model.table_counters, self.model.totals]
        assert self.counters.tolist() == [list(line.values()) for line in lines]


@dataclass
class Store:
    """Weights and two states (as long as the row, one a row) of all tiers, filled at random."""

    weights: list[Tensor]
    states: list[Tensor]  # tier by tier
    tables: Tensor

    @classmethod
    def make(
        cls, twin: Twin, table_dtype: torch.dtype, cache_dtype: torch.dtype, state: torch.dtype
    ) -> "Store":
        """Enough memory for the tables and the cache of `twin`."""
        generator = torch.Generator().manual_seed(twin.trace.seed)
        stride, slots = int(twin.tables[-1, 7]), twin.trace.sets * WAYS
        elements, rows = [35, 0, 0, slots * stride], [UNCACHED, 0, 0, slots]
        for _, _, n, dim, _, tier, _, _ in twin.tables[1:].tolist():
            elements[tier] += n * dim
            rows[tier] += n
        weights, states = [], []
        for tier in range(4):
            dtype = cache_dtype if tier == 3 else table_dtype
            weights.append(torch.randn(elements[tier], generator=generator).to(dtype))
            states.append(torch.randn(elements[tier], generator=generator).to(state))
            states.append(torch.rand(rows[tier], generator=generator))
        return cls(weights, states, twin.tables)

    def clone(self) -> "Store":
        """A copy."""
        weights = [tensor.clone() for tensor in self.weights]
        return Store(weights, [tensor.clone() for tensor in self.states], self.tables)

    @property
    def memory(self) -> CacheMemory:
        """The same tensors for the reference."""
        states = [self.states[2 * tier : 2 * tier + 2] for tier in range(4)]
        return CacheMemory(self.weights, states, self.tables)

    def same(self, other: "Store", *, tiers: int = 4) -> bool:
        """Whether the first tiers hold the same bits."""
        mine = [*self.weights[:tiers], *self.states[: 2 * tiers]]
        theirs = [*other.weights[:tiers], *other.states[: 2 * tiers]]
        return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))

    def touch(self, row: int, slot: int, step: int) -> None:
        """Train a row a little: the same change wherever it is."""
        place = next(line for line in self.tables.tolist() if line[1] <= row < line[1] + line[2])
        tier, element = place[5], place[0] + (row - place[1]) * place[3]
        index = place[6] + row - place[1]
        if slot >= 0:
            tier, element, index = 3, slot * place[7], slot
        columns = slice(element, element + place[3])
        self.weights[tier][columns] += step / 64
        self.states[2 * tier][columns] *= 0.5
        self.states[2 * tier + 1][index] += step
