"""Rows of any bytes, and the stores in files, for the tests of stores and of what uses them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from emblib.dynamic.tiers.disk import DiskRows
from emblib.dynamic.tiers.sqlite import SqliteRows
from emblib.dynamic.tiers.store import FoundRows, RowStore, StoredRows, StoredTable

TABLES = [StoredTable("a", 12), StoredTable("b", 40)]
EDGES = [-4, -3, -2, -1, 0, 1, 2, 3, 4, 2**63 - 1, -(2**63)]

FILES: dict[str, Callable[[Path], RowStore]] = {
    "disk": lambda path: DiskRows(path / "rows"),
    "sqlite": lambda path: SqliteRows(path / "rows.db"),
}


def random_rows(keys: Sequence[int] | Tensor, width: int, seed: int) -> StoredRows:
    """Any stamps, scores and bytes for the keys."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.as_tensor(keys, dtype=torch.int64)
    count = keys.numel()
    words = torch.randint(-(2**62), 2**62, (2, count), generator=generator)
    values = torch.randint(0, 256, (count, width), generator=generator, dtype=torch.uint8)
    return StoredRows(keys, *words, values)


def as_dict(rows: StoredRows) -> dict[int, tuple[int, int, bytes]]:
    """The rows by key."""
    words = zip(rows.stamps.tolist(), rows.scores.tolist(), rows.values.tolist(), strict=True)
    return {
        key: (stamp, score, bytes(value))
        for key, (stamp, score, value) in zip(rows.keys.tolist(), words, strict=True)
    }


def contents(store: RowStore, table: int) -> dict[int, tuple[int, int, bytes]]:
    """All rows of a table of a store."""
    found: dict[int, tuple[int, int, bytes]] = {}
    for rows in store.iterate(table, 7):
        part = as_dict(rows)
        assert not found.keys() & part.keys()
        found |= part
    assert len(found) == store.size(table)
    return found


def take(store: RowStore, table: int, keys: Tensor) -> FoundRows:
    """Read rows and lift them."""
    found = store.read(table, keys)
    store.lift(table, found.rows.keys)
    return found
