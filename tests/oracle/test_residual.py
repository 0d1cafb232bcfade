"""The residual sum: its one right rounding, the sums that may be normed, and gradients with its cotangent."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import chain
from typing import Any

import mpmath
import pytest
import torch
from torch import Tensor

from normcheck.cases.case import Case
from normcheck.cases.dtypes import DTYPES, FORMATS
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.ops import FUSED_ADD, OPS
from normcheck.oracle import backward_bounds, casting, reference, residual, rounding
from normcheck.oracle.conventions import candidates, plainest
from normcheck.oracle.forward_bounds import EXACT as EXACT_STATISTICS
from normcheck.oracle.judge import judge_of
from normcheck.oracle.judging import judge_forward, judge_gradients
from normcheck.oracle.residual import EXACT, MIXED, ROUNDED, SUMS, sums_of
from normcheck.oracle.tolerances import Model, table

NAMES = [op.name for op in FUSED_ADD]


def case_of(op: str = "fused_add_rmsnorm", dtype: str = "bf16", **fields: Any) -> Case:
    own = {"M": 5, "N": 33, "seed": 3, "bias": OPS[op].takes_bias}
    return Case(**{"op": op, "dtype": dtype, **own, **fields})


def inputs_of(case: Case) -> Inputs:
    return make(case, OPS[case.op], "cpu")


def nearest(value: Fraction, dtype: torch.dtype) -> float:
    """``value`` rounded to nearest, ties to even, by comparing exact fractions: no arithmetic of torch or of a CPU."""
    near = torch.tensor(float(value), dtype=dtype)
    around = [near, torch.nextafter(near, near - 1e30), torch.nextafter(near, near + 1e30)]
    width = near.element_size() * 8
    bits = {16: torch.int16, 32: torch.int32}[width]

    def order(t: Tensor) -> tuple[Fraction, int]:
        return abs(Fraction(t.item()) - value), int(t.view(bits)) & 1

    return float(min(around, key=order))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "large", "half", "small", "opposite"])
def test_the_stored_sum_is_the_exact_one_rounded_once(kind: str, dtype: str) -> None:
    case = case_of(dtype=dtype, residual=kind, rows="mixed")
    inputs = inputs_of(case)
    stored = sums_of(case, inputs, ROUNDED).stored
    assert inputs.residual is not None and stored.dtype == inputs.residual.dtype
    for x, r, s in zip(inputs.x.flatten(), inputs.residual.flatten(), stored.flatten(), strict=True):
        assert float(s) == nearest(Fraction(x.item()) + Fraction(r.item()), stored.dtype)


@pytest.mark.parametrize("how", SUMS)
def test_what_is_normed(how: str) -> None:
    case = case_of()
    sums = sums_of(case, inputs_of(case), how)
    assert sums.of_norm.dtype == (torch.float32 if how == EXACT else torch.bfloat16)
    assert sums.of_statistics.dtype == (torch.bfloat16 if how == ROUNDED else torch.float32)


def test_with_a_residual_of_fp32_all_sums_are_one() -> None:
    for case in (case_of(residual_dtype="fp32"), case_of(dtype="fp32")):
        each = [sums_of(case, inputs_of(case), how) for how in SUMS]
        assert all(
            torch.equal(s.of_norm, each[0].stored) and torch.equal(s.of_statistics, each[0].stored) for s in each
        )
        left = candidates(OPS[case.op], table().model)
        assert {plainest(each, case) for each in left} == {(("sum", ROUNDED),)}
    assert left == tuple((("sum", how),) for how in SUMS)
    assert {plainest(each, case_of()) for each in left} == set(left)
    assert candidates(OPS["fused_add_rmsnorm"], replace(table().model, sum=EXACT)) == ((),)
    assert candidates(OPS["rmsnorm"], table().model) == ((),)


@pytest.mark.parametrize("steps", [-1, 0, 1])
def test_a_stored_sum_one_step_off_is_wrong(steps: int) -> None:
    case = case_of()
    inputs = inputs_of(case)
    judged = judge_of(OPS[case.op], case, inputs, Model(sum=ROUNDED), {})
    stored = sums_of(case, inputs, ROUNDED).stored.clone()
    stored.view(torch.int16)[2, 7] += steps
    checked, _ = judge_forward(judged, {"y": torch.zeros_like(inputs.x), "residual_out": stored})
    (ratio,) = (c.comparison.ratio for c in checked if c.output == "residual_out")
    assert (ratio <= 1) == (steps == 0)


def test_a_subnormal_summand_may_be_read_as_zero() -> None:
    case = case_of(dtype="fp32", N=2, M=1)
    inputs = inputs_of(case)
    tiny, least = 1.5 * 2.0**-127, 2.0**-126
    assert inputs.residual is not None
    inputs.x[0, :] = torch.tensor([tiny, 1.0])
    inputs.residual[0, :] = torch.tensor([least, 2.0**-30])
    judged = judge_of(OPS[case.op], case, inputs, Model(), {})
    assert judged.sums is not None
    upper = residual.stored_bound(judged.rules, judged.sums, slice(0, 1)).upper[0].tolist()
    assert upper[0] == 2 * tiny and upper[1] == rounding.NO_ROOM
    strict = judge_of(OPS[case.op], case, inputs, Model(ftz=False), {})
    assert residual.stored_bound(strict.rules, judged.sums, slice(0, 1)).upper[0, 0] == rounding.NO_ROOM


def exact_gradient(case: Case, inputs: Inputs, stored: Tensor) -> list[list[mpmath.mpf]]:
    """The gradient of sum(dy y) + sum(dresidual_out s) by the sum, by central differences at 60 digits."""
    assert inputs.dresidual_out is not None
    step = mpmath.mpf("1e-20")
    weight, dy = ([mpmath.mpf(v) for v in t.flatten().tolist()] for t in (inputs.weight.double(), inputs.dy.double()))
    weight = [w + int(OPS[case.op].zero_centered) for w in weight]
    cotangent = [mpmath.mpf(v) for v in inputs.dresidual_out.double().flatten().tolist()]

    def objective(row: list[mpmath.mpf], first: int) -> mpmath.mpf:
        mean = sum(row) / len(row) if OPS[case.op].centered else mpmath.mpf(0)
        root = mpmath.sqrt(sum((v - mean) ** 2 for v in row) / len(row) + mpmath.mpf(case.eps))
        of_y = sum(dy[first + i] * (v - mean) / root * weight[i] for i, v in enumerate(row))
        return of_y + sum(cotangent[first + i] * v for i, v in enumerate(row))

    found = []
    for number, values in enumerate(stored.double().tolist()):
        row, slopes = [mpmath.mpf(v) for v in values], []
        for i in range(case.N):
            ends = [objective([*row[:i], row[i] + by, *row[i + 1 :]], number * case.N) for by in (step, -step)]
            slopes.append((ends[0] - ends[1]) / (2 * step))
        found.append(slopes)
    return found


@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_gradient_of_the_sum_is_the_definitions(op: str, dtype: str) -> None:
    case = case_of(op, dtype, M=2, N=6)
    inputs = inputs_of(case)
    seen: list[Any] = []
    judged = judge_of(OPS[op], case, inputs, Model(sum=ROUNDED), {}, watch=seen.append)
    _, saved = judge_forward(judged, {"y": torch.zeros_like(inputs.x)})
    judge_gradients(judged, {"dx": inputs.x, "dresidual": inputs.x}, saved, given=False)
    with mpmath.workdps(60):
        exact = exact_gradient(case, inputs, sums_of(case, inputs, ROUNDED).stored)
    for name in ("dx", "dresidual"):
        (held,) = (one for one in seen if one.output == name)
        pairs = zip(held.expected.flatten().tolist(), chain(*exact), strict=True)
        off = max(abs(float(mpmath.mpf(got) - right)) for got, right in pairs)
        assert off < 1e-6 * float(held.bound.upper.min())


def test_the_count_of_dresidual_widens_its_bound() -> None:
    rules = rounding.rules(OPS["fused_add_rmsnorm"], Model())
    more = replace(rules, count={**table().count, "dresidual": table().count["dresidual"] + 50})
    rows = reference.normalise(OPS["fused_add_rmsnorm"], torch.randn(2, 8, dtype=torch.float64), 1e-5)
    ones = torch.ones(2, 8, dtype=torch.float64)
    bwd = reference.backward(OPS["fused_add_rmsnorm"], rows, ones[0], ones)
    own = rounding.Bound(ones * 1e-7, None, dict)
    added = backward_bounds.Added(ones, FORMATS["fp32"], FORMATS["fp32"], None)
    narrow, wide = (backward_bounds.plus_residual(r, own, rows, bwd, added)[0].upper for r in (rules, more))
    assert bool((wide > narrow).all())


def by_autograd(case: Case, inputs: Inputs, uses: int) -> tuple[Tensor, Tensor]:
    """y and the gradient of an fp32 sum that autograd adds up of ``uses`` gradients and dresidual_out."""
    assert inputs.residual is not None and inputs.dresidual_out is not None
    x = inputs.x.clone().requires_grad_()
    s = x + inputs.residual
    centre = [s - s.mean(-1, keepdim=True) for _ in range(uses)]
    rstd = torch.rsqrt((centre[0] * centre[-1]).mean(-1, keepdim=True) + case.eps)
    y = centre[-1] * rstd * inputs.weight
    y = y if inputs.bias is None else y + inputs.bias
    (dx,) = torch.autograd.grad([y, s], [x], [inputs.dy, inputs.dresidual_out])
    return y.detach(), dx


@pytest.mark.parametrize("uses", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 2.0**20])
def test_autograd_adds_up_within_the_bound(uses: int, scale: float) -> None:
    """Also if dresidual_out is far larger than the norm's own gradients, so that each partial sum rounds."""
    for seed in range(20):
        case = case_of("fused_add_layernorm", "fp32", seed=seed, M=8, N=40)
        inputs = inputs_of(case)
        assert inputs.dresidual_out is not None
        inputs = replace(inputs, dresidual_out=inputs.dresidual_out * scale)
        y, dx = by_autograd(case, inputs, uses)
        judged = judge_of(OPS[case.op], case, inputs, replace(Model(), bwd_form="raw"), {})
        _, saved = judge_forward(judged, {"y": y})
        checked = judge_gradients(judged, {"dx": dx, "dresidual": dx}, saved, given=False)
        assert {c.output: c.comparison.ratio <= 1 for c in checked} == {"dx": True, "dresidual": True}


def rounded(t: Tensor) -> Tensor:
    return t.to(torch.bfloat16).double()


@pytest.mark.parametrize("in_io", [False, True])
@pytest.mark.parametrize("op", ["fused_add_rmsnorm", "fused_add_rmsnorm_llama", "fused_add_rmsnorm_gemma"])
def test_a_backward_may_have_the_stored_sum_only(op: str, in_io: bool) -> None:
    """Its forward norms the exact sum, as quack's; one that takes x alone is wrong. Llama may round what it sums."""
    facts = OPS[op]
    case = case_of(op, "bf16", M=16, N=64)
    inputs = inputs_of(case)
    model, assumed = Model(sum=EXACT), facts.rounds_xhat or not in_io
    sums = sums_of(case, inputs, EXACT)
    judged = judge_of(facts, case, inputs, model, {})
    others = {sum_: len(list(judge_of(facts, case, inputs, Model(sum=sum_), {}).of_backward())) for sum_ in SUMS}
    assert others == {ROUNDED: 0, EXACT: 2, MIXED: 1}
    _, saved = judge_forward(judged, {"y": torch.zeros_like(inputs.x)})
    dy, weight = inputs.dy.double(), inputs.weight.double() + facts.weight_offset
    by = rounded if in_io else lambda t: t

    def gradients(rows: Tensor) -> dict[str, Tensor]:
        xhat = rows.double() * saved.rstd.double()
        wd = by(dy * weight)
        own = (wd - xhat * (xhat * wd).mean(-1, keepdim=True)) * saved.rstd.double()
        of_dw = rounded(xhat) if facts.rounds_xhat else xhat
        dw = by(dy * of_dw).sum(0).to(torch.bfloat16)
        return {"dx": (own + sums.dresidual_out.double()).to(torch.bfloat16), "dw": dw}

    for rows, right in ((sums.of_norm, assumed), (sums.stored, assumed), (inputs.x, False)):
        checked = judge_gradients(judged, gradients(rows), saved, given=False)
        assert all(c.comparison.ratio <= 1 for c in checked) == right


@pytest.mark.parametrize("residual_dtype", ["same", "fp32"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_y_of_llama_is_the_definition_in_mpmath(dtype: str, residual_dtype: str) -> None:
    """The normed sum is rounded to the dtype of x, whatever the sum has, and then multiplied."""
    case = case_of("fused_add_rmsnorm_llama", dtype, M=4, residual_dtype=residual_dtype)
    inputs, io, seen = inputs_of(case), FORMATS[dtype], list[Any]()
    judged = judge_of(OPS[case.op], case, inputs, Model(sum=ROUNDED), {}, watch=seen.append)
    judge_forward(judged, {"y": torch.zeros_like(inputs.x)})
    (held,) = (one for one in seen if one.output == "y")
    weights = [mpmath.mpf(v) for v in inputs.weight.tolist()]
    stored = sums_of(case, inputs, ROUNDED).stored
    assert stored.dtype == (torch.float32 if residual_dtype == "fp32" else inputs.x.dtype)
    with mpmath.workdps(60):
        for i, row in enumerate(stored.tolist()):
            root = mpmath.sqrt(sum(mpmath.mpf(v) ** 2 for v in row) / case.N + mpmath.mpf(case.eps))
            for j, v in enumerate(map(mpmath.mpf, row)):
                with mpmath.workprec(io.p):  # mpmath rounds to nearest, ties to even
                    xhat = v / root
                assert float(held.expected[i, j]) == float(xhat * weights[j]), (i, j)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_backward_between_two_sums_is_within_the_bound_of_llama(dtype: str) -> None:
    """xhat at either end of what the sums may be, another one at each use, and every product rounded or not."""
    op, half = OPS["fused_add_rmsnorm_llama"], torch.float16 if dtype == "fp16" else torch.bfloat16
    for seed in range(12):
        case = case_of(op.name, dtype, M=1 + seed % 4, N=48, seed=seed, residual=("normal", "large")[seed % 2])
        inputs = inputs_of(case)
        judged = judge_of(op, case, inputs, Model(sum=MIXED), {})
        _, saved = judge_forward(judged, {"y": torch.zeros_like(inputs.x)})
        added = judged.added(0, case.M)
        assert added is not None and added.off is not None
        rstd, dy, g = judged.truth(slice(0, case.M)).rows.rstd, inputs.dy.double(), inputs.weight.double()
        sums = sums_of(case, inputs, MIXED)
        ends = [sums.stored.double() * rstd, sums.of_statistics.double() * rstd]
        for choice in range(8):
            first, second, third = (ends[choice >> bit & 1] for bit in range(3))
            by = (lambda t: t.to(half).double()) if seed % 3 else (lambda t: t)
            wd = by(dy * g)
            own = (wd - first * (second * wd).mean(-1, keepdim=True)) * rstd
            dx = (own + sums.dresidual_out.double()).to(half)
            dw = by(dy * third.to(half).double()).sum(0).to(half)
            checked = judge_gradients(judged, {"dx": dx, "dresidual": dx, "dw": dw}, saved, given=False)
            assert {c.output: c.comparison.ratio <= 1 for c in checked} == {"dx": True, "dresidual": True, "dw": True}
        far = ends[0] + 4 * (added.off + ends[0].abs() * 2.0 ** (1 - FORMATS[dtype].p))
        (checked_dw,) = judge_gradients(judged, {"dw": (dy * far).sum(0).to(half)}, saved, given=False)
        assert checked_dw.comparison.ratio > 1 or case.M > 1  # the errors of several rows may cancel


def test_the_worst_of_two_sums_and_a_casting_is_what_dx_is_allowed() -> None:
    """All numbers are positive, each xhat is larger by all of ``off``, and each dy * g by half an ulp."""
    op, io = OPS["fused_add_rmsnorm_llama"], FORMATS["bf16"]
    rules, n = rounding.rules(op, Model()), 64
    x = torch.rand(1, n, dtype=torch.float64) + 1
    rows, dy = reference.normalise(op, x, 1e-5), torch.full((1, n), 1.5, dtype=torch.float64)
    backward = reference.backward(op, rows, torch.ones(n, dtype=torch.float64), dy)
    off, half_ulp = rows.xh * 2.0**-6, 2.0**-8
    block = backward_bounds.Block(rows, backward, dy, EXACT_STATISTICS)
    cast = casting.cast(rules, rows, EXACT_STATISTICS, io, off)
    _, doubt = casting.gradients(rules, block, cast, io, 1, off)
    larger, wd = rows.xh + off, backward.wd + half_ulp
    worst = rows.rstd * (backward.wd - half_ulp - larger * (larger * wd).mean(1, keepdim=True)) - backward.dx
    ratio = worst.abs() / doubt.dx
    assert bool((ratio <= 1).all()) and float(ratio.min()) > 0.999


def test_the_residual_of_a_special_row_is_ordinary() -> None:
    """So that the largest number of fp16 does not overflow by the sum."""
    for kind in ("normal", "large"):
        case = case_of(dtype="fp16", rows="largest", residual=kind)
        assert bool(torch.isfinite(sums_of(case, inputs_of(case), ROUNDED).stored).all())
