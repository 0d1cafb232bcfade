"""Line of a cell in the terminal report, printed as soon as the cell is finished, and the progress line until then."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from rich.console import Console

from normcheck.circumstances import HELD, NOT_TRIED, TOLD, WRONG
from normcheck.reports import _text
from normcheck.reports._failure import kind_words
from normcheck.reports._progress import Line, progress_line
from normcheck.reports._ran import changing
from normcheck.reports._ran import lines as lines_of_ran
from normcheck.reports._text import (
    STATUS_STYLES,
    Part,
    compact,
    counted,
    in_ulps,
    percent,
    put,
    put_lines,
    seconds,
    short,
    text_of,
)
from normcheck.result import MOST_REFUSED, SUMS, CellKey, Steadiness, Verdict, Worst

_STANDS_ON = len(" 200 cases, 100 shapes")

MARKS = {"pass": "pass", "thin": "thin", "fail": "FAIL", "skip": "skip", "error": "error"}
INDENT = 6
BUILDING_SECONDS = 1.0
"""A report mentions compiling and the like from so many seconds on."""
_EVERYTHING = 10_000  # characters
VACUOUS = 0.5
"""A report mentions that zeros would pass from this share of an output's elements on."""


@dataclass(frozen=True)
class Columns:
    """Widths of the op, implementation and dtype columns."""

    op: int = 12
    implementation: int = 11
    dtype: int = 4


def columns_of(keys: Iterable[CellKey], room: int) -> Columns:
    """Columns wide enough for ``keys``, if ``room`` characters are enough; a longer name shifts only its own line."""
    planned = [key.words for key in keys]
    if not planned:
        return Columns()
    op, implementation, dtype = (max(len(short(words[i])) for words in planned) for i in range(3))
    spare = max(room - dtype - 2, 0)
    half = spare // 2
    return Columns(min(op, max(spare - implementation, half)), min(implementation, max(spare - op, half)), dtype)


def name_of(key: CellKey) -> str:
    """The name of a cell, each word of it cut if it is long."""
    return " ".join(map(short, key.words))


def stands_on(verdict: Verdict) -> str:
    """What a verdict stands on: ``214 cases, 38 shapes``; without shapes if its report did not count them."""
    cases = counted(verdict.cases, "case")
    return cases if verdict.shapes is None else f"{cases}, {counted(verdict.shapes, 'shape')}"


def worst_of(worst: Iterable[tuple[str, Worst]]) -> tuple[str, Worst] | None:
    """The output with the largest ratio; NaN counts as larger than any number, since it is never right."""
    return max(worst, key=lambda item: (math.isnan(item[1].ratio), item[1].ratio), default=None)


def put_cell(console: Console, verdict: Verdict, columns: Columns, *, verbose: bool = False) -> None:
    """Print the line of a finished cell, and its notes indented below it.

    ``verbose``: also the worst of every output, what the probes measured, and all that was left out.
    """
    mark = "known" if verdict.known else MARKS.get(verdict.status, verdict.status)
    style = "yellow" if verdict.known else STATUS_STYLES.get(verdict.status, "bold")
    op, implementation, dtype = map(short, verdict.key.words)
    name = f"{op:<{columns.op}} {implementation:<{columns.implementation}} {dtype:<{columns.dtype}}"
    parts: list[Part] = [(f"{mark:<{INDENT}}", style), name]
    if verdict.status in ("skip", "error"):
        outcome: list[Part] = [(short(verdict.detail, max(console.width - INDENT - len(name) - 2, 24)), "dim")]
    else:
        parts.append(f" {stands_on(verdict):>{_STANDS_ON}} {seconds(verdict.seconds):>6}")
        outcome = _outcome(verdict)
    if text_of(console, *parts, "  ", *outcome).cell_len <= console.width:
        put(console, *parts, "  ", *outcome)
    else:
        put(console, *parts, hang=INDENT)
        put(console, *outcome, indent=INDENT)
    put_lines(console, verdict.known, indent=INDENT, label="known: ", style="dim")
    if verdict.status == "thin":
        put_lines(console, verdict.detail, indent=INDENT, style="yellow")
    if verdict.core is not None and verdict.core.left_out:
        room = _EVERYTHING if verbose else max(console.width - INDENT, 24)
        put(console, (short(verdict.core.left_out, room), "dim"), indent=INDENT)
    facts = _facts(verdict)
    if facts:
        put(console, ("; ".join(facts), "dim"), indent=INDENT)
    for note in (*_told(verdict), *([] if verbose else changing(verdict.ran)), *verdict.notes):
        put_lines(console, note, indent=INDENT, style="dim")
    for line in measures(verdict) if verbose else ():
        put(console, (line, "dim"), indent=INDENT, hang=2)


def _outcome(verdict: Verdict) -> list[Part]:
    """The worst ratio of the cell; if it failed for another reason than a wrong value, the kind of failure in red."""
    if verdict.failure is not None and verdict.failure.kind != "mismatch":
        return [(kind_words(verdict.failure), "red")]
    worst = worst_of(verdict.worst.items())
    if worst is None:
        return [("nothing compared", "dim")] if verdict.failure is None else [(kind_words(verdict.failure), "red")]
    style = "red" if verdict.status == "fail" else ""
    return ["worst ", (_text.ratio(worst[1].ratio), style), f" {short(worst[0], 20)}"]


def _facts(verdict: Verdict) -> list[str]:
    """Facts for the line below the cell's: what was not returned, not judged, not run, and what the probes showed."""
    facts = []
    if verdict.not_returned:
        facts.append("not returned: " + ", ".join(short(output) for output in verdict.not_returned))
    unjudged = [
        f"{short(output)} {percent(counts.count, counts.total)}"
        for output, counts in verdict.uncheckable.items()
        if counts.count
    ]
    if unjudged:
        facts.append("uncheckable: " + ", ".join(unjudged))
    empty = [
        f"{short(output)} {percent(counts.zeros, counts.total)}"
        for output, counts in verdict.vacuity.items()
        if counts.share >= VACUOUS
    ]
    if empty:
        facts.append("zeros would pass: " + ", ".join(empty))
    facts += _steadiness("other bits when run again", "", verdict.repeats)
    of_rows, of_sums = ({n: c for n, c in verdict.invariance.items() if (n in SUMS) is sums} for sums in (False, True))
    facts += _steadiness("other bits among other rows", "batch invariant", of_rows)
    facts += _steadiness("other bits with padding rows", f"same {' and '.join(of_sums)} with padding rows", of_sums)
    facts += _contexts(verdict)
    facts += _configurations(verdict)
    if verdict.core is not None and verdict.core.refused > MOST_REFUSED:
        facts.append(f"refuses {percent(verdict.core.refused, 1)} of what it declares")
    if verdict.core is not None and verdict.core.building >= BUILDING_SECONDS:
        facts.append(f"{seconds(verdict.core.building)} of compiling and the like")
    if verdict.skipped and verdict.status != "skip":
        facts.append(f"{counted(sum(verdict.skipped.values()), 'case')} skipped")
    if verdict.model:
        declared = (f"{short(key)}={short(str(value))}" for key, value in verdict.model.items())
        facts.append("declares " + ", ".join(declared) + _bought(verdict))
    return facts


def _bought(verdict: Verdict) -> str:
    """What its declarations are worth to a cell that passes: its outputs' ratios to the bounds without them."""
    worst = worst_of(verdict.undeclared.items())
    if verdict.status not in ("pass", "thin") or worst is None:
        return ""
    beyond = [(output, w) for output, w in verdict.undeclared.items() if not w.ratio <= 1]
    ratios = ", ".join(f"{short(output)} up to {_text.ratio(w.ratio)}" for output, w in beyond or [worst])
    return f": {'' if beyond else 'needless here, '}{ratios} of the undeclared bound"


def _steadiness(differs: str, same: str, counts: Mapping[str, Steadiness]) -> list[str]:
    """``differs: dx in 3 of 40``, or ``same in 40 cases``."""
    unsteady = [f"{short(output)} in {c.differ:,} of {c.cases:,}" for output, c in counts.items() if c.differ]
    if unsteady:
        return [f"{differs}: {', '.join(unsteady)}"]
    return [f"{same} in {counted(max(c.cases for c in counts.values()), 'case')}"] if counts and same else []


def _contexts(verdict: Verdict) -> list[str]:
    """``right in 5 contexts``, and which were not tried."""
    held, rest = ([n for n, c in verdict.contexts.items() if c.status == status] for status in (HELD, NOT_TRIED))
    facts = [f"right in {counted(len(held), 'context')}"] * bool(held)
    return facts + [f"not tried: {', '.join(map(short, rest))}"] * bool(rest)


def _configurations(verdict: Verdict) -> list[str]:
    """``12 of 12 configurations judged``, and why not all, and how many cannot be launched."""
    found = verdict.configurations
    if found is None or verdict.failure is not None:  # the search ended with that
        return []
    cannot = f", {counted(len(found.cannot), 'other')} cannot be launched" * bool(found.cannot)
    why = f": {short(found.why)}" * bool(found.why)
    return [f"{found.judged} of {counted(found.allowed, 'configuration')} judged{cannot}{why}"]


def _told(verdict: Verdict) -> Iterator[str]:
    """What is wrong in a context that nobody asked for, and why a kernel cannot be captured."""
    for name, how in verdict.contexts.items():
        if how.status == TOLD or (name == "graph" and how.why and how.status != WRONG):
            yield f"context {short(name)}: {short(how.why, 300)}"


def measures(verdict: Verdict) -> list[str]:
    """A line for each output with its worst and the case of that, and one with what the probes measured of it; a line
    for each context; and what ran."""
    lines = []
    for output, worst in verdict.worst.items():
        numbers = f"ratio {_text.ratio(worst.ratio)}, error {compact(worst.max_abs)}, {in_ulps(worst.max_ulp)}"
        lines.append(f"{short(output, 20)}: {numbers}, in {short(worst.case, 300)}")
        probed = []
        if output in verdict.vacuity:
            zeros = verdict.vacuity[output]
            probed.append(f"zeros would pass {percent(zeros.zeros, zeros.total)}")
        among = "with padding rows" if output in SUMS else "among other rows"
        for what, counts in (("when run again", verdict.repeats), (among, verdict.invariance)):
            if output in counts:
                probed.append(f"other bits {what} in {counts[output].differ:,} of {counts[output].cases:,}")
        if probed:
            lines.append(f"{short(output, 20)}: {', '.join(probed)}")
    for name, how in verdict.contexts.items():
        words = f"context {short(name)}: {how.status}" + f" in {counted(how.cases, 'case')}" * bool(how.cases)
        lines.append(words + f"; {short(how.why, 300)}" * bool(how.why))
    if verdict.configurations is not None:
        for name, why in verdict.configurations.cannot.items():
            lines.append(f"configuration {short(name, 300)}: cannot be launched; {short(why, 300)}")
    return [*lines, *lines_of_ran(verdict.ran)]


class Screen:
    """The terminal while a sweep runs: ``update`` it while a cell runs, give it the ``verdict`` when it is finished.

    ``verbosity``: below 0 no cell has a line, above 0 each has all that was measured.
    """

    def __init__(
        self, console: Console, total: int, columns: Columns, line: Line | None, *, verbosity: int = 0
    ) -> None:
        self._console = console
        self._total = total
        self._columns = columns
        self._line = line
        self._verbosity = verbosity
        self._started = time.monotonic()
        self._done = self._findings = self._cases = 0

    def update(
        self,
        cell_index: int,
        cell: CellKey,
        cases: int,
        worst_ratio: float | None,
    ) -> None:
        """Redraw the progress line, a few times a second at most; in a pipe there is none. Cells count from 0.

        A narrow terminal cuts off the end, so the findings come first, then the cells left, then the present cell.
        """
        now = time.monotonic()
        if self._line is None or not self._line.due(now):
            return
        worst = "" if worst_ratio is None else f", worst {_text.ratio(worst_ratio)}"
        place = f"[{min(cell_index + 1, self._total)}/{self._total}]"
        running = f"{name_of(cell)}  {counted(cases, 'case')}{worst}"
        self._line.draw(f"{place} {seconds(now - self._started)}  {self._so_far(now, cases)}; {running}")

    def _so_far(self, now: float, running: int) -> str:
        """Findings, rate and cells left of the whole sweep; ``running``: cases of the cell that runs."""
        took, cases = now - self._started, self._cases + running
        rate = f", {cases / took:,.0f} cases/s" if took >= 1 else ""  # earlier it means nothing
        left = max(self._total - self._done, 0)
        return f"{counted(self._findings, 'finding')}, {counted(left, 'cell')} left{rate}"

    def verdict(self, verdict: Verdict) -> None:
        """Print the line of a finished cell above the progress line, and redraw that."""
        self._done, self._cases = self._done + 1, self._cases + verdict.cases
        self._findings += verdict.failure is not None
        if self._verbosity >= 0:
            put_cell(self._console, verdict, self._columns, verbose=self._verbosity > 0)
        self.begin()

    def begin(self) -> None:
        """Draw the progress line without a running cell."""
        if self._line is not None:
            now = time.monotonic()
            self._line.draw(f"[{self._done}/{self._total}] {seconds(now - self._started)}  {self._so_far(now, 0)}")


@contextmanager
def live(console: Console, total: int, *, cells: Sequence[CellKey] = (), verbosity: int = 0) -> Iterator[Screen]:
    """Show a sweep of ``total`` cells while it runs. ``cells``: their keys, if known, to align the lines.

    ``verbosity``: as of ``Screen``; below 0 there is no progress line either.
    """
    columns = columns_of(cells, name_room(console))
    with nullcontext() if verbosity < 0 else progress_line(console) as line:
        screen = Screen(console, total, columns, line, verbosity=verbosity)
        screen.begin()  # with several workers, nothing is drawn before a cell is done
        yield screen


def name_room(console: Console) -> int:
    """Characters for op, implementation and dtype in a line that also has the usual numbers."""
    return console.width - INDENT - _STANDS_ON - len("  12.3 s  worst 0.999 bitmask")
