"""`EmbeddingCollection`: one vector an id, as plain tables give it."""

import pytest
import torch
from torch import nn

from emblib import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor, optim
from emblib.storage import Dense
from tests.collections.cases import batch, dense, features_of, sequence_configs


@pytest.mark.parametrize("dims", [(4, 4, 4), (4, 8, 4)])
@pytest.mark.parametrize("kinds", [("plain",) * 3, ("tt", "plain", "dynamic")])
def test_outputs_and_steps(kinds: tuple[str, ...], dims: tuple[int, ...]) -> None:
    configs = sequence_configs(kinds, dims)
    collection = EmbeddingCollection(configs, need_indices=True, optimizer=optim.SGD(0.1))
    keys = features_of(configs)
    for order in (keys, ["more", *keys[::-1]]):
        features = batch(order, 3)
        collection(features)
        out = collection(features)
        assert list(out) == keys
        rows = {c.name: dense(collection, c.name).requires_grad_() for c in configs}
        loss = other = torch.zeros(())
        for config in configs:
            for key in config.feature_names:
                ids = features[key].values()
                torch.testing.assert_close(out[key].values(), rows[config.name][ids])
                assert torch.equal(out[key].lengths(), features[key].lengths())
                assert torch.equal(out[key].weights(), ids)
                scale = torch.arange(1, ids.numel() * config.embedding_dim + 1).float()
                scale = scale.view(ids.numel(), -1) / 100
                loss = loss + (out[key].values() * scale).sum()
                other = other + (rows[config.name][ids] * scale).sum()
        loss.backward()
        other.backward()
        for config, kind in zip(configs, kinds, strict=True):
            if kind != "tt":
                table = rows[config.name]
                after = dense(collection, config.name)
                wanted = table.detach() - 0.1 * table.grad
                torch.testing.assert_close(after, wanted, rtol=1e-4, atol=1e-5)


def test_dense_gradients_by_table() -> None:
    configs = sequence_configs(("plain", "plain"), (4, 8))
    collection = EmbeddingCollection(configs)
    tables = {c.name: nn.Parameter(dense(collection, c.name)) for c in configs}
    features = batch(features_of(configs), 4)
    out = collection(features)
    sum(jagged.values().square().sum() for jagged in out.values()).backward()
    sum(
        tables[c.name][features[key].values()].square().sum()
        for c in configs
        for key in c.feature_names
    ).backward()
    for name, parameter in collection.named_parameters():
        table = tables[name.split(".")[1]]
        torch.testing.assert_close(parameter.grad[: table.shape[0]], table.grad)
        assert not parameter.grad[table.shape[0] :].any()


def test_variable_batches_keep_their_bags() -> None:
    configs = sequence_configs(("plain", "tt"), (4, 4))
    collection = EmbeddingCollection(configs, optimizer=optim.SGD(0.1))
    keys = features_of(configs)
    lengths = torch.tensor([2, 0, 1, 1, 3, 0, 2])
    ids = torch.arange(9)
    features = KeyedJaggedTensor(
        *(keys, ids, None, lengths), stride_per_key_per_rank=[[2], [1], [3], [1]]
    )
    out = collection(features)
    assert [out[key].lengths().tolist() for key in keys] == [[2, 0], [1], [1, 3, 0], [2]]
    assert torch.equal(out["f0"].values().detach(), dense(collection, "t0")[:2])
    torch.testing.assert_close(out["g1"].values().detach(), dense(collection, "t1")[7:9])


def test_a_feature_of_two_tables() -> None:
    configs = [EmbeddingConfig(30, 4, "a", ["f"]), EmbeddingConfig(30, 4, "b", ["f", "g"])]
    collection = EmbeddingCollection(configs, optimizer=optim.SGD(0.1))
    features = batch(["g", "f"], 3)
    out = collection(features)
    assert list(out) == ["f@a", "f@b", "g"]
    for key, table in (("f@a", "a"), ("f@b", "b")):
        rows = dense(collection, table)[features["f"].values()]
        assert torch.equal(out[key].values().detach(), rows)
    assert out["g"].weights_or_none() is None


def test_state_dict_and_questions() -> None:
    configs = sequence_configs(("plain", "tt"), (4, 4))
    one = EmbeddingCollection(configs, optimizer=optim.SGD(0.1))
    state = one.state_dict()
    assert list(state) == [
        "embeddings.t0.weight",
        "embeddings.t1.tt_layout",
        *(f"embeddings.t1.cores.{k}" for k in range(3)),
    ]
    two = EmbeddingCollection(configs, optimizer=optim.SGD(0.1))
    two.load_state_dict(state)
    features = batch(features_of(configs), 3)
    for key, jagged in one(features).items():
        assert torch.equal(jagged.values(), two(features)[key].values())
    assert two.embedding_configs() == configs
    assert not two.need_indices()
    assert configs[0].storage == Dense()
    with pytest.raises(KeyError, match=r"missing are \['f0', 'g0'\]"):
        two(batch(["f1", "g1"], 2))
