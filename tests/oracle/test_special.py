"""NaN and infinity: the contract of each op, on kernels that keep it in several ways and on some that do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck import Implementation
from normcheck.audit import catalogue
from normcheck.audit.mutants.correct import CONTROLS
from normcheck.audit.mutants.kernel import CLEAN, Kernel
from normcheck.cases.case import Case
from normcheck.cases.case_line import parse
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks.ask import FULLY, UNPROBED, Ask
from normcheck.checks.check import Result, check
from normcheck.impls.adapt import adapt
from normcheck.impls.discovery import wrapped
from normcheck.oracle.judge import END_TO_END
from normcheck.oracle.special import LEAVES_ROW, SPECIAL, SPOILS_ROW, is_special, judge_special
from normcheck.oracle.tolerances import table
from tests.inner_loop import parametrize
from tests.some import some

KINDS = [{"rows": "nan"}, {"rows": "inf"}, {"dy": "nan"}, {"dy": "inf"}, {"rows": "inf", "dy": "nan"}]
MAKES = list(dict.fromkeys(control.name for control in CONTROLS))


def case_of(op: str, **fields: Any) -> Case:
    options = (("lower_clip", -0.5), ("upper_clip", 1.0)) if OPS[op].clamped else ()
    return Case(**{"op": op, "dtype": "fp16", "M": 5, "N": 12, "options": options, **fields})


def result_of(implementation: Implementation, ask: Ask = FULLY, **fields: Any) -> Result:
    return check(implementation, OPS[implementation.op], case_of(implementation.op, **fields), "cpu", ask)


def wrong(result: Result) -> dict[str, str]:
    return {c.output: c.check for c in result.wrong}


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS, ids=[f"{control.name}-{control.op}" for control in CONTROLS])
def test_correct_kernels_keep_the_contract(control: Implementation) -> None:
    """Of the kinds every second one, by turns, so that each op and each make has all; and so do the dtypes. Each make
    is probed at the first: what a probe compares is NaN there, too.
    """
    first = MAKES.index(control.name) + list(OPS).index(control.op)
    for turn, fields in enumerate(some(KINDS[first % 2 :: 2])):
        ask = FULLY if turn == 0 else UNPROBED
        result = result_of(control, ask, dtype=("fp16", "fp32")[(first // 2 + turn) % 2], **fields)
        assert not result.failed, (result.case, wrong(result))
        assert {c.output for c in result.checked if c.check == SPECIAL} >= {"y", "dx", "dw"}, result.case


def test_only_special_cases_are_special() -> None:
    assert is_special(case_of("layernorm", rows="nan"))
    assert is_special(case_of("layernorm", dy="inf"))
    assert not is_special(case_of("layernorm", rows="largest"))
    assert not is_special(replace(case_of("layernorm", rows="nan"), M=0))


def of_y(change: object) -> Implementation:
    def store(c: object, t: Tensor, dtype: torch.dtype, name: str) -> Tensor:
        return change(t).to(dtype) if name == "y" else t.to(dtype)  # type: ignore[operator]

    return Kernel(store=store).implementation("mine", "layernorm")


def test_a_nan_that_is_swallowed() -> None:
    assert wrong(result_of(of_y(torch.nan_to_num), rows="nan")) == {"y": SPECIAL}


def test_a_nan_that_reaches_other_rows() -> None:
    assert "y" in wrong(result_of(of_y(lambda t: t + 0 * t.sum()), rows="nan"))


def test_a_nan_that_is_lost_in_dw() -> None:
    kernel = Kernel(dw=lambda c: torch.nansum(c.dy * c.xh, 0))
    assert wrong(result_of(kernel.implementation("mine", "layernorm"), rows="nan")) == {"dw": SPECIAL}


def test_a_nan_in_dy_that_reaches_db_elsewhere() -> None:
    kernel = Kernel(db=lambda c: c.sum_m(c.dy) + 0 * c.dy.sum())
    assert wrong(result_of(kernel.implementation("mine", "layernorm"), dy="nan"))["db"] == SPECIAL


def test_an_infinity_leaves_the_rest_of_an_rms_row_alone_where_that_is_declared() -> None:
    kernel = Kernel(preact=lambda c: c.plus_b(c.xh * c.g) + 0 * c.x.sum(1, keepdim=True))
    exact = {"model": {"special": "exact"}}
    assert wrong(result_of(kernel.implementation("mine", "rmsnorm", **exact), rows="inf")) == {"y": SPECIAL}
    assert not result_of(CLEAN.implementation("mine", "rmsnorm", **exact), rows="inf").failed


@pytest.mark.slow
def test_where_the_definition_leaves_a_choice_all_are_right() -> None:
    """A clamp by comparisons turns a NaN into a limit; a cotangent is masked by a product or by a choice."""

    def clip(c: object) -> Tensor:
        z = c.z  # type: ignore[attr-defined]
        return torch.where(z > c.lo, torch.where(z < c.hi, z, c.hi), c.lo)  # type: ignore[attr-defined]

    for change in ({"clip": clip}, {}):
        for masked in (lambda c: torch.where(c.bits, c.dy, 0), lambda c: c.dy * c.bits):
            kernel = Kernel(masked=masked, **change)
            for fields in KINDS:
                result = result_of(kernel.implementation("mine", "layernorm_relu_bitmask"), **fields)
                assert not result.failed, (fields, wrong(result))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("dy", ["nan", "inf"])
@parametrize("make", ["autograd_var", "autograd_squares", "autograd_functional", "fp64_inside"], inner=2)
def test_whether_a_nan_passes_by_a_bit_in_doubt_is_open(make: str, dy: str, dtype: str) -> None:
    """The squares of the largest numbers overflow in fp32, so z is whatever it is, and with it what passes to db."""
    (control,) = (c for c in CONTROLS if c.name == make and c.op == "layernorm_relu_bitmask")
    for seed in range(6):
        assert not result_of(control, rows="largest", dy=dy, dtype=dtype, M=1, N=13, seed=seed).failed


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        ("chan_strided_fma", {"M": 15, "N": 256, "rows": "constant", "dy": "inf", "seed": 66, "clips": (0.0, 1.0)}),
        ("autograd_functional", {"M": 2, "N": 8191, "rows": "subnormal", "dy": "nan", "clips": (0.0, 6.0)}),
    ],
)
def test_what_cancels_may_overflow_all_the_same(make: str, fields: dict[str, Any]) -> None:
    """With a tiny eps rstd is 10^6: dx of some thousands is the difference of numbers that fp16 does not hold."""
    (control,) = (c for c in CONTROLS if c.name == make and c.op == "layernorm_relu_bitmask")
    (lower, upper), rest = fields["clips"], {name: value for name, value in fields.items() if name != "clips"}
    options = (("lower_clip", lower), ("upper_clip", upper))
    assert not result_of(control, eps=1e-12, options=options, **rest).failed


def test_a_nan_that_is_lost_in_db_by_a_bit_of_no_doubt() -> None:
    kernel = Kernel(db=lambda c: torch.nansum(c.dy, 0))
    for clips in ((-1e4, 1e4), (-0.5, 1.0)):
        options = (("lower_clip", clips[0]), ("upper_clip", clips[1]))
        result = result_of(kernel.implementation("mine", "layernorm_relu_bitmask"), dy="nan", options=options)
        assert wrong(result) == {"db": SPECIAL}


UNORDERED = Kernel(mask=lambda c: ~((c.z <= c.lo) | (c.z >= c.hi)))
"""Bits that say "not outside the limits": 1 for NaN."""


@pytest.mark.parametrize("compare", ["either", "fp32", "rounded"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("rows", ["nan", "inf"])
def test_nan_lies_between_no_limits_so_its_bit_is_0(rows: str, dtype: str, compare: str) -> None:
    model = {"bitmask_compare": compare}
    kernel = UNORDERED.implementation("mine", "layernorm_relu_bitmask", model=model)
    result = result_of(kernel, rows=rows, dtype=dtype)
    assert wrong(result) == {"bitmask": END_TO_END}
    spoilt = ~torch.isfinite(make(result.case, OPS["layernorm_relu_bitmask"], "cpu").x).all(1)
    (bits,) = (c.comparison.wrong for c in result.wrong)
    assert bits is not None
    assert torch.equal(bits.all(1), spoilt)
    assert torch.equal(bits.any(1), spoilt)
    assert not result_of(kernel, dtype=dtype).failed


def test_the_gradient_of_a_nan_is_not_passed_on() -> None:
    """db hangs on it: dx and dw are NaN there, whatever is passed."""

    def unordered(
        x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, lower_clip: float, upper_clip: float
    ) -> Tensor:
        z = torch.nn.functional.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps)
        inside = ~((z <= lower_clip) | (z >= upper_clip))
        return torch.where(inside, z, z.detach().clamp(lower_clip, upper_clip)).to(x.dtype)

    mine = Implementation(name="mine", op="layernorm_relu_bitmask", forward=adapt(unordered)[0])
    assert "db" in wrong(result_of(mine, rows="nan"))
    assert not result_of(mine, rows="normal").failed


def test_a_nan_of_fp64_alone_has_no_bit() -> None:
    """0 * inf: a constant row with eps 0. In fp32 its variance need not be 0."""
    result = result_of(UNORDERED.implementation("mine", "layernorm_relu_bitmask"), rows="constant", eps=0.0)
    assert "bitmask" not in wrong(result)


@pytest.mark.parametrize("fault", ["P09", "P10"])
def test_a_nan_of_one_row_is_found_in_others_and_where_it_is_swallowed(fault: str) -> None:
    """Whatever is the default for an infinity."""
    for op in ("layernorm", "rmsnorm"):
        assert result_of(catalogue.mutants()[fault].make(op), rows="nan").failed


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_largest_numbers_disturb_no_other_row(dtype: str) -> None:
    assert not result_of(CLEAN.implementation("mine", "layernorm"), rows="largest", dtype=dtype).failed
    leak = of_y(lambda t: t + 1e-30 * t.abs().sum())
    assert "y" in wrong(result_of(leak, rows="nan", dtype=dtype))


def test_a_saved_rstd_may_be_finite_where_y_is_not() -> None:
    """As after max(variance, 0), which gives 0 for NaN on a GPU."""
    kernel = Kernel(rstd_out=lambda c: c.r.nan_to_num(316.0).float())
    assert not result_of(kernel.implementation("clamped", "layernorm"), rows="nan").failed


def test_an_infinity_may_spoil_its_row_and_no_other() -> None:
    """torch's rms_norm does so on a GPU, and nobody calls it a bug; exactness is for who declares it."""
    its_row = Kernel(rstd=lambda c: torch.where(c.x.isinf().any(1, keepdim=True), torch.nan, CLEAN.rstd(c)))
    all_rows = Kernel(rstd=lambda c: torch.where(c.x.isinf().any(), torch.nan, CLEAN.rstd(c)))
    for kernel, special, fails in ((its_row, "row", False), (its_row, "exact", True), (all_rows, "row", True)):
        mine = kernel.implementation("mine", "rmsnorm", model={"special": special})
        assert result_of(mine, rows="inf").failed == fails
    assert not result_of(its_row.implementation("undeclared", "rmsnorm"), rows="inf").failed


def test_an_infinity_that_is_swallowed_is_found() -> None:
    kernel = Kernel(load=lambda t, name: torch.where(t.isinf(), 0, t) if name == "x" else t)
    assert result_of(kernel.implementation("mine", "rmsnorm"), rows="inf").failed


def test_what_an_infinity_does_is_told() -> None:
    its_row = Kernel(rstd=lambda c: torch.where(c.x.isinf().any(1, keepdim=True), torch.nan, CLEAN.rstd(c)))
    for kernel, told in ((its_row, SPOILS_ROW), (CLEAN, LEAVES_ROW)):
        assert result_of(kernel.implementation("mine", "rmsnorm"), rows="inf").notes == (told,)
        assert result_of(kernel.implementation("mine", "rmsnorm"), rows="nan").notes == ()
        assert result_of(kernel.implementation("mine", "layernorm"), rows="inf").notes == ()  # fp64 leaves nothing


def test_constant_rows_with_a_tiny_eps_may_overflow() -> None:
    """Their gradients are thousands of times as uncertain as large; those of other rows are not."""
    op, model = OPS["layernorm"], table().model
    for rows, wrong_elements in (("constant", False), ("shifted", True)):
        case = case_of("layernorm", rows=rows, dy="nan", eps=1e-12)
        inputs = make(case, op, "cpu")
        whole = ~torch.isnan(inputs.dy).any(1, keepdim=True)
        dx = torch.where(whole, torch.inf, torch.nan).expand(case.M, case.N).half()
        (checked,) = judge_special(op, case, inputs, {"dx": dx}, model, None)
        assert (not checked.comparison.ratio <= 1) == wrong_elements


def _gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    h = (x.float() * torch.nn.functional.silu(gate.float())).to(x.dtype).float()
    xhat = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight.float() * xhat.float()).to(x.dtype)


def _added(
    x: Tensor, residual: Tensor, residual_gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    wide = torch.addcmul(residual.float(), residual_gate.float()[:, None], x.float())
    factor, normed = 1 + scale.float()[:, None], wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * factor + shift.float()[:, None]).to(x.dtype), wide.to(x.dtype)


def _rounded(
    x: Tensor, residual: Tensor, residual_gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    stored = torch.addcmul(residual.float(), residual_gate.float()[:, None], x.float()).to(x.dtype)
    return _added(torch.zeros_like(x), stored, torch.zeros_like(residual_gate), scale, shift, eps)[0], stored


def _each(
    x: Tensor, residual: Tensor, residual_gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    stored = (residual + residual_gate[:, None] * x).to(x.dtype)
    normed = torch.nn.functional.layer_norm(stored.float(), stored.shape[-1:], eps=eps).to(x.dtype)
    return normed * (1 + scale[:, None]) + shift[:, None], stored


@pytest.mark.parametrize(
    ("function", "line"),
    [  # a gradient that autograd stores before it is multiplied by 0, or a product of it, is infinite; so is a sum
        (_gated, "rmsnorm_gated fp16 M=10 N=2 eps=1e-12 rows=blend seed=167 weights=probe bias=none gate=inf "
                 "layout=dy_scalar weight_dtype=fp32"),
        (_rounded, "fused_add_rmsnorm_modulate fp16 M=8 N=2 eps=0.1 rows=inf seed=261 bias=none residual=large "
                   "samples=few weight_dtype=fp32"),
        (_each, "fused_add_layernorm_modulate fp16 M=5 N=342 eps=1e-12 rows=constant dy=correlated layout=strided "
                "seed=60 gap=3 bias=none residual=opposite samples=one"),
        (_added, "fused_add_rmsnorm_modulate fp16 M=2 N=3 eps=0.1 rows=shifted dy=inf seed=3995 bias=none "
                 "weights=probe samples=each"),
    ],
)  # fmt: skip
def test_what_is_infinite_on_the_way_and_conventions_are_not_confused(function: Any, line: str) -> None:
    case = parse(line)
    own = wrapped(adapt(function, op=OPS[case.op]), case.op, "mine", "")
    result = check(own, OPS[case.op], case, "cpu")
    assert not result.failed, wrong(result)
