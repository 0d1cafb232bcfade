"""The plain order: the cases of a core as they are drawn, in which nothing depends on time but the extent on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any

from normcheck.cases.axes import Pair, Value
from normcheck.cases.claims import Claims
from normcheck.cases.core import at_most, drawn
from normcheck.cases.design import ALL_OPENED
from normcheck.cases.goals import Goals, goals
from normcheck.cases.planned import Planned, goals_of
from normcheck.cases.sizes import Extent
from normcheck.planner.must import Limits
from normcheck.planner.own import Own
from normcheck.planner.record import Record
from normcheck.planner.refusals import Refusals

_SHARE = 0.5
"""The cases of a core may be expected to take this share of its time: what a case costs is the least that was seen."""


@dataclass(frozen=True)
class Step:
    """A case to run. ``number``: its place in the sequence of all shards; ``own``: whether this shard counts it;
    ``again``: it repeats the one before, to tell what is built.
    """

    planned: Planned
    number: int
    own: bool
    again: bool = False


class Plain:
    """Draws the core of one seed, and draws the rest anew without what was refused.

    Shards share one sequence: all of them run its opening, which shows what is refused, and then each runs its own part
    of the rest, which is not drawn anew. ``fits``: whether the extent may become smaller than the ``usual`` one, on a
    CPU whose rows or columns take long. ``number``: of the latest case; ``opened``: whether the opening is over;
    ``skipped``: cases for which a core has no time; ``elsewhere``: goals that other shards cover.
    """

    def __init__(
        self,
        refusals: Refusals,
        usual: Extent,
        seed: int,
        limits: Limits,
        own: Own,
        record: Record,
        *,
        shard: tuple[int, int],
        fits: bool,
    ) -> None:
        self._refusals, self._usual, self._seed, self._limits = refusals, usual, seed, limits
        self._own, self._record, self._shard, self._may_fit = own, record, shard, fits and shard[1] == 1
        self.extent, self.number, self.opened = usual, -1, False
        self.skipped: list[Planned] = []
        self.elsewhere: set[Value | Pair] = set()
        self._used = 0
        self.draw()

    def goals(self, claims: Claims) -> Goals:
        """The goals of these claims."""
        return goals(claims, self.extent, self._seed)

    @property
    def done(self) -> frozenset[Any]:
        """The goals that no case need cover any more."""
        return frozenset(self._record.done | self._refusals.given_up)

    def draw(self) -> None:
        """Draw the cases for what is not done."""
        self._drawn_with = self._refusals.claims
        self.drawn_for, self._rest = self._refusals.version, self._drawn(self.extent)
        self._head = next(self.rest(), None)

    def _drawn(self, extent: Extent) -> Iterator[Planned]:
        used = ALL_OPENED + self._refusals.combinations if self.opened else self._used
        return drawn(self._refusals.claims, extent, self._seed, done=self.done, used=used)

    def _allowed(self, extent: Extent) -> Iterator[Planned]:
        """As many cases as may run: no more are ever made."""
        return (planned for _, planned in zip(range(self._limits.cases), self._drawn(extent), strict=False))

    @property
    def upcoming(self) -> Planned | None:
        """The case that comes next if the present one changes nothing."""
        return self._head

    def coming(self, most: int) -> list[Planned]:
        """So many of the cases that ``next`` would return; [] while the core is opened."""
        if not self.opened or self._shard[1] > 1:
            return []
        takes = self._refusals.claims.takes
        return [planned for planned in islice(self.rest(), most) if takes(planned.case) and self._has_time(planned)]

    def rest(self) -> Iterator[Planned]:
        """The cases that are still to come."""
        return copy(self._rest)

    @property
    def at_most(self) -> int:
        """No more cases than these are still to come, of which none is made to tell."""
        return at_most(self._drawn_with, self.extent, self._seed)

    def next(self) -> Step | None:
        """The next case of this shard for which a core has time; None if there is none."""
        if not self.opened and not (self._head and self._head.opens):
            self.opened = True
            if not self._fit() and self.drawn_for != self._refusals.version:
                self.draw()
        while self._head is not None or self._drawn_again() or self._fit():
            planned = self._pop()
            self.number += 1
            self._used = max(self._used, planned.opens)
            if not self._refusals.claims.takes(planned.case):
                continue
            own = self.number % self._shard[1] == self._shard[0] - 1
            if not own and self.opened:
                self.elsewhere |= goals_of(planned)
            elif self._has_time(planned):
                return Step(planned, self.number, own)
            else:
                self.skipped.append(planned)
        return None

    def _has_time(self, planned: Planned) -> bool:
        return self._record.core + self._own.seconds(planned, most=True) <= self._limits.core

    def let_go(self) -> Iterator[Planned]:
        """The cases that are still to come, each of which comes no more once it was given."""
        for planned in self._rest:
            if self._refusals.claims.takes(planned.case):
                yield planned

    def _pop(self) -> Planned:
        taken, self._head = next(self._rest), next(self.rest(), None)
        return taken

    def _drawn_again(self) -> bool:
        """Draw cases for the goals of refused ones, without the refused values. Returns whether there are any."""
        if self.drawn_for == self._refusals.version or self._shard[1] > 1 or not self.opened:
            return False
        self.draw()
        return self._head is not None

    def _fit(self) -> bool:
        """Take the extent that is affordable, and draw if it is another; returns whether there is a case of it. A cost
        may turn out to be less than it seemed: it is asked again when a core that had to be smaller is at its end.
        """
        if not self._may_fit or not self.opened:
            return False
        extent = affordable(self._usual, self._own, self._limits.core - self._record.core, self._allowed)
        if extent == self.extent:
            return False
        self.extent = extent
        self.draw()
        return self._head is not None


def affordable(usual: Extent, own: Own, seconds: float, cases: Callable[[Extent], Iterable[Planned]]) -> Extent:
    """The ``usual`` extent, or a smaller one whose ``cases`` are expected to fit in the ``seconds`` of a core."""
    for extent in _smaller(usual, columns_cost=own.rate("column") > 0):
        left = _SHARE * seconds
        for planned in cases(extent):
            left -= own.seconds(planned, most=True)
            if left < 0:
                break
        else:
            return extent
    return extent


def _smaller(usual: Extent, *, columns_cost: bool) -> Iterable[Extent]:
    """This extent, and smaller ones for a kernel whose rows, columns or both take long."""
    for rows in (usual, usual.with_costly_rows, usual.with_dear_rows):
        yield from (rows, rows.with_dear_columns) if columns_cost else (rows,)


def left_out(extent: Extent, usual: Extent, own: Own) -> str:
    """What ``extent`` has not of the ``usual`` one, and why; "" if nothing."""
    rows, columns = (f"a {unit} costs {own.rate(unit) * 1e3:.2g} ms here" for unit in ("row", "column"))
    parts = []
    if extent.rows < usual.rows:
        parts.append(f"no M above {extent.rows} in the core: {rows}")
    elif extent.paired_rows < usual.paired_rows:
        parts.append(f"M above {extent.paired_rows} in few cases of the core: {rows}")
    if extent.fine != usual.fine:
        what = f"no N above {extent.columns}, and not every layout and dy in each width, in the core"
        parts.append(f"{what}: {columns}")
    return "; ".join(parts)
