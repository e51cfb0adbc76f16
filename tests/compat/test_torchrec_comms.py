"""TorchRec's collectives and codecs under its names, against TorchRec's own, if installed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import emblib.compat.torchrec as ours
from emblib.compat.torchrec_comms import comm_precision_of
from emblib.sharding import BF16, FP8, FP16, INT8, CommPrecision, RankGroup
from tests.compat.peer import peer_module
from tests.sharding import worlds

SIZES, COLUMNS = [3, 2], [4, 6]  # examples, and columns of pooled rows, by rank


def _tensor(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(*shape).sin().requires_grad_()


def _calls(module: Any, ranks: RankGroup, group: Any) -> dict[str, tuple[Tensor, Any]]:
    """Each collective's input, and what it makes of it."""
    rank = ranks.rank
    pooled = _tensor(sum(SIZES), COLUMNS[rank])
    base = _tensor(4, 3)
    blocks = [_tensor(2, 3) for _ in range(2)]
    uneven = _tensor(sum(SIZES), 3)
    rows = _tensor(2, 3)
    return {
        "alltoall_pooled": (
            pooled,
            module.alltoall_pooled(pooled, SIZES, COLUMNS, group=group),
        ),
        "reduce_scatter_pooled": (
            blocks[0],
            module.reduce_scatter_pooled(blocks, group=group),
        ),
        "reduce_scatter_base_pooled": (
            base,
            module.reduce_scatter_base_pooled(base, group=group),
        ),
        "reduce_scatter_v_pooled": (
            uneven,
            module.reduce_scatter_v_pooled(uneven, SIZES, group=group),
        ),
        "all_gather_base_pooled": (rows, module.all_gather_base_pooled(rows, group=group)),
    }


def _results(ranks: RankGroup, name: str, gradients: str) -> dict[str, tuple[Tensor, Tensor]]:
    module = import_module(name)
    division = gradients == "mean"
    module.set_gradient_division(division)
    try:
        assert module.get_gradient_division() is division
        found = {}
        for call, (given, under_way) in _calls(module, ranks, ranks.group).items():
            out = under_way.wait()
            # gloo cannot do TorchRec's backward of uneven reductions.
            if call != "reduce_scatter_v_pooled":
                (out * (1 + ranks.rank)).sum().backward()
            grad = torch.zeros(0) if given.grad is None else given.grad
            found[call] = out.detach(), grad
        return found
    finally:
        module.set_gradient_division(True)


@pytest.mark.parametrize("gradients", ["mean", "sum"])
def test_collectives_are_equal_to_torchrecs(gradients: str) -> None:
    peer_module("torchrec.distributed.comm_ops")
    got = worlds.run(2, _results, "emblib.compat.torchrec", gradients)
    want = worlds.run(2, _results, "torchrec.distributed.comm_ops", gradients)
    for mine, other in zip(got, want, strict=True):
        for call, (out, grad) in mine.items():
            torch.testing.assert_close(out, other[call][0], msg=call)
            torch.testing.assert_close(grad, other[call][1], msg=call)


def test_the_registry_has_a_codec_for_each_direction() -> None:
    config = ours.QCommsConfig(
        forward_precision=ours.CommType.FP16,
        backward_precision=ours.CommType.FP8,
        forward_loss_scale=8.0,
        fp8_quantize_dim=64,
    )
    registry = ours.get_qcomm_codecs_registry(config)
    assert registry is not None
    assert set(registry) == {op.name for op in ours.CommOp}
    comm_precision = comm_precision_of(registry, pooled=True)
    assert comm_precision is not None
    assert comm_precision.forward == FP16(8.0)
    assert comm_precision.backward == FP8(64, format="e5m2")
    other = ours.get_qcomm_codecs_registry(
        ours.QCommsConfig(ours.CommType.BF16, ours.CommType.INT8), [ours.CommOp(o) for o in _ops()]
    )
    assert other is not None
    found = other["SEQUENCE_EMBEDDINGS_ALL_TO_ALL"]
    assert found.precision() == CommPrecision(BF16(), INT8())
    context = found.backward.create_context()
    context.row_dim = 4
    message = found.backward.encode(torch.arange(8.0), context)
    assert message.dtype is found.backward.quantized_dtype is torch.uint8
    assert message.numel() == found.backward.calc_quantized_size(8, context)
    torch.testing.assert_close(found.backward.decode(message, context), torch.arange(8.0))
    assert ours.get_qcomm_codecs_registry(ours.QCommsConfig()) is None


def _ops() -> list[str]:
    return ["sequence_embeddings_all_to_all"]


def test_codecs_for_a_collective_that_is_not_used_are_an_error() -> None:
    config = ours.QCommsConfig(ours.CommType.FP16)
    registry = ours.get_qcomm_codecs_registry(
        config, [ours.CommOp("pooled_embeddings_reduce_scatter")]
    )
    with pytest.raises(ValueError, match="register codecs for POOLED_EMBEDDINGS_ALL_TO_ALL"):
        ours.EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
