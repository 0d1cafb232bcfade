"""Probe for state kept between calls: from the latest forward, or from weights that have changed since."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case, with_other_values
from normcheck.cases.inputs import Inputs, make
from normcheck.checks.contract import Problem
from normcheck.checks.observe import Seen, observe, observe_in_place, start
from normcheck.checks.rerun import Subject, first_difference
from normcheck.result import EARLIER_CALLS
from normcheck.runner.arena import Surroundings
from normcheck.runner.session import session_of

_FEW_ELEMENTS = 1 << 16
_FRESH_RUNS = 4  # the earlier runs of a case may have left so many blocks of memory free


def state_of_latest_forward(subject: Subject) -> Problem | None:
    """Call forward again before the backward of the first call, as a network with several such layers does.

    The case with other inputs, other weights too, overwrites what is kept for its shape; a case that ran before, three
    times of four, what is kept of the latest call. If the first does harm by itself, it is told.
    """
    i, case = subject.implementation, subject.case
    if not i.deterministic:
        return None
    earlier = [_earlier(subject)] if case.seed % 4 else []
    others = [with_other_values(case), *filter(None, earlier)]
    found = _difference_after(subject, others)
    if found is None:
        return None
    alone = _difference_after(subject, others[:1]) if len(others) > 1 else found
    name, how_many = alone or found
    words = "other inputs" if alone else f"{others[-1]}"
    message = f"{name} is not the same when forward is called for {words} before backward: {how_many}"
    return Problem("not_repeatable", name, message, check=EARLIER_CALLS)


def _difference_after(subject: Subject, others: Iterable[Case]) -> tuple[str, str] | None:
    """The first output that differs if forward is called for these cases before backward, and by how much."""
    i, case = subject.implementation, subject.case
    between = [(other, make(other, subject.op, subject.inputs.x.device.type)) for other in others]
    started = start(i, case, subject.inputs, Surroundings(), others_first=True)
    seen, _ = observe(i, subject.op, case, started, subject.bits, between)
    return first_difference(subject.first, seen)


def _earlier(subject: Subject) -> Case | None:
    """A small case that ran in the kernel's process: with another N, or by turns with this one; of these one with a
    bias if this case has none, or none if it has, with another eps, and weights of the same dtype. None if none ran.
    """
    case = subject.case
    ran = [each for each in session_of(subject.implementation).before if 0 < each.M * each.N <= _FEW_ELEMENTS]
    alike = [each for each in ran if each.N == case.N] if case.seed % 4 == 3 else []
    among = alike or [each for each in ran if each.N != case.N]

    def differs(each: Case) -> tuple[bool, ...]:
        return each.bias != case.bias, each.eps != case.eps, each.weight_dtype == case.weight_dtype

    return max(reversed(among), key=differs, default=None)


def state_of_old_weights(subject: Subject) -> Problem | None:
    """Change the weights in place: an output that still depends on the old ones is a problem."""
    if subject.op.clamped or subject.case.weights != "normal":
        return None  # the bits that backward gets would change as well, and ties would be lost
    new = subject.inputs.each(lambda t: t)
    weight, bias = (None if t is None else t.roll(1) for t in (new.weight, new.bias))
    new = replace(new, weight=weight, bias=bias)
    if new.scale is not None and new.shift is not None:
        new = replace(new, scale=new.scale.roll(1, -1), shift=new.shift.roll(1, -1))
    subject.refill(new)
    seen, _ = observe_in_place(subject.implementation, subject.op, subject.case, subject.given, None)
    name = wrong_by_earlier_calls(subject, new, seen, None)
    if not name:
        return None
    message = f"{name} is wrong once the weights were changed in place: it depends on earlier calls"
    return Problem("not_repeatable", name, message, check=EARLIER_CALLS)


def wrong_by_earlier_calls(subject: Subject, values: Inputs, seen: Seen, bits: Tensor | None) -> str:
    """The first output of ``seen``, a run on ``values`` in the memory of the first run, that earlier calls made wrong.

    Earlier calls are to blame only if a fresh call on the same values is right, or gives other bits. Otherwise the
    kernel is always wrong for these values, and "" is returned: no case line describes them, so nobody could run them
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
    """Runs on ``values`` in new memory, or one run in a new process if the kernel has a process of its own.

    There each call finds its tensors at the same addresses, so only a new process has forgotten the earlier calls. In
    this process new memory may lie where an earlier run's was, so all of it is held until the last run.
    """
    session = session_of(subject.implementation)
    session.restart()
    held = []
    for _ in range(1 if session.isolated else _FRESH_RUNS):
        subject.refill(values)  # same shapes and strides, but without what the latest run may have written
        held.append(start(subject.implementation, subject.case, subject.given, Surroundings()))
        yield observe(subject.implementation, subject.op, subject.case, held[-1], bits)[0]
