"""Tally of a cell: the results of its cases summed up one by one, the verdict they give, and notes on its counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from normcheck.cases.case import Case
from normcheck.cases.op import Op
from normcheck.cases.tensor_names import CODES
from normcheck.checks import own_limit
from normcheck.checks.ask import Ask
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.circumstances import Configured, InContext, Ran
from normcheck.errors import one_line
from normcheck.impls import source_location
from normcheck.oracle.conventions import OPEN, Convention, in_words, told_in_fp32
from normcheck.oracle.judge import Checked
from normcheck.oracle.special import is_special
from normcheck.oracle.tolerances import Model, table
from normcheck.result import Finding, Steadiness, Uncheckable, Vacuity, Verdict, Worst, three_digits

_MOST = 20  # different reasons, and notes, in a report

NO_BACKWARD = "no backward ran, so no gradient was checked"


def uncounted(cell: Cell, device: str, status: str, *, detail: str = "", seconds: float = 0.0) -> Verdict:
    """The verdict of a cell before any case is counted, with the file and line that define its implementation."""
    place = source_location.of(cell.implementation)
    bare = Verdict.of(cell.key.on(device), status, detail=detail, seconds=seconds)
    return replace(bare, file=source_location.relative(place.file), line=place.line)


@dataclass
class Tally:
    """Counts over the cases of a cell so far. ``base``: the model of an implementation that declares nothing.

    ``conventions``: those that fit all cases so far, None before a case has fitted any. ``excluded``: each that fitted
    the first of these, ``opened``, and not all -> the first case that it does not fit. ``late``: whether a
    case came in time only when it was run again. ``missing``: output -> in how many cases with rows it was not
    returned; ``returned``: those judged in such a case. ``graphs``: whether y had a graph, where gradients come by
    that -> the first case. ``limits``: reason by which the kernel itself states a limit -> the least size refused.
    ``sizes``: (axis, size) that is required -> how many of its cases were judged, gradients included. ``plain``:
    the packed cases that are right; ``contexts``, ``ran``, ``configurations``:
    as of a verdict. ``wrong``: the configuration that a failure takes, see ``configurations.Tried``.
    """

    base: Model
    cases: int = 0
    shapes: set[tuple[int, int]] = field(default_factory=set)
    worst: dict[str, Worst] = field(default_factory=dict)
    uncheckable: dict[str, tuple[int, int]] = field(default_factory=dict)
    refused: Counter[str] = field(default_factory=Counter)
    backward_refused: Counter[str] = field(default_factory=Counter)
    returned: set[str] = field(default_factory=set)
    missing: Counter[str] = field(default_factory=Counter)
    graphs: dict[bool, Result] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    sizes: dict[tuple[str, int], int] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    declared: dict[str, str] = field(default_factory=dict)
    vacuity: dict[str, Vacuity] = field(default_factory=dict)
    repeats: dict[str, Steadiness] = field(default_factory=dict)
    invariance: dict[str, Steadiness] = field(default_factory=dict)
    first: Result | None = None
    too_slow: dict[str, None] = field(default_factory=dict)
    failed_at: int = 0
    undeclared: dict[str, Worst] = field(default_factory=dict)
    spread: dict[str, dict[str, float]] = field(default_factory=dict)
    conventions: tuple[Convention, ...] | None = None
    opened: Case | None = None
    excluded: dict[Convention, Case] = field(default_factory=dict)
    late: bool = False
    plain: list[Case] = field(default_factory=list)
    contexts: dict[str, InContext] = field(default_factory=dict)
    ran: list[Ran] = field(default_factory=list)
    configurations: Configured | None = None
    wrong: str = ""

    @property
    def ask(self) -> Ask:
        """How the next case is run, by what is known. A kernel that hangs now and then does so twice: no patience."""
        return Ask(floors=self.floors, conventions=self.conventions, patient=not self.late)

    @property
    def floors(self) -> Mapping[str, float]:
        """Output -> the largest ratio so far; the judge leaves out the details of a smaller one."""
        return {name: worst.ratio for name, worst in self.worst.items()}

    def add(self, result: Result) -> None:
        """Count a case."""
        for reason in filter(None, (result.refused, result.seen.refused)):
            axis = own_limit.axis_of(reason)
            if axis:
                size = getattr(result.case, axis)
                self.limits[reason] = min(size, self.limits.get(reason, size))
        if result.refused:
            _count_reason(self.refused, result.refused)
            return
        if result.seen.refused:
            _count_reason(self.backward_refused, result.seen.refused)
        self.cases += 1
        self.contexts.update(result.contexts)
        self.late |= result.late
        self.shapes.add((result.case.M, result.case.N))
        for axis, size in self.sizes:
            self.sizes[axis, size] += getattr(result.case, axis) == size and not result.seen.refused
        self.first = self.first or result
        packed = result.case.layout == "contiguous" and result.case.M > 0
        if packed and not (result.failed or result.seen.refused or is_special(result.case)):
            self.plain.append(result.case)
        self.missing.update(result.not_returned if result.case.M else dict.fromkeys(result.not_returned, 0))
        if result.has_graph is not None:
            self.graphs.setdefault(result.has_graph, result)
        self.notes.update(dict.fromkeys(result.notes[: max(0, _MOST - len(self.notes))]))
        for checked in result.checked:
            name, c = checked.output, checked.comparison
            if result.case.M:
                self.returned.add(name)
            if not _lacks_bounds(result.case):
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
                if value not in (getattr(self.base, key), OPEN) and key not in result.open:
                    self.declared[key] = one_line(str(value), 500)
        for checked in result.undeclared:
            _keep(self.undeclared, result.case, checked)
        if result.conventions and not result.failed:
            self._exclude(result.case, result.conventions)

    def _exclude(self, case: Case, fitting: tuple[Convention, ...]) -> None:
        """Count the conventions that a case fits."""
        if self.conventions is None:
            self.conventions, self.opened = fitting, case
        self.excluded.update({each: case for each in self.conventions if each not in fitting})
        self.conventions = tuple(each for each in self.conventions if each in fitting)

    def note(self, case: Case, checked: Checked) -> None:
        """Keep the worst of each output, and of all outputs at each value of each axis."""
        _keep(self.worst, case, checked)
        ratio = three_digits(checked.comparison.ratio)
        for axis, value in _axes(case).items():
            by_value = self.spread.setdefault(axis, {})
            by_value[value] = max(by_value.get(value, 0.0), ratio)

    def verdict(self, bare: Verdict, op: Op, failure: Finding | None) -> Verdict:
        """``bare``, a verdict of no case, with the counts of all cases: fail if there is a ``failure``, else pass."""
        uncheckable = {name: Uncheckable(count=count, total=total) for name, (count, total) in self.uncheckable.items()}
        notes = [*self.notes, *self._limits()]
        if self.too_slow:
            notes.append(f"not run, too slow for this profile: {', '.join(self.too_slow)}")
        if self.conventions and failure is None:
            notes += in_words(op, told_in_fp32(self.conventions) if bare.dtype == "fp32" else self.conventions)
        notes += derived(uncheckable, self.vacuity, self.backward_refused, self.cases)
        absent = self.missing.keys() - (self.returned if failure is None else self.worst.keys())
        for name in [name for name in op.outputs if self.missing[name] and name in self.returned]:
            notes.append(f"{name} was not returned in {self.missing[name]:,} cases, and not checked there")
        return replace(
            bare,
            status="pass" if failure is None else "fail",
            detail="" if failure is None else failure.message,
            cases=self.cases,
            worst={name: worst for name, worst in self.worst.items() if name not in absent},
            not_returned=tuple(name for name in (*op.outputs, *op.gradients(weight=True, bias=True)) if name in absent),
            failure=failure,
            uncheckable=uncheckable,
            skipped=dict(self.refused),
            model=dict(self.declared),
            notes=tuple(notes),
            vacuity=dict(self.vacuity),
            repeats=dict(self.repeats),
            invariance=dict(self.invariance),
            failed_at=None if failure is None else self.failed_at,
            backward_refused=dict(self.backward_refused),
            undeclared=dict(self.undeclared),
            shapes=len(self.shapes),
            spread={axis: dict(values) for axis, values in self.spread.items()},
            limits=self._least_refused(),
            sizes={f"{axis}={size}": count for (axis, size), count in self.sizes.items()},
            contexts=dict(self.contexts),
            ran=tuple(self.ran),
            configurations=self.configurations,
        )

    def _least_refused(self) -> dict[str, int]:
        """Axis -> the least size of it that the kernel itself refuses."""
        least: dict[str, int] = {}
        for reason, size in self.limits.items():
            axis = own_limit.axis_of(reason)
            least[axis] = min(size, least.get(axis, size))
        return least

    def _limits(self) -> Iterator[str]:
        """The limits that the kernel itself states, in words."""
        for reason, least in self.limits.items():
            sizes = (m if own_limit.axis_of(reason) == "M" else n for m, n in self.shapes)
            yield own_limit.in_words(reason, least, max(sizes, default=0))

    def skipped(self, bare: Verdict, otherwise: str) -> Verdict:
        """``bare`` as a skip, with why the cases were refused; ``otherwise``: its detail if none was refused."""
        detail = refusals(self.refused) or otherwise
        return replace(bare, status="skip", detail=detail, skipped=dict(self.refused))

    def _weigh(self, name: str, zeros: int, total: int) -> None:
        """Count the elements of one check of output ``name`` for which zeros would have passed."""
        old = self.vacuity.get(name, Vacuity(zeros=0, total=0, empty=0, checks=0))
        self.vacuity[name] = Vacuity(
            zeros=old.zeros + zeros,
            total=old.total + total,
            empty=old.empty + (zeros == total),
            checks=old.checks + 1,
        )


def _axes(case: Case) -> dict[str, str]:
    """Where a case lies on each axis of a spread, see ``Verdict``."""
    sizes = {name: str(1 << n.bit_length() - 1 if n else 0) for name, n in (("M", case.M), ("N", case.N))}
    eps = f"1e{math.floor(math.log10(case.eps)):+03d}" if case.eps > 0 else "0"
    return {**sizes, "eps": eps, "rows": case.rows, "dy": case.dy, "layout": case.layout}


def _keep(worst: dict[str, Worst], case: Case, checked: Checked) -> None:
    name, c = checked.output, checked.comparison
    if name not in worst or c.ratio > worst[name].ratio:
        worst[name] = Worst(ratio=c.ratio, max_abs=c.max_abs, max_ulp=c.max_ulp, case=str(case))


def _lacks_bounds(case: Case) -> bool:
    """Whether a case is meant to have elements without a finite bound, which then do not count as uncheckable."""
    return is_special(case) or case.rows == "largest"


def _count_reason(counts: Counter[str], reason: str) -> None:
    counts[reason if reason in counts or len(counts) < _MOST else "other reasons"] += 1


def _count(counts: dict[str, Steadiness], same: Mapping[str, bool]) -> None:
    for name, steady in same.items():
        old = counts.get(name, Steadiness(differ=0, cases=0))
        counts[name] = Steadiness(differ=old.differ + (not steady), cases=old.cases + 1)


def derived(
    uncheckable: Mapping[str, Uncheckable], vacuity: Mapping[str, Vacuity], refused: Mapping[str, int], cases: int
) -> list[str]:
    """Notes on outputs of which too little, or nothing, was checked.

    ``refused``: reason -> in how many of the ``cases`` backward was refused for it.
    """
    limit = table().max_uncheckable
    notes = []
    if refused:
        none = sum(refused.values()) == cases
        notes.append(f"{NO_BACKWARD if none else 'gradients not checked where it was refused'}: {refusals(refused)}")
    for name, u in uncheckable.items():
        if name == CODES:
            notes.append(f"{1 - u.share:.1%} of the codes were decided: one alone is right; of the others several are")
        elif u.share > limit and name != "bitmask":  # the definition of the op leaves a bit in doubt open
            notes.append(f"{u.share:.1%} of {name} could not be checked: its bound is not finite there")
    notes += [f"{name} was not checked: zeros in its place would have passed" for name in empty_outputs(vacuity)]
    return notes


def empty_outputs(vacuity: Mapping[str, Vacuity]) -> list[str]:
    """The outputs for which zeros would have passed every check: nothing is known of them."""
    return [name for name, v in vacuity.items() if v.empty == v.checks]


def refusals(refused: Mapping[str, int]) -> str:
    """Why cases were refused, and how many for each reason; "" if none was.

    A reason begins with what the cases have, if it is known: "layout=strided: raised ...". What is alike is said once.
    """
    alike: dict[str, list[str]] = {}
    for reason in refused:
        alike.setdefault(reason.partition(": ")[2] or reason, []).append(reason)
    words = []
    for why, reasons in alike.items():
        has = " or ".join(reason.removesuffix(f": {why}") for reason in reasons)
        said = why if reasons == [why] else f"{has}: {why}"
        words.append(f"{said} ({sum(refused[reason] for reason in reasons)} cases)")
    return "; ".join(words)
