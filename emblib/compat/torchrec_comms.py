"""TorchRec's codecs for communication, and its collectives.

The collectives are those of `emblib.sharding.collectives`, which states their shapes and errors,
with TorchRec's arguments. All ranks of a group must call them. `group` is the process group, None
for all processes; `codecs` are the encodings of values and gradients, None for none. Results are
awaitables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from emblib.compat import fbgemm_comms
from emblib.compat.checks import check_flags
from emblib.compat.fbgemm_types import SparseType
from emblib.compat.torchrec_names import RUN_TORCHREC_ITSELF
from emblib.compat.torchrec_types import Interface, Subscripted
from emblib.sharding import CommPrecision, RankGroup, codecs, collectives
from emblib.sharding.awaitables import Awaitable


class CommType(Enum):
    """Number format of messages."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    MX4 = "mx4"


class CommOp(Enum):
    """Collectives that may have codecs."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"


class QuantizedCommCodec(Subscripted, metaclass=Interface):
    """Interface of codecs: FBGEMM's `QuantizedCommCodec`, and `emblib.sharding.codecs.Codec`."""

    emblib_classes = (codecs.Codec, fbgemm_comms.QuantizedCommCodec)


class FbgemmCodec(fbgemm_comms.QuantizedCommCodec):
    """A codec of FBGEMM's messages, with emblib's codec of the same format.

    Args:
        kind: number format of messages.
        loss_scale: factor of fp16 messages; None for none.
        row_dim: number of values that share a scale in fp8 and int8; None is the default.
        is_e4m3: whether fp8 has 4 exponent bits and 3 mantissa bits, not 5 and 2.

    Attributes:
        native: emblib's codec, which sharded collections and collectives use; it has no context.
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

    Attributes:
        forward_precision: number format of rows.
        backward_precision: number format of gradients.
        forward_loss_scale: factor of fp16 rows; None for none.
        backward_loss_scale: factor of fp16 gradients; None for none.
        fp8_quantize_dim: number of values that share a scale in fp8 and int8; None is the default.
        fp8_quantize_dim_bwd: the same for gradients; None is `fp8_quantize_dim`.
        fp8_bwd_uses_143: whether fp8 gradients are e4m3, as fp8 rows always are, and not e5m2.

    The other attributes must be None, and no precision MX4; otherwise ValueError is raised.
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None
    fp8_quantize_dim: int | None = None
    fp8_quantize_dim_bwd: int | None = None
    fp8_bwd_uses_143: bool = False
    fp8_output_dtype: None = None
    mx4_quantize_dim: None = None
    mx4_quantize_dim_bwd: None = None
    mx4_rounding_mode: None = None
    output_dtype: None = None

    def __post_init__(self) -> None:
        check_flags(fp8_bwd_uses_143=self.fp8_bwd_uses_143)
        self.forward_precision = CommType(self.forward_precision)
        self.backward_precision = CommType(self.backward_precision)
        names = ["fp8_output_dtype", "mx4_quantize_dim", "mx4_quantize_dim_bwd"]
        names += ["mx4_rounding_mode", "output_dtype"]
        refused = [name for name in names if getattr(self, name) is not None]
        if CommType.MX4 in (self.forward_precision, self.backward_precision):
            refused.append("MX4")
        if refused:
            raise ValueError(
                f"{', '.join(refused)} must be left out: messages have FP16, BF16, INT8 or FP8, "
                f"and are decoded to the dtype that was sent. {RUN_TORCHREC_ITSELF}"
            )


@dataclass
class QuantizedCommCodecs:
    """A codec for rows (forward), and one for gradients (backward)."""

    forward: Any = codecs.FP32()  # noqa: RUF009 codecs are frozen
    backward: Any = codecs.FP32()  # noqa: RUF009 codecs are frozen

    def precision(self) -> CommPrecision:
        """Return emblib's codecs of both directions."""
        both_codecs = (self.forward, self.backward)
        return CommPrecision(*(getattr(codec, "native", codec) for codec in both_codecs))


Registry = dict[str, QuantizedCommCodecs]


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig,
    comm_ops: Sequence[CommOp] | None = None,
    device: torch.device | None = None,
) -> Registry | None:
    """Return the codecs of each collective, by its name; None if both precisions are FP32.

    Args:
        qcomms_config: encoding of rows and gradients.
        comm_ops: collectives that encode; None or empty for all.
        device: ignored.
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
    """Return the codecs of the output all-to-all of a sharded collection, in emblib's form.

    Args:
        registry: result of `get_qcomm_codecs_registry`; None and an empty one return None.
        pooled: whether the collection pools rows.

    Raises:
        ValueError: the registry does not have this all-to-all.
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


# Whether backward of the collectives below divides gradients by the number of ranks. Sharded
# collections do not read this: they have an argument `gradients`.
_divides_gradients = True


def get_gradient_division() -> bool:
    """Return whether the collectives below divide gradients by the number of ranks."""
    return _divides_gradients


def set_gradient_division(val: bool) -> None:
    """Set whether the collectives below divide gradients by the number of ranks."""
    global _divides_gradients
    check_flags(val=val)
    _divides_gradients = bool(val)


def _ranks_and_options(
    group: Any, codec: QuantizedCommCodecs | None
) -> tuple[RankGroup, dict[str, Any]]:
    """Return the ranks, and the other keyword arguments of emblib's collectives."""
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
    """Send pooled rows `[sum B, D of this rank]` to the ranks of the examples.

    The result is `[B of this rank, sum D]`. The two tensors of sizes are ignored.
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

    The argument and the result are flat. For each rank r and each feature f of this rank, the
    argument has rows `[B[r][f], D[f]]`. For each rank r and each feature f of rank r, the result
    has rows `[B of f on this rank, D[f]]`.
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
    """Add up rows `[W * B, D]` over W ranks; return the block of this rank, `[B, D]`."""
    ranks, options = _ranks_and_options(group, codecs)
    return collectives.reduce_scatter_base_pooled(input, ranks, **options)


def reduce_scatter_v_pooled(
    input: Tensor,
    input_splits: Sequence[int],
    group: Any = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Add up rows `[sum B, D]` over ranks; return the block of this rank, `[B of this rank, D]`.

    `input_splits` has the B of each rank.
    """
    ranks, options = _ranks_and_options(group, codecs)
    return collectives.reduce_scatter_v_pooled(input, list(input_splits), ranks, **options)


def all_gather_base_pooled(
    input: Tensor, group: Any = None, codecs: QuantizedCommCodecs | None = None
) -> Awaitable[Tensor]:
    """Gather rows `[B, D]` of all W ranks: `[W * B, D]`."""
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
        a2a_sequence_embs_tensor: vectors `[N, D]`, in segments of the same number of bags.
        forward_recat_tensor: order of the segments that sorts them by rank; None or empty if they
            are sorted.
        backward_recat_tensor: ignored: the inverse of `forward_recat_tensor`.
        lengths_after_sparse_data_all2all: number of ids per bag, in the order of the vectors.
        input_splits: number of ids that this rank sent to each rank; it receives as many vectors.
        output_splits: number of ids received from each rank; as many vectors are sent back.
        variable_batch_size: ignored: the lengths determine it.
        group: process group; None for all processes.
        codecs: encodings of vectors and gradients; None for none.
    """
    ranks, options = _ranks_and_options(group, codecs)
    values, order = a2a_sequence_embs_tensor, forward_recat_tensor
    if order is not None and order.numel():
        counts = lengths_after_sparse_data_all2all.reshape(order.numel(), -1).sum(1).tolist()
        segments = torch.arange(values.size(0), device=values.device).split(counts)
        values = values.index_select(0, torch.cat([segments[i] for i in order.tolist()]))
    # TorchRec's two arguments describe the ids. Vectors travel the other way: swap the arguments.
    return collectives.alltoall_sequence(
        values, list(output_splits), list(input_splits), ranks, **options
    )
