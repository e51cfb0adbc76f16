"""TorchRec's codecs for communication, and its collectives.

The collectives are those of `emblib.sharding.collectives`, which has their shapes and errors, with
TorchRec's arguments. `group` is the process group, None for all processes; `codecs` are the
encodings of values and gradients, None for none. Results are awaitables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from emblib.compat import fbgemm_comms
from emblib.compat.fbgemm_types import SparseType
from emblib.compat.torchrec_types import Interface, Subscripted
from emblib.sharding import CommPrecision, RankGroup, codecs, collectives
from emblib.sharding.awaitables import Awaitable


class CommType(Enum):
    """Format of values in communication."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"


class CommOp(Enum):
    """Collectives for which codecs are registered."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"


class QuantizedCommCodec(Subscripted, metaclass=Interface):
    """Interface of codecs: those of FBGEMM's messages, and `emblib.sharding.codecs.Codec`."""

    emblib_classes = (codecs.Codec, fbgemm_comms.QuantizedCommCodec)


class FbgemmCodec(fbgemm_comms.QuantizedCommCodec):
    """An FBGEMM message codec; `native` is emblib's codec of the same format.

    Sharded collections and collectives encode with `native`, which needs no context.
    """

    def __init__(
        self, kind: CommType, loss_scale: float | None, row_dim: int | None, *, is_e4m3: bool
    ) -> None:
        super().__init__(SparseType[kind.name], loss_scale, row_dim, is_fwd=is_e4m3)
        row_options: dict[str, Any] = {} if row_dim is None else {"row_dim": row_dim}
        fp8 = codecs.FP8Format.E4M3 if is_e4m3 else codecs.FP8Format.E5M2
        self.native: codecs.Codec = {
            CommType.FP16: lambda: codecs.FP16(loss_scale or 1.0),
            CommType.BF16: codecs.BF16,
            CommType.INT8: lambda: codecs.INT8(**row_options),
            CommType.FP8: lambda: codecs.FP8(**row_options, format=fp8),
            CommType.FP32: codecs.FP32,
        }[kind]()


@dataclass
class QCommsConfig:
    """Encoding of rows (forward) and of their gradients (backward).

    Loss scales apply to fp16 only. `fp8_quantize_dim` is the number of values that share a scale in
    fp8 and int8, None for the codec's default; `fp8_quantize_dim_bwd` is the same backward, None
    for that of forward. fp8 is e4m3 forward, and e5m2 backward unless `fp8_bwd_uses_143`.
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None
    fp8_quantize_dim: int | None = None
    fp8_quantize_dim_bwd: int | None = None
    fp8_bwd_uses_143: bool = False

    def __post_init__(self) -> None:
        self.forward_precision = CommType(self.forward_precision)
        self.backward_precision = CommType(self.backward_precision)


@dataclass(frozen=True)
class QuantizedCommCodecs:
    """One codec for each direction."""

    forward: Any = codecs.FP32()  # noqa: RUF009 frozen
    backward: Any = codecs.FP32()  # noqa: RUF009 frozen

    def precision(self) -> CommPrecision:
        """Return emblib's codecs of both directions."""
        return CommPrecision(*(getattr(c, "native", c) for c in (self.forward, self.backward)))


Registry = dict[str, QuantizedCommCodecs]


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig,
    comm_ops: Sequence[CommOp] | None = None,
    device: torch.device | None = None,
) -> Registry | None:
    """Return codecs by the name of the collective; None if nothing is encoded.

    `comm_ops` are the collectives, None or empty for all; `device` is ignored.
    """
    config = qcomms_config
    if (config.forward_precision, config.backward_precision) == (CommType.FP32, CommType.FP32):
        return None
    forward_dim = config.fp8_quantize_dim
    backward_dim = config.fp8_quantize_dim_bwd or forward_dim
    both_directions = QuantizedCommCodecs(
        FbgemmCodec(config.forward_precision, config.forward_loss_scale, forward_dim, is_e4m3=True),
        FbgemmCodec(
            config.backward_precision,
            config.backward_loss_scale,
            backward_dim,
            is_e4m3=config.fp8_bwd_uses_143,
        ),
    )
    return {op.name: both_directions for op in comm_ops or CommOp}


def comm_precision_of(
    registry: Mapping[str, QuantizedCommCodecs] | None, *, pooled: bool
) -> CommPrecision | None:
    """Return the communication precision of a sharded collection, for its output all-to-all.

    None without a registry.

    Raises:
        ValueError: the registry lacks this all-to-all.
    """
    if not registry:
        return None
    op = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL if pooled else CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL
    if op.name not in registry:
        raise ValueError(
            f"outputs travel in an all-to-all here, row-wise tables among them: register codecs "
            f"for {op.name}, got {sorted(registry)}"
        )
    return registry[op.name].precision()


# Whether backward divides gradients by the number of ranks. Applies only to the collectives below;
# a sharded collection gets `gradients=` when it is constructed.
_divides_gradients = True


def get_gradient_division() -> bool:
    """Return whether the collectives below divide gradients by the number of ranks."""
    return _divides_gradients


def set_gradient_division(val: bool) -> None:
    """Set whether the collectives below divide gradients by the number of ranks."""
    global _divides_gradients
    _divides_gradients = bool(val)


def _ranks_and_options(
    group: Any, codec: QuantizedCommCodecs | None
) -> tuple[RankGroup, dict[str, Any]]:
    """Return the ranks, and the keyword arguments of emblib's collectives."""
    return RankGroup.from_value(group), {
        "comm_precision": CommPrecision() if codec is None else codec.precision(),
        "gradients": "mean" if _divides_gradients else "sum",
    }


def alltoall_pooled(
    a2a_pooled_embs_tensor: Tensor,
    batch_size_per_rank: Sequence[int],
    dim_sum_per_rank: Sequence[int],
    dim_sum_per_rank_tensor: Tensor | None = None,
    cumsum_dim_sum_per_rank_tensor: Tensor | None = None,
    group: Any = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Send pooled rows [sum B, D of this rank] to [B of this rank, sum D].

    The tensors of sizes are ignored.
    """
    ranks, options = _ranks_and_options(group, codecs)
    return collectives.alltoall_pooled(
        a2a_pooled_embs_tensor, list(batch_size_per_rank), list(dim_sum_per_rank), ranks, **options
    )


def variable_batch_alltoall_pooled(
    a2a_pooled_embs_tensor: Tensor,
    batch_size_per_rank_per_feature: Sequence[Sequence[int]],
    batch_size_per_feature_pre_a2a: Sequence[int],
    emb_dim_per_rank_per_feature: Sequence[Sequence[int]],
    group: Any = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Exchange pooled rows of features with different batch sizes.

    Argument and result are flat. The argument has, for each rank r and each feature f of this rank,
    rows `[B[r][f], D[f]]`; the result, for each rank r and each feature f of rank r, rows
    `[B of f on this rank, D[f]]`.
    """
    ranks, options = _ranks_and_options(group, codecs)
    return collectives.variable_batch_alltoall_pooled(
        a2a_pooled_embs_tensor,
        batch_size_per_rank_per_feature,
        batch_size_per_feature_pre_a2a,
        emb_dim_per_rank_per_feature,
        ranks,
        **options,
    )


def reduce_scatter_pooled(
    inputs: Sequence[Tensor], group: Any = None, codecs: QuantizedCommCodecs | None = None
) -> Awaitable[Tensor]:
    """Return the sum over all ranks of the `inputs` for this rank, `[B of this rank, D]`.

    `inputs` has one tensor per rank.
    """
    ranks, options = _ranks_and_options(group, codecs)
    return collectives.reduce_scatter_pooled(inputs, ranks, **options)


def reduce_scatter_base_pooled(
    input: Tensor, group: Any = None, codecs: QuantizedCommCodecs | None = None
) -> Awaitable[Tensor]:
    """Reduce-scatter `[W * B, D]` to `[B, D]`."""
    ranks, options = _ranks_and_options(group, codecs)
    return collectives.reduce_scatter_base_pooled(input, ranks, **options)


def reduce_scatter_v_pooled(
    input: Tensor,
    input_splits: Sequence[int],
    group: Any = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Reduce-scatter `[sum B, D]` to `[B of this rank, D]`."""
    ranks, options = _ranks_and_options(group, codecs)
    return collectives.reduce_scatter_v_pooled(input, list(input_splits), ranks, **options)


def all_gather_base_pooled(
    input: Tensor, group: Any = None, codecs: QuantizedCommCodecs | None = None
) -> Awaitable[Tensor]:
    """Gather `[B, D]` of all ranks to `[W * B, D]`."""
    ranks, options = _ranks_and_options(group, codecs)
    return collectives.all_gather_base_pooled(input, ranks, **options)


def alltoall_sequence(
    a2a_sequence_embs_tensor: Tensor,
    forward_recat_tensor: Tensor | None,
    backward_recat_tensor: Tensor | None,
    lengths_after_sparse_data_all2all: Tensor,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    variable_batch_size: bool = False,
    group: Any = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Return the looked-up vectors to the ranks that sent the ids.

    Args:
        a2a_sequence_embs_tensor: vectors `[N, D]`, in segments: by feature, then by rank.
        forward_recat_tensor: the order that brings these segments into rank-major order;
            None or empty if they have it. Each segment has the same number of bags.
        backward_recat_tensor: the inverse of `forward_recat_tensor`; ignored.
        lengths_after_sparse_data_all2all: ids per bag, in the order of the vectors.
        input_splits: ids that this rank sent to each rank: the vectors that it receives.
        output_splits: ids received from each rank: the vectors sent back.
        variable_batch_size: ignored: the lengths determine it.
        group: the process group.
        codecs: encodings of vectors and gradients.
    """
    ranks, options = _ranks_and_options(group, codecs)
    values, order = a2a_sequence_embs_tensor, forward_recat_tensor
    if order is not None and order.numel():
        counts = lengths_after_sparse_data_all2all.reshape(order.numel(), -1).sum(1).tolist()
        segments = torch.arange(values.size(0), device=values.device).split(counts)
        values = values.index_select(0, torch.cat([segments[i] for i in order.tolist()]))
    # TorchRec names the pair for the ids; vectors travel the other way, so the two are swapped.
    return collectives.alltoall_sequence(
        values, list(output_splits), list(input_splits), ranks, **options
    )
