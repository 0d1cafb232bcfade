"""The judge: outputs of a case against the fp64 reference and its bounds, in blocks of rows.

Blocks keep the fp64 temporaries in the cache of a CPU and within the memory of a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.data_kinds import NOT_FINITE
from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.inputs import Inputs, format_of
from normcheck.cases.ops.op import Op
from normcheck.oracle import bitmask, casting, forward_bounds, reference, rounding
from normcheck.oracle.compare import Comparison, compare, merge
from normcheck.oracle.forward_bounds import StatisticsBound
from normcheck.oracle.rounding import Bound, Rules
from normcheck.oracle.tolerances import Model

BLOCK_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Elements judged at once: a temporary of 256 KiB on a CPU, of 128 MiB on a GPU."""

END_TO_END = "end to end"
GIVEN_OWN = "given the kernel's own statistics"
GIVEN_REFERENCE = "given the reference's statistics"


@dataclass(frozen=True, slots=True)
class Checked:
    """One check of one output on one case."""

    output: str
    check: str
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class Truth:
    """The reference and its bounds for a block. ``judged``: bool (m, 1), rows that can be judged at all; None: all."""

    rows: reference.Rows
    forward: reference.Forward
    statistics: StatisticsBound
    y: forward_bounds.YBound
    judged: Tensor | None


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a check holds rows ``first`` and on of an output against: ``expected`` and ``bound`` in fp64, (m, N), (m, 1)
    or (N,); ``fmt``: the format in which the output is stored.
    """

    output: str
    check: str
    first: int
    expected: Tensor
    bound: Bound
    fmt: Format


@dataclass(frozen=True, slots=True)
class Judge:
    """What is the same for all blocks of a case: ``x``, ``dy`` (M, N) as stored, ``scale``, ``bias`` (N,) in fp64.

    ``floors``: output -> the ratio below which details of a comparison are not wanted. ``zeros``: also count what
    zeros would pass. ``watch``: told of everything that is compared, and with what.
    """

    case: Case
    op: Op
    rules: Rules
    x: Tensor
    dy: Tensor
    scale: reference.Scale
    bias: Tensor | None
    bias_abs: Tensor | None
    io: Format
    weight: Format
    floors: Mapping[str, float]
    zeros: bool
    truth: Callable[[slice], Truth]
    watch: Callable[[Expectation], None] | None = None

    @property
    def finite(self) -> bool:
        """Whether every bound is known to be finite, rows that cannot be judged aside."""
        longest = self.rules.chain(max(self.case.M, self.case.N))
        return self.case.eps > 0 and self.case.dy not in NOT_FINITE and math.isfinite(self.rules.gam(longest + 16))

    @property
    def options(self) -> Mapping[str, float]:
        """The op's own numbers by name."""
        return self.case.option_values

    def forward(
        self, rows: reference.Rows, given: StatisticsBound, fmt: Format
    ) -> tuple[reference.Forward, forward_bounds.YBound]:
        """y and its bound for a block of rows whose statistics are off by ``given``; y is stored in ``fmt``."""
        if casting.casts(self.op, self.rules, self.io):
            return casting.output_y(self.rules, casting.cast(self.rules, rows, given, self.io), self.scale, fmt)
        forward = reference.forward(self.op, rows, self.scale.g, self.bias, self.options)
        return forward, forward_bounds.output_y(self.rules, rows, forward, self.scale, self.bias_abs, given, fmt)

    def stored(self, block: slice, fmt: Format) -> Truth:
        """The truth of a block whose y is stored in ``fmt``, which need not be the io format; see ``Op.y_dtypes``."""
        t = self.truth(block)
        if fmt == self.io:
            return t
        forward, y = self.forward(t.rows, t.statistics, fmt)
        return replace(t, forward=forward, y=y)

    def blocks(self) -> list[slice]:
        """Row ranges of at most BLOCK_ELEMENTS; one empty range where M is 0."""
        height = max(1, BLOCK_ELEMENTS[self.x.device.type] // self.case.N)
        return [slice(i, min(i + height, self.case.M)) for i in range(0, max(self.case.M, 1), height)]


@dataclass(frozen=True, slots=True)
class Reference:
    """What the reference would save for a backward: ``mean``, ``rstd`` (M, 1) fp32, ``bits`` bool (M, N).

    ``ties``: exact ties with a limit, at which autograd's clamp and a strict bit differ; ``doubt``: those, and the bits
    that a correct kernel may set either way. Bool (M, N). What an op does not have is None.
    """

    mean: Tensor | None
    rstd: Tensor
    bits: Tensor | None
    ties: Tensor | None
    doubt: Tensor | None


def judge_of(
    op: Op,
    case: Case,
    inputs: Inputs,
    model: Model,
    floors: Mapping[str, float],
    *,
    zeros: bool = False,
    watch: Callable[[Expectation], None] | None = None,
) -> Judge:
    """The judge of one case."""
    shape = (case.M, case.N)
    x = inputs.x if inputs.x.dim() == 2 else inputs.x.reshape(shape)
    dy = inputs.dy if inputs.dy.dim() == 2 else inputs.dy.reshape(shape)
    rules = rounding.rules(op, model)
    scale = reference.scale(op, inputs.weight)
    bias = None if inputs.bias is None else inputs.bias.double()
    bias_abs = None if bias is None else bias.abs()
    io = FORMATS[case.dtype]

    @functools.lru_cache(maxsize=1)  # one block is the usual case, and then forward and backward share it
    def truth(first: int, end: int) -> Truth:
        rows = reference.normalise(op, x[first:end].double(), case.eps)
        statistics = forward_bounds.statistics(rules, rows, case.eps)
        forward, y = judge.forward(rows, statistics, io)
        return Truth(rows, forward, statistics, y, judged_rows(rows, case))

    weight = FORMATS[case.weight_format]
    block = lambda b: truth(b.start, b.stop)  # noqa: E731
    judge = Judge(case, op, rules, x, dy, scale, bias, bias_abs, io, weight, floors, zeros, block, watch)
    return judge


def judged_rows(rows: reference.Rows, case: Case) -> Tensor | None:
    """False where a correct fp32 kernel may overflow (sums above FLT_MAX / 4), or 1 / sqrt(0) is asked for."""
    assert rows.var is not None
    limit = rounding.FLT_MAX / 4 / case.N
    small = case.dtype == "fp16" and case.rows not in NOT_FINITE
    if rows.x.numel() == 0 or (case.eps > 0 and (small or float(rows.x_abs.max()) ** 2 <= limit)):
        return None
    largest = rows.var if rows.mean is None else torch.maximum(rows.var, rows.x_abs.mean(1, keepdim=True))
    judged = (largest <= limit) & (rows.var + case.eps > 0)
    return None if bool(judged.all()) else judged


def compared(
    judge: Judge,
    output: str,
    check: str,
    actual: Tensor,
    expected: Tensor,
    bound: Bound,
    fmt: Format,
    first: int,
    ok: Tensor | None,
) -> Comparison:
    """compare(), where rows that are not ``ok`` (m, 1) have no finite bound: uncheckable, counted."""
    told = expected
    if ok is not None:
        bound = Bound(
            torch.where(ok, bound.upper, math.inf),
            None if bound.lower is None else torch.where(ok, bound.lower, math.inf),
            bound.terms,
        )
        expected = torch.where(ok, expected, 0.0)
    if judge.watch:
        judge.watch(Expectation(output, check, first, told, bound, fmt))
    finite = ok is None and judge.finite
    floor = judge.floors.get(output, 0.0)
    return compare(actual, expected, bound, fmt, floor=floor, first_row=first, finite=finite, zeros=judge.zeros)


def judge_forward(judge: Judge, outputs: Mapping[str, Tensor]) -> tuple[tuple[Checked, ...], Reference]:
    """Check y, the statistics and the bitmask, as far as ``outputs`` has them; and what a backward should be fed with.

    In the order of the data's way: the first that is wrong is the one to look at.
    """
    op, case = judge.op, judge.case
    found: dict[tuple[str, str], list[tuple[int, Comparison]]] = {}
    kept: dict[str, list[Tensor]] = {"mean": [], "rstd": [], "bits": [], "ties": [], "doubt": []}
    y = outputs["y"].reshape(case.M, case.N)
    fmt = format_of(y.dtype)
    own = {name: outputs[name].reshape(case.M, 1) for name in op.statistics if name in outputs}
    got_bits = bits_of(outputs["bitmask"], case) if "bitmask" in outputs else None
    for block in judge.blocks():
        t, first = judge.stored(block, fmt), block.start
        results = list(_statistics_checks(judge, t, own, block, kept))
        if len(own) == len(op.statistics) and judge.rules.model.y_given_stats:
            results.append(("y", GIVEN_OWN, _y_given_stats(judge, t, y[block], own, block)))
        whole = compared(judge, "y", END_TO_END, y[block], t.forward.y, t.y.y, fmt, first, t.judged)
        results.append(("y", END_TO_END, whole))
        if op.clamped:
            free = doubtful_bits(judge, t)
            kept["bits"].append(reference.bits(t.forward.z, judge.options))
            kept["ties"].append(bitmask.ties(t.forward.z, judge.options))
            kept["doubt"].append(free | kept["ties"][-1])
            if got_bits is not None:
                results.append(("bitmask", END_TO_END, _bit_comparison(judge, t, got_bits[block], free, first)))
        for output, check, comparison in results:
            found.setdefault((output, check), []).append((first, comparison))
    checked = tuple(Checked(output, check, merge(parts, case.M)) for (output, check), parts in found.items())
    whole_of = {name: torch.cat(parts) if parts else None for name, parts in kept.items()}
    rstd = whole_of["rstd"]
    assert rstd is not None
    return checked, Reference(whole_of["mean"], rstd, whole_of["bits"], whole_of["ties"], whole_of["doubt"])


def _statistics_checks(
    judge: Judge, t: Truth, own: Mapping[str, Tensor], block: slice, kept: Mapping[str, list[Tensor]]
) -> list[tuple[str, str, Comparison]]:
    results = []
    for name, expected, bound in (("mean", t.rows.mean, t.statistics.mean), ("rstd", t.rows.rstd, t.statistics.rstd)):
        if expected is None or bound is None:
            continue
        kept[name].append(expected.float())
        if name in own:
            fp32 = FORMATS["fp32"]
            result = compared(judge, name, END_TO_END, own[name][block], expected, bound, fp32, block.start, t.judged)
            results.append((name, END_TO_END, result))
    return results


def _y_given_stats(judge: Judge, t: Truth, y: Tensor, own: Mapping[str, Tensor], block: slice) -> Comparison:
    """y against the formula fed with the statistics that the kernel saved: a bound without N in it."""
    mean = own["mean"][block].double() if "mean" in own else None
    rows = reference.normalise_with(t.rows, mean, own["rstd"][block].double())
    fmt = format_of(y.dtype)
    forward, bound = judge.forward(rows, forward_bounds.saved_statistics(judge.rules, rows), fmt)
    ok = t.judged
    if not math.isfinite(float(rows.xh.sum())):  # statistics that are not finite are a finding of their own
        finite = torch.isfinite(rows.xh).all(1, keepdim=True)
        ok = finite if ok is None else finite & ok
    return compared(judge, "y", GIVEN_OWN, y, forward.y, bound.y, fmt, block.start, ok)


def bits_of(returned: Tensor, case: Case) -> Tensor:
    """The bitmask as bool (M, N), whichever of the two forms was returned."""
    if returned.dtype == torch.bool:
        return returned.reshape(case.M, case.N)
    return bitmask.unpack(returned.reshape(case.M, bitmask.packed_columns(case.N)), case.N)


def doubtful_bits(judge: Judge, t: Truth) -> Tensor:
    """Bool (m, N): the bits that may go either way. NaN lies between no limits, so what a NaN or an infinity in x makes
    NaN has a bit, 0; a NaN of fp64 alone, as of 0 * inf where eps is 0, has none.
    """
    how = judge.rules.model.bitmask_compare
    free = bitmask.doubtful(t.forward.z, t.y.before_store, judge.options, judge.io, how)
    if t.judged is None:
        return free
    spoilt = ~torch.isfinite(t.rows.x_abs.sum(1, keepdim=True)) & torch.isnan(t.forward.z)
    return (free | ~t.judged) & ~spoilt


def _bit_comparison(judge: Judge, t: Truth, got: Tensor, free: Tensor, first: int) -> Comparison:
    """A wrong bit is off by 1, its bound is 0. A bit in doubt has no bound, and counts as uncheckable."""
    bound = Bound(torch.full_like(t.forward.z, rounding.NO_ROOM).masked_fill_(free, math.inf), None, dict)
    expected = reference.bits(t.forward.z, judge.options).double()
    if judge.watch:
        judge.watch(Expectation("bitmask", END_TO_END, first, expected, bound, FORMATS["fp32"]))
    floor = judge.floors.get("bitmask", 0.0)
    found = compare(got.double(), expected, bound, FORMATS["fp32"], floor=floor, first_row=first, zeros=judge.zeros)
    return replace(found, max_ulp=found.max_abs)  # a bit has no ulps but itself
