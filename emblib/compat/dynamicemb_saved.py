"""What DynamicEmb saves beside a table: numbers of the optimizer, and what kind of table it is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from emblib import DynamicEmbeddingBags, optim
from emblib.compat.dynamicemb_arguments import evict_strategy
from emblib.compat.dynamicemb_types import DynamicEmbTableOptions
from emblib.dynamic.saving.dumps import DumpError, field

_SAVED = {optim.SGD: "sgd", optim.Adam: "adam", optim.Adagrad: "exact_adagrad",
          optim.RowwiseAdagrad: "exact_row_wise_adagrad"}  # fmt: skip


def opt_args(bags: DynamicEmbeddingBags, options: DynamicEmbTableOptions) -> dict[str, Any]:
    """What DynamicEmb saves of an optimizer and a table, by its names."""
    rule: Any = bags.optimizer
    saved: dict[str, Any] = {"opt_type": _SAVED[type(rule)], "lr": bags.learning_rate}
    if isinstance(rule, optim.Adam):
        decay = rule.weight_decay.rate if rule.weight_decay else 0.0
        saved |= {"iters": bags.step, "beta1": rule.betas[0], "beta2": rule.betas[1]}
        saved |= {"eps": rule.eps, "weight_decay": decay}
    elif not isinstance(rule, optim.SGD):
        state = bags.tables[0].initial_state
        saved |= {"eps": rule.eps, "initial_accumulator_value": state}
    if not isinstance(options.score_strategy, tuple):
        name = evict_strategy(options.score_strategy).name.title()
        saved["evict_strategy"] = f"EvictStrategy.K{name}"
    saved["dist_type"] = options.dist_type
    return saved


@dataclass(frozen=True)
class Saved:
    """What a table and its optimizer go on from; all of it is checked.

    Attributes:
        hyper: changes for `set_hyper`.
        step: for `set_step`; None leaves it.
        step_score: for `set_step_score`; None leaves it.
    """

    hyper: Mapping[str, Any]
    step: int | None
    step_score: int | None


def check_kind(
    table: str,
    path: Path,
    content: Mapping[str, Any],
    ours: Mapping[str, Any],
    with_optimizer: bool,
) -> None:
    """Check that a table was dumped by one of the same kind.

    Raises:
        DumpError: an entry of the file at `path` is no name.
        ValueError: the table is of another kind.
    """
    names = ["evict_strategy", *(["opt_type"] if with_optimizer else [])]
    for name in names:
        if name not in content or name not in ours:
            continue
        saved = field(path, content, name, str)
        if saved != ours[name]:
            raise ValueError(
                f"{name} of table {table!r} is {saved} in the dump and {ours[name]} here; "
                "load into a table of the same options"
                + (", or with optim=False" if name == "opt_type" else "")
            )
    if "dist_type" in content and field(path, content, "dist_type", str) == "continuous":
        raise ValueError(
            f"table {table!r} was dumped with dist_type continuous, whose files have remainders of "
            "keys in place of the keys; dump it with another dist_type"
        )


def checked(
    path: Path, content: Mapping[str, Any], rule: Any, *, counts_steps: bool = False
) -> Saved:
    """Read the numbers of the file at `path` that a table takes.

    Args:
        path: of the file, for errors.
        content: of the file.
        rule: the optimizer of the table; None leaves out its numbers.
        counts_steps: whether the table has a score that counts steps.

    Raises:
        DumpError: a number is missing, of the wrong type or out of range.
    """
    hyper = {} if rule is None else _hyper(path, content, rule)
    step = score = None
    if rule is not None and "iters" in content:
        step = _whole(path, content, "iters", 0, 2**53)
    if counts_steps and "step_score" in content:
        score = _whole(path, content, "step_score", -(2**63), 2**63 - 1)
    return Saved(hyper, step, score)


def _hyper(path: Path, content: Mapping[str, Any], rule: Any) -> dict[str, Any]:
    def number(name: str) -> float:
        return float(field(path, content, name, int, float))

    def decay() -> dict[str, Any]:
        rate = number("weight_decay") if "weight_decay" in content else 0.0
        return {"weight_decay": optim.Decoupled(rate) if rate else None}

    parsers: dict[tuple[str, ...], Callable[[], dict[str, Any]]] = {
        ("lr",): lambda: {"lr": number("lr")}
    }
    if not isinstance(rule, optim.SGD):
        parsers["eps",] = lambda: {"eps": number("eps")}
    if isinstance(rule, optim.Adam):
        parsers["beta1", "beta2"] = lambda: {"betas": (number("beta1"), number("beta2"))}
        parsers["weight_decay", "beta1"] = decay
    hyper: dict[str, Any] = {}
    for names, parse in parsers.items():
        if not any(name in content for name in names):
            continue
        try:
            change = parse()
            replace(rule, **change)  # which checks ranges
        except (TypeError, ValueError, OverflowError) as error:
            words = " and ".join(map(repr, names))
            raise DumpError(f"{path} is malformed: {words}: {error}") from error
        hyper |= change
    return hyper


def _whole(path: Path, content: Mapping[str, Any], name: str, least: int, most: int) -> int:
    number: int = field(path, content, name, int)
    if not least <= number <= most:
        raise DumpError(f"{path} is malformed: {name!r} must be in [{least}, {most}], is {number}")
    return number
