"""Checks of state dicts before the first write: table modules load nothing from an invalid one.

torch loads module by module, and may find an invalid entry after valid ones are written. Therefore
the module that torch reaches first checks the entries of all its descendants, through
`ChecksState.state_problems` of each, and refuses the whole load if there is a problem.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from emblib.columns import Hyper
from emblib.tables.parameters import caller_level

ASSIGN = "assign_to_params_buffers"
"""The key of the local metadata of a module that `load_state_dict(assign=True)` sets."""

_REFUSED = "(refused)"  # entry that marks a module, by its prefix, whose load was refused


@runtime_checkable
class ChecksState(Protocol):
    """A module that checks its entries of a state dict, without the entries of its children."""

    def state_problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterable[str]:
        """Yield one message per invalid entry, with its key; missing entries are valid."""


def refuse_invalid(
    module: nn.Module,
    state_dict: MutableMapping[str, Any],
    prefix: str,
    errors: list[str],
    known_problems: Iterable[str] = (),
) -> bool:
    """Return whether a module must load nothing; to be called first in `_load_from_state_dict`.

    If an entry of the module or of a descendant is invalid, messages are appended to `errors`.
    Torch loads the descendants next, from the same `state_dict`, so their entries are removed from
    it, with those of the module. A descendant that checks its entries gets a mark instead, for
    which this function returns True; one that loads as torch does gets its present values, so that
    loading changes nothing.

    Non-empty `known_problems` are reported instead, and the entries are not checked.
    """
    if state_dict.pop(prefix + _REFUSED, None):
        return True
    known_problems = list(known_problems) or list(find_problems(module, state_dict, prefix))
    if not known_problems:
        return False
    errors.extend(known_problems)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        del state_dict[key]
    for module_prefix, submodule in _modules_by_prefix(module, prefix):
        if isinstance(submodule, ChecksState):
            if submodule is not module:
                state_dict[module_prefix + _REFUSED] = True
        elif _loads_as_torch_does(submodule):
            state_dict.update(loadable_tensors(submodule, module_prefix))
    return True


def entry_problems(state_dict: Mapping[str, Any], targets: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield one message per entry that cannot be copied to the target of its key.

    The numbers of an optimizer, an entry named `hyper`, must also be in range.
    """
    for key, target in targets.items():
        if key in state_dict:
            is_hyper = key.rpartition(".")[2] == "hyper"
            problem = (hyper_problem if is_hyper else copy_problem)(state_dict[key], target)
            if problem:
                yield f"{key}: {problem}"


def tensor_problem(value: Any, target: Tensor, shape: tuple[int | None, ...] | None = None) -> str:
    """Return why a value cannot be copied to a tensor of the dtype of `target`; "" if it can.

    Values for an integer tensor must be integers that it can have; values for floats are rounded,
    as torch does. `shape` is the required shape, in which None is any size; a `shape` of None
    allows any.
    """
    if not isinstance(value, Tensor):
        return f"must be a tensor, got {type(value).__name__}"
    if value.is_nested or value.is_quantized:
        return "must be a dense tensor with values, got a nested or a quantised one"
    if value.layout is not torch.strided or (value.is_meta and not target.is_meta):
        return f"must be a dense tensor with values, got {value.layout} on {value.device}"
    if shape is not None and (
        value.dim() != len(shape)
        or any(
            expected_size not in (None, size)
            for expected_size, size in zip(shape, value.shape, strict=True)
        )
    ):
        return (
            f"size mismatch: it has shape {tuple(value.shape)}, this module's is "
            f"{tuple('any' if size is None else size for size in shape)}; the checkpoint is of "
            "another table or optimizer, or damaged; without this key and with strict=False the "
            "rest can be loaded"
        )
    if value.is_complex() > target.is_complex():
        return f"must be real, got {value.dtype}"
    if (
        target.is_floating_point()
        or target.is_complex()
        or value.dtype == target.dtype
        or value.is_meta
    ):
        return ""
    is_integer = not value.is_floating_point() and value.dtype is not torch.bool
    if not is_integer or not torch.equal(value.to(target.dtype).to(value.dtype), value):
        return f"must be integers in the range of {target.dtype}, got {value.dtype}"
    return ""


def copy_problem(value: Any, target: Tensor) -> str:
    """Return why a value cannot be copied to `target`; "" if it can."""
    return tensor_problem(value, target, tuple(target.shape))


def hyper_problem(value: Any, target: Tensor) -> str:
    """Return why a value cannot replace the hyperparameters `target`; "" if it can.

    Both are `[n]` with the entries of `Hyper`; a number that `target` has is valid.
    """
    problem = copy_problem(value, target)
    if problem or value.is_meta or target.is_meta:
        return problem
    numbers, target_numbers = value.double().tolist(), target.tolist()
    integer_entries = (Hyper.STEP, Hyper.SEED)
    for i, (number, target_number) in enumerate(zip(numbers, target_numbers, strict=True)):
        minimum = -1.0 if i == Hyper.SEED else 0.0
        is_in_range = abs(number) < float("inf") and (number >= minimum or target_number < minimum)
        if number != target_number and not (
            is_in_range and (i not in integer_entries or number == int(number))
        ):
            name = Hyper(i).name.lower() if i < Hyper.OPTIMIZER_ARGS else f"number {i}"
            requirement = "an integer" if i in integer_entries else "finite and"
            return f"{name} must be {requirement} >= {minimum:g}, got {number}"
    return ""


def count_problems(state_dict: Mapping[str, Any], targets: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield one message per invalid entry of counts, which must be finite and not negative."""
    entry_messages = dict.fromkeys(entry_problems(state_dict, targets))
    yield from entry_messages
    for key in targets:
        if key in state_dict and not any(
            problem.startswith(f"{key}: ") for problem in entry_messages
        ):
            value = state_dict[key]
            if not value.is_meta and not bool((value >= 0).all()):
                yield f"{key}: counts must be >= 0, got {value}"
            elif value.is_floating_point() and not bool(value.isfinite().all()):
                yield f"{key}: sums must be finite, got {value}"


def number_problems(state_dict: Mapping[str, Any], key: str, below: int) -> Iterator[str]:
    """Yield a message if there is an entry `key` that is not one integer in `[0, below)`."""
    if key in state_dict:
        value = state_dict[key]
        problem = tensor_problem(value, torch.empty(0, dtype=torch.int64, device="cpu"))
        if not problem and (value.numel() != 1 or not 0 <= int(value) < below):
            problem = f"must be one number in [0, {below}), got {value}"
        if problem:
            yield f"{key}: {problem}"


def key_problem(keys: Any, num_rows: int, size: int | None = None) -> str:
    """Return why `keys` are not distinct ids below `num_rows` (or -1 for none); "" if they are.

    They must be integers `[size]`, of any length if `size` is None.
    """
    problem = tensor_problem(keys, torch.empty(0, dtype=torch.int64, device="cpu"), (size,))
    if problem:
        return problem
    valid_keys = keys[keys >= 0]
    if bool((keys < -1).any()) or bool((valid_keys >= num_rows).any()):
        return f"must be ids of a table of {num_rows} rows, or -1, got {keys}"
    if valid_keys.unique().numel() < valid_keys.numel():
        return f"each id must occur once, got {valid_keys}"
    return ""


def find_problems(module: nn.Module, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield one message per invalid entry of a module and its descendants."""
    for module_prefix, submodule in _modules_by_prefix(module, prefix):
        if isinstance(submodule, ChecksState):
            yield from submodule.state_problems(state_dict, module_prefix)
        elif _loads_as_torch_does(submodule):
            yield from entry_problems(state_dict, loadable_tensors(submodule, module_prefix))


def _modules_by_prefix(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, submodule in module.named_modules():
        yield (f"{prefix}{name}." if name else prefix), submodule


def _loads_as_torch_does(module: nn.Module) -> bool:
    return type(module)._load_from_state_dict is nn.Module._load_from_state_dict


def loadable_tensors(module: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Return the parameters and buffers that torch loads into a module, without its children.

    They are detached, by `prefix` and name.
    """
    buffers = {
        name: buffer
        for name, buffer in module._buffers.items()
        if name not in module._non_persistent_buffers_set
    }
    return {
        prefix + name: tensor.detach()
        for name, tensor in {**module._parameters, **buffers}.items()
        if tensor is not None
    }


def entries_under(prefix: str, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a state dict whose keys begin with `prefix`, without it."""
    return {k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)}


def check_keys(expected: Iterable[str], state_dict: Mapping[str, Any]) -> None:
    """Raise RuntimeError where keys are missing or unexpected, before anything is written."""
    expected_keys = set(expected)
    missing_keys = sorted(expected_keys - state_dict.keys())
    unexpected_keys = sorted(state_dict.keys() - expected_keys)
    if missing_keys or unexpected_keys:
        raise RuntimeError(
            f"the state dict must have the keys of this module: missing are {missing_keys}, "
            f"unexpected {unexpected_keys}; strict=False loads what there is"
        )


def select_entries(
    targets: Mapping[str, Tensor],
    state_dict: Mapping[str, Any],
    prefix: str,
    missing_keys: list[str],
    unexpected_keys: list[str],
) -> dict[str, Tensor]:
    """Return the entries of a state dict that `targets` names, without `prefix`.

    Missing keys and unexpected keys are appended to the lists, as `_load_from_state_dict` does; the
    module has no children, whose keys would be unexpected.
    """
    names = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
    entries = {key: state_dict[prefix + key] for key in names if key in targets}
    missing_keys.extend(prefix + key for key in targets if key not in entries)
    unexpected_keys.extend(prefix + key for key in sorted(names) if key not in targets)
    return entries


def warn_of_meta(prefix: str, values: Mapping[str, Tensor]) -> None:
    """Warn, as torch does, that values are copied to a module on meta, which has no memory.

    `prefix` names the module. Values that are on meta themselves are not a reason to warn.
    """
    if not all(value.is_meta for value in values.values()):
        warnings.warn(
            f"for {prefix or 'tables'}: copying to a module on meta, which is a no-op: pass "
            "assign=True to load_state_dict, or call to_empty(device=...) of the module first",
            stacklevel=caller_level(),
        )


def without_shared_memory(
    tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the tensors; those that begin at the address of the target of their key are copied."""
    return {
        key: tensor.clone() if tensor.data_ptr() == targets[key].data_ptr() else tensor
        for key, tensor in tensors.items()
    }
