"""Dynamic tables: hash tables of rows keyed by arbitrary 64-bit ids, in bounded memory.

`module` has `DynamicEmbeddingBags`, which looks rows up and trains them; `hash_index` maps keys to
slots, `rows` lays out the rows, and `training` inserts the keys of a batch. `saving` has
checkpoints, `tiers` the stores behind the tables, and `hash_table` one table for direct use.
`handles` has one object per table for everything but lookups, wherever its shards are.
`statistics` counts what insertions do, `shrinking` makes a table smaller, and `budget` divides one
number of bytes among many tables.
`cached_tt` has tensor trains whose most used rows are found by such a table.
"""

from emblib.dynamic.budget import BudgetedTable, MemoryBudget, Pressure
from emblib.dynamic.cached_tt import CachedTTEmbeddingBags
from emblib.dynamic.dynamic_tables import DynamicTables, tables_of
from emblib.dynamic.handles import DynamicTable, TableChanges
from emblib.dynamic.hash_table import HashTable, Insertion, TableRows
from emblib.dynamic.keys import KeyStatus
from emblib.dynamic.module import DynamicEmbeddingBags
from emblib.dynamic.statistics import AgeHistogram, TableStatistics
from emblib.dynamic.tiers.disk import DiskRows
from emblib.dynamic.tiers.host import HostRows
from emblib.dynamic.tiers.sqlite import SqliteRows
from emblib.dynamic.tiers.store import (
    BackingStore,
    FoundRows,
    RowStore,
    ShardableStore,
    StoredRows,
    StoredTable,
    StoreShard,
    TierMode,
    TierStats,
)
from emblib.dynamic.tt_cache import RowEviction, TTCache, TTCacheStats

__all__ = [
    "AgeHistogram",
    "BackingStore",
    "BudgetedTable",
    "CachedTTEmbeddingBags",
    "DiskRows",
    "DynamicEmbeddingBags",
    "DynamicTable",
    "DynamicTables",
    "FoundRows",
    "HashTable",
    "HostRows",
    "Insertion",
    "KeyStatus",
    "MemoryBudget",
    "Pressure",
    "RowEviction",
    "RowStore",
    "ShardableStore",
    "SqliteRows",
    "StoreShard",
    "StoredRows",
    "StoredTable",
    "TTCache",
    "TTCacheStats",
    "TableChanges",
    "TableRows",
    "TableStatistics",
    "TierMode",
    "TierStats",
    "tables_of",
]
