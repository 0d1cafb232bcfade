"""The orders of evaluation that tolerances.toml allows, as kernels over any arithmetic that rounds each operation.

``gappa_scripts.py`` writes a kernel as a script, ``rounding_derivatives.py`` differentiates it by its roundings, and
``test_proofs.py`` computes some in fp32. What the bound's formula leaves to a kernel is read from the table:
``Order.allowed``, relative to the sum of the magnitudes of what is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add, mul
from typing import Any, Protocol

from normcheck.oracle.rounding import Rules

Number = Any
"""A number of an arithmetic, whose +, -, * and / round once each."""


class Arithmetic(Protocol):
    """What a kernel computes with."""

    def leaf(self, name: str) -> Number:
        """A number in fp32 that the kernel reads."""

    def difference(self, name: str, less: str) -> Number:
        """``name`` - ``less`` of two numbers in fp32, rounded; its size is free, however large the two are."""

    def one_plus(self, name: str) -> Number:
        """1 + ``name``, rounded; its size is as free as that of a difference."""

    def constant(self, value: int) -> Number:
        """A number that is known when the kernel is written: 1, N, or how many have come."""

    def fused(self, a: Number, b: Number) -> Number:
        """``a`` * ``b`` inside an FMA, whose one rounding is that of its add."""


Kernel = Callable[[Arithmetic], Number]
Sum = Callable[[Sequence[Number]], Number]


@dataclass(frozen=True)
class Order:
    """One order of evaluation of what ``count`` counts, at one size.

    ``allowed``: the relative error that the bound's formula leaves to it. ``terms``: the leaves that it is linear in,
    each in a summand of its own. ``negative``: those that are subtracted. ``negligible``: leaves that may be 0.
    ``divides_by``: the root that a kernel divides by, if it does: that of the saved rstd (``"root"``), or one that was
    rounded from fp64 as the saved rstd was (``"fp64"``). ``unsaved``: its leaf is a statistic in fp64, and is held
    against that leaf rounded to fp32. ``by_gappa``: whether Gappa reaches it; it does not see that a number that occurs
    twice is the same one.
    """

    count: str
    name: str
    kernel: Kernel
    allowed: Callable[[Rules], float]
    terms: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    negligible: tuple[str, ...] = ()
    divides_by: str | None = None
    unsaved: bool = False
    by_gappa: bool = True

    def __str__(self) -> str:
        return f"{self.count}: {self.name}"


# sums


def one_by_one(terms: Sequence[Number]) -> Number:
    """The first term passes through all len(terms) - 1 adds."""
    return reduce(add, terms)


def pairwise(terms: Sequence[Number]) -> Number:
    """A tree of adds."""
    if len(terms) == 1:
        return terms[0]
    half = (len(terms) + 1) // 2
    return pairwise(terms[:half]) + pairwise(terms[half:])


def blocks_of_two(terms: Sequence[Number]) -> Number:
    """What a kernel with ``chain`` = 2 does: accumulators that take two terms each, then a tree."""
    return pairwise([one_by_one(terms[i : i + 2]) for i in range(0, len(terms), 2)])


def averaged(arithmetic: Arithmetic, total: Number, n: int) -> Number:
    """A sum times 1/N, which is rounded: never better than the sum divided by N."""
    return total * (arithmetic.constant(1) / arithmetic.constant(n))


# elements


def weight(arithmetic: Arithmetic, *, zero_centered: bool, i: int | str = "") -> Number:
    """g: the weight as stored, or 1 + weight."""
    return arithmetic.one_plus(f"w{i}") if zero_centered else arithmetic.leaf(f"w{i}")


def xhat(arithmetic: Arithmetic, *, centered: bool, divided: bool, i: int | str = "") -> Number:
    """x - mean, or x, times rstd or divided by the root."""
    xc = arithmetic.difference(f"x{i}", "m") if centered else arithmetic.leaf(f"x{i}")
    return xc / arithmetic.leaf("root") if divided else xc * arithmetic.leaf("r")


def y(arithmetic: Arithmetic, order: str, *, zero_centered: bool) -> Number:
    """xhat * g, before the bias is added."""
    g = weight(arithmetic, zero_centered=zero_centered)
    if order == "rstd * g first":
        return arithmetic.difference("x", "m") * (arithmetic.leaf("r") * g)
    xh = xhat(arithmetic, centered=True, divided=order == "divided by the root")
    return arithmetic.fused(xh, g) if order == "xhat first, FMA with the bias" else xh * g


def dx(arithmetic: Arithmetic, order: str, *, n: int, zero_centered: bool, centered: bool) -> Number:
    """An element of dx from the means ``c1`` and ``c2``; the orders with N times dy g take N times those, the sums."""
    g = weight(arithmetic, zero_centered=zero_centered)
    xh = xhat(arithmetic, centered=centered, divided=False)
    c1, r = arithmetic.leaf("c1"), arithmetic.leaf("r")
    if order.startswith("N dy g"):
        wd = (arithmetic.constant(n) * g) * arithmetic.leaf("dy")
        scale = (arithmetic.constant(1) / arithmetic.constant(n)) * r
        if not centered:
            return (wd - xh * c1) * scale
        if order == "N dy g, xhat sum first":
            return (wd - xh * c1 - arithmetic.leaf("c2")) * scale
        return (wd - arithmetic.leaf("c2") - xh * c1) * scale
    wd = g * arithmetic.leaf("dy")
    both = xh * c1 + arithmetic.leaf("c2") if centered else xh * c1
    return wd * r - both * r if order == "rstd on both sides" else (wd - both) * r


# means and sums over a row or over rows


def mean(arithmetic: Arithmetic, adding: Sum, n: int) -> Number:
    """The mean of x."""
    return averaged(arithmetic, adding([arithmetic.leaf(f"x{i}") for i in range(n)]), n)


def running_mean(arithmetic: Arithmetic, n: int, *, divided: bool) -> Number:
    """The running mean, which each x moves by (x - mean) times 1/k, or divided by k."""
    so_far = arithmetic.leaf("x0")
    for k in range(2, n + 1):
        delta = arithmetic.leaf(f"x{k - 1}") - so_far
        count = arithmetic.constant(k)
        so_far = so_far + (delta / count if divided else delta * (arithmetic.constant(1) / count))
    return so_far


def mean_square(arithmetic: Arithmetic, adding: Sum, n: int, *, about: str | None, corrected: bool = False) -> Number:
    """The mean of x^2, or of (x - mean)^2 ``about`` a mean that was computed before.

    ``corrected``: less (sum (x - mean))^2 / N, as in Chan, Golub and LeVeque 1983. It is of second order: here 0.
    """
    deviations = [arithmetic.difference(f"x{i}", about) if about else arithmetic.leaf(f"x{i}") for i in range(n)]
    total = adding([d * d for d in deviations])
    return averaged(arithmetic, total - arithmetic.leaf("correction") if corrected else total, n)


def c1(arithmetic: Arithmetic, adding: Sum, n: int, *, zero_centered: bool, xhat_last: bool) -> Number:
    """The mean of xhat * dy * g."""
    terms = []
    for i in range(n):
        g, dy = weight(arithmetic, zero_centered=zero_centered, i=i), arithmetic.leaf(f"dy{i}")
        xh = xhat(arithmetic, centered=True, divided=False, i=i)
        terms.append((g * dy) * xh if xhat_last else (xh * dy) * g)
    return averaged(arithmetic, adding(terms), n)


def c2(arithmetic: Arithmetic, adding: Sum, n: int, *, zero_centered: bool) -> Number:
    """The mean of dy * g."""
    terms = [weight(arithmetic, zero_centered=zero_centered, i=i) * arithmetic.leaf(f"dy{i}") for i in range(n)]
    return averaged(arithmetic, adding(terms), n)


def dw(arithmetic: Arithmetic, adding: Sum, n: int) -> Number:
    """The sum over rows of dy * xhat; each row has its own x, mean and rstd."""
    terms = []
    for i in range(n):
        xh = arithmetic.difference(f"x{i}", f"m{i}") * arithmetic.leaf(f"r{i}")
        terms.append(arithmetic.leaf(f"dy{i}") * xh)
    return adding(terms)


def db(arithmetic: Arithmetic, adding: Sum, n: int) -> Number:
    """The sum over rows of dy."""
    return adding([arithmetic.leaf(f"dy{i}") for i in range(n)])


def rotation(arithmetic: Arithmetic, *, fused: bool) -> Number:
    """The first column of a pair: n_a * cos - n_b * sin."""
    first, second = (arithmetic.leaf(name) for name in ("na", "nb"))
    one = arithmetic.fused if fused else mul
    return one(first, arithmetic.leaf("c")) - second * arithmetic.leaf("s")


# what the bounds leave to them


def _given_saved(count: str, rules: Rules) -> float:
    """y and xhat given the saved statistics: |xhat g| times this (forward_bounds.output_y, casting.cast)."""
    return (1 + rules.count["stats_saved"] * rules.u) * (1 + rules.count[count] * rules.u) - 1


def _unsaved(rules: Rules) -> float:
    """The mean, or rstd, that was used: the saved one times this (forward_bounds.saved_statistics)."""
    return rules.count["stats_saved"] * rules.u


def _summed(count: str, n: int, chain: int | str, rules: Rules) -> float:
    """A sum of n terms: the sum of their magnitudes times this."""
    rules = replace(rules, model=replace(rules.model, chain=chain))
    return rules.gam(rules.chain(n) + rules.count[count])


def _rotation(rules: Rules) -> float:
    """y: |n_a cos| + |n_b sin| times this, of an n without an error (rotary.output_y)."""
    return rules.gam(rules.count["rotation"])


def _dx(rules: Rules) -> float:
    """dx: rstd (|dy g| + |xhat c1| + |c2|) times this (backward_bounds.output_dx)."""
    return rules.count["dx_elementwise"] * rules.u


def _forward_orders() -> list[Order]:
    found = [
        Order("stats_saved", "in fp64, saved in fp32", lambda arithmetic: arithmetic.leaf("s"), _unsaved, unsaved=True)
    ]
    for count, zero_centered in (("y", False), ("y_zero_centered", True)):
        allowed = partial(_given_saved, count)
        for order in ("xhat first", "xhat first, FMA with the bias", "rstd * g first"):
            kernel = partial(y, order=order, zero_centered=zero_centered)
            found.append(Order(count, order, kernel, allowed))
        kernel = partial(y, order="divided by the root", zero_centered=zero_centered)
        found.append(Order(count, "divided by the root", kernel, allowed, divides_by="root"))
        found.append(Order(count, "divided by the root, statistics in fp64", kernel, allowed, divides_by="fp64"))
    for count, centered in (("y_without_weight", True), ("xhat", False)):
        allowed = partial(_given_saved, count)
        times, divided = (partial(xhat, centered=centered, divided=divided) for divided in (False, True))
        found.append(Order(count, "times rstd", times, allowed))
        found.append(Order(count, "divided by the root", divided, allowed, divides_by="root"))
        found.append(Order(count, "divided by the root, statistics in fp64", divided, allowed, divides_by="fp64"))
    for name, fused in (("two products and their sum", False), ("FMA", True)):
        kernel = partial(rotation, fused=fused)
        found.append(Order("rotation", name, kernel, _rotation, ("na", "nb"), ("nb",)))
    return found


def _dx_orders() -> list[Order]:
    found = []
    for centered, zero_centered in ((True, False), (True, True), (False, True)):
        op = f"{'layernorm' if centered else 'rmsnorm'}{', 1 + weight' if zero_centered else ''}"
        subtracted = ("c1", "c2") if centered else ("c1",)
        for order, n in (
            ("times rstd at the end", 1),
            ("rstd on both sides", 1),
            ("N dy g, xhat sum first", N_OF_WORST_RECIPROCAL),
            ("N dy g, sum first", N_OF_WORST_RECIPROCAL),
        ):
            kernel = partial(dx, order=order, n=n, zero_centered=zero_centered, centered=centered)
            found.append(Order("dx_elementwise", f"{order}, {op}", kernel, _dx, ("dy", *subtracted), subtracted))
    return found


N_OF_WORST_RECIPROCAL = 4095
"""1 / 4095 lies next to the middle of two numbers just above 2^-12: its rounding is off by 0.9995 of u."""


def _sum_orders() -> list[Order]:
    found = []
    for adding, n, chain in SUMS:
        name = f"{adding.__name__.replace('_', ' ')}, N = {n}"
        x, dy = tuple(f"x{i}" for i in range(n)), tuple(f"dy{i}" for i in range(n))
        kernels: list[tuple[str, str, Any, tuple[str, ...]]] = [
            ("mean", "", mean, x),
            ("rms", "", partial(mean_square, about=None), x),
            ("var", "", partial(mean_square, about="m"), x),
            ("var", "corrected, ", partial(mean_square, about="m", corrected=True), x),
            ("c1", "(dy g) xhat, ", partial(c1, zero_centered=True, xhat_last=True), dy),
            ("c1", "(xhat dy) g, ", partial(c1, zero_centered=True, xhat_last=False), dy),
            ("c2", "", partial(c2, zero_centered=True), dy),
            ("dw", "", dw, dy),
            ("db", "", db, dy),
        ]
        for count, how, kernel, terms in kernels:
            allowed = partial(_summed, count, n, chain)
            corrected = ("correction",) if how == "corrected, " else ()
            one = Order(count, how + name, partial(kernel, adding=adding, n=n), allowed, terms)
            found.append(replace(one, negative=corrected, negligible=corrected))
    for n in range(2, MOST_RUNNING + 1):
        for divided in (False, True):
            name = f"running, {'divided by k' if divided else 'times 1/k'}, N = {n}"
            kernel, x = partial(running_mean, n=n, divided=divided), tuple(f"x{i}" for i in range(n))
            found.append(Order("mean", name, kernel, partial(_summed, "mean", n, "any"), x, by_gappa=False))
    return found


SUMS: tuple[tuple[Sum, int, int | str], ...] = (
    (one_by_one, 2, "any"),
    (one_by_one, 3, "any"),
    (one_by_one, 8, "any"),
    (pairwise, 5, "any"),
    (blocks_of_two, 6, 2),
)
"""Orders of adding, numbers of terms, the ``chain`` that a kernel declares. A product by the reciprocal of a power of
two is exact, so not all of them are powers of two."""

MOST_RUNNING = 10
"""The longest row here with a running mean. From 11 on the standard model gives it more than the bound does: it takes
about 3 ln N roundings beside the adds."""

ORDERS = [*_forward_orders(), *_dx_orders(), *_sum_orders()]
