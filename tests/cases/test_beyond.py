"""Cases beside the core: which sizes a cell on a GPU is asked for, and by which profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from normcheck.cases.beyond import EXTREME, extreme, huge, large, many, model_sizes
from normcheck.cases.case import MAX_ELEMENTS, Case, unusual
from normcheck.cases.case_line import parse
from normcheck.cases.claims import Claims, claims_of
from normcheck.cases.data_kinds import NOT_FINITE
from normcheck.cases.depth import Depth
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.check import check
from normcheck.impls.adapt import adapt
from normcheck.impls.implementation import Implementation


def claims(op: str = "layernorm", dtype: str = "fp16", **fields: object) -> Claims:
    implementation = Implementation(name="mine", op=op, forward=lambda *_, **__: torch.zeros(0), **fields)
    return claims_of(OPS[op], implementation, dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_huge_case_is_contiguous_and_its_last_row_begins_at_the_power(op: str, dtype: str) -> None:
    cases = tuple(huge(claims(op, dtype, strided=False), (31, 32)))
    begins, beyond = [(case.M - 1) * case.N for case in cases], 1.05 if OPS[op].rotary else 1.0  # of heads N is larger
    assert all(power <= first <= power * beyond for first, power in zip(begins, (2**31, 2**32), strict=True))
    for case in cases:
        assert (case.layout, case.gap, case.huge) == ("contiguous", 0, True)
        assert parse(str(case)) == case
        assert case.M * case.N < MAX_ELEMENTS


def test_no_huge_case() -> None:
    assert not [*huge(claims(), ())]
    assert not [*huge(claims(dtype="fp32"), (31,))]
    assert not [*huge(claims(shapes=((3, 7),)), (31,))]


def test_extreme_sizes_are_at_the_ends() -> None:
    cases = tuple(extreme(claims(), 0))
    assert [(case.M, case.N) for case in cases] == [*EXTREME]
    assert {65535, 65536, 65537, 2**20 + 1} <= {case.M for case in cases}
    assert max(case.N for case in cases) == 2**20
    assert not any(case.huge for case in cases)
    assert not [*extreme(claims(shapes=((3, 7),)), 0)]
    assert all(case.N != 72 for case in extreme(claims().without("N", 72), 0))


@pytest.mark.slow
def test_rows_past_the_65535_that_a_grid_has_are_asked_for_on_a_cpu() -> None:
    def right(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        wide = x.float()
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
        return (y if bias is None else y + bias.float()).to(x.dtype)

    def cut(*given: Any) -> torch.Tensor:
        y = right(*given)
        return torch.cat((y[:65535], torch.zeros_like(y[65535:])))

    def lost(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        """Right, but dw and db are without the last rows."""
        behind = right(x[65535:], weight.detach(), None if bias is None else bias.detach(), eps)
        return torch.cat((right(x[:65535], weight, bias, eps), behind))

    case = next(case for case in large(claims("rmsnorm"), "cpu", 1, 0) if case.M > 65535)
    for function, wrong in ((right, False), (cut, True), (lost, True)):
        own = Implementation(name="mine", op="rmsnorm", forward=adapt(function)[0])
        assert check(own, OPS["rmsnorm"], case, "cpu", Ask(Depth.OFF, fused=True)).failed == wrong


def test_a_row_of_more_columns_than_a_block_has_may_be_refused() -> None:
    def of(columns: int) -> Case:
        return Case(op="rmsnorm", dtype="fp16", M=2, N=columns)

    assert unusual(of(65536)) == ()
    assert unusual(of(65537)) == ("N=65537",)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_of_a_modulated_op_a_sample_has_tens_of_thousands_of_rows(device: str) -> None:
    """A prime number of rows was as many samples: sums over at most 8192 rows of a sample passed."""
    asked = list(large(claims("layernorm_modulate"), device, 1, 0))
    assert max(case.M // case.batch for case in asked) > 40000
    samples = {case.batch for case in asked if case.M > 16384}
    assert max(samples) > 65535 and max(samples - {max(samples)}) < 40


@pytest.mark.parametrize("op", ["rmsnorm_gated", "fused_add_rmsnorm", "qk_norm_rope"])
def test_what_is_large_is_finite(op: str) -> None:
    """A large case with infinite gates took 20 of a cell's 28 seconds: what is not finite is judged by itself."""
    own = claims(op, "bf16")
    asked = [*large(own, "cpu", 8, 0), *many(own, 0, own.layouts[0]), *model_sizes(own, 0)]
    kinds = {value for case in asked for value in (case.rows, case.dy, case.gate, case.residual, case.angles)}
    assert len(asked) > 40 and kinds.isdisjoint(NOT_FINITE)
