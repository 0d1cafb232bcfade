"""A bias without a weight: only who declares it gets one; a right kernel passes, each fault of it alone is found."""

from __future__ import annotations

import re

import pytest

from normcheck.cases.case_line import parsed
from normcheck.cases.claims import claims_of, unclaimed
from normcheck.cases.core import drawn
from normcheck.cases.ops import OPS
from normcheck.checks.attempt import run_case
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError
from normcheck.gate.plan import PROFILES, Plan
from normcheck.impls.discovery import validated
from normcheck.impls.implementation import Implementation
from normcheck.runner.call import poisoned_memory
from tests.command_line import Cli, KernelFile
from tests.inner_loop import parametrize

KERNEL = """
import torch
from normcheck import Implementation

def parts(x, eps):
    wide = x.float()
    centred = wide - wide.mean(-1, keepdim=True)
    return centred, torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)

def forward(x, weight, bias, *, eps):
    centred, rstd = parts(x, eps)
    y = centred * rstd
    y = y if weight is None else y * weight.float()
    y = y if bias is None {no_y} else y + bias.float()
    return y.to(x.dtype)

def backward(dy, x, weight, bias, saved, *, eps):
    centred, rstd = parts(x, eps)
    xhat, wide = centred * rstd, dy.float()
    g = wide if weight is None else wide * weight.float()
    dx = (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True)) * rstd
    gradients = {{"dx": dx.to(x.dtype)}}
    if weight is not None:
        gradients["dw"] = (wide * xhat).sum(0).to(weight.dtype)
    if bias is not None {no_db}:
        gradients["db"] = ((wide{times}) if weight is None else wide).sum(0).to(bias.dtype)
    return gradients

IMPLEMENTATIONS = (
    Implementation(
        name="mine", op="layernorm", forward=forward, backward=backward, weights=(False, True), lone_bias=True
    ),
)
"""
RIGHT = {"no_y": "", "no_db": "", "times": ""}
ALONE = "and weight is not None"
FAULTS = {
    "y is wrong": {"no_y": "or weight is None"},
    "db was not returned": {"no_db": ALONE},
    "db is wrong": {"times": " * xhat"},
}
FEW = ("--dtype", "fp16", "--device", "cpu", "--max-examples", "60", "--allow-thin", "--no-contexts")


def by_graph(x, weight, bias, *, eps):
    import torch

    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


DECLARED = Implementation(name="mine", op="layernorm", forward=by_graph, weights=(False,), lone_bias=True)
LINE = "layernorm fp32 M=5 N=24 seed=3 weights=none bias=yes"


@pytest.mark.slow
def test_a_right_kernel_passes(cli: Cli, kernel_file: KernelFile) -> None:
    path = kernel_file(KERNEL.format(**RIGHT), name="mine.py")
    done = cli("verify", "--impl", str(path), *FEW)
    assert done.code == 0, done.out + done.err
    done = cli("repro", str(path), LINE)
    assert done.code == 0 and re.search(r"pass +db", done.out) and not re.search(r"pass +dw", done.out), done.out


@pytest.mark.slow
@pytest.mark.parametrize(("said", "seed"), list(zip(FAULTS, ("0", "1", "0"), strict=True)))
def test_a_fault_of_it_alone_is_found(cli: Cli, kernel_file: KernelFile, said: str, seed: str) -> None:
    path = kernel_file(KERNEL.format(**(RIGHT | FAULTS[said])), name="mine.py")
    done = cli("verify", "--impl", str(path), *FEW, "--seed", seed)
    assert done.code == 1, done.out + done.err
    assert said in done.out
    (line,) = re.findall(r"^  Case: (.*)$", done.out, re.MULTILINE)
    assert line.endswith("weights=none bias=yes")


def test_gradients_by_autograd_are_judged() -> None:
    cell = Cell(OPS["layernorm"], DECLARED, "fp32", "tests")
    plan = Plan((cell,), PROFILES["quick"], 0, "cpu", 60.0)
    with poisoned_memory():
        result = run_case(cell, parsed(LINE), plan)
    assert not result.failed and {"y", "dx", "db"} <= {checked.output for checked in result.checked}
    assert "dw" not in {checked.output for checked in result.checked}


@parametrize(
    ("weights", "least", "seed"),
    [((False,), 100, 0), ((False, True), 5, 1), ((False,), 100, 2), ((False, True), 5, 0)],
    inner=1,
)
def test_a_core_has_both_without_a_weight(weights: tuple[bool, ...], least: int, seed: int) -> None:
    both = Implementation(name="mine", op="layernorm", forward=by_graph, weights=weights, lone_bias=True)
    core = [
        planned.case for planned in drawn(claims_of(OPS["layernorm"], both, "fp16"), PROFILES["quick"].extent, seed)
    ]
    bare = [case for case in core if not case.weight]
    assert sum(case.bias for case in bare) >= least and sum(not case.bias for case in bare) >= least
    assert {case.bias for case in bare[: len(bare) // 2]} == {False, True}


def test_who_does_not_declare_it_gets_none() -> None:
    plain = Implementation(name="mine", op="layernorm", forward=by_graph, weights=(False, True))
    claims = claims_of(OPS["layernorm"], plain, "fp16")
    assert not any(one.bias and not one.weight for one in claims.parameters)
    core = drawn(claims, PROFILES["quick"].extent, 0)
    assert not any(planned.case.bias and not planned.case.weight for planned in core)
    assert unclaimed(OPS["layernorm"], plain, parsed(LINE)) == "bias=yes weights=none: lone_bias=False is declared"
    assert unclaimed(OPS["layernorm"], DECLARED, parsed(LINE)) == ""
    of_rmsnorm = Implementation(name="mine", op="rmsnorm_llama", forward=by_graph, weights=(False,), lone_bias=True)
    assert claims_of(OPS["rmsnorm_llama"], of_rmsnorm, "fp16").lone_biases == (False,)  # it never has a bias


def test_it_is_declared_beside_no_weight() -> None:
    wrong = Implementation(name="mine", op="layernorm", forward=by_graph, lone_bias=True)
    with pytest.raises(UsageError, match=r"lone_bias=True weights=\(True,\) .*: expected False in weights with it"):
        validated(wrong, "mine.py")
