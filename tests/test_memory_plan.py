"""Plans for a budget of bytes: as good as the best there is, and true about bytes."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import emblib
from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    optim,
    plan_memory,
    storage,
)
from emblib.memory_plan import (
    AS_IT_IS,
    EVICTED,
    MEASURED,
    METHODS,
    BackingMemory,
    BudgetError,
    MemoryChoice,
)
from emblib.memory_plan.plan import _loss_at
from emblib.memory_plan.selection import (
    SHARES,
    Limits,
    _uniform_plans,
    select_choices,
    total_nbytes,
    without_dominated,
)
from emblib.sharding.planner import Planner, Topology
from emblib.trace.skew import IdSkew
from experiments.paths import REFERENCE, ROOT

ADAGRAD = optim.RowwiseAdagrad(lr=0.1)
EVERY = (*METHODS, "evicting")


def tables(*rows: int, **changes: Any) -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(n, 16, f"t{i}", **changes) for i, n in enumerate(rows)]


def smallest(configs: Any, **choices: Any) -> int:
    """Return the least bytes that any plan takes."""
    with pytest.raises(BudgetError) as caught:
        plan_memory(configs, 1, **choices)
    return caught.value.missing_nbytes + 1


# The skew of ids


def shares_of(skew: IdSkew) -> np.ndarray:
    return np.repeat(skew.shares.numpy(), skew.sizes.numpy().astype(int))


def test_the_skew_of_counts() -> None:
    counts = torch.tensor([0, 5, 1, 0, 3, 1])
    assert shares_of(IdSkew.of_counts(counts)).tolist() == [0.5, 0.3, 0.1, 0.1, 0, 0]
    skew = IdSkew.of_counts(counts)
    missed = [skew.miss_rate(rows) for rows in (1, 2, 3, 4, 6)]
    assert missed == pytest.approx([0.5, 0.2, 0.1, 0.0, 0.0])


@pytest.mark.parametrize("rows", [1, 7, 3000, 200_000])
def test_zipf_in_groups_is_zipf(rows: int) -> None:
    exact = np.arange(1, rows + 1) ** -1.05
    exact /= exact.sum()
    skew = IdSkew.zipf(rows)
    assert skew.sizes.sum() == rows
    assert (skew.sizes * skew.shares).sum() == pytest.approx(1.0)
    for kept in {1, rows // 100 + 1, rows // 3 + 1, rows}:
        assert skew.miss_rate(kept) == pytest.approx(1 - exact[:kept].sum(), abs=2e-3)


@pytest.mark.parametrize("kept", [10, 100, 1000])
def test_what_ids_of_a_row_share_is_what_a_hash_makes_them_share(kept: int) -> None:
    shares = shares_of(IdSkew.zipf(2000))
    chance, found = np.random.default_rng(0), []
    for _ in range(30):
        row = chance.integers(kept, size=len(shares))
        of_row = np.bincount(row, shares, kept)[row]
        found.append((shares * (of_row - shares) / of_row).sum())
    assert IdSkew.zipf(2000).shared_update_rate(kept) == pytest.approx(np.mean(found), rel=0.05)


def exactly_shared(shares: list[float], rows: int) -> float:
    """Return the share over all hashes, one after another."""
    found = []
    for places in itertools.product(range(rows), repeat=len(shares)):
        of_row = np.bincount(places, shares, rows)[list(places)]
        found.append(sum(s * (r - s) / r for s, r in zip(shares, of_row, strict=True)))
    return float(np.mean(found))


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("counts", [[1], [7, 7], [1, 2, 3, 94], [50, 30, 15, 4, 1]])
def test_what_ids_share_is_the_mean_over_all_hashes(counts: list[int], rows: int) -> None:
    skew = IdSkew.of_counts(torch.tensor([*counts, 0, 0]))
    shares = [count / sum(counts) for count in counts]
    assert skew.shared_update_rate(rows) == pytest.approx(exactly_shared(shares, rows), abs=2e-3)


def test_many_different_counts_are_grouped() -> None:
    counts = torch.arange(1, 20_000)
    skew = IdSkew.of_counts(counts)
    assert len(skew.sizes) < 1000
    assert int(skew.sizes.sum()) == len(counts)
    exact = counts.flip(0).double() / counts.sum()
    for kept in (10, 1000, 15_000):
        assert skew.miss_rate(kept) == pytest.approx(1 - float(exact[:kept].sum()), abs=2e-3)


def test_the_examples_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/memory.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(block, names)
    assert "user" in capsys.readouterr().out
    user = names["plan"].choices[0]
    assert user.method == "cached"
    assert user.hit_rate >= 0.7


@pytest.mark.parametrize("rows", [30, 300, 1500])
def test_hits_are_those_of_a_cache_of_the_least_recently_used(rows: int) -> None:
    skew, cache, hits = IdSkew.zipf(3000), OrderedDict[int, None](), 0
    drawn = np.random.default_rng(0).choice(3000, 60_000, p=shares_of(skew))
    for number, i in enumerate(drawn.tolist()):
        hits += i in cache and number >= 20_000
        cache[i] = None
        cache.move_to_end(i)
        if len(cache) > rows:
            cache.popitem(last=False)
    assert skew.hit_rate(rows) == pytest.approx(hits / 40_000, abs=0.01)


def test_a_cache_of_all_used_rows_serves_all() -> None:
    skew = IdSkew.of_counts(torch.tensor([3, 0, 2, 0]))
    assert skew.hit_rate(2) == 1.0
    # Of ids that are drawn with 3/5 and 2/5, one is the last one again by the sum of the squares.
    assert skew.hit_rate(1) == pytest.approx(0.52, abs=0.03)


def test_without_lookups_nothing_is_shared() -> None:
    assert IdSkew.of_counts(torch.zeros(5)).shared_update_rate(2) == 0.0


@pytest.mark.parametrize("rows", [10**7, 10**9])
def test_all_ids_of_a_large_table_are_counted(rows: int) -> None:
    assert int(IdSkew.zipf(rows).sizes.sum()) == rows


# Losses


def test_losses_are_powers_through_their_points_and_at_most_one() -> None:
    curve = ((16.0, 0.1), (4.0, 0.4))
    assert [_loss_at(curve, x) for x in (16, 4, 8, 64, 1)] == pytest.approx(
        [0.1, 0.4, 0.2, 0.025, 1.0]
    )
    assert _loss_at(((0.5, 0.02),), 0.25) == 0.02


SHARED = {"planted": 0.605, "movielens": 0.884, "flights": 0.966}
"""Of lookups at 1/64 of the rows: how much of their row's training others are, by remainder."""


def relative_losses() -> dict[tuple[str, float], float]:
    """Return losses by method and share: of all data sets together, 1 where all ids share a row."""
    runs = [p for p in REFERENCE.glob("*/quality*") if (p / "quality.csv").exists()]
    found = []
    for run in runs:
        rows = pd.read_csv(run / "quality.csv")
        found.append(rows[rows["status"] == "ok"])
    rows = pd.concat(found)
    at = rows.set_index(["data", "contender", "share"])["auc_change"].to_dict()
    least = 1 / 64
    importance = {
        d: -(at[d, "hashed", least] + at[d, "modulo", least]) / 2 / SHARED[d] for d in SHARED
    }
    losses = {}
    for method, share in {(method, share) for _, method, share in at}:
        known = [d for d in SHARED if (d, method, share) in at]
        total = -sum(at[d, method, share] for d in known)
        losses[method, share] = total / sum(importance[d] for d in known)
    return losses


def test_the_measured_losses_are_those_of_the_committed_references() -> None:
    found = relative_losses()
    shares = (0.5, 0.25, 1 / 16, 1 / 64)
    trains = [loss for _, loss in MEASURED["tensor_train"]]
    assert trains == pytest.approx([found["tt_permuted", s] for s in shares], abs=0.02)
    parts = [loss for _, loss in MEASURED["quotient_remainder"]]
    assert parts == pytest.approx([found["qr_product", s] for s in shares[:3]], abs=0.02)
    narrow = [loss for _, loss in MEASURED["narrow"]]
    assert narrow == pytest.approx([found["narrow", s] for s in shares[:3]], abs=0.002)
    assert MEASURED["bf16"][0][1] == pytest.approx(max(found["bf16", 0.5], 0.003), abs=0.002)


# The choice


def made_up(chance: random.Random, count: int) -> list[list[MemoryChoice]]:
    config = tables(10)[0]
    options = []
    for t in range(count):
        size, loss, choices = chance.randrange(1000, 100_000), 0.0, []
        for k in range(chance.randrange(1, 6)):
            method = AS_IT_IS if not k else chance.choice(METHODS)
            choices.append(MemoryChoice("", config, config, method, size, size, loss, 1.0 + t % 3))
            size = chance.randrange(1, size + 1)
            loss += chance.random() * (1 - loss)
        options.append(choices)
    return options


def score(options: list[list[MemoryChoice]], picked: Any) -> tuple[int, float]:
    chosen = [choices[k] for choices, k in zip(options, picked, strict=True)]
    return sum(c.nbytes for c in chosen), sum(c.importance * c.loss for c in chosen)


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    chance = random.Random(seed)
    options = made_up(chance, 5)
    least = sum(choices[-1].nbytes for choices in options)
    most = sum(choices[0].nbytes for choices in options)
    budget = chance.randint(least, most)
    nbytes, loss = score(options, select_choices(options, Limits(budget)))
    assert nbytes <= budget
    every = itertools.product(*(range(len(choices)) for choices in options))
    # Bytes are counted in 1/4096 of the budget, rounded up for each table.
    exact = [score(options, picked) for picked in every]
    assert loss <= min(one for size, one in exact if size <= max(least, budget * (1 - 5 / 4096)))
    assert loss >= min(one for size, one in exact if size <= budget)


@pytest.mark.parametrize("seed", range(30))
def test_the_choice_within_two_memories_is_the_best_of_all(seed: int) -> None:
    chance, options = random.Random(seed), []
    for choices in made_up(random.Random(seed), 4):
        plain = choices[0].nbytes
        behind = [
            replace(
                choices[0], method="cached", nbytes=plain // n, backing_nbytes=plain, hit_rate=h
            )
            for n, h in ((2, 0.9), (3, 0.85), (8, 0.5 + chance.random() / 4))
        ]
        options.append(sorted([*choices, *behind], key=lambda c: -c.nbytes))
    least = sum(min(c.nbytes for c in some if not c.backing_nbytes) for some in options)
    limits = Limits(
        chance.randint(least, sum(some[0].nbytes for some in options)),
        chance.randint(1, sum(some[0].nbytes for some in options)),
    )
    picked = select_choices(options, limits)
    assert limits.allow(options, picked)
    cost = sum(some[k].cost for some, k in zip(options, picked, strict=True))
    every = itertools.product(*(range(len(some)) for some in options))
    exact = [
        (*total_nbytes(options, one), sum(o[k].cost for o, k in zip(options, one, strict=True)))
        for one in every
    ]
    # Bytes are counted in 1/1024 and 1/256 of the limits, rounded up for each table.
    below = (limits.budget * (1 - 5 / 1024), (limits.backing or 0) * (1 - 5 / 256))
    within = [c for device, behind, c in exact if device <= below[0] and behind <= below[1]]
    assert cost <= min(within, default=np.inf) + 1e-12
    assert cost >= min(
        c
        for device, behind, c in exact
        if device <= limits.budget and behind <= (limits.backing or 0)
    )


def test_a_plan_that_fits_two_memories_is_found() -> None:
    """Exchanging the cheapest byte first, b and then a, takes 270 bytes of the device."""
    options = []
    for name, (plain_nbytes, backing_nbytes) in {"a": (210, 150), "b": (60, 50)}.items():
        config = emblib.EmbeddingBagConfig(10, 4, name)
        plain = MemoryChoice("", config, config, AS_IT_IS, plain_nbytes, plain_nbytes, 0.0, 1.0)
        cached = replace(plain, method="cached", nbytes=10, backing_nbytes=backing_nbytes)
        options.append([plain, cached])
    assert select_choices(options, Limits(240, 100)) == [0, 1]
    with pytest.raises(BudgetError, match="take about 270 B"):
        select_choices(options, Limits(200, 100))


def test_uniform_plans_come_in_the_order_of_the_options() -> None:
    """Not in that of a set of strings, which differs from process to process."""
    config = emblib.EmbeddingBagConfig(10, 4, "item")
    options = [
        [
            MemoryChoice("", config, config, f"method {k}", 2 ** (9 - k), 2**9, 0.0, 1.0)
            for k in range(9)
        ]
    ]
    halves = [plan for (plan,) in _uniform_plans(options)][:: len(SHARES)]
    assert halves == [8, *range(1, 9)]  # method 0 takes more than a half


def test_choices_that_others_beat_are_left_out() -> None:
    (config,) = tables(10)
    plain = MemoryChoice("", config, config, AS_IT_IS, 100, 100, 0.0, 1.0)
    cached = replace(plain, method="cached", nbytes=40, backing_nbytes=100, hit_rate=0.9)
    worse = replace(cached, nbytes=50, hit_rate=0.8)
    lossy = replace(plain, method="hashed", nbytes=60, loss=0.2)
    assert without_dominated([worse, lossy, cached, plain]) == [plain, lossy, cached]


def test_a_budget_for_all_changes_nothing() -> None:
    configs = tables(1000, 50_000)
    plan = plan_memory(configs, 1 << 30, optimizer=ADAGRAD)
    assert plan.configs == tuple(configs)
    assert {choice.method for choice in plan.choices} == {AS_IT_IS}
    assert plan.loss == 0.0
    assert plan.nbytes == plan.plain_nbytes == 51_000 * (16 + 1) * 4


def test_what_does_not_fit_says_by_how_much() -> None:
    configs = tables(1000, 50_000)
    need = smallest(configs, optimizer=ADAGRAD)
    assert plan_memory(configs, need, optimizer=ADAGRAD).nbytes == need
    with pytest.raises(BudgetError, match=r"1 B more than the budget.*'t1'") as caught:
        plan_memory(configs, need - 1, optimizer=ADAGRAD)
    assert caught.value.missing_nbytes == 1


@pytest.mark.parametrize("share", [0.6, 0.2, 0.02])
def test_a_plan_is_as_good_as_every_uniform_choice_of_its_bytes(share: float) -> None:
    configs = tables(200_000, 50_000, 3000, 400)
    plain = 253_400 * 68
    budget = int(share * plain)
    plan = plan_memory(configs, budget, optimizer=ADAGRAD, methods=EVERY)
    assert plan.nbytes <= budget
    compared = 0
    for method, part in itertools.product(EVERY, (0.5, 0.25, 0.125, 1 / 16, 1 / 32, 1 / 64)):
        alike = []
        for config in configs:
            allowed = max(int(part * config.num_embeddings * 68), 1)
            try:
                alike.append(plan_memory([config], allowed, optimizer=ADAGRAD, methods=[method]))
            except BudgetError:
                break
        if len(alike) == len(configs) and sum(one.nbytes for one in alike) <= budget:
            assert plan.loss <= np.mean([one.loss for one in alike]) + 1e-9
            compared += 1
    assert compared


@pytest.mark.parametrize("method", EVERY)
def test_a_collection_made_of_a_plan_has_its_bytes_and_trains(method: str) -> None:
    configs = tables(20_000, 4096)
    need = smallest(configs, optimizer=ADAGRAD, methods=[method])
    plan = plan_memory(configs, 3 * need // 2, optimizer=ADAGRAD, methods=[method])
    assert method in {choice.method for choice in plan.choices}
    bags = EmbeddingBagCollection(list(plan.configs), optimizer=ADAGRAD)
    batch = KeyedJaggedTensor.from_lengths_sync(
        ["t0", "t1"], torch.randint(4096, (64,)), torch.ones(64, dtype=torch.int64)
    )
    before = bags(batch).values().detach().clone()
    bags(batch).values().square().sum().backward()
    assert not torch.equal(bags(batch).values(), before)
    if method != "evicting":  # which rounds its capacity, and has an index
        sizes = bags.groups.nbytes()
        assert sizes["weights"] + sizes["optimizer_state"] == plan.nbytes


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables(100_000, 50), optimizer=ADAGRAD)
        self.rows = EmbeddingCollection(
            [EmbeddingConfig(5000, 8, "t0", optimizer=optim.SGD(lr=0.1))]
        )


def test_the_tables_of_a_model_get_the_optimizer_that_is_given() -> None:
    config = tables(100_000)[0]
    for given in (None, optim.SGD(lr=0.1)):
        model = nn.Sequential(EmbeddingBagCollection([config], optimizer=given))
        of_model = plan_memory(model, 4 << 20, optimizer=ADAGRAD)
        of_list = plan_memory([config], 4 << 20, optimizer=ADAGRAD)
        assert [c.nbytes for c in of_model.choices] == [c.nbytes for c in of_list.choices]
        assert of_model.plain_nbytes == of_list.plain_nbytes
        assert "give plan_memory the optimizer" not in str(of_model)


def test_importances_of_any_size_give_the_weighted_mean_of_losses() -> None:
    configs = tables(1000, 10)
    expected = plan_memory(configs, 20_000).loss
    assert expected > 0
    for factor in (1e-320, 1e308):
        plan = plan_memory(configs, 20_000, importance={"t0": factor, "t1": factor})
        assert plan.loss == pytest.approx(expected, rel=1e-3)
    plan = plan_memory(configs, 20_000, importance={"t0": 0.0, "t1": 0.0})
    assert plan.loss == 0
    assert "larger choices would not lower the loss" in str(plan)


def test_a_model_has_a_plan_per_collection() -> None:
    plan = plan_memory(Model(), 2 << 20, importance={"rows.t0": 5.0})
    assert [choice.path for choice in plan.choices] == ["bags", "bags", "rows"]
    assert [choice.importance for choice in plan.choices] == [1.0, 1.0, 5.0]
    assert len(plan.of("bags")) == 2
    assert isinstance(plan.of("rows")[0], EmbeddingConfig)
    with pytest.raises(KeyError, match="no collection at 'bag'"):
        plan.of("bag")
    shown = str(plan)
    assert "bags.t0" in shown
    assert "2.00 MiB allowed" in shown
    assert "No lookups are known of 3 of 3 tables" in shown


def test_a_plan_goes_into_the_sharding_planner() -> None:
    plan = plan_memory(tables(100_000, 50_000, 500), 1 << 20, optimizer=ADAGRAD)
    assert "tensor_train" in {choice.method for choice in plan.choices}
    model = EmbeddingBagCollection(list(plan.configs), device="meta", optimizer=ADAGRAD)
    sharded = Planner(Topology(world_size=2, memory=4 << 20), batch_size=64).solve(model)
    assert set(sharded.plan.modules[""]) == {"t0", "t1", "t2"}


def test_recorded_lookups_decide() -> None:
    bags = EmbeddingBagCollection(tables(50_000, 50_000), optimizer=ADAGRAD)
    few, many = torch.randint(500, (4000,)), torch.randint(50_000, (4000,))
    lengths = torch.ones(8000, dtype=torch.int64)
    batch = KeyedJaggedTensor.from_lengths_sync(["t0", "t1"], torch.cat([few, many]), lengths)
    with emblib.TraceRecorder(bags) as recorder:
        bags(batch)
    plan = plan_memory(bags, 1 << 20, trace=recorder.trace, methods=["evicting"])
    first, second = plan.choices
    assert first.config.num_embeddings >= 500
    assert first.loss == pytest.approx(0.0, abs=1e-9)
    assert first.nbytes < second.nbytes
    counts = torch.bincount(many, minlength=50_000)
    missed = 1 - counts.topk(second.config.num_embeddings).values.sum() / 4000
    assert second.loss == pytest.approx(EVICTED * float(missed))
    assert not any("No lookups" in line for line in plan.assumptions)


def test_lookups_of_another_table_of_this_name_are_not_taken() -> None:
    model = nn.Module()
    for path in ("a", "b", "c"):
        name = "user" if path != "c" else "item"
        setattr(model, path, EmbeddingBagCollection([EmbeddingBagConfig(5000, 16, name)]))
    features = tuple(emblib.TracedFeature("f", path, 5000) for path in ("b.user", "x.item"))
    ids = torch.zeros(100, dtype=torch.int64)
    trace = emblib.LookupTrace(features, (ids, ids), (torch.ones(100), torch.ones(100)))
    plan = plan_memory(model, 5000 * 40, trace=trace, optimizer=ADAGRAD)
    assert any("No lookups are known of 1 of 3 tables (a.user)" in s for s in plan.assumptions)


def test_tables_in_host_memory_take_no_bytes_of_the_device() -> None:
    kept = EmbeddingBagConfig(4096, 16, "kept", storage=storage.Dense("managed"))  # type: ignore[arg-type]
    plan = plan_memory([kept], 1000, optimizer=ADAGRAD, device="cuda")
    assert plan.nbytes == 0
    assert "kept" in str(plan)


# Behind a cache


def on_gpu(configs: Any, budget: int, nbytes: int = 1 << 40, **choices: Any) -> Any:
    backing = BackingMemory(nbytes, min_hit_rate=choices.pop("min_hit_rate", 0.5))
    return plan_memory(
        configs, budget, optimizer=ADAGRAD, device="cuda", backing=backing, **choices
    )


def test_tables_are_cached_only_where_there_is_memory_behind_it() -> None:
    configs = tables(100_000, 20_000)
    budget = 120_000 * 68 // 3
    without = plan_memory(configs, budget, optimizer=ADAGRAD, device="cuda")
    assert "cached" not in {choice.method for choice in without.choices}
    assert without.loss > 0
    plan = on_gpu(configs, budget)
    assert "cached" in {choice.method for choice in plan.choices}
    assert plan.loss == 0.0
    assert plan.nbytes <= budget
    for choice in plan.choices:
        cached = choice.method == "cached"
        assert choice.backing_nbytes == cached * choice.before.num_embeddings * 68
        if cached:
            count = choice.before.num_embeddings
            rows = math.ceil(choice.config.storage.cache.load_factor * count / 32) * 32
            assert choice.hit_rate == IdSkew.zipf(count).hit_rate(rows)
            assert choice.hit_rate >= 0.5
    shown = str(plan)
    assert "in host memory, 1/" in shown
    assert "hit rate 0." in shown
    assert "allowed in memory behind caches" in shown
    assert any("Hit rates (t" in line for line in plan.assumptions)


def test_with_room_on_the_device_nothing_is_cached() -> None:
    plan = on_gpu(tables(1000, 50_000), 1 << 30)
    assert {choice.method for choice in plan.choices} == {AS_IT_IS}
    assert plan.backing_nbytes == 0


def test_bytes_that_are_left_make_larger_caches() -> None:
    (config,) = tables(100_000)
    rates = [
        on_gpu([config], 100_000 * 68 * part // 100).choices[0].hit_rate for part in (20, 40, 70)
    ]
    assert rates == sorted(set(rates))


def test_memory_behind_caches_is_not_exceeded() -> None:
    configs = tables(50_000, 50_000, 20_000)
    plan = on_gpu(configs, 120_000 * 68 // 2, 51_000 * 68)
    assert [choice.method for choice in plan.choices].count("cached") == 1
    assert plan.backing_nbytes <= 51_000 * 68
    assert plan.nbytes <= 120_000 * 68 // 2


def test_the_table_that_is_looked_up_more_has_the_larger_cache() -> None:
    names, count = ("t0", "t1"), torch.arange(20_000, 0, -1) // 100 + 1
    ids = [torch.arange(20_000).repeat_interleave(count * n) for n in (1, 20)]
    trace = emblib.LookupTrace(
        tuple(emblib.TracedFeature(name, name, 20_000) for name in names),
        tuple(ids),
        tuple(torch.ones(len(one), dtype=torch.int64) for one in ids),
    )
    plan = on_gpu(tables(20_000, 20_000), 40_000 * 68 // 2, trace=trace, min_hit_rate=0.0)
    few, many = plan.choices
    assert many.nbytes > few.nbytes
    assert many.lookups == pytest.approx(20 / 21)


def test_caches_that_serve_too_few_lookups_are_not_offered() -> None:
    configs = tables(100_000)
    budget = 100_000 * 68 // 20
    assert on_gpu(configs, budget, min_hit_rate=0.0).choices[0].method == "cached"
    (choice,) = on_gpu(configs, budget, min_hit_rate=0.999).choices
    assert choice.method != "cached"


def test_tables_in_host_memory_count_where_it_is_limited() -> None:
    kept = EmbeddingBagConfig(4096, 16, "kept", storage=storage.Dense("managed"))  # type: ignore[arg-type]
    with pytest.raises(BudgetError, match="68 B more than backing has") as caught:
        on_gpu([kept], 1 << 20, 4095 * 68)
    assert caught.value.missing_nbytes == 68


def test_a_plan_with_tables_on_disk_trains_within_its_bytes(tmp_path: Path) -> None:
    configs = tables(20_000, 4096)
    plan = plan_memory(
        configs,
        24_096 * 68 // 2,
        optimizer=ADAGRAD,
        backing=BackingMemory(1 << 30, tmp_path, 0.3),
        methods=["cached"],
    )
    cached = [c for c in plan.choices if c.method == "cached"]
    assert cached
    assert "on disk" in str(plan)
    bags = EmbeddingBagCollection(list(plan.configs), optimizer=ADAGRAD)
    ids = torch.randint(4096, (64,))
    batch = KeyedJaggedTensor.from_lengths_sync(
        ["t0", "t1"], ids, torch.ones(64, dtype=torch.int64)
    )
    before = bags(batch).values().detach().clone()
    bags(batch).values().square().sum().backward()
    assert not torch.equal(bags(batch).values(), before)
    assert {path.name for path in tmp_path.iterdir()} == {c.before.name for c in cached}
    sizes = bags.groups.nbytes()
    dense = sum(c.nbytes for c in plan.choices if c.method == AS_IT_IS)
    # Besides rows, a cache has some counters.
    assert sizes["cache"] + dense == pytest.approx(plan.nbytes, abs=1024)


def test_tables_that_others_update_are_not_cached() -> None:
    configs = tables(100_000)
    plan = plan_memory(
        configs, 4 << 20, device="cuda", backing=BackingMemory(1 << 40, min_hit_rate=0.0)
    )
    assert "cached" not in {choice.method for choice in plan.choices}


def test_what_is_not_measured_is_said() -> None:
    plan = plan_memory(tables(10**9), 1 << 20)
    assert any("Tensor trains of larger tables (t0)" in line for line in plan.assumptions)
    assert any("16-bit rows are left out" in line for line in plan.assumptions)
    near = plan_memory(tables(5000), 1 << 18, optimizer=ADAGRAD)
    assert not any("larger tables" in line or "16-bit" in line for line in near.assumptions)


@pytest.mark.parametrize(
    ("method", "share", "said"),
    [
        ("tensor_train", 1 / 40, False),
        ("tensor_train", 1 / 1000, True),
        ("narrow", 1 / 4, False),
        ("narrow", 1 / 8, False),
        ("quotient_remainder", 1 / 2, False),
        ("quotient_remainder", 1 / 50, True),
    ],
)
def test_losses_that_no_measured_ones_enclose_are_said(
    method: str, share: float, said: bool
) -> None:
    configs = tables(50_000)
    budget = int(share * 50_000 * 68)
    plan = plan_memory(configs, budget, optimizer=ADAGRAD, methods=[method])
    assert plan.choices[0].method == method
    assert any("Losses of t0 are extrapolated" in line for line in plan.assumptions) == said


@pytest.mark.parametrize("rank", [1, 2, 3, 5, 7, 11, 13, 17, 25, 30, 60, 127])
def test_ranks_of_a_plan_are_near_the_largest_that_fit(rank: int) -> None:
    """Within a quarter, or 1 of few."""
    (config,) = tables(10**7)
    with_rank = replace(config, storage=storage.TensorTrain((rank, rank)))
    whole = storage.TableSlice.whole(with_rank)
    budget = int(with_rank.storage.nbytes(whole, ADAGRAD, "cpu").device)
    falling = {"tensor_train": [(float(r), 1.0 / r) for r in (1, 16, 128)]}
    (choice,) = plan_memory(
        [config], budget, optimizer=ADAGRAD, methods=["tensor_train"], losses=falling
    ).choices
    found = choice.config.storage.ranks[0]
    assert found <= rank
    assert rank <= max(found + 1, found * 5 / 4)


def test_evicting_tables_start_within_the_same_bounds() -> None:
    (config,) = tables(10_000)
    (choice,) = plan_memory([config], 60_000, optimizer=ADAGRAD, methods=["evicting"]).choices
    assert choice.config.num_embeddings < 10_000
    assert choice.config.bounds == config.bounds


@pytest.mark.parametrize("bits", [8, 4])
def test_served_bytes_are_those_of_quantised_tables(bits: int) -> None:
    configs = tables(1000, 2000)
    plan = plan_memory(configs, 1 << 20, optimizer=ADAGRAD, serving=bits)
    served = [replace(c, storage=storage.Quantized(bits)) for c in configs]
    assert plan.nbytes == sum(EmbeddingBagCollection(served).groups.nbytes().values())
    assert f"rows of {bits} bits is not counted" in str(plan)


def test_tables_of_other_storage_stay() -> None:
    kept = EmbeddingBagConfig(4096, 16, "kept", storage=storage.TensorTrain((4, 4)))
    plan = plan_memory([kept, *tables(10_000)], 200 << 10, optimizer=ADAGRAD)
    assert plan.configs[0] == kept
    assert plan.choices[1].method != AS_IT_IS


def test_initial_values_that_a_way_cannot_draw_exclude_it() -> None:
    configs = tables(10_000, init_fn=nn.init.zeros_)
    with pytest.raises(BudgetError):
        plan_memory(configs, 1000, methods=["tensor_train"])


def test_16_bit_rows_are_rounded_as_they_were_measured() -> None:
    (choice,) = plan_memory(tables(10_000), 10_000 * 40, optimizer=ADAGRAD).choices
    assert choice.method == "bf16"
    assert choice.config.rounding == emblib.StochasticRounding()


def test_losses_of_ones_own() -> None:
    configs = tables(10_000)
    given = {"tensor_train": ((64.0, 0.9), (1.0, 0.95)), "quotient_remainder": ((0.5, 0.01),)}
    plan = plan_memory(configs, 200 << 10, optimizer=ADAGRAD, losses=given)
    assert plan.choices[0].method == "quotient_remainder"
    assert plan.choices[0].loss == 0.01


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"budget": 0}, ValueError, "budget"),
        ({"methods": "bf16"}, ValueError, "methods must be a list of bf16"),
        ({"methods": ["robe"]}, ValueError, "methods must be a list of bf16"),
        ({"methods": 3}, ValueError, "methods must be a list of bf16"),
        ({"losses": {"narrow": 3}}, ValueError, "must be pairs"),
        ({"losses": {"narrow": [1, 2]}}, ValueError, "must be pairs"),
        ({"serving": 16}, ValueError, "serving must be None, 8 or 4"),
        (
            {"importance": {"t9": 1.0}},
            ValueError,
            r"importance of tables that are not there: .'t9'",
        ),
        ({"importance": {"t0": -1.0}}, ValueError, "importance must be finite numbers"),
        ({"importance": {"t0": "2"}}, TypeError, "importance of 't0' must be a number, got '2'"),
        ({"importance": {"t0": True}}, TypeError, "importance of 't0' must be a number, got True"),
        ({"importance": ["t0"]}, TypeError, "importance must be a dict of numbers by table"),
        ({"losses": {"hashed": ((0.5, 0.1),)}}, ValueError, "not of 'hashed'"),
        ({"losses": {"bf16": ()}}, ValueError, "must be pairs"),
        ({"losses": {"narrow": ((0.5, 0.9), (0.5, 0.1))}}, ValueError, "must be pairs"),
        ({"losses": {"narrow": ((0.5, 0.9), (0.25, 0.1))}}, ValueError, "fall as x grows"),
        ({"device": "gpu"}, ValueError, "device must be 'cpu' or 'cuda'"),
        ({"trace": 5}, TypeError, "trace must be a LookupTrace"),
        ({"optimizer": "adam"}, TypeError, "optimizer must be one of emblib.optim"),
        ({"methods": ["cached"]}, ValueError, "'cached' and backing="),
        (
            {"methods": ["bf16"], "backing": BackingMemory(9), "device": "cuda"},
            ValueError,
            "go together",
        ),
        ({"backing": 5, "device": "cuda"}, TypeError, "backing must be None or a BackingMemory"),
        ({"backing": BackingMemory(9)}, ValueError, "a directory for device='cpu'"),
        ({"backing": BackingMemory(9, "x"), "device": "cuda"}, ValueError, "none for 'cuda'"),
        (
            {"backing": BackingMemory(9), "device": "cuda", "serving": 8},
            ValueError,
            "rows of 8 bits have no cache",
        ),
        ({"tables": []}, ValueError, "there are no tables"),
        ({"tables": nn.Linear(2, 2)}, ValueError, "there are no tables"),
        ({"tables": [emblib.TableSpec(10, 4)]}, TypeError, "EmbeddingBagConfig"),
        ({"tables": tables(10)[0]}, TypeError, "must be a model, or a list"),
        ({"losses": [0.1]}, TypeError, "losses must be a dict"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        plan_memory(**{"tables": tables(10), "budget": 1 << 20, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "nbytes must be"), ((9, None, 1.5), r"min_hit_rate must be in \[0, 1\], got 1.5")],
)
def test_wrong_memory_behind_caches(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BackingMemory(*arguments)


def test_a_directory_must_be_a_path() -> None:
    with pytest.raises(TypeError, match="directory must be None or a path, got 5"):
        BackingMemory(9, 5)  # type: ignore[arg-type]


def test_losses_of_an_iterator_are_used() -> None:
    points = ((0.5, 0.1), (0.25, 0.2))
    losses: list[Any] = [{"narrow": points}, {"narrow": iter(points)}]
    plans = [
        plan_memory(tables(1000), 40_000, methods=["narrow"], losses=curves) for curves in losses
    ]
    assert plans[0].choices == plans[1].choices


def test_methods_of_an_iterator_are_used() -> None:
    methods: Any = iter(["bf16", "narrow"])
    plan = plan_memory(tables(1000), 20_000, methods=methods, optimizer=emblib.optim.SGD(0.1))
    assert {choice.method for choice in plan.choices} <= {"bf16", "narrow"}


def test_tables_of_one_name() -> None:
    with pytest.raises(ValueError, match=r"must differ in name, got \['t0', 't0'\]"):
        emblib.plan_memory([*tables(1000), *tables(10)], 1 << 20, optimizer=emblib.optim.SGD(0.1))


def test_tables_may_come_from_a_generator() -> None:
    configs: Any = iter(tables(1000, 10))
    plan = emblib.plan_memory(configs, 1 << 20, optimizer=emblib.optim.SGD(0.1))
    assert [config.num_embeddings for config in plan.configs] == [1000, 10]
