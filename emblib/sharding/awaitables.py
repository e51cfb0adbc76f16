"""Awaitables: results of operations that are still in flight.

`Awaitable.wait()` waits and returns the result. A `LazyAwaitable` can be used like its result; its
first use waits. In a sharded lookup, the input_dist returns an `Awaitable`, and a collection a
`LazyAwaitable` as its output.
"""

from __future__ import annotations

import operator
from abc import ABCMeta
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar

from emblib.jagged.jagged_tensor import TracedClass
from emblib.tables.graph_break import run_uncompiled

T = TypeVar("T")


class Awaitable(Generic[T]):
    """A result that `wait()` returns; used by one thread.

    A subclass defines `_wait_impl`, which the first `wait` calls; its `__init__` need not call that
    of this class. If `_wait_impl` or a callback
    raises in the first `wait`, every further `wait` raises the same error, because an operation in
    flight cannot be retried. If it was not an Exception, e.g. a KeyboardInterrupt, every further
    `wait` raises RuntimeError.
    """

    _result: Any
    _callbacks: list[Callable[[Any], Any]]

    def __new__(cls, *_arguments: Any, **_options: Any) -> Self:
        """Create an awaitable without a result."""
        awaitable = super().__new__(cls)
        awaitable._result, awaitable._callbacks = _PENDING, []
        return awaitable

    def wait(self) -> T:
        """Wait for the result, pass it through the callbacks and return it.

        Further calls return the same object.
        """
        if self._result is _PENDING:
            try:
                self._result = self._finish()
            except BaseException as error:
                self._result = _Failure.from_error(error)
                raise
        elif type(self._result) is _Failure:
            raise self._result.error
        return self._result

    def then(self, callback: Callable[[T], Any]) -> Awaitable[Any]:
        """Replace the result by `callback(result)` when it is waited for; return this awaitable.

        Callbacks run once, in the order in which they were added. After the first `wait` a callback
        runs immediately, and its result replaces that of further `wait` calls; if it raises, `then`
        raises its error and the result stays. If the first `wait` has failed, `then` raises the
        error of that `wait`.
        """
        if self._result is _PENDING:
            self._callbacks.append(callback)
        else:
            self._result = callback(self.wait())
        return self

    @property
    def callbacks(self) -> list[Callable[[Any], Any]]:
        """Return the list of callbacks that the first `wait` will run.

        More may be appended; those that are appended after that `wait` do not run.
        """
        return self._callbacks

    def _finish(self) -> T:
        """Wait for the result, and return it as the callbacks have changed it."""
        result: Any = self._wait_impl()
        for callback in self._callbacks:
            result = callback(result)
        self._callbacks.clear()
        return result

    def _wait_impl(self) -> T:
        raise NotImplementedError(f"{type(self).__name__} must define _wait_impl")

    def __fx_create_arg__(self, tracer: Any) -> Any:
        """Return the argument of a node in a graph of `torch.fx`: that of the result; it waits."""
        return tracer.create_arg(self.wait())


class ReadyAwaitable(Awaitable[T]):
    """An awaitable whose result is available already."""

    def __init__(self, obj: T) -> None:
        super().__init__()
        self._value = obj

    def _wait_impl(self) -> T:
        value = self._value
        del self._value
        return value


class DeferredAwaitable(Awaitable[T]):
    """The result of `function()`, which the first `wait` calls."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function = function

    def _wait_impl(self) -> T:
        function = self._function
        del self._function  # frees the objects that the function refers to once it has run
        return function()


class _LazyClass(TracedClass, ABCMeta):
    """Type of lazy awaitables, which may also be abstract: see `TracedClass`."""


class LazyAwaitable(Awaitable[T], metaclass=_LazyClass):
    """An awaitable that can be used in place of its result: the first use waits.

    Reads of attributes and items, iteration, arithmetic, comparisons, `len`, `in`, `bool`, `int`,
    `float` and torch functions wait and then act on the result. Other uses see the awaitable, such
    as `isinstance`, `hash`, `repr`, assignments, the methods of `Awaitable`, and attributes with a
    leading underscore. `lazy += x` binds the name to a new object. In a graph of `torch.fx`, the
    construction from traced values is one call.
    """

    @run_uncompiled
    def wait(self) -> T:
        """Return the result, like `Awaitable.wait`, outside of any compiled graph."""
        return super().wait()

    def __getattr__(self, name: str) -> Any:
        # Called only for attributes that this object lacks. Private and special names are never
        # looked up in the result: copying or printing an awaitable must not wait.
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
        """Call a torch function with awaitables replaced by their results, see `wait_all`."""
        return function(*map(wait_all, args), **wait_all(kwargs or {}))

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


class LazyReadyAwaitable(LazyAwaitable[T]):
    """A `LazyAwaitable` whose result is available already."""

    def __init__(self, obj: T) -> None:
        super().__init__()
        self._value = obj

    def _wait_impl(self) -> T:
        value = self._value
        del self._value
        return value


class LazyDeferredAwaitable(LazyAwaitable[T]):
    """The result of `function()`, which the first use calls."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function = function

    def _wait_impl(self) -> T:
        function = self._function
        del self._function
        return function()


def wait_all(value: Any) -> Any:
    """Return `value` with the results of awaitables in their place.

    `value` is an awaitable, or a list, tuple or dict that contains some at any depth, which is
    copied. Other values are returned unchanged, also instances of subclasses, e.g. named tuples.
    """
    if isinstance(value, Awaitable):
        return value.wait()
    if type(value) is tuple or type(value) is list:
        return type(value)(map(wait_all, value))
    if type(value) is dict:
        return {key: wait_all(element) for key, element in value.items()}
    return value


class _Failure:
    """An error in place of a result."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    @classmethod
    def from_error(cls, error: BaseException) -> _Failure:
        """Return the failure of a wait that ended with an error."""
        if isinstance(error, Exception):
            return cls(error)
        name = type(error).__name__
        return cls(RuntimeError(f"{name} ended the wait for this result, which cannot be retried"))


_PENDING = object()  # no result yet; None may be a result


def _operator_method(name: str) -> Callable[..., Any]:
    """Return a method that applies a unary or binary operator to the awaited result."""
    operation = getattr(operator, f"__{name}__")

    def method(self: LazyAwaitable[Any], *others: Any) -> Any:
        return operation(self.wait(), *map(wait_all, others))

    return method


def _reflected_method(name: str) -> Callable[..., Any]:
    """Return a method that applies a binary operator with the awaited result on the right."""
    operation = getattr(operator, f"__{name}__")

    def method(self: LazyAwaitable[Any], other: Any) -> Any:
        return operation(wait_all(other), self.wait())

    return method


_ARITHMETIC = (
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"),
    *("and", "or", "xor", "lshift", "rshift"),
)
for _name in (*_ARITHMETIC, *("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge")):
    setattr(LazyAwaitable, f"__{_name}__", _operator_method(_name))
for _name in _ARITHMETIC:
    setattr(LazyAwaitable, f"__r{_name}__", _reflected_method(_name))
