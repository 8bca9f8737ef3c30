"""Stochastic rounding to bfloat16 with Philox4x32-10 (Salmon et al. 2011), in plain PyTorch integers."""

from collections.abc import Sequence

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def philox(elements: Tensor, seed: int, tensor: int, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four random 32-bit words, int64, for each counter ``(element, tensor, step)`` under the key ``seed``."""
    c0, c1 = elements & _LOW, elements >> 32 & _LOW
    c2, c3 = torch.full_like(c0, tensor), torch.full_like(c0, step & _LOW)
    k0, k1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(10):
        # The products need 64 bits. int64 wraps around, but masking gives the right half either way.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = (product1 >> 32 & _LOW) ^ c1 ^ k0, product1 & _LOW
        c2, c3 = (product0 >> 32 & _LOW) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def round_stochastically(value: Tensor, seed: int, tensor: int, step: int, word: int) -> Tensor:
    """Round float32 to bfloat16: up with a probability equal to the part cut off; infinities and NaN stay."""
    elements = torch.arange(value.numel(), device=value.device)
    random = philox(elements, seed, tensor, step)[word].reshape(value.shape)
    bits = value.contiguous().view(torch.int32)
    rounded = (bits + (random & 0xFFFF).to(torch.int32)) & ~0xFFFF
    return torch.where(value.isfinite(), rounded.view(torch.float32), value).to(torch.bfloat16)


class RoundedResults:
    """Writer of the results of one parameter's step, which rounds bfloat16 stochastically if a seed is given."""

    def __init__(self, param: Tensor, ordinals: Sequence[int], index: int, seed: int | None, step: int) -> None:
        self.key: tuple[int, int, int] | None = None
        if seed is not None and param.dtype == torch.bfloat16:
            self.key = (seed, ordinals[index], step)

    def store(self, destination: Tensor, value: Tensor, word: int) -> None:
        """Write the value; ``word``: 0 for the parameter, 1 to 3 for its states."""
        destination.copy_(self.rounded(destination, value, word))

    def rounded(self, destination: Tensor, value: Tensor, word: int) -> Tensor:
        """Return the value as it is to be copied to the destination."""
        if self.key is not None and destination.dtype == torch.bfloat16:
            return round_stochastically(value, *self.key, word)
        return value


def store_all(
    roundings: Sequence[RoundedResults], destinations: Sequence[Tensor], values: Sequence[Tensor], word: int
) -> None:
    """Write values of several parameters' steps, by one launch on a GPU; those in place already are left alone."""
    triples = [x for x in zip(roundings, destinations, values, strict=True) if x[1] is not x[2]]
    if triples:
        torch._foreach_copy_([x[1] for x in triples], [rounding.rounded(d, v, word) for rounding, d, v in triples])
