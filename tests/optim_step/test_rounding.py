"""Tests of the optimizer step's dtype conversions, stochastic rounding, and independence of the number of threads."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from loco_ext import ops
from loco_ext.reference.rounding import philox
from tests.covering import covering
from tests.optim_step.cases import (
    assert_native_is_reference,
    assert_same,
    make_case,
    with_interpreter,
    with_kernels,
    with_reference,
)
from tests.optim_step.maps import LOCO_2D
from tests.tolerances import STANDARD_ERRORS, same_bits

pytestmark = pytest.mark.usefixtures("kernels")

HALVES = [torch.bfloat16, torch.float16]
ADD_GRADIENT = torch.tensor([[-1.0, 0, 0, 0]], dtype=torch.float64)  # lr = -1: a weight of -0 becomes its gradient


def all_values(dtype: torch.dtype) -> Tensor:
    """Return all 65536 numbers of a half-precision dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def negative_zeros(count: int, dtype: torch.dtype, spread: bool = False) -> Tensor:
    return torch.full((2 * count if spread else count,), -0.0, dtype=dtype)[:: 2 if spread else 1]


@pytest.mark.parametrize("spread", [False, True], ids=["dense", "with_gaps"])
@pytest.mark.parametrize("half", HALVES, ids=str)
def test_every_half_precision_number_is_read_exactly_and_written_back_unchanged(half, spread):
    values = all_values(half)
    for to in (torch.float32, torch.float64, half):
        w, buffer = negative_zeros(len(values), to, spread), negative_zeros(len(values), half, spread)
        ops.optim_step_sgd([w], [values], [buffer], ADD_GRADIENT, first=[1])
        assert same_bits(w, values.to(to))
        assert same_bits(buffer, values)


def between(half: torch.dtype) -> Tensor:
    """Return float32 midpoints of neighbouring numbers of the dtype, the numbers next to these, and random bits."""
    values = all_values(half).float()
    values = values[values.isfinite()].unique().double()
    middle = ((values[1:] + values[:-1]) / 2).float()  # exact in float32
    up, down = torch.tensor(math.inf), torch.tensor(-math.inf)
    random = torch.randint(-(2**31), 2**31, (2**18,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    largest = torch.finfo(half).max
    ends = torch.tensor([65519.996, 65520.0, 65536.0, 3.3961775e38, 3.4028235e38, math.inf, math.nan, 1e-45, largest])
    return torch.cat([middle, torch.nextafter(middle, up), torch.nextafter(middle, down), random, ends, -ends])


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_float32_rounds_to_the_nearest_even(half):
    values = between(half)
    w = negative_zeros(len(values), half)
    ops.optim_step_sgd([w], [values], [], ADD_GRADIENT)
    assert same_bits(w, values.to(half))


@pytest.mark.parametrize("to", [torch.float32, *HALVES], ids=str)
def test_float64_rounds_to_the_nearest_even(to):
    values = torch.cat([between(half).double() for half in HALVES])
    values = torch.cat([values, values * (1 + 2.0**-25), values * (1 + 2.0**-40), torch.tensor([1e300, -1e-300])])
    buffer = negative_zeros(len(values), to)
    ops.optim_step_sgd([torch.zeros(len(values)).double()], [values], [buffer], ADD_GRADIENT, first=[1])
    # By way of float32, as torch does on x86-64. On ARM, torch takes this way only for part of a tensor.
    assert same_bits(buffer, values.float().to(to))


KNOWN_ANSWERS = [  # counter, key, result: published with the generator's source (Random123, kat_vectors)
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@with_kernels("reference")
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_known_answers(counter, key, expected):
    c = [int(word, 16) for word in counter.split()]
    k = [int(word, 16) for word in key.split()]
    element = np.array([c[0] | c[1] << 32], dtype=np.uint64).view(np.int64)
    words = philox(torch.from_numpy(element), k[0] | k[1] << 32, c[2], c[3])
    assert " ".join(f"{word.item():08x}" for word in words) == expected


@with_interpreter
@pytest.mark.parametrize(
    ("seed", "rounding_step"),
    covering([0, 1, 2**40 + 3, -1, 2**63 - 1, -(2**63)], [0, 1, 2**32 - 1, 2**32 + 5], strength=1),
)
def test_stochastic_rounding_gives_the_references_bits(seed, rounding_step):
    shapes = [(6, 5, 3, 3), (29,), (), (0, 3), (3, 1500)]
    options = {"seed": seed, "rounding_step": rounding_step, "maps": [LOCO_2D], "map_index": [0, -1, -1, -1, -1]}
    for states in (0, 1):
        assert_native_is_reference(make_case("sgd", shapes, dtypes=[torch.bfloat16] * 3, states=states, **options))
    options["ordinals"] = [7, 0, 2**32 - 1, 3, 3]
    case = make_case("adam", shapes, dtypes=[torch.bfloat16] * 3, states=3, amsgrad=True, **options)
    case.lists["exp_avg_sqs"] = [t.float() for t in case.lists["exp_avg_sqs"]]
    assert_native_is_reference(case)


def rounded(values: Tensor, **options) -> Tensor:
    """Return a bfloat16 parameter to which float32 values were written with stochastic rounding."""
    case = make_case("sgd", [values.shape], states=0, seed=11, **options)
    case.lists |= {"params": [torch.full_like(values, -0.0, dtype=torch.bfloat16)], "grads": [values]}
    case.hyper = ADD_GRADIENT
    return case.step().params[0]


@with_reference
def test_stochastic_rounding_takes_one_of_the_two_neighbours_and_keeps_what_is_exact():
    values = torch.cat([torch.randn(5000), torch.randn(1000) * 1e-39, torch.tensor([0.0, 1e38, -1e38])])
    bits = values.view(torch.int32)
    toward_zero = (bits & ~0xFFFF).view(torch.float32)
    away = ((bits & ~0xFFFF) + 0x10000).view(torch.float32)
    result = rounded(values)
    is_away = result.float() == away
    assert ((result.float() == toward_zero) | is_away).all()
    assert 0.3 < is_away.float().mean() < 0.7
    exact = all_values(torch.bfloat16).float()
    assert same_bits(rounded(exact), exact.bfloat16())


@with_reference
@pytest.mark.parametrize(("part", "sign"), [(2**-16, 1), (0.1, -1), (0.75, 1), (1 - 2**-16, -1)])
def test_stochastic_rounding_is_unbiased(part, sign):
    n, ulp = 2**19, 2.0**-7
    value = torch.tensor(1 + part * ulp)  # a multiple of ulp / 2^16, as float32 is
    result = rounded(sign * value.expand(n).contiguous())
    part = (value.item() - 1) / ulp
    standard_error = ulp * math.sqrt(part * (1 - part) / n)
    assert abs(sign * result.double().mean().item() - value.item()) <= STANDARD_ERRORS * standard_error
    assert result.unique().numel() == 2


@with_reference
@pytest.mark.parametrize(
    ("seed", "step", "ordinals"),
    [(11, 0, None), (11 + 2**32, 1, [1, 0]), (-1, 2**32 - 1, [2**32 - 1, 7])],  # ordinals count parameters by default
    ids=["default", "high seed", "large"],
)
def test_random_words_are_philoxs_of_seed_step_ordinal_and_element(seed, step, ordinals):
    """The parameter is rounded by the first word of each element, and the buffer, independently, by the second."""
    case = make_case("sgd", [(1000,)] * 2, states=1, seed=seed, rounding_step=step, ordinals=ordinals, first=[1, 1])
    for name in ("params", "momentum_buffers"):
        case.lists[name] = [negative_zeros(1000, torch.bfloat16) for _ in range(2)]
    case.hyper = ADD_GRADIENT
    case.step()
    for i, ordinal in enumerate(ordinals or (0, 1)):
        words = philox(torch.arange(1000), seed, ordinal, step)
        bits = case.lists["grads"][i].view(torch.int32)
        for name, word in (("params", words[0]), ("momentum_buffers", words[1])):
            expected = (bits + (word & 0xFFFF).to(torch.int32)) & ~0xFFFF
            assert same_bits(case.lists[name][i].float(), expected.view(torch.float32)), name


@with_reference
def test_only_bfloat16_parameters_and_their_bfloat16_states_are_rounded_stochastically():
    for dtypes in itertools.product([torch.float32, torch.float64, torch.float16], [torch.float32], HALVES):
        case = make_case("sgd", [(500,)], dtypes=dtypes)
        assert_same(case.copy(seed=3).step(), case.copy().step())
    for state in (torch.float32, torch.float16):
        case = make_case("sgd", [(500,)], dtypes=[torch.bfloat16, torch.bfloat16, state])
        with_seed, without = case.copy(seed=3).step(), case.copy().step()
        assert torch.equal(with_seed.lists["momentum_buffers"][0], without.lists["momentum_buffers"][0])
        assert not torch.equal(with_seed.params[0], without.params[0])


THREADED = {
    "float32": {},
    "float64": {"dtypes": [torch.float64] * 3},
    "rounded": {"dtypes": [torch.bfloat16] * 3, "seed": 9},
    "mixed": {"dtypes": [torch.float16, torch.float32, torch.float32], "grad_scale": torch.tensor(3.0)},
}


@with_kernels("cpu")
@pytest.mark.parametrize(("kind", "rule"), covering(THREADED, ["sgd", "adam"], strength=1))
def test_any_number_of_threads_gives_the_same_bits(rule, kind):
    """Some tensors have many chunks, some a part of one, and some share a chunk with many others."""
    shapes = [(64, 64, 3, 3), (70001,), *[(65,)] * 150, (33, 41, 5, 5), (32768 - 128,), (1,), (300, 5, 3, 3)]
    map_index = [0 if len(shape) == 4 and shape[-1] == 3 else -1 for shape in shapes]
    case = make_case(rule, shapes, states=3, maps=[LOCO_2D], map_index=map_index, **THREADED[kind])
    case.params[-1] = case.params[-1].contiguous(memory_format=torch.channels_last)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(case.copy().step())
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])
    assert_native_is_reference(case)
