"""Functions that return codes: what they get and return, what is said of one that does not, and the dump of a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from normcheck import Implementation
from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.errors import UsageError
from normcheck.gate.dump import write
from normcheck.gate.plan import PROFILES, Plan
from normcheck.golden.record import record_plan
from normcheck.impls.adapt import adapt
from normcheck.impls.discovery import validated, wrapped
from normcheck.runner.call import poisoned_memory

E4M3 = torch.float8_e4m3fn


def y_of(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()


def given(x: Tensor, weight: Tensor, scale: Tensor, eps: float) -> Tensor:
    return (y_of(x, weight, eps) / scale).clamp(-448, 448).to(E4M3)


def of_rows(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = y_of(x, weight, eps)
    scale = (y.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-10)
    return (y / scale).clamp(-448, 448).to(E4M3), scale


def limited(x: Tensor, weight: Tensor, eps: float, scale_ub: float | None = None) -> tuple[Tensor, Tensor]:
    y = y_of(x, weight, eps)
    most = y.abs().amax(-1, keepdim=True)
    scale = ((most if scale_ub is None else most.clamp(max=scale_ub)) / 448).clamp(min=1e-10)
    return (y / scale).clamp(-448, 448).to(E4M3), scale


def added(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    stored = x + residual
    return (*of_rows(stored, weight, eps), stored)


def added_given(x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    stored = x + residual
    return given(stored, weight, scale, eps), stored


def mine(function: Any, op: str = "rmsnorm_quant") -> Implementation:
    return wrapped(adapt(function), op, "mine", "")


def result_of(implementation: Implementation, **fields: Any) -> Result:
    own: dict[str, Any] = {"dtype": "bf16", "M": 6, "N": 129, "seed": 2, "bias": False, **fields}
    with poisoned_memory():
        return check(implementation, OPS[implementation.op], Case(op=implementation.op, **own), "cpu")


@pytest.mark.parametrize(
    ("function", "op", "scale", "outputs"),
    [
        (given, "rmsnorm_quant", "normal", {"q"}),
        (of_rows, "rmsnorm_quant", "none", {"q", "scale"}),
        (limited, "rmsnorm_quant", "limited", {"q", "scale"}),
        (added, "fused_add_rmsnorm_quant", "none", {"q", "scale", "residual_out"}),
        (added_given, "fused_add_rmsnorm_quant", "ties", {"q", "residual_out"}),
    ],
)
@pytest.mark.parametrize("layout", ["contiguous", "rank3", "x_strided"])
def test_a_plain_function_is_judged(function: Any, op: str, scale: str, outputs: set[str], layout: str) -> None:
    result = result_of(mine(function, op), scale=scale, layout=layout, gap=3 * (layout == "x_strided"))
    assert not result.failed
    assert {c.output for c in result.checked} == outputs
    assert result.probed is not None and all(result.probed.invariant.values()) and result.probed.invariant


def test_the_parameters_say_what_the_scale_is() -> None:
    assert Cell(OPS["rmsnorm_quant"], mine(given), "bf16", "mine").claims.scales[0] == "normal"
    assert Cell(OPS["rmsnorm_quant"], mine(of_rows), "bf16", "mine").claims.scales == ("none",)
    assert Cell(OPS["rmsnorm_quant"], mine(limited), "bf16", "mine").claims.scales == ("none", "limited")
    plan = Plan(cells=(), device="cpu", seed=0, profile=PROFILES["quick"], timeout=60.0)
    case = Case(op="rmsnorm_quant", dtype="bf16", M=2, N=9, bias=False, scale="normal")
    refused = run_case(Cell(OPS["rmsnorm_quant"], mine(of_rows), "bf16", "mine"), case, plan).refused
    assert refused == "scale=normal: model declares that the scale is returned, without scale_ub"


@pytest.mark.parametrize(
    ("change", "kind", "output", "words"),
    [
        (lambda q, s: {"q": q}, "missing", "scale", "forward gives q and scale"),
        (lambda q, s: {"q": q.float(), "scale": s}, "dtype", "q", "expected torch.float8_e4m3fn or"),
        (lambda q, s: {"q": q.view(torch.uint8), "scale": s}, "dtype", "q", "torch.int8"),
        (lambda q, s: {"q": q[:, :8], "scale": s}, "shape", "q", "expected (6, 129)"),
        (lambda q, s: {"q": q, "scale": s.half()}, "dtype", "scale", "expected torch.float32"),
        (lambda q, s: {"q": q, "scale": s[:4]}, "shape", "scale", "(6, 3) of model['scale']='block64'"),
        (lambda q, s: {"q": q, "scale": s[0]}, "shape", "scale", "expected (6, 1)"),
        (lambda q, s: {"scale": s}, "missing", "q", "'q' among them"),
        (lambda q, s: (q, s, q), "missing", "q", "expected 2: q, scale"),
    ],
)
def test_what_is_not_as_agreed_is_said(change: Any, kind: str, output: str, words: str) -> None:
    result = result_of(mine(lambda x, weight, eps: change(*of_rows(x, weight, eps))))
    found = next(p for p in result.problems if p.output == output)
    assert (found.kind, words in found.message) == (kind, True), found.message


def test_what_becomes_a_code_must_be_declared_as_data() -> None:
    for fields in ({"model": lambda case: {}}, {"backward": lambda *_, **__: {}}):
        implementation = Implementation(name="mine", op="rmsnorm_quant", forward=given, **fields)
        with pytest.raises(UsageError, match="expected a dict, which says what the scale is, and no backward"):
            validated(implementation, "mine")


@pytest.mark.parametrize(
    ("function", "names"), [(given, {"q/by_given_scale"}), (of_rows, {"q/by_own_scale", "scale/end_to_end"})]
)
def test_a_dump_has_codes_and_scales(function: Any, names: set[str], tmp_path: Path) -> None:
    implementation, seen = mine(function), list[Any]()
    cell = Cell(OPS["rmsnorm_quant"], implementation, "bf16", "mine")
    case = Case(op="rmsnorm_quant", dtype="bf16", M=2, N=9, bias=False, scale="normal" if function is given else "none")
    plan = Plan(cells=(), device="cpu", seed=0, profile=PROFILES["quick"], timeout=60.0)
    write(tmp_path / "dump", cell, run_case(cell, case, plan, Ask(watch=seen.append)), seen, "cpu")
    tensors = load_file(tmp_path / "dump" / "case.safetensors")
    assert {f"{kind}/{name}" for kind in ("actual", "expected", "above") for name in names} <= set(tensors)
    assert tensors["actual/q/" + ("by_given_scale" if function is given else "by_own_scale")].dtype == E4M3


def test_a_dump_of_a_function_that_raises_has_what_would_be_right(tmp_path: Path) -> None:
    def raising(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        raise ValueError("no")

    cell = Cell(OPS["rmsnorm_quant"], mine(raising), "bf16", "mine")
    case = Case(op="rmsnorm_quant", dtype="bf16", M=2, N=9, bias=False)
    plan = Plan(cells=(), device="cpu", seed=0, profile=PROFILES["quick"], timeout=60.0)
    write(tmp_path / "dump", cell, run_case(cell, case, plan), [], "cpu")
    assert "expected/q/by_own_scale" in load_file(tmp_path / "dump" / "case.safetensors")


def test_no_golden_record_has_codes_yet() -> None:
    cell = Cell(OPS["rmsnorm_quant"], mine(given), "bf16", "mine")
    plan = Plan(cells=(cell,), device="cpu", seed=0, profile=PROFILES["quick"], timeout=60.0)
    (skipped,) = record_plan(plan, lambda number, cell: None).skipped
    assert skipped.reason == "an op that gets more inputs by name has no recorded cases yet"
