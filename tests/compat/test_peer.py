"""A peer that is installed and does not load skips tests instead of ending the collection."""

import sys
from pathlib import Path

import pytest

from tests.compat.peer import peer_module


@pytest.mark.parametrize("error", ["OSError('libtorch.so: undefined symbol')", "ImportError('no')"])
def test_a_peer_that_does_not_load_skips(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_peer.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(pytest.skip.Exception, match="broken_peer does not import") as skipped:
        peer_module("broken_peer")
    assert skipped.value.allow_module_level  # it is called while a file is collected
    assert "broken_peer" not in sys.modules
