"""Every kind of tables is frozen, opened and looks up as before."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import emblib
from emblib.inference import for_inference, prune
from emblib.tables.durable_files import ChecksumError
from tests.inference.test_conversion import dynamic, trained

IDS, OFFSETS = torch.tensor([3, 9, 20, 5, 3, 28]), torch.tensor([0, 2, 3, 3, 6])


def _plain() -> Any:
    tables = [emblib.TableSpec(30, 12, "item"), emblib.TableSpec(30, 5)]
    precision = emblib.Precision(torch.bfloat16, torch.float16)
    return emblib.TableBatchedEmbeddingBags(tables, precision=precision)


def _train() -> Any:
    tables = [emblib.TTSpec(30, 12, (4, 3), name="item"), emblib.TTSpec(40, 8, (2,), seed=3)]
    return emblib.TableBatchedTTEmbeddingBags(tables, pooling=emblib.Pooling.MEAN)


def _pruned() -> Any:
    keep = {"item": torch.arange(30) % 3 == 0, "table_1": torch.arange(30) > 7}
    quantised = emblib.QuantizedEmbeddingBags.from_float(_plain(), formats=["int4", "float8_e4m3"])
    return prune(quantised, keep)


KINDS: dict[str, Callable[[], Any]] = {
    "plain": _plain,
    "quantised": lambda: emblib.QuantizedEmbeddingBags.from_float(_plain(), bits=2),
    "tensor trains": _train,
    "one tensor train": lambda: emblib.TTEmbeddingBag(emblib.TTSpec(30, 8, (4,))),
    "dynamic": lambda: trained(dynamic(), (IDS, OFFSETS)),
    "pruned": _pruned,
    "no offsets at the end": lambda: emblib.QuantizedEmbeddingBags.from_float(
        torch.randn(30, 4), include_last_offset=False
    ),
}


def look_up(tables: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = tables(IDS, OFFSETS)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_looks_up_as_before(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tables = KINDS[kind]()
    emblib.freeze(tables, tmp_path / "a")
    opened = emblib.open_frozen(tmp_path / "a")
    got, want = look_up(opened), look_up(tables)
    assert got.dtype == want.dtype
    assert torch.equal(got, want)
    assert not any(parameter.requires_grad for parameter in opened.parameters())
    emblib.freeze(opened, tmp_path / "b")  # what was opened is frozen again
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_opens_on_the_cpu_and_draws_nothing(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tables = KINDS[kind]()
    emblib.freeze(tables, tmp_path / "a")
    generator = torch.get_rng_state()
    with torch.device("meta"):
        opened = emblib.open_frozen(tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), generator)
    tensors = [*opened.parameters(), *opened.buffers()]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert torch.equal(look_up(opened), look_up(tables))


def test_formats_make_rows(tmp_path: Path) -> None:
    for source in (_train(), trained(dynamic(), (IDS, OFFSETS))):
        emblib.freeze(source, tmp_path / "a", formats="int8")
        opened = emblib.open_frozen(tmp_path / "a")
        assert torch.equal(look_up(opened), look_up(for_inference(source, "int8")))
    with pytest.raises(TypeError, match="read-only already"):
        emblib.freeze(opened, tmp_path / "a", formats="int4")


def test_missing_keys_read_the_default(tmp_path: Path) -> None:
    emblib.freeze(trained(dynamic(), (IDS, OFFSETS)), tmp_path / "a")
    opened = emblib.open_frozen(tmp_path / "a")
    ids, offsets = torch.tensor([777, -777]), torch.tensor([0, 1, 2])
    assert torch.equal(opened(ids, offsets), torch.tensor([[0.5] * 12 + [0.0] * 5]))


def test_writes_change_the_copy_of_the_process(tmp_path: Path) -> None:
    emblib.freeze(_plain(), tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    opened = emblib.open_frozen(tmp_path / "a")
    opened.reset_parameters()
    assert not look_up(opened).any()
    assert (tmp_path / "a").read_bytes() == before


def test_damage_names_the_section(tmp_path: Path) -> None:
    path = tmp_path / "a"
    emblib.freeze(_pruned(), path)
    content = path.read_bytes()
    for section, back in (("index", 1), ("index", 4096)):
        at = len(content) - back if back == 1 else content.rindex(b"\xff\xff\xff\xff")
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(ChecksumError, match=f"section '{section}'"):
            emblib.open_frozen(path)


def test_models_with_opened_tables_are_exported(tmp_path: Path) -> None:
    emblib.freeze(_pruned(), tmp_path / "a")
    tables = nn.ModuleList([emblib.open_frozen(tmp_path / "a")])[0]
    lengths = ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    program = torch.export.export(tables, (IDS, OFFSETS), dynamic_shapes=lengths, strict=False)
    assert torch.equal(program.module()(IDS, OFFSETS), look_up(tables))


def test_the_page_on_inference_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).resolve().parents[2] / "docs" / "inference.md"
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, str(page), "exec"), names)
    assert names["pooled"].shape == (200, 16)
    printed = capsys.readouterr().out
    assert f"print(small.nbytes())  # {printed.splitlines()[-1]}" in page.read_text()
