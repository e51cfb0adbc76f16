"""Batches of bags of different lengths: jagged tensors, by key or alone, and pooled rows by key.

`JaggedTensor` holds the bags of one feature, `KeyedJaggedTensor` those of several, `KeyedTensor`
what pooling makes of them. They are TorchRec's types by their constructors and methods; what is
laid out how is told at each. Structure is checked when one is made, at no cost that grows with the
batch; `validate()` also reads the content.
"""

import torch

from emblib.jagged import keyed_tensor
from emblib.jagged.jagged_tensor import JaggedTensor, lengths_from_offsets, offsets_from_lengths
from emblib.jagged.keyed_jagged_tensor import KeyedJaggedTensor
from emblib.jagged.keyed_tensor import KeyedTensor, KTRegroupAsDict

keyed_tensor.register()
# So that batches saved with torch.save are read by torch.load as it is by default.
torch.serialization.add_safe_globals([JaggedTensor, KeyedJaggedTensor, KeyedTensor])

__all__ = [
    "JaggedTensor",
    "KTRegroupAsDict",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "lengths_from_offsets",
    "offsets_from_lengths",
]
