"""GitHub report: workflow commands that annotate the implementation's file and line, and the job summary.

Special characters are escaped as the runner expects: ``%``, CR and LF everywhere, ``:`` and ``,`` in properties as
well. GitHub shows ten errors of a step, so the outcome comes first, cells of one place share an annotation, and all
messages of the gate share one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TextIO

from normcheck.errors import cut, visible
from normcheck.reports import markdown
from normcheck.reports._cells import name_of
from normcheck.reports._plain_text import block, is_known, messages, outcome, place, put_text, reason
from normcheck.reports._text import counted, short
from normcheck.reports.report import Report
from normcheck.result import SweepResult, Verdict

SUMMARY = "GITHUB_STEP_SUMMARY"
MOST_PLACES = 8
LONGEST = 16_000
"""Characters of an annotation."""
BLOCKS = 4
"""Cells of one annotation with their whole failure; the others are only named."""

_DATA = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_PROPERTY = {**_DATA, ":": "%3A", ",": "%2C"}

Place = tuple[str, int | None]


def write(run: SweepResult, stream: TextIO) -> None:
    """Write the outcome, an annotation for each place where something is wrong, and the job's summary."""
    lines = [_outcome(run), *_annotations(run), *_messages(run)]
    path = os.environ.get(SUMMARY)
    if path:
        try:
            with open(path, "a", encoding="utf-8") as summary:
                markdown.write(run, summary)
        except (OSError, ValueError) as error:
            lines.append(command("warning", f"{SUMMARY}={path}: it cannot be written: {error}", title="normcheck"))
    put_text(stream, "".join(f"{line}\n" for line in lines))


def command(name: str, message: str, **properties: str | int | None) -> str:
    """``::error file=a.py,line=3::message``, escaped; properties without a value are left out."""
    given = ",".join(f"{key}={_escaped(visible(str(value)), _PROPERTY)}" for key, value in properties.items() if value)
    shown = _escaped("\n".join(visible(line) for line in cut(message, LONGEST).split("\n")), _DATA)
    return f"::{name} {given}::{shown}" if given else f"::{name}::{shown}"


def _escaped(text: str, table: Mapping[str, str]) -> str:
    return "".join(table.get(character, character) for character in text)


def _annotations(run: SweepResult) -> list[str]:
    """Errors first, then known failures and thin cells; the last one counts the places beyond GitHub's limit."""
    places: dict[tuple[str, Place], list[Verdict]] = {}
    for verdict in run.verdicts:
        if verdict.status in ("fail", "error", "thin"):
            level = "warning" if is_known(verdict) or verdict.status == "thin" else "error"
            places.setdefault((level, place(verdict)), []).append(verdict)
    lines = []
    for level in ("error", "warning"):
        own = [_annotation(level, where, v) for (each, where), v in places.items() if each == level]
        more = len(own) - MOST_PLACES
        if more > 0:
            text = f"{counted(more + 1, 'more place')} where cells fail: see the job summary"
            own = [*own[: MOST_PLACES - 1], command(level, text, title="normcheck")]
        lines += own
    return lines


def _annotation(level: str, where: Place, verdicts: Sequence[Verdict]) -> str:
    first, more = verdicts[0], len(verdicts) - 1
    title = f"{name_of(first.key)}: {reason(first)}" + (f", and {counted(more, 'cell')} more" if more else "")
    parts = [block(verdict) for verdict in verdicts[:BLOCKS]]
    parts += [f"{name_of(verdict.key)}: {reason(verdict)}" for verdict in verdicts[BLOCKS:]]
    return command(level, "\n\n".join(parts), file=where[0], line=where[1], title=short(title, 200))


def _outcome(run: SweepResult) -> str:
    return command("error" if run.exit_code else "notice", outcome(run), title="normcheck")


def _messages(run: SweepResult) -> list[str]:
    lines = messages(run)
    return [command("error" if run.exit_code else "warning", "\n".join(lines), title="normcheck")] if lines else []


REPORT = Report(name="github", write=write, summary="annotations of a GitHub workflow, and its job summary")
