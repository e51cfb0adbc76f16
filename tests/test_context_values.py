"""Values of context variables for one call: as before however the call ends."""

import itertools
import signal
from contextvars import ContextVar

import pytest

import emblib
from emblib.context_values import with_attribute, with_value
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


class Owner:
    name: str | None = "of the class"


@pytest.mark.parametrize("names", [("own", None), (None, None)])
def test_signals_leave_attributes_as_they_were(names: tuple[str | None, ...]) -> None:
    owners = [Owner(), Owner()]
    for owner, name in zip(owners, names, strict=True):
        if name is not None:
            owner.name = name
    before = [dict(vars(owner)) for owner in owners]
    values = dict.fromkeys(owners, "of the call")

    def read() -> list[str | None]:
        return [owner.name for owner in owners]

    def work() -> None:
        while True:
            with_attribute("name", values, read)()

    assert with_attribute("name", values, read)() == ["of the call"] * 2
    for _ in range(500):
        assert interrupting(0.0002, work)
        assert [vars(owner) for owner in owners] == before


def test_tables_have_initial_values_after_an_interrupt() -> None:
    tables = [emblib.EmbeddingBagConfig(8, 4, "item")]
    bags = emblib.EmbeddingBagCollection(tables)
    for attempt in itertools.islice(each_line(), 40):
        with attempt:
            bags.quantized()
        assert not skips_initial_values(), attempt.where
