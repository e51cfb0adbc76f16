"""The recorder: what every kind of embedding looks up, as a file that reads back the same."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import emblib
from emblib.compat import fbgemm
from emblib.compat.fbgemm_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from emblib.inference import InferenceEmbeddingBags, RowIndex
from emblib.tables.bounds_report import with_padding
from emblib.trace.recorder import distinct_names
from tests.compat.peer import peer_module


def recorded(module: nn.Module, *args: object, **kwargs: object) -> emblib.LookupTrace:
    with emblib.TraceRecorder(module) as recorder:
        module(*args, **kwargs)
    return recorder.trace


def bags(trace: emblib.LookupTrace, feature: int = 0) -> list[list[int]]:
    lengths = trace.lengths[feature].tolist()
    return [part.tolist() for part in trace.ids[feature].split(lengths)]


def test_an_embedding_bag_with_offsets() -> None:
    bag = nn.EmbeddingBag(300, 4, mode="sum")
    trace = recorded(bag, torch.tensor([5, 6, 299, 7]), torch.tensor([0, 1, 1]))
    assert bags(trace) == [[5], [], [6, 299, 7]]
    assert trace.features == (emblib.TracedFeature("EmbeddingBag", "EmbeddingBag", 300, 4),)


def test_an_embedding_bag_with_the_last_offset_by_keyword_and_without_padding() -> None:
    bag = nn.EmbeddingBag(30, 4, mode="sum", include_last_offset=True, padding_idx=0)
    trace = recorded(bag, torch.tensor([5, 0, 9]), offsets=torch.tensor([0, 2, 3]))
    assert bags(trace) == [[5], [9]]


def test_two_dimensions_are_a_bag_per_row() -> None:
    ids = torch.tensor([[1, 2], [3, 3]])
    assert bags(recorded(nn.EmbeddingBag(9, 4), ids)) == [[1, 2], [3, 3]]
    assert bags(recorded(nn.Embedding(9, 4), ids)) == [[1, 2], [3, 3]]
    assert bags(recorded(nn.Embedding(9, 4), ids.flatten())) == [[1], [2], [3], [3]]


def test_batched_tables_feature_by_feature() -> None:
    tables = [emblib.TableSpec(10, 4), emblib.TableSpec(20, 4, name="users")]
    module = emblib.TableBatchedEmbeddingBags(
        tables, emblib.optim.SGD(0.1), feature_tables=[1, 0, 1]
    )
    ids, offsets = torch.tensor([1, 2, -1, 4, 5, 6]), torch.tensor([0, 2, 2, 3, 4, 5, 6])
    trace = recorded(module, ids, offsets)
    assert [bags(trace, f) for f in range(3)] == [[[1, 2], []], [[], [4]], [[5], [6]]]
    assert [f.rows for f in trace.features] == [20, 10, 20]
    assert trace.features[0].table == trace.features[2].table != trace.features[1].table


def test_batches_of_different_size() -> None:
    tables = [emblib.TableSpec(10, 4), emblib.TableSpec(20, 4)]
    module = emblib.TableBatchedEmbeddingBags(tables, emblib.optim.SGD(0.1))
    offsets = torch.arange(6)
    trace = recorded(module, torch.arange(5), offsets, batch_sizes=[[1, 1], [3, 0]])
    assert [bags(trace, f) for f in range(2)] == [[[0], [1]], [[2], [3], [4]]]


def test_a_tensor_train() -> None:
    spec = emblib.TTSpec(100, 8, (2, 2), name="items")
    module = emblib.TTEmbeddingBag(spec, emblib.optim.SGD(0.1))
    trace = recorded(module, torch.tensor([7, 8, 99]), torch.tensor([0, 1, 3]))
    assert bags(trace) == [[7], [8, 99]]
    assert trace.features[0].rows == 100


def test_fbgemm_by_our_adaptor() -> None:
    module = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
        [(50, 4, fbgemm.EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU)]
    )
    trace = recorded(module, torch.tensor([49, 1]), torch.tensor([0, 1, 2]))
    assert bags(trace) == [[49], [1]]
    assert trace.features[0].rows == 50


@pytest.mark.parametrize("include_last_offset", [True, False])
def test_every_module_of_tables(include_last_offset: bool) -> None:
    """The ids of the caller, not the rows of a cache or of a pruned table."""
    last: dict[str, bool] = {"include_last_offset": include_last_offset}
    sgd, spec = emblib.optim.SGD(0.1), emblib.TableSpec(50, 4)
    trains = [emblib.TTSpec(50, 8, (2, 2))]
    quantised = emblib.QuantizedEmbeddingBags([spec], formats=[emblib.RowFormat.INT8])
    cached = emblib.CachedTTEmbeddingBags(trains, emblib.TTCache(4), sgd, **last)
    cached(torch.tensor([7, 7, 8]), torch.tensor([0, 1, 3][: 2 + include_last_offset]))
    cached.populate()
    modules: list[nn.Module] = [
        emblib.TableBatchedEmbeddingBags([spec], sgd, **last),
        emblib.TableBatchedTTEmbeddingBags(trains, sgd, **last),
        emblib.TTEmbeddingBag(trains[0], sgd, **last),
        emblib.QuantizedEmbeddingBags([spec], formats=[emblib.RowFormat.INT8], **last),
        cached,
    ]
    if include_last_offset:
        index = RowIndex.of_mask(torch.arange(60) >= 10)
        modules += [
            emblib.DynamicEmbeddingBags([emblib.DynamicSpec(64, 4)], sgd),
            InferenceEmbeddingBags(quantised, [index]),
        ]
        modules += composed_tables()
    for module in modules:
        offsets = torch.tensor([0, 1, 3] if include_last_offset else [0, 1])
        trace = recorded(module, torch.tensor([7, 8, 49]), offsets)
        assert bags(trace) == [[7], [8, 49]], type(module)
        assert len(trace.features) == 1


def composed_tables() -> list[nn.Module]:
    """Return a served table of 50 ids that share rows."""
    storage = emblib.storage.QuotientRemainder(10)
    config = emblib.EmbeddingBagConfig(50, 4, "item", storage=storage)
    served: Any = emblib.inference.for_inference(emblib.EmbeddingBagCollection([config]))
    return list(served.parts)


def test_padding_before_the_first_bag_is_not_recorded() -> None:
    trains, sgd = [emblib.TTSpec(50, 8, (2, 2))], emblib.optim.SGD(0.1)
    cached = emblib.CachedTTEmbeddingBags(trains, emblib.TTCache(4), sgd)
    batch = torch.tensor([-1, 8, 49]), torch.tensor([1, 2, 3])
    for module in (
        emblib.TableBatchedEmbeddingBags([emblib.TableSpec(50, 4)], sgd),
        emblib.TTEmbeddingBag(trains[0], sgd),
    ):
        assert bags(recorded(module, *batch)) == [[8], [49]], type(module)
    for other in (cached, emblib.DynamicEmbeddingBags([emblib.DynamicSpec(64, 4)], sgd)):
        assert bags(with_padding(recorded)(other, *batch)) == [[8], [49]], type(other)
    assert bags(recorded(cached, torch.tensor([[7, 8], [9, 1]]))) == [[7, 8], [9, 1]]


def test_fbgemm_for_inference() -> None:
    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("items", 50, 4, fbgemm.SparseType.INT8, fbgemm.EmbeddingLocation.HOST)], device="cpu"
    )
    module.fill_random_weights()
    trace = recorded(module, torch.tensor([49, 1]), torch.tensor([0, 1, 2]))
    assert bags(trace) == [[49], [1]]
    assert (trace.features[0].rows, trace.features[0].dim) == (50, 4)


class LikeFbgemm(nn.Module):
    """Its attributes and arguments, nothing else."""

    embedding_specs = ((50, 4, "HOST", "CPU"), (60, 4, "HOST", "CPU"))
    feature_table_map = (0, 1, 1)

    def forward(self, indices: Tensor, offsets: Tensor) -> None: ...


def test_fbgemm_by_its_attributes() -> None:
    trace = recorded(LikeFbgemm(), torch.arange(6), torch.arange(7))
    assert [bags(trace, f) for f in range(3)] == [[[0], [1]], [[2], [3]], [[4], [5]]]
    assert [f.rows for f in trace.features] == [50, 60, 60]


@dataclass
class Keyed:
    """A stand-in for a KeyedJaggedTensor."""

    names: list[str]
    ids: Tensor
    counts: Tensor

    def keys(self) -> list[str]:
        return self.names

    def values(self) -> Tensor:
        return self.ids

    def lengths(self) -> Tensor:
        return self.counts


@dataclass
class Table:
    """A stand-in for a table's configuration."""

    name: str
    feature_names: list[str]
    num_embeddings: int
    embedding_dim: int


class Collection(nn.Module):
    """A collection with configurations and, as the real one, bags inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.EmbeddingBag(70, 4, mode="sum")

    def embedding_bag_configs(self) -> list[Table]:
        return [Table("t_ads", ["ad", "seen"], 70, 4)]

    def forward(self, features: Keyed) -> None:
        self.inside(features.values(), torch.zeros(1, dtype=torch.int64))


class Dense(nn.Module):
    """Nothing to know it by but its argument."""

    def forward(self, features: object) -> None: ...


def test_names_of_modules_are_distinct() -> None:
    assert distinct_names(["x", "y", "x"]) == ["x-0", "y", "x-2"]
    assert distinct_names(["a", "a", "a-0"]) == ["a-1", "a-2", "a-0"]


KEYED = Keyed(["ad", "seen"], torch.tensor([69, 1, 2]), torch.tensor([1, 0, 0, 2]))


def test_a_collection_is_recorded_once_by_its_features() -> None:
    trace = recorded(Collection(), KEYED)
    assert [f.name for f in trace.features] == ["Collection.ad", "Collection.seen"]
    assert {f.table for f in trace.features} == {"Collection.t_ads"}
    assert [f.rows for f in trace.features] == [70, 70]
    assert [bags(trace, f) for f in range(2)] == [[[69], []], [[], [1, 2]]]


def test_a_feature_is_recorded_for_each_table_that_reads_it_and_for_no_other() -> None:
    tables = [
        emblib.EmbeddingBagConfig(10, 4, "a", ["seen"]),
        emblib.EmbeddingBagConfig(20, 8, "b", ["seen", "ad"]),
    ]
    batch = emblib.KeyedJaggedTensor(
        ["ad", "seen", "unread"], torch.tensor([5, 6, 7]), lengths=torch.tensor([1, 1, 1])
    )
    trace = recorded(emblib.EmbeddingBagCollection(tables), batch)
    found = [(f.name.partition(".")[2], f.table.partition(".")[2], f.rows) for f in trace.features]
    assert found == [("ad", "b", 20), ("seen@a", "a", 10), ("seen@b", "b", 20)]
    assert [bags(trace, f) for f in range(3)] == [[[5]], [[6]], [[6]]]
    plan = emblib.plan_memory(tables, 1 << 20, trace=trace)
    assert not any("No lookups are known" in text for text in plan.assumptions)


def test_modules_without_tables_look_nothing_up() -> None:
    module = emblib.TableBatchedEmbeddingBags([], emblib.optim.SGD(0.1))
    batch = (torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    with emblib.TraceRecorder(module, emblib.EmbeddingBagCollection([])) as recorder:
        module(*batch)
    with pytest.raises(ValueError, match="nothing was recorded"):
        _ = recorder.trace


def test_anything_that_is_called_with_keyed_features() -> None:
    trace = recorded(Dense(), features=KEYED)
    assert [f.rows for f in trace.features] == [0, 0]
    assert bags(trace, 1) == [[], [1, 2]]
    with (
        pytest.raises(TypeError, match="must be called with a KeyedJaggedTensor"),
        emblib.TraceRecorder(module := Dense()),
    ):
        module(torch.arange(3))


def test_torchrec() -> None:
    torchrec = peer_module("torchrec.modules.embedding_modules")
    sparse = peer_module("torchrec.sparse.jagged_tensor")
    configs = peer_module("torchrec.modules.embedding_configs")
    config = configs.EmbeddingBagConfig(
        name="t", embedding_dim=4, num_embeddings=80, feature_names=["ad", "seen"]
    )
    module = torchrec.EmbeddingBagCollection(tables=[config])
    features = sparse.KeyedJaggedTensor(["ad", "seen"], KEYED.ids, lengths=KEYED.counts)
    trace = recorded(module, features)
    assert [bags(trace, f) for f in range(2)] == [[[69], []], [[], [1, 2]]]
    assert [f.rows for f in trace.features] == [80, 80]


class Model(nn.Module):
    """Two embeddings under names of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(1000, 4)
        self.item = nn.Embedding(100_000, 4)

    def forward(self, step: int) -> None:
        self.user(torch.tensor([[step, 999]]))
        self.item(torch.tensor([step, 70_000]))


def test_a_model_call_by_call_until_the_limit() -> None:
    model = Model()
    with emblib.TraceRecorder(model, calls=2) as recorder:
        for step in range(5):
            model(step)
    model(77)  # outside the block nothing is recorded
    trace = recorder.trace
    assert [f.name for f in trace.features] == ["user", "item"]
    assert bags(trace, 0) == [[0, 999], [1, 999]]
    assert bags(trace, 1) == [[0], [70_000], [1], [70_000]]
    assert not model.user._forward_pre_hooks


def test_a_module_that_is_named_twice_is_recorded_once() -> None:
    model, collection = Model(), Collection()
    with emblib.TraceRecorder(model, model.user, model, collection, collection.inside) as recorder:
        model(1)
        collection(KEYED)
    names = [feature.name for feature in recorder.trace.features]
    assert names == ["user", "item", "Collection.ad", "Collection.seen"]
    assert bags(recorder.trace) == [[1, 999]]


def test_copies_of_a_recorded_model_record_nothing() -> None:
    model = Model()
    with emblib.TraceRecorder(model) as recorder:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        model(1)
        for other in copies:
            other(2)
    assert bags(recorder.trace) == [[1, 999]]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_no_hook_stays_where_one_module_takes_none() -> None:
    model, scripted = Model(), torch.jit.script(nn.EmbeddingBag(9, 4))
    with pytest.raises(RuntimeError, match="not supported"), emblib.TraceRecorder(model, scripted):
        pass
    assert not model.user._forward_pre_hooks


def test_offsets_that_do_not_fit_are_taken_as_the_modules_take_them() -> None:
    bag = nn.EmbeddingBag(9, 4, mode="sum", include_last_offset=True)
    ignore = emblib.BoundsCheck.IGNORE  # another mode raises: the last bag would be lost
    tables = emblib.TableBatchedEmbeddingBags(
        [emblib.TableSpec(9, 4)], emblib.optim.SGD(0.1), bounds_check=ignore
    )
    train = emblib.TTEmbeddingBag(
        emblib.TTSpec(100, 8, (2, 2)), emblib.optim.SGD(0.1), bounds_check=ignore
    )
    wanted = {bag: [[1], [2]], tables: [[1], [2, 3]], train: [[1], [2, 3]]}
    for module, want in wanted.items():
        with emblib.TraceRecorder(module) as recorder, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(2):
                module(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2]))
        assert bags(recorder.trace) == want * 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_a_bag_per_row() -> None:
    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    for layout in (torch.jagged, torch.strided):
        ids = torch.nested.nested_tensor(rows, layout=layout)
        if layout is torch.jagged:
            assert bags(recorded(nn.Embedding(9, 4), ids)) == [[1, 2], [3]]
        with emblib.TraceRecorder(bag := nn.EmbeddingBag(9, 4)) as recorder:
            next(iter(bag._forward_pre_hooks.values()))(bag, (ids,), {})
        assert bags(recorder.trace) == [[1, 2], [3]]


def test_hooks_go_when_the_model_fails() -> None:
    model = Model()
    with pytest.raises(RuntimeError), emblib.TraceRecorder(model):
        model(1_000_000)
    assert not model.user._forward_pre_hooks
    assert not model.item._forward_pre_hooks


def test_hooks_go_when_their_removal_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    model, interrupts = Model(), [KeyboardInterrupt()]
    remove = RemovableHandle.remove

    def interrupted_remove(handle: RemovableHandle) -> None:
        if interrupts:
            raise interrupts.pop()
        remove(handle)

    recorder = emblib.TraceRecorder(model)
    monkeypatch.setattr(RemovableHandle, "remove", interrupted_remove)
    with pytest.raises(KeyboardInterrupt), recorder:
        pass
    assert not model.user._forward_pre_hooks
    assert not model.item._forward_pre_hooks
    with recorder:  # it can be entered again
        pass


def test_a_padded_batch_of_a_captured_step_is_recorded_without_padding() -> None:
    tables = [emblib.EmbeddingBagConfig(10, 4, name) for name in ("user", "item")]
    collection = emblib.EmbeddingBagCollection(tables)
    step = emblib.CapturedStep(lambda batch: collection(batch).values(), [8], device="cpu")
    ids, lengths = torch.tensor([1, 2, 3]), torch.tensor([1, 0, 0, 2])
    with emblib.TraceRecorder(collection) as recorder:
        step(emblib.KeyedJaggedTensor(["user", "item"], ids, lengths=lengths))
    assert bags(recorder.trace) == [[1], []]
    assert bags(recorder.trace, 1) == [[], [2, 3]]


def test_equal_modules_are_told_apart() -> None:
    first, second = nn.EmbeddingBag(9, 4), nn.EmbeddingBag(9, 4)
    with emblib.TraceRecorder(first, second) as recorder:
        second(torch.tensor([[3]]))
        first(torch.tensor([[4]]))
    names = {f.name: bags(recorder.trace, i) for i, f in enumerate(recorder.trace.features)}
    assert names == {"EmbeddingBag-0": [[4]], "EmbeddingBag-1": [[3]]}


@pytest.mark.parametrize("largest", [255, 32_767, 2**31 - 1, 2**40])
def test_a_file_reads_back_the_same(largest: int, tmp_path: Path) -> None:
    bag = nn.EmbeddingBag(3, 4, include_last_offset=True)
    with emblib.TraceRecorder(bag) as recorder:
        hook = next(iter(bag._forward_pre_hooks.values()))
        hook(bag, (torch.tensor([0, largest, 1]), torch.tensor([0, 2, 3])), {})
    checksum = recorder.save(tmp_path / "a.pt")
    other = recorder.save(tmp_path / "another-name.pt")
    trace = emblib.LookupTrace.load(tmp_path / "a.pt")
    assert checksum == other == emblib.trace.sha256(tmp_path / "a.pt")
    assert len(checksum) == 64
    assert bags(trace) == [[0, largest], [1]]
    assert torch.iinfo(trace.ids[0].dtype).max >= largest
    assert trace.features == recorder.trace.features


def test_equal_lengths_take_no_room(tmp_path: Path) -> None:
    embedding = nn.Embedding(9, 4)
    with emblib.TraceRecorder(embedding) as recorder:
        embedding(torch.zeros(50_000, 1, dtype=torch.int64))
    recorder.save(tmp_path / "a.pt")
    assert (tmp_path / "a.pt").stat().st_size < 55_000  # a byte per id
    assert len(emblib.LookupTrace.load(tmp_path / "a.pt").lengths[0]) == 50_000


def test_a_part_of_a_trace_is_saved_alone(tmp_path: Path) -> None:
    ids, lengths = torch.arange(100_000), torch.arange(100_000) % 3
    features = (emblib.TracedFeature("seen", "item"),)
    part = emblib.LookupTrace(features, (ids[:4],), (lengths[1:5],))
    copied = emblib.LookupTrace(features, (ids[:4].clone(),), (lengths[1:5].clone(),))
    assert part.save(tmp_path / "a.pt") == copied.save(tmp_path / "b.pt")
    assert bags(emblib.LookupTrace.load(tmp_path / "a.pt")) == [[0], [1, 2], [], [3]]


def test_what_cannot_be_recorded_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one model"):
        emblib.TraceRecorder()
    with pytest.raises(ValueError, match="calls must be >= 0"):
        emblib.TraceRecorder(Model(), calls=-1)
    with pytest.raises(TypeError, match="calls must be an int"):
        emblib.TraceRecorder(Model(), calls=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one by one"):
        emblib.TraceRecorder([Model()])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing was recorded"):
        _ = emblib.TraceRecorder(Model()).trace
    with (
        pytest.raises(RuntimeError, match="once at a time"),
        emblib.TraceRecorder(Model()) as recorder,
        recorder,
    ):
        pass


def test_files_that_are_no_traces_say_so(tmp_path: Path) -> None:
    (tmp_path / "text.pt").write_text("no")
    torch.save({"format": "other"}, tmp_path / "other.pt")
    torch.save({"format": "emblib.trace", "version": 99}, tmp_path / "new.pt")
    with pytest.raises(IsADirectoryError):
        emblib.LookupTrace.load(tmp_path)
    for name, message in (("text", "not a trace"), ("other", "not a trace"), ("new", "version 99")):
        with pytest.raises(ValueError, match=message):
            emblib.LookupTrace.load(tmp_path / f"{name}.pt")
    with pytest.raises(FileNotFoundError):
        emblib.LookupTrace.load(tmp_path / "missing.pt")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("ids", []),
        ("ids", [torch.rand(3)]),
        ("ids", 5),
        ("lengths", [torch.tensor([7])]),
        ("features", [{"unknown": 1}]),
        ("samples", None),
        ("lengths", [torch.tensor([-1, 4])]),
        ("lengths", [torch.tensor([[1, 2]])]),
    ],
)
def test_damaged_traces_say_so(part: str, value: object, tmp_path: Path) -> None:
    recorder = emblib.TraceRecorder(bag := nn.EmbeddingBag(9, 4))
    with recorder:
        bag(torch.tensor([[1, 2, 3]]))
    recorder.save(tmp_path / "a.pt")
    content = torch.load(tmp_path / "a.pt")
    torch.save(content | {part: value}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match="is damaged"):
        emblib.LookupTrace.load(tmp_path / "b.pt")
