"""Counter-based random numbers: the same on any device and any number of threads.

`fill_uniform_(tensor, low, high, seed)` fills a contiguous float32, float16 or bfloat16 tensor with
`low + (high - low) * u`, where `u`, one of 2^24 equidistant numbers in [0, 1), depends on the seed
and on the position alone. Source: Philox4x32-10 (Salmon et al., 2011).
"""

import torch
from torch import Tensor

fill_uniform_ = torch.ops.emblib.fill_uniform_.default


def new_seed() -> int:
    """A seed drawn from torch's default generator, so that `torch.manual_seed` fixes it."""
    return int(torch.randint(2**63 - 1, (), device="cpu"))


@torch.library.register_fake("emblib::fill_uniform_")
def _(tensor: Tensor, low: float, high: float, seed: int) -> None:
    return None
