"""The dense part of a model: equal initial values on every rank, and averaged gradients.

PyTorch's `DistributedDataParallel` or `fully_shard` averages the gradients. This module tells it
which parameters to ignore: the tables, which have their own exchange of gradients.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from emblib.grad_mode import in_grad_mode, without_gradients
from emblib.sharding.ranks import RankGroup


@dataclass(frozen=True)
class DDP:
    """Replicate the dense part on every rank with `DistributedDataParallel`.

    `options` are further arguments of DDP, e.g. `{"static_graph": True}`. With `gradient_dtype`,
    float16 or bfloat16, gradients are sent and added up in it; None is the dtype of each parameter.

    Raises:
        ValueError: `gradient_dtype` is another value.

    Example:
        >>> emblib.sharding.DDP(gradient_dtype=torch.bfloat16).gradient_dtype
        torch.bfloat16
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    gradient_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.gradient_dtype not in (None, torch.float16, torch.bfloat16):
            raise ValueError(
                "gradient_dtype must be torch.float16, torch.bfloat16, or None for the dtype of "
                f"the parameters, got {self.gradient_dtype!r}"
            )

    def wrap(self, module: nn.Module, ranks: RankGroup, ignored: Collection[str]) -> nn.Module:
        """Return a module that averages all gradients but those of the parameters in `ignored`.

        A collective. `ranks` must have a process group. `ignored` are names of parameters and
        buffers in `module`; at least one other parameter must require gradients.
        """
        # DDP also writes names of the module's own parameters with a dot before them.
        names = [*ignored, *(f".{name}" for name in ignored)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        wrapped = DistributedDataParallel(module, process_group=ranks.group, **self.options)
        if self.gradient_dtype is not None:
            wrapped.register_comm_hook(ranks.group, _averaging_hook(self.gradient_dtype))
        return wrapped


def _averaging_hook(dtype: torch.dtype) -> Callable[[Any, dist.GradBucket], Any]:
    """Return a hook of `DistributedDataParallel` that averages gradients in `dtype`.

    torch's own hook for bfloat16 refuses the CPU.
    """

    def reduce(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        converted = buffer.to(dtype).div_(dist.get_world_size(group))
        pending = dist.all_reduce(converted, group=group, async_op=True).get_future()

        def write_back(future: Any) -> Tensor:
            buffer.copy_(future.value()[0])
            return buffer

        return pending.then(write_back)

    return reduce


@dataclass(frozen=True)
class FullyShard:
    """Shard each dense parameter over the ranks with `fully_shard` (FSDP2).

    `blocks` gets the model and returns its submodules that are gathered one at a time, inner ones
    first; with None the dense part is gathered as a whole. `options` are further arguments of
    `fully_shard`.

    Example:
        >>> emblib.sharding.FullyShard(options={"reshard_after_forward": False}).options
        {'reshard_after_forward': False}
    """

    blocks: Callable[[nn.Module], Iterable[nn.Module]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def wrap(self, module: nn.Module, ranks: RankGroup, ignored: Collection[str]) -> nn.Module:
        """Shard all parameters but those in `ignored` in place, and return the module itself.

        A collective. `ranks` must have a process group; `ignored` are names in `module`.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        assert ranks.group is not None
        mesh = DeviceMesh.from_group(ranks.group, ranks.device.type)
        ignored_parameters = {p for name, p in module.named_parameters() if name in ignored}
        options = {"mesh": mesh, "ignored_params": ignored_parameters, **self.options}
        for block in () if self.blocks is None else self.blocks(module):
            fully_shard(block, **options)
        fully_shard(module, **options)
        return module


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` has sharded the parameters of a module."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


Wrapping = DDP | FullyShard
"""Distribution of the dense part over the ranks."""

_BY_NAME: dict[str, Wrapping | None] = {"ddp": DDP(), "fully_shard": FullyShard(), "none": None}


def parse_wrapping(wrap: str | Wrapping | None) -> Wrapping | None:
    """Return the wrapping for a name or a wrapping; None for no wrapping.

    Raises:
        ValueError: `wrap` is another name or value.
    """
    if wrap is None or isinstance(wrap, Wrapping):
        return wrap
    if not isinstance(wrap, str) or wrap not in _BY_NAME:
        raise ValueError(
            f"wrap must be {', '.join(map(repr, _BY_NAME))}, DDP(...) or FullyShard(...), "
            f"got {wrap!r}"
        )
    return _BY_NAME[wrap]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside DDP and modules with `wraps_module`, or the module itself."""
    inner: Any = module
    while isinstance(inner, DistributedDataParallel) or getattr(inner, "wraps_module", False):
        inner = inner.module
    assert isinstance(inner, nn.Module)
    return inner


def materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate modules that are on the meta device on `device`, and call their `reset_parameters`.

    If a module has a tensor on the meta device, directly or in a parameter list or dict, all such
    tensors of the module are replaced. Other modules do not change or move.

    Raises:
        RuntimeError: a module on the meta device has no `reset_parameters`. Modules before it have
            been allocated.
    """
    for name, submodule in module.named_modules():
        modules = _with_containers(submodule)
        if not any(tensor.is_meta for owner in modules for tensor in _tensors_of(owner)):
            continue
        reset = getattr(submodule, "reset_parameters", None)
        if reset is None:
            raise RuntimeError(
                f"{name or 'the model'} ({type(submodule).__name__}) is on the meta device and has "
                "no reset_parameters() to initialize it; make it on a real device"
            )
        for owner in modules:
            owner.to_empty(device=device, recurse=False)
        in_grad_mode(reset, enabled=False)()


def _with_containers(submodule: nn.Module) -> list[nn.Module]:
    """Return a module and its parameter dicts and lists, which `reset_parameters` initializes."""
    container_types = (nn.ParameterDict, nn.ParameterList)
    return [
        submodule,
        *(child for child in submodule.children() if isinstance(child, container_types)),
    ]


def _tensors_of(submodule: nn.Module) -> list[Tensor]:
    return [*submodule.parameters(recurse=False), *submodule.buffers(recurse=False)]


@without_gradients
def broadcast_state(module: nn.Module, ranks: RankGroup, ignored: Collection[str]) -> None:
    """Copy all parameters and buffers but those in `ignored` from rank 0 to every rank.

    A collective. The modules of all ranks must have the same names, shapes and dtypes, and the
    device of `ranks`; not checked.
    """
    if ranks.size == 1:
        return
    named_tensors = [*module.named_parameters(), *module.named_buffers()]
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for name, tensor in named_tensors:
        if name not in ignored:
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for tensors in by_kind.values():
        # Send many small tensors in one message.
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, src=ranks.global_rank(0), group=ranks.group)
        for tensor, values in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(values.view_as(tensor))
