"""The switch `EMBLIB_AS_FBGEMM=1`, which installs emblib as `fbgemm_gpu` in every Python process.

The package puts this file into site-packages as `_emblib_as_fbgemm.py`, with a `.pth` file that
imports it if the environment variable is set, and neither empty nor "0". Ranks, spawned workers and
the children of torchrun inherit the environment, so that programs need not be changed.

With `EMBLIB_AS_FBGEMM=fallback`, an installed FBGEMM's Python files serve the names that emblib
does not have: `install(fallback=True)`.

This file imports the standard library only. At the first import of `torchrec` or `fbgemm_gpu` a
finder calls `emblib.compat.fbgemm.install()`, which loads torch.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ROOTS = ("fbgemm_gpu", "torchrec")


class InstallOnImport(MetaPathFinder, Loader):
    """Finder and loader that installs emblib at the first import of `fbgemm_gpu` or TorchRec."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Install if `name` is one of `ROOTS`, and remove this finder; return None for other names.

        The result is the spec of the installed module, or None for TorchRec, which other finders
        find. Raises ValueError for an unknown value of the variable, and the errors of
        `emblib.compat.fbgemm.install`.
        """
        if name not in ROOTS:
            return None
        setting = os.environ.get("EMBLIB_AS_FBGEMM", "1")
        if setting not in ("", "0", "1", "fallback"):
            raise ValueError(f"EMBLIB_AS_FBGEMM must be 0, 1 or fallback, got {setting!r}")
        sys.meta_path.remove(self)
        from emblib.compat import fbgemm

        fbgemm.install(fallback=setting == "fallback")
        spec = sys.modules[name].__spec__ if name in sys.modules else None
        if spec is not None:
            spec.loader = self  # the import returns the installed module itself
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the installed module."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the installed module has its names already."""


def watch() -> None:
    """Put an `InstallOnImport` first, unless there is one or a package of `ROOTS` is imported."""
    is_installed = any(
        type(finder).__name__ == InstallOnImport.__name__ for finder in sys.meta_path
    )
    if not is_installed and not any(root in sys.modules for root in ROOTS):
        sys.meta_path.insert(0, InstallOnImport())


if __name__ == "_emblib_as_fbgemm":
    watch()
