"""Kinds of storage of a table: dense rows, hash tables, tensor trains and quantised rows.

`base.Storage` is the interface; each kind is one file and one line here.
"""

from emblib.storage.base import (
    CutUnits,
    MemoryBytes,
    Rates,
    Storage,
    TableDescription,
    TableSlice,
    TensorLayout,
    kinds,
    register,
)
from emblib.storage.dense import Dense
from emblib.storage.handles import TableHandle
from emblib.storage.hash import Hash
from emblib.storage.quantized import Quantized
from emblib.storage.tensor_train import TensorTrain

register(Dense)
register(Hash)
register(TensorTrain)
register(Quantized)

__all__ = [
    "CutUnits",
    "Dense",
    "Hash",
    "MemoryBytes",
    "Quantized",
    "Rates",
    "Storage",
    "TableDescription",
    "TableHandle",
    "TableSlice",
    "TensorLayout",
    "TensorTrain",
    "kinds",
    "register",
]
