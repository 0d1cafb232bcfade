"""Runs made by hand, for the tests of the reports: every status, every kind, and strings that mean harm."""

from __future__ import annotations

import math
from dataclasses import replace

from normcheck.result import KINDS, Coverage, Finding, SweepResult, Term, Uncheckable, Verdict, Where, Worst

CASE = "rmsnorm fp16 M=3 N=129 eps=1e-05 rows=offset dy=normal layout=contiguous seed=17"
HOSTILE = "[red]x[/] \x1b[31mred\x1b[0m \r\n\x07\u202egnp.exe [link=https://example.org]y[/link] :boom: \\[b] \udc80"
ENVIRONMENT = {"python": "3.12.3", "torch": "2.9.0", "triton": "3.5.0", "device": "cpu"}


def worst(ratio: float, **changes: object) -> Worst:
    return replace(Worst(ratio=ratio, max_abs=ratio * 3e-4, max_ulp=0.5, case=CASE), **changes)  # type: ignore[arg-type]


def verdict(**changes: object) -> Verdict:
    """A cell that passed."""
    plain = Verdict(
        op="rmsnorm",
        implementation="triton",
        dtype="bf16",
        device="cpu",
        status="pass",
        cases=200,
        seconds=2.06,
        worst={"y": worst(0.9994), "rstd": worst(0.31), "dx": worst(0.724)},
        spread={"M": {"1": 0.2, "32": 0.999}, "N": {"64": 0.7, "4096": 0.999}, "eps": {"1e-05": 0.999}},
    )
    changed = replace(plain, **changes)  # type: ignore[arg-type]
    return changed if "shapes" in changes else replace(changed, shapes=min(38, changed.cases))


def where() -> Where:
    """An output of 3 x 129 whose last column is wrong."""
    row = (0.0,) * 43
    ratios = ((0.4,) * 43, (0.02,) * 43, (*row[:-1], 3.05))
    summary = "only column 128 of 129, row 2"
    return Where(rows=3, columns=129, grid=(row, row, (*row[:-1], 1 / 3)), summary=summary, ratios=ratios)


TERMS = {"store": 1.5e-4, "rstd": 3.2e-5, "c1": 1.1e-5, "c2": 4e-6, "ops": 2e-6, "underflow": 1e-6}


def finding(**changes: object) -> Finding:
    """A gradient that is wrong at the end of a row."""
    plain = Finding(
        kind="mismatch",
        output="dx",
        case=CASE,
        message="",
        reproduce=f"normcheck repro mine.py '{CASE}'",
        check="given the reference's statistics",
        index=(2, 128),
        actual=1.2353515625,
        expected=1.23596,
        error=6.1e-4,
        bound=2.0e-4,
        ratio=3.05,
        max_ulp=12.4,
        mismatched=3,
        numel=387,
        terms=tuple(Term(name=name, value=value) for name, value in TERMS.items()),
        where=where(),
        also=("dw", "y"),
        advice="The last column of an odd N is wrong: look at the mask of the last block.",
        explain=f"normcheck tolerances --impl mine.py --device cpu --output dx --at 2,128 --explain '{CASE}'",
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def exception(**changes: object) -> Finding:
    """An implementation that raised."""
    plain = Finding(
        kind="exception",
        output="",
        case=CASE,
        message="RuntimeError: shared memory, Required: 232448, Hardware limit: 101376",
        reproduce=f"normcheck repro mine.py '{CASE}'",
        traceback=(
            "Traceback (most recent call last):\n",
            *(f'  File "mine.py", line {line}, in forward\n    step_{line}(x)\n' for line in range(10, 16)),
            "RuntimeError: shared memory, Required: 232448, Hardware limit: 101376\n",
        ),
        line=15,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def failed(failure: Finding, **changes: object) -> Verdict:
    """A cell that failed."""
    plain = verdict(implementation="mine.py", dtype="fp16", status="fail", cases=37, worst={"y": worst(0.8)})
    plain = replace(plain, file="kernels/mine.py", line=12)
    if failure.ratio is not None and failure.output:
        plain = replace(plain, worst={**plain.worst, failure.output: worst(failure.ratio)})
    changed = replace(plain, failure=failure, **changes)  # type: ignore[arg-type]
    return changed if "shapes" in changes else replace(changed, shapes=min(9, changed.cases))


def skipped(**changes: object) -> Verdict:
    """A cell that could not run here."""
    plain = Verdict(
        op="rmsnorm",
        implementation="cudnn",
        dtype="bf16",
        device="cpu",
        status="skip",
        detail="no CUDA device",
        shapes=0,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def run(*verdicts: Verdict, **changes: object) -> SweepResult:
    plain = SweepResult(
        argv=("verify", "--impl", "mine.py"),
        seed=0,
        profile="quick",
        seconds=12.34,
        environment=ENVIRONMENT,
        verdicts=verdicts,
        status="pass",
        exit_code=0,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def passing() -> SweepResult:
    """Three ops, one with everything a reader of a pass must know, and skips."""
    return run(
        verdict(cases=1284, shapes=212),
        verdict(
            op="layernorm_relu_bitmask",
            dtype="fp16",
            worst={"y": worst(0.5), "bitmask": worst(0.99996)},
            not_returned=("mean", "rstd"),
            uncheckable={"y": Uncheckable(count=12, total=40_000), "dx": Uncheckable(count=0, total=40_000)},
            skipped={"N must be a multiple of 8": 27},
            notes=("y is judged with bounds 1.7 times wider, because the kernel declares y_form=folded.",),
            model={"y_form": "folded"},
            undeclared={"y": worst(1.7), "bitmask": worst(0.5)},
        ),
        verdict(op="layernorm_zero_centered", dtype="fp32", seconds=0.061, worst={"db": worst(0.0123)}),
        skipped(),
        skipped(dtype="fp16"),
        skipped(op="layernorm", implementation="quack", detail="quack is not installed (pip install quack-kernels)"),
    )


def failing() -> SweepResult:
    """A wrong gradient, an exception, and cells that passed."""
    return run(
        verdict(),
        failed(finding()),
        failed(exception(), dtype="fp32", cases=1, worst={}),
        skipped(),
        status="fail",
        exit_code=1,
        messages=("known failure 'rmsnorm cudnn fp16 dw' matches nothing any more: remove it",),
    )


def nothing() -> SweepResult:
    return run(skipped(), skipped(dtype="fp16"), status="nothing", exit_code=5, seconds=0.2)


def required() -> SweepResult:
    """A required implementation did not run; others did."""
    message = "required=cudnn did not run: no CUDA device"
    return run(verdict(), skipped(), status="nothing", exit_code=5, messages=(message,))


THIN = (
    "core not finished, 60 s are allowed, about 260 s for all: no M above 63, no N above 4096, "
    "880 pairs of values that belong together"
)


def thin_cell(**changes: object) -> Verdict:
    """A cell that did not get through its core."""
    core = Coverage(planned=280, run=31, missed=("no M above 63",), building=41.5, limit="time")
    plain = verdict(status="thin", detail=THIN, cases=31, shapes=6, seconds=60.2, core=core)
    return replace(plain, file="kernels/mine.py", line=30, **changes)  # type: ignore[arg-type]


def thin() -> SweepResult:
    """A thin cell, which is allowed."""
    return run(verdict(dtype="fp16"), thin_cell(), verdict(dtype="fp32", cases=61, shapes=4))


def too_few() -> SweepResult:
    """A cell passed with fewer cases than are required of it, and another is thin."""
    messages = (
        "triton rmsnorm bf16 is thin: core not finished; choose --profile ci, whose core has more time, or let it pass "
        "by --allow-thin",
        "too few cases: triton rmsnorm fp32 judged 61 on 4 shapes, 100 are required; give it more time "
        "(--time-budget), or choose a larger --profile",
    )
    few = verdict(dtype="fp32", cases=61, shapes=4, status="thin", detail="61 of 100 required cases were judged")
    return run(*thin().verdicts[:2], few, status="nothing", exit_code=5, messages=messages, required=("triton:100",))


def errors() -> SweepResult:
    detail = "MemoryError: the reference of M=65536 N=65536 needs 96 GiB"
    return run(
        verdict(), verdict(status="error", cases=0, worst={}, dtype="fp32", detail=detail), status="error", exit_code=3
    )


def incomplete() -> SweepResult:
    return run(verdict(), complete=False, exit_code=130)


def incomplete_failing() -> SweepResult:
    return run(verdict(), failed(finding()), status="fail", complete=False, exit_code=130)


def known() -> SweepResult:
    """A failed cell that the gate knows."""
    return run(verdict(), failed(finding(where=None), known="dx loses its last column, https://example.org/issues/7"))


def kinds() -> SweepResult:
    """Each kind of finding once, with as little known of it as there may be."""
    bare = (Finding(kind=kind, output="y", case=CASE, message="", reproduce="normcheck repro a b") for kind in KINDS)
    return run(*(failed(each, dtype=f"k{i}") for i, each in enumerate(bare)), status="fail", exit_code=1)


def large() -> SweepResult:
    """10,000 cases in 200 cells, of which 50 failed."""
    cells = []
    for number in range(200):
        name, dtype = f"mine_{number // 3}", ("fp16", "bf16", "fp32")[number % 3]
        if number % 4:
            cells.append(verdict(implementation=name, dtype=dtype, cases=50, notes=("measured on a CPU.",)))
        else:
            failure = exception() if number % 8 else finding(ratio=3.0 + number)
            cells.append(failed(failure, implementation=name, dtype=dtype, cases=50, line=number + 1))
    return run(*cells, status="fail", exit_code=1)


def nonfinite() -> SweepResult:
    """Numbers that JSON does not have."""
    nan, inf = math.nan, math.inf
    failure = finding(kind="non_finite", actual=nan, expected=-inf, error=nan, ratio=nan, bound=inf, max_ulp=None)
    worst_nan = {"dx": worst(math.nan, max_abs=math.inf), "y": worst(7.0)}
    return run(failed(failure, worst=worst_nan), status="fail", exit_code=1)


def hostile() -> SweepResult:
    """Everything that may be foreign is."""
    failure = Finding(
        kind="exception",
        output=HOSTILE,
        case=HOSTILE,
        message=HOSTILE + "x" * 1_000_000,
        reproduce="normcheck repro '[red]x[/].py' 'a case'",
        check=HOSTILE,
        terms=(Term(name=HOSTILE, value=1.0),),
        bound=1.0,
        where=Where(rows=1, columns=2, grid=((1.0, math.nan),), summary=HOSTILE),
        also=(HOSTILE,),
        traceback=(HOSTILE * 1000,) * 50,
        advice=HOSTILE,
        cause=HOSTILE,
    )
    cell = failed(failure, op=HOSTILE, implementation=HOSTILE, dtype=HOSTILE, worst={HOSTILE: worst(2.0)})
    noted = verdict(
        implementation=HOSTILE * 100,
        notes=(HOSTILE * 1000,),
        not_returned=(HOSTILE,),
        skipped={HOSTILE: 1},
        model={HOSTILE: HOSTILE},
        undeclared={HOSTILE: worst(2.0)},
        uncheckable={HOSTILE: Uncheckable(count=1, total=2)},
    )
    thin = verdict(
        status="thin",
        detail=HOSTILE * 1000,
        core=Coverage(planned=2, run=1, missed=(HOSTILE * 1000,), left_out=HOSTILE * 1000),
    )
    return run(
        cell,
        noted,
        thin,
        skipped(detail=HOSTILE),
        verdict(status="error", detail=HOSTILE, cases=0),
        status="fail",
        exit_code=1,
        messages=(HOSTILE * 10_000,),
        environment={"device": HOSTILE},
    )


RUNS = {
    "pass": passing,
    "fail": failing,
    "nothing": nothing,
    "required": required,
    "thin": thin,
    "too_few": too_few,
    "error": errors,
    "incomplete": incomplete,
    "incomplete_fail": incomplete_failing,
    "known": known,
    "kinds": kinds,
    "nonfinite": nonfinite,
}
"""Name -> run; each has its expected text in golden/reports."""
