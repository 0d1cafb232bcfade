"""NaN and infinity: the contract of each op, on kernels that keep it in several ways and on some that do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from normcheck import Implementation, discovery
from normcheck.case import Case
from normcheck.check import Result, check
from normcheck.mutants.correct import CONTROLS
from normcheck.mutants.kernel import CLEAN, Kernel
from normcheck.special import SPECIAL, is_special

OPS = discovery.ops()
KINDS = [{"rows": "nan"}, {"rows": "inf"}, {"dy": "nan"}, {"dy": "inf"}, {"rows": "inf", "dy": "nan"}]


def case_of(op: str, **fields: str) -> Case:
    options = (("lower_clip", -0.5), ("upper_clip", 1.0)) if OPS[op].clamped else ()
    return Case(**{"op": op, "dtype": "fp16", "M": 5, "N": 12, "options": options, **fields})  # type: ignore[arg-type]


def result_of(implementation: Implementation, **fields: str) -> Result:
    return check(implementation, OPS[implementation.op], case_of(implementation.op, **fields), "cpu")


def wrong(result: Result) -> dict[str, str]:
    return {c.output: c.check for c in result.wrong}


@pytest.mark.parametrize("fields", KINDS, ids=str)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("control", CONTROLS, ids=lambda i: f"{i.name}-{i.op}")
def test_correct_kernels_keep_the_contract(control: Implementation, dtype: str, fields: dict[str, str]) -> None:
    result = result_of(control, dtype=dtype, **fields)
    assert not result.failed
    assert {c.output for c in result.checked if c.check == SPECIAL} >= {"y", "dx", "dw"}


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


def test_an_infinity_leaves_the_rest_of_an_rms_row_alone() -> None:
    kernel = Kernel(preact=lambda c: c.plus_b(c.xh * c.g) + 0 * c.x.sum(1, keepdim=True))
    assert wrong(result_of(kernel.implementation("mine", "rmsnorm"), rows="inf")) == {"y": SPECIAL}
    assert not result_of(CLEAN.implementation("mine", "rmsnorm"), rows="inf").failed


def test_where_the_definition_leaves_a_choice_all_are_right() -> None:
    """A clamp by comparisons turns a NaN into a limit, and its bit may be either."""

    def clip(c: object) -> Tensor:
        z = c.z  # type: ignore[attr-defined]
        return torch.where(z > c.lo, torch.where(z < c.hi, z, c.hi), c.lo)  # type: ignore[attr-defined]

    for mask in (lambda c: (c.z > c.lo) & (c.z < c.hi), lambda c: ~((c.z <= c.lo) | (c.z >= c.hi))):
        for masked in (lambda c: torch.where(c.bits, c.dy, 0), lambda c: c.dy * c.bits):
            kernel = Kernel(clip=clip, mask=mask, masked=masked)
            for fields in KINDS:
                result = result_of(kernel.implementation("mine", "layernorm_relu_bitmask"), **fields)
                assert not result.failed, (fields, wrong(result))


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_the_largest_numbers_disturb_no_other_row(dtype: str) -> None:
    assert not result_of(CLEAN.implementation("mine", "layernorm"), rows="largest", dtype=dtype).failed
    leak = of_y(lambda t: t + 1e-30 * t.abs().sum())
    assert "y" in wrong(result_of(leak, rows="nan", dtype=dtype))


def test_a_saved_rstd_may_be_finite_where_y_is_not() -> None:
    """As after max(variance, 0), which gives 0 for NaN on a GPU."""
    kernel = Kernel(rstd_out=lambda c: c.r.nan_to_num(316.0).float())
    assert not result_of(kernel.implementation("clamped", "layernorm"), rows="nan").failed


def test_an_infinity_that_spoils_its_row_must_be_declared() -> None:
    """torch's rms_norm does so on a GPU."""
    its_row = Kernel(rstd=lambda c: torch.where(c.x.isinf().any(1, keepdim=True), torch.nan, CLEAN.rstd(c)))
    all_rows = Kernel(rstd=lambda c: torch.where(c.x.isinf().any(), torch.nan, CLEAN.rstd(c)))
    assert result_of(its_row.implementation("undeclared", "rmsnorm"), rows="inf").failed
    for kernel, fails in ((its_row, False), (all_rows, True)):
        declared = kernel.implementation("declared", "rmsnorm", model={"special": "row"})
        assert result_of(declared, rows="inf").failed == fails
