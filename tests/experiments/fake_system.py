"""A system that only pretends: what psutil, os and the kernel's files say of the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from experiments.machine import cpu as cpu_module
from experiments.machine import preflight
from experiments.machine.cpu import Cpu


class FakeSystem:
    """The system as psutil and os see it: seconds by state, and what this process used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        states = ("user", "nice", "system", "irq", "softirq", "steal", "idle", "iowait")
        self.spent = dict.fromkeys(states, 10.0)
        self.own = 1.0
        self.mhz = [2000.0, 3000.0]
        answers = {
            "cpu_times": lambda: SimpleNamespace(_asdict=self.spent.copy().copy),
            "cpu_freq": lambda percpu: [SimpleNamespace(current=mhz) for mhz in self.mhz],
            "getloadavg": lambda: (0.5, 0.4, 0.3),
        }
        for name, answer in answers.items():
            monkeypatch.setattr(psutil, name, answer)
        process = lambda: SimpleNamespace(user=self.own, system=0.0)  # noqa: E731
        monkeypatch.setattr(cpu_module.os, "times", process)
        monkeypatch.setattr(cpu_module.os, "cpu_count", lambda: 2)
        for module in (cpu_module, preflight):
            monkeypatch.setattr(module, "usable_cores", lambda: [0, 1])

    def spend(self, **seconds: float) -> None:
        for state, value in seconds.items():
            self.spent[state] += value


def put(cpu: Cpu, path: str, text: str) -> None:
    file = cpu.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")
