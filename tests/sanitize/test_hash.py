"""The hash ops of the CPU under AddressSanitizer, UBSan and ThreadSanitizer, on several threads.

The program is the ops and kernels as they are, with threads and tensors of its own in place of
torch's (stable_torch.h), which no sanitizer could follow. It is kept in build/sanitize.
"""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
COMPILER = os.environ.get("CXX", "g++")
FLAGS = ["-std=c++20", "-O1", "-g1", "-pthread", "-fno-omit-frame-pointer", "-DEMB_ISA=baseline"]
SOURCES = [
    HERE / "hash.cpp",
    *(
        ROOT / "csrc" / "hash" / name
        for name in ("hash_cpu.cpp", "find_kernels.cpp", "insert_kernels.cpp")
    ),
]


def _program(sanitizers: str) -> Path:
    """The program, compiled if it is not there yet; skips where there is no such sanitizer."""
    if shutil.which(COMPILER) is None:
        pytest.skip(f"no {COMPILER}")
    flags = [*FLAGS, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    digest = hashlib.sha256(f"{COMPILER} {flags}".encode())
    headers = [
        p
        for folder in (ROOT / "csrc" / "hash", ROOT / "csrc" / "core", HERE)
        for p in sorted(folder.rglob("*.h"))
    ]
    for path in (*SOURCES, *headers):
        digest.update(path.read_bytes())
    folder = ROOT / "build" / "sanitize"
    folder.mkdir(parents=True, exist_ok=True)
    name = "hash-" + sanitizers.replace(",", "-")
    target = folder / f"{name}-{digest.hexdigest()[:16]}"
    if not target.exists():
        _needs(sanitizers, folder)
        include = ["-I", str(HERE), "-I", str(ROOT / "csrc")]
        new = target.with_suffix(f".{os.getpid()}")
        command = [COMPILER, *flags, *include, *map(str, SOURCES), "-o", str(new)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for old in folder.glob(f"{name}-*"):
            if old != new:
                old.unlink(missing_ok=True)
        new.rename(target)
    return target


def _needs(sanitizers: str, folder: Path) -> None:
    """Skips unless an empty program can be built and run with the sanitizers."""
    probe = folder / f"probe-{os.getpid()}"
    command = [COMPILER, "-x", "c++", "-", f"-fsanitize={sanitizers}", "-o", str(probe)]
    built = subprocess.run(command, input="int main() {}", capture_output=True, text=True)
    runs = built.returncode == 0 and subprocess.run([probe], capture_output=True).returncode == 0
    probe.unlink(missing_ok=True)
    if not runs:
        pytest.skip(f"{COMPILER} cannot build or run programs with -fsanitize={sanitizers} here")


@pytest.mark.slow
@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_nothing_to_report(sanitizers: str) -> None:
    done = subprocess.run([_program(sanitizers), "60", "3"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "63 plans\n"
