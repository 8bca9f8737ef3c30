"""Operator calls for the tests of the optimizer step: made from a seed, copied, run and compared."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import loco_ext
from loco_ext import ops
from loco_ext.ops.step_args import ADAM, SGD, Flags, StepArgs
from tests.tolerances import ULPS_OF_TWO_ROUNDINGS, assert_within_ulps, same_bits
from tests.triton_runs import needs_triton, saved

KERNELS = ["cpu", "cuda_on_cpu", *(["cuda", "triton"] if torch.cuda.is_available() else [])]


def with_kernels(*kernels: str) -> pytest.MarkDecorator:
    """Parametrize a test with the kernels that step its cases, in place of those of KERNELS."""
    marks = {"interpreter": needs_triton}
    chosen = [pytest.param(name, marks=marks.get(name, ())) for name in kernels]
    return pytest.mark.parametrize("kernels", chosen, indirect=True)


with_interpreter = with_kernels(*KERNELS, "interpreter")
with_reference = with_kernels(*KERNELS, "reference")
with_all = with_kernels(*KERNELS, "interpreter", "reference")
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# A kernel, a weight whose size is not a multiple of a vector, a bias, single elements, and an empty tensor.
SHAPES = [(5, 3, 3, 3), (17, 7), (19,), (1, 1, 3, 3), (), (0, 3, 3, 3)]
RULES = {"sgd": SGD, "adam": ADAM}
STATES = {name: [f"{state}s" for state in rule.states] for name, rule in RULES.items()}
HYPER = {"sgd": (0.05, 0.3, 0.9, 0.1), "adam": (0.05, 0.3, 0.9, 0.99, 1e-8)}
Layout = Callable[[Tensor], Tensor]


def copy_storage(tensor: Tensor) -> Tensor:
    """Copy a tensor's whole storage, gaps included; return the copy with the same offset and strides."""
    storage = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype)
    return copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())


def whole(tensor: Tensor) -> Tensor:
    """Return all of the tensor's storage as a flat tensor."""
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())


@dataclass(frozen=True)
class Gpu:
    """Device on which cases are stepped, and the backend that steps them."""

    device: str
    backend: str

    def step_in_place(self, case: Case) -> None:
        """Copy all storages to the GPU, step there and copy them back; strides and shared storages are preserved.

        Versions of tensors whose copies have changed increase.
        """
        moved = {name: value for name, value in case.options.items() if name not in ("maps", "penalties")}
        lists, options = torch.load(
            io.BytesIO(saved((case.lists, moved))), map_location=self.device, weights_only=False
        )
        versions = {name: [t._version for t in tensors] for name, tensors in lists.items()}
        replace(case, lists=lists, options={**case.options, **options}).step(self.backend, here=True)
        for name, tensors in case.lists.items():
            for tensor, there, before in zip(tensors, lists[name], versions[name], strict=True):
                tensor.untyped_storage().copy_(there.untyped_storage())
                if there._version > before:
                    torch.autograd.graph.increment_version(tensor)


ELSEWHERE: Any = None  # set by a fixture; its step_in_place steps cases in place of the compiled kernels


@dataclass
class Case:
    """The arguments of one operator call."""

    rule: str  # "sgd" or "adam"
    lists: dict[str, list[Tensor]]  # all tensors that the call may change
    hyper: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def copy(self, **options: Any) -> Case:
        lists = {name: [copy_storage(t) for t in tensors] for name, tensors in self.lists.items()}
        return replace(self, lists=lists, options={**self.options, **options})

    def laid_out(self, **layouts: Layout) -> Case:
        """Return a copy in which the named lists have other strides."""
        lists = {name: [layouts.get(name, copy_storage)(t) for t in ts] for name, ts in self.lists.items()}
        return replace(self, lists=lists)

    def arguments(self) -> StepArgs:
        """Return the arguments as the backends take them."""
        rule, options = RULES[self.rule], dict(self.options)
        names = STATES["adam"][:2] if self.rule == "adam" and not options.get("amsgrad") else STATES[self.rule]
        states = [states for name in names if (states := self.lists[name])]
        flags = Flags(**{name: options.pop(name) for name in Flags._fields if name in options})
        given = {"ordinals": list(range(len(self.params))), **options}
        given |= {"params": self.params, "grads": self.lists["grads"], "steps": self.lists.get("steps", [])}
        return StepArgs(rule=rule, flags=flags, states=states, hyper=self.hyper, **given)

    def step(self, backend: str | None = None, here: bool = False) -> Case:
        """Step by the backend, ELSEWHERE if it is the compiled kernels and not ``here``."""
        if ELSEWHERE is not None and backend in (None, "native") and not here:
            ELSEWHERE.step_in_place(self)
            return self
        operator = ops.optim_step_sgd if self.rule == "sgd" else ops.optim_step_adam
        with nullcontext() if backend is None else loco_ext.backend(backend):
            operator(*self.lists.values(), self.hyper, **self.options)
        return self

    @property
    def params(self) -> list[Tensor]:
        return self.lists["params"]


def make_case(
    rule: str,
    shapes: Sequence[tuple[int, ...]],
    *,
    dtypes: Sequence[torch.dtype] = (torch.float32,) * 3,  # dtypes of params, grads, states
    hyper: Sequence[float] | None = None,
    states: int = 1,  # SGD: 0 or 1 buffers; Adam: 2 or 3
    step: int = 3,  # Adam: steps made so far
    **options: Any,
) -> Case:
    """Return a call with random arguments.

    Second moments are at least 0.1, so that the division does not magnify rounding errors.
    """
    param_dtype, grad_dtype, state_dtype = dtypes
    states = max(states, 2) if rule == "adam" else states
    generator = torch.Generator().manual_seed(1)

    def random(dtype: torch.dtype, positive: bool = False) -> list[Tensor]:
        made = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]
        return [(t.square() + 0.1 if positive else t).to(dtype) for t in made]

    lists = {"params": random(param_dtype), "grads": random(grad_dtype)}
    for k, name in enumerate(STATES[rule]):
        lists[name] = random(state_dtype, positive=k > 0) if k < states else []
    if rule == "adam":
        lists["steps"] = [torch.tensor(float(step)) for _ in shapes]
    rows = torch.tensor([HYPER[rule] if hyper is None else hyper], dtype=torch.float64)
    return Case(rule, lists, rows, options)


def assert_same(actual: Case, expected: Case, nearly_in_float64: bool = False) -> None:
    """Assert the same bits in everything that a call may change, whatever the strides.

    nearly_in_float64: as the reference, where it is expected, rounds multiply-adds twice.
    """
    for name, tensors in expected.lists.items():
        for i, (a, b) in enumerate(zip(actual.lists[name], tensors, strict=True)):
            if nearly_in_float64 and expected.params[i].dtype == torch.float64:
                assert_within_ulps(a, b, ULPS_OF_TWO_ROUNDINGS, scale=4.0)  # bounds the normal random numbers
            else:
                assert same_bits(a, b), f"{name}[{i}] differs: {a.flatten()[:8]} instead of {b.flatten()[:8]}"


def assert_untouched(actual: Case, before: Case) -> None:
    """Assert that no byte has changed, even in the gaps of views."""
    for name, tensors in before.lists.items():
        for i, (a, b) in enumerate(zip(actual.lists[name], tensors, strict=True)):
            assert same_bits(whole(a), whole(b)), f"{name}[{i}] was written"


def assert_native_is_reference(case: Case) -> None:
    """Assert that the kernels give the reference's bits; nearly so in float64, where the reference rounds fma twice."""
    native, reference = case.copy().step("native"), case.copy().step("reference")
    assert_same(native, reference, nearly_in_float64=True)
    changed = any(not all(map(same_bits, tensors, case.lists[name])) for name, tensors in reference.lists.items())
    assert changed or all(p.numel() == 0 for p in case.params)
