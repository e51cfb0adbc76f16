"""Names, arguments, defaults and values are FBGEMM's own."""

import enum
import inspect
from dataclasses import MISSING, fields, is_dataclass

import pytest

from emblib.compat import fbgemm as ours
from tests.compat.peer import fbgemm

MODULES = ["SplitTableBatchedEmbeddingBagsCodegen", "DenseTableBatchedEmbeddingBagsCodegen"]
METHODS = [
    "__init__",
    "flush",
    "forward",
    "get_cache_miss_counter",
    "get_learning_rate",
    "get_optimizer_buffer",
    "get_optimizer_state",
    "get_prefetch_passes",
    "get_table_name_for_logging",
    "get_table_wise_cache_miss",
    "get_uvm_cache_stats",
    "init_embedding_weights_uniform",
    "log",
    "prefetch",
    "print_uvm_cache_stats",
    "reset_cache_states",
    "reset_embedding_weight_momentum",
    "reset_uvm_cache_stats",
    "set_learning_rate",
    "set_optimizer_step",
    "split_embedding_weights",
    "split_optimizer_states",
    "update_hyper_parameters",
]
# FBGEMM keeps these in another file.
ELSEWHERE = {"StdLogStatsReporter", "StdLogStatsReporterConfig"}
OBJECTS = [name for name in ours.__all__ if name not in {*MODULES, *ELSEWHERE, "install"}]


def _plain(value: object) -> object:
    """A default in a form that two libraries' enums share."""
    return (type(value).__name__, value.name) if isinstance(value, enum.Enum) else value


def _signature(function: object) -> list[tuple[str, object]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, _plain(p.default)) for p in parameters]


CASES = [(MODULES[0], method) for method in METHODS]
CASES += [(MODULES[1], method) for method in METHODS if method in vars(getattr(ours, MODULES[1]))]


@pytest.mark.parametrize(("module", "method"), CASES)
def test_signatures(module: str, method: str) -> None:
    theirs = fbgemm()
    assert _signature(getattr(getattr(ours, module), method)) == _signature(
        getattr(getattr(theirs, module), method)
    )


@pytest.mark.parametrize("name", OBJECTS)
def test_enums_and_option_objects(name: str) -> None:
    theirs = fbgemm()
    mine, other = getattr(ours, name), getattr(theirs, name)
    if issubclass(mine, enum.Enum):
        assert {m.name: m.value for m in mine} == {m.name: m.value for m in other}
        assert issubclass(mine, enum.IntEnum) == issubclass(other, enum.IntEnum)
    elif is_dataclass(mine):
        assert _fields(mine) == _fields(other)
    elif issubclass(mine, tuple):
        assert mine._fields == other._fields
        assert mine._field_defaults == other._field_defaults
    else:
        for method, function in vars(other).items():
            if inspect.isfunction(function) and not method.startswith("_"):
                assert _signature(getattr(mine, method)) == _signature(function)


def _fields(kind: type) -> list[tuple[str, object]]:
    """Names and defaults of the fields of a dataclass."""
    result = []
    for field in fields(kind):
        made = field.default_factory
        default = vars(made()) if made is not MISSING and is_dataclass(made) else field.default
        result.append((field.name, _plain(default) if default is not MISSING else None))
    return result


@pytest.mark.parametrize("kind", list(ours.SparseType))
def test_number_formats(kind: ours.SparseType) -> None:
    other = fbgemm().SparseType[kind.name]
    assert ours.SparseType.from_int(kind.as_int()) is kind
    for method in ("as_int", "as_dtype", "bit_rate", "align_size", "is_float", "__str__"):
        assert getattr(kind, method)() == getattr(other, method)(), method


@pytest.mark.parametrize("name", ["device", "managed_caching", "mtia", "shelf"])
def test_locations_by_name(name: str) -> None:
    theirs = fbgemm()
    for library in (ours, theirs):
        if name == "shelf":
            with pytest.raises(ValueError, match="shelf"):
                library.EmbeddingLocation.from_str(name)
        else:
            assert library.EmbeddingLocation.from_str(name).name == name.upper()
    assert ours.PoolingMode.from_str("mean") == theirs.PoolingMode.from_str("mean")
    assert ours.EmbeddingLocation.str_values() == theirs.EmbeddingLocation.str_values()
