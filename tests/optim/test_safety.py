"""Tests of the arguments that an optimizer refuses, of the version counters that it bumps, and of what it imports."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from loco_ext import optim
from tests.optim.stepping import CLASSES, RICH

pytestmark = pytest.mark.usefixtures("native")


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("kind", ["sparse", "complex"])
@pytest.mark.parametrize("apart", [False, True], ids=["one rule", "two rules"])
def test_sparse_and_complex_gradients_are_refused_before_anything_is_written(name, kind, apart):
    dense = nn.Parameter(torch.ones(3, 2))
    odd = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64 if kind == "complex" else torch.float32))
    groups = [{"params": [dense], "maximize": apart}, {"params": [odd]}]
    ours = getattr(optim, name)(groups, **RICH[name])
    dense.grad = torch.ones(3, 2)
    odd.grad = torch.ones_like(odd).to_sparse() if kind == "sparse" else torch.ones_like(odd)
    with pytest.raises(TypeError, match="sparse" if kind == "sparse" else "complex64"):
        ours.step()
    assert torch.equal(dense, torch.ones(3, 2))
    assert torch.equal(odd, torch.ones_like(odd))
    assert not ours.state


@pytest.mark.parametrize("name", CLASSES)
def test_the_version_of_what_is_written_goes_up(name):
    """Autograd must notice a step between a forward and its backward."""
    param = nn.Parameter(torch.ones(3))
    ours = getattr(optim, name)([param], lr=0.1)
    loss = param.square().sum()
    for _ in range(2):
        version = param._version
        param.grad = torch.ones(3)
        ours.step()
        assert param._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("native", ["cpu"], indirect=True)
def test_optimizers_import_no_compaction():
    """The first argument makes the package import nothing by itself, as for its command line."""
    code = "import sys; import loco_ext.optim; print(*sys.modules)"
    command = [sys.executable, "-c", f"import sys; sys.argv[0] = 'loco-ext'; {code}"]
    modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "loco_ext.penalties" in modules
    assert not [name for name in modules if name.startswith("loco_ext.sparsity")]
