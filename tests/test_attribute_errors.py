"""An AttributeError inside a property of a module names what is missing, not the property."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import importlib
import inspect
import pkgutil
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import nn

import emblib
from emblib.collections.optimizers import FusedOptimizer
from emblib.sharding import DistributedModelParallel, RankGroup

KNOWN = {*dir(builtins), "torch", "SimpleNamespace"}


def getters() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the getters of all properties of modules of emblib, by qualified name.

    `emblib.compat` is left out: it sees public names only, and calls what shows its errors.
    """
    classes = set()
    for found in pkgutil.walk_packages(emblib.__path__, "emblib."):
        with contextlib.suppress(ImportError):  # kernels, and modules for optional packages
            for value in vars(importlib.import_module(found.name)).values():
                if inspect.isclass(value) and issubclass(value, nn.Module):
                    classes.add(value)
    for module_class in classes:
        path = f"{module_class.__module__}.{module_class.__qualname__}"
        if not path.startswith("emblib.") or path.startswith("emblib.compat."):
            continue
        for name, member in vars(module_class).items():
            if isinstance(member, property) and member.fget is not None:
                yield f"{path}.{name}", member.fget
            elif isinstance(member, functools.cached_property):
                yield f"{path}.{name}", member.func


def calls_emblib(getter: Callable[..., Any]) -> bool:
    """Whether a getter calls anything but builtins, torch and methods of tensors."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(getter)))
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            root: ast.expr = call.func
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id not in KNOWN:
                return True
    return False


def test_getters_that_call_show_their_errors() -> None:
    hidden = [
        name
        for name, getter in getters()
        if not hasattr(getter, "__wrapped__") and calls_emblib(getter)
    ]
    assert not sorted(hidden), "decorate them with emblib.attribute_errors.shows_attribute_errors"


def test_fused_optimizer_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a table module lacked what `FusedOptimizer` reads of it."""
    bags = emblib.EmbeddingBagCollection(
        [emblib.EmbeddingBagConfig(8, 4, "t")], optimizer=emblib.optim.SGD(0.1)
    )
    model = DistributedModelParallel(bags, RankGroup.single())

    def fail(module: nn.Module) -> None:
        raise AttributeError("no grad_anchor")

    monkeypatch.setattr(FusedOptimizer, "of", fail)
    for module in (model, model.module):
        message = r"\.fused_optimizer raised AttributeError: no grad_anchor"
        with pytest.raises(RuntimeError, match=message) as error:
            _ = module.fused_optimizer
        assert isinstance(error.value.__cause__, AttributeError)
