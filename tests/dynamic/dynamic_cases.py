"""Modules of dynamic tables, what trains them and what compares them, for tests of checkpoints."""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from emblib import (
    CountMinSketch,
    DynamicEmbeddingBags,
    DynamicSpec,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    Precision,
    optim,
)
from emblib.dynamic.saving import snapshots
from emblib.init import Uniform

EVICTIONS = list(Eviction)
FIRST = Uniform(-0.5, 0.5)  # the default depends on the capacity


def make(
    eviction: Eviction = Eviction.LRU,
    capacities: tuple[int, int] = (256, 96),
    precision: Precision | None = None,
    optimizer: optim.Optimizer | None = None,
    *,
    device: str = "cpu",
    **more: Any,
) -> DynamicEmbeddingBags:
    """Tables "items" of dim 4 and "users" of dim 8, read by three features."""
    specs = [
        DynamicSpec(capacity, dim, name=name, eviction=eviction, initializer=FIRST, **more)
        for capacity, dim, name in zip(capacities, (4, 8), ("items", "users"), strict=True)
    ]
    module = DynamicEmbeddingBags(
        specs,
        optim.PartialRowwiseAdam(0.1) if optimizer is None else optimizer,
        feature_tables=[0, 1, 0],
        precision=precision,
        seed=0,  # hashes alike in every process
        device=device,
    )
    if eviction is Eviction.CUSTOM:
        module.set_eviction_score(1)
    return module


def admitting(counted: int = 64) -> DynamicEmbeddingBags:
    """One table that counts exactly, up to so many keys, and one with a sketch."""
    counters = (ExactCounter(counted), CountMinSketch(64))
    specs = [
        DynamicSpec(256, 4, name=name, admission=FrequencyAdmission(3, counter))
        for name, counter in zip(("items", "users"), counters, strict=True)
    ]
    return DynamicEmbeddingBags(specs, optim.Adam(0.1), feature_tables=[0, 1, 0], seed=0)


def batch(step: int, distinct: int = 150, length: int = 60) -> tuple[Tensor, Tensor]:
    """Ids of 3 features of 4 samples, negative ones among them, the small ones more often."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.rand(length, generator=generator).pow(2) * distinct
    ids = drawn.long() * 0x9E3779B97F4A7C1 - 2**60
    offsets = torch.linspace(0, length, 13).long()
    return ids, offsets


def train(module: DynamicEmbeddingBags, *steps: int, distinct: int = 150) -> None:
    """Steps whose gradients depend on the step and on the rows."""
    for step in steps:
        if any(spec.eviction is Eviction.CUSTOM for spec in module.tables):
            module.set_eviction_score(step // 2 + 1)
        ids, offsets = batch(step, distinct)
        out = module(ids.to(module.hyperparams.device), offsets.to(module.hyperparams.device))
        weights = torch.linspace(-1, 1, out.shape[1]).to(out) * (1 + step % 3)
        (out * weights + out.square()).sum().backward()


def trained(module: DynamicEmbeddingBags, steps: int = 12) -> DynamicEmbeddingBags:
    train(module, *range(steps))
    return module


def assert_same_content(one: DynamicEmbeddingBags, other: DynamicEmbeddingBags) -> None:
    """The same keys, stamps, scores, rows and numbers, wherever the rows are."""
    assert_same_states(one.state_dict(), other.state_dict())


def assert_same_states(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """The same keys and bits, on any devices."""
    assert list(one) == list(other)
    for key in one:
        assert one[key].dtype == other[key].dtype, key
        assert torch.equal(one[key].cpu(), other[key].cpu()), key


def tensors(tree: object) -> Iterator[Tensor]:
    """Those of a snapshot."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for branch in tree.values():
            yield from tensors(branch)
    elif isinstance(tree, list):
        for branch in tree:
            yield from tensors(branch)


def assert_same_bytes(one: DynamicEmbeddingBags, other: DynamicEmbeddingBags) -> None:
    """The same slot by slot; of empty slots only that they are empty."""
    for t in range(len(one.tables)):
        tags = one.index.table_tags(t)
        assert torch.equal(tags, other.index.table_tags(t))
        there = (tags != 0).nonzero().view(-1)
        ours, theirs = one.index.table_entries(t), other.index.table_entries(t)
        assert torch.equal(ours[there], theirs[there])
        for mine, its in zip(one.table_rows(t).values(), other.table_rows(t).values(), strict=True):
            assert torch.equal(mine[there], its[there])
    assert torch.equal(one.index.clock, other.index.clock)
    assert torch.equal(one.hyperparams, other.hyperparams)


def _from_state_dict(module: Any, make: Callable[[], Any], path: Path) -> Any:
    other = make()
    other.load_state_dict(pickle.loads(pickle.dumps(module.state_dict())))
    return other


def _from_dump(module: Any, make: Callable[[], Any], path: Path) -> Any:
    other = make()
    module.save(path)
    other.load(path)
    return other


def _from_snapshot(module: Any, make: Callable[[], Any], path: Path) -> Any:
    other = make()
    snapshots.save(module, path)
    other.load(path)
    return other


# Ways to copy a module, of a module, a function that makes one without keys, and a folder.
COPIES: dict[str, Callable[[Any, Callable[[], Any], Path], Any]] = {
    "deepcopy": lambda module, make, path: copy.deepcopy(module),
    "pickle": lambda module, make, path: pickle.loads(pickle.dumps(module)),
    "state_dict": _from_state_dict,
    "dump": _from_dump,
    "snapshot": _from_snapshot,
}
