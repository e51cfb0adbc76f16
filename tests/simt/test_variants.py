"""The emulated kernels once more: threads in the opposite order, under ASan and UBSan."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compile_cache import COMPILER
from tests.simt.library import build

HERE = Path(__file__).parent
VARIANT = "EMBLIB_SIMT_VARIANT"

if VARIANT in os.environ:
    pytest.skip("this is the variant", allow_module_level=True)


@pytest.mark.slow
def test_no_kernel_relies_on_the_order_of_threads_or_touches_foreign_memory() -> None:
    environment = os.environ | {VARIANT: "1", "EMBLIB_SIMT_ORDER": "reverse"}
    runtimes = _sanitizer_runtimes()
    if runtimes:
        build(sanitize=True)
        # Python keeps what it allocates until it exits: leaks are not what this run looks for.
        options = "detect_leaks=0:detect_stack_use_after_return=0"
        environment |= {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": options}
        environment["EMBLIB_SIMT_SANITIZE"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(HERE)]
    command.append(f"--ignore={HERE / 'test_compile.py'}")  # no emulation there
    done = subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


def _sanitizer_runtimes() -> list[str]:
    """Return the paths of the runtimes; empty where the compiler has none."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = [COMPILER, f"-print-file-name={name}"]
        found.append(subprocess.run(command, capture_output=True, text=True).stdout.strip())
    return found if all(Path(path).is_absolute() for path in found) else []
