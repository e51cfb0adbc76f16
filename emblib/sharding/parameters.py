"""The parameters of the table shards on a rank, and the norm of their gradients."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor, nn
from torch._guards import TracingContext

from emblib.collections.optimizers import gradient_norms
from emblib.collections.optimizers.gradient_norms import GradientShare
from emblib.sharding.all_to_all import start_all_gather
from emblib.sharding.ranks import RankGroup
from emblib.storage import TableHandle
from emblib.tables.graph_break import is_in_export
from emblib.tables.parameters import RegisteredParameter, check_registered, refuse_replacement


@dataclass(frozen=True)
class ShardHandle:
    """The handle of a table shard, and how this rank counts its gradients in a norm over ranks.

    `first_share` is the share of the first parameter, `other_share` that of every other one. Only a
    tensor train has others: each of its shards has its own slice of core 0 and a copy of every
    other core, which only the lowest rank with a shard counts. So `handle.named_parameters()` must
    list core 0 first.
    """

    table: str
    handle: TableHandle
    first_share: GradientShare
    other_share: GradientShare


class ShardParameters(nn.Module):
    """The parameters of the shards on this rank: `<table>.weight`, `<table>.cores.0` and so on.

    The second shard of a table on this rank is listed as `<table>#1`, and so on. The table modules
    own the memory and move it between devices. The collection writes the state dicts, so this
    module has none.

    Args:
        handles: the shards of this rank, replicas included.
        ranks: the processes that share the collection.
    """

    def __init__(self, handles: Sequence[ShardHandle], ranks: RankGroup) -> None:
        super().__init__()
        self._handles, self._ranks = tuple(handles), ranks
        self.register_parameters()

    def register_parameters(self) -> None:
        """Register the current parameters of the handles, and mark this rank's gradients.

        Call this after a table module moved or reallocated its parameters.
        """
        num_shards: dict[str, int] = {}
        self._parameters.clear()
        for shard in self._handles:
            number = num_shards.get(shard.table, 0)
            num_shards[shard.table] = number + 1
            name = shard.table if not number else f"{shard.table}#{number}"
            for i, (key, parameter) in enumerate(shard.handle.named_parameters()):
                # Under dotted names, which register_parameter would refuse.
                self._parameters[f"{name}.{key}"] = parameter
                share = shard.other_share if i else shard.first_share
                _mark_gradient(parameter, share, self._ranks)
        self._registered = dict(self._parameters)

    def check_not_replaced(self) -> None:
        """Raise RuntimeError if a parameter was replaced: lookups would not read the new one.

        The message tells the user to write into the parameter instead.
        """
        check_registered(RegisteredParameter(self, *entry) for entry in self._registered.items())

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Iterate over this module; raises RuntimeError in `torch.export`, which calls this."""
        if is_in_export():
            raise_not_exportable()
        return super().named_modules(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_parameters", {}) and isinstance(value, nn.Parameter):
            refuse_replacement(name)
        super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if any(key.startswith(f"{name}.") for key in self.__dict__.get("_parameters", ())):
            if is_exporting():
                raise_not_exportable()
            raise AttributeError(
                f"the shards of table {name!r} are not a module: their parameters are in "
                "named_parameters() of this one, with dotted names; save and load a sharded model "
                "with emblib.sharding.checkpoints, which writes torch.distributed.checkpoint files"
            )
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return self  # the table modules move it, then the collection calls register_parameters()

    def _save_to_state_dict(self, *arguments: Any) -> None:
        return None

    def _load_from_state_dict(self, *arguments: Any) -> None:
        return None


def is_exporting() -> bool:
    """Return whether `torch.export` runs, also before it traces; true in `torch.compile` too."""
    return is_in_export() or TracingContext.try_get() is not None


def raise_not_exportable() -> NoReturn:
    """Raise RuntimeError for a sharded collection that `torch.export` gets."""
    raise RuntimeError(
        "torch.export takes no sharded collection: write emblib.sharding.checkpoints.export(...) "
        "on all ranks, load it into the unsharded model, and give that to torch.export; "
        "collections of hash tables are converted on all ranks by emblib.inference.for_inference"
    )


def mark_as_replicas(module: nn.Module, ranks: RankGroup) -> None:
    """Mark every unmarked parameter as a replica: its gradient is equal on all ranks.

    A rank without table shards needs these marks too. Without any, `clip_grad_norm_` of its
    parameters would compute a norm of this rank only, and the other ranks would wait for it. For
    one rank do nothing.
    """
    for parameter in module.parameters():
        if not gradient_norms.is_marked(parameter):
            _mark_gradient(parameter, GradientShare.REPLICA, ranks)


def _mark_gradient(parameter: Tensor, share: GradientShare, ranks: RankGroup) -> None:
    """Mark this rank's share of a gradient for `clip_grad_norm_`; for one rank do nothing."""
    gradient_ranks = gradient_ranks_of(ranks)
    if gradient_ranks is not None:
        gradient_norms.mark_gradient(parameter, share, gradient_ranks)


def gradient_ranks_of(ranks: RankGroup) -> gradient_norms.GradientRanks | None:
    """Return the argument `ranks` of `gradient_norms.clip_grad_norm_`; None for one rank."""
    has_replicas = ranks.replicas is not None and ranks.replicas.size > 1
    return _GroupRanks(ranks) if ranks.size > 1 or has_replicas else None


class _GroupRanks:
    """The ranks of a group as `gradient_norms.GradientRanks`, over which it gathers norms.

    Replicas of tables have other gradients in each group. All groups take the largest numbers of
    all, so that they scale the dense part, which they have in common, by one factor.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks

    def all_gather_floats(self, numbers: Tensor) -> Tensor:
        """Gather float32 numbers `[n]` of every rank; return `[W, n]` on the device of the ranks.

        All ranks call this, with equal n.
        """
        gathered = _all_gather(numbers.to(self._ranks.device), self._ranks)
        if self._ranks.replicas is not None:
            gathered = _all_gather(gathered, self._ranks.replicas).amax(0).view_as(gathered)
        return gathered

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _GroupRanks) and other._ranks.group is self._ranks.group

    def __hash__(self) -> int:
        return hash(self._ranks.group)


def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients in place so that their norm over all ranks is at most `max_norm`.

    `torch.nn.utils.clip_grad_norm_` sees only the table shards of its own rank. In a model whose
    sharded tables have dense gradients, it would scale every rank's replica of the dense part by a
    different factor. Here every shard counts on the rank that stores it and all other parameters
    count once, so the result is the same as for the whole model in one process. The replicas of
    `ReplicatedModelParallel` have other gradients of a shard: the largest norm counts, so that all
    ranks scale alike. All ranks call this together, after the gradients of the dense part are
    averaged, and wait for each other and for their GPUs. Sparse gradients, which torch refuses, are
    clipped too. Tables that backward updates have no gradients to clip, and raise: make their
    optimizer `deferred`, or set its `max_gradient`. To clip the dense part alone, pass its
    parameters.

    Args:
        parameters: a model that `DistributedModelParallel` or `shard` returned, or parameters of
            one. Pass the model if the dense part was wrapped by hand after `shard`.
        max_norm: the largest norm after clipping, >= 0; `inf` only computes the norm.
        norm_type: the order of the norm, above 0; `inf` for the largest magnitude.
        error_if_nonfinite: whether to raise, on every rank, if the norm is infinite or NaN; the
            host then waits for it.

    Returns:
        The norm before clipping, a scalar tensor with the same value on all ranks: over several
        ranks float32 on the device of the ranks, else in the dtype and on the device of the
        gradients.

    Raises:
        ValueError: `max_norm` is negative or NaN, or `norm_type` is not above 0; one of them
            differs between ranks (on all ranks); backward updates some of the tables (on all ranks
            if one has such tables); or the parameters belong to several groups of ranks.
        RuntimeError: the norm is not finite, and `error_if_nonfinite` is set; or an argument is
            wrong on another rank.
        TypeError: `error_if_nonfinite` is not a bool.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> model.weight.grad = torch.tensor([[3.0, 4.0]])
        >>> float(emblib.sharding.clip_grad_norm_(model, max_norm=1.0))
        5.0
        >>> model.weight.grad
        tensor([[0.6000, 0.8000]])
    """
    ranks = None
    if isinstance(parameters, nn.Module):
        ranks = _ranks_of_model(parameters)
        parameters = parameters.parameters()
    return gradient_norms.clip_grad_norm_(
        parameters, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, ranks=ranks
    )


def _all_gather(numbers: Tensor, ranks: RankGroup) -> Tensor:
    """Return the numbers `[n]` in all of every rank, `[W, n]`."""
    sizes = [numbers.numel()] * ranks.size
    return start_all_gather(numbers.flatten(), sizes, ranks).wait().view(ranks.size, -1)


def _ranks_of_model(model: nn.Module) -> gradient_norms.GradientRanks | None:
    """Return the ranks of the sharded modules of a model; None without any."""
    # A rank may have no parameter at all, but takes part in the collective.
    for module in model.modules():
        ranks = getattr(module, "ranks", None)
        if isinstance(ranks, RankGroup) and (group_ranks := gradient_ranks_of(ranks)):
            return group_ranks
    return None
