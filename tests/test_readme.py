"""README.md says what is true: its example runs, its sizes hold, its links lead somewhere."""

import re
from pathlib import Path

import pytest
import torch

import emblib
from emblib.sharding import DistributedModelParallel, checkpoints

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")
))  # fmt: skip


def examples() -> list[str]:
    """The two of the README, each short."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for example in found:
        statements = [s for s in example.splitlines() if s.strip() and not s.startswith("#")]
        assert len(statements) <= 12
    return found


def test_the_example_runs_and_is_short() -> None:
    example, _ = examples()
    names: dict[str, object] = {}
    exec(example, names)
    assert names["output"].shape == (2, 96)
    table, plain = names["compressed"], names["spec"]
    assert isinstance(table, emblib.TTEmbeddingBag)
    claimed = re.search(r"take ([\d.]+) GB, kept in ([\d.]+) MB", example)
    assert float(claimed[1]) == pytest.approx(4 * plain.rows * plain.dim / 1e9, rel=0.05)
    keyed = names["keyed"]
    assert isinstance(keyed, emblib.DynamicEmbeddingBags)
    assert keyed.size(0) == 3
    assert float(claimed[2]) == pytest.approx(table.nbytes()["weights"] / 1e6, rel=0.05)


def test_the_sharded_example_runs_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    _, example = examples()
    names: dict[str, object] = {}
    exec(example, names)
    pooled = names["pooled"]
    assert isinstance(pooled, torch.Tensor)
    assert pooled.shape == (2, 128)
    assert checkpoints.latest("run") == Path("run/step_1")
    rows = torch.tensor([3, 99_999, 7])
    model = names["model"]
    assert isinstance(model, DistributedModelParallel)
    (weight,) = (
        w.full_tensor() for key, w in model.state_dict().items() if key.endswith("item.weight")
    )
    # The rows of the batch have been updated: bag 0 of "seen" is no longer what was pooled.
    assert not torch.allclose(weight[rows[:2]].sum(0), pooled[0, :64])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / page).read_text())
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert not missing
