"""One cell of an audit: a planted fault, or a correct kernel, put before the gate as any other implementation is."""

from __future__ import annotations

import math
import time
import traceback
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from normcheck.audit.equivalence import failing, told_apart
from normcheck.audit.mutants.kernel import CLEAN
from normcheck.audit.mutants.mutant import Mutant
from normcheck.audit.mutants.regimes import REGIMES, Regime
from normcheck.audit.mutants.under import under
from normcheck.audit.mutants.under import why_not as why_not_under
from normcheck.audit.recipe_judge import CAUGHT, Judgement, examined, judged
from normcheck.audit.recipe_judge import NOT_EXERCISED as NOT_RUN
from normcheck.audit.recipes import recipe
from normcheck.audit.score import ERROR, KILLED, NOT_EXERCISED, SURVIVED, Control, Outcome
from normcheck.cases.ops.op import Op
from normcheck.checks.cell import Cell
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.sweep import run_cell
from normcheck.impls import discovery
from normcheck.impls.implementation import Implementation
from normcheck.result import Finding, Verdict
from normcheck.runner.device import device_for
from normcheck.runner.time_limit import TimeIsUp, alarm

PROMISES = ("quick", "ci", "deep")
"""Profiles, the cheapest first: what one of them promises to kill, those after it promise too."""

CONTROL_CASES = 60
TIMEOUT = 120.0  # seconds a case, as verify has it


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What to run, as plain data that can be sent to another process.

    ``name``: a mutant's id, or with ``control`` the name of a correct kernel. ``recipe``: judge by this fixed
    tolerance instead of the gate, if it is not empty. ``regime``: the fault is there only in its calls, if it is not
    empty. ``shrink``: look for a simpler case, too.
    """

    name: str
    op: str
    dtype: str
    profile: str
    seed: int
    device: str
    control: bool = False
    recipe: str = ""
    regime: str = ""
    shrink: bool = True


Tried = Outcome | Control


def start(device: str) -> None:
    """Make this process ready for trials, as ``verify`` makes its own."""
    torch.set_num_threads(1)  # small tensors: waiting for a second thread costs more than it computes
    device_for(device)


def tried(trial: Trial) -> Tried:
    """Run one trial. Whatever normcheck itself raises is its result, so that the other cells go on."""
    try:
        return _control(trial) if trial.control else _outcome(trial)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return _failed(trial, f"normcheck itself failed: {type(error).__name__}: {error} ({where})")


def died(trial: Trial) -> Tried:
    """The result of a trial whose process ended under it."""
    message = "its process ended while nothing else ran in it"
    if trial.control:
        return replace(_accusable(trial), accused=True, kind="crash", message=message)
    return replace(blank(trial), status=KILLED, kind="crash", reason=message)


def apart(trial: Trial) -> bool:
    """Whether a trial needs a process of its own: a fault that only a GPU shows may take its context along."""
    return trial.device == "cuda" and not trial.control and bool(discovery.mutants()[trial.name].device)


def blank(trial: Trial) -> Outcome:
    """What is known of a mutant's cell before it is run."""
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
    mutant = discovery.mutants()[trial.name]
    return under(REGIMES[trial.regime], mutant) if trial.regime else mutant


def _why_not_under(trial: Trial) -> str:
    return why_not_under(REGIMES[trial.regime], discovery.mutants()[trial.name]) if trial.regime else ""


def why_not(mutant: Mutant, device: str) -> str:
    """Why a mutant cannot be run here, or an empty string."""
    if mutant.not_exercised:
        return mutant.not_exercised
    return "shows on a GPU only" if mutant.device == "cuda" and device != "cuda" else ""


def _accusable(trial: Trial) -> Control:
    return Control(name=trial.name, op=trial.op, dtype=trial.dtype, accused=False)


def _failed(trial: Trial, reason: str) -> Tried:
    if trial.control:
        return replace(_accusable(trial), reason=reason, error=True)
    return replace(blank(trial), status=ERROR, reason=reason)


def _outcome(trial: Trial) -> Outcome:
    outcome = blank(trial)
    if outcome.reason:
        return outcome
    if trial.regime and not told_apart(*_within(trial)):
        return replace(outcome, reason="no case within the regime tells it from the clean kernel")
    verdict = _verdict(trial, _planted(trial).make(trial.op))
    status = {"fail": KILLED, "pass": SURVIVED, "thin": SURVIVED, "skip": NOT_EXERCISED}.get(verdict.status, ERROR)
    failure = verdict.failure
    reason = verdict.detail if status in (NOT_EXERCISED, ERROR) else ""
    if status == SURVIVED:
        told = (_missed(trial) if trial.regime else "", verdict.detail, _nearest(verdict))
        reason = "; ".join(part for part in told if part)
    return replace(
        outcome,
        status=status,
        kind=failure.kind if failure else "",
        output=failure.output if failure else "",
        case=failure.case if failure else "",
        cases=verdict.cases,
        seconds=verdict.seconds,
        reason=reason,
    )


def _within(trial: Trial) -> tuple[Regime, Mutant, Op, str, Plan]:
    """What a fault under a regime is tried with, apart from any sweep."""
    op, plan = discovery.ops()[trial.op], Plan((), PROFILES[trial.profile], trial.seed, trial.device, TIMEOUT)
    return REGIMES[trial.regime], discovery.mutants()[trial.name], op, trial.dtype, plan


def _missed(trial: Trial) -> str:
    """What a sweep lacks that let a fault live: a case within the regime, or a bound that it exceeds."""
    case = failing(*_within(trial))
    return f"not run, and fails: {case}" if case else "passes in every case within the regime: its bound allows it"


def _nearest(verdict: Verdict) -> str:
    """How near to its bound a fault came that passed."""
    output, worst = max(verdict.worst.items(), key=lambda item: item[1].ratio, default=("", None))
    if worst is None:
        return ""
    ratio = math.floor(worst.ratio * 1000) / 1000  # at most 1, and never rounded to it
    return f"largest ratio {ratio:g} ({output}), {worst.case}"


def _control(trial: Trial) -> Control:
    (implementation,) = (i for i in discovery.controls() if (i.name, i.op) == (trial.name, trial.op))
    verdict = _verdict(trial, implementation)
    failure = verdict.failure
    return replace(
        _accusable(trial),
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


def _verdict(trial: Trial, implementation: Implementation) -> Verdict:
    if trial.recipe:
        return _by_recipe(trial, implementation)
    profile = PROFILES[trial.profile]
    if trial.control:  # a number of cases, not of seconds: a false alarm is then found again
        profile = replace(profile, max_examples=CONTROL_CASES, seconds=600.0, large_share=0.0)
    if not trial.shrink:
        profile = replace(profile, shrink_seconds=0.0)
    cell = Cell(discovery.ops()[trial.op], implementation, trial.dtype, trial.name)
    plan = Plan((cell,), profile, trial.seed, trial.device, TIMEOUT)
    return run_cell(cell, plan, lambda cases, worst: None)


def _by_recipe(trial: Trial, implementation: Implementation) -> Verdict:
    """What a recipe says, in the words of a verdict: one case, and of what is wrong no more than where."""
    begun = time.perf_counter()
    reason = implementation.unavailable(trial.device) if implementation.unavailable else None
    judgement = Judgement(NOT_RUN, reason=reason) if reason else _judgement(trial, implementation)
    caught, ran = judgement.status == CAUGHT, judgement.status != NOT_RUN
    kind = "mismatch" if judgement.output else judgement.reason.partition(":")[0]
    failure = Finding(kind=kind, output=judgement.output, case="", message=judgement.reason, reproduce="")
    return Verdict(
        op=trial.op,
        implementation=trial.name,
        dtype=trial.dtype,
        device=trial.device,
        status="fail" if caught else "pass" if ran else "skip",
        detail=judgement.reason,
        cases=int(ran),
        seconds=time.perf_counter() - begun,
        failure=failure if caught else None,
    )


def _judgement(trial: Trial, implementation: Implementation) -> Judgement:
    asked = recipe(trial.recipe)
    try:
        with alarm(TIMEOUT):
            if trial.control:
                return examined(asked, implementation, trial.dtype)
            return judged(asked, implementation, _clean(trial.op), trial.dtype)
    except TimeIsUp:
        return Judgement(CAUGHT, reason="timeout")


@cache
def _clean(op: str) -> Implementation:
    """The kernel that a mutant of ``op`` differs from; one object, whose outputs the judge of recipes keeps."""
    return CLEAN.implementation("clean", op)
