"""Entries of dynamic tables for tests of checkpoints: rows that tell the key they belong to."""

import torch
from torch import Tensor

from emblib.dynamic.saving.dump_tables import Dump, DumpedTable
from emblib.dynamic.saving.entries import Entries

EDGES = [0, 1, -1, -2, -3, -4, 2**63 - 1, -(2**63), 2**62, -(2**62)]


def keys(count: int, seed: int = 0) -> Tensor:
    """Distinct keys, among them those that other libraries reserve."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-(2**62), 2**62, (2 * count + 20,), generator=generator)
    distinct = torch.cat([torch.tensor(EDGES), drawn]).unique()
    chosen = distinct[torch.randperm(distinct.numel(), generator=generator)]
    edges = torch.tensor(EDGES)
    rest = chosen[~torch.isin(chosen, edges)]
    return torch.cat([edges, rest])[:count]


def row_of(keys: Tensor, dim: int, salt: int = 0) -> Tensor:
    """Rows that nothing but the key decides: exact in float32, float16 and bfloat16."""
    columns = torch.arange(dim)
    return ((keys[:, None] // 7 + 31 * columns + salt) % 127).float()


def make(count: int, dim: int = 6, seed: int = 0, *, scored: bool = False) -> Entries:
    """Entries with the states of Adam's kind, one as long as the row and one number per row."""
    found = keys(count, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    stamps = torch.randint(1, 50, (count,), generator=generator)
    scores = torch.randint(1, 9, (count,), generator=generator)
    rows = {
        "weight": row_of(found, dim),
        "exp_avg": row_of(found, dim, 1),
        "exp_avg_sq": row_of(found, 1, 2).view(-1),
    }
    return Entries(found, stamps, scores if scored else None, rows)


def table(entries: Entries, name: str = "items", order: str = "lru") -> DumpedTable:
    return DumpedTable(name, order, entries, torch.empty(0, dtype=torch.int64))


def assert_same(one: Entries, other: Entries) -> None:
    """The same entries to the bit, in whatever order."""
    one, other = one.sorted(), other.sorted()
    assert torch.equal(one.keys, other.keys)
    assert torch.equal(one.stamps, other.stamps)
    assert (one.scores is None) == (other.scores is None)
    if one.scores is not None and other.scores is not None:
        assert torch.equal(one.scores, other.scores)
    assert one.rows.keys() == other.rows.keys()
    everything = torch.arange(len(one))
    for name in one.rows:
        assert torch.equal(one.rows[name][everything], other.rows[name][everything]), name


def assert_rows_tell_keys(entries: Entries, dim: int = 6) -> None:
    """Every row is that of its key."""
    everything = torch.arange(len(entries))
    assert torch.equal(entries.rows["weight"][everything].float(), row_of(entries.keys, dim))


def only(dump: Dump) -> Entries:
    """The entries of a dump of one table."""
    (found,) = dump.tables.values()
    return found.entries
