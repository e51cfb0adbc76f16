"""The page of options says what the code does, and names every option there is."""

import inspect
from pathlib import Path

import pytest
import torch

from emblib.compat import fbgemm as ours
from emblib.compat import fbgemm_arguments
from scripts.docs import fbgemm_option_list
from tests.compat.peer import fbgemm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == fbgemm_option_list.page(), (
        "write it again: python -m scripts.docs.fbgemm_option_list docs/options.md"
    )


def _arguments(function: object) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "indices", "offsets"}


def _assert_explained(module: type) -> None:
    explained = {name.split(".")[0] for name in fbgemm_option_list.names()}
    assert _arguments(module.__init__) <= explained
    words = " ".join(fbgemm_option_list.names())
    for argument in _arguments(module.forward):
        assert argument in words
    extra = ours.UserEnabledConfigDefinition.__dataclass_fields__
    assert {f"extra_optimizer_config.{name}" for name in extra} <= fbgemm_option_list.names()


def test_every_argument_is_explained() -> None:
    _assert_explained(ours.SplitTableBatchedEmbeddingBagsCodegen)


def test_every_argument_of_the_peer_is_explained() -> None:
    _assert_explained(fbgemm().SplitTableBatchedEmbeddingBagsCodegen)


def test_every_optimizer_has_a_line() -> None:
    listed = {ours.OptimType[rule.fbgemm] for rule in fbgemm_option_list.RULES}
    assert listed == set(fbgemm_arguments.SUPPORTED_OPTIMIZERS)


@pytest.mark.parametrize("rule", fbgemm_option_list.RULES, ids=lambda rule: rule.fbgemm)
def test_states_are_as_listed(rule: fbgemm_option_list.Rule) -> None:
    place = (ours.EmbeddingLocation.HOST, ours.ComputeDevice.CPU)
    kind = ours.OptimType[rule.fbgemm]
    module = ours.SplitTableBatchedEmbeddingBagsCodegen([(5, 4, *place)], optimizer=kind)
    if kind is ours.OptimType.NONE:
        with pytest.raises(NotImplementedError, match="split_optimizer_states"):
            module.split_optimizer_states()
        return
    module(torch.tensor([1]), torch.tensor([0, 1])).sum().backward()
    shapes = [(5, 4) if state.endswith("[R, D]") else (5,) for state in rule.states()]
    states = module.split_optimizer_states()
    assert [tuple(s.shape) for s in (states[0] if states else [])] == shapes
    if kind is ours.OptimType.EXACT_SGD:
        assert module.get_optimizer_state() == []
    else:
        names = [state.split()[0] for state in rule.states()]
        assert list(module.get_optimizer_state()[0]) == names
