"""What the command line asked for, checked, and turned into a Plan."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normcheck.cases.case import Case, parse
from normcheck.cases.data_kinds import DY_KINDS, ROW_KINDS, WEIGHT_KINDS
from normcheck.cases.dtypes import DTYPES
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError, check_names, one_line, one_of, shown
from normcheck.files import resolved
from normcheck.gate import baseline, replay
from normcheck.gate import known_failures as known
from normcheck.gate.baseline import DRIFT_RATIO, DRIFT_ULP
from normcheck.gate.decision import Terms
from normcheck.gate.plan import PROFILES, Plan, Profile
from normcheck.impls import discovery
from normcheck.impls.implementation import Implementation
from normcheck.reports.report import formats
from normcheck.runner.device import device_for

MOST_WORKERS = 64


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of ``normcheck verify``, as they were given.

    ``part``: of what a configuration file asks for; ``config``: that file; ``from_config``: what it says of these;
    ``verbosity``: -1 quiet, 1 verbose.
    """

    ops: tuple[str, ...] = ()
    impls: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    profile: str = "quick"
    max_examples: int | None = None
    time_budget: float | None = None
    seed: int = 0
    device: str = "auto"
    require: tuple[str, ...] = ()
    reports: tuple[str, ...] = ()
    timeout: float = 120.0
    workers: int = 1
    isolation: bool = True
    known_failures: str = ""
    baseline: str = ""
    drift_ratio: float = DRIFT_RATIO
    drift_ulp: float = DRIFT_ULP
    shard: str = ""
    database: str = ""
    allow_thin: bool = False
    part: bool = False
    config: str = ""
    from_config: tuple[str, ...] = ()
    verbosity: int = 0


def request_of(values: Mapping[str, Any]) -> Request:
    """A Request of ``config.settings``; what is not among them is as it is by default."""
    renamed = {"op": "ops", "impl": "impls", "dtype": "dtypes", "report": "reports"}
    fields = {renamed.get(key, key): value for key, value in values.items()}
    for key, value in fields.items():
        if isinstance(value, list):
            fields[key] = tuple(value)
    if "seed" in fields:
        fields["seed"] = seed_of(fields["seed"])
    return Request(**fields)


def seed_of(text: str) -> int:
    """``--seed``: an integer, or ``random`` for one that nobody has chosen."""
    if text == "random":
        return secrets.randbelow(1 << 31)
    if not re.fullmatch(r"-?[0-9]{1,1000}", text):
        raise UsageError(f"seed={one_line(text, 60)}: expected an integer of at most 1000 digits, or random")
    return int(text)


@dataclass(frozen=True)
class Target:
    """Where a report goes: its format and a path, "-" being standard output."""

    format: str
    path: str


def plan_of(request: Request) -> Plan:
    """The cells and budgets that ``request`` asks for. Raises UsageError for whatever is wrong with it."""
    check_names("op", request.ops, tuple(discovery.ops()))
    check_names("dtype", request.dtypes, DTYPES)
    if not 1 <= request.workers <= MOST_WORKERS:
        raise UsageError(f"workers={request.workers}: expected an integer from 1 to {MOST_WORKERS}")
    if request.workers > 1 and not request.isolation:
        raise UsageError(f"workers={request.workers}: expected 1 with --no-isolation, where all is one process")
    check_timeout(request.timeout)
    device = device_for(request.device)
    profile = profile_of(request)
    cells = _cells(request, device)
    for name in required_of(request, cells):
        names = sorted({cell.implementation.name for cell in cells})
        if name not in names:
            raise UsageError(f"require={name}: expected {one_of(names)}, which are what is checked")
    shard = shard_of(request, profile)
    replays = replay.replays(request.database, cells, parsed) if request.database else {}
    return Plan(cells, profile, request.seed, device, request.timeout, shard, replays)


def required_of(request: Request, cells: Sequence[Cell]) -> tuple[str, ...]:
    """The implementations that must run: where the command line says which cells, of a file's those that are there."""
    asked = {"op": request.ops, "impl": request.impls, "dtype": request.dtypes}
    said = any(values and key not in request.from_config for key, values in asked.items())
    if not said or "require" not in request.from_config:
        return request.require
    names = {cell.implementation.name for cell in cells}
    return tuple(name for name in request.require if name in names)


def shard_of(request: Request, profile: Profile) -> tuple[int, int]:
    """(K, N) of ``--shard K/N``; (1, 1) where there is one job. Raises UsageError."""
    if not request.shard:
        return (1, 1)
    match = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", request.shard)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"shard={one_line(request.shard, 60)}: expected K/N with 1 <= K <= N <= 9999")
    number, count = int(match[1]), int(match[2])
    if count > profile.max_examples:
        raise UsageError(f"shard={request.shard} max_examples={profile.max_examples}: expected a case for each shard")
    return number, count


def terms_of(request: Request, *, required: Sequence[str] = ()) -> Terms:
    """What the run is held against beside the bounds, read from the files that ``request`` names.

    ``required``: what is required beside what ``request`` says.
    """
    entries = known.read(request.known_failures) if request.known_failures else ()
    stored = None
    baseline.check_limits(request.drift_ratio, request.drift_ulp)
    if request.baseline:
        stored = baseline.read(request.baseline, ratio=request.drift_ratio, ulp=request.drift_ulp)
    names = tuple(dict.fromkeys((*request.require, *required)))
    return Terms(
        required=names,
        known=entries,
        baseline=stored,
        part=request.part,
        judged=not request.shard,
        dtypes=request.dtypes,
        allow_thin=request.allow_thin,
    )


def targets_of(request: Request, *, read: Sequence[str] = ()) -> tuple[Target, ...]:
    """Where the reports go; complains before the sweep about what could not be written after it.

    ``read``: files that are read, beside those that ``request`` names.
    """
    found = targets(request.reports, tuple(formats()))
    files = [spec if spec.endswith(".py") else spec.rpartition(":")[0] for spec in request.impls]
    used = {
        resolved(path) for path in (*files, *read, request.known_failures, request.baseline, request.config) if path
    }
    for target in found:
        if target.path != "-" and resolved(target.path) in used:
            said = f"report={target.format}:{one_line(target.path, 200)}"
            raise UsageError(f"{said}: expected another file, this one is read")
    return found


def targets(reports: tuple[str, ...], formats: tuple[str, ...]) -> tuple[Target, ...]:
    """``FORMAT:PATH`` of each report, checked. Raises UsageError."""
    found = []
    for text in reports:
        name, colon, path = text.partition(":")
        if name not in formats or not colon or not path:
            raise UsageError(f"report={text}: expected FORMAT:PATH with FORMAT {one_of(formats)}")
        if path != "-" and not _writable(Path(path)):
            raise UsageError(
                f"report={one_line(text, 200)}: expected a path of a file that can be written, in a folder that exists"
            )
        found.append(Target(name, path))
    if sum(target.path == "-" for target in found) > 1:
        raise UsageError("report=...:-: expected at most one report on standard output")
    paths = [resolved(target.path) for target in found if target.path != "-"]
    for target in found:
        if target.path != "-" and paths.count(resolved(target.path)) > 1:
            raise UsageError(f"report={target.format}:{target.path}: expected a file of its own for each report")
    return tuple(found)


def selected(
    spec: str, ops: tuple[str, ...], device: str, timeout: float, *, isolation: bool
) -> tuple[Implementation, ...]:
    """What ``spec`` names; with ``isolation`` its code is imported by another process, and called there."""
    if not isolation:
        return discovery.select(spec, ops)
    from normcheck.isolation.client import select_apart

    return select_apart(spec, ops, device, timeout)


def _writable(path: Path) -> bool:
    try:
        if path.is_file():
            path.open("ab").close()  # changes nothing, and no right that is read from its mode says as much
            return True
        folder = path.resolve().parent
        return not path.is_dir() and (path.exists() or (folder.is_dir() and os.access(folder, os.W_OK)))
    except (OSError, ValueError):  # also a name that no file can have
        return False


def parsed(line: str) -> Case:
    """The case of a line, in the words of the ops and kinds of data that there are. Raises UsageError."""
    ops = discovery.ops()
    options = {name: op.options for name, op in ops.items()}
    case = parse(line, options=options, kinds={"rows": ROW_KINDS, "dy": DY_KINDS, "weights": WEIGHT_KINDS})
    if case.bias not in ops[case.op].biases:
        if case.bias:
            raise UsageError(f"bias=yes in the case line: {case.op} has none, expected bias=none")
        raise UsageError(f"bias=none in the case line: {case.op} always has a bias, expected the line without that")
    return case


def check_timeout(seconds: float) -> None:
    """Refuse a time limit that no timer can keep."""
    if not 0 < seconds <= 1e6:
        raise UsageError(f"timeout={seconds:g}: expected seconds > 0, at most 1e6")


def profile_of(request: Request) -> Profile:
    """The profile that was asked for, with its own budgets or those asked for. Raises UsageError."""
    check_names("profile", (request.profile,), tuple(PROFILES))
    profile = PROFILES[request.profile]
    if request.max_examples is not None:
        if request.max_examples < 1:
            raise UsageError(f"max_examples={request.max_examples}: expected an integer >= 1")
        # a number that was asked for is a number that is run, unless a time is asked for as well
        profile = replace(profile, max_examples=request.max_examples, seconds=max(profile.seconds, 86400.0))
    if request.time_budget is not None:
        if not 0 < request.time_budget <= 1e6:
            raise UsageError(f"time_budget={request.time_budget:g}: expected seconds > 0, at most 1e6")
        profile = replace(profile, seconds=request.time_budget)
    return profile


def _cells(request: Request, device: str) -> tuple[Cell, ...]:
    op_names = tuple(dict.fromkeys(request.ops))
    dtypes = tuple(dict.fromkeys(request.dtypes)) or DTYPES
    asked = dict.fromkeys(request.impls, op_names) or discovery.by_default(device, op_names)
    cells = [
        Cell(discovery.ops()[implementation.op], implementation, dtype, spec)
        for spec, ops in asked.items()
        for implementation in selected(spec, ops, device, request.timeout, isolation=request.isolation)
        for dtype in dtypes
    ]
    places: dict[tuple[str, str, str], str] = {}
    for cell in cells:
        key = cell.op.name, cell.implementation.name, cell.dtype
        if key in places:
            who = f"impl={cell.spec}: {shown(cell.implementation.name)} of {cell.op.name}"
            raise UsageError(f"{who} is in impl={places[key]} as well: expected another name in one of them")
        places[key] = cell.spec
    order = list(discovery.ops())
    return tuple(sorted(cells, key=lambda cell: order.index(cell.op.name)))
