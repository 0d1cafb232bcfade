"""What depends on earlier calls: on the latest forward, or on what was made of weights that have changed since."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.guard_bands import NAN
from normcheck.cases.inputs import Inputs
from normcheck.checks.contract import Problem
from normcheck.checks.observe import Seen, begin, observe, observe_in_place
from normcheck.checks.rerun import Subject
from normcheck.checks.two_runs import first_difference
from normcheck.runner.arena import Surroundings
from normcheck.runner.call import link_of

_ADDRESSES = 4  # as many as the runs of one case may have left free


def of_the_latest_forward(subject: Subject, other: Inputs) -> Problem | None:
    """Two forwards, then the backward of the first, as a network with two such layers does it."""
    i, case = subject.implementation, subject.case
    if not i.deterministic:
        return None
    between = other.each(lambda t: guard_bands.in_bands(t, NAN))
    begun = begin(i, case, subject.inputs, Surroundings(), deferred=True)
    seen, _ = observe(i, subject.op, case, begun, subject.bits, between)
    found = first_difference(subject.first, seen)
    if found is None:
        return None
    name, how_many = found
    message = f"{name} is not the same when forward is called for other inputs before backward: {how_many}"
    return Problem("not_repeatable", name, message)


def with_other_weights(subject: Subject) -> Problem | None:
    """The weights changed in place: what was made of the old ones, and kept, is wrong now."""
    if subject.op.clamped or subject.case.weights != "normal":
        return None  # the bits that backward is fed with would be others, too; and ties would be lost
    new = subject.inputs.each(lambda t: t)
    new = replace(new, weight=new.weight.roll(1), bias=None if new.bias is None else new.bias.roll(1))
    subject.refill(new)
    seen, _ = observe_in_place(subject.implementation, subject.op, subject.case, subject.given, None)
    name = remembered(subject, new, seen, None)
    if not name:
        return None
    message = f"{name} is wrong once the weights were changed in place: it depends on earlier calls"
    return Problem("not_repeatable", name, message)


def remembered(subject: Subject, values: Inputs, seen: Seen, bits: Tensor | None) -> str:
    """The first output of ``seen``, a run on ``values`` in the memory of the first run, that earlier calls made wrong.

    A wrong value accuses memory only if a fresh call on the same values is right, or gives other bits. Otherwise the
    kernel is wrong for these values, whoever asks, and "" is returned: no case line says them, so nobody could run them
    again, and the sweep draws values like them as cases of their own, which show where and by how much.
    ``bits``: bool (M, N), the reference's bitmask for ``values``.
    """
    wrong = subject.wrong_values(values, seen)
    if not wrong:
        return ""
    for fresh in _fresh(subject, values, bits):
        still_wrong = subject.wrong_values(values, fresh)
        for name in wrong:
            mine, other = seen.named[name], fresh.named.get(name)
            unsteady = not subject.implementation.deterministic
            same = other is not None and (unsteady or guard_bands.same_bits(mine, other))
            if name not in still_wrong or not same:
                return name
    return ""


def _fresh(subject: Subject, values: Inputs, bits: Tensor | None) -> Iterator[Seen]:
    """Runs on ``values`` in new memory, or one in a new process if the code is in another one: there each call finds
    its tensors at the same addresses, and what a process remembers for ever it does not forget with new memory.

    New memory may lie where an earlier run's was, and so is held until the last: the next lies elsewhere."""
    link = link_of(subject.implementation)
    if link is not None:
        link.close()
    held = []
    for _ in range(_ADDRESSES if link is None else 1):
        subject.refill(values)  # of the geometry of the first run, without what the latest may have written
        held.append(begin(subject.implementation, subject.case, subject.given, Surroundings()))
        yield observe(subject.implementation, subject.op, subject.case, held[-1], bits)[0]
