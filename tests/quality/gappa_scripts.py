"""Kernels as scripts of Gappa, which proves bounds of rounding errors (https://gappa.gitlabpages.inria.fr).

In a script each operation is rounded as fp32 rounds, subnormals included, and the goal is ``Order.allowed``, relative
to the exact value. All summands have one sign, so that the exact value is the sum of their magnitudes, and lie between
2^-20 and 2^20. Neither loses anything but underflow: fp32's rounding is odd and commutes with powers of two, and
``rounding_derivatives.py`` has the other signs.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from fractions import Fraction

from normcheck.oracle.rounding import Rules
from tests.quality.rounded_kernels import Order


@dataclass(frozen=True)
class Written:
    """An expression with its roundings, and the same without."""

    rounded: str
    exact: str

    def __add__(self, other: Written) -> Written:
        return self._rounded("+", other)

    def __sub__(self, other: Written) -> Written:
        return self._rounded("-", other)

    def __mul__(self, other: Written) -> Written:
        return self._rounded("*", other)

    def __truediv__(self, other: Written) -> Written:
        return self._rounded("/", other)

    def _rounded(self, sign: str, other: Written) -> Written:
        return Written(f"rnd({self.rounded} {sign} {other.rounded})", f"({self.exact} {sign} {other.exact})")


class Writing:
    """The arithmetic that writes. ``declared``: numbers in fp32; ``given``: the ranges of what a script is given."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.declared: dict[str, str] = {}
        self.given: dict[str, str] = {}

    def leaf(self, name: str) -> Written:
        self.declared[name] = f"rnd({name}_)"
        self.given[name] = "[-1b20, -1b-20]" if name in self.order.negative else "[1b-20, 1b20]"
        return Written(name, name)

    def difference(self, name: str, less: str) -> Written:
        self.declared |= {name: f"rnd({name}_)", less: f"rnd({less}_)"}
        self.given[f"{name} - {less}"] = "[1b-20, 1b20]"
        return Written(f"rnd({name} - {less})", f"({name} - {less})")

    def one_plus(self, name: str) -> Written:
        self.declared[name] = f"rnd({name}_)"
        self.given[f"1 + {name}"] = "[1b-20, 1b20]"
        return Written(f"rnd(1 + {name})", f"(1 + {name})")

    def constant(self, value: int) -> Written:
        return Written(str(value), str(value))

    def fused(self, a: Written, b: Written) -> Written:
        return Written(f"({a.rounded} * {b.rounded})", f"({a.exact} * {b.exact})")


@dataclass(frozen=True)
class _Root:
    """A kernel's root and the rstd that it saves, both from ``source`` between 1 and 2.

    ``hints`` say how far the root's reciprocal is from that rstd.
    """

    root: str
    rstd: str
    source: str
    hints: tuple[str, ...]


_ROOTS = {
    "root": _Root("rnd(root_)", "rnd(1 / root)", "root", ("-(r - 1 / root) / r",)),
    "fp64": _Root(
        "rnd(s)",
        "rnd(1 / s)",
        "s",
        (
            "-(root * r - 1) / (root * r)",
            "root * r - 1 -> (root - s) / s + (r - 1 / s) * s + (root - s) * (r - 1 / s)",
        ),
    ),
}
"""The second has its root and the rstd that it saves from fp64. Of their two roundings one is small where the other is
large: together they are at most 1.5 u, which Gappa sees in 16 parts of the range. The range is wide enough, for numbers
between other powers of two are the same."""


def script(order: Order, rules: Rules) -> str:
    """The script that proves the count of ``order`` under the numbers of ``rules``, or fails."""
    writing = Writing(order)
    written = order.kernel(writing)
    hints, expected = "", "computed_exactly"
    if order.unsaved:
        writing.declared.clear()
        writing.given = {written.rounded: "[1, 2]"}
        written = Written(written.rounded, f"rnd({written.exact})")
    elif order.divides_by is not None:
        of, expected = _ROOTS[order.divides_by], "expected"
        writing.declared |= {"root": of.root, "r": of.rstd}
        del writing.given["root"]
        writing.given[of.source] = "[1, 2]"
        equalities = "".join(f"{each};\n" for each in of.hints)
        hints = f"(computed_exactly - expected) / expected -> {equalities}$ {of.source} in 16;\n"
    lines = ["@rnd = float<ieee_32, ne>;", *(f"{name} = {value};" for name, value in writing.declared.items())]
    lines += [f"computed = {written.rounded};", f"computed_exactly = {written.exact};"]
    if hints:
        lines.append("expected = computed_exactly * (root * r);")
    given = " /\\ ".join(f"{name} in {range_}" for name, range_ in writing.given.items())
    lines.append(f"{{ {given} -> |computed -/ {expected}| <= {literal(order.allowed(rules))} }}")
    return "\n".join(lines) + "\n" + hints


def literal(value: float) -> str:
    """``value`` to the last bit, as Gappa writes a number."""
    exact = Fraction(value)
    return f"{exact.numerator}b-{exact.denominator.bit_length() - 1}"


def proves(gappa: str, text: str) -> bool:
    """Whether Gappa proves the script ``text``. Raises ValueError if it does not understand it, or doubts a hint."""
    done = subprocess.run(
        [gappa, "-Eno-auto-dichotomy", "-Wno-null-denominator"], input=text, capture_output=True, text=True, timeout=60
    )
    proved = done.returncode == 0
    if "not trivially equal" in done.stderr or not (proved or "some properties were not satisfied" in done.stderr):
        raise ValueError(f"{done.stderr}\n{text}")
    return proved
