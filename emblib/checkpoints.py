"""Building blocks of dynamic tables' checkpoints, for users who write or read them by hand.

Most users need only the methods of `emblib.DynamicEmbeddingBags`: `state_dict`, `dump`,
`load_dump`, `changes`, `apply_changes`, `table_entries`, `set_table_entries`, `dump_snapshot`,
`load_snapshot`, `dump_dynamicemb` and `load_dynamicemb`. This module has what they take and return,
and what spreads a checkpoint over ranks. See docs/checkpoints.md.
"""

from emblib.dynamic.keys import owner
from emblib.dynamic.saving.checkpoint import ChangeSet
from emblib.dynamic.saving.dump_tables import Header, read_header
from emblib.dynamic.saving.dumps import DumpError, Part, Progress
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
    "ChangeSet",
    "Changes",
    "DumpError",
    "Entries",
    "Header",
    "Loaded",
    "Part",
    "Progress",
    "as_part",
    "combine",
    "concatenate",
    "empty_parts",
    "join_parts",
    "owner",
    "read_header",
    "resized",
]
