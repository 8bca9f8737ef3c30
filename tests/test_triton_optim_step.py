"""The Triton kernels of the optimizer step against the reference, bit by bit, in Triton's interpreter.

The interpreter must be chosen before triton is imported, so it runs in a process of its own. It rounds fused
multiply-adds twice; here it computes them in float64, as the reference does, so that in float32 both give the same
bits. In float64 both round them twice.
"""

import importlib.util
import io
import itertools
import math
import mmap
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from decimal import Context, Decimal

import numpy as np
import pytest
import torch
from loco_ext.triton_kernels import optim_step_tables as tables
from optim_step_cases import Case, assert_same, assert_untouched, make_case, whole
from test_optim_step import ADAM_DECAYS, ANY_MAP, DECAYS, FLOATS, LOCO_2D, MAPS, MOMENTUM, SHAPES, hyper_with
from test_optim_step_layouts import KINDS, LAYOUTS, OTHER_SHAPES, SPECIAL, gaps
from tolerances import ULPS_OF_TWO_ROUNDINGS, assert_within_ulps, same_bits

from loco_ext.reference.rounding import philox

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

ORDER = {
    "sgd": "first group_index hyper lrs lr_index maps map_index penalties nesterov maximize l1",
    "adam": "group_index hyper lrs lr_index maps map_index penalties amsgrad maximize decoupled l1",
}


def arguments(case: Case) -> list:
    """What the operator would pass on: lists, then options in order."""
    count = len(case.params)
    names = [*ORDER[case.rule].split(), "grad_scale", "found_inf", "ordinals", "seed", "rounding_step"]
    values = {"first": [], "group_index": [0] * count, "lrs": [], "lr_index": [], "maps": [], "map_index": [-1] * count}
    values["penalties"] = []
    values |= {"hyper": case.hyper, "grad_scale": None, "found_inf": None, "seed": None, "rounding_step": 0}
    values |= {"ordinals": list(range(count))} | case.options
    return [*case.lists.values(), *(values.get(name, False) for name in names)]


# ---- in the interpreter's process


def prepare() -> None:
    import triton.runtime.interpreter as interpreter

    def fma(_self, x, y, z):
        wide = [a.data.astype(np.float64) for a in (x, y, z)]
        return interpreter.TensorHandle((wide[0] * wide[1] + wide[2]).astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma
    np.seterr(all="ignore")
    torch.set_num_threads(1)


def run(data: bytes, narrow: int | None) -> bytes:
    """Makes the steps of cases one after another; the tensors of a case's ``before`` are copied first."""
    from loco_ext.triton_kernels import optim_step

    tables.NARROW = tables.NARROW if narrow is None else narrow
    jobs = torch.load(io.BytesIO(data), weights_only=False)
    for case, before in jobs:
        for tensor, values in before:
            tensor.copy_(values)
        (optim_step.optim_step_sgd if case.rule == "sgd" else optim_step.optim_step_adam)(*arguments(case))
    tables.NARROW = 2**31 - tables.BLOCK
    out = io.BytesIO()
    torch.save(jobs[-1][0], out)
    return out.getvalue()


def scalars(data: bytes) -> torch.Tensor:
    """What Adam's first kernel computes for each tensor."""
    from loco_ext.triton_kernels import optim_step

    case = torch.load(io.BytesIO(data), weights_only=False)
    run_adam, optim_step._TABLES = optim_step.optim_step_adam, tables.Tables()
    run_adam(*arguments(case))
    ((_key, plan),) = optim_step._TABLES._recent["plan"]
    return plan.scalars.numpy()


def far(numel: int, stride: int, wide: bool) -> list[np.ndarray]:
    """Steps only the last elements of a bfloat16 tensor that would not fit into memory; returns them and gradients."""
    from loco_ext.triton_kernels import optim_step
    from loco_ext.triton_kernels.optim_step_kernels import COLUMNS, FIRST_CHUNK

    skipped = numel // tables.BLOCK - 1
    begin = skipped * tables.BLOCK
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    memory = [mmap.mmap(-1, 2 * numel * stride, flags=flags) for _ in range(2)]
    w, g = (torch.frombuffer(m, dtype=torch.bfloat16)[::stride] for m in memory)
    w[begin:], g[begin:] = 1, torch.arange(numel - begin)
    step = tables.Step([w], [g], [], [0], [], [], [], [-1], ordinals=[0])
    plan = tables._Builder(step).plan(w.device)
    plan.rows[FIRST_CHUNK.value :: COLUMNS.value] -= skipped
    batch = replace(plan.batches[0], owners=plan.batches[0].owners[skipped:])
    assert batch.kind.wide == wide
    hyper = torch.tensor([0.25, 0.0, 0.0, 0.0], dtype=torch.float64)
    form = {"rule": "sgd", "maximize": False, "l1": False}
    optim_step._launch(replace(plan, batches=(batch,)), hyper, None, None, 5, 3, form)
    return [w[begin:].clone().float().numpy(), g[begin:].clone().float().numpy()]


# ---- in this process


def saved(thing: object) -> bytes:
    out = io.BytesIO()
    torch.save(thing, out)
    return out.getvalue()


@dataclass
class Interpreter:
    pool: ProcessPoolExecutor

    def steps(self, *jobs: tuple[Case, list], narrow: int | None = None) -> Case:
        data = self.pool.submit(run, saved(jobs), narrow).result()
        return torch.load(io.BytesIO(data), weights_only=False)

    def step(self, case: Case, narrow: int | None = None) -> Case:
        return self.steps((case.copy(), []), narrow=narrow)


@pytest.fixture(scope="module")
def interpreter():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(prepare).result()
    with pool:
        yield Interpreter(pool)


def assert_same_as(actual: Case, expected: Case) -> None:
    """The same bits; in float64, where Adam's corrections come from other functions than the reference's, nearly so."""
    for name, tensors in expected.lists.items():
        for i, (a, b) in enumerate(zip(actual.lists[name], tensors, strict=True)):
            if expected.params[i].dtype == torch.float64 and expected.rule == "adam":
                special = ~b.isfinite() | (b == 0)
                assert same_bits(a[special], b[special])
                assert_within_ulps(a[~special], b[~special], ULPS_OF_TWO_ROUNDINGS, scale=4.0)
            else:
                assert same_bits(a, b), f"{name}[{i}] differs: {a.flatten()[:8]} instead of {b.flatten()[:8]}"


def assert_is_reference(interpreter: Interpreter, case: Case, narrow: int | None = None) -> None:
    expected = case.copy().step("reference")
    assert_same_as(interpreter.step(case, narrow), expected)
    assert any(
        not same_bits(a, b) for name, ts in expected.lists.items() for a, b in zip(ts, case.lists[name], strict=True)
    ) or all(p.numel() == 0 for p in case.params)


def sgd_case(momentum: str, decay: str, nesterov: bool, maximize: bool, dtype: torch.dtype) -> Case:
    options = {**MOMENTUM[momentum], **DECAYS[decay]}
    hyper = hyper_with("sgd", options.pop("decay", None), dampening=0.0 if nesterov else 0.1)
    return make_case("sgd", SHAPES, dtypes=[dtype] * 3, hyper=hyper, nesterov=nesterov, maximize=maximize, **options)


def adam_case(beta1: float, decay: str, amsgrad: bool, maximize: bool, dtype: torch.dtype) -> Case:
    options = dict(ADAM_DECAYS[decay])
    hyper = hyper_with("adam", options.pop("decay", None), beta1=beta1)
    options |= {"states": 3 if amsgrad else 2, "amsgrad": amsgrad, "maximize": maximize}
    return make_case("adam", SHAPES, dtypes=[dtype] * 3, hyper=hyper, **options)


# Every option with every decay, the others in turn.
SGD = [
    (momentum, decay, i % 2 == 1, i % 3 == 1, FLOATS[i % 4])
    for i, (momentum, decay) in enumerate(itertools.product(MOMENTUM, DECAYS))
]
ADAM = [
    (beta1, decay, i % 2 == 1, i % 3 == 1, FLOATS[i % 4])
    for i, (beta1, decay) in enumerate(itertools.product([0.9, 0.4, 0.0], ADAM_DECAYS))
]


@pytest.mark.parametrize("which", SGD, ids=str)
def test_sgd_gives_the_references_bits(interpreter, which):
    assert_is_reference(interpreter, sgd_case(*which))


@pytest.mark.parametrize("which", ADAM, ids=str)
def test_adam_gives_the_references_bits(interpreter, which):
    assert_is_reference(interpreter, adam_case(*which))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_all_options_give_the_references_bits(interpreter, dtype):
    for which in itertools.product(MOMENTUM, DECAYS, [False, True], [False, True]):
        assert_is_reference(interpreter, sgd_case(*which, dtype))
    for which in itertools.product([0.9, 0.4, 0.0], ADAM_DECAYS, [False, True], [False, True]):
        assert_is_reference(interpreter, adam_case(*which, dtype))


@pytest.mark.parametrize("step", [0, 1, 999, 10**6])
def test_adam_gives_the_references_bits_early_and_late(interpreter, step):
    assert_is_reference(interpreter, make_case("adam", SHAPES, step=step, **MAPS))


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.999999, 1 - 2**-53, 5e-324])
def test_powers_of_beta_are_rounded_once(interpreter, beta):
    steps = [1, 2, 3, 4, 7, 10, 31, 100, 365, 1000, 4097, 65535, 10**6, 10**7]
    hyper = (0.5, 0.0, beta, beta, 1e-8)
    case = make_case("adam", [()] * len(steps), hyper=hyper)
    case.lists["steps"] = [torch.tensor(float(t - 1), dtype=(torch.float32, torch.float64)[t % 2]) for t in steps]
    actual = interpreter.pool.submit(scalars, saved(case)).result()
    powers = [float(Context(prec=60, Emin=-(10**9), Emax=10**9).power(Decimal(beta), t)) for t in steps]
    assert actual[:, 6].tolist() == [-(0.5 / (1 - power)) for power in powers]
    assert actual[:, 7].tolist() == [math.sqrt(1 - power) for power in powers]


def test_each_group_and_parameter_has_its_own_hyperparameters_map_first_and_step(interpreter):
    case = make_case("sgd", SHAPES[:3] * 2, group_index=[0, 1, 2, 2, 1, 0], first=[0, 1, 0, 1, 0, 1])
    case.hyper = torch.tensor([[0.1, 0.2, 0.9, 0.0], [0.3, 0.0, 0.5, 0.5], [0.01, 0.5, 0.0, 0.2]], dtype=torch.float64)
    case.options |= {"maps": [LOCO_2D, LOCO_2D.square()], "map_index": [1, -1, -1, 0, -1, -1]}
    assert_is_reference(interpreter, case)
    case = make_case("adam", SHAPES[:3] * 2, group_index=[0, 1, 1, 0, 1, 0])
    case.hyper = torch.tensor([[0.1, 0.2, 0.9, 0.99, 1e-8], [0.3, 0.0, 0.5, 0.9, 1e-3]], dtype=torch.float64)
    case.lists["steps"] = [torch.tensor(7.0 * i, dtype=(torch.float32, torch.float64)[i % 2]) for i in range(6)]
    assert_is_reference(interpreter, case)


@pytest.mark.parametrize("rule", ["sgd", "adam", "adamw"])
def test_learning_rates_are_read_from_memory(interpreter, rule):
    options = {"decoupled": True} if rule == "adamw" else {}
    case = make_case(rule[:4], SHAPES[:4], group_index=[0, 1, 2, 1], **options)
    case.hyper = case.hyper.repeat(3, 1)
    lrs = [torch.tensor(0.03), torch.tensor([0.07], dtype=torch.float64)]
    expected = case.copy()
    expected.hyper = case.hyper.clone()
    expected.hyper[0, 0], expected.hyper[2, 0] = lrs[1].item(), lrs[0].item()
    case.options |= {"lrs": lrs, "lr_index": [1, -1, 0]}
    assert_same(interpreter.step(case), expected.step("reference"))
    for option, value in ("lr_index", [1, 1, 0]), ("lrs", [lrs[0], lrs[0].double()]):
        other = interpreter.step(case.copy(**{option: value}))
        assert any(not same_bits(a, b) for a, b in zip(other.params, expected.params, strict=True))


@pytest.mark.parametrize("which", ANY_MAP)
def test_any_map_gives_the_references_bits(interpreter, which):
    shape, decay_map = ANY_MAP[which]
    formats = [torch.contiguous_format, *([torch.channels_last] if len(shape) == 4 else [])]
    for (rule, dtype), memory_format in itertools.product([("sgd", torch.float32), ("adam", torch.bfloat16)], formats):
        options = {"decoupled": True} if rule == "adam" else {}
        case = make_case(rule, [(5,), shape], dtypes=[dtype] * 3, maps=[decay_map], map_index=[-1, 0], **options)
        case.params[1] = case.params[1].contiguous(memory_format=memory_format)
        assert_is_reference(interpreter, case)


GUARD = 77.0


def guarded(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A contiguous copy with other elements before and behind."""
    memory = torch.full((tensor.numel() + 2 * offset,), GUARD, dtype=tensor.dtype)
    return memory[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_tensors_of_one_or_more_blocks_give_the_references_bits(interpreter, dtype):
    sizes = [k * tables.BLOCK + extra for k in (1, 2) for extra in (-1, 0, 1)]
    shapes = [*((size,) for size in sizes), (40, 30, 3, 3), (9, 7), (20, 11, 5, 5)]
    options = {"maps": [LOCO_2D, ANY_MAP["5x5"][1]], "map_index": [-1] * len(sizes) + [0, -1, 1], "seed": 3}
    case = make_case("sgd", shapes, dtypes=[dtype] * 3, **options)
    expected = case.copy().step("reference")
    for name, tensors in case.lists.items():  # every second can be accessed in vectors
        case.lists[name] = [guarded(t, (8, 1)[i % 2]) for i, t in enumerate(tensors)]
    actual = interpreter.step(case)
    assert_same(actual, expected)
    for tensor in itertools.chain(*actual.lists.values()):
        offset = tensor.storage_offset()
        memory = whole(tensor)
        assert (torch.cat([memory[:offset], memory[-offset:]]) == GUARD).all()


def laid_out(interpreter: Interpreter, case: Case, **layouts) -> None:
    """Steps the case in the layouts given: values as for contiguous tensors, strides and gaps as they were."""
    expected = case.copy().step("reference")
    given = case.laid_out(**layouts)
    stepped = interpreter.step(given)
    assert_same_as(stepped, expected)
    for name, tensors in stepped.lists.items():
        for tensor, before in zip(tensors, given.lists[name], strict=True):
            assert tensor.stride() == before.stride()
            assert same_bits(gaps(tensor), gaps(before)), f"{name}: memory outside the view was written"


@pytest.mark.parametrize("param", LAYOUTS)
def test_any_mix_of_layouts_gives_the_references_bits(interpreter, param):
    layouts, kinds = list(LAYOUTS.values()), itertools.cycle(KINDS.values())
    for shift, grad in enumerate(layouts):
        kind = dict(next(kinds))
        case = make_case("sgd", [(6, 5, 3, 3)], maps=[LOCO_2D], map_index=[0], **kind)
        state = layouts[(3 * shift + 1) % len(layouts)]
        laid_out(interpreter, case, params=LAYOUTS[param], grads=grad, momentum_buffers=state)


@pytest.mark.parametrize("kind", KINDS)
def test_any_layouts_of_adams_states_give_the_references_bits(interpreter, kind):
    case = make_case("adam", [(6, 5, 3, 3)], states=3, amsgrad=True, maps=[LOCO_2D], map_index=[0], **KINDS[kind])
    names = ["params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]
    layouts = list(LAYOUTS.values())
    for shift in (1, 4):
        chosen = {name: layouts[(shift + 2 * k) % len(layouts)] for k, name in enumerate(names)}
        laid_out(interpreter, case, **chosen)


@pytest.mark.parametrize("which", OTHER_SHAPES)
def test_other_shapes_step_in_any_layout(interpreter, which):
    shape, layout = OTHER_SHAPES[which]
    case = make_case("sgd", [shape], dtypes=[torch.bfloat16] * 3, seed=3)
    for names in (["params"], ["grads"], ["params", "momentum_buffers"]):
        laid_out(interpreter, case, **dict.fromkeys(names, layout))


@pytest.mark.parametrize("kind", KINDS)
def test_elements_numbered_in_64_bits_give_the_references_bits(interpreter, kind):
    case = make_case("sgd", [(6, 5, 3, 3), (70, 11, 3, 3)], maps=[LOCO_2D], map_index=[0, 0], **KINDS[kind])
    case.params[1] = LAYOUTS["taps_slowest"](case.params[1])
    assert_is_reference(interpreter, case, narrow=0)


@pytest.mark.skipif(sys.platform != "linux" or sys.maxsize < 2**32, reason="needs Linux's mmap and 64 bits")
@pytest.mark.parametrize("stride", [1, 3])
@pytest.mark.parametrize(
    ("numel", "wide"),
    [(tables.NARROW - 1, False), (tables.NARROW, False), (tables.NARROW + 1, True), (2**32 + 100, True)],
)
def test_elements_beyond_2_to_the_31_are_stepped(interpreter, numel, wide, stride):
    w, g = map(torch.from_numpy, interpreter.pool.submit(far, numel, stride, wide).result())
    elements = torch.arange(numel - len(w), numel)
    bits = (1 - 0.25 * g).view(torch.int32)
    random = philox(elements, seed=5, tensor=0, step=3)[0]
    rounded = (bits + (random & 0xFFFF).to(torch.int32)) & ~0xFFFF
    assert same_bits(w, rounded.view(torch.float32))


@pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param(c, marks=[] if i % 7 == 0 else pytest.mark.slow, id="-".join(str(d)[6:] for d in c))
        for i, c in enumerate(itertools.product(FLOATS, FLOATS, FLOATS))
    ],
)
def test_any_mix_of_dtypes_gives_the_references_bits(interpreter, dtypes):
    shapes = [(6, 5, 3, 3), (29,), ()]
    maps = {"maps": [LOCO_2D], "map_index": [0, -1, -1]}
    assert_is_reference(interpreter, make_case("sgd", shapes, dtypes=dtypes, **maps))
    adam = make_case("adam", shapes, dtypes=dtypes, states=3, amsgrad=True, decoupled=True, seed=7, **maps)
    assert_is_reference(interpreter, adam)


def test_dtypes_may_differ_from_parameter_to_parameter_and_state_to_state(interpreter):
    case = make_case("adam", [(6, 5, 3, 3)] * 4, states=3, amsgrad=True, maps=[LOCO_2D], map_index=[0] * 4)
    for k, name in enumerate(["params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]):
        case.lists[name] = [t.to(FLOATS[(i + k) % 4]) for i, t in enumerate(case.lists[name])]
    assert_is_reference(interpreter, case)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rule", ["sgd", "sgd_l1", "sgd_plain", "adam", "adamw", "amsgrad"])
def test_nan_infinity_subnormals_and_negative_zero_come_through(interpreter, rule, dtype):
    """Every pair of special values, in turn as weight and gradient, gradient and state, state and weight."""
    flags = {"sgd_l1": {"l1": True}, "adamw": {"decoupled": True}, "amsgrad": {"amsgrad": True}}.get(rule, {})
    flags["states"] = 3
    if rule == "sgd_plain":  # no decay: infinite weights stay out of the gradient, zeros keep their signs
        flags = {"states": 0, "maximize": True, "hyper": (0.05, 0.0, 0.0, 0.0)}
    pairs = torch.tensor(list(itertools.product(SPECIAL, SPECIAL)), dtype=torch.float64).unbind(1)
    shapes = [pairs[0].shape] * 3
    case = make_case("sgd" if rule.startswith("sgd") else "adam", shapes, dtypes=[dtype] * 3, **flags)
    names = [name for name in case.lists if name != "steps" and case.lists[name]]
    for shift, name in enumerate(names[:3]):
        case.lists[name][shift] = pairs[0].to(dtype)
        case.lists[names[(shift + 1) % len(names)]][shift] = pairs[1].to(dtype)
    assert_same_as(interpreter.step(case), case.copy().step("reference"))


@pytest.mark.parametrize("seed", [None, 3])
def test_nan_of_any_bits_stays_nan_in_half_precision(interpreter, seed):
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16):
        case = make_case("sgd", [(4,)], dtypes=[dtype, torch.float32, dtype], first=[1], seed=seed)
        case.hyper[0, 1] = 0  # no decay: the buffer becomes the gradient as it is
        case.lists["grads"] = [bits.view(torch.float32)]
        stepped = interpreter.step(case)
        assert stepped.params[0].isnan().all()
        assert stepped.lists["momentum_buffers"][0].isnan().all()


def test_float64_is_rounded_to_half_precision_by_way_of_float32_as_in_torch(interpreter):
    middle = [1 + 2**-11 + 2**-40, 1 + 3 * 2**-11 - 2**-40, 1 + 2**-8 + 2**-40, 1 + 3 * 2**-8 - 2**-40]
    for dtype in (torch.bfloat16, torch.float16):
        case = make_case("sgd", [(4,)], dtypes=[torch.float64, torch.float64, dtype], first=[1])
        case.hyper[0, 1] = 0
        case.lists["grads"] = [torch.tensor(middle, dtype=torch.float64)]
        assert_is_reference(interpreter, case)


def test_decoupled_decay_alone_gives_the_references_bits_in_float64(interpreter):
    decay_map = torch.rand(8, 9, 3, 3, dtype=torch.float64)
    case = make_case("adam", [decay_map.shape], dtypes=[torch.float64] * 3, hyper=(1.7, 0.9, 0.9, 0.99, 1e-8))
    case.options |= {"decoupled": True, "maps": [decay_map], "map_index": [0]}
    for name in ("grads", "exp_avgs"):
        case.lists[name][0].zero_()
    assert same_bits(interpreter.step(case).params[0], case.copy().step("reference").params[0])


@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scale", [torch.tensor(1024.0), torch.tensor([3.0], dtype=torch.float64)], ids=["f32", "f64"])
def test_gradients_are_divided_by_grad_scale_in_memory_too(interpreter, scale, grad_dtype):
    for rule, param_dtype in ("sgd", torch.float32), ("adam", torch.bfloat16), ("sgd", torch.float64):
        dtypes = [param_dtype, grad_dtype, torch.float32]
        case = make_case(rule, SHAPES, dtypes=dtypes, grad_scale=scale, found_inf=torch.tensor(0.0), maximize=True)
        assert_is_reference(interpreter, case)


@pytest.mark.parametrize("found", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_nothing_changes_where_infinity_was_found(interpreter, rule, found):
    found_inf = torch.tensor([found], dtype=torch.float64 if found == 1 else torch.float32)
    case = make_case(rule, [*SHAPES, (3000,)], found_inf=found_inf, grad_scale=torch.tensor(2.0))
    assert_untouched(interpreter.step(case), case)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**63 - 1])
def test_stochastic_rounding_gives_the_references_bits(interpreter, seed):
    options = {"seed": seed, "rounding_step": seed >> 3, "ordinals": [2**31 + 5, 0]}
    shapes = [(5, 4, 3, 3), (tables.BLOCK + 77,)]
    case = make_case("adam", shapes, dtypes=[torch.bfloat16] * 3, states=3, amsgrad=True, **options)
    case.params[0] = LAYOUTS["channels_last"](case.params[0])
    assert_is_reference(interpreter, case)
    without = interpreter.step(case.copy(seed=None))
    assert not torch.equal(without.params[1], interpreter.step(case).params[1])


def test_empty_tensors_are_counted(interpreter):
    case = make_case("adam", [(0, 3), (0,)])
    assert [t.item() for t in interpreter.step(case).lists["steps"]] == [4, 4]


def test_expanded_gradients_are_read(interpreter):
    case = make_case("sgd", [(4, 3, 3, 3)] * 2)
    case.lists["grads"] = [torch.randn(3, 1, 3).expand(4, 3, 3, 3)] * 2
    assert_is_reference(interpreter, case)


def test_lazily_negated_views_are_refused():
    from loco_ext.triton_kernels import optim_step

    negated = torch.complex(torch.randn(5), torch.randn(5)).conj().imag
    assert negated.is_neg()
    for name in ("params", "grads", "momentum_buffers"):
        case = make_case("sgd", [(3,), (5,)])
        before = case.copy()
        case.lists[name][1] = negated
        listed = "states" if name == "momentum_buffers" else name
        with pytest.raises(TypeError, match=rf"{listed}\[1\]: expected no lazily negated view"):
            optim_step.optim_step_sgd(*arguments(case))
        case.lists[name][1] = before.lists[name][1]
        assert_untouched(case, before)


def test_what_changes_between_steps_takes_effect(interpreter):
    """Values of a map and of hyper changed in place, first, flags, another gradient, and back."""
    decay_map = LOCO_2D.clone()
    case = make_case("sgd", [(6, 5, 3, 3), (9,)], maps=[decay_map], map_index=[0, -1], first=[1, 1])
    again = replace(case, options={**case.options, "first": []})
    other = replace(again, lists={**case.lists, "grads": [torch.randn_like(g) for g in case.lists["grads"]]})
    squared = [(decay_map, LOCO_2D.square()), (case.hyper, case.hyper * 0.5)]
    back = [(decay_map, LOCO_2D), (case.hyper, case.hyper.clone())]
    jobs = [(case, []), (again, []), (again, squared), (other, []), (again, back)]
    expected = saved(jobs)
    stepped = interpreter.steps(*jobs)
    jobs = torch.load(io.BytesIO(expected), weights_only=False)
    for each, before in jobs:
        for tensor, values in before:
            tensor.copy_(values)
        each.step("reference")
    assert_same(stepped, jobs[-1][0])
