"""The configurations of a kernel's autotuners: in turn in a core that builds for long, and then each on the cases that
tell most of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from zlib import crc32

from normcheck.cases.beyond import telling
from normcheck.cases.case import Case
from normcheck.cases.claims import Claims
from normcheck.checks.ask import UNPROBED, Ask
from normcheck.checks.attempt import run_case, timed_out
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.circumstances import Configured
from normcheck.gate.blame import run_surely
from normcheck.gate.contexts import chosen
from normcheck.gate.plan import Plan
from normcheck.impls import discovery
from normcheck.impls.kernels.configurations import Configuration
from normcheck.planner.planner import Planner
from normcheck.runner.session import session_of

_MOST = (3.0, 0.15)
"""Seconds, and the share of those that a cell has taken so far, of which the larger holds in quick."""

_LEAST_BLOCK, _MOST_BLOCK = 8, 1 << 15
"""A smaller integer is no number of columns, but one of rows, steps or stages; a larger one would make a huge case."""

_USUAL_BLOCK = 256  # of a kernel whose configurations name none
_MOST_CASES = 8
_MOST_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 24}
_FEW_ROWS, _MANY_ROWS = 4, {"cpu": 40, "cuda": 3000}
_STRIDED, _GAP = ("strided", "x_strided"), 8
_LONG_SECONDS = 5.0
"""Of the first case on a GPU: each more that tunes takes as long, 20 s if there are thirty configurations."""


@dataclass(frozen=True)
class Tried:
    """How the configurations of a cell did. ``failed``: the first case that is wrong with one, None if none is.

    ``wrong``: that configuration, as of a ``Cell``; "" if the case is wrong whichever is taken.
    """

    configured: Configured | None = None
    failed: Result | None = None
    wrong: str = ""


class InTurn:
    """The configuration that each case of a core takes once building is dear: one, so that a new N compiles that alone.

    Cases of one N take the same. What a tuner does to the tensors while it times its configurations is seen by then:
    the first cases have it time them, or the first alone if that takes long. ``number``: the one that was asked for
    last, "" for none.
    """

    def __init__(self, cell: Cell, plan: Plan, core: Planner) -> None:
        self._cell, self._plan, self._core = cell, plan, core
        self._session, self._is_on, self._has_begun = session_of(cell.implementation), False, False
        self._known: dict[str, Configuration] = {}
        self.number = ""

    def of(self, case: Case) -> str:
        """The number that this case takes."""
        self._is_on |= self._core.is_priced and are_tried(self._cell, self._plan)
        several = 1 + max((own.number for own in self._known.values()), default=0)
        return str(crc32(b"%d" % case.N) % several) if self._is_on else ""

    def ask(self, number: str) -> None:
        """Have tuners take it."""
        if number or self.number:
            self._session.configure(number)
        self.number = number

    def note(self, seconds: float) -> None:
        """Note what the tuners said after a case, which took so long."""
        is_first, self._has_begun = not self._has_begun, True
        if is_first and seconds > _LONG_SECONDS and self._plan.device == "cuda":
            self._is_on = are_tried(self._cell, self._plan)
        if self.number:
            self._known |= {own.name: own for own in self._session.configurations}

    def blamed(self, failed: Result) -> tuple[Result, str]:
        """The failed case, and the configuration that it takes, which stays asked for; "" if it is none's."""
        if self.number:
            own = [each for each in self._known.values() if each.number == int(self.number)]
            failed, wrong = _by_itself(self._cell, self._plan, failed, int(self.number), own)
            return failed, wrong if own else ""
        return failed, ""


@dataclass
class _Judged:
    """``looks``: the cases that show whether there is a tuner; others are like the first. ``known``: name ->
    configuration, of those that a tuner has allowed. ``right``: the names of those that a case has taken, and passed.
    ``done``: what has run, by number. ``chosen``: the cases for blocks.
    """

    cell: Cell
    device: str
    looks: tuple[Case, ...]
    known: dict[str, Configuration] = field(default_factory=dict)
    right: set[str] = field(default_factory=set)
    done: set[tuple[int, Case]] = field(default_factory=set)
    chosen: dict[tuple[int, ...], list[Case]] = field(default_factory=dict)

    def note(self, number: int, case: Case, told: Sequence[Configuration], *, failed: bool) -> None:
        """Note what the tuners said after a case."""
        self.done.add((number, case))
        for own in told:
            self.known[own.name] = replace(own, why=own.why or getattr(self.known.get(own.name), "why", ""))
        self.right |= {own.name for own in told if own.taken and not failed}

    def next(self) -> tuple[int, Case] | None:
        """The next number and its case: the most telling case of each comes first. None if all have run."""
        left = [(-1, 0, case) for case in self.looks if (0, case) not in self.done]
        left = left or [(place, number, case) for number in self.numbers for place, case in self._left(number)]
        return min(left, key=lambda each: each[:2])[1:] if left else None

    @property
    def numbers(self) -> list[int]:
        """Those of the configurations that are known."""
        return sorted({own.number for own in self.known.values()})

    def of(self, number: int) -> list[Configuration]:
        """The configurations of this number, one of each tuner that has it."""
        return [own for own in self.known.values() if own.number == number]

    def _left(self, number: int) -> Iterator[tuple[int, Case]]:
        own = self.of(number)
        blocks = tuple(block for each in own for block in each.blocks)
        if blocks not in self.chosen:
            self.chosen[blocks] = cases_for(self.looks[0], self.cell.claims, blocks, self.device)
        cases = list(enumerate(self.chosen[blocks]))
        left = [(place, case) for place, case in cases if (number, case) not in self.done]
        if not left and any(not (each.why or each.name in self.right) for each in own):  # there it was allowed
            left = [(len(cases), case) for case in self.looks if (number, case) not in self.done]
        yield from left

    def so_far(self, why: str = "no case that was chosen takes them") -> Configured | None:
        """None if no tuner has several. ``why``: why those that are left were not judged."""
        if not self.known:
            return None
        cannot = {f"{own.name} ({own.text})": own.why for own in self.known.values() if own.why}
        launched = [own for own in self.known.values() if not own.why]
        unfinished = {number for number in self.numbers if any(True for _ in self._left(number))}
        judged = sum(own.name in self.right and own.number not in unfinished for own in launched)
        return Configured(judged=judged, allowed=len(launched), cannot=cannot, why=why * (judged < len(launched)))


def are_tried(cell: Cell, plan: Plan) -> bool:
    """Whether the configurations of a cell are judged: in quick those of a user's own kernel, unless somebody asks."""
    if plan.shard[0] != 1 or plan.configs == "won":
        return False
    return _are_owed(plan) or cell.spec not in discovery.implementations()


def unjudged(plan: Plan, found: Configured | None) -> list[str]:
    """What a pass lacks of the configurations that its cell owes, in words."""
    if found is None or not found.why or not _are_owed(plan):
        return []
    return [f"{found.judged} of {found.allowed} configurations were judged: {found.why}"]


def _are_owed(plan: Plan) -> bool:
    return plan.configs == "all" or plan.profile.name in ("ci", "deep")


def each_configuration(cell: Cell, plan: Plan, ran: Sequence[Case], used: float, ask: Ask = UNPROBED) -> Tried:
    """Judge each configuration, until one is wrong: that one the session keeps asking for.

    ``ran``: packed cases that are right; ``used``: the seconds that the cell has taken so far; ``ask``: of what is
    known of the kernel.
    """
    most = plan.profile.dear.most_gpu_seconds if _are_owed(plan) else max(_MOST[0], _MOST[1] * used)
    end = time.perf_counter() + (math.inf if plan.configs == "all" else most)
    packed = [case for case in ran if not case.huge]
    base = chosen(packed, plan.device)[0] if packed else telling(cell.claims, plan.seed)[0]
    fitting = [case for case in packed if _MOST_ELEMENTS[plan.device] >= case.M * case.N]
    widest = max(fitting, key=lambda case: (case.N, -case.M), default=base)  # long rows may have another kernel
    looks = tuple(dict.fromkeys((base, replace(widest, rows=base.rows, dy=base.dy))))
    session, judged = session_of(cell.implementation), _Judged(cell, plan.device, looks)
    upcoming = judged.next()
    while upcoming is not None:
        number, case = upcoming
        session.configure(str(number))
        result = run_surely(cell, case, plan, ask)
        judged.note(number, case, session.configurations, failed=result.failed)
        if result.failed:
            failed, wrong = _by_itself(cell, plan, result, number, judged.of(number), ask)
            return Tried(judged.so_far("one is wrong"), failed, wrong)
        upcoming = judged.next()
        if upcoming is not None and time.perf_counter() > end:
            session.configure("")
            return Tried(judged.so_far("no time was left; --configs all takes it"))
    session.configure("")
    return Tried(judged.so_far())


def _by_itself(
    cell: Cell, plan: Plan, failed: Result, number: int, own: Sequence[Configuration], ask: Ask = UNPROBED
) -> tuple[Result, str]:
    """The failed case, and what it takes: nothing, the configuration of one tuner, or those of all; it stays so.

    ``own``: those of this number.
    """
    session, run = session_of(cell.implementation), partial(run_case, cell, failed.case, plan, ask)
    alone = [] if timed_out(failed) else [("", ""), *((each.name, each.text) for each in own)]
    for name, text in alone:
        session.configure(name)
        if (result := run()).failed:
            return result, f"{name} ({text})" * bool(name)
    session.configure(str(number))
    return failed, f"{number} ({'; '.join(f'{each.kernel}: {each.text}' for each in own)})"


def cases_for(base: Case, claims: Claims, blocks: Sequence[int], device: str) -> list[Case]:
    """Cases for configurations with these blocks, like ``base``, the most telling first: a tail, past each block, at
    it and below it, rows that lie apart, many rows, one column. Which block is one of rows is not known, so the least
    of several is taken for that.
    """
    sizes = sorted({block for block in blocks if _LEAST_BLOCK <= block <= _MOST_BLOCK})
    least, most = (sizes[0] if len(sizes) > 1 else _FEW_ROWS), (sizes[-1] if sizes else _USUAL_BLOCK)
    packed, strided = base.layout, next((own for own in _STRIDED if own in claims.values("layout")), base.layout)
    shapes = [(3, 2 * most + 3, packed), (least + 1, most + 1, strided), (least, most, packed)]
    shapes += [(least - 1, most - 1, packed), (_MANY_ROWS[device] + 1, least + 1, strided), (3, 1, packed)]
    if claims.shapes:
        shapes = [(m, n, base.layout) for m, n in claims.shapes]
    cases = (_with(base, claims, m, n, layout) for m, n, layout in shapes)
    fitting = [case for case in cases if _MOST_ELEMENTS[device] >= case.M * case.N and claims.takes(case)]
    return list(dict.fromkeys(fitting))[:_MOST_CASES]


def _with(base: Case, claims: Claims, m: int, n: int, layout: str) -> Case:
    gap = base.gap if layout == base.layout else _GAP
    return claims.nearest(replace(base, M=m, N=n, layout=layout, gap=gap))
