"""What an implementation refuses: the value is found by asking for it alone, and left out from then on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

from normcheck.cases.axes import Pair, Value, covered, pairs_of, parts_of
from normcheck.cases.case import Case
from normcheck.cases.claims import Claims, refusable
from normcheck.cases.depth import Depth
from normcheck.cases.goals import Goals
from normcheck.cases.layouts import EXPANDED, STRIDED, head_size_near
from normcheck.cases.ops import OPS
from normcheck.cases.parameters import PARAMETERS, parameters_of, with_parameters
from normcheck.cases.planned import GAPS, Planned, Size, goals_of
from normcheck.cases.sizes import Sizes

_FRUITLESS = 20  # refusals that gave no new pair
_OFTEN = 8
_DATA = ("rows", "dy", "special", "weights", "residual", "gate", "angles")
_STRUCTURAL = ("N", "m", "n", "width", "fit", "whole", "band", "octave", "several", "layout", *PARAMETERS, "shape")


@dataclass(frozen=True)
class Question:
    """A value that may be why a case was refused. ``case`` asks for it alone: a case that ran, but with this value."""

    axis: str
    value: Any
    case: Case


class Refusals:
    """The ``claims`` of an implementation, without what it refused, and the goals that are ``given_up`` for it.

    ``wanted``: claims -> the goals of a core. ``version`` differs once something more is left out.
    """

    def __init__(self, claims: Claims, wanted: Callable[[Claims], Goals]) -> None:
        self.claims, self._declared, self._wanted = claims, claims, wanted
        self.given_up: set[Value | Pair] = set()
        self.combinations = 0
        """Cases that were refused for a combination of values."""
        self._only_refused: Counter[Value | Pair] = Counter()  # values that no case had but so many refused ones
        self._fruitless = 0
        self._admitted: set[tuple[str, Any]] = set()
        self._base: Case | None = None
        self._questions: deque[Question] = deque()
        self._suspect: Planned | None = None

    @property
    def version(self) -> tuple[Claims, int]:
        """Differs once something more is left out."""
        return self.claims, self.combinations

    @property
    def excused(self) -> set[Value | Pair]:
        """What was given up, but for kinds of data: no library has a limit there, and a cheat refuses what is hard."""
        return {goal for goal in self.given_up if len(goal) != 2 or goal[0] not in _DATA}

    def share(self, sizes: Sizes) -> float:
        """The share, 0 to 1, of the declared ``sizes`` and layouts that was refused.

        A refused bias or fp32 weight does not count: an op without them is whole.
        """
        if self.claims == self._declared and not self.given_up:
            return 0.0
        promised = [(size, layout) for size in sizes.candidates if size.M for layout in self._declared.layouts]
        return sum(not self._takes(*one) for one in promised) / len(promised) if promised else 0.0

    def _takes(self, size: Size, layout: str) -> bool:
        own = {**size.axes, "layout": layout}
        if not all(self.claims.admits(axis, own[axis]) for axis in ("M", "N", "layout")):
            return False
        is_declared = not self.claims.shapes or own["shape"] in self.claims.shapes
        return is_declared and self.given_up.isdisjoint(pairs_of({axis: (value,) for axis, value in own.items()}))

    @property
    def question(self) -> Question | None:
        """What to ask next, if anything."""
        return self._questions[0] if self._questions else None

    def asked(self) -> Question | None:
        """Take the question that ``question`` returned: its case has run, or was refused."""
        return self._questions.popleft() if self._questions else None

    def ran(self, case: Case) -> None:
        """Note a case that was not refused."""
        self._admitted |= set(refusable(case).items())
        if case.M > 1 and (self._base is None or case.M * case.N < self._base.M * self._base.N):
            self._base = case

    def answered(self, done: Set[Value | Pair]) -> None:
        """The question that was ``asked`` was not refused. After the last of them the case was: for a combination."""
        if not self._questions and self._suspect is not None:
            self._give_up(done)

    def refused(self, planned: Planned, question: Question | None, done: Set[Value | Pair]) -> None:
        """Look for the value that is refused, by asking for one at a time. ``done``: goals that cases have covered."""
        if question is not None:
            self._drop(question.axis, question.value)
            return
        values = {axis: v for axis, v in refusable(planned.case).items() if (axis, v) not in self._admitted}
        self._suspect = planned
        if self._base is None or len(values) == 1:
            if len(values) == 1:
                self._drop(*next(iter(values.items())))
            return  # nothing has run yet: another case tells more
        if not values:
            self._give_up(done)
        for axis, value in values.items():
            self._questions.append(Question(axis, value, _alone_in(self.claims, self._base, axis, value)))
        if self.claims.shapes and set(values) & {"M", "N"}:
            self._questions = deque(q for q in self._questions if q.axis not in ("M", "N"))
            if not self._questions:
                self._give_up(done)

    def _drop(self, axis: str, value: Any) -> None:
        self._questions.clear()
        self._suspect = None
        self.claims = self.claims.without(axis, value)

    def _give_up(self, done: Set[Value | Pair]) -> None:
        """Leave out the pairs of sizes and declarations in a refused case.

        If all of them are left out already, other cases may reach the case's other goals; after _FRUITLESS such
        refusals, these are left out as well. So is a value, with whatever else, that only refused cases had, _OFTEN.
        """
        assert self._suspect is not None
        suspect, self._suspect = self._suspect, None
        case = suspect.case
        if self.claims.shapes:
            self.claims = self.claims.without_shape((case.M, case.N))
        self.combinations += 1
        whole = {axis: values for axis, values in covered(case, Depth.MEMORY).items() if axis in _STRUCTURAL}
        together: set[Value | Pair] = {pair for pair in pairs_of(whole) if pair not in done | self.given_up}
        self._fruitless += not together
        if not together and self._fruitless > _FRUITLESS:
            together = set(goals_of(suspect)) - done
        self.given_up |= together
        alone = [goal for goal in goals_of(suspect) if len(goal) == 2 and goal not in done]
        self._only_refused.update(alone)
        for goal in alone:
            if self._only_refused[goal] == _OFTEN:
                self.given_up |= {one for one in self._wanted(self.claims) if goal in parts_of(one)}


def with_value(base: Case, axis: str, value: Any) -> Case:
    """The case ``base`` with another value of a refusable axis, and what belongs to it."""
    if axis in PARAMETERS and axis != "residual_dtype":
        own = parameters_of(base)
        own = own if base.weight else own._replace(weight=True, bias=OPS[base.op].biases[0])
        own = own._replace(**{axis: value})
        return with_parameters(base, own if own.weight else own._replace(bias=False))
    changed: dict[str, Any] = {axis: value}
    if axis == "layout":
        changed["gap"] = GAPS[0] if value in STRIDED else 0
        changed["dy"] = "normal" if value in EXPANDED else base.dy
    return replace(base, **changed)


def _alone_in(claims: Claims, base: Case, axis: str, value: Any) -> Case:
    """As ``with_value``, with an N that heads have, if they are asked for, or no heads, if this N is."""
    asked = with_value(base, axis, value)
    if claims.fits(asked.layout, asked.N):
        return asked
    if axis == "layout":
        return replace(asked, N=head_size_near(asked.N))
    return replace(asked, layout=claims.layouts[0], gap=0)
