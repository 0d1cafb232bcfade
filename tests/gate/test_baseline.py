"""Baselines: what is drift and what is noise, what cannot be compared, and files that are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from normcheck.circumstances import Ran
from normcheck.errors import UsageError
from normcheck.gate.baseline import FLOOR, document, drifted, read, remarks, text_of
from normcheck.gate.decision import Terms, concluded
from normcheck.gate.options import VerifyOptions
from normcheck.options import built
from normcheck.result import SweepResult, Verdict, Worst
from tests.sample_runs import CASE, failed, finding, run, skipped, verdict

MEANT = "if that is meant, make the baseline anew"
BUDGET = {"max_examples": 300.0, "seconds": 4.0}

MEANT = "if it is meant: normcheck baseline make"


def cell(ratio: float, ulp: float, case: str = CASE, **changes: object) -> Verdict:
    return verdict(worst={"dx": Worst(ratio=ratio, max_abs=1e-3, max_ulp=ulp, case=case)}, **changes)


def made(folder: Path, *verdicts: Verdict, **changes: object) -> str:
    path = folder / "baseline.json"
    path.write_text(text_of([("report.json", run(*verdicts, budget=BUDGET, **changes))]), encoding="utf-8")
    return str(path)


OTHER = CASE.replace("M=3", "M=4")
DRIFT = {  # (ratio, ulp) then and now, whether the worst case is the same
    ((0.3, 1.0), (0.61, 2.1), True): True,
    ((0.3, 1.0), (0.59, 9.0), True): False,  # less than twice the ratio
    ((0.3, 1.0), (0.61, 1.9), True): False,  # less than an ulp more
    ((0.3, 9.0), (0.61, 1.0), False): True,  # ulps of another case say nothing
    ((0.3, 9.0), (0.59, 99.0), False): False,
    ((0.01, 0.0), (FLOOR, 99.0), False): False,  # noise, far from the bound
    ((0.01, 0.0), (0.11, 9.0), True): True,
    ((0.3, 1.0), (0.3, 1.0), True): False,
    ((0.9, 1.0), (0.1, 0.1), True): False,  # better
    ((0.0, 0.0), (0.2, 3.0), True): True,
}


@pytest.mark.parametrize(("then", "now", "same"), DRIFT)
def test_what_is_drift(tmp_path: Path, then: tuple[float, float], now: tuple[float, float], same: bool) -> None:
    baseline = read(made(tmp_path, cell(*then)))
    messages = drifted(baseline, [cell(*now, CASE if same else OTHER)])
    assert len(messages) == DRIFT[then, now, same]
    here = run(cell(*now, CASE if same else OTHER), budget=BUDGET)
    assert concluded(here, Terms(baseline=baseline)).exit_code == int(DRIFT[then, now, same])
    assert concluded(here, Terms(baseline=baseline, shard=True)).exit_code == 0


def test_the_limits_can_be_set_and_the_message_says_what_moved(tmp_path: Path) -> None:
    path = made(tmp_path, cell(0.3, 1.0))
    now = [cell(0.45, 1.6)]
    assert drifted(read(path), now) == ()
    assert drifted(read(path, ratio=1.4), now) == ()
    assert drifted(read(path, ratio=1.4, ulp=0.5), now) == (
        f"drift from {path}: rmsnorm triton bf16 dx: worst ratio 0.3 to 0.45, 1 to 1.6 ulp; {CASE}; {MEANT}",
    )
    for limit in ({"ratio": 0.5}, {"ratio": float("nan")}, {"ulp": -1.0}, {"ulp": float("inf")}):
        with pytest.raises(UsageError, match="drift_"):
            built(VerifyOptions, {f"drift_{name}": value for name, value in limit.items()})


def test_an_output_that_is_not_returned_any_more(tmp_path: Path) -> None:
    baseline = read(made(tmp_path, verdict()))
    lost = replace(verdict(), worst={"y": verdict().worst["y"], "dx": verdict().worst["dx"]})
    assert drifted(baseline, [lost]) == (
        f"drift from {baseline.file}: rmsnorm triton bf16 rstd was checked then, and is not now; {MEANT}",
    )
    assert drifted(baseline, [failed(finding(), implementation="triton", dtype="bf16")]) == ()
    assert drifted(baseline, [replace(verdict(), device="cuda")]) == ()


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    baseline = read(made(tmp_path, verdict(), verdict(dtype="fp16")))

    def said(here: SweepResult, part: bool = False) -> tuple[str, ...]:
        return tuple(text.removeprefix(f"{baseline.file}: ") for text in remarks(baseline, here, part=part))

    both = (verdict(), verdict(dtype="fp16"))
    assert said(run(*both, budget=BUDGET)) == ()
    assert said(run(verdict(), budget=BUDGET)) == ("in it, and not checked now: rmsnorm triton fp16 cpu",)
    assert said(run(verdict(), budget=BUDGET), part=True) == ()
    assert said(run(*both, verdict(dtype="fp32"), skipped(), budget=BUDGET)) == (
        "not in it, so that no drift would show: rmsnorm triton fp32 cpu",
    )
    assert said(run(*both, budget=BUDGET, seed=3)) == (
        "made with seed=0 (now 3), so that a drift may be that of other cases or another machine: "
        "rmsnorm triton bf16 cpu, rmsnorm triton fp16 cpu",
    )
    (text,) = said(run(*both, budget=BUDGET | {"max_examples": 9.0}, environment={"device": "H100"}, profile="ci"))
    assert text.startswith("made with profile=quick (now ci), device=cpu (now H100), max_examples=300.0 (now 9.0), so")
    assert said(run(verdict(cases=9), verdict(dtype="fp16"), budget=BUDGET)) == (
        "made with another number of cases than were run now: rmsnorm triton bf16 cpu",
    )
    done = concluded(run(*both, budget=BUDGET, seed=3), Terms(baseline=baseline))
    assert (done.status, len(done.messages)) == ("pass", 1)


def test_a_cell_that_runs_other_kernels_is_told_and_is_no_drift(tmp_path: Path) -> None:
    def launching(name: str) -> Verdict:
        return verdict(ran=(Ran(M=3, N=64, forward=(name,), backward=("bwd",)),))

    baseline = read(made(tmp_path, launching("rms_fused")))
    assert remarks(baseline, run(launching("rms_fused"), budget=BUDGET)) == ()
    (text,) = remarks(baseline, run(launching("vectorized_elementwise"), budget=BUDGET))
    assert text == (
        f"{baseline.file}: rmsnorm triton bf16 cpu runs other kernels now: "
        "forward: rms_fused -> vectorized_elementwise (M=3 N=64)"
    )
    done = concluded(run(launching("other"), budget=BUDGET), Terms(baseline=baseline))
    assert (done.status, len(done.messages)) == ("pass", 1)
    older = json.loads(Path(baseline.file).read_text(encoding="utf-8"))
    del older["cells"][0]["ran"]
    Path(baseline.file).write_text(json.dumps(older), encoding="utf-8")
    assert remarks(read(baseline.file), run(launching("other"), budget=BUDGET)) == ()


def test_what_a_baseline_is_made_of() -> None:
    stored: Any = document([("a", run(verdict(), skipped(), failed(finding(), known="why")))])
    assert [(c["op"], c["implementation"], c["dtype"], c["report"]) for c in stored["cells"]] == [
        ("rmsnorm", "triton", "bf16", 0)
    ]
    two: Any = document([("a", run(verdict())), ("b", run(verdict(dtype="fp16"), seed=2))])
    assert [c["report"] for c in two["cells"]] == [0, 1]
    for runs, expected in (
        ([("a", run(verdict())), ("b", run(verdict()))], "b: rmsnorm triton bf16 cpu is in a as well"),
        ([("a", run(skipped()))], "a: expected a cell that passed"),
        ([("a", run(verdict(), shard="1/2"))], "a: shard=1/2: expected a whole run"),
        ([("a", run(verdict(), complete=False))], "a: complete=False"),
    ):
        with pytest.raises(UsageError) as raised:
            document(runs)
        assert expected in str(raised.value)


WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (lambda d: d.update(schema="normcheck-report/1"), "schema='normcheck-report/1': expected normcheck-baseline/1"),
    (lambda d: d.pop("cells"), "cells is missing"),
    (lambda d: d["cells"][0].update(report=1), "cells[0].report=1: expected the number of one of 1 reports"),
    (lambda d: d["cells"][0].update(op=3), "cells[0].op=3: expected a string"),
    (lambda d: d["cells"].append(d["cells"][0]), "cells[1]: expected each cell once"),
    (lambda d: d["cells"][0]["worst"]["y"].update(ratio="NaN"), "worst.y.ratio='NaN': expected a number >= 0"),
    (lambda d: d["cells"][0]["worst"]["y"].update(ratio=1.5), "worst.y.ratio=1.5: expected at most 1"),
    (lambda d: d["cells"][0]["worst"]["y"].update(max_ulp=-1), "worst.y.max_ulp=-1: expected a number >= 0"),
    (lambda d: d["reports"][0].update(seed="0"), "reports[0].seed='0': expected an integer"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_files_that_are_wrong(tmp_path: Path, number: int) -> None:
    change, expected = WRONG[number]
    path = Path(made(tmp_path, verdict()))
    stored = json.loads(path.read_text(encoding="utf-8"))
    change(stored)
    path.write_text(json.dumps(stored), encoding="utf-8")
    with pytest.raises(UsageError) as raised:
        read(str(path))
    assert str(raised.value).startswith(f"{path}: ")
    assert expected in str(raised.value)
