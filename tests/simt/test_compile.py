"""Check kernels compiled by nvcc for spilled registers, and the CUDA library for missing ops."""

import hashlib
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import emblib
from tests.simt.library import HEADERS, ROOT
from tests.test_schema import CPU_ONLY

NVCC = shutil.which("nvcc")
ARCHITECTURES = ("sm_80", "sm_90")
MOST_REGISTERS = 96


@cache
def _ptxas_report() -> str:
    """The output of ptxas -v for the sources of hot kernels, kept in build/simt."""
    sources = sorted(Path(__file__).parent.glob("hot_*.cu"))
    return "".join(_ptxas_report_of(source) for source in sources)


def _ptxas_report_of(source: Path) -> str:
    assert NVCC is not None
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (source, *HEADERS)))
    folder = ROOT / "build" / "simt"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"ptxas-{source.stem}-{digest.hexdigest()[:16]}.log"
    if not log.exists():
        # No kernel differs between these architectures before ptxas: one PTX serves both. A fatbin
        # is the device code alone: the host compiler does not run.
        codes = [f"-gencode=arch=compute_80,code={a}" for a in ARCHITECTURES]
        include = ["-I", str(ROOT / "csrc")]
        flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v", *codes, *include]
        output = folder / f"{source.stem}.fatbin"
        done = subprocess.run(
            [NVCC, *flags, "-fatbin", str(source), "-o", str(output)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        for old in folder.glob(f"ptxas-{source.stem}-*.log"):
            old.unlink()
        log.write_text(done.stdout + done.stderr)
    return log.read_text()


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hot_kernels_do_not_spill(architecture: str) -> None:
    pattern = re.compile(
        r"Compiling entry function '(\S+)' for '(\S+)'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        re.DOTALL,
    )
    kernels = [m for m in pattern.findall(_ptxas_report()) if m[1] == architecture]
    assert len(kernels) >= 25
    for name, _, stores, loads, registers in kernels:
        assert (stores, loads) == ("0", "0"), f"{name} spills"
        assert int(registers) <= MOST_REGISTERS, f"{name} uses {registers} registers"


def test_cuda_library_has_every_op() -> None:
    """The library loads with any torch and registers a CUDA kernel for every op."""
    found = [Path(p) / "libemblib_cuda.so" for p in emblib.__path__]
    library = next((path for path in found if path.exists()), None)
    if library is None:
        pytest.skip("built without CUDA")
    code = f"""
import torch, emblib
torch.ops.load_library({str(library)!r})
names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("emblib::")]
assert len(names) > 8
has = torch._C._dispatch_has_kernel_for_dispatch_key
print([n for n in names if not has(n, "CUDA")])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    missing = set(re.findall(r"emblib::(\w+)", done.stdout)) - set(CPU_ONLY)
    assert not missing
