"""What docs/sharding.md shows runs as it stands."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from emblib.sharding import ShardingPlan
from emblib.sharding.codecs import BF16, FP8, FP16, FP32, INT8

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "sharding.md"


def _run(page: Path, *selected: int) -> dict[str, Any]:
    """The names after the examples of a page, one after the other, or after those `selected`."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert blocks
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in [blocks[i] for i in selected] or blocks:
        exec(compile(block, str(page), "exec"), names)
    return names


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_examples(tmp_path: Path) -> None:
    names = _run(PAGE)
    assert names["other"].plan["bags"]["item"].shards == (
        (0, (0, 600), (0, 16)),
        (0, (600, 1000), (0, 16)),
    )
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == sorted(
        f"step_{n}" for n in range(20, 101, 20)
    )


def test_examples_of_pages_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    names = _run(DOCS / "pipelines.md", 0, 2)
    assert names["pipeline"].steps == 30
    assert int(names["entropy"].total) == 40
    assert capsys.readouterr().out.count("examples/s\n") == 30
    names = _run(DOCS / "planner.md", 0)
    assert ShardingPlan.load("plan.json") == names["prediction"].plan
    assert _run(DOCS / "quantised.md")["pooled"].shape == (2, 64)
    assert _run(DOCS / "jagged.md")["batch"].keys() == ["user", "item"]


def test_table_of_codecs() -> None:
    text = PAGE.read_text()
    for codec in (FP32, FP16, BF16, INT8, FP8):
        assert f"| `{codec.__name__}(" in text
    assert INT8().row_dim == FP8().row_dim == 128
    # m / 254 and 2^-11 |x|, as the page says.
    values = torch.tensor([1.0, -254.0])
    assert INT8().bound(values).tolist() == pytest.approx([1.0, 1.0], rel=1e-4)
    assert FP16().bound(values).tolist() == pytest.approx([2.0**-11, 254 * 2.0**-11])
