"""Modules of plain tables saved, loaded and copied: nothing lost, nothing half written."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from emblib import (
    CacheConfig,
    CachePolicy,
    Pooling,
    Precision,
    StochasticRounding,
    optim,
)
from emblib.collections.optimizers import in_backward_optimizer_filter
from tests.checkpoint_cases import (
    CACHED,
    PLACEMENTS,
    TIERED,
    Model,
    assert_goes_on,
    assert_same,
    batch,
    make,
    snapshot,
    train,
    trained,
)
from tests.optimizer_cases import CASES
from tests.saved import saved_and_loaded
from tests.tbe_cases import OPTIMIZERS


@pytest.mark.parametrize("optimizer", CASES)
def test_training_goes_on_bit_for_bit(optimizer: str) -> None:
    module = trained(optimizer=CASES[optimizer])
    other = make(optimizer=CASES[optimizer])
    train(other, 7)
    other.load_state_dict(saved_and_loaded(module.state_dict()))
    assert other.step == 3
    assert_goes_on(module, other)


@pytest.mark.parametrize("end", PLACEMENTS)
@pytest.mark.parametrize("start", PLACEMENTS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_fits_any_placement(optimizer: str, start: str, end: str) -> None:
    module = trained(PLACEMENTS[start], OPTIMIZERS[optimizer])
    other = make(PLACEMENTS[end], OPTIMIZERS[optimizer], cache=CacheConfig(CachePolicy.LFU, sets=1))
    train(other, 7)
    other.load_state_dict(saved_and_loaded(module.state_dict()))
    assert_goes_on(module, other)


def test_narrow_precision_and_rounding_are_part_of_it() -> None:
    precision = Precision(
        torch.float16, states=torch.bfloat16, stochastic_rounding=StochasticRounding(5)
    )
    module = trained(TIERED, precision=precision)
    other = make(precision=precision)
    other.load_state_dict(module.state_dict())
    assert_goes_on(module, other)


def test_numbers_set_by_hand_are_part_of_it() -> None:
    module = trained()
    module.set_learning_rate(0.3)
    module.set_hyperparameters(betas=(0.5, 0.6))
    module.set_step(77)
    other = make()
    other.load_state_dict(module.state_dict())
    assert (other.learning_rate, other.step) == (0.3, 77)
    assert_goes_on(module, other)


def test_keys_and_shapes() -> None:
    module = trained(TIERED, optim.PartialRowwiseAdam(0.1))
    shapes = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    assert shapes == {
        "user.weight": (40, 8),
        "user.exp_avg": (40, 8),
        "user.exp_avg_sq": (40,),
        "table_1.weight": (300, 5),
        "table_1.exp_avg": (300, 5),
        "table_1.exp_avg_sq": (300,),
        "row_cache.weight": (200, 12),
        "row_cache.exp_avg": (200, 12),
        "row_cache.exp_avg_sq": (200,),
        "hyper": (module.hyperparams.numel(),),
    }
    assert all(tensor.is_contiguous() for tensor in module.state_dict().values())


def renamed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.replace("user", "item"): value for key, value in state.items()}


BAD = {
    "missing": (lambda state: without(state, "user.exp_avg"), r"missing.*user\.exp_avg"),
    "no numbers": (lambda state: without(state, "hyper"), "missing.*hyper"),
    "unexpected": (lambda s: {**s, "item.weight": s["hyper"]}, r"unexpected.*item\.weight"),
    "both": (renamed, r"missing.*user.*unexpected.*item"),
    "shape": (
        lambda state: {**state, "row_cache.weight": torch.zeros(200, 13)},
        r"row_cache\.weight.*shape \(200, 13\), this module's is \(200, 12\)",
    ),
    "rows": (
        lambda state: {**state, "table_1.exp_avg": torch.zeros(299, 5)},
        r"table_1\.exp_avg.*shape \(299, 5\)",
    ),
    "optimizer": (lambda _: trained(optimizer=optim.LARS(0.1)).state_dict(), "missing.*exp_avg"),
}


def without(state: dict[str, Tensor], *keys: str) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if key not in keys}


@pytest.mark.parametrize("placements", PLACEMENTS)
@pytest.mark.parametrize("what", BAD)
def test_a_bad_checkpoint_changes_nothing(what: str, placements: str) -> None:
    spoil, message = BAD[what]
    torch.manual_seed(0)
    module = trained(PLACEMENTS[placements])
    twin = copy.deepcopy(module)
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(spoil(snapshot(make())))
    assert_goes_on(module, twin)


def test_hyperparameters_of_integers_are_loaded_as_numbers() -> None:
    module = make(optimizer=optim.SGD(1.0))
    state = module.state_dict()
    integers = state["hyper"].long()
    module.set_learning_rate(0.5)
    module.load_state_dict({**state, "hyper": integers})
    assert module.learning_rate == 1.0


def test_another_shape_is_refused_even_if_not_strict() -> None:
    module = trained(TIERED)
    before = snapshot(module)
    bad = {**snapshot(make()), "hyper": torch.zeros(5)}
    with pytest.raises(RuntimeError, match="without this key and with strict=False"):
        module.load_state_dict(bad, strict=False)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())
    module.load_state_dict(without(bad, "hyper"), strict=False)
    assert torch.equal(module.table_weights()[2], bad["row_cache.weight"])
    assert module.step == 3


@pytest.mark.parametrize("in_place", ["in_place", "copied"])
@pytest.mark.parametrize("placements", PLACEMENTS)
def test_part_of_a_checkpoint_leaves_the_rest(placements: str, in_place: str) -> None:
    module = trained(PLACEMENTS[placements])
    want = snapshot(module)
    train(module, 3)
    twin = copy.deepcopy(module)
    key = "row_cache.weight"
    part = {key: module.state_dict()[key]} if in_place == "in_place" else {}
    part.setdefault(key, torch.empty_like(want[key]))
    part[key].copy_(want[key])
    result = module.load_state_dict(part, strict=False)
    assert set(result.missing_keys) == want.keys() - {key}
    want = {**snapshot(twin), key: want[key]}
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, want[name]), name


def fit(model: Model, optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        model(*batch(seed)).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("end", PLACEMENTS)
def test_a_larger_model_with_an_optimizer_of_torch(end: str) -> None:
    model, other = Model(TIERED), Model(PLACEMENTS[end])
    trainable = [
        [p for _, p in in_backward_optimizer_filter(m.named_parameters())] for m in (model, other)
    ]
    assert [len(group) for group in trainable] == [2, 2], "the tables train themselves"
    first, second = (torch.optim.Adam(group, 0.01) for group in trainable)
    fit(model, first, 0, 1, 2)
    saved = saved_and_loaded({"model": model.state_dict(), "optimizer": first.state_dict()})
    assert "tables.user.exp_avg" in saved["model"]
    other.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    fit(model, first, 3, 4)
    fit(other, second, 3, 4)
    assert_same(model, other)


@pytest.mark.parametrize("placements", PLACEMENTS)
def test_copies_and_pickles_go_on(placements: str) -> None:
    module = trained(PLACEMENTS[placements])
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        saved_and_loaded(module, weights_only=False),
        copy.deepcopy(nn.Sequential(module))[0],
    ]
    want = copy.deepcopy(module)
    train(want, 3, 4, 5)
    for other in copies:
        assert_same(other, module)
        train(other, 3, 4, 5)
        assert_same(other, want)
    before = snapshot(module)
    assert all(torch.equal(before[key], value) for key, value in module.state_dict().items())


def test_batches_on_their_way_stay_with_the_original() -> None:
    module = trained(CACHED)
    out = module(*batch(3))
    module.prefetch(*batch(4))
    other = pickle.loads(pickle.dumps(module))
    twin = copy.deepcopy(module)
    out.sum().backward()
    for copied in (other, twin):
        copied(*batch(3)).sum().backward()
        copied(*batch(9))
        assert_same(copied, module)
    with pytest.raises(RuntimeError, match="in the order they were prefetched"):
        module(*batch(9))


def test_saving_in_the_middle_of_a_step_changes_nothing() -> None:
    module = trained(CACHED)
    twin = copy.deepcopy(module)
    for one in (module, twin):
        one.prefetch(*batch(3))
        one.prefetch(*batch(4))
        if one is module:
            one.state_dict()
        out = one(*batch(3))
        if one is module:
            one.state_dict()
        out.sum().backward()
        one(*batch(4)).sum().backward()
    assert_goes_on(module, twin)


@pytest.mark.parametrize("assign", ["assign", "to_empty"])
@pytest.mark.parametrize("placements", PLACEMENTS)
def test_a_module_from_meta_takes_a_checkpoint(placements: str, assign: str) -> None:
    saved = trained(PLACEMENTS[placements])
    other = make(PLACEMENTS[placements], device="meta")
    if assign == "to_empty":
        other = other.to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="missing"):
        other.load_state_dict(without(saved.state_dict(), "hyper"), assign=assign == "assign")
    other.load_state_dict(saved.state_dict(), assign=assign == "assign")
    assert_goes_on(saved, other)


def test_a_module_that_has_moved_is_copied_like_any_other() -> None:
    module = trained(TIERED)
    twin = copy.deepcopy(module)
    module._apply(torch.clone)
    assert module.grad_anchor.is_leaf
    assert module.grad_anchor.requires_grad
    assert_goes_on(copy.deepcopy(module), twin)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("placements", PLACEMENTS)
def test_moving_between_devices(placements: str) -> None:
    module = trained(PLACEMENTS[placements])
    other = copy.deepcopy(module).cuda()
    assert_same(module, other)
    train(other, 3)
    moved = make(PLACEMENTS[placements], device="cuda")
    moved.load_state_dict(module.state_dict())
    train(moved, 3)
    assert_same(moved, other)
    assert_goes_on(copy.deepcopy(other), pickle.loads(pickle.dumps(other)))
    assert_goes_on(make_like(other, placements), copy.deepcopy(other).cpu())


def make_like(module: nn.Module, placements: str) -> nn.Module:
    other = make(PLACEMENTS[placements])
    other.load_state_dict(module.state_dict())
    return other


def test_an_external_optimizer_finds_its_weights() -> None:
    external = optim.External(gradient=optim.Gradient.DENSE)
    module, other = (make(optimizer=external) for _ in range(2))
    first, second = (torch.optim.Adam(m.parameters(), 0.1) for m in (module, other))
    fit_external(module, first, 0, 1)
    saved = saved_and_loaded({"model": module.state_dict(), "optimizer": first.state_dict()})
    other.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    fit_external(module, first, 2, 3)
    fit_external(other, second, 2, 3)
    assert_same(module, other)


def fit_external(module: nn.Module, optimizer: torch.optim.Optimizer, *seeds: int) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        train(module, seed)
        optimizer.step()


def test_a_checkpoint_is_of_the_pooling_it_is_loaded_into() -> None:
    module = trained(dim=8)
    other = make(dim=8, pooling=Pooling.NONE)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.table_weights()[1], module.table_weights()[1])


def test_tensors_that_cannot_be_copied_are_refused() -> None:
    module = make()
    key, value = next(iter(module.state_dict().items()))
    for wrong in (
        value.to_sparse(),
        torch.nested.as_nested_tensor([value]),
        torch.quantize_per_tensor(value, 0.1, 0, torch.qint8),
    ):
        with pytest.raises(RuntimeError, match="must be a dense tensor with values"):
            module.load_state_dict({**module.state_dict(), key: wrong})
