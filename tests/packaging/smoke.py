"""Smoke test of an installed package: a few training steps with every optimizer, native against reference."""

import copy

import loco_ext.triton_kernels
import torch
from torch import nn

import loco_ext
from loco_ext import info, optim


def train(model: nn.Module, name: str, backend: str) -> list[torch.Tensor]:
    groups = optim.parameter_groups(model, 0.1, locality=(0.5, 2.0))
    optimizer = getattr(optim, name)(groups, lr=0.01)
    images = torch.linspace(-1, 1, 2 * 8 * 8).reshape(2, 1, 8, 8)
    with loco_ext.backend(backend):
        for _ in range(3):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
    return [p.detach() for p in model.parameters()]


def main() -> None:
    info.show()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 5, bias=False))
    for name in ("SGD", "Adam", "AdamW"):
        native, reference = (train(copy.deepcopy(model), name, backend) for backend in ("native", "reference"))
        assert all(map(torch.equal, native, reference)), f"{name}: native and reference differ"
    print("smoke ok:", loco_ext.__file__)


if __name__ == "__main__":
    main()
