"""Benchmarks of a day with a GPU: `python -m tests.bench.gpu PART`, see `__main__.py`.

Each module is a part: `run(bench)` measures emblib, and its peers where they are installed, and
hands figures to the `Bench`. `aims.yaml` says what the figures ought to be; `summary.py` compares.
Without a GPU every part runs at tiny size, to see that it works; its numbers then mean nothing.
"""
