"""Baselines: how near to its bound each output came when it was recorded, and what has drifted since.

Drift is inside the passing range: an upgrade that doubles an error is seen before the error fails. An output has
drifted where its worst ratio is more than ``drift_ratio`` times the stored one, and above FLOOR; if both are of the
same case, its ulps must also be more than ``drift_ulp`` above those stored: then a ratio that moved because a bound is
small is noise. Ulps of two different cases say nothing of each other, so there the ratio decides alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from normcheck.errors import UsageError, one_line
from normcheck.reports.document import Node, load
from normcheck.result import Run, Verdict, Worst

SCHEMA = "normcheck-baseline/1"
FLOOR = 0.1
"""A ratio up to this is no drift, whatever it was: so far from its bound, noise alone doubles and trebles one."""

DRIFT_RATIO, DRIFT_ULP = 2.0, 1.0

_MEANT = "if it is meant: normcheck baseline make"

Key = tuple[str, str, str, str]
"""Op, implementation, dtype and device of a cell."""


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a stored cell came from, as far as it decides which cases were run and on what."""

    seed: int
    profile: str
    budget: Mapping[str, float]
    machine: str


@dataclass(frozen=True)
class Stored:
    """A cell: the worst of each output, over how many cases, and what it came from."""

    worst: Mapping[str, Worst]
    cases: int
    made: Made


@dataclass(frozen=True)
class Baseline:
    """The cells of a file, and how far they may drift."""

    file: str
    cells: Mapping[Key, Stored]
    ratio: float = DRIFT_RATIO
    ulp: float = DRIFT_ULP


def document(runs: Sequence[tuple[str, Run]]) -> dict[str, object]:
    """The baseline of reports, each with its file's name: every cell that passed. Raises UsageError where two have one.

    What failed, even as known, has no worst to hold anything against.
    """
    cells: dict[Key, dict[str, object]] = {}
    origin: dict[Key, str] = {}
    for number, (file, run) in enumerate(runs):
        _check_whole(file, run)
        for verdict in run.verdicts:
            if verdict.status != "pass":
                continue
            key = _key(verdict)
            if key in cells:
                raise UsageError(f"{file}: {' '.join(key)} is in {origin[key]} as well: expected each cell once")
            cells[key], origin[key] = _cell(verdict, number), file
    if not cells:
        raise UsageError(f"{', '.join(file for file, _ in runs)}: expected a cell that passed")
    made = [_made_json(_made(run)) | {"environment": dict(run.environment)} for _, run in runs]
    return {"schema": SCHEMA, "reports": made, "cells": list(cells.values())}


def text_of(runs: Sequence[tuple[str, Run]]) -> str:
    """``document`` as it is written."""
    return json.dumps(document(runs), indent=1, allow_nan=False) + "\n"


def read(file: str, *, ratio: float = DRIFT_RATIO, ulp: float = DRIFT_ULP) -> Baseline:
    """The baseline in a file. Raises UsageError, in one line, for a file that is none, and for limits that are none."""
    check_limits(ratio, ulp)
    root = load(file, SCHEMA)
    made = [_made_of(node) for node in root["reports"].items()]
    cells: dict[Key, Stored] = {}
    for node in root["cells"].items():
        key = tuple(node[name].text() for name in ("op", "implementation", "dtype", "device"))
        number = node["report"].integer()
        if number >= len(made):
            node["report"].wrong(f"the number of one of {len(made)} reports")
        assert len(key) == 4
        if key in cells:
            raise UsageError(f"{node.where}: expected each cell once, {one_line(' '.join(key), 120)} is there twice")
        worst = {output: _worst(value) for output, value in node["worst"].entries().items()}
        cells[key] = Stored(worst, node["cases"].integer(), made[number])
    return Baseline(one_line(file, 200), cells, ratio, ulp)


def check_limits(ratio: float, ulp: float) -> None:
    """Refuse limits of drift that make no sense."""
    if not 1 <= ratio < math.inf:
        raise UsageError(f"drift_ratio={ratio:g}: expected a number >= 1")
    if not 0 <= ulp < math.inf:
        raise UsageError(f"drift_ulp={ulp:g}: expected a number >= 0")


def drifted(baseline: Baseline, verdicts: Sequence[Verdict]) -> tuple[str, ...]:
    """What has drifted, a message an output: also an output that was checked then, and is not returned any more."""
    messages = []
    for verdict in verdicts:
        stored = baseline.cells.get(_key(verdict))
        if stored is None or verdict.status not in ("pass", "thin"):
            continue
        for output, old in stored.worst.items():
            said = f"drift from {baseline.file}: {' '.join(_key(verdict)[:3])} {output}"
            new = verdict.worst.get(output)
            if new is None:
                messages.append(f"{said} was checked then, and is not now; {_MEANT}")
            elif _has_drifted(old, new, baseline):
                ulps = f"{old.max_ulp:.3g} to {new.max_ulp:.3g} ulp"
                messages.append(f"{said}: worst ratio {old.ratio:.3g} to {new.ratio:.3g}, {ulps}; {new.case}; {_MEANT}")
    return tuple(messages)


def remarks(baseline: Baseline, run: Run, *, part: bool = False) -> tuple[str, ...]:
    """What a reader must know of the comparison: cells that one side lacks, and cells of which other cases ran.

    ``part``: the run is a part of what the baseline is about, so that a cell may be missing.
    """
    own = {_key(v): v for v in run.verdicts if v.status != "skip"}
    here = _made(run)
    other = {key: _differences(stored.made, here) for key, stored in baseline.cells.items() if key in own}
    said = [
        ("not in it, so that no drift would show", [key for key in own if key not in baseline.cells]),
        ("in it, and not checked now", [] if part else [key for key in baseline.cells if key not in own]),
    ]
    counts = [key for key, stored in baseline.cells.items() if key in own and stored.cases != own[key].cases]
    said.append(("made with another number of cases than were run now", counts))
    for words in dict.fromkeys(text for text in other.values() if text):
        keys = [key for key, text in other.items() if text == words]
        said.append((f"made with {words}, so that a drift may be that of other cases or another machine", keys))
    return tuple(f"{baseline.file}: {words}: {_names(keys)}" for words, keys in said if keys)


def _has_drifted(old: Worst, new: Worst, limits: Baseline) -> bool:
    if new.ratio <= max(limits.ratio * old.ratio, FLOOR):
        return False
    return old.case != new.case or not new.max_ulp <= old.max_ulp + limits.ulp


def _differences(then: Made, now: Made) -> str:
    """``seed 3 (now 0), ci profile (now quick)``; "" where the same cases are run on the same kind of machine."""
    pairs = [
        ("seed", then.seed, now.seed),
        ("profile", then.profile, now.profile),
        ("device", then.machine, now.machine),
    ]
    pairs += [(name, then.budget.get(name, "?"), now.budget.get(name, "?")) for name in {**then.budget, **now.budget}]
    return ", ".join(f"{name}={one_line(str(a), 80)} (now {one_line(str(b), 80)})" for name, a, b in pairs if a != b)


def _names(keys: Sequence[Key], most: int = 4) -> str:
    names = [one_line(" ".join(key), 120) for key in keys[:most]]
    return ", ".join(names) + (f" and {len(keys) - most} more" if len(keys) > most else "")


def _key(verdict: Verdict) -> Key:
    return verdict.op, verdict.implementation, verdict.dtype, verdict.device


def _made(run: Run) -> Made:
    return Made(seed=run.seed, profile=run.profile, budget=dict(run.budget), machine=run.environment.get("device", ""))


def _made_json(made: Made) -> dict[str, object]:
    return {"seed": made.seed, "profile": made.profile, "budget": dict(made.budget), "machine": made.machine}


def _made_of(node: Node) -> Made:
    budget = {name: value.number() for name, value in node["budget"].entries().items()}
    return Made(
        seed=node["seed"].whole(),
        profile=node["profile"].text(),
        budget=budget,
        machine=node["machine"].text(),
    )


def _cell(verdict: Verdict, report: int) -> dict[str, object]:
    names = dict(zip(("op", "implementation", "dtype", "device"), _key(verdict), strict=True))
    worst = {
        output: {"ratio": w.ratio, "max_abs": w.max_abs, "max_ulp": w.max_ulp, "case": w.case}
        for output, w in verdict.worst.items()
        if math.isfinite(w.ratio + w.max_abs + w.max_ulp)
    }
    return {**names, "report": report, "cases": verdict.cases, "worst": worst}


def _worst(node: Node) -> Worst:
    numbers = {name: node[name].number() for name in ("ratio", "max_abs", "max_ulp")}
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            node[name].wrong("a number >= 0")
    if numbers["ratio"] > 1:
        node["ratio"].wrong("at most 1, as of a cell that passed")
    return Worst(**numbers, case=node["case"].text())


def _check_whole(file: str, run: Run) -> None:
    if run.shard:
        raise UsageError(f"{file}: shard={run.shard}: expected a whole run, as normcheck merge writes it")
    if not run.complete:
        raise UsageError(f"{file}: complete=False: expected a run that was not interrupted")
