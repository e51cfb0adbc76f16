"""Tables as `torch.nn.Module`s."""

from emblib.tables.batched import TableBatchedEmbeddingBags
from emblib.tables.quantized import QuantizedEmbeddingBags
from emblib.tables.tt import TTEmbeddingBag

__all__ = ["QuantizedEmbeddingBags", "TTEmbeddingBag", "TableBatchedEmbeddingBags"]
