"""What fails only after an earlier case: which case that is, how it is shown again, what is said of it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from normcheck.cases.case import Case
from normcheck.errors import ExitCode
from normcheck.gate.earlier import differences, likely
from tests.case_lines import case_of
from tests.command_line import Cli

STALE_EPS = str(Path(__file__).parents[1] / "quality" / "got_past" / "w24_stale_eps.py")
FAILED = Case(op="rmsnorm", dtype="bf16", M=20, N=129, eps=0.5, layout="dy_expanded", seed=5, bias=False)


@pytest.mark.slow
def test_two_cases_that_differ_in_eps_alone_show_a_cached_eps(cli: Cli) -> None:
    done = cli(
        "verify",
        "--impl",
        STALE_EPS,
        "--dtype",
        "fp16",
        "--max-examples",
        "60",
        "--no-contexts",
        "--report",
        "json:r.json",
    )
    assert done.code == ExitCode.FOUND
    (verdict,) = json.loads(Path("r.json").read_text(encoding="utf-8"))["verdicts"]
    found = verdict["failure"]
    _, command, spec, *lines = shlex.split(found["reproduce"])
    assert (command, spec, len(lines), lines[-1]) == ("repro", STALE_EPS, 2, found["case"])
    first, last = map(case_of, lines)
    assert first != last == replace(first, eps=last.eps)
    assert f"it takes {first}. The two differ only in eps: " in found["advice"]
    assert "stride" not in found["advice"]
    again = cli("repro", *shlex.split(found["reproduce"])[2:])
    assert again.code == ExitCode.FOUND
    assert f"Reproduce: {found['reproduce']}\n" in again.out
    assert [cli("repro", STALE_EPS, line).code for line in lines] == [ExitCode.PASS, ExitCode.PASS]


def test_what_may_have_left_something_behind_shares_n_and_differs_in_little() -> None:
    other_eps = replace(FAILED, eps=1e-6, rows="tail", seed=9)
    more = replace(other_eps, layout="strided", gap=3)
    same, other_n = replace(FAILED, seed=6, rows="tail"), replace(FAILED, N=64, eps=1e-6)
    assert likely((other_n, same, more, other_eps), FAILED) == [other_eps, more, same, other_n]


def test_differences_are_told_in_words() -> None:
    assert differences(FAILED, FAILED) == ()
    assert differences(replace(FAILED, eps=1e-6), FAILED) == ("eps",)
    assert differences(replace(FAILED, layout="strided", gap=3, seed=0), FAILED) == ("the layout", "the values")
    assert differences(replace(FAILED, weights="none"), FAILED) == ("weight and bias", "the values")


LAST_OUT = """
import torch

kept = {}

def rmsnorm(x, weight, eps):
    wide = x.float()
    y = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)
    late = kept.get("strided", False)
    kept["strided"] = kept.get("strided", False) or x.stride(0) > x.shape[-1] > 0 < len(x) - 1
    return y * 2 if late and x.shape[-1] == 24 else y
"""


@pytest.mark.slow
def test_a_single_difference_is_found_whatever_it_is(cli: Cli, tmp_path: Path) -> None:
    """Strided rows leave something behind by which rows of 24 are wrong from then on."""
    file = tmp_path / "mine.py"
    file.write_text(LAST_OUT, encoding="utf-8")
    few = ("--dtype", "fp32", "--max-examples", "60", "--allow-thin", "--no-contexts", "--report", "json:r.json")
    assert cli("verify", "--impl", str(file), *few).code == ExitCode.FOUND
    (verdict,) = json.loads(Path("r.json").read_text(encoding="utf-8"))["verdicts"]
    *_, first, last = shlex.split(verdict["failure"]["reproduce"])
    assert case_of(first).gap and case_of(last).N == 24
    assert cli("repro", *shlex.split(verdict["failure"]["reproduce"])[2:]).code == ExitCode.FOUND
