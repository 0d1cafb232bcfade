# ruff: noqa: E402, E501  (the interpreter is enabled before triton is imported; a fault is one line)
"""The fused judge against the plain one, and faults planted in it: Triton's kernels on a GPU, or interpreted on a CPU,
and those of C.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from normcheck.impls.kernels import interpreter

DEVICE = "cuda" if torch.cuda.is_available() and not interpreter.enabled() else "cpu"
if DEVICE == "cpu":
    interpreter.enable()

from normcheck import c_library
from normcheck.cases.case import NO_WEIGHT, Case
from normcheck.cases.claims import claims_of
from normcheck.cases.core import drawn
from normcheck.cases.dtypes import DTYPES
from normcheck.cases.inputs import make
from normcheck.cases.layouts import CHANNELS_LAST, HEADS, LAYOUTS, OF_ROW_GROUPS, SAMPLES_STRIDED, STRIDED
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import ROOT_FIRST
from normcheck.errors import NormcheckError
from normcheck.gate.plan import PROFILES
from normcheck.impls.implementation import Implementation
from normcheck.oracle import judging
from normcheck.oracle.fused import judge as fused
from normcheck.oracle.fused import launch, on_cpu, trial
from normcheck.oracle.fused.kept import Found
from normcheck.oracle.judge import Judge, judge_of
from normcheck.oracle.judge_backward import judge_gradients
from normcheck.oracle.judge_forward import judge_forward
from normcheck.oracle.tolerances import Model, table
from tests.case_lines import NORMS
from tests.inner_loop import parametrize
from tests.some import some

CLIPS = (-0.5, 2.0)
SMALL = [
    {"M": 3, "N": 7},
    {"M": 1, "N": 1},
    {"M": 20, "N": 40, "rows": "blend", "dy": "correlated"},
    {"M": 2, "N": 600, "rows": "offset", "eps": 1e-12},
    {"M": 3, "N": 40, "rows": "constant", "weights": "probe"},
    {"M": 2, "N": 530, "weight_dtype": "fp32", "dy": "small"},
    {"M": 3, "N": 24, "weights": NO_WEIGHT, "bias": False},
    {"M": 5, "N": 300, "weights": NO_WEIGHT, "dy": "small"},
]


JUDGED = [name for name, op in NORMS.items() if not op.adds_residual]
"""The ops that the fused judge knows."""


MAKES = ["triton"] if DEVICE == "cuda" else ["triton", "c"]
CODE_OF_ITS_OWN = ["layernorm", "layernorm_relu_bitmask", "rmsnorm_llama"]
"""Ops for whose sake a kernel has lines: to centre, to clamp, to round xhat; the others have another number alone."""

EACH = [(make, op) for make in MAKES for op in (CODE_OF_ITS_OWN if len(MAKES) > 1 and make == "triton" else JUDGED)]
"""Kernels and op, where each op takes Triton's interpreter ten seconds: then only those of ``CODE_OF_ITS_OWN``."""

OF_LAST_MAKE = pytest.mark.parametrize("kernels", MAKES[-1:], indirect=True)
"""For what is asked of the trial, whoever's kernels judge: those that are quick here."""


@pytest.fixture(autouse=True, params=MAKES)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whose kernels judge."""
    if DEVICE == "cpu" and request.param == "triton":
        interpret(fused, monkeypatch)
    return str(request.param)


def interpret(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have Triton's kernels of this judge run on a CPU. The interpreter takes as long for a tile of any size."""
    monkeypatch.setattr(module, "SMALL", replace(module.SMALL, rows=32, columns=256, sum_rows=32))
    monkeypatch.setattr(module, "_VECTOR_COLUMNS", 128)
    monkeypatch.setattr(module, "launcher", lambda device: module.on_gpu)


def case_of(op: str, dtype: str, **fields: object) -> Case:
    bias = OPS[op].takes_bias
    return Case(**{"op": op, "dtype": dtype, "options": OPS[op].clips(CLIPS), "bias": bias, "seed": 5} | fields)  # type: ignore[arg-type]


def judge_for(case: Case, model: Model | None = None, **options: object) -> Judge:
    op = OPS[case.op]
    options = {"zeros": True} | options
    return judge_of(op, case, make(case, op, DEVICE), model or table().model, {}, **options)  # type: ignore[arg-type]


def difference(case: Case, model: Model | None = None, *, own_bits: bool = False) -> str:
    op = OPS[case.op]
    judge = judge_for(case, model)
    assert fused.suits(judge)
    return trial.disagreement(judge, trial.right_kernel(op, case, make(case, op, DEVICE)), own_bits=own_bits)


@parametrize(
    ("kernels", "op", "fields"),
    [
        (make, op, fields)
        for make, op, fields in product(MAKES, JUDGED, SMALL)
        if (make, op) in EACH or fields.get("rows") == "blend"
    ],
    indirect=["kernels"],
    ids=str,
    inner=20,
)
def test_both_judges_find_the_same(kernels: str, op: str, fields: dict[str, object]) -> None:
    """A blend in every dtype; interpreted, each in one by turns."""
    turn = (list(OPS).index(op) + SMALL.index(fields)) % len(DTYPES)
    for dtype in some(DTYPES if fields.get("rows") == "blend" and kernels == "c" else DTYPES[turn : turn + 1]):
        assert difference(case_of(op, dtype, **fields)) == ""


@pytest.mark.parametrize(("kernels", "op"), [own for own in EACH if OPS[own[1]].takes_bias], indirect=["kernels"])
def test_both_judges_find_the_same_without_a_bias(op: str) -> None:
    dtype = DTYPES[list(OPS).index(op) % len(DTYPES)]
    assert difference(case_of(op, dtype, M=20, N=40, rows="blend", dy="shifted", bias=False)) == ""


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
def test_with_the_tiles_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if DEVICE == "cpu":
        monkeypatch.setattr(fused, "launcher", lambda device: fused.on_gpu)
    assert difference(case_of("layernorm", "bf16", M=3, N=530)) == ""


@pytest.mark.parametrize("op", ["layernorm", "layernorm_relu_bitmask", "rmsnorm"])
def test_a_subnormal_bias_may_be_read_as_zero(op: str) -> None:
    """Of weights as small, y is nothing else; no case of a sweep has such."""
    case = case_of(op, "fp32", M=3, N=40, weight_dtype="fp32")
    usual = make(case, OPS[op], DEVICE)
    assert usual.bias is not None
    tiny = replace(usual, weight=usual.weight * 2.0**-126, bias=usual.bias * 2.0**-128)
    judge = judge_of(OPS[op], case, tiny, table().model, {}, zeros=True)
    assert trial.disagreement(judge, trial.right_kernel(OPS[op], case, tiny)) == ""


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout not in (CHANNELS_LAST, SAMPLES_STRIDED)])
def test_in_every_layout(layout: str) -> None:
    gap = 3 if layout in STRIDED else 0
    case = case_of("layernorm", "bf16", M=4, N=24, layout=layout, gap=gap)
    if layout in (HEADS, *OF_ROW_GROUPS):  # left to the plain judge: its rows have no stride, or no weight, in common
        assert not fused.suits(judge_for(case))
        return
    assert difference(case) == ""


@parametrize(
    "facts",
    [
        {"y_form": "folded"},
        {"bwd_form": "raw"},
        {"ftz": False, "chain": 8, "variance": "two_pass", "rsqrt_ulp": 1},
        {"y_given_stats": False, "bitmask_compare": "fp32"},
    ],
    ids=str,
    inner=2,
)
@pytest.mark.parametrize("op", ["layernorm", "layernorm_relu_bitmask", "rmsnorm"])
def test_whatever_a_kernel_declares(op: str, facts: dict[str, object]) -> None:
    model = replace(table().model, **facts)  # type: ignore[arg-type]
    assert difference(case_of(op, "bf16", M=5, N=40, rows="shifted"), model) == ""
    assert difference(case_of(op, "fp32", M=5, N=40, rows="shifted"), model) == ""


def test_bits_in_doubt() -> None:
    for dtype in DTYPES:
        case = case_of("layernorm_relu_bitmask", dtype, M=20, N=40, rows="blend", weights="probe")
        assert difference(case, own_bits=True) == ""


@pytest.mark.parametrize(("kernels", "op"), EACH, indirect=["kernels"])
def test_one_wrong_element_of_any_output_is_not_passed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, a row of the trial is one tile; the next test has rows of several."""
    monkeypatch.setattr(fused, "SMALL", replace(fused.SMALL, columns=1024))
    dtype = DTYPES[list(OPS).index(op) % len(DTYPES)]
    judge = judge_for(case_of(op, dtype, M=2, N=8))
    trial.hold(trial.key_of(judge, trial.right_kernel(OPS[op], judge.case, make(judge.case, OPS[op], DEVICE)).outputs))


def with_nan(right: trial.Kernel) -> Iterator[tuple[str, trial.Kernel]]:
    """(output, a kernel whose output has one NaN, in its first element)."""
    for group in ("outputs", "gradients"):
        for name, tensor in getattr(right, group).items():
            if tensor.is_floating_point():
                changed = tensor.clone()
                changed.view(-1)[0] = math.nan
                yield name, replace(right, **{group: {**getattr(right, group), name: changed}})


@pytest.mark.parametrize(("kernels", "op"), EACH, indirect=["kernels"])
def test_a_nan_in_any_output_is_not_passed(op: str) -> None:
    case = case_of(op, "bf16", M=2, N=300)
    for name, kernel in some(with_nan(trial.right_kernel(OPS[op], case, make(case, OPS[op], DEVICE)))):
        assert not trial._passes(judge_for(case), kernel, name)


def test_what_it_does_not_suit(kernels: str) -> None:
    """On a GPU, nor anything that is not finite."""
    case = case_of("layernorm", "fp16", M=3, N=8)
    for fields in ({"eps": 0.0}, {"M": 0}):
        assert not fused.suits(judge_for(replace(case, **fields)))  # type: ignore[arg-type]
    for fields in ({"rows": "nan"}, {"rows": "largest"}, {"dy": "inf"}):
        assert fused.suits(judge_for(replace(case, **fields))) == (kernels == "c")  # type: ignore[arg-type]
    assert not fused.suits(judge_for(case, watch=lambda held: None))


@pytest.mark.parametrize("kernels", ["c"], indirect=True)
@pytest.mark.skipif(DEVICE == "cuda", reason="the kernels of C are tested where there is no GPU")
@parametrize("op", JUDGED, inner=1)
def test_on_a_cpu_what_is_not_finite_is_judged_as_well(op: str) -> None:
    """Rows without a bound, and elements without one, are counted and not compared, as the plain judge does."""
    every = ((5, 40, "fp16"), (1, 1, "bf16"), (2, 600, "fp32"), (23, 7, "bf16"))
    for number, (rows, dy) in enumerate(product(("nan", "inf", "largest", "blend"), ("normal", "nan", "inf"))):
        for m, n, dtype in some(every[(number + JUDGED.index(op)) % 2 :: 2]):
            case = case_of(op, dtype, M=m, N=n, rows=rows, dy=dy)
            assert difference(case) == ""
            assert difference(case, own_bits=True) == ""


def test_an_overflow_of_sums_is_left_to_the_plain_judge(kernels: str) -> None:
    """On a CPU its row has no bound."""
    case = case_of("rmsnorm", "fp32", M=2, N=8)
    inputs = make(case, OPS["rmsnorm"], DEVICE)
    inputs.x[1] = 3e38
    judge = judge_of(OPS["rmsnorm"], case, inputs, table().model, {})
    finish, _ = fused.forward(judge, trial.right_kernel(OPS["rmsnorm"], case, inputs).outputs)
    checked = finish()
    assert (checked is None) == (kernels == "triton")
    if checked is not None:
        assert {c.comparison.uncheckable for c in checked} == {1, 8}


@pytest.fixture
def fused_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused judge judges on this device, whatever it is."""
    monkeypatch.setattr(judging, "can_be_fused", lambda judge, outputs: judge.fused and fused.suits(judge))


@pytest.mark.usefixtures("fused_here")
def test_what_is_wrong_is_judged_by_the_plain_judge() -> None:
    case = case_of("layernorm", "fp16", M=3, N=8)
    op = OPS[case.op]
    right = trial.right_kernel(op, case, make(case, op, DEVICE))
    for name, kernel in some(trial.wrong_kernels(right)):
        for one in (judge_for(case, fused=True), judge_for(case)):
            checked, saved = judging.judge_forward(one, kernel.outputs)
            checked += judging.judge_gradients(one, kernel.gradients, saved, given=True)
            failed = [c for c in checked if not c.comparison.ratio <= 1]
            assert name in {c.output for c in failed}
            assert all(c.comparison.worst is not None and c.comparison.wrong is not None for c in failed)


@pytest.mark.usefixtures("fused_here")
def test_what_passes_is_judged_by_the_fused_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("rmsnorm", "bf16", M=3, N=8)
    op = OPS[case.op]
    right = trial.right_kernel(op, case, make(case, op, DEVICE))
    monkeypatch.setattr(judging, "plain_forward", None)
    monkeypatch.setattr(judging, "plain_gradients", None)
    checked, saved = judging.judge_forward(judge_for(case, fused=True), right.outputs)
    checked += judging.judge_gradients(judge_for(case, fused=True), right.gradients, saved, given=False)
    assert [c.output for c in checked] == ["rstd", "y", "y", "dx", "dw", "db"]


def forget(monkeypatch: pytest.MonkeyPatch, worth: float = 0.0) -> None:
    """No trial was begun; one is after so many seconds of the plain judge, and goes on beside, as on a GPU."""
    monkeypatch.setattr(trial, "_AT_ONCE", ())
    monkeypatch.setattr(trial, "_trials", {})
    monkeypatch.setattr(trial, "_asked", {})
    monkeypatch.setattr(trial, "_WORTH_SECONDS", worth)
    monkeypatch.setattr(trial, "in_crowd", False)


@OF_LAST_MAKE
@pytest.mark.parametrize(("rows", "cases"), [(3, 5), (1 << 20, 2)])
def test_a_trial_begins_once_it_is_worth_its_time(monkeypatch: pytest.MonkeyPatch, rows: int, cases: int) -> None:
    """Every case counts, a large one more."""
    forget(monkeypatch, worth=0.045)
    monkeypatch.setattr(trial, "hold", lambda key: None)
    judge = judge_for(case_of("rmsnorm", "fp16", M=3, N=8))
    judge = replace(judge, case=replace(judge.case, M=rows))
    outputs = {"y": torch.zeros(3, 8, dtype=torch.float16)}
    for _ in range(cases):
        assert not trial._trials
        trial.is_trusted(judge, outputs)
    assert len(trial._trials) == 1


@OF_LAST_MAKE
def test_in_a_crowd_it_begins_later(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    monkeypatch.setattr(trial, "hold", lambda key: None)
    judging.be_in_crowd()
    judge = judge_for(case_of("rmsnorm", "fp16", M=3, N=8))
    trial.is_trusted(judge, {"y": torch.zeros(3, 8, dtype=torch.float16)})
    assert not trial._trials


@OF_LAST_MAKE
def test_on_a_cpu_the_first_case_waits_for_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """So it does not depend on the time who judges a case."""
    forget(monkeypatch)
    monkeypatch.setattr(trial, "_AT_ONCE", (DEVICE,))
    judge = judge_for(case_of("rmsnorm", "fp16", M=3, N=8))
    assert trial.is_trusted(judge, {"y": torch.zeros(3, 8, dtype=torch.float16)})


@OF_LAST_MAKE
def test_a_judge_that_fails_its_trial_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "alike", lambda plain, ours: False)
    forget(monkeypatch)
    judge = judge_for(case_of("rmsnorm", "fp16", M=3, N=8))
    outputs = {"y": torch.zeros(3, 8, dtype=torch.float16)}
    with suppress(NormcheckError):  # the trial may end at once
        trial.is_trusted(judge, outputs)
    (begun,) = trial._trials.values()
    begun.join()
    with pytest.raises(NormcheckError, match="judge=fused differs in y"):
        trial.is_trusted(judge, outputs)


@OF_LAST_MAKE
def test_it_is_trusted_once_its_trial_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch)
    case = case_of("layernorm_relu_bitmask", "fp16", M=3, N=8)
    judge, bits = judge_for(case), torch.zeros(3, 8, dtype=torch.bool)
    outputs = {"y": torch.zeros(3, 8, dtype=torch.float16), "bitmask": bits}
    going_on = threading.Event()
    held = trial.hold
    monkeypatch.setattr(trial, "hold", lambda key: (going_on.wait(), held(key)))
    assert not trial.is_trusted(judge, outputs)
    going_on.set()
    (begun,) = trial._trials.values()
    begun.join()
    assert trial.is_trusted(judge, outputs)


@OF_LAST_MAKE
def test_where_nothing_compiles_it_is_never_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(key: trial.Key) -> None:
        raise RuntimeError("no C compiler")

    forget(monkeypatch)
    monkeypatch.setattr(trial, "hold", no_compiler)
    judge, outputs = judge_for(case_of("rmsnorm", "fp16", M=3, N=8)), {"y": torch.zeros(3, 8)}
    trial.is_trusted(judge, outputs)
    (begun,) = trial._trials.values()
    begun.join()
    assert not trial.is_trusted(judge, outputs)


def ratios_differ(
    case: Case, monkeypatch: pytest.MonkeyPatch, module: ModuleType = fused, tile: tuple[int, int] = (4, 16)
) -> str:
    """How the ratios differ that the fused judge finds alone, without details, as it does of a large case."""
    rows, columns = tile
    monkeypatch.setattr(module, "SMALL", replace(module.SMALL, rows=rows, columns=columns, specialised=True))
    op = OPS[case.op]
    kernel = trial.right_kernel(op, case, make(case, op, DEVICE))
    judge = judge_of(op, case, make(case, op, DEVICE), table().model, dict.fromkeys(ROOT_FIRST, 1.0))
    theirs, saved = judge_forward(judge, kernel.outputs)
    finish, own_saved = module.forward(judge, kernel.outputs)
    ours = finish()
    for given in (False, True):
        theirs += judge_gradients(judge, kernel.gradients, saved, given=given)
        later = module.gradients(judge, kernel.gradients, own_saved, given=given)()
        ours = None if ours is None or later is None else ours + later
    if ours is None:
        return "not passed"
    for one, other in zip(theirs, ours, strict=True):
        if abs(one.comparison.ratio - other.comparison.ratio) > trial.SLIVER * one.comparison.ratio:
            return f"{one.output}, {one.check}: {other.comparison.ratio} in place of {one.comparison.ratio}"
    return ""


@parametrize("turn", range(len(DTYPES)), inner=1)
@pytest.mark.parametrize(("kernels", "op"), EACH, indirect=["kernels"])
def test_ratios_alone_are_the_same(kernels: str, op: str, turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every dtype; interpreted, each kind of case in another one."""
    if DEVICE == "cuda":
        pytest.skip("a small case is not aligned as the specialised kernels expect")
    every = (("blend", "probe", (4, 16)), ("normal", "normal", (4, 16)), ("offset", "small", (1, 8)))
    ahead = JUDGED.index(op)
    for number, (rows, weights, tile) in enumerate(some(every)):
        if kernels == "triton" and DEVICE == "cpu" and number != (turn + ahead) % len(every):
            continue
        case = case_of(op, DTYPES[turn], M=9, N=24, rows=rows, weights=weights, dy="correlated")
        assert ratios_differ(case, monkeypatch, tile=tile) == ""  # (1, 8) fills every tile


FAULTS = {
    "a mask of columns that is one short": ("forward", "columns_of(inside, cols, N, FULL)\n            x = ", "columns_of(inside, cols, N - 1, FULL)\n            x = "),
    "the last row is skipped": ("forward", "inside = rows < M\n", "inside = rows < M - (M > 1)\n"),
    "fp32 for the mean": ("forward", "mean += shift\n", "mean = mean.to(tl.float32).to(tl.float64)\n"),
    "fp32 for the variance": ("forward", "sizes += xc * xc", "sizes += (xc * xc).to(tl.float32).to(tl.float64)"),
    "no error of the mean in y": ("forward", "+ (1 + al) * (1 + (k_y + 1) * u) * d", ""),
    "no error of rstd in y": ("forward", "return (1 + al) * (1 + k_y * u) - 1 + 2.0**-51", "return k_y * u + 2.0**-51"),
    "no room for the bias": ("forward", "before = tl.where(by_add < by_size, by_add, by_size)", "before = before"),
    "a wide bound of y": ("forward", "upper + stored, lower + stored", "2 * (upper + stored), 2 * (lower + stored)"),
    "a store of twice the size": ("formulas", "error = power(a, least) * half", "error = power(a, least) * half * 2"),
    "no tie is certain": ("forward", "doubt & (before == 0)", "doubt & (before < 0)"),
    "twice as much as y's bound is at least": ("forward", "least += power(y, y_least) * y_half", "least += power(y, y_least) * y_half * 2"),
    "no record but the first": ("formulas", "mask & ~(size <= bound * best)", "mask & ~(size <= bound + best)"),
    "fp32 for a sum of dx": ("gradients", "c1_mean = tl.sum(c1, axis=1) * per_n", "c1_mean = tl.sum(c1.to(tl.float32), axis=1) * per_n"),
    "no second mean in dx": ("gradients", "(xh * c1_mean[:, None] + c2_mean[:, None])", "(xh * c1_mean[:, None])"),
    "no roundings of dx": ("gradients", "tl.abs(wd) * per_wd[:, None] + ", ""),
    "dw without its first row": ("gradients", "first = group * group_rows\n", "first = group * group_rows + 1\n"),
    "no sum over rows in the bound of dw": ("gradients", "over_groups(dy_xhat) * number(numbers_ptr, GAM_DW) + ", ""),
    "half of the columns of db": ("gradients", "error = tl.where(keep,", "error = tl.where(keep & (cols % 2 == 0),"),
}  # fmt: skip


FAULTS_OF_C = {
    "a tile that is one short": ("int64_t count = N - start < TILE ? N - start : TILE;\n            const double", "int64_t count = (N - start < TILE ? N - start : TILE) - 1;\n            const double"),
    "the last row is skipped": ("for (int64_t m = 0; m < M; m++) {\n        double sums", "for (int64_t m = 0; m < M - (M > 1); m++) {\n        double sums"),
    "fp32 for the mean": ("mean += shift;", "mean = (float)mean;"),
    "fp32 for the variance": ("sizes[l] += xc * xc;", "sizes[l] += (float)(xc * xc);"),
    "no error of the mean in y": (" + (1 + al) * (1 + (k_y + 1) * u) * d", ""),
    "no error of rstd in y": ("(1 + al) * (1 + k_y * u) - 1 + 0x1p-51", "k_y * u + 0x1p-51"),
    "no room for the bias": ("(by_add < by_size ? by_add : by_size) + b_abs", "before + b_abs"),
    "a wide bound of y": ("o->upper[i] += half;", "o->upper[i] += 2 * half + o->upper[i];"),
    "a store of twice the size": ("double error = power(a, least) * half;", "double error = power(a, least) * half * 2;"),
    "no tie is certain": ("int exact = before == 0;", "int exact = before < 0;"),
    "fp32 for a sum of dx": ("s[i] = of_lanes(lanes[i]) / n;", "s[i] = (float)of_lanes(lanes[i]) / n;"),
    "no second mean in dx": ("(t.xh[i] * c1 + c2)", "(t.xh[i] * c1)"),
    "no roundings of dx": ("fabs(t.wd[i]) * per_wd + per_row", "per_row"),
    "dw without its first row": ("for (int64_t m = 0; m < M; m++) {\n        double *to", "for (int64_t m = 1; m < M; m++) {\n        double *to"),
    "no sum over rows in the bound of dw": ("sum_of(a, size, i) * number[GAM_DW] + sum_of(a, shift, i)", "sum_of(a, shift, i)"),
    "half of the columns of db": ("if (a->db_ptr) {\n            double off", "if (a->db_ptr && i % 2 == 0) {\n            double off"),
    "the largest of one lane": ("for (int l = 1; l < LANES; l++) most = larger", "for (int l = LANES; l < LANES; l++) most = larger"),
    "a row that overflows has bounds": ("const int bounded = size <= number[LIMIT];", "const int bounded = 1;"),
    "a sum over rows has a bound that one of them has not": ("al < INFINITY ? fabs(dy[i]) * xa[i] : INFINITY", "fabs(dy[i]) * xa[i]"),
    "NaN is a bound of nothing": ("return bound < 1e-300 ? 1e-300 : bound;", "return bound > 1e-300 ? bound : 1e-300;"),
    "NaN passes": ("return ratio == ratio ? ratio : INFINITY;", "return ratio == ratio ? ratio : 0;"),
    "fp16's subnormal numbers are 0": ("size * 0x1p-24", "0 * 0x1p-24"),
    "the widest rows begin anew": ("if (N > TILE) terms_of", "if (N > 4 * TILE) terms_of"),
}  # fmt: skip


@pytest.fixture
def modules() -> Iterator[None]:
    """The fused judge's modules are as before after the test."""
    names = ("formulas", "forward", "gradients", "launch", "judge", "trial")  # none keeps anything that others read
    kept = {m.__name__: m for m in (importlib.import_module(f"normcheck.oracle.fused.{name}") for name in names)}
    package = importlib.import_module("normcheck.oracle.fused")
    yield
    for name, module in kept.items():
        sys.modules[name] = module
        setattr(package, name.rpartition(".")[2], module)


@pytest.mark.slow
@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("kernels", ["triton"], indirect=True)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_it_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of few cases, as the trial of a process and the tests above ask them."""
    name, old, new = FAULTS[fault]
    faulty = planted(name, old, new, tmp_path)
    if DEVICE == "cpu":
        own = sys.modules["normcheck.oracle.fused.judge"]
        monkeypatch.setattr(own, "launcher", lambda device: own.on_gpu)
        monkeypatch.setattr(own, "_VECTOR_COLUMNS", 32)
    cases = [
        case_of("layernorm", "fp16", M=5, N=40, rows="blend", weights="probe"),
        case_of("layernorm", "fp32", M=5, N=40, rows="shifted", dy="shifted"),
        case_of("layernorm_relu_bitmask", "fp32", M=9, N=40, weights="probe"),
        case_of("rmsnorm", "bf16", M=33, N=24),
    ]
    for case in cases:
        op = OPS[case.op]
        kernel = trial.right_kernel(op, case, make(case, op, DEVICE))
        if faulty.disagreement(judge_for(case), kernel):
            return
        if ratios_differ(case, monkeypatch, sys.modules["normcheck.oracle.fused.judge"]):
            return
    llama = case_of("rmsnorm_llama", "fp16", M=20, N=40)
    if ratios_differ(llama, monkeypatch, sys.modules["normcheck.oracle.fused.judge"]):
        return
    for case in cases:  # the dearest
        op = OPS[case.op]
        kernel = trial.right_kernel(op, case, make(case, op, DEVICE))
        if any(faulty._passes(judge_for(case), wrong, name) for name, wrong in trial.wrong_kernels(kernel)):
            return
    pytest.fail(f"{fault}: not found")


@pytest.fixture
def c_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """Plants a fault in the C source: what is compiled has it, in a folder of its own, and quickly."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(c_library, "FLAGS", (*c_library.FLAGS, "-O0"))
    right = on_cpu.SOURCE.read_text(encoding="utf-8")

    def plant(old: str, new: str) -> None:
        assert old in right, f"{old!r} is not in {on_cpu.SOURCE.name}"
        faulty = tmp_path / on_cpu.SOURCE.name
        faulty.write_text(right.replace(old, new, 1), encoding="utf-8")
        monkeypatch.setattr(on_cpu, "SOURCE", faulty)
        assert on_cpu.works()

    return plant


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["c"], indirect=True)
@pytest.mark.parametrize("fault", FAULTS_OF_C)
@pytest.mark.skipif(DEVICE == "cuda", reason="the kernels of C are tested where there is no GPU")
def test_a_fault_in_c_is_found(fault: str, c_source: Callable[[str, str], None]) -> None:
    c_source(*FAULTS_OF_C[fault])
    cases = [
        case_of("layernorm", "fp16", M=5, N=40, rows="blend", weights="probe"),
        case_of("layernorm", "fp32", M=5, N=40, rows="shifted", dy="shifted"),
        case_of("layernorm", "fp16", M=20, N=300, rows="subnormal", eps=1e-8),
        case_of("layernorm_relu_bitmask", "fp32", M=9, N=40, weights="probe"),
        case_of("rmsnorm", "bf16", M=33, N=600),
        case_of("layernorm", "bf16", M=3, N=1, rows="largest"),
    ]
    for case in cases:
        op = OPS[case.op]
        kernel = trial.right_kernel(op, case, make(case, op, DEVICE))
        if trial.disagreement(judge_for(case), kernel):
            return
        if case.rows == "largest":  # its outputs may be NaN
            continue
        if any(trial._passes(judge_for(case), wrong, name) for name, wrong in with_nan(kernel)):
            return
        if any(trial._passes(judge_for(case), wrong, name) for name, wrong in trial.wrong_kernels(kernel)):
            return
    pytest.fail(f"{fault}: not found")


def planted(name: str, old: str, new: str, folder: Path) -> ModuleType:
    """The trial of a fused judge with this fault in its source."""
    package = importlib.import_module("normcheck.oracle.fused")
    path = Path(str(package.__file__)).with_name(f"{name}.py")
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{old!r} is not in {path.name}"
    for module in ("formulas", "forward", "gradients", "launch", "judge", "trial"):
        full = f"normcheck.oracle.fused.{module}"
        copy = folder / f"{module}.py"
        source = Path(str(package.__file__)).with_name(f"{module}.py").read_text(encoding="utf-8")
        copy.write_text(source.replace(old, new, 1) if module == name else source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(full, copy)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        sys.modules[full] = loaded
        setattr(package, module, loaded)
        spec.loader.exec_module(loaded)
    return sys.modules["normcheck.oracle.fused.trial"]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("op", JUDGED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_case_of_a_core(op: str, dtype: str) -> None:
    """The cases of a quick sweep on a GPU, and large ones, which go another way."""
    kernel = Implementation(name="right", op=op, forward=lambda x: x, ranks=(2, 3))
    claims = claims_of(OPS[op], kernel, dtype)
    judged = 0
    for planned in islice(drawn(claims, PROFILES["quick"].extent.on("cuda"), 3), 0, None, 3):
        if fused.suits(judge_for(planned.case)):
            judged += 1
            assert difference(planned.case) == "", str(planned.case)
    assert judged > 40
    for m, n in ((2048, 1024), (1024, 8192), (65537, 32), (4096, 300)):
        for rows in ("normal", "blend"):
            assert difference(case_of(op, dtype, M=m, N=n, rows=rows)) == ""


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_large_case_without_details() -> None:
    """Ratios alone are found first, and details only of a record."""
    case = case_of("layernorm", "bf16", M=2048, N=1024)
    op = OPS[case.op]
    kernel = trial.right_kernel(op, case, make(case, op, DEVICE))
    for floor, detailed in ((0.0, True), (1.0, False)):
        floors = dict.fromkeys(("y", "mean", "rstd", "dx", "dw", "db"), floor)
        judge = judge_of(op, case, make(case, op, DEVICE), table().model, floors)
        finish, _ = fused.forward(judge, kernel.outputs)
        checked = finish()
        assert checked is not None
        largest = {c.output: c.comparison.max_abs > 0 for c in checked}
        assert largest["y"] == detailed


@pytest.mark.parametrize(("numbers", "aligned"), [((32, 48, None), True), ((32, 40, None), False), ((7, 48), False)])
def test_a_large_case_goes_its_way_if_all_is_aligned(numbers: tuple[int | None, ...], aligned: bool) -> None:
    """Whichever of them is not: sizes, strides and addresses."""
    case = case_of("layernorm", "bf16", M=2048, N=1024)
    judge = SimpleNamespace(case=case, x=SimpleNamespace(is_cuda=True))
    store = torch.zeros(64, dtype=torch.uint8)
    start = -store.data_ptr() % 16
    here, beside = store[start : start + 4], store[start + 4 : start + 8]
    assert fused._way(judge, (here, *numbers), fused.LARGE_FORWARD) is (fused.LARGE_FORWARD if aligned else fused.SMALL)  # type: ignore[arg-type]
    assert fused._way(judge, (beside, *numbers), fused.LARGE_FORWARD) is fused.SMALL  # type: ignore[arg-type]


def test_no_two_cases_have_the_same_numbers_and_all_addresses_are_aligned() -> None:
    """On a GPU one launch makes those of many cases."""
    rooms = [Found.room_for(15, torch.device("meta")).numbers for _ in range(130)]
    assert len({(id(room._base), room.storage_offset()) for room in rooms}) == 130
    assert all(room.numel() >= 15 and room.storage_offset() * room.itemsize % 16 == 0 for room in rooms)


def test_a_launch_tells_a_wide_number_from_one_and_another_from_zero() -> None:
    """True is 1, and False is 0: a stride of 1 found the compilation for one of 2^31."""
    facts = [tuple(launch._taken([number])[0]) for number in (0, 1, 5, 2**31)]
    assert len(set(facts)) == 4
