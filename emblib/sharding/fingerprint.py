"""Compare the arguments of all ranks before they shard a model or exchange batches.

Every rank computes shards and messages from its own plan and configurations. Where these differ,
ranks would read wrong rows or wait for messages that are never sent. So each rank describes its
arguments as names and texts, and the ranks gather a digest of the description. If digests differ,
they gather the descriptions, and the error names the table, the value and the ranks.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from emblib.optim import Optimizer
from emblib.sharding.plan import format_ranks
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import ParameterSharding

T = TypeVar("T")

Description = Mapping[str, Mapping[str, Any]]
"""{what is described: {name: value}}, e.g. {"table item": {"num_embeddings": 1000}}."""

# {what is described: {name: text}}; fields of values have dotted names.
_Leaves = dict[str, dict[str, str]]
_MAX_DIFFERENCES = 10
_MAX_CHARACTERS = 200
# Directories of DISK tables and GPUs of DDP: every rank has its own.
_FIELDS_OF_ONE_RANK = {"directory", "device_ids", "output_device"}
_MAX_DEPTH = 8  # levels of nested values that are compared
_MAX_VALUES = 16  # of a larger tensor only dtype and shape are compared


def agree(
    ranks: RankGroup,
    prepare: Callable[[], T],
    describe: Callable[[T | None], Description] | None = None,
) -> T:
    """Return `prepare()`; raise on every rank if it fails on one, or if descriptions differ.

    All ranks call this. One rank alone only calls `prepare`.

    Args:
        ranks: the processes.
        prepare: local work. It must not communicate, because it may have failed on other ranks.
        describe: function that returns the description that must be equal on all ranks. Its
            argument is the result of `prepare`, or None if `prepare` failed, perhaps because of a
            difference.

    Raises:
        ValueError: the descriptions differ; the message is the same on all ranks.
        RuntimeError: `prepare` or `describe` failed on another rank only, and the descriptions do
            not differ.
        Exception: `prepare` or `describe` raised it on this rank, and the descriptions do not
            differ.
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
    failure_text = None if error is None else f"{type(error).__name__}: {error}"
    reports = ranks.gather_objects((_digest(leaves), failure_text))
    if any(report != (reports[0][0], None) for report in reports):
        failures = {rank: text for rank, (_, text) in enumerate(reports) if text is not None}
        differences = _differences(ranks.gather_objects(leaves), failures.keys())
        _raise_disagreement(differences, failures, error)
    return result  # type: ignore[return-value]


def _raise_disagreement(
    differences: list[str], failures: Mapping[int, str], error: Exception | None
) -> None:
    """Raise one error that names the differences and the ranks that failed."""
    failure_text = "; ".join(f"rank {rank} failed: {text}" for rank, text in failures.items())
    if differences:
        differences_shown = differences[:_MAX_DIFFERENCES]
        if len(differences_shown) < len(differences):
            differences_shown.append(f"... {len(differences)} differences in all")
        raise ValueError(
            "tables, plan, optimizers, settings and versions must be the same on all ranks, and "
            f"are not: {'; '.join(differences_shown)}. Start all ranks with the same code, "
            f"configuration and seeds{f' ({failure_text})' if failure_text else ''}"
        ) from error
    if error is not None:
        raise error
    raise RuntimeError(failure_text)


def _differences(leaves_by_rank: Sequence[_Leaves], failed_ranks: Collection[int]) -> list[str]:
    """Return a text per value that differs between ranks; `failed_ranks` may lack values."""
    texts = []
    for subject in dict.fromkeys(subject for leaves in leaves_by_rank for subject in leaves):
        ranks_without = [
            rank
            for rank, leaves in enumerate(leaves_by_rank)
            if subject not in leaves and rank not in failed_ranks
        ]
        if ranks_without:
            texts.append(f"{subject} is missing on {ranks_text(ranks_without)}")
            continue
        texts_by_rank = {
            rank: leaves[subject] for rank, leaves in enumerate(leaves_by_rank) if subject in leaves
        }
        differing_names: list[str] = []
        for name in dict.fromkeys(
            name for named_texts in texts_by_rank.values() for name in named_texts
        ):
            if any(name.startswith(f"{parent}.") for parent in differing_names):
                continue  # the value that contains it differs, which is reported
            texts_of_value = {
                rank: named_texts.get(name, "missing")
                for rank, named_texts in texts_by_rank.items()
                if name in named_texts or rank not in failed_ranks
            }
            if len(set(texts_of_value.values())) > 1:
                differing_names.append(name)
                prefix = f"{subject}: " if subject else ""
                texts.append(f"{prefix}{name} is {_values_text(texts_of_value)}")
    return texts


def differences_where_present(ranks: RankGroup, description: Description) -> list[str]:
    """Return a text per value that differs between the ranks whose descriptions have it.

    All ranks call this. The result is the same on all of them, with at most `_MAX_DIFFERENCES`
    texts.
    """
    leaves_by_rank = ranks.gather_objects(_leaves(description))
    return _differences(leaves_by_rank, range(ranks.size))[:_MAX_DIFFERENCES]


def _values_text(text_by_rank: Mapping[int, str]) -> str:
    """Return a text such as `1000 on ranks 0-2 and 1001 on rank 3`."""
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in text_by_rank.items():
        ranks_by_text.setdefault(text, []).append(rank)
    phrases = [
        f"{_abbreviate(text)} on {ranks_text(ranks)}" for text, ranks in ranks_by_text.items()
    ]
    return f"{', '.join(phrases[:-1])} and {phrases[-1]}"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return a text such as `rank 3` or `ranks 0-2`."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)}"


def _abbreviate(text: str) -> str:
    return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."


# Descriptions


def merge_descriptions(*descriptions: Description) -> dict[str, dict[str, Any]]:
    """Merge the values of each subject; of several values with one name the last remains."""
    result: dict[str, dict[str, Any]] = {}
    for description in descriptions:
        for subject, values in description.items():
            result.setdefault(subject, {}).update(values)
    return result


def versions() -> dict[str, Any]:
    """Return the versions of torch and emblib, and a digest of emblib's Python files.

    A checkout has the same version before and after a change.
    """
    package = sys.modules["emblib"]  # not imported: it imports this module
    return {
        "emblib": package.__version__,
        "emblib_sources": _SOURCES,
        "torch": torch.__version__.partition("+")[0],  # +cpu and +cu126 are one version
    }


def _digest_of_sources() -> str:
    """Return a digest of the Python files of emblib."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


# Computed at import, because files that change later are not the code that runs.
_SOURCES = _digest_of_sources()


def settings_of(ranks: RankGroup, **settings: Any) -> dict[str, Any]:
    """Return `settings`, with those of the ranks and the versions, as values of a `Description`."""
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
    """Describe an unsharded collection and how it is sharded, table by table.

    Args:
        source: the collection.
        configs: configurations of its tables, with the optimizers that they will have.
        plan: the sharding of each table, by name; None without a valid plan.
        optimizer: optimizer of tables whose configuration has none.
        path: path of the collection in the model; if "", subjects are named without a path.
    """
    path_text = f" of {path}" if path else ""
    description: dict[str, dict[str, Any]] = {
        f"collection {path}" if path else "": {
            "type": type(source).__name__,
            "tables": [config.name for config in configs],
            "is_weighted": source.is_weighted() if hasattr(source, "is_weighted") else None,
            "need_indices": source.need_indices() if hasattr(source, "need_indices") else None,
        }
    }
    slice_by_table = {
        table_slice.config.name: i for i, table_slice in enumerate(source.groups.slices)
    }
    for config in configs:
        values = {
            field.name: getattr(config, field.name)
            for field in fields(config)
            if field.name != "name"
        }
        values["optimizer"] = config.optimizer or optimizer
        parameters = source.groups.parameters_of(slice_by_table[config.name])
        frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
        values["frozen"] = frozen or "none"
        module = source.groups.module_of(slice_by_table[config.name])[0]
        precision = getattr(module, "precision", None)
        if precision is not None:
            # The output of sharded tables is float32, whatever that of `source` is.
            values["stored"] = replace(precision, output=torch.float32)
        if plan is not None and config.name in plan:
            values |= _describe_sharding(plan[config.name])
            if not plan[config.name].is_replicated:  # replicas get the values of rank 0
                values |= _values_of(module, source.device)
        description[f"table {config.name}{path_text}"] = values
    return description


def _values_of(module: Any, device: torch.device) -> dict[str, Any]:
    """Return whether the table is on meta, and the current hyperparameters of its optimizer."""
    hyperparams = getattr(module, "hyperparams", None)
    if device.type == "meta" or not isinstance(hyperparams, Tensor):
        return {"is_on_meta": device.type == "meta"}
    rate, step, *other_numbers = hyperparams.tolist()
    return {"is_on_meta": False, "now": {"lr": rate, "step": step, "hyper": other_numbers}}


def _describe_sharding(sharding: ParameterSharding) -> dict[str, Any]:
    """Return what ranks compare of a sharding, with one line per shard."""
    description = {"sharding": sharding.type, "planned_storage": sharding.storage}
    for number, shard in enumerate(sharding.shards):
        (first_row, end), (first_column, end_column) = shard.rows, shard.columns
        description[f"shard {number}"] = (
            f"[{first_row}:{end}, {first_column}:{end_column}] on rank {shard.rank}"
        )
    return description


# Leaves


def _leaves(description: Description) -> _Leaves:
    """Return a text per value; fields have dotted names such as `optimizer.lr`."""
    return {
        subject: {name: text for key, value in values.items() for name, text in _texts(key, value)}
        for subject, values in description.items()
    }


def _texts(name: str, value: Any, depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of a value and of its parts, which ranks compare.

    The text of a function is its module and qualified name, that of a dataclass its class, with
    its fields as parts. `_MAX_VALUES` describes tensors. The text of an object without a rule in
    `_text` is its `repr`, or its class if the `repr` shows an address. The text of paths and
    `_FIELDS_OF_ONE_RANK` only says whether they are None.

    Args:
        name: name of the value, with dots.
        value: value to describe.
        depth: number of values that contain this one. It is limited, because a value may contain
            itself.
    """
    if name.rpartition(".")[2] in _FIELDS_OF_ONE_RANK or isinstance(value, Path):
        yield name, str(None if value is None else "given")
        return
    if not isinstance(value, Mapping):
        yield name, _text(value)
    for part_name, part in _parts(value) if depth < _MAX_DEPTH else ():
        yield from _texts(f"{name}.{part_name}", part, depth + 1)


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """Return (name, value) of the items that `_text` of a value does not include."""
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    if isinstance(value, list | tuple) and any(map(_has_parts, value)):
        return list(enumerate(value))
    if isinstance(value, functools.partial):
        return [*_parts(value.func), ("args", list(value.args)), ("keywords", value.keywords)]
    return []


def _has_parts(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping) or bool(_parts(value))


def _text(value: Any) -> str:
    """Return a text that is the same in all processes for equal values; it may omit parts."""
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
    text = repr(value)
    # Texts in angle brackets have an address or a state of this process, such as a logger's level.
    return type(value).__name__ if text.startswith("<") or " at 0x" in text else text


def _digest(leaves: _Leaves) -> str:
    items = [(subject, sorted(values.items())) for subject, values in sorted(leaves.items())]
    return hashlib.sha256(repr(items).encode()).hexdigest()
