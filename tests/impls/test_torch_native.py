"""torch's norms as they are: what normcheck finds in them on a CPU, and what it does not find."""

from __future__ import annotations

import pytest
import torch

from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.check import Result, check
from normcheck.errors import UnsupportedCase
from normcheck.impls import torch_native
from normcheck.impls.kernels import interpreter
from normcheck.impls.torch_native import IMPLEMENTATIONS

BY_OP = {i.op: i for i in IMPLEMENTATIONS}
on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")


def checked(op: str, dtype: str, device: str = "cpu", **changes: object) -> Result:
    if device == "cpu":
        interpreter.enable()
    case = Case(op=op, dtype=dtype, **{"M": 6, "N": 33, "bias": op != "rmsnorm", **changes})
    return check(BY_OP[op], OPS[op], case, device)


@on_cpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_statistics_in_half_precision_are_found_on_a_cpu(dtype: str) -> None:
    result = checked("layernorm", dtype)
    assert [(p.kind, p.output) for p in result.problems] == [("dtype", "mean"), ("dtype", "rstd")]
    assert result.notes == ("gradients not checked: mean, rstd cannot be used as forward returned it",)


@on_cpu
@pytest.mark.parametrize("rows", ["normal", "shifted", "constant", "blend"])
@pytest.mark.parametrize("op", BY_OP)
def test_fp32_passes_on_a_cpu(op: str, rows: str) -> None:
    result = checked(op, "fp32", rows=rows)
    assert not result.failed, (result.wrong, result.problems)
    assert {c.output for c in result.checked} >= {"y", "dx", "dw"}


@on_cpu
def test_the_backward_reads_what_was_saved() -> None:
    names = {(c.output, c.check) for c in checked("layernorm", "fp32").checked}
    assert ("dx", "given the reference's statistics") in names
    assert {"mean", "rstd"} <= {output for output, _ in names}


@on_cpu
def test_raw_moments_are_declared_where_they_are() -> None:
    interpreter.enable()
    assert BY_OP["layernorm"].model(Case(op="layernorm", dtype="fp32", M=1, N=1))["bwd_form"] == "raw"


def test_raw_moments_are_not_declared_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert BY_OP["layernorm"].model(Case(op="layernorm", dtype="fp32", M=1, N=1)) == {}


def test_two_dtypes_are_refused_on_a_gpu() -> None:
    with pytest.raises(UnsupportedCase, match=r"no torch.float32 weight beside x in torch.bfloat16"):
        torch_native._require_one_dtype(_OnGPU(torch.bfloat16), torch.empty(3))
    torch_native._require_one_dtype(torch.empty(3, dtype=torch.bfloat16), torch.empty(3))


class _OnGPU:
    is_cuda = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def test_what_is_declared() -> None:
    assert all(i.by_default == ("cuda",) for i in IMPLEMENTATIONS)
    assert BY_OP["rmsnorm"].supports(Case(op="rmsnorm", dtype="fp16", M=2, N=3)) == "takes no bias"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("op", BY_OP)
def test_it_passes_on_a_gpu(op: str, dtype: str) -> None:
    for rows in ("normal", "shifted", "constant"):
        result = checked(op, dtype, "cuda", rows=rows)
        assert not result.failed, (result.wrong, result.problems)
