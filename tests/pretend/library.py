"""Builds the pretend GPU and the CUDA entries of csrc for it.

Two libraries: the devices with torch's side, and the entries, compiled by the host compiler against
`include/`. Objects are kept by content (tests/compile_cache.py).
"""

from pathlib import Path
from typing import NamedTuple

import torch

from tests import compile_cache
from tests.compile_cache import ROOT, Source, files_of

HERE = Path(__file__).parent
FOLDER = ROOT / "build" / "pretend"
TORCH = Path(torch.__file__).parent
ENTRIES = sorted((ROOT / "csrc").glob("*/*_cuda.cu"))
# The only file that includes torch's headers, and the files that it consists of.
TORCH_SIDE = HERE / "torch_side.cpp"
DEVICES = sorted({*HERE.glob("*.cpp")} - {*files_of(TORCH_SIDE, [HERE])})

FLAGS = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-unknown-pragmas"]
FOLDERS = [HERE / "include", ROOT / "csrc", HERE]
TORCH_HEADERS = ["-isystem", str(TORCH / "include")]
TORCH_HEADERS += ["-isystem", str(TORCH / "include/torch/csrc/api/include")]
# torch's headers take most of the time: no optimisation for code that waits for ATen anyway.
TORCH_FLAGS = [*FLAGS, "-O0"]
ENTRY_FLAGS = [*FLAGS, "-x", "c++"]
ENTRY_FLAGS += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA", "-DPRETEND_ENTRIES"]
ENTRY_FLAGS += ["-include", "tests/pretend/include/count_entries.h"]
# Every load and store calls the race detector (accesses.cpp); libtsan is not linked.
ENTRY_FLAGS += ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]
ENTRY_FLAGS += ["-U__SANITIZE_THREAD__"]
LINK = ["-L", str(TORCH / "lib"), "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{TORCH / 'lib'}"]


class Libraries(NamedTuple):
    """The paths of the two shared libraries."""

    devices: Path
    entries: Path


def build() -> Libraries:
    """Compile what is not in the cache and return the libraries."""
    devices, entries = objects()
    library = compile_cache.link("pretend_devices", devices, LINK)
    linked = [str(library), *LINK]
    return Libraries(library, compile_cache.link("pretend_entries", entries, linked))


def objects() -> tuple[list[Path], list[Path]]:
    """Compile what is not in the cache; return the objects of the devices and of the entries."""
    torch_side = Source(TORCH_SIDE, TORCH_FLAGS, FOLDERS, TORCH_HEADERS)  # takes the longest
    devices = [torch_side, *(Source(path, FLAGS, FOLDERS) for path in DEVICES)]
    entries = [Source(path, ENTRY_FLAGS, FOLDERS, TORCH_HEADERS) for path in ENTRIES]
    built = compile_cache.build("pretend", [*devices, *entries])
    return built[: len(devices)], built[len(devices) :]


if __name__ == "__main__":
    print(*build(), sep="\n")
