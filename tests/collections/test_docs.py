"""The examples of docs/collections.md run, one after the other, and print what they say."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "collections.md"


def test_examples_run(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        exec(example, names)
    printed = capsys.readouterr().out.splitlines()
    said = [line.removeprefix("# ") for line in examples[0].splitlines() if line[:2] == "# "]
    assert printed == said
    assert len(names["optimizer"].param_groups) == 2
    # A tenth of 0.05 and 1e-3, which a step of the scheduler left almost as they were.
    rates = [group["lr"] for group in names["warm"].param_groups]
    assert rates == pytest.approx([5e-3, 1e-4], rel=1e-2)
