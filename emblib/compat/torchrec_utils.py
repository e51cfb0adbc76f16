"""TorchRec's small functions and classes: batches, state dicts, copies, feature processors."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from emblib.collections import PositionWeightedProcessor
from emblib.compat.fbgemm_types import EmbeddingLocation
from emblib.compat.torchrec_sharding import EmbeddingComputeKernel
from emblib.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from emblib.sharding import RankGroup
from emblib.sharding.dense import materialise
from emblib.sharding.pipelines.inputs import sharded_modules

# Batches


class Multistreamable(ABC):  # noqa: B024 abstract by `__subclasshook__`
    """Objects whose memory `record_stream` keeps until the work of a stream is done.

    Classes with all methods of a class in `methods` are subclasses of it.
    """

    methods: ClassVar[tuple[str, ...]] = ("record_stream",)

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        """Decide `issubclass` and `isinstance` by the methods."""
        names = cls.__dict__.get("methods")
        if names is None:
            return NotImplemented
        return all(callable(getattr(other, name, None)) for name in names)

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until the work queued on `stream` is done."""
        raise NotImplementedError(f"{type(self).__name__} must define record_stream")


class Pipelineable(Multistreamable):
    """Objects that pipelines copy to a device."""

    methods: ClassVar[tuple[str, ...]] = ("record_stream", "to")

    def to(self, device: torch.device, non_blocking: Any = False) -> Any:
        """Copy to `device`."""
        raise NotImplementedError(f"{type(self).__name__} must define to")


@dataclass
class Batch(Pipelineable):
    """Dense features, sparse features and labels of examples."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor

    def _mapped(self, change: Callable[[Any], Any]) -> Batch:
        parts = (self.dense_features, self.sparse_features, self.labels)
        return Batch(*map(change, parts))

    def to(self, device: torch.device, non_blocking: Any = False) -> Batch:
        """Copy to `device`."""
        return self._mapped(lambda part: part.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until the work queued on `stream` is done."""
        for part in (self.dense_features, self.sparse_features, self.labels):
            part.record_stream(stream)

    def pin_memory(self) -> Batch:
        """Copy to page-locked memory."""
        return self._mapped(lambda part: part.pin_memory())


class ComputeKJTToJTDict(nn.Module):
    """Module form of `KeyedJaggedTensor.to_dict`."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the bags of each feature."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """Module form of `KeyedJaggedTensor.from_jt_dict`."""

    def forward(self, jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Return the features as one batch."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.shape == second.shape and bool(torch.allclose(first, second.to(first.dtype)))


def jt_is_equal(jt_1: Any, jt_2: Any) -> bool:
    """Return whether two jagged tensors have the same bags and weights."""
    if not isinstance(jt_1, JaggedTensor) or not isinstance(jt_2, JaggedTensor):
        return False
    return (
        _equal(jt_1.values(), jt_2.values())
        and _equal(jt_1.lengths(), jt_2.lengths())
        and _equal(jt_1.weights_or_none(), jt_2.weights_or_none())
    )


def kjt_is_equal(kjt_1: Any, kjt_2: Any) -> bool:
    """Return whether two batches have the same keys in the same order, bags and weights."""
    if not isinstance(kjt_1, KeyedJaggedTensor) or not isinstance(kjt_2, KeyedJaggedTensor):
        return False
    first, second = kjt_1.inverse_indices_or_none(), kjt_2.inverse_indices_or_none()
    return (
        kjt_1.keys() == kjt_2.keys()
        and kjt_1.stride_per_key() == kjt_2.stride_per_key()
        and _equal(kjt_1.values(), kjt_2.values())
        and _equal(kjt_1.lengths(), kjt_2.lengths())
        and _equal(kjt_1.weights_or_none(), kjt_2.weights_or_none())
        and (first is None) == (second is None)
        and (
            first is None
            or second is None
            or (first[0] == second[0] and _equal(first[1], second[1]))
        )
    )


def regroup_kts(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> Any:
    """Concatenate the blocks of the keys of each group; see `KeyedTensor.regroup`."""
    return KeyedTensor.regroup(keyed_tensors, groups)


permute_multi_embedding = regroup_kts


def validate_keyed_jagged_tensor(
    kjt: KeyedJaggedTensor, configs: Sequence[Any] | None = None
) -> bool:
    """Check a batch, and return whether its ids are rows of the tables of `configs`.

    Raises:
        ValueError: content that does not fit.
    """
    kjt.validate()
    features = kjt.to_dict()
    for config in configs or ():
        for key in config.feature_names:
            ids = features[key].values() if key in features else kjt.values()[:0]
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < config.num_embeddings:
                return False
    return True


def maybe_td_to_kjt(features: Any, keys: Sequence[str] | None = None) -> KeyedJaggedTensor:
    """Convert `torch.nested` tensors by feature to a batch; return a batch unchanged."""
    if isinstance(features, Mapping) or hasattr(features, "batch_size"):
        names = list(features.keys() if keys is None else keys)
        return KeyedJaggedTensor.from_nested({name: features[name] for name in names})
    return KeyedJaggedTensor.adopt(features)


def reorder_inverse_indices(
    inverse_indices: tuple[list[str], Tensor] | None, feature_names: Sequence[str]
) -> Tensor:
    """Return the inverse indices of features in their order; empty without any."""
    if inverse_indices is None:
        return torch.empty(0)
    keys, indices = inverse_indices
    return indices[[keys.index(name.partition("@")[0]) for name in feature_names]]


def process_pooled_embeddings(pooled: Sequence[Tensor], inverse_indices: Tensor) -> Tensor:
    """Expand pooled rows by their inverse indices, if there are any, and concatenate them."""
    if inverse_indices.numel():
        pooled = [p.index_select(0, i) for p, i in zip(pooled, inverse_indices, strict=True)]
    return torch.cat(list(pooled), 1)


def flatten_feature_lengths(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return the batch: lengths are always `[F * B]`."""
    return features.flatten_lengths()


# Feature processors


class FeaturePositionWeightedModule(nn.Module):
    """Weight the ids of one feature by their position in a bag, with learned weights.

    Args:
        max_feature_length: number of weights, the maximum length of a bag.
        device: device of the weights.
    """

    def __init__(self, max_feature_length: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.position_weight = nn.Parameter(torch.ones(max_feature_length, device=device))

    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        with torch.no_grad():
            self.position_weight.fill_(1.0)

    def forward(self, features: Any) -> Any:
        """Return the feature with weights.

        Also takes `{feature: JaggedTensor}`, as `FeatureProcessedEmbeddingBagCollection` calls it.
        """
        if isinstance(features, Mapping):
            return {key: self(jagged) for key, jagged in features.items()}
        lengths, offsets = features.lengths(), features.offsets()
        count = features.values().shape[0]
        starts = offsets[:-1].repeat_interleave(lengths, output_size=count)
        positions = torch.arange(count, device=offsets.device) - starts
        weights = self.position_weight.index_select(0, positions)
        return JaggedTensor(features.values(), weights, lengths, offsets)


class PositionWeightedModuleCollection(PositionWeightedProcessor):
    """Weight the ids of all features of a batch by their position in a bag."""


# Enums and records


class OptimType(Enum):
    """Names of optimizers."""

    SGD = "SGD"
    LARS_SGD = "LARS_SGD"
    LAMB = "LAMB"
    PARTIAL_ROWWISE_LAMB = "PARTIAL_ROWWISE_LAMB"
    ADAM = "ADAM"
    PARTIAL_ROWWISE_ADAM = "PARTIAL_ROWWISE_ADAM"
    ADAGRAD = "ADAGRAD"
    ROWWISE_ADAGRAD = "ROWWISE_ADAGRAD"


class ParameterStorage(Enum):
    """Memory of tables: of the GPU, or of the host."""

    HBM = "hbm"
    DDR = "ddr"


class ComputeKernel(Enum):
    """Base of compute kernels."""

    DEFAULT = "default"


class NullShardingContext:
    """A context without content."""

    def record_stream(self, stream: Any) -> None:
        """Do nothing."""


NullShardedModuleContext = NullShardingContext

_LOCATIONS = {
    EmbeddingComputeKernel.DENSE: EmbeddingLocation.DEVICE,
    EmbeddingComputeKernel.FUSED: EmbeddingLocation.DEVICE,
    EmbeddingComputeKernel.FUSED_UVM: EmbeddingLocation.MANAGED,
    EmbeddingComputeKernel.FUSED_UVM_CACHING: EmbeddingLocation.MANAGED_CACHING,
    EmbeddingComputeKernel.QUANT: EmbeddingLocation.DEVICE,
}


def compute_kernel_to_embedding_location(
    compute_kernel: EmbeddingComputeKernel,
) -> EmbeddingLocation:
    """Return FBGEMM's name of the memory of a kernel's rows, from `emblib.compat.fbgemm`."""
    return _LOCATIONS[EmbeddingComputeKernel(compute_kernel)]


def get_tensor_size_bytes(t: Tensor) -> int:
    """Return the bytes of the elements of a tensor."""
    return t.element_size() * t.nelement()


def bytes_to_gb(num_bytes: int) -> float:
    """Return GiB."""
    return num_bytes / (1 << 30)


def sharder_name(t: Any) -> str:
    """Return module and name of a class."""
    return f"{t.__module__}.{t.__name__}"


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """Return rank and device of a shard, `rank:3/cuda:1`."""
    number = "" if compute_device == "cpu" else f":{rank % local_size}"
    return f"rank:{rank}/{compute_device}{number}"


# State dicts and copies


def append_prefix(prefix: str, name: str) -> str:
    """Return `prefix.name`, or the one that is not empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def filter_state_dict(state_dict: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the entries below `name`, without that prefix."""
    head = f"{name}."
    return {k.removeprefix(head): v for k, v in state_dict.items() if k.startswith(head)}


def add_prefix_to_state_dict(state_dict: dict[str, Any], prefix: str) -> None:
    """Add a prefix to all keys, in place and in order."""
    for key in list(state_dict):
        state_dict[prefix + key] = state_dict.pop(key)


def state_dict_gather(src: Mapping[str, Any], dst: Mapping[str, Tensor]) -> None:
    """Copy the entries of a sharded model into whole tensors; all ranks get them.

    Raises:
        KeyError: `src` lacks an entry of `dst`.
    """
    for key, target in dst.items():
        value = src[key]
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        target.copy_(whole)


def state_dict_all_gather_keys(state_dict: Mapping[str, Any], pg: Any) -> list[str]:
    """Return the keys of all ranks' state dicts, sorted."""
    found = RankGroup.from_value(pg).gather_objects(sorted(state_dict))
    return sorted({key for keys in found for key in keys})


def merge_fused_params(
    fused_params: Mapping[str, Any] | None = None,
    param_fused_params: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a sharder, replaced by those of a table; `lr` is the rate there."""
    own = dict(param_fused_params or {})
    if "lr" in own:
        own["learning_rate"] = own.pop("lr")
    return {**(fused_params or {}), **own}


def get_unsharded_module_names(model: nn.Module) -> list[str]:
    """Return the paths of the largest modules that contain no sharded collection."""
    sharded = set(sharded_modules(model))
    found: list[str] = []

    def visit(module: nn.Module, path: str) -> None:
        if not any(s == path or not path or s.startswith(f"{path}.") for s in sharded):
            found.append(path)
        elif path not in sharded:
            for name, child in module.named_children():
                visit(child, append_prefix(path, name))

    visit(model, "")
    return found


def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Allocate modules on the meta device, initialize them, and move the model to `device`."""
    materialise(module, torch.device(device))
    module.to(device)


def copy_to_device(
    module: nn.Module, current_device: torch.device, to_device: torch.device
) -> nn.Module:
    """Return a copy of a model without sharded collections on another device.

    Raises:
        ValueError: sharded collections: `DistributedModelParallel.copy` shares them.
    """
    if sharded_modules(module):
        raise ValueError(
            "the model has sharded collections, which are not copied: "
            "DistributedModelParallel.copy(device) copies the dense part and shares them"
        )
    from copy import deepcopy

    return deepcopy(module).to(to_device)


class ModuleCopyMixin:
    """Modules whose `copy(device)` moves them; other objects copy themselves."""

    def copy(self, device: torch.device) -> Any:
        """Return this module on `device`."""
        module: Any = self
        return module.to(device)


CopyMixIn = CopyableMixin = ModuleCopyMixin


class ModuleNoCopyMixin:
    """Modules that are shared by copies of a model."""

    def copy(self, device: torch.device) -> Any:
        """Return this module."""
        return self


class CacheMixin:
    """Objects with a cache that `clear_cache` empties."""

    def clear_cache(self) -> None:
        """Do nothing; classes with a cache override it."""


GroupedPositionWeightedModule = PositionWeightedProcessor
BaseFeatureProcessor = FeatureProcessor = nn.Module
BaseGroupedFeatureProcessor = FeatureProcessorsCollection = nn.Module
