"""Parser of SASS, what a GPU executes: a kernel's loops, and how many instructions they take at least."""

import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_\w+):")
# Arithmetic in float64, its comparisons, first approximations and conversions.
_FLOAT64 = re.compile(r"\b(D(ADD|FMA|MUL|SETP|MNMX)|MUFU\.\w+64H|(F2F|I2F|F2I|FRND)\S*\.F64)\b")
_BRANCH = re.compile(r"^(@\S+ )?BRA(?:\.\w+)*\s+(?:(!?U?P\w+),? )?.*`\((\.L_\w+)\)")


@dataclass(frozen=True)
class Kernel:
    """The instructions of a kernel, such as ``@P0 LDG.E.128 R4, desc[UR14][R4.64]``, and where its labels stand."""

    instructions: list[str]
    labels: dict[str, int]

    def target(self, place: int) -> int | None:
        """Return where the instruction at a place branches to, None if it is not a branch."""
        branch = _BRANCH.match(self.instructions[place])
        return self.labels[branch[3]] if branch else None

    def loops(self) -> list[range]:
        """Return the places of each loop."""
        backwards = [(self.target(i), i) for i in range(len(self.instructions))]
        return [range(begin, end + 1) for begin, end in backwards if begin is not None and begin <= end]

    def innermost_loops(self) -> list[range]:
        """Return the places of each loop that contains no other."""
        loops = self.loops()
        return [
            outer for outer in loops if not any(one != outer and one[0] in outer and one[-1] in outer for one in loops)
        ]

    def loop(self) -> range:
        """Return the places of the loop that has the most loads of 16 bytes."""
        return max(self.loops(), key=lambda places: (self.loads(places), -len(places)))

    def main_loop(self) -> range:
        """Return the places of the longest loop that does not leave the kernel, none if there is no such loop."""
        inside = (places for places in self.loops() if not self.count("EXIT", places))
        return max(inside, key=len, default=range(0))

    def count(self, pattern: str, places: range) -> int:
        """Return the number of instructions in which the regular expression is found."""
        return sum(bool(re.search(pattern, self.instructions[i])) for i in places)

    def loads(self, places: range) -> int:
        """Return the number of loads of 16 bytes from global memory."""
        return sum("LDG.E.128" in self.instructions[i] for i in places)

    def shortest_pass(self, places: range | None = None, counts: Callable[[str], bool] = lambda _: True) -> int:
        """Return the number of instructions on the shortest way through a loop that calls no subroutine.

        That is what a vector takes if no option asks for more and no number needs CUDA's slow division.

        ``places``: the loop, by default :meth:`loop`. ``counts``: whether an instruction counts.
        """
        places = self.loop() if places is None else places
        left = {places[-1]: int(counts(self.instructions[places[-1]]))}  # counts from a place to the end of the loop
        for i in reversed(places[:-1]):
            one, target = self.instructions[i], self.target(i)
            after, never = left.get(i + 1), None
            ways = [after]
            if re.match(r"(EXIT|RET|CALL)\b", one):
                ways = [never]
            elif target is not None:
                ways = [left.get(target) if target > i else never]
                conditional = _BRANCH.match(one)
                if conditional and (conditional[1] or conditional[2]):
                    ways.append(after)
            known = [way for way in ways if way is not None]
            if known:
                left[i] = int(counts(one)) + min(known)
        return left[places[0]]


def demangled(names: Sequence[str]) -> list[str]:
    """Return the C++ names of symbols without (lower-case) namespaces; mangled ones if no demangler is installed."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    if not tool or not names:
        return list(names)
    done = subprocess.run([tool], input="\n".join(names), capture_output=True, text=True, check=True)
    return [
        re.sub(r"(\b[a-z_]\w*|\(anonymous namespace\))::", "", name).removeprefix("void ")
        for name in done.stdout.splitlines()
    ]


def is_float64(instruction: str) -> bool:
    """Return whether an instruction is of the float64 units, of which many GPUs have one for 64 of float32."""
    return bool(_FLOAT64.search(instruction))


def parse(text: str) -> dict[str, Kernel]:
    """Return the kernels in nvdisasm's text, keyed by their demangled names."""
    parts = re.split(r"^//-+ \.text\.(\S+)", text, flags=re.MULTILINE)[1:]
    kernels = []
    for body in parts[1::2]:
        kernel = Kernel([], {})
        for line in body.splitlines():
            if label := _LABEL.match(line):
                kernel.labels[label[1]] = len(kernel.instructions)
            elif instruction := _INSTRUCTION.search(line):
                kernel.instructions.append(instruction[1])
        kernels.append(kernel)
    return dict(zip(demangled(parts[0::2]), kernels, strict=True))
