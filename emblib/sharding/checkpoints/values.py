"""Check, save and read the values of a checkpoint that are not tensors.

Each value is a pickle of `torch.save`. It is read by `torch.load(weights_only=True)`, which uses
only classes and functions that torch, or the caller by `add_safe_globals`, has admitted.
"""

import io
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emblib.sharding.checkpoints.state_trees import CheckpointError, leaves, map_values

_PLAIN = {bool, float, int, str, type(None)}
# emblib does not require NumPy, so it recognizes NumPy's classes by their names.
_NUMPY_SCALARS = {"bool", "bool_", "number", "str_", "bytes_"}
_NUMPY_CODES = {  # codes of `struct`, by codes of numpy.dtype
    "b1": "?",
    "i1": "b",
    "i2": "h",
    "i4": "i",
    "i8": "q",
    "u1": "B",
    "u2": "H",
    "u4": "I",
    "u8": "Q",
    "f2": "e",
    "f4": "f",
    "f8": "d",
    "c8": "ff",
    "c16": "dd",
}


def read_value(data: io.BytesIO, name: str, path: Path) -> Any:
    """Return the non-tensor value called `name` of the checkpoint `path`.

    NumPy numbers, which earlier versions of emblib saved, become Python numbers.

    Raises:
        CheckpointError: the value is damaged, or needs a class that `torch.load` does not admit.
    """
    try:
        return torch.load(data, weights_only=True)
    except Exception as error:  # torch raises errors of many types for damaged data
        unsafe = _unsafe_globals(data)
        cause = error
        if unsafe and unsafe <= _NUMPY_NAMES.keys():
            try:
                return _load_with_numpy_scalars(data)
            except Exception as failure:
                unsafe, cause = set(), failure
        if unsafe:
            raise CheckpointError(
                f"{path}: {name} is not loaded: it names {', '.join(sorted(unsafe))}, which may "
                "run code; if you trust the checkpoint, call torch.serialization.add_safe_globals "
                "first"
            ) from error
        message = str(cause).partition("\n")[0]
        raise CheckpointError(f"{path}: {name} is damaged: {message}") from cause


class _NumpyType:
    """Replaces `numpy.dtype` in unpickling: a forged state of that class could read any memory."""

    def __init__(self, code: str, *options: Any) -> None:
        self.code, self.byte_order = code, "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.byte_order = state[1]


def _number_of_numpy(numpy_type: _NumpyType, data: bytes) -> Any:
    """Return a pickled NumPy scalar as a Python number."""
    code = _NUMPY_CODES.get(numpy_type.code)
    if code is None:
        raise ValueError(
            f"it has a scalar of numpy's dtype {numpy_type.code!r}, which is not a number"
        )
    numbers = struct.unpack((">" if numpy_type.byte_order == ">" else "<") + code, data)
    return numbers[0] if len(numbers) == 1 else complex(*numbers)


_NUMPY_NAMES: dict[str, Callable[..., Any]] = {
    "numpy.dtype": _NumpyType,
    "numpy.core.multiarray.scalar": _number_of_numpy,
    "numpy._core.multiarray.scalar": _number_of_numpy,
}


def _load_with_numpy_scalars(data: io.BytesIO) -> Any:
    """Load a value as `torch.load(weights_only=True)`, but admit NumPy scalars."""
    admitted: list[Any] = [(function, name) for name, function in _NUMPY_NAMES.items()]
    with torch.serialization.safe_globals(admitted):
        return torch.load(io.BytesIO(data.getvalue()), weights_only=True)


def plain_numbers(value: Any) -> Any:
    """Return a value with NumPy scalars replaced by Python values, also inside containers.

    A schedule that computes with NumPy leaves its scalars in the state of an optimizer.
    """
    if any(
        base_class.__module__ == "numpy" and base_class.__name__ in _NUMPY_SCALARS
        for base_class in type(value).__mro__
    ):
        return value.item()
    if type(value) is dict:
        return {plain_numbers(key): plain_numbers(element) for key, element in value.items()}
    if type(value) in (list, tuple, set, frozenset):
        return type(value)(plain_numbers(element) for element in value)
    return value


def checked_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `state` with plain numbers; raise an error for values that cannot be loaded.

    Dicts and lists are new, tensors are not copied, see `map_values` and `plain_numbers`.

    Raises:
        TypeError: a value could be saved but not loaded again.
        ValueError: a tensor is on the meta device.
        Exception: a value cannot be pickled, e.g. pickle.PicklingError.
    """
    plain_state: dict[str, Any] = map_values(state, plain_numbers)
    for leaf in leaves(plain_state):
        if isinstance(leaf.value, Tensor) and leaf.value.is_meta:
            raise ValueError(f"{leaf.name} is on the meta device: give it memory and values first")
        if isinstance(leaf.value, Tensor) or type(leaf.value) in _PLAIN:
            continue
        data = io.BytesIO()
        torch.save(leaf.value, data)
        try:
            torch.load(io.BytesIO(data.getvalue()), weights_only=True)
        except pickle.UnpicklingError as error:
            class_names = ", ".join(sorted(_unsafe_globals(data))) or "more than that"
            raise TypeError(
                f"values of a checkpoint must be tensors, numbers, text, or lists and dicts of "
                f"these, since loading others may run code; {leaf.name} is a "
                f"{type(leaf.value).__name__} and needs {class_names}: save "
                "what it is made of, or call torch.serialization.add_safe_globals before saving "
                "and loading"
            ) from error
    return plain_state


def _unsafe_globals(data: io.BytesIO) -> set[str]:
    """Return the names of the classes and functions of a value that `torch.load` does not admit.

    Empty for data that is too damaged to find them.
    """
    find: Callable[..., list[str]] = torch.serialization.get_unsafe_globals_in_checkpoint
    try:
        return set(find(io.BytesIO(data.getvalue())))
    except Exception:  # torch raises errors of many types for damaged data
        return set()
