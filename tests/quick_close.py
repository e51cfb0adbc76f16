"""Compare plain tensors of the CPU without the objects that `torch.testing.assert_close` makes.

It takes 0.1 ms and more per call to prepare a message that few calls need: a tenth of the processor
time of tests of operations. What is not close by the same comparison, or is not a plain tensor,
goes to the original, which decides and explains.
"""

from collections.abc import Callable
from typing import Any

import torch

_assert_close: Callable[..., None] = torch.testing.assert_close
# Dtypes of floats whose defaults the original documents: (rtol, atol).
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}


def is_close(actual: object, expected: object, **options: Any) -> bool:
    """Return whether two plain tensors are close; False where only the original can tell.

    Args:
        actual: first argument of `torch.testing.assert_close`.
        expected: second argument.
        options: other arguments; `msg` does not matter, and `rtol` and `atol` come together.
    """
    if not (
        type(actual) is type(expected) is torch.Tensor
        and options.keys() <= {"rtol", "atol", "msg"}
        and actual.is_cpu
        and expected.is_cpu
        and actual.layout is expected.layout is torch.strided
        and actual.dtype == expected.dtype
        and actual.shape == expected.shape
        and not actual.is_quantized
    ):
        return False
    rtol, atol = options.get("rtol"), options.get("atol")
    if (rtol is None) != (atol is None) or (rtol is not None and not min(rtol, atol) >= 0.0):
        return False
    if torch.equal(actual, expected):
        return True
    if actual.dtype not in _TOLERANCES:
        return False
    if rtol is None:
        rtol, atol = _TOLERANCES[actual.dtype]
    return bool(torch.isclose(actual, expected, rtol=rtol, atol=atol).all())


def assert_close(actual: Any, expected: Any, **options: Any) -> None:
    """Do what `torch.testing.assert_close` does."""
    __tracebackhide__ = True
    if not is_close(actual, expected, **options):
        _assert_close(actual, expected, **options)


def install() -> None:
    """Replace `torch.testing.assert_close` for all that run in this process."""
    torch.testing.assert_close = assert_close


def pytest_configure() -> None:
    """Install it before tests are imported."""
    install()
