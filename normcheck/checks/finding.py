"""Turn a failed Result into a Finding: the one fault to look at first, and what helps to understand it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import replace

from normcheck.cases.case import Case
from normcheck.cases.claims import unclaimed
from normcheck.cases.declared import OVERWRITABLE
from normcheck.cases.depth import Depth
from normcheck.cases.layouts import (
    CHANNELS_LAST,
    EXPANDED,
    HEADS,
    OF_ROW_GROUPS,
    SAMPLES_STRIDED,
    WEIGHT_STACKED,
    WEIGHT_STRIDED,
)
from normcheck.cases.op import Op
from normcheck.cases.split import others_behind
from normcheck.cases.strides import (
    MODULATION,
    apart,
    cotangents,
    expanded,
    gap_of,
    in_channels_last,
    modulation_stride,
    read_by_forward,
)
from normcheck.cases.tensor_names import GRADIENTS, ROOT_FIRST, STATISTICS
from normcheck.checks import missing_bias, other_op, own_limit
from normcheck.checks.ask import Ask
from normcheck.checks.bitmask_diff import bit_diff
from normcheck.checks.cause import cause
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.checks.contexts import UNTRIED
from normcheck.checks.contract import Problem
from normcheck.checks.observe import MOVED
from normcheck.checks.where import how_many, locate, names_a_pattern
from normcheck.impls import source_location
from normcheck.oracle.compare import Comparison
from normcheck.oracle.judge import END_TO_END, GIVEN_OWN, Checked
from normcheck.oracle.rounding import NO_ROOM
from normcheck.result import CONTEXT, Finding, Larger, Term, Where

_ALTERNATIVES: tuple[tuple[dict[str, object], str], ...] = (
    (
        {"y_given_stats": False},
        "y and the saved statistics disagree: y alone is within its bound. If y is meant to come from other numbers "
        "than those saved, declare model={'y_given_stats': False}.",
    ),
    (
        {"y_form": "folded"},
        "It would pass as a folded y = x * a + c, which loses accuracy on rows far from zero. If that is meant, "
        "declare model={'y_form': 'folded'}.",
    ),
    (
        {"bwd_form": "raw"},
        "It would pass as a backward from raw sums of dy * g * x, which cancel on rows far from zero. If that is "
        "meant, declare model={'bwd_form': 'raw'}.",
    ),
)
"""Fields of a model that a kernel may declare, and the advice to declare them if the case then passes."""

_ORDER = ("", *(name for name in ROOT_FIRST if name not in GRADIENTS), "input", *GRADIENTS)


def signature(result: Result) -> tuple[str, str]:
    """Kind and output of the fault to look at first. A value that is not finite counts as a mismatch.

    The kind of what is not repeatable comes with what it depends on.
    """
    first = _first(result)
    kind = f"{first.kind} {first.check}".strip() if isinstance(first, Problem) else "mismatch"
    return kind, first.output


def place(result: Result) -> tuple[int, int]:
    """How early in the order of computation a failed result goes wrong: smaller is nearer to the root cause."""
    return _place_of(_first(result))


def worst_ratio(result: Result) -> float:
    """Error / bound of the fault to look at first: infinite if it is not a wrong value, 0 if nothing failed."""
    if not result.failed:
        return 0.0
    first = _first(result)
    return first.comparison.ratio if isinstance(first, Checked) else math.inf


def _option_of(first: Problem | Checked) -> str:
    """The option of ``normcheck repro`` with which a finding in a context shows again."""
    untried = isinstance(first, Problem) and first.message.startswith(UNTRIED)
    return "--require-context" if untried else "--context"


def finding(cell: Cell, result: Result, device: str, *, advise: bool = True, after: Sequence[str] = ()) -> Finding:
    """The finding of a failed ``result``. ``advise``: also try whether another declared model, or packed rows, would
    pass. ``after``: the lines of the cases before it in a process that were asked for, to be pasted with its own.
    """
    found = _found(cell, result, device, advise=advise, after=after)
    if not cell.configuration:
        return found
    message = f"{found.message}, with configuration {cell.configuration}"
    return replace(found, configuration=cell.configuration, message=message)


def _found(cell: Cell, result: Result, device: str, *, advise: bool, after: Sequence[str]) -> Finding:
    first = _first(result)
    line = str(result.case)
    within = (_option_of(first), first.check) if is_of_context(first) else ()
    reproduce = " ".join(shlex.quote(word) for word in ("normcheck", "repro", *cell.named, *within, *after, line))
    also = tuple(dict.fromkeys([p.output or p.kind for p in result.problems] + [c.output for c in result.wrong]))
    if isinstance(first, Problem):
        return Finding(
            kind=first.kind,
            output=first.output,
            case=line,
            message=first.message,
            reproduce=reproduce,
            check=first.check,
            also=tuple(name for name in also if name not in (first.output, first.kind)),
            traceback=first.frames,
            where=first.where,
            advice=missing_bias.advice(first, result.case)
            or own_limit.advice(first, result.case)
            or _overwriting(first)
            or _recorded(cell, first)
            or (other_op.advice(cell, result, device) if advise and first.kind == "dtype" else "")
            or _strides(cell, result, device, advise=advise),
            line=_line(cell, first.output, first.frames),
        )
    found = replace(
        mismatch(first, result.case, reproduce),
        also=tuple(name for name in also if name != first.output),
        line=_line(cell, first.output),
    )
    if result.case.huge:  # more runs, or another reference, would need more memory than there is
        return found
    why = cause(cell.op, result)
    advice = (_advice(cell, result, device) if advise and not why else "") or _strides(
        cell, result, device, advise=advise
    )
    if first.output == "bitmask" and first.comparison.worst is not None and first.check == END_TO_END:
        returned = result.seen.outputs.get("bitmask")
        bit_lines = bit_diff(cell.op, result.case, result.model, returned, first.comparison.worst, result.home)
        advice = f"{bit_lines}\n{advice}".strip()
    return replace(found, advice=advice, cause=why, explain=_explain(cell, found, device))


def _line(cell: Cell, output: str, frames: Sequence[str] = ()) -> int | None:
    """The innermost line of a traceback in the implementation's file; else of a gradient that of the backward."""
    raised = source_location.line_in(source_location.of(cell.implementation), frames)
    of_gradient = output in GRADIENTS and raised is None
    return source_location.line_of_backward(cell.implementation) if of_gradient else raised


def is_of_context(fault: Problem | Checked) -> bool:
    """Whether ``fault`` is one of a context, which ``check`` names: the case alone does not show it."""
    return isinstance(fault, Problem) and fault.kind == CONTEXT


def _explain(cell: Cell, found: Finding, device: str) -> str:
    """The command that shows the bound of the worst element as it was judged: by the model of this implementation.

    What is loaded declares no model, and has no gradients.
    """
    at = ",".join(map(str, found.index or ()))
    whose = () if cell.loaded else ("--impl", cell.spec)
    words = ("normcheck", "tolerances", *whose, "--device", device, "--output", found.output, "--at", at)
    return " ".join(shlex.quote(word) for word in (*words, "--explain", found.case))


def _overwriting(problem: Problem) -> str:
    """How to declare that a kernel overwrites an input, or "" if the problem is another one."""
    if problem.kind != "input_modified" or problem.output not in OVERWRITABLE or MOVED in problem.message:
        return ""
    return f'If callers know that the kernel overwrites {problem.output}, declare overwrites=("{problem.output}",).'


_OF_AUTOGRAD = (
    "requires grad is being used in an in-place operation",
    "on Tensor that requires grad",
    "support automatic differentiation",
    "modified by an inplace operation",
)
"""What torch says about code that autograd cannot record."""


def _recorded(cell: Cell, problem: Problem) -> str:
    """What to do if autograd cannot record a kernel, or did not keep what it saved; "" if the problem is another."""
    if problem.kind != "exception":
        return ""
    if problem.message.startswith("backward raised KeyError"):
        return (
            "saved has the outputs of the op that forward returned, and its plain values, but no other tensors: "
            "compute them again, or keep them by a torch.autograd.Function."
        )
    if "a leaf Variable that requires grad has been used" in problem.message:
        return (
            "Inputs are leaves of autograd's graph, which no call may mark as written to, but for those that "
            "overwrites= names."
        )
    own = cell.implementation.backward is not None  # which is called, and the inputs then require no grad
    if own or not any(words in problem.message for words in _OF_AUTOGRAD):
        return ""
    return (
        "Without a backward of its own a kernel is called with inputs that require grad. If nobody asks it for "
        "gradients, compute under torch.no_grad(); else declare a backward, and overwrites= if it writes to an input."
    )


def _strides(cell: Cell, result: Result, device: str, *, advise: bool) -> str:
    """What to look at if a case fails by its unusual strides, which a kernel may ignore; "" if they do not matter.

    They do not if what fails does not read the strided tensor, or, if one is to ``advise``, fails as well if the same
    rows are packed.
    """
    case, first = result.case, _first(result)
    backward = first.output in GRADIENTS or "backward" in (first.message if isinstance(first, Problem) else "")
    words = _strides_in_words(case, cell.op, backward=backward)
    packed = replace(case, layout="contiguous", gap=0)
    if not (words and advise) or case.huge or unclaimed(cell.op, cell.implementation, packed):
        return words
    tried = check(cell.implementation, cell.op, packed, device, Ask(Depth.REASON))
    return "" if tried.failed and _first(tried).output == first.output else words


def _strides_in_words(case: Case, op: Op, *, backward: bool) -> str:
    """What to ask of a kernel whose forward, or ``backward``, fails by unusual strides; "" if it reads nothing that has
    any: a forward reads no dy.
    """
    if case.layout in EXPANDED:
        strides, name = (0, 1) if case.layout == "dy_expanded" else (0, 0), expanded(case)
        return f"{name} has strides {strides} here: does the backward use {name}.stride(0) and .stride(1)?" * backward
    if case.layout == HEADS:
        return _head_strides(case)
    if case.layout == WEIGHT_STRIDED and case.N > 1:
        both = "weight and bias have" if case.bias else "weight has"
        return f"{both} stride 2 here: does it use weight.stride(0), or weight.contiguous()?"
    if case.layout in OF_ROW_GROUPS and case.row_groups > 1:
        row, lies = ("(g, s)", "G, S, N") if case.layout == WEIGHT_STACKED else ("(s, g)", "S, G, N")
        return f"x is ({lies}) = {case.shape} here, weight {case.sides}: does row {row} have weight[g]?"
    if case.layout == CHANNELS_LAST and len(in_channels_last(case)) == 1:
        last, packed = ("x", "dy") if "x" in in_channels_last(case) else ("dy", "x")
        return f"{packed} is packed here, {last} in channels-last memory: does it use {packed}.stride()?" * backward
    names = [name for name in apart(case) if backward or name not in cotangents(case)]
    if not names:
        return ""
    if case.layout == SAMPLES_STRIDED:
        lie, use = (
            f"{case.M // case.batch} * {case.N} + {case.gap}",
            " and ".join(f"{name}.stride(0)" for name in names),
        )
        return f"Samples of {' and '.join(names)} lie {lie} elements apart here: does it use {use}?"
    of_samples = {name for name in names if case.channels or name in MODULATION}
    every = (*read_by_forward(case), *(cotangents(case) if backward else ()))
    others = [name for name in every if name not in (*names, *MODULATION)]  # one may be read by the strides of another
    use = " and ".join(f"{name}.stride({0 if name in of_samples else -2})" for name in (*names, *others))
    distances = dict.fromkeys(
        f"{modulation_stride(case, name) if name in MODULATION else case.N + gap_of(case, name)}" for name in names
    )
    what = "Samples" if case.channels else "Rows"
    lie = f"{what} of {' and '.join(names)} lie {' and '.join(distances)} elements apart here, not N={case.N}"
    return f"{lie}{' as those of ' * bool(others)}{' and '.join(others)}: does it use {use}?"


def _head_strides(case: Case) -> str:
    """What to look at if the smallest case that fails has heads; "" if it has one, whose strides say nothing."""
    if case.M <= 1:
        return ""
    (tokens, count, n), (token, head) = case.shape, case.head_strides
    lies = f"x is {(tokens, count, n)} with strides {(token, head, 1)} here: behind the "
    lies += f"{f'{count} heads' if count > 1 else 'one head'} of each token lie {others_behind(count)} others"
    lies += f", and {case.gap} elements behind each head" if case.gap else ""
    ask = "does it use x.stride(0) for tokens and x.stride(1) for heads?"
    one = " The stride of a dimension of size 1 says nothing of the other one." if 1 in (tokens, count) else ""
    return f"{lies}; {ask}{one}"


def _first(result: Result) -> Problem | Checked:
    """The fault nearest to the root cause: a call that broke, then what forward returned, an input that was written
    to, what backward returned; of one output its shape before its values."""
    faults: list[Problem | Checked] = [*result.problems, *result.wrong]
    return min(faults, key=_place_of)


def _place_of(fault: Problem | Checked) -> tuple[int, int]:
    if isinstance(fault, Problem) and fault.kind == "input_modified":
        return (_ORDER.index("input"), 0)
    position = _ORDER.index(fault.output) if fault.output in _ORDER else 0
    return (position, int(isinstance(fault, Checked)))


def mismatch(first: Checked, case: Case, reproduce: str) -> Finding:
    """The finding of a check that found wrong elements. ``reproduce``: the line to paste."""
    c = first.comparison
    assert c.worst is not None and c.wrong is not None
    worst, mismatched = c.worst, how_many(c.wrong)
    return Finding(
        kind="non_finite" if c.non_finite and not math.isfinite(worst.actual) else "mismatch",
        output=first.output,
        case=str(case),
        message=_message(first, c, mismatched, case),
        reproduce=reproduce,
        check=first.check,
        index=worst.index[:1] if first.output in STATISTICS else worst.index,
        actual=worst.actual,
        expected=worst.expected,
        error=worst.error,
        bound=worst.bound if worst.bound > NO_ROOM else 0.0,
        ratio=c.ratio,
        max_ulp=worst.ulps,
        mismatched=mismatched,
        numel=c.numel,
        terms=tuple(Term(name=name, value=value) for name, value in worst.terms),
        where=_where(first.output, c, case),
    )


def _where(output: str, c: Comparison, case: Case) -> Where:
    assert c.wrong is not None
    if output in STATISTICS:
        shape: tuple[int, ...] = (-1, 1)
    else:
        shape = (1, -1) if c.wrong.dim() != 2 else tuple(c.wrong.shape)
    heads = case.heads if case.layout == HEADS and output not in ("dw", "db") else 1
    return locate(c.wrong.reshape(shape), None if c.ratios is None else c.ratios.reshape(shape), heads=heads)


def with_larger(found: Finding, larger: Result) -> Finding:
    """``found``, with where ``larger`` is wrong in the same output, if that names a pattern and not the same one."""
    same = [c.comparison for c in larger.wrong if (c.output, c.check) == (found.output, found.check)]
    if found.where is None or not same or same[0].wrong is None:
        return found
    where = _where(found.output, same[0], larger.case)
    if where.summary == found.where.summary or not names_a_pattern(where.summary):
        return found
    return replace(found, larger=Larger(case=str(larger.case), where=where))


def _message(first: Checked, c: Comparison, mismatched: int, case: Case) -> str:
    assert c.worst is not None
    at = f"{list(c.worst.index)}"
    if case.layout == HEADS and first.output not in ("dw", "db"):
        token, head = divmod(c.worst.index[0], case.heads)
        at += f" (head {head} of token {token})"
    if case.layout in OF_ROW_GROUPS:
        row = c.worst.index[0]
        at += f" (group {row if first.output in ('dw', 'db') else case.group_of(row)})"
    if first.output == "bitmask":
        return f"bitmask: {mismatched} of {c.numel} bits differ from lower_clip < z < upper_clip"
    return (
        f"{first.output}: {mismatched} of {c.numel} elements are off by more than their bound, {first.check}; "
        f"at {at} got {c.worst.actual:.9g}, expected {c.worst.expected:.9g}"
    )


def _advice(cell: Cell, result: Result, device: str) -> str:
    """The advice to declare something about the kernel's arithmetic, if this very case then passes, or ""."""
    only_given = {c.check for c in result.wrong} == {GIVEN_OWN}
    for changes, text in _ALTERNATIVES:
        if "y_given_stats" in changes and not only_given:
            continue
        model = replace(result.model, **changes)  # type: ignore[arg-type]
        if model == result.model:
            continue
        tried = check(cell.implementation, cell.op, result.case, device, Ask(Depth.OFF, model=model))
        if not tried.failed:
            return text
    return ""
