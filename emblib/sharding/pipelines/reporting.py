"""How far a pipeline is, and how fast it goes."""

import time
from collections import deque
from typing import NamedTuple

from emblib.sharding.pipelines.loading import Counted


class Progress(NamedTuple):
    """What the callback of a pipeline gets after every step.

    Attributes:
        step: steps done, this one among them.
        own_examples: examples of this rank so far.
        examples: examples of all ranks so far; None where the pipeline does not know (`Equal`).
        elapsed_s: seconds from the beginning of the first step to the end of this one.
        steps_per_s: over the last steps, at most `WINDOW` of them.
        own_examples_per_s: likewise, of this rank.
        examples_per_s: likewise, of all ranks.

    The clock is the host's. A GPU may be behind by the steps that are enqueued; over a window of
    steps that is little.
    """

    step: int
    own_examples: int
    examples: int | None
    elapsed_s: float
    steps_per_s: float
    own_examples_per_s: float
    examples_per_s: float | None

    def __str__(self) -> str:
        everywhere = self.examples_per_s is not None
        rate = self.examples_per_s if everywhere else self.own_examples_per_s
        count = self.examples if everywhere else self.own_examples
        where = "" if everywhere else " (this rank)"
        return (
            f"step {self.step}: {count} examples in {self.elapsed_s:.1f} s, "
            f"{self.steps_per_s:.2f} steps/s, {rate:.0f} examples/s{where}"
        )


WINDOW = 20


class _Mark(NamedTuple):
    time_s: float
    step: int
    own: int
    all: int | None


class Meter:
    """Counts steps and examples."""

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque(maxlen=WINDOW + 1)
        self._start_s = 0.0
        self._is_paused = False

    @property
    def step(self) -> int:
        """Steps done."""
        return self._marks[-1].step if self._marks else 0

    def begin(self) -> None:
        """Called when a step begins; what passes between two steps counts as time of the second."""
        if not self._marks:
            self._start_s = time.perf_counter()
            self._marks.append(_Mark(self._start_s, 0, 0, 0))
        elif self._is_paused:
            last = self._marks[-1]
            self._marks.clear()
            self._marks.append(last._replace(time_s=time.perf_counter()))
        self._is_paused = False

    def pause(self) -> None:
        """Called when the batches are drained: time until the next step does not count."""
        self._is_paused = True

    def end(self, counted: Counted) -> Progress:
        """Called when a step has ended."""
        last = self._marks[-1]
        everywhere = None if counted.all is None or last.all is None else last.all + counted.all
        now = _Mark(time.perf_counter(), last.step + 1, last.own + counted.own, everywhere)
        self._marks.append(now)
        first = self._marks[0]
        window_s = max(now.time_s - first.time_s, 1e-9)
        known = None if now.all is None or first.all is None else (now.all - first.all) / window_s
        return Progress(
            now.step,
            now.own,
            now.all,
            now.time_s - self._start_s,
            (now.step - first.step) / window_s,
            (now.own - first.own) / window_s,
            known,
        )
