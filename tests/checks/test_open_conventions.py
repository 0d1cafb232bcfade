"""What an op leaves open, and a run on other weights: it is judged by what the case fits, not by what is usual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import normcheck
from normcheck.checks import statefulness

CASE = (
    "rmsnorm_gated bf16 M=20 N=24 eps=1e-05 rows=blend dy=normal layout=contiguous seed=84 weight_dtype=fp32 bias=none"
)
SUM = "fused_add_rmsnorm bf16 M=20 N=24 eps=1e-05 rows=blend dy=normal layout=contiguous seed=84 bias=none"


def sigmoid(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    xhat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (xhat * weight.float() * torch.sigmoid(gate.float())).to(x.dtype)


def exact_sum(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.float() + residual.float()
    xhat = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (xhat * weight.float()).to(x.dtype), wide.to(x.dtype)


def keeping(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel``, which keeps the first weight that it finds at an address."""
    kept: dict[tuple[int, torch.Size], Tensor] = {}

    def of(weight: Tensor) -> Tensor:
        return kept.setdefault((weight.data_ptr(), weight.shape), weight.detach().clone()) + (weight - weight.detach())

    if kernel is sigmoid:
        return lambda x, gate, weight, eps: sigmoid(x, gate, of(weight), eps)
    return lambda x, residual, weight, eps: exact_sum(x, residual, of(weight), eps)


@pytest.mark.parametrize(
    ("kernel", "op", "case"), [(sigmoid, "rmsnorm_gated", CASE), (exact_sum, "fused_add_rmsnorm", SUM)]
)
def test_a_weight_that_is_kept_is_found_whatever_convention_the_kernel_has(
    kernel: Callable[..., Any], op: str, case: str
) -> None:
    (right,) = normcheck.verify(kernel, op=op, case=case, device="cpu", contexts=False)
    assert right.status == "pass"
    (wrong,) = normcheck.verify(keeping(kernel), op=op, case=case, device="cpu", contexts=False)
    assert wrong.failure is not None and wrong.failure.kind == "not_repeatable"
    assert "once the weights were changed in place" in wrong.failure.message


@pytest.mark.parametrize(
    ("kernel", "op", "case"), [(sigmoid, "rmsnorm_gated", CASE), (exact_sum, "fused_add_rmsnorm", SUM)]
)
def test_a_right_run_on_other_weights_is_right_whatever_convention_the_kernel_has(
    kernel: Callable[..., Any], op: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a kernel whose bits are others in each process, as one that tunes itself, would be accused."""
    seen = []

    def noted(subject: Any, values: Any, run: Any, bits: Any) -> str:
        seen.append(subject.wrong_values(values, run))
        return ""

    monkeypatch.setattr(statefulness, "wrong_by_earlier_calls", noted)
    normcheck.verify(kernel, op=op, case=case, device="cpu", contexts=False)
    assert seen and not any(seen)


def test_one_wrong_row_is_one_though_all_rows_misfit_another_convention_by_less() -> None:
    def l2norm(x: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().sum(-1, keepdim=True) + eps * x.shape[-1])
        return (wide * torch.cat([1.5 * scale[:1], scale[1:]])).to(x.dtype)

    case = "l2norm bf16 M=20 N=24 eps=0.5 rows=normal dy=normal layout=contiguous seed=2 weights=none bias=none"
    (wrong,) = normcheck.verify(l2norm, op="l2norm", case=case, device="cpu", contexts=False)
    assert wrong.failure is not None and "row 0" in str(wrong.failure.where), wrong.failure
