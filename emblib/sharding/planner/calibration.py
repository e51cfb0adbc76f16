"""What things cost on a machine: the constants of the cost model, as data that can be kept.

`docs/planner.md` says how the model uses them, `measure.calibrate` measures them. Curves are pairs
of (bytes, nanoseconds), ascending; between two of them costs are linear.
"""

import bisect
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from emblib.tables.durable_files import load_json, save_json

Curve = tuple[tuple[float, float], ...]

_VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """The constants, for one rank of one kind of machine. Times are for float32 outputs.

    Args:
        source: where the figures come from, as a report tells it.
        lookup_near: ns to add one row to its bag, by bytes of the row, where the table is in cache.
        lookup_far: the same where it is far larger.
        update_near: ns that backward takes for one id, by bytes of the row and its optimizer state.
        update_far: the same for a large table.
        bag: ns to begin and write one pooled row, by its bytes.
        bag_gradient: ns to read the gradient of one pooled row, by its bytes.
        near_bytes: size up to which a table is in cache.
        unit_s: seconds for each part of a table that a rank looks up, forward and backward.
        route_ns: ns for an id to be sorted by destination.
        arrange_ns: ns for a byte of pooled rows to be put in its place, on the way out or back.
        hash_ns: ns for a key of a dynamic table to be found, beside what a plain row costs.
        tt_ns: ns for a multiply-add of making a tensor-train row.
        host_bytes_per_s: what a GPU reads of host memory.
        disk_bytes_per_s: what a cache before DISK tables reads.
        link_bytes_per_s: what a rank sends to the ranks of its node, all of them sending.
        network_bytes_per_s: what a rank sends to other nodes.
        exchange_s: seconds of an all-to-all of nothing between two ranks.
        message_s: more of them for every further rank.
        copies_s: more seconds of a step with tables that are replicated.
        blocks_s: more seconds of a step with tables that are cut by rows.
        step_s: seconds of a step that looks up nothing: Python, dispatch, autograd.
    """

    source: str
    lookup_near: Curve
    lookup_far: Curve
    update_near: Curve
    update_far: Curve
    bag: Curve
    bag_gradient: Curve
    near_bytes: float
    unit_s: float
    route_ns: float
    arrange_ns: float
    hash_ns: float
    tt_ns: float
    host_bytes_per_s: float
    disk_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    exchange_s: float
    message_s: float
    copies_s: float
    blocks_s: float
    step_s: float

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name == "source":
                continue
            if isinstance(value, int | float):
                least = 1.0 if f.name.endswith("bytes_per_s") else 0.0
                if not least <= value < math.inf:
                    raise ValueError(f"{f.name} must be a finite number >= {least}, got {value!r}")
                object.__setattr__(self, f.name, float(value))
            else:
                object.__setattr__(self, f.name, _checked_curve(f.name, value))

    def to_json(self) -> str:
        """The constants as text."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Calibration":
        """What `to_json` told.

        Raises:
            ValueError: no such text, or constants that are missing or unknown.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != _VERSION:
            found = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"a calibration must be of version {_VERSION}, got {found!r}")
        return cls._of({k: v for k, v in data.items() if k != "version"})

    @classmethod
    def _of(cls, values: Mapping[str, Any]) -> "Calibration":
        names = {f.name for f in fields(cls)}
        if names != values.keys():
            raise ValueError(
                f"a calibration has the constants {sorted(names)}; missing are "
                f"{sorted(names - values.keys())}, unknown {sorted(values.keys() - names)}: "
                "calibrate anew"
            )
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write it as JSON, all of it or nothing, with a checksum."""
        save_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read what `save` wrote.

        Raises:
            ValueError: it is damaged, or something else.
        """
        return cls.from_json(load_json(path))


def at(curve: Curve, nbytes: float) -> float:
    """Nanoseconds at this many bytes; beyond the ends as at the first, and as the last slope."""
    first, last = curve[0], curve[-1]
    if nbytes <= first[0] or len(curve) == 1:
        return first[1]
    high = bisect.bisect_left(curve, (nbytes, -math.inf), hi=len(curve) - 1)
    (x0, y0), (x1, y1) = (curve[high - 1], curve[high]) if nbytes < last[0] else curve[-2:]
    return max(y0 + (y1 - y0) * (nbytes - x0) / (x1 - x0), 0.0)


def _checked_curve(name: str, points: Any) -> Curve:
    curve = tuple((float(x), float(y)) for x, y in points)
    ascending = all(a[0] < b[0] for a, b in itertools.pairwise(curve))
    if not curve or not ascending or not all(0 <= v < math.inf for point in curve for v in point):
        raise ValueError(
            f"{name} must be pairs of (bytes, ns), bytes ascending and none below 0, got {points!r}"
        )
    return curve


def _streamed(bytes_per_s: float, *, times: float) -> Curve:
    """Rows that are limited by memory alone: whole sectors of 32 bytes, `times` each."""
    return tuple((float(n), times * n / bytes_per_s * 1e9) for n in (32, 4096))


_HBM, _L2 = 3.35e12, 5.5e12

CUDA = Calibration(
    source="data sheet of an H100 SXM5, not measured",
    lookup_near=_streamed(_L2, times=1),
    lookup_far=_streamed(_HBM, times=1),
    # Read and write of the row and its state, and the gradient of its bag.
    update_near=_streamed(_L2, times=3),
    update_far=_streamed(_HBM, times=3),
    bag=_streamed(_HBM, times=1),
    bag_gradient=_streamed(_HBM, times=1),
    near_bytes=50e6,
    unit_s=1e-6,
    route_ns=0.05,
    arrange_ns=3 / 3350,
    hash_ns=0.1,
    tt_ns=2e-5,
    host_bytes_per_s=64e9,
    disk_bytes_per_s=3e9,
    link_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
    exchange_s=20e-6,
    message_s=1e-6,
    copies_s=300e-6,
    blocks_s=100e-6,
    step_s=300e-6,
)

CPU = Calibration(
    source="two cores of an AMD EPYC, measured",
    lookup_near=((32.0, 1.6), (512.0, 3.9)),
    lookup_far=((32.0, 16.0), (512.0, 50.0)),
    update_near=((32.0, 15.0), (1536.0, 16.0)),
    update_far=((32.0, 42.0), (1536.0, 300.0)),
    bag=((32.0, 7.0), (512.0, 8.0)),
    bag_gradient=((32.0, 20.0), (512.0, 25.0)),
    near_bytes=11e6,
    unit_s=1e-6,
    route_ns=8.0,
    arrange_ns=0.03,
    hash_ns=31.0,
    tt_ns=0.045,
    host_bytes_per_s=10e9,
    disk_bytes_per_s=1e9,
    link_bytes_per_s=6e9,
    network_bytes_per_s=1e9,
    exchange_s=250e-6,
    message_s=250e-6,
    copies_s=600e-6,
    blocks_s=0.0,
    step_s=200e-6,
)
