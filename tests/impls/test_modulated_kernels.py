"""Our kernels of modulated norms are within their bounds in every layout and any samples; functions of users."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.cases.case import SAMPLES, Case
from normcheck.cases.inputs import make
from normcheck.cases.ops import MODULATED, MODULATED_ADD, OPS
from normcheck.checks.ask import Ask
from normcheck.checks.check import Result, check
from normcheck.errors import UsageError
from normcheck.impls import torch_modulated
from normcheck.impls.adapt import adapt, require_named
from normcheck.impls.discovery import wrapped
from normcheck.impls.implementation import Implementation
from normcheck.impls.triton import IMPLEMENTATIONS as TRITON
from normcheck.runner.device import device_for
from tests.inner_loop import parametrize

DEVICE = device_for("auto")
NAMES = tuple(op.name for op in (*MODULATED, *MODULATED_ADD))
OURS = {own.op: own for own in TRITON if own.op in NAMES}
LAYOUTS = ("contiguous", "misaligned", "x_strided", "dy_strided", "strided", "dy_expanded")


def residual_of(op: str) -> dict[str, Any]:
    """The field of a case with a residual in fp32, if the op adds one."""
    return {"residual_dtype": "fp32"} if OPS[op].adds_residual else {}


def result_of(implementation: Implementation, **fields: Any) -> Result:
    own = {"M": 20, "N": 129, "dtype": "bf16", "seed": 2, "bias": False, "samples": "few", "weights": "probe", **fields}
    op = implementation.op
    return check(implementation, OPS[op], Case(**{"op": op, **own}), DEVICE, Ask())  # type: ignore[arg-type]


@parametrize("layout", LAYOUTS, inner=1)
@pytest.mark.parametrize("op", NAMES)
def test_our_kernels_are_right_in_every_layout(op: str, layout: str) -> None:
    own = residual_of(op) if layout == "x_strided" else {}
    result = result_of(OURS[op], layout=layout, gap=8 if "strided" in layout else 0, weight_dtype="fp32", **own)
    assert not result.failed, result
    also = {"mean"} if OPS[op].centered else set()
    also |= {"residual_out", "dresidual", "dresidual_gate"} if OPS[op].adds_residual else set()
    assert {c.output for c in result.checked} == {"y", "rstd", "dx", "dscale", "dshift"} | also


@parametrize("samples", SAMPLES, inner=1)
@pytest.mark.parametrize("rows", [0, 1, 65, 97])
@pytest.mark.parametrize("op", NAMES[::2])
def test_our_kernels_are_right_for_any_samples(op: str, rows: int, samples: str) -> None:
    assert not result_of(OURS[op], M=rows, N=24, samples=samples).failed


@pytest.mark.parametrize("op", NAMES)
def test_rows_wider_than_a_block_and_samples_of_few_rows_are_as_right(op: str) -> None:
    from normcheck.impls.kernels import modulated

    case = Case(op=op, dtype="fp32", M=66, N=50, bias=False, seed=1, samples="few")
    inputs, centered = make(case, OPS[op], DEVICE), OPS[op].centered
    assert inputs.scale is not None and inputs.shift is not None
    x, dy = inputs.x.flatten(0, 1), inputs.dy.flatten(0, 1)
    found, of_sum, of_gradients = [], {}, {}
    if inputs.residual is not None and inputs.dresidual_out is not None:
        of_sum = {"residual": inputs.residual.flatten(0, 1), "gate": inputs.residual_gate}
        of_gradients = {"source": x, "gate": inputs.residual_gate, "added": inputs.dresidual_out.flatten(0, 1)}
    for block, few in ((64, 1), (16, 1), (64, 64), (16, 64)):
        given = {"eps": case.eps, "centered": centered, "max_block": block, **of_sum}
        saved = modulated.forward(x, inputs.scale, inputs.shift, **given)  # type: ignore[arg-type]
        own = {"rstd": saved["rstd"], "mean": saved.get("mean"), "max_block": block, "few_rows": few, **of_gradients}
        rest = modulated.backward(dy, saved.get("residual_out", x), inputs.scale, **own)  # type: ignore[arg-type]
        found.append({**saved, **rest})
    for output, right in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[output], right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("made", torch_modulated.IMPLEMENTATIONS, ids=lambda made: f"{made.op}-{made.name}")
def test_those_of_torch_are_right(made: Implementation) -> None:
    strided = {"weight_dtype": "fp32", "layout": "strided", "gap": 3, **residual_of(made.op)}
    for fields in ({}, {"M": 0}, strided):
        result = result_of(made, **fields)
        assert not (result.failed or result.refused), result


def normed(x: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def once(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    return (normed(x, eps) * (1 + scale[:, None].float()) + shift[:, None].float()).to(x.dtype)


def each(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    return normed(x, eps).to(x.dtype) * (1 + scale[:, None]) + shift[:, None]


def wide_factor(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    factor = 1 + scale[:, None].float()
    return (normed(x, eps).to(x.dtype) * factor).to(x.dtype) + shift[:, None]


def compiled(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    return (normed(x, eps).to(x.dtype).float() * (1 + scale[:, None].float()) + shift[:, None].float()).to(x.dtype)


def addcmul(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    return torch.addcmul(shift[:, None], normed(x, eps).to(x.dtype), 1 + scale[:, None])


def rounded_factor(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    return (normed(x, eps) * (1 + scale[:, None]).float() + shift[:, None].float()).to(x.dtype)


def wrong(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    return once(x, scale[:1].expand_as(scale), shift, eps)


def of(function: Any) -> Implementation:
    return wrapped(adapt(function), "rmsnorm_modulate", "mine", "")


@pytest.mark.parametrize(
    ("function", "rounding", "round_factor"),
    [
        (once, "once", "none"),
        (each, "each", "io"),
        (wide_factor, "each", "none"),
        (rounded_factor, "once", "io"),
        (compiled, "normed", "none"),
        (addcmul, "normed", "io"),
    ],
)
def test_the_convention_of_a_function_is_found(function: Any, rounding: str, round_factor: str) -> None:
    result = result_of(of(function), weights="normal")
    assert not result.failed, result
    assert result.conventions == ((("rounding", rounding), ("round_factor", round_factor)),)


def test_none_that_fits_is_a_finding() -> None:
    result = result_of(of(wrong), weights="normal")
    assert result.failed and result.conventions == ()


def test_what_a_function_takes_by_name_says_whose_op_it_is() -> None:
    def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return x

    assert adapt(once).named == ("scale", "shift")
    with pytest.raises(UsageError, match=r"parameters named scale and shift: plain\(x, scale, shift, eps\) -> y"):
        require_named(adapt(plain), plain, OPS["rmsnorm_modulate"], "f.py:plain")
    with pytest.raises(UsageError, match=r"no parameter named scale or shift, or --op layernorm_modulate\|rmsnorm_mod"):
        require_named(adapt(once), once, OPS["rmsnorm"], "f.py:once")


def test_scale_and_shift_are_packed_or_sixths_of_one_projection() -> None:
    case = Case(op=NAMES[0], dtype="fp16", M=6, N=8, bias=False, samples="few")
    strides: dict[str, set[tuple[int, int, int]]] = {}
    for seed in range(6):
        for layout, gap in (("contiguous", 0), ("x_strided", 4), ("dy_strided", 4), ("strided", 4)):
            made = make(replace(case, layout=layout, gap=gap, seed=seed), OPS[case.op], "cpu")
            assert made.scale is not None and made.shift is not None
            strides.setdefault(layout, set()).add((made.x.stride(1), made.scale.stride(0), made.shift.stride(0)))
    assert strides == {
        "contiguous": {(8, 8, 8)},
        "x_strided": {(12, 8, 8), (8, 48, 8), (8, 8, 48)},
        "dy_strided": {(8, 8, 8)},
        "strided": {(12, 48, 48), (12, 56, 64)},
    }
