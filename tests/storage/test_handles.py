"""Operations on parameters reach the tables or raise: freezing, replacing, casting."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emblib import (
    CacheConfig,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    Placement,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTCache,
    TTEmbeddingBag,
    TTSpec,
    optim,
)
from emblib.storage import (
    Dense,
    Hash,
    Hashed,
    Narrow,
    QuotientRemainder,
    Storage,
    TableSlice,
    TensorTrain,
)

ADAM = optim.Adam(0.1)
BATCH = (torch.tensor([1, 2, 3, 4, 1]), torch.tensor([0, 2, 5]))
FEATURES = KeyedJaggedTensor.from_lengths_sync(
    ["f0", "f1"], torch.tensor([1, 2, 3, 1, 4]), torch.tensor([2, 0, 1, 2])
)
MODULES: dict[str, Callable[[], Any]] = {
    "plain": lambda: TableBatchedEmbeddingBags([TableSpec(10, 8)], ADAM),
    "cached": lambda: TableBatchedEmbeddingBags(
        [TableSpec(10, 8, placement=Placement.MANAGED_CACHING)], ADAM
    ),
    "tt": lambda: TTEmbeddingBag(TTSpec(100, 8, (2,)), ADAM),
    "dynamic": lambda: DynamicEmbeddingBags([DynamicSpec(32, 8)], ADAM),
}
every_module = pytest.mark.parametrize("name", list(MODULES))
either = pytest.mark.parametrize("optimizer", [ADAM, None], ids=["fused", "dense gradients"])


def collection(
    optimizer: optim.Optimizer | None = ADAM, storage: Any = None, tables: int = 2
) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                10, 8, f"t{i}", (f"f{i}",), storage=Dense() if storage is None else storage
            )
            for i in range(tables)
        ],
        optimizer=optimizer,
    )


def state_of(module: nn.Module) -> dict[str, Tensor]:
    return {key: torch.as_tensor(value).clone() for key, value in module.state_dict().items()}


def changed(before: dict[str, Tensor], module: nn.Module) -> list[str]:
    after = state_of(module)
    same = {k for k in before if before[k].shape == after[k].shape and before[k].equal(after[k])}
    return sorted(before.keys() - same)


@every_module
def test_frozen_tables_are_not_trained(name: str) -> None:
    module = MODULES[name]()
    model = nn.Sequential(module)
    module(*BATCH).sum().backward()
    before = state_of(module)
    model.requires_grad_(False)
    out = module(*BATCH)
    assert not out.requires_grad
    weights = torch.ones(5, requires_grad=True)
    module(*BATCH, weights).sum().backward()
    assert weights.grad is not None
    assert changed(before, module) == []
    model.requires_grad_(True)
    module(*BATCH).sum().backward()
    assert changed(before, module)
    assert module.step == 2


@every_module
def test_saved_flags_restore_a_table(name: str) -> None:
    module = MODULES[name]()
    flags = [parameter.requires_grad for parameter in module.parameters()]
    assert all(flags)
    module.requires_grad_(False)
    module.requires_grad_(False)
    assert not module(*BATCH).requires_grad
    for parameter, flag in zip(module.parameters(), flags, strict=True):
        parameter.requires_grad = flag
    assert module(*BATCH).requires_grad


@pytest.mark.parametrize("storage", [Dense(), TensorTrain((2,)), Hash()], ids=str)
def test_saved_flags_restore_tables_of_collections(storage: Any) -> None:
    model = collection(storage=storage)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.requires_grad_(False)
        copied = copy.deepcopy(model).to("cpu")
        for one in (model, copied):
            one.requires_grad_(False)
            one.requires_grad_(False)
            assert not one(FEATURES).values().requires_grad
            for parameter, flag in zip(one.parameters(), flags, strict=True):
                parameter.requires_grad_(flag)
            assert one(FEATURES).values().requires_grad


@every_module
def test_copies_of_frozen_tables_are_frozen_on_their_own(name: str) -> None:
    module = MODULES[name]()
    module.requires_grad_(False)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert not other(*BATCH).requires_grad
        other.requires_grad_(True)
        assert other(*BATCH).requires_grad
    assert not module(*BATCH).requires_grad


@pytest.mark.parametrize(
    ("storage", "optimizer"),
    [
        (Dense(), ADAM),
        (Dense(Placement.MANAGED_CACHING, CacheConfig(sets=1)), ADAM),
        (Dense(), optim.RowwiseAdagrad(0.1, global_decay=optim.GlobalDecay(0.1))),
        (Dense(), optim.EnsembleRowwiseAdagrad(0.1, average_every=1, swap_every=2)),
        (TensorTrain((2,)), ADAM),
        (Dense(), None),
    ],
    ids=["plain", "cached", "global decay", "averages", "tensor train", "dense gradients"],
)
def test_one_table_of_a_collection_is_frozen(storage: Any, optimizer: Any) -> None:
    frozen, whole = collection(optimizer, storage), collection(optimizer, storage)
    whole.load_state_dict(frozen.state_dict())
    frozen.embedding_bags["t0"].requires_grad_(False)
    before = state_of(frozen)
    for model in (frozen, whole):
        torch_optimizer = None if optimizer else torch.optim.Adam(model.parameters(), 0.1)
        for _ in range(2):
            model(FEATURES).values().square().sum().backward()
            if torch_optimizer is not None:
                torch_optimizer.step()
    moved = changed(before, frozen)
    assert moved
    assert all(".t1." in key for key in moved)
    for key in moved:
        torch.testing.assert_close(frozen.state_dict()[key], whole.state_dict()[key])
    frozen.embedding_bags["t0"].requires_grad_(True)
    frozen(FEATURES).values().square().sum().backward()
    if optimizer is not None:
        assert any(".t0." in key for key in changed(before, frozen))


@either
@pytest.mark.parametrize(
    "storage",
    [
        Dense(),
        Hash(),
        Hashed(5),
        QuotientRemainder(3),
        TensorTrain((2,)),
        TensorTrain((2,), cache=TTCache(5, every=100)),
    ],
    ids=["plain", "dynamic", "hashed", "quotient", "train", "train with a cache"],
)
def test_a_frozen_table_stays_so_in_copies_and_with_another_optimizer(
    optimizer: Any, storage: Any
) -> None:
    def trained(model: EmbeddingBagCollection) -> dict[str, bool]:
        return {name: p.requires_grad for name, p in model.named_parameters()}

    model = collection(optimizer, storage)
    model.embedding_bags["t0"].requires_grad_(False)
    expected = trained(model)
    assert {*expected.values()} == {False, True}
    models = [model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for new_optimizer in (None, optim.SGD(0.1)):
        models.append(copy.deepcopy(model))
        models[-1].set_optimizers({"t0": new_optimizer, "t1": new_optimizer})
    for one in models:
        assert trained(one) == expected
        if not isinstance(storage, Hash):  # all tables of its module are frozen or none
            before = state_of(one)
            one(FEATURES).values().sum().backward()
            moved = [k for k in changed(before, one) if k.endswith("weight") or ".cores." in k]
            assert not any(".t0." in key for key in moved)
        one.requires_grad_(False)
        assert not one(FEATURES).values().requires_grad


def test_dynamic_tables_of_one_kernel_are_frozen_together() -> None:
    model = collection(storage=Hash())
    model.embedding_bags["t0"].requires_grad_(False)
    with pytest.raises(RuntimeError, match="freeze all of them"):
        model(FEATURES)
    model.requires_grad_(False)
    assert not model(FEATURES).values().requires_grad
    assert model.groups.views(0)["weight"].shape[1] == 8


def test_cores_are_frozen_together() -> None:
    table = MODULES["tt"]()
    table.cores[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"cores \[0\] of 2 are frozen in table 'table_0'"):
        table(*BATCH)


@either
@pytest.mark.parametrize("storage", [Dense(), Hash()], ids=["plain", "dynamic"])
def test_memory_that_lookups_would_not_read_is_refused(optimizer: Any, storage: Any) -> None:
    model = collection(optimizer, storage, tables=1)
    handle = model.embedding_bags["t0"]
    weight = handle.weight
    if optimizer is not None or isinstance(storage, Dense):
        with pytest.raises(RuntimeError, match=r"copy_\(values\)"):
            weight.data = torch.zeros_like(weight)
    with pytest.raises(RuntimeError, match="cannot be replaced"):
        handle.weight = nn.Parameter(torch.zeros_like(weight))
    with torch.no_grad():
        weight.fill_(2.0)
    assert handle.weight is weight
    assert bool((model.groups.views(0)["weight"] == 2).all())


@either
@pytest.mark.parametrize("storage", [Dense(), Hash(), None], ids=["plain", "dynamic", "sequence"])
def test_weights_of_functional_call_are_refused(optimizer: Any, storage: Any) -> None:
    model: Any = collection(optimizer, storage, tables=1)
    if storage is None:
        config = EmbeddingConfig(10, 8, "t0", ("f0",))
        model = EmbeddingCollection([config], optimizer=optimizer)
    features = KeyedJaggedTensor(["f0"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    ((name, own),) = model.named_parameters()
    for given in (torch.zeros_like(own), own.detach().clone().requires_grad_()):
        with pytest.raises(RuntimeError, match="functional_call"):
            torch.func.functional_call(model, {name: given}, (features,))
    torch.func.functional_call(model, {name: own}, (features,))
    module, key = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    module._parameters[key] = nn.Parameter(torch.zeros_like(own))
    with pytest.raises(RuntimeError, match="cannot be replaced"):
        model(features)
    module._parameters[key] = own
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.to("cpu")):
        one(features)


@either
def test_cores_are_loaded_with_assign(optimizer: Any) -> None:
    first, second = (collection(optimizer, TensorTrain((2,)), tables=1) for _ in range(2))
    own = list(second.parameters())
    with torch.no_grad():
        for core in first.parameters():
            core.add_(1.0)
    second.load_state_dict(first.state_dict(), assign=True)
    assert all(a is b for a, b in zip(own, second.parameters(), strict=True))
    features = KeyedJaggedTensor(["f0"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    assert torch.equal(first(features).values(), second(features).values())
    second(features).values().sum().backward()


def test_cores_of_functional_call_are_refused_or_used() -> None:
    features = KeyedJaggedTensor(["f0"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    for optimizer in (ADAM, None):
        model = collection(optimizer, TensorTrain((2,)), tables=1)
        given = {name: torch.zeros_like(core) for name, core in model.named_parameters()}
        if optimizer is None:
            out = torch.func.functional_call(model, given, (features,)).values()
            assert not out.detach().any()
            continue
        with pytest.raises(RuntimeError, match="were replaced"):
            torch.func.functional_call(model, given, (features,))


def test_the_weights_of_a_module_may_be_replaced() -> None:
    table = TableBatchedEmbeddingBags([TableSpec(10, 8)], optim.SGD(0.1))
    table.weights.data = torch.ones(80)
    assert table(*BATCH)[0].tolist() == [2.0] * 8
    table.weights = nn.Parameter(torch.zeros(80))
    table(*BATCH).sum().backward()
    assert float(table.weights.detach().sum()) < 0


@pytest.mark.parametrize(
    "make",
    [*MODULES.values(), collection, lambda: QuantizedEmbeddingBags([TableSpec(10, 8)])],
    ids=[*MODULES, "collection", "quantized"],
)
def test_other_dtypes_are_told_to_have_no_effect(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(make(), nn.Linear(8, 1))
    dtypes = {key: value.dtype for key, value in model[0].state_dict().items()}
    for convert in (model.half, lambda: model.to(torch.bfloat16), model.double):
        with pytest.warns(UserWarning, match=r"tables keep their dtypes.*ignored") as told:
            convert()
        assert len(told) == 1
        assert told[0].filename == __file__
    assert {key: value.dtype for key, value in model[0].state_dict().items()} == dtypes
    assert next(model[1].parameters()).dtype is torch.float64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.float()
        model.to("cpu")


def test_a_model_warns_once_of_a_dtype() -> None:
    kinds = [Dense(), TensorTrain((2,)), Hashed(5), Hash()]
    tables = [EmbeddingBagConfig(10, 8, f"t{i}", storage=kind) for i, kind in enumerate(kinds)]
    model = nn.Sequential(EmbeddingBagCollection(tables), EmbeddingBagCollection(tables[:1]))
    for _ in range(2):
        with pytest.warns(UserWarning, match="tables keep their dtypes") as caught:
            model.half()
        assert len(caught) == 1


@pytest.mark.parametrize("storage", [Hash(), Hashed(3), QuotientRemainder(5), Narrow(4)])
def test_rows_that_are_not_stored_one_per_id_are_refused(storage: Storage) -> None:
    handle = collection(storage=storage).handles()["t0"]
    with pytest.raises(RuntimeError, match=r"'t0' does not store one row .* views\(\)"):
        handle.dense_rows()
    with pytest.raises(RuntimeError, match="does not store one row"):
        next(handle.dense_blocks())


def test_bounds_of_slices_are_ints() -> None:
    with pytest.raises(TypeError, match=r"rows of a slice must be two ints, got \(0, 1\.5\)"):
        TableSlice(EmbeddingBagConfig(4, 3, "t"), rows=(0, 1.5), columns=(0, 3))
