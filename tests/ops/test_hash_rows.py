"""Rows of values by slot: the ops against the reference, in every unit that rows move in."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.ops import hash
from emblib.ops.primitives import group
from emblib.reference import hash as reference
from emblib.reference.hash import EVICTING, SLOTS_PER_BUCKET
from tests.hash_cases import Batch, Draws, Tables, Twin, on

Op = Callable[..., Any]
# Rows of 2 bytes to several kilobytes, whose sizes are multiples of 2, 4, 8 and 16 bytes.
KINDS = [
    (torch.float32, 64),
    (torch.float32, 50),
    (torch.float32, 3),
    (torch.float16, 3),
    (torch.bfloat16, 8),
    (torch.float32, 600),
    (torch.float16, 1),
]
COUNTS = (0, 1, 31, 33, 700)
ROWS = 300


def ops_on(device: torch.device) -> dict[str, Op]:
    """Return the row ops for tensors in host memory."""
    names = ("find_rows", "read_rows", "start_rows_", "write_rows_", "add_rows_", "evicted_rows")
    return {name: on(device, getattr(hash, f"hash_{name}")) for name in names}


def draw_values(dtype: torch.dtype, dim: int, rows: int = ROWS) -> Tensor:
    """Return rows that all differ, some inside a larger matrix."""
    wide = torch.randn(rows, dim + 5, generator=torch.Generator().manual_seed(dim)).to(dtype)
    return wide[:, :dim].contiguous() if dim % 2 == 0 else wide[:, :dim]


def draw_slots(count: int, rows: int = ROWS) -> Tensor:
    """Return slots of which many repeat, -1 among them; -1 alone for the last ones."""
    slots = torch.randint(-1, rows // 2, (count,), generator=torch.Generator().manual_seed(count))
    slots[count - count // 5 :] = -1
    return slots


def check_reads_and_writes(ops: dict[str, Op], dtype: torch.dtype, dim: int) -> None:
    """Compare `read_rows` and `write_rows_`, of which the last row of a slot stays."""
    for count in COUNTS:
        values, slots = draw_values(dtype, dim), draw_slots(count)
        assert torch.equal(
            ops["read_rows"](values, slots, -1.5), reference.read_rows(values, slots, -1.5)
        )
        rows, want = draw_values(dtype, dim, count).contiguous(), values.clone()
        ops["write_rows_"](values, slots, rows)
        reference.write_rows_(want, slots, rows)
        assert torch.equal(values, want)


def check_sums(ops: dict[str, Op], dtype: torch.dtype, dim: int) -> None:
    """Compare `add_rows_`, which adds the rows of a slot in order and rounds every sum."""
    for count in COUNTS:
        values, slots = draw_values(dtype, dim), draw_slots(count)
        slots[::3] = 7
        rows, want = draw_values(dtype, dim, count).contiguous(), values.clone()
        ops["add_rows_"](values, *group(slots, ROWS), rows)
        reference.add_rows_(want, slots, rows)
        assert torch.equal(values, want)


def check_starts(ops: dict[str, Op], dtype: torch.dtype, dim: int) -> None:
    """Compare `start_rows_` for a batch of hits, refused keys and new keys that repeat."""
    for count in COUNTS:
        slots = draw_slots(count)
        groups, first = torch.full((count,), -1, dtype=torch.int32), torch.zeros(count).long()
        numbers: dict[int, int] = {}
        for position, slot in enumerate(slots.tolist()):
            if slot % 3 == 0 or slot < 0:
                number = numbers.setdefault(slot, len(numbers))
                groups[position] = number
                if int((groups == number).sum()) == 1:
                    first[number] = position
        starting = draw_values(dtype, dim, count).contiguous()
        for reads in (True, False):
            values = draw_values(dtype, dim)
            want = values.clone()
            call = (slots, groups, first, starting, 0.25)
            rows = reference.start_rows_(want, *call)
            got = ops["start_rows_"](values, *call, reads)
            assert torch.equal(got, rows if reads else rows[:0])
            assert torch.equal(values, want)


def check_evicted(ops: dict[str, Op], dtype: torch.dtype, dim: int) -> None:
    """Compare `evicted_rows` of weights and states, in the order of misses."""
    for count in COUNTS:
        some = torch.Generator().manual_seed(count)
        values = draw_values(dtype, dim, 800)
        slots = torch.randperm(800, generator=some)[:count]
        status = torch.randint(1, 6, (count,), generator=some, dtype=torch.uint8)
        words = torch.randint(-(2**63), 2**63 - 1, (count, 3), generator=some)
        matrices = [values, torch.randn(800, 1, generator=some), values[:, : dim // 2 + 1]]
        keys, rows, *parts, number = ops["evicted_rows"](matrices, slots, status, words)
        wanted = reference.evicted_rows(matrices, slots, status, words)
        assert int(number) == int((status == EVICTING).sum())
        got = (keys, *rows, *parts)
        for part, want in zip(got, (wanted[0], *wanted[1], *wanted[2:]), strict=True):
            assert torch.equal(part[: int(number)], want)


def check_finds(find_rows: Op, twin: Twin, dtype: torch.dtype, dim: int) -> None:
    """Compare `find_rows` with a search by the model and a read of the slots that it finds."""
    values = draw_values(dtype, dim, twin.index[0].numel())
    firsts = (twin.index[2][:, 0] * SLOTS_PER_BUCKET).tolist()
    draws = Draws(len(twin.tables.sizes), keys=400, seed=5)
    for batch in (Batch.of(), *(draws.batch() for _ in range(6))):
        slots = twin.model.find(batch.positions)
        at = [
            firsts[t] + slot if slot >= 0 else -1
            for (t, _), slot in zip(batch.positions, slots, strict=True)
        ]
        rows, found = find_rows(twin.index, *batch.keys, values, 2.0)
        assert found.tolist() == [slot >= 0 for slot in slots]
        assert torch.equal(rows, reference.read_rows(values, torch.tensor(at).long(), 2.0))


def twin_with_keys(ops: dict[str, Op]) -> Twin:
    """Return tables that hold some of the keys that `check_finds` asks for."""
    twin = Twin(Tables(((2, 4, 819), (3, 3, 1024))), ops)
    draws = Draws(2, keys=400, most=200, seed=5)
    for _ in range(5):
        twin.train(draws.batch())
    return twin


@pytest.mark.parametrize(("dtype", "dim"), KINDS)
def test_rows_are_those_of_the_reference(
    device: torch.device, dtype: torch.dtype, dim: int
) -> None:
    ops = ops_on(device)
    check_reads_and_writes(ops, dtype, dim)
    check_sums(ops, dtype, dim)
    check_starts(ops, dtype, dim)
    check_evicted(ops, dtype, dim)


@pytest.mark.parametrize(("dtype", "dim"), KINDS[:4])
def test_found_rows_are_those_of_the_reference(
    device: torch.device, dtype: torch.dtype, dim: int
) -> None:
    index_ops = {name: getattr(hash, f"hash_{name}") for name in ("touch_", "grow_", "insert_")}
    check_finds(ops_on(device)["find_rows"], twin_with_keys(index_ops), dtype, dim)


def test_rows_are_written_in_order_on_any_number_of_threads(thread_counts: list[int]) -> None:
    slots = torch.arange(40_000) % 700
    rows = torch.arange(40_000.0)[:, None].expand(-1, 16).contiguous()
    for threads in thread_counts:
        torch.set_num_threads(threads)
        values = torch.zeros(700, 16)
        hash.hash_write_rows_(values, slots, rows)
        assert values[:, 0].tolist() == [
            float(max(range(slot, 40_000, 700))) for slot in range(700)
        ]


@pytest.mark.parametrize("size", [torch.int64, torch.float64])
def test_any_element_of_eight_bytes_is_written(device: torch.device, size: torch.dtype) -> None:
    """Also a column of a matrix, as the scores of entries are."""
    entries = torch.zeros(10, 3, dtype=size)
    column = entries.to(device)
    slots = torch.tensor([4, -1, 4, 9], device=device)
    numbers = torch.tensor([[5], [6], [7], [8]], dtype=size, device=device)
    hash.hash_write_rows_(column[:, 2:], slots, numbers)
    entries[4, 2], entries[9, 2] = 7, 8
    assert torch.equal(column.cpu(), entries)
