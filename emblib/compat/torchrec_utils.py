"""TorchRec's smaller functions and classes: batches, enums, records, state dicts."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from emblib.collections import PositionWeightedProcessor
from emblib.compat.checks import check_names, check_positive
from emblib.compat.fbgemm_types import EmbeddingLocation
from emblib.compat.torchrec_sharding import STORAGES, EmbeddingComputeKernel, checked_kernel
from emblib.jagged import JaggedTensor, KeyedJaggedTensor
from emblib.sharding.dense import materialise
from emblib.storage import Dense

# Batches


class Multistreamable(ABC):  # noqa: B024 abstract by `__subclasshook__`
    """Interface of objects that may be used on several streams, by their `record_stream`.

    A class that has all methods named in `methods` counts as a subclass.
    """

    methods: ClassVar[tuple[str, ...]] = ("record_stream",)

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        """Return whether `other` has the methods, for `issubclass` and `isinstance`."""
        names = cls.__dict__.get("methods")
        if names is None:
            return NotImplemented
        return all(callable(getattr(other, name, None)) for name in names)

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until the work queued on `stream` is done."""
        raise NotImplementedError(f"{type(self).__name__} must define record_stream")


class Pipelineable(Multistreamable):
    """Interface of objects that pipelines copy to a device."""

    methods: ClassVar[tuple[str, ...]] = ("record_stream", "to")

    def to(self, device: torch.device, non_blocking: Any = False) -> Any:
        """Return a copy on `device`; with `non_blocking` the host does not wait for it."""
        raise NotImplementedError(f"{type(self).__name__} must define to")


@dataclass
class Batch(Pipelineable):
    """A batch of examples: dense features, sparse features and labels."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor

    def _map_parts(self, change: Callable[[Any], Any]) -> Batch:
        parts = (self.dense_features, self.sparse_features, self.labels)
        return Batch(*map(change, parts))

    def to(self, device: torch.device, non_blocking: Any = False) -> Batch:
        """Return a copy on `device`; with `non_blocking` the host does not wait for it."""
        return self._map_parts(lambda part: part.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        """Keep the memory until the work queued on `stream` is done."""
        for part in (self.dense_features, self.sparse_features, self.labels):
            part.record_stream(stream)

    def pin_memory(self) -> Batch:
        """Return a copy in page-locked memory."""
        return self._map_parts(lambda part: part.pin_memory())


class ComputeKJTToJTDict(nn.Module):
    """Module form of `KeyedJaggedTensor.to_dict`."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the bags of each feature."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """Module form of `KeyedJaggedTensor.from_jt_dict`."""

    def forward(self, jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Return all features as one batch."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


def with_ids(batch: KeyedJaggedTensor, ids: Tensor) -> KeyedJaggedTensor:
    """Return a batch with other ids, as many as before; the other tensors are shared."""
    return KeyedJaggedTensor.from_valid(
        batch.keys(),
        ids,
        batch.weights_or_none(),
        batch.lengths_or_none(),
        batch.offsets_or_none(),
        batch.stride(),
        batch.inverse_indices_or_none(),
        batch.stride_per_key_per_rank() if batch.variable_stride_per_key() else None,
    )


def _are_close(first: Tensor | None, second: Tensor | None) -> bool:
    """Return whether two tensors have the same shape and are close, or both are None."""
    if first is None or second is None:
        return first is second
    return first.shape == second.shape and bool(torch.allclose(first, second.to(first.dtype)))


def jt_is_equal(jt_1: Any, jt_2: Any) -> bool:
    """Return whether two jagged tensors have the same lengths, and close values and weights.

    Close is meant as by `torch.allclose`, which waits for a GPU. Other types are not equal.
    """
    if not isinstance(jt_1, JaggedTensor) or not isinstance(jt_2, JaggedTensor):
        return False
    return (
        _are_close(jt_1.values(), jt_2.values())
        and _are_close(jt_1.lengths(), jt_2.lengths())
        and _are_close(jt_1.weights_or_none(), jt_2.weights_or_none())
    )


def kjt_is_equal(kjt_1: Any, kjt_2: Any) -> bool:
    """Return whether two batches have the same keys in the same order, and equal bags.

    Values, weights and lengths are compared by `torch.allclose`, which waits for a GPU. Other types
    are not equal.
    """
    if not isinstance(kjt_1, KeyedJaggedTensor) or not isinstance(kjt_2, KeyedJaggedTensor):
        return False
    first, second = kjt_1.inverse_indices_or_none(), kjt_2.inverse_indices_or_none()
    return (
        kjt_1.keys() == kjt_2.keys()
        and kjt_1.stride_per_key() == kjt_2.stride_per_key()
        and kjt_1.length_per_key() == kjt_2.length_per_key()
        and _are_close(kjt_1.values(), kjt_2.values())
        and _are_close(kjt_1.lengths(), kjt_2.lengths())
        and _are_close(kjt_1.weights_or_none(), kjt_2.weights_or_none())
        and (first is None) == (second is None)
        and (
            first is None
            or second is None
            or (first[0] == second[0] and _are_close(first[1], second[1]))
        )
    )


def maybe_td_to_kjt(features: Any, keys: Sequence[str] | None = None) -> KeyedJaggedTensor:
    """Return features as a batch of emblib.

    Args:
        features: mapping of `torch.nested` tensors, a TensorDict of them, or a batch of TorchRec or
            emblib; the latter is returned unchanged.
        keys: keys of the mapping or TensorDict to take; None is all.
    """
    if isinstance(features, Mapping) or hasattr(features, "batch_size"):
        names = check_names("keys", features.keys() if keys is None else keys)
        return KeyedJaggedTensor.from_nested({name: features[name] for name in names})
    return KeyedJaggedTensor.adopt(features)


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
    """Memory of tables: HBM, that of the GPU, or DDR, that of the host."""

    HBM = "hbm"
    DDR = "ddr"


class ComputeKernel(Enum):
    """Base of compute kernels."""

    DEFAULT = "default"


class NullShardingContext:
    """An empty sharding context."""

    def record_stream(self, stream: Any) -> None:
        """Do nothing."""


NullShardedModuleContext = NullShardingContext


def compute_kernel_to_embedding_location(
    compute_kernel: EmbeddingComputeKernel,
) -> EmbeddingLocation:
    """Return the location of the rows of a kernel; DEVICE if the kernel does not determine it.

    Raises:
        ValueError: the kernel is not one that plans may have.
    """
    placement = STORAGES.get(checked_kernel(compute_kernel), Dense()).placement
    return EmbeddingLocation[placement.name]


def sharder_name(t: Any) -> str:
    """Return the module and the name of a class, `module.name`."""
    return f"{t.__module__}.{t.__name__}"


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """Return the placement of a shard as text, e.g. `rank:3/cuda:1` or `rank:3/cpu`.

    `local_size` is the number of ranks per host; below 1 it raises ValueError.
    """
    check_positive("local_size", local_size)
    device_suffix = "" if compute_device == "cpu" else f":{rank % local_size}"
    return f"rank:{rank}/{compute_device}{device_suffix}"


# State dicts


def state_dict_gather(src: Mapping[str, Any], dst: Mapping[str, Tensor]) -> None:
    """Copy the state dict `src` of a sharded model into the whole tensors of `dst`, on all ranks.

    All ranks must call this.

    Raises:
        KeyError: `src` does not have an entry of `dst`.
    """
    for key, target in dst.items():
        value = src[key]
        full_value = value.full_tensor() if hasattr(value, "full_tensor") else value
        target.copy_(full_value)


def state_dict_to_device(
    state_dict: Mapping[str, Any], pg: Any, device: torch.device
) -> dict[str, Any]:
    """Return the entries on `device`; sharded tables stay sharded, and `pg` is ignored."""
    return {key: value.to(device) for key, value in state_dict.items()}


def merge_fused_params(
    fused_params: Mapping[str, Any] | None = None,
    param_fused_params: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the entries of `fused_params`, replaced by those of `param_fused_params`.

    `lr` of the latter counts as `learning_rate`. The arguments are not changed.
    """
    table_params = dict(param_fused_params or {})
    if "lr" in table_params:
        table_params["learning_rate"] = table_params.pop("lr")
    return {**(fused_params or {}), **table_params}


def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Allocate and initialize the modules on `meta`, and move the model to `device`, in place."""
    materialise(module, torch.device(device))
    module.to(device)


GroupedPositionWeightedModule = PositionWeightedProcessor
BaseFeatureProcessor = BaseGroupedFeatureProcessor = nn.Module
