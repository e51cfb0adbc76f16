"""The native libraries: their symbols, how they choose code, what import does and says."""

import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import emblib
from emblib import ops

ROOT = Path(__file__).resolve().parents[1]
ISAS = ("baseline", "avx2", "avx512")

needs_binutils = pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm of binutils")


def _library(name: str) -> Path:
    found = [Path(p) / f"lib{name}.so" for p in emblib.__path__]
    library = next((path for path in found if path.exists()), None)
    if library is None:
        pytest.skip(f"lib{name}.so is not built")
    return library.resolve()


def _symbols(*options: str | Path) -> Iterator[tuple[str, str]]:
    """(kind, demangled name) of every symbol that nm lists."""
    command = ["nm", "-C", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        if m := re.match(r"(?:[0-9a-f]+)?\s+([A-Za-z]) (.+)", line):
            yield m[1], m[2]


# Runs programs in forks, one after another; prints the status and the errors of each.
_FORKS = """
import json, os, sys, tempfile, torch, traceback
for code, variables in json.loads(sys.argv[1]):
    with tempfile.TemporaryFile("w+") as errors:
        child = os.fork()
        if child == 0:
            os.dup2(errors.fileno(), 2)
            os.environ.update(variables)
            status = 0
            try:
                exec(code, {})
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stderr.flush()
            os._exit(status)
        _, status = os.waitpid(child, 0)
        errors.seek(0)
        print(json.dumps([status, errors.read()]))
"""


def _run(*programs: tuple[str, dict[str, str]]) -> list[tuple[int, str]]:
    """Return status and errors of programs, each with its environment variables.

    One interpreter loads torch for all; emblib is loaded by each.
    """
    command = [sys.executable, "-c", _FORKS, json.dumps(programs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


# What is in the libraries


@needs_binutils
@pytest.mark.parametrize("isa", ISAS)
def test_kernels_of_one_isa_do_not_leak(isa: str) -> None:
    """Objects compiled for an ISA define nothing visible outside `emb::<isa>`.

    A function that several emit is linked once; were it AVX-512's, older machines would crash.
    """
    objects = sorted(ROOT.glob(f"build/**/kernels_{isa}.dir/**/*.o"))
    if not objects:
        pytest.skip("no build folder")
    own = re.compile(rf"\bemb::{isa}::")
    leaks = {
        f"{path.name}: {kind} {name}"
        for path in objects
        for kind, name in _symbols("--defined-only", "--extern-only", path)
        if not own.search(name)
    }
    assert not leaks, "\n".join(sorted(leaks))


@needs_binutils
@pytest.mark.parametrize("name", ["emblib_cpu", "emblib_cuda"])
def test_only_the_stable_abi_of_torch_is_used(name: str) -> None:
    """libtorch's C++ symbols differ from release to release; its C shims do not."""
    needed = [s for _, s in _symbols("--dynamic", "--undefined-only", _library(name))]
    assert [s for s in needed if s.startswith(("aoti_torch_", "torch_"))]
    unstable = re.compile(r"\b(c10|at|torch|caffe2)::")
    assert not [s for s in needed if unstable.search(s)]


@needs_binutils
@pytest.mark.parametrize("name", ["emblib_cpu", "emblib_cuda"])
def test_nothing_is_exported(name: str) -> None:
    """The libraries act by registering with torch; an exported name could clash with another's."""
    exported = {
        symbol
        for kind, symbol in _symbols("--dynamic", "--defined-only", _library(name))
        if kind in "TDBR" and symbol not in {"__bss_start", "_edata", "_end", "_init", "_fini"}
    }
    assert not exported


def _fatbin_architectures(library: bytes) -> set[str]:
    """Machine code (sm_XX) and PTX (compute_XX) in a library, as its fat binaries list them."""
    found: set[str] = set()
    start = library.find(b"\x50\xed\x55\xba")
    while start >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", library, start)
        at, end = start + header, start + header + size
        while at < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", library, at)
            (architecture,) = struct.unpack_from("<I", library, at + 28)
            found.add(f"{'compute' if kind == 1 else 'sm'}_{architecture}")
            at += entry_header + entry_size
        start = library.find(b"\x50\xed\x55\xba", end)
    return found


def _nvcc_knows_blackwell() -> bool:
    compiler = os.environ.get("CUDACXX") or "nvcc"
    done = subprocess.run([compiler, "--list-gpu-arch"], capture_output=True, text=True)
    return "compute_120" in done.stdout


def test_cuda_library_is_built_for_what_was_asked() -> None:
    library = _library("emblib_cuda").read_bytes()  # without it there may be no nvcc
    default = ("8.0;9.0+PTX", "8.0;9.0;10.0+PTX;12.0")[_nvcc_knows_blackwell()]
    asked = os.environ.get("TORCH_CUDA_ARCH_LIST") or default
    want = set()
    for number, ptx in re.findall(r"(\d+\.\d+)a?(\+PTX)?", asked):
        want.add("sm_" + number.replace(".", ""))
        if ptx:
            want.add("compute_" + number.replace(".", ""))
    assert _fatbin_architectures(library) == want


def test_cuda_library_is_there_where_it_was_asked_for() -> None:
    if os.environ.get("EMBLIB_CUDA") != "ON":
        pytest.skip("EMBLIB_CUDA is not ON")
    assert any((Path(p) / "libemblib_cuda.so").exists() for p in emblib.__path__)


# How the kernels of an instruction set are chosen

_STEP = """
import os, torch, emblib
torch.manual_seed(0)
tables = [emblib.TableSpec(200, 20), emblib.TableSpec(50, 64)]
precision = emblib.Precision(
    torch.bfloat16, states=torch.float16, stochastic_rounding=emblib.StochasticRounding(7)
)
adam = emblib.optim.Adam(0.1)
bags = emblib.TableBatchedEmbeddingBags(tables, adam, precision=precision)
tt = emblib.TTEmbeddingBag(emblib.TTSpec(300, 24, (5, 7)), emblib.optim.Adagrad(0.1))
ids, offsets = torch.randint(0, 50, (240,)), torch.arange(0, 241, 4)
results = []
for table, bounds in ((bags, offsets), (tt, offsets)):
    for _ in range(2):
        out = table(ids, bounds)
        out.backward(torch.ones_like(out).cumsum(0) / 100)
    results += [out.detach(), *(p.detach().float() for p in table.parameters())]
torch.save(results, os.environ["TARGET"])
"""


@cache
def _supported() -> tuple[str, ...]:
    flags = Path("/proc/cpuinfo")
    words = set(flags.read_text().split()) if flags.exists() else set()
    have = {"baseline": set(), "avx2": {"avx2", "fma", "f16c"}}
    have["avx512"] = have["avx2"] | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    return tuple(isa for isa in ISAS if have[isa] <= words)


_ROUNDING = """
import torch
from emblib import Precision, TableBatchedEmbeddingBags, TableSpec, optim
torch.manual_seed(0)
rows, lr = 64, 0.5  # a rate whose products are exact, fused or not

def module(dim, weights, output):
    tables = [TableSpec(rows, dim)]
    bags = TableBatchedEmbeddingBags(tables, optim.SGD(lr), precision=Precision(weights, output))
    return bags, bags.table_weights()[0].detach()

for dim in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 15, 16, 18, 31, 33):  # a register has 4, 8 or 16
    bits = torch.randint(-(2**31), 2**31, (rows, dim))
    values = bits.to(torch.int32).view(torch.float32)  # NaN, infinities and subnormals among them
    values[::2] = torch.randn(rows // 2, dim) * 2.0 ** torch.randint(-26, 17, (rows // 2, dim))
    grad = torch.randn(rows, dim)
    ids, offsets = torch.arange(rows), torch.arange(rows + 1)
    for dtype in (torch.float16, torch.bfloat16):
        bags, weights = module(dim, torch.float32, dtype)
        weights.copy_(values)
        out, want = bags(ids, offsets), values.to(dtype)
        torch.testing.assert_close(out, want, rtol=0, atol=0, equal_nan=True)
        bags, weights = module(dim, dtype, torch.float32)
        weights.copy_(values)
        before = weights.float()
        out = bags(ids, offsets)
        torch.testing.assert_close(out, before, rtol=0, atol=0, equal_nan=True)
        out.backward(grad)
        want = (before - lr * grad).to(dtype)
        torch.testing.assert_close(weights, want, rtol=0, atol=0, equal_nan=True)
        bags, weights = module(dim, dtype, dtype)
        weights.copy_(values)
        bags(ids, offsets).backward(grad.to(dtype))
        want = (before - lr * grad.to(dtype).float()).to(dtype)
        torch.testing.assert_close(weights, want, rtol=0, atol=0, equal_nan=True)
"""


def test_every_instruction_set_gives_the_same_results(tmp_path: Path) -> None:
    """Up to rounding: each adds in an order of its own, and not all fuse multiply and add.

    Each rounds to 16 bits as torch does, in rows of every length: whole registers and what is left.
    """
    targets = {isa: str(tmp_path / f"{isa}.pt") for isa in _supported()}
    settings = [{"EMBLIB_ISA": isa, "TARGET": target} for isa, target in targets.items()]
    for status, errors in _run(*((_STEP + _ROUNDING, variables) for variables in settings)):
        assert status == 0, errors
    results = {isa: torch.load(target) for isa, target in targets.items()}
    for isa in _supported()[1:]:
        for got, want in zip(results[isa], results["baseline"], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-4)


# What import does, and what it says when it cannot


def _refusal(monkeypatch: pytest.MonkeyPatch, library: Path | None) -> str:
    """Return the error of an import that finds this library, or none."""
    monkeypatch.setattr(ops, "_library_path", lambda name: library)
    with pytest.raises(ImportError) as refused:
        ops._load_library("emblib_cpu")
    return str(refused.value)


def test_a_missing_library_of_a_package_is_installed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ops, "_SOURCE", tmp_path)
    message = _refusal(monkeypatch, None)
    assert message.startswith("emblib's native library libemblib_cpu.so is missing")
    assert "`pip install --force-reinstall --no-deps emblib`" in message


def test_a_missing_library_of_a_source_tree_is_built_there(monkeypatch: pytest.MonkeyPatch) -> None:
    message = _refusal(monkeypatch, None)
    assert f"source tree {ROOT}" in message
    assert "`pip install -e .`" in message
    assert "start Python in another folder" in message


def test_a_damaged_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library = tmp_path / "libemblib_cpu.so"
    library.write_bytes(b"not a library")
    monkeypatch.setattr(ops, "_SOURCE", tmp_path)
    message = _refusal(monkeypatch, library)
    assert f"{library} does not load with torch {torch.__version__}" in message
    assert f"damaged or of another processor; this one is {platform.machine()}" in message
    assert "pip install --force-reinstall" in message


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        ("/lib/libm.so.6: version `GLIBC_2.38' not found (required by x.so)", "needs GLIBC_2.38"),
        ("libstdc++.so.6: version `GLIBCXX_3.4.30' not found", "needs GLIBCXX_3.4.30"),
        ("x.so: undefined symbol: aoti_torch_abc", "This torch lacks"),
        ("libtorch_cpu.so: cannot open shared object file", "This torch lacks"),
        ("x.so: wrong ELF class: ELFCLASS32", "of another processor"),
        ("out of memory", ""),
    ],
)
def test_the_cause_of_a_library_that_does_not_load_is_named(error: str, cause: str) -> None:
    found = ops._explanation(error)
    assert cause in found
    assert bool(found) is bool(cause)


@pytest.mark.parametrize(
    ("library", "advice"),
    [(None, "EMBLIB_CUDA=ON pip install -e "), (Path("x.so"), "check the driver with nvidia-smi")],
)
def test_missing_cuda_kernels_are_explained(
    library: Path | None, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_library_path", lambda name: library)
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *_: False)
    ops.require_kernels(torch.device("cpu"))
    with pytest.raises(RuntimeError, match=advice):
        ops.require_kernels(torch.device("cuda"))


_OLD_TORCH = "import torch; torch.__version__ = '2.9.1+cu126'; import emblib"
_QUIET_IMPORT = """
import os, subprocess, torch
def refuse(*a, **k): raise AssertionError(a)
subprocess.Popen = os.system = os.posix_spawn = refuse
import emblib
assert not torch.cuda.is_initialized()
emblib.TableBatchedEmbeddingBags([emblib.TableSpec(4, 4)])
assert not torch.cuda.is_initialized()
"""


_OLD_LIBRARY = """
import torch
get = type(torch.ops.emblib).__getattr__
def without_one_op(namespace, name):
    return get(namespace, "no_such_op" if name == {op!r} else name)
type(torch.ops.emblib).__getattr__ = without_one_op
import emblib
"""


@pytest.mark.parametrize("op", ["hash_find", "page_crc32", "tier_find_batch_"])
def test_import_refuses_an_old_library(op: str) -> None:
    ((status, errors),) = _run((_OLD_LIBRARY.format(op=op), {}))
    last = errors.strip().splitlines()[-1]
    assert status != 0
    assert last.startswith("ImportError: emblib's native library ")
    assert "libemblib_cpu.so is older than the Python files" in last
    assert "'no_such_op'" in last
    assert "`pip install -e .`" in last


def test_import_refuses_an_old_torch_and_starts_neither_cuda_nor_a_compiler() -> None:
    old, quiet = _run((_OLD_TORCH, {}), (_QUIET_IMPORT, {}))
    assert old[0] != 0
    last = old[1].strip().splitlines()[-1]
    assert last.startswith("ImportError: emblib needs torch >= 2.10")
    assert "found 2.9.1+cu126; upgrade torch" in last
    assert quiet[0] == 0, quiet[1]
