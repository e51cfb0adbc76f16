"""The hyperparameters of an optimizer while a module trains, and its work outside kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from emblib import CacheConfig, Placement, Pooling, TableBatchedEmbeddingBags, TableSpec, optim

INDICES, OFFSETS = torch.tensor([0, 2, 2, 4]), torch.tensor([0, 1, 3, 4])


def make(optimizer: optim.Optimizer, **options: Any) -> TableBatchedEmbeddingBags:
    torch.manual_seed(0)
    return TableBatchedEmbeddingBags([TableSpec(6, 4, "t")], optimizer, **options)


def train(module: TableBatchedEmbeddingBags, grad: float = 1.0) -> Tensor:
    device = module.weights.device
    out = module(INDICES.to(device), OFFSETS.to(device))
    out.backward(torch.full_like(out, grad))
    return out.detach()


def test_numbers_change_while_training_goes_on(device: torch.device) -> None:
    module = make(optim.RowwiseAdagrad(0.5, eps=0.0), device=device)
    train(module)
    module.set_learning_rate(0.25)
    module.set_hyperparameters(eps=1.0, weight_decay=optim.L2(0.0))
    assert (module.learning_rate, module.step) == (0.25, 1)
    before = module.table_weights()[0].clone()
    train(module)
    moved = before - module.table_weights()[0]
    # Row 0: s = 1 + 1; row 2, looked up twice: s = 4 + 4 with a gradient of 2.
    assert_close(moved[0], torch.full((4,), 0.25 / (2**0.5 + 1.0), device=device))
    assert_close(moved[2], torch.full((4,), 0.25 * 2 / (8**0.5 + 1.0), device=device))
    assert repr(module).count("eps=1.0") == 1


def test_another_kind_of_optimizer_is_refused() -> None:
    module = make(optim.RowwiseAdagrad(0.5))
    for change in ({"counter": optim.Counter()}, {"max_norm": 0.01}):
        with pytest.raises(ValueError, match="make another kind of optimizer"):
            module.set_hyperparameters(**change)
    with pytest.raises(TypeError, match="betas"):
        module.set_hyperparameters(betas=(0.9, 0.9))
    with pytest.raises(ValueError, match="eps must be"):
        module.set_hyperparameters(eps=-1.0)
    with pytest.raises(RuntimeError, match="for your own optimizer: set its numbers"):
        make(optim.External()).set_hyperparameters(lr=1.0)


def test_the_step_can_be_set() -> None:
    first, second = (make(optim.Adam(0.1)) for _ in range(2))
    second.set_step(1000)
    train(first)
    train(second)
    assert second.step == 1001
    assert not torch.equal(first.weights, second.weights), "the bias correction sees the step"
    with pytest.raises(ValueError, match=">= 0"):
        first.set_step(-1)


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.External])
def test_gradients_are_clamped_before_anything_else(optimizer: Any, device: torch.device) -> None:
    rate = 0.0 if optimizer is optim.External else 1.0
    module = make(optimizer(lr=rate, max_gradient=0.5), device=device)
    before = module.table_weights()[0].clone()
    train(module, grad=3.0)
    moved = before - module.table_weights()[0]
    if optimizer is optim.External:
        moved = module.weights.grad.to_dense()
    assert_close(moved[0], torch.full((4,), 0.5, device=device))
    assert_close(moved[2], torch.full((4,), 1.0, device=device))  # two lookups of 0.5


def test_global_decay_reads_and_updates_decayed_rows(device: torch.device) -> None:
    decay, lr, eps = 0.2, 0.5, 1e-3
    module = make(
        optim.RowwiseAdagrad(lr, eps=eps, global_decay=optim.GlobalDecay(decay)), device=device
    )
    table = module.table_weights()[0].double()
    total, last = torch.zeros(6, dtype=torch.float64), [0] * 6
    batches = [[0, 2, 2, 4], [2, 2, 3, 1], [0, 4, 4, 4], [5, 5, 5, 5], [0, 1, 2, 3]]
    for step, rows in enumerate(batches, start=1):
        indices = torch.tensor(rows, device=device)

        def scale(row: int) -> float:
            missed = step - last[row] - 1  # noqa: B023
            return (1 - lr * decay) ** missed if last[row] > 0 else 1.0

        read = torch.stack([table[r] * scale(r) for r in rows])
        want = torch.stack([read[0], read[1] + read[2], read[3]])
        with torch.no_grad():
            assert_close(module(indices, OFFSETS.to(device)).double(), want, rtol=1e-5, atol=1e-6)
        out = module(indices, OFFSETS.to(device))
        assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
        out.backward(torch.ones_like(out))
        for row in set(rows):
            gradient = float(rows.count(row))
            value = table[row] * scale(row)
            total[row] += gradient**2
            multiplier = lr / (total[row].sqrt() + eps)
            table[row] = (1 - lr * decay) * value - multiplier.to(value) * gradient
            last[row] = step
    assert_close(module.table_weights()[0].double(), table, rtol=1e-5, atol=1e-6)


def test_global_decay_needs_pooling_and_tables_on_the_device() -> None:
    optimizer = optim.RowwiseAdagrad(0.1, global_decay=optim.GlobalDecay(0.1))
    with pytest.raises(ValueError, match="use pooling SUM or MEAN"):
        make(optimizer, pooling=Pooling.NONE)
    with pytest.raises(ValueError, match="all tables must have placement device or host"):
        TableBatchedEmbeddingBags([TableSpec(6, 4, "t", Placement.MANAGED)], optimizer)
    with pytest.raises(ValueError, match="none may be cached"):
        TableBatchedEmbeddingBags(
            [TableSpec(6, 4, "t", Placement.MANAGED_CACHING)], optim.EnsembleRowwiseAdagrad(0.1)
        )


def test_ensemble_swaps_the_moving_average_in(device: torch.device) -> None:
    optimizer = optim.EnsembleRowwiseAdagrad(0.5, average_every=2, swap_every=4, start=1, keep=0.25)
    module = make(optimizer, device=device)
    fast = module.table_weights()[0].clone()
    slow, total = torch.zeros_like(fast), torch.zeros(6, device=device)
    for number in range(1, 9):
        if number % 2 == 0:
            slow = 0.25 * slow + 0.75 * fast
        if number % 4 == 0:
            fast = slow.clone()
        out = train(module)
        assert_close(out, torch.stack([fast[0], 2 * fast[2], fast[4]]))
        for row, gradient in ((0, 1.0), (2, 2.0), (4, 1.0)):
            total[row] += gradient**2
            fast[row] -= 0.5 / (total[row].sqrt() + 1e-8) * gradient
    assert_close(module.table_weights()[0], fast)
    assert_close(module.table_optimizer_states()[0]["sparse_ema"], slow)


class Recorder:
    """A reporter of every other step."""

    def __init__(self) -> None:
        self.durations: list[tuple[int, str]] = []
        self.amounts: dict[tuple[int, str], int] = {}

    def should_report(self, iteration_step: int) -> bool:
        return iteration_step % 2 == 0

    def report_duration(
        self, iteration_step: int, event_name: str, duration_ms: float, **_: Any
    ) -> None:
        assert duration_ms >= 0.0
        self.durations.append((iteration_step, event_name))

    def report_data_amount(
        self, iteration_step: int, event_name: str, data_bytes: int, **names: Any
    ) -> None:
        assert names["tbe_id"] == "mine"
        self.amounts[iteration_step, event_name] = data_bytes


def test_a_reporter_gets_what_happens() -> None:
    module = TableBatchedEmbeddingBags(
        [TableSpec(6, 4, "t", Placement.MANAGED_CACHING)], optim.SGD(0.1), cache=CacheConfig(sets=1)
    )
    recorder = Recorder()
    module.set_stats_reporter(recorder, tbe_id="mine")
    for _ in range(3):
        module.prefetch(INDICES, OFFSETS)
        train(module)
    times = [(0, "tbe.prefetch_time"), (0, "tbe.forward_time")]
    assert recorder.durations == [*times, *((2, event) for _, event in times)]
    assert recorder.amounts[2, "tbe.lookups"] == 4
    assert recorder.amounts[2, "tbe.weights_bytes"] == 96
    assert recorder.amounts[2, "tbe.cache.unique_misses"] == 3
    assert recorder.amounts[2, "tbe.cache.t.lookups"] == 12
    module.set_stats_reporter(None)
    train(module)
    assert len(recorder.durations) == 4
    with pytest.raises(TypeError, match="a statistics reporter must have"):
        module.set_stats_reporter(print)
