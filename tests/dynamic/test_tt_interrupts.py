"""Interrupts of cached tensor trains: a choice of rows, or a lookup, has happened or has not."""

import copy

import pytest
import torch
from torch import Tensor

from emblib import CachedTTEmbeddingBags, RowEviction, TTCache, TTSpec, optim
from tests.interrupts import each_line

ROWS, LOOKUPS = 60, 30
# Of the lines of a choice every n-th is interrupted.
STEPS = {RowEviction.PROJECT: 71, RowEviction.SPILL: 71, RowEviction.DROP: 41}


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (LOOKUPS,), generator=generator) ** 2 // ROWS
    return (ids + 17 * step) % ROWS, torch.arange(LOOKUPS + 1)


def train(bags: CachedTTEmbeddingBags, step: int) -> None:
    bags(*batch(step)).sum().backward()


def make(eviction: RowEviction) -> CachedTTEmbeddingBags:
    """Trains with stored rows that a choice replaces."""
    torch.manual_seed(0)
    spill = 4 if eviction is RowEviction.SPILL else None
    cache = TTCache(8, eviction, spill_rows=spill)
    bags = CachedTTEmbeddingBags([TTSpec(ROWS, 4, (2,), (8, 8), (2, 2))], cache, optim.Adagrad(0.1))
    for step in range(3):
        train(bags, step)
        bags.populate()
    for step in range(4, 9):
        train(bags, step)
    return bags


def later(bags: CachedTTEmbeddingBags) -> tuple[Tensor, Tensor]:
    for step in (20, 21):
        train(bags, step)
    bags.populate()
    train(bags, 22)
    return bags.to_dense(0), bags.counters.clone()


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("eviction", RowEviction)
def test_rows_are_chosen_or_not(eviction: RowEviction) -> None:
    first = make(eviction)
    before, after = copy.deepcopy(first), copy.deepcopy(first)
    after.populate()
    states = [(m.to_dense(0), m.cached_ids(0), m.changes.clone()) for m in (before, after)]
    assert not same(*states)
    ends = [later(m) for m in (before, after)]
    for attempt in each_line(step=STEPS[eviction]):
        bags = copy.deepcopy(first)
        with attempt:
            bags.populate()
        now = (bags.to_dense(0), bags.cached_ids(0), bags.changes.clone())
        fits = [same(now, state) for state in states]
        assert any(fits), attempt.where
        end = later(bags)
        assert any(fit and same(end, e) for fit, e in zip(fits, ends, strict=True)), attempt.where


@pytest.mark.parametrize("eviction", [RowEviction.PROJECT, RowEviction.SPILL])
def test_an_interrupted_step_trains_each_row_or_not(eviction: RowEviction) -> None:
    first = make(eviction)
    first.populate()
    after = copy.deepcopy(first)
    train(after, 30)
    stored = first.cached_ids(0)
    assert torch.isin(batch(30)[0], stored).any()
    for attempt in each_line(step=31):
        bags = copy.deepcopy(first)
        with attempt:
            train(bags, 30)
        rows, cores = bags.to_dense(0)[stored], bags.trains.to_dense(0)
        assert any(torch.equal(rows, m.to_dense(0)[stored]) for m in (first, after)), attempt.where
        assert any(torch.equal(cores, m.trains.to_dense(0)) for m in (first, after)), attempt.where


BOTH = torch.arange(2 * LOOKUPS + 1)


def train_both(bags: CachedTTEmbeddingBags, step: int) -> None:
    bags(batch(step)[0].repeat(2), BOTH).sum().backward()


def check_lookups(bags: CachedTTEmbeddingBags) -> None:
    """Compare lookups of every row of both tables with `to_dense`."""
    with torch.no_grad():
        looked_up = bags(torch.arange(ROWS).repeat(2), torch.arange(2 * ROWS + 1)).split(4, dim=1)
    for table, rows in enumerate(looked_up):
        torch.testing.assert_close(rows, bags.to_dense(table))


def interrupt(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> CachedTTEmbeddingBags:
    """Two tables; a choice was interrupted when table 0 had new rows, which the index lacks."""
    torch.manual_seed(0)
    spec = TTSpec(ROWS, 4, (2,), (8, 8), (2, 2))
    bags = CachedTTEmbeddingBags([spec, spec], TTCache(8), optim.Adagrad(0.1))
    train_both(bags, 0)
    bags.populate()
    train_both(bags, 1)
    with monkeypatch.context() as patch:
        patch.setattr(bags.index, "erase", interrupt)
        with pytest.raises(KeyboardInterrupt):
            bags.populate()
    return bags


def test_a_copy_of_an_interrupted_choice_has_the_index_of_its_rows(
    interrupted: CachedTTEmbeddingBags,
) -> None:
    copied = copy.deepcopy(interrupted)
    copied.populate()  # replaces the rows of table 1 only
    train_both(copied, 2)
    check_lookups(copied)


def test_a_choice_after_an_interrupted_one_has_the_index_of_all_tables(
    interrupted: CachedTTEmbeddingBags,
) -> None:
    interrupted.populate()  # replaces the rows of table 1 only
    train_both(interrupted, 2)
    check_lookups(interrupted)


def test_lookups_after_an_interrupted_load_read_the_loaded_rows(
    monkeypatch: pytest.MonkeyPatch, interrupted: CachedTTEmbeddingBags
) -> None:
    empty = CachedTTEmbeddingBags(interrupted.tables, interrupted.cache, optim.Adagrad(0.1))
    train_both(empty, 0)  # which notes that no rows are stored
    with monkeypatch.context() as patch:
        patch.setattr(empty, "finish_load", interrupt)
        with pytest.raises(KeyboardInterrupt):
            empty.load_state_dict(interrupted.state_dict())
    check_lookups(empty)


def test_lookups_after_an_interrupted_reset_read_no_removed_rows(
    monkeypatch: pytest.MonkeyPatch, interrupted: CachedTTEmbeddingBags
) -> None:
    check_lookups(interrupted)
    with monkeypatch.context() as patch:
        patch.setattr(interrupted, "_rebuild_index", interrupt)
        with pytest.raises(KeyboardInterrupt):
            interrupted.reset_parameters()
    check_lookups(interrupted)
