"""What the cases of a cell cost, measured as they run: a call, a row, a column, and a first call.

The first call with something new takes longer than the next one: it compiles, tunes, or builds a plan. What is new
differs from kernel to kernel. Triton compiles for a new N, bias or dtype of the weights; cuDNN plans each new (M, N).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import replace
from statistics import fmean

from normcheck.cases.case import Case, Place, place_of
from normcheck.cases.core import Planned

RUNS = {"reason": 1.0, "memory": 2.0, "rows": 5.5}
"""Depth of a case's probes -> its cost in runs of the kernel, counted in the probes' calls."""

NEWS = ("N", "parameters", "rows", "layout", "empty")
"""What may be new in a case, of which the first counts: its N; its bias or dtype of the weights at this N; its M with
those; its layout with all of these; a case without rows."""

_JUDGING_SECONDS = {"cpu": 2.5e-6, "cuda": 2e-8}  # for an element, at most; for planning only
_SLACK = 3.0  # a case may take so many times the expected seconds before the rest counts as building
_ROWS_TELL = 16  # from so many rows on, rows cost more than the call
_COLUMNS_TELL = 4096  # likewise
_LATEST = 4  # so many first calls tell what the next one costs: it falls if something compiles ahead


class Costs:
    """The costs of one cell, in seconds, on ``device`` ("cpu" or "cuda").

    ``call``, ``row``, ``column``: the least so far, infinite if not known. ``spent``: on cases themselves;
    ``building``: beyond that, for compiling and the like or on a busy machine. ``places``: where a case has run, in
    their order.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.call = self.row = self.column = math.inf
        self.spent = self.building = 0.0
        self.places: dict[Place, None] = {}
        self._seen: set[Hashable] = set()
        self._first: dict[str, deque[tuple[Planned, float]]] = {news: deque(maxlen=_LATEST) for news in NEWS}
        self._number = dict.fromkeys(NEWS, 0)
        self._coldest = ""  # what was new in the very first call
        self.repeated = False  # whether a case ran that had nothing new
        self._latest: tuple[Planned, float, float] | None = None  # with its seconds, and those counted as building

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """The (M, N) of cases with rows that have run."""
        return {(m, n) for m, n, *_ in self.places if m}

    def expected(self, planned: Planned) -> float:
        """Seconds that a case is expected to take, without building anything."""
        runs, case = RUNS[planned.probe], planned.case
        call, row, column = (cost if cost < math.inf else 0.0 for cost in (self.call, self.row, self.column))
        return runs * (call + row * case.M + column * case.N) + case.M * case.N * _JUDGING_SECONDS[self._device]

    def first_call(self, news: str) -> float:
        """Seconds that a first call with this of ``NEWS`` takes beyond a repeated one; 0 if not known."""
        samples = self._first.get(news)
        return fmean(self._beyond(*sample) for sample in samples) if samples else 0.0

    def first_calls(self, planned: Planned) -> float:
        """Seconds that the first calls of a case are expected to take."""
        case, expected = planned.case, self.first_call(self.news(planned.case))
        if planned.probe == "rows" and _keys(_alone(case))["rows"] not in self._seen:
            expected += self.first_call("rows")
        return expected

    def news(self, case: Case) -> str:
        """The first of ``NEWS`` that no case before had; "" if there is none."""
        return next((news for news, key in _keys(case).items() if key not in self._seen), "")

    def ahead(self, totals: Mapping[str, int]) -> float:
        """Seconds of the first calls that are left, if there are ``totals`` of them in all; by ``NEWS``."""
        return sum(self.first_call(news) * max(0, total - self._number[news]) for news, total in totals.items())

    def count(self, planned: Planned, seconds: float) -> None:
        """Split the seconds of a case into its own and those far beyond.

        Any case may build something: a kernel may be compiled for each N, M, divisibility by 16 or layout.
        """
        case, runs, news = planned.case, RUNS[planned.probe], self.news(planned.case)
        expected = _SLACK * self.expected(planned) if self.call < math.inf else 0.0
        beyond = max(0.0, seconds - expected)
        self.building += beyond
        self.spent += seconds - beyond
        self.call = min(self.call, seconds / runs)
        if case.M >= _ROWS_TELL:
            self.row = min(self.row, seconds / runs / case.M)
        if case.N >= _COLUMNS_TELL and case.M and self.row < math.inf:
            own = seconds - case.M * case.N * _JUDGING_SECONDS[self._device]
            self.column = min(self.column, max(0.0, own / runs - self.call - self.row * case.M) / case.N)
        if news:
            self._note(news, planned, seconds)
        else:
            self.repeated = True
            self._look_back()
        self._latest = planned, seconds, beyond
        for one in (case, _alone(case)) if planned.probe == "rows" else (case,):
            self._seen.update(_keys(one).values())
        self.places[place_of(case)] = None

    def _note(self, news: str, planned: Planned, seconds: float) -> None:
        """Keep a first call. The very first call of a cell also imports and starts much: another one replaces it."""
        if self._number[news] == 1 and news == self._coldest:
            self._first[news].clear()
        self._coldest = self._coldest or news
        self._first[news].append((planned, seconds))
        self._number[news] += 1

    def _look_back(self) -> None:
        """A repeated case tells what a call costs, so that more of the case before it may have been building."""
        if self._latest is None:
            return
        planned, seconds, counted = self._latest
        more = self._beyond(planned, seconds) - counted
        if more > 0:
            self.building += more
            self.spent -= more

    def _beyond(self, planned: Planned, seconds: float) -> float:
        return max(0.0, seconds - _SLACK * self.expected(planned))


def _keys(case: Case) -> dict[str, Hashable]:
    """What a first call may depend on, by ``NEWS``."""
    parameters = case.bias, case.weight_dtype
    if not case.M:
        return {"empty": ("empty", case.N, parameters, case.layout)}
    return {
        "N": case.N,
        "parameters": (case.N, parameters),
        "rows": (case.N, parameters, case.M),
        "layout": (case.N, parameters, case.M, case.layout),
    }


def _alone(case: Case) -> Case:
    """The one row of a case that a probe of rows runs alone."""
    return replace(case, M=1, layout="rank3" if case.rank == 3 else "contiguous", gap=0)
