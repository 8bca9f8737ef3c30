"""Detection, in Python, of memory that an operator would write while another operand of the same call uses it.

The reference uses it, and it words the errors; the compiled library has a check of its own for every step.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


@dataclass
class Region:
    """The memory of one tensor, as the byte addresses of its elements' first bytes."""

    name: str
    tensor: Tensor
    written: bool
    begin: int
    end: int

    def addresses(self) -> np.ndarray:
        """Return the address of every byte that belongs to an element, int64, in no order."""
        offsets = np.zeros(1, dtype=np.int64)
        for size, stride in zip(self.tensor.shape, self.tensor.stride(), strict=True):
            offsets = np.add.outer(offsets, np.arange(size, dtype=np.int64) * stride).ravel()
        width = self.tensor.element_size()
        return np.add.outer(self.begin + offsets * width, np.arange(width, dtype=np.int64)).ravel()

    @property
    def dense(self) -> bool:
        """Return whether every byte from begin to end belongs to an element."""
        return self.tensor.numel() * self.tensor.element_size() == self.end - self.begin


def region_of(name: str, tensor: Tensor, written: bool) -> Region:
    """Return the region of a strided tensor that has memory; it ends where a storage that was made smaller ends."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin, storage = tensor.data_ptr(), tensor.untyped_storage()
    end = min(begin + (last + 1) * tensor.element_size(), storage.data_ptr() + storage.nbytes())
    return Region(name, tensor, written, begin, end if tensor.numel() else begin)


def check_overlap(tensors: Iterable[tuple[str, Tensor, bool]]) -> None:
    """Raise ValueError, naming the tensors, if an element's memory that is to be written belongs to another one, too.

    Args:
        tensors: (name, tensor, whether it is written). Fake tensors, those of the meta device, and subclasses that wrap
            other tensors have no memory.
    """
    regions = [region_of(*entry) for entry in tensors if _has_memory(entry[1])]
    for region in regions:
        if region.written and not (region.tensor.is_contiguous() or _distinct(region)):
            raise ValueError(
                f"{region.name}: expected memory of its own for each element, got strides {region.tensor.stride()}"
            )
    open_regions: list[Region] = []
    for region in sorted(regions, key=lambda r: (r.begin, r.end)):
        open_regions = [other for other in open_regions if other.end > region.begin]
        for other in open_regions:
            if (region.written or other.written) and region.begin < region.end and _meet(region, other):
                raise ValueError(f"{other.name} and {region.name}: expected separate memory, got tensors that overlap")
        open_regions.append(region)


def _has_memory(tensor: Tensor) -> bool:
    if isinstance(tensor, FakeTensor):  # warns where it is asked for its address
        return False
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:
        return False


def _distinct(region: Region) -> bool:
    """Return whether no byte belongs to two elements."""
    if _nested(region.tensor):
        return True
    addresses = region.addresses()
    return len(np.unique(addresses)) == len(addresses)


def _nested(tensor: Tensor) -> bool:
    """Return whether each axis, in order of strides, steps beyond everything that the axes before it reach."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True


def _meet(a: Region, b: Region) -> bool:
    return (a.dense and b.dense) or bool(np.isin(a.addresses(), b.addresses()).any())
