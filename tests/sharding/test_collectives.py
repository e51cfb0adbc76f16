"""Every collective against one process that sees what all ranks have; values, gradients, codecs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.sharding import collectives
from emblib.sharding.awaitables import Awaitable
from emblib.sharding.codecs import BF16, FP8, FP16, INT8, Codec, CommPrecision
from emblib.sharding.collectives import GradientReduction
from emblib.sharding.ranks import RankGroup
from tests.sharding import worlds

BATCHES = {
    "equal": (3, 3, 3, 3),
    "uneven": (2, 0, 5, 1),
    "first empty": (0, 4, 1, 2),
    "none": (0, 0, 0, 0),
}
COLUMNS = ((4,), (), (1, 2), (3, 2, 3))  # of the tables of each rank
WIDTH = 3


@dataclass(frozen=True)
class Case:
    """A collective, what the ranks have, and what it should give."""

    inputs: Callable[[Sequence[int], int], list[Any]]  # batch sizes, rank: shapes of its tensors
    act: Callable[..., Awaitable[Any]]  # tensors of this rank, batch sizes, ranks, options
    want: Callable[[list[list[Tensor]], Sequence[int], int], list[Tensor]]  # all, sizes, rank
    tells_dtype: bool = False

    def more(self, dtype: torch.dtype) -> dict[str, Any]:
        return {"dtype": dtype} if self.tells_dtype else {}


def _of_rank(whole: Tensor, batch: Sequence[int], rank: int) -> Tensor:
    return whole.split(list(batch))[rank]


def _rows_for(batch: Sequence[int], source: int, to: int) -> int:
    """Rows that `source` sends to `to`, where every pair has another number."""
    return (batch[source] + 2 * to) % 4


def _variable(batch: Sequence[int], rank: int) -> list[list[int]]:
    """Batch sizes by owner and its features, on this rank."""
    return [[batch[rank] * (f + 1) for f in range(len(own))] for own in COLUMNS[: len(batch)]]


def _variable_act(tensors: list[Tensor], batch: Sequence[int], ranks: RankGroup, **how: Any) -> Any:
    sizes = [_variable(batch, r)[ranks.rank] for r in range(ranks.size)]
    here = list(chain(*_variable(batch, ranks.rank)))
    columns = COLUMNS[: ranks.size]
    return collectives.variable_batch_alltoall_pooled(
        tensors[0], sizes, here, columns, ranks, **how
    )


def _variable_rows(batch: Sequence[int], owner: int) -> list[int]:
    sizes = [_variable(batch, r)[owner] for r in range(len(batch))]
    return [sum(n * d for n, d in zip(row, COLUMNS[owner], strict=True)) for row in sizes]


def _sequence_act(tensors: list[Tensor], batch: Sequence[int], ranks: RankGroup, **how: Any) -> Any:
    sizes = [_rows_for(batch, ranks.rank, to) for to in range(ranks.size)]
    came = [_rows_for(batch, source, ranks.rank) for source in range(ranks.size)]
    return collectives.alltoall_sequence(tensors[0], sizes, came, ranks, **how)


def _sequence_rows(batch: Sequence[int], rank: int) -> list[int]:
    return [_rows_for(batch, rank, to) for to in range(len(batch))]


def _sums(every: list[list[Tensor]], batch: Sequence[int], rank: int) -> list[Tensor]:
    return [reduce(torch.add, [_of_rank(e[0], batch, rank) for e in every])]


CASES = {
    "alltoall_pooled": Case(
        lambda batch, r: [(sum(batch), sum(COLUMNS[r]))],
        lambda t, batch, ranks, **how: collectives.alltoall_pooled(
            t[0], batch, [sum(c) for c in COLUMNS[: ranks.size]], ranks, **how
        ),
        lambda every, batch, rank: [torch.cat([_of_rank(e[0], batch, rank) for e in every], 1)],
    ),
    "alltoallv": Case(
        lambda batch, r: [(sum(batch), n) for n in COLUMNS[r]],
        lambda t, batch, ranks, **how: collectives.alltoallv(
            t, batch, COLUMNS[: ranks.size], ranks, **how
        ),
        lambda every, batch, rank: [_of_rank(t, batch, rank) for e in every for t in e],
        tells_dtype=True,
    ),
    "variable_batch_alltoall_pooled": Case(
        lambda batch, r: [(sum(_variable_rows(batch, r)),)],
        _variable_act,
        lambda every, batch, rank: [
            torch.cat(
                [e[0].split(_variable_rows(batch, owner))[rank] for owner, e in enumerate(every)]
            )
        ],
    ),
    "alltoall_sequence": Case(
        lambda batch, r: [(sum(_sequence_rows(batch, r)), WIDTH)],
        _sequence_act,
        lambda every, batch, rank: [
            torch.cat([e[0].split(_sequence_rows(batch, r))[rank] for r, e in enumerate(every)])
        ],
    ),
    "reduce_scatter_pooled": Case(
        lambda batch, r: [(n, WIDTH) for n in batch],
        lambda t, batch, ranks, **how: collectives.reduce_scatter_pooled(t, ranks, **how),
        lambda every, batch, rank: [reduce(torch.add, [e[rank] for e in every])],
    ),
    "reduce_scatter_v_pooled": Case(
        lambda batch, r: [(sum(batch), WIDTH)],
        lambda t, batch, ranks, **how: collectives.reduce_scatter_v_pooled(
            t[0], batch, ranks, **how
        ),
        _sums,
    ),
    "reduce_scatter_base_pooled": Case(
        lambda batch, r: [(len(batch) * max(batch), WIDTH)],
        lambda t, batch, ranks, **how: collectives.reduce_scatter_base_pooled(t[0], ranks, **how),
        lambda every, batch, rank: _sums(every, [max(batch)] * len(batch), rank),
    ),
    "all_gather_base_pooled": Case(
        lambda batch, r: [(batch[r], WIDTH)],
        lambda t, batch, ranks, **how: collectives.all_gather_base_pooled(
            t[0], ranks, batch_sizes=batch, **how
        ),
        lambda every, batch, rank: [torch.cat([e[0] for e in every])],
    ),
}


def _numbers(shape: Any, seed: int, dtype: torch.dtype, kind: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "whole":  # any order of sums gives the same bits
        return torch.randint(-8, 9, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype)


def _all_inputs(case: Case, batch: Sequence[int], dtype: Any, kind: str) -> list[list[Tensor]]:
    return [
        [
            _numbers(shape, 100 * rank + i, dtype, kind).requires_grad_()
            for i, shape in enumerate(case.inputs(batch, rank))
        ]
        for rank in range(len(batch))
    ]


def _weighted(outs: Sequence[Tensor], rank: int, kind: str) -> tuple[Tensor, list[Tensor]]:
    """A loss whose gradient at `outs` is other numbers on every rank."""
    weights = [_numbers(out.shape, 9000 + rank, out.dtype, kind).to(out.device) for out in outs]
    pairs = zip(outs, weights, strict=True)
    return sum((out * w).sum() for out, w in pairs) + torch.zeros(()), weights


def _as_list(out: Any) -> list[Tensor]:
    return out if isinstance(out, list) else [out]


def _run(
    ranks: RankGroup, name: str, batch: Sequence[int], comm_precision: CommPrecision, options: Any
) -> None:
    gradients, dtype, kind = options
    case, rank = CASES[name], ranks.rank
    every = _all_inputs(case, batch, dtype, kind)
    mine = [t.detach().to(ranks.device, copy=True).requires_grad_() for t in every[rank]]
    how = {"comm_precision": comm_precision, "gradients": gradients} | case.more(dtype)
    outs = _as_list(case.act(mine, batch, ranks, **how).wait())
    wants = [case.want(every, batch, r) for r in range(ranks.size)]
    sent = [t for e in every for t in e]
    _compare(
        [out.cpu() for out in outs],
        wants[rank],
        _most(comm_precision.forward, sent, ranks.size, kind),
    )
    _weighted(outs, rank, kind)[0].backward()
    total, grads = torch.zeros(()), []
    for r, want in enumerate(wants):
        loss, weights = _weighted(want, r, kind)
        total, grads = total + loss, grads + weights
    total.backward()
    divisor = ranks.size if gradients is GradientReduction.MEAN else 1
    most = _most(comm_precision.backward, grads, ranks.size, kind)
    for got, want in zip(mine, every[rank], strict=True):
        assert got.grad is not None
        _compare([got.grad.cpu()], [want.grad / divisor], most / divisor)


def _most(codec: Codec, values: Sequence[Tensor], ranks: int, kind: str) -> float:
    """What a sum of one value from each rank may change by; as if each were the largest."""
    if codec.is_identity:
        return 0.0 if kind == "whole" else 1e-6
    largest = max((float(v.detach().abs().max()) for v in values if v.numel()), default=0.0)
    return ranks * float(codec.bound(torch.full((1,), largest)))


def _compare(outs: Sequence[Tensor], wants: Sequence[Tensor], most: float) -> None:
    assert len(outs) == len(wants)
    for out, want in zip(outs, wants, strict=True):
        assert out.shape == want.shape
        assert out.dtype == want.dtype
        if most == 0:
            assert torch.equal(out, want)
        else:
            torch.testing.assert_close(out, want, rtol=0, atol=most * 1.001)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch", BATCHES.values(), ids=list(BATCHES))
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_exact(name: str, batch: tuple[int, ...], size: int) -> None:
    """Whole numbers, so that what is wanted does not depend on the order of sums."""
    for gradients in GradientReduction:
        options = gradients, torch.float32, "whole"
        worlds.run(size, _run, name, batch[:size], CommPrecision(), options)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    options = GradientReduction.SUM, dtype, "whole"
    worlds.run(3, _run, name, BATCHES["uneven"][:3], CommPrecision(), options)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "codec", [FP16(), FP16(512.0), BF16(), INT8(4), INT8(), FP8(8), FP8(16, "e5m2")], ids=repr
)
def test_codecs(name: str, codec: Codec) -> None:
    options = GradientReduction.MEAN, torch.float32, "normal"
    for comm_precision in (
        CommPrecision(forward=codec),
        CommPrecision(backward=codec),
        CommPrecision(codec, codec),
    ):
        worlds.run(3, _run, name, BATCHES["uneven"][:3], comm_precision, options)


def _sum_bits(ranks: RankGroup) -> None:
    every = [_numbers((4 * ranks.size, 5), r, torch.float32, "normal") for r in range(ranks.size)]
    out = collectives.reduce_scatter_base_pooled(every[ranks.rank], ranks).wait()
    parts = [e.split(4)[ranks.rank] for e in every]
    assert torch.equal(out, reduce(torch.add, parts))
    gathered = collectives.all_gather_base_pooled(
        parts[0].clone().requires_grad_(), ranks, gradients="sum"
    ).wait()
    assert gathered.shape == (4 * ranks.size, 5)


def test_sums_are_in_rank_order() -> None:
    worlds.run(4, _sum_bits)


def _reordered(ranks: RankGroup) -> None:
    """Several under way at once, awaited and differentiated in another order."""
    values = [_numbers((2 * ranks.size, 3), i, torch.float32, "whole") for i in range(3)]
    leaves = [v.requires_grad_() for v in values]
    under_way = [collectives.reduce_scatter_base_pooled(v, ranks) for v in leaves]
    second, third, first = (under_way[i].wait() for i in (1, 2, 0))
    (first + 2 * second + 3 * third).sum().backward()
    for factor, leaf in enumerate(leaves, 1):
        assert torch.equal(leaf.grad, torch.full_like(leaf, factor / ranks.size))
    assert under_way[0].wait() is first


def test_several_under_way() -> None:
    worlds.run(3, _reordered)


def _values_that_differ(ranks: RankGroup) -> None:
    """Messages of equal sizes in other encodings raise on all ranks, which can go on."""
    rows = torch.ones(2, 4)
    half = (torch.float16, torch.bfloat16)[ranks.rank]
    codec = (INT8(row_dim=4), FP8(row_dim=4))[ranks.rank]
    other = "in another dtype or with another codec"
    with pytest.raises(RuntimeError, match=other):
        collectives.all_gather_base_pooled(rows.to(half), ranks)
    with pytest.raises(RuntimeError, match=other):
        collectives.reduce_scatter_base_pooled(rows, ranks, comm_precision=CommPrecision(codec))
    gathered = collectives.all_gather_base_pooled(rows, ranks).wait()
    assert torch.equal(gathered, torch.ones(4, 4))


def test_encodings_that_differ_between_ranks() -> None:
    worlds.run(2, _values_that_differ)


def _frozen(ranks: RankGroup) -> None:
    with torch.no_grad():
        out = collectives.all_gather_base_pooled(torch.ones(2, 2), ranks).wait()
    assert not out.requires_grad
    assert not collectives.all_gather_base_pooled(torch.ones(2, 2), ranks).wait().requires_grad


def test_without_gradients() -> None:
    worlds.run(2, _frozen)


def test_wrong_use() -> None:
    ranks = RankGroup.single()
    rows = torch.zeros(3, 2)
    with pytest.raises(ValueError, match=r"an entry for each of 1 ranks: got \[1, 2\]"):
        collectives.reduce_scatter_v_pooled(rows, [1, 2], ranks)
    with pytest.raises(ValueError, match=r"4 rows, the sum of batch_sizes: got \[3, 2\]"):
        collectives.reduce_scatter_v_pooled(rows, [4], ranks)
    with pytest.raises(ValueError, match=r"sizes must be >= 0, got \[-1\]"):
        collectives.alltoall_sequence(rows, [-1], [3], ranks)
    with pytest.raises(TypeError, match="CommPrecision"):
        collectives.all_gather_base_pooled(rows, ranks, comm_precision=FP16())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"columns\[0\] of this rank: got 2"):
        collectives.alltoall_pooled(rows, [3], [5], ranks)
    with pytest.raises(TypeError, match=r"must be floating, got torch\.int64"):
        collectives.all_gather_base_pooled(rows.long(), ranks)
    with pytest.raises(ValueError, match="GradientReduction must be one of 'mean', 'sum'"):
        collectives.all_gather_base_pooled(rows, ranks, gradients="average")
    with pytest.raises(ValueError, match="an entry for each of the 2 features of all ranks: got 1"):
        collectives.variable_batch_alltoall_pooled(torch.zeros(5), [[1, 1]], [1], [[2, 3]], ranks)
    with pytest.raises(ValueError, match=r"must have the columns \[1, 1\] of columns\[0\]"):
        collectives.alltoallv([rows], [3], [[1, 1]], ranks)
    with pytest.raises(TypeError, match=r"must all be torch\.float16, got \[torch\.float32\]"):
        collectives.alltoallv([rows], [3], [[2]], ranks, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"3 rows, the sum of batch_sizes: got \[4, 1\]"):
        collectives.alltoallv([rows, torch.zeros(4, 1)], [3], [[2, 1]], ranks)
    with pytest.raises(TypeError, match=r"must be floating, got torch\.int64"):
        collectives.alltoallv([rows.long()], [3], [[2]], ranks, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"of one D, got shapes \[\[3\]\]"):
        collectives.reduce_scatter_pooled([rows[:, 0]], ranks)
    with pytest.raises(ValueError, match=r"must have 2 dimensions: got \[\]"):
        collectives.all_gather_base_pooled(torch.tensor(1.0), ranks)
    with pytest.raises(ValueError, match=r"4 rows, the sum of sizes: got \[3, 2\]"):
        collectives.alltoall_sequence(rows, [4], [4], ranks)
    with pytest.raises(ValueError, match=r"1 rows, batch_sizes\[0\] of this rank: got \[3, 2\]"):
        collectives.all_gather_base_pooled(rows, ranks, batch_sizes=[1])
    variable = collectives.variable_batch_alltoall_pooled
    with pytest.raises(ValueError, match=r"batch_sizes\[0\] must .* 2 features .*got \[1\]"):
        variable(torch.zeros(5), [[1]], [1, 1], [[2, 3]], ranks)
    with pytest.raises(ValueError, match=r"5 elements, batch_sizes times columns\[0\]: got \[4\]"):
        variable(torch.zeros(4), [[1, 1]], [1, 1], [[2, 3]], ranks)
    with pytest.raises(RuntimeError, match="sent 1 elements where it expected 5 from itself"):
        collectives.alltoall_sequence(torch.ones(1, 1), [1], [5], ranks)
