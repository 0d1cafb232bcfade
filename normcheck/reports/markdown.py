"""A comment for a pull request: the verdict, a table of the cells, then each failure folded.

Foreign text stands in code, where nobody is mentioned and nothing is a link. What could end the code is a character
reference, or, in a block of code, shorter than its fence. A comment has an end, so the last failures may be only named.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import TextIO

from normcheck.reports import _text
from normcheck.reports._cells import MARKS, worst_of
from normcheck.reports._plain import WIDTH, block, cell, cells, environment, is_known, messages, place, put_text, said
from normcheck.reports._summary import rest, word
from normcheck.reports._text import counted, cut, seconds, short, visible
from normcheck.reports.report import Report
from normcheck.result import Run, Verdict

LONGEST = 45_000
"""Characters of messages, table and failures: a comment on GitHub has at most 65,536."""

MESSAGES, TABLE, NOTES = 10_000, 20_000, 8_000
"""What the messages and the table may have of that, and the notes besides."""

_MARKUP = re.compile(r"[!-/:-@\[-`{-~]")


def write(run: Run, stream: TextIO) -> None:
    """Write the report of ``run``."""
    put_text(stream, text_of(run))


def text_of(run: Run, width: int = WIDTH) -> str:
    """The whole report; the blocks of its failures in lines of ``width`` characters."""
    failed = [v for v in run.verdicts if v.status in ("fail", "error")]
    told = [f"\n- {code(line)}" for line in messages(run)]
    told = [*_limited(iter(told), MESSAGES, "message"), "\n\n", *_limited(_table(run), TABLE, "cell")]
    room = LONGEST - sum(map(len, told))
    told += _limited((_folded(verdict, width) for verdict in failed), room, "failure")
    if run.verdicts:  # what a reader of a pass must know is in the notes
        told.append(_details("Cells with their notes", cut(cells(run.verdicts, width), NOTES)))
    facts = ", ".join(f"{name} {value}" for name, value in environment(run).items())
    made = code(short(f"{run.profile} profile, seed {run.seed}; {facts}", 800))
    return "".join([f"## normcheck: {word(run)}\n\n{code(rest(run))}\n", *told, f"\n{made}\n"])


def code(text: str) -> str:
    """Foreign text of one line as code."""
    line = visible(text).strip()
    if "`" in line or "|" in line:  # a bar ends a cell of a table, in code as well
        return f"<code>{_MARKUP.sub(lambda found: f'&#{ord(found[0])};', line)}</code>"
    return f"`{line}`" if line else ""


def _limited(pieces: Iterator[str], room: int, noun: str) -> list[str]:
    """The pieces that there is room for; the others are counted."""
    kept: list[str] = []
    left = 0
    for piece in pieces:
        if left or len(piece) > room:
            left += 1
        else:
            kept.append(piece)
            room -= len(piece)
    return [*kept, f"\nand {counted(left, f'more {noun}')}, in the other reports\n"] if left else kept


def _table(run: Run) -> Iterator[str]:
    if not run.verdicts:
        return
    yield "| | op | implementation | dtype | cases | time | |\n|-|-|-|-|-:|-:|-|\n"
    for verdict in run.verdicts:
        mark = MARKS.get(verdict.status, short(verdict.status, 20))
        mark = "**FAIL**" if verdict.status == "fail" else code(mark) if mark not in MARKS.values() else mark
        mark = "known" if is_known(verdict) else "**thin**" if verdict.status == "thin" else mark
        names = (code(short(name)) for name in (verdict.op, verdict.implementation, verdict.dtype))
        counts = (
            (f"{verdict.cases:,}", seconds(verdict.seconds)) if verdict.status in ("pass", "thin", "fail") else ("", "")
        )
        yield f"| {' | '.join((mark, *names, *counts, _outcome(verdict)))} |\n"


def _outcome(verdict: Verdict) -> str:
    """The worst ratio of a cell, or why there is none."""
    if verdict.status in ("skip", "error") or (verdict.failure is not None and verdict.failure.kind != "mismatch"):
        return code(short(said(verdict), 200))
    worst = worst_of(verdict.worst.items())
    told = "nothing compared" if worst is None else f"worst {_text.ratio(worst[1].ratio)} {code(short(worst[0], 20))}"
    return f"{told}; {code(short(said(verdict), 300))}" if verdict.status == "thin" else told


def _folded(verdict: Verdict, width: int) -> str:
    """A failed cell: a line that unfolds to its place and its block."""
    file, line = place(verdict)
    at = f"{file}:{line}" if line else file
    known = "known: " if is_known(verdict) else ""
    where = f"At {code(short(at, 400))}\n\n" if file else ""
    return _details(f"{known}{cell(verdict)}: {said(verdict)}", block(verdict, width), where)


def _details(title: str, text: str, before: str = "") -> str:
    """``title``, which unfolds to a block of code with a fence longer than any within it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    summary = html.escape(short(title, 400))
    return (
        f"\n<details><summary><code>{summary}</code></summary>\n\n{before}{fence}text\n{text}\n{fence}\n\n</details>\n"
    )


REPORT = Report(name="markdown", write=write, summary="a pull-request comment: verdict, cells, folded failures")
