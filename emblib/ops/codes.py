"""The integer codes of the options of native ops: one dict {name: code} per option.

Ops take an option as a small integer, because the conversion of a string argument in torch's stable
headers leaks a copy of the string at every call. csrc/core/codes.h has the same codes and names,
and describes each; optimizers are in the order of csrc/optim/optimizers.h. tests/test_schema.py and
tests/test_optim.py compare both sides.
"""


def _codes_of(*names: str) -> dict[str, int]:
    return {name: code for code, name in enumerate(names)}


POOLING = _codes_of("sum", "mean", "none")
BOUNDS_CHECK = _codes_of("fatal", "warning", "ignore")  # NONE calls no check
CACHE_POLICY = _codes_of("lru", "lfu")
HASH_ORDER = _codes_of("none", "lru", "lfu", "lru_lfu", "assigned")
INSERT_POLICY = _codes_of("wins", "competes")
MATMUL_PRECISION = _codes_of("float32", "tf32", "bf16")
OPTIMIZER = _codes_of(
    "sgd",
    "adagrad",
    "rowwise_adagrad",
    "ensemble_rowwise_adagrad",
    "rowwise_adagrad_max_norm",
    "rowwise_adagrad_global_decay",
    "rowwise_adagrad_cowclip",
    "rowwise_adagrad_counter",
    "adam",
    "partial_rowwise_adam",
    "lamb",
    "partial_rowwise_lamb",
    "lars",
    "ftrl",
)
# Codes of the optimizers whose entry `Hyper.OPTIMIZER_ARGS + 1` of `hyper` is `max_norm`, as in
# csrc/optim/rowwise_adagrad.h.
WITH_MAX_NORM = frozenset(
    OPTIMIZER[f"rowwise_adagrad_{variant}"]
    for variant in ("max_norm", "global_decay", "cowclip", "counter")
)
