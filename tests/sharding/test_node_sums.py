"""Rows that a node sums before they are sent: two nodes of two ranks, over gloo."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from emblib import EmbeddingBagConfig, KeyedJaggedTensor, optim
from emblib.sharding import all_to_all, input_dist
from emblib.sharding.codecs import BF16, INT8, CommPrecision
from emblib.sharding.headers import Content
from emblib.sharding.layout import lay_out, sum_in_nodes
from emblib.sharding.lookup import OutputCall, start_joint_output_dist
from emblib.sharding.ranks import RankGroup, can_sum_in_nodes, split_by_node
from emblib.sharding.sharding_types import (
    Shard,
    TableShape,
    World,
    custom,
    grid,
    row_wise,
    table_row_wise,
)
from emblib.specs import Pooling
from emblib.storage import Hash
from tests.sharding import worlds
from tests.sharding.sharded_cases import (
    Case,
    batch,
    flat,
    make_sharded,
    make_source,
    sequences,
    tables,
    train,
)

SUM, MEAN = Pooling.SUM, Pooling.MEAN
LOCAL = 2
PLANS = {
    "twrw": ("twrw",) * 4,
    "grid": ("grid",) * 4,
    "with others": ("twrw", "rw", "tw", "grid"),
    "with replicas": ("dp", "twrw", "cw", "twrw"),
    "one node": tuple(
        (Shard(2, (0, r // 2), (0, d)), Shard(3, (r // 2, r), (0, d)))
        for r, d in ((13, 8), (7, 4), (20, 8), (3, 12))
    ),
    # Ranks in another order than rows, and two blocks on a rank.
    "blocks": tuple(
        (Shard(1, (0, 1), (0, d)), Shard(0, (1, 2), (0, d)), Shard(1, (2, r), (0, d)))
        for r, d in ((13, 8), (7, 4), (20, 8), (3, 12))
    ),
}


def on_nodes(ranks: RankGroup, local_size: int = LOCAL) -> RankGroup:
    """The same ranks as nodes of `local_size`."""
    return RankGroup(ranks.group, local_size=local_size, device=ranks.device)


def train_on_nodes(ranks: RankGroup, case: Case) -> str:
    return train(on_nodes(ranks), case)


def case_of(plan: str, *poolings: Pooling, **fields: Any) -> Case:
    return Case(tables(*poolings), PLANS[plan], local_size=LOCAL, **fields)


@pytest.mark.parametrize(
    ("plan", "poolings"),
    [*((plan, (SUM, MEAN)) for plan in PLANS), ("twrw", (SUM,)), ("with replicas", (MEAN,))],
)
def test_equal_to_one_process(plan: str, poolings: tuple[Pooling, ...]) -> None:
    assert set(worlds.run(4, train_on_nodes, case_of(plan, *poolings))) == {"equal"}


@pytest.mark.parametrize("fields", [{"batches": (0, 3, 0, 2)}, {"weighted": True}])
@pytest.mark.parametrize("plan", ["twrw", "with others", "with replicas", "one node"])
def test_batches_may_be_empty_or_weighted(plan: str, fields: dict[str, Any]) -> None:
    worlds.run(4, train_on_nodes, case_of(plan, SUM, MEAN, **fields))


@pytest.mark.parametrize("plan", ["twrw", "with others", "blocks", "one node"])
def test_features_of_unlike_batch_sizes(plan: str) -> None:
    case = case_of(plan, SUM, MEAN, batches=(3, 0, 4, 2), variable=True)
    worlds.run(4, train_on_nodes, case)


def _sizes_that_change(ranks: RankGroup) -> None:
    """The order in which rows are sent is that of this batch, not of the one before."""
    case = case_of("with others", SUM, MEAN)
    source = make_source(case)
    sharded = make_sharded(case, on_nodes(ranks), copy.deepcopy(source))
    for number, size in enumerate((4, 2, 5)):
        own = batch(case, 10 * number + ranks.rank, size)
        torch.testing.assert_close(flat(sharded(own)), flat(source(own)))


def test_batches_of_other_sizes_than_the_one_before() -> None:
    worlds.run(4, _sizes_that_change)


def test_empty_bags_of_other_tables_may_travel() -> None:
    worlds.run(4, train_on_nodes, case_of("with others", SUM, least_saved=1 << 40))


@pytest.mark.parametrize("optimizer", [optim.Adam(0.1), optim.Adagrad(0.5)])
def test_other_optimizers(optimizer: Any) -> None:
    worlds.run(4, train_on_nodes, case_of("with others", SUM, MEAN, optimizer=optimizer))


def test_dynamic_tables() -> None:
    configs = [
        replace(c, num_embeddings=4096) for c in tables(SUM, MEAN, storage=Hash(), dims=(8,) * 4)
    ]
    case = Case(tuple(configs), PLANS["twrw"], local_size=LOCAL, optimizer=optim.Adam(0.1))
    worlds.run(4, train_on_nodes, case)


@pytest.mark.parametrize(("codec", "tolerance"), [(BF16(), 1e-1), (INT8(row_dim=8), 2e-1)])
def test_codecs_apply_between_nodes(codec: Any, tolerance: float) -> None:
    both = CommPrecision(codec, codec)
    case = case_of("with others", SUM, comm_precision=both, tolerance=tolerance)
    worlds.run(4, train_on_nodes, case)


# The same bits, and fewer bytes between nodes


def counted(patch: pytest.MonkeyPatch, node: int) -> dict[Content, int]:
    """The bytes that this rank sends to other nodes from now on, by content."""
    sent: dict[Content, int] = {}
    start = all_to_all.start_all_to_all

    def count(values: Any, sizes: Sequence[int], *rest: Any, **named: Any) -> Any:
        ranks, content = rest[1], named["content"]
        others = [r for r in range(ranks.size) if ranks.global_rank(r) // LOCAL != node]
        nbytes = sum(sizes[r] for r in others) * values.element_size()
        sent[content] = sent.get(content, 0) + nbytes
        return start(values, sizes, *rest, **named)

    patch.setattr(all_to_all, "start_all_to_all", count)
    return sent


def two_ways(ranks: RankGroup, case: Case) -> list[dict[Content, int]]:
    """Train with and without nodes; the bits must agree. Returns the bytes between nodes."""
    input_dist._MIN_SAVED_ELEMENTS = 1 << 40
    found, results = [], []
    for local_size in (ranks.size, LOCAL):
        own = on_nodes(ranks, local_size)
        sharded = make_sharded(case, own, make_source(case).to(ranks.device))
        outputs = []
        with pytest.MonkeyPatch.context() as patch:
            found.append(counted(patch, ranks.rank // LOCAL))
            for step in range(2):
                output = flat(sharded(batch(case, step * 10 + ranks.rank, 6)))
                output.backward(torch.full_like(output, 0.3) * output.detach())
                outputs.append(output.detach())
        weights = [
            view.clone()
            for part in sharded.local_shards()
            for view in part.groups.views(part.index).values()
        ]
        results.append([*outputs, *weights])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    return found


@pytest.mark.parametrize("plan", ["twrw", "grid", "with others", "with replicas"])
def test_the_bits_are_those_without_sums(plan: str) -> None:
    whole = worlds.run(4, two_ways, case_of(plan, SUM, MEAN))
    for content in (Content.ROWS, Content.GRADIENTS):
        without, with_sums = (sum(rank[i][content] for rank in whole) for i in range(2))
        if plan in ("twrw", "grid"):
            assert with_sums * LOCAL == without > 0
        else:
            assert 0 < with_sums < without


def _skipped(ranks: RankGroup, ids: Sequence[int]) -> bool:
    """Whether rows were not summed, where rank r has `ids[r]` ids per bag."""
    input_dist._MIN_SAVED_ELEMENTS = 0
    case = case_of("twrw", SUM)
    source = make_source(case)
    module = make_sharded(case, on_nodes(ranks), copy.deepcopy(source))
    keys, size, count = ["f0", "f1", "f2", "f3"], 8, ids[ranks.rank]
    features = KeyedJaggedTensor(
        keys,
        torch.arange(len(keys) * size * count) * 7 % 3,
        lengths=torch.full((len(keys) * size,), count),
    )
    received = module.input_dist(features).wait().wait()
    output = module.compute_and_output_dist(received)
    torch.testing.assert_close(flat(output), flat(source(features)))
    output.values().sum().backward()
    return received.skips_sums


@pytest.mark.parametrize(
    ("ids", "skipped"), [((1,) * 4, True), ((5, 1, 5, 5), True), ((5,) * 4, False)]
)
def test_no_sums_where_they_save_nothing(ids: tuple[int, ...], *, skipped: bool) -> None:
    assert worlds.run(4, _skipped, ids) == [skipped] * 4


# Several collections at once, and groups


def _jointly(ranks: RankGroup) -> list[bool]:
    case = case_of("with others", SUM)
    own = on_nodes(ranks)
    assert split_by_node(own) is split_by_node(on_nodes(ranks))
    cases = [case, replace(case, plan=PLANS["twrw"]), replace(case, plan=("tw",) * 4)]
    alone = [make_sharded(one, own, make_source(one)) for one in cases]
    joint = [make_sharded(one, own, make_source(one)) for one in cases]
    features = [batch(case, 7 * i + ranks.rank, 3 + ranks.rank) for i in range(3)]
    outputs = [module(one) for module, one in zip(alone, features, strict=True)]
    received = [m.input_dist(one).wait().wait() for m, one in zip(joint, features, strict=True)]
    # As if the sizes of all of them had been found small.
    received = [one._replace(merges_rows=True) for one in received]
    calls = [OutputCall(m, m.compute(r), r) for m, r in zip(joint, received, strict=True)]
    together = [make() for make in start_joint_output_dist(calls)]
    equal = [torch.equal(flat(a), flat(b)) for a, b in zip(outputs, together, strict=True)]
    sum(flat(one).square().sum() for one in outputs).backward()
    sum(flat(one).square().sum() for one in together).backward()
    for a, b in zip(alone, joint, strict=True):
        for one, other in zip(a.local_shards(), b.local_shards(), strict=True):
            views = (part.groups.views(part.index)["weight"] for part in (one, other))
            equal.append(torch.equal(*views))
    return equal


def test_several_collections_exchange_together() -> None:
    assert all(all(equal) for equal in worlds.run(4, _jointly))


def _not_used(ranks: RankGroup) -> None:
    """Without gradients, and with an output that no loss uses."""
    case = case_of("twrw", SUM)
    source = make_source(case)
    module = make_sharded(case, on_nodes(ranks), copy.deepcopy(source))
    features = batch(case, ranks.rank, 4)
    with torch.no_grad():
        torch.testing.assert_close(flat(module(features)), flat(source(features)))
    unused, used = module(features), module(features)
    assert unused.values().shape == used.values().shape
    used.values().sum().backward()


def test_outputs_without_gradients() -> None:
    worlds.run(4, _not_used)


def test_what_is_summed() -> None:
    shapes = {"a": (10, 8), "b": (10, 8), "c": (10, 8), "d": (1, 8)}
    world = World(4, 2)
    rules = {"a": table_row_wise(1), "b": grid(), "c": row_wise(), "d": table_row_wise(0)}
    configs = [EmbeddingBagConfig(*shapes[name], name) for name in shapes]
    plan = {name: rule(TableShape(*shapes[name]), world) for name, rule in rules.items()}

    def arrange(slices: Any, reads: Any) -> list[int]:
        return list(range(len(reads)))

    layout = lay_out(configs, plan, 4, arrange, pooled=True)
    sums = sum_in_nodes(layout, 2)
    assert sums is not None
    found = [[(unit.feature, unit.shard.columns) for unit in node.units] for node in sums.nodes]
    # Not "c", whose rows are on two nodes, nor "d", of which a node has no two blocks.
    assert found == [[(1, (0, 4))], [(0, (0, 8)), (1, (4, 8))]]
    assert [node.columns for node in sums.nodes] == [4, 12]
    assert [[unit.feature for unit in rank.units] for rank in sums.direct] == [
        [2, 3],
        [2],
        [2],
        [2],
    ]
    none = {name: custom([Shard(0, (0, r), (0, d))]) for name, (r, d) in shapes.items()}
    plan = {name: rule(TableShape(*shapes[name]), world) for name, rule in none.items()}
    assert sum_in_nodes(lay_out(configs, plan, 4, arrange, pooled=True), 2) is None


def _where(ranks: RankGroup) -> list[bool]:
    sides = [on_nodes(ranks, local_size) for local_size in (1, 2, 4)]
    groups = split_by_node(sides[1])
    assert groups.local.gather_objects(ranks.rank) == [ranks.rank // 2 * 2, ranks.rank // 2 * 2 + 1]
    assert groups.across.gather_objects(ranks.rank) == [ranks.rank % 2, ranks.rank % 2 + 2]
    return [can_sum_in_nodes(side) for side in sides]


def test_ranks_with_nodes() -> None:
    assert worlds.run(4, _where) == [[False, True, False]] * 4
    assert not can_sum_in_nodes(RankGroup.single())


def outputs_by_default_dtype(ranks: RankGroup, case: Case) -> None:
    """Look up and differentiate with another default dtype than float32."""
    ranks = on_nodes(ranks)
    model = make_sharded(case, ranks, make_source(case))
    batch_of_rank = batch(case, ranks.rank, 3)
    expected = flat(model(batch_of_rank))
    torch.set_default_dtype(torch.float64)
    try:
        output = flat(model(batch_of_rank))
        output.sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


POOLED = case_of("one node", SUM)
UNPOOLED = Case(sequences(tables(SUM)), PLANS["with others"], local_size=LOCAL)


@pytest.mark.parametrize("case", [POOLED, UNPOOLED], ids=["pooled", "unpooled"])
def test_default_dtype_does_not_matter(case: Case) -> None:
    worlds.run(4, outputs_by_default_dtype, case)
