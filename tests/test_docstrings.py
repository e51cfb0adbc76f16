"""Docstrings: texts of arguments begin with their noun, exports have examples, and these run."""

import ast
import doctest
import importlib
import inspect
import io
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

import emblib

ROOT = Path(__file__).resolve().parents[1]

# The text of an argument begins with what the argument is, not with how it relates to something.
NO_NOUNS = re.compile(
    r"(of|in|for|from|with|by|as|if|what|where|which|whose|when|that|on|at|to|into|over|between"
    r"|within|until|while|since|than|per|like|its|their|likewise|see|takes|gets|provides|returns"
    r"|called|created|added|stored|made|has|must)\b",
    re.IGNORECASE,
)
# Nor does a docstring: it begins with a verb, or with a noun for a class.
NO_VERBS = re.compile(
    r"(What|How|Which|Whether|Of|Where|When|Who|As|If|For|In|On|To|From|By|Everything|Those|All|Its"
    r"|Both|Likewise)\b"
)
# Rooms of the harness whose docstrings are not in this form yet.
UNREAD = ("experiments/gate/", "experiments/kind_reports/")
SECTION = re.compile(r"(Args|Attributes):")
ENTRY = re.compile(r"(\*{0,2}\w+(?:, \*{0,2}\w+)*): (.+)")

# Packages whose names all have an example.
PACKAGES = (
    emblib,
    emblib.init,
    emblib.jagged,
    emblib.online,
    emblib.optim,
    emblib.sharding,
    emblib.storage,
    emblib.trace,
)
# For those who write a kind of storage or a table module, not for those who use them.
WITHOUT_EXAMPLE = {
    "Hyper",
    "Initializer",
    "RowTimes",
    "Storage",
    "TableDescription",
    "TableModule",
    "TensorLayout",
    "count_largest_",
    "ensemble_",
    "register",
}


class Entry(NamedTuple):
    """The first line of the text of an argument or attribute."""

    section: str
    names: str
    text: str


Documented = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _entries(node: Documented) -> Iterator[Entry]:
    section = None
    for line in (ast.get_docstring(node) or "").splitlines():
        if found := SECTION.fullmatch(line):
            section = found[1]
        elif line and not line.startswith(" "):
            section = None
        elif section and (found := ENTRY.fullmatch(line.removeprefix("    "))):
            yield Entry(section, found[1], found[2])


@cache
def _documented() -> list[tuple[str, Documented]]:
    return [
        (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node)
        for folder in ("emblib", "experiments")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in _statements(ast.parse(path.read_text()))
        if isinstance(node, Documented)
    ]


def _statements(module: ast.Module) -> list[ast.AST]:
    """Return all statements, also those in others; `ast.walk` takes ten times as long."""
    nodes: list[ast.AST] = [module]
    for node in nodes:
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            nodes += getattr(node, field, ())
    return nodes


def _argument_names(node: Documented) -> set[str]:
    """Return the arguments of a function, or those of a class's constructor and its fields."""
    if isinstance(node, ast.ClassDef):
        names = {
            statement.target.id
            for statement in node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        }
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name in ("__init__", "__new__"):
                names |= _argument_names(method)
        return names
    args = node.args
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    return {arg.arg for arg in every if arg is not None}


def _classes_of_the_harness() -> dict[str, ast.ClassDef]:
    nodes = (node for place, node in _documented() if place.startswith("experiments/"))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def _documented_methods(name: str, classes: dict[str, ast.ClassDef]) -> set[str]:
    """Return the methods that a class or a base of it documents."""
    if name not in classes:
        return {"forward"} if name == "Module" else set()
    bases = {ast.unparse(base).rpartition(".")[2] for base in classes[name].bases}
    inherited = set().union(*(_documented_methods(base, classes) for base in bases))
    methods = [m for m in classes[name].body if isinstance(m, ast.FunctionDef)]
    return inherited | {m.name for m in methods if ast.get_docstring(m)}


def test_methods_of_the_harness_have_or_inherit_a_docstring() -> None:
    classes = _classes_of_the_harness()
    bad = [
        f"{name}.{method.name}"
        for name, node in classes.items()
        if not name.startswith("_")
        for method in node.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
        if method.name not in _documented_methods(name, classes)
    ]
    assert not bad, "\n".join(bad)


def test_texts_of_arguments_begin_with_a_noun() -> None:
    bad = [
        f"{place}: {entry.names}: {entry.text}"
        for place, node in _documented()
        for entry in _entries(node)
        if NO_NOUNS.match(entry.text)
    ]
    assert not bad, 'write "rounding: how updates are rounded", not "of updates":\n' + "\n".join(
        bad
    )


def test_docstrings_begin_with_a_verb_or_noun() -> None:
    bad = [
        f"{place}: {line.splitlines()[0]}"
        for place, node in _documented()
        if not place.startswith(UNREAD) and NO_VERBS.match(line := ast.get_docstring(node) or "")
    ]
    assert not bad, "\n".join(bad)


def test_documented_arguments_exist() -> None:
    bad = [
        f"{place}: {name}"
        for place, node in _documented()
        for entry in _entries(node)
        if entry.section == "Args"
        for name in entry.names.replace("*", "").split(", ")
        if name not in _argument_names(node)
    ]
    assert not bad, "not among the arguments:\n" + "\n".join(bad)


def _modules() -> Iterator[ModuleType]:
    yield emblib
    for info in pkgutil.walk_packages(emblib.__path__, "emblib."):
        if not info.name.startswith("emblib.libemblib"):  # the native libraries
            try:
                yield importlib.import_module(info.name)
            except ImportError:
                assert info.name == "emblib.metrics"  # without the optional torchmetrics


def test_examples_print_what_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example is complete after `import emblib, torch`, in a folder of its own."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    examples = {
        example.name: example
        for module in _modules()
        for example in finder.find(module, extraglobs={})
        if example.examples
    }
    assert len(examples) > 150
    report = io.StringIO()
    with torch.random.fork_rng(devices=[]):
        for number, example in enumerate(examples.values()):
            folder = tmp_path / str(number)
            folder.mkdir()
            monkeypatch.chdir(folder)
            torch.manual_seed(0)
            example.globs = {"emblib": emblib, "torch": torch}
            runner.run(example, out=report.write)
    assert runner.failures == 0, report.getvalue()


def test_exports_have_an_example() -> None:
    bad = []
    for package in PACKAGES:
        names = getattr(package, "__all__", None) or [
            name
            for name, value in vars(package).items()
            if inspect.isclass(value) and value.__module__ == package.__name__
        ]
        for name in names:
            value = getattr(package, name)
            if (inspect.isclass(value) or inspect.isfunction(value)) and (
                name not in WITHOUT_EXAMPLE and ">>> " not in (value.__doc__ or "")
            ):
                bad.append(f"{package.__name__}.{name}")
    assert not bad, "without an example in the docstring:\n" + "\n".join(bad)
