"""Every fused optimizer with every kind of weight decay it has, by name."""

from dataclasses import replace

from emblib import optim
from emblib.optim import (
    AdagradW,
    Counter,
    CowClip,
    Decoupled,
    GlobalDecay,
    Optimizer,
    RelativeThreshold,
    RowwiseAdagrad,
    TailRate,
)

DECAYS = (optim.L2(0.05), Decoupled(0.3))

_PLAIN: dict[str, Optimizer] = {
    "sgd": optim.SGD(0.1),
    "adagrad": optim.Adagrad(0.1, eps=1e-4),
    "rowwise_adagrad": RowwiseAdagrad(0.1, eps=1e-4),
    "ensemble_rowwise_adagrad": optim.EnsembleRowwiseAdagrad(0.1, eps=1e-4),
    "adam": optim.Adam(0.05, eps=1e-3),
    "partial_rowwise_adam": optim.PartialRowwiseAdam(0.05, eps=1e-3),
    "lamb": optim.LAMB(0.05, eps=1e-3),
    "partial_rowwise_lamb": optim.PartialRowwiseLAMB(0.05, eps=1e-3),
    "lars": optim.LARS(0.5, eta=0.1),
    "ftrl": optim.FTRL(0.1, beta=0.5, l1=0.02, l2=0.1),
}
_ADAGRADS: dict[str, Optimizer] = {
    "max_norm": RowwiseAdagrad(0.1, eps=1e-4, max_norm=0.8),
    "cowclip": RowwiseAdagrad(0.1, eps=1e-4, counter=CowClip(3.0, 0.2, 1e-3), max_norm=3.0),
    "cowclip_all": RowwiseAdagrad(0.1, eps=1e-4, counter=CowClip(coefficient=0.5)),
    "counter": RowwiseAdagrad(0.1, eps=1e-4, counter=Counter(4.0)),
    "counter_last": RowwiseAdagrad(0.1, eps=1e-4, counter=Counter(0.0), max_norm=2.0),
    "counter_raised": RowwiseAdagrad(
        0.1, eps=1e-4, counter=Counter(4.0, bound=0.5, tail=TailRate.RAISED, threshold=-1.0)
    ),
    "counter_lowered": RowwiseAdagrad(
        0.1,
        eps=1e-4,
        counter=Counter(tail=TailRate.LOWERED, threshold=RelativeThreshold(1.5), start=1),
    ),
    "counter_of_count": RowwiseAdagrad(
        0.1, eps=1e-4, counter=Counter(tail=TailRate.BY_COUNT, bound=0.3, threshold=1.5)
    ),
}


def _with_decays(plain: dict[str, Optimizer]) -> dict[str, Optimizer]:
    cases = dict(plain)
    for name, optimizer in plain.items():
        for decay in DECAYS:
            if isinstance(decay, optimizer.decays):
                kind = type(decay).__name__.lower()
                cases[f"{name}_{kind}"] = replace(optimizer, weight_decay=decay)
    return cases


CASES = _with_decays(_PLAIN | _ADAGRADS) | {
    "global_decay": RowwiseAdagrad(0.1, eps=1e-4, global_decay=GlobalDecay(0.4), max_norm=3.0),
    "global_decay_late": RowwiseAdagrad(
        0.1, eps=1e-4, global_decay=GlobalDecay(0.9, start=3, lower_bound=0.95)
    ),
    **{
        f"adagradw_{halflife}": RowwiseAdagrad(
            0.1, eps=1e-4, counter=Counter(halflife, bound=0.15), weight_decay=AdagradW(0.5)
        )
        for halflife in (-1.0, -2.0, 5.0)
    },
}
