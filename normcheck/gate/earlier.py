"""The earlier cases that a failure needs: as few as can be, and as much like the case that fails after them.

What remains of an earlier call is mostly kept under a key, such as N and the dtype: the call that fails has the key in
common with the one that left something behind, and differs from it in what the key lacks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from normcheck.cases.case import Case
from normcheck.checks.attempt import run_alone, run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, context_lost
from normcheck.checks.finding import signature
from normcheck.gate.plan import Plan

SEARCH_SECONDS = 20.0
"""For the search for the cases that did the damage, and as many again to make a pair of cases plainer."""

_LIKELY_SECONDS = 10.0  # of these for single cases, the likeliest first
_TIMEOUT_DIVISOR = 3  # remaining seconds / timeout of a case: its first call may take three times its timeout
_MOST_LEFT_OUT = 16  # only among so many cases is each left out once, to see whether it is needed

_AXES: Mapping[str, tuple[str, ...]] = {
    "eps": ("eps",),
    "the clips": ("options",),
    "the layout": ("layout", "gap"),
    "weight and bias": ("weight", "bias", "weight_dtype"),
    "the dtype of the residual": ("residual_dtype",),
    "the scale": ("scale",),
    "M": ("M",),
    "N": ("N",),
}
"""What a key may lack, and the properties of a case that it stands for: what a kernel knows before it computes."""

_VALUES = ("rows", "dy", "weights", "residual", "gate", "seed")
_PLAIN: Mapping[str, Any] = {
    "rows": "normal",
    "dy": "normal",
    "weights": "normal",
    "residual": "normal",
    "gate": "normal",
    "seed": 0,
}
_SMALL: tuple[Mapping[str, Any], ...] = ({"M": 1}, {"M": 2}, {"N": 2}, {"N": 8}, {"N": 64})


def crashed(result: Result) -> bool:
    """Whether the implementation's process ended in this case."""
    return any(problem.kind == "crash" for problem in result.problems)


def spoilt(result: Result) -> bool:
    """Whether the process ended or lost its GPU's context, which any earlier case may have caused."""
    return crashed(result) or any(map(context_lost, result.problems))


def differences(one: Case, other: Case) -> tuple[str, ...]:
    """What differs between two cases, in words: eps, the layout, ...; at last, whether their values do."""
    found = [words for words, names in _AXES.items() if any(getattr(one, n) != getattr(other, n) for n in names)]
    return (*found, *["the values"] * any(getattr(one, n) != getattr(other, n) for n in _VALUES))


def likely(earlier: Iterable[Case], failed: Case) -> list[Case]:
    """The ``earlier`` cases, in the order in which each may alone be why ``failed`` fails: of those with the same N the
    one that differs in the fewest things but its values, the smallest first. One that differs in no more is the last.
    """

    def rank(case: Case) -> tuple[bool, bool, int, int]:
        count = len([words for words in differences(case, failed) if words != "the values"])
        return case.N != failed.N, not count, count, case.room

    return sorted(earlier, key=rank)


class OutOfTime(Exception):
    """The seconds of the search are used up."""


class Alone(Exception):
    """A case of the search failed as the first one of a new process: it is the cause."""

    def __init__(self, result: Result) -> None:
        super().__init__()
        self.result = result


@dataclass
class Search:
    """Runs cases again in new processes, then ``failed``.

    ``needed``: the fewest cases found so far after which it fails again, in their order; () until it does.
    """

    cell: Cell
    plan: Plan
    failed: Result
    end: float
    needed: tuple[Case, ...] = ()

    def narrow(self) -> None:
        """Find how few of the earlier cases suffice. Raises OutOfTime, or Alone.

        First each of the likely ones alone; then more and more of the last ones, since damage shows soon, of which
        bisection leaves as few as possible.
        """
        earlier = self.failed.after
        if self._one_of_the_likely():
            return
        passes, fails = 0, min(1, len(earlier))
        while self.seen_again(earlier[-fails:]) is None:
            if fails >= len(earlier):
                return
            passes, fails = fails, min(2 * fails, len(earlier))
        while fails - passes > 1:
            middle = (passes + fails) // 2
            passes, fails = (middle, fails) if self.seen_again(earlier[-middle:]) is None else (passes, middle)
        self._leave_out()

    def _one_of_the_likely(self) -> bool:
        """Try single cases, but none whose every difference an earlier try had as well. A crash has no likely ones."""
        if spoilt(self.failed):
            return False
        end, failed = time.perf_counter() + _LIKELY_SECONDS, self.failed.case
        tried: list[set[tuple[str, object]]] = []
        for case in likely(self.failed.after, failed):
            names = [name for words in differences(case, failed) for name in _AXES.get(words, ())]
            own = {(name, getattr(case, name)) for name in names if getattr(case, name) != getattr(failed, name)}
            if any(own <= others for others in tried):
                continue
            if time.perf_counter() > end:
                return False
            if self.seen_again((case,)) is not None:
                return True
            tried.append(own)
        return False

    def _leave_out(self) -> None:
        """Drop cases that are not needed. The first one is: try it alone, then leave out each of the others."""
        last = self.needed
        if len(last) < 2 or self.seen_again(last[:1]) is not None:
            return
        for case in last[1:] if len(last) <= _MOST_LEFT_OUT else ():
            self.seen_again(tuple(other for other in self.needed if other is not case))

    def make_plain(self) -> None:
        """Make a pair of cases plainer, as long as the second fails after the first: alike in all but one thing if that
        is possible, then both of plain values, packed, small. Raises OutOfTime, or Alone.
        """
        if len(self.needed) != 1 or spoilt(self.failed):
            return
        for case in _but_for_one(self.needed[0], self.failed.case):
            if self.seen_again((case,)) is not None:
                break
        tried = set[Case]()
        for changes in ({**_PLAIN, "layout": "contiguous", "gap": 0}, _PLAIN, *_SMALL):
            (first,), last = self.needed, self.failed.case
            if last.rotates and "N" in changes:  # so few columns are no heads
                continue
            one, other = (replace(case, **_common(first, last, changes)) for case in (first, last))
            if other == last or other in tried or other.M > last.M or other.N > last.N:
                continue
            tried.add(other)
            result = self._after((one,), other)
            if result is not None:
                self.needed, self.failed = (one,), result

    def try_also(self, other: Result) -> None:
        """Have ``other`` as what failed, if it does so after the ``needed`` cases as well."""
        result = self._after(self.needed, other.case)
        if result is not None:
            self.failed = result

    def seen_again(self, earlier: tuple[Case, ...]) -> Result | None:
        """The failure after these cases in a new process, which are then ``needed``; None if it does not come again."""
        result = self._after(earlier, self.failed.case)
        if result is not None:
            self.needed = earlier
        return result

    def _after(self, earlier: tuple[Case, ...], last: Case) -> Result | None:
        """The same failure in ``last`` after these cases in a new process; None if it does not come."""
        for number, case in enumerate((*earlier, last)):
            left = self.end - time.perf_counter()
            if left <= 0:
                raise OutOfTime
            plan = replace(self.plan, timeout=min(self.plan.timeout, left / _TIMEOUT_DIVISOR))
            result = (run_case if number else run_alone)(self.cell, case, plan)
            if spoilt(result) and spoilt(self.failed):
                if not number:
                    raise Alone(result)
                return result
        return result if result.failed and signature(result) == signature(self.failed) else None


def _but_for_one(earlier: Case, failed: Case) -> Iterator[Case]:
    """Cases like ``failed``, each with one of the things in which ``earlier`` differs from it."""
    for words in differences(earlier, failed):
        names = _AXES.get(words, _VALUES)
        names = ("weights", *names[1:]) if names[0] == "weight" else names  # of kinds of weights one is none
        try:
            case = replace(failed, **{name: getattr(earlier, name) for name in names})
        except ValueError:  # another kind of weights than a case without them can have
            continue
        if case != earlier:
            yield case


def _common(one: Case, other: Case, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The ``changes`` of what two cases have in common; one without a weight stays without."""
    differ = {name for words in differences(one, other) for name in _AXES.get(words, _VALUES)}
    kept = differ if other.weight else {*differ, "weights"}
    return {name: value for name, value in changes.items() if name not in kept}
