"""The constants of the cost model for one kind of machine, which can be saved and loaded.

`docs/planner.md` describes how the model uses them, `measure.calibrate` measures them. A curve has
points (bytes, nanoseconds), ascending in bytes, between which it is interpolated linearly.

There are two defaults. `CPU` was measured by `calibrate` and rounded: on two virtual cores of an
AMD EPYC with 32 MiB of L3 cache, between two processes that shared memory. It has round figures for
network and disk. `CUDA` was not measured. It has data-sheet figures of an NVIDIA H100 SXM5
(3,350 GB/s of memory, 450 GB/s of NVLink and 64 GB/s of PCIe 5 in each direction, 400 Gbit/s of
network per GPU), and round figures for launches and latencies.
"""

import bisect
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from emblib.optim.base import number_or_nan
from emblib.tables.durable_files import load_json, save_json

Curve = tuple[tuple[float, float], ...]

_VERSION = 1


@dataclass(frozen=True)
class Calibration:
    """Constants of the cost model for one rank of one kind of machine, for float32 outputs.

    Args:
        source: origin of the figures, shown in reports.
        lookup_near: ns to add one row to its bag, by bytes per row, if the table is in cache.
        lookup_far: the same for a table much larger than the cache.
        update_near: ns of backward to update the row of one id, by bytes of the row and its
            optimizer state.
        update_far: the same for a table much larger than the cache.
        bag: ns to initialise and write one pooled row, by its bytes.
        bag_gradient: ns to read the gradient of one pooled row, by its bytes.
        near_bytes: size up to which a table is in cache.
        unit_s: seconds per feature of a shard that a rank looks up, forward and backward together.
        route_ns: ns to sort one id (or 8 bytes of lengths or weights) by destination.
        arrange_ns: ns per byte read or written to reorder rows; a copied byte counts twice.
        pack_ns: ns per bag and block of rows to find the bags without ids for the block. If there
            are many such bags, they are not sent.
        uneven_ns: additional ns per bag, forward and backward, of a lookup whose features differ in
            their number of bags. They differ if bags without ids are not sent.
        hash_ns: ns to find one key of a dynamic table, in addition to the cost of a dense row.
        tt_ns: ns per multiply-add of computing a tensor-train row.
        host_bytes_per_s: rate at which a GPU reads host memory.
        disk_bytes_per_s: rate at which the cache of a DISK table reads.
        link_bytes_per_s: rate at which a rank sends within its node while all ranks send.
        network_bytes_per_s: rate at which a rank sends to other nodes.
        exchange_s: seconds of an empty all-to-all between two ranks.
        message_s: additional seconds of an empty all-to-all for each rank above two.
        copies_s: additional seconds of a step if any table is replicated.
        blocks_s: additional seconds of a step if any table is cut by rows.
        step_s: seconds of a step that looks up nothing: Python, dispatch, autograd.

    Raises:
        ValueError: `source` is not a text; a constant is not a number, is negative or not finite,
            or is a rate below 1 byte per second; a curve has no points, or they are not pairs of
            finite numbers >= 0 that ascend in bytes.
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
    pack_ns: float
    uneven_ns: float
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
        if not isinstance(self.source, str):
            raise ValueError(f"source must be a text, got {self.source!r}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is Curve:
                object.__setattr__(self, field.name, _as_curve(field.name, value))
            elif field.type is float:
                minimum = 1.0 if field.name.endswith("bytes_per_s") else 0.0
                number = number_or_nan(value)
                if not minimum <= number < math.inf:
                    raise ValueError(
                        f"{field.name} must be a finite number >= {minimum}, got {value!r}"
                    )
                object.__setattr__(self, field.name, number)

    def to_json(self) -> str:
        """Return the constants as JSON."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Calibration":
        """Return the calibration that `to_json` wrote.

        Raises:
            ValueError: the text is not the JSON of `to_json`, or has another version; a constant is
                missing or unknown, or the class refuses its value.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != _VERSION:
            version = data.get("version") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"a calibration must be of version {_VERSION}, got {version!r}")
        return cls._from_values({name: value for name, value in data.items() if name != "version"})

    @classmethod
    def _from_values(cls, values: Mapping[str, Any]) -> "Calibration":
        """Return a calibration; raise ValueError unless `values` has exactly its constants."""
        names = {field.name for field in fields(cls)}
        if names != values.keys():
            raise ValueError(
                f"a calibration has the constants {sorted(names)}; missing are "
                f"{sorted(names - values.keys())}, unknown {sorted(values.keys() - names)}: "
                "calibrate again"
            )
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the constants as JSON with a checksum, atomically.

        Raises:
            OSError: the file could not be written, see `durable_files.saving`.
        """
        save_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Return the calibration in a file that `save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is damaged, or not a calibration of this version.
        """
        return cls.from_json(load_json(path))


def interpolate(curve: Curve, nbytes: float) -> float:
    """Return the nanoseconds of a curve at a size in bytes, interpolated linearly.

    Before the first point the result is the value of that point. After the last point the curve
    continues with its last slope, but never below 0. A curve of one point is constant.
    """
    first_point, last_point = curve[0], curve[-1]
    if nbytes <= first_point[0] or len(curve) == 1:
        return first_point[1]
    right_end = bisect.bisect_left(curve, (nbytes, -math.inf), hi=len(curve) - 1)
    left, right = (curve[right_end - 1], curve[right_end]) if nbytes < last_point[0] else curve[-2:]
    ns_per_byte = (right[1] - left[1]) / (right[0] - left[0])
    return max(left[1] + ns_per_byte * (nbytes - left[0]), 0.0)


def _as_curve(name: str, points: Any) -> Curve:
    """Return points as a curve; raise ValueError, with `name`, if they are not a curve."""
    try:
        curve = tuple((number_or_nan(nbytes), number_or_nan(ns)) for nbytes, ns in points)
    except (TypeError, ValueError):
        curve = ()
    is_ascending = all(point[0] < next_point[0] for point, next_point in itertools.pairwise(curve))
    if (
        not curve
        or not is_ascending
        or not all(0 <= number < math.inf for point in curve for number in point)
    ):
        raise ValueError(
            f"{name} must be pairs of (bytes, ns), bytes ascending and none below 0, got {points!r}"
        )
    return curve


def _bandwidth_curve(bytes_per_s: float, *, num_moves: float) -> Curve:
    """Return the curve of rows of which each byte is moved `num_moves` times at this rate.

    The curve begins at 32 bytes, one sector of GPU memory: a smaller row costs as much.
    """
    return tuple((float(nbytes), num_moves * nbytes / bytes_per_s * 1e9) for nbytes in (32, 4096))


_HBM_BYTES_PER_S, _L2_BYTES_PER_S = 3.35e12, 5.5e12

CUDA = Calibration(
    source="data sheet of an H100 SXM5, not measured",
    lookup_near=_bandwidth_curve(_L2_BYTES_PER_S, num_moves=1),
    lookup_far=_bandwidth_curve(_HBM_BYTES_PER_S, num_moves=1),
    # Read and write of the row and its state, and the gradient of its bag.
    update_near=_bandwidth_curve(_L2_BYTES_PER_S, num_moves=3),
    update_far=_bandwidth_curve(_HBM_BYTES_PER_S, num_moves=3),
    bag=_bandwidth_curve(_HBM_BYTES_PER_S, num_moves=1),
    bag_gradient=_bandwidth_curve(_HBM_BYTES_PER_S, num_moves=1),
    near_bytes=50e6,
    unit_s=1e-6,
    route_ns=0.05,
    arrange_ns=3 / 3350,  # a third of the memory bandwidth, a guess
    pack_ns=0.02,
    uneven_ns=0.1,
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
    pack_ns=15.0,
    uneven_ns=50.0,
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
