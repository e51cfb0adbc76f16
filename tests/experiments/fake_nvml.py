"""An NVML that only pretends: what pynvml offers, as far as it is used, from a script."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NotSupported(Exception):
    """What a driver says that does not know."""


@dataclass
class FakeNvml:
    """Answers by the name of the question, a list one by one with the last for ever."""

    answers: dict[str, Any] = field(default_factory=dict)
    handles: list[Any] = field(default_factory=list)

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def nvmlInit(self) -> None:
        if "init" in self.answers:
            raise self.answers["init"]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid in self.answers.get("absent", ()):
            raise NotSupported(uuid)
        self.handles.append(uuid)
        return uuid

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self.handles.append(index)
        return index

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvmlDevice"):
            raise AttributeError(name)

        def ask(handle: Any, *arguments: Any) -> Any:
            del handle
            question = name.removeprefix("nvmlDevice") + "".join(f":{a}" for a in arguments)
            if question not in self.answers:
                raise NotSupported(question)
            answer = self.answers[question]
            if isinstance(answer, list):
                return answer.pop(0) if len(answer) > 1 else answer[0]
            return answer

        return ask


def healthy() -> dict[str, Any]:
    """Answers of a device that no other process uses and that is not throttled."""
    return {
        "GetClockInfo:1": 1980,
        "GetClockInfo:2": 2619,
        "GetMaxClockInfo:1": 1980,
        "GetMaxClockInfo:2": 2619,
        "GetTemperature:0": 40,
        "GetPowerUsage": 300_000,
        "GetPowerManagementLimit": 700_000,
        "GetPowerManagementDefaultLimit": 700_000,
        "GetCurrentClocksEventReasons": 0x1,
        "GetPersistenceMode": 1,
        "GetEccMode": [[1, 1]],
        "GetMigMode": [[0, 0]],
        "GetComputeRunningProcesses": [[SimpleNamespace(pid=7, usedGpuMemory=1 << 30)]],
    }
