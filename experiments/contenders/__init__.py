"""Contenders by name; each module is imported only when its contender is asked for."""

from __future__ import annotations

import importlib

from experiments.contenders.base import Contender, Task, Unsupported

__all__ = ["Contender", "Task", "Unsupported", "build"]

_CLASSES = {
    "tbe": ("experiments.contenders.tables", "BatchedTables"),
    "tt": ("experiments.contenders.tt", "TTTables"),
    "torch": ("experiments.contenders.torch_bag", "TorchBags"),
    "reference_tbe": ("experiments.contenders.reference", "ReferenceTables"),
    "reference_tt": ("experiments.contenders.reference", "ReferenceTT"),
    "managed": ("experiments.contenders.cached", "Managed"),
    "cached_lru": ("experiments.contenders.cached", "CachedLRU"),
    "cached_lfu": ("experiments.contenders.cached", "CachedLFU"),
    "disk_lru": ("experiments.contenders.cached", "DiskLRU"),
    "disk_lfu": ("experiments.contenders.cached", "DiskLFU"),
}


def build(name: str, task: Task) -> Contender:
    """Make the contender; raises Unsupported with the reason where it cannot do the task."""
    module, cls = _CLASSES[name]
    contender: Contender = getattr(importlib.import_module(module), cls)(task)
    return contender
