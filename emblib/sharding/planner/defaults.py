"""Constants for machines that were not calibrated.

The CPU's were measured by `calibrate` on two virtual cores of an AMD EPYC with 32 MiB of L3 cache,
between two processes that share memory, rounded. The speed of a network and of a disk are round
figures. The GPU's are data-sheet figures of an NVIDIA H100 SXM5: 3,350 GB/s of memory, 450 GB/s of
NVLink each way, 64 GB/s of PCIe 5 each way, 400 Gbit/s of network a GPU; launches and latencies are
round figures. They were not measured.
"""

from emblib.sharding.planner.calibration import Calibration, Curve


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
