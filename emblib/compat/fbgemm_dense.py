"""FBGEMM's dense module: table batched lookups whose weights get a gradient like any parameter."""

import itertools
import logging
import uuid

import torch
from torch import Tensor, nn

from emblib import Pooling, Precision, TableBatchedEmbeddingBags, TableSpec, optim
from emblib.compat.fbgemm_arguments import float_dtype
from emblib.compat.fbgemm_types import PoolingMode, SparseType, as_member

_logger = logging.getLogger(__name__)


class DenseTableBatchedEmbeddingBagsCodegen(nn.Module):
    """Table batched embeddings with a dense gradient, as FBGEMM's class of this name.

    `weights` is one flat parameter for any optimizer of `torch.optim`; it starts normal.
    """

    def __init__(
        self,
        embedding_specs: list[tuple[int, int]],
        feature_table_map: list[int] | None = None,
        weights_precision: SparseType = SparseType.FP32,
        pooling_mode: PoolingMode = PoolingMode.SUM,
        use_cpu: bool = False,
        output_dtype: SparseType = SparseType.FP32,
        use_mtia: bool = False,
    ) -> None:
        super().__init__()
        if use_mtia:
            raise NotImplementedError("MTIA is an accelerator emblib has no kernels for")
        if not use_cpu and not torch.cuda.is_available():
            raise RuntimeError("this module is for a GPU, and torch sees none; pass use_cpu=True")
        self.embedding_specs = list(embedding_specs)
        self.pooling_mode = as_member(PoolingMode, pooling_mode)
        self.weights_precision = as_member(SparseType, weights_precision)
        output = as_member(SparseType, output_dtype)
        self.output_dtype: int = output.as_int()
        self.use_cpu = use_cpu
        self.uuid = str(uuid.uuid4())
        self.bags = TableBatchedEmbeddingBags(
            [TableSpec(rows, dim) for rows, dim in embedding_specs],
            optim.External(gradient=optim.Gradient.DENSE),
            pooling=Pooling(self.pooling_mode.name.lower()),
            feature_tables=feature_table_map,
            precision=Precision(
                weights=float_dtype("weights_precision", self.weights_precision),
                output=float_dtype("output_dtype", output),
            ),
            device="cpu" if use_cpu else "cuda",
        )
        self.bags.weights = nn.Parameter(self.bags.weights.detach().view(-1))
        self.current_device = self.bags.weights.device
        dims = [self.embedding_specs[t][1] for t in self.bags.feature_tables]
        self.total_D = sum(dims)
        self.max_D = max(dims)
        offsets = torch.tensor([0, *itertools.accumulate(dims)], dtype=torch.int32)
        self.register_buffer("D_offsets", offsets.to(self.current_device), persistent=False)
        with torch.no_grad():
            self.weights.normal_()

    @property
    def weights(self) -> nn.Parameter:
        """All tables, one after the other."""
        return self.bags.weights

    def log(self, msg: str) -> None:
        """Log at level INFO with the module's id."""
        _logger.info("[TBE=%s] %s", self.uuid, msg)

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
    ) -> Tensor:
        """Look up and pool, see `emblib.TableBatchedEmbeddingBags.forward`."""
        return self.bags(
            indices,
            offsets,
            None if per_sample_weights is None else per_sample_weights.float(),
            batch_sizes=batch_size_per_feature_per_rank,
            feature_requires_grad=feature_requires_grad,
        )

    def split_embedding_weights(self) -> list[Tensor]:
        """The tables as views `[rows, dim]`."""
        return self.bags.table_weights()

    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Draw all weights, with torch's generator."""
        with torch.no_grad():
            for weights in self.split_embedding_weights():
                weights.uniform_(min_val, max_val)
