"""TorchRec's modules and names, implemented by emblib's collections and sharding.

Change the import and keep the code:

    import emblib.compat.torchrec as torchrec
    from emblib.compat.torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

or keep the imports, too:

    import emblib.compat.torchrec
    emblib.compat.torchrec.install()  # before anything imports torchrec

With `install(fallback=True)` names that emblib does not have, such as datasets, models and metrics,
come from the installed TorchRec, and use emblib's collections. The modules have TorchRec's paths;
every name that does not raise is in this module as well. `docs/torchrec.md` says of each name
whether it works, differs or raises.
"""

import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from emblib.compat import torchrec_api as _api
from emblib.compat import torchrec_tree as _tree
from emblib.compat.torchrec_script import register_classes as _register_classes

is_of_emblib = True
_names = _api.find_implementations()
globals().update(_names)
_modules = _tree.make_modules(_sys.modules[__name__], _names)
_tree.watch_missing_modules()
_register_classes()
_installation = _tree.Installation(_modules)


def install(*, fallback: bool = False) -> _tree.Installation:
    """Make `import torchrec` import this package.

    The result is a context manager, which undoes the installation at its end.

    Args:
        fallback: whether names and modules that emblib does not have, e.g. datasets, models and
            metrics, come from the installed TorchRec; they use emblib's collections.

    Raises:
        ModuleNotFoundError: `fallback` is set, and TorchRec is not installed.
        RuntimeError: the real torchrec was imported before.
    """
    return _installation.install(fallback=fallback)


def uninstall() -> None:
    """Undo `install`; do nothing if nothing is installed."""
    _installation.uninstall()


if _TYPE_CHECKING:  # type checkers cannot see the names that the table adds

    def __getattr__(name: str) -> _Any: ...


__all__ = ["install", "uninstall", *_names]
