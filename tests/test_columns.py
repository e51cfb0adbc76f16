"""The columns that Python and csrc share have one order."""

import re
from collections.abc import Iterator
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from emblib import columns
from emblib.ops import hash, route, tt

CSRC = Path(__file__).resolve().parents[1] / "csrc"

# Python's name -> the name in csrc.
ENUMS: dict[type[IntEnum], str] = {
    columns.Hyper: "Hyper",
    columns.Tier: "Tier",
    columns.CacheCounter: "CacheCounter",
    columns.HashTableColumn: "HashTableColumn",
    columns.HashEntryColumn: "HashEntry",
    columns.HashCounter: "HashCounter",
    columns.InsertStatus: "InsertStatus",
    columns.InitialKind: "InitialKind",
    columns.RouteRule: "RouteRule",
    columns.RowFormatCode: "RowFormat",
    columns.IndexKind: "IndexKind",
}
STRUCTS: dict[type[IntEnum], str] = {
    columns.FeatureColumn: "Feature",
    columns.BagColumn: "BagLayout",
    columns.TTTableColumn: "TtTableIds",
    columns.InitialRuleColumn: "InitialRule",
    columns.InitialLayoutColumn: "InitialLayout",
    columns.SketchColumn: "SketchLayout",
    columns.RouteFeatureColumn: "RouteFeature",
    columns.RouteBlockColumn: "RouteBlock",
    columns.TargetColumn: "Target",
    columns.PieceColumn: "SourcePiece",
    columns.IndexColumn: "IndexTable",
}


@cache
def _source() -> str:
    """The headers of csrc without comments."""
    text = "".join(path.read_text() for path in sorted(CSRC.glob("*/*.h")))
    return re.sub(r"//[^\n]*", "", text)


def _body(kind: str, name: str) -> str:
    found = re.findall(rf"\b{kind} {name}\b[^;{{]*\{{([^}}]*)\}}", _source())
    assert len(found) == 1, f"{kind} {name}: {len(found)} definitions in csrc"
    return found[0]


def _snake(name: str) -> str:
    """Return `first_bucket` for `kFirstBucket`, `l2` for `kL2`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", re.sub(r"^k(?=[A-Z])", "", name)).lower()


def _enumerators(name: str) -> Iterator[tuple[str, int]]:
    value = -1
    body = _body("(?:enum|enum class|struct)", name).rpartition("{")[2]  # of an enum in a struct
    for part in filter(None, map(str.strip, body.split(","))):
        word, _, number = map(str.strip, part.partition("="))
        value = int(number) if number else value + 1
        yield _snake(word), value


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.__name__)
def test_enums_have_the_numbers_of_csrc(enum: type[IntEnum]) -> None:
    native = {name.removesuffix("_tier"): value for name, value in _enumerators(ENUMS[enum])}
    assert native == {member.name.lower(): member.value for member in enum}


@pytest.mark.parametrize("enum", STRUCTS, ids=lambda enum: enum.__name__)
def test_columns_have_the_order_of_the_struct(enum: type[IntEnum]) -> None:
    members = re.findall(r"(?:int64_t|double)\s+([^;]*);", _body("struct", STRUCTS[enum]))
    names = [name.strip() for line in members for name in line.split(",")]
    assert [_snake(name) for name in names] == [member.name.lower() for member in enum]
    assert [member.value for member in enum] == list(range(len(enum)))


def test_plans_have_the_tensors_of_csrc() -> None:
    native = [name.removeprefix("tt_") for name, _ in _enumerators("TtPlanTensor")]
    assert native == [*tt.TTPlan._fields, "num_tt_plan_tensors"]


def test_a_feature_row_has_the_columns_of_features() -> None:
    names = [member.name.lower() for member in columns.FeatureColumn]
    assert list(columns.FeatureRow._fields) == names


@pytest.mark.parametrize(
    ("row", "enum"),
    [
        (route.TargetRow, columns.TargetColumn),
        (route.PieceRow, columns.PieceColumn),
        (hash.InitialRule, columns.InitialRuleColumn),
    ],
)
def test_rows_have_the_fields_of_their_columns(row: Any, enum: type[IntEnum]) -> None:
    assert [field.upper() for field in row._fields] == [column.name for column in enum]
