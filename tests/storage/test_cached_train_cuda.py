"""Tensor trains with a cache of rows in collections on CUDA, as on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch

from emblib import optim
from emblib.dynamic import RowEviction
from tests.storage.test_cached_train import batch, caches, collection, handle, slope


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("eviction", RowEviction)
def test_cuda_trains_saves_and_loads_as_the_cpu(eviction: RowEviction) -> None:
    spilled = (40, 30) if eviction is RowEviction.SPILL else None
    cache, optimizer = caches(eviction, spilled, every=3), optim.Adagrad(0.05, eps=1e-4)
    one = collection(cache, optimizer)
    two = copy.deepcopy(one).to("cuda")
    for step in range(8):
        features = batch(step)
        expected = one(features).values()
        expected.backward(slope(step))
        found = two(features.to("cuda")).values()
        found.backward(slope(step).cuda())
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    three, four = collection(cache, optimizer).to("cuda"), collection(cache, optimizer)
    for other in (three, four):
        other.load_state_dict(two.state_dict())
    for name in "ab":
        expected, own = handle(one, name), handle(two, name)
        rows = own.dense_rows().cpu()
        torch.testing.assert_close(rows, expected.dense_rows(), rtol=1e-4, atol=1e-5)
        assert own.cached_ids().tolist() == expected.cached_ids().tolist()
        assert own.cache_stats().hits == expected.cache_stats().hits
        for other in (three, four):
            torch.testing.assert_close(handle(other, name).dense_rows().cpu(), rows)
            handle(other, name).populate()
        own.populate()
        assert own.cached_ids().tolist() == handle(three, name).cached_ids().tolist()
        assert own.cached_ids().tolist() == handle(four, name).cached_ids().tolist()
