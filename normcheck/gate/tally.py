"""What has been seen of a cell so far, summed up case by case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from normcheck.cases.case import Case
from normcheck.checks.check import Result
from normcheck.errors import one_line
from normcheck.oracle.judge import Checked
from normcheck.oracle.special import is_special
from normcheck.oracle.tolerances import Model
from normcheck.result import Steadiness, Vacuity, Worst

_MOST = 20  # different reasons, and notes, that a report has


@dataclass
class Tally:
    """What has been seen of a cell so far."""

    base: Model
    cases: int = 0
    worst: dict[str, Worst] = field(default_factory=dict)
    uncheckable: dict[str, tuple[int, int]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    backward_refused: Counter[str] = field(default_factory=Counter)
    returned: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    notes: dict[str, None] = field(default_factory=dict)
    declared: dict[str, str] = field(default_factory=dict)
    per_row: float = float("inf")
    vacuity: dict[str, Vacuity] = field(default_factory=dict)
    repeats: dict[str, Steadiness] = field(default_factory=dict)
    invariance: dict[str, Steadiness] = field(default_factory=dict)
    first: Result | None = None
    too_slow: dict[str, None] = field(default_factory=dict)
    failed_at: int = 0
    undeclared: dict[str, Worst] = field(default_factory=dict)

    @property
    def floors(self) -> Mapping[str, float]:
        """Output -> the largest ratio so far: details of a smaller one are not wanted."""
        return {name: worst.ratio for name, worst in self.worst.items()}

    def add(self, result: Result, seconds: float) -> None:
        """Count a case; ``seconds`` is what it took."""
        if result.refused:
            _count_reason(self.refused, result.refused)
            return
        if result.seen.refused:
            _count_reason(self.backward_refused, result.seen.refused)
        self.cases += 1
        self.first = self.first or result
        self.missing.update(result.not_returned)
        self.notes.update(dict.fromkeys(result.notes[: max(0, _MOST - len(self.notes))]))
        if result.case.M >= 8:
            self.per_row = min(self.per_row, seconds / result.case.M)
        for checked in result.checked:
            name, c = checked.output, checked.comparison
            self.returned.add(name)
            if not _is_meant(result.case):
                count, total = self.uncheckable.get(name, (0, 0))
                self.uncheckable[name] = (count + c.uncheckable, total + c.numel)
            self.note(result.case, checked)
            if c.zeros is not None and c.numel > c.uncheckable:
                self._weigh(name, c.zeros, c.numel - c.uncheckable)
        if result.probed is not None:
            _count(self.repeats, result.probed.repeats)
            _count(self.invariance, result.probed.invariant)
        if replace(result.model, reason="") != self.base:  # a reason alone declares nothing
            for key, value in vars(result.model).items():
                if value != getattr(self.base, key):
                    self.declared[key] = one_line(str(value), 500)
        for checked in result.undeclared:
            _keep(self.undeclared, result.case, checked)

    def note(self, case: Case, checked: Checked) -> None:
        """Keep the worst of each output."""
        _keep(self.worst, case, checked)

    def _weigh(self, name: str, zeros: int, total: int) -> None:
        """What zeros would have passed of one check."""
        old = self.vacuity.get(name, Vacuity(zeros=0, total=0, empty=0, checks=0))
        self.vacuity[name] = Vacuity(
            zeros=old.zeros + zeros,
            total=old.total + total,
            empty=old.empty + (zeros == total),
            checks=old.checks + 1,
        )


def _keep(worst: dict[str, Worst], case: Case, checked: Checked) -> None:
    name, c = checked.output, checked.comparison
    if name not in worst or c.ratio > worst[name].ratio:
        worst[name] = Worst(ratio=c.ratio, max_abs=c.max_abs, max_ulp=c.max_ulp, case=str(case))


def _is_meant(case: Case) -> bool:
    """Whether elements without a bound are what the case is about; they do not count as uncheckable."""
    return is_special(case) or case.rows == "largest"


def _count_reason(counts: Counter[str], reason: str) -> None:
    counts[reason if reason in counts or len(counts) < _MOST else "other reasons"] += 1


def _count(counts: dict[str, Steadiness], same: Mapping[str, bool]) -> None:
    for name, steady in same.items():
        old = counts.get(name, Steadiness(differ=0, cases=0))
        counts[name] = Steadiness(differ=old.differ + (not steady), cases=old.cases + 1)
