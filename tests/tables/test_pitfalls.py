"""What users do by mistake: it must be refused, or do what they meant, never something else."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn.utils import parametrizations, prune

from emblib import (
    BoundsCheck,
    CacheConfig,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Pooling,
    Precision,
    QuantizedEmbeddingBags,
    StochasticRounding,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTEmbeddingBag,
    TTSpec,
    optim,
)
from emblib.columns import Hyper

INDICES = torch.tensor([0, 2, 1, 4, 4])
OFFSETS = torch.tensor([0, 1, 3, 3, 5])


def small(optimizer: optim.Optimizer | None = None, **options: Any) -> TableBatchedEmbeddingBags:
    torch.manual_seed(0)
    return TableBatchedEmbeddingBags([TableSpec(3, 4), TableSpec(5, 8)], optimizer, **options)


def collection_of_one() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "t", feature_names=["f"])])


def test_a_checkpoint_of_other_tables_is_refused() -> None:
    first = TableBatchedEmbeddingBags([TableSpec(6, 8), TableSpec(4, 4)])
    second = TableBatchedEmbeddingBags([TableSpec(12, 4), TableSpec(2, 8)])
    before = second.weights.detach().clone()
    with pytest.raises(RuntimeError, match="the checkpoint is of another table"):
        second.load_state_dict(first.state_dict())
    assert torch.equal(second.weights, before)


def test_a_checkpoint_of_another_tt_table_is_refused() -> None:
    spec = TTSpec(rows=60, dim=8, ranks=(2, 2))
    other = TTEmbeddingBag(TTSpec(rows=50, dim=8, ranks=(2, 2), row_factors=spec.row_factors))
    with pytest.raises(RuntimeError, match="differs in rows"):
        other.load_state_dict(TTEmbeddingBag(spec).state_dict())


def test_tt_from_meta_by_loading() -> None:
    saved = TTEmbeddingBag(TTSpec(rows=60, dim=8, ranks=(2, 2)), optim.Adagrad(0.1))
    for assign in (False, True):
        other = TTEmbeddingBag(saved.spec, optim.Adagrad(0.1), device="meta")
        if not assign:
            other = other.to_empty(device="cpu")
        other.load_state_dict(saved.state_dict(), assign=assign)
        for module in (saved, other):
            assert torch.equal(module.features, saved.features)
        assert torch.equal(other.to_dense(), saved.to_dense())


def test_two_weighted_lookups_in_one_loss_are_two_updates() -> None:
    """The gradient of the weights of the first lookup, whose backward comes last, is FBGEMM's."""
    module = small(optim.SGD(1.0))
    first, second = (torch.full((5,), 0.5, requires_grad=True) for _ in range(2))
    outs = [module(INDICES, OFFSETS, weights) for weights in (first, second)]
    before = [weights.clone() for weights in module.table_weights()]
    (outs[0] + outs[1]).sum().backward()
    assert module.step == 2

    def row_sums(tables: list[Tensor]) -> Tensor:
        return torch.cat([tables[0][INDICES[:3]].sum(1), tables[1][INDICES[3:]].sum(1)])

    once = small(optim.SGD(1.0))
    once(INDICES, OFFSETS, first.detach()).sum().backward()
    torch.testing.assert_close(second.grad, row_sums(before))
    torch.testing.assert_close(first.grad, row_sums(once.table_weights()))


MAKERS: dict[str, Callable[[], Any]] = {
    "plain": lambda: small(optim.Adagrad(0.1)),
    "tt": lambda: TTEmbeddingBag(TTSpec(100, 8, (2,)), optim.Adagrad(0.1)),
    "dynamic": lambda: DynamicEmbeddingBags([DynamicSpec(32, 8)], optim.Adagrad(0.1)),
}


@pytest.mark.parametrize("kind", list(MAKERS))
def test_an_update_that_raises_is_no_step(kind: str) -> None:
    module = MAKERS[kind]()
    module(INDICES, OFFSETS).sum().backward()
    names = [name for name in dict(module.named_buffers()) if name.startswith("state_sum")]
    kept = {name: getattr(module, name).clone() for name in names}
    for name in names:
        getattr(module, name).resize_(0)
    with pytest.raises(RuntimeError, match=r"state|row buffer 1, which has 0 elements"):
        module(INDICES, OFFSETS).sum().backward()  # a dynamic table raises in its forward
    assert module.step == 1
    for name in names:
        getattr(module, name).resize_(kept[name].shape).copy_(kept[name])
    module(INDICES, OFFSETS).sum().backward()
    assert module.step == 2


def test_a_wrong_state_of_one_core_changes_none() -> None:
    module = MAKERS["tt"]()
    before = [core.detach().clone() for core in module.cores]
    loss = module(INDICES, OFFSETS).sum()
    module.state_sum_1.resize_(0)
    with pytest.raises(RuntimeError, match="state"):
        loss.backward()
    assert all(torch.equal(core, old) for core, old in zip(module.cores, before, strict=True))
    assert module.step == 0


def test_two_forwards_without_weights_are_two_updates() -> None:
    module = small(optim.SGD(0.5))
    before = module.weights.detach().clone()
    (module(INDICES, OFFSETS) + module(INDICES, OFFSETS)).sum().backward()
    assert module.step == 2
    assert torch.equal(module.table_weights()[0], before[:12].view(3, 4) - 0.5 - 0.5)


@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (4,)])
def test_sample_weights_of_wrong_shape_change_nothing(shape: tuple[int, ...]) -> None:
    module = small(optim.SGD(0.5))
    before = module.weights.detach().clone()
    with pytest.raises(RuntimeError, match="sample_weights must be a vector"):
        module(INDICES, OFFSETS, torch.ones(shape, requires_grad=True)).sum().backward()
    assert torch.equal(module.weights, before)
    assert module.step == 0


def test_indices_overwritten_before_backward_are_noticed() -> None:
    module = small(optim.SGD(0.5))
    indices = INDICES.clone()
    out = module(indices, OFFSETS)
    indices.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert module.step == 0


def test_no_second_derivative() -> None:
    module = small(optim.SGD(0.5))
    weights = torch.ones(5, requires_grad=True)
    out = module(INDICES, OFFSETS, weights)
    (grad,) = torch.autograd.grad((out**2).sum(), weights, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate"):
        torch.autograd.grad(grad.sum(), weights)


def test_external_allows_a_step_between_two_backwards() -> None:
    module = TableBatchedEmbeddingBags([TableSpec(5, 4)], optim.External())
    sgd = torch.optim.SGD([module.weights], lr=0.1)
    offsets = torch.tensor([0, 2, 5])
    losses = [module(INDICES, offsets).sum() for _ in range(2)]
    for loss in losses:
        loss.backward()
        sgd.step()
    assert bool(module.weights.isfinite().all())


def test_freezing_by_no_grad() -> None:
    module = small(optim.SGD(0.5))
    with torch.no_grad():
        out = module(INDICES, OFFSETS)
    assert not out.requires_grad


@pytest.mark.parametrize("mode", [BoundsCheck.FATAL, BoundsCheck.NONE])
def test_indices_without_bags_are_refused(mode: BoundsCheck) -> None:
    with pytest.raises(RuntimeError, match="5 indices but no bags"):
        small(bounds_check=mode)(INDICES, torch.tensor([0]))


@pytest.mark.parametrize("optimizer", [optim.SGD(0.1), optim.SGD(0.1, deferred=True), None])
@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: TableBatchedEmbeddingBags([TableSpec(5, 4)], optimizer),
        lambda optimizer: TTEmbeddingBag(TTSpec(5, 4, (2,)), optimizer),
        lambda optimizer: TTEmbeddingBag.from_dense(torch.ones(5, 4), optimizer, ranks=(2,)),
    ],
)
def test_tables_of_inference_mode_are_trained(
    make: Callable[[optim.Optimizer | None], Any], optimizer: optim.Optimizer | None
) -> None:
    with torch.inference_mode():
        module = make(optimizer)
    before = [parameter.clone() for parameter in module.parameters()]
    module(INDICES, OFFSETS).sum().backward()
    if optimizer is None:
        torch.optim.SGD(module.parameters(), 0.1).step()
    elif optimizer.deferred:
        module.apply_gradients()
    changed = [not torch.equal(*pair) for pair in zip(before, module.parameters(), strict=True)]
    assert all(changed)


def test_a_parametrized_core_trains_without_a_warning() -> None:
    module = TTEmbeddingBag(TTSpec(5, 4, (2,)))
    parametrizations.weight_norm(module.cores, "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(INDICES, OFFSETS).sum().backward()


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("kind", ["plain", "tt"])
@pytest.mark.parametrize("change", [parametrizations.weight_norm, prune.identity])
def test_computed_weights_of_fused_tables_are_refused(
    change: Any, kind: str, deferred: bool
) -> None:
    optimizer = optim.SGD(0.1, deferred=deferred)
    module: Any = TableBatchedEmbeddingBags([TableSpec(5, 4)], optimizer)
    if kind == "tt":
        module = TTEmbeddingBag(TTSpec(5, 4, (2, 2)), optimizer)
    owner, name = (module, "weights") if kind == "plain" else (module.cores, "2")

    def change_and_look_up() -> None:
        change(owner, name)
        module(INDICES, torch.arange(6))

    # torch itself refuses to make a parameter of a fused one, which `weight_norm` does.
    messages = r"cannot be replaced|were replaced|Creating a Parameter from an instance"
    with pytest.raises(RuntimeError, match=messages):
        change_and_look_up()


def test_pruned_cores_are_read() -> None:
    module = TTEmbeddingBag(TTSpec(5, 4, (2, 2)))
    expected, call = module.to_dense(0), (INDICES, torch.arange(6))
    with torch.no_grad():
        for name in "0", "2":
            prune.identity(module.cores, name)
            module.cores[int(name)].mul_(2)
        torch.testing.assert_close(module(*call), 4 * expected[INDICES])
        for name in "0", "2":  # which changes the order of the cores in their module
            prune.remove(module.cores, name)
        torch.testing.assert_close(module(*call), expected[INDICES])


@pytest.mark.parametrize(
    "make", [small, lambda: TTEmbeddingBag(TTSpec(5, 4, (2, 2))), collection_of_one]
)
def test_fake_tensors_are_refused(make: Callable[[], object]) -> None:
    with FakeTensorMode(), pytest.raises(RuntimeError, match="under a FakeTensorMode"):
        make()


def test_inputs_on_another_device_are_refused() -> None:
    for indices, offsets in ((INDICES.to("meta"), OFFSETS), (INDICES, OFFSETS.to("meta"))):
        with pytest.raises(RuntimeError, match="on the device of the table, cpu, got"):
            small()(indices, offsets)


def test_external_has_no_learning_rate_to_set() -> None:
    module = TableBatchedEmbeddingBags([TableSpec(5, 4)], optim.External())
    with pytest.raises(RuntimeError, match="for your own optimizer: set its learning rate"):
        module.set_learning_rate(0.5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TableBatchedEmbeddingBags([TTSpec(9, 4, (2,))]), TypeError, "use TTEmbeddingBag"),
        (lambda: TableBatchedEmbeddingBags([(100, 16)]), TypeError, "must be a TableSpec"),
        (lambda: small("sgd"), TypeError, "an instance of one of emblib.optim's SGD, Adagrad"),
        (lambda: small(optim.SGD), TypeError, "an instance of one of"),
        (lambda: small(pooling="max"), ValueError, "one of 'sum', 'mean', 'none', got 'max'"),
        (lambda: small(bounds_check="strict"), ValueError, "one of 'fatal', 'warning'"),
        (lambda: optim.SGD(1e300), ValueError, "finite number >= 0"),
        (lambda: optim.Adam(0.1, betas=0.9), ValueError, "tuple of two numbers"),
        (lambda: TableSpec(3.5, 4), TypeError, "rows must be an int"),
        (lambda: TableSpec(torch.tensor(True), 4), TypeError, "rows must be an int"),
        (lambda: TableSpec(4, torch.tensor([1.5])), TypeError, "dim must be an int"),
    ],
)
def test_wrong_arguments_are_refused(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()


def test_one_table_needs_no_list() -> None:
    assert len(TableBatchedEmbeddingBags(TableSpec(5, 4)).tables) == 1


def test_words_are_accepted_for_choices() -> None:
    module = small(pooling="mean", bounds_check="ignore")
    assert module.pooling is Pooling.MEAN
    assert module.bounds_check is BoundsCheck.IGNORE


def test_the_warning_points_at_the_caller() -> None:
    def call(offsets: Tensor) -> list[warnings.WarningMessage]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            small()(INDICES, offsets)
        return caught

    assert call(OFFSETS) == []
    (warning,) = call(torch.tensor([0, 2, 1, 0, 2]))  # lengths, not offsets
    assert "offsets, not lengths" in str(warning.message)
    assert warning.filename == __file__


def test_hyperparameters_of_another_length_are_refused_before_any_change() -> None:
    module = small(optim.SGD(0.1, weight_decay=optim.L2(0.5)))
    before = module.hyperparams.clone()
    for other in (before[:0], before[:1], before[None], torch.cat([before, before]) / 2):
        with pytest.raises(ValueError, match="SGD has 5 hyperparameters"):
            module.load_hyperparams(other)
        assert module.optimizer == optim.SGD(0.1, weight_decay=optim.L2(0.5))
        assert torch.equal(module.hyperparams, before)


def test_new_hyperparameters_keep_the_seed_of_a_checkpoint() -> None:
    saved, module = (
        small(optim.Adam(0.1), precision=Precision(torch.float16, stochastic_rounding=rounding))
        for rounding in (StochasticRounding(seed=7), StochasticRounding(seed=3))
    )
    module.load_state_dict(saved.state_dict())
    module.set_hyperparameters(eps=1e-5)
    assert module.hyperparams[Hyper.SEED] == 7


def test_default_dtype_does_not_matter() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        train = TTEmbeddingBag(TTSpec(60, 8, (2, 2)), optim.SGD(0.01))
        for module in (small(optim.Adam(0.1)), train):
            offsets = OFFSETS if isinstance(module, TableBatchedEmbeddingBags) else OFFSETS[:3]
            module(INDICES[: int(offsets[-1])], offsets).sum().backward()
            assert module.step == 1
        assert train.to_dense(0).dtype is torch.float32
        trained = torch.rand(60, 8, dtype=torch.float32)
        counts = torch.ones(60, dtype=torch.int64)
        table = TTEmbeddingBag.from_dense(trained, ranks=(8, 8), counts=counts)
        assert torch.allclose(table.to_dense(), trained, atol=1e-3)
        assert QuantizedEmbeddingBags([TableSpec(3, 4)]).to_dense(0).dtype is torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_tt_refuses_optimizers_of_plain_tables() -> None:
    for optimizer in (
        optim.EnsembleRowwiseAdagrad(0.1),
        optim.RowwiseAdagrad(0.1, counter=optim.Counter()),
        optim.RowwiseAdagrad(0.1, global_decay=optim.GlobalDecay(0.1)),
    ):
        with pytest.raises(ValueError, match="a tensor-train table has none"):
            TTEmbeddingBag(TTSpec(60, 8, (2, 2)), optimizer)


def test_sizes_may_be_numpy_ints() -> None:
    spec = TableSpec(np.int32(100_000_000), np.int64(64))
    assert type(spec.rows) is int
    assert spec.rows * spec.dim == 6_400_000_000
    assert type(CacheConfig(sets=np.int64(3)).sets) is int


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: CacheConfig(sets=1.5), TypeError, "sets must be an int"),
        (lambda: CacheConfig(passes=12), TypeError, "None or a MultiPass"),
        (lambda: CacheConfig(load_factor=0.0), ValueError, r"in \(0, 1\]"),
        (lambda: CacheConfig(load_factor="0.2"), ValueError, "must be a finite number, got '0.2'"),
        (lambda: CacheConfig(load_factor=True), ValueError, "must be a finite number, got True"),
        (lambda: CacheConfig(directory=3), TypeError, "directory must be None or a path, got 3"),
        (lambda: CacheConfig(policy="fifo"), ValueError, "'lru', 'lfu'"),
        (lambda: TableSpec(3, 4, placement="uvm"), ValueError, "'managed_caching', 'disk'"),
        (lambda: TableSpec(3, 4, "a.b"), ValueError, "without dots"),
        (lambda: Precision(states=torch.float64), ValueError, "Precision.states must be float32"),
        (lambda: Precision(stochastic_rounding=7), TypeError, r"StochasticRounding\(seed"),
        (lambda: StochasticRounding(-1), ValueError, r"in \[0, 2\^53\)"),
        (lambda: optim.External(0.1), ValueError, "has no learning rate"),
        (lambda: optim.SGD(0.1, weight_decay=0.1), ValueError, r"L2\(rate\) or Decoupled"),
        (lambda: optim.LARS(0.1, weight_decay=optim.Decoupled(0.1)), ValueError, r"L2\(rate\)"),
        (lambda: optim.EnsembleRowwiseAdagrad(0.1, swap_every=1.5), TypeError, "must be an int"),
    ],
)
def test_wrong_choices_say_what_is_right(make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_learning_rates_may_be_tensors_of_one_number() -> None:
    module = small(optim.SGD(0.1))
    for lr in (torch.tensor(0.5), torch.tensor([0.25])):
        module.set_learning_rate(lr)
        assert module.learning_rate == float(lr)


def test_tables_without_a_fused_update_name_the_way_out() -> None:
    module = small(optim.External(gradient="dense"))
    before = module.hyperparams.clone()
    with pytest.raises(ValueError, match=r"External has \d+ hyperparameters, got shape \(\)"):
        module.load_hyperparams(torch.tensor(0.5))
    assert torch.equal(module.hyperparams, before)
    with pytest.raises(RuntimeError, match="call its step"):
        module.apply_gradients()
    with pytest.raises(RuntimeError, match="pass deferred=True"):
        small(optim.SGD(0.1)).apply_gradients()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: TableBatchedEmbeddingBags(None), "tables must be a list of TableSpec"),
        (lambda: small(optim.SGD(0.1)).load_hyperparams([0.1]), "values must be a tensor"),
        (
            lambda: QuantizedEmbeddingBags([TableSpec(5, 4)]).write_rows(0, np.ones((5, 4))),
            "weights must be a tensor, got ndarray",
        ),
        (
            lambda: QuantizedEmbeddingBags.from_float(torch.ones(5, 4).to_sparse()),
            "must be a dense matrix",
        ),
        (
            lambda: TTEmbeddingBag.from_dense(nn.EmbeddingBag(5, 4), ranks=(2,)),
            "weight must be a tensor, got EmbeddingBag",
        ),
        (lambda: TTEmbeddingBag.from_dense(torch.ones(5, 4), ranks=2), "ranks must be a list"),
        (
            lambda: TTEmbeddingBag.from_dense(torch.ones(5, 4), ranks=(2,), counts=[1] * 5),
            "counts must be a tensor, got list",
        ),
        (lambda: small()(INDICES, OFFSETS, batch_sizes=2), "must be one list of ints per feature"),
        (lambda: small()(INDICES, OFFSETS, batch_sizes=[["1"], ["2"]]), "must be ints"),
    ],
)
def test_arguments_of_another_class_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call()


def test_indices_of_three_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"need offsets.*got \(1, 1, 5\)"):
        TTEmbeddingBag(TTSpec(5, 4, (2,)))(INDICES.view(1, 1, -1))
