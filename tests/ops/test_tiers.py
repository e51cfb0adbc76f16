"""Rows that move between a dynamic table and its store: the ops against their definition."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.dynamic.hash_index import HashIndex
from emblib.ops import hash, tiers
from emblib.ops.codes import HASH_ORDER
from emblib.reference import tiers as reference
from emblib.reference.hash import EVICTING, NEW, NOT_ADMITTED, REFUSED
from emblib.specs import DynamicSpec, Eviction

ROWS, OVERFLOW = 900, 400  # rows of the buffers, and those of them that are overflow rows
COUNTS = (0, 1, 37, 450)
KINDS = [(torch.float32, 64), (torch.bfloat16, 7), (torch.float16, 300)]


def draw_swap(dtype: torch.dtype, dim: int, count: int) -> tuple[Any, ...]:
    """Return arguments of a swap of `count` misses, of which about half are in the store."""
    draw = torch.Generator().manual_seed(count + dim)
    wide = torch.randn(ROWS, dim + 5, generator=draw).to(dtype)
    buffers = [wide[:, :dim], torch.randn(ROWS, 1, generator=draw)]
    kinds = torch.tensor([NEW, EVICTING, REFUSED, NOT_ADMITTED], dtype=torch.uint8)
    status = kinds[torch.randint(0, 4, (count,), generator=draw)]
    slots = torch.randperm(ROWS - OVERFLOW, generator=draw)[:count]
    slots[(status == REFUSED) | (status == NOT_ADMITTED)] = -1
    evicted = torch.randint(-(2**63), 2**63 - 1, (count, 3), generator=draw)
    found = torch.randperm(count, generator=draw)[: count // 2]
    nbytes = sum(buffer.shape[1] * buffer.itemsize for buffer in buffers)
    rows = torch.randint(0, 256, (found.numel(), nbytes), generator=draw, dtype=torch.uint8)
    return buffers, slots, status, evicted, found, rows, ROWS - OVERFLOW


def draw_records(count: int, words: int = 2) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return records of some words and rows of 13 bytes; slots, words and rows to write."""
    draw = torch.Generator().manual_seed(count)
    records = torch.randint(0, 256, (ROWS, 8 * words + 13), generator=draw, dtype=torch.uint8)
    slots = torch.randperm(ROWS, generator=draw)[:count]
    slots[::5] = -1
    heads = torch.randint(-(2**63), 2**63 - 1, (words, count), generator=draw)
    values = torch.randint(0, 256, (count, 13), generator=draw, dtype=torch.uint8)
    return records, slots, heads, values


class StoreInMemory:
    """An index of one table, and its records of stamp, score and a row of 13 bytes."""

    def __init__(self, rows: int, eviction: Eviction) -> None:
        self.index = HashIndex([DynamicSpec(rows, 1, eviction=eviction)], hash_keys=[11])
        self.records = torch.zeros(self.index.specs[0].rows, 29, dtype=torch.uint8)

    def put(self, lifted: Tensor, entries: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        order = HASH_ORDER[self.index.order]
        dropped: tuple[Tensor, Tensor] = tiers.tier_put_(
            self.index.tensors(), self.records, lifted, entries, values, order
        )
        return dropped

    def put_op_by_op(
        self, lifted: Tensor, entries: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Do what `tier_put_` does, with the ops that have a reference."""
        index = self.index
        index.erase(hash.Keys.from_ids(lifted))
        if not entries.shape[0]:
            return entries, values
        words = entries.T.contiguous()
        keys, stamps, scores = words.unbind()
        index.set_tick(max(index.tick, int(stamps.max())))
        is_scored = index.order in hash.SCORED_ORDERS

        def rank_by_score(keys: hash.Keys, misses: hash.Misses) -> None:
            count = int(misses.offsets[-1])
            misses.counts[:count] = scores[misses.first[:count]]

        inserted = index.insert(
            hash.Keys.from_ids(keys),
            torch.zeros_like(keys) if is_scored else None,
            admit=rank_by_score if is_scored else None,
        )
        slots, dropped = inserted.slots, [words[:, :0]]
        dropped_rows = [values[:0]]
        if inserted.result is not None:
            is_evicting = inserted.result.status == EVICTING
            evicted_slots = inserted.result.slots[is_evicting]
            _, heads, evicted_rows = tiers.tier_read(self.records, evicted_slots, 13)
            dropped.append(torch.cat([inserted.result.evicted[is_evicting, :1].T, heads]))
            dropped_rows.append(evicted_rows)
        dropped.append(words[:, slots < 0])
        dropped_rows.append(values[slots < 0])
        tiers.tier_write_(self.records, slots, words[1:].contiguous(), values)
        has_slot = slots >= 0
        index.set_entries(
            0, slots[has_slot], stamps[has_slot], scores[has_slot] if is_scored else None
        )
        return torch.cat(dropped, dim=1).T, torch.cat(dropped_rows)


def draw_rows(count: int, seed: int, last_stamp: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return keys to lift; entries with stamps up to `last_stamp`, and rows of 13 bytes to put."""
    draw = torch.Generator().manual_seed(seed)
    keys = torch.randperm(700, generator=draw)[:count] - 350
    stamps = torch.randint(max(0, last_stamp - 5), last_stamp + 1, (count,), generator=draw)
    scores = torch.randint(1, 9, (count,), generator=draw)
    values = torch.randint(0, 256, (count, 13), generator=draw, dtype=torch.uint8)
    lifted = torch.randint(-350, 350, (count // 3,), generator=draw)
    return lifted, torch.stack([keys, stamps, scores], dim=1), values


def same_bytes(got: list[Tensor], want: list[Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("dtype", "dim"), KINDS)
def test_swaps_are_those_of_the_reference(
    dtype: torch.dtype, dim: int, thread_counts: list[int]
) -> None:
    for count in COUNTS:
        want_buffers, *rest = draw_swap(dtype, dim, count)
        want = reference.swap_(want_buffers, *rest)
        for threads in thread_counts:
            torch.set_num_threads(threads)
            buffers, *rest = draw_swap(dtype, dim, count)
            got = tiers.tier_swap_(buffers, *rest)
            for part, wanted in zip(got, want, strict=True):
                assert torch.equal(part, wanted)
            same_bytes(buffers, want_buffers)


@pytest.mark.parametrize("words", [0, 2, 4])
def test_records_are_those_of_the_reference(words: int, thread_counts: list[int]) -> None:
    for count in COUNTS:
        records, *rest = draw_records(count, words)
        slots = rest[0]
        reference.write_(records, *rest)
        want = reference.read(records, slots.flip(0).contiguous(), 13)
        for threads in thread_counts:
            torch.set_num_threads(threads)
            written, *rest = draw_records(count, words)
            tiers.tier_write_(written, *rest)
            assert torch.equal(written, records)
            got = tiers.tier_read(written, slots.flip(0).contiguous(), 13)
            for part, wanted in zip(got, want, strict=True):
                assert torch.equal(part, wanted)


@pytest.mark.parametrize("eviction", [Eviction.LRU, Eviction.LFU, Eviction.LRU_LFU])
def test_puts_are_those_of_the_ops_one_by_one(eviction: Eviction, thread_counts: list[int]) -> None:
    one, other = (StoreInMemory(200, eviction) for _ in range(2))
    num_dropped = 0
    for step, count in enumerate([1, 90, 90, 3, 200, 2, 90, 400, 17, 90, 5, 90] * 3):
        rows = draw_rows(count, step, 3 * step)
        want = other.put_op_by_op(*rows)
        torch.set_num_threads(thread_counts[step % len(thread_counts)])
        got = one.put(*rows)
        for part, wanted in zip(got, want, strict=True):
            assert torch.equal(part, wanted)
        num_dropped += got[0].shape[0]
        used = other.index.tags != 0
        assert torch.equal(one.index.tags, other.index.tags)
        for name in ("entries", "tables", "clock", "counters"):
            mine, wanted = (getattr(store.index, name) for store in (one, other))
            assert torch.equal(*(x[used] if name == "entries" else x for x in (mine, wanted)))
        assert torch.equal(one.records[used], other.records[used])
    assert num_dropped > 1000


def test_put_of_nothing() -> None:
    store = StoreInMemory(64, Eviction.LRU)
    lifted, entries, values = draw_rows(9, 0, 1)
    dropped, dropped_values = store.put(lifted[:0], entries[:0], values[:0])
    assert (dropped.shape, dropped_values.shape) == ((0, 3), (0, 13))
    assert store.index.tick == 0
    store.put(lifted[:0], entries, values)
    store.put(entries[:4, 0].contiguous(), entries[:0], values[:0])
    assert store.index.size(0) == 5


def test_records_of_words_alone() -> None:
    heads, slots = torch.arange(12).view(2, 6), torch.tensor([5, 0, -1, 2, 1, 4])
    records = torch.zeros(6, 16, dtype=torch.uint8)
    tiers.tier_write_(records, slots, heads, torch.empty(6, 0, dtype=torch.uint8))
    positions, words, rows = tiers.tier_read(records, slots, 0)
    assert positions.tolist() == [0, 1, 3, 4, 5]
    assert torch.equal(words, heads[:, positions])
    assert rows.shape == (5, 0)


def test_a_put_without_memory_changes_nothing() -> None:
    row_bytes, count = 2**16, 5000
    index = HashIndex([DynamicSpec(64, 1)], hash_keys=[11])
    records = torch.zeros(64, 16 + row_bytes, dtype=torch.uint8)
    lifted = torch.zeros(0, dtype=torch.int64)
    first, entries = (
        torch.stack([torch.arange(n) + 64, torch.ones(n), torch.ones(n)], dim=1).long()
        for n in (64, count)
    )
    rows = torch.zeros(count, row_bytes, dtype=torch.uint8)
    order = HASH_ORDER["lru"]
    tiers.tier_put_(index.tensors(), records, lifted, first, rows[:64], order)
    state = [*index.tensors(), records]
    before = [tensor.clone() for tensor in state]
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 2**26, limits[1]))
    try:
        with pytest.raises(RuntimeError, match="tier_put_: can't allocate memory"):
            tiers.tier_put_(index.tensors(), records, lifted, entries, rows, order)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert all(torch.equal(tensor, old) for tensor, old in zip(state, before, strict=True))


def test_a_put_of_too_many_rows_raises(tmp_path: Path) -> None:
    count = 2**31
    words = torch.from_file(str(tmp_path / "words"), shared=True, size=3 * count, dtype=torch.int64)
    store = StoreInMemory(64, Eviction.LRU)
    records, lifted = torch.zeros(64, 16, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    rows = torch.empty(count, 0, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=r"tier_put_: at most .* keys per call"):
        tiers.tier_put_(
            store.index.tensors(), records, lifted, words.view(-1, 3), rows, HASH_ORDER["lru"]
        )


@pytest.mark.parametrize(
    ("name", "number", "value", "message"),
    [
        ("tier_swap_", 1, torch.full((37,), ROWS), r"slots of misses must be rows .* got 900"),
        ("tier_swap_", 4, torch.zeros(18).long(), r"found must be distinct misses in \[0, 37\)"),
        ("tier_swap_", 5, torch.zeros(18, 3, dtype=torch.uint8), r"rows must be contiguous"),
        ("tier_swap_", 6, ROWS - 1, "slots of misses must be rows"),
        ("tier_swap_", 6, ROWS + 1, r"first_overflow must be in \[0, 900\], got 901"),
        ("tier_put_", 1, torch.zeros(64, 28, dtype=torch.uint8), "two words and a row of 13 bytes"),
        ("tier_put_", 1, torch.zeros(63, 29, dtype=torch.uint8), "for each of 64 slots"),
        ("tier_put_", 4, torch.zeros(3, 9, dtype=torch.uint8), "a row of 9 bytes"),
        ("tier_put_", 2, torch.zeros(2, 2).long(), r"lifted must be \[m\] and entries \[n, 3\]"),
        ("tier_put_", 3, torch.zeros(9).long(), r"lifted must be \[m\] and entries \[n, 3\]"),
        ("tier_put_", 3, torch.zeros(3, 2).long(), "entries must be contiguous with 9 entries"),
        ("tier_put_", 4, torch.zeros(2, 13, dtype=torch.uint8), "rows must be contiguous"),
        ("tier_put_", 5, HASH_ORDER["none"], "evicts by stamps or by counts"),
        ("tier_put_", 5, HASH_ORDER["lfu"], "entries"),
        ("tier_read", 1, torch.tensor([-2]), "slots must be records .* got -2"),
        ("tier_read", 2, 30, "records must have a row of 30 bytes, got 29"),
        ("tier_write_", 1, torch.full((37,), ROWS), "slots must be records"),
        ("tier_write_", 2, torch.zeros(37).long(), "words must be contiguous with 74 entries"),
        ("tier_write_", 3, torch.zeros(37, 30, dtype=torch.uint8), "a row of 30 bytes"),
    ],
)
def test_wrong_arguments_raise_before_anything_is_written(
    name: str, number: int, value: object, message: str
) -> None:
    records, slots, *rest = draw_records(37)
    store = StoreInMemory(64, Eviction.LRU)
    put = [store.records, *draw_rows(3, 0, 1), HASH_ORDER["lru"]]
    arguments: dict[str, list[Any]] = {
        "tier_put_": [store.index.tensors(), *put],
        "tier_swap_": [*draw_swap(torch.float32, 4, 37)],
        "tier_read": [records, slots, 13],
        "tier_write_": [records, slots, *rest],
    }
    wrong = arguments[name]
    written = [*wrong[0]] if isinstance(wrong[0], list) else [wrong[0]]
    before = [tensor.clone() for tensor in written]
    wrong[number] = value
    with pytest.raises(RuntimeError, match=message):
        getattr(tiers, name)(*wrong)
    same_bytes(written, before)


def test_opcheck() -> None:
    records, slots, *rest = draw_records(37)
    store = StoreInMemory(64, Eviction.LRU)
    store.put(*draw_rows(60, 1, 1))
    put = (store.records, *draw_rows(30, 2, 2), HASH_ORDER["lru"])
    cases: dict[str, tuple[Any, ...]] = {
        "tier_put_": (store.index.tensors(), *put),
        "tier_swap_": (*draw_swap(torch.float32, 4, 37),),
        "tier_read": (records, slots, 13),
        "tier_write_": (records, slots, *rest),
    }
    for name, arguments in cases.items():
        torch.library.opcheck(getattr(torch.ops.emblib, name).default, arguments)
