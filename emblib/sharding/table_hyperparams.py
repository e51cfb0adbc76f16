"""Compare the hyperparameters of tables that several ranks update.

Every rank updates its shards and replicas with its own learning rate and other hyperparameters. A
scheduler that steps on one rank only, or a table that is frozen on one rank only, would let
replicas drift apart, and train the shards of one table at different rates. So in host memory the
header of the gradients (`gradient_headers`) has a digest of the hyperparameters, and of what is
frozen, for each set of ranks that share tables. If digests differ, all ranks raise before any table
is updated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from emblib.collections.fused_states import RemoteOptimizer
from emblib.columns import Hyper
from emblib.ops.autograd import is_fused
from emblib.optim import Counter, Optimizer
from emblib.sharding import fingerprint
from emblib.sharding.headers import Headers
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import ParameterSharding
from emblib.specs import check_bool
from emblib.storage import TableHandle
from emblib.storage.base import TrainedModule, has_hyperparams


class TableHyperparams:
    """The hyperparameters of those tables of a collection that several ranks update.

    Optimizers of the user (`External`) are not compared. Of shards these numbers are not compared:
    the step, which counts the updates of all tables in a module together, so that it depends on the
    plan once tables are frozen; the seed; and the largest count of a `Counter`, which is measured.

    Args:
        plan: the sharding of each table, by name.
        modules: table, module and handle of each shard or replica on this rank.
        ranks: the processes.
        optimizers: the optimizer of each table, by name; None for a table without one.
        bounded_means: tables whose gradients are clipped by the ranks that own the bags.

    Attributes:
        tables: names of the tables, by the ranks that share them, ascending and at least two; the
            same on all ranks.
        remotes: the optimizers of tables without a shard on this rank, and of those whose optimizer
            is not fused, by name.
        owners: the ranks whose digests are compared, per entry of `digests`; the same on all ranks.
    """

    def __init__(
        self,
        plan: Mapping[str, ParameterSharding],
        modules: Iterable[tuple[str, Any, TableHandle]],
        ranks: RankGroup,
        optimizers: Mapping[str, Optimizer | None],
        bounded_means: Iterable[str],
    ) -> None:
        self.tables: dict[tuple[int, ...], list[str]] = {}
        for table, sharding in plan.items():
            owners = set(range(ranks.size))
            if not sharding.is_replicated:
                owners = {shard.rank for shard in sharding.shards}
            if len(owners) > 1:
                self.tables.setdefault(tuple(sorted(owners)), []).append(table)
        self._replicated = {table for table, sharding in plan.items() if sharding.is_replicated}
        self._modules: dict[str, TrainedModule] = {}
        self._handles: dict[str, TableHandle] = {}
        for table, module, handle in modules:
            if has_hyperparams(module) and is_fused(module.optimizer):
                self._modules[table], self._handles[table] = module, handle
        self.remotes = {
            table: RemoteOptimizer(optimizer)
            for table, optimizer in optimizers.items()
            if optimizer is not None and table not in self._modules
        }
        # Tables with bounds that all ranks apply, and that some rank has no shard of.
        all_ranks = tuple(range(ranks.size))
        compared_by_all = self.tables.get(all_ranks, ())
        self._bounded_means = [table for table in bounded_means if table not in compared_by_all]
        self.owners = [*self.tables, *([all_ranks] if self._bounded_means else [])]

    def optimizer_of(self, table: str) -> Optimizer | None:
        """Return the current optimizer of a table; None if it has none."""
        module = self._modules.get(table) or self.remotes.get(table)
        return None if module is None else module.optimizer

    def _bound_of(self, table: str) -> float | None:
        return getattr(self.optimizer_of(table), "max_gradient", None)

    def digests(self) -> list[int]:
        """Return a digest for each entry of `owners`, below 2^56.

        `check_digests` ignores the digest of a rank that is not among the ranks of the entry.
        """
        bytes_by_module: dict[tuple[int, bool], bytes] = {}  # equal for all tables of a module
        digests = []
        for tables in self.tables.values():
            byte_strings = []
            for table in tables:
                module = self._modules.get(table)
                if module is None:
                    continue
                key = id(module), table in self._replicated
                if key not in bytes_by_module:
                    bytes_by_module[key] = self._bytes_to_compare(module, is_replica=key[1])
                byte_strings += [bytes_by_module[key], *self._frozen_parameters(table)]
            digests.append(_digest(b"".join(byte_strings)))
        if self._bounded_means:
            digests.append(_digest(repr(list(map(self._bound_of, self._bounded_means))).encode()))
        return digests

    def bytes_by_table(self) -> dict[str, bytes]:
        """Return the hyperparameters that all replicas of a table share, by table of this rank."""
        return {
            table: b"".join(
                [self._bytes_to_compare(module, is_replica=False), *self._frozen_parameters(table)]
            )
            for table, module in self._modules.items()
        }

    def _frozen_parameters(self, table: str) -> list[bytes]:
        """Return the names of the frozen parameters of a table on this rank."""
        handle = self._handles[table]
        if not getattr(handle.module, "frozen_tables", ()):  # usually, and soon known
            return []
        parameters = handle.named_parameters()
        return [name.encode() for name, parameter in parameters if not parameter.requires_grad]

    @staticmethod
    def _bytes_to_compare(module: TrainedModule, *, is_replica: bool) -> bytes:
        """Return the hyperparameters that must be equal on all ranks, as bytes; b"" on meta.

        For a replica these are all of them, for a shard those that the class docstring says.
        """
        if module.hyperparams.is_meta:
            return b""
        numbers, optimizer = module.hyperparams.numpy(), module.optimizer
        compared_slices = [slice(None)]
        if not is_replica:
            has_count = isinstance(getattr(optimizer, "counter", None), Counter)
            compared_slices = [
                slice(0, Hyper.STEP),
                slice(Hyper.L2, Hyper.SEED),
                slice(Hyper.OPTIMIZER_ARGS, len(numbers) - has_count),
            ]
        # `hyperparams` lacks two fields of optimizers.
        fields = f"{optimizer.max_gradient} {optimizer.maximize}".encode()
        return b"".join(
            [*(numbers[compared_slice].tobytes() for compared_slice in compared_slices), fields]
        )

    def description(self) -> fingerprint.Description:
        """Describe the current optimizers of the tables on this rank, for an error message."""
        return {
            f"table {table}": {"optimizer": {"max_gradient": self._bound_of(table)}}
            for table in self._bounded_means
        } | {
            f"table {table}": {
                "optimizer": _current_optimizer(module),
                "is_frozen": bool(self._frozen_parameters(table)),
            }
            | ({"step": int(module.hyperparams[Hyper.STEP])} if table in self._replicated else {})
            for table, module in self._modules.items()
        }


def _digest(text: bytes) -> int:
    """Return a digest that fits into int64."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest())


def _current_optimizer(module: TrainedModule) -> Optimizer:
    """Return the optimizer of a module with its current learning rate."""
    return replace(module.optimizer, lr=float(module.hyperparams[Hyper.LEARNING_RATE]))


def local_digests(collections: Sequence[TableHyperparams | None], ranks: RankGroup) -> list[int]:
    """Return the digests of several collections, as numbers for the header of the gradients.

    None stands for a collection without digests. On a GPU there are none. Digests that do not fit
    into a header are left out, so their tables are not compared.
    """
    if ranks.device.type != "cpu":
        return []
    digests = [
        digest for collection in collections if collection for digest in collection.digests()
    ]
    return digests[: Headers.MAX_NUMBERS]


def check_digests(
    collections: Sequence[TableHyperparams | None],
    digests_by_rank: Sequence[Sequence[int]] | None,
    ranks: RankGroup,
) -> None:
    """Compare the digests of all ranks; a collective if they differ, so all ranks call this.

    Args:
        collections: the collections that `local_digests` got.
        digests_by_rank: the result of `local_digests` on each rank; None compares nothing.
        ranks: the processes.

    Raises:
        RuntimeError: hyperparameters differ between ranks; on every rank.
    """
    compared_collections = [collection for collection in collections if collection]
    # By entry of `owners`: the ranks of the entry, and the digests of all ranks.
    owners_by_entry = chain.from_iterable(collection.owners for collection in compared_collections)
    digests_by_entry = zip(*digests_by_rank or (), strict=True)
    for owner_ranks, digests in zip(owners_by_entry, digests_by_entry, strict=False):
        if len({digests[rank] for rank in owner_ranks}) > 1:
            _raise_differences(compared_collections, ranks)


def check_replicas(
    collections: Mapping[str, TableHyperparams], optimizer_states: Any, ranks: RankGroup
) -> None:
    """Compare the hyperparameters of each table among all ranks that have it; all ranks call this.

    Args:
        collections: collections of the model, by path.
        optimizer_states: a bool, which all ranks must have alike.
        ranks: the processes.

    Raises:
        RuntimeError: hyperparameters differ between ranks; on every rank.
        ValueError, TypeError: `optimizer_states` differs between ranks, or is not a bool on one of
            them; on every rank.
    """
    local_bytes = {path: collection.bytes_by_table() for path, collection in collections.items()}
    bytes_and_flags = ranks.gather_objects((local_bytes, optimizer_states))
    bytes_by_rank, flags = zip(*bytes_and_flags, strict=True)
    for flag in flags:
        check_bool("optimizer_states", flag)
    if len(set(flags)) > 1:
        raise ValueError(
            f"optimizer_states must be the same on all ranks, got {list(flags)}: nothing was "
            "averaged"
        )
    first_values: dict[tuple[str, str], bytes] = {}
    for tables_by_path in bytes_by_rank:
        for path, bytes_by_table in tables_by_path.items():
            for table, hyperparam_bytes in bytes_by_table.items():
                if first_values.setdefault((path, table), hyperparam_bytes) != hyperparam_bytes:
                    _raise_differences(list(collections.values()), ranks)


def _raise_differences(collections: Sequence[TableHyperparams], ranks: RankGroup) -> None:
    """Raise an error that names the differences; all ranks call this."""
    description = fingerprint.merge_descriptions(
        *(collection.description() for collection in collections)
    )
    differences = fingerprint.differences_where_present(ranks, description)
    raise RuntimeError(
        "learning rates and other hyperparameters of a table must be the same on all ranks, and "
        f"are not: {'; '.join(differences)}. Set them on all ranks alike (those without a shard "
        "have param_groups of a FusedOptimizer too), and step schedulers and freeze tables on all "
        "of them. These tables have not changed"
    )
