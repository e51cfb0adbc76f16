"""TorchRec's own models, from its files, over emblib under the name `torchrec`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import emblib.compat.torchrec as torchrec
from emblib.sharding import RankGroup
from tests.compat.peer import hide_modules, peer_module
from tests.sharding import worlds

DIM = 8


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that imports `torchrec.models.NAME` over emblib's names."""
    peer_module("torchrec")
    hide_modules("torchrec", monkeypatch)
    with torchrec.install(fallback=True):
        yield lambda name: importlib.import_module(f"torchrec.models.{name}")


def collection(*names: str) -> torchrec.EmbeddingBagCollection:
    torch.manual_seed(0)
    return torchrec.EmbeddingBagCollection(
        tables=[
            torchrec.EmbeddingBagConfig(
                name=f"t_{name}", embedding_dim=DIM, num_embeddings=50, feature_names=[name]
            )
            for name in names
        ]
    )


def batch(*names: str) -> torchrec.KeyedJaggedTensor:
    lengths = torch.tensor([1, 2, 0, 3] * len(names))
    values = torch.arange(int(lengths.sum())) % 50
    return torchrec.KeyedJaggedTensor(list(names), values, lengths=lengths)


def trained(model: nn.Module, *arguments: Any) -> None:
    """Train through `DistributedModelParallel`, whose loss must fall."""
    torchrec.apply_optimizer_in_backward(
        torchrec.RowWiseAdagrad,
        [p for name, p in model.named_parameters() if "embedding_bags" in name],
        {"lr": 0.1},
    )
    parallel = torchrec.DistributedModelParallel(model)
    dense = dict(torchrec.in_backward_optimizer_filter(parallel.named_parameters()))
    assert dense
    optimizer = torchrec.CombinedOptimizer(
        [
            parallel.fused_optimizer,
            torchrec.KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adagrad(p, lr=0.1)),
        ]
    )
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (parallel(*arguments) - 1.0).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 2


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("DLRM", {}),
        ("DLRM_DCN", {"dcn_num_layers": 2, "dcn_low_rank_dim": 3}),
        (
            "DLRM_Projection",
            {
                "interaction_branch1_layer_sizes": [3 * DIM],
                "interaction_branch2_layer_sizes": [3 * DIM],
            },
        ),
    ],
)
def test_dlrm_trains(models: Any, kind: str, options: dict[str, Any]) -> None:
    dlrm = models("dlrm")
    model = getattr(dlrm, kind)(
        embedding_bag_collection=collection("a", "b"),
        dense_in_features=5,
        dense_arch_layer_sizes=[6, DIM],
        over_arch_layer_sizes=[4, 1],
        **options,
    )
    dense = torch.linspace(-1, 1, 20).view(4, 5)
    trained(model, dense, batch("a", "b"))


def test_deepfm_trains(models: Any) -> None:
    model = models("deepfm").SimpleDeepFMNN(
        num_dense_features=5,
        embedding_bag_collection=collection("a", "b"),
        hidden_layer_size=6,
        deep_fm_dimension=4,
    )
    trained(model, torch.linspace(-1, 1, 20).view(4, 5), batch("a", "b"))


def refuse_trackers_of_rank_0(ranks: RankGroup) -> None:
    configs: Any = "some" if ranks.rank == 0 else None
    with pytest.raises((ValueError, RuntimeError), match="model_tracker_configs must be None"):
        torchrec.DistributedModelParallel(
            nn.Sequential(collection("t")),
            torchrec.ShardingEnv(ranks),
            torch.device("cpu"),
            model_tracker_configs=configs,
        )


def test_an_argument_that_one_rank_refuses_is_refused_on_all() -> None:
    worlds.run(2, refuse_trackers_of_rank_0)
