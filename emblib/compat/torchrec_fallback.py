"""Fallback to the files of an installed TorchRec, or FBGEMM, for names that emblib does not have.

With `emblib.compat.torchrec.install(fallback=True)`, a module of TorchRec that the tree of emblib's
modules does not have is executed from TorchRec's own file, under its own name. Its imports of
TorchRec resolve to the tree, so that TorchRec's `DLRM` has an `emblib.EmbeddingBagCollection`, and
each name has one type. If a module of the tree does not have a name, or the name raises, TorchRec's
file of this module is executed, too, as a copy under another name, which provides the name. Other
names of the tree stay as they are.

`emblib.compat.fbgemm.install(fallback=True)` does the same with FBGEMM's Python files.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from emblib.compat.raising import RaisesOnUse
from emblib.compat.torchrec_names import RUN_TORCHREC_ITSELF

TORCHREC = "torchrec"
_COPY_PREFIX = "_copy_of_"  # beginning of the names of copies in `sys.modules`
_REMEDY_BY_LIBRARY = {TORCHREC: RUN_TORCHREC_ITSELF}  # advice in error messages


class FallbackError(ImportError):
    """A file of the library, TorchRec or FBGEMM, cannot be executed with emblib's modules."""


class Fallback:
    """The files of an installed library, for names and modules that a tree does not have.

    Args:
        modules: modules of the tree by full name, that of the library itself among them.
        library: name of the library, `torchrec` or `fbgemm_gpu`.

    Raises:
        ModuleNotFoundError: no such library is installed.
    """

    def __init__(self, modules: Mapping[str, ModuleType], library: str = TORCHREC) -> None:
        spec = PathFinder.find_spec(library)
        if spec is None or not spec.submodule_search_locations:
            raise ModuleNotFoundError(
                f"install(fallback=True) takes what emblib lacks from the installed {library}, and "
                f"there is none: pip install {library}, or leave fallback out",
                name=library,
            )
        self._library = library
        self._root = Path(next(iter(spec.submodule_search_locations)))
        self._modules = modules
        self._packages: list[ModuleType] = []  # modules that `install` turned into packages
        self._raising_names: dict[tuple[str, str], Any] = {}  # values by module and name

    def install(self) -> None:
        """Serve the names and modules that the tree does not have, until `uninstall`."""
        for name, module in self._modules.items():
            if self._directory(name).is_dir() and not hasattr(module, "__path__"):
                module.__path__ = []  # so that modules below it are searched
                self._packages.append(module)
            for attribute, value in list(vars(module).items()):
                if self._library == TORCHREC != name and isinstance(value, RaisesOnUse):
                    self._raising_names[name, attribute] = vars(module).pop(attribute)
            vars(module)["fallback"] = self
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Undo `install`, and forget the modules that were executed."""
        sys.meta_path.remove(self)
        for module in self._modules.values():
            vars(module).pop("fallback", None)
        for (name, attribute), value in self._raising_names.items():
            setattr(self._modules[name], attribute, value)
        for module in self._packages:
            del module.__path__
        for name, module in list(sys.modules.items()):
            is_executed = name.startswith(f"{self._library}.")
            is_executed = is_executed and module is not self._modules.get(name)
            if is_executed or name.startswith(f"{_COPY_PREFIX}{self._library}_"):
                del sys.modules[name]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> ModuleSpec | None:
        """Return the spec of the library's file of a module that the tree does not have.

        Python calls this, as the object is in `sys.meta_path`.
        """
        if not name.startswith(f"{self._library}.") or name in self._modules:
            return None
        return PathFinder.find_spec(name, [str(self._directory(name).parent)], target)

    def attribute(self, module: str, name: str) -> Any:
        """Return the value of a name that a module of the tree does not have.

        It is a module of the library below this one, or a value in the library's file.

        Args:
            module: path of the module below the library, "" for the library itself.
            name: the name.

        Raises:
            AttributeError: the library does not have the name either.
            FallbackError: the file cannot be executed with the modules of the tree.
        """
        path = f"{self._library}.{module}" if module else self._library
        if self.find_spec(f"{path}.{name}") is not None:
            return importlib.import_module(f"{path}.{name}")
        raising_value = self._raising_names.get((path, name))
        try:
            copied_module = self._execute_copy(path)
        except FallbackError:
            if raising_value is None:
                raise
            return raising_value
        if copied_module is None or name not in vars(copied_module):
            if raising_value is not None:
                return raising_value
            raise AttributeError(
                f"neither emblib nor {self._library} has {module}.{name}", name=name
            )
        return vars(copied_module)[name]

    def _execute_copy(self, name: str) -> ModuleType | None:
        """Execute the library's file of a module as a copy under another name, once.

        Return the copy; None for the root of the library, and for a module without a file.

        Raises:
            FallbackError: the file raised an error.
        """
        copy_name = _COPY_PREFIX + name.replace(".", "_")
        if copy_name in sys.modules:
            return sys.modules[copy_name]
        source_spec = PathFinder.find_spec(name, [str(self._directory(name).parent)])
        if name == self._library or source_spec is None or source_spec.origin is None:
            return None
        spec = importlib.util.spec_from_file_location(copy_name, source_spec.origin)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[copy_name] = module  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[copy_name]
            raise FallbackError(
                f"{source_spec.origin} cannot be executed over emblib's names of {self._library} "
                f"({type(error).__name__}: {error}). "
                + _REMEDY_BY_LIBRARY.get(self._library, "Name what it lacks in an issue."),
                name=name,
            ) from error
        # The functions of the copy get objects of the tree: both must use the same types.
        tree = vars(self._modules[name]) if name in self._modules else {}
        shared_names = set(tree.get("__all__", ())) & vars(module).keys() & tree.keys()
        vars(module).update({shared_name: tree[shared_name] for shared_name in shared_names})
        return module

    def _directory(self, name: str) -> Path:
        """Return the directory of the modules below a module; it exists if that is a package."""
        return self._root.joinpath(*name.split(".")[1:])
