"""Check kernels compiled by nvcc for spilled registers, and the CUDA library for missing ops.

Kernels are read from the CUDA library if it has code for the architecture. Otherwise the hot
kernels are compiled. Continuous integration builds the library for sm_90 only.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import emblib
from tests.simt.compiled import (
    ARCHITECTURES,
    BLACKWELL,
    NVCC,
    Compiled,
    blackwell_kernels,
    compiled_kernels,
    cuobjdump,
    library_kernels,
    nvcc_release,
)
from tests.simt.performance_page import (
    COMMAND,
    PAGE,
    cells,
    recorded,
    recorded_tensor_part,
    tensor_part,
)
from tests.simt.tt_model import PEAKS, multiply_adds
from tests.test_schema import CPU_ONLY

MOST_REGISTERS = 96
# These run in a few blocks while a training step runs: loads in flight count, occupancy does not.
MOST_REGISTERS_OF_MOVES = {"move_kernel": 128, "flush_kernel": 128}
# Bytes of local memory. nvcc 13.0 for sm_90; these kernels are not hot.
SPILLS = {"hash_add_rows_kernel<bfloat16>": 16}
# Stored and loaded bytes per thread. nvcc 13.0 spills 28 bytes or fewer in two kernels for sm_100,
# and in 13 for sm_120.
MOST_SPILLS_ON_BLACKWELL = 28
MOST_SPILLING_ON_BLACKWELL = 13
# Quads of rows that a lane has in flight: two of each of eight rows of a bag, or of eight bags.
# nvcc 13.0 for sm_90 begins to convert the first of these before the last three or four loads.
QUANT_LOADS = {
    "quant_pool_kernel<8>": 16,
    "quant_pool_kernel<4>": 16,
    "quant_short_bags_kernel<8>": 13,
    "quant_short_bags_kernel<4>": 12,
}
# Gradients of rows that a lane of an update has in flight, 16 bytes each.
UPDATE_LOADS = {
    "update_kernel<Compiled<Sgd> >": 4,
    "update_kernel<Compiled<Narrow<Sgd> > >": 4,
    "update_kernel<Compiled<Adagrad> >": 4,
    "update_kernel<Compiled<RowwiseAdagrad> >": 4,
    "update_kernel<Compiled<Adam> >": 4,
    "update_kernel<GradientOnly>": 4,
    "update_kernel<AtRunTime>": 4,
}

# Two loads of 16 bytes for each of up to four lines of a lane.
RIGHT_PARTIALS, RIGHT_LOADS, RIGHT_REGISTERS = "right_partials_kernel<true>", 6, 72

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


def kernels_for(architecture: str) -> tuple[Compiled, ...]:
    return library_kernels(architecture) or compiled_kernels(architecture)


@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hot_kernels_do_not_spill(architecture: str) -> None:
    kernels = kernels_for(architecture)
    assert len(kernels) >= 25
    for kernel in kernels:
        assert kernel.spills <= SPILLS.get(kernel.name, 0), kernel
        most = MOST_REGISTERS_OF_MOVES.get(kernel.name, MOST_REGISTERS)
        assert kernel.registers <= most, kernel


@needs_nvcc
@pytest.mark.parametrize("architecture", BLACKWELL)
def test_hot_kernels_spill_little_on_blackwell(architecture: str) -> None:
    kernels = [k for k in blackwell_kernels() if k.architecture == architecture]
    assert len(kernels) >= 25
    hot = [kernel for kernel in kernels if not kernel.name.startswith("hash_add_rows_kernel")]
    spilling = [kernel for kernel in hot if kernel.spills]
    assert len(spilling) <= MOST_SPILLING_ON_BLACKWELL, spilling
    assert all(kernel.spills <= MOST_SPILLS_ON_BLACKWELL for kernel in spilling), spilling
    for kernel in kernels:
        assert kernel.registers <= 128, kernel


@needs_nvcc
@pytest.mark.skipif(cuobjdump() is None, reason="needs cuobjdump")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_rows_are_in_flight_before_the_first_is_used(architecture: str) -> None:
    """The compiler serialises them where registers are short."""
    found = {kernel.name: kernel.in_flight for kernel in kernels_for(architecture)}
    for name, loads in (QUANT_LOADS | UPDATE_LOADS).items():
        count = found[name]
        assert count is not None
        assert count >= loads, name


@needs_nvcc
@pytest.mark.skipif(cuobjdump() is None, reason="needs cuobjdump")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_lines_of_right_gradients_are_in_flight_together(architecture: str) -> None:
    kernel = next(k for k in kernels_for(architecture) if k.name == RIGHT_PARTIALS)
    assert kernel.in_flight is not None
    assert kernel.in_flight >= RIGHT_LOADS, kernel
    assert kernel.registers <= RIGHT_REGISTERS, kernel


@needs_nvcc
@pytest.mark.skipif(cuobjdump() is None, reason="needs cuobjdump")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_page_on_performance_is_of_these_kernels(architecture: str) -> None:
    """Numbers that rise are a regression to explain; those that fall must be written down too."""
    skip_if_of_another_compiler()
    expected = recorded(architecture)
    found = {k.name: cells(k) for k in kernels_for(architecture) if k.name in expected}
    assert found == expected, f"if that is meant: {COMMAND}"


@needs_nvcc
@pytest.mark.skipif(cuobjdump() is None, reason="needs cuobjdump")
def test_the_page_on_tensor_cores_is_of_these_kernels() -> None:
    skip_if_of_another_compiler()
    assert recorded_tensor_part() == tensor_part(), f"if that is meant: {COMMAND}"


def skip_if_of_another_compiler() -> None:
    if f"nvcc {nvcc_release()}." not in PAGE.read_text():
        pytest.skip("the page is of another compiler")


@needs_nvcc
@pytest.mark.skipif(cuobjdump() is None, reason="needs cuobjdump")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_of_tensor_trains_run_on_tensor_cores(architecture: str) -> None:
    """And the loops of tiles do more per clock than float32 arithmetic could, by the model."""
    kernels = [kernel for kernel in kernels_for(architecture) if kernel.tensor]
    names = {kernel.name.partition("<")[0] for kernel in kernels}
    tiled = {"expand_kernel", "inner_grads_kernel", "outer_grads_kernel"}
    assert names == tiled | {"mma_rows_kernel", "mma_left_grads_kernel"}
    assert len(kernels) == len(names) * 3
    for kernel in kernels:
        if kernel.name.partition("<")[0] not in tiled:
            continue
        assert kernel.copies, f"{kernel.name} does not copy asynchronously"
        assert multiply_adds(kernel) > PEAKS[architecture].float32, kernel


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
