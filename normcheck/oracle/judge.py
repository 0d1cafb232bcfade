"""The judge: compares the outputs of a case with the fp64 reference under its bounds, in blocks of rows.

Blocks keep the fp64 temporaries in a CPU's cache, and within a GPU's memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.data_kinds import NOT_FINITE
from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.inputs import Inputs
from normcheck.cases.layouts import HEADS, OF_ROW_GROUPS
from normcheck.cases.op import Op
from normcheck.oracle import (
    forward_bounds,
    gated,
    grouped,
    l2norm,
    modulated,
    reference,
    residual,
    rotary,
    rounding,
)
from normcheck.oracle.backward_bounds import Added
from normcheck.oracle.compare import Comparison, Expectation, compare
from normcheck.oracle.formula import Formula
from normcheck.oracle.forward_bounds import StatisticsBound
from normcheck.oracle.gated_sum import GatedAdded, GatedSum, sum_of
from normcheck.oracle.gradient_truth import GradientTruth, gradient_truth, summed_over
from normcheck.oracle.residual import Sums
from normcheck.oracle.rounding import Bound, Rules
from normcheck.oracle.tolerances import Model

BLOCK_ELEMENTS = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Elements in a block: an fp64 temporary has 256 KiB on a CPU, 32 MiB on a GPU."""

END_TO_END = "end to end"
GIVEN_OWN = "given the kernel's own statistics"
GIVEN_REFERENCE = "given the reference's statistics"


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of one check of one output of a case."""

    output: str
    check: str
    comparison: Comparison


@dataclass(frozen=True)
class Truth:
    """The reference and its bounds for a block. ``checkable``: bool (m, 1), the rows that have bounds; None: all.

    ``of_y`` makes y and its bound, which gradients do not need; ``of_gradients`` makes the gradients end to end of an
    op that is not clamped, which depend on no output of the kernel.
    """

    rows: reference.Rows
    statistics: StatisticsBound
    checkable: Tensor | None
    of_y: Callable[[], tuple[reference.Forward, forward_bounds.YBound]]
    of_gradients: Callable[[], GradientTruth]

    @cached_property
    def gradients(self) -> GradientTruth:
        """The gradients end to end."""
        return self.of_gradients()

    @cached_property
    def _y(self) -> tuple[reference.Forward, forward_bounds.YBound]:
        return self.of_y()

    @property
    def forward(self) -> reference.Forward:
        """z and y."""
        return self._y[0]

    @property
    def y(self) -> forward_bounds.YBound:
        """The bound of y."""
        return self._y[1]


@dataclass(frozen=True)
class Judge:
    """The judge of one case: ``x``, ``dy`` (M, N) as stored (an x of heads is (T, H, N)), ``scale``, ``stored_bias``
    (N,), (G, N) if groups of rows have their own, its rules and options.

    ``floors``: output -> the ratio up to which a comparison may leave out details. ``zeros``: whether to count the
    elements that a 0 would pass. ``truth``: row range -> reference and bounds. ``watch``: gets every expectation.
    ``fused``: whether the fused judge may judge the case, see ``judging``. ``sums``: those of an op that adds a
    residual; then ``x`` is the sum that is normed. ``formula``: what makes y. ``of_backward``: the judges of gradients
    that do not fit that sum, as a backward may have only what was stored, with its rstd or without. ``given_scale``:
    (1,), the one that the codes of an op that quantises are multiples of; None if the kernel returns it.
    ``gated_sum``: of an op that adds a product to its residual; then ``sums`` is None, and ``x`` that of the case.
    ``begins``: whether only the first block of what a forward returns is judged.
    """

    case: Case
    op: Op
    rules: Rules
    x: Tensor
    dy: Tensor
    scale: reference.Scale
    stored_bias: Tensor | None
    io: Format
    weight: Format
    floors: Mapping[str, float]
    zeros: bool
    truth: Callable[[slice], Truth]
    formula: Formula
    watch: Callable[[Expectation], None] | None = None
    fused: bool = False
    sums: Sums | None = None
    of_backward: Callable[[], Iterator[Judge]] = lambda: iter(())
    given_scale: Tensor | None = None
    gated_sum: GatedSum | None = None
    begins: bool = False

    @cached_property
    def finite(self) -> bool:
        """Whether every bound is known to be finite, except in rows that are not checkable."""
        overflows = self.op.gated and (
            self.case.rows == "largest" or self.case.gate in NOT_FINITE or self.case.dtype == "fp16"
        )
        return self.bounded and self.case.dy not in NOT_FINITE and not overflows

    @property
    def bounded(self) -> bool:
        """Whether every bound is known to be finite for finite numbers, except in rows that are not checkable."""
        longest = self.rules.chain(max(self.summed, self.case.M, self.case.N))
        return self.case.eps > 0 and math.isfinite(self.rules.gam(longest + 16))

    @property
    def options(self) -> Mapping[str, float]:
        """The op's own numbers by name."""
        return self.case.option_values

    @property
    def groups(self) -> int:
        """How many rows are normed for each row of the case."""
        return gated.groups_of(self.op, self.case, self.rules.model)

    def normed(self, block: slice) -> slice:
        """The rows that are normed of a block of rows of the case."""
        return slice(block.start * self.groups, block.stop * self.groups)

    @property
    def summed(self) -> int:
        """The rows over which a gradient is summed: all of the case, those of a sample, the elements of a channel."""
        return summed_over(self.op, self.case)

    def added(self, first: int, end: int) -> Added | GatedAdded | None:
        """What is added to dx of these rows; None if the op adds no residual."""
        if self.gated_sum is not None:
            return self.gated_sum.added(self.truth(slice(first, end)).rows, first, end)
        if self.sums is None:
            return None
        return residual.added(self.sums, self.io, self.truth(slice(first, end)).rows, first, end)

    def stored(self, block: slice, fmt: Format) -> Truth:
        """The truth of a block if y is stored in ``fmt``, which may differ from the io format, see ``Op.y_dtypes``."""
        t = self.truth(block)
        if fmt == self.io:
            return t
        return replace(t, of_y=lambda: self.formula.forward(t.rows, t.statistics, fmt))

    def anticipate(self) -> None:
        """Make what the outputs of a small case, one block, will be compared with, as far as it does not need them."""
        if self.case.small:
            truth = self.truth(self.blocks()[0])
            _ = truth.y if self.op.clamped or self.op.quantises else (truth.y, truth.gradients)

    def blocks(self) -> list[slice]:
        """Row ranges of at most BLOCK_ELEMENTS elements, one empty range if M is 0; of whole samples, or of one."""
        height = max(1, BLOCK_ELEMENTS[self.x.device.type] // self.case.N)
        if self.op.modulated and self.case.M:
            every = modulated.blocks(self.case, height)
        else:
            every = [slice(i, min(i + height, self.case.M)) for i in range(0, max(self.case.M, 1), height)]
        return every[:1] if self.begins else every


@dataclass(frozen=True, slots=True)
class Reference:
    """The values that a correct kernel saves for its backward: ``mean``, ``rstd`` (M, 1) fp32, ``bits`` bool (M, N).

    ``ties``, bool (M, N): elements of z equal to a limit, where autograd's clamp and a strict bit differ. ``doubt``,
    bool (M, N): those, and the bits that a correct kernel may set or not. A field that the op lacks is None.
    ``kept``: what the fused judge keeps for the gradients; None from the plain judge.
    """

    mean: Tensor | None
    rstd: Tensor
    bits: Tensor | None
    ties: Tensor | None
    doubt: Tensor | None
    kept: object = None


def judge_of(
    op: Op,
    case: Case,
    inputs: Inputs,
    model: Model,
    floors: Mapping[str, float],
    *,
    zeros: bool = False,
    watch: Callable[[Expectation], None] | None = None,
    fused: bool = False,
) -> Judge:
    """The judge of ``case`` for a kernel of this ``model``; see ``Judge`` for the rest."""
    shape, inputs = (case.M, case.N), inputs.flat(case)
    how = (residual.ROUNDED if model.sum == "any" else model.sum) if op.adds_residual else ""
    rules, scale = rounding.rules(op, model, weight=case.weight), reference.scale_of(op, inputs)
    product = sum_of(case, inputs, rules, how) if op.gates_residual else None
    sums = residual.sums_of(case, inputs, how) if how and product is None else None
    x = inputs.x if inputs.x.dim() == 2 or case.layout == HEADS else inputs.x.reshape(shape)
    x = sums.of_norm if sums else x
    source = sums.of_statistics if sums else x
    dy = inputs.dy if inputs.dy.dim() == 2 else inputs.dy.reshape(shape)
    gate = None if inputs.gate is None else inputs.gate.reshape(shape)
    io, summed = FORMATS[case.dtype], summed_over(op, case)
    formula = Formula(op, rules, scale, inputs.bias, io, case.option_values)

    def truth(first: int, end: int) -> Truth:
        block = _rows(source, first, end).double()
        checkable: Tensor | None = None
        if product is not None:
            rows, statistics, checkable = product.normalised(op, first, end)
        elif op.l2:
            rows, statistics = l2norm.normalised(rules, block, case.eps)
        elif op.grouped:
            rows, statistics = grouped.normalised(op, rules, case, block)
        elif op.rotary:
            rows, statistics = rotary.normalised(op, rules, case, block, inputs, first)
            checkable = rotary.checkable(rows, case)
        elif gate is None:
            rows = reference.normalise(op, block, case.eps)
            statistics = forward_bounds.statistics(rules, rows, case.eps)
        else:
            rows, statistics = gated.normalised(op, rules, case, block, gate[first:end].double())
        if product is None and not op.rotary:
            checkable = forward_bounds.checkable_rows(rows, case)
        if source is not x:
            rows = reference.renormalised(rows, x[first:end].double())
        if op.modulated:
            rows = modulated.modulated(rules, case, rows, inputs, first, end)
        if case.layout in OF_ROW_GROUPS:
            rows = reference.stacked(case, rows, first, end)
        own = formula.of(rows)

        def added() -> Added | GatedAdded | None:
            if product is not None:
                return product.added(rows, first, end)
            return None if sums is None else residual.added(sums, io, rows, first, end)

        return Truth(
            rows,
            statistics,
            checkable,
            lambda: formula.forward(rows, statistics, io),
            lambda: gradient_truth(
                op, rules, rows, statistics, own.scale, io, summed, dy[first:end].double(), added=added(), bias=own.bias
            ),
        )

    latest: dict[tuple[int, int], Truth] = {}  # most cases are one block, which forward and backward share

    def block(b: slice) -> Truth:
        if (b.start, b.stop) not in latest:
            latest.clear()
            latest[b.start, b.stop] = truth(b.start, b.stop)
        return latest[b.start, b.stop]

    weight = FORMATS[case.weight_format]

    def stored_alone() -> Iterator[Judge]:
        others = (residual.MIXED, residual.ROUNDED) if how == residual.EXACT else (residual.ROUNDED,)
        for other in others if how in (residual.EXACT, residual.MIXED) and not residual.are_one(case) else ():
            yield judge_of(op, case, inputs, replace(model, sum=other), floors, zeros=zeros, watch=watch)

    of_case = (case, op, rules, x, dy, scale, inputs.bias, io, weight, floors, zeros, block, formula, watch, fused)
    return Judge(*of_case, sums, stored_alone, inputs.scale if op.quantises else None, product)


def _rows(x: Tensor, first: int, end: int) -> Tensor:
    """The rows ``first`` to ``end`` of x, (M, N) or (T, H, N): heads have no stride in common, so they are copied."""
    if x.dim() == 2:
        return x[first:end]
    heads = x.shape[1]
    token = first // heads
    return x[token : -(-end // heads)].reshape(-1, x.shape[2])[first - token * heads : end - token * heads]


def compared(
    judge: Judge, actual: Tensor, held: Expectation, ok: Tensor | None = None, *, finite: bool = True
) -> Comparison:
    """``compare``; rows that are not ``ok``, bool (m, 1), get an infinite bound, so that they count as uncheckable.

    ``finite``: False if this bound may be infinite though no other of the case is.
    """
    expected, bound = held.expected, held.bound
    if ok is not None and ok.shape[0] != expected.shape[0]:  # of groups of columns
        columns = expected.numel() // ok.shape[0]
        of_heads = judge.op.rotary and rotary.of_elements(ok, expected, judge.case.of_heads)
        ok = of_heads if isinstance(of_heads, Tensor) else ok.expand(-1, columns).reshape(expected.shape)
    if ok is not None:
        upper = torch.where(ok, bound.upper, math.inf)
        lower = None if bound.lower is None else torch.where(ok, bound.lower, math.inf)
        held = replace(held, bound=Bound(upper, lower, bound.terms))
    if judge.watch:
        judge.watch(held)
    if ok is not None:
        held = replace(held, expected=torch.where(ok, expected, 0.0))
    finite = finite and ok is None and judge.finite
    return compare(actual, held, floor=judge.floors.get(held.output, 0.0), finite=finite, zeros=judge.zeros)
