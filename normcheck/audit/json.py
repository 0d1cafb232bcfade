"""The JSON report of an audit, schema ``normcheck-audit/1``. Keys are only ever added, after the present ones."""

from __future__ import annotations

from collections import Counter
from typing import TextIO

from normcheck.audit.score import KILLED, NOT_EXERCISED, SURVIVED, Audit, Score
from normcheck.reports.document import plain, text_of

SCHEMA = "normcheck-audit/1"

Json = dict[str, object]


def write(audit: Audit, stream: TextIO) -> None:
    """Write ``audit`` as one JSON object and a newline."""
    stream.write(text_of(document(audit)))


def document(audit: Audit) -> Json:
    """Everything in ``audit`` as plain JSON values; ``mutants`` has an entry per mutant x op x dtype.

    ``killed``, ``survivors`` and ``not_exercised`` count plain mutants; ``regimes`` has the score under each regime.
    """
    return {
        "schema": SCHEMA,
        "normcheck": audit.environment.get("normcheck", "unknown"),
        "argv": audit.argv,
        "seed": audit.seed,
        "profile": audit.profile,
        "recipe": audit.recipe or None,
        "seconds": audit.seconds,
        "environment": audit.environment,
        "mutants": plain(audit.outcomes),
        "killed": len(audit.score.killed),
        "survivors": list(audit.score.survivors),
        "not_exercised": list(audit.score.not_exercised),
        "counts": _counts(audit),
        "controls": plain(audit.controls),
        "exit_code": audit.exit_code,
        "complete": audit.complete,
        "regimes": {regime: _score(score) for regime, score in audit.regimes.items()},
    }


def _score(score: Score) -> Json:
    """The score of the mutants under one regime; ``run`` of them were run."""
    return {
        "killed": len(score.killed),
        "run": score.run,
        "survivors": list(score.survivors),
        "not_exercised": list(score.not_exercised),
    }


def _counts(audit: Audit) -> Json:
    """The numbers of mutants, of their cells by status and cases, and of correct kernels, judged and accused."""
    statuses = Counter(outcome.status for outcome in audit.outcomes)
    return {
        "mutants": len(audit.mutants),
        "cells": len(audit.outcomes),
        "cells_killed": statuses[KILLED],
        "cells_survived": statuses[SURVIVED],
        "cells_not_exercised": statuses[NOT_EXERCISED],
        "errors": len(audit.errors),
        "cases": sum(outcome.cases for outcome in audit.outcomes),
        "controls": len({control.name for control in audit.controls}),
        "control_cells": len(audit.controls),
        "control_cases": sum(control.cases for control in audit.controls),
        "accused": len(audit.accused),
        "median_seconds": audit.median_seconds,
        "asked": len(audit.asked),
        "explained": len(audit.explained),
        "explained_wrongly": len(audit.misled),
    }
