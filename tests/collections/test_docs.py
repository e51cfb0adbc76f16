"""The examples of docs/collections.md run, one after the other, and print what they say."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "collections.md"


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        exec(example, names)
    printed = capsys.readouterr().out.splitlines()
    said = [line.removeprefix("# ") for line in examples[0].splitlines() if line[:2] == "# "]
    assert printed == said
    assert names["fused"].param_groups[0]["lr"] == pytest.approx(0.05, rel=1e-2)
    assert len(names["optimizer"].param_groups) == 2
