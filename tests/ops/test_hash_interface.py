"""The interface of the hash ops: opcheck, wrong input and constants."""

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from emblib.ops import hash
from emblib.ops.codes import HASH_ORDER, INSERT_POLICY
from emblib.ops.primitives import group
from emblib.reference import hash as reference
from tests.compile_cache import ROOT
from tests.hash_cases import Batch, Rows, Tables, Twin

TABLES = Tables(((1, 3, 819), (2, 2, 1024)), "assigned")


def _cases() -> dict[str, tuple[Any, ...]]:
    """Valid arguments of every op: tables with some keys, and a batch of these and of new ones."""
    model = Twin(TABLES, {}).model
    batch = Batch.of((0, range(20)), (1, range(5)))
    model.touch(batch.positions, batch.uses, [4, 5])
    model.insert(model.misses(batch.positions, [-1] * 25, batch.uses), [4, 5])
    index = model.index()
    batch = Batch.of((0, range(10, 60)), (1, [1, 2, 90, 90]), batch_scores=[6, 7])
    batch.counts = torch.arange(1, 55)
    keys, rows, scores = batch.keys, Rows(TABLES), batch.batch_scores
    order = HASH_ORDER["assigned"]
    used = [tensor.clone() for tensor in index]
    slots, *misses = hash.hash_touch_(used, *keys, batch.counts, scores, order)
    first, groups, totals, offsets = misses
    admitted = torch.arange(54) % 5 != 0
    values = torch.randn(index[0].numel(), 3)
    placed = hash.hash_insert_(used, batch.ids, first, totals, offsets, None, scores, order, 0)
    return {
        "hash_find": (index, *keys),
        "hash_touch_": (index, *keys, batch.counts, scores, HASH_ORDER["assigned"]),
        "hash_grow_": (index, rows.row_buffers, rows.layout, *keys, slots, offsets, admitted),
        "hash_insert_": (
            *(index, batch.ids, first, totals, offsets, admitted, scores),
            *(order, INSERT_POLICY["wins"], slots, groups),
        ),
        "hash_find_rows": (index, *keys, values, 1.5),
        "hash_read_rows": (values, slots, 1.5),
        "hash_start_rows_": (values, slots, groups, first, torch.randn(54, 3), 1.5, True),
        "hash_write_rows_": (values, slots, torch.randn(54, 3)),
        "hash_add_rows_": (values, *group(slots, values.size(0)), torch.randn(54, 3)),
        "hash_evicted_rows": ([values, values[:, :1]], *placed[:3]),
        "hash_erase_": (index, *keys),
        "hash_expire_": (index, 0, 0, 1, 5),
    }


def test_opcheck() -> None:
    for name, arguments in _cases().items():
        torch.library.opcheck(getattr(torch.ops.emblib, name).default, arguments)


def test_constants_agree() -> None:
    assert hash.SLOTS_PER_BUCKET == reference.SLOTS_PER_BUCKET
    assert (hash.COUNTERS, hash.ORDERS) == (reference.COUNTERS, reference.ORDERS)
    assert len(hash.TABLE_FIELDS) == TABLES.index()[2].size(1)


@pytest.mark.parametrize(("most", "load"), [(1, 819), (3, 1024), (8, 819), (100, 700), (64, 1)])
def test_growth_is_foreseen(most: int, load: int) -> None:
    """Who reserves memory knows how many buckets there will be; more keys never make fewer."""
    before = 1
    for keys in range(most * 33):
        sizes = [f.wanted_buckets(keys, 1, most, load) for f in (hash, reference)]
        assert before <= sizes[0] == sizes[1] <= most
        assert hash.wanted_buckets(keys, most, most, load) == most
        before = sizes[0]
    assert before == most


def _changed(tensor: torch.Tensor, at: tuple[int, ...], value: int) -> torch.Tensor:
    copy = tensor.clone()
    copy[at] = value
    return copy


# Arguments of each op: the position in the case, the value instead, the message.
INDEX, FIRST_BUCKET, BUCKETS, MOST, SIZE, LOAD = 0, (1, 0), (1, 1), (1, 2), (0, 3), (0, 4)


def _wrong_index(index: list[torch.Tensor]) -> list[tuple[list[torch.Tensor], str]]:
    tags, entries, tables, clock, counters = index
    rest = (clock, counters)
    outside = "table . lies outside the memory"
    return [
        (index[:4], r"index must be \[tags, entries, tables, clock, counters\], got 4"),
        ([tags.int(), *index[1:]], "tags must be uint8"),
        ([tags, entries.int(), tables, *rest], "must be int64, got int32"),
        ([tags, entries[:-1], tables, *rest], "entries must be .S, 2. or, with scores"),
        ([tags, entries, tables[:, :4].contiguous(), *rest], "tables must be"),
        ([tags, entries, tables.t(), *rest], "must be contiguous"),
        ([tags, entries, tables, clock, counters[:1]], "counters .T, 8"),
        ([tags, entries, _changed(tables, FIRST_BUCKET, 4), *rest], outside),
        ([tags, entries, _changed(tables, FIRST_BUCKET, -1), *rest], outside),
        ([tags, entries, _changed(tables, BUCKETS, 0), *rest], outside),
        ([tags, entries, _changed(tables, BUCKETS, 3), *rest], outside),
        ([tags, entries, _changed(tables, MOST, 2**40), *rest], outside),
        ([tags, entries, _changed(tables, SIZE, -1), *rest], "must have 0 to 32 keys, got -1"),
        ([tags, entries, _changed(tables, SIZE, 33), *rest], "must have 0 to 32 keys, got 33"),
        ([tags, entries, _changed(tables, SIZE, 2**62), *rest], "table 0 must have 0 to 32 keys"),
        ([tags, entries, _changed(tables, LOAD, 0), *rest], r"must be in \[1, 1024\], got 0"),
        ([tags, entries, _changed(tables, LOAD, 1025), *rest], "maximum load of table 0 must be"),
    ]


def _wrong_keys(keys: tuple[torch.Tensor, ...]) -> list[tuple[tuple[torch.Tensor, ...], str]]:
    ids, starts, tables = keys
    return [
        ((ids.int(), starts, tables), "ids must be int64, got int32"),
        ((ids.view(2, -1), starts, tables), "ids must be contiguous and have 1 dimension"),
        ((ids[::2], starts, tables), "ids must be contiguous"),
        ((ids, starts[:-1].contiguous(), tables), "one entry more than tables"),
        ((ids, _changed(starts, (0,), 1), tables), "starts must begin with 0"),
        ((ids, _changed(starts, (2,), 99), tables), "end with the number of ids, 54, got 0 and 99"),
        ((ids, _changed(starts, (1,), 60), tables), "starts must not decrease, got 54 after 60"),
        ((ids, _changed(starts, (1,), -7), tables), "starts must not decrease, got -7 after 0"),
        ((ids, starts, _changed(tables, (1,), 2)), r"tables\[1\] must be in \[0, 2\), got 2"),
        ((ids, starts, _changed(tables, (0,), -1)), r"tables\[0\] must be in \[0, 2\), got -1"),
    ]


def _refused(name: str, arguments: list[Any], message: str) -> None:
    """The op says why, and writes nothing."""
    index = arguments[0] if isinstance(arguments[0], list) else []
    before = [tensor.clone() for tensor in index]
    with pytest.raises(RuntimeError, match=message):
        getattr(torch.ops.emblib, name).default(*arguments)
    assert all(torch.equal(a, b) for a, b in zip(index, before, strict=True)), name


def test_wrong_tables_and_keys_are_refused() -> None:
    for name, arguments in _cases().items():
        if isinstance(arguments[0], list) and name != "hash_evicted_rows":
            for index, message in _wrong_index(arguments[0]):
                _refused(name, [index, *arguments[1:]], message)
        without_keys = ("insert_", "expire_", "read_rows", "start_rows_", "write_rows_")
        without_keys += ("add_rows_", "evicted_rows")
        at = {"hash_grow_": 3, **{f"hash_{op}": -1 for op in without_keys}}.get(name, 1)
        if at >= 0:
            for keys, message in _wrong_keys(arguments[at : at + 3]):
                _refused(name, [*arguments[:at], *keys, *arguments[at + 3 :]], message)


def test_wrong_input_is_refused() -> None:
    cases = _cases()
    short = torch.zeros(3, dtype=torch.int64)
    entries = cases["hash_find"][0][1]
    offsets, layout = cases["hash_grow_"][7], cases["hash_grow_"][2]
    for name, at, value, message in (
        ("hash_touch_", 4, short, "counts must be contiguous with 54 entries, got 3"),
        ("hash_touch_", 4, torch.ones(54), "counts must be int64, got float32"),
        ("hash_touch_", 5, short, "batch_scores must be contiguous with 2 entries, got 3"),
        ("hash_touch_", 5, None, "order assigned needs batch_scores"),
        ("hash_touch_", 6, 5, "order must be one of .*, got 5"),
        ("hash_grow_", 1, cases["hash_grow_"][1][:1], r"row_layout must be a contiguous"),
        ("hash_grow_", 2, _changed(layout, (1, 0, 0), 10**6), r"1 lie outside row_buffers\[0\]"),
        ("hash_grow_", 2, _changed(layout, (0, 1, 1), 10**6), r"0 lie outside row_buffers\[1\]"),
        ("hash_grow_", 2, _changed(layout, (0, 1, 1), 2**62), r"0 lie outside row_buffers\[1\]"),
        ("hash_grow_", 2, _changed(layout, (0, 0, 0), -4), r"0 lie outside row_buffers\[0\]"),
        ("hash_grow_", 6, short, "slots must be contiguous with 54 entries"),
        ("hash_grow_", 7, offsets[:2], "offsets must be contiguous with 3 entries"),
        ("hash_grow_", 7, _changed(offsets, (1,), 99), "offsets must ascend"),
        ("hash_grow_", 7, _changed(offsets, (0,), 1), "offsets must ascend"),
        ("hash_grow_", 8, torch.ones(54), "admitted must be bool, got float32"),
        ("hash_grow_", 8, torch.ones(53).bool(), "one entry per id = 54, got 53"),
        ("hash_insert_", 2, _changed(cases["hash_insert_"][2], (1,), 54), "positions in ids"),
        ("hash_insert_", 2, _changed(cases["hash_insert_"][2], (1,), -1), "positions in ids"),
        ("hash_insert_", 3, short, "totals must be contiguous with 54 entries"),
        ("hash_insert_", 4, _changed(offsets, (2,), 99), "offsets must ascend"),
        ("hash_insert_", 6, None, "order assigned needs batch_scores"),
        ("hash_insert_", 7, -1, "order must be one of .*, got -1"),
        ("hash_insert_", 8, 2, "insert_policy must be one of .*, got 2"),
        ("hash_insert_", 9, short, "slots must be contiguous with 54 entries, got 3"),
        ("hash_insert_", 9, None, "slots and groups must be passed together"),
        ("hash_insert_", 10, torch.full((54,), 54).int(), "groups must be below the number of ids"),
        ("hash_insert_", 10, torch.zeros(54).long(), "groups must be int32, got int64"),
        ("hash_find_rows", 4, torch.ones(9).long().view(3, 3), "values must be float32, float16"),
        ("hash_find_rows", 4, torch.ones(9), r"values must be a matrix \[slots, dim\]"),
        ("hash_find_rows", 4, torch.ones(3, 9).t(), "with contiguous rows"),
        ("hash_read_rows", 1, torch.zeros(54), "slots must be int64, got float32"),
        ("hash_start_rows_", 2, short.int(), "groups must be contiguous with 54 entries, got 3"),
        ("hash_start_rows_", 2, torch.full((54,), 54).int(), "groups must be below the number"),
        ("hash_start_rows_", 3, torch.full((54,), -1), "first must be positions"),
        ("hash_start_rows_", 4, torch.zeros(54, 2), r"starting must .* of shape \[54, 3\]"),
        ("hash_write_rows_", 2, torch.zeros(54, 3).double(), "rows must .* the dtype of values"),
        ("hash_write_rows_", 0, torch.zeros(5, 3).bool(), "must have 2, 4 or 8 bytes, got 1"),
        ("hash_add_rows_", 2, short.int(), "segments must be contiguous with 55 entries, got 3"),
        ("hash_add_rows_", 2, -torch.arange(55).int(), "segments must not decrease"),
        ("hash_add_rows_", 3, torch.full((54,), 54).int(), r"positions in \[0, 54\), got 54"),
        ("hash_add_rows_", 4, torch.tensor([55]).int(), "must be those that group returns"),
        ("hash_evicted_rows", 0, [torch.zeros(9)], r"values must be a matrix \[slots, dim\]"),
        ("hash_evicted_rows", 0, [], "values must have at least one matrix"),
        ("hash_evicted_rows", 2, torch.zeros(54), "status must be uint8, got float32"),
        ("hash_evicted_rows", 3, short, "evicted must be contiguous with 162 entries, got 3"),
        ("hash_expire_", 1, 2, r"table must be in \[0, 2\), got 2"),
        ("hash_expire_", 1, -1, r"table must be in \[0, 2\), got -1"),
        ("hash_expire_", 2, -1, r"must lie in \[0, 3\), got -1 and 1"),
        ("hash_expire_", 2, 3, r"must lie in \[0, 3\), got 3 and 1"),
        ("hash_expire_", 3, 2**62, r"must lie in \[0, 3\)"),
    ):
        arguments = list(cases[name])
        arguments[at] = value
        _refused(name, arguments, message)
    unscored = [*cases["hash_touch_"]]
    unscored[0] = [unscored[0][0], entries[:, :2].contiguous(), *unscored[0][2:]]
    _refused("hash_touch_", unscored, "order assigned needs scores, so entries of 3 words, got 2")


def test_uses_stop_at_the_largest_number() -> None:
    """Sums of counts are numbers of 64 bits, as scores are."""
    keys, index = Batch.of((0, [5, 6, 5])).keys, Tables().index()
    counts = torch.tensor([2**63 - 1, 1, 2])
    totals = hash.hash_touch_(index, *keys, counts, None, HASH_ORDER["lru"])[3]
    assert totals.tolist() == [2**63 - 1, 1, 0]


def insert_without_memory() -> None:
    torch.set_num_threads(1)  # stacks of threads need memory, too
    num_keys = 2**21
    index = Tables().index()
    keys, uses = torch.arange(num_keys), torch.ones(num_keys, dtype=torch.int64)
    offsets = torch.full((len(index[2]) + 1,), num_keys)
    offsets[0] = 0
    codes = HASH_ORDER["lru"], INSERT_POLICY["wins"]
    before = [tensor.clone() for tensor in index]
    _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + 45 * num_keys, hard_limit))  # results: 33
    with pytest.raises(RuntimeError, match="hash_insert_: can't allocate memory"):
        hash.hash_insert_(index, keys, keys, uses, offsets, None, None, *codes)
    assert all(torch.equal(a, b) for a, b in zip(index, before, strict=True))


def test_an_insertion_without_memory_changes_nothing() -> None:
    """In a process of its own: another may have memory that earlier tests freed."""
    program = f"from {__name__} import insert_without_memory; insert_without_memory()"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def test_growth_into_buckets_that_are_not_empty_stays_inside() -> None:
    """What no call makes: entries stay where they are, and nothing beyond the tables is written."""
    tables = Tables(((1, 2, 819), (1, 1, 1024)))
    model = Twin(tables, {}).model
    misses = model.misses([(0, key) for key in range(32)], [-1] * 32, [1] * 32)
    model.insert(misses, [0, 0])
    index = model.index()
    index[0][hash.SLOTS_PER_BUCKET : 2 * hash.SLOTS_PER_BUCKET] = 7
    before = [tensor.clone() for tensor in index[:2]]
    batch = Batch.of((0, [99]))
    layout = torch.empty(2, 0, 2, dtype=torch.int64)
    offsets = torch.tensor([0, 1, 1])
    hash.hash_grow_(index, [], layout, *batch.keys, torch.tensor([-1]), offsets, None)
    assert index[2][0].tolist() == [0, 2, 2, 32, 819, 0]
    assert all(torch.equal(a, b) for a, b in zip(index[:2], before, strict=True))
