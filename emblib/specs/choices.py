"""The base class of enums, and the checks and the formatting that all specs share."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any, SupportsIndex

import torch

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIM = 2**25  # kernels count the bits of a row, and elements of 32 rows, with 32 bits


class Choice(Enum):
    """An enum of lower-case words; the error for an unknown value lists the valid ones."""

    @classmethod
    def _missing_(cls, value: object) -> None:
        choices = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"{cls.__name__} must be one of {choices}, got {value!r}")


def brief(choice: Any) -> str:
    """Format a dataclass as a constructor call with the arguments that differ from defaults."""
    fields_shown = [
        f"{f.name}={getattr(choice, f.name)!r}"
        for f in fields(choice)
        if f.default is MISSING or getattr(choice, f.name) != f.default
    ]
    return f"{type(choice).__name__}({', '.join(fields_shown)})"


def check_float_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless `dtype` is one of `FLOAT_DTYPES`, those of tables and outputs."""
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be float32, float16 or bfloat16, got {dtype}")


def check_count(name: str, value: SupportsIndex, *, minimum: int = 1) -> int:
    """Return `value` as an int.

    Raises:
        TypeError: no integer.
        ValueError: outside [minimum, 2^63): kernels take counts in int64.
    """
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise TypeError(f"{name} must be an int, got {value!r}")
    number = operator.index(value)
    if number < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {number}")
    if number >= 1 << 63:
        # The message omits the number, which may be the secret seed of a hash function.
        raise ValueError(f"{name} must be below 2^63, got {number.bit_length()} bits")
    return number


def check_counts(name: str, value: Any, *, minimum: int = 1) -> int | tuple[int, ...]:
    """Return `value`, one count for all tables or one per table, as an int or a tuple of ints.

    Raises the errors of `check_count`, and ValueError for a sequence without counts.
    """
    is_one = isinstance(value, str) or getattr(value, "ndim", 1) == 0  # a tensor of one number
    if is_one or not isinstance(value, Iterable):
        return check_count(name, value, minimum=minimum)
    counts = tuple(check_count(name, count, minimum=minimum) for count in value)
    if not counts:
        raise ValueError(f"{name} must be one number, or one per table, got none")
    return counts


def set_counts(spec: Any, *names: str, minimum: int = 1) -> None:
    """Check the fields `names` of a frozen dataclass by `check_count`; convert them to plain ints.

    Raises the errors of `check_count`.
    """
    for name in names:
        object.__setattr__(spec, name, check_count(name, getattr(spec, name), minimum=minimum))


def set_dim(spec: Any) -> None:
    """Check the field `dim` (elements per row, 1 to MAX_DIM), and convert it to a plain int.

    Raises TypeError unless it is an integer, ValueError unless it is in this range.
    """
    set_counts(spec, "dim")
    if spec.dim > MAX_DIM:
        raise ValueError(f"dim must be at most {MAX_DIM}, got {spec.dim}")
