"""Several sharded collections in one exchange give what each gives in one process."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from emblib import EmbeddingBagConfig, KeyedJaggedTensor, optim
from emblib.sharding import all_to_all, input_dist, input_messages
from emblib.sharding.codecs import BF16, CommPrecision
from emblib.sharding.headers import Content
from emblib.sharding.lookup import (
    InputCall,
    OutputCall,
    start_joint_input_dist,
    start_joint_output_dist,
)
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharded_sequences import ShardedEmbeddingCollection
from emblib.sharding.sharded_tables import GradientReduction
from emblib.specs import BoundsCheck, Pooling
from emblib.storage import Hash, TensorTrain
from tests import nightly
from tests.sharding import worlds
from tests.sharding.sharded_cases import (
    WORDS,
    Case,
    _close,
    batch,
    compare_tables,
    flat,
    make_sharded,
    make_source,
    plan_of,
    sequences,
    step_of_all,
    tables,
)

SUM, MEAN = Pooling.SUM, Pooling.MEAN
ADAM = optim.Adam(0.1)


@dataclass(frozen=True)
class Joint:
    """Cases that exchange together, and how their outputs are used.

    `backward` is "together", "apart" (one loss after another) or "all but one".
    """

    cases: tuple[Case, ...]
    backward: str = "together"
    is_merged: bool = True
    dedup: bool = False


def _sharded(ranks: RankGroup, case: Case, source: Any, *, dedup: bool) -> Any:
    if not dedup or not isinstance(case.configs[0], type(sequences(tables(SUM))[0])):
        return make_sharded(case, ranks, source)
    plan = plan_of(case, ranks)
    return ShardedEmbeddingCollection(
        source, plan, ranks, gradients=GradientReduction.SUM, dedup=True
    )


def _outputs(sharded: list[Any], batches: list[Any]) -> list[Any]:
    calls = [InputCall(one, own) for one, own in zip(sharded, batches, strict=True)]
    ids = start_joint_input_dist(calls).wait()
    assert ids is not None
    looked_up = []
    for one, pending in zip(sharded, ids, strict=True):
        received = pending.wait()
        looked_up.append(OutputCall(one, one.compute(received), received))
    return [output() for output in start_joint_output_dist(looked_up)]


def _train(ranks: RankGroup, joint: Joint) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(input_dist, "_MIN_SAVED_ELEMENTS", 0)
        if not joint.is_merged:
            monkeypatch.setattr(input_messages, "_MAX_MERGED_NBYTES", -1)
        _compare_steps(ranks, joint)


def _compare_steps(ranks: RankGroup, joint: Joint) -> None:
    oracles = [make_source(case) for case in joint.cases]
    sharded = [
        _sharded(ranks, case, copy.deepcopy(oracle), dedup=joint.dedup)
        for case, oracle in zip(joint.cases, oracles, strict=True)
    ]
    for step in range(3):
        batches = [
            [batch(case, 100 * i + 10 * step + r, case.batches[r]) for r in range(ranks.size)]
            for i, case in enumerate(joint.cases)
        ]
        found = [flat(one) for one in _outputs(sharded, [own[ranks.rank] for own in batches])]
        grads: list[list[Tensor]] = []
        for oracle, own, got, case in zip(oracles, batches, found, joint.cases, strict=True):
            wanted = [flat(oracle(one)).detach() for one in own]
            _close(got, wanted[ranks.rank], case.tolerance)
            seeds = [torch.Generator().manual_seed(r + step) for r in range(ranks.size)]
            grads.append(
                [
                    torch.randn(one.shape, generator=seed)
                    for one, seed in zip(wanted, seeds, strict=True)
                ]
            )
        used = list(range(len(found)))
        if joint.backward == "all but one":
            used.remove(step % len(used))
        own_grads = [grads[i][ranks.rank] for i in used]
        if joint.backward == "apart":
            for i, grad in zip(used, own_grads, strict=True):
                found[i].backward(grad)
        else:
            torch.autograd.backward([found[i] for i in used], own_grads)
        for i in used:
            step_of_all(joint.cases[i], oracles[i], batches[i], grads[i])
        for one, oracle, case in zip(sharded, oracles, joint.cases, strict=True):
            compare_tables(one, oracle, case.tolerance)


POOLED = Case(tables(SUM, MEAN), ("dp", "rw", "tw", "cw"), optimizer=ADAM)
SEQUENCES = Case(sequences(tables(SUM)), ("rw", "dp", "tw", "cw"), optimizer=ADAM)
WEIGHTED = Case(tables(SUM, MEAN), ("rw",) * 4, weighted=True)
VARIABLE = Case(tables(SUM, MEAN), ("tw", "rw", "cw", "dp"), (3, 0, 4, 1), variable=True)
INT32 = Case(tables(SUM), ("rw", "tw", "rw", "tw"), (0, 3, 1, 2), ids=torch.int32)
CODED = replace(
    POOLED, comm_precision=CommPrecision(BF16(), BF16()), tolerance=1e-1, optimizer=optim.SGD(0.5)
)


@pytest.mark.parametrize(
    ("backward", "is_merged", "size"),
    [
        *(("together", True, 2), ("apart", True, 3), ("all but one", True, 2)),
        *(("together", False, 3), ("apart", False, 2), ("all but one", False, 3)),
    ],
)
def test_together_as_alone(backward: str, size: int, *, is_merged: bool) -> None:
    cases = (POOLED, SEQUENCES, WEIGHTED, VARIABLE, INT32, CODED)
    worlds.run(size, _train, Joint(cases, backward, is_merged))


def test_distinct_ids_together() -> None:
    worlds.run(2, _train, Joint((SEQUENCES, POOLED, SEQUENCES), dedup=True))


def test_one_rank() -> None:
    worlds.run(1, _train, Joint((POOLED, SEQUENCES, WEIGHTED)))


@st.composite
def _cases(draw: Any) -> Case:
    pooled = draw(st.booleans())
    configs = tables(SUM, MEAN) if pooled else sequences(tables(SUM))
    variable = pooled and draw(st.booleans())
    # A distinct bag that no example has moves its rows with momentum; in one process there is none.
    optimizers = (optim.SGD(0.5),) if variable else (ADAM, optim.SGD(0.5), optim.Adagrad(0.5))
    return Case(
        configs,
        tuple(draw(st.sampled_from(sorted(WORDS))) for _ in configs),
        tuple(draw(st.lists(st.integers(0, 5), min_size=4, max_size=4))),
        optimizer=draw(st.sampled_from(optimizers)),
        weighted=pooled and draw(st.booleans()),
        variable=variable,
        ids=draw(st.sampled_from((torch.int64, torch.int32))),
    )


@settings(max_examples=nightly.number(8, 15), deadline=None)
@given(data=st.data())
def test_any_collections_together(data: Any) -> None:
    size = data.draw(st.integers(2, 4))
    local = 2 if size == 4 else size
    cases = [
        replace(data.draw(_cases()), local_size=local) for _ in range(data.draw(st.integers(1, 4)))
    ]
    joint = Joint(
        tuple(cases),
        data.draw(st.sampled_from(("together", "apart", "all but one"))),
        data.draw(st.booleans()),
    )
    worlds.run(size, _train, joint)


def _omitted(ranks: RankGroup) -> str:
    sharded = [make_sharded(WEIGHTED, ranks, make_source(WEIGHTED)) for _ in range(2)]
    outputs = _outputs(sharded, [batch(WEIGHTED, i, 4) for i in range(2)])
    losses = [output.values().sum() for output in outputs]
    with pytest.raises(RuntimeError) as raised:
        (losses[0] if ranks.rank == 1 else losses[0] + losses[1]).backward()
    return str(raised.value)


def test_a_loss_that_omits_an_output_on_one_rank_is_told() -> None:
    for message in worlds.run(2, _omitted):
        assert "used the outputs of different sharded collections" in message
        assert "every rank's loss must use all of them, if only times 0" in message


def _without_batch(ranks: RankGroup) -> bool:
    sharded = [make_sharded(WEIGHTED, ranks, make_source(WEIGHTED)) for _ in range(2)]
    given = [batch(WEIGHTED, i, 4) for i in range(2)]
    calls = [InputCall(one, own) for one, own in zip(sharded, given, strict=True)]
    if ranks.rank == 1:
        calls[1] = InputCall(sharded[1], None)
    assert start_joint_input_dist(calls).wait() is None
    # Afterwards they exchange as before.
    return all(bool(flat(output).isfinite().all()) for output in _outputs(sharded, given))


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_without_a_batch_stops_all(size: int) -> None:
    assert all(worlds.run(size, _without_batch))


def _sent_to_itself(ranks: RankGroup, case: Case) -> list[tuple[Content, int]]:
    """The contents of the all-to-alls of a step, and how much a rank sends to itself."""
    found: list[tuple[Content, int]] = []
    plain = all_to_all.start_all_to_all

    def counted(sent: Tensor, sizes: Any, *rest: Any, content: Content, **more: Any) -> Any:
        assert sum(sizes) == sent.numel()
        found.append((content, sizes[ranks.rank]))
        return plain(sent, sizes, *rest, content=content, **more)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(input_messages, "_MAX_MERGED_NBYTES", -1)
        monkeypatch.setattr(all_to_all, "start_all_to_all", counted)
        sharded = make_sharded(case, ranks, make_source(case))
        (output,) = _outputs([sharded], [batch(case, ranks.rank, 4)])
        flat(output).sum().backward()
    return found


@pytest.mark.parametrize("case", [POOLED, SEQUENCES], ids=["pooled", "sequences"])
def test_rows_and_gradients_of_a_rank_do_not_travel(case: Case) -> None:
    for found in worlds.run(2, _sent_to_itself, replace(case, optimizer=optim.SGD(0.1))):
        assert {content for content, _ in found} == {Content.IDS, Content.ROWS, Content.GRADIENTS}
        assert all(bool(size) == (content is Content.IDS) for content, size in found)


# A batch of one rank that is wrong


def says_that_a_batch_is_wrong(ranks: RankGroup, kind: str) -> None:
    """One rank raises its error and the other names it; then both train on."""
    case = Case(tables(SUM), ("rw", "tw", "cw", "dp"))
    source = make_source(case)
    source.bounds_check = BoundsCheck.FATAL
    sharded = make_sharded(case, ranks, source)
    features = batch(case, ranks.rank, 4)
    wrong: dict[str, tuple[Any, str]] = {
        "without a feature": (features.permute([1, 2]), "the batch has no features"),
        "None": (None, "got None"),
        "no batch at all": (features.values(), "KeyedJaggedTensor"),
        "ids that are floats": (_with_floats(features), "float"),
        "unlike bags": (_without_last_bag(features), "need inverse indices"),
        "a row too far": (_with_id(features, 13), "'f0', table 't0' must be in .0, 13.*got 13"),
        "a negative id": (_with_id(features, -2), "'f0', table 't0' .* got -2"),
    }
    sent, message = (features, "rank 1 could not send its batch")
    if ranks.rank == 1:
        sent, message = wrong[kind]
    with pytest.raises((KeyError, TypeError, ValueError, RuntimeError), match=message):
        sharded(sent)
    flat(sharded(features)).sum().backward()  # the ranks still agree


def _with_floats(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), features.values().float(), lengths=features.lengths())


def _with_id(features: KeyedJaggedTensor, last_id: int) -> KeyedJaggedTensor:
    """Replace the last id of f0, which t0 of 13 rows and t2 of 20 read, and another by padding."""
    ids, end = features.values().clone(), features.offset_per_key()[features.keys().index("f0") + 1]
    ids[[end - 1, 0 if end > 1 else -1]] = torch.tensor([last_id, -1])
    return KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())


def _without_last_bag(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    lengths, strides = features.lengths()[:-1], [[n] for n in features.stride_per_key()]
    strides[-1][0] -= 1
    ids = features.values()[: int(lengths.sum())]
    return KeyedJaggedTensor(features.keys(), ids, lengths=lengths, stride_per_key_per_rank=strides)


@pytest.mark.parametrize(
    "kind",
    [
        "without a feature",
        "None",
        "no batch at all",
        "ids that are floats",
        "unlike bags",
        "a row too far",
        "a negative id",
    ],
)
def test_no_rank_waits_for_one_whose_batch_is_wrong(kind: str) -> None:
    worlds.run(2, says_that_a_batch_is_wrong, kind)


def _takes_any_key(ranks: RankGroup) -> None:
    case = Case(tables(SUM, storage=Hash()), ("rw", "tw", "rw", "tw"))
    source = make_source(case)
    source.bounds_check = BoundsCheck.FATAL
    features = batch(case, ranks.rank, 4)
    keys = torch.where(features.values() % 2 == 0, -(2**60), features.values() + 2**60)
    features = KeyedJaggedTensor(features.keys(), keys, lengths=features.lengths())
    assert flat(make_sharded(case, ranks, source)(features)).abs().sum() > 0


def test_keys_of_hash_tables_have_no_bounds() -> None:
    worlds.run(2, _takes_any_key)


def _takes_int32_ids(ranks: RankGroup) -> None:
    table = EmbeddingBagConfig(1 << 31, 8, "t", storage=TensorTrain((2, 2)))
    case = Case((table,), ("tw",))
    source = make_source(case)
    source.bounds_check = BoundsCheck.FATAL
    ids = torch.tensor([0, 5, (1 << 31) - 1], dtype=torch.int32)
    features = KeyedJaggedTensor(["t"], ids, lengths=torch.tensor([1, 2]))
    assert flat(make_sharded(case, ranks, source)(features)).abs().sum() > 0


def test_tables_of_more_rows_than_int32_holds_take_int32_ids() -> None:
    worlds.run(2, _takes_int32_ids)
