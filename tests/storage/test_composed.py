"""Tables whose ids share rows, against Python integers and torch's own optimizers."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emblib import (
    CapturedStep,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    Pooling,
    optim,
    storage,
)
from emblib.collections.optimizers import FusedOptimizer
from emblib.sharding import checkpoints
from emblib.storage import Combine, Hashed, Narrow, QuotientRemainder, RowHash, TableSlice

IDS, DIM, BATCH = 50, 8, 7
KINDS: dict[str, tuple[storage.Storage, ...]] = {
    "hashed": (Hashed(5), Hashed(11, seed=3)),
    "remainder": (Hashed(5, hash=RowHash.REMAINDER), Hashed(50, hash=RowHash.REMAINDER)),
    "two functions": (Hashed(6, functions=2), Hashed(9, functions=2, hash=RowHash.REMAINDER)),
    "added": (QuotientRemainder(7, Combine.ADD), QuotientRemainder(1, Combine.ADD)),
    "multiplied": (QuotientRemainder(7), QuotientRemainder(50)),
    "narrow": (Narrow(3), Narrow(3)),
    "concatenated": tuple(QuotientRemainder(d, Combine.CONCATENATE) for d in (7, 13)),
}
OPTIMIZERS: dict[str, tuple[Any, Any]] = {
    "sgd": (optim.SGD(lr=0.3), lambda p: torch.optim.SGD(p, lr=0.3)),
    "adagrad": (optim.Adagrad(lr=0.2), lambda p: torch.optim.Adagrad(p, lr=0.2, eps=1e-8)),
    "deferred": (
        optim.Adagrad(lr=0.2, deferred=True),
        lambda p: torch.optim.Adagrad(p, lr=0.2, eps=1e-8),
    ),
}
WORD = 1 << 64


def splitmix(value: int, number: int) -> int:
    """The finaliser of splitmix64, in unbounded integers."""
    z = (value + (2 * number + 1) * 0x9E3779B97F4A7C15) % WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % WORD
    return (z ^ (z >> 31)) >> 2


def rows_read(kind: Any, i: int) -> list[int]:
    if isinstance(kind, Narrow):
        return [i]
    if isinstance(kind, QuotientRemainder):
        return [i // kind.divisor, i % kind.divisor]
    hashes = [splitmix(i, kind.seed * 64 + k) % kind.rows for k in range(kind.functions)]
    return [i % kind.rows, *hashes[1:]] if kind.hash is RowHash.REMAINDER else hashes


def row_of(kind: Any, tensors: dict[str, Tensor], i: int) -> Tensor:
    reads = rows_read(kind, i)
    if isinstance(kind, Narrow):
        return torch.cat([tensors["weight"][i], torch.zeros(DIM - kind.columns)])
    if isinstance(kind, Hashed):
        return torch.stack([tensors["weight"][r] for r in reads]).sum(0)
    quotient, remainder = tensors["quotients"][reads[0]], tensors["remainders"][reads[1]]
    if kind.combine is Combine.ADD:
        return quotient + remainder
    if kind.combine is Combine.MULTIPLY:
        return (1 + quotient) * remainder
    return torch.cat([quotient, remainder])


def configs(kind: str, **changes: Any) -> list[EmbeddingBagConfig]:
    first, second = KINDS[kind]
    return [
        EmbeddingBagConfig(IDS, DIM, "a", ("f", "g"), storage=first, **changes),
        EmbeddingBagConfig(IDS, DIM, "b", ("h",), storage=second, **changes),
    ]


def batch(
    seed: int, dtype: torch.dtype = torch.int64, *, weighted: bool = False
) -> KeyedJaggedTensor:
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (3 * BATCH,), generator=chance)
    ids = torch.randint(0, IDS, (int(lengths.sum()),), generator=chance)
    weights = torch.rand(ids.numel(), generator=chance) if weighted else None
    return KeyedJaggedTensor(["f", "g", "h"], ids.to(dtype), weights, lengths.to(dtype))


class Plain(nn.Module):
    """The same tables by hand: a row at a time."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.kinds = {c.name: c.storage for c in model.configs}
        self.poolings = {c.name: getattr(c, "pooling", Pooling.NONE) for c in model.configs}
        self.tables = nn.ModuleDict()
        for name, handle in model.handles().items():
            found = {k: nn.Parameter(p.detach().clone()) for k, p in handle.named_parameters()}
            self.tables[name] = nn.ParameterDict(found)

    def forward(self, given: KeyedJaggedTensor) -> Tensor:
        columns = []
        for feature, table in (("f", "a"), ("g", "a"), ("h", "b")):
            jagged, tensors = given[feature], dict(self.tables[table].items())  # type: ignore[operator]
            rows = [row_of(self.kinds[table], tensors, int(i)) for i in jagged.values()]
            weights = jagged.weights_or_none()
            if weights is not None:
                rows = [row * w for row, w in zip(rows, weights, strict=True)]
            if self.poolings[table] is Pooling.NONE:
                columns.append(torch.stack(rows) if rows else torch.empty(0, DIM))
                continue
            bags, at = [], 0
            for n in jagged.lengths().tolist():
                total = sum(rows[at : at + n], torch.zeros(DIM))
                bags.append(total / n if n and self.poolings[table] is Pooling.MEAN else total)
                at += n
            columns.append(torch.stack(bags))
        unpooled = Pooling.NONE in self.poolings.values()
        return torch.cat(columns, 0 if unpooled else 1)


def output(model: Any, given: KeyedJaggedTensor) -> Tensor:
    found = model(given)
    if isinstance(model, EmbeddingCollection):
        return torch.cat([found[key].values() for key in ("f", "g", "h")])
    values: Tensor = found if isinstance(found, Tensor) else found.values()
    return values


def check(model: Any, fused: Any, make_torch: Any, **of_batch: Any) -> None:
    """Train both for some steps; outputs and parameters must agree."""
    plain = Plain(model)
    theirs = make_torch(plain.parameters())
    ours = FusedOptimizer.of(model) if fused.deferred else None
    for step in range(4):
        given = batch(step, **of_batch)
        out, expected = output(model, given), output(plain, given)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
        target = torch.linspace(-1, 1, out.numel()).view(out.shape)
        theirs.zero_grad()
        if ours is not None:
            ours.zero_grad()
        (out * target).sum().backward()
        (expected * target).sum().backward()
        theirs.step()
        if ours is not None:
            ours.step()
    for name, handle in model.handles().items():
        for key, parameter in handle.named_parameters():
            wanted = plain.tables[name][key].detach()  # type: ignore[index]
            torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_torch(kind: str, optimizer: str) -> None:
    fused, make_torch = OPTIMIZERS[optimizer]
    check(EmbeddingBagCollection(configs(kind), optimizer=fused), fused, make_torch)


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_means(kind: str, dtype: torch.dtype, pooling: str) -> None:
    fused, make_torch = OPTIMIZERS["sgd"]
    tables = configs(kind, pooling=pooling)
    model = EmbeddingBagCollection(tables, optimizer=fused, is_weighted=True)
    check(model, fused, make_torch, dtype=dtype, weighted=True)


@pytest.mark.parametrize("kind", KINDS)
def test_one_vector_per_id(kind: str) -> None:
    fused, make_torch = OPTIMIZERS["adagrad"]
    tables = [
        EmbeddingConfig(
            c.num_embeddings, c.embedding_dim, c.name, c.feature_names, storage=c.storage
        )
        for c in configs(kind)
    ]
    check(EmbeddingCollection(tables, optimizer=fused), fused, make_torch)


@pytest.mark.parametrize("kind", KINDS)
def test_without_an_optimizer_gradients_are_those_of_torch(kind: str) -> None:
    model = EmbeddingBagCollection(configs(kind))
    plain = Plain(model)
    given = batch(0)
    output(model, given).square().sum().backward()
    output(plain, given).square().sum().backward()
    for name, handle in model.handles().items():
        for key, parameter in handle.named_parameters():
            wanted = plain.tables[name][key].grad  # type: ignore[index]
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_tables_of_one_kind_share_a_kernel_and_have_the_bits_of_tables_alone(kind: str) -> None:
    model = EmbeddingBagCollection(configs(kind), optimizer=optim.Adagrad(lr=0.1))
    assert len(model.groups.groups) == 1
    given = batch(1)
    together = model(given)
    for config in model.configs:
        alone = EmbeddingBagCollection([config], optimizer=optim.Adagrad(lr=0.1))
        alone.load_state_dict(
            {k: v for k, v in model.state_dict().items() if k.split(".")[1] == config.name}
        )
        for feature in config.feature_names:
            assert torch.equal(alone(given)[feature], together[feature])


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_checkpoints_continue_alike(kind: str) -> None:
    model = EmbeddingBagCollection(configs(kind), optimizer=optim.Adam(lr=0.1))
    output(model, batch(0)).sum().backward()
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    loaded = EmbeddingBagCollection(configs(kind), optimizer=optim.Adam(lr=0.1))
    loaded.load_state_dict(model.state_dict())
    FusedOptimizer.of(loaded).load_state_dict(FusedOptimizer.of(model).state_dict())
    meta = EmbeddingBagCollection(configs(kind), optimizer=optim.Adam(lr=0.1), device="meta")
    meta.to_empty(device="cpu")
    meta.load_state_dict(model.state_dict())
    FusedOptimizer.of(meta).load_state_dict(FusedOptimizer.of(model).state_dict())
    for one in (model, *copies, loaded, meta):
        output(one, batch(1)).square().sum().backward()
    for one in (*copies, loaded, meta):
        assert torch.equal(output(one, batch(2)), output(model, batch(2)))


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_tables_stay(kind: str) -> None:
    model = EmbeddingBagCollection(configs(kind), optimizer=optim.SGD(lr=1.0))
    frozen = model.handles()["a"]
    frozen.requires_grad_(False)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    output(model, batch(0)).sum().backward()
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]) == (".a." in key or "id_layout" in key)


@pytest.mark.parametrize("kind", KINDS)
def test_skipped_and_invalid_ids(kind: str) -> None:
    model = EmbeddingBagCollection(configs(kind), optimizer=optim.SGD(lr=0.1))
    lengths = torch.tensor([2, 0, 2])
    skipped = KeyedJaggedTensor(["f", "g", "h"], torch.tensor([-1, 3, -1, 7]), None, lengths)
    valid = KeyedJaggedTensor(["f", "g", "h"], torch.tensor([3, 7]), None, lengths // 2)
    assert torch.equal(output(model, skipped), output(model, valid))
    invalid = KeyedJaggedTensor(["f", "g", "h"], torch.tensor([IDS, 3, 1 << 40, 7]), None, lengths)
    of_id_0 = KeyedJaggedTensor(["f", "g", "h"], torch.tensor([0, 3, 0, 7]), None, lengths)
    with pytest.warns(UserWarning, match="2 indices and 0 offsets out of bounds"):
        assert torch.equal(output(model, invalid), output(model, of_id_0))


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_of_a_skipped_id_is_not_read(kind: str, pooling: str) -> None:
    table = EmbeddingBagConfig(IDS, DIM, "t", storage=KINDS[kind][0], pooling=Pooling(pooling))
    bags = EmbeddingBagCollection([table], is_weighted=True, optimizer=optim.SGD(0.1))
    weights = torch.tensor([2.0, torch.nan, torch.inf, 3.0], requires_grad=True)
    ids, lengths = torch.tensor([7, -1, -1, 9]), torch.tensor([2, 2])
    out = bags(KeyedJaggedTensor(["t"], ids, weights, lengths)).values()
    assert out.isfinite().all()
    out.sum().backward()
    assert weights.grad is not None
    assert weights.grad[1:3].tolist() == [0, 0]
    assert all(parameter.isfinite().all() for parameter in bags.parameters())


@pytest.mark.parametrize("kind", ["dense", *KINDS])
def test_invalid_offsets_are_those_of_dense_tables(kind: str) -> None:
    storages = {"dense": storage.Dense()} | {name: of[0] for name, of in KINDS.items()}
    one = EmbeddingBagCollection(
        [EmbeddingBagConfig(IDS, DIM, "a", storage=storages[kind])], optimizer=optim.SGD(lr=0.1)
    )
    ids = torch.arange(7)
    for last in (30, 10_000_000):
        with pytest.warns(UserWarning, match="0 indices and 1 offsets out of bounds"):
            found = one.groups(ids, torch.tensor([0, 2, last]))
        assert torch.equal(found, one.groups(ids, torch.tensor([0, 2, 7])))
    with pytest.raises(RuntimeError, match=r"lengths must be >= 0, got -2 in feature 'a'"):
        one.groups(ids, torch.tensor([0, 5, 3, 7]))
    with pytest.raises(RuntimeError, match="the last bag would be lost"):
        one.groups(ids, torch.tensor([0, 2, 5]))


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (Hashed(5), Hashed(5, seed=1), r"is Hashed\(.*seed=0, .*here Hashed\(.*seed=1, "),
        (Hashed(5), Hashed(5, functions=2), r"reads=1, .*reads=2, "),
        (Hashed(5), Hashed(5, hash=RowHash.REMAINDER), "by_remainder=0, .*by_remainder=1, "),
        (
            QuotientRemainder(7),
            QuotientRemainder(7, Combine.ADD),
            r"is QuotientRemainder\(num_embeddings=.*divisor=7, combine=multiply\), .*combine=add",
        ),
        (storage.Dense(), Hashed(IDS), "lacks id_layout"),
        (Hashed(IDS), storage.Dense(), "id_layout: ids share the rows of the saved table"),
    ],
)
def test_states_of_other_ids_are_refused(
    saved: Any, loaded: Any, message: str, tmp_path: Path
) -> None:
    source, target = (
        EmbeddingBagCollection([EmbeddingBagConfig(IDS, DIM, "a", storage=kind)])
        for kind in (saved, loaded)
    )
    before = {name: p.clone() for name, p in target.named_parameters()}
    checkpoints.save({"model": source}, tmp_path)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match=message):
            target.load_state_dict(source.state_dict(), strict=strict)
        with pytest.raises(checkpoints.CheckpointError, match=message):
            checkpoints.load({"model": target}, tmp_path, strict=strict)
        assert all(torch.equal(p, before[name]) for name, p in target.named_parameters())


def test_multiplied_rows_are_not_decayed_as_they_are_pooled() -> None:
    decay = optim.RowwiseAdagrad(lr=0.1, global_decay=optim.GlobalDecay(0.1))
    tables = [EmbeddingBagConfig(IDS, DIM, "a", storage=QuotientRemainder(7))]
    with pytest.raises(ValueError, match="multiplied first: use combine='add'"):
        EmbeddingBagCollection(tables, optimizer=decay)


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch(kind: str) -> None:
    model = EmbeddingBagCollection(configs(kind), optimizer=optim.SGD(lr=0.1))
    nothing = torch.empty(0, dtype=torch.int64)
    given = KeyedJaggedTensor(["f", "g", "h"], nothing, None, nothing)
    assert output(model, given).shape == (0, 3 * DIM)
    bags = KeyedJaggedTensor(["f", "g", "h"], nothing, None, torch.zeros(6, dtype=torch.int64))
    assert torch.equal(output(model, bags), torch.zeros(2, 3 * DIM))


@pytest.mark.parametrize("optimizer", [optim.RowwiseAdagrad(lr=0.1), optim.Adam(lr=0.1), None])
@pytest.mark.parametrize("kind", KINDS)
def test_the_planner_knows_the_bytes(kind: str, optimizer: Any) -> None:
    model = EmbeddingBagCollection(configs(kind), optimizer=optimizer)
    counted = sum(
        c.storage.nbytes(TableSlice.whole(c), optimizer, "cpu").device for c in model.configs
    )
    sizes = model.groups.nbytes()
    gradients = sizes["weights"] if optimizer is None else 0
    assert counted == sizes["weights"] + sizes["optimizer_state"] + gradients


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_rows_and_outputs(kind: str, dtype: torch.dtype) -> None:
    model = EmbeddingBagCollection(configs(kind, data_type=dtype), optimizer=optim.SGD(lr=0.1))
    found = output(model, batch(0))
    torch.testing.assert_close(found, output(Plain(model).float(), batch(0)), rtol=1e-2, atol=1e-3)
    model.groups.set_output_dtype(dtype)
    assert output(model, batch(0)).dtype is dtype
    output(model, batch(0)).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_quantizing_a_collection_leaves_shared_rows_as_they_are(kind: str) -> None:
    model = EmbeddingBagCollection(configs(kind), optimizer=optim.SGD(lr=0.1))
    assert torch.equal(output(model.quantized(), batch(0)), output(model, batch(0)))


@pytest.mark.parametrize("combine", Combine)
@pytest.mark.parametrize(("ids", "share"), [(4, 1.0), (100, 0.2), (9066, 0.25), (10**7, 1 / 64)])
def test_a_share_of_the_rows_is_what_two_parts_have(
    ids: int, share: float, combine: Combine
) -> None:
    kind = QuotientRemainder.for_share(ids, share, combine)
    rows = [component.rows for component in kind.components(ids)]
    assert sum(rows) == pytest.approx(share * ids, abs=1)
    assert rows[1] >= rows[0]
    assert kind.combine is combine


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hashed(0), "rows must be"),
        (lambda: Hashed(5, functions=0), "functions must be"),
        (lambda: Hashed(5, hash="murmur"), "murmur"),  # type: ignore[arg-type]
        (lambda: EmbeddingBagConfig(4, 8, "t", storage=Hashed(5)), "at most the 4 ids of 't'"),
        (lambda: Hashed(5, functions=65), "at most 64"),
        (lambda: Hashed(5, seed=2**57), "at most"),
        (lambda: QuotientRemainder(0), "divisor must be"),
        (lambda: QuotientRemainder.for_share(100, 0.19), "100 ids need 20 rows in two components"),
        (lambda: QuotientRemainder.for_share(100, 1.5), r"share must be in \(0, 1\]"),
        (lambda: QuotientRemainder.for_share(0, 0.5), "num_embeddings must be"),
        (lambda: EmbeddingBagConfig(4, 8, "t", storage=Narrow(8)), "fewer than the 8 of 't'"),
        (lambda: EmbeddingBagConfig(4, 8, "t", storage=QuotientRemainder(5)), "at most the 4 ids"),
        (
            lambda: EmbeddingBagConfig(
                4, 7, "t", storage=QuotientRemainder(2, Combine.CONCATENATE)
            ),
            "must be even",
        ),
        (
            lambda: EmbeddingBagConfig(9, 8, "t", storage=Hashed(5), init_fn=nn.init.zeros_),
            "use weight_init_min",
        ),
        (
            lambda: TableSlice(EmbeddingBagConfig(9, 8, "t", storage=Hashed(5)), (0, 5), (0, 8)),
            "not cut by rows",
        ),
    ],
)
def test_wrong_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_narrow_tables_of_unlike_widths_share_a_kernel() -> None:
    tables = [
        EmbeddingBagConfig(IDS, dim, name, (feature,), storage=Narrow(width))
        for dim, name, feature, width in ((8, "a", "f", 3), (12, "b", "g", 5), (4, "c", "h", 1))
    ]
    model = EmbeddingBagCollection(tables, optimizer=optim.SGD(lr=0.1))
    assert len(model.groups.groups) == 1
    given = batch(0)
    found = model(given)
    for config in tables:
        width = config.storage.columns
        weight = model.state_dict()[f"embedding_bags.{config.name}.weight"]
        assert weight.shape == (IDS, width)
        jagged = given[config.feature_names[0]]
        expected = nn.functional.embedding_bag(
            jagged.values(), weight, jagged.offsets(), mode="sum", include_last_offset=True
        )
        got = found[config.feature_names[0]]
        torch.testing.assert_close(got[:, :width], expected)
        assert not got[:, width:].any()


def test_initial_values_lie_within_the_bounds_of_the_table() -> None:
    tables = [
        EmbeddingBagConfig(
            10_000, 16, "t", weight_init_min=-0.2, weight_init_max=0.4, storage=Hashed(5000)
        ),
        EmbeddingBagConfig(10_000, 16, "u", storage=Hashed(5000, functions=4)),
    ]
    model = EmbeddingBagCollection(tables, optimizer=optim.SGD(lr=0.1))
    first, second = (p.detach() for p in model.parameters())
    assert float(first.min()) == pytest.approx(-0.2, abs=1e-3)
    assert float(first.max()) == pytest.approx(0.4, abs=1e-3)
    # Of four rows that are added, each has half of the deviation of the default.
    assert float(second.std()) == pytest.approx(0.01 / 3**0.5 / 2, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_padding_counts_in_no_mean(kind: str, is_weighted: bool) -> None:
    """A captured step pads its batch, on a CPU too."""
    tables = [
        EmbeddingBagConfig(IDS, DIM, name, storage=of_table, pooling=Pooling.MEAN)
        for name, of_table in zip(("left", "right"), KINDS[kind], strict=True)
    ]
    plain = EmbeddingBagCollection(tables, is_weighted=is_weighted, optimizer=optim.SGD(0.1))
    padded = copy.deepcopy(plain)
    lengths = torch.tensor([2, 0, 3, 1, 0, 2])
    ids = torch.randint(IDS, (int(lengths.sum()),))
    weights = torch.rand(len(ids)) if is_weighted else None
    batch = KeyedJaggedTensor(["left", "right"], ids, weights, lengths=lengths)

    def train(bags: EmbeddingBagCollection, batch: KeyedJaggedTensor) -> Tensor:
        out = bags(batch).values()
        out.square().sum().backward()
        return out

    step = CapturedStep(lambda batch: train(padded, batch), bounds=[32])
    for _ in range(2):  # the second step reads what the first one has updated
        torch.testing.assert_close(step(batch), train(plain, batch), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_padding_of_the_caller_counts_in_no_mean(kind: str, *, is_compiled: bool) -> None:
    table = EmbeddingBagConfig(IDS, DIM, "left", storage=KINDS[kind][0], pooling=Pooling.MEAN)
    bags = EmbeddingBagCollection([table], is_weighted=True)
    ids, weights, offsets = torch.arange(6), torch.rand(6), torch.tensor([0, 4, 4, 6])
    expected = bags(KeyedJaggedTensor(["left"], ids, weights, offsets=offsets)).values()
    padded = [torch.cat([torch.full((3,), -1).to(x.dtype), x]) for x in (ids, weights)]
    look_up = torch.compile(bags, backend="eager") if is_compiled else bags
    found = look_up(KeyedJaggedTensor(["left"], *padded, offsets=offsets + 3)).values()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
