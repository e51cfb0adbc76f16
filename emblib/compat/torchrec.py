"""TorchRec over emblib's collections and sharding: the names of its tutorial, and of its users.

Change the import and keep the code:

    import emblib.compat.torchrec as torchrec
    from emblib.compat.torchrec import DistributedModelParallel, EmbeddingBagCollectionSharder

All names are in this one module, whatever module of TorchRec's they are from. `docs/torchrec.md`
says what maps to what and what differs: above all, results that TorchRec gets wrong without a word
are right here.
"""

from emblib.collections.optimizers import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    WarmupPolicy,
    WarmupStage,
    in_backward_optimizer_filter,
)
from emblib.compat.fbgemm_types import EmbOptimType
from emblib.compat.torchrec_comms import (
    CommOp,
    CommType,
    QCommsConfig,
    QuantizedCommCodecs,
    all_gather_base_pooled,
    alltoall_pooled,
    get_gradient_division,
    get_qcomm_codecs_registry,
    reduce_scatter_base_pooled,
    reduce_scatter_pooled,
    reduce_scatter_v_pooled,
    set_gradient_division,
    variable_batch_alltoall_pooled,
)
from emblib.compat.torchrec_model import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingCollection,
    EmbeddingCollectionSharder,
    get_default_sharders,
)
from emblib.compat.torchrec_optim import (
    LAMB,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
    WarmupOptimizer,
    apply_optimizer_in_backward,
)
from emblib.compat.torchrec_pipelines import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from emblib.compat.torchrec_planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from emblib.compat.torchrec_sharding import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
    apply_to_all,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from emblib.compat.torchrec_types import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
)
from emblib.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor, KTRegroupAsDict
from emblib.sharding import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from emblib.sharding.awaitable import Awaitable, LazyAwaitable, LazyNoWait, NoWait

__all__ = [
    "LAMB",
    "Awaitable",
    "CombinedOptimizer",
    "CommOp",
    "CommType",
    "DataType",
    "DefaultDataParallelWrapper",
    "DistributedModelParallel",
    "EmbOptimType",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingCollectionSharder",
    "EmbeddingComputeKernel",
    "EmbeddingConfig",
    "EmbeddingModuleShardingPlan",
    "EmbeddingShardingPlanner",
    "EnumerableShardingSpec",
    "GradientClipping",
    "GradientClippingOptimizer",
    "JaggedTensor",
    "KTRegroupAsDict",
    "KeyedJaggedTensor",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "KeyedTensor",
    "LarsSGD",
    "LazyAwaitable",
    "LazyNoWait",
    "NoWait",
    "ParameterConstraints",
    "ParameterSharding",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "PoolingType",
    "PrefetchTrainPipelineSparseDist",
    "QCommsConfig",
    "QuantizedCommCodecs",
    "RowWiseAdagrad",
    "ShardMetadata",
    "ShardedEmbeddingBagCollection",
    "ShardedEmbeddingCollection",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingType",
    "Topology",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "all_gather_base_pooled",
    "alltoall_pooled",
    "apply_optimizer_in_backward",
    "apply_to_all",
    "column_wise",
    "construct_module_sharding_plan",
    "data_parallel",
    "data_type_to_dtype",
    "get_default_sharders",
    "get_gradient_division",
    "get_qcomm_codecs_registry",
    "grid_shard",
    "in_backward_optimizer_filter",
    "reduce_scatter_base_pooled",
    "reduce_scatter_pooled",
    "reduce_scatter_v_pooled",
    "row_wise",
    "set_gradient_division",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
    "variable_batch_alltoall_pooled",
]
