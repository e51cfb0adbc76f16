"""Sharded collections give what the same collection gives in one process, step after step."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emblib import optim
from emblib.sharding import RankGroup
from emblib.sharding.codecs import BF16, FP8, FP16, INT8, CommPrecision
from emblib.sharding.sharding_types import Shard, equal_spans
from emblib.specs import Pooling
from emblib.storage import Hash, Hashed, Narrow, QuotientRemainder, TensorTrain
from tests import nightly
from tests.sharding import worlds
from tests.sharding.sharded_cases import (
    WORDS,
    Case,
    batch,
    compare_tables,
    joined,
    make_sharded,
    make_source,
    sequences,
    tables,
    train,
)

SUM, MEAN = Pooling.SUM, Pooling.MEAN
MIXES = {
    "mixed": ("dp", "rw", "tw", "cw"),
    "other": ("rw", "dp", "tw", "dp"),
    "third": ("cw", "tw", "dp", "rw"),
}
PLANS = {**{word: (word,) * 4 for word in WORDS}, **MIXES}
# What is summed in one order however the table is spread: whole rows of whole bags.
BITWISE = {"tw", "cw", "twcw", "dp"}
# A number a row sees all columns of it, and is one a block where columns are cut.
ELEMENTWISE = {
    "sgd": optim.SGD(0.5),
    "adagrad": optim.Adagrad(0.5),
    "adam": optim.Adam(0.1),
    "l2": optim.SGD(0.5, weight_decay=optim.L2(0.1)),
}
ROWWISE = {
    "rowwise_adagrad": optim.RowwiseAdagrad(0.5),
    "partial_rowwise_adam": optim.PartialRowwiseAdam(0.1),
    "lamb": optim.LAMB(0.1),
    "lars": optim.LARS(0.1),
}


def whole_nodes(size: int) -> int:
    """Ranks of a node: two nodes where that divides."""
    return 2 if size == 4 else size


# Where rows travel depends on the plan and the size, what becomes of them on the plan and the
# pooling: every plan with each size and with each pooling, not every triple.
@pytest.mark.parametrize(
    ("pooling", "size"),
    [("sum", 2), ("sum", 4), ("both", 3), ("both", 4), ("sequence", 3)],
)
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan(plan: str, pooling: str, size: int) -> None:
    configs = tables(SUM) if pooling == "sum" else tables(SUM, MEAN)
    configs = sequences(configs) if pooling == "sequence" else configs
    exact = plan in BITWISE and pooling in ("sum", "sequence")
    case = Case(configs, PLANS[plan], local_size=whole_nodes(size), exact_output=exact)
    assert set(worlds.run(size, train, case)) == {"equal"}


@pytest.mark.parametrize("plan", ["rw", "mixed"])
def test_one_rank_has_every_table_whole(plan: str) -> None:
    for configs in (tables(SUM), sequences(tables(SUM))):
        worlds.run(1, train, Case(configs, PLANS[plan]))


@pytest.mark.parametrize("plan", ["rw", "mixed", "grid"])
def test_empty_bags_travel_where_that_is_little(plan: str) -> None:
    case = Case(tables(SUM, MEAN), PLANS[plan], local_size=2, least_saved=1 << 40)
    worlds.run(4, train, case)


# An optimizer steps a shard wherever it is, so that each meets each plan, and each plan one size.
@pytest.mark.parametrize(("plan", "size"), [("rw", 2), ("mixed", 4), ("third", 2), ("grid", 4)])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_optimizer_by_element(name: str, plan: str, size: int) -> None:
    case = Case(
        tables(SUM, MEAN), PLANS[plan], local_size=whole_nodes(size), optimizer=ELEMENTWISE[name]
    )
    worlds.run(size, train, case)


@pytest.mark.parametrize(("plan", "size"), [("rw", 3), ("tw", 2), ("dp", 3), ("other", 2)])
@pytest.mark.parametrize("name", ROWWISE)
def test_every_optimizer_by_row(name: str, plan: str, size: int) -> None:
    worlds.run(size, train, Case(tables(SUM, MEAN), PLANS[plan], optimizer=ROWWISE[name]))


def swap_averages(ranks: RankGroup, case: Case) -> None:
    """Every training forward counts, so the collection in one process makes one per step too."""
    whole = make_source(case).to(ranks.device)
    sharded = make_sharded(case, ranks, copy.deepcopy(whole))
    for step in range(4):
        batches = [batch(case, 10 * step + r, 3).to(ranks.device) for r in range(ranks.size)]
        sharded(batches[ranks.rank]).values().square().sum().backward()
        whole(joined(batches)).values().square().sum().backward()
        compare_tables(sharded, whole, case.tolerance)


@pytest.mark.parametrize("storage", [None, Narrow(2)])
def test_an_average_replaces_weights_before_forward(storage: Any) -> None:
    ensemble = optim.EnsembleRowwiseAdagrad(0.5, average_every=1, swap_every=2)
    case = Case(tables(SUM, storage=storage), PLANS["other"], optimizer=ensemble, tolerance=1e-5)
    worlds.run(2, swap_averages, case)


@pytest.mark.parametrize("plan", ["mixed", "other", "grid", "rw"])
@pytest.mark.parametrize(
    ("batches", "sizes"), [((0, 3, 0, 2), (4,)), ((7, 0, 1, 0), (2,)), ((0, 0, 0, 0), (1, 4))]
)
@pytest.mark.parametrize("pooled", [True, False])
def test_batches_may_differ_and_be_empty(
    plan: str, batches: Any, sizes: Any, *, pooled: bool
) -> None:
    configs = tables(SUM, MEAN) if pooled else sequences(tables(SUM))
    for size in sizes:
        case = Case(configs, PLANS[plan], batches=batches, local_size=whole_nodes(size))
        worlds.run(size, train, case)


@pytest.mark.parametrize("plan", PLANS)
def test_weighted_sums_and_means(plan: str) -> None:
    case = Case(tables(SUM, MEAN), PLANS[plan], weighted=True, local_size=2)
    worlds.run(4, train, case)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("plan", ["tw", "rw", "cw", "dp", "mixed"])
def test_features_of_unlike_batch_sizes(plan: str, *, weighted: bool) -> None:
    for size, batches in ((1, (5,)), (2, (3, 0)), (3, (5, 4, 3))):
        case = Case(tables(SUM, MEAN), PLANS[plan], batches, variable=True, weighted=weighted)
        worlds.run(size, train, case)


@pytest.mark.parametrize("plan", ["tw", "rw", "mixed"])
@pytest.mark.parametrize("pooled", [True, False])
def test_int32_ids(plan: str, *, pooled: bool) -> None:
    configs = tables(SUM, MEAN) if pooled else sequences(tables(SUM))
    worlds.run(2, train, Case(configs, PLANS[plan], ids=torch.int32))


@pytest.mark.parametrize("plan", ["tw", "rw"])
@pytest.mark.parametrize(("pooled", "size"), [(True, 1), (True, 3), (False, 2), (False, 4)])
def test_dynamic_tables(plan: str, size: int, *, pooled: bool) -> None:
    configs = tables(SUM, MEAN, storage=Hash(), dims=(8, 8, 8, 8))
    configs = tuple(_roomy(c) for c in configs)
    configs = configs if pooled else sequences(configs)
    worlds.run(size, train, Case(configs, PLANS[plan], optimizer=optim.Adam(0.1)))


def _roomy(config: Any) -> Any:
    from dataclasses import replace

    return replace(config, num_embeddings=4096)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("plan", ["tw", "dp"])
def test_tensor_trains_whole(plan: str, *, pooled: bool) -> None:
    configs = tables(SUM, MEAN, storage=TensorTrain((2, 2)), dims=(8, 8, 8, 8))
    configs = configs if pooled else sequences(configs)
    worlds.run(3, train, Case(configs, PLANS[plan], tolerance=1e-5))


SHARED_ROWS = {
    "hashed": Hashed(3),
    "hashed twice": Hashed(2, functions=2, hash="remainder"),  # type: ignore[arg-type]
    "multiplied": QuotientRemainder(2),
    "added": QuotientRemainder(3, "add"),  # type: ignore[arg-type]
    "narrow": Narrow(3),
    "concatenated": QuotientRemainder(2, "concatenate"),  # type: ignore[arg-type]
}
BY_COLUMNS = ["hashed", "hashed twice", "multiplied", "added"]


@pytest.mark.parametrize(
    ("kind", "plan", "pooled"),
    [
        *((kind, "tw", True) for kind in SHARED_ROWS),
        *((kind, "dp", False) for kind in SHARED_ROWS),
        *((kind, "cw", number % 2 == 0) for number, kind in enumerate(BY_COLUMNS)),
    ],
)
def test_tables_whose_ids_share_rows(kind: str, plan: str, *, pooled: bool) -> None:
    configs = tables(SUM, MEAN, storage=SHARED_ROWS[kind], dims=(8, 8, 8, 8))
    configs = configs if pooled else sequences(configs)
    case = Case(configs, PLANS[plan], weighted=pooled, optimizer=optim.Adagrad(0.2), tolerance=1e-5)
    for size in (1, 3):
        worlds.run(size, train, case)


@pytest.mark.parametrize("kind", SHARED_ROWS)
def test_features_of_unlike_batch_sizes_share_rows(kind: str) -> None:
    configs = tables(SUM, MEAN, storage=SHARED_ROWS[kind], dims=(8, 8, 8, 8))
    case = Case(configs, PLANS["tw"], (3, 0, 4, 0), variable=True, weighted=True, tolerance=1e-5)
    worlds.run(2, train, case)


@pytest.mark.parametrize(
    ("codec", "tolerance"),
    [(FP16(), 2e-2), (BF16(), 1e-1), (INT8(row_dim=8), 2e-1), (FP8(row_dim=8), 5e-1)],
)
@pytest.mark.parametrize("pooled", [True, False])
def test_values_travel_in_fewer_bits(codec: Any, tolerance: float, *, pooled: bool) -> None:
    configs = tables(SUM, MEAN) if pooled else sequences(tables(SUM))
    case = Case(
        configs, PLANS["mixed"], comm_precision=CommPrecision(codec, codec), tolerance=tolerance
    )
    worlds.run(2, train, case)


@st.composite
def tilings(draw: Any, rows: int, columns: int, size: int) -> tuple[Shard, ...]:
    """Any: cut by rows and columns at any places, each shard on any rank."""
    row_spans = draw(_cuts(rows))
    column_spans = draw(_cuts(columns))
    ranks = st.integers(0, size - 1)
    return tuple(Shard(draw(ranks), r, c) for r in row_spans for c in column_spans)


def _cuts(length: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    inner = st.lists(st.integers(1, max(1, length - 1)), max_size=2, unique=True)
    edges = inner.map(lambda cuts: sorted({0, length, *(c for c in cuts if c < length)}))
    return edges.map(lambda e: list(pairwise(e)))


@settings(max_examples=nightly.number(12, 25), deadline=None)
@given(data=st.data())
def test_any_tiling(data: Any) -> None:
    size = data.draw(st.integers(1, 4))
    configs = tables(SUM, MEAN)
    plan = tuple(
        data.draw(
            st.one_of(st.just("dp"), tilings(config.num_embeddings, config.embedding_dim, size))
        )
        for config in configs
    )
    pooled = data.draw(st.booleans())
    case = Case(configs if pooled else sequences(configs), plan, optimizer=optim.Adam(0.1))
    worlds.run(size, train, case)


def test_blocks_are_those_of_torch_chunk() -> None:
    for size in range(1, 40):
        for parts in range(1, 9):
            sizes = [end - start for start, end in equal_spans(size, parts)]
            assert sizes == [chunk.numel() for chunk in torch.arange(size).chunk(parts)]
