"""``normcheck baseline bits``: digests of all outputs of a cell's core, so that an upgrade is judged without the old
version at hand. A file has case lines and digests, and no tensors.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case_line import parsed
from normcheck.cases.core import core
from normcheck.cases.depth import Depth
from normcheck.checks.ask import Ask
from normcheck.checks.attempt import died, run_case, timed_out, why_not
from normcheck.checks.cell import Cell
from normcheck.errors import ExitCode, ImportFailed, UsageError, one_line
from normcheck.gate import decision
from normcheck.gate.options import VerifyOptions
from normcheck.gate.plan import Plan
from normcheck.gate.prepare import prepared
from normcheck.reports import terminal
from normcheck.reports._text import counted, put
from normcheck.reports.document import checked, load, plain, text_of
from normcheck.result import CellKey
from normcheck.runner.call import poisoned_memory
from normcheck.runner.environment import environment
from normcheck.runner.session import session_of

SCHEMA = "normcheck-bits/1"
_MOST_DEATHS = 3  # of a kernel's process, each of which costs a new one
_SHOWN = 20
"""Case lines that are printed of a cell, the smallest; the others are counted."""

Digests = Mapping[str, str]
"""Output -> the digest of its bits."""


@dataclass(frozen=True, kw_only=True)
class CellBits:
    """What a cell returned: case line -> output -> digest."""

    op: str
    implementation: str
    dtype: str
    cases: Mapping[str, Digests]

    @property
    def key(self) -> CellKey:
        """The identity of the cell."""
        return CellKey(self.op, self.implementation, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Bits:
    """The bits of several cells, and the versions and the device that made them."""

    environment: Mapping[str, str]
    cells: tuple[CellBits, ...]


@dataclass(frozen=True, kw_only=True)
class Differing:
    """A case whose bits differ. ``outputs``: which; ``unsteady``: those that differ from run to run already."""

    case: str
    outputs: tuple[str, ...]
    unsteady: tuple[str, ...] = field(default=())


def keep(options: VerifyOptions, out: str) -> int:
    """Run the core of every cell of ``options`` and write the digests to the new file ``out``; returns the exit code.

    Raises UsageError, also if ``out`` exists.
    """
    if Path(out).exists():
        raise UsageError(f"out={one_line(out, 200)}: expected a new file; compare with this one by --against")
    plan = _prepared(options)
    console = terminal.console_for(sys.stdout)
    cells = []
    for cell in plan.cells:
        lines = _core(cell, plan)
        kept = dict(_digests(cell, plan, lines)) if _can_run(cell, plan, console) else {}
        if kept:
            cells.append(CellBits(op=cell.op.name, implementation=_name(cell), dtype=cell.dtype, cases=kept))
            put(console, f"kept  {cells[-1].key}: {counted(len(kept), 'case')}")
    if cells:
        found = Bits(environment=environment(plan.device), cells=tuple(cells))
        Path(out).write_text(text_of({"schema": SCHEMA, **plain(found)}, indent=1), encoding="utf-8")
    return decision.exit_code(found=False, broken=False, enough=bool(cells))


def against(options: VerifyOptions, file: str) -> int:
    """Run every case of ``file`` on the cells of ``options``, and name those whose bits differ; returns the exit code.

    Raises UsageError, also for a file that ``keep`` has not written.
    """
    before = _read(file)
    kept = {cell.key: cell.cases for cell in before.cells}
    plan = _prepared(options)
    console = terminal.console_for(sys.stdout)
    compared, found = 0, False
    for cell in plan.cells:
        key = CellKey(cell.op.name, _name(cell), cell.dtype)
        if key in kept and _can_run(cell, plan, console):
            cases = kept.pop(key)
            differing = _compared(cell, plan, cases)
            compared, found = compared + 1, found or bool(differing)
            _tell(console, key, differing, len(cases))
    for key in kept:
        put(console, f"not compared: {key}: expected an implementation of this name (--impl)")
    _tell_moved(console, before.environment, environment(plan.device))
    code = decision.exit_code(found=found, broken=False, enough=compared > 0 and not kept)
    words = {ExitCode.FOUND: "DIFFERENT", ExitCode.PASS: "SAME BITS", ExitCode.NOTHING: "NOT COMPARED"}
    put(console, f"{words[code]}  {compared} of {counted(len(before.cells), 'cell')} compared")
    return code


def digest_of(t: Tensor) -> str:
    """The digest of a tensor's dtype, size and bits; all NaNs are one."""
    flat = t.detach().cpu().reshape(-1)
    if flat.is_floating_point():
        flat = torch.where(flat.isnan(), torch.full_like(flat, torch.nan), flat) if flat.element_size() > 1 else flat
    content = guard_bands.as_integers(flat.contiguous()).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8, person=str(t.dtype)[6:22].encode("ascii")).hexdigest()


def _read(file: str) -> Bits:
    where = one_line(file, 200)
    bits = checked(Bits, load(file, SCHEMA), where)
    for cell in bits.cells:
        for line in cell.cases:
            case = parsed(line)
            if (case.op, case.dtype) != (cell.op, cell.dtype):
                raise UsageError(f"{where}: case={one_line(line, 300)}: expected one of {cell.op} {cell.dtype}")
    return bits


def _prepared(options: VerifyOptions) -> Plan:
    plan = prepared(options)
    torch.set_num_threads(1)  # small tensors: waiting for a second thread costs more than it computes
    return plan


def _name(cell: Cell) -> str:
    return cell.implementation.name


def _core(cell: Cell, plan: Plan) -> list[str]:
    """The case lines of the cell's core, as many as a cell may have."""
    planned = core(cell.claims, plan.profile.extent.on(plan.device), plan.seed)
    return [str(one.case) for one in planned[: plan.profile.max_examples]]


def _can_run(cell: Cell, plan: Plan, console: Console) -> bool:
    try:
        reason = why_not(cell, plan.device)
    except ImportFailed as failed:
        reason = str(failed)
    if reason:
        put(console, f"not run: {cell.op.name} {_name(cell)} {cell.dtype}: {one_line(reason, 300)}")
    return not reason


def _digests(cell: Cell, plan: Plan, lines: list[str]) -> Iterator[tuple[str, Digests]]:
    """Each case that returned something, with the digests of its outputs. A kernel that hangs has no more cases."""
    deaths = 0
    with session_of(cell.implementation), poisoned_memory():
        for line in lines:
            result = run_case(cell, parsed(line), plan, Ask(Depth.OFF))
            named = {name: digest_of(t) for name, t in result.seen.named.items()}
            if named:
                yield line, named
            deaths += died(result)
            if timed_out(result) or deaths >= _MOST_DEATHS:
                return


def _compared(cell: Cell, plan: Plan, kept: Mapping[str, Digests]) -> list[Differing]:
    now = dict(_digests(cell, plan, list(kept)))
    differ = {line: _unlike(digests, now.get(line, {})) for line, digests in kept.items()}
    differ = {line: outputs for line, outputs in differ.items() if outputs}
    again = dict(_digests(cell, plan, list(differ)))
    found = [
        Differing(case=line, outputs=outputs, unsteady=_unlike(now.get(line, {}), again.get(line, {})))
        for line, outputs in differ.items()
    ]
    return sorted(found, key=lambda each: parsed(each.case).M * parsed(each.case).N)


def _unlike(one: Digests, other: Digests) -> tuple[str, ...]:
    """The outputs of ``one`` that ``other`` has not, or with other bits. What only ``other`` has is new."""
    return tuple(name for name, digest in one.items() if other.get(name) != digest)


def _tell(console: Console, key: CellKey, differing: list[Differing], cases: int) -> None:
    if not differing:
        put(console, f"same  {key}: {counted(cases, 'case')}")
        return
    put(console, f"DIFF  {key}: {len(differing)} of {counted(cases, 'case')}")
    for each in differing[:_SHOWN]:
        unsteady = f" (from run to run too: {', '.join(each.unsteady)})" if each.unsteady else ""
        put(console, f"{', '.join(each.outputs)}{unsteady}: {each.case}", indent=6, wrap=False)
    if len(differing) > _SHOWN:
        put(console, f"and {len(differing) - _SHOWN:,} more", indent=6)


def _tell_moved(console: Console, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """What of the versions and the device is not what it was."""
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            words = f"{name}: {before.get(name, 'none')} when it was kept, {now.get(name, 'none')} now"
            put(console, one_line(words, 300))
