"""DynamicEmb's module over emblib's: lookups, training, scores, admission and checks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from emblib.compat.dynamicemb import (
    BatchedDynamicEmbeddingTablesV2,
    DynamicEmbCheckMode,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    EmbOptimType,
    FrequencyAdmissionStrategy,
    KVCounter,
)
from tests.compat.dynamicemb_cases import keys_of, look_up, one_table, options, rows_of

Mode, Score = DynamicEmbInitializerMode, DynamicEmbScoreStrategy
COMPOUND = (Score.TIMESTAMP, Score.LFU)


def test_training_inserts_and_evaluation_does_not() -> None:
    """Features 0 and 1 share a table, as in DynamicEmb's own test of the two."""
    module = BatchedDynamicEmbeddingTablesV2(
        [
            options(dim=8, max_capacity=2048, init_capacity=1024, initializer_args=_uniform())
            for _ in range(3)
        ],
        feature_table_map=[0, 0, 1, 2],
        pooling_mode=DynamicEmbPoolingMode.NONE,
    )
    ids = torch.tensor([0, 1, 12, 64, 8, 12, 15, 2, 7, 105, 0])
    offsets = torch.tensor([0, 2, 3, 5, 6, 8, 10, 10, 11])
    trained = module(ids, offsets)
    assert trained.shape == (11, 8)
    assert_close(trained[2], trained[5])
    module.eval()
    with torch.no_grad():
        assert_close(module(ids, offsets), trained.detach())
        other = ids.clone()
        other[0] = 777
        read = module(other, offsets)
    assert not read[0].any()
    assert_close(read[1:], trained[1:].detach())
    module.train()
    again = module(other, offsets)
    assert (again[0] != 0).all()
    assert_close(again[1:], trained[1:])


def _uniform() -> DynamicEmbInitializerArgs:
    return DynamicEmbInitializerArgs(mode=Mode.UNIFORM)


@pytest.mark.parametrize("mode", list(DynamicEmbPoolingMode))
def test_pooling(mode: DynamicEmbPoolingMode) -> None:
    module = one_table(pooling_mode=mode)
    ids, offsets = torch.tensor([3, 5, 8, 3]), torch.tensor([0, 2, 2, 4])
    sums = torch.tensor([8.0, 0.0, 11.0])
    want = {
        DynamicEmbPoolingMode.SUM: sums,
        DynamicEmbPoolingMode.MEAN: sums / 2,
        DynamicEmbPoolingMode.NONE: ids.float(),
    }[mode]
    assert_close(module(ids, offsets).detach(), want[:, None].expand(-1, 4))


def test_pooling_weights_scale_rows_and_are_trained() -> None:
    module = one_table(pooling_mode=DynamicEmbPoolingMode.SUM)
    weights = torch.tensor([0.5, 2.0], requires_grad=True)
    out = module(torch.tensor([4, 6]), torch.tensor([0, 2]), pooling_weights=weights)
    assert_close(out.detach(), torch.full((1, 4), 14.0))
    out.sum().backward()
    assert_close(weights.grad, torch.tensor([16.0, 24.0]))
    with pytest.raises(ValueError, match="pooling_weights need pooling_mode SUM or MEAN"):
        look_up(one_table(), [1], pooling_weights=torch.ones(1))


def _sgd(w: Tensor, g: Tensor, s: list[Tensor], step: int) -> None:
    w -= 0.3 * g


def _adam(w: Tensor, g: Tensor, s: list[Tensor], step: int) -> None:
    s[0].mul_(0.8).add_(0.2 * g)
    s[1].mul_(0.888).add_(0.112 * g * g)
    m, v = s[0] / (1 - 0.8**step), s[1] / (1 - 0.888**step)
    w -= 0.3 * (m / (v.sqrt() + 3e-5) + 0.06 * w)


def _adagrad(w: Tensor, g: Tensor, s: list[Tensor], step: int) -> None:
    s[0].add_(g * g)
    w -= 0.3 * g / (s[0].sqrt() + 3e-5)


def _rowwise(w: Tensor, g: Tensor, s: list[Tensor], step: int) -> None:
    s[0].add_((g * g).mean())
    w -= 0.3 * g / (s[0].sqrt() + 3e-5)


RULES: dict[EmbOptimType, tuple[Any, dict[str, float]]] = {
    EmbOptimType.SGD: (_sgd, {}),
    EmbOptimType.EXACT_SGD: (_sgd, {}),
    EmbOptimType.ADAM: (
        _adam,
        {"weight_decay": 0.06, "eps": 3e-5, "beta1": 0.8, "beta2": 0.888},
    ),
    EmbOptimType.EXACT_ADAGRAD: (_adagrad, {"eps": 3e-5, "initial_accumulator_value": 0.25}),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (
        _rowwise,
        {"eps": 3e-5, "initial_accumulator_value": 0.25},
    ),
}


@pytest.mark.parametrize("kind", RULES, ids=lambda kind: kind.name)
def test_rows_are_trained_by_the_formulas(kind: EmbOptimType) -> None:
    """Gradients of a key are summed, every state begins at initial_accumulator_value."""
    rule, numbers = RULES[kind]
    module = one_table(optimizer=kind, learning_rate=0.3, **numbers)
    value = numbers.get("initial_accumulator_value", 0.0)
    want: dict[int, Tensor] = {}
    states: dict[int, list[Tensor]] = {}
    generator = torch.Generator().manual_seed(3)
    for step in range(1, 5):
        ids = torch.randint(-4, 5, (10,), generator=generator)
        grad = torch.randn(10, 4, generator=generator)
        look_up(module, ids).backward(grad)
        for key in set(ids.tolist()):
            first = torch.full((4,), float(key % 2**64 % 100000))
            row = want.setdefault(key, first)
            width = 1 if kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD else 4
            state = states.setdefault(key, [torch.full((width,), value) for _ in range(2)])
            rule(row, grad[ids == key].sum(0), state, step)
    assert_close(rows_of(module, list(want)), torch.stack(list(want.values())))


def test_every_id_is_legal() -> None:
    module = one_table(index_type=torch.uint64)
    ids = torch.tensor([-1, -2, -3, -4, -(2**63), 2**63 - 1, 0]).view(torch.uint64)
    rows = look_up(module, ids)
    assert_close(rows[:, 0].detach(), torch.tensor([int(i) % 100000 for i in ids.tolist()]).float())
    assert keys_of(module) == sorted([-1, -2, -3, -4, -(2**63), 2**63 - 1, 0])


def test_first_values_follow_from_seed_and_key() -> None:
    """The same in any order of batches, by table, and within +-1/sqrt(max_capacity)."""

    def rows(batches: list[list[int]]) -> Tensor:
        torch.manual_seed(5)
        module = one_table(max_capacity=64, initializer_args=_uniform())
        for batch in batches:
            look_up(module, batch)
        return rows_of(module, [3, 4, 5])

    first = rows([[3], [4, 5]])
    assert torch.equal(first, rows([[5, 4, 3]]))
    assert first.unique().numel() == 12
    assert first.abs().max() <= 1 / math.sqrt(64)


@pytest.mark.parametrize(
    ("strategy", "gone"),
    [
        (Score.TIMESTAMP, {0, 1}),
        (Score.STEP, {0, 1}),
        (Score.LFU, {2, 3}),
        (COMPOUND, {2, 3}),
        (COMPOUND[::-1], {2, 3}),
    ],
    ids=str,
)
def test_what_gives_way(strategy: Any, gone: set[int]) -> None:
    """Keys 0 and 1 were used most often, but not for longest."""
    module = one_table(score_strategy=strategy)
    for _ in range(3):
        look_up(module, [0, 1])
    look_up(module, range(2, 32))
    look_up(module, [40, 41])
    assert set(range(32)) - set(keys_of(module)) == gone


def test_customised_scores_decide() -> None:
    module = one_table(score_strategy=Score.CUSTOMIZED, table_names=["t"])
    with pytest.raises(RuntimeError, match="need a score before their first batch"):
        look_up(module, [1])
    module.set_score({"t": 9})
    look_up(module, range(16))
    with pytest.warns(UserWarning, match=r"score of table 't' is less than before: 5 < 9"):
        module.set_score({"t": 5})
    look_up(module, range(16, 32))
    module.set_score({"t": 6})
    look_up(module, range(50, 60))
    assert set(range(16)) <= set(keys_of(module))
    assert module.get_score() == {"t": 6}


def test_the_warning_of_lower_scores_can_be_left_out(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv("DYNAMICEMB_CSTM_SCORE_CHECK", "0")
    module = one_table(score_strategy=Score.CUSTOMIZED, table_names=["t"])
    module.set_score({"t": 9})
    module.set_score({"t": 5})
    assert not recwarn.list


def test_scores_are_set_where_they_are_used() -> None:
    module = one_table(score_strategy=Score.STEP, table_names=["t"])
    assert module.get_score() == {"t": 1}
    look_up(module, [1])
    assert module.get_score() == {"t": 2}
    with pytest.raises(ValueError, match=r"only tables with Eviction.CUSTOM take scores"):
        module.set_score({"t": 3})
    with pytest.raises(ValueError, match="must not be 0"):
        module.set_score({"t": 0})
    with pytest.raises(ValueError, match="no table is called 'x'"):
        module.set_score({"x": 1})


@pytest.mark.parametrize("strategy", [Score.LFU, COMPOUND], ids=str)
def test_per_sample_weights_are_uses(strategy: Any) -> None:
    """Key 7 stands for many uses in one lookup; its row is read once."""
    module = one_table(score_strategy=strategy, pooling_mode=DynamicEmbPoolingMode.SUM)
    counts = torch.tensor([100.0, 1.0])
    out = module(torch.tensor([7, 8]), torch.tensor([0, 2]), counts)
    assert_close(out.detach(), torch.full((1, 4), 15.0))
    look_up(module, [*range(100, 130)] * 2)
    look_up(module, [200])
    keys = set(keys_of(module))
    assert 7 in keys
    assert 8 not in keys


def test_per_sample_weights_raise_where_nothing_counts() -> None:
    with pytest.raises(ValueError, match=r"only LFU and \(TIMESTAMP, LFU\) count"):
        look_up(one_table(), [1], per_sample_weights=torch.ones(1))
    with pytest.raises(ValueError, match="must be whole numbers"):
        look_up(one_table(score_strategy=Score.LFU), [1], per_sample_weights=torch.tensor([0.5]))


def test_tables_without_eviction_say_when_they_are_full() -> None:
    module = one_table(score_strategy=Score.NO_EVICTION)
    look_up(module, range(32))
    with pytest.warns(UserWarning, match="1 keys found no slot"):
        rows = look_up(module, [40, 3])
    assert_close(rows[:, 0].detach(), torch.tensor([0.0, 3.0]))
    assert keys_of(module) == list(range(32))


@pytest.mark.parametrize("mode", list(DynamicEmbCheckMode), ids=lambda mode: mode.name)
def test_checks_do_what_they_say(
    mode: DynamicEmbCheckMode, recwarn: pytest.WarningsRecorder
) -> None:
    """40 keys of one batch have 32 places; the others read zeros, and garbage is nowhere."""
    module = one_table(safe_check_mode=mode)
    module.bags.weights.data.fill_(float("nan"))
    ids = list(range(1, 41))
    if mode is DynamicEmbCheckMode.ERROR:
        with pytest.raises(RuntimeError, match="8 keys found no slot"):
            look_up(module, ids)
        return
    rows = look_up(module, ids)
    assert_close(rows[:, 0].detach(), torch.tensor([*range(1, 33), *[0] * 8]).float())
    rows.sum().backward()
    assert torch.isfinite(rows_of(module, ids)).all()
    told = [str(w.message) for w in recwarn.list]
    assert ["8 keys found no slot" in t for t in told] == [True] * (mode.name == "WARNING")


@pytest.mark.parametrize("own", [True, False], ids=["own_initializer", "that_of_the_table"])
def test_admission(own: bool) -> None:
    """Keys get a row at the threshold; until then they read an initial value and do not learn."""
    args = DynamicEmbInitializerArgs(mode=Mode.CONSTANT, value=-7.0) if own else None
    module = one_table(
        admit_strategy=FrequencyAdmissionStrategy(3, args),
        admission_counter=KVCounter(64),
        learning_rate=1.0,
    )
    for ids, there in (([5, 6], []), ([5], []), ([5, 6], [5])):
        rows = look_up(module, ids)
        want = [float(i) if i in there or not own else -7.0 for i in ids]
        assert_close(rows[:, 0].detach(), torch.tensor(want))
        rows.sum().backward()
        assert keys_of(module) == there
    assert_close(rows_of(module, [5, 6])[:, 0], torch.tensor([4.0, 0.0]))


def test_a_threshold_of_zero_admits_all() -> None:
    module = one_table(
        admit_strategy=FrequencyAdmissionStrategy(0), admission_counter=KVCounter(64)
    )
    look_up(module, [5])
    assert keys_of(module) == [5]


def test_rules_of_admission_can_be_asked() -> None:
    rule = FrequencyAdmissionStrategy(2)
    assert rule.admit(torch.tensor([4, 5]), torch.tensor([1, 2])).tolist() == [False, True]
    with pytest.raises(ValueError, match="one frequency per key"):
        rule.admit(torch.tensor([4, 5]), torch.tensor([1]))
    with pytest.raises(ValueError, match="threshold must be >= 0, got -1"):
        FrequencyAdmissionStrategy(-1)


def test_tables_that_do_not_train_keep_no_state() -> None:
    module = one_table(training=False, optimizer=EmbOptimType.ADAM)
    assert module.bags.optimizer.states == ()
    with pytest.raises(RuntimeError, match="training=False"):
        look_up(module, [1])
    assert not rows_of(module, [1]).any()


def test_growth_keeps_rows() -> None:
    module = one_table(max_capacity=4096, init_capacity=32, max_load_factor=0.5)
    for start in range(0, 2000, 100):
        look_up(module, range(start, start + 100))
    ids = torch.arange(2000)
    assert_close(rows_of(module, ids)[:, 0], ids.float())
    assert module.bags.capacity(0) >= 4000


def test_learning_rate_can_be_set() -> None:
    module = one_table()
    module.set_learning_rate(2.0)
    look_up(module, [5]).sum().backward()
    assert_close(rows_of(module, [5])[0], torch.full((4,), 3.0))


def test_what_has_nothing_to_do_may_be_called() -> None:
    module = one_table(table_names=["t"])
    ids, offsets = torch.tensor([1]), torch.tensor([0, 1])
    module.prefetch(ids, offsets)
    module.flush()
    module.reset_cache_states()
    assert keys_of(module) == []
    assert module.table_names == ["t"]
    assert [tuple(w.shape) for w in module.split_embedding_weights()] == [(1, 1)]


def scores_of(module: BatchedDynamicEmbeddingTablesV2) -> dict[int, int]:
    """The score of each key of the first table."""
    found = module.bags.index.export(0)
    numbers = found.stamps if found.scores is None else found.scores
    return dict(zip(found.keys.tolist(), numbers.tolist(), strict=True))


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_a_prefetched_batch_counts_as_a_step(ahead: int) -> None:
    """The batches of a pipeline have the scores that they have without it, and get_score leads."""
    module, plain = (one_table(score_strategy=Score.STEP, table_names=["t"]) for _ in range(2))
    batches = [torch.tensor([n, 5 + n % 2]) for n in range(5)]
    for n in range(ahead):
        module.prefetch(batches[n], torch.arange(3))
    assert module.get_score() == {"t": 1 + ahead}
    for n, ids in enumerate(batches):
        if n > 0 and n + ahead - 1 < 5:
            module.prefetch(batches[n + ahead - 1], torch.arange(3))
        assert module.get_score() == {"t": 1 + min(n + ahead, 5)}
        assert torch.equal(look_up(module, ids), look_up(plain, ids))
        assert scores_of(module) == scores_of(plain)
    assert module.get_score() == plain.get_score() == {"t": 6}
    look_up(module, [1])
    assert scores_of(module)[1] == 6


def test_a_batch_has_the_score_that_was_set_when_it_was_prefetched() -> None:
    module = one_table(score_strategy=Score.CUSTOMIZED, table_names=["t"])
    with pytest.raises(RuntimeError, match="need a score before their first batch"):
        module.prefetch(torch.tensor([1]), torch.arange(2))
    module.set_score({"t": 11})
    module.prefetch(torch.tensor([1]), torch.arange(2))
    module.set_score({"t": 12})
    module.prefetch(torch.tensor([2]), torch.arange(2))
    module.set_score({"t": 13})
    for key in (1, 2, 3):
        look_up(module, [key])
        assert module.get_score() == {"t": 13}
    assert scores_of(module) == {1: 11, 2: 12, 3: 13}


def test_a_prefetched_batch_has_the_counts_it_was_prefetched_with() -> None:
    module = one_table(score_strategy=Score.LFU)
    module.prefetch(torch.tensor([1, 2]), torch.arange(3), frequency_counters=torch.tensor([5, 7]))
    module.prefetch(torch.tensor([1, 2]), torch.arange(3))
    look_up(module, [1, 2], per_sample_weights=torch.tensor([100, 100]))
    look_up(module, [1, 2], per_sample_weights=torch.tensor([1, 2]))
    assert scores_of(module) == {1: 6, 2: 9}
    with pytest.raises(ValueError, match="which only LFU"):
        one_table().prefetch(torch.tensor([1]), torch.arange(2), None, None, torch.tensor([1]))


def test_the_time_of_the_next_batch_is_after_those_prefetched() -> None:
    module = one_table(score_strategy=Score.TIMESTAMP, table_names=["t"])
    look_up(module, [4])
    module.prefetch(torch.tensor([1]), torch.arange(2))
    since = module.get_score()["t"]
    look_up(module, [1])
    assert module.get_score() == {"t": since}
    assert scores_of(module)[1] < since


def test_prefetch_of_a_module_that_does_not_train_counts_nothing() -> None:
    module = one_table(score_strategy=Score.STEP, table_names=["t"])
    module.eval()
    module.prefetch(torch.tensor([1]), torch.arange(2))
    assert module.get_score() == {"t": 1}
    module.train()
    module.prefetch(torch.tensor([1]), torch.arange(2))
    rows_of(module, [9])
    assert module.num_prefetched == 1, "an evaluation took a batch of training"
    with pytest.raises(NotImplementedError, match="batch_size_per_feature_per_rank"):
        module.prefetch(torch.tensor([1]), torch.arange(2), None, [[1]])


def test_a_batch_that_cannot_be_looked_up_leaves_the_counted_steps() -> None:
    module = one_table(score_strategy=Score.STEP, table_names=["t"])
    for n in range(2):
        module.prefetch(torch.tensor([n]), torch.arange(2))
    with pytest.raises((RuntimeError, ValueError)):
        module(torch.tensor([0]), torch.zeros(0, dtype=torch.int64))
    assert module.get_score() == {"t": 3}
    look_up(module, [1])
    assert scores_of(module) == {1: 2}
