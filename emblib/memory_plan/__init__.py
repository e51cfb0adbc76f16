"""Choose how each table is stored, so that all of them fit into a number of bytes.

`plan_memory` is in `plan`, with the methods and their losses; `planned` lists the tables of a
model, `selection` picks one choice per table.
"""

from emblib.memory_plan.plan import (
    EVICTED,
    MEASURED,
    METHODS,
    BackingMemory,
    MemoryPlan,
    plan_memory,
)
from emblib.memory_plan.selection import AS_IT_IS, BudgetError, MemoryChoice

__all__ = [
    "AS_IT_IS",
    "EVICTED",
    "MEASURED",
    "METHODS",
    "BackingMemory",
    "BudgetError",
    "MemoryChoice",
    "MemoryPlan",
    "plan_memory",
]
