"""The judge of NaN and infinity: which elements of an output must be finite, and which must not.

An element that is not finite in fp64 must not be finite: a NaN in a row of x makes y and dx of that row NaN, and all
of dw, but no other row. An infinity in rmsnorm may do the same to its row, or leave the rest of the row finite, as the
formula does: sums around a running mean, such as torch's on a GPU, contain Inf - Inf. With ``special="exact"`` only the
formula is right, element by element; ``what_an_infinity_does`` says which of the two a kernel does. The check compares
no values, and NaN may stand for infinity. A saved rstd may be finite if the reference's is not, as after
max(variance, 0): the check of y covers that row.

NaN is not between the limits: its bit is 0, and no gradient passes. The definition of a clamped op leaves open whether
NaN is clamped to a limit, and whether a cotangent is masked by a product or a choice. Both are right. Whether a bit in
doubt lets a cotangent pass is open as well: one that is not finite may reach the gradients, or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import reduce
from itertools import product

import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.data_kinds import NOT_FINITE
from normcheck.cases.dtypes import FORMATS
from normcheck.cases.inputs import Inputs
from normcheck.cases.layouts import OF_ROW_GROUPS
from normcheck.cases.op import Op
from normcheck.cases.tensor_names import DRESIDUAL, DRESIDUAL_GATE, DSCALE, DSHIFT, RESIDUAL_OUT
from normcheck.oracle import forward_bounds, gated, grouped, l2norm, modulated, reference, rotary, rounding
from normcheck.oracle.compare import Comparison, Element
from normcheck.oracle.forward_bounds import checkable_rows
from normcheck.oracle.gated_sum import sum_of
from normcheck.oracle.gradient_truth import summed_over
from normcheck.oracle.judge import Checked
from normcheck.oracle.residual import ROUNDED
from normcheck.oracle.tolerances import Model

SPECIAL = "special values"
"""The name of this check."""

SPOILS_ROW = "an infinity in x makes the rest of its row of y NaN"
LEAVES_ROW = "an infinity in x leaves the rest of its row of y alone"

Outputs = Mapping[str, Tensor]


def is_special(case: Case) -> bool:
    """Whether x, dy or a gate has elements that are not finite."""
    return case.M > 0 and not {case.rows, case.dy, case.gate}.isdisjoint(NOT_FINITE)


def judge_special(
    op: Op, case: Case, inputs: Inputs, returned: Outputs, model: Model, doubt: Tensor | None
) -> tuple[Checked, ...]:
    """Check which elements of ``returned`` (outputs and end-to-end gradients) are finite, for a special case.

    ``doubt``: bool (M, N), the bits that a correct kernel may set or not; None if the op has no bits. ``inputs``: with
    the sum in place of x, if the op adds a residual.
    """
    inputs = inputs.flat(case)
    if op.gated:
        rows, allowed, sizes = _of_gate(op, case, inputs, model)
    elif op.l2:
        rows, allowed, sizes = _of_length(op, case, inputs, model)
    elif op.modulated:
        rows, allowed, sizes = _of_samples(op, case, inputs, model)
    elif op.grouped:
        rows, allowed, sizes = _of_groups(op, case, inputs, model)
    elif op.rotary:
        rows, allowed, sizes = _of_heads(op, case, inputs, model)
    else:
        rows = _rows(op, case, inputs)
        allowed, sizes = list(_allowed(op, case, inputs, rows, doubt)), _sizes(op, case, inputs, rows, doubt)
    if model.special == "row":
        spoilt, silu = ~torch.isfinite(rows.x).all(1), rows.grouping is not None and rows.grouping.silu
        allowed += [_with_spoilt_rows(one, spoilt, case, rows, silu=silu) for one in allowed]
    no_overflow = ~_may_overflow(op, case, rows, model)
    checks = []
    for name, expected in allowed[0].items():
        if name in returned:
            actual = returned[name].detach().reshape(expected.shape)
            each = [torch.isfinite(one[name]) for one in allowed]
            some, every = reduce(torch.logical_or, each), reduce(torch.logical_and, each)
            got = torch.isfinite(actual)
            in_reach = sizes[name] < torch.finfo(actual.dtype).max / 2
            if name in (DSCALE, DRESIDUAL_GATE):
                in_reach = in_reach & no_overflow.view(case.batch, -1).all(1, keepdim=True)
            elif name == "dw" and rows.stack is not None:
                in_reach = in_reach & (rows.stack.total((~no_overflow).double()) == 0)
            elif name not in ("db", DSHIFT) or rows.grouping is not None:
                in_reach = in_reach & (
                    _of_elements(no_overflow, expected, case)
                    if expected.dim() == 2
                    else _of_sums(no_overflow, rows, expected)
                )
            wrong = torch.where(got, ~some & (name != "rstd"), every & in_reach)
            checks.append(Checked(name, SPECIAL, _comparison(actual.double(), expected, wrong)))
    return tuple(checks)


def what_an_infinity_does(op: Op, case: Case, inputs: Inputs, returned: Outputs) -> str:
    """SPOILS_ROW or LEAVES_ROW, what an infinity in x did to its row of y; "" if the formula leaves no choice."""
    if case.rows != "inf" or "y" not in returned:
        return ""
    inputs = inputs.flat(case)
    each = [torch.isfinite(one["y"]) for one in _allowed(op, case, inputs, _rows(op, case, inputs), None)]
    exact = reduce(torch.logical_and, each)
    rest = exact & ~torch.isfinite(inputs.x.reshape(case.M, case.N)).all(1, keepdim=True)
    if not bool(rest.any()):
        return ""
    finite = torch.isfinite(returned["y"].detach().reshape(rest.shape))[rest]
    return LEAVES_ROW if bool(finite.all()) else SPOILS_ROW


def _of_sums(of_rows: Tensor, rows: reference.Rows, like: Tensor) -> Tensor:
    """What holds of a sum over rows, (N,) or (C,), if it holds of each of them, (m, 1): those of a group alone."""
    if rows.grouping is None:
        return of_rows.all()
    return of_rows.view(-1, rows.groups).all(0).repeat_interleave(like.numel() // rows.groups)


def _of_elements(of_rows: Tensor, like: Tensor, case: Case) -> Tensor:
    """What is said of rows, (m, 1), for each element of ``like``, (m, 1) or (M, N), of which they may be groups, or
    heads: of those of v it is not said.
    """
    if of_rows.shape[0] == like.shape[0]:
        return of_rows
    if case.rotates:
        of_heads = of_rows.expand(-1, case.of_heads.columns).reshape(case.M, -1)
        return torch.nn.functional.pad(of_heads, (0, case.N - of_heads.shape[1]), value=of_rows.dtype == torch.bool)
    return of_rows.expand(-1, like.numel() // of_rows.shape[0]).reshape(like.shape)


def _with_spoilt_rows(
    outputs: Outputs, spoilt: Tensor, case: Case, rows: reference.Rows, *, silu: bool
) -> dict[str, Tensor]:
    """``outputs`` with NaN in the rows, or groups, that are ``spoilt``, bool (m,), and in dw, which sums over them.

    Neither db, dshift nor residual_out depends on other elements of x, but db with ``silu`` does; dscale
    and dresidual_gate on those of their sample.
    """
    nan = torch.where(spoilt, math.nan, 0.0)[:, None]
    none = torch.zeros_like(nan).sum()
    columns = nan if not case.M else nan.view(case.M, -1).sum(0)
    added = {"dw": none}
    if case.M and not case.rotates:
        added["dw"] = columns.repeat_interleave(case.split.channels // columns.numel())
    added |= {"db": added["dw"] if silu else none, DSHIFT: none, RESIDUAL_OUT: none}
    if rows.stack is not None:
        added["dw"] = rows.stack.total(nan)
    if case.samples:
        added[DSCALE] = added[DRESIDUAL_GATE] = nan.view(case.batch, -1).sum(1, keepdim=True)
    return {name: t + (added[name] if name in added else _of_elements(nan, t, case)) for name, t in outputs.items()}


def _of_gate(op: Op, case: Case, inputs: Inputs, model: Model) -> tuple[reference.Rows, list[Outputs], Outputs]:
    """The rows of a gated op; its outputs and gradients in fp64, once for each reading; their sizes, see ``_sizes``.

    At an infinite gate a kernel's 0 * infinity may be NaN, as in z * sigmoid(z), or the limit of the formula.
    """
    assert inputs.gate is not None
    rules = rounding.rules(op, model, weight=case.weight)
    x, gate, dy = (t.reshape(case.M, case.N).double() for t in (inputs.x, inputs.gate, inputs.dy))
    scale, io = reference.scale_of(op, inputs), FORMATS[case.dtype]
    rows, statistics = gated.normalised(op, rules, case, x, gate)

    def outputs(of: reference.Rows) -> dict[str, Tensor]:
        forward, _ = gated.output_y(rules, of, scale, statistics, io, io)
        (dx, _), (dgate, _), part, *_ = gated.gradients(op, rules, of, statistics, scale, io, case.M, dy)
        return {"rstd": of.rstd, "y": forward.y, "dx": dx, "dgate": dgate, "dw": part.backward.dw}

    limit, _ = gated.normalised(op, rules, case, x, gate, at_limits=True)
    return rows, [outputs(rows), outputs(limit)], gated.sizes(rows, scale, dy)


def _of_length(op: Op, case: Case, inputs: Inputs, model: Model) -> tuple[reference.Rows, list[Outputs], Outputs]:
    """The rows of an l2 op; its outputs and gradient in fp64; their sizes, see ``_sizes``."""
    x, dy = (t.reshape(case.M, case.N).double() for t in (inputs.x, inputs.dy))
    rows, _ = l2norm.normalised(rounding.rules(op, model), x, case.eps)
    return rows, [{"rstd": rows.rstd, "y": rows.xh, "dx": l2norm.gradient(rows, dy).dx}], l2norm.sizes(rows, dy)


def _of_samples(
    op: Op, case: Case, inputs: Inputs, model: Model
) -> tuple[reference.Rows, list[Outputs], dict[str, Tensor]]:
    """The rows of a modulated op; its outputs and gradients in fp64, of which there is one reading; their sizes."""
    rules, dy = rounding.rules(op, model, weight=case.weight), inputs.dy.reshape(case.M, case.N).double()
    of_sum = sum_of(case, inputs, rules, model.sum) if op.gates_residual else None
    rows = _rows(op, case, inputs) if of_sum is None else of_sum.normalised(op, 0, case.M)[0]
    rows = modulated.modulated(rules, case, rows, inputs, 0, case.M)
    own = rows.modulation
    assert own is not None
    statistics = {name: t for name, t in (("mean", rows.mean), ("rstd", rows.rstd)) if name in op.statistics}
    forward, backward = (
        reference.forward(op, rows, own.factor, own.shift, {}),
        reference.backward(op, rows, own.factor, dy),
    )
    found = {**statistics, "y": forward.y, "dx": backward.dx, DSCALE: backward.dw, DSHIFT: backward.db}
    wd, xh = (dy * own.factor).abs(), rows.xh_abs
    mean = wd.mean(1, keepdim=True) if op.centered else 0.0
    sizes = {
        **{name: torch.zeros_like(rows.rstd) if t is None else t.abs() for name, t in statistics.items()},
        "y": (rows.xh * own.factor).abs() + own.shift.abs(),
        "dx": rows.rstd * (wd + xh * (xh * wd).mean(1, keepdim=True) + mean),
        DSCALE: rows.total(dy.abs() * xh),
        DSHIFT: rows.total(dy.abs()),
    }
    if of_sum is not None:
        part, cotangent = of_sum.part(0, case.M), of_sum.dresidual_out.double()
        ds, size = backward.dx + cotangent, sizes["dx"] + cotangent.abs()
        found |= {RESIDUAL_OUT: part.stored, DRESIDUAL: ds, "dx": part.gate * ds}
        sizes |= {RESIDUAL_OUT: part.exact.abs(), DRESIDUAL: size}
        # ds may be stored before its products are made, and infinite in half precision even if they are small
        over = torch.where(size < min(of_sum.fmt.max, of_sum.io.max) / 2, 0.0, torch.inf)
        sizes["dx"] = part.gate.abs() * size + over
        found[DRESIDUAL_GATE] = rows.total(ds * part.x)
        sizes[DRESIDUAL_GATE] = rows.total(size * part.x.abs() + over)
    return rows, [{name: t for name, t in found.items() if t is not None}], sizes


def _of_groups(op: Op, case: Case, inputs: Inputs, model: Model) -> tuple[reference.Rows, list[Outputs], Outputs]:
    """The groups of an op that norms them; its outputs and gradients in fp64, of which there is one reading; sizes."""
    rules, dy = rounding.rules(op, model, weight=case.weight), inputs.dy.reshape(case.M, case.N).double()
    rows, statistics = grouped.normalised(op, rules, case, inputs.x.reshape(case.M, case.N).double())
    scale, bias = reference.scale_of(op, inputs), None if inputs.bias is None else inputs.bias.double()
    io = FORMATS[case.dtype]
    y = grouped.output_y(op, rules, rows, scale, bias, statistics, io, io)[0].y
    dx, _, part, *_ = grouped.gradients(op, rules, rows, statistics, scale, bias, io, summed_over(op, case), dy)
    assert rows.mean is not None
    found = {"mean": rows.mean, "rstd": rows.rstd, "y": y, "dx": dx, "dw": part.backward.dw, "db": part.backward.db}
    return rows, [found], grouped.sizes(op, rows, scale, bias, dy)


def _of_heads(op: Op, case: Case, inputs: Inputs, model: Model) -> tuple[reference.Rows, list[Outputs], Outputs]:
    """The heads of an op that norms and rotates them; its outputs and dx in fp64, of which there is one reading."""
    rules, io = rounding.rules(op, model), FORMATS[case.dtype]
    x, dy = (t.reshape(case.M, case.N).double() for t in (inputs.x, inputs.dy))
    rows, statistics = rotary.normalised(op, rules, case, x, inputs, 0)
    y, dx = rotary.output_y(op, rules, rows, statistics, io)[0].y, rotary.gradients(op, rules, rows, statistics, io, dy)
    return rows, [{"rstd": rows.rstd, "y": y, "dx": dx[0]}], rotary.sizes(rows, dy)


_STEADY = 0.25
"""The largest error of a correct kernel's xhat, in its rstd relative to that or by its mean, with which its outputs are
within twice the reference's. Constant rows with a tiny eps have thousands: then all of dx may overflow in fp16."""


def _rows(op: Op, case: Case, inputs: Inputs) -> reference.Rows:
    rows = reference.normalise(op, inputs.x.reshape(case.M, case.N).double(), case.eps)
    return reference.stacked(case, rows, 0, case.M) if case.layout in OF_ROW_GROUPS else rows


def _parameters(op: Op, inputs: Inputs, rows: reference.Rows) -> tuple[Tensor, Tensor | None]:
    """The factor and the bias of these rows in fp64, (N,), or (M, N) if groups of rows have their own."""
    g, bias = reference.scale_of(op, inputs).g, None if inputs.bias is None else inputs.bias.double()
    if rows.stack is None:
        return g, bias
    at = rows.stack.at
    return g[at] if g.dim() > 1 else g, None if bias is None else bias[at]


def _may_overflow(op: Op, case: Case, rows: reference.Rows, model: Model) -> Tensor:
    """Bool (M, 1): rows of finite numbers whose sums, or whose outputs, may overflow in a correct fp32 kernel.

    The backward of a kernel that norms the exact sum may have the stored one only, whose rounding moves xhat as well.
    """
    rules = rounding.rules(op, model)
    if op.l2:
        _, statistics = l2norm.normalised(rules, rows.x, case.eps)
    else:
        statistics = forward_bounds.statistics(rules, rows, case.eps)
    unsteady = torch.as_tensor(statistics.al, device=rows.x.device) > _STEADY
    if statistics.d is not None:
        unsteady = unsteady | (statistics.d > _STEADY)
    if op.adds_residual and model.sum != ROUNDED:
        moved = FORMATS[case.residual_format].u * rows.x.abs().amax(1, keepdim=True) * rows.rstd
        unsteady = unsteady | (moved > _STEADY)
    if rows.gating is not None:  # a product with the gate may be too large for what it is rounded to
        unsteady = unsteady | ~torch.isfinite(rows.gating.off).all(1, keepdim=True)
    checkable = checkable_rows(rows, case)
    finite = torch.isfinite(rows.x).all(1, keepdim=True)
    return finite & (unsteady if checkable is None else unsteady | ~checkable)


def _allowed(op: Op, case: Case, inputs: Inputs, rows: reference.Rows, doubt: Tensor | None) -> Iterator[Outputs]:
    """Outputs and gradients in fp64, once for each reading of the op: a clamped op has several.

    Bits in ``doubt`` are all 0 in one reading and all 1 in another: so most, or least, of the gradients is finite.
    """
    dy = inputs.dy.reshape(case.M, case.N).double()
    g, bias = _parameters(op, inputs, rows)
    forward = reference.forward(op, rows, g, bias, case.option_values)
    statistics = {"mean": rows.mean, "rstd": rows.rstd}
    saved = {name: statistics[name] for name in op.statistics}
    if not op.clamped:
        stored = {RESIDUAL_OUT: rows.x} if op.adds_residual else {}
        whole = _with_gradients(op, rows, g, dy, {**saved, **stored, "y": forward.y})
        if inputs.dresidual_out is not None:
            of_x = whole["dx"] + inputs.dresidual_out.reshape(case.M, case.N).double()
            whole |= {"dx": of_x, DRESIDUAL: of_x}
        yield whole
        return
    lower = case.option_values["lower_clip"]
    certain = reference.bits(forward.z, case.option_values)
    either = (certain,) if doubt is None else (certain & ~doubt, certain | doubt)
    clamped_nan = torch.where(torch.isnan(forward.z), lower, forward.y)
    for y, bits in product((forward.y, clamped_nan), either):
        for masked in (dy * bits, torch.where(bits, dy, 0.0)):
            whole = _with_gradients(op, rows, g, masked, {**saved, "y": y})
            yield whole
            yield {**whole, "dw": rows.total(torch.where(bits, dy * rows.xh, 0.0))}


def _sizes(op: Op, case: Case, inputs: Inputs, rows: reference.Rows, doubt: Tensor | None) -> dict[str, Tensor]:
    """Output -> the sum of the magnitudes that make each element, which may be large where the element itself is not.

    What cancels in fp64 need not in a correct kernel: next to the largest number of a format it may be infinite.
    """
    dy = inputs.dy.reshape(case.M, case.N).double()
    g, bias = _parameters(op, inputs, rows)
    forward = reference.forward(op, rows, g, bias, case.option_values)
    if op.clamped:
        bits = reference.bits(forward.z, case.option_values)
        dy = torch.where(bits if doubt is None else bits | doubt, dy, 0.0)
    wd, xh = (dy * g).abs(), rows.xh.abs()
    mean = wd.mean(1, keepdim=True) if op.centered else 0.0
    found = {
        "rstd": rows.rstd,
        "y": (rows.xh * g).abs() + (0.0 if bias is None else bias.abs()),
        "dx": rows.rstd * (wd + xh * (xh * wd).mean(1, keepdim=True) + mean),
        "dw": rows.total(dy.abs() * xh),
        "db": rows.total(dy.abs()),
    }
    if inputs.residual is not None and inputs.dresidual_out is not None:
        found["dx"] = found["dx"] + inputs.dresidual_out.reshape(case.M, case.N).double().abs()
        found |= {RESIDUAL_OUT: inputs.x.double().reshape(case.M, case.N).abs(), DRESIDUAL: found["dx"]}
    return found if rows.mean is None else {**found, "mean": rows.mean.abs()}


def _with_gradients(
    op: Op, rows: reference.Rows, g: Tensor, dy: Tensor, outputs: Mapping[str, Tensor | None]
) -> dict[str, Tensor]:
    backward = reference.backward(op, rows, g, dy)
    returned = {name: t for name, t in outputs.items() if t is not None}
    return {**returned, "dx": backward.dx, DRESIDUAL: backward.dx, "dw": backward.dw, "db": backward.db}


def _comparison(actual: Tensor, expected: Tensor, wrong: Tensor) -> Comparison:
    """The comparison of which elements are finite: a wrong element has no error in numbers, but an infinite ratio."""
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
        worst=Element(index, got, right, math.nan, math.nan, 0.0, ()),
    )
