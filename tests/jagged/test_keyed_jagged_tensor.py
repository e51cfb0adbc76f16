"""Batches of several features: what they hold, and what becomes of parts of them."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from emblib import JaggedTensor, KeyedJaggedTensor
from tests.jagged.cases import Features, features, flat, held, made

EXAMPLE: Features = {"a": [[0, 1], [], [2]], "b": [[3], [4], [5, 6, 7]]}
VARIED: Features = {"a": [[0, 1], []], "b": [[3]], "c": [], "d": [[4], [], [5, 6]]}
ANY = st.one_of(features(), features(varied=True))


@pytest.mark.parametrize("told", ["lengths", "offsets", "both"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weighted", [False, True])
def test_holds_what_it_was_given(told: str, dtype: torch.dtype, weighted: bool) -> None:
    batch = made(EXAMPLE, dtype, told, weighted=weighted)
    assert (batch.lengths_or_none() is None) == (told == "offsets")
    assert (batch.offsets_or_none() is None) == (told == "lengths")
    assert held(batch) == EXAMPLE
    assert batch.lengths().dtype == batch.offsets().dtype == dtype
    assert batch.offsets() is batch.offsets()
    assert batch.lengths() is batch.lengths()
    assert batch.validate() is batch
    assert (batch.keys(), batch.stride(), batch.stride_per_key()) == (["a", "b"], 3, [3, 3])
    assert not batch.variable_stride_per_key()
    assert batch.stride_per_key_per_rank() == []
    assert batch.length_per_key_or_none() is batch.offset_per_key_or_none() is None
    assert batch.length_per_key() == [3, 5]
    assert batch.offset_per_key() == [0, 3, 8]
    assert batch.lengths_offset_per_key() == [0, 3, 6]
    assert batch.index_per_key() == {"a": 0, "b": 1}
    assert batch.device() == torch.device("cpu")
    assert (batch.weights_or_none() is not None) == weighted
    assert batch.inverse_indices_or_none() is None


def test_features_may_differ_in_bags() -> None:
    batch = made(VARIED)
    assert batch.variable_stride_per_key()
    assert (batch.stride(), batch.stride_per_key()) == (3, [2, 1, 0, 3])
    assert batch.length_per_key() == [2, 1, 0, 3]
    assert batch.offset_per_key() == [0, 2, 3, 3, 6]
    ranks = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=torch.tensor([[1, 1], [0, 1]]),
        inverse_indices=(["a", "b"], torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]])),
    )
    assert ranks.validate().stride() == 4
    assert ranks.stride_per_key() == [2, 1]
    assert ranks.stride_per_key_per_rank() == [[1, 1], [0, 1]]
    assert ranks.inverse_indices()[0] == ["a", "b"]


@given(ANY, st.booleans())
@settings(max_examples=60, deadline=None)
def test_one_feature_is_a_jagged_tensor(bags: Features, weighted: bool) -> None:
    batch = made(bags, weighted=weighted)
    every = batch.to_dict()
    assert list(every) == list(bags)
    for key, want in bags.items():
        for one in (every[key], batch[key]):
            assert [bag.tolist() for bag in one.to_dense()] == want
            assert one.offsets()[0] == 0
            assert held(KeyedJaggedTensor.from_jt_dict({key: one})) == {key: want}


@given(ANY, st.booleans(), st.data())
@settings(max_examples=60, deadline=None)
def test_split_and_concat(bags: Features, weighted: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(bags)), max_size=3)))
    ends = [0, *cuts, len(bags)]
    batch = made(bags, weighted=weighted)
    parts = batch.split([b - a for a, b in itertools.pairwise(ends)])
    keys = list(bags)
    for part, (a, b) in zip(parts, itertools.pairwise(ends), strict=True):
        assert held(part) == {key: bags[key] for key in keys[a:b]}
        assert part.length_per_key() == [len(flat({"": bags[key]})) for key in keys[a:b]]
    if batch.variable_stride_per_key():
        joined = KeyedJaggedTensor.concat([part for part in parts if part.keys()])
    else:
        joined = KeyedJaggedTensor.concat(parts)
        assert joined.stride() == batch.stride()
    assert held(joined) == bags
    assert joined.length_per_key() == batch.length_per_key()


@given(ANY, st.booleans(), st.data())
@settings(max_examples=80, deadline=None)
def test_permute_takes_features(bags: Features, weighted: bool, data: st.DataObject) -> None:
    keys = list(bags)
    order = data.draw(st.lists(st.integers(0, len(keys) - 1), max_size=6))
    batch = made(bags, weighted=weighted)
    places = torch.tensor(order) if data.draw(st.booleans()) else None
    taken = batch.permute(order, places)
    assert taken.keys() == [keys[i] for i in order]
    assert taken.stride_per_key() == [len(bags[keys[i]]) for i in order]
    assert taken.length_per_key() == [batch.length_per_key()[i] for i in order]
    assert taken.values().tolist() == flat({n: bags[keys[i]] for n, i in enumerate(order)})
    # Repeats hide each other in a dictionary, so one at a time.
    for place, one in enumerate(taken.split([1] * len(order))):
        assert held(one) == {keys[order[place]]: bags[keys[order[place]]]}
    first = {key: place for place, key in reversed(list(enumerate(taken.keys())))}
    assert taken.index_per_key() == first


def test_features_that_follow_each_other_are_views() -> None:
    batch = made(EXAMPLE, weighted=True)
    part = batch.permute([1])
    assert part.values().data_ptr() == batch.values()[3:].data_ptr()
    assert batch.split([1, 1])[1].weights().data_ptr() == part.weights().data_ptr()
    assert batch["b"].values().data_ptr() == part.values().data_ptr()


def test_rows_of_numbers_may_be_values() -> None:
    values = torch.randn(4, 3, requires_grad=True)
    batch = KeyedJaggedTensor(["a", "b"], values, lengths=torch.tensor([1, 0, 2, 1]))
    taken = batch.permute([1, 0, 1])
    assert torch.equal(taken.values(), values[[1, 2, 3, 0, 1, 2, 3]])
    taken.values().sum().backward()
    assert values.grad is not None
    assert values.grad[:, 0].tolist() == [1, 2, 2, 2]


def test_dictionaries() -> None:
    one, two = (
        JaggedTensor(torch.tensor([1, 2]), lengths=torch.tensor([2, 0])),
        JaggedTensor(torch.tensor([3]), offsets=torch.tensor([0, 1])),
    )
    batch = KeyedJaggedTensor.from_jt_dict({"x": one, "y": two})
    assert held(batch) == {"x": [[1, 2], []], "y": [[3]]}
    assert batch.variable_stride_per_key()
    assert not KeyedJaggedTensor.from_jt_dict({"x": one}).variable_stride_per_key()
    forced = KeyedJaggedTensor.from_jt_dict({"x": one}, force_variable_stride=True)
    assert forced.stride_per_key_per_rank() == [[2]]
    with pytest.raises(ValueError, match="needs a feature, got none"):
        KeyedJaggedTensor.from_jt_dict({})
    weighted = JaggedTensor(torch.tensor([3]), torch.ones(1), torch.tensor([1]))
    with pytest.raises(ValueError, match="all or none must have weights"):
        KeyedJaggedTensor.from_jt_dict({"x": one, "y": weighted})


def test_a_captured_permutation_keeps_inverse_indices() -> None:
    """The capture of a CUDA graph selects features by another way, here called on the CPU."""
    inverse = (["a", "b"], torch.tensor([[0, 1, 1], [1, 0, 0]]))
    batch = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(4),
        lengths=torch.ones(4, dtype=torch.int64),
        inverse_indices=inverse,
    )
    order = [1, 0]
    captured = batch._select_padded(order, torch.tensor(order))
    expected = batch.permute(order)
    assert captured.values().tolist() == expected.values().tolist() == [2, 3, 0, 1]
    assert captured.inverse_indices()[0] == expected.inverse_indices()[0]
    assert torch.equal(captured.inverse_indices()[1], expected.inverse_indices()[1])


def test_concat_of_merged_examples() -> None:
    inverse = (["a", "b"], torch.tensor([[0, 1, 1], [0, 0, 0]]))
    merged = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=inverse,
    )
    plain = made({"c": [[7], [], [8, 9]]})
    both = KeyedJaggedTensor.concat([merged, plain]).validate()
    assert held(both) == {"a": [[0], [1]], "b": [[2]], "c": [[7], [], [8, 9]]}
    assert (both.stride(), both.stride_per_key()) == (3, [2, 1, 3])
    keys, rows = both.inverse_indices()
    assert keys == ["a", "b", "c"]
    assert rows.tolist() == [[0, 1, 1], [0, 0, 0], [0, 1, 2]]
    # Parts keep the rows of the whole; joined again each has its own.
    parts = merged.split([1, 1])
    assert parts[1].validate().inverse_indices()[0] == ["a", "b"]
    again = KeyedJaggedTensor.concat(parts[::-1]).validate()
    assert held(again) == {"b": [[2]], "a": [[0], [1]]}
    assert again.inverse_indices()[0] == ["b", "a"]
    assert again.inverse_indices()[1].tolist() == [[0, 0, 0], [0, 1, 1]]
    with pytest.raises(ValueError, match="in all batches of variable stride or in none"):
        KeyedJaggedTensor.concat([merged, made(VARIED)])
    with pytest.raises(ValueError, match=r"same stride, got \[2, 3\]"):
        KeyedJaggedTensor.concat([merged, made({"c": [[7], []]})])
    with pytest.raises(ValueError, match=r"same number of ranks, got \[1, 2\]"):
        KeyedJaggedTensor.concat(
            [
                made(VARIED),
                KeyedJaggedTensor(
                    ["z"],
                    torch.arange(2),
                    lengths=torch.ones(2, dtype=torch.int64),
                    stride_per_key_per_rank=[[1, 1]],
                ),
            ]
        )


@pytest.mark.parametrize("bags", [EXAMPLE, VARIED])
def test_moves_whole(bags: Features) -> None:
    batch = made(bags, given="both", weighted=True).sync()
    meta = batch.to("meta")
    assert meta.device().type == meta.lengths().device.type == meta.weights().device.type == "meta"
    # What the host knows goes along: no device is asked for it.
    assert meta.length_per_key() == batch.length_per_key()
    assert meta.offset_per_key() == batch.offset_per_key()
    assert meta.stride_per_key() == batch.stride_per_key()
    assert batch.to("cpu", dtype=torch.float64).weights().dtype == torch.float64
    place = KeyedJaggedTensor.empty_like(batch, "cpu")
    assert held(place.copy_(batch)) == bags
    assert place.values().data_ptr() != batch.values().data_ptr()
    with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor.clone()):
        pinned = batch.pin_memory()
    assert held(pinned) == bags
    assert pinned.offsets().data_ptr() != batch.offsets().data_ptr()
    seen: list[int] = []
    with mock.patch.object(torch.Tensor, "record_stream", lambda t, s: seen.append(t.data_ptr())):
        batch.record_stream("a stream")
    every = [batch.values(), batch.weights(), batch.lengths(), batch.offsets()]
    assert seen == [tensor.data_ptr() for tensor in every]
    size = sum(tensor.numel() * tensor.element_size() for tensor in every)
    assert batch.size_in_bytes() == size
    assert batch.clear_storage() == size
    assert batch.values().untyped_storage().nbytes() == 0


def test_what_was_read_back_is_not_stale() -> None:
    """A dictionary made before does not come back after a move, nor numbers after copy_."""
    batch = made(EXAMPLE)
    assert batch.to_dict()["a"].device().type == "cpu"
    assert batch.to("meta").values().device.type == "meta"
    assert batch.to("meta")["a"].device().type == "meta"
    other = made({"a": [[], [], [0]], "b": [[1, 2, 3], [4, 5, 6], [7]]})
    assert batch.sync().copy_(other).length_per_key() == [1, 7]
    assert held(batch) == held(other)
    batch.lengths().copy_(made(EXAMPLE).lengths())
    assert batch.unsync().length_per_key_or_none() is None
    with pytest.raises(ValueError, match="copy_ needs a batch like"):
        batch.copy_(made({"a": [[0]], "b": [[1]]}))
    with pytest.raises(ValueError, match=r"copy_ needs a batch like .* got 3"):
        batch.copy_(3)


def test_copy_refuses_other_shapes_before_it_writes() -> None:
    ids, lengths = torch.arange(2), torch.tensor([2])
    target, other = (
        KeyedJaggedTensor(["a"], ids + n, torch.ones(2, n + 1), lengths) for n in range(2)
    )
    with pytest.raises(ValueError, match="copy_ needs a batch like"):
        target.copy_(other)
    assert target.values().tolist() == [0, 1]


@pytest.mark.parametrize("changed", ["inverse keys", "strides per rank"])
def test_copy_refuses_numbers_that_it_would_not_copy(changed: str) -> None:
    keys, strides = ["a", "b"], [[1, 1], [1, 1]]
    inverse, ids, lengths = torch.tensor([[0, 1], [1, 0]]), torch.arange(4), torch.ones(4).long()

    def batch(keys_of_inverse: list[str], strides: list[list[int]]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(
            keys,
            ids.clone(),
            lengths=lengths,
            stride_per_key_per_rank=strides,
            inverse_indices=(keys_of_inverse, inverse),
        )

    other = batch(keys[::-1], strides) if changed == "inverse keys" else batch(keys, [[2, 0]] * 2)
    with pytest.raises(ValueError, match=r"strides per rank and keys of inverse indices"):
        batch(keys, strides).copy_(other)


def test_arguments_have_the_names_of_torchrec() -> None:
    one = JaggedTensor(torch.tensor([1, 2]), lengths=torch.tensor([2]))
    batch = KeyedJaggedTensor.from_jt_dict(jt_dict={"x": one})
    assert held(KeyedJaggedTensor.concat(kjt_list=[batch])) == held(batch)
    assert KeyedJaggedTensor.empty_like(kjt=batch).keys() == []


def test_empty_ones() -> None:
    nothing = KeyedJaggedTensor.empty(is_weighted=True, values_dtype=torch.int32)
    assert (nothing.keys(), nothing.stride(), nothing.offsets().tolist()) == ([], 0, [0])
    assert nothing.length_per_key() == []
    assert nothing.to_dict() == {}
    assert nothing.split([]) == []
    assert nothing.values().dtype == torch.int32
    assert nothing.validate().weights().numel() == 0
    like = KeyedJaggedTensor.empty_like(made(EXAMPLE, torch.int32, weighted=True))
    assert like.lengths().dtype == torch.int32
    assert like.weights().numel() == 0
    without_examples = made({"a": [], "b": []})
    assert without_examples.length_per_key() == [0, 0]
    assert held(without_examples.permute([1, 0])) == {"b": [], "a": []}
    floats = KeyedJaggedTensor(["a"], torch.tensor([]), lengths=torch.tensor([]))
    assert floats.lengths().dtype == torch.int64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeyedJaggedTensor.empty(is_weighted="False"), "is_weighted must be True or"),
        (lambda: JaggedTensor.empty(is_weighted="no"), "is_weighted must be True or False"),
        (lambda: KeyedJaggedTensor.from_jt_dict({"a": 3}), "a JaggedTensor must have values"),
        (lambda: KeyedJaggedTensor.from_jt_dict(3), "jt_dict must be a dict of one JaggedTensor"),
        (lambda: KeyedJaggedTensor.concat([3]), "a KeyedJaggedTensor must have keys"),
        (lambda: KeyedJaggedTensor.empty_like(3), "a KeyedJaggedTensor must have keys.*; int has"),
        (lambda: KeyedJaggedTensor.empty_like(3, "cpu"), "a KeyedJaggedTensor must have keys"),
        (lambda: JaggedTensor.empty_like(3), "a JaggedTensor must have values"),
        (
            lambda: KeyedJaggedTensor.from_jt_dict({}, force_variable_stride="no"),
            "force_variable_stride must be True or False",
        ),
        (
            lambda: KeyedJaggedTensor(["a"], *[torch.ones(1).long()] * 3, stride=1.0),
            "stride must be an int, got 1.0",
        ),
        (
            lambda: KeyedJaggedTensor(
                ["a"],
                *[torch.ones(1).long(), None, torch.ones(1).long()],
                stride="1",
                stride_per_key_per_rank=[[1]],
            ),
            "stride must be an int, got '1'",
        ),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize("inverse", [(), (["a"],), (["a"], [[0]]), "ab", 3])
def test_inverse_indices_are_keys_and_a_tensor(inverse: Any) -> None:
    with pytest.raises(TypeError, match="inverse_indices must be a pair of keys and a tensor"):
        KeyedJaggedTensor(["a"], *[torch.ones(1).long()] * 3, inverse_indices=inverse)


def test_says_what_it_holds() -> None:
    assert str(made(EXAMPLE)) == (
        'KeyedJaggedTensor({\n    "a": [[0, 1], [], [2]],\n    "b": [[3], [4], [5, 6, 7]]\n})\n'
    )
    both = '{\n        "values": [[0, 1]],\n        "weights": [[1.0, 1.5]]\n    }'
    assert f'"a": {both}' in str(made({"a": [[0, 1]]}, weighted=True))
    assert str(KeyedJaggedTensor.empty()) == "KeyedJaggedTensor()\n"
    long = str(made({"a": [list(range(40)), *[[]] * 20]}))
    assert "... (40 in all)" in long
    assert "... (21 bags in all)" in long
    assert "2 bags each" in repr(made({"a": [[], [1]]}))
    assert "[2, 1, 0, 3] bags each" in repr(made(VARIED))


def test_wrong_structure_is_refused() -> None:
    values, lengths = torch.arange(4), torch.tensor([1, 1, 2])
    with pytest.raises(ValueError, match="needs lengths or offsets, got neither"):
        KeyedJaggedTensor(["a"], values)
    with pytest.raises(TypeError, match="weights must be a tensor, got list"):
        KeyedJaggedTensor(["a"], values, [1.0] * 4, lengths)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got 3 for 2 keys: where features differ"):
        KeyedJaggedTensor(["a", "b"], values, lengths=lengths)
    with pytest.raises(ValueError, match="got 3 for 1 keys with stride 2"):
        KeyedJaggedTensor(["a"], values, lengths=lengths, stride=2)
    with pytest.raises(ValueError, match="got 3 for 0 keys"):
        KeyedJaggedTensor([], values, lengths=lengths)
    with pytest.raises(TypeError, match=r"lengths must be int32 or int64, got torch\.float32"):
        KeyedJaggedTensor(["a"], values, lengths=lengths.float())
    with pytest.raises(
        TypeError, match=r"lengths must be a tensor, got list: e\.g\. lengths=torch"
    ):
        KeyedJaggedTensor(["a"], values, lengths=[1, 1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="offsets must be a tensor, got list"):
        KeyedJaggedTensor(["a"], torch.ones(1), offsets=[0, 1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="values must be a tensor, got list"):
        KeyedJaggedTensor(["a"], [1, 2], lengths=lengths)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"list of names, got 'abc': write \['abc'\]"):
        KeyedJaggedTensor("abc", values, lengths=lengths)
    with pytest.raises(ValueError, match=r"one per value, got 3 for 4 values"):
        KeyedJaggedTensor(["a"], values, torch.ones(3), lengths)
    with pytest.raises(ValueError, match=r"there are bags = 3 \+ 1, got 3"):
        KeyedJaggedTensor(["a"], values, None, lengths, torch.tensor([0, 2, 4]))
    with pytest.raises(ValueError, match="one entry more than there are bags, got 0"):
        KeyedJaggedTensor(["a"], values, offsets=torch.tensor([], dtype=torch.int64))
    for wrong in ([[1, 2]], [[1, 2], [0]], [[1], [1]], [[4], [-1]]):
        with pytest.raises(ValueError, match="stride_per_key_per_rank must"):
            KeyedJaggedTensor(["a", "b"], values, lengths=lengths, stride_per_key_per_rank=wrong)
    with pytest.raises(ValueError, match="stride must be >= 0, got -1"):
        KeyedJaggedTensor([], values[:0], lengths=lengths[:0], stride=-1)


def test_wrong_use_is_refused() -> None:
    batch = made(EXAMPLE)
    with pytest.raises(KeyError, match=r"no feature 'c'; there are \['a', 'b'\]"):
        batch["c"]
    with pytest.raises(ValueError, match="no weights"):
        batch.weights()
    with pytest.raises(ValueError, match="no inverse indices"):
        batch.inverse_indices()
    with pytest.raises(ValueError, match=r"number of keys = 2, got \[1\]"):
        batch.split([1])
    with pytest.raises(IndexError, match=r"0 to 1, got \[2\]"):
        batch.permute([2])
    with pytest.raises(ValueError, match="needs a batch, got none"):
        KeyedJaggedTensor.concat([])
    with pytest.raises(ValueError, match=r"same stride, got \[1, 3\]"):
        KeyedJaggedTensor.concat([batch, made({"c": [[1]]})])
    lengths, inverse = torch.tensor([1]), (["other"], torch.tensor([[0]]))
    odd = KeyedJaggedTensor(["c"], torch.tensor([1]), None, lengths, inverse_indices=inverse)
    with pytest.raises(ValueError, match=r"a row per key, \['c'\], got \['other'\]"):
        KeyedJaggedTensor.concat([odd, odd])


def test_validate_reads_the_content() -> None:
    values = torch.arange(4)

    def batch(**bags: torch.Tensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["a"], values, **bags)

    with pytest.raises(ValueError, match="number of values = 4, got 3"):
        batch(lengths=torch.tensor([1, 2])).validate()
    with pytest.raises(ValueError, match="must be >= 0, got -1"):
        batch(lengths=torch.tensor([5, -1])).validate()
    with pytest.raises(ValueError, match=r"must not decrease, they do after bag 1: \[3, 2\]"):
        batch(offsets=torch.tensor([0, 3, 2, 4])).validate()
    with pytest.raises(ValueError, match="go from 0 to the number of values = 4"):
        batch(offsets=torch.tensor([1, 4])).validate()
    with pytest.raises(ValueError, match="describe the same bags"):
        batch(lengths=torch.tensor([4, 0]), offsets=torch.tensor([0, 2, 4])).validate()
    with pytest.raises(ValueError, match="keys must differ"):
        made(EXAMPLE).permute([0, 0]).validate()
    with pytest.raises(ValueError, match=r"on one device, got \['cpu', 'meta'\]"):
        KeyedJaggedTensor(["a"], values, torch.ones(4, device="meta"), torch.tensor([4])).validate()
    inverse = torch.tensor([[0, 1, 2]])
    for rows, message in ((inverse, "bags 0 to 1, got 0 to 2"), (inverse[0], "one row for each")):
        with pytest.raises(ValueError, match=message):
            KeyedJaggedTensor(
                ["a"],
                values,
                lengths=torch.tensor([2, 2]),
                stride_per_key_per_rank=[[2]],
                inverse_indices=(["a"], rows),
            ).validate()


def test_int32_lengths_cannot_count_more_than_they_hold() -> None:
    many = torch.empty(1).expand(2**31)
    with pytest.raises(ValueError, match="int32 lengths count up to 2147483647 values"):
        KeyedJaggedTensor(["a"], many, lengths=torch.ones(1, dtype=torch.int32))
    KeyedJaggedTensor(["a"], many, lengths=torch.ones(1, dtype=torch.int64))


def test_known_lengths_are_not_read() -> None:
    lengths = torch.tensor([1, 2, 0, 3], device="meta")
    batch = KeyedJaggedTensor(
        ["a", "b"], torch.empty(6, device="meta"), lengths=lengths, length_per_key=[3, 3]
    )
    assert batch.length_per_key() == [3, 3]
    assert batch.offset_per_key() == [0, 3, 6]
    assert batch.permute([1, 0]).keys() == ["b", "a"]


def test_selections_know_the_offsets_of_their_keys() -> None:
    batch = made(EXAMPLE).sync()
    for selected in (batch.permute([1, 0]), *batch.split([1, 1])):
        with mock.patch.object(KeyedJaggedTensor, "_read_bounds") as read:
            offsets = selected.offset_per_key()
        read.assert_not_called()
        assert offsets == selected._read_bounds()


@pytest.mark.parametrize("known", [[3], [3, 2], [3, 3, 0]])
def test_known_lengths_of_other_sizes_are_an_error(known: list[int]) -> None:
    with pytest.raises(ValueError, match="length_per_key must have one entry per key = 2"):
        KeyedJaggedTensor(
            ["a", "b"], torch.arange(6), lengths=torch.tensor([1, 2, 0, 3]), length_per_key=known
        )


def test_wrong_known_lengths_are_found_by_validate() -> None:
    lengths = torch.tensor([1, 2, 0, 3])
    batch = KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=lengths, length_per_key=[2, 4])
    with pytest.raises(ValueError, match=r"\[3, 3\] by the offsets, got \[2, 4\]"):
        batch.validate()
    right = KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=lengths, length_per_key=[3, 3])
    assert right.validate() is right


def test_moves_take_non_blocking_by_position() -> None:
    batch = KeyedJaggedTensor(["a"], torch.arange(2), torch.ones(2), torch.tensor([1, 1]))
    assert batch.to("cpu", True, torch.float16).weights().dtype is torch.float16
    assert batch["a"].to("cpu", True).values().tolist() == [0, 1]
    for bags in (batch, batch["a"]):  # keys of 64 bits would wrap
        with pytest.raises(TypeError, match="a batch moves to a device"):
            bags.to(torch.int32)


@pytest.mark.parametrize("differing", [False, True])
def test_a_batch_without_features_keeps_the_examples_it_is_of(differing: bool) -> None:
    batch = made(VARIED if differing else EXAMPLE)
    like = KeyedJaggedTensor.empty_like(batch)
    assert like.keys() == []
    assert like.stride() == batch.stride() > 0
    assert like.variable_stride_per_key() == differing
    for parts in ([like], [like, like], [like, KeyedJaggedTensor.empty()]):
        assert KeyedJaggedTensor.concat(parts).stride() == batch.stride()
    for parts in ([like, batch], [batch, like], [KeyedJaggedTensor.empty(), like, batch]):
        joined = KeyedJaggedTensor.concat(parts).validate()
        assert joined.keys() == batch.keys()
        assert joined.stride() == batch.stride()
        assert joined.stride_per_key_per_rank() == batch.stride_per_key_per_rank()


def test_concat_with_a_batch_of_no_features_of_other_examples() -> None:
    like = KeyedJaggedTensor.empty_like(made({"a": [[1], [2], [3], []]}))
    with pytest.raises(ValueError, match=r"the same stride, got \[1, 4\]"):
        KeyedJaggedTensor.concat([like, made({"c": [[1]]})])


def test_concat_of_merged_examples_with_no_features() -> None:
    merged = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(3),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[1, 1], [1, 0]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 1, 1], [0, 0, 0]])),
    )
    first, nothing, second = merged.split([1, 0, 1])
    joined = KeyedJaggedTensor.concat([first, nothing, KeyedJaggedTensor.empty(), second])
    assert torch.equal(joined.inverse_indices()[1], merged.inverse_indices()[1])
    assert joined.stride_per_key_per_rank() == merged.stride_per_key_per_rank()
    assert KeyedJaggedTensor.concat([nothing, nothing]).stride() == merged.stride()


def test_cached_fields_of_torchrec_are_taken_and_not_stored() -> None:
    values, lengths = torch.arange(3), torch.tensor([1, 0, 2])
    given = KeyedJaggedTensor(
        ["a", "b"],
        values,
        lengths=lengths,
        stride_per_key=[1, 2],
        offset_per_key=[0, 1, 3],
        index_per_key={"a": 0, "b": 1},
        jt_dict=None,
    )
    assert given.stride_per_key_per_rank() == [[1], [2]]
    assert given["b"].lengths().tolist() == [0, 2]
    even = KeyedJaggedTensor(["a", "b", "c"], values, lengths=lengths, stride_per_key=[1, 1, 1])
    assert not even.variable_stride_per_key()
    with pytest.raises(TypeError, match=r"unexpected keyword argument .length"):
        KeyedJaggedTensor(["a"], values, length=lengths)
