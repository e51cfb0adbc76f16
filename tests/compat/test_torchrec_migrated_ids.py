"""Invalid ids of migrated collections of TorchRec; runs without TorchRec, over a stand-in."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import emblib
from emblib.sharding import DistributedModelParallel, RankGroup


class EmbeddingBagCollection(nn.Module):
    """The attributes of TorchRec's class that a migration reads."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding_bags = nn.ModuleDict({"t": nn.EmbeddingBag(10, 4, mode="sum")})

    def embedding_bag_configs(self) -> list[Any]:
        config = {"num_embeddings": 10, "embedding_dim": 4, "name": "t", "init_fn": None}
        pooling = SimpleNamespace(value="SUM")
        return [SimpleNamespace(**config, feature_names=["a"], pooling=pooling)]

    def is_weighted(self) -> bool:
        return False


EmbeddingBagCollection.__module__ = "torchrec.modules.embedding_modules"


def migrated_model() -> Any:
    model: Any = nn.Module()
    model.bags = EmbeddingBagCollection()
    emblib.migrate(model)
    assert isinstance(model.bags, emblib.EmbeddingBagCollection)
    return model


def batch_of(ids: Tensor, key: str = "a") -> emblib.KeyedJaggedTensor:
    keys, offsets = ["a", "b"], torch.tensor([0, 0, 0, 0, 0])
    first = keys.index(key) * 2
    offsets[first + 1 :] = len(ids)
    return emblib.KeyedJaggedTensor(keys, ids, offsets=offsets)


INVALID = [(10, "must be in"), (-1, "has id -1"), (-7, "must be")]


@pytest.mark.parametrize(("wrong", "text"), INVALID)
def test_invalid_ids_raise_as_in_torchs_modules(wrong: int, text: str) -> None:
    model = migrated_model()
    valid = torch.tensor([3, 9])
    torch.testing.assert_close(
        model.bags(batch_of(valid)).values()[0], model.bags.embedding_bags.t.weight[valid].sum(0)
    )
    with pytest.raises(RuntimeError, match=text):
        model.bags(batch_of(torch.tensor([3, wrong])))
    with pytest.raises(RuntimeError, match="not in the valid range"):
        EmbeddingBagCollection().embedding_bags["t"](torch.tensor([[3, wrong]]))


@pytest.mark.parametrize(("wrong", "text"), INVALID)
def test_invalid_ids_raise_after_sharding(wrong: int, text: str) -> None:
    sharded = DistributedModelParallel(migrated_model(), RankGroup.single())
    assert sharded.module.bags(batch_of(torch.tensor([3, 9]))).wait().values().shape == (2, 4)
    with pytest.raises(RuntimeError, match=text):
        sharded.module.bags(batch_of(torch.tensor([3, wrong]))).wait()


def test_features_that_no_table_reads_may_have_any_ids() -> None:
    output = migrated_model().bags(batch_of(torch.tensor([-1, 99]), "b"))
    assert output.values().tolist() == [[0.0] * 4] * 2


def test_compiled_lookups_of_skipped_ids_raise_too() -> None:
    model = migrated_model()

    def look_up(ids: Tensor) -> Tensor:
        pooled: Tensor = model.bags(batch_of(ids)).values()
        return pooled

    compiled = torch.compile(look_up, backend="eager")
    compiled(torch.tensor([3, 9]))
    with pytest.raises(RuntimeError):
        compiled(torch.tensor([3, -1]))
