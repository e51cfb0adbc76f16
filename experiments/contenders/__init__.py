"""What is measured. The names are known without torch; a file is imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from experiments.contenders import registry

if TYPE_CHECKING:
    from experiments.contenders.base import Contender, Task
    from experiments.contenders.keys import KeyTable, KeyTask

__all__ = ["Contender", "Missing", "Task", "Unsupported", "build", "build_keyed"]


class Unsupported(Exception):
    """This contender cannot do this task; the message says why, in its row of the report."""


class Missing(Unsupported):
    """This contender needs a package that is not here; the message says what to type."""


def build(name: str, task: Task) -> Contender:
    """Make the contender; raises Unsupported with the reason where it cannot do the task."""
    contender: Contender = _class(name)(task)
    return contender


def build_keyed(name: str, task: KeyTask) -> KeyTable:
    """Make the table of keys; raises as `build`."""
    table: KeyTable = _class(name)(task)
    return table


def _class(name: str) -> type[Any]:
    entry = registry.find(name)
    if reason := entry.missing():
        raise Missing(reason)
    try:
        return entry.load()
    except (ImportError, OSError) as error:  # OSError: a shared library that does not load
        if not entry.requires:
            raise
        found = ", ".join(f"{package} {version}" for package, version in entry.versions().items())
        raise Missing(
            f"{found} does not load here ({error}); known to work: {', '.join(entry.requires)}"
        ) from error


def __getattr__(name: str) -> Any:
    """`Contender` and `Task` need torch, which a command line with a typo should not wait for."""
    if name in ("Contender", "Task"):
        from experiments.contenders import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
