"""Gradients clipped before every step, by a norm over all ranks where tables are in parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from emblib.collections.optimizers.keyed import KeyedOptimizer, OptimizerWrapper
from emblib.specs import Choice


class GradientClipping(Choice):
    """What is bounded: the NORM of all gradients together, each VALUE, or nothing (NONE)."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """Clips the gradients of its parameters before every step.

    The norm is that of the whole model, the same on all ranks: parts of tables count on the rank
    that has them, everything else once. All ranks of such a model step together.

    Tables with a fused optimizer have no gradients here: `max_gradient` of theirs clips.

    Args:
        optimizer: whose parameters they are.
        clipping: what is bounded.
        max_gradient: the bound.
        norm_type: of the norm; `inf` for the largest value.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float = 2.0,
    ) -> None:
        super().__init__(optimizer)
        self.clipping, self.max_gradient = GradientClipping(clipping), max_gradient
        self.norm_type = float(norm_type)

    def step(self, closure: Any = None) -> Any:
        """Clip, then a step of the optimizer."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if self.clipping is GradientClipping.NORM:
            clip_grad_norm_(parameters, self.max_gradient, self.norm_type)
        elif self.clipping is GradientClipping.VALUE:
            torch.nn.utils.clip_grad_value_(parameters, self.max_gradient)
        return super().step(closure)


class GradientShare(Choice):
    """What a rank has of the gradient of a parameter.

    A SHARD, which no other rank has; a REPLICA of what all ranks have; or one that another rank
    has as well and counts (COUNTED_ELSEWHERE).
    """

    SHARD = "shard"
    REPLICA = "replica"
    COUNTED_ELSEWHERE = "counted_elsewhere"


class Peers(Protocol):
    """The ranks that have the other shards; equal if they are the same ranks."""

    def gather_numbers(self, numbers: Tensor) -> Tensor:
        """Return the numbers of all ranks, `[W, n]`; all ranks call this."""
        ...


@dataclass(frozen=True)
class _Mark:
    share: GradientShare
    peers: Peers


# Not attributes of the parameters: those would be pickled with them.
_marks = WeakTensorKeyDictionary()


def mark_gradient(parameter: Tensor, share: GradientShare, peers: Peers) -> None:
    """Note what this rank has of the gradient of a parameter, for `clip_grad_norm_`."""
    _marks[parameter] = _Mark(share, peers)


def is_marked(parameter: Tensor) -> bool:
    """Return whether `mark_gradient` was called for this parameter."""
    return parameter in _marks


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    peers: Peers | None = None,
) -> Tensor:
    """Clip gradients by their norm over all ranks; `peers` are found by the parameters' marks."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    peers = _peers_of(parameters) if peers is None else peers
    if peers is None:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    if not norm_type > 0:
        raise ValueError(
            f"norm_type must be positive over ranks, inf for the largest value; got {norm_type}"
        )
    given = [p for p in parameters if p.grad is not None]
    total = _norm_over_ranks(given, float(norm_type), peers)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the gradients of all ranks have a norm of {float(total)}, which cannot be clipped; "
            "error_if_nonfinite=False scales them nevertheless"
        )
    # Each kind by itself: torch scales no list of both.
    for some in (list(filter(_is_spread, given)), [p for p in given if not _is_spread(p)]):
        torch.nn.utils.clip_grads_with_norm_(some, max_norm, total)
    return total


def _peers_of(parameters: Sequence[Tensor]) -> Peers | None:
    found: list[Peers] = []
    for parameter in parameters:
        mark = _marks.get(parameter)
        if mark is not None and mark.peers not in found:
            found.append(mark.peers)
    if len(found) > 1:
        raise ValueError(
            "the parameters are of tables over several groups of ranks, which have no one norm: "
            "clip those of each group by themselves"
        )
    return found[0] if found else None


def _is_spread(parameter: Tensor) -> bool:
    """Return whether it is a `DTensor`, which knows the other ranks itself (FSDP2)."""
    return hasattr(parameter, "full_tensor")


def _norm_over_ranks(given: Sequence[Tensor], norm_type: float, peers: Peers) -> Tensor:
    shards: list[Tensor] = []
    replicas: list[Tensor] = []
    spread: list[Tensor] = []
    for parameter in given:
        grad, mark = parameter.grad, _marks.get(parameter)
        assert grad is not None
        if _is_spread(parameter):
            spread.append(grad)
        elif mark is None or mark.share is GradientShare.REPLICA:
            replicas.append(grad)
        elif mark.share is GradientShare.SHARD:
            shards.append(grad)
    own = torch.stack([_norm(shards, norm_type), _norm(replicas, norm_type)])
    every = peers.gather_numbers(own)
    # The replicas as the first rank has them: a last bit that differs would not stay the last.
    norms = [every[:, 0], every[:1, 1]]
    if spread:
        whole: Any = torch.nn.utils.get_total_norm(spread, norm_type)
        norms.append(whole.full_tensor().to(every).view(1))
    return torch.linalg.vector_norm(torch.cat(norms), norm_type)


def _norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm in float32 on the host; 0 for none."""
    return torch.nn.utils.get_total_norm(list(grads), norm_type).float().cpu()
