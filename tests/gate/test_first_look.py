"""``list --cases``: every line of its output is a case; what a pass needs and what a kernel builds stand beside it."""

from __future__ import annotations

import re

import pytest

from normcheck.cases.case_line import parsed
from tests.command_line import Cli, Done, KernelFile

KERNEL = """
import time
KNOWN = set()

def rmsnorm(x, weight, eps):
    if x.shape[-1] not in KNOWN:
        KNOWN.add(x.shape[-1])
        SLOWLY
    wide = x.float()
    return (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()).to(x.dtype) * FACTOR
"""


def listed(cli: Cli, *argv: str) -> tuple[Done, str]:
    """What ``list --cases`` says of one cell, and its notes with single blanks."""
    done = cli("list", "--cases", "--op", "rmsnorm", "--dtype", "fp16", "--device", "cpu", *argv)
    assert done.code == 0, done.err
    assert {parsed(line).dtype for line in done.out.splitlines()} == {"fp16"}
    assert max(map(len, done.err.splitlines())) <= 80
    return done, " ".join(done.err.split())


def test_an_op_has_its_must_list_below_its_cases_and_no_prices(cli: Cli) -> None:
    done, notes = listed(cli)
    assert len(done.out.splitlines()) > 300
    assert notes.startswith("rmsnorm fp16, if its kernel builds much floor M of 0; bias none, yes; dy ")
    assert "; layout contiguous, " in notes and "; at least 100 cases on 6 shapes tail M above 64; one row; " in notes
    assert notes.endswith(" several rows of 11 blocks of N")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slowly", "factor", "said"),
    [
        ("pass", "1", r"a call \S+ ms; (builds nothing|.* new \w+ (takes )?0\.0\d+ s( \(\d samples\))?); \d+ cases in"),
        (
            "time.sleep(0.3)",
            "1",
            r"(a new .* 0\.[23]\d* s \(\d+ samples?\)|whatever is new takes 0\.\d+ s); \d+ cases in",
        ),
        ("pass", "1.5", "it fails in rmsnorm fp16 M=5 N=7 "),
    ],
    ids=["builds nothing", "each N", "wrong"],
)
def test_a_kernel_is_looked_at(cli: Cli, kernel_file: KernelFile, slowly: str, factor: str, said: str) -> None:
    file = kernel_file(KERNEL.replace("SLOWLY", slowly).replace("FACTOR", factor))
    _, notes = listed(cli, "--impl", f"{file}:rmsnorm")
    price = notes.partition(" price ")[2]
    assert re.search(said, price), price
