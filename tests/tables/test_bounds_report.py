"""Violations of bounds on a GPU: reported by a warning some batches later, without a host wait."""

import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from emblib import (
    BoundsCheck,
    CachedTTEmbeddingBags,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    Placement,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTCache,
    TTSpec,
    optim,
    report_bounds_violations,
    storage,
)
from emblib.tables.bounds_report import CHECKS_PER_COPY

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU or the pretend GPU"),
]
Context = Callable[[], AbstractContextManager[None]]


def make(check: BoundsCheck = BoundsCheck.WARNING) -> TableBatchedEmbeddingBags:
    specs = [TableSpec(10, 4), TableSpec(5, 4)]
    return TableBatchedEmbeddingBags(specs, optim.SGD(0.1), bounds_check=check, device="cuda")


GOOD = ([0, 9, 4], [0, 2, 3])
BAD = ([10, 9, 7], [0, 2, 2])  # two indices, and the last offset


def batch(numbers: tuple[list[int], list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    indices, offsets = numbers
    return torch.tensor(indices, device="cuda"), torch.tensor(offsets, device="cuda")


def messages(step: Callable[[], object], times: int = 1) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(times):
            step()
            torch.cuda.synchronize()
    return [str(w.message) for w in seen if "out of bounds" in str(w.message)]


def test_the_next_lookup_warns_once() -> None:
    module, good, bad = make(), batch(GOOD), batch(BAD)
    assert not messages(lambda: module(*bad))
    (text,) = messages(lambda: module(*good), 3 * CHECKS_PER_COPY)
    assert "2 indices and 1 offsets out of bounds" in text
    assert "in earlier batches" in text


def test_later_violations_are_reported_too() -> None:
    module, good, bad = make(), batch(GOOD), batch(BAD)
    assert not messages(lambda: module(*good), 2)
    assert not messages(lambda: module(*bad), 3)
    (text,) = messages(lambda: module(*good), CHECKS_PER_COPY)
    assert "6 indices and 3 offsets" in text


def test_the_host_does_not_wait(no_host_waits: Context) -> None:
    module, bad = make(), batch(BAD)
    with no_host_waits(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "emblib: ")
        for _ in range(2 * CHECKS_PER_COPY):
            module(*bad).sum().backward()


@pytest.mark.parametrize("quantized", [False, True], ids=["floats", "quantized"])
def test_what_is_left_is_reported_on_request(quantized: bool) -> None:
    module = make()
    tables = QuantizedEmbeddingBags.from_float(module) if quantized else module
    bad = batch(BAD)
    assert not messages(lambda: tables(*bad))
    (text,) = messages(lambda: report_bounds_violations(tables))
    assert "2 indices and 1 offsets" in text
    assert not messages(lambda: report_bounds_violations(tables))


def test_cached_tensor_trains_are_reported() -> None:
    trains = CachedTTEmbeddingBags([TTSpec(10, 4, (2, 2))], TTCache(5), device="cuda")
    bad = batch(([10, 9, 7], [0, 2, 3]))
    assert not messages(lambda: trains(*bad))
    (text,) = messages(lambda: report_bounds_violations(trains))
    assert "1 indices and 0 offsets" in text


def test_tables_of_a_model_are_reported() -> None:
    tables = [
        EmbeddingBagConfig(10, 4, "plain"),
        EmbeddingBagConfig(10, 4, "hashed", storage=storage.Hashed(4)),
    ]
    collection = EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1), device="cuda")
    model = torch.nn.Sequential(collection)
    ids, lengths = torch.tensor([1, 10, 11, 12]), torch.tensor([2, 2])
    features = KeyedJaggedTensor(["plain", "hashed"], ids, lengths=lengths).to("cuda")
    assert not messages(lambda: model(features))
    texts = messages(lambda: report_bounds_violations(model))
    assert sorted(text.split()[1] for text in texts) == ["1", "2"]


def test_reading_the_step_reports() -> None:
    module, bad = make(), batch(BAD)
    assert not messages(lambda: module(*bad))
    (text,) = messages(lambda: module.step)
    assert "2 indices" in text


def test_a_copy_counts_for_itself() -> None:
    module, bad = make(), batch(BAD)
    assert not messages(lambda: module(*bad))
    other = copy.deepcopy(module)
    module.bounds_violations.zero_()
    assert not messages(lambda: report_bounds_violations(module))
    (text,) = messages(lambda: report_bounds_violations(other))
    assert "2 indices" in text


def test_replays_of_a_graph_are_reported() -> None:
    module, (indices, offsets) = make(), batch(GOOD)
    module(indices, offsets)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        module(indices, offsets)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module(indices, offsets)
    indices.fill_(10)
    graph.replay()
    graph.replay()
    (text,) = messages(lambda: report_bounds_violations(module))
    assert "6 indices and 0 offsets" in text


def test_other_modes_report_nothing() -> None:
    module, bad = make(BoundsCheck.IGNORE), batch(BAD)
    assert not messages(lambda: module(*bad), 2)
    assert not messages(lambda: report_bounds_violations(module))


def test_a_prefetched_batch_counts_once() -> None:
    """Prefetches run on streams of their own, while the lookup of another batch counts."""
    spec = TableSpec(10, 4, placement=Placement.MANAGED_CACHING)
    module = TableBatchedEmbeddingBags([spec], optim.SGD(0.1), device="cuda")
    bad = torch.tensor([10, 9], device="cuda"), torch.tensor([0, 1, 2], device="cuda")
    module.prefetch(*bad)
    module(*bad)
    assert module.bounds_violations.tolist() == [1, 0]
