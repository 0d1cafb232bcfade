"""A case that is right in eager mode, called again in a context: its results must have the bits of the eager call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case, with_other_values
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.op import Op
from normcheck.cases.tensor_names import ROOT_FIRST, STATISTICS
from normcheck.checks.contract import Problem, is_judgeable, usable_gradients, usable_outputs
from normcheck.checks.where import locate
from normcheck.contexts.catalogue import CONTEXTS, PROFILER, Context
from normcheck.contexts.kernel import Launched, Step
from normcheck.contexts.perform import Performed
from normcheck.errors import one_line
from normcheck.impls.implementation import Implementation
from normcheck.oracle.judge import judge_of
from normcheck.oracle.judging import judge_forward, judge_gradients
from normcheck.oracle.tolerances import Model
from normcheck.result import CONTEXT
from normcheck.runner.arena import Surroundings
from normcheck.runner.session import session_of

UNTRIED = "cannot be tried in this context"
"""Begins the message of a kernel that is held to a context, and prevents it."""

_NOT_RUN = "no kernel of that name ran"


def is_not_run(problem: Problem) -> bool:
    """Whether the problem is that the kernel which an implementation declares is not among those of this case."""
    return problem.check == PROFILER and _NOT_RUN in problem.message


@dataclass(frozen=True, slots=True)
class Tried:
    """``problem``: what is wrong in a context, None if nothing is. ``not_tried``: why it, or a part of it, could not be
    tried, "" if all of it was; ``prevented``: whether the kernel prevents it. ``steps``: how many results were
    compared. ``launched``: what ran, if the context looks.
    """

    problem: Problem | None
    not_tried: str
    steps: int
    prevented: bool = False
    launched: Launched | None = None


@dataclass(frozen=True, slots=True)
class Called:
    """A case that was called in a context. ``inputs``: of the case, and others of its shape; ``eager``: the results of
    both in eager mode; ``performed``: those in the context.
    """

    inputs: tuple[Inputs, Inputs]
    eager: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]
    performed: Performed


def called_within(implementation: Implementation, op: Op, case: Case, device: str, name: str) -> Called:
    """Call ``case`` in eager mode and in the context ``name``.

    Raises Broken if a call fails, UnsupportedCase.
    """
    session, context = session_of(implementation), CONTEXTS[name]
    home = session.home(case, device)
    first, second = (make(of, op, home) for of in (case, with_other_values(case)))
    if context.one_weight:
        second = replace(second, weight=first.weight, bias=first.bias)
    if context.unused and second.dresidual_out is not None:
        unused = "dresidual_out" if case.N % 2 else "dy"
        second = replace(second, **{unused: torch.zeros_like(getattr(second, unused))})
    eager = (_eager(implementation, op, case, first), _eager(implementation, op, case, second))
    copies = (session.copies(first), session.copies(second))
    performed = session.run(Surroundings()).within(name, case, copies).result()
    return Called((first, second), eager, performed)


@dataclass(frozen=True, slots=True)
class _Subject:
    """A case in a context. ``inputs``: of the case, and others of its shape; ``eager``: the results of both.

    ``models``: each has a convention that the case fits; what is judged may fit any of them.
    """

    implementation: Implementation
    op: Op
    case: Case
    models: tuple[Model, ...]
    context: Context
    inputs: tuple[Inputs, Inputs]
    eager: tuple[Mapping[str, Tensor], Mapping[str, Tensor]]


def tried(
    implementation: Implementation,
    op: Op,
    case: Case,
    device: str,
    models: tuple[Model, ...],
    name: str,
    *,
    asked: bool,
) -> Tried:
    """What the implementation does with ``case`` in the context ``name``; ``asked``: somebody asked for this context.

    ``models``: those that the case fits. Raises Broken if a call fails that did not in eager mode, UnsupportedCase.
    """
    done = called_within(implementation, op, case, device, name)
    performed = done.performed
    subject = _Subject(implementation, op, case, models, CONTEXTS[name], done.inputs, done.eager)
    problems = (problem for step in performed.steps for problem in _problems(subject, step))
    of_second = _outside(
        subject, Step("with other inputs of its shape", (1,), done.eager[1])
    )  # they have not been judged
    launched = next((step.launched for step in performed.steps if step.launched is not None), None)
    problem = next(chain(of_second, problems, _not_run(implementation, name, launched)), None)
    return Tried(problem, performed.not_tried, len(performed.steps), performed.prevented, launched)


def _not_run(implementation: Implementation, name: str, launched: Launched | None) -> Iterator[Problem]:
    """That the kernel did not run which the implementation declares."""
    ran = ", ".join(dict.fromkeys((*launched.forward, *launched.backward))) if launched is not None else ""
    if launched is not None and ran and implementation.expects_kernel and not launched.expected:
        expected = f"expects_kernel={implementation.expects_kernel!r}"
        words = f"{expected}: {_NOT_RUN}, but {one_line(ran, 400)}"
        yield Problem(CONTEXT, "", words, check=name)


def _eager(implementation: Implementation, op: Op, case: Case, inputs: Inputs) -> dict[str, Tensor]:
    """What forward and backward return for ``inputs`` as they are called everywhere else, by name."""
    session = session_of(implementation)
    run, given = session.run(Surroundings()), session.copies(inputs)
    forward = run.forward(case, given).result()
    found = {name: t.detach().clone() for name, t in forward.outputs.items()}
    if op.quantises:
        return found
    if implementation.backward is None:
        gradients = forward.by_autograd(given.cotangents)
    else:
        gradients = run.backward(case, given, forward.outputs).result()
    return {**found, **{name: t.detach().clone() for name, t in gradients.items()}}


def _problems(subject: _Subject, step: Step) -> Iterator[Problem]:
    """What is wrong in a step, in the order in which a kernel computes."""
    packed = subject.case.layout == "contiguous"  # other copies may be aligned otherwise, and take another way
    exact = step.exact and packed and subject.implementation.deterministic
    names = [name for name in ROOT_FIRST if all(name in subject.eager[number] for number in step.of)]
    differing = []
    for name in names:
        expected, actual = _expected(subject, step, name), step.outputs.get(name)
        if actual is None:
            if name in step.owed:
                yield _problem(subject, name, f"{name} is missing {step.words}")
        elif (actual.shape, actual.dtype, actual.device) != (expected.shape, expected.dtype, expected.device):
            differing.append(name)
            if exact:
                got, usual = (f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (actual, expected))
                yield _problem(subject, name, f"{name} is {got} {step.words}: expected {usual}, as in eager mode")
        elif not guard_bands.same_bits(actual, expected):
            differing.append(name)
            if exact:
                yield _other_bits(subject, step.words, name, actual, expected)
    if differing and not exact and len(step.of) == 1:
        yield from _outside(subject, step)


def _expected(subject: _Subject, step: Step, name: str) -> Tensor:
    first, *more = (subject.eager[number][name] for number in step.of)
    for each in more:
        first = first + each
    return first


def _problem(subject: _Subject, output: str, message: str) -> Problem:
    return Problem(CONTEXT, output, message, check=subject.context.name)


def _other_bits(subject: _Subject, words: str, name: str, actual: Tensor, expected: Tensor) -> Problem:
    differ = guard_bands.differing(actual, expected)
    at = tuple(torch.nonzero(differ)[0].tolist())
    got, usual = (float(tensor[at]) for tensor in (actual, expected))
    message = (
        f"{name} has other bits {words} than in eager mode: {int(differ.sum())} of {differ.numel()} elements; "
        f"at {list(at)} got {got:.9g}, expected {usual:.9g}"
    )
    columns = 1 if name in STATISTICS else differ.numel() if name in ("dw", "db") else differ.shape[-1]
    where = locate(differ.reshape(-1, columns))
    return replace(_problem(subject, name, message), where=where)


def _outside(subject: _Subject, step: Step) -> Iterator[Problem]:
    """What a step returned that is outside its bound, or cannot be judged, by the model that it fits best."""
    tried: list[list[Problem]] = []
    for model in subject.models:
        tried.append([*_outside_by(model, subject, step)])
        if not tried[-1]:
            return
    yield from min(tried, key=len)


def _outside_by(model: Model, subject: _Subject, step: Step) -> Iterator[Problem]:
    inputs, eager = subject.inputs[step.of[0]], subject.eager[step.of[0]]
    op, case = subject.op, subject.case
    returned = dict(step.outputs)
    if op.main_output not in returned:  # a backward alone: what forward returned was judged before
        returned |= {name: t for name, t in eager.items() if name not in inputs.leaves}
    outputs, unusable = usable_outputs(op, case, inputs, returned, model)
    of_gradients = {name: t for name, t in returned.items() if name in inputs.leaves}
    if of_gradients:  # those that were not asked for are the eager ones, which are right
        of_gradients = {name: eager[name] for name in inputs.leaves if name in eager} | of_gradients
    gradients, more = usable_gradients(inputs, of_gradients) if of_gradients else ({}, ())
    for problem in (*unusable, *more):
        yield _problem(subject, problem.output, f"{problem.message} ({step.words})")
    if not is_judgeable(op, inputs, outputs):
        return
    judge = judge_of(op, case, inputs, model, {})
    checked, saved = judge_forward(judge, outputs)
    checked += judge_gradients(judge, gradients, saved, given=False, own_bits=True)  # a backward got its forward's own
    for c in checked:
        if not c.comparison.ratio <= 1:
            message = f"{c.output} is outside its bound {step.words}: error / bound is {c.comparison.ratio:.4g}"
            yield _problem(subject, c.output, message)
