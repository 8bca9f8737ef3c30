"""Tests that groups refuse options no step can use, wherever they are given, and warn of those without an effect."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from loco_ext import optim, sparsity
from tests.optim.stepping import CLASSES, LOCALITY, assert_same, make_params, params_of, set_gradients, train

NO_NUMBERS = ("0.1", True, None, (0.5, 2.0), 1j)
SEVERAL = torch.ones(2)
NO_SIZES = (math.nan, math.inf, -0.1, torch.tensor(math.nan), SEVERAL)
BAD = {
    "lr": {TypeError: NO_NUMBERS, ValueError: NO_SIZES},
    "weight_decay": {TypeError: NO_NUMBERS, ValueError: NO_SIZES},
    "momentum": {TypeError: NO_NUMBERS, ValueError: NO_SIZES},
    "dampening": {TypeError: NO_NUMBERS, ValueError: (math.nan, math.inf)},
    "eps": {TypeError: NO_NUMBERS, ValueError: NO_SIZES},
    "betas": {
        TypeError: (0.9, "ab", None, ("a", 0.9), (0.9, None), (True, 0.9)),
        ValueError: ((0.9,), (0.9, 0.9, 0.9), (1.0, 0.9), (0.9, math.nan), (-0.1, 0.9)),
    },
    "locality": {  # for a kernel of three distance classes and a matrix
        TypeError: (0.5, "ab", ("a", "b"), (1j, 1.0), {0.5, 2.0}, torch.ones(2), [0.5, None]),
        ValueError: (
            *((), (0.5,), (0.5, 1.0, 2.0, 3.0), (-0.5, 2.0), (math.nan, 2.0), (math.inf, 2.0), (0.0, 0.0, 0.0)),
            *([], [LOCALITY], [LOCALITY] * 3, [None, LOCALITY]),
        ),
    },
    "norm": {ValueError: ("l3", None)},
    "state_dtype": {ValueError: (torch.float16, "float32", torch.int8)},
    "stochastic_rounding": {TypeError: (True, 0.5)},
}
# Values that only constructors and add_param_group name: a step takes what float() takes, or raises its error.
NOT_LATE = ("0.1", True, (True, 0.9), SEVERAL)
TOGETHER = [
    ("AdamW", {"norm": "l1"}, "norm: expected 'l2' for AdamW"),
    ("Adam", {"norm": "l1", "decoupled_weight_decay": True}, "norm: expected 'l2' for AdamW"),
    ("SGD", {"stochastic_rounding": 3, "foreach": True}, "state_dtype, stochastic_rounding: expected None"),
    ("Adam", {"state_dtype": torch.float32, "differentiable": True}, "state_dtype, stochastic_rounding: expected None"),
    ("SGD", {"momentum": 1.0, "penalty": sparsity.RingPenalty(0.1)}, "momentum: expected less than 1"),
    ("Adam", {"differentiable": True, "penalty": sparsity.RingPenalty(0.1)}, "penalty: expected None"),
]


def make(name, **options):
    return getattr(optim, name)(make_params([(2, 2, 3, 3), (4, 4)]), **options)


def assert_refused(name, options, error, said, late=True):
    """Assert that no constructor, group or step takes the options, and that nothing changes."""
    with pytest.raises(error, match=said):
        make(name, **options)
    optimizer = make(name)
    with pytest.raises(error, match=said):
        optimizer.add_param_group({"params": make_params([(2, 2, 3, 3), (4, 4)]), **options})
    assert len(optimizer.param_groups) == 1
    for steps in (0, 3) if late else ():  # a step that collects its arguments, and one that is cached
        train(optimizer, steps)
        before = copy.deepcopy(optimizer)
        changed = {**optimizer.param_groups[0]}
        optimizer.param_groups[0].update(options)
        set_gradients(params_of(optimizer), 0)
        with pytest.raises(error, match=said):
            optimizer.step()
        assert_same(optimizer, before)
        optimizer.param_groups[0].update(changed)


@pytest.mark.parametrize("option", BAD)
@pytest.mark.parametrize("name", CLASSES)
def test_bad_options_name_themselves(name, option):
    if option not in make(name).defaults:
        pytest.skip("the optimizer has no such option")
    for error, values in BAD[option].items():
        for value in values:
            late = not any(value is taken for taken in NOT_LATE)
            assert_refused(
                name, {option: value}, error, rf"^{option}(\[.\]| of parameter .: factors)?: expected .* got ", late
            )


@pytest.mark.parametrize(("name", "options", "said"), TOGETHER, ids=str)
def test_options_that_exclude_each_other_are_named(name, options, said):
    assert_refused(name, options, ValueError, said)


@pytest.mark.parametrize("name", CLASSES)
def test_torchs_own_path_refuses_what_has_become_unusable(name):
    optimizer = make(name, foreach=True)
    before = copy.deepcopy(optimizer)
    for lr in (math.nan, -0.1, None):
        optimizer.param_groups[0]["lr"] = lr
        set_gradients(params_of(optimizer), 0)
        with pytest.raises((TypeError, ValueError), match=r"^lr: expected .* got "):
            optimizer.step()
        assert_same(optimizer, before)


def test_what_torch_takes_is_taken():
    one, half = torch.tensor(1.0), torch.tensor([0.5])
    make("SGD", lr=half, momentum=1.5, dampening=-1, weight_decay=one)
    make("Adam", lr=one, betas=(torch.tensor(0.5), half), eps=0, weight_decay=1)
    make("Adam", lr=np.array(0.1), betas=np.array([0.9, 0.99]), eps=np.float32(1e-8), weight_decay=False)
    with pytest.raises(ValueError, match="Nesterov"):
        make("SGD", nesterov=True)


@pytest.mark.parametrize(
    ("options", "group", "said"),
    [
        ({"locality": LOCALITY}, {}, "locality: expected a weight_decay above 0"),
        ({"norm": "l1"}, {}, "norm: expected a weight_decay above 0"),
        ({"weight_decay": 0.1}, {"locality": [LOCALITY], "weight_decay": 0}, "locality: expected a weight_decay above"),
        ({"locality": LOCALITY}, {"params": [torch.ones(3, 3)], "weight_decay": 0.1}, "locality: expected a convol"),
    ],
    ids=["no decay", "no L1 decay", "no decay of a group", "no convolution"],
)
def test_a_decay_that_cannot_act_is_a_warning_where_the_optimizer_is_made(options, group, said):
    with pytest.warns(UserWarning, match=said) as warned:
        optim.SGD([{"params": [nn.Parameter(torch.ones(2, 2, 3, 3))], **group}], lr=0.1, **options)
    assert [each.filename for each in warned] == [__file__]


@pytest.mark.filterwarnings("error")
def test_a_decay_that_acts_somewhere_is_no_warning():
    kernel, bias = nn.Parameter(torch.ones(2, 2, 3, 3)), nn.Parameter(torch.ones(2))
    optim.SGD([{"params": [bias], "weight_decay": 0}, {"params": [kernel]}], 0.1, weight_decay=0.1, locality=LOCALITY)
    optim.SGD([kernel], 0.1, weight_decay=torch.tensor(0.0), locality=LOCALITY)
    optim.SGD([kernel], 0.1)
    # Groups may repeat the options of others, within one optimizer or as ZeroRedundancyOptimizer adds them.
    own = {"weight_decay": 0.1, "locality": LOCALITY}
    optim.SGD([{"params": [kernel], **own}, {"params": [bias], **own, "weight_decay": 0.0}], 0.1)
    optim.SGD([{"params": [kernel], **own}], 0.1).add_param_group({"params": [bias], **own, "weight_decay": 0.0})


def test_a_copy_warns_of_groups_that_are_added():
    copied = copy.deepcopy(optim.SGD([nn.Parameter(torch.ones(2))], 0.1))
    with pytest.warns(UserWarning, match="locality: expected a weight_decay above 0"):
        copied.add_param_group({"params": [nn.Parameter(torch.ones(2, 2, 3, 3))], "locality": LOCALITY})


def test_a_set_of_parameters_is_accepted_with_a_warning():
    """As torch.optim's classes do from version 2.14 on."""
    with pytest.warns(UserWarning, match="params: expected a list or another ordered collection, got a set"):
        optimizer = optim.SGD(set(nn.Linear(3, 2).parameters()), lr=0.1)
    assert len(optimizer.param_groups[0]["params"]) == 2
