"""What no value comparison sees: the same call once more, in other surroundings, after other work, among other rows.

One second run, with everything that is not the implementation's own filled with another pattern, answers several
questions at once; the rows in another order answer the next.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from normcheck.checks.batch_invariance import among_other_rows
from normcheck.checks.contract import Problem
from normcheck.checks.observe import Seen
from normcheck.checks.repeatability import repeated
from normcheck.checks.rerun import Probed, Subject
from normcheck.checks.two_runs import first_difference, refused_again
from normcheck.errors import Broken, UnsupportedCase
from normcheck.runner.call import refusal


class Depth(IntEnum):
    """How much of this a case is asked: nothing; only the reason of a wrong value; always; and the rows as well."""

    OFF = 0
    REASON = 1
    MEMORY = 2
    ROWS = 3


def probe(subject: Subject, *, rows: bool) -> Probed:
    """Ask once more; with ``rows`` also with the rows in another order and with one of them alone."""
    try:
        probed = repeated(subject)
    except UnsupportedCase as refused:
        return Probed((refused_again(refusal(refused)),))
    except Broken as broken:
        return _broken(subject, broken)
    try:
        return among_other_rows(subject, probed) if rows and not probed.problems else probed
    except UnsupportedCase:  # other rows may be another shape
        return probed
    except Broken as broken:
        return _broken(subject, broken)


def _broken(subject: Subject, broken: Broken) -> Probed:
    if subject.inputs.x.is_cuda and "out of memory" in broken.message:
        return Probed()  # it ran once: a second run beside the first needs memory that is not there
    message = f"{broken.message} (not the first time that this case was run)"
    return Probed((Problem(broken.kind, broken.output, message, broken.frames),))


def not_as_before(first: Seen, last: Seen) -> Iterable[Problem]:
    """The outputs of a case that was run first and, after all others, last: their bits are the same."""
    if last.refused and not first.refused:
        yield refused_again(last.refused)
    found = first_difference(first, last)
    if found:
        name, how_many = found
        yield Problem("not_repeatable", name, f"{name} is not the same after other work: {how_many}")
