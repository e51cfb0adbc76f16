"""The base of all optimizers with its kinds of weight decay; SGD, LARS, FTRL and `External`."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from emblib.columns import Hyper
from emblib.specs import OptionEnum, check_bool, format_config
from emblib.torch_names import refuse_names_of_torch


@dataclass(frozen=True)
class State:
    """One state tensor of a table: one number per row if `per_row`, otherwise one per weight.

    Example:
        >>> emblib.optim.Adam(0.01).states
        (State(name='exp_avg', per_row=False), State(name='exp_avg_sq', per_row=False))
    """

    name: str
    per_row: bool = False


@dataclass(frozen=True)
class L2:
    """Coupled weight decay: the gradient becomes `g + rate * w` before any other computation.

    `RowwiseAdagrad(counter=Counter())` applies it in another way, see `Counter`.

    Example:
        >>> emblib.optim.SGD(0.1, weight_decay=emblib.optim.L2(1e-4)).weight_decay
        L2(rate=0.0001)
    """

    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", _python_numbers(self.rate))
        check_number("the rate of L2", self.rate)


@dataclass(frozen=True)
class Decoupled:
    """Decoupled weight decay: `w -= lr * rate * w`, outside the step.

    LAMB applies the decay before it scales its step, and `RowwiseAdagrad(counter=Counter())` in
    another way, see `Counter`.

    Example:
        >>> emblib.optim.Adam(0.01, weight_decay=emblib.optim.Decoupled(1e-2)).weight_decay
        Decoupled(rate=0.01)
    """

    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", _python_numbers(self.rate))
        check_number("the rate of Decoupled", self.rate)


@dataclass(frozen=True)
class AdagradW:
    """Decoupled decay of `RowwiseAdagrad(counter=Counter())` that makes up for missed steps.

    A row that is seen again after n steps is decayed n times; steps before `Counter.start` do not
    count. The decay of the n - 1 missed steps scales the step size too. With `Counter(halflife=-1)`
    the step size is multiplied by the square root of the count. With `halflife=-2` the learning
    rate is `min(lr * count, bound)`.

    Example:
        >>> counter = emblib.optim.Counter()
        >>> decay = emblib.optim.AdagradW(1e-2)
        >>> emblib.optim.RowwiseAdagrad(0.1, counter=counter, weight_decay=decay).weight_decay
        AdagradW(rate=0.01)
    """

    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", _python_numbers(self.rate))
        check_number("the rate of AdagradW", self.rate)


WeightDecay = L2 | Decoupled | AdagradW


class Gradient(OptionEnum):
    """The form of a gradient of a table: SPARSE has the rows of the batch, DENSE all rows.

    Example:
        >>> dense = emblib.optim.External(gradient=emblib.optim.Gradient.DENSE)
        >>> bags = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(4, 2)], dense)
        >>> bags(torch.tensor([2]), torch.tensor([0, 1])).sum().backward()
        >>> bags.weights.grad
        tensor([[0., 0.],
                [0., 0.],
                [1., 1.],
                [0., 0.]])
    """

    SPARSE = "sparse"
    DENSE = "dense"


@dataclass(frozen=True)
class Optimizer:
    """Base of all optimizers.

    Args:
        lr: learning rate.
        weight_decay: None, or one of the kinds in `decays` of the optimizer.
        max_gradient: bound of the elements of the output's gradient, which are clamped to
            `[-max_gradient, max_gradient]` before any other computation; None clamps none. If
            backward updates the table, it leaves no gradient, so functions such as
            `torch.nn.utils.clip_grad_norm_` skip the table.
        deferred: False applies the optimizer in backward. True leaves a sparse gradient on the
            parameter of each table, as `nn.EmbeddingBag(sparse=True)` does, or a dense one on the
            cores of a tensor train. The `step` of `FusedOptimizer` applies it: gradients can be
            accumulated, unscaled and clipped before.
        maximize: whether the gradient is negated before weight decay, as in `torch.optim`.

    Raises:
        TypeError: an argument has its name of `torch.optim` (the message has the name here); or
            `deferred` or `maximize` is not a bool.
        ValueError: a number is negative, NaN or infinite in float32; or the optimizer does not have
            this kind of weight decay.

    Example:
        >>> emblib.optim.SGD(0.1, max_gradient=1.0, deferred=True)
        SGD(lr=0.1, weight_decay=None, max_gradient=1.0, deferred=True, maximize=False)
    """

    lr: float
    weight_decay: WeightDecay | None = field(default=None, kw_only=True)
    max_gradient: float | None = field(default=None, kw_only=True)
    deferred: bool = field(default=False, kw_only=True)
    maximize: bool = field(default=False, kw_only=True)

    __new__ = refuse_names_of_torch

    functor: ClassVar[str] = ""  # name of the functor of csrc/optim, see `codes.OPTIMIZER`
    base_states: ClassVar[tuple[State, ...]] = ()  # states of the plain functor
    decays: ClassVar[tuple[type, ...]] = (L2, Decoupled)  # kinds that `weight_decay` may have

    def __post_init__(self) -> None:
        for name in [entry.name for entry in fields(self)]:
            object.__setattr__(self, name, _python_numbers(getattr(self, name)))
        check_bool("deferred", self.deferred)
        check_bool("maximize", self.maximize)
        check_number("the learning rate", self.lr)
        object.__setattr__(self, "lr", float(self.lr))
        if self.max_gradient is not None:
            check_number("max_gradient", self.max_gradient)
        if self.weight_decay is not None and not isinstance(self.weight_decay, self.decays):
            known_decays = " or ".join(f"{kind.__name__}(rate)" for kind in self.decays)
            raise ValueError(
                f"weight_decay of {type(self).__name__} must be None"
                f"{f' or {known_decays}' if known_decays else ': it has none'}, got "
                f"{self.weight_decay!r}"
            )

    @property
    def name(self) -> str:
        """Return the name of the functor that makes the updates."""
        return self.functor

    @property
    def leaves_gradient(self) -> Gradient | None:
        """Return the form of the gradient that backward leaves; None if backward updates the table.

        Cores of tensor trains get dense gradients for SPARSE too.
        """
        return Gradient.SPARSE if self.deferred else None

    @property
    def states(self) -> tuple[State, ...]:
        """Return the states: first states as long as a row, then states of one number per row."""
        return self.base_states

    def parameters(self) -> tuple[float, ...]:
        """Return the optimizer's own numbers, which follow lr, step, decays and seed."""
        return ()

    def hyperparams(self, device: torch.device | str | None = None) -> Tensor:
        """Return float64 `(lr, step = 0, L2, decay, seed = -1, *parameters)` on `device`.

        None is torch's default device.
        """
        head = (self.lr, 0.0, *self._kernel_decay_rates(), -1.0)
        return torch.tensor((*head, *self.parameters()), dtype=torch.float64, device=device)

    def _kernel_decay_rates(self) -> tuple[float, float]:
        """Return the rates (L2, decoupled) that kernels apply outside the functor."""
        decay = self.weight_decay
        return (
            decay.rate if isinstance(decay, L2) else 0.0,
            decay.rate if isinstance(decay, Decoupled) else 0.0,
        )

    def with_hyperparams(self, numbers: Sequence[float]) -> Self:
        """Return this optimizer with other `hyperparams`, except for learning rate, step and seed.

        Raises:
            ValueError: a number is out of range, or there are more or fewer than in `hyperparams`.
        """
        num_values = Hyper.OPTIMIZER_ARGS + len(self.parameters())
        if len(numbers) != num_values:
            raise ValueError(
                f"{type(self).__name__} has {num_values} hyperparameters, got {len(numbers)}"
            )
        decay_class: Any = Decoupled if numbers[Hyper.DECAY] else L2
        rate = numbers[Hyper.DECAY] or numbers[Hyper.L2]
        if not rate and self.weight_decay is not None:
            decay_class = type(self.weight_decay)
        new_fields: dict[str, Any] = {"weight_decay": self._make_decay(decay_class, rate)}
        new_fields |= self._unpack_fields(tuple(numbers[Hyper.OPTIMIZER_ARGS :]))
        new_optimizer = replace(self, **new_fields)
        return self if new_optimizer == self else new_optimizer  # `ShortCalls` compares by identity

    def _unpack_fields(self, numbers: tuple[float, ...]) -> dict[str, Any]:
        """Return the fields that `parameters` packed into these numbers."""
        return {}

    def _make_decay(self, decay_class: Any, rate: float) -> Any:
        """Return `decay_class(rate)`; None for a rate of 0 if there is no decay."""
        return None if not rate and self.weight_decay is None else decay_class(rate)

    def _functor_decay_rate(self) -> float:
        """Return the rate of a decay inside the functor."""
        return 0.0 if self.weight_decay is None else float(self.weight_decay.rate)


def _python_numbers(value: Any) -> Any:
    """Convert scalars of numpy and torch to Python numbers, in a tuple too.

    They are saved in parameter groups, which `torch.load` reads with `weights_only`.
    """
    if isinstance(value, tuple):
        return tuple(map(_python_numbers, value))
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", 1) == 0 else value


_MAX_FLOAT32 = torch.finfo(torch.float32).max


def number_or_nan(value: Any) -> float:
    """Return a value as a float; NaN for a string, a bool, no number, or one beyond all floats."""
    try:
        return math.nan if isinstance(value, str | bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def check_number(name: str, value: float) -> None:
    """Raise ValueError unless `value` is a number >= 0 that is finite in float32.

    The kernels compute in float32, in which 1e300 would be infinite.
    """
    if not 0.0 <= number_or_nan(value) <= _MAX_FLOAT32:  # false for NaN
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")


def check_learning_rate(lr: float) -> None:
    """Raise ValueError unless `lr` is a number >= 0 that is finite in float32.

    Example:
        >>> emblib.optim.check_learning_rate(-1.0)
        Traceback (most recent call last):
            ...
        ValueError: the learning rate must be a finite number >= 0, got -1.0
    """
    check_number("the learning rate", lr)


_ROUNDING_ERROR = 1e-12  # of a learning rate that a schedule computes


def scheduled_rate(lr: float) -> float:
    """Return a learning rate of a schedule: 0 for one below it by a rounding error.

    Schedules of torch that end at 0 may end at -1e-18, e.g. `LinearLR(optimizer, 1 / 3, 0.0, 22)`.
    """
    return 0.0 if -_ROUNDING_ERROR < number_or_nan(lr) < 0.0 else lr


@dataclass(frozen=True)
class SGD(Optimizer):
    """`w -= lr * g`, once per distinct row.

    Example:
        >>> optimizer = emblib.optim.SGD(lr=0.5)
        >>> bags = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(4, 2)], optimizer)
        >>> weight = bags.table_weights()[0].fill_(1)
        >>> bags(torch.tensor([2]), torch.tensor([0, 1])).sum().backward()  # a gradient of ones
        >>> weight[1:3]
        tensor([[1.0000, 1.0000],
                [0.5000, 0.5000]])
    """

    functor: ClassVar[str] = "sgd"


@dataclass(frozen=True)
class LARS(Optimizer):
    """Momentum SGD whose learning rate follows the norms of row and gradient (You et al., 2017).

    `a = lr * eta * |w| / (|g| + rate * |w|); m = momentum * m + a * (g + rate * w); w -= m`, with
    the rate of `weight_decay=L2(rate)`. If `|w|` or the denominator is 0, `a` is `lr`.

    Args:
        momentum: weight of the old `m`, in [0, 1).
        eta: factor of the learning rate in `a`, >= 0.

    Raises:
        ValueError: `momentum` is outside [0, 1), or another number is negative or not finite.

    Example:
        >>> emblib.optim.LARS(lr=0.1, momentum=0.9).states
        (State(name='momentum_buffer', per_row=False),)
    """

    momentum: float = 0.9
    eta: float = 0.001

    functor: ClassVar[str] = "lars"
    base_states: ClassVar[tuple[State, ...]] = (State("momentum_buffer"),)
    decays: ClassVar[tuple[type, ...]] = (L2,)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("eta", self.eta)
        if not 0.0 <= number_or_nan(self.momentum) < 1.0:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum!r}")

    def parameters(self) -> tuple[float, ...]:
        """Return `(momentum, eta, rate of the weight decay)`."""
        return (self.momentum, self.eta, self._functor_decay_rate())

    def _unpack_fields(self, numbers: tuple[float, ...]) -> dict[str, Any]:
        momentum, eta, rate = numbers
        return {"momentum": momentum, "eta": eta, "weight_decay": self._make_decay(L2, rate)}

    def _kernel_decay_rates(self) -> tuple[float, float]:
        return (0.0, 0.0)


@dataclass(frozen=True)
class FTRL(Optimizer):
    """FTRL-Proximal per element (McMahan et al., 2013): `l1` makes weights exactly 0.

    `s = sqrt(sum + g*g) - sqrt(sum); linear += g - s / lr * w; sum += g*g`, then `w` is 0 where
    `|linear| <= l1`, else `-(linear - sign(linear) * l1) / ((beta + sqrt(sum)) / lr + l2)`. An
    element whose gradient is 0 does not change. With `lr` 0 no element changes. `l2` is the weight
    decay.

    Args:
        beta: constant that is added to the root; a smaller one makes the first steps larger. If
            `beta`, `l1` or `l2` is positive, the first step also shrinks the initial value.
        l1: the threshold (>= 0).
        l2: the ridge penalty (>= 0).

    Example:
        >>> emblib.optim.FTRL(lr=0.1, l1=0.01).states
        (State(name='sum', per_row=False), State(name='linear', per_row=False))
    """

    beta: float = 0.0
    l1: float = 0.0
    l2: float = 0.0

    functor: ClassVar[str] = "ftrl"
    base_states: ClassVar[tuple[State, ...]] = (State("sum"), State("linear"))
    decays: ClassVar[tuple[type, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta", "l1", "l2"):
            check_number(name, getattr(self, name))

    def parameters(self) -> tuple[float, ...]:
        """Return `(beta, l1, l2)`."""
        return (self.beta, self.l1, self.l2)

    def _unpack_fields(self, numbers: tuple[float, ...]) -> dict[str, Any]:
        return dict(zip(("beta", "l1", "l2"), numbers, strict=True))


@dataclass(frozen=True)
class External(Optimizer):
    """No fused update: backward leaves a gradient for an optimizer of `torch.optim`.

    `lr`, `weight_decay`, `deferred` and `maximize` must have their defaults.

    Args:
        gradient: form of the gradient; cores of tensor trains get a dense one for SPARSE too.

    Raises:
        ValueError: one of these does not have its default, or `gradient` is unknown.

    Example:
        >>> optimizer = emblib.optim.External()
        >>> bags = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(4, 2)], optimizer)
        >>> bags(torch.tensor([2]), torch.tensor([0, 1])).sum().backward()
        >>> bags.weights.grad.is_sparse
        True
    """

    lr: float = 0.0
    gradient: Gradient = Gradient.SPARSE

    functor: ClassVar[str] = "external"
    decays: ClassVar[tuple[type, ...]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lr != 0.0:
            raise ValueError(
                f"External has no learning rate, got {self.lr}; give it to your own optimizer"
            )
        if self.deferred:
            raise ValueError(
                "External makes no update that could be deferred; leave deferred out, and step "
                "your own optimizer"
            )
        if self.maximize:
            raise ValueError(
                "External makes no update that could maximize; leave maximize out, and give it to "
                "your own optimizer"
            )
        object.__setattr__(self, "gradient", Gradient(self.gradient))

    @property
    def leaves_gradient(self) -> Gradient:
        """Return the form of the gradient that backward leaves."""
        return self.gradient


NO_UPDATE = External(gradient=Gradient.DENSE)
"""The optimizer of tables without one: backward leaves gradients for torch.optim."""


def description(optimizer: Optimizer) -> str:
    """Format an optimizer for error messages.

    Example:
        >>> emblib.optim.description(emblib.optim.SGD(0.1))
        'SGD(lr=0.1)'
    """
    return "no optimizer (the default)" if optimizer is NO_UPDATE else format_config(optimizer)
