"""A verdict that makes no sense is an error of normcheck, whatever it says."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from normcheck.gate.sanity import nonsense, sensible
from normcheck.result import Steadiness, Uncheckable, Vacuity, Verdict
from tests.sample_runs import RUNS, exception, failed, finding, skipped, verdict, worst


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
        for cell in RUNS[name]().verdicts:
            assert nonsense(cell) == (), (name, cell)


EDITS = {
    "nothing counts as wrong": "import normcheck.checks.check as c\n"
    "c.Result.wrong, c._wrong_values = property(lambda self: ()), lambda *a: []\n",
    "nothing is compared": "import normcheck.checks.check as c\nc.begin_forward = lambda judge, seen: (tuple, None)\n"
    "c.autograd_checks = lambda *a: c.Gradients()\n",
    "every ratio is NaN": "import dataclasses, math\nimport normcheck.checks.check as c\n"
    "real = c.begin_forward\n"
    "def forward(j, o):\n"
    "    begun, saved = real(j, o)\n"
    "    nan = lambda x: dataclasses.replace(x, comparison=dataclasses.replace(x.comparison, ratio=math.nan))\n"
    "    return lambda: tuple(map(nan, begun())), saved\n"
    "c.begin_forward = forward\n"
    "c.Result.wrong, c._wrong_values = property(lambda self: ()), lambda *a: []\n",
}
"""What somebody may have made of the installed package: each lets a wrong kernel through."""


TWICE = """
import sys
from normcheck.cli.app import main

if __name__ == "__main__":
    for isolation in ("--isolation", "--no-isolation"):
        sys.argv[-1] = isolation
        try:
            main()
        except SystemExit as ended:
            print("exit code", ended.code, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_package_does_not_pass(tmp_path: Path, edit: str) -> None:
    """With a process for the kernel and without one, both times from one Python."""
    (tmp_path / "wrong.py").write_text(
        "def wrong(x, weight, bias, eps):\n    return x * weight * float('nan') + (0 if bias is None else bias)\n"
    )
    (tmp_path / "edited.py").write_text(f"{EDITS[edit]}\n{TWICE}")
    few = ("--dtype", "fp32", "--device", "cpu", "--max-examples", "3", "--isolation")
    command = (sys.executable, "edited.py", "verify", "--impl", "wrong.py:wrong", "--op", "rmsnorm", *few)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    one, other, rest = done.stdout.split("exit code 3\n")
    for said in (one, other):
        for word in ("pass", "thin"):
            assert word.upper() not in said and f"\n{word}" not in f"\n{said}", said
        assert "status=thin makes no sense" in " ".join(said.split()), said  # 3 cases are no core
    assert (rest, done.stderr) == ("", "")
