"""The covering design of a core: its cases cover every goal of ``goals``, and those that find the most faults for their
cost come first.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property
from typing import Any

from normcheck.cases.axes import OF_WEIGHT, ORDINARY, PAIRS, Value, covered, row_class
from normcheck.cases.case import NO_WEIGHT, Case
from normcheck.cases.claims import REFUSABLE, Claims
from normcheck.cases.depth import Depth
from normcheck.cases.goals import Goals, axes_of, goals
from normcheck.cases.layouts import EXPANDED, HEADS, OF_WEIGHTS
from normcheck.cases.missing import Missing, Worth
from normcheck.cases.opening import BATCHES, LONG_ROWS, NEUTRAL, opening
from normcheck.cases.ops import OPS
from normcheck.cases.planned import Planned, Size, covers, gap_at, gap_of, goals_of
from normcheck.cases.sizes import Extent, sizes_of

ALL_OPENED = 1000
"""A value of ``used`` above the number of cases that open any core."""

_OF_NO_WEIGHT: Mapping[str, Any] = {"weight_dtype": "same", "weights": NO_WEIGHT}

_OF_SOME_OPS = tuple(dict.fromkeys(axis for op in OPS.values() for axis in op.axes))
"""The axes that some op has of its own."""

_CHOSEN = ("rows", "layout", "weight", "bias", "weight_dtype", "dy", "eps", "weights", "clips", *_OF_SOME_OPS)
"""The other axes of a case, in the order in which the design chooses their values."""


class Design:
    """Makes one core, greedily: the size that covers most for its cost, then the values that cover most.

    ``steady``: gaps are those of ``gap_at``; else they vary.
    """

    def __init__(
        self, claims: Claims, extent: Extent, seed: int, done: Goals, used: int, *, steady: bool = False
    ) -> None:
        self._claims, self._extent, self._seed, self._used, self._steady = claims, extent, seed, used, steady
        self.sizes = sizes_of(claims, extent, seed)
        self.axes = axes_of(self.sizes)
        self._missing = Missing(set(goals(claims, extent, seed)) - done)
        self.candidates = self.sizes.candidates
        self._cheapest_first = sorted(self.candidates, key=lambda size: size.cost if size.M > 1 else size.cost + 50)
        self._worth = Worth([size for size in self.candidates if size.M], self.left)
        self.number = min(used, sum(1 for _ in opening(claims)))  # of the present case, from 1
        self.number += max(0, used - ALL_OPENED)  # another core after refusals has other cases

    @property
    def left(self) -> Set[Any]:
        """The goals that no case covers yet."""
        return self._missing.goals

    def cases(self) -> Iterator[Planned]:
        """The cases, until no goal is left that a case can cover."""
        for m, n, rows, fixed in list(opening(self._claims))[self._used :]:
            fixed = self._claimed(fixed)
            like = self.sizes.exactly if fixed.get("layout") == HEADS else self.sizes.like
            size = like(m, n, self.number)
            self.number += 1
            if size is not None and all(self._admits(axis, value) for axis, value in fixed.items()):
                yield replace(self.recorded(self.filled(size, {**fixed, "rows": rows})), opens=self.number)
        yield from map(self.recorded, self._after_opening())
        while (planned := self._next()) is not None:
            yield self.recorded(planned)

    def _claimed(self, fixed: Mapping[str, Any]) -> Mapping[str, Any]:
        """``fixed``, with the simplest layout and eps of the claims in place of those that they have not."""
        if fixed.get("eps", self.axes["eps"][0]) not in self.axes["eps"]:
            fixed = {**fixed, "eps": self.axes["eps"][0]}
        asked = fixed.get("layout", self._claims.layouts[0])
        return fixed if asked in self._claims.layouts else {**fixed, "layout": self._claims.layouts[0]}

    def _admits(self, axis: str, value: Any) -> bool:
        return axis not in REFUSABLE or self._claims.admits(axis, value)

    def recorded(self, planned: Planned) -> Planned:
        """This case, whose goals are left no more."""
        new = self.left & goals_of(planned)
        self._missing.covered(new)
        self._worth.covered(new)
        return planned

    def _next(self) -> Planned | None:
        """The next case, None if no case covers a goal that is left."""
        self.number += 1
        if not any(map(_needs_own_case, self.left)) or len(self.left) > 2 * len(ORDINARY):
            planned = self.filled(self.sizes.in_turn(self._worth.best() or self.candidates[0], self.number), {})
            if not self.left.isdisjoint(goals_of(planned)):
                return planned
        return next(filter(None, map(self._covering, self._missing.in_order())), None)

    def _covering(self, goal: Any) -> Planned | None:
        """The cheapest case that covers this goal, None if there is none."""
        wanted = dict([goal] if len(goal) == 2 else zip(PAIRS[goal[0]], goal[1:], strict=True))
        if "empty" in wanted:
            wanted = {"M": 0, **dict([wanted["empty"]])}
        fixed = {axis: value for axis, value in wanted.items() if axis in (*_CHOSEN, "probe")}
        if "special" in wanted:
            of_dy, kind = wanted["special"].startswith("dy "), wanted["special"].removeprefix("dy ")
            fixed |= {"dy": kind, "rows": "shifted"} if of_dy else {"rows": kind, "dy": "normal"}
        of_size = [(axis, value) for axis, value in wanted.items() if axis in self.candidates[0].axes]
        having = [self._having.get(own, ()) for own in of_size] or [self._cheapest_first]
        for size in min(having, key=len):
            if any(size.axes[axis] != value for axis, value in of_size):
                continue
            if not self._claims.fits(fixed.get("layout", ""), size.N):
                continue
            planned = self.filled(size, fixed)
            if covers(planned, goal):
                return planned
        return None

    @cached_property
    def _having(self) -> Mapping[Value, Sequence[Size]]:
        """A value of an axis -> the sizes that have it, the cheapest first."""
        having: dict[Value, list[Size]] = {}
        for size in self._cheapest_first:
            for own in size.axes.items():
                having.setdefault(own, []).append(size)
        return having

    def _after_opening(self) -> Iterator[Planned]:
        """A long row, if another N costs little; and as many rows as batches have that kernels compute in different
        ways, if they are to be one.
        """
        sizes = [*[(*LONG_ROWS, {"rows": "tail"})] * self._extent.fine]
        if self._claims.batch_invariant:
            sizes += [(m, n, {**self._claimed(NEUTRAL), "rows": "shifted", "probe": Depth.ROWS}) for m, n in BATCHES]
        for m, n, fixed in sizes if not (self._claims.shapes or self._claims.only_heads) else ():
            known = self.sizes.known(m, n)
            allowed = self._claims.admits("M", m) and self._claims.admits("N", n) and n <= self._extent.columns
            if known and allowed and m <= self._extent.rows:
                self.number += 1
                yield self.filled(self.sizes.size(m, n), fixed)

    def filled(self, size: Size, fixed: Mapping[str, Any]) -> Planned:
        """A case of this size whose other values cover as many goals that are left as they can."""
        values = dict(fixed)
        chosen: dict[str, tuple[Any, ...]] = {axis: (value,) for axis, value in size.axes.items()}
        for axis in _CHOSEN:
            if axis not in self.axes and axis in ("clips", *_OF_SOME_OPS):
                continue
            if axis not in values:
                values[axis] = self._choice(axis, size, chosen, values)
            if axis == "weight" and not values[axis]:
                lone = random.Random(f"lone bias {self.number}").choice(self._claims.lone_biases)
                lone = values.get("bias", lone) and self._claims.lone_bias
                values |= {**_OF_NO_WEIGHT, "bias": lone}
            said = values["weight"] if axis in OF_WEIGHT else True
            chosen[axis] = _expanded(axis, values[axis], size.M) if said else ()
        seed = random.Random(f"{self._seed} {self.number}").randrange(1, 10**6) if self._seed else self.number
        place = size.N, values["layout"]
        values.setdefault("gap", gap_at(*place) if self._steady else gap_of(*place, self.number))
        case = _case(self._claims, size, values, seed)
        if "probe" in values:
            return Planned(case, values["probe"])
        return Planned(case, self._probe(size, case))

    def _choice(self, axis: str, size: Size, chosen: Mapping[str, tuple[Any, ...]], values: Mapping[str, Any]) -> Any:
        options: Sequence[Any] = self._claims.values(axis) if axis == "weight" else self.axes[axis]
        said = not values.keys().isdisjoint(OF_WEIGHT) or values.get("layout") in OF_WEIGHTS
        if axis == "weight" and (len(options) == 1 or said):
            return options[0]  # with a weight, if there may be one: a fixed value says something of it
        if axis == "layout":
            options = tuple(layout for layout in options if self._claims.fits(layout, size.N))
        if not options:
            return NEUTRAL[axis]
        if not size.M:
            return next((o for o in options if ("empty", (axis, o)) in self.left), options[0])
        if axis == "rows":
            options = ("blend", *ORDINARY)
        elif axis == "layout" and "dy" in values:  # an expanded dy has no kind
            options = tuple(layout for layout in options if layout not in EXPANDED) or options
        if self._seed and axis != "weight":
            options = random.Random(f"{self._seed} {axis} {self.number}").sample(list(options), len(options))
        first = axis == "weight" or (axis == "rows" and len(ORDINARY) < size.M)  # with a weight, a blend
        turn = 0 if first else self.number % len(options)
        options = (*options[turn:], *options[:turn])
        return self._missing.best(axis, options, chosen, lambda option: _expanded(axis, option, size.M))

    def _probe(self, size: Size, case: Case) -> Depth:
        """How deep the probes of a case go: as deep as a goal that is left needs; a second run of few rows is cheap."""
        if not size.M:
            return Depth.MEMORY
        axes = covered(case, Depth.MEMORY)
        for probe in (Depth.ROWS, Depth.MEMORY) if "probe" in axes else ():
            if probe == Depth.ROWS and size.M < 2:
                continue
            wanted = [(number, value, probe) for number, one in _WITH_PROBE for value in axes.get(one, ())]
            if probe == Depth.ROWS and size.M > _MOST_REORDERED_ROWS:  # once for such a class of M
                wanted = [(_M_WITH_PROBE, row_class(size.M), probe)]
            elif ("probe", probe) in self.left:
                return probe
            if not self.left.isdisjoint(wanted):
                return probe
        return Depth.MEMORY if size.M <= _MOST_RERUN_ROWS else Depth.REASON


_WITH_PROBE = [(number, one) for number, (one, other) in enumerate(PAIRS) if other == "probe"]
_M_WITH_PROBE = PAIRS.index(("m", "probe"))
_MOST_REORDERED_ROWS, _MOST_RERUN_ROWS = 20, 40
"""Cases up to these M are run with their rows in another order whenever a goal needs it, and always a second time."""


def _needs_own_case(goal: Any) -> bool:
    """Whether a goal needs a case that covers little else: one without rows, or with special values."""
    axes = goal[:1] if len(goal) == 2 else PAIRS[goal[0]]
    return "special" in axes or "empty" in axes


def _expanded(axis: str, value: Any, rows: int) -> tuple[Any, ...]:
    """The values of an axis that one choice covers: a blend of rows has many kinds."""
    if axis == "rows" and value == "blend":
        return ORDINARY[:rows]
    return (value,)


def _case(claims: Claims, size: Size, values: Mapping[str, Any], seed: int) -> Case:
    own = {axis: value for axis, value in values.items() if axis not in ("weight", "clips", "probe")}
    own |= {"dy": "normal"} if own["layout"] in EXPANDED else {}
    options = claims.op.clips(values.get("clips", ()))
    return Case(op=claims.op.name, dtype=claims.dtype, M=size.M, N=size.N, options=options, seed=seed, **own)
