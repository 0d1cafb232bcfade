"""The tutorial's LayerNorm: right in fp32, and what normcheck finds where its partial sums are in half precision."""

from __future__ import annotations

import itertools

import pytest
import torch

from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.ask import FULLY, UNPROBED, Ask
from normcheck.checks.check import Result, check
from normcheck.impls.kernels import interpreter
from normcheck.impls.triton_tutorial import IMPLEMENTATIONS

if not torch.cuda.is_available():
    interpreter.enable()

BY_NAME = {i.name: i for i in IMPLEMENTATIONS}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="what the interpreter shows")
on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no CUDA GPU")


def checked(name: str, ask: Ask = FULLY, **case: object) -> Result:
    return check(BY_NAME[name], OPS["layernorm"], Case(op="layernorm", **case), DEVICE, ask)  # type: ignore[arg-type]


@pytest.mark.slow
@on_cpu
@pytest.mark.parametrize(
    ("name", "case"),
    [
        *itertools.product(
            BY_NAME,
            (
                {"M": 1, "N": 1},
                {"M": 5, "N": 33, "layout": "strided", "gap": 3, "rows": "shifted"},
                {"M": 6, "N": 40, "layout": "rank3", "rows": "blend"},
                {"M": 0, "N": 24},
            ),
        ),
        ("triton_tutorial", {"M": 130, "N": 8}),
        ("triton_tutorial_no_barrier", {"M": 3, "N": 16384, "rows": "offset"}),
    ],
    ids=str,
)
def test_it_is_right_in_fp32(name: str, case: dict[str, object]) -> None:
    """The interpreter runs one program at a time, so that a barrier changes nothing: the dear cases are shared out.

    That of the most rows is not asked twice nor among others, as the small ones are.
    """
    result = checked(name, UNPROBED if case["M"] == 130 else FULLY, dtype="fp32", **case)
    assert not result.failed, (result.wrong, result.problems)
    assert {c.output for c in result.checked} >= ({"y", "mean", "rstd", "dx", "dw", "db"} if case["M"] else set())


@on_cpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_single_row_is_right_in_half_precision(dtype: str) -> None:
    assert not checked("triton_tutorial", dtype=dtype, M=1, N=33).failed


@pytest.mark.slow
@on_cpu
@pytest.mark.parametrize(
    ("M", "N", "dtype", "outputs"),
    [
        (2, 64, "fp16", {"dw"}),
        (2, 64, "bf16", {"dw"}),
        (40, 64, "fp16", {"dw"}),
        (300, 1024, "fp16", {"dw", "db"}),
    ],
)
def test_partial_sums_in_half_precision_are_found(M: int, N: int, dtype: str, outputs: set[str]) -> None:
    """From two rows on each row's share of dw is rounded before they are added; of db, whose shares are rows of dy, a
    sum is, from 257 rows on. With many more rows the bound, which admits any order of an fp32 sum, is wider than that.
    """
    case = Case(op="layernorm", dtype=dtype, M=M, N=N)
    result = check(BY_NAME["triton_tutorial"], OPS["layernorm"], case, "cpu", UNPROBED)
    assert {c.output for c in result.wrong} == outputs
    assert result.problems == ()
    assert max(c.comparison.ratio for c in result.wrong) > 3


@on_cpu
def test_they_are_all_that_is_wrong() -> None:
    """The same kernel with partial sums in fp32 passes where the tutorial's fail."""
    from normcheck.impls.kernels import tutorial

    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn((40, 16), generator=generator).half() for _ in range(2))
    weight = bias = torch.ones(16, dtype=torch.float16)
    saved = tutorial.forward(x, weight, bias, eps=1e-5)
    statistics = {"mean": saved["mean"], "rstd": saved["rstd"], "barrier": True}
    db = {
        partial: tutorial.backward(dy, x, weight, bias, **statistics, partial=partial, groups=8)["db"].double()
        for partial in (torch.float32, torch.float16)
    }
    exact = dy.double().sum(0)
    rounded = exact.half().double()
    assert torch.equal(db[torch.float32], rounded)
    assert (db[torch.float16] - exact).abs().max() > 2 * (rounded - exact).abs().max()


def test_what_is_declared() -> None:
    assert set(BY_NAME) == {"triton_tutorial", "triton_tutorial_no_barrier"}
    for implementation in IMPLEMENTATIONS:
        assert (implementation.by_default, implementation.deterministic) == ((), False)
        for dtype, widest in (("fp32", 16384), ("fp16", 32768)):
            wide = Case(op="layernorm", dtype=dtype, M=1, N=widest + 1)
            assert "the tutorial takes at most 65536" in implementation.supports(wide)
            assert implementation.supports(Case(op="layernorm", dtype=dtype, M=1, N=widest)) is None


@pytest.mark.gpu
@on_gpu
def test_on_a_gpu() -> None:
    """fp32 passes with the barrier; in fp16 dw is wrong."""
    for N in (1, 33, 1000, 8192):
        result = checked("triton_tutorial", dtype="fp32", M=4096, N=N, rows="shifted")
        assert not result.failed, (result.wrong, result.problems)
    result = checked("triton_tutorial", dtype="fp16", M=16, N=1024)
    assert {c.output for c in result.wrong} == {"dw"}
    assert max(c.comparison.ratio for c in result.wrong) > 3
