"""What to do next about a cell, for a program that reads the JSON report: a sentence, and one command."""

from __future__ import annotations

import math
import shlex

from normcheck.reports._failure import explanation_words, headline
from normcheck.reports._remedies import REMEDIES, of_thin, options_of_thin
from normcheck.reports._summary import is_of_doctor
from normcheck.reports._text import short
from normcheck.result import ASLEEP, IMPORT, MEMORY, Finding, SweepResult, Verdict

__all__ = ["DESCRIPTION", "next_step"]

DESCRIPTION = (
    'What to do about the cell: a sentence, and one command, "" if there is none to run. If nothing is to be done, the '
    'sentence begins with "Nothing".'
)
_LONGEST = 600
"""Characters of a text of a kernel in the sentence."""


def next_step(verdict: Verdict, run: SweepResult) -> dict[str, str]:
    """``{"do": what to do, "command": one command or ""}`` for a cell of ``run``."""
    steps = {"fail": _of_failed, "thin": _of_thin, "error": _of_error, "skip": _of_skipped, "pass": _of_passed}
    sentence, command = steps[verdict.status](verdict, run)
    return {"do": sentence, "command": command}


def _again(run: SweepResult, *more: str) -> str:
    """The command of ``run`` with other options, of which the last counts; "" if no command line made it."""
    return shlex.join(("normcheck", *run.argv, *more)) if run.argv[:1] == ("verify",) else ""


def _of_failed(verdict: Verdict, run: SweepResult) -> tuple[str, str]:
    finding = verdict.failure
    if verdict.known:
        return f"Nothing: a known failure, {short(verdict.known, _LONGEST)}", finding.reproduce if finding else ""
    if finding is None:
        return f"Mend this: {short(verdict.detail, _LONGEST)}", _again(run)
    step = (
        f"Mend this: {_what_is_wrong(finding)}. `normcheck explain {short(finding.kind, 40)}` has an example, mended."
    )
    if not finding.reproduce:
        return f"{step} Then run all again.", _again(run)
    return f"{step} Run the command until it passes, then run all again.", finding.reproduce


def _what_is_wrong(finding: Finding) -> str:
    """The headline, and what is known of the cause, the surest first."""
    told = [finding.cause, explanation_words(finding.explanation) if finding.explanation is not None else ""]
    where = finding.where.summary if finding.where is not None else ""
    words = next(filter(None, told), "") or "; ".join(filter(None, (where, finding.message)))
    parts = (headline(finding), finding.configuration, words, finding.advice)
    return "; ".join(short(part, _LONGEST).rstrip(".") for part in parts if part)


def _of_thin(verdict: Verdict, run: SweepResult) -> tuple[str, str]:
    most = run.budget.get("max_examples", math.inf)
    remedy = of_thin(verdict, profile=run.profile, most=most, required=bool(run.required), in_python=not run.argv)
    options = options_of_thin(verdict, profile=run.profile, most=most)
    return f"No fault was found, but not all was checked: {short(verdict.detail, _LONGEST)}; {remedy}.", _again(
        run, *options
    )


def _of_error(verdict: Verdict, run: SweepResult) -> tuple[str, str]:
    commands = {IMPORT: _again(run), ASLEEP: _again(run), MEMORY: _again(run, "--workers", "1")}
    sentence = f"Not judged: {short(verdict.detail, _LONGEST)}; {REMEDIES[verdict.error]}."
    return sentence, commands.get(verdict.error, "normcheck doctor")


def _of_skipped(verdict: Verdict, run: SweepResult) -> tuple[str, str]:
    if verdict.elsewhere:
        return "Nothing: another shard judges it.", ""
    if is_of_doctor(verdict):
        return (
            f"Nothing, unless you need it: it cannot run here: {short(verdict.detail, _LONGEST)}.",
            "normcheck doctor",
        )
    return f"Nothing, unless you need it: the implementation refuses it: {short(verdict.detail, _LONGEST)}.", ""


def _of_passed(verdict: Verdict, run: SweepResult) -> tuple[str, str]:
    gradients = verdict.no_backward or "dx" in verdict.not_returned
    unseen = " Gradients were not checked: y had no graph, or the backward refused." if gradients else ""
    if run.profile == "quick":
        return f"Nothing is wrong. Before a merge run the profile ci once.{unseen}", _again(run, "--profile", "ci")
    return f"Nothing: it passed all of the profile {short(run.profile)}.{unseen}", ""
