"""What a module of plain tables does around its lookups: memory, cache, checkpoints, reports."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from emblib.ops import lookups
from emblib.tables import checkpoint
from emblib.tables.features import FeatureTables
from emblib.tables.locks import atomic
from emblib.tables.memory import Memory
from emblib.tables.outside import outside_graphs
from emblib.tables.prefetch import Given, Prefetcher
from emblib.tables.reporting import Reporting, StatsReporter
from emblib.tables.row_cache import CacheStats, RowCache


class TieredTables(FeatureTables):
    """Base of modules whose tables are spread over memory tiers, some of them behind a cache.

    The subclass makes `_memory`, `_prefetcher` and `row_cache` and says what a batch is.
    """

    row_cache: RowCache | None
    _memory: Memory
    _prefetcher: Prefetcher | None
    _reporting: Reporting | None
    _forwards: int  # training forwards so far, for optimizers that count them

    def _restore(self) -> None:
        super()._restore()
        self._forwards = 0 if self.hyper.is_meta else self.step

    @atomic
    def set_step(self, step: int) -> None:
        """Continue counting from `step` (>= 0): what bias corrections and row counters see."""
        super().set_step(step)
        self._forwards = step

    def _batch(
        self, indices: Tensor, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None
    ) -> lookups.Lookup:
        raise NotImplementedError

    def _tiers(self) -> lookups.Tiers:
        """All memory of the module as the ops take it."""
        weights, states = self._memory.beside(self.weights.detach(), self._states())
        if self.row_cache is not None:
            weights.append(self.row_cache.weights)
            states.extend(self.row_cache.states)
        return lookups.Tiers(weights, states, self.hyper, self.output_dtype)

    def _views(self) -> list[dict[str, Tensor]]:
        """For each table `weight` and its optimizer states, as they are kept, without the cache."""
        return self._memory.views(self.weights.detach(), self._states())

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Around what overwrites tables behind the back of the cache."""
        with self._lock:
            self._memory.wait_for_kernels(self.hyper.device)
            with self._memory.writing_everything(self.hyper):
                if self._prefetcher is not None:  # not before: a full disk must lose no update
                    self._prefetcher.reset()
                yield

    def prefetch(
        self,
        indices: Tensor,
        offsets: Tensor,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Bring the rows of a coming batch into the cache, on the current stream.

        Batches may be prefetched any number ahead; `forward` must then get the same tensors in the
        same order. Rows of batches on their way, from prefetch to the end of backward, are not
        evicted. A batch that was not prefetched is when `forward` gets it. Without a cached table
        this does nothing.
        """
        if self._prefetcher is not None:
            self._prefetch(self._prefetcher, Given(indices, offsets), batch_sizes)

    @outside_graphs
    def _prefetch(
        self,
        prefetcher: Prefetcher,
        given: Given,
        batch_sizes: Sequence[Sequence[int]] | None,
    ) -> None:
        """A break in a compiled graph: batches on their way are known in Python."""
        timed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self._reporting is not None:
            timed = self._reporting.timed("tbe.prefetch_time", given.indices.device)
        with torch.no_grad(), timed:
            prefetcher.prefetch(self._batch(*given, batch_sizes), self._tiers(), given)

    def flush(self) -> None:
        """Write cached rows and their optimizer state back to their tables.

        For DISK tables this is the point that a crash leads back to, see docs/placement.md.
        """
        if self._prefetcher is not None:
            self._prefetcher.flush(self._tiers())

    def reset_cache_states(self) -> None:
        """Empty the cache without writing anything back: what it held of updates is lost."""
        if self._prefetcher is not None:
            self._prefetcher.reset()

    def cache_stats(self) -> CacheStats:
        """Requests, hits and misses since construction or the last reset (reads the device).

        Raises:
            RuntimeError: no table of the module is cached.
        """
        if self.row_cache is None:
            raise RuntimeError(
                "no table of this module is cached; placements MANAGED_CACHING and DISK are"
            )
        with self._lock:
            return self.row_cache.stats()

    @atomic
    def reset_cache_stats(self) -> None:
        """Count from zero."""
        if self.row_cache is not None:
            self.row_cache.reset_stats()

    def set_stats_reporter(self, reporter: StatsReporter | None, tbe_id: str = "") -> None:
        """Tell `reporter` durations and amounts of this module, as `tbe_id`; None ends it.

        Events: `tbe.forward_time` and `tbe.prefetch_time` in milliseconds, `tbe.lookups`,
        `tbe.weights_bytes` and `tbe.optimizer_state_bytes`, and for cached tables
        `tbe.cache.<counter>` of `CacheStats`, whole and by table.
        """
        self._reporting = None if reporter is None else Reporting(reporter, tbe_id)

    def _report(self, indices: Tensor) -> None:
        reporting = self._reporting
        assert reporting is not None
        if reporting.active:
            reporting.amount("tbe.lookups", indices.numel())
            for name, nbytes in self.nbytes().items():
                reporting.amount(f"tbe.{name}_bytes", nbytes)
            if self.row_cache is not None:
                stats = self.cache_stats()
                for event, value in stats.events():
                    reporting.amount(f"tbe.cache.{event}", value)
        reporting.step += 1

    def table_weights(self) -> list[Tensor]:
        """The tables as `[rows, dim]` views: writing to one writes to the module.

        For cached tables they are of what stands behind the cache, which is flushed and emptied
        first; they go stale with the next batch.
        """
        with self._lock:
            self._settle()
            self._memory.verify()
            return [views["weight"] for views in self._views()]

    def table_optimizer_states(self) -> list[dict[str, Tensor]]:
        """For each table its optimizer state by name, as views: `[rows, dim]`, or `[rows]`."""
        with self._lock:
            self._settle()
            self._memory.verify()
            views = self._views()
        return [{k: v for k, v in tensors.items() if k != "weight"} for tensors in views]

    @atomic
    def _settle(self) -> None:
        """Make the tables themselves current, and the cache empty so that it cannot go stale."""
        if self._prefetcher is not None:
            self.flush()
            self._prefetcher.reset()
        self._memory.wait_for_kernels(self.hyper.device)

    def _checkpoint(self) -> dict[str, Tensor]:
        self._memory.wait_for_kernels(self.hyper.device)
        return {**dict(checkpoint.entries(self.table_names, self._views())), "hyper": self.hyper}

    @atomic
    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self.flush()
        self._memory.verify()
        for key, tensor in self._checkpoint().items():
            destination[prefix + key] = tensor

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As of any module; where `strict` refuses keys, it does before anything is written."""
        if strict:
            checkpoint.check_keys(self._checkpoint(), state_dict)
        return super().load_state_dict(state_dict, strict, assign)

    @atomic
    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        metadata, _, *lists = arguments
        targets = self._checkpoint()
        sources = checkpoint.sources(targets, state_dict, prefix, *lists)
        if not sources:
            return
        if len(sources) < len(targets):
            self._memory.verify()
        if self._prefetcher is not None and len(sources) < len(targets):
            # What is not in the checkpoint stays, also what of it is in the cache.
            sources = checkpoint.own(sources, targets)
            self.flush()
        if self.hyper.is_meta and metadata.get("assign_to_params_buffers"):
            self.to_empty(device=next(iter(sources.values())).device)
        with torch.no_grad(), self._writing():
            for key, target in self._checkpoint().items():
                if key in sources:
                    target.copy_(sources[key])
        self._restore()

    @property
    def _tables_by_name(self) -> SimpleNamespace:
        """The tables and their states by the names they have in state dicts."""
        with self._lock:
            self._memory.verify()
        views = zip(self.table_names, self._views(), strict=True)
        return SimpleNamespace(**{name: SimpleNamespace(**tensors) for name, tensors in views})

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells `torch.distributed.checkpoint.state_dict` where the first part of a key leads."""
        return dict.fromkeys(self.table_names, "_tables_by_name")

    @atomic
    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._memory.check_device(fn(torch.empty(0)).device)
        self._settle()
        super()._apply(fn, recurse)
        self._memory.follow(self.hyper.device)
        return self

    def nbytes(self) -> dict[str, int]:
        """Bytes of `weights`, `optimizer_state`, and `cache` (rows, states and tags)."""
        elsewhere = self._memory.nbytes()
        states = sum(state.nbytes for state in self._states())
        return {
            "weights": self.weights.nbytes + elsewhere["weights"],
            "optimizer_state": states + elsewhere["optimizer_state"],
            "cache": 0 if self.row_cache is None else self.row_cache.nbytes(),
        }
