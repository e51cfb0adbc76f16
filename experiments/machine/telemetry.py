"""Watch the machine during a measurement: clocks, temperature, power, throttling, stolen time.

A `Telemetry` watches one race, in a `with` statement. `check` returns why the machine was slowed
since the last check, so that the race can repeat the affected samples; `summary` is for the record.
"""

from __future__ import annotations

import importlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import torch

from experiments.machine.cpu import BUSY_CORES, MAX_STOLEN_SHARE, Cpu, CpuTime, mean_mhz

CPU_PERIOD_SECONDS = 0.2  # period of samples of the CPU's load and frequency
NVML_PERIOD_SECONDS = 0.1  # period of samples of a GPU, about the period of the driver
MAX_CLOCK_RANGE = 0.02  # range of clocks ÷ median clock that raises the flag `clocks_varied`
# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean "slower than it could be". Idle, clocks
# set by the user, sync boost and display clocks are intended states.
SLOWDOWN_BITS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}


def telemetry_for(device: torch.device) -> Telemetry:
    """Return the telemetry of a device: by NVML for a GPU, by the kernel's counters for a CPU.

    Without NVML, a GPU's telemetry observes nothing.
    """
    if device.type != "cuda":
        return CpuTelemetry()
    nvml = Nvml.open(device)
    return NvmlTelemetry(nvml) if nvml else Telemetry()


class Telemetry:
    """An observer of the machine between `start` and `stop`; this base class observes nothing.

    As a context manager it starts and stops itself. Call `check` between them, `summary` and
    `flags` after `stop`.
    """

    def __enter__(self) -> Telemetry:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start watching."""

    def check(self) -> list[str]:
        """Return the reasons for which the machine was slowed since the last check; [] for none."""
        return []

    def stop(self) -> None:
        """Stop watching."""

    def summary(self) -> dict[str, Any]:
        """Return the known observations, for the entry `hardware` of records."""
        return {}

    def flags(self) -> list[str]:
        """Return the flags of the race, keys of `flags.ADVICE`."""
        return []


class CpuTelemetry(Telemetry):
    """An observer of load, frequency, stolen time and throttling of the CPU.

    It reads the kernel's counters at `start`, `check` and `stop`, without a thread.
    """

    def __init__(self, cpu: Cpu | None = None) -> None:
        self.cpu = cpu or Cpu()
        self.load: list[float] = []
        self.mhz: list[float] = []
        self.stolen_share: float | None = None  # stolen share of the system's time
        self.cores_of_others: float | None = None  # cores of other processes
        self._throttle_count: int | None = None  # throttle counter at the last check
        self._was_hot = False  # whether any check saw thermal throttling
        self._last_sample_s = 0.0  # time.monotonic() of the last sample
        self._time = CpuTime()  # processor time since `start`

    def start(self) -> None:
        self._throttle_count, self._time = self.cpu.num_throttled(), CpuTime()
        self._sample()

    def check(self) -> list[str]:
        """Return thermal throttling since the last check; sample load and frequency too."""
        if time.monotonic() - self._last_sample_s > CPU_PERIOD_SECONDS:
            self._sample()
        throttled_before, self._throttle_count = self._throttle_count, self.cpu.num_throttled()
        if (
            throttled_before is None
            or self._throttle_count is None
            or self._throttle_count <= throttled_before
        ):
            return []
        self._was_hot = True
        return ["cpu_thermal"]

    def stop(self) -> None:
        self._sample()
        self.stolen_share, self.cores_of_others = self._time.usage_by_others()

    def summary(self) -> dict[str, Any]:
        """Return load and MHz as [min, median, max], stolen time, cores of other processes."""
        cores = self.cores_of_others
        return _without_none(
            load=min_median_max(self.load),
            cpu_mhz=min_median_max(self.mhz),
            stolen=None if self.stolen_share is None else round(self.stolen_share, 4),
            cores_of_others=None if cores is None else round(cores, 2),
            throttle=["cpu_thermal"] if self._was_hot else None,
        )

    def flags(self) -> list[str]:
        is_raised_by_flag = {
            "stolen_time": (self.stolen_share or 0.0) > MAX_STOLEN_SHARE,
            "busy": (self.cores_of_others or 0.0) > BUSY_CORES,
        }
        return [flag for flag, is_raised in is_raised_by_flag.items() if is_raised]

    def _sample(self) -> None:
        self._last_sample_s = time.monotonic()
        self.load.append(psutil.getloadavg()[0])
        if (mhz := mean_mhz()) is not None:
            self.mhz.append(mhz)


class NvmlTelemetry(Telemetry):
    """An observer of a GPU, which a thread samples every NVML_PERIOD_SECONDS; start it only once.

    A lock protects the samples and reasons, which the thread and the race share.

    Args:
        nvml: GPU.
        pause: function that waits for some seconds and returns True to end the thread; None for a
            wait that `stop` ends.
    """

    def __init__(self, nvml: Nvml, pause: Callable[[float], bool] | None = None) -> None:
        self.nvml = nvml
        self._samples: dict[str, list[float]] = {}
        self._reasons_since_check: set[str] = set()
        self._reasons_since_start: set[str] = set()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._pause = pause or self._stopped.wait
        self._thread = threading.Thread(target=self._watch, name="nvml", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def check(self) -> list[str]:
        reasons = reason_names(self.nvml.reason_bits() or 0)
        with self._lock:
            self._reasons_since_check.update(reasons)
            since_check, self._reasons_since_check = self._reasons_since_check, set()
            self._reasons_since_start |= since_check
        return sorted(since_check)

    def stop(self) -> None:
        """Stop the thread and take a last sample, for short races."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)
        self.sample()

    def summary(self) -> dict[str, Any]:
        """Return clocks, temperature and power as [min, median, max], and throttling."""
        with self._lock:
            return _without_none(
                **{name: min_median_max(values) for name, values in self._samples.items()},
                throttle=sorted(self._reasons_since_start) or None,
            )

    def flags(self) -> list[str]:
        """Return the flag of varied clocks; the race itself reports throttling, by round."""
        clocks = min_median_max(self._samples.get("sm_mhz", ()))
        has_varied = clocks and clocks[2] - clocks[0] > MAX_CLOCK_RANGE * clocks[1]
        return ["clocks_varied"] if has_varied else []

    def sample(self) -> None:
        """Take a sample of all readings."""
        reasons = reason_names(self.nvml.reason_bits() or 0)
        sample = self.nvml.readings()
        with self._lock:
            for name, value in sample.items():
                self._samples.setdefault(name, []).append(float(value))
            self._reasons_since_check.update(reasons)

    def _watch(self) -> None:
        while not self._pause(NVML_PERIOD_SECONDS):
            self.sample()


def min_median_max(values: Iterable[float]) -> list[float] | None:
    """Return [min, median, max], rounded; None for no values."""
    ordered_values = sorted(values)
    if not ordered_values:
        return None
    return [
        round(number, 2)
        for number in (ordered_values[0], statistics.median(ordered_values), ordered_values[-1])
    ]


def reason_names(reason_bits: int) -> list[str]:
    """Return the names of the bits of `reason_bits` that mean a slowed GPU."""
    return [name for bit, name in SLOWDOWN_BITS.items() if reason_bits & bit]


class Nvml:
    """The facts that NVML states about one GPU; unknown facts are None.

    Args:
        library: module pynvml, or a test double.
        handle: NVML's handle of the GPU.
    """

    def __init__(self, library: Any, handle: Any) -> None:
        self.library, self.handle = library, handle

    @classmethod
    def open(cls, device: torch.device | None = None, library: Any = None) -> Nvml | None:
        """Return the facts of torch's device, by default the first GPU; None without NVML.

        `library` replaces pynvml.
        """
        try:
            library = library or importlib.import_module("pynvml")
            library.nvmlInit()
            return cls(library, _handle(library, device))
        except Exception:  # no package, driver or permission: the GPU cannot be observed
            return None

    def query(self, question: str, *arguments: Any) -> Any:
        """Return the result of nvmlDevice<question>(handle, *arguments), or None if it raises."""
        try:
            return getattr(self.library, "nvmlDevice" + question)(self.handle, *arguments)
        except Exception:  # the driver or the device does not support the question
            return None

    def driver(self) -> str | None:
        """Return the version of the driver."""
        try:
            return str(self.library.nvmlSystemGetDriverVersion())
        except Exception:  # the driver does not support the question
            return None

    def reason_bits(self) -> int | None:
        """Return the bits of the clock event reasons (of throttle reasons with an old driver)."""
        reason_bits = self.query("GetCurrentClocksEventReasons")
        return self.query("GetCurrentClocksThrottleReasons") if reason_bits is None else reason_bits

    def readings(self) -> dict[str, float]:
        """Return the present clocks, temperature and power, without those that are unavailable."""
        library = self.library
        return _without_none(
            sm_mhz=self.query("GetClockInfo", library.NVML_CLOCK_SM),
            memory_mhz=self.query("GetClockInfo", library.NVML_CLOCK_MEM),
            temperature_c=self.query("GetTemperature", library.NVML_TEMPERATURE_GPU),
            power_w=_thousandth(self.query("GetPowerUsage")),
        )

    def processes(self) -> dict[int, int | None] | None:
        """Return {process number: bytes} of the computing processes; None for what is unknown."""
        processes = self.query("GetComputeRunningProcesses")
        return (
            None
            if processes is None
            else {process.pid: process.usedGpuMemory for process in processes}
        )

    def settings(self) -> dict[str, Any]:
        """Return the known ones of the GPU's settings and present readings.

        Keys are those of `doctor.SETTINGS` and `reasons`, the names of what slows the GPU now.
        """
        library, readings, reason_bits = self.library, self.readings(), self.reason_bits()
        ecc, mig = self.query("GetEccMode"), self.query("GetMigMode")
        persistence = self.query("GetPersistenceMode")
        return _without_none(
            sm_mhz=readings.get("sm_mhz"),
            sm_mhz_most=self.query("GetMaxClockInfo", library.NVML_CLOCK_SM),
            memory_mhz=readings.get("memory_mhz"),
            memory_mhz_most=self.query("GetMaxClockInfo", library.NVML_CLOCK_MEM),
            temperature_c=readings.get("temperature_c"),
            power_limit_w=_thousandth(self.query("GetPowerManagementLimit")),
            power_limit_default_w=_thousandth(self.query("GetPowerManagementDefaultLimit")),
            persistence=None if persistence is None else bool(persistence),
            ecc=bool(ecc[0]) if ecc else None,
            mig=bool(mig[0]) if mig else None,
            reasons=None if reason_bits is None else reason_names(reason_bits),
        )


def _handle(library: Any, device: torch.device | None) -> Any:
    """Return NVML's handle of torch's device; of the first GPU if the UUID is unknown."""
    is_gpu = device is not None and device.type == "cuda"
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) if is_gpu else None
    if uuid is None:
        return library.nvmlDeviceGetHandleByIndex(0)
    try:
        return library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # a slice of a GPU (MIG) has another prefix
        return library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1e3


def _without_none(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
