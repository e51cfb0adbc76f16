"""Arithmetic of the layout of batches."""

import torch

from tests.simt.library import library

MOST = 2**31 - 1


def test_a_divisor_divides_every_number() -> None:
    """At multiples of the divisor and one below, where a quotient that is off would show."""
    generator = torch.Generator().manual_seed(1)
    powers = [2**k for k in range(31)]
    near = {p + d for p in powers for d in (-1, 0, 1)} | {3, 5, 7, 641, 65_521, MOST - 1, MOST}
    drawn = torch.randint(1, MOST, (200,), generator=generator).tolist()
    for divisor in sorted(d for d in {*near, *drawn} if 0 < d <= MOST):
        factors = torch.randint(0, MOST // divisor + 1, (300,), generator=generator) * divisor
        numbers = torch.cat([factors, factors - 1, torch.tensor([0, 1, MOST - 1, MOST])])
        numbers = numbers[(numbers >= 0) & (numbers <= MOST)]
        quotients, remainders = torch.empty_like(numbers), torch.empty_like(numbers)
        library().call("divide", divisor, numbers, len(numbers), quotients, remainders)
        assert torch.equal(quotients, numbers // divisor), divisor
        assert torch.equal(remainders, numbers % divisor), divisor
