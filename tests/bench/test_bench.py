"""The bench: bytes as the two sources count them, numbers only for what was verified, and its three kinds of file."""

from __future__ import annotations

import csv
import io
import json
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from normcheck.bench import calls, files, plot, verified
from normcheck.bench import plan as bench_plan
from normcheck.bench import report as bench_report
from normcheck.bench import run as bench_module
from normcheck.bench.options import BenchOptions
from normcheck.bench.plan import sizes_of
from normcheck.bench.run import bench, exit_code
from normcheck.bench.speed import BACKWARD, DIRECTIONS, FORWARD, Bench, Count, Point, Speed, Times
from normcheck.bench.suites import OWN_COUNTS, SUITES, suite_of
from normcheck.bench.timing import in_turn, sets_needed, timed
from normcheck.bench.verified import VerifiedPoint, case_of, verify
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.errors import UsageError, to_install
from normcheck.gate.plan import PROFILES, Plan
from normcheck.impls import _cudnn_shelf, discovery
from normcheck.reports import targets
from tests.command_line import Cli, KernelFile
from tests.hostile_text import HARM
from tests.inner_loop import parametrize
from tests.pages import require_sound

TUTORIAL, PYTORCH = SUITES["triton-tutorial"], SUITES["pytorch-layernorm-backward"]

KERNELS = """
import os, torch
from normcheck import Implementation

def right(x, weight, bias, *, eps):
    b = None if bias is None else bias.float()
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight.float(), b, eps).to(x.dtype)

def wrong(x, weight, bias, *, eps):
    return right(x, weight, bias, eps=eps) * 1.02

def needs_bias(x, weight, bias, *, eps):
    return torch.nn.functional.layer_norm(x.float(), x.shape[-1:], weight.float(), bias.float(), eps).to(x.dtype)

def without_bias_wrong(x, weight, bias, *, eps):  # pytorch/pytorch#69208
    return right(x, weight if bias is not None else torch.ones_like(weight), bias, eps=eps)

def raises(x, weight, bias, *, eps):
    raise RuntimeError("no such kernel")

def needs_shelf(x, weight, bias, *, eps):
    assert os.path.isdir(os.environ["NORMCHECK_CUDNN_PLANS"])
    return right(x, weight, bias, eps=eps)

def gradless(x, weight, bias, *, eps):
    return right(x, weight, bias, eps=eps).detach()

calls = 0
def tires(x, weight, bias, *, eps):
    global calls
    calls += 1
    if calls > 7:
        raise RuntimeError("too many calls")
    return right(x, weight, bias, eps=eps)

refuses = lambda case: "not on Sundays"
names = ("right", "wrong", "needs_bias", "without_bias_wrong", "raises", "gradless", "tires", "needs_shelf")
IMPLEMENTATIONS = (
    Implementation(name="always_biased", op="layernorm", forward=needs_bias, biases=(True,)),
    *(Implementation(name=name, op="layernorm", forward=globals()[name]) for name in names),
    Implementation(name="refuses", op="layernorm", forward=right, supports=refuses),
)
"""


@pytest.fixture
def kernels(kernel_file: KernelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file of implementations, in the folder of the test."""
    monkeypatch.chdir(tmp_path)
    return kernel_file(KERNELS, name="bench_kernels.py").name


@pytest.fixture
def run(cli: Cli) -> Cli:
    """normcheck bench, on the CPU."""
    return lambda *argv, stdin="": cli("bench", *argv, "--device", "cpu", stdin=stdin)


def measured(run: Cli, *argv: str) -> tuple[int, str, list[dict[str, object]]]:
    code, out, err = run(*argv, "--report", "json:out.json")
    assert err == ""
    return code, out, json.loads(Path("out.json").read_text(encoding="utf-8"))["speeds"]


# what is measured, and its bytes


def test_the_suites_are_those_of_the_sources() -> None:
    assert [p.N for p in TUTORIAL.points] == list(range(1024, 15873, 512))
    assert {(p.op, p.dtype, p.weight_dtype, p.M, p.eps, p.bias) for p in TUTORIAL.points} == {
        ("layernorm", "fp16", "same", 4096, 1e-5, True)
    }
    assert [p.N for p in PYTORCH.points] == [256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536]
    assert {(p.op, p.dtype, p.weight_dtype, p.M, p.eps, p.bias) for p in PYTORCH.points} == {
        ("layernorm", "bf16", "fp32", 32768, 1e-6, False)
    }


def test_bytes_are_counted_as_the_sources_count_them() -> None:
    tutorial, pytorch = TUTORIAL.points[0], PYTORCH.points[0]
    assert TUTORIAL.counts[FORWARD].bytes(tutorial) == 2 * 4096 * 1024 * 2 == 16_777_216
    assert TUTORIAL.counts[BACKWARD].bytes(tutorial) == 3 * 4096 * 1024 * 2 == 25_165_824
    assert PYTORCH.counts[BACKWARD].bytes(pytorch) == 3 * 32768 * 256 * 2 + 2 * 256 * 4 == 50_333_696
    assert PYTORCH.counts[FORWARD].bytes(pytorch) == 2 * 32768 * 256 * 2 + 256 * 4


def test_sizes_of_ones_own_count_every_tensor_once() -> None:
    point = Point(op="layernorm", dtype="fp32", M=3, N=5)
    assert OWN_COUNTS[FORWARD].bytes(point) == (2 * 15 + 2 * 5) * 4
    assert OWN_COUNTS[BACKWARD].bytes(point) == (3 * 15 + 3 * 5) * 4
    assert OWN_COUNTS[BACKWARD].bytes(replace(point, bias=False)) == (3 * 15 + 2 * 5) * 4


def test_codes_are_a_byte_each_and_scales_four() -> None:
    point = Point(op="rmsnorm_quant", dtype="bf16", M=4, N=200, bias=False)
    moved = 4 * 200 * (2 + 1) + 200 * 2
    for scale, scales in (("given", 1), ("token", 4), ("block64", 16), ("block128", 8), ("any", 4)):
        assert OWN_COUNTS[FORWARD].bytes(replace(point, scale=scale)) == moved + 4 * scales, scale
    added = replace(point, op="fused_add_rmsnorm_quant", dtype="fp32", scale="given")
    assert OWN_COUNTS[FORWARD].bytes(added) == 4 * 200 * (3 * 4 + 1) + 200 * 4 + 4
    assert "codes, 1 byte an element" in OWN_COUNTS[FORWARD].words([point])
    assert "codes" not in OWN_COUNTS[FORWARD].words([replace(point, op="rmsnorm")])


@pytest.mark.parametrize("op", ["rmsnorm_quant", "fused_add_rmsnorm_quant"])
def test_ops_that_return_codes_have_a_forward_only(run: Cli, op: str) -> None:
    names = ["torch", "torch_block128"]
    code, _, speeds = measured(run, "--impl", names[0], "--impl", names[1], "--op", op, "--sizes", "4,200")
    assert code == 0
    found = [(s["implementation"], s["direction"], s["status"]) for s in speeds]
    assert found == [(name, FORWARD, "measured") for name in names]
    given, own = (int(str(s["bytes"])) for s in speeds)
    assert own - given == 4 * (8 - 1)


def test_a_number_is_bytes_over_the_median() -> None:
    times, copy = Times(median=2.0, low=1.0, high=4.0), Times(median=1.0, low=1.0, high=1.0)
    speed = a_speed(bytes=6_000_000, times=times, copy_times=copy)
    assert (speed.gb_per_s, speed.copy_gb_per_s, speed.share_of_copy) == (3.0, 6.0, 0.5)


def test_sets_are_larger_than_twice_the_cache() -> None:
    assert sets_needed(8, 50) * 8 > 100
    assert sets_needed(1000, 50) == sets_needed(10, 0) == 1
    assert sets_needed(1, 10**9) == 64


def test_calls_take_turns_and_the_median_is_that_of_the_calls() -> None:
    seen: list[int] = []
    run = in_turn([lambda: seen.append(0), lambda: seen.append(1)])
    times = timed(run, "cpu")
    assert seen[:4] == [0, 1, 0, 1] and len(seen) >= 5
    assert 0 < times.low <= times.median <= times.high


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([(2.0, 1.9, 2.1), (9.0, 9.0, 9.0)], (2.0, 1.9, 2.1)),
        ([(5.0, 2.0, 8.0), (2.0, 1.9, 2.1), (9.0, 9.0, 9.0)], (2.0, 1.9, 2.1)),
        ([(5.0, 2.0, 8.0), (3.0, 1.9, 4.1), (6.0, 4.0, 6.0), (9.0, 9.0, 9.0)], (6.0, 4.0, 6.0)),
        ([(5.0, 3.0, 7.0), (5.05, 3.0, 8.0), (5.0, 5.0, 5.0)], (5.0, 3.0, 7.0)),  # it varies so by itself
    ],
)
def test_disturbed_times_are_taken_again(
    monkeypatch: pytest.MonkeyPatch, measured: list[tuple[float, ...]], expected: tuple[float, ...]
) -> None:
    taken = iter(measured)
    monkeypatch.setitem(sys.modules, "triton.testing", SimpleNamespace(do_bench=lambda *_, **__: next(taken)))
    times = timed(lambda: None, "cuda")
    assert (times.median, times.low, times.high) == expected


# only what was verified


@pytest.mark.slow
def test_every_op_is_called_with_all_that_it_takes(run: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, speeds = measured(run, "--impl", "torch", "--sizes", "16,64")
    assert code == 0, out
    assert {speed["op"] for speed in speeds} == OPS.keys()


def test_what_passes_gets_numbers_beside_a_copy(run: Cli, kernels: str) -> None:
    code, out, speeds = measured(run, "--impl", f"{kernels}:right", "--op", "layernorm", "--sizes", "8,64")
    assert code == 0 and out.splitlines()[-1].startswith("MEASURED  2 of 2 speeds")
    for speed, direction in zip(speeds, DIRECTIONS, strict=True):
        assert (speed["direction"], speed["status"], speed["verified_rows"], speed["cases"]) == (
            direction, "measured", 8, 3,
        )  # fmt: skip
        assert math.isclose(speed["gb_per_s"], speed["bytes"] / speed["ms"] * 1e-6, rel_tol=2e-5)  # type: ignore[operator, arg-type]
        assert speed["copy"]["gb_per_s"] > 0  # type: ignore[index]


def test_what_is_compiled_ahead_finds_a_shelf_that_is_there_until_the_last_is_timed(run: Cli, kernels: str) -> None:
    code, _, speeds = measured(run, "--impl", f"{kernels}:needs_shelf", "--op", "layernorm", "--sizes", "8,64")
    assert (code, [speed["status"] for speed in speeds]) == (0, ["measured"] * 2)
    assert not _cudnn_shelf.exists()


def test_a_wrong_kernel_gets_its_finding_and_no_number(run: Cli, kernels: str) -> None:
    code, out, speeds = measured(
        run, "--impl", f"{kernels}:right", "--impl", f"{kernels}:wrong", "--op", "layernorm", "--sizes", "4,32"
    )
    assert code == 1
    wrong = [s for s in speeds if s["implementation"] == "wrong"]
    assert [s["status"] for s in wrong] == ["fail", "fail"]
    assert {s["gb_per_s"] for s in wrong} == {s["ms"] for s in wrong} == {None}
    assert wrong[0]["failure"]["output"] == "y"  # type: ignore[index]
    assert out.count("FAIL layernorm wrong bf16: y is wrong") == 1 and "normcheck repro" in out
    assert all(s["status"] == "measured" for s in speeds if s["implementation"] == "right")
    assert out.splitlines()[-1].startswith("FAIL  2 of 4 speeds measured, 2 without a number")


def test_findings_alike_are_told_once(run: Cli, kernels: str) -> None:
    sizes = ("--sizes", "4,32", "--sizes", "4,40", "--sizes", "4,48")
    code, out, speeds = measured(run, "--impl", f"{kernels}:wrong", "--op", "layernorm", *sizes)
    assert code == 1 and {s["status"] for s in speeds} == {"fail"} and all(s["failure"] for s in speeds)
    assert out.count("y is wrong") == 1 and "The same kind of finding at 4 x 40, 4 x 48." in out


@pytest.mark.parametrize(
    ("name", "code", "statuses", "words"),
    [
        ("raises", 1, ["fail", "fail"], "no such kernel"),
        ("refuses", 5, ["skip", "skip"], "not on Sundays"),
        ("gradless", 0, ["measured", "skip"], "no gradients are returned"),
        ("tires", 1, ["fail", "fail"], "while it was timed"),
    ],
)
def test_what_does_not_run_is_a_row_with_its_reason(
    run: Cli, kernels: str, name: str, code: int, statuses: list[str], words: str
) -> None:
    got, out, speeds = measured(run, "--impl", f"{kernels}:{name}", "--op", "layernorm", "--sizes", "4,32")
    assert (got, [s["status"] for s in speeds]) == (code, statuses)
    assert words in out


def test_unavailable_implementations_stay_columns(run: Cli, kernels: str) -> None:
    code, out, speeds = measured(
        run, "--impl", "cudnn", "--impl", f"{kernels}:right", "--op", "layernorm", "--sizes", "4,32"
    )
    assert code == 0 and "cuDNN needs an NVIDIA GPU" in out
    assert [s["status"] for s in speeds] == ["skip", "skip", "measured", "measured"]


@pytest.mark.parametrize(
    ("device", "op"), [("cuda", "layernorm"), ("cuda", "layernorm_relu_bitmask"), ("cpu", "layernorm")]
)
def test_what_has_a_known_fault_is_there_only_by_name(device: str, op: str) -> None:
    suite = suite_of([OPS[op]], ("fp16",), ((4, 32),))
    (chosen,) = bench_plan.cells_of(BenchOptions(), suite, device).values()
    names = {cell.implementation.name for cell in chosen}
    assert {"triton", "torch"} <= names and "triton_tutorial" not in names
    assert ("cudnn" in names) == (op == "layernorm") and ("torch_compile" in names) == (device == "cuda")
    asked = BenchOptions(impl=("triton_tutorial",))
    if op == "layernorm":
        (named,) = bench_plan.cells_of(asked, suite, device).values()
        assert [cell.implementation.name for cell in named] == ["triton_tutorial"]


def test_a_finding_beats_an_error_beats_nothing() -> None:
    def code(*statuses: str) -> int:
        return exit_code([a_speed(status=status) for status in statuses], complete=True)

    assert [code("measured"), code("measured", "skip"), code("skip"), code()] == [0, 0, 5, 5]
    assert [code("measured", "error"), code("measured", "error", "fail")] == [3, 1]
    assert exit_code([a_speed(status="fail")], complete=False) == 130


def test_a_fault_of_normcheck_is_an_error_and_the_rest_goes_on(
    run: Cli, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench_module.verify

    def breaks(cell: Cell, point: Point, plan: Plan) -> VerifiedPoint:
        if point.N == 32:
            raise ArithmeticError("planted")
        return real(cell, point, plan)

    monkeypatch.setattr(bench_module, "verify", breaks)
    code, out, speeds = measured(
        run, "--impl", f"{kernels}:right", "--op", "layernorm", "--sizes", "4,32", "--sizes", "4,40"
    )
    assert (code, [s["status"] for s in speeds]) == (3, ["error", "error", "measured", "measured"])
    assert "ArithmeticError: planted" in out


def test_a_spent_budget_begins_nothing(run: Cli, kernels: str) -> None:
    code, out, _ = measured(
        run, "--impl", f"{kernels}:right", "--op", "layernorm", "--sizes", "4,32", "--time-budget", "1e-6"
    )
    assert code == 5 and "the time budget is spent" in out


# a suite's setting: fp32 weight, no bias, more rows than memory has room for


def plan_and_cell(kernels: str, name: str) -> tuple[Cell, Plan]:
    (implementation,) = discovery.select(f"{kernels}:{name}", ("layernorm",))
    return Cell(OPS["layernorm"], implementation, "bf16", kernels), Plan((), PROFILES["quick"], 0, "cpu", 60)


SETTING = Point(op="layernorm", dtype="bf16", weight_dtype="fp32", M=8, N=32, eps=1e-6, bias=False)


def test_a_point_is_verified_with_its_own_weights_and_bias(kernels: str) -> None:
    assert str(case_of(SETTING)) == (
        "layernorm bf16 M=8 N=32 eps=1e-06 rows=normal dy=normal layout=contiguous seed=0 weight_dtype=fp32 bias=none"
    )
    cell, plan = plan_and_cell(kernels, "right")
    found = verify(cell, SETTING, plan)
    assert found == VerifiedPoint(point=SETTING, rows=8, cases=3, not_returned=("mean", "rstd"))


def test_who_needs_a_bias_gets_one_and_the_note_says_so(kernels: str) -> None:
    cell, plan = plan_and_cell(kernels, "always_biased")
    found = verify(cell, SETTING, plan)
    assert found.passed and found.point == replace(SETTING, bias=True)
    assert found.note == "timed with a bias, because without one: bias=none: biases=(True,) is declared"


@pytest.mark.parametrize(("name", "kind"), [("needs_bias", "exception"), ("without_bias_wrong", "mismatch")])
def test_nothing_is_timed_without_a_bias_that_is_wrong_without_one(kernels: str, name: str, kind: str) -> None:
    cell, plan = plan_and_cell(kernels, name)
    point = replace(SETTING, weight_dtype="same")
    found = verify(cell, point, plan)
    assert found.failure is not None and found.failure.kind == kind and found.point == point
    assert verify(cell, replace(point, bias=True), plan).passed


def test_a_bias_does_not_excuse_a_wrong_kernel(kernels: str) -> None:
    cell, plan = plan_and_cell(kernels, "wrong")
    found = verify(cell, SETTING, plan)
    assert not found.passed and found.failure is not None and found.point == SETTING


def test_fewer_rows_are_verified_where_memory_is_short(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cell, plan = plan_and_cell(kernels, "right")
    monkeypatch.setattr(verified, "too_large", lambda case, device: "needs more" if case.M > 2 else "")
    assert verify(cell, SETTING, plan).rows == 2
    monkeypatch.setattr(verified, "too_large", lambda case, device: "")
    real = verified.run_case

    def short(cell: Cell, case: object, plan: Plan, ask: object) -> object:
        if case.M > 4:  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("planted")
        return real(cell, case, plan, ask)  # type: ignore[arg-type]

    monkeypatch.setattr(verified, "run_case", short)
    assert verify(cell, SETTING, plan).rows == 4


@pytest.mark.slow
def test_a_suite_runs_and_says_what_was_verified(run: Cli, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(PYTORCH, points=tuple(replace(p, M=8, N=p.N // 16) for p in PYTORCH.points[:2]))
    monkeypatch.setattr(bench_plan, "SUITES", {small.name: small})
    monkeypatch.setattr(verified, "too_large", lambda case, device: "needs more" if case.M > 4 else "")
    code, out, speeds = measured(run, "--impl", f"{kernels}:right", "--suite", small.name)
    assert code == 0 and "verified at 4 of 8 rows" in out and PYTORCH.source in " ".join(out.split())
    assert {(s["weight_dtype"], s["bias"], s["eps"], s["verified_rows"]) for s in speeds} == {("fp32", False, 1e-6, 4)}


def test_compiled_graphs_can_be_called_again_while_benching() -> None:
    import torch._functorch.config as functorch

    before = functorch.donated_buffer
    with calls.reusable_graphs():
        assert functorch.donated_buffer is False
    assert functorch.donated_buffer is before


# the command line and the files


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (("--suite", "mine"), "suite=mine: expected one of triton-tutorial"),
        (("--suite", "triton-tutorial", "--op", "rmsnorm"), "op=rmsnorm: expected one of layernorm with suite="),
        (("--suite", "triton-tutorial", "--dtype", "fp32"), "dtype=fp32: expected one of fp16 with suite="),
        (("--suite", "triton-tutorial", "--sizes", "1,2"), "sizes=1,2: expected none with suite=triton-tutorial"),
        (("--sizes", "4x4"), "sizes=4x4: expected M,N"),
        (("--op", "softmax"), "op=softmax: expected one of"),
        (("--time-budget", "0"), "time_budget=0: expected seconds > 0"),
        (("--report", "xml:out.xml"), "report=xml:out.xml: expected FORMAT:PATH with FORMAT one of csv, json, png"),
        (("--report", "png:-"), "report=png:-: expected a path"),
    ],
)
def test_complaints_are_one_line(run: Cli, argv: tuple[str, ...], complaint: str) -> None:
    code, out, err = run(*argv)
    assert (code, out) == (2, "") and err.startswith(f"normcheck: {complaint}") and err.count("\n") == 1


def test_sizes_are_pairs() -> None:
    assert sizes_of(["4096,1024", "1,1"]) == ((4096, 1024), (1, 1))
    for text in ("0,4", "4,", "4,4,4", "-1,4", "99999999999,99999999999"):
        with pytest.raises(UsageError):
            sizes_of([text])


@pytest.mark.parametrize("name", ["png", "html"])
def test_a_plot_without_matplotlib_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(targets, "find_spec", lambda module: None if module == "matplotlib" else module)
    with pytest.raises(UsageError, match=rf"report={name}:out: expected matplotlib; {re.escape(to_install('plot'))}$"):
        bench(BenchOptions(report=(f"{name}:out",)), ())


def a_speed(**fields: object) -> Speed:
    point = Point(op="layernorm", dtype="fp16", M=4, N=8)
    own = {"point": point, "implementation": "mine", "direction": FORWARD, "status": "measured", "bytes": 1000}
    return Speed(**{**own, **fields})  # type: ignore[arg-type]


def a_bench(*speeds: Speed, code: int = 0) -> Bench:
    return Bench(
        argv=("bench",),
        suite="",
        source="",
        device="cuda",
        seconds=1.0,
        environment={"normcheck": "0.1.0", "torch": "2.13.0", "device": "Some Card"},
        counting={FORWARD: "x, y"},
        method="a clock",
        speeds=speeds,
        exit_code=code,
    )


T = Times(median=0.5, low=0.4, high=0.6)


def test_the_csv_has_a_line_per_speed_and_a_stable_header() -> None:
    stream = io.StringIO()
    hostile = a_speed(status="skip", detail='no, "never"\nreally', implementation="a,b")
    files.write_csv(a_bench(a_speed(times=T, copy_times=T), hostile), stream)
    header, *_ = stream.getvalue().splitlines()
    assert header == (
        "suite,op,implementation,dtype,weight_dtype,bias,eps,M,N,direction,status,gb_per_s,copy_gb_per_s,share_of_copy,"
        "ms,ms_q20,ms_q80,copy_ms,bytes,verified_rows,cases,device,versions,detail,note"
    )
    first, second = csv.DictReader(io.StringIO(stream.getvalue()))
    assert (first["gb_per_s"], first["ms_q20"], first["copy_ms"]) == ("0.002", "0.4", "0.5")
    assert (first["device"], first["versions"]) == ("Some Card", "normcheck 0.1.0; torch 2.13.0")
    assert (second["implementation"], second["detail"], second["gb_per_s"]) == ("a,b", 'no, "never" really', "")


def test_the_json_is_strict_and_in_the_order_of_its_schema() -> None:
    stream = io.StringIO()
    files.write_json(a_bench(a_speed(times=replace(T, high=math.inf))), stream)
    document = json.loads(stream.getvalue())
    assert document["schema"] == "normcheck-bench/1" and document["suite"] is None
    assert list(document) == [
        "schema", "normcheck", "argv", "suite", "source", "device", "environment", "method", "counting", "seconds",
        "exit_code", "complete", "speeds",
    ]  # fmt: skip
    (speed,) = document["speeds"]
    assert speed["ms_q80"] == "Infinity" and speed["copy"] is None and speed["weight_dtype"] == "fp16"


@pytest.mark.slow
def test_the_plot_is_a_picture_with_units_a_ceiling_and_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    saved = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), saved(self, *a, **k)))
    speeds = [
        a_speed(
            point=Point(op="layernorm", dtype="fp16", M=4, N=n), direction=d, implementation=i, times=T, copy_times=T
        )
        for n in (8, 256)
        for i in ("one", "other")
        for d in DIRECTIONS
    ]
    plot.save(a_bench(*speeds), str(tmp_path / "out.png"))
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    assert "Some Card" in figure.get_suptitle()
    assert [axes.get_title() for axes in figure.axes] == [
        "layernorm forward, fp16, M = 4", "layernorm backward, fp16, M = 4",
    ]  # fmt: skip
    for axes in figure.axes:
        assert "GB/s" in axes.get_ylabel() and "elements" in axes.get_xlabel()
        assert [line.get_label() for line in axes.get_lines()] == ["copy of the same bytes", "one", "other"]


def test_many_columns_are_split_to_the_width_of_the_console() -> None:
    stream = io.StringIO()
    speeds = [a_speed(implementation=f"implementation_{i}", times=T, verified_rows=4) for i in range(9)]
    bench_report.render(a_bench(*speeds), bench_report.console_for(stream, width=80))
    table = [line for line in stream.getvalue().splitlines() if "implementation_" in line]
    assert len(table) > 1 and max(map(len, table)) <= 80
    assert all(sum(f"implementation_{i}" in line for line in table) == 1 for i in range(9))


def test_counts_leave_out_a_bias_that_is_not_there() -> None:
    count = Count(text="", matrices=0, bias_vectors=1)
    assert count.bytes(a_speed().point) == 16 and count.bytes(replace(a_speed().point, bias=False)) == 0


@pytest.mark.slow
@parametrize("harm", ["", *(" ".join([*HARM][turn::3]) for turn in range(3))], inner=1)
def test_the_page_of_a_bench(harm: str) -> None:
    """A table and a picture for each direction; foreign text is text in it, and it is the JSON report as well.

    Pictures take half a second: a third of what means harm is one name.
    """
    speeds = [
        a_speed(
            point=Point(op="layernorm", dtype="fp16", M=4, N=n), direction=d, implementation=i, times=T, copy_times=T
        )
        for n in (8, 256)
        for i in ("one", f"other{harm}")
        for d in DIRECTIONS
    ]
    speeds.append(a_speed(implementation=f"third{harm}", status="skip", detail=f"no GPU{harm}"))
    told = replace(a_bench(*speeds), method=f"a clock{harm}")
    stream = io.StringIO()
    files.write_html(told, stream)
    page = require_sound(stream.getvalue())
    (data,) = re.findall(r'<script type="application/json" id="normcheck-report">(.*?)</script>', stream.getvalue())
    assert json.loads(data) == json.loads(json.dumps(files.document(told)))
    titles = [f"layernorm {direction}, fp16, M = 4" for direction in DIRECTIONS]
    assert page.headings[1:] == ["MEASURED", *titles, "Without a number", "How it was made"]
    assert sum(tag == "svg" for tag, _ in page.elements) == 2
    assert "(100%)" in page.text and "no GPU" in page.text
