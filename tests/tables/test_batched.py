"""The TBE module: state, errors, bounds modes and what users do with a module."""

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from emblib import (
    BoundsCheck,
    Pooling,
    Precision,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)
from tests.tbe_cases import OPTIMIZERS

INDICES = torch.tensor([0, 2, 1, 4, 4])
OFFSETS = torch.tensor([0, 1, 3, 3, 5])


def small(optimizer: optim.Optimizer | None = None, **options: Any) -> TableBatchedEmbeddingBags:
    torch.manual_seed(0)
    return TableBatchedEmbeddingBags([TableSpec(3, 4), TableSpec(5, 8)], optimizer, **options)


def one_step(module: TableBatchedEmbeddingBags) -> None:
    device = module.weights.device
    out = module(INDICES.to(device), OFFSETS.to(device))
    out.backward(torch.ones_like(out))


def test_output_is_one_row_a_sample(device: torch.device) -> None:
    module = small(device=device)
    out = module(INDICES.to(device), OFFSETS.to(device))
    first, second = module.table_weights()
    want = torch.cat(
        [torch.stack([first[0], first[2] + first[1]]), torch.stack([second[0] * 0, second[4] * 2])],
        dim=1,
    )
    assert_close(out.detach(), want)


def test_backward_updates_only_touched_rows(device: torch.device) -> None:
    module = small(optim.SGD(0.5), device=device)
    before = [table.clone() for table in module.table_weights()]
    one_step(module)
    after = module.table_weights()
    assert_close(after[0], before[0] - 0.5)
    assert torch.equal(after[1][:4], before[1][:4])
    assert_close(after[1][4], before[1][4] - 2 * 0.5)
    assert module.weights.grad is None
    assert module.step == 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_state_dict_round_trip_resumes_exactly(optimizer: str, device: torch.device) -> None:
    module, other = (small(OPTIMIZERS[optimizer], device=device) for _ in range(2))
    one_step(module)
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    for copied in (other, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert copied.step == 1
        expected = copy.deepcopy(module)
        one_step(copied)
        one_step(expected)
        assert torch.equal(copied.weights, expected.weights)
        for state, want in zip(copied._states(), expected._states(), strict=True):
            assert torch.equal(state, want)


def test_copies_are_independent() -> None:
    module = small(optim.Adagrad(0.1))
    twin = copy.deepcopy(module)
    before = module.weights.detach().clone()
    one_step(twin)
    assert torch.equal(module.weights, before)
    assert not module.table_optimizer_states()[0]["sum"].any()


def test_views_share_memory_and_shape() -> None:
    module = small(optim.RowwiseAdagrad(0.1))
    module.table_weights()[1].fill_(7.0)
    assert module.weights.detach()[12:].eq(7.0).all()
    module.weights.data.zero_()
    one_step(module)
    states = module.table_optimizer_states()
    assert [state["sum"].shape for state in states] == [(3,), (5,)]
    assert states[0]["sum"].tolist() == [1.0, 1.0, 1.0]
    assert states[1]["sum"].tolist() == [0.0, 0.0, 0.0, 0.0, 4.0]
    elementwise = small(optim.Adam(0.1)).table_optimizer_states()
    assert elementwise[1]["exp_avg_sq"].shape == (5, 8)


def test_learning_rate_takes_effect_at_once() -> None:
    module = small(optim.SGD(0.5))
    module.set_learning_rate(0.0)
    before = module.weights.detach().clone()
    one_step(module)
    assert torch.equal(module.weights, before)
    assert module.learning_rate == 0.0


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), -0.1])
def test_bad_learning_rate_changes_nothing(lr: float) -> None:
    module = small(optim.SGD(0.5))
    with pytest.raises(ValueError, match="finite number >= 0"):
        module.set_learning_rate(lr)
    assert module.learning_rate == 0.5
    with pytest.raises(ValueError, match="finite number >= 0"):
        optim.SGD(lr)


def test_external_optimizer_equals_fused() -> None:
    tables = [TableSpec(30, 4), TableSpec(5, 4)]
    torch.manual_seed(0)
    external = TableBatchedEmbeddingBags(tables, optim.External())
    fused = TableBatchedEmbeddingBags(tables, optim.SGD(0.1))
    fused.weights.data.copy_(external.weights.detach().view(-1))
    torch_sgd = torch.optim.SGD([external.weights], lr=0.1)
    for _ in range(3):
        torch_sgd.zero_grad()
        one_step(external)
        torch_sgd.step()
        one_step(fused)
    assert_close(external.weights.detach().view(-1), fused.weights.detach())


def test_fused_adam_equals_sparse_adam() -> None:
    tables = [TableSpec(30, 4), TableSpec(5, 4)]
    torch.manual_seed(0)
    external = TableBatchedEmbeddingBags(tables, optim.External())
    fused = TableBatchedEmbeddingBags(tables, optim.Adam(0.1))
    fused.weights.data.copy_(external.weights.detach().view(-1))
    sparse_adam = torch.optim.SparseAdam([external.weights], lr=0.1)
    for _ in range(5):
        sparse_adam.zero_grad()
        one_step(external)
        sparse_adam.step()
        one_step(fused)
    assert_close(external.weights.detach().view(-1), fused.weights.detach(), rtol=1e-4, atol=1e-6)


def test_fatal_raises_before_anything_is_written() -> None:
    module = small(optim.SGD(0.5), bounds_check=BoundsCheck.FATAL)
    before = module.weights.detach().clone()
    with pytest.raises(RuntimeError, match=r"feature 0 must be in \[0, 3\).*got 3 at position 1"):
        module(torch.tensor([0, 3, 1, 4, 4]), OFFSETS)
    with pytest.raises(RuntimeError, match=r"not decrease.*got 3 at position 2"):
        module(INDICES, torch.tensor([0, 5, 3, 3, 5]))
    with pytest.raises(RuntimeError, match="got 4 at position 4"):
        module(INDICES, torch.tensor([0, 1, 3, 3, 4]))
    assert torch.equal(module.weights, before)
    assert module(torch.tensor([-1, 2, 1, 4, 4]), OFFSETS)[0, :4].eq(0).all()


def test_warning_warns_counts_and_repairs() -> None:
    module = small(optim.SGD(0.5), bounds_check=BoundsCheck.WARNING)
    bad = torch.tensor([0, 99, 1, -5, 4])
    with pytest.warns(UserWarning, match="2 indices and 0 offsets out of bounds"):
        out = module(bad, OFFSETS)
    assert torch.equal(out, module(torch.tensor([0, 0, 1, 0, 4]), OFFSETS))
    assert module.bounds_violations.tolist() == [2, 0]
    assert bad.tolist() == [0, 99, 1, -5, 4]


@pytest.mark.parametrize("mode", [BoundsCheck.IGNORE, BoundsCheck.NONE])
def test_silent_modes_never_read_out_of_bounds(mode: BoundsCheck) -> None:
    module = small(optim.SGD(0.5), bounds_check=mode)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = module(torch.tensor([2**40, -(2**40), 1, 7, -1]), torch.tensor([-9, 50, 1, 3, 3]))
        out.sum().backward()
    assert bool(out.isfinite().all())
    assert bool(module.weights.isfinite().all())


def test_dtype_is_chosen_once_and_device_moves(device: torch.device) -> None:
    module = (
        small(optim.Adagrad(0.1), precision=Precision(torch.float16))
        .half()
        .to(device)
        .to(torch.bfloat16)
    )
    assert module.weights.dtype == torch.float16
    assert module.state_sum.dtype == torch.float32
    assert module.hyperparams.dtype == torch.float64
    assert module.weights.device.type == device.type
    one_step(module)


def test_moves_from_meta() -> None:
    module = small(optim.Adagrad(0.1), device="meta").to_empty(device="cpu")
    module.reset_parameters()
    one_step(module)
    assert module.features.tolist() == [[0, 0, 3, 4, 0, 0, 0, 0], [12, 3, 5, 8, 4, 0, 3, 0]]
    assert module.step == 1
    saved = small(optim.Adagrad(0.1))
    one_step(saved)
    for assign in (False, True):
        other = small(optim.Adagrad(0.1), device="meta")
        if not assign:
            other = other.to_empty(device="cpu")
        other.load_state_dict(saved.state_dict(), assign=assign)
        want = copy.deepcopy(saved)
        one_step(other)
        one_step(want)
        assert torch.equal(other.weights, want.weights)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ([TableSpec(3, 4), TableSpec(5, 8)], {"pooling": Pooling.NONE}, ValueError, "one dim"),
        ([TableSpec(3, 4)], {"feature_tables": [1]}, ValueError, r"in \[0, 1\)"),
        ([TableSpec(3, 4)], {"precision": torch.float16}, TypeError, "must be a Precision"),
        ([TableSpec(3, 4)], {"cache": 0.2}, TypeError, "must be a Cache"),
        ([TableSpec(3, 4)], {"pooling": "max"}, ValueError, "max"),
        (
            [TableSpec(3, 4), TableSpec(5, 8)],
            {"optimizer": optim.External()},
            ValueError,
            "needs one dim",
        ),
    ],
)
def test_bad_choices_are_refused(
    arguments: list[TableSpec], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        TableBatchedEmbeddingBags(arguments, **options)


@pytest.mark.parametrize(
    ("rows", "dim", "error"),
    [
        (-1, 4, ValueError),
        (3, 0, ValueError),
        (3, -1, ValueError),
        (3.0, 4, TypeError),
        (True, 4, TypeError),
    ],
)
def test_bad_specs_are_refused(rows: Any, dim: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="must be"):
        TableSpec(rows, dim)


def test_wrong_forward_input_is_refused() -> None:
    module = small()
    with pytest.raises(RuntimeError, match=r"1 entries for F = 2 features, got 4"):
        module(INDICES, torch.tensor([0, 1, 3, 5]))
    with pytest.raises(RuntimeError, match="indices must be int32 or int64"):
        module(INDICES.float(), OFFSETS)
    with pytest.raises(RuntimeError, match="one entry a lookup = 5, got 2"):
        module(INDICES, OFFSETS, torch.ones(2))


def test_repr_and_sizes() -> None:
    module = small(optim.RowwiseAdagrad(0.1))
    assert "3 x 4" in repr(module)
    assert "RowwiseAdagrad(lr=0.1" in repr(module)
    assert module.nbytes() == {
        "weights": 4 * (12 + 40),
        "optimizer_state": 4 * 8,
        "cache": 0,
    }


def test_initial_weights_are_uniform_by_table() -> None:
    torch.manual_seed(0)
    module = TableBatchedEmbeddingBags([TableSpec(10_000, 8), TableSpec(100, 8)])
    for table, rows in zip(module.table_weights(), (10_000, 100), strict=True):
        bound = rows**-0.5
        assert table.abs().max() <= bound
        assert_close(table.std().item(), bound / 3**0.5, rtol=0.05, atol=0)
        assert abs(table.mean().item()) < 0.1 * bound
