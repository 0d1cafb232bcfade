"""The contract's edges: fp32 weights, values beside tensors, limits that a kernel states, inputs that it overwrites.

Each is asked of kernels that people have published, written out in torch: none of them may be accused for what its own
source says, and a fault in the same place is still found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import normcheck
from normcheck import Implementation, discovery
from normcheck.attempt import run_case
from normcheck.call import poisoned_memory
from normcheck.case import Case
from normcheck.check import Result, check
from normcheck.checks import own_limit
from normcheck.choices import choices
from normcheck.errors import UsageError
from normcheck.explain import finding
from normcheck.golden.recorded import geometries
from normcheck.mutants.kernel import CLEAN
from normcheck.outputs import Problem
from normcheck.plan import PROFILES, Cell, Plan
from normcheck.result import Verdict
from normcheck.shared import buffer_of

OPS = discovery.ops()
HALF = ("fp16", "bf16")
DTYPES = (*HALF, "fp32")
RMSNORM = Case(op="rmsnorm", dtype="fp16", M=6, N=24, seed=2, bias=False)
LLAMA = replace(RMSNORM, op="rmsnorm_llama", weight_dtype="fp32")
LAYERNORM = Case(op="layernorm", dtype="fp16", M=6, N=24, seed=2)
LAYOUTS: tuple[dict[str, Any], ...] = (
    {},
    {"layout": "strided", "gap": 3},
    {"layout": "misaligned"},
    {"layout": "dy_expanded"},
    {"layout": "rank3"},
    {"M": 0},
    {"M": 1},
    {"rows": "nan"},
)


@pytest.fixture(autouse=True)
def _as_in_a_sweep() -> Iterator[None]:
    torch.set_num_threads(1)
    with poisoned_memory():
        yield


def result_of(implementation: Implementation, case: Case) -> Result:
    return check(implementation, OPS[implementation.op], case, "cpu")


def kinds(result: Result) -> list[tuple[str, str]]:
    return [(p.kind, p.output) for p in result.problems]


def cell_of(implementation: Implementation, dtype: str = "fp16") -> Cell:
    return Cell(OPS[implementation.op], implementation, dtype, "tests")


def plan_of(cell: Cell) -> Plan:
    return Plan((cell,), PROFILES["quick"], 0, "cpu", 60.0)


def advice_of(implementation: Implementation, case: Case) -> str:
    return finding(cell_of(implementation), result_of(implementation, case), "cpu").advice


def verdicts(implementation: Implementation, *dtypes: str) -> list[Verdict]:
    return list(normcheck.verify(implementation, dtypes=dtypes or DTYPES, max_examples=60, device="cpu"))


def accusations(implementation: Implementation, *dtypes: str) -> list[tuple[str, str, str]]:
    """What is said to be wrong: dtype, case, message."""
    failed = [v for v in verdicts(implementation, *dtypes) if v.status != "pass"]
    return [(v.dtype, v.failure.case if v.failure else v.detail, v.failure.message if v.failure else "") for v in failed]


# fp32 weights beside half x


def llama(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
    """LlamaRMSNorm.forward of Hugging Face transformers."""
    hidden_states = x.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + eps)
    return weight * hidden_states.to(x.dtype)


def llama_in_io(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
    return llama(x, weight, bias, eps=eps).to(x.dtype)


def one_dtype(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
    """torch.nn.LayerNorm as on a GPU: fp32 inside, and no weight but in the dtype of x."""
    if weight.dtype != x.dtype:
        raise RuntimeError(f"expected scalar type {x.dtype} but found {weight.dtype}")
    wide = x.float()
    centered = wide - wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    return (centered * rstd * weight.float() + bias.float()).to(x.dtype)


def rounding_the_weight(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype).float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


@pytest.mark.parametrize("forward", [llama, llama_in_io])
def test_llama_in_the_promoted_dtype_and_in_that_of_x(forward: Callable[..., Tensor]) -> None:
    assert accusations(Implementation(name="llama", op="rmsnorm_llama", forward=forward)) == []


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("weights", ["normal", "probe", "small"])
def test_a_promoted_y_has_no_store_to_hide_behind(dtype: str, weights: str) -> None:
    """y in fp32 is held to an fp32 rounding, and a kernel that rounds it to the dtype of x on the way is found."""
    case = replace(LLAMA, dtype=dtype, weights=weights)

    def twice(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
        return llama_in_io(x, weight, bias, eps=eps).float()

    right = result_of(Implementation(name="llama", op="rmsnorm_llama", forward=llama), case)
    (y,) = [c.comparison for c in right.checked if c.output == "y"]
    assert 0 < y.max_ulp <= 1  # of fp32
    wrong = result_of(Implementation(name="llama", op="rmsnorm_llama", forward=twice), case)
    assert [c.output for c in wrong.wrong] == ["y"]


def test_zeros_in_the_weight_of_a_promoted_y() -> None:
    def cheating(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
        return torch.where(weight == 0, 1e-30, llama(x, weight, bias, eps=eps))

    case = replace(LLAMA, weights="probe", N=300)
    assert not result_of(Implementation(name="llama", op="rmsnorm_llama", forward=llama), case).failed
    assert result_of(Implementation(name="llama", op="rmsnorm_llama", forward=cheating), case).failed


def test_only_a_rounded_xhat_promotes_y() -> None:
    def promoted(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()

    case = replace(RMSNORM, weight_dtype="fp32")
    result = result_of(Implementation(name="mine", op="rmsnorm", forward=promoted), case)
    assert kinds(result) == [("dtype", "y")]
    same = replace(LLAMA, weight_dtype="same")
    wide = Implementation(name="mine", op="rmsnorm_llama", forward=lambda *a, eps: llama(*a, eps=eps).float())
    assert kinds(result_of(wide, same)) == [("dtype", "y")]
    assert kinds(result_of(replace(wide, forward=lambda *a, eps: llama(*a, eps=eps).double()), LLAMA)) == [
        ("dtype", "y")
    ]


def test_a_promoted_y_of_a_backward_of_its_own() -> None:
    def backward(dy: Tensor, x: Tensor, weight: Tensor, bias: None, saved: Any, *, eps: float) -> dict[str, Tensor]:
        assert saved["y"].dtype == torch.float32
        leaves = [t.detach().requires_grad_() for t in (x, weight)]
        with torch.enable_grad():
            y = llama(*leaves, None, eps=eps)
        return dict(zip(("dx", "dw"), torch.autograd.grad(y, leaves, dy), strict=True))

    assert not result_of(
        Implementation(name="llama", op="rmsnorm_llama", forward=llama, backward=backward), LLAMA
    ).failed


def test_a_promoted_y_can_be_recorded() -> None:
    dtypes = [dtype for dtype, _ in geometries(OPS["rmsnorm_llama"], LLAMA)["y"]]
    assert dtypes == [torch.float16, torch.float32]
    assert len(geometries(OPS["rmsnorm"], replace(LLAMA, op="rmsnorm"))["y"]) == 1


def test_a_norm_of_one_dtype_refuses_and_is_not_accused() -> None:
    implementation = Implementation(name="one", op="layernorm", forward=one_dtype)
    found = verdicts(implementation)
    assert [v.failure for v in found] == [None] * 3
    for verdict in found[:2]:
        refused = [reason for reason in verdict.skipped if reason.startswith("weight_dtype=fp32: forward raised Runtime")]
        assert refused, verdict.skipped
        assert verdict.cases + sum(verdict.skipped.values()) == 60
    assert not any("weight_dtype" in reason for reason in found[2].skipped)


def test_layer_norm_of_torch_on_fp32_weights() -> None:
    """What torch itself does with them on a CPU is a refusal, or an answer; never a finding of kind exception."""

    def forward(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)

    implementation = Implementation(name="torch", op="layernorm", forward=forward)
    for dtype in HALF:
        result = result_of(implementation, replace(LAYERNORM, dtype=dtype, weight_dtype="fp32"))
        assert "exception" not in [kind for kind, _ in kinds(result)]


def test_other_exceptions_of_a_gpu_are_no_refusal() -> None:
    def forward(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: invalid argument")

    case = replace(LAYERNORM, weight_dtype="fp32")
    implementation = Implementation(name="mine", op="layernorm", forward=forward)
    assert kinds(result_of(implementation, case)) == [("exception", "")]


def test_everything_unusual_is_named_in_a_refusal() -> None:
    def forward(*_: Any, **__: Any) -> Tensor:
        raise ValueError("not so")

    case = replace(LAYERNORM, weight_dtype="fp32", layout="misaligned")
    implementation = Implementation(name="mine", op="layernorm", forward=forward)
    assert result_of(implementation, case).refused.startswith("layout=misaligned, weight_dtype=fp32: forward raised")
    assert replace(LAYERNORM, dtype="fp32", weight_dtype="fp32").unusual == ()


def test_a_rounded_weight_is_wrong_or_declared() -> None:
    implementation = Implementation(name="mine", op="rmsnorm", forward=rounding_the_weight)
    for dtype in HALF:
        (verdict,) = verdicts(implementation, dtype)
        assert verdict.failure is not None
        assert "weight_dtype=fp32" in verdict.failure.case
    assert accusations(replace(implementation, weight_dtypes=("io",))) == []


def test_what_weight_dtypes_leaves_out_is_not_asked() -> None:
    implementation = Implementation(name="mine", op="rmsnorm", forward=rounding_the_weight, weight_dtypes=("io",))
    cell = cell_of(implementation)
    refused = run_case(cell, replace(RMSNORM, weight_dtype="fp32"), plan_of(cell)).refused
    assert refused == 'weight_dtype=fp32: weight_dtypes=("io",) is declared'
    drawn = {d for _, d, _ in choices(cell.op, implementation, "fp16").parameters}
    assert drawn == {"same"}
