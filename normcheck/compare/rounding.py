"""Which rounding differs between two sides that have not the same bits: the forms of an op that each of them fits.

A form is the op as a kernel may round it: the conventions that it leaves open, whether xhat is rounded before the
weight, and in which dtype 1 + weight is. The oracle has a reference and a bound for each, so a side that is outside the
bound of a form has not that form. What a form is judged by is the main output; gradients follow from other roundings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, model_of
from normcheck.compare.results import Rounding
from normcheck.gate.plan import Plan
from normcheck.oracle.conventions import Convention, candidates, plainest, with_convention, words_of
from normcheck.oracle.distance import moved
from normcheck.oracle.expectations import expectations, whole
from normcheck.oracle.judge import END_TO_END, Judge, judge_of
from normcheck.oracle.judging import judge_forward
from normcheck.oracle.special import is_special
from normcheck.oracle.tolerances import Model

_CAST, _ONE = "order of the casts", "1 + weight"
_WORDS: Mapping[str, Mapping[str, str]] = {
    _CAST: {
        "none": "multiplies xhat by the weight before it rounds",
        "xhat": "rounds xhat before it multiplies it by the weight, as Llama does",
    },
    _ONE: {"fp32": "computes 1 + weight in fp32", "io": "rounds 1 + weight to the dtype of the weight"},
}
_ENOUGH = 16
"""Elements of one side outside the form of the other, none of which is outside of its own, that show another form if
the bound of the one form contains that of the other. Two kernels of one form that add in another order differ in a few
elements next to a tie of one of their roundings; where there is no tie, both would be outside."""

Form = tuple[tuple[str, str | int], ...]
"""Axis -> value: keys of a model, and those of ``_WORDS``."""


@dataclass
class _Counts:
    """The elements of each side that are outside a form, added up; ``shows``: forms -> the cases, smallest first."""

    outside: dict[tuple[str, Form], int] = field(default_factory=dict)
    cases: dict[tuple[str, Form], list[Case]] = field(default_factory=dict)

    def add(self, side: str, form: Form, case: Case, wrong: int) -> None:
        self.outside[side, form] = self.outside.get((side, form), 0) + wrong
        if wrong:
            self.cases.setdefault((side, form), []).append(case)

    def fitted(self, side: str, forms: Sequence[Form]) -> list[Form]:
        return [form for form in forms if self.outside.get((side, form)) == 0]


@dataclass(frozen=True)
class _Sides:
    """Both cells, and the conventions that each fits, to run a case again. ``plan``: that of the comparison."""

    cells: tuple[Cell, Cell]
    left: Sequence[Sequence[Convention] | None]
    plan: Plan

    @property
    def op(self) -> Op:
        """What both compute."""
        return self.cells[0].op

    def results(self, case: Case) -> list[tuple[Result, Model, Inputs]]:
        """Of A and of B: what it returns, the model that it declares, the inputs."""
        found = []
        for cell, may_be in zip(self.cells, self.left, strict=True):
            own = tuple(may_be) if may_be else None
            result = run_case(cell, case, self.plan, Ask(Depth.OFF, conventions=own))
            model = model_of(cell.implementation, case, self.plan.device)
            found.append((result, model, make(case, self.op, result.home)))
        return found


def explained(
    cells: tuple[Cell, Cell],
    left: Sequence[Sequence[Convention] | None],
    plan: Plan,
    cases: Mapping[Case, bool],
) -> Rounding:
    """What differs between A and B, whose ``cells`` these are, in ``cases`` -> whether the main output does.

    ``left``: the conventions that each side fits in all cases, None if its op leaves none open, or it declares one.
    """
    sides, counts = _Sides(cells, left, plan), _Counts()
    smallest = sorted(cases, key=_size)
    forms = list(_forms(sides, smallest[0]))
    for case in smallest if len(forms) > 1 else ():
        for side, (result, model, inputs) in zip("AB", sides.results(case), strict=True):
            for form in forms if result.seen.outputs else ():
                wrong = _outside(_Formed.of(sides.op, case, inputs, model, form), result.seen.outputs)
                if wrong is not None:
                    counts.add(side, form, case, wrong)
    pairs = [(a, b) for a in counts.fitted("A", forms) for b in counts.fitted("B", forms)]
    axes = _axes(*pairs[0]) if pairs and _shown(counts, *pairs[0]) else ()
    if len(axes) != 1:
        return Rounding(differing=len(cases), several=axes)
    (a, b), (axis,) = pairs[0], axes
    acting = [case for case in smallest if _acts(sides.op, axis, a, b, case)]
    backward = [case for case in acting if not (cases[case] or _moves_gradients(sides, a, b, case))]
    others = [case for case in smallest if case not in acting]
    words: Mapping[Any, str] = _WORDS[axis] if axis in _WORDS else words_of(sides.op)[axis]
    return Rounding(
        axis=axis,
        a=words[dict(a)[axis]],
        b=words[dict(b)[axis]],
        case=str(min([*counts.cases.get(("A", b), ()), *counts.cases.get(("B", a), ())], key=_size)),
        differing=len(cases),
        explained=len(acting) - len(backward),
        backward=len(backward),
        other=str(others[0]) if others else "",
    )


def _size(case: Case) -> tuple[int, int]:
    return case.M * case.N, case.N


def _forms(sides: _Sides, case: Case) -> Iterator[Form]:
    """The forms to try, of each key the tightest or most common value first. ``case``: one of the op."""
    op = sides.op
    fit = {each for number in range(2) for each in _declared_or_found(sides, number, case)}
    forms = [each for each in candidates(op, _OPEN) if each in fit] or [()]
    if _twin(op, rounds_xhat=not op.rounds_xhat):
        values = ("xhat", "none") if op.rounds_xhat else ("none", "xhat")
        forms = [(*each, (_CAST, value)) for each in forms for value in values]
    if _twin_of_one(op):
        forms = [(*each, (_ONE, value)) for each in forms for value in ("fp32", "io")]
    yield from forms


def _declared_or_found(sides: _Sides, number: int, case: Case) -> list[Convention]:
    """The first conventions that a side may have: of each key what it declares, or what its cases fit."""
    model = model_of(sides.cells[number].implementation, case, sides.plan.device)
    found = []
    for each in (sides.left[number] or ((),))[:2]:
        own = vars(with_convention(model, each))
        found += [c for c in candidates(sides.op, _OPEN) if all(own[key] == value for key, value in c)]
    return found


_OPEN = Model()


def _twin(op: Op, **changed: bool) -> Op | None:
    """The op of the table that differs from this one in these facts alone."""
    facts = (
        "centered",
        "zero_centered",
        "clamped",
        "rounds_xhat",
        "adds_residual",
        "quantises",
        "gated",
        "l2",
        "modulated",
        "grouped",
        "rotary",
    )
    wanted = {name: changed.get(name, getattr(op, name)) for name in facts}
    return next((row for row in OPS.values() if all(getattr(row, name) == wanted[name] for name in facts)), None)


def _twin_of_one(op: Op) -> Op | None:
    return _twin(op, zero_centered=False) if op.zero_centered else None


@dataclass(frozen=True)
class _Formed:
    """The judge of a case for a kernel of one form, which another row of the table of ops may be."""

    op: Op
    judge: Judge

    @classmethod
    def of(cls, op: Op, case: Case, inputs: Inputs, model: Model, form: Form) -> _Formed | None:
        """None if the case has no such form."""
        axes, row = dict(form), op
        if _CAST in axes and (axes[_CAST] == "xhat") != op.rounds_xhat:
            twin = _twin(op, rounds_xhat=not op.rounds_xhat)
            if twin is None or case.bias:
                return None
            row = twin
        if axes.get(_ONE) == "io":
            twin = _twin_of_one(op)
            if twin is None or inputs.weight is None:
                return None
            row, inputs = twin, replace(inputs, weight=(1 + inputs.weight.float()).to(inputs.weight.dtype))
        convention = plainest(tuple(pair for pair in form if pair[0] not in _WORDS), case)
        judged = replace(case, op=row.name)
        return cls(row, judge_of(row, judged, inputs, with_convention(model, convention), {}))

    def expected(self) -> dict[str, Tensor]:
        """Output -> what it must be, end to end, flat."""
        parts = whole(expectations(self.judge, own_bits=True))
        return {output: both[0].flatten() for (output, check), both in parts.items() if check == END_TO_END}


def _outside(formed: _Formed | None, outputs: Mapping[str, Tensor]) -> int | None:
    """How many elements of the main output are outside the bound of a form; None if the case has no such form."""
    if formed is None:
        return None
    checked, _ = judge_forward(formed.judge, {name: t for name, t in outputs.items() if name in formed.op.outputs})
    mine = [c.comparison for c in checked if c.output == formed.op.main_output]
    return max((0 if c.wrong is None else int(c.wrong.sum()) for c in mine), default=None)


def _moves_gradients(sides: _Sides, a: Form, b: Form, case: Case) -> bool:
    """Whether the expected gradients of the forms differ wherever those of the sides do."""
    if sides.op.quantises or is_special(case):
        return False
    (one, model, inputs), (other, other_model, _) = sides.results(case)
    formed = [_Formed.of(sides.op, case, inputs, m, form) for m, form in ((model, a), (other_model, b))]
    if any(each is None for each in formed):
        return False
    of_a, of_b = (each.expected() for each in formed if each is not None)
    for name in one.seen.gradients.keys() & other.seen.gradients.keys() & of_a.keys() & of_b.keys():
        changed, _ = moved(one.seen.gradients[name].flatten(), other.seen.gradients[name].flatten())
        if bool((changed & (of_a[name] == of_b[name])).any()):
            return False
    return True


def _axes(a: Form, b: Form) -> tuple[str, ...]:
    """The axes that two forms share, and in which they differ."""
    one, other = dict(a), dict(b)
    return tuple(axis for axis in one if axis in other and one[axis] != other[axis])


def _shown(counts: _Counts, a: Form, b: Form) -> bool:
    """Whether A, of form ``a``, has not form ``b`` and B not ``a``: both are proved, or one by many elements."""
    of_a, of_b = counts.outside.get(("A", b), 0), counts.outside.get(("B", a), 0)
    return (of_a > 0 and of_b > 0) or max(of_a, of_b) >= _ENOUGH


def _acts(op: Op, axis: str, a: Form, b: Form, case: Case) -> bool:
    """Whether the two forms are not one in this case."""
    if axis == _CAST:
        return case.dtype != "fp32" and case.weight and not case.bias
    if axis == _ONE:
        return case.weight_format != "fp32" and case.weight
    one, other = (tuple(pair for pair in form if pair[0] not in _WORDS) for form in (a, b))
    return plainest(one, case) != plainest(other, case)
