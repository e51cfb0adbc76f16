"""Change logs: what is logged, what is refused, and a sink that fails or is slow."""

import contextlib
import copy
import errno
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import emblib
from emblib import inference, optim
from emblib.collections.optimizers.fused import FusedOptimizer
from emblib.online import ChangeLog, ChangeLogError, DirectorySink, LogFollower
from emblib.online.records import Record, decode
from emblib.online.sinks import StoredRecord
from emblib.storage import Hash, Hashed, TensorTrain
from tests.interrupts import each_line, entries_of_conditions
from tests.thread_cases import in_fork


class Memory:
    """A sink in memory, which fails or waits where a test asks for it."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.error: Exception | None = None
        self.trim_error: Exception | None = None
        self.may_write = threading.Event()
        self.may_write.set()

    def append(self, record: bytes, *, starts_segment: bool = False) -> str:
        self.may_write.wait()
        if self.error is not None:
            raise self.error
        self.records.append(record)
        return str(len(self.records))

    def read(self, after: str | None = None) -> Iterator[StoredRecord]:
        for at, data in enumerate(list(self.records)[int(after or 0) :], int(after or 0) + 1):
            yield StoredRecord(str(at), data, f"record {at}")

    def trim(self, before: str) -> None:
        error, self.trim_error = self.trim_error, None
        if error is not None:
            raise error

    def close(self) -> None:
        pass

    def decoded(self) -> list[Record]:
        return [decode(stored.data, stored.location) for stored in self.read()]


def bags(optimizer: optim.Optimizer | None = None) -> emblib.TableBatchedEmbeddingBags:
    return emblib.TableBatchedEmbeddingBags([emblib.TableSpec(30, 4, "item")], optimizer)


def train(model: Any, *ids: int) -> None:
    model(torch.tensor(ids), torch.tensor([0, len(ids)])).sum().backward()


def follows(sink: Any, trained: Any, log: ChangeLog) -> bool:
    log.flush()
    follower = LogFollower(inference.for_inference(bags()), sink)
    follower.apply()
    ids, offsets = torch.arange(30), torch.arange(31)
    return torch.equal(follower(ids, offsets), trained(ids, offsets))


def test_an_entry_has_the_rows_that_were_looked_up() -> None:
    trained, sink = bags(optim.SGD(0.1)), Memory()
    log = ChangeLog(trained, sink, states=True)
    train(trained, 3, 9, 3, -1)
    train(trained, 4)
    with torch.no_grad():
        trained(torch.tensor([7]), torch.tensor([0, 1]))
    log.record(2)
    log.record(5)
    log.close()
    whole, first, second = sink.decoded()
    assert whole.tables["item"][0].keys.tolist() == list(range(30))
    assert (first.step, first.tables["item"][0].keys.tolist()) == (2, [3, 4, 9])
    assert (second.step, second.tables["item"][0].keys.tolist()) == (5, [])
    train(trained, 5)  # nothing is noted any more


@pytest.mark.filterwarnings("ignore:emblib. 1 indices")
def test_an_entry_has_row_0_which_an_invalid_id_trains() -> None:
    trained, sink = bags(optim.SGD(0.1)), Memory()
    log = ChangeLog(trained, sink)
    train(trained, 3, 99, -1)
    log.record(1)
    assert follows(sink, trained, log)


def test_calls_take_no_lock_that_ctrl_c_could_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, sink = bags(optim.SGD(0.1)), Memory()
    log = ChangeLog(trained, sink)
    threads = entries_of_conditions(monkeypatch)
    for step in range(1, 4):
        train(trained, step)
        log.record(step)
    log.flush()
    log.close()
    assert threading.get_ident() not in threads


def test_deferred_updates_are_logged_once_they_are_made() -> None:
    tables = [emblib.EmbeddingBagConfig(30, 4, "item", ["f"])]
    collection = emblib.EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1, deferred=True))
    stepper = FusedOptimizer.of(collection)
    sink = Memory()
    log = ChangeLog(collection, sink)
    for step in range(1, 6):
        ids = torch.tensor([step, 2 * step])
        batch = emblib.KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([2]))
        collection(batch).values().sum().backward()
        if step % 2 == 0:
            stepper.step()
            stepper.zero_grad()
        log.record(step)
    log.close()
    ids = [record.tables["item"][0].keys.tolist() for record in sink.decoded()[1:]]
    assert {1, 2, 4} <= set(ids[1]), "rows of step 1 were updated in step 2"
    assert {3, 6, 4, 8} <= set(ids[3])
    assert ids[4] == [5, 10]


def test_states_and_hyperparameters_make_a_second_trainer(tmp_path: Path) -> None:
    specs = [emblib.DynamicSpec(200, 4, name="item")]
    trained = emblib.DynamicEmbeddingBags(specs, optim.Adam(0.1), seed=1)
    other = emblib.DynamicEmbeddingBags(specs, optim.Adam(0.1), seed=1)
    log = ChangeLog(trained, DirectorySink(tmp_path), states=True)
    follower = LogFollower(other, DirectorySink(tmp_path))
    for step in range(1, 8):
        train(trained, step, 2 * step, 3 * step)
        log.record(step)
    log.close()
    assert follower.apply() == 7
    for model in (trained, other):
        train(model, 3, 50)
    ours, theirs = trained.state_dict(), other.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_replaced_tables_need_a_snapshot() -> None:
    trained, sink = bags(optim.Adam(0.1)), Memory()
    log = ChangeLog(trained, sink)
    saved = copy.deepcopy(trained.state_dict())
    train(trained, 3, 4)
    log.record(1)
    trained.load_state_dict(saved)
    with pytest.raises(RuntimeError, match=r"made -1 steps .* call snapshot"):
        log.record(2)
    log.snapshot(0)
    assert follows(sink, trained, log)
    train(trained, 5)
    log.record(1)
    assert follows(sink, trained, log)
    keyed = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(64, 4, name="item")], optim.SGD(0.1))
    log = ChangeLog(keyed, Memory())
    train(keyed, 3)
    log.record(1)
    keyed.load_state_dict(keyed.state_dict())
    with pytest.raises(RuntimeError, match="content of table 'item' was replaced"):
        log.record(2)
    log.snapshot(2)
    assert log.record(3)


def test_a_restarted_trainer_goes_on(tmp_path: Path) -> None:
    trained = bags(optim.SGD(0.1))
    follower = LogFollower(inference.for_inference(bags()), DirectorySink(tmp_path))
    log = ChangeLog(trained, DirectorySink(tmp_path), step=4)
    saved = copy.deepcopy(trained.state_dict())
    for step in (5, 6):
        train(trained, step)
        log.record(step)
    log.close()
    assert follower.apply() == 6
    trained.load_state_dict(saved)
    log = ChangeLog(trained, DirectorySink(tmp_path), step=4)
    train(trained, 20)
    log.record(5)
    log.close()
    assert follower.apply() == 5
    ids, offsets = torch.arange(30), torch.arange(31)
    assert torch.equal(follower(ids, offsets), trained(ids, offsets))
    with pytest.raises(ValueError, match="which a snapshot must follow"):
        ChangeLog(trained, DirectorySink(tmp_path), compact_every=None)


def test_an_error_of_the_sink_is_raised_and_nothing_is_lost() -> None:
    trained, sink = bags(optim.SGD(0.1)), Memory()
    log = ChangeLog(trained, sink, max_pending=2)
    log.flush()
    sink.error = OSError(errno.ENOSPC, "No space left on device")
    train(trained, 1)
    assert log.record(1)
    for _ in range(2):
        with pytest.raises(ChangeLogError, match=r"No space left.*keeps 1 entries.*mend the cause"):
            log.flush()
    train(trained, 2)
    sink.error = None
    with contextlib.suppress(ChangeLogError):  # of a try before there was room
        log.flush()
    log.record(9)
    log.flush()
    assert [record.step for record in sink.decoded()] == [0, 1, 9]
    assert follows(sink, trained, log)
    log.close()


def test_a_rank_that_compacted_late_compacts_with_the_others_again() -> None:
    trained, sink = bags(optim.SGD(0.1)), Memory()
    with ChangeLog(trained, sink, compact_every=5) as log:
        for step in (1, 4, 6, 9, 10, 12):  # `record(5)` raised, as the disk was full
            log.record(step)
    assert [record.step for record in sink.decoded() if record.is_whole] == [0, 6, 10]


def test_a_record_that_was_written_twice_is_applied_once() -> None:
    trained, sink = bags(optim.SGD(0.1)), Memory()
    log = ChangeLog(trained, sink, compact_every=1)
    sink.trim_error = OSError("not now")
    train(trained, 1)
    log.record(1)
    with pytest.raises(ChangeLogError, match="not now"):
        log.flush()
    train(trained, 2)
    log.record(2)
    assert follows(sink, trained, log)
    assert [record.sequence for record in sink.decoded()] == [1, 2, 3, 3, 4, 5]
    log.close()


def test_a_slow_sink_blocks_or_merges() -> None:
    for policy in ("block", "merge"):
        trained, sink = bags(optim.SGD(0.1)), Memory()
        log = ChangeLog(trained, sink, max_pending=2, when_full=policy)
        log.flush()
        sink.may_write.clear()
        timer = threading.Timer(0.05, sink.may_write.set) if policy == "block" else None
        if timer is not None:
            timer.start()
        recorded = []
        for step in range(1, 7):
            train(trained, step)
            recorded.append(log.record(step))
        assert recorded == [True] * 6 if timer else [True, True, False, False, False, False]
        sink.may_write.set()
        log.flush()
        train(trained, 7)
        log.record(7)
        assert follows(sink, trained, log)
        log.close()


def test_what_is_refused() -> None:
    ensemble = optim.EnsembleRowwiseAdagrad(0.1)
    for optimizer in (None, optim.External(), ensemble):
        with pytest.raises(ValueError, match=r"table 'item', .*use a fused optimizer"):
            ChangeLog(bags(optimizer), Memory())
    dynamic = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(64, 4, name="item")])
    with pytest.raises(ValueError, match="use a fused optimizer"):
        ChangeLog(dynamic, Memory())
    tracked = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(64, 4)], optim.SGD(0.1))
    tracked.track_evictions()
    with pytest.raises(ValueError, match="make the change log before"):
        ChangeLog(tracked, Memory())
    train_of = emblib.TTEmbeddingBag(emblib.TTSpec(30, 8, (4,)))
    with pytest.raises(TypeError, match=r"tensor trains.*freeze\(\) them"):
        ChangeLog(train_of, Memory())
    for storage in (TensorTrain(ranks=(4,)), Hashed(rows=5)):
        tables = [emblib.EmbeddingBagConfig(100, 8, "item", ["f"], storage=storage)]
        with pytest.raises(TypeError, match="change as a whole"):
            ChangeLog(emblib.EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1)), Memory())
    with pytest.raises(TypeError, match="no tables of emblib"):
        ChangeLog(nn.Linear(2, 2), Memory())
    with pytest.raises(TypeError, match="quantised"):
        ChangeLog(inference.for_inference(bags(), "int8"), Memory())
    log = ChangeLog(bags(optim.SGD(0.1)), Memory(), step=3)
    with pytest.raises(ValueError, match=r"step must be .*4"):
        log.record(3)


def test_tables_of_one_name_are_refused_though_one_has_keys() -> None:
    keyed = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(64, 4, name="item")], optim.SGD(0.1))
    model = nn.ModuleList([bags(optim.SGD(0.1)), keyed])
    with pytest.raises(ValueError, match=r"there are several \['item'\]: rename them"):
        ChangeLog(model, Memory())


def test_a_refused_log_tracks_no_evictions() -> None:
    keyed = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(64, 4)], optim.SGD(0.1))
    with pytest.raises(ValueError, match="max_pending must be >= 1"):
        ChangeLog(keyed, Memory(), max_pending=0)
    assert keyed.state.eviction_log is None


def test_a_log_that_could_not_begin_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, threads = bags(optim.SGD(0.1)), set(threading.enumerate())
    monkeypatch.setattr(trained, "flush", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        ChangeLog(trained, Memory())
    assert set(threading.enumerate()) <= threads
    assert not trained._forward_hooks


def test_a_sink_that_could_not_be_closed_is_closed_again() -> None:
    class Failing(Memory):
        num_calls = 0

        def close(self) -> None:
            self.num_calls += 1
            if self.num_calls == 1:
                raise OSError(errno.EIO, "Input/output error")

    sink = Failing()
    log = ChangeLog(bags(optim.SGD(0.1)), sink)
    with pytest.raises(OSError, match="Input/output"):
        log.close()
    for _ in range(2):
        log.close()
    assert sink.num_calls == 2


def test_a_closed_log_tracks_no_evictions() -> None:
    keyed = emblib.DynamicEmbeddingBags([emblib.DynamicSpec(64, 4)], optim.SGD(0.1))
    logs = [ChangeLog(keyed, Memory()) for _ in range(2)]
    record = keyed.state.eviction_log
    logs[0].close()
    logs[0].close()
    assert keyed.state.eviction_log is record
    logs[1].close()
    assert keyed.state.eviction_log is None
    with ChangeLog(keyed, Memory()):
        record = keyed.track_evictions()  # the program goes on to read it
    assert keyed.state.eviction_log is record


def test_a_snapshot_that_failed_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks whose snapshots have other numbers would have no boundary in common any more."""
    trained, sink = bags(optim.SGD(0.1)), Memory()
    log = ChangeLog(trained, sink)
    with monkeypatch.context() as patch:
        patch.setattr(trained, "flush", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            log.snapshot(1)
    log.snapshot(1)
    assert follows(sink, trained, log)
    assert [record.generation for record in sink.decoded()] == [1, 2]
    log.close()


def test_a_log_belongs_to_the_process_that_made_it(tmp_path: Path) -> None:
    trained = bags(optim.SGD(0.1))
    log = ChangeLog(trained, DirectorySink(tmp_path))
    log.flush()

    def use_in_child() -> None:
        for use in (lambda: log.record(1), log.flush, lambda: log.snapshot(1)):
            with pytest.raises(RuntimeError, match="belongs to the process that made it"):
                use()
        with pytest.raises(BlockingIOError, match="another log writes"):
            log._writer._sink.append(b"")
        log.close()
        log._writer._sink.close()

    assert in_fork(use_in_child) == ""
    with pytest.raises(BlockingIOError, match="another log writes"):
        DirectorySink(tmp_path).append(b"")
    train(trained, 2)
    log.record(1)
    assert follows(DirectorySink(tmp_path), trained, log)
    log.close()


def test_a_log_that_ended_takes_no_entries() -> None:
    trained, sink = bags(optim.SGD(0.1)), Memory()
    with pytest.raises(ValueError, match="max_pending"):
        ChangeLog(trained, sink, max_pending=0)
    assert not trained._forward_hooks
    log = ChangeLog(trained, sink)
    log.close()
    log.close()
    assert not trained._forward_hooks
    for call in (log.record, log.snapshot):
        with pytest.raises(RuntimeError, match="is closed"):
            call(1)


def test_forwards_that_raised_are_not_noted() -> None:
    trained, sink = bags(optim.SGD(0.1)), Memory()
    log = ChangeLog(trained, sink)
    ids, no_bags = torch.tensor([1, 2]), torch.empty(0, dtype=torch.int64)
    for wrong in ((ids, no_bags), (ids.float(), torch.tensor([0, 2])), ()):
        with pytest.raises((RuntimeError, TypeError)):
            trained(*wrong)
    train(trained, 3)
    log.record(1)
    log.close()
    assert sink.decoded()[-1].tables["item"][0].keys.tolist() == [3]


def test_copies_of_a_logged_model_are_not_logged() -> None:
    trained, sink = bags(optim.SGD(0.1)), Memory()
    log = ChangeLog(trained, sink)
    for other in (copy.deepcopy(trained), pickle.loads(pickle.dumps(trained))):
        train(other, 3)
    log.record(1)
    log.close()
    assert sink.decoded()[-1].tables["item"][0].keys.tolist() == []


def test_collections_with_several_kinds_and_shared_tables(tmp_path: Path) -> None:
    shared = emblib.SharedTables([emblib.EmbeddingConfig(40, 4, "item")], optimizer=optim.SGD(0.1))
    tables = [
        shared.pooled("item", ["a"]),
        emblib.EmbeddingBagConfig(64, 4, "user", ["b"], storage=Hash()),
        emblib.EmbeddingBagConfig(30, 8, "place", ["b", "c"]),
    ]

    def make() -> Any:
        pooled = emblib.EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1), shared=shared)
        history = shared.unpooled("item", ["h"])
        return nn.ModuleList([pooled, emblib.EmbeddingCollection([history], shared=shared)])

    trained = make()
    shared = copy.deepcopy(shared)
    served = make()
    with ChangeLog(trained, DirectorySink(tmp_path)) as log:
        for step in range(1, 5):
            ids = torch.tensor([step, 5 + step, step, 7])
            batch = emblib.KeyedJaggedTensor(["a", "b", "c"], ids, lengths=torch.tensor([1, 2, 1]))
            history = emblib.KeyedJaggedTensor(["h"], ids * 4 % 40, lengths=torch.tensor([4]))
            loss = trained[0](batch).values().sum() + trained[1](history)["h"].values().sum()
            loss.backward()
            log.record(step)
    follower = LogFollower(served, DirectorySink(tmp_path))
    assert follower.apply() == 4
    ours, theirs = trained.state_dict(), served.state_dict()
    weights = [key for key in ours if key.endswith("weight")]
    assert len(weights) == 3
    assert all(torch.equal(ours[key], theirs[key]) for key in weights)


def test_an_interrupted_record_leaves_a_log_that_goes_on() -> None:
    trained, sink = bags(optim.SGD(0.1)), Memory()
    with ChangeLog(trained, sink) as log:
        for step, attempt in enumerate(each_line()):
            train(trained, step % 30)
            with attempt:
                log.record(2 * step + 1)
            train(trained, (step + 7) % 30)
            log.record(2 * step + 2)
        assert follows(sink, trained, log)
    assert [r.sequence for r in sink.decoded()] == [*range(1, len(sink.records) + 1)]
