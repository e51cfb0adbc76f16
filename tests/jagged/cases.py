"""Batches as plain lists, which say what the types must hold."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from hypothesis import strategies as st
from torch import Tensor

from emblib import KeyedJaggedTensor

Bags = list[list[int]]
Features = dict[str, Bags]


def flat(features: Features) -> list[int]:
    return [value for bags in features.values() for bag in bags for value in bag]


def weights_of(values: Tensor) -> Tensor:
    """A weight that tells whose it is."""
    return values.to(torch.float32) / 2 + 1


def made(
    features: Features,
    dtype: torch.dtype = torch.int64,
    given: str = "lengths",
    *,
    weighted: bool = False,
) -> KeyedJaggedTensor:
    """`features` as a batch, of variable stride where they differ in bags."""
    lengths = torch.tensor([len(bag) for bags in features.values() for bag in bags], dtype=dtype)
    values = torch.tensor(flat(features), dtype=torch.int64)
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=dtype), (1, 0))
    strides = [len(bags) for bags in features.values()]
    return KeyedJaggedTensor(
        list(features),
        values,
        weights_of(values) if weighted else None,
        lengths if given in ("lengths", "both") else None,
        offsets if given in ("offsets", "both") else None,
        stride_per_key_per_rank=[[s] for s in strides] if len(set(strides)) > 1 else None,
    )


def held(batch: KeyedJaggedTensor) -> Features:
    """What a batch holds, read from its tensors alone; its weights are checked on the way."""
    lengths, offsets = batch.lengths().tolist(), batch.offsets().tolist()
    values = batch.values().tolist()
    assert [b - a for a, b in pairwise(offsets)] == lengths
    assert offsets[-1] == len(values)
    weights = batch.weights_or_none()
    if weights is not None:
        assert torch.equal(weights, weights_of(batch.values()))
    features: Features = {}
    bag = 0
    for key, stride in zip(batch.keys(), batch.stride_per_key(), strict=True):
        ends = offsets[bag : bag + stride + 1]
        features[key] = [values[a:b] for a, b in pairwise(ends)]
        bag += stride
    assert bag == len(lengths)
    return features


@st.composite
def features(draw: st.DrawFn, *, varied: bool = False, prefix: str = "f") -> Features:
    """1 to 5 features of up to 4 bags with up to 3 values each."""
    count = draw(st.integers(1, 5))
    bags = st.lists(st.integers(0, 99), max_size=3)
    stride = draw(st.integers(0, 4))

    def strides() -> int:
        return draw(st.integers(0, 4)) if varied else stride

    return {
        f"{prefix}{i}": draw(st.lists(bags, min_size=n, max_size=n))
        for i, n in enumerate([strides() for _ in range(count)])
    }


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
