"""Errors of block_sparse_matmul: raised before anything is computed, with the name, what was expected and given."""

import pytest
import torch

import loco_ext
from loco_ext import ops
from loco_ext.ops import block_sparse
from tests.block_sparse.cases import CASES, make_problem

PROBLEM = make_problem(CASES["odd groups"], torch.float32)  # 5 samples, 6 pixels to 5, 3 groups of 5 channels to 7
X, VALUES, BIAS = PROBLEM.x.float(), PROBLEM.values.float(), PROBLEM.bias.float()
NNZ = PROBLEM.pattern.nnz

REFUSED = {
    "x is no tensor": ({"x": [1.0]}, TypeError, "x: expected a tensor, got list"),
    "values are no tensor": ({"values": None}, TypeError, "values: expected a tensor, got NoneType"),
    "the pattern is none": ({"pattern": "full"}, TypeError, "pattern: expected a BlockPattern, got str"),
    "sparse x": ({"x": X.to_sparse()}, TypeError, "x: expected a dense tensor, got layout torch.sparse_coo"),
    "integers": ({"x": X.long()}, TypeError, "x: expected float32, float64, bfloat16 or float16, got torch.int64"),
    "complex values": ({"values": VALUES.cfloat()}, TypeError, "values: expected float32, .* got torch.complex64"),
    "mixed dtypes": ({"values": VALUES.double()}, TypeError, "values: expected torch.float32 as x, got torch.float64"),
    "a bias of another dtype": (
        {"bias": BIAS.half()},
        TypeError,
        "bias: expected torch.float32 as x, got torch.float16",
    ),
    "mixed devices": ({"values": VALUES.to("meta")}, TypeError, "values: expected device cpu as x, got meta"),
    "a bias elsewhere": ({"bias": BIAS.to("meta")}, TypeError, "bias: expected device cpu as x, got meta"),
    "the pattern elsewhere": (
        {"x": X.to("meta"), "values": VALUES.to("meta"), "bias": None},
        TypeError,
        "pattern: expected device meta as x, got cpu",
    ),
    "an image": ({"x": X[..., None]}, ValueError, r"x: expected shape \(N, n_in, C_in\), got \(5, 6, 15, 1\)"),
    "too few pixels": (
        {"x": X[:, :5]},
        ValueError,
        r"x: expected 6 pixels, as the pattern has, got shape \(5, 5, 15\)",
    ),
    "channels missing": (
        {"x": X[..., :14]},
        ValueError,
        "values: expected blocks for the 14 channels of x, got 3 groups",
    ),
    "values without groups": ({"values": VALUES[:, 0]}, ValueError, r"values: expected shape \(nnz, groups, .* got \("),
    "a block missing": (
        {"values": VALUES[1:]},
        ValueError,
        f"values: expected {NNZ} blocks, as the pattern has, got shape",
    ),
    "empty blocks": (
        {"values": VALUES[..., :0]},
        ValueError,
        "values: expected blocks of at least one element, got shape",
    ),
    "a bias for all pixels": ({"bias": BIAS[0]}, ValueError, r"bias: expected shape \(n_out, C_out\), got \(21,\)"),
    "a bias that is too short": ({"bias": BIAS[:4]}, ValueError, r"bias: expected shape \(5, 21\), got \(4, 21\)"),
}


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", REFUSED)
def test_bad_arguments_are_refused_before_anything_is_computed(monkeypatch, name, backend):
    changes, kind, message = REFUSED[name]
    arguments = {"x": X, "values": VALUES, "pattern": PROBLEM.pattern, "bias": BIAS} | changes
    monkeypatch.setattr(block_sparse, "_run", lambda *_: pytest.fail("something was computed"))
    with loco_ext.backend(backend), pytest.raises(kind, match=message):
        ops.block_sparse_matmul(**arguments)


BY_OUTPUT = (PROBLEM.pattern.crow_indices, PROBLEM.pattern.col_indices)
BY_INPUT = PROBLEM.pattern.transpose()
GRAD = PROBLEM.grad.float()

ONE_PAIR = (torch.tensor([0, 1]), torch.tensor([0]))


def changed(indices: torch.Tensor, at: int, to: int) -> torch.Tensor:
    indices = indices.clone()
    indices[at] = to
    return indices


# These calls of the operators themselves would read or write out of bounds.
UNSAFE = {
    "a column beyond the pixels": (
        "matmul",
        (X, VALUES, BY_OUTPUT[0], changed(BY_OUTPUT[1], 2, 6), None),
        "col_indices",
    ),
    "a negative column": ("matmul", (X, VALUES, BY_OUTPUT[0], changed(BY_OUTPUT[1], 0, -1), None), "col_indices"),
    "rows that descend": ("matmul", (X, VALUES, changed(BY_OUTPUT[0], 1, NNZ + 9), BY_OUTPUT[1], None), "crow_indices"),
    "rows that end early": (
        "matmul",
        (X, VALUES, changed(BY_OUTPUT[0], -1, NNZ - 1), BY_OUTPUT[1], None),
        "crow_indices",
    ),
    "no rows": ("matmul", (X, VALUES, BY_OUTPUT[0][:0], BY_OUTPUT[1][:0], None), "crow_indices"),
    "narrow indices": ("matmul", (X, VALUES, BY_OUTPUT[0], BY_OUTPUT[1].int(), None), "col_indices"),
    "too few blocks": ("matmul", (X, VALUES[1:], *BY_OUTPUT, None), "values"),
    "blocks with gaps": ("matmul", (X, VALUES.mT.contiguous().mT, *BY_OUTPUT, None), "values"),
    "channels apart": ("matmul", (X.transpose(1, 2).contiguous().transpose(1, 2), VALUES, *BY_OUTPUT, None), "x"),
    "channels and pixels apart": (
        "matmul",
        (torch.ones(2, 6, 6)[..., ::2].transpose(1, 2)[..., ::2], torch.ones(1, 3, 1, 1), *ONE_PAIR, None),
        "x",
    ),
    "another dtype": ("matmul", (X, VALUES.half(), *BY_OUTPUT, None), "values"),
    "a short bias": ("matmul", (X, VALUES, *BY_OUTPUT, BIAS[1:]), "bias"),
    "a block that is not there": (
        "input_gradient",
        (GRAD, VALUES, *BY_INPUT[:2], changed(BY_INPUT[2], 1, NNZ)),
        "blocks",
    ),
    "an output pixel too many": (
        "input_gradient",
        (GRAD, VALUES, BY_INPUT[0], changed(BY_INPUT[1], 1, 5), BY_INPUT[2]),
        "rows",
    ),
    "grad without channels": ("input_gradient", (GRAD[..., :9].contiguous(), VALUES, *BY_INPUT), "values"),
    "grad without a pixel": ("value_gradient", (X, GRAD[:, 1:], *BY_OUTPUT, 3), "grad"),
    "grad without a sample": ("value_gradient", (X, GRAD[1:], *BY_OUTPUT, 3), "grad"),
    "groups that do not divide": ("value_gradient", (X, GRAD, *BY_OUTPUT, 2), "groups"),
    "no groups": ("value_gradient", (X, GRAD, *BY_OUTPUT, 0), "groups"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_the_operators_read_and_write_nothing_beyond_their_tensors(name):
    operator, arguments, argument = UNSAFE[name]
    with pytest.raises(RuntimeError, match=argument + ".*: expected"):
        getattr(torch.ops.loco_ext, f"block_sparse_{operator}")(*arguments)


def test_levels_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="name: expected one of cpu_capabilities"):
        loco_ext.ops.backends.library.use_cpu_capability("avx1024")
