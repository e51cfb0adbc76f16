"""torch.distributed.checkpoint's state dicts of a collection, in one process without a group."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    ExactCounter,
    FrequencyAdmission,
    optim,
)
from emblib.storage import Hash, Quantized
from tests.collections.cases import bag_configs, batch, features_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_every_kind(tmp_path: Path) -> None:
    admitted = Hash(admission=FrequencyAdmission(2, ExactCounter(64)))
    configs = [
        *bag_configs(("plain", "tt", "dynamic")),
        EmbeddingBagConfig(64, 4, "admitted", storage=admitted),
        EmbeddingBagConfig(64, 4, "stepped", storage=Hash(eviction="step")),
        EmbeddingBagConfig(64, 4, "quantized", storage=Quantized()),
    ]
    one, two = (EmbeddingBagCollection(configs, optimizer=optim.Adam(0.1)) for _ in range(2))
    features = batch(features_of(configs), 4)
    for _ in range(3):
        one(features).values().sum().backward()
    state = get_model_state_dict(one)
    assert state.keys() == one.state_dict().keys()
    assert any("admitted.admission" in key for key in state)
    assert any("stepped.scores" in key for key in state)
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    room = {key: torch.empty_like(value) for key, value in state.items()}
    dcp.load(room, checkpoint_id=tmp_path, no_dist=True)
    set_model_state_dict(two, room)
    for key, value in two.state_dict().items():
        assert torch.equal(value, state[key]), key
    assert torch.equal(two.eval()(features).values(), one.eval()(features).values())
