"""Train a DLRM on clicks with any kind of table, and say how well it ranks.

python examples/dlrm/train.py --data movielens --tables tensor_train
python examples/dlrm/train.py --tables torch --tables plain   # one after the other
python examples/dlrm/train.py --checkpoint dlrm.pt            # a second call resumes
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from data import Clicks, load
from model import KINDS, LEARNING_RATE, Dlrm
from torch import Tensor, nn

from emblib.collections.optimizers import FusedOptimizer


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the probability that a click is ranked above a sample without one."""
    order = scores.argsort()
    ranks = torch.empty_like(scores, dtype=torch.float64)
    ranks[order] = torch.arange(1, len(scores) + 1, dtype=torch.float64)
    clicks = labels.sum().double()
    others = len(labels) - clicks
    return ((ranks[labels == 1].sum() - clicks * (clicks + 1) / 2) / (clicks * others)).item()


def evaluate(model: Dlrm, data: Clicks, batch_size: int, device: str) -> float:
    """Return the AUC on the test samples."""
    model.eval()
    scores = []
    with torch.no_grad():
        for first in range(data.num_train, len(data.labels), batch_size):
            end = min(first + batch_size, len(data.labels))
            ids, numbers, _ = data.batch(first, end, device)
            scores.append(model(ids, numbers).cpu())
    model.train()
    return auc(torch.cat(scores), data.labels[data.num_train :])


def train(arguments: argparse.Namespace, kind: str, data: Clicks) -> float:
    """Train for some steps, from a checkpoint if there is one; return the AUC."""
    torch.manual_seed(arguments.seed)
    device, size = arguments.device, arguments.batch_size
    model = Dlrm(kind, data.rows, data.numbers.shape[1], device)
    optimizer = torch.optim.Adagrad(model.dense_parameters(), LEARNING_RATE)
    saved, start = Path(arguments.checkpoint or ""), 0
    if arguments.checkpoint and saved.exists():
        state = torch.load(saved, weights_only=True)
        if state["tables"] != kind:
            raise SystemExit(f"{saved} has tables of the kind {state['tables']}, not {kind}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        FusedOptimizer.of(model).load_state_dict(state["fused"])  # of tables in collections
        start = state["step"]
    per_epoch = data.num_train // size
    began = time.perf_counter()
    steps = max(start, arguments.steps)
    for step in range(start, steps):
        first = step % per_epoch * size
        ids, numbers, labels = data.batch(first, first + size, device)
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids, numbers), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    seconds = time.perf_counter() - began
    if arguments.checkpoint:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "fused": FusedOptimizer.of(model).state_dict(),
            "tables": kind,
            "step": steps,
        }
        torch.save(state, saved)
    area = evaluate(model, data, size, device)
    print(f"{kind}: AUC {area:.4f} after {steps} steps, {seconds:.1f} s of training")
    return area


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train with each kind of table; return the AUCs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default="planted", help=load.__doc__)
    parser.add_argument("--tables", action="append", choices=sorted(KINDS))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoint", help="written at the end; resumed from if it exists")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    kinds = parsed.tables or ["plain"]
    if parsed.checkpoint and len(kinds) > 1:
        parser.error("--checkpoint is of one kind of tables")
    data = load(parsed.data)
    return [train(parsed, kind, data) for kind in kinds]


if __name__ == "__main__":
    main()
