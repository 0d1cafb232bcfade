"""The bound and the table: how far a correct kernel's output may lie from the fp64 reference, element by element.

Every bound is  E + one rounding of the store.  E bounds what fp32 arithmetic may do before the store:  unit roundoff
x a counted number of roundings x condition sums of the data, taken in fp64 next to the reference. Standard rounding
analysis (Higham, Accuracy and Stability, ch. 3 and 4); the error of the variance goes through the root as an interval,
so that eps, tiny variances and large offsets come out right. Symbols: ``al`` bounds the relative error of rstd, ``d``
is the shift of xhat caused by the error of the mean, ``gam(k)`` = k u / (1 - k u).

The numbers come from tolerances.toml. Nothing here knows an implementation; what one declares about its arithmetic
arrives as ``Model``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normcheck.formats import FORMATS, Format
from normcheck.ops.op import Op
from normcheck.reference import Backward, Forward, Rows, Scale
from normcheck.table import Model, table

FLT_MAX = FORMATS["fp32"].max
NO_ROOM = 1e-300  # stands for a bound of exactly 0: no error is a ratio of 0, any error is a huge one
_EXPONENT = 0x7FF0000000000000  # the exponent field of an fp64: the rest cleared leaves 2^floor(log2(a))


@dataclass(frozen=True)
class Rules:
    """The numbers of one op under one model, ready for the formulas. ``doubt`` names what ``Doubt`` is about."""

    model: Model
    centered: bool
    doubt: str
    u: float
    eta: float
    c_var: float
    k_y: int
    count: Mapping[str, int]
    store: Mapping[str, float]
    safety: float

    def chain(self, n: int) -> int:
        """H(n): the longest chain of adds that a summand passes through in a sum of n terms."""
        chain = self.model.chain
        if not isinstance(chain, int) or n <= chain:
            return n
        return chain + math.ceil(math.log2(n / chain))

    def gam(self, k: int) -> float:
        """k u / (1 - k u): the bound of k roundings in a row (Higham, lemma 3.1)."""
        ku = k * self.u
        return ku / (1 - ku) if ku < 0.5 else math.inf


def rules(op: Op, model: Model) -> Rules:
    """The table's numbers for ``op`` under ``model``."""
    numbers = table()
    accumulate = FORMATS[model.accumulate]
    return Rules(
        model=model,
        centered=op.centered,
        doubt="bits in doubt" if op.clamped else "roundings to the io dtype",
        u=accumulate.u,
        eta=2.0 ** (accumulate.emin if model.ftz else accumulate.emin - accumulate.p),
        c_var=1.0 if model.variance == "any" else 0.0,
        k_y=numbers.count["y_zero_centered" if op.weight_offset else "y"],
        count=numbers.count,
        store=numbers.store,
        safety=numbers.safety,
    )


def half_ulp(a: Tensor, fmt: Format) -> Tensor:
    """Half the spacing of ``fmt`` at ``a`` >= 0 (fp64): 2^(max(floor(log2 a), emin) - p), underflow being gradual."""
    power = a.view(torch.int64).bitwise_and(_EXPONENT).view(torch.float64)
    return power.clamp_(min=2.0**fmt.emin).mul_(2.0**-fmt.p)


def store(rules: Rules, a: Tensor, fmt: Format, output: str) -> Tensor | float:
    """One rounding to ``fmt`` at magnitude ``a`` (fp64); 0 where that is the accumulation format, already counted."""
    if fmt.name == rules.model.accumulate:
        return 0.0
    half = half_ulp(a, fmt)
    if rules.store[output] != 1.0:
        half *= rules.store[output]
    if rules.model.ftz and fmt.emin == FORMATS["fp32"].emin:
        half += torch.where(a < 2.0**-125, 2.0**-126, 0.0)  # a format with fp32's range: a subnormal may be flushed
    return half


@dataclass(frozen=True, slots=True)
class Bound:
    """``upper`` bounds actual - expected, ``lower`` (None: the same) expected - actual, both >= 0 in fp64.

    ``terms`` computes the parts of the bound, name -> tensor, only when somebody asks.
    """

    upper: Tensor
    lower: Tensor | None
    terms: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class StatisticsBound:
    """``al``, ``d`` (m, 1): what the errors of the statistics do to xhat; the bounds of the saved mean and rstd.

    ``d`` and ``mean`` are None where the op has no mean, ``mean`` and ``rstd`` where the statistics were given.
    """

    al: Tensor | float
    d: Tensor | None
    mean: Bound | None
    rstd: Bound | None


EXACT = StatisticsBound(0.0, None, None, None)
"""The statistics are given, and the kernel was fed with exactly them."""


def statistics(rules: Rules, rows: Rows, eps: float) -> StatisticsBound:
    """Bounds of mean and rstd, as an interval through the root.

    Any order passes a summand through at most H(N) - 1 adds. Two-pass: sum (x - m')^2 = sum (x - m)^2 + N (m' - m)^2.
    Welford and Chan's merge are stable to first order in sqrt(1 + mean^2 / v) only: the ``c_var`` term (Chan, Golub,
    LeVeque 1983). A variance is a sum of squares, so no kernel's v + eps is below eps: that bounds rstd from above
    where the interval of v reaches below zero.
    """
    u, eta, count = rules.u, rules.eta, rules.count
    assert rows.var is not None
    n = rows.x.shape[1]
    h = rules.chain(n)
    v = rows.var
    dm: Tensor | None = None
    if rows.mean is not None:
        dm = rows.x_abs.mean(1, keepdim=True).mul_(rules.gam(h + count["mean"])).add_((h + 3) * eta)
        dm2 = dm * dm
        dv = (v + dm2).mul_(rules.gam(h + count["var"])).add_(dm2).add_(3 * eta)
        if rules.c_var:
            rms = (rows.mean * rows.mean + v).sqrt_()
            dv.addcmul_(v.sqrt(), rms, value=rules.c_var * rules.gam(h))
    else:
        dv = v * rules.gam(h + count["rms"]) + 3 * eta
    q = v + eps
    dq = (q + dv).mul_(u).add_(dv).add_(u * eps)
    rs = 2 * rules.model.rsqrt_ulp * u
    upper = (q / (q - dq).clamp_(min=eps * (1 - 2 * u))).sqrt_().mul_(1 + rs).sub_(1)
    lower = 1 - (q / (q + dq)).sqrt_().mul_(1 - rs)
    al = torch.maximum(upper, lower)
    r = rows.rstd
    rstd = Bound(  # saved in the accumulation format: their store is counted
        (r * upper).add_(eta),
        (r * lower).add_(eta),
        lambda: {"variance": r * (upper - rs), "rsqrt": r * rs, "underflow": torch.full_like(r, eta)},
    )
    if rows.mean is None or dm is None:
        return StatisticsBound(al, None, None, rstd)
    return StatisticsBound(al, r * dm, Bound(dm, None, lambda: {"sum": dm}), rstd)


def saved_statistics(rules: Rules, rows: Rows) -> StatisticsBound:
    """For y given the statistics that the kernel saved: these may be off by the one rounding of their own store."""
    off = rules.count["stats_saved"] * rules.u
    return StatisticsBound(off, None if rows.mean is None else (rows.mean.abs() * rows.rstd).mul_(off), None, None)


@dataclass(frozen=True, slots=True)
class YBound:
    """``before_store``: E of z (and of y, the clip being 1-Lipschitz); ``y``: the bound after the store."""

    before_store: Tensor
    y: Bound


def output_y(
    rules: Rules, rows: Rows, fwd: Forward, scale: Scale, bias_abs: Tensor | None, given: StatisticsBound, fmt: Format
) -> YBound:
    """Bound of y (m, N). Covers ((x-m) r) g + b and (x-m) (r g) + b, with or without FMA.

    ``bias_abs`` is |bias| (N,). The final add cannot err by more than |p|: where g == 0 it is exact, and so is the
    bitmask there.
    """
    u, eta, k, al, d, r = rules.u, rules.eta, rules.k_y, given.al, given.d, rows.rstd
    g_abs = scale.abs
    per_xh = (1 + al) * (1 + k * u) - 1
    per_row = eta * (1 + r * (1 + al))
    if d is not None:
        per_row = per_row + (1 + al) * (1 + (k + 1) * u) * d
    before = (rows.xh_abs * per_xh).add_(per_row).mul_(g_abs).add_(eta)
    if rules.model.y_form == "folded":
        offset = rows.x_abs.clone() if rows.mean is None else rows.x_abs + rows.mean.abs()
        before += offset.mul_(r).mul_(g_abs).mul_(5 * u * (1 + al))
    p_abs = fwd.p.abs()
    if bias_abs is not None:
        if rules.model.y_form == "folded":
            before += bias_abs * (5 * u * (1 + al))
        before += torch.minimum((fwd.z.abs() + before).mul_(u), p_abs + before)
        p_abs += bias_abs
    before += p_abs.mul_(2.0**-51)  # the reference's own rounding
    if scale.where is not None:
        before *= scale.where
    stored = store(rules, fwd.y.abs() + before, fmt, "y")
    upper = (before + stored).clamp_(min=NO_ROOM) if isinstance(stored, float) else before + stored
    if rules.safety != 1.0:
        upper *= rules.safety

    def terms() -> Mapping[str, Tensor]:
        ones = torch.ones_like(before)
        mean = ones * 0 if d is None else g_abs * d * ones
        rstd = rows.xh_abs * g_abs * al
        return {
            "store": stored * ones,
            "rstd": rstd,
            "mean": mean,
            "ops": (before - rstd - mean - eta).clamp_(min=0),
            "underflow": eta * (ones if scale.where is None else ones * scale.where),
        }

    return YBound(before, Bound(upper, None, terms))


@dataclass(frozen=True, slots=True)
class GradientSums:
    """This block's share of the sums over M behind the bounds of dw and db, each (N,)."""

    dy_xhat: Tensor  # sum |dy| * bound of |xhat|
    dy_shift: Tensor  # sum |dy| * what underflow and the errors of the statistics do to xhat
    dy_abs: Tensor  # sum |dy|


@dataclass(frozen=True, slots=True)
class Doubt:
    """What may go either way, taken the other way, does to a block's dx (m, N) and to its share of dw and db (N,).

    Bits in doubt of an op that clamps, or roundings to the io dtype of one that rounds xhat.
    """

    dx: Tensor
    dw: Tensor
    db: Tensor


def doubted(rules: Rules, rows: Rows, dy: Tensor, scale: Scale, given: StatisticsBound, m: int) -> Doubt:
    """``dy``: the cotangent (m, N) where its bit is in doubt, 0 elsewhere. ``m``: rows of the whole sum.

    The gradients are linear in dy, so an element that passes or not changes them by its own share, roundings included.
    """
    grow = 1 + rules.gam(rules.chain(max(m, rows.x.shape[1])) + 16)
    dy_abs = dy.abs() * grow
    dx = moved_dx(rules, rows, dy_abs * scale.abs, given)
    return Doubt(dx, (dy_abs * _xhat_at_most(rows, given)).sum(0), dy_abs.sum(0))


def moved_dx(rules: Rules, rows: Rows, wd: Tensor, given: StatisticsBound) -> Tensor:
    """How far dx (m, N) moves, at most, when each dy * g moves by up to ``wd`` (m, N) >= 0."""
    xa = _xhat_at_most(rows, given)
    c1, c2 = (xa * wd).mean(1, keepdim=True), wd.mean(1, keepdim=True)
    return (wd + xa * c1 + (c2 if rules.centered else 0.0)) * ((1 + given.al) * rows.rstd)


def _xhat_at_most(rows: Rows, given: StatisticsBound) -> Tensor:
    return (rows.xh_abs if given.d is None else rows.xh_abs + given.d) * (1 + given.al)


def output_dx(
    rules: Rules,
    rows: Rows,
    bwd: Backward,
    dy: Tensor,
    given: StatisticsBound,
    fmt: Format,
    doubt: Doubt | None = None,
) -> tuple[Bound, GradientSums]:
    """Bound of dx (m, N), and the block's share of what the bounds of dw and db are made of.

    End to end the kernel's xhat is rho (xhat - delta) with |rho - 1| <= al, |delta| <= d, which gives the extra terms
    exactly; given the statistics, al = d = 0.
    """
    u, eta, count, al, d = rules.u, rules.eta, rules.count, given.al, given.d
    h = rules.chain(rows.x.shape[1])
    xh_abs, wd_abs, r = rows.xh_abs, bwd.wd.abs(), rows.rstd
    xa = xh_abs if given is EXACT else (xh_abs if d is None else xh_abs + d) * (1 + al)
    ra = (1 + al) * r
    a2 = wd_abs.mean(1, keepdim=True)
    ux = eta * (1 + ra)
    dc1 = (xa * wd_abs).mean(1, keepdim=True).mul_(rules.gam(h + count["c1"]))
    xa_mean = (1 + al) * (1.01 if d is None else 1.01 + d)  # mean |xhat| <= 1, the square being normalised
    dc1.addcmul_(a2, ux).add_(xa_mean * eta + 3 * eta)
    c1, k2 = bwd.c1.abs(), (1 + al) ** 2
    c1a = c1 * k2
    dc2: Tensor | float = 0.0
    c2: Tensor | float = 0.0
    if bwd.c2 is not None:
        c2 = bwd.c2.abs()
        dc2 = a2 * rules.gam(h + count["c2"]) + 3 * eta
        if d is not None:
            c1a = c1a + k2 * d * c2
    k_el = count["dx_elementwise"] * u
    per_row = dc2 * (1 + 8 * u) + k_el * c2 + c1a * ux + 5 * eta
    edx = (xa * (dc1 * (1 + 8 * u) + k_el * c1a)).add_(wd_abs * k_el).add_(per_row).mul_(ra).add_(eta)
    if given is not EXACT:
        per_xh = (k2 - 1) * c1
        edx += bwd.dx.abs() * al
        if d is not None:
            per_xh = per_xh + k2 * d * c2
            edx += ra * k2 * d * (c1 + d * c2)
        edx += xh_abs * (ra * per_xh)
    if rules.model.bwd_form == "raw":
        edx += _raw_dx(rules, rows, wd_abs, a2, ra, c1a)
    if doubt is not None:
        edx += doubt.dx
    dy_abs = dy.abs()
    sums = _gradient_sums(rules, rows, dy_abs, xh_abs, xa, ux, given)
    stored = store(rules, bwd.dx.abs() + edx, fmt, "dx")
    upper = edx + stored if rules.safety == 1.0 else (edx + stored) * rules.safety

    def terms() -> Mapping[str, Tensor]:
        ones = torch.ones_like(edx)
        c1_term, c2_term = ra * dc1 * xa, ra * dc2 * ones
        ops = (wd_abs + xa * c1a + c2).mul_(k_el).mul_(ra)
        rest = (edx - c1_term - c2_term - ops - eta).clamp_(min=0)
        named = {"store": stored * ones, "mean(xhat dy g)": c1_term, "mean(dy g)": c2_term, "ops": ops}
        if doubt is not None:
            named[rules.doubt] = doubt.dx
            rest = (rest - doubt.dx).clamp_(min=0)
        return {**named, "statistics": rest, "underflow": eta * ones}

    return Bound(upper, None, terms), sums


def _raw_dx(rules: Rules, rows: Rows, wd_abs: Tensor, a2: Tensor, ra: Tensor, c1a: Tensor) -> Tensor:
    """What dx = rstd wd + b x + c, b = (mean sum(dy g) - sum(dy g x)) rstd^3 / N, may lose by cancellation (m, N)."""
    h, ra2 = rules.chain(rows.x.shape[1]), ra * ra
    s = (wd_abs * rows.x_abs).mean(1, keepdim=True)
    offset = rows.x_abs
    if rows.mean is not None:
        m = rows.mean.abs()
        s.addcmul_(m, a2)
        offset = offset + m
    lost = ra2.mul(s).mul_(rules.gam(h + 8))  # times |x - mean| ra = |xhat| (1 + al), and 8 u |mean| ra more
    per_offset = lost * ra * (8 * rules.u) + ra2 * c1a * (4 * rules.u)
    return (rows.xh_abs * (lost * (ra / rows.rstd))).addcmul_(offset, per_offset)


def _gradient_sums(
    rules: Rules, rows: Rows, dy_abs: Tensor, xh_abs: Tensor, xa: Tensor, ux: Tensor, given: StatisticsBound
) -> GradientSums:
    shift = ux  # what every term may be off by
    if given is not EXACT:
        shift = (xh_abs * given.al).add_(ux if given.d is None else (1 + given.al) * given.d + ux)
    if rules.model.bwd_form == "raw":
        offset = rows.x_abs if rows.mean is None else rows.x_abs + rows.mean.abs()
        shift = shift + offset * ((1 + given.al) * rows.rstd * (4 * rules.u))
    return GradientSums((dy_abs * xa).sum(0), (dy_abs * shift).sum(0), dy_abs.sum(0))


def output_dw(rules: Rules, m: int, dw: Tensor, sums: GradientSums, doubt: Tensor | None, fmt: Format) -> Bound:
    """Bound of dw (N,), summed over all ``m`` rows; partial sums must stay in the accumulation format."""
    summation = sums.dy_xhat * rules.gam(rules.chain(m) + rules.count["dw"])
    e = (summation + sums.dy_shift).add_(2 * m * rules.eta)
    if doubt is not None:
        e += doubt
    stored = store(rules, dw.abs() + e, fmt, "dw")

    def terms() -> Mapping[str, Tensor]:
        ones = torch.ones_like(e)
        bits = ones * 0 if doubt is None else doubt
        named = {"store": stored * ones, "sum over M": summation, rules.doubt: bits}
        return {**named, "statistics": sums.dy_shift, "underflow": 2 * m * rules.eta * ones}

    return Bound((e + stored).mul_(rules.safety).clamp_(min=NO_ROOM), None, terms)


def output_db(rules: Rules, m: int, db: Tensor, sums: GradientSums, doubt: Tensor | None, fmt: Format) -> Bound:
    """Bound of db (N,), summed over all ``m`` rows."""
    summation = sums.dy_abs * rules.gam(rules.chain(m) + rules.count["db"])
    e = summation + 2 * m * rules.eta
    if doubt is not None:
        e += doubt
    stored = store(rules, db.abs() + e, fmt, "db")

    def terms() -> Mapping[str, Tensor]:
        ones = torch.ones_like(e)
        bits = ones * 0 if doubt is None else doubt
        named = {"store": stored * ones, "sum over M": summation, rules.doubt: bits}
        return {**named, "underflow": 2 * m * rules.eta * ones}

    return Bound((e + stored).mul_(rules.safety).clamp_(min=NO_ROOM), None, terms)
