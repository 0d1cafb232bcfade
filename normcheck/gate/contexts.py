"""The contexts of a cell, tried after its core on some shapes that have run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from normcheck.cases.case import NO_WEIGHT, Case
from normcheck.checks.ask import UNPROBED, Ask
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.circumstances import NOT_TRIED, InContext
from normcheck.contexts.catalogue import CONTEXTS, PROFILER
from normcheck.gate.plan import Plan
from normcheck.runner.session import session_of

_LEAST, _SHARE = 3.0, 0.15
"""Seconds, and the share of those that a cell has taken so far, of which the larger holds: after them no further shape
is tried, and no context. On a GPU without other work all of them take 1 to 1.5 s."""

_COMPILING = 8.0
"""Seconds after which no context is tried that has torch.compile compile anew: 4 s each of a norm on an H100. What is
compiled takes nothing from the others. If so many cells follow each other that each has a share of its time: none."""

_SMALL, _FILLING = (60, 20_000), {"cpu": (1 << 16, 1 << 18), "cuda": (1 << 20, 1 << 22)}
"""Elements of a small case, at least and at most, and of one that has work for several threads, or for all of a GPU."""

_FEW_ROWS, _ROWS = range(8, 65), range(65, 513)
"""Rows of a ragged case, as in decoding, and of the others: enough for a blend to tell, and not so many that a kernel
of one row at a time takes seconds."""

_SHORT = 1024

_WIDE = range(4096, 1 << 15)
"""Columns of a case of few rows in which a network's calls are tried as well: more than those above may have."""

_OF_ONE_ROW = ("again", "inference")
"""Contexts that are also tried on one row, as of one token that is decoded: for that many keep an output."""

_MANY_ROWS = {"cpu": _ROWS, "cuda": range(2048, 1 << 15)}
"""Rows of a case that fills the device: on a GPU as in training, where sums over rows are split, or begun elsewhere."""


def failing_in_context(
    cell: Cell, plan: Plan, ran: Sequence[Case], used: float, ask: Ask = UNPROBED
) -> tuple[list[Result], dict[str, InContext]]:
    """The first case that is wrong in a context, in a list, or none; and how the cell did in each of the contexts.

    ``ran``: cases that are right in eager mode; ``used``: the seconds that the cell has taken so far; ``ask``: of what
    is known of the kernel.
    """
    spent, found = {True: 0.0, False: 0.0}, dict[str, InContext]()
    for name, case in _trials(cell, plan, ran):
        anew = CONTEXTS[name].anew and session_of(cell.implementation).graphs > 0
        if anew and name in found and not plan.asked:  # each case may be compiled anew: one of them tells
            continue
        is_over = spent[anew] >= (_COMPILING * (plan.profile.dear.share == 1.0) if anew else max(_LEAST, _SHARE * used))
        if is_over and not plan.asked and name not in held_to(cell, plan):
            found.setdefault(name, InContext(status=NOT_TRIED, why=f"no time was left; --context {name} tries it"))
            continue
        begun = time.perf_counter()
        result = run_case(cell, case, replace(plan, within=(name,)), ask)
        spent[anew] += time.perf_counter() - begun
        if result.failed:
            found.update(result.contexts)
            return [result], found
        how = result.contexts.get(name, InContext(status=NOT_TRIED, why=result.refused))
        found[name] = found[name].joined(how) if name in found else how
        if name == "graph" and found[name].why:  # what a capture that failed leaves behind ends with the process
            session_of(cell.implementation).restart()
    return [], found


def held_to(cell: Cell, plan: Plan) -> tuple[str, ...]:
    """The contexts that a cell must be tried in: those asked for, and of those that it declares what its device has."""
    if not plan.contexts:
        return ()
    own = (*cell.implementation.contexts, *([PROFILER] if cell.implementation.expects_kernel else []))
    declared = (name for name in own if plan.device in CONTEXTS[name].devices)
    return tuple(dict.fromkeys((*plan.held_to, *declared)))


def missing(cell: Cell, plan: Plan, found: Mapping[str, InContext]) -> list[str]:
    """What a pass lacks of the contexts that its cell is held to, in words."""
    names = held_to(cell, plan) if plan.shard[0] == 1 else ()
    untried = {
        name: found[name].why if name in found else "no case of it ran"
        for name in names
        if name not in found or found[name].status == NOT_TRIED
    }
    gaps = [f"it must hold in the context {name}, which was not tried: {why}" for name, why in untried.items()]
    expects = cell.implementation.expects_kernel
    if expects and plan.contexts and plan.shard[0] == 1 and plan.device not in CONTEXTS[PROFILER].devices:
        gaps.append(f"expects_kernel={expects!r}: no GPU to see it run on")
    return gaps


def _trials(cell: Cell, plan: Plan, ran: Sequence[Case]) -> Iterator[tuple[str, Case]]:
    """(context, case): each context on the case that tells most of it, then on the others."""
    ran = [case for case in ran if not case.huge]  # of those only one has its inputs in memory
    if not ran:
        return
    ragged, even, filling = chosen(ran, plan.device)
    ragged = replace(ragged, rows="normal")  # in the dw of a blend of many rows zeros may pass
    filling = filling if plan.device == "cuda" else replace(filling, rows="normal")
    every = (ragged, filling, even) if plan.device == "cuda" else (ragged, even)
    for number, case in enumerate(every):
        for name in dict.fromkeys((*plan.contexts, *held_to(cell, plan))):
            if CONTEXTS[name].by_size:
                continue
            own = filling if CONTEXTS[name].filling else case
            if number == 0 or not (CONTEXTS[name].filling or case in every[:number]):
                yield name, own
    of_one_row = [case for case in ran if case.M == 1 and case.weights != NO_WEIGHT and case.N <= _SHORT]
    if of_one_row:
        case = replace(max(of_one_row, key=lambda each: (each.N % 64 == 0, each.N)), rows="normal", dy="normal")
        yield from ((name, case) for name in _OF_ONE_ROW if name in plan.contexts)
    ran = [case for case in ran if case.M and case.N in _WIDE and case.weights != NO_WEIGHT]
    wide = [replace(case, rows="normal", dy="normal") for case in sorted(ran, key=lambda each: each.M * each.N)]
    by_parity = {case.N % 2: case for case in reversed(wide)}  # by that frozen has one output unused, or the other
    of_wide = [("again", wide[:1]), ("frozen", by_parity.values() if cell.op.adds_residual else ())]
    yield from ((name, case) for name, cases in of_wide for case in cases if name in plan.contexts)


def chosen(ran: Sequence[Case], device: str) -> tuple[Case, Case, Case]:
    """Of cases that have run, one at least, a small ragged one, a small round one, and one that fills the device.

    The round ones have weights in the dtype of x if any has. If there is none of a kind, the next best stands for it.
    Their rows become a blend of all kinds: it shows best whether eps, the mean and so on are used.
    """

    def badness(case: Case, elements: tuple[int, int], rows: range, *, ragged: bool = False) -> tuple[float, ...]:
        misses = case.N % 2 == 0 if ragged else case.N % 64 != 0
        if elements == _FILLING["cpu"]:
            misses = case.M % 2 == 0  # several threads leave a rest of an odd number
        bare, cast = case.weights == NO_WEIGHT, case.weight_dtype == "same"  # in fp32 a weight is its own cast
        other = case.bias != ragged, cast == ragged
        short = case.N <= _SHORT  # a way for longer rows is what models take
        lacks_bias = ragged and not case.bias  # whose gradient may be wanted alone
        return (_outside(case, elements), bare, case.M not in rows, lacks_bias, short, misses, *other, case.M * case.N)

    ragged = min(ran, key=lambda case: badness(case, _SMALL, _FEW_ROWS, ragged=True))
    even = min(ran, key=lambda case: badness(case, _SMALL, _ROWS))
    filling = min(ran, key=lambda case: badness(case, _FILLING[device], _MANY_ROWS[device]))
    return _blended(ragged), _blended(even), _blended(filling)


def _blended(case: Case) -> Case:
    return replace(case, rows="blend", dy="normal")


def _outside(case: Case, elements: tuple[int, int]) -> float:
    """How far a case is from having so many elements, at least and at most: 0 if it has, else a factor."""
    least, most = elements
    return max(least / (case.M * case.N), case.M * case.N / most, 1.0) - 1.0
