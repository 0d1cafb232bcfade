"""``normcheck bench --suite judge``: what judging costs, beside a copy of the bytes that are judged.

The data of a case are x, dy, y and dx. A copy of them reads half of their bytes and writes the other half, as in the
other suites. A case is judged as a sweep judges one whose ratios are not the largest so far: forward, gradients given
the reference's statistics, and gradients end to end.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial, wraps
from typing import TextIO

import torch
from torch import Tensor

from normcheck.bench.calls import copy_times
from normcheck.bench.options import BenchOptions
from normcheck.bench.report import console_for
from normcheck.bench.timing import METHOD, timed
from normcheck.cases.case import Case
from normcheck.cases.inputs import Inputs, make, torch_dtype
from normcheck.cases.op import RELU6
from normcheck.cases.ops import OPS
from normcheck.cases.tensor_names import ROOT_FIRST
from normcheck.checks.cell import Cell
from normcheck.errors import ExitCode, UsageError
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.prepare import selected
from normcheck.gate.sweep import run_cell
from normcheck.impls.implementation import Implementation
from normcheck.oracle import judging
from normcheck.oracle.fused.trial import Kernel, right_kernel
from normcheck.oracle.judge import judge_of
from normcheck.oracle.tolerances import table
from normcheck.reports._text import put
from normcheck.reports.document import text_of
from normcheck.reports.targets import screen, targets, written
from normcheck.runner.device import device_for
from normcheck.runner.environment import environment

SUITE = "judge"
SCHEMA = "normcheck-judge-bench/1"

POINTS: Mapping[str, tuple[tuple[str, str, int, int], ...]] = {
    "cuda": (
        ("layernorm", "bf16", 32768, 1024),
        ("layernorm", "bf16", 32768, 8192),
        ("layernorm", "bf16", 4096, 65536),
        ("layernorm", "fp32", 32768, 1024),
        ("layernorm", "fp32", 32768, 8192),
        ("layernorm_zero_centered", "fp16", 32768, 8192),
        ("layernorm_relu_bitmask", "fp16", 32768, 1024),
        ("layernorm_relu_bitmask", "fp16", 32768, 8192),
        ("layernorm_relu_bitmask", "fp16", 4096, 65536),
        ("rmsnorm", "fp16", 32768, 1024),
        ("rmsnorm", "fp16", 32768, 8192),
        ("rmsnorm_gemma", "bf16", 32768, 8192),
        ("rmsnorm_llama", "fp16", 32768, 1024),
        ("rmsnorm_llama", "fp16", 32768, 8192),
        ("rmsnorm_llama", "fp16", 4096, 65536),
    ),
    "cpu": tuple((op, "fp16", m, n) for op in ("layernorm", "rmsnorm") for m, n in ((300, 1024), (4096, 768))),
}
"""(op, dtype, M, N) by device: the shapes of docs/judge.md."""

SMALL = ("layernorm", "bf16", 16, 129)
_CHUNK_ELEMENTS = 1 << 23
_NO_DETAILS = dict.fromkeys(ROOT_FIRST, 1.0)
_CASES = 40, 240, 40  # of a cell: what a process pays once, with the start of a cell, and that start
_KERNEL = "normcheck.bench.plain_rmsnorm:PLAIN"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a case costs, in milliseconds; ``copy``: of its data; ``record``: judging with the details of its errors.

    ``extra``: the most memory that judging takes beside the data, as a share of them; None on a CPU.
    """

    op: str
    dtype: str
    M: int
    N: int
    copy: float
    judge: float
    record: float
    inputs: float
    extra: float | None


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The costs of small cases: milliseconds to judge one and to make its inputs, and cases a second of a cell.

    ``overhead``: seconds of a cell of isolated cases over those of the calls that it makes of the kernel, by kernel; of
    none that is compiled, since its cell waits for that, and not its calls.
    """

    fused: float
    plain: float
    inputs: float
    isolated: float
    in_process: float
    overhead: Mapping[str, float]


def bench(options: BenchOptions, argv: tuple[str, ...]) -> int:
    """Measure, print a table, and write the reports (``json:PATH``); returns the exit code. Raises UsageError."""
    for name in ("op", "impl", "dtype", "sizes"):
        if getattr(options, name):
            raise UsageError(f"{name}={getattr(options, name)[0]}: expected none with suite={SUITE}, which has its own")
    report_targets = targets(options.report, ("json",))
    device = device_for(options.device)
    begun = time.perf_counter()
    costs = tuple(_cost(device, *point) for point in POINTS[device])
    rates = _rates(device, options.timeout)
    described = environment(device)
    document = {
        "schema": SCHEMA,
        "argv": list(argv),
        "environment": dict(described),
        "method": METHOD[device],
        "seconds": time.perf_counter() - begun,
        "costs": [asdict(cost) for cost in costs],
        "small": asdict(rates),
    }
    unwritten = [why for target in report_targets if (why := written(target, partial(_write, document)))]
    for why in unwritten:
        print(f"normcheck: {why}", file=sys.stderr)
    _print(costs, rates, screen(report_targets), _words(described))
    return ExitCode.BROKEN if unwritten else ExitCode.PASS


def _words(described: Mapping[str, str]) -> str:
    return "; ".join([described["device"], *(f"{name} {described[name]}" for name in ("torch", "triton"))])


def _write(document: Mapping[str, object], stream: TextIO) -> None:
    stream.write(text_of(dict(document)))


def _print(costs: tuple[Cost, ...], rates: Rates, stream: TextIO, where: str) -> None:
    console = console_for(stream)
    put(console, ("Judging a case, in times of the copy of its data (x, dy, y, dx)", "bold"))
    put(
        console,
        f"{'op':23} {'dtype':5} {'M x N':>12} {'copy ms':>7} {'judge':>6} {'record':>6} {'inputs':>6} {'memory':>6}",
    )
    for c in costs:
        memory = "-" if c.extra is None else f"{c.extra:.2f}"
        size = f"{c.M} x {c.N}"
        times = " ".join(f"{t / c.copy:6.1f}" for t in (c.judge, c.record, c.inputs))
        put(console, f"{c.op:23} {c.dtype:4}  {size:>12} {c.copy:7.3f} {times} {memory:>6}", wrap=False)
    small = "{} {}, {} x {}".format(*SMALL)
    put(console, f"A small case ({small}): {rates.fused:.2f} ms to judge, {rates.plain:.2f} ms by the plain judge, "
                 f"{rates.inputs:.3f} ms for its inputs.")  # fmt: skip
    put(console, f"Cases a second of a cell, a plain torch kernel: {rates.isolated:.0f} isolated, "
                 f"{rates.in_process:.0f} in one process.")  # fmt: skip
    ratios = ", ".join(f"{ratio:.1f} of {name}" for name, ratio in rates.overhead.items())
    put(console, f"Overhead, the time of a cell over that of its calls of the kernel alone: {ratios}.")
    put(console, (where, "dim"))


def _cost(device: str, op_name: str, dtype: str, M: int, N: int) -> Cost:
    op = OPS[op_name]
    case = Case(op=op_name, dtype=dtype, M=M, N=N, seed=5, bias=op.takes_bias, options=op.clips(RELU6))
    inputs = make(case, op, device)
    kernel = _right(case, inputs)
    data_bytes = 4 * M * N * torch_dtype(dtype).itemsize

    def judge(floors: Mapping[str, float]) -> None:
        one = judge_of(op, case, inputs, table().model, floors, fused=True)
        begun, saved = judging.begin_forward(one, kernel.outputs)
        whole = judging.begin_gradients(one, kernel.gradients, saved, given=False)
        alone = judging.begin_gradients(one, kernel.gradients, saved, given=True)
        checked = (*begun(), *alone(), *whole())
        wrong = [c.output for c in checked if not c.comparison.ratio <= 1]
        if wrong:
            raise AssertionError(f"case={case}: {wrong[0]} of a right kernel was judged wrong")

    judging.trust(judge_of(op, case, inputs, table().model, {}, fused=True), kernel.outputs)
    copy = copy_times(data_bytes, device).median
    times = [_median(partial(judge, floors), device) for floors in (_NO_DETAILS, {})]
    extra = None
    if device == "cuda":
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        judge(_NO_DETAILS)
        extra = (torch.cuda.max_memory_allocated() - before) / data_bytes
    making = _median(lambda: make(case, op, device), device)
    return Cost(
        op=op_name, dtype=dtype, M=M, N=N, copy=copy, judge=times[0], record=times[1], inputs=making, extra=extra
    )  # fmt: skip


def _median(call: Callable[[], object], device: str) -> float:
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return timed(call, device).median


def _right(case: Case, inputs: Inputs) -> Kernel:
    """The outputs of a right kernel, made in chunks of rows; dw and db are sums over them, rounded once."""
    op, height = OPS[case.op], max(1, _CHUNK_ELEMENTS // case.N)
    assert inputs.weight is not None
    wide = Inputs(inputs.x, inputs.weight.double(), None if inputs.bias is None else inputs.bias.double(), inputs.dy)
    rows: dict[str, list[Tensor]] = {}
    sums: dict[str, Tensor] = {}
    for first in range(0, case.M, height):
        part = slice(first, min(first + height, case.M))
        chunk = replace(case, M=part.stop - part.start)
        kernel = right_kernel(op, chunk, replace(wide, x=inputs.x[part], dy=inputs.dy[part]))
        for name, tensor in {**kernel.outputs, "dx": kernel.gradients["dx"]}.items():
            rows.setdefault(name, []).append(tensor)
        for name in kernel.gradients.keys() - {"dx"}:
            sums[name] = sums.get(name, 0.0) + kernel.gradients[name]
    whole = {name: torch.cat(parts) for name, parts in rows.items()}
    gradients = {
        "dx": whole.pop("dx"),
        **{name: t.to(inputs.weight.dtype) for name, t in sorted(sums.items(), reverse=True)},
    }
    return Kernel(whole, gradients)


def _rates(device: str, timeout: float) -> Rates:
    op_name, dtype, M, N = SMALL
    op = OPS[op_name]
    case = Case(op=op_name, dtype=dtype, M=M, N=N, seed=5)
    inputs = make(case, op, device)
    kernel = right_kernel(op, case, inputs)
    judging.trust(judge_of(op, case, inputs, table().model, {}, fused=True), kernel.outputs)

    def judge(fused: bool) -> None:
        one = judge_of(op, case, inputs, table().model, {}, zeros=True, fused=fused)
        begun, saved = judging.begin_forward(one, kernel.outputs)
        both = [judging.begin_gradients(one, kernel.gradients, saved, given=given) for given in (False, True)]
        begun()
        for checks in both:
            checks()

    isolated = _cases_a_second(device, timeout, isolated=True)
    rates = {"plain torch": (_KERNEL, isolated)}
    if device == "cpu":  # there it is interpreted
        rates["triton"] = "triton", _cases_a_second(device, timeout, isolated=True, kernel="triton")
    return Rates(
        fused=_host(partial(judge, True), device),
        plain=_host(partial(judge, False), device),
        inputs=_host(lambda: make(case, op, device), device),
        isolated=isolated,
        in_process=_cases_a_second(device, timeout, isolated=False),
        overhead={n: 1 / (rate * _bare_seconds(device, timeout, kernel)) for n, (kernel, rate) in rates.items()},
    )


def _host(call: Callable[[], object], device: str, repeats: int = 50) -> float:
    """Milliseconds of wall time of one call, waiting included."""
    for _ in range(3):
        call()
    begun = time.perf_counter()
    for _ in range(repeats):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / repeats * 1e3


@contextmanager
def _like_verify() -> Iterator[None]:
    """In the block this process is as one of ``normcheck verify``: one thread, and no collection of old objects."""
    threads = torch.get_num_threads()
    gc.freeze()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        gc.unfreeze()


def _cases_a_second(device: str, timeout: float, *, isolated: bool, kernel: str = _KERNEL) -> float:
    """The rate of a cell, without its start: the difference of a long and of a short one.

    A first one is not counted: torch's autograd imports a hundred modules when it is first used in a process.
    """
    found = []
    for cases in _CASES:
        (chosen,) = selected(kernel, ("rmsnorm",), device, timeout, isolation=isolated)
        begun = time.perf_counter()
        ran = _small_cell(chosen, cases, device, timeout)
        found.append((ran, time.perf_counter() - begun))
    _, (many, long), (few, short) = found
    return (many - few) / (long - short)


def _small_cell(kernel: Implementation, cases: int, device: str, timeout: float) -> int:
    """Run a cell of so many small cases; returns how many it were."""
    small = replace(PROFILES["quick"].extent, rows=63, paired_rows=63, elements=40_000)
    profile = replace(PROFILES["quick"], extent=small, seconds=600.0, core_seconds=600.0, large_share=0.0)
    plan = Plan(
        (cell := Cell(OPS["rmsnorm"], kernel, "fp16", kernel.name),),
        replace(profile, max_examples=cases), 0, device, timeout,
    )  # fmt: skip
    with _like_verify():
        return run_cell(cell, plan, lambda cases, worst: None, with_coverage=False).cases


def _bare_seconds(device: str, timeout: float, kernel: str) -> float:
    """Seconds that the calls of one small case take alone: those that a cell has made, once more, one after the other.

    After a forward whose input asks for it comes autograd's backward, as after most forwards of a cell.
    """
    (chosen,) = selected(kernel, ("rmsnorm",), device, timeout, isolation=False)
    calls: list[Callable[[], object]] = []

    def noted(function: Callable[..., object]) -> Callable[..., object]:
        @wraps(function)
        def call(*args: object, **kwargs: object) -> object:
            calls.append(partial(function, *args, **kwargs))
            return function(*args, **kwargs)

        return call

    backward = None if chosen.backward is None else noted(chosen.backward)
    ran = _small_cell(replace(chosen, forward=noted(chosen.forward), backward=backward), _CASES[0], device, timeout)
    with _like_verify():
        return _host(partial(_called, calls), device, repeats=3) / 1e3 / ran


def _called(calls: Sequence[Callable[[], object]]) -> None:
    for call in calls:
        returned = call()
        if isinstance(returned, Tensor) and returned.requires_grad:
            torch.autograd.backward([returned], [torch.ones_like(returned)])
