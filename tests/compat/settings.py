"""Random problems for FBGEMM's interface, run by the same code over FBGEMM's names and emblib's."""

import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from emblib.compat import fbgemm

Result = dict[str, list[Tensor]]


@dataclass(frozen=True)
class Setting:
    """Tables, features and batches; what is drawn from `seed` is the same for every library."""

    rows: tuple[int, ...] = (13, 7)
    dims: tuple[int, ...] = (8, 4)
    features: tuple[int, ...] = (0, 1)
    pooling: str = "SUM"
    weighted: bool = False
    index_dtype: torch.dtype = torch.int64
    weights: str = "FP32"
    output: str = "FP32"
    batch: int = 4
    longest: int = 5
    ranks: int = 0  # variable batch sizes, if not 0
    steps: int = 3
    seed: int = 0

    @property
    def feature_dims(self) -> list[int]:
        """The dim of each feature."""
        return [self.dims[t] for t in self.features]


@dataclass(frozen=True)
class Batch:
    """One batch, feature-major."""

    indices: Tensor
    offsets: Tensor
    sample_weights: Tensor | None
    sizes: list[list[int]] | None  # [F][ranks]
    gradient: Tensor


def settings(**fixed: Any) -> st.SearchStrategy[Setting]:
    """Random settings; keyword arguments are strategies in place of the default ones."""

    @st.composite
    def draw(pick: Any) -> Setting:
        tables = pick(st.integers(1, 4))
        features = [*range(tables), *pick(st.lists(st.integers(0, tables - 1), max_size=2))]
        pooling = pick(fixed.get("pooling", st.sampled_from(["SUM", "MEAN", "NONE"])))
        dims = [4 * pick(st.integers(1, 9)) for _ in range(tables)]
        default = {
            "weighted": st.booleans() if pooling == "SUM" else st.just(False),
            "index_dtype": st.sampled_from([torch.int64, torch.int32]),
            "weights": st.just("FP32"),
            "output": st.just("FP32"),
            "batch": st.integers(1, 5),
            "longest": st.integers(0, 9),
            "ranks": st.just(0),
            "steps": st.integers(1, 4),
            "seed": st.integers(0, 2**31),
        }
        chosen = {name: pick(fixed.get(name, strategy)) for name, strategy in default.items()}
        return Setting(
            rows=tuple(pick(st.integers(1, 40)) for _ in range(tables)),
            dims=tuple(dims[:1] * tables if pooling == "NONE" else dims),
            features=tuple(pick(st.permutations(features))),
            pooling=pooling,
            **chosen,
        )

    return draw()


def weights_of(setting: Setting) -> list[Tensor]:
    """The first weights of each table, float32."""
    generator = torch.Generator().manual_seed(setting.seed)
    sizes = zip(setting.rows, setting.dims, strict=True)
    return [torch.rand(r, d, generator=generator) * 2 - 1 for r, d in sizes]


def batches_of(setting: Setting) -> list[Batch]:
    """The batches of all steps."""
    generator = torch.Generator().manual_seed(setting.seed + 1)
    return [_batch(setting, generator) for _ in range(setting.steps)]


def _batch(setting: Setting, generator: torch.Generator) -> Batch:
    def draw(low: int, high: int, size: Sequence[int]) -> Tensor:
        return torch.randint(low, high, size, generator=generator)

    features, sizes = len(setting.features), None
    per_feature = [setting.batch] * features
    if setting.ranks:
        sizes = draw(1, setting.batch + 1, (features, setting.ranks)).tolist()
        per_feature = [sum(row) for row in sizes]
    lengths = draw(0, setting.longest + 1, (sum(per_feature),))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    parts, bag = [], 0
    for f, size in enumerate(per_feature):
        count = int(lengths[bag : bag + size].sum())
        parts.append(draw(0, setting.rows[setting.features[f]], (count,)))
        bag += size
    indices = torch.cat(parts)
    shape: tuple[int, ...] = (setting.batch, sum(setting.feature_dims))
    if setting.pooling == "NONE":
        shape = (indices.numel(), setting.dims[0])
    elif sizes is not None:
        shape = (sum(n * d for n, d in zip(per_feature, setting.feature_dims, strict=True)),)
    return Batch(
        indices.to(setting.index_dtype),
        offsets.to(setting.index_dtype),
        torch.rand(indices.numel(), generator=generator) + 0.5 if setting.weighted else None,
        sizes,
        torch.rand(shape, generator=generator) * 2 - 1,
    )


def names(library: types.ModuleType, given: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of emblib's members and objects, by the names of `library`."""
    return {key: _name(library, value) for key, value in given.items()}


def _name(library: types.ModuleType, value: Any) -> Any:
    kind = getattr(library, type(value).__name__, None)
    if library is fbgemm or kind is None:
        return value
    if hasattr(value, "name"):
        return kind[value.name]
    fields = getattr(value, "__dataclass_fields__", {})
    return kind(**{key: _name(library, getattr(value, key)) for key in fields})


def build(
    library: types.ModuleType, setting: Setting, locations: Sequence[str] = (), **options: Any
) -> Any:
    """The module of that library on the CPU, with the setting's first weights.

    `locations` are those of the tables, HOST if left out.
    """
    tables = zip(setting.rows, setting.dims, locations or ["HOST"] * len(setting.rows), strict=True)
    options = {"learning_rate": 0.1, "stochastic_rounding": False} | options
    module = library.SplitTableBatchedEmbeddingBagsCodegen(
        [(r, d, library.EmbeddingLocation[at], library.ComputeDevice.CPU) for r, d, at in tables],
        feature_table_map=list(setting.features),
        pooling_mode=library.PoolingMode[setting.pooling],
        weights_precision=library.SparseType[setting.weights],
        output_dtype=library.SparseType[setting.output],
        **names(library, options),
    )
    for view, values in zip(module.split_embedding_weights(), weights_of(setting), strict=True):
        view.data.copy_(values)
    return module


def train(library: types.ModuleType, setting: Setting, **options: Any) -> Result:
    """Outputs, sample weight gradients, weights and states of a few steps."""
    module = build(library, setting, **options)
    outputs, sample_gradients = [], []
    for batch in batches_of(setting):
        sample_weights = None
        if batch.sample_weights is not None:
            sample_weights = batch.sample_weights.clone().requires_grad_()
        output = module(
            batch.indices.clone(),
            batch.offsets.clone(),
            sample_weights,
            batch_size_per_feature_per_rank=batch.sizes,
        )
        outputs.append(output.detach().float())
        output.backward(batch.gradient.to(output.dtype))
        if sample_weights is not None:
            sample_gradients.append(sample_weights.grad)
    return {
        "output": outputs,
        "sample weights' gradient": sample_gradients,
        "weights": [w.float() for w in module.split_embedding_weights()],
        "states": [state for states in module.split_optimizer_states() for state in states],
    }


def assert_same(actual: Result, expected: Result, **tolerance: float) -> None:
    """All of two results, with the name of what differs."""
    assert actual.keys() == expected.keys()
    for name, tensors in expected.items():
        assert len(actual[name]) == len(tensors), name
        for i, (a, b) in enumerate(zip(actual[name], tensors, strict=True)):
            torch.testing.assert_close(
                a, b, **tolerance, msg=lambda text, what=f"{name} {i}": f"{what}: {text}"
            )
