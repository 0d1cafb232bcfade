"""Liger's kernels, where liger-kernel is installed: as they are on a GPU, and on a CPU under Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace

import pytest
import torch

from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.check import check
from normcheck.impls import liger
from normcheck.impls.kernels import interpreter
from normcheck.impls.liger import IMPLEMENTATIONS

BY_NAME = {(i.name, i.op): i for i in IMPLEMENTATIONS}


@pytest.fixture
def interpreted() -> None:
    if torch.cuda.is_available() and not interpreter.enabled():
        pytest.skip("the interpreter is for machines without a GPU")
    interpreter.enable()
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")


CASES = [
    Case(op="layernorm", dtype="fp32", M=3, N=17),
    Case(op="layernorm", dtype="bf16", M=4, N=40, rows="shifted", weight_dtype="fp32", layout="strided", gap=3),
    Case(op="layernorm", dtype="fp16", M=6, N=33, rows="blend", layout="rank3"),
    Case(op="rmsnorm", dtype="fp32", M=3, N=17, bias=False),
    Case(op="rmsnorm", dtype="bf16", M=4, N=40, rows="shifted", weight_dtype="fp32", bias=False),
    Case(op="rmsnorm", dtype="fp16", M=6, N=33, rows="blend", bias=False, layout="rank3"),
    Case(op="rmsnorm_gemma", dtype="bf16", M=3, N=24, bias=False),
    Case(op="rmsnorm_llama", dtype="fp16", M=3, N=24, bias=False),
    Case(op="fused_add_rmsnorm_llama", dtype="bf16", M=5, N=24, bias=False, residual="large"),
    Case(op="fused_add_rmsnorm_gemma", dtype="fp16", M=5, N=24, bias=False),
    Case(op="fused_add_rmsnorm", dtype="fp32", M=3, N=17, bias=False),
    Case(op="fused_add_rmsnorm", dtype="bf16", M=4, N=40, bias=False, residual="large", weight_dtype="fp32"),
    Case(op="fused_add_rmsnorm", dtype="fp16", M=6, N=33, bias=False, residual="opposite", layout="rank3"),
]


def test_peft_is_not_imported_to_see_whether_liger_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """It imports transformers, for seconds. One that is there already stays."""
    found: list[object] = []

    def imports(module: str, package: str) -> None:
        try:
            found.append(importlib.import_module("peft"))
        except ImportError:
            found.append(None)

    monkeypatch.setattr(liger, "not_working", imports)
    monkeypatch.setattr(liger.triton, "unavailable", lambda device: None)
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    liger._unavailable("cuda")
    assert found == [None] and "peft" not in sys.modules
    monkeypatch.setitem(sys.modules, "peft", sys)
    liger._unavailable("cuda")
    assert found == [None, sys] and sys.modules["peft"] is sys


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_adapter_on_a_cpu(case: Case) -> None:
    implementation = BY_NAME["liger", case.op]
    assert (implementation.unavailable("cpu"), implementation.supports(case)) == (None, None)
    result = check(implementation, OPS[case.op], case, "cpu")
    assert not result.failed, (result.wrong, result.problems)
    op = OPS[case.op]
    by_graph = op.statistics if op.adds_residual else ()  # its autograd function returns no rstd
    gradients = op.gradients(weight=True, bias=case.bias)
    assert {c.output for c in result.checked} == {*op.outputs, *gradients} - {*by_graph}
    assert result.not_returned == by_graph


@pytest.mark.usefixtures("interpreted")
def test_no_bias_is_a_finding() -> None:
    """0.8.5; where a later version computes it, the adapter is right and this test is to be turned round."""
    implementation = BY_NAME["liger_without_bias", "layernorm"]
    result = check(implementation, OPS["layernorm"], CASES[0], "cpu")
    assert [problem.kind for problem in result.problems] == ["exception"]
    assert "'NoneType' object has no attribute 'dtype'" in result.problems[0].message


def test_what_is_said_of_cases() -> None:
    rmsnorm = BY_NAME["liger", "rmsnorm"]
    assert rmsnorm.supports(Case(op="rmsnorm", dtype="fp16", M=1, N=3)) == "takes no bias"
    wide = Case(op="layernorm", dtype="fp16", M=1, N=65537)
    assert BY_NAME["liger", "layernorm"].supports(wide) == "takes at most 65536 columns"


def test_it_is_in_the_default_set_of_a_gpu_but_for_its_finding() -> None:
    assert {i.name: i.by_default for i in IMPLEMENTATIONS} == {"liger": ("cuda",), "liger_without_bias": ()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="TRITON_INTERPRET is set")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu(case: Case) -> None:
    implementation = BY_NAME["liger", case.op]
    reason = implementation.unavailable("cuda")
    if reason is not None:
        pytest.skip(reason)
    result = check(implementation, OPS[case.op], case, "cuda")
    assert not result.failed, (result.wrong, result.problems)


@pytest.mark.usefixtures("interpreted")
def test_a_sum_in_fp32_is_not_what_it_norms() -> None:
    """The declared sum decides: the same kernel, declared to norm the exact sum, fails."""
    declared = replace(BY_NAME["liger", "fused_add_rmsnorm"], model={"sum": "exact"})
    result = check(declared, OPS["fused_add_rmsnorm"], replace(CASES[-2], weight_dtype="same", N=257), "cpu")
    assert {c.output for c in result.wrong} & {"y", "dx"}
