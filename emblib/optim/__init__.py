"""Optimizers that run fused into the backward pass, as frozen descriptions.

Each optimizer but `External` names a functor of `csrc/optim`, lists its states, and packs its
numbers into the hyperparameters that the kernels read (`Hyper`). These are the learning rate, the
step, the rates of L2 penalty and decoupled decay, the seed of stochastic rounding, then the
optimizer's parameters in the order of the functor. States start at zero, in hash tables at
`DynamicSpec.initial_state`.
"""

from typing import NoReturn

from emblib.columns import Hyper
from emblib.optim.adagrad import (
    Adagrad,
    Counter,
    CowClip,
    EmaReset,
    EnsembleRowwiseAdagrad,
    GlobalDecay,
    RelativeThreshold,
    RowwiseAdagrad,
    TailRate,
    count_largest_,
    decode_steps,
    encode_steps,
    ensemble_,
)
from emblib.optim.adam import LAMB, Adam, PartialRowwiseAdam, PartialRowwiseLAMB
from emblib.optim.base import (
    FTRL,
    L2,
    LARS,
    NO_UPDATE,
    SGD,
    AdagradW,
    Decoupled,
    External,
    Gradient,
    Optimizer,
    State,
    WeightDecay,
    check_learning_rate,
    description,
)
from emblib.torch_names import OPTIMIZERS

FUSED: dict[str, type[Optimizer]] = {
    cls.functor: cls
    for cls in (
        SGD,
        Adagrad,
        RowwiseAdagrad,
        EnsembleRowwiseAdagrad,
        Adam,
        PartialRowwiseAdam,
        LAMB,
        PartialRowwiseLAMB,
        LARS,
        FTRL,
    )
}
"""The optimizers that backward can apply, by the name of their functor without variant."""

__all__ = [
    "FTRL",
    "FUSED",
    "L2",
    "LAMB",
    "LARS",
    "NO_UPDATE",
    "SGD",
    "Adagrad",
    "AdagradW",
    "Adam",
    "Counter",
    "CowClip",
    "Decoupled",
    "EmaReset",
    "EnsembleRowwiseAdagrad",
    "External",
    "GlobalDecay",
    "Gradient",
    "Hyper",
    "Optimizer",
    "PartialRowwiseAdam",
    "PartialRowwiseLAMB",
    "RelativeThreshold",
    "RowwiseAdagrad",
    "State",
    "TailRate",
    "WeightDecay",
    "check_learning_rate",
    "count_largest_",
    "decode_steps",
    "description",
    "encode_steps",
    "ensemble_",
]


def __getattr__(name: str) -> NoReturn:
    """Raise AttributeError; for an optimizer of torch the message names the replacement."""
    hint = f": {OPTIMIZERS[name]}" if name in OPTIMIZERS else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
