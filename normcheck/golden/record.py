"""Recording: run the fixed cases as ``verify`` does, and keep everything that judging needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs, make
from normcheck.checks.attempt import attempted, why_not
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, model_of
from normcheck.checks.contract import Problem, usable_gradients, usable_outputs
from normcheck.checks.gradients import with_statistics
from normcheck.checks.observe import with_bits
from normcheck.errors import Broken, UnsupportedCase
from normcheck.gate.plan import Plan
from normcheck.golden.cases import cases
from normcheck.golden.schema import (
    AUTOGRAD,
    BITMASK,
    FED,
    GIVEN,
    OWN,
    STATISTICS,
    Record,
    RecordedCase,
    Skipped,
    digests,
    geometries,
)
from normcheck.oracle.judge import judge_of
from normcheck.oracle.judge_forward import judge_forward
from normcheck.runner import call
from normcheck.runner.arena import Surroundings
from normcheck.runner.environment import environment
from normcheck.runner.run import Run
from normcheck.runner.session import session_of

Progress = Callable[[int, Cell], None]
"""Called before each cell, with its number."""


def record_plan(plan: Plan, progress: Progress) -> Record:
    """Run the fixed cases of every cell of ``plan``. An implementation that fails raises nothing here."""
    entries: list[RecordedCase] = []
    skipped: list[Skipped] = []
    for number, cell in enumerate(plan.cells):
        progress(number, cell)
        reason = why_not(cell, plan.device)
        if cell.op.l2:
            reason = "an op without a weight has no recorded cases yet"
        if cell.op.by_name:
            reason = "an op that gets more inputs by name has no recorded cases yet"
        if reason:
            name = cell.implementation.name
            skipped.append(Skipped(op=cell.op.name, implementation=name, dtype=cell.dtype, reason=reason))
        else:
            entries += _cell(cell, plan)
    return Record(
        device=plan.device, environment=environment(plan.device), entries=tuple(entries), skipped=tuple(skipped)
    )


def _cell(cell: Cell, plan: Plan) -> Iterator[RecordedCase]:
    with session_of(cell.implementation), call.poisoned_memory():
        for case in cases(cell.op, cell.implementation, cell.dtype):
            yield record_case(cell, case, plan)


def record_case(cell: Cell, case: Case, plan: Plan) -> RecordedCase:
    """Run one case, under the plan's timeout. Failures are in ``problems``, and why it did not run in ``refused``."""
    recorded = attempted(cell, case, plan, partial(_observed, cell, case, plan.device))
    if isinstance(recorded, Result):
        pristine = make(case, cell.op, "cpu")
        return replace(_empty(cell, case, pristine), refused=recorded.refused, problems=recorded.problems)
    return recorded


def _empty(cell: Cell, case: Case, inputs: Inputs) -> RecordedCase:
    backward = AUTOGRAD if cell.implementation.backward is None else OWN
    return RecordedCase(implementation=cell.implementation.name, case=case, backward=backward, inputs=digests(inputs))


def _observed(cell: Cell, case: Case, device: str) -> RecordedCase:
    """Run forward, and backward in every way that is judged. Raises Broken if there is nothing to judge."""
    implementation = cell.implementation
    pristine = make(case, cell.op, device)
    given = pristine.each(lambda t: guard_bands.copy(t, guard_bands.NAN))
    empty = replace(_empty(cell, case, pristine), declared=dict(call.model(implementation, case)))
    run = session_of(implementation).run(Surroundings())
    try:
        forward = run.forward(case, given).result()
    except UnsupportedCase as refused:
        return replace(empty, refused=call.refusal(refused))
    outputs, problems = usable_outputs(cell.op, case, pristine, forward.outputs)
    recorded = replace(empty, tensors=_kept(cell, case, outputs), problems=problems)
    if "y" not in outputs:
        return recorded
    if implementation.backward is not None:
        return _with_backward(recorded, cell, pristine, given, outputs, run)
    try:
        usable, problems = usable_gradients(given, forward.by_autograd(given.cotangents))
    except Broken as broken:
        return replace(recorded, problems=(*recorded.problems, _problem(broken)))
    tensors = {**recorded.tensors, **_kept(cell, case, usable)}
    if not usable and all(p.kind == "missing" for p in problems):
        return replace(recorded, gradients_refused="y does not carry autograd's graph")
    return replace(recorded, tensors=tensors, problems=(*recorded.problems, *problems))


def _with_backward(
    recorded: RecordedCase, cell: Cell, pristine: Inputs, given: Inputs, outputs: Mapping[str, Tensor], run: Run
) -> RecordedCase:
    """``recorded`` with the gradients of its own backward: end to end, and given the reference's statistics.

    The bitmask is the reference's each time. Backward reads a saved tensor if another value changes its gradients.
    """
    op, case, implementation = cell.op, recorded.case, cell.implementation
    judge = judge_of(op, case, pristine, model_of(implementation, case, pristine.x.device.type), {})
    saved = judge_forward(judge, outputs)[1]
    own = with_bits(outputs, saved.bits)
    tensors, reads = dict(recorded.tensors), []

    def backward(fed: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], tuple[Problem, ...]]:
        gradients, problems = usable_gradients(given, run.backward(case, given, fed).result())
        return _kept(cell, case, gradients), problems

    try:
        gradients, problems = backward(own)
        if all(name in outputs for name in op.statistics):
            shifted = {name: own[name] * 1.5 + 0.25 for name in op.statistics}
            if not _same(backward({**own, **shifted})[0], gradients):
                reads.append(STATISTICS)
                fed = with_statistics(own, saved)
                tensors |= {GIVEN + name: t for name, t in backward(fed)[0].items()}
                tensors |= {FED + name: fed[name].detach().cpu().reshape(-1) for name in op.statistics}
        if BITMASK in own and not _same(backward({**own, BITMASK: ~own[BITMASK]})[0], gradients):
            reads.append(BITMASK)
    except UnsupportedCase as refused:
        return replace(recorded, gradients_refused=call.refusal(refused))
    except Broken as broken:
        return replace(recorded, problems=(*recorded.problems, _problem(broken)))
    problems = (*recorded.problems, *problems)
    return replace(recorded, tensors={**tensors, **gradients}, reads=tuple(reads), problems=problems)


def _kept(cell: Cell, case: Case, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as a record keeps them: on the CPU, with all leading dimensions as one."""
    allowed = geometries(cell.op, case)
    kept = {}
    for name, tensor in tensors.items():
        shape = next(shape for dtype, shape in allowed[name] if dtype == tensor.dtype)
        kept[name] = tensor.detach().cpu().reshape(shape).clone()
    return kept


def _same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return all(name in a and guard_bands.same_bits(a[name], b[name]) for name in b)


def _problem(broken: Broken) -> Problem:
    return Problem(broken.kind, broken.output, broken.message)
