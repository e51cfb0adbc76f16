"""Table of TorchRec's modules and names, for imports and for `docs/torchrec.md`.

`MODULES` has the names of each module of TorchRec. An entry `name=other` means that the name is
`other` in `emblib.compat.torchrec`. A name works as in TorchRec, unless it is in `DIFFERS`, which
states the difference, or in `RAISES`. Names of `RAISES` serve annotations and `isinstance`; any
other use raises with advice. The import of a name that the table does not have raises.

`python -m emblib.compat.torchrec_names docs/torchrec.md` writes the table to the page.
"""

import sys
from pathlib import Path

MODULES = {
    "": "DataType EmbeddingBagCollection EmbeddingBagCollectionInterface EmbeddingBagConfig "
    "EmbeddingCollection EmbeddingConfig JaggedTensor KeyedJaggedTensor KeyedTensor "
    "Multistreamable Pipelineable PoolingType",
    "types": "DataType",
    "streamable": "Multistreamable Pipelineable",
    "sparse": "",
    "sparse.jagged_tensor": "ComputeJTDictToKJT ComputeKJTToJTDict JaggedTensor KeyedJaggedTensor "
    "KeyedTensor jt_is_equal kjt_is_equal",
    "sparse.tensor_dict": "maybe_td_to_kjt",
    "modules": "",
    "modules.embedding_configs": "BaseEmbeddingConfig DataType EmbeddingBagConfig EmbeddingConfig "
    "EmbeddingTableConfig PoolingType QuantConfig ShardingType data_type_to_dtype "
    "dtype_to_data_type",
    "modules.embedding_modules": "EmbeddingBagCollection EmbeddingBagCollectionInterface "
    "EmbeddingCollection EmbeddingCollectionInterface get_embedding_names_by_table",
    "modules.fused_embedding_modules": "FusedEmbeddingBagCollection FusedEmbeddingCollection "
    "fuse_embedding_optimizer",
    "modules.feature_processor": "BaseFeatureProcessor BaseGroupedFeatureProcessor "
    "PositionWeightedModule PositionWeightedProcessor",
    "modules.regroup": "KTRegroupAsDict",
    "modules.mlp": "MLP Perceptron",
    "modules.embedding_tower": "EmbeddingTower EmbeddingTowerCollection",
    "modules.mc_modules": "DistanceLFU_EvictionPolicy LFU_EvictionPolicy LRU_EvictionPolicy "
    "MCHManagedCollisionModule ManagedCollisionCollection ManagedCollisionModule "
    "average_threshold_filter dynamic_threshold_filter probabilistic_threshold_filter",
    "modules.mc_embedding_modules": "ManagedCollisionEmbeddingBagCollection "
    "ManagedCollisionEmbeddingCollection",
    "modules.hash_mc_modules": "HashZchManagedCollisionModule",
    "optim": "Adagrad Adam CombinedOptimizer FusedOptimizer FusedOptimizerModule GradientClipping "
    "GradientClippingOptimizer KeyedOptimizer KeyedOptimizerWrapper LAMB LarsSGD "
    "OptimizerWrapper PartialRowWiseAdam PartialRowWiseLAMB RowWiseAdagrad SGD WarmupOptimizer "
    "WarmupPolicy WarmupStage",
    "optim.apply_optimizer_in_backward": "apply_optimizer_in_backward",
    "optim.clipping": "GradientClipping GradientClippingOptimizer",
    "optim.fused": "EmptyFusedOptimizer FusedOptimizer FusedOptimizerModule",
    "optim.keyed": "CombinedOptimizer KeyedOptimizer KeyedOptimizerWrapper OptimizerWrapper",
    "optim.optimizers": "Adagrad Adam LAMB LarsSGD PartialRowWiseAdam PartialRowWiseLAMB SGD "
    "in_backward_optimizer_filter",
    "optim.rowwise_adagrad": "RowWiseAdagrad",
    "optim.warmup": "WarmupOptimizer WarmupPolicy WarmupStage",
    "datasets": "",
    "datasets.utils": "Batch",
    "quant": "EmbeddingBagCollection=QuantEmbeddingBagCollection",
    "quant.embedding_modules": "EmbeddingBagCollection=QuantEmbeddingBagCollection "
    "EmbeddingCollection=QuantEmbeddingCollection",
    "fx": "Tracer symbolic_trace",
    "fx.tracer": "Tracer is_fx_tracing symbolic_trace",
    "inference": "",
    "inference.modules": "PredictFactory PredictModule assign_weights_to_tbe "
    "get_table_to_weights_from_tbe quantize_embeddings quantize_inference_model "
    "shard_quant_model",
    "inference.state_dict_transform": "state_dict_gather state_dict_to_device",
    "distributed": "Awaitable DistributedModelParallel EvalPipelineSparseDist ModuleSharder "
    "NoWait ParameterSharding PrefetchTrainPipelineSparseDist ShardedModule ShardedTensor "
    "ShardingEnv ShardingPlanner TrainPipeline TrainPipelineBase TrainPipelineSparseDist "
    "get_local_rank get_local_size",
    "distributed.collective_utils": "invoke_on_rank_and_broadcast_result is_leader run_on_leader",
    "distributed.comm": "get_group_rank get_local_rank get_local_size get_num_groups "
    "intra_and_cross_node_pg",
    "distributed.comm_ops": "all_gather_base_pooled alltoall_pooled alltoall_sequence "
    "get_gradient_division reduce_scatter_base_pooled reduce_scatter_pooled "
    "reduce_scatter_v_pooled set_gradient_division variable_batch_alltoall_pooled",
    "distributed.dist_data": "EmbeddingsAllToOne EmbeddingsAllToOneReduce KJTAllToAll "
    "KJTAllToAllTensorsAwaitable KJTOneToAll PooledEmbeddingsAllGather PooledEmbeddingsAllToAll "
    "PooledEmbeddingsAwaitable PooledEmbeddingsReduceScatter SeqEmbeddingsAllToOne "
    "SequenceEmbeddingsAllToAll SequenceEmbeddingsAwaitable "
    "VariableBatchPooledEmbeddingsAllToAll",
    "distributed.embedding": "EmbeddingCollectionContext EmbeddingCollectionSharder "
    "ShardedEmbeddingCollection get_ec_index_dedup set_ec_index_dedup",
    "distributed.embedding_lookup": "CommOpGradientScaling GroupedEmbeddingsLookup "
    "GroupedPooledEmbeddingsLookup embeddings_cat_empty_rank_handle fx_wrap_tensor_view2d",
    "distributed.embedding_sharding": "EmbeddingShardingInfo FusedKJTListSplitsAwaitable "
    "KJTListSplitsAwaitable KJTSplitsAllToAllMeta",
    "distributed.embedding_types": "BaseEmbeddingSharder BaseGroupedFeatureProcessor "
    "BaseQuantEmbeddingSharder EmbeddingComputeKernel GroupedEmbeddingConfig KJTList "
    "ListOfKJTList OptimType ShardedEmbeddingModule ShardedEmbeddingTable "
    "compute_kernel_to_embedding_location",
    "distributed.embeddingbag": "EmbeddingBagCollectionContext EmbeddingBagCollectionSharder "
    "ShardedEmbeddingBagCollection construct_output_kt",
    "distributed.fbgemm_qcomm_codec": "CommType QCommsConfig get_qcomm_codecs_registry",
    "distributed.fused_embeddingbag": "FusedEmbeddingBagCollectionSharder",
    "distributed.grouped_position_weighted": "GroupedPositionWeightedModule",
    "distributed.mc_embedding": "ManagedCollisionEmbeddingCollectionSharder",
    "distributed.mc_embeddingbag": "ManagedCollisionEmbeddingBagCollectionSharder",
    "distributed.model_parallel": "DataParallelWrapper DefaultDataParallelWrapper "
    "DistributedModelParallel ShardedModule get_default_sharders get_module get_unwrapped_module",
    "distributed.planner": "EmbeddingPlannerBase EmbeddingShardingPlanner ParameterConstraints "
    "Topology sharder_name",
    "distributed.planner.enumerators": "EmbeddingComputeKernel EmbeddingEnumerator EmbeddingTower "
    "EmbeddingTowerCollection ParameterConstraints ShardEstimator sharder_name",
    "distributed.planner.partitioners": "GreedyPerfPartitioner",
    "distributed.planner.planners": "EmbeddingPlannerBase EmbeddingShardingPlanner",
    "distributed.planner.proposers": "GridSearchProposer UniformProposer",
    "distributed.planner.shard_estimators": "EmbeddingPerfEstimator EmbeddingStorageEstimator",
    "distributed.planner.storage_reservations": "FixedAbsoluteStorageReservation "
    "FixedPercentageStorageReservation HeuristicalStorageReservation InferenceStorageReservation",
    "distributed.planner.types": "Enumerator ParameterConstraints PlannerError Proposer "
    "ShardEstimator ShardingOption ShardingPlan StorageReservation Topology",
    "distributed.quant_embedding": "QuantEmbeddingCollectionSharder "
    "ShardedQuantEmbeddingCollection",
    "distributed.quant_embeddingbag": "QuantEmbeddingBagCollectionSharder "
    "ShardedQuantEmbeddingBagCollection",
    "distributed.shard": "shard shard_modules _shard_modules",
    "distributed.sharding_plan": "apply_to_all column_wise construct_module_sharding_plan "
    "data_parallel get_default_sharders get_module_to_default_sharders grid_shard placement "
    "row_wise table_column_wise table_row_wise table_wise",
    "distributed.train_pipeline": "EvalPipelineSparseDist PrefetchTrainPipelineSparseDist "
    "Tracer=PipelineTracer TrainPipeline TrainPipelineBase TrainPipelineContext "
    "TrainPipelineSparseDist",
    "distributed.train_pipeline.train_pipelines": "EvalPipelineSparseDist "
    "PrefetchTrainPipelineSparseDist TrainPipeline TrainPipelineBase TrainPipelineSparseDist",
    "distributed.train_pipeline.utils": "Tracer=PipelineTracer",
    "distributed.types": "Awaitable BoundsCheckMode CacheAlgorithm CacheParams CommOp "
    "ComputeKernel DataType EmbeddingModuleShardingPlan EnumerableShardingSpec GenericMeta "
    "KeyValueParams LazyAwaitable LazyNoWait ModuleSharder ModuleShardingPlan "
    "NoOpQuantizedCommCodec NoWait NullShardedModuleContext NullShardingContext "
    "ParameterSharding ParameterStorage QuantizedCommCodec QuantizedCommCodecs ShardMetadata "
    "ShardedModule ShardedTensor ShardingEnv ShardingPlan ShardingPlanner ShardingType "
    "rank_device",
    "distributed.utils": "init_parameters merge_fused_params",
}

DIFFERS = {
    "EmbeddingBagCollection": "`optimizer=` updates rows in backward; MEAN and weights are defined "
    "the same way sharded and not; the output keeps the order of the configurations",
    "EmbeddingCollection": "tables may differ in their dims; `optimizer=` updates rows in backward",
    "EmbeddingBagCollectionInterface": "a virtual base: emblib's collections are instances",
    "EmbeddingCollectionInterface": "a virtual base: emblib's collections are instances",
    "EmbeddingBagConfig": "`data_type` becomes a torch dtype that equals it; `storage`, "
    "`optimizer` and `rounding` are additional; `need_pos`, pruning and virtual tables raise",
    "EmbeddingConfig": "as `EmbeddingBagConfig`",
    "BaseEmbeddingConfig": "a record; `EmbeddingBagConfig`, `EmbeddingConfig` are instances of it",
    "EmbeddingTableConfig": "as `BaseEmbeddingConfig`",
    "data_type_to_dtype": "quantised types and integers raise",
    "dtype_to_data_type": "uint8 is INT8; other integers and `quint2x4` raise",
    "DataType": "rows have FP32, FP16, BF16, INT8 or INT4; equal to the dtype of a configuration",
    "KeyedJaggedTensor": "validates sizes; `length_per_key` and `inverse_indices` are keywords; "
    "other cached fields (`jt_dict`, `index_per_key`, ...) follow from the rest: nothing is stale; "
    "`dist_labels`, `dist_splits`, `dist_tensors` and `dist_init` are missing: `KJTAllToAll` sends",
    "JaggedTensor": "validates sizes",
    "KeyedTensor": "`offset_per_key` and `index_per_key` are computed, not taken",
    "PoolingType": "emblib's `Pooling`; `.value` is lower case",
    "maybe_td_to_kjt": "takes any mapping of `torch.nested` tensors",
    "FusedEmbeddingBagCollection": "`location` raises: `storage=` of each configuration",
    "FusedEmbeddingCollection": "`location` raises: `storage=` of each configuration",
    "fuse_embedding_optimizer": "in place; `location` raises",
    "BaseFeatureProcessor": "`nn.Module`: any module is a feature processor",
    "BaseGroupedFeatureProcessor": "`nn.Module`",
    "GroupedPositionWeightedModule": "positions are counted; weights of the batch are multiplied, "
    "not read as positions",
    "PositionWeightedProcessor": "as `GroupedPositionWeightedModule`",
    "KeyedOptimizer": "virtual: all keyed optimizers of emblib are instances",
    "FusedOptimizer": "emblib's: `sharded.fused_optimizer` is one, with learning rates and states",
    "FusedOptimizerModule": "virtual: every module with a `fused_optimizer`",
    "KeyedOptimizerWrapper": "state dicts always have `param_groups`",
    "ShardedTensor": "emblib's `ShardedTable` with `local_shards`, `local_tensor`, `metadata`, "
    "`gather` and `copy_`",
    "state_dict_to_device": "sharded tables stay sharded; the process group is not needed",
    "CombinedOptimizer": "one `param_groups` list, made at construction",
    "KTRegroupAsDict": "`multi_device` is not needed",
    "GradientClippingOptimizer": "the norm is always that of the model over all ranks; tables that "
    "backward updates raise",
    "apply_optimizer_in_backward": "also resets the optimizer states of tables",
    "QuantEmbeddingBagCollection": "INT8, INT4 and float rows; scale and offset are float32; "
    "buffers are those of the kernels; rows are loaded by `load_state_dict`",
    "QuantEmbeddingCollection": "as the quantised embedding bag collection",
    "Tracer": "collections stay whole in the graph",
    "symbolic_trace": "collections stay whole in the graph",
    "PredictFactory": "an ordinary base class without metadata of Torch packages",
    "PredictModule": "no metadata of Torch packages",
    "quantize_inference_model": "`quantization_mapping` raises: `quantize_embeddings` has "
    "`additional_mapping`",
    "get_table_to_weights_from_tbe": "rows with their scales in one tensor",
    "assign_weights_to_tbe": "all tables of the model; not needed after `shard_quant_model`",
    "shard_quant_model": "whole tables on devices, rows are kept; works on CPUs without a flag",
    "ShardedQuantEmbeddingBagCollection": "whole tables on devices; over processes by rows as well",
    "ShardedQuantEmbeddingCollection": "as `ShardedQuantEmbeddingBagCollection`",
    "QuantEmbeddingBagCollectionSharder": "as `ShardedQuantEmbeddingBagCollection`; "
    "`fused_params` of memory and state dicts have no effect, others raise in `shard`",
    "QuantEmbeddingCollectionSharder": "as `QuantEmbeddingBagCollectionSharder`",
    "state_dict_gather": "all ranks get the whole tensors",
    "intra_and_cross_node_pg": "makes new groups at each call; `backend` raises",
    "get_local_size": "LOCAL_WORLD_SIZE, else all ranks (there: 8)",
    "get_local_rank": "from the rank: nodes have consecutive ranks",
    "reduce_scatter_pooled": "sums are at least float32, in rank order; any sizes",
    "reduce_scatter_base_pooled": "sums are at least float32, in rank order",
    "reduce_scatter_v_pooled": "sums are at least float32, in rank order",
    "row_wise": "`num_buckets` raises, and devices of another type than the plan's",
    "column_wise": "`device_types` that differ from the plan's raise",
    "table_wise": "a `device` of another type than the plan's raises",
    "grid_shard": "any number of columns (there: blocks of 128 or more)",
    "table_column_wise": "TorchRec 1.8 has the type, and no function for it",
    "invoke_on_rank_and_broadcast_result": "without a process group, this process alone",
    "is_leader": "without a process group, this process alone",
    "run_on_leader": "without a process group, this process alone",
    "alltoall_sequence": "the inverse order is not needed",
    "PooledEmbeddingsAwaitable": "emblib's `Awaitable`",
    "SequenceEmbeddingsAwaitable": "emblib's `Awaitable`",
    "KJTAllToAll": "one batch size for all features; `stagger` raises",
    "set_gradient_division": "for collectives that are called directly; sharded collections have "
    "`gradients=`",
    "get_gradient_division": "as `set_gradient_division`",
    "ShardedEmbeddingBagCollection": "key order is that of the configurations, weights are kept; "
    "`_input_dists`, `_lookups` and `_output_dists` have one entry; contexts are optional",
    "ShardedEmbeddingCollection": "as `ShardedEmbeddingBagCollection`; one entry per class of "
    "dims; `use_index_dedup` acts on every sharding type",
    "EmbeddingBagCollectionSharder": "every sharding type on every device; options of FBGEMM's "
    "tables in `fused_params` raise",
    "EmbeddingCollectionSharder": "as `EmbeddingBagCollectionSharder`",
    "FusedEmbeddingBagCollectionSharder": "as `EmbeddingBagCollectionSharder`",
    "BaseEmbeddingSharder": "`ModuleSharder`",
    "ModuleSharder": "the base of emblib's sharders; `module_type` is a class attribute",
    "BaseQuantEmbeddingSharder": "the base of the quantised sharders",
    "ShardedModule": "a virtual base: sharded collections are instances; no "
    "`sharded_parameter_names`: `DistributedModelParallel` leaves tables out of its wrapper",
    "ShardedEmbeddingModule": "a virtual base: sharded collections are instances",
    "EmbeddingComputeKernel": "a plan may have DENSE, FUSED, FUSED_UVM, FUSED_UVM_CACHING, QUANT",
    "OptimType": "those that tables run",
    "DataParallelWrapper": "`wrap(module, ranks, ignored)` returns the wrapped module",
    "DefaultDataParallelWrapper": "`static_graph` is False by default",
    "DistributedModelParallel": "keeps weights; all sharders agree on optimizer and codecs; "
    "`model_tracker_configs` raises; no `reshard`",
    "EmbeddingEnumerator": "topology, batch size and constraints for a planner; `enumerate` and "
    "estimators of your own raise",
    "EmbeddingPerfEstimator": "names the default: emblib's measured costs; `is_inference` raises",
    "EmbeddingStorageEstimator": "names the default: the bytes that emblib counts",
    "EmbeddingShardingPlanner": "one measured search; proposer, partitioner, "
    "performance_model, stats, timeout and plan_loader raise; callbacks get and return a "
    "`ShardingPlan`; `debug` has no effect",
    "EmbeddingPlannerBase": "emblib's planner itself",
    "ShardingPlanner": "emblib's planner itself",
    "Topology": "actual memory, or 32 GiB with a warning for GPUs that this machine lacks; "
    "bandwidths of HBM and DDR are measured, not arguments; `native` has the memory, no `devices`",
    "ParameterConstraints": "options of FBGEMM's tables raise and say where they are",
    "PlannerError": "emblib's `PlanError`; no `error_type`",
    "StorageReservation": "over emblib's `Reservation`",
    "HeuristicalStorageReservation": "no term for batches: the planner counts them",
    "InferenceStorageReservation": "as `HeuristicalStorageReservation`",
    "ParameterSharding": "options of FBGEMM's tables raise and say where they are",
    "CacheParams": "`stats` raises; `prefetch_pipeline` has no effect: any cache may be prefetched",
    "EmbeddingModuleShardingPlan": "a dict with emblib's checks",
    "EnumerableShardingSpec": "shards only",
    "ShardMetadata": "`placement` is text, `rank:1/cpu`, with `rank()` and `device()`; torch's is "
    "taken, too",
    "ShardingEnv": "`output_dtensor` raises",
    "QuantizedCommCodec": "of FBGEMM's messages, with contexts; emblib's `Codec` is one, too",
    "NoOpQuantizedCommCodec": "emblib's `FP32()`",
    "get_qcomm_codecs_registry": "codecs of emblib; sums are at least float32 with all of them",
    "QCommsConfig": "MX4 and dtypes of the decoded values raise",
    "CommType": "MX4 raises",
    "TrainPipeline": "emblib's `TrainPipelineBase`",
    "TrainPipelineBase": "drains loaders of different lengths",
    "TrainPipelineSparseDist": "the model is not traced or rewritten; `apply_jit`, "
    "`context_type` and early freeing raise",
    "PrefetchTrainPipelineSparseDist": "as `TrainPipelineSparseDist`",
    "EvalPipelineSparseDist": "the model must be in eval mode",
    "shard": "`plan` may mix rules and `ParameterSharding`",
    "shard_modules": "`_shard_modules` is the same function",
    "GenericMeta": "`type`",
    "init_parameters": "modules need `reset_parameters`",
    "MCHManagedCollisionModule": "rows and eviction of a hash table: ids get rows at their first "
    "training lookup, not every `eviction_interval` batches; state dicts have keys and rows",
    "ManagedCollisionCollection": "ids are kept: the tables are hash tables",
    "ManagedCollisionEmbeddingCollection": "tables become `storage=Hash()`; "
    "`return_remapped_features` raises",
    "ManagedCollisionEmbeddingBagCollection": "as `ManagedCollisionEmbeddingCollection`",
    "ManagedCollisionEmbeddingCollectionSharder": "`mc_sharder` has no effect; plans name the "
    "collection within, `path._embedding_module`",
    "ManagedCollisionEmbeddingBagCollectionSharder": "as "
    "`ManagedCollisionEmbeddingCollectionSharder`",
    "LFU_EvictionPolicy": "`threshold_filtering_func` raises: storage=Hash(admission=...)",
    "LRU_EvictionPolicy": "as `LFU_EvictionPolicy`",
    "DistanceLFU_EvictionPolicy": "by uses, then by the last one; as `LFU_EvictionPolicy`",
}

_BY_REASON = {
    "put a collection and its interaction into one module; the planner places the tables of a "
    "module together only with constraints": "EmbeddingTower EmbeddingTowerCollection",
    "tables of storage=Hash() take any 64-bit ids, with eviction and admission, in the same "
    "collections: docs/dynamic.md": "ManagedCollisionModule HashZchManagedCollisionModule "
    "average_threshold_filter dynamic_threshold_filter probabilistic_threshold_filter",
    "input_dist of a sharded collection returns emblib's awaitables: two waits give what compute "
    "takes": "KJTAllToAllTensorsAwaitable FusedKJTListSplitsAwaitable KJTListSplitsAwaitable "
    "KJTSplitsAllToAllMeta",
    "placement is data: emblib.sharding.layout says which shard reads which feature, and `groups` "
    "of a sharded collection has the tables of a rank": "EmbeddingShardingInfo "
    "GroupedEmbeddingConfig GroupedEmbeddingsLookup GroupedPooledEmbeddingsLookup "
    "ShardedEmbeddingTable",
    "emblib's planner has one search over a measured cost model (emblib.sharding.planner.Planner); "
    "constraints and callbacks change its plans": "GreedyPerfPartitioner GridSearchProposer "
    "UniformProposer Enumerator Proposer ShardEstimator ShardingOption",
    "the pipelines neither trace nor rewrite the model: TrainPipelineSparseDist, or input_dist and "
    "compute_and_output_dist by hand": "PipelineTracer TrainPipelineContext",
    "rows on disks or behind other tiers have a storage: docs/tiers.md": "KeyValueParams",
}
RAISES = {name: reason for reason, names in _BY_REASON.items() for name in names.split()}
"""Advice for each name that raises: what to use instead, or why emblib does not have it."""

RUN_TORCHREC_ITSELF = (
    "TorchRec itself, unmodified, runs over emblib's kernels: EMBLIB_AS_FBGEMM=1, or "
    "emblib.compat.fbgemm.install() before torchrec is imported (docs/torchrec.md)"
)
"""Advice at the end of error messages: how to use what emblib's names do not have."""


def scoreboard() -> str:
    """Return the table as Markdown: per module, names that work, differ and raise."""
    lines, counts = [], dict.fromkeys(("works", "differs", "raises"), 0)
    for path, text in MODULES.items():
        parts = (entry.partition("=") for entry in text.split())
        entries = [(name, emblib_name or name) for name, _, emblib_name in parts]
        if not entries:
            continue
        names_by_kind: dict[str, list[str]] = {"works": [], "differs": [], "raises": []}
        for name, emblib_name in entries:
            kind = "works"
            if emblib_name in RAISES:
                kind = "raises"
            elif emblib_name in DIFFERS:
                kind = "differs"
            counts[kind] += 1
            names_by_kind[kind].append(name)
        lines += ["", f"#### `torchrec{'.' + path if path else ''}`", ""]
        if names_by_kind["works"]:
            lines.append(f"Works: {', '.join(f'`{name}`' for name in names_by_kind['works'])}.")
        rows: dict[tuple[str, str], list[str]] = {}
        for kind, texts in (("differs", DIFFERS), ("raises", RAISES)):
            for name, emblib_name in entries:
                if name in names_by_kind[kind]:
                    rows.setdefault((kind, texts[emblib_name]), []).append(f"`{name}`")
        if rows:
            lines += [""] * bool(names_by_kind["works"])
            lines += ["| name | | how it differs, or what to use instead |", "| --- | --- | --- |"]
            lines += [f"| {', '.join(n)} | {kind} | {text} |" for (kind, text), n in rows.items()]
    total = sum(counts.values())
    summary = (
        f"Of {total} names in {len(MODULES)} modules, {counts['works']} work, {counts['differs']} "
        f"differ and {counts['raises']} raise. A name that several modules have counts in each."
    )
    return "\n".join([summary, *lines])


_SCOREBOARD_MARKS = ("<!-- scoreboard -->", "<!-- end of the scoreboard -->")


def with_scoreboard(text: str) -> str:
    """Return a page with the scoreboard between its marks; without marks, at the end."""
    before, _, rest = text.partition(_SCOREBOARD_MARKS[0])
    after = rest.partition(_SCOREBOARD_MARKS[1])[2]
    return f"{before}{_SCOREBOARD_MARKS[0]}\n\n{scoreboard()}\n\n{_SCOREBOARD_MARKS[1]}{after}"


if __name__ == "__main__":
    page_path = Path(sys.argv[1])
    page_path.write_text(with_scoreboard(page_path.read_text()))
