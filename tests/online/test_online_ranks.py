"""Change logs of a sharded trainer: one per rank, followed as one."""

from pathlib import Path

import pytest
import torch

import emblib
from emblib.online import DirectorySink, LogError, LogFollower
from emblib.online.records import Record, RecordKind, encode
from tests.online import online_ranks
from tests.online.online_ranks import RULES, collection, everything
from tests.sharding import worlds

PLAIN = [name for name in RULES if name != "any_key"]


def test_followers_of_two_ranks(tmp_path: Path) -> None:
    outputs, theirs = worlds.run(2, online_ranks.train, str(tmp_path), (2, 3, 7), 4)
    assert all(map(torch.equal, outputs, theirs))
    sinks = [DirectorySink(tmp_path / str(rank)) for rank in (1, 0)]
    whole = collection()
    follower = LogFollower(whole, sinks)
    served = {n: whole.embedding_bags[n].weight.detach() for n in PLAIN}
    quantised = emblib.QuantizedEmbeddingBags.from_float(served, bits=8)
    other = LogFollower(quantised, sinks, tables=PLAIN)
    assert follower.apply() == other.apply() == online_ranks.STEPS
    assert follower.lag.steps == 0
    assert torch.equal(follower(everything()).values(), outputs[-1])
    expected = emblib.QuantizedEmbeddingBags.from_float(
        {n: whole.embedding_bags[n].weight.detach() for n in PLAIN}, bits=8
    )
    assert torch.equal(quantised.packed, expected.packed)


def test_ranks_that_were_killed_at_different_snapshots(tmp_path: Path) -> None:
    sink = DirectorySink(tmp_path / "0")
    for number in (1, 2):  # the other rank had written none
        sink.append(encode(Record(RecordKind.SNAPSHOT, 0, 2, number, number, 0, 0.0, {})))
    sink.close()
    outputs, _ = worlds.run(2, online_ranks.train, str(tmp_path), (), 4)
    sinks = [DirectorySink(tmp_path / str(rank)) for rank in range(2)]
    follower = LogFollower(collection(), sinks)
    assert follower.apply() == online_ranks.STEPS
    assert torch.equal(follower(everything()).values(), outputs[-1])


def test_logs_of_ranks_begin_at_one_step(tmp_path: Path) -> None:
    worlds.run(2, online_ranks.begin_at_other_steps, str(tmp_path))


def test_a_snapshot_has_the_fallback_rows_of_all_shards(tmp_path: Path) -> None:
    outputs, theirs = worlds.run(2, online_ranks.train_fallback, str(tmp_path))
    assert torch.equal(outputs, theirs)
    sinks = [DirectorySink(tmp_path / str(rank)) for rank in range(2)]
    follower = LogFollower(online_ranks.fallback_collection(), sinks)
    assert follower.apply() == 2
    assert torch.equal(follower(online_ranks.each_id()).values(), outputs)


def test_boundaries_are_steps_of_all_ranks(tmp_path: Path) -> None:
    outputs, _ = worlds.run(2, online_ranks.train, str(tmp_path), (2, 3, 7), 100)
    data = [list(DirectorySink(tmp_path / str(rank)).read()) for rank in range(2)]
    logs = [DirectorySink(tmp_path / f"copy {rank}") for rank in range(2)]
    follower, steps = LogFollower(collection(), logs), []
    for at in range(max(map(len, data))):
        for log, records in zip(logs, data, strict=True):
            for stored in records[at : at + 1]:
                log.append(stored.data)
            if (step := follower.apply()) is not None and step not in steps:
                steps.append(step)
                if step:
                    assert torch.equal(follower(everything()).values(), outputs[step - 1])
    assert steps == [0, 1, 4, 5, 6, 8, 9]


def test_logs_of_other_ranks_are_asked_for(tmp_path: Path) -> None:
    worlds.run(2, online_ranks.train, str(tmp_path), (), 100)
    sinks = [DirectorySink(tmp_path / "0"), DirectorySink(tmp_path / "0")]
    for sources in (sinks[:1], sinks):
        with pytest.raises(LogError, match=r"trainer has 2 ranks.*one source per rank"):
            LogFollower(collection(), sources).apply()


def test_averaged_replicas_are_refused(tmp_path: Path) -> None:
    worlds.run(4, online_ranks.log_replicas, str(tmp_path))
