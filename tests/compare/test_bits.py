"""normcheck baseline bits: digests are kept, a changed kernel's cases are named, and files that are none refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from normcheck.cases.case_line import parsed
from normcheck.compare.bits import digest_of
from normcheck.errors import ExitCode
from tests.command_line import Cli, Done

KERNEL = """
import torch

def rmsnorm(x, weight, eps):
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * rstd * weight.float()).to(x.dtype)
"""
IN_LONG_ROWS = KERNEL.replace(
    "return (wide * rstd * weight.float())",
    "return (wide * (rstd * weight.float()) if x.shape[-1] > 1000 else wide * rstd * weight.float())",
)
UNSTEADY = "import time\n" + KERNEL.replace("return (wide", "return (time.perf_counter_ns() * wide")
OF_ANOTHER_OP = "layernorm fp32 M=1 N=1 eps=1e-05 rows=normal dy=normal layout=contiguous seed=1"
FEW = ("--dtype", "fp32", "--device", "cpu", "--max-examples", "12")


def bits(cli: Cli, source: str, *words: str) -> Done:
    Path("my_kernel.py").write_text(source, encoding="utf-8")
    return cli("baseline", "bits", "--impl", "my_kernel.py", *FEW, *words)


def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("bits.json").read_text(encoding="ascii"))
    return found


@pytest.mark.slow
def test_a_changed_kernel_is_told_from_the_same_one(cli: Cli) -> None:
    done = bits(cli, KERNEL, "--out", "bits.json")
    assert (done.code, done.last) == (0, "kept  rmsnorm my_kernel.py:rmsnorm fp32: 12 cases"), done.err
    (cell,) = kept()["cells"]
    assert kept()["schema"] == "normcheck-bits/1" and {"torch", "device"} <= kept()["environment"].keys()
    assert len(cell["cases"]) == 12 and all(set(each) == {"y", "dx", "dw"} for each in cell["cases"].values())
    same = bits(cli, KERNEL, "--against", "bits.json")
    assert (same.code, same.last) == (0, "SAME BITS  1 of 1 cell compared")
    other = bits(cli, IN_LONG_ROWS, "--against", "bits.json")
    assert (other.code, other.last) == (ExitCode.FOUND, "DIFFERENT  1 of 1 cell compared")
    named = re.findall(r"^ +[\w, ]*\b(?:y|dx|dw): (rmsnorm fp32 .*)$", other.out, re.MULTILINE)
    assert len(named) > 1 and set(named) == {line for line in cell["cases"] if parsed(line).N > 1000}
    sizes = [parsed(line).M * parsed(line).N for line in named]
    assert sizes == sorted(sizes)
    refused = bits(cli, KERNEL, "--out", "bits.json")
    assert refused.code == ExitCode.USAGE and "expected a new file" in refused.err


def test_what_differs_from_run_to_run_is_said_to(cli: Cli) -> None:
    assert bits(cli, UNSTEADY, "--out", "bits.json", "--max-examples", "3").code == 0
    done = bits(cli, UNSTEADY, "--against", "bits.json")
    assert (done.code, done.out.count("(from run to run too: y, dx, dw)")) == (ExitCode.FOUND, 3)
    done = bits(cli, KERNEL, "--against", "bits.json")
    assert done.code == ExitCode.FOUND and "from run to run" not in done.out


def test_a_cell_that_is_not_here_and_versions_that_moved(cli: Cli) -> None:
    assert bits(cli, KERNEL, "--out", "bits.json", "--max-examples", "2").code == 0
    changed = kept()
    changed["environment"]["torch"] = "1.13"
    changed["cells"][0]["implementation"] = "another"
    Path("bits.json").write_text(json.dumps(changed), encoding="ascii")
    done = bits(cli, KERNEL, "--against", "bits.json")
    assert done.code == ExitCode.NOTHING
    assert "not compared: rmsnorm another fp32" in done.out and "torch: 1.13 when it was kept" in done.out


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema": "normcheck-report/1"}, "expected normcheck-bits/1"),
        ({"cells": [{"op": "rmsnorm"}]}, "cells"),
        (
            {"cells": [{"op": "rmsnorm", "implementation": "a", "dtype": "fp32", "cases": {OF_ANOTHER_OP: {}}}]},
            "expected one of rmsnorm fp32",
        ),
    ],
)
def test_a_file_that_is_none(change: dict[str, Any], complaint: str, cli: Cli) -> None:
    whole = {"schema": "normcheck-bits/1", "environment": {}, "cells": []}
    Path("bits.json").write_text(json.dumps({**whole, **change}), encoding="ascii")
    done = bits(cli, KERNEL, "--against", "bits.json")
    assert done.code == ExitCode.USAGE and complaint in done.err and done.err.count("\n") == 1
    assert bits(cli, KERNEL).code == ExitCode.USAGE  # neither --out nor --against


def test_a_digest_is_of_bits() -> None:
    one = torch.tensor([1.0, 0.0, torch.nan])
    assert digest_of(one) == digest_of(one.clone().reshape(1, 3))
    assert digest_of(one) == digest_of(torch.tensor([1.0, 0.0, -torch.nan]))
    others = (one.half(), torch.tensor([1.0, -0.0, torch.nan]), one[:2], torch.nextafter(one, one + 1))
    assert len({digest_of(one), *map(digest_of, others)}) == 5
    codes = torch.tensor([1.0, -0.5]).to(torch.float8_e4m3fn)
    assert digest_of(codes) != digest_of(codes.to(torch.float8_e5m2))
