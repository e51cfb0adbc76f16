"""Builds the pretend GPU and the CUDA entries of csrc for it.

Two libraries: the devices with torch's side, and the entries, compiled by the host compiler against
`include/`. Objects are kept in build/pretend; each is rebuilt when it, or what it may include,
changes.
"""

import fcntl
import hashlib
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from tests.simt.library import COMPILER, ROOT

HERE = Path(__file__).parent
FOLDER = ROOT / "build" / "pretend"
TORCH = Path(torch.__file__).parent
ENTRIES = sorted((ROOT / "csrc").glob("*/*_cuda.cu"))
DEVICES = sorted(HERE.glob("*.cpp"))
OF_TORCH = {"aten.cpp", "collectives.cpp", "sparse.cpp", "torch_device.cpp"}
# Headers that no file of torch's side includes, which takes long to compile.
OF_RUNTIME = {"state.h", "races.h"}
JOBS = 2

FLAGS = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-unknown-pragmas"]
INCLUDE = ["-I", str(HERE / "include"), "-I", str(ROOT / "csrc"), "-I", str(HERE)]
# torch's headers take most of the time: no optimisation for code that waits for ATen anyway.
TORCH_FLAGS = ["-O0", "-isystem", str(TORCH / "include")]
TORCH_API = ["-isystem", str(TORCH / "include/torch/csrc/api/include")]
ENTRY_FLAGS = ["-x", "c++", "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA"]
ENTRY_FLAGS += ["-include", str(HERE / "include" / "count_entries.h"), "-DPRETEND_ENTRIES"]
# Every load and store calls the race detector (accesses.cpp); libtsan is not linked.
ENTRY_FLAGS += ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]
ENTRY_FLAGS += ["-U__SANITIZE_THREAD__"]
LINK = ["-L", str(TORCH / "lib"), "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}"]


class Libraries(NamedTuple):
    """The paths of the two shared libraries."""

    devices: Path
    entries: Path


class Source(NamedTuple):
    """A file to compile, its flags and the headers that it may include."""

    path: Path
    flags: list[str]
    headers: Sequence[Path]


def build() -> Libraries:
    """Compile what changed and return the libraries."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sources = [*map(_entry_source, ENTRIES), *map(_device_source, DEVICES)]
        with ThreadPoolExecutor(max_workers=JOBS) as pool:
            objects = list(pool.map(_compile, sources))
        count = len(ENTRIES)
        devices = _link("devices", objects[count:], LINK)
        entries = _link("entries", objects[:count], [str(devices), *LINK])
        for old in FOLDER.iterdir():
            if old.suffix in {".o", ".so"} and old not in {*objects, devices, entries}:
                old.unlink()
    return Libraries(devices, entries)


def _headers(folder: Path) -> list[Path]:
    return sorted(path for suffix in ("h", "cuh") for path in folder.glob(f"**/*.{suffix}"))


def _entry_source(path: Path) -> Source:
    """An entry includes its own feature, `core`, `optim` and `group`: a house rule."""
    folders = sorted({path.parent.name, "core", "optim", "group"})
    headers = [header for name in folders for header in _headers(ROOT / "csrc" / name)]
    flags = [*FLAGS, *INCLUDE, *TORCH_FLAGS[1:], *TORCH_API, *ENTRY_FLAGS]
    return Source(path, flags, [*headers, *_headers(HERE / "include")])


def _device_source(path: Path) -> Source:
    flags = [*FLAGS, *INCLUDE]
    if path.name in OF_TORCH:
        headers = [header for header in sorted(HERE.glob("*.h")) if header.name not in OF_RUNTIME]
        return Source(path, [*flags, *TORCH_FLAGS, *TORCH_API], headers)
    emulation = [ROOT / "csrc" / "core" / name for name in ("fiber.h", "simt_host.h")]
    return Source(path, flags, [*_headers(HERE), *emulation])


def _compile(source: Source) -> Path:
    digest = hashlib.sha256(f"{COMPILER} {source.flags} {torch.__version__}".encode())
    for path in (source.path, *source.headers):
        digest.update(path.read_bytes())
    name = f"{source.path.parent.name}-{source.path.stem}-{digest.hexdigest()[:16]}.o"
    target = FOLDER / name
    if not target.exists():
        _run([COMPILER, *source.flags, "-c", str(source.path), "-o", f"{target}.new"])
        Path(f"{target}.new").rename(target)
    return target


def _link(name: str, objects: list[Path], libraries: list[str]) -> Path:
    words = " ".join([*(path.name for path in objects), *libraries])
    digest = hashlib.sha256(words.encode()).hexdigest()[:16]
    target = FOLDER / f"libpretend_{name}-{digest}.so"
    if not target.exists():
        _run([COMPILER, "-shared", *map(str, objects), "-o", str(target), *libraries])
    return target


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


if __name__ == "__main__":
    print(*build(), sep="\n")
