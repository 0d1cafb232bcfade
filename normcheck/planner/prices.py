"""What a case is expected to take: its own runs, and what the kernel builds for it that no case before it needed.

A kernel compiles, tunes or plans for some of the values of a case, and which ones differs from kernel to kernel. No
axis is dear or free by decree: each has a price, which is measured.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Set
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from normcheck.cases.case import Case, with_rows
from normcheck.cases.depth import Depth
from normcheck.cases.planned import Planned
from normcheck.planner.own import Own

AXES = ("weight", "bias", "weight_dtype", "residual_dtype", "layout", "numbers", "N", "M", "multiple of 16")
"""What a kernel may be built for. "numbers" are eps and limits. Kinds of data are none of it: they lie in tensors."""

_APART = (("M", 0), ("M", 1), ("N", 1))
"""Sizes of which no other tells: compilers treat them apart."""

SLACK = 3.0
"""A case may take so many times what was expected; the rest is what it builds, or else a stall."""

_SLOW_CALLS = 8
"""Building that takes fewer calls than this is none worth planning for."""

_LATEST = 5
"""So many samples tell the price of an axis by their lower median: two stalls among them change nothing."""

_TRIAL = 0.25
"""What was never tried is taken for this share of the dearest price."""

Trust = Literal["likely", "sure"]
"""How much is believed: a median, or one of at least two samples."""

_Values = tuple[Hashable, ...]


@dataclass(frozen=True)
class _Sample:
    """A case, what it took, and the axes that were new in it."""

    planned: Planned
    seconds: float
    new: tuple[str, ...]


class Prices:
    """The prices of one kernel on ``device`` ("cpu" or "cuda"), in seconds.

    What a case builds is what its nearest neighbour among the cases that ran has not: the sum of the prices of the axes
    in which the two differ, at most the dearest price. The price of an axis is the lower median of its latest samples:
    what a case took beyond its own runs when this axis alone was new, and 0 for each of its new axes if that was
    nothing. As long as an axis was never new alone, its price is an equal share of what it was new in.
    ``slow``: whether the latest case built something; ``is_new``: whether it may have; ``spent``, ``building``: seconds
    of all cases, of which so many are no runs of their own.
    """

    def __init__(self, device: str) -> None:
        self.own = Own(device)
        self.slow = self.is_new = False
        self.spent = self.building = 0.0
        self._first: _Sample | None = None
        self._alone: dict[Hashable, deque[_Sample]] = defaultdict(lambda: deque(maxlen=_LATEST))
        self._shared: dict[str, deque[_Sample]] = defaultdict(lambda: deque(maxlen=_LATEST))
        self._ran: dict[_Values, None] = {}  # each combination of values of AXES once
        self._numbers: dict[tuple[str, Hashable], int] = {}  # of a value of an axis
        self._rows = np.empty((0, len(AXES)), np.int32)  # what has run, by these numbers
        self._known: dict[Hashable, float] = {}  # prices since the latest case

    @property
    def little(self) -> float:
        """Seconds of building that are none."""
        return _SLOW_CALLS * self.own.call if self.own.is_known else 0.0

    @property
    def dearest(self) -> float:
        """Seconds of the dearest price of an axis."""
        if "dearest" not in self._known:
            self._known["dearest"] = max(
                map(self._median, (*self._alone.values(), *self._shared.values())), default=0.0
            )
        return self._known["dearest"]

    @property
    def dearest_case(self) -> float:
        """Seconds that no case is expected to build for longer: a probe of rows also runs a row alone."""
        return 2 * self.dearest

    def of(self, axis: str, value: Hashable = None, trust: Trust = "likely") -> float:
        """Seconds of a new value of an axis; None: of any."""
        key: Hashable = (axis, value) if (axis, value) in _APART else axis
        if (key, trust) not in self._known:
            self._known[key, trust] = self._priced(key, trust)
        return self._known[key, trust]

    def _priced(self, key: Hashable, trust: Trust) -> float:
        if key in self._alone:
            sure = len(self._alone[key]) > 1 or trust == "likely"
            return self._median(self._alone[key]) if sure else 0.0
        shares = sorted(map(self._share, self._shared.get(key, ()))) if isinstance(key, str) else []
        if len(shares) > (trust == "sure"):
            return shares[(len(shares) - 1) // 2]
        return 0.0 if trust == "sure" else _TRIAL * self.dearest

    def _median(self, samples: Iterable[_Sample]) -> float:
        """The lower median of what these took beyond their own runs."""
        ordered = sorted(map(self._beyond, samples))
        return ordered[(len(ordered) - 1) // 2]

    def _share(self, sample: _Sample) -> float:
        guilty = [axis for axis in sample.new if axis not in self._alone or self._median(self._alone[axis]) > 0]
        return self._beyond(sample) / max(1, len(guilty))

    def _beyond(self, sample: _Sample) -> float:
        """What a case took beyond its own runs, by what is known of these now."""
        beyond = sample.seconds - SLACK * self.own.seconds(sample.planned)
        return beyond if beyond > self.little else 0.0

    def is_untried(self, planned: Planned) -> bool:
        """Whether a case is the first with another eps, or other limits: torch.compile took 33 s for that."""
        tried = "numbers" in self._alone or "numbers" in self._shared
        return not tried and "numbers" in self._new(_values(planned.case))

    def building_of(self, planned: Planned, trust: Trust = "likely") -> float:
        """Seconds that a case is expected to build for. A probe of rows also runs a row alone."""
        return sum(self._building(_values(case), trust) for case in _run_by(planned)) if self.dearest else 0.0

    def _building(self, own: _Values, trust: Trust) -> float:
        prices = np.array([self.of(axis, value, trust) for axis, value in zip(AXES, own, strict=True)])
        return float((self._differing(own) @ prices).min(initial=self.dearest))

    def ahead(self, cases: Iterable[Planned], most: float, trust: Trust) -> float:
        """Seconds that these cases are expected to build for, one after the other; counted up to ``most``."""
        total, ran, rows = 0.0, dict(self._ran), self._rows
        for planned in cases:
            price = self.building_of(planned, trust)
            if price:
                total += price
                self._run(planned)
                if total > most:
                    break
        self._ran, self._rows = ran, rows
        return total

    def saw(self, planned: Planned, seconds: float) -> None:
        """Take what a case took."""
        own = SLACK * self.own.seconds(planned, most=True) if self.own.call < math.inf else 0.0
        self.spent += seconds
        self.building += max(0.0, seconds - own)
        values = _values(planned.case)
        new = self._new(values)
        self.own.saw(planned, seconds, new=bool(new))
        sample = _Sample(planned, seconds, new)
        beyond = self._beyond(sample)
        self.slow, self.is_new = bool(beyond and new), bool(new)
        if self._first is None:  # it starts things as well: it tells nothing of a key
            self._first = sample
        else:
            self._note(sample, dict(zip(AXES, values, strict=True)), beyond)
        self._run(planned)
        self._known.clear()

    def _note(self, sample: _Sample, given: dict[str, Hashable], beyond: float) -> None:
        for axis in sample.new:
            if len(sample.new) > 1 and beyond:
                self._shared[axis].append(sample)
            else:
                own = axis, given[axis]
                self._alone[own if own in _APART else axis].append(sample)

    def _new(self, own: _Values) -> tuple[str, ...]:
        """The axes in which a case differs from its nearest neighbour: at the lowest price, then the fewest."""
        if not self._ran:
            return AXES
        differing = self._differing(own)
        price = differing @ np.array([self.of(axis, value) for axis, value in zip(AXES, own, strict=True)])
        cheapest = np.flatnonzero(price == price.min())
        nearest = differing[cheapest[differing[cheapest].sum(1).argmin()]]
        return tuple(axis for axis, differs in zip(AXES, nearest, strict=True) if differs)

    def _differing(self, own: _Values) -> NDArray[np.bool_]:
        """For each combination that has run, in which axes it differs from this one."""
        wanted = [self._numbers.get(value, -1) for value in zip(AXES, own, strict=True)]
        differing: NDArray[np.bool_] = self._rows != np.array(wanted, np.int32)
        return differing

    def _run(self, planned: Planned) -> None:
        for values in map(_values, _run_by(planned)):
            if values not in self._ran:
                self._ran[values] = None
                row = [self._numbers.setdefault(value, len(self._numbers)) for value in zip(AXES, values, strict=True)]
                self._rows = np.concatenate([self._rows, np.array([row], np.int32)])

    @property
    def dear(self) -> dict[str, int]:
        """The axes that were new alone and build something -> how many samples tell their price."""
        alone = {axis: len(self._alone[axis]) for axis in AXES if axis in self._alone}
        return {axis: samples for axis, samples in alone.items() if self.of(axis) > self.little}

    def told(self, axes: Set[str] = frozenset()) -> str:
        """The prices in words: "a new N takes 2 s, a new eps takes 33 s"; of these ``axes`` alone if they are dear."""
        asked = self.dear.keys() & axes or self.dear.keys()
        words = [f"{a_new(axis)} takes {self.of(axis):.2g} s" for axis in self.dear if axis in asked]
        return ", ".join(words) or f"whatever is new takes {self.dearest:.2g} s"


_WORDS = {"numbers": "eps", "weight_dtype": "dtype of the weight", "residual_dtype": "dtype of the residual"}


def a_new(axis: str) -> str:
    """A new value of an axis in words, such as "a new eps"."""
    return f"a new {_WORDS.get(axis, axis)}"


def _run_by(planned: Planned) -> tuple[Case, ...]:
    """The cases that a kernel is called with: a probe of rows also runs a row alone."""
    return (planned.case, with_rows(planned.case, 1)) if planned.probe == Depth.ROWS else (planned.case,)


@lru_cache(maxsize=4096)
def _values(case: Case) -> _Values:
    """The value of each of AXES that a case has."""
    parameters = case.weight, case.bias, case.weight_dtype, case.residual_dtype
    sizes = case.N, case.M, (case.N + case.gap) % 16 == 0
    return *parameters, case.layout, (case.eps, case.options), *sizes
