"""Tests of what torch.compile and torch.export make of our queries of them."""

import torch
from torch import Tensor, nn

from loco_ext import compiler


class Exported(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if compiler.is_exporting() else x


def test_torch_compile_is_no_exporter(fresh_dynamo):
    module, x = Exported(), torch.zeros(1)
    assert torch.compile(module, fullgraph=True, backend="eager")(x) == module(x) == 0
    for strict in (False, True):
        assert torch.export.export(module, (x,), strict=strict).module()(x) == 1
