"""Modulated norms of a gated sum: which op a function is of, and which gradients a backward owes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normcheck.audit.mutants.modulated_add import GatedAdding
from normcheck.audit.mutants.modulated_kernel import Modulated
from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.ask import UNPROBED
from normcheck.checks.check import Result, check
from normcheck.impls.adapt import adapt
from normcheck.impls.discovery import validated, wrapped
from normcheck.impls.implementation import Implementation

OP = "fused_add_rmsnorm_modulate"


def result_of(implementation: Implementation) -> Result:
    case = Case(op=OP, dtype="bf16", M=20, N=129, seed=2, bias=False, samples="few", weights="probe")
    return check(implementation, OPS[OP], case, "cpu", UNPROBED)


def both(
    x: Tensor, residual: Tensor, residual_gate: Tensor, scale: Tensor, shift: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    wide = (residual.float() + residual_gate.float()[:, None] * x.float()).to(x.dtype)
    once = wide.float()  # cast twice, its gradient would be rounded twice before it is summed
    normed = once * torch.rsqrt(once.square().mean(-1, keepdim=True) + eps)
    return (normed * (1 + scale.float()[:, None]) + shift.float()[:, None]).to(x.dtype), wide


def test_a_function_that_takes_a_gate_of_its_residual_is_right() -> None:
    result = result_of(wrapped(adapt(both), OP, "mine", ""))
    assert not result.failed, result
    assert {c.output for c in result.checked} == {
        *("y", "residual_out", "dx", "dresidual", "dresidual_gate", "dscale", "dshift")
    }
    assert result.conventions == (
        (("sum", "rounded"), ("round_gated", "none"), ("rounding", "once"), ("round_factor", "none")),
    )


def test_a_modulated_norm_that_must_be_given_a_gate_is_the_op_that_adds() -> None:
    made = GatedAdding().implementation("mine", OP)
    assert validated(replace(made, op="rmsnorm_modulate"), "f.py").op == OP

    plain = Modulated().implementation("plain", "rmsnorm_modulate")
    assert validated(plain, "f.py").op == "rmsnorm_modulate"


def test_a_backward_may_leave_out_the_gradient_of_the_gate_alone() -> None:
    made = GatedAdding().implementation("mine", OP)

    def without(name: str) -> Result:
        def backward(*args: Any, **options: Any) -> dict[str, Tensor]:
            assert made.backward is not None
            return {key: t for key, t in made.backward(*args, **options).items() if key != name}

        return result_of(replace(made, backward=backward))

    left = without("dresidual_gate")
    assert not left.failed and left.not_returned == ("dresidual_gate",)
    assert without("dresidual").failed
