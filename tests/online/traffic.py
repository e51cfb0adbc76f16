"""Random training of tables, and the tables that followers serve."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import emblib
from emblib import inference, optim

ROWS, DIM, BAGS = 50, 6, 12


class Leader(NamedTuple):
    """A trained model, and how its followers are made of it and equal it."""

    model: nn.Module
    step: Callable[[torch.Generator], None]
    followers: dict[str, Callable[[], nn.Module]]  # equal to the model when they are made
    keys: Tensor  # that are compared


def dynamic(
    *,
    eviction: Any = emblib.Eviction.LRU,
    device: torch.device | str = "cpu",
    stored_rows: int | None = None,
    **spec: Any,
) -> Leader:
    """Two dynamic tables, of which the first evicts in almost every step, or demotes."""
    specs = [
        emblib.DynamicSpec(
            64, DIM, name="item", eviction=eviction, **{"default_value": 0.5, **spec}
        ),
        emblib.DynamicSpec(512, DIM, name="user", eviction=eviction),
    ]
    backing = None if stored_rows is None else emblib.BackingStore(emblib.HostRows(stored_rows))
    model = emblib.DynamicEmbeddingBags(
        specs, optim.Adam(0.05), seed=3, device=device, backing=backing
    )
    keys = torch.arange(-50, 50) * (2**40 + 1)

    def step(generator: torch.Generator) -> None:
        lengths = torch.randint(0, 5, (2 * BAGS,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        at = torch.randint(0, 100, (int(offsets[-1]),), generator=generator)
        model(keys[at].to(device), offsets.to(device)).square().sum().backward()
        if int(torch.randint(0, 4, (1,), generator=generator)) == 0:
            model.erase("user", keys[at[:3]])

    def copy() -> nn.Module:
        larger = [replace(spec, capacity=512) for spec in specs] if stored_rows else specs
        fresh = emblib.DynamicEmbeddingBags(larger, optim.Adam(0.05), seed=3, device=device)
        fresh.load_state_dict(model.state_dict())
        return fresh.eval()

    followers: dict[str, Callable[[], nn.Module]] = {"live": copy}
    for form in (None, "int8", "int2", "float16"):
        followers[str(form)] = lambda form=form: inference.for_inference(model, form)
    return Leader(model, step, followers, keys)


def plain(
    optimizer: optim.Optimizer | None = None, *, device: torch.device | str = "cpu", **spec: Any
) -> Leader:
    """Two tables by row number, one of which two features read."""
    specs = [
        emblib.TableSpec(ROWS, DIM, "item", **spec),
        emblib.TableSpec(2 * ROWS, DIM, "user", **spec),
    ]
    optimizer = optim.RowwiseAdagrad(0.1) if optimizer is None else optimizer
    options: dict[str, Any] = {"feature_tables": [0, 1, 0], "device": device}
    model = emblib.TableBatchedEmbeddingBags(specs, optimizer, **options)
    keys = torch.arange(ROWS)

    def step(generator: torch.Generator) -> None:
        lengths = torch.randint(0, 4, (3 * BAGS,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = torch.randint(-1, ROWS, (int(offsets[-1]),), generator=generator)
        model(ids.to(device), offsets.to(device)).square().sum().backward()

    def copy() -> nn.Module:
        fresh = emblib.TableBatchedEmbeddingBags(specs, optimizer, **options)
        fresh.load_state_dict(model.state_dict())
        return fresh

    followers: dict[str, Callable[[], nn.Module]] = {"live": copy}
    for form in ("int4", "float8_e4m3"):
        followers[form] = lambda form=form: inference.for_inference(model, form)
    return Leader(model, step, followers, keys)


def assert_equal(follower: Any, make: Callable[[], nn.Module], keys: Tensor) -> None:
    """A follower reads what a copy reads that is made of the leader now."""
    fresh = make()
    device = next(iter(fresh.buffers())).device
    offsets = torch.arange(_features(follower.model) * keys.numel() + 1, device=device)
    ids = keys.repeat(_features(follower.model)).to(device)
    with torch.no_grad():
        expected = fresh(ids, offsets)
    assert torch.equal(follower(ids, offsets), expected)


def _features(model: Any) -> int:
    tables = model.rows if isinstance(model, inference.InferenceEmbeddingBags) else model
    return len(tables.feature_tables)
