"""The house rules of CONTRIBUTING.md that a machine can check: sizes, layers, where things may be.

Each test lists every place that breaks its rule. The files are those git tracks or would add.
"""

import ast
import gc
import importlib
import inspect
import itertools
import pkgutil
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import emblib

ROOT = Path(__file__).resolve().parents[1]
NATIVE = {".cpp", ".cu", ".cuh", ".h"}
LIMITED = {".py", ".sh", ".yaml", ".yml", ".css", ".js", *NATIVE}

MOST_LINES_OF_A_FILE = 800  # examples in docstrings not counted
MOST_LINES_OF_A_FUNCTION = 80  # its docstring not counted
MOST_ARGUMENTS = 10  # `self`, `cls` and `ctx` not counted
MOST_BOOLS = 1
MOST_CLASSES_OF_A_CLASS = 3  # of emblib, in its `__mro__`
FEWEST_LINES_OF_A_HELPER = 60
FEWEST_IMPORTERS_OF_A_HELPER = 3
# Those of imports inside functions load, but their modules cannot be understood one by one.
MOST_MODULES_IN_CIRCLES = {"emblib": 8, "experiments": 5}
SMALL_FILES = {
    # Imported lazily, as it loads torch's compiler.
    "emblib/tables/disabled_call.py",
    # A public module.
    "emblib/checkpoints.py",
    # Copied into site-packages by the build, and imported from there before anything else.
    "emblib/compat/fbgemm_switch.py",
    # Between two layers: tables, and the collections that share them.
    "emblib/tables/reading.py",
    # Loaded by name: a contender, and kinds of experiments.
    "experiments/contenders/cykhash.py",
    "experiments/kind_reports/time.py",
    "experiments/kinds/gate.py",
    "experiments/kinds/timing.py",
}

# Layers of emblib, lowest first: a module may import from the layers below its own and from itself.
# Two entries on one line do not see each other. `emblib/__init__.py` is above all of them, and
# `emblib.compat` above that.
LAYERS = (
    (
        "emblib.attribute_errors",
        "emblib.tt",
        "emblib.columns",
        "emblib.context_values",
        "emblib.grad_mode",
        "emblib.torch_names",
    ),
    ("emblib.init",),
    ("emblib.specs",),
    ("emblib.optim",),
    ("emblib.reference", "emblib.ops"),
    ("emblib.tables",),
    ("emblib.dynamic",),
    ("emblib.trace", "emblib.checkpoints", "emblib.jagged"),
    ("emblib.storage",),
    ("emblib.collections",),
    ("emblib.sharding",),
    (
        "emblib.inference",
        "emblib.memory_plan",
        "emblib.metrics",
        "emblib.captured_step",
        "emblib.migration",
        "emblib.telemetry",
    ),
    ("emblib.online",),
)
# The same of the harness; `experiments/__init__.py` says what each is.
LAYERS_OF_THE_HARNESS = (
    "paths",
    "contenders.registry",
    "config",
    "workloads",
    "machine",
    "timing",
    "contenders",
    "quality",
    "results",
    "measure",
    "kinds",
    "report",
    "kind_reports",
    "configure",
    "run",
    "gate",
    "bundle",
    "compare",
    "evidence",
    "front_page",
    "doctor",
    "gallery",
    "launch",
    "listing",
    "reference",
    "table_statistics",
    "cli",
)
# What the library never imports: it depends on torch alone (`emblib.metrics` also on torchmetrics).
OUTSIDE = {
    "experiments",
    "tests",
    "run",
    "hydra",
    "omegaconf",
    "numpy",
    "pandas",
    "matplotlib",
    "scipy",
}
PEERS = {"fbgemm_gpu", "torchrec", "tensorly", "tltorch", "torch_tensorrt", "dynamicemb"}
PEERS_ALLOWED_IN = (
    "examples/dlrm/model.py",
    "examples/migrate_fbgemm.py",
    "examples/migrate_torchrec.py",
    "examples/torchrec_over_emblib.py",
    "experiments/contenders/",
    "tests/bench/",
    "tests/compat/",
)
DISTRIBUTED_ALLOWED_IN = (
    "emblib/sharding/",
    "experiments/contenders/sharded.py",
    "experiments/contenders/torchrec.py",
    "experiments/run/ranks.py",
    "tests/bench/local_ranks.py",
    "tests/bench/node_sums.py",
    "tests/bench/sharded_models.py",
    "tests/bench/sharded_overhead.py",
    "tests/bench/torchrec_over.py",
    "tests/collections/test_distributed_checkpoint.py",
    "tests/compat/test_torchrec_gaps.py",
    "tests/compat/torchrec_blocks.py",
    "tests/contracts/",
    "tests/dynamic/dynamic_ranks.py",
    "tests/dynamic/test_state_dict_parts.py",
    "tests/dynamic/test_wrong_use.py",
    "tests/pretend/nccl.py",
    "tests/sharding/",
    "tests/tables/test_distributed_checkpoint.py",
)

# The headers of the entries: besides `*_cpu.cpp`, `*_cuda.cu` and `schema.cpp`, only these may
# include torch or each other. Everything else, all kernels among it, compiles without torch.
# Besides the `check.h` and `entries.h` of every feature.
TORCH_HEADERS = {
    "csrc/core/device_arrays.h",
    "csrc/core/entry.h",
    "csrc/core/output_memory.h",
    "csrc/core/feature_bags.h",
    "csrc/core/launch.h",
    "csrc/core/parallel.h",
    "csrc/group/device_sort.h",
    "csrc/group/group_items.h",
    "csrc/hash/batch.h",
    "csrc/hash/host_store.h",
    "csrc/tbe/grouping.h",
    "csrc/optim/device_states.h",
    "csrc/optim/update_matrix.h",
}


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """Looking through millions of syntax nodes for garbage takes longer than parsing them."""
    gc.disable()
    yield
    for cached in (_functions, _nodes, _tree):
        cached.cache_clear()
    gc.enable()


@cache
def files() -> tuple[str, ...]:
    """Paths relative to the root, of every file that is or would be in the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return tuple(sorted(name for name in set(done.stdout.splitlines()) if (ROOT / name).is_file()))


def _with_suffix(*suffixes: str, under: str = "") -> list[str]:
    return [f for f in files() if Path(f).suffix in suffixes and f.startswith(under)]


@cache
def _text(name: str) -> str:
    return (ROOT / name).read_text()


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse(_text(name), name)


@cache
def _nodes(name: str) -> tuple[ast.AST, ...]:
    return tuple(_walk(_tree(name)))


def _walk(tree: ast.AST) -> list[ast.AST]:
    """Return what `ast.walk` yields, without operators and contexts, in a third of its time."""
    nodes = [tree]
    for node in nodes:
        for value in vars(node).values():
            if value.__class__ is list:
                nodes += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                nodes.append(value)
    return nodes


def _lines(node: ast.AST) -> int:
    return (node.end_lineno or 0) - node.lineno + 1 if isinstance(node, ast.stmt) else 0


# Sizes


EXAMPLE = re.compile(r"^( *)Example:\n(?:\1 +.*\n|\n)+", re.MULTILINE)


def test_files_are_short() -> None:
    """Examples in docstrings do not count: every export has one."""
    long = [(f, EXAMPLE.sub("", _text(f)).count("\n")) for f in _with_suffix(*LIMITED)]
    bad = [f"{f}: {n} lines" for f, n in long if n > MOST_LINES_OF_A_FILE]
    assert not bad, f"more than {MOST_LINES_OF_A_FILE} lines: split by concept\n" + "\n".join(bad)


@cache
def _functions() -> tuple[tuple[str, ast.FunctionDef, list[str]], ...]:
    """Every Python function with its place, and the bases of its class."""
    found = []
    for name in _with_suffix(".py"):
        nodes = _nodes(name)
        bases = {
            node: [ast.unparse(base) for base in parent.bases]
            for parent in nodes
            if isinstance(parent, ast.ClassDef)
            for node in parent.body
            if isinstance(node, ast.FunctionDef)
        }
        for node in nodes:
            if isinstance(node, ast.FunctionDef):
                found.append((f"{name}:{node.lineno} {node.name}", node, bases.get(node, [])))
    return tuple(found)


def _signature_is_given(place: str, node: ast.FunctionDef, bases: list[str]) -> bool:
    """Whether someone else fixes the signature, so that it cannot keep to the limits.

    Exactly these: methods of a `torch.autograd.Function` (forward, backward, setup_context, vmap,
    jvp); functions handed to the dispatcher with `torch.library.register_*`, which follow an op
    schema; overrides of torch's own methods; and what `emblib.compat` offers under another
    library's names.
    """
    if place.startswith("emblib/compat/") and (node.name == "__init__" or node.name[0] != "_"):
        return True
    autograd = any(base.endswith("autograd.Function") for base in bases)
    if autograd and node.name in {"forward", "backward", "setup_context", "vmap", "jvp"}:
        return True
    if any("torch.library.register_" in ast.unparse(d) for d in node.decorator_list):
        return True
    overrides = {"_apply", "state_dict", "load_state_dict", "_save_to_state_dict"}
    return bool(bases) and node.name in overrides


def _arguments(node: ast.FunctionDef) -> list[ast.arg]:
    a = node.args
    every = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    return [arg for arg in every if arg.arg not in {"self", "cls", "ctx"}]


def _is_bool(arg: ast.arg) -> bool:
    return arg.annotation is not None and ast.unparse(arg.annotation) in {"bool", "bool | None"}


def test_functions_are_short() -> None:
    bad = []
    for place, node, _ in _functions():
        docstring = _lines(node.body[0]) if ast.get_docstring(node) is not None else 0
        if (n := _lines(node) - docstring) > MOST_LINES_OF_A_FUNCTION:
            bad.append(f"{place}: {n} lines")
    assert not bad, f"more than {MOST_LINES_OF_A_FUNCTION} lines\n" + "\n".join(bad)


def test_functions_take_few_arguments() -> None:
    bad = [
        f"{place}: {len(_arguments(node))} arguments"
        for place, node, bases in _functions()
        if len(_arguments(node)) > MOST_ARGUMENTS and not _signature_is_given(place, node, bases)
    ]
    assert not bad, f"more than {MOST_ARGUMENTS}: group them in a dataclass\n" + "\n".join(bad)


def test_bools_are_rare_and_named() -> None:
    """At most one a function and keyword-only; pytest passes the arguments of a test by keyword."""
    bad = []
    for place, node, bases in _functions():
        if _signature_is_given(place, node, bases):
            continue
        if sum(map(_is_bool, _arguments(node))) > MOST_BOOLS:
            bad.append(f"{place}: more than {MOST_BOOLS} bool, use an enum or a dataclass")
        positional = [*node.args.posonlyargs, *node.args.args]
        if any(map(_is_bool, positional)) and not node.name.startswith("test_"):
            bad.append(f"{place}: a bool must be keyword-only")
    assert not bad, "\n".join(bad)


# What a file says of itself


def test_every_file_says_what_it_is() -> None:
    python = [
        f for f in _with_suffix(".py") if _text(f).strip() and not ast.get_docstring(_tree(f))
    ]
    native = [f for f in _with_suffix(*NATIVE) if not _text(f).startswith(("// ", "/* "))]
    bad = python + native
    assert not bad, "no docstring or comment at the top:\n" + "\n".join(bad)


def test_every_experiment_asks_a_question() -> None:
    bad = []
    for name in _with_suffix(".yaml", under="conf/experiment/"):
        lines = [line for line in _text(name).splitlines() if not line.startswith("# @package")]
        if not re.fullmatch(r"# Question: .+\?", lines[0]):
            bad.append(f"{name}: {lines[0]!r}")
    assert not bad, "must begin with '# Question: ...?':\n" + "\n".join(bad)


def test_nothing_names_one_machine_or_registry() -> None:
    """No absolute path of somebody's machine, no package index, no unfinished work."""
    # Brackets keep the pattern from finding itself.
    hosts = r"(pyp[i]|pythonhoste[d]|npmj[s]|debia[n])\.(org|com)|download\.pytorc[h]\.org"
    folders = r"(?<![\w.$}])/(wor[k]/|roo[t]/|tm[p]/dev|hom[e]/\w)"
    pattern = re.compile(rf"{hosts}|{folders}|\b(TOD[O]|FIXM[E]|XX[X])\b")
    bad = []
    for name in files():
        try:
            lines = _text(name).splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        bad += [f"{name}:{i}: {m[0]}" for i, s in enumerate(lines, 1) if (m := pattern.search(s))]
    assert not bad, "\n".join(bad)


# Layers


def _imports(name: str) -> set[str]:
    """Dotted names of the modules (and names from modules) that a file imports anywhere."""
    found = set()
    for node in _nodes(name):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: import by full name"
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def _is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_layers_of_the_library() -> None:
    bad = []
    for name in _with_suffix(".py", under="emblib/"):
        module = ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__")
        levels = [i for i, layer in enumerate(LAYERS) for p in layer if _is_in(module, p)]
        if module == "emblib" or _is_in(module, "emblib.compat"):
            continue
        assert levels, f"{name} is in no layer: add it to LAYERS"
        below = tuple(itertools.chain(*LAYERS[: levels[0]]))
        own = next(p for p in LAYERS[levels[0]] if _is_in(module, p))
        bad += [
            f"{name} imports {used}"
            for used in _imports(name)
            if _is_in(used, "emblib") and not any(_is_in(used, p) for p in (*below, own))
        ]
        bad += [f"{name} imports {u}" for u in _imports(name) if u.split(".")[0] in OUTSIDE]
    assert not bad, "\n".join(bad)


def _level(module: str) -> int:
    """Return the layer of a module of the harness; the longest name that it begins with counts."""
    parts = module.split(".")[1:]
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    level = next((LAYERS_OF_THE_HARNESS.index(n) for n in names if n in LAYERS_OF_THE_HARNESS), -1)
    assert level >= 0, f"{module} is in no layer: add it to LAYERS_OF_THE_HARNESS"
    return level


def test_layers_of_the_harness() -> None:
    """Imports at the top and in functions; those for annotations alone may go anywhere."""
    bad = []
    for name in _with_suffix(".py", under="experiments/"):
        module = ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__")
        if module == "experiments":
            continue
        used = _top_level_imports(name)
        for node in _nodes(name):
            if isinstance(node, ast.FunctionDef):
                used |= _top_level_imports_of(node)
        used = {u for u in used if u.startswith("experiments.")}
        bad += [f"{name} imports {u}" for u in used if _level(u) > _level(module)]
    assert not bad, "\n".join(sorted(bad))


def test_the_harness_sees_public_names_only() -> None:
    """`emblib.X`, `from emblib import X` and `from emblib.X import y`, where X is in `__all__`.

    `__file__`, which every module has, tells which of two builds a process runs.
    """
    public = {*emblib.__all__, "__file__"}
    bad = []
    for name in [*_with_suffix(".py", under="experiments/"), "run.py"]:
        used = {u.split(".")[1] for u in _imports(name) if u.startswith("emblib.")}
        for node in _nodes(name):
            if not isinstance(node, ast.Attribute):
                continue
            if isinstance(node.value, ast.Name) and node.value.id == "emblib":
                used.add(node.attr)
            if ast.unparse(node) == "torch.ops.emblib":
                bad.append(f"{name}:{node.lineno}: torch.ops.emblib")
        bad += [f"{name}: emblib.{u}" for u in used if u not in public]
    assert not bad, "not public:\n" + "\n".join(bad)


def test_compat_sees_public_names_only() -> None:
    """The adaptors are written against what every user has."""
    public = {f"emblib.{name}" for name in [*emblib.__all__, "compat"]}
    bad = [
        f"{name} imports {used}"
        for name in _with_suffix(".py", under="emblib/compat/")
        for used in _imports(name)
        if used.split(".")[0] in OUTSIDE
        or (_is_in(used, "emblib") and not any(_is_in(used, p) for p in public))
    ]
    assert not bad, "not public:\n" + "\n".join(bad)


def test_peers_and_distributed_stay_in_their_place() -> None:
    bad = []
    for name in _with_suffix(".py"):
        for used in _imports(name):
            if used.split(".")[0] in PEERS and not name.startswith(PEERS_ALLOWED_IN):
                bad.append(f"{name} imports {used}")
            if _is_in(used, "torch.distributed") and not name.startswith(DISTRIBUTED_ALLOWED_IN):
                bad.append(f"{name} imports {used}")
    assert not bad, "\n".join(bad)


# Shape


@cache
def _importers() -> dict[str, set[str]]:
    """Return the files of the library and the harness that import each Python file."""
    modules = {
        ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__"): name
        for name in _with_suffix(".py")
    }
    found: dict[str, set[str]] = {name: set() for name in modules.values()}
    for name in [*_with_suffix(".py", under="emblib/"), *_with_suffix(".py", under="experiments/")]:
        for used in _imports(name):
            target = modules.get(used) or modules.get(used.rpartition(".")[0])
            if target is not None and target != name:
                found[target].add(name)
    return found


def _is_program(name: str) -> bool:
    return Path(name).name == "__main__.py" or 'if __name__ == "__main__"' in _text(name)


def test_a_small_file_has_several_importers() -> None:
    """A helper of one file belongs into that file."""
    bad = []
    for name, importers in _importers().items():
        lines = _text(name).count("\n")
        if (
            name.startswith(("emblib/", "experiments/"))
            and not name.endswith("__init__.py")
            and lines < FEWEST_LINES_OF_A_HELPER
            and len(importers) < FEWEST_IMPORTERS_OF_A_HELPER
            and not _is_program(name)
            and name not in SMALL_FILES
        ):
            bad.append(f"{name}: {lines} lines, imported by {len(importers)}")
    assert not bad, "fold these into their importers:\n" + "\n".join(bad)


def _top_level_imports(name: str) -> set[str]:
    """Return the modules that are imported when a file is, without those for type checkers."""
    return _top_level_imports_of(_tree(name))


def _top_level_imports_of(tree: ast.AST) -> set[str]:
    found = set()
    pending: list[ast.AST] = [tree]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            if isinstance(node, ast.ImportFrom):
                found.update(f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.Try | ast.With) or (
                isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test)
            ):
                pending.append(node)
    return found


def _import_graph(
    modules: dict[str, str], imports: Callable[[str], set[str]]
) -> dict[str, set[str]]:
    """Return those of the modules, files by name, that each of them imports."""
    return {
        module: {used if used in modules else used.rpartition(".")[0] for used in imports(name)}
        & modules.keys() - {module}
        for module, name in modules.items()
    }


def _check_for_circles(modules: dict[str, str], imports: Callable[[str], set[str]]) -> None:
    try:
        tuple(TopologicalSorter(_import_graph(modules, imports)).static_order())
    except CycleError as error:
        pytest.fail("import circle: " + " -> ".join(error.args[1]))


def _modules(*folders: str) -> dict[str, str]:
    names = [name for folder in folders for name in _with_suffix(".py", under=f"{folder}/")]
    return {
        ".".join(Path(name).with_suffix("").parts).removesuffix(".__init__"): name for name in names
    }


@pytest.mark.parametrize("package", ["emblib", "experiments"])
def test_imports_have_no_circles(package: str) -> None:
    _check_for_circles(_modules(package), _top_level_imports)


def test_rooms_without_circles_stay_so() -> None:
    """Imports within functions and those for type checkers included."""
    _check_for_circles(_modules("emblib/sharding", "emblib/collections"), _imports)


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
    """Imports within functions and those for type checkers included."""
    graph = _import_graph(_modules(package), _imports)
    reached = {module: _reachable(graph, module) for module in graph}
    bad = [
        f"{module}: {', '.join(sorted(m for m in reached[module] if module in reached[m]))}"
        for module in sorted(graph)
        if module in reached[module]
    ]
    most = MOST_MODULES_IN_CIRCLES[package]
    assert len(bad) <= most, f"more than {most} modules are in circles:\n" + "\n".join(bad)


def test_grad_modes_survive_interrupts() -> None:
    """`torch.no_grad` and its kin may stay after Ctrl-C, see `emblib.grad_mode`."""
    modes = {"no_grad", "enable_grad", "set_grad_enabled", "_set_grad_enabled"}
    free = ("emblib/compat/", "emblib/reference/", "emblib/grad_mode.py")
    bad = [
        f"{name}:{node.lineno}"
        for name in _with_suffix(".py", under="emblib/")
        if not name.startswith(free)
        for node in _nodes(name)
        if (isinstance(node, ast.Attribute) and node.attr in modes)
        or (isinstance(node, ast.Name) and node.id in modes)
    ]
    assert not bad, "use in_grad_mode or without_gradients in " + ", ".join(bad)


def test_calls_do_not_pack_arguments() -> None:
    """No `f(*(a, b))`: keyword arguments, one per line."""
    bad = [
        f"{name}:{node.lineno}"
        for name in _with_suffix(".py")
        for node in _nodes(name)
        if isinstance(node, ast.Call)
        for argument in node.args
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple)
    ]
    assert not bad, "\n".join(bad)


# Words of names that the library no longer uses: the field has others for what they meant.
RETIRED_WORDS = {"beside", "came", "held", "mine", "ours", "standin", "told", "victim", "victims"}


def _defined_names(file: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every function, class, argument, variable and attribute."""
    for node in _nodes(file):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id


def test_names_have_no_retired_words() -> None:
    bad = [
        f"{file}:{line}: {name}"
        for file in _with_suffix(".py", under="emblib/")
        for line, name in _defined_names(file)
        if RETIRED_WORDS & set(name.replace("StandIn", "standin").lower().split("_"))
    ]
    assert not bad, "use the glossary's words:\n" + "\n".join(sorted(bad))


# Phrases for which plain ones exist: again, is evicted, gets, no process, next to or against; and a
# command that cannot work: a package index does not have emblib.
RETIRED_PHRASES = re.compile(
    r"\b(anew|gives? way|is told|nobody|beside)\b|pip install '?emblib\[", re.IGNORECASE
)


def test_text_has_no_retired_phrases() -> None:
    bad = [
        f"{name}:{number}: {found.group()}"
        for name in _with_suffix(*LIMITED, ".md", ".jinja")
        if not name.startswith(("tests/test_house_rules.py", "CHANGELOG.md", "reports/reference/"))
        for number, line in enumerate(_text(name).splitlines(), 1)
        if (found := RETIRED_PHRASES.search(line))
    ]
    assert not bad, "say it in plain words:\n" + "\n".join(bad)


@pytest.mark.parametrize("package", ["emblib", "experiments"])
def test_class_names_are_unique(package: str) -> None:
    """`emblib.compat` has the names of other libraries."""
    places: dict[str, list[str]] = {}
    for name in _with_suffix(".py", under=f"{package}/"):
        for node in _tree(name).body:
            if isinstance(node, ast.ClassDef) and not name.startswith("emblib/compat/"):
                places.setdefault(node.name, []).append(name)
    bad = [f"{name}: {', '.join(files)}" for name, files in places.items() if len(files) > 1]
    assert not bad, "\n".join(bad)


def test_variables_of_the_harness_have_no_function_s_name() -> None:
    """No variable or argument named as a function, class or import of its file."""
    bad = []
    for name in _with_suffix(".py", under="experiments/"):
        imports = [n for n in _tree(name).body if isinstance(n, ast.Import | ast.ImportFrom)]
        taken = {(a.asname or a.name).partition(".")[0] for n in imports for a in n.names}
        taken |= {n.name for n in _tree(name).body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        for function in _nodes(name):
            if not isinstance(function, ast.FunctionDef | ast.Lambda):
                continue
            for node in _walk(function):
                stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                variable = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
                if variable in taken:
                    bad.append(f"{name}:{node.lineno}: {variable}")
    assert not bad, "\n".join(bad)


def test_inheritance_is_shallow() -> None:
    """At most three classes of emblib in a class and its bases, compat's adaptors apart."""
    bad = set()
    for info in pkgutil.walk_packages(emblib.__path__, "emblib."):
        if info.name.startswith(("emblib.compat", "emblib.libemblib")):
            continue
        for value in vars(importlib.import_module(info.name)).values():
            if inspect.isclass(value) and value.__module__.startswith("emblib."):
                bases = [c for c in value.__mro__ if c.__module__.startswith("emblib.")]
                if len(bases) > MOST_CLASSES_OF_A_CLASS:
                    names = ", ".join(c.__name__ for c in bases)
                    bad.add(f"{value.__module__}.{value.__name__}: {names}")
    assert not bad, "\n".join(sorted(bad))


# Native code


def _includes(name: str) -> list[str]:
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', _text(name), re.MULTILINE)


STABLE_ABI = ("torch/csrc/stable/", "torch/headeronly/", "torch/csrc/inductor/aoti_torch/c/")


def _is_torch_header(name: str) -> bool:
    return name in TORCH_HEADERS or (
        name.startswith("csrc/") and name.endswith(("/check.h", "/entries.h"))
    )


def _may_include_torch(name: str) -> bool:
    entry = name.endswith(("_cpu.cpp", "_cuda.cu")) or name == "csrc/schema.cpp"
    return entry or _is_torch_header(name)


def test_torch_stays_at_the_entries() -> None:
    """Kernels and their headers know nothing of torch; the entries know its stable ABI only.

    The pretend GPU is a backend of torch and an example embeds torch, whose interfaces are not in
    the stable ABI.
    """
    bad = []
    for name in _with_suffix(*NATIVE):
        if name.startswith(("tests/pretend/", "examples/")):
            continue
        for header in _includes(name):
            of_torch = header.startswith(("torch/", "ATen/", "c10/"))
            if of_torch and not header.startswith(STABLE_ABI):
                bad.append(f"{name} includes {header}, which is not of the stable ABI")
            if (of_torch or _is_torch_header(f"csrc/{header}")) and not _may_include_torch(name):
                bad.append(f"{name} includes {header}")
    assert not bad, "\n".join(bad)


def test_features_do_not_include_each_other() -> None:
    """A feature's code includes its own folder, core, optim, group and the entries of others."""
    bad = []
    for name in _with_suffix(*NATIVE, under="csrc/"):
        folder = Path(name).parts[1]
        allowed = {folder} if folder == "core" else {folder, "core", "optim", "group"}
        for header in _includes(name):
            first = header.split("/")[0]
            offered = Path(header).name == "entries.h"
            if (ROOT / "csrc" / header).is_file() and first not in allowed and not offered:
                bad.append(f"{name} includes {header}")
    assert not bad, "\n".join(bad)


# An op that looks at objects of Python has no kernel in csrc.
OPS_OF_PYTHON = "emblib/ops/scaled_gradients.py"
OPS_OF_FBGEMM = "emblib/compat/fbgemm_operators/registry.py"  # schemas of another library


def test_schemas_are_in_one_file() -> None:
    native = re.compile(r"TORCH_LIBRARY(_FRAGMENT)?\s*\(|\bm\.def\s*\(")
    python = re.compile(r"\blibrary\.(define|custom_op|Library)\b")
    bad = [
        name
        for name in (*_with_suffix(*NATIVE, under="csrc/"), *_with_suffix(".py", under="emblib/"))
        if name not in ("csrc/schema.cpp", OPS_OF_PYTHON, OPS_OF_FBGEMM)
        and (native.search(_text(name)) or python.search(_text(name)))
    ]
    assert not bad, "op schemas belong in csrc/schema.cpp:\n" + "\n".join(bad)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_headers_compile_alone(tmp_path: Path) -> None:
    """Every torch-free header includes what it uses; those for CUDA in the host emulation."""
    headers = [f for f in _with_suffix(".h", ".cuh", under="csrc/") if not _is_torch_header(f)]
    flags = ["-std=c++20", "-fsyntax-only", f"-I{ROOT / 'csrc'}", "-DEMB_ISA=baseline"]

    def errors(header: str) -> str:
        source = tmp_path / f"{header.replace('/', '_')}.cpp"
        source.write_text(f'#include "{header.removeprefix("csrc/")}"\n')
        done = subprocess.run(["g++", *flags, str(source)], capture_output=True, text=True)
        return "" if done.returncode == 0 else f"{header}:\n{done.stderr[:600]}"

    with ThreadPoolExecutor(max_workers=2) as pool:
        bad = [text for text in pool.map(errors, headers) if text]
    assert not bad, "\n".join(bad)
