"""One cell of an audit: a planted fault or a correct kernel, judged by the gate like any other implementation."""

from __future__ import annotations

import gc
import math
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from normcheck.audit import catalogue
from normcheck.audit.equivalence import differs_from_clean, first_failing_case
from normcheck.audit.explanations import is_right
from normcheck.audit.mutants.channels import Grouped
from normcheck.audit.mutants.gated import Gated
from normcheck.audit.mutants.kernel import CLEAN
from normcheck.audit.mutants.l2norm import Length
from normcheck.audit.mutants.modulated_add import GatedAdding
from normcheck.audit.mutants.modulated_kernel import Modulated
from normcheck.audit.mutants.mutant import Mutant
from normcheck.audit.mutants.quantised import Quantising
from normcheck.audit.mutants.regimes import REGIMES, Regime
from normcheck.audit.mutants.residual import Adding
from normcheck.audit.mutants.turned import Turned
from normcheck.audit.mutants.under import under
from normcheck.audit.mutants.under import why_not as why_not_under
from normcheck.audit.recipe_judge import CAUGHT, Judgement, judge_kernel, judge_mutant
from normcheck.audit.recipe_judge import NOT_EXERCISED as NOT_RUN
from normcheck.audit.recipes import recipe
from normcheck.audit.score import ERROR, KILLED, NOT_EXERCISED, SURVIVED, Control, Outcome
from normcheck.cases.op import Op
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.diagnosis.explain import VALUES
from normcheck.errors import itself_failed
from normcheck.gate.options import PROMISING, VerifyOptions
from normcheck.gate.plan import PROFILES, Plan, Profile
from normcheck.gate.sweep import run_cell
from normcheck.impls.implementation import Implementation
from normcheck.oracle.judging import FUSED
from normcheck.result import CellKey, Finding, Verdict
from normcheck.runner.device import device_for
from normcheck.runner.time_limit import TimeIsUp, alarm

PROMISES = PROMISING
"""If one of these profiles promises to kill a mutant, so do those after it."""

CONTROL_CASES = 30
EXPLAIN_SECONDS = 60.0
"""For the diagnosis: it is asked what it knows, not how busy the machine is."""

TIMEOUT = VerifyOptions.timeout
"""Seconds per case."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One cell to run, as plain data that can be sent to another process.

    ``name``: a mutant's id, or with ``control`` the name of a correct kernel. ``recipe``: judge by this recipe instead
    of the gate, unless it is empty. ``judge``: one of ``oracle.judging.JUDGES``. ``regime``: the fault is there only in
    the calls of this regime, unless it is empty. ``shrink``: also look for a simpler failing case. ``explain``: also
    ask the diagnosis what a wrong value might be.
    """

    name: str
    op: str
    dtype: str
    profile: str
    seed: int
    device: str
    control: bool = False
    recipe: str = ""
    judge: str = FUSED
    regime: str = ""
    shrink: bool = True
    explain: bool = False


TrialResult = Outcome | Control


def start(device: str) -> None:
    """Make this process ready for trials, like a process of ``verify``."""
    gc.freeze()
    torch.set_num_threads(1)  # small tensors: waiting for a second thread costs more than it computes
    device_for(device)


def run_trial(trial: Trial) -> TrialResult:
    """Run one trial. An exception of normcheck itself becomes the trial's result, so that the other cells go on."""
    try:
        return _control(trial) if trial.control else _outcome(trial)
    except Exception as error:
        return _failed(trial, itself_failed(error))


def crashed(trial: Trial) -> TrialResult:
    """The result of a trial whose process died while it ran nothing else."""
    message = "its process ended while nothing else ran in it"
    if trial.control:
        return replace(_blank_control(trial), accused=True, kind="crash", message=message)
    return replace(blank(trial), status=KILLED, kind="crash", reason=message)


def runs_alone(trial: Trial) -> bool:
    """Whether a trial needs a process of its own: a fault that only a GPU shows may destroy the GPU's context."""
    return trial.device == "cuda" and not trial.control and bool(catalogue.mutants()[trial.name].device)


def blank(trial: Trial) -> Outcome:
    """The outcome of a mutant's cell before it is run: not exercised, with the reason if it cannot be run."""
    mutant = _planted(trial)
    return Outcome(
        id=mutant.id,
        op=trial.op,
        dtype=trial.dtype,
        status=NOT_EXERCISED,
        reason=why_not(mutant, trial.device) or _why_not_under(trial),
        what=mutant.what,
        source=mutant.source,
        promised=PROMISES.index(mutant.promised) <= PROMISES.index(trial.profile),
        regime=trial.regime,
    )


def _planted(trial: Trial) -> Mutant:
    mutant = catalogue.mutants()[trial.name]
    return under(REGIMES[trial.regime], mutant) if trial.regime else mutant


def _why_not_under(trial: Trial) -> str:
    return why_not_under(REGIMES[trial.regime], catalogue.mutants()[trial.name]) if trial.regime else ""


def why_not(mutant: Mutant, device: str) -> str:
    """Why a mutant cannot be run here, or an empty string."""
    if mutant.not_exercised:
        return mutant.not_exercised
    return "shows on a GPU only" if mutant.device == "cuda" and device != "cuda" else ""


def _blank_control(trial: Trial) -> Control:
    return Control(name=trial.name, op=trial.op, dtype=trial.dtype, accused=False)


def _failed(trial: Trial, reason: str) -> TrialResult:
    if trial.control:
        return replace(_blank_control(trial), reason=reason, error=True)
    return replace(blank(trial), status=ERROR, reason=reason)


def _outcome(trial: Trial) -> Outcome:
    outcome = blank(trial)
    if outcome.reason:
        return outcome
    if trial.regime and not differs_from_clean(*_within(trial)):
        return replace(outcome, reason="no case within the regime tells it from the clean kernel")
    verdict = _verdict(trial, _planted(trial).make(trial.op))
    status = {"fail": KILLED, "pass": SURVIVED, "thin": SURVIVED, "skip": NOT_EXERCISED}.get(verdict.status, ERROR)
    failure = verdict.failure
    reason = verdict.detail if status in (NOT_EXERCISED, ERROR) else ""
    if status == SURVIVED:
        parts = (_missed(trial) if trial.regime else "", verdict.detail, _nearest(verdict))
        reason = "; ".join(part for part in parts if part)
    return replace(
        outcome,
        status=status,
        kind=failure.kind if failure else "",
        output=failure.output if failure else "",
        case=failure.case if failure else "",
        cases=verdict.cases,
        seconds=verdict.seconds,
        reason=reason,
        **_explanation(trial, failure),
    )


def _explanation(trial: Trial, failure: Finding | None) -> dict[str, Any]:
    """What the diagnosis says of a planted fault that was found by a wrong value."""
    if failure is None or failure.kind not in VALUES or not trial.explain:
        return {}
    name = failure.explanation.name if failure.explanation else ""
    return {"asked": True, "explanation": name, "rightly": is_right(name, trial.name)}


def _plan(trial: Trial, profile: Profile, *cells: Cell) -> Plan:
    return Plan(cells, profile, trial.seed, trial.device, TIMEOUT, judge=trial.judge)


def _within(trial: Trial) -> tuple[Regime, Mutant, Op, str, Plan]:
    """The arguments of ``differs_from_clean`` and ``first_failing_case`` for a trial under a regime."""
    op, plan = OPS[trial.op], _plan(trial, PROFILES[trial.profile])
    return REGIMES[trial.regime], catalogue.mutants()[trial.name], op, trial.dtype, plan


def _missed(trial: Trial) -> str:
    """Why a fault under a regime survived the sweep: no case that shows it was run, or the bound allows it."""
    case = first_failing_case(*_within(trial))
    return f"not run, and fails: {case}" if case else "passes in every case within the regime: its bound allows it"


def _nearest(verdict: Verdict) -> str:
    """The largest ratio of a fault that passed, with its output and case."""
    output, worst = max(verdict.worst.items(), key=lambda item: item[1].ratio, default=("", None))
    if worst is None:
        return ""
    ratio = math.floor(worst.ratio * 1000) / 1000  # at most 1, and never rounded to it
    return f"largest ratio {ratio:g} ({output}), {worst.case}"


def _control(trial: Trial) -> Control:
    (implementation,) = (i for i in catalogue.controls() if (i.name, i.op) == (trial.name, trial.op))
    verdict = _verdict(trial, implementation)
    failure = verdict.failure
    return replace(
        _blank_control(trial),
        accused=verdict.status == "fail",
        kind=failure.kind if failure else "",
        output=failure.output if failure else "",
        case=failure.case if failure else "",
        message=failure.message if failure else "",
        cases=verdict.cases,
        seconds=verdict.seconds,
        reason=verdict.detail if verdict.status in ("skip", "error") else "",
        error=verdict.status == "error",
    )


_SECONDS = 600.0
"""For a core, and for what follows: cells are limited by cases, so that a busy machine changes no outcome."""


def _verdict(trial: Trial, implementation: Implementation) -> Verdict:
    if trial.recipe:
        return _by_recipe(trial, implementation)
    profile = replace(PROFILES[trial.profile], seconds=_SECONDS, core_seconds=_SECONDS)
    if trial.control:
        profile = replace(profile, max_examples=CONTROL_CASES, large_share=0.0)
    if not trial.shrink:
        profile = replace(profile, shrink_seconds=0.0)
    profile = replace(profile, explain_seconds=EXPLAIN_SECONDS if trial.explain else 0.0)
    cell = Cell(OPS[trial.op], implementation, trial.dtype, trial.name)
    plan = _plan(trial, profile, cell)
    return run_cell(cell, plan, lambda cases, worst: None, with_coverage=not trial.control)


def _by_recipe(trial: Trial, implementation: Implementation) -> Verdict:
    """A recipe's judgement as a Verdict: one case for all its calls, and a finding with the first wrong output."""
    begun = time.perf_counter()
    reason = implementation.unavailable(trial.device) if implementation.unavailable else None
    judgement = Judgement(NOT_RUN, reason=reason) if reason else _judgement(trial, implementation)
    caught, ran = judgement.status == CAUGHT, judgement.status != NOT_RUN
    kind = "mismatch" if judgement.output else judgement.reason.partition(":")[0]
    failure = Finding(kind=kind, output=judgement.output, case="", message=judgement.reason, reproduce="")
    status = "fail" if caught else "pass" if ran else "skip"
    key = CellKey(trial.op, trial.name, trial.dtype, trial.device)
    bare = Verdict.of(key, status, detail=judgement.reason, seconds=time.perf_counter() - begun)
    return replace(bare, cases=int(ran), failure=failure if caught else None)


def _judgement(trial: Trial, implementation: Implementation) -> Judgement:
    chosen = recipe(trial.recipe)
    try:
        with alarm(TIMEOUT):
            if trial.control:
                return judge_kernel(chosen, implementation, trial.dtype)
            return judge_mutant(chosen, implementation, _clean(trial.op), trial.dtype)
    except TimeIsUp:
        return Judgement(CAUGHT, reason="timeout")


@cache
def _clean(op: str) -> Implementation:
    """The kernel that a mutant of ``op`` differs from. Always one object: the judge of recipes keeps its outputs."""
    facts = OPS[op]
    if facts.gated:
        return Gated().implementation("clean", op)
    if facts.l2:
        return Length().implementation("clean", op)
    if facts.grouped:
        return Grouped().implementation("clean", op)
    if facts.rotary:
        return Turned().implementation("clean", op)
    if facts.gates_residual:
        return GatedAdding().implementation("clean", op)
    if facts.modulated:
        return Modulated().implementation("clean", op)
    kernel = Quantising() if facts.quantises else Adding() if facts.adds_residual else CLEAN
    return kernel.implementation("clean", op)
