"""Build emblib with scikit-build-core against the torch that is installed, without downloading one.

The libraries need the headers of torch's stable ABI and the name of one of its libraries, of any
torch >= 2.10. Listed in pyproject.toml, torch would be downloaded into pip's build environment,
several gigabytes, also where it is installed. So it is required for a build only if the interpreter
has none of its own: `-E` ignores the PYTHONPATH by which pip hides the packages that are installed
(csrc/CMakeLists.txt finds torch in the same way). Source distributions need no torch at all.
"""

import subprocess
import sys

from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403  the hooks that need no torch

TORCH = "torch>=2.10"
_FIND = """
from importlib.metadata import version
assert tuple(map(int, version("torch").split(".")[:2])) >= (2, 10)
"""


def _torch_requirement() -> list[str]:
    """Return the requirement for torch, or nothing if this interpreter can import one."""
    for options in ([], ["-E"]):
        if not subprocess.run(
            [sys.executable, *options, "-c", _FIND], capture_output=True
        ).returncode:
            return []
    return [TORCH]


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """Return what a build of a wheel needs besides `build-system.requires`."""
    return build.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    """Return what an editable install needs besides `build-system.requires`."""
    return build.get_requires_for_build_editable(config_settings) + _torch_requirement()
