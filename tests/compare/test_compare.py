"""normcheck compare: what moved between two implementations is counted, the wrong one is named, bounds decide."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from normcheck import Implementation
from normcheck.cases.case import Case
from normcheck.cases.case_line import parsed
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.checks.observe import Seen
from normcheck.compare import pair as pair_module
from normcheck.compare import tally
from normcheck.compare.measure import Moved, Ran, differences
from normcheck.gate import blame
from normcheck.gate.options import VerifyOptions
from normcheck.gate.plan import Plan, profile_of
from normcheck.gate.what_ran import Looked
from normcheck.oracle.bitmask import pack
from normcheck.oracle.tolerances import table
from normcheck.result import Ran as Launches
from tests.command_line import Cli, Done, KernelFile

OWN = ("--op", "rmsnorm", "--dtype", "fp32")
NUDGED = """
import torch
def rmsnorm(x, weight, eps):
    y = torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    up = torch.nextafter(y, torch.full_like(y, torch.inf))
    return torch.where(y.abs() > 1e-30, y + (up - y).detach(), y)
"""
"""rmsnorm without a bias in fp32 as torch computes it, each y one ulp up; its gradients are torch's, to the bit."""

NO_EPS = """
import torch
def rmsnorm(x, weight, bias, eps):
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True))
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)
"""


def compared(cli: Cli, *argv: str) -> tuple[Done, dict[str, Any]]:
    done = cli("compare", *argv, "--report", "json:out.json", "--device", "cpu")
    assert done.err == "", done.err
    return done, json.loads(Path("out.json").read_text(encoding="ascii"))


def only(report: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The one pair of a report, and its outputs by name."""
    (pair,) = report["pairs"]
    return pair, {output["output"]: output for output in pair["outputs"]}


@pytest.mark.slow
def test_an_implementation_beside_itself_has_no_difference(cli: Cli) -> None:
    ops = [
        word
        for op in ("rmsnorm", "layernorm_relu_bitmask", "fused_add_rmsnorm", "rmsnorm_quant")
        for word in ("--op", op)
    ]
    done, report = compared(cli, "torch", "torch", *ops, "--dtype", "bf16", "--max-examples", "20")
    assert (done.code, report["exit_code"]) == (0, 0)
    assert [(pair["status"], pair["cases"], pair["reproduce"]) for pair in report["pairs"]] == [("same", 20, [])] * 4
    outputs = {(pair["op"], output["output"]): output for pair in report["pairs"] for output in pair["outputs"]}
    assert {("layernorm_relu_bitmask", "bitmask"), ("rmsnorm_quant", "q"), ("fused_add_rmsnorm", "dresidual")} <= {
        *outputs
    }
    for output in outputs.values():
        assert (output["differing"], output["signs"], output["ulps"] or 0.0, output["case"]) == (0, 0, 0.0, "")
        assert output["a"] == output["b"]
        assert output["elements"]
    assert done.last.startswith("SAME  4 cells, 80 cases: the same bits")


@pytest.mark.slow
def test_two_right_ones_that_differ_by_an_ulp(cli: Cli, kernel_file: KernelFile) -> None:
    file = str(kernel_file(NUDGED))
    done, report = compared(cli, "torch", file, *OWN, "--max-examples", "25")
    pair, outputs = only(report)
    assert (done.code, pair["status"], pair["cases"]) == (0, "differ", 25)
    assert [name for name, output in outputs.items() if output["differing"]] == ["y"]  # the gradients are torch's
    y = outputs["y"]
    assert y["ulps"] == 1.0
    assert 0.5 * y["elements"] < y["differing"] <= y["elements"]  # zeros and what is not finite stay
    assert 0 < y["of_bound"] < 2
    assert y["a"]["nearer"] > y["b"]["nearer"] > 0
    assert y["a"]["nearer"] + y["b"]["nearer"] <= y["differing"]
    assert y["a"]["mean_ratio"] < y["b"]["mean_ratio"] < y["b"]["ratio"] <= 1
    assert f"A is nearer to fp64 in {y['a']['nearer'] / y['differing']:.1%}" in " ".join(done.out.split())
    assert "both inside the bound" in done.out
    assert pair["reproduce"] == [f"normcheck repro {spec} {shlex.quote(y['case'])}" for spec in ("torch", file)]
    assert f"Reproduce: {pair['reproduce'][1]}\n" in done.out
    again, alone = compared(cli, "torch", file, "--case", y["case"])
    assert (again.code, only(alone)[1]["y"]["of_bound"]) == (0, y["of_bound"])


def test_the_numbers_are_those_of_plain_torch(cli: Cli, kernel_file: KernelFile) -> None:
    line = "rmsnorm fp32 M=5 N=33 eps=1e-05 rows=normal dy=normal layout=contiguous seed=3 bias=none"
    case = parsed(line)
    inputs = make(case, OPS["rmsnorm"], "cpu")
    assert inputs.weight is not None
    y = torch.nn.functional.rms_norm(inputs.x, (33,), inputs.weight, 1e-5)
    up = torch.nextafter(y, torch.full_like(y, torch.inf))
    wide = inputs.x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * inputs.weight.double()
    errors = [(value.double() - exact).abs() for value in (y, up)]
    _, report = compared(cli, "torch", str(kernel_file(NUDGED)), "--case", line)
    found = only(report)[1]["y"]
    assert (found["elements"], found["differing"], found["ulps"], found["case"]) == (165, 165, 1.0, line)
    assert found["a"]["nearer"] == int((errors[0] < errors[1]).sum())
    assert found["b"]["nearer"] == int((errors[1] < errors[0]).sum())
    for side, error in zip("ab", errors, strict=True):
        assert math.isclose(found[side]["mean_abs"], float(error.mean()), rel_tol=1e-6)
        assert math.isclose(found[side]["max_abs"], float(error.max()), rel_tol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("swapped", [False, True])
def test_the_one_that_is_wrong_is_named(swapped: bool, cli: Cli, kernel_file: KernelFile) -> None:
    specs = ["torch", str(kernel_file(NO_EPS))]
    done, report = compared(cli, *(specs[::-1] if swapped else specs), *OWN, "--max-examples", "20")
    pair, outputs = only(report)
    wrong, right = ("a", "b") if swapped else ("b", "a")
    assert (done.code, report["exit_code"], pair["status"]) == (1, 1, "outside")
    assert pair[right]["outside"] == 0
    assert pair[right]["failure"] is None
    assert pair[wrong]["outside"] > 0
    assert pair[wrong]["failure"]["output"] == "y"
    assert outputs["y"][right]["ratio"] <= 1
    assert pair[wrong]["failure"]["reproduce"].startswith("normcheck repro /")
    assert f"{wrong.upper()} is outside the bound, {right.upper()} inside" in " ".join(done.out.split())
    assert done.last.startswith(f"OUTSIDE  {wrong.upper()} (rmsnorm kernel_")
    assert cli(*shlex.split(pair[wrong]["failure"]["reproduce"])[1:], "--device", "cpu").code == 1


def test_a_side_that_dies_ends_the_comparison_and_is_named(cli: Cli, kernel_file: KernelFile) -> None:
    file = kernel_file("import os", "def rmsnorm(x, weight, bias, eps):", "    os._exit(7)")
    done, report = compared(cli, "torch", str(file), *OWN, "--max-examples", "20")
    pair, outputs = only(report)
    assert (done.code, pair["status"], pair["b"]["outside"], pair["cases"]) == (1, "outside", 3, 3)
    assert pair["b"]["failure"]["kind"] == "crash"
    assert "exit code 7" in pair["detail"]
    assert outputs == {}
    assert "y is returned only by A (3 cases)" in done.out


@pytest.mark.slow
def test_the_cases_are_those_that_verify_draws(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[str, list[str]] = {"verify": [], "compare": []}

    def noted(name: str, run: Callable[..., Result]) -> Callable[..., Result]:
        def run_case(cell: object, case: Case, *rest: Any, **options: Any) -> Result:
            ran[name].append(str(case))
            return run(cell, case, *rest, **options)

        return run_case

    monkeypatch.setattr(blame, "run_case", noted("verify", blame.run_case))
    monkeypatch.setattr(tally, "run_case", noted("compare", tally.run_case))
    options = (*OWN, "--max-examples", "30", "--seed", "5", "--device", "cpu")
    assert cli("verify", "--impl", "torch", *options).code in (0, 5)
    assert cli("compare", "torch", "torch", *options).code == 0
    assert ran["compare"][::2] == ran["compare"][1::2] == ran["verify"][:30]
    assert len(set(ran["verify"])) > 25


# what cannot be compared


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("torch", "nowhere"), "impl=nowhere: expected a known name"),
        (("TWO.py:one", "triton_tutorial"), "triton_tutorial has layernorm: expected an op that both have"),
        (("torch", "torch", "--op", "rmsnorm", "--max-examples", "0"), "max_examples=0: expected an integer >= 1"),
        (("torch", "torch", "--case", "rmsnorm fp99"), "fp99"),
        (
            ("torch", "torch", "--report", "html:x.html"),
            "report=html:x.html: expected FORMAT:PATH with FORMAT one of json",
        ),
        (
            ("torch", "TWO.py", "--op", "rmsnorm"),
            "TWO.py: has 2 implementations of rmsnorm; expected one of TWO.py:one",
        ),
    ],
)
def test_a_wrong_command_line(argv: tuple[str, ...], said: str, cli: Cli, kernel_file: KernelFile) -> None:
    declared = ", ".join(f"Implementation(name='{name}', op='rmsnorm', forward=f)" for name in ("one", "two"))
    kernel_file(
        "from normcheck import Implementation\ndef f(x, weight, bias, *, eps): return x",
        f"IMPLEMENTATIONS = ({declared})",
        name="TWO.py",
    )
    done = cli("compare", *argv, "--device", "cpu")
    assert (done.code, done.out) == (2, "")
    assert said in done.err


def test_a_side_that_takes_no_case_ends_the_pair(
    cli: Cli, kernel_file: KernelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_module, "_FRUITLESS", 5)
    never = kernel_file(
        "from normcheck import UnsupportedCase",
        "def rmsnorm(x, weight, eps):",
        "    raise UnsupportedCase('not on a Sunday')",
    )
    done, _ = compared(cli, "torch", str(never), "--op", "rmsnorm", "--dtype", "fp16", "--max-examples", "20")
    assert (done.code, done.last.startswith("NOTHING COMPARED")) == (5, True)


def test_sides_that_launch_other_kernels_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a double of the profiler: cases that are right on both sides are looked at."""
    case = parsed("rmsnorm fp16 M=3 N=64 eps=1e-05 rows=normal dy=normal layout=contiguous seed=1")
    other = parsed(str(case).replace("M=3", "M=4"))

    def seen(cell: Cell, plan: Plan, cases: list[Case], most: float) -> Looked:
        assert cases == [case]
        return Looked(None, None, [Launches(M=3, N=64, forward=(cell.spec,), backward=())])

    monkeypatch.setattr(tally, "looked", seen)
    kernel = Implementation(name="mine", op="rmsnorm", forward=lambda x, weight, bias, *, eps: x)
    a, b = (Cell(OPS["rmsnorm"], kernel, "fp16", spec) for spec in ("old", "new"))
    for device, told in (("cuda", ("other kernels run, forward: old -> new (M=3 N=64)",)), ("cpu", ())):
        plan = Plan((), profile_of(VerifyOptions()), 0, device, 10.0)
        pair = tally.PairTally(a, b, plan, ())
        pair.a.tally.plain, pair.b.tally.plain = [case, other], [case]
        assert pair.pair(pair_module.bare(pair_module.Both(a, b, ()), plan, "skip")).notes == told


def test_nothing_in_common_is_no_pass(cli: Cli, kernel_file: KernelFile) -> None:
    half = kernel_file(
        "from normcheck import Implementation\ndef f(x, weight, bias, *, eps): return x",
        "IMPLEMENTATIONS = (Implementation(name='half', op='rmsnorm', forward=f, dtypes=('fp16',)),)",
    )
    done, report = compared(cli, "torch", str(half), *OWN)
    pair, _ = only(report)
    assert (done.code, pair["status"], pair["detail"]) == (5, "skip", "B, half: declares only fp16")
    assert done.last.startswith("NOTHING COMPARED")


# the measure


def ran(op: str, line: str, **returned: torch.Tensor) -> Ran:
    outputs = {name: t for name, t in returned.items() if not name.startswith("d")}
    expected = {name: torch.zeros(t.numel(), dtype=torch.float64) for name, t in returned.items() if name == "y"}
    held = {name: (zeros, torch.full_like(zeros, 4.0), torch.full_like(zeros, 8.0)) for name, zeros in expected.items()}
    return Ran(Result(parsed(f"{op} {line}"), table().model, seen=Seen(outputs)), held)


LINE = "fp16 M=2 N=3 eps=1e-05 rows=normal dy=normal layout=contiguous seed=0"


def test_a_nan_is_infinitely_far_and_its_side_is_not_the_nearer_one() -> None:
    y = torch.tensor([[0.0, 1.0, -2.0], [math.nan, 1.0, math.inf]], dtype=torch.float16)
    other = torch.tensor([[-0.0, 3.0, math.nan], [math.nan, 1.0, -math.inf]], dtype=torch.float16)
    (moved,) = differences(ran("rmsnorm", LINE, y=y), ran("rmsnorm", LINE, y=other))
    assert isinstance(moved, Moved)
    assert moved.off is not None
    assert (moved.elements, moved.differing, moved.signs, moved.ulps) == (6, 3, 1, math.inf)
    assert moved.of_bound == 0.5
    assert [off.nearer for off in moved.off] == [2, 0]


def test_a_bound_is_that_of_the_side_on_which_the_value_lies() -> None:
    y, other = torch.tensor([[2.0, -4.0, 0.0]] * 2), torch.tensor([[2.0, 4.0, 0.0]] * 2)
    (moved,) = differences(ran("rmsnorm", LINE, y=y), ran("rmsnorm", LINE, y=other))
    assert isinstance(moved, Moved)
    assert moved.off is not None
    assert moved.of_bound == 1.0  # 8 of 8, the wider bound
    assert [off.sum_ratio for off in moved.off] == [2 * (2 / 4 + 4 / 8), 2 * (2 / 4 + 4 / 4)]


def test_formats_that_differ_are_compared_in_the_coarser_one() -> None:
    y = torch.tensor([[1.0, 2.0, 4.0]] * 2)
    near = torch.nextafter(y, torch.full_like(y, torch.inf))
    (moved,) = differences(ran("rmsnorm", LINE, y=near), ran("rmsnorm", LINE, y=y.half()))
    assert isinstance(moved, Moved)
    assert (moved.differing, moved.ulps) == (0, 0.0)
    (moved,) = differences(ran("rmsnorm", LINE, y=y * (1 + 2.0**-9)), ran("rmsnorm", LINE, y=y.half()))
    assert isinstance(moved, Moved)
    assert (moved.differing, moved.ulps) == (6, 2.0)


def test_a_bitmask_is_compared_by_its_bits_in_either_form() -> None:
    line = f"{LINE} lower_clip=0.0 upper_clip=6.0"
    bits = torch.tensor([[True, False, True], [False, False, True]])
    flipped = bits.clone()
    flipped[1, 0] = True
    op = "layernorm_relu_bitmask"
    (moved,) = differences(ran(op, line, bitmask=bits), ran(op, line, bitmask=pack(flipped)))
    assert isinstance(moved, Moved)
    assert (moved.elements, moved.differing, moved.ulps) == (6, 1, None)
    assert list(differences(ran(op, line, bitmask=bits), ran(op, line))) == ["bitmask is returned only by A"]
