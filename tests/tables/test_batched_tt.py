"""Several tensor trains in one module: the bits are those of a module per table."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib import optim
from emblib.reference import tt
from emblib.specs import BoundsCheck, Pooling, TTSpec
from emblib.tables import TableBatchedTTEmbeddingBags, TTEmbeddingBag

SPECS = [
    TTSpec(110, 8, (3, 4), (4, 5, 6), (2, 2, 2)),
    TTSpec(90, 12, (5,), name="two_cores"),
    TTSpec(110, 8, (3, 4), (4, 5, 6), (2, 2, 2), name="like_the_first"),
    TTSpec(500, 16, (2, 6, 3), name="four_cores"),
    TTSpec(1, 6, (1, 1), name="one_row"),
    TTSpec(70, 1, (2, 2), name="one_column"),
]
OPTIMIZERS = [optim.SGD(0.1), optim.Adagrad(0.1), optim.RowwiseAdagrad(0.1), optim.Adam(0.05)]
Make = type[TableBatchedTTEmbeddingBags]


pytestmark = pytest.mark.usefixtures("seeded_on_device")


class Features:
    """A batch by feature: indices, lengths of bags and weights."""

    def __init__(self, specs: Sequence[TTSpec], bags: Sequence[int], dtype: torch.dtype) -> None:
        self.lengths = [torch.randint(0, 5, (count,)) for count in bags]
        totals = [int(lengths.sum()) for lengths in self.lengths]
        self.indices = [
            torch.randint(-1, spec.rows, (n,)).to(dtype)
            for spec, n in zip(specs, totals, strict=True)
        ]
        self.weights = [torch.rand(n, requires_grad=True) for n in totals]

    def offsets(self, feature: int) -> Tensor:
        return _offsets(self.lengths[feature])

    def joined(self) -> tuple[Tensor, Tensor]:
        return torch.cat(self.indices), _offsets(torch.cat(self.lengths))


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def pair(
    specs: Sequence[TTSpec], optimizer: optim.Optimizer, reads: Sequence[int], **options: Any
) -> tuple[TableBatchedTTEmbeddingBags, list[TTEmbeddingBag]]:
    """Return a module of all tables, and a module with the same cores for each table."""
    batched = TableBatchedTTEmbeddingBags(specs, optimizer, feature_tables=reads, **options)
    alone = [TTEmbeddingBag(spec, optimizer, **options) for spec in specs]
    with torch.no_grad():
        for t, table in enumerate(alone):
            for core, value in zip(table.cores, batched.table_cores(t), strict=True):
                core.copy_(value)
    return batched, alone


def assert_same_tables(batched: TableBatchedTTEmbeddingBags, alone: list[TTEmbeddingBag]) -> None:
    for t, table in enumerate(alone):
        for core, value in zip(table.cores, batched.table_cores(t), strict=True):
            assert torch.equal(core, value)
            if core.grad is not None or value.grad is not None:
                assert torch.equal(core.grad, value.grad)
        states = zip(table.core_optimizer_states(), batched.core_optimizer_states(t), strict=True)
        for mine, theirs in states:
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("optimizer", [optim.SGD(0.1), None], ids=["fused", "dense"])
def test_a_gradient_that_is_a_view_of_columns(optimizer: optim.Optimizer | None) -> None:
    """The gradient of a part of `torch.cat(..., dim=1)` gives the bits of its copy."""
    features, rule = Features(SPECS, [4] * len(SPECS), torch.int64), optimizer or optim.External()
    viewed, copied = (TableBatchedTTEmbeddingBags(SPECS, rule) for _ in range(2))
    copied.load_state_dict(viewed.state_dict())
    width = sum(spec.dim for spec in SPECS)
    grad = torch.randn(4, width + 8)[:, 3:-5]
    viewed(*features.joined()).backward(grad)
    copied(*features.joined()).backward(grad.contiguous())
    for mine, theirs in zip(viewed.cores, copied.cores, strict=True):
        assert torch.equal(mine, theirs)
        assert optimizer is not None or torch.equal(mine.grad, theirs.grad)


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS, optim.External()], ids=lambda o: o.name)
@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bits_are_those_of_modules_of_their_own(
    optimizer: optim.Optimizer, pooling: Pooling, dtype: torch.dtype
) -> None:
    reads = list(range(len(SPECS)))
    batched, alone = pair(SPECS, optimizer, reads, pooling=pooling)
    for step in range(3):
        batch = Features(SPECS, [7] * len(SPECS), dtype)
        out = batched(*batch.joined(), torch.cat(batch.weights))
        grads = torch.randn_like(out)
        out.backward(grads)
        got = [weights.grad for weights in batch.weights]
        for weights in batch.weights:
            weights.grad = None
        parts = [
            table(batch.indices[f], batch.offsets(f), batch.weights[f])
            for f, table in enumerate(alone)
        ]
        assert torch.equal(out, torch.cat(parts, 1)), step
        torch.cat(parts, 1).backward(grads)
        for mine, weights in zip(got, batch.weights, strict=True):
            assert torch.equal(mine, weights.grad)
        assert_same_tables(batched, alone)
    assert batched.step == alone[0].step


def test_same_bits_on_any_number_of_threads() -> None:
    specs = [TTSpec(60_000, 32, (16, 16)), TTSpec(9_000, 16, (8,)), TTSpec(400, 32, (4, 4, 4))]
    batch = Features(specs, [700] * 3, torch.int64)
    threads, results = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            torch.manual_seed(3)
            tables = TableBatchedTTEmbeddingBags(specs, optim.Adagrad(0.1))
            out = tables(*batch.joined())
            out.backward(torch.sin(torch.arange(out.numel()).view_as(out).float()))
            results.append([out.detach(), *tables.cores])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
def test_features_may_share_a_table(pooling: Pooling) -> None:
    """One update for the lookups of both features, as if they were those of one."""
    reads = [1, 0, 1]
    batched, alone = pair(SPECS[:2], optim.Adagrad(0.1), reads, pooling=pooling)
    batch = Features([SPECS[t] for t in reads], [4] * 3, torch.int64)
    out = batched(*batch.joined())
    assert out.shape == (4, 12 + 8 + 12)
    grads = torch.randn_like(out)
    out.backward(grads)
    both = torch.cat([batch.indices[0], batch.indices[2]])
    lengths = torch.cat([batch.lengths[0], batch.lengths[2]])
    shared = alone[1](both, _offsets(lengths))
    single = alone[0](batch.indices[1], batch.offsets(1))
    assert torch.equal(out, torch.cat([shared[:4], single, shared[4:]], 1))
    shared.backward(torch.cat([grads[:, :12], grads[:, 20:]]))
    single.backward(grads[:, 12:20])
    assert_same_tables(batched, alone)


@pytest.mark.parametrize("weighted", [False, True])
def test_features_may_differ_in_batch_size(weighted: bool) -> None:
    sizes = [[3, 1], [0, 4], [2, 2], [5, 0], [1, 1], [0, 0]]
    bags = [sum(row) for row in sizes]
    batched, alone = pair(SPECS, optim.SGD(0.3), list(range(len(SPECS))))
    batch = Features(SPECS, bags, torch.int64)
    scales = torch.cat(batch.weights).detach() if weighted else None
    out = batched(*batch.joined(), scales, batch_sizes=sizes)
    parts = [
        table(batch.indices[f], batch.offsets(f), batch.weights[f].detach() if weighted else None)
        for f, table in enumerate(alone)
    ]
    blocks = [part.split(row) for part, row in zip(parts, sizes, strict=True)]
    want = torch.cat([block[rank].reshape(-1) for rank in range(2) for block in blocks])
    assert torch.equal(out, want)
    grads = torch.randn_like(out)
    out.backward(grads)
    want.backward(grads)
    assert_same_tables(batched, alone)


def test_no_pooling() -> None:
    specs = [SPECS[0], SPECS[2], TTSpec(30, 8, (4,))]
    batched, alone = pair(specs, optim.SGD(0.1), [0, 1, 2], pooling=Pooling.NONE)
    batch = Features(specs, [5] * 3, torch.int64)
    out = batched(*batch.joined())
    parts = [table(batch.indices[f], batch.offsets(f)) for f, table in enumerate(alone)]
    assert torch.equal(out, torch.cat(parts))
    grads = torch.randn_like(out)
    out.backward(grads)
    torch.cat(parts).backward(grads)
    assert_same_tables(batched, alone)
    with pytest.raises(ValueError, match="one dim for all tables"):
        TableBatchedTTEmbeddingBags(SPECS, pooling=Pooling.NONE)


def test_random_tables_match_dense_ones() -> None:
    """Outputs and gradients of many shapes, against the dense expansion in float64."""
    for seed in range(40):
        torch.manual_seed(seed)
        specs = []
        for t in range(int(torch.randint(1, 5, ()))):
            cores = int(torch.randint(2, 5, ()))
            p = tuple(torch.randint(1, 8, (cores,)).tolist())
            q = tuple(torch.randint(1, 5, (cores,)).tolist())
            sizes = [a * b for a, b in zip(p, q, strict=True)]
            left = list(accumulate(sizes, lambda a, b: a * b))
            most = [min(part, left[-1] // part) for part in left[:-1]]
            ranks = tuple(int(torch.randint(1, min(top, 9) + 1, ())) for top in most)
            rows = max(1, left[-1] // max(1, torch.tensor(q).prod().item()))
            specs.append(TTSpec(rows, int(torch.tensor(q).prod()), ranks, p, q, f"t{t}"))
        table = TableBatchedTTEmbeddingBags(specs, optim.External())
        batch = Features(specs, [3] * len(specs), torch.int64)
        out = table(*batch.joined())
        grads = torch.randn_like(out)
        out.backward(grads)
        column = 0
        for t, spec in enumerate(specs):
            cores64 = [core.detach().double().requires_grad_() for core in table.table_cores(t)]
            factors = spec.rows, spec.row_factors, spec.dim_factors
            want = tt.lookup(cores64, *factors, batch.indices[t], batch.offsets(t))
            columns = slice(column, column + spec.dim)
            column += spec.dim
            torch.testing.assert_close(out[:, columns].double(), want, rtol=1e-4, atol=1e-5)
            want.backward(grads[:, columns].double())
            for core, exact in zip(table.table_cores(t), cores64, strict=True):
                torch.testing.assert_close(core.grad.double(), exact.grad, rtol=1e-3, atol=1e-5)
            dense = tt.to_dense(cores64, spec.rows, spec.row_factors, spec.dim_factors)
            torch.testing.assert_close(table.to_dense(t).double(), dense, rtol=1e-4, atol=1e-6)


def test_invalid_ids_are_those_of_their_table() -> None:
    """Row 115 is beyond the first table, but within the 120 rows of its cores."""
    on_gpu = torch.get_default_device().type == "cuda"
    tables, _ = pair(SPECS[:2], optim.SGD(1.0), [0, 1], bounds_check=BoundsCheck.IGNORE)
    indices, offsets = torch.tensor([115, 4, 95, -1]), torch.tensor([0, 1, 2, 3, 4])
    out = tables(indices, offsets)
    first, second = tables.to_dense(0), tables.to_dense(1)
    torch.testing.assert_close(out[:, :8], first[[0, 4]])
    torch.testing.assert_close(out[0, 8:], second[0])
    assert (out[1, 8:] == 0).all()
    if on_gpu:
        return
    tables.bounds_check = BoundsCheck.FATAL
    with pytest.raises(RuntimeError, match=r"must be in \[0, 110\)"):
        tables(indices, offsets)


def test_a_frozen_table_stays_as_it_is() -> None:
    batched, alone = pair(SPECS, optim.Adagrad(0.1), list(range(len(SPECS))))
    for core in batched.table_cores(1):
        core.requires_grad_(False)
    batch = Features(SPECS, [4] * len(SPECS), torch.int64)
    out = batched(*batch.joined())
    grads = torch.randn_like(out)
    out.backward(grads)
    parts = [table(batch.indices[f], batch.offsets(f)) for f, table in enumerate(alone)]
    torch.cat([p.detach() if f == 1 else p for f, p in enumerate(parts)], 1).backward(grads)
    assert_same_tables(batched, alone)
    batched.table_cores(0)[1].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"cores \[1\] of 3 are frozen in table 'table_0'"):
        batched(*batch.joined())
    batched.requires_grad_(False)
    assert not batched(*batch.joined()).requires_grad


def test_a_state_dict_is_of_these_tables() -> None:
    first = TableBatchedTTEmbeddingBags(SPECS, optim.Adam(0.1))
    batch = Features(SPECS, [4] * len(SPECS), torch.int64)
    first(*batch.joined()).sum().backward()
    second = TableBatchedTTEmbeddingBags(SPECS, optim.Adam(0.1))
    second.load_state_dict(first.state_dict())
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key
    other = [*SPECS[:-1], TTSpec(70, 1, (2, 2), (5, 5, 5), name="one_column")]
    third = TableBatchedTTEmbeddingBags(other, optim.Adam(0.1))
    before = [core.clone() for core in third.cores]
    with pytest.raises(RuntimeError, match="another tensor train, which differs in row_factors"):
        third.load_state_dict(first.state_dict())
    assert all(torch.equal(core, old) for core, old in zip(third.cores, before, strict=True))


def test_sizes_and_description() -> None:
    tables = TableBatchedTTEmbeddingBags(SPECS[:2], optim.RowwiseAdagrad(0.1))
    values = sum(core.numel() for core in tables.cores)
    rows = sum(sum(spec.row_factors) for spec in SPECS[:2])
    assert tables.nbytes() == {"weights": 4 * values, "optimizer_state": 4 * rows}
    assert tables.compression == pytest.approx((110 * 8 + 90 * 12) / values)
    assert "two_cores: 90 x 12, ranks=(5,)" in repr(tables)


def test_permuted_ids_read_other_rows() -> None:
    given = [TTSpec(110, 8, (3, 4), (4, 5, 6), (2, 2, 2)), TTSpec(90, 12, (5,))]
    specs = [replace(spec, ids="permuted", seed=t) for t, spec in enumerate(given)]
    batched, alone = pair(specs, optim.Adagrad(0.1), [0, 1])
    plain = TableBatchedTTEmbeddingBags(given)
    with torch.no_grad():
        for core, value in zip(plain.cores, batched.cores, strict=True):
            core.copy_(value)
    for t, spec in enumerate(specs):
        rows = tt.permuted(torch.arange(spec.rows), spec.rows, spec.permutation)
        assert not torch.equal(rows, torch.arange(spec.rows))
        assert torch.equal(batched.to_dense(t), plain.to_dense(t)[rows])
    batch = Features(specs, [7, 7], torch.int64)
    out = batched(*batch.joined())
    parts = [table(batch.indices[f], batch.offsets(f)) for f, table in enumerate(alone)]
    assert torch.equal(out, torch.cat(parts, 1))
    out.sum().backward()
    torch.cat(parts, 1).sum().backward()
    assert_same_tables(batched, alone)


def test_cores_of_other_permutations_are_refused() -> None:
    spec = TTSpec(110, 8, (3, 4), (4, 5, 6), (2, 2, 2), ids="permuted", seed=5)
    saved = TTEmbeddingBag(spec).state_dict()
    TTEmbeddingBag(spec).load_state_dict(saved)
    for other in (replace(spec, seed=6), replace(spec, ids="as_given")):
        with pytest.raises(RuntimeError, match=r"differs in ids: .*permuted by seed 5"):
            TTEmbeddingBag(other).load_state_dict(saved)
    del saved["tt_layout"]
    with pytest.raises(RuntimeError, match="ids of these cores are as given"):
        TTEmbeddingBag(spec).load_state_dict(saved)
    with pytest.raises(ValueError, match="'as_given', 'permuted'"):
        replace(spec, ids="random")


def test_wrong_tables() -> None:
    with pytest.raises(ValueError, match="at least one TTSpec"):
        TableBatchedTTEmbeddingBags([])
    with pytest.raises(TypeError, match="must be a TTSpec"):
        TableBatchedTTEmbeddingBags([3])
    many = [TTSpec(2**30, 8, (1,), (2**15, 2**15), name=f"t{t}") for t in range(2)]
    TableBatchedTTEmbeddingBags(many, device="meta")
    huge = [TTSpec(2**62 // 4, 4, (1,), (2**30, 2**30), name=f"t{t}") for t in range(2)]
    with pytest.raises(ValueError, match="fewer than 2\\^31 halves"):
        TableBatchedTTEmbeddingBags(huge, device="meta")


@pytest.mark.parametrize("include_last", [True, False])
def test_one_table_takes_bags_of_equal_length(include_last: bool) -> None:
    table = TTEmbeddingBag(SPECS[0], include_last_offset=include_last)
    indices, weights = torch.randint(0, 110, (3, 4)), torch.rand(3, 4)
    offsets = torch.arange(0, 13 if include_last else 12, 4)
    flat = table(indices.view(-1), offsets, weights.view(-1))
    assert torch.equal(table(indices, None, weights), flat)
    assert table(indices[:, :0]).shape == (3, 8)
    assert table(indices[:0]).shape == (0, 8)
    with pytest.raises(ValueError, match="take no offsets"):
        table(indices, offsets)
    with pytest.raises(ValueError, match="need offsets"):
        table(indices[0])


def test_the_work_of_a_batch_is_that_of_its_distinct_rows_and_halves() -> None:
    """Counted here product by product, of each distinct row and half."""
    specs, reads = SPECS, [0, 1, 2, 3, 4, 5, 3]
    sizes = [[3, 2], [4, 0], [0, 0], [5, 1], [2, 2], [1, 3], [2, 0]]
    features = Features([specs[t] for t in reads], [sum(s) for s in sizes], torch.int64)
    bags = TableBatchedTTEmbeddingBags(specs, feature_tables=reads)
    work = bags.work(*features.joined(), batch_sizes=sizes)
    for t, spec in enumerate(specs):
        ids = torch.cat([features.indices[f] for f, read in enumerate(reads) if read == t])
        rows = {tuple(row) for row in _digits(ids[ids >= 0], spec)}
        split = 1 if len(spec.row_factors) == 2 else 2
        lefts, rights = {row[:split] for row in rows}, {row[split:] for row in rows}
        assert work[t][:3] == (len(rows), len(lefts), len(rights))
        q, ranks = spec.dim_factors, spec.full_ranks
        left = q[0] * ranks[1] * q[1] * ranks[2] if split == 2 else 0
        right = ranks[2] * q[2] * ranks[3] * q[3] if len(q) == 4 else 0
        halves = len(lefts) * left + len(rights) * right
        products = len(rows) * spec.dim * ranks[split]
        assert work[t].forward == halves + products
        # A product has two gradients, each as much work; left halves are made again.
        assert work[t].backward == 2 * (halves + products) + len(lefts) * left


def _digits(ids: Tensor, spec: TTSpec) -> list[list[int]]:
    return torch.stack(tt.digits(ids, spec.row_factors), 1).tolist()
