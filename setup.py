"""Builds ``loco_ext._C`` and, where it can, ``loco_ext._C_cuda``; everything else is in pyproject.toml.

LOCO_CUDA=1 insists on the CUDA library and LOCO_CUDA=0 leaves it out; by default it is built where torch has CUDA and
the CUDA toolkit is installed, whether or not there is a GPU. TORCH_CUDA_ARCH_LIST says for which GPUs.
"""

import os
import platform
import sys
import time
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension
except ImportError:
    sys.exit(
        "loco_ext: torch cannot be seen from this build. Install torch 2.11 or later first, then build in the same "
        "environment:\n\n    pip install --no-build-isolation .\n"
    )

OLDEST_TORCH = (2, 11)
# LibTorch's stable ABI: one build serves this torch and every later one.
TARGET_VERSION = f"0x{OLDEST_TORCH[0]:02x}{OLDEST_TORCH[1]:02x}000000000000ULL"

found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if found < OLDEST_TORCH:
    sys.exit(f"loco_ext: torch 2.11 or later is needed to build, torch {torch.__version__} is installed")

CXX_FLAGS = [
    "-O3",
    "-std=c++17",
    "-Wall",
    "-Wextra",
    "-Wno-unused-parameter",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    # The same roundings on every CPU and device: no fused multiply-adds.
    "-ffp-contract=off",
    f"-DTORCH_TARGET_VERSION={TARGET_VERSION}",
]
if platform.machine() in ("x86_64", "AMD64"):
    # The step waits for memory, whatever the width; the prox, which divides much, gains from the widest.
    CXX_FLAGS.append("-mprefer-vector-width=512")


# As C++, and no fast paths of low precision: the same bits as on the CPU.
NVCC_FLAGS = ["-O3", "-std=c++17", "--fmad=false", "-Xcompiler", "-fvisibility=hidden"]
ARCHITECTURES = "8.0;9.0;10.0;12.0+PTX"

ROOT = Path(__file__).parent.resolve()
# Sources of the CUDA library beside its .cu files; those without "cuda" in their name are in both libraries.
CUDA_SOURCES = (
    *("library_cuda.cpp", "module_cuda.cpp", "common/device.cpp", "common/overlap.cpp", "common/registry.cpp"),
    *("optim_step/bind_cuda.cpp", "optim_step/gather.cpp", "optim_step/gpu_table.cpp", "optim_step/step_args.cpp"),
    *("ring_prox/bind.cpp", "ring_prox/bind_cuda.cpp", "ring_prox/gpu_table.cpp"),
)


def cpu_sources() -> list[str]:
    """Every C++ file below csrc that is not for GPUs alone, relative to this one."""
    gpu_only = {name for name in CUDA_SOURCES if "cuda" in name or "device" in name}
    files = {str(path.relative_to(ROOT / "csrc")) for path in (ROOT / "csrc").rglob("*.cpp")}
    return sorted(f"csrc/{name}" for name in files - gpu_only)


def cuda_sources() -> list[str]:
    """CUDA_SOURCES and every .cu file below csrc."""
    kernels = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cu"))
    return [f"csrc/{name}" for name in CUDA_SOURCES] + kernels


def missing_for_cuda() -> list[str]:
    """Return descriptions of the build requirements of the CUDA library that are not installed."""
    missing = []
    if torch.version.cuda is None:
        missing.append(f"a CUDA build of torch (torch {torch.__version__} has none; see pytorch.org)")
    if CUDA_HOME is None or not (Path(CUDA_HOME) / "include" / "cuda_runtime.h").exists():
        place = "was not found" if CUDA_HOME is None else f"is not in {CUDA_HOME}, where torch looks for it"
        missing.append(f"the CUDA toolkit (it {place}; set CUDA_HOME to its folder)")
    return missing


def wants_cuda() -> bool:
    """Whether to build the CUDA library; stops if it is asked for and cannot be."""
    wish = os.environ.get("LOCO_CUDA", "")
    if wish not in ("", "0", "1"):
        sys.exit(f"loco_ext: LOCO_CUDA: expected 0 or 1, got {wish!r}")
    if wish == "0":
        return False
    missing = missing_for_cuda()
    if missing and wish == "1":
        sys.exit(f"loco_ext: LOCO_CUDA=1 needs {' and '.join(missing)}")
    if missing and torch.version.cuda is not None:
        print(f"loco_ext: building without the CUDA library, which needs {missing[0]}", file=sys.stderr)
    return not missing


def cuda_extension() -> CUDAExtension:
    """The library for CUDA tensors."""
    architectures = os.environ.setdefault("TORCH_CUDA_ARCH_LIST", ARCHITECTURES)
    return CUDAExtension(
        "loco_ext._C_cuda",
        sources=cuda_sources(),
        include_dirs=[str(ROOT / "csrc")],
        define_macros=[("USE_CUDA", None), ("LOCO_CUDA_ARCHITECTURES", f'"{architectures}"')],
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
    )


class TimedBuild(BuildExtension.with_options(use_ninja=True)):
    """Says what is compiled, and afterwards in how many seconds: the compiler says nothing for minutes."""

    def build_extensions(self) -> None:
        files, jobs = sum(len(extension.sources) for extension in self.extensions), os.environ["MAX_JOBS"]
        print(f"loco_ext: compiling {files} files, {jobs} at a time; this takes minutes", file=sys.stderr, flush=True)
        start = time.monotonic()
        super().build_extensions()
        print(f"loco_ext: compiled in {time.monotonic() - start:.0f} seconds", file=sys.stderr, flush=True)


os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))

extensions = [
    CppExtension(
        "loco_ext._C",
        sources=cpu_sources(),
        include_dirs=[str(ROOT / "csrc")],
        extra_compile_args={"cxx": CXX_FLAGS},
    )
]
if wants_cuda():
    extensions.append(cuda_extension())

setup(ext_modules=extensions, cmdclass={"build_ext": TimedBuild})
