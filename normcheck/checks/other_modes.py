"""Probe for what a kernel does in another mode of torch: without gradients, as where it serves, with some inputs
frozen, with several threads. It may take another way then.

What that way returns need not have the bits of the usual one. It must be within its bounds, and inputs as they were.
"""

from __future__ import annotations

from torch import Tensor

from normcheck.cases import guard_bands
from normcheck.cases.case import Case
from normcheck.cases.op import Op
from normcheck.cases.strides import read_by_forward
from normcheck.cases.tensor_names import BY_NAME
from normcheck.checks.contract import Problem, usable_gradients, usable_outputs
from normcheck.checks.observe import Seen, Started, by_autograd, start, strays, written
from normcheck.checks.refusal import refusal
from normcheck.checks.rerun import Subject
from normcheck.errors import Broken, UnsupportedCase
from normcheck.impls.implementation import Implementation
from normcheck.result import CONTEXT
from normcheck.runner.arena import Surroundings
from normcheck.runner.run import FROZEN, SERVING, THREE_THREADS, UNWANTED
from normcheck.runner.session import session_of

_OF_A_GRAPH = (*SERVING, *SERVING, FROZEN, THREE_THREADS)
_WITHOUT_A_GRAPH = (SERVING[0], *[""] * 6, THREE_THREADS)
"""The modes by turns. A kernel that has no graph seldom looks whether a gradient is wanted."""

_SPREAD = 2654435761  # of Knuth: a layout may have each eighth seed

_CONTEXTS = {**dict.fromkeys(UNWANTED, "frozen"), THREE_THREADS: "threads"}
"""Mode -> the context that has it; of the others it is "inference"."""


def mode_of(implementation: Implementation, op: Op, case: Case, device: str) -> str:
    """The mode in which a case is called again; "" if in none, as if torch.compile would compile it anew."""
    if case.huge or session_of(implementation).graphs:
        return ""
    modes = _OF_A_GRAPH if implementation.backward is None and not op.quantises else _WITHOUT_A_GRAPH
    spread = case.seed * _SPREAD >> 16
    mode = modes[spread % len(modes)]
    if mode != FROZEN:
        return modes[0] if mode == THREE_THREADS and device != "cpu" else mode
    frozen = [own for own in UNWANTED if any(name in _leaves(case) for name in UNWANTED[own])]
    frozen = [own for own in frozen if set(_leaves(case)).difference(UNWANTED[own])]
    return frozen[spread // len(modes) % len(frozen)] if frozen else modes[0]


def _leaves(case: Case) -> tuple[str, ...]:
    """The gradients that a graph of a case has."""
    of_data = ("dx", *(BY_NAME[name] for name in read_by_forward(case)[1:]))
    return *of_data, *["dw"] * case.weight, *["db"] * case.bias


def wrong_in(mode: str, subject: Subject) -> Problem | None:
    """What is wrong in a mode with a case that is right in the usual one; None if nothing is."""
    context = _CONTEXTS.get(mode, "inference")
    try:
        started = start(subject.implementation, subject.case, subject.inputs, Surroundings(), mode=mode)
        output, message = _wrong(subject, started, mode)
    except UnsupportedCase:
        return None
    except Broken as broken:
        problem = Problem(broken.kind, broken.output, broken.message, broken.frames)
        if "out of memory" in broken.message or refusal(subject.case, problem):
            return None
        return Problem(CONTEXT, broken.output, f"{broken.message} ({mode})", broken.frames, context)
    return Problem(CONTEXT, output, f"{message} {mode}", check=context) if message else None


def _wrong(subject: Subject, started: Started, mode: str) -> tuple[str, str]:
    """An output or input, and what is wrong with it, in words; ("", "") if nothing is."""
    op, case, first, forward = subject.op, subject.case, subject.first, started.forward.result()
    outputs, unusable = usable_outputs(op, case, started.given, forward.outputs)
    gradients: dict[str, Tensor] = {}
    by_graph = mode not in SERVING and subject.implementation.backward is None
    if by_graph and first.gradients and not unusable:
        returned, refused = by_autograd(case, forward, started.given)
        missing = [name for name in first.gradients if name not in (*returned, *UNWANTED.get(mode, ()))]
        for name in missing if not refused else ():
            return name, f"{name} is missing"
        gradients, unusable = usable_gradients(started.given, {**first.gradients, **returned}, by_graph=True)
    done = written(subject.implementation, started.before, started.given)
    for problem in (*unusable, *done, *strays(started.run, {**outputs, **gradients})):
        return problem.output, problem.message
    if op.main_output not in outputs:
        return op.main_output, f"{op.main_output} is missing"
    seen, usual = Seen(outputs, gradients), first.named
    differing = [name for name, t in seen.named.items() if name in usual and not guard_bands.same_bits(usual[name], t)]
    if not differing:
        return "", ""
    others = [name for name in differing if case.rows == "nan" and _other_nans(usual[name], seen.named[name])]
    for name in [*subject.wrong_values(subject.inputs, seen), *others]:
        return name, f"{name} is outside its bound"
    return "", ""


def _other_nans(one: Tensor, other: Tensor) -> bool:
    return one.is_floating_point() and not bool((one.isnan() == other.isnan()).all())
