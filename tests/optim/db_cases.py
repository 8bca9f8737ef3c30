"""Cases for our optimizer classes, made from torch's own optimizer database.

The database gives, per optimizer, the constructor arguments worth testing, those that must fail, learning rate
schedulers and tolerances. A Case is one of its inputs with one of the implementations that our classes offer.
"""

import itertools
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.testing._internal import common_optimizers as database

from loco_ext import optim

# torch's test tools freeze torch.backends for the whole process; other tests set its flags.
torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True

OURS = {"SGD": optim.SGD, "Adam": optim.Adam, "AdamW": optim.AdamW}
INFOS = {info.name: info for info in database.optim_db if info.name in OURS}

# Flags that select one of our implementations: the five that the database's own flags select for each input.
IMPLEMENTATIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "fused": {"fused": True, "foreach": False, "differentiable": False},
    "reference": {"fused": False, "foreach": False, "differentiable": False},
    "foreach": {"fused": False, "foreach": True, "differentiable": False},
    "differentiable": {"fused": False, "foreach": False, "differentiable": True},
}
KERNELS = ("default", "fused")  # only these run kernels
# The kernels that serve each implementation: the CPU's, or the GPU's compiled for the CPU.
LIBRARIES = dict.fromkeys(IMPLEMENTATIONS, "cpu") | {"fused": "cuda_on_cpu"}
# The input of each optimizer that takes every branch of the optimizer's Python code.
RICHEST = {"SGD": "nesterov", "Adam": "amsgrad", "AdamW": "amsgrad"}
TORCHS_OWN = ("foreach", "differentiable")
FOR_LOOP = {"foreach": False, "fused": False}


@dataclass
class Case:
    """One input of the database for one implementation."""

    name: str
    implementation: str
    description: str
    arguments: dict[str, Any]

    def kwargs(self, **changes: Any) -> dict[str, Any]:
        """Return a fresh copy of the constructor's arguments."""
        return {**deepcopy(self.arguments), **IMPLEMENTATIONS[self.implementation], **changes}

    def ours(self, params: Any, **changes: Any) -> Optimizer:
        return OURS[self.name](params, **self.kwargs(**changes))

    def torchs(self, params: Any, **changes: Any) -> Optimizer:
        """Return torch's for-loop optimizer with the same arguments; its differentiable variant rounds differently."""
        flags = {**FOR_LOOP, "differentiable": self.implementation == "differentiable"}
        return INFOS[self.name].optim_cls(params, **{**deepcopy(self.arguments), **flags, **changes})

    def coarse(self) -> dict[str, float]:
        """Return the arguments to change for half precision, which lacks eps 1e-8; the database's own for float16."""
        return {} if self.name == "SGD" else {"eps": 0.1}


def _inputs(name: str) -> list[Any]:
    """Return the database's inputs for the CPU and those that it limits to mps, which need nothing a CPU lacks."""
    function = INFOS[name].optim_inputs_func
    inputs = function("cpu", torch.float32)
    known = {item.desc for item in inputs}
    return inputs + [item for item in function("mps", torch.float32) if item.desc not in known]


def cases(*every: str, richest: Sequence[str] = ()) -> Any:
    """Parametrize ``native`` and ``case``: the implementations ``every`` step every input, others only the richest.

    Of the kernels, the CPU's step with one flag and the GPU's with the other.
    """
    parameters = []
    for name, implementation in itertools.product(OURS, (*every, *richest)):
        for item in _inputs(name):
            if implementation not in every and item.desc != RICHEST[name]:
                continue
            if implementation == "foreach" and name != "SGD" and isinstance(item.kwargs.get("lr"), Tensor):
                continue  # torch's foreach Adam takes a Tensor lr only where it is capturable
            case = Case(name, implementation, item.desc, item.kwargs)
            label = f"{name}-{item.desc}-{implementation}".replace(" ", "_")
            parameters.append(pytest.param(LIBRARIES[implementation], case, id=label))
    return pytest.mark.parametrize(("native", "case"), parameters, indirect=["native"])


class Problem:
    """Least squares ``|weight @ x + bias|^2`` with explicit gradients, so that parameters need not require them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(1)
        self.weight, self.bias = self.params = [
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in ((10, 5), (10,))
        ]
        self.x = torch.randn(5, generator=generator, dtype=torch.float64).to(dtype)

    def closure(self) -> Tensor:
        """Set the gradients; return the loss."""
        residual = self.weight.detach() @ self.x + self.bias.detach()
        self.weight.grad, self.bias.grad = 2 * torch.outer(residual, self.x), 2 * residual
        return residual.square().sum()

    def run(self, optimizer: Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.step(self.closure)

    def twin(self) -> "Problem":
        """Return the same problem at the same point, with its own parameters."""
        twin = Problem(self.weight.dtype)
        twin.x = self.x
        for mine, other in zip(twin.params, self.params, strict=True):
            mine.copy_(other.detach())
        return twin


def network(dtype: torch.dtype) -> nn.Sequential:
    """Return the network whose small values the database's tolerances are meant for; it is always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid()).to(dtype)


def flat_state(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters, then all tensors of their states in a fixed order."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [optimizer.state.get(param, {}) for param in params]
    return params + [state[key] for state in states for key in sorted(state) if isinstance(state[key], Tensor)]
