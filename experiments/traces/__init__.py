"""What a trace of lookups is like: skew, repetition, working set, and what caches could serve."""
