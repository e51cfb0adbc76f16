"""Collections under torch.compile; test_compiled_forms.py has all forms, which takes minutes."""

import pytest
import torch

from tests.collections.compiled_forms import FORMS, check_training


# Columns in another order, with means; vectors of several modules.
@pytest.mark.parametrize("name", ["bags, float16", "sequences"])
def test_inductor_trains(name: str) -> None:
    check_training(FORMS[name], "inductor")


@pytest.mark.cuda
def test_a_collection_with_other_columns_is_traced_on_cuda() -> None:
    if not torch.cuda.is_available() or torch.version.cuda is None:
        pytest.skip("torch compiles for CUDA in its builds with CUDA only")
    check_training(FORMS["bags, float16"], "aot_eager", "cuda")
