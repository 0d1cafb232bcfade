"""What the cases of a cell cost, measured as they run: a call, a row, a column, and a first call.

The first call with something new takes longer than the next one: it compiles, tunes, or builds a plan. What is new
differs from kernel to kernel. Triton compiles for a new N, bias, or dtype of weights or residual; cuDNN plans each new
(M, N).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Mapping
from statistics import fmean

from normcheck.cases.case import Case, Place, parameters_of, place_of, with_rows
from normcheck.cases.core import Planned

RUNS = {"reason": 1.0, "memory": 2.0, "rows": 5.5}
"""Depth of a case's probes -> its cost in runs of the kernel, counted in the probes' calls."""

NEWS = ("parameters", "N", "both", "rows", "layout", "empty")
"""What may be new in a case, of which the first counts: its parameters, its N, the two together, its M with both, its
layout with all of these; a case without rows."""

WARMED = "warmed"
"""In place of one of NEWS, if another process has compiled for it: what is left of its first call."""

_COLD = ("parameters", "N", "both")
_TOLD_BY = {**dict.fromkeys(_COLD, _COLD), "layout": ("rows",)}
"""What tells the cost of these until they have run: a kernel may build for other rows and for no other layout."""

_FEW_WARMED, _WARMED_SHARE = 3, 0.6
"""If so many cost more than this share of others, the compiler keeps nothing on disk."""

_UNTRIED, _TRIAL = ("rows", "layout", "empty"), 0.25
"""What is worth a trial, and the share of the dearest first call that it is worth."""

_DOUBT = 0.5
_MUCH_SECONDS = 1.0  # a pause of the machine is no first call

_JUDGING_SECONDS = {"cpu": 1e-6, "cuda": 2e-8}  # for an element, at most; for planning only
_AT_HOME_SECONDS = 1e-7  # the same for a small case of a GPU's kernel, which a CPU judges
_SLACK = 3.0  # a case may take so many times the expected seconds before the rest counts as building
_ROWS_TELL = 16  # from so many rows on, rows cost more than the call
_COLUMNS_TELL = 4096  # likewise
_ELEMENTS_TELL = 16384  # and on a GPU, which takes many rows at once: there elements cost, not rows
_LATEST = 4  # so many first calls tell what the next one costs: it falls if something compiles ahead


class Costs:
    """The costs of one cell, in seconds, on ``device`` ("cpu" or "cuda").

    ``call``, ``row``, ``column``: the least so far, infinite if not known. ``spent``: on cases themselves;
    ``building``: beyond that, for compiling and the like or on a busy machine. ``places``: where a case has run, in
    their order.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self.call = math.inf
        self._each = dict.fromkeys(("row", "column", "element"), math.inf)
        self._few = math.inf  # the least seconds of a run with few elements
        self.spent = self.building = 0.0
        self.places: dict[Place, None] = {}
        self._seen: set[Hashable] = set()
        self._prices: dict[str, tuple[float, float]] = {}  # what ``_price`` found since the latest case
        self._first: dict[str, deque[tuple[Planned, float]]] = {news: deque(maxlen=_LATEST) for news in (*NEWS, WARMED)}
        self._number = dict.fromkeys((*NEWS, WARMED), 0)
        self._warmed: set[Hashable] = set()
        self._cold: tuple[Planned, float] | None = None  # the very first call, which also imports and starts much
        self.dear = False  # whether first calls are dear, so that they may look like the cost of rows or columns
        self.repeated = False  # whether a case ran that had nothing new
        self._told_again: set[str] = set()  # what such a case told: the cost of a row, a column, an element
        self._latest: tuple[Planned, float, float] | None = None  # with its seconds, and those counted as building

    @property
    def row(self) -> float:
        """Seconds that a row takes, at most, on a CPU."""
        return self._each["row"]

    @property
    def column(self) -> float:
        """Seconds that a column takes beside that, at most, on a CPU."""
        return self._each["column"]

    @property
    def shapes(self) -> set[tuple[int, int]]:
        """The (M, N) of cases with rows that have run."""
        return {(m, n) for m, n, *_ in self.places if m}

    @property
    def widths(self) -> set[int]:
        """The N of these."""
        return {n for _, n in self.shapes}

    @property
    def knows_sizes(self) -> bool:
        """Whether a first call with a new N was measured, beside the very first call."""
        return bool(self._first["N"])

    def expected(self, planned: Planned) -> float:
        """Seconds that a case is expected to take, without building anything."""
        return self._expected(planned, self.dear)

    def _expected(self, planned: Planned, again: bool) -> float:
        """As ``expected``. ``again``: a row or a column costs what repeated cases show, nothing if none does."""
        runs, case = RUNS[planned.probe], planned.case
        numbers = {"element": case.M * case.N} if self._device == "cuda" else {"row": case.M, "column": case.N}
        told = self._told_again if again else numbers
        known = {name: cost for name, cost in self._each.items() if cost < math.inf and name in told}
        call = self.call if self.call < math.inf else 0.0
        own = sum((cost * numbers.get(name, 0) for name, cost in known.items()), start=call)
        return runs * own + self._judging(case)

    def _judging(self, case: Case) -> float:
        a_cpu_judges = self._device == "cuda" and case.small
        return case.M * case.N * (_AT_HOME_SECONDS if a_cpu_judges else _JUDGING_SECONDS[self._device])

    def first_call(self, news: str) -> float:
        """Seconds that a first call with this of ``NEWS`` takes beyond a repeated one; 0 if nothing is known.

        Until more is known it is the very first call of the cell that tells.
        """
        if self._cold is not None and news in _COLD and not any(self._first[other] for other in _COLD):
            return self._beyond(*self._cold)
        return self._price(news)[0]

    @property
    def mostly_first_calls(self) -> bool:
        """Whether much time, and more than into all else, went into first calls, without the very first one."""
        return self._cold is not None and self.building - self._beyond(*self._cold) > max(self.spent, _MUCH_SECONDS)

    @property
    def dearest(self) -> float:
        """Seconds of the dearest first call: with a new N, or with new parameters, which cost as the very first one."""
        cold = self._beyond(*self._cold) if self._cold is not None and not self._first["parameters"] else 0.0
        return max(cold, self.first_call("N"), self.first_call("parameters"))

    @property
    def starting(self) -> float:
        """Seconds that the very first call took beyond the dearest: it also imports and starts much."""
        return max(0.0, self._beyond(*self._cold) - self.dearest) if self._cold is not None else 0.0

    def first_calls(self, planned: Planned) -> tuple[float, float]:
        """Seconds that the first calls of a case are likely to take, and at most."""
        likely, most = self._price(self._label(planned.case))
        alone = self._price("rows" if self._has_new_row(planned) else "")
        return likely + alone[0], most + alone[1]

    def untried(self, planned: Planned) -> float:
        """Seconds that a case may take whose rows, layout or lack of rows is new as none before; else infinite.

        What others of its kind cost does not tell it, and most kernels build nothing for it: it is worth a trial, if a
        cell must have one, though it may take as long as the dearest.
        """
        news = self._label(planned.case)
        if news not in _UNTRIED or self._has_run(news, planned.case):
            return math.inf
        return self.expected(planned) + self._trial

    def kept(self, owed: Mapping[str, int]) -> float:
        """Seconds to keep for so many cases with a new "layout", and without rows, "empty".

        For their first calls as much as a trial of each of the two is worth, less if they are known to take less.
        """
        return sum(number * RUNS["memory"] * self.call + self._kept(news, number) for news, number in owed.items())

    def _kept(self, news: str, number: int) -> float:
        return min(number * self.first_call(news), self._trial) if self._first[news] else self._trial

    def _has_run(self, news: str, case: Case) -> bool:
        return any(news != "layout" or one.case.layout == case.layout for one, _ in self._first[news])

    @property
    def _trial(self) -> float:
        return _TRIAL * max(map(self._mean, self._first))

    def _mean(self, news: str) -> float:
        own = [self._beyond(*sample) for sample in self._first[news]]
        return fmean(own) if own else 0.0

    def _has_new_row(self, planned: Planned) -> bool:
        """Whether the probe of rows runs a row alone, which is a first call."""
        return planned.probe == "rows" and _keys(with_rows(planned.case, 1))["rows"] not in self._seen

    def _price(self, news: str) -> tuple[float, float]:
        """What a first call with this of ``NEWS`` likely takes, and at most.

        What is not known costs what another of its kind does. If none is known it is likely cheap, so that it is tried
        soon; but it may take _DOUBT of the dearest.
        """
        if not news:
            return 0.0, 0.0
        if news not in self._prices:
            self._prices[news] = self._priced(news)
        return self._prices[news]

    def _priced(self, news: str) -> tuple[float, float]:
        samples = self._first[news] or [sample for other in _TOLD_BY.get(news, ()) for sample in self._first[other]]
        if samples:
            own = [self._beyond(*sample) for sample in samples]
            return fmean(own), max(own)
        others = (self._beyond(*sample) for samples in self._first.values() for sample in samples)
        return 0.0, _DOUBT * max(others, default=0.0)

    def news(self, case: Case) -> str:
        """The first of ``NEWS`` that no case before had; "" if there is none."""
        return next((news for news, key in _keys(case).items() if key not in self._seen), "")

    def warm(self, case: Case) -> None:
        """Note that another process has run this case."""
        self._warmed.update(_keys(case).values())

    def forget_warmed(self) -> None:
        """Take what another process has run for new again."""
        self._warmed.clear()

    @property
    def warming_is_idle(self) -> bool:
        """Whether first calls cost about as much after another process has made them: it leaves nothing on disk."""
        samples = self._first[WARMED]
        others = max((self._price(news)[0] for news in _COLD if self._first[news]), default=0.0)
        return len(samples) >= _FEW_WARMED and self._price(WARMED)[0] > _WARMED_SHARE * others

    def number(self, news: str) -> int:
        """How many first calls had this of NEWS, or were ``WARMED``."""
        return self._number[news]

    def _label(self, case: Case) -> str:
        news = self.news(case)
        return WARMED if news and _keys(case)[news] in self._warmed else news

    def ahead(self, totals: Mapping[str, int]) -> float:
        """Seconds of the first calls that are left, if there are ``totals`` of them in all; by ``NEWS``."""
        return sum(self.first_call(news) * max(0, total - self._number[news]) for news, total in totals.items())

    def count(self, planned: Planned, seconds: float) -> None:
        """Split the seconds of a case into its own and those far beyond.

        Any case may build something: a kernel may be compiled for each N, M, divisibility by 16 or layout.
        """
        case, runs = planned.case, RUNS[planned.probe]
        news = self._label(case) or "rows" * self._has_new_row(planned)
        expected = _SLACK * self.expected(planned) if self.call < math.inf else 0.0
        beyond = max(0.0, seconds - expected)
        self.building += beyond
        self.spent += seconds - beyond
        self.call = min(self.call, seconds / runs)
        told = self._measured(case, runs, seconds)
        if news:
            self._note(news, planned, seconds)
        else:
            self.repeated = True
            self._told_again |= told
            self._look_back()
        self._latest = planned, seconds, beyond
        self._prices.clear()
        for one in (case, with_rows(case, 1)) if planned.probe == "rows" else (case,):
            self._seen.update(_keys(one).values())
        self.places[place_of(case)] = None

    def _measured(self, case: Case, runs: float, seconds: float) -> set[str]:
        """Take what this case tells of the cost of a row, a column or an element; returns which of them it is.

        An element costs what a run takes beyond one of few elements.
        """
        run, elements, told = seconds / runs, case.M * case.N, dict[str, float]()
        if self._device == "cuda" and elements < _ELEMENTS_TELL:
            self._few = min(self._few, run) if elements else self._few
        elif self._device == "cuda":
            told["element"] = (run - (self._few if self._few < math.inf else 0.0)) / elements
        elif case.M:
            row = min(self.row, run / case.M) if case.M >= _ROWS_TELL else self.row
            told |= {"row": row} if case.M >= _ROWS_TELL else {}
            if case.N >= _COLUMNS_TELL and row < math.inf:
                told["column"] = (run - self._judging(case) / runs - self.call - row * case.M) / case.N
        for name, cost in told.items():
            self._each[name] = min(self._each[name], max(0.0, cost))
        return set(told)

    def _note(self, news: str, planned: Planned, seconds: float) -> None:
        self._number[news] += 1
        if self._cold is None:
            self._cold = planned, seconds
        else:
            self._first[news].append((planned, seconds))

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
        return max(0.0, seconds - _SLACK * self._expected(planned, again=True))


def _keys(case: Case) -> dict[str, Hashable]:
    """What a first call may depend on, by ``NEWS``."""
    parameters = parameters_of(case)
    if not case.M:
        return {"empty": ("empty", case.N, parameters, case.layout)}
    return {
        "parameters": parameters,
        "N": case.N,
        "both": (case.N, parameters),
        "rows": (case.N, parameters, case.M),
        "layout": (case.N, parameters, case.M, case.layout),
    }
