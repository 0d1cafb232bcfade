"""A verdict that makes no sense is an error of normcheck, whatever it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normcheck.checks import check
from normcheck.gate.sanity import nonsense, sensible
from normcheck.result import Steadiness, Uncheckable, Vacuity, Verdict
from tests.command_line import Cli
from tests.sample_runs import RUNS, exception, failed, finding, skipped, verdict, worst
from tests.some import some


@pytest.mark.parametrize(
    "made",
    [
        verdict(),
        verdict(status="thin", detail="no M above 63"),
        verdict(shapes=None),
        verdict(cases=5, shapes=5),
        verdict(worst={"y": worst(0.0)}),
        verdict(worst={"y": worst(1.0)}, uncheckable={"y": Uncheckable(count=7, total=7)}),
        failed(finding()),
        failed(finding(ratio=math.nan)),
        failed(finding(kind="non_finite", ratio=math.inf)),
        failed(exception(), worst={}, cases=0),
        failed(exception(), known="an issue that is known", failed_at=-1),
        skipped(),
        verdict(status="error", detail="normcheck itself failed", failure=None),
    ],
)
def test_what_makes_sense_stays_as_it_is(made: Verdict) -> None:
    assert nonsense(made) == ()
    assert sensible(made) is made


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (verdict(worst={"y": worst(math.inf)}), "worst.y.ratio=inf: expected 0 to 1"),
        (verdict(worst={"y": worst(0.5), "dx": worst(math.nan)}), "worst.dx.ratio=nan: expected 0 to 1"),
        (verdict(worst={"y": worst(1.0001)}), "worst.y.ratio=1.0001"),
        (verdict(worst={"y": worst(-0.5)}), "worst.y.ratio=-0.5"),
        (verdict(status="thin", worst={"y": worst(math.inf)}), "worst.y.ratio=inf"),
        (verdict(failure=finding()), "failure.kind=mismatch: expected no failure"),
        (verdict(cases=0), "cases=0: expected one at least"),
        (verdict(shapes=0), "shapes=0: expected one at least"),
        (verdict(shapes=201), "shapes=201: expected 0 to 200"),
        (verdict(status="thin"), 'detail="": expected what was not checked'),
        (verdict(cases=-3), "cases=-3: expected 0 or more"),
        (verdict(worst={}), "worst has no output"),
        (verdict(known="it is known"), "known: expected a failure"),
        (verdict(seconds=math.nan), "seconds=nan"),
        (verdict(status="passed"), "expected pass, thin, fail, skip or error"),
        (verdict(status="fail"), "failure=None: expected what failed"),
        (failed(finding(ratio=0.9)), "failure.ratio=0.9: expected more than 1, or NaN"),
        (failed(finding(ratio=None)), "failure.ratio=None"),
        (failed(finding(mismatched=0)), "failure.mismatched=0"),
        (failed(finding(mismatched=388)), "failure.mismatched=388: expected 1 to failure.numel=387"),
        (failed(finding(output="", ratio=None)), 'failure.output=""'),
        (failed(finding(kind="oops")), "failure.kind=oops"),
        (failed(finding(case="")), 'failure.case=""'),
        (skipped(detail=""), 'detail="": expected why'),
        (skipped(failure=finding()), "expected no failure"),
        (verdict(status="error"), 'detail="": expected why'),
        (verdict(uncheckable={"y": Uncheckable(count=8, total=7)}), "uncheckable.y.count=8: expected 0 to 7"),
        (verdict(vacuity={"y": Vacuity(zeros=-1, total=2, empty=0, checks=1)}), "vacuity.y.zeros=-1"),
        (verdict(vacuity={"y": Vacuity(zeros=1, total=2, empty=2, checks=1)}), "vacuity.y.empty=2: expected 0 to 1"),
        (verdict(repeats={"y": Steadiness(differ=3, cases=2)}), "repeats.y.differ=3: expected 0 to 2"),
        (verdict(invariance={"y": Steadiness(differ=0, cases=201)}), "invariance.y.cases=201: expected 0 to 200"),
        (verdict(backward_refused={"no": 201}), "backward_refused=201: expected 0 to 200"),
        (verdict(skipped={"no": 0}), "refused=0: expected 1 or more"),
        (verdict(not_returned=("y",)), "not_returned=y: expected no ratio of it"),
    ],
)
def test_what_makes_none_is_an_error(made: Verdict, says: str) -> None:
    told = sensible(made)
    assert (told.status, told.failure, told.known) == ("error", None, "")
    assert says in told.detail
    assert f"status={made.status} makes no sense" in told.detail
    assert sensible(told).status == "error"
    assert (told.op, told.cases, told.worst) == (made.op, made.cases, made.worst)


def test_a_failure_that_makes_no_sense_is_still_said() -> None:
    assert "(it says: dx is off)" in sensible(failed(finding(ratio=0.5, message="dx is off"))).detail


def test_the_samples_of_the_reports_make_sense() -> None:
    for name in ("pass", "fail", "nothing", "required", "error", "known"):
        for cell in some(RUNS[name]().verdicts):
            assert nonsense(cell) == (), (name, cell)


def with_nan(begin: Callable[..., Any]) -> Callable[..., Any]:
    """The judge of a forward that finds every ratio to be NaN."""

    def forward(judge: Any, outputs: Any) -> Any:
        begun, saved = begin(judge, outputs)
        return lambda: tuple(replace(c, comparison=replace(c.comparison, ratio=math.nan)) for c in begun()), saved

    return forward


NOTHING_IS_WRONG: Mapping[str, Any] = {"Result.wrong": property(lambda self: ()), "_wrong_values": lambda *a: []}
EDITS: Mapping[str, Mapping[str, Any]] = {
    "nothing counts as wrong": NOTHING_IS_WRONG,
    "nothing is compared": {
        "begin_forward": lambda judge, seen: (tuple, None),
        "autograd_checks": lambda *a: check.Gradients(),
    },
    "every ratio is NaN": {**NOTHING_IS_WRONG, "begin_forward": with_nan(check.begin_forward)},
}
"""What somebody may have made of the installed package: each lets a wrong kernel through. Name in check -> value."""


@pytest.mark.slow
@pytest.mark.parametrize("isolation", ["--isolation", "--no-isolation"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_package_does_not_pass(edit: str, isolation: str, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a process for the kernel and without one."""
    for name, value in EDITS[edit].items():
        monkeypatch.setattr(f"normcheck.checks.check.{name}", value)
    Path("wrong.py").write_text(
        "def wrong(x, weight, bias, eps):\n    return x * weight * float('nan') + (0 if bias is None else bias)\n"
    )
    few = ("--dtype", "fp32", "--device", "cpu", "--max-examples", "3", "--no-contexts", isolation)  # they judge anew
    done = cli("verify", "--impl", "wrong.py:wrong", "--op", "rmsnorm", *few)
    assert (done.code, done.err) == (3, "")
    for word in ("pass", "thin"):
        assert word.upper() not in done.out and f"\n{word}" not in f"\n{done.out}", done.out
    assert "status=thin makes no sense" in " ".join(done.out.split()), done.out  # 3 cases are no core
