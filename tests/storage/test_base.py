"""A storage kind of a few lines, defined here: it works wherever tables of other kinds do."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    Pooling,
    optim,
    storage,
)
from emblib.collections.optimizers import FusedOptimizer
from emblib.optim import Optimizer
from emblib.sharding import RankGroup, checkpoints, planner, shard, sharding_types
from emblib.storage import MemoryBytes, TableHandle, TableSlice
from emblib.storage.base import dense_gradient_ns, state_bytes
from emblib.storage.handles import bind_view
from emblib.tables import TableBatchedEmbeddingBags
from tests.sharding import worlds

ROWS, DIM, BATCH = 24, 8, 6


@dataclasses.dataclass(frozen=True)
class Modulo(storage.Storage):
    """A few rows that ids share: id i reads row i % buckets. It can be cut by columns."""

    buckets: int = 4
    plan_name: ClassVar[str] = "Modulo"

    def cut_units(self, table: storage.TableDescription) -> storage.CutUnits:
        return storage.CutUnits(table.num_embeddings, 4)

    def parameter_layouts(self, table: Any) -> dict[str, storage.TensorLayout]:
        size = (self.buckets, table.embedding_dim)

        def region(rows: Any, columns: Any) -> Any:
            return (0, self.buckets), columns

        return {"weight": storage.TensorLayout(size, torch.float32, region)}

    def make_module(
        self,
        parts: Sequence[TableSlice],
        feature_tables: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> nn.Module:
        module = ModuloModule(
            [self.spec(self.buckets, part.dim, part.config.name) for part in parts],
            optimizer,
            pooling=pooling,
            feature_tables=feature_tables,
            device=device,
        )
        self.reset(module, seeds)
        return module

    def make_handle(self, module: nn.Module, index: int) -> TableHandle:
        return ModuloHandle(self, module, index)

    def views(self, module: Any) -> list[dict[str, Tensor]]:
        views: list[dict[str, Tensor]] = module.table_views()
        return views

    def reset(self, module: Any, seeds: Sequence[int]) -> None:
        for views in self.views(module):
            views["weight"].fill_(0.5)

    def copy_slice(self, part: TableSlice, source: Any, target: Any, key_block: Any) -> None:
        for name, view in target.views().items():
            whole = source.views()[name]
            view.copy_(whole if whole.dim() == 1 else whole[:, slice(*part.columns)])

    def nbytes(self, part: TableSlice, optimizer: Any, device: str) -> MemoryBytes:
        states = state_bytes(optimizer, self.buckets, part.dim, 4)
        return MemoryBytes(self.buckets * part.dim * 4 + states)


class ModuloModule(TableBatchedEmbeddingBags):
    """Looks up the bucket of each id."""

    def forward(self, indices: Tensor, *arguments: Any, **options: Any) -> Tensor:
        buckets = self.tables[0].rows
        return super().forward(torch.remainder(indices, buckets), *arguments, **options)


class ModuloHandle(TableHandle):
    """The parameter `weight` `[buckets, dim]`."""

    def bind(self) -> None:
        bind_view(self, "weight", self.views()["weight"], self.module.optimizer)


storage.register(Modulo)


# Its use


def collection() -> EmbeddingBagCollection:
    kinds = {"a": Modulo(), "b": storage.Dense()}
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(ROWS, DIM, name, storage=kind) for name, kind in kinds.items()],
        optimizer=optim.Adagrad(lr=0.1),
    )


def batch(rank: int = 0, size: int = BATCH) -> KeyedJaggedTensor:
    values = (torch.arange(2 * size) * 7 + rank * 5) % ROWS
    return KeyedJaggedTensor(["a", "b"], values, lengths=torch.ones(2 * size, dtype=torch.int64))


def output(model: nn.Module, rank: int = 0) -> Tensor:
    found = model(batch(rank))
    values: Tensor = (found.wait() if hasattr(found, "wait") else found).values()
    return values


def trained(model: nn.Module, rank: int = 0) -> Tensor:
    for _ in range(3):
        out = output(model, rank)
        out.square().sum().backward()
    return out.detach()


def test_it_works_in_a_collection() -> None:
    model = collection()
    out = trained(model)
    ids = batch().values()[:BATCH] % 4
    same = ids.unsqueeze(0) == ids.unsqueeze(1)
    equal = (out[:, None, :DIM] == out[None, :, :DIM]).all(2)
    assert bool((equal >= same).all()), "ids of one bucket read one row"
    assert list(model.state_dict()) == ["embedding_bags.a.weight", "embedding_bags.b.weight"]
    other = collection()
    other.load_state_dict(model.state_dict())
    FusedOptimizer.of(other).load_state_dict(FusedOptimizer.of(model).state_dict())
    assert torch.equal(trained(other), trained(model))


def state_of(model: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint has."""
    return {"model": model, "optimizer": FusedOptimizer.of(model)}


def _sharded(ranks: RankGroup, path: str) -> None:
    torch.manual_seed(3)
    source = collection()
    trained(source)
    rules: Any = {"a": sharding_types.column_wise(), "b": sharding_types.row_wise()}
    model = shard(source, {"": rules}, ranks)
    expected = source(batch(ranks.rank)).values()
    assert torch.allclose(output(model, ranks.rank), expected)
    trained(model, ranks.rank)
    checkpoints.save(state_of(model), path, ranks)
    rules = {"a": sharding_types.table_wise(1), "b": sharding_types.column_wise()}
    other = shard(collection(), {"": rules}, ranks)
    checkpoints.load(state_of(other), path, ranks)
    for _ in range(2):
        first, second = trained(model, ranks.rank), trained(other, ranks.rank)
        assert torch.allclose(first, second)


def test_it_works_over_ranks_and_in_checkpoints(tmp_path: Path) -> None:
    worlds.run(2, _sharded, str(tmp_path))


def test_the_planner_knows_its_bytes_and_where_it_can_be_cut() -> None:
    model = collection()
    found = planner.Planner(planner.Topology(2), batch_size=64)
    box = found.plan(model)[""]["a"].shards[0]
    assert box.rows == (0, ROWS), "rows cannot be cut"
    part = TableSlice.whole(model.configs[0])
    assert part.storage.nbytes(part, model.optimizer, "cpu").device == 2 * 4 * DIM * 4
    by_rows = {"a": planner.TableConstraints(sharding_types=("row_wise",))}  # type: ignore[arg-type]
    plan = planner.Planner(planner.Topology(2), 64, by_rows).plan(model)
    assert len(plan[""]["a"].shards) == 1


def test_a_dense_gradient_takes_time_whichever_optimizer_of_torch_reads_it() -> None:
    table_slice = TableSlice.whole(EmbeddingBagConfig(ROWS, DIM, "item"))
    times: Any = SimpleNamespace(costs=SimpleNamespace(arrange_ns=0.5))
    dense = optim.External(gradient=optim.Gradient.DENSE)
    assert dense_gradient_ns(table_slice, None, times) == ROWS * DIM * 4
    assert dense_gradient_ns(table_slice, dense, times) == ROWS * DIM * 4
    for optimizer in (optim.External(), optim.SGD(0.1), optim.SGD(0.1, deferred=True)):
        assert dense_gradient_ns(table_slice, optimizer, times) == 0.0


def test_a_slice_is_its_rows_and_columns_of_the_whole_table() -> None:
    config = EmbeddingBagConfig(4, 3, "t")
    table, per_row = torch.arange(12).view(4, 3), torch.arange(4)
    part = TableSlice(config, rows=(1, 3), columns=(1, 2))
    assert part.view_of(table).tolist() == [[4], [7]]
    assert part.view_of(per_row).tolist() == [1, 2]
    assert part.view_of(table).data_ptr() == table[1:, 1:].data_ptr()  # a view
    with pytest.raises(TypeError, match=r"columns of a slice must be two ints, got \(1,\)"):
        TableSlice(config, rows=(1, 3), columns=(1,))  # type: ignore[arg-type]


def test_a_slice_given_by_lists_is_that_given_by_tuples() -> None:
    config = EmbeddingBagConfig(4, 3, "t", storage=storage.Hash())
    rows: Any = [torch.tensor(0), 2]
    columns: Any = [0, 3]
    assert TableSlice(config, rows, columns) == TableSlice(config, (0, 2), (0, 3))
    assert TableSlice(config, rows, columns).has_all_columns
