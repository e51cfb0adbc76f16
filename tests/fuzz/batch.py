"""One batch of fuzzed calls: `python -m tests.fuzz.batch OP,.. SEED FIRST COUNT`.

Two calls of five are valid and must do what the references say. The others are broken and may be
refused or answered, but must end, touch nothing outside their tensors and change no argument that
the schema does not name as an output. All arguments lie between guard pages, except tensors whose
storage was resized; results, and what an op allocates for itself, do not. The number of each call
is written to stderr first, so that the one that kills the process is known.
"""

import contextlib
import faulthandler
import random
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.calls import CALLS
from tests.fuzz.mutations import broken, protect

SECONDS = 60  # for a call
MEMORY = 2 << 30  # address space for the calls, beyond what torch takes
REFUSED = (RuntimeError, ValueError, TypeError, OverflowError, NotImplementedError)


def _outputs(op: str) -> list[bool]:
    """Which arguments the schema says are written."""
    schema = getattr(torch.ops.emblib, op).default._schema
    return [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]


def _readable(tensor: Tensor) -> bool:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.numel() == 0 or needed <= tensor.untyped_storage().nbytes()


def _copies(argument: Any) -> list[Tensor]:
    return [tensor.clone() for tensor in readable_tensors(argument)]


def readable_tensors(argument: Any) -> list[Tensor]:
    """Return the tensors of an argument that lie within their storage."""
    tensors = argument if isinstance(argument, list) else [argument]
    return [t for t in tensors if isinstance(t, Tensor) and _readable(t)]


def _addresses(argument: Any) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in readable_tensors(argument)}


def run_one(op: str, seed: str) -> None:
    """Draw the call of a seed and make it; raise where it does what it must not."""
    draw = random.Random(seed)
    torch.manual_seed(draw.randrange(2**31))
    call = CALLS[op](draw)
    function, written = getattr(torch.ops.emblib, op).default, _outputs(op)
    if draw.random() < 0.4:
        arguments = tuple(protect(draw, argument) for argument in call.arguments)
        call.check(arguments, function(*arguments))
        return
    arguments = broken(draw, call.arguments)
    kept = [_copies(argument) for argument in arguments]
    with contextlib.suppress(*REFUSED), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(*arguments)
    written = written[: len(arguments)]  # without defaults
    shared = {a for a, w in zip(arguments, written, strict=True) if w for a in _addresses(a)}
    for k, (argument, before, output) in enumerate(zip(arguments, kept, written, strict=True)):
        if output or _addresses(argument) & shared:
            continue
        for now, then in zip(readable_tensors(argument), before, strict=True):
            same = torch.equal(torch.nan_to_num(now), torch.nan_to_num(then))
            assert same, f"argument {k} changed, which is not an output"


def main(ops: list[str], seed: str, first: int, count: int) -> None:
    """Make calls `first` to `first + count` of a seed, of each op."""
    faulthandler.enable()
    torch.set_num_threads(2)
    # What a broken call asks for by the terabyte is refused; what fits must not take minutes.
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for number in range(first, first + count):
        for op in ops:
            print(f"call {op} {seed} {number}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            run_one(op, f"{op} {seed} {number}")
            faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(sys.argv[1].split(","), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
