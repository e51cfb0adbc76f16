"""The page that lists FBGEMM's options, written from `fbgemm_option_list`.

`python -m emblib.compat.fbgemm_options docs/options.md` writes it. A test compares the page with
what the list says, and the list with the signatures.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

from emblib import optim
from emblib.compat import option_pages
from emblib.compat.fbgemm_option_list import GROUPS, YES
from emblib.compat.fbgemm_tables import STATE_ORDER


class Rule(NamedTuple):
    """One optimizer: FBGEMM's name, the class in `emblib.optim`, its weight decay, FBGEMM's CPU."""

    fbgemm: str
    emblib: str
    weight_decay: str
    there: str
    note: str = ""

    def optimizer(self) -> optim.Optimizer:
        """One of them, as it is without options."""
        kind: Any = getattr(optim, self.emblib)
        return kind() if kind is optim.External else kind(lr=0.01)

    def states(self) -> list[str]:
        """Its states with their shapes, in FBGEMM's order."""
        kept = {state.name: state for state in self.optimizer().states}
        order = [name for name in STATE_ORDER if name in kept]
        return [f"{name} {'[R]' if kept[name].per_row else '[R, D]'}" for name in order]

    def line(self) -> tuple[str, ...]:
        """Of the table."""
        kinds = ", ".join(f"`{kind.__name__}`" for kind in self.optimizer().decays)
        return (
            option_pages.code(self.fbgemm),
            f"`{self.emblib}`{self.note}",
            ", ".join(self.states()) or "none",
            self.weight_decay,
            kinds or "none",
            self.there,
        )


RULES = (
    Rule("EXACT_SGD", "SGD", "none", YES),
    Rule("EXACT_ADAGRAD", "Adagrad", "none", YES),
    Rule(
        "EXACT_ROWWISE_ADAGRAD",
        "RowwiseAdagrad",
        "L2, decoupled, counter, CowClip, global",
        "yes; L2 and decoupled only for tables that several features read, no global",
    ),
    Rule("ADAM", "Adam", "decoupled", "no"),
    Rule("PARTIAL_ROWWISE_ADAM", "PartialRowwiseAdam", "decoupled", "no"),
    Rule("LAMB", "LAMB", "inside the trust ratio", "no"),
    Rule("PARTIAL_ROWWISE_LAMB", "PartialRowwiseLAMB", "inside the trust ratio", "no"),
    Rule("LARS_SGD", "LARS", "in gradient and trust ratio", "no"),
    Rule("ENSEMBLE_ROWWISE_ADAGRAD", "EnsembleRowwiseAdagrad", "none", "no"),
    Rule(
        "EMAINPLACE_ROWWISE_ADAGRAD",
        "RowwiseAdagrad",
        "none",
        YES,
        " and the average in `emblib.compat.fbgemm`",
    ),
    Rule("NONE", "External", "that of your optimizer", "no"),
)

_INTRODUCTION = """\
# Options: FBGEMM's, and what they are here

`emblib.compat.fbgemm` has the names, arguments and defaults of FBGEMM's
`SplitTableBatchedEmbeddingBagsCodegen` over `emblib.TableBatchedEmbeddingBags`: change the import
and keep the code. Every option has its effect or raises with the reason; none is dropped silently.
Where FBGEMM's own CPU build drops or miscomputes one, the formula of its documentation holds here,
and the tests say where (`tests/compat/`). CPU and CUDA are held to one reference;
the CUDA kernels have run in emulation so far, not on a GPU.

This page is written by `python -m emblib.compat.fbgemm_options docs/options.md`.
"""

_OPTIMIZERS = """\
All run on CPU and CUDA, with every pooling, with variable batch sizes and, but for what is said
above, with every placement; NONE on tables in the memory of the device. States are in FBGEMM's
order; with counters `prev_iter [R]` and `row_counter [R]` follow, with global decay
`prev_iter [R]`. Up to 2^24, as far as FBGEMM's floats count, the values of `prev_iter` are the
steps; `emblib.optim.decode_steps` reads later ones. *native*: the kinds of `weight_decay` that the
class of `emblib.optim` takes.
"""


def page() -> str:
    """The text of the page."""
    parts = [_INTRODUCTION]
    heads: tuple[str, ...] = ("FBGEMM", "emblib", "what it does", "CPU", "CUDA")
    parts += option_pages.groups(heads, GROUPS)
    heads = ("OptimType", "emblib.optim", "state", "weight decay", "native", "FBGEMM's CPU")
    table = option_pages.table(heads, [rule.line() for rule in RULES])
    parts.append(f"## Optimizers\n\n{_OPTIMIZERS}\n{table}")
    return "\n".join(parts)


def names() -> set[str]:
    """FBGEMM's names that the page explains, one by one."""
    options = (option for group in GROUPS.values() for option in group)
    return {name.strip() for option in options for name in option.fbgemm.split(",")}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
