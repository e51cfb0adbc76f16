"""Tables as `torch.nn.Module`s."""

from emblib.tables.quantized import QuantizedEmbeddingBags
from emblib.tables.tbe import TableBatchedEmbeddingBags
from emblib.tables.tt import TTEmbeddingBag

__all__ = ["QuantizedEmbeddingBags", "TTEmbeddingBag", "TableBatchedEmbeddingBags"]
