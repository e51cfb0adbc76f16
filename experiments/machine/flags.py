"""Flags: conditions of a machine that make its numbers less precise, and their remedies."""

from __future__ import annotations

# Explanation and remedy by flag.
ADVICE: dict[str, tuple[str, str]] = {
    "throttled": (
        "the machine throttled in counted rounds, after time to recover",
        "cool it, raise the power limit, or lock lower clocks",
    ),
    "stolen_time": (
        "a hypervisor gave more than 1 % of the time to other virtual machines",
        "use a dedicated machine; ratios within a round suffer less than absolute times",
    ),
    "not_warm": (
        "warm-up ended at its cap, before all batches had been seen or a cache was full",
        "raise timing.warmup_cap",
    ),
    "launch_exposed": (
        "the GPU waited for the host in many samples, so that launches are inside the times",
        "nothing, if the contender itself waits for the GPU; else timing.modes=[graph]",
    ),
    "old_library": (
        "the native library was built before its sources (csrc) were last changed",
        "make native",
    ),
    "busy": (
        "other processes took more than a quarter of a core",
        "stop them, or leave cores free with device.threads",
    ),
    "governor": (
        "the CPU's frequency governor is not 'performance'",
        "cpupower frequency-set -g performance",
    ),
    "virtual": (
        "a virtual machine: the load of its neighbours is not visible",
        "use a dedicated one",
    ),
    "quota": (
        "a container may use fewer cores' worth of time than there are threads",
        "set device.threads to the quota",
    ),
    "threads": ("more threads than usable cores", "set device.threads to the number of cores"),
    "other_processes": (
        "other processes compute on the same GPU",
        "nvidia-smi lists them; wait for them, or use another GPU",
    ),
    "clocks_varied": (
        "the GPU's clock moved by more than 2 % while it was measured",
        "nvidia-smi -lgc MHZ as administrator, -rgc afterwards",
    ),
    "slowed": ("the GPU is throttled before the measurement", "cool it"),
    "hot": ("the GPU is hot before the measurement", "let it cool"),
    "power_limit": (
        "the GPU's power limit is below its default",
        "nvidia-smi -pl WATTS as administrator",
    ),
    "persistence_off": (
        "the driver unloads when no process uses it, so that first calls are slow",
        "nvidia-smi -pm 1 as administrator",
    ),
    "mig": ("a slice of a GPU: other slices share its memory bandwidth", "use a whole GPU"),
    "nvml_absent": (
        "the GPU's clocks, temperature and throttling are not observed",
        "pip install nvidia-ml-py",
    ),
}

# Flags that do not make a machine unfit for device.strict.
MINOR = ("virtual", "nvml_absent", "persistence_off")


def explain(flag: str) -> str:
    """Return the explanation of a flag; the flag itself if it is unknown."""
    return ADVICE[flag][0] if flag in ADVICE else flag


def remedy(flag: str) -> str:
    """Return the remedy of a flag; "" if it is unknown."""
    return ADVICE[flag][1] if flag in ADVICE else ""
