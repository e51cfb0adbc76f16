"""Export a ranking model with emblib's tables as a package that C++ loads without Python.

python examples/serve_cpp/export.py ranker.pt2 [plain|quantised|tensor_train|hash]
"""

import sys

import torch
from torch import Tensor, nn
from torch.export import Dim, export

import emblib

ROWS, DIM = 10_000, 32


class Ranker(nn.Module):
    """Score B examples by their ids of two features.

    Args:
        tables: any module of emblib's with two features of DIM.
    """

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.top = nn.Sequential(nn.Linear(2 * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """Return scores `[B]` of ids `[L]` and offsets `[2 * B + 1]`, int64."""
        return self.top(self.tables(ids, offsets)).squeeze(1).sigmoid()


def batch(size: int) -> tuple[Tensor, Tensor]:
    """Return the ids and offsets that serve.cpp makes, two ids per feature and example."""
    return torch.arange(4 * size) * 7919 % ROWS, torch.arange(0, 4 * size + 1, 2)


def tables(kind: str) -> nn.Module:
    """Return the tables of a kind."""
    specs = [emblib.TableSpec(ROWS, DIM, name) for name in ("user", "item")]
    if kind == "tensor_train":
        trains = [emblib.TTSpec(ROWS, DIM, ranks=(8, 8), name=spec.name) for spec in specs]
        return emblib.TableBatchedTTEmbeddingBags(trains, emblib.optim.SGD(0.1))
    if kind == "hash":
        keyed = [emblib.DynamicSpec(ROWS, DIM, name=spec.name) for spec in specs]
        dynamic = emblib.DynamicEmbeddingBags(keyed, emblib.optim.SGD(0.1))
        dynamic(*batch(1_000))  # keys without a row read zeros
        return dynamic
    trained = emblib.TableBatchedEmbeddingBags(specs, emblib.optim.SGD(0.1))
    return emblib.QuantizedEmbeddingBags.from_float(trained) if kind == "quantised" else trained


def main(path: str, kind: str) -> None:
    """Export, and print what serve.cpp must print."""
    torch.manual_seed(0)
    model = Ranker(tables(kind)).eval()
    with torch.no_grad():
        lengths = ({0: Dim.AUTO}, {0: Dim.AUTO})  # any number of ids and bags
        exported = export(model, batch(8), dynamic_shapes=lengths, strict=False)
        torch._inductor.aoti_compile_and_package(exported, package_path=path)  # noqa: SLF001
        print(" ".join(f"{score:.6f}" for score in model(*batch(5)).tolist()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "quantised")
