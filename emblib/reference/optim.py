"""Optimizers in plain PyTorch: the definition of the fused update of a row.

`OPTIMIZERS` maps the name of every functor of `csrc/optim` to its rule, a function from a
`RowBatch` to new weights and states. Arithmetic is in the dtype of the gradients, e.g. float64;
only stored values are rounded. A quotient whose denominator can be 0 is 0 then (`_ratio`).

`round_stochastically` defines stochastic rounding from float32 to 16 bits in integer arithmetic,
bit for bit as the kernels do it. The random words come from Philox: key `seed`, counter (low and
high half of the linear row id, column / 4 and tensor, step). Tensor 0 is the weights, 1 and 2 are
the element-wise states; 8, 9 and 10 are the same tensors when a cache writes rows back.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.columns import Hyper
from emblib.optim import decode_steps, encode_steps
from emblib.optim.adagrad import LAST_STEP
from emblib.reference.random import philox_counters


def rounding_words(seed: int, rows: Tensor, dim: int, step: int, tensor: int) -> Tensor:
    """Return a random 32-bit word per element of the linear rows `rows` `[U]`, int64 `[U, dim]`.

    `tensor` is the number of the rounded tensor, see the module docstring.
    """
    blocks = torch.arange((dim + 3) // 4, device="cpu")
    row, block = torch.meshgrid(rows.cpu().long(), blocks, indexing="ij")
    counters = torch.stack(
        [
            row & 0xFFFFFFFF,
            row >> 32 & 0xFFFFFFFF,
            block | tensor << 28,
            torch.full_like(row, step & 0xFFFFFFFF),
        ],
        dim=-1,
    )
    random = philox_counters(seed, counters.view(-1, 4))
    return random.view(len(rows), 4 * len(blocks))[:, :dim].to(rows.device)


def round_stochastically(values: Tensor, dtype: torch.dtype, words: Tensor) -> Tensor:
    """Round `values` (as float32) up or down at random to float16 or bfloat16.

    A magnitude between two neighbours `lower` and `upper` is rounded up with the probability
    (magnitude - lower) / (upper - lower), for float16 cut to a multiple of 2^-13. `words` are int64
    in [0, 2^32), one per value: bfloat16 uses the low 16 bits, float16 the low 13. Any other
    `dtype` is rounded to nearest without words. A finite value becomes infinite only if rounding to
    nearest makes it infinite.
    """
    values = values.float()
    if dtype not in (torch.float16, torch.bfloat16):
        return values.to(dtype)
    bits = values.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    magnitude, sign = bits & 0x7FFFFFFF, bits >> 16 & 0x8000
    rounded = (_round_to_half if dtype == torch.float16 else _round_to_bfloat)(magnitude, words)
    infinity_bits = 0x7C00 if dtype == torch.float16 else 0x7F80
    nearest_bits = values.abs().to(dtype).view(torch.int16).long().clamp(max=infinity_bits)
    rounded = torch.where(rounded >= infinity_bits, nearest_bits, rounded)
    unsigned = sign | rounded
    result_bits = torch.where(unsigned >= 0x8000, unsigned - 0x10000, unsigned).to(torch.int16)
    result = result_bits.view(dtype)
    return torch.where(values.isnan(), torch.full_like(result, torch.nan), result)


def _round_to_bfloat(magnitude: Tensor, words: Tensor) -> Tensor:
    return (magnitude + (words & 0xFFFF)) >> 16


def _round_to_half(magnitude: Tensor, words: Tensor) -> Tensor:
    # The bits of a float16 and 13 more bits. Below 2^-14 (subnormal) float16s are 2^-24 apart.
    mantissa = (magnitude & 0x7FFFFF) | 0x800000
    subnormal = mantissa >> (113 - (magnitude >> 23)).clamp(0, 31)
    bits = torch.where(magnitude < 0x38800000, subnormal, magnitude - 0x38000000)
    return (bits + (words & 0x1FFF)) >> 13


States = list[Tensor]


@dataclass(frozen=True)
class RowBatch:
    """A batch of rows during an optimizer step.

    Attributes:
        w: weights `[U, D]` before the step.
        decayed: weights `[U, D]` after decoupled decay, from which most rules subtract the step.
        g: gradient `[U, D]` with the L2 penalty.
        states: states in the optimizer's order, `[U, D]` or `[U]`.
        lr: learning rate.
        step: number of this step, from 1.
        numbers: hyperparameters from `Hyper.OPTIMIZER_ARGS` on, in the order of the optimizer's
            functor in csrc; optimizers of the Adagrad family begin with eps.
    """

    w: Tensor
    decayed: Tensor
    g: Tensor
    states: States
    lr: float
    step: float
    numbers: tuple[float, ...]


Rule = Callable[[RowBatch], tuple[Tensor, States]]


def _ratio(a: Tensor | float, b: Tensor) -> Tensor:
    """Return `a / b`, and 0 where `b` is 0."""
    return torch.where(b == 0, 0.0, a / torch.where(b == 0, 1.0, b))


def _norm(x: Tensor) -> Tensor:
    return x.square().sum(1).sqrt()


def _scale_rows(scale: Tensor, x: Tensor) -> Tensor:
    return scale.unsqueeze(1) * x


def _sgd(rows: RowBatch) -> tuple[Tensor, States]:
    return rows.decayed - rows.lr * rows.g, []


def _adagrad(rows: RowBatch) -> tuple[Tensor, States]:
    total = rows.states[0] + rows.g * rows.g
    return rows.decayed - _ratio(rows.lr * rows.g, total.sqrt() + rows.numbers[0]), [total]


def _adagrad_rate(rows: RowBatch, total: Tensor, lr: float | Tensor | None = None) -> Tensor:
    """Return Adagrad's step size per row."""
    return _ratio(rows.lr if lr is None else lr, total.sqrt() + rows.numbers[0])


def _rowwise_adagrad(rows: RowBatch) -> tuple[Tensor, States]:
    total = rows.states[0] + rows.g.square().mean(1)
    return rows.decayed - _scale_rows(_adagrad_rate(rows, total), rows.g), [total]


def _ensemble_rowwise_adagrad(rows: RowBatch) -> tuple[Tensor, States]:
    moving_average, total = rows.states  # `ensemble_` of emblib.optim updates the average
    new_rows, states = _rowwise_adagrad(replace(rows, states=[total]))
    return new_rows, [moving_average, *states]


def _limit_norm(new_rows: Tensor, max_norm: float) -> Tensor:
    """Scale rows of larger norm to `max_norm`, if that is positive."""
    norm = _norm(new_rows)
    if max_norm <= 0:
        return new_rows
    return _scale_rows(torch.where(norm > max_norm, _ratio(max_norm, norm), 1.0), new_rows)


def _max_norm(rows: RowBatch) -> tuple[Tensor, States]:
    new_rows, states = _rowwise_adagrad(rows)
    return _limit_norm(new_rows, rows.numbers[1]), states


def _global_decay(rows: RowBatch) -> tuple[Tensor, States]:
    """Decay a row for this step and, from step `start` on, for steps since its last update.

    The factor for the missed steps is at least `min_scale`.
    """
    _, max_norm, rate, min_scale, start = rows.numbers
    sums, prev_iter = rows.states
    last_step = decode_steps(prev_iter).double()  # 0 for rows that had no update
    num_missed_steps = min(rows.step, LAST_STEP) - last_step - 1
    missed_decay = torch.ones_like(sums)
    if rows.step >= start:
        factor = max(1 - rows.lr * rate, 0.0) ** num_missed_steps.clamp(min=0)
        has_missed = (last_step > 0) & (num_missed_steps > 0)
        missed_decay = torch.where(
            has_missed, factor.clamp(min=min_scale).to(missed_decay), missed_decay
        )
        prev_iter = _current_step_state(rows, prev_iter)
    total = sums + rows.g.square().mean(1)
    decayed = _scale_rows(missed_decay * (1 - rows.lr * rate), rows.decayed)
    new_rows = decayed - _scale_rows(_adagrad_rate(rows, total), rows.g)
    return _limit_norm(new_rows, max_norm), [total, prev_iter]


def _steps_since_update(rows: RowBatch) -> Tensor:
    """Return the steps since the last update of each row; 1 for rows that had none."""
    last_step = decode_steps(rows.states[1]).double()
    return torch.where(last_step == 0, 1.0, min(rows.step, LAST_STEP) - last_step).to(
        rows.states[1].dtype
    )


def _current_step_state(rows: RowBatch, like: Tensor) -> Tensor:
    """Return the current step as the state `prev_iter` stores it."""
    return encode_steps(torch.full_like(like, rows.step, dtype=torch.int64)).to(like)


def _update_count(rows: RowBatch, halflife: float) -> Tensor:
    """Return the count of the updates of each row, including this one.

    A halflife of 0 counts only this one, a negative halflife all of them. With a positive halflife
    the earlier count is halved per `halflife` steps.
    """
    counter = rows.states[2]
    if halflife == 0:
        return torch.ones_like(counter)
    return (
        counter + 1 if halflife < 0 else 1 + 0.5 ** (_steps_since_update(rows) / halflife) * counter
    )


def _cowclip(rows: RowBatch) -> tuple[Tensor, States]:
    """Clip the norm of the gradient to `count * max(coefficient * norm of the row, lower)`."""
    _, max_norm, halflife, coefficient, lower = rows.numbers
    total, count = rows.states[0] + rows.g.square().mean(1), _update_count(rows, halflife)
    norm_bound, norm = count * (coefficient * _norm(rows.w)).clamp(min=lower), _norm(rows.g)
    clip = torch.where(norm > norm_bound, _ratio(1.0, norm) * norm_bound, 1.0)
    new_rows = rows.decayed - _scale_rows(clip * _adagrad_rate(rows, total), rows.g)
    return _limit_norm(new_rows, max_norm), [total, _current_step_state(rows, total), count]


class _CounterNumbers(NamedTuple):
    """The `numbers` of a row-wise Adagrad with a `Counter`, see `Counter.parameters`."""

    eps: float
    max_norm: float
    halflife: float
    decay_kind: float  # 0 none, 1 L2, 2 Decoupled, 3 AdagradW
    decay_rate: float
    start: float
    bound: float
    tail: float  # -1 EQUAL, 0 RAISED, 1 LOWERED, 2 BY_COUNT (`TailRate`)
    threshold: float
    threshold_is_relative: float  # 1 if the threshold is a fraction of the largest count
    largest: float  # the largest count of the module plus 1, as last measured


def _tail_rate(rows: RowBatch, plain_rate: Tensor, count: Tensor) -> Tensor:
    """Return the step size per row: `plain_rate`, changed if the count exceeds the threshold."""
    n = _CounterNumbers(*rows.numbers)
    if n.tail == -1:
        return plain_rate
    if n.tail == 0:
        rate = plain_rate * ((n.largest / (count + 1)) ** n.bound).clamp(1, 10)
    elif n.tail == 1:
        rate = plain_rate * (((count + 1) / n.largest) ** n.bound).clamp(0.1, 1)
    else:
        rate = _ratio(rows.lr, (n.bound * count).sqrt() + n.eps)
    is_relative = n.threshold_is_relative > 0
    threshold = math.floor(n.threshold * n.largest) if is_relative else n.threshold
    return torch.where(count > threshold, rate, plain_rate)


def _counter(rows: RowBatch) -> tuple[Tensor, States]:
    """Apply FBGEMM's counter-based regularization: see `emblib.optim.Counter`.

    An `AdagradW` decay makes up for the steps since the row's last update. It also changes the step
    size by the count if the halflife is exactly -1 or -2. Changes of the step size and decays of
    rows begin after step `start`. The L2 penalty enters the sums from the first step on.
    """
    n = _CounterNumbers(*rows.numbers)
    penalised_grad = rows.g + n.decay_rate * rows.w if n.decay_kind == 1 else rows.g
    total = rows.states[0] + penalised_grad.square().mean(1)
    count = _update_count(rows, n.halflife)
    plain_rate = rate = _adagrad_rate(rows, total)
    decay = torch.ones_like(total)
    if n.start <= 0 or rows.step > n.start:
        rate = _tail_rate(rows, plain_rate, count)
        if n.decay_kind == 1:
            decay = 1 - n.halflife / count * n.decay_rate * plain_rate
        if n.decay_kind == 2:
            decay = 1 - n.halflife / count * n.decay_rate * rows.lr
        if n.decay_kind == 3:
            if n.halflife == -1:
                rate = plain_rate * count.sqrt()
            if n.halflife == -2:
                rate = _adagrad_rate(rows, total, (rows.lr * count).clamp(max=n.bound))
            num_missed_steps = _steps_since_update(rows).clamp(max=rows.step - n.start) - 1
            factor_per_step = max(1 - rows.lr * n.decay_rate, 0.0)
            missed_decay = torch.where(
                num_missed_steps == 0, 1.0, factor_per_step**num_missed_steps
            )
            rate, decay = rate * missed_decay, (1 - n.decay_rate * rows.lr) * missed_decay
    new_rows = _scale_rows(decay, rows.decayed) - _scale_rows(rate, rows.g)
    return _limit_norm(new_rows, n.max_norm), [total, _current_step_state(rows, total), count]


def _moments(rows: RowBatch, square: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both moments, the bias-corrected first moment, and the denominator of the step.

    `square` is what the second moment averages: `g*g`, or its mean per row.
    """
    beta1, beta2, eps = rows.numbers[:3]
    m = beta1 * rows.states[0] + (1 - beta1) * rows.g
    v = beta2 * rows.states[1] + (1 - beta2) * square
    denominator = (v / (1 - beta2**rows.step)).sqrt() + eps
    return m, v, m / (1 - beta1**rows.step), denominator


def _adam(rows: RowBatch) -> tuple[Tensor, States]:
    m, v, m_hat, denominator = _moments(rows, rows.g.square())
    return rows.decayed - rows.lr * _ratio(m_hat, denominator), [m, v]


def _partial_rowwise_adam(rows: RowBatch) -> tuple[Tensor, States]:
    m, v, m_hat, denominator = _moments(rows, rows.g.square().mean(1))
    return rows.decayed - rows.lr * _ratio(m_hat, denominator.unsqueeze(1)), [m, v]


def _lamb_step(rows: RowBatch, direction: Tensor) -> Tensor:
    """Apply LAMB's step: `direction` scaled to the row's norm, or unscaled if a norm is 0."""
    r = direction + rows.numbers[3] * rows.w
    w_norm, r_norm = _norm(rows.w), _norm(r)
    ratio = torch.where(w_norm > 0, _ratio(w_norm, r_norm), 1.0)
    return rows.decayed - _scale_rows(rows.lr * torch.where(r_norm > 0, ratio, 1.0), r)


def _lamb(rows: RowBatch) -> tuple[Tensor, States]:
    m, v, m_hat, denominator = _moments(rows, rows.g.square())
    return _lamb_step(rows, _ratio(m_hat, denominator)), [m, v]


def _partial_rowwise_lamb(rows: RowBatch) -> tuple[Tensor, States]:
    m, v, m_hat, denominator = _moments(rows, rows.g.square().mean(1))
    return _lamb_step(rows, _ratio(m_hat, denominator.unsqueeze(1))), [m, v]


def _lars(rows: RowBatch) -> tuple[Tensor, States]:
    """Scale the learning rate of a row by its norm ÷ the norm of its gradient, unless one is 0."""
    momentum, eta, decay = rows.numbers
    norm = _norm(rows.w)
    denominator = _norm(rows.g) + decay * norm
    ratio = rows.lr * eta * _ratio(norm, denominator)
    rate = torch.where((norm > 0) & (denominator > 0), ratio, rows.lr)
    m = momentum * rows.states[0] + _scale_rows(rate, rows.g + decay * rows.w)
    return rows.decayed - m, [m]


def _ftrl(rows: RowBatch) -> tuple[Tensor, States]:
    """Apply FTRL-Proximal to the elements whose squared gradient is not 0 in float32.

    Other elements, and all elements at a learning rate of 0, get `rows.decayed`; their states stay.
    """
    beta, l1, l2 = rows.numbers
    total, linear = rows.states
    if rows.lr == 0:
        return rows.decayed, [total, linear]
    has_step = rows.g.float().square() != 0
    new_total = total + rows.g * rows.g
    sigma = (new_total.sqrt() - total.sqrt()) / rows.lr
    new_linear = linear + rows.g - sigma * rows.w
    shrunk = new_linear.sign() * (new_linear.abs() - l1).clamp(min=0)
    denominator = (beta + new_total.sqrt()) / rows.lr + l2
    new_rows = torch.where(has_step, -_ratio(shrunk, denominator), rows.decayed)
    new_states = [
        torch.where(has_step, new_total, total),
        torch.where(has_step, new_linear, linear),
    ]
    return new_rows, new_states


@dataclass(frozen=True)
class ReferenceOptimizer:
    """The rule of an optimizer, and whether each of its states has one number per row."""

    rule: Rule
    per_row: tuple[bool, ...] = ()


OPTIMIZERS = {
    "sgd": ReferenceOptimizer(_sgd),
    "adagrad": ReferenceOptimizer(_adagrad, (False,)),
    "rowwise_adagrad": ReferenceOptimizer(_rowwise_adagrad, (True,)),
    "ensemble_rowwise_adagrad": ReferenceOptimizer(_ensemble_rowwise_adagrad, (False, True)),
    "rowwise_adagrad_max_norm": ReferenceOptimizer(_max_norm, (True,)),
    "rowwise_adagrad_global_decay": ReferenceOptimizer(_global_decay, (True, True)),
    "rowwise_adagrad_cowclip": ReferenceOptimizer(_cowclip, (True, True, True)),
    "rowwise_adagrad_counter": ReferenceOptimizer(_counter, (True, True, True)),
    "adam": ReferenceOptimizer(_adam, (False, False)),
    "partial_rowwise_adam": ReferenceOptimizer(_partial_rowwise_adam, (False, True)),
    "lamb": ReferenceOptimizer(_lamb, (False, False)),
    "partial_rowwise_lamb": ReferenceOptimizer(_partial_rowwise_lamb, (False, True)),
    "lars": ReferenceOptimizer(_lars, (False,)),
    "ftrl": ReferenceOptimizer(_ftrl, (False, False)),
}


def step_rows(
    optimizer: str, w: Tensor, g: Tensor, states: Sequence[Tensor], hyper: Tensor
) -> tuple[Tensor, States]:
    """Return new weights and states of rows `w` `[U, D]` with gradient `g`, in the dtype of `g`.

    `states` are the states of these rows, `[U, D]` or `[U]`; `hyper` is float64, see `Hyper`.
    """
    lr, step, l2, decay, _, *numbers = hyper.tolist()
    w, states = w.to(g.dtype), [state.to(g.dtype) for state in states]
    penalised_grad = g + l2 * w if l2 else g  # no NaN of zero times an infinite weight
    rows = RowBatch(w, w * (1 - lr * decay), penalised_grad, states, lr, step, tuple(numbers))
    return OPTIMIZERS[optimizer].rule(rows)


def store_rounded(
    target: Tensor, positions: Tensor, values: Tensor, hyper: Tensor, ids: Tensor, tensor: int
) -> None:
    """Write `values` to `target[positions]`, rounded as `hyper` selects.

    Values `[U, D]` for a `target` in 16 bits are rounded stochastically if the seed in `hyper` is
    not negative: the linear rows `ids` `[U]` and the number `tensor` select the `rounding_words`.
    Other values are rounded to nearest.
    """
    seed = int(hyper[Hyper.SEED])
    is_narrow = target.dtype in (torch.float16, torch.bfloat16)
    if seed >= 0 and is_narrow and values.dim() == 2:
        random = rounding_words(seed, ids, values.size(1), int(hyper[Hyper.STEP]), tensor)
        target[positions] = round_stochastically(values, target.dtype, random)
    else:
        target[positions] = values.to(target.dtype)


def update_rows_(
    weights: Tensor,
    states: Sequence[Tensor],
    hyper: Tensor,
    optimizer: str,
    grads: Tensor,
    first_row: int = 0,
) -> None:
    """Apply `optimizer` to every row of `weights` `[R, W]` whose gradient is not all zero.

    `states` are `[R, W]` or `[R]`. Weights and states are changed in place. Arithmetic is in the
    dtype of `grads` `[R, W]`. Written values are rounded as `hyper` selects, in row i with the
    random numbers of row `first_row + i`.
    """
    rows = grads.ne(0).any(1).nonzero().squeeze(1)
    row_states = [state[rows] for state in states]
    new_rows, new_states = step_rows(optimizer, weights[rows], grads[rows], row_states, hyper)
    ids = first_row + rows
    store_rounded(weights, rows, new_rows, hyper, ids, 0)
    for number, (state, values) in enumerate(zip(states, new_states, strict=True)):
        store_rounded(state, rows, values, hyper, ids, 1 + number)
