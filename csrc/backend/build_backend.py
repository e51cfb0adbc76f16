"""Build emblib with scikit-build-core against the torch that is installed, without downloading one.

A build needs the headers of torch's stable ABI, and libtorch_cpu.so to link against, of any torch
>= 2.10. If pyproject.toml required torch for builds, pip would download several gigabytes into its
build environment even where torch is installed. So the hooks below require torch only if the
interpreter finds no such version. They look first in the environment of the build, then with `-E`,
which ignores the PYTHONPATH by which pip hides installed packages. csrc/CMakeLists.txt looks in the
same order, but takes the first torch of any version, and fails if it is too old. A source
distribution needs no torch.
"""

import subprocess
import sys

from scikit_build_core import build
from scikit_build_core.build import *  # noqa: F403  all hooks but those below

TORCH_REQUIREMENT = "torch>=2.10"
_TORCH_CHECK = """
from importlib.metadata import version
assert tuple(map(int, version("torch").split(".")[:2])) >= (2, 10)
"""


def _torch_requirements() -> list[str]:
    """Return [TORCH_REQUIREMENT], or [] if a torch that satisfies it is installed."""
    for options in ([], ["-E"]):
        if not subprocess.run(
            [sys.executable, *options, "-c", _TORCH_CHECK], capture_output=True
        ).returncode:
            return []
    return [TORCH_REQUIREMENT]


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    """Return what the build of a wheel requires besides `build-system.requires`."""
    return build.get_requires_for_build_wheel(config_settings) + _torch_requirements()


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    """Return what an editable install requires besides `build-system.requires`."""
    return build.get_requires_for_build_editable(config_settings) + _torch_requirements()
