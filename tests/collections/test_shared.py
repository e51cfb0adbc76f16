"""Shared tables against plain PyTorch: one parameter in several lookups, one step per backward."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import emblib
from emblib import Placement, Pooling, optim
from emblib.collections.optimizers import FusedOptimizer, apply_optimizer_in_backward
from emblib.jagged import KeyedJaggedTensor
from tests.saved import saved_and_loaded

ROWS, DIM, BATCH = 23, 5, 4
FEATURES = ("sums", "more", "own", "means", "scaled", "history", "late")


class Model(nn.Module):
    """Four collections that read one table: sums, weighted means, and vectors; one own table."""

    def __init__(self, shared: emblib.SharedTables, device: Any = None) -> None:
        super().__init__()
        own = emblib.EmbeddingBagConfig(9, 3, "own", optimizer=optim.SGD(0.5))
        item = shared.pooled("item", ["sums", "more"])
        self.sums = emblib.EmbeddingBagCollection([item, own], device, shared=shared)
        item = shared.pooled("item", ["means"], Pooling.MEAN)
        self.means = emblib.EmbeddingBagCollection([item], device, shared=shared)
        item = shared.pooled("item", ["scaled"], Pooling.MEAN)
        self.scaled = emblib.EmbeddingBagCollection([item], device, shared=shared, is_weighted=True)
        item = shared.unpooled("item", ["history", "late"])
        self.history = emblib.EmbeddingCollection([item], device, shared=shared)

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        vectors = self.history(batch)
        outs = [self.sums(batch), self.means(batch), self.scaled(batch)]
        return torch.cat(
            [out.values().flatten() for out in outs]
            + [vectors[name].values().flatten() for name in ("history", "late")]
        )


def expected(weight: Tensor, own: Tensor, batch: KeyedJaggedTensor) -> Tensor:
    """Return the output of `Model`, by plain lookups in one parameter."""
    parts = batch.to_dict()

    def pooled(name: str, table: Tensor, mode: str = "sum") -> Tensor:
        offsets = parts[name].offsets()[:-1]
        ids = parts[name].values()
        return functional.embedding_bag(ids, table, offsets, mode=mode)

    scaled = parts["scaled"]
    offsets, lengths = scaled.offsets()[:-1], scaled.lengths().clamp(min=1)
    products = functional.embedding_bag(
        scaled.values(), weight, offsets, mode="sum", per_sample_weights=scaled.weights()
    )
    first = [pooled("sums", weight), pooled("more", weight), pooled("own", own)]
    return torch.cat(
        [torch.cat(first, 1).flatten(), pooled("means", weight, "mean").flatten()]
        + [(products / lengths.unsqueeze(1)).flatten()]
        + [functional.embedding(parts[n].values(), weight).flatten() for n in ("history", "late")]
    )


def make_batch(seed: int) -> KeyedJaggedTensor:
    torch.manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES) * BATCH,))
    count = int(lengths.sum())
    ids, weights = torch.randint(0, 9, (count,)), torch.rand(count)
    return KeyedJaggedTensor.from_lengths_sync(list(FEATURES), ids, lengths, weights)


def make(optimizer: Any = None, device: Any = None, **choices: Any) -> Model:
    config = emblib.EmbeddingConfig(ROWS, DIM, "item", **choices)
    return Model(emblib.SharedTables([config], device, optimizer=optimizer), device)


def weight_of(model: Model) -> nn.Parameter:
    return model.history.embeddings["item"].weight


def loss_of(out: Tensor) -> Tensor:
    factors = torch.linspace(-1, 1, out.numel()).to(out.device)
    return (out.flatten() * factors).sum() + (out**2).sum()


def torch_adam(parameter: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam([parameter], lr=0.1)


OPTIMIZERS: list[tuple[Any, Callable[[nn.Parameter], torch.optim.Optimizer]]] = [
    (optim.SGD(0.1), lambda p: torch.optim.SGD([p], lr=0.1)),
    (optim.Adagrad(0.1, eps=1e-10), lambda p: torch.optim.Adagrad([p], lr=0.1)),
    (optim.Adam(0.1), torch_adam),
]
CACHE = emblib.CacheConfig(sets=1)
STORAGES = [
    emblib.storage.Dense(),
    emblib.storage.Dense(Placement.MANAGED),
    emblib.storage.Dense(Placement.MANAGED_CACHING, CACHE),
]


class Reference:
    """One parameter in all lookups, and an optimizer that steps its coalesced gradient."""

    def __init__(self, model: Model, make_optimizer: Any) -> None:
        own = model.sums.embedding_bags["own"].weight
        self.weight, self.own = (
            nn.Parameter(one.detach().cpu().clone()) for one in (weight_of(model), own)
        )
        self.steps = [make_optimizer(self.weight), torch.optim.SGD([self.own], lr=0.5)]

    def step(self) -> None:
        if isinstance(self.steps[0], torch.optim.SparseAdam) and self.weight.grad is not None:
            self.weight.grad = self.weight.grad.to_sparse(1)
        for step in self.steps:
            step.step()
            step.zero_grad()

    def check(self, model: Model) -> None:
        torch.testing.assert_close(weight_of(model).detach().cpu(), self.weight.detach())
        own = model.sums.embedding_bags["own"].weight.detach().cpu()
        torch.testing.assert_close(own, self.own.detach())


@pytest.mark.parametrize(("optimizer", "of_torch"), OPTIMIZERS, ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("storage", STORAGES, ids=["device", "managed", "cached"])
def test_steps_are_those_of_one_parameter(
    optimizer: Any, of_torch: Any, storage: Any, device: torch.device
) -> None:
    model = make(optimizer, device, storage=storage)
    reference = Reference(model, of_torch)
    for seed in range(4):
        batch = make_batch(seed)
        out, wanted = model(batch.to(device)), expected(reference.weight, reference.own, batch)
        torch.testing.assert_close(out.cpu(), wanted)
        loss_of(out).backward()
        loss_of(wanted).backward()
        reference.step()
    reference.check(model)
    assert model.history.handles()["item"].module.step == 4


@pytest.mark.parametrize("make_optimizer", [lambda: optim.Adagrad(0.1, eps=1e-10, deferred=True)])
def test_deferred_steps_after_several_backwards(make_optimizer: Any) -> None:
    model = make(make_optimizer())
    reference = Reference(model, OPTIMIZERS[1][1])
    steps = FusedOptimizer.of(model)
    for seed in (0, 1):
        loss_of(model(make_batch(seed))).backward()
        loss_of(expected(reference.weight, reference.own, make_batch(seed))).backward()
        # The own table is updated by every backward.
        reference.steps[1].step()
        reference.steps[1].zero_grad()
    steps.step()
    reference.steps[0].step()
    reference.check(model)


def test_without_optimizer_gradients_add_up() -> None:
    model = make()
    reference = Reference(model, OPTIMIZERS[0][1])
    for seed in (0, 1):
        loss_of(model(make_batch(seed))).backward()
        loss_of(expected(reference.weight, reference.own, make_batch(seed))).backward()
        reference.steps[1].step()
        reference.steps[1].zero_grad()
    torch.testing.assert_close(weight_of(model).grad, reference.weight.grad)


def test_several_forwards_are_one_step_and_unused_outputs_none() -> None:
    model = make(optim.Adagrad(0.1, eps=1e-10))
    reference = Reference(model, OPTIMIZERS[1][1])
    model(make_batch(5))  # not in the loss
    with torch.no_grad():
        model(make_batch(6))
    model.eval()
    total = loss_of(model(make_batch(0))) + loss_of(model(make_batch(1)))
    model.means(make_batch(2))
    total.backward()
    weight, own = reference.weight, reference.own
    wanted = sum(loss_of(expected(weight, own, make_batch(seed))) for seed in (0, 1))
    assert isinstance(wanted, Tensor)
    wanted.backward()
    reference.steps[0].step()
    torch.testing.assert_close(weight_of(model).detach(), reference.weight.detach())
    assert model.history.handles()["item"].module.step == 1


def test_one_lookup_in_the_loss_has_the_bits_of_an_own_table() -> None:
    shared = emblib.SharedTables([emblib.EmbeddingConfig(ROWS, DIM, "item")], optimizer=_ADAM)
    item = shared.pooled("item", ["sums"])
    model = emblib.EmbeddingBagCollection([item], shared=shared)
    alone = emblib.EmbeddingBagCollection([item], optimizer=_ADAM)
    alone.load_state_dict(model.state_dict())
    for seed in range(3):
        for one in (model, alone):
            loss_of(one(make_batch(seed)).values()).backward()
    assert torch.equal(model.state_dict()[_KEY], alone.state_dict()[_KEY])


_ADAM, _KEY = optim.Adam(0.1), "embedding_bags.item.weight"


def test_a_graph_that_is_retained_makes_a_step_per_backward() -> None:
    model = make(optim.SGD(0.1))
    reference = Reference(model, OPTIMIZERS[0][1])
    loss = model(make_batch(0)).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
        expected(reference.weight, reference.own, make_batch(0)).sum().backward()
        reference.step()
    reference.check(model)


def test_gradient_of_sample_weights_is_that_before_the_step() -> None:
    model = make(optim.SGD(0.1))
    reference = Reference(model, OPTIMIZERS[0][1])
    batch = make_batch(0)
    grads = []
    for forward in (model, lambda b: expected(reference.weight, reference.own, b)):
        weights = batch.weights().clone().requires_grad_()
        copied = KeyedJaggedTensor(list(FEATURES), batch.values(), weights, batch.lengths())
        loss_of(forward(copied)).backward()
        grads.append(weights.grad)
    torch.testing.assert_close(*grads)
    reference.step()
    reference.check(model)


def test_backward_without_the_table_leaves_it() -> None:
    model = make(optim.SGD(0.1))
    before = weight_of(model).detach().clone()
    scale = torch.ones((), requires_grad=True)
    torch.autograd.grad(loss_of(model(make_batch(0))) * scale, scale)
    weight_of(model).requires_grad_(False)
    (model.sums(make_batch(0)).values().sum() * scale).backward()
    assert torch.equal(weight_of(model).detach(), before)
    weight_of(model).requires_grad_(True)
    loss_of(model(make_batch(0))).backward()
    assert not torch.equal(weight_of(model).detach(), before)


def test_a_failed_backward_is_forgotten() -> None:
    model = make(optim.SGD(0.1))
    reference = Reference(model, OPTIMIZERS[0][1])
    batch = make_batch(0)
    out = model.means(batch).values()
    broken = model.sums(batch).values().clone()

    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    broken.register_hook(fail)
    with pytest.raises(ArithmeticError):
        (broken.sum() + out.sum()).backward()
    loss_of(model(batch)).backward()
    loss_of(expected(reference.weight, reference.own, batch)).backward()
    reference.step()
    reference.check(model)


def test_gradients_of_many_failed_backwards_are_dropped_with_a_warning() -> None:
    model = make(optim.SGD(0.1))

    def fail(grad: Tensor) -> None:
        raise ArithmeticError

    def fail_in_backward() -> None:
        broken = model.sums(make_batch(0)).values().clone()
        broken.register_hook(fail)
        with pytest.raises(ArithmeticError):
            (model.means(make_batch(0)).values().sum() + broken.sum()).backward()

    for _ in range(16):
        fail_in_backward()
    with pytest.warns(UserWarning, match="dropped the gradients"):
        fail_in_backward()


@pytest.mark.parametrize("overflows", [False, True])
def test_gradients_of_a_scaler(overflows: bool) -> None:
    model = make(optim.SGD(0.1))
    reference = Reference(model, OPTIMIZERS[0][1])
    fused = FusedOptimizer.of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    loss = loss_of(model(make_batch(0)))
    if overflows:
        loss = loss * torch.inf
    scaler.scale(loss).backward()
    scaler.step(fused)
    scaler.update()
    if not overflows:
        loss_of(expected(reference.weight, reference.own, make_batch(0))).backward()
        reference.step()
    reference.check(model)
    assert scaler.get_scale() == (32.0 if overflows else 64.0)
    assert model.history.handles()["item"].module.step == (0 if overflows else 1)


def test_names_are_those_of_the_first_collection() -> None:
    model = make(optim.Adagrad(0.1))
    names = ["sums.embedding_bags.item.weight", "sums.embedding_bags.own.weight"]
    assert [name for name, _ in model.named_parameters()] == names
    assert list(model.state_dict()) == names
    assert list(model.history.state_dict()) == ["embeddings.item.weight"]
    fused = FusedOptimizer.of(model)
    assert sorted(fused.keyed_state()) == names
    loss_of(model(make_batch(0))).backward()
    state, other = copy.deepcopy(fused.state_dict()), make(optim.Adagrad(0.1))
    other.load_state_dict(model.state_dict())
    FusedOptimizer.of(other).load_state_dict(state)
    for one in (model, other):
        loss_of(one(make_batch(1))).backward()
    assert torch.equal(weight_of(model).detach(), weight_of(other).detach())


def _via_pickle(model: Model) -> Model:
    copied: Model = pickle.loads(pickle.dumps(model))
    return copied


def _via_save(model: Model) -> Model:
    return saved_and_loaded(model, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, _via_pickle, _via_save, lambda m: m.float()])
@pytest.mark.parametrize("storage", STORAGES[::2], ids=["device", "cached"])
def test_copies_share_as_the_original(copied: Any, storage: Any) -> None:
    model = make(optim.Adagrad(0.1, eps=1e-10), storage=storage)
    loss_of(model(make_batch(7))).backward()
    state = copy.deepcopy(model.state_dict())
    other = copied(model)
    parts = (other.sums.embedding_bags, other.means.embedding_bags, other.history.embeddings)
    assert len({id(part["item"].weight) for part in parts}) == 1
    assert len(list(other.parameters())) == 2
    loss_of(other(make_batch(0))).backward()
    assert other.history.handles()["item"].module.step == 2
    if other is not model:
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
        loss_of(model(make_batch(0))).backward()
        assert torch.equal(weight_of(model).detach(), weight_of(other).detach())


def test_to_empty_from_meta() -> None:
    config = emblib.EmbeddingConfig(ROWS, DIM, "item")
    shared = emblib.SharedTables([config], "meta", optimizer=optim.SGD(0.1))
    model = Model(shared)
    model.to_empty(device="cpu")
    model.sums.reset_parameters()
    assert float(weight_of(model).detach().abs().max()) <= ROWS**-0.5
    reference = Reference(model, OPTIMIZERS[0][1])
    loss_of(model(make_batch(0))).backward()
    loss_of(expected(reference.weight, reference.own, make_batch(0))).backward()
    reference.step()
    reference.check(model)


def test_optimizer_in_backward_of_all_parameters() -> None:
    model = make()
    reference = Reference(model, OPTIMIZERS[1][1])
    weight = weight_of(model)
    apply_optimizer_in_backward(torch.optim.Adagrad, [weight], {"lr": 0.1, "eps": 1e-10})
    assert weight_of(model) is weight is model.sums.embedding_bags["item"].weight
    for seed in range(2):
        loss_of(model(make_batch(seed))).backward()
        loss_of(expected(reference.weight, reference.own, make_batch(seed))).backward()
        reference.step()
    reference.check(model)


def test_features_that_differ_in_their_bags() -> None:
    shared = emblib.SharedTables([emblib.EmbeddingConfig(ROWS, DIM, "item")], optimizer=_ADAM)
    configs = shared.pooled("item", ["a", "b"], Pooling.MEAN), shared.unpooled("item", ["a", "b"])
    pooled = emblib.EmbeddingBagCollection(configs[:1], shared=shared)
    vectors = emblib.EmbeddingCollection(configs[1:], shared=shared)
    lengths, inverse = torch.tensor([2, 0, 1, 3, 1]), torch.tensor([[0, 1, 1], [2, 0, 1]])
    ids = torch.tensor([3, 4, 4, 7, 3, 3, 9])
    batch = KeyedJaggedTensor(
        ["a", "b"],
        ids,
        lengths=lengths,
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["a", "b"], inverse),
    )
    weight = nn.Parameter(shared["item"].weight.detach().clone())
    offsets = torch.tensor([0, 2, 2, 3, 6])
    bags = functional.embedding_bag(ids, weight, offsets, mode="mean").split([2, 3])
    wanted = torch.cat([bag[row] for bag, row in zip(bags, inverse, strict=True)], 1)
    out = pooled(batch).values()
    torch.testing.assert_close(out, wanted)
    both = vectors(batch)
    found = torch.cat([both[name].values() for name in ("a", "b")])
    (loss_of(out) + loss_of(found)).backward()
    (loss_of(wanted) + loss_of(functional.embedding(ids, weight))).backward()
    assert weight.grad is not None
    weight.grad = weight.grad.to_sparse(1)
    torch.optim.SparseAdam([weight], lr=0.1).step()
    torch.testing.assert_close(shared["item"].weight.detach(), weight.detach())


def test_prefetched_batches_of_a_cached_table() -> None:
    model = make(optim.SGD(0.1), storage=STORAGES[2])
    reference = Reference(model, OPTIMIZERS[0][1])
    parts = [(model.means, "means"), (model.history, "history")]
    batches = []
    for _, name in parts:
        one = make_batch(3)[name]
        batches.append(KeyedJaggedTensor([name], one.values(), None, one.lengths()))
    history = KeyedJaggedTensor.concat([batches[1], _renamed(batches[1], "late")])
    batches[1] = history
    for (part, _), batch in zip(parts, batches, strict=True):
        part.groups.prefetch(batch.values(), batch.offsets())
    out = model.means(batches[0]).values()
    found = model.history(history)
    (out.sum() + loss_of(found["late"].values())).backward()
    ids, offsets = batches[0].values(), batches[0].offsets()[:-1]
    wanted = functional.embedding_bag(ids, reference.weight, offsets, mode="mean").sum()
    late = history["late"].values()
    (wanted + loss_of(functional.embedding(late, reference.weight))).backward()
    reference.steps[0].step()
    torch.testing.assert_close(weight_of(model).detach(), reference.weight.detach())
    assert model.history.handles()["item"].module.cache_stats().calls == 2


def _renamed(batch: KeyedJaggedTensor, name: str) -> KeyedJaggedTensor:
    return KeyedJaggedTensor([name], batch.values(), None, batch.lengths())


@pytest.mark.slow
def test_a_compiled_model_breaks_its_graph_at_the_table() -> None:
    model = make(optim.SGD(0.1))
    reference = Reference(model, OPTIMIZERS[0][1])
    compiled = torch.compile(model, backend="eager")
    loss_of(compiled(make_batch(0))).backward()
    loss_of(expected(reference.weight, reference.own, make_batch(0))).backward()
    reference.step()
    reference.check(model)


@pytest.mark.parametrize("kept", ["sums.embedding_bags", "means.embedding_bags", "both", "other"])
def test_state_dicts_with_duplicates(kept: str) -> None:
    model, source = make(optim.SGD(0.1)), make(optim.SGD(0.1))
    rows = weight_of(source).detach().clone()
    state = source.state_dict()
    del state["sums.embedding_bags.item.weight"]
    names = ["sums.embedding_bags", "means.embedding_bags"] if kept in ("both", "other") else [kept]
    for name in names:
        state[f"{name}.item.weight"] = rows.clone()
    if kept == "other":
        state["means.embedding_bags.item.weight"] += 1
        with pytest.raises(RuntimeError, match="remove one of the two entries"):
            model.load_state_dict(state)
        return
    model.load_state_dict(state)
    assert torch.equal(weight_of(model).detach(), rows)
    del state[f"{names[0]}.item.weight"]
    if len(names) == 1:
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(state)


def test_ways_out_of_errors() -> None:
    config = emblib.EmbeddingConfig(ROWS, DIM, "item")
    for storage in (emblib.storage.Hash(), emblib.storage.TensorTrain(ranks=(2, 2))):
        with pytest.raises(ValueError, match="one collection all features"):
            emblib.SharedTables([emblib.EmbeddingConfig(64, 8, "item", storage=storage)])
    with pytest.raises(ValueError, match="twice"):
        emblib.SharedTables([config, config])
    decay = optim.RowwiseAdagrad(0.1, global_decay=optim.GlobalDecay(0.9))
    with pytest.raises(ValueError, match="leave global_decay out"):
        emblib.SharedTables([config], optimizer=decay)
    shared = emblib.SharedTables([config], optimizer=optim.SGD(0.1))
    with pytest.raises(KeyError, match="item"):
        shared.pooled("user", ["u"])
    for read in (shared.pooled, shared.unpooled):
        with pytest.raises(TypeError, match=r"write \['ab'\]"):
            read("item", "ab")
    other = emblib.EmbeddingBagConfig(ROWS, DIM + 1, "item")
    with pytest.raises(ValueError, match=r"embedding_dim 5, not 6.*SharedTables\.pooled"):
        emblib.EmbeddingBagCollection([other], shared=shared)
    other = emblib.EmbeddingBagConfig(ROWS, DIM, "item", optimizer=optim.SGD(0.2))
    with pytest.raises(ValueError, match="optimizer"):
        emblib.EmbeddingBagCollection([other], shared=shared)


def test_duplicates_are_found_and_shared_tables_are_none() -> None:
    one = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(ROWS, DIM, "item", ["a"])])
    two = emblib.EmbeddingCollection([emblib.EmbeddingConfig(ROWS, DIM, "item", ["b"])])
    model = nn.ModuleDict({"one": one, "two": two, "again": one})
    assert emblib.duplicate_tables(model) == {"item": ["one", "two"]}
    assert emblib.duplicate_tables(make()) == {}


def test_quantized_copies_have_their_own_rows() -> None:
    model = make(optim.SGD(0.1))
    batch = make_batch(0)
    copied = model.means.quantized()
    torch.testing.assert_close(
        copied(batch).values(), model.means(batch).values(), atol=0.01, rtol=0.1
    )
    assert not copied.shared_tables()


def test_output_dtypes_of_readers_differ() -> None:
    model = make(optim.SGD(0.1))
    model.means.groups.set_output_dtype(torch.bfloat16)
    batch = make_batch(0)
    assert model.means(batch).values().dtype is torch.bfloat16
    assert model.history(batch)["late"].values().dtype is torch.float32


class Duplicates(nn.Module):
    """Collections as for separate tables, as TorchRec's are."""

    def __init__(self, optimizer: Any, shared: Any = None, **choices: Any) -> None:
        super().__init__()
        arguments: Any = {"optimizer": optimizer, "shared": shared}
        item = emblib.EmbeddingBagConfig(ROWS, DIM, "item", ["sums", "more"], **choices)
        own = emblib.EmbeddingBagConfig(9, 3, "own")
        self.sums = emblib.EmbeddingBagCollection([item, own], **arguments)
        item = emblib.EmbeddingConfig(ROWS, DIM, "item", ["history", "late"], **choices)
        self.history = emblib.EmbeddingCollection([item], **arguments)

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        vectors = self.history(batch)
        parts = [self.sums(batch).values(), *(vectors[n].values() for n in ("history", "late"))]
        return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("storage", STORAGES[::2], ids=["device", "cached"])
def test_duplicates_become_one_table(storage: Any) -> None:
    model = Duplicates(optim.Adagrad(0.1, eps=1e-10), storage=storage)
    loss_of(model.sums(make_batch(5)).values()).backward()
    first, own = model.sums.embedding_bags["item"].weight, model.sums.embedding_bags["own"].weight
    before = {k: v.clone() for k, v in model.sums.state_dict().items()}
    states = copy.deepcopy(model.sums.optimizer_state())
    assert emblib.share_tables(model) == {"item": ["sums", "history"]}
    assert emblib.duplicate_tables(model) == {}
    assert model.history.embeddings["item"].weight is first
    assert model.sums.embedding_bags["own"].weight is own
    assert list(model.state_dict()) == [f"sums.{name}" for name in before]
    for name, value in model.sums.state_dict().items():
        assert torch.equal(value, before[name])
    for name, entries in model.sums.optimizer_state().items():
        assert all(torch.equal(value, states[name][k]) for k, value in entries.items())
    config, rule = emblib.EmbeddingConfig(ROWS, DIM, "item", storage=storage), model.sums.optimizer
    made = Duplicates(rule, emblib.SharedTables([config], optimizer=rule), storage=storage)
    made.load_state_dict(model.state_dict())
    FusedOptimizer.of(made).load_state_dict(FusedOptimizer.of(model).state_dict())
    for one in (model, made):
        loss_of(one(make_batch(0))).backward()
        assert one.history.handles()["item"].module.step == 2
    for name, value in model.state_dict().items():
        assert torch.equal(value, made.state_dict()[name])


@pytest.mark.parametrize("order", ["shared, shared, own", "own, shared, shared"])
def test_a_table_that_some_collections_share_becomes_that_of_all(order: str) -> None:
    item = emblib.EmbeddingBagConfig(ROWS, DIM, "item", ["sums"])
    shared = emblib.SharedTables([item], optimizer=optim.SGD(0.1))
    readers = [
        emblib.EmbeddingBagCollection([shared.pooled("item", ["sums"])], shared=shared)
        if kind == "shared"
        else emblib.EmbeddingBagCollection([item], optimizer=optim.SGD(0.1))
        for kind in order.split(", ")
    ]
    rows, model = readers[0].embedding_bags["item"].weight.detach().clone(), nn.ModuleList(readers)
    assert emblib.duplicate_tables(model) == {"item": ["0", "1", "2"]}
    assert emblib.share_tables(model) == {"item": ["0", "1", "2"]}
    assert emblib.duplicate_tables(model) == {}
    late = emblib.EmbeddingBagCollection([shared.pooled("item", ["sums"])], shared=shared)
    batch = KeyedJaggedTensor(["sums"], torch.tensor([3]), lengths=torch.tensor([1]))
    for bags in (*readers, late):
        assert torch.equal(bags(batch).values(), rows[3:4])
        bags(batch).values().sum().backward()
        rows[3] -= 0.1


def test_a_train_with_a_cache_is_copied_where_another_table_is_shared() -> None:
    train = emblib.storage.TensorTrain((4, 4), cache=emblib.TTCache(20, every=1_000))
    item = emblib.EmbeddingBagConfig(ROWS, DIM, "item", ["a"])
    query = emblib.EmbeddingBagConfig(100, 16, "query", ["b"], storage=train)
    sums = emblib.EmbeddingBagCollection([item, query], optimizer=optim.Adagrad(0.1))
    history = emblib.EmbeddingCollection([emblib.EmbeddingConfig(ROWS, DIM, "item", ["a"])])
    history.set_optimizers({"item": optim.Adagrad(0.1)})
    ids = torch.randint(ROWS, (24,), generator=torch.Generator().manual_seed(4))
    batch = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.full((12,), 2))

    def step(bags: emblib.EmbeddingBagCollection) -> Tensor:
        out = bags(batch).values()
        out.square().sum().backward()
        return out.detach()

    step(sums)
    sums.handles()["query"].populate()  # type: ignore[attr-defined]
    step(sums)
    unshared = copy.deepcopy(sums)
    assert emblib.share_tables(nn.ModuleList([sums, history])) == {"item": ["0", "1"]}
    for _ in range(2):
        assert torch.equal(step(sums), step(unshared))
    stats, expected = (c.handles()["query"].cache_stats() for c in (sums, unshared))  # type: ignore[attr-defined]
    assert stats == expected
    assert stats.hits > 0


def test_duplicates_without_optimizer_and_on_meta() -> None:
    model = Duplicates(None)
    emblib.share_tables(model, ["item"])
    loss_of(model(make_batch(0))).backward()
    weight = model.history.embeddings["item"].weight
    assert weight.grad is not None
    assert [name for name, _ in model.named_parameters()].count("sums.embedding_bags.item.weight")
    with torch.device("meta"):
        model = Duplicates(optim.SGD(0.1))
    emblib.share_tables(model)
    model.to_empty(device="cpu")
    for part in (model.sums, model.history):
        part.reset_parameters()
    loss_of(model(make_batch(0))).backward()


def test_duplicates_that_cannot_be_one() -> None:
    model = Duplicates(optim.SGD(0.1))
    with pytest.raises(KeyError, match="duplicates are"):
        emblib.share_tables(model, ["own"])
    for function in (emblib.share_tables, emblib.duplicate_tables, FusedOptimizer.of):
        with pytest.raises(TypeError, match=r"must be an nn\.Module, got int"):
            function(3)  # type: ignore[operator]
    loss_of(model(make_batch(0))).backward()
    with pytest.raises(ValueError, match="share tables before training"):
        emblib.share_tables(model)
    model = Duplicates(optim.SGD(0.1))
    model.history.set_optimizers({"item": optim.SGD(0.2)})
    with pytest.raises(
        ValueError, match=r"'sums' and 'history' cannot be one, they have optimizer"
    ):
        emblib.share_tables(model)
    model = Duplicates(optim.SGD(0.1), storage=emblib.storage.Hash())
    with pytest.raises(ValueError, match="one collection all features"):
        emblib.share_tables(model)
    assert emblib.duplicate_tables(model) == {"item": ["history", "sums"]}
    with pytest.raises(TypeError, match=r"names must be a list of names, got 'item'"):
        emblib.share_tables(model, "item")
    tables = [emblib.EmbeddingBagConfig(rows, DIM, "item") for rows in (10, 10, 20, 20)]
    model = nn.ModuleList([emblib.EmbeddingBagCollection([table]) for table in tables])
    assert emblib.duplicate_tables(model) == {"item": ["0", "1", "2", "3"]}
    with pytest.raises(ValueError, match="cannot be one, they have num_embeddings 10 and 20"):
        emblib.share_tables(model)
    with pytest.raises(TypeError, match="tables must be EmbeddingBagConfig or EmbeddingConfig"):
        emblib.SharedTables(["item"])  # type: ignore[list-item]


def test_optimizers_change_for_all_tables_or_none() -> None:
    tables = [emblib.EmbeddingBagConfig(ROWS, DIM, name) for name in ("item", "query")]
    shared = emblib.SharedTables(tables, optimizer=optim.SGD(0.1))
    train = emblib.EmbeddingBagConfig(
        100, 16, "cores", storage=emblib.storage.TensorTrain((4, 4)), optimizer=optim.SGD(0.1)
    )
    collection = emblib.EmbeddingBagCollection(
        [shared.pooled("item", ["a"]), shared.pooled("query", ["b"]), train], shared=shared
    )
    decaying = optim.RowwiseAdagrad(0.1, global_decay=optim.GlobalDecay(0.9))
    before = copy.deepcopy(collection.state_dict())
    for name in ("query", "cores"):
        with pytest.raises(ValueError, match="global_decay"):
            collection.set_optimizers({"item": optim.Adam(0.1), name: decaying})
        assert {t.config.optimizer for t in map(shared.__getitem__, shared)} == {optim.SGD(0.1)}
        assert collection.handles()["item"].module.optimizer == optim.SGD(0.1)
    collection.set_optimizers(dict.fromkeys(("item", "cores"), optim.Adam(0.1)))
    assert shared["item"].config.optimizer == optim.Adam(0.1)
    assert collection.handles()["cores"].module.optimizer == optim.Adam(0.1)
    for name, value in collection.state_dict().items():
        assert torch.equal(value, before[name])


def test_seeds_of_all_tables_or_none() -> None:
    tables = [emblib.EmbeddingBagConfig(ROWS, DIM, name) for name in ("item", "query")]
    collection = emblib.EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1))
    before = copy.deepcopy(collection.state_dict())
    with pytest.raises(KeyError, match=r"lack \['query'\]"):
        collection.reset_parameters({"item": 1})
    for name, value in collection.state_dict().items():
        assert torch.equal(value, before[name])


def test_memory_plans_refuse_shared_tables() -> None:
    shared = emblib.SharedTables([emblib.EmbeddingConfig(100, 8, "item")])
    model = nn.ModuleList(
        emblib.EmbeddingBagCollection([shared.pooled("item", [feature])], shared=shared)
        for feature in ("bought", "seen")
    )
    with pytest.raises(ValueError, match=r"tables \['item'\] are shared by collections"):
        emblib.plan_memory(model, 1 << 20)


def test_each_collection_reacts_to_invalid_ids_by_its_own_bounds_check() -> None:
    shared = emblib.SharedTables([emblib.EmbeddingConfig(10, 4, "item")], optimizer=optim.SGD(0.1))
    basket, history = shared.pooled("item", ["basket"]), shared.unpooled("item", ["history"])
    warned = emblib.EmbeddingBagCollection([basket], shared=shared)
    fatal = emblib.EmbeddingCollection(
        [history], shared=shared, bounds_check=emblib.BoundsCheck.FATAL
    )
    ids, lengths = torch.tensor([3, 50]), torch.tensor([1, 1])
    with pytest.warns(UserWarning, match="index 50 at position 1, feature 'basket', table 'item'"):
        pooled = warned(KeyedJaggedTensor(["basket"], ids, lengths=lengths)).values()
    assert torch.equal(pooled[1], warned.embedding_bags["item"].weight[0])
    with pytest.raises(RuntimeError, match="got 50 at position 1"):
        fatal(KeyedJaggedTensor(["history"], ids, lengths=lengths))


def test_the_optimizer_of_shared_tables_is_checked_though_no_table_uses_it() -> None:
    config = emblib.EmbeddingConfig(4, 2, "item", optimizer=optim.SGD(0.1))
    optimizer: Any = "sgd"
    with pytest.raises(TypeError, match="optimizer must be None or one of"):
        emblib.SharedTables([config], optimizer=optimizer)
