"""Jobs under torchrun whose ranks are killed end with the bits of those whose are not."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from emblib.sharding.failures import init_distributed, rendezvous
from emblib.sharding.ranks import RankGroup
from tests.sharding import resumed, worlds

MODULE = ["-m", "tests.sharding.resumed"]
LIMIT_SECONDS = 400


def _environment() -> dict[str, str]:
    path = os.pathsep.join(p for p in [os.getcwd(), *sys.path] if p)
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def _torchrun(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--max-restarts=2", *words],
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _outputs(*jobs: subprocess.Popen[str]) -> list[str]:
    """What they said; all have ended well."""
    try:
        outputs = [job.communicate(timeout=LIMIT_SECONDS)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0] * len(jobs), "\n".join(outputs)
    return outputs


def _named(said: str, size: int) -> set[str]:
    """Ranks that others said had died."""
    return set(re.findall(rf"rank (\d) of {size} \(process \d+ on \S+\) died", said))


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(item, f"{name}/{key}")
    elif isinstance(value, list):
        yield from _flat(dict(enumerate(value)), name)
    else:
        yield name, value


def _assert_same_end(directory: Path, ranks: int) -> None:
    """As a run of the same steps that nothing happened to."""
    worlds.run(ranks, resumed.unharmed, directory / "unharmed")
    found = dict(_flat(torch.load(directory / "job" / "final.pt")))
    wanted = dict(_flat(torch.load(directory / "unharmed" / "final.pt")))
    assert found.keys() == wanted.keys()
    assert len([name for name in found if "weight" in name or "cores" in name]) > 5
    for name, value in wanted.items():
        same = torch.equal(found[name], value) if torch.is_tensor(value) else found[name] == value
        assert same, name


class _Interrupted(Exception):
    pass


def _interrupt(*_: object) -> None:
    raise _Interrupted


def _interrupted_and_resumed(ranks: RankGroup, directory: Path) -> None:
    """Train until a backward pass is interrupted on every rank, and go on from the checkpoint."""
    everyone = [f"0:6:{rank}:training" for rank in range(ranks.size)]
    killed, resumed.die = resumed.die, _interrupt
    try:
        with pytest.raises(_Interrupted):
            resumed.train(ranks, directory, resumed.Deaths(everyone, ranks.rank))
    finally:
        resumed.die = killed
    assert not (directory / "final.pt").exists()
    resumed.train(ranks, directory, resumed.Deaths([], ranks.rank))


def test_interrupted_and_resumed_without_a_new_process(tmp_path: Path) -> None:
    worlds.run(2, _interrupted_and_resumed, tmp_path / "job")
    _assert_same_end(tmp_path, 2)


@pytest.mark.slow
def test_killed_twice_on_one_node(tmp_path: Path) -> None:
    """In the middle of a backward pass, then in the middle of a checkpoint."""
    deaths = ["0:6:2:training", "1:8:0:saving"]
    job = _torchrun("--standalone", "--nproc-per-node=3", *MODULE, str(tmp_path / "job"), *deaths)
    (said,) = _outputs(job)
    assert re.findall(r"attempt begins at step (\d+)", said) == ["0", "4", "4"], said
    # Torchrun ends those who are left within a tenth of a second: they need not have spoken.
    assert re.findall(r"exitcode: -9\) local_rank: (\d)", said) == ["2", "0"], said
    assert _named(said, 3) <= {"2", "0"}, said
    _assert_same_end(tmp_path, 3)


@pytest.mark.slow
def test_killed_on_one_of_two_nodes(tmp_path: Path) -> None:
    """The other node's torchrun knows nothing of it: its rank names the one that died."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    node = [
        *("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=job"),
        f"--rdzv-endpoint=127.0.0.1:{port}",
    ]
    words = [*node, *MODULE, str(tmp_path / "job"), "0:6:1:training"]
    said = "".join(_outputs(_torchrun(*words), _torchrun(*words)))
    assert re.findall(r"attempt begins at step (\d+)", said) == ["0", "4"], said
    assert _named(said, 2) == {"1"}, said
    _assert_same_end(tmp_path, 2)


def _come(store: dist.Store, rank: int, found: dict[int, Any]) -> threading.Thread:
    def come() -> None:
        found[rank] = rendezvous(store.clone(), rank, 3, timedelta(seconds=20))  # type: ignore[attr-defined]

    thread = threading.Thread(target=come)
    thread.start()
    return thread


def test_ranks_meet_in_a_used_store(tmp_path: Path) -> None:
    """Each attempt finds what the ones before have left, whoever of them had come."""
    store = dist.FileStore(str(tmp_path / "store"), -1)
    store.set("address", "of a process that is gone")
    places = []
    # Only some come at first, as when a rank dies while it starts.
    for number in store.add("emblib/meeting/rounds", 1), store.add("emblib/meeting/rounds", 1):
        store.set("emblib/meeting/newest", str(number))
        store.set(f"emblib/meeting/{number}/1", "one that is gone")
    store.set("emblib/meeting/1/members", '{"1": "one that is gone", "2": "another"}')
    for order in ((2, 1, 0), (0, 1, 2)):
        found: dict[int, Any] = {}
        threads = []
        for rank in order:
            threads.append(_come(store, rank, found))
            time.sleep(0.1)
        for thread in threads:
            thread.join(30)
        assert set(found) == {0, 1, 2}
        assert not found[1].check(["address"])
        found[0].set("address", str(order))
        for rank in (1, 2):
            assert found[rank].get("address").decode() == str(order)
        places.append(found[0])
    assert places[0].get("address") != places[1].get("address")
    with pytest.raises(TimeoutError, match=r"ranks \[1, 2\] of 3 have not started within 0 s"):
        rendezvous(store, 0, 3, timedelta(seconds=0.1))


def test_more_ranks_meet_than_in_the_attempt_before() -> None:
    store = dist.HashStore()
    store.set("emblib/meeting/newest", str(store.add("emblib/meeting/rounds", 1)))
    store.set("emblib/meeting/1/members", '{"1": "one that is gone"}')
    found: dict[int, Any] = {}
    threads = [_come(store, rank, found) for rank in (2, 1)]
    while not store.check(["emblib/meeting/1/2"]):
        time.sleep(0.01)
    threads.append(_come(store, 0, found))
    for thread in threads:
        thread.join(30)
    assert set(found) == {0, 1, 2}


def test_ranks_that_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with (
            pytest.raises(TimeoutError, match="has not started within 0 s"),
            init_distributed(timeout_seconds=0.2),
        ):
            pass
    with (  # before it waits for the other rank
        pytest.raises(ValueError, match="must be above 0, got 0"),
        init_distributed(heartbeat_timeout_s=0),
    ):
        pass
    assert not dist.is_initialized()


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with init_distributed() as ranks:
        assert (ranks.rank, ranks.size, ranks.group) == (0, 1, None)
    assert not dist.is_initialized()


_LEAVES_WORK_BEHIND = """
import torch, torch.distributed as dist
from emblib.sharding.failures import init_distributed
with init_distributed() as ranks:
    values = torch.ones(4_000_000)
    for _ in range(40):
        work = ranks.group.allgather([[torch.empty_like(values)]], [values.clone()])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel what threads do")
def test_ends_well_while_gloo_is_at_work() -> None:
    """Torch's threads free tensors, for which they need the interpreter: it must still be there."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    command = [sys.executable, "-c", _LEAVES_WORK_BEHIND]
    done = subprocess.run(command, env=_environment() | place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _inside(ranks: RankGroup) -> tuple[int, int]:
    with init_distributed() as found:
        assert dist.is_initialized()
    assert dist.is_initialized()  # it was there before
    return found.rank, found.size


def test_with_a_process_group_that_is_there() -> None:
    assert worlds.run(4, _inside) == [(rank, 4) for rank in range(4)]
