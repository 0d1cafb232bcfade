"""One op and dtype of both sides: every case of the sequence on both, added up to a ``Pair``."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Listed
from dataclasses import dataclass, replace
from typing import Any

from normcheck.cases.case import Case
from normcheck.checks.attempt import why_not
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.compare.contexts import in_contexts
from normcheck.compare.results import SKIP, Pair, Side
from normcheck.compare.rounding import explained
from normcheck.compare.tally import PairTally
from normcheck.gate.plan import Plan, planner_of
from normcheck.gate.sequence import Sequence
from normcheck.gate.shrink import Stop
from normcheck.runner.call import poisoned_memory
from normcheck.runner.session import session_of

Progress = Callable[[int, float], None]
"""Called after each case with the number of cases so far and the worst ratio."""


@dataclass(frozen=True)
class Both:
    """The cells of A and B, of one op and dtype, and how the command line names B's cell in a line to paste.

    ``repeat``: the words of a command that runs a case line of B again, without the line.
    """

    a: Cell
    b: Cell
    repeat: tuple[str, ...]

    @property
    def shared(self) -> Cell:
        """A's cell, with only those cases that B declares as well. A has its name: the seed of the cases is A's."""
        a, b = self.a.implementation, self.b.implementation
        shapes = a.shapes if b.shapes is None else b.shapes
        if a.shapes is not None and b.shapes is not None:
            shapes = tuple(shape for shape in a.shapes if shape in b.shapes)
        fields: dict[str, Any] = {name: _both(getattr(a, name), getattr(b, name)) for name in _TUPLES}
        fields |= {name: getattr(a, name) and getattr(b, name) for name in _FLAGS}
        fields |= {"weight_layouts": _both(a.weight_layouts, b.weight_layouts)}
        both = replace(a, **fields, shapes=shapes)
        return replace(self.a, implementation=both)

    def why_not(self, device: str) -> str:
        """Why no case can be compared on ``device``, or ""."""
        for label, cell in (("A", self.a), ("B", self.b)):
            reason = why_not(cell, device)
            if reason:
                return f"{label}, {cell.implementation.name}: {reason}"
        shared = self.shared.implementation
        for name in _TUPLES:
            if not getattr(shared, name):
                return f"{name}: A declares {getattr(self.a.implementation, name)}, B others only"
        if shared.shapes == ():
            return "A and B declare no shape that both take"
        if self.a.claims.scales != self.b.claims.scales:
            return "one is given the scale of the codes, the other returns it"
        return ""


_FLAGS = ("strided", "heads", "trailing", "lone_bias")
_TUPLES = ("biases", "weights", "weight_dtypes", "residual_dtypes", "ranks")
"""Fields of an implementation: facts that it declares, and those with the values that it declares."""


def _both(one: tuple[object, ...], other: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(value for value in one if value in other)


def compared(
    both: Both,
    plan: Plan,
    lines: Listed[Case],
    progress: Progress,
    *,
    same_bits: bool = False,
    contexts: tuple[str, ...] = (),
) -> Pair:
    """Both sides on the cases of ``lines``, or, without any, on those that verify would draw for A and B takes as well.

    ``same_bits``: whether to find which rounding differs; ``contexts``: in which they are compared as well. Nothing
    that an implementation does makes it raise. Each side has a process of its own.
    """
    begun = time.perf_counter()
    reason = both.why_not(plan.device)
    if reason:
        return bare(both, plan, SKIP, reason)
    tally = PairTally(both.a, both.b, plan, both.repeat)
    with session_of(both.a.implementation), session_of(both.b.implementation), poisoned_memory():

        def run(case: Case) -> tuple[Result, float]:
            result, seconds = tally.run(case)
            progress(tally.cases, max((side.worst for side in tally.sides), default=0.0))
            return result, seconds

        try:
            if lines:
                for case in lines:
                    run(case)
            else:
                _through(both.shared, plan, run, lambda: tally.cases)
        except Stop:
            pass
        pair = tally.pair(bare(both, plan, SKIP))
        if same_bits and tally.differing:
            left = [side.tally.conventions for side in tally.sides]
            pair = replace(pair, rounding=explained((both.a, both.b), left, plan, tally.differing))
        if contexts and pair.cases:
            pair = replace(pair, contexts=in_contexts((both.a, both.b), plan, contexts, tally.right))
    return replace(pair, seconds=time.perf_counter() - begun)


def bare(both: Both, plan: Plan, status: str, detail: str = "") -> Pair:
    """A pair of which no case ran, with this status."""
    a, b = (Side(implementation=cell.implementation.name) for cell in (both.a, both.b))
    op, dtype = both.a.op.name, both.a.dtype
    return Pair(op=op, dtype=dtype, device=plan.device, status=status, a=a, b=b, detail=detail)


_FRUITLESS = 50
"""So many cases in a row that a side does not take end a pair: nothing else may, if the number of cases does."""


def _through(cell: Cell, plan: Plan, run: Callable[[Case], tuple[Result, float]], count: Callable[[], int]) -> None:
    """Run the sequence of ``cell`` as verify has it, without its large cases."""
    sequence, fruitless = Sequence(cell, plan, planner_of(cell, plan), count, large=False), 0
    for asked in sequence:
        before = count()
        result, seconds = run(asked.planned.case)
        fruitless = fruitless + 1 if count() == before else 0
        if fruitless == _FRUITLESS:
            return
        sequence.saw(asked, refused=bool(result.refused), seconds=seconds)
