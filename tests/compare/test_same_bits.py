"""normcheck compare --same-bits: a bit that differs is exit code 1, and the rounding that differs has its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from normcheck.audit.mutants import gated, l2norm, modulated, quantised, residual
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.compare.pair import Both, compared
from normcheck.compare.results import Pair
from normcheck.gate.options import VerifyOptions
from normcheck.gate.plan import Plan, profile_of
from normcheck.oracle.judging import PLAIN
from tests.command_line import Cli, KernelFile

CONTROLS = {(i.op, i.name): i for m in (residual, gated, modulated, l2norm, quantised) for i in m.CONTROLS}
SAME, NONE = "same bits", "no known rounding"
TABLE = (
    ("fused_add_rmsnorm", "add_rounded", "add_exact", "sum"),
    ("fused_add_rmsnorm", "add_exact", "add_rounded", "sum"),
    ("fused_add_rmsnorm", "add_exact", "add_mixed", "sum"),
    ("fused_add_rmsnorm", "add_exact", "add_in_place", "sum"),
    ("fused_add_rmsnorm", "add_rounded", "add_in_place", SAME),
    ("fused_add_rmsnorm", "add_rounded", "add_pairwise", NONE),
    ("fused_add_rmsnorm", "add_exact", "add_exact_again", NONE),
    ("fused_add_rmsnorm", "add_exact", "add_sequential", NONE),
    ("rmsnorm_gated", "gated", "gated_before", "gate"),
    ("rmsnorm_gated", "gated", "gated_sigmoid", "activation"),
    ("rmsnorm_gated", "gated", "gated_each", "rounding"),
    ("rmsnorm_gated", "gated", "gated_groups", "group"),
    ("rmsnorm_gated", "gated_sigmoid", "gated_sigmoid_each_open", "rounding"),
    ("rmsnorm_gated", "gated", "gated_sigmoid_each", "activation and rounding"),
    ("rmsnorm_gated", "gated", "gated_pairwise", NONE),
    ("rmsnorm_gated", "gated", "gated_by_tanh", NONE),
    ("rmsnorm_gated", "gated", "gated_eager", NONE),
    ("layernorm_modulate", "modulated", "modulated_factor", "round_factor"),
    ("layernorm_modulate", "modulated_normed", "modulated_each_fp32_factor", "rounding"),
    ("layernorm_modulate", "modulated", "modulated_each_fp32_factor", "rounding"),
    ("layernorm_modulate", "modulated", "modulated_each", "rounding and round_factor"),
    ("layernorm_modulate", "modulated_open", "modulated_factor_open", "round_factor"),
    ("layernorm_modulate", "modulated", "modulated_xhat_plus", SAME),
    ("layernorm_modulate", "modulated", "modulated_sequential", NONE),
    ("layernorm_modulate", "modulated_each", "modulated_each_in_fp64", NONE),
    ("l2norm", "l2_sum", "l2_max", "eps"),
    ("l2norm", "l2_max", "l2_mean_blocked", "eps"),
    ("l2norm", "l2_sum", "l2_sum_pairwise", NONE),
    ("l2norm", "l2_max", "l2_max_in_fp64", NONE),
    ("rmsnorm_quant", "codes_given", "codes_vllm_static", "round_before_quant and scaling"),
)
"""Op, two correct kernels of the audit, and what differs between them."""


def pair(op: str, a: str, b: str, dtype: str = "bf16") -> Pair:
    """Both on sixteen cases, in this process."""
    plan = Plan((), profile_of(VerifyOptions(max_examples=16)), 0, "cpu", 60.0, judge=PLAIN)
    both = Both(*(Cell(OPS[op], CONTROLS[op, name], dtype, name) for name in (a, b)), ())
    return compared(both, plan, (), lambda cases, worst: None, same_bits=True)


def said(found: Pair) -> str:
    if found.rounding is None:
        return SAME
    rounding = found.rounding
    return (rounding.axis if rounding.named else "") or " and ".join(rounding.several) or NONE


@pytest.mark.slow
@pytest.mark.parametrize(("op", "a", "b", "truth"), TABLE)
def test_what_differs_between_two_correct_kernels_is_named(op: str, a: str, b: str, truth: str) -> None:
    found = pair(op, a, b)
    assert said(found) == truth, found.rounding
    assert found.status == ("same" if truth == SAME else "differ")
    if found.rounding is not None and found.rounding.named:
        assert found.rounding.case and found.rounding.a != found.rounding.b
        assert found.rounding.explained + found.rounding.backward == found.rounding.differing


def test_codes_of_another_dtype_have_not_the_same_bits() -> None:
    assert pair("rmsnorm_quant", "codes_given", "codes_unfused_int8").unlike == ("q",)


@pytest.mark.slow
def test_where_a_rounding_makes_no_difference_it_is_not_named() -> None:
    """In fp32 the sum is stored as it is, and kernels of both kinds differ by the order of their sums alone."""
    assert said(pair("fused_add_rmsnorm", "add_rounded", "add_sequential", "fp32")) == NONE
    assert said(pair("fused_add_rmsnorm", "add_rounded", "add_exact", "fp32")) == SAME


@pytest.mark.slow
def test_another_order_beside_another_rounding_is_not_explained_by_the_rounding() -> None:
    rounding = pair("fused_add_rmsnorm", "add_rounded", "add_sequential").rounding
    assert rounding is not None and not rounding.named
    assert rounding.axis == "sum" and rounding.other and 0 < rounding.explained < rounding.differing


KERNELS = """
import torch
def normed(x, eps):
    h = x.float()
    return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
def plain(x, weight, eps):
    return (normed(x, eps) * weight.float()).to(x.dtype)
def cast(x, weight, eps):
    return (normed(x, eps).to(x.dtype) * weight).to(x.dtype)
def wide(x, weight, eps):
    return (normed(x, eps) * (1 + weight.float())).to(x.dtype)
def narrow(x, weight, eps):
    return (normed(x, eps) * (1 + weight).float()).to(x.dtype)
"""
ASKED = ("--same-bits", "--max-examples", "16", "--dtype", "bf16", "--device", "cpu", "--report", "json:out.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "a", "b", "axis", "of_b"),
    [
        ("rmsnorm", "plain", "cast", "order of the casts", "rounds xhat before it multiplies it by the weight"),
        ("rmsnorm_llama", "plain", "cast", "order of the casts", "rounds xhat before it multiplies it by the weight"),
        ("rmsnorm_gemma", "wide", "narrow", "1 + weight", "rounds 1 + weight to the dtype of the weight"),
    ],
)
def test_a_side_that_another_op_would_pass_is_named_as_well(
    op: str, a: str, b: str, axis: str, of_b: str, cli: Cli, kernel_file: KernelFile
) -> None:
    file = kernel_file(KERNELS).name
    done = cli("compare", f"{file}:{a}", f"{file}:{b}", "--op", op, *ASKED)
    (found,) = json.loads(Path("out.json").read_text(encoding="utf-8"))["pairs"]
    assert done.code == 1 and found["status"] == "outside"
    assert found["rounding"]["axis"] == axis and found["rounding"]["b"].startswith(of_b), done.out
    assert f"Rounding: {axis}: A" in done.out and "shown by rmsnorm" in done.out


@pytest.mark.slow
def test_the_exit_code_is_1_for_a_bit_and_0_for_a_kernel_and_itself(cli: Cli, kernel_file: KernelFile) -> None:
    file = kernel_file(
        KERNELS, "def other(x, weight, eps): return plain(x.flip(-1), weight.flip(-1), eps).flip(-1)"
    ).name
    same = cli("compare", f"{file}:plain", f"{file}:plain", "--op", "rmsnorm", *ASKED)
    assert same.code == 0 and "Rounding" not in same.out and "SAME" in same.last
    asked = ("compare", f"{file}:plain", f"{file}:other", "--op", "rmsnorm", "--dtype", "fp32", "--max-examples", "16")
    differ = cli(*asked, "--device", "cpu", "--same-bits")
    assert differ.code == 1 and "No known rounding explains the " in differ.out
    assert cli(*asked, "--device", "cpu").code == 0


def test_outputs_of_another_dtype_are_a_difference(cli: Cli, kernel_file: KernelFile) -> None:
    codes = "from normcheck.audit.mutants.quantised import CONTROLS"
    codes += "\ne4m3, int8 = ([i for i in CONTROLS if i.name == n][0] for n in ('codes_given', 'codes_unfused_int8'))"
    file = kernel_file(codes).name
    done = cli("compare", f"{file}:e4m3", f"{file}:int8", "--op", "rmsnorm_quant", *ASKED[:-2], "--max-examples", "3")
    assert done.code == 1 and done.last.startswith("DIFFER")
    assert "q: of another dtype or size, so not the same bits" in " ".join(done.out.split())


TWO_WAYS = """
import torch
from normcheck import Implementation

def plain(x, weight, bias, *, eps):
    wide = x.float()
    n = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (n * weight.float() + (0.0 if bias is None else bias.float())).to(x.dtype)

def two_ways(x, weight, bias, *, eps):
    y = plain(x, weight, bias, eps=eps)
    return y if torch.is_grad_enabled() else torch.nextafter(y.float(), torch.zeros(())).to(x.dtype) * 1.001

IMPLEMENTATIONS = [Implementation(name=f.__name__, op="rmsnorm", forward=f) for f in (plain, two_ways)]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("other", "code"), [("plain", 0), ("two_ways", 1)])
def test_bits_are_compared_in_the_contexts_that_are_asked_for(
    cli: Cli, kernel_file: KernelFile, tmp_path: Path, other: str, code: int
) -> None:
    file, kept = kernel_file(TWO_WAYS), tmp_path / "found.json"
    asked = [word for name in ("inference", "again", "graph") for word in ("--context", name)]
    options = ("--op", "rmsnorm", "--dtype", "fp16", "--max-examples", "12", "--device", "cpu", "--same-bits")
    done = cli("compare", f"{file}:plain", f"{file}:{other}", *options, *asked, "--report", f"json:{kept}")
    (found,) = json.loads(kept.read_text(encoding="utf-8"))["pairs"]
    assert done.code == code, done.out
    assert found["status"] == "same"
    told = {one["context"]: one["status"] for one in found["contexts"]}
    without_gradients = "differ" if code else "same"  # as a step of ``again`` is, too
    assert told == {"inference": without_gradients, "again": without_gradients, "graph": "skip"}
    assert ("in the context inference: y differs in" in done.out) == bool(code)
