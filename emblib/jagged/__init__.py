"""Batches of bags of different lengths: jagged tensors, keyed or not, and pooled rows by key.

`JaggedTensor` has the bags of one feature, `KeyedJaggedTensor` those of several features, and
`KeyedTensor` their pooled rows. Constructors and methods are those of TorchRec's types.
Constructors check sizes and dtypes, at a cost that does not grow with the batch; `validate()` also
reads the content.
"""

import torch

from emblib.jagged import pytrees
from emblib.jagged.jagged_tensor import JaggedTensor, lengths_from_offsets, offsets_from_lengths
from emblib.jagged.keyed_jagged_tensor import KeyedJaggedTensor
from emblib.jagged.keyed_tensor import KeyedTensor, KTRegroupAsDict
from emblib.jagged.padding import drop_padding, drop_padding_from_bags

pytrees.register()
# So that torch.load reads saved batches with its defaults (weights_only=True).
torch.serialization.add_safe_globals([JaggedTensor, KeyedJaggedTensor, KeyedTensor])

__all__ = [
    "JaggedTensor",
    "KTRegroupAsDict",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "drop_padding",
    "drop_padding_from_bags",
    "lengths_from_offsets",
    "offsets_from_lengths",
]
