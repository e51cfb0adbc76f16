"""The methods of FBGEMM's interface around its optimizers."""

from typing import Any

import pytest
import torch

from emblib import optim
from emblib.compat import fbgemm as ours
from emblib.compat.fbgemm import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    EmbeddingLocation,
    GlobalWeightDecayDefinition,
    OptimType,
    WeightDecayMode,
)
from tests.compat.peer import fbgemm
from tests.compat.small import CACHED, HOST, INDICES, OFFSETS, make, step


def test_learning_rate_and_step() -> None:
    module = make(learning_rate=0.5)
    assert module.get_learning_rate() == 0.5
    before = module.split_embedding_weights()[0].clone()
    module.set_learning_rate(0.0)
    step(module)
    assert torch.equal(module.split_embedding_weights()[0], before)
    assert module.iter.item() == 1
    module.set_optimizer_step(41)
    step(module)
    assert module.iter.item() == 42
    assert module.step == 2


def test_hyper_parameters() -> None:
    module = make(optimizer=OptimType.ADAM, learning_rate=0.1)
    module.set_learning_rate(0.2)
    assert module.optimizer_args.learning_rate == 0.2
    step(module)
    module.update_hyper_parameters({"eps": 0.1, "beta1": 0.5, "beta2": 0.6, "weight_decay": 0.3})
    assert module.get_learning_rate() == 0.2
    assert module.optimizer_args.beta2 == 0.6
    assert module.bags.optimizer.betas == (0.5, 0.6)
    assert module.bags.optimizer.weight_decay.rate == 0.3
    assert module.iter.item() == 1
    with pytest.raises(NotImplementedError, match="hyper-parameter gamma"):
        module.update_hyper_parameters({"gamma": 1.0})
    with pytest.warns(UserWarning, match="lower_bound have no part in ADAM"):
        module.update_hyper_parameters({"lr": 1.0, "lower_bound": 2.0})
    assert module.get_learning_rate() == 1.0


def test_hyper_parameters_of_global_decay() -> None:
    module = make(
        optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
        weight_decay=0.1,
        weight_decay_mode=WeightDecayMode.DECOUPLE_GLOBAL,
        global_weight_decay=GlobalWeightDecayDefinition(lower_bound=0.1),
    )
    module.update_hyper_parameters({"lower_bound": 0.5, "weight_decay": 0.2})
    assert module.gwd_lower_bound == 0.5
    decay = module.bags.optimizer.global_decay
    assert (decay.rate, decay.lower_bound) == (0.2, 0.5)


@pytest.mark.parametrize(
    ("optimizer", "options", "keys"),
    [
        ("EXACT_ADAGRAD", {}, ["sum"]),
        ("EXACT_ROWWISE_ADAGRAD", {}, ["sum"]),
        ("EMAINPLACE_ROWWISE_ADAGRAD", {}, ["sum"]),
        ("ADAM", {}, ["exp_avg", "exp_avg_sq"]),
        ("PARTIAL_ROWWISE_LAMB", {}, ["exp_avg", "exp_avg_sq"]),
        ("ENSEMBLE_ROWWISE_ADAGRAD", {}, ["sum", "sparse_ema"]),
        (
            "EXACT_ROWWISE_ADAGRAD",
            {
                "weight_decay_mode": WeightDecayMode.DECOUPLE_GLOBAL,
                "global_weight_decay": GlobalWeightDecayDefinition(),
            },
            ["sum", "prev_iter", "iter"],
        ),
        (
            "EXACT_ROWWISE_ADAGRAD",
            {
                "weight_decay_mode": WeightDecayMode.COUNTER,
                "counter_based_regularization": CounterBasedRegularizationDefinition(
                    counter_weight_decay_mode=CounterWeightDecayMode.ADAGRADW
                ),
            },
            ["sum", "prev_iter", "row_counter", "iter"],
        ),
    ],
)
def test_state_names(optimizer: str, options: dict[str, Any], keys: list[str]) -> None:
    module = make(optimizer=OptimType[optimizer], **options)
    step(module)
    states = module.get_optimizer_state()
    assert [list(table) for table in states] == [keys, keys]
    split = module.split_optimizer_states()
    for table, tensors in zip(states, split, strict=True):
        for tensor, named in zip(tensors, table.values(), strict=False):
            assert tensor.data_ptr() == named.data_ptr()
    assert module.get_optimizer_buffer("momentum1_host").data_ptr() == split[0][0].data_ptr()
    for memory in ("dev", "uvm"):  # of which a table on the CPU has none
        assert module.get_optimizer_buffer(f"momentum1_{memory}").numel() == 0


@pytest.mark.parametrize("sizes", [None, [[1, 1], [2, 0]]])
def test_features_without_gradient_still_train(sizes: list[list[int]] | None) -> None:
    def train(wanted: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        module = make(optimizer=OptimType.EXACT_SGD, learning_rate=0.5)
        weights = torch.ones(len(INDICES), requires_grad=True)
        options = {
            "feature_requires_grad": wanted,
            "batch_size_per_feature_per_rank": sizes,
        }
        output = module(INDICES, offsets, weights, **options)
        output.backward(torch.arange(output.numel()).view_as(output).float())
        assert weights.grad is not None
        return weights.grad, torch.cat(module.split_embedding_weights())

    offsets = torch.tensor([0, 2, 5, 5, len(INDICES)])
    gradient, rows = train(None)
    masked, masked_rows = train(torch.tensor([0, 1]))
    assert gradient[:5].all()
    assert not masked[:5].any()
    assert torch.equal(masked[5:], gradient[5:])
    assert torch.equal(masked_rows, rows)
    with pytest.raises(ValueError, match=r"one entry per feature = 2, got shape \(3,\)"):
        train(torch.ones(3))
    for wrong, message in (([[1, 1], [2, 1]], "add up to 5 bags"), ([], "one list per feature")):
        with pytest.raises(ValueError, match=f"batch_sizes .*{message}"):
            make()(
                INDICES,
                offsets,
                torch.ones(len(INDICES)),
                feature_requires_grad=torch.tensor([0, 1]),
                batch_size_per_feature_per_rank=wrong,
            )


def test_no_optimizer_leaves_a_sparse_gradient() -> None:
    module = make(optimizer=OptimType.NONE)
    distinct = 3 + 5
    module(INDICES, OFFSETS, total_unique_indices=distinct).sum().backward()
    gradient = module.weights_dev.grad
    assert gradient.is_sparse
    assert gradient.shape == (12, 8)
    dense = gradient.to_dense().view(2, 6, 8)[:, :, 0]
    assert dense.tolist() == [[3, 2, 2, 0, 0, 0], [2, 1, 1, 1, 1, 0]]
    for method in ("split_optimizer_states", "get_optimizer_state"):
        with pytest.raises(NotImplementedError, match=method):
            getattr(module, method)()
    for method in ("set_learning_rate", "set_optimizer_step"):
        with pytest.raises(NotImplementedError, match=method):
            getattr(module, method)(1)


@pytest.mark.parametrize("location", [HOST, CACHED])
def test_pruned_rows_are_reset(location: EmbeddingLocation) -> None:
    module = make(location, optimizer=OptimType.ADAM)
    step(module)
    module.reset_embedding_weight_momentum(
        torch.tensor([1, 2, 0]), torch.tensor([0, 2, 3]), torch.tensor([1, 0]), torch.tensor([0, 1])
    )
    weights, states = module.split_embedding_weights(), module.split_optimizer_states()
    for tensor in (weights[1], *states[1]):
        assert (tensor[[1, 2]] == 0).all()
        assert (tensor[0] != 0).any()
    assert (weights[0][0] == 0).all()
    assert (weights[0][1] != 0).all()
    before = [weight.clone() for weight in weights]
    for wrong in (-1, len(weights[0])):
        with pytest.raises(IndexError, match="rows of table 0 must be in"):
            module.reset_embedding_weight_momentum(
                torch.tensor([3, wrong]), torch.tensor([0, 1, 2]), *torch.tensor([[1, 0], [0, 1]])
            )
    row, ends = torch.tensor([3]), torch.tensor([0, 1])
    for feature, buffer in ((2, 0), (-1, 0), (0, 1), (0, -1)):
        with pytest.raises(IndexError, match="2 features and 1 buffers"):
            module.reset_embedding_weight_momentum(row, ends, *torch.tensor([[feature], [buffer]]))
    with pytest.raises(ValueError, match=r"one entry per feature to prune, got \[2\] and \[1\]"):
        module.reset_embedding_weight_momentum(row, ends, torch.tensor([0, 1]), torch.tensor([0]))
    assert all(map(torch.equal, module.split_embedding_weights(), before))


@pytest.mark.parametrize("first_feature_only", [False, True])
@pytest.mark.parametrize("pooling", [ours.PoolingMode.SUM, ours.PoolingMode.NONE])
def test_write_back_assigns_rows(pooling: ours.PoolingMode, first_feature_only: bool) -> None:
    config = ours.UserEnabledConfigDefinition(
        use_writeback_bwd_prehook=True, writeback_first_feature_only=first_feature_only
    )
    module = make(learning_rate=1.0, pooling_mode=pooling, extra_optimizer_config=config)
    before = [w.clone() for w in module.split_embedding_weights()]
    indices, offsets = torch.tensor([3, 3, 5, 3, 3, 5]), torch.arange(7)
    module(indices, offsets).sum().backward()
    for t, (old, new) in enumerate(zip(before, module.split_embedding_weights(), strict=True)):
        expected = old.clone()
        if t == 0 or not first_feature_only:
            expected[[3, 5]] -= 1.0
        torch.testing.assert_close(new, expected)
    if pooling is ours.PoolingMode.SUM:
        with pytest.raises(ValueError, match="at most one lookup"):
            module(INDICES, OFFSETS)


@pytest.mark.parametrize("num_steps_before", [0, 2])
def test_in_place_averages_go_on_after_a_checkpoint(num_steps_before: int) -> None:
    """The module that loads may have trained already: a run that goes back to a checkpoint."""
    mode = ours.EmainplaceModeDefinition(step_ema=2, step_ema_coef=0.5)
    options = {"optimizer": OptimType.EMAINPLACE_ROWWISE_ADAGRAD, "emainplace_mode": mode}
    module = make(**options)
    step(module)
    other = make(**options)
    for _ in range(num_steps_before):
        step(other)
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(step(other), step(module))
    with pytest.raises(ValueError, match="even dims"):
        make(dim=3, **options)


def test_two_weighted_lookups_in_one_loss_train_as_in_fbgemm() -> None:
    """The second backward finds the rows as the first one has left them."""

    def train(library: Any) -> list[torch.Tensor]:
        place = (library.EmbeddingLocation.HOST, library.ComputeDevice.CPU)
        module = library.SplitTableBatchedEmbeddingBagsCodegen(
            [(10, 4, *place)], optimizer=library.OptimType.EXACT_SGD, learning_rate=0.5
        )
        module.split_embedding_weights()[0].copy_(torch.arange(40.0).view(10, 4) / 10)
        weights = [torch.full((5,), value, requires_grad=True) for value in (0.5, 0.25)]
        batch = torch.tensor([1, 2, 3, 2, 5]), torch.tensor([0, 2, 5])
        first, second = (module(*batch, w) for w in weights)
        (first + 2 * second).sum().backward()
        grads = [w.grad for w in weights if w.grad is not None]
        return [*grads, module.split_embedding_weights()[0]]

    got, want = train(ours), train(fbgemm())
    assert len(got) == 3
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_numbers_of_a_checkpoint_stay_when_another_is_set() -> None:
    """Also one that is set to the value with which the module was made."""
    given = {"beta2": 0.5, "eps": 0.25, "weight_decay": 0.125}
    saved, module = (make(optimizer=OptimType.ADAM, **numbers) for numbers in (given, {}))
    module.load_state_dict(saved.state_dict())
    module.update_hyper_parameters({"beta1": 0.75, "eps": 1.0e-8})
    assert module.bags.optimizer.betas == (0.75, 0.5)
    assert module.bags.optimizer.eps == 1e-8
    assert module.bags.optimizer.weight_decay == optim.Decoupled(0.125)
