"""The terminal report of an audit: a line per mutant, the correct kernels, what was not exercised, the score last."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table
from rich.text import Text

from normcheck.audit.score import ERROR, KILLED, NOT_EXERCISED, SURVIVED, Audit, Control, Outcome
from normcheck.errors import ExitCode
from normcheck.reports import _text
from normcheck.reports._progress import progress_line
from normcheck.reports._text import (
    STATUS_STYLES,
    console_for,
    counted,
    put,
    put_lines,
    short,
    table_lines,
    text_of,
)

__all__ = ["console_for", "live", "render"]

MARKS = {KILLED: "killed", SURVIVED: "SURVIVED", ERROR: "ERROR"}
STYLES = {KILLED: STATUS_STYLES["pass"], SURVIVED: STATUS_STYLES["fail"], ERROR: STATUS_STYLES["error"]}
INDENT = 10
LEAST_WHAT = 16
NAMED = 5
"""Mutants named in the last line; the others are counted."""


def render(audit: Audit, console: Console, *, details: bool = False) -> None:
    """Print the report of ``audit``; ``details``: with the description and the source of every mutant."""
    run = {id: cells for id, cells in audit.mutants.items() if audit.status_of(cells) != NOT_EXERCISED}
    header, lines = _lines(console, audit, run)
    if run:
        put(console, header, wrap=False)
    for cells, line in zip(run.values(), lines, strict=True):
        put(console, line, wrap=False)
        if details or (audit.status_of(cells) != KILLED and not audit.recipe):
            _put_details(console, cells)
        if not audit.recipe:
            _put_case(console, cells)
    _put_regimes(console, audit)
    _put_controls(console, audit)
    _put_explanations(console, audit)
    _put_not_exercised(console, audit)
    put(console, "")
    _put_environment(console, audit)
    _put_score(console, audit)


def _lines(console: Console, audit: Audit, run: dict[str, tuple[Outcome, ...]]) -> tuple[Text, list[Text]]:
    """The header, and a line for each mutant of ``run``, with as much of its description as the width has room for."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", min_width=INDENT - 1)
    table.add_column("mutant")
    table.add_column("killed", justify="right")
    table.add_column("finding")
    table.add_column("cases", justify="right")
    table.add_column("slowest", justify="right")
    for id, cells in run.items():
        status = audit.status_of(cells)
        cases, slowest = max(cell.cases for cell in cells), max(cell.seconds for cell in cells)
        numbers = (share(cells), finding_words(cells), f"{cases:,}", _text.seconds(slowest))
        words = (text_of(console, word) for word in (short(id, 32), *numbers))
        table.add_row(text_of(console, (MARKS[status], STYLES[status])), *words)
    header, *lines = table_lines(console, table, wrap=False)
    room = console.width - header.cell_len - len("  ")
    if room >= LEAST_WHAT:
        header = text_of(console, header, ("  what", "dim"))
        whats = (short(cells[0].what, room) for cells in run.values())
        lines = [text_of(console, line, (f"  {what}", "dim")) for line, what in zip(lines, whats, strict=True)]
    return header, lines


def share(cells: Sequence[Outcome]) -> str:
    """How many of the cells that were run were killed: ``3/4``."""
    exercised = [cell for cell in cells if cell.status != NOT_EXERCISED]
    return f"{sum(cell.status == KILLED for cell in exercised)}/{len(exercised)}"


def finding_words(cells: Sequence[Outcome]) -> str:
    """The findings that killed the cells, the most frequent first: ``y, rstd``, ``dx unwritten``."""
    words = [kind_words(cell) for cell in cells if cell.status == KILLED]
    ranked = sorted(dict.fromkeys(words), key=lambda word: -words.count(word))
    return short(", ".join(ranked), 14)


def kind_words(cell: Outcome | Control) -> str:
    """A cell's finding in a few characters: ``dx``, ``y shape``, ``crash``."""
    kind = "" if cell.kind == "mismatch" and cell.output else cell.kind.replace("_", " ")
    return " ".join(word for word in (short(cell.output, 40), kind) if word)


def _put_details(console: Console, cells: tuple[Outcome, ...]) -> None:
    """Print what a mutant is, and the cells that it survived."""
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
    """Print one case that kills the mutant, shrunk. It is on one line however long, so that it can be pasted."""
    killed = next((cell for cell in cells if cell.status == KILLED), None)
    if killed is not None:
        words = f"{kind_words(killed)}: {killed.case or killed.reason}"
        put(console, (words, "dim"), indent=INDENT, wrap=False)


def _cell(cell: Outcome | Control) -> str:
    return f"{short(cell.op)} {short(cell.dtype)}"


def _put_regimes(console: Console, audit: Audit) -> None:
    """Print the score under each regime."""
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
        words = f"{short(control.name)} {_cell(control)}: {kind_words(control)}"
        put(console, (f"{'ACCUSED':<{INDENT}}", STYLES[SURVIVED]), words, hang=INDENT)
        put_lines(console, control.message, indent=INDENT)
        put(console, control.case, indent=INDENT, wrap=False)
    for control in audit.controls:
        if control.reason:
            put(console, f"{short(control.name)} {_cell(control)}: ", (control.reason, "dim"), indent=2, hang=4)


def _put_explanations(console: Console, audit: Audit) -> None:
    """Print how many of the wrong values the diagnosis explained, and those that it explained wrongly."""
    if not audit.asked:
        return
    put(console, "")
    put(console, ("Explanations", "bold"))
    style = STYLES[SURVIVED] if audit.misled else STYLES[KILLED]
    put(console, (explanation_words(audit), style), indent=2, hang=4)
    right, found = len(audit.explained), len(audit.score.killed)
    if found:
        put(console, f"{right:,} of all {found:,} faults that were found ({right / found:.0%})", indent=2, hang=4)
    for cell in audit.misled:
        put(console, (f"{short(cell.id)} {_cell(cell)} was named {short(cell.explanation)}", "red"), indent=4, hang=4)


def explanation_words(audit: Audit) -> str:
    """How many of the faults that were found by a wrong value were named rightly, how many wrongly."""
    asked, right = len(audit.asked), len(audit.explained)
    wrong = f"{len(audit.misled)} wrongly" if audit.misled else "none wrongly"
    return f"named rightly {right:,} of {asked:,} wrong values ({right / asked:.0%}), {wrong}"


def _put_not_exercised(console: Console, audit: Audit) -> None:
    """Print each reason once, with its mutants; with the cell as well if other cells of the mutant were run."""
    reasons: dict[str, dict[str, None]] = {}
    never_run = {id for score in (audit.score, *audit.regimes.values()) for id in score.not_exercised}
    for cell in audit.outcomes:
        if cell.status == NOT_EXERCISED:
            name = short(cell.id) if cell.id in never_run else f"{short(cell.id)} ({_cell(cell)})"
            reasons.setdefault(cell.reason, {})[name] = None
    if not reasons:
        return
    if len(never_run) < len(audit.mutants) or audit.controls:
        put(console, "")
    put(console, ("Not exercised", "bold"))
    for reason, names in reasons.items():
        put(console, f"{', '.join(names)}: ", (reason, "dim"), indent=2, hang=4)


def _put_environment(console: Console, audit: Audit) -> None:
    """Print the profile, the seed and the versions, which a pasted report needs."""
    facts = [f"{short(name, 40)} {short(str(value), 60)}" for name, value in audit.environment.items() if value]
    put(console, (f"{short(audit.profile)} profile, seed {audit.seed}; {', '.join(facts)}".rstrip("; "), "dim"), hang=2)


def _put_score(console: Console, audit: Audit) -> None:
    """Print the last line. It is one line however long, so that ``tail -1`` shows all of it."""
    word, style = summary(audit)
    put(console, (word, style), f"  {score_words(audit)}", wrap=False)


def summary(audit: Audit) -> tuple[str, str]:
    """The outcome in capitals, and its style."""
    if not audit.complete:
        return "INCOMPLETE", "bold yellow"
    if audit.exit_code == ExitCode.NOTHING:
        return "NOTHING EXERCISED", "bold yellow"
    if audit.recipe and audit.exit_code == ExitCode.PASS:
        return "MEASURED", "bold"
    words = {ExitCode.PASS: "pass", ExitCode.FOUND: "fail", ExitCode.BROKEN: "error"}
    status = words[ExitCode(audit.exit_code)]
    return status.upper(), STATUS_STYLES[status]


def score_words(audit: Audit) -> str:
    """The score in one line."""
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
    if audit.asked:
        words.append(explanation_words(audit))
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
    """Show the progress of an audit of ``total`` cells; call the yielded function with each result."""
    counts = {KILLED: 0, SURVIVED: 0, "accused": 0}
    begun, done = time.monotonic(), 0
    with progress_line(console) as line:

        def show(result: Outcome | Control) -> None:
            nonlocal done
            done += 1
            status = result.status if isinstance(result, Outcome) else "accused" if result.accused else ""
            if status in counts:
                counts[status] += 1
            now = time.monotonic()
            if line is not None and line.due(now):
                tally = ", ".join(f"{count:,} {name}" for name, count in counts.items() if count or name == KILLED)
                line.draw(f"[{done:,}/{total:,}] {_text.seconds(now - begun)}  cells: {tally}")

        yield show
