"""Replicas of a sharded model: parallelism in two dimensions, shards and replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from emblib.collections.groups import TableGroups
from emblib.grad_mode import without_gradients
from emblib.ops import autograd
from emblib.optim import Optimizer
from emblib.sharding import fingerprint
from emblib.sharding.codecs import CommPrecision
from emblib.sharding.dense import Wrapping, broadcast_state
from emblib.sharding.model_parallel import DistributedModelParallel, make_plan, names_of_tables
from emblib.sharding.pipelines.inputs import sharded_modules
from emblib.sharding.plan import ShardingPlan
from emblib.sharding.ranks import RankGroup, invoke_on_rank_and_broadcast_result
from emblib.sharding.shard import Rules
from emblib.sharding.sharded_tables import GradientReduction, ShardedTables
from emblib.sharding.table_hyperparams import check_replicas
from emblib.specs import check_bool

_VALUES_PER_MESSAGE = 1 << 23  # 32 MiB of float32
# The steps and counts of one replica's updates, in float32: their mean would have no meaning.
_STATES_PER_REPLICA = frozenset({"prev_iter", "row_counter"})


class ReplicatedModelParallel(DistributedModelParallel):
    """Shards the tables over groups of ranks; each group has a replica of all tables.

    Ids and rows are exchanged only within a group, whose ranks together have one replica of all
    tables in memory. By default gradients of the dense part are averaged over all ranks in every
    step. Replicas of the tables drift apart until `sync()` averages them: call it every few steps,
    and before a checkpoint or an evaluation. With plain SGD, `gradients=MEAN` and one `sync` per
    step, the result is the same as that of `DistributedModelParallel`. With SUM in place of MEAN,
    an update is that of `DistributedModelParallel` divided by the number of replicas.

    Args:
        module: the model, as for `DistributedModelParallel`. All tables need a fused optimizer.
        mesh: a `DeviceMesh` of all processes with two dimensions, (replicas, shards).
        plan: plan of the ranks of one group, as for `DistributedModelParallel`.
        planner: planner for the ranks of one group, as for `DistributedModelParallel`. All groups
            use the plan that is made in the first group.
        optimizer: optimizer of tables whose configuration has none; None uses the optimizer of
            their collection.
        wrap: way of training the dense part on all ranks, as for `DistributedModelParallel`.
        comm_precision: the codecs of values sent between the ranks of a group.
        gradients: whether table gradients are the mean over the ranks of a group, or the sum.
        local_size: number of ranks per node within a group; None as for `RankGroup`.

    Attributes:
        ranks: the group of this rank, which shares a replica of the tables.
        all_ranks: group of all processes.
        replicas: the ranks with the same shards as this rank, one per group.

    Raises:
        ValueError: `mesh` is not a `DeviceMesh` of two dimensions; a table is a hash table, whose
            replicas would have different keys, or has no fused optimizer; replicas differ in their
            shards; or see `DistributedModelParallel`.
        TypeError, RuntimeError: see `DistributedModelParallel`.
        PlanError: no plan fits into the memory of the first group; raised on all ranks.

    Example:
        >>> store = torch.distributed.HashStore()  # one process; under torchrun: init_distributed()
        >>> torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
        >>> names = ("replicas", "shards")
        >>> mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=names)
        >>> bags = emblib.EmbeddingBagCollection([emblib.EmbeddingBagConfig(8, 4, "item")])
        >>> optimizer = emblib.optim.SGD(0.1)
        >>> model = emblib.sharding.ReplicatedModelParallel(bags, mesh, optimizer=optimizer)
        >>> model.sync()  # every few steps
        >>> torch.distributed.destroy_process_group()
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: dist.DeviceMesh,
        *,
        plan: ShardingPlan | Rules | None = None,
        planner: Any = None,
        optimizer: Optimizer | None = None,
        wrap: str | Wrapping | None = "ddp",
        comm_precision: CommPrecision | None = None,
        gradients: GradientReduction = GradientReduction.MEAN,
        local_size: int | None = None,
    ) -> None:
        if not isinstance(mesh, dist.DeviceMesh) or mesh.ndim != 2:
            raise ValueError(
                "mesh must be a DeviceMesh [replicas, shards], e.g. init_device_mesh('cuda', "
                f"(4, 8), mesh_dim_names=('replicas', 'shards')), got {mesh!r}"
            )
        all_ranks = RankGroup(mesh)
        shard_ranks = fingerprint.agree(
            all_ranks,
            lambda: RankGroup(mesh.get_group(1), local_size=local_size, device=all_ranks.device),
            lambda _: {"": {"plan": None if plan is None else "given", "local_size": local_size}},
        )
        replicas = RankGroup(mesh.get_group(0), local_size=1, device=all_ranks.device)
        shard_ranks.replicas = replicas  # for `clip_grad_norm_`
        if plan is None:  # all replicas use the plan of the first: their memory may differ
            plan = invoke_on_rank_and_broadcast_result(
                replicas, 0, make_plan, module, planner, shard_ranks, optimizer
            )
        make_replica = partial(
            super().__init__,
            module,
            shard_ranks,
            plan=plan,
            optimizer=optimizer,
            wrap="none",
            comm_precision=comm_precision,
            gradients=gradients,
        )
        # The ranks of one group fail together, and the other groups must not wait for them.
        fingerprint.agree(all_ranks, make_replica)
        self.all_ranks, self.replicas = all_ranks, replicas
        fingerprint.agree(all_ranks, self._check_can_average, self._describe_shards)
        broadcast_state(self.module, all_ranks, names_of_tables(self.module))
        self._copy_tables_from_first()
        self.wrap_dense(wrap)

    @property
    def dense_ranks(self) -> RankGroup:
        """Return all ranks: they average the gradients of the dense part."""
        return self.all_ranks

    @without_gradients
    def sync(self, *, optimizer_states: bool = True) -> None:
        """Average the tables over replicas; all ranks call this together.

        Values in 16 bits are averaged in float32 and rounded to nearest.

        Args:
            optimizer_states: whether optimizer states of the tables are averaged too, except
                `prev_iter` and `row_counter`, of which each replica keeps its own.

        Raises:
            RuntimeError: learning rates or other hyperparameters of a table differ between ranks,
                on every rank; not compared on a GPU.
            ValueError: `optimizer_states` differs between ranks, on every rank; not compared on a
                GPU.
            TypeError: `optimizer_states` is not a bool, on every rank unless on a GPU.
        """
        if self.replicas.size == 1:
            check_bool("optimizer_states", optimizer_states)
            return
        if self.all_ranks.device.type != "cpu":
            check_bool("optimizer_states", optimizer_states)
        else:
            check_replicas(
                {
                    path: module.hyperparams
                    for path, module in self.module.named_modules()
                    if isinstance(module, ShardedTables)
                },
                optimizer_states,
                self.all_ranks,
            )

        def average(buffer: Tensor) -> None:
            dist.all_reduce(buffer, group=self.replicas.group)
            buffer /= self.replicas.size

        skipped_states = _STATES_PER_REPLICA if optimizer_states else None
        self._apply_collective(average, skipped_states=skipped_states)

    @without_gradients
    def _copy_tables_from_first(self) -> None:
        """Copy the tables and optimizer states of the first replica to all others."""
        if self.replicas.size == 1:
            return
        source, group = self.replicas.global_rank(0), self.replicas.group
        self._apply_collective(
            lambda buffer: dist.broadcast(buffer, source, group=group), skipped_states=frozenset()
        )

    def _apply_collective(
        self, collective: Callable[[Tensor], object], *, skipped_states: Set[str] | None
    ) -> None:
        """Change tables and optimizer states in place by a collective over the replicas.

        Args:
            collective: function that changes a flat float32 buffer of many values in place. It is
                called for the same values on all replicas, in the same order.
            skipped_states: names of the optimizer states that do not change; None for all states.
        """
        for message in _split_into_messages(self._replicated_values(skipped_states)):
            buffer = torch.cat([value.float().reshape(-1) for value in message])
            collective(buffer)
            new_values = buffer.split([value.numel() for value in message])
            for value, new_value in zip(message, new_values, strict=True):
                value.copy_(new_value.view_as(value))
        # Writes to views of tables on disk count only once they are committed.
        for groups in self._table_groups():
            for handle in groups.handles:
                handle.commit()

    def _table_groups(self) -> Iterator[TableGroups]:
        """Yield the `TableGroups` of all tables on this rank, including replicated tables."""
        for module in sharded_modules(self.module).values():
            yield from {id(shard.groups): shard.groups for shard in module.local_shards()}.values()

    def _replicated_values(self, skipped_states: Set[str] | None) -> Iterator[Tensor]:
        """Yield views of tables and optimizer states, each once, except `skipped_states`.

        None stands for all optimizer states. States that are not floating-point are left out.
        """
        visited = set()  # a shared table is in the groups of several collections
        for groups in self._table_groups():
            for index, views in enumerate(groups.all_views()):
                if groups.handles[index] in visited:
                    continue
                visited.add(groups.handles[index])
                parameter_names = groups.parameters_of(index).keys()
                for name, view in views.items():
                    is_included = skipped_states is not None and name not in skipped_states
                    if view.is_floating_point() and (is_included or name in parameter_names):
                        yield view.detach()

    def _check_can_average(self) -> None:
        """Raise ValueError for tables whose replicas cannot be averaged."""
        hash_tables = [
            config.name
            for module in sharded_modules(self.module).values()
            for config in module.configs
            if config.storage.is_keyed
        ]
        if hash_tables:
            raise ValueError(
                f"tables {hash_tables} are hash tables, and replicas of one would have different "
                "keys: use DistributedModelParallel, which shards their keys over all ranks"
            )
        for groups in self._table_groups():
            if not all(autograd.is_fused(group.module.optimizer) for group in groups.groups):
                raise ValueError(
                    "tables of replicas need a fused optimizer: pass optimizer=, or set that of "
                    "each table"
                )

    def _describe_shards(self, _: None) -> fingerprint.Description:
        """Describe the tables and their plan, which must be equal in all groups."""
        return {
            f"table {config.name} of {path or 'the model'}": {
                "rows": config.num_embeddings,
                "dim": config.embedding_dim,
                "sharding": str(module.plan[config.name]),
            }
            for path, module in sharded_modules(self.module).items()
            for config in module.configs
        }


def _split_into_messages(tensors: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of slices of the tensors, in order, as views.

    A list has about `_VALUES_PER_MESSAGE` values. Tensors are cut between rows, and must have at
    least one dimension.
    """
    chunk: list[Tensor] = []
    num_values_left = _VALUES_PER_MESSAGE
    for tensor in tensors:
        first_row = 0
        while first_row < len(tensor):
            row_numel = max(1, tensor[0].numel())
            num_rows = min(len(tensor) - first_row, max(1, num_values_left // row_numel))
            chunk.append(tensor[first_row : first_row + num_rows])
            first_row += num_rows
            num_values_left -= num_rows * row_numel
            if num_values_left <= 0:
                yield chunk
                chunk, num_values_left = [], _VALUES_PER_MESSAGE
    if chunk:
        yield chunk
