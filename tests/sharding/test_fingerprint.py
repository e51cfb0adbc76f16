"""Ranks that were given other tables, plans, optimizers or settings: all raise, and say which."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from emblib import optim
from emblib.collections import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from emblib.collections.configs import EmbeddingConfig
from emblib.collections.groups import TableGroups
from emblib.init import ByRows
from emblib.sharding import (
    BF16,
    DDP,
    CommPrecision,
    DistributedModelParallel,
    GradientReduction,
    ShardedEmbeddingBagCollection,
    ShardedEmbeddingCollection,
    fingerprint,
    shard,
    sharding_types,
)
from emblib.sharding.ranks import RankGroup
from emblib.specs import CacheConfig, Placement, Pooling
from emblib.storage import Dense
from tests.sharding import worlds

ROWS, DIM = 1000, 8
WORLD = sharding_types.World(2, 2)


def _bags(**changes: Any) -> EmbeddingBagCollection:
    """Two tables; `changes` are those of "item", on one rank."""
    optimizer = changes.pop("optimizer", optim.RowwiseAdagrad(lr=0.1))
    order = changes.pop("order", "item country")
    weighted = changes.pop("is_weighted", False)
    rate, device = changes.pop("rate_now", None), changes.pop("device", None)
    is_frozen = changes.pop("is_frozen", False)
    configs = {
        "item": EmbeddingBagConfig(
            **{"num_embeddings": ROWS, "embedding_dim": DIM, "name": "item", **changes}
        ),
        "country": EmbeddingBagConfig(50, DIM, "country"),
    }
    made = EmbeddingBagCollection(
        [configs[name] for name in order.split()],
        device,
        optimizer=optimizer,
        is_weighted=weighted,
    )
    if rate is not None:
        made.groups.module_of(0)[0].set_learning_rate(rate)
    made.embedding_bags["item"].requires_grad_(not is_frozen)
    return made


def _plan(**rules: Any) -> dict[str, Any]:
    return {"item": sharding_types.row_wise(), "country": sharding_types.table_wise(0), **rules}


def _init_rows(weight: torch.Tensor) -> None:
    weight.fill_(1.0)


# What rank 1 has otherwise: arguments of the tables, of the plan and of `shard`; what is said.
TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "rows": (
        {"num_embeddings": ROWS + 1},
        "table item: num_embeddings is 1000 on rank 0 and 1001 on rank 1",
    ),
    "dim": ({"embedding_dim": 16}, "table item: embedding_dim is 8 on rank 0 and 16 on rank 1"),
    "learning rate": (
        {"optimizer": optim.RowwiseAdagrad(lr=0.2)},
        "table item: optimizer.lr is 0.1 on rank 0 and 0.2 on rank 1",
    ),
    "pooling": (
        {"pooling": Pooling.MEAN},
        "table item: pooling is sum on rank 0 and mean on rank 1",
    ),
    "learning rate of now": (
        {"rate_now": 0.3},
        "table item: now.lr is 0.1 on rank 0 and 0.3 on rank 1",
    ),
    "optimizer": (
        {"optimizer": optim.SGD(0.1)},
        "table item: optimizer is RowwiseAdagrad on rank 0 and SGD on rank 1",
    ),
    "decay": (
        {"optimizer": optim.RowwiseAdagrad(lr=0.1, weight_decay=optim.L2(0.01))},
        "table item: optimizer.weight_decay is None on rank 0 and L2 on rank 1",
    ),
    "dtype": (
        {"data_type": torch.bfloat16},
        "table item: data_type is torch.float32 on rank 0 and torch.bfloat16 on rank 1",
    ),
    "features": (
        {"feature_names": ("item", "last")},
        "table item: feature_names is item on rank 0 and item, last on rank 1",
    ),
    "storage": (
        {"storage": Dense(Placement.MANAGED_CACHING, CacheConfig(sets=1))},
        "table item: storage.placement is device on rank 0 and managed_caching on rank 1",
    ),
    "first values": (
        {"init_fn": _init_rows},
        f"table item: init_fn is None on rank 0 and {__name__}._init_rows on rank 1",
    ),
    "memory": ({"device": "meta"}, "table item: is_on_meta is False on rank 0 and True on rank 1"),
    "freezing": (
        {"is_frozen": True},
        "table item: frozen is none on rank 0 and weight on rank 1",
    ),
    "order": (
        {"order": "country item"},
        "tables is item, country on rank 0 and country, item on rank 1",
    ),
    "a table less": ({"order": "item"}, "tables is item, country on rank 0 and item on rank 1"),
    "weights": ({"is_weighted": True}, "is_weighted is False on rank 0 and True on rank 1"),
}
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "comm_precision": (
        {"comm_precision": CommPrecision(backward=BF16())},
        "comm_precision.backward is FP32 on rank 0 and BF16 on rank 1",
    ),
    "gradients": (
        {"gradients": GradientReduction.SUM},
        "gradients is mean on rank 0 and sum on rank 1",
    ),
    "optimizer": (
        {"optimizer": optim.SGD(0.5)},
        "table item: optimizer is RowwiseAdagrad on rank 0 and SGD on rank 1",
    ),
}
PLANS: dict[str, tuple[dict[str, Any], str]] = {
    "rule": (
        {"country": sharding_types.row_wise()},
        "table country: sharding is table_wise on rank 0 and row_wise on rank 1",
    ),
    "cut": (
        {"item": sharding_types.custom([(0, (0, 501), (0, DIM)), (1, (501, ROWS), (0, DIM))])},
        "table item: shard 0 is [0:500, 0:8] on rank 0 on rank 0 and [0:501, 0:8] on",
    ),
    "kept as": (
        {"item": Dense(Placement.MANAGED)},
        "table item: planned_storage is None on rank 0 and Dense on rank 1",
    ),
}


def _rules(given: dict[str, Any]) -> dict[str, Any]:
    """A plan; a kind stands for row_wise() with the table kept as that."""
    shape = sharding_types.TableShape(ROWS, DIM)
    return _plan(
        **{
            name: dataclasses.replace(sharding_types.row_wise()(shape, WORLD), storage=rule)
            if isinstance(rule, Dense)
            else rule
            for name, rule in given.items()
        }
    )


def _told(call: Callable[[], Any]) -> str:
    """What it raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 the test looks at the text
        call()
    return f"{type(caught.value).__name__}: {caught.value}"


def _disagreements(ranks: RankGroup) -> dict[str, str]:
    """What this rank says in each case, by its name; the model is as it was then."""
    found = {}
    for name, (changes, _) in TABLES.items():
        model = nn.ModuleDict({"bags": _bags(**(dict(changes) if ranks.rank == 1 else {}))})
        rules = {c.name: _plan()[c.name] for c in model["bags"].configs}
        found[f"tables: {name}"] = _told(partial(shard, model, {"bags": rules}, ranks))
        assert type(model["bags"]) is EmbeddingBagCollection
    for name, (changes, _) in SETTINGS.items():
        given = changes if ranks.rank == 1 else {}
        found[f"settings: {name}"] = _told(partial(shard, _bags(), {"": _plan()}, ranks, **given))
    for name, (rules, _) in PLANS.items():
        plan = _rules(rules if ranks.rank == 1 else {})
        found[f"plans: {name}"] = _told(partial(shard, _bags(), {"": plan}, ranks))
    ranks.barrier()
    return found


def test_each_thing_that_ranks_were_given_otherwise_is_named() -> None:
    zero, one = worlds.run(2, _disagreements)
    assert zero == one
    for kind, cases in (("tables", TABLES), ("settings", SETTINGS), ("plans", PLANS)):
        for name, (_, words) in cases.items():
            text = zero[f"{kind}: {name}"].replace(" of bags", "").replace("collection bags: ", "")
            assert text.startswith("ValueError: "), text
            assert words in text, text
            assert "same on all ranks" in text


def _without_shard(ranks: RankGroup) -> list[str]:
    """Of the sharded collections made directly; sequences have messages by their dims."""
    mine = ranks.rank == 2
    plan = {
        "item": sharding_types.row_wise()(
            sharding_types.TableShape(ROWS, DIM), sharding_types.World(3, 3)
        )
    }
    rows = ROWS + 1 if mine else ROWS
    cut = {
        "item": sharding_types.row_wise()(
            sharding_types.TableShape(rows, DIM), sharding_types.World(3, 3)
        )
    }
    bags = [EmbeddingBagConfig(rows, DIM, "item")]
    with pytest.raises(ValueError, match=r"1000 on ranks 0-1 and 1001 on rank 2") as caught:
        ShardedEmbeddingBagCollection(EmbeddingBagCollection(bags), cut, ranks)
    found = [str(caught.value)]
    dims = (DIM, 4) if mine else (DIM, DIM)
    sequences = EmbeddingCollection(
        [
            EmbeddingConfig(ROWS, dim, name)
            for dim, name in zip(dims, ("item", "other"), strict=True)
        ]
    )
    plan["other"] = sharding_types.ParameterSharding(sharding_types.ShardingType.DATA_PARALLEL)
    with pytest.raises(ValueError, match="table other: embedding_dim is 8 on ranks 0-1") as caught:
        ShardedEmbeddingCollection(sequences, plan, ranks)
    return [*found, str(caught.value)]


def test_collections_that_are_made_directly_compare_too() -> None:
    first, *others = worlds.run(3, _without_shard)
    assert others == [first, first]


class _Net(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.bags = _bags()
        self.clicks = EmbeddingCollection([EmbeddingConfig(ROWS, DIM, "s")])
        self.top = nn.Linear(2 * DIM, width)


def _models(ranks: RankGroup) -> dict[str, str]:
    plan = {"bags": _plan(), "clicks": {"s": sharding_types.row_wise()}}
    mine = ranks.rank == 1
    plans: dict[str, Any] = {
        "plan": None if mine else plan,
        "collection": {"bags": plan["bags"]} if mine else plan,
        "order of collections": dict(reversed(plan.items())) if mine else plan,
    }
    found = {
        name: _told(partial(DistributedModelParallel, _Net(), ranks, plan=given))
        for name, given in plans.items()
    }
    found["wrap"] = _told(
        partial(DistributedModelParallel, _Net(), ranks, plan=plan, wrap="none" if mine else "ddp")
    )
    find_unused = DDP({"find_unused_parameters": mine, "device_ids": None})
    found["options"] = _told(
        partial(DistributedModelParallel, _Net(), ranks, plan=plan, wrap=find_unused)
    )
    later = DistributedModelParallel(_Net(), ranks, plan=plan, wrap="none")
    found["later"] = _told(partial(later.wrap_dense, "none" if mine else "ddp"))
    later.wrap_dense(None if mine else "none")  # two names of one value
    unplaced = DistributedModelParallel(_Net(), ranks, plan=plan, wrap="none")
    if mine:
        unplaced.module.top.register_buffer("scale", torch.ones(2, device="meta"))
    found["on meta"] = _told(partial(unplaced.wrap_dense, "ddp"))
    found["planned"] = _told(
        partial(DistributedModelParallel, _bags(num_embeddings=ROWS + mine), ranks)
    )
    found["dense"] = _told(partial(DistributedModelParallel, _Net(4 + mine), ranks, plan=plan))
    return found


def test_a_model_compares_its_plan_its_wrapping_and_its_dense_part() -> None:
    zero, one = worlds.run(2, _models)
    assert zero.pop("on meta").startswith("RuntimeError: rank 1 failed: RuntimeError: the dense")
    assert one.pop("on meta").startswith("RuntimeError: the dense part is on the meta device")
    assert zero == one
    assert "plan is given on rank 0 and None on rank 1" in zero["plan"]
    assert "collections is bags, clicks on rank 0 and bags on rank 1" in zero["collection"]
    assert "collections is bags, clicks on rank 0 and clicks, bags" in zero["order of collections"]
    assert "wrap is DDP on rank 0 and none on rank 1" in zero["wrap"]
    assert "wrap is DDP on rank 0 and none on rank 1" in zero["later"]
    assert "table item: num_embeddings is 1000 on rank 0 and 1001 on rank 1" in zero["planned"]
    assert "wrap.options.find_unused_parameters is False on rank 0 and True" in zero["options"]
    assert (
        "parameter or buffer top.weight: shape is 4, 16 on rank 0 and 5, 16 on rank 1"
        in zero["dense"]
    )


def _cut() -> dict[str, Any]:
    return {
        "item": sharding_types.row_wise()(sharding_types.TableShape(ROWS, DIM), WORLD),
        "country": sharding_types.table_wise(0)(sharding_types.TableShape(50, DIM), WORLD),
    }


def _no_memory(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("none left")


def _one_fails(ranks: RankGroup) -> dict[str, str]:
    """Only rank 1 has an argument that cannot be, or no memory: rank 0 must not wait for it."""
    mine = ranks.rank == 1
    gone = _plan(item=sharding_types.table_wise(7)) if mine else _plan()
    wrap = "dpp" if mine else "ddp"
    comm_precision: Any = "fp16" if mine else None
    made: dict[str, Callable[[], Any]] = {
        "plan": partial(shard, _bags(), {"": gone}, ranks),
        "path": partial(shard, _bags(), {"else" if mine else "": _plan()}, ranks),
        "wrap": partial(DistributedModelParallel, _bags(), ranks, plan={"": _plan()}, wrap=wrap),
        "init_parameters": partial(
            DistributedModelParallel,
            _bags(),
            ranks,
            plan={"": _plan()},
            init_parameters="no" if mine else True,  # type: ignore[arg-type]
        ),
        "comm_precision": partial(
            ShardedEmbeddingBagCollection, _bags(), _cut(), ranks, comm_precision=comm_precision
        ),
        "dedup": partial(
            ShardedEmbeddingCollection,
            EmbeddingCollection([EmbeddingConfig(ROWS, DIM, "item")]),
            {"item": sharding_types.row_wise()},
            ranks,
            dedup="x" if mine else False,  # type: ignore[arg-type]
        ),
    }
    found = {name: _told(call) for name, call in made.items()}
    bags = _bags()
    with pytest.MonkeyPatch.context() as patch:
        if mine:
            patch.setattr(TableGroups, "__init__", _no_memory)
        found["memory"] = _told(partial(shard, bags, {"": _plan()}, ranks))
    return found


def test_an_error_of_one_rank_is_raised_on_all() -> None:
    others, own = worlds.run(2, _one_fails)
    for name, words in {
        "plan": "ValueError: table item: a rank must be in [0, 2), got Shard(rank=7",
        "path": "collections is (the model) on rank 0 and else on rank 1",
        "wrap": "wrap is DDP on rank 0 and dpp on rank 1",
        "init_parameters": "init_parameters is True on rank 0 and no on rank 1",
        "comm_precision": "TypeError: comm_precision must be None or a CommPrecision",
        "dedup": "dedup must be True or False",
        "memory": "MemoryError: none left",
    }.items():
        assert words in own[name]
        assert words in others[name]
        assert "rank 1 failed: " in others[name]


def _fill(weight: torch.Tensor, value: Any) -> None:
    weight.fill_(value)


@dataclasses.dataclass(frozen=True)
class _Filled:
    value: float

    def __call__(self, weight: torch.Tensor) -> None:
        weight.fill_(self.value)


# What two ranks have as init_fn; what differs, by the error.
FUNCTIONS: dict[str, tuple[Any, Any, str]] = {
    "name": (nn.init.zeros_, nn.init.ones_, "init_fn is torch.nn.init.zeros_ on rank 0 and "),
    "object": (_Filled(0.0), _Filled(1.0), "init_fn.value is 0.0 on rank 0 and 1.0"),
    "keywords": (
        partial(_fill, value=0.0),
        partial(_fill, value=1.0),
        "init_fn.keywords.value is 0.0 on rank 0 and 1.0",
    ),
    "arguments": (
        partial(nn.init.constant_, val=1.0),
        partial(nn.init.normal_, val=1.0),
        "init_fn is torch.nn.init.constant_ on rank 0 and torch.nn.init.normal_",
    ),
    "tensor": (
        partial(_fill, value=torch.zeros(1)),
        partial(_fill, value=torch.ones(1)),
        "init_fn.keywords.value is torch.float32[1][0.0] on rank 0 and torch.float32[1][1.0]",
    ),
    "partial of an object": (
        partial(_Filled(0.0)),
        partial(_Filled(1.0)),
        "init_fn.value is 0.0 on rank 0 and 1.0",
    ),
    "blocks": (
        ByRows(partial(_fill, value=0.0)),
        ByRows(partial(_fill, value=1.0)),
        "init_fn.function.keywords.value is 0.0 on rank 0 and 1.0",
    ),
}


def _functions(ranks: RankGroup) -> dict[str, str]:
    found = {}
    for name, given in FUNCTIONS.items():
        bags = _bags(init_fn=given[ranks.rank], device="meta")
        found[name] = _told(partial(shard, bags, {"": _plan()}, ranks))
    return found


def test_functions_are_compared_by_name_and_fields() -> None:
    zero, one = worlds.run(2, _functions)
    assert zero == one
    for name, (*_, words) in FUNCTIONS.items():
        assert f"table item: {words}" in zero[name], zero[name]


# Described by processes whose sets of strings are ordered otherwise.
_ALIKE = """
import sys, logging, torch
from functools import partial
from torch import nn
from tests.sharding import test_fingerprint as cases
from emblib.sharding import fingerprint

rank = int(sys.argv[1])
values = [
    cases._fill, cases._Filled(1.0), cases._Filled(1.0).__call__, partial(nn.init.uniform_, a=0.5),
    {"a", "b", "c"}, partial(cases._fill, value=torch.device("cuda", rank)), nn.Linear(2, 2),
    [len, int, max], sum, logging.getLogger("alike"), lambda weight: weight, object(),
    [torch.Generator().manual_seed(rank)],
]
leaves = fingerprint._leaves({"": {str(i): value for i, value in enumerate(values)}})
print(sorted(leaves[""].items()))
"""


def test_functions_are_described_alike_by_every_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = [sys.executable, "-c", _ALIKE, "0"]
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.getcwd()}
    other = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    monkeypatch.setattr(sys, "argv", ["", "1"])
    monkeypatch.setattr(logging.getLogger("alike"), "level", logging.DEBUG)  # a rank may log more
    exec(_ALIKE, {"__name__": "__main__"})
    texts = [other.stdout, capsys.readouterr().out]
    assert texts[0] == texts[1]
    assert " at 0x" not in texts[0]
    assert "torch.nn.init.uniform_" in texts[0]


def _may_differ(ranks: RankGroup) -> int:
    """Weights, directories and what a rank made for itself: nothing of it is compared."""
    torch.manual_seed(ranks.rank)
    kind = Dense(Placement.DISK, CacheConfig(sets=1, directory=f"{ranks.rank}/rows"))
    config = EmbeddingBagConfig(
        ROWS, DIM, "item", init_fn=partial(nn.init.uniform_, a=0.5), storage=kind
    )
    fingerprint.agree(
        ranks,
        lambda: config,
        lambda config: {"": {"config": config, "options": {"device_ids": [ranks.rank]}}},
    )
    sharded: Any = shard(_bags(), {"": _plan()}, ranks)
    # Copies become those of rank 0, whatever the others have.
    later: Any = _bags(rate_now=0.3 if ranks.rank == 0 else None)
    copies = {name: sharding_types.data_parallel() for name in _plan()}
    module = shard(later, {"": copies}, ranks).replicated.groups.module_of(0)[0]  # type: ignore[union-attr]
    assert module.learning_rate == 0.3
    return len(sharded.local_shards())


def test_what_each_rank_has_for_itself_may_differ() -> None:
    assert worlds.run(2, _may_differ) == [2, 1]


def test_one_rank_describes_nothing() -> None:
    def fail(value: Any) -> Any:
        raise AssertionError

    assert fingerprint.agree(RankGroup.single(), lambda: 7, fail) == 7
