"""Run the real TorchRec, unmodified, on emblib's kernels; fbgemm-gpu need not be installed.

pip install --no-deps torchrec==1.8.0
pip install pyre-extensions tensordict torchmetrics tqdm
python examples/torchrec_over_emblib.py
"""

import emblib.compat.fbgemm

emblib.compat.fbgemm.install()  # before the first import of torchrec

import torch  # noqa: E402
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor  # noqa: E402


def main() -> None:
    """Train TorchRec's collection with torch's optimizer."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=16, num_embeddings=1_000, feature_names=[name])
        for name in ("user", "item")
    ]
    bags = EmbeddingBagCollection(tables=tables)
    optimizer = torch.optim.Adagrad(bags.parameters(), 0.003)
    norms = []
    for _ in range(10):
        batch = KeyedJaggedTensor.from_lengths_sync(
            ["user", "item"], torch.randint(1_000, (128,)), torch.ones(128, dtype=torch.int64)
        )
        pooled = bags(batch).values()
        optimizer.zero_grad()
        pooled.square().mean().backward()
        optimizer.step()
        norms.append(pooled.norm().item())
    print(f"norm {norms[0]:.2f} -> {norms[-1]:.2f} with TorchRec's collection")


if __name__ == "__main__":
    main()
