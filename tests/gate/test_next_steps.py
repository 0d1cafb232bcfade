"""The lines of a report that are pasted: ``Explain:`` shows the very bound of the report, ``Next:`` the case again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from normcheck.errors import ExitCode
from tests.command_line import Cli, KernelFile

WRONG = """
import torch
from normcheck import Implementation

def forward(x, weight, bias, *, eps):
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return y.to(x.dtype) * 1.25

IMPLEMENTATIONS = (
    Implementation(name="mine", op="rmsnorm", forward=forward, biases=(False,), model=MODEL),
    Implementation(name="other", op="rmsnorm", forward=forward, biases=(False,)),
)
"""


NOT_Y = ("y.to(x.dtype) * 1.25", "(y + 0.25 * (y - y.detach())).to(x.dtype)")
"""Only the gradients are wrong; they are torch autograd's, whose model on a CPU is not the table's."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model", "change"),
    [
        ("mine", "dict(rsqrt_ulp=16, reason='an estimate and one Newton step')", ("", "")),
        ("mine", "lambda case: dict(rsqrt_ulp=16, chain=64)", ("", "")),
        ("other", "{}", NOT_Y),
    ],
    ids=["declared", "a function of the case", "of autograd"],
)
def test_it_shows_the_bound_of_the_report(
    name: str, model: str, change: tuple[str, str], kernel_file: KernelFile, cli: Cli, tmp_path: Path
) -> None:
    file = kernel_file(WRONG.replace("MODEL", model).replace(*change))
    few = ("--dtype", "fp32", "--max-examples", "4", "--allow-thin", "--device", "cpu", "--report", "json:report.json")
    done = cli("verify", "--impl", f"{file}:{name}", *few)
    assert done.code == ExitCode.FOUND
    (line,) = (line for line in done.out.splitlines() if line.startswith("Explain: "))
    (verdict,) = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["verdicts"]
    found = verdict["failure"]
    assert line == f"Explain: {found['explain']}"
    explained = cli(*shlex.split(found["explain"])[1:])
    assert explained.code == ExitCode.PASS, explained.err
    (part,) = (part for part in explained.out.split("\n\n") if part.startswith(found["check"]))
    assert f"  bound     {found['bound']:.6g}, " in part
    for term in found["terms"]:
        assert f"  {term['value']:<12.6g} " in part, term


def test_an_ambiguous_implementation_is_a_wrong_command(kernel_file: KernelFile, cli: Cli) -> None:
    file = kernel_file(WRONG.replace("MODEL", "{}"))
    line = "rmsnorm fp32 M=1 N=1 bias=none"
    done = cli("tolerances", "--explain", line, "--output", "y", "--at", "0,0", "--impl", str(file), "--device", "cpu")
    assert done.code == ExitCode.USAGE
    assert f"names 2 implementations; expected one, such as {file}:mine" in done.err


@pytest.mark.slow
def test_a_red_run_ends_in_the_next_command_and_that_in_the_one_after(kernel_file: KernelFile, cli: Cli) -> None:
    file = kernel_file(WRONG.replace("MODEL", "{}"))
    few = ("--dtype", "fp32", "--max-examples", "4", "--allow-thin", "--device", "cpu")
    done = cli("verify", "--impl", str(file), *few)
    assert done.code == ExitCode.FOUND
    outcome, _, step = done.last.partition(". Next: ")
    assert outcome.startswith("FAIL  2 of 2 cells failed: rmsnorm/mine fp32 (y), rmsnorm/other fp32 (y); 0 passed, ")
    assert step.startswith(f"normcheck repro {file}:mine 'rmsnorm fp32 M=1 ")
    again = cli(*shlex.split(step)[1:], "--device", "cpu")
    assert again.code == ExitCode.FOUND
    assert again.last == (
        "FAIL  rmsnorm mine fp32: y, dw. Next: --pdb stops in the kernel, --dump DIR writes all tensors of the case"
    )


@pytest.mark.slow
def test_a_green_run_ends_in_what_it_stands_on(kernel_file: KernelFile, cli: Cli) -> None:
    file = kernel_file(WRONG.replace("MODEL", "dict(rsqrt_ulp=16)").replace(" * 1.25", ""))
    done = cli(
        "verify", "--impl", str(file), "--dtype", "fp32", "--max-examples", "4", "--allow-thin", "--device", "cpu"
    )
    assert done.code == ExitCode.PASS
    assert done.last.startswith("THIN  2 of 2 cells thin: rmsnorm/mine fp32, rmsnorm/other fp32; ")
    assert "; least 4 cases on " in done.last
    assert "; worst ratio " in done.last
    assert done.last.endswith("; 1 cell under wider bounds, as declared; not returned: rstd of 2 cells")


@pytest.mark.slow
def test_a_cell_without_an_import_has_its_own_next_step(kernel_file: KernelFile, cli: Cli) -> None:
    right = kernel_file(WRONG.replace("MODEL", "{}").replace(" * 1.25", ""))
    broken = kernel_file("import nothing_of_this_name")
    few = ("--op", "rmsnorm", "--dtype", "fp32", "--max-examples", "4", "--device", "cpu")
    done = cli("verify", "--impl", str(broken), "--impl", str(right), *few)
    assert done.code == ExitCode.BROKEN
    assert done.last.endswith(". Next: correct the file that was not imported")
