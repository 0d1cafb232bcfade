"""The JSON report of an audit, schema ``normcheck-audit/1``. Keys are only ever added, after those that are there."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TextIO

from normcheck.audit.score import KILLED, NOT_EXERCISED, SURVIVED, Audit, Control, Outcome, Score
from normcheck.reports._strict import number

SCHEMA = "normcheck-audit/1"

Json = dict[str, object]


def write(audit: Audit, stream: TextIO) -> None:
    """Write ``audit`` as one JSON object and a newline, in ASCII, so that no encoding of ``stream`` can refuse it."""
    stream.write(json.dumps(document(audit), indent=2, allow_nan=False) + "\n")


def document(audit: Audit) -> Json:
    """Everything in ``audit`` as plain JSON values; ``mutants`` has an entry per mutant x op x dtype.

    ``killed``, ``survivors`` and ``not_exercised`` are of the mutants under no regime, ``regimes`` of those under each.
    """
    return {
        "schema": SCHEMA,
        "normcheck": audit.environment.get("normcheck", "unknown"),
        "argv": list(audit.argv),
        "seed": audit.seed,
        "profile": audit.profile,
        "recipe": audit.recipe or None,
        "seconds": number(audit.seconds),
        "environment": dict(audit.environment),
        "mutants": [_entry(outcome) for outcome in audit.outcomes],
        "killed": len(audit.score.killed),
        "survivors": list(audit.score.survivors),
        "not_exercised": list(audit.score.not_exercised),
        "counts": _counts(audit),
        "controls": [_entry(control) for control in audit.controls],
        "exit_code": audit.exit_code,
        "complete": audit.complete,
        "regimes": {regime: _score(score) for regime, score in audit.regimes.items()},
    }


def _entry(cell: Outcome | Control) -> Json:
    return {name: number(value) if isinstance(value, float) else value for name, value in asdict(cell).items()}


def _score(score: Score) -> Json:
    """What became of the mutants under one regime; ``run`` of them were run."""
    return {
        "killed": len(score.killed),
        "run": score.run,
        "survivors": list(score.survivors),
        "not_exercised": list(score.not_exercised),
    }


def _counts(audit: Audit) -> Json:
    """How many there are of each: ``cells`` of mutants by status, and of correct kernels those judged and accused."""
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
        "median_seconds": number(audit.median_seconds),
    }
