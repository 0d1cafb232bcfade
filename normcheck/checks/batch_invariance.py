"""Probe for batch invariance: does a row keep its bits if the rows change their order, and in a smaller batch?

Serving stacks ask for that: a request has the same answer whatever others are in its batch. Kernels break it when they
choose another block, and so another order of sums, for many rows: vLLM's did from 256 rows on (vllm #48271).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case, with_rows
from normcheck.cases.guard_bands import NAN
from normcheck.cases.inputs import Inputs
from normcheck.cases.layouts import OF_ROW_GROUPS, WEIGHT_INTERLEAVED, WEIGHT_STACKED
from normcheck.cases.tensor_names import DRESIDUAL_GATE, DSCALE, DSHIFT, K_WEIGHT, Q_WEIGHT, RESIDUAL_GATE, ROOT_FIRST
from normcheck.checks.contract import Problem
from normcheck.checks.observe import observe, observe_in_place, start
from normcheck.checks.rerun import Probed, Subject
from normcheck.checks.statefulness import state_of_latest_forward, state_of_old_weights, wrong_by_earlier_calls
from normcheck.result import EARLIER_CALLS, OTHER_ROWS
from normcheck.runner.arena import Surroundings
from normcheck.runner.call import supports

_BY_ROW = frozenset(ROOT_FIRST) - {DRESIDUAL_GATE, DSCALE, DSHIFT, "dw", "db"}
"""Outputs of which each part belongs to one row."""

_BATCH, _MOST_BATCHES = 255, 17
"""Rows of a smaller batch, for a kernel that computes 256 or more in another way, and how many such batches are run of
a kernel that declares batch invariance. Of another one it is the first."""


def among_other_rows(subject: Subject, probed: Probed) -> Probed:
    """Run the case again with its rows rolled by one, in the memory of the first run; then some rows by themselves.

    The rows of a batch of several samples are rolled by those of one, with what each sample has of its own; so are
    groups of rows with the weight of each.
    """
    if subject.case.M < 2:
        return probed
    rolled = _rolled(subject.inputs, subject.case)
    latest = state_of_latest_forward(subject)
    if latest is not None:
        return replace(probed, problems=(latest,))
    subject.refill(rolled)
    by = _rolled_by(subject.case)
    bits = None if subject.bits is None else subject.bits.roll(by, 0)
    case, op, implementation = subject.case, subject.op, subject.implementation
    moved, problems = observe_in_place(implementation, op, case, subject.given, bits)
    invariant = {
        name: guard_bands.same_bits(_rows_rolled(_by_row(t, case.M), by), _by_row(moved.named[name], case.M))
        for name, t in subject.first.named.items()
        if name in _BY_ROW and name in moved.named
    }
    if not all(invariant.values()):
        name = wrong_by_earlier_calls(subject, rolled, moved, bits)
        if name:
            message = f"{name} is wrong for new values in memory that was used before: it depends on earlier calls"
            return replace(probed, problems=(Problem("not_repeatable", name, message, check=EARLIER_CALLS),))
    old_weights = state_of_old_weights(subject)
    if old_weights is not None:
        return replace(probed, problems=(old_weights,))
    where = dict.fromkeys((name for name, same in invariant.items() if not same), "among other rows")
    for batch in _batches(subject):
        rows = batch.stop - batch.start
        for name, same in _in_batch(subject, batch).items():
            invariant[name] = same and invariant.get(name, True)
            if not same:
                where.setdefault(name, f"among {case.M} rows than {f'in a batch of {rows}' if rows > 1 else 'alone'}")
    broken = [name for name in where if implementation.holds_among_rows(name)]
    if broken:
        name, declared = broken[0], implementation.batch_invariant
        message = f"a row of {name} has other bits {where[name]}, and batch_invariant={declared} is declared"
        problems = (*problems, Problem("not_repeatable", name, message, check=OTHER_ROWS))
    return replace(probed, problems=problems, invariant=invariant)


def _batches(subject: Subject) -> Iterator[slice]:
    """Rows to run by themselves: one row, and of more than ``_BATCH`` rows so many at a time; of one sample each."""
    case = subject.case
    row = case.seed % case.M
    yield slice(row, row + 1)
    of_sample = case.M // _parts(case)
    if of_sample > _BATCH and case.layout != WEIGHT_INTERLEAVED:
        starts = (range(end - of_sample, end, _BATCH) for end in range(of_sample, case.M + 1, of_sample))
        batches = [slice(i, min(i + _BATCH, own.stop)) for own in starts for i in own]
        yield from batches[:_MOST_BATCHES] if subject.implementation.batch_invariant else batches[:1]


def _in_batch(subject: Subject, batch: slice) -> dict[str, bool]:
    """Output -> whether these rows, run without the others, keep their bits; empty if so many rows cannot run."""
    case, shapes = subject.case, subject.implementation.shapes
    part = with_rows(case, batch.stop - batch.start)
    if (shapes is not None and (part.M, part.N) not in shapes) or supports(subject.implementation, part) is not None:
        return {}

    def own(rows: Tensor) -> Tensor:
        own = rows.reshape(case.M, -1)[batch]
        return guard_bands.in_bands(own.reshape(part.shape) if own.shape[1] == case.N else own, NAN)

    def of_sample(both: Tensor) -> Tensor:
        sample = case.group_of(batch.start) if case.layout in OF_ROW_GROUPS else batch.start * case.batch // case.M
        return guard_bands.in_bands(both[sample : sample + 1], NAN)

    inputs = _of_rows(subject.inputs, case, own, of_sample)
    bits = None if subject.bits is None else subject.bits[batch]
    started = start(subject.implementation, part, inputs, Surroundings())
    seen, _ = observe(subject.implementation, subject.op, part, started, bits)
    return {
        name: guard_bands.same_bits(_by_row(t, case.M)[batch], _by_row(seen.named[name], part.M))
        for name, t in subject.first.named.items()
        if name in _BY_ROW and name in seen.named
    }


def _parts(case: Case) -> int:
    """How many parts of so many rows each lie one behind the other: samples, or groups that have their own weight."""
    return case.batch if case.samples else case.row_groups if case.layout == WEIGHT_STACKED else 1


def _rolled_by(case: Case) -> int:
    """By how many rows a case is rolled: those of a part if it has several."""
    return case.M // _parts(case) if _parts(case) > 1 else 1


def _rolled(inputs: Inputs, case: Case) -> Inputs:
    """The inputs with the rows of x and dy rolled, so that the last row, or sample, comes first."""

    def roll(t: Tensor) -> Tensor:
        return t.reshape(case.M, -1).roll(_rolled_by(case), 0).reshape(t.shape)

    return _of_rows(inputs, case, roll, lambda t: t.roll(1, 0))


def _rows_rolled(t: Tensor, by: int) -> Tensor:
    """The rows of (M, n) rolled, as integers: a GPU rolls no numbers of 8 bits."""
    return guard_bands.as_integers(t).roll(by, 0).view(t.dtype)


def _of_rows(
    inputs: Inputs, case: Case, change: Callable[[Tensor], Tensor], of_samples: Callable[[Tensor], Tensor]
) -> Inputs:
    """The inputs with ``change`` applied to those that have rows, ``of_samples`` to what each sample, or each group of
    rows, has of its own.
    """
    fixed = ("weight", "bias", "scale", "shift", RESIDUAL_GATE, Q_WEIGHT, K_WEIGHT)
    shared = inputs.shift is None and case.layout not in OF_ROW_GROUPS
    both = {} if shared else {n: of_samples(t) for n, t in inputs.named() if n in fixed}
    return replace(inputs, **both, **{n: change(t) for n, t in inputs.named() if n not in fixed})


def _by_row(t: Tensor, rows: int) -> Tensor:
    return t.detach().reshape(rows, -1)
