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

from normcheck.cases.case import Case, with_rows
from normcheck.cases.core import Planned

RUNS = {"reason": 1.0, "memory": 2.0, "rows": 5.5}
"""Depth of a case's probes -> its cost in runs of the kernel, counted in the probes' calls."""

AXES = (
    "weight", "bias", "weight_dtype", "residual_dtype", "layout", "numbers", "N", "M", "multiple of 16", "process",
)  # fmt: skip
"""What a kernel may be built for. "numbers" are eps and limits, "process" is whether only another process has run such
a case. Kinds of data are none of it: they lie in tensors."""

_APART = {"M": (0, 1), "N": (1,)}
"""Sizes of which no other tells: compilers treat them apart."""

_SLACK = 3.0
"""A case may take so many times what its own runs take before the rest counts as building."""

_SLOW_CALLS = 8
"""Building that takes fewer calls than this is none worth planning for."""

FAST = 0.03
"""Seconds of a call with which some 250 cases fit into any time: then nobody need ask what is building."""

_LATEST = 5
"""So many samples tell the price of an axis by their lower median: two stalls among them change nothing."""

_TRIAL = 0.25
"""What was never tried is taken for this share of the dearest price."""

_JUDGING_SECONDS = {"cpu": 1e-6, "cuda": 2e-8}  # for an element, at most
_AT_HOME_SECONDS = 1e-7  # the same for a small case of a GPU's kernel, which a CPU judges
_TELLING = {"row": 16, "column": 4096, "element": 16384}
"""From so many on they cost more than a call. A GPU takes many rows at once: there elements cost, not rows."""

Trust = Literal["likely", "sure", "worst"]
"""How much is believed: a median, one of at least two samples, or the slowest sample."""

_Values = tuple[Hashable, ...]


@dataclass(frozen=True)
class _Sample:
    """A case, what it took, and the axes that were new in it."""

    planned: Planned
    seconds: float
    new: tuple[str, ...]


class Own:
    """What the runs of a case take by themselves, on ``device`` ("cpu" or "cuda").

    A call, and beside it each row and column, on a GPU each element; all are the least that was seen, so that a stall
    changes none of them. As long as no case was repeated nor fast, nothing is known of a call.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.call = math.inf
        self.repeated = False
        self._few = math.inf  # a run of few rows or elements
        self._seen: dict[bool, dict[str, dict[tuple[int, int], float]]] = {
            new: {"row": {}, "column": {}, "element": {}} for new in (False, True)
        }  # whether something was new -> unit -> M and N -> the fastest run
        self._rates: dict[bool, dict[str, float]] = {False: {}, True: {}}

    @property
    def is_known(self) -> bool:
        """Whether it is known what a call takes, without building anything."""
        return self.repeated or self.call < FAST

    def rate(self, unit: str) -> float:
        """Seconds of a "row", a "column" or an "element", at most; 0 if it is not known."""
        return self._rates[True].get(unit, 0.0)

    def seconds(self, planned: Planned, *, most: bool = False) -> float:
        """Seconds of a case. ``most``: rows and columns may have built something whenever they were seen."""
        case = planned.case
        rates, sizes = self._rates[most], _sizes(case.M, case.N)
        run = sum((rate * sizes[unit] for unit, rate in rates.items()), start=self.call if self.is_known else 0.0)
        return RUNS[planned.probe] * run + self._judging(case)

    def saw(self, planned: Planned, seconds: float, *, new: bool) -> None:
        """Take the seconds of a case; ``new``: whether it may have built something."""
        case, runs = planned.case, RUNS[planned.probe]
        self.repeated |= not new
        self.call = min(self.call, seconds / runs)
        run, sizes = seconds / runs, _sizes(case.M, case.N)
        units = ("element",) if self._device == "cuda" else ("row", "column")
        if all(sizes[unit] < _TELLING[unit] for unit in units) and case.M:
            self._few = min(self._few, run)
        for unit in (unit for unit in units if sizes[unit] >= _TELLING[unit]):
            for kept in {True, new}:
                fastest = self._seen[kept][unit]
                own = run - self._judging(case) / runs if unit == "column" else run
                fastest[case.M, case.N] = min(own, fastest.get((case.M, case.N), own))
        self._rates = {new: self._rates_of(seen) for new, seen in self._seen.items()}

    def _rates_of(self, seen: dict[str, dict[tuple[int, int], float]]) -> dict[str, float]:
        """Unit -> the least that a run took beyond one of few of them; of a column, beyond its rows as well."""
        few, rates = self._few if self._few < math.inf else 0.0, dict[str, float]()
        for unit, fastest in seen.items():
            rows = rates.get("row", 0.0) if unit == "column" else 0.0
            beyond = [(run - few - rows * m) / _sizes(m, n)[unit] for (m, n), run in fastest.items()]
            if beyond:
                rates[unit] = max(0.0, min(beyond))
        return rates

    def _judging(self, case: Case) -> float:
        at_home = self._device == "cuda" and case.small
        return case.M * case.N * (_AT_HOME_SECONDS if at_home else _JUDGING_SECONDS[self._device])


def _sizes(rows: int, columns: int) -> dict[str, int]:
    return {"row": rows, "column": columns, "element": rows * columns}


class Prices:
    """The prices of one kernel on ``device`` ("cpu" or "cuda"), in seconds.

    What a case builds is what its nearest neighbour among the cases that ran has not: the sum of the prices of the axes
    in which the two differ, at most the dearest price. The price of an axis is the lower median of its latest samples:
    what a case took beyond its own runs when this axis alone was new, and 0 for each of its new axes if that was
    nothing. As long as an axis was never new alone, its price is an equal share of what it was new in.
    ``slow``: whether the latest case built something; ``spent``, ``building``: seconds of all cases, of which so many
    are no runs of their own.
    """

    def __init__(self, device: str) -> None:
        self.own = Own(device)
        self.slow = self.is_new = False
        self.spent = self.building = 0.0
        self._first: _Sample | None = None
        self._alone: dict[Hashable, deque[_Sample]] = defaultdict(lambda: deque(maxlen=_LATEST))
        self._shared: dict[str, deque[_Sample]] = defaultdict(lambda: deque(maxlen=_LATEST))
        self._ran: dict[_Values, None] = {}
        self._known: dict[Hashable, float] = {}  # prices since the latest case
        self._projected: dict[tuple[int, ...], set[_Values]] = {}  # axes -> their values in the cases that ran

    @property
    def little(self) -> float:
        """Seconds of building that are none."""
        return _SLOW_CALLS * self.own.call if self.own.is_known else 0.0

    @property
    def dearest(self) -> float:
        """Seconds of the dearest price of an axis."""
        if "dearest" not in self._known:
            own = [self._median(key) for key in list(self._alone)]
            shared = [_lower_median(map(self._beyond, samples)) for samples in self._shared.values()]
            self._known["dearest"] = max([*own, *shared], default=0.0)
        return self._known["dearest"]

    @property
    def starting(self) -> float:
        """Seconds that the very first case took beyond the dearest price: it also imports and starts much."""
        return max(0.0, self._beyond(self._first) - self.dearest) if self._first is not None else 0.0

    def of(self, axis: str, value: Hashable = None, trust: Trust = "likely") -> float:
        """Seconds of a new value of an axis; None: of any."""
        apart = value in _APART.get(axis, ())
        key: Hashable = (axis, value) if apart or (axis, value) in self._alone else axis
        if (key, trust) not in self._known:
            self._known[key, trust] = self._priced(key, axis, trust)
        return self._known[key, trust]

    def _priced(self, key: Hashable, axis: str, trust: Trust) -> float:
        if trust == "worst" and key in self._alone:
            return max(map(self._beyond, self._alone[key]))
        if key in self._alone:
            few = len(self._alone[key]) < 2 and len(self._alone.get(axis, ())) < 2
            return 0.0 if trust == "sure" and few else self._median(key)
        shared = self._shared.get(axis, ()) if key == axis else ()
        shares = [self._share(sample) for sample in shared if not self._explained(axis, sample)]
        if len(shares) > (trust == "sure"):
            return _lower_median(shares)
        return 0.0 if trust == "sure" else _TRIAL * self.dearest

    def _median(self, key: Hashable) -> float:
        return _lower_median(map(self._beyond, self._alone[key]))

    def _share(self, sample: _Sample) -> float:
        guilty = [axis for axis in sample.new if axis not in self._alone or self._median(axis) > 0]
        return self._beyond(sample) / max(1, len(guilty))

    def _explained(self, axis: str, sample: _Sample) -> bool:
        """Whether another axis that was new as well is known to cost so much."""
        half = self._beyond(sample) / 2
        return any(other in self._alone and self._median(other) > half for other in sample.new if other != axis)

    def _beyond(self, sample: _Sample) -> float:
        """What a case took beyond its own runs, by what is known of these now."""
        beyond = sample.seconds - _SLACK * self.own.seconds(sample.planned)
        return beyond if beyond > self.little else 0.0

    def is_tried(self, axis: str) -> bool:
        """Whether a case had a new value of this axis."""
        return axis in self._alone or axis in self._shared

    def building_of(self, planned: Planned, trust: Trust = "likely") -> float:
        """Seconds that a case is expected to build for. A probe of rows also runs a row alone."""
        total = self._building(_values(planned.case), trust)
        return total + (self._building(_values(with_rows(planned.case, 1)), trust) if planned.probe == "rows" else 0.0)

    def _building(self, own: _Values, trust: Trust) -> float:
        prices = [self.of(axis, value, trust) for axis, value in zip(AXES, own, strict=True)]
        dear = tuple(i for i, price in enumerate(prices) if price > 0)
        known = self._among(dear)
        mine = tuple(own[i] for i in dear)
        if mine in known:
            return 0.0
        nearest = (sum(prices[i] for i, a, b in zip(dear, mine, one, strict=True) if a != b) for one in known)
        return min(min(nearest, default=self.dearest), self.dearest)

    def _among(self, dear: tuple[int, ...]) -> set[_Values]:
        if dear not in self._projected:
            self._projected[dear] = {tuple(one[i] for i in dear) for one in self._ran}
        return self._projected[dear]

    def ahead(self, cases: Iterable[Planned], most: float, trust: Trust) -> float:
        """Seconds that these cases are expected to build for, one after the other; counted up to ``most``."""
        total, before = 0.0, (dict(self._ran), self._projected)
        self._projected = {}
        for planned in cases:
            price = self.building_of(planned, trust)
            if price:
                total += price
                self._run(planned)
                if total > most:
                    break
        self._ran, self._projected = before
        return total

    def saw(self, planned: Planned, seconds: float) -> None:
        """Take what a case took."""
        own = _SLACK * self.own.seconds(planned, most=True) if self.own.call < math.inf else 0.0
        self.spent += seconds
        self.building += max(0.0, seconds - own)
        values = _values(planned.case)
        new = self._new(values)
        if planned.probe == "rows" and self._ran and not new:
            values = _values(with_rows(planned.case, 1))
            new = self._new(values)
        self.own.saw(planned, seconds, new=bool(new))
        self._known.clear()
        sample = _Sample(planned, seconds, new)
        beyond = self._beyond(sample)
        self.slow, self.is_new = bool(beyond and new), bool(new)
        if self._first is None:  # it starts things as well: it tells nothing of a key
            self._first = sample
        else:
            self._note(sample, dict(zip(AXES, values, strict=True)), beyond)
        self._known.clear()
        self._run(planned)

    def _note(self, sample: _Sample, given: dict[str, Hashable], beyond: float) -> None:
        for axis in sample.new:
            if len(sample.new) > 1 and beyond:
                self._shared[axis].append(sample)
                continue
            own = (axis, given[axis])
            apart = given[axis] in _APART.get(axis, ())
            for key in (own,) if apart else (axis,) if axis in _APART else (axis, own):
                self._alone[key].append(sample)

    def _new(self, own: _Values) -> tuple[str, ...]:
        """The axes in which a case differs from its nearest neighbour: at the lowest price, then the fewest."""
        price = [self.of(axis, value) for axis, value in zip(AXES, own, strict=True)]

        def distance(other: _Values) -> tuple[float, int]:
            differing = [p for p, a, b in zip(price, own, other, strict=True) if a != b]
            return sum(differing), len(differing)

        nearest = min(self._ran, key=distance, default=None)
        if nearest is None:
            return AXES
        return tuple(axis for axis, a, b in zip(AXES, own, nearest, strict=True) if a != b)

    def _run(self, planned: Planned, process: str = "") -> None:
        for case in (planned.case, with_rows(planned.case, 1)) if planned.probe == "rows" else (planned.case,):
            values = (*_values(case)[:-1], process)
            self._ran[values] = None
            for dear, known in self._projected.items():
                known.add(tuple(values[i] for i in dear))

    def warm(self, planned: Planned) -> None:
        """Note that another process has run this case."""
        self._run(planned, "another")
        self._known.clear()

    def forget_warmed(self) -> None:
        """Take what another process has run for new again."""
        self._ran = {values: None for values in self._ran if not values[-1]}
        self._projected.clear()

    @property
    def warming_is_idle(self) -> bool:
        """Whether a case costs as much after another process has run it: what it built is kept nowhere."""
        return self.of("process", trust="sure") > _IDLE_SHARE * self.dearest

    @property
    def dear(self) -> dict[str, int]:
        """The axes that were new alone and build something -> how many samples tell their price."""
        alone = {axis: len(self._alone[axis]) for axis in AXES[:-1] if axis in self._alone}
        return {axis: samples for axis, samples in alone.items() if self.of(axis) > self.little}

    def told(self, axes: Set[str] = frozenset()) -> str:
        """The prices in words: "a new N takes 2 s, a new eps takes 33 s"; of these ``axes`` alone if they are dear."""
        asked = self.dear.keys() & axes or self.dear.keys()
        words = [f"{a_new(axis)} takes {self.of(axis):.2g} s" for axis in self.dear if axis in asked]
        return ", ".join(words) or f"whatever is new takes {self.dearest:.2g} s"


_IDLE_SHARE = 0.6  # of the dearest price

_WORDS = {"numbers": "eps", "weight_dtype": "dtype of the weight", "residual_dtype": "dtype of the residual"}


def a_new(axis: str) -> str:
    """A new value of an axis in words, such as "a new eps"."""
    return f"a new {_WORDS.get(axis, axis)}"


@lru_cache(maxsize=4096)
def _values(case: Case) -> _Values:
    """The value of each of AXES that a case in this process has."""
    parameters = case.weight, case.bias, case.weight_dtype, case.residual_dtype
    sizes = case.N, case.M, (case.N + case.gap) % 16 == 0
    return *parameters, case.layout, (case.eps, case.options), *sizes, ""


def _lower_median(samples: Iterable[float]) -> float:
    ordered = sorted(samples)
    return ordered[(len(ordered) - 1) // 2]
