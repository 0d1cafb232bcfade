"""Probes for faults that no comparison of values shows: the same call in other memory, after others, among other rows.

One second run, with another pattern in all memory that is not the implementation's own, answers several questions at
once. A run with the rows in another order answers the next ones.
"""

from __future__ import annotations

from collections.abc import Iterable

from normcheck.checks.batch_invariance import among_other_rows
from normcheck.checks.contract import Problem
from normcheck.checks.observe import Seen
from normcheck.checks.padding_rows import among_padding_rows
from normcheck.checks.refusal import refusal as refused_clearly
from normcheck.checks.repeatability import repeated
from normcheck.checks.rerun import Probed, Subject, first_difference, refused_again
from normcheck.errors import Broken, UnsupportedCase
from normcheck.result import EARLIER_CALLS
from normcheck.runner.call import refusal


def probe(subject: Subject, *, rows: bool) -> Probed:
    """Run the case again; with ``rows`` also with the rows in another order, with one alone, and padded."""
    try:
        probed = repeated(subject)
    except UnsupportedCase as refused:
        return Probed((refused_again(refusal(refused)),))
    except Broken as broken:
        return _broken(subject, broken)
    try:
        if rows and not probed.problems:
            probed = among_other_rows(subject, probed)
        return among_padding_rows(subject, probed) if rows and not probed.problems else probed
    except UnsupportedCase:  # other rows may be another shape
        return probed
    except Broken as broken:
        clearly = refused_clearly(subject.case, Problem(broken.kind, broken.output, broken.message, broken.frames))
        return probed if clearly else _broken(subject, broken)


def _broken(subject: Subject, broken: Broken) -> Probed:
    if "out of memory" in broken.message:
        return Probed()  # the case did run: a second run beside it needs more memory than there is
    message = f"{broken.message} (not the first time that this case was run)"
    return Probed((Problem(broken.kind, broken.output, message, broken.frames),))


def not_as_before(first: Seen, last: Seen) -> Iterable[Problem]:
    """Problems of a case that ran first and, after all others, last: its outputs should have the same bits."""
    if last.refused and not first.refused:
        yield refused_again(last.refused)
    found = first_difference(first, last)
    if found:
        name, how_many = found
        message = f"{name} is not the same after other work: {how_many}"
        yield Problem("not_repeatable", name, message, check=EARLIER_CALLS)
