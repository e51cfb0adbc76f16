"""The integer codes of the options of native ops: one dict {name: code} per option.

Ops take an option as a small integer: the conversion of a string argument in torch's stable headers
leaks a copy of it at every call. csrc/core/codes.h has the same numbers and names, and says what
each does; optimizers are in the order of csrc/optim/optimizers.h. tests/test_schema.py and
tests/test_optim.py compare them.
"""


def _number(*names: str) -> dict[str, int]:
    return {name: code for code, name in enumerate(names)}


POOLING = _number("sum", "mean", "none")
BOUNDS_CHECK = _number("fatal", "warning", "ignore")  # no code for NONE: the check is not called
CACHE_POLICY = _number("lru", "lfu")
HASH_ORDER = _number("none", "lru", "lfu", "lru_lfu", "assigned")
INSERT_POLICY = _number("wins", "competes")
MATMUL_PRECISION = _number("float32", "tf32", "bf16")
OPTIMIZER = _number(
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
