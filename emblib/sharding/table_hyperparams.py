"""Compare the hyperparameters of tables that several ranks update.

Every rank updates its shards and replicas with its own learning rate and other hyperparameters. A
scheduler that steps on one rank only would let replicas drift apart, and train the shards of one
table at different rates. So for tensors in host memory the header of the gradients
(`gradient_headers`) has a digest of them per set of ranks that share tables. If digests differ, all
ranks raise before anything is updated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from emblib.columns import Hyper
from emblib.ops.autograd import is_fused
from emblib.optim import Counter, Optimizer
from emblib.sharding import fingerprint
from emblib.sharding.headers import Headers
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import ParameterSharding
from emblib.storage.base import TrainedModule, has_hyperparams

_ITEM = 8  # bytes of a float64


class TableHyperparams:
    """The hyperparameters of those tables of a collection that several ranks update.

    Not compared are optimizers of the user (`External`). Of shards neither are the step, which
    counts the updates of all tables in a module together, so that it depends on the plan once
    tables are frozen, the seed, and the largest count of a `Counter`, which is measured.

    Args:
        plan: the sharding of each table, by name.
        modules: pairs of a table and a module with a shard or replica of it on this rank.
        ranks: the processes.

    Attributes:
        tables: the tables by the ranks that share them, at least two; the same on all ranks.
    """

    def __init__(
        self,
        plan: Mapping[str, ParameterSharding],
        modules: Iterable[tuple[str, Any]],
        ranks: RankGroup,
    ) -> None:
        self.tables: dict[tuple[int, ...], list[str]] = {}
        for table, sharding in plan.items():
            owners = set(range(ranks.size))
            if not sharding.is_replicated:
                owners = {shard.rank for shard in sharding.shards}
            if len(owners) > 1:
                self.tables.setdefault(tuple(sorted(owners)), []).append(table)
        self._replicated = {table for table, sharding in plan.items() if sharding.is_replicated}
        self._modules: dict[str, TrainedModule] = {
            table: module
            for table, module in modules
            if has_hyperparams(module) and is_fused(module.optimizer)
        }

    def digests(self) -> list[int]:
        """Return a digest for each entry of `tables`; 0 where this rank is not among its ranks."""
        numbers: dict[tuple[int, bool], bytes] = {}  # tables of one module have the same
        digests = []
        for tables in self.tables.values():
            compared = []
            for table in tables:
                module = self._modules.get(table)
                if module is None:
                    continue
                key = id(module), table in self._replicated
                if key not in numbers:
                    numbers[key] = self._bytes_to_compare(module, is_replica=key[1])
                compared.append(numbers[key])
            digest = hashlib.blake2b(b"".join(compared), digest_size=7)  # fits into int64
            digests.append(int.from_bytes(digest.digest()))
        return digests

    def by_table(self) -> dict[str, bytes]:
        """Return what must be equal in all replicas of each table on this rank, by name."""
        return {
            table: self._bytes_to_compare(module, is_replica=False)
            for table, module in self._modules.items()
        }

    @staticmethod
    def _bytes_to_compare(module: TrainedModule, *, is_replica: bool) -> bytes:
        """Return the hyperparameters that must be equal on all ranks with a shard or replica."""
        if module.hyperparams.is_meta:
            return b""
        numbers = module.hyperparams.numpy().tobytes()
        optimizer = module.optimizer
        if not is_replica:
            has_count = isinstance(getattr(optimizer, "counter", None), Counter)
            numbers = (
                numbers[: Hyper.STEP * _ITEM]
                + numbers[Hyper.L2 * _ITEM : Hyper.SEED * _ITEM]
                + numbers[Hyper.OPTIMIZER_ARGS * _ITEM : len(numbers) - has_count * _ITEM]
            )
        # Two fields of optimizers are not among the numbers.
        return numbers + f"{optimizer.max_gradient} {optimizer.maximize}".encode()

    def description(self) -> fingerprint.Description:
        """Describe the optimizers of the tables, as they are now, for an error message."""
        return {
            f"table {table}": {"optimizer": _current_optimizer(module)}
            | ({"step": int(module.hyperparams[Hyper.STEP])} if table in self._replicated else {})
            for table, module in self._modules.items()
        }


def _current_optimizer(module: TrainedModule) -> Optimizer:
    """Return the optimizer of a module with its current learning rate."""
    return replace(module.optimizer, lr=float(module.hyperparams[Hyper.LEARNING_RATE]))


def local_digests(collections: Sequence[TableHyperparams | None], ranks: RankGroup) -> list[int]:
    """Return the numbers for the header of the gradients: digests of several collections.

    There are none on a GPU, and no more than fit into a header; tables beyond are not compared.
    """
    if ranks.device.type != "cpu":
        return []
    digests = [
        digest for collection in collections if collection for digest in collection.digests()
    ]
    return digests[: Headers.MAX_NUMBERS]


def check_digests(
    collections: Sequence[TableHyperparams | None],
    by_rank: Sequence[Sequence[int]] | None,
    ranks: RankGroup,
) -> None:
    """Compare the digests of all ranks, which have called `local_digests` for equal collections.

    Args:
        collections: the collections, in the order of the digests.
        by_rank: the digests of each rank.
        ranks: the processes.

    Raises:
        RuntimeError: hyperparameters differ between ranks; on every rank.
    """
    compared = [collection for collection in collections if collection]
    owners = [owners for collection in compared for owners in collection.tables]
    columns = list(zip(*by_rank or (), strict=True))
    if all(len({column[r] for r in rs}) == 1 for rs, column in zip(owners, columns, strict=False)):
        return
    _raise_differences(compared, ranks)


def check_replicas(collections: Mapping[str, TableHyperparams], ranks: RankGroup) -> None:
    """Compare the tables that several ranks have, in whichever groups of ranks; a collective.

    Args:
        collections: collections of the model, by path.
        ranks: the processes.

    Raises:
        RuntimeError: hyperparameters differ between ranks; on every rank.
    """
    by_rank = ranks.gather_objects({path: c.by_table() for path, c in collections.items()})
    seen: dict[tuple[str, str], bytes] = {}
    for tables_by_path in by_rank:
        for path, tables in tables_by_path.items():
            for table, values in tables.items():
                if seen.setdefault((path, table), values) != values:
                    _raise_differences(list(collections.values()), ranks)


def _raise_differences(collections: Sequence[TableHyperparams], ranks: RankGroup) -> None:
    """Raise an error that names the differences; all ranks call this."""
    description = fingerprint.merge_descriptions(*(c.description() for c in collections))
    differences = fingerprint.differences_where_present(ranks, description)
    raise RuntimeError(
        "learning rates and other hyperparameters of a table must be the same on all ranks, and "
        f"are not: {'; '.join(differences)}. Set them on all ranks alike, and step schedulers on "
        "all of them. These tables have not changed"
    )
