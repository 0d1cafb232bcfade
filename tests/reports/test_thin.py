"""A thin cell is told from a pass in every format, with how few cases it stands on and what was not reached."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace

import pytest

from normcheck.reports import terminal
from normcheck.reports.report import formats
from normcheck.result import Coverage, SweepResult
from tests.sample_runs import run, thin_cell

WHY = "no M above 63"


def text_of(name: str, a_run: SweepResult) -> str:
    stream = io.StringIO()
    formats()[name].write(a_run, stream)
    text = re.sub("<style>.*</style>", "", stream.getvalue(), flags=re.DOTALL)
    return " ".join(text.replace("%0A", " ").split())


def passed() -> SweepResult:
    """The same cell as a pass, which has no detail."""
    return run(replace(thin_cell(), status="pass", detail=""))


@pytest.mark.slow
@pytest.mark.parametrize("name", formats())
def test_a_thin_cell_says_so_and_why(name: str) -> None:
    told, other = (text_of(name, each) for each in (run(thin_cell()), passed()))
    assert WHY in told
    assert re.search(r"\bthin\b", told.lower())
    if name == "json":
        cell = json.loads(told)["verdicts"][0]
        assert (cell["status"], cell["cases"], cell["shapes"]) == ("thin", 31, 6)
        assert json.loads(other)["verdicts"][0]["status"] == "pass"
        return
    assert "31 cases" in told or "| 31 | 6 |" in told
    assert "6 shapes" in told or "| 31 | 6 |" in told
    assert not re.search(r"\bthin\b", other.lower())


def test_where_a_reader_looks() -> None:
    """A skipped test case, an annotation that warns, a notification that warns, a word in bold, colour aside."""
    assert '<skipped message="thin, 31 cases, 6 shapes: core not finished' in text_of("junit", run(thin_cell()))
    told = text_of("github", run(thin_cell()))
    assert (
        "::warning file=kernels/mine.py,line=30,title=rmsnorm triton bf16%3A thin%2C 31 cases%2C 6 shapes%3A " in told
    )
    (notes,) = (
        each["toolExecutionNotifications"]
        for each in json.loads(text_of("sarif", run(thin_cell())))["runs"][0]["invocations"]
    )
    assert [(note["level"], WHY in note["message"]["text"]) for note in notes] == [("warning", True)]
    assert "| **thin** | `rmsnorm`" in text_of("markdown", run(thin_cell()))


def test_what_a_core_left_out_is_one_line_and_all_of_it_if_that_is_asked_for() -> None:
    left_out = f"a new eps takes 33 s: 103 cases on 9 shapes; left out: no eps {', '.join(map(str, range(40)))}"
    cell = replace(thin_cell(), core=Coverage(planned=9, run=9, left_out=left_out))
    for verbosity, whole in ((0, False), (1, True)):
        stream = io.StringIO()
        terminal.render(run(cell), terminal.console_for(stream, width=80), verbosity=verbosity)
        lines = stream.getvalue().splitlines()
        (start,) = [number for number, line in enumerate(lines) if line.startswith("      a new eps takes 33 s: 103 ")]
        assert ("37, 38, 39" in " ".join(lines)) == whole
        assert lines[start].endswith("...") != whole and max(map(len, lines[:-1])) <= 80
