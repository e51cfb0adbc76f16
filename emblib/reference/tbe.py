"""Table-batched embeddings in plain PyTorch: the definition of correct.

Same terms as `emblib.ops.tbe`, no native code, any floating dtype (float64 for gradient checks),
any device. `features` is int64 `[F, 5]`: weight_offset, row_base, rows, dim, column.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from emblib import optim
from emblib.specs import Pooling


class Groups(NamedTuple):
    """Lookups by row: `rows [U]` ascending, `segments [U + 1]` into `lookups`, the bag of each."""

    rows: Tensor
    segments: Tensor
    lookups: Tensor
    bags: Tensor


def repair_offsets(offsets: Tensor, num_lookups: int) -> Tensor:
    """Offsets clamped to `[0, L]`, made non-decreasing, the last one equal to L."""
    repaired = offsets.long().clamp(0, num_lookups).cummax(0).values
    if repaired.numel() > 1:
        repaired[-1] = num_lookups
    return repaired


def bag_of_lookup(offsets: Tensor, num_lookups: int) -> Tensor:
    """The bag of each lookup, int64 `[L]`; -1 before the first bag."""
    positions = torch.arange(num_lookups, device=offsets.device)
    return torch.searchsorted(offsets[:-1].long().contiguous(), positions, right=True) - 1


def _locate(features: Tensor, indices: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bag, feature and repaired index of each lookup; index -1 marks one to skip."""
    bag = bag_of_lookup(offsets, indices.numel())
    batch = max((offsets.numel() - 1) // max(features.size(0), 1), 1)
    feature = bag.clamp(min=0) // batch
    if features.size(0) == 0:
        return bag, feature, torch.full_like(feature, -1)
    index = indices.long()
    in_table = (index >= 0) & (index < features[feature, 2])
    index = torch.where(in_table | (index == -1), index, 0)
    return bag, feature, torch.where(bag >= 0, index, -1)


def lookup(
    weights: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None = None,
    pooling: Pooling = Pooling.SUM,
    columns: int = 0,
) -> Tensor:
    """Pool each bag: `[B, columns]` (`[L, D]` for NONE), in the dtype of `weights`.

    Differentiable in `weights` (flat) and `sample_weights`.
    """
    offsets = repair_offsets(offsets, indices.numel())
    bag, feature, index = _locate(features, indices, offsets)
    batch = (offsets.numel() - 1) // max(features.size(0), 1)
    lengths = offsets.diff()
    lines = indices.numel() if pooling is Pooling.NONE else batch
    out = weights.new_zeros(lines, columns)
    for f, (weight_offset, _, rows, dim, column) in enumerate(features.tolist()):
        mine = ((feature == f) & (index >= 0)).nonzero().squeeze(1)
        table = weights.flatten()[weight_offset : weight_offset + rows * dim].view(rows, dim)
        values = table[index[mine]]
        if sample_weights is not None:
            values = values * sample_weights[mine].to(values.dtype).unsqueeze(1)
        if pooling is Pooling.MEAN:
            values = values / lengths[bag[mine]].to(values.dtype).unsqueeze(1)
        line = mine if pooling is Pooling.NONE else bag[mine] - f * batch
        block = weights.new_zeros(lines, dim).index_add(0, line, values)
        first = 0 if pooling is Pooling.NONE else column
        out = out + torch.nn.functional.pad(block, (first, columns - first - dim))
    return out


def group(features: Tensor, indices: Tensor, offsets: Tensor) -> Groups:
    """Group the lookups by linear row id (`row_base + index`), stable; skipped ones left out."""
    offsets = repair_offsets(offsets, indices.numel())
    bag, feature, index = _locate(features, indices, offsets)
    kept = (index >= 0).nonzero().squeeze(1)
    keys = features[feature[kept], 1] + index[kept]
    order = keys.argsort(stable=True)
    rows, counts = keys[order].unique_consecutive(return_counts=True)
    segments = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return Groups(rows, segments, kept[order], bag[kept[order]])


def sample_weight_grad(
    grad: Tensor,
    weights: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    pooling: Pooling = Pooling.SUM,
) -> Tensor:
    """Gradient of `lookup` in its sample weights, `[L]`: row times gradient of its bag."""
    ones = torch.ones(indices.numel(), dtype=weights.dtype, device=weights.device)
    with torch.enable_grad():
        ones.requires_grad_()
        out = lookup(weights.detach(), features, indices, offsets, ones, pooling, grad.size(1))
        return torch.autograd.grad(out, ones, grad.to(out.dtype))[0]


def update_(
    weights: Tensor,
    states: Sequence[Tensor],
    hyper: Tensor,
    optimizer: str,
    weight_grad: Tensor,
    features: Tensor,
    groups: Groups,
) -> None:
    """Apply `optimizer` to the rows in `groups`, given the dense gradient of the flat weights.

    `hyper` is `(lr, step, *parameters)`; `states` as `emblib.optim` lists them.
    """
    touched = {int(row) for row in groups.rows.tolist()}
    done: set[int] = set()
    for weight_offset, row_base, rows, dim, _ in features.tolist():
        mine = sorted(r for r in touched - done if row_base <= r < row_base + rows)
        done.update(mine)
        if not mine:
            continue
        linear = torch.tensor(mine, device=weights.device)
        start = weight_offset + (linear - row_base) * dim
        elements = start.unsqueeze(1) + torch.arange(dim, device=weights.device)
        values, grads = weights[elements].to(weight_grad.dtype), weight_grad[elements]
        at = [linear if kept.per_row else elements for kept in optim.FUSED[optimizer].states]
        local = [state[i] for state, i in zip(states, at, strict=True)]
        new_values, new_states = OPTIMIZERS[optimizer](values, grads, local, hyper.tolist())
        weights[elements] = new_values.to(weights.dtype)
        for state, i, new in zip(states, at, new_states, strict=True):
            state[i] = new.to(state.dtype)


State = list[Tensor]


def _sgd(w: Tensor, g: Tensor, state: State, hyper: list[float]) -> tuple[Tensor, State]:
    return w - hyper[0] * g, state


def _adagrad(w: Tensor, g: Tensor, state: State, hyper: list[float]) -> tuple[Tensor, State]:
    total = state[0] + g * g
    return w - torch.where(total == 0, 0, hyper[0] * g / (total.sqrt() + hyper[2])), [total]


def _rowwise_adagrad(
    w: Tensor, g: Tensor, state: State, hyper: list[float]
) -> tuple[Tensor, State]:
    total = state[0] + (g * g).mean(1)
    scale = torch.where(total == 0, total, hyper[0] / (total.sqrt() + hyper[2]))
    return w - scale.unsqueeze(1) * g, [total]


def _adam(w: Tensor, g: Tensor, state: State, hyper: list[float]) -> tuple[Tensor, State]:
    lr, step, beta1, beta2, eps = hyper
    m = beta1 * state[0] + (1 - beta1) * g
    v = beta2 * state[1] + (1 - beta2) * g * g
    m_hat, v_hat = m / (1 - beta1**step), v / (1 - beta2**step)
    denominator = v_hat.sqrt() + eps
    return w - torch.where(denominator == 0, 0, lr * m_hat / denominator), [m, v]


OPTIMIZERS = {
    "sgd": _sgd,
    "adagrad": _adagrad,
    "rowwise_adagrad": _rowwise_adagrad,
    "adam": _adam,
}
