"""Tests of exported ONNX files: ONNX Runtime must give torch's outputs."""

import importlib.util
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from loco_ext import extras, sparsity
from loco_ext.nn import LocallyConnected2d
from loco_ext.ops.channels import layer_norm_with_constants
from tests.compaction.networks import network
from tests.tolerances import ONNX

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="needs onnx, onnxscript and onnxruntime",
)


def assert_same(path, model, *shapes):
    """Assert that ONNX Runtime agrees with torch on random inputs of these shapes, to 1e-5 of the largest output."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    for shape in shapes:
        inputs = [torch.randn(shape) for _ in names]
        outputs = model(*inputs)
        found = session.run(None, {n: x.numpy() for n, x in zip(names, inputs, strict=True)})
        for actual, expected in zip(found, outputs if isinstance(outputs, tuple) else [outputs], strict=True):
            assert actual.shape == expected.shape
            allowed = ONNX * max(1.0, expected.abs().max().item())
            torch.testing.assert_close(torch.from_numpy(actual), expected.detach(), rtol=0, atol=allowed)


@needs_onnx
@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "cropping"])
def test_networks_run_at_any_batch_size_and_loaded_ones_at_any_size_of_images(name, tmp_path):
    """The file is of evaluation, and the model stays as it was."""
    model = network(name).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    sparsity.export_onnx(model, (torch.randn(4, 3, 13, 11),), tmp_path / "model.onnx")
    assert os.listdir(tmp_path) == ["model.onnx"]
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert_same(tmp_path / "model.onnx", model.eval(), *((batch, 3, 13, 11) for batch in (1, 2, 7)))
    sparsity.save(model, tmp_path)
    x = torch.randn(1, 3, 13, 11)
    sparsity.export_onnx(sparsity.load(tmp_path), x, str(tmp_path / "sizes.onnx"), dynamic_size=True)
    assert_same(tmp_path / "sizes.onnx", model, (1, 3, 13, 11), (3, 3, 16, 9), (2, 3, 24, 31))


@needs_onnx
def test_a_network_runs_at_any_size_of_images(tmp_path, capfd, recwarn):
    """Nothing is printed, and no source file is named."""
    model = network("residual")
    model(torch.randn(2, 3, 13, 11))  # torch warns once of its padding
    recwarn.clear()
    sparsity.export_onnx(model, (torch.randn(2, 3, 13, 11),), tmp_path / "model.onnx", dynamic_size=True)
    with pytest.raises(sparsity.ModelFileError):
        sparsity.export_onnx(nn.Linear(3, 3), (torch.randn(2, 4),), tmp_path / "other.onnx")
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list
    assert b".py" not in (tmp_path / "model.onnx").read_bytes()
    assert_same(tmp_path / "model.onnx", model, (1, 3, 13, 11), (3, 3, 16, 9))


@pytest.mark.slow
@needs_onnx
def test_layer_normalisations_with_constants_run_at_any_size_of_images(tmp_path):
    class Normalised(nn.Module):
        def forward(self, x):
            x = x.permute(0, 2, 3, 1)
            return tuple(layer_norm_with_constants(x, 5, 0.3, variance, 1e-5) for variance in (0.0, 0.7))

    model = Normalised().eval()
    sparsity.export_onnx(model, torch.randn(2, 4, 5, 3), tmp_path / "model.onnx", dynamic_size=True)
    assert_same(tmp_path / "model.onnx", model, (1, 4, 5, 3), (3, 4, 2, 7))


class Pad(nn.Module):
    def __init__(self, mode, amounts):
        super().__init__()
        self.mode, self.amounts = mode, amounts

    def forward(self, x):
        return F.pad(x, self.amounts, mode=self.mode)


OPERATORS = {
    **{
        f"{mode} {amounts}": Pad(mode, amounts)
        for mode, several in (
            ("constant", ((2, 1, 0, 2), (-1, -2, -1, 0), (-1, 2, 1, -1))),
            ("circular", ((2, 1, 0, 2), (-1, 2, 1, -1))),
            ("reflect", ((-1, 2, 1, -1),)),
            ("replicate", ((-1, 2, 1, -1),)),
        )
        for amounts in several
    },
    "transposed": nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1),
    "same": nn.Conv2d(3, 3, 4, padding="same", groups=3),
    "circular layer": nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    "replicate layer": nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate"),
    "adaptive mean": nn.AdaptiveAvgPool2d((3, 4)),
    "adaptive maximum": nn.AdaptiveMaxPool2d(1),
    "strided slice": nn.Sequential(nn.Conv2d(3, 6, 1), nn.Flatten(2), nn.GELU(), nn.Softmax(1)),
}


class SideBySide(nn.Module):
    """Module whose outputs are those of all OPERATORS on one input."""

    def __init__(self):
        super().__init__()
        self.operators = nn.ModuleList(OPERATORS.values())

    def forward(self, x):
        return tuple(torch.tanh(operator(x)) for operator in self.operators)


@pytest.mark.slow
@needs_onnx
def test_operators_that_compacted_networks_use(tmp_path):
    model = torch.fx.symbolic_trace(SideBySide()).eval()
    sparsity.export_onnx(model, (torch.randn(2, 3, 9, 11),), tmp_path / "model.onnx")
    assert_same(tmp_path / "model.onnx", model, (1, 3, 9, 11), (5, 3, 9, 11))


@needs_onnx
@pytest.mark.slow
def test_locally_connected_layers_run_at_any_batch_size_and_torchs_own_export_takes_them(tmp_path):
    depthwise = LocallyConnected2d(4, 4, 3, padding=1, groups=4, bias=False, input_size=(9, 11))
    grown = LocallyConnected2d(4, 6, 3, stride=2, groups=2, input_size=(9, 11)).grow(1)
    model = nn.Sequential(depthwise, nn.Tanh(), grown, nn.Tanh()).eval()
    sparsity.export_onnx(model, (torch.randn(2, 4, 9, 11),), tmp_path / "model.onnx")
    assert_same(tmp_path / "model.onnx", model, (1, 4, 9, 11), (5, 4, 9, 11))
    torch.onnx.export(model, (torch.randn(2, 4, 9, 11),), tmp_path / "other.onnx", dynamo=True, verbose=False)
    assert_same(tmp_path / "other.onnx", model, (2, 4, 9, 11))


@needs_onnx
@pytest.mark.parametrize(
    ("model", "example", "size", "message"),
    [
        (nn.Unflatten(0, (1, 2)), torch.randn(2, 3), False, "batch"),
        (nn.AdaptiveMaxPool2d(4), torch.randn(2, 3, 9, 10), False, "adaptive_max_pool2d"),
        (nn.Linear(3, 3), torch.randn(2, 4), False, "same reduction dim"),
        (nn.LayerNorm((9, 10)), torch.randn(2, 3, 9, 10), True, r"size\(\)\[2\]"),
        (nn.AdaptiveAvgPool2d((1, 3)), torch.randn(2, 3, 9, 9), True, r"pooling of images of any size to \(1, 3\)"),
        (nn.AdaptiveAvgPool2d((None, 1)), torch.randn(2, 3, 9, 9), True, r"pooling of images of any size to \(.*, 1\)"),
    ],
)
def test_what_onnx_cannot_hold_is_said_and_the_old_file_stays(model, example, size, message, tmp_path):
    (tmp_path / "model.onnx").write_text("old")
    with pytest.raises(sparsity.ModelFileError, match=message) as error:
        sparsity.export_onnx(model, (example,), tmp_path / "model.onnx", dynamic_size=size)
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["model.onnx"]
    assert (tmp_path / "model.onnx").read_text() == "old"


@needs_onnx
@pytest.mark.parametrize(
    ("model", "inputs", "error", "message"),
    [
        ("no model", (torch.ones(1, 2),), TypeError, "model: expected a module, got str"),
        (nn.Identity(), 3, TypeError, "example_inputs: expected a tensor or a tuple of tensors, got int"),
        (nn.Identity(), (), ValueError, r"example_inputs: .* got shapes \[\]"),
        (nn.Identity(), (torch.tensor(1.0),), ValueError, r"example_inputs: .* got shapes \[\(\)\]"),
        (nn.Bilinear(2, 2, 1), (torch.ones(2, 2), torch.ones(3, 2)), ValueError, r"got shapes \[\(2, 2\), \(3, 2\)\]"),
        (nn.Linear(2**15, 2**14, device="meta"), (torch.ones(1, 2**15),), ValueError, "less than 2 GiB"),
    ],
)
def test_wrong_arguments_are_named(model, inputs, error, message, tmp_path):
    with pytest.raises(error, match=message):
        sparsity.export_onnx(model, inputs, tmp_path / "model.onnx")
    assert os.listdir(tmp_path) == []


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"export_onnx needs onnx, onnxscript: .* \"\.\[onnx\]\"`"):
        sparsity.export_onnx(nn.ReLU(), (torch.ones(1, 2),), tmp_path / "model.onnx")
