"""Results that are under way: what a collective returns before its data have come.

`Awaitable.wait()` gives the result, and the same object every time it is called. A `LazyAwaitable`
also waits by itself wherever it is used as its result.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from emblib.tables.outside import outside_graphs

T = TypeVar("T")
S = TypeVar("S")


class Awaitable(Generic[T]):
    """A result that `wait()` returns.

    A kind of its own gives `_wait_impl`, which is called once. If that raises, `wait` raises the
    same error each time: what was under way cannot be tried again.
    """

    def __init__(self) -> None:
        self._result: Any = _NOTHING
        self._callbacks: list[Callable[[Any], Any]] = []

    def wait(self) -> T:
        """The result, when it has come and every callback has had it."""
        if self._result is _NOTHING:
            try:
                self._result = self._finish()
            except Exception as error:
                self._result = _Failed(error)
                raise
        elif type(self._result) is _Failed:
            raise self._result.error
        return self._result

    def then(self, callback: Callable[[T], Any]) -> Awaitable[Any]:
        """Replace the result by `callback(result)` when it is waited for; returns itself.

        Callbacks run once, in the order in which they were added. After the first `wait` they run
        at once.
        """
        if self._result is _NOTHING:
            self._callbacks.append(callback)
        else:
            self._result = callback(self.wait())
        return self

    def _finish(self) -> T:
        result: Any = self._wait_impl()
        for callback in self._callbacks:
            result = callback(result)
        self._callbacks.clear()
        return result

    def _wait_impl(self) -> T:
        raise NotImplementedError(f"{type(self).__name__} must define _wait_impl")


class NoWait(Awaitable[T]):
    """A result that is already there."""

    def __init__(self, value: T) -> None:
        super().__init__()
        self._value = value

    def _wait_impl(self) -> T:
        value = self._value
        del self._value
        return value


class Deferred(Awaitable[T]):
    """The result of `function()`, which is called by the first `wait`."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function = function

    def _wait_impl(self) -> T:
        function = self._function
        del self._function  # what it holds is free once it has run
        return function()


class LazyAwaitable(Awaitable[T]):
    """An awaitable that stands for its result: it waits when it is touched.

    Attributes, items, iteration, operators and torch functions all wait and then act on the result.
    `isinstance` alone tells the two apart; `wait()` gives the result itself.
    """

    # Names of its own, which never wait.
    _result: Any
    _callbacks: list[Callable[[Any], Any]]

    @outside_graphs
    def wait(self) -> T:
        """The result, as of `Awaitable`; what it waits for is no part of a compiled graph."""
        return super().wait()

    def __getattr__(self, name: str) -> Any:
        # Only called for what is not found here. Private and special names are never of the
        # result: copying or printing something half-made must not wait.
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.wait(), name)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call a torch function with results in the place of awaitables."""
        return function(*map(waited, args), **{k: waited(v) for k, v in (kwargs or {}).items()})

    def __getitem__(self, key: Any) -> Any:
        return self.wait()[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.wait())  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wait())  # type: ignore[call-overload]

    def __contains__(self, item: Any) -> bool:
        return item in self.wait()  # type: ignore[operator]

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return bool(self.wait())

    def __float__(self) -> float:
        return float(self.wait())  # type: ignore[arg-type]

    def __int__(self) -> int:
        return int(self.wait())  # type: ignore[call-overload]


class LazyNoWait(LazyAwaitable[T], NoWait[T]):
    """A result that is already there, in the form that a caller expects to be lazy."""


class LazyDeferred(LazyAwaitable[T], Deferred[T]):
    """The result of `function()`, which is called by the first use."""


def waited(value: Any) -> Any:
    """The value with every awaitable in it, also in lists, tuples and dicts, waited for."""
    if isinstance(value, Awaitable):
        return value.wait()
    if type(value) is tuple or type(value) is list:
        return type(value)(map(waited, value))
    if type(value) is dict:
        return {key: waited(item) for key, item in value.items()}
    return value


class _Nothing:
    """Stands for a result that has not come; None may be one."""


class _Failed:
    def __init__(self, error: Exception) -> None:
        self.error = error


_NOTHING = _Nothing()


def _operator(name: str) -> Callable[..., Any]:
    act = getattr(operator, f"__{name}__")

    def method(self: LazyAwaitable[Any], *others: Any) -> Any:
        return act(self.wait(), *map(waited, others))

    return method


def _reflected(name: str) -> Callable[..., Any]:
    act = getattr(operator, f"__{name}__")

    def method(self: LazyAwaitable[Any], other: Any) -> Any:
        return act(waited(other), self.wait())

    return method


_ARITHMETIC = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
for _name in (*_ARITHMETIC, *("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge")):
    setattr(LazyAwaitable, f"__{_name}__", _operator(_name))
for _name in _ARITHMETIC:
    setattr(LazyAwaitable, f"__r{_name}__", _reflected(_name))
