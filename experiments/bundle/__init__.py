"""Archives of results that others can verify: `python run.py bundle`.

A bundle has runs with their raw samples, the configuration tree, the source, the commands and
checksums. `verify` rebuilds every number from the samples; `verify --rerun` measures again and
compares the claims of the runs.
"""
