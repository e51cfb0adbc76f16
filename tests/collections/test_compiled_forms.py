"""Each form of collection under torch.compile with inductor; minutes, so in make nightly."""

import pytest

from tests.collections.compiled_forms import FORMS, check_training


@pytest.mark.parametrize("name", FORMS)
def test_inductor_trains(name: str) -> None:
    check_training(FORMS[name], "inductor")
