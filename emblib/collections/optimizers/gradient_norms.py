"""Norms of gradients over all ranks, and clipping by them.

`clip_grad_norm_` computes one norm over all ranks: `mark_gradient` records whether the gradient of
a parameter is a shard or a replica.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import filterfalse
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from emblib.grad_mode import without_gradients
from emblib.optim.base import number_or_nan
from emblib.specs import OptionEnum, check_bool
from emblib.tables.parameters import is_updated_in_backward


class GradientShare(OptionEnum):
    """Share of a rank's gradient of a parameter in the norm over all ranks.

    SHARD: only this rank has the gradient. REPLICA: all ranks have the same gradient.
    COUNTED_ELSEWHERE: another rank has the gradient too, and only that rank counts it.
    """

    SHARD = "shard"
    REPLICA = "replica"
    COUNTED_ELSEWHERE = "counted_elsewhere"


class GradientRanks(Protocol):
    """The ranks over which gradients are sharded; objects for the same ranks compare equal."""

    def all_gather_floats(self, numbers: Tensor) -> Tensor:
        """Gather float32 numbers `[n]` of every rank; return `[W, n]`, on any device.

        If there are several replicas of the tables, numbers are the largest over the replicas. All
        ranks call this, with equal n.
        """
        ...


@dataclass(frozen=True)
class _Mark:
    """The arguments of `mark_gradient`."""

    share: GradientShare
    ranks: GradientRanks


_NORM_EPS = 1e-6  # that of `torch.nn.utils.clip_grads_with_norm_`
_NUM_GATHERED = 7  # numbers of each rank that `_norm_over_ranks` gathers: norms and arguments

# Not attributes of the parameters: those would be pickled with them.
_gradient_marks = WeakTensorKeyDictionary()


def mark_gradient(parameter: Tensor, share: GradientShare, ranks: GradientRanks) -> None:
    """Record this rank's share of a parameter's gradient, for `clip_grad_norm_`.

    It replaces an earlier mark, and ends with the parameter object; copies have none.
    """
    _gradient_marks[parameter] = _Mark(share, ranks)


def is_marked(parameter: Tensor) -> bool:
    """Return whether `mark_gradient` was called for this parameter."""
    return parameter in _gradient_marks


@without_gradients
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
    ranks: GradientRanks | None = None,
) -> Tensor:
    """Clip gradients by their norm over all ranks; return the norm before, a scalar tensor.

    Sparse gradients are coalesced first, and only their rows are read and scaled. Over several
    ranks all of them call this, and the host waits for them and for a GPU.

    Args:
        parameters: parameters whose gradients are clipped in place; some may have none.
        max_norm: bound of the norm, >= 0; `inf` only computes the norm.
        norm_type: exponent of the norm, above 0; `inf` for the maximum.
        error_if_nonfinite: whether a norm that is not finite raises; the host then waits for it.
        ranks: the ranks over which gradients are sharded; None takes those that `mark_gradient`
            recorded for the parameters.

    Raises:
        ValueError: `max_norm` is negative or NaN, or `norm_type` is not above 0; one of them
            differs between ranks; parameters are of tables that backward updates, on any rank; or
            the parameters are over several groups of ranks.
        RuntimeError: the norm is not finite, and `error_if_nonfinite` is set; or an argument is
            wrong on another rank.
        TypeError: `error_if_nonfinite` is not a bool.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    ranks = ranks_of_parameters(parameters) if ranks is None else ranks
    try:
        _check_arguments(max_norm, norm_type, error_if_nonfinite)
    except (TypeError, ValueError):
        if ranks is not None:  # the other ranks wait for the numbers of this one
            ranks.all_gather_floats(torch.full((_NUM_GATHERED,), math.nan, device="cpu"))
        raise
    norm_type = float(norm_type)
    num_updated = _num_updated_in_backward(parameters)
    if ranks is None:
        _refuse_updated_in_backward(num_updated)
    # Empty gradients need no scaling, and torch's infinity norm raises for them.
    parameters = [
        parameter for parameter in parameters if parameter.grad is None or parameter.grad.numel()
    ]
    is_clipped = max_norm < math.inf  # inf / inf would be NaN
    if is_clipped and ranks is None and not any(map(_is_sparse, parameters)):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    parameters_with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    if ranks is None:
        total_norm = _total_norm(list(map(_values_of, parameters_with_grad)), norm_type)
    else:
        total_norm = _norm_over_ranks(parameters_with_grad, max_norm, norm_type, ranks, num_updated)
    if error_if_nonfinite and not total_norm.isfinite():
        raise RuntimeError(
            f"all gradients together have a norm of {float(total_norm)}, which cannot be clipped; "
            "error_if_nonfinite=False does not raise"
        )
    if not is_clipped:
        return total_norm
    # DTensors separately: torch cannot scale a list with both kinds.
    dense_parameters = list(filterfalse(_is_sparse, parameters_with_grad))
    for select in (filter, filterfalse):
        same_kind = list(select(_is_dtensor, dense_parameters))
        torch.nn.utils.clip_grads_with_norm_(same_kind, max_norm, total_norm)
    factor = (max_norm / (total_norm + _NORM_EPS)).clamp(max=1.0)
    for parameter in parameters_with_grad:
        if _is_sparse(parameter):
            values = _values_of(parameter)
            values.mul_(factor.to(values.device))
    return total_norm


def _check_arguments(max_norm: Any, norm_type: Any, error_if_nonfinite: Any) -> None:
    """Raise ValueError or TypeError for arguments that `clip_grad_norm_` does not take."""
    check_bool("error_if_nonfinite", error_if_nonfinite)
    if not number_or_nan(max_norm) >= 0:
        raise ValueError(f"max_norm must be >= 0, inf to compute the norm only; got {max_norm!r}")
    if not number_or_nan(norm_type) > 0:
        raise ValueError(f"norm_type must be above 0, inf for the maximum; got {norm_type!r}")


@without_gradients
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
    """Clamp every gradient to `[-clip_value, clip_value]`, also sparse ones.

    `parameters` are several parameters, or one.

    Raises:
        ValueError: parameters are of tables that backward updates; nothing is clipped.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    _refuse_updated_in_backward(_num_updated_in_backward(parameters))
    parameters_with_grad = [parameter for parameter in parameters if parameter.grad is not None]
    if dense_parameters := list(filterfalse(_is_sparse, parameters_with_grad)):
        torch.nn.utils.clip_grad_value_(dense_parameters, clip_value)
    for parameter in parameters_with_grad:
        if _is_sparse(parameter):
            _values_of(parameter).clamp_(-clip_value, clip_value)


def _num_updated_in_backward(parameters: Sequence[Tensor]) -> int:
    """Count the trained parameters of tables that backward updates."""
    return sum(
        parameter.requires_grad and is_updated_in_backward(parameter) for parameter in parameters
    )


def _refuse_updated_in_backward(count: int) -> None:
    """Raise ValueError if `count` parameters have no gradient to clip, because backward uses it."""
    if count:
        raise ValueError(
            f"{count} of the parameters are of tables that backward updates, which leaves no "
            "gradient to clip: make their optimizer deferred, e.g. optim.Adam(0.01, "
            "deferred=True), or set its max_gradient; to clip other parameters alone, pass those, "
            "e.g. model.dense.parameters()"
        )


def _is_sparse(parameter: Tensor) -> bool:
    """Return whether a parameter has a sparse gradient."""
    return parameter.grad is not None and parameter.grad.is_sparse


def _values_of(parameter: Tensor) -> Tensor:
    """Return the values of a gradient, of any shape; a sparse one is coalesced first."""
    grad = parameter.grad
    assert grad is not None
    if not grad.is_sparse:
        return grad
    if not grad.is_coalesced():
        parameter.grad = grad = grad.coalesce()
    return grad._values()


def ranks_of_parameters(parameters: Sequence[Tensor]) -> GradientRanks | None:
    """Return the ranks of parameters with a mark, shards or replicas; None if none has a mark.

    Raises:
        ValueError: the parameters are over several groups of ranks.
    """
    ranks: list[GradientRanks] = []
    for parameter in parameters:
        mark = _gradient_marks.get(parameter)
        if mark is not None and mark.ranks not in ranks:
            ranks.append(mark.ranks)
    if len(ranks) > 1:
        raise ValueError(
            "the parameters are of tables over several groups of ranks, which have no one norm: "
            "clip those of each group by themselves"
        )
    return ranks[0] if ranks else None


def _is_dtensor(parameter: Tensor) -> bool:
    """Return whether a parameter is a `DTensor` (FSDP2), whose norm includes other ranks."""
    return hasattr(parameter, "full_tensor")


def _norm_over_ranks(
    parameters: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    ranks: GradientRanks,
    num_updated: int,
) -> Tensor:
    """Return the norm of the gradients of all ranks, a scalar tensor; all ranks call this.

    All of them raise ValueError if `num_updated`, the number of this rank's parameters that
    backward updates, is positive on any, or if ranks differ in `max_norm` or `norm_type`; and
    RuntimeError if the arguments of another rank are wrong, which then sends NaN only.
    """
    shard_grads: list[Tensor] = []
    replica_grads: list[Tensor] = []
    dtensor_grads: list[Tensor] = []
    for parameter in parameters:
        grad, mark = parameter.grad, _gradient_marks.get(parameter)
        assert grad is not None
        if _is_dtensor(parameter) and norm_type == math.inf:
            any_grad: Any = grad
            shard_grads.append(any_grad.to_local())  # may be empty, which torch's maximum refuses
        elif _is_dtensor(parameter):
            dtensor_grads.append(grad)
        elif mark is None or mark.share is GradientShare.REPLICA:
            replica_grads.append(_values_of(parameter))
        elif mark.share is GradientShare.SHARD:
            shard_grads.append(_values_of(parameter))
    local_norms = [_host_norm(shard_grads, norm_type), _host_norm(replica_grads, norm_type)]
    # The negatives too, since only the largest numbers of all replicas are gathered.
    arguments = torch.tensor(
        [float(num_updated), float(max_norm), norm_type, -float(max_norm), -norm_type], device="cpu"
    )
    norms_of_ranks = ranks.all_gather_floats(torch.cat([torch.stack(local_norms), arguments]))
    max_updated, *largest, negative_norm, negative_type = norms_of_ranks[:, 2:].amax(0).tolist()
    if math.isnan(max_updated):
        raise RuntimeError(
            "clip_grad_norm_ was called with a wrong argument on another rank, see its error: no "
            "gradient was clipped"
        )
    _refuse_updated_in_backward(int(max_updated))
    smallest = (-negative_norm, -negative_type)
    for name, low, high in zip(("max_norm", "norm_type"), smallest, largest, strict=True):
        if low != high:
            raise ValueError(
                f"{name} must be the same on all ranks, got {low} to {high}: the copies of the "
                "dense part would diverge"
            )
    # Rank 0's norm of the replicas on all ranks: replicas diverge if factors differ in one bit.
    norms = [norms_of_ranks[:, 0], norms_of_ranks[:1, 1]]
    if dtensor_grads:
        dtensor_norm: Any = torch.nn.utils.get_total_norm(dtensor_grads, norm_type)
        norms.append(dtensor_norm.full_tensor().to(norms_of_ranks).view(1))
    return torch.linalg.vector_norm(torch.cat(norms), norm_type)


def _host_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm in float32 on the host; 0 without gradients."""
    return _total_norm(grads, norm_type).float().cpu()


def _total_norm(grads: Sequence[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all values, a scalar tensor; 0 without values."""
    return torch.nn.utils.get_total_norm([grad for grad in grads if grad.numel()], norm_type)
