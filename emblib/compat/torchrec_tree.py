"""The tree of modules of `emblib.compat.torchrec`, and its installation as `torchrec`.

Modules are made from the table in `emblib.compat.torchrec_names`. Its entry
`distributed.embeddingbag` becomes `emblib.compat.torchrec.distributed.embeddingbag`, and after
`install()` also `torchrec.distributed.embeddingbag`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from emblib.compat.checks import check_flags
from emblib.compat.raising import raising_class
from emblib.compat.torchrec_fallback import Fallback
from emblib.compat.torchrec_names import DIFFERS, MODULES, RAISES, RUN_TORCHREC_ITSELF

TREE = "emblib.compat.torchrec"  # package that has the tree
TORCHREC = "torchrec"  # name under which the tree is installed


class TreeModule(ModuleType):
    """A module of the tree, with the names that the table has for it.

    It is a package for Python, so that an import of a name that it does not have reaches
    `MissingModules`.
    """

    fallback: Fallback | None  # only while a fallback is installed

    def __getattr__(self, name: str) -> Any:
        """Return the value of a name that the table does not have, from the installed fallback.

        Raises:
            AttributeError: no fallback is installed, or it does not have the name either.
        """
        fallback = vars(self).get("fallback")
        if fallback is None or name.startswith("__"):
            message = f"module {self.__name__!r} has no attribute {name!r}"
            raise AttributeError(f"{message}. {RUN_TORCHREC_ITSELF}", name=name)
        return fallback.attribute(self.__name__.removeprefix(f"{TREE}."), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function of the module that has the module's own name.

        `torchrec.optim.apply_optimizer_in_backward` is a module and a function. TypeError is raised
        if there is no such function.
        """
        function = vars(self).get(self.__name__.rpartition(".")[2])
        if not callable(function):
            raise TypeError(f"module {self.__name__} is not callable")
        return function(*args, **kwargs)


def implementation_names(module: str) -> dict[str, str]:
    """Return emblib's name of each name of a module of TorchRec, a key of `MODULES`."""
    entries = (entry.partition("=") for entry in MODULES[module].split())
    return {name: implementation or name for name, _, implementation in entries}


def make_modules(package: ModuleType, implementations: Mapping[str, Any]) -> dict[str, ModuleType]:
    """Make the modules of the table below `package`, and register them with `sys.modules`.

    Args:
        package: `emblib.compat.torchrec` itself, which stands for TorchRec's root.
        implementations: implementations by emblib's names.

    Returns:
        the modules by their path below `package`, with "" for `package`.

    Raises:
        ImportError: the table has a name that is neither implemented nor raises.
    """
    modules: dict[str, ModuleType] = {"": package}
    raising_names = {
        name: raising_class(name, f"{reason}. {RUN_TORCHREC_ITSELF}")
        for name, reason in RAISES.items()
    }
    missing_names = []
    for path in MODULES:
        module = modules.setdefault(path, TreeModule(f"{TREE}.{path}"))
        if path:
            module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
            module.__package__ = module.__name__
            module.__doc__ = f"Names of TorchRec's module torchrec.{path}; see docs/torchrec.md."
            module.__path__ = []
        names = implementation_names(path)
        for name, implementation in names.items():
            if implementation in implementations:
                setattr(module, name, implementations[implementation])
            elif implementation in raising_names:
                setattr(module, name, raising_names[implementation])
            else:
                missing_names.append(f"{path}.{name}")
        if path:
            module.__dict__["__all__"] = sorted(names)
    if missing_names:
        raise ImportError(f"the table of TorchRec's names has no implementation of {missing_names}")
    for path, module in modules.items():
        if path:
            parent, _, name = path.rpartition(".")
            setattr(modules[parent], name, module)
            sys.modules[f"{TREE}.{path}"] = module
    return modules


class MissingModules:
    """Finder that raises, with advice, for modules and names that the tree does not have.

    If `from module import name` finds no such attribute, Python searches a module of this name, and
    ignores a ModuleNotFoundError whose `name` is that module. The errors therefore have the name of
    the package.
    """

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> None:
        """Raise ModuleNotFoundError for a module of the tree; return None for all others."""
        for root in (TREE, TORCHREC):
            installed: Any = sys.modules.get(root)
            if name.startswith(f"{root}.") and getattr(installed, "is_of_emblib", False):
                similar_names = get_close_matches(
                    name.removeprefix(f"{root}."), filter(None, MODULES), 3
                )
                other_source = (
                    "emblib.compat.torchrec.install(fallback=True) takes it from an installed "
                    f"torchrec. {RUN_TORCHREC_ITSELF}"
                )
                if "fallback" in vars(installed):
                    other_source = "The installed torchrec has none either"
                raise ModuleNotFoundError(
                    f"{name}: emblib has no counterpart of this module or name of TorchRec"
                    + (f"; it has {', '.join(similar_names)}" if similar_names else "")
                    + f". {other_source}",
                    name=root,
                )


class Installation:
    """Installation of the tree under the name `torchrec`; at the end of a context it is undone.

    Args:
        modules: result of `make_modules`.
    """

    def __init__(self, modules: Mapping[str, ModuleType]) -> None:
        self._modules = {
            f"{TORCHREC}.{path}" if path else TORCHREC: module for path, module in modules.items()
        }
        self._fallback: Fallback | None = None

    def install(self, *, fallback: bool = False) -> Installation:
        """Register the tree as `torchrec`; a second call does nothing, but may add the fallback.

        Args:
            fallback: whether the installed TorchRec serves the names and modules that the tree does
                not have.

        Raises:
            ModuleNotFoundError: `fallback` is set, and TorchRec is not installed.
            RuntimeError: another `torchrec` was imported before.
        """
        check_flags(fallback=fallback)
        root = self._modules[TORCHREC]
        foreign_modules = sorted(
            name
            for name, module in sys.modules.items()
            if (name == TORCHREC or name.startswith(f"{TORCHREC}."))
            and module is not self._modules.get(name)
            and self._fallback is None
        )
        if foreign_modules:
            origin = getattr(sys.modules[foreign_modules[0]], "__file__", None)
            raise RuntimeError(
                f"torchrec is imported already ({foreign_modules[0]} from {origin}), and objects "
                "of it would mix with emblib's: call emblib.compat.torchrec.install() before any "
                "import of torchrec, or import emblib.compat.torchrec as torchrec"
            )
        root.__dict__["is_of_emblib"] = True
        if fallback and self._fallback is None:
            self._fallback = Fallback(self._modules)
            self._fallback.install()
        sys.modules.update(self._modules)
        return self

    def uninstall(self) -> None:
        """Undo `install`, its fallback included; do nothing if nothing is installed."""
        if self._fallback is not None:
            self._fallback.uninstall()
            self._fallback = None
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()


def watch_missing_modules() -> None:
    """Put `MissingModules` last in `sys.meta_path`, once."""
    if not any(finder is MissingModules for finder in sys.meta_path):
        sys.meta_path.append(MissingModules)


def status_of(name: str) -> str:
    """Return "works", "differs" or "raises" for a name of the table."""
    return "raises" if name in RAISES else "differs" if name in DIFFERS else "works"


def iterate_names() -> Iterator[tuple[str, str, str]]:
    """Yield module, TorchRec's name and emblib's name, in the order of the table."""
    for path in MODULES:
        for name, implementation in implementation_names(path).items():
            yield path, name, implementation
