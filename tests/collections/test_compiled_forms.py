"""Each form of collection under torch.compile with inductor; minutes, so in make nightly."""

import pytest

from tests.collections.compiled_forms import FORMS, check_training
from tests.conftest import needs_python_headers


@needs_python_headers
@pytest.mark.parametrize("name", FORMS)
def test_inductor_trains(name: str) -> None:
    check_training(FORMS[name], "inductor")
