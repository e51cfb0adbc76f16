"""The examples run, print their result, and are short."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.compat.peer import peer_module

FOLDER = Path(__file__).resolve().parents[1] / "examples"

# The last line that each prints.
PRINTED = {
    "captured_step": r"mean loss 0\.\d+; graphs for \[.*\] ids",
    "compress": r"33 MB of tables and states in 1\.\d MB",
    "from_fbgemm": r"norm of the output [\d.]+ -> [\d.]+; 2 tables with sums",
    "hashed_ids": r"norm of a known id 0\.[1-9]\d*, of an unknown one 0\.000",
    "migrate_model": r"back to EmbeddingBag",
    "quantise_and_serve": r"4 bits: 0\.14 of the memory, largest error [\d.]+% of the range",
    "shard": r"1 ranks; the loaded model looks up the same rows: True",
    "train_tables": r"loss 0\.69\d -> 0\.[0-5]\d+",
}

# The same of those that need another library, which runs on a CPU here.
OF_PEERS = {
    "migrate_fbgemm": r"rows after a step differ by \d\.\de-\d\d; fbgemm_gpu\..*",
    "migrate_torchrec": r"rows after a step differ by [\d.e-]+; keys as before",
}


def example(name: str) -> Any:
    """Return an example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [name for name in PRINTED if name != "shard"])
def test_an_example_prints_its_result(
    name: str, device: torch.device, capsys: pytest.CaptureFixture[str]
) -> None:
    example(name).main(device.type)
    assert re.fullmatch(PRINTED[name], capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("name", OF_PEERS)
def test_an_example_needs_a_peer(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        module = example(name)
    except SystemExit as missing:
        pytest.skip(str(missing))
    module.main()
    assert re.fullmatch(OF_PEERS[name], capsys.readouterr().out.splitlines()[-1])


def test_the_sharded_example_in_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    example("shard").main(str(tmp_path))
    assert re.fullmatch(PRINTED["shard"], capsys.readouterr().out.splitlines()[-1])


def test_torchrec_runs_over_emblib() -> None:
    """In a process of its own, since the installation lasts until the end of a process."""
    if importlib.util.find_spec("torchrec") is None:
        pytest.skip("torchrec is not installed")
    done = subprocess.run(
        [sys.executable, str(FOLDER / "torchrec_over_emblib.py")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "with TorchRec's collection" in done.stdout


@pytest.fixture
def dlrm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the module of `examples/dlrm/train.py`."""
    monkeypatch.syspath_prepend(str(FOLDER / "dlrm"))
    yield importlib.import_module("train")
    for name in ("train", "data", "model"):
        sys.modules.pop(name)


DLRM = ["--batch-size", "256", "--steps"]


@pytest.mark.parametrize("kind", ["plain", "tensor_train", "hash", "torch", "fbgemm", "torchrec"])
def test_a_dlrm_learns_with_every_kind_of_table(kind: str, device: torch.device, dlrm: Any) -> None:
    if kind in ("fbgemm", "torchrec"):
        peer_module(kind.replace("fbgemm", "fbgemm_gpu"))
        if device.type == "cuda":
            pytest.skip("the peers that tests install run on a CPU")
    (area,) = dlrm.main([*DLRM, "100", "--device", device.type, "--tables", kind])
    assert area > 0.7


@pytest.mark.parametrize("kind", ["plain", "hash", "torch"])
def test_a_dlrm_resumes(kind: str, tmp_path: Path, dlrm: Any) -> None:
    """The AUC after 20 + 20 steps is that of 40 steps, to the last bit."""
    options = ["--device", "cpu", "--tables", kind, "--checkpoint"]
    whole = dlrm.main([*DLRM, "40", *options, str(tmp_path / "whole.pt")])
    for steps in ("20", "40"):
        parts = dlrm.main([*DLRM, steps, *options, str(tmp_path / "parts.pt")])
    assert parts == whole


def test_a_checkpoint_of_a_dlrm_is_of_one_kind_of_tables(tmp_path: Path, dlrm: Any) -> None:
    """And one with more steps than asked for stays as it is."""
    options = ["--device", "cpu", "--checkpoint", str(tmp_path / "dlrm.pt"), "--tables"]
    with pytest.raises(SystemExit):
        dlrm.main([*DLRM, "4", *options, "plain", "--tables", "hash"])
    longer = dlrm.main([*DLRM, "4", *options, "plain"])
    with pytest.raises(SystemExit, match="tables of the kind plain, not hash"):
        dlrm.main([*DLRM, "4", *options, "hash"])
    assert dlrm.main([*DLRM, "2", *options, "plain"]) == longer
    assert torch.load(tmp_path / "dlrm.pt")["step"] == 4


def test_the_data_of_a_dlrm(tmp_path: Path, dlrm: Any) -> None:
    lines = [["1", *["3"] * 13, *["ab"] * 26], ["0", *[""] * 13, *["cd"] * 26]]
    (tmp_path / "day.tsv").write_text("\n".join("\t".join(line) for line in lines * 5))
    clicks = dlrm.load(f"criteo:{tmp_path / 'day.tsv'}")
    assert clicks.rows == (2,) * 26
    assert clicks.ids[:2].tolist() == [[0] * 26, [1] * 26]
    assert clicks.labels.tolist() == [1, 0] * 5
    assert clicks.numbers.mean().abs() < 1e-6
    scores, labels = torch.tensor([0.1, 0.9, 0.8, 0.3]), torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert dlrm.auc(scores, labels) == 0.75


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short_and_listed(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60
    assert f"[{path.name}]({path.name})" in (FOLDER / "README.md").read_text()
    assert path.stem in {*PRINTED, *OF_PEERS, "torchrec_over_emblib"}
