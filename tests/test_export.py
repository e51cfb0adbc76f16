"""Models with every kind of tables are exported, for any batch; a program in C++ serves them."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim, export

import emblib

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "serve_cpp"
KINDS = ("plain", "quantised", "tensor_train", "hash")


@pytest.fixture(scope="module")
def example() -> Any:
    """The example that exports, as a module."""
    spec = importlib.util.spec_from_file_location("example_export", FOLDER / "export.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_program_takes_any_batch(kind: str, example: Any) -> None:
    torch.manual_seed(0)
    tables = example.tables(kind).eval()
    lengths = ({0: Dim.AUTO}, {0: Dim.AUTO})
    with torch.no_grad():
        program = export(tables, example.batch(8), dynamic_shapes=lengths, strict=False)
        for size in (2, 5, 300):
            ids, offsets = example.batch(size)
            assert torch.equal(program.module()(ids, offsets), tables(ids, offsets))


def test_unknown_keys_read_the_default_of_an_exported_table() -> None:
    tables = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(64, 4, default_value=7.0)])
    tables(torch.tensor([3]), torch.tensor([0, 1]))
    batch = torch.tensor([3, 99]), torch.tensor([0, 1, 2])
    with pytest.raises(RuntimeError, match=r"call eval\(\) before torch.export"):
        export(tables, batch, strict=False)
    tables.eval()
    with torch.no_grad():
        out = export(tables, batch, strict=False).module()(*batch)
        assert torch.equal(out, tables(*batch))
    assert torch.equal(out[1], torch.full((4,), 7.0))


def test_tables_with_a_backing_store_are_not_exported() -> None:
    store = emblib.BackingStore(emblib.HostRows(64))
    specs, rule = [emblib.DynamicSpec(32, 4)], emblib.optim.SGD(0.1)
    tables = emblib.DynamicEmbeddingBags(specs, rule, backing=store).eval()
    with torch.no_grad(), pytest.raises(RuntimeError, match="are in a backing store"):
        export(tables, (torch.tensor([3]), torch.tensor([0, 1])), strict=False)


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of the example, built."""
    build = tmp_path_factory.mktemp("serve")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", FOLDER, "-B", build, prefix], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build], check=True, capture_output=True)
    return build / "serve"


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_without_python_serves_a_model(kind: str, serve: Path, tmp_path: Path) -> None:
    package = tmp_path / "ranker.pt2"
    command = [sys.executable, "-W", "ignore", FOLDER / "export.py", package, kind]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    want = [float(score) for score in done.stdout.splitlines()[-1].split()]
    names = [Path(folder) / "libemblib_cpu.so" for folder in emblib.__path__]
    library = next(name for name in names if name.exists())
    served = subprocess.run([serve, package, library, "5"], check=True, capture_output=True)
    scores = [float(score) for score in served.stdout.split()]
    assert scores == pytest.approx(want, abs=2e-6)
    package.write_bytes(package.read_bytes()[:-100])
    broken = subprocess.run([serve, package, library, "5"], check=False, capture_output=True)
    assert broken.returncode == 1
    assert b"ranker.pt2: " in broken.stderr
