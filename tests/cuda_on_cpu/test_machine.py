"""The runner that executes CUDA kernels on the CPU: correct kernels pass, and each planted mistake is found."""

import signal
import subprocess
import sys

import pytest

from tests.cuda_on_cpu.build import (
    HERE,
    ORDERS,
    compile_command,
    compile_program,
    need_cuda_headers,
    run_program,
    sanitizer_to_preload,
)

PLANTED = HERE / "planted.cu"
CLEAN = ["sum", "copy", "meetings", "parameters", "reverse", "repeat", "host_threads", "limits"]
CLEAN += ["tickets", "stream", "missing_kernel", "memory_of_its_own"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return compile_program([PLANTED], tmp_path_factory.mktemp("plain") / "planted")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    return compile_program([PLANTED], tmp_path_factory.mktemp("sanitized") / "planted", sanitize=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("build", ["plain", pytest.param("sanitized", marks=pytest.mark.slow)])
def test_right_kernels_pass_in_every_order(build, order, request):
    done = run_program(request.getfixturevalue(build), *CLEAN, order=order)
    assert done.stdout.splitlines() == [f"{name} ok" for name in CLEAN], done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


# Unwritten shared memory and wrong tails show in every order, missing barriers in some, and blocks that meet in memory
# only where several run at a time.
@pytest.mark.parametrize(
    ("cases", "always", "never"),
    [
        (["sum_unwritten", "copy_wrong_tail"], ORDERS, []),
        (["sum_missing_barrier", "reverse_missing_barrier", "repeat_missing_barrier"], [], []),
        (["tickets_early"], [], ["forward", "reverse", "eager"]),
    ],
)
def test_mistakes_give_wrong_results(plain, cases, always, never):
    for case in cases:
        codes = {order: run_program(plain, case, order=order).returncode for order in ORDERS}
        assert set(codes.values()) <= {0, 1}, case
        wrong = {order for order, code in codes.items() if code}
        assert wrong, case
        assert wrong >= set(always), case
        assert not wrong & set(never), case


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("stream_of_another_device", "launched on a stream of device 0 while device 1 is the current one"),
        ("stream_before", "which is not the current one"),
        ("sum_divergent_barrier", "32 at __syncthreads"),
        ("sum_missing_lanes", "128 at __shfl_xor_sync"),
        ("sum_wrong_mask", "calls __shfl_xor_sync with the mask 0000ffff, which leaves it out"),
        ("shared_limit", "more than 49152 bytes of shared memory"),
        ("meets_without_end", "1000000 atomic operations without progress"),
    ],
)
def test_what_would_hang_or_be_refused_is_reported(plain, case, message):
    for order in ("forward", "1"):
        done = run_program(plain, case, order=order)
        assert done.returncode == -signal.SIGABRT, done.stdout
        assert message in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "finding"),
    [
        ("copy_out_of_bounds", "heap-buffer-overflow"),
        ("copy_misaligned", "misaligned address"),
        ("sum_shared_out_of_bounds", "out of bounds"),
        ("sum_divergent_barrier", "divergent synchronisation"),
        ("reverse_out_of_bounds", "heap-buffer-overflow"),
        ("stack_out_of_bounds", "stack-buffer-overflow"),
        ("device_uses_host_memory", "use-after-poison"),
        ("device_uses_another_device", "use-after-poison"),
        ("host_uses_device_memory", "use-after-poison"),
    ],
)
def test_sanitizers_find(sanitized, case, finding):
    done = run_program(sanitized, case)
    assert done.returncode != 0
    assert finding in done.stderr


def test_too_many_parameters_do_not_compile(tmp_path):
    need_cuda_headers()
    flags = ["-fsyntax-only", "-DPLANTED_BIG_PARAMETERS"]
    done = subprocess.run(compile_command(PLANTED, tmp_path / "x", flags=flags), capture_output=True, text=True)
    assert done.returncode != 0
    assert "kernel parameters take more than 32764 bytes" in done.stderr


def test_orders(plain):
    notes = {order: run_program(plain, "order", order=order).stdout.split()[:6] for order in ORDERS}
    assert notes["forward"] == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    assert notes["reverse"] == notes["forward"][::-1]
    assert all(sorted(note) == notes["forward"] for note in notes.values())
    assert len(set(map(tuple, notes.values()))) > 3
    unknown = run_program(plain, "sum", order="sideways")
    assert "expected forward, reverse, eager or a number, got sideways" in unknown.stderr
    assert unknown.returncode == -signal.SIGABRT


LOAD = "import ctypes, sys; planted = ctypes.CDLL(sys.argv[1]).planted; [planted(c.encode()) for c in sys.argv[2:]]"


@pytest.mark.parametrize("sanitize", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_kernels_in_a_shared_library(tmp_path, sanitize):
    library = compile_program([PLANTED], tmp_path / "planted.so", sanitize=sanitize, shared=True)
    preload = sanitizer_to_preload() if sanitize else ""
    wrong = "copy_wrong_tail" if sanitize else "sum_unwritten"
    done = run_program(sys.executable, "-c", LOAD, library, "sum", "reverse", wrong, preload=preload)
    assert done.stdout.splitlines() == ["sum ok", "reverse ok", f"{wrong} wrong"], done.stderr
    assert done.returncode == 0
