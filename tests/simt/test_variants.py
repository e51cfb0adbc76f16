"""The emulated kernels once more: threads in the opposite order, and under ASan and UBSan."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simt.library import COMPILER, build

HERE = Path(__file__).parent
VARIANT = "EMBLIB_SIMT_VARIANT"

if VARIANT in os.environ:
    pytest.skip("this is the variant", allow_module_level=True)


def _run_suite(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE)]
    command.append(f"--ignore={HERE / 'test_compile.py'}")  # no emulation there
    done = subprocess.run(
        command,
        env=os.environ | {VARIANT: "1"} | environment,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


@pytest.mark.slow
def test_no_kernel_relies_on_the_order_of_threads() -> None:
    _run_suite({"EMBLIB_SIMT_ORDER": "reverse"})


@pytest.mark.slow
def test_no_kernel_touches_foreign_memory() -> None:
    build(sanitize=True)
    runtimes = []
    for name in ("libasan.so", "libubsan.so"):
        found = subprocess.run(
            [COMPILER, f"-print-file-name={name}"], capture_output=True, text=True
        )
        runtimes.append(found.stdout.strip())
    if not all(Path(path).is_absolute() for path in runtimes):
        pytest.skip(f"{COMPILER} has no sanitizer runtimes")
    # Python keeps what it allocates until it exits: leaks are not what this run looks for.
    options = {"ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0"}
    preload = {"LD_PRELOAD": " ".join(runtimes), "EMBLIB_SIMT_SANITIZE": "1"}
    _run_suite(options | preload)
