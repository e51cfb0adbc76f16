"""Dynamic tables: rows for keys of any value, in bounded memory.

`hash_index` knows where keys are, `rows` where their values lie, and `bags` is the module that
looks them up and trains them; `training` is what one batch does to it. `saving` and `tiers` are how
tables are kept and what stands behind them.
"""

from emblib.dynamic.hash_table import HashTable, Insertion, TableRows
from emblib.dynamic.keys import KeyStatus
from emblib.dynamic.module import DynamicEmbeddingBags
from emblib.dynamic.tiers.disk import DiskRows
from emblib.dynamic.tiers.host import HostRows
from emblib.dynamic.tiers.module import TieredEmbeddingBags
from emblib.dynamic.tiers.sqlite import SqliteRows
from emblib.dynamic.tiers.store import (
    Found,
    Rows,
    RowStore,
    StoredTable,
    TierMode,
    Tiers,
    TierStats,
)

__all__ = [
    "DiskRows",
    "DynamicEmbeddingBags",
    "Found",
    "HashTable",
    "HostRows",
    "Insertion",
    "KeyStatus",
    "RowStore",
    "Rows",
    "SqliteRows",
    "StoredTable",
    "TableRows",
    "TierMode",
    "TierStats",
    "TieredEmbeddingBags",
    "Tiers",
]
