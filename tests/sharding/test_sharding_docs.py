"""What docs/sharding.md shows runs as it stands."""

import re
from pathlib import Path

import pytest
import torch

from emblib.sharding.codecs import BF16, FP8, FP16, FP32, INT8

PAGE = Path(__file__).parents[2] / "docs" / "sharding.md"


def _blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    blocks = _blocks()
    assert len(blocks) >= 2
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {"__name__": "__main__"})
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(
        f"step_{n}" for n in range(20, 101, 20)
    )


def test_table_of_codecs() -> None:
    text = PAGE.read_text()
    for codec in (FP32, FP16, BF16, INT8, FP8):
        assert f"| `{codec.__name__}(" in text
    assert INT8().row_dim == FP8().row_dim == 128
    # m / 254 and 2^-11 |x|, as the page says.
    values = torch.tensor([1.0, -254.0])
    assert INT8().bound(values).tolist() == pytest.approx([1.0, 1.0], rel=1e-4)
    assert FP16().bound(values).tolist() == pytest.approx([2.0**-11, 254 * 2.0**-11])
