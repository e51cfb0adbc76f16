"""FBGEMM's interface as a module: checkpoints, copies, reports."""

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from emblib.compat import fbgemm
from emblib.compat.fbgemm import (
    EmbeddingLocation,
    OptimType,
)
from tests.compat.small import CACHED, HOST, INDICES, OFFSETS, make, step


def test_checkpoints_fit_any_placement() -> None:
    options = {"optimizer": OptimType.ADAM, "table_names": ["a", "b"]}
    module = make(**options)
    step(module)
    other = make(CACHED, **options)
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(step(other), step(module))
    assert {"bags.a.weight", "bags.b.exp_avg_sq"} <= set(module.state_dict())


@pytest.mark.parametrize("location", [HOST, CACHED])
def test_copies_are_independent(location: EmbeddingLocation) -> None:
    module = make(location, gather_uvm_cache_stats=True)
    step(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        before = [w.clone() for w in module.split_embedding_weights()]
        step(other)
        after = module.split_embedding_weights()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert not torch.equal(other.split_embedding_weights()[0], after[0])


class Reporter(fbgemm.TBEStatsReporter):
    """Records what is reported, at every second step from the first on."""

    def __init__(self) -> None:
        self.events: dict[str, list[tuple[int, float]]] = {}
        self.names: set[tuple[str, str]] = set()

    def should_report(self, iteration_step: int) -> bool:
        return iteration_step % 2 == 1

    def report_duration(
        self, iteration_step: int, event_name: str, duration_ms: float, *names: str, **more: Any
    ) -> None:
        self.events.setdefault(event_name, []).append((iteration_step, duration_ms))
        self.names.add(names)

    def report_data_amount(
        self, iteration_step: int, event_name: str, data_bytes: int, *names: str, **more: Any
    ) -> None:
        self.events.setdefault(event_name, []).append((iteration_step, data_bytes))
        self.names.add(names)


@dataclass(frozen=True)
class ReporterConfig(fbgemm.TBEStatsReporterConfig):
    """Makes a Reporter."""

    def create_reporter(self) -> Reporter:
        return Reporter()


@pytest.mark.parametrize("gather", [False, True])
def test_the_reporter_is_told_what_fbgemm_tells(gather: bool) -> None:
    module = make(
        CACHED,
        stats_reporter_config=ReporterConfig(),
        gather_uvm_cache_stats=gather,
        table_names=["a", "b"],
    )
    module.prefetch(INDICES, OFFSETS)
    for _ in range(4):
        output = module(INDICES, OFFSETS)
        module.prefetch(INDICES, OFFSETS)
        output.sum().backward()
    module(INDICES, OFFSETS)
    events = module.stats_reporter.events
    assert events["tbe.fwd_input_size"] == [(1, 104), (3, 104), (5, 104)]
    assert events["tbe.fwd_input_count"] == [(1, 13), (3, 13), (5, 13)]
    assert events["tbe.fwd_output_size"] == [(1, 192), (3, 192), (5, 192)]
    assert events["tbe.prefetch_input_count"] == [(1, 13), (3, 13)]
    assert [step for step, _ in events["total_prefetch_duration"]] == [1, 3]
    assert [step for step, _ in events["tbe.total_uvm_usage"]] == [1, 3, 5]
    rows = "tbe.prefetch.cache_stats_by_data_size.num_unique_indices"
    # Bytes of 8 rows of 8 floats: two batches until step 1, then one a step.
    assert events.get(rows) == ([(1, 2 * 8 * 32), (3, 8 * 32)] if gather else None)
    assert module.stats_reporter.names == {("<2 tables>: ['a', 'b']", module.uuid)}
    assert pickle.loads(pickle.dumps(module)).stats_reporter.events == events


def test_prefetch_refuses_the_stream_of_forward_at_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, stream = make(CACHED), object()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    for _ in range(2):
        with pytest.raises(ValueError, match="different streams"):
            module.prefetch(INDICES, OFFSETS, forward_stream=stream)
    assert module.prefetch_stream is None


def test_reporters_are_made_by_their_config(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(AssertionError, match="interval"):
        make(stats_reporter_config=fbgemm.TBEStatsReporterConfig(interval=1))
    assert make(stats_reporter_config=fbgemm.TBEStatsReporterConfig()).stats_reporter is None
    module = make(stats_reporter_config=fbgemm.StdLogStatsReporterConfig(interval=1))
    with caplog.at_level("INFO"):
        step(module)
    assert "tbe.fwd_output_count: 48" in caplog.text
    assert make(stats_reporter_config=fbgemm.StdLogStatsReporterConfig()).stats_reporter is None


def test_the_logging_reporter_takes_all_arguments_by_position(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reporter = fbgemm.StdLogStatsReporter(1)
    with caplog.at_level("INFO"):
        reporter.report_duration(0, "load", 2.0, "t", "m", "s", True)
        reporter.report_data_amount(0, "size", 3, "t", "m", True)
    assert [record.getMessage() for record in caplog.records] == [
        "step 0, TBE m, table t: load: 2.0 s",
        "step 0, TBE m, table t: size: 3",
    ]


def test_it_compiles_into_one_graph() -> None:
    module, eager = (make(optimizer=OptimType.ADAM, learning_rate=0.1) for _ in range(2))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for rate in (0.1, 0.2, 0.3):
        for each in (module, eager):
            each.set_learning_rate(rate)
        outputs = [each(INDICES, OFFSETS) for each in (compiled, eager)]
        torch.testing.assert_close(*outputs)
        for output in outputs:
            output.sum().backward()
    torch.testing.assert_close(module.bags.weights, eager.bags.weights)


def test_index_types() -> None:
    module = make(embedding_table_index_type=torch.int32, embedding_table_offset_type=torch.int32)
    torch.testing.assert_close(step(module), step(make()))
    assert torch.equal(module(INDICES.int(), OFFSETS), module(INDICES, OFFSETS.int()))


def test_outputs_of_two_modules_in_one_tensor() -> None:
    """Two modules write their parts of a variable batch into one tensor, and both learn."""
    place = (EmbeddingLocation.HOST, fbgemm.ComputeDevice.CPU)

    def modules() -> list[fbgemm.SplitTableBatchedEmbeddingBagsCodegen]:
        made = []
        for number, specs in enumerate(([(9, 4, *place), (9, 8, *place)], [(9, 4, *place)])):
            module = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(specs, learning_rate=0.1)
            generator = torch.Generator().manual_seed(number)
            for table in module.split_embedding_weights():
                table.copy_(torch.rand(table.shape, generator=generator))
            made.append(module)
        return made

    batches = [
        (torch.tensor([1, 2, 3, 3, 8]), torch.tensor([0, 2, 3, 4, 5]), [[1, 1], [0, 2]]),
        (torch.tensor([5, 5]), torch.tensor([0, 1, 1, 2]), [[2, 1]]),
    ]
    apart, joint = modules(), modules()
    whole = [
        module(ids, offsets, batch_size_per_feature_per_rank=sizes)
        for module, (ids, offsets, sizes) in zip(apart, batches, strict=True)
    ]
    # Rank by rank, the features of the first module before that of the second.
    expected = torch.cat([whole[0][:4], whole[1][:8], whole[0][4:], whole[1][8:]])
    starts = [torch.tensor([[0, 4], [12, 16]]), torch.tensor([[4], [32]])]
    found = torch.full((expected.numel(),), torch.nan)
    for module, (ids, offsets, sizes), begin in zip(joint, batches, starts, strict=True):
        found = module(
            ids,
            offsets,
            batch_size_per_feature_per_rank=sizes,
            vbe_output=found,
            vbe_output_offsets=begin,
        )
    assert torch.equal(found, expected)
    factors = torch.rand(expected.numel())
    (expected * factors).sum().backward()
    (found * factors).sum().backward()
    for first, second in zip(apart, joint, strict=True):
        tables = zip(first.split_embedding_weights(), second.split_embedding_weights(), strict=True)
        assert all(torch.equal(one, other) for one, other in tables)
    with pytest.raises(ValueError, match="go together"):
        joint[1](*batches[1][:2], vbe_output=found)
    ids, offsets, sizes = batches[0]
    output = {"batch_size_per_feature_per_rank": sizes, "vbe_output": found.detach()}
    for wrong in (torch.tensor([0]), torch.tensor([0, 4, 12, 16])):
        with pytest.raises(ValueError, match=r"must be \[ranks, F\] = \[2, 2\]"):
            joint[0](ids, offsets, **output, vbe_output_offsets=wrong)
