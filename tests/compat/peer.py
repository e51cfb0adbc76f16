"""FBGEMM and TorchRec, where they are installed and load with this torch."""

import importlib
import sys
import types
import warnings
from functools import cache

import pytest

from experiments.contenders import registry


@cache
def _import() -> types.SimpleNamespace | str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training = importlib.import_module(
                "fbgemm_gpu.split_table_batched_embeddings_ops_training"
            )
            configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
    except (ImportError, OSError) as error:
        return f"fbgemm_gpu does not import: {error}"
    return types.SimpleNamespace(**(vars(configs) | vars(training)))


def peer_module(name: str) -> types.ModuleType:
    """Return a module of a peer; skip the test, or the file that is collected, if it fails to load.

    A peer built for another torch raises OSError when its libraries are loaded; `importorskip` lets
    that end the collection.
    """
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        pytest.skip(f"{name} does not import: {error}", allow_module_level=True)


def skip_without_peers(contender: str) -> None:
    """Skip the test of a contender whose packages are not installed or fail to load."""
    entry = registry.find(contender)
    if missing := entry.missing():
        pytest.skip(missing)
    for name in ("fbgemm_gpu", "torchrec"):
        if any(text.startswith(name.replace("_", "-")) for text in entry.requires):
            peer_module(name)


def fbgemm() -> types.SimpleNamespace:
    """FBGEMM's names; skips the test where it is not installed or not made for this torch."""
    found = _import()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def hide_modules(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Python import a package and its modules again, until the test ends."""
    for name in list(sys.modules):
        if name == package or name.startswith(f"{package}."):
            monkeypatch.delitem(sys.modules, name)
