"""Optimizers of emblib for FBGEMM's `fused_params`, and for classes of `torch.optim`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from emblib import optim
from emblib.optim import Optimizer
from emblib.specs import format_config

_BETAS = ("beta1", "beta2")
_DEFAULT_BETAS = (0.9, 0.999)  # FBGEMM's
_ADAM_ARGUMENTS = ("learning_rate", "eps", *_BETAS, "weight_decay")
# The class for each value of FBGEMM's EmbOptimType, and the arguments that it accepts.
_FBGEMM_OPTIMIZERS: dict[str, tuple[Callable[..., Optimizer], tuple[str, ...]]] = {
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
    "adam": (optim.Adam, _ADAM_ARGUMENTS),
    "partial_row_wise_adam": (optim.PartialRowwiseAdam, _ADAM_ARGUMENTS),
    "lamb": (optim.LAMB, _ADAM_ARGUMENTS),
    "partial_row_wise_lamb": (optim.PartialRowwiseLAMB, _ADAM_ARGUMENTS),
    "lars_sgd": (optim.LARS, ("learning_rate", "momentum", "eta", "weight_decay")),
}
_OPTIMIZER_ALIASES = {
    "exact_rowwise_adagrad": "exact_row_wise_adagrad",
    "rowwise_adagrad": "row_wise_adagrad",
    "partial_rowwise_adam": "partial_row_wise_adam",
    "partial_rowwise_lamb": "partial_row_wise_lamb",
}
_HYPERPARAMETERS = ("learning_rate", "eps", *_BETAS, "momentum", "eta", "max_norm", "weight_decay")
_OPTIMIZER_ARGUMENTS = {
    *("optimizer", "weight_decay_mode", "gradient_clipping", "max_gradient"),
    *_HYPERPARAMETERS,
}
_L2_ONLY_CLASSES = (optim.LARS,)
_DECOUPLED_ONLY_CLASSES = (optim.LAMB,)
# FBGEMM has only decoupled decay for optimizers with moments.
_DECOUPLED_IN_FBGEMM = (optim.Adam, optim.LAMB)


class FusedParams(NamedTuple):
    """FBGEMM's arguments, divided.

    Attributes:
        optimizer: optimizer of emblib with the arguments of the optimizer.
        table_arguments: all other arguments, unchanged: caches, dtypes and so on.
    """

    optimizer: Optimizer
    table_arguments: dict[str, Any]


def from_fused_params(params: Mapping[str, Any]) -> FusedParams:
    """Return the optimizer of a dict of FBGEMM's arguments (TorchRec's `fused_params`).

    `params["optimizer"]` is a member of FBGEMM's EmbOptimType, its name or its value; or an
    optimizer of emblib, of which only `learning_rate` may then change something. By default it is
    EXACT_SGD with a `learning_rate` of 0.01. `max_gradient` counts only with `gradient_clipping`,
    and `weight_decay_mode` only with `weight_decay`. With SGD, Adagrad and row-wise Adagrad, FBGEMM
    ignores a decay whose mode is NONE, its default; here it raises.

    Raises:
        TypeError: `gradient_clipping` is not a bool, 0, 1 or None.
        ValueError: emblib does not have the optimizer or decay mode, or the optimizer would ignore
            a hyperparameter other than 0.
    """
    if params.get("gradient_clipping") not in (None, False, True):
        raise TypeError(
            f"gradient_clipping must be True or False, got {params['gradient_clipping']!r}"
        )
    table_arguments = {
        key: value for key, value in params.items() if key not in _OPTIMIZER_ARGUMENTS
    }
    optimizer = params.get("optimizer", "exact_sgd")
    if isinstance(optimizer, Optimizer):
        _refuse_unused(params, ("learning_rate",), format_config(optimizer))
        rate = params.get("learning_rate", optimizer.lr)
        return FusedParams(dataclasses.replace(optimizer, lr=rate), table_arguments)
    optimizer_name = str(getattr(optimizer, "value", optimizer)).lower()
    optimizer_name = _OPTIMIZER_ALIASES.get(optimizer_name, optimizer_name)
    if optimizer_name not in _FBGEMM_OPTIMIZERS:
        raise ValueError(
            f"optimizer must be one of {', '.join(_FBGEMM_OPTIMIZERS)}, or one of emblib.optim, "
            f"got {optimizer!r}"
        )
    make, accepted = _FBGEMM_OPTIMIZERS[optimizer_name]
    _refuse_unused(params, (*accepted, "gradient_clipping"), optimizer_name)
    hyperparameters = {name: params[name] for name in accepted if name in params}
    arguments = _convert_arguments(make, hyperparameters, params)
    return FusedParams(make(**arguments), table_arguments)


def _refuse_unused(params: Mapping[str, Any], accepted: Sequence[str], optimizer: str) -> None:
    """Raise ValueError if optimizer arguments other than `accepted` are set."""
    names = (*_HYPERPARAMETERS, "gradient_clipping")
    unused_names = [name for name in names if params.get(name) and name not in accepted]
    if unused_names:
        raise ValueError(
            f"{', '.join(unused_names)} would have no effect on {optimizer}: leave it out, or "
            "choose an optimizer that has it"
        )


def _convert_arguments(
    make: Any, hyperparameters: dict[str, Any], params: Mapping[str, Any]
) -> dict[str, Any]:
    """Convert FBGEMM's arguments to arguments of the emblib optimizer that `make` constructs.

    `hyperparameters` are those that the optimizer accepts, by FBGEMM's names; the dict is changed.
    `params` has all arguments.
    """
    decay = hyperparameters.pop("weight_decay", 0.0)
    arguments: dict[str, Any] = {"lr": hyperparameters.pop("learning_rate", 0.01)}
    arguments |= _pop_betas(hyperparameters)
    if params.get("gradient_clipping"):
        arguments["max_gradient"] = params.get("max_gradient", 1.0)
    if decay:
        arguments["weight_decay"] = _convert_decay(make, decay, params.get("weight_decay_mode"))
    return {**arguments, **hyperparameters}


def _pop_betas(arguments: dict[str, Any]) -> dict[str, Any]:
    """Remove `beta1` and `beta2`, and return both as `betas`; the result is {} without them."""
    betas = [arguments.pop(name, None) for name in _BETAS]
    if betas == [None, None]:
        return {}
    pairs = zip(betas, _DEFAULT_BETAS, strict=True)
    return {"betas": tuple(default if beta is None else beta for beta, default in pairs)}


def _convert_fbgemm_names(make: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments that TorchRec's optimizers hand to FBGEMM to those of an emblib optimizer.

    Hyperparameters that are 0 or None are left out if `make` does not have them; all other
    arguments that it does not have stay, and it refuses them.
    """
    names = {field.name for field in dataclasses.fields(make)}
    converted = {
        name: value
        for name, value in arguments.items()
        if value or name in names or name not in _HYPERPARAMETERS
    }
    if "betas" in names:
        converted |= _pop_betas(converted)
    return converted


def _convert_decay(make: Any, rate: float, mode: Any) -> Any:
    """Convert FBGEMM's modes: L2 (1) adds to the gradient, DECOUPLE (2) does not.

    NONE (0 or None) is for optimizers whose decay has one mode only, and raises for others.
    """
    mode_name = str(getattr(mode, "name", mode)).lower()
    is_decoupled = mode_name in ("decouple", "2")
    if mode_name not in ("l2", "none", "0", "1", "decouple", "2"):
        raise ValueError(
            f"weight_decay_mode must be NONE, L2 or DECOUPLE here, got {mode!r}; make the "
            "optimizer with emblib.optim for others"
        )
    if issubclass(make, _L2_ONLY_CLASSES):
        if is_decoupled:
            raise ValueError(f"{make.__name__} has no decoupled weight decay, got mode {mode!r}")
        return optim.L2(rate)
    is_always_decoupled = issubclass(make, _DECOUPLED_IN_FBGEMM)
    if not is_always_decoupled and mode_name in ("none", "0"):
        raise ValueError(
            f"weight_decay={rate} would have no effect on {make.__name__} with weight_decay_mode "
            "NONE, FBGEMM's default: pass L2 or DECOUPLE as weight_decay_mode, or leave it out"
        )
    return optim.Decoupled(rate) if is_decoupled or is_always_decoupled else optim.L2(rate)


def from_torch(optimizer_class: Any, arguments: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer of emblib that is equivalent to a class of `torch.optim`.

    Supported are `torch.optim.SGD`, `Adagrad`, `Adam` and `AdamW`, any class called
    `RowWiseAdagrad`, and the classes of `emblib.optim`. Any other class is supported if its
    attribute `fused_class` is such a class; `fused_defaults` are then default arguments, and
    `beta1` and `beta2` are accepted for `betas`, as in FBGEMM, whose Adam decouples a decay.

    Raises:
        ValueError: an argument has no equivalent.
        TypeError: the class is unknown, or is one of `emblib.optim` that does not take the
            arguments.
    """
    decoupled_classes: tuple[type, ...] = _DECOUPLED_ONLY_CLASSES
    if fused_class := getattr(optimizer_class, "fused_class", None):
        arguments = {**getattr(optimizer_class, "fused_defaults", {}), **arguments}
        optimizer_class, arguments = fused_class, _convert_fbgemm_names(fused_class, arguments)
        decoupled_classes = _DECOUPLED_IN_FBGEMM
    if isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer):
        decay = arguments.get("weight_decay")
        if not isinstance(decay, int | float) or isinstance(decay, bool):
            return optimizer_class(**arguments)
        # A number as in torch.optim; classes of emblib.optim take an L2 or Decoupled.
        is_decoupled = issubclass(optimizer_class, decoupled_classes)
        decay_class = optim.Decoupled if is_decoupled else optim.L2
        return optimizer_class(
            **{**arguments, "weight_decay": decay_class(decay) if decay else None}
        )
    options = dict(arguments)
    defaults = _default_arguments(optimizer_class)
    if defaults is None:
        raise TypeError(
            "tables run torch.optim.SGD, Adagrad, Adam or AdamW, a RowWiseAdagrad, or a class of "
            f"emblib.optim, got {optimizer_class!r}"
        )
    for name in list(options):
        if name in defaults.hyperparameters:
            defaults.hyperparameters[name] = options.pop(name)
    maximize = options.pop("maximize", False)
    if defaults.make is optim.RowwiseAdagrad:
        _pop_betas(options)  # TorchRec's RowWiseAdagrad accepts and ignores them
    unsupported = {
        name: value for name, value in options.items() if name not in _IGNORED_ARGUMENTS and value
    }
    if unsupported:
        raise ValueError(
            f"{unsupported} of {optimizer_class.__name__} are not supported by tables, which take "
            f"{sorted(defaults.hyperparameters)}"
        )
    values = {**defaults.hyperparameters, "maximize": bool(maximize)}
    decay = values.pop("weight_decay", 0.0)
    if "betas" in values:
        values["betas"] = tuple(values["betas"])
    decay_class = optim.Decoupled if optimizer_class is torch.optim.AdamW else optim.L2
    return defaults.make(**values, weight_decay=decay_class(decay) if decay else None)


_IGNORED_ARGUMENTS = {"foreach", "fused", "capturable"}  # they do not change the result


class _TorchDefaults(NamedTuple):
    """A class of `emblib.optim`, and its hyperparameters with the names and defaults of torch."""

    make: Callable[..., Optimizer]
    hyperparameters: dict[str, Any]


def _default_arguments(optimizer_class: Any) -> _TorchDefaults | None:
    """Return the emblib optimizer of a class of torch, with torch's defaults; None for another."""
    if optimizer_class is torch.optim.SGD:
        return _TorchDefaults(optim.SGD, {"lr": 1e-3, "weight_decay": 0.0})
    if optimizer_class is torch.optim.Adagrad:
        return _TorchDefaults(optim.Adagrad, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0})
    if optimizer_class in (torch.optim.Adam, torch.optim.AdamW):
        decay = 1e-2 if optimizer_class is torch.optim.AdamW else 0.0
        adam = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": decay}
        return _TorchDefaults(optim.Adam, adam)
    if getattr(optimizer_class, "__name__", "") == "RowWiseAdagrad":
        return _TorchDefaults(optim.RowwiseAdagrad, {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0})
    return None
