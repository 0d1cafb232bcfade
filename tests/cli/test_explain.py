"""``normcheck explain``: the page of a kind of finding in the terminal."""

from __future__ import annotations

import re

import pytest

from normcheck.findings import page, summary
from normcheck.result import KINDS
from tests.command_line import Cli


def test_without_a_kind_it_lists_them_all(cli: Cli) -> None:
    done = cli("explain")
    assert done.code == 0
    listed = [line.split(maxsplit=1) for line in done.out.split("\n\n")[0].splitlines()]
    assert listed == [[kind, summary(kind)] for kind in KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_it_prints_a_page_with_its_code_as_it_is_and_no_addresses(kind: str, cli: Cli) -> None:
    done = cli("explain", kind)
    code = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert done.code == 0
    assert code.findall(done.out) == code.findall(page(kind))
    prose = code.sub("", done.out)
    assert ".md)" not in prose and "](" not in prose


@pytest.mark.parametrize("written", ["out-of-bounds-write", "Out_Of_Bounds_Write", "out of bounds write"])
def test_a_kind_may_be_written_otherwise(written: str, cli: Cli) -> None:
    assert cli("explain", written).out == cli("explain", "out_of_bounds_write").out


@pytest.mark.parametrize(
    ("written", "near"),
    [
        ("mismach", "did you mean mismatch?"),
        ("bounds", "did you mean out_of_bounds_read or out_of_bounds_write?"),
        ("repeatable", "did you mean not_repeatable?"),
        ("rmsnorm", "expected one of mismatch, non_finite,"),
        ("\x1b[31m", "expected one of mismatch, non_finite,"),
    ],
)
def test_an_unknown_kind_says_which_are_near(written: str, near: str, cli: Cli) -> None:
    done = cli("explain", written)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("normcheck: kind=") and done.err.count("\n") == 1
    assert near in done.err and "\x1b" not in done.err
