"""Shards: together they run the cases of one sweep, each once, and their reports merged say what one run says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from normcheck.audit.mutants.correct import CONTROLS
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.errors import UsageError
from normcheck.gate import sweep
from normcheck.gate.decision import Terms, decide
from normcheck.gate.plan import PROFILES, Plan, shard_of
from normcheck.gate.shards import merged, one_verdict
from normcheck.gate.tally import derived
from normcheck.oracle.residual import EXACT, IN_WORDS, ROUNDED
from normcheck.oracle.tolerances import table
from normcheck.result import Steadiness, SweepResult, Uncheckable, Vacuity, Verdict
from tests.sample_runs import failed, finding, run, skipped, verdict, worst

MOST = 390
"""Beyond the core and the large cases, into what Hypothesis draws."""

OPENING = 30
"""At most so many cases open a core: every shard runs them, to see what is refused, and counts its own."""


def drawn(monkeypatch: pytest.MonkeyPatch, shard: tuple[int, int]) -> list[tuple[str, object]]:
    """The cases that a sweep runs, with what the probes are asked, in their order."""
    seen: list[tuple[str, object]] = []

    def note(cell: Any, case: Any, plan: Any, ask: Ask) -> Result:
        seen.append((str(case), ask.depth))
        return Result(case, table().model)

    monkeypatch.setattr(sweep, "run_surely", note)
    monkeypatch.setattr(sweep, "_first_again", lambda *_: [])
    implementation = next(i for i in CONTROLS if i.op == "rmsnorm")
    cell = Cell(OPS["rmsnorm"], implementation, "fp16", "tests")
    profile = replace(PROFILES["quick"], max_examples=MOST, seconds=86400.0)
    sweep.run_cell(cell, Plan((cell,), profile, 0, "cpu", 60.0, shard), lambda cases, worst: None)
    return seen


@pytest.mark.slow
def test_no_overlap_and_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three shards, and of the first and last ones of more than open a core."""
    whole = drawn(monkeypatch, (1, 1))
    assert len(whole) == MOST
    for number, shards in ((1, 3), (2, 3), (3, 3), (1, 50), (50, 50)):
        own, part = whole[number - 1 :: shards], drawn(monkeypatch, (number, shards))
        assert [case for case in part if case in own] == own
        assert {case for case in part if case not in own} <= set(whole[:OPENING])


@pytest.mark.parametrize("text", ["0/3", "4/3", "1/0", "1", "1/3/5", "-1/3", "1/10000", "a/b", "1 / 3", "٣/٣", "1/31"])
def test_shards_that_are_none(text: str) -> None:
    profile = replace(PROFILES["quick"], max_examples=30)
    with pytest.raises(UsageError, match="shard="):
        shard_of(text, profile)
    assert shard_of("30/30", profile) == (30, 30)
    assert shard_of("", profile) == (1, 1)


def of(*parts: Verdict, **changes: object) -> list[tuple[str, SweepResult]]:
    count = len(parts)
    return [(f"{k}.json", run(part, shard=f"{k}/{count}", **changes)) for k, part in enumerate(parts, 1)]


def joined(*parts: Verdict) -> Verdict:
    (cell,) = merged(of(*parts)).verdicts
    return cell


def test_counts_are_summed_and_the_worst_is_kept() -> None:
    one = verdict(
        cases=3,
        seconds=1.0,
        worst={"y": worst(0.5), "dx": worst(0.95)},
        skipped={"a": 1, "b": 2},
        not_returned=("mean", "dw"),
        uncheckable={"y": Uncheckable(count=1, total=10)},
        repeats={"y": Steadiness(differ=1, cases=2)},
        invariance={"y": Steadiness(differ=0, cases=2)},
        model={"y_form": "folded"},
        notes=("n1", "n2"),
    )
    two = verdict(
        cases=4,
        seconds=2.0,
        worst={"y": worst(0.7), "dx": worst(0.9), "dw": worst(0.1)},
        skipped={"b": 3},
        not_returned=("mean",),
        uncheckable={"y": Uncheckable(count=3, total=10), "dx": Uncheckable(count=0, total=5)},
        repeats={"y": Steadiness(differ=1, cases=4)},
        notes=("n2",),
    )
    cell = joined(one, two)
    assert (cell.cases, cell.seconds, cell.status) == (7, 3.0, "pass")
    assert {name: w.ratio for name, w in cell.worst.items()} == {"y": 0.7, "dx": 0.95, "dw": 0.1}
    assert cell.skipped == {"a": 1, "b": 5}
    assert cell.not_returned == ("mean",)
    assert cell.uncheckable == {"y": Uncheckable(count=4, total=20), "dx": Uncheckable(count=0, total=5)}
    assert cell.repeats == {"y": Steadiness(differ=2, cases=6)}
    assert cell.model == {"y_form": "folded"}
    assert cell.notes == ("n1", "n2", *derived(cell.uncheckable, {}, {}, 7))


def test_of_shapes_there_are_at_least_as_many_as_in_one_shard() -> None:
    """Two shards may have judged the same shapes: their sum would be a lie."""
    assert joined(verdict(cases=9, shapes=5), verdict(cases=7, shapes=6)).shapes == 6
    assert joined(verdict(cases=9, shapes=5), verdict(shapes=None)).shapes == 5
    assert joined(verdict(shapes=None), verdict(shapes=None)).shapes is None
    assert joined(verdict(shapes=4), skipped(implementation="triton")).shapes == 4


@pytest.mark.parametrize("ratio", [float("nan"), float("inf"), 1.5])
def test_a_ratio_that_is_no_pass_is_kept_as_the_worst_and_is_no_pass(ratio: float) -> None:
    odd, wrong = worst(ratio), failed(finding(), worst={"y": worst(ratio)})
    passed = replace(wrong, status="pass", failure=None)
    assert repr(joined(wrong, verdict(implementation="mine.py", dtype="fp16")).worst["y"]) == repr(odd)
    for order in ((passed, verdict(implementation="mine.py", dtype="fp16")), (passed, passed)):
        cell = joined(*order)
        assert (cell.status, cell.failure) == ("error", None)
        assert "status=pass makes no sense: worst.y.ratio=" in cell.detail
        assert decide((cell,), Terms())[:2] == ("error", 3)


def test_a_skip_that_brings_a_ratio_along_makes_no_pass() -> None:
    forged = replace(verdict(), status="skip", detail="why", worst={"y": worst(float("inf"))})
    assert joined(verdict(), forged).status == "error"


def test_notes_on_counts_are_those_of_the_sum() -> None:
    empty = {"dw": Vacuity(zeros=5, total=5, empty=1, checks=1)}
    full = {"dw": Vacuity(zeros=0, total=5, empty=0, checks=1)}
    notes = tuple(derived({}, empty, {}, 9))
    assert len(notes) == 1
    assert joined(verdict(vacuity=empty, notes=notes), verdict(vacuity=full)).notes == ()
    assert joined(verdict(vacuity=empty, notes=notes), verdict(vacuity=empty, notes=notes)).notes == notes


def test_the_first_finding_in_the_order_of_the_cases() -> None:
    late = failed(finding(output="dw"), failed_at=7, known="late")
    early = failed(finding(output="y"), failed_at=4)
    cell = joined(late, early, replace(early, status="pass", failure=None, failed_at=None, cases=9))
    assert (cell.status, cell.failed_at, cell.known, cell.cases) == ("fail", 4, "", 37 + 37 + 9)
    assert cell.failure is not None
    assert cell.failure.output == "y"


STATUSES = {
    ("pass", "skip"): "pass",
    ("pass", "error"): "error",
    ("fail", "error"): "fail",
    ("skip", "skip"): "skip",
    ("error", "skip"): "error",
}


@pytest.mark.parametrize("pair", STATUSES)
def test_statuses(pair: tuple[str, str]) -> None:
    parts = [failed(finding()) if s == "fail" else verdict(status=s, detail=f"why {s}") for s in pair]
    same = [replace(part, op="rmsnorm", implementation="a", dtype="fp16") for part in parts]
    for order in (same, same[::-1]):
        cell = joined(*order)
        assert cell.status == STATUSES[pair]
        if cell.status in ("skip", "error"):
            assert cell.detail == f"why {cell.status}"
    refused = replace(same[0], status="skip", failure=None, skipped={"odd": 2}, detail="odd (2 cases)")
    assert joined(refused, refused).detail == "odd (4 cases)"


def altered(change: Callable[[list[tuple[str, SweepResult]]], Any]) -> list[tuple[str, SweepResult]]:
    runs = of(verdict(), verdict(), verdict(), budget={"max_examples": 9.0}, environment={"torch": "2.9"})
    change(runs)
    return runs


def put(number: int, **changes: object) -> Callable[[list[tuple[str, SweepResult]]], None]:
    def change(runs: list[tuple[str, SweepResult]]) -> None:
        runs[number] = (runs[number][0], replace(runs[number][1], **changes))  # type: ignore[arg-type]

    return change


APART: list[tuple[Callable[[list[tuple[str, SweepResult]]], Any], str]] = [
    (put(1, seed=4), "2.json: seed=4: expected 0, as in 1.json"),
    (put(2, profile="ci"), "3.json: profile=ci: expected quick, as in 1.json"),
    (put(2, budget={"max_examples": 8.0}), "3.json: max_examples=8.0: expected 9.0, as in 1.json"),
    (put(2, environment={"torch": "2.10"}), "3.json: torch=2.10: expected 2.9, as in 1.json"),
    (put(1, shard="1/3"), "2.json: shard=1/3: expected each shard once, 1.json is this one as well"),
    (put(1, shard="2/4"), "2.json: shard=2/4: expected one of 3, as 1.json"),
    (put(1, shard=""), "2.json: shard=none: expected a report of normcheck verify --shard K/N"),
    (put(1, shard="5/3"), "2.json: shard=5/3: expected a report of normcheck verify --shard K/N"),
    (put(1, verdicts=()), "2.json: expected the cells of 1.json; rmsnorm triton bf16 cpu is only in one of them"),
    (put(1, verdicts=(verdict(), skipped())), "2.json: expected the cells of 1.json; rmsnorm cudnn bf16 cpu is only"),
    (lambda runs: runs.pop(), "shard=3/3 is missing: expected a report of each of 3"),
    (lambda runs: runs.pop(0), "shard=1/3 is missing: expected a report of each of 3"),
]


@pytest.mark.parametrize("number", range(len(APART)))
def test_reports_that_do_not_belong_together(number: int) -> None:
    change, expected = APART[number]
    with pytest.raises(UsageError) as raised:
        merged(altered(change))
    assert expected in str(raised.value)
    assert len(merged(altered(lambda runs: runs.reverse())).verdicts) == 1


def test_a_shard_that_was_interrupted() -> None:
    runs = altered(put(1, complete=False, verdicts=()))
    whole = merged(runs)
    assert not whole.complete
    assert [v.cases for v in whole.verdicts] == [400]


def test_a_cell_that_is_there_twice() -> None:
    twice = run(verdict(), verdict(), shard="1/1")
    with pytest.raises(UsageError, match=r"1\.json: expected each cell once, rmsnorm triton bf16 cpu is there 2 times"):
        merged([("1.json", twice)])


def test_parts_that_norm_different_sums_are_no_pass() -> None:
    """A kernel whose sum depends on N may have each of its sums in a shard of its own."""
    parts = [replace(verdict(), status="pass", detail="", notes=(IN_WORDS[how],)) for how in (ROUNDED, EXACT)]
    assert one_verdict(parts[:1] * 2).status == "pass"
    torn = one_verdict(parts)
    assert (torn.status, torn.failure) == ("error", None)
    assert torn.detail.startswith("its parts disagree on what the kernel computes")
    assert all(words in torn.detail for words in (IN_WORDS[ROUNDED], IN_WORDS[EXACT]))
