"""Builds ``loco_ext._C`` and, where it can, ``loco_ext._C_cuda``; everything else is in pyproject.toml.

LOCO_CUDA=1 insists on the CUDA library and LOCO_CUDA=0 leaves it out; by default it is built where torch has CUDA and
the CUDA toolkit is installed, whether or not there is a GPU. TORCH_CUDA_ARCH_LIST says for which GPUs.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from setuptools import setup


def toolkit_of_nvcc() -> str | None:
    """Return the folder of the CUDA toolkit as the nvcc on the path reports it; the nvcc may be a wrapper elsewhere."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return None
    steps = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-E", os.devnull], capture_output=True, text=True).stderr
    found = re.search(r"^#\$ TOP=(.+)$", steps, re.MULTILINE)
    return None if found is None else os.path.realpath(found[1])


# torch takes the folder of the nvcc on the path for the toolkit's.
if not (os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")) and (toolkit := toolkit_of_nvcc()) is not None:
    os.environ["CUDA_HOME"] = toolkit

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

X86 = platform.machine() in ("x86_64", "AMD64")
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
    # Python's own flags may ask for debug information, which takes most of the time that the longest files compile.
    "-g0",
]
if X86:
    # The step waits for memory, whatever the width; the prox, which divides much, gains from the widest.
    CXX_FLAGS.append("-mprefer-vector-width=512")


# These forbid contraction and fast paths of low precision, so that results have the same bits as on the CPU.
NVCC_FLAGS = ["-O3", "-std=c++17", "--fmad=false", "-Xcompiler", "-fvisibility=hidden"]
# Ten times the compute capabilities of GPUs, by that of the PTX which their code is compiled from. With PTX for each,
# compiling takes a quarter longer, for kernels that use as many registers.
ARCHITECTURES = {75: (75,), 80: (80, 90), 100: (100, 120)}

ROOT = Path(__file__).parent.resolve()
# Sources of both libraries. Those with "cuda" in their name are only in the CUDA library, all others only in the other.
SHARED_SOURCES = (
    "common/overlap.cpp",
    *(f"optim_step/{name}.cpp" for name in ("gather", "gpu_table", "step_args")),
    "ring_prox/gpu_table.cpp",
)
# Sources that are compiled once per instruction set (csrc/common/capability.h): as they are, and for each of these.
CAPABILITY_SOURCES = {
    "common/convert.cpp": ("AVX2", "AVX512"),
    "block_sparse/depthwise.cpp": ("AVX2", "AVX512"),
    "block_sparse/depthwise_gradient.cpp": ("AVX2", "AVX512"),
    "block_sparse/product.cpp": ("AVX2", "AVX512", "AVX512_BF16"),
    "block_sparse/transpose.cpp": ("AVX2", "AVX512"),
    "block_sparse/value_gradient.cpp": ("AVX2", "AVX512", "AVX512_BF16"),
    "mixed_conv/convolve.cpp": ("AVX2", "AVX512"),
    "optim_step/blocks.cpp": ("AVX2",),
    "optim_step/random.cpp": ("AVX2", "AVX512"),
    "ring_prox/rows.cpp": ("AVX2", "AVX512"),
}
# The files that compile them for these instruction sets: relative path and contents.
CAPABILITY_FILES = {
    f"build/capabilities/{source[:-4]}_{name.lower()}.cpp": f'#define LOCO_{name}\n#include "{source}"\n'
    for source, names in CAPABILITY_SOURCES.items()
    for name in names
    if X86
}


def sources(pattern: str, cuda: bool) -> list[str]:
    """Return the files below csrc that match a pattern and are for CUDA, or not, relative to this file."""
    found = (ROOT / "csrc").rglob(pattern)
    return sorted(str(path.relative_to(ROOT)) for path in found if ("cuda" in path.name) == cuda)


def write_capability_files() -> None:
    """Write CAPABILITY_FILES. A file that is already right keeps its time, so that it is not compiled again."""
    for name, text in CAPABILITY_FILES.items():
        path = ROOT / name
        if not path.exists() or path.read_text() != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


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
    """Return whether to build the CUDA library; exit if it is requested and cannot be built."""
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


def cuda_targets(cuda_home: str) -> tuple[str, list[str]]:
    """Return those of ARCHITECTURES that this toolkit's nvcc knows, as a TORCH_CUDA_ARCH_LIST, and flags for them.

    The library also has PTX of the last, which runs on later GPUs.
    """
    command = [f"{cuda_home}/bin/nvcc", "--list-gpu-arch"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    known = [(ptx, gpu) for ptx, gpus in ARCHITECTURES.items() for gpu in gpus if f"compute_{gpu}" in listed]
    codes = [(ptx, f"sm_{gpu}") for ptx, gpu in known] + [(known[-1][0], f"compute_{known[-1][0]}")]
    flags = [f"-gencode=arch=compute_{ptx},code={code}" for ptx, code in codes]
    return ";".join(f"{gpu / 10}" for _, gpu in known) + "+PTX", flags


def cuda_extension() -> CUDAExtension:
    """The library for CUDA tensors."""
    architectures, flags = os.environ.get("TORCH_CUDA_ARCH_LIST"), []
    if not architectures:
        architectures, flags = cuda_targets(str(CUDA_HOME))
    return CUDAExtension(
        "loco_ext._C_cuda",
        sources=[f"csrc/{name}" for name in SHARED_SOURCES] + sources("*.cpp", cuda=True) + sources("*.cu", cuda=True),
        include_dirs=[str(ROOT / "csrc")],
        define_macros=[("USE_CUDA", None), ("LOCO_CUDA_ARCHITECTURES", f'"{architectures}"')],
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS + flags},
    )


class TimedBuild(BuildExtension.with_options(use_ninja=True)):
    """Prints how much is compiled, and the time afterwards, because the compiler prints nothing for minutes."""

    def build_extensions(self) -> None:
        files, jobs = sum(len(extension.sources) for extension in self.extensions), os.environ["MAX_JOBS"]
        print(f"loco_ext: compiling {files} files, {jobs} at a time; this takes minutes", file=sys.stderr, flush=True)
        start = time.monotonic()
        write_capability_files()
        super().build_extensions()
        print(f"loco_ext: compiled in {time.monotonic() - start:.0f} seconds", file=sys.stderr, flush=True)


os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))

extensions = [
    CppExtension(
        "loco_ext._C",
        sources=sources("*.cpp", cuda=False) + list(CAPABILITY_FILES),
        include_dirs=[str(ROOT / "csrc")],
        define_macros=[("LOCO_ALL_CAPABILITIES", None)] if X86 else [],
        extra_compile_args={"cxx": CXX_FLAGS},
    )
]
if wants_cuda():
    extensions.append(cuda_extension())

setup(ext_modules=extensions, cmdclass={"build_ext": TimedBuild})
