"""Under FBGEMM's interface a cache changes no bit, however far ahead batches are prefetched."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from emblib.compat import fbgemm
from emblib.compat.fbgemm import CacheAlgorithm, MultiPassPrefetchConfig, OptimType
from tests.compat.settings import Batch, Setting, batches_of, build, settings

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "EXACT_SGD": {},
    "EXACT_ROWWISE_ADAGRAD": {"eps": 1e-2},
    "ADAM": {"eps": 1e-2},
}


@dataclass(frozen=True)
class Pipeline:
    """How a cached module is run."""

    cached: tuple[bool, ...]  # by table
    algorithm: CacheAlgorithm
    passes: MultiPassPrefetchConfig | None
    ahead: int  # batches prefetched before they are looked up
    between: bool  # prefetch between forward and backward, or before forward
    invalid: bool  # some indices are of no row
    rounding: bool
    optimizer: str

    def locations(self, setting: Setting) -> list[str]:
        """Of the tables. The random numbers of a row go by its place among all rows, cached last,
        so for the same ones either all tables are cached or none is."""
        every = self.rounding and setting.weights == "FP16"
        cached = self.cached[: len(setting.rows)]
        return ["MANAGED_CACHING" if c or every else "DEVICE" for c in cached]

    def modules(self, setting: Setting) -> tuple[Any, Any]:
        """One with a cache of a single set, and one without."""
        options = OPTIMIZERS[self.optimizer] | {
            "optimizer": OptimType[self.optimizer],
            "stochastic_rounding": self.rounding,
            "bounds_check_mode": fbgemm.BoundsCheckMode.IGNORE,
        }
        torch.manual_seed(3)
        cached = build(
            fbgemm,
            setting,
            self.locations(setting),
            cache_algorithm=self.algorithm,
            cache_sets=1,
            multipass_prefetch_config=self.passes,
            **options,
        )
        return cached, build(fbgemm, setting, **options)


PIPELINES = st.builds(
    Pipeline,
    cached=st.tuples(*[st.booleans()] * 4),
    algorithm=st.sampled_from(CacheAlgorithm),
    passes=st.none()
    | st.builds(MultiPassPrefetchConfig, st.sampled_from([1, 3, 12]), st.sampled_from([1, 9])),
    ahead=st.integers(0, 2),
    between=st.booleans(),
    invalid=st.booleans(),
    rounding=st.booleans(),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
)


def _prefetch(module: Any, waiting: Iterator[Batch]) -> None:
    batch = next(waiting, None)
    if batch is not None:
        sizes = batch.sizes
        module.prefetch(batch.indices, batch.offsets, batch_size_per_feature_per_rank=sizes)


def _tensors(module: Any) -> list[torch.Tensor]:
    states = [tensor for table in module.split_optimizer_states() for tensor in table]
    return [*module.split_embedding_weights(), *states]


@profile(max_examples=25, deadline=None, derandomize=True)
@given(
    setting=settings(
        steps=st.integers(2, 5),
        longest=st.integers(1, 40),
        pooling=st.sampled_from(["SUM", "MEAN"]),
        ranks=st.integers(0, 2),
        weights=st.sampled_from(["FP32", "FP16"]),
    ),
    pipeline=PIPELINES,
)
def test_a_cache_changes_no_bit(setting: Setting, pipeline: Pipeline) -> None:
    setting = replace(setting, rows=tuple(40 * rows for rows in setting.rows))
    cached, plain = pipeline.modules(setting)
    batches = batches_of(setting)
    if pipeline.invalid:
        for batch in batches:
            batch.indices[::10] = 2 * max(setting.rows)
    waiting = iter(batches)
    for _ in range(pipeline.ahead):
        _prefetch(cached, waiting)
    for batch in batches:
        arguments = (batch.indices, batch.offsets, batch.sample_weights)
        sizes = {"batch_size_per_feature_per_rank": batch.sizes}
        if pipeline.ahead and not pipeline.between:
            _prefetch(cached, waiting)
        output = cached(*arguments, **sizes)
        if pipeline.ahead and pipeline.between:
            _prefetch(cached, waiting)
        expected = plain(*arguments, **sizes)
        assert torch.equal(output, expected)
        output.backward(batch.gradient)
        expected.backward(batch.gradient)
    for mine, other in zip(_tensors(cached), _tensors(plain), strict=True):
        assert torch.equal(mine, other)
