"""What a reference computes: found by judging it, in a process of its own, as if it were an implementation of each op.

Its name and its description are not read: the op and the eps under which it keeps the bounds in every case are its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from normcheck.cases.case import NO_WEIGHT, Case
from normcheck.cases.claims import claims_of
from normcheck.cases.ops import OPS
from normcheck.checks.ask import UNPROBED
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.finding import worst_ratio
from normcheck.errors import UsageError, one_line
from normcheck.gate.plan import PROFILES, Plan
from normcheck.impls.implementation import Implementation
from normcheck.oracle.judging import PLAIN
from normcheck.runner.call import poisoned_memory
from normcheck.runner.session import session_of

_ROWS = ("tiny_variance", "normal", "shifted")
"""Small rows show eps, and rows far from zero whether the mean is subtracted."""


@dataclass(frozen=True)
class Recognised:
    """The implementation that fits: its op is that of the reference. ``eps``: its eps, None if it takes any."""

    implementation: Implementation
    eps: float | None


def recognised(
    candidates: Sequence[Implementation],
    epsilons: Sequence[float],
    device: str,
    timeout: float,
    what: str,
    *,
    any_eps: bool = False,
) -> Recognised:
    """The first of ``candidates`` that is right with one of ``epsilons``, or with ``any_eps`` with each of them.

    ``candidates``: the reference as several ops, each with the shapes at which it is tried; ``what`` names it. Raises
    UsageError if none is.
    """
    nearest = ("", math.inf)
    for implementation in candidates:
        with session_of(implementation), poisoned_memory():
            for group in [tuple(epsilons)] if any_eps else [(eps,) for eps in epsilons]:
                worst, why = _worst(implementation, group, device, timeout)
                if why:
                    raise UsageError(f"{what}: its reference raised {one_line(why, 300)}; expected one that runs here")
                if worst <= 1:
                    return Recognised(implementation, None if any_eps else group[0])
                named = f"{implementation.op}{'' if any_eps else f' with eps={group[0]:g}'}"
                nearest = min(nearest, (named, worst), key=lambda one: one[1])
    raise UsageError(f"{what}: expected a reference that is an op of normcheck within the bounds{_in_words(nearest)}")


def _in_words(nearest: tuple[str, float]) -> str:
    return f"; the nearest is {nearest[0]}, by {nearest[1]:.3g} times the bound" if nearest[0] else ""


def _worst(implementation: Implementation, epsilons: Sequence[float], device: str, timeout: float) -> tuple[float, str]:
    """The worst ratio over some cases, and what it raised if it did; it stops at the first case that is wrong."""
    op = OPS[implementation.op]
    cell = Cell(op, replace(implementation, epsilons=None), implementation.dtypes[0], implementation.name)
    plan = Plan((cell,), PROFILES["quick"], 0, device, timeout, judge=PLAIN)
    worst = 0.0
    for case in _cases(implementation, epsilons):
        result = run_case(cell, case, plan, UNPROBED)
        if result.problems:
            return math.inf, result.problems[0].message
        worst = max(worst, worst_ratio(result)) if result.checked else math.inf
        if not worst <= 1:
            break
    return worst, ""


def _cases(implementation: Implementation, epsilons: Sequence[float]) -> Iterator[Case]:
    op, dtype = OPS[implementation.op], implementation.dtypes[0]
    weight = True in op.weights_of(implementation.weights)
    own = {axis: values[0] for axis, values in claims_of(op, implementation, dtype).own.items()}
    own |= {"residual": "half"} if op.adds_residual else {}
    for rows, columns in implementation.shapes or ():
        for eps in epsilons:
            for number, kind in enumerate(_ROWS, 1):
                yield Case(
                    op=op.name,
                    dtype=dtype,
                    M=rows,
                    N=columns,
                    eps=eps,
                    rows=kind,
                    seed=number,
                    weights="normal" if weight else NO_WEIGHT,
                    bias=weight and True in implementation.biases and True in op.biases,
                    **own,
                )
