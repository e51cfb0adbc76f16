"""The cost model: constants as data, what they are measured by, reports, larger worlds."""

import dataclasses
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from emblib import BackingStore, EmbeddingBagCollection, HostRows, optim
from emblib.collections.configs import EmbeddingBagConfig
from emblib.sharding.codecs import BF16, INT8, CommPrecision
from emblib.sharding.input_dist import number_bags
from emblib.sharding.planner import (
    Calibration,
    Planner,
    Reservation,
    Scaling,
    TableConstraints,
    TableWorkload,
    Topology,
    measure,
    simulate,
)
from emblib.sharding.planner import calibration as figures
from emblib.sharding.planner.calibration import interpolate
from emblib.sharding.planner.estimate import INPUT, LOOKUP, OUTPUT, UPDATE, CostModel
from emblib.sharding.planner.measure import Sizes, calibrate
from emblib.sharding.planner.report import Prediction
from emblib.sharding.planner.simulate import (
    PlanTiming,
    compare,
    draw_batch,
    format_simulated,
    rank_correlation,
)
from emblib.sharding.planner.workloads import workloads_of
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import ShardingType, data_parallel
from emblib.specs import Placement
from emblib.storage import Dense, Hash, TableSlice, TensorTrain
from tests.sharding import worlds
from tests.sharding.planner_cases import collection, plan_of

QUICK = Sizes(large_bytes=1 << 22, rounds=1)


# Constants


@pytest.mark.parametrize("constants", [figures.CPU, figures.CUDA])
def test_constants_as_json(constants: Calibration, tmp_path: Path) -> None:
    constants.save(tmp_path / "machine.json")
    assert Calibration.load(tmp_path / "machine.json") == constants
    text = constants.to_json()
    with pytest.raises(ValueError, match="version 1, got 2"):
        Calibration.from_json(text.replace('"version": 1', '"version": 2'))
    with pytest.raises(ValueError, match="missing are \\['step_s'\\]"):
        Calibration.from_json(text.replace('"step_s"', '"steps"'))


def test_wrong_constants() -> None:
    for name, value in (
        ("unit_s", -1.0),
        ("unit_s", True),
        ("unit_s", 10**400),
        ("step_s", math.inf),
        ("link_bytes_per_s", 0.0),
    ):
        with pytest.raises(ValueError, match=f"{name} must be a finite number"):
            dataclasses.replace(figures.CPU, **dict[str, Any]({name: value}))
    with pytest.raises(ValueError, match="source must be a text, got None"):
        dataclasses.replace(figures.CPU, source=None)  # type: ignore[arg-type]
    for curve in ((), ((8.0, 1.0), (4.0, 2.0)), ((8.0, -1.0),), ((8.0, True),), (("8", 1.0),)):
        with pytest.raises(ValueError, match="bag must be pairs"):
            dataclasses.replace(figures.CPU, bag=curve)


def test_between_two_points_costs_are_linear() -> None:
    curve = ((10.0, 1.0), (20.0, 3.0), (40.0, 4.0))
    assert [interpolate(curve, x) for x in (0, 10, 15, 20, 30, 40, 80)] == [1, 1, 2, 3, 3.5, 4, 6]
    assert interpolate(((10.0, 5.0),), 100.0) == 5.0


def _calibrate(ranks: RankGroup) -> Calibration:
    failure = MemoryError("no memory") if ranks.rank == 0 else None
    with (
        mock.patch.object(measure, "measure_rank", side_effect=failure, return_value=None),
        pytest.raises((MemoryError, RuntimeError), match="no memory"),
    ):
        calibrate(ranks, QUICK)
    return calibrate(ranks, QUICK)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bag", 5.0),
        ("bag", None),
        ("bag", [[1.0]]),
        ("near_bytes", [[1.0, 2.0]]),
        ("near_bytes", None),
        ("near_bytes", "5"),
    ],
)
def test_a_calibration_has_curves_and_numbers_where_they_belong(name: str, value: Any) -> None:
    text = json.dumps({**json.loads(figures.CPU.to_json()), name: value})
    with pytest.raises(ValueError, match=f"{name} must be"):
        Calibration.from_json(text)


def test_calibration_of_one_rank_and_of_links() -> None:
    alone = calibrate(None, QUICK)
    assert alone.source.startswith("measured on a CPU")
    assert alone.link_bytes_per_s == figures.CPU.link_bytes_per_s
    together = worlds.run(2, _calibrate)
    assert together[0] == together[1]
    for found in (alone, together[0]):
        assert found.step_s > 0
        assert found.tt_ns > 0
        assert found.route_ns > 0
        for curve in (found.lookup_far, found.update_far):
            assert all(0 <= a[1] <= b[1] for a, b in itertools.pairwise(curve))
    assert together[0].exchange_s > 0
    assert together[0].link_bytes_per_s not in (0.0, figures.CPU.link_bytes_per_s)


# What follows from them


def _work(
    rows: int, dim: int, ids: float = 1.0, optimizer: optim.Optimizer | None = None
) -> TableWorkload:
    config = EmbeddingBagConfig(rows, dim, "t")
    return TableWorkload("", config, optimizer or optim.SGD(0.1), False, 100, ids)


def _seconds(work: TableWorkload, topology: Topology, **changes: Any) -> list[float]:
    costs = dataclasses.replace(topology.costs, **changes)
    topology = dataclasses.replace(topology, calibration=costs)
    planner = Planner(topology, 100, reservation=Reservation(share=0.0))
    told = planner.solve_workloads([_only(work, ShardingType.TABLE_WISE)])
    return [max(rank.seconds[phase] for rank in told.ranks) for phase in range(4)]


def _only(work: TableWorkload, *types: ShardingType) -> TableWorkload:
    return dataclasses.replace(work, constraints=TableConstraints(sharding_types=types))


def test_phases_of_a_whole_table_on_one_rank() -> None:
    topology = Topology(4, device="cuda")
    nothing: dict[str, Any] = dict.fromkeys(("unit_s", "route_ns", "arrange_ns"), 0.0)
    one = _seconds(_work(1000, 64, 3.0), topology, link_bytes_per_s=1e9, **nothing)
    # 400 bags of 3 ids, 8 bytes each and 8 for a length; three quarters come from other ranks.
    assert one[INPUT] == pytest.approx((1200 * 8 + 400 * 8) * 0.75 / 1e9)
    # Rows out and gradients back.
    assert one[OUTPUT] == pytest.approx(2 * 400 * 64 * 4 * 0.75 / 1e9)
    near, bag = figures.CUDA.lookup_near, figures.CUDA.bag
    assert one[LOOKUP] == pytest.approx(
        (1200 * interpolate(near, 256) + 400 * interpolate(bag, 256)) * 1e-9
    )
    adam = _seconds(_work(1000, 64, 3.0, optim.Adam(0.1)), topology, **nothing)
    assert adam[UPDATE] > one[UPDATE]
    assert adam[LOOKUP] == one[LOOKUP]


def test_large_tables_cost_more_than_small_ones() -> None:
    topology = Topology(2)
    small, large = (_seconds(_work(rows, 64), topology) for rows in (1000, 10_000_000))
    assert large[LOOKUP] > small[LOOKUP]
    assert large[UPDATE] > small[UPDATE]
    assert large[INPUT] == small[INPUT]


def test_a_topology_refuses_constants_that_are_no_calibration() -> None:
    constants: Any = 3
    with pytest.raises(TypeError, match="calibration must be None or a Calibration"):
        Topology(2, calibration=constants)


def test_a_topology_stores_plain_ints() -> None:
    memory: Any = torch.tensor(8 << 30)
    topology = Topology(2, memory=memory, host_memory=memory, max_ranks_at_once=memory)
    assert topology.of_size(4) == Topology(
        4, 2, memory=8 << 30, host_memory=8 << 30, max_ranks_at_once=8 << 30
    )
    assert type(topology.host_memory) is int


def test_text_is_not_a_flag() -> None:
    with pytest.raises(TypeError, match="is_weighted must be True or False, got 'no'"):
        TableWorkload("", EmbeddingBagConfig(10, 8, "t"), None, "no", 16, 1.0)  # type: ignore[arg-type]


def test_needed_bytes_are_whole_numbers() -> None:
    backing = BackingStore(HostRows(1001))
    config = EmbeddingBagConfig(1000, 8, "t", storage=Hash(backing=backing))
    third = TableSlice(config, (0, 333), (0, 8), (0, 3))
    topology = Topology(3, device="cuda")
    for table_slice in (third, TableSlice.whole(config)):
        workload = TableWorkload("", config, optim.SGD(0.1), False, 16, 1.0, TableConstraints())
        need = CostModel(topology).shard_load(workload, table_slice, 1 / 3).nbytes
        assert all(count == int(count) for count in need), need


def test_ranks_that_share_a_core_wait_for_each_other() -> None:
    works = [dataclasses.replace(_work(1000, 64), path=f"m{m}") for m in range(4)]
    spread = [_only(work, ShardingType.TABLE_WISE) for work in works]

    def phases(processors: int | None) -> dict[str, float]:
        topology = Topology(4, max_ranks_at_once=processors)
        return Planner(topology, 100).solve_workloads(spread).phases

    alone, together = phases(None), phases(1)
    assert together["lookup"] == pytest.approx(4 * alone["lookup"])
    assert together["arrange"] == pytest.approx(4 * alone["arrange"])
    assert together["output"] == pytest.approx(alone["output"])


def test_tables_far_away_cost_more() -> None:
    topology = Topology(1, memory=1 << 34, host_memory=1 << 34, device="cuda")
    steps = {}
    for name, kind in (
        ("device", Dense()),
        ("managed", Dense(Placement.MANAGED)),
        ("cached", Dense(Placement.MANAGED_CACHING)),
        ("tensor_train", TensorTrain((16, 16))),
    ):
        config = EmbeddingBagConfig(1_000_000, 64, "t", storage=kind)
        work = TableWorkload("", config, optim.SGD(0.1), False, 4096, 10.0)
        steps[name] = Planner(topology, 4096).solve_workloads([work]).step_s
    assert steps["device"] < min(steps["managed"], steps["cached"], steps["tensor_train"])


def test_codecs_shorten_the_way() -> None:
    works = [_only(_work(1000, 64), ShardingType.TABLE_WISE)]

    def output(comm_precision: CommPrecision | None) -> float:
        planner = Planner(Topology(2), 100, comm_precision=comm_precision)
        return planner.solve_workloads(works).phases["output"]

    assert output(CommPrecision(BF16(), BF16())) == pytest.approx(output(None) / 2)
    assert output(CommPrecision(INT8(64))) == pytest.approx(
        output(None) * (1 + (64 + 4) / 256) / 2, rel=0.02
    )


def test_weights_are_sent_too() -> None:
    plain = _only(_work(1000, 64), ShardingType.TABLE_WISE)
    weighted = dataclasses.replace(plain, is_weighted=True)
    one, other = (Planner(Topology(2), 100).solve_workloads([work]) for work in (plain, weighted))
    assert other.phases["input"] > one.phases["input"]
    assert other.phases["overhead"] > one.phases["overhead"]


def test_weights_take_memory_in_the_batch_of_a_replica() -> None:
    plain = _work(1000, 64, ids=3.0)
    one, other = (
        CostModel(Topology(1)).replicated_cost(work, TableSlice.whole(work.config)).nbytes
        for work in (plain, dataclasses.replace(plain, is_weighted=True))
    )
    assert other.combining - one.combining == 4 * 3.0 * plain.batch_size  # float32


# Reports


def _planned() -> Prediction:
    works = [
        dataclasses.replace(
            _only(_work(1000 * 10**t, 32, 2.0), ShardingType.TABLE_WISE), path=f"module{t}"
        )
        for t in range(2)
    ]
    return Planner(Topology(2, memory=1 << 30), 100).solve_workloads(works)


def test_a_report_reads_as_tables() -> None:
    lines = str(_planned()).splitlines()
    assert lines[0].startswith("2 tables on 2 ranks (1 node of 2); predicted step ")
    assert lines[2].split() == [
        *("table", "sharding", "ranks", "rows", "dim", "ids/example", "memory", "ms"),
    ]
    name, way, rank, *sizes = lines[4].split()
    assert (name, way, *sizes[:3]) == ("module0.t", "table_wise", "1,000", "32", "2")
    assert rank in ("0", "1")
    assert lines[7].split()[:4] == ["rank", "tables", "memory", "of"]
    assert "921.60 MiB" in lines[9]
    assert any(line.startswith("Phases, ms: input ") for line in lines)
    assert any(line.startswith("Longest: ") for line in lines)
    assert any(line.startswith("Fullest: rank ") for line in lines)
    assert lines[-1] == f"Constants: {figures.CPU.source}."
    assert max(map(len, lines)) < 140


def test_a_report_of_many_tables_shows_the_slowest() -> None:
    works = [
        dataclasses.replace(_only(_work(1000, 8 + 8 * t), ShardingType.TABLE_WISE), path=f"m{t}")
        for t in range(60)
    ]
    text = str(Planner(Topology(32), 100, max_trials=200).solve_workloads(works))
    assert "m59.t" in text
    assert "m0.t " not in text
    assert "... 20 faster ones" in text
    assert "... 16 faster ones" in text


def test_a_plan_that_does_not_fit_says_so() -> None:
    module = collection(2, 10_000, 64, "pooled")
    tight = Planner(Topology(2, memory=1 << 20), 16)
    told = tight.predict(module, plan_of(module, 2, "on_rank_0"))
    assert not told.fits
    assert "does NOT fit" in str(told)


def test_phases_add_up() -> None:
    told = _planned()
    assert told.step_s == pytest.approx(told.compute_s + told.exchange_s + told.phases["overhead"])
    assert set(told.phases) == {"input", "lookup", "output", "update", "arrange", "overhead"}


# Other worlds


def test_weak_and_strong_scaling() -> None:
    module = collection(4, 1000, 32, "pooled")
    planner = Planner(Topology(4, 2), 64, max_trials=500)
    weak = simulate(planner, module, [2, 4, 16])
    assert [(s.world_size, s.batch_size) for s in weak] == [(2, 64), (4, 64), (16, 64)]
    assert weak[1].prediction == planner.solve(module)
    strong = simulate(planner, module, [2, 4, 16], scaling=Scaling.STRONG)
    assert [(s.world_size, s.batch_size) for s in strong] == [(2, 128), (4, 64), (16, 16)]
    with pytest.raises(ValueError, match="must divide the global batch = 256"):
        simulate(planner, module, [6], scaling=Scaling.STRONG)
    planner.constraints = {"t1": TableConstraints(batch_size=24)}
    for scaling, size in ((Scaling.STRONG, 12), (Scaling.WEAK, 24)):
        tables = simulate(planner, module, [8], scaling=scaling)[0].prediction.tables
        assert [t.workload.batch_size for t in tables] == [
            size * 8 // 3,
            size,
            *[size * 8 // 3] * 2,
        ]
    with pytest.raises(ValueError, match="must divide the global batch = 96"):
        simulate(planner, module, [64], scaling=Scaling.STRONG)
    planner.constraints = {}
    rows = simulate(planner, module, [8], sharding=ShardingType.ROW_WISE)[0].prediction
    assert {t.sharding.type for t in rows.tables} == {ShardingType.ROW_WISE}
    lines = format_simulated(weak).splitlines()
    assert lines[0].split()[0] == "ranks"
    assert len(lines) == 5
    assert lines[-1] == "Predicted, not measured."


def test_packing_numbers_the_bags_as_input_dist_does(monkeypatch: pytest.MonkeyPatch) -> None:
    has_ids = torch.tensor([[False, True, True], [True, False, False]])
    assert number_bags(has_ids).tolist() == [[-1, 0, 1], [0, -1, -1]]
    calls: list[torch.Tensor] = []
    monkeypatch.setattr(measure, "number_bags", calls.append)
    monkeypatch.setattr(measure, "time_call", lambda function, device, rounds: function() or 1.0)
    measure.measure_packing(torch.device("cpu"), 1)
    assert len(calls) == 1


# Against measurements


def _compared(
    ranks: RankGroup, kind: str, constraints: dict[str, TableConstraints]
) -> list[PlanTiming]:
    module = collection(3, 500, 16, kind)
    planner = Planner(Topology(2), 32, constraints)
    plans = {way: plan_of(module, 2, way) for way in ("table_wise", "row_wise", "data_parallel")}
    return compare(planner, module, plans, ranks, rounds=2)


def test_a_comparison_refuses_plans_before_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: Any = {"a": {"": {"t0": data_parallel()}}}
    monkeypatch.setattr(
        sys.modules[compare.__module__], "shard", lambda *_: pytest.fail("measured")
    )
    with pytest.raises(TypeError, match="plan must be a ShardingPlan"):
        compare(Planner(Topology(1), 32), collection(1, 50, 4, "pooled"), plans, RankGroup.single())


@pytest.mark.parametrize("kind", ["pooled", "sequences"])
@pytest.mark.parametrize(
    "constraints", [{}, {"t1": TableConstraints(batch_size=7)}], ids=["equal", "unequal batches"]
)
def test_predictions_beside_measurements(
    kind: str, constraints: dict[str, TableConstraints]
) -> None:
    points = worlds.run(2, _compared, kind, constraints)
    assert points[0] == points[1]
    assert [point.name for point in points[0]] == ["table_wise", "row_wise", "data_parallel"]
    for point in points[0]:
        assert len(point.seconds_per_round) == 2
        assert 0 < point.measured_s == min(point.seconds_per_round)
        assert point.predicted_s > 0


def test_ids_of_a_feature_of_several_tables_are_valid_in_all() -> None:
    configs = [
        EmbeddingBagConfig(rows, 4, name, ["seen"])
        for name, rows in (("large", 1000), ("small", 3))
    ]
    works = workloads_of(EmbeddingBagCollection(configs), 64, {})
    assert int(draw_batch(works, seed=0).values().max()) < 3


def test_batches_of_a_collection_may_differ_in_size() -> None:
    constraints = {"t1": TableConstraints(batch_size=7, pooling_factor=3)}
    works = workloads_of(collection(3, 500, 16, "pooled"), 32, constraints)
    batch = draw_batch(works, seed=0)
    assert batch.stride_per_key() == [32, 7, 32]
    assert batch.length_per_key() == [32, 21, 32]
    assert batch.stride() == 32


def test_weights_of_a_batch_are_float32_whatever_the_default_is() -> None:
    works = [dataclasses.replace(_work(1000, 64, ids=3.0), is_weighted=True)]
    torch.set_default_dtype(torch.float64)
    try:
        assert draw_batch(works, seed=0).weights().dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_rank_correlation() -> None:
    def points(*pairs: tuple[float, float]) -> list[PlanTiming]:
        return [PlanTiming("", predicted, (measured,)) for predicted, measured in pairs]

    assert rank_correlation(points((1, 10), (2, 20), (3, 25))) == pytest.approx(1.0)
    assert rank_correlation(points((1, 30), (2, 20), (3, 10))) == pytest.approx(-1.0)
    assert rank_correlation(points((1, 1), (2, 2), (3, 4), (4, 3))) == pytest.approx(0.8)
    assert rank_correlation(points((1, 1), (1, 2), (2, 3))) == pytest.approx(math.sqrt(0.75))


def test_shards_share_the_cache_by_the_floats_of_a_rank() -> None:
    works = [_work(1000, 64)]
    model = CostModel(Topology(2), workloads=works)
    assert model.floats_per_rank == 100 * 64
