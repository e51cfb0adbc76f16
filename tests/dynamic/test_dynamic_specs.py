"""Descriptions of dynamic tables: what they derive, and what they refuse."""

import math
from collections.abc import Callable

import pytest
import torch

from emblib import (
    CountMinSketch,
    DynamicSpec,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    InsertPolicy,
    OnInsertFailure,
    PerFeature,
)
from emblib.init import Constant, Normal, TruncatedNormal, Uniform


@pytest.mark.parametrize(
    ("capacity", "initial", "rows", "buckets"),
    [(1, None, 32, 1), (32, None, 32, 1), (33, None, 64, 2), (1000, 1, 1024, 1), (100, 65, 128, 3)],
)
def test_rows_come_in_buckets(capacity: int, initial: int | None, rows: int, buckets: int) -> None:
    spec = DynamicSpec(capacity, 8, initial_capacity=initial)
    assert (spec.rows, spec.max_buckets, spec.buckets) == (rows, rows // 32, buckets)


def test_words_become_members() -> None:
    spec = DynamicSpec(10, 4, eviction="lfu", insert_policy="competes", on_insert_failure="error")
    assert spec.eviction is Eviction.LFU
    assert spec.insert_policy is InsertPolicy.EVICT_IF_LOWER
    assert spec.on_insert_failure is OnInsertFailure.RAISE
    orders = {e: e.order for e in Eviction}
    assert orders[Eviction.STEP] == orders[Eviction.CUSTOM] == "assigned"
    assert orders[Eviction.LRU] == "lru"


def test_truncated_normal_knows_its_share() -> None:
    low, high = TruncatedNormal(1.0, 2.0).probabilities
    assert TruncatedNormal(1.0, 2.0).bounds == (-3.0, 5.0)
    assert math.isclose(low, 1 - high)
    assert math.isclose(high - low, math.erf(math.sqrt(2.0)))
    assert TruncatedNormal(low=0.0, high=10.0).probabilities[0] == 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DynamicSpec(0, 4), "capacity must be >= 1"),
        (lambda: DynamicSpec(4, 0), "dim must be >= 1"),
        (lambda: DynamicSpec(4, 2**25 + 1), "dim must be at most"),
        (lambda: DynamicSpec(4, 4, initial_capacity=5), "at most capacity = 4"),
        (lambda: DynamicSpec(4, 4, max_load=0.0), r"max_load must be in \(0, 1\]"),
        (
            lambda: DynamicSpec(4, 4, default_value=math.nan),
            "default_value of DynamicSpec must be a finite",
        ),
        (lambda: DynamicSpec(4, 4, initial_state=-1), "initial_state must be >= 0, got -1.0"),
        (lambda: DynamicSpec(4, 4, ttl=0), "ttl must be >= 1"),
        (lambda: DynamicSpec(4, 4, name="a.b"), "without dots"),
        (lambda: DynamicSpec(4, 4, eviction="fifo"), "'lru', 'lfu', 'lru_lfu'"),
        (lambda: Uniform(1.0), "given together"),
        (lambda: Uniform(2.0, 1.0), "low < high"),
        (lambda: Normal(std=-1.0), "std of Normal must be >= 0"),
        (lambda: TruncatedNormal(std=0.0), "std of TruncatedNormal must be > 0"),
        (lambda: TruncatedNormal(low=4.0, high=5.0), "at least 0.001 of the distribution"),
        (lambda: Constant(math.inf), "value of Constant must be a finite number"),
        (lambda: Constant(10**400), "value of Constant must be a finite number"),
        (lambda: Constant(torch.zeros(2)), "value of Constant must be a finite number"),
        (lambda: Constant([1]), "value of Constant must be a finite number"),
        (lambda: Uniform("a", 2.0), "low and high of Uniform must be finite"),
        (lambda: ExactCounter(0), "capacity must be >= 1"),
        (lambda: CountMinSketch(0), "width must be >= 1"),
        (lambda: CountMinSketch(2**30, 2**31), r"fewer than 2\^60 counters"),
        (lambda: FrequencyAdmission(0, ExactCounter(1)), "threshold must be >= 1"),
    ],
)
def test_what_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DynamicSpec(4, 4, initializer=0.0), "one of Uniform, Normal"),
        (lambda: DynamicSpec(4, 4, admission=3), r"FrequencyAdmission\(threshold, counter\)"),
        (lambda: FrequencyAdmission(2, 100), r"an ExactCounter\(capacity\) or a CountMinSketch"),
        (lambda: FrequencyAdmission(2, CountMinSketch(8), reads=1.0), "reads must be an instance"),
        (lambda: DynamicSpec(4.0, 4), "capacity must be an int"),
        (lambda: DynamicSpec(4, 4, ttl="a"), r"an int \(steps\) or a timedelta, got 'a'"),
        (lambda: DynamicSpec(4, 4, ttl=PerFeature(1, 2.5)), r"or a timedelta, got 2\.5"),
    ],
)
def test_wrong_kinds(make: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()
