"""Runs of Triton kernels without a GPU: in Triton's interpreter, and compiled for GPUs that need not be there."""

import importlib.util
import io
import mmap
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from loco_ext.ops import backends

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
compiles = pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing")
needs_compiler = [needs_triton, compiles]
needs_mmap = pytest.mark.skipif(sys.platform != "linux" or sys.maxsize < 2**32, reason="needs Linux's mmap and 64 bits")

CUDA = [80, 90, 100]  # compute capabilities that compiled kernels are looked at for
VECTOR = r"v4\.b32|v2\.b64|v4\.u32|v2\.u64|v4\.f32|v2\.f64"
GUARD = 77.0  # surrounds results, and must stay unchanged


# ---- the interpreter


@contextmanager
def start_interpreter() -> Iterator[ProcessPoolExecutor]:
    """Start the interpreter in a separate process, because it must be chosen before triton is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(_prepare).result()
    with pool:
        yield pool


def _prepare() -> None:
    """Correct the interpreter's arithmetic and save half of its time."""
    from triton.runtime import interpreter

    torch.set_num_threads(1)
    np.seterr(all="ignore")

    def fma(_self, x, y, z):
        """Multiply and add in float64, as references do: float32 is rounded once, float64 twice in both."""
        wide = [a.data.astype(np.float64) for a in (x, y, z)]
        return interpreter.TensorHandle((wide[0] * wide[1] + wide[2]).astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = fma
    patch_tensor, patch_language = interpreter._patch_lang_tensor, interpreter._patch_lang
    patched: set[int] = set()

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        """Give tensors an index that range() accepts: NumPy no longer treats arrays of one number as numbers."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def patch_lang(fn: Any) -> Any:
        """Replace triton.language for a module once: the interpreter does so in every call of every function."""
        if id(fn.__globals__) not in patched:
            patched.add(id(fn.__globals__))
            patch_language(fn)
        return interpreter._LangPatchScope()  # has nothing to restore

    interpreter._patch_lang_tensor, interpreter._patch_lang = patch_lang_tensor, patch_lang


def saved(thing: object) -> bytes:
    """Return the bytes by which tensors travel to the interpreter's process and back, strides and gaps included."""
    out = io.BytesIO()
    torch.save(thing, out)
    return out.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def interpret(pool: ProcessPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function returns in the interpreter's process; tensors keep their strides on the way."""
    return loaded(pool.submit(_call, function, saved(arguments)).result())


def _call(function: Callable[..., Any], arguments: bytes) -> bytes:
    return saved(function(*loaded(arguments)))


def let_triton_serve_cpus(patch: pytest.MonkeyPatch) -> None:
    """Let the Triton backend accept tensors of the CPU as those of GPUs."""
    kernels = {family: {**of_family, "triton": ("cpu", "cuda")} for family, of_family in backends.KERNELS.items()}
    patch.setattr(backends, "KERNELS", kernels)


def reserved(size: int, dtype: torch.dtype) -> Tensor:
    """Return memory that is not allocated until it is written, for tests with ``needs_mmap``."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size * dtype.itemsize, flags=flags), dtype=dtype)


class Guarded:
    """Stand-in for a torch function that surrounds its output with GUARD."""

    def __init__(self, make: Callable[..., Tensor]) -> None:
        self.make, self.made = make, []

    def __call__(self, *arguments, **options) -> Tensor:
        plain = self.make(*arguments, **options)
        if plain.numel() == 0:
            return plain
        span = 1 + sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True))
        memory = torch.full((span + 8192,), GUARD, dtype=plain.dtype)
        self.made.append((memory, span))
        return memory.as_strided(plain.shape, plain.stride(), 4096)

    def check(self) -> None:
        for memory, span in self.made:
            assert (memory[:4096] == GUARD).all(), "memory before a result was written"
            assert (memory[4096 + span :] == GUARD).all(), "memory behind a result was written"


# ---- the compiler


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


def vectors(text: str) -> tuple[int, int]:
    """Return the numbers of loads and of stores of 16 bytes in PTX."""
    return count(rf"ld\.global\S*\.(?:{VECTOR})\b", text), count(rf"st\.global\S*\.(?:{VECTOR})\b", text)
