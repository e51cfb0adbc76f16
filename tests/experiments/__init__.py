"""Tests of the harness: configuration, workloads, timing, statistics, store and reports."""

from pathlib import Path

# A whole run of the first schema (one process a cell), kept so that such runs stay readable.
FIRST_SCHEMA = Path(__file__).parent / "first_schema" / "tt_vs_tbe"
