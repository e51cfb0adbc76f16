"""Values of context variables for one call: as before however the call ends."""

import itertools
import signal
from contextvars import ContextVar

import pytest

import emblib
from emblib.context_values import with_value
from emblib.storage.initial_values import skips_initial_values
from tests.interrupts import each_line, interrupting

DEPTH: ContextVar[int] = ContextVar("DEPTH", default=0)


def depths(count: int) -> list[int]:
    """Return the value here, then those within as many nested calls."""
    return [DEPTH.get(), *(with_value(DEPTH, DEPTH.get() + 1, depths)(count - 1) if count else ())]


def test_a_value_is_that_of_the_call() -> None:
    assert depths(3) == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        with_value(DEPTH, 5, lambda: DEPTH.get() // 0)()
    assert DEPTH.get() == 0


def test_signals_leave_the_value_as_it_was() -> None:
    def work() -> None:
        while True:
            depths(5)

    for _ in range(1000):
        assert interrupting(0.0002, work)
        assert DEPTH.get() == 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_tables_have_initial_values_after_an_interrupt() -> None:
    tables = [emblib.EmbeddingBagConfig(8, 4, "item")]
    bags = emblib.EmbeddingBagCollection(tables)
    for attempt in itertools.islice(each_line(), 40):
        with attempt:
            bags.quantized()
        assert not skips_initial_values(), attempt.where
