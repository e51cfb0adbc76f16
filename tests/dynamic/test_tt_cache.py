"""What each eviction means: twenty steps against a model in plain Python, and spilled rows."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib import optim
from emblib.dynamic import CachedTTEmbeddingBags, RowEviction, TTCache
from emblib.reference import tt as reference
from emblib.specs import Pooling, TTSpec
from tests.optimizer_cases import CASES
from tests.saved import saved_and_loaded

TABLES = (TTSpec(300, 12, (4, 4), name="a"), TTSpec(70, 8, (3,), ids="permuted", seed=5, name="b"))
FEATURES = (1, 0, 0)
ROWS = (12, 6)
BATCH = 4
OPTIMIZERS = {
    "sgd": optim.SGD(0.1),
    "adagrad": optim.Adagrad(0.05, eps=1e-4),
    "rowwise_adagrad": optim.RowwiseAdagrad(0.05, eps=1e-4),
    "adam": optim.Adam(0.005, eps=1e-3),
}

PLAIN = (
    *("sgd", "lars", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"),
    *("lamb", "partial_rowwise_lamb", "ftrl", "adam_l2", "adagrad_decoupled"),
)


def updated(rule: Any, row: Tensor, grad: Tensor, state: dict[str, Any], step: int) -> Tensor:
    """Return a row after a step of an optimizer, whose state is changed."""
    if isinstance(rule, optim.SGD):
        return row - rule.lr * grad
    if isinstance(rule, optim.Adam):
        one, two = rule.betas
        state["m"] = one * state.get("m", 0) + (1 - one) * grad
        state["v"] = two * state.get("v", 0) + (1 - two) * grad**2
        size = (state["v"] / (1 - two**step)).sqrt() + rule.eps
        return row - rule.lr * state["m"] / (1 - one**step) / size
    square = (grad**2).mean() if isinstance(rule, optim.RowwiseAdagrad) else grad**2
    state["sum"] = state.get("sum", torch.zeros(())) + square
    return row - rule.lr * grad / (state["sum"].sqrt() + rule.eps)


@dataclass
class Model:
    """Tensor trains in float64, of which some rows are stored in a dictionary by id."""

    rule: Any
    eviction: RowEviction
    capacity: list[int]
    cores: list[list[Tensor]]
    pooling: Pooling = Pooling.SUM
    step: int = 0
    core_states: dict[Any, dict[str, Any]] = field(default_factory=dict)
    stored: tuple[dict[int, Tensor], ...] = field(default_factory=lambda: ({}, {}))
    states: tuple[dict[int, Any], ...] = field(default_factory=lambda: ({}, {}))
    uses: tuple[dict[int, int], ...] = field(default_factory=lambda: ({}, {}))
    evicted: int = 0
    hits: int = 0
    changed: float = 0.0
    lost: float = 0.0

    def made(self, table: int, ids: list[int], cores: list[Tensor] | None = None) -> Tensor:
        """What the cores make of ids."""
        spec = TABLES[table]
        factor, offset = spec.permutation
        places = torch.tensor([(factor * i + offset) % spec.rows for i in ids], dtype=torch.int64)
        own = self.cores[table] if cores is None else cores
        return reference.rows(own, places, spec.row_factors, spec.dim_factors)

    def train(self, ids: Tensor, offsets: Tensor, weights: Tensor, slope: Tensor) -> Tensor:
        """Pool, and update what took part by the gradient `slope` of the output."""
        self.step += 1
        cores = [[c.clone().requires_grad_() for c in own] for own in self.cores]
        leaves = [
            {i: row.clone().requires_grad_() for i, row in own.items()} for own in self.stored
        ]
        columns, used = [], [set(), set()]
        for feature, table in enumerate(FEATURES):
            bags = []
            for bag in range(feature * BATCH, (feature + 1) * BATCH):
                first, last = offsets[bag : bag + 2].tolist()
                total = torch.zeros(TABLES[table].dim, dtype=torch.float64)
                for position in range(first, last):
                    i = int(ids[position])
                    if i < 0:
                        continue
                    stored = i in leaves[table]
                    self.hits += stored
                    row = leaves[table][i] if stored else self.made(table, [i], cores[table])[0]
                    total = total + weights[position] * row
                    used[table].add(i)
                    self.uses[table][i] = self.uses[table].get(i, 0) + 1
                mean = self.pooling is Pooling.MEAN
                bags.append(total / max(last - first, 1) if mean else total)
            columns.append(torch.stack(bags))
        out = torch.cat(columns, 1)
        (out * slope).sum().backward()
        for table in (0, 1):
            self._update_cores(table, cores[table], used[table] - self.stored[table].keys())
            for i in used[table] & self.stored[table].keys():
                leaf, state = leaves[table][i], self.states[table][i]
                self.stored[table][i] = updated(
                    self.rule, leaf.detach(), leaf.grad, state, self.step
                )
        return out.detach()

    def _update_cores(self, table: int, cores: list[Tensor], cold: set[int]) -> None:
        spec = TABLES[table]
        factor, offset = spec.permutation
        places = torch.tensor([(factor * i + offset) % spec.rows for i in cold], dtype=torch.int64)
        for k, digit in enumerate(reference.digits(places, spec.row_factors)):
            for row in digit.unique().tolist():
                state = self.core_states.setdefault((table, k, row), {})
                before, grad = cores[k].detach()[row], cores[k].grad[row]
                self.cores[table][k][row] = updated(self.rule, before, grad, state, self.step)

    def populate(self) -> None:
        """Choose the most used rows, and let others leave."""
        for table, own in enumerate(self.stored):
            uses = self.uses[table]
            best = sorted(uses, key=lambda i: (-uses[i], i))[: ROWS[table]]
            new = [i for i in best if i not in own]
            leaving = sorted(own.keys() - set(best), key=lambda i: (uses.get(i, 0), -i))
            if self.eviction is RowEviction.SPILL:
                leaving = leaving[: max(len(own) + len(new) - self.capacity[table], 0)]
            if leaving:
                self._evict(table, leaving)
            for i, row in zip(new, self.made(table, new), strict=True):
                own[i], self.states[table][i] = row, {}

    def _evict(self, table: int, leaving: list[int]) -> None:
        values = torch.stack([self.stored[table].pop(i) for i in leaving])
        self.evicted += len(leaving)
        self.changed += float((values - self.made(table, leaving)).square().sum())
        if self.eviction is not RowEviction.DROP:
            self._project(table, leaving, values)
        self.lost += float((values - self.made(table, leaving)).square().sum())

    def _project(self, table: int, ids: list[int], values: Tensor) -> None:
        """Move the cores by eight steps along the gradient, each as long as is best, or shorter."""

        def error(cores: list[Tensor]) -> Tensor:
            return (values - self.made(table, ids, cores)).square().sum()

        for _ in range(8):
            own = [c.clone().requires_grad_() for c in self.cores[table]]
            start = error(own)
            grads = [-g / 2 for g in torch.autograd.grad(start, own)]
            nudge = 1e-6  # rows move linearly over such a distance
            nudged = [c + nudge * g for c, g in zip(self.cores[table], grads, strict=True)]
            moved = (self.made(table, ids, nudged) - self.made(table, ids)) / nudge
            left = values - self.made(table, ids)
            length = float((moved * left).sum() / moved.square().sum())
            while length > 1e-8:
                tried = [c + length * g for c, g in zip(self.cores[table], grads, strict=True)]
                if error(tried) < start:
                    self.cores[table] = tried
                    break
                length /= 2
            else:
                return

    def dense(self, table: int) -> Tensor:
        """The table, stored rows included."""
        rows = self.made(table, list(range(TABLES[table].rows)))
        for i, row in self.stored[table].items():
            rows[i] = row
        return rows


def bags_of(
    eviction: str = "spill",
    optimizer: optim.Optimizer | None = None,
    *,
    pooling: Pooling = Pooling.SUM,
    every: int | None = None,
    spill_rows: Any = None,
    rows: Any = ROWS,
) -> CachedTTEmbeddingBags:
    torch.manual_seed(0)
    cache = TTCache(rows, eviction, counted=1000, every=every, spill_rows=spill_rows)
    return CachedTTEmbeddingBags(
        TABLES, cache, optimizer or optim.SGD(0.1), feature_tables=FEATURES, pooling=pooling
    )


def model_of(bags: CachedTTEmbeddingBags) -> Model:
    cores = [[c.detach().double() for c in bags.trains.table_cores(t)] for t in (0, 1)]
    capacity = list(bags.stored_rows)
    return Model(bags.optimizer, bags.cache.eviction, capacity, cores, bags.pooling)


def batch(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids that repeat and whose most used ones drift, offsets, weights, slopes of the output."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (len(FEATURES) * BATCH,), generator=draw)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = []
    for feature, table in enumerate(FEATURES):
        count = int(lengths[feature * BATCH : (feature + 1) * BATCH].sum())
        rows = TABLES[table].rows
        drawn = (rows * torch.rand(count, generator=draw) ** 4 + 3 * seed).long() % rows
        ids.append(torch.where(torch.rand(count, generator=draw) < 0.05, -1, drawn))
    weights = 0.5 + torch.rand(int(offsets[-1]), generator=draw)
    slope = torch.randn(BATCH, sum(TABLES[t].dim for t in FEATURES), generator=draw)
    return torch.cat(ids), offsets, weights, slope


def train(bags: CachedTTEmbeddingBags, steps: range, model: Model | None = None) -> None:
    """Train; with a model, each output must be its own."""
    for seed in steps:
        ids, offsets, weights, slope = batch(seed)
        out = bags(ids, offsets, weights)
        out.backward(slope)
        if model is not None:
            expected = model.train(ids, offsets, weights.double(), slope.double())
            torch.testing.assert_close(out.detach().double(), expected, rtol=1e-4, atol=1e-5)


def compare(bags: CachedTTEmbeddingBags, model: Model) -> None:
    for t in (0, 1):
        assert set(bags.cached_ids(t).tolist()) == set(model.stored[t])
        torch.testing.assert_close(bags.to_dense(t).double(), model.dense(t), rtol=1e-4, atol=1e-5)
    stats = bags.cache_stats()
    assert (stats.hits, stats.evicted) == (model.hits, model.evicted)
    assert stats.lookups == sum(sum(uses.values()) for uses in model.uses)
    assert stats.changed == pytest.approx(model.changed, rel=1e-3, abs=1e-6)
    assert stats.lost == pytest.approx(model.lost, rel=1e-2, abs=1e-5)


EVICTIONS = [("project", None), ("drop", None), ("spill", (40, 30)), ("spill", (4, 2))]


@pytest.mark.parametrize(
    ("name", "pooling"),
    [(name, (Pooling.SUM, Pooling.MEAN)[i % 2]) for i, name in enumerate(OPTIMIZERS)],
)
@pytest.mark.parametrize(("eviction", "spill_rows"), EVICTIONS)
def test_twenty_steps(eviction: str, spill_rows: Any, name: str, pooling: Pooling) -> None:
    bags = bags_of(eviction, OPTIMIZERS[name], pooling=pooling, every=3, spill_rows=spill_rows)
    model = model_of(bags)
    for step in range(20):
        if step and step % 3 == 0 and step < 12:
            model.populate()  # as the module does before this step
        if step == 11:  # and by a call, from which it counts
            bags.populate()
            model.populate()
        if step in (14, 17):
            model.populate()
        train(bags, range(step, step + 1), model)
        compare(bags, model)
    if spill_rows == (40, 30):
        assert bags.cache_stats().evicted == 0
        stored = sum(len(bags.cached_ids(t)) for t in (0, 1))
        assert stored > 32  # more than the ways of the cache, so that some are not in it
        assert bags.cache_stats().spill_hits > 0
    else:
        assert bags.cache_stats().evicted > 0


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("eviction", RowEviction)
def test_a_module_that_was_reloaded_goes_on(eviction: RowEviction, name: str) -> None:
    spills = eviction is RowEviction.SPILL
    bags = bags_of(eviction, OPTIMIZERS[name], every=4, spill_rows=(30, 20) if spills else None)
    model = model_of(bags)
    for step in range(16):
        if step and step % 4 == 0:
            model.populate()
        if step == 10:  # between two choices, of which the new module must know the last
            saved = copy.deepcopy(bags.state_dict())
            more = (60, 24) if spills else None
            other = bags_of(eviction, OPTIMIZERS[name], every=4, spill_rows=more)
            train(other, range(50, 55))
            other.load_state_dict(saved)
            model.capacity = list(other.stored_rows)
            compare(other, model)
            bags = other
        train(bags, range(step, step + 1), model)
        compare(bags, model)


def test_fewer_stored_rows_take_a_state_dict_that_fits() -> None:
    bags = bags_of(optimizer=OPTIMIZERS["adagrad"], spill_rows=(40, 30))
    train(bags, range(3))
    bags.populate()
    train(bags, range(3, 5))
    for eviction, rows in (("project", (15, 7)), ("drop", ROWS), ("spill", (20, 6))):
        other = bags_of(eviction, OPTIMIZERS["adagrad"], rows=rows)
        other.load_state_dict(bags.state_dict())
        one = copy.deepcopy(bags)
        train(one, range(5, 8))
        train(other, range(5, 8))
        for t in (0, 1):
            assert torch.equal(one.to_dense(t), other.to_dense(t))
            assert torch.equal(one.cached_ids(t), other.cached_ids(t))


def test_more_stored_rows_than_fit_are_refused_before_anything_is_written() -> None:
    bags = bags_of(spill_rows=(40, 30))
    for step in range(0, 12, 3):
        train(bags, range(step, step + 3))
        bags.populate()
    other = bags_of("drop")
    train(other, range(3))
    other.populate()
    before = copy.deepcopy(other.state_dict())
    count = len(bags.cached_ids(0))
    with pytest.raises(RuntimeError, match=f"{count} stored rows of table 'a', this module has 12"):
        other.load_state_dict(bags.state_dict())
    after = other.state_dict()
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    bags.empty_cache()
    other.load_state_dict(bags.state_dict())
    assert all(torch.equal(bags.to_dense(t), other.to_dense(t)) for t in (0, 1))


def test_a_spilled_row_is_read_and_trained_and_returns_with_its_state() -> None:
    """One set of 32 ways, and 60 rows that are stored: those that find no way train in place."""
    torch.manual_seed(0)
    spec = TTSpec(100, 8, (4, 4))
    cache = TTCache(30, "spill", spill_rows=70)
    bags = CachedTTEmbeddingBags([spec], cache, optim.Adagrad(0.1))
    for first in (0, 30):  # these ids are used more often than those before
        ids = torch.arange(first, first + 30).repeat(1 + first)
        bags(ids, torch.tensor([0, len(ids)])).sum().mul(0).backward()
        bags.populate()
    assert bags.cached_ids(0).tolist() == list(range(60))
    dense = torch.nn.Embedding.from_pretrained(bags.to_dense(0)[:60], freeze=False)
    state = torch.zeros(60, 8)
    assert bags.cache_stats().spilled == 60  # until they are used
    bags.reset_cache_stats()
    draw = torch.Generator().manual_seed(1)
    for _ in range(8):
        ids = torch.randint(60, (45,), generator=draw)
        out = bags(ids, torch.arange(0, 46, 5))
        torch.testing.assert_close(out, dense(ids).view(9, 5, 8).sum(1))
        slope = torch.randn(out.shape, generator=draw)
        out.backward(slope)
        grad = torch.zeros(60, 8).index_add(0, ids, slope.repeat_interleave(5, 0))
        state += grad.square()
        with torch.no_grad():
            dense.weight -= 0.1 * torch.where(grad == 0, 0.0, grad / (state.sqrt() + 1e-8))
    stats = bags.cache_stats()
    assert (stats.lookups, stats.hits, stats.spilled) == (360, 360, 60 - 32)
    assert 60 < stats.spill_hits < 360
    assert sorted(bags.spilled_ids(0).tolist()) == sorted(
        set(range(60)) - set((bags.rows.row_cache.tags[0]).tolist())
    )
    torch.testing.assert_close(bags.to_dense(0)[:60], dense.weight.detach())
    rows = bags.key_of_row.argsort()[-60:]
    torch.testing.assert_close(
        bags.rows.table_optimizer_states()[0]["sum"][rows], state, rtol=1e-4, atol=1e-6
    )


def test_lookups_count_by_table_and_only_those_that_train() -> None:
    bags = bags_of(spill_rows=(40, 30))
    train(bags, range(3))
    bags.populate()
    bags.reset_cache_stats()
    bags.eval()
    bags(*batch(4)[:3])
    bags.train()
    with torch.no_grad():
        bags(*batch(4)[:3])
    stats = bags.cache_stats()
    assert (stats.lookups, stats.hits, stats.spill_hits) == (0, 0, 0)
    assert stats.hit_rate != stats.hit_rate
    ids, offsets, weights, _ = batch(4)
    bags(ids, offsets, weights)
    stats = bags.cache_stats()
    ends = offsets[::BATCH].tolist()
    for table, name in enumerate("ab"):
        own = [
            i
            for feature, (first, last) in enumerate(itertools.pairwise(ends))
            if FEATURES[feature] == table
            for i in ids[first:last].tolist()
            if i >= 0
        ]
        stored = set(bags.cached_ids(table).tolist())
        of_table = stats.tables[name]
        assert of_table.lookups == len(own)
        assert of_table.hits == sum(i in stored for i in own)
        assert of_table.hit_rate == of_table.hits / len(own)
    assert stats.lookups == sum(part.lookups for part in stats.tables.values())
    bags.reset_cache_stats()
    stats = bags.cache_stats()
    assert (stats.lookups, stats.hits, stats.evicted, stats.changed) == (0, 0, 0, 0)
    assert stats.spilled == sum(part.spilled for part in stats.tables.values())


@pytest.mark.parametrize("eviction", RowEviction)
def test_bytes_are_those_of_the_tensors(eviction: RowEviction) -> None:
    bags = bags_of(eviction, optim.Adam(0.01))
    sizes = bags.nbytes()
    values = sum(rows * spec.dim * 4 for rows, spec in zip(bags.stored_rows, TABLES, strict=True))
    cores = sum(core.nbytes for core in bags.trains.cores)
    assert sizes["weights"] == cores
    if eviction is RowEviction.SPILL:
        assert bags.stored_rows == [108, 54]
        assert sizes["spill"] == 3 * values
        assert sizes["optimizer_state"] == 2 * cores
        assert sizes["cache"] > 32 * 12 * 4 * 3  # one set of rows of the larger dim and states
    else:
        assert sizes["spill"] == 0
        assert sizes["optimizer_state"] == 2 * (cores + values)
        assert sizes["cache"] > values


@pytest.mark.parametrize("how", ["copy", "pickle"])
def test_copies_have_spilled_rows(how: str) -> None:
    bags = bags_of(optimizer=optim.Adam(0.01), spill_rows=(40, 30))
    for step in range(0, 9, 3):
        train(bags, range(step, step + 3))
        bags.populate()
    train(bags, range(9, 11))
    other = copy.deepcopy(bags) if how == "copy" else saved_and_loaded(bags, weights_only=False)
    for one in (bags, other):
        train(one, range(11, 13))
        one.populate()
        train(one, range(13, 15))
    for t in (0, 1):
        assert torch.equal(bags.to_dense(t), other.to_dense(t))
        assert torch.equal(bags.cached_ids(t), other.cached_ids(t))


@pytest.mark.parametrize("eviction", RowEviction)
@pytest.mark.parametrize("name", PLAIN)
def test_every_optimizer_trains_stored_rows_and_cores(name: str, eviction: RowEviction) -> None:
    optimizer = CASES[name]
    bags = bags_of(eviction, optimizer)
    train(bags, range(2))
    bags.populate()
    before = [bags.to_dense(t) for t in (0, 1)]
    train(bags, range(2, 4))
    used = [set(), set()]
    for seed in (2, 3):
        ids, offsets, _, _ = batch(seed)
        ends = offsets[::BATCH].tolist()
        for feature, (first, last) in enumerate(itertools.pairwise(ends)):
            used[FEATURES[feature]] |= {i for i in ids[first:last].tolist() if i >= 0}
    for t in (0, 1):
        after = bags.to_dense(t)
        assert after.isfinite().all()
        stored = bags.cached_ids(t).tolist()
        for i in stored:
            assert torch.equal(after[i], before[t][i]) == (i not in used[t]), (t, i)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TTCache(10, "keep"), "'project', 'spill', 'drop'"),
        (lambda: TTCache(10, spill_rows=5), "spill_rows is for eviction='spill'"),
        (lambda: bags_of(spill_rows=(1, 2, 3)), "spill_rows must be a number or one per table"),
        (lambda: bags_of(spill_rows=-1), "spill_rows must be >= 0"),
        (
            lambda: bags_of(optimizer=optim.External(gradient=optim.Gradient.DENSE)),
            "rows in host memory have none",
        ),
    ],
)
def test_wrong_settings(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_cache_needs_a_number_of_rows() -> None:
    with pytest.raises(TypeError, match="rows must be an int, got None"):
        TTCache(None)  # type: ignore[arg-type]
    assert TTCache(torch.tensor(5)).rows == 5  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows must be one number, or one per table, got none"):
        TTCache([])
    with pytest.raises(ValueError, match="spill_rows must be one number, or one per table"):
        TTCache(10, "spill", spill_rows=[])
