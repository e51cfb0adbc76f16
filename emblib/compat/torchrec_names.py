"""TorchRec's modules and names, and what emblib has for each: one table for imports and docs.

`MODULES` maps each module of TorchRec to its names, of which `name=other` is the name `other` of
`emblib.compat.torchrec`. A name works as TorchRec's does unless `DIFFERS` says how it differs, or
`RAISES` says why it raises and what to use instead. `docs/torchrec.md` has the table as a
scoreboard; `tests/compat/test_torchrec_names.py` calls every name.
"""

import sys
from pathlib import Path

MODULES = {
    "": "DataType EmbeddingBagCollection EmbeddingBagCollectionInterface EmbeddingBagConfig "
    "EmbeddingCollection EmbeddingConfig JaggedTensor KeyedJaggedTensor KeyedTensor "
    "Multistreamable Pipelineable PoolingType",
    "types": "DataType CacheMixin CopyMixIn ModuleCopyMixin ModuleNoCopyMixin",
    "streamable": "Multistreamable Pipelineable",
    "sparse": "",
    "sparse.jagged_tensor": "ComputeJTDictToKJT ComputeKJTToJTDict JaggedTensor JaggedTensorMeta "
    "KeyedJaggedTensor KeyedTensor jt_is_equal kjt_is_equal permute_multi_embedding regroup_kts "
    "flatten_kjt_list unflatten_kjt_list",
    "sparse.jagged_tensor_validator": "validate_keyed_jagged_tensor",
    "sparse.tensor_dict": "maybe_td_to_kjt",
    "modules": "",
    "modules.embedding_configs": "BaseEmbeddingConfig DataType EmbeddingBagConfig EmbeddingConfig "
    "EmbeddingTableConfig PoolingType QuantConfig ShardingType data_type_to_dtype "
    "data_type_to_sparse_type dtype_to_data_type pooling_type_to_pooling_mode pooling_type_to_str "
    "CountBasedEvictionPolicy CountTimestampMixedEvictionPolicy FeatureL2NormBasedEvictionPolicy "
    "FeatureScoreBasedEvictionPolicy NoEvictionPolicy TimestampBasedEvictionPolicy "
    "VirtualTableEvictionPolicy",
    "modules.embedding_modules": "EmbeddingBagCollection EmbeddingBagCollectionInterface "
    "EmbeddingCollection EmbeddingCollectionInterface get_embedding_names_by_table "
    "process_pooled_embeddings reorder_inverse_indices",
    "modules.fused_embedding_modules": "FusedEmbeddingBagCollection FusedEmbeddingCollection "
    "fuse_embedding_optimizer EmbeddingFusedOptimizer convert_optimizer_type_and_kwargs",
    "modules.feature_processor": "BaseFeatureProcessor BaseGroupedFeatureProcessor "
    "PositionWeightedModule PositionWeightedProcessor",
    "modules.feature_processor_": "FeatureProcessor FeatureProcessorsCollection "
    "PositionWeightedModule=FeaturePositionWeightedModule PositionWeightedModuleCollection",
    "modules.fp_embedding_modules": "FeatureProcessedEmbeddingBagCollection",
    "modules.regroup": "KTRegroupAsDict",
    "modules.activation": "SwishLayerNorm",
    "modules.mlp": "MLP Perceptron",
    "modules.crossnet": "CrossNet LowRankCrossNet LowRankMixtureCrossNet VectorCrossNet",
    "modules.deepfm": "DeepFM FactorizationMachine",
    "modules.embedding_tower": "EmbeddingTower EmbeddingTowerCollection tower_input_params",
    "modules.lazy_extension": "LazyModuleExtensionMixin lazy_apply",
    "modules.mc_modules": "DistanceLFU_EvictionPolicy LFU_EvictionPolicy LRU_EvictionPolicy "
    "MCHEvictionPolicy MCHManagedCollisionModule ManagedCollisionCollection ManagedCollisionModule",
    "modules.mc_embedding_modules": "ManagedCollisionEmbeddingBagCollection "
    "ManagedCollisionEmbeddingCollection",
    "modules.hash_mc_modules": "HashZchManagedCollisionModule",
    "optim": "Adagrad Adam CombinedOptimizer FusedOptimizer FusedOptimizerModule GradientClipping "
    "GradientClippingOptimizer KeyedOptimizer KeyedOptimizerWrapper LAMB LarsSGD OptimizerWrapper "
    "PartialRowWiseAdam PartialRowWiseLAMB RowWiseAdagrad SGD SemisyncOptimizer WarmupOptimizer "
    "WarmupPolicy WarmupStage",
    "optim.apply_optimizer_in_backward": "apply_optimizer_in_backward",
    "optim.clipping": "GradientClipping GradientClippingOptimizer",
    "optim.fused": "EmptyFusedOptimizer FusedOptimizer FusedOptimizerModule",
    "optim.keyed": "CombinedOptimizer KeyedOptimizer KeyedOptimizerWrapper OptimizerWrapper",
    "optim.optimizers": "Adagrad Adam LAMB LarsSGD PartialRowWiseAdam PartialRowWiseLAMB SGD "
    "in_backward_optimizer_filter",
    "optim.rowwise_adagrad": "RowWiseAdagrad",
    "optim.semi_sync": "SemisyncOptimizer",
    "optim.warmup": "WarmupOptimizer WarmupPolicy WarmupStage",
    "datasets": "",
    "datasets.utils": "Batch",
    "quant": "EmbeddingBagCollection=QuantEmbeddingBagCollection",
    "quant.embedding_modules": "EmbeddingBagCollection=QuantEmbeddingBagCollection "
    "EmbeddingCollection=QuantEmbeddingCollection "
    "FeatureProcessedEmbeddingBagCollection=QuantFeatureProcessedEmbeddingBagCollection "
    "QuantManagedCollisionEmbeddingBagCollection QuantManagedCollisionEmbeddingCollection "
    "quantize_state_dict",
    "quant.utils": "meta_to_cpu_placement",
    "fx": "Tracer symbolic_trace",
    "fx.tracer": "Tracer is_fx_tracing symbolic_trace",
    "inference": "",
    "inference.modules": "BatchingMetadata PredictFactory PredictModule QualNameMetadata "
    "assign_weights_to_tbe get_table_to_weights_from_tbe quantize_dense quantize_embeddings "
    "quantize_feature quantize_inference_model set_pruning_data shard_quant_model "
    "trim_torch_package_prefix_from_typename",
    "inference.state_dict_transform": "state_dict_all_gather_keys state_dict_gather "
    "state_dict_to_device",
    "distributed": "Awaitable DataLoadingThread DistributedModelParallel EvalPipelineSparseDist "
    "ModuleSharder NoWait ParameterSharding PrefetchTrainPipelineSparseDist ShardedModule "
    "ShardedTensor ShardingEnv ShardingPlanner TrainPipeline TrainPipelineBase "
    "TrainPipelineSparseDist get_local_rank get_local_size get_unsharded_module_names "
    "sharded_model_copy",
    "distributed.collective_utils": "invoke_on_rank_and_broadcast_result is_leader run_on_leader",
    "distributed.comm": "get_group_rank get_local_rank get_local_size get_num_groups "
    "intra_and_cross_node_pg",
    "distributed.comm_ops": "All2AllDenseInfo All2AllPooledInfo All2AllSequenceInfo All2AllVInfo "
    "All2All_Pooled_Req All2All_Pooled_Wait All2All_Seq_Req All2All_Seq_Req_Wait All2Allv_Req "
    "All2Allv_Wait AllGatherBaseInfo AllGatherBase_Req AllGatherBase_Wait ReduceScatterBaseInfo "
    "ReduceScatterBase_Req ReduceScatterBase_Wait ReduceScatterInfo ReduceScatterVInfo "
    "ReduceScatterV_Req ReduceScatterV_Wait ReduceScatter_Req ReduceScatter_Wait Request "
    "VariableBatchAll2AllPooledInfo Variable_Batch_All2All_Pooled_Req "
    "Variable_Batch_All2All_Pooled_Wait all_gather_base_pooled alltoall_pooled alltoall_sequence "
    "alltoallv get_gradient_division reduce_scatter_base_pooled reduce_scatter_pooled "
    "reduce_scatter_v_pooled set_gradient_division variable_batch_alltoall_pooled",
    "distributed.dist_data": "EmbeddingsAllToOne EmbeddingsAllToOneReduce KJTAllToAll "
    "KJTAllToAllSplitsAwaitable KJTAllToAllTensorsAwaitable KJTOneToAll "
    "MergePooledEmbeddingsModule PooledEmbeddingsAllGather PooledEmbeddingsAllToAll "
    "PooledEmbeddingsAwaitable PooledEmbeddingsReduceScatter SeqEmbeddingsAllToOne "
    "SequenceEmbeddingsAllToAll SequenceEmbeddingsAwaitable SplitsAllToAllAwaitable "
    "VariableBatchPooledEmbeddingsAllToAll VariableBatchPooledEmbeddingsReduceScatter",
    "distributed.embedding": "EmbeddingCollectionAwaitable EmbeddingCollectionContext "
    "EmbeddingCollectionSharder ShardedEmbeddingCollection create_embedding_sharding "
    "create_sharding_infos_by_sharding get_ec_index_dedup set_ec_index_dedup",
    "distributed.embedding_lookup": "CommOpGradientScaling GroupedEmbeddingsLookup "
    "GroupedPooledEmbeddingsLookup InferGroupedEmbeddingsLookup InferGroupedLookupMixin "
    "InferGroupedPooledEmbeddingsLookup MetaInferGroupedEmbeddingsLookup "
    "MetaInferGroupedPooledEmbeddingsLookup embeddings_cat_empty_rank_handle "
    "fx_wrap_tensor_view2d",
    "distributed.embedding_sharding": "BaseEmbeddingDist BaseSparseFeaturesDist EmbeddingSharding "
    "EmbeddingShardingContext EmbeddingShardingInfo FusedKJTListSplitsAwaitable KJTListAwaitable "
    "KJTListSplitsAwaitable KJTSplitsAllToAllMeta ListOfKJTListAwaitable "
    "ListOfKJTListSplitsAwaitable bucketize_kjt_before_all2all group_tables",
    "distributed.embedding_types": "BaseEmbeddingLookup BaseEmbeddingSharder "
    "BaseGroupedFeatureProcessor BaseQuantEmbeddingSharder EmbeddingAttributes "
    "EmbeddingComputeKernel FeatureShardingMixIn GroupedEmbeddingConfig KJTList ListOfKJTList "
    "ModuleShardingMixIn OptimType ShardedConfig ShardedEmbeddingModule ShardedEmbeddingTable "
    "ShardedMetaConfig compute_kernel_to_embedding_location",
    "distributed.embeddingbag": "EmbeddingAwaitable EmbeddingBagCollectionAwaitable "
    "EmbeddingBagCollectionContext EmbeddingBagCollectionSharder EmbeddingBagSharder "
    "ShardedEmbeddingBag ShardedEmbeddingBagCollection "
    "VariableBatchEmbeddingBagCollectionAwaitable construct_output_kt "
    "create_embedding_bag_sharding create_sharding_infos_by_sharding "
    "replace_placement_with_meta_device",
    "distributed.fbgemm_qcomm_codec": "CommType QCommsConfig comm_type_to_sparse_type "
    "get_qcomm_codecs get_qcomm_codecs_registry",
    "distributed.fused_embeddingbag": "FusedEmbeddingBagCollectionSharder",
    "distributed.global_settings": "get_propogate_device set_propogate_device",
    "distributed.grouped_position_weighted": "GroupedPositionWeightedModule",
    "distributed.model_parallel": "DMPCollection DataParallelWrapper DefaultDataParallelWrapper "
    "DistributedModelParallel ShardedModule get_default_sharders get_module get_unwrapped_module",
    "distributed.planner": "EmbeddingPlannerBase EmbeddingShardingPlanner ParameterConstraints "
    "Topology bytes_to_gb sharder_name",
    "distributed.planner.enumerators": "EmbeddingComputeKernel EmbeddingEnumerator EmbeddingTower "
    "EmbeddingTowerCollection ParameterConstraints ShardEstimator sharder_name",
    "distributed.planner.partitioners": "GreedyPerfPartitioner MemoryBalancedPartitioner",
    "distributed.planner.perf_models": "NoopPerfModel NoopStorageModel",
    "distributed.planner.planners": "EmbeddingPlannerBase EmbeddingShardingPlanner",
    "distributed.planner.proposers": "DynamicProgrammingProposer EmbeddingOffloadScaleupProposer "
    "GreedyProposer GridSearchProposer UniformProposer",
    "distributed.planner.shard_estimators": "EmbeddingPerfEstimator EmbeddingStorageEstimator",
    "distributed.planner.stats": "EmbeddingStats NoopEmbeddingStats",
    "distributed.planner.storage_reservations": "FixedAbsoluteStorageReservation "
    "FixedPercentageStorageReservation HeuristicalStorageReservation "
    "InferenceStorageReservation",
    "distributed.planner.types": "Enumerator ParameterConstraints Partitioner PerfModel "
    "PlannerError Proposer ShardEstimator ShardingOption ShardingPlan Stats StorageReservation "
    "Topology",
    "distributed.quant_embedding": "QuantEmbeddingCollectionSharder "
    "ShardedQuantEmbeddingCollection",
    "distributed.quant_embeddingbag": "QuantEmbeddingBagCollectionSharder "
    "ShardedQuantEmbeddingBagCollection create_infer_embedding_bag_sharding "
    "flatten_feature_lengths",
    "distributed.shard": "shard shard_modules _shard_modules",
    "distributed.sharding_plan": "apply_to_all column_wise construct_module_sharding_plan "
    "data_parallel get_default_sharders get_module_to_default_sharders grid_shard placement "
    "row_wise table_column_wise table_row_wise table_wise",
    "distributed.train_pipeline": "ArgInfo DataLoadingThread EvalPipelineSparseDist "
    "PrefetchTrainPipelineSparseDist StagedTrainPipeline Tracer=PipelineTracer TrainPipeline "
    "TrainPipelineBase TrainPipelineContext TrainPipelineFusedSparseDist TrainPipelinePT2 "
    "TrainPipelineSparseDist",
    "distributed.train_pipeline.train_pipelines": "EvalPipelineSparseDist "
    "PrefetchTrainPipelineSparseDist StagedTrainPipeline TrainPipeline TrainPipelineBase "
    "TrainPipelineFusedSparseDist TrainPipelinePT2 TrainPipelineSemiSync "
    "TrainPipelineSparseDist TrainPipelineSparseDistLite",
    "distributed.train_pipeline.utils": "DataLoadingThread Tracer=PipelineTracer",
    "distributed.train_pipeline.runtime_forwards": "BaseForward KJTAllToAllForward "
    "PipelinedForward PrefetchPipelinedForward",
    "distributed.types": "Awaitable BoundsCheckMode CacheAlgorithm CacheParams CommOp "
    "ComputeKernel DMPCollectionConfig DataType DeviceToHostTensorAwaitable "
    "EmbeddingModuleShardingPlan EnumerableShardingSpec GenericMeta GetItemLazyAwaitable "
    "KeyValueParams LazyAwaitable LazyNoWait ModuleSharder ModuleShardingPlan "
    "NoOpQuantizedCommCodec NoWait NullShardedModuleContext NullShardingContext "
    "ParameterSharding ParameterStorage QuantizedCommCodec QuantizedCommCodecs ShardMetadata "
    "ShardedModule ShardedTensor ShardingEnv ShardingEnv2D ShardingPlan ShardingPlanner "
    "ShardingType get_tensor_size_bytes rank_device",
    "distributed.utils": "CopyableMixin add_prefix_to_state_dict append_prefix copy_to_device "
    "filter_state_dict get_unsharded_module_names init_parameters merge_fused_params "
    "sharded_model_copy",
}

DIFFERS = {
    "EmbeddingBagCollection": "`optimizer=` updates rows in backward; MEAN and weights are defined "
    "the same way sharded and not; the output keeps the order of the configurations",
    "EmbeddingCollection": "tables may differ in their dims; `optimizer=` as above",
    "EmbeddingBagCollectionInterface": "a virtual base: emblib's collections are instances",
    "EmbeddingCollectionInterface": "a virtual base: emblib's collections are instances",
    "EmbeddingBagConfig": "`data_type` becomes a torch dtype that equals it; `storage`, "
    "`optimizer` and `rounding` are additional; `need_pos` and pruning raise",
    "EmbeddingConfig": "as `EmbeddingBagConfig`",
    "BaseEmbeddingConfig": "a record; `EmbeddingBagConfig`, `EmbeddingConfig` are instances of it",
    "EmbeddingTableConfig": "as `BaseEmbeddingConfig`",
    "DataType": "rows have FP32, FP16, BF16, INT8 or INT4; equal to the dtype of a configuration",
    "KeyedJaggedTensor": "validates sizes; `length_per_key` and `inverse_indices` are keywords, "
    "other cached fields (`jt_dict`, `index_per_key`, ...) are not taken; nothing cached is stale",
    "JaggedTensor": "validates sizes",
    "KeyedTensor": "`offset_per_key` and `index_per_key` are computed, not taken",
    "PoolingType": "emblib's `Pooling`; `.value` is lower case",
    "maybe_td_to_kjt": "takes any mapping of `torch.nested` tensors",
    "FusedEmbeddingBagCollection": "`location` raises: `storage=` of each configuration",
    "FusedEmbeddingCollection": "`location` raises: `storage=` of each configuration",
    "fuse_embedding_optimizer": "in place; `location` raises",
    "BaseFeatureProcessor": "`nn.Module`: any module is a feature processor",
    "BaseGroupedFeatureProcessor": "`nn.Module`",
    "FeatureProcessor": "`nn.Module`",
    "FeatureProcessorsCollection": "`nn.Module`",
    "GroupedPositionWeightedModule": "positions are counted; weights of the batch are multiplied, "
    "not read as positions",
    "PositionWeightedProcessor": "as `GroupedPositionWeightedModule`",
    "PositionWeightedModuleCollection": "as `GroupedPositionWeightedModule`",
    "FeaturePositionWeightedModule": "no `pre_process_input`: positions are not sent",
    "KeyedOptimizer": "virtual: all keyed optimizers of emblib are instances",
    "FusedOptimizer": "emblib's: `sharded.fused_optimizer` is one, with learning rates and states",
    "FusedOptimizerModule": "virtual: every module with a `fused_optimizer`",
    "KeyedOptimizerWrapper": "no `pass_params_dict`",
    "CombinedOptimizer": "one `param_groups` list, made at construction",
    "GradientClippingOptimizer": "the norm is always that of the model over all ranks",
    "WarmupOptimizer": "`param_name` is fixed",
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
    "shard_quant_model": "whole tables on devices, rows are kept; works on CPUs without a flag",
    "get_table_to_weights_from_tbe": "rows, and their scales and offsets in float16, as bytes",
    "assign_weights_to_tbe": "not needed after `shard_quant_model`",
    "ShardedQuantEmbeddingBagCollection": "whole tables on devices; over processes by rows as well",
    "ShardedQuantEmbeddingCollection": "as above",
    "QuantEmbeddingBagCollectionSharder": "as above; `fused_params` raises",
    "QuantEmbeddingCollectionSharder": "as above; `fused_params` raises",
    "state_dict_gather": "all ranks get the whole tensors",
    "intra_and_cross_node_pg": "makes new groups at each call; `backend` raises",
    "get_local_size": "LOCAL_WORLD_SIZE, else all ranks (there: 8)",
    "get_local_rank": "from the rank: nodes have consecutive ranks",
    "reduce_scatter_pooled": "sums are float32 in rank order, any sizes",
    "reduce_scatter_base_pooled": "sums are float32 in rank order",
    "reduce_scatter_v_pooled": "sums are float32 in rank order",
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
    "ShardedEmbeddingCollection": "as above; one entry per class of dims; `use_index_dedup` acts "
    "on every sharding type",
    "EmbeddingBagCollectionSharder": "every sharding type on every device; options of FBGEMM's "
    "tables in `fused_params` raise",
    "EmbeddingCollectionSharder": "as above",
    "FusedEmbeddingBagCollectionSharder": "as above",
    "BaseEmbeddingSharder": "`ModuleSharder`",
    "ModuleSharder": "the base of emblib's sharders; `module_type` is a class attribute",
    "BaseQuantEmbeddingSharder": "the base of the quantised sharders",
    "ShardedModule": "a virtual base: sharded collections are instances",
    "ShardedEmbeddingModule": "a virtual base: sharded collections are instances",
    "EmbeddingComputeKernel": "DENSE, FUSED, FUSED_UVM, FUSED_UVM_CACHING, QUANT",
    "OptimType": "those that tables run",
    "DataParallelWrapper": "`wrap(module, ranks, ignored)` returns the wrapped module",
    "DefaultDataParallelWrapper": "`static_graph` is False by default",
    "DistributedModelParallel": "keeps weights; all sharders agree on optimizer and codecs; "
    "`model_tracker_configs` raises; no `reshard`",
    "EmbeddingShardingPlanner": "one measured search; enumerator, proposer, partitioner, "
    "performance_model, stats and timeout raise; callbacks get and return a `ShardingPlan`; "
    "`debug` has no effect",
    "EmbeddingPlannerBase": "emblib's planner itself",
    "ShardingPlanner": "emblib's planner itself",
    "Topology": "actual memory; bandwidths are measured, not arguments",
    "ParameterConstraints": "options of FBGEMM's tables raise and say where they are",
    "PlannerError": "emblib's `PlanError`",
    "StorageReservation": "over emblib's `Reservation`",
    "HeuristicalStorageReservation": "no term for batches: the planner counts them",
    "InferenceStorageReservation": "as `HeuristicalStorageReservation`",
    "ParameterSharding": "options of FBGEMM's tables raise and say where they are",
    "CacheParams": "`algorithm` and `load_factor`; others raise",
    "EmbeddingModuleShardingPlan": "a dict with emblib's checks",
    "EnumerableShardingSpec": "shards only",
    "ShardMetadata": "`placement` is text, `rank:1/cpu`; torch's is taken, too",
    "ShardingEnv": "`output_dtensor` raises",
    "QuantizedCommCodec": "emblib's `Codec`: encodes all splits of a message at once",
    "NoOpQuantizedCommCodec": "emblib's `FP32()`",
    "get_qcomm_codecs_registry": "codecs of emblib; sums are float32 with all of them",
    "get_qcomm_codecs": "codecs of emblib",
    "QCommsConfig": "no MX4",
    "CommType": "no MX4",
    "TrainPipeline": "emblib's `TrainPipelineBase`",
    "TrainPipelineBase": "drains loaders of different lengths",
    "TrainPipelineSparseDist": "the model is not traced or rewritten; `apply_jit`, "
    "`context_type` and early freeing raise",
    "PrefetchTrainPipelineSparseDist": "as above",
    "EvalPipelineSparseDist": "the model must be in eval mode",
    "shard": "`plan` may mix rules and `ParameterSharding`",
    "shard_modules": "`_shard_modules` is the same function",
    "set_propogate_device": "no effect is needed: inference on CPUs works; the value is stored",
    "get_propogate_device": "as `set_propogate_device`",
    "GenericMeta": "`type`",
    "copy_to_device": "models with sharded collections raise: `DistributedModelParallel.copy`",
    "init_parameters": "modules need `reset_parameters`",
    "CopyableMixin": "as `ModuleCopyMixin`",
}

_BY_REASON = (
    (
        "emblib has no towers: put a collection and its interaction into one module; the planner "
        "places the tables of a module together only with constraints",
        "EmbeddingTower EmbeddingTowerCollection tower_input_params",
    ),
    (
        "dense modules of torch.nn run over emblib's collections, torch's lazy ones as well; for a "
        "low-rank cross network there is LowRankCrossNet",
        "LowRankMixtureCrossNet LazyModuleExtensionMixin lazy_apply",
    ),
    (
        "tables of storage=Hash() take any 64-bit ids, with eviction and admission, in the same "
        "collections: docs/dynamic.md",
        "DistanceLFU_EvictionPolicy LFU_EvictionPolicy LRU_EvictionPolicy MCHEvictionPolicy "
        "MCHManagedCollisionModule ManagedCollisionCollection ManagedCollisionModule "
        "ManagedCollisionEmbeddingBagCollection ManagedCollisionEmbeddingCollection "
        "HashZchManagedCollisionModule QuantManagedCollisionEmbeddingBagCollection "
        "QuantManagedCollisionEmbeddingCollection CountBasedEvictionPolicy "
        "CountTimestampMixedEvictionPolicy FeatureL2NormBasedEvictionPolicy "
        "FeatureScoreBasedEvictionPolicy NoEvictionPolicy TimestampBasedEvictionPolicy "
        "VirtualTableEvictionPolicy",
    ),
    (
        "a jagged tensor of emblib is an ordinary class, and torch.fx.wrap makes functions of it "
        "leaves",
        "JaggedTensorMeta",
    ),
    (
        "torch.utils._pytree.tree_flatten takes lists of batches",
        "flatten_kjt_list unflatten_kjt_list",
    ),
    (
        "the optimizer of a table is `optimizer=` of its configuration or collection, and "
        "FusedOptimizer.of(model) stands for all",
        "EmbeddingFusedOptimizer convert_optimizer_type_and_kwargs",
    ),
    (
        "emblib has no semi-synchronous training: every step is exact",
        "SemisyncOptimizer TrainPipelineSemiSync",
    ),
    (
        "weight the batch with the feature processor and pass it to the quantised collection",
        "QuantFeatureProcessedEmbeddingBagCollection",
    ),
    (
        "QuantEmbeddingBagCollection.load_state_dict takes the packed rows",
        "quantize_state_dict",
    ),
    ("collections on meta are made with device='meta'", "meta_to_cpu_placement"),
    (
        "convert dense modules with .half() or torch.ao, and cast the output of lookups with "
        "output_dtype",
        "quantize_dense quantize_feature",
    ),
    ("prune tables before they are quantised", "set_pruning_data"),
    (
        "state dicts have ShardedTable, which torch.distributed.checkpoint saves and loads into "
        "any plan: docs/checkpoints.md",
        "ShardedTensor state_dict_to_device",
    ),
    (
        "DistributedModelParallel.copy(device) copies the dense part and shares the tables",
        "sharded_model_copy",
    ),
    (
        "pipelines copy batches in their own streams: TrainPipelineBase",
        "DataLoadingThread",
    ),
    (
        "one all-to-all with autograd serves all collectives: emblib.sharding.collectives",
        "All2AllDenseInfo All2AllPooledInfo All2AllSequenceInfo All2AllVInfo All2All_Pooled_Req "
        "All2All_Pooled_Wait All2All_Seq_Req All2All_Seq_Req_Wait All2Allv_Req All2Allv_Wait "
        "AllGatherBaseInfo AllGatherBase_Req AllGatherBase_Wait ReduceScatterBaseInfo "
        "ReduceScatterBase_Req ReduceScatterBase_Wait ReduceScatterInfo ReduceScatterVInfo "
        "ReduceScatterV_Req ReduceScatterV_Wait ReduceScatter_Req ReduceScatter_Wait Request "
        "VariableBatchAll2AllPooledInfo Variable_Batch_All2All_Pooled_Req "
        "Variable_Batch_All2All_Pooled_Wait",
    ),
    ("TorchRec 1.8 has none either: emblib.sharding.collectives.alltoallv", "alltoallv"),
    (
        "input_dist of a sharded collection returns emblib's awaitables: two waits give what "
        "compute takes",
        "KJTAllToAllSplitsAwaitable KJTAllToAllTensorsAwaitable SplitsAllToAllAwaitable "
        "FusedKJTListSplitsAwaitable KJTListAwaitable KJTListSplitsAwaitable KJTSplitsAllToAllMeta "
        "ListOfKJTListAwaitable ListOfKJTListSplitsAwaitable",
    ),
    (
        "reduce_scatter_v_pooled takes any sizes; sharded collections take batches with "
        "stride_per_key_per_rank",
        "VariableBatchPooledEmbeddingsReduceScatter",
    ),
    (
        "a sharded collection returns a LazyAwaitable, whose wait() gives the result",
        "EmbeddingCollectionAwaitable EmbeddingAwaitable EmbeddingBagCollectionAwaitable "
        "VariableBatchEmbeddingBagCollectionAwaitable DeviceToHostTensorAwaitable "
        "GetItemLazyAwaitable",
    ),
    (
        "placement is data in emblib: emblib.sharding.layout says which shard reads which feature",
        "create_embedding_sharding create_sharding_infos_by_sharding "
        "create_embedding_bag_sharding create_infer_embedding_bag_sharding "
        "replace_placement_with_meta_device BaseEmbeddingDist BaseSparseFeaturesDist "
        "EmbeddingSharding EmbeddingShardingContext EmbeddingShardingInfo "
        "bucketize_kjt_before_all2all group_tables EmbeddingAttributes FeatureShardingMixIn "
        "GroupedEmbeddingConfig ModuleShardingMixIn ShardedConfig ShardedEmbeddingTable "
        "ShardedMetaConfig",
    ),
    (
        "the tables of a rank are emblib.collections.TableGroups, `groups` of a sharded collection",
        "BaseEmbeddingLookup GroupedEmbeddingsLookup GroupedPooledEmbeddingsLookup "
        "InferGroupedEmbeddingsLookup InferGroupedLookupMixin InferGroupedPooledEmbeddingsLookup "
        "MetaInferGroupedEmbeddingsLookup MetaInferGroupedPooledEmbeddingsLookup",
    ),
    (
        "put the table of an nn.EmbeddingBag into an EmbeddingBagCollection",
        "EmbeddingBagSharder ShardedEmbeddingBag",
    ),
    ("pass dtypes to emblib, which has no SparseType of messages", "comm_type_to_sparse_type"),
    (
        "emblib.sharding.ReplicatedModelParallel has replicas of sharded groups: it takes a "
        "DeviceMesh [replicas, shards], and sync() averages the tables",
        "DMPCollection DMPCollectionConfig ShardingEnv2D",
    ),
    (
        "emblib's planner has one search over a measured cost model "
        "(emblib.sharding.planner.Planner); constraints and callbacks change its plans",
        "EmbeddingEnumerator GreedyPerfPartitioner MemoryBalancedPartitioner NoopPerfModel "
        "NoopStorageModel DynamicProgrammingProposer EmbeddingOffloadScaleupProposer "
        "GreedyProposer GridSearchProposer UniformProposer EmbeddingPerfEstimator "
        "EmbeddingStorageEstimator Enumerator Partitioner PerfModel Proposer ShardEstimator "
        "ShardingOption",
    ),
    ("print(plan) shows the report of emblib's planner", "EmbeddingStats NoopEmbeddingStats Stats"),
    (
        "the pipelines of emblib neither trace nor rewrite the model: TrainPipelineSparseDist, or "
        "input_dist and compute_and_output_dist by hand",
        "ArgInfo PipelineTracer TrainPipelineContext BaseForward KJTAllToAllForward "
        "PipelinedForward PrefetchPipelinedForward StagedTrainPipeline "
        "TrainPipelineFusedSparseDist TrainPipelinePT2 TrainPipelineSparseDistLite",
    ),
    (
        "rows on a disk or behind other tiers are a storage of the table: docs/tiers.md",
        "KeyValueParams",
    ),
)
RAISES = {name: reason for reason, names in _BY_REASON for name in names.split()}
"""Why a name raises where it is used, and what to use instead."""


def page() -> str:
    """Return the scoreboard of `docs/torchrec.md`."""
    lines, counts = [], dict.fromkeys(("works", "differs", "raises"), 0)
    for path, text in MODULES.items():
        pairs = [(n, o or n) for n, _, o in (entry.partition("=") for entry in text.split())]
        if not pairs:
            continue
        found: dict[str, list[str]] = {"works": [], "differs": [], "raises": []}
        for name, other in pairs:
            kind = "raises" if other in RAISES else "differs" if other in DIFFERS else "works"
            counts[kind] += 1
            found[kind].append(name)
        lines += ["", f"#### `torchrec{'.' + path if path else ''}`", ""]
        if found["works"]:
            lines.append(f"Works: {', '.join(f'`{name}`' for name in found['works'])}.")
        rows: dict[tuple[str, str], list[str]] = {}
        for kind, texts in (("differs", DIFFERS), ("raises", RAISES)):
            for name, other in pairs:
                if name in found[kind]:
                    rows.setdefault((kind, texts[other]), []).append(f"`{name}`")
        if rows:
            lines += [""] * bool(found["works"])
            lines += ["| name | | how it differs, or what to use instead |", "| --- | --- | --- |"]
            lines += [f"| {', '.join(n)} | {kind} | {text} |" for (kind, text), n in rows.items()]
    total = sum(counts.values())
    summary = (
        f"Of {total} names in {len(MODULES)} modules, {counts['works']} work, {counts['differs']} "
        f"differ and {counts['raises']} raise. A name that several modules have counts in each."
    )
    return "\n".join([summary, *lines])


MARKS = ("<!-- scoreboard -->", "<!-- end of the scoreboard -->")


def with_scoreboard(text: str) -> str:
    """Return a page with the scoreboard between its marks."""
    before, _, rest = text.partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    return f"{before}{MARKS[0]}\n\n{page()}\n\n{MARKS[1]}{after}"


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.write_text(with_scoreboard(place.read_text()))
