"""How many bags each feature has: the host's side of a batch."""

from collections.abc import Sequence

from torch import Tensor


def list_of_keys(keys: Sequence[str]) -> list[str]:
    """`keys` as a list of its own.

    Raises:
        TypeError: one string, whose letters are hardly meant.
    """
    if isinstance(keys, str):
        raise TypeError(f"keys must be a list of names, got {keys!r}: write [{keys!r}]")
    return list(keys)


def lists_of(strides: Sequence[Sequence[int]] | Tensor) -> list[list[int]]:
    """`stride_per_key_per_rank` as `[F][R]` numbers of the host."""
    if isinstance(strides, Tensor):
        return strides.tolist()
    return [list(row) for row in strides]


def bags_per_key(strides: list[list[int]], keys: int, bags: int) -> list[int]:
    """The bags of each feature over all ranks.

    Raises:
        ValueError: not one list a key, lists of different lengths, a negative number, or another
            sum than there are bags.
    """
    if len(strides) != keys or len({len(row) for row in strides}) > 1:
        raise ValueError(
            f"stride_per_key_per_rank must have one list a key = {keys}, of the same number of "
            f"ranks, got {len(strides)} of {sorted({len(row) for row in strides})}"
        )
    sums = [sum(row) for row in strides]
    if sum(sums) != bags or any(bags_here < 0 for row in strides for bags_here in row):
        raise ValueError(
            "stride_per_key_per_rank must be >= 0 and add up to the number of bags = "
            f"{bags}, got {strides}"
        )
    return sums


def refuse_stride(stride: int, keys: int, bags: int) -> None:
    """Raise the ValueError of `bags` that are not `stride` for each key."""
    raise ValueError(
        f"lengths must have the same number of bags for every key, got {bags} for {keys} keys"
        + (f" with stride {stride}" if bags == 0 or bags % max(keys, 1) == 0 else "")
        + ": where features differ in it give stride_per_key_per_rank"
    )


def check_inverse(inverse: tuple[list[str], Tensor], bags: dict[str, int]) -> None:
    """Raise ValueError unless `inverse` has a row of bags for each key (reads the device).

    It may have rows of other keys, which a part of a batch keeps.
    """
    keys, indices = inverse
    if not bags.keys() <= set(keys) or indices.dim() != 2 or indices.size(0) != len(keys):
        raise ValueError(
            f"inverse_indices must be keys and one row for each, of {sorted(bags)} at least, got "
            f"{sorted(keys)} and {list(indices.shape)}"
        )
    for key, row in zip(keys, indices, strict=True):
        if key in bags and row.numel() and not 0 <= int(row.min()) <= int(row.max()) < bags[key]:
            raise ValueError(
                f"the inverse indices of {key!r} must be bags 0 to {bags[key] - 1}, got "
                f"{int(row.min())} to {int(row.max())}"
            )
