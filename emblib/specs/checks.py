"""Checks of the arguments of specs, and the base class of option enums."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from enum import Enum
from typing import Any, SupportsIndex

import torch
from torch import nn

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_DIM = 2**25  # kernels hold the bits of one row, and the elements of 32 rows, in int32


class OptionEnum(Enum):
    """Base class of enums whose values are lower-case words.

    An unknown value raises ValueError, which lists the valid ones.
    """

    @classmethod
    def _missing_(cls, value: object) -> None:
        choices = ", ".join(repr(member.value) for member in cls)
        raise ValueError(f"{cls.__name__} must be one of {choices}, got {value!r}")


def format_config(config: Any) -> str:
    """Format a dataclass as a constructor call, without arguments that equal their defaults."""
    arguments = [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in fields(config)
        if not _has_default_value(config, field)
    ]
    return f"{type(config).__name__}({', '.join(arguments)})"


def _has_default_value(config: Any, field: Field[Any]) -> bool:
    """Return whether a field of a dataclass has a default and equals it."""
    value = getattr(config, field.name)
    if field.default_factory is not MISSING:
        return bool(value == field.default_factory())
    return field.default is not MISSING and bool(value == field.default)


def check_float_dtype(name: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless `dtype` is one of `FLOAT_DTYPES`, those of tables and outputs."""
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{name} must be float32, float16 or bfloat16, got {dtype}")


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a bool: strings such as "False" are true in Python."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_module(name: str, value: object) -> None:
    """Raise TypeError unless `value` is an `nn.Module`."""
    if not isinstance(value, nn.Module):
        got = f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
        raise TypeError(f"{name} must be an nn.Module, got {got}")


def check_table_name(name: object) -> None:
    """Raise ValueError unless `name` is a string without dots, which separate names in paths."""
    if not isinstance(name, str) or "." in name:
        raise ValueError(f"name must be a string without dots, got {name!r}")


def check_sequence(name: str, value: Any, example: str) -> tuple[Any, ...]:
    """Return an iterable other than text as a tuple; raise TypeError, with the example, else."""
    is_text = isinstance(value, str | bytes)
    if is_text or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        raise TypeError(f"{name} must be a sequence, e.g. {example}, got {value!r}")
    return tuple(value)


def check_count(name: str, value: SupportsIndex, *, minimum: int = 1) -> int:
    """Return `value` as an int.

    Raises:
        TypeError: `value` is not an integer, or is a bool.
        ValueError: `value` is outside [minimum, 2^63); kernels take counts in int64.
    """
    number: int | None
    try:
        number = operator.index(value)
    except (TypeError, ValueError):  # of NumPy and torch, for floats and several elements
        number = None
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool
    if number is None or is_bool:
        raise TypeError(f"{name} must be an int, got {value!r}")
    if number < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {number}")
    if number >= 1 << 63:
        # The message omits the number, which may be the secret seed of a hash function.
        raise ValueError(f"{name} must be below 2^63, got {number.bit_length()} bits")
    return number


def check_counts(name: str, value: Any, *, minimum: int = 1) -> int | tuple[int, ...]:
    """Return `value`, one count for all tables or one per table, as an int or a tuple of ints.

    Raises:
        TypeError: `value` or one of its entries is not an integer, or is a bool.
        ValueError: a count is outside [minimum, 2^63), or `value` is an empty sequence.
    """
    # A 0-dimensional tensor has __iter__ but cannot be iterated.
    is_scalar = isinstance(value, str) or getattr(value, "ndim", 1) == 0
    if is_scalar or not isinstance(value, Iterable):
        return check_count(name, value, minimum=minimum)
    counts = tuple(check_count(name, count, minimum=minimum) for count in value)
    if not counts:
        raise ValueError(f"{name} must be one number, or one per table, got none")
    return counts


def normalise_counts(spec: Any, *names: str, minimum: int = 1) -> None:
    """Check the fields `names` of a frozen dataclass, and replace them by plain ints in place.

    Raises the errors of `check_count`.
    """
    for name in names:
        object.__setattr__(spec, name, check_count(name, getattr(spec, name), minimum=minimum))


def normalise_dim(spec: Any) -> None:
    """Check the field `dim`, the elements per row, and replace it by a plain int in place.

    Raises:
        TypeError: it is not an integer, or is a bool.
        ValueError: it is outside [1, MAX_DIM].
    """
    normalise_counts(spec, "dim")
    if spec.dim > MAX_DIM:
        raise ValueError(f"dim must be at most {MAX_DIM}, got {spec.dim}")
