"""Names, arguments, defaults and values are FBGEMM's own."""

import enum
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import TypeVar

import pytest
import torch

from emblib.compat import fbgemm as ours
from emblib.compat import fbgemm_types
from tests.compat.peer import fbgemm, peer_module

_T = TypeVar("_T")
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
NEW_IN_1_9 = {
    "EmbOptimType": {"ROWWISE_RMSPROP_AR"},
    "OptimType": {"ROWWISE_RMSPROP_AR"},
    "RESParams": {
        "enable_hbm_streaming",
        "res_chunk_size",
        "res_enabled_tables",
        "res_hbm_drain_interval",
        "res_num_consumers",
        "res_num_hbm_copy_threads",
        "res_num_uvm_hit_copy_threads",
        "res_use_copy_done_token",
    },
    "SplitTableBatchedEmbeddingBagsCodegen": {"ar_alpha", "ema_beta", "min_shrinkage"},
}
"""What FBGEMM 1.8 lacks: a peer has either all of them or none."""


def _common(name: str, mine: list[_T], other: list[_T], of: Callable[[_T], str]) -> list[_T]:
    """Drop from `mine` what is new in FBGEMM 1.9, if the installed FBGEMM is older."""
    new = NEW_IN_1_9.get(name, set())
    old = new.isdisjoint(map(of, other))
    return [entry for entry in mine if not (old and of(entry) in new)]


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
    mine = _signature(getattr(getattr(ours, module), method))
    other = _signature(getattr(getattr(theirs, module), method))
    assert _common(module, mine, other, lambda argument: argument[0]) == other


def test_what_is_new_in_1_9() -> None:
    kind = ours.OptimType.ROWWISE_RMSPROP_AR
    assert kind.value == "row_wise_rmsprop_ar"
    place = (ours.EmbeddingLocation.HOST, ours.ComputeDevice.CPU)
    with pytest.raises(NotImplementedError, match="ROWWISE_RMSPROP_AR is not supported; those"):
        ours.SplitTableBatchedEmbeddingBagsCodegen([(5, 4, *place)], optimizer=kind)
    with pytest.warns(UserWarning, match="ar_alpha=0.5 has no part in EXACT_SGD"):
        ours.SplitTableBatchedEmbeddingBagsCodegen([(5, 4, *place)], ar_alpha=0.5)
    params = ours.RESParams(res_enabled_tables=["t"], enable_hbm_streaming=True)
    ours.SplitTableBatchedEmbeddingBagsCodegen([(5, 4, *place)], res_params=params)
    with pytest.raises(NotImplementedError, match="enable_raw_embedding_streaming"):
        ours.SplitTableBatchedEmbeddingBagsCodegen(
            [(5, 4, *place)], res_params=params, enable_raw_embedding_streaming=True
        )


@pytest.mark.parametrize("name", OBJECTS)
def test_enums_and_option_objects(name: str) -> None:
    theirs = fbgemm()
    mine, other = getattr(ours, name), getattr(theirs, name)
    if issubclass(mine, enum.Enum):
        members = [(m.name, m.value) for m in mine]
        others = [(m.name, m.value) for m in other]
        assert dict(_common(name, members, others, lambda member: member[0])) == dict(others)
        assert issubclass(mine, enum.IntEnum) == issubclass(other, enum.IntEnum)
    elif is_dataclass(mine):
        others = _fields(other)
        assert _common(name, _fields(mine), others, lambda field: field[0]) == others
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
    for method in ("as_int", "as_dtype", "bit_rate", "align_size", "is_float", "__str__"):
        assert getattr(kind, method)() == getattr(other, method)(), method
    config, other_config = kind.default_config(), other.default_config()
    assert type(config).__name__ == type(other_config).__name__
    assert config.config == other_config.config
    for name in config.config or ("exponent_bits",):
        assert config.get(name) == other_config.get(name)


def test_sizes_of_values() -> None:
    theirs = peer_module("fbgemm_gpu.split_embedding_configs")
    sizes, other_sizes = (
        {kind.name: size for kind, size in library.ELEMENT_SIZE.items()}
        for library in (fbgemm_types, theirs)
    )
    assert sizes == other_sizes


def test_options_of_number_formats_are_checked() -> None:
    with pytest.raises(RuntimeError, match="exponents must be set"):
        ours.SparseType.FP8.default_config().get("exponents")


@pytest.mark.parametrize("code", range(-1, 11))
def test_number_formats_by_code(code: int) -> None:
    theirs = fbgemm()
    if code in (-1, 7, 10):
        for library in (ours, theirs):
            with pytest.raises(ValueError, match=str(code)):
                library.SparseType.from_int(code)
    else:
        expected = theirs.SparseType.from_int(code).name
        assert ours.SparseType.from_int(code).name == expected


DTYPES = [
    *(torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8, torch.int8),
    *(torch.quint4x2, torch.quint2x4, torch.float8_e4m3fn, torch.float8_e4m3fnuz),
    torch.float8_e5m2,
]


@pytest.mark.parametrize("is_mx", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_number_formats_by_dtype(dtype: torch.dtype, is_mx: bool) -> None:
    try:
        expected = fbgemm().SparseType.from_dtype(dtype, is_mx).name
    except ValueError:
        with pytest.raises(ValueError, match=str(dtype)):
            ours.SparseType.from_dtype(dtype, is_mx)
    else:
        assert ours.SparseType.from_dtype(dtype, is_mx).name == expected


def test_text_is_no_flag_of_a_dtype() -> None:
    with pytest.raises(TypeError, match="is_mx must be True or False, got 'no'"):
        ours.SparseType.from_dtype(torch.uint8, "no")


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
