"""The short path of calls of tensor trains: the bits of the long path, and when it is not taken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib import BoundsCheck, Pooling, TableBatchedTTEmbeddingBags, TTSpec, optim
from emblib.tables.tt_calls import ShortTTCalls

SPECS = (
    TTSpec(110, 16, (4, 4), (4, 5, 6), (2, 2, 4)),
    TTSpec(60, 6, (3,), (8, 8), (2, 3)),
    TTSpec(100, 8, (2, 3, 2), (2, 5, 2, 5), (2, 1, 2, 2)),
)


def module_of(device: torch.device, **options: Any) -> TableBatchedTTEmbeddingBags:
    torch.manual_seed(0)
    return TableBatchedTTEmbeddingBags(SPECS, optim.Adagrad(0.1), device=device, **options)


def batch(seed: int, device: torch.device, bags: int = 5) -> tuple[Tensor, Tensor]:
    """Return some bags per table, among them empty ones; some ids and -1 are not valid."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * bags,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(-1, 63, (int(offsets[-1]),), generator=generator)
    return ids.to(device), offsets.to(device)


def trained(module: TableBatchedTTEmbeddingBags, path: str, **arguments: Any) -> list[Tensor]:
    """Return outputs of some steps, and what they leave behind."""
    device, found = module.features.device, []
    for step in range(3):
        out = module(*batch(step, device), **arguments)
        assert out.grad_fn is not None
        assert out.grad_fn.name() == f"{path}TTLookupBackward"
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(step)).to(out))
        found.append(out.detach())
    with torch.no_grad():
        found.append(module(*batch(9, device), **arguments))
    states = [state for states in module.core_states() for state in states]
    found += [*module.cores, *states, module.hyperparams, module.bounds_violations]
    return [tensor.detach().cpu() for tensor in found]


def without_short_calls(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShortTTCalls, "can_serve", lambda *_: False)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"bounds_check": BoundsCheck.IGNORE}, {}),
    "without a check": ({"bounds_check": BoundsCheck.NONE}, {}),
    "mean": ({"bounds_check": BoundsCheck.IGNORE, "pooling": Pooling.MEAN}, {}),
    "unequal batches": (
        {"bounds_check": BoundsCheck.IGNORE},
        {"batch_sizes": [[2, 4], [1, 0], [3, 5]]},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bits_of_the_long_path(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, arguments = CASES[name]
    short = trained(module_of(device, **options), "Short", **arguments)
    without_short_calls(monkeypatch)
    long = trained(module_of(device, **options), "Fused", **arguments)
    assert all(torch.equal(a, b) for a, b in zip(short, long, strict=True))


def test_two_lookups_before_their_backwards(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second backward makes the values that the first one has changed again."""

    def after() -> list[Tensor]:
        module = module_of(device, bounds_check=BoundsCheck.IGNORE)
        outputs = [module(*batch(seed, device)) for seed in (1, 2)]
        for out in outputs:
            out.square().sum().backward()
        return [core.detach().clone() for core in module.cores]

    short = after()
    without_short_calls(monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(short, after(), strict=True))


def _freeze(module: TableBatchedTTEmbeddingBags, weights: Tensor) -> None:
    for core in module.table_cores(0):
        core.requires_grad_(False)


LONG: dict[str, Callable[[TableBatchedTTEmbeddingBags, Tensor], object]] = {
    "a frozen table": _freeze,
    "a gradient of sample weights": lambda _, weights: weights.requires_grad_(),
    "shared cores": lambda module, _: module.shared_gradients.update({0: lambda g, use: use(g)}),
}


@pytest.mark.parametrize("name", LONG)
def test_when_it_is_not_taken(name: str, device: torch.device) -> None:
    module = module_of(device, bounds_check=BoundsCheck.IGNORE)
    ids, offsets = batch(3, device)
    weights = torch.ones(len(ids), device=device)
    assert module(ids, offsets, weights).grad_fn.name() == "ShortTTLookupBackward"
    LONG[name](module, weights)
    assert module(ids, offsets, weights).grad_fn.name() == "FusedTTLookupBackward"
