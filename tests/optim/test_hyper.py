"""Tests that groups refuse hyper-parameters no step can use, and warn of options that have no effect."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

from loco_ext import optim

LOCALITY = (0.5, 2.0)
NO_NUMBERS = ("0.1", True, None, (0.5, 2.0), 1j)
NO_SIZES = (math.nan, math.inf, -0.1, torch.tensor(math.nan), torch.ones(2))
BAD = {
    "lr": (NO_NUMBERS, NO_SIZES),
    "weight_decay": (NO_NUMBERS, NO_SIZES),
    "momentum": (NO_NUMBERS, NO_SIZES),
    "dampening": (NO_NUMBERS, (math.nan, math.inf)),
    "eps": (NO_NUMBERS, NO_SIZES),
    "betas": (
        (0.9, "ab", None, ("a", 0.9), (0.9, None), (True, 0.9)),
        ((0.9,), (0.9, 0.9, 0.9), (1.0, 0.9), (0.9, math.nan), (-0.1, 0.9)),
    ),
}


def make(cls, **options):
    return cls([nn.Parameter(torch.ones(2, 2, 3, 3))], **options)


@pytest.mark.parametrize("name", BAD)
def test_bad_ones_name_themselves(name):
    for cls in (optim.SGD, optim.Adam, optim.AdamW):
        optimizer = make(cls)
        if name not in optimizer.defaults:
            continue
        for error, values in zip((TypeError, ValueError), BAD[name], strict=True):
            for value in values:
                with pytest.raises(error, match=rf"^{name}(\[.\])?: expected .* got "):
                    make(cls, **{name: value})
                with pytest.raises(error, match=rf"^{name}(\[.\])?: expected .* got "):
                    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], name: value})
        assert len(optimizer.param_groups) == 1


def test_what_torch_takes_is_taken():
    one, half = torch.tensor(1.0), torch.tensor([0.5])
    make(optim.SGD, lr=half, momentum=1.5, dampening=-1, weight_decay=one)
    make(optim.Adam, lr=one, betas=(torch.tensor(0.5), half), eps=0, weight_decay=1)
    make(optim.Adam, lr=np.array(0.1), betas=np.array([0.9, 0.99]), eps=np.float32(1e-8), weight_decay=False)
    with pytest.raises(ValueError, match="Nesterov"):
        make(optim.SGD, nesterov=True)


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
