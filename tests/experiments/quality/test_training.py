"""Training: which of several learning rates counts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from experiments.quality import training
from experiments.quality.training import Scores, TrainedModel, TrainingPlan


def test_a_rate_that_diverges_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {0.9: math.nan, 0.2: 0.5, 0.1: 0.6}

    def fit_once(data: Any, plan: Any, model: Any, rate: float) -> TrainedModel:
        scores = Scores(0.5, losses[rate])
        return TrainedModel(scores, scores, rate, 1, model)

    monkeypatch.setattr(training, "_fit_at_rate", fit_once)
    plan = TrainingPlan(dim=2, batch=1, epochs=1, rates=tuple(losses), large=0.0, seed=0)
    unused: Any = None
    best = training.fit(unused, plan, lambda rate: unused, lambda activity: None)
    assert best.rate == 0.2
