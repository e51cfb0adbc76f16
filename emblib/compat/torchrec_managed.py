"""TorchRec's managed collision modules, implemented by hash tables.

In TorchRec a module maps the ids of a table to its rows before the lookup. It counts ids, and every
`eviction_interval` batches new ids replace others. In emblib the tables themselves become hash
tables of the same number of rows (`emblib.storage.Hash`), with the eviction of the policy. In
training an id gets a row with an initial value at its first lookup. In evaluation an id without a
row reads zeros. The tables are sharded, planned and saved like other hash tables.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from emblib import Eviction
from emblib.compat.checks import check_flags
from emblib.compat.torchrec_names import RUN_TORCHREC_ITSELF
from emblib.compat.torchrec_sharders import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingCollection,
    EmbeddingCollectionSharder,
)
from emblib.compat.torchrec_utils import with_ids
from emblib.jagged import KeyedJaggedTensor
from emblib.storage import Dense, Hash


class LFU_EvictionPolicy:
    """Policy that evicts the ids that were used least often.

    Raises:
        ValueError: `threshold_filtering_func` is not None.
    """

    eviction: ClassVar[Eviction] = Eviction.LFU

    def __init__(self, threshold_filtering_func: None = None) -> None:
        if threshold_filtering_func is not None:
            raise ValueError(
                "threshold_filtering_func must be left out: storage=Hash(admission="
                "FrequencyAdmission(threshold)) admits ids by their number of uses. "
                + RUN_TORCHREC_ITSELF
            )


class LRU_EvictionPolicy(LFU_EvictionPolicy):
    """Policy that evicts the ids whose last use is the oldest; `decay_exponent` is ignored.

    Raises:
        ValueError: `threshold_filtering_func` is not None.
    """

    eviction = Eviction.LRU

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: None = None) -> None:
        super().__init__(threshold_filtering_func)


class DistanceLFU_EvictionPolicy(LFU_EvictionPolicy):
    """Policy that evicts the ids that were used least often, and of these the oldest ones.

    TorchRec's score is the number of uses divided by the batches since the last use, to the power
    of `decay_exponent`.

    Raises:
        ValueError: `decay_exponent` is not 1, or `threshold_filtering_func` is not None.
    """

    eviction = Eviction.LRU_LFU

    def __init__(self, decay_exponent: float = 1.0, threshold_filtering_func: None = None) -> None:
        if decay_exponent != 1.0:
            raise ValueError(
                f"decay_exponent must be 1, got {decay_exponent}: ids are ranked by uses, then by "
                f"the last use. {RUN_TORCHREC_ITSELF}"
            )
        super().__init__(threshold_filtering_func)


class MCHManagedCollisionModule(nn.Module):
    """Number of rows, eviction policy and hash function of one table, with TorchRec's arguments.

    Args:
        zch_size: number of rows of the table.
        device: device that is only stored: the table is on the device of its collection.
        eviction_policy: one of the policies of this file.
        eviction_interval: ignored: a full table evicts when a new id needs a row.
        input_hash_size: second argument of `input_hash_func`.
        input_hash_func: function of ids and `input_hash_size`, which returns the ids to look up;
            None looks the ids up as they are.
        name: ignored.
        buckets: number that is only stored: any number of ranks can shard a hash table.

    Raises:
        TypeError: `eviction_policy` is not a policy of this file.
    """

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        eviction_policy: LFU_EvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = 2**63 - 1,
        input_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        name: str | None = None,
        buckets: int = 1,
    ) -> None:
        super().__init__()
        if not isinstance(eviction_policy, LFU_EvictionPolicy):
            raise TypeError(f"eviction_policy must be one of this package, got {eviction_policy!r}")
        self.device, self.eviction = torch.device(device), eviction_policy.eviction
        self._input_size, self._buckets = input_hash_size, buckets
        self.input_hash_func = input_hash_func
        # Programs read TorchRec's private attributes, too.
        self._zch_size, self._eviction_interval = zch_size, eviction_interval
        self._eviction_policy = eviction_policy

    def output_size(self) -> int:
        """Return `zch_size`; the table has a multiple of 32 rows, at least as many."""
        return self._zch_size

    def input_size(self) -> int:
        """Return the `input_hash_size` of the constructor."""
        return self._input_size

    def buckets(self) -> int:
        """Return the `buckets` of the constructor."""
        return self._buckets


class ManagedCollisionCollection(nn.Module):
    """Managed collision modules by table; a call applies their `input_hash_func`.

    Args:
        managed_collision_modules: module of each table, by the name of the table.
        embedding_configs: configurations of the tables.
        need_preprocess: whether a call applies hash functions; if not, it returns the batch itself.

    Raises:
        ValueError: a table has no module, or a module has no table or another number of rows; or,
            in a call, `input_hash_func` returns another number of ids.
    """

    def __init__(
        self,
        managed_collision_modules: Mapping[str, MCHManagedCollisionModule],
        embedding_configs: Sequence[Any],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        check_flags(need_preprocess=need_preprocess)
        self._configs = list(embedding_configs)
        self._hash_modules: dict[str, MCHManagedCollisionModule] = {}  # by feature
        names = [config.name for config in self._configs]
        if unused := sorted(managed_collision_modules.keys() - set(names)):
            raise ValueError(f"no table for the modules {unused}; the tables are {names}")
        for config in self._configs:
            module = managed_collision_modules.get(config.name)
            if not isinstance(module, MCHManagedCollisionModule):
                raise ValueError(
                    f"table {config.name!r} needs an MCHManagedCollisionModule of this package, "
                    f"got {module!r}"
                )
            if module.output_size() != config.num_embeddings:
                raise ValueError(
                    f"zch_size of table {config.name!r} must be its {config.num_embeddings} rows, "
                    f"got {module.output_size()}"
                )
            if need_preprocess and module.input_hash_func is not None:
                self._hash_modules |= dict.fromkeys(config.feature_names, module)
        self._managed_collision_modules = nn.ModuleDict(dict(managed_collision_modules))

    def embedding_configs(self) -> Sequence[Any]:
        """Return the configurations of the tables."""
        return self._configs

    def hashed_configs(self) -> list[Any]:
        """Return the configurations with hash storage.

        Raises:
            ValueError: a table has another storage than `Dense()`, or `init_fn`.
        """
        hashed_configs = []
        for config in self._configs:
            if config.storage != Dense():
                raise ValueError(
                    f"table {config.name!r} has storage {config.storage}: a managed collision "
                    "module makes plain tables hash tables; leave it out for others"
                )
            if config.init_fn is not None:
                raise ValueError(
                    f"table {config.name!r} has init_fn, which fills whole tables: set "
                    "weight_init_min and weight_init_max, or leave the module out and set "
                    "storage=Hash(initializer=...)"
                )
            module: Any = self._managed_collision_modules[config.name]
            hashed = replace(config, storage=Hash(eviction=module.eviction))
            # Attributes that the program attached are not fields, which `replace` copies.
            vars(hashed).update({**vars(config), **vars(hashed)})
            hashed_configs.append(hashed)
        return hashed_configs

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the batch with hashed ids; features without `input_hash_func` keep their ids."""
        if not self._hash_modules:
            return features
        batch = KeyedJaggedTensor.adopt(features)
        if not batch.keys():
            return batch
        ids_by_key = list(batch.values().split(batch.length_per_key()))
        for index, key in enumerate(batch.keys()):
            if (module := self._hash_modules.get(key)) is not None:
                assert module.input_hash_func is not None
                hashed_ids = module.input_hash_func(ids_by_key[index], module.input_size())
                if hashed_ids.shape != ids_by_key[index].shape:
                    raise ValueError(
                        f"input_hash_func of feature {key!r} must return an id per id, "
                        f"{list(ids_by_key[index].shape)}, got {list(hashed_ids.shape)}"
                    )
                ids_by_key[index] = hashed_ids
        return with_ids(batch, torch.cat(ids_by_key))


class ManagedCollisionEmbeddingCollection(nn.Module):
    """An embedding collection whose tables take any ids; a call returns its result and None.

    Args:
        embedding_collection: collection whose configurations, device, optimizer and flag
            (`need_indices` or `is_weighted`) the new tables have; its weights are not used.
        managed_collision_collection: number of rows and eviction of each of its tables.
        return_remapped_features: flag that must be False: the tables find rows by the ids.
        allow_in_place_embed_weight_update: ignored: the row of an evicted id gets the initial value
            of the new one.

    Raises:
        ValueError: the two collections have other tables, or `return_remapped_features` is set.
    """

    _collection_class: ClassVar[Any] = EmbeddingCollection

    def __init__(
        self,
        embedding_collection: Any,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__()
        if return_remapped_features:
            raise ValueError(
                "return_remapped_features must be False: rows are found by the ids themselves, "
                f"and there are no remapped ones. {RUN_TORCHREC_ITSELF}"
            )
        if list(embedding_collection.configs) != managed_collision_collection.embedding_configs():
            raise ValueError("the two collections must have the same configurations of tables")
        self._managed_collision_collection = managed_collision_collection
        self._embedding_module = self._collection_class(
            tables=managed_collision_collection.hashed_configs(),
            device=embedding_collection.device,
            optimizer=embedding_collection.optimizer,
            **self._options(embedding_collection),
        )

    def _options(self, collection: Any) -> dict[str, Any]:
        return {"need_indices": collection.need_indices()}

    def forward(self, features: KeyedJaggedTensor) -> tuple[Any, None]:
        """Return the result of the collection, and None for remapped ids."""
        return self._embedding_module(self._managed_collision_collection(features)), None


class ManagedCollisionEmbeddingBagCollection(ManagedCollisionEmbeddingCollection):
    """An embedding bag collection whose tables take any ids; a call returns its result and None.

    Arguments and errors are those of `ManagedCollisionEmbeddingCollection`.
    """

    _collection_class = EmbeddingBagCollection

    def __init__(
        self,
        embedding_bag_collection: Any,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_bag_collection, managed_collision_collection, return_remapped_features
        )

    def _options(self, collection: Any) -> dict[str, Any]:
        return {"is_weighted": collection.is_weighted()}


class ManagedCollisionEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Sharder of the collections inside managed collision embedding bag collections.

    Args:
        ebc_sharder: sharder whose arguments this one takes over; None is one with `fused_params`.
        mc_sharder: ignored: ids are routed as those of every hash table.
        fused_params: arguments of the optimizer; None is those of `ebc_sharder`.
        qcomm_codecs_registry: result of `get_qcomm_codecs_registry`; None is that of `ebc_sharder`.

    Raises:
        ValueError: `ebc_sharder` has other `fused_params`.
    """

    def __init__(
        self,
        ebc_sharder: Any = None,
        mc_sharder: Any = None,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> None:
        sharder = ebc_sharder or EmbeddingBagCollectionSharder(fused_params)
        _check_equal(fused_params, sharder, "ebc_sharder")
        super().__init__(
            sharder.fused_params, qcomm_codecs_registry or sharder.qcomm_codecs_registry
        )


class ManagedCollisionEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """Sharder of the collections inside managed collision embedding collections.

    Args:
        ec_sharder: sharder whose arguments this one takes over; None is one with `fused_params`.
        mc_sharder: ignored: ids are routed as those of every hash table.
        fused_params: arguments of the optimizer; None is those of `ec_sharder`.
        qcomm_codecs_registry: result of `get_qcomm_codecs_registry`; None is that of `ec_sharder`.

    Raises:
        ValueError: `ec_sharder` has other `fused_params`.
    """

    def __init__(
        self,
        ec_sharder: Any = None,
        mc_sharder: Any = None,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Any = None,
    ) -> None:
        sharder = ec_sharder or EmbeddingCollectionSharder(fused_params)
        _check_equal(fused_params, sharder, "ec_sharder")
        codecs = qcomm_codecs_registry or sharder.qcomm_codecs_registry
        super().__init__(sharder.fused_params, codecs, sharder.options["use_index_dedup"])


def _check_equal(fused_params: Mapping[str, Any] | None, sharder: Any, name: str) -> None:
    """Raise ValueError unless `fused_params` are None, empty or those of a sharder."""
    if fused_params and dict(fused_params) != dict(sharder.fused_params or {}):
        raise ValueError(f"fused_params must be those of {name}: pass them to it")
