"""Record which rows a model looks up, and save them in a small file.

A trace has for each feature, sample by sample, the ids that were looked up. It has no embeddings,
no sample weights, and no order in time between features. `TraceRecorder` records one while a model
runs; a benchmark replays it.
"""

from emblib.trace.file import LookupTrace, TracedFeature, sha256
from emblib.trace.recorder import TraceRecorder

__all__ = ["LookupTrace", "TraceRecorder", "TracedFeature", "sha256"]
