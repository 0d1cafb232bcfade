"""Command ``normcheck list --cases``: the core that a profile would run."""

from __future__ import annotations

from typing import TextIO

from normcheck.cases.core import core
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError, one_of
from normcheck.gate.options import ListOptions, VerifyOptions
from normcheck.gate.plan import PROFILES
from normcheck.gate.prepare import selected
from normcheck.impls.implementation import Implementation
from normcheck.runner.device import device_for


def show_cases(options: ListOptions, stream: TextIO) -> None:
    """Write the case lines of each cell's core. Raises UsageError without both op and implementation."""
    known, seed = OPS, options.seed
    if not options.op and not options.impl:
        raise UsageError(f"op is missing: expected --op with --cases, {one_of(known)}, or --impl")
    device, extent = device_for(options.device), PROFILES[options.profile].extent
    chosen = [
        (spec, i)
        for spec in options.impl
        for i in selected(spec, options.op, device, VerifyOptions.timeout, isolation=True)
    ]
    chosen = chosen or [("", _declaring_all(op)) for op in options.op]
    for spec, implementation in chosen:
        for dtype in options.dtype or DTYPES:
            cell = Cell(known[implementation.op], implementation, dtype, spec)
            planned = core(cell.claims, extent.on(device), seed)
            stream.writelines(f"{one.case}\n" for one in planned)


def _declaring_all(op: str) -> Implementation:
    """An implementation that declares everything that the op has."""
    return Implementation(name="", op=op, forward=lambda *tensors, **numbers: None, ranks=(2, 3))
