"""Probe for batch invariance of dw and db: do rows with dy = 0 change a bit of them, wherever they stand?

Sequences of one batch are padded to one length, and a trainer masks their loss, so that dy is 0 there. Such a row adds
exactly 0, yet most kernels then sum in other blocks, and two ways to pad a batch train two models (RL-Kernel #201).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case, with_rows
from normcheck.cases.guard_bands import NAN
from normcheck.cases.inputs import COTANGENTS, Inputs
from normcheck.cases.layouts import OF_ROW_GROUPS
from normcheck.checks.contract import Problem
from normcheck.checks.observe import observe, start
from normcheck.checks.rerun import Probed, Subject
from normcheck.result import OTHER_ROWS, SUMS
from normcheck.runner.arena import Surroundings
from normcheck.runner.call import supports

_FEWEST = 4
"""Rows of a case, half of which are padding: of a single row there is no sum."""


def among_padding_rows(subject: Subject, probed: Probed) -> Probed:
    """Run the first half of the rows with padding between them, and with all of it behind; if that is declared for dw
    or db, also without padding. A padding row has the other inputs of a row that counts, so all in it is finite.
    """
    case = subject.case
    held = [name for name in SUMS if subject.implementation.holds_among_rows(name)]
    apart = case.samples or case.layout in OF_ROW_GROUPS  # what is padded is a batch of rows with one weight
    if case.M < _FEWEST or apart or not any(name in subject.first.named for name in SUMS):
        return probed
    half = case.M // 2
    behind = torch.arange(case.M) % half
    between = behind.sort().values
    runs = {
        "behind": _sums(subject, behind, torch.arange(case.M) < half),
        "between": _sums(subject, between, between.diff(prepend=torch.tensor([-1])) != 0),
    }
    if held:
        runs["without"] = _sums(subject, behind[:half], torch.ones(half, dtype=torch.bool))
    same: dict[str, bool] = {}
    problems = probed.problems
    for name in SUMS:
        found = {words: sums[name] for words, sums in runs.items() if name in sums}
        if len(found) < 2 or not all(bool(t.isfinite().all()) for t in found.values()):
            continue
        first, *others = found
        other = next((words for words in others if not torch.equal(found[words], found[first])), "")  # -0 is 0
        same[name] = not other
        if other and name in held and not problems:
            problems = (_problem(name, half, case.M - half, other),)
    return replace(probed, problems=problems, invariant={**probed.invariant, **same})


def _problem(name: str, rows: int, padding: int, other: str) -> Problem:
    against = "between the rows" if other == "between" else "left out"
    message = (
        f"{name} of {rows} rows has other bits with {padding} padding rows (dy = 0) behind them than with these "
        f"{against}, and batch_invariant={name!r} is declared"
    )
    return Problem("not_repeatable", name, message, check=OTHER_ROWS)


def _sums(subject: Subject, order: Tensor, counts: Tensor) -> dict[str, Tensor]:
    """dw and db of the rows in this ``order``, of which those that do not count have dy = 0; {} if it cannot run so."""
    part, shapes = with_rows(subject.case, len(order)), subject.implementation.shapes
    if (shapes is not None and (part.M, part.N) not in shapes) or supports(subject.implementation, part) is not None:
        return {}
    inputs = _arranged(subject.inputs, subject.case, part, order, counts)
    bits = None if subject.bits is None else subject.bits[order.to(subject.bits.device)]
    started = start(subject.implementation, part, inputs, Surroundings())
    seen, _ = observe(subject.implementation, subject.op, part, started, bits)
    return {name: t for name, t in seen.named.items() if name in SUMS}


def _arranged(inputs: Inputs, case: Case, part: Case, order: Tensor, counts: Tensor) -> Inputs:
    def arranged(name: str, t: Tensor) -> Tensor:
        rows = t.reshape(case.M, -1)[order.to(t.device)]
        if name in COTANGENTS:
            rows = rows.where(counts.to(t.device).unsqueeze(1), torch.zeros((), dtype=t.dtype, device=t.device))
        return guard_bands.in_bands(rows.reshape(part.shape), NAN)

    fixed = ("weight", "bias", "scale")
    return replace(inputs, **{name: arranged(name, t) for name, t in inputs.named() if name not in fixed})
