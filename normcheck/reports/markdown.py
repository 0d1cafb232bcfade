"""Markdown report, a comment for a pull request: the outcome, a table of the cells, then each failure folded.

Foreign text is put into code, in which no mention or link works. A character that could end the code becomes a
character reference; a block of code has a fence longer than any in it. GitHub limits a comment's length, so the last
failures may be only counted. Libraries for Markdown do no such escaping, so none is used; the tests parse the result.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import TextIO

from normcheck.errors import cut, visible
from normcheck.reports import _text
from normcheck.reports._cells import MARKS, name_of, worst_of
from normcheck.reports._plain_text import WIDTH, block, cells, environment, is_known, messages, place, put_text, reason
from normcheck.reports._summary import rest, word
from normcheck.reports._text import counted, seconds, short
from normcheck.reports.report import Report
from normcheck.result import SweepResult, Verdict

LONGEST = 45_000
"""Characters of messages, table and failures: a comment on GitHub has at most 65,536."""

MESSAGES, TABLE, NOTES = 10_000, 20_000, 8_000
"""Characters for the messages and the table, out of LONGEST, and for the notes, beside it."""

_MARKUP = re.compile(r"[!-/:-@\[-`{-~]")


def write(run: SweepResult, stream: TextIO) -> None:
    """Write the report of ``run``."""
    put_text(stream, text_of(run))


def text_of(run: SweepResult, width: int = WIDTH) -> str:
    """The whole report; the blocks of its failures in lines of ``width`` characters."""
    failed = [v for v in run.verdicts if v.status in ("fail", "error")]
    lines = (f"\n- {code(line)}" for line in messages(run))
    parts = [*_limited(lines, MESSAGES, "message"), "\n\n", *_limited(_table(run), TABLE, "cell")]
    room = LONGEST - sum(map(len, parts))
    parts += _limited((_folded(verdict, width) for verdict in failed), room, "failure")
    if run.verdicts:  # a pass has its notes there
        parts.append(_details("Cells with their notes", cut(cells(run.verdicts, width), NOTES)))
    facts = ", ".join(f"{name} {value}" for name, value in environment(run).items())
    made = code(short(f"{run.profile} profile, seed {run.seed}; {facts}", 800))
    return "".join([f"## normcheck: {word(run)}\n\n{code(rest(run))}\n", *parts, f"\n{made}\n"])


def code(text: str) -> str:
    """One line of foreign text as code."""
    line = visible(text).strip()
    if "`" in line or "|" in line:  # a bar ends a cell of a table, in code as well
        return f"<code>{_MARKUP.sub(lambda found: f'&#{ord(found[0])};', line)}</code>"
    return f"`{line}`" if line else ""


def _limited(pieces: Iterator[str], room: int, noun: str) -> list[str]:
    """The first pieces that fit into ``room`` characters, and a line with the number of the others."""
    kept: list[str] = []
    left = 0
    for piece in pieces:
        if left or len(piece) > room:
            left += 1
        else:
            kept.append(piece)
            room -= len(piece)
    return [*kept, f"\nand {counted(left, f'more {noun}')}, in the other reports\n"] if left else kept


def _table(run: SweepResult) -> Iterator[str]:
    if not run.verdicts:
        return
    yield "| | op | implementation | dtype | cases | shapes | time | |\n|-|-|-|-|-:|-:|-:|-|\n"
    for verdict in run.verdicts:
        mark = MARKS.get(verdict.status, short(verdict.status, 20))
        mark = "**FAIL**" if verdict.status == "fail" else code(mark) if mark not in MARKS.values() else mark
        mark = "known" if is_known(verdict) else "**thin**" if verdict.status == "thin" else mark
        names = (code(short(name)) for name in (verdict.op, verdict.implementation, verdict.dtype))
        shapes = "" if verdict.shapes is None else f"{verdict.shapes:,}"
        counts = (f"{verdict.cases:,}", shapes, seconds(verdict.seconds))
        counts = counts if verdict.status in ("pass", "thin", "fail") else ("", "", "")
        yield f"| {' | '.join((mark, *names, *counts, _outcome(verdict)))} |\n"


def _outcome(verdict: Verdict) -> str:
    """The worst ratio of a cell, or why there is none."""
    if verdict.status in ("skip", "error") or (verdict.failure is not None and verdict.failure.kind != "mismatch"):
        return code(short(reason(verdict), 200))
    worst = worst_of(verdict.worst.items())
    text = "nothing compared" if worst is None else f"worst {_text.ratio(worst[1].ratio)} {code(short(worst[0], 20))}"
    return f"{text}; {code(short(verdict.detail, 300))}" if verdict.status == "thin" else text


def _folded(verdict: Verdict, width: int) -> str:
    """A failed cell: a line that unfolds to its place and its block."""
    file, line = place(verdict)
    at = f"{file}:{line}" if line else file
    known = "known: " if is_known(verdict) else ""
    where = f"At {code(short(at, 400))}\n\n" if file else ""
    return _details(f"{known}{name_of(verdict.key)}: {reason(verdict)}", block(verdict, width), where)


def _details(title: str, text: str, before: str = "") -> str:
    """``title``, which unfolds to a block of code with a fence longer than any within it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    summary = html.escape(short(title, 400))
    return (
        f"\n<details><summary><code>{summary}</code></summary>\n\n{before}{fence}text\n{text}\n{fence}\n\n</details>\n"
    )


REPORT = Report(name="markdown", write=write, summary="a pull-request comment: verdict, cells, folded failures")
