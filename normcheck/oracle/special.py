"""NaN and infinity: which elements must not be finite, and that no others are.

What fp64 makes non-finite stays so: a NaN in a row of x makes that row's y and dx NaN and every element of dw, but no
other row's. An infinity in rmsnorm may do the same to its row, or leave the rest of it alone, as the formula does:
sums around a running mean, as torch's on a GPU, meet Inf - Inf. With ``special="exact"`` only the formula is right,
element by element; ``what_an_infinity_does`` says which it was. Values need no bound here, and NaN may stand for
infinity. A saved rstd may be finite where fp64 has none, as after max(variance, 0): y shows what the row was.

NaN lies between no limits: its bit is 0, and no gradient passes there. What the definition of a clamped op leaves open
(a NaN clamped to a limit or not, a cotangent masked by a product or by a choice) is right either way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.data_kinds import NOT_FINITE
from normcheck.cases.inputs import Inputs
from normcheck.cases.ops.op import Op
from normcheck.oracle import reference
from normcheck.oracle.compare import Comparison, Element
from normcheck.oracle.judge import Checked, judged_rows
from normcheck.oracle.tolerances import Model

SPECIAL = "special values"
"""The name of this check."""

SPOILS_ROW = "an infinity in x makes the rest of its row of y NaN"
LEAVES_ROW = "an infinity in x leaves the rest of its row of y alone"

Outputs = Mapping[str, Tensor]


def is_special(case: Case) -> bool:
    """Whether something in x or dy is not finite."""
    return case.M > 0 and (case.rows in NOT_FINITE or case.dy in NOT_FINITE)


def judge_special(op: Op, case: Case, inputs: Inputs, returned: Outputs, model: Model) -> tuple[Checked, ...]:
    """Where ``returned`` (outputs and end-to-end gradients) is finite, against where fp64 is, for a special case."""
    allowed = list(_allowed(op, case, inputs))
    if model.special == "row":
        allowed += [_with_spoilt_rows(one, ~torch.isfinite(inputs.x.reshape(case.M, case.N)).all(1)) for one in allowed]
    sober = ~_overflowing(op, case, inputs)
    checks = []
    for name, expected in allowed[0].items():
        if name in returned:
            actual = returned[name].detach().reshape(expected.shape)
            finite = torch.stack([torch.isfinite(one[name]) for one in allowed])
            got = torch.isfinite(actual)
            in_reach = expected.abs() < torch.finfo(actual.dtype).max / 2
            if name != "db":
                in_reach = in_reach & (sober if expected.dim() == 2 else sober.all())
            wrong = torch.where(got, ~finite.any(0) & (name != "rstd"), finite.all(0) & in_reach)
            checks.append(Checked(name, SPECIAL, _comparison(actual.double(), expected, wrong)))
    return tuple(checks)


def what_an_infinity_does(op: Op, case: Case, inputs: Inputs, returned: Outputs) -> str:
    """What an infinity in x did to its row of y, for a reader of the cell; "" where the formula leaves no choice."""
    if case.rows != "inf" or "y" not in returned:
        return ""
    exact = torch.stack([torch.isfinite(one["y"]) for one in _allowed(op, case, inputs)]).all(0)
    rest = exact & ~torch.isfinite(inputs.x.reshape(case.M, case.N)).all(1, keepdim=True)
    if not bool(rest.any()):
        return ""
    alone = torch.isfinite(returned["y"].detach().reshape(rest.shape))[rest]
    return LEAVES_ROW if bool(alone.all()) else SPOILS_ROW


def _with_spoilt_rows(outputs: Outputs, spoilt: Tensor) -> dict[str, Tensor]:
    """``outputs`` with NaN in the rows that are ``spoilt``, bool (M,), and in dw, which sums over them; db does not."""
    one = torch.where(spoilt, math.nan, 0.0)
    added = {"dw": one.sum(), "db": torch.zeros_like(one).sum()}
    return {name: t + added.get(name, one[:, None] if t.dim() == 2 else one) for name, t in outputs.items()}


def _overflowing(op: Op, case: Case, inputs: Inputs) -> Tensor:
    """Bool (M, 1): rows of finite numbers whose sums a correct fp32 kernel may still overflow in."""
    x = inputs.x.reshape(case.M, case.N).double()
    judged = judged_rows(reference.normalise(op, x, case.eps), case)
    finite = torch.isfinite(x).all(1, keepdim=True)
    return torch.zeros_like(finite) if judged is None else finite & ~judged


def _allowed(op: Op, case: Case, inputs: Inputs) -> Iterator[Outputs]:
    """What fp64 gives, once for each reading of the op; of a clamped op there are several."""
    x, dy = (t.reshape(case.M, case.N).double() for t in (inputs.x, inputs.dy))
    g = reference.scale(op, inputs.weight).g
    bias = None if inputs.bias is None else inputs.bias.double()
    rows = reference.normalise(op, x, case.eps)
    forward = reference.forward(op, rows, g, bias, case.option_values)
    statistics = {"mean": rows.mean, "rstd": rows.rstd}
    found = {name: statistics[name] for name in op.statistics}
    if not op.clamped:
        yield _with_gradients(op, rows, g, dy, {**found, "y": forward.y})
        return
    lower = case.option_values["lower_clip"]
    bits = reference.bits(forward.z, case.option_values)
    unknown = torch.isnan(forward.z)
    for y in (forward.y, torch.where(unknown, lower, forward.y)):
        for masked in (dy * bits, torch.where(bits, dy, 0.0)):
            whole = _with_gradients(op, rows, g, masked, {**found, "y": y})
            yield whole
            yield {**whole, "dw": torch.where(bits, dy * rows.xh, 0.0).sum(0)}


def _with_gradients(
    op: Op, rows: reference.Rows, g: Tensor, dy: Tensor, outputs: Mapping[str, Tensor | None]
) -> dict[str, Tensor]:
    backward = reference.backward(op, rows, g, dy)
    there = {name: t for name, t in outputs.items() if t is not None}
    return {**there, "dx": backward.dx, "dw": backward.dw, "db": backward.db}


def _comparison(actual: Tensor, expected: Tensor, wrong: Tensor) -> Comparison:
    """A wrong element has no distance: the ratio is 0 or infinite."""
    if not bool(wrong.any()):
        return Comparison(0.0, actual.numel(), 0)
    at = int(wrong.flatten().int().argmax())
    index = (at,) if actual.dim() == 1 else divmod(at, actual.shape[1])
    got, right = float(actual.flatten()[at]), float(expected.flatten()[at])
    return Comparison(
        ratio=math.inf,
        numel=actual.numel(),
        uncheckable=0,
        max_abs=0.0,
        non_finite=not math.isfinite(got),
        wrong=wrong,
        worst=Element(index, got, right, math.nan, 0.0, ()),
    )
