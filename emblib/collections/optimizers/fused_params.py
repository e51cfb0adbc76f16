"""`fused_params` and classes of `torch.optim` as optimizers of emblib."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from emblib import optim
from emblib.optim import Optimizer

_BETAS = ("beta1", "beta2")
_ADAM = ("learning_rate", "eps", *_BETAS, "weight_decay")
# By the value of FBGEMM's EmbOptimType: what makes it, and the numbers that it has.
_KINDS: dict[str, tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
    "sgd": (optim.SGD, ("learning_rate", "weight_decay")),
    "exact_sgd": (optim.SGD, ("learning_rate", "weight_decay")),
    "exact_adagrad": (optim.Adagrad, ("learning_rate", "eps", "weight_decay")),
    "adagrad": (optim.Adagrad, ("learning_rate", "eps", "weight_decay")),
    "exact_row_wise_adagrad": (
        optim.RowwiseAdagrad,
        ("learning_rate", "eps", "weight_decay", "max_norm"),
    ),
    "row_wise_adagrad": (
        optim.RowwiseAdagrad,
        ("learning_rate", "eps", "weight_decay", "max_norm"),
    ),
    "adam": (optim.Adam, _ADAM),
    "partial_row_wise_adam": (optim.PartialRowwiseAdam, _ADAM),
    "lamb": (optim.LAMB, _ADAM),
    "partial_row_wise_lamb": (optim.PartialRowwiseLAMB, _ADAM),
    "lars_sgd": (optim.LARS, ("learning_rate", "momentum", "eta", "weight_decay")),
}
_NAMES = {
    "exact_rowwise_adagrad": "exact_row_wise_adagrad",
    "rowwise_adagrad": "row_wise_adagrad",
    "partial_rowwise_adam": "partial_row_wise_adam",
    "partial_rowwise_lamb": "partial_row_wise_lamb",
}
_NUMBERS = ("learning_rate", "eps", *_BETAS, "momentum", "eta", "max_norm", "weight_decay")
_OWN = {"optimizer", "weight_decay_mode", "gradient_clipping", "max_gradient", *_NUMBERS}
_ONLY_L2 = (optim.LARS,)
_ONLY_DECOUPLED = (optim.LAMB,)


class FusedParams(NamedTuple):
    """An optimizer, and what of the parameters is none of its business: caches, dtypes, ..."""

    optimizer: Optimizer
    rest: dict[str, Any]


def from_fused_params(params: Mapping[str, Any]) -> FusedParams:
    """The optimizer that a dict of FBGEMM's arguments describes, as TorchRec's sharders take it.

    `optimizer` is a member of FBGEMM's EmbOptimType, its name or its value, or an optimizer of
    emblib; left out, EXACT_SGD at a `learning_rate` of 0.01.

    Raises:
        ValueError: an optimizer that emblib does not have, or a number that it would not use.
    """
    rest = {key: value for key, value in params.items() if key not in _OWN}
    given = params.get("optimizer", "exact_sgd")
    if isinstance(given, Optimizer):
        rate = params.get("learning_rate", given.lr)
        return FusedParams(dataclasses.replace(given, lr=rate), rest)
    word = str(getattr(given, "value", given)).lower()
    word = _NAMES.get(word, word)
    if word not in _KINDS:
        raise ValueError(
            f"optimizer must be one of {', '.join(_KINDS)}, or one of emblib.optim, got {given!r}"
        )
    make, uses = _KINDS[word]
    unused = [name for name in _NUMBERS if params.get(name) and name not in uses]
    if unused:
        raise ValueError(
            f"{', '.join(unused)} would have no effect on {word}: leave it out, or choose an "
            "optimizer that has it"
        )
    numbers = {name: params[name] for name in uses if name in params}
    return FusedParams(make(**_arguments(make, numbers, params)), rest)


def _arguments(make: Any, numbers: dict[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    decay = numbers.pop("weight_decay", 0.0)
    arguments = {"lr": numbers.pop("learning_rate", 0.01)}
    betas = [numbers.pop(name, None) for name in _BETAS]
    if any(beta is not None for beta in betas):
        arguments["betas"] = (
            0.9 if betas[0] is None else betas[0],
            0.999 if betas[1] is None else betas[1],
        )
    if params.get("gradient_clipping"):
        arguments["max_gradient"] = params.get("max_gradient", 1.0)
    if decay:
        arguments["weight_decay"] = _decay(make, decay, params.get("weight_decay_mode"))
    return {**arguments, **numbers}


def _decay(make: Any, rate: float, mode: Any) -> Any:
    """FBGEMM's modes: NONE (0) and L2 (1) add to the gradient, DECOUPLE (2) does not."""
    word = str(getattr(mode, "name", mode)).lower()
    decoupled = word in ("decouple", "2") or issubclass(make, _ONLY_DECOUPLED)
    adds = word in ("l2", "none", "0", "1") and not issubclass(make, _ONLY_DECOUPLED)
    if word not in ("l2", "none", "0", "1", "decouple", "2"):
        raise ValueError(
            f"weight_decay_mode must be NONE, L2 or DECOUPLE here, got {mode!r}; make the "
            "optimizer with emblib.optim for others"
        )
    # Of the optimizers that have moments FBGEMM knows decoupled decay alone.
    moments = issubclass(make, optim.Adam)
    if (decoupled or moments) and not issubclass(make, _ONLY_L2):
        return optim.Decoupled(rate)
    assert adds
    return optim.L2(rate)


def from_torch(optimizer_class: Any, arguments: Mapping[str, Any]) -> Optimizer:
    """The optimizer of emblib that does what a class of `torch.optim` does to rows with gradients.

    Known are `torch.optim.SGD`, `Adagrad`, `Adam` and `AdamW`, any class called `RowWiseAdagrad`,
    and the classes of `emblib.optim` themselves; defaults are those of the class.

    Raises:
        ValueError: an argument that emblib has no part for.
        TypeError: another class.
    """
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer):
        return optimizer_class(**arguments)
    given = dict(arguments)
    numbers = _defaults_of(optimizer_class)
    if numbers is None:
        raise TypeError(
            "tables run torch.optim.SGD, Adagrad, Adam or AdamW, a RowWiseAdagrad, or a class of "
            f"emblib.optim, got {optimizer_class!r}"
        )
    for name in list(given):
        if name in numbers.known:
            numbers.known[name] = given.pop(name)
    idle = {k: v for k, v in given.items() if k not in _IDLE and v}
    if idle:
        raise ValueError(
            f"{idle} of {optimizer_class.__name__} are not supported by tables, which take "
            f"{sorted(numbers.known)}"
        )
    known = dict(numbers.known)
    decay = known.pop("weight_decay", 0.0)
    if "betas" in known:
        known["betas"] = tuple(known["betas"])
    kind = optim.Decoupled if optimizer_class is torch.optim.AdamW else optim.L2
    return numbers.make(**known, weight_decay=kind(decay) if decay else None)


_IDLE = {"foreach", "fused", "capturable", "differentiable"}  # how, not what, torch computes


class _Defaults(NamedTuple):
    make: Callable[..., Optimizer]
    known: dict[str, Any]


def _defaults_of(optimizer_class: Any) -> _Defaults | None:
    if optimizer_class is torch.optim.SGD:
        return _Defaults(optim.SGD, {"lr": 1e-3, "weight_decay": 0.0})
    if optimizer_class is torch.optim.Adagrad:
        return _Defaults(optim.Adagrad, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0})
    if optimizer_class in (torch.optim.Adam, torch.optim.AdamW):
        decay = 1e-2 if optimizer_class is torch.optim.AdamW else 0.0
        known = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay}
        return _Defaults(optim.Adam, known)
    if getattr(optimizer_class, "__name__", "") == "RowWiseAdagrad":
        return _Defaults(optim.RowwiseAdagrad, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0})
    return None
