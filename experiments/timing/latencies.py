"""Latencies of requests, counted in buckets of 1 %, because there are too many to store.

A record of kind serving has points. A point has a number of clients, a load, and `latencies`, a
list of [bucket, number of requests]. The load is CLOSED, or the rate of arrival ÷ the rate of
answers at load CLOSED. Counts of several points can be added.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

BUCKET = 1.01  # end of a bucket ÷ its start
CLOSED = 0.0  # load of clients that send a request as soon as the last one was answered


def phase_of(clients: int) -> str:
    """Return the key of a record's `samples` for a number of clients at load CLOSED."""
    return f"{clients} clients"


def bucket_of(latency_ns: int) -> int:
    """Return the bucket of a latency, which is counted as 1 ns at least.

    Bucket b has latencies from BUCKET ** b ns to less than BUCKET ** (b + 1) ns.
    """
    return math.floor(math.log(max(latency_ns, 1)) / math.log(BUCKET))


def counts_of(points: Iterable[Mapping[str, Any]]) -> Counter[int]:
    """Return the latencies of all points together, {bucket: number of requests}."""
    total: Counter[int] = Counter()
    for point in points:
        total.update({int(bucket): count for bucket, count in point["latencies"]})
    return total


def latency_quantile_s(counts: Mapping[int, int], p: float) -> float:
    """Return the p-quantile of latencies {bucket: number of requests} in seconds, p in (0, 1].

    It is the middle of a bucket, so within 0.5 % of the latency itself. nan without a request.
    """
    rank, num_counted = p * sum(counts.values()), 0
    for bucket in sorted(counts):
        num_counted += counts[bucket]
        if num_counted >= rank:
            return BUCKET ** (bucket + 0.5) / 1e9
    return math.nan
