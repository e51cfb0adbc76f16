"""FBTT-Embedding's arguments and attributes and their counterparts: the data of `docs/fbtt.md`."""

import sys
from pathlib import Path
from typing import NamedTuple

from scripts.docs import option_pages


class Option(NamedTuple):
    """One name: FBTT's, emblib's, and what it does."""

    fbtt: str
    emblib: str
    meaning: str


ARGUMENTS = (
    Option("num_tables", "`tables`", "Tables of equal sizes (emblib's own module takes any mix)"),
    Option(
        "num_embeddings",
        "`TTSpec(rows=)`",
        "The id -1 is skipped. Others outside [0, rows) are reported and read row 0 "
        "(there: memory outside the cores, or a row of the padding)",
    ),
    Option("embedding_dim", "`TTSpec(dim=)`", "Any dim (there: multiples of 4)"),
    Option(
        "tt_ranks",
        "`TTSpec(ranks=)`",
        "As there, ranks above what the cores can use too (`TTSpec.usable()` lowers those)",
    ),
    Option("tt_p_shapes", "`TTSpec(row_factors=)`", "Left out: those of `suggested_tt_shapes`"),
    Option(
        "tt_q_shapes",
        "`TTSpec(dim_factors=)`",
        "Left out: exact factors of the dimension "
        "(there it is rounded up, which fails for 96, 128, 160, ...)",
    ),
    Option(
        "optimizer",
        "`emblib.optim`",
        "The optimizer of that name (there: SGD for SGD and "
        "EXACT_SGD, elementwise Adagrad for all others)",
    ),
    Option("learning_rate, eps", "`lr`, `eps`", "As there"),
    Option(
        "sparse",
        "`optim.External(gradient=DENSE)`",
        "True: backward updates the cores; False: dense gradients on the parameters",
    ),
    Option(
        "use_cache",
        "`CachedTTEmbeddingBags`",
        "Stores the most used rows after `cache_populate()`; any number of tables (there: one)",
    ),
    Option("cache_size", "`TTCache(rows=)`", "Of each table; 0: a tenth of its rows"),
    Option(
        "hashtbl_size",
        "`TTCache(counted=)`",
        "Ids whose uses are counted; 0: all rows. The least "
        "used lose their counts (there: an id that finds no place in 3 probes is not counted)",
    ),
    Option(
        "weight_dist",
        "`init`",
        "uniform and naive-uniform: as there, cores in [0, c), which gives rows a common mean. "
        "normal: `gaussian`, approx-uniform: `approx_uniform`, approx-normal: `sampled_gaussian`, "
        "all with rows of deviation 1 / sqrt(3 rows). The other three formulas of FBTT are `init` "
        "of `TableBatchedTTEmbeddingBags`: `unscaled_normal`, ...",
    ),
    Option("enforce_embedding_dim", "–", "Has no effect: the dimension is never rounded up"),
    Option("device", "`device`", "Of the cores; not in FBTT, which needs CUDA"),
)
METHODS = (
    Option(
        "forward",
        "`forward`",
        "indices, offsets; `[T, B, D]`, or `[B, D]` of `TTEmbeddingBag`. Offsets may lack their "
        "last entry, as in FBTT's README: their number says so for several tables, for one a CPU "
        "reads the last offset, and a GPU that of the first batch. Indices `[T * B, N]` or "
        "`[T, B, N]` are bags of N and need no offsets. warmup has no effect, as there",
    ),
    Option(
        "cache_populate",
        "`populate`",
        "Rows that stay keep what they learned; rows that leave "
        "return it to the cores, as far as these can take it on (there both are lost)",
    ),
    Option(
        "reset_cache",
        "`empty_cache`",
        "Empties the cache, and forgets all counts (there: AttributeError)",
    ),
    Option(
        "full_weight",
        "`to_dense`",
        "`[prod p, D]` of one table, with the stored rows (there: without)",
    ),
    Option("set_learning_rate", "`set_learning_rate`", "As there"),
    Option("get_params", "`parameters`", "As there"),
    Option(
        "update_cache", "–", "Counts uses of ids without a lookup; without a cache it does nothing"
    ),
    Option(
        "reset_parameters",
        "`reset_parameters`",
        "Draws the cores again; weight_dist may be left out, and is then that of the constructor",
    ),
    Option(
        "load_state_dict",
        "`load_state_dict`",
        "Loads FBTT's state dicts too, strictly: cores, Adagrad's states, counted ids, and the "
        "rows in its cache with what they learned (there they are dropped). FBTT saves no ranks: "
        "cores of equal shapes are taken for those of this module",
    ),
)
ATTRIBUTES = (
    Option(
        "tt_cores",
        "`table_cores`",
        "The parameters, core k of all tables: `[T, p_k, R_k q_k R_{k+1}]`. Writes reach lookups, "
        "and with sparse=False they have gradients",
    ),
    Option(
        "optimizer_state", "`core_optimizer_states`", "The first state of each core; empty for SGD"
    ),
    Option(
        "cache_weight",
        "`rows`",
        "The stored rows of the first table; of one table with sparse=False a parameter",
    ),
    Option(
        "num_embeddings, embedding_dim, tt_p_shapes, tt_q_shapes, tt_ranks, tt_ndim",
        "`tables`",
        "As there; ranks with the 1 at both ends",
    ),
    Option("use_cache, cache_size, hashtbl_size, sparse", "–", "As given"),
)
FUNCTIONS = (
    Option("suggested_tt_shapes", "`TTSpec(...).row_factors`", "The same factors as there; "
           "emblib's own are closer to the number of rows"),
    Option("tt_matrix_to_full", "`to_dense`", "All rows of cores"),
    Option("OptimType", "`emblib.optim`", "Nine names"),
)  # fmt: skip

GROUPS = {
    "Arguments": ARGUMENTS,
    "Methods": METHODS,
    "Attributes": ATTRIBUTES,
    "Functions": FUNCTIONS,
}

_INTRODUCTION = """\
# FBTT-Embedding's names and their counterparts

`emblib.compat.fbtt` provides `TTEmbeddingBag`, `TableBatchedTTEmbeddingBag`, `OptimType`,
`suggested_tt_shapes` and `tt_matrix_to_full` of FBTT-Embedding (facebookresearch/FBTT-Embedding)
on top of `emblib.TableBatchedTTEmbeddingBags` and `emblib.CachedTTEmbeddingBags`: change the import
and keep the code. Statements about FBTT (*there*) come from its source, as it needs CUDA; on an
H100 both were run and compared ([GPU results](gpu_results.md)). Its own six tests pass on a CPU
with the import replaced.

Two of its bugs are not followed. Its fused updates leave out rows of a core that has more rows than
columns: at the shape of its README, a third of the first core and half of the last never learn.
Rows in its cache lose what they learned with every `cache_populate`.

This page is generated by `python -m scripts.docs.fbtt_option_list docs/fbtt.md`.
"""


def page() -> str:
    """Return the text of the page."""
    heads = ("FBTT", "emblib", "what it does")
    return "\n".join([_INTRODUCTION, *option_pages.groups(heads, GROUPS)])


def names() -> set[str]:
    """Return the names that the page explains."""
    return {
        name.strip()
        for group in GROUPS.values()
        for option in group
        for name in option.fbtt.split(",")
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
