"""The dense part of a model: equal initial values on every rank, and averaged gradients.

PyTorch's `DistributedDataParallel` or `fully_shard` averages the gradients. This module passes it
the parameters to ignore: those of sharded collections, which exchange their gradients themselves.
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
from emblib.sharding.shard import collections_of


def _check_options(options: object) -> None:
    """Raise TypeError unless the arguments that a wrapping passes on are a dict or the like."""
    if not isinstance(options, Mapping):
        raise TypeError(f'options must be a dict, e.g. {{"static_graph": True}}, got {options!r}')


@dataclass(frozen=True)
class DDP:
    """Replicate the dense part on every rank with `DistributedDataParallel`.

    Args:
        options: further arguments of DDP, e.g. `{"static_graph": True}`.
        gradient_dtype: dtype in which gradients are sent and added up, float16 or bfloat16; None
            for the dtype of each parameter.

    Raises:
        TypeError: `options` is not a mapping.
        ValueError: `gradient_dtype` is another value.

    Example:
        >>> emblib.sharding.DDP(gradient_dtype=torch.bfloat16).gradient_dtype
        torch.bfloat16
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    gradient_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _check_options(self.options)
        if self.gradient_dtype not in (None, torch.float16, torch.bfloat16):
            raise ValueError(
                "gradient_dtype must be torch.float16, torch.bfloat16, or None for the dtype of "
                f"the parameters, got {self.gradient_dtype!r}"
            )

    def wrap(self, module: nn.Module, ranks: RankGroup, ignored: Collection[str]) -> nn.Module:
        """Return a module that averages all gradients but those of the parameters in `ignored`.

        All ranks call this. `ranks` must have a process group. `ignored` are names of parameters
        and buffers in `module`; at least one other parameter must require gradients.
        """
        # DDP also looks for the names of parameters of `module` itself with a dot in front.
        names = [*ignored, *(f".{name}" for name in ignored)]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        wrapped = DistributedDataParallel(module, process_group=ranks.group, **self.options)
        if self.gradient_dtype is not None:
            wrapped.register_comm_hook(ranks.group, _averaging_hook(self.gradient_dtype))
        return wrapped


def _averaging_hook(dtype: torch.dtype) -> Callable[[Any, dist.GradBucket], Any]:
    """Return a hook of `DistributedDataParallel` that averages gradients in `dtype`.

    It also works on the CPU, which torch's own hook for bfloat16 refuses.
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

    Args:
        blocks: function that returns the submodules of the model that are gathered one at a time,
            inner submodules first. None gathers the dense part as a whole.
        options: further arguments of `fully_shard`.

    Raises:
        TypeError: `blocks` is neither None nor a function, or `options` is not a mapping.

    Example:
        >>> emblib.sharding.FullyShard(options={"reshard_after_forward": False}).options
        {'reshard_after_forward': False}
    """

    blocks: Callable[[nn.Module], Iterable[nn.Module]] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_options(self.options)
        if self.blocks is not None and not callable(self.blocks):
            raise TypeError(
                "blocks must be a function of the model, e.g. lambda model: model.layers, "
                f"got {self.blocks!r}"
            )

    def wrap(self, module: nn.Module, ranks: RankGroup, ignored: Collection[str]) -> nn.Module:
        """Shard all parameters but those in `ignored` in place, and return the module itself.

        All ranks call this. `ranks` must have a process group; `ignored` are names in `module`.
        """
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        assert ranks.group is not None
        mesh = DeviceMesh.from_group(ranks.group, ranks.device.type)
        ignored_parameters = {
            parameter for name, parameter in module.named_parameters() if name in ignored
        }
        options = {"mesh": mesh, "ignored_params": ignored_parameters, **self.options}
        for block in () if self.blocks is None else self.blocks(module):
            fully_shard(block, **options)
        fully_shard(module, **options)
        return module


def average_gradients(parameters: Iterable[nn.Parameter], ranks: RankGroup) -> None:
    """Average the gradients of replicated parameters over ranks, in every backward.

    For parameters that no wrapper averages. All ranks call this with the same parameters, and each
    backward must reach all of them on every rank. Gradients that accumulate may be averaged several
    times: what they had before is equal on all ranks.
    """

    def average(parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        if gradient.is_sparse:
            gradient = parameter.grad = gradient.coalesce()
        dist.all_reduce(gradient, group=ranks.group)
        gradient /= ranks.size

    for parameter in parameters:
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(average)


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether `fully_shard` has sharded the parameters of a module."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


Wrapping = DDP | FullyShard
"""How the dense part is trained on all ranks."""

_WRAPPINGS: dict[str, Wrapping | None] = {"ddp": DDP(), "fully_shard": FullyShard(), "none": None}


def parse_wrapping(wrap: str | Wrapping | None) -> Wrapping | None:
    """Return the wrapping that `wrap` names or is; None for "none" and None.

    Raises:
        ValueError: `wrap` is another name or value.
    """
    if wrap is None or isinstance(wrap, Wrapping):
        return wrap
    if not isinstance(wrap, str) or wrap not in _WRAPPINGS:
        raise ValueError(
            f"wrap must be {', '.join(map(repr, _WRAPPINGS))}, DDP(...) or FullyShard(...), "
            f"got {wrap!r}"
        )
    return _WRAPPINGS[wrap]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside DDP and inside modules whose `wraps_module` is true."""
    inner: Any = module
    while isinstance(inner, DistributedDataParallel) or getattr(inner, "wraps_module", False):
        inner = inner.module
    assert isinstance(inner, nn.Module)
    return inner


def materialise(module: nn.Module, device: torch.device) -> None:
    """Allocate submodules that are on the meta device, and call their `reset_parameters`.

    If a submodule has any tensor on the meta device, directly or in a parameter list or dict, all
    these tensors of the submodule are allocated on `device`. Other submodules do not change.
    A collection on the meta device is allocated with all of its tables.

    Raises:
        RuntimeError: a submodule on the meta device has no `reset_parameters`. Submodules before it
            have been allocated.
    """
    collections: Any = collections_of(module).values()
    for collection in collections:
        if collection.device.type == "meta":
            collection.to_empty(device=device)
            in_grad_mode(collection.reset_parameters, enabled=False)()
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
    """Copy all parameters and buffers but those in `ignored` from rank 0 to every rank, in place.

    All ranks call this. Their modules must have the same names, shapes and dtypes, and be on the
    device of `ranks`, which is not checked. `ignored` are names in `module`.
    """
    if ranks.size == 1:
        return
    named_tensors = [*module.named_parameters(), *module.named_buffers()]
    tensors_by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for name, tensor in named_tensors:
        if name not in ignored:
            tensors_by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for tensors in tensors_by_kind.values():
        # Send many small tensors in one message.
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.broadcast(flat, src=ranks.global_rank(0), group=ranks.group)
        for tensor, values in zip(
            tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
        ):
            tensor.copy_(values.view_as(tensor))
