"""Shared tables: one table that several collections of a model read.

`SharedTables` owns the tables. A collection with `shared=` reads the shared tables that its
configurations name, with its own features and pooling, and has no memory for them. If backward
updates the table, it makes one update with the summed gradients of all lookups
(`emblib.ops.joint_step`); otherwise autograd adds the gradients up.

All collections register the same handle, so `named_parameters` and state dicts have a shared table
once, under the first collection in the order of the model.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.collections.configs import EmbeddingBagConfig, EmbeddingConfig, TableConfig
from emblib.collections.groups import TableGroups
from emblib.grad_mode import without_gradients
from emblib.ops import autograd
from emblib.ops.joint_step import JointStep
from emblib.optim import Optimizer
from emblib.specs import BoundsCheck, Pooling, check_module, format_config
from emblib.storage import Dense, Storage, TableHandle, TableModule, TableSlice
from emblib.storage.base import has_hyperparams
from emblib.storage.dense import DenseHandle, DenseModule
from emblib.storage.initial_values import without_initial_values
from emblib.tables import state_dicts
from emblib.tables.cache import BatchId
from emblib.tables.graph_break import run_uncompiled
from emblib.tables.optimizer_hooks import find_global_decay
from emblib.tables.reading import TableReading

__all__ = ["SharedTable", "SharedTables", "duplicate_tables", "share_tables"]

# A reader chooses its features and pooling. `optimizer` is compared separately: a reader with None
# accepts any optimizer of the table.
_FIELDS_OF_READERS = ("feature_names", "pooling", "optimizer")


class SharedTables:
    """Tables for several collections: one memory, one optimizer state, one update per backward.

    It is not a module: the tables belong to a model through the collections that read them.

    Args:
        tables: configurations of the tables, or one. Features and pooling are not used: every
            collection that reads a table has its own.
        device: device of the tables; None is torch's default device.
        optimizer: optimizer of `emblib.optim` for tables whose configuration has none. Without one,
            the parameters get dense gradients, which autograd adds up.

    Raises:
        TypeError: a table is not a configuration, or an optimizer is not of `emblib.optim`.
        ValueError: a storage is not `Dense`, an optimizer has `GlobalDecay`, or a name occurs
            twice.

    Example:
        >>> shared = emblib.SharedTables([emblib.EmbeddingConfig(1000, 16, "item")])
        >>> item = shared.pooled("item", ["basket"])
        >>> bags = emblib.EmbeddingBagCollection([item], shared=shared)
        >>> item = shared.unpooled("item", ["history"])
        >>> history = emblib.EmbeddingCollection([item], shared=shared)
        >>> bags.embedding_bags["item"].weight is history.embeddings["item"].weight
        True
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        device: torch.device | str | None = None,
        *,
        optimizer: Optimizer | None = None,
    ) -> None:
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be None or one of emblib.optim, got {optimizer!r}")
        configs = [tables] if isinstance(tables, TableConfig) else list(tables)
        self._tables: dict[str, SharedTable] = {}
        for config in configs:
            if not isinstance(config, TableConfig):
                raise TypeError(
                    f"tables must be EmbeddingBagConfig or EmbeddingConfig objects, got {config!r}"
                )
            if config.name in self._tables:
                raise ValueError(f"shared tables must differ in name, got {config.name!r} twice")
            config = replace(config, optimizer=config.optimizer or optimizer)
            self._tables[config.name] = SharedTable(TableSlice.whole(config), device)

    def __getitem__(self, name: str) -> SharedTable:
        """Return the table of a name; raise KeyError if there is none."""
        if name not in self._tables:
            raise KeyError(f"there is no shared table {name!r}; there are {sorted(self._tables)}")
        return self._tables[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def pooled(
        self, name: str, feature_names: Sequence[str], pooling: Pooling = Pooling.SUM
    ) -> EmbeddingBagConfig:
        """Return the configuration with which an `EmbeddingBagCollection` reads a table.

        Raises:
            KeyError: there is no shared table of this name.
            TypeError, ValueError: `feature_names` or `pooling` are wrong, see `EmbeddingBagConfig`.
        """
        arguments = {**self[name].common_fields(), "feature_names": feature_names}
        return EmbeddingBagConfig(**arguments, pooling=pooling)

    def unpooled(self, name: str, feature_names: Sequence[str]) -> EmbeddingConfig:
        """Return the configuration with which an `EmbeddingCollection` reads a table.

        Raises:
            KeyError: there is no shared table of this name.
            TypeError, ValueError: `feature_names` are wrong, see `EmbeddingConfig`.
        """
        arguments = {**self[name].common_fields(), "feature_names": feature_names}
        return EmbeddingConfig(**arguments)

    def read_by(self, configs: Sequence[TableConfig]) -> dict[str, SharedTable]:
        """Return the tables that configurations name, by name.

        Raises:
            ValueError: a configuration with the name of a shared table differs from it.
        """
        names = [config.name for config in configs if config.name in self._tables]
        tables = {name: self._tables[name] for name in names}
        for config in configs:
            if config.name in tables:
                tables[config.name].check_reader(config)
        return tables


class SharedTable:
    """One shared table or shard: its memory, and the handle that all collections register.

    Args:
        table_slice: table or shard; its configuration has the optimizer.
        device: device of the memory; None is torch's default device.
        seeds: seeds of the initial values, by table name; None draws them from torch's generator.

    Attributes:
        config: configuration of the whole table, with the current optimizer.
        groups: owner of the memory, which no unit reads directly.
        joint: sum of the gradients of all lookups in a backward.

    Raises:
        ValueError: the storage is not `Dense`, or the table cannot have the optimizer, such as one
            with `GlobalDecay`.
    """

    def __init__(
        self,
        table_slice: TableSlice,
        device: torch.device | str | None,
        seeds: Mapping[str, int] | None = None,
    ) -> None:
        config: Any = table_slice.config
        if type(config.storage) is not Dense:
            raise ValueError(
                f"shared table {config.name!r} must have storage=Dense(), got "
                f"{format_config(config.storage)}: give one collection all features of the table, "
                "which any storage can have, or make the table dense"
            )
        self.config: TableConfig = config
        self._rows_and_columns = table_slice.rows, table_slice.columns
        self._readers: weakref.WeakSet[SharedReader] = weakref.WeakSet()
        self._set_groups(self._make_groups(self.config, device, seeds))

    def _make_groups(self, config: TableConfig, device: Any, seeds: Any) -> TableGroups:
        """Make memory for the table; raise ValueError for an optimizer that it cannot have."""
        optimizer = config.optimizer
        if optimizer is not None and find_global_decay(optimizer) is not None:
            raise ValueError(
                f"shared table {config.name!r} cannot have GlobalDecay, which scales rows as "
                "one lookup pools them: leave global_decay out"
            )
        table_slice = TableSlice(config, *self._rows_and_columns)
        return TableGroups([table_slice], [], pooling=Pooling.NONE, device=device, seeds=seeds)

    def _set_groups(self, groups: TableGroups, handle: TableHandle | None = None) -> None:
        """Install the memory, with a new handle unless one is passed."""
        self.groups = groups
        _, index = groups.module_of(0)
        groups.replace_handle(0, handle or SharedHandle(self.config.storage, self.module, index))
        self.joint = JointStep(self.module)

    @property
    def handle(self) -> TableHandle:
        """Return the handle that all collections register."""
        return self.groups.handles[0]

    @property
    def weight(self) -> nn.Parameter:
        """Return the parameter `[rows, dim]`."""
        return self.handle.get_parameter("weight")

    @property
    def module(self) -> DenseModule:
        """Return the module that has the memory."""
        module, _ = self.groups.module_of(0)
        assert isinstance(module, DenseModule)
        return module

    @property
    def dim(self) -> int:
        """Return the number of columns."""
        begin, end = self._rows_and_columns[1]
        return end - begin

    @property
    def is_joint(self) -> bool:
        """Return whether backward makes one update for all lookups."""
        return autograd.updates_in_backward(self.module.optimizer)

    def common_fields(self) -> dict[str, Any]:
        """Return the configuration fields on which all readers must agree."""
        names = (
            field.name for field in fields(TableConfig) if field.name not in _FIELDS_OF_READERS
        )
        return {name: getattr(self.config, name) for name in names}

    def check_reader(self, config: TableConfig) -> None:
        """Raise ValueError if a configuration differs from this table."""
        differences = {
            name: (value, getattr(config, name))
            for name, value in self.common_fields().items()
            if getattr(config, name) != value
        }
        if config.optimizer not in (None, self.config.optimizer):
            differences["optimizer"] = (self.config.optimizer, config.optimizer)
        if differences:
            text = ", ".join(
                f"{name} {expected!r}, not {got!r}" for name, (expected, got) in differences.items()
            )
            raise ValueError(
                f"table {config.name!r} is shared and has {text}: make the configuration with "
                f"SharedTables.pooled({config.name!r}, ...) or .unpooled(...); or omit shared= "
                "for a table of this collection alone"
            )

    def prepare_optimizer(self, optimizer: Optimizer | None) -> Callable[[], None]:
        """Make memory for another optimizer; return a function that installs it.

        That function changes the optimizer for all collections; weights are kept, optimizer states
        are reset. Nothing changes before it is called. None leaves dense gradients.

        Raises:
            TypeError: an optimizer is not of `emblib.optim`.
            ValueError: the table cannot have the optimizer.
        """
        config, old_groups = replace(self.config, optimizer=optimizer), self.groups
        make_groups = without_initial_values(self._make_groups)
        groups = make_groups(config, old_groups.device, old_groups.seeds)

        def install() -> None:
            self.config = config
            groups.adopt(old_groups)
            self._set_groups(groups, old_groups.handles[0])

        return install

    @without_gradients
    def adopt(self, source: TableHandle) -> None:
        """Take over rows, optimizer state and parameter of a collection's table of equal sizes.

        Hyperparameters are taken over if the optimizers are equal. `source` must not be used
        afterwards.
        """
        old_module, module = source.module, self.module
        source_views, targets = source.views(), self.handle.views()
        for name in targets.keys() & source_views.keys():
            targets[name].copy_(source_views[name])
        if has_hyperparams(old_module) and old_module.optimizer == module.optimizer:
            module.load_hyperparams(old_module.hyperparams)
        self.handle.adopt(source)
        self.groups.replace_handle(0, self.handle)

    def reader(self, num_features: int, pooling: Pooling) -> SharedReader:
        """Return the module with which a collection reads the table."""
        return SharedReader(self, num_features, pooling)

    def readers(self) -> list[SharedReader]:
        """Return the living modules that read the table."""
        return list(self._readers)

    def add_reader(self, reader: SharedReader) -> None:
        """Register a module that reads the table; referenced weakly."""
        self._readers.add(reader)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_readers": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # The readers of a copy register themselves, see `SharedReader.__setstate__`.
        self.__dict__.update(state, _readers=weakref.WeakSet())


class SharedReader(nn.Module):
    """Table module with which one collection looks up a shared table; it owns no memory."""

    breaks_graphs = True  # a joint step records gradients in Python, and see `look_up_as`

    def __init__(self, table: SharedTable, num_features: int, pooling: Pooling) -> None:
        super().__init__()
        self.table, self._num_features, self._pooling = table, num_features, pooling
        table.add_reader(self)
        self.output_dtype = torch.float32
        # `TableGroups.set_bounds_check` sets these two.
        self.bounds_check, self.feature_labels = BoundsCheck.WARNING, [""] * num_features
        # The first lookup makes both on the device. Violations are counted per reader.
        self.features = torch.empty(0, device="meta")
        self.bounds_violations = torch.empty(0, device="meta")

    @property
    def row_cache(self) -> Any:
        """Return the cache of the table, if it has one."""
        return self.table.module.row_cache

    @property
    def optimizer(self) -> Optimizer:
        """Return the optimizer of the table."""
        return self.table.module.optimizer

    def _reading(self) -> TableReading:
        """Return the arguments of a lookup of the table, after moving buffers to its device."""
        table = self.table
        module = table.module
        device = module.hyperparams.device
        if self.features.device != device or self.features.is_meta:
            self.features = TableReading.features_of(
                module.first_table, self._num_features, self._pooling, device
            )
            self.bounds_violations = torch.zeros(2, dtype=torch.int64, device=device)
        joint = table.joint.gradient_sum() if table.is_joint else None
        return TableReading(self.features, table.dim, self._pooling, joint, self)

    def forward(
        self,
        ids: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Look up a batch; arguments are those of `TableBatchedEmbeddingBags`.

        The output, in `output_dtype`, is `[B, features * dim]`, or `[L, dim]` if not pooled; pooled
        with `batch_sizes`, it is one vector.
        """
        self.table.groups.check_parameters()
        look_up = self._look_up_jointly if self.table.is_joint else self._look_up
        out = look_up(BatchId(ids, offsets), batch_sizes, weights)
        return out if out.dtype is self.output_dtype else out.to(self.output_dtype)

    def begin_step(self, *, is_joint: bool) -> None:
        """Run the periodic part of the table's optimizer if this forward is the first of a step."""
        self.table.module.begin_step(is_joint=is_joint or self.table.is_joint)

    def _look_up(
        self,
        batch_id: BatchId,
        batch_sizes: Sequence[Sequence[int]] | None,
        sample_weights: Tensor | None,
    ) -> Tensor:
        out: Tensor = self.table.module.look_up_as(
            self._reading(), batch_id, batch_sizes, sample_weights
        )
        return out

    # Outside compiled graphs, because a joint step records gradients in Python.
    _look_up_jointly = run_uncompiled(_look_up)

    def prefetch(
        self, ids: Tensor, offsets: Tensor, *, batch_sizes: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Fetch the rows of a later batch into the cache, if there is one.

        The arguments are those of `TableBatchedEmbeddingBags.prefetch`.
        """
        module = self.table.module
        module.prefetch_as(self._reading(), BatchId(ids, offsets), batch_sizes)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of the table; every collection that reads it counts them in full."""
        return self.table.groups.nbytes()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.table.add_reader(self)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self.table.groups._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        """Describe the table."""
        return f"{self.table.config.name} (shared), pooling={self._pooling.value}"


class SharedEntry:
    """Keep a shared table to one name per state dict, though several collections save and load it.

    `SharedHandle` or a sharded collection calls `claim_save` and `claim_load` for each name of the
    table; the first name gets it. A copied or unpickled entry has no claims.
    """

    def __init__(self) -> None:
        self._saved_entry: tuple[Any, str] | None = None
        self._loading: _FirstLoad | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()

    def claim_save(self, destination: Any, key: str) -> bool:
        """Claim a state dict's entry of the table for a key; return False if another key has it.

        Args:
            destination: the state dict; in one that is not an OrderedDict each key gets the table.
            key: key of the first parameter of the table in the state dict.
        """
        if self._saved_entry is not None:
            destination_ref, first_key = self._saved_entry
            if destination_ref() is destination and first_key != key and first_key in destination:
                return False
        if isinstance(destination, OrderedDict):
            self._saved_entry = weakref.ref(destination), key
        return True

    def claim_load(
        self, key: str, value: Tensor | None, missing_keys: list[str], errors: Any
    ) -> bool:
        """Claim the table for a key in a `load_state_dict`; return False if another key has it.

        A key with a value replaces a first key without one, which is then not missing.

        Args:
            key: key of the first parameter of the table in the state dict.
            value: the value at this key, if there is one.
            missing_keys: the keys that are missing so far; a replaced key is removed.
            errors: the list of errors of one `load_state_dict`, which identifies the load; an error
                is appended if the rows differ from those at the first key.
        """
        previous = self._loading
        if previous is None or previous.errors is not errors or previous.key == key:
            self._loading = _FirstLoad(errors, key, None if value is None else weakref.ref(value))
            return True
        if value is None:
            return False
        if previous.value_ref is None:
            if previous.key in missing_keys:
                missing_keys.remove(previous.key)
            self._loading = _FirstLoad(errors, key, weakref.ref(value))
            return True
        first_value = previous.value_ref()
        if first_value is not None and not _are_equal(first_value, value):
            errors.append(
                f"{key}: the state dict has other rows here than at {previous.key}, but both are "
                "one shared table now: remove one of the two entries from the state dict, or "
                "average them"
            )
        return False


class _FirstLoad(NamedTuple):
    """The first load of a table in one `load_state_dict`.

    Attributes:
        errors: list of errors of the load, which identifies it.
        key: key of the table's first parameter.
        value_ref: weak reference to the value at this key; None if it was missing.
    """

    errors: Any
    key: str
    value_ref: Any


def _are_equal(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors, or the local shards of two sharded ones, are equal."""
    shards, other_shards = getattr(tensor, "parts", None), getattr(other, "parts", None)
    if shards is not None and other_shards is not None:
        return shards.keys() == other_shards.keys() and all(
            _are_equal(shard, other_shards[index]) for index, shard in shards.items()
        )
    if shards is not None or other_shards is not None or tensor.shape != other.shape:
        return False
    return torch.equal(tensor.detach(), other.detach().to(tensor))


class SharedHandle(DenseHandle):
    """Handle of a shared table: saved once, under its first name."""

    def __init__(self, storage: Storage, module: TableModule, index: int) -> None:
        self.entry = SharedEntry()
        super().__init__(storage, module, index)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if self.entry.claim_save(destination, f"{prefix}weight"):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        *_, missing_keys, _, errors = arguments
        if state_dicts.refuse_invalid(self, state_dict, prefix, errors):
            return
        key = f"{prefix}weight"
        if self.entry.claim_load(key, state_dict.get(key), missing_keys, errors):
            super()._load_from_state_dict(state_dict, prefix, *arguments)


def duplicate_tables(model: nn.Module) -> dict[str, list[str]]:
    """Return names under which several collections of a model have separate tables.

    Each of these tables has its own memory, optimizer state and checkpoint entry, and learns only
    from its own collection. If one table is meant, use `share_tables`.

    Returns:
        For each such name with equal sizes, the paths of the collections.

    Raises:
        TypeError: `model` is not a module.

    Example:
        >>> item = emblib.EmbeddingBagConfig(1_000, 16, "item", ["basket"])
        >>> left, right = (emblib.EmbeddingBagCollection([item]) for _ in range(2))
        >>> emblib.duplicate_tables(torch.nn.ModuleDict({"left": left, "right": right}))
        {'item': ['left', 'right']}
    """
    return {name: sorted(collections) for name, collections in _duplicates(model).items()}


def _duplicates(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return {table name: {path: collection}} for each name with several tables of equal sizes."""
    check_module("model", model)
    readers_by_key: dict[tuple[str, int, int], dict[int, dict[str, Any]]] = {}
    for path, submodule in model.named_modules():
        handles: Any = getattr(submodule, "handles", None)
        for config in getattr(submodule, "configs", ()) if callable(handles) else ():
            if isinstance(config, TableConfig):
                key = (config.name, config.num_embeddings, config.embedding_dim)
                table = _identity_of_table(submodule, handles(), config.name)
                readers = readers_by_key.setdefault(key, {}).setdefault(id(table), {})
                readers[path] = submodule
    duplicates: dict[str, dict[str, Any]] = {}
    for (name, _, _), readers_by_table in readers_by_key.items():
        if len(readers_by_table) > 1:
            for readers in readers_by_table.values():
                duplicates.setdefault(name, {}).update(readers)
    return duplicates


def _identity_of_table(collection: Any, handles: Any, name: str) -> Any:
    """Return an object that all collections which read the same table have in common."""
    if isinstance(handles, dict):
        return handles[name]
    return getattr(collection, "shared", {}).get(name, collection)  # of a sharded collection


def share_tables(model: nn.Module, names: Iterable[str] | None = None) -> dict[str, list[str]]:
    """Replace separate tables of one name in several collections by one shared table.

    Use it for models with separate tables, as TorchRec's have. Rows, optimizer state and parameter
    of the first collection, in the order of the model, are kept. If some of the collections share a
    table already, the others read that one. Call it before the model is sharded or trained.

    Args:
        model: model whose collections are changed in place.
        names: names of the tables to share; None shares all that `duplicate_tables` finds.

    Returns:
        For each table, the paths of the collections that share it.

    Raises:
        KeyError: no two collections have tables of this name with equal sizes.
        ValueError: a storage is not `Dense`; tables of one name differ in their configuration or
            optimizer; the fused optimizer of a table whose rows would be lost has made steps (steps
            of torch.optim are not seen); or one of the collections has a hash table with a backing
            store or in a memory budget. Nothing is changed then.
        TypeError: `model` is not a module, a collection is sharded, or `names` is one string.

    Example:
        >>> item = emblib.EmbeddingBagConfig(1000, 16, "item", ["basket"])
        >>> bags = emblib.EmbeddingBagCollection([item])
        >>> item = emblib.EmbeddingConfig(1000, 16, "item", ["history"])
        >>> model = torch.nn.ModuleList([bags, emblib.EmbeddingCollection([item])])
        >>> emblib.share_tables(model)
        {'item': ['0', '1']}
    """
    if isinstance(names, str):
        raise TypeError(f"names must be a list of names, got {names!r}: write [{names!r}]")
    duplicates = _duplicates(model)
    shared_names = list(duplicates) if names is None else list(names)
    unknown_names = sorted(set(shared_names) - duplicates.keys())
    if unknown_names:
        raise KeyError(
            f"no two collections have tables {unknown_names}; duplicates are {sorted(duplicates)}"
        )
    shared_tables = {name: _make_shared_table(name, duplicates[name]) for name in shared_names}
    tables_by_collection: dict[int, tuple[Any, dict[str, SharedTable]]] = {}
    for name, table in shared_tables.items():
        for collection in duplicates[name].values():
            tables_by_collection.setdefault(id(collection), (collection, {}))[1][name] = table
    # Check all tables of each collection, because `read_shared` copies those that stay unshared.
    for collection, _ in tables_by_collection.values():
        collection.check_replaceable()
    for name, table in shared_tables.items():
        first_handle = next(iter(duplicates[name].values())).handles()[name]
        if first_handle is not table.handle:
            table.adopt(first_handle)
    for collection, tables in tables_by_collection.values():
        collection.read_shared(tables)
    return {name: list(duplicates[name]) for name in shared_names}


def _check_same_table(first: TableConfig, second: TableConfig, first_path: str, path: str) -> None:
    """Raise ValueError for tables of one name that differ in more than features and pooling."""
    field_names = [
        field.name
        for field in fields(TableConfig)
        if field.name not in ("feature_names", "pooling")
    ]
    differences = [
        f"{name} {getattr(first, name)!r} and {getattr(second, name)!r}"
        for name in field_names
        if getattr(first, name) != getattr(second, name)
    ]
    if differences:
        raise ValueError(
            f"the tables {first.name!r} of the collections {first_path!r} and {path!r} cannot be "
            f"one, they have {', '.join(differences)}: make these equal, or leave this name out of "
            "names="
        )


def _make_shared_table(name: str, collections_by_path: Mapping[str, Any]) -> SharedTable:
    """Return the table that all tables of a name become: one that is shared already, or a new one.

    The caller copies the rows of the first collection into it.
    """
    table: SharedTable | None = None
    configs: dict[str, TableConfig] = {}
    for path, collection in collections_by_path.items():
        if not callable(getattr(collection, "read_shared", None)):
            raise TypeError(
                f"the collection {path!r} with table {name!r} is sharded: call share_tables before "
                "the model is sharded"
            )
        if name in collection.shared_tables():
            shared_table = collection.shared_tables()[name]
            configs[path], table = shared_table.config, table or shared_table
        else:
            config = next(config for config in collection.configs if config.name == name)
            optimizer = config.optimizer or collection.optimizer
            configs[path] = replace(config, optimizer=optimizer)
    first_path, first_collection = next(iter(collections_by_path.items()))
    first_handle = first_collection.handles()[name]
    for path, collection in collections_by_path.items():
        _check_same_table(configs[first_path], configs[path], first_path, path)
        handle = collection.handles()[name]
        num_steps = 0 if collection.device.type == "meta" else getattr(handle.module, "step", 0)
        if num_steps and not _are_equal(first_handle.weight, handle.weight):
            raise ValueError(
                f"table {name!r} of the collection {path!r} has made {num_steps} steps, which "
                "would be lost: share tables before training; or load one state dict into all first"
            )
    return table or SharedTable(
        TableSlice.whole(configs[first_path]),
        first_collection.device,
        first_collection.groups.seeds,
    )
