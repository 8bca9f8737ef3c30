"""Parser of PTX: the instructions of each kernel, without their operands, such as ``ld.global.v4.f32``."""

import re
from collections.abc import Iterable

from bench.sass import demangled

_KERNEL = re.compile(r"\.entry\s+(\w+)\s*\(.*?^\{(.*?)^\}", re.MULTILINE | re.DOTALL)
# Inline assembly may stand in braces. Only instructions begin with a letter and continue with these characters.
_INSTRUCTION = re.compile(r"^[\t {]*(?:@!?%\w+\s+)?([a-z]\w*(?:(?:\.|::)\w+)*)[ \t;]", re.MULTILINE)
_ARITHMETIC = re.compile(r"(add|sub|mul|mad|fma|div|rcp|sqrt|rsqrt)\.(.*\.)?b?f\d+(x2)?")
_WIDE = re.compile(r"(ld|st)\.global(\.\w+)*?\.(v4\.[bfsu]32|v2\.[bfsu]64)")


def parse(text: str) -> dict[str, list[str]]:
    """Return the instructions of every kernel, keyed by its demangled name."""
    found = _KERNEL.findall(text)
    names = demangled([symbol for symbol, _ in found])
    return {name: _INSTRUCTION.findall(body) for name, (_, body) in zip(names, found, strict=True)}


def wide(instructions: Iterable[str], kind: str) -> int:
    """Return the number of loads (kind ``"ld"``) or stores (``"st"``) of 16 bytes of global memory at a time."""
    return sum(bool((match := _WIDE.fullmatch(one)) and match[1] == kind) for one in instructions)


def spaces(instructions: Iterable[str]) -> set[str]:
    """Return the memory spaces that loads and stores name; ``"generic"`` for one that names none."""
    known = {"const", "global", "local", "param", "shared"}
    words = [one.split("::")[0].split(".") for one in instructions if re.match(r"(ld|ldu|st)\.", one)]
    return {next((word for word in parts if word in known), "generic") for parts in words}


def inexact(instructions: Iterable[str]) -> set[str]:
    """Return the instructions whose results may differ from those of IEEE arithmetic.

    ptxas may fuse additions and multiplications that lack ``.rn``.
    """
    return {
        one
        for one in instructions
        if {"approx", "ftz", "full"} & set(one.split("."))
        or (_ARITHMETIC.fullmatch(one) and not re.fullmatch(r"\w+\.rn\.f(32|64)", one))
    }
