"""Python side of the native ops `torch.ops.emblib`: loading, shapes for tracing, gradients."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

_PACKAGE = Path(__file__).resolve().parent.parent
_BUILD_COMMAND = "pip install --no-build-isolation -e ."
_MINIMUM_TORCH = (2, 10)


def _load() -> None:
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < _MINIMUM_TORCH:
        raise ImportError(
            f"emblib needs torch >= 2.10 (its stable ABI), found {torch.__version__}; "
            "upgrade torch, e.g.: pip install 'torch>=2.10'"
        )
    _load_library("emblib_cpu")
    if torch.cuda.is_available() and _find("emblib_cuda") is not None:
        _load_library("emblib_cuda")


def _find(name: str) -> Path | None:
    """Find the shared library `name`: next to the package, or where an editable install put it."""
    package = sys.modules["emblib"]  # not imported: it imports this module
    for folder in (_PACKAGE, *map(Path, package.__path__)):
        path = folder / f"lib{name}.so"
        if path.exists():
            return path
    return None


def _load_library(name: str) -> None:
    path = _find(name)
    if path is None:
        raise ImportError(
            f"emblib's native library lib{name}.so is not built for this environment; "
            f"in the emblib source tree run: {_BUILD_COMMAND}"
        )
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise ImportError(
            f"emblib's native library {path.name} does not load with torch "
            f"{torch.__version__}: {error}. Rebuild it: {_BUILD_COMMAND}"
        ) from error


_load()


def require_kernels(device: torch.device) -> None:
    """Raise RuntimeError if tables cannot live on `device` because its kernels are not loaded."""
    if device.type == "cuda" and not torch._C._dispatch_has_kernel_for_dispatch_key(
        "emblib::tbe_lookup", "CUDA"
    ):
        raise RuntimeError(
            "emblib was built without its CUDA library; with nvcc on PATH run: "
            f"EMBLIB_CUDA=ON {_BUILD_COMMAND}"
        )


def empty_table(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate uninitialised memory for a table; on the CPU in huge pages where possible."""
    table = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        torch.ops.emblib.advise_huge_pages_(table)
    return table


def keep_dtype(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap `fn` of `nn.Module._apply` so that a change of dtype only moves between devices.

    The dtypes of a table are chosen when it is made: `model.half()` must neither round the
    optimizer state nor turn a float32 table into another one.
    """

    def move(tensor: Tensor) -> Tensor:
        probe = fn(tensor.new_empty(0))
        return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

    return move


from emblib.ops import (  # noqa: E402
    autograd,
    cache,
    hash,
    primitives,
    quant,
    route,
    tbe,
    tt,
)

__all__ = [
    "autograd",
    "cache",
    "empty_table",
    "hash",
    "keep_dtype",
    "primitives",
    "quant",
    "require_kernels",
    "route",
    "tbe",
    "tt",
]
