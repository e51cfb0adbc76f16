"""Compare the arguments of all ranks before any of them allocates or sends something.

Every rank computes shards and messages from its own plan and configurations. Where these differ,
ranks would read wrong rows or wait for messages that are never sent. So each rank describes its
arguments as names and texts, and the ranks gather a digest of the description. If digests differ,
they gather the descriptions, and the error names the table, the value and the ranks.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from emblib.optim import Optimizer
from emblib.sharding.plan import ranges
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import ParameterSharding

T = TypeVar("T")

Description = Mapping[str, Mapping[str, Any]]
"""{what is described: {name: value}}, e.g. {"table item": {"num_embeddings": 1000}}."""

_Leaves = dict[str, dict[str, str]]
_Used = frozenset[str] | None
_MAX_DIFFERENCES = 10
_MAX_CHARACTERS = 200
# Directories of DISK tables and GPUs of DDP: every rank has its own.
_OF_ONE_RANK = {"directory", "device_ids", "output_device"}
_DEVICE = re.compile(r"^(cuda|cpu|xpu|mps):\d+$")
_MAX_DEPTH = 8  # of parts in parts
_MAX_VALUES = 16  # of a tensor that a function reads; of a larger one the shape is compared


def agree(
    ranks: RankGroup,
    prepare: Callable[[], T],
    describe: Callable[[T | None], Description] | None = None,
) -> T:
    """Return `prepare()`; raise on every rank if it fails on one, or if descriptions differ.

    All ranks call this. One rank alone only calls `prepare`.

    Args:
        ranks: the processes.
        prepare: the local work. It must not communicate, since it may have failed on other ranks.
        describe: function that returns what must be the same on all ranks, given the result of
            `prepare`, or None where that failed: a difference between ranks may be the reason.

    Raises:
        ValueError: the descriptions differ; the message is the same on all ranks.
        RuntimeError: `prepare` failed on another rank; where it failed, its own error is raised.
    """
    if ranks.size == 1:
        return prepare()
    result: T | None = None
    error: Exception | None = None
    leaves: _Leaves = {}
    try:
        result = prepare()
    except Exception as raised:
        error = raised
    try:
        leaves = {} if describe is None else _leaves(describe(result))
    except Exception as raised:
        error = error or raised
    failure = None if error is None else f"{type(error).__name__}: {error}"
    gathered = ranks.gather_objects((_digest(leaves), failure))
    if any(report != (gathered[0][0], None) for report in gathered):
        failures = {rank: text for rank, (_, text) in enumerate(gathered) if text is not None}
        differences = _differences(ranks.gather_objects(leaves), failures.keys())
        _raise(differences, failures, error)
    return result  # type: ignore[return-value]


def _raise(differences: list[str], failures: Mapping[int, str], error: Exception | None) -> None:
    failed = "; ".join(f"rank {rank} failed: {text}" for rank, text in failures.items())
    if differences:
        shown = differences[:_MAX_DIFFERENCES]
        if len(shown) < len(differences):
            shown.append(f"... {len(differences)} differences in all")
        raise ValueError(
            "tables, plan, optimizers, settings and versions must be the same on all ranks, and "
            f"are not: {'; '.join(shown)}. Start all ranks with the same code, configuration and "
            f"seeds{f' ({failed})' if failed else ''}"
        ) from error
    if error is not None:
        raise error
    raise RuntimeError(failed)


def _differences(by_rank: Sequence[_Leaves], failed: Any) -> list[str]:
    """Return a text per value that differs between ranks; ranks that failed may lack values."""
    found = []
    for subject in dict.fromkeys(subject for leaves in by_rank for subject in leaves):
        lacking = [
            rank
            for rank, leaves in enumerate(by_rank)
            if subject not in leaves and rank not in failed
        ]
        if lacking:
            found.append(f"{subject} is missing on {_ranks_text(lacking)}")
            continue
        described = {
            rank: leaves[subject] for rank, leaves in enumerate(by_rank) if subject in leaves
        }
        differing: list[str] = []
        for name in dict.fromkeys(name for leaves in described.values() for name in leaves):
            if any(name.startswith(f"{parent}.") for parent in differing):
                continue  # the parents are of different kinds, which is reported
            values = {
                rank: leaves.get(name, "missing")
                for rank, leaves in described.items()
                if name in leaves or rank not in failed
            }
            if len(set(values.values())) > 1:
                differing.append(name)
                prefix = f"{subject}: " if subject else ""
                found.append(f"{prefix}{name} is {_values_text(values)}")
    return found


def _values_text(values: Mapping[int, str]) -> str:
    """Return a text such as `1000 on ranks 0-2 and 1001 on rank 3`."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    texts = [f"{_shortened(value)} on {_ranks_text(ranks)}" for value, ranks in ranks_of.items()]
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


# Descriptions


def merged(*descriptions: Description) -> dict[str, dict[str, Any]]:
    """Return one description with the values of several."""
    found: dict[str, dict[str, Any]] = {}
    for description in descriptions:
        for subject, values in description.items():
            found.setdefault(subject, {}).update(values)
    return found


def versions() -> dict[str, Any]:
    """Return the versions of torch and emblib, and a digest of emblib's Python files.

    A checkout has the same version before and after a change.
    """
    import emblib

    return {
        "emblib": emblib.__version__,
        "emblib_sources": _SOURCES,
        "torch": torch.__version__.partition("+")[0],  # +cpu and +cu126 are one version
    }


def _digest_of_sources() -> str:
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


# Taken when the code is imported: files that change later are not the code that runs.
_SOURCES = _digest_of_sources()


def settings_of(ranks: RankGroup, **settings: Any) -> dict[str, Any]:
    """Return the settings of a model or collection, with those of its ranks and the versions."""
    return {
        **settings,
        "local_size": ranks.local_size,
        "device": ranks.device.type,
        **versions(),
    }


def collection_description(
    source: Any,
    configs: Sequence[Any],
    plan: Mapping[str, ParameterSharding] | None,
    optimizer: Optimizer | None,
    path: str = "",
) -> dict[str, dict[str, Any]]:
    """Describe a collection that is to be sharded, table by table.

    Args:
        source: the collection.
        configs: configurations of its tables, with the optimizers that they will have.
        plan: the sharding of each table, by name; None without a valid plan.
        optimizer: optimizer of tables whose configuration has none.
        path: path of the collection in the model; without it, errors name tables only.
    """
    where = f" of {path}" if path else ""
    found: dict[str, dict[str, Any]] = {
        f"collection {path}" if path else "": {
            "type": type(source).__name__,
            "tables": [config.name for config in configs],
            "is_weighted": source.is_weighted() if hasattr(source, "is_weighted") else None,
            "need_indices": source.need_indices() if hasattr(source, "need_indices") else None,
        }
    }
    modules = {part.config.name: i for i, part in enumerate(source.groups.slices)}
    for config in configs:
        values = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "name"}
        values["optimizer"] = config.optimizer or optimizer
        module = source.groups.module_of(modules[config.name])[0]
        precision = getattr(module, "precision", None)
        if precision is not None:
            values["stored"] = replace(precision, output=torch.float32)  # that of sharded ones
        if plan is not None and config.name in plan:
            values |= _sharding(plan[config.name])
            if not plan[config.name].is_replicated:  # copies become those of rank 0
                values |= _values_of(module, source.device)
        found[f"table {config.name}{where}"] = values
    return found


def _values_of(module: Any, device: torch.device) -> dict[str, Any]:
    """Return whether the table is on meta, and the current hyperparameters of its optimizer."""
    hyper = getattr(module, "hyperparams", None)
    if device.type == "meta" or not isinstance(hyper, Tensor):
        return {"is_on_meta": device.type == "meta"}
    rate, step, *others = hyper.tolist()
    return {"is_on_meta": False, "now": {"lr": rate, "step": step, "hyper": others}}


def _sharding(sharding: ParameterSharding) -> dict[str, Any]:
    found = {"sharding": sharding.type, "planned_storage": sharding.storage}
    for number, shard in enumerate(sharding.shards):
        (first, end), (left, right) = shard.rows, shard.columns
        found[f"shard {number}"] = f"[{first}:{end}, {left}:{right}] on rank {shard.rank}"
    return found


# Leaves


def _leaves(description: Description) -> _Leaves:
    """Return a text per value; fields have dotted names such as `optimizer.lr`."""
    return {
        subject: {name: text for key, value in values.items() for name, text in _texts(key, value)}
        for subject, values in description.items()
    }


def _texts(
    name: str, value: Any, used: _Used = None, outer: frozenset[int] = frozenset()
) -> Iterator[tuple[str, str]]:
    """Yield the texts of a value and of its parts.

    Args:
        name: name of the value, with dots.
        value: value to describe.
        used: the names in the code that reads the value; None for all.
        outer: the ids of the objects that contain the value; a function may refer to itself.
    """
    if name.rpartition(".")[2] in _OF_ONE_RANK or isinstance(value, Path):
        yield name, str(None if value is None else "given")
        return
    if id(value) in outer:
        yield name, type(value).__name__
        return
    parts = _parts(value, used) if len(outer) < _MAX_DEPTH else []
    if not isinstance(value, Mapping):
        yield name, _text(value, is_read_by_code=used is not None)
    for key, part, names in parts:
        yield from _texts(f"{name}.{key}", part, names, outer | {id(value)})


def _parts(value: Any, used: _Used) -> list[tuple[Any, Any, _Used]]:
    """Return (name, part, names in the code that reads it) of the parts that a text leaves out."""
    if isinstance(value, Mapping):
        return [(key, one, used) for key, one in _named(dict(value), used).items()]
    if is_dataclass(value) and not isinstance(value, type):
        own = {f.name: getattr(value, f.name) for f in fields(value)}
        return [(key, one, used) for key, one in _named(own, used).items()]
    if isinstance(value, list | tuple | set | frozenset):
        if isinstance(value, list | tuple) and any(map(_has_parts, value)):
            return [(i, one, used) for i, one in enumerate(value)]
        return []
    if isinstance(value, functools.partial):
        own = {"args": list(value.args), "keywords": value.keywords}
        return [*_parts(value.func, used), *((key, one, None) for key, one in own.items())]
    if callable(value):
        return _parts_of_callable(value)
    if used is None or _plain_text(value) is not None:
        return []
    return [(key, one, used) for key, one in _attributes(value).items() if key in used]


def _has_parts(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping) or bool(_parts(value, None))


def _named(values: dict[Any, Any], used: _Used) -> dict[Any, Any]:
    """Return the entries that the code names, or all of them if it names none."""
    return {key: one for key, one in values.items() if used and key in used} or values


def _attributes(value: Any) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


# Functions


def _parts_of_callable(value: Any) -> list[tuple[Any, Any, _Used]]:
    """Return the code of a function, method or callable object, and the values that it reads.

    Functions of one name may differ: lambdas, closures, objects with other attributes. Attributes,
    entries and globals count only if the code names them, so that ranks may differ in others, such
    as unrelated arguments of the program. The versions of torch and emblib are compared elsewhere.
    """
    function, owner = value, None
    if isinstance(value, MethodType):
        function, owner = value.__func__, value.__self__
    elif not hasattr(value, "__qualname__"):
        function, owner = inspect.getattr_static(type(value), "__call__"), value
    if not isinstance(function, FunctionType) or (
        owner is None and not function.__closure__ and _is_of_library(function)
    ):
        return []
    codes = _codes(function, None if owner is None else type(owner))
    used = frozenset(name for code in codes for name in _names(code))
    read: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # the cell is still empty
            read[name] = cell.cell_contents
    for name in sorted(set().union(*map(_globals_read_by, codes)) & function.__globals__.keys()):
        one = function.__globals__[name]
        # Modules, classes and functions are compared as sources, not by name.
        if not callable(one) and not isinstance(one, ModuleType):
            read[name] = one
    if owner is not None and not isinstance(owner, type):
        read.update((key, one) for key, one in _attributes(owner).items() if key in used)
    return [
        ("code", _digest_of_codes(codes), None),
        ("defaults", list(function.__defaults__ or ()), used),
        ("keyword_defaults", function.__kwdefaults__ or {}, None),
        *((name, one, used) for name, one in read.items()),
    ]


def _is_of_library(function: FunctionType) -> bool:
    return function.__module__.partition(".")[0] in {"torch", "emblib"}


def _codes(function: FunctionType, kind: type | None) -> list[CodeType]:
    """Return the code of a function, of its inner functions, and of functions that it names.

    The latter are functions of its module, and methods of `kind` that are defined there.
    """
    found: list[CodeType] = []
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        if any(code is other for other in found):
            continue
        found.append(code)
        waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        named = [function.__globals__.get(name) for name in sorted(_globals_read_by(code))]
        if kind is not None:
            named += [inspect.getattr_static(kind, name, None) for name in code.co_names]
        for one in named:
            other = getattr(one, "fget", None) or getattr(one, "__func__", one)
            if isinstance(other, FunctionType) and other.__module__ == function.__module__:
                waiting.append(other.__code__)
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from (constant for constant in code.co_consts if isinstance(constant, str))


def _globals_read_by(code: CodeType) -> set[str]:
    instructions = dis.get_instructions(code)
    return {one.argval for one in instructions if one.opname == "LOAD_GLOBAL"}


def _digest_of_codes(codes: Sequence[CodeType]) -> str:
    """Return a digest of what the code does, without files and line numbers."""
    digest = hashlib.sha256()
    for code in codes:
        constants = [
            "code" if isinstance(constant, CodeType) else f"{type(constant)}{_text(constant)}"
            for constant in code.co_consts
        ]
        names = (code.co_names, code.co_freevars, code.co_cellvars, code.co_varnames)
        arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        digest.update(code.co_code)
        digest.update(repr((constants, names, arguments, code.co_flags)).encode())
    return f"{digest.hexdigest()[:16]} of Python {sys.version_info[0]}.{sys.version_info[1]}"


def _text(value: Any, *, is_read_by_code: bool = False) -> str:
    """Return a text that is the same in two processes for the same value."""
    text = _plain_text(value)
    if text is None:
        text = repr(value)
        # The attributes that code reads are compared instead: the repr of a logger has its level,
        # which may differ.
        return type(value).__name__ if is_read_by_code or " at 0x" in text else text
    # Every rank has its own device, by its number.
    return _DEVICE.sub(r"\1", text) if is_read_by_code and isinstance(value, str) else text


def _plain_text(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, Tensor):
        is_small = type(value) is Tensor and value.numel() <= _MAX_VALUES and not value.is_meta
        return f"{value.dtype}{list(value.shape)}{value.tolist() if is_small else ''}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_text, value)))}}}"
    if isinstance(value, functools.partial):
        return _text(value.func)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, torch.device):
        return value.type
    if is_dataclass(value):
        return type(value).__name__
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, bool | int | float | complex | bytes | torch.dtype | None):
        return repr(value)
    return None


def _digest(leaves: _Leaves) -> str:
    ordered = [(subject, sorted(values.items())) for subject, values in sorted(leaves.items())]
    return hashlib.sha256(repr(ordered).encode()).hexdigest()
