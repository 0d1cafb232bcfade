"""Both sides in the contexts that were asked for: there, too, their results must have the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case
from normcheck.checks.attempt import attempted
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.checks.contexts import called_within
from normcheck.compare.results import DIFFER, SAME, SKIP, PairInContext
from normcheck.contexts.catalogue import CONTEXTS
from normcheck.gate.contexts import chosen
from normcheck.gate.plan import Plan

_Steps = Mapping[str, Mapping[str, Tensor]]
"""What a side returned: the words of a step -> output -> tensor."""


def in_contexts(
    cells: tuple[Cell, Cell], plan: Plan, names: Sequence[str], ran: Sequence[Case]
) -> tuple[PairInContext, ...]:
    """How A and B compare in each context of ``names``, on two or three shapes of ``ran``: cases right on both sides.

    Shapes differ in size, and one fills the device.
    """
    if not ran:
        return tuple(
            PairInContext(context=name, status=SKIP, detail="no case is right on both sides") for name in names
        )
    ragged, even, filling = chosen(ran, plan.device)
    found = []
    for name in names:
        cases = [filling] if CONTEXTS[name].filling else [ragged, even, *[filling] * (plan.device == "cuda")]
        each = [_on_case(cells, plan, name, case) for case in dict.fromkeys(cases)]
        found.append(next((one for one in each if one.status == DIFFER), each[0]))
    return tuple(found)


def _on_case(cells: tuple[Cell, Cell], plan: Plan, name: str, case: Case) -> PairInContext:
    """``name`` on one case: other bits, or a side alone that fails, is a difference."""
    if plan.device not in CONTEXTS[name].devices:
        return PairInContext(context=name, status=SKIP, detail=f"it takes {' or '.join(CONTEXTS[name].devices)}")
    sides: list[_Steps] = []
    for label, cell in zip("AB", cells, strict=True):
        done = attempted(cell, case, plan, partial(_steps, cell, case, plan.device, name), most=CONTEXTS[name].seconds)
        if isinstance(done, Result) and done.problems:
            words = f"{label}: {done.problems[0].message}"
            return PairInContext(context=name, status=DIFFER, detail=words, case=str(case))
        if isinstance(done, Result | str):
            why = done if isinstance(done, str) else done.refused
            return PairInContext(context=name, status=SKIP, detail=f"{label}: {why}")
        sides.append(done)
    first, *more = [*_differing(*sides)] or [""]
    words = f"{first}; so in {len(more)} other ways to call it there" if more else first
    return PairInContext(context=name, status=DIFFER if first else SAME, detail=words, case=str(case))


def _steps(cell: Cell, case: Case, device: str, name: str) -> _Steps | str:
    """What the cell returns in the context, or why that could not be tried."""
    done = called_within(cell.implementation, cell.op, case, device, name).performed
    kept = {step.words: {output: t.clone() for output, t in step.outputs.items()} for step in done.steps}
    return kept or done.not_tried or "nothing was returned"


def _differing(a: _Steps, b: _Steps) -> Iterator[str]:
    """What differs, in words: the first output of each step."""
    for words in dict.fromkeys((*a, *b)):
        own, other = a.get(words, {}), b.get(words, {})
        for output in dict.fromkeys((*own, *other)):
            if output not in own or output not in other:
                yield f"{'B' if output in own else 'A'} returns no {output} {words}"
                break
            first, second = own[output], other[output]
            if first.dtype != second.dtype or first.numel() != second.numel():
                yield f"{output} is of another dtype or size {words}"
                break
            if not guard_bands.same_bits(first, second.reshape(first.shape)):
                count = guard_bands.how_many_differ(first, second.reshape(first.shape))
                yield f"{output} differs in {count} of {first.numel()} elements {words}"
                break
