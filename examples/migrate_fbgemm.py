"""Move a model from FBGEMM's tables to emblib: weights, optimizer states, options; and back."""

import torch
from torch import nn

import emblib

try:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
except (ImportError, OSError) as error:
    raise SystemExit(f"this example needs fbgemm-gpu: {error}") from None


class Clicks(nn.Module):
    """Two tables and a linear layer, as one writes them for FBGEMM."""

    def __init__(self) -> None:
        super().__init__()
        host = (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(20_000, 16, *host), (500, 16, *host)],
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.05,
        )
        self.tables.init_embedding_weights_uniform(-0.1, 0.1)
        self.top = nn.Linear(32, 1)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Return a logit per example."""
        return self.top(self.tables(indices, offsets))


def main() -> None:
    """Train with FBGEMM, migrate, check, and train on."""
    torch.manual_seed(0)
    model, offsets = Clicks(), torch.arange(0, 2 * 64 * 4 + 1, 4)
    batches = [torch.randint(500, (512,)) for _ in range(8)]
    with emblib.TraceRecorder(model) as recorder:
        for indices in batches:
            model(indices, offsets).square().mean().backward()
    migration = emblib.migrate(model)
    print(migration)
    print(migration.predict(recorder.trace, batch_size=64))
    rows = migration.check()[0].rows
    for indices in batches:
        model(indices, offsets).square().mean().backward()  # the same calls
    migration.undo()
    print(f"rows after a step differ by {rows:.1e}; {type(model.tables).__module__}")


if __name__ == "__main__":
    main()
