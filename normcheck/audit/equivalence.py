"""Whether a planted fault is a fault at all under a regime: does any case there tell it from the clean kernel?

Many faults have no effect in some regime: with N = 1, a row has no other column to be mixed up with. No mutant declares
this. The cases of a core are moved into the regime and run instead. The fault counts if the gate fails a case, or if an
output has other numbers than the clean kernel's. The sweep then shows whether the gate finds it among its own cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from torch import Tensor

from normcheck.audit.mutants.mutant import Mutant
from normcheck.audit.mutants.regimes import Regime
from normcheck.audit.mutants.under import under, without_fault
from normcheck.cases.case import Case
from normcheck.cases.core import drawn
from normcheck.cases.op import Op
from normcheck.checks.ask import UNPROBED
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.gate.plan import Plan
from normcheck.runner.call import poisoned_memory

INTERPRETED = 40
"""Cases of a core that are enough for an interpreted kernel: every kind of rows, every layout, NaN and infinity."""


def differs_from_clean(regime: Regime, mutant: Mutant, op: Op, dtype: str, plan: Plan) -> bool:
    """Whether the fault differs from the clean kernel in any case of a core that is moved into ``regime``."""
    faulty = Cell(op, under(regime, mutant).make(op.name), dtype, mutant.id)
    clean = Cell(op, without_fault(regime, mutant).make(op.name), dtype, "clean")
    with poisoned_memory():
        for case in _cases(regime, mutant, faulty, plan):
            result = run_case(faulty, case, plan)
            if result.failed or not _same(result, run_case(clean, case, plan, UNPROBED)):
                return True
    return False


def first_failing_case(regime: Regime, mutant: Mutant, op: Op, dtype: str, plan: Plan) -> Case | None:
    """The first case of a core, moved into ``regime``, that the gate fails; None if the fault passes in all."""
    faulty = Cell(op, under(regime, mutant).make(op.name), dtype, mutant.id)
    with poisoned_memory():
        return next(
            (case for case in _cases(regime, mutant, faulty, plan) if run_case(faulty, case, plan).failed), None
        )


def _cases(regime: Regime, mutant: Mutant, cell: Cell, plan: Plan) -> Iterator[Case]:
    """The cases of a core, each moved into ``regime``; only the first ones if the kernel is interpreted, thus slow."""
    planned = drawn(cell.claims, plan.profile.extent, plan.seed)
    cases = (regime.into(entry.case) for entry in planned)
    return islice(cases, INTERPRETED if mutant.language == "triton" else None)


def _same(one: Result, other: Result) -> bool:
    """Whether two results have the same outputs and gradients. -0 equals 0, since no bound sees the sign of a zero."""
    of_one, of_other = ([result.seen.named, result.staged] for result in (one, other))
    return all(
        first.keys() == second.keys() and all(_equal(first[name], second[name]) for name in first)
        for first, second in zip(of_one, of_other, strict=True)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape and numbers; any NaN equals any other."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
