"""Traces through caches: hit rates beside the best that any cache could do."""
