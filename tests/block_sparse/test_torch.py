"""block_sparse_matmul with torch's own tools: opcheck, torch.compile, autocast."""

import pytest
import torch

import loco_ext
from loco_ext import ops
from tests.block_sparse.cases import CASES, make_problem
from tests.covering import slow
from tests.tolerances import same_bits


@pytest.fixture(autouse=True)
def _native(fresh_dynamo):
    with loco_ext.backend("native"):
        yield


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*map(slow, [("odd groups", torch.bfloat16), ("no entries", torch.float16), ("no sample", torch.float64)])],
    ids=str,
)
def test_the_operators_pass_opcheck(name, dtype):
    problem = make_problem(CASES[name], dtype)
    x, values, bias, grad = problem.operands(dtype)
    by_output = (problem.pattern.crow_indices, problem.pattern.col_indices)
    operators = torch.ops.loco_ext
    calls = [
        (operators.block_sparse_by_pixel.default, (x.transpose(1, 2),)),
        (operators.block_sparse_matmul.default, (x, values, *by_output, bias)),
        (operators.block_sparse_matmul.default, (x, values, *by_output, None)),
        (operators.block_sparse_input_gradient.default, (grad, values, *problem.pattern.transpose())),
        (operators.block_sparse_value_gradient.default, (x, grad, *by_output, values.shape[1])),
    ]
    for operator, arguments in calls:
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}


@pytest.mark.parametrize(
    ("compiler", "backend"),
    [("aot_eager", "native"), slow(("aot_eager", "reference")), slow(("inductor", "native"))],
)
def test_a_training_step_compiles_into_one_graph(compiler, backend, monkeypatch):
    monkeypatch.setenv("CI", "true")  # then inductor is strict about operators with decompositions
    problem = make_problem(CASES["convolution"], torch.float32)
    operands = [t.float().requires_grad_() for t in (problem.x, problem.values, problem.bias)]
    problem.pattern.transpose()

    def loss(x, values, bias):
        return ops.block_sparse_matmul(x * 2, values, problem.pattern, bias).sin().sum()

    no_cache = torch._inductor.config.patch(fx_graph_cache=False)  # earlier compilations are not used again
    with loco_ext.backend(backend), no_cache:
        eager = loss(*operands)
        compiled = torch.compile(loss, fullgraph=True, backend=compiler)(*operands)
        torch.testing.assert_close(compiled, eager)
        gradients = [torch.autograd.grad(value, operands) for value in (eager, compiled)]
    torch.testing.assert_close(*gradients)
    assert all(torch.count_nonzero(gradient) for gradient in gradients[1])


@pytest.mark.parametrize(
    ("dtype", "cast", "computed"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.float16),
        (torch.float64, torch.bfloat16, torch.float64),
    ],
    ids=str,
)
def test_autocast_computes_in_its_dtype_and_gives_gradients_in_the_operands_own(dtype, cast, computed):
    problem = make_problem(CASES["convolution"])
    x, values, bias, grad = problem.operands(dtype)
    leaves = [t.requires_grad_() for t in (x, values, bias)]
    with torch.autocast("cpu", cast):
        y = ops.block_sparse_matmul(x, values, problem.pattern, bias)
    assert same_bits(
        y, ops.block_sparse_matmul(x.to(computed), values.to(computed), problem.pattern, bias.to(computed))
    )
    gradients = torch.autograd.grad(y, leaves, grad.to(computed))
    assert [gradient.dtype for gradient in gradients] == [dtype] * 3
