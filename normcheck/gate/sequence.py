"""The sequence of one cell, for verify and compare: its core, cases that are named, and then drawn ones."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise, takewhile
from typing import NamedTuple

from normcheck.cases.beyond import (
    extreme,
    far_apart,
    full_blocks,
    huge,
    large,
    many,
    model_sizes,
    of_size,
    rows_between,
    splits_of_models,
)
from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.planned import Planned
from normcheck.cases.strategies import choices, endless
from normcheck.checks.cell import Cell
from normcheck.gate.plan import Plan
from normcheck.gate.requirements import sizes_required
from normcheck.gate.shrink import seed_of
from normcheck.planner.plain import Step
from normcheck.planner.planner import Planner

ROWS_EVERY = 8
"""After the core every eighth case has the probes of rows, and every second those of memory: they cost runs."""

_MEMORY_EVERY = 2

_QUICK_ELEMENTS = 1 << 20
"""Large cases up to so many elements come before all others: on a busy machine there is time for few."""

_DEEP_SHARE = 1 / 8
"""A large case is probed if that is expected to take no more than this share of the time that is left."""


@dataclass(frozen=True)
class Asked:
    """A case to run. ``step``: as the planner has it, None after the core; ``is_large``: it may take too long for the
    time that is left; ``upcoming``: the case that comes next, if that is known.
    """

    planned: Planned
    step: Step | None = None
    is_large: bool = False
    upcoming: Case | None = None

    @property
    def own(self) -> bool:
        """Whether this shard counts it: others run the opening of a core to learn what is refused."""
        return self.step is None or self.step.own


class _After(NamedTuple):
    """A case after the core, whether it is large, and of those that are drawn the next one."""

    case: Case
    is_large: bool = False
    upcoming: Case | None = None


class Sequence:
    """Gives the cases of ``cell`` one by one; ``saw`` takes what came of each before the next.

    Each case has a ``number``, even if another shard runs it, so that all shards share one sequence. It ends when the
    time is over, or when as many cases as the plan allows were run: ``count`` tells how many. What a profile allows
    beyond a whole core cuts short those that are drawn, not the large ones before them.
    """

    def __init__(self, cell: Cell, plan: Plan, core: Planner, count: Callable[[], int], *, large: bool = True) -> None:
        self._cell, self._plan, self._core, self._count, self._large = cell, plan, core, count, large
        self._seed, self._end = seed_of(cell, plan.seed), math.inf
        self._rest: Iterator[_After] | None = None  # once the core is over
        self._drawn: deque[_After] = deque()  # those of the rest that were looked at before their turn
        self.number = -1

    def __iter__(self) -> Iterator[Asked]:
        core, most, (shard, shards) = self._core, self._plan.most, self._plan.shard
        while (self._count() if shards == 1 else core.length) < most and (step := core.next()) is not None:
            self.number = step.number
            yield Asked(step.planned, step, upcoming=core.upcoming)
        self.number = (self._count() if shards == 1 else core.length) - 1
        is_cut = self._plan.is_limited or self.number + 1 >= most
        self._rest = self._after()
        while (following := self._following()) is not None:
            is_drawn, is_late = following.upcoming is not None, self.seconds_left < 0
            if (self.number + 1 >= most and (is_cut or is_drawn)) or (is_late and is_drawn):
                return
            if is_late and not following.is_large:
                continue
            self.number += 1
            if self.number % shards == shard - 1:
                yield Asked(self._planned(following), is_large=following.is_large, upcoming=following.upcoming)

    def coming(self, most: int) -> list[Planned]:
        """So many of the cases that come next if the present one changes nothing; [] if that is not known.

        Without large ones: two of them side by side wait for the memory, and for each other's threads.
        """
        if self._rest is None:
            return self._core.coming(most)
        if self._core.is_priced or self._plan.shard != (1, 1):
            return []
        self._drawn.extend(islice(self._rest, max(0, most - len(self._drawn))))
        numbered = enumerate(islice(self._drawn, most), self.number + 1)
        return [Planned(each.case, _probe(number)) for number, each in numbered if not each.is_large]

    def _planned(self, following: _After) -> Planned:
        """A case after the core as deep as its number says, but a large one once if more takes long."""
        planned = Planned(following.case, _probe(self.number))
        is_slow = following.is_large and self._core.prices.own.runs_of_large(planned) > _DEEP_SHARE * self.seconds_left
        return replace(planned, probe=Depth.REASON) if is_slow else planned

    def _following(self) -> _After | None:
        assert self._rest is not None
        return self._drawn.popleft() if self._drawn else next(self._rest, None)

    def saw(self, asked: Asked, *, refused: bool, seconds: float) -> None:
        """Take what came of a case, which took so many ``seconds``."""
        if asked.step is not None:
            self._core.saw(asked.step, refused=refused, seconds=seconds)
        else:
            self._core.saw_another(asked.planned.case, asked.planned.probe, refused=refused, seconds=seconds)

    @property
    def seconds_left(self) -> float:
        """Seconds that are left for the cases after the core; no end until they have begun."""
        return self._end - time.perf_counter()

    def is_too_slow(self, asked: Asked) -> bool:
        """Whether a large case is not expected to fit into the time that is left."""
        return asked.is_large and self._core.prices.own.runs_of_large(asked.planned) > self.seconds_left

    @property
    def _share_left(self) -> float:
        return self._plan.profile.large_share * self.seconds_left

    def _after(self) -> Iterator[_After]:
        """The cases after the core."""
        plan, core = self._plan, self._core
        if self._large:
            for case in huge(core.claims, plan.profile.powers if plan.device == "cuda" else ()):
                yield _After(case, True)  # each waits for its turn at the memory, which is not the cell's time
        self._end = time.perf_counter() + _seconds_after(core, plan)
        for case, is_large in self._named():
            if (self._large or not is_large) and core.is_worth(case, self._share_left):
                yield _After(case, is_large)
        for case, upcoming in pairwise(endless(choices(core.claims), self._seed)):
            yield _After(core.where_paid(case, self._share_left), upcoming=upcoming)

    def _named(self) -> Iterator[tuple[Case, bool]]:
        """(case, whether it is large) between the core and the drawn cases; first of the sizes required."""
        claims, profile, on_gpu = self._core.claims, self._plan.profile, self._plan.device == "cuda"
        for axis, size in sizes_required(self._plan.required, self._cell.implementation.name):
            for case in of_size(claims, axis, size, self._seed):
                yield case, True
        for case in (*full_blocks(claims, self._seed), *splits_of_models(claims, self._seed)):
            yield case, False
        by_size = list(large(claims, self._plan.device, profile.large_times if on_gpu else 1, self._seed))
        quick = list(takewhile(lambda case: case.M * case.N <= _QUICK_ELEMENTS, by_size))
        for case in (*quick, *many(claims, self._seed, claims.layouts[0])):
            yield case, True
        for case in far_apart(claims) if on_gpu else ():
            yield case, False
        for case in model_sizes(claims, self._seed):
            yield case, False
        for case in rows_between(claims, self._seed):
            yield case, not case.small
        for case in extreme(claims, self._seed) if on_gpu and profile.powers else ():
            yield case, True
        for case in by_size[len(quick) :]:
            yield case, True
        for case in many(claims, self._seed, "strided") if claims.layouts[0] != "strided" else ():
            yield case, True


def _seconds_after(core: Planner, plan: Plan) -> float:
    """Seconds for the cases after a core: half as many in a run of many cells, fewer if building took all the time."""
    seconds = plan.profile.seconds
    most = seconds if plan.profile.dear.share == 1.0 else seconds / 2
    return min(most, max(seconds / 4, seconds / 2 + core.seconds_left)) if core.is_priced else most


def _probe(number: int) -> Depth:
    """How deep the probes go of a case after the core."""
    if number % ROWS_EVERY == 0:
        return Depth.ROWS
    return Depth.REASON if number % _MEMORY_EVERY else Depth.MEMORY
