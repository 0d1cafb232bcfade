"""Recorded outputs, judged again: a record -> a Run, as ``normcheck verify`` makes one, told by the same report."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, undeclared_model
from normcheck.checks.finding import finding, place, worst_ratio
from normcheck.errors import one_line
from normcheck.gate.decision import Terms, decide
from normcheck.gate.tally import Tally
from normcheck.golden.judge import judged, placeholder
from normcheck.golden.results import Verified
from normcheck.golden.schema import Record, Recorded
from normcheck.golden.store import read
from normcheck.impls import discovery
from normcheck.result import Finding, Run, Uncheckable, Verdict
from normcheck.runner.environment import environment


def verified(folder: str, argv: Sequence[str]) -> Verified:
    """Judge the record in ``folder``. Raises UsageError where it is none, or no longer what was recorded."""
    record = read(Path(folder))
    torch.set_num_threads(1)
    return verified_record(record, folder, argv)


def verified_record(record: Record, folder: str, argv: Sequence[str]) -> Verified:
    """Judge every entry of ``record``, cell by cell; ``folder`` is what findings are told with."""
    start = time.perf_counter()
    verdicts: list[Verdict] = []
    checks = 0
    for entries in _cells(record):
        verdict, count = _verdict(entries, record.device, folder)
        verdicts.append(verdict)
        checks += count
    verdicts += [
        Verdict(
            op=s.op,
            implementation=s.implementation,
            dtype=s.dtype,
            device=record.device,
            status="skip",
            detail=s.reason,
        )
        for s in record.skipped
    ]
    order = list(discovery.ops())
    ordered = tuple(sorted(verdicts, key=lambda verdict: order.index(verdict.op)))
    status, code, messages = decide(ordered, Terms())
    run = Run(
        argv=tuple(argv),
        seed=0,
        profile="golden",
        seconds=time.perf_counter() - start,
        environment=environment("cpu"),
        verdicts=ordered,
        status=status,
        exit_code=code,
        messages=messages,
    )
    return Verified(folder=folder, recorded=dict(record.environment), checks=checks, run=run)


def _cells(record: Record) -> Iterable[list[Recorded]]:
    cells: dict[tuple[str, str, str], list[Recorded]] = {}
    for entry in record.entries:
        cells.setdefault((entry.case.op, entry.implementation, entry.case.dtype), []).append(entry)
    return cells.values()


def _verdict(entries: list[Recorded], device: str, folder: str) -> tuple[Verdict, int]:
    """The verdict of the entries of one cell, and how many checks it rests on."""
    start = time.perf_counter()
    first = entries[0]
    op, implementation = discovery.ops()[first.case.op], placeholder(first)
    tally = Tally(undeclared_model(implementation, device))
    checks, failed = 0, list[Result]()
    for entry in entries:
        result = judged(entry, device)
        tally.add(result, 0.0)
        checks += len(result.checked)
        failed += [result] if result.failed else []
    verdict = Verdict(
        op=op.name,
        implementation=implementation.name,
        dtype=first.case.dtype,
        device=device,
        status="fail" if failed else "pass" if checks else "skip",
        seconds=time.perf_counter() - start,
    )
    if not checks and not failed:
        detail = "; ".join(f"{reason} ({count} cases)" for reason, count in tally.refused.items())
        return replace(verdict, detail=detail or "no output was recorded"), 0
    failure = None
    if failed:
        most_telling = min(failed, key=lambda result: (place(result), -worst_ratio(result)))
        cell = Cell(op, implementation, first.case.dtype, implementation.name)
        failure = _told(finding(cell, most_telling, device, advise=False), folder)
    absent = [name for name in (*op.outputs, "dx", "dw", "db") if name in tally.missing - tally.returned]
    return replace(
        verdict,
        detail=failure.message if failure else "",
        cases=tally.cases,
        worst=dict(tally.worst),
        not_returned=tuple(absent),
        failure=failure,
        uncheckable={
            name: Uncheckable(count=count, total=total) for name, (count, total) in tally.uncheckable.items() if count
        },
        skipped=dict(tally.refused),
        model=dict(tally.declared),
        notes=(*tally.notes, *([f"{len(failed)} of {tally.cases} cases do not hold"] if failed else [])),
        vacuity=dict(tally.vacuity),
        undeclared=dict(tally.undeclared),
    ), checks


def _told(found: Finding, folder: str) -> Finding:
    """A finding about a record: what shows it again is the record; the machine that made it may not be at hand."""
    where = f"Where the implementation runs: {found.reproduce}"
    return replace(found, reproduce=f"normcheck golden verify {shlex.quote(one_line(folder, 200))}", advice=where)
