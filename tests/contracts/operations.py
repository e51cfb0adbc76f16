"""What users of `nn.EmbeddingBag` and `torch.optim` do: the rows of docs/contracts.md.

An operation does something to a subject and asserts what torch promises about it. If it returns,
the contract holds; if it raises anything but an AssertionError, the library refused; an
AssertionError is a silent wrong result.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.utils import parameters_to_vector, parametrize, vector_to_parameters

from tests.contracts.subjects import IDS, Subject
from tests.saved import saved_and_loaded

Operation = Callable[[Subject], None]
OPERATIONS: dict[str, dict[str, Operation]] = {}
"""By section, then by name."""


class NotApplicable(Exception):  # no error
    """The kind of table has nothing that the operation could act on."""


def operation(section: str, name: str) -> Callable[[Operation], Operation]:
    def register(function: Operation) -> Operation:
        OPERATIONS.setdefault(section, {})[name] = function
        return function

    return register


def same(a: Tensor, b: Tensor, message: str, tolerance: float = 1e-6) -> None:
    assert torch.allclose(a.float(), b.float(), rtol=tolerance, atol=tolerance), message


def parameters(s: Subject) -> dict[str, nn.Parameter]:
    found = s.parameters()
    if not found:
        raise NotApplicable("no parameters")
    return found


def trained(s: Subject) -> None:
    if not s.kind.is_trained:
        raise NotApplicable("for inference only")


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has a parameter, and its name there, which may be dotted."""
    for path, part in module.named_modules():
        leaf = name.removeprefix(f"{path}." if path else "")
        if leaf in part._parameters and (not path or leaf != name):
            return part, leaf
    raise KeyError(name)


HALF = 0.5  # of every parameter; cores of rank 2 then make rows of 2 * 0.5 * 0.5


def halves(like: Tensor) -> Tensor:
    return torch.full_like(like, HALF, requires_grad=False)


def expect_halves(s: Subject) -> None:
    same(s.rows(), torch.full_like(s.rows(), HALF), "lookups do not read what was written")


# Writing parameters


def writing(name: str) -> Callable[[Operation], Operation]:
    """Register an operation that writes 0.5 everywhere, which lookups must read."""

    def register(write: Operation) -> Operation:
        @operation("Writing parameters", name)
        def run(s: Subject) -> None:
            parameters(s)
            if s.kind.is_trained:
                s.step()  # a cache now has rows
            write(s)
            expect_halves(s)
            if s.kind.is_trained:  # and updates must write there
                s.step()
                assert bool((s.rows() != HALF).all()), "updates go elsewhere"

        return write

    return register


@writing("`p.fill_(x)` under `no_grad`")
@torch.no_grad()
def _zero(s: Subject) -> None:
    for parameter in parameters(s).values():
        parameter.fill_(HALF)


@writing("`p.copy_(t)` under `no_grad`")
@torch.no_grad()
def _copy(s: Subject) -> None:
    for parameter in parameters(s).values():
        parameter.copy_(halves(parameter))


@writing("`p.data.fill_(x)`")
def _data_in_place(s: Subject) -> None:
    for parameter in parameters(s).values():
        parameter.data.fill_(HALF)


@writing("`p.data = t`")
def _data(s: Subject) -> None:
    for parameter in parameters(s).values():
        parameter.data = halves(parameter.data)


@writing("`module.weight = nn.Parameter(t)`")
def _replace(s: Subject) -> None:
    for name, parameter in parameters(s).items():
        module, leaf = owner_of(s.module, name)
        setattr(module, leaf, nn.Parameter(halves(parameter.data)))


@writing("`p[:] = x` under `no_grad`")
@torch.no_grad()
def _set_items(s: Subject) -> None:
    for parameter in parameters(s).values():
        parameter[:] = HALF


@writing("`p.view(-1).fill_(x)`, `p[i].fill_(x)` under `no_grad`")
@torch.no_grad()
def _view(s: Subject) -> None:
    for parameter in parameters(s).values():
        parameter.view(-1).fill_(0)
        for row in range(len(parameter)):
            parameter[row].fill_(HALF)


@writing("`torch.mul(p, x, out=p)` under `no_grad`")
@torch.no_grad()
def _out(s: Subject) -> None:
    for parameter in parameters(s).values():
        torch.add(torch.mul(parameter, 0.0), HALF, out=parameter)


@writing("`F.threshold(p, x, y, inplace=True)` under `no_grad`")
@torch.no_grad()
def _inplace(s: Subject) -> None:
    for parameter in parameters(s).values():
        nn.functional.threshold(parameter, 1e6, HALF, inplace=True)


@writing("`p.detach().numpy()[:] = x`")
def _array(s: Subject) -> None:
    for parameter in parameters(s).values():
        parameter.detach().numpy()[:] = HALF


@writing("`torch._foreach_copy_`, as optimizers and averages write")
@torch.no_grad()
def _foreach(s: Subject) -> None:
    found = list(parameters(s).values())
    torch._foreach_copy_(found, [halves(p) for p in found])


@writing("`nn.init.constant_(p, x)`")
def _init(s: Subject) -> None:
    for parameter in parameters(s).values():
        nn.init.constant_(parameter, HALF)


@writing("`vector_to_parameters`")
def _vector(s: Subject) -> None:
    values = parameters_to_vector(s.module.parameters())
    vector_to_parameters(halves(values.detach()), s.module.parameters())


@writing("`torch.utils.swap_tensors`")
def _swap(s: Subject) -> None:
    for parameter in parameters(s).values():
        torch.utils.swap_tensors(parameter, nn.Parameter(halves(parameter.data)))


@writing("`parametrize.register_parametrization`")
def _parametrize(s: Subject) -> None:
    class Half(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 0 + HALF

    for name in parameters(s):
        module, leaf = owner_of(s.module, name)
        parametrize.register_parametrization(module, leaf, Half())


def state_of_halves(s: Subject) -> dict[str, Tensor]:
    """Return a state dict in which all weights are 0.5."""
    state = dict(copy.deepcopy(s.module.state_dict()))
    for name, value in state.items():
        if "weight" in name or "cores." in name:
            for tensor in getattr(value, "parts", {0: value}).values():
                tensor.fill_(HALF)
    return state


@writing("`load_state_dict`")
def _load(s: Subject) -> None:
    s.module.load_state_dict(state_of_halves(s))


@writing("`load_state_dict(assign=True)`")
def _assign(s: Subject) -> None:
    s.module.load_state_dict(state_of_halves(s), assign=True)


@operation("Writing parameters", "reading: `p` shows an update")
def _shows(s: Subject) -> None:
    trained(s)
    before = {name: p.detach().clone() for name, p in parameters(s).items()}
    if not all(value.numel() for value in before.values()):
        raise NotApplicable("its rows are not parameters")
    s.step()
    flush(s)
    for name, parameter in s.parameters().items():
        assert not torch.equal(parameter.detach(), before[name]), "parameters show no update"
        if parameter.numel() == s.rows().numel():
            shown = parameter.detach().view(s.rows().shape)
            same(shown, s.rows(), "parameters do not show all updates")


def flush(s: Subject) -> None:
    if hasattr(s.module, "flush"):
        s.module.flush()


# Modules


def keeps(name: str) -> Callable[[Callable[[Subject], Any]], Callable[[Subject], Any]]:
    """Register an operation that returns a module with the same rows, which trains alike."""

    def register(function: Callable[[Subject], Any]) -> Callable[[Subject], Any]:
        @operation("Modules", name)
        def run(s: Subject) -> None:
            if s.kind.is_trained:
                s.step()
            before = s.rows()
            moved = s.of(function(s))
            same(moved.rows(), before, "rows changed")
            if s.kind.is_trained:
                moved.step()
                assert not torch.equal(moved.rows(), before), "it no longer trains"

        return function

    return register


def independent(name: str) -> Callable[[Callable[[Subject], Any]], Callable[[Subject], Any]]:
    """Register an operation that copies a module; training the copy leaves the original."""

    def register(function: Callable[[Subject], Any]) -> Callable[[Subject], Any]:
        @keeps(name)
        def run(s: Subject) -> Any:
            twin = function(s)
            if s.kind.is_trained:
                before = s.rows()
                s.of(copy.deepcopy(twin)).step()
                same(s.rows(), before, "training the copy changes the original")
            return twin

        return function

    return register


@independent("`copy.deepcopy`")
def _deepcopy(s: Subject) -> Any:
    return copy.deepcopy(s.module)


@independent("`pickle`")
def _pickle(s: Subject) -> Any:
    return pickle.loads(pickle.dumps(s.module))


@independent("`torch.save` and `torch.load` of the module")
def _save(s: Subject) -> Any:
    return saved_and_loaded(s.module, weights_only=False)


@keeps("state dict through `torch.save` and `torch.load(weights_only=True)`")
def _state_file(s: Subject) -> Any:
    other = s.other()
    other.module.load_state_dict(saved_and_loaded(dict(s.module.state_dict()), weights_only=True))
    return other.module


@keeps("`.to(device)`, `.cpu()`")
def _to(s: Subject) -> Any:
    return s.module.to("cpu").cpu()


@keeps("`share_memory()`")
def _share(s: Subject) -> Any:
    return s.module.share_memory()


@keeps("`eval()` and `train()`")
def _eval(s: Subject) -> Any:
    return s.module.eval().train()


@keeps("`zero_grad()`")
def _zero_grad(s: Subject) -> Any:
    s.module.zero_grad()
    return s.module


@keeps("`copy.copy`")
def _shallow(s: Subject) -> Any:
    return copy.copy(s.module)


@keeps("`module.compile()`")
def _compile_in_place(s: Subject) -> Any:
    torch._dynamo.reset()
    s.module.compile(backend="eager")
    return s.module


@keeps("`state_dict(keep_vars=True)`")
def _keep_vars(s: Subject) -> Any:
    state = s.module.state_dict(keep_vars=True)
    assert list(state) == list(s.module.state_dict()), "other keys"
    return s.module


@keeps("`torch.distributed.checkpoint`: `get_model_state_dict`, `set_model_state_dict`")
def _model_state(s: Subject) -> Any:
    other = s.other()
    set_model_state_dict(other.module, copy.deepcopy(get_model_state_dict(s.module)))
    return other.module


@keeps("`apply(fn)`")
def _apply(s: Subject) -> Any:
    return s.module.apply(lambda module: None)


@keeps("inside `nn.Sequential`, `nn.ModuleList`, `nn.ModuleDict`")
def _containers(s: Subject) -> Any:
    return nn.ModuleDict({"a": nn.ModuleList([nn.Sequential(s.module)])})["a"][0][0]


@keeps("`repr`, `extra_repr`")
def _repr(s: Subject) -> Any:
    assert len(repr(s.module)) > 10, "no repr"
    return s.module


def changed_dtype(change: Callable[[nn.Module], nn.Module]) -> Operation:
    def run(s: Subject) -> None:
        parameters(s)
        before = s.rows()
        dtypes = {name: p.dtype for name, p in s.parameters().items()}
        with _warnings() as caught:
            s.module = change(s.module)
        changed = {n: p.dtype for n, p in s.parameters().items()} != dtypes
        assert changed or bool(caught), "neither the dtype changes nor a warning says so"
        same(s.rows(), before, "rows changed", 1e-2)

    return run


def _warnings() -> Any:
    import warnings

    catcher = warnings.catch_warnings(record=True)

    class Always:
        def __enter__(self) -> Any:
            caught = catcher.__enter__()
            warnings.simplefilter("always")
            return caught

        def __exit__(self, *error: Any) -> None:
            catcher.__exit__(*error)

    return Always()


for _name, _change in {
    "`.half()`": lambda m: m.half(),
    "`.bfloat16()`": lambda m: m.bfloat16(),
    "`.double()`": lambda m: m.double(),
    "`.to(torch.float16)`": lambda m: m.to(torch.float16),
    "`.type(torch.float16)`": lambda m: m.type(torch.float16),
}.items():
    operation("Modules", _name)(changed_dtype(_change))


@operation("Modules", "`to_empty` and `load_state_dict`")
def _to_empty(s: Subject) -> None:
    before, state = s.rows(), copy.deepcopy(s.module.state_dict())
    s.module = s.module.to_empty(device="cpu")
    s.module.load_state_dict(state)
    same(s.rows(), before, "rows are not the loaded ones")


@operation("Modules", "`.to('meta')`, then `to_empty` and `load_state_dict`")
def _meta(s: Subject) -> None:
    before, state = s.rows(), copy.deepcopy(s.module.state_dict())
    s.module = s.module.to("meta").to_empty(device="cpu")
    s.module.load_state_dict(state)
    same(s.rows(), before, "rows are not the loaded ones")


@operation("Modules", "`load_state_dict(strict=True)` of missing and unexpected keys")
def _strict(s: Subject) -> None:
    state = dict(s.module.state_dict())
    name = next(k for k in state if "weight" in k or "cores." in k or "packed" in k)
    before = s.rows()
    for wrong in ({k: v for k, v in state.items() if k != name}, {**state, "other": IDS}):
        try:
            s.module.load_state_dict(wrong)
        except (RuntimeError, KeyError):
            continue
        raise AssertionError("wrong keys are accepted")
    same(s.rows(), before, "rows changed")


@operation("Modules", "forward hooks and backward hooks")
def _hooks(s: Subject) -> None:
    seen = []
    s.module.register_forward_pre_hook(lambda m, args: seen.append("pre"))
    s.module.register_forward_hook(lambda m, args, out: seen.append("forward"))
    s.rows()
    assert seen == ["pre", "forward"], "hooks did not run"


@operation("Modules", "names: `named_parameters` are in `state_dict`")
def _names(s: Subject) -> None:
    state = s.module.state_dict()
    unknown = [name for name in parameters(s) if name not in state]
    if unknown and not s.kind.is_collection:  # bare modules have entries per table
        unknown = [n for n in unknown if not any(k.endswith("weight") for k in state)]
    assert not unknown, f"{unknown} are not in the state dict"


# Freezing


@operation("Freezing", "`requires_grad_(False)` of the module")
def _freeze(s: Subject) -> None:
    trained(s)
    before = s.rows()
    s.module.requires_grad_(False)
    out = s.call()
    if out.requires_grad:
        out.sum().backward()
    same(s.rows(), before, "a frozen table was updated")


@operation("Freezing", "`p.requires_grad = False` of each parameter")
def _freeze_each(s: Subject) -> None:
    trained(s)
    before = s.rows()
    for parameter in parameters(s).values():
        parameter.requires_grad = False
    out = s.call()
    if out.requires_grad:
        out.sum().backward()
    same(s.rows(), before, "a frozen table was updated")


@operation("Freezing", "`requires_grad_(True)` again")
def _unfreeze(s: Subject) -> None:
    trained(s)
    before = s.rows()
    s.module.requires_grad_(False).requires_grad_(True)
    s.step()
    assert not torch.equal(s.rows(), before), "it is still frozen"


@operation("Freezing", "`torch.no_grad()`")
def _no_grad(s: Subject) -> None:
    before = s.rows()
    with torch.no_grad():
        assert not s.call().requires_grad, "the output requires a gradient"
    same(s.rows(), before, "rows changed")


@operation("Freezing", "`torch.inference_mode()`")
def _inference(s: Subject) -> None:
    with torch.inference_mode():
        out = s.call()
    same(out.clone(), s.rows(), "other rows than without")


@operation("Freezing", "`eval()` keeps gradients, as `nn.EmbeddingBag`")
def _evaluation(s: Subject) -> None:
    trained(s)
    before = s.rows()
    s.module.eval()
    out = s.call()
    if not out.requires_grad:
        raise NotImplementedError("no gradients in evaluation mode")
    out.sum().backward()
    assert not torch.equal(s.rows(), before), "no update in evaluation mode"
