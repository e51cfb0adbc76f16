"""Shared tables over ranks: one memory and one step, as in one process, whatever the plan."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emblib import optim
from tests.sharding import worlds
from tests.sharding.shared_cases import DIMS, ROWS, Shared, train
from tests.sharding.test_sharded import tilings

PLANS = {
    **{word: dict.fromkeys(ROWS, word) for word in ("dp", "tw", "rw", "cw", "twrw", "grid")},
    "mixed": {"item": "rw", "user": "dp", "own": "tw", "seen": "rw"},
    "other": {"item": "dp", "user": "cw", "own": "dp", "seen": "tw"},
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan(plan: str, size: int) -> None:
    case = Shared(PLANS[plan], optim.Adagrad(0.5), joint=plan in ("rw", "other"))
    assert set(worlds.run(size, train, case)) == {"equal"}
