"""How values travel between ranks: a codec for each direction, around the one collective."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from emblib.sharding.codecs import FP32, Codec
from emblib.sharding.exchange import Content, start_all_to_all
from emblib.sharding.groups_of_ranks import Ranks


@dataclass(frozen=True)
class Wire:
    """What rows are encoded as on their way (`forward`), and their gradients (`backward`).

    Sums are float32 whatever travels. Ids travel as they are.
    """

    forward: Codec = field(default=FP32())
    backward: Codec = field(default=FP32())

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if not isinstance(getattr(self, name), Codec):
                raise TypeError(
                    f"{name} of a Wire must be a codec, e.g. FP16(), got {getattr(self, name)!r}"
                )


def wire_of(wire: "Wire | None") -> Wire:
    """`wire`, or float32 both ways.

    Raises:
        TypeError: something else.
    """
    if wire is not None and not isinstance(wire, Wire):
        raise TypeError(
            f"wire must be None or a Wire, e.g. Wire(forward=FP16(), backward=BF16()), got {wire!r}"
        )
    return Wire() if wire is None else wire


class CodedPending:
    """Values under way in some form; `wait` returns them as floating numbers."""

    def __init__(
        self,
        values: Tensor,
        sizes: Sequence[int],
        received_sizes: Sequence[int],
        ranks: Ranks,
        codec: Codec,
        content: Content,
    ) -> None:
        self._codec, self._sizes, self._dtype = codec, list(received_sizes), values.dtype
        payload = codec.encode(values, list(sizes))
        self._pending = start_all_to_all(
            payload,
            codec.payload_splits(sizes),
            codec.payload_splits(received_sizes),
            ranks,
            content=content,
        )

    def wait(self) -> Tensor:
        """What came, by rank: float32, or 16 bits where it travelled so and is read so."""
        payload = self._pending.wait()
        if payload.is_floating_point() and getattr(self._codec, "loss_scale", 1.0) == 1.0:
            return payload
        return self._codec.decode(payload, self._sizes, torch.float32)
