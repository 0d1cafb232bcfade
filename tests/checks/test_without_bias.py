"""Cases without a bias: a right kernel passes, a wrong one is found, and what is declared about a bias is obeyed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normcheck.audit.catalogue import mutants
from normcheck.audit.mutants.kernel import CLEAN
from normcheck.audit.mutants.without_bias import MUTANTS as WITHOUT_BIAS
from normcheck.cases.axes import covered
from normcheck.cases.case import Case
from normcheck.cases.case_line import parsed
from normcheck.cases.claims import claims_of, unclaimed
from normcheck.cases.depth import Depth
from normcheck.cases.op import RELU6
from normcheck.cases.ops import OPS
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.checks.check import check
from normcheck.checks.finding import finding
from normcheck.gate.plan import PROFILES, Plan
from normcheck.impls.discovery import implementations
from normcheck.impls.implementation import Implementation
from normcheck.runner.call import poisoned_memory
from tests.command_line import Cli, KernelFile
from tests.inner_loop import parametrize
from tests.some import some

GOT_PAST = Path(__file__).parents[1] / "quality" / "got_past"
WITH_BIAS = tuple(
    name for name, op in OPS.items() if op.takes_bias and not op.grouped
)  # groups have tests of their own
CORE = ("--no-contexts", "--time-budget", "0.1")  # and no case beside it
PLAN = Plan(cells=(), device="cpu", seed=0, profile=PROFILES["quick"], timeout=60.0)
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"M": 0},
    {"N": 1},
    {"rows": "blend", "M": 20, "dy": "correlated"},
    {"rows": "nan"},
    {"rows": "inf", "dy": "nan"},
    {"weight_dtype": "fp32", "weights": "probe"},
)


def case_of(op: str, dtype: str = "fp16", **fields: Any) -> Case:
    return Case(
        op=op, dtype=dtype, **{"M": 6, "N": 24, "seed": 2, "bias": False, "options": OPS[op].clips(RELU6), **fields}
    )


def test_every_op_but_those_of_models_and_codes_may_have_a_bias() -> None:
    assert {*WITH_BIAS, "groupnorm"} == {name for name, op in OPS.items() if op.takes_bias}
    assert set(WITH_BIAS) == {
        "layernorm", "layernorm_zero_centered", "layernorm_relu_bitmask", "rmsnorm", "fused_add_layernorm",
    }  # fmt: skip
    assert all(False in op.biases for op in OPS.values())


@pytest.mark.parametrize("op", WITH_BIAS)
def test_a_line_says_that_there_is_no_bias(op: str) -> None:
    case = case_of(op)
    assert " bias=none" in str(case)
    assert parsed(str(case)) == case
    assert parsed(str(case).replace(" bias=none", "")) == replace(case, bias=True)
    assert OPS[op].gradients(weight=True, bias=False)[-1] == "dw"


@parametrize("fields", FIELDS, ids=str, inner=2)
@pytest.mark.parametrize("op", WITH_BIAS)
def test_torch_and_the_clean_kernel_pass(op: str, fields: dict[str, Any]) -> None:
    case = case_of(op, **fields)
    kernels = [next(i for i in implementations()["torch"] if i.op == op)]
    if not OPS[op].adds_residual:
        kernels.append(CLEAN.implementation("clean", op))
    for kernel in some(kernels):
        with poisoned_memory():
            result = check(kernel, OPS[op], case, "cpu")
        assert not result.failed, (kernel.name, result.problems, result.wrong)
        assert {"dx", "dw"} <= {checked.output for checked in result.checked}
        assert "db" not in {checked.output for checked in result.checked}


@pytest.mark.parametrize("fault", WITHOUT_BIAS, ids=lambda fault: fault.id)
def test_a_fault_without_a_bias_shows_there_and_nowhere_else(fault: Any) -> None:
    for op in some(fault.ops):
        made, case = mutants()[fault.id].make(op), case_of(op)
        with poisoned_memory():
            assert not check(made, OPS[op], replace(case, bias=True), "cpu").failed
            wrong = check(made, OPS[op], case, "cpu")
        found = {c.output for c in wrong.wrong} | {p.output for p in wrong.problems}
        assert found and found <= set(fault.outputs), op


@pytest.mark.parametrize("op", WITH_BIAS)
def test_what_is_declared_about_a_bias_is_obeyed(op: str) -> None:
    for biases in ((False,), (True,)):
        mine = Implementation(name="mine", op=op, forward=lambda *_, **__: None, biases=biases)
        assert claims_of(OPS[op], mine, "fp16").biases == biases
        result = run_case(Cell(OPS[op], mine, "fp16", "tests"), case_of(op, bias=not biases[0]), PLAN)
        assert result.refused == f"bias={'none' if biases[0] else 'yes'}: biases={biases} is declared"
    model = Implementation(name="mine", op="rmsnorm_llama", forward=lambda *_, **__: None, biases=(True,))
    assert unclaimed(OPS["rmsnorm_llama"], model, case_of("rmsnorm_llama")) == "bias=none: biases=(True,) is declared"


@pytest.mark.parametrize("op", WITH_BIAS)
def test_a_core_has_both_in_the_order_of_the_op(op: str) -> None:
    claims = Cell(OPS[op], Implementation(name="mine", op=op, forward=lambda *_, **__: None), "fp16", "tests").claims
    assert claims.biases == OPS[op].biases
    assert covered(case_of(op), Depth.REASON)["bias"] == (False,)


@pytest.mark.parametrize(
    ("raises", "advised"),
    [
        (lambda b: b.float(), True),
        (lambda b: 0.0 + b, True),
        (lambda b: 1 / 0, False),
    ],
    ids=["attribute", "sum", "other"],
)
def test_who_takes_no_missing_bias_is_told_what_to_declare(raises: Any, advised: bool) -> None:
    def forward(x: Any, w: Any, b: Any, *, eps: float) -> Any:
        return x + raises(b)

    mine = Implementation(name="mine", op="layernorm", forward=forward)
    cell = Cell(OPS["layernorm"], mine, "fp16", "tests")
    found = finding(cell, run_case(cell, case_of("layernorm"), PLAN), "cpu")
    assert found.kind == "exception"
    assert ("declare biases=(True,)" in found.advice) is advised


def verdict_of(cli: Cli, *argv: str) -> tuple[int, dict[str, Any]]:
    done = cli("verify", *argv, "--device", "cpu", "--report", "json:run.json")
    assert done.err == ""
    (verdict,) = json.loads(Path("run.json").read_text(encoding="utf-8"))["verdicts"]
    return done.code, verdict


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("w09_pairs.py", "fp16"), ("w09d_class.py:Norm", "bf16"), ("w09d_class.py:Norm", "fp32")]
)
@pytest.mark.usefixtures("unshrunk")
def test_a_weight_that_is_forgotten_without_a_bias_is_found(cli: Cli, name: str, dtype: str) -> None:
    code, verdict = verdict_of(cli, "--impl", str(GOT_PAST / name), "--op", "layernorm", "--dtype", dtype)
    assert (code, verdict["failure"]["output"]) == (1, "y")
    assert verdict["failure"]["case"].endswith("bias=none")
    assert verdict["cases"] <= 60


@pytest.mark.slow
@pytest.mark.usefixtures("small_core")
@pytest.mark.parametrize("name", ["w09b_plain.py", "w09c_declared.py"])
def test_who_never_has_a_bias_gets_none_and_passes(cli: Cli, name: str) -> None:
    code, verdict = verdict_of(cli, "--impl", str(GOT_PAST / name), "--dtype", "fp16", *CORE)
    assert (code, verdict["status"]) == (0, "pass")
    assert all(worst["case"].endswith("bias=none") for worst in verdict["worst"].values())


PLAIN = """
import torch

def {op}(x, {residual}weight, eps):
    wide = x.float(){plus}
    xhat = torch.nn.functional.layer_norm(wide, x.shape[-1:], None, None, eps)
    y = (xhat * ({one}weight.float())).to(x.dtype)
    return {returned}
"""


@pytest.mark.slow
@pytest.mark.usefixtures("small_core")
@pytest.mark.parametrize(
    ("op", "words"),
    [
        ("layernorm_zero_centered", {"one": "1 + "}),
        ("fused_add_layernorm", {"residual": "residual, ", "plus": " + residual.float()"}),
    ],
)
def test_a_plain_function_without_a_bias_is_judged(
    cli: Cli, kernel_file: KernelFile, op: str, words: dict[str, str]
) -> None:
    returned = "(y, wide.to(residual.dtype))" if words.get("residual") else "y"
    source = PLAIN.format(**{"op": op, "residual": "", "plus": "", "one": "", "returned": returned, **words})
    code, verdict = verdict_of(cli, "--impl", str(kernel_file(source, name="plain.py")), "--dtype", "bf16", *CORE)
    assert (code, verdict["status"]) == (0, "pass"), verdict
