"""Directories of checkpoints, saves in the background, single files, and what errors tell."""

import copy
import errno
import io
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from emblib.sharding import checkpoints
from emblib.sharding.checkpoints import (
    CheckpointError,
    RowStates,
    ShardedTable,
    files,
    sharded_table,
)
from emblib.sharding.checkpoints.checksums import SummingStream
from emblib.sharding.checkpoints.sharded_table import average_columns
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import Shard
from emblib.tables.durable_files import save_archive
from tests.sharding import checkpoint_kills, worlds
from tests.sharding.checkpoint_worlds import assert_is, numbers, spread
from tests.sync_calls import record_syncs
from tests.tables.kills import run_alone
from tests.thread_cases import in_fork

ALONE = RankGroup.single()
WHOLE = (Shard(0, (0, 10), (0, 4)),)
HALVES = (Shard(0, (0, 5), (0, 4)), Shard(0, (5, 10), (0, 4)))


def test_whole_or_as_before_wherever_a_writer_is_killed(tmp_path: Path) -> None:
    told = dict(
        line.split() for line in run_alone(checkpoint_kills, "calls", tmp_path).splitlines()
    )
    assert all(int(count) > 0 for count in told.values()), told


def test_on_the_disk_before_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and the names of their files reach the disk, then the metadata, then its name."""
    calls = record_syncs(monkeypatch)
    checkpoints.save({"t": numbers(10, 4)}, tmp_path, ALONE)
    rows, metadata = ((next(tmp_path.glob(g))).stat().st_size for g in ("*.distcp", ".metadata"))
    saved = [f"file of {rows}", "directory", f"file of {metadata}", "replace", "directory"]
    assert calls == saved


def test_no_whole_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        checkpoints.load({"a": torch.zeros(1)}, tmp_path / "nothing", ALONE)
    with pytest.raises(CheckpointError, match="no whole checkpoint in it"):
        checkpoints.load({"a": torch.zeros(1)}, tmp_path, ALONE)
    assert checkpoints.latest(tmp_path, ALONE) is None


def test_latest_is_the_greatest_that_is_whole(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        checkpoints.save({"step": step}, tmp_path / f"step_{step}", ALONE)
    (tmp_path / "step_300").mkdir()
    found = checkpoints.latest(tmp_path, ALONE)
    assert found == tmp_path / "step_100"
    state = {"step": 0}
    checkpoints.load(state, found, ALONE)
    assert state == {"step": 100}


def test_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard is cut into pieces, which another size of pieces reads."""
    monkeypatch.setattr(sharded_table, "MAX_BLOCK_BYTES", 3 * 16)
    table = spread(numbers(10, 4), WHOLE, ALONE)
    assert [(o, tuple(p.shape)) for o, p in table.blocks()] == [
        ((0, 0), (3, 4)),
        ((3, 0), (3, 4)),
        ((6, 0), (3, 4)),
        ((9, 0), (1, 4)),
    ]
    checkpoints.save({"t": table}, tmp_path, ALONE)
    monkeypatch.setattr(sharded_table, "MAX_BLOCK_BYTES", 4 * 16)
    found = {"t": spread(torch.zeros(10, 4), HALVES, ALONE)}
    checkpoints.load(found, tmp_path, ALONE)
    assert_is(found["t"], numbers(10, 4))


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_tables_without_rows(shards: int, tmp_path: Path) -> None:
    """They are in the metadata, as tensors without rows are, and torch loads them."""
    tables = [Shard(0, (0, 0), (2 * i, 2 * i + 2)) for i in range(shards)]
    table = spread(torch.zeros(0, 2 * shards), tables, ALONE)
    states = RowStates(
        (0, shards),
        [Shard(0, (0, 0), (i, i + 1)) for i in range(shards)],
        {i: torch.zeros(0, 1) for i in range(shards)},
        ALONE,
        torch.float32,
    )
    states.cuts = tuple(range(0, 2 * shards + 1, 2))
    checkpoints.save({"t": table, "s": states, "u": numbers(2)}, tmp_path, ALONE)
    found = {"t": spread(torch.zeros(0, 2 * shards), tables[::-1], ALONE), "u": torch.zeros(2)}
    checkpoints.load({**found, "s": states}, tmp_path, ALONE)
    assert torch.equal(found["u"], numbers(2))
    checkpoints.load({"t": torch.zeros(0, 2 * shards), "s": torch.zeros(0)}, tmp_path, ALONE)
    dcp.load({"t": torch.zeros(0, 2 * shards)}, checkpoint_id=tmp_path, no_dist=True)


def test_other_tables_are_told_before_anything_is_read(tmp_path: Path) -> None:
    checkpoints.save({"t": numbers(10, 4), "n": 1, "u": numbers(2)}, tmp_path, ALONE)
    mine = torch.zeros(2)
    with pytest.raises(CheckpointError, match=r"t: saved is a tensor \(10, 4\), here is \(10, 5\)"):
        checkpoints.load({"t": torch.zeros(10, 5), "u": mine}, tmp_path, ALONE)
    with pytest.raises(CheckpointError, match=r"n: saved is no tensor, here is \(1,\)"):
        checkpoints.load({"n": torch.zeros(1), "u": mine}, tmp_path, ALONE)
    with pytest.raises(CheckpointError, match="does not have other, v: it is of another model"):
        checkpoints.load({"v": torch.zeros(1), "other": 0, "u": mine}, tmp_path, ALONE)
    assert mine.tolist() == [0, 0]
    state: dict[str, Any] = {"v": torch.zeros(1), "u": mine}
    checkpoints.load(state, tmp_path, ALONE, strict=False)
    assert mine.tolist() == [1, 2]
    assert state["v"].tolist() == [0]


def dense(seed: int, ranks: RankGroup) -> tuple[nn.Module, torch.optim.Adam]:
    """A model and its optimizer, spread over ranks if there are several."""
    torch.manual_seed(seed)
    model: nn.Module = nn.Linear(3, 4)
    if ranks.group is not None:
        fully_shard(model, mesh=DeviceMesh.from_group(ranks.group, "cpu"))
    return model, torch.optim.Adam(model.parameters(), 0.1)


def train(model: nn.Module, optimizer: torch.optim.Adam, steps: int) -> None:
    for step in range(steps):
        model(torch.arange(3.0) + step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def go_on(ranks: RankGroup, path: Path) -> Tensor:
    """A model that goes on as one that was not saved; its whole weight, by way of one file."""
    model, optimizer = dense(0, ranks)
    train(model, optimizer, 2)
    checkpoints.save({"model": model, "optimizer": optimizer}, path / "dense", ranks)
    other, others = dense(1, ranks)
    checkpoints.load({"model": other, "optimizer": others}, path / "dense", ranks)
    train(model, optimizer, 2)
    train(other, others, 2)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(local(ours), local(theirs))
    checkpoints.export({"model": other}, path / "dense.pt", ranks)
    found: Tensor = torch.load(path / "dense.pt")["model"]["weight"]
    return found


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def test_dense_models_go_on(tmp_path: Path) -> None:
    """A new optimizer has no states before its first step; it gets those that were saved."""
    alone = go_on(ALONE, tmp_path / "one")
    for found in worlds.run(2, go_on, tmp_path / "two"):
        torch.testing.assert_close(found, alone)


def test_states_by_columns() -> None:
    """Means by how many columns; exact where all are equal."""
    states = torch.tensor([[1.0, 4.0, 2.0], [0.1, 0.1, 0.1]])
    cuts = (0, 2, 3, 6)
    for columns, mean in (((0, 6), 2.0), ((0, 3), 2.0), ((2, 6), 2.5), ((1, 5), 2.25)):
        found = average_columns(states, cuts, columns)
        assert found[0].item() == mean
        assert torch.equal(found[1], states[1, 0])


def row_states(cuts: tuple[int, ...], values: list[float]) -> RowStates:
    """A table of 3 rows in shards by column, each with one number."""
    shards = [Shard(0, (0, 3), (i, i + 1)) for i in range(len(values))]
    parts = {i: torch.full((3, 1), value) for i, value in enumerate(values)}
    states = RowStates((3, len(values)), shards, parts, ALONE, torch.float32)
    states.cuts = cuts
    return states


def test_states_by_columns_into_other_boxes(tmp_path: Path) -> None:
    checkpoints.save({"s": row_states((0, 2, 3, 6), [1.0, 4.0, 2.0])}, tmp_path, ALONE)
    state: dict[str, Any] = {"s": row_states((0, 3, 6), [0.0, 0.0])}
    checkpoints.load(state, tmp_path, ALONE)
    assert [part[0].item() for part in state["s"].parts.values()] == [2.0, 2.0]
    state = {"s": torch.zeros(3)}
    checkpoints.load(state, tmp_path, ALONE)
    assert state["s"].tolist() == [2.0, 2.0, 2.0]
    checkpoints.save(state, tmp_path, ALONE)
    state = {"s": row_states((0, 1, 6), [0.0, 0.0])}
    checkpoints.load(state, tmp_path, ALONE)
    assert [part[0].item() for part in state["s"].parts.values()] == [2.0, 2.0]


def test_each_shard_gets_the_mean_of_its_own_columns(tmp_path: Path) -> None:
    """Also one of several intervals, whose number is in each of them."""
    checkpoints.save({"s": row_states((0, 2, 3, 6), [1.0, 4.0, 5.0])}, tmp_path, ALONE)
    shards = [Shard(0, (0, 3), (0, 2)), Shard(0, (0, 3), (2, 3))]
    parts = {0: torch.zeros(3, 2), 1: torch.zeros(3, 1)}
    states = RowStates((3, 3), shards, parts, ALONE, torch.float32)
    states.cuts = (0, 1, 3, 6)
    state: dict[str, Any] = {"s": states}
    checkpoints.load(state, tmp_path, ALONE)
    assert state["s"].parts[0].tolist() == [[2.0, 2.0]] * 3  # columns 0 to 3
    assert state["s"].parts[1].tolist() == [[5.0]] * 3  # columns 3 to 6


def save_in_background(ranks: RankGroup, path: Path) -> list[bool]:
    """Two saves; what they save changes at once, and collectives go on meanwhile."""
    shards = [Shard(r, (r * 3, r * 3 + 3), (0, 4)) for r in range(ranks.size)]
    rows = 3 * ranks.size
    pending = []
    table = spread(numbers(rows, 4), shards, ranks)
    for step in range(2):
        state = {"t": table, "other": torch.full((2,), step), "step": step}
        pending.append(checkpoints.async_save(state, path / str(step), ranks))
        for part in table.parts.values():
            part.add_(1)
        assert ranks.gather_objects(ranks.rank) == list(range(ranks.size))
    for step, future in enumerate(pending):
        future.result()
        found: dict[str, Any] = {
            "t": spread(torch.zeros(rows, 4), shards, ranks),
            "other": torch.zeros(2),
            "step": -1,
        }
        checkpoints.load(found, path / str(step), ranks)
        assert_is(found["t"], numbers(rows, 4) + step)
        assert found["other"].tolist() == [step, step]
        assert found["step"] == step
    return [future.done() for future in pending]


@pytest.mark.parametrize("world", [1, 3])
def test_saves_in_the_background(world: int, tmp_path: Path) -> None:
    assert worlds.run(world, save_in_background, tmp_path) == [[True, True]] * world


def test_a_forked_process_saves_in_the_background(tmp_path: Path) -> None:
    def save(name: str) -> None:
        checkpoints.async_save({"a": torch.ones(1)}, tmp_path / name, ALONE).result(30)

    save("parent")  # its thread is not in the child
    assert in_fork(lambda: save("child"), seconds=40) == ""
    state = {"a": torch.zeros(1)}
    checkpoints.load(state, tmp_path / "child", ALONE)
    assert state["a"].item() == 1


def fail_in_background(ranks: RankGroup, path: Path) -> str:
    future = checkpoints.async_save({"a": torch.zeros(1)}, path / "file" / "in_it", ranks)
    error = future.exception()
    return f"{type(error).__name__}: {error}"


def test_saves_in_the_background_tell_of_failures(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    for told in worlds.run(2, fail_in_background, tmp_path):
        assert "Error" in told


def fail_on_rank_1(ranks: RankGroup, path: Path) -> list[str]:
    """Save while the disk of rank 1 is full, at once and in the background."""
    state = {
        "a": spread(numbers(4, 4), [Shard(r, (r * 2, r * 2 + 2), (0, 4)) for r in (0, 1)], ranks)
    }
    checkpoints.save(state, path, ranks)
    told = []
    with pytest.MonkeyPatch.context() as patch:
        if ranks.rank == 1:
            full = OSError(errno.ENOSPC, "No space left on device")
            patch.setattr(SummingStream, "write", mock.Mock(side_effect=full))
        for save in (
            lambda: checkpoints.save(state, path, ranks),
            lambda: checkpoints.async_save(state, path, ranks).result(),
        ):
            try:
                save()
            except Exception as error:  # as a training loop does
                told.append(f"{type(error).__name__}: {error}")
            ranks.barrier()
            assert len(list(path.glob("*.distcp"))) == 2  # of the first save
    checkpoints.load(state, path, ranks)
    checkpoints.save(state, path, ranks)
    return told


def test_failures_of_a_rank_are_errors_of_all(tmp_path: Path) -> None:
    message = "CheckpointError: rank 1: OSError: [Errno 28] No space left on device"
    assert worlds.run(2, fail_on_rank_1, tmp_path) == [[message] * 2] * 2


def refuse_on_all(ranks: RankGroup, path: Path) -> list[str]:
    """Arguments that differ between the ranks, and are wrong on rank 1."""
    state: Any = {
        "a": spread(numbers(4, 4), [Shard(r, (r * 2, r * 2 + 2), (0, 4)) for r in (0, 1)], ranks)
    }
    checkpoints.save(state, path, ranks)
    is_wrong = ranks.rank == 1
    errors = []
    for call in (
        lambda: checkpoints.save(state, path / f"rank{ranks.rank}", ranks),
        lambda: checkpoints.save(state, 3 if is_wrong else path, ranks),  # type: ignore[arg-type]
        lambda: checkpoints.load(state, None if is_wrong else path, ranks),  # type: ignore[arg-type]
        lambda: checkpoints.load(state, path, ranks, strict="no" if is_wrong else True),  # type: ignore[arg-type]
    ):
        try:
            call()
        except Exception as error:
            errors.append(str(error))
    assert not list(path.glob("*/.metadata"))
    checkpoints.load(state, path, ranks)  # the ranks are still in step
    return errors


def test_arguments_of_one_rank_are_refused_on_all(tmp_path: Path) -> None:
    for errors in worlds.run(2, refuse_on_all, tmp_path):
        assert len(errors) == 4
        assert "all ranks must save to the same directory" in errors[0]
        assert "int" in errors[1]
        assert "None" in errors[2]
        assert "strict must be True or False" in errors[3]


def save_values_of_ranks(ranks: RankGroup, path: Path) -> list[float]:
    """Return what is loaded of values that differ between the ranks that save them."""
    values = {name: torch.full((3,), float(ranks.rank)) for name in "abcd"}
    state: dict[str, Any] = {"tensors": values, "number": ranks.rank}
    if ranks.rank:
        state["later"] = ranks.rank
    checkpoints.save(state, path, ranks)
    checkpoints.load(state, path, ranks)
    numbers = [float(value[0]) for value in state["tensors"].values()]
    return [*numbers, state["number"], state.get("later", 1)]


def test_values_that_differ_between_ranks_are_those_of_the_first(tmp_path: Path) -> None:
    assert worlds.run(3, save_values_of_ranks, tmp_path) == [[0.0, 0.0, 0.0, 0.0, 0, 1]] * 3


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_errors_in_the_middle_of_a_file_stay_what_they_are(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch goes on to end its archive, which raises an error about positions."""
    write = SummingStream.write

    def fill_disk(stream: SummingStream, data: bytes) -> int:
        if stream.sums.nbytes > 600 and len(data) > 40:
            raise error
        return write(stream, data)

    monkeypatch.setattr(SummingStream, "write", fill_disk)
    kind = CheckpointError if isinstance(error, OSError) else CheckpointException
    with pytest.raises(kind, match=rf"{type(error).__name__}(: \[Errno 28\] No space left)?\s*$"):
        checkpoints.save({"a": numbers(300), "b": numbers(300)}, tmp_path / "saved", ALONE)
    assert not list((tmp_path / "saved").iterdir())
    monkeypatch.undo()
    file = mock.Mock(wraps=io.BytesIO())
    file.write = mock.Mock(side_effect=[64, error, *[64] * 100])
    with pytest.raises(type(error)) as raised:
        save_archive({"a": numbers(300)}, file)
    assert raised.value is error


def test_an_error_after_the_commit_deletes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = mock.Mock(side_effect=[None, OSError(errno.EIO, "Input/output error")])
    monkeypatch.setattr(files, "flush_directory", flush)
    with pytest.raises(CheckpointError, match="Input/output error"):
        checkpoints.save({"a": numbers(3)}, tmp_path, ALONE)
    state = {"a": torch.zeros(3)}
    checkpoints.load(state, tmp_path, ALONE)
    assert torch.equal(state["a"], numbers(3))


def test_interrupts_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch wraps them, in what no `except Exception` catches."""
    monkeypatch.setattr(SummingStream, "write", mock.Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(CheckpointException):
        checkpoints.save({"a": numbers(3)}, tmp_path, ALONE)


def export(ranks: RankGroup, path: Path) -> Tensor | None:
    shards = [Shard(1 - r, (r * 3, r * 3 + 3), (0, 4)) for r in range(2)]
    whole = numbers(6, 4, torch.bfloat16)
    state = {"a": {"t": spread(whole, shards, ranks)}, "b": [torch.ones(2)], "c": "text"}
    checkpoints.export(state, path, ranks)
    everywhere = state["a"]["t"].full_tensor()
    assert torch.equal(everywhere, whole)
    assert state["a"]["t"].full_tensor(rank=1).numel() == (24 if ranks.rank == 1 else 0)
    with pytest.raises(ValueError, match=r"the same on all ranks, got \[0, 1\]"):
        state["a"]["t"].full_tensor(ranks.rank)
    return everywhere if path.exists() else None


def test_one_file_with_whole_tables(tmp_path: Path) -> None:
    path = tmp_path / "new" / "whole.pt"
    assert all(found is not None for found in worlds.run(2, export, path))
    found = torch.load(path)
    assert found.keys() == {"a", "b", "c"}
    assert torch.equal(found["a"]["t"], numbers(6, 4, torch.bfloat16))
    assert [file.name for file in path.parent.iterdir()] == ["whole.pt"]


def test_as_a_tensor(tmp_path: Path) -> None:
    table = spread(numbers(10, 4), HALVES, ALONE)
    twin = copy.deepcopy(table)
    assert isinstance(twin, ShardedTable)
    table.parts[0].zero_()
    assert_is(twin, numbers(10, 4))
    table.copy_(twin)
    assert_is(table, numbers(10, 4))
    halved = table.to(torch.bfloat16)
    assert isinstance(halved, ShardedTable)
    assert (halved.dtype, halved.parts[1].dtype) == (torch.bfloat16, torch.bfloat16)
    assert table.shape == (10, 4)
    assert "2 shards" in repr(table)
    with pytest.raises(NotImplementedError, match="full_tensor"):
        table + 1
    with pytest.raises(TypeError, match=r"checkpoints\.save"):
        torch.save(table, tmp_path / "x")
    with pytest.raises(ValueError, match=r"rank 0 has the shards \[0, 1\]"):
        ShardedTable((10, 4), HALVES, {}, ALONE, torch.float32)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_with_torch_distributed_checkpoint_itself(tmp_path: Path) -> None:
    table = spread(numbers(10, 4), HALVES, ALONE)
    dcp.save({"t": table}, checkpoint_id=tmp_path / "now", no_dist=True)
    dcp.async_save({"t": table}, checkpoint_id=tmp_path / "then", no_dist=True).result()
    for name in ("now", "then"):
        found = {"t": torch.zeros(10, 4)}
        dcp.load(found, checkpoint_id=tmp_path / name, no_dist=True)
        assert torch.equal(found["t"], numbers(10, 4))


def save_with_torch(ranks: RankGroup, path: Path) -> None:
    shards = [Shard(r, (r * 3, r * 3 + 3), (0, 4)) for r in range(ranks.size)]
    table = spread(numbers(3 * ranks.size, 4), shards, ranks)
    dcp.save({"t": table}, checkpoint_id=path, process_group=ranks.group)
    found = {"t": spread(torch.zeros(3 * ranks.size, 4), shards, ranks)}
    dcp.load(found, checkpoint_id=path, process_group=ranks.group)
    assert_is(found["t"], numbers(3 * ranks.size, 4))


def test_with_torch_distributed_checkpoint_over_ranks(tmp_path: Path) -> None:
    worlds.run(3, save_with_torch, tmp_path)
    found: dict[str, Any] = {"t": torch.zeros(9, 4)}
    checkpoints.load(found, tmp_path, ALONE)
    assert torch.equal(found["t"], numbers(9, 4))
