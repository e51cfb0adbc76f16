"""Records which files and directories are synced, and when names are given."""

import os
import stat
from typing import Any

import pytest


def record_syncs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that grows by "file of <bytes>", "directory" or "replace" with each call."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(handle: int) -> None:
        status = os.fstat(handle)
        calls.append("directory" if stat.S_ISDIR(status.st_mode) else f"file of {status.st_size}")
        fsync(handle)

    def record_replace(*args: Any) -> None:
        calls.append("replace")
        replace(*args)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    return calls
