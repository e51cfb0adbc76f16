"""The report of a calibration: the constants of the cost model, by world size.

A record's "calibration" has the fields of `emblib.sharding.planner.Calibration`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.report import text
from experiments.report.charts import Curve, Scale, curves
from experiments.report.data import Run
from experiments.report.style import COLOURS, WIDTH, Figure, Panel
from experiments.report.tables import Column, Table, TitledTable, Value, time_value

ROW_BYTES = 256  # length of the row whose costs are stated: D = 64 in float32
# Constants of rows, [[bytes, nanoseconds], ...]: their descriptions and names of their colours.
CURVES = {
    "lookup_near": ("a lookup, table in cache", "tbe"),
    "lookup_far": ("a lookup, large table", "tt"),
    "update_near": ("an update, table in cache", "torch"),
    "update_far": ("an update, large table", "cached_lru"),
    "bag": ("a bag", "sky"),
    "bag_gradient": ("a bag's gradient", "reference_tt"),
}
# Constants in seconds.
SECONDS = {
    "step_s": "a step that looks up nothing",
    "unit_s": "one more shard of a table, forward and backward",
    "exchange_s": "an empty all-to-all between two ranks",
    "message_s": "one more rank in the all-to-all",
}
# Constants in nanoseconds.
NANOSECONDS = {
    "route_ns": "an id, sorted by destination",
    "arrange_ns": "a byte of pooled rows, copied to its position",
    "pack_ns": "a bag and block of rows, to find empty bags",
    "uneven_ns": "a bag of a lookup whose features differ in their bags, in addition",
    "hash_ns": "a key of a dynamic table, in addition to a plain row",
    "tt_ns": "a multiply-add of a tensor-train row",
}
# Constants in bytes per second.
LINKS = {
    "link_bytes_per_s": "between ranks of a node, all sending",
    "network_bytes_per_s": "between nodes, all sending; on one host this is its own memory",
}
EXCHANGE_CONSTANTS = ("exchange_s", "message_s", *LINKS)  # constants of exchanges between ranks
NOTES = (
    "Constants of the planner's cost model (docs/planner.md). If every rank has a core, all ranks "
    "compute and send at once while they are measured, because they share the memory. If ranks "
    "share cores, one rank alone measures what it computes. Each constant is the minimum over "
    "several rounds, which excludes other load on the machine.",
    "calibration.json has the constants of the largest measured world; "
    "emblib.sharding.planner.Calibration.load reads it. The bandwidth of links that a world does "
    "not have is not measured and keeps its default, and so do the exchanges of a single rank.",
)


def calibrations(run: Run) -> dict[int, Mapping[str, Any]]:
    """Return the constants of each world: {world size: {field of `Calibration`: value}}."""
    ok_records = [
        record for record in run.records if record["status"] == "ok" and "calibration" in record
    ]
    return {int(record["world_size"]): record["calibration"] for record in ok_records}


def write_files(run: Run) -> Mapping[str, str]:
    """Return calibration.json, which `emblib.sharding.planner.Calibration` loads."""
    by_world = calibrations(run)
    if not by_world:
        return {}
    return {"calibration.json": json.dumps(by_world[max(by_world)], indent=1) + "\n"}


def interpolate(curve: Sequence[Sequence[float]], nbytes: float) -> float:
    """Return the nanoseconds for `nbytes`, interpolated linearly between points (bytes, ns).

    Outside the range of the points it is the value of the nearest one. Points must ascend in bytes.
    """
    sizes, costs_ns = zip(*curve, strict=True)
    return float(np.interp(nbytes, sizes, costs_ns))


def answer(run: Run) -> list[str]:
    """State the costs of a lookup, an update and, with several ranks, of an all-to-all."""
    by_world = calibrations(run)
    if not by_world:
        return ["No answer: the constants could not be measured."]
    max_world = max(by_world)
    costs = by_world[max_world]
    lookup_near_s, lookup_far_s, update_near_s, update_far_s = (
        interpolate(costs[name], ROW_BYTES) * 1e-9
        for name in ("lookup_near", "lookup_far", "update_near", "update_far")
    )
    sentences = [
        f"On this machine a row of 64 floats costs {text.seconds(lookup_near_s)} to look up where "
        f"its table is in cache and {text.seconds(lookup_far_s)} where it is far larger, "
        f"{text.seconds(update_near_s)} and {text.seconds(update_far_s)} to update."
    ]
    if max_world > 1:
        link_kind = "link" if _is_measured(run, max_world, "link_bytes_per_s") else "network"
        rate = costs[f"{link_kind}_bytes_per_s"] / 1e9
        sentences.append(
            f"In a world of {max_world} an empty all-to-all costs "
            f"{text.seconds(costs['exchange_s'])} for each other rank, and each sends "
            f"{text.digits(rate)} GB/s."
        )
    return sentences


def tables(run: Run) -> Sequence[TitledTable]:
    """Return one table: a row per constant, a column per world size."""
    by_world = calibrations(run)
    if not by_world:
        return []
    columns: dict[str, Column] = {
        "what": lambda row: str(row[1]),
        "constant": lambda row: str(row[0]),
    }
    for world in sorted(by_world):
        columns[text.count(world, "rank")] = functools.partial(_cost, run, by_world[world], world)
    curve_entries = [
        (name, f"{title}, row of {ROW_BYTES} bytes") for name, (title, _) in CURVES.items()
    ]
    entries = [*curve_entries, *NANOSECONDS.items(), *SECONDS.items(), *LINKS.items()]
    rows = [row for row in entries if row[0] in by_world[max(by_world)]]  # earlier runs have fewer
    note = f"Constants: {by_world[max(by_world)]['source']}."
    return [TitledTable("Constants of the cost model", note, Table.of(rows, columns))]


def _cost(run: Run, costs: Mapping[str, Any], world: int, row: tuple[str, str]) -> Value:
    """Return the constant of a row (name, description) in the column of one world size."""
    name, _ = row
    if not _is_measured(run, world, name):
        return Value("not measured")
    if name in LINKS:
        return Value.of(costs[name], lambda rate: f"{text.digits(rate / 1e9)} GB/s")
    if name in CURVES:
        return time_value(interpolate(costs[name], ROW_BYTES) * 1e-9)
    return time_value(costs[name] * (1e-9 if name in NANOSECONDS else 1.0))


def _is_measured(run: Run, world: int, name: str) -> bool:
    """Return whether ranks of that world size measured a constant; otherwise it is a default."""
    if name not in EXCHANGE_CONSTANTS:
        return True
    nodes = next(
        (
            record["nodes"]
            for record in run.records
            if record["world_size"] == world and "nodes" in record
        ),
        1,
    )
    if name == "network_bytes_per_s":
        return bool(nodes > 1)
    return bool(world > nodes if name == "link_bytes_per_s" else world > 1)


def figures(run: Run) -> list[Figure]:
    """Return the figure of a row's cost by its bytes, in the largest world."""
    by_world = calibrations(run)
    if not by_world:
        return []
    costs = by_world[max(by_world)]
    lines = []
    for name, (title, colour) in CURVES.items():
        sizes, costs_ns = zip(*costs[name], strict=True)
        lines.append(Curve(sizes, costs_ns, COLOURS[colour], title, "o"))
    ticks = sorted({size for name in CURVES for size, _ in costs[name]})
    drawing = curves(lines, Scale("bytes per row", log=2, ticks=ticks), Scale("ns", low=0))
    return [
        Figure(
            "costs_of_rows",
            "Cost of a row by its length",
            "The bytes of an updated row include the optimizer's state. Lower is better.",
            str(costs["source"]),
            [Panel("Time by bytes per row", drawing, 1.6 * WIDTH)],
        )
    ]
