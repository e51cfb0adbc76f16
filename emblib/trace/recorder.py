"""The recorder: hooks on a model's embeddings that copy what they are called with."""

from __future__ import annotations

import math
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from emblib.tables.locks import ModuleLock
from emblib.tables.outside import outside_graphs
from emblib.trace.file import INTEGERS, LookupTrace
from emblib.trace.modules import Bags, Reading, distinct, embeddings


class TraceRecorder:
    """Records the lookups of every embedding in `modules` while it is entered.

    ```python
    with emblib.TraceRecorder(model) as recorder:
        for batch in loader:
            model(batch)
    recorder.save("lookups.pt")
    ```

    Recorded are `nn.EmbeddingBag`, `nn.Embedding` (a sample's bag is all that dimension 0 does not
    count), emblib's modules, FBGEMM's by their attributes, and TorchRec's collections by their
    configurations; of these the outermost. A module that has none of them inside and is named
    itself must be called with a KeyedJaggedTensor, or something with its `keys()`, `values()` and
    `lengths()`. Negative ids, and an `nn.EmbeddingBag`'s `padding_idx`, are lookups of nothing and
    are left out. Ids are copied to the CPU, which waits for a GPU. Several threads may call the
    embeddings; the features of a call are recorded together.

    Args:
        modules: models, or embeddings themselves.
        calls: record that many calls of each embedding and ignore the rest; 0: all.

    Raises:
        ValueError: no module, or a negative number of calls.
        TypeError: something else than a module.
    """

    def __init__(self, *modules: nn.Module, calls: int = 0) -> None:
        if not modules:
            raise ValueError("modules must name at least one model or embedding, got none")
        if calls < 0:
            raise ValueError(f"calls must be >= 0 (0: all), got {calls}")
        for module in modules:
            if not isinstance(module, nn.Module):
                raise TypeError(
                    f"modules must be nn.Modules, got {type(module).__name__}: "
                    "TraceRecorder(first, second) takes them one by one"
                )
        self._found = embeddings(modules)
        self._names = distinct([name for name, _, _ in self._found])
        self._calls = calls
        self._recorded: dict[str, list[Bags]] = {}
        self._hooks: list[Any] = []
        self._lock = ModuleLock()  # the features of a call are recorded together

    def __enter__(self) -> TraceRecorder:
        if self._hooks:
            raise RuntimeError("a recorder is entered once at a time; leave its `with` block first")
        try:
            for name, (_, module, read) in zip(self._names, self._found, strict=True):
                hook = _Hook(name, read, self._recorded, self._calls, self._lock)
                self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave()

    def _leave(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @property
    def trace(self) -> LookupTrace:
        """What was recorded until now.

        Raises:
            ValueError: nothing was.
        """
        with self._lock:
            parts = [list(calls) for calls in self._recorded.values()]
        if not parts:
            raise ValueError(
                f"nothing was recorded: run the model inside the `with` block; it calls "
                f"{', '.join(self._names)} there, unless it is compiled (record it uncompiled)"
            )
        return LookupTrace(
            tuple(calls[0].feature for calls in parts),
            tuple(_narrow(torch.cat([c.ids for c in calls])) for calls in parts),
            tuple(_narrow(torch.cat([c.lengths for c in calls])) for calls in parts),
        )

    def save(self, path: str | Path) -> str:
        """Write what was recorded until now; returns the file's SHA-256."""
        return self.trace.save(path)


class _Hook:
    """What one embedding calls; a copy of the embedding, or one from a file, calls nothing."""

    def __init__(
        self,
        name: str,
        read: Reading,
        recorded: dict[str, list[Bags]],
        calls: int,
        lock: ModuleLock,
    ) -> None:
        self.name, self.read, self.recorded, self.left = name, read, recorded, calls or math.inf
        self.lock = lock

    @outside_graphs
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.left <= 0:
            return
        every = [_real_lookups(bags) for bags in self.read(self.name, module, args, kwargs)]
        with self.lock:
            if self.left <= 0:
                return
            self.left -= 1
            for bags in every:
                self.recorded.setdefault(bags.feature.name, []).append(bags)

    def __reduce__(self) -> tuple[type[_Nothing], tuple[()]]:
        return _Nothing, ()


class _Nothing:
    """In place of a hook where a module was copied or saved."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        pass


def _real_lookups(bags: Bags) -> Bags:
    """On the CPU, without the lookups that look nothing up."""
    ids = bags.ids.detach().reshape(-1).to("cpu", torch.int64)
    lengths = bags.lengths.detach().reshape(-1).to("cpu", torch.int64)
    real = ids >= 0
    if not bool(real.all()):
        of = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
        lengths = torch.bincount(of[real], minlength=lengths.numel())
        ids = ids[real]
    return Bags(bags.feature, _narrow(ids).clone(), _narrow(lengths).clone())


def _narrow(values: Tensor) -> Tensor:
    """In the narrowest integers that hold them; `values` are not negative."""
    largest = int(values.max()) if values.numel() else 0
    return values.to(next(dtype for dtype in INTEGERS if largest <= torch.iinfo(dtype).max))
