"""Derivatives and transforms that lookups do not have raise: torch would return zeros."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import emblib
from emblib import DynamicEmbeddingBags, DynamicSpec, KeyedJaggedTensor, init, optim, sharding

Lookup = Callable[[Tensor], Tensor]
IDS, OFFSETS = torch.tensor([3, 1, 2, 2]), torch.tensor([0, 1, 3, 4])


def bags(module: Any) -> Lookup:
    """Return the lookup of a batch by sample weights."""
    return lambda weights: module(IDS, OFFSETS, weights)


def dense(**options: Any) -> emblib.TableBatchedEmbeddingBags:
    """Return a table of a module."""
    spec = {name: options.pop(name) for name in ("placement",) if name in options}
    tables = [emblib.TableSpec(8, 2, "t", **spec)]
    return emblib.TableBatchedEmbeddingBags(tables, options.pop("optimizer", None), **options)


def frozen(module: nn.Module) -> nn.Module:
    """Freeze a module."""
    return module.requires_grad_(False)


def train(**options: Any) -> emblib.TTEmbeddingBag:
    """Return a tensor train."""
    return emblib.TTEmbeddingBag(emblib.TTSpec(8, 2, (2,), (2, 4), (1, 2)), **options)


def stored() -> Lookup:
    """Return a tensor train with stored rows."""
    spec = emblib.TTSpec(8, 2, (2,), (2, 4), (1, 2))
    return bags(emblib.CachedTTEmbeddingBags([spec], emblib.TTCache(2), optim.SGD(0.1)))


def dynamic() -> DynamicEmbeddingBags:
    """Return a dynamic table."""
    spec = DynamicSpec(32, 2, name="t", initializer=init.Constant(1.0))
    return DynamicEmbeddingBags([spec], optim.SGD(0.1), seed=1)


def collection(*, is_sharded: bool = False) -> Lookup:
    """Return a collection of two features, in another order than that of the batch."""
    configs = [emblib.EmbeddingBagConfig(8, 2, "t", ("f", "g"))]
    module: Any = emblib.EmbeddingBagCollection(configs, is_weighted=True, optimizer=optim.SGD(0.1))
    if is_sharded:
        one = sharding.RankGroup.single()
        plan = sharding.construct_module_plan(
            module, {"t": sharding.row_wise()}, sharding.World(1, 1)
        )
        module = sharding.ShardedEmbeddingBagCollection(module, plan, one)

    def look_up(weights: Tensor) -> Tensor:
        offsets = torch.tensor([0, 1, 2, 3, 4])
        found = module(KeyedJaggedTensor(["g", "f"], IDS, weights, offsets=offsets))
        found = found.wait() if is_sharded else found
        values: Tensor = found.values()
        return values

    return look_up


CACHED = {"placement": emblib.Placement.MANAGED_CACHING, "cache": emblib.CacheConfig(sets=1)}
SUBJECTS: dict[str, Callable[[], Lookup]] = {
    "plain": lambda: bags(dense(optimizer=optim.SGD(0.1))),
    "mean": lambda: bags(dense(pooling=emblib.Pooling.MEAN)),
    "cached": lambda: bags(dense(optimizer=optim.SGD(0.1), **CACHED)),
    "external": lambda: bags(dense(optimizer=optim.External())),
    "frozen": lambda: bags(frozen(dense(optimizer=optim.SGD(0.1)))),
    "quantised": lambda: bags(emblib.QuantizedEmbeddingBags.from_float(dense())),
    "train": lambda: bags(train()),
    "frozen train": lambda: bags(frozen(train())),
    "stored rows": stored,
    "dynamic": lambda: bags(dynamic()),
    "dynamic evaluation": lambda: bags(dynamic().eval()),
    "collection": collection,
    "sharded collection": lambda: collection(is_sharded=True),
}


def by_jvp(look_up: Lookup, weights: Tensor) -> Any:
    """Differentiate by a transform."""
    return torch.func.jvp(look_up, (weights,), (torch.ones_like(weights),))


def by_dual_tensors(look_up: Lookup, weights: Tensor) -> Any:
    """Differentiate with dual tensors."""
    with forward_ad.dual_level():
        return look_up(forward_ad.make_dual(weights, torch.ones_like(weights)))


def by_jacobian(look_up: Lookup, weights: Tensor) -> Any:
    """Differentiate column by column."""
    return torch.func.jacfwd(look_up)(weights)


@pytest.mark.parametrize("has_grad", [False, True])
@pytest.mark.parametrize("differentiate", [by_jvp, by_dual_tensors, by_jacobian])
@pytest.mark.parametrize("name", SUBJECTS)
def test_forward_mode_raises(
    name: str, differentiate: Callable[..., Any], *, has_grad: bool
) -> None:
    look_up = SUBJECTS[name]()
    with torch.set_grad_enabled(has_grad), pytest.raises(NotImplementedError, match="forward-mode"):
        differentiate(look_up, torch.ones(4))


def test_the_way_out_of_the_error() -> None:
    look_up, tangent = SUBJECTS["plain"](), torch.tensor([1.0, -2.0, 0.5, 3.0])
    with torch.no_grad():
        difference = look_up(torch.ones(4) + tangent) - look_up(torch.ones(4))
        torch.testing.assert_close(look_up(tangent), difference)


def test_refused_keys_are_not_inserted() -> None:
    module = dynamic()
    with pytest.raises(NotImplementedError, match="forward-mode"):
        by_dual_tensors(bags(module), torch.ones(4))
    assert module.size(0) == 0


def test_tangents_of_other_tensors_stay() -> None:
    module, x = dense(optimizer=optim.SGD(0.1)), torch.ones(3)

    def function(x: Tensor) -> Tensor:
        return module(IDS, OFFSETS).sum(1) * x.square()

    with torch.no_grad():
        value, tangent = torch.func.jvp(function, (x,), (torch.ones(3),))[:2]
    torch.testing.assert_close(tangent, 2 * value)


def test_tangents_of_cores_raise() -> None:
    module = train(optimizer=optim.External())
    core, *others = (core.detach() for core in module.cores)
    named = dict(enumerate(others, 1))

    def function(core: Tensor) -> Any:
        cores = {f"cores.{k}": one for k, one in {0: core, **named}.items()}
        return torch.func.functional_call(module, cores, (IDS, OFFSETS))

    with torch.no_grad(), pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(function, (core,), (torch.ones_like(core),))


def by_grad(look_up: Lookup, weights: Tensor) -> Any:
    """Differentiate by a transform."""
    return torch.func.grad(lambda weights: look_up(weights).sum())(weights)


def by_jacrev(look_up: Lookup, weights: Tensor) -> Any:
    """Differentiate row by row."""
    return torch.func.jacrev(look_up)(weights)


def by_vmap(look_up: Lookup, weights: Tensor) -> Any:
    """Look up a batch of weights."""
    return torch.vmap(look_up)(torch.stack([weights, weights]))


def by_vmap_of_another(look_up: Lookup, weights: Tensor) -> Any:
    """Look up inside a vmap over another tensor."""
    return torch.vmap(lambda x: look_up(weights) * x)(torch.ones(2))


UNRECORDED = ("frozen", "quantised")


@pytest.mark.parametrize("transform", [by_grad, by_jacrev, by_vmap, by_vmap_of_another])
@pytest.mark.parametrize("name", SUBJECTS)
def test_transforms_raise(name: str, transform: Callable[..., Any]) -> None:
    look_up = SUBJECTS[name]()
    if transform is by_vmap_of_another and name in UNRECORDED:
        assert by_vmap_of_another(look_up, torch.ones(4)).shape[0] == 2
        return
    with pytest.raises(NotImplementedError, match="no rules for the transforms"):
        transform(look_up, torch.ones(4))


@pytest.mark.parametrize(
    "module", [dense(), dynamic(), train(), emblib.QuantizedEmbeddingBags.from_float(dense())]
)
def test_batched_ids_raise(module: nn.Module) -> None:
    with torch.no_grad():
        with pytest.raises(NotImplementedError, match="look up in a loop"):
            torch.vmap(lambda ids: module(ids, OFFSETS))(torch.stack([IDS, IDS]))
        rows = torch.vmap(lambda x: module(IDS, OFFSETS) * x)(torch.ones(2))  # as the error says
        torch.testing.assert_close(rows[0], module(IDS, OFFSETS))
    assert not isinstance(module, DynamicEmbeddingBags) or module.size(0) == 0


@pytest.mark.parametrize(
    "name", ["plain", "cached", "external", "train", "stored rows", "dynamic", "collection"]
)
@pytest.mark.parametrize("create_graph", [False, True])
def test_batched_gradients_raise(name: str, create_graph: bool) -> None:
    look_up, weights = SUBJECTS[name](), torch.ones(4, requires_grad=True)
    out = look_up(weights)
    gradients = torch.ones(2, *out.shape)
    with pytest.raises(NotImplementedError, match="one gradient at a time"):
        torch.autograd.grad(
            out, weights, gradients, is_grads_batched=True, create_graph=create_graph
        )
    jacobian = torch.autograd.functional.jacobian(look_up, torch.ones(4))  # as the error says
    assert jacobian.shape == (*out.shape, 4)


@pytest.mark.parametrize("make", [dense, train])
def test_a_jacobian_of_frozen_tables_is_no_step(make: Any) -> None:
    """As the error of `is_grads_batched=True` says."""
    module = make().requires_grad_(False)
    before = [tensor.clone() for tensor in module.state_dict().values()]
    jacobian = torch.autograd.functional.jacobian(
        lambda weights: module(IDS, OFFSETS, weights), torch.ones(4)
    )
    assert jacobian.any()
    assert all(map(torch.equal, before, module.state_dict().values()))


@pytest.mark.parametrize(
    "name", ["plain", "cached", "external", "train", "stored rows", "dynamic", "sharded collection"]
)
def test_second_derivatives_raise(name: str) -> None:
    """`torch.autograd.functional.jvp` differentiates the gradient by the gradient of the output."""
    with pytest.raises(RuntimeError, match="differentiate twice"):
        torch.autograd.functional.jvp(SUBJECTS[name](), torch.ones(4), torch.ones(4))
