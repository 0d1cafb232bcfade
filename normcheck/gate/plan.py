"""Plan of a run: its cells, profile, seed and device as data, made from the options without any effect."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from normcheck.cases.case import Case
from normcheck.cases.claims import weight_layout
from normcheck.cases.declared import WEIGHT_LAYOUTS
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.layouts import HEADS, RANK4, TRAILING
from normcheck.cases.ops import OPS
from normcheck.cases.sizes import Extent
from normcheck.checks.cell import Cell
from normcheck.contexts.catalogue import contexts_on
from normcheck.errors import UsageError, shown
from normcheck.gate import early
from normcheck.gate.options import ALL_CONFIGURATIONS, VerifyOptions
from normcheck.gate.requirements import EVERY_CELL, requirement
from normcheck.impls import discovery
from normcheck.impls.implementation import Implementation
from normcheck.oracle.judging import FUSED
from normcheck.planner.must import Limits
from normcheck.planner.planner import Planner
from normcheck.result import CellKey
from normcheck.runner.session import FIRST_CALLS


@dataclass(frozen=True)
class Dear:
    """The time and the cases of a cell if building is dear, because its kernel compiles, tunes or plans.

    On a GPU such a cell may take ``gpu_seconds`` of wall time before the cases after its core, and up to
    ``most_gpu_seconds`` for what a pass needs; on a CPU three times the ``core_seconds``. A pass needs so many
    ``cases`` on so many ``shapes``, or on three if so many keys take longer than ``gpu_seconds``.

    ``run_seconds``: what such cells that follow each other may take in all, so that a run of many cells ends in time.
    Each then has a ``share`` of its seconds.
    """

    gpu_seconds: float
    most_gpu_seconds: float
    cases: int
    shapes: int
    run_seconds: float = math.inf
    share: float = 1.0

    def in_turn(self, cells: float) -> Dear:
        """The limits if so many cells follow each other."""
        fitting = self.run_seconds / max(cells, 1.0) / self.gpu_seconds
        return replace(self, share=min(1.0, max(fitting, LEAST_SHARE)))


LEAST_SHARE = 0.8
"""A cell in which building is dear has this share of its seconds, however many cells follow each other."""

_CORES = 3.0
"""On a CPU building may take twice the seconds of a core, beside them."""


@dataclass(frozen=True)
class Profile:
    """How much a cell may cost, and what it must have run.

    ``extent``: the size of its core, which may take ``core_seconds`` without compiling and the like. Other cases
    follow for ``seconds``; core and what is drawn are at most ``max_examples`` cases. ``shrink_seconds``: limit of
    the search for a more telling failing case, and of that for a simpler one; neither takes more than ``seconds``.
    ``explain_seconds``: limit of the search for a known fault that explains a failure; 0: nor is any advice looked for.

    ``large_share``: a large case is run only if it is expected to take at most this share of the seconds that are left.
    On a GPU each large case is run ``large_times``, with different data: races show in some runs only. ``powers``: on
    a GPU, contiguous cases of more than 2^p elements for each p; () also leaves out ``beyond.EXTREME``. ``sanitizer``:
    whether a cell that passes on a GPU is also run under compute-sanitizer.

    ``dear``: the limits of a cell in which building is dear.
    """

    name: str
    max_examples: int
    seconds: float
    extent: Extent
    core_seconds: float
    dear: Dear
    large_share: float = 0.4
    large_times: int = 1
    powers: tuple[int, ...] = ()
    sanitizer: bool = False
    shrink_seconds: float = 45.0
    explain_seconds: float = 10.0


_QUICK = Extent(rows=5000, paired_rows=5000, elements=600_000, heights=3, widths=2, dear_rows=300)
_CI = Extent(rows=8193, paired_rows=8193, elements=1_200_000, heights=7, widths=8, dear_rows=4097)

_QUICK_DEAR = Dear(16.0, 60.0, 100, 6, run_seconds=101.0)
_CI_DEAR = Dear(150.0, 300.0, 1000, 20)
_DEEP_DEAR = Dear(1800.0, 3600.0, 2000, 20)
_DEEP: Mapping[str, Any] = {"large_times": 25, "powers": (31, 32), "sanitizer": True, "explain_seconds": 60.0}

PROFILES = {
    profile.name: profile
    for profile in (
        Profile("quick", 400, 5.0, _QUICK, 60.0, _QUICK_DEAR),
        Profile("ci", 1500, 45.0, _CI, 300.0, _CI_DEAR, large_times=4, powers=(31,), explain_seconds=40.0),
        Profile("deep", 20000, 900.0, _CI, 1800.0, _DEEP_DEAR, **_DEEP),
        Profile("soak", 1000, 20.0, _QUICK, 60.0, replace(_QUICK_DEAR, run_seconds=math.inf)),
    )
}


@dataclass(frozen=True)
class Replay:
    """Cases of a cell that failed in earlier runs, and notes on stored ones that could not be read."""

    cases: tuple[Case, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Everything that a sweep needs to know. ``device`` is "cpu" or "cuda"; ``timeout`` is per case, in seconds.

    ``shard``: (K, N) runs every N-th case of each cell, from the K-th on. ``replays``: cases that the first shard runs
    before all others. ``required``: what ``--require`` says. ``judge``: one of ``oracle.judging.JUDGES``. ``workers``:
    cells that run side by side. ``expected_seconds``: what a cell took in an earlier run. ``elsewhere``: cells that
    another shard judges. ``contexts``: those in which a cell is tried after its core. ``first_calls``, ``within`` and
    ``asked``: see ``checks.cell.Setting``. ``in_python``: whether a call of this package asked for it, and no command.
    ``configs``: what ``--configs`` says. ``kept``: cases of those that a cell is allowed, for what follows its sweep.
    """

    cells: tuple[Cell, ...]
    profile: Profile
    seed: int
    device: str
    timeout: float
    shard: tuple[int, int] = (1, 1)
    replays: Mapping[CellKey, Replay] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    judge: str = FUSED
    workers: int = 1
    expected_seconds: Mapping[CellKey, float] = field(default_factory=dict)
    elsewhere: frozenset[CellKey] = frozenset()
    first_calls: float = FIRST_CALLS
    contexts: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    asked: bool = False
    held_to: tuple[str, ...] = ()
    in_python: bool = False
    configs: str = "won"
    kept: int = 0

    @property
    def most(self) -> int:
        """The cases that the sweep of a cell is allowed."""
        return self.profile.max_examples - self.kept

    @property
    def is_limited(self) -> bool:
        """Whether somebody asked for a number of cases."""
        return self.profile.max_examples != PROFILES[self.profile.name].max_examples

    @property
    def allowed(self) -> str:
        """What limits the cases of a cell, as whoever asked for it knows it."""
        most, name = self.profile.max_examples, self.profile.name
        if not self.is_limited:
            return f"profile {name} allows {most:,}"
        words = f"max_examples={most}" if self.in_python else f"--max-examples {most}"
        return words + f", {self.kept} kept for the shapes asked for" * (self.kept > 0)


def limits_of(plan: Plan, used: float = 0.0) -> Limits:
    """The limits of one cell, of which ``used`` seconds are over."""
    profile, on_gpu = plan.profile, plan.device != "cpu"
    dear, on_cpu = profile.dear, _CORES * profile.core_seconds
    return Limits(
        usual=dear.gpu_seconds * dear.share if on_gpu else on_cpu,
        telling=dear.gpu_seconds * (2 if dear.share == 1.0 else dear.share) if on_gpu else on_cpu,
        most=dear.most_gpu_seconds if on_gpu else on_cpu,
        core=profile.core_seconds,
        least=(dear.cases, dear.shapes),
        cases=plan.most,
        used=used,
    )


def planner_of(cell: Cell, plan: Plan, used: float = 0.0) -> Planner:
    """The planner of one cell, of which ``used`` seconds are over."""
    return Planner(
        cell.claims,
        plan.profile.extent.on(plan.device),
        plan.seed,
        plan.device,
        limits_of(plan, used),
        shard=plan.shard,
        builds=cell.implementation.builds,
        layouts=cell.layouts,
    )


def plan_of(options: VerifyOptions, device: str, chosen: Sequence[tuple[str, Implementation]]) -> Plan:
    """The plan that ``options`` ask for. Raises UsageError.

    ``chosen``: (its name on the command line, implementation), for each one to check.
    """
    profile = profile_of(options)
    cells = _cells([(spec, asked_for(options.layout, spec, i)) for spec, i in chosen], options)
    required = _required(options, cells)
    early.required(required, sorted({cell.implementation.name for cell in cells}))
    shard = shard_of(options.shard, profile)
    return Plan(
        cells,
        profile,
        options.seed,
        device,
        options.timeout,
        shard,
        required=required,
        judge=options.judge,
        contexts=contexts_of(options, device),
        asked=bool(options.context),
        held_to=options.require_context,
        configs=configs_of(options),
    )


def contexts_of(options: VerifyOptions, device: str) -> tuple[str, ...]:
    """The contexts that ``options`` ask for, or all of the device; () if they ask for none."""
    if not options.contexts:
        return ()
    return tuple(dict.fromkeys((*(options.context or contexts_on(device)), *options.require_context)))


def configs_of(options: VerifyOptions) -> str:
    """What ``options`` say of configurations, "" for what the profile says. Raises UsageError for a single one."""
    if options.configs not in ("", *ALL_CONFIGURATIONS):
        expected = f"expected {' or '.join(ALL_CONFIGURATIONS)}; one alone is for a single case"
        raise UsageError(f"configs={options.configs}: {expected}, as in normcheck repro")
    return options.configs


def profile_of(options: VerifyOptions) -> Profile:
    """The profile that ``options`` name, with the budgets that they set instead of its own."""
    profile = PROFILES[options.profile]
    if options.max_examples is not None:
        # all of this number is run, however long it takes, unless a time is set as well
        profile = replace(profile, max_examples=options.max_examples, seconds=max(profile.seconds, 86400.0))
    if options.time_budget is not None:
        profile = replace(profile, seconds=options.time_budget)
    return profile


def shard_of(text: str, profile: Profile) -> tuple[int, int]:
    """(K, N) of ``--shard K/N``; (1, 1) without it. Raises UsageError."""
    number, count = early.shard_parts(text)
    if count > profile.max_examples:
        raise UsageError(f"shard={text} max_examples={profile.max_examples}: expected a case for each shard")
    return number, count


def asked_for(layouts: Sequence[str], spec: str, implementation: Implementation) -> Implementation:
    """``implementation``, which also takes those of these ``layouts`` that must be declared, if it is a user's own.

    A plain function cannot declare it, and whoever asks for it by name knows. What a known one declares stays.
    """
    if spec in discovery.implementations():
        return implementation
    ranks = (2, 3, 4) if RANK4 in layouts else implementation.ranks
    own = implementation.weight_layouts
    of_weight = tuple(name for name in WEIGHT_LAYOUTS if weight_layout(name) in layouts or name in own)
    heads = HEADS in layouts or implementation.heads
    asked = replace(implementation, ranks=ranks, heads=heads, weight_layouts=of_weight)
    if TRAILING in layouts and True in implementation.weights:
        return replace(asked, trailing=True, weights=(True,))
    return asked


def _cells(chosen: Sequence[tuple[str, Implementation]], options: VerifyOptions) -> tuple[Cell, ...]:
    dtypes, layouts = tuple(dict.fromkeys(options.dtype)) or DTYPES, tuple(dict.fromkeys(options.layout))
    named = [(_one_of_many(spec, i, chosen), i) for spec, i in _told_apart(chosen)]
    cells = [Cell(OPS[i.op], i, dtype, spec, layouts) for spec, i in named for dtype in dtypes]
    specs: dict[CellKey, str] = {}
    for cell in cells:
        if cell.key in specs:
            who = f"impl={cell.spec}: {shown(cell.implementation.name)} of {cell.op.name}"
            raise UsageError(f"{who} is in impl={specs[cell.key]} as well: expected another name in one of them")
        specs[cell.key] = cell.spec
    return tuple(sorted(cells, key=lambda cell: cell.op.name))


def _one_of_many(spec: str, implementation: Implementation, chosen: Sequence[tuple[str, Implementation]]) -> str:
    """What names this implementation alone on a command line: with its name, if its file has others of the op."""
    alike = [i for own, i in chosen if own == spec and i.op == implementation.op]
    alone = len(alike) == 1 or not spec.endswith(".py") or ":" in implementation.name
    return spec if alone else f"{spec}:{implementation.name}"


def _told_apart(chosen: Sequence[tuple[str, Implementation]]) -> list[tuple[str, Implementation]]:
    """Implementations of the same name in files of the same name have their folders in their names."""
    count = Counter((i.op, i.name) for _, i in chosen)
    told = []
    for spec, i in chosen:
        path = Path(i.source)
        if count[i.op, i.name] > 1 and path.suffix == ".py" and i.name.startswith(path.name):
            i = replace(i, name=f"{path.parent.name or path.resolve().parent.name}/{i.name}")
        told.append((spec, i))
    return told


def _required(options: VerifyOptions, cells: Sequence[Cell]) -> tuple[str, ...]:
    """The implementations that must run.

    If the command line chooses cells, a configuration file's ``require`` holds only for the implementations in them.
    """
    chosen = any(getattr(options, name) and name not in options.from_config for name in ("op", "impl", "dtype"))
    if not chosen or "require" not in options.from_config:
        return options.require
    names = {cell.implementation.name for cell in cells}
    return tuple(text for text in options.require if requirement(text).name in (*names, EVERY_CELL))
