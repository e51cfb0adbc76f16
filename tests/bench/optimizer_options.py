"""Optimizers and options that `optimizer_steps` measures, and the three libraries that run them.

FBGEMM's CPU build has SGD, Adagrad, row-wise Adagrad with counters, and dense gradients; the rest
stands here with `fbgemm=None` and is compared with our SGD alone.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from emblib import Precision, StochasticRounding, TableBatchedEmbeddingBags, TableSpec, ops, optim
from experiments.contenders.base import fill_
from tests.bench.cpu_peers import CASES, LR, Case

Arguments = dict[str, Any]
Peer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class Inputs(Enum):
    """What is looked up: a table a feature; with a weight a lookup; two features a table."""

    PLAIN = "plain"
    WEIGHTED = "weighted"
    SHARED = "shared"


@dataclass(frozen=True)
class Option:
    """One line of the report: an optimizer with its options, in each library that has it."""

    name: str
    optimizer: optim.Optimizer
    fbgemm: Arguments | None = None  # of its constructor; enums by name
    torch: Peer | None = None
    precision: Precision = Precision()  # noqa: RUF009 frozen
    inputs: Inputs = Inputs.PLAIN


HALF = Precision(weights=torch.float16, output=torch.float16)
ROUNDED = replace(HALF, stochastic_rounding=StochasticRounding(seed=1))
SGD = {"optimizer": "EXACT_SGD"}
ROWWISE = {"optimizer": "EXACT_ROWWISE_ADAGRAD"}
COUNTER = ROWWISE | {"weight_decay": 1e-4, "weight_decay_mode": "COUNTER"}
COWCLIP = ROWWISE | {"weight_decay": 1e-4, "weight_decay_mode": "COWCLIP"}
CLIPPED = {"gradient_clipping": True, "max_gradient": 1.0}


def torch_sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def torch_adagrad(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=LR)


def torch_sparse_adam(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SparseAdam(parameters, lr=LR)


def _options() -> list[Option]:
    sgd, rowwise = optim.SGD(LR), optim.RowwiseAdagrad(LR)
    decayed = optim.Decoupled(1e-4)
    return [
        Option("SGD", sgd, SGD, torch_sgd),
        Option("SGD, weighted", sgd, SGD, torch_sgd, inputs=Inputs.WEIGHTED),
        Option("SGD, shared tables", sgd, SGD, inputs=Inputs.SHARED),
        Option("SGD, clipped", optim.SGD(LR, max_gradient=1.0), SGD | CLIPPED),
        Option("Adagrad", optim.Adagrad(LR), {"optimizer": "EXACT_ADAGRAD"}, torch_adagrad),
        Option("rowwise Adagrad", rowwise, ROWWISE),
        Option("rowwise Adagrad, weighted", rowwise, ROWWISE, inputs=Inputs.WEIGHTED),
        Option("rowwise Adagrad, shared tables", rowwise, ROWWISE, inputs=Inputs.SHARED),
        Option(
            "rowwise Adagrad, clipped",
            optim.RowwiseAdagrad(LR, max_gradient=1.0),
            ROWWISE | CLIPPED,
        ),
        Option(
            "rowwise Adagrad, counter",
            optim.RowwiseAdagrad(LR, counter=optim.Counter(), weight_decay=optim.L2(1e-4)),
            COUNTER,
        ),
        Option(
            "rowwise Adagrad, CowClip",
            optim.RowwiseAdagrad(
                LR,
                counter=optim.CowClip(coefficient=0.5, lower_bound=0.1),
                weight_decay=optim.L2(1e-4),
            ),
            COWCLIP,
        ),
        Option("SGD, fp16", sgd, SGD, torch_sgd, HALF),
        Option("rowwise Adagrad, fp16", rowwise, ROWWISE, precision=HALF),
        Option("dense gradient", optim.External(gradient=optim.Gradient.DENSE), {"dense": True}),
        Option("sparse gradient", optim.External(), torch=lambda parameters: Nothing(parameters)),
        Option("Adam", optim.Adam(LR), torch=torch_sparse_adam),
        Option("SGD, L2", optim.SGD(LR, weight_decay=optim.L2(1e-4))),
        Option("SGD, fp16 rounded at random", sgd, precision=ROUNDED),
        Option("rowwise Adagrad, decoupled decay", optim.RowwiseAdagrad(LR, weight_decay=decayed)),
        Option("rowwise Adagrad, max norm", optim.RowwiseAdagrad(LR, max_norm=1.0)),
        Option(
            "rowwise Adagrad, global decay",
            optim.RowwiseAdagrad(LR, global_decay=optim.GlobalDecay(1e-4)),
        ),
        Option("partial rowwise Adam", optim.PartialRowwiseAdam(LR)),
        Option("LAMB", optim.LAMB(LR)),
        Option("partial rowwise LAMB", optim.PartialRowwiseLAMB(LR)),
        Option("LARS", optim.LARS(LR)),
        Option("ensemble rowwise Adagrad", optim.EnsembleRowwiseAdagrad(LR)),
    ]


class Nothing(torch.optim.Optimizer):
    """Leaves the gradient as it is."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        """No update."""


OPTIONS = {option.name: option for option in _options()}


@dataclass(frozen=True)
class Work:
    """A case with the inputs of an option: features, their tables, and bags."""

    case_name: str
    option: Option

    @property
    def case(self) -> Case:
        return CASES[self.case_name]

    @property
    def tables(self) -> int:
        shared = self.option.inputs is Inputs.SHARED
        return max(1, self.case.tables // 2) if shared else self.case.tables

    @property
    def features(self) -> int:
        return 2 * self.tables if self.option.inputs is Inputs.SHARED else self.tables

    @property
    def batch(self) -> int:
        """The bags of a feature; as many lookups in all whatever the inputs are."""
        return self.case.batch * self.case.tables // self.features

    @property
    def feature_tables(self) -> list[int]:
        return [feature * self.tables // self.features for feature in range(self.features)]

    @property
    def nbytes(self) -> int:
        """Of the weights."""
        return self.tables * self.case.rows * self.case.dim * self.option.precision.weights.itemsize

    def offsets(self) -> Tensor:
        return torch.arange(self.features * self.batch + 1) * self.case.pooling

    def gradient(self) -> Tensor:
        shape = (self.batch, self.features * self.case.dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(
            self.option.precision.output
        )

    def weights(self) -> Tensor | None:
        """A weight a lookup, whose gradient is wanted too; None for the other inputs."""
        if self.option.inputs is not Inputs.WEIGHTED:
            return None
        lookups = self.features * self.batch * self.case.pooling
        return torch.rand(lookups, generator=torch.Generator().manual_seed(2)).requires_grad_()


class Buffers:
    """Memory of weights and states, written once and lent to one contender after the other.

    New memory for every module would cost more time than all the steps.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[str, torch.dtype], Tensor] = {}
        self.blocks: list[Tensor] = []  # of our modules, in the order in which one asks for them

    @contextmanager
    def for_ours(self) -> Iterator[None]:
        """While a module of ours is made: its tables are made in the blocks of the one before."""
        allocate, given = ops.empty_table, itertools.count()

        def lend(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
            number, elements = next(given), math.prod(shape)
            if number == len(self.blocks):
                self.blocks.append(torch.empty(0, dtype=torch.uint8))
            if self.blocks[number].numel() < elements * dtype.itemsize:
                self.blocks[number] = allocate((elements * dtype.itemsize,), torch.uint8, device)
            return self.blocks[number].view(dtype)[:elements].view(shape)

        ops.empty_table = lend
        try:
            yield
        finally:
            ops.empty_table = allocate

    def keep(self, work: Work) -> None:
        """Free what the peers of this option do not need."""
        wanted = {(who, work.option.precision.weights) for who in peers_of(work.option)}
        self.kept = {key: tensor for key, tensor in self.kept.items() if key in wanted}

    def lend(self, who: str, work: Work) -> Tensor:
        """The weights of all tables of the case, flat; a work with fewer tables takes a part."""
        key = (who, work.option.precision.weights)
        if key not in self.kept:
            elements = work.case.tables * work.case.rows * work.case.dim
            self.kept[key] = fill_(torch.empty(elements, dtype=key[1]), 0)
        return self.kept[key]


class Emblib:
    """Our module; its memory is what it allocates itself, in huge pages."""

    def __init__(self, work: Work, buffers: Buffers) -> None:
        option, case = work.option, work.case
        self.external = isinstance(option.optimizer, optim.External)
        self.arguments = (work.offsets(), work.weights())
        self.gradient = work.gradient()
        with buffers.for_ours():
            self.module: torch.nn.Module = TableBatchedEmbeddingBags(
                [TableSpec(case.rows, case.dim)] * work.tables,
                option.optimizer,
                feature_tables=work.feature_tables,
                precision=option.precision,
            )

    def step(self, indices: Tensor) -> None:
        """Forward, backward, update."""
        offsets, weights = self.arguments
        self.module(indices, offsets, weights).backward(self.gradient)
        self.clear()

    def clear(self) -> None:
        """Nothing accumulates."""
        if self.arguments[1] is not None:
            self.arguments[1].grad = None
        if self.external:
            self.module.zero_grad(set_to_none=True)


class Fbgemm(Emblib):
    """FBGEMM's modules on the host; every page of weights and states is written before."""

    def __init__(self, work: Work, buffers: Buffers) -> None:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType

        option, case = work.option, work.case
        given = dict(option.fbgemm or {})
        self.external = bool(given.pop("dense", False))
        self.arguments, self.gradient = (work.offsets(), work.weights()), work.gradient()
        if self.external:
            self.module = tbe.DenseTableBatchedEmbeddingBagsCodegen(
                [(case.rows, case.dim)] * work.tables,
                feature_table_map=work.feature_tables,
                use_cpu=True,
            )
            weights = self.module.weights
            weights.data = self._weights(work, buffers).view_as(weights)
        else:
            half = option.precision.weights is torch.float16
            dtype = SparseType.FP16 if half else SparseType.FP32
            given["optimizer"] = EmbOptimType[given["optimizer"]]
            if "weight_decay_mode" in given:
                given |= self._regularisation(tbe, given["weight_decay_mode"])
            place = (tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)
            self.module = tbe.SplitTableBatchedEmbeddingBagsCodegen(
                [(case.rows, case.dim, *place)] * work.tables,
                feature_table_map=work.feature_tables,
                learning_rate=LR,
                weights_precision=dtype,
                output_dtype=dtype,
                preallocated_host_buffers={"weights": self._weights(work, buffers)},
                **given,
            )
            for states in self.module.split_optimizer_states():
                for state in states:
                    state.zero_()

    @staticmethod
    def _weights(work: Work, buffers: Buffers) -> Tensor:
        return buffers.lend("fbgemm", work)[: work.tables * work.case.rows * work.case.dim]

    @staticmethod
    def _regularisation(library: Any, mode: str) -> Arguments:
        """Of the modes that count how often a row is seen; both with an L2 decay."""
        given: Arguments = {"weight_decay_mode": library.WeightDecayMode[mode]}
        decay = library.CounterWeightDecayMode.L2
        if mode == "COUNTER":
            definition = library.CounterBasedRegularizationDefinition(
                counter_weight_decay_mode=decay
            )
            return given | {"counter_based_regularization": definition}
        clip = library.CowClipDefinition(
            counter_weight_decay_mode=decay, weight_norm_coefficient=0.5, lower_bound=0.1
        )
        return given | {"cowclip_regularization": clip}


class EmbeddingBag(Emblib):
    """One `torch.nn.EmbeddingBag` a table, sparse gradients, and a `torch.optim` optimizer."""

    def __init__(self, work: Work, buffers: Buffers) -> None:
        case, option = work.case, work.option
        assert option.torch is not None
        self.external = True
        self.arguments = (work.offsets()[: work.batch + 1], work.weights())
        self.gradient = work.gradient()
        weights = buffers.lend("torch", work).view(case.tables, case.rows, case.dim)
        self.tables = [
            torch.nn.EmbeddingBag(
                case.rows, case.dim, mode="sum", sparse=True, include_last_offset=True, _weight=w
            )
            for w in weights
        ]
        self.module = torch.nn.ModuleList(self.tables)
        self.optimizer = option.torch(list(self.module.parameters()))

    def step(self, indices: Tensor) -> None:
        offsets, weights = self.arguments
        count = len(self.tables)
        ids = indices.view(count, -1)
        scales = [None] * count if weights is None else weights.view(count, -1)
        bags = [table(i, offsets, s) for table, i, s in zip(self.tables, ids, scales, strict=True)]
        torch.cat(bags, dim=1).backward(self.gradient)
        self.optimizer.step()
        self.clear()

    def touch(self) -> None:
        """Write every page of the state, which torch makes at the first step."""
        for states in self.optimizer.state.values():
            for state in states.values():
                if isinstance(state, Tensor) and state.dim() > 0:
                    state.mul_(1.0)


PEERS: dict[str, type[Emblib]] = {"fbgemm": Fbgemm, "torch": EmbeddingBag}


def peers_of(option: Option) -> list[str]:
    """Who else has this option on a CPU."""
    return [*(["fbgemm"] if option.fbgemm else []), *(["torch"] if option.torch else [])]
