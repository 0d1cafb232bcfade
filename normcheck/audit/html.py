"""The HTML report of an audit: what was killed and what survived, who was accused, and the JSON report in it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TextIO

from normcheck.audit import json
from normcheck.audit.report import explanation_words, finding_words, kind_words, score_words, share, summary
from normcheck.audit.score import ERROR, KILLED, NOT_EXERCISED, SURVIVED, Audit, Control, Outcome
from normcheck.reports import _text
from normcheck.reports._page import put_page
from normcheck.reports._text import short

_MARKS = {KILLED: ("✓ killed", "pass"), SURVIVED: ("✗ survived", "fail"), ERROR: ("not judged", "error")}
_STATUS = {"PASS": "pass", "MEASURED": "pass", "FAIL": "fail", "ERROR": "error"}
_NOT_RUN = ("not run", "thin")


def write(audit: Audit, stream: TextIO) -> None:
    """Write the page of ``audit``."""
    word, _ = summary(audit)
    score = audit.score
    judged = [control for control in audit.controls if not control.reason]
    scores = {"all calls": score, **audit.regimes}
    put_page(
        stream,
        "audit/templates/audit.html",
        json.document(audit),
        word=word,
        status=_STATUS.get(word, "thin"),
        rest=score_words(audit),
        facts=[
            ("planted faults", f"{len(score.killed):,} of {score.run:,} killed"),
            ("correct kernels", f"{len(audit.accused):,} of {len(judged):,} cells accused"),
            *([("explanations", explanation_words(audit))] if audit.asked else []),
            ("cells not judged", f"{len(audit.errors):,}"),
            ("complete", "yes" if audit.complete else "no: the audit was stopped"),
        ],
        scores=[
            (short(name), f"{len(s.killed):,}", f"{s.run:,}", f"{len(s.not_exercised):,}") for name, s in scores.items()
        ],
        mutants=[_mutant(audit, id, cells) for id, cells in audit.mutants.items()],
        controls=[_control(control) for control in audit.controls],
        made=[
            ("command", short(shlex.join(("normcheck", *audit.argv)), 2000)),
            ("profile", short(audit.profile)),
            ("seed", str(audit.seed)),
            ("time", _text.seconds(audit.seconds)),
            *((short(name, 60), short(str(value), 200)) for name, value in audit.environment.items() if value),
        ],
    )


def _mutant(audit: Audit, id: str, cells: Sequence[Outcome]) -> dict[str, str]:
    """The row of a mutant: with a case that killed it, or with where it was not killed, and why."""
    outcome = audit.status_of(tuple(cells))
    mark, status = _MARKS.get(outcome, _NOT_RUN)
    first = next((cell for cell in cells if cell.status == outcome), cells[0])
    where = f"{first.op} {first.dtype}: {first.reason}" if first.reason else f"{first.op} {first.dtype}"
    return {
        "id": short(id),
        "mark": mark,
        "status": status,
        "share": share(cells) if any(cell.status != NOT_EXERCISED for cell in cells) else "",
        "finding": finding_words(cells),
        "cases": f"{max(cell.cases for cell in cells):,}",
        "what": short(cells[0].what, 300),
        "explanation": short(", ".join(dict.fromkeys(c.explanation for c in cells if c.explanation)), 120),
        "case": short(first.case if outcome == KILLED and first.case else where, 400),
    }


def _control(control: Control) -> tuple[str, ...]:
    """The row of a correct kernel's cell."""
    said = "✗ accused: " + kind_words(control) if control.accused else "✓ left alone"
    return (
        f"{short(control.name)} {short(control.op)} {short(control.dtype)}",
        short(control.reason, 300) or said,
        f"{control.cases:,}",
        short(control.message, 400) if control.accused else "",
    )
