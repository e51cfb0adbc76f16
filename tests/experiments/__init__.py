"""Tests of the harness: configuration, workloads, timing, statistics, store and reports."""
