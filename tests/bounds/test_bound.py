"""Bounds for tensors that somebody else made: those of the judge, to the bit; and errors that name the argument."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import normcheck
from normcheck.bounds.expected import Expected
from normcheck.cases.case import Case
from normcheck.cases.core import core
from normcheck.cases.inputs import Inputs, make
from normcheck.cases.layouts import HEADS
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError
from normcheck.gate.plan import PROFILES
from normcheck.impls import discovery
from normcheck.oracle.expectations import expectations, whole
from normcheck.oracle.judge import END_TO_END, judge_of
from normcheck.oracle.special import is_special
from normcheck.oracle.tolerances import declared_model, table
from tests.inner_loop import parametrize

CLOSED: dict[str, dict[str, Any]] = {
    "sum": {"sum": "rounded"},
    "length": {"eps": "max"},
    "gate": {"gate": "after", "activation": "silu", "rounding": "once", "group": 0, "round_gated": "none"},
    "activation": {"activation": "silu", "rounding": "once"},
    "modulation": {"rounding": "each", "round_factor": "io"},
    "rotation": {"pairs": "interleaved", "rounding": "normed"},
}
JUDGED = [op for op in OPS.values() if not op.quantises]


def model_for(op: str) -> dict[str, Any]:
    """What closes the conventions that an op leaves open."""
    if OPS[op].l2:
        return CLOSED["length"]
    if OPS[op].grouped:
        return CLOSED["activation"]
    if OPS[op].rotary:
        return CLOSED["rotation"]
    if OPS[op].modulated:
        own = {**CLOSED["sum"], "round_gated": "none"} if OPS[op].adds_residual else {}
        return {**CLOSED["modulation"], **own}
    return CLOSED["gate"] if OPS[op].gated else CLOSED["sum"] if OPS[op].adds_residual else {}


def cases(op: str, dtype: str, every: int) -> Iterator[Case]:
    """Each so-many-th case of a core of torch with finite numbers and at most some thousand elements."""
    found = next(i for i in discovery.implementations()["torch"] if i.op == op)
    planned = core(Cell(OPS[op], found, dtype, "torch").claims, PROFILES["quick"].extent.on("cpu"), 0)
    for number, each in enumerate(planned):
        case = each.case
        if number % every == 0 and case.M * case.N < 1 << 15 and case.layout != HEADS and not is_special(case):
            yield case


def arguments(case: Case, inputs: Inputs) -> dict[str, Any]:
    named = {name: tensor for name, tensor in inputs.flat(case).named() if name != "scale" or OPS[case.op].modulated}
    clips = tuple(v for _, v in case.options) or None
    counts = {name: value for name, value in case.option_values.items() if name in OPS[case.op].counts}
    return {**named, **counts, "eps": case.eps, "clips": clips, "model": model_for(case.op)}


def require_the_judges(case: Case) -> None:
    inputs, op = make(case, OPS[case.op], "cpu"), OPS[case.op]
    model = declared_model(table().model, model_for(case.op), "a test")
    parts = expectations(judge_of(op, case, inputs, model, {}), own_bits=True)
    judged = {output: both for (output, check), both in whole(parts).items() if check == END_TO_END}
    found = normcheck.bound(case.op, **arguments(case, inputs))
    assert found.keys() == judged.keys()
    for output, both in judged.items():
        mine = found[output].value, found[output].bound, found[output].below
        for own, of_judge in zip(mine, both, strict=True):
            assert torch.equal(own.flatten(), of_judge.flatten()), f"{output} of {case}"
    assert found["y"].value.shape == inputs.x.shape


@parametrize("op", [op.name for op in JUDGED], inner=1)
def test_they_are_those_of_the_judge(op: str) -> None:
    tried = [*cases(op, "bf16", 20)]
    assert len(tried) > 4
    for case in tried:
        require_the_judges(case)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "dtype"), [("rmsnorm", "fp16"), ("layernorm_relu_bitmask", "fp32")])
def test_they_are_those_of_the_judge_in_half_of_the_small_finite_cases_of_a_core(op: str, dtype: str) -> None:
    tried = [*cases(op, dtype, 2)]
    assert len(tried) > 90
    for case in tried:
        require_the_judges(case)


def right() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The outputs of torch in fp32, rounded once, and the arguments."""
    torch.manual_seed(0)
    x, w, dy = (torch.randn(shape).half() for shape in ((2, 3, 130), (130,), (2, 3, 130)))
    wide, scale = x.float().requires_grad_(), w.float().requires_grad_()
    y = torch.nn.functional.rms_norm(wide, (130,), scale, 1e-5)
    dx, dw = torch.autograd.grad(y, (wide, scale), dy.float())
    return {"y": y.detach().half(), "dx": dx.half(), "dw": dw.half()}, {"x": x, "weight": w, "eps": 1e-5, "dy": dy}


def test_what_is_right_is_within() -> None:
    outputs, given = right()
    normcheck.assert_within(outputs, "rmsnorm", **given)
    normcheck.assert_within({"y": outputs["y"]}, "rmsnorm", **{**given, "dy": None})


def test_the_pages_example_passes_and_fails_for_another_eps() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bounds-as-a-library.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    names["test_my_norm"]()
    exec(example.replace("scale, 1e-5)", "scale, 1e-2)"), names)
    with pytest.raises(AssertionError, match="y is wrong"):
        names["test_my_norm"]()


@pytest.mark.parametrize("output", ["y", "dx", "dw"])
def test_what_is_wrong_is_named_with_its_place(output: str) -> None:
    outputs, given = right()
    wrong = outputs[output].clone()
    wrong.view(-1)[-1] += 0.5
    with pytest.raises(AssertionError) as raised:
        normcheck.assert_within({**outputs, output: wrong}, "rmsnorm", **given)
    said = str(raised.value)
    assert said.startswith(f"FAIL rmsnorm fp16: {output} is wrong") and "Worst element" in said
    assert "column 129 of 130" in said and "bound" in said


def test_the_first_wrong_output_is_the_root_and_the_others_are_named() -> None:
    outputs, given = right()
    with pytest.raises(AssertionError, match="dx is wrong") as raised:
        normcheck.assert_within({**outputs, "dx": outputs["dx"] + 1, "dw": outputs["dw"] * 2}, "rmsnorm", **given)
    assert "Also wrong: dw" in str(raised.value)


def test_nan_is_wrong() -> None:
    outputs, given = right()
    with pytest.raises(AssertionError, match="y"):
        normcheck.assert_within({"y": outputs["y"] * float("nan")}, "rmsnorm", **given)


@pytest.mark.parametrize(
    ("op", "changed", "said"),
    [
        ("rmsnrm", {}, "op='rmsnrm': expected one of"),
        ("rmsnorm", {"weight": torch.ones(3).half()}, r"weight.shape=\(3,\): expected \(130,\)"),
        ("rmsnorm", {"weight": torch.ones(130).bfloat16()}, "weight.dtype=torch.bfloat16: expected that of x"),
        ("rmsnorm", {"gate": torch.ones(2, 3, 130).half()}, "gate: expected none, as rmsnorm has no gate"),
        ("rmsnorm", {"x": torch.ones(2, 3, 130).double()}, "x: expected"),
        ("rmsnorm", {"dy": torch.full((2, 3, 130), float("inf")).half()}, "dy: expected finite numbers"),
        ("rmsnorm", {"model": {"sums": 1}}, "model='sums' of the caller"),
        ("rmsnorm_quant", {}, "expected one that returns y"),
        ("rmsnorm_llama", {"bias": torch.ones(130).half()}, "bias: expected None, as rmsnorm_llama has no bias"),
        ("fused_add_rmsnorm", {}, "residual=None: expected a tensor"),
        ("fused_add_rmsnorm", {"residual": torch.ones(2, 3, 130).half()}, "leaves open what is computed"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(op: str, changed: dict[str, Any], said: str) -> None:
    _, given = right()
    with pytest.raises(UsageError, match=said):
        normcheck.bound(op, **{**given, **changed})


def test_a_convention_that_makes_no_difference_in_fp32_need_not_be_declared() -> None:
    x, residual = torch.randn(2, 8), torch.randn(2, 8)
    found = normcheck.bound("fused_add_rmsnorm", x=x, residual=residual, weight=torch.ones(8), eps=1e-5)
    assert found.keys() >= {"y", "residual_out"} and isinstance(found["y"], Expected)


def test_an_output_that_nobody_owes_is_named() -> None:
    outputs, given = right()
    with pytest.raises(UsageError, match="outputs=db: expected one of"):
        normcheck.assert_within({"db": outputs["dw"]}, "rmsnorm", **given)
    with pytest.raises(UsageError, match="gradients need dy"):
        normcheck.assert_within(outputs, "rmsnorm", **{**given, "dy": None})
    with pytest.raises(UsageError, match=r"y.shape=\(1, 3, 130\): expected 780 elements"):
        normcheck.assert_within({"y": outputs["y"][:1]}, "rmsnorm", **given)


@pytest.mark.parametrize("outputs", [{}, {"y": torch.zeros(2, 8).numpy()}], ids=["none", "numpy"])
def test_what_is_no_output_is_named(outputs: Any) -> None:
    """Nothing was within every bound."""
    with pytest.raises(UsageError, match=r"outputs.*: expected"):
        normcheck.assert_within(outputs, "rmsnorm", x=torch.ones(2, 8), weight=torch.ones(8), eps=1e-5)


def test_ulps_count_the_numbers_between() -> None:
    one = torch.tensor([1.0, -0.0, float("nan")])
    assert normcheck.ulps(one, torch.tensor([1.0 + 2**-22, 0.0, float("nan")])) == 2
    assert normcheck.ulps(one, torch.tensor([1.0, 0.0, 0.0])) == float("inf")
    with pytest.raises(UsageError, match="expected shape and dtype of a"):
        normcheck.ulps(one, one.half())


@pytest.mark.slow
def test_calling_it_starts_no_process_and_imports_no_command_line() -> None:
    script = """
import subprocess, os, sys
import torch  # some versions ask ldconfig for libraries
def refused(*_, **__): raise SystemExit("a process is started")
subprocess.Popen.__init__ = os.fork = refused
import normcheck
given = {"x": torch.ones(2, 8), "weight": torch.ones(8), "eps": 1e-5}
normcheck.bound("rmsnorm", **given)
normcheck.assert_within({"y": torch.full((2, 8), 0.999995)}, "rmsnorm", **given)
print([name for name in sys.modules if name.startswith(("normcheck.cli", "normcheck.isolation", "typer"))])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stdout + done.stderr


def test_groups_that_no_channels_have_are_refused() -> None:
    x = torch.randn(2, 6, 4, 5)
    wrong: tuple[Any, ...] = (None, 0, 4, 2.0)
    for groups in wrong:
        with pytest.raises(UsageError, match="expected a divisor of the channels of x, 6"):
            normcheck.bound("groupnorm", x=x, eps=1e-5, groups=groups, model=CLOSED["activation"])
    with pytest.raises(UsageError, match="groups=2: expected None, as layernorm has none"):
        normcheck.bound("layernorm", x=x, eps=1e-5, groups=2)


def test_images_are_held_by_their_groups() -> None:
    x, weight, bias = torch.randn(2, 6, 4, 5), torch.randn(6), torch.randn(6)
    y, mean, rstd = torch.native_group_norm(x, weight, bias, 2, 6, 20, 3, 1e-5)
    about: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "eps": 1e-5, "model": {"activation": "none"}}
    assert normcheck.bound("groupnorm", **about, groups=3)["mean"].value.shape == mean.shape
    normcheck.assert_within({"y": y, "mean": mean, "rstd": rstd}, "groupnorm", **about, groups=3)
    with pytest.raises(AssertionError, match="y is wrong"):
        normcheck.assert_within({"y": y}, "groupnorm", **about, groups=2)
