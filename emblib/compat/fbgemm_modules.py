"""The modules of `fbgemm_gpu` that TorchRec imports, with emblib's classes and functions in them.

`Installation.install` registers the modules with Python and the operators with PyTorch. Names of
FBGEMM that emblib lacks are absent, or raise when they are used (`_RAISING_CLASSES`). With a
fallback, FBGEMM's Python files serve absent names.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, _library

from emblib.compat import (
    fbgemm_comms,
    fbgemm_inference,
    fbgemm_operators,
    fbgemm_tables,
    fbgemm_types,
)
from emblib.compat.checks import check_flags
from emblib.compat.fbgemm_operators import dense_jagged
from emblib.compat.fbgemm_operators.pruning import PrunedMap
from emblib.compat.raising import raising_class
from emblib.compat.torchrec_fallback import Fallback

ROOT = "fbgemm_gpu"

_USE_TIERS = (
    "rows on a disk or behind other tiers are a storage of the table in emblib: docs/tiers.md"
)


BackendType = enum.IntEnum("BackendType", "SSD DRAM PS DRAM_SSD", start=0)
"""Backends of key-value tables; the tables raise."""


class EnrichmentType(enum.IntEnum):
    """Sources that fill new rows of key-value tables; the tables raise."""

    IGR_LASER_EMBEDDING = 0
    IGR_LASER_SID = 1
    ONEFLOW_OPENTAB_SID = 2
    ONEFLOW_FEATURE_STORE_SID = 3
    IN_MEMORY_TEST_ONLY = 4


EnrichmentResponseFormat = enum.IntEnum(
    "EnrichmentResponseFormat", "JSON THRIFT_FLOAT THRIFT_INT64", start=0
)
"""Formats of the answers of these sources; the tables raise."""


class KeyValueOptions(SimpleNamespace):
    """Options of key-value tables, stored unchanged; the tables that would use them raise."""


_RAISING_CLASSES = {
    name: raising_class(name, reason, library="FBGEMM")
    for name, reason in {
        "SSDTableBatchedEmbeddingBags": _USE_TIERS,
        "PartiallyMaterializedTensor": _USE_TIERS,
        "KVEmbeddingInference": _USE_TIERS,
    }.items()
}
# Options of key-value tables: they may be constructed, because the tables themselves raise.
_KEY_VALUE_OPTIONS: dict[str, Any] = {
    "BackendType": BackendType,
    "EnrichmentResponseFormat": EnrichmentResponseFormat,
    "EnrichmentType": EnrichmentType,
    **{
        name: type(name, (KeyValueOptions,), {})
        for name in ("EnrichmentPolicy", "EvictionPolicy", "KVZCHParams", "KVZCHTBEConfig")
    },
}


def get_table_batched_offsets_from_dense(
    merged_indices: Tensor,
    L: int | None = None,
    total_B: int | None = None,
    use_cpu: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return indices `[T * B * L]` and int64 offsets `[T * B + 1]` of indices `[T, B, L]`.

    Args:
        merged_indices: `[T, B, L]`; any shape if both `L` and `total_B` are passed.
        L: lookups per bag; ignored without `total_B`.
        total_B: number of bags, T * B; ignored without `L`.
        use_cpu: whether the results are on the CPU. If not, they are on the current GPU, or on
            torch's default device if there is no GPU.
    """
    check_flags(use_cpu=use_cpu)
    if L is None or total_B is None:
        num_tables, batch_size, L = merged_indices.shape
        total_B = num_tables * batch_size
    device = torch.device("cpu") if use_cpu else torch.get_default_device()
    if not use_cpu and torch.cuda.is_available():
        device = torch.device("cuda")
    offsets = torch.arange(total_B + 1, device=device) * L
    return merged_indices.contiguous().view(-1).to(device), offsets


def _contents_of_modules(names: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the names and values of each module, by the module's path below `fbgemm_gpu`.

    `names` has the names of `emblib.compat.fbgemm` and their values.
    """
    ssd_tables = {"SSDTableBatchedEmbeddingBags": _RAISING_CLASSES["SSDTableBatchedEmbeddingBags"]}
    enums = {
        name: names[name]
        for name in (
            "BoundsCheckMode",
            "ComputeDevice",
            "EmbeddingLocation",
            "PoolingMode",
            "RecordCacheMetrics",
        )
    }
    training = dict(names) | {
        "DEFAULT_ASSOC": 32,
        "DoesNotHavePrefix": fbgemm_tables.DoesNotHavePrefix,
        "INT8_EMB_ROW_DIM_OFFSET": 8,
    }
    option_classes = {
        name: value
        for name, value in training.items()
        if name.endswith(("Definition", "Mode", "Threshold", "Decay", "Prefix"))
        and name not in enums
    }
    reporters = {name: value for name, value in names.items() if "StatsReporter" in name}
    partial_tensor = {
        "PartiallyMaterializedTensor": _RAISING_CLASSES["PartiallyMaterializedTensor"]
    }
    inference = {
        "IntNBitTableBatchedEmbeddingBagsCodegen": (
            fbgemm_inference.IntNBitTableBatchedEmbeddingBagsCodegen
        ),
        "rounded_row_size_in_bytes": fbgemm_comms.rounded_row_size_in_bytes,
    }
    dense_offsets = {"get_table_batched_offsets_from_dense": get_table_batched_offsets_from_dense}
    return {
        "": {},
        "sparse_ops": {"get_source_mask": dense_jagged.get_source_mask_with_optional_size},
        "split_embedding_utils": dense_offsets,
        "split_embedding_configs": {
            "ELEMENT_SIZE": fbgemm_types.ELEMENT_SIZE,
            "EmbOptimType": names["EmbOptimType"],
            "FP8QuantizationConfig": fbgemm_types.FP8QuantizationConfig,
            "QuantizationConfig": fbgemm_types.QuantizationConfig,
            "SparseType": names["SparseType"],
        },
        "split_table_batched_embeddings_ops": training,
        "split_table_batched_embeddings_ops_common": training | _KEY_VALUE_OPTIONS,
        "split_table_batched_embeddings_ops_training": training,
        "split_table_batched_embeddings_ops_inference": training | inference,
        "tbe": {},
        "tbe.cache": {},
        "tbe.cache.kv_embedding_ops_inference": {
            "KVEmbeddingInference": _RAISING_CLASSES["KVEmbeddingInference"]
        },
        "tbe.config": enums | option_classes,
        "tbe.config.embedding_config": enums,
        "tbe.config.optimizer_config": option_classes,
        "runtime_monitor": reporters,
        "tbe.monitoring": reporters,
        "tbe.monitoring.runtime_monitor": reporters,
        "tbe.ssd": ssd_tables | _KEY_VALUE_OPTIONS | {"ASSOC": 32},
        "tbe.ssd.ssd_config": _KEY_VALUE_OPTIONS,
        "tbe.ssd.training": ssd_tables,
        "tbe.ssd.utils": {},
        "tbe.utils": dense_offsets,
        "tbe.ssd.utils.partially_materialized_tensor": partial_tensor,
        **fbgemm_comms.NAMES,
    }


class Installation:
    """The modules under the name `fbgemm_gpu`, for the rest of the process.

    They cannot be removed: PyTorch ends the process if the real library registers operators again.

    Args:
        names: the names of `emblib.compat.fbgemm` and their values.
    """

    _fallback: Fallback | None = None

    def __init__(self, names: Mapping[str, Any]) -> None:
        contents = _contents_of_modules(names)
        self._modules: dict[str, ModuleType] = {}
        for path, module_names in contents.items():
            full_name = f"{ROOT}.{path}" if path else ROOT
            module = ModuleType(
                full_name, "FBGEMM's names, implemented by emblib; see docs/torchrec.md."
            )
            # `path` is "" for the package fbgemm_gpu itself.
            prefix = f"{path}." if path else ""
            is_package = any(other and other.startswith(prefix) for other in contents)
            module.__spec__ = ModuleSpec(full_name, None, is_package=is_package)
            if is_package:
                module.__path__ = []
            vars(module).update(module_names)
            module.__dict__["__all__"] = sorted(module_names)
            self._modules[full_name] = module
            parent, _, name = full_name.rpartition(".")
            if parent:
                setattr(self._modules[parent], name, module)
        # `open_source` is True in FBGEMM's wheels: operators need not be loaded by hand.
        vars(self._modules[ROOT]).update(
            is_of_emblib=True,
            open_source=True,
            __file__=__file__,
            __version__="1.8.0+emblib",  # of the FBGEMM whose names these are
        )

    def install(self, *, fallback: bool = False) -> None:
        """Register modules and operators; a second call changes nothing, except for `fallback`.

        Args:
            fallback: whether FBGEMM's Python files, where it is installed, serve the modules and
                names that emblib lacks. Its libraries are never loaded.

        Raises:
            ModuleNotFoundError: `fallback` is set, and FBGEMM is not installed.
            RuntimeError: the real fbgemm_gpu was imported, or its operators are registered.
        """
        check_flags(fallback=fallback)
        foreign_modules = sorted(
            name
            for name, module in sys.modules.items()
            if name.partition(".")[0] == ROOT
            and module is not self._modules.get(name)
            and self._fallback is None
        )
        if foreign_modules:
            origin = getattr(sys.modules[foreign_modules[0]], "__file__", None)
            raise RuntimeError(
                f"fbgemm_gpu is imported already ({foreign_modules[0]} from {origin}), and its "
                "objects would mix with emblib's: call emblib.compat.fbgemm.install() before "
                "anything imports fbgemm_gpu or torchrec"
            )
        foreign_operators = fbgemm_operators.foreign_operators()
        if foreign_operators:
            raise RuntimeError(
                f"torch.ops.fbgemm.{foreign_operators[0]} and {len(foreign_operators) - 1} more "
                "operators are registered already, by a library of FBGEMM: call "
                "emblib.compat.fbgemm.install() in a process that does not load it"
            )
        if not fbgemm_operators.is_registered():
            fbgemm_operators.register()
            _ignore_fake_classes()
        classes: Any = torch.classes.fbgemm
        classes.PrunedMapCPU = PrunedMap
        if fallback and self._fallback is None:
            self._fallback = Fallback(self._modules, ROOT)
            self._fallback.install()
            for name, module in self._modules.items():
                serve_name = functools.partial(
                    self._serve_from_fallback, name.removeprefix(ROOT).lstrip(".")
                )
                vars(module)["__getattr__"] = serve_name
        sys.modules.update(self._modules)

    def _serve_from_fallback(self, module: str, name: str) -> Any:
        """Return the value of a name that a module lacks, from FBGEMM's file of the module."""
        if self._fallback is None or name.startswith("__"):
            raise AttributeError(f"module {module} has no attribute {name!r}", name=name)
        return self._fallback.attribute(module, name)


def _ignore_fake_classes() -> None:
    """Make PyTorch ignore fakes that TorchRec registers for FBGEMM's TorchScript classes.

    emblib does not have these classes.
    """
    register_in_torch = _library.register_fake_class

    def register_fake_class(qualname: str, fake_class: Any = None) -> Any:
        if not qualname.startswith("fbgemm::"):
            return register_in_torch(qualname, fake_class)
        return (lambda cls: cls) if fake_class is None else fake_class

    vars(_library)["register_fake_class"] = register_fake_class
