"""Timing: clocks, warm-up, the race of contenders, and statistics."""
