"""Save the tables of sharded collections as sharded tensors, and load these into the shards.

The storage of a table defines its tensors and how they are cut (`TensorLayout`). Rows of keyed
storage are saved by key instead (`KeyedTable`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from emblib.attribute_errors import shows_attribute_errors
from emblib.collections.fused_states import HYPER, FusedTableEntry, RemoteOptimizer
from emblib.collections.groups import TableGroups
from emblib.collections.optimizers.gradient_norms import GradientRanks
from emblib.columns import Hyper
from emblib.dynamic import DynamicTable, DynamicTables
from emblib.grad_mode import without_gradients
from emblib.ops import autograd
from emblib.optim import NO_UPDATE, Optimizer
from emblib.sharding.checkpoints import keyed, sharded_table
from emblib.sharding.checkpoints.sharded_table import RowStates, ShardedTable
from emblib.sharding.parameters import gradient_ranks_of
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import ParameterSharding, Shard
from emblib.sharding.shared_shards import SharedShards
from emblib.storage.base import Storage, TensorLayout
from emblib.tables import hyperparameters, state_dicts


@dataclass
class TableTensor:
    """One tensor of a table: its shards, and the memory of those on this rank.

    Attributes:
        size: shape of the full tensor.
        dtype: dtype of the tensor.
        shards: shards of all ranks; empty if every rank has a replica of the table. Each shard of a
            tensor without regions, e.g. hyperparameters, is a full copy.
        ranks: the ranks of the collection.
        memory: tensors of each local shard, by its number in `shards`, 0 for a replica. A shard has
            several tensors if several slices have copies of it. Empty on a rank without shards.
        cuts: columns at which a row-wise state is cut, see `RowStates`; None for other tensors.
    """

    size: tuple[int, ...]
    dtype: torch.dtype
    shards: tuple[Shard, ...]
    ranks: RankGroup
    memory: dict[int, list[Tensor]] = field(default_factory=dict)
    cuts: tuple[int, ...] | None = None

    def value(self) -> Tensor:
        """Return the value for state dicts: a `ShardedTable` over the memory, or the replica.

        `RowStates` may be copies of the memory.
        """
        if not self.shards:
            return self.memory[0][0]
        local_values = {number: tensors[0] for number, tensors in self.memory.items()}
        if self.cuts is None:
            return ShardedTable(self.size, self.shards, local_values, self.ranks, self.dtype)
        local_values = {
            number: value.view(-1, 1).expand(self.shards[number].shape).contiguous()
            for number, value in local_values.items()
        }
        row_states = RowStates(self.size, self.shards, local_values, self.ranks, self.dtype)
        row_states.cuts = self.cuts
        return row_states

    def parts_of(self, value: Tensor, name: str) -> dict[int, Tensor]:
        """Return the part of `value` for each local shard, by its number in `shards`; views of it.

        Args:
            value: result of `self.value`, or a full tensor.
            name: name of the entry, for messages.

        Raises:
            ValueError: `value` has another size or is cut differently. Ranks without a shard raise
                too: otherwise they would load the other tables alone.
        """
        size = self.size[:1] if self.cuts else self.size
        if isinstance(value, ShardedTable):
            cuts = value.cuts if isinstance(value, RowStates) else None
            if (value.shards, tuple(value.size()), cuts) != (self.shards, self.size, self.cuts):
                columns = "" if self.cuts is None else f" with columns cut at {list(self.cuts)}"
                raise ValueError(
                    f"{name} is {value!r}, but its shards here are {list(self.shards)} of "
                    f"{self.size}{columns}: load it with emblib.sharding.checkpoints.load"
                )
        elif tuple(value.shape) != size:
            raise ValueError(f"{name} must be of shape {size}, got {tuple(value.shape)}")
        return {number: self._shard_part(value, number) for number in self.memory}

    def write(self, parts: Mapping[int, Tensor]) -> None:
        """Copy the result of `parts_of` into the memory of the shards.

        `parts` has one tensor per local shard, of its shape.
        """
        for number, value in parts.items():
            for tensor in self.memory[number]:
                if tensor.data_ptr() != value.data_ptr():
                    tensor.copy_(value)

    def _shard_part(self, value: Tensor, number: int) -> Tensor:
        """Return the view of `value` for local shard `number`; `value` is as for `parts_of`."""
        if isinstance(value, ShardedTable):
            part = value.parts[number]
            return part[:, 0] if self.cuts else part
        if not self.shards:
            return value
        shard = self.shards[number]
        rows = value[slice(*shard.rows)]
        return rows if self.cuts or value.dim() == 1 else rows[:, slice(*shard.columns)]


class StoredShard(Protocol):
    """A shard of a table on this rank: its memory is slice `index` of `groups`."""

    table: str
    shard: Shard
    groups: TableGroups
    index: int


class ShardedCollection(Protocol):
    """The interface of a sharded collection that state dicts use."""

    ranks: RankGroup
    plan: Mapping[str, ParameterSharding]
    groups: TableGroups
    shared: SharedShards

    def local_shards(self) -> Sequence[StoredShard]:
        """Return the shards of this rank."""

    def storage_config(self, table: str) -> Any:
        """Return the configuration of a table with its storage."""

    def remote_optimizer(self, table: str) -> RemoteOptimizer | None:
        """Return the optimizer of a table that no module on this rank updates, else None."""


class SavedTable:
    """A table of a collection as tensors of state dicts, and its shards on this rank.

    Args:
        collection: the sharded collection.
        name: name of the table.
        local_shards: shards of the table on this rank.

    Attributes:
        local_shards: shards on this rank by their number in `shards`; a replica has number 0.
        is_fused: whether backward updates the table, so that its optimizer states are saved.
    """

    def __init__(
        self, collection: ShardedCollection, name: str, local_shards: Sequence[StoredShard]
    ) -> None:
        self.ranks, self.name = collection.ranks, name
        self.config, self.sharding = collection.storage_config(name), collection.plan[name]
        self.optimizer: Optimizer = (
            self.config.optimizer or collection.groups.optimizer or NO_UPDATE
        )
        self.is_fused = autograd.is_fused(self.optimizer)
        self.storage: Storage = self.config.storage
        self._layouts = self._layouts_of_views()
        self.local_shards = {
            self.shards.index(local_shard.shard) if self.shards else 0: local_shard
            for local_shard in local_shards
        }

    @property
    def shards(self) -> tuple[Shard, ...]:
        """Return the shards of the table; none if every rank has a replica."""
        return self.sharding.shards

    def table_modules(self) -> list[Any]:
        """Return the modules whose backward updates the local shards."""
        return [
            module
            for shard in self.local_shards.values()
            for module in shard.groups.handles[shard.index].fused_modules()
        ]

    def fused_parameters(self) -> dict[str, Any]:
        """Return the parameters of the local shards that a fused optimizer updates.

        Names are those in `named_parameters`, e.g. `item.weight`, `item#1.weight`.
        """
        return {
            f"{self.name}#{number}.{key}" if number else f"{self.name}.{key}": parameter
            for number, shard in enumerate(self.local_shards.values())
            for key, parameter in shard.groups.handles[shard.index].fused_parameters().items()
        }

    @property
    def hyperparams(self) -> TableTensor:
        """Return the hyperparameters, which every rank with a shard stores in full."""
        size = (self.optimizer.hyperparams().numel(),)
        return self._replicated_tensor(
            size, torch.float64, [module.hyperparams for module in self.table_modules()]
        )

    def _replicated_tensor(
        self, size: tuple[int, ...], dtype: torch.dtype, memory: list[Tensor]
    ) -> TableTensor:
        """Return a tensor that every rank with a shard stores in full."""
        columns = (0, size[1] if len(size) > 1 else 1)
        shards = tuple(Shard(rank, (0, size[0]), columns) for rank in self.sharding.ranks)
        local_shards = {i for i, shard in enumerate(shards) if shard.rank == self.ranks.rank} or {0}
        return TableTensor(
            size, dtype, shards, self.ranks, dict.fromkeys(local_shards, memory) if memory else {}
        )

    def parameters(self) -> dict[str, Tensor]:
        """Return the table's entries of the collection's state dict, by names in the table."""
        tensors = self.table_tensors(self.parameter_names())
        values = {key: tensor.value() for key, tensor in tensors.items()}
        return {**self.storage.metadata_entries(self.config), **values}

    def parameter_names(self) -> Sequence[str]:
        """Return the names of the entries that loading the table requires."""
        return tuple(self.storage.parameter_layouts(self.config))

    def compare_names(self, names: Collection[str]) -> tuple[set[str], set[str]]:
        """Return the names of required entries that `names` lack, and the `names` of no entry.

        Names are without that of the table.
        """
        required_names = set(self.parameter_names())
        metadata_names = self.storage.metadata_entries(self.config).keys()
        return required_names - set(names), set(names) - required_names - metadata_names

    def check_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless `values` can be written; entries that it lacks are ignored."""
        for key, expected in self.storage.metadata_entries(self.config).items():
            if key in values and (problem := state_dicts.tensor_problem(values[key], expected)):
                raise ValueError(f"{self.name}.{key}: {problem}")
        self.storage.check_entries(self.config, values)
        present_keys = [key for key in self.parameter_names() if key in values]
        for key, target in self.table_tensors(present_keys).items():
            _check_value(values[key], target, f"{self.name}.{key}")

    def set_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Write the parameters that `values` has; call `check_parameters` first."""
        self._write([key for key in self.parameter_names() if key in values], values)

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer states by parameter; none without a fused optimizer.

        States are results of `TableTensor.value`. The hyperparameters, `HYPER`, are one copy for
        all parameters.
        """
        if not self.is_fused:
            return {}
        hyperparams = self.hyperparams.value().clone()
        return {
            parameter: {
                **{
                    state: tensor.value()
                    for state, tensor in zip(names, self.table_tensors(keys).values(), strict=True)
                },
                HYPER: hyperparams,
            }
            for parameter, names, keys in self._states_by_parameter()
        }

    def check_states(self, parameter: str, values: Mapping[str, Tensor]) -> None:
        """Check optimizer states of a parameter, and the hyperparameters, before they are written.

        Raises:
            KeyError: `values` lacks a state or the hyperparameters.
            ValueError: a value has another size, is cut differently, or is not a tensor that can be
                copied; or the optimizer cannot have the hyperparameters.
        """
        values_of_views = self._values_of_views(parameter, values)
        for key, target in self.table_tensors(list(values_of_views)).items():
            _check_value(values_of_views[key], target, f"{self.name}.{key}")
        hyperparams = values[HYPER]
        _check_value(hyperparams, self.hyperparams, f"{self.name}.{HYPER}")
        for local_hyperparams in (
            hyperparams.parts.values() if isinstance(hyperparams, ShardedTable) else [hyperparams]
        ):
            # Raises ValueError for numbers that the optimizer cannot have.
            hyperparameters.with_saved_hyperparams(self.optimizer, local_hyperparams)

    def set_states(self, parameter: str, values: Mapping[str, Tensor]) -> None:
        """Write the optimizer states of a parameter, without the hyperparameters.

        Call `check_states` first: this checks only names, sizes and cuts.

        Raises:
            KeyError: `values` lacks a state or the hyperparameters; nothing is written.
            ValueError: a state has another size or is cut differently; nothing is written.
        """
        values_of_views = self._values_of_views(parameter, values)
        self._write(list(values_of_views), values_of_views)

    def _values_of_views(self, parameter: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the optimizer states of a parameter by their names in the views.

        The hyperparameters are left out. Raises KeyError if `values` lacks them or a state.
        """
        for other_parameter, names, keys in self._states_by_parameter():
            if other_parameter == parameter:
                missing_names = sorted({*names, HYPER} - values.keys())
                if missing_names:
                    raise KeyError(f"the state of {self.name}.{parameter} lacks {missing_names}")
                return {key: values[name] for name, key in zip(names, keys, strict=True)}
        return {}

    def fused_names(self) -> list[str]:
        """Return the names of the parameters that have optimizer states."""
        return [parameter for parameter, *_ in self._states_by_parameter()]

    def _states_by_parameter(self) -> Iterator[tuple[str, list[str], list[str]]]:
        """Yield each parameter, the names of its optimizer states, and their names in the views."""
        for parameter in self._fused_parameter_names():
            views = self.storage.state_views(parameter, self.optimizer)
            yield parameter, list(views), list(views.values())

    def _fused_parameter_names(self) -> Sequence[str]:
        return self.parameter_names()

    @without_gradients
    def _write(self, keys: Sequence[str], values: Mapping[str, Tensor]) -> None:
        """Write the values of `keys` into the local shards, and commit them.

        Raises:
            ValueError: a value has another size or is cut differently; nothing is written.
        """
        targets = self.table_tensors(keys)
        parts = {
            key: target.parts_of(values[key], f"{self.name}.{key}")
            for key, target in targets.items()
        }
        for key, target in targets.items():
            target.write(parts[key])
        for local_shard in self.local_shards.values():
            local_shard.groups.handles[local_shard.index].commit()

    def table_tensors(self, keys: Sequence[str]) -> dict[str, TableTensor]:
        """Return the tensors of the entries `keys`, by key, with the memory of the local shards."""
        views_by_number = {
            number: local_shard.groups.views(local_shard.index)
            for number, local_shard in self.local_shards.items()
        }
        tensors: dict[str, TableTensor] = {}
        for key in keys:
            memory = {number: views[key] for number, views in views_by_number.items()}
            tensors[key] = self._table_tensor(key, memory)
        return tensors

    def _layouts_of_views(self) -> dict[str, tuple[TensorLayout, bool]]:
        """Return the layout of each view, and whether it has one number per row."""
        is_per_row_by_state = {state.name: state.per_row for state in self.optimizer.states}
        layouts = {}
        for parameter, layout in self.storage.parameter_layouts(self.config).items():
            layouts[parameter] = (layout, False)
            for state, view in self.storage.state_views(parameter, self.optimizer).items():
                layouts[view] = (layout._replace(dtype=torch.float32), is_per_row_by_state[state])
        return layouts

    def _table_tensor(self, key: str, memory: Mapping[int, Tensor]) -> TableTensor:
        """Return the tensor `key`, whose shards have this memory."""
        layout, is_per_row = self._layouts[key]
        if layout.region is None:
            size = layout.size[:1] if is_per_row else layout.size
            return self._replicated_tensor(size, layout.dtype, list(memory.values()))
        shards = tuple(
            Shard(shard.rank, *layout.region(shard.rows, shard.columns)) for shard in self.shards
        )
        tensors = {number: [tensor] for number, tensor in memory.items()}
        if not is_per_row:
            return TableTensor(layout.size, layout.dtype, shards, self.ranks, tensors)
        num_rows = layout.size[0]
        cuts = sharded_table.cuts_of(shards)
        if len(cuts) <= 2:  # no shard has only some of the columns
            shards_of_rows = tuple(shard._replace(columns=(0, 1)) for shard in shards)
            return TableTensor((num_rows,), layout.dtype, shards_of_rows, self.ranks, tensors)
        shards_of_intervals = tuple(
            shard._replace(columns=sharded_table.interval_range(shard.columns, cuts))
            for shard in shards
        )
        return TableTensor(
            (num_rows, len(cuts) - 1), layout.dtype, shards_of_intervals, self.ranks, tensors, cuts
        )


class KeyedTable(SavedTable):
    """A table of keyed storage, saved by key: shard k of K has the k-th range of routes.

    Routes are defined in `emblib.dynamic.keys`.
    """

    def _handles_by_number(self) -> dict[int, Any]:
        """Return the handles of the local shards by number; shards are numbered by rows."""
        order = sorted(range(len(self.shards)), key=lambda index: self.shards[index].rows)
        return {
            order.index(index) if self.shards else 0: local_shard.groups.handles[local_shard.index]
            for index, local_shard in self.local_shards.items()
        }

    def _owners(self) -> list[int]:
        """Return the rank of each shard, by number."""
        return [shard.rank for shard in sorted(self.shards, key=lambda shard: shard.rows)]

    def handle(self) -> DynamicTable:
        """Return the handle of the table, whose methods are collectives."""
        storage: Any = self.storage
        spec = storage.spec(self.config.num_embeddings, self.config.embedding_dim, self.name)
        owners = self._owners() or (0,)
        return DynamicTable(self.name, self._handles_by_number(), owners, self.ranks, spec)

    def parameters(self) -> dict[str, Tensor]:
        """Return rows by key over all ranks; for other tensors the maximum over the shards.

        A collective, except if every rank has a replica.
        """
        handles = self._handles_by_number()
        states = {number: dict(handle.state_dict()) for number, handle in handles.items()}
        if not self.shards:
            return states[0]
        return keyed.join_shards(states, self._owners(), self.ranks)

    def parameter_names(self) -> Sequence[str]:
        """Return the names of the entries that loading the table requires."""
        return ("keys", "weight")

    def compare_names(self, names: Collection[str]) -> tuple[set[str], set[str]]:
        """Compare names with those of the entries; see `SavedTable`.

        A rank without a shard requires keys and weights, and accepts all other names.
        """
        handles = list(self._handles_by_number().values())
        if handles:
            missing_names, unexpected_names = handles[0].compare_names(names)
            return missing_names, unexpected_names
        return set(self.parameter_names()) - set(names), set()

    def check_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Raise ValueError for entries by key that this rank's shards cannot load."""
        keyed.check_row_counts(values, self.name)
        for handle, shard_values in self._entries_of_shards(values):
            for problem in state_dicts.find_problems(handle, shard_values, ""):
                raise ValueError(f"{self.name}.{problem}")

    def set_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Load into every shard the keys that it owns; do nothing if `values` lack rows by key."""
        for handle, shard_values in self._entries_of_shards(values):
            handle.load_state_dict(shard_values, strict=False)

    def _entries_of_shards(
        self, values: Mapping[str, Tensor]
    ) -> Iterator[tuple[Any, dict[str, Tensor]]]:
        """Yield each local shard and the entries of its keys; nothing without keys and weights."""
        if {"keys", "weight"} <= values.keys():
            for number, handle in self._handles_by_number().items():
                num_shards = max(len(self.shards), 1)
                yield handle, keyed.entries_of_shard(values, number, num_shards, self.name)

    def _fused_parameter_names(self) -> Sequence[str]:
        return ("weight",)


def _check_value(value: Any, target: TableTensor, name: str) -> None:
    """Raise ValueError unless a value is a full or sharded tensor that `target` can load."""
    if not isinstance(value, ShardedTable):
        template = torch.empty(0, dtype=target.dtype, device="cpu")
        if problem := state_dicts.tensor_problem(value, template):
            raise ValueError(f"{name}: {problem}")
    target.parts_of(value, name)


def module_state(
    collection: ShardedCollection, omitted_tables: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the parameters of tables, and the complete state of dynamic tables, by name.

    A collective if there are dynamic tables. `omitted_tables` are names of tables to leave out.
    """
    return {
        f"{table.name}.{key}": value
        for table in _tables_of(collection)
        if table.name not in omitted_tables
        for key, value in table.parameters().items()
    }


def load_module_state(collection: ShardedCollection, state: Mapping[str, Tensor]) -> None:
    """Load the result of `module_state`, or full tensors; tables not in `state` do not change.

    The entries of all tables are checked before any table is written.

    Raises:
        ValueError: a tensor has another size or is sharded in another way, which
            `emblib.sharding.checkpoints.load` converts, or cores are of another tensor train;
            nothing is written then.
    """
    tables_and_values = []
    for table in _tables_of(collection):
        tables_and_values.append((table, state_dicts.entries_under(f"{table.name}.", state)))
    for table, values in tables_and_values:
        table.check_parameters(values)
    for table, values in tables_and_values:
        table.set_parameters(values)


def compare_names(
    collection: ShardedCollection, state: Collection[str]
) -> tuple[list[str], list[str]]:
    """Return the required names that `state` lacks, and its names that no entry of a table has."""
    names_by_table: dict[str, set[str]] = {name: set() for name in collection.plan}
    missing_names, unexpected_names = [], []
    for name in state:
        table_name, _, entry_name = name.partition(".")  # names of tables have no dot
        if table_name in names_by_table and entry_name:
            names_by_table[table_name].add(entry_name)
        else:
            unexpected_names.append(name)
    for table in _tables_of(collection):
        absent_names, unknown_names = table.compare_names(names_by_table[table.name])
        missing_names += [f"{table.name}.{name}" for name in absent_names]
        unexpected_names += [f"{table.name}.{name}" for name in unknown_names]
    return sorted(missing_names), sorted(unexpected_names)


def optimizer_state(collection: ShardedCollection) -> dict[str, dict[str, Tensor]]:
    """Return states and hyperparameters of fused optimizers by parameter name."""
    return {
        f"{table.name}.{parameter}": states
        for table in _tables_of(collection)
        for parameter, states in table.states().items()
    }


StatesToLoad = list[tuple[SavedTable, str, Mapping[str, Tensor]]]  # table, parameter, its states


def check_optimizer_state(
    collection: ShardedCollection, state: Mapping[str, Mapping[str, Tensor]]
) -> StatesToLoad:
    """Check the optimizer states of all tables of the collection, and return them.

    Not a collective. Tables without a shard on this rank are checked too, so that all ranks refuse
    equal full tensors alike. Hyperparameters in a `ShardedTable` are checked by ranks with a shard.

    Raises:
        KeyError: a parameter, a state or the hyperparameters are missing.
        ValueError: a state has another size or is sharded in another way, or the optimizer cannot
            have the hyperparameters.
    """
    states_to_load: StatesToLoad = []
    for table in _tables_of(collection):
        for parameter in table.fused_names() if table.is_fused else ():
            values = state.get(f"{table.name}.{parameter}")
            if values is None:
                raise KeyError(f"the state of the optimizer lacks {table.name}.{parameter}")
            table.check_states(parameter, values)
            states_to_load.append((table, parameter, values))
    return states_to_load


def load_optimizer_state(
    collection: ShardedCollection, state: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Load the result of `optimizer_state`, or full tensors, and set the step counters.

    Tables of one module share its hyperparameters: the module loads the ones with the most steps.

    Raises:
        KeyError: see `check_optimizer_state`; nothing is written.
        ValueError: see `check_optimizer_state`; nothing is written.
    """
    loaded_hyperparams: list[tuple[Any, Tensor]] = []  # module, and hyperparameters for it
    for table, parameter, values in check_optimizer_state(collection, state):
        table.set_states(parameter, values)
        hyper_parts = table.hyperparams.parts_of(values[HYPER], HYPER)
        loaded_hyperparams += [
            (module, hyperparams)
            for module in table.table_modules()
            for hyperparams in hyper_parts.values()
        ]
    newest_by_module: dict[int, tuple[Any, Tensor]] = {}  # by id of the module
    for module, hyperparams in loaded_hyperparams:
        previous = newest_by_module.get(id(module))
        if previous is None or float(hyperparams[Hyper.STEP]) > float(previous[1][Hyper.STEP]):
            newest_by_module[id(module)] = module, hyperparams
    for module, hyperparams in newest_by_module.values():
        module.load_hyperparams(hyperparams)
        module.set_step(int(hyperparams[Hyper.STEP]))


def fused_tables(collection: ShardedCollection, prefix: str) -> list[FusedTableEntry]:
    """Return an entry per table with a fused optimizer; names begin with `prefix`."""
    return [
        FusedTableEntry(
            table.optimizer,
            tuple(f"{prefix}{table.name}.{name}" for name in table.fused_names()),
            table.table_modules(),
            {f"{prefix}{name}": parameter for name, parameter in table.fused_parameters().items()},
            collection.shared.get(table.name),
            collection.remote_optimizer(table.name),
        )
        for table in _tables_of(collection)
        if table.is_fused
    ]


def _tables_of(collection: ShardedCollection) -> list[SavedTable]:
    """Return the tables of a sharded collection, each with its local shards."""
    shards_by_table: dict[str, list[StoredShard]] = {name: [] for name in collection.plan}
    for local_shard in collection.local_shards():
        shards_by_table[local_shard.table].append(local_shard)
    return [
        (KeyedTable if collection.storage_config(name).storage.is_keyed else SavedTable)(
            collection, name, shards
        )
        for name, shards in shards_by_table.items()
    ]


def table_handles(collection: ShardedCollection) -> DynamicTables:
    """Return the handles of dynamic tables by name, over all ranks."""
    all_tables = _tables_of(collection)
    return DynamicTables(
        {table.name: table.handle() for table in all_tables if isinstance(table, KeyedTable)},
        {
            table.name: type(table.storage).__name__
            for table in all_tables
            if not isinstance(table, KeyedTable)
        },
    )


class StateOfTables(nn.Module):
    """Base of sharded collections: state dicts with the names of the unsharded collection.

    Rows are `ShardedTable`s, or tensors if every rank has a replica. Entries that describe a table,
    such as the layout of a tensor train, are tensors. Full tensors, as in the state dict of an
    unsharded collection, can be loaded as well: each rank reads its shards. With dynamic tables
    `state_dict` is a collective.
    """

    handles_name: ClassVar[str]  # attribute with the `ShardParameters`, first part of all names

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # The modules of a copy have created new parameters.
        handles: Any = self._modules[self.handles_name]
        handles.register_parameters()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        collection: Any = self
        handles_prefix = f"{prefix}{self.handles_name}."
        shared_entries = {
            name
            for name, shared in collection.shared.items()
            if not shared.entry.claim_save(destination, f"{handles_prefix}{name}.weight")
        }
        for key, value in module_state(collection, shared_entries).items():
            destination[f"{handles_prefix}{key}"] = value

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, *arguments: Any
    ) -> None:
        missing, unexpected, errors = arguments[2:]
        handles_prefix = f"{prefix}{self.handles_name}."
        values = state_dicts.entries_under(handles_prefix, state_dict)
        collection: Any = self
        missing_names, unexpected_names = compare_names(collection, values.keys())
        shared_prefixes = tuple(
            f"{name}."
            for name, shared in collection.shared.items()
            if not shared.entry.claim_load(
                f"{handles_prefix}{name}.weight", values.get(f"{name}.weight"), missing, errors
            )
        )
        missing.extend(
            handles_prefix + name for name in missing_names if not name.startswith(shared_prefixes)
        )
        # Submodules have no state of their own: all entries are of tables.
        unexpected.extend(
            key
            for key in state_dict
            if key.startswith(prefix) and not key.startswith(handles_prefix)
        )
        unexpected.extend(handles_prefix + name for name in unexpected_names)
        values = {
            key: value
            for key, value in values.items()
            if key not in unexpected_names and not key.startswith(shared_prefixes)
        }
        try:
            load_module_state(collection, values)
        except ValueError as error:  # begins with the name of a table and its entry
            errors.append(f"{handles_prefix}{error}")
        except RuntimeError as error:
            errors.append(f"{handles_prefix[:-1]}: {error}")

    @property
    @shows_attribute_errors
    def tables(self) -> DynamicTables:
        """Return the handles of dynamic tables, by name; their methods are collectives."""
        return self.table_handles()

    def table_handles(self) -> DynamicTables:
        """Return the handles of dynamic tables, by name."""
        collection: Any = self
        return table_handles(collection)

    def fused_tables(self) -> Sequence[FusedTableEntry]:
        """Return the tables that backward updates, in the same order on every rank."""
        collection: Any = self
        return fused_tables(collection, f"{self.handles_name}.")

    def gradient_ranks(self) -> GradientRanks | None:
        """Return the ranks that have the gradients of other shards; None for one rank."""
        collection: Any = self
        return gradient_ranks_of(collection.ranks)

    @cached_property
    @shows_attribute_errors
    def fused_optimizer(self) -> Any:
        """Return the optimizer that the tables run in backward, a `FusedOptimizer`."""
        from emblib.collections.optimizers import FusedOptimizer

        return FusedOptimizer.of(self)

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """Return states and hyperparameters of fused optimizers, by parameter name.

        The states of dynamic tables are in `state_dict`, with the keys.
        """
        collection: Any = self
        return {
            f"{self.handles_name}.{parameter}": states
            for parameter, states in optimizer_state(collection).items()
        }

    def check_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Raise what `load_optimizer_state` would raise; equal full tensors raise on every rank."""
        collection: Any = self
        check_optimizer_state(collection, self._states_by_table(state))

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the result of `optimizer_state`, or the whole tensors of an unsharded collection.

        Raises:
            KeyError: a parameter, a state or `hyper` is missing; nothing is written.
            ValueError: a state has another size or is sharded in another way, or the optimizer
                cannot have the hyperparameters; nothing is written.
        """
        collection: Any = self
        load_optimizer_state(collection, self._states_by_table(state))

    def _states_by_table(
        self, state: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, Mapping[str, Tensor]]:
        """Return the states of tables, by names without the prefix of the collection."""
        return state_dicts.entries_under(f"{self.handles_name}.", state)
