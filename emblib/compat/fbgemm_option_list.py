"""Every option of FBGEMM's training module and what it is here: the data of `docs/options.md`."""

import sys
from pathlib import Path
from typing import Any, NamedTuple

from emblib import optim
from emblib.compat import option_pages
from emblib.compat.fbgemm_tables import STATE_ORDER

YES = "yes"


class Option(NamedTuple):
    """One option: FBGEMM's name, emblib's, what it does, and where."""

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
    Option("EmbeddingLocation.DEVICE", "`Placement.DEVICE`", "In the memory of the device"),
    Option(
        "EmbeddingLocation.HOST",
        "`Placement.HOST`",
        "In the memory of the CPU",
        cuda="raises: use MANAGED",
    ),
    Option(
        "EmbeddingLocation.MANAGED",
        "`Placement.MANAGED`",
        "In host memory, read in place by the GPU",
        cpu="as HOST",
        cuda="pinned memory",
    ),
    Option(
        "EmbeddingLocation.MANAGED_CACHING",
        "`Placement.MANAGED_CACHING`",
        "As MANAGED, behind a cache in the memory of the device",
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
        "The table of each feature; a shared table gets one update a row and step",
    ),
    Option(
        "table_names",
        "`TableSpec.name`",
        "Names in reports and in `state_dict`; a dot becomes `_`, a name met again gets its "
        "table's number",
    ),
    Option("device", "`device`", "Where the kernels run"),
    Option(
        "enforce_hbm",
        "`Placement.DEVICE` for all tables",
        "Keeps tables on the device whatever their location says; there is then no cache",
    ),
    Option(
        "uvm_non_rowwise_momentum",
        "`Placement.MANAGED`",
        "Optimizer state as long as a row leaves the device. State lives beside its rows here, "
        "so DEVICE tables with such state become MANAGED, rows and all; results are the same",
        cpu="all memory is the host's",
    ),
    Option(
        "uvm_host_mapped",
        "–",
        "How host memory is made readable for the GPU there; here it is always pinned and "
        "mapped, so both values mean the same",
        cpu="all memory is the host's",
    ),
    Option(
        "preallocated_host_buffers",
        "–",
        "Buffers of the caller's to keep tables in",
        cpu="raises",
        cuda="raises",
    ),
    Option(
        "embedding_shard_info",
        "–",
        "Says of which larger tables these are parts; kept as an attribute. Only the input "
        "multiplexer reads it, which raises",
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
        "SUM, MEAN, or NONE for one vector a lookup. MEAN divides "
        "by the number of lookups also where they are weighted (FBGEMM's CPU kernel for float16 "
        "output does not, and its gradients do not)",
    ),
    Option(
        "bounds_check_mode",
        "`bounds_check`",
        "FATAL, WARNING, IGNORE, NONE; V2_* mean the same. Nothing outside a table is read in "
        "any mode, index -1 is skipped, and the caller's tensors stay as they are (FBGEMM "
        "rewrites them). On the CPU, compiled or not, WARNING too raises for offsets that leave "
        "out ids or bags",
        cuda="yes; WARNING counts in `bounds_violations`",
    ),
    Option(
        "embedding_table_index_type",
        "–",
        "torch.int32: indices are cast to it; torch.int64: they stay as they come, int32 or int64",
    ),
    Option(
        "embedding_table_offset_type", "–", "Checked; offsets are read as they come, int32 or int64"
    ),
    Option(
        "use_experimental_tbe",
        "–",
        "Chooses between two forward kernels there; one kernel here, the same result",
    ),
    Option(
        "forward: per_sample_weights",
        "`per_sample_weights`",
        "Scales rows and gets a gradient, for SUM and MEAN; cast to float32. With NONE it "
        "raises (FBGEMM drops it)",
    ),
    Option(
        "forward: feature_requires_grad",
        "`feature_requires_grad`",
        "Features with 0 give per_sample_weights no gradient; their rows are trained all the same",
    ),
    Option(
        "forward: batch_size_per_feature_per_rank",
        "`batch_sizes`",
        "Batch size of each feature and rank; the output is one vector, rank-major. With every "
        "optimizer",
    ),
    Option(
        "forward: total_unique_indices",
        "`total_unique_indices`",
        "Distinct rows of the batch, for OptimType.NONE; may be left out here",
    ),
    Option(
        "forward: hash_zch_identities, hash_zch_runtime_meta",
        "–",
        "Read by raw embedding streaming only, which raises; alone they do nothing, as there",
    ),
    Option(
        "forward: vbe_output, vbe_output_offsets",
        "–",
        "Buffers of the caller's for the output",
        cpu="raises, as there",
        cuda="raises",
    ),
)

PRECISION = (
    Option(
        "weights_precision",
        "`Precision(weights=)`",
        "FP32, FP16, BF16 (FBGEMM: no BF16); others raise",
    ),
    Option(
        "output_dtype",
        "`Precision(output=)`",
        "FP32, FP16, BF16; others raise. Sums are float32 in any case",
    ),
    Option(
        "cache_precision",
        "`CacheConfig(dtype=)`",
        "Of the rows in the cache; None is that of the weights",
    ),
    Option(
        "stochastic_rounding",
        "`Precision(stochastic_rounding=StochasticRounding(seed))`",
        "Of weights and state in 16 bits, unbiased and the same on any number of threads; the "
        "seed is torch's at construction. Without effect on float32, as there",
        cpu="yes (FBGEMM: ignored)",
    ),
    Option(
        "optimizer_state_dtypes",
        "`Precision(states=)`",
        "FP32, FP16 or BF16 for state as long as a row, one for all; with any optimizer. State "
        "of one number a row is float32 always",
    ),
)

OPTIMIZER = (
    Option("optimizer", "`optimizer`", "See the table of optimizers"),
    Option(
        "learning_rate",
        "`lr`",
        "Read on the device: a new one neither synchronises nor "
        "recompiles, and a captured graph sees it",
    ),
    Option("eps", "`eps`", "Of Adagrad, Adam and LAMB"),
    Option("momentum", "`LARS(momentum=)`", "Of LARS_SGD"),
    Option("eta", "`LARS(eta=)`", "Of LARS_SGD"),
    Option("beta1, beta2", "`betas`", "Of Adam and LAMB"),
    Option(
        "weight_decay",
        "`weight_decay=L2(...)` or `Decoupled(...)`",
        "See the table of optimizers; raises with one that has none, and with "
        "EXACT_ROWWISE_ADAGRAD and weight_decay_mode NONE (FBGEMM ignores it)",
        cpu="yes (FBGEMM: mostly ignored)",
    ),
    Option(
        "weight_decay_mode",
        "`weight_decay`, `counter`, `global_decay`",
        "Of EXACT_ROWWISE_ADAGRAD: NONE, L2, DECOUPLE, COUNTER, COWCLIP, DECOUPLE_GLOBAL. Of "
        "the others NONE, and DECOUPLE where that is what they do",
    ),
    Option(
        "counter_based_regularization",
        "`RowwiseAdagrad(counter=Counter(...))`",
        "With WeightDecayMode.COUNTER",
    ),
    Option(
        "cowclip_regularization",
        "`RowwiseAdagrad(counter=CowClip(...))`",
        "With WeightDecayMode.COWCLIP",
    ),
    Option(
        "global_weight_decay",
        "`RowwiseAdagrad(global_decay=GlobalDecay(...))`",
        "With WeightDecayMode.DECOUPLE_GLOBAL; SUM or MEAN pooling, tables in the memory of the "
        "device",
        cpu="yes (FBGEMM: none)",
    ),
    Option(
        "max_norm",
        "`RowwiseAdagrad(max_norm=)`",
        "Rows are scaled down to this norm after an update; of EXACT_ROWWISE_ADAGRAD, raises "
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
        "Of ENSEMBLE_ROWWISE_ADAGRAD; tables in the memory of the device",
        cpu="yes (FBGEMM: none)",
    ),
    Option(
        "emainplace_mode",
        "in `emblib.compat.fbgemm`",
        "Of EMAINPLACE_ROWWISE_ADAGRAD: every step_ema steps the second half of each row moves "
        "towards the first",
    ),
    Option(
        "extra_optimizer_config.use_rowwise_bias_correction",
        "–",
        "Adam's bias correction by the updates of the row",
        cpu="raises",
        cuda="raises",
    ),
    Option(
        "extra_optimizer_config.use_writeback_bwd_prehook",
        "in `emblib.compat.fbgemm`",
        "Of EXACT_SGD: of the lookups of a row only the first one's gradient acts; bags of one "
        "lookup",
    ),
    Option(
        "extra_optimizer_config.writeback_first_feature_only",
        "in `emblib.compat.fbgemm`",
        "Only lookups of the first feature act",
    ),
    Option(
        "extra_optimizer_config.precompute_writeback",
        "–",
        "When the lookups to keep are found; always in forward here",
    ),
)

CACHE = (
    Option("cache_algorithm", "`CacheConfig(policy=)`", "LRU or LFU; 32 ways"),
    Option("cache_load_factor", "`CacheConfig(load_factor=)`", "Share of the cached tables' rows"),
    Option("cache_sets", "`CacheConfig(sets=)`", "Sets of 32 rows; 0 follows from the load factor"),
    Option(
        "cache_reserved_memory",
        "`CacheConfig(reserved_bytes=)`",
        "Memory of the GPU to leave free when the cache is made",
        cpu="nothing to reserve",
    ),
    Option(
        "prefetch_pipeline",
        "–",
        "There it locks rows that are in flight. They always are here, with both policies, so "
        "prefetch may run ahead whatever this says",
    ),
    Option(
        "multipass_prefetch_config",
        "`CacheConfig(passes=MultiPassPrefetch(...))`",
        "A batch of min_splitable_pass_size lookups or more is prefetched in num_passes parts",
    ),
    Option(
        "gather_uvm_cache_stats",
        "`cache_stats()`",
        "Counted always here; the getters ask for the option, as there",
    ),
    Option(
        "record_cache_metrics",
        "`cache_stats()`",
        "Batches with misses and distinct missed rows; of each table. Waits for the device",
    ),
)

REPORTING = (
    Option(
        "stats_reporter_config",
        "`set_stats_reporter(reporter)`",
        "`create_reporter()` makes the reporter; it is told FBGEMM's events, the native module "
        "has its own. One written for FBGEMM fits",
    ),
    Option("tbe_input_multiplexer_config", "–", "Dumps inputs", cpu="raises", cuda="raises"),
    Option(
        "enable_raw_embedding_streaming, res_params",
        "–",
        "Streams changed rows to a server",
        cpu="raises",
        cuda="raises",
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

This page is written by `python -m emblib.compat.fbgemm_option_list docs/options.md`.
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
