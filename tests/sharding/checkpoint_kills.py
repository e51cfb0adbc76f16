"""Kills processes that save a checkpoint, and looks at what is there: the old one or the new.

`python -m tests.sharding.checkpoint_kills calls DIRECTORY SEED` prints what it did.
"""

import itertools
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from emblib.sharding import checkpoints
from emblib.sharding.checkpoints import CheckpointError, ShardedTable
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import Shard
from tests.tables.kills import SelfKill, killed_at_call

assert dcp  # so that no fork imports it
ROWS = 40
WATCHED = ((os, "fsync"), (os, "replace"), (Path, "unlink"), (Path, "open"), (torch, "save"))


def state(number: int) -> dict[str, object]:
    """That of checkpoint `number`; no two are alike."""
    rows = torch.full((ROWS, 3), float(number))
    table = ShardedTable((ROWS, 3), [Shard(0, (0, ROWS), (0, 3))], {0: rows}, _alone(), rows.dtype)
    return {"table": table, "step": number}


def _alone() -> RankGroup:
    return RankGroup.single()


def check(path: Path, old: int, new: int) -> str:
    """What is in the directory: checkpoint `old` (0: none) or `new`, whole."""
    found = state(-1)
    try:
        checkpoints.load(found, path, _alone())
    except CheckpointError:
        assert not old, "the old checkpoint is lost"
        return "absent"
    number = found["step"]
    assert number in (old, new), f"found {number}, was {old}, under way {new}"
    table = found["table"]
    assert isinstance(table, ShardedTable)
    assert torch.equal(table.parts[0], torch.full((ROWS, 3), float(number)))
    return "new" if number == new else "old"


def at_calls(path: Path) -> Counter[str]:
    """Killed before and after every single call by which a save changes a file."""
    done = Counter[str]()
    for where, old in (("before", 0), ("before", 1), ("after", 1)):
        for call in itertools.count(1):
            shutil.rmtree(path, ignore_errors=True)
            if old:
                checkpoints.save(state(old), path, _alone())
            kill = SelfKill(call, where)

            def save_watched(kill: SelfKill = kill) -> None:
                for owner, name in WATCHED:
                    kill.watch(owner, name)
                checkpoints.save(state(2), path, _alone())

            killed = killed_at_call(save_watched)
            done[check(path, old, 2)] += 1
            if not killed:
                break
            done[where] += 1
            checkpoints.save(state(3), path, _alone())
            assert check(path, 0, 3) == "new"
            left = sorted(file.name for file in path.iterdir())
            assert len(left) == 2, f"files of killed writers stay: {left}"
    return done


def main() -> None:
    """See the module."""
    torch.set_num_threads(1)
    assert sys.argv[1] == "calls"
    done = at_calls(Path(sys.argv[2]))
    for what in ("absent", "old", "new", "before", "after"):
        print(what, done[what])


if __name__ == "__main__":
    main()
