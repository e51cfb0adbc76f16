"""What the products of tensor trains take on a GPU: a model from compiled loops, and bytes."""

from __future__ import annotations

import re
from typing import NamedTuple

from emblib.tt.shapes import dim_factors
from tests.simt.compiled import ARCHITECTURES, Compiled, compiled_kernels

_PRODUCT = 16 * 8 * 8  # multiplications of an instruction on tensor cores
_SCHEDULERS = 4  # instructions per clock of a multiprocessor
_FLOAT = 4
DIMS, RANKS = (16, 64, 128), (8, 16, 32, 64)


class Peaks(NamedTuple):
    """Multiply-adds per clock of a multiprocessor: float32, and tensor cores by type of products.

    From NVIDIA's whitepapers of A100 and H100, dense.
    """

    float32: int
    tensor: dict[str, int]


PEAKS = {
    "sm_80": Peaks(64, {"Tf32x3": 512, "Tf32": 512, "Bf16": 1024}),
    "sm_90": Peaks(128, {"Tf32x3": 1024, "Tf32": 1024, "Bf16": 2048}),
}
_PARTS = {"Tf32x3": 3, "Tf32": 1, "Bf16": 1}  # instructions per product


def multiply_adds(kernel: Compiled) -> float:
    """Return the multiply-adds per clock that the main loop allows, all else for free.

    The loop takes the clocks of its instructions, four per clock, or those of the tensor cores.
    """
    assert kernel.loop is not None
    instructions, products = kernel.loop
    kind = kind_of(kernel)
    tensor = products * _PRODUCT / PEAKS[kernel.architecture].tensor[kind]
    clocks = max(instructions / _SCHEDULERS, tensor)
    return products * _PRODUCT / _PARTS[kind] / clocks


def kind_of(kernel: Compiled) -> str:
    """Return the type of a kernel's products."""
    found = re.search(r"<(\w+)>", kernel.name)
    assert found is not None
    return found[1]


def loop_table() -> list[str]:
    """Return the lines of the table of kernels with products on tensor cores."""
    titles = ("products", "loop", "copies", "model: per clock", "model: of float32")
    heads = [f"{title} {a}" for a in ARCHITECTURES for title in titles]
    lines = [f"| kernel | {' | '.join(heads)} |", f"| --- |{' ---: |' * len(heads)}"]
    by_name: dict[str, list[Compiled]] = {}
    for kernel in (kernel for a in ARCHITECTURES for kernel in compiled_kernels(a)):
        if kernel.tensor:
            by_name.setdefault(kernel.name, []).append(kernel)
    for name, kernels in sorted(by_name.items()):
        cells = [cell for kernel in kernels for cell in _cells(kernel)]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return lines


def _cells(kernel: Compiled) -> list[str]:
    assert kernel.loop is not None
    rate = multiply_adds(kernel)
    share = rate / PEAKS[kernel.architecture].float32
    loop = f"{kernel.loop[0]} for {kernel.loop[1]}"
    return [str(kernel.tensor), loop, str(kernel.copies), f"{rate:.0f}", f"{100 * share:.0f} %"]


def byte_table() -> list[str]:
    """Return the lines of the table of multiply-adds and bytes by dim and rank."""
    lines = [
        "| dim | rank | left half: MACs | bytes | per byte | row: MACs | bytes | per byte "
        "| right gradients: bytes | per byte |",
        f"| ---: |{' ---: |' * 9}",
    ]
    for dim in DIMS:
        first, second, last = dim_factors(dim, 3)
        for rank in RANKS:
            columns = first * second
            pair, value = columns * rank * rank, columns * rank * _FLOAT
            row = dim * rank
            row_bytes, right_bytes = (last * rank + dim) * _FLOAT, value + dim * _FLOAT
            cells = [
                *(f"{dim} = {first}·{second}·{last}", rank, f"{pair:,}", f"{value:,}"),
                *(f"{pair / value:.1f}", f"{row:,}", f"{row_bytes:,}", f"{row / row_bytes:.1f}"),
                *(f"{right_bytes:,}", f"{row / right_bytes:.1f}"),
            ]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines
