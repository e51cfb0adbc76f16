"""Tables as `torch.nn.Module`s."""

from emblib.tables.quantized import QuantizedEmbeddingBags
from emblib.tables.tbe import TableBatchedEmbeddingBags
from emblib.tables.tt import TableBatchedTTEmbeddingBags, TTEmbeddingBag

__all__ = [
    "QuantizedEmbeddingBags",
    "TTEmbeddingBag",
    "TableBatchedEmbeddingBags",
    "TableBatchedTTEmbeddingBags",
]
