"""Steps of cases by the Triton kernels in Triton's interpreter, compared with the reference."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tests.optim_step.cases import Case
from tests.tolerances import ULPS_OF_TWO_ROUNDINGS, assert_within_ulps, same_bits
from tests.triton_runs import loaded, reserved, saved

BLOCK = 2048  # elements that one program steps
CPU = torch.device("cpu")

# ---- These functions run in the interpreter's process.


def run(data: bytes, wide: bool) -> bytes:
    """Step cases one after another, each after copying the tensors of its ``before``; return the last case, pickled.

    wide: number elements with 64 bits, whether they need it or not.
    """
    from loco_ext.triton_kernels import optim_step

    jobs = loaded(data)
    form_of = optim_step.form_of
    if wide:
        optim_step.form_of = lambda *arguments: replace(form_of(*arguments), wide=True)
    for case, before in jobs:
        for tensor, values in before:
            tensor.copy_(values)
        if case.options.get("penalties"):
            step_and_shrink(case)
        else:
            optim_step.optim_step(case.arguments())
    optim_step.form_of = form_of
    return saved(jobs[-1][0])


def step_and_shrink(case: Case) -> None:
    """Step by the operator, which launches the prox after the step; its checks may read values of CPU tensors."""
    from loco_ext.ops import backends, optim_step

    kernels = {family: {**of_family, "triton": ("cpu",)} for family, of_family in backends.KERNELS.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "KERNELS", kernels)
        patch.setattr(optim_step, "check_step", lambda *_arguments: None)
        case.step("triton")


def scalars(data: bytes) -> torch.Tensor:
    """Return the scalars that Adam's first kernel computes for each tensor."""
    from loco_ext.triton_kernels import optim_step

    args = loaded(data).arguments()
    return optim_step.prepare(optim_step.upload_table(optim_step.describe(args), CPU), args).numpy()


def far(numel: int, stride: int, wide: bool) -> list[np.ndarray]:
    """Step only the last elements of a bfloat16 tensor too large for memory; return them and their gradients."""
    from loco_ext.triton_kernels import optim_step

    from loco_ext.ops.step_args import SGD, Flags, StepArgs

    skipped = numel // BLOCK - 1
    begin = skipped * BLOCK
    w, g = (reserved(numel * stride, torch.bfloat16)[::stride] for _ in range(2))
    w[begin:], g[begin:] = 1, torch.arange(numel - begin)
    hyper = torch.tensor([[0.25, 0.0, 0.0, 0.0]], dtype=torch.float64)
    tensors = {"params": [w], "grads": [g], "states": [], "hyper": hyper}
    args = StepArgs(rule=SGD, flags=Flags(), **tensors, ordinals=[0], seed=5, rounding_step=3)
    table = optim_step.upload_table(optim_step.describe(args), CPU)
    ((kind, first, count),) = table.launches
    assert optim_step.form_of(kind, args).wide == wide
    optim_step.launch(replace(table, launches=[(kind, first + skipped, count - skipped)]), args, None)
    return [w[begin:].clone().float().numpy(), g[begin:].clone().float().numpy()]


# ---- These run in the test's own process.


@dataclass
class Interpreter:
    pool: ProcessPoolExecutor

    def steps(self, *jobs: tuple[Case, list], wide: bool = False) -> Case:
        return loaded(self.pool.submit(run, saved(jobs), wide).result())

    def step(self, case: Case, wide: bool = False) -> Case:
        return self.steps((case.copy(), []), wide=wide)

    def step_in_place(self, case: Case) -> None:
        stepped = self.step(case)
        for name, tensors in case.lists.items():
            for tensor, result in zip(tensors, stepped.lists[name], strict=True):
                tensor.untyped_storage().copy_(result.untyped_storage())


def assert_same_as(actual: Case, expected: Case) -> None:
    """Assert the same bits; nearly so for Adam in float64, whose corrections use other functions than the reference."""
    for name, tensors in expected.lists.items():
        for i, (a, b) in enumerate(zip(actual.lists[name], tensors, strict=True)):
            if expected.params[i].dtype == torch.float64 and expected.rule == "adam":
                special = ~b.isfinite() | (b == 0)
                assert same_bits(a[special], b[special])
                assert_within_ulps(a[~special], b[~special], ULPS_OF_TWO_ROUNDINGS, scale=4.0)
            else:
                assert same_bits(a, b), f"{name}[{i}] differs: {a.flatten()[:8]} instead of {b.flatten()[:8]}"


def assert_is_reference(interpreter: Interpreter, case: Case, wide: bool = False) -> None:
    expected = case.copy().step("reference")
    assert_same_as(interpreter.step(case, wide), expected)
    assert any(
        not same_bits(a, b) for name, ts in expected.lists.items() for a, b in zip(ts, case.lists[name], strict=True)
    ) or all(p.numel() == 0 for p in case.params)
