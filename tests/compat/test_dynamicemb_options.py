"""Options of DynamicEmb's: what each becomes, what is refused, and the page that says so."""

import inspect
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from emblib import (
    DiskRows,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    OnInsertFailure,
    StochasticRounding,
    optim,
)
from emblib.compat import dynamicemb
from emblib.compat.dynamicemb import (
    BUCKET_ALIGNMENT,
    MAX_BUCKET_CAPACITY,
    BatchedDynamicEmbeddingTablesV2,
    DynamicEmbCheckMode,
    DynamicEmbEvictStrategy,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbPoolingMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    EmbOptimType,
    FrequencyAdmissionStrategy,
    KVCounter,
    WeightDecayMode,
)
from emblib.compat.fbgemm_types import CowClipDefinition
from emblib.init import Constant, KeyModulo, Normal, TruncatedNormal, Uniform
from scripts.docs import dynamicemb_option_list
from tests.compat.dynamicemb_cases import look_up, one_table, options

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dynamicemb.md"
Mode, Score, Evict = DynamicEmbInitializerMode, DynamicEmbScoreStrategy, DynamicEmbEvictStrategy


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == dynamicemb_option_list.page(), (
        "write it again: python -m scripts.docs.dynamicemb_option_list docs/dynamicemb.md"
    )


def test_every_option_and_function_is_explained() -> None:
    explained = dynamicemb_option_list.names()
    assert {field.name for field in fields(DynamicEmbTableOptions)} <= explained
    module = BatchedDynamicEmbeddingTablesV2
    for function in (module.__init__, module.forward):
        arguments = set(inspect.signature(function).parameters)
        assert arguments - {"self", "indices", "offsets"} <= explained
    functions = {n for n in dynamicemb.__all__ if inspect.isfunction(getattr(dynamicemb, n))}
    assert functions <= explained


def _spec(**changes: Any) -> Any:
    (spec,) = one_table(**changes).bags.tables
    return spec


@pytest.mark.parametrize(
    ("strategy", "eviction", "evicts"),
    [
        (Score.TIMESTAMP, Eviction.LRU, Evict.LRU),
        ((Score.TIMESTAMP,), Eviction.LRU, Evict.LRU),
        (Score.STEP, Eviction.STEP, Evict.CUSTOMIZED),
        (Score.CUSTOMIZED, Eviction.CUSTOM, Evict.CUSTOMIZED),
        (Score.LFU, Eviction.LFU, Evict.LFU),
        (Score.NO_EVICTION, Eviction.NONE, Evict.CUSTOMIZED),
        ((Score.TIMESTAMP, Score.LFU), Eviction.LRU_LFU, Evict.LFU),
        ((Score.LFU, Score.TIMESTAMP), Eviction.LRU_LFU, Evict.LFU),
    ],
    ids=str,
)
def test_score_strategies(strategy: Any, eviction: Eviction, evicts: Evict) -> None:
    module = one_table(score_strategy=strategy)
    assert module.bags.tables[0].eviction is eviction
    assert module.table_options[0].evict_strategy is evicts


def _initial(mode: Mode, **numbers: float) -> DynamicEmbInitializerArgs:
    return DynamicEmbInitializerArgs(mode=mode, **numbers)


@pytest.mark.parametrize(
    ("args", "want"),
    [
        (DynamicEmbInitializerArgs(), Uniform(-0.125, 0.125)),
        (_initial(Mode.UNIFORM, lower=-1.0, upper=2.0), Uniform(-1.0, 2.0)),
        (_initial(Mode.UNIFORM, upper=2.0), Uniform(-0.125, 2.0)),
        (_initial(Mode.NORMAL, mean=1.0, std_dev=3.0), Normal(1.0, 3.0)),
        (
            _initial(Mode.TRUNCATED_NORMAL, std_dev=0.1),
            TruncatedNormal(0.0, 0.1, -0.125, 0.125),
        ),
        (_initial(Mode.CONSTANT, value=4.0), Constant(4.0)),
        (_initial(Mode.DEBUG), KeyModulo()),
    ],
    ids=lambda case: getattr(getattr(case, "mode", None), "name", ""),
)
def test_initialisers(args: DynamicEmbInitializerArgs, want: Any) -> None:
    assert _spec(max_capacity=64, initializer_args=args).initializer == want


def test_numbers_of_tables() -> None:
    zeros = _initial(Mode.CONSTANT, value=-1.0)
    spec = _spec(
        dim=7,
        max_capacity=1000,
        init_capacity=64,
        max_load_factor=0.7,
        eval_initializer_args=zeros,
        safe_check_mode=DynamicEmbCheckMode.WARNING,
        optimizer=EmbOptimType.ADAM,
        initial_accumulator_value=0.5,
        table_names=["users"],
    )
    assert (spec.dim, spec.capacity, spec.initial_capacity, spec.max_load) == (7, 1000, 64, 0.7)
    assert (spec.default_value, spec.initial_state, spec.name) == (-1.0, 0.5, "users")
    assert spec.on_insert_failure is OnInsertFailure.WARN
    assert _spec(max_capacity=32, init_capacity=500).initial_capacity == 32
    assert _spec(max_capacity=32).initial_capacity == 32


def test_what_was_left_out_is_filled_in() -> None:
    module = one_table(max_capacity=64)
    assert module.table_options[0].init_capacity == 64


def test_admission_options() -> None:
    rule = FrequencyAdmissionStrategy(4, _initial(Mode.CONSTANT, value=2.0))
    spec = _spec(admit_strategy=rule, admission_counter=KVCounter(100))
    assert spec.admission == FrequencyAdmission(4, ExactCounter(100), Constant(2.0))
    spec = _spec(admit_strategy=FrequencyAdmissionStrategy(4), admission_counter=KVCounter(100))
    assert spec.admission == FrequencyAdmission(4, ExactCounter(100), KeyModulo())


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype | None) -> None:
    module = one_table(embedding_dtype=dtype, output_dtype=torch.bfloat16)
    precision = module.bags.precision
    assert precision.weights is (dtype or torch.float32)
    assert precision.states is torch.float32
    narrow = precision.weights is not torch.float32
    assert isinstance(precision.stochastic_rounding, StochasticRounding) == narrow
    assert look_up(module, [3]).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        ({}, optim.SGD(0.01)),
        ({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.5}, optim.SGD(0.5)),
        (
            {"gradient_clipping": True, "max_gradient": 0.25},
            optim.SGD(0.01, max_gradient=0.25),
        ),
        ({"max_gradient": 0.25}, optim.SGD(0.01)),
        (
            {"optimizer": EmbOptimType.ADAM, "beta1": 0.5, "weight_decay": 0.1},
            optim.Adam(0.01, betas=(0.5, 0.999), weight_decay=optim.Decoupled(0.1)),
        ),
        (
            {"optimizer": EmbOptimType.ADAM, "weight_decay_mode": WeightDecayMode.DECOUPLE},
            optim.Adam(0.01),
        ),
        ({"optimizer": EmbOptimType.EXACT_ADAGRAD, "eps": 0.5}, optim.Adagrad(0.01, eps=0.5)),
        ({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}, optim.RowwiseAdagrad(0.01)),
    ],
    ids=str,
)
def test_optimizers(arguments: dict[str, Any], want: optim.Optimizer) -> None:
    module = BatchedDynamicEmbeddingTablesV2([options()], **arguments)
    assert module.bags.optimizer == want


RULE, COUNTER = FrequencyAdmissionStrategy(2), KVCounter(64)
OF_TABLES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"dim": None}, ValueError, "needs dim"),
    ({"max_capacity": None}, ValueError, "needs max_capacity"),
    ({"index_type": torch.int32}, ValueError, "index_type must be"),
    ({"external_storage": dict}, NotImplementedError, r"protocol RowStore.*DiskRows"),
    ({"external_storage": DiskRows}, NotImplementedError, "protocol RowStore"),
    ({"evict_strategy": Evict.LFU}, ValueError, "evict_strategy follows from score_strategy"),
    ({"evict_strategy": Evict.EPOCH_LRU}, ValueError, "got EPOCH_LRU"),
    ({"bucket_capacity": MAX_BUCKET_CAPACITY}, NotImplementedError, "MAX_BUCKET_CAPACITY"),
    ({"bucket_capacity": 100}, ValueError, f"multiple of {BUCKET_ALIGNMENT}, got 100"),
    ({"admit_strategy": RULE}, ValueError, "has only the strategy"),
    ({"admission_counter": COUNTER}, ValueError, "has only the counter"),
    (
        {"admit_strategy": RULE, "admission_counter": {}},
        NotImplementedError,
        "must be a KVCounter",
    ),
    (
        {"admit_strategy": RULE, "admission_counter": KVCounter(64, key_type=torch.int32)},
        ValueError,
        "key_type must be",
    ),
    ({"eval_initializer_args": _initial(Mode.NORMAL)}, ValueError, "must be CONSTANT, got NORMAL"),
    ({"dist_type": "random"}, ValueError, "dist_type must be one of"),
    ({"score_strategy": 3}, TypeError, "must be a DynamicEmbScoreStrategy"),
    ({"score_strategy": ()}, NotImplementedError, "only TIMESTAMP and LFU go together"),
    (
        {"score_strategy": (Score.STEP, Score.LFU)},
        NotImplementedError,
        "only TIMESTAMP and LFU go together",
    ),
    (
        {"score_strategy": (Score.TIMESTAMP, Score.LFU, Score.LFU)},
        NotImplementedError,
        "only TIMESTAMP and LFU go together",
    ),
    ({"initializer_args": "uniform"}, TypeError, "initializer_args must be a DynamicEmbInitial"),
    ({"eval_initializer_args": None}, TypeError, "eval_initializer_args must be a DynamicEmbIni"),
    ({"evict_strategy": "LRU"}, TypeError, "evict_strategy must be a DynamicEmbEvictStrategy"),
    ({"global_hbm_for_values": -5}, ValueError, "global_hbm_for_values of table 't0' must be an"),
    ({"training": "no"}, TypeError, "training must be True or False, got 'no'"),
    ({"caching": "no"}, TypeError, "caching must be True or False, got 'no'"),
    ({"max_capacity": 0}, ValueError, "max_capacity of table 't0' must be an int >= 1, got 0"),
    ({"dim": 0}, ValueError, "dim of table 't0' must be an int >= 1, got 0"),
]


@pytest.mark.parametrize(
    ("changes", "error", "match"), OF_TABLES, ids=[", ".join(c[0]) for c in OF_TABLES]
)
def test_table_options_without_meaning_raise(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        one_table(**changes)


OF_MODULES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"optimizer": EmbOptimType.LAMB}, NotImplementedError, "optimizer LAMB is not supported"),
    ({"table_names": "u"}, TypeError, "table_names must be a sequence"),
    ({"enforce_hbm": "no"}, TypeError, "enforce_hbm must be True or False, got 'no'"),
    ({"weight_decay": 0.1}, ValueError, "weight_decay=0.1 has no part in SGD"),
    ({"max_norm": 1.0}, ValueError, "max_norm=1.0 has no part in SGD"),
    ({"momentum": 0.5}, ValueError, "momentum=0.5 has no part"),
    ({"eta": 0.5}, ValueError, "eta=0.5 has no part"),
    ({"initial_accumulator_value": 1.0}, ValueError, "has no part in SGD"),
    ({"weight_decay_mode": WeightDecayMode.L2}, ValueError, "weight_decay_mode of SGD"),
    ({"cowclip_regularization": CowClipDefinition()}, NotImplementedError, "cowclip"),
    ({"table_names": ["a", "b"]}, ValueError, "table_names must be 1 different names"),
    ({"table_options": []}, ValueError, "at least one"),
    ({"table_options": options()}, TypeError, "table_options must be a list"),
    ({"table_options": [{}]}, TypeError, "must be DynamicEmbTableOptions"),
    (
        {"table_options": [options(), options(score_strategy=Score.LFU)]},
        ValueError,
        "table_options.1. differs in score_strategy",
    ),
    (
        {"table_options": [options(), options(embedding_dtype=torch.float16)]},
        ValueError,
        "need one embedding_dtype",
    ),
]


@pytest.mark.parametrize(
    ("changes", "error", "match"), OF_MODULES, ids=[", ".join(c[0]) for c in OF_MODULES]
)
def test_module_options_without_meaning_raise(
    changes: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        BatchedDynamicEmbeddingTablesV2(**{"table_options": [options()], **changes})


@pytest.mark.parametrize(
    "name",
    ["feature_requires_grad", "batch_size_per_feature_per_rank", "total_unique_indices"],
)
def test_arguments_of_forward_without_meaning_raise(name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{name} has no effect in DynamicEmb"):
        look_up(one_table(), [1], **{name: 1})


def test_tables_may_differ_in_what_is_not_grouped() -> None:
    """DynamicEmb gives all of them the initializer of the first."""
    module = BatchedDynamicEmbeddingTablesV2(
        [
            options(),
            options(dim=2, max_capacity=640, initializer_args=_initial(Mode.CONSTANT, value=5.0)),
        ],
        pooling_mode=DynamicEmbPoolingMode.SUM,
    )
    out = module(torch.tensor([9, 9]), torch.arange(3)).detach()
    assert out.tolist() == [[9.0, 9.0, 9.0, 9.0, 5.0, 5.0]]


def test_a_device_is_a_device() -> None:
    module = one_table(device="cpu", device_id=0)
    assert module.bags.weights.device.type == "cpu"
    assert math.prod(module.bags.weights.shape) == 32 * 4


def test_modes_of_initializers_are_members_or_values() -> None:
    args = DynamicEmbInitializerArgs(mode="constant", value=2.0)  # type: ignore[arg-type]
    assert args.mode is DynamicEmbInitializerMode.CONSTANT
    with pytest.raises(ValueError, match="'bogus' is not a valid DynamicEmbInitializerMode"):
        DynamicEmbInitializerArgs(mode="bogus")  # type: ignore[arg-type]
