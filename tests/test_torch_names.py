"""Names of torch: errors say what emblib has instead, and accepted names stay accepted."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import emblib
from emblib import EmbeddingBagCollection, EmbeddingBagConfig, TableBatchedEmbeddingBags, optim

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "drop_padding_from_bags": (TableBatchedEmbeddingBags, {"padding_idx": 0}),
    "use pooling=": (EmbeddingBagConfig, {"mode": "mean"}),
    r"no learning_rate: it is called lr": (optim.Adam, {"learning_rate": 0.1}),
    r"torch\.optim\.SGD": (optim.SGD, {"momentum": 0.9}),
    r"\[\"sum\"\]": (optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    r"External\(gradient=": (TableBatchedEmbeddingBags, {"sparse": True}),
}


@pytest.mark.parametrize("hint", CALLS)
def test_a_keyword_of_torch_names_its_counterpart(hint: str) -> None:
    call, options = CALLS[hint]
    with pytest.raises(TypeError, match=hint):
        call(**options)


@pytest.mark.parametrize(
    ("name", "hint"), [("AdamW", r"Decoupled\(rate\)"), ("RMSprop", "RMSprop"), ("Else", "'Else'$")]
)
def test_an_optimizer_of_torch_names_its_counterpart(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=hint):
        getattr(optim, name)


def test_other_names_are_as_before() -> None:
    momentum = optim.LARS(0.1, momentum=0.5)
    assert momentum == copy.copy(momentum) == pickle.loads(pickle.dumps(momentum))
    with pytest.raises(TypeError, match="unexpected keyword argument 'padding'"):
        TableBatchedEmbeddingBags([emblib.TableSpec(4, 2)], padding=0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"for one of torch\.optim leave it out"):
        TableBatchedEmbeddingBags([emblib.TableSpec(4, 2)], "adam")  # type: ignore[arg-type]
    tables = [EmbeddingBagConfig(4, 2, "a")]
    assert copy.deepcopy(EmbeddingBagCollection(tables)).configs[0] == tables[0]
