"""The sum that a kernel norms: told by what it returns, the same in every case, or declared."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from normcheck import Implementation
from normcheck.cases.case import Case
from normcheck.cases.ops import OPS
from normcheck.checks.check import check
from normcheck.gate.plan import PROFILES
from tests.command_line import normcheck

KERNELS = """
import torch
from normcheck import Implementation


def norm(wide, weight, eps):
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()


def rounded(x, residual, weight, eps):
    stored = x + residual
    return norm(stored.float(), weight, eps).to(x.dtype), stored


def exact(x, residual, weight, eps):
    wide = x.float() + residual.float()
    return norm(wide, weight, eps).to(x.dtype), wide.to(x.dtype)


def mixed(x, residual, weight, eps):
    wide = x.float() + residual.float()
    stored = wide + (wide.to(x.dtype).float() - wide).detach()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (stored * rstd * weight.float()).to(x.dtype), wide.to(x.dtype)


def either(x, residual, weight, eps):
    return (exact if x.shape[-1] % 8 else rounded)(x, residual, weight, eps)


def keyword(x, weight, eps, *, residual):
    return dict(zip(("y", "residual_out"), rounded(x, residual, weight, eps)))


def only_y(x, residual, weight, eps):
    return rounded(x, residual, weight, eps)[0]


def plain(x, weight, eps):
    return norm(x.float(), weight, eps).to(x.dtype)


def in_place(x, weight, bias, *, eps, residual):
    with torch.no_grad():
        y, stored = rounded(x, residual, weight, eps)
        x.copy_(y)
        residual.copy_(stored)
    return {"y": x, "residual_out": residual}


class Layer(torch.nn.Module):
    def __init__(self, columns, eps=1e-5):
        super().__init__()
        self.eps, self.weight = eps, torch.nn.Parameter(torch.ones(columns))

    def forward(self, x, residual):
        return rounded(x, residual, self.weight, self.eps)


def forward_of(function):
    return lambda x, weight, bias, *, eps, residual: function(x, residual, weight, eps)


OP = "fused_add_rmsnorm"
IMPLEMENTATIONS = (
    Implementation(name="says_exact", op=OP, forward=forward_of(exact), model={"sum": "exact"}),
    Implementation(name="says_rounded", op=OP, forward=forward_of(exact), model={"sum": "rounded"}),
    Implementation(name="says_it_overwrites", op=OP, forward=in_place, overwrites=("x", "residual")),
    Implementation(name="overwrites_the_residual", op=OP, forward=in_place, overwrites=("x",)),
)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sums") / "kernels.py"
    path.write_text(KERNELS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def verdicts(file: Path) -> dict[str, Any]:
    """By name, of one run of all of them."""
    functions = ("rounded", "exact", "mixed", "either", "keyword", "only_y", "Layer")
    declared = ("says_exact", "says_rounded", "says_it_overwrites", "overwrites_the_residual")
    impls = [word for name in (*functions, *declared) for word in ("--impl", f"{file}:{name}")]
    where = ("--op", "fused_add_rmsnorm", "--dtype", "bf16", "--device", "cpu")
    few = ("--max-examples", "14", "--time-budget", "240", "--allow-thin", "--no-contexts")
    brief = replace(PROFILES["quick"], shrink_seconds=0.0, explain_seconds=0.0)
    with patch.dict(PROFILES, {"quick": brief}):  # as the fixture ``unshrunk``, of this module's run
        done = normcheck("verify", *where, *impls, *few, "--report", "json:-")
    found = json.loads(done.out)["verdicts"]
    return {verdict["implementation"].rpartition(":")[2]: verdict for verdict in found}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rounded", "norms the sum as it is stored"),
        ("keyword", "norms the sum as it is stored"),
        ("Layer", "norms the sum as it is stored"),
        ("exact", "norms the sum in fp32"),
        ("mixed", "norms the stored sum by the statistics of the sum in fp32"),
        ("says_it_overwrites", "norms the sum as it is stored"),
    ],
)
def test_it_is_told(verdicts: dict[str, Any], name: str, words: str) -> None:
    verdict = verdicts[name]
    assert verdict["status"] == "thin", verdict["failure"]
    assert sum(note.startswith(words) for note in verdict["notes"]) == 1
    assert "sum" not in verdict["model"]
    assert {"y", "residual_out"} <= set(verdict["worst"])
    assert ({"dx", "dresidual", "dw"} <= set(verdict["worst"])) == (name != "says_it_overwrites")


@pytest.mark.slow
def test_it_is_one_in_all_cases(verdicts: dict[str, Any]) -> None:
    failure = verdicts["either"]["failure"]
    assert (failure["kind"], failure["output"]) == ("mismatch", "y")
    assert failure["advice"].startswith(
        ("This case fits another convention: model={'sum': '", "It is judged by {'sum': '")
    )
    assert " fits" in failure["advice"] or " does not fit " in failure["advice"]
    assert failure["reproduce"].startswith("normcheck verify ")


@pytest.mark.slow
def test_what_is_declared_is_held(verdicts: dict[str, Any]) -> None:
    assert (verdicts["says_exact"]["status"], verdicts["says_exact"]["model"]) == ("thin", {"sum": "exact"})
    failure = verdicts["says_rounded"]["failure"]
    assert (failure["kind"], failure["output"]) == ("mismatch", "y")
    assert "--explain" in failure["explain"]


@pytest.mark.slow
def test_the_stored_sum_is_owed(verdicts: dict[str, Any]) -> None:
    failure = verdicts["only_y"]["failure"]
    assert (failure["kind"], failure["output"]) == ("missing", "residual_out")


@pytest.mark.slow
def test_an_input_is_overwritten_only_if_that_is_declared(verdicts: dict[str, Any]) -> None:
    failure = verdicts["overwrites_the_residual"]["failure"]
    assert (failure["kind"], failure["output"]) == ("input_modified", "residual")
    assert "overwrites=" in failure["advice"]


@pytest.mark.parametrize(
    ("name", "op", "words"),
    [
        ("plain", "fused_add_rmsnorm", "expected a parameter named residual: plain(x, residual, weight, eps)"),
        ("rounded", "rmsnorm", "expected no parameter named residual"),
    ],
)
def test_a_function_of_another_kind_of_op_is_refused(file: Path, name: str, op: str, words: str) -> None:
    done = normcheck("verify", "--op", op, "--impl", f"{file}:{name}", "--device", "cpu")
    assert done.code == 2
    assert words in " ".join(done.err.split())


def _exact(x, weight, bias, *, eps, residual):  # type: ignore[no-untyped-def]
    wide = x.float() + residual.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return {"y": y.to(x.dtype), "residual_out": wide.to(x.dtype)}


def _of_the_stored_sum(dy, x, weight, bias, saved, *, eps, residual, dresidual_out, rows_of=1):  # type: ignore[no-untyped-def]
    stored = saved["residual_out"].float()
    rstd = torch.rsqrt(stored.square().mean(-1, keepdim=True) + eps)
    xhat, wdy = stored * rstd, dy.float() * weight.float()
    dx = ((wdy - rows_of * xhat * (wdy * xhat).mean(-1, keepdim=True)) * rstd + dresidual_out.float()).to(x.dtype)
    return {"dx": dx, "dresidual": dx, "dw": (dy.float() * xhat).sum(0).to(weight.dtype)}


@pytest.mark.parametrize("wrong", [False, True])
def test_a_backward_may_have_nothing_but_the_stored_sum(wrong: bool) -> None:
    """rstd is not saved, so it is that of the stored sum, though y has the exact one."""
    backward = partial(_of_the_stored_sum, rows_of=0.9 if wrong else 1)
    mine = Implementation(name="mine", op="fused_add_rmsnorm", forward=_exact, backward=backward, biases=(False,))
    base = Case(op="fused_add_rmsnorm", dtype="bf16", M=33, N=129, bias=False, rows="shifted", residual="normal")
    failed = [check(mine, OPS[base.op], replace(base, seed=seed), "cpu").failed for seed in range(6)]
    assert failed == [wrong] * 6
