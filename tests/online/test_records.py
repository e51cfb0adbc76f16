"""Records: every dtype and size comes back, and what is not a record is refused."""

import pytest
import torch

from emblib.online import LogError
from emblib.online.records import PREFIX_BYTES, Record, RecordKind, TableChange, decode, encode

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def changes(rows: int, dtype: torch.dtype) -> list[TableChange]:
    keys = torch.arange(rows) - 2**62
    weight = torch.randn(rows, 5).to(dtype)
    plain = TableChange(keys, weight, keys[:0], {}, 3, 8)
    states = {"sum": torch.rand(rows), "moment": torch.randn(rows, 5), "count": keys.int()}
    numbers = torch.tensor([0.1, 7.0], dtype=torch.float64)
    gone = torch.tensor([2**63 - 1, -1])
    keyed = TableChange(keys, weight, gone, states, 0, 5, keys, keys * 2, 9, -7, numbers)
    return [plain, keyed]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_value_comes_back(dtype: torch.dtype) -> None:
    for rows in (0, 1, 7):
        tables = {"item": changes(rows, dtype), "ü": changes(2, dtype)[:1]}
        record = Record(RecordKind.SNAPSHOT, 2, 3, 4, 5, -6, 7.5, tables)
        same = decode(encode(record), "it")
        assert same[:7] == record[:7]
        assert list(same.tables) == list(tables)
        for name, expected in tables.items():
            for ours, theirs in zip(same.tables[name], expected, strict=True):
                assert torch.equal(ours.weight.view(-1), theirs.weight.view(-1))
                assert ours.weight.dtype == dtype
                assert ours.weight.shape == theirs.weight.shape
                for field in ("keys", "removed"):
                    assert torch.equal(getattr(ours, field), getattr(theirs, field))
                for field in ("stamps", "scores", "hyperparams"):
                    one, other = getattr(ours, field), getattr(theirs, field)
                    assert (one is None and other is None) or torch.equal(one, other)
                assert ours.states.keys() == theirs.states.keys()
                for state, values in theirs.states.items():
                    assert torch.equal(ours.states[state], values)
                numbers = ("first_column", "dim", "tick", "hash_key", "is_keyed")
                for field in numbers:
                    assert getattr(ours, field) == getattr(theirs, field)


def test_what_is_no_record_is_refused() -> None:
    data = encode(Record(RecordKind.DELTA, 0, 1, 1, 1, 1, 0.0, {"a": changes(3, torch.float32)}))
    for end in (0, PREFIX_BYTES - 1):
        with pytest.raises(LogError, match="it is truncated"):
            decode(data[:end], "it")
    for bad in (data[:-1], data + b"\0", data[:-1] + bytes([data[-1] ^ 1])):
        with pytest.raises(LogError, match="it is damaged: the checksum"):
            decode(bad, "it")
    with pytest.raises(LogError, match="it is damaged: no record begins here"):
        decode(b"x" + data[1:], "it")


def test_the_format_is_the_one_that_is_described() -> None:
    data = encode(Record(RecordKind.DELTA, 1, 2, 3, 4, 5, 6.0, {}))
    assert data[:8] == b"EMBC\1\0\0\0"
    assert data[8:16] == b"\1\0\0\0\2\0\0\0"
    assert [int.from_bytes(data[at : at + 8], "little") for at in (16, 24, 32)] == [3, 4, 5]
    assert data[PREFIX_BYTES:] == (14).to_bytes(8, "little") + b'{"tables": []}\0\0'
