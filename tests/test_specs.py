"""Arguments that are True or False: text such as "no", which is true in Python, is refused."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

import emblib
from emblib import metrics, online, sharding

_TABLES = [emblib.TableSpec(4, 4)]
_TRAINS = [emblib.TTSpec(8, 8, ranks=(2, 2))]
_CACHE = emblib.TTCache(4)
_BAGS = [emblib.EmbeddingBagConfig(4, 4, feature_names=["f"], name="t")]
_VECTORS = [emblib.EmbeddingConfig(4, 4, feature_names=["f"], name="t")]


def _collection() -> emblib.EmbeddingCollection:
    return emblib.EmbeddingCollection(_VECTORS, "cpu", optimizer=emblib.optim.SGD(0.1))


CALLS: dict[str, tuple[str, Callable[..., object]]] = {
    "TableBatchedEmbeddingBags": (
        "include_last_offset",
        lambda **o: emblib.TableBatchedEmbeddingBags(_TABLES, device="cpu", **o),
    ),
    "TableBatchedTTEmbeddingBags": (
        "include_last_offset",
        lambda **o: emblib.TableBatchedTTEmbeddingBags(_TRAINS, device="cpu", **o),
    ),
    "CachedTTEmbeddingBags": (
        "include_last_offset",
        lambda **o: emblib.CachedTTEmbeddingBags(_TRAINS, cache=_CACHE, device="cpu", **o),
    ),
    "DynamicEmbeddingBags": (
        "include_last_offset",
        lambda **o: emblib.DynamicEmbeddingBags(
            [emblib.DynamicSpec(dim=4, capacity=4)], device="cpu", **o
        ),
    ),
    "QuantizedEmbeddingBags": (
        "include_last_offset",
        lambda **o: emblib.QuantizedEmbeddingBags(_TABLES, formats="int8", device="cpu", **o),
    ),
    "set_table_trained": (
        "trained",
        partial(emblib.TableBatchedEmbeddingBags(_TABLES, device="cpu").set_table_trained, 0),
    ),
    "EmbeddingBagCollection": (
        "is_weighted",
        lambda **o: emblib.EmbeddingBagCollection(_BAGS, "cpu", **o),
    ),
    "EmbeddingCollection": (
        "need_indices",
        lambda **o: emblib.EmbeddingCollection(_VECTORS, "cpu", **o),
    ),
    "ShardedEmbeddingCollection": (
        "dedup",
        lambda **o: sharding.ShardedEmbeddingCollection(_collection(), {}, **o),
    ),
    "DistributedModelParallel": (
        "init_parameters",
        lambda **o: sharding.DistributedModelParallel(torch.nn.Sequential(_collection()), **o),
    ),
    "checkpoints.load": ("strict", lambda **o: sharding.checkpoints.load({}, "none", **o)),
    "open_frozen": ("verify", lambda **o: emblib.open_frozen("none", **o)),
    "ChangeLog": (
        "states",
        lambda **o: online.ChangeLog(_collection(), online.DirectorySink("none"), **o),
    ),
    "NormalizedEntropy": ("from_logits", lambda **o: metrics.NormalizedEntropy(**o)),
    "GroupedAUC": ("by_examples", lambda **o: metrics.GroupedAUC(**o)),
}


@pytest.mark.parametrize("name", CALLS)
def test_text_is_not_a_bool(name: str) -> None:
    argument, call = CALLS[name]
    with pytest.raises(TypeError, match=f"{argument} must be True or False, got 'False'"):
        call(**{argument: "False"})
