"""Record which rows a model looks up, and keep that as a small file.

A trace says for each feature, sample by sample, which ids were looked up. It holds no embeddings,
no weights of samples and no order of time between features. `TraceRecorder` writes one while a
model runs; a benchmark replays it.
"""

from emblib.trace.file import LookupTrace, TracedFeature, sha256
from emblib.trace.recorder import TraceRecorder

__all__ = ["LookupTrace", "TraceRecorder", "TracedFeature", "sha256"]
