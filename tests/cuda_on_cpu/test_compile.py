"""CUDA sources compile for every GPU that is supported, and their kernels keep to budgets of registers and memory."""

import json
import re
import subprocess
import sysconfig
from functools import cache
from pathlib import Path

import pytest
from torch.utils.cpp_extension import include_paths

from bench import ahead_of_time, sass
from tests.cuda_on_cpu import ptx, ptxas
from tests.cuda_on_cpu.build import CSRC, cuda_includes, need_cuda_headers, need_nvcc, objects_folder
from tests.setup_script import run_setup

SOURCES = sorted(CSRC.glob("*/cuda*.cu"))
TARGETS = [75, 80, 90, 100, 120]


def name_of(path):
    return f"{path.parent.name}/{path.name}"


def compiled(source):
    """Compile a CUDA source for all targets, once in a test run."""
    nvcc = need_nvcc()
    architectures, flags = run_setup()["cuda_targets"](str(Path(nvcc).parents[1]))
    assert architectures == "7.5;8.0;9.0;10.0;12.0+PTX"
    return ptxas.compiled(nvcc, source, flags, objects_folder(), CSRC)


@cache
def instructions_for_90(name):
    """Return the instructions of the kernels of the named source in the PTX that sm_90's code is compiled from."""
    return ptx.parse(compiled(CSRC / name).ptx(80))


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=name_of)
def test_kernels_keep_their_budgets(source):
    """The budget of NAME.cu is in NAME_budget.json beside it."""
    budget = json.loads(source.with_name(f"{source.stem}_budget.json").read_text())["kernels"]
    usages = ptxas.parse(compiled(source).report)
    for target in TARGETS:
        of_target = [usage for usage in usages if usage.target == f"sm_{target}"]
        found = ptxas.complaints(of_target, budget)
        assert not found, "\n".join(found)
        unused = [key for key in budget if not any(key in usage.kernel for usage in of_target)]
        assert not unused, f"budgets of no kernel for {target}: {unused}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["library_cuda", "module_cuda"])
def test_glue_compiles_without_a_cuda_build_of_torch(name):
    """The library of the CPU-run kernels has the other files."""
    need_cuda_headers()
    version = run_setup()["TARGET_VERSION"]
    folders = [f"-I{CSRC}"]
    for folder in (*include_paths(), *cuda_includes(), sysconfig.get_paths()["include"]):
        folders += ["-isystem", str(folder)]
    flags = ["-std=c++17", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror", "-DUSE_CUDA"]
    flags += ["-DTORCH_EXTENSION_NAME=_C_cuda", '-DLOCO_CUDA_ARCHITECTURES="9.0"', f"-DTORCH_TARGET_VERSION={version}"]
    command = ["g++", "-fsyntax-only", *flags, *folders, str(CSRC / f"{name}.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_ZN4loco12_GLOBAL__N_14stepIfEEvPNS_3RowIT_EE' for 'sm_90'
ptxas info    : Function properties for _ZN4loco12_GLOBAL__N_14stepIfEEvPNS_3RowIT_EE
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 42 registers, used 1 barriers, 16 bytes cumulative stack size, 256 bytes smem
ptxas info    : Function properties for _Z6helperv
    800 bytes stack frame, 900 bytes spill stores, 900 bytes spill loads
ptxas info    : Compile time = 8.000 ms
"""


def test_a_report_is_parsed_and_every_overrun_told():
    (usage,) = ptxas.parse(REPORT)
    names = (
        "step<float>(Row<float>*)",
        "<unnamed>::step<float>(Row<T1> *)",
        "_ZN4loco12_GLOBAL__N_14stepIfEEvPNS_3RowIT_EE",
    )
    assert usage.kernel in names
    assert usage == ptxas.Usage(usage.kernel, "sm_90", 42, 20, 16, 256)
    exact = dict(zip(ptxas.KEYS, (42, 20, 16, 256), strict=True))
    assert ptxas.complaints([usage], {"step": exact, "other": dict.fromkeys(ptxas.KEYS, 0)}) == []
    for key, value in exact.items():
        (told,) = ptxas.complaints([usage], {"s": exact, "step": exact | {key: value - 1}})
        assert told == f"{usage.kernel} (sm_90): {value} {key}, budget {value - 1}"
    assert ptxas.complaints([usage], {"other": exact}) == [f"{usage.kernel} (sm_90): no budget"]
    with pytest.raises(ValueError, match="registers"):
        ptxas.parse(REPORT.replace("Used 42 registers", "42 registers are used"))


# Bytes of an element, indexed by the number of its DType.
BYTES = (8, 4, 2, 2)
STATES = {"Sgd": 1, "Adam": 3}
# Calls of std::fma for one element in optim_step/math.h.
FUSED = {"Sgd": 4, "Adam": 3}


def kernels_named(kernels, name):
    found = {kernel: instructions for kernel, instructions in kernels.items() if kernel.startswith(name)}
    assert found, f"no kernel begins with {name!r}: {sorted(kernels)}"
    return found


def types_of(kernel):
    """Return the bytes of an element of the parameter and of a state."""
    return [BYTES[int(number)] for number in re.findall(r"\(DType\)(\d)", kernel)]


def has_own_quotients(kernel):
    """Return whether the kernel's vectors are divided by optim_step/gpu_quotient.h."""
    return bool(re.match(r"step_vectors<Adam, VectorTypes<\(DType\)[123].*false>", kernel))


def assert_on_chip_and_exact(kernel, instructions, approximations=frozenset()):
    """Assert that arrays are in registers or shared memory, and that arithmetic rounds as IEEE's does."""
    assert ptx.spaces(instructions) <= {"param", "global", "shared"}, kernel
    assert ptx.inexact(instructions) == approximations, kernel
    assert not any(one.startswith("call") for one in instructions), f"{kernel} has parts that were not looked at"


@pytest.mark.slow
@pytest.mark.parametrize("rule", STATES)
def test_step_kernels_move_16_bytes_at_a_time_and_fuse_only_what_the_rules_do(rule):
    kernels = kernels_named(instructions_for_90("optim_step/cuda.cu"), "step_")
    for kernel, instructions in kernels.items():
        if f"<{rule}," not in kernel:
            continue
        assert "ld.global.u64" in instructions, kernel
        own = has_own_quotients(kernel)
        assert_on_chip_and_exact(kernel, instructions, {"rcp.approx.ftz.f32", "rsqrt.approx.ftz.f32"} if own else set())
        # A thread also steps one element at an end of a chunk. A loop takes pairs where rounding is stochastic.
        elements = 2 if "true>" in kernel else 16 // types_of(kernel)[0] if kernel.startswith("step_vectors") else 0
        expected = FUSED[rule] * (elements + 1)
        if own:
            # Decay, either form of the moments, and with or without amsgrad a root of 2, a reciprocal of 2 and two
            # quotients of 2 each. One more reciprocal is that of a constant.
            expected = FUSED[rule] + elements * (1 + 2 * 2 + 2 * 8) + 2
        fused = sum(one.startswith("fma.") for one in instructions)
        assert fused == expected, f"{kernel}: {fused} fused, expected {expected}"
    for kernel, instructions in kernels_named(kernels, f"step_vectors<{rule},").items():
        of_w, of_state = types_of(kernel)
        # The operands are the parameter, the gradient (written back if scaled) and states of one or several vectors.
        operands = 2 + STATES[rule] * (of_state // of_w)
        for kind in ("ld", "st"):
            found = ptx.wide(instructions, kind)
            assert found >= operands, f"{kernel}: {found} {kind} of 16 bytes, expected {operands} or more"
        dtype = re.search(r"\(DType\)(\d)", kernel)[1]
        converted = {"2": {"cvt.rn.bf16.f32"}, "3": {"cvt.rn.f16.f32", "cvt.f32.f16"}}.get(dtype, set())
        if "false>" in kernel:
            converted |= {"2": {"cvt.rn.bf16x2.f32"}, "3": {"cvt.rn.f16x2.f32"}}.get(dtype, set())
        assert converted <= set(instructions), kernel


def disassembled(name, target):
    """Return the kernels of a source, keyed by their names without parameters, and the source's budget."""
    source = CSRC / name
    code = ahead_of_time.disassembled(compiled(source).cubin(target).read_bytes())
    budget = json.loads(source.with_name(f"{source.stem}_budget.json").read_text())
    return {name.partition("(Parameters")[0]: kernel for name, kernel in code.items()}, budget


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS[1:])
def test_vectors_take_no_more_instructions_than_their_budget(target):
    """Counted are the instructions of a vector without decay; see ``Kernel.shortest_pass``."""
    kernels, budgets = disassembled("optim_step/cuda.cu", target)
    found = {name: kernels[name].shortest_pass() for name in kernels if re.match(r"step_vectors<.*false>", name)}
    budget = {name: by_target[str(target)] for name, by_target in budgets["vector_instructions"].items()}
    assert found.keys() == budget.keys()
    assert not {name: count for name, count in found.items() if count > budget[name]}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS[1:])
def test_passes_of_adams_prox_take_no_instruction_in_float64(target):
    """Sums of moments in float32 have none at all, and weights are written by a division in float32."""
    kernels, budgets = disassembled("optim_step/cuda_prox.cu", target)
    budget = budgets["instructions_of_a_pass"]
    assert budget.keys() == {name for name in kernels if name.startswith("step_filters<Adam, float")}
    for name, allowed in budget.items():
        kernel = kernels[name]
        loops = kernel.innermost_loops()
        # A reciprocal; a compensated sum of 4 additions, and further sums.
        passes = [
            places
            for places in loops
            if kernel.count(r"MUFU\.RCP ", places) == 1
            and kernel.count("FADD", places) >= 8
            and not kernel.count("ST", places)
        ]
        assert len(passes) == 2, f"{name}: expected sums for c = 0 and for others, got {len(passes)} loops"
        for places in passes:
            assert not any(sass.is_float64(kernel.instructions[i]) for i in places), name
            assert kernel.shortest_pass(places) <= allowed, name
        # Weights that are written four at a time are divided in float32, and in float64 only in another branch.
        assert any(kernel.count(r"MUFU\.RCP ", places) >= 4 and kernel.count("RCP64H", places) for places in loops), (
            name
        )


SASS = """
//--------------------- .text._Z4stepPf      --------------------------
	.section	.text._Z4stepPf,"ax",@progbits
.text._Z4stepPf:
.L_x_0:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
        /*0030*/                   FADD R4, R4, R4 ;
        /*0040*/                   FADD R5, R5, R5 ;
        /*0050*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*0060*/               @P1 BRA P2, `(.L_x_3) ;
        /*0070*/                   MOV R8, 0x90 ;
        /*0080*/                   CALL.REL.NOINC `($divide) ;
.L_x_3:
        /*0090*/                   IADD3 R0, R0, 0x1, RZ ;
        /*00a0*/               @P3 BRA `(.L_x_1) ;
.L_x_4:
        /*00b0*/                   IADD3 R0, R0, 0x1, RZ ;
        /*00c0*/               @P3 BRA `(.L_x_4) ;
        /*00d0*/                   EXIT ;
        /*00e0*/                   BRA `(.L_x_0) ;
"""


def test_loops_are_found_and_their_shortest_pass_calls_nothing():
    ((name, kernel),) = sass.parse(SASS).items()
    assert name in ("step(float*)", "step(float *)", "_Z4stepPf")
    assert kernel.loop() == range(1, 11)
    assert kernel.shortest_pass() == 5
    assert kernel.innermost_loops() == [range(1, 11), range(11, 13)]
    assert kernel.main_loop() == range(1, 11)
    assert sass.Kernel(["EXIT"], {}).main_loop() == range(0)
    assert kernel.shortest_pass(kernel.loop(), lambda one: "FADD" in one) == 0
    assert kernel.count("FADD", kernel.loop()) == 2


def test_instructions_in_float64_are_told_from_others():
    wide = ["DADD R2, R4, R6", "@P0 DSETP.GT.AND P1, PT, R2, R4, PT", "MUFU.RCP64H R3, R5", "F2F.F32.F64 R2, R4"]
    wide += ["F2F.F64.F32 R2, R4", "I2F.F64 R2, R4", "F2I.F64.TRUNC R2, R4"]
    assert all(sass.is_float64(one) for one in wide)
    assert not any(
        sass.is_float64(one) for one in ["FADD R2, R4, R6", "MUFU.RCP R3, R5", "I2F.U32 R2, R4", "LDS.64 R2"]
    )


# PROX_VECTORS has, for each type of arithmetic, the number of elements that each loop over a step's operands takes at a
# time. One kernel takes all dtypes, and bfloat16 with either rounding. PROX_RESULTS counts the ways to write the result
# of a prox, which depend on dtype and rounding.
PROX_VECTORS = {"double": [2], "float": [*[4] * 5, *[2] * 2]}
PROX_RESULTS = {"double": 1, "float": 4}


@pytest.mark.slow
@pytest.mark.parametrize("rule", FUSED)
def test_steps_with_a_prox_move_16_bytes_at_a_time_and_fuse_only_what_the_rules_do(rule):
    prox_kernels = instructions_for_90("optim_step/cuda_prox.cu")
    assert len(prox_kernels) == 8
    for kernel, instructions in prox_kernels.items():
        assert_on_chip_and_exact(kernel, instructions)
    for kernel, instructions in kernels_named(prox_kernels, f"step_filters<{rule},").items():
        arithmetic = "double" if "double" in kernel else "float"
        widths, results = PROX_VECTORS[arithmetic], PROX_RESULTS[arithmetic]
        assert ptx.wide(instructions, "ld") >= len(widths) * (2 + STATES[rule]), kernel
        assert ptx.wide(instructions, "st") >= len(widths) * (1 + STATES[rule]) + results, kernel
        fused = sum(one.startswith("fma.") for one in instructions)
        assert fused == FUSED[rule] * (sum(widths) + 1), f"{kernel}: {fused} fused"


@pytest.mark.slow
def test_payload_is_read_where_it_was_passed():
    kernels = instructions_for_90("common/cuda_upload.cu")
    for kernel, instructions in kernels_named(kernels, "write_payload<").items():
        assert "ld.param.v4.u32" in instructions, kernel
        assert ptx.wide(instructions, "st") > 0, kernel
        assert ptx.spaces(instructions) == {"param", "global"}, kernel


@pytest.mark.slow
def test_ring_kernels_move_16_bytes_at_a_time_and_fuse_nothing():
    for kernel, instructions in instructions_for_90("ring_prox/cuda.cu").items():
        staged = re.search(r"<\w+, true>", kernel)
        # There is a load for each of four dtypes of weights and of metrics, and a store for each dtype of the results.
        assert ptx.wide(instructions, "ld") >= (8 if staged else 0), kernel
        assert ptx.wide(instructions, "st") >= (0 if kernel.startswith("norms<") else 4), kernel
        assert_on_chip_and_exact(kernel, instructions)
        assert not any(one.startswith("fma.") for one in instructions), kernel


PTX = """
.visible .entry _Z4stepPf(
	.param .u64 _Z4stepPf_param_0
)
{
	.reg .pred 	%p<2>;
	ld.param.u64 	%rd1, [_Z4stepPf_param_0];
$L__BB0_1:
	ld.v4.f32 	{%f1, %f2, %f3, %f4}, [%rd1];
	ld.global.nc.v2.f64 	{%fd1, %fd2}, [%rd1+16];
	// ld.local.f32 	%f9, [%rd2];
	{  div.full.f32 %f5, %f1, %f2;}
	mul.f32 	%f6, %f5, %f3;
	fma.rn.f32 	%f7, %f6, %f3, %f4;
	@%p1 bra 	$L__BB0_1;
	@!%p1 st.global.v4.f32 	[%rd1], {%f1, %f2, %f3, %f7};
	call.uni (retval0),
	other,
	(
	param0
	);
	ret;
}
.func other()
{
	st.local.f32 	[%rd1], %f1;
}
"""


def test_ptx_is_parsed():
    ((kernel, instructions),) = ptx.parse(PTX).items()
    assert kernel in ("step(float*)", "step(float *)", "_Z4stepPf")
    loads, arithmetic = ["ld.param.u64", "ld.v4.f32", "ld.global.nc.v2.f64"], ["div.full.f32", "mul.f32", "fma.rn.f32"]
    assert instructions == [*loads, *arithmetic, "bra", "st.global.v4.f32", "call.uni", "ret"]
    assert (ptx.wide(instructions, "ld"), ptx.wide(instructions, "st")) == (1, 1)
    assert ptx.spaces(instructions) == {"param", "generic", "global"}
    assert ptx.inexact(instructions) == {"div.full.f32", "mul.f32"}
