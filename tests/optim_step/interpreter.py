"""Steps of cases by the Triton kernels in Triton's interpreter."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch

from tests.optim_step.cases import Case
from tests.triton_runs import interpret, let_triton_serve_cpus, reserved

BLOCK = 2048  # elements that one program steps
CPU = torch.device("cpu")

# ---- These functions run in the interpreter's process.


def run(case: Case, wide: bool) -> Case:
    """Step a case and return it; ``wide``: number elements with 64 bits, whether they need it or not."""
    from loco_ext.triton_kernels import optim_step

    form_of = optim_step.form_of
    with pytest.MonkeyPatch.context() as patch:
        if wide:
            patch.setattr(optim_step, "form_of", lambda *arguments: replace(form_of(*arguments), wide=True))
        if case.options.get("penalties"):
            step_and_shrink(case)
        else:
            optim_step.optim_step(case.arguments())
    return case


def step_and_shrink(case: Case) -> None:
    """Step by the operator, which launches the prox after the step; its checks may read values of CPU tensors."""
    from loco_ext.ops import optim_step

    with pytest.MonkeyPatch.context() as patch:
        let_triton_serve_cpus(patch)
        patch.setattr(optim_step, "check_step", lambda *_arguments: None)
        case.step("triton")


def scalars(case: Case) -> torch.Tensor:
    """Return the scalars that Adam's first kernel computes for each tensor."""
    from loco_ext.triton_kernels import optim_step

    args = case.arguments()
    return optim_step.prepare(optim_step.upload_table(optim_step.describe(args), CPU), args)


def far(numel: int, stride: int, wide: bool) -> list[torch.Tensor]:
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
    return [w[begin:].clone().float(), g[begin:].clone().float()]


# ---- These run in the test's own process.


@dataclass
class Interpreter:
    pool: ProcessPoolExecutor
    wide: bool = False

    def step(self, case: Case) -> Case:
        """Return the case after its step."""
        return interpret(self.pool, run, case, self.wide)

    def step_in_place(self, case: Case) -> None:
        stepped = self.step(case)
        for name, tensors in case.lists.items():
            for tensor, result in zip(tensors, stepped.lists[name], strict=True):
                tensor.untyped_storage().copy_(result.untyped_storage())
