"""Watch the machine during a measurement: clocks, heat, power, throttling, stolen time.

A `Telemetry` watches one race. `check` returns what slowed the machine since the last check, so
that the affected samples can be marked and repeated; `summary` is for the record.
"""

from __future__ import annotations

import importlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from experiments.machine.cpu import BUSY, Cpu, cores_of_others, own_seconds

PERIOD = 0.2  # seconds between two looks
STOLEN = 0.01  # a larger share of the time for other virtual machines is worth a flag


class Telemetry(Protocol):
    """The interface: watch between `start` and `stop`."""

    def start(self) -> None:
        """Start watching."""
        ...

    def check(self) -> list[str]:
        """Return why the machine was slowed since the last check; empty where it was not."""
        ...

    def stop(self) -> None:
        """Stop watching."""
        ...

    def summary(self) -> dict[str, Any]:
        """Return the observations for the record."""
        ...

    def flags(self) -> list[str]:
        """Return the flags of the race."""
        ...


class NoTelemetry:
    """No observation, for systems without counters and for tests."""

    def start(self) -> None:
        """Do nothing."""

    def check(self) -> list[str]:
        """Return nothing."""
        return []

    def stop(self) -> None:
        """Do nothing."""

    def summary(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def flags(self) -> list[str]:
        """Return nothing."""
        return []


class CpuTelemetry:
    """Watch load, frequency, stolen time and throttling of the CPU by the kernel's counters."""

    def __init__(
        self,
        cpu: Cpu | None = None,
        now: Callable[[], float] = time.monotonic,
        own: Callable[[], float] = own_seconds,
    ) -> None:
        self.cpu, self.now, self.own = cpu or Cpu(), now, own
        self.load: list[float] = []
        self.mhz: list[float] = []
        self.seen: set[str] = set()
        self.throttles: int | None = None
        self.stolen: float | None = None  # share of the system's time
        self.others: float | None = None  # cores that other processes kept busy
        self._looked = 0.0

    def start(self) -> None:
        """Read the counters."""
        self.throttles = self.cpu.throttled()
        self._first, self._own = self.cpu.ticks(), self.own()
        self._look()

    def check(self) -> list[str]:
        """Return thermal throttling since the last check; sample the rest now and then."""
        if self.now() - self._looked > PERIOD:
            self._look()
        count = self.cpu.throttled()
        slowed = count is not None and self.throttles is not None and count > self.throttles
        self.throttles = count
        if not slowed:
            return []
        self.seen.add("cpu_thermal")
        return ["cpu_thermal"]

    def _look(self) -> None:
        self._looked = self.now()
        if (load := self.cpu.load()) is not None:
            self.load.append(load)
        if (mhz := self.cpu.mhz()) is not None:
            self.mhz.append(mhz)

    def stop(self) -> None:
        """Read the counters again."""
        self._look()
        first, last = self._first, self.cpu.ticks()
        self.others = cores_of_others(first, last, self.own() - self._own)
        if first and last and last.total > first.total:
            self.stolen = (last.stolen - first.stolen) / (last.total - first.total)

    def summary(self) -> dict[str, Any]:
        """Return load and MHz as [min, median, max], the share of stolen time, and others' load."""
        found: dict[str, Any] = {"load": spread(self.load), "cpu_mhz": spread(self.mhz)}
        if self.stolen is not None:
            found["stolen"] = round(self.stolen, 4)
        if self.others is not None:
            found["cores_of_others"] = round(self.others, 2)
        if self.seen:
            found["throttle"] = sorted(self.seen)
        return {k: v for k, v in found.items() if v is not None}

    def flags(self) -> list[str]:
        """Return flags for stolen time and other processes."""
        found = {
            "stolen_time": (self.stolen or 0.0) > STOLEN,
            "busy": (self.others or 0.0) > BUSY,
        }
        return [flag for flag, is_so in found.items() if is_so]


def spread(values: Iterable[float]) -> list[float] | None:
    """Return [min, median, max]; None for no values."""
    known = sorted(values)
    if not known:
        return None
    return [round(x, 2) for x in (known[0], statistics.median(known), known[-1])]


def telemetry_for(device: torch.device) -> Telemetry:
    """Return the available telemetry: the GPU's through NVML, else the CPU's."""
    if device.type == "cuda":
        pass

        nvml = Nvml.open(device)
        return NvmlTelemetry(nvml) if nvml else NoTelemetry()
    return CpuTelemetry()


NVML_PERIOD = 0.1  # seconds between two looks; the driver renews power and clocks about as often
VARIED = 0.02  # of the median clock; a wider range is worth a flag
# Bits of nvmlDeviceGetCurrentClocksEventReasons that mean "slower than it could be". Idle, clocks
# set by the user, sync boost and display clocks are states that somebody wants.
SLOWED = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
}


def reasons(mask: int) -> list[str]:
    """Return the names of the bits that mean a slowed GPU."""
    return [name for bit, name in SLOWED.items() if mask & bit]


class Nvml:
    """One GPU; `library` is pynvml or a test double."""

    def __init__(self, library: Any, handle: Any) -> None:
        self.library, self.handle = library, handle

    @classmethod
    def open(cls, device: torch.device | None = None, library: Any = None) -> Nvml | None:
        """Find torch's device by its UUID; None where NVML is unavailable."""
        try:
            library = library or importlib.import_module("pynvml")
            library.nvmlInit()
            return cls(library, _handle(library, device))
        except Exception:  # absent, no driver, no permission: all mean that nothing can be seen
            return None

    def ask(self, question: str, *arguments: Any) -> Any:
        """Return nvmlDevice<question>(handle, *arguments), or None."""
        try:
            return getattr(self.library, "nvmlDevice" + question)(self.handle, *arguments)
        except Exception:  # this driver, or this device, has no answer
            return None

    def driver(self) -> str | None:
        """Return the version of the driver."""
        try:
            return str(self.library.nvmlSystemGetDriverVersion())
        except Exception:  # as in `ask`
            return None

    def mask(self) -> int | None:
        """Return the clock event reasons, under either of their names."""
        mask = self.ask("GetCurrentClocksEventReasons")
        return self.ask("GetCurrentClocksThrottleReasons") if mask is None else mask

    def sm_mhz(self) -> int | None:
        """Return the clock of the multiprocessors."""
        return self.ask("GetClockInfo", self.library.NVML_CLOCK_SM)

    def memory_mhz(self) -> int | None:
        """Return the clock of the memory."""
        return self.ask("GetClockInfo", self.library.NVML_CLOCK_MEM)

    def temperature(self) -> int | None:
        """Return the chip's temperature in degrees Celsius."""
        return self.ask("GetTemperature", self.library.NVML_TEMPERATURE_GPU)

    def watts(self) -> float | None:
        """Return the present power."""
        return _thousandth(self.ask("GetPowerUsage"))

    def joules(self) -> float | None:
        """Return the energy since the driver was loaded."""
        return _thousandth(self.ask("GetTotalEnergyConsumption"))

    def processes(self) -> dict[int, int | None] | None:
        """Return the processes that compute on the device, and the bytes that each uses."""
        found = self.ask("GetComputeRunningProcesses")
        return None if found is None else {p.pid: p.usedGpuMemory for p in found}

    def settings(self) -> dict[str, Any]:
        """Return the device's settings, without those that are unavailable."""
        lib = self.library
        ecc, mig = self.ask("GetEccMode"), self.ask("GetMigMode")
        found = {
            "sm_mhz": self.sm_mhz(),
            "sm_mhz_most": self.ask("GetMaxClockInfo", lib.NVML_CLOCK_SM),
            "memory_mhz": self.memory_mhz(),
            "memory_mhz_most": self.ask("GetMaxClockInfo", lib.NVML_CLOCK_MEM),
            "temperature_c": self.temperature(),
            "power_limit_w": _thousandth(self.ask("GetPowerManagementLimit")),
            "power_limit_default_w": _thousandth(self.ask("GetPowerManagementDefaultLimit")),
            "persistence": _truth(self.ask("GetPersistenceMode")),
            "ecc": _truth(ecc[0] if ecc else None),
            "mig": _truth(mig[0] if mig else None),
            "reasons": None if (mask := self.mask()) is None else reasons(mask),
        }
        return {k: v for k, v in found.items() if v is not None}


def _handle(library: Any, device: torch.device | None) -> Any:
    if device is not None and device.type == "cuda":
        uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
        if uuid is not None:
            try:
                return library.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            except Exception:  # a slice of a GPU has a name of its own
                return library.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
    return library.nvmlDeviceGetHandleByIndex(0)


def _thousandth(value: int | None) -> float | None:
    return None if value is None else value / 1e3


def _truth(value: int | None) -> bool | None:
    return None if value is None else bool(value)


@dataclass
class NvmlTelemetry:
    """Sample the device ten times per second in a thread while a race runs."""

    nvml: Nvml
    period: float = NVML_PERIOD
    pause: Callable[[float], bool] | None = None  # waits; True ends the thread
    sm: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    heat: list[float] = field(default_factory=list)
    watts: list[float] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    energy: float | None = None

    def __post_init__(self) -> None:
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._slowed: set[str] = set()  # since the last check
        self._thread: threading.Thread | None = None
        self._joules: float | None = None

    def start(self) -> None:
        """Start the thread."""
        self._joules = self.nvml.joules()
        self._stopped.clear()
        self._thread = threading.Thread(target=self._watch, name="nvml", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        wait = self.pause or self._stopped.wait
        while not wait(self.period):
            self.look()

    def look(self) -> None:
        """Take one sample of everything."""
        mask = self.nvml.mask()
        pairs = (
            (self.sm, self.nvml.sm_mhz()),
            (self.memory, self.nvml.memory_mhz()),
            (self.heat, self.nvml.temperature()),
            (self.watts, self.nvml.watts()),
        )
        with self._lock:
            for values, value in pairs:
                if value is not None:
                    values.append(float(value))
            self._slowed |= set(reasons(mask or 0))

    def check(self) -> list[str]:
        """Return what slowed the GPU since the last check, by the samples and a new one."""
        mask = self.nvml.mask()
        with self._lock:
            slowed = self._slowed | set(reasons(mask or 0))
            self._slowed = set()
            self.seen |= slowed
        return sorted(slowed)

    def stop(self) -> None:
        """Stop the thread and take a last sample, for short races."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        self.look()
        now = self.nvml.joules()
        if now is not None and self._joules is not None:
            self.energy = now - self._joules

    def summary(self) -> dict[str, Any]:
        """Return clocks, heat and power as [min, median, max], energy, and throttling."""
        with self._lock:
            found: dict[str, Any] = {
                "sm_mhz": spread(self.sm),
                "memory_mhz": spread(self.memory),
                "temperature_c": spread(self.heat),
                "power_w": spread(self.watts),
                "energy_j": None if self.energy is None else round(self.energy, 3),
                "throttle": sorted(self.seen) or None,
            }
        return {k: v for k, v in found.items() if v is not None}

    def flags(self) -> list[str]:
        """Return whether clocks moved; the race reports throttling, as it knows the rounds."""
        seen = spread(self.sm)
        return ["clocks_varied"] if seen and seen[2] - seen[0] > VARIED * seen[1] else []
