"""An audit, told to people: a line per mutant, the correct kernels, what was not exercised, and the score last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live

from normcheck.audit.score import ERROR, KILLED, NOT_EXERCISED, SURVIVED, Audit, Control, Outcome
from normcheck.reports import _text
from normcheck.reports._text import STATUS_STYLES, console_for, counted, put, put_lines, short, text_of

__all__ = ["console_for", "live", "render"]

MARKS = {KILLED: "killed", SURVIVED: "SURVIVED", ERROR: "ERROR"}
STYLES = {KILLED: STATUS_STYLES["pass"], SURVIVED: STATUS_STYLES["fail"], ERROR: STATUS_STYLES["error"]}
INDENT = 10
LEAST_WHAT = 16
REDRAW_SECONDS = 0.1
NAMED = 5
"""Mutants named in the last line; the others are counted."""


def render(audit: Audit, console: Console, *, details: bool = False) -> None:
    """Print the report of ``audit``; ``details`` shows of every mutant what it is and where it comes from."""
    run = {id: cells for id, cells in audit.mutants.items() if audit.status_of(cells) != NOT_EXERCISED}
    columns = _columns_of(run, console.width)
    if run:
        _put_header(console, columns)
    for id, cells in run.items():
        status = audit.status_of(cells)
        _put_mutant(console, id, status, cells, columns)
        if details or (status != KILLED and not audit.recipe):
            _put_details(console, cells)
        if not audit.recipe:
            _put_case(console, cells)
    _put_regimes(console, audit)
    _put_controls(console, audit)
    _put_not_exercised(console, audit)
    put(console, "")
    _put_environment(console, audit)
    _put_score(console, audit)


@dataclass(frozen=True)
class _Columns:
    """Widths of the id, the cells, the finding, and what is left for what the mutant is: 0 where that says nothing."""

    id: int
    cells: int
    finding: int
    what: int


def _columns_of(run: dict[str, tuple[Outcome, ...]], width: int) -> _Columns:
    ids = max((len(short(id, 32)) for id in run), default=0)
    cells = max((len(_share(own)) for own in run.values()), default=0)
    found = max((len(_found(own)) for own in run.values()), default=0)
    ids, cells, found = max(ids, 6), max(cells + 1, 6), max(found, 7)
    room = width - INDENT - ids - cells - found - len("   1,234 61.0 s   ")
    return _Columns(ids, cells, found, room if room >= LEAST_WHAT else 0)


def _share(cells: Sequence[Outcome]) -> str:
    exercised = [cell for cell in cells if cell.status != NOT_EXERCISED]
    return f"{sum(cell.status == KILLED for cell in exercised)}/{len(exercised)}"


def _found(cells: Sequence[Outcome]) -> str:
    """What the cells were found by, the most frequent first: ``y, rstd``, ``dx unwritten``."""
    words = [_kind_words(cell) for cell in cells if cell.status == KILLED]
    ranked = sorted(dict.fromkeys(words), key=lambda word: -words.count(word))
    return short(", ".join(ranked), 14)


def _kind_words(cell: Outcome | Control) -> str:
    """The kind in a few characters: ``dx``, ``y shape``, ``crash``."""
    kind = "" if cell.kind == "mismatch" and cell.output else cell.kind.replace("_", " ")
    return " ".join(word for word in (short(cell.output, 40), kind) if word)


def _put_header(console: Console, columns: _Columns) -> None:
    names = f"{'mutant':<{columns.id}} {'killed':>{columns.cells}} {'finding':<{columns.finding}} cases slowest"
    put(console, (f"{'':<{INDENT}}{names}{'  what' if columns.what else ''}", "dim"), wrap=False)


def _put_mutant(console: Console, id: str, status: str, cells: tuple[Outcome, ...], columns: _Columns) -> None:
    cases, slowest = max(cell.cases for cell in cells), max(cell.seconds for cell in cells)
    start = (
        f"{short(id, 32):<{columns.id}} {_share(cells):>{columns.cells}} {_found(cells):<{columns.finding}}"
        f" {cases:>5,} {_text.seconds(slowest):>7}"
    )
    what = f"  {short(cells[0].what, columns.what)}" if columns.what else ""
    put(console, (f"{MARKS[status]:<{INDENT}}", STYLES[status]), start, (what, "dim"), wrap=False)


def _put_details(console: Console, cells: tuple[Outcome, ...]) -> None:
    """What a mutant is, and the cells that it survived."""
    put(console, "what:   ", cells[0].what, indent=INDENT, hang=len("what:   "))
    put(console, "source: ", cells[0].source, indent=INDENT, hang=len("source: "))
    for cell in cells:
        if cell.status == SURVIVED:
            promise = "" if cell.promised else ", which this profile does not promise"
            words = f"survived {_cell(cell)}: {counted(cell.cases, 'case')}{promise}; {cell.reason}"
            put(console, (words.rstrip("; "), "red"), indent=INDENT, hang=2)
        elif cell.status == ERROR:
            put_lines(console, f"{_cell(cell)}: {cell.reason}", indent=INDENT, style="magenta")


def _put_case(console: Console, cells: tuple[Outcome, ...]) -> None:
    """One case that kills it, shrunk, on a line however long: it is there to be pasted."""
    killed = next((cell for cell in cells if cell.status == KILLED), None)
    if killed is not None:
        words = f"{_kind_words(killed)}: {killed.case or killed.reason}"
        put(console, (words, "dim"), indent=INDENT, wrap=False)


def _cell(cell: Outcome | Control) -> str:
    return f"{short(cell.op)} {short(cell.dtype)}"


def _put_regimes(console: Console, audit: Audit) -> None:
    """The score under each regime."""
    if not audit.regimes:
        return
    put(console, "")
    put(console, ("Under regimes", "bold"))
    for regime, score in audit.regimes.items():
        style = STYLES[KILLED if len(score.killed) == score.run else SURVIVED]
        skipped = f", {len(score.not_exercised):,} not exercised" if score.not_exercised else ""
        killed = f"killed {len(score.killed):,} of {score.run:,} under {short(regime)}"
        put(console, (killed, style), skipped, indent=2, hang=4)


def _put_controls(console: Console, audit: Audit) -> None:
    if not audit.controls:
        return
    put(console, "")
    kernels = counted(len({control.name for control in audit.controls}), "correct kernel")
    cells, cases = len(audit.controls), sum(control.cases for control in audit.controls)
    accused = _text.percent(len(audit.accused), cells) if audit.accused else ""
    outcome = (f"{len(audit.accused):,} accused ({accused})", "bold red") if accused else "none accused"
    put(console, f"{kernels}, {counted(cells, 'cell')}, {counted(cases, 'case')}: ", outcome)
    for control in audit.accused:
        words = f"{short(control.name)} {_cell(control)}: {_kind_words(control)}"
        put(console, (f"{'ACCUSED':<{INDENT}}", STYLES[SURVIVED]), words, hang=INDENT)
        put_lines(console, control.message, indent=INDENT)
        put(console, control.case, indent=INDENT, wrap=False)
    for control in audit.controls:
        if control.reason:
            put(console, f"{short(control.name)} {_cell(control)}: ", (control.reason, "dim"), indent=2, hang=4)


def _put_not_exercised(console: Console, audit: Audit) -> None:
    """Each reason once, with the mutants that it holds for, and the ops where others of its cells were run."""
    reasons: dict[str, dict[str, None]] = {}
    whole = {id for score in (audit.score, *audit.regimes.values()) for id in score.not_exercised}
    for cell in audit.outcomes:
        if cell.status == NOT_EXERCISED:
            name = short(cell.id) if cell.id in whole else f"{short(cell.id)} ({_cell(cell)})"
            reasons.setdefault(cell.reason, {})[name] = None
    if not reasons:
        return
    if len(whole) < len(audit.mutants) or audit.controls:
        put(console, "")
    put(console, ("Not exercised", "bold"))
    for reason, names in reasons.items():
        put(console, f"{', '.join(names)}: ", (reason, "dim"), indent=2, hang=4)


def _put_environment(console: Console, audit: Audit) -> None:
    """What a pasted report must say of where it comes from."""
    facts = [f"{short(name, 40)} {short(str(value), 60)}" for name, value in audit.environment.items() if value]
    put(console, (f"{short(audit.profile)} profile, seed {audit.seed}; {', '.join(facts)}".rstrip("; "), "dim"), hang=2)


def _put_score(console: Console, audit: Audit) -> None:
    """The last line. It is one line however long, so that ``tail -1`` shows all of it."""
    word, style = _word(audit)
    put(console, (word, style), f"  {_score(audit)}", wrap=False)


def _word(audit: Audit) -> tuple[str, str]:
    if not audit.complete:
        return "INCOMPLETE", "bold yellow"
    if audit.exit_code == 5:
        return "NOTHING EXERCISED", "bold yellow"
    if audit.recipe and audit.exit_code == 0:
        return "MEASURED", "bold"
    words = {0: ("PASS", "pass"), 1: ("FAIL", "fail"), 3: ("ERROR", "error")}
    word, status = words[audit.exit_code]
    return word, STATUS_STYLES[status]


def _score(audit: Audit) -> str:
    if not audit.outcomes and not audit.controls:
        return f"no cell is left of what was asked; {_duration(audit.seconds)}"
    score, regimes = audit.score, tuple(audit.regimes.values())
    by = "" if audit.complete else "stopped before the end; so far "
    by += f"recipe {short(audit.recipe)}: " if audit.recipe else ""
    plain = [cell for cell in audit.exercised if not cell.regime]
    words = [f"{len(score.killed)} of {counted(score.run, 'mutant')} killed ({_cells(plain)})"]
    if regimes:
        under = f"{sum(len(s.killed) for s in regimes):,} of {sum(s.run for s in regimes):,} killed under regimes"
        within = [cell for cell in audit.exercised if cell.regime]
        words = [*(words if any(not cell.regime for cell in audit.outcomes) else []), f"{under} ({_cells(within)})"]
    words[0] = by + words[0]
    if survivors := [id for s in (score, *regimes) for id in s.survivors]:
        unpromised = "" if audit.broken_promises else f", which {short(audit.profile)} does not promise to kill"
        words.append(f"{len(survivors)} survived: {_named(survivors)}{unpromised}")
    if audit.errors:
        words.append(f"{counted(len(audit.errors), 'cell')} not judged")
    if skipped := sum(len(s.not_exercised) for s in (score, *regimes)):
        words.append(f"{skipped} not exercised")
    if audit.controls:
        kernels = counted(len({control.name for control in audit.controls if not control.reason}), "correct kernel")
        accused = list(dict.fromkeys(control.name for control in audit.accused))
        words.append(f"{kernels}: {f'{len(accused)} accused' if accused else 'none accused'}")
    median = f"median {_text.seconds(audit.median_seconds)} a cell, " if audit.exercised else ""
    return f"{', '.join(words)}; {median}{_duration(audit.seconds)}"


def _cells(exercised: Sequence[Outcome]) -> str:
    killed, cells = sum(cell.status == KILLED for cell in exercised), counted(len(exercised), "cell")
    return cells if killed == len(exercised) else f"{killed:,} of {cells}"


def _named(ids: Sequence[str]) -> str:
    more = len(ids) - NAMED
    return ", ".join(short(id, 40) for id in ids[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _duration(seconds: float) -> str:
    """``12.3 s``, ``2 min 10 s``."""
    if not 99.5 <= seconds < math.inf:
        return _text.seconds(seconds)
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:,} min {rest} s"


@contextmanager
def live(console: Console, total: int) -> Iterator[Callable[[Outcome | Control], None]]:
    """Show how far an audit of ``total`` cells is: the function is called with each result as it comes.

    The progress line is one line that goes away, on a terminal only.
    """
    counts = {KILLED: 0, SURVIVED: 0, "accused": 0}
    begun, drawn, done = time.monotonic(), -math.inf, 0

    def update(line: Live, result: Outcome | Control) -> None:
        nonlocal drawn, done
        done += 1
        status = result.status if isinstance(result, Outcome) else "accused" if result.accused else ""
        if status in counts:
            counts[status] += 1
        if (now := time.monotonic()) - drawn < REDRAW_SECONDS:
            return
        drawn = now
        tally = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count or name == KILLED)
        words = f"[{done:,}/{total:,}] {_text.seconds(now - begun)}  cells: {tally}"
        text = text_of(console, (words, "cyan"))
        text.no_wrap, text.overflow = True, "crop"
        line.update(text, refresh=True)

    if not console.is_terminal or console.is_dumb_terminal or not console.file.isatty():
        yield lambda result: None
        return
    line = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)
    with line:
        yield lambda result: update(line, result)
