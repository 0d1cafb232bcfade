"""What the runs of a case take by themselves, when nothing is built for it."""

from __future__ import annotations

import math

from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.planned import Planned

RUNS = {Depth.REASON: 1.0, Depth.MEMORY: 2.0, Depth.ROWS: 5.5}
"""How far a case is probed -> its cost in runs of the kernel, counted in the probes' calls."""

FAST = 0.03
"""Seconds of a call with which some 340 cases fit into any time: then nobody need ask what is building."""

_JUDGING_SECONDS = {"cpu": 1e-6, "cuda": 2e-8}  # for an element, at most
_AT_HOME_SECONDS = 1e-7  # the same for a small case of a GPU's kernel, which a CPU judges
_TELLING = {"row": 16, "column": 4096, "element": 16384}
"""From so many on they cost more than a call. A GPU takes many rows at once: there elements cost, not rows."""


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
        }  # whether something was new -> unit -> rows, and how many of the unit -> the fastest run
        self._rates: dict[bool, dict[str, float]] = {False: {}, True: {}}
        self._each = math.inf  # the least that a run took for each of many elements

    @property
    def is_known(self) -> bool:
        """Whether it is known what a call takes, without building anything."""
        return self.call < (math.inf if self.repeated else FAST)

    @property
    def known(self) -> tuple[object, ...]:
        """All that ``seconds`` depends on but for the case."""
        return self.call, self.repeated, self._rates[False], self._rates[True]

    def rate(self, unit: str) -> float:
        """Seconds of a "row", a "column" or an "element", at most; 0 if it is not known."""
        return self._rates[True].get(unit, 0.0)

    def seconds(self, planned: Planned, *, most: bool = False) -> float:
        """Seconds of a case. ``most``: rows and columns may have built something whenever they were seen."""
        return self.runs(planned, most=most) + self._judging(planned.case)

    def runs(self, planned: Planned, *, most: bool = False) -> float:
        """The same without what judging takes at most, as far as no run has shown what it takes."""
        rates, sizes = self._rates[most], _sizes(planned.case)
        run = sum((rate * sizes[unit] for unit, rate in rates.items()), start=self.call if self.is_known else 0.0)
        return RUNS[planned.probe] * run

    def runs_of_large(self, planned: Planned) -> float:
        """The same of a case that is larger than those before. On a CPU an element of it takes as long as one of those
        did at least, with its share of all that their runs took.
        """
        each = self._each if self._each < math.inf else 0.0
        return max(self.runs(planned, most=True), RUNS[planned.probe] * each * planned.case.M * planned.case.N)

    def saw(self, planned: Planned, seconds: float, *, new: bool) -> None:
        """Take the seconds of a case; ``new``: whether it may have built something."""
        case, runs = planned.case, RUNS[planned.probe]
        self.repeated |= not new
        self.call = min(self.call, seconds / runs)
        run, sizes = seconds / runs, _sizes(case)
        if self._device == "cpu" and sizes["element"] >= _TELLING["element"]:
            self._each = min(self._each, run / sizes["element"])
        units = ("element",) if self._device == "cuda" else ("row", "column")
        if all(sizes[unit] < _TELLING[unit] for unit in units) and case.M:
            self._few = min(self._few, run)
        for unit in (unit for unit in units if sizes[unit] >= _TELLING[unit]):
            for kept in {True, new}:
                fastest = self._seen[kept][unit]
                own = run - self._judging(case) / runs if unit == "column" else run
                place = sizes["row"], sizes[unit]
                fastest[place] = min(own, fastest.get(place, own))
        self._rates = {new: self._rates_of(seen) for new, seen in self._seen.items()}

    def _rates_of(self, seen: dict[str, dict[tuple[int, int], float]]) -> dict[str, float]:
        """Unit -> the least that a run took beyond one of few of them; of a column, beyond its rows as well."""
        few, rates = self._few if self._few < math.inf else 0.0, dict[str, float]()
        for unit, fastest in seen.items():
            rows = rates.get("row", 0.0) if unit == "column" else 0.0
            if fastest:
                rates[unit] = max(0.0, min((run - few - rows * m) / size for (m, size), run in fastest.items()))
        return rates

    def _judging(self, case: Case) -> float:
        at_home = self._device == "cuda" and case.small
        return case.M * case.N * (_AT_HOME_SECONDS if at_home else _JUDGING_SECONDS[self._device])


def _sizes(case: Case) -> dict[str, int]:
    """How many rows are normed, which are groups of channels or heads if a row has several; their columns, and all."""
    groups = case.split.groups
    return {"row": case.M * groups, "column": case.N // groups, "element": case.M * case.N}
