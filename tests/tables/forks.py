"""What forked processes do with modules whose tables are cached: `python -m tests.tables.forks`.

Runs in a process of its own with one thread: a fork of one that has threads of OpenMP may hang.
"""

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emblib import CacheConfig, Placement, TableBatchedEmbeddingBags, TableSpec, optim
from tests.thread_cases import held_elsewhere, in_fork

ROWS, DIM = 96, 8


def make(directory: Path, placement: Placement) -> TableBatchedEmbeddingBags:
    """A table of which a third fits into the cache."""
    return TableBatchedEmbeddingBags(
        [TableSpec(ROWS, DIM, "t", placement)],
        optim.RowwiseAdagrad(0.5),
        cache=CacheConfig(sets=1, directory=directory if placement is Placement.DISK else None),
    )


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """Bags of one row each."""
    rows = torch.randint(ROWS, (12,), generator=torch.Generator().manual_seed(seed))
    return rows, torch.arange(13)


def train(module: TableBatchedEmbeddingBags, seed: int) -> None:
    module(*batch(seed)).sum().backward()


def a_fork_has_a_module_of_its_own(directory: Path) -> None:
    module = make(directory, Placement.MANAGED_CACHING)
    pending = module(*batch(1))
    before = [tensor.clone() for tensor in module.state_dict().values()]

    def work() -> None:
        pending.sum().backward()
        train(module, 2)
        assert module.step == 2
        module.flush()

    assert in_fork(work) == ""
    assert all(map(torch.equal, module.state_dict().values(), before))
    pending.sum().backward()
    assert module.step == 1


def a_fork_refuses_a_module_that_another_thread_was_in(directory: Path) -> None:
    module = make(directory, Placement.MANAGED_CACHING)

    def work() -> None:
        with pytest.raises(
            RuntimeError, match="another thread was using this module when the process forked"
        ):
            module(*batch(1))

    with held_elsewhere(module._lock):
        assert in_fork(work) == ""
    train(module, 1)


def a_fork_leaves_tables_on_disk_alone(directory: Path) -> None:
    module = make(directory, Placement.DISK)
    train(module, 1)
    module.flush()
    for step in range(2, 5):
        train(module, step)
    pending = module(*batch(5))
    assert module._memory.disk is not None
    saved = {name: tensor.clone() for name, tensor in module._checkpoint().items()}
    files = {path: path.read_bytes() for path in directory.iterdir()}
    assert files[directory / "journal"]

    def work() -> None:
        uses: list[Callable[[], object]] = [
            lambda: module(*batch(6)),
            lambda: module(*batch(5)),
            lambda: pending.sum().backward(),
            lambda: module.prefetch(*batch(7)),
            module.flush,
            module.table_weights,
            module.state_dict,
            module.reset_parameters,
            lambda: module.load_state_dict(saved),
        ]
        for grad in (torch.enable_grad(), torch.no_grad()):
            with grad:
                for use in uses[int(not torch.is_grad_enabled()) * 3 :]:
                    with pytest.raises(RuntimeError, match="a forked process"):
                        use()
        gc.collect()

    assert in_fork(work) == ""
    assert {path: path.read_bytes() for path in directory.iterdir()} == files
    pending.sum().backward()
    module.flush()
    after = module.table_weights()[0].clone()
    module._memory.disk.close()
    opened = make(directory, Placement.DISK)
    assert torch.equal(opened.table_weights()[0], after)


def main(directory: str) -> None:
    """All cases, one after the other."""
    torch.set_num_threads(1)
    for case in (
        a_fork_has_a_module_of_its_own,
        a_fork_refuses_a_module_that_another_thread_was_in,
        a_fork_leaves_tables_on_disk_alone,
    ):
        case(Path(directory))
        print(f"{case.__name__}: as promised")


if __name__ == "__main__":
    main(sys.argv[2])
