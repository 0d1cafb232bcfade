"""What a kernel returned in one case, for the diagnosis, and the ways to compute what an op leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.dtypes import FORMATS, Format
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.layouts import OF_ROW_GROUPS, TRAILING
from normcheck.cases.op import Op
from normcheck.cases.tensor_names import SCALE
from normcheck.checks.check import Result
from normcheck.diagnosis.expected import Forward
from normcheck.diagnosis.formula import Way
from normcheck.oracle import reference, residual, rounding
from normcheck.oracle.conventions import OPEN, keys, with_convention
from normcheck.oracle.judge_forward import bits_of
from normcheck.oracle.quantised import ROUNDS, granularity
from normcheck.oracle.rounding import Rules
from normcheck.oracle.tolerances import Model

_MOST = 1 << 18
"""Elements of the largest case that is fitted: some 150 formulas of it take seconds."""


@dataclass(frozen=True)
class Evidence:
    """What a kernel returned in one case, on the CPU: ``returned`` by name, bits as bool. ``own_backward``: gradients
    are of a backward of its own, which was given ``bits``, those of the reference (None if the op has none).
    ``joined``: how many gradients of x autograd has rounded to the io dtype and then added. ``shared``: what shares a
    scale that it returned, "" if none was. ``usual``: what ``fit`` keeps, the textbook's forward.
    """

    op: Op
    case: Case
    model: Model
    inputs: Inputs
    returned: Mapping[str, Tensor]
    own_backward: bool
    bits: Tensor | None
    joined: int
    shared: str
    usual: dict[Way, Forward] = field(default_factory=dict)

    @property
    def io(self) -> Format:
        """The format of x, dy and dx."""
        return FORMATS[self.case.dtype]

    @property
    def weight(self) -> Format:
        """The format of weight, bias, dw and db."""
        return FORMATS[self.case.weight_format]

    @property
    def wide(self) -> Format:
        """The format of the residual, residual_out and dresidual."""
        return FORMATS[self.case.residual_format]

    def rules(self, way: Way) -> Rules:
        """The numbers of the bounds."""
        model = with_convention(self.model, (("scaling", way.scaling),)) if self.op.quantises else self.model
        return rounding.rules(self.op, model, weight=self.case.weight)


def evidence(op: Op, result: Result, *, own_backward: bool) -> Evidence | None:
    """The evidence of a result; None if it has none: nothing was returned, it is too large, or no formula is for it."""
    case, outputs = result.case, result.seen.outputs
    if (
        result.refused
        or op.main_output not in outputs
        or case.room > _MOST
        or not case.M
        or case.layout in (TRAILING, *OF_ROW_GROUPS)
        or not has_formulas(op)
    ):
        return None
    inputs, shared = make(case, op, "cpu"), ""
    if op.quantises and inputs.scale is None:
        shared = granularity(case, outputs[SCALE], result.model.scale) if SCALE in outputs else ""
        if not shared:
            return None
    returned = {name: t.detach().cpu() for name, t in {**outputs, **result.seen.gradients}.items()}
    bits = None
    if op.clamped:
        rows = reference.normalise(op, inputs.x.reshape(case.M, case.N).double(), case.eps)
        scale, bias = reference.scale_of(op, inputs), None if inputs.bias is None else inputs.bias.double()
        bits = reference.bits(reference.forward(op, rows, scale.g, bias, case.option_values).z, case.option_values)
    if "bitmask" in returned:
        returned["bitmask"] = bits_of(returned["bitmask"], case)
    own_bits = "bitmask" not in returned  # a backward that was given none computes them
    return Evidence(
        op=op,
        case=case,
        model=result.model,
        inputs=inputs,
        returned=returned,
        own_backward=own_backward,
        bits=None if own_bits else bits,
        joined=result.joined,
        shared=shared,
    )


def has_formulas(op: Op) -> bool:
    """Whether there are formulas of what kernels of this op might do instead; else there is evidence of no case."""
    return not (op.gated or op.l2 or op.modulated or op.grouped or op.rotary)


def ways(op: Op, result: Result, *, own_backward: bool) -> tuple[Way, ...]:
    """The ways that a kernel may have by what it declares; none if it declares one that no formula is for."""
    free = {key: OPEN if key in result.open else getattr(result.model, key) for key in ("sum", *CODED)}
    return _ways(op, free, own_backward)


def other_ways(op: Op, result: Result, *, own_backward: bool) -> dict[str, tuple[Way, ...]]:
    """What it is if a kernel declares another way than it has, in words -> the ways that are so."""
    found: dict[str, tuple[Way, ...]] = {}
    free = {key: OPEN if key in result.open else getattr(result.model, key) for key in ("sum", *CODED)}
    for key, values in keys(op).items():
        declared = free[key]
        for value in values if declared != OPEN else ():
            if value not in (declared, OPEN):
                said = f"fits {key}={value} in every case; declared {declared}"
                found[said] = _ways(op, {**free, key: str(value)}, own_backward)
    return found


CODED = ("round_before_quant", "scaling")
"""The keys of a model that say how codes are made."""


def _ways(op: Op, free: Mapping[str, str], own_backward: bool) -> tuple[Way, ...]:
    sums, rounds = [("", "")], [""]
    if op.adds_residual:
        named = (residual.ROUNDED, residual.EXACT) if free["sum"] == OPEN else (free["sum"],)
        sums = [(s, a) for s in named for a in dict.fromkeys((s, residual.ROUNDED) if own_backward else (s,))]
        sums = [each for each in sums if residual.MIXED not in each]
    if op.quantises:
        rounds = list(ROUNDS if free[CODED[0]] == OPEN else (free[CODED[0]],))
    return tuple(Way(sum=s, again=a, rounds=r, scaling=free[CODED[1]]) for s, a in sums for r in rounds)
