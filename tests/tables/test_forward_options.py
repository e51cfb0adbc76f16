"""What forward takes beside the batch: variable batch sizes, gradients wanted, known row counts."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from emblib import BoundsCheck, Pooling, TableBatchedEmbeddingBags, TableSpec, optim
from emblib.ops import autograd
from emblib.reference import tbe
from emblib.tables.base import variable_batch

TABLES = [TableSpec(30, 4), TableSpec(7, 6), TableSpec(20, 3)]
FEATURES = (0, 1, 1, 2)
SIZES = [[2, 0, 3], [1, 1, 1], [0, 0, 0], [4, 2, 0]]


def module(optimizer: optim.Optimizer, device: torch.device, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"feature_tables": FEATURES, "bounds_check": BoundsCheck.WARNING, **options}
    return TableBatchedEmbeddingBags(TABLES, optimizer, device=device, **options)


def variable(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    bags = [sum(sizes) for sizes in SIZES]
    lengths = torch.randint(0, 4, (sum(bags),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    parts, first = [], 0
    for f, count in enumerate(bags):
        size = int(lengths[first : first + count].sum())
        parts.append(torch.randint(0, TABLES[FEATURES[f]].rows, (size,), generator=generator))
        first += count
    return torch.cat(parts), offsets


def by_bag(weights: list[Tensor], indices: Tensor, offsets: Tensor, pooling: Pooling) -> Tensor:
    """The output written as its definition says: rank, feature, bag."""
    first_bag, bag = {}, 0
    for f, sizes in enumerate(SIZES):
        for r, size in enumerate(sizes):
            first_bag[f, r] = bag
            bag += size
    pieces = []
    for r in range(len(SIZES[0])):
        for f, sizes in enumerate(SIZES):
            for b in range(first_bag[f, r], first_bag[f, r] + sizes[r]):
                rows = weights[FEATURES[f]][indices[offsets[b] : offsets[b + 1]]]
                total = rows.sum(0)
                mean = pooling is Pooling.MEAN and rows.size(0) > 0
                pieces.append(total / rows.size(0) if mean else total)
    return torch.cat(pieces)


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
def test_variable_batch_output_and_update(pooling: Pooling, device: torch.device) -> None:
    table = module(optim.SGD(0.1), device, pooling=pooling)
    indices, offsets = (t.to(device) for t in variable())
    weights = [w.clone().requires_grad_() for w in table.table_weights()]
    want = by_bag(weights, indices, offsets, pooling)
    out = table(indices, offsets, batch_sizes=SIZES)
    assert_close(out.detach(), want.detach())
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(device)
    out.backward(grad)
    want.backward(grad)
    for got, weight in zip(table.table_weights(), weights, strict=True):
        assert_close(got, (weight - 0.1 * weight.grad).detach())


def test_variable_batch_with_weights_and_without_gradient(device: torch.device) -> None:
    table = module(optim.Adagrad(0.1), device)
    indices, offsets = (t.to(device) for t in variable(3))
    scales = torch.rand(indices.numel(), device=device, requires_grad=True)
    out = table(indices, offsets, scales, batch_sizes=SIZES)
    weights = table.weights.detach().clone()
    layout = variable_batch(SIZES, [4, 6, 6, 3], offsets.numel() - 1, device).bag_layout
    extras = tbe.Extras(bag_layout=layout)
    wanted = scales.detach().clone().requires_grad_()
    want = tbe.lookup(
        weights, table.features, indices, offsets, wanted, columns=out.numel(), extras=extras
    )
    assert_close(out.detach(), want.detach())
    out.sum().backward()
    want.sum().backward()
    assert_close(scales.grad, wanted.grad)
    with torch.no_grad():
        assert table(indices, offsets, batch_sizes=SIZES).shape == out.shape


def test_equal_variable_batches_are_a_fixed_one(device: torch.device) -> None:
    fixed, varying = (module(optim.RowwiseAdagrad(0.1), device) for _ in range(2))
    offsets = torch.arange(0, 4 * 5 * 2 + 1, 2, device=device)
    indices = torch.randint(0, 7, (40,), generator=torch.Generator().manual_seed(0)).to(device)
    out = fixed(indices, offsets)
    other = varying(indices, offsets, batch_sizes=[[5]] * 4)
    dims = [4, 6, 6, 3]
    blocks = other.split([5 * d for d in dims])
    other_out = torch.cat([b.view(5, d) for b, d in zip(blocks, dims, strict=True)], dim=1)
    assert torch.equal(out, other_out)
    out.sum().backward()
    other.sum().backward()
    assert torch.equal(fixed.weights, varying.weights)


def test_sequences_in_a_variable_batch(device: torch.device) -> None:
    tables = [TableSpec(30, 4), TableSpec(7, 4)]
    table = TableBatchedEmbeddingBags(tables, optim.SGD(0.1), pooling=Pooling.NONE, device=device)
    indices = torch.tensor([3, 4, 5, 6, 1], device=device)
    offsets = torch.tensor([0, 1, 3, 5], device=device)
    out = table(indices, offsets, batch_sizes=[[1], [2]])
    first, second = table.table_weights()
    assert_close(out.detach(), torch.cat([first[[3]], second[[4, 5, 6, 1]]]))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([[1]], "one list per feature = 4"),
        ([[1], [2, 3], [1], [1]], "same number of ranks"),
        ([[1], [-1], [1], [1]], ">= 0"),
        ([[1], [1], [1], [1]], "add up to 4 bags, but offsets has 14"),
    ],
)
def test_wrong_batch_sizes_are_refused(sizes: list[list[int]], message: str) -> None:
    table = module(optim.SGD(0.1), torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        table(*variable(), batch_sizes=sizes)


@pytest.mark.parametrize("sizes", [None, SIZES])
@pytest.mark.parametrize(
    ("pooling", "weighted"),
    [(Pooling.SUM, False), (Pooling.SUM, True), (Pooling.MEAN, True), (Pooling.NONE, False)],
)
def test_lookups_for_the_sake_of_their_update(
    pooling: Pooling, weighted: bool, sizes: list[list[int]] | None, device: torch.device
) -> None:
    tables = TABLES if pooling is not Pooling.NONE else [replace(t, dim=4) for t in TABLES]
    indices, offsets = (t.to(device) for t in variable())
    if sizes is None:
        offsets = offsets[: 4 * (len(offsets) // 4) + 1]
        indices = indices[: int(offsets[-1])] % 7
    found = []
    for for_update in (False, True):
        torch.manual_seed(0)
        table = TableBatchedEmbeddingBags(
            tables, optim.Adagrad(0.1), feature_tables=FEATURES, pooling=pooling, device=device
        )
        weights = torch.linspace(0, 1, indices.numel(), device=device).requires_grad_()
        given = weights if weighted else None
        with autograd.for_update() if for_update else nullcontext():
            out = table(indices, offsets, given, batch_sizes=sizes)
        if for_update:
            assert out.untyped_storage().nbytes() == out.element_size()
        grad = torch.linspace(-1, 1, out.numel(), device=device).view(out.shape)
        out.backward(grad)
        found.append((out.shape, out.dtype, weights.grad, table.weights))
    (*first, of_weights, trained), (*second, of_weights_too, trained_too) = found
    assert first == second
    assert (of_weights is None) == (of_weights_too is None) == (not weighted)
    if weighted:
        assert torch.equal(of_weights, of_weights_too)
    assert torch.equal(trained, trained_too)


def test_features_without_gradient_still_train(device: torch.device) -> None:
    table, other = (module(optim.SGD(0.1), device) for _ in range(2))
    offsets = torch.arange(0, 9, 1, device=device)
    indices = torch.tensor([1, 2, 3, 4, 5, 6, 2, 1], device=device)
    scales = torch.ones(8, device=device, requires_grad=True)
    wanted = torch.tensor([1, 0, 1, 0], device=device)
    table(indices, offsets, scales, feature_requires_grad=wanted).sum().backward()
    plain = torch.ones(8, device=device, requires_grad=True)
    other(indices, offsets, plain).sum().backward()
    mask = torch.tensor([1, 1, 0, 0, 1, 1, 0, 0], device=device)
    assert torch.equal(scales.grad, plain.grad * mask)
    assert torch.equal(table.weights, other.weights)
    with pytest.raises(ValueError, match="one entry per feature = 4"):
        table(indices, offsets, scales, feature_requires_grad=wanted[:2])


def test_known_number_of_rows(device: torch.device) -> None:
    tables = [TableSpec(30, 4), TableSpec(7, 4)]
    table = TableBatchedEmbeddingBags(tables, optim.External(), device=device)
    indices, offsets = torch.tensor([3, 3, 5, 1], device=device), torch.arange(5, device=device)
    table(indices, offsets, total_unique_indices=3).sum().backward()
    told = table.weights.grad
    table.weights.grad = None
    table(indices, offsets).sum().backward()
    assert torch.equal(told.to_dense(), table.weights.grad.to_dense())
    if device.type == "cpu":
        with pytest.raises(ValueError, match="number of distinct rows of the batch, 3, got 5"):
            table(indices, offsets, total_unique_indices=5).sum().backward()


@pytest.mark.parametrize("torch_optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_dense_gradient_equals_embedding_bag(torch_optimizer: Any, device: torch.device) -> None:
    specs = [replace(spec, name=f"t{t}") for t, spec in enumerate(TABLES)]
    dense = TableBatchedEmbeddingBags(
        specs, optim.External(gradient=optim.Gradient.DENSE), device=device
    )
    bags = [torch.nn.EmbeddingBag(s.rows, s.dim, mode="sum", device=device) for s in specs]
    for bag, table in zip(bags, dense.table_weights(), strict=True):
        bag.weight.data.copy_(table)
    first = torch_optimizer(dense.parameters(), lr=0.1)
    second = torch_optimizer([bag.weight for bag in bags], lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids = [torch.randint(0, s.rows, (10,), generator=generator).to(device) for s in specs]
        starts = torch.arange(0, 10, 2, device=device)
        offsets = torch.arange(0, 31, 2, device=device)
        out = dense(torch.cat(ids), offsets)
        want = torch.cat([bag(i, starts) for bag, i in zip(bags, ids, strict=True)], dim=1)
        assert_close(out, want)
        for optimizer, result in ((first, out), (second, want)):
            optimizer.zero_grad()
            (result**2).sum().backward()
            optimizer.step()
    for bag, table in zip(bags, dense.table_weights(), strict=True):
        assert_close(table, bag.weight.detach())
