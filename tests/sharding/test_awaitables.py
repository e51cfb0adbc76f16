"""Awaitables give one result, once; lazy ones stand for it."""

import pytest
import torch
from torch import Tensor

from emblib.sharding.awaitables import (
    Awaitable,
    DeferredAwaitable,
    LazyAwaitable,
    LazyDeferredAwaitable,
    LazyReadyAwaitable,
    ReadyAwaitable,
    wait_all,
)


class _Counted(Awaitable[list[int]]):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def _wait_impl(self) -> list[int]:
        self.calls += 1
        return [self.calls]


def test_one_result_once() -> None:
    under_way = _Counted()
    assert under_way.calls == 0
    assert under_way.wait() is under_way.wait()
    assert under_way.calls == 1
    assert ReadyAwaitable(None).wait() is None
    nothing = DeferredAwaitable(lambda: None)
    assert nothing.wait() is None
    assert nothing.wait() is None  # not called again: None is a result


def test_callbacks_in_order_once() -> None:
    seen: list[list[int]] = []
    under_way = _Counted().then(lambda r: [*r, 2]).then(lambda r: seen.append(r) or r)
    assert not seen
    assert under_way.wait() == [1, 2]
    assert under_way.wait() == [1, 2]
    assert seen == [[1, 2]]
    assert under_way.then(lambda r: [*r, 3]).wait() == [1, 2, 3]  # after the first wait


def test_an_error_stays() -> None:
    calls = []

    def fail() -> None:
        calls.append(0)
        raise OSError("the network")

    under_way = DeferredAwaitable(fail)
    for _ in range(2):
        with pytest.raises(OSError, match="the network"):
            under_way.wait()
    assert calls == [0]
    with pytest.raises(NotImplementedError, match="Awaitable must define _wait_impl"):
        Awaitable().wait()


def test_an_interrupted_wait_says_so() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    under_way = LazyDeferredAwaitable(interrupt)
    with pytest.raises(KeyboardInterrupt):
        under_way.wait()
    with pytest.raises(RuntimeError, match="KeyboardInterrupt ended the wait"):
        under_way.then(lambda value: value)
    with pytest.raises(RuntimeError, match="KeyboardInterrupt ended the wait"):
        _ = under_way.shape


def test_what_the_function_held_is_free() -> None:
    class Big:
        alive = True

        def __del__(self) -> None:
            Big.alive = False

    big = Big()
    under_way = DeferredAwaitable(lambda held=big: 1)
    del big
    assert Big.alive
    assert under_way.wait() == 1
    assert not Big.alive


def _lazy(value: Tensor) -> LazyAwaitable[Tensor]:
    return LazyDeferredAwaitable(lambda: value)


def test_lazy_waits_when_touched() -> None:
    calls = []

    def make() -> Tensor:
        calls.append(0)
        return torch.arange(6.0).view(2, 3)

    lazy = LazyDeferredAwaitable(make)
    assert isinstance(lazy, LazyAwaitable)
    repr(lazy)
    assert not hasattr(lazy, "__array__")
    assert not hasattr(lazy, "_something")
    assert calls == []
    assert lazy.shape == (2, 3)
    assert calls == [0]
    assert lazy.sum() == 15
    assert len(lazy) == 2
    assert calls == [0]


def test_lazy_acts_as_its_result() -> None:
    value = torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.cat([_lazy(value), value], dim=1), torch.cat([value, value], 1))
    assert torch.equal(torch.add(_lazy(value), other=_lazy(value)), 2 * value)
    assert torch.equal(_lazy(value) @ _lazy(value.t()), value @ value.t())
    assert torch.equal(1 - _lazy(value), 1 - value)
    assert torch.equal(value * _lazy(value), value * value)
    assert torch.equal(-_lazy(value), -value)
    assert torch.equal(abs(_lazy(-value)), value)
    assert torch.equal(_lazy(value)[1], value[1])
    assert torch.equal(_lazy(value) > 2, value > 2)
    assert torch.equal(_lazy(value) == value, value == value)
    assert [row.tolist() for row in _lazy(value)] == value.tolist()
    assert float(LazyReadyAwaitable(torch.tensor(2.5))) == 2.5
    assert int(LazyReadyAwaitable(torch.tensor(2))) == 2
    assert not LazyReadyAwaitable(torch.tensor(0.0))
    lazy_dict = LazyReadyAwaitable({"a": 1})
    assert lazy_dict["a"] == 1
    assert "a" in lazy_dict
    assert list(lazy_dict.keys()) == ["a"]
    with pytest.raises(AttributeError, match="no_such"):
        _ = _lazy(value).no_such


def test_lazy_carries_gradients() -> None:
    leaf = torch.ones(3, requires_grad=True)
    torch.nn.functional.relu(_lazy(leaf * 2)).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2.0, 2.0, 2.0]


def test_wait_all() -> None:
    value = torch.ones(2)
    found = wait_all({"a": [ReadyAwaitable(1), (LazyReadyAwaitable(value), 3)], "b": None})
    assert found == {"a": [1, (value, 3)], "b": None}


def test_callbacks_may_be_appended() -> None:
    ready = ReadyAwaitable(2)
    ready.callbacks.append(lambda value: value + 1)
    ready.callbacks.append(lambda value: value * 10)
    assert ready.wait() == 30
    assert ready.wait() == 30


class _WithoutInit(LazyAwaitable[Tensor]):
    def __init__(self, value: Tensor) -> None:  # does not call that of the base class
        self.value = value

    def _wait_impl(self) -> Tensor:
        return self.value


def test_a_subclass_need_not_call_the_base_class() -> None:
    lazy = _WithoutInit(torch.ones(2)).then(lambda value: value + 1)
    assert lazy.tolist() == [2.0, 2.0]


class _Doubled(LazyAwaitable[Tensor]):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    def _wait_impl(self) -> Tensor:
        return self.values.mul_(2)  # in place, which a trace of it would not show


def test_traces_construct_awaitables() -> None:
    def difference(values: Tensor) -> Tensor:
        pending = _Doubled(values)
        return values + 1 - pending

    traced = torch.fx.symbolic_trace(difference)
    assert traced(torch.arange(3.0)).tolist() == difference(torch.arange(3.0)).tolist()
    assert torch.fx.symbolic_trace(lambda: ReadyAwaitable(3))() == 3
