"""Baselines: the worst ratio of each output when it was recorded, and the outputs that have drifted from it since.

Drift is inside the passing range: an upgrade that doubles an error shows before the error fails. An output has drifted
if its worst ratio is more than ``drift_ratio`` times the stored one, and above FLOOR. If both ratios are of the same
case, its ulps must also be more than ``drift_ulp`` above the stored ones: a ratio that moved only because its bound is
small is noise. Ulps of two different cases cannot be compared, so there the ratio decides alone.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from normcheck.circumstances import Ran
from normcheck.errors import UsageError, one_line
from normcheck.gate.options import VerifyOptions
from normcheck.json_types import Count, Number, Only, Whole
from normcheck.reports._ran import changes
from normcheck.reports.document import checked, load, plain
from normcheck.reports.document import text_of as written
from normcheck.result import CellKey, SweepResult, Verdict, Worst

SCHEMA = "normcheck-baseline/1"
FLOOR = 0.1
"""A ratio up to this is no drift: so far below the bound, noise alone doubles and trebles it."""

_MEANT = "if it is meant: normcheck baseline make"


_Size = Annotated[float, Only("a number >= 0", least=0.0, most=sys.float_info.max)]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The run that a cell came from. All but the ``environment`` decide which cases ran, and on which machine."""

    seed: Whole
    profile: str
    budget: Mapping[str, Number]
    machine: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class StoredWorst:
    """The worst that an output reached in a cell that passed."""

    ratio: _Size
    max_abs: _Size
    max_ulp: _Size
    case: str


@dataclass(frozen=True, kw_only=True)
class StoredCell:
    """A cell: the worst of each output over so many ``cases``; ``report``: an index into ``Document.reports``.

    ``ran``: as of a verdict.
    """

    op: str
    implementation: str
    dtype: str
    device: str
    report: Count
    cases: Count
    worst: Mapping[str, StoredWorst]
    ran: tuple[Ran, ...] = ()

    @property
    def key(self) -> CellKey:
        """The cell, with its device."""
        return CellKey(self.op, self.implementation, self.dtype, self.device)


@dataclass(frozen=True, kw_only=True)
class Document:
    """The content of a baseline file."""

    schema: str = SCHEMA
    reports: tuple[Origin, ...]
    cells: tuple[StoredCell, ...]


@dataclass(frozen=True)
class Baseline:
    """A file's cells, the reports that they came from, and how far they may drift: ``ratio`` times, ``ulp`` more."""

    file: str
    cells: Mapping[CellKey, StoredCell]
    reports: tuple[Origin, ...]
    ratio: float
    ulp: float


def document(runs: Sequence[tuple[str, SweepResult]]) -> dict[str, Any]:
    """The baseline of reports, each given with its file's name: every cell that passed.

    A cell that failed, even as known, has nothing to compare with. Raises UsageError if two reports have one cell.
    """
    cells: dict[CellKey, StoredCell] = {}
    origin: dict[CellKey, str] = {}
    for number, (file, run) in enumerate(runs):
        _check_whole(file, run)
        for verdict in run.verdicts:
            if verdict.status != "pass":
                continue
            key = _key(verdict)
            if key in cells:
                raise UsageError(f"{file}: {key} is in {origin[key]} as well: expected each cell once")
            cells[key], origin[key] = _stored(verdict, number), file
    if not cells:
        raise UsageError(f"{', '.join(file for file, _ in runs)}: expected a cell that passed")
    found: dict[str, Any] = plain(
        Document(reports=tuple(_origin_of(run) for _, run in runs), cells=tuple(cells.values()))
    )
    return found


def text_of(runs: Sequence[tuple[str, SweepResult]]) -> str:
    """``document`` as the text of a file."""
    return written(document(runs), indent=1)


def read(file: str, *, ratio: float = VerifyOptions.drift_ratio, ulp: float = VerifyOptions.drift_ulp) -> Baseline:
    """The baseline in a file, with the allowed drift. Raises UsageError, in one line, for a file that is none."""
    where = one_line(file, 200)
    found = checked(Document, load(file, SCHEMA), where)
    cells: dict[CellKey, StoredCell] = {}
    for number, cell in enumerate(found.cells):
        at = f"{where}: cells[{number}]"
        if cell.report >= len(found.reports):
            raise UsageError(f"{at}.report={cell.report}: expected the number of one of {len(found.reports)} reports")
        if cell.key in cells:
            raise UsageError(f"{at}: expected each cell once, {one_line(str(cell.key), 120)} is there twice")
        for output, kept in cell.worst.items():
            if kept.ratio > 1:
                value = f"{at}.worst.{one_line(output, 60)}.ratio={kept.ratio:g}"
                raise UsageError(f"{value}: expected at most 1, as of a cell that passed")
        cells[cell.key] = cell
    return Baseline(where, cells, found.reports, ratio, ulp)


def drifted(baseline: Baseline, verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """A message for each output that has drifted, or that was checked for the baseline and is not checked now."""
    messages = []
    for verdict in verdicts:
        stored = baseline.cells.get(_key(verdict))
        if stored is None or verdict.status not in ("pass", "thin"):
            continue
        for output, old in stored.worst.items():
            who = f"drift from {baseline.file}: {verdict.key} {output}"
            new = verdict.worst.get(output)
            if new is None:
                messages.append(f"{who} was checked then, and is not now; {_MEANT}")
            elif _has_drifted(old, new, baseline):
                ulps = f"{old.max_ulp:.3g} to {new.max_ulp:.3g} ulp"
                messages.append(f"{who}: worst ratio {old.ratio:.3g} to {new.ratio:.3g}, {ulps}; {new.case}; {_MEANT}")
    return tuple(messages)


def remarks(baseline: Baseline, run: SweepResult, *, part: bool = False) -> tuple[str, ...]:
    """Notes on the comparison: cells that one side lacks, for which other cases ran, or that run other kernels.

    ``part``: the run has only some of the baseline's cells, so that one may be missing.
    """
    own = {_key(v): v for v in run.verdicts if v.status != "skip"}
    now = _origin_of(run)
    made = {key: baseline.reports[stored.report] for key, stored in baseline.cells.items() if key in own}
    other = {key: _differences(then, now) for key, then in made.items()}
    notes = [
        ("not in it, so that no drift would show", [key for key in own if key not in baseline.cells]),
        ("in it, and not checked now", [] if part else [key for key in baseline.cells if key not in own]),
    ]
    counts = [key for key, stored in baseline.cells.items() if key in own and stored.cases != own[key].cases]
    notes.append(("made with another number of cases than were run now", counts))
    for words in dict.fromkeys(text for text in other.values() if text):
        keys = [key for key, text in other.items() if text == words]
        notes.append((f"made with {words}, so that a drift may be that of other cases or another machine", keys))
    others = [
        f"{baseline.file}: {key} runs other kernels now: {words}"
        for key, verdict in own.items()
        if key in baseline.cells
        for words in changes(baseline.cells[key].ran, verdict.ran)
    ]
    return (*(f"{baseline.file}: {words}: {_names(keys)}" for words, keys in notes if keys), *others)


def _has_drifted(old: StoredWorst, new: Worst, limits: Baseline) -> bool:
    if new.ratio <= max(limits.ratio * old.ratio, FLOOR):
        return False
    return old.case != new.case or not new.max_ulp <= old.max_ulp + limits.ulp


def _differences(then: Origin, now: Origin) -> str:
    """``seed=3 (now 0), profile=ci (now quick)``; "" if the same cases ran on the same kind of machine."""
    pairs = [
        ("seed", then.seed, now.seed),
        ("profile", then.profile, now.profile),
        ("device", then.machine, now.machine),
    ]
    pairs += [(name, then.budget.get(name, "?"), now.budget.get(name, "?")) for name in {**then.budget, **now.budget}]
    return ", ".join(f"{name}={one_line(str(a), 80)} (now {one_line(str(b), 80)})" for name, a, b in pairs if a != b)


def _names(keys: Sequence[CellKey], most: int = 4) -> str:
    names = [one_line(str(key), 120) for key in keys[:most]]
    return ", ".join(names) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def _key(verdict: Verdict) -> CellKey:
    return verdict.key.on(verdict.device)


def _origin_of(run: SweepResult) -> Origin:
    return Origin(
        seed=run.seed,
        profile=run.profile,
        budget=run.budget,
        machine=run.environment.get("device", ""),
        environment=run.environment,
    )


def _stored(verdict: Verdict, report: int) -> StoredCell:
    worst = {
        output: StoredWorst(**vars(worst))
        for output, worst in verdict.worst.items()
        if math.isfinite(worst.ratio + worst.max_abs + worst.max_ulp)
    }
    return StoredCell(**vars(_key(verdict)), report=report, cases=verdict.cases, worst=worst, ran=verdict.ran)


def _check_whole(file: str, run: SweepResult) -> None:
    if run.shard:
        raise UsageError(f"{file}: shard={run.shard}: expected a whole run, as normcheck merge writes it")
    if not run.complete:
        raise UsageError(f"{file}: complete=False: expected a run that was not interrupted")
