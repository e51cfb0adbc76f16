"""Errors with advice for names of torch that emblib lacks: arguments and optimizers.

`refuse_names_of_torch` is the `__new__` of base classes of tables, configurations and optimizers.
`emblib.optim` reads `OPTIMIZERS` for names that it does not have.
"""

from __future__ import annotations

import inspect
from typing import Any

_ADVICE_FOR_ARGUMENTS = {
    "padding_idx": "drop the padding before the lookup, "
    "emblib.jagged.drop_padding_from_bags(ids, offsets, padding_idx), or let its ids be -1, which "
    "MEAN counts",
    "mode": "use pooling=emblib.Pooling.SUM, MEAN, or NONE for one vector per id; there is no max",
    "sparse": "optim.External(gradient=...) selects the gradient that is left for torch.optim",
    "learning_rate": "it is called lr",
    "momentum": "leave the optimizer of the table out and give its parameters to torch.optim.SGD",
    "initial_accumulator_value": "write to the state, e.g. "
    'bags.table_optimizer_states()[0]["sum"].fill_(value)',
    "lr_decay": "use a scheduler over emblib.collections.optimizers.FusedOptimizer.of(model)",
    "amsgrad": "leave the optimizer of the table out and give its parameters to torch.optim.Adam",
    "max_norm": "optim.RowwiseAdagrad(lr, max_norm=...) alone has it",
    "scale_grad_by_freq": "it has no counterpart",
}

OPTIMIZERS = {
    "AdamW": "optim.Adam(lr, weight_decay=optim.Decoupled(rate)) updates the rows of a batch; for "
    "all rows in every step leave the optimizer of the table out and give its parameters to "
    "torch.optim.AdamW",
    "SparseAdam": "optim.Adam(lr) updates the rows of a batch too; its eps is added after the bias "
    "correction",
    **{
        name: f"leave the optimizer of the table out and give its parameters to torch.optim.{name}"
        for name in ("ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
    },
}
"""Replacements for optimizers of torch that emblib does not have under this name."""


def refuse_names_of_torch(cls: type[Any], *arguments: Any, **options: Any) -> Any:
    """Return a new object of a class without calling `__init__`, as `object.__new__` does.

    Raises:
        TypeError: a keyword is in `_ADVICE_FOR_ARGUMENTS`, and `__init__` of the class does not
            take it; the message has the advice.
    """
    for name in _ADVICE_FOR_ARGUMENTS.keys() & options.keys():
        parameters = inspect.signature(cls.__init__).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        if name not in parameters and inspect.Parameter.VAR_KEYWORD not in kinds:
            raise TypeError(f"{cls.__name__} has no {name}: {_ADVICE_FOR_ARGUMENTS[name]}")
    return object.__new__(cls)
