"""The switch `EMBLIB_AS_FBGEMM=1`: install emblib as `fbgemm_gpu` in every Python process.

The package puts this file into site-packages as `_emblib_as_fbgemm.py`, with a `.pth` that imports
it in every process whose environment has the variable, not empty and not "0". Ranks, spawned
workers and the children of torchrun inherit the environment, so that no program needs a line of
code.

`EMBLIB_AS_FBGEMM=fallback` lets FBGEMM's Python files serve what emblib lacks, where FBGEMM is
installed: `install(fallback=True)`.

This file imports the standard library only: a finder waits for the first import of `torchrec` or
`fbgemm_gpu`, and only then loads torch and calls `emblib.compat.fbgemm.install()`.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ROOTS = ("fbgemm_gpu", "torchrec")


class InstallOnImport(MetaPathFinder, Loader):
    """A finder and loader that installs emblib's `fbgemm_gpu` before it or TorchRec is imported."""

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Install at the first import of one of `ROOTS`; leave all others to the other finders."""
        if name not in ROOTS:
            return None
        sys.meta_path.remove(self)
        from emblib.compat import fbgemm

        fbgemm.install(fallback=os.environ.get("EMBLIB_AS_FBGEMM") == "fallback")
        spec = sys.modules[name].__spec__ if name in sys.modules else None
        if spec is not None:
            spec.loader = self  # what is imported is the installed module itself
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the installed module."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Execute nothing: the module has its names."""


def watch() -> None:
    """Put the finder first, unless one of the packages is imported or a finder waits already."""
    is_installed = any(
        type(finder).__name__ == InstallOnImport.__name__ for finder in sys.meta_path
    )
    if not is_installed and not any(root in sys.modules for root in ROOTS):
        sys.meta_path.insert(0, InstallOnImport())


if __name__ == "_emblib_as_fbgemm":
    watch()
