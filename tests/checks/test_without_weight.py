"""Kernels without a weight: a right one passes and a wrong one is found, by the command line and case by case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck.audit.mutants.kernel import BOTH, CLEAN, Kernel
from normcheck.cases.case import NO_WEIGHT, Case
from normcheck.cases.claims import claims_of
from normcheck.cases.inputs import make
from normcheck.cases.op import RELU6
from normcheck.cases.ops import OPS
from normcheck.cases.parameters import Parameters
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import check
from normcheck.gate.plan import PROFILES, Plan
from normcheck.impls.discovery import implementations
from normcheck.impls.implementation import Implementation
from normcheck.planner.refusals import with_value
from normcheck.runner.call import poisoned_memory
from tests.case_lines import NORMS
from tests.command_line import Cli, KernelFile
from tests.inner_loop import parametrize

RMSNORM = """
import torch

def rmsnorm(x, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + {eps})).to(x.dtype)
"""

OPTIONAL = """
import torch

class Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        wide = x.float()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        y = wide * rstd
        return (y if weight is None else y * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx, dy):
        x, weight, rstd = ctx.saved_tensors
        xhat, wide = x.float() * rstd, dy.float()
        dw = None if weight is None else (wide * xhat).flatten(0, -2).sum(0).to(weight.dtype)
        wd = wide if weight is None else wide * weight.float()
        c1 = (xhat * wd).mean(-1, keepdim=True){fault}
        return ((wd - xhat * c1) * rstd).to(x.dtype), dw, None

def rmsnorm(x, weight=None, eps=1e-6):
    return Norm.apply(x, weight, eps)
"""


def case_of(op: str, dtype: str = "fp16", **fields: Any) -> Case:
    options = OPS[op].clips(RELU6) if OPS[op].clamped else ()
    return Case(
        op=op,
        dtype=dtype,
        **{"M": 6, "N": 24, "seed": 2, "weights": NO_WEIGHT, "bias": False, "options": options, **fields},
    )


@pytest.mark.slow
@pytest.mark.usefixtures("small_core", "unshrunk")
@pytest.mark.parametrize(
    ("source", "fault", "isolation"),
    [
        (RMSNORM, {"eps": "2 * eps"}, "--no-isolation"),
        (OPTIONAL, {"fault": " * (weight is not None)"}, "--isolation"),
    ],
    ids=["none", "optional"],
)
def test_a_right_function_passes_and_a_wrong_one_is_found(
    cli: Cli, kernel_file: KernelFile, source: str, fault: dict[str, str], isolation: str
) -> None:
    args = ("--dtype", "fp16", "--no-contexts", isolation)
    right = kernel_file(source.format(eps="eps", fault=""), name="right.py")
    done = cli("verify", "--impl", str(right), *args, "--time-budget", "0.1")  # the core
    assert done.code == 0, done.out + done.err
    wrong = kernel_file(source.format(**{"eps": "eps", "fault": "", **fault}), name="wrong.py")
    done = cli("verify", "--impl", str(wrong), *args)
    assert done.code == 1, done.out + done.err
    line = next(line for line in done.out.splitlines() if line.strip().startswith("Case: "))
    assert line.endswith("weights=none")
    command = next(line for line in done.out.splitlines() if line.startswith("Reproduce: "))
    again = cli("repro", str(wrong), command.split("'")[1], isolation)
    assert again.code == 1, again.out + again.err
    assert cli("repro", str(right), command.split("'")[1], isolation).code == 0


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@parametrize("op", NORMS, inner=2)
@pytest.mark.parametrize("fields", [{}, {"M": 0}, {"layout": "rank3"}, {"rows": "nan"}, {"rows": "inf", "dy": "nan"}])
def test_torch_passes_without_a_weight(op: str, dtype: str, fields: dict[str, Any]) -> None:
    torch_own = next(i for i in implementations()["torch"] if i.op == op)
    assert torch_own.weights == BOTH
    with poisoned_memory():
        result = check(torch_own, OPS[op], case_of(op, dtype, **fields), "cpu")
    assert not result.failed
    assert not {"dw", "db"} & {checked.output for checked in result.checked}
    assert "dx" in {checked.output for checked in result.checked}


def clean(op: str, kernel: Kernel = CLEAN) -> Implementation:
    return kernel.implementation("mine", op, weights=BOTH)


@pytest.mark.parametrize("op", ["layernorm_zero_centered", "layernorm_relu_bitmask", "rmsnorm"])
def test_a_backward_of_its_own_returns_dx_alone(op: str) -> None:
    """A dw beside it is ignored, as a db without a bias is."""
    assert OPS[op].gradients(weight=False, bias=False) == ("dx",)
    with poisoned_memory():
        more = Kernel(finish=lambda c, out: out if c.dy_io is None else {**out, "dw": torch.zeros(c.N)})
        for kernel in (CLEAN, more):
            result = check(clean(op, kernel), OPS[op], case_of(op), "cpu")
            assert not result.failed and {"dw", "db"}.isdisjoint(c.output for c in result.checked)


def test_fp32_without_a_weight_has_one_rounding_less_to_spare() -> None:
    """y is off by 3.9 u of what it should be: within the bound of a product with a weight, not without one."""

    def scaled(x: Tensor, weight: Tensor | None, bias: None, *, eps: float) -> dict[str, Tensor]:
        wide = x.double()
        rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps).float()
        exact = wide * rstd.double() if weight is None else wide * rstd.double() * weight.double()
        return {"y": (exact * (1 + 3.9 * 2.0**-24)).float(), "rstd": rstd}

    mine = Implementation(name="mine", op="rmsnorm", forward=scaled, biases=(False,), weights=BOTH)
    without = case_of("rmsnorm", "fp32", M=20, N=1280)  # no lane has one number
    with poisoned_memory():
        assert check(mine, OPS["rmsnorm"], without, "cpu").failed
        assert not check(mine, OPS["rmsnorm"], replace(without, weights="normal"), "cpu").failed


@pytest.mark.parametrize("op", [name for name, op in OPS.items() if len(op.weights_of((False, True))) == 2])
def test_what_is_not_declared_is_not_asked(op: str) -> None:
    plan = Plan(cells=(), device="cpu", seed=0, profile=PROFILES["quick"], timeout=60.0)
    for weights in ((True,), (False,)):
        mine = Implementation(name="mine", op=op, forward=lambda *_, **__: None, weights=weights)
        case = case_of(op) if weights == (True,) else with_value(case_of(op), "weight", True)
        result = run_case(Cell(OPS[op], mine, "fp16", "tests"), case, plan)
        assert result.refused == f"weights={case.weights}: weights={weights} is declared"


def test_inputs_have_the_same_x_and_dy_without_a_weight() -> None:
    without = make(case_of("layernorm"), OPS["layernorm"], "cpu")
    usual = make(with_value(case_of("layernorm"), "weight", True), OPS["layernorm"], "cpu")
    assert without.weight is None
    assert without.bias is None
    assert [name for name, _ in without.named()] == ["x", "dy"]
    assert usual.bias is not None
    assert torch.equal(without.x, usual.x)
    assert torch.equal(without.dy, usual.dy)


def test_a_refused_weight_is_asked_for_no_more() -> None:
    op = OPS["layernorm"]
    mine = Implementation(name="mine", op=op.name, forward=lambda: None, weights=BOTH)
    claims = claims_of(op, mine, "fp16")
    of_weight = ((True, bias, dtype) for bias in (True, False) for dtype in ("same", "fp32"))
    assert claims.parameters == tuple(Parameters(*own) for own in (*of_weight, (False, False, "same")))
    fewer = claims.without("weight", False)
    assert not fewer.takes(case_of(op.name))
    assert fewer.takes(with_value(case_of(op.name), "weight", True))
    no_bias = claims.without("bias", True)  # of the cases with a weight
    assert no_bias.takes(case_of(op.name))
    assert with_value(case_of(op.name), "weight_dtype", "fp32").weight


def test_the_bench_and_the_golden_records_pass_over_who_takes_no_weight(
    cli: Cli, kernel_file: KernelFile, tmp_path: Path
) -> None:
    file = str(kernel_file(RMSNORM.format(eps="eps"), name="mine.py"))
    timed = cli("bench", "--impl", file, "--op", "rmsnorm", "--dtype", "fp16", "--sizes", "8,64")
    assert "Traceback" not in timed.out + timed.err
    assert "weights=(False,) is declared" in timed.out
    recorded = cli(
        "golden", "record", "--impl", file, "--op", "rmsnorm", "--dtype", "fp16", "--out", str(tmp_path / "g")
    )
    assert "Traceback" not in recorded.out + recorded.err
