"""Timing: clocks, warm-up, the race of contenders, statistics, memory and energy."""
