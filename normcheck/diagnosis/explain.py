"""Name the one known fault that explains everything a kernel returned, in the failing case and in others like no other.

A small failing case alone fits many faults. So the kernel runs on a few more cases, in which they differ. A fault is
named if it predicts every element of every output in all of them, those that are right included, and no other does.

Some faults are there in some calls only, such as those of one N, or without a bias. If none explains the usual cases,
the kernel runs on others that have the N, the parameters and the layout of the failing one. No usual case may be wrong
by anything else then: at N = 2 a tail that is left out is the last column.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from normcheck.cases.case import NO_WEIGHT, Case
from normcheck.cases.claims import Claims
from normcheck.cases.layouts import OF_ROW_GROUPS
from normcheck.cases.op import Op
from normcheck.cases.ops import GATED, GROUPED, MODULATED, MODULATED_ADD, ROTARY
from normcheck.cases.parameters import parameters_of, with_parameters
from normcheck.checks.ask import UNPROBED
from normcheck.checks.attempt import died, run_case, timed_out
from normcheck.checks.cell import Cell, Setting
from normcheck.checks.check import Result
from normcheck.diagnosis import gated, grouped, instead, l2norm, modulated, rotary, row_groups
from normcheck.diagnosis.evidence import Evidence, evidence, other_ways, ways
from normcheck.diagnosis.faults.fault import Fault, biased_ops
from normcheck.diagnosis.faults.statistics import ALWAYS, stale_eps
from normcheck.diagnosis.fit import explains, predicted
from normcheck.diagnosis.fit import tells as tells_fault
from normcheck.diagnosis.formula import TEXTBOOK, Way
from normcheck.diagnosis.known import known
from normcheck.oracle.special import is_special
from normcheck.result import Explanation

VALUES = ("mismatch", "non_finite")
"""The kinds of finding that a formula can explain: wrong values."""

_CASES: tuple[dict[str, Any], ...] = (
    {"M": 5, "N": 37, "eps": 1e-2, "rows": "shifted", "dy": "shifted", "seed": 1},
    {"M": 13, "N": 96, "eps": 1e-5, "rows": "tiny_variance", "dy": "normal", "seed": 2},
    {"M": 6, "N": 130, "eps": 1e-6, "rows": "uniform", "dy": "correlated", "weights": "probe", "seed": 3},
    {"M": 9, "N": 64, "eps": 3e-4, "rows": "scaled", "dy": "normal", "layout": "strided", "gap": 5, "seed": 4},
    {"M": 20, "N": 520, "eps": 1e-4, "rows": "blend", "dy": "shifted", "weight_dtype": "fp32", "seed": 5},
    {"M": 39, "N": 27, "eps": 1e-12, "rows": "small_offset", "dy": "ones", "weights": "small", "seed": 6},
)
"""Sizes of every kind of remainder, an eps that matters and one that does not, rows far from zero and near it, weights
of 0, rows with gaps, weights in fp32. Where an implementation takes no such case, the nearest that it takes."""

_CLIPS = ((0.0, 6.0), (-0.5, 2.0))

_FEWEST_ALIKE = 4  # cases like the failing one, itself included, if the time ends before all were run
_ALIKE_ELEMENTS = 1 << 17

_INSTEAD = {op.name: gated.instead for op in GATED} | {
    op.name: modulated.instead for op in (*MODULATED, *MODULATED_ADD)
}
_INSTEAD |= {op.name: grouped.instead for op in GROUPED} | {op.name: rotary.instead for op in ROTARY}
"""Op -> what its kernels may do instead, of those that have no formulas of faults."""

_Candidate = tuple[Fault, Way]


def explanation(
    cell: Cell,
    failed: Result,
    setting: Setting,
    *,
    seconds: float,
    settled: bool = False,
    earlier: tuple[float, ...] = (),
) -> Explanation | None:
    """The fault that explains ``failed``, or None. It takes at most about ``seconds``.

    ``failed`` must be wrong by its values; one that crashed, or wrote where it must not, says so itself. ``settled``:
    the conventions by which it was judged are the kernel's, whatever it leaves open. ``earlier``: the eps of earlier
    calls, if it fails only after them.
    """
    end = time.perf_counter() + seconds
    if cell.op.name in _INSTEAD or cell.op.l2:
        others = _results(cell, _usual_cases(cell.claims, failed.case), setting, end)
        if cell.op.l2:
            return l2norm.explained(failed, others)
        return instead.explained(_INSTEAD[cell.op.name], cell.op, failed, others)
    if failed.case.layout in OF_ROW_GROUPS:
        sizes = _usual_cases(cell.claims, failed.case)
        more = (replace(case, layout=failed.case.layout, gap=0) for case in sizes)
        of_groups = instead.explained(row_groups.instead, cell.op, failed, _results(cell, more, setting, end))
        if of_groups is not None:
            return of_groups
    own_backward = cell.implementation.backward is not None
    every = _candidates(cell.claims, failed, own_backward=own_backward, settled=settled)
    if earlier:
        every = _of_memory(every, failed.case, earlier)
    first = None if is_special(failed.case) else evidence(cell.op, failed, own_backward=own_backward)
    own = [] if first is None else [first]
    at_first, every, tried = every, _left(every, own), len({fault.name for fault, _ in every})
    wrong: list[Evidence] = []

    def found(cases: Iterable[Case]) -> Iterator[Evidence]:
        for result in _results(cell, cases, setting, end):
            one = evidence(cell.op, result, own_backward=own_backward)
            if one is not None:
                wrong.extend([one] * result.failed)
                yield one

    usual, left = _narrowed(every, found(_usual_cases(cell.claims, failed.case)))
    if _is_told(left, [*own, *usual]):
        return _explanation(cell.op, left, [*own, *usual], tried - 1)
    always = [each for each in left or every if not each[0].sometimes and each[0].block < failed.case.N]
    if not failed.case.bias:  # those of a bias say of none what others say
        always = [each for each in always if each[0].takes is not biased_ops]
    alike, left = _narrowed(always, found(_cases_alike(cell.claims, failed.case)))
    if len(own) + len(alike) < _FEWEST_ALIKE or not _is_told(left, [*own, *alike]):
        return None
    same = [each for each in at_first if each[0].name == left[0][0].name]
    if any(not _left(same, [one]) for one in wrong):
        return None  # other calls are wrong as well, and not by this fault
    told = _explanation(cell.op, left, [*own, *alike], tried - 1)
    return replace(told, only=_only(failed.case, cell.claims))


def tells(cell: Cell, result: Result, name: str) -> bool:
    """Whether no known fault but that of this ``name`` explains ``result`` alone."""
    if cell.op.l2:
        return l2norm.tells(result, name)
    if cell.op.name in _INSTEAD:
        return instead.tells(_INSTEAD[cell.op.name], cell.op, result, name)
    if result.case.layout in OF_ROW_GROUPS:
        return instead.tells(row_groups.instead, cell.op, result, name)
    own_backward = cell.implementation.backward is not None
    found = None if is_special(result.case) else evidence(cell.op, result, own_backward=own_backward)
    if found is None:
        return False
    every = [each for each in _candidates(cell.claims, result, own_backward=own_backward) if not each[0].sometimes]
    return all(fault.name == name or not explains(fault.formula, found, way) for fault, way in every)


def _candidates(claims: Claims, failed: Result, *, own_backward: bool, settled: bool = False) -> list[_Candidate]:
    """Each known fault in each way that a kernel may have; and none, if it has another way than it declares."""
    op, both = claims.op, len(claims.values("bias")) > 1
    faults = [f for f in known(op, claims.dtype, weight=failed.case.weight) if both or not f.sometimes]
    if not own_backward:  # autograd makes of a fault of forward that of both
        names = {f.name for f in faults}
        faults = [f for f in faults if f"{f.name}_both" not in names]
    own = ways(op, replace(failed, open=()) if settled else failed, own_backward=own_backward)
    every = [(fault, way) for way in own for fault in faults]
    for words, those in other_ways(op, failed, own_backward=own_backward).items():
        name = words.split(" in ")[0].replace("fits ", "fits_").replace("=", "_")
        every += [(Fault(name=name, words=words, formula=TEXTBOOK, takes=lambda op: True), way) for way in those]
    return every


def _of_memory(candidates: list[_Candidate], case: Case, earlier: tuple[float, ...]) -> list[_Candidate]:
    """``candidates`` and an eps that was kept of earlier calls, in place of one that is always the same."""
    ways_left = dict.fromkeys(way for _, way in candidates)
    kept = [stale_eps(eps) for eps in dict.fromkeys(earlier) if eps != case.eps]
    return [each for each in candidates if each[0].name not in ALWAYS] + [
        (fault, way) for way in ways_left for fault in kept
    ]


def _left(candidates: list[_Candidate], found: Iterable[Evidence]) -> list[_Candidate]:
    for one in found:
        candidates = [each for each in candidates if explains(each[0].formula, one, each[1])]
    return candidates


def _narrowed(candidates: list[_Candidate], found: Iterator[Evidence]) -> tuple[list[Evidence], list[_Candidate]]:
    """What was found until no candidate is left, and the candidates that explain all of it."""
    seen: list[Evidence] = []
    for one in found if candidates else ():
        seen.append(one)
        candidates = _left(candidates, [one])
        if not candidates:
            break
    return seen, candidates


def _is_told(left: list[_Candidate], found: list[Evidence]) -> bool:
    """Whether one fault is left, and says where something lies that is wrong."""
    if len({fault.name for fault, _ in left}) != 1 or len(found) < 2:
        return False
    (fault, way), *_ = left
    return fault.formula is TEXTBOOK or any(tells_fault(fault.formula, one, way) for one in found)


def _explanation(op: Op, left: list[_Candidate], found: list[Evidence], others: int) -> Explanation:
    (fault, way), *_ = left
    other = fault.instead(op)
    instead = f": this is what {other} computes: did you mean --op {other}?" if other else ""
    return Explanation(
        name=fault.name,
        words=f"{fault.words}{instead}",
        cases=len(found),
        elements=sum(predicted(fault.formula, one, way) for one in found),
        others=others,
    )


def _only(case: Case, claims: Claims) -> str:
    """What the cases like ``case`` have in common, in words."""
    said = [f"N={case.N}"]
    if not case.weight and len(claims.weights) > 1:
        said.append("no weight")
    if len(claims.biases if case.weight else claims.lone_biases) > 1:
        said.append("a bias" if case.bias else "no bias")
    if case.weight_dtype != "same" and len(claims.weight_dtypes) > 1:
        said.append(f"weight_dtype={case.weight_dtype}")
    if case.layout != claims.layouts[0]:
        said.append(f"layout={case.layout}")
    return ", ".join(said)


def _results(cell: Cell, cases: Iterable[Case], setting: Setting, end: float) -> Iterator[Result]:
    """The kernel's results until the time is up, or its process ends."""
    for case in cases:
        if time.perf_counter() > end:
            return
        result = run_case(cell, case, setting, UNPROBED)
        if died(result) or timed_out(result):
            return
        yield result


def _usual_cases(claims: Claims, failed: Case) -> Iterator[Case]:
    for number, values in enumerate(_CASES):
        case = _case(claims, values, number)
        yield case if failed.weight else with_parameters(case, parameters_of(failed))


def _cases_alike(claims: Claims, failed: Case) -> Iterator[Case]:
    """Cases of other data, eps and M, but as many rows at least, with all else as in the failing one."""
    for number, values in enumerate(_CASES):
        rows = max(1, min(failed.M * (1 + number % 3) + number, _ALIKE_ELEMENTS // failed.room * max(failed.M, 1)))
        if claims.shapes:
            rows = failed.M
        data = {name: values[name] for name in ("rows", "dy", "seed", "eps")}
        weights = values.get("weights", "normal") if failed.weight else NO_WEIGHT
        if claims.op.quantises:  # by a power of two other steps give the same codes
            data["scale"] = claims.scales[number % len(claims.scales)]
        yield claims.nearest(replace(failed, M=max(rows, failed.M), weights=weights, **data))


def _case(claims: Claims, values: dict[str, Any], number: int) -> Case:
    """The case with these values, or with the nearest that the implementation takes."""
    op, own = claims.op, dict(values)
    if claims.shapes:
        own["M"], own["N"] = claims.shapes[number % len(claims.shapes)]
    if own.get("layout") not in claims.values("layout"):
        own.pop("layout", None)
        own.pop("gap", None)
    weight_dtypes = claims.values("weight_dtype")
    if own.get("weight_dtype", "same") not in weight_dtypes:
        own["weight_dtype"] = weight_dtypes[0]
    bias = claims.values("bias")
    if True not in claims.values("weight"):
        own["weights"] = NO_WEIGHT
        bias = claims.lone_biases
    own["bias"] = bias[number % len(bias)]
    own |= {axis: values[number % len(values)] for axis, values in claims.own.items()}
    clips = _CLIPS[number % len(_CLIPS)] if op.clamped else ()
    return claims.nearest(Case(op=op.name, dtype=claims.dtype, options=op.clips(clips), **own))
