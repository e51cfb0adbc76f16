"""Followers of change logs: equal to the leader at every boundary, and what they refuse."""

import contextlib
import copy
import pickle
import re
import shutil
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import emblib
from emblib import inference, optim
from emblib.online import ChangeLog, DirectorySink, LogError, LogFollower
from emblib.online.records import Record, RecordKind, TableChange, decode, encode
from tests.interrupts import each_line
from tests.online import traffic

LEADERS = {
    "lru": lambda device: traffic.dynamic(device=device),
    "lfu": lambda device: traffic.dynamic(device=device, eviction=emblib.Eviction.LFU),
    "ttl": lambda device: traffic.dynamic(device=device, ttl=4),
    "fallback": lambda device: traffic.dynamic(
        device=device,
        default_value=0.0,
        fallback_rows=8,
        admission=emblib.FrequencyAdmission(2, emblib.ExactCounter(64)),
    ),
    "tiers": lambda device: traffic.dynamic(device=device, stored_rows=24),
    "plain": lambda device: traffic.plain(device=device),
    "sgd": lambda device: traffic.plain(optim.SGD(0.1), device=device),
    "cached": lambda device: traffic.plain(
        device=device, placement=emblib.Placement.MANAGED_CACHING
    ),
}


def _run(
    make_leader: Callable[[], traffic.Leader], directory: Path, steps: int, compact_every: int = 7
) -> None:
    leader = make_leader()
    generator = torch.Generator().manual_seed(5)
    for _ in range(3):
        leader.step(generator)
    log = ChangeLog(leader.model, DirectorySink(directory), step=3, compact_every=compact_every)
    followers = {
        form: LogFollower(make(), DirectorySink(directory))
        for form, make in leader.followers.items()
    }
    late = LogFollower(leader.followers["live"](), DirectorySink(directory))
    last = 3 + steps
    for step in range(4, last + 1):
        leader.step(generator)
        if step % 3 == 0 and step < last:
            continue  # two steps in one entry
        assert log.record(step)
        log.flush()
        for form, follower in followers.items():
            if form == "live" or step % 5 == 0:  # the others get several entries at once
                assert follower.apply() == step
                assert follower.lag.steps == 0
                traffic.assert_equal(follower, leader.followers[form], leader.keys)
    log.close()
    if isinstance(leader.model, emblib.DynamicEmbeddingBags):
        records = [decode(stored.data, "") for stored in DirectorySink(directory).read()]
        assert sum(r.tables["item"][0].removed.numel() for r in records) > 0
    assert late.lag.steps is None
    assert late.apply() == last
    traffic.assert_equal(late, leader.followers["live"], leader.keys)


@pytest.mark.parametrize("name", LEADERS)
def test_equal_at_every_boundary(name: str, device: torch.device, tmp_path: Path) -> None:
    _run(lambda: LEADERS[name](device), tmp_path, 20)


def test_an_hour_of_traffic(tmp_path: Path) -> None:
    """Hundreds of steps in every kind of tables, with compaction and growth on the way."""
    for name in LEADERS:
        _run(lambda name=name: LEADERS[name]("cpu"), tmp_path / name, 300, compact_every=45)


def _entry(bags: Any, *ids: int) -> None:
    bags(torch.tensor(ids), torch.arange(len(ids) + 1)).sum().backward()


def _bags() -> emblib.TableBatchedEmbeddingBags:
    return emblib.TableBatchedEmbeddingBags([emblib.TableSpec(30, 4, "item")], optim.SGD(0.1))


def test_a_frozen_file_is_the_base(tmp_path: Path) -> None:
    trained = emblib.DynamicEmbeddingBags(
        [emblib.DynamicSpec(64, 4, name="item", default_value=0.5)], optim.SGD(0.1)
    )
    log = ChangeLog(trained, DirectorySink(tmp_path / "log"))
    _entry(trained, 1, 2, 3)
    log.record(1)
    emblib.freeze(trained, tmp_path / "a", "int8")
    content = (tmp_path / "a").read_bytes()
    opened = [emblib.open_frozen(tmp_path / "a") for _ in range(2)]
    follower, other = (LogFollower(o, DirectorySink(tmp_path / "log"), step=1) for o in opened)
    assert follower.apply() == 1
    for step in range(2, 30):
        _entry(trained, *range(5 * step, 5 * step + 9))
        log.record(step)
    log.close()
    assert (follower.lag.steps, follower.apply(), follower.lag) == (28, 29, (0, 0.0))
    ids = torch.arange(-1, 200)
    expected = inference.for_inference(trained, "int8")
    assert torch.equal(follower(ids, torch.arange(202)), expected(ids, torch.arange(202)))
    assert (tmp_path / "a").read_bytes() == content
    assert other.lag.steps == 28
    assert other.lag.seconds > 0


def test_a_base_before_the_log_loads_a_snapshot(tmp_path: Path) -> None:
    trained, sink = _bags(), DirectorySink(tmp_path)
    served = inference.for_inference(trained, "int8")
    late = LogFollower(inference.for_inference(trained, "int8"), DirectorySink(tmp_path))
    log = ChangeLog(trained, sink, compact_every=5)
    follower = LogFollower(served, DirectorySink(tmp_path), step=0)
    for step in range(1, 4):
        _entry(trained, step)
        log.record(step)
    log.flush()
    assert late.apply() == 3
    for step in range(4, 22):
        _entry(trained, step)
        log.record(step)
    log.close()
    assert follower.apply() == late.apply() == 21  # the log has dropped what they miss
    expected = inference.for_inference(trained, "int8")
    for model in (served, late.model):
        assert torch.equal(model.packed, expected.packed)


def test_readers_see_all_of_an_entry_or_nothing(tmp_path: Path) -> None:
    trained = emblib.TableBatchedEmbeddingBags(
        [emblib.TableSpec(64, 8, "a"), emblib.TableSpec(64, 8, "b")], optim.SGD(0.125)
    )
    with torch.no_grad():
        for weight in trained.table_weights():
            weight.zero_()
    follower = LogFollower(inference.for_inference(trained), DirectorySink(tmp_path))
    ids, offsets, torn, stop = torch.arange(64).repeat(2), torch.arange(129), [], threading.Event()

    def read() -> None:
        while not stop.is_set():
            with follower.reading():  # entered again by the lookup
                values = follower(ids, offsets)
            if values.unique().numel() != 1:
                torn.append(values)

    readers = [threading.Thread(target=read) for _ in range(2)]
    with ChangeLog(trained, DirectorySink(tmp_path)) as log:
        log.flush()
        follower.apply()
        for reader in readers:
            reader.start()
        writer = threading.Thread(target=follower.run, args=(stop, 0.0))
        writer.start()
        for step in range(1, 40):
            trained(ids, offsets).sum().backward()
            log.record(step)
    stop.set()
    for thread in (*readers, writer):
        thread.join()
    assert follower.apply() == 39
    assert not torn
    assert follower(ids, offsets).unique().tolist() == [-39 / 8]


def test_a_reader_does_not_wait_for_itself(tmp_path: Path) -> None:
    trained = _bags()
    follower = LogFollower(_bags(), DirectorySink(tmp_path), step=0)
    with ChangeLog(trained, DirectorySink(tmp_path), compact_every=None) as log:
        _entry(trained, 3)
        log.record(1)
    with follower.reading(), pytest.raises(RuntimeError, match="leave reading"):
        follower.apply()
    assert follower.apply() == 1, "nothing was written, so no snapshot is needed"


def test_the_lag_is_known_to_a_reader_that_a_writer_waits_for(tmp_path: Path) -> None:
    trained = _bags()
    follower = LogFollower(_bags(), DirectorySink(tmp_path), step=0)
    with ChangeLog(trained, DirectorySink(tmp_path), compact_every=None) as log:
        _entry(trained, 3)
        log.record(1)
    with follower.reading():
        writer = threading.Thread(target=follower.apply, daemon=True)
        writer.start()
        while follower._apply_lock.acquire(blocking=False):  # until the writer has it
            follower._apply_lock.release()
        assert follower.lag.steps == 1
    writer.join()
    assert follower.step == 1


def test_an_interrupted_reader_stops_no_writer(tmp_path: Path) -> None:
    follower = LogFollower(_bags(), DirectorySink(tmp_path), step=0)
    ids, offsets = torch.arange(3), torch.arange(4)
    for attempt in each_line():
        with attempt, follower.reading():
            follower(ids, offsets)
        writer = threading.Thread(target=follower._lock.write, args=(int,), daemon=True)
        writer.start()
        writer.join(60)
        assert not writer.is_alive(), attempt.where


def test_an_interrupted_poll_skips_no_entry(tmp_path: Path) -> None:
    trained = _bags()
    served = inference.for_inference(trained)
    follower = LogFollower(served, DirectorySink(tmp_path))
    with ChangeLog(trained, DirectorySink(tmp_path)) as log:
        log.flush()
        follower.apply()
        for step, attempt in enumerate(each_line(), 1):
            _entry(trained, step % 30)
            log.record(step)
            log.flush()
            with attempt:
                follower._poll()
            assert follower.apply() == step, attempt.where
    assert torch.equal(served.packed, inference.for_inference(trained).packed)


def test_errors_leave_the_last_boundary(tmp_path: Path) -> None:
    trained = _bags()
    served = inference.for_inference(trained, "int8")
    follower = LogFollower(served, DirectorySink(tmp_path))
    log = ChangeLog(trained, DirectorySink(tmp_path))
    _entry(trained, 3)
    log.record(1)
    log.flush()
    assert follower.apply() == 1
    before = served.packed.clone()
    _entry(trained, 4)
    with torch.no_grad():
        trained.table_weights()[0][4] = torch.nan
    log.record(2)
    log.flush()
    for _ in range(2):
        with pytest.raises(ValueError, match="table 'item': rows must be finite"):
            follower.apply()
        assert (follower.step, follower.lag.steps) == (1, 1)
    assert torch.equal(served.packed, before)
    with torch.no_grad():
        trained.table_weights()[0][4] = 1.0
    log.snapshot(3)
    log.close()
    with pytest.raises(ValueError, match="finite"):
        follower.apply()
    fresh = LogFollower(_bags(), DirectorySink(tmp_path), tables=["item"])
    assert fresh.apply() == 3


def test_a_failed_write_is_followed_by_a_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = _bags()
    served = inference.for_inference(trained, "int8")
    follower = LogFollower(served, DirectorySink(tmp_path))
    with ChangeLog(trained, DirectorySink(tmp_path)) as log:
        log.flush()
        follower.apply()
        _entry(trained, 3)
        log.record(1)
    with monkeypatch.context() as patch:
        patch.setattr(served, "table_views", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            follower.apply()
    assert follower.apply() == 1
    assert torch.equal(served.packed, inference.for_inference(trained, "int8").packed)


def test_other_tables_are_refused(tmp_path: Path) -> None:
    sink = DirectorySink(tmp_path)
    with ChangeLog(_bags(), sink):
        pass
    kinds = {
        r"has 20 rows": emblib.TableBatchedEmbeddingBags([emblib.TableSpec(20, 4, "item")]),
        r"have 6 values|of 6 values": emblib.QuantizedEmbeddingBags.from_float(
            {"item": torch.zeros(30, 6)}
        ),
        r"has row numbers, not keys": emblib.DynamicEmbeddingBags(
            [emblib.DynamicSpec(64, 4, name="item")]
        ),
        r"the model only \['other'\]: tables=": emblib.QuantizedEmbeddingBags.from_float(
            {"other": torch.zeros(30, 4)}
        ),
    }
    for message, model in kinds.items():
        with pytest.raises(LogError, match=message):
            LogFollower(model, sink).apply()
    quantised = emblib.QuantizedEmbeddingBags.from_float({"item": torch.zeros(30, 4)})
    with pytest.raises(KeyError, match="no tables"):
        LogFollower(quantised, sink, tables=["user"])
    with pytest.raises(TypeError, match="Linear has no tables that a follower can serve"):
        LogFollower(torch.nn.Linear(1, 1), sink)
    with pytest.raises(TypeError, match=r"pass \['item'\]"):
        LogFollower(quantised, sink, tables="item")
    with pytest.raises(ValueError, match="was pruned"):
        LogFollower(inference.prune(quantised, {"item": torch.arange(30) < 7}), sink)
    in_host_memory = inference.HostEmbeddingBags(quantised, {"item": torch.arange(30) < 7}, "cpu")
    with pytest.raises(ValueError, match="follow the tables that it was made of"):
        LogFollower(in_host_memory, sink)
    keyed = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(64, 4, name="item")])
    with pytest.raises(ValueError, match=r"several processes share.* open the frozen file in each"):
        LogFollower(inference.for_inference(keyed).share_memory(), sink)
    with pytest.raises(TypeError, match="neither copied nor sent"):
        pickle.dumps(LogFollower(quantised, sink))
    disk = emblib.TableSpec(30, 4, "item", emblib.Placement.DISK)
    cache = emblib.CacheConfig(directory=str(tmp_path / "disk"))
    with pytest.raises(ValueError, match="on disk"):
        LogFollower(emblib.TableBatchedEmbeddingBags([disk], optim.SGD(0.1), cache=cache), sink)
    with pytest.raises(ValueError, match="got none"):
        LogFollower(quantised, [])
    with pytest.raises(ValueError, match="name the tables to follow"):
        LogFollower(quantised, sink, tables=[])
    with pytest.raises(ValueError, match="step must be >= 0"):
        LogFollower(quantised, sink, step=-1)
    with pytest.raises(TypeError, match=r"a text, and needs step="):
        LogFollower(quantised, sink, run="7f3a")


def test_tables_that_are_left_out_may_be_of_any_kind(tmp_path: Path) -> None:
    """Pruned ones, and several of one name, of a log that has them too."""
    specs = [emblib.TableSpec(30, 4, name) for name in ("item", "user", "seller")]
    trained = emblib.TableBatchedEmbeddingBags(specs, optim.SGD(0.1))
    with ChangeLog(trained, DirectorySink(tmp_path)):
        pass
    rows = [{"item": torch.zeros(30, 4), "user": torch.ones(30, 4)}, {"user": torch.ones(30, 4)}]
    tables = [emblib.QuantizedEmbeddingBags.from_float(r, formats="float32") for r in rows]
    tables.append(inference.prune(tables[1], {"user": torch.arange(30) < 7}))
    model = torch.nn.ModuleList(tables)
    with pytest.raises(ValueError, match=r"leave it out with tables="):
        LogFollower(model, DirectorySink(tmp_path))
    assert LogFollower(model, DirectorySink(tmp_path), tables=["item"]).apply() == 0
    assert torch.equal(tables[0].to_dense("item"), trained.table_weights()[0])
    assert torch.equal(tables[0].to_dense("user"), rows[0]["user"])


@pytest.mark.parametrize("file", ["old", "new"])
@pytest.mark.parametrize("is_trimmed", [False, True])
def test_a_base_of_a_run_that_was_given_up(tmp_path: Path, *, is_trimmed: bool, file: str) -> None:
    """The trainer goes back to step 2, and logs other rows up to the step of the file, and on."""
    trained, sink = _bags(), DirectorySink(tmp_path / "log")
    log = ChangeLog(trained, sink, compact_every=3)
    for step in range(1, 7):
        _entry(trained, step)
        log.record(step)
        if step == 2:
            checkpoint = copy.deepcopy(trained.state_dict())
    emblib.freeze(trained, tmp_path / "given_up", "int8")
    log.close()
    trained.load_state_dict(checkpoint)
    log = ChangeLog(trained, sink, step=2, compact_every=3 if is_trimmed else 100)
    for step in range(3, 10):
        _entry(trained, 10 + step)
        log.record(step)
        if step == 6:
            emblib.freeze(trained, tmp_path / "current", "int8")
            run = log.run
    log.flush()
    for name in ("given_up", "current"):
        served: Any = emblib.open_frozen(tmp_path / name)
        if file == "old":
            served.log_runs = ()
        is_found = file == "new" and not (is_trimmed and name == "given_up")
        with (
            contextlib.nullcontext() if is_found else pytest.warns(UserWarning, match="given it up")
        ):
            follower = LogFollower(served, DirectorySink(tmp_path / "log"), step=6)
            steps = _applied_steps(follower)
        if name == "current":  # no row of the run before was served
            assert steps == ([7, 8, 9] if is_found else [9] if is_trimmed else [*range(2, 10)])
        expected = inference.for_inference(trained, "int8")
        assert torch.equal(served.packed, expected.packed)
        assert served.log_runs == expected.log_runs == (log.run,)
    served = emblib.open_frozen(tmp_path / "current")
    follower = LogFollower(served, DirectorySink(tmp_path / "log"), step=6, run=run)
    assert _applied_steps(follower) == [7, 8, 9]
    log.close()


def _applied_steps(follower: LogFollower) -> list[int]:
    """Apply all boundaries; return their steps."""
    steps, write = [], follower._write

    def note(functions: Any, key: Any, runs: Any) -> None:
        write(functions, key, runs)
        steps.append(key[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower, "_write", note)
        follower.apply()
    return steps


def test_records_of_earlier_versions_have_no_run(tmp_path: Path) -> None:
    trained, sink, older = _bags(), DirectorySink(tmp_path / "log"), DirectorySink(tmp_path / "old")
    bases = []
    for first_step in (0, 1):  # as many runs
        with ChangeLog(trained, sink, step=first_step) as log:
            _entry(trained, 3)
            log.record(first_step + 1)
            bases += [inference.for_inference(trained) for _ in range(2)]
            _entry(trained, 4)
            log.record(first_step + 2)
        records = [decode(stored.data, stored.location) for stored in sink.read()]
        for record in records[-3:]:
            older.append(encode(record._replace(run="")))
        for base in bases[-2:]:
            is_trusted = base is bases[0]
            base.log_runs = () if base is bases[-2] else base.log_runs
            with contextlib.nullcontext() if is_trusted else pytest.warns(UserWarning, match="run"):
                follower = LogFollower(base, older, step=first_step + 1)
                assert follower.apply() == first_step + 2
            assert torch.equal(base.packed, inference.for_inference(trained).packed)


def test_a_log_without_a_snapshot_begins_at_tables_of_another_log(tmp_path: Path) -> None:
    trained = _bags()
    with ChangeLog(trained, DirectorySink(tmp_path / "a")) as log:
        _entry(trained, 3)
        log.record(1)
    bases = [inference.for_inference(trained) for _ in range(2)]
    assert bases[0].log_runs == (log.run,)
    with ChangeLog(trained, DirectorySink(tmp_path / "b"), step=1, compact_every=None) as log:
        _entry(trained, 4)
        log.record(2)
    assert LogFollower(bases[0], DirectorySink(tmp_path / "b"), step=1).apply() == 2
    assert torch.equal(bases[0].packed, inference.for_inference(trained).packed)
    follower = LogFollower(bases[1], DirectorySink(tmp_path / "b"), step=2)
    with pytest.warns(UserWarning, match="run"), pytest.raises(LogError, match="no snapshot"):
        follower.apply()


def test_a_log_without_a_snapshot_needs_a_base(tmp_path: Path) -> None:
    trained = _bags()
    base = inference.for_inference(trained)
    with ChangeLog(trained, DirectorySink(tmp_path), step=5, compact_every=None) as log:
        _entry(trained, 3)
        log.record(6)
    for older in (None, 4):
        with pytest.raises(LogError, match=r"no snapshot to begin with: .*step="):
            LogFollower(_bags(), DirectorySink(tmp_path), step=older).apply()
    follower = LogFollower(base, DirectorySink(tmp_path), step=5)
    assert follower.apply() == 6
    assert torch.equal(base.packed, inference.for_inference(trained).packed)


@pytest.mark.parametrize("segment_bytes", [1, 1 << 20])
def test_a_directory_that_was_emptied_has_another_log(tmp_path: Path, segment_bytes: int) -> None:
    served = inference.for_inference(_bags())
    follower = LogFollower(served, DirectorySink(tmp_path / "log"))
    for steps in (5, 2, 8):
        trained = _bags()
        shutil.rmtree(tmp_path / "log", ignore_errors=True)
        sink = DirectorySink(tmp_path / "log", segment_bytes=segment_bytes)
        with ChangeLog(trained, sink) as log:
            for step in range(1, steps + 1):
                _entry(trained, step)
                log.record(step)
        assert follower.apply() == steps
        assert torch.equal(served.packed, inference.for_inference(trained).packed)


@pytest.mark.parametrize("step", [None, 1])
def test_a_log_that_has_not_begun_is_waited_for_with_a_warning(
    tmp_path: Path, step: int | None
) -> None:
    """The directory may be mistyped, or the trainer has not begun."""
    trained, sinks = _bags(), [DirectorySink(tmp_path / "log"), DirectorySink(tmp_path / "typo")]
    late, lost = (LogFollower(_bags(), sink, step=step) for sink in sinks)
    for follower, name in (late, "log"), (lost, "typo"):
        with pytest.warns(
            UserWarning, match=f"no log has begun in DirectorySink.*/{name}'"
        ) as seen:
            assert [follower.apply(), follower.apply()] == [step, step]
        assert [warning.filename for warning in seen] == [__file__]
    with ChangeLog(trained, sinks[0], step=1) as log:
        _entry(trained, 2)
        log.record(2)
    assert (late.apply(), lost.apply()) == (2, step)


def test_collections_that_share_a_table_are_followed_together(tmp_path: Path) -> None:
    """Their read-only copies of it are known by the run of the log; other copies are refused."""
    shared = emblib.SharedTables(
        [emblib.EmbeddingConfig(20, 4, "item")], optimizer=emblib.optim.SGD(0.1)
    )
    bags = emblib.EmbeddingBagCollection([shared.pooled("item", ["basket"])], shared=shared)
    history = emblib.EmbeddingCollection([shared.unpooled("item", ["history"])], shared=shared)
    model = torch.nn.ModuleList([bags, history])

    def convert() -> torch.nn.ModuleList:
        formats = (bags, "float32"), (history, "int8")
        return torch.nn.ModuleList([inference.for_inference(*args) for args in formats])

    def parts(served: torch.nn.ModuleList) -> list[torch.Tensor]:
        modules = served.modules()
        return [m.packed for m in modules if isinstance(m, emblib.QuantizedEmbeddingBags)]

    before, sink = convert(), DirectorySink(tmp_path)
    ids, lengths = torch.tensor([3, 3, 17]), torch.tensor([2, 1])
    with ChangeLog(model, sink) as log:
        follower = LogFollower(convert(), sink, step=0)
        pooled = bags(emblib.KeyedJaggedTensor(["basket"], ids, lengths=lengths)).values()
        rows = history(emblib.KeyedJaggedTensor(["history"], ids + 1, lengths=lengths))["history"]
        (pooled.sum() + rows.values().square().sum()).backward()
        log.record(1)
    assert follower.apply() == 1
    assert all(map(torch.equal, parts(follower.model), parts(convert())))
    with pytest.raises(ValueError, match=r"there are several \['item'\]; read-only copies"):
        LogFollower(before, sink)


def test_missing_records_are_an_error_until_a_record_with_all_rows(tmp_path: Path) -> None:
    trained = _bags()
    with ChangeLog(trained, DirectorySink(tmp_path)) as log:
        for step in range(1, 4):
            _entry(trained, step)
            log.record(step)
        log.snapshot(3)
    other = DirectorySink(tmp_path / "other")
    *records, snapshot = [stored.data for stored in DirectorySink(tmp_path).read()]
    for number, data in enumerate(records):
        if number != 2:
            other.append(data)
    follower = LogFollower(_bags(), other)
    for _ in range(2):
        with pytest.raises(LogError, match="is record 4, after 2: those between are missing"):
            follower.apply()
    other.append(snapshot)
    fresh = LogFollower(_bags(), other)
    for each in (follower, fresh):
        assert each.apply() == 3
        assert torch.equal(each.model.table_weights()[0], trained.table_weights()[0])


def test_the_page_on_online_updates_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[2] / "docs" / "online.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(block, "online.md", "exec"), {})
    assert capsys.readouterr().out == "4\n5\n"


def record(rank: int, kind: RecordKind, generation: int, step: int, sequence: int) -> bytes:
    """Return a record of one of two ranks, of which the second has the table."""
    keys = torch.arange(30)
    change = TableChange(keys, torch.full((30, 4), float(step)), keys[:0], {}, 0, 4)
    order = (generation, sequence, step)
    tables = {"item": [change]} if rank else {}
    return encode(Record(kind, rank, 2, *order, 0.0, tables, f"run {generation} of {rank}"))


def test_tables_name_the_run_of_one_rank(tmp_path: Path) -> None:
    sinks = [DirectorySink(tmp_path / str(rank)) for rank in range(2)]
    for rank, sink in enumerate(sinks):
        sink.append(record(rank, RecordKind.SNAPSHOT, 2, 0, 5))
        for step in (1, 2):
            sink.append(record(rank, RecordKind.DELTA, 2, step, 5 + step))
    assert _applied_steps(LogFollower(_bags(), sinks, step=1, run="run 2 of 1")) == [2]
    with pytest.warns(UserWarning, match="given it up"):
        assert _applied_steps(LogFollower(_bags(), sinks, step=1, run="run 1 of 1")) == [0, 1, 2]


def test_a_rank_that_is_late_is_waited_for(tmp_path: Path) -> None:
    sinks = [DirectorySink(tmp_path / str(rank)) for rank in range(2)]
    follower = LogFollower(_bags(), sinks)
    for rank, sink in enumerate(sinks):
        sink.append(record(rank, RecordKind.SNAPSHOT, 1, 0, 1))
    assert follower.apply() == 0
    sinks[0].append(record(0, RecordKind.COMPACTION, 1, 20, 41))  # what was before is deleted
    assert follower.apply() == 0
    sinks[1].append(record(1, RecordKind.DELTA, 1, 1, 2))
    assert follower.apply() == 0
    sinks[1].append(record(1, RecordKind.COMPACTION, 1, 20, 3))
    assert follower.apply() == 20


def test_a_trainer_that_had_another_number_of_ranks(tmp_path: Path) -> None:
    sinks = [DirectorySink(tmp_path / str(rank)) for rank in range(2)]
    follower = LogFollower(_bags(), sinks)
    for sequence in range(1, 100):
        kind = RecordKind.DELTA if sequence % 40 else RecordKind.COMPACTION
        older = decode(record(0, kind, 1, sequence, sequence), "")._replace(num_ranks=1)
        sinks[0].append(encode(older))
    with pytest.raises(LogError, match="the trainer has 1 ranks, and the 2 sources"):
        follower.apply()
    for rank, sink in enumerate(sinks):
        sink.append(record(rank, RecordKind.SNAPSHOT, 2, 50, 1 if rank else 100))
        sink.append(record(rank, RecordKind.DELTA, 2, 51, 2 if rank else 101))
    assert follower.apply() == LogFollower(_bags(), sinks).apply() == 51


def test_snapshots_of_some_ranks_are_an_error(tmp_path: Path) -> None:
    sinks = [DirectorySink(tmp_path / str(rank)) for rank in range(2)]
    follower = LogFollower(_bags(), sinks)
    for rank, sink in enumerate(sinks):
        sink.append(record(rank, RecordKind.SNAPSHOT, 1, 0, 1))
        sink.append(record(rank, RecordKind.COMPACTION, 1, 2 + rank, 2))  # is not applied
        sink.append(record(rank, RecordKind.DELTA, 1, 4, 3))
        assert follower.apply() == (None, 4)[rank]
    assert torch.equal(follower(torch.tensor([3]), torch.tensor([0, 1])), torch.full((1, 4), 4.0))
    for rank, sink in enumerate(sinks):
        sink.append(record(rank, RecordKind.SNAPSHOT, 2, 5 + rank, 4))
        sink.append(record(rank, RecordKind.DELTA, 2, 7, 5))
    with pytest.raises(LogError, match="step 7 is a snapshot in some logs only"):
        follower.apply()
    assert follower.step == 4


def test_tables_of_one_module_that_expire_keys_do_not_warn(tmp_path: Path) -> None:
    """The first table of a boundary raises the step count of the others, which follow at once."""
    specs = [emblib.DynamicSpec(64, 4, name=name, ttl=2) for name in ("item", "user")]
    model, copy = (emblib.DynamicEmbeddingBags(specs, optim.SGD(0.1)) for _ in range(2))
    follower = LogFollower(copy, DirectorySink(tmp_path))
    with ChangeLog(model, DirectorySink(tmp_path)) as log, warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 9):
            model(torch.tensor([step, 0, -step]), torch.tensor([0, 1, 3])).sum().backward()
            if step % 4 == 0:
                log.record(step)
                log.flush()
                assert follower.apply() == step
    assert copy.size("user") == model.size("user")


def test_fallback_rows_of_another_number_are_refused(tmp_path: Path) -> None:
    def bags(fallback_rows: int) -> emblib.DynamicEmbeddingBags:
        spec = emblib.DynamicSpec(64, 4, name="item", fallback_rows=fallback_rows)
        return emblib.DynamicEmbeddingBags([spec], optim.SGD(0.1), seed=0)

    sink = DirectorySink(tmp_path)
    with ChangeLog(bags(8), sink):
        pass
    for model in (bags(4), inference.for_inference(bags(4), "int8"), bags(0)):
        with pytest.raises(LogError, match="fallback rows, and that of the log has another number"):
            LogFollower(model, sink).apply()
