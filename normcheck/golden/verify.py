"""Verifying a record: its outputs are judged again and become a SweepResult, like that of ``normcheck verify``."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, undeclared_model
from normcheck.checks.finding import finding, place, worst_ratio
from normcheck.errors import ExitCode, one_line
from normcheck.gate.decision import Terms, concluded
from normcheck.gate.tally import Tally
from normcheck.golden.judge import judge_recorded, placeholder
from normcheck.golden.results import VerifiedRecord
from normcheck.golden.schema import Record, RecordedCase
from normcheck.golden.store import read
from normcheck.result import CellKey, Finding, SweepResult, Verdict
from normcheck.runner.environment import environment


def verify_folder(folder: str, argv: Sequence[str]) -> VerifiedRecord:
    """Judge the record in ``folder``. Raises UsageError if it cannot be read or is not what was recorded."""
    record = read(Path(folder))
    torch.set_num_threads(1)
    return verify_record(record, folder, argv)


def verify_record(record: Record, folder: str, argv: Sequence[str]) -> VerifiedRecord:
    """Judge every entry of ``record``, cell by cell; ``folder`` is for the command that findings print."""
    start = time.perf_counter()
    verdicts: list[Verdict] = []
    checks = 0
    for entries in _cells(record):
        verdict, count = _verdict(entries, record.device, folder)
        verdicts.append(verdict)
        checks += count
    for skipped in record.skipped:
        key = CellKey(skipped.op, skipped.implementation, skipped.dtype, record.device)
        verdicts.append(Verdict.of(key, "skip", detail=skipped.reason))
    run = SweepResult(
        argv=tuple(argv),
        seed=0,
        profile="golden",
        seconds=time.perf_counter() - start,
        environment=environment("cpu"),
        status="error",
        exit_code=ExitCode.BROKEN,
        verdicts=tuple(sorted(verdicts, key=lambda verdict: verdict.op)),
    )
    run = concluded(run, Terms())
    return VerifiedRecord(folder=folder, recorded=dict(record.environment), checks=checks, run=run)


def _cells(record: Record) -> Iterable[list[RecordedCase]]:
    cells: dict[CellKey, list[RecordedCase]] = {}
    for entry in record.entries:
        cells.setdefault(entry.cell, []).append(entry)
    return cells.values()


def _verdict(entries: list[RecordedCase], device: str, folder: str) -> tuple[Verdict, int]:
    """The verdict on the entries of one cell, and the number of checks behind it."""
    start = time.perf_counter()
    first = entries[0]
    op, implementation = OPS[first.case.op], placeholder(first)
    cell = Cell(op, implementation, first.case.dtype, implementation.name)
    tally = Tally(undeclared_model(implementation, device))
    checks, failed = 0, list[Result]()
    for number, entry in enumerate(entries):
        result = judge_recorded(entry, device)
        tally.add(result)
        checks += len(result.checked)
        if result.failed:
            tally.failed_at = number if not failed else tally.failed_at
            failed.append(result)
    bare = Verdict.of(cell.key.on(device), "skip", seconds=time.perf_counter() - start)
    if not checks and not failed:
        return tally.skipped(bare, "no output was recorded"), 0
    failure = None
    if failed:
        most_telling = min(failed, key=lambda result: (place(result), -worst_ratio(result)))
        failure = _reproduced_by_record(finding(cell, most_telling, "cpu", advise=False), folder)  # judged on the CPU
        tally.notes[f"{len(failed)} of {tally.cases} cases do not hold"] = None
    return tally.verdict(bare, op, failure), checks


def _reproduced_by_record(failure: Finding, folder: str) -> Finding:
    """``failure`` with a command that judges the record again, since the machine that made it may not be at hand."""
    advice = f"Where the implementation runs: {failure.reproduce}"
    command = f"normcheck golden verify {shlex.quote(one_line(folder, 200))}"
    return replace(failure, reproduce=command, advice=advice, explain="")
