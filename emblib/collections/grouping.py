"""Which tables of a place share a kernel, and the order in which features are looked up then."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from emblib.collections.configs import Dynamic, Plain, Quantized, TensorTrain
from emblib.collections.kernels import PartQuantized, PartTables, PartTT, is_sparse
from emblib.collections.slices import TableSlice
from emblib.dynamic import DynamicEmbeddingBags
from emblib.dynamic_specs import DynamicSpec
from emblib.ops.hash import SCORED
from emblib.optim import External, Gradient, Optimizer
from emblib.specs import Placement, Pooling, Precision

NO_UPDATE = External(gradient=Gradient.DENSE)
"""What stands for no optimizer: gradients are left to torch.optim."""


@dataclass(frozen=True)
class Grouping:
    """Slices that share a kernel, and the units (features of a place) that read them."""

    slices: tuple[int, ...]
    units: tuple[int, ...]
    optimizer: Optimizer


def optimizer_of(part: TableSlice, optimizer: Optimizer | None) -> Optimizer:
    """Of a table: its own, that of its collection, or none."""
    return part.config.optimizer or optimizer or NO_UPDATE


def group(
    slices: Sequence[TableSlice],
    reads: Sequence[int],
    optimizer: Optimizer | None,
    pooling: Pooling,
) -> list[Grouping]:
    """The kernels, in the order in which units first need them; those nobody reads come last."""
    keys = [_key(i, part, optimizer, pooling) for i, part in enumerate(slices)]
    seen: dict[Hashable, set[str]] = {}
    for i, part in enumerate(slices):
        names = seen.setdefault(keys[i], set())
        if isinstance(part.config.kind, Dynamic) and part.config.name in names:
            keys[i] = (keys[i], i)  # first values of rows go by the name of the table
        names.add(part.config.name)
    order = dict.fromkeys([keys[s] for s in reads] + keys)
    result = []
    for key in order:
        of_key = tuple(i for i in range(len(slices)) if keys[i] == key)
        units = tuple(u for u, s in enumerate(reads) if keys[s] == key)
        result.append(Grouping(of_key, units, optimizer_of(slices[of_key[0]], optimizer)))
    return result


def _key(
    number: int, part: TableSlice, optimizer: Optimizer | None, pooling: Pooling
) -> tuple[Hashable, ...]:
    """Equal for what can be in one kernel."""
    config = part.config
    kind, update = config.kind, optimizer_of(part, optimizer)
    dim = part.dim if pooling is Pooling.NONE else 0
    if isinstance(kind, TensorTrain):
        return ("tensor_train", number)
    if isinstance(kind, Quantized):
        return ("quantized", kind.bits, dim)
    if isinstance(kind, Plain):
        cached = (kind.placement.cached, kind.cache)
        dim = part.dim if is_sparse(update) else dim
        return ("plain", config.data_type, update, cached, dim)
    # Counters and scores belong to a module, and so do the states that an optimizer has outside.
    order = kind.eviction.order
    alone = kind.admission is not None or order in _ASSIGNED or isinstance(update, External)
    rules = (order, kind.newcomer, kind.seed, number if alone else -1)
    return ("dynamic", config.data_type, update, rules, dim)


_ASSIGNED = frozenset({"assigned"} & set(SCORED))


class Unmade(nn.Module):
    """Stands for a kernel that cannot be on meta, until the collection leaves it."""

    def __init__(self, parts: Sequence[TableSlice], optimizer: Optimizer) -> None:
        super().__init__()
        self.shapes = [(part.num_rows, part.dim) for part in parts]
        self.optimizer, self.output_dtype = optimizer, torch.float32
        self.anchor = torch.empty((), device="meta")


def _check_update(parts: Sequence[TableSlice], optimizer: Optimizer) -> None:
    away = {
        part.config.name: str(part.config.kind.placement)
        for part in parts
        if isinstance(part.config.kind, Plain)
        and part.config.kind.placement not in (Placement.DEVICE, Placement.HOST)
    }
    if away and isinstance(optimizer, External):
        raise ValueError(
            "tables outside the device have no gradients to leave for torch.optim, so backward "
            f"must update them; without an optimizer are {away}: give the collection or these "
            "tables one of emblib.optim, e.g. optimizer=optim.SGD(lr=0.1)"
        )


def make_kernel(
    parts: Sequence[TableSlice],
    reads: Sequence[int],
    optimizer: Optimizer,
    pooling: Pooling,
    seeds: Sequence[int],
    device: torch.device,
) -> nn.Module:
    """The module of one group; feature f of it reads `parts[reads[f]]`."""
    config = parts[0].config
    kind = config.kind
    if isinstance(kind, TensorTrain):
        return PartTT(parts[0], optimizer, pooling, seeds[0], device)
    names = distinct_names([part.config.name for part in parts])
    if isinstance(kind, Quantized):
        return PartQuantized(parts, names, reads, pooling, seeds, device)
    if isinstance(kind, Plain):
        _check_update(parts, optimizer)
        return PartTables(parts, names, reads, optimizer, pooling, seeds, kind.cache, device)
    if device.type == "meta":
        return Unmade(parts, optimizer)
    specs: list[Any] = [part.named(name) for part, name in zip(parts, names, strict=True)]
    assert all(isinstance(spec, DynamicSpec) for spec in specs)
    assert isinstance(kind, Dynamic)
    return DynamicEmbeddingBags(
        specs,
        optimizer,
        pooling=pooling,
        feature_tables=reads,
        precision=Precision(weights=config.data_type),
        seed=kind.seed,
        device=device,
        hash_seeds=seeds if kind.seed is None else None,
    )


def distinct_names(names: Sequence[str]) -> list[str]:
    """The names, with a number behind those that were there before."""
    taken: set[str] = set(names)
    seen: set[str] = set()
    result = []
    for name in names:
        unique, number = name, 1
        while unique in seen or (unique != name and unique in taken):
            number += 1
            unique = f"{name}_{number}"
        seen.add(unique)
        result.append(unique)
    return result
