"""The step that the JSON report has for each cell: what to do, and one command, whatever became of the cell."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest

from normcheck.reports._next import next_step
from normcheck.result import ASLEEP, ELSEWHERE, IMPORT, MEMORY, SweepResult, Verdict
from tests.sample_runs import RUNS, failed, finding, hostile, run, skipped, thin_cell, verdict
from tests.some import some

ASKED = ("verify", "--impl", "my kernels.py", "--report", "json:-")


def step(cell: Verdict, **changes: object) -> tuple[str, str]:
    """What to do, and the command without what was asked anyway."""
    told = next_step(cell, replace(run(cell), argv=ASKED, **changes))  # type: ignore[arg-type]
    asked = shlex.join(("normcheck", *ASKED))
    command = told["command"]
    return told["do"], f"again{command.removeprefix(asked)}" if command.startswith(asked) else command


def test_a_failed_cell_has_its_cause_and_its_line_to_paste() -> None:
    do, command = step(failed(finding(cause="x is upcast twice.")))
    assert command == finding().reproduce
    assert "x is upcast twice" in do and "normcheck explain mismatch" in do and finding().advice.rstrip(".") in do
    assert "only column 128 of 129" in step(failed(finding()))[0]
    assert step(failed(finding(reproduce="")))[1] == "again"
    do, _ = step(failed(finding(), known="issue 7"))
    assert do == "Nothing: a known failure, issue 7"


@pytest.mark.parametrize(
    ("limit", "profile", "command"),
    [
        ("time", "quick", "again --profile ci"),
        ("time", "ci", "again --profile deep"),
        ("time", "deep", "again"),
        ("cases", "quick", "again --max-examples 560"),
        ("data", "quick", "again"),
    ],
)
def test_a_thin_cell_has_the_option_that_it_lacks(limit: str, profile: str, command: str) -> None:
    core = thin_cell().core
    assert core is not None
    do, found = step(thin_cell(core=replace(core, limit=limit)), profile=profile)
    assert (do.startswith("No fault was found, but not all was checked"), found) == (True, command)


@pytest.mark.parametrize(
    ("error", "command"),
    [(IMPORT, "again"), (ASLEEP, "again"), (MEMORY, "again --workers 1"), ("", "normcheck doctor")],
)
def test_a_cell_that_was_not_judged(error: str, command: str) -> None:
    do, found = step(verdict(status="error", detail="it broke", error=error))
    assert (do.startswith("Not judged: it broke; "), found) == (True, command)


def test_what_was_not_run() -> None:
    assert step(skipped(detail=ELSEWHERE)) == ("Nothing: another shard judges it.", "")
    assert step(skipped())[1] == "normcheck doctor"
    assert step(skipped(file="mine.py"))[1] == ""


def test_a_pass_ends_or_asks_for_more_once() -> None:
    assert step(verdict()) == ("Nothing is wrong. Before a merge run the profile ci once.", "again --profile ci")
    assert step(verdict(), profile="ci") == ("Nothing: it passed all of the profile ci.", "")
    assert step(verdict(not_returned=("dx",)), profile="ci")[0].endswith("y had no graph, or the backward refused.")


@pytest.mark.parametrize("a_run", [*(make() for make in RUNS.values()), hostile()])
def test_every_cell_of_every_run_has_one_step_in_one_line(a_run: SweepResult) -> None:
    for cell in some(a_run.verdicts):
        told = next_step(cell, replace(a_run, argv=()))  # made in Python: no command line to run again
        assert set(told) == {"do", "command"} and told["do"] and len(told["do"]) < 4000
        assert told["do"].isprintable() and not told["command"].startswith("normcheck verify")
