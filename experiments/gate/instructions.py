"""Count the instructions of the gate's points with callgrind, on a loaded machine too.

Each side runs once in its own process under valgrind. Both run at the same time, because counts do
not depend on the load of the machine. Torch is imported and the points are built without
instrumentation. Then each point is executed on every batch of the pool, and REPEATS times on the
first batch with counting on. The smallest count is taken, because Python's caches change during the
first ones.
Two numbers result: all instructions of the call, Python and torch included, and those within
emblib's own library.

Counting is switched on and off from inside by valgrind's client requests. A request is a sequence
of instructions without effect, which valgrind recognises; they are written into an executable page,
so that no compiler is needed. Valgrind does not know AVX-512, so the AVX2 kernels are counted.

At the top this file imports nothing that imports emblib, as `worker.py`: see there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.paths import ROOT

if TYPE_CHECKING:  # `main` chooses the emblib to import before anything else may import it
    from experiments.config.schema import Config
    from experiments.gate.points import Setup

Counts = dict[str, dict[str, dict[str, float]]]  # point -> side -> name -> count

REPEATS = 3
LIMIT_SECONDS = 1800  # of a side; about 40 on an idle machine
TOTAL, NATIVE = "instructions", "native_instructions"
# mov rax, rdi; mov rdx, rsi; rol rdi, 3; 13; 61; 51; xchg rbx, rbx; mov rax, rdx; ret
REQUEST_CODE = bytes.fromhex("4889f8 4889f2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")
DUMP, ZERO, _, _, START, STOP = range(0x43540000, 0x43540006)  # requests of callgrind ("CT")


def reason_not_to_count(config: Config, device: str, *, smoke: bool) -> str:
    """Return why instructions cannot be counted here; empty where they can."""
    if device != "cpu" or config.device.threads != 1:
        return "they are counted on the CPU, with device.threads=1"
    if not config.gate.instructions:
        return "gate.instructions=false"
    if smoke:
        return "this is a smoke run"
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"this needs x86-64, not {platform.machine()}"
    if shutil.which("valgrind") is None:
        return "valgrind is not installed (apt-get install valgrind)"
    return ""


def count(setup: Setup, folders: Mapping[str, str]) -> tuple[Counts, str]:
    """Count the points that each side can build; return the counts, and "" or why there are none.

    `folders` has the folder of the package that a side imports, by the name of the side.
    """
    with tempfile.TemporaryDirectory() as scratch:
        message = Path(scratch) / "setup.pickle"
        message.write_bytes(pickle.dumps(setup))
        runs = {side: _start(side, folder, message) for side, folder in folders.items()}
        counts: Counts = {}
        try:
            for side, process in runs.items():
                _, errors = process.communicate(timeout=LIMIT_SECONDS)
                if process.returncode:
                    lines = [x for x in errors.strip().splitlines() if not x.startswith("==")]
                    return {}, f"{side} failed under valgrind: {(lines or ['no message'])[-1]}"
                for point, side_counts in read_dumps(message.parent / side).items():
                    counts.setdefault(point, {})[side] = side_counts
        except subprocess.TimeoutExpired:
            return {}, f"{side} took more than {LIMIT_SECONDS} s"
        finally:  # where one side failed, the other would run on while times are measured
            for process in runs.values():
                process.kill()
                process.wait()
    return counts, ""


def _start(side: str, folder: str, message: Path) -> subprocess.Popen[str]:
    """Start one side under valgrind; its dumps and names go to a folder next to `message`."""
    folder_of_side = message.parent / side
    folder_of_side.mkdir()
    return subprocess.Popen(
        [
            *("valgrind", "--tool=callgrind", "--instr-atstart=no"),
            f"--callgrind-out-file={folder_of_side}/dump",
            *(sys.executable, "-m", "experiments.gate.instructions", folder, str(message)),
            str(folder_of_side / "names"),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_dumps(folder: Path) -> dict[str, dict[str, float]]:
    """Return the counts per point: the smallest of its dumps, which are numbered in order."""
    names = (folder / "names").read_text().splitlines()
    smallest: dict[str, dict[str, float]] = {}
    for number, name in enumerate(names, 1):
        counts = count_dump((folder / f"dump.{number}").read_text())
        smallest_counts = smallest.setdefault(name, counts)
        smallest[name] = {key: min(smallest_counts[key], value) for key, value in counts.items()}
    return smallest


def count_dump(text: str) -> dict[str, float]:
    """Return all instructions of a dump, and those within a library of emblib.

    A line of cost belongs to the object and function above it. The line after `calls=` has the cost
    of the callee, which has lines of its own. An object is named once and then by its number.
    """
    objects: dict[str, str] = {}
    total = native = 0
    current, of_callee = "", False
    for line in text.splitlines():
        if match := re.match(r"(c?)ob=(\(\d+\))(?: (.+))?", line):
            if match[3]:
                objects[match[2]] = match[3]
            if not match[1]:
                current = objects[match[2]]
        elif line.startswith("calls="):
            of_callee = True
        elif re.match(r"[\d+*-]\S* \d+$", line):
            cost = 0 if of_callee else int(line.rpartition(" ")[2])
            total += cost
            native += cost * ("libemblib_" in current)
            of_callee = False
    return {TOTAL: float(total), NATIVE: float(native)}


class ClientRequests:
    """Valgrind's client requests from Python, by machine code for x86-64."""

    def __init__(self) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        self._page = mmap.mmap(-1, mmap.PAGESIZE, prot=protection)
        self._page.write(REQUEST_CODE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        function = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)
        self._call = function(address)

    def send(self, request: int) -> int:
        """Send a request; return valgrind's answer, 0 where the process does not run under it."""
        words = (ctypes.c_uint64 * 6)(request)
        return int(self._call(ctypes.addressof(words), 0))


def main(package: str, message: str, names: str) -> None:
    """Build the points of a pickled `Setup` from a package, and dump the counts of each."""
    from experiments.gate.worker import import_from

    import_from(package)
    from experiments.gate.bench import Bench

    bench, requests = Bench(pickle.loads(Path(message).read_bytes())), ClientRequests()
    bench.build()
    bench.settle()
    dumped = []
    for name, ready in bench.ready.items():
        for batch in range(bench.setup.config.timing.pool):
            ready.run(batch)
        for _ in range(REPEATS):
            for request in (ZERO, START):
                requests.send(request)
            ready.run(0)
            for request in (STOP, DUMP):
                requests.send(request)
            dumped.append(name)
    Path(names).write_text("\n".join(dumped))


if __name__ == "__main__":
    main(*sys.argv[1:])
