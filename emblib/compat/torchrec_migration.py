"""Migration of TorchRec's unsharded collections to emblib's.

A migrated collection is emblib's, with the keys of TorchRec's state dict. Its results have types of
the library of the batch: for a `KeyedJaggedTensor` of TorchRec it returns a `KeyedTensor` or
`JaggedTensor`s of TorchRec. Each table has the optimizer of its weight, so tables may have
different optimizers. Invalid ids have the effect that they had before: they raise where TorchRec
looks up with torch's modules, and have the `bounds_check_mode` of FBGEMM's modules otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from emblib import (
    BoundsCheck,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    optim,
)
from emblib.compat.fbgemm_migration import ReplacedSplitTBE, step_of
from emblib.compat.fbgemm_tables import STATE_ORDER
from emblib.compat.torchrec_utils import with_ids
from emblib.migration import (
    Bags,
    MigratedTable,
    NotMigrated,
    Replaced,
    TorchWeight,
    Trained,
    TrainingMemory,
    check_weight,
    chosen_rows,
    optimizer_for,
    refuse_skipped_ids,
)
from emblib.sharding import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from emblib.sharding.awaitables import LazyAwaitable
from emblib.sharding.lookup import CollectionRequests, CollectionSteps
from emblib.sharding.shard import SHARDED

_JAGGED_TYPES_MODULE = "torchrec.sparse.jagged_tensor"


def _types_of(features: Any) -> Any:
    """Return TorchRec's module of jagged types if `features` has one of them, else None."""
    is_torchrec = any(base.__module__ == _JAGGED_TYPES_MODULE for base in type(features).__mro__)
    return sys.modules[_JAGGED_TYPES_MODULE] if is_torchrec else None


def _to_keyed(features: Any) -> Any:
    """Convert a TensorDict to TorchRec's KeyedJaggedTensor; return other batches unchanged.

    A TensorDict is returned unchanged, too, if TorchRec's conversion is not imported.
    """
    is_dict = type(features).__module__.partition(".")[0] == "tensordict"
    module: Any = sys.modules.get("torchrec.sparse.tensor_dict")
    return module.maybe_td_to_kjt(features, None) if is_dict and module else features


def _to_library_types(output: Any, types: Any) -> Any:
    """Convert the output of a collection to TorchRec's types; return it unchanged for None.

    `types` is the result of `_types_of`.
    """
    if types is None:
        return output
    if isinstance(output, KeyedTensor):
        return types.KeyedTensor(
            keys=list(output.keys()),
            length_per_key=list(output.length_per_key()),
            values=output.values(),
        )
    return {
        name: types.JaggedTensor(
            values=jagged.values(), lengths=jagged.lengths(), weights=jagged.weights_or_none()
        )
        for name, jagged in output.items()
    }


def _refuse_skipped_ids(collection: Any, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return `batch`; if `collection.skips_ids` is False, the check of its ids fails for -1, too.

    Raises:
        RuntimeError: a feature of the tables has id -1, and the host can read ids without a wait.
    """
    if collection.skips_ids:
        return batch

    def make_error() -> RuntimeError | None:
        for config in collection.configs:
            for key in set(config.feature_names) & set(batch.keys()):
                if (batch[key].values() == -1).any():
                    return RuntimeError(
                        f"feature {key!r} has id -1, ids of table {config.name!r} must be in "
                        f"[0, {config.num_embeddings}): torch's modules skip no id"
                    )
        return None

    ids = batch.values()
    checked_ids = refuse_skipped_ids(ids, make_error)
    return batch if checked_ids is ids else with_ids(batch, checked_ids)


class MigratedEmbeddingBagCollection(EmbeddingBagCollection):
    """A collection of emblib that replaces one of TorchRec.

    Attributes:
        trained_by: class name of the torch optimizer that trains its parameters; "" for none.
        skips_ids: whether id -1 is skipped, as by FBGEMM's modules; torch's raise.
    """

    trained_by = ""
    skips_ids = True

    def forward(self, features: Any) -> Any:
        """Pool the bags of each feature; return a KeyedTensor of the library of `features`."""
        batch = _to_keyed(features)
        adopted = _refuse_skipped_ids(self, KeyedJaggedTensor.adopt(batch))
        return _to_library_types(super().forward(adopted), _types_of(batch))


class MigratedEmbeddingCollection(EmbeddingCollection):
    """A collection of emblib that replaces one of TorchRec.

    Its attributes are those of `MigratedEmbeddingBagCollection`.
    """

    trained_by = ""
    skips_ids = True

    def forward(self, features: Any) -> Any:
        """Look up every id; return JaggedTensors of the library of `features` by name."""
        batch = _to_keyed(features)
        adopted = _refuse_skipped_ids(self, KeyedJaggedTensor.adopt(batch))
        return _to_library_types(super().forward(adopted), _types_of(batch))

    def embedding_dim(self) -> int:
        """Return the number of columns of every table, which TorchRec requires to be equal."""
        return int(self.configs[0].embedding_dim)


class _ReceivedBatch(NamedTuple):
    """A batch received from all ranks, and the types for this rank's output."""

    batch: Any
    types: Any  # result of `_types_of` for the batch that this rank sent


class _WithTypes:
    """Stages of a sharded lookup whose output has types of the library of its input.

    Raises:
        ValueError: a torch optimizer trains the parameters of `source`, which sharding replaces.
    """

    def __init__(
        self, source: Any, *arguments: Any, optimizer: optim.Optimizer | None = None, **options: Any
    ) -> None:
        if source.trained_by and optimizer is None:
            raise ValueError(
                f"{source.trained_by} trains the tables as parameters, which sharding replaces, so "
                "that it would train none of them: migrate with tables=, e.g. "
                "emblib.optim.Adam(lr), or pass optimizer= here; or migrate without the "
                "optimizer, shard, and make it of the parameters of the sharded model"
            )
        parent: Any = super()
        parent.__init__(source, *arguments, optimizer=optimizer, **options)
        self.skips_ids = source.skips_ids

    def collection_requests(self, features: Any) -> CollectionRequests:
        """Return the ids to send, for a batch of either library."""
        batch = _to_keyed(features)
        parent: Any = super()
        adopted = None
        if batch is not None:
            adopted = _refuse_skipped_ids(self, KeyedJaggedTensor.adopt(batch))
        requests: CollectionRequests = parent.collection_requests(adopted)
        types = _types_of(batch)
        return requests._replace(join=lambda batches: _ReceivedBatch(requests.join(batches), types))

    def prefetch(self, received: Any) -> None:
        """Prefetch the rows of a batch into the caches of their tables."""
        parent: Any = super()
        parent.prefetch(received.batch)

    def compute(self, received: Any) -> Any:
        """Look up the received ids."""
        parent: Any = super()
        return parent.compute(received.batch)

    def collection_steps(self, rows: Any, received: Any) -> CollectionSteps:
        """Return the outputs of a batch: `rows` are those that `compute` looked up."""
        parent: Any = super()
        steps: CollectionSteps = parent.collection_steps(rows, received.batch)

        def join(pending: list[Any]) -> LazyAwaitable[Any]:
            output: LazyAwaitable[Any] = steps.join(pending)
            output.then(lambda result: _to_library_types(result, received.types))
            return output

        return steps._replace(join=join)


class ShardedMigratedEmbeddingBagCollection(_WithTypes, ShardedEmbeddingBagCollection):
    """A migrated `EmbeddingBagCollection`, sharded over ranks."""


class ShardedMigratedEmbeddingCollection(_WithTypes, ShardedEmbeddingCollection):
    """A migrated `EmbeddingCollection`, sharded over ranks."""


SHARDED[MigratedEmbeddingBagCollection] = ShardedMigratedEmbeddingBagCollection
SHARDED[MigratedEmbeddingCollection] = ShardedMigratedEmbeddingCollection


class ReplacedCollection(Replaced):
    """Replacement of an EmbeddingBagCollection or EmbeddingCollection, whose weights torch trains.

    Args:
        paths: paths of the collection in the model.
        old: the collection of TorchRec.
        optimizers: torch optimizers that may train its weights.
        tables: optimizer for all tables; None for that of each weight.

    Raises:
        NotMigrated: `old` is of a subclass or has no tables, or a weight or its optimizer cannot be
            migrated.
    """

    def __init__(
        self,
        paths: Sequence[str],
        old: Any,
        optimizers: Sequence[TorchOptimizer],
        tables: optim.Optimizer | None,
    ) -> None:
        self._check(old)
        self.weights = [
            TorchWeight(child.weight, Trained.of(optimizers, child.weight))
            for child in _table_modules(old).values()
        ]
        optimizers_and_notes = [optimizer_for(w.trained, w.weight, tables) for w in self.weights]
        _check_steps(self.weights, [optimizer for optimizer, _ in optimizers_and_notes])
        self.note = "; ".join(dict.fromkeys(note for _, note in optimizers_and_notes if note))
        table_optimizers = [optimizer for optimizer, _ in optimizers_and_notes]
        # torch's modules raise for invalid ids, -1 among them.
        migrated = _make_migrated(old, table_optimizers, BoundsCheck.FATAL)
        migrated.skips_ids = False
        super().__init__(paths, old, migrated)

    @staticmethod
    def _check(old: Any) -> None:
        if type(old).__name__ not in FACTORIES or not type(old).__module__.startswith("torchrec."):
            raise NotMigrated(f"{type(old).__name__} is a subclass, whose code would be lost")
        table_modules = _table_modules(old)
        if not table_modules:
            raise NotMigrated("it has no tables")
        for child in table_modules.values():
            check_weight(child.weight)

    @property
    def _tables(self) -> list[MigratedTable]:
        return [_migrated_table(handle) for handle in self.new.handles().values()]

    @property
    def memory(self) -> tuple[TrainingMemory, TrainingMemory]:
        """Bytes in training, before and after."""
        before, after = TrainingMemory(), TrainingMemory()
        for weight, table in zip(self.weights, self._tables, strict=True):
            before += weight.memory
            after += table.memory if table.is_fused else weight.memory
        return before, after

    @property
    def optimizers(self) -> list[optim.Optimizer]:
        """The distinct optimizers that backward applies."""
        fused = (table.module.optimizer for table in self._tables if table.is_fused)
        return list(dict.fromkeys(fused))

    @property
    def is_fused(self) -> bool:
        """True if backward updates a table."""
        return any(table.is_fused for table in self._tables)

    @property
    def is_trained(self) -> bool:
        """True if a torch optimizer trains a weight."""
        return any(w.trained is not None and w.weight.requires_grad for w in self.weights)

    def sizes(self) -> str:
        """Return a text with the numbers of tables and rows."""
        return f"{len(self.new.configs)} tables, {sum(len(t.rows) for t in self._tables)} rows"

    def carry_over(self) -> None:
        """Copy rows and optimizer states into the new tables."""
        for weight, table in zip(self.weights, self._tables, strict=True):
            weight.carry_over(table)

    def replace_in_optimizers(self) -> None:
        """Replace the old parameters in the groups of the optimizers, or remove fused ones."""
        for weight, table in zip(self.weights, self._tables, strict=True):
            weight.replace_in_optimizer(table)
            if weight.trained is not None and not table.is_fused:
                self.new.trained_by = type(weight.trained.optimizer).__name__

    def carry_back(self) -> None:
        """Copy rows and states back, and put the old parameters into the optimizers' groups."""
        for weight, table in zip(self.weights, self._tables, strict=True):
            weight.carry_back(table)

    def sample(self, max_rows: int | None, seed: int) -> tuple[nn.Module, list[TorchOptimizer]]:
        """Return a collection of TorchRec with some rows of each table, and its optimizers.

        A table has at most `max_rows` rows; None takes all.
        """
        module, row_ids = _smaller_collection(self.old, max_rows, seed)
        optimizers: list[TorchOptimizer] = []
        children = _table_modules(module).values()
        tables = zip(self.weights, self._tables, children, row_ids, strict=True)
        for weight, table, child, table_ids in tables:
            table_ids = table_ids.to(table.rows.device)
            with torch.no_grad():
                child.weight.copy_(table.rows[table_ids])
            if weight.trained is None or not weight.weight.requires_grad:
                child.weight.requires_grad_(weight.weight.requires_grad)
                continue
            optimizers.append(weight.trained.make_copy([child.weight]))
            state = weight.state_of(table, table_ids)
            if state:
                optimizers[-1].state[child.weight] = state
        return module, optimizers

    def features(self) -> list[tuple[tuple[str, ...], int]]:
        """Return the name of each feature, as `TraceRecorder` has it per path, and its table.

        A feature of several tables has the name for the first one: the trace has its bags per
        table.
        """
        first_tables: dict[str, str] = {}
        for config in self.new.configs:
            for feature in config.feature_names:
                first_tables.setdefault(feature, config.name)
        suffixes = {feature: ("", f"@{table}") for feature, table in first_tables.items()}
        return [
            (tuple(f"{p}.{feature}{suffix}" for p in self.paths for suffix in suffixes[feature]), t)
            for t, config in enumerate(self.new.configs)
            for feature in config.feature_names
        ]

    def call(self, module: Any, bags: Sequence[Bags]) -> Tensor:
        """Look up `bags` with the old or the new collection; return the values of its output.

        A feature that several tables read has the bags for the first one.
        """
        bags_of_feature: dict[str, Bags] = {}
        for (names, _), feature_bags in zip(self.features(), bags, strict=True):
            bags_of_feature.setdefault(names[0].removeprefix(f"{self.paths[0]}."), feature_bags)
        ids, lengths = (
            torch.cat(tensors) for tensors in zip(*bags_of_feature.values(), strict=True)
        )
        weights = None
        if getattr(self.old, "_is_weighted", False):
            weights = torch.ones(len(ids), device=ids.device)
        types: Any = sys.modules[_JAGGED_TYPES_MODULE]
        output = module(
            types.KeyedJaggedTensor(list(bags_of_feature), ids, weights=weights, lengths=lengths)
        )
        if isinstance(output, Mapping):
            return torch.cat([jagged.values() for jagged in output.values()])
        pooled: Tensor = output.values()
        return pooled

    def rows(self, module: Any) -> list[Tensor]:
        """Return the rows of each table of the old or the new collection."""
        return [child.weight.detach() for child in _table_modules(module).values()]


class ReplacedFusedCollection(ReplacedCollection):
    """Replacement of a fused collection, whose tables FBGEMM's modules train in backward."""

    def __init__(
        self,
        paths: Sequence[str],
        old: Any,
        optimizers: Sequence[TorchOptimizer],
        tables: optim.Optimizer | None,
    ) -> None:
        self._check(old)
        self.weights, self._tbe_of_tables = [], _tbe_of_each_table(old)
        bags_by_module = {
            id(module): ReplacedSplitTBE(("",), module, (), None).new.bags
            for module, _ in self._tbe_of_tables
        }
        bags_of_tables = [bags_by_module[id(module)] for module, _ in self._tbe_of_tables]
        migrated = _make_migrated(
            old, [bags.optimizer for bags in bags_of_tables], bags_of_tables[0].bounds_check
        )
        if _is_pooled(old) and len({config.pooling for config in _configs(old)}) > 1:
            self.note = "columns follow the names; TorchRec's come in the order of the poolings"
        Replaced.__init__(self, paths, old, migrated)

    @property
    def memory(self) -> tuple[TrainingMemory, TrainingMemory]:
        """Bytes of rows and optimizer states, before and after."""
        before, after = TrainingMemory(), TrainingMemory()
        for (module, number), table in zip(self._tbe_of_tables, self._tables, strict=True):
            state_bytes = sum(state.nbytes for state in _states(module, number))
            before += TrainingMemory(module.split_embedding_weights()[number].nbytes, state_bytes)
            after += table.memory
        return before, after

    @property
    def is_trained(self) -> bool:
        """True: backward trains the tables."""
        return True

    def carry_over(self) -> None:
        """Copy rows, optimizer states and steps into the new tables."""
        for (module, number), table in zip(self._tbe_of_tables, self._tables, strict=True):
            table.rows.copy_(module.split_embedding_weights()[number])
            for new, old in _state_pairs(table, module, number):
                new.copy_(old.view_as(new))
            table.module.set_step(step_of(module))

    def replace_in_optimizers(self) -> None:
        """Do nothing: no torch optimizer trains the tables."""

    def carry_back(self) -> None:
        """Copy rows, optimizer states and steps back."""
        self._copy_into(
            self._tbe_of_tables,
            [torch.arange(len(table.rows), device="cpu") for table in self._tables],
        )

    def _copy_into(self, tbes: Sequence[tuple[Any, int]], row_ids: Sequence[Tensor]) -> None:
        """Copy rows `row_ids[t]` of new table t, with states and step, into table t of `tbes`."""
        for (module, number), table, table_ids in zip(tbes, self._tables, row_ids, strict=True):
            table_ids = table_ids.to(table.rows.device)
            module.split_embedding_weights()[number].copy_(table.rows[table_ids])
            for new, old in _state_pairs(table, module, number):
                old.copy_(new[table_ids].view_as(old))
            module.iter.fill_(int(table.module.step))
            module.iter_cpu.fill_(int(table.module.step))
            module.set_learning_rate(float(table.module.learning_rate))

    def sample(self, max_rows: int | None, seed: int) -> tuple[nn.Module, list[TorchOptimizer]]:
        """Return a collection of TorchRec with up to `max_rows` rows per table, and no optimizers.

        Its backward updates the rows.
        """
        module, row_ids = _smaller_collection(self.old, max_rows, seed)
        with torch.no_grad():
            self._copy_into(_tbe_of_each_table(module), row_ids)
        return module, []


def _check_steps(
    weights: Sequence[TorchWeight], optimizers: Sequence[optim.Optimizer | None]
) -> None:
    """Raise NotMigrated if tables with equal Adam optimizers have different numbers of steps."""
    steps: dict[optim.Optimizer, set[int]] = {}
    for weight, optimizer in zip(weights, optimizers, strict=True):
        if isinstance(optimizer, optim.Adam) and weight.trained is not None:
            steps.setdefault(optimizer, set()).add(int(weight.trained.state.get("step", 0)))
    if any(len(table_steps) > 1 for table_steps in steps.values()):
        raise NotMigrated(
            "its tables were trained for different numbers of steps, and tables with the same "
            "optimizer have one step here: give each a learning rate of its own"
        )


def _tbe_of_each_table(collection: Any) -> list[tuple[Any, int]]:
    """Return FBGEMM's module of each table, and the number of the table in that module."""
    modules_by_table = {
        config.name: (lookups.get_submodule("_emb_module"), number)
        for lookups in vars(collection)["_emb_modules"]
        for number, config in enumerate(vars(lookups)["_embedding_tables"])
    }
    return [modules_by_table[config.name] for config in _configs(collection)]


def _states(module: Any, number: int) -> list[Tensor]:
    """Return the optimizer states of table `number` of a module of FBGEMM; [] without states."""
    states: list[list[Tensor]] = module.split_optimizer_states()
    return states[number] if states else []


def _state_pairs(table: MigratedTable, module: Any, number: int) -> list[tuple[Tensor, Tensor]]:
    """Return the optimizer states of a new table, each with that of table `number` of FBGEMM."""
    states = [table.states[name] for name in STATE_ORDER if name in table.states]
    return list(zip(states, _states(module, number), strict=True))


def _migrated_table(handle: Any) -> MigratedTable:
    """Return rows and optimizer states of a table of the new collection."""
    views = handle.views()
    rows = views.pop("weight")
    return MigratedTable(rows, views, handle.module, handle.weight)


def _is_pooled(collection: Any) -> bool:
    return hasattr(collection, "embedding_bags")


def _table_modules(collection: Any) -> dict[str, Any]:
    """Return the module with the weight of each table, of either library."""
    modules = collection.embedding_bags if _is_pooled(collection) else collection.embeddings
    return {config.name: modules[config.name] for config in _configs(collection)}


def _configs(collection: Any) -> list[Any]:
    """Return the configurations of the tables."""
    if _is_pooled(collection):
        return list(collection.embedding_bag_configs())
    return list(collection.embedding_configs())


def _options(old: Any) -> dict[str, Any]:
    """Return the constructor options of a collection, other than tables, device and optimizer."""
    if _is_pooled(old):
        return {"is_weighted": old.is_weighted()}
    return {"need_indices": old.need_indices()}


def _make_migrated(
    old: Any, optimizers: Sequence[optim.Optimizer | None], bounds_check: BoundsCheck
) -> MigratedEmbeddingBagCollection | MigratedEmbeddingCollection:
    """Return a migrated collection with initial values; `optimizers` has one per table."""
    table_modules, is_pooled = _table_modules(old), _is_pooled(old)
    tables: list[Any] = []
    for config, optimizer in zip(_configs(old), optimizers, strict=True):
        weight = table_modules[config.name].weight
        arguments: dict[str, Any] = {
            "num_embeddings": config.num_embeddings,
            "embedding_dim": config.embedding_dim,
            "name": config.name,
            "feature_names": tuple(config.feature_names),
            "data_type": weight.dtype,
            "init_fn": config.init_fn,
            "optimizer": optimizer,
        }
        if is_pooled:
            pooling = config.pooling.value.lower()
            tables.append(EmbeddingBagConfig(**arguments, pooling=pooling))
        else:
            tables.append(EmbeddingConfig(**arguments))
    device = next(iter(table_modules.values())).weight.device
    migrated_class = MigratedEmbeddingBagCollection if is_pooled else MigratedEmbeddingCollection
    collection: Any = migrated_class(
        tables, device=device, bounds_check=bounds_check, **_options(old)
    )
    return collection


def _smaller_collection(old: Any, max_rows: int | None, seed: int) -> tuple[Any, list[Tensor]]:
    """Return a collection of TorchRec with fewer rows, and the ids of these rows per table."""
    configs = _configs(old)
    row_ids = [chosen_rows(config.num_embeddings, max_rows, seed) for config in configs]
    options = _options(old)
    if hasattr(old, "_emb_modules"):
        options |= {
            "optimizer_type": old.optimizer_type(),
            "optimizer_kwargs": old.optimizer_kwargs(),
        }
    device = next(iter(_table_modules(old).values())).weight.device
    smaller_configs = [
        replace(config, num_embeddings=len(table_ids))
        for config, table_ids in zip(configs, row_ids, strict=True)
    ]
    return type(old)(tables=smaller_configs, device=device, **options), row_ids


def _refuse_sharded(paths: Sequence[str], old: Any, optimizers: Any, tables: Any) -> Replaced:
    raise NotMigrated(
        f"{type(old).__name__} is sharded by TorchRec: with emblib.compat.fbgemm.install() before "
        "torchrec is imported it runs on emblib's kernels; or import the names from "
        "emblib.compat.torchrec, whose DistributedModelParallel shards the model"
    )


def _refuse_quantised(paths: Sequence[str], old: Any, optimizers: Any, tables: Any) -> Replaced:
    raise NotMigrated(
        f"{type(old).__module__}.{type(old).__name__} is quantised: migrate the model that it was "
        "made of, then call quantized(8) of the new collection"
    )


def _collection_factory(
    paths: Sequence[str], old: Any, optimizers: Any, tables: optim.Optimizer | None
) -> Replaced:
    """Return the replacement of a collection; refuse quantised ones, which have the same names."""
    if ".quant." in type(old).__module__:
        return _refuse_quantised(paths, old, optimizers, tables)
    return ReplacedCollection(paths, old, optimizers, tables)


FACTORIES = {
    "EmbeddingBagCollection": _collection_factory,
    "EmbeddingCollection": _collection_factory,
    "FusedEmbeddingBagCollection": ReplacedFusedCollection,
    "FusedEmbeddingCollection": ReplacedFusedCollection,
    "ShardedEmbeddingBagCollection": _refuse_sharded,
    "ShardedEmbeddingCollection": _refuse_sharded,
    "ShardedFusedEmbeddingBagCollection": _refuse_sharded,
    "ShardedQuantEmbeddingBagCollection": _refuse_sharded,
    "ShardedQuantEmbeddingCollection": _refuse_sharded,
}
