"""FBGEMM itself, where it is installed: its names in one namespace, imported without its noise."""

import importlib
import types
import warnings
from functools import cache

import pytest


@cache
def _import() -> types.SimpleNamespace | str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            training = importlib.import_module(
                "fbgemm_gpu.split_table_batched_embeddings_ops_training"
            )
            configs = importlib.import_module("fbgemm_gpu.split_embedding_configs")
    except (ImportError, OSError) as error:
        return f"fbgemm_gpu does not import: {error}"
    return types.SimpleNamespace(**(vars(configs) | vars(training)))


def fbgemm() -> types.SimpleNamespace:
    """FBGEMM's names; skips the test where it is not installed or not made for this torch."""
    found = _import()
    if isinstance(found, str):
        pytest.skip(found)
    return found
