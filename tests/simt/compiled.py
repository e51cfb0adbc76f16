"""What nvcc makes of kernels: registers, spills and instructions.

They are read from the CUDA library, if it has code for the architecture, or from the sources
hot_*.cu, compiled for it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import emblib
from tests.compile_cache import ROOT, files_of, kept

NVCC = shutil.which("nvcc")
ARCHITECTURES = ("sm_80", "sm_90")
BLACKWELL = ("sm_100", "sm_120")
_WIDE = ("LDG.E.128", "LD.E.128", "STG.E.128", "STG.E.EF.128", "ST.E.128")


@dataclass(frozen=True)
class Compiled:
    """A kernel for one architecture.

    Attributes:
        name: without namespaces, with template arguments.
        architecture: e.g. sm_80.
        registers: of a thread.
        spills: bytes that are stored to and loaded from local memory; in a library, the bytes of
            local memory of a thread.
        instructions: of the machine code, padding included; None without cuobjdump.
        wide: accesses of global memory of 16 bytes per thread among them.
        in_flight: the most loads of read-only memory that are issued without arithmetic on floats
            between them.
        tensor: products on tensor cores among them.
        copies: asynchronous copies to shared memory among them.
        loop: instructions of the shortest loop with the most products, and these products.
    """

    name: str
    architecture: str
    registers: int
    spills: int
    instructions: int | None = None
    wide: int | None = None
    in_flight: int | None = None
    tensor: int | None = None
    copies: int | None = None
    loop: list[int] | None = None


@cache
def compiled_kernels(architecture: str) -> tuple[Compiled, ...]:
    """Compile the sources hot_*.cu, or read what the cache has of that."""
    sources = sorted(Path(__file__).parent.glob("hot_*.cu"))
    return tuple(kernel for source in sources for kernel in _kernels_of(source, architecture))


@cache
def library_kernels(architecture: str) -> tuple[Compiled, ...]:
    """Read the kernels of emblib in the CUDA library; () if it has no code for the architecture.

    What was read is kept by the content of the library.
    """
    libraries = [Path(folder) / "libemblib_cuda.so" for folder in emblib.__path__]
    library = next((path for path in libraries if path.exists()), None)
    tool = cuobjdump()
    if library is None or tool is None:
        return ()
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    record = kept("compiled-library", ".json", [architecture, digest], [Path(__file__)])
    if not record.exists():
        kernels = _kernels_of_library(tool, library, architecture)
        record.write_text(json.dumps([asdict(kernel) for kernel in kernels]))
    return tuple(Compiled(**kernel) for kernel in json.loads(record.read_text()))


def _kernels_of_library(tool: Path, library: Path, architecture: str) -> list[Compiled]:
    resources = _disassembled(tool, library, "-arch", architecture, "--dump-resource-usage")
    found = re.findall(r"Function (_ZN3emb\w+):\s+REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", resources)
    if not found:
        return []
    codes = _instructions(_disassembled(tool, library, "-arch", architecture, "-sass"))
    names = _demangled([entry for entry, *_ in found])
    kernels = [
        Compiled(
            name,
            architecture,
            int(registers),
            int(stack) + int(local),
            **_counts(codes[entry, architecture]),
        )
        for (entry, registers, stack, local), name in zip(found, names, strict=True)
    ]
    return sorted(kernels, key=lambda kernel: kernel.name)


@cache
def blackwell_kernels() -> tuple[Compiled, ...]:
    """Compile the sources hot_*.cu for `BLACKWELL`, without counting instructions."""
    folder = ROOT / "build" / "simt"
    folder.mkdir(parents=True, exist_ok=True)
    kernels = []
    for source in sorted(Path(__file__).parent.glob("hot_*.cu")):
        log = _compile(source, folder / f"{source.stem}-blackwell.fatbin", BLACKWELL)
        kernels += _parse(log, "")
    return tuple(kernels)


def _kernels_of(source: Path, architecture: str) -> list[Compiled]:
    tool = cuobjdump()
    files = [Path(__file__), *files_of(source, [ROOT / "csrc"])]
    words = [architecture, nvcc_release(), str(tool is None)]
    record = kept(f"compiled-{source.stem}", ".json", words, files)
    if record.exists():
        return [Compiled(**kernel) for kernel in json.loads(record.read_text())]
    folder = ROOT / "build" / "simt"
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / f"{source.stem}-{architecture}.fatbin"
    log = _compile(source, output, [architecture])
    sass = "" if tool is None else _disassembled(tool, output, "-sass")
    kernels = _parse(log, sass)
    record.write_text(json.dumps([asdict(kernel) for kernel in kernels]))
    return kernels


@cache
def nvcc_release() -> str:
    """Return the version of the compiler, e.g. 13.0.88."""
    assert NVCC is not None
    said = subprocess.run([NVCC, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV([\d.]+)", said)
    assert found is not None
    return found[1]


def _compile(source: Path, output: Path, architectures: Sequence[str]) -> str:
    """Return what ptxas -v says."""
    assert NVCC is not None
    # Clusters of blocks are in the PTX of sm_90 and newer; else no kernel differs before ptxas. A
    # fatbin is the device code alone: the host compiler does not run.
    codes = [f"-gencode=arch=compute_{80 if a == 'sm_80' else 90},code={a}" for a in architectures]
    include = ["-I", str(ROOT / "csrc")]
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xptxas=-v", *codes, *include]
    command = [NVCC, *flags, "-fatbin", str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def cuobjdump() -> Path | None:
    """Return the disassembler of the CUDA toolkit or of nvidia-cuda-cuobjdump, None without one."""
    found = shutil.which("cuobjdump")
    if found is not None:
        return Path(found)
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
    return next((path for f in folders for path in f.glob("cu*/bin/cuobjdump")), None)


def _disassembled(tool: Path, binary: Path, *options: str) -> str:
    environment = os.environ | {"PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}
    command = [tool, *options, binary]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return done.stdout


def _parse(log: str, sass: str) -> list[Compiled]:
    resources = re.compile(
        r"Compiling entry function '(\S+)' for '(\S+)'.*?"
        r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
        re.DOTALL,
    )
    codes = _instructions(sass)
    found = resources.findall(log)
    names = _demangled([entry for entry, *_ in found])
    kernels = []
    for (entry, architecture, stores, loads, registers), name in zip(found, names, strict=True):
        numbers = int(registers), int(stores) + int(loads)
        kernel = Compiled(name, architecture, *numbers)
        if (code := codes.get((entry, architecture))) is not None:
            kernel = replace(kernel, **_counts(code))
        kernels.append(kernel)
    return sorted(kernels, key=lambda kernel: (kernel.name, kernel.architecture))


class _Instruction(NamedTuple):
    """An instruction: its address, its name and the rest of it."""

    address: int
    name: str
    arguments: str


def _counts(code: list[_Instruction]) -> dict[str, Any]:
    """Count instructions, those of 16 bytes, loads in flight, products, copies, the main loop."""
    names = [instruction.name for instruction in code]
    return {
        "instructions": len(names),
        "wide": sum(name in _WIDE for name in names),
        "in_flight": _in_flight(names),
        "tensor": sum(_is_product(instruction) for instruction in code),
        "copies": sum(name.startswith("LDGSTS") for name in names),
        "loop": _main_loop(code),
    }


def _is_product(instruction: _Instruction) -> bool:
    return instruction.name.startswith("HMMA")


def _main_loop(code: list[_Instruction]) -> list[int]:
    """Return the instructions and products of the shortest loop with products, none without."""
    numbers = {instruction.address: i for i, instruction in enumerate(code)}
    found = []
    for end, instruction in enumerate(code):
        target = re.search(r"0x([0-9a-f]+)", instruction.arguments)
        if instruction.name.startswith("BRA") and target is not None:
            begin = numbers.get(int(target[1], 16), end)
            products = sum(_is_product(step) for step in code[begin : end + 1])
            if begin < end and products:
                found.append((end + 1 - begin, products))
    most = max((products for _, products in found if products), default=0)
    # A loop that is unrolled has its rest behind it, with fewer products.
    whole = [loop for loop in found if loop[1] >= most / 2]
    return list(min(whole, default=(0, 0)))


def _instructions(sass: str) -> dict[tuple[str, str], list[_Instruction]]:
    """Return the instructions of each function and architecture."""
    found = {}
    architecture = ""
    for part in re.split(r"^\s*(?=Function : |arch = )", sass, flags=re.MULTILINE):
        if part.startswith("arch = "):
            architecture = part.split()[2]
        elif part.startswith("Function : "):
            pattern = r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*)"
            found[part.split()[2], architecture] = [
                _Instruction(int(address, 16), name, rest)
                for address, name, rest in re.findall(pattern, part, re.MULTILINE)
            ]
    return found


def _in_flight(code: list[str]) -> int:
    most = loads = 0
    for name in code:
        if name.startswith(("FADD", "FFMA", "FMUL", "HADD")):
            loads = 0
        elif name.startswith("LDG") and "CONSTANT" in name:
            loads += 1
        most = max(most, loads)
    return most


def _demangled(names: list[str]) -> list[str]:
    command = ["c++filt", "-p"]
    done = subprocess.run(command, input="\n".join(names), capture_output=True, text=True)
    assert done.returncode == 0, "c++filt of binutils is needed"
    return [re.sub(r"\bemb::(cuda::)?", "", name) for name in done.stdout.splitlines()]
