"""Four processes that save and load dynamic tables with torch.distributed.checkpoint.

`python -m tests.dynamic.dynamic_ranks all DIRECTORY SEED` prints a line for every number of ranks
that saved and number of ranks that loaded. It fails if a key is not with exactly one rank then, or
if anything of it is another.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from emblib.dynamic import keys
from emblib.dynamic.saving import entries
from tests.dynamic.dynamic_cases import admitting, assert_same_states, trained
from tests.tables.kills import fork

WORLD = 4


def save(directory: Path, ranks: int, group: dist.ProcessGroup) -> None:
    """Rank r of `ranks` has the keys it owns."""
    rank = dist.get_rank()
    whole = trained(admitting(4096), 6).state_dict()
    mine = admitting(4096)
    mine.load_state_dict(entries.combine([whole], rank, ranks))
    part = entries.as_part(mine.state_dict(), rank, ranks)
    dcp.save(part, checkpoint_id=directory / str(ranks), process_group=group)


def load(directory: Path, ranks: int, saved: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
    """What a rank of `ranks` has after loading what `saved` ranks saved."""
    rank, path = dist.get_rank(), directory / str(saved)
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    parts = entries.empty_parts(metadata, rank, ranks)
    dcp.load(parts, checkpoint_id=path, process_group=group)
    mine = admitting(4096)
    mine.load_state_dict(entries.join_parts(parts, rank, ranks))
    state = dict(mine.state_dict())
    assert bool((keys.owner(state["items.keys"], ranks) == rank).all())
    return state


def work(directory: Path, rank: int) -> None:
    """What one process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/meeting", rank=rank, world_size=WORLD)
    groups = [dist.new_group(list(range(ranks))) for ranks in range(1, WORLD + 1)]
    for ranks, group in enumerate(groups, 1):
        if rank < ranks:
            save(directory, ranks, group)
        dist.barrier()
    whole = dict(trained(admitting(4096), 6).state_dict())
    for saved in range(1, WORLD + 1):
        for ranks, group in enumerate(groups, 1):
            if rank >= ranks:
                continue
            mine = load(directory, ranks, saved, group)
            found: list[dict[str, Tensor] | None] = [None] * ranks
            dist.all_gather_object(found, mine, group)
            if rank == 0:
                joined = entries.combine([part for part in found if part], 0, 1)
                assert_same_states(whole, joined)
                print(f"{saved} -> {ranks}: same", flush=True)
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """See the module."""
    directory = Path(sys.argv[2])
    directory.mkdir()
    torch.set_num_threads(1)
    children = [fork(lambda rank=rank: work(directory, rank)) for rank in range(WORLD)]
    statuses = [os.waitpid(child, 0)[1] for child in children]
    assert statuses == [0] * WORLD, f"processes ended with {statuses}"


if __name__ == "__main__":
    main()
