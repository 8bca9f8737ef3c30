"""Locally connected layers against the convolutions that they come from, and against unfolded images."""

import random

import pytest
import torch
from locally_connected_cases import layer_class, random_conv

DTYPES = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(10))
def test_random_convolutions_are_taken_over(seed, dtype):
    generator = random.Random(seed)
    for _ in range(30):
        conv, case = random_conv(generator, dtype)
        layer = layer_class(case).from_conv(conv, case.input_size)
        x = torch.randn(generator.randint(1, 3), conv.in_channels, *case.input_size, dtype=dtype)
        expected = conv(x)
        torch.testing.assert_close(layer(x), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])
        torch.testing.assert_close(layer(x[0]), expected[0], rtol=DTYPES[dtype], atol=DTYPES[dtype])
        back = layer.to_conv()
        torch.testing.assert_close(back(x), expected, rtol=DTYPES[dtype], atol=DTYPES[dtype])
