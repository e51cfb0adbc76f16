"""Builds the pretend GPU and the CUDA entries of csrc for it.

Two libraries: the devices with torch's side, and the entries, compiled by the host compiler against
`include/`. Objects are kept by content (tests/compile_cache.py).
"""

from pathlib import Path
from typing import NamedTuple

import torch

from tests import compile_cache
from tests.compile_cache import ROOT, Source

HERE = Path(__file__).parent
FOLDER = ROOT / "build" / "pretend"
TORCH = Path(torch.__file__).parent
# Translation units of several files: compiling takes longest for the headers that files share.
TORCH_SIDE, DEVICES = HERE / "torch_side.cpp", HERE / "devices.cpp"
ENTRIES = sorted((HERE / "entries").glob("*.cpp"))

FLAGS = ["-std=c++20", "-O1", "-fPIC", "-Wall", "-Wno-unknown-pragmas"]
FOLDERS = [HERE / "include", ROOT / "csrc", HERE]
TORCH_HEADERS = ["-isystem", str(TORCH / "include")]
TORCH_HEADERS += ["-isystem", str(TORCH / "include/torch/csrc/api/include")]
# torch's headers take most of the time: no optimisation for code that waits for ATen anyway.
TORCH_FLAGS = [*FLAGS, "-O0"]
ENTRY_FLAGS = [*FLAGS, "-DTORCH_TARGET_VERSION=0x020a000000000000", "-DUSE_CUDA"]
ENTRY_FLAGS += ["-DPRETEND_ENTRIES"]
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
    devices = [
        Source(TORCH_SIDE, TORCH_FLAGS, FOLDERS, TORCH_HEADERS),  # takes the longest
        Source(DEVICES, FLAGS, FOLDERS),
    ]
    entries = [Source(path, ENTRY_FLAGS, FOLDERS, TORCH_HEADERS) for path in ENTRIES]
    built = compile_cache.build("pretend", [*devices, *entries])
    return built[: len(devices)], built[len(devices) :]


if __name__ == "__main__":
    print(*build(), sep="\n")
