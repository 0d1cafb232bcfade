"""Command ``normcheck list --cases``: the core that a profile would run, and what a pass needs of it if it is dear."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TextIO

import torch

from normcheck.cases.axes import Value
from normcheck.cases.core import core
from normcheck.cases.design import ALL_OPENED, Design
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.missed import in_words
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError, one_of
from normcheck.gate.first_look import first_look
from normcheck.gate.options import ListOptions, VerifyOptions
from normcheck.gate.plan import PROFILES, Plan, limits_of
from normcheck.gate.prepare import selected
from normcheck.impls.implementation import Implementation
from normcheck.planner.must import Must
from normcheck.planner.prices import Prices, a_new
from normcheck.reports._text import counted
from normcheck.runner.device import device_for

_WIDTH = 80


def show_cases(options: ListOptions, cases: TextIO, notes: TextIO) -> None:
    """Write the case lines of each cell's core to ``cases``, a line each; then its must-list, and the prices of what
    ``--impl`` names after a first look, to ``notes``. Raises UsageError without both op and implementation.
    """
    if not options.op and not options.impl:
        raise UsageError(f"op is missing: expected --op with --cases, {one_of(OPS)}, or --impl")
    device = device_for(options.device)
    plan = Plan((), PROFILES[options.profile], options.seed, device, VerifyOptions.timeout)
    chosen = [
        (spec, i)
        for spec in options.impl
        for i in selected(spec, options.op, device, VerifyOptions.timeout, isolation=True)
    ]
    chosen = chosen or [("", _declaring_all(op)) for op in options.op]
    cells = [Cell(OPS[i.op], i, dtype, spec) for spec, i in chosen for dtype in options.dtype or DTYPES]
    for cell in cells:
        cases.writelines(f"{one.case}\n" for one in core(cell.claims, plan.profile.extent.on(device), plan.seed))
    cases.flush()
    torch.set_num_threads(1)  # small tensors: waiting for a second thread costs more than it computes
    for cell in cells:
        notes.writelines(f"{_filled(line)}\n" for line in _notes(cell, replace(plan, cells=(cell,))))


def _filled(line: str) -> str:
    return textwrap.fill(line, _WIDTH, subsequent_indent=" " * 8, break_on_hyphens=False)


def _declaring_all(op: str) -> Implementation:
    """An implementation that declares everything that the op has."""
    return Implementation(name="", op=op, forward=lambda *tensors, **numbers: None, ranks=(2, 3))


def _notes(cell: Cell, plan: Plan) -> Iterator[str]:
    """The must-list of a cell, and what a first look at its kernel shows, if there is one."""
    prices, looked = Prices(plan.device), ""
    if cell.spec:
        planner, ended = first_look(cell, plan)
        prices = planner.prices
        looked = "; ".join(
            filter(None, [_priced(prices), f"{planner.record.run} cases in {prices.spent:.2g} s", ended])
        )
    extent = plan.profile.extent.on(plan.device)
    design = Design(cell.claims, extent, plan.seed, frozenset(), ALL_OPENED, steady=True)
    must = Must(design, limits_of(plan), prices, len(cell.claims.shapes))
    least = "{:,} cases on {} shapes".format(*must.least())
    yield f"{cell.op.name} {cell.implementation.name} {cell.dtype}, if its kernel builds much".replace("  ", " ")
    yield f"  floor {'; '.join([*_told(must.floor), f'at least {least}'])}"
    yield f"  tail  {'; '.join(_told(must.tail))}"
    if looked:
        yield f"  price {looked}"


_CLASSES = {
    "m": "{} classes of M",
    "n": "{} classes of N",
    "several": "several rows of {} N",
    "block": "several rows of {} blocks of N",
}
"""The axes of a must-list of which only the number is told."""


def _told(goals: Iterable[Value]) -> Iterator[str]:
    """The goals of a must-list in words."""
    every = list(goals)
    classes = {axis: [goal for goal in every if goal[0] == axis] for axis in _CLASSES}
    few = [goal for goal in every if len(classes.get(goal[0], ())) <= 1 and goal[0] != "facet"]
    yield from (name for axis, name in every if axis == "facet")
    yield from (words.removeprefix("no ") for words in in_words(few))
    yield from (_CLASSES[axis].format(len(own)) for axis, own in classes.items() if len(own) > 1)


def _priced(prices: Prices) -> str:
    """What a call and new values take, as far as a first look shows it: "a call 0.2 ms; a new N 2 s (3 samples)"."""
    call = [f"a call {prices.own.call * 1e3:.2g} ms"] * prices.own.is_known
    dear = [f"{a_new(axis)} {prices.of(axis):.2g} s ({counted(n, 'sample')})" for axis, n in prices.dear.items()]
    return "; ".join([*call, *(dear or [prices.told() if prices.dearest else "builds nothing"])])
