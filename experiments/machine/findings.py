"""What `doctor` finds: one thing, how it is, and what would make it better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any


class State(Enum):
    """How a finding is to be read."""

    ok = "ok"
    note = "note"  # worth knowing, or could be better
    broken = "broken"  # something needed does not work


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    section: str
    what: str
    found: str
    state: State = State.ok
    advice: str = ""

    def describe(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self) | {"state": self.state.value}


Check = Callable[[], list[Finding]]


def detect_rank_failures(section: str, check: Check) -> list[Finding]:
    """The findings of a check; a check that fails is a finding too, for the tool must not."""
    try:
        return check()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return [Finding(section, "this check", text, State.broken, "report it as a bug")]
