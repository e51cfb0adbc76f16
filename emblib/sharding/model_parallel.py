"""Distributed models: tables sharded by a plan, everything else on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy as shallow_copy
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from emblib.attribute_errors import shows_attribute_errors
from emblib.dynamic import DynamicTables, tables_of
from emblib.optim import Optimizer
from emblib.sharding import fingerprint
from emblib.sharding.codecs import CommPrecision
from emblib.sharding.dense import (
    FullyShard,
    Wrapping,
    average_gradients,
    broadcast_state,
    is_fully_sharded,
    materialise,
    parse_wrapping,
    unwrapped,
)
from emblib.sharding.parameters import is_exporting, mark_as_replicas, raise_not_exportable
from emblib.sharding.pipelines.inputs import sharded_modules
from emblib.sharding.pipelines.joint_dist import JointDist
from emblib.sharding.plan import ShardingPlan
from emblib.sharding.ranks import RankGroup
from emblib.sharding.replicated_tables import ReplicatedTables
from emblib.sharding.shard import Rules, collections_of, shard
from emblib.sharding.sharded_tables import GradientReduction
from emblib.sharding.sharding_types import World
from emblib.specs import check_bool
from emblib.tables.parameters import is_updated_in_backward

if TYPE_CHECKING:
    from emblib.collections.optimizers import FusedOptimizer
    from emblib.sharding.planner import Planner

DEFAULT_BATCH_SIZE = 512
"""Examples per rank that a model is planned for if the caller passes no planner."""


class DistributedModelParallel(nn.Module):
    """Shards the tables of a model over the ranks and averages all other gradients.

    Every `EmbeddingBagCollection` and `EmbeddingCollection` of the plan is replaced by its sharded
    form. Weights are kept; tables on the meta device get initial values that do not depend on the
    plan. Then the dense part is copied from rank 0 and wrapped. Parameters and entries of state
    dicts have the names of the unsharded model. If a rank has several shards of a table, the
    parameters of all but the first have other names, see `ShardParameters`. All ranks must
    construct this and call it together, each from one thread (docs/threads.md).

    Args:
        module: the model, which is modified; or one collection, which is not.
        ranks: the ranks, or a process group or `DeviceMesh` of them; by default all processes.
        plan: a `ShardingPlan`, or {path of a collection: {table: rule}}. For None `planner` makes
            the plan of all collections.
        planner: a `Planner`, which runs on rank 0 if `plan` is None, else is ignored. None is a
            planner for machines like this one and batches of `DEFAULT_BATCH_SIZE` examples.
        optimizer: optimizer of tables whose configuration has none, fused into the backward pass;
            None uses the optimizer of their collection.
        wrap: how the dense part is parallelized: "ddp", "fully_shard", "none" or None, or
            `DDP(...)` or `FullyShard(...)` with options.
        comm_precision: the codecs of rows and gradients sent between ranks; None is float32.
        gradients: whether table gradients are the mean over ranks, like gradients of the dense
            part, or the sum.
        init_parameters: whether dense modules on the meta device are allocated and initialized. If
            not, they stay there: pass `wrap="none"`, allocate them, and then call `wrap_dense`. It
            has no effect on modules on other devices.

    Raises:
        TypeError: see `shard`; or `init_parameters` is not a bool, or `planner` not a planner.
        ValueError: see `shard`; or `wrap` is another value; or, over several ranks, backward
            updates parameters that the plan does not shard.
        RuntimeError: see `shard`; or a dense module on the meta device has no `reset_parameters`,
            or `init_parameters` is False for it and `wrap` is not "none".
        PlanError: no plan fits into memory; raised on all ranks.

    Example:
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 4, "item")])
        >>> model = emblib.sharding.DistributedModelParallel(
        ...     torch.nn.Sequential(bags),
        ...     emblib.sharding.RankGroup.single(),  # under torchrun: init_distributed()
        ...     plan={"0": {"item": emblib.sharding.row_wise()}},
        ...     optimizer=emblib.optim.RowwiseAdagrad(0.02),
        ... )
        >>> batch = emblib.KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1]))
        >>> model(batch).values().shape
        torch.Size([1, 4])
    """

    wraps_module = True  # `unwrapped` and the scripting of emblib.compat continue with `module`

    def __init__(
        self,
        module: nn.Module,
        ranks: RankGroup | dist.ProcessGroup | dist.DeviceMesh | None = None,
        *,
        plan: ShardingPlan | Rules | None = None,
        planner: Planner | None = None,
        optimizer: Optimizer | None = None,
        wrap: str | Wrapping | None = "ddp",
        comm_precision: CommPrecision | None = None,
        gradients: GradientReduction = GradientReduction.MEAN,
        init_parameters: bool = True,
    ) -> None:
        super().__init__()
        self.ranks = RankGroup.from_value(ranks)

        def check() -> Wrapping | None:
            check_bool("init_parameters", init_parameters)
            collections_of(module)  # raises for a model that is not a module
            return parse_wrapping(wrap)

        wrapping = fingerprint.agree(
            self.ranks,
            prepare=check,
            describe=lambda parsed: {
                "": fingerprint.settings_of(
                    self.ranks,
                    plan=None if plan is None else "given",
                    wrap=parsed or wrap or "none",
                    init_parameters=init_parameters,
                ),
                **_describe_dense(module),
            },
        )
        if plan is None:
            plan = make_plan(module, planner, self.ranks, optimizer)
        model = shard(
            module,
            plan,
            self.ranks,
            optimizer=optimizer,
            comm_precision=comm_precision,
            gradients=gradients,
        )
        fingerprint.agree(
            self.ranks,
            prepare=lambda: _move_dense(model, self.ranks, init_parameters=init_parameters),
        )
        broadcast_state(model, self.ranks, names_of_tables(model))
        mark_as_replicas(model, self.ranks)
        self._wrapped, self._is_wrapped = model, False
        self._joint_dist = JointDist(model, self.ranks)
        if wrapping is not None:
            self.wrap_dense(wrapping)

    def wrap_dense(self, wrap: str | Wrapping | None) -> None:
        """Wrap the dense part of a model that was made with `wrap="none"`; all ranks call this.

        After its checks it does nothing on one rank, for "none" or None, or if no parameter of the
        dense part is trained. If the caller has allocated the dense part, its values must be equal
        on all ranks, which is not checked.

        Raises:
            RuntimeError: the dense part is wrapped already, or has a parameter or buffer on the
                meta device, on this rank or on another one.
            ValueError: `wrap` is not a value that the constructor takes, or differs between ranks.
        """
        model = self.module
        wrapping = fingerprint.agree(
            self.dense_ranks,
            prepare=lambda: parse_wrapping(wrap),
            describe=lambda parsed: {"": {"wrap": parsed or wrap or "none"}},
        )
        replicated_names = _names_of_dense_tables(model)
        ignored = names_of_tables(model) - replicated_names
        dense_parameters = [
            parameter for name, parameter in model.named_parameters() if name not in ignored
        ]
        buffers = [buffer for name, buffer in model.named_buffers() if name not in ignored]

        def check() -> None:
            if self._is_wrapped:
                raise RuntimeError(
                    "the dense part is wrapped already: make the model with wrap='none' to wrap it "
                    "later"
                )
            if any(tensor.is_meta for tensor in (*dense_parameters, *buffers)):
                raise RuntimeError(
                    "the dense part is on the meta device, since the model was made with "
                    "init_parameters=False: allocate and load it, then call wrap_dense"
                )

        fingerprint.agree(self.dense_ranks, prepare=check)
        has_trained = any(
            parameter.requires_grad and not is_updated_in_backward(parameter)
            for parameter in dense_parameters
        )
        # DDP raises for a model without parameters that need gradients.
        if wrapping is not None and self.dense_ranks.size > 1 and has_trained:
            if isinstance(wrapping, FullyShard):  # lookups need whole tables
                ignored |= replicated_names
                average_gradients(
                    [
                        parameter
                        for name, parameter in model.named_parameters()
                        if name in replicated_names
                    ],
                    self.dense_ranks,
                )
            self._wrapped = wrapping.wrap(model, self.dense_ranks, ignored)
            self._is_wrapped = True
            mark_as_replicas(model, self.ranks)  # those that the wrapper made

    @property
    def dense_ranks(self) -> RankGroup:
        """Return the ranks that average the gradients of the dense part."""
        return self.ranks

    @property
    @shows_attribute_errors
    def module(self) -> nn.Module:
        """Return the model with sharded collections, without the wrapper of its dense part."""
        return unwrapped(self._wrapped)

    @property
    def wrapped(self) -> nn.Module:
        """Return the model with sharded collections, in the wrapper of its dense part, if any."""
        return self._wrapped

    @property
    def joint_dist(self) -> JointDist:
        """Return the joint input_dist; its `joint_paths` lists the collections that take part."""
        return self._joint_dist

    @property
    @shows_attribute_errors
    def plan(self) -> ShardingPlan:
        """Return the plan of the sharded collections."""
        plans_by_path = {path: module.plan for path, module in sharded_modules(self.module).items()}
        return ShardingPlan(plans_by_path, World(self.ranks.size, self.ranks.local_size))

    @property
    @shows_attribute_errors
    def tables(self) -> DynamicTables:
        """Return the handles of dynamic tables, by name; all ranks must call their methods."""
        return tables_of(self.module)

    @cached_property
    @shows_attribute_errors
    def fused_optimizer(self) -> FusedOptimizer:
        """Return the optimizer that the tables run in backward: its states and learning rate."""
        from emblib.collections.optimizers import FusedOptimizer

        return FusedOptimizer.of(self.module)

    def copy(self, device: torch.device | str) -> Self:
        """Return a copy with the dense part on `device`, for inference.

        The sharded collections are not copied: both models look up in the same tables, so `train()`
        and `eval()` of one model also set the mode of the collections in the other. The dense part
        of the copy is not wrapped, so its gradients are not averaged.

        Raises:
            RuntimeError: the dense part is wrapped with `FullyShard`: a rank has only a part of it.
        """
        if is_fully_sharded(self.module):
            raise RuntimeError(
                "the dense part is sharded with fully_shard, so this rank cannot copy it: save the "
                "model with emblib.sharding.checkpoints.save, and load it into a model that was "
                "made with wrap='ddp' or wrap='none'"
            )
        collections = sharded_modules(self.module).values()
        model = deepcopy(self.module, {id(collection): collection for collection in collections})
        collection_modules = {
            submodule for collection in collections for submodule in collection.modules()
        }
        for submodule in model.modules():
            if submodule not in collection_modules:
                submodule._apply(lambda tensor: tensor.to(device), recurse=False)
        model_copy = shallow_copy(self)
        model_copy.__dict__.pop("fused_optimizer", None)
        for name, value in vars(self).items():  # dicts of submodules, hooks and so on
            if isinstance(value, dict):
                model_copy.__dict__[name] = value.copy()
        model_copy.__dict__["_modules"]["_wrapped"] = model
        model_copy.__dict__["_joint_dist"] = JointDist(model, self.ranks)
        model_copy.__dict__["_is_wrapped"] = False
        return model_copy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model for the batch of this rank; all ranks must call this together."""
        self._joint_dist.start((args, kwargs))
        # If it raises, `end` does not run, and the next `start` forgets this forward.
        wrapped: Any = self._modules["_wrapped"]
        output = wrapped(*args, **kwargs)
        self._joint_dist.end()
        return output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:  # torch.export looks for parameters by their original names
            if is_exporting() and name in dict(self.module.named_children()):
                raise_not_exportable()
            raise

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict by the original names; sharded tables are `ShardedTable`s."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of this model, or of the unsharded model.

        With `FullyShard` the dense part must be sharded as in `state_dict`; else load a checkpoint
        with `emblib.sharding.checkpoints.load`.
        """
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters by their original names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the buffers by their original names."""
        return self.module.named_buffers(*args, **kwargs)


def _describe_dense(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Describe the parameters and buffers outside of collections, for the comparison of ranks."""
    table_ids = {
        id(tensor)
        for collection in collections_of(module).values()
        for tensor in (*collection.parameters(), *collection.buffers())
    }
    named_tensors = [*module.named_parameters(), *module.named_buffers()]
    dense_tensors = {name: tensor for name, tensor in named_tensors if id(tensor) not in table_ids}
    description: dict[str, dict[str, Any]] = {"the dense part": {"order": list(dense_tensors)}}
    for name, tensor in dense_tensors.items():
        description[f"parameter or buffer {name}"] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "requires_grad": tensor.requires_grad,
        }
    return description


def _move_dense(module: nn.Module, ranks: RankGroup, *, init_parameters: bool) -> None:
    """Move the model to the device of this rank, and allocate it there if `init_parameters`.

    Otherwise tensors on the meta device stay there.

    Raises:
        ValueError: there are several ranks, and backward updates a table that is not sharded.
        RuntimeError: see `materialise`.
    """
    if ranks.size > 1:
        _check_that_tables_are_sharded(module)
    if init_parameters:
        materialise(module, ranks.device)
    module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(ranks.device))


def _check_that_tables_are_sharded(module: nn.Module) -> None:
    """Raise ValueError for unsharded tables that backward updates: replicas would diverge."""
    sharded_names = names_of_tables(module)
    unsharded_names = [
        name
        for name, parameter in module.named_parameters()
        if name not in sharded_names and hasattr(parameter, "_in_backward_optimizers")
    ]
    paths = tuple(f"{path}." if path else "" for path in collections_of(module))
    outside_names = [name for name in unsharded_names if not name.startswith(paths)]
    if outside_names:
        raise ValueError(
            f"{outside_names} have an optimizer in backward and belong to no collection, so every "
            "rank would step them with its own gradients: pass only parameters of collections to "
            "_apply_optimizer_in_backward, and the others to an optimizer in the training loop"
        )
    if unsharded_names:
        raise ValueError(
            "parameters that backward updates must belong to collections in the plan, otherwise "
            f"replicas diverge: add the collections of {unsharded_names} to the plan, e.g. as "
            "data_parallel()"
        )


def names_of_tables(module: nn.Module) -> set[str]:
    """Return the names in `module` of the parameters and buffers of its sharded collections."""
    names: set[str] = set()
    for path, collection in sharded_modules(module).items():
        prefix = f"{path}." if path else ""
        for name, _ in (*collection.named_parameters(), *collection.named_buffers()):
            names.add(prefix + name)
    return names


def _names_of_dense_tables(module: nn.Module) -> set[str]:
    """Return the names of parameters of replicated tables that are trained like the dense part."""
    dense_parameters = {
        parameter
        for replicated_tables in module.modules()
        if isinstance(replicated_tables, ReplicatedTables) and not replicated_tables.is_synchronised
        for handle in replicated_tables.groups.handles
        for parameter in handle.parameters()
    }
    return {name for name, parameter in module.named_parameters() if parameter in dense_parameters}


def make_plan(
    module: nn.Module, planner: Planner | None, ranks: RankGroup, optimizer: Optimizer | None
) -> ShardingPlan:
    """Make the plan of a model, on rank 0, and return it on all ranks, which all call this.

    Args:
        module: the model, with unsharded collections.
        planner: the planner; None is one for machines like this one and `DEFAULT_BATCH_SIZE`.
        ranks: the ranks to plan for.
        optimizer: optimizer of tables whose configuration has none.

    Raises:
        TypeError: `planner` is neither None nor a planner.
        RuntimeError: the planner of another rank is wrong.
        PlanError: no plan fits into memory; on all ranks.
    """
    from emblib.sharding.planner import Planner, Topology, collective_plan

    def default_planner() -> Planner:
        topology = Topology.detect(ranks.size, ranks.local_size, device=ranks.device.type)
        return Planner(topology, DEFAULT_BATCH_SIZE)

    def check() -> Any:
        if planner is not None and not hasattr(planner, "plan"):
            raise TypeError(
                f"planner must be None or a Planner of emblib.sharding.planner, got {planner!r}"
            )
        return default_planner() if planner is None else planner

    agreed_planner = fingerprint.agree(ranks, check)
    return collective_plan(module, agreed_planner, ranks, optimizer=optimizer)
