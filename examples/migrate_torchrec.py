"""Move a model from TorchRec's collection to emblib's; its code and its state dict stay."""

import torch
from torch import nn

import emblib

try:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
except (ImportError, OSError) as error:
    raise SystemExit(f"this example needs torchrec: {error}") from None


class Clicks(nn.Module):
    """A collection and a linear layer, as one writes them for TorchRec."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"embedding_dim": 16, "num_embeddings": 5_000}
        names = ("user", "item")
        configs = [EmbeddingBagConfig(name=name, feature_names=[name], **sizes) for name in names]
        self.bags = EmbeddingBagCollection(tables=configs)
        self.top = nn.Linear(32, 1)

    def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        """Return one logit per example."""
        (pooled,) = KeyedTensor.regroup([self.bags(batch)], [["item", "user"]])
        return self.top(pooled)


def main() -> None:
    """Train with TorchRec, migrate, check, and train on."""
    torch.manual_seed(0)
    model = Clicks()
    optimizer = torch.optim.Adagrad(model.parameters(), 0.01)
    lengths = torch.ones(128, dtype=torch.int64)
    keys = list(model.state_dict())

    def train() -> None:
        for _ in range(10):
            ids = torch.randint(5_000, (128,))
            batch = KeyedJaggedTensor.from_lengths_sync(["user", "item"], ids, lengths)
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    train()
    migration = emblib.migrate(model, optimizer)
    print(migration)
    train()
    assert list(model.state_dict()) == keys
    print(f"rows after a step differ by {migration.check()[0].rows:.1e}; keys as before")


if __name__ == "__main__":
    main()
