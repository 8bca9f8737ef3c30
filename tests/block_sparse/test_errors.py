"""Errors of block_sparse_matmul: raised before anything is computed, with the name, what was expected and given."""

import pytest
import torch

from loco_ext import ops
from loco_ext.ops import block_sparse
from tests.block_sparse.cases import CASES, make_problem

with torch.random.fork_rng():
    torch.manual_seed(0)  # names of tests have sizes of the problem, which must be those of other processes
    PROBLEM = make_problem(CASES["odd groups"], torch.float32)  # 5 samples, 6 pixels to 5, 3 groups of 5 channels to 7
X, VALUES, BIAS, GRAD = PROBLEM.operands(torch.float32)
NNZ = PROBLEM.pattern.nnz

REFUSED = [
    ({"x": [1.0]}, "x: expected a tensor, got list"),
    ({"values": None}, "values: expected a tensor, got NoneType"),
    ({"pattern": "full"}, "pattern: expected a BlockPattern, got str"),
    ({"x": X.to_sparse()}, "x: expected a dense tensor, got layout torch.sparse_coo"),
    ({"x": X.long()}, "x: expected float32, float64, bfloat16 or float16, got torch.int64"),
    ({"values": VALUES.cfloat()}, "values: expected float32, .* got torch.complex64"),
    ({"values": VALUES.double()}, "values: expected torch.float32 as x, got torch.float64"),
    ({"bias": BIAS.half()}, "bias: expected torch.float32 as x, got torch.float16"),
    ({"values": VALUES.to("meta")}, "values: expected device cpu as x, got meta"),
    ({"bias": BIAS.to("meta")}, "bias: expected device cpu as x, got meta"),
    ({"x": X.to("meta"), "values": VALUES.to("meta"), "bias": None}, "pattern: expected device meta as x, got cpu"),
    ({"x": X[..., None]}, r"x: expected shape \(N, n_in, C_in\), got \(5, 6, 15, 1\)"),
    ({"x": X[:, :5]}, r"x: expected 6 pixels, as the pattern has, got shape \(5, 5, 15\)"),
    ({"x": X[..., :14]}, "values: expected blocks for the 14 channels of x, got 3 groups"),
    ({"values": VALUES[:, 0]}, r"values: expected shape \(nnz, groups, .* got \("),
    ({"values": VALUES[1:]}, f"values: expected {NNZ} blocks, as the pattern has, got shape"),
    ({"values": VALUES[..., :0]}, "values: expected blocks of at least one element, got shape"),
    ({"bias": BIAS[0]}, r"bias: expected shape \(n_out, C_out\), got \(21,\)"),
    ({"bias": BIAS[:4]}, r"bias: expected shape \(5, 21\), got \(4, 21\)"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_bad_arguments_are_refused_before_anything_is_computed(monkeypatch, changes, message):
    arguments = {"x": X, "values": VALUES, "pattern": PROBLEM.pattern, "bias": BIAS} | changes
    monkeypatch.setattr(block_sparse, "_run", lambda *_: pytest.fail("something was computed"))
    kind = ValueError if "shape" in message or "channels" in message else TypeError
    with pytest.raises(kind, match=message):
        ops.block_sparse_matmul(**arguments)


def changed(indices: torch.Tensor, at: int, to: int) -> torch.Tensor:
    indices = indices.clone()
    indices[at] = to
    return indices


CROW, COL = PROBLEM.pattern.crow_indices, PROBLEM.pattern.col_indices
BY_INPUT = PROBLEM.pattern.transpose()
NO_ADJACENT = torch.ones(2, 6, 6)[..., ::2].transpose(1, 2)[..., ::2]  # neither channels nor pixels are adjacent
# These calls of the operators themselves would read or write out of bounds.
UNSAFE = {
    "a column beyond the pixels": ("matmul", (X, VALUES, CROW, changed(COL, 2, 6), None), "col_indices"),
    "a negative column": ("matmul", (X, VALUES, CROW, changed(COL, 0, -1), None), "col_indices"),
    "rows that descend": ("matmul", (X, VALUES, changed(CROW, 1, NNZ + 9), COL, None), "crow_indices"),
    "rows that end early": ("matmul", (X, VALUES, changed(CROW, -1, NNZ - 1), COL, None), "crow_indices"),
    "no rows": ("matmul", (X, VALUES, CROW[:0], COL[:0], None), "crow_indices"),
    "narrow indices": ("matmul", (X, VALUES, CROW, COL.int(), None), "col_indices"),
    "too few blocks": ("matmul", (X, VALUES[1:], CROW, COL, None), "values"),
    "blocks with gaps": ("matmul", (X, VALUES.mT.contiguous().mT, CROW, COL, None), "values"),
    "channels apart": ("matmul", (X.mT.contiguous().mT, VALUES, CROW, COL, None), "x"),
    "depthwise, channels and pixels apart": (
        "matmul",
        (NO_ADJACENT, torch.ones(1, 3, 1, 1), torch.tensor([0, 1]), torch.tensor([0]), None),
        "x",
    ),
    "another dtype": ("matmul", (X, VALUES.half(), CROW, COL, None), "values"),
    "a short bias": ("matmul", (X, VALUES, CROW, COL, BIAS[1:]), "bias"),
    "no such block": ("input_gradient", (GRAD, VALUES, *BY_INPUT[:2], changed(BY_INPUT[2], 1, NNZ)), "blocks"),
    "no such output pixel": (
        "input_gradient",
        (GRAD, VALUES, BY_INPUT[0], changed(BY_INPUT[1], 1, 5), BY_INPUT[2]),
        "rows",
    ),
    "grad without channels": ("input_gradient", (GRAD[..., :9].contiguous(), VALUES, *BY_INPUT), "values"),
    "grad without a pixel": ("value_gradient", (X, GRAD[:, 1:], CROW, COL, 3), "grad"),
    "grad without a sample": ("value_gradient", (X, GRAD[1:], CROW, COL, 3), "grad"),
    "groups that do not divide": ("value_gradient", (X, GRAD, CROW, COL, 2), "groups"),
    "no groups": ("value_gradient", (X, GRAD, CROW, COL, 0), "groups"),
}


@pytest.mark.parametrize("name", UNSAFE)
def test_the_operators_read_and_write_nothing_beyond_their_tensors(name):
    operator, arguments, argument = UNSAFE[name]
    with pytest.raises(RuntimeError, match=argument + ".*: expected"):
        getattr(torch.ops.loco_ext, f"block_sparse_{operator}")(*arguments)
