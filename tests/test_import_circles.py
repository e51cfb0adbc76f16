"""Modules that import each other, counting imports inside functions and for type checkers."""

from pathlib import Path

import pytest

from tests.test_house_rules import _imports, _with_suffix

# A circle through such an import loads, but its modules cannot be understood one by one.
MOST_MODULES_IN_CIRCLES = {"emblib": 8, "experiments": 5}


def _import_graph(package: str) -> dict[str, set[str]]:
    """Return the modules of a package that each of them imports anywhere."""
    modules = {
        ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__"): name
        for name in _with_suffix(".py", under=f"{package}/")
    }
    return {
        module: {used if used in modules else used.rpartition(".")[0] for used in _imports(name)}
        & modules.keys() - {module}
        for module, name in modules.items()
    }


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [*graph[start]]
    while waiting:
        if (module := waiting.pop()) not in found:
            found.add(module)
            waiting += graph[module]
    return found


@pytest.mark.parametrize("package", MOST_MODULES_IN_CIRCLES)
def test_few_modules_are_in_circles(package: str) -> None:
    graph = _import_graph(package)
    reached = {module: _reachable(graph, module) for module in graph}
    bad = [
        f"{module}: {', '.join(sorted(m for m in reached[module] if module in reached[m]))}"
        for module in sorted(graph)
        if module in reached[module]
    ]
    most = MOST_MODULES_IN_CIRCLES[package]
    assert len(bad) <= most, f"more than {most} modules are in circles:\n" + "\n".join(bad)
