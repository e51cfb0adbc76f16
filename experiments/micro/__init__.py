"""Micro-benchmarks of single operations: pytest-benchmark times them, the store keeps them.

`python run.py +experiment=micro` does both; `python -m experiments.micro RUN.json` takes the JSON
of a run of pytest-benchmark that somebody else started.
"""
