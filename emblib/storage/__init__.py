"""Kinds of storage of a table: dense rows, hash tables, tensor trains, shared and quantised rows.

`base.Storage` is the interface; each kind is one file and one line here.
"""

from emblib.storage.base import (
    CutUnits,
    MemoryBytes,
    RowTimes,
    Storage,
    TableDescription,
    TableModule,
    TableSlice,
    TensorLayout,
    kinds,
    register,
)
from emblib.storage.composed_lookup import Combine
from emblib.storage.dense import Dense
from emblib.storage.handles import TableHandle
from emblib.storage.hash import Hash
from emblib.storage.hashed import Hashed, RowHash
from emblib.storage.narrow import Narrow
from emblib.storage.quantized import Quantized
from emblib.storage.quotient_remainder import QuotientRemainder
from emblib.storage.tensor_train import TensorTrain

register(Dense)
register(Hash)
register(TensorTrain)
register(Quantized)
register(Hashed)
register(QuotientRemainder)
register(Narrow)

__all__ = [
    "Combine",
    "CutUnits",
    "Dense",
    "Hash",
    "Hashed",
    "MemoryBytes",
    "Narrow",
    "Quantized",
    "QuotientRemainder",
    "RowHash",
    "RowTimes",
    "Storage",
    "TableDescription",
    "TableHandle",
    "TableModule",
    "TableSlice",
    "TensorLayout",
    "TensorTrain",
    "kinds",
    "register",
]
