"""Results as an archive that somebody else can check: `python -m experiments.bundle`.

A bundle holds runs with their raw samples, the configuration tree, the source, the commands and a
checksum of everything. `verify` rebuilds every number from the samples; `verify --rerun` measures
again and compares what the runs claim.
"""
