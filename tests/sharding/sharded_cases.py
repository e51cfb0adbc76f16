"""A collection over ranks against the same one in one process, step by step.

Every rank also trains the whole collection on the batches of all ranks: what it has must be what
that has. `Case` is what a rank runs; plans are rules by table, in words that can be pickled.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import emblib
from emblib import JaggedTensor, KeyedJaggedTensor, optim
from emblib.checkpoints import table_entries
from emblib.collections.configs import EmbeddingBagConfig, EmbeddingConfig
from emblib.collections.optimizers import FusedOptimizer
from emblib.sharding import input_dist, input_messages, sharding_types
from emblib.sharding.codecs import CommPrecision
from emblib.sharding.layout import shape_of
from emblib.sharding.plan import plan_from_shapes
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharded_bags import ShardedEmbeddingBagCollection
from emblib.sharding.sharded_sequences import ShardedEmbeddingCollection
from emblib.sharding.sharded_tables import GradientReduction
from emblib.specs import Pooling
from emblib.storage import Dense, Hash

STEPS = 3
WORDS = {
    "dp": lambda world, i: sharding_types.data_parallel(),
    "tw": lambda world, i: sharding_types.table_wise(i % world.size),
    "rw": lambda world, i: sharding_types.row_wise(),
    "cw": lambda world, i: sharding_types.column_wise(),
    "twrw": lambda world, i: sharding_types.table_row_wise(i % (world.size // world.local_size)),
    "twcw": lambda world, i: sharding_types.table_column_wise(i % (world.size // world.local_size)),
    "grid": lambda world, i: sharding_types.grid(),
}


@dataclass(frozen=True)
class Case:
    """Tables and how they are spread: `plan` has a word or shards for each table."""

    configs: tuple[Any, ...]
    plan: tuple[Any, ...]
    batches: tuple[int, ...] = (5, 4, 3, 2)
    optimizer: Any = field(default_factory=lambda: optim.SGD(0.5))
    weighted: bool = False
    local_size: int | None = None
    ids: torch.dtype = torch.int64
    comm_precision: CommPrecision | None = None
    tolerance: float = 1e-6
    exact_output: bool = False
    variable: bool = False
    least_saved: int = 0


def tables(*poolings: Pooling, storage: Any = None, dims: Sequence[int] = (8, 4, 8, 12)) -> Any:
    """Four tables of unlike dims: one of two features, one feature of two tables, few rows."""
    storages = [storage or Dense()] * 4
    pools = [poolings[i % len(poolings)] for i in range(4)]
    features = (("f0",), ("f1", "f2"), ("f0",), ("f3",))
    rows = (13, 7, 20, 3)
    return tuple(
        EmbeddingBagConfig(
            rows[i], dims[i], f"t{i}", features[i], pooling=pools[i], storage=storages[i]
        )
        for i in range(4)
    )


def sequences(configs: Sequence[EmbeddingBagConfig]) -> tuple[EmbeddingConfig, ...]:
    """The same tables with one vector an id."""
    return tuple(
        EmbeddingConfig(
            c.num_embeddings, c.embedding_dim, c.name, c.feature_names, storage=c.storage
        )
        for c in configs
    )


def batch(case: Case, number: int, size: int) -> KeyedJaggedTensor:
    """Of `size` examples; the same for a number on every rank."""
    generator = torch.Generator().manual_seed(number)
    keys = ["f3", "f1", "f2", "unread", "f0"]
    rows = {key: 5 for key in keys}
    for config in case.configs:
        for key in config.feature_names:
            many = isinstance(config.storage, Hash)
            least = 1 << 40 if many else config.num_embeddings
            rows[key] = min(rows.get(key, least), least) if key != "f0" else 13
    sizes = [size] * len(keys)
    inverse = strides = None
    if case.variable:
        sizes = [max(1, (size + i) // 2) for i in range(len(keys))] if size else sizes
        inverse = (
            keys,
            torch.stack([torch.randint(0, max(1, n), (size,), generator=generator) for n in sizes]),
        )
        strides = [[n] for n in sizes]
    lengths = [torch.randint(0, 4, (n,), generator=generator) for n in sizes]
    values = [
        torch.randint(0, rows[key], (int(own.sum()),), generator=generator)
        for key, own in zip(keys, lengths, strict=True)
    ]
    ids = torch.cat(values)
    weights = torch.rand(ids.numel(), generator=generator) + 0.5 if case.weighted else None
    return KeyedJaggedTensor(
        keys,
        ids.to(case.ids),
        weights,
        torch.cat(lengths).to(case.ids),
        stride_per_key_per_rank=strides,
        inverse_indices=inverse,
    )


def expanded(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A batch with a bag for every example, whichever share one."""
    inverse = batch.inverse_indices_or_none()
    if inverse is None:
        return batch
    values, weights, lengths = [], [], []
    for row, key in enumerate(inverse[0]):
        own = batch[key]
        bags = own.values().split(own.lengths().tolist())
        scales = (
            None if own.weights_or_none() is None else own.weights().split(own.lengths().tolist())
        )
        for bag in inverse[1][row].tolist():
            values.append(bags[bag])
            lengths.append(bags[bag].numel())
            weights += [] if scales is None else [scales[bag]]
    none = batch.values()[:0]
    return KeyedJaggedTensor(
        batch.keys(),
        torch.cat([none, *values]),
        None if batch.weights_or_none() is None else torch.cat([batch.weights()[:0], *weights]),
        batch.lengths().new_tensor(lengths),
    )


def joined(batches: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """The batches of all ranks as one: examples rank after rank."""
    keys = batches[0].keys()
    parts: dict[str, JaggedTensor] = {}
    for key in keys:
        own = [one[key] for one in batches]
        weights = [one.weights_or_none() for one in own]
        parts[key] = JaggedTensor(
            torch.cat([one.values() for one in own]),
            None if weights[0] is None else torch.cat([w for w in weights if w is not None]),
            torch.cat([one.lengths() for one in own]),
        )
    return KeyedJaggedTensor(
        keys,
        torch.cat([parts[key].values() for key in keys]),
        None
        if parts[keys[0]].weights_or_none() is None
        else torch.cat([parts[key].weights() for key in keys]),
        torch.cat([parts[key].lengths() for key in keys]),
    )


def plan_of(case: Case, ranks: RankGroup) -> dict[str, Any]:
    """The case's words as shards."""
    world = sharding_types.World(ranks.size, case.local_size or ranks.local_size)
    rules = {
        config.name: WORDS[word](world, i) if isinstance(word, str) else sharding_types.custom(word)
        for i, (config, word) in enumerate(zip(case.configs, case.plan, strict=True))
    }
    return plan_from_shapes({c.name: shape_of(c) for c in case.configs}, rules, world)


def make_source(case: Case) -> Any:
    """The collection that is sharded; the same on every rank."""
    torch.manual_seed(3)
    if isinstance(case.configs[0], EmbeddingBagConfig):
        return emblib.EmbeddingBagCollection(
            case.configs, is_weighted=case.weighted, optimizer=case.optimizer
        )
    return emblib.EmbeddingCollection(case.configs, optimizer=case.optimizer)


def make_sharded(case: Case, ranks: RankGroup, source: Any, gradients: str = "sum") -> Any:
    """It over ranks."""
    pooled = isinstance(case.configs[0], EmbeddingBagConfig)
    kind = ShardedEmbeddingBagCollection if pooled else ShardedEmbeddingCollection
    plan, how = plan_of(case, ranks), GradientReduction(gradients)
    return kind(source, plan, ranks, comm_precision=case.comm_precision, gradients=how)


def flat(output: Any) -> Tensor:
    """All values of an output as one tensor to compare."""
    if isinstance(output, emblib.KeyedTensor) or hasattr(output, "length_per_key"):
        return output.values()
    return torch.cat([jt.values().reshape(-1) for jt in dict(output.items()).values()])


def train(ranks: RankGroup, case: Case) -> str:
    """Several steps, compared with one process after each; returns what was compared."""
    # Batches are small here, and it shall not matter.
    input_dist._MIN_SAVED_ELEMENTS = case.least_saved
    device = ranks.device
    oracle = make_source(case).to(device)
    sharded = make_sharded(case, ranks, copy.deepcopy(oracle))
    compare_tables(sharded, oracle, 0.0)
    fused = [FusedOptimizer.of(oracle), FusedOptimizer.of(sharded)]
    assert fused[0].group_names() == fused[1].group_names()
    for step in range(STEPS):
        for optimizer in fused:  # as a scheduler does
            for group in optimizer.param_groups if any(optimizer.group_names()) else ():
                group["lr"] *= 0.5
                if step == STEPS - 1 and not case.variable:  # the oracle has no shared bags
                    group["max_gradient"] = 0.5
        # Rows that are not merged into one message leave those of a rank for itself out of it.
        input_messages._MAX_MERGED_NBYTES = -1 if step % 2 else 1 << 19
        batches = [
            batch(case, 10 * step + r, case.batches[r]).to(device) for r in range(ranks.size)
        ]
        outputs = [oracle(one) for one in batches]
        keys = list(outputs[ranks.rank].keys())
        outputs = [flat(one) for one in outputs]
        mine = sharded(batches[ranks.rank])
        assert list(mine.keys()) == keys
        got = flat(mine)
        _close(got, outputs[ranks.rank].detach(), 0.0 if case.exact_output else case.tolerance)
        grads = [
            torch.randn(one.shape, generator=torch.Generator().manual_seed(r + step)).to(device)
            for r, one in enumerate(outputs)
        ]
        got.backward(grads[ranks.rank])
        step_of_all(case, oracle, batches, grads)
        compare_tables(sharded, oracle, case.tolerance)
    return "equal"


def step_of_all(case: Case, oracle: Any, batches: Any, grads: Any) -> None:
    """One step of the whole collection on the batches of all ranks, which are one batch to it."""
    whole = joined([expanded(one) for one in batches])
    output = oracle(whole)
    if isinstance(case.configs[0], EmbeddingBagConfig):
        output.values().backward(torch.cat(grads))
        return
    splits: dict[str, list[Tensor]] = {}
    for one, grad in zip(batches, grads, strict=True):
        sizes = {}
        for name in output:
            dim = output[name].values().shape[1]
            sizes[name] = (int(one[name.split("@")[0]].values().numel()), dim)
        parts = grad.split([n * d for n, d in sizes.values()])
        for (name, (n, d)), part in zip(sizes.items(), parts, strict=True):
            splits.setdefault(name, []).append(part.view(n, d))
    values = [jt.values() for jt in output.values()]
    torch.autograd.backward(values, [torch.cat(splits[name]) for name in output])


def _close(got: Tensor, want: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def compare_tables(sharded: Any, oracle: Any, tolerance: float) -> None:
    """Every part that is here against the same part of the whole: weights and optimizer states."""
    whole = {part.config.name: i for i, part in enumerate(oracle.groups.slices)}
    for part in sharded.local_shards():
        slice_ = part.groups.slices[part.index]
        views = part.groups.views(part.index)
        want = oracle.groups.views(whole[part.table])
        if isinstance(slice_.config.storage, Hash):
            _compare_entries(part, oracle, whole[part.table], tolerance)
            continue
        for name, view in views.items():
            if name.startswith("cores.") or name[-2:-1] == ".":
                stem = name.rsplit(".", 1)[0]
                names = sorted(n for n in want if n.rsplit(".", 1)[0] == stem)
                cores = slice_.config.storage.cores_of(slice_, [want[n] for n in names])
                _close(view, cores[names.index(name)], tolerance)
            else:
                _close(view, slice_.view_of(want[name]), tolerance)


def _compare_entries(part: Any, oracle: Any, number: int, tolerance: float) -> None:
    module, table = part.groups.module_of(part.index)
    whole, whole_table = oracle.groups.module_of(number)
    own = table_entries(module, table).sorted()
    every = table_entries(whole, whole_table).sorted()
    found = torch.isin(every.keys, own.keys).nonzero().view(-1)
    assert found.numel() == len(own)
    index = torch.arange(len(own))
    for name, rows in own.rows.items():
        _close(rows[index], every.rows[name][found], tolerance)
