"""The dense part of a model on every rank: the same first values, and gradients averaged.

What averages is PyTorch's own, `DistributedDataParallel` or `fully_shard`; here is only what it has
to leave alone: the tables, whose rows are updated where they are.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from emblib.sharding.ranks import RankGroup


@dataclass(frozen=True)
class DDP:
    """`DistributedDataParallel`: every rank has all of the dense part; gradients are averaged.

    `options` are further arguments of it, e.g. `{"static_graph": True}`.
    """

    options: Mapping[str, Any] = field(default_factory=dict)

    def wrap(self, module: nn.Module, ranks: RankGroup, ignored: Collection[str]) -> nn.Module:
        """The module that averages the gradients of all but the parameters named."""
        # DDP also writes names of the module's own parameters with a dot before them.
        names = [*ignored, *(f".{name}" for name in ignored)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        return DistributedDataParallel(module, process_group=ranks.group, **self.options)


@dataclass(frozen=True)
class FullyShard:
    """`fully_shard` (FSDP2): every rank keeps a part of each dense parameter.

    `blocks` gives the parts of the model that are gathered one at a time, in the order of use; left
    out, the dense part is gathered as one. `options` are further arguments of `fully_shard`.
    """

    blocks: Callable[[nn.Module], Iterable[nn.Module]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def wrap(self, module: nn.Module, ranks: RankGroup, ignored: Collection[str]) -> nn.Module:
        """The module itself, whose parameters but those named are now kept in parts."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        assert ranks.group is not None
        mesh = DeviceMesh.from_group(ranks.group, ranks.device.type)
        left = {p for name, p in module.named_parameters() if name in ignored}
        options = {"mesh": mesh, "ignored_params": left, **self.options}
        for block in () if self.blocks is None else self.blocks(module):
            fully_shard(block, **options)
        fully_shard(module, **options)
        return module


Wrapping = DDP | FullyShard
"""How the dense part is spread."""

_BY_NAME: dict[str, Wrapping | None] = {"ddp": DDP(), "fully_shard": FullyShard(), "none": None}


def wrapping(given: str | Wrapping | None) -> Wrapping | None:
    """The wrapping that a word or an object names; None for none."""
    if given is None or isinstance(given, Wrapping):
        return given
    if given not in _BY_NAME:
        raise ValueError(
            f"wrap must be {', '.join(map(repr, _BY_NAME))}, DDP(...) or FullyShard(...), "
            f"got {given!r}"
        )
    return _BY_NAME[given]


def unwrapped(module: nn.Module) -> nn.Module:
    """The model in what averages its gradients, or itself."""
    inner: Any = module
    while isinstance(inner, DistributedDataParallel) or getattr(inner, "wraps_module", False):
        inner = inner.module
    assert isinstance(inner, nn.Module)
    return inner


def materialise(module: nn.Module, device: torch.device) -> None:
    """Give what is on `meta` memory and first values, by `reset_parameters` of each module.

    Raises:
        RuntimeError: a module on `meta` that has no `reset_parameters`.
    """
    for name, part in module.named_modules():
        owned = _with_containers(part)
        if not any(tensor.is_meta for one in owned for tensor in _tensors_of(one)):
            continue
        reset = getattr(part, "reset_parameters", None)
        if reset is None:
            raise RuntimeError(
                f"{name or 'the model'} ({type(part).__name__}) is on the meta device and has no "
                "reset_parameters() that gives it first values; make it on a real device"
            )
        for one in owned:
            one.to_empty(device=device, recurse=False)
        with torch.no_grad():
            reset()


def _with_containers(part: nn.Module) -> list[nn.Module]:
    """A module and the dicts and lists of parameters in it: it is what resets those."""
    kinds = (nn.ParameterDict, nn.ParameterList)
    return [part, *(child for child in part.children() if isinstance(child, kinds))]


def _tensors_of(part: nn.Module) -> list[Tensor]:
    return [*part.parameters(recurse=False), *part.buffers(recurse=False)]


@torch.no_grad()
def copy_from_first(module: nn.Module, ranks: RankGroup, ignored: Collection[str]) -> None:
    """Every rank takes the values of rank 0 for all parameters and buffers but those named."""
    if ranks.size == 1:
        return
    named = [*module.named_parameters(), *module.named_buffers()]
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for name, tensor in named:
        if name not in ignored:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for tensors in by_kind.values():
        # One message for many small tensors.
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, src=ranks.global_rank(0), group=ranks.group)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))
