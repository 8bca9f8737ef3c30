"""Tests of all measures of a model: neither the caller's settings nor the kind of the model changes them."""

import copy

import pytest
import torch
from torch import nn

from tests.analysis.classifiers import F64, MEASURES, images, network


def test_models_are_evaluated_and_stay_as_they_are():
    model, (x, targets) = network(), images()
    modes = [module.training for module in model.modules()]
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    for name, measure in MEASURES.items():
        found = measure(model, x, targets)
        torch.testing.assert_close(found, measure(copy.deepcopy(model).eval(), x, targets), rtol=0, atol=0, msg=name)
        assert [module.training for module in model.modules()] == modes, name
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), name
        assert all(parameter.grad is None for parameter in model.parameters()), name
        assert torch.equal(torch.get_rng_state(), state), name


class Normalised(nn.Module):
    def __init__(self, in_place):
        super().__init__()
        self.in_place = in_place

    def forward(self, x):
        return x.sub_(0.5).div_(0.25) if self.in_place else (x - 0.5) / 0.25


def test_models_that_write_to_their_input_are_measured_like_others():
    x, targets = images()
    before, rest = x.clone(), network()
    for name, measure in MEASURES.items():
        one, other = (measure(nn.Sequential(Normalised(in_place), rest), x, targets) for in_place in (True, False))
        torch.testing.assert_close(one, other, msg=name)
        assert torch.equal(x, before), name


class Constant(nn.Module):
    """A model that ignores its images."""

    def __init__(self):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.5, 1.0, -1.0], dtype=F64))

    def forward(self, x):
        return self.logits.expand(len(x), 3)


def test_images_that_a_model_ignores_have_no_importance():
    x, targets = images()
    for name in ("permutation", "gradient", "integrated"):
        assert not MEASURES[name](Constant(), x, targets).any(), name
    for name in ("gradient", "integrated"):
        with pytest.raises(ValueError, match="model: expected an output that can be differentiated"):
            MEASURES[name](Constant().requires_grad_(False), x, targets)


class Drawing(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


SETTINGS = {
    "default device": lambda: torch.device("meta"),
    "inference mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def test_what_the_caller_has_set_changes_no_measure():
    """Images and targets that are made in inference mode are measured outside of it as well."""
    model, (x, targets) = nn.Sequential(Drawing(), network().float()), images()
    x, state = x.float(), torch.get_rng_state()
    for name, measure in MEASURES.items():
        expected = measure(model, x, targets)
        for setting, context in SETTINGS.items():
            with context():
                one, classes = x.clone(), targets.clone()
                inside = measure(model, one, classes)
            for found in (inside, measure(model, one, classes)):
                torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=f"{name}, {setting}")
            assert torch.equal(torch.get_rng_state(), state), (name, setting)


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_code_measures():
    model, (x, targets) = network(), images()

    def measure(x):
        return [MEASURES[name](model, x, targets) for name in ("permutation", "gradient", "integrated", "ablation")]

    torch.testing.assert_close(torch.compile(measure, backend="eager")(x), measure(x))


@pytest.mark.usefixtures("fresh_dynamo")
def test_compiled_models_and_hooks_of_parameters_change_no_measure():
    model, (x, targets) = network(), images()
    measures = [MEASURES[name] for name in ("norm", "eigenvalue")]
    expected = [measure(model, x, targets) for measure in measures]
    model[0].weight.register_hook(lambda gradient: 2 * gradient)
    for each in (model, torch.compile(model, backend="aot_eager")):
        assert [measure(each, x, targets) for measure in measures] == expected


@pytest.mark.usefixtures("mesh")
def test_data_parallel_models_are_measured_without_their_wrapper():
    model, (x, targets) = network(), images()
    parallel = nn.parallel.DistributedDataParallel(model)
    calls = []
    parallel.register_forward_pre_hook(lambda module, args: calls.append(module))
    for name, measure in MEASURES.items():
        if name != "string":  # it runs a copy
            torch.testing.assert_close(measure(parallel, x, targets), measure(model, x, targets), msg=name)
    assert not calls
