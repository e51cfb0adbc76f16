"""Tables as `torch.nn.Module`s."""

from emblib.tables.bounds_report import report_bounds_violations
from emblib.tables.quantized import QuantizedEmbeddingBags, RowFormat
from emblib.tables.tbe import TableBatchedEmbeddingBags
from emblib.tables.tt import TableBatchedTTEmbeddingBags, TTEmbeddingBag

__all__ = [
    "QuantizedEmbeddingBags",
    "RowFormat",
    "TTEmbeddingBag",
    "TableBatchedEmbeddingBags",
    "TableBatchedTTEmbeddingBags",
    "report_bounds_violations",
]
