"""The same training in float64 and with autograd alone: lookups, gradients and the update rules.

The rules are those of FBGEMM's documentation for GPUs, one function of a table each.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.compat.settings import Batch, Result, Setting, batches_of, weights_of

# (weights, states, summed gradient, step, options) of the rows looked up -> their new weights; the
# states are changed in place.
Rule = Callable[[Tensor, list[Tensor], Tensor, int, dict[str, Any]], Tensor]
# (weights, states, rows of the batch, step, options) of a table, changed in place before a lookup
Before = Callable[[Tensor, list[Tensor], Tensor, int, dict[str, Any]], None]


def lookup(weights: list[Tensor], setting: Setting, batch: Batch, samples: Tensor | None) -> Tensor:
    """The output of a batch, in the dtype of the weights."""
    offsets = batch.offsets.long()
    ranks = [[setting.batch] for _ in setting.features] if batch.sizes is None else batch.sizes
    blocks: list[list[Tensor]] = [[] for _ in ranks[0]]
    whole, bag = [], 0
    for f, table in enumerate(setting.features):
        size = sum(ranks[f])
        bounds = offsets[bag : bag + size + 1]
        bag += size
        rows = weights[table][batch.indices.long()[bounds[0] : bounds[-1]]]
        if samples is not None:
            rows = rows * samples[bounds[0] : bounds[-1]].unsqueeze(1)
        if setting.pooling == "NONE":
            whole.append(rows)
            continue
        lengths = bounds.diff()
        bags = torch.repeat_interleave(torch.arange(size), lengths)
        pooled = rows.new_zeros(size, rows.size(1)).index_add(0, bags, rows)
        if setting.pooling == "MEAN":
            pooled = pooled / lengths.clamp(min=1).unsqueeze(1)
        whole.append(pooled)
        for rank, part in enumerate(pooled.split(ranks[f])):
            blocks[rank].append(part.reshape(-1))
    if setting.pooling == "NONE":
        return torch.cat(whole)
    if batch.sizes is None:
        return torch.cat(whole, dim=1)
    return torch.cat([part for rank in blocks for part in rank])


def train(
    setting: Setting,
    rule: Rule,
    shapes: tuple[str, ...],
    before: Before | None = None,
    **options: Any,
) -> Result:
    """As `settings.train`; `shapes` has "row" or "element" for each state of the rule."""
    weights = [w.double() for w in weights_of(setting)]
    states = [
        [w.new_zeros(len(w)) if shape == "row" else torch.zeros_like(w) for shape in shapes]
        for w in weights
    ]
    outputs, sample_gradients = [], []
    for step, batch in enumerate(batches_of(setting), 1):
        rows = distinct_rows(setting, batch)
        for w, own, of_batch in zip(weights, states, rows, strict=True):
            if before is not None:
                before(w, own, of_batch, step, options)
            w.requires_grad_()
        samples = None
        if batch.sample_weights is not None:
            samples = batch.sample_weights.double().requires_grad_()
        output = lookup(weights, setting, batch, samples)
        outputs.append(output.detach().float())
        gradient = batch.gradient.double()
        if options.get("gradient_clipping"):
            gradient = gradient.clamp(-options["max_gradient"], options["max_gradient"])
        wanted = [*weights, *([] if samples is None else [samples])]
        found = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        if samples is not None:
            sample_gradients.append(found[-1].float())
        for t, w in enumerate(weights):
            w = w.detach()
            r = rows[t]
            if r.numel():
                of_rows = [state[r] for state in states[t]]
                w = w.index_copy(0, r, rule(w[r], of_rows, found[t][r], step, options))
                for state, new in zip(states[t], of_rows, strict=True):
                    state[r] = new
            weights[t] = w
    return {
        "output": outputs,
        "sample weights' gradient": sample_gradients,
        "weights": [w.float() for w in weights],
        "states": [state.float() for table in states for state in table],
    }


def distinct_rows(setting: Setting, batch: Batch) -> list[Tensor]:
    """For each table the rows that a batch looks up, each one once."""
    return [torch.unique(_rows(setting, batch, t)) for t in range(len(setting.rows))]


def _rows(setting: Setting, batch: Batch, table: int) -> Tensor:
    ranks = [[setting.batch] for _ in setting.features] if batch.sizes is None else batch.sizes
    parts, bag = [torch.zeros(0, dtype=torch.int64)], 0
    for f, sizes in enumerate(ranks):
        end = bag + sum(sizes)
        if setting.features[f] == table:
            parts.append(batch.indices.long()[batch.offsets[bag] : batch.offsets[end]])
        bag = end
    return torch.cat(parts)


def _norm(x: Tensor) -> Tensor:
    return x.norm(dim=1, keepdim=True)


def sgd(w: Tensor, states: list[Tensor], g: Tensor, step: int, o: dict[str, Any]) -> Tensor:
    """EXACT_SGD."""
    return w - o["learning_rate"] * g


def adagrad(w: Tensor, states: list[Tensor], g: Tensor, step: int, o: dict[str, Any]) -> Tensor:
    """EXACT_ADAGRAD."""
    states[0] += g**2
    return w - o["learning_rate"] * g / (states[0].sqrt() + o["eps"])


def rowwise(w: Tensor, states: list[Tensor], g: Tensor, step: int, o: dict[str, Any]) -> Tensor:
    """EXACT_ROWWISE_ADAGRAD with weight decay NONE, L2 or DECOUPLE, and max_norm."""
    lr, decay, mode = o["learning_rate"], o.get("weight_decay", 0.0), o.get("mode", "NONE")
    if mode == "L2":
        g = g + decay * w
    states[0] += (g**2).mean(1)
    keep = 1 - lr * decay if mode == "DECOUPLE" else 1.0
    w = keep * w - lr * g / (states[0].sqrt() + o["eps"]).unsqueeze(1)
    limit = o.get("max_norm", 0.0)
    return w * (limit / _norm(w)).clamp(max=1.0) if limit > 0 else w


def global_decay(
    w: Tensor, states: list[Tensor], g: Tensor, step: int, o: dict[str, Any]
) -> Tensor:
    """EXACT_ROWWISE_ADAGRAD with DECOUPLE_GLOBAL, after `catch_up`."""
    if step >= o["start"]:
        states[1].fill_(step)
    return rowwise(w, states, g, step, o | {"mode": "DECOUPLE"})


def catch_up(w: Tensor, states: list[Tensor], rows: Tensor, step: int, o: dict[str, Any]) -> None:
    """DECOUPLE_GLOBAL: rows decay for the steps they were not seen in, when they are seen."""
    previous = states[1][rows]
    missed = (1 - o["learning_rate"] * o["weight_decay"]) ** (step - previous - 1)
    missed = missed.clamp(min=o["lower_bound"])
    holds = (previous > 0) & (step >= o["start"]) & (previous < step - 1)
    w[rows] *= torch.where(holds, missed, 1.0).unsqueeze(1)


def ensemble(w: Tensor, states: list[Tensor], rows: Tensor, step: int, o: dict[str, Any]) -> None:
    """ENSEMBLE_ROWWISE_ADAGRAD: what happens to whole tables before a lookup."""
    average, swap = step % o["step_ema"] == 0, step % o["step_swap"] == 0
    keep = o["step_ema_coef"] if step > o["step_start"] else 0.0
    if average:
        states[1].copy_(keep * states[1] + (1 - keep) * w)
    if swap:
        w.copy_(states[1])
    if average and o["clear"]:
        states[1].zero_()


def counter(w: Tensor, states: list[Tensor], g: Tensor, step: int, o: dict[str, Any]) -> Tensor:
    """EXACT_ROWWISE_ADAGRAD with COUNTER, decoupled, half-life > 0, decreasing tail rates."""
    total, previous, count = states
    halflife, lr = o["halflife"], o["learning_rate"]
    gap = torch.where(previous == 0, 1.0, step - previous)
    count.copy_(1 + torch.exp(-gap * math.log(2) / halflife) * count)
    previous.fill_(step)
    total += (g**2).mean(1)
    scale = lr / (total.sqrt() + o["eps"])
    tail = ((count + 1) / 1.0).pow(o["adjustment_ub"]).clamp(0.1, 1.0)
    scale = torch.where(count > o["threshold"], scale * tail, scale)
    keep = 1 - halflife / count * o["weight_decay"] * lr
    return keep.unsqueeze(1) * w - scale.unsqueeze(1) * g


def cowclip(w: Tensor, states: list[Tensor], g: Tensor, step: int, o: dict[str, Any]) -> Tensor:
    """EXACT_ROWWISE_ADAGRAD with COWCLIP, decoupled, half-life < 0: a plain count."""
    total, previous, count = states
    count += 1
    previous.fill_(step)
    total += (g**2).mean(1)
    limit = count.unsqueeze(1) * (o["coefficient"] * _norm(w)).clamp(min=o["lower_bound"])
    clip = (limit / _norm(g)).clamp(max=1.0)
    scale = clip * o["learning_rate"] / (total.sqrt() + o["eps"]).unsqueeze(1)
    return (1 - o["weight_decay"] * o["learning_rate"]) * w - scale * g


def _moments(states: list[Tensor], g: Tensor, step: int, o: dict[str, Any]) -> Tensor:
    """Adam's direction; the second moment is one a row where the state is."""
    m, v = states
    m.copy_(o["beta1"] * m + (1 - o["beta1"]) * g)
    square = (g**2).mean(1) if v.dim() == 1 else g**2
    v.copy_(o["beta2"] * v + (1 - o["beta2"]) * square)
    root = (v / (1 - o["beta2"] ** step)).sqrt() + o["eps"]
    return m / (1 - o["beta1"] ** step) / (root.unsqueeze(1) if v.dim() == 1 else root)


def adam(w: Tensor, states: list[Tensor], g: Tensor, step: int, o: dict[str, Any]) -> Tensor:
    """ADAM and PARTIAL_ROWWISE_ADAM."""
    return w - o["learning_rate"] * (_moments(states, g, step, o) + o["weight_decay"] * w)


def lamb(w: Tensor, states: list[Tensor], g: Tensor, step: int, o: dict[str, Any]) -> Tensor:
    """LAMB and PARTIAL_ROWWISE_LAMB."""
    r = _moments(states, g, step, o) + o["weight_decay"] * w
    return w - o["learning_rate"] * _norm(w) / _norm(r) * r


def lars(w: Tensor, states: list[Tensor], g: Tensor, step: int, o: dict[str, Any]) -> Tensor:
    """LARS_SGD."""
    rate = o["learning_rate"] * o["eta"] * _norm(w) / (_norm(g) + o["weight_decay"] * _norm(w))
    states[0].copy_(o["momentum"] * states[0] + rate * (g + o["weight_decay"] * w))
    return w - states[0]
