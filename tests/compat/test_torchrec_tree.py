"""The module tree of `emblib.compat.torchrec`, and its installation as `torchrec`."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import emblib.compat.torchrec as ours
from emblib.compat.torchrec_names import MODULES
from tests.compat.peer import hide_modules

OWN = "emblib.compat.torchrec"


@pytest.fixture(autouse=True)
def _without_the_real_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the real torchrec, which other tests of this process may have imported."""
    hide_modules("torchrec", monkeypatch)
    yield
    ours.uninstall()


def test_every_module_is_importable_under_both_names() -> None:
    with ours.install():
        for path in MODULES:
            own = importlib.import_module(f"{OWN}.{path}" if path else OWN)
            assert importlib.import_module(f"torchrec.{path}" if path else "torchrec") is own
            if path:
                assert own.__name__ == f"{OWN}.{path}"
                assert set(own.__all__) <= set(dir(own))


def test_attributes_lead_to_the_modules() -> None:
    with ours.install():
        import torchrec
        import torchrec.distributed.embeddingbag as by_path
        from torchrec import distributed as trec_dist
        from torchrec.distributed.types import ShardingEnv

        assert torchrec.distributed.embeddingbag is by_path
        assert torchrec.distributed is trec_dist is ours.distributed
        assert trec_dist.ShardingEnv is ShardingEnv is ours.ShardingEnv
        assert torchrec.quant.EmbeddingBagCollection is ours.QuantEmbeddingBagCollection
        assert torchrec.EmbeddingBagCollection is ours.EmbeddingBagCollection


def test_a_module_with_the_name_of_its_function_is_callable() -> None:
    from emblib.compat.torchrec.optim import apply_optimizer_in_backward

    layer = torch.nn.Linear(1, 1)
    apply_optimizer_in_backward(torch.optim.SGD, layer.parameters(), {"lr": 1.0})
    assert dict(ours.in_backward_optimizer_filter(layer.named_parameters())) == {}
    with pytest.raises(TypeError, match="embeddingbag is not callable"):
        ours.distributed.embeddingbag()


def test_installing_again_changes_nothing_and_uninstalling_undoes_it() -> None:
    ours.install()
    first = sys.modules["torchrec"]
    ours.install()
    assert sys.modules["torchrec"] is first
    ours.uninstall()
    ours.uninstall()
    assert not [name for name in sys.modules if name.partition(".")[0] == "torchrec"]


def test_another_torchrec_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("torchrec.sparse")
    other.__file__ = "somewhere/torchrec/sparse/__init__.py"
    monkeypatch.setitem(sys.modules, "torchrec.sparse", other)
    with pytest.raises(RuntimeError, match=r"torchrec\.sparse from somewhere.*install\(\) before"):
        ours.install()
    assert "torchrec" not in sys.modules
    ours.uninstall()
    assert sys.modules["torchrec.sparse"] is other


def test_a_module_that_is_missing_says_which_there_are() -> None:
    with ours.install():
        for root in (OWN, "torchrec"):
            with pytest.raises(ModuleNotFoundError, match=r"no counterpart .* it has modules\.mlp"):
                importlib.import_module(f"{root}.modules.mlps")
            with pytest.raises(ModuleNotFoundError, match=r"no counterpart .*docs/torchrec\.md"):
                importlib.import_module(f"{root}.metrics")
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("torchrec_of_somebody_else.metrics")
    assert "counterpart" not in str(caught.value)


def test_objects_are_pickled_by_where_they_are_defined() -> None:
    config = ours.EmbeddingBagConfig(num_embeddings=4, embedding_dim=8, name="t")
    with ours.install():
        from torchrec.modules.embedding_configs import EmbeddingBagConfig

        saved = pickle.dumps(EmbeddingBagConfig(num_embeddings=4, embedding_dim=8, name="t"))
    assert pickle.loads(saved) == config


def test_a_program_that_imports_torchrec_runs() -> None:
    program = """
import emblib.compat.torchrec
emblib.compat.torchrec.install()
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
import torch
ebc = EmbeddingBagCollection(tables=[EmbeddingBagConfig(4, 8, "t")])
kjt = KeyedJaggedTensor(["t"], torch.arange(3), lengths=torch.tensor([1, 2]))
assert ebc(kjt).values().shape == (2, 8)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
