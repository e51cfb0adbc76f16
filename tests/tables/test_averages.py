"""Averages of models and of their state dicts: right for tables by row number, refused by key."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing import assert_close

from emblib import (
    CachedTTEmbeddingBags,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableBatchedTTEmbeddingBags,
    TableSpec,
    TTCache,
    TTSpec,
    optim,
    storage,
)

DECAY = 0.9  # 0.9 * 77 + 0.1 * 77 is a little less than 77 in float32
IDS, OFFSETS = torch.tensor([0, 1000, 3, 76]), torch.tensor([0, 2, 4])
_TRAIN = TTSpec(77, 4, (2,), (7, 11), (2, 2))

BY_ROW: dict[str, Callable[[], Any]] = {
    "fused": lambda: TableBatchedEmbeddingBags(
        [TableSpec(1001, 4), TableSpec(77, 4)], optim.SGD(0.1)
    ),
    "gradients": lambda: TableBatchedEmbeddingBags([TableSpec(1001, 4), TableSpec(77, 4)]),
    "trains": lambda: TableBatchedTTEmbeddingBags(
        [TTSpec(1001, 4, (2,), (26, 39), (2, 2)), _TRAIN], optim.SGD(0.1)
    ),
}
BY_KEY: dict[str, Callable[[], nn.Module]] = {
    "hash": lambda: DynamicEmbeddingBags([DynamicSpec(64, 4)], optim.SGD(0.1)),
    "hash, gradients": lambda: DynamicEmbeddingBags([DynamicSpec(64, 4)]),
    "cached train": lambda: CachedTTEmbeddingBags([_TRAIN], TTCache(32), optim.SGD(0.1)),
    "collection": lambda: EmbeddingBagCollection(
        [EmbeddingBagConfig(64, 4, "t", storage=storage.Hash())], optimizer=optim.SGD(0.1)
    ),
}
by_row = pytest.mark.parametrize("kind", BY_ROW)


def _moved(parameters: list[Tensor]) -> None:
    """Move all values, as a step of an optimizer does."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1)


@by_row
@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_averaged_model_reads_the_averages(kind: str, use_buffers: bool) -> None:
    model, other = nn.Sequential(BY_ROW[kind]()), BY_ROW[kind]()
    averaged = AveragedModel(
        model, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=use_buffers
    )
    for _ in range(3):
        averaged.update_parameters(model)
        _moved(list(model.parameters()))
    with torch.no_grad():
        for parameter, mean in zip(other.parameters(), averaged.module.parameters(), strict=True):
            parameter.copy_(mean)
    (mean_module,) = averaged.module.children()
    assert_close(mean_module(IDS, OFFSETS), other(IDS, OFFSETS))


@by_row
@pytest.mark.parametrize("batch_sizes", [None, [[1], [1]]])
def test_the_average_of_state_dicts(kind: str, batch_sizes: list[list[int]] | None) -> None:
    module, expected = BY_ROW[kind](), BY_ROW[kind]()
    expected.load_state_dict(module.state_dict())
    with torch.no_grad():
        for value in module.state_dict().values():
            value.copy_(DECAY * value + (1 - DECAY) * value)
    out = module(IDS, OFFSETS, batch_sizes=batch_sizes)
    assert_close(out, expected(IDS, OFFSETS, batch_sizes=batch_sizes))


@pytest.mark.parametrize("kind", BY_KEY)
def test_averages_of_rows_by_key_are_refused(kind: str) -> None:
    model = nn.Sequential(BY_KEY[kind]())
    with pytest.raises(RuntimeError, match=r"average the rest of the model alone"):
        AveragedModel(model)


@pytest.mark.parametrize("as_collection", [False, True])
def test_codes_of_quantised_rows_are_not_averaged(*, as_collection: bool) -> None:
    tables = [EmbeddingBagConfig(77, 4, "t")]
    module: nn.Module = QuantizedEmbeddingBags.from_float({"t": torch.randn(77, 4)}, bits=8)
    model = nn.Sequential(
        EmbeddingBagCollection(tables).quantized(8) if as_collection else module, nn.BatchNorm1d(4)
    )
    AveragedModel(model).update_parameters(model)
    with pytest.raises(RuntimeError, match=r"leave use_buffers out, or average the rest"):
        AveragedModel(model, use_buffers=True)
