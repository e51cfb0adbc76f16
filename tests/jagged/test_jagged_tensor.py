"""The bags of one feature, and what dense tensors they come from and become."""

from unittest import mock

import pytest
import torch

from emblib import JaggedTensor
from emblib.jagged import lengths_from_offsets, offsets_from_lengths

VALUES = torch.arange(1.0, 9.0)
OFFSETS = torch.tensor([0, 2, 2, 3, 4, 5, 8])


def example(*, weighted: bool = False) -> JaggedTensor:
    return JaggedTensor(VALUES, VALUES * 10 if weighted else None, offsets=OFFSETS)


def test_lengths_and_offsets_tell_of_each_other() -> None:
    jagged = example().validate()
    assert jagged.lengths_or_none() is None
    assert jagged.lengths().tolist() == [2, 0, 1, 1, 1, 3]
    assert jagged.lengths() is jagged.lengths_or_none()
    other = JaggedTensor(VALUES, lengths=jagged.lengths().int())
    assert other.offsets_or_none() is None
    assert other.offsets().tolist() == OFFSETS.tolist()
    assert other.offsets().dtype == torch.int32
    assert other.offsets() is other.offsets_or_none()


def test_lists_of_rows() -> None:
    rows = [torch.tensor([1.0, 2.0]), torch.tensor([]), torch.tensor([3.0])]
    jagged = JaggedTensor.from_dense(rows, [row * 10 for row in rows])
    assert jagged.lengths().tolist() == [2, 0, 1]
    assert jagged.lengths().dtype == torch.int32
    assert all(map(torch.equal, jagged.to_dense(), rows))
    weights = jagged.to_dense_weights()
    assert weights is not None
    assert weights[0].tolist() == [10, 20]
    assert JaggedTensor.from_dense(rows).to_dense_weights() is None
    assert JaggedTensor.from_dense(iter(rows)).lengths().tolist() == [2, 0, 1]  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be empty"):
        JaggedTensor.from_dense([])
    with pytest.raises(ValueError, match="the lengths of the values, bag by bag"):
        JaggedTensor.from_dense(rows, [rows[2], rows[1], rows[0]])


def test_padded_matrices() -> None:
    jagged = example(weighted=True)
    wide = jagged.to_padded_dense(padding_value=-1)
    assert wide.tolist() == [
        [1, 2, -1],
        [-1, -1, -1],
        [3, -1, -1],
        [4, -1, -1],
        [5, -1, -1],
        [6, 7, 8],
    ]
    assert jagged.to_padded_dense(2, 10).tolist()[-1] == [6, 7]
    assert jagged.to_padded_dense(0).shape == (6, 0)
    with pytest.raises(ValueError, match="desired_length must be >= 0, got -1"):
        jagged.to_padded_dense(-1)
    weights = jagged.to_padded_dense_weights(2)
    assert weights is not None
    assert weights.tolist()[2] == [30, 0]
    assert example().to_padded_dense_weights() is None
    back = JaggedTensor.from_dense_lengths(wide, jagged.lengths(), wide * 10)
    assert torch.equal(back.values(), VALUES)
    assert torch.equal(back.weights(), VALUES * 10)
    with pytest.raises(ValueError, match=r"padded must be \[5, N, ...\] for 5 lengths"):
        JaggedTensor.from_dense_lengths(wide, jagged.lengths()[1:])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float16])
def test_padding_keeps_the_dtype_and_empty_bags(dtype: torch.dtype) -> None:
    empty = JaggedTensor(torch.empty(0, 3, dtype=dtype), lengths=torch.tensor([0, 0]))
    padded = empty.to_padded_dense(2, 7)
    assert padded.dtype == dtype
    assert padded.tolist() == [[[7] * 3] * 2] * 2
    none = JaggedTensor.empty(values_dtype=dtype, is_weighted=True)
    assert none.to_padded_dense().shape == (0, 0)
    assert none.to_dense() == []
    assert none.weights().numel() == 0


def test_gradients_reach_the_values_that_were_kept() -> None:
    rows = torch.randn(4, 2, requires_grad=True)
    jagged = JaggedTensor(rows, lengths=torch.tensor([3, 0, 1]))
    jagged.to_padded_dense(2).sum().backward()
    assert rows.grad is not None
    assert rows.grad[:, 0].tolist() == [1, 1, 0, 1]


def test_moves_whole() -> None:
    jagged = example(weighted=True)
    meta = jagged.to("meta")
    assert meta.device().type == meta.weights().device.type == meta.offsets().device.type == "meta"
    place = JaggedTensor.empty_like(jagged, "cpu")
    assert torch.equal(place.copy_(jagged).weights(), jagged.weights())
    assert torch.equal(place.offsets(), OFFSETS)
    like = JaggedTensor.empty_like(jagged)
    assert (like.values().dtype, like.weights().numel(), like.lengths().numel()) == (
        torch.float32,
        0,
        0,
    )
    with mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor.clone()):
        assert jagged.pin_memory().values().data_ptr() != VALUES.data_ptr()
    seen: list[int] = []
    with mock.patch.object(torch.Tensor, "record_stream", lambda t, s: seen.append(t.data_ptr())):
        example().record_stream("a stream")
    assert seen == [VALUES.data_ptr(), OFFSETS.data_ptr()]
    assert example().size_in_bytes() == 8 * 4 + 7 * 8


@pytest.mark.parametrize(
    ("weighted", "other", "message"),
    [
        (False, example(weighted=True), r"\[\[8\], None\] in 6 bags, got \[\[8\], \[8\]\]"),
        (True, example(), r"\[\[8\], \[8\]\] in 6 bags, got \[\[8\], None\]"),
        (True, JaggedTensor(VALUES, torch.ones(8, 2), offsets=OFFSETS), r"got \[\[8\], \[8, 2\]\]"),
        (False, JaggedTensor(-VALUES, lengths=torch.tensor([8])), "in 6 bags, got .* in 1"),
    ],
)
def test_copy_changes_nothing_where_it_refuses(
    weighted: bool, other: JaggedTensor, message: str
) -> None:
    target = JaggedTensor(
        torch.zeros(8),
        torch.zeros(8) if weighted else None,
        lengths=torch.zeros(6, dtype=torch.int64),
    )
    with pytest.raises(ValueError, match=message):
        target.copy_(other)
    assert not target.values().any()
    with pytest.raises(TypeError, match="copy_ needs a JaggedTensor, got 3"):
        target.copy_(3)


def test_wrong_ones_are_refused() -> None:
    with pytest.raises(ValueError, match="needs lengths or offsets"):
        JaggedTensor(VALUES)
    with pytest.raises(TypeError, match="offsets must be int32 or int64"):
        JaggedTensor(VALUES, offsets=OFFSETS.double())
    with pytest.raises(TypeError, match="offsets must be a tensor, got list"):
        JaggedTensor(VALUES, offsets=OFFSETS.tolist())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="weights must be a tensor, got list"):
        JaggedTensor(VALUES, [1.0] * 8, offsets=OFFSETS)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"bags = 2 \+ 1, got 7"):
        JaggedTensor(VALUES, lengths=torch.tensor([4, 4]), offsets=OFFSETS)
    with pytest.raises(ValueError, match="got 2 for 8 values"):
        JaggedTensor(VALUES, torch.ones(2), offsets=OFFSETS)
    with pytest.raises(ValueError, match="no weights"):
        example().weights()
    with pytest.raises(ValueError, match="number of values = 8, got 7"):
        JaggedTensor(VALUES, lengths=torch.tensor([3, 4])).validate()


def test_says_what_it_holds() -> None:
    bags = "[[1.0, 2.0], [], [3.0], [4.0], [5.0], [6.0, 7.0, 8.0]]"
    assert str(example()) == f"JaggedTensor({{\n    {bags}\n}})\n"
    assert repr(example()) == "JaggedTensor(6 bags, [8] torch.float32, cpu)"
    rows = JaggedTensor(torch.tensor([[1.5, 2.0]]), lengths=torch.tensor([1]))
    assert str(rows) == "JaggedTensor({\n    [[[1.5, 2.0]]]\n})\n"
    ids = torch.tensor([7])
    weighted = JaggedTensor(ids, torch.tensor([0.1]), torch.tensor([1]))
    assert str(weighted) == 'JaggedTensor({\n    "values": [[7]],\n    "weights": [[0.1]]\n})\n'


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_are_running_sums(dtype: torch.dtype) -> None:
    lengths = torch.tensor([[2, 0, 1], [3, 0, 4]], dtype=dtype)
    offsets = offsets_from_lengths(lengths)
    assert offsets.dtype == dtype
    assert offsets.tolist() == [0, 2, 2, 3, 6, 6, 10]
    assert torch.equal(lengths_from_offsets(offsets), lengths.flatten())


def test_no_bags_have_one_offset() -> None:
    assert offsets_from_lengths(torch.zeros(0, dtype=torch.int64)).tolist() == [0]


def test_wrong_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"int32 lengths count up to 2147483647 values, got 2147"):
        offsets_from_lengths(torch.tensor([2**31 - 1, 1], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"int32 or int64, got torch\.float32"):
        offsets_from_lengths(torch.ones(2))
    with pytest.raises(ValueError, match="must be >= 0, got -1"):
        offsets_from_lengths(torch.tensor([1, -1]))
