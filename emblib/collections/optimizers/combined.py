"""Several optimizers as one, e.g. that of the tables and that of the dense part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emblib.collections.optimizers.keyed import KeyedOptimizer, State, keyed


class CombinedOptimizer(KeyedOptimizer):
    """Optimizers one after the other; their parameters have different names.

    Args:
        optimizers: each alone, or with a prefix for the names of its parameters.

    Raises:
        ValueError: two have a parameter of the same name.
    """

    def __init__(self, optimizers: Sequence[KeyedOptimizer | tuple[str, KeyedOptimizer]]) -> None:
        self._optimizers = [o if isinstance(o, tuple) else ("", o) for o in optimizers]
        params: dict[str, Any] = {}
        for prefix, optimizer in self._optimizers:
            for name, parameter in keyed(optimizer).params.items():
                if (key := _prefixed(prefix, name)) in params:
                    raise ValueError(
                        f"optimizers must have different parameters, got {key!r} twice; give them "
                        "prefixes"
                    )
                params[key] = parameter
        super().__init__(params, [])
        groups = [group for _, o in self._optimizers for group in o.param_groups]
        self.param_groups = groups

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """The optimizers, each with its prefix."""
        return list(self._optimizers)

    def group_names(self) -> list[list[str]]:
        """The names of the parameters of each group."""
        return [
            [_prefixed(prefix, name) for name in names]
            for prefix, optimizer in self._optimizers
            for names in optimizer.group_names()
        ]

    def keyed_state(self) -> State:
        """The states of all."""
        return {
            _prefixed(prefix, name): values
            for prefix, optimizer in self._optimizers
            for name, values in optimizer.keyed_state().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """`state` and `param_groups` of all."""
        states: State = {}
        groups = []
        for prefix, optimizer in self._optimizers:
            part = optimizer.state_dict()
            states.update({_prefixed(prefix, k): v for k, v in part["state"].items()})
            for group in part["param_groups"]:
                names = [_prefixed(prefix, name) for name in group["params"]]
                groups.append({**group, "params": names})
        return {"state": states, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Let each have its part.

        Raises:
            KeyError: it is of other parameters, or of other groups of them.
        """
        own, groups = self.state_dict()["param_groups"], list(state_dict["param_groups"])
        if len(own) != len(groups):
            raise KeyError(
                f"the state dict has {len(groups)} groups of parameters, this optimizer {len(own)}"
            )
        first = 0
        for prefix, optimizer in self._optimizers:
            count = len(optimizer.state_dict()["param_groups"])
            mine = groups[first : first + count]
            first += count
            names = {name for group in mine for name in group["params"]}
            names |= set(optimizer.state_dict()["state"])  # what wrappers keep beside parameters
            optimizer.load_state_dict(
                {
                    "state": {
                        _bare(prefix, name): values
                        for name, values in state_dict["state"].items()
                        if name in names or _bare(prefix, name) in names
                    },
                    "param_groups": [
                        {**group, "params": [_bare(prefix, name) for name in group["params"]]}
                        for group in mine
                    ],
                }
            )

    def step(self, closure: Any = None) -> Any:
        """A step of each; `closure` is called by the first alone."""
        results = [
            optimizer.step(closure if i == 0 else None)
            for i, (_, optimizer) in enumerate(self._optimizers)
        ]
        return results[0] if results else None

    def zero_grad(self, set_to_none: Any = True) -> None:
        """As of each."""
        for _, optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none)


def _prefixed(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _bare(prefix: str, name: str) -> str:
    return name.removeprefix(f"{prefix}.") if prefix else name
