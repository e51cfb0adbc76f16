"""Count the instructions of the gate's points with callgrind, even on a loaded machine.

Each side runs once in its own process under valgrind. Both run at the same time, because counts do
not depend on the load of the machine. Torch is imported and the points are built without
instrumentation. Then each point is executed on every batch of the pool, and NUM_COUNTED_CALLS times
on the first batch with counting on. The smallest count is taken, because Python's caches change
during the first calls. Two numbers result: all instructions of the call, Python and torch included,
and those within emblib's own library.

Counting is switched on and off from inside by valgrind's client requests. A request is a sequence
of instructions without effect, which valgrind recognises; they are written into an executable page,
so that no compiler is needed. Valgrind does not know AVX-512, so the AVX2 kernels are counted.

Like worker.py, which says why, this file imports nothing at its top that imports emblib.
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

NUM_COUNTED_CALLS = 3
LIMIT_SECONDS = 1800  # per side, which takes about 40 s on an idle machine
TOTAL, NATIVE = "instructions", "native_instructions"
# mov rax, rdi; mov rdx, rsi; rol rdi, 3; 13; 61; 51; xchg rbx, rbx; mov rax, rdx; ret
REQUEST_CODE = bytes.fromhex("4889f8 4889f2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")
DUMP, ZERO, _, _, START, STOP = range(0x43540000, 0x43540006)  # requests of callgrind ("CT")


def reason_not_to_count(config: Config, device: str, *, smoke: bool) -> str:
    """Return why instructions cannot be counted here; "" if they can."""
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
    """Count the points that each side can build; return the counts, and why some are missing.

    The second result is "" if both sides have counts of every point. If a side failed or took more
    than LIMIT_SECONDS, the first one is {}, although the other side may have counts.

    Args:
        setup: points and settings, the same for both sides.
        folders: folder of the emblib package that a side imports, by the name of the side.
    """
    with tempfile.TemporaryDirectory() as scratch:
        setup_file = Path(scratch) / "setup.pickle"
        setup_file.write_bytes(pickle.dumps(setup))
        processes = {side: _start(side, folder, setup_file) for side, folder in folders.items()}
        counts: Counts = {}
        try:
            for side, process in processes.items():
                _, errors = process.communicate(timeout=LIMIT_SECONDS)
                if process.returncode:
                    lines = [
                        line for line in errors.strip().splitlines() if not line.startswith("==")
                    ]
                    return {}, f"{side} failed under valgrind: {(lines or ['no message'])[-1]}"
                for point, side_counts in read_dumps(setup_file.parent / side).items():
                    counts.setdefault(point, {})[side] = side_counts
        except subprocess.TimeoutExpired:
            return {}, f"{side} took more than {LIMIT_SECONDS} s"
        finally:  # if one side failed, the other would still run while times are measured
            for process in processes.values():
                process.kill()
                process.wait()
    names = [point.name for point in setup.points]
    uncounted_names = [name for name in names if len(counts.get(name, {})) < len(folders)]
    reason = f"not every side could build {', '.join(uncounted_names)} under valgrind" * bool(
        uncounted_names
    )
    return counts, reason


def _start(side: str, package: str, setup_file: Path) -> subprocess.Popen[str]:
    """Start one side under valgrind; its dumps and names go to a folder next to `setup_file`."""
    dump_folder = setup_file.parent / side
    dump_folder.mkdir()
    return subprocess.Popen(
        [
            *("valgrind", "--tool=callgrind", "--instr-atstart=no"),
            f"--callgrind-out-file={dump_folder}/dump",
            *(sys.executable, "-m", "experiments.gate.instructions", package, str(setup_file)),
            str(dump_folder / "names"),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def read_dumps(folder: Path) -> dict[str, dict[str, float]]:
    """Return the smallest counts of the dumps of each point: {point: {name: count}}.

    The file `names` in `folder` has the point of each dump; the dumps are numbered from 1 in this
    order.
    """
    names = (folder / "names").read_text().splitlines()
    smallest: dict[str, dict[str, float]] = {}
    for number, name in enumerate(names, 1):
        counts = count_dump((folder / f"dump.{number}").read_text())
        smallest_counts = smallest.setdefault(name, counts)
        smallest[name] = {key: min(smallest_counts[key], value) for key, value in counts.items()}
    return smallest


def count_dump(text: str) -> dict[str, float]:
    """Return all instructions of a dump (TOTAL), and those within a library of emblib (NATIVE).

    A line of cost belongs to the object above it. The line after `calls=` is not counted, because
    the callee has lines of its own. An object is named once; later lines have its number only.
    """
    objects: dict[str, str] = {}
    total = native = 0
    current_object, is_callee_cost = "", False
    for line in text.splitlines():
        if match := re.match(r"(c?)ob=(\(\d+\))(?: (.+))?", line):
            if match[3]:
                objects[match[2]] = match[3]
            if not match[1]:
                current_object = objects[match[2]]
        elif line.startswith("calls="):
            is_callee_cost = True
        elif re.match(r"[\d+*-]\S* \d+$", line):
            cost = 0 if is_callee_cost else int(line.rpartition(" ")[2])
            total += cost
            native += cost * ("libemblib_" in current_object)
            is_callee_cost = False
    return {TOTAL: float(total), NATIVE: float(native)}


class ClientRequests:
    """Valgrind's client requests from Python, by machine code in an executable page; x86-64 only.

    Raises:
        OSError: the system does not allow executable pages.
    """

    def __init__(self) -> None:
        protection = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        self._page = mmap.mmap(-1, mmap.PAGESIZE, prot=protection)
        self._page.write(REQUEST_CODE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        function = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p, ctypes.c_uint64)
        self._call = function(address)

    def send(self, request: int) -> int:
        """Send a request; return valgrind's answer, or 0 if the process runs without valgrind."""
        request_words = (ctypes.c_uint64 * 6)(request)
        return int(self._call(ctypes.addressof(request_words), 0))


def main(package: str, setup_file: str, names_file: str) -> None:
    """Count the points of one side; the main function of a process under valgrind.

    Callgrind writes a dump per counted call, and this function the names of the dumped points.

    Args:
        package: folder of the emblib package to import; "" for the default.
        setup_file: file with a pickled `Setup`.
        names_file: file to write: the point of each dump, one per line.
    """
    from experiments.gate.worker import import_from

    import_from(package)
    from experiments.gate.bench import Bench

    bench, requests = Bench(pickle.loads(Path(setup_file).read_bytes())), ClientRequests()
    bench.build()
    bench.stop_garbage_collection()
    dumped_names = []
    for name, ready in bench.ready_points.items():
        for batch in range(bench.setup.config.timing.pool):
            ready.timed_phase(batch)
        for _ in range(NUM_COUNTED_CALLS):
            for request in (ZERO, START):
                requests.send(request)
            ready.timed_phase(0)
            for request in (STOP, DUMP):
                requests.send(request)
            dumped_names.append(name)
    Path(names_file).write_text("\n".join(dumped_names))


if __name__ == "__main__":
    main(*sys.argv[1:])
