"""Terminal report, for people: a line per cell, a block per failure, what was not checked, and one line for all.

``write`` writes the whole report to any stream. The command line shows cells while they run (``live``) and then calls
``render`` for the rest; ``normcheck repro`` calls ``render_case``.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TextIO

from rich.console import Console
from rich.table import Table

from normcheck.circumstances import InContext
from normcheck.errors import cut
from normcheck.reports import _text
from normcheck.reports._cells import Screen, columns_of, live, name_of, name_room, put_cell
from normcheck.reports._failure import kind_words, put_failure
from normcheck.reports._reasons import case_reasons, reasons
from normcheck.reports._remedies import REMEDIES
from normcheck.reports._summary import is_of_doctor, put_summary
from normcheck.reports._text import (
    LONGEST_MESSAGE,
    STATUS_STYLES,
    Part,
    compact,
    console_for,
    counted,
    lines_of,
    put,
    put_lines,
    short,
    table_lines,
    text_of,
    ulps,
)
from normcheck.reports.report import Report
from normcheck.result import ASLEEP, IMPORT, MEMORY, CellKey, Finding, SweepResult, Verdict

__all__ = ["REPORT", "Screen", "console_for", "live", "render", "render_case", "render_skip", "write"]

Row = tuple[str, str, float, float, float, int]
"""One check of a case: output, check, ratio, max_abs, max_ulp, elements that could not be judged."""


def write(run: SweepResult, stream: TextIO) -> None:
    """Write the whole report of ``run``."""
    render(run, console_for(stream))


def render(run: SweepResult, console: Console, *, cells: bool = True, verbosity: int = 0) -> None:
    """Print the report of ``run``; ``cells=False`` leaves out the lines that ``live`` has printed.

    ``verbosity``: below 0 only failures, messages and the last line; above 0 also all that was measured, and a finding
    of several dtypes in each of them.
    """
    cells = cells and verbosity >= 0
    if cells:
        columns = columns_of((verdict.key for verdict in run.verdicts), name_room(console))
        for verdict in run.verdicts:
            put_cell(console, verdict, columns, verbose=verbosity > 0)
    alike = _alike(run.verdicts, each=verbosity > 0)
    for verdict in run.verdicts:
        if verdict.failure is not None:
            if verdict.key in alike:
                put(console, "")
                others = {short(other.dtype): found for other in alike[verdict.key] if (found := other.failure)}
                put_failure(console, name_of(verdict.key), verdict.failure, known=verdict.known, others=others)
        elif verdict.status == "fail":
            put(console, "")
            put(console, ("FAIL", "bold red"), (f" {name_of(verdict.key)}", "bold"))
            put_lines(console, verdict.detail, indent=2)
    _put_section(console, "Not imported", reasons(run, "error", IMPORT), step="what else was asked for was checked.")
    _put_section(console, "Not judged, because the kernel slept", reasons(run, "error", ASLEEP))
    _put_section(console, "Not judged, because memory ran out", reasons(run, "error", MEMORY))
    _put_section(console, "Not judged, because normcheck failed", reasons(run, "error"), step=f"{REMEDIES['']}.")
    if verbosity >= 0:
        doctor = "normcheck doctor says what to do about each." if any(map(is_of_doctor, run.verdicts)) else ""
        _put_section(console, "Not run", reasons(run, "skip"), step=doctor)
        _put_section(console, "Cases not run", case_reasons(run, every=verbosity > 0))
    if run.messages:
        put(console, "")
    for message in run.messages:
        put_lines(console, message)
    if verbosity >= 0:
        put(console, "")
        _put_environment(console, run)
    put_summary(console, run)


def _alike(verdicts: Sequence[Verdict], *, each: bool) -> dict[CellKey, list[Verdict]]:
    """Of failed verdicts that show one finding in several dtypes, the key of the first -> the others.

    ``each``: each has a finding of its own.
    """
    alike: dict[Hashable, list[Verdict]] = {}
    for verdict in verdicts:
        if verdict.failure is not None:
            alike.setdefault(verdict.key if each else _apart_from_dtype(verdict, verdict.failure), []).append(verdict)
    return {first.key: others for first, *others in alike.values()}


def _apart_from_dtype(verdict: Verdict, finding: Finding) -> Hashable:
    """What makes a finding in two dtypes one: the same known fault, or the same place in the same case.

    Numbers of a mismatch differ with the dtype; in an exception's message they may be what matters.
    """
    cell = (
        verdict.op,
        verdict.implementation,
        verdict.known,
        finding.kind,
        finding.output,
        finding.check,
        finding.cause,
    )
    if finding.explanation is not None:
        return *cell, finding.explanation.name, finding.explanation.only
    case, reproduce = (text.replace(f" {verdict.dtype} ", " ") for text in (finding.case, finding.reproduce))
    place = finding.where and replace(finding.where, ratios=())
    told = "" if finding.mismatched is not None else finding.message
    return *cell, case, reproduce, place, told, finding.also, finding.advice, finding.traceback


def _put_section(console: Console, title: str, found: dict[str, list[tuple[Verdict, str]]], *, step: str = "") -> None:
    """Print each reason once, with the cells that it holds for; dtypes of one op and implementation together.

    ``step``: what to do next, "" if another section has it.
    """
    if not found:
        return
    put(console, "")
    put(console, (title, "bold"))
    for reason, cells in found.items():
        together: dict[str, list[str]] = {}
        for verdict, count in cells:
            dtypes = together.setdefault(f"{short(verdict.op)} {short(verdict.implementation)}", [])
            dtypes.append(short(verdict.dtype) + count)
        names = "; ".join(f"{name} {', '.join(dtypes)}" for name, dtypes in together.items())
        if len(lines_of(reason)) == 1:
            put(console, f"{names}: ", (cut(reason, LONGEST_MESSAGE).strip(), "dim"), indent=2, hang=4)
        else:
            put(console, f"{names}:", indent=2, hang=4)
            put_lines(console, reason, indent=4, style="dim")
    if step:
        put(console, (f"Next: {step}", "dim"), indent=2)


def _put_environment(console: Console, run: SweepResult) -> None:
    """Print profile, seed and versions, so that a pasted report shows where it comes from."""
    facts = [f"{short(name, 40)} {short(str(value), 60)}" for name, value in run.environment.items() if value]
    put(console, (f"{short(run.profile)} profile, seed {run.seed}; {', '.join(facts)}".rstrip("; "), "dim"), hang=2)


def render_skip(console: Console, cell: CellKey, reason: str) -> None:
    """Print the one line of a case that is not run."""
    put(console, f"skip {name_of(cell)}: {short(reason, 500)}", wrap=False)


def render_case(
    console: Console,
    *,
    case: str,
    implementation: str,
    rows: Sequence[Row],
    findings: Sequence[Finding],
    not_returned: Sequence[str] = (),
    refused: str = "",
    contexts: Mapping[str, InContext] = MappingProxyType({}),
    pdb: bool = True,
) -> None:
    """Print every check of one case as a table, a block per finding, and a last line with the outcome.

    ``refused``: why its backward was refused, "" if it was not. ``contexts``: as of a verdict. ``pdb``: whether the
    debugger can stop in the kernel.
    """
    words = case.split()
    cell = " ".join(short(word) for word in (words[0] if words else "", implementation, *words[1:2]) if word)
    put(console, (f"{cell}", "bold"))
    put(console, case, indent=2, wrap=False)
    put(console, "")
    if rows:
        _put_table(console, rows)
    if not_returned:
        put(console, ("not returned: " + ", ".join(short(output) for output in not_returned), "dim"))
    if refused:
        put_lines(console, f"backward was refused: {refused}", style="dim")
    for name, how in contexts.items():
        put_lines(console, f"context {name}: {how.status}{f'; {how.why}' if how.why else ''}", style="dim")
    for finding in findings:
        put(console, "")
        put_failure(console, cell, finding)
    put(console, "")
    _put_case_summary(console, cell, rows, findings, pdb)


def _put_table(console: Console, rows: Sequence[Row]) -> None:
    unjudged = any(row[5] for row in rows)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("", "output", "check"):
        table.add_column(name, overflow="fold")
    for name in ("ratio", "max error", "max ulp", *(["uncheckable"] if unjudged else [])):
        table.add_column(name, justify="right")
    for output, check, ratio, max_abs, max_ulp, uncheckable in rows:
        right = _right(ratio)
        mark: Part = ("pass", STATUS_STYLES["pass"]) if right else ("FAIL", STATUS_STYLES["fail"])
        lost = ratio == math.inf and not max_abs  # what is not finite has no error, and all else is right
        errors = ["-", "-"] if lost else [compact(max_abs), ulps(max_ulp)]
        numbers = [_text.ratio(ratio), *errors, *([f"{uncheckable:,}"] if unjudged else [])]
        cells = (mark, short(output, 20), short(check, 60), *numbers)
        table.add_row(*(text_of(console, cell) for cell in cells))
    for line in table_lines(console, table):
        put(console, line, wrap=False)


def _right(ratio: float | None) -> bool:
    """Whether a ratio is right. NaN is not; None is, since nothing was compared."""
    return ratio is None or ratio <= 1


def _put_case_summary(console: Console, cell: str, rows: Sequence[Row], findings: Sequence[Finding], pdb: bool) -> None:
    wrong = [*(kind_words(finding) for finding in findings), *(row[0] for row in rows if not _right(row[2]))]
    if wrong:
        closer = "--pdb stops in the kernel, " * pdb + "--dump DIR writes all tensors of the case"
        status, words = "fail", f"{cell}: {', '.join(short(output) for output in dict.fromkeys(wrong))}. Next: {closer}"
    elif rows:
        worst = max(rows, key=lambda row: row[2] or 0.0)
        status = "pass"
        words = f"{cell}: {counted(len(rows), 'check')}, worst ratio {_text.ratio(worst[2])} ({short(worst[0], 20)})"
    else:
        status, words = "nothing", f"{cell}: no output was compared"
    mark = {"fail": "FAIL", "pass": "PASS"}.get(status, "NOTHING CHECKED")
    put(console, (mark, STATUS_STYLES.get(status, "bold yellow")), f"  {words}", wrap=False)


REPORT = Report(name="terminal", write=write, summary="for people: failures, what was not checked, one last line")
