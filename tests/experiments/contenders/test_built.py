"""Contenders that a user has built: found by a variable or an import, else a row that says so."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments.config.schema import Optimizer, WorkloadConfig
from experiments.contenders import registry
from experiments.contenders.base import Task
from experiments.contenders.registry import MissingLibrary
from experiments.measure.outcome import verify
from experiments.workloads.workload import TableShape, make_pool

# FBTT's names; those of emblib have the same arguments, and cores in the same order.
FBTT = """
from emblib.compat.fbtt import OptimType, TTEmbeddingBag
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tt_embeddings_ops.py").write_text(FBTT)
    monkeypatch.setenv("EMBLIB_FBTT", str(tmp_path))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("tt_embeddings_ops", "experiments.contenders.fbtt"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("name", ["fbtt", "hierarchicalkv"])
def test_what_is_not_built_is_missing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.find(name)
    monkeypatch.delenv(entry.variable, raising=False)
    assert entry.missing().startswith("not built here: build it as docs/peers.md says")
    with pytest.raises(MissingLibrary, match="not built here"):
        entry.load()
    assert "built" not in registry.identity(name)


def test_a_library_that_does_not_load_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "libhierarchicalkv.so"
    monkeypatch.setenv("EMBLIB_HIERARCHICALKV", str(path))
    for content in (None, b"no library"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(MissingLibrary, match=r"libhierarchicalkv\.so does not load here"):
            registry.find("hierarchicalkv").load()


def test_a_library_without_the_functions_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was built before a function was added."""
    path = Path(torch.__file__).parent / "lib" / "libc10.so"
    monkeypatch.setenv("EMBLIB_HIERARCHICALKV", str(path))
    with pytest.raises(
        MissingLibrary, match=r"does not load here \(.*undefined symbol: hkv_create"
    ):
        registry.find("hierarchicalkv").load()


def test_what_was_built_is_part_of_the_identity(folder: Path) -> None:
    first = registry.identity("fbtt")["built"]
    assert first.startswith(str(folder))
    (folder / "another").touch()
    assert registry.identity("fbtt")["built"] != first


def test_fbtt_is_found_in_its_folder_and_needs_a_gpu(folder: Path) -> None:
    assert registry.find("fbtt").missing() == ""
    cls = registry.find("fbtt").load()
    with pytest.raises(registry.Unsupported, match="FBTT needs a GPU"):
        cls(task(Optimizer.sgd))


def task(optimizer: Optimizer) -> Task:
    """Return three tables, two of which become trains."""
    shapes = (TableShape(300, 16), TableShape(50, 8), TableShape(400, 16))
    return Task(shapes, optimizer, 0.1, torch.device("cpu"), rank=4, tt_tables=2)


@pytest.mark.parametrize("optimizer", [Optimizer.sgd, Optimizer.adagrad])
def test_trains_and_cores_are_in_the_order_that_is_checked(
    folder: Path, optimizer: Optimizer
) -> None:
    module: Any = importlib.import_module("experiments.contenders.fbtt")

    class OnTheCpu(module.FbttTables):  # type: ignore[misc]
        def _build_trains(self, shapes: Sequence[TableShape]) -> Any:
            return module.Trains(module.tt_specs(self.task, shapes), self.task)

    wanted = task(optimizer)
    contender = OnTheCpu(wanted)
    batch = make_pool(WorkloadConfig(T=3, B=6, L=2), wanted.shapes, 1, 0).batches[0]
    verify(contender, batch)
    assert contender.nbytes()["weights"] > 0
    with pytest.raises(registry.Unsupported, match="SGD and Adagrad"):
        OnTheCpu(task(Optimizer.rowwise_adagrad))
