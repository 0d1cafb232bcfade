"""Whether a fault is one at all under a regime: what nothing can tell from the clean kernel is no fault there.

Many a fault is none in some regime: where N = 1, a row has no other column to be mixed up with. Which, is not declared
but tried, on the cases of a core, moved into the regime. A case that the gate fails, or one output with other
numbers, makes it a fault; whether the gate finds it among its own cases is then for the sweep to show.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch import Tensor

from normcheck.audit.mutants.mutant import Mutant
from normcheck.audit.mutants.regimes import Regime
from normcheck.audit.mutants.under import under, without_fault
from normcheck.cases.case import Case
from normcheck.cases.claims import claims_of
from normcheck.cases.core import drawn
from normcheck.cases.ops.op import Op
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.checks.probes import Depth
from normcheck.gate.plan import Plan
from normcheck.runner.call import poisoned_memory

INTERPRETED = 40
"""Cases of a core that an interpreted kernel is tried on: every kind of rows, every layout, NaN and infinity."""


def told_apart(regime: Regime, mutant: Mutant, op: Op, dtype: str, plan: Plan) -> bool:
    """Whether any case of a core, moved into ``regime``, tells the fault from the clean kernel."""
    faulty = Cell(op, under(regime, mutant).make(op.name), dtype, mutant.id)
    clean = Cell(op, without_fault(regime, mutant).make(op.name), dtype, "clean")
    with poisoned_memory():
        for case in _tried(regime, mutant, faulty, plan):
            found = run_case(faulty, case, plan)
            if found.failed or not _same(found, run_case(clean, case, plan, depth=Depth.OFF)):
                return True
    return False


def failing(regime: Regime, mutant: Mutant, op: Op, dtype: str, plan: Plan) -> Case | None:
    """The first case of a core, moved into ``regime``, that the gate fails; None if it passes in all."""
    faulty = Cell(op, under(regime, mutant).make(op.name), dtype, mutant.id)
    with poisoned_memory():
        return next(
            (case for case in _tried(regime, mutant, faulty, plan) if run_case(faulty, case, plan).failed), None
        )


def _tried(regime: Regime, mutant: Mutant, cell: Cell, plan: Plan) -> Iterator[Case]:
    """The cases of a core, each moved into ``regime``; of an interpreted kernel, which is slow, the first ones."""
    planned = drawn(claims_of(cell.op, cell.implementation, cell.dtype), plan.profile.extent, plan.seed)
    cases = (regime.into(one.case) for one in planned)
    return islice(cases, INTERPRETED if mutant.language == "triton" else None)


def _same(one: Result, other: Result) -> bool:
    """Whether two results have the same outputs and gradients, number for number: no bound sees the sign of a zero."""
    of_one, of_other = ([result.seen.named, result.staged] for result in (one, other))
    return all(
        first.keys() == second.keys() and all(_equal(first[name], second[name]) for name in first)
        for first, second in zip(of_one, of_other, strict=True)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape have the same numbers, a NaN being like any other."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
