"""Checks of arguments of the peers' names, which raise for what would be read as something else."""

from collections.abc import Iterable
from typing import Any


def check_flags(**flags: Any) -> None:
    """Raise TypeError, with the name, for a flag that is not True, False, 1, 0 or None.

    Text is true in Python, "no" and "False" as well. Peers take 0 and 1, and NumPy's bools.
    """
    for name, value in flags.items():
        if value not in (None, False, True):
            raise TypeError(f"{name} must be True or False, got {value!r}")


def check_names(name: str, names: Iterable[str]) -> list[str]:
    """Return names as a list; raise TypeError for one text, which would be read as letters."""
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f'{name} must be a sequence of names, e.g. ["t0", "t1"], got {names!r}')
    return list(names)


def check_positive(name: str, number: int) -> int:
    """Return `number`; raise ValueError, with the name, if it is below 1."""
    if number < 1:
        raise ValueError(f"{name} must be >= 1, got {number}")
    return number
