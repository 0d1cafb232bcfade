"""``normcheck tolerances --explain``: the bound of one element, term by term, as the judge computes it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

import torch

from normcheck.cases.case import Case
from normcheck.cases.case_line import parsed
from normcheck.cases.dtypes import CODES
from normcheck.cases.inputs import make
from normcheck.cases.layouts import OF_ROW_GROUPS
from normcheck.cases.op import BLOCKS, Op
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import CODES as Q
from normcheck.cases.tensor_names import DRESIDUAL, OF_SAMPLES, SCALE
from normcheck.checks.attempt import too_large
from normcheck.checks.check import model_of
from normcheck.errors import UsageError, one_line, one_of, shown
from normcheck.gate.prepare import selected
from normcheck.impls.implementation import Implementation
from normcheck.oracle import bitmask, rounding
from normcheck.oracle.compare import Expectation
from normcheck.oracle.conventions import Convention, candidates, plainest, with_convention
from normcheck.oracle.conventions import shown as convention_shown
from normcheck.oracle.expectations import code_expectations, expectations
from normcheck.oracle.judge import GIVEN_OWN, Judge, judge_of
from normcheck.oracle.judge_forward import doubtful_bits
from normcheck.oracle.quantised import scale_columns
from normcheck.oracle.special import is_special
from normcheck.oracle.term_reasons import REASONS
from normcheck.oracle.tolerances import Model, table
from normcheck.runner.device import device_for

_IMPORT_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """The element that is asked about: element ``at`` of ``output`` in the case of ``line``.

    ``impl``: the implementation whose declared model the bound follows; "" for the table's model.
    """

    line: str
    output: str
    at: str
    impl: str = ""
    device: str = "auto"


@dataclass(frozen=True, kw_only=True)
class ElementBound:
    """What one check allows for one element. ``above`` and ``below`` bound actual - expected and expected - actual.

    ``half_ulp``: of the output's dtype, at ``expected``. ``terms``: name, value and reason of each part of the bound,
    largest first. ``rest``: the bound less its terms.
    """

    check: str
    expected: float
    above: float
    below: float
    half_ulp: float
    terms: tuple[tuple[str, float, str], ...]
    rest: float


def explain(question: Question, stream: TextIO) -> None:
    """Write the bound of the element in every check of its output. Raises UsageError."""
    case = parsed(question.line)
    op = OPS[case.op]
    at = index_of(op, case, question.output, question.at)
    device = device_for(question.device)
    reason = too_large(case, device)
    if reason:
        raise UsageError(f"explain={one_line(question.line, 200)}: {reason}; expected a smaller M or N")
    implementation = _implementation(question, case, device)
    model = table().model if implementation is None else model_of(implementation, case, device)
    inputs, conventions = make(case, op, device), _conventions(op, case, model)
    judge = judge_of(op, case, inputs, model, {})
    own_bits = implementation is not None and implementation.backward is None
    place = f"({', '.join(map(str, at))}{',' if len(at) == 1 else ''})"
    stream.write(f"{case}\n{question.output} at {place}\n")
    if question.output == "bitmask":
        _write_bit(stream, judge, at)
    for convention in conventions if question.output != "bitmask" else ():
        if len(conventions) > 1:
            stream.write(f"\nif the kernel is one of model={convention_shown(convention)}\n")
        judge = judge_of(op, case, inputs, with_convention(model, convention), {})
        for part in _parts(judge, own_bits):
            if part.output != question.output or not _has(part, at):
                continue
            if part.output == Q:
                _write_code(stream, part, at)
            else:
                _write(stream, element(part, at), part.fmt.name, special=is_special(case))
    _write_model(stream, model, question.impl)


def _conventions(op: Op, case: Case, model: Model) -> tuple[Convention, ...]:
    """Those that differ in this case."""
    return tuple(dict.fromkeys(plainest(each, case) for each in candidates(op, model)))


def _parts(judge: Judge, own_bits: bool) -> Iterator[Expectation]:
    """What the judge would compare outputs with; of an op that quantises for codes of every format."""
    if not judge.op.quantises:
        yield from expectations(judge, own_bits=own_bits)
        return
    for fmt in CODES:
        yield from code_expectations(judge, fmt)


def index_of(op: Op, case: Case, output: str, at: str) -> tuple[int, ...]:
    """``--at`` as an index into ``output`` of ``case``. Raises UsageError, with the range of each index."""
    names = (*op.outputs, *op.gradients(weight=case.weight, bias=case.bias))
    if output not in names:
        said = one_line(output, 60) or shown(output)
        raise UsageError(f"output={said}: expected {one_of(names)}, which {op.name} has in this case")
    of_row, of_column = {"ROW": case.M * case.split.groups}, {"COLUMN": case.split.channels}
    of_weight = {"GROUP": case.row_groups, **of_column} if case.layout in OF_ROW_GROUPS else of_column
    sizes = {"mean": of_row, "rstd": of_row, "dw": of_weight, "db": of_weight}
    sizes |= {name: {"SAMPLE": case.batch, "COLUMN": case.N} for name in OF_SAMPLES}
    sizes[SCALE] = {"ROW": case.M, "COLUMN": max(scale_columns(case, name) for name in BLOCKS)}
    size = sizes.get(output, {"ROW": case.M, "COLUMN": case.N})
    form = ",".join(size)
    if 0 in size.values():
        raise UsageError(f"at={one_line(at, 60)}: {output} of this case has no elements; expected a case with M > 0")
    limits = " and ".join(f"{name} from 0 to {count - 1}" for name, count in size.items())
    wrong = f"at={one_line(at, 60) or shown(at)}: expected {form} of {output}, with {limits}"
    numbers = at.strip("() ").removesuffix(",").replace(" ", "")  # as a report has it: (3, 511)
    if not re.fullmatch(r"[0-9]{1,12}(,[0-9]{1,12})?", numbers):
        raise UsageError(wrong)
    index = tuple(map(int, numbers.split(",")))
    if len(index) != len(size) or any(i >= n for i, n in zip(index, size.values(), strict=True)):
        raise UsageError(wrong)
    return index


def _implementation(question: Question, case: Case, device: str) -> Implementation | None:
    if not question.impl:
        return None
    chosen = selected(question.impl, (case.op,), device, _IMPORT_SECONDS, isolation=True)
    if len(chosen) > 1:
        expected = f"expected one, such as {question.impl}:{one_line(chosen[0].name, 200)}"
        raise UsageError(f"impl={one_line(question.impl, 200)}: names {len(chosen)} implementations; {expected}")
    return chosen[0]


def _has(part: Expectation, at: tuple[int, ...]) -> bool:
    if part.expected.dim() == 1:
        return True
    inside = part.first <= at[0] < part.first + part.expected.shape[0]
    return inside and (len(at) == 1 or at[1] < part.expected.shape[1])


def element(part: Expectation, at: tuple[int, ...]) -> ElementBound:
    """The bound of the element at ``at``, which lies in ``part``; a bound of NaN counts as infinite."""
    row = at[0] - part.first
    place = (row, at[1] if len(at) == 2 else 0) if part.expected.dim() == 2 else at

    def value(t: torch.Tensor) -> float:
        found = float(t.expand_as(part.expected)[place])
        return math.inf if math.isnan(found) else found

    above = value(part.bound.upper)
    below = above if part.bound.lower is None else value(part.bound.lower)
    expected = float(part.expected[place])
    terms = [(name, value(term)) for name, term in part.bound.terms().items()]
    terms = sorted(((n, v) for n, v in terms if v > 0), key=lambda term: -term[1])
    rest = max(above, below) - sum(v for _, v in terms)
    half = float(rounding.half_ulp(part.expected[place].abs().reshape(1), part.fmt))
    output = "dx" if part.output == DRESIDUAL else part.output
    reasons = (REASONS.get((output, name), "").format(fmt=part.fmt.name) for name, _ in terms)
    return ElementBound(
        check=part.check,
        expected=expected,
        above=above,
        below=below,
        half_ulp=half,
        terms=tuple((name, v, reason) for (name, v), reason in zip(terms, reasons, strict=True)),
        rest=rest if math.isfinite(rest) and rest > 1e-3 * max(above, below) else 0.0,
    )


def _write(stream: TextIO, found: ElementBound, fmt: str, *, special: bool) -> None:
    own = ", here the reference's as they would be saved" if found.check == GIVEN_OWN else ""
    stream.write(f"\n{found.check}{own}\n  expected  {found.expected:.17g}\n")
    largest = max(found.above, found.below)
    if not math.isfinite(largest):
        what = "only whether it is finite is checked" if special else "counted, never failed"
        stream.write(f"  bound     none that is finite: uncheckable, {what}\n")
        return
    if largest <= rounding.NO_ROOM:
        stream.write("  bound     0: nothing of it can be rounded, only the expected value is right\n")
        return
    ulps = f"{largest / (2 * found.half_ulp):.3g} ulp of {fmt} there"
    sides = "" if found.above == found.below else f" ({found.above:.6g} above, {found.below:.6g} below)"
    stream.write(f"  bound     {largest:.6g}{sides}, {ulps}\n")
    low, high = found.expected - found.below, found.expected + found.above
    stream.write(f"  right     from {low:.9g} to {high:.9g}\n")
    rows = [*found.terms]
    if found.rest:
        rows.append(("the rest", found.rest, "the side that is wider than the one with these terms, or policy.safety"))
    if not rows:
        return
    width = max(len(name) for name, _, _ in rows)
    total = sum(value for _, value, _ in rows)
    stream.writelines(
        f"  {name:<{width}}  {value:<12.6g} {value / total:>5.1%}  {reason}\n" for name, value, reason in rows
    )


def _write_bit(stream: TextIO, judge: Judge, at: tuple[int, ...]) -> None:
    """Write the bound of a bit: not a distance to its expected value, but the distance of z to the clip limits."""
    (block,) = (b for b in judge.blocks() if b.start <= at[0] < b.stop)
    truth, here = judge.truth(block), (slice(at[0] - block.start, at[0] - block.start + 1), slice(at[1], at[1] + 1))
    z, before = truth.forward.z[here], truth.y.before_store[here].expand(1, 1)
    how = judge.rules.model.bitmask_compare
    reach = float(bitmask.band(z, before, judge.io, how))
    free = bool(doubtful_bits(judge, truth)[here])
    lower, upper = judge.options["lower_clip"], judge.options["upper_clip"]
    bit = int(lower < float(z) < upper)
    stream.write(f"\nlower_clip < z < upper_clip\n  expected  {bit}\n  z         {float(z):.17g}\n")
    stream.writelines(
        f"  {name}  {limit:.9g}, {abs(float(z) - limit):.6g} away\n" for name, limit in judge.options.items()
    )
    stream.write(f"  band      {reach:.6g}: E of z {float(before):.6g}")
    stream.write(
        "\n" if how == "fp32" else f", and half an ulp of {judge.io.name}: compared before the store or after\n"
    )
    last = "either is right: z lies within the band of a limit" if free else f"only {bit} is right: no room, bound 0"
    stream.write(f"  bound     {last}\n")


def _write_code(stream: TextIO, part: Expectation, at: tuple[int, ...]) -> None:
    """Write the codes that are right in a format: not a bound, as the next code is far from them."""
    found = element(part, at)
    quarter = found.half_ulp / 2
    low, high = found.expected - found.below + quarter, found.expected + found.above - quarter
    right = f"{low:g} alone" if low == high else f"{low:g} to {high:g}"
    stream.write(f"  as {part.fmt.name:<7} expected {found.expected:g}, right: {right}, {part.check}\n")


def _write_model(stream: TextIO, model: Model, impl: str) -> None:
    facts = ("chain", "variance", "y_form", "bwd_form", "rsqrt_ulp", "ftz")
    said = ", ".join(f"{name} {getattr(model, name)}" for name in facts)
    whose = f"as {one_line(impl, 200)} declares it" if impl else "of the table; another with --impl"
    stream.write(f"\nmodel: {said} ({whose})\n")
    stream.write("gam(k) = k u / (1 - k u) with u = 2^-24 bounds k roundings in a row (Higham 2002, lemma 3.1);\n")
    stream.write(
        "H(n): the adds that a summand passes through; E: the bound before the store. Next: normcheck tolerances\n"
    )
