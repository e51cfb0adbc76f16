"""Python side of the native ops `torch.ops.emblib`: loading, shapes for tracing, gradients."""

import platform
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

_PACKAGE = Path(__file__).resolve().parent.parent
_SOURCE = _PACKAGE.parent  # root of a checkout, with csrc; an installed wheel has no csrc there
_MINIMUM_TORCH = (2, 10)


def _load() -> None:
    """Load the native libraries: `emblib_cpu`, and `emblib_cuda` where there is a GPU."""
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < _MINIMUM_TORCH:
        raise ImportError(
            f"emblib needs torch >= 2.10 (its stable ABI), found {torch.__version__}; "
            "upgrade torch, e.g.: pip install 'torch>=2.10'"
        )
    _load_library("emblib_cpu")
    if torch.cuda.is_available() and _library_path("emblib_cuda") is not None:
        _load_library("emblib_cuda")


def _library_path(name: str) -> Path | None:
    """Return the path of the shared library `name`, None if it is missing.

    It is next to the package, or where an editable install put it.
    """
    package = sys.modules["emblib"]  # not imported: it imports this module
    for folder in (_PACKAGE, *map(Path, package.__path__)):
        path = folder / f"lib{name}.so"
        if path.exists():
            return path
    return None


def _load_library(name: str) -> None:
    """Load one library; raise ImportError with advice if it is missing or does not load."""
    path = _library_path(name)
    if path is None:
        raise ImportError(f"emblib's native library lib{name}.so is missing; {_advice()}")
    try:
        torch.ops.load_library(path)
    except OSError as error:
        reason = str(error.__cause__ or error)  # torch wraps the error of the dynamic loader
        raise ImportError(
            f"emblib's native library {path} does not load with torch {torch.__version__}: "
            f"{reason}. {_explanation(reason)}{_advice()}"
        ) from error


def _advice() -> str:
    """Return the advice for a library that does not load: build it, or install emblib again."""
    if (_SOURCE / "csrc" / "CMakeLists.txt").exists():
        return (
            f"emblib was imported from its source tree {_SOURCE}. Build the library in there with "
            "`pip install -e .`, or, if emblib is installed, start Python in another folder"
        )
    return (
        "Install emblib again with `pip install --force-reinstall --no-deps emblib`; add "
        "`--no-binary emblib` to compile it on this machine (a C++20 compiler is needed)"
    )


def _explanation(error: str) -> str:
    """Return an explanation of an error of the dynamic loader; "" for an unusual error."""
    if missing := re.search(r"version `((?:GLIBC|GLIBCXX|CXXABI)_[\d.]+)' not found", error):
        libc = " ".join(platform.libc_ver())
        return f"It was built for a newer system: it needs {missing[1]}, this one has {libc}. "
    if "ELF" in error or "file too short" in error:
        machine = platform.machine()
        return f"The file is damaged or of another processor; this one is {machine}. "
    if "undefined symbol" in error or "libtorch" in error:
        return "This torch lacks what emblib calls: is it complete, and from PyTorch's own wheels? "
    return ""


_load()


def require_kernels(device: torch.device) -> None:
    """Raise RuntimeError, with advice, unless the kernels for `device` are loaded and can run."""
    primitives.refuse_fake_mode()
    if device.type != "cuda" or torch._C._dispatch_has_kernel_for_dispatch_key(
        "emblib::tbe_lookup", "CUDA"
    ):
        return
    if _library_path("emblib_cuda") is not None:
        raise RuntimeError(
            "emblib's CUDA library was not loaded, because torch.cuda.is_available() was False "
            f"when emblib was imported (torch {torch.__version__}, for CUDA {torch.version.cuda}): "
            "check the driver with nvidia-smi, and that torch is a CUDA build"
        )
    is_checkout = (_SOURCE / "csrc" / "CMakeLists.txt").exists()
    reinstall = "--force-reinstall --no-deps --no-binary emblib emblib"
    pip_arguments = f"-e {_SOURCE}" if is_checkout else reinstall
    raise RuntimeError(
        "this emblib was built without its CUDA library, as the wheels on PyPI are: take the +cu "
        f"wheel of the same release, or, with nvcc on PATH, run: EMBLIB_CUDA=ON pip install "
        f"{pip_arguments}"
    )


def empty_table(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate uninitialised memory for a table, on the CPU in huge pages where possible."""
    table = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        torch.ops.emblib.advise_huge_pages_(table)
    return table


def keep_dtype(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap `fn` of `nn.Module._apply` so that it moves tensors between devices, dtypes unchanged.

    The dtypes of a table are chosen at its construction: `model.half()` must neither round the
    optimizer state nor change the dtype of the weights.
    """

    def move(tensor: Tensor) -> Tensor:
        probe = fn(tensor.new_empty(0))
        return fn(tensor) if probe.dtype == tensor.dtype else tensor.to(probe.device)

    return move


@contextmanager
def keeping_parameters() -> Iterator[None]:
    """Make moves and loads of `nn.Module` write into parameters, not swap or replace them.

    `torch.__future__` can select either for all modules of the process, so no other thread should
    move modules meanwhile if it does. Lookups read the memory of the parameters that there are.
    Also a decorator.
    """
    future = torch.__future__
    swaps = future.get_swap_module_params_on_conversion()
    replaces = future.get_overwrite_module_params_on_conversion()
    if not (swaps or replaces):
        yield
        return
    future.set_swap_module_params_on_conversion(False)
    future.set_overwrite_module_params_on_conversion(False)
    try:
        yield
    finally:
        future.set_swap_module_params_on_conversion(swaps)
        future.set_overwrite_module_params_on_conversion(replaces)


try:
    from emblib.ops import (
        autograd,
        cache,
        hash,
        pages,
        primitives,
        quant,
        route,
        tbe,
        tiers,
        tt,
    )
except AttributeError as missing_op:
    if "_OpNamespace" not in str(missing_op):
        raise
    raise ImportError(
        f"emblib's native library {_library_path('emblib_cpu')} is older than the Python files "
        f"({missing_op}). {_advice()}"
    ) from missing_op

for _op in (
    "advise_huge_pages_",
    "cache_flush_",
    "cache_move_",
    "fill_uniform_",
    "hash_add_rows_",
    "hash_grow_",
    "hash_initial_rows_",
    "hash_write_rows_",
    "mark_pages_",
    "quantize_rows_",
    "tbe_backward_",
    "tbe_update_",
    "tier_write_",
    "tt_backward_",
    "tt_count_",
    "tt_update_",
    "update_rows_",
):
    # They only change their arguments, so that a trace has nothing to build for them.
    torch.library.register_fake(f"emblib::{_op}", lambda *arguments: None)

__all__ = [
    "autograd",
    "cache",
    "empty_table",
    "hash",
    "keep_dtype",
    "pages",
    "primitives",
    "quant",
    "require_kernels",
    "route",
    "tbe",
    "tiers",
    "tt",
]
