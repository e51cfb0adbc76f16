"""The parameters of the parts of tables that a rank holds, and the norm of their gradients."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from emblib.collections.optimizers import keyed
from emblib.collections.optimizers.keyed import GradientShare
from emblib.sharding.exchange import start_all_gather
from emblib.sharding.ranks import RankGroup
from emblib.storage import TableHandle
from emblib.tables.parameters import check_registered, refuse_replacement, registered


@dataclass(frozen=True)
class ShardHandle:
    """The handle of a part of a table, and what this rank has of the gradients of its parameters.

    `first` is the gradient of its first parameter: slices of a tensor train have their first core
    for themselves, and the others in common. `others` is that of the others.
    """

    table: str
    handle: TableHandle
    first: GradientShare
    others: GradientShare


class ShardParameters(nn.Module):
    """`<table>.weight`, `<table>.cores.0` and so on, of what is here.

    A rank that has several parts of a table lists the second as `<table>#1`, and so on. The memory
    is that of the kernels, which move it; state dicts are made by the collection, with whole tables
    in them.
    """

    def __init__(self, handles: Sequence[ShardHandle], ranks: RankGroup) -> None:
        super().__init__()
        self._handles, self._ranks = tuple(handles), ranks
        self.bind()

    def bind(self) -> None:
        """Have the parameters that the handles have now."""
        seen: dict[str, int] = {}
        self._parameters.clear()
        for held in self._handles:
            number = seen.get(held.table, 0)
            seen[held.table] = number + 1
            name = held.table if not number else f"{held.table}#{number}"
            for i, (key, parameter) in enumerate(held.handle.named_parameters()):
                # Under dotted names, which register_parameter would refuse.
                self._parameters[f"{name}.{key}"] = parameter
                _mark(parameter, held.others if i else held.first, self._ranks)
        self._views = registered([self])

    def check(self) -> None:
        """Raise RuntimeError where a parameter was replaced: lookups would ignore the other."""
        check_registered(self._views)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_parameters", {}):
            refuse_replacement(name, value)
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return self  # the kernels move what they have

    def _save_to_state_dict(self, *arguments: Any) -> None:
        return None

    def _load_from_state_dict(self, *arguments: Any) -> None:
        return None


def mark_dense(module: nn.Module, ranks: RankGroup) -> None:
    """Note that all ranks have the same gradients of what is not in sharded collections.

    A rank without a part of a table knows by these that its model is over ranks.
    """
    for parameter in module.parameters():
        if not keyed.is_marked(parameter):
            _mark(parameter, GradientShare.REPLICA, ranks)


def _mark(parameter: Tensor, share: GradientShare, ranks: RankGroup) -> None:
    if ranks.size > 1:
        keyed.mark_gradient(parameter, share, _RankPeers(ranks))


class _RankPeers:
    """The ranks that have the other parts, as `clipping.clip_grad_norm_` asks them."""

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def gather_numbers(self, numbers: Tensor) -> Tensor:
        """Return the numbers of all ranks, `[W, n]`."""
        ranks = self._ranks
        sizes = [numbers.numel()] * ranks.size
        every = start_all_gather(numbers.to(ranks.device), sizes, ranks).wait()
        return every.view(ranks.size, -1)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _RankPeers) and other._ranks.group is self._ranks.group

    def __hash__(self) -> int:
        return hash(self._ranks.group)


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most `max_norm`; return the norm.

    Like `torch.nn.utils.clip_grad_norm_`, which knows the parts of tables on its own rank only: of
    a model whose tables are in parts and have dense gradients, it would scale every rank's copy of
    the dense part by another factor. Here parts count on the rank that has them and everything else
    once, so that the result is that of the whole model in one process. All ranks call this, once
    the gradients of the dense part are averaged. Tables with a fused optimizer have no gradients
    here: their `max_gradient` clips.

    Args:
        parameters: a model, or parameters of one that `DistributedModelParallel` or `shard` made.
            Give the model where the dense part was wrapped by hand after `shard`.
        max_norm: the bound.
        norm_type: of the norm; `inf` for the largest value.
        error_if_nonfinite: raise, on every rank, where the norm is infinite or NaN.
    """
    peers = None
    if isinstance(parameters, nn.Module):
        peers = _peers_in(parameters)
        parameters = parameters.parameters()
    return keyed.clip_grad_norm_(
        parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, peers=peers
    )


def _peers_in(model: nn.Module) -> _RankPeers | None:
    # A rank may have no parameter at all, and the others wait for it.
    for module in model.modules():
        ranks = getattr(module, "ranks", None)
        if isinstance(ranks, RankGroup) and ranks.size > 1:
            return _RankPeers(ranks)
    return None
