"""TorchRec's train pipelines over emblib's: the same names and the same order of arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from emblib.sharding import pipelines


class TrainPipelineBase(pipelines.TrainPipelineBase):
    """The next batch is copied while one is trained."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str | None = None,
        custom_model_fwd: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(model, optimizer, device, forward=custom_model_fwd)


class TrainPipelineSparseDist(pipelines.TrainPipelineSparseDist):
    """And ids are sent ahead. Results are those of the plain loop to the bit."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str | None = None,
        execute_all_batches: bool = True,
        custom_model_fwd: Callable[[Any], Any] | None = None,
    ) -> None:
        _check_all(execute_all_batches)
        super().__init__(model, optimizer, device, forward=custom_model_fwd)


class PrefetchTrainPipelineSparseDist(pipelines.PrefetchTrainPipelineSparseDist):
    """And rows are brought into caches ahead."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        device: torch.device | str | None = None,
        execute_all_batches: bool = True,
        custom_model_fwd: Callable[[Any], Any] | None = None,
    ) -> None:
        _check_all(execute_all_batches)
        super().__init__(model, optimizer, device, forward=custom_model_fwd)


def _check_all(every: object) -> None:
    if not every:
        raise ValueError(
            "execute_all_batches must be True: batches that were read are trained; end the "
            "iterator where training is to end"
        )
