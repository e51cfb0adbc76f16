"""Checkpoints of dynamic tables, beyond the methods of `emblib.DynamicEmbeddingBags`.

The module exports the types of dumps, changes and table entries, functions that read and write the
entries of one table or files of DynamicEmb, and functions that divide a checkpoint over ranks. See
docs/checkpoints.md.
"""

from emblib.dynamic.keys import owner
from emblib.dynamic.saving.checkpoint import set_table_entries, table_entries
from emblib.dynamic.saving.dump_tables import Header, read_header
from emblib.dynamic.saving.dumps import DumpError, DumpProgress, Part
from emblib.dynamic.saving.dynamicemb import load_dynamicemb, save_dynamicemb
from emblib.dynamic.saving.entries import (
    Changes,
    Entries,
    as_part,
    combine,
    concatenate,
    empty_parts,
    join_parts,
    resized,
)
from emblib.dynamic.saving.loading import Loaded

__all__ = [
    "Changes",
    "DumpError",
    "DumpProgress",
    "Entries",
    "Header",
    "Loaded",
    "Part",
    "as_part",
    "combine",
    "concatenate",
    "empty_parts",
    "join_parts",
    "load_dynamicemb",
    "owner",
    "read_header",
    "resized",
    "save_dynamicemb",
    "set_table_entries",
    "table_entries",
]
