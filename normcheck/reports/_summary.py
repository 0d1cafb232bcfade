"""Last line of a report, enough by itself: the outcome first, then what is wrong, what was done, and what is next.

A pass has what it stands on in place of a next step, which only a terminal shows: other formats have their own places.
"""

from __future__ import annotations

import math
import shlex
import statistics

from rich.console import Console

from normcheck.reports import _text
from normcheck.reports._cells import worst_of
from normcheck.reports._failure import kind_words
from normcheck.reports._remedies import REMEDIES, of_thin
from normcheck.reports._text import STATUS_STYLES, counted, put, seconds, short
from normcheck.result import OUTPUTS, SweepResult, Verdict

NAMED = 3
"""Failed cells named in the line; the others are counted."""

_OWN_FILES = "normcheck/impls/"
"""In the paths of the implementations that come with normcheck."""


def put_summary(console: Console, run: SweepResult) -> None:
    """Print the last line. It is one line however long, so that ``tail -1`` shows all of it."""
    style = STATUS_STYLES.get(run.status, "bold yellow") if run.complete or run.status != "pass" else "bold yellow"
    step = _next(run)
    put(console, (word(run), style), f"  {rest(run)}", f". Next: {step}" if step else "", wrap=False)


def word(run: SweepResult) -> str:
    """The outcome in capitals: ``PASS``, ``FAIL``, ``NOTHING CHECKED``, ``NOTHING PASSED``."""
    checked = any(verdict.status != "skip" for verdict in run.verdicts)
    nothing = "NOT CHECKED" if checked else "NOTHING CHECKED"
    words = {"pass": "PASS", "fail": "FAIL", "error": "ERROR", "nothing": nothing}
    thin = any(verdict.status == "thin" for verdict in run.verdicts)
    if thin:  # nothing is wrong, but a core was not finished
        words |= {"pass": "THIN", "nothing": "THIN"}
    if not thin and not any(verdict.status == "pass" for verdict in run.verdicts):
        words["pass"] = "NOTHING PASSED"  # all that ran is known to fail
    known = words.get(run.status, short(run.status.upper(), 20))
    if run.complete:
        return known
    return "INCOMPLETE" if run.status in ("pass", "nothing") else f"{known} (incomplete)"


def rest(run: SweepResult) -> str:
    """What is wrong, then what was done."""
    cells = {
        status: [v for v in run.verdicts if v.status == status] for status in ("pass", "thin", "fail", "error", "skip")
    }
    if run.status != "pass":  # a known failure is not why a run failed
        cells["fail"] = [v for v in cells["fail"] if not v.known]
    checked = len(run.verdicts) - len(cells["skip"])
    if not run.verdicts:
        why = "no cell is left of what was asked" if run.complete else "stopped before the first cell was finished"
        return f"{short(run.messages[0]) if run.messages else why}{_ending(run)}"
    if run.status == "fail" and cells["fail"]:
        head = f"{len(cells['fail'])} of {counted(checked, 'cell')} failed: {_named(cells['fail'])}; "
    elif run.status == "error" and cells["error"]:
        head = f"{len(cells['error'])} of {counted(checked, 'cell')} could not be judged: {_named(cells['error'])}; "
    elif cells["thin"] and run.status in ("pass", "nothing") and run.complete:
        head = f"{len(cells['thin'])} of {counted(checked, 'cell')} thin: {_named(cells['thin'])}; "
    elif run.status in ("fail", "error", "nothing") and run.messages:
        head = f"{short(run.messages[0])}; "
    else:
        head = "stopped before the end; so far " if not run.complete else ""
    return head + _counts(run, cells, named=bool(head) and run.status != "pass") + _ending(run)


def is_of_doctor(verdict: Verdict) -> bool:
    """Whether ``normcheck doctor`` lists the implementation of a skipped cell; it does not list users' files."""
    return verdict.status == "skip" and (not verdict.file or _OWN_FILES in verdict.file)


def _next(run: SweepResult) -> str:
    """What to do about a run that did not pass; "" if the line or its messages say so already."""
    if run.status == "fail":
        found = [v.failure.reproduce for v in run.verdicts if v.failure is not None and not v.known]
        done = shlex.join(("normcheck", *run.argv))  # of golden records, the command that was just run
        return next((command for command in found if command not in ("", done)), "")
    errors = {verdict.error for verdict in run.verdicts if verdict.status == "error"}
    if run.status == "error" and errors:
        return REMEDIES[min(errors)]  # normcheck's own first
    thin = [verdict for verdict in run.verdicts if verdict.status == "thin"]
    if run.status == "nothing" and thin:
        most = run.budget.get("max_examples", math.inf)
        required, in_python = bool(run.required), not run.argv
        return of_thin(thin[0], profile=run.profile, most=most, required=required, in_python=in_python)
    if run.status == "nothing" and run.complete and any(map(is_of_doctor, run.verdicts)):
        return "normcheck doctor says what runs here, and what to do about what does not"
    return ""


def _named(verdicts: list[Verdict]) -> str:
    names = [_name(verdict) for verdict in verdicts[:NAMED]]
    more = len(verdicts) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def _name(verdict: Verdict) -> str:
    what = f" ({kind_words(verdict.failure)})" if verdict.failure is not None else ""
    return f"{short(verdict.op, 40)}/{short(verdict.implementation, 40)} {short(verdict.dtype, 40)}{what}"


def _counts(run: SweepResult, cells: dict[str, list[Verdict]], *, named: bool) -> str:
    """How many cells had which outcome. A pass says "0 failed", since readers look for it."""
    passed, failed, errors, skipped = (len(cells[status]) for status in ("pass", "fail", "error", "skip"))
    thin = len(cells["thin"])
    if skipped == len(run.verdicts):
        return f"{counted(skipped, 'cell')} skipped ({_skips(cells['skip'])})"
    counts = [f"{passed} passed" if named else f"{counted(passed, 'cell')} passed"]
    if run.status == "pass":
        # The failed cells of a run that passes are known failures.
        counts.append(f"{failed} failed" + (" as known" if failed else ""))
    elif failed and run.status != "fail":
        counts.append(f"{failed} failed")
    if thin and not (named and run.status in ("pass", "nothing")):
        counts.append(f"{thin} thin")
    known = sum(verdict.status == "fail" and bool(verdict.known) for verdict in run.verdicts)
    if known and run.status != "pass":
        counts.append(f"{known} failed as known")
    if errors and run.status != "error":
        counts.append(f"{errors} not judged")
    if skipped:
        counts.append(f"{skipped} skipped" + ("" if run.status == "fail" else f" ({_skips(cells['skip'])})"))
    return ", ".join(counts)


def _skips(verdicts: list[Verdict]) -> str:
    """Why cells were skipped, by implementation: ``cudnn: no GPU``."""
    reasons = list(dict.fromkeys(f"{short(v.implementation, 30)}: {short(v.detail, 40)}" for v in verdicts))
    more = len(reasons) - 2
    return "; ".join(reasons[:2]) + (f"; and {more} more" if more > 0 else "")


def _ending(run: SweepResult) -> str:
    total = sum(verdict.cases for verdict in run.verdicts)
    passed = [verdict for verdict in run.verdicts if verdict.status in ("pass", "thin")]
    alone = len(passed) == 1 and passed[0].cases == total and passed[0].shapes is not None
    on = f" on {counted(passed[0].shapes or 0, 'shape')}" if alone else ""
    cases = f", {counted(total, 'case')}{on} in {seconds(run.seconds)}"
    skipped = sum(sum(verdict.skipped.values()) for verdict in run.verdicts if verdict.status != "skip")
    if skipped:
        cases += f" and {skipped:,} not run"
    if run.status in ("pass", "nothing") and len(passed) > 1:
        cases += f"; {_least(passed)}"
    worst = worst_of((_worst_name(v, output), w) for v in passed for output, w in v.worst.items())
    if run.status != "pass" or worst is None:
        return cases
    return f"{cases}; worst ratio {_text.ratio(worst[1].ratio)} ({worst[0]}){_reservations(passed)}"


def _reservations(passed: list[Verdict]) -> str:
    """What the ratios of the cells that passed do not cover: bounds made wider by the kernel, and what has no ratio."""
    wider = sum(bool(verdict.undeclared) for verdict in passed)
    said = f"; {counted(wider, 'cell')} under wider bounds, as declared" if wider else ""
    smaller = sum(verdict.core is not None and bool(verdict.core.left_out) for verdict in passed)
    said += f"; a part of the core left out in {counted(smaller, 'cell')}" if smaller else ""
    bare = sum(verdict.no_backward for verdict in passed)
    said += f"; no backward ran in {counted(bare, 'cell')}" if bare else ""
    no_graph = sum("dx" in verdict.not_returned and not verdict.no_backward for verdict in passed)
    said += f"; gradients not checked in {counted(no_graph, 'cell')}: y has no graph" if no_graph else ""
    forward = OUTPUTS[: OUTPUTS.index("dx")]
    absent = {name: sum(name in verdict.not_returned for verdict in passed) for name in forward}
    missing = [f"{name} of {counted(cells, 'cell')}" for name, cells in absent.items() if cells]
    return f"{said}; not returned: {', '.join(missing)}" if missing else said


def _least(passed: list[Verdict]) -> str:
    """What the cells that passed stand on: ``least 61 cases on 4 shapes (rmsnorm torch_compile bf16), median 113``."""
    least = min(passed, key=lambda verdict: (verdict.cases, verdict.shapes or 0))
    on = "" if least.shapes is None else f" on {counted(least.shapes, 'shape')}"
    name = " ".join(short(word, 40) for word in least.key.words)
    median = statistics.median_low(verdict.cases for verdict in passed)
    return f"least {counted(least.cases, 'case')}{on} ({name}), median {median:,}"


def _worst_name(verdict: Verdict, output: str) -> str:
    return ", ".join((short(output, 40), " ".join(short(word, 40) for word in verdict.key.words)))
