"""torch.distributed.checkpoint with plain tables, in one process and without a process group."""

from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from tests.checkpoint_cases import (
    PLACEMENTS,
    TIERED,
    Model,
    assert_goes_on,
    assert_same,
    make,
    train,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize("end", PLACEMENTS)
@pytest.mark.parametrize("start", PLACEMENTS)
def test_distributed_checkpoint(start: str, end: str, tmp_path: Path) -> None:
    module = trained(PLACEMENTS[start])
    dcp.save(module.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    other = make(PLACEMENTS[end])
    train(other, 7, 8)
    state = other.state_dict()
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    other.load_state_dict(state)
    assert_goes_on(module, other)


def test_distributed_checkpoint_writes_plain_tables_in_place(tmp_path: Path) -> None:
    module, other = trained(), make()
    dcp.save(module.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    dcp.load(other.state_dict(), checkpoint_id=tmp_path, no_dist=True)
    assert_goes_on(module, other)


@pytest.mark.parametrize("end", PLACEMENTS)
def test_state_dicts_of_distributed_checkpoint(end: str, tmp_path: Path) -> None:
    model, other = Model(TIERED), Model(PLACEMENTS[end])
    train(model, 0, 1, 2)
    state = get_model_state_dict(model)
    assert state.keys() == model.state_dict().keys()
    dcp.save({"model": state}, checkpoint_id=tmp_path, no_dist=True)
    loaded = {"model": get_model_state_dict(other)}
    dcp.load(loaded, checkpoint_id=tmp_path, no_dist=True)
    set_model_state_dict(other, loaded["model"])
    assert_same(model, other)
    train(model, 3, 4)
    train(other, 3, 4)
    assert_same(model.tables, other.tables)
