"""TorchRec's tracer, and quantised collections in TorchScript.

TorchScript compiles neither `KeyedJaggedTensor` nor the tables. `torch.jit.script` of a model asks
its quantised collections for a replacement (`__prepare_scriptable__`), which is `ScriptableBags`:
the same ops on the same memory, in code that TorchScript compiles. `register_classes` gives
TorchScript classes with the attributes of emblib's jagged tensors, so that scripted code takes,
makes and returns them. In C++ load `libemblib_cpu.so` before the model.
"""

# No `from __future__ import annotations`: TorchScript evaluates the annotations.

import typing
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, List  # noqa: UP035

import torch
from torch import Tensor, _jit_internal, nn

from emblib import Pooling
from emblib import collections as emblib_collections
from emblib.compat.fbgemm_inference import ScriptableLookup
from emblib.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from emblib.sharding.awaitables import LazyAwaitable, ReadyAwaitable
from emblib.sharding.checkpoints.kinds import StateOfTables


def _lengths_of(lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    if lengths is not None:
        return lengths
    assert offsets is not None
    return offsets.diff()


def _offsets_of(lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    if offsets is not None:
        return offsets
    assert lengths is not None
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


class ScriptJaggedTensor:
    """Compile as `JaggedTensor`, with its attributes."""

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets

    def values(self) -> Tensor:
        """Return the values of all bags."""
        return self._values

    def weights_or_none(self) -> Tensor | None:
        """Return the weights if there are any."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the lengths of the bags."""
        return _lengths_of(self._lengths, self._offsets)

    def offsets(self) -> Tensor:
        """Return the offsets of the bags, and the end of the last."""
        return _offsets_of(self._lengths, self._offsets)


class ScriptKeyedJaggedTensor:
    """Compile as `KeyedJaggedTensor` with one batch size, with its attributes."""

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: list[list[int]] | None = None,
    ) -> None:
        self._stride_per_key_per_rank = stride_per_key_per_rank
        self._keys = keys
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        bags = _lengths_of(lengths, offsets).numel()
        self._stride: int = bags // max(len(keys), 1) if stride is None else stride

    def keys(self) -> list[str]:
        """Return the names of the features."""
        return self._keys

    def values(self) -> Tensor:
        """Return the values of all bags."""
        return self._values

    def weights_or_none(self) -> Tensor | None:
        """Return the weights if there are any."""
        return self._weights

    def stride(self) -> int:
        """Return the batch size."""
        return self._stride

    def variable_stride_per_key(self) -> bool:
        """Return whether features may differ in their bags."""
        return self._stride_per_key_per_rank is not None

    def lengths(self) -> Tensor:
        """Return the lengths of the bags."""
        return _lengths_of(self._lengths, self._offsets)

    def offsets(self) -> Tensor:
        """Return the offsets of the bags, and the end of the last."""
        return _offsets_of(self._lengths, self._offsets)

    def offset_per_key(self) -> list[int]:
        """Return the first value of each feature, and the end of the last."""
        offsets = self.offsets()
        return [int(offsets[n * self._stride]) for n in range(len(self._keys) + 1)]

    def split(self, segments: list[int]) -> List["KeyedJaggedTensor"]:  # noqa: UP006
        """Return consecutive features as batches of `segments` features."""
        ends, lengths, weights = self.offset_per_key(), self.lengths(), self._weights
        parts, first = [self], 0  # TorchScript knows no annotation for an empty list of this class
        for segment in segments:
            last = first + segment
            parts.append(
                KeyedJaggedTensor(  # type: ignore[arg-type]
                    self._keys[first:last],
                    self._values[ends[first] : ends[last]],
                    None if weights is None else weights[ends[first] : ends[last]],
                    lengths[first * self._stride : last * self._stride],
                    None,
                    self._stride,
                    None,
                )
            )
            first = last
        return parts[1:]  # type: ignore[return-value]

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Return the bags of each feature."""
        found: dict[str, JaggedTensor] = {}
        for part in self.split([1] * len(self._keys)):
            found[part.keys()[0]] = JaggedTensor(
                part.values(), part.weights_or_none(), part.lengths(), None
            )
        return found

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return the bags of `key`."""
        return self.to_dict()[key]


class ScriptKeyedTensor:
    """Compile as `KeyedTensor`, with its attributes."""

    def __init__(self, keys: list[str], length_per_key: list[int], values: Tensor) -> None:
        self._keys = keys
        self._length_per_key = length_per_key
        self._values = values
        self._key_dim = 1
        self._offset_per_key: list[int] | None = None
        self._index_per_key: dict[str, int] | None = None

    def keys(self) -> list[str]:
        """Return the name of each block."""
        return self._keys

    def values(self) -> Tensor:
        """Return all blocks in one tensor."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Return the columns of each block."""
        return self._length_per_key

    def __getitem__(self, key: str) -> Tensor:
        """Return the block of `key`."""
        at = self._keys.index(key)
        first = sum(self._length_per_key[:at])
        return self._values[:, first : first + self._length_per_key[at]]

    def to_dict(self) -> dict[str, Tensor]:
        """Return the block of each key."""
        blocks: dict[str, Tensor] = {}
        first = 0
        for at, key in enumerate(self._keys):
            blocks[key] = self._values[:, first : first + self._length_per_key[at]]
            first += self._length_per_key[at]
        return blocks


@cache
def register_classes() -> None:
    """Let TorchScript compile emblib's jagged tensors as the classes above."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript as a whole
        for theirs, scripted in (
            (JaggedTensor, ScriptJaggedTensor),
            (KeyedJaggedTensor, ScriptKeyedJaggedTensor),
            (KeyedTensor, ScriptKeyedTensor),
        ):
            compiled = torch._C._jit_script_class_compile(  # noqa: SLF001 (a module of torch)
                _jit_internal._qualified_name(theirs),  # noqa: SLF001 (a module of torch)
                torch.jit.frontend.get_jit_class_def(scripted, theirs.__name__),
                torch.jit.frontend.get_default_args_for_class(scripted),
                _jit_internal.createResolutionCallbackForClassMethods(scripted),
            )
            torch.jit._state._add_script_class(theirs, compiled)  # noqa: SLF001 (a module of torch)


class ScriptableBags(nn.Module):
    """A quantised embedding bag collection that TorchScript compiles.

    It shares the memory of the collection.

    Raises:
        TypeError: tables that are not quantised.
    """

    def __init__(self, collection: Any) -> None:
        super().__init__()
        groups = collection.groups
        others = [i.module for i in groups.active if not hasattr(i.module, "packed")]
        if others:
            raise TypeError(
                "TorchScript takes collections whose tables are all quantised, this one also has "
                f"{type(others[0]).__name__}: export it with torch.export, or quantise all tables"
            )
        configs = collection.configs
        reads = [(c, feature) for c in configs for feature in c.feature_names]
        counts = [feature for _, feature in reads]
        self.kernels = nn.ModuleList(ScriptableLookup(info.module) for info in groups.active)
        self.wanted: list[list[str]] = [[reads[u][1] for u in info.units] for info in groups.active]
        self.order: list[int] = [groups.order.index(u) for u in range(len(reads))]
        self.dims: list[int] = list(groups.dims)
        self.dims_in_order: list[int] = [groups.dims[u] for u in groups.order]
        self.names: list[str] = [
            f if counts.count(f) == 1 else f"{f}@{config.name}" for config, f in reads
        ]
        divides = groups.pooling is Pooling.SUM
        self.divides: list[bool] = [
            divides and reads[u][0].pooling is Pooling.MEAN for u in groups.order
        ]
        self.weighted = bool(collection.is_weighted())

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled rows of a batch, as the collection does."""
        if features.variable_stride_per_key():
            raise ValueError("batches must have one batch size for all features in TorchScript")
        keys, stride = features.keys(), features.stride()
        lengths, offsets, values = features.lengths(), features.offsets(), features.values()
        weights = features.weights_or_none()
        if self.weighted and weights is None:
            raise ValueError("this collection is weighted, so batches must have weights")
        blocks: list[Tensor] = []
        for number, kernel in enumerate(self.kernels):
            ids: list[Tensor] = []
            bags: list[Tensor] = []
            scales: list[Tensor] = []
            for key in self.wanted[number]:
                at = keys.index(key)
                first, last = int(offsets[at * stride]), int(offsets[(at + 1) * stride])
                ids.append(values[first:last])
                bags.append(lengths[at * stride : (at + 1) * stride])
                if self.weighted and weights is not None:
                    scales.append(weights[first:last].float())
            counts = torch.cat(bags)
            ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            scale: Tensor | None = torch.cat(scales) if self.weighted else None
            out = kernel(torch.cat(ids), ends, scale)
            first = 0
            for bag in bags:
                width = self.dims_in_order[len(blocks)]
                block = out[:, first : first + width]
                if self.divides[len(blocks)]:
                    block = block / bag.clamp(min=1).unsqueeze(1)
                blocks.append(block)
                first += width
        in_order: list[Tensor] = []
        for place in self.order:
            in_order.append(blocks[place])
        return KeyedTensor(self.names, self.dims, torch.cat(in_order, 1))


class ScriptableRegroup(nn.Module):
    """`KTRegroupAsDict` in code that TorchScript compiles."""

    def __init__(self, groups: list[list[str]], keys: list[str], dtype: torch.dtype | None) -> None:
        super().__init__()
        self.groups: list[list[str]] = groups
        self.keys: list[str] = keys
        self.casts = dtype is not None
        self.dtype: torch.dtype = torch.float32 if dtype is None else dtype

    def forward(self, keyed_tensors: list[KeyedTensor]) -> dict[str, Tensor]:
        """Return the concatenated blocks of each group by its name."""
        blocks: dict[str, Tensor] = {}
        for tensor in keyed_tensors:
            blocks.update(tensor.to_dict())
        found: dict[str, Tensor] = {}
        for at, key in enumerate(self.keys):
            found[key] = torch.cat([blocks[name] for name in self.groups[at]], 1)
            if self.casts:
                found[key] = found[key].to(self.dtype)
        return found


def not_scriptable(collection: Any) -> nn.Module:
    """Raise TypeError for a collection that TorchScript cannot have."""
    raise TypeError(
        f"TorchScript takes pooled quantised collections on one device, not a "
        f"{type(collection).__name__}: export the model with torch.export"
    )


def scriptable(collection: Any) -> ScriptableBags:
    """Return the form of a quantised collection that TorchScript compiles."""
    return ScriptableBags(collection)


# Tracing

_tracing = {"depth": 0}


def is_fx_tracing() -> bool:
    """Return whether a `Tracer` of this module is tracing."""
    return _tracing["depth"] > 0


class Tracer(torch.fx.Tracer):
    """Tracer of `torch.fx` that leaves collections whole, quantised and sharded ones as well.

    Awaitables that a traced module returns are waited for.

    Args:
        leaf_modules: names of further classes that are left whole.
    """

    def __init__(self, leaf_modules: list[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = list(leaf_modules or ())

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether calls of a module stay calls in the graph."""
        kinds = (
            emblib_collections.EmbeddingBagCollection,
            emblib_collections.EmbeddingCollection,
            StateOfTables,
        )
        if isinstance(m, kinds) or getattr(m, "is_leaf_of_traces", False):
            return True
        named = type(m).__name__ in self._leaf_modules
        return named or super().is_leaf_module(m, module_qualified_name)

    def trace(
        self, root: nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None
    ) -> torch.fx.Graph:
        """Trace a module or a function; of a wrapped model, the model inside of the wrapper."""
        if getattr(root, "wraps_module", False):
            wrapper: Any = root
            root = wrapper.module
        _tracing["depth"] += 1
        try:
            graph = super().trace(root, concrete_args)
        finally:
            _tracing["depth"] -= 1
        _resolve_types(graph, root)
        return graph

    def create_arg(self, a: Any) -> Any:
        """Return the argument of a node: the result of an awaitable."""
        if isinstance(a, LazyAwaitable | ReadyAwaitable):
            return super().create_arg(a.wait())
        return super().create_arg(a)


def _resolve_types(graph: torch.fx.Graph, root: Any) -> None:
    """Replace types that are text, of code with `from __future__ import annotations`."""
    nodes = [n for n in graph.nodes if isinstance(n.type, str)]
    if not nodes:
        return
    function = root.forward if isinstance(root, nn.Module) else root
    try:
        types = typing.get_type_hints(function)
    except NameError:  # of names that are for type checkers only
        types = {}
    for node in nodes:
        node.type = types.get("return" if node.op == "output" else str(node.target))


def symbolic_trace(
    root: nn.Module | Callable[..., Any],
    concrete_args: dict[str, Any] | None = None,
    leaf_modules: list[str] | None = None,
) -> torch.fx.GraphModule:
    """Return the graph module of a model, with its collections whole."""
    graph = Tracer(leaf_modules).trace(root, concrete_args)
    owner: Any = root.module if getattr(root, "wraps_module", False) else root  # type: ignore[union-attr]
    return torch.fx.GraphModule(owner if isinstance(owner, nn.Module) else nn.Module(), graph)
