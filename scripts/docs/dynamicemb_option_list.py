"""Options of DynamicEmb and their counterparts: the data of `docs/dynamicemb.md`."""

import sys
from pathlib import Path
from typing import NamedTuple

from scripts.docs import option_pages


class Option(NamedTuple):
    """One option: DynamicEmb's name, emblib's name, and its effect."""

    dynamicemb: str
    emblib: str
    meaning: str


TABLES = (
    Option(
        "dim",
        "`DynamicSpec(dim=)`",
        "Length of a row; any >= 1 (there: at most 1024)",
    ),
    Option(
        "max_capacity",
        "`DynamicSpec(capacity=)`",
        "Maximum number of rows (per rank), rounded up to a multiple of 32; required, unless a "
        "planner fills it in",
    ),
    Option(
        "init_capacity",
        "`DynamicSpec(initial_capacity=)`",
        "Initial number of rows; None or more than max_capacity: all of them. Growth is bucket "
        "by bucket, in place",
    ),
    Option(
        "max_load_factor",
        "`DynamicSpec(max_load=)`",
        "The load at which a table grows",
    ),
    Option(
        "embedding_dtype",
        "`Precision(weights=)`",
        "Dtype of the rows, the same for all tables of a module; None is float32. Optimizer "
        "state is float32 (there: the dtype of the rows)",
    ),
    Option(
        "index_type",
        "–",
        "torch.int64 (also None) or torch.uint64. Every 64-bit id is a legal key (there: -1 to "
        "-4 are not)",
    ),
    Option(
        "score_strategy",
        "`DynamicSpec(eviction=)`",
        "TIMESTAMP: LRU, STEP: STEP, CUSTOMIZED: CUSTOM, LFU: LFU, (TIMESTAMP, LFU): LRU_LFU, "
        "NO_EVICTION: NONE. A timestamp is the number of the training step here (there: a "
        "clock)",
    ),
    Option(
        "score_strategy: NO_EVICTION",
        "`Eviction.NONE`",
        "A full table refuses new keys and warns (there: it grows beyond max_capacity)",
    ),
    Option(
        "evict_strategy",
        "–",
        "Follows from score_strategy; raises if it contradicts it (there: overwritten)",
    ),
    Option(
        "bucket_capacity",
        "–",
        "A hint there, without effect here: the lowest-ranking of the up to 64 slots of a key "
        "is evicted. MAX_BUCKET_CAPACITY, which requests the lowest-ranking slot of the whole "
        "table, raises",
    ),
    Option(
        "safe_check_mode",
        "`DynamicSpec(on_insert_failure=)`",
        "IGNORE, WARNING, ERROR if keys could not be inserted (there: no effect). Such keys "
        "read the value of eval_initializer_args and are not trained",
    ),
    Option(
        "initializer_args",
        "`DynamicSpec(initializer=)`",
        "Per table (there: that of the first table for all), and a function of seed, table, "
        "key and element. Default bounds of UNIFORM and TRUNCATED_NORMAL are "
        "+-1/sqrt(max_capacity). DEBUG is the key, read as unsigned, modulo 100000",
    ),
    Option(
        "eval_initializer_args",
        "`DynamicSpec(default_value=)`",
        "Value read for missing keys in eval mode; CONSTANT only, as there",
    ),
    Option(
        "training",
        "–",
        "False: no optimizer state, and a forward in training mode raises, as there",
    ),
    Option(
        "admit_strategy",
        "`DynamicSpec(admission=FrequencyAdmission(threshold))`",
        "FrequencyAdmissionStrategy, or your own AdmissionStrategy, whose `admit` becomes "
        "`FrequencyAdmission(rule=)`. Its initializer_args (None: those of the table) is the "
        "value that keys read until they are admitted",
    ),
    Option(
        "admission_counter",
        "`FrequencyAdmission(counter=ExactCounter(capacity))`",
        "KVCounter; each table has its capacity (there: buckets of the first for all). "
        "bucket_capacity is a hint, as above",
    ),
    Option(
        "local_hbm_for_values, global_hbm_for_values",
        "`DynamicEmbeddingBags(backing=)`",
        "Bytes of device memory for rows and states; global is used if local is 0. Rows that "
        "do not fit are in a `HostRows` store, and both have max_capacity rows. A budget below a "
        "bucket of 32 rows is rounded up to one, with a warning. 0: on a CPU no limit, on a GPU it "
        "raises (there: all rows in host memory)",
    ),
    Option(
        "caching",
        "`BackingStore(mode=)`",
        "True: every row that a batch uses is promoted to the device (CACHING). False: it is "
        "promoted if it ranks above the row it would replace (HYBRID; there: never). A row is "
        "in one tier only",
    ),
    Option(
        "external_storage",
        "`BackingStore(store)`",
        "An object of emblib's protocol `RowStore`, e.g. `DiskRows(directory)` or your own, which "
        "takes the rows that the device evicts; sharded, each table of a rank gets "
        "`store.for_shard(...)`. Classes of DynamicEmb's protocol raise",
    ),
    Option(
        "device_id",
        "`device`",
        "The GPU to use if torch sees one and no device is passed",
    ),
    Option(
        "dist_type",
        "–",
        "Checked, and part of the dump, where continuous is roundrobin: files have whole keys "
        "(there: remainders); the tables of one process hold every key",
    ),
)

MODULE = (
    Option(
        "table_options",
        "`tables=[DynamicSpec(...)]`",
        "Equal in the fields of grouping, as there",
    ),
    Option(
        "table_names",
        "`DynamicSpec(name=)`",
        "None: t0, t1, ...",
    ),
    Option(
        "feature_table_map",
        "`feature_tables`",
        "The table of each feature, in any order",
    ),
    Option(
        "pooling_mode",
        "`pooling`",
        "SUM, MEAN, or NONE for one vector per lookup",
    ),
    Option(
        "output_dtype",
        "`Precision(output=)`",
        "float32, float16 or bfloat16",
    ),
    Option(
        "device",
        "`device`",
        "May be a CPU; None: the GPU of device_id if there is one",
    ),
    Option(
        "use_index_dedup",
        "–",
        "Affects speed there; here every training batch is grouped by key, with the same results",
    ),
    Option(
        "prefetch_pipeline",
        "–",
        "prefetch() may be called with either value. In training it fixes the batch's scores and "
        "counts a step, as there; keys get their rows in the forward pass (there: in prefetch). "
        "It reads rows of the store; with one tier there are none",
    ),
    Option(
        "enforce_hbm",
        "–",
        "True: all rows in device memory, whatever local_hbm_for_values is",
    ),
    Option(
        "bounds_check_mode",
        "–",
        "No id is out of bounds; offsets are checked in every mode",
    ),
    Option(
        "forward: per_sample_weights",
        "`counts`",
        "Number of uses that a lookup counts for, with LFU and (TIMESTAMP, LFU), as there. "
        "With other strategies it raises (there: ignored); the weights of pooling are "
        "pooling_weights",
    ),
    Option(
        "forward: pooling_weights",
        "`per_sample_weights`",
        "Scales rows, for SUM and MEAN, and gets a gradient; later versions there: SUM only, "
        "no gradient",
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
    Option(
        "learning_rate, eps, beta1, beta2",
        "`lr`, `eps`, `betas`",
        "As there",
    ),
    Option(
        "weight_decay",
        "`weight_decay=Decoupled(rate)`",
        "For ADAM, decoupled; with others it raises (there: ignored)",
    ),
    Option(
        "weight_decay_mode",
        "–",
        "NONE, or DECOUPLE for ADAM; others raise (there: ignored)",
    ),
    Option(
        "initial_accumulator_value",
        "`DynamicSpec(initial_state=)`",
        "Initial value of every number of a new row's state, Adam's too, as there",
    ),
    Option(
        "gradient_clipping, max_gradient",
        "`max_gradient`",
        "Clamps the gradient of the output, element by element",
    ),
    Option(
        "stochastic_rounding",
        "`Precision(stochastic_rounding=)`",
        "For rows in 16 bits; the seed is drawn from torch at construction (there: no effect)",
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
        "Writes every table of the modules in `model` to DynamicEmb's files, rows as float32; "
        "each rank of `pg` writes its own (None: all processes). Overwritten files are kept "
        "until all ranks have written",
    ),
    Option(
        "DynamicEmbLoad",
        "",
        "Reads such files, from any number of ranks and any `dist_type` except continuous, "
        "whose keys are not in the files; every key is restored once, on the rank that "
        "`dist_type` assigns it to. A missing or damaged file raises on all ranks of `pg` "
        "before anything is changed. An `initial_accumulator_value` other than that of the table "
        "is not loaded, with a warning (there: it is)",
    ),
    Option(
        "incremental_dump",
        "",
        "Returns keys and rows of all ranks whose score is at least the threshold, and the "
        "thresholds for the next call. The score of TIMESTAMP, (TIMESTAMP, LFU) and "
        "NO_EVICTION is the step of the last use (there, for NO_EVICTION: the row)",
    ),
    Option(
        "get_score",
        "",
        "Returns the score of the next training step by path of the module and table: its "
        "number for TIMESTAMP, the step for STEP, the set value for CUSTOMIZED, 1 for LFU",
    ),
    Option(
        "set_score",
        "",
        "Sets scores of CUSTOMIZED tables: an int for all, or by module and table; modules by "
        "name, as there, or by path",
    ),
)

SHARDING = (
    Option(
        "DynamicEmbParameterConstraints",
        "`storage=Hash(...)`",
        "`use_dynamicemb` makes a table dynamic, with `dynamicemb_options`; row-wise over all "
        "ranks only, as there. `enforce_hbm` and `bounds_check_mode` of such a table have no "
        "effect: its options say where rows are, and every id is valid",
    ),
    Option(
        "DynamicEmbeddingShardingPlanner",
        "`sharding.planner.Planner`",
        "Fills in the options of dynamic tables as there, and plans all tables with the memory "
        "of dynamic ones counted (there: earlier versions ignore it). `eb_configs` may be left "
        "out. `proposer`, `partitioner`, `performance_model` and `stats` raise",
    ),
    Option(
        "DynamicEmbeddingEnumerator",
        "–",
        "Takes topology, batch size and constraints, which must be those of the planner; "
        "`enumerate` raises, since emblib's planner enumerates itself",
    ),
    Option(
        "DynamicEmbeddingCollectionSharder, DynamicEmbeddingBagCollectionSharder",
        "`DistributedModelParallel(optimizer=)`",
        "TorchRec's arguments; `fused_params` with the arguments of the optimizer, "
        "`initial_accumulator_value` and `output_dtype=FP32`. A collection with dynamic tables "
        "must be on the meta device. With `use_index_dedup`, tables that count uses (LFU, "
        "admission) get how often each id was there. Keys are on the rank of emblib's hash, "
        "whatever `dist_type` is; dumps have each key in the file of the rank that `dist_type` "
        "gives, for which the rows of a table pass all ranks, one file at a time",
    ),
    Option(
        "state_dict",
        "",
        "Of a sharded collection has all rows of dynamic tables, for "
        "`emblib.sharding.checkpoints`; `torch.save` writes none of them, with a warning (there: "
        "one number), and loading what it wrote with `strict=False` empties the tables: call "
        "DynamicEmbLoad after it, as there",
    ),
    Option(
        "DynamicEmbParameterSharding",
        "`sharding.ParameterSharding`",
        "The entry of a dynamic table in a plan",
    ),
    Option(
        "get_planner",
        "",
        "Makes a planner of tables that are replicated, dynamic, or row-wise. `ddr_cap` is that "
        "of a rank, and bandwidths are bytes per second; left out, they are measured. `pg` is "
        "added: the ranks",
    ),
    Option(
        "get_table_value_bytes, get_constraint_capacity",
        "",
        "Bytes of the rows of a table over all ranks, and rows per rank in some bytes: at least "
        "one bucket, with a warning. Optimizer states count as float32, as they are here",
    ),
    Option(
        "get_sharded_table_capacity, align_to_table_size, complete_initializer_args, "
        "data_type_to_dtype",
        "",
        "As there",
    ),
    Option(
        "export_keys_values, fill_tables, dump, load, flush",
        "",
        "Methods of `BatchedDynamicEmbeddingTablesV2`, and of the dynamic tables of a sharded "
        "collection. `fill_tables(load_factor, tolerance)` inserts random keys by training "
        "forwards without update",
    ),
    Option(
        "tables, cache, set_record_cache_metrics, optimizer, enable_prefetch",
        "",
        "Attributes of `BatchedDynamicEmbeddingTablesV2`: emblib's handles by name (there: a "
        "Storage); with `caching` and a store, `cache.cache_metrics` has the positions of the last "
        "forward and its hits (there: distinct keys), else `cache` is None; emblib's optimizer; "
        "prefetch is always enabled",
    ),
    Option(
        "find_sharded_modules, get_dynamic_emb_module, check_emb_collection_modules",
        "",
        "What has dynamic tables in a model: modules, and the tables of sharded collections, which "
        "have the methods of a module",
    ),
    Option(
        "encode_checkpoint_file_path, encode_counter_checkpoint_file_path, "
        "encode_meta_json_file_path, find_files",
        "",
        "As there; files of some ranks only raise DumpError",
    ),
    Option(
        "data_type_to_dyn_emb, dyn_emb_to_torch, torch_to_dyn_emb, dtype_to_bytes, "
        "string_to_evict_strategy, get_optimizer_state_dim, get_optimizer_ckpt_state_dim",
        "",
        "As there; a row of row-wise Adagrad has one number of state in memory, too",
    ),
    Option(
        "Storage, Cache, Counter, OptimizerArgs, create_initializer_from_args",
        "",
        "With the classes of storages, counters, optimizers, initializers and inference tables: "
        "import, and raise where they are used, with the counterpart",
    ),
    Option(
        "install, uninstall",
        "",
        "emblib's own: let `import dynamicemb` find this module and its submodules, as there. "
        "NVIDIA's `example/example.py` runs over it on a CPU, with the backend and the device of "
        "its first lines changed",
    ),
)

GROUPS = {
    "Tables": TABLES,
    "Module": MODULE,
    "Optimizer": OPTIMIZER,
    "Functions": FUNCTIONS,
    "Planner, sharders and capacities": SHARDING,
}

_INTRODUCTION = """\
# DynamicEmb's options and their counterparts

`emblib.compat.dynamicemb` provides the names, arguments and defaults of NVIDIA's DynamicEmb
(recsys-examples, `corelib/dynamicemb`, version 0.1.0) on top of `emblib.DynamicEmbeddingBags`:
change the import and keep the code. Every option either works or raises with the reason; options
that are hints there and have no effect here are marked. Statements about DynamicEmb (*there*) come
from its source, as it needs CUDA; on an H100 outputs and rows of both were compared
([GPU results](gpu_results.md)).

With the planner and sharders, its tables are in the collections of `emblib.compat.torchrec`:
`EmbeddingCollection` or `EmbeddingBagCollection` on the meta device, constraints, planner, sharder,
`DistributedModelParallel`. `model.tables["name"]` is emblib's own [handle](dynamic.md#handles) of
such a table. A module outside of a collection has the keys that its process looks up; the caller
routes keys to ranks, and dumps have the files of all ranks. Not supported: its inference tables.

This page is generated by `python -m scripts.docs.dynamicemb_option_list docs/dynamicemb.md`.
"""


def page() -> str:
    """Return the text of the page."""
    heads = ("DynamicEmb", "emblib", "what it does")
    return "\n".join([_INTRODUCTION, *option_pages.groups(heads, GROUPS)])


def names() -> set[str]:
    """Return the DynamicEmb names that the page explains."""
    options = (option for group in GROUPS.values() for option in group)
    return {
        name.strip()
        for option in options
        for name in option.dynamicemb.removeprefix("forward: ").split(":")[0].split(",")
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
