"""Builds the compiled library ``loco_ext._C``; everything else about the package is in pyproject.toml."""

import os
import platform
import sys
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
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
    # The step waits for memory; narrower vectors lose nothing there and cost less at the ends of short loops.
    CXX_FLAGS.append("-mprefer-vector-width=256")


def sources() -> list[str]:
    """Every C++ file below csrc, relative to this one."""
    root = Path(__file__).parent
    return sorted(str(path.relative_to(root)) for path in (root / "csrc").rglob("*.cpp"))


os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))

setup(
    ext_modules=[
        CppExtension(
            "loco_ext._C",
            sources=sources(),
            include_dirs=[str(Path(__file__).parent.resolve() / "csrc")],
            extra_compile_args={"cxx": CXX_FLAGS},
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True)},
)
