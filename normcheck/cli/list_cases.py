"""``normcheck list --cases``: the core that a profile would run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

from normcheck.cases.claims import claims_of
from normcheck.cases.core import core
from normcheck.cases.dtypes import DTYPES
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError, check_names, one_of
from normcheck.gate.coverage import model_size_of
from normcheck.gate.plan import PROFILES
from normcheck.gate.request import selected
from normcheck.impls import discovery
from normcheck.impls.implementation import Implementation
from normcheck.runner.device import device_for


def show_cases(
    ops: Sequence[str],
    impls: Sequence[str],
    dtypes: Sequence[str],
    *,
    profile: str,
    seed: int,
    device: str,
    stream: TextIO,
) -> None:
    """Write the case lines of every cell that is asked for. Raises UsageError for an op that is missing or unknown."""
    known = discovery.ops()
    check_names("op", tuple(ops), tuple(known))
    check_names("dtype", tuple(dtypes), DTYPES)
    check_names("profile", (profile,), tuple(PROFILES))
    if not ops and not impls:
        raise UsageError(f"op is missing: expected --op with --cases, {one_of(known)}, or --impl")
    here = device_for(device)
    found = [(spec, i) for spec in impls for i in selected(spec, tuple(ops), here, 120.0, isolation=True)]
    found = found or [("", _anything(op)) for op in ops]
    for spec, implementation in found:
        for dtype in dtypes or DTYPES:
            cell = Cell(known[implementation.op], implementation, dtype, spec)
            claims = claims_of(cell.op, implementation, dtype)
            planned = core(claims, PROFILES[profile].extent.on(here), seed, model_size=model_size_of(cell, seed))
            stream.writelines(f"{one.case}\n" for one in planned)


def _anything(op: str) -> Implementation:
    """An implementation that declares everything that there is."""
    return Implementation(name="", op=op, forward=lambda *tensors, **numbers: None, ranks=(2, 3))
