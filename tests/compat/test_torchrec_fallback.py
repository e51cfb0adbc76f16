"""`install(fallback=True)`: what the tree lacks comes from the files of an installed TorchRec."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import emblib.compat.torchrec as ours
from tests.compat.peer import hide_modules, peer_module

FILES = {
    "__init__.py": "raise AssertionError('the tree is the package')",
    "models/__init__.py": "",
    "models/toy.py": (
        "from torchrec import EmbeddingBagCollection, KeyedJaggedTensor\n"
        "from torchrec.models.parts import scale\n"
        "def make(configs): return EmbeddingBagCollection(tables=configs)\n"
    ),
    "models/parts.py": "from torchrec.modules.extra import FACTOR as scale",
    "modules/__init__.py": "",
    "modules/extra.py": "FACTOR = 3",
    "modules/mlp.py": (
        "from dataclasses import dataclass\n"
        "from torchrec.modules.regroup import KTRegroupAsDict\n"
        "@dataclass\n"
        "class Lacking:\n"
        "    net: type = KTRegroupAsDict\n"
        "MLP = None\n"
    ),
    "modules/mc_modules.py": "class ManagedCollisionModule:\n    kind = 'theirs'\n",
    "modules/embedding_tower.py": "raise ValueError('not over this tree')",
    "sparse/jagged_tensor.py": (
        "class KeyedJaggedTensor: ...\n"
        "def is_batch(value): return isinstance(value, KeyedJaggedTensor)\n"
    ),
    "sparse/test_utils.py": "def helper(): return 1",
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A small package in place of TorchRec."""
    hide_modules("torchrec", monkeypatch)
    for path, text in FILES.items():
        file = tmp_path / "torchrec" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    ours.uninstall()


@pytest.mark.usefixtures("installed")
def test_modules_that_the_tree_lacks_run_over_its_names() -> None:
    with ours.install(fallback=True):
        toy = importlib.import_module("torchrec.models.toy")
        assert toy.EmbeddingBagCollection is ours.EmbeddingBagCollection
        assert toy.scale == 3
        made = toy.make([ours.EmbeddingBagConfig(8, 4, "t", feature_names=["f"])])
        assert isinstance(made, ours.EmbeddingBagCollection)
        from torchrec.sparse import test_utils

        assert test_utils.helper() == 1
        with pytest.raises(ModuleNotFoundError, match="installed torchrec has none either"):
            importlib.import_module("torchrec.linter")
    assert "torchrec.models.toy" not in sys.modules


@pytest.mark.usefixtures("installed")
def test_names_that_a_module_lacks_come_from_its_file() -> None:
    with ours.install(fallback=True):
        from torchrec.modules.mlp import MLP, Lacking

        assert MLP is ours.MLP
        assert Lacking().net is ours.KTRegroupAsDict
        with pytest.raises(ImportError, match="Neither"):
            from torchrec.modules.mlp import Neither  # noqa: F401
    with ours.install(), pytest.raises(ImportError, match="Lacking"):
        from torchrec.modules.mlp import Lacking


@pytest.mark.usefixtures("installed")
def test_names_that_raise_are_theirs_where_their_file_runs() -> None:
    with ours.install(fallback=True):
        from torchrec.modules.embedding_tower import EmbeddingTower
        from torchrec.modules.mc_modules import ManagedCollisionModule

        assert ManagedCollisionModule.kind == "theirs"
        with pytest.raises(NotImplementedError, match="EmbeddingTower of TorchRec"):
            EmbeddingTower()
    with pytest.raises(NotImplementedError, match="Hash"):
        ours.modules.mc_modules.ManagedCollisionModule()


@pytest.mark.usefixtures("installed")
def test_functions_of_a_file_get_the_trees_types() -> None:
    batch = ours.KeyedJaggedTensor(["f"], torch.arange(2), lengths=torch.tensor([2]))
    with ours.install(fallback=True):
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, is_batch

        assert KeyedJaggedTensor is ours.KeyedJaggedTensor
        assert is_batch(batch)


@pytest.mark.usefixtures("installed")
def test_a_file_that_does_not_run_over_the_tree_names_the_other_way() -> None:
    with ours.install(fallback=True):
        towers = importlib.import_module("torchrec.modules.embedding_tower")
        with pytest.raises(ImportError, match=r"ValueError: not over this tree.*fbgemm\.install"):
            towers.Unknown  # noqa: B018
        with pytest.raises(ModuleNotFoundError, match="no counterpart"):
            importlib.import_module("torchrec.modules.nowhere")


def test_a_fallback_needs_an_installed_torchrec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    hide_modules("torchrec", monkeypatch)
    with pytest.raises(ModuleNotFoundError, match="pip install torchrec, or leave fallback out"):
        ours.install(fallback=True)
    assert "torchrec" not in sys.modules


def test_torchrecs_model_runs_over_our_collection() -> None:
    peer_module("torchrec")
    for name in list(sys.modules):
        if name == "torchrec" or name.startswith("torchrec."):
            del sys.modules[name]
    with ours.install(fallback=True):
        dlrm = importlib.import_module("torchrec.models.dlrm")
        tables = ours.EmbeddingBagCollection(
            [ours.EmbeddingBagConfig(8, 4, "t", feature_names=["f"])]
        )
        model = dlrm.DLRM(tables, 3, [5, 4], [6, 1])
        features = ours.KeyedJaggedTensor(
            ["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1])
        )
        assert model(torch.rand(2, 3), features).shape == (2, 1)
