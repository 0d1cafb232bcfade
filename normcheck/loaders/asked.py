"""The shapes that a format asks for, judged after the sweep: each with a few kinds of data, as far as they fit."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from normcheck.cases.axes import ORDINARY
from normcheck.cases.case import NO_WEIGHT, Case
from normcheck.cases.case_line import parsed
from normcheck.cases.data_kinds import weight_kinds
from normcheck.cases.depth import Depth
from normcheck.checks.ask import Ask
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.checks.finding import finding
from normcheck.errors import UsageError, one_line
from normcheck.gate.engine import CellProgress, ThisMachine
from normcheck.gate.options import ReproOptions, VerifyOptions
from normcheck.gate.plan import Plan
from normcheck.gate.repro import repro_cases
from normcheck.gate.run import run
from normcheck.gate.sweep import result_of
from normcheck.gate.unchanged import Files
from normcheck.impls.implementation import Implementation
from normcheck.loaders.folder import told_of
from normcheck.oracle.compare import Expectation
from normcheck.oracle.expectations import whole
from normcheck.oracle.judge import END_TO_END
from normcheck.result import Verdict, Worst
from normcheck.runner.call import poisoned_memory
from normcheck.runner.session import session_of

Shape = tuple[int, int]
"""M, N."""

_MOST_ELEMENTS = {"cpu": 1 << 27, "cuda": 1 << 31}
"""Of one case: on a CPU some half a minute."""

_SHAPE_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 28}
"""Of all cases of one shape but the first, which is always run if it fits."""

_DETAILED_ELEMENTS = 1 << 26
"""Larger outputs are judged, and their largest errors are not told: these need the whole reference at once."""

_ALL_SECONDS = {"quick": 60.0, "ci": 300.0, "deep": 1800.0}
"""By profile; what is not expected to fit is left out, and named."""

_FIRST = ("tiny_variance", "shifted", "mixed", "normal", "offset", "large", "tail", "zero")
"""Kinds of rows that show most, for shapes of fewer rows than there are kinds."""


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What the cases of one shape showed. ``kind``: that of the finding, "" if it passed; ``left_out``: why no case of
    it was judged. ``max_abs``, ``max_rel``: the largest errors of y, against the reference in fp64.
    """

    shape: Shape
    cases: int = 0
    kind: str = ""
    message: str = ""
    failed: Case | None = None
    max_abs: float = 0.0
    max_rel: float = 0.0
    worst: Mapping[str, Worst] = field(default_factory=dict)
    left_out: str = ""

    @property
    def ratio(self) -> float:
        """The largest ratio of any output."""
        return max((one.ratio for one in self.worst.values()), default=0.0)


@dataclass(kw_only=True)
class Loaded(ThisMachine):
    """This machine, for a cell that a loader made: it has written it to ``place``, for this ``device``.

    What the cell claims is what the loader has read, whatever the kernel's process declares. ``words``: the options
    that name the user's files; ``named``: the one of them that an error names. ``asked``: shapes to judge after the
    sweep, of a failed cell only if ``always``; ``judged``: what came of them. ``given``: shapes that the kernel cannot
    refuse.
    """

    claims: Implementation
    place: Path
    device: str
    words: tuple[str, ...]
    named: str
    asked: Sequence[Shape]
    always: bool = False
    given: frozenset[Shape] = frozenset()
    judged: list[Judged] = field(default_factory=list)

    def planned(self, options: VerifyOptions) -> Plan:
        """The plan of this machine, with the loader's claims.

        Of ``--max-examples`` up to half is kept for the shapes asked for.
        """
        plan = super().planned(options)
        kept = min((options.max_examples or 0) // 2, len(set(self.asked)) * (len(ORDINARY) + 1))
        return replace(plan, cells=tuple(map(self.cell, plan.cells)), kept=kept)

    def cell(self, found: Cell) -> Cell:
        """The cell, with the loader's claims, and named by the user's files."""
        own = found.implementation
        supports = own.supports and _Refusals(own.supports, self.given) if self.claims.supports else None
        held = replace(self.claims, forward=own.forward, source=own.source, supports=supports)
        return replace(found, implementation=held, loaded=self.words)

    def checked(self, options: VerifyOptions, argv: tuple[str, ...], files: Future[Files]) -> int:
        """Run the cell as ``options`` ask for; returns the exit code. Raises UsageError."""
        with self._named(), self:
            return run(self._of_cell(options), argv, files, self)

    def reproduced(self, lines: Sequence[str], options: ReproOptions) -> int:
        """Run case lines again on the cell; returns the exit code. Raises UsageError."""
        with self._named():
            return repro_cases(str(self.place), lines, options, self.cell)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors name what the user gave, in place of what was written."""
        try:
            yield
        except UsageError as error:
            raise told_of(error, self.place, self.named) from None

    def _of_cell(self, options: VerifyOptions) -> VerifyOptions:
        """``options`` for this cell: packed rows, unless layouts are named.

        What a configuration file says of other implementations, such as which must run, is not about this one.
        """
        from_config = {"require": (), "known_failures": "", "baseline": "", "database": ""}
        asked = {name: value for name, value in from_config.items() if name in options.from_config}
        layouts = () if "layout" in options.from_config else options.layout
        return replace(
            options,
            impl=(str(self.place),),
            op=(self.claims.op,),
            dtype=self.claims.dtypes,
            layout=layouts or ("contiguous",),
            device=self.device,
            solution="",
            definition="",
            workload="",
            trace="",
            kernelbench=None,
            **asked,  # type: ignore[arg-type]
        )

    def verdicts(self, plan: Plan, options: VerifyOptions, progress: CellProgress) -> Iterator[tuple[int, Verdict]]:
        """The verdict of each cell, with what the asked shapes add to it."""
        for index, verdict in super().verdicts(plan, options, progress):
            cell = plan.cells[index]
            if verdict.status in ("pass", "thin", "skip") or (self.always and verdict.status == "fail"):
                left = math.inf if options.max_examples is None else options.max_examples - verdict.cases
                with session_of(cell.implementation), poisoned_memory():
                    self.judged = list(_judged(cell, plan, self.asked, _failing(verdict), left))
                    verdict = _with(cell, plan, verdict, self.judged)
            yield index, verdict


@dataclass(frozen=True)
class _Refusals:
    """What the kernel's process refuses, but for the shapes that are ``given``."""

    asked: Callable[[Case], str | None]
    given: frozenset[Shape]

    def __call__(self, case: Case) -> str | None:
        return None if (case.M, case.N) in self.given else self.asked(case)


def _failing(verdict: Verdict) -> Case | None:
    """The case of a finding, to be tried at other sizes."""
    return parsed(verdict.failure.case) if verdict.failure is not None else None


def _judged(
    cell: Cell, plan: Plan, asked: Sequence[Shape], failing: Case | None, cases: float = math.inf
) -> Iterator[Judged]:
    """What came of each of ``asked``, in their order; the smallest are judged first, and each once.

    They share the ``cases`` that are allowed.
    """
    end = time.monotonic() + _ALL_SECONDS[plan.profile.name]
    done: dict[Shape, Judged] = {}
    rate = 0.0  # seconds for an element, of the shape before
    for shape in sorted(set(asked), key=lambda shape: (math.prod(shape), shape)):
        left, share = end - time.monotonic(), max(cases / (len(set(asked)) - len(done)), min(cases, 1))
        if math.prod(shape) > _MOST_ELEMENTS[plan.device]:
            done[shape] = Judged(shape=shape, left_out=f"too large for a {'GPU' if plan.device == 'cuda' else 'CPU'}")
        elif left < 0 or (done and rate * math.prod(shape) > left):
            done[shape] = Judged(shape=shape, left_out="too slow for this profile")
        elif share < 1:
            done[shape] = Judged(shape=shape, left_out="no case is left for it: raise --max-examples")
        else:
            begun = time.monotonic()
            done[shape] = found = _at(cell, plan, shape, failing, end, share)
            cases -= found.cases
            rate = (time.monotonic() - begun) / max(found.cases, 1) / math.prod(shape)
    yield from (done[shape] for shape in asked)


def _at(cell: Cell, plan: Plan, shape: Shape, failing: Case | None, end: float, cases: float) -> Judged:
    found = Judged(shape=shape)
    for case in _cases(cell, plan, shape, failing):
        held: list[Expectation] = []
        detailed = math.prod(shape) <= _DETAILED_ELEMENTS
        result = run_case(cell, case, plan, Ask(Depth.OFF, watch=held.append if detailed else None))
        if result.refused:
            return replace(found, left_out=result.refused) if not found.cases else found
        max_abs, max_rel = _errors(result, held)
        found = replace(
            found,
            cases=found.cases + 1,
            max_abs=max(found.max_abs, max_abs),
            max_rel=max(found.max_rel, max_rel),
            worst=_worse(found.worst, _worst_of(result)),
        )
        if result.failed:
            seen = finding(cell, result, plan.device, advise=False)
            return replace(found, kind=seen.kind, message=seen.message, failed=case)
        if time.monotonic() > end or found.cases >= cases:
            break
    return found


def _worst_of(result: Result) -> Mapping[str, Worst]:
    found: Mapping[str, Worst] = {}
    for checked in result.checked:
        c = checked.comparison
        own = Worst(ratio=c.ratio, max_abs=c.max_abs, max_ulp=c.max_ulp, case=str(result.case))
        found = _worse(found, {checked.output: own})
    return found


def _worse(one: Mapping[str, Worst], other: Mapping[str, Worst]) -> Mapping[str, Worst]:
    """Output -> the worse of two."""
    return {
        name: max((m[name] for m in (one, other) if name in m), key=lambda worst: worst.ratio)
        for name in (*one, *(name for name in other if name not in one))
    }


def _cases(cell: Cell, plan: Plan, shape: Shape, failing: Case | None) -> Iterator[Case]:
    """Cases of this shape, the one of a finding first: each kind of rows if there is room for them, else some."""
    (rows, columns), op, claims = shape, cell.op, cell.claims
    if failing is not None:
        yield replace(failing, M=rows, N=columns)
    order = random.Random(f"{plan.seed} {shape}")
    rest = [kind for kind in ORDINARY if kind not in _FIRST]
    kinds = (*_FIRST, *order.sample(rest, len(rest)))
    if rows >= len(ORDINARY):
        kinds = ("blend", *kinds)
    most = max(1, _SHAPE_ELEMENTS[plan.device] // (rows * columns))
    weight = True in op.weights_of(claims.weights)
    for kind in kinds[: min(most, len(ORDINARY) + 1)]:
        case = Case(
            op=op.name,
            dtype=cell.dtype,
            M=rows,
            N=columns,
            eps=order.choice(claims.epsilons or (1e-5, 1e-6)),
            rows=kind,
            seed=order.randrange(1, 10**6),
            weights=order.choice(weight_kinds(op)) if weight else NO_WEIGHT,
            bias=weight and claims.values("bias")[0],
            **{axis: order.choice(own) for axis, own in claims.own.items()},
        )
        yield claims.nearest(case)


def _errors(result: Result, held: Sequence[Expectation]) -> tuple[float, float]:
    """The largest absolute and relative error of y, infinite if it is not finite where the reference is; 0 if none was
    judged. Relative ones are of normal numbers: below these, one step is the whole number.
    """
    y, expected = result.seen.named.get("y"), whole(tuple(held)).get(("y", END_TO_END))
    if y is None or expected is None or not expected[0].numel():
        return 0.0, 0.0
    right = expected[0]
    actual = y.detach().reshape(right.shape).to(right)
    told = right.isfinite()
    error = (actual - right).abs().nan_to_num(nan=math.inf, posinf=math.inf)[told]
    size = right.abs()[told]
    relative = (error / size)[size >= torch.finfo(y.dtype).tiny]
    return float(error.amax()) if error.numel() else 0.0, float(relative.amax()) if relative.numel() else 0.0


def _with(cell: Cell, plan: Plan, verdict: Verdict, judged: Sequence[Judged]) -> Verdict:
    """``verdict`` and what the asked shapes showed: a failure of one is its failure."""
    own = {one.shape: one for one in judged}.values()
    cases = verdict.cases + sum(one.cases for one in own)
    ran = sum(1 for one in own if one.cases)
    out = {f"{one.shape[0]}x{one.shape[1]}: {one.left_out}": None for one in own if one.left_out}
    notes = [f"shapes asked for: {ran} of {len(own)} judged"] if own else []
    notes += [f"shapes asked for, not judged: {'; '.join(list(out)[:8])}"] if out else []
    if verdict.status == "skip" and ran:
        others = one_line(verdict.detail, 200, keep_end=False)
        detail = f"only the shapes that were asked for were judged; of others: {others}"
        verdict = replace(verdict, status="thin", detail=detail, skipped=dict(list(verdict.skipped.items())[:3]))
    failed = next((one.failed for one in own if one.failed is not None), None)
    if failed is not None and verdict.status != "fail":
        found = result_of(cell, failed, plan)
        if found.status == "fail":
            kept: Mapping[str, object] = {"source": verdict.source, "machine": verdict.machine, "core": verdict.core}
            verdict = replace(found, **kept, seconds=verdict.seconds + found.seconds, shapes=verdict.shapes)  # type: ignore[arg-type]
    worst = dict(verdict.worst)
    for one in own:
        worst = dict(_worse(worst, one.worst))
    return replace(
        verdict, cases=cases, shapes=(verdict.shapes or 0) + ran, notes=(*verdict.notes, *notes), worst=worst
    )
