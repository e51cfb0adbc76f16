"""Options of FBGEMM's training module and their counterparts: the data of `docs/options.md`."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

from emblib import optim
from emblib.compat.fbgemm_tables import STATE_ORDER
from scripts.docs import option_pages

YES = "yes"


class Option(NamedTuple):
    """One option: FBGEMM's name, emblib's name, its effect, and its support per device."""

    fbgemm: str
    emblib: str
    meaning: str
    cpu: str = YES
    cuda: str = YES


TABLES = (
    Option(
        "embedding_specs",
        "`tables=[TableSpec(rows, dim, name, placement)]`",
        "Rows and dim of each table; any dim >= 1, not only multiples of 4",
    ),
    Option(
        "EmbeddingLocation.DEVICE",
        "`Placement.DEVICE`",
        "In device memory",
    ),
    Option(
        "EmbeddingLocation.HOST",
        "`Placement.HOST`",
        "In CPU memory",
        cuda="raises: use MANAGED",
    ),
    Option(
        "EmbeddingLocation.MANAGED",
        "`Placement.MANAGED`",
        "In host memory, read in place by the GPU",
        cpu="as HOST",
        cuda="CUDA tensors over pinned memory",
    ),
    Option(
        "EmbeddingLocation.MANAGED_CACHING",
        "`Placement.MANAGED_CACHING`",
        "As MANAGED, behind a cache in device memory",
        cpu="yes; FBGEMM has no cache there",
    ),
    Option(
        "–",
        "`Placement.DISK`",
        "A memory-mapped file behind a cache; not in FBGEMM's signature",
        cuda="raises: use MANAGED_CACHING",
    ),
    Option(
        "EmbeddingLocation.MTIA, ComputeDevice.MTIA",
        "–",
        "Another accelerator",
        cpu="raises",
        cuda="raises",
    ),
    Option(
        "feature_table_map",
        "`feature_tables`",
        "The table of each feature; a shared table gets one update per row and step",
    ),
    Option(
        "table_names",
        "`TableSpec.name`",
        "Names in reports and in `state_dict`; a dot becomes `_`, and the number of the table "
        "is appended to a repeated name",
    ),
    Option(
        "device",
        "`device`",
        "The device of the kernels",
    ),
    Option(
        "enforce_hbm",
        "`Placement.DEVICE` for all tables",
        "Stores all tables on the device whatever their location is; then there is no cache",
    ),
    Option(
        "uvm_non_rowwise_momentum",
        "`Placement.MANAGED`",
        "Moves optimizer state as long as a row off the device. Here state is stored with its "
        "rows, so DEVICE tables with such state become MANAGED, including their rows; results "
        "are the same",
        cpu="all memory is host memory",
    ),
    Option(
        "uvm_host_mapped",
        "–",
        "In FBGEMM, how host memory is made readable for the GPU; here it is always pinned and "
        "mapped, so both values mean the same",
        cpu="all memory is host memory",
    ),
    Option(
        "preallocated_host_buffers",
        "–",
        "Flat tensors for `weights`, `momentum1` and `momentum2`, whose memory tables and states "
        "then have; on a GPU it raises, as there is no HOST location",
        cuda="raises",
    ),
    Option(
        "embedding_shard_info",
        "–",
        "Describes the larger tables of which these are shards; kept as an attribute. Only the "
        "input multiplexer reads it, which raises",
    ),
    Option(
        "is_qr_tbe",
        "–",
        "Marks the quotient-remainder subclass",
        cpu="raises if True",
        cuda="raises if True",
    ),
)

LOOKUPS = (
    Option(
        "pooling_mode",
        "`pooling`",
        "SUM, MEAN, or NONE for one vector per lookup. MEAN divides by the number of lookups, "
        "also if they are weighted (FBGEMM's CPU kernel for float16 output does not, and its "
        "gradients do not)",
    ),
    Option(
        "bounds_check_mode",
        "`bounds_check`",
        "FATAL, WARNING, IGNORE, NONE; V2_* mean the same. No mode reads outside a table, "
        "index -1 is skipped, and the caller's tensors are not changed (FBGEMM rewrites them). "
        "On the CPU, compiled or not, WARNING also raises for offsets that omit ids or bags",
        cuda="yes; WARNING warns some batches later, without a wait",
    ),
    Option(
        "embedding_table_index_type",
        "–",
        "torch.int32: indices are cast to it; torch.int64: indices are used as they are, int32 "
        "or int64",
    ),
    Option(
        "embedding_table_offset_type",
        "–",
        "Checked; offsets are used as they are, int32 or int64",
    ),
    Option(
        "use_experimental_tbe",
        "–",
        "In FBGEMM, chooses between two forward kernels; here there is one kernel, with the "
        "same result",
    ),
    Option(
        "forward: per_sample_weights",
        "`per_sample_weights`",
        "Scales rows and gets a gradient, for SUM and MEAN; cast to float32. With NONE it "
        "raises (FBGEMM ignores it)",
    ),
    Option(
        "forward: feature_requires_grad",
        "–",
        "Features with 0 give per_sample_weights no gradient; their rows are still trained",
    ),
    Option(
        "forward: batch_size_per_feature_per_rank",
        "`batch_sizes`",
        "Batch size per feature and rank; the output is one vector, rank-major. Supported with "
        "every optimizer",
    ),
    Option(
        "forward: total_unique_indices",
        "`num_distinct_rows`",
        "Number of distinct rows of the batch, for OptimType.NONE; optional here",
    ),
    Option(
        "forward: hash_zch_identities, hash_zch_runtime_meta",
        "–",
        "Used only by raw embedding streaming, which raises; alone they have no effect, as in "
        "FBGEMM",
    ),
    Option(
        "forward: vbe_output, vbe_output_offsets",
        "–",
        "A tensor to write the output of a variable batch into, and where each rank and feature "
        "begins in it; TorchRec passes them where several modules share an output",
        cpu="yes (FBGEMM: raises)",
    ),
)

PRECISION = (
    Option(
        "weights_precision",
        "`Precision(weights=)`",
        "FP32, FP16, BF16 (FBGEMM: no BF16); INT8 rows (codes, float32 scale and minimum) are "
        "looked up, and raise in the backward pass; others raise",
    ),
    Option(
        "output_dtype",
        "`Precision(output=)`",
        "FP32, FP16, BF16; others raise. Sums are always float32",
    ),
    Option(
        "cache_precision",
        "`CacheConfig(dtype=)`",
        "Dtype of the rows in the cache; None means the dtype of the weights",
    ),
    Option(
        "stochastic_rounding",
        "`Precision(stochastic_rounding=StochasticRounding(seed))`",
        "For weights and state in 16 bits, unbiased and the same on any number of threads; the "
        "seed is drawn from torch at construction. No effect on float32, as in FBGEMM",
        cpu="yes (FBGEMM: ignored)",
    ),
    Option(
        "optimizer_state_dtypes",
        "`Precision(states=)`",
        "FP32, FP16 or BF16 for state as long as a row, one dtype for all; with any optimizer. "
        "State with one number per row is always float32",
    ),
)

OPTIMIZER = (
    Option(
        "optimizer",
        "`optimizer`",
        "See the table of optimizers",
    ),
    Option(
        "learning_rate",
        "`lr`",
        "Read on the device: a new value neither synchronises nor recompiles, and a captured "
        "graph uses it",
    ),
    Option(
        "eps",
        "`eps`",
        "For Adagrad, Adam and LAMB",
    ),
    Option(
        "momentum",
        "`LARS(momentum=)`",
        "For LARS_SGD",
    ),
    Option(
        "eta",
        "`LARS(eta=)`",
        "For LARS_SGD",
    ),
    Option(
        "ar_alpha, ema_beta, min_shrinkage",
        "–",
        "FBGEMM 1.9: for ROWWISE_RMSPROP_AR, which raises; another value than the default warns",
        cpu="no effect",
        cuda="no effect",
    ),
    Option(
        "beta1, beta2",
        "`betas`",
        "For Adam and LAMB",
    ),
    Option(
        "weight_decay",
        "`weight_decay=L2(...)` or `Decoupled(...)`",
        "See the table of optimizers; raises with an optimizer that has none, and with "
        "EXACT_ROWWISE_ADAGRAD and weight_decay_mode NONE (FBGEMM ignores it)",
        cpu="yes (FBGEMM: mostly ignored)",
    ),
    Option(
        "weight_decay_mode",
        "`weight_decay`, `counter`, `global_decay`",
        "For EXACT_ROWWISE_ADAGRAD: NONE, L2, DECOUPLE, COUNTER, COWCLIP, DECOUPLE_GLOBAL. For "
        "others NONE, and DECOUPLE if that is their behaviour",
    ),
    Option(
        "counter_based_regularization",
        "`RowwiseAdagrad(counter=Counter(...))`",
        "With WeightDecayMode.COUNTER. State dicts have the step, and eps as it is now; "
        "`set_optimizer_step` counts at any time (FBGEMM: neither is saved, so that training "
        "restarts at step 0, and a step is read only before the first update)",
    ),
    Option(
        "cowclip_regularization",
        "`RowwiseAdagrad(counter=CowClip(...))`",
        "With WeightDecayMode.COWCLIP",
    ),
    Option(
        "global_weight_decay",
        "`RowwiseAdagrad(global_decay=GlobalDecay(...))`",
        "With WeightDecayMode.DECOUPLE_GLOBAL; SUM or MEAN pooling, tables in device memory",
        cpu="yes (FBGEMM: none)",
    ),
    Option(
        "max_norm",
        "`RowwiseAdagrad(max_norm=)`",
        "Rows are scaled down to this norm after an update; for EXACT_ROWWISE_ADAGRAD, raises "
        "with others",
        cpu="yes (FBGEMM: ignored)",
    ),
    Option(
        "gradient_clipping, max_gradient",
        "`max_gradient`",
        "Every element of the output's gradient is clamped before anything else",
    ),
    Option(
        "ensemble_mode",
        "`EnsembleRowwiseAdagrad(...)`",
        "For ENSEMBLE_ROWWISE_ADAGRAD; tables in device memory",
        cpu="yes (FBGEMM: none)",
    ),
    Option(
        "emainplace_mode",
        "in `emblib.compat.fbgemm`",
        "For EMAINPLACE_ROWWISE_ADAGRAD: every step_ema steps the second half of each row "
        "moves towards the first",
    ),
    Option(
        "extra_optimizer_config.use_rowwise_bias_correction",
        "–",
        "Adam's bias correction by the number of updates of the row",
        cpu="raises",
        cuda="raises",
    ),
    Option(
        "extra_optimizer_config.use_writeback_bwd_prehook",
        "in `emblib.compat.fbgemm`",
        "For EXACT_SGD: only the gradient of the first lookup of a row is applied; bags of one "
        "lookup",
    ),
    Option(
        "extra_optimizer_config.writeback_first_feature_only",
        "in `emblib.compat.fbgemm`",
        "Only lookups of the first feature are applied",
    ),
    Option(
        "extra_optimizer_config.precompute_writeback",
        "–",
        "When the applied lookups are determined; here always in forward",
    ),
)

CACHE = (
    Option(
        "cache_algorithm",
        "`CacheConfig(policy=)`",
        "LRU or LFU; 32 ways",
    ),
    Option(
        "cache_load_factor",
        "`CacheConfig(load_factor=)`",
        "Cache size as a share of the cached tables' rows",
    ),
    Option(
        "cache_sets",
        "`CacheConfig(sets=)`",
        "Number of sets of 32 rows; 0: derived from the load factor",
    ),
    Option(
        "cache_reserved_memory",
        "`CacheConfig(reserved_bytes=)`",
        "GPU memory to leave free when the cache is created",
        cpu="nothing to reserve",
    ),
    Option(
        "prefetch_pipeline",
        "–",
        "In FBGEMM, locks rows that are in flight. Here they are always locked, with both "
        "policies, so prefetch may run ahead with either value",
    ),
    Option(
        "multipass_prefetch_config",
        "`CacheConfig(passes=MultiPassPrefetch(...))`",
        "A batch with min_splitable_pass_size lookups or more is prefetched in num_passes passes",
    ),
    Option(
        "gather_uvm_cache_stats",
        "`cache_stats()`",
        "Always counted here; the getters require the option, as in FBGEMM",
    ),
    Option(
        "record_cache_metrics",
        "`cache_stats()`",
        "Batches with misses and distinct missed rows, per table. Waits for the device",
    ),
)

REPORTING = (
    Option(
        "stats_reporter_config",
        "`set_stats_reporter(reporter)`",
        "`create_reporter()` creates the reporter; it receives FBGEMM's events, and reporters "
        "written for FBGEMM work. The native module has its own events",
    ),
    Option(
        "tbe_input_multiplexer_config",
        "–",
        "Dumps inputs",
        cpu="raises",
        cuda="raises",
    ),
    Option(
        "enable_raw_embedding_streaming",
        "–",
        "Streams changed rows to a server",
        cpu="raises",
        cuda="raises",
    ),
    Option(
        "res_params",
        "–",
        "Options of that server, which TorchRec always passes",
        cpu="no effect",
        cuda="no effect",
    ),
)

GROUPS = {
    "Tables and placement": TABLES,
    "Lookups": LOOKUPS,
    "Precision": PRECISION,
    "Optimizer": OPTIMIZER,
    "Cache and prefetch": CACHE,
    "Reports": REPORTING,
}


class Rule(NamedTuple):
    """One optimizer: FBGEMM's name, emblib's class, weight decay, support on FBGEMM's CPU."""

    fbgemm: str
    emblib: str
    weight_decay: str
    fbgemm_cpu: str
    note: str = ""

    def optimizer(self) -> optim.Optimizer:
        """Return an instance with default options."""
        kind: Any = getattr(optim, self.emblib)
        return kind() if kind is optim.External else kind(lr=0.01)

    def states(self) -> list[str]:
        """Return the names and shapes of its states, in FBGEMM's order."""
        states_by_name = {state.name: state for state in self.optimizer().states}
        order = [name for name in STATE_ORDER if name in states_by_name]
        return [f"{name} {'[R]' if states_by_name[name].per_row else '[R, D]'}" for name in order]

    def line(self) -> tuple[str, ...]:
        """Return its row of the table."""
        kinds = ", ".join(f"`{kind.__name__}`" for kind in self.optimizer().decays)
        return (
            option_pages.code(self.fbgemm),
            f"`{self.emblib}`{self.note}",
            ", ".join(self.states()) or "none",
            self.weight_decay,
            kinds or "none",
            self.fbgemm_cpu,
        )


RULES = (
    Rule("EXACT_SGD", "SGD", "none", YES),
    Rule("EXACT_ADAGRAD", "Adagrad", "none", YES),
    Rule(
        "EXACT_ROWWISE_ADAGRAD",
        "RowwiseAdagrad",
        "L2, decoupled, counter, CowClip, global",
        "yes; L2 and decoupled only for tables shared by several features, no global",
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
# FBGEMM's options and their counterparts

`emblib.compat.fbgemm` provides the names, arguments and defaults of FBGEMM's
`SplitTableBatchedEmbeddingBagsCodegen` on top of `emblib.TableBatchedEmbeddingBags`: change the
import and keep the code. Every option either works or raises with the reason; none is silently
ignored. If FBGEMM's own CPU build ignores or miscomputes an option, emblib follows the formula of
FBGEMM's documentation, and a test in `tests/compat/` documents the difference. CPU and CUDA are
tested against one reference, CUDA on an H100 too.

This page is generated by `python -m scripts.docs.fbgemm_option_list docs/options.md`.
"""

_OPTIMIZERS = """\
All optimizers run on CPU and CUDA, with every pooling, with variable batch sizes and, with the
exceptions above, with every placement; NONE requires tables in device memory. States are in
FBGEMM's order; with counters, `prev_iter [R]` and `row_counter [R]` follow, with global decay
`prev_iter [R]`. Up to 2^24, the limit of FBGEMM's floats, the values of `prev_iter` are the
steps; `emblib.optim.decode_steps` decodes later ones. *native*: the kinds of `weight_decay` that
the class of `emblib.optim` accepts.
"""


def page() -> str:
    """Return the text of the page."""
    parts = [_INTRODUCTION]
    heads: tuple[str, ...] = ("FBGEMM", "emblib", "what it does", "CPU", "CUDA")
    parts += option_pages.groups(heads, GROUPS)
    heads = ("OptimType", "emblib.optim", "state", "weight decay", "native", "FBGEMM's CPU")
    table = option_pages.table(heads, [rule.line() for rule in RULES])
    parts.append(f"## Optimizers\n\n{_OPTIMIZERS}\n{table}")
    return "\n".join(parts)


def names() -> set[str]:
    """Return the FBGEMM names that the page explains."""
    options = (option for group in GROUPS.values() for option in group)
    return {name.strip() for option in options for name in option.fbgemm.split(",")}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
