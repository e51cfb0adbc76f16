"""The planner's input: the tables of a model, their lookups per step, and limits on their plan.

Users write `TableConstraints` and a `Reservation`; `workloads_of` makes a `TableWorkload` of each
table of a model.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from emblib.collections.configs import TableConfig
from emblib.collections.optimizers.in_backward import trained_configs
from emblib.optim import Optimizer
from emblib.sharding.planner.topology import refuse_old_names
from emblib.sharding.shard import collections_of
from emblib.sharding.sharding_types import ShardingType
from emblib.specs import check_bool, check_count
from emblib.storage import Dense, MemoryBytes, Storage


@dataclass(frozen=True)
class TableConstraints:
    """Limits on how the planner may shard a table, and facts about its lookups.

    Args:
        sharding_types: allowed types; by default all that change no result (see `docs/planner.md`).
        storages: storages that the table may have if no plan fits with its configured storage:
            `TensorTrain(...)` or `Dense(Placement....)`, in order of preference; none by default.
        pooling_factor: mean number of ids per bag; one number, or one per feature of the table.
        batch_size: examples per rank; None for the `batch_size` of the planner.
        min_partition: minimum number of columns of a column shard.

    Raises:
        TypeError: `sharding_types` is a single string or no sequence, `storages` has an entry that
            is neither `TensorTrain` nor `Dense`, `batch_size` or `min_partition` is not an int, or
            a pooling factor is not a number.
        ValueError: `sharding_types` is empty or has an unknown type; a pooling factor is negative
            or not finite, or there is none; `batch_size` or `min_partition` is below 1.
    """

    sharding_types: tuple[ShardingType, ...] | None = None
    storages: tuple[Storage, ...] = ()
    pooling_factor: float | tuple[float, ...] = 1.0
    batch_size: int | None = None
    min_partition: int = 16

    def __post_init__(self) -> None:
        if self.sharding_types is not None:
            if isinstance(self.sharding_types, str):  # the members are strings, too
                raise TypeError(
                    f"sharding_types must be a sequence, got {self.sharding_types!r}: write "
                    f"({self.sharding_types!r},)"
                )
            types = tuple(map(ShardingType, self.sharding_types))
            if not types:
                raise ValueError("sharding_types must have at least one type; None allows any")
            object.__setattr__(self, "sharding_types", types)
        storages = self.storages
        storages = (storages,) if isinstance(storages, Storage) else tuple(storages)
        if not all(isinstance(storage, Storage) and storage.is_alternative for storage in storages):
            raise TypeError(
                "storages must be TensorTrain(ranks) or Dense(placement) each, e.g. "
                f"(TensorTrain((16, 16)),), got {self.storages!r}"
            )
        object.__setattr__(self, "storages", storages)
        check_count("min_partition", self.min_partition)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        factors = self.pooling_factor
        factors = factors if isinstance(factors, tuple | list) else (factors,)
        if not factors or not all(0 <= factor < math.inf for factor in factors):
            raise ValueError(
                f"pooling_factor must be a finite number >= 0, got {self.pooling_factor!r}"
            )


@dataclass(frozen=True)
class TableWorkload:
    """One table of one collection and its lookups in a step.

    Attributes:
        path: path of the collection in the model; "" for the model itself.
        config: configuration of the table.
        optimizer: optimizer of the table; None if it is not trained in backward.
        is_weighted: whether each id has a weight.
        batch_size: examples per rank.
        ids_per_example: mean ids of an example, summed over the features of the table.
        constraints: limits on the sharding of the table.
        readers: workloads of the other collections that read a shared table; their own `readers`
            are empty.

    Raises:
        TypeError: `is_weighted` is not a bool.
    """

    path: str
    config: TableConfig
    optimizer: Optimizer | None
    is_weighted: bool
    batch_size: int
    ids_per_example: float
    constraints: TableConstraints = field(default=TableConstraints())
    readers: tuple["TableWorkload", ...] = ()

    def __post_init__(self) -> None:
        check_bool("is_weighted", self.is_weighted)

    @property
    def by_reader(self) -> tuple["TableWorkload", ...]:
        """Return the workload of each collection that reads the table, this one first."""
        return (self, *self.readers)

    @property
    def name(self) -> str:
        """Return the table's name after the path of its collection: `path.name`, or `name`."""
        return f"{self.path}.{self.config.name}" if self.path else self.config.name

    @property
    def num_features(self) -> int:
        """Return the number of features that read the table."""
        return len(self.config.feature_names)

    if not TYPE_CHECKING:
        __getattr__ = refuse_old_names(
            {"lookups": "by_reader", "batch": "batch_size", "ids": "ids_per_example"}
        )


@dataclass(frozen=True)
class Reservation:
    """Memory that is not for tables.

    Args:
        share: fraction of the memory of every rank (device, host and disk), for the allocator,
            kernels and everything else.
        nbytes: bytes of the device memory of every rank, in addition.
        dense_copies: number of copies of the dense parameters: by default weights, gradients and
            two moments.
        batches: batches in flight: 1 in a plain loop, 2 if the next batch is distributed during a
            step.

    Raises:
        TypeError: `nbytes` or `batches` is not an int, or another value is not a number.
        ValueError: `share` is not in [0, 1), `batches` is below 1, or another number is negative
            or not finite.
    """

    share: float = 0.1
    nbytes: int = 0
    dense_copies: float = 4.0
    batches: int = 1

    def __post_init__(self) -> None:
        if not 0.0 <= self.share < 1.0:
            raise ValueError(f"share must be in [0, 1), got {self.share}")
        check_count("nbytes", self.nbytes, minimum=0)
        check_count("batches", self.batches)
        if not 0 <= self.dense_copies < math.inf:
            raise ValueError(f"dense_copies must be finite and >= 0, got {self.dense_copies}")

    def left(self, capacity: MemoryBytes, dense_bytes: int) -> MemoryBytes:
        """Return the memory that is left for tables and batches on a rank, in bytes.

        Of host memory and disk only `share` is reserved. Device memory is negative if more is
        reserved than the rank has.

        Args:
            capacity: memory of the rank.
            dense_bytes: bytes of the dense parameters.
        """
        memory = capacity.times(1.0 - self.share)
        return memory._replace(device=memory.device - self.nbytes - self.dense_copies * dense_bytes)


def workloads_of(
    module: nn.Module,
    batch_size: int,
    constraints: Mapping[str, TableConstraints],
    optimizer: Optimizer | None = None,
) -> list[TableWorkload]:
    """Return the workloads of a model's tables, in the order of its collections.

    A shared table is one workload of the first collection that reads it; the workloads of the other
    collections are its `readers`.

    Args:
        module: the model, which has unsharded collections.
        batch_size: examples per rank, for tables whose constraints have no `batch_size`.
        constraints: constraints by table name or by `path.name`. If a table has both, those by
            `path.name` are used.
        optimizer: optimizer of tables whose configuration has none; None is the optimizer of their
            collection.

    Raises:
        TypeError: `module` is not a module, or `optimizer` is not an emblib optimizer.
        ValueError: the model has no collections with tables; constraints name an unknown table;
            constraints of a shared table allow another storage than `Dense`, or have other
            `sharding_types`, `storages` or `min_partition` in another collection; a
            `pooling_factor` has more or fewer entries than the table has features.
    """
    workloads: list[TableWorkload] = []
    index_by_table_id: dict[int, int] = {}  # index in `workloads`, by id() of a shared table
    names = set()
    for path, collection in collections_of(module).items():
        any_collection: Any = collection
        shared_tables = any_collection.shared_tables()
        for config in trained_configs(collection, optimizer):
            full_name = f"{path}.{config.name}" if path else config.name
            names |= {config.name, full_name}
            table_constraints = constraints.get(
                full_name, constraints.get(config.name, TableConstraints())
            )
            workload = _workload_of(
                path,
                collection,
                config,
                table_constraints,
                batch_size,
                config.optimizer or optimizer or any_collection.optimizer,
            )
            index = len(workloads)
            if config.name in shared_tables:
                index = index_by_table_id.setdefault(id(shared_tables[config.name]), index)
                _check_shared(workload, workloads[index] if index < len(workloads) else workload)
            if index < len(workloads):
                first_reader = workloads[index]
                workloads[index] = replace(first_reader, readers=(*first_reader.readers, workload))
            else:
                workloads.append(workload)
    if not workloads:
        raise ValueError(
            "the model has no tables in an EmbeddingBagCollection or EmbeddingCollection, and so "
            "nothing to plan"
        )
    unknown_names = constraints.keys() - names
    if unknown_names:
        raise ValueError(
            f"constraints for tables that are not there: {sorted(unknown_names)}; have "
            f"{sorted(names)}"
        )
    return workloads


def _check_shared(workload: TableWorkload, first_reader: TableWorkload) -> None:
    """Raise ValueError unless constraints of a shared table fit those of its first reader.

    `workload` is the table as one collection reads it, `first_reader` as the first collection does;
    both are the same for the first collection.
    """
    constraints, first_constraints = workload.constraints, first_reader.constraints
    if not all(type(storage) is Dense for storage in constraints.storages):
        raise ValueError(
            f"storages of the shared table {workload.name} must be Dense(placement) each, got "
            f"{constraints.storages}: leave the others out"
        )
    for name in ("sharding_types", "storages", "min_partition"):
        if getattr(constraints, name) != getattr(first_constraints, name):
            raise ValueError(
                f"{first_reader.name} and {workload.name} are one shared table, but their "
                f"constraints have {name} {getattr(first_constraints, name)} and "
                f"{getattr(constraints, name)}: "
                f"give them the same, or one constraint for {workload.config.name!r}"
            )


def _workload_of(
    path: str,
    collection: Any,
    config: TableConfig,
    constraints: TableConstraints,
    batch_size: int,
    optimizer: Optimizer | None,
) -> TableWorkload:
    """Return the workload of one table; ValueError for a wrong number of pooling factors."""
    factors, num_features = constraints.pooling_factor, len(config.feature_names)
    if isinstance(factors, tuple | list) and len(factors) != num_features:
        raise ValueError(
            f"pooling_factor of {config.name!r} must be one number, or one per feature = "
            f"{num_features}, got {len(factors)}"
        )
    num_ids = sum(factors) if isinstance(factors, tuple | list) else factors * num_features
    is_weighted = getattr(collection, "is_weighted", None)  # collections of bags have it
    return TableWorkload(
        path,
        config,
        optimizer,
        bool(is_weighted()) if callable(is_weighted) else False,
        constraints.batch_size or batch_size,
        float(num_ids),
        constraints,
    )


def any_is_weighted(workloads: Iterable[TableWorkload]) -> bool:
    """Return whether any collection that reads one of the tables sends weights with its ids."""
    return any(reader.is_weighted for workload in workloads for reader in workload.by_reader)


def dense_bytes(module: nn.Module) -> int:
    """Return the bytes of the parameters and buffers of a model outside its collections."""
    tensors_of_tables = {
        id(tensor)
        for collection in collections_of(module).values()
        for tensor in (*collection.parameters(), *collection.buffers())
    }
    return sum(
        tensor.nbytes
        for tensor in (*module.parameters(), *module.buffers())
        if id(tensor) not in tensors_of_tables
    )
