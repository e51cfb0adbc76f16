"""Hash storage: rows for arbitrary 64-bit keys, in bounded memory.

`Hash` makes a `DynamicEmbeddingBags` per group of tables. Sharding divides the keys by hash, so a
slice of `n` rows is capacity for `n` keys. Checkpoints save rows by key, not by position. A hash
table cannot be on meta: a collection on meta has a `MetaPlaceholder` instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from emblib.attribute_errors import shows_attribute_errors
from emblib.dynamic import BackingStore, DynamicEmbeddingBags, HostRows, keys
from emblib.dynamic.hash_index import HASH_KEYS
from emblib.dynamic.saving import fallback
from emblib.dynamic.saving.checkpoint import (
    OPTIONAL_NAMES,
    child_state,
    set_table_entries,
    state_names,
    table_entries,
)
from emblib.dynamic.saving.entries import LAST_USES
from emblib.dynamic.tiers.store import StoreShard, check_backing
from emblib.init import Constant, Initializer, Uniform
from emblib.ops import autograd
from emblib.ops.hash import bytes_per_slot
from emblib.optim import Optimizer
from emblib.specs import (
    SLOTS_PER_BUCKET,
    CountMinSketch,
    DynamicSpec,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    InsertPolicy,
    OnInsertFailure,
    PerFeature,
    Pooling,
    check_count,
)
from emblib.storage.base import (
    CutUnits,
    KeyBlock,
    MemoryBytes,
    RowTimes,
    Storage,
    TableDescription,
    TableModule,
    TableSlice,
    TensorLayout,
    dense_gradient_ns,
    distinct_names,
    precision_of,
    row_bytes,
    state_bytes,
)
from emblib.storage.handles import TableHandle, bind_view, register_with_optimizer
from emblib.tables import parameters, state_dicts

_WORD_BYTES = 8  # of a key, a stamp or a score
# Bytes per row of `HostRows` besides the row: tag, key and stamp of its index, and the stamp and
# score of its record.
_HOST_ROW_OVERHEAD_BYTES = 1 + 4 * _WORD_BYTES


@dataclass(frozen=True)
class Hash(Storage):
    """A hash table of rows by key; `num_embeddings` is its capacity.

    The capacity of the table, or of each shard, is rounded up to a multiple of 32, the rows of a
    bucket. Fields that are not listed here are options of `DynamicSpec`.

    Args:
        initial_capacity: rows to start with, of the table or of each shard: of a shard at most its
            capacity. The table grows up to its capacity as keys are inserted. None starts with all.
        backing: store of rows that the device evicts, e.g. `BackingStore(DiskRows(directory))`;
            `num_embeddings` is then the device's capacity over all ranks. The object is a template:
            every shard makes its own store, with a share of the capacity of host memory, or files
            named after table and shard. With None, evicted rows are lost.
        seed: seed of the hash and of the initial values, as in `DynamicEmbeddingBags`. If untrusted
            users choose the keys, set a seed that they do not know. Tables with different seeds do
            not share a module. None uses seed 0 for initial values, and hashes keys by a seed that
            the collection draws from torch's generator, the same on all ranks.

    Raises:
        TypeError: `seed` is not an int; `backing` is not a `BackingStore`, or has a store that
            cannot be made per shard; or see `DynamicSpec`.
        ValueError: `seed` is not in [0, 2^63), or see `DynamicSpec`.

    Example:
        >>> storage = emblib.storage.Hash(eviction=emblib.Eviction.LFU)
        >>> table = emblib.EmbeddingBagConfig(1_000, 16, "user", storage=storage)
        >>> bags = emblib.EmbeddingBagCollection([table], optimizer=emblib.optim.SGD(0.1))
        >>> ids = torch.tensor([2**62, -7])
        >>> batch = emblib.KeyedJaggedTensor(["user"], ids, lengths=torch.tensor([1, 1]))
        >>> bags(batch).values().shape, bags.tables["user"].size()
        (torch.Size([2, 16]), 2)
    """

    initial_capacity: int | None = None
    max_load: float = 0.8
    eviction: Eviction = Eviction.LRU
    insert_policy: InsertPolicy = InsertPolicy.ALWAYS_EVICT
    initializer: Initializer = field(default=Uniform())
    initial_state: float = 0.0
    default_value: float = 0.0
    admission: FrequencyAdmission | None = None
    ttl: int | timedelta | PerFeature | None = None
    on_insert_failure: OnInsertFailure = OnInsertFailure.IGNORE
    fallback_rows: int = 0
    backing: BackingStore | None = None
    seed: int | None = field(default=None, repr=False)  # a secret, which must not be logged

    plan_name: ClassVar[str] = "Dynamic"
    is_keyed: ClassVar[bool] = True
    has_dense_rows: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.seed is not None:
            object.__setattr__(self, "seed", check_count("seed", self.seed, minimum=0))
        spec = self.spec(sys.maxsize, 1, "")  # checks the options
        for name in _OPTIONS:
            object.__setattr__(self, name, getattr(spec, name))
        if self.backing is not None:
            check_backing(self.backing)
            self.backing.check_shardable()

    # Configuration

    def check_table(self, table: TableDescription) -> None:
        """Raise ValueError for a table with `init_fn`: rows are initialised at their insertion."""
        if table.init_fn is not None:
            raise ValueError(
                f"a row of {table.name!r} gets its initial value when its key is inserted: use "
                "storage=Hash(initializer=...), not init_fn"
            )

    def spec(self, rows: int, dim: int, name: str) -> DynamicSpec:
        """Return the spec of a table of this storage, for a table module."""
        options = {option: getattr(self, option) for option in _OPTIONS}
        return DynamicSpec(rows, dim, name=name, **options)

    def check_slice(self, table_slice: TableSlice) -> None:
        """Raise ValueError for a slice of columns, or of a fraction of a fallback row."""
        num_shards = 1 if table_slice.key_block is None else table_slice.key_block[1]
        if not self.can_divide(num_shards):
            raise ValueError(
                f"every fallback row of a table is used by one of its shards: fallback_rows of "
                f"{table_slice.config.name!r} must be a multiple of their number, "
                f"{num_shards}, got {self.fallback_rows}"
            )
        if not table_slice.has_all_columns:
            raise ValueError(
                f"hash table {table_slice.config.name!r} is not divided by columns, got columns "
                f"{table_slice.columns} of {table_slice.config.embedding_dim}: every slice would "
                "have to insert the same keys"
            )

    def can_divide(self, num_shards: int) -> bool:
        """Return whether no shard would get a fraction of a fallback row."""
        return self.fallback_rows % num_shards == 0

    def slice_spec(self, table_slice: TableSlice, name: str) -> DynamicSpec:
        """Return the spec of a table of this slice; default bounds are those of the whole table."""
        storage, num_rows = self, table_slice.num_rows
        if self.initial_capacity is not None and not table_slice.is_whole:
            storage = replace(self, initial_capacity=min(self.initial_capacity, num_rows))
        spec = storage.spec(num_rows, table_slice.dim, name)
        if self.initializer != Uniform():
            return spec
        # Bounds follow from the rows of the whole table, however it is cut.
        low, high = table_slice.config.bounds
        initializer = Uniform(low, high) if low < high else Constant(low)
        return replace(spec, initializer=initializer)

    @property
    def counts_uses(self) -> bool:
        """Return whether eviction or admission is by the number of uses."""
        is_counted = self.eviction in (Eviction.LFU, Eviction.LRU_LFU)
        return is_counted or self.admission is not None

    # Modules

    def group_key(
        self, table_slice: TableSlice, number: int, optimizer: Optimizer, pooling: Pooling
    ) -> Hashable:
        """Return a key that is equal for tables that can share a module.

        A table never shares one if it has admission, a backing store, a time to live that is a
        `timedelta`, or assigned scores, or if its optimizer leaves gradients.
        """
        dim = table_slice.dim if pooling is Pooling.NONE else 0
        # A module has one admission counter, store, clock and set of assigned scores, and an
        # optimizer of torch one state for its parameter.
        order = self.eviction.order
        needs_own_module = (
            self.admission is not None
            or self.backing is not None
            or table_slice.spec.is_timed
            or order == "assigned"
            or not autograd.updates_in_backward(optimizer)
        )
        rules = (order, self.insert_policy, self.seed, number if needs_own_module else -1)
        return ("hash", precision_of(table_slice), optimizer, rules, dim)

    def make_module(
        self,
        slices: Sequence[TableSlice],
        feature_tables: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> TableModule:
        """Return the module of slices with equal group keys; on meta a placeholder for it."""
        if device.type == "meta":
            return MetaPlaceholder(slices, optimizer)
        names = distinct_names([table_slice.config.name for table_slice in slices])
        make = partial(
            DynamicEmbeddingBags,
            [table_slice.spec_named(name) for table_slice, name in zip(slices, names, strict=True)],
            optimizer,
            pooling=pooling,
            feature_tables=feature_tables,
            precision=precision_of(slices[0]),
            seed=self.seed,
            device=device,
            hash_seeds=seeds if self.seed is None else None,
        )
        if self.backing is None:
            return make()
        (table_slice,) = slices
        return self._with_store(make, table_slice, seeds[0] if self.seed is None else self.seed)

    def _with_store(
        self, make: Callable[..., TableModule], table_slice: TableSlice, seed: int
    ) -> TableModule:
        """Return the module of one slice with a store of its own.

        Raises:
            BlockingIOError: the store is open in another module or process.
        """
        assert self.backing is not None
        backing = self.backing.for_shard(
            StoreShard(table_slice.config.name, table_slice.key_block, seed)
        )
        try:
            return make(backing=backing)
        except BlockingIOError as error:
            if table_slice.key_block is None:
                error.add_note(
                    f"This is the whole table {table_slice.config.name!r}, in a collection that is "
                    "not sharded: if it is to be sharded, make the collection with device='meta', "
                    "so that only the shards have stores"
                )
            raise

    def is_placeholder(self, module: TableModule) -> bool:
        """Return whether `module` is the placeholder of a hash table on meta."""
        return isinstance(module, MetaPlaceholder)

    def make_handle(self, module: TableModule, index: int) -> TableHandle:
        """Return the handle of a table, which has the parameter `weight` by slot."""
        return HashHandle(self, module, index)

    def views(self, module: Any) -> list[dict[str, Tensor]]:
        """Return `weight` and the optimizer states of each table, by slot.

        Raises:
            RuntimeError: the module is on meta, where hash tables have no memory.
        """
        if self.is_placeholder(module):
            _refuse_meta()
        return [module.table_rows(t) for t in range(len(module.tables))]

    def reset(self, module: Any, seeds: Sequence[int]) -> None:
        """Remove all keys, with their optimizer states, and set the step to 0.

        `seeds` are not used: an initial value follows from the key and the seed of the module. Does
        nothing on meta.
        """
        if not self.is_placeholder(module):
            module.reset_parameters()

    def check_copyable(self, table: TableDescription) -> None:
        """Raise ValueError for a table with a backing store, whose files or memory have one owner.

        Callers are about to make a second table with the same rows.
        """
        if self.backing is not None:
            raise ValueError(
                f"table {table.name!r} has a backing store, which has one owner, and this makes "
                "another table with its rows: give the collection its optimizers when it is made, "
                "and for inference load its state_dict into a collection with another store"
            )

    # Sharding and checkpoints

    def resumes(self, source: TableHandle, target: TableHandle) -> bool:
        """Return whether the table `target` has a store and keys, and `source` has no keys.

        That is the case if an earlier process left the rows in the files of the store.
        """
        assert isinstance(source, HashHandle)
        assert isinstance(target, HashHandle)
        if self.backing is None or not target.module.size(target.index):
            return False
        return self.is_placeholder(source.module) or not source.module.size(source.index)

    def cut_units(self, table: TableDescription) -> CutUnits:
        """Allow cuts between any rows, not between columns."""
        return CutUnits(1, table.embedding_dim)

    def copy_slice(
        self,
        table_slice: TableSlice,
        source: TableHandle,
        target: TableHandle,
        key_block: KeyBlock | None,
    ) -> None:
        """Replace the keys of `target` by keys of `source` in `key_block`; None copies all keys.

        Rows, optimizer states, scores and times are copied with the keys, and so are the fallback
        rows, the clock, the score of the next batch and the counts of admission.
        """
        assert isinstance(source, HashHandle)
        assert isinstance(target, HashHandle)
        block_number, num_blocks = key_block or (0, 1)
        entries = table_entries(source.module, source.index)
        positions = (keys.owner(entries.keys, num_blocks) == block_number).nonzero().view(-1)
        set_table_entries(target.module, target.index, entries.take(positions))
        fallback_rows = fallback.rows_of(source.module.state, source.index)
        fallback.write_rows(target.module.state, target.index, fallback_rows)
        target.module.index.set_tick(source.module.index.tick)
        target.module.state.copy_policy_state(
            target.index,
            source.module.state,
            source.index,
            lambda counted_keys: keys.owner(counted_keys, num_blocks) == block_number,
        )

    def parameter_layouts(self, table: TableDescription) -> dict[str, TensorLayout]:
        """Return an empty dict: checkpoints have the rows by key, see `HashHandle`."""
        return {}

    def state_views(self, parameter: str, optimizer: Optimizer) -> dict[str, str]:
        """Return an empty dict: the states of a row are saved with its key."""
        return {}

    # Planner

    def nbytes(
        self, table_slice: TableSlice, optimizer: Optimizer | None, device: str
    ) -> MemoryBytes:
        """Return the bytes of a table with its full capacity, whatever `initial_capacity` is."""
        spec, itemsize = table_slice.spec, table_slice.config.data_type.itemsize
        num_extra_stamps = len(spec.lifetimes) - 1  # with a ttl per feature
        index_bytes = spec.rows * (
            bytes_per_slot(spec.eviction.order, device) + num_extra_stamps * _WORD_BYTES
        )
        num_rows = spec.rows + spec.fallback_rows
        bytes_of_states = state_bytes(optimizer, num_rows, spec.dim, itemsize)
        value_bytes = num_rows * spec.dim * itemsize + bytes_of_states
        device_bytes = index_bytes + value_bytes + _counter_bytes(spec.admission, device)
        if self.backing is None:
            return MemoryBytes(device_bytes)
        bytes_per_row = spec.dim * itemsize + state_bytes(optimizer, 1, spec.dim, itemsize)
        if device != "cpu":  # on a CPU, unused overflow rows take address space only
            device_bytes += bytes_per_row * self.backing.overflow_rows(torch.device(device))
        if not isinstance(self.backing.store, HostRows):
            # Files grow with the number of keys, which is not known.
            return MemoryBytes(device_bytes)
        capacity = self.backing.store.capacity
        assert isinstance(capacity, int)
        share = table_slice.num_rows / table_slice.config.num_embeddings
        host_bytes = capacity * share * (bytes_per_row + _HOST_ROW_OVERHEAD_BYTES)
        return (
            MemoryBytes(device_bytes + host_bytes)
            if device == "cpu"
            else MemoryBytes(device_bytes, host_bytes)
        )

    def lookup_ns(
        self, table_slice: TableSlice, optimizer: Optimizer | None, ids: float, times: RowTimes
    ) -> float:
        """Return the nanoseconds to find `ids` keys and to look up their rows."""
        ns_per_row = times.lookup_row_ns(
            table_slice, table_slice.dim * table_slice.config.data_type.itemsize, ids
        )
        return float(ids * ns_per_row + ids * times.costs.hash_ns)

    def update_ns(
        self, table_slice: TableSlice, optimizer: Optimizer | None, ids: float, times: RowTimes
    ) -> float:
        """Return the nanoseconds to update the rows of `ids` keys."""
        bytes_per_row = row_bytes(optimizer, table_slice.dim, table_slice.config.data_type.itemsize)
        ns_per_row = times.update_row_ns(table_slice, bytes_per_row, ids)
        return ids * ns_per_row + dense_gradient_ns(table_slice, optimizer, times)


# The options of `DynamicSpec` that `Hash` has.
_OPTIONS = tuple(sorted({f.name for f in fields(Hash)} & {f.name for f in fields(DynamicSpec)}))


def _counter_bytes(admission: FrequencyAdmission | None, device: str) -> int:
    """Return the bytes of the counter of an admission; 0 without."""
    if admission is None:
        return 0
    counter = admission.counter
    if isinstance(counter, ExactCounter):
        return (
            -(-counter.capacity // SLOTS_PER_BUCKET)
            * SLOTS_PER_BUCKET
            * bytes_per_slot("lfu", device)
        )
    assert isinstance(counter, CountMinSketch)
    threshold = admission.max_threshold
    # Counters are uint8, int32 or int64, the smallest that can count to the threshold.
    itemsize = next((size for size, bits in ((1, 8), (4, 31)) if threshold < 2**bits), 8)
    return counter.width * counter.depth * itemsize


class MetaPlaceholder(nn.Module):
    """Placeholder on meta for a `DynamicEmbeddingBags`, which cannot be there; it has no memory."""

    def __init__(self, slices: Sequence[TableSlice], optimizer: Optimizer) -> None:
        super().__init__()
        self.shapes = [(table_slice.num_rows, table_slice.dim) for table_slice in slices]
        self.optimizer, self.output_dtype = optimizer, torch.float32
        self.grad_anchor = torch.empty((), device="meta")

    def forward(self, *arguments: Any, **options: Any) -> NoReturn:
        """Raise RuntimeError: there are no rows to look up."""
        _refuse_meta()

    def nbytes(self) -> dict[str, int]:
        """Return an empty dict: there is no memory."""
        return {}


def _refuse_meta() -> NoReturn:
    raise RuntimeError(
        "hash tables have no memory on meta: move the module with to_empty(device=...)"
    )


class HashHandle(TableHandle):
    """Handle of a hash table: `weight` `[slots, dim]`; its state dict has rows by key.

    Entries are `keys`, `stamps`, `weight`, `<optimizer state>`, `clock`, `index.hash_keys` (the
    hash key of this table), and where the table has them `fallback.*` and the scores and counters
    of eviction and admission. Optimizer states are saved here, not with the optimizer: without the
    keys they have no meaning. On meta there is only `weight`.
    """

    weight: nn.Parameter
    module: DynamicEmbeddingBags

    @property
    @shows_attribute_errors
    def _is_placeholder(self) -> bool:
        return self._storage.is_placeholder(self.module)

    def bind(self) -> None:
        """Make `weight` the view of the table's rows, by slot.

        If backward leaves gradients, `weight` is the parameter of the module itself. On meta it
        has no memory.
        """
        module: Any = self.module
        if self._is_placeholder:
            view = torch.empty(module.shapes[self.index], device="meta")
            bind_view(self, "weight", view, module.optimizer)
            return
        if not autograd.updates_in_backward(module.optimizer):
            self._parameters["weight"] = module.weights
            register_with_optimizer(module.weights, self, module.optimizer)
            return
        view = module.table_rows(self.index)["weight"]
        bind_view(self, "weight", view, module.optimizer)

    def set_trained(self, parameter: nn.Parameter, *, trained: bool) -> None:
        """Train or freeze the table, from the next forward on.

        Does nothing on meta: `TableGroups` freezes the module that `to_empty` makes.
        """
        if not self._is_placeholder:
            super().set_trained(parameter, trained=trained)

    def check_replaceable(self) -> None:
        """Raise ValueError for a table in a memory budget.

        Callers are about to make a new module for the table, which would be in no budget.
        """
        if not self._is_placeholder and self.module.state.budget is not None:
            raise ValueError(
                f"table {self.module.table_names[self.index]!r} is in a memory budget, and this "
                "makes a new module that would be in none: set optimizers, share tables and shard "
                "the model first, then call MemoryBudget.attach"
            )

    def adopt(self, other: HashHandle) -> None:
        """Copy the keys and rows of another handle, and take over its parameter object.

        Optimizer states are not copied. If this table has keys, those that `Hash.copy_slice` has
        copied, they stay, with their states. The gradient of the parameter is dropped. On meta only
        the parameter object is taken over.
        """
        if self._is_placeholder:
            self._parameters["weight"] = other.weight
            return
        module, weight = self.module, other.weight
        entries = table_entries(module, self.index)
        if not entries.keys.numel():
            entries = table_entries(other.module, other.index)
            rows = {key: entries.rows[key] for key in ("weight", LAST_USES) if key in entries.rows}
            entries = replace(entries, rows=rows)
        hash_key = other.module.index.hash_key(other.index)
        set_table_entries(module, self.index, entries, hash_key=hash_key)
        fallback_rows = fallback.rows_of(other.module.state, other.index)
        fallback_rows = {
            name: tensor for name, tensor in fallback_rows.items() if name in ("keys", "weight")
        }
        fallback.write_rows(module.state, self.index, fallback_rows)
        module.state.copy_policy_state(
            self.index,
            other.module.state,
            other.index,
            lambda counted_keys: torch.ones_like(counted_keys, dtype=torch.bool),
        )
        weight.grad = None
        if autograd.updates_in_backward(module.optimizer):
            self._parameters["weight"] = weight
        else:
            parameters.disown(weight)
            weight.data = module.weights.data
            module.weights = weight

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        module: Any = self.module
        if self._is_placeholder:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        entries = table_entries(module, self.index)
        tensors = {"keys": entries.keys, "stamps": entries.stamps, **entries.rows}
        if entries.scores is not None:
            tensors["scores"] = entries.scores
        order = keys.canonical_order(entries.keys)
        for key, rows in tensors.items():
            destination[prefix + key] = rows[order].cpu()
        for key, value in fallback.rows_of(module.state, self.index).items():
            destination[f"{prefix}{fallback.FALLBACK}.{key}"] = value
        destination[f"{prefix}clock"] = module.index.clock.cpu().clone()
        for key, value in child_state(module).items():
            destination[prefix + key] = value
        hash_keys = f"{prefix}index.{HASH_KEYS}"
        destination[hash_keys] = destination[hash_keys][self.index : self.index + 1]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Replace all keys, with their rows, states and scores; on meta, load nothing."""
        _, _, missing_keys, unexpected_keys, errors = arguments
        if state_dicts.refuse_invalid(self, state_dict, prefix, errors):
            return
        if self._refuses_load_on_meta(state_dict, prefix, errors):
            return
        if self._is_placeholder:
            missing_keys.append(f"{prefix}keys")
            return
        module: DynamicEmbeddingBags = self.module
        entries = state_dicts.entries_under(prefix, state_dict)
        missing_names, unexpected_names = self.compare_names(entries)
        missing_keys.extend(prefix + key for key in sorted(missing_names))
        unexpected_keys.extend(prefix + key for key in sorted(unexpected_names))
        try:
            module.load_state_dict(self._state_of_module(entries), strict=False)
        except RuntimeError as error:
            errors.append(f"{prefix}: {error}")

    def compare_names(self, names: Collection[str]) -> tuple[set[str], set[str]]:
        """Return the names of required entries that `names` lack, and the `names` of no entry.

        On meta both are empty.
        """
        if self._is_placeholder:
            return set(), set()
        required_names, child_names = self._entry_names(), child_state(self.module).keys()
        missing_names = (required_names | (child_names - OPTIONAL_NAMES)) - set(names)
        return missing_names, set(names) - required_names - child_names

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per invalid entry of the table in a state dict."""
        if not self._is_placeholder:
            entries = state_dicts.entries_under(prefix, state_dict)
            state = self._state_of_module(entries)
            table_prefix = f"{self.module.table_names[self.index]}."
            for problem in state_dicts.find_problems(self.module, state, ""):
                yield prefix + problem.removeprefix(table_prefix)

    def _state_of_module(self, entries: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of this table under the keys of the module's state dict."""
        child_names = child_state(self.module).keys()
        table_prefix = f"{self.module.table_names[self.index]}."
        return {
            key if key == "clock" or key in child_names else table_prefix + key: entries[key]
            for key in entries.keys() & (self._entry_names() | child_names)
        }

    @property
    @shows_attribute_errors
    def _names_in_checkpoints(self) -> SimpleNamespace:
        """Return an object with an attribute per state dict entry, see `_fqn_modifiers`."""
        module: DynamicEmbeddingBags = self.module
        child_names = {
            key.split(".")[0]: getattr(module, key.split(".")[0]) for key in child_state(module)
        }
        names = {key.split(".")[0]: 0 for key in self._entry_names()}
        if fallback.FALLBACK in names:
            rows = dict.fromkeys(fallback.names_of(module.state, self.index), 0)
            child_names[fallback.FALLBACK] = SimpleNamespace(**rows)
        return SimpleNamespace(**{**names, **child_names})

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tell `torch.distributed.checkpoint.state_dict` which attribute a key begins with."""
        names = [name for name in vars(self._names_in_checkpoints) if name != "weight"]
        return dict.fromkeys(names, "_names_in_checkpoints")

    def _entry_names(self) -> set[str]:
        """Return the names of the handle's state dict entries, without those of children."""
        module: DynamicEmbeddingBags = self.module
        table_prefix = f"{module.table_names[self.index]}."
        names = {key for key in state_names(module.state) if key.startswith(table_prefix)}
        return {"clock", *(key.removeprefix(table_prefix) for key in names)}
