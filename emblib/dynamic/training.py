"""The training steps of dynamic tables as far as keys go: who comes, who leaves, who is told."""

import warnings

import torch
from torch import Tensor

from emblib.dynamic.admission import Admission
from emblib.dynamic.expiry import Expiry
from emblib.dynamic.first_rows import FirstRows
from emblib.dynamic.hash_index import Inserted
from emblib.dynamic.lookup import Follower
from emblib.dynamic.outside_states import OutsideStates
from emblib.dynamic.saving.module_dumps import DynamicDumps
from emblib.dynamic.saving.removals import RemovalLog
from emblib.dynamic.scores import Scores
from emblib.dynamic_specs import KeyCheck
from emblib.ops import hash as hash_ops
from emblib.ops.hash import Keys, Misses
from emblib.specs import brief
from emblib.tables.bounds import caller_level
from emblib.tables.locks import atomic


class DynamicTraining(DynamicDumps):
    """Dynamic tables that take in the keys of batches."""

    first_rows: FirstRows
    admission: Admission | None
    scores: Scores | None
    followers: list[Follower]
    removals: RemovalLog | None
    last: Inserted | None
    _expiry: Expiry
    _may_grow: bool

    def _search(self, keys: Keys) -> Tensor:
        """The slots of keys as they are; -1 for those that are not there."""
        return self.index.find(keys)

    def _train(self, keys: Keys, counts: Tensor | None) -> Inserted:
        """One batch of training as far as keys are concerned: everyone who can has a row then."""
        given = None if self.scores is None else self.scores.given()
        filtered = self.admission is not None or bool(self.followers)
        inserted = self.index.insert(
            keys,
            counts,
            given=given,
            admit=self._admit if filtered else None,
            rows=self.value_rows() if self._may_grow else None,
        )
        if self.scores is not None:
            self.scores.advance()
        if inserted.misses is not None:
            self._fill(keys, inserted)
        if self._expiry:
            self._expire()
        self.last = inserted
        if inserted.misses is not None and any(
            spec.check is not KeyCheck.IGNORE for spec in self.tables
        ):
            self._tell_refused(inserted)
        return inserted

    def _admit(self, keys: Keys, misses: Misses) -> Tensor | None:
        """Which of the missing keys may have a row; None for all."""
        admitted = self._decide(keys, misses)
        for follower in self.followers:
            also = follower.admit(keys, misses)
            if also is not None:
                admitted = also if admitted is None else admitted & also
        return admitted

    def _decide(self, keys: Keys, misses: Misses) -> Tensor | None:
        """What admission says of the missing keys; None for all."""
        return None if self.admission is None else self.admission.admit(keys, misses)

    def _fill(self, keys: Keys, inserted: Inserted) -> None:
        """What keys that came and went mean for their rows."""
        self._log_evicted(inserted)
        for follower in self.followers:
            follower.leaving(keys, inserted)
        self.first_rows.write_(self.planes(), keys, inserted)
        for follower in self.followers:
            follower.arriving(keys, inserted)

    @atomic
    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the states that `optimizer` keeps for `weights` begin in zeros with every new key.

        For `optim.External`: an optimizer of torch.optim knows rows, not keys, so without this a
        new key goes on with the states of the one that had its row before.

        Raises:
            ValueError: the weights are not one matrix `[rows, dim]`, or not the optimizer's.
        """
        if self.weights.dim() != 2:
            raise ValueError(
                "an optimizer is attached to tables with optim.External and one dim, got "
                f"{brief(self.optimizer)} and dims {sorted({s.dim for s in self.tables})}"
            )
        groups = optimizer.param_groups
        if not any(p is self.weights for group in groups for p in group["params"]):
            raise ValueError("the optimizer must have the weights of this module among its own")
        firsts = [self.rows.first_row(t) for t in range(len(self.tables))]
        self.followers.append(OutsideStates(optimizer, self.weights, firsts))

    @atomic
    def track_removals(self, most: int = 1 << 24) -> RemovalLog:
        """From now on keep which keys left and when, up to `most` of them a table."""
        if self.removals is None:
            self.removals = RemovalLog(len(self.tables), self.index.tick, most)
        return self.removals

    def _log_evicted(self, inserted: Inserted) -> None:
        if self.removals is None:
            return
        assert inserted.misses is not None
        assert inserted.placed is not None
        left = inserted.placed.status == hash_ops.EVICTING
        before = torch.cat([left.new_zeros(1, dtype=torch.int64), left.cumsum(0)])
        ends = before[inserted.misses.ends[1:]].tolist()
        self.removals.tell_all(inserted.placed.evicted[left, 0], ends, self.index.tick)

    def _expire(self) -> None:
        tick = self.index.tick
        for sweep in self._expiry.sweeps(tick):
            keys = self.index.expire(
                *(sweep.table, sweep.before, sweep.first_bucket, sweep.num_buckets)
            )
            if self.removals is not None:
                self.removals.tell(sweep.table, keys, tick)

    @atomic
    def erase(self, table: int, ids: Tensor) -> Tensor:
        """Remove keys with their rows; bool by position, where one was there (once a key)."""
        keys = self.keys_of(table, ids)
        erased = self.index.erase(keys) >= 0
        if self.removals is not None:
            self.removals.tell(table, keys.ids[erased], self.index.tick)
        return erased

    def _tell_refused(self, inserted: Inserted) -> None:
        """Warns or raises for keys that found no place, as the tables ask (waits for CUDA)."""
        assert inserted.misses is not None
        assert inserted.placed is not None
        refused = inserted.placed.status == hash_ops.REFUSED
        if not bool(refused.any()):
            return
        ends = inserted.misses.ends.tolist()
        for t, spec in enumerate(self.tables):
            count = int(refused[ends[t] : ends[t + 1]].sum())
            if not count or spec.check is KeyCheck.IGNORE:
                continue
            told = (
                f"emblib: {count} keys found no place in table {self.table_names[t]!r} of capacity "
                f"{spec.rows} (eviction {spec.eviction.value}): they read {spec.missing} and are "
                "not trained; choose a larger capacity, or smaller batches"
            )
            if spec.check is KeyCheck.ERROR:
                raise RuntimeError(told)
            warnings.warn(told, stacklevel=caller_level())
