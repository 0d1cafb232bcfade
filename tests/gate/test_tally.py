"""What the cases of a cell add up to."""

from __future__ import annotations

from dataclasses import replace

from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result, check
from normcheck.checks.observe import Seen
from normcheck.gate.tally import NO_BACKWARD, Tally, derived, empty_outputs, refusals, uncounted
from normcheck.impls import discovery
from normcheck.result import Vacuity, Verdict
from tests.case_lines import case_of

(TORCH,) = (i for i in discovery.implementations()["torch"] if i.op == "rmsnorm")
OP = OPS["rmsnorm"]
SMALL, TALL = (case_of(f"rmsnorm fp32 M={m} N=12 seed={m} bias=none") for m in (2, 16))


def result_of(line: str = "") -> Result:
    return check(TORCH, OP, case_of(line) if line else SMALL, "cpu")


def verdict_of(tally: Tally) -> Verdict:
    bare = uncounted(Cell(OP, TORCH, "fp32", "torch"), "cpu", "skip")
    return tally.verdict(bare, OP, None)


def test_the_worst_case_of_each_output_is_kept() -> None:
    one, other = result_of(str(SMALL)), result_of(str(TALL))
    tally = Tally(one.model)
    tally.add(one)
    tally.add(other)
    ratios = {name: [c.comparison.ratio for r in (one, other) for c in r.checked if c.output == name] for name in "y"}
    verdict = verdict_of(tally)
    assert (verdict.status, verdict.cases, verdict.shapes) == ("pass", 2, 2)
    tally.add(result_of(str(SMALL).replace("seed=2", "seed=3")))
    assert (verdict_of(tally).cases, verdict_of(tally).shapes) == (3, 2)  # other data is no other shape
    assert verdict.worst["y"].ratio == max(ratios["y"]) == tally.floors["y"]
    assert tally.first is one


def test_a_refused_case_counts_as_its_reason_alone() -> None:
    tally = Tally(result_of().model)
    for number in range(30):
        tally.add(replace(result_of(), refused=f"reason {number}"))
    assert (tally.cases, tally.shapes, tally.first) == (0, set(), None)
    assert len(tally.refused) == 21  # the last is for all others
    assert tally.refused["other reasons"] == 10
    skipped = tally.skipped(verdict_of(tally), "nobody asked")
    assert skipped.status == "skip" and skipped.detail.startswith("reason 0 (1 cases); ")
    assert Tally(result_of().model).skipped(verdict_of(tally), "nobody asked").detail == "nobody asked"


def test_special_values_are_not_uncheckable() -> None:
    tally = Tally(result_of().model)
    tally.add(result_of("rmsnorm fp32 M=5 N=12 rows=nan seed=1 bias=none"))
    assert tally.uncheckable == {}
    tally.add(result_of())
    assert tally.uncheckable["y"] == (0, SMALL.M * SMALL.N)


def test_a_backward_that_never_ran_is_said() -> None:
    tally = Tally(result_of().model)
    tally.add(replace(result_of(), seen=Seen(refused="no engine")))
    assert verdict_of(tally).notes[-1] == f"{NO_BACKWARD}: no engine (1 cases)"
    assert derived({}, {}, {"no engine": 1}, 2) == ["gradients not checked where it was refused: no engine (1 cases)"]
    assert refusals({}) == ""


def test_a_reason_that_several_layouts_have_is_said_once() -> None:
    counts = {"layout=strided: raised E: no": 2, "no engine": 1, "layout=rank3, M=0: raised E: no": 3}
    assert refusals(counts) == "layout=strided or layout=rank3, M=0: raised E: no (5 cases); no engine (1 cases)"


def test_an_output_that_zeros_would_pass_for() -> None:
    known, unknown = (Vacuity(zeros=4, total=8, empty=empty, checks=2) for empty in (1, 2))
    assert empty_outputs({"y": known, "dx": unknown}) == ["dx"]
    assert derived({}, {"dx": unknown}, {}, 2) == ["dx was not checked: zeros in its place would have passed"]
