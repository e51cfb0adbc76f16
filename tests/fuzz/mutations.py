"""Ways to break the arguments of a call: what a caller could pass by mistake."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.guarded import guarded, guarded_view

INTERESTING = (
    *(-(2**63), -(2**62), -(2**40), -(2**31) - 1, -(2**31), -7, -2, -1, 0, 1, 2, 3, 31, 32, 33),
    *(255, 1000, 65_536, 2**29, 2**31 - 1, 2**31, 2**32 + 1, 2**40, 2**62, 2**63 - 1),
)
DTYPES = (torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.float32)


def _value(draw: random.Random, dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return draw.random() < 0.5
    if dtype.is_floating_point:
        return draw.choice([0.0, -1.0, 1e30, float("inf"), float("nan"), 3.5])
    limits = torch.iinfo(dtype)
    return min(max(draw.choice(INTERESTING), limits.min), limits.max)


def wrong_contents(draw: random.Random, tensor: Tensor) -> Tensor:
    """Some elements, or all, are numbers of no meaning."""
    tensor = tensor.clone()
    if tensor.numel() and not tensor.dtype.is_complex:
        flat = tensor.view(-1)
        for _ in range(draw.choice([1, 1, 2, min(tensor.numel(), 100)])):
            flat[draw.randrange(tensor.numel())] = _value(draw, tensor.dtype)
    return tensor


def near_contents(draw: random.Random, tensor: Tensor) -> Tensor:
    """Some integers are off by a little, swapped, or in another order."""
    tensor = tensor.clone()
    if tensor.numel() < 2 or tensor.dtype.is_floating_point or tensor.dtype is torch.bool:
        return tensor
    flat = tensor.view(-1)
    first, second = draw.randrange(flat.numel()), draw.randrange(flat.numel())
    what = draw.randrange(4)
    if what == 0:
        flat[first] += draw.choice([-2, -1, 1, 2, 31]) if flat.dtype != torch.uint8 else 1
    elif what == 1:
        flat[[first, second]] = flat[[second, first]]
    elif what == 2:
        flat[:] = flat[torch.randperm(flat.numel())]
    else:
        flat[first] = flat[second]
    return tensor


def wrong_size(draw: random.Random, tensor: Tensor) -> Tensor:
    """A dimension is longer, shorter, empty, or there is another one."""
    if tensor.dim() == 0 or draw.random() < 0.3:
        return tensor.reshape(draw.choice([(-1,), (1, -1), (-1, 1)])) if tensor.numel() else tensor
    d = draw.randrange(tensor.dim())
    size = tensor.size(d)
    kept = draw.choice([0, 1, max(size - 1, 0), size // 2])
    if draw.random() < 0.6:
        return tensor.narrow(d, 0, min(kept, size)).contiguous()
    return torch.cat([tensor, tensor], d)


def wrong_dtype(draw: random.Random, tensor: Tensor) -> Tensor:
    """The same numbers in another dtype."""
    return tensor.to(draw.choice(DTYPES))


def not_contiguous(draw: random.Random, tensor: Tensor) -> Tensor:
    """The same numbers, every second of a larger tensor or one for all."""
    if tensor.dim() == 0 or tensor.numel() == 0:
        return tensor
    if draw.random() < 0.3:
        return tensor.narrow(0, 0, 1).expand(tensor.shape)
    return torch.stack([tensor, tensor], -1).select(-1, 0)


def resized_storage(draw: random.Random, tensor: Tensor) -> Tensor:
    """The memory was given back, or some of it."""
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(draw.choice([0, 1, tensor.nbytes // 2]))
    return tensor


MUTATIONS: tuple[Callable[[random.Random, Tensor], Tensor], ...] = (
    *(wrong_contents, wrong_contents, near_contents, near_contents),
    *(wrong_size, wrong_dtype, not_contiguous, resized_storage),
)


def _mutated(draw: random.Random, argument: Any) -> Any:
    """Return an argument with one thing wrong, its tensors between guard pages."""
    if isinstance(argument, Tensor):
        mutate = draw.choice(MUTATIONS)
        result = mutate(draw, argument)
        if mutate is resized_storage:  # the storage is what is wrong: a copy would be right
            return result
        return guarded_view(result) if mutate is not_contiguous else protect(draw, result)
    if isinstance(argument, list) and argument:
        changed = [protect(draw, a) for a in argument]
        if draw.random() < 0.2:
            return changed[:-1] if draw.random() < 0.5 else [*changed, changed[-1]]
        at = draw.randrange(len(changed))
        changed[at] = _mutated(draw, argument[at])
        return changed
    if argument is None or isinstance(argument, bool | float | torch.dtype):
        return argument
    return draw.choice(INTERESTING)


def protect(draw: random.Random, argument: Any) -> Any:
    """A copy of an argument, with guard pages around each tensor."""
    if isinstance(argument, Tensor):
        return guarded(argument, before=draw.random() < 0.3)
    if isinstance(argument, list):
        return [protect(draw, a) for a in argument]
    return argument


def broken(draw: random.Random, arguments: tuple[Any, ...]) -> list[Any]:
    """Return the arguments with one or two of them wrong, all between guard pages.

    An op that believes a wrong plan writes beyond the tensors that are right.
    """
    count = min(draw.choice([1, 1, 1, 2]), len(arguments))
    wrong = set(draw.sample(range(len(arguments)), count))
    changed = [(_mutated if at in wrong else protect)(draw, a) for at, a in enumerate(arguments)]
    if draw.random() < 0.1:  # aliases: one tensor for two arguments
        tensors = [k for k, a in enumerate(changed) if isinstance(a, Tensor)]
        if len(tensors) > 1:
            first, second = draw.sample(tensors, 2)
            changed[first] = changed[second]
    return changed
