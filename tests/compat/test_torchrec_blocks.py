"""Every block of TorchRec's tutorial over emblib: on one rank and on two, on the CPU and a GPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest
import torch

from tests.compat import torchrec_blocks
from tests.compat.peer import peer_module

BLOCKS = [one.__name__ for one in torchrec_blocks.BLOCKS]
# What the real one needs a GPU for: inference on a CPU fails without an undocumented flag.
OF_A_GPU = {"a_sharded_quantised_collection", "a_traced_and_scripted_model"}


def outcomes(root: str, world: int, device: str = "cpu") -> list[dict[str, str]]:
    """What became of each block, by rank."""
    with socket.socket() as port:
        port.bind(("localhost", 0))
        number = port.getsockname()[1]
    job = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
    job |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(number)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.compat.torchrec_blocks", root, device],
            env=os.environ | job | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        said = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, errors
    return [json.loads(text.strip().splitlines()[-1]) for text, _ in said]


def failures(found: dict[str, str]) -> dict[str, str]:
    return {name: what for name, what in found.items() if what != "ok"}


def test_there_are_as_many_blocks_as_in_the_tutorial() -> None:
    assert len(set(BLOCKS)) == 30


@pytest.mark.parametrize(("root", "world"), [("emblib.compat.torchrec", 2), ("install", 1)])
def test_every_block_runs(root: str, world: int) -> None:
    for found in outcomes(root, world):
        assert list(found) == BLOCKS
        assert not failures(found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU or the pretend GPU")
@pytest.mark.parametrize("world", [1, 2])
def test_every_block_runs_on_a_gpu_cuda(world: int) -> None:
    if world > torch.cuda.device_count():
        pytest.skip(f"needs {world} GPUs")
    for found in outcomes("emblib.compat.torchrec", world, "cuda"):
        assert not failures(found)


def test_the_real_one_runs_the_same_blocks() -> None:
    """Which shows that the blocks are calls of TorchRec's, and not only of emblib's adaptors."""
    peer_module("torchrec.sparse.jagged_tensor")
    (found,) = outcomes("torchrec", 1)
    expected = set() if torch.cuda.is_available() else OF_A_GPU
    assert set(failures(found)) == expected


def test_blocks_fail_where_a_library_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(torchrec_blocks, "BLOCKS", torchrec_blocks.BLOCKS[4:8])
    found = torchrec_blocks.run("json", "cpu")
    assert set(failures(found)) == {"a_collection", "the_source_of_forward"}
