"""Every option of DynamicEmb's and what it is here: the data of `docs/dynamicemb.md`."""

import sys
from pathlib import Path
from typing import NamedTuple

from emblib.compat import option_pages


class Option(NamedTuple):
    """One option: DynamicEmb's name, emblib's, and what it does."""

    dynamicemb: str
    emblib: str
    meaning: str


TABLES = (
    Option("dim", "`DynamicSpec(dim=)`", "Length of a row; any >= 1 (there: at most 1024)"),
    Option(
        "max_capacity",
        "`DynamicSpec(capacity=)`",
        "Most rows, rounded up to a multiple of 32; must be given, there is no planner",
    ),
    Option(
        "init_capacity",
        "`DynamicSpec(initial_capacity=)`",
        "Rows to begin with; None or more than max_capacity: all of them. Growth goes bucket by "
        "bucket, in place",
    ),
    Option("max_load_factor", "`DynamicSpec(max_load=)`", "The load at which a table grows"),
    Option(
        "embedding_dtype",
        "`Precision(weights=)`",
        "Dtype of the rows, one for all tables of a module; None is float32. Optimizer state is "
        "float32 (there: of the dtype of the rows)",
    ),
    Option(
        "index_type",
        "–",
        "torch.int64 (also None) or torch.uint64. Every 64-bit id is a legal key (there: -1 to -4 "
        "are not)",
    ),
    Option(
        "score_strategy",
        "`DynamicSpec(eviction=)`",
        "TIMESTAMP: LRU, STEP: STEP, CUSTOMIZED: CUSTOM, LFU: LFU, (TIMESTAMP, LFU): LRU_LFU, "
        "NO_EVICTION: NONE. A timestamp is the number of the training step here (there: a clock)",
    ),
    Option(
        "score_strategy: NO_EVICTION",
        "`Eviction.NONE`",
        "A table that is full refuses new keys and warns of it (there: it grows beyond "
        "max_capacity)",
    ),
    Option(
        "evict_strategy",
        "–",
        "Follows from score_strategy; raises where it contradicts it (there: overwritten)",
    ),
    Option(
        "bucket_capacity",
        "–",
        "A hint there and without effect here: the least of the up to 64 slots that a key may have "
        "gives way. MAX_BUCKET_CAPACITY, which asks for the least of the whole table, raises",
    ),
    Option(
        "safe_check_mode",
        "`DynamicSpec(check=OnInsertFailure)`",
        "IGNORE, WARNING, ERROR when keys found no place (there: no effect). Such keys read what "
        "eval_initializer_args says and are not trained",
    ),
    Option(
        "initializer_args",
        "`DynamicSpec(initializer=)`",
        "By table (there: that of the first table for all), and a function of seed, table, key and "
        "element. Bounds left out of UNIFORM and TRUNCATED_NORMAL are +-1/sqrt(max_capacity). "
        "DEBUG is the key, read as unsigned, modulo 100000",
    ),
    Option(
        "eval_initializer_args",
        "`DynamicSpec(missing=)`",
        "What an id that is not there reads in eval mode; CONSTANT only, as there",
    ),
    Option(
        "training",
        "–",
        "False: no optimizer state, and a forward in training mode raises, as there",
    ),
    Option(
        "admit_strategy",
        "`DynamicSpec(admission=FrequencyAdmission(threshold))`",
        "FrequencyAdmissionStrategy; its initializer_args (None: those of the table) is what keys "
        "read until they are admitted. Other classes raise",
    ),
    Option(
        "admission_counter",
        "`FrequencyAdmission(counter=ExactCounter(capacity))`",
        "KVCounter; a capacity each (there: buckets of the first for all). bucket_capacity is a "
        "hint, as above",
    ),
    Option(
        "local_hbm_for_values, global_hbm_for_values",
        "`TieredEmbeddingBags(tiers)`",
        "Bytes for rows and states in the memory of the device; global is read where local is 0. "
        "What does not fit is in `HostRows` behind it, and both have max_capacity rows. 0: on a "
        "CPU no limit, on a GPU it raises (there: all rows in host memory)",
    ),
    Option(
        "caching",
        "`Tiers(mode=)`",
        "True: every row that a batch uses moves to the device (CACHING). False: where it ranks "
        "above what it replaces (HYBRID; there: never). A row is in one tier alone",
    ),
    Option(
        "external_storage",
        "`tiers`",
        "Raises: emblib's protocol for storage of your own is `RowStore`, and DynamicEmb takes a "
        "class where emblib takes an object",
    ),
    Option("device_id", "`device`", "The GPU, where torch sees one and no device is given"),
    Option(
        "dist_type",
        "–",
        "Checked, and part of the dump; tables of one process hold every key, by its own value",
    ),
)

MODULE = (
    Option(
        "table_options", "`tables=[DynamicSpec(...)]`", "Equal in the fields of grouping, as there"
    ),
    Option("table_names", "`DynamicSpec(name=)`", "None: t0, t1, ..."),
    Option("feature_table_map", "`feature_tables`", "The table of each feature, in any order"),
    Option("pooling_mode", "`pooling`", "SUM, MEAN, or NONE for one vector a lookup"),
    Option("output_dtype", "`Precision(output=)`", "float32, float16 or bfloat16"),
    Option("device", "`device`", "A CPU too; None: the GPU of device_id where there is one"),
    Option(
        "use_index_dedup",
        "–",
        "A choice of speed there; every training batch is grouped by key here, with the same "
        "results",
    ),
    Option(
        "prefetch_pipeline",
        "–",
        "prefetch() may be called either way. It reads rows that are behind the device; with one "
        "tier there are none",
    ),
    Option(
        "enforce_hbm",
        "–",
        "True: all rows in the memory of the device, whatever local_hbm_for_values says",
    ),
    Option(
        "bounds_check_mode",
        "–",
        "No id is out of bounds; offsets are checked in every mode",
    ),
    Option(
        "forward: per_sample_weights",
        "`counts`",
        "How many uses a lookup stands for, with LFU and (TIMESTAMP, LFU), as there. With other "
        "strategies it raises (there: ignored); weights of pooling are pooling_weights",
    ),
    Option(
        "forward: pooling_weights",
        "`per_sample_weights`",
        "Scales rows, for SUM and MEAN, and gets a gradient; later versions there: SUM, without",
    ),
    Option(
        "forward: feature_requires_grad, batch_size_per_feature_per_rank, total_unique_indices",
        "–",
        "Raise unless None (there: ignored)",
    ),
)

OPTIMIZER = (
    Option(
        "optimizer",
        "`optimizer`",
        "SGD and EXACT_SGD: `optim.SGD`; ADAM: `optim.Adam`; EXACT_ADAGRAD: `optim.Adagrad`; "
        "EXACT_ROWWISE_ADAGRAD: `optim.RowwiseAdagrad`. Others raise, as there",
    ),
    Option("learning_rate, eps, beta1, beta2", "`lr`, `eps`, `betas`", "As there"),
    Option(
        "weight_decay",
        "`weight_decay=Decoupled(rate)`",
        "Of ADAM, decoupled; with others it raises (there: ignored)",
    ),
    Option(
        "weight_decay_mode",
        "–",
        "NONE, or DECOUPLE for ADAM; others raise (there: ignored)",
    ),
    Option(
        "initial_accumulator_value",
        "`DynamicSpec(initial_state=)`",
        "What every number of a new row's state starts with, Adam's too, as there",
    ),
    Option(
        "gradient_clipping, max_gradient",
        "`max_gradient`",
        "Clamps the gradient of the output, element by element",
    ),
    Option(
        "stochastic_rounding",
        "`Precision(stochastic_rounding=)`",
        "Of rows in 16 bits; the seed is torch's at construction (there: no effect)",
    ),
    Option(
        "max_norm, momentum, eta, counter_based_regularization, cowclip_regularization",
        "–",
        "Raise unless they are their defaults (there: ignored)",
    ),
)

FUNCTIONS = (
    Option(
        "DynamicEmbDump",
        "",
        "Writes every table of the modules in `model` in DynamicEmb's files, rows as float32; each "
        "rank of `pg` its own (None: all processes). What is written over stays until all ranks "
        "have written",
    ),
    Option(
        "DynamicEmbLoad",
        "",
        "Reads such files, of any number of ranks and any `dist_type` but continuous, whose keys "
        "are not in the files; every key comes back once, on the rank that `dist_type` sends it "
        "to. A missing or damaged file raises on all ranks of `pg` before anything is changed",
    ),
    Option(
        "incremental_dump",
        "",
        "Keys and rows of all ranks whose score is at least the threshold, and the thresholds of "
        "the next call. "
        "The score of TIMESTAMP and (TIMESTAMP, LFU) is the step of the last use, that of "
        "NO_EVICTION too (there: the row)",
    ),
    Option(
        "get_score",
        "",
        "Score of the next training step by path of the module and table: its number for "
        "TIMESTAMP, the step for STEP, what was set for CUSTOMIZED, 1 for LFU",
    ),
    Option(
        "set_score",
        "",
        "Scores of CUSTOMIZED tables: an int for all, or by module and table; modules by name, as "
        "there, or by path",
    ),
)

GROUPS = {"Tables": TABLES, "Module": MODULE, "Optimizer": OPTIMIZER, "Functions": FUNCTIONS}

_INTRODUCTION = """\
# Options: DynamicEmb's, and what they are here

`emblib.compat.dynamicemb` has the names, arguments and defaults of NVIDIA's DynamicEmb
(recsys-examples, `corelib/dynamicemb`, version 0.1.0) over `emblib.DynamicEmbeddingBags`: change
the import and keep the code. Every option has its effect or raises with the reason, and what is a
hint there and has none here is named as such. DynamicEmb needs CUDA and was not run beside this:
what is said of it (*there*) was read in its source.

Not here: its planner and sharders, and its inference tables. A module has the keys that its process
looks up; routing them to ranks is the caller's, and dumps have the files of all ranks.

This page is written by `python -m emblib.compat.dynamicemb_option_list docs/dynamicemb.md`.
"""


def page() -> str:
    """The text of the page."""
    heads = ("DynamicEmb", "emblib", "what it does")
    return "\n".join([_INTRODUCTION, *option_pages.groups(heads, GROUPS)])


def names() -> set[str]:
    """DynamicEmb's names that the page explains, one by one."""
    options = (option for group in GROUPS.values() for option in group)
    return {
        name.strip()
        for option in options
        for name in option.dynamicemb.removeprefix("forward: ").split(":")[0].split(",")
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
