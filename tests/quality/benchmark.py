"""How fast a case is judged, and what it costs: `python tests/quality/benchmark.py`. Figures for people, not a test.

Cases of at most 4096 elements go through the whole of verify: drawn by Hypothesis, made, run forward and backward on a
plain torch kernel, every check, on one core.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from normcheck.cases import strategies
from normcheck.cases.case import Case
from normcheck.cases.depth import Depth
from normcheck.cases.inputs import make
from normcheck.cases.ops import OPS
from normcheck.checks.ask import Ask
from normcheck.checks.cell import Cell
from normcheck.checks.check import check
from normcheck.gate import sweep as sweeping
from normcheck.gate.plan import PROFILES, Plan
from normcheck.gate.sweep import run_cell
from normcheck.impls.adapt import adapt
from normcheck.impls.implementation import Implementation

CASES = 3000


def rmsnorm(x, weight, bias, eps):
    """Plain torch, gradients by autograd."""
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def layernorm_forward(x, weight, bias, *, eps):
    """Plain torch, with the statistics and a backward of its own: each case has both kinds of check."""
    y, mean, rstd = torch.native_layer_norm(x.float(), (x.shape[-1],), weight.float(), bias.float(), eps)
    return {"y": y.to(x.dtype), "mean": mean, "rstd": rstd}


def layernorm_backward(dy, x, weight, bias, saved, *, eps):
    xh = (x.float() - saved["mean"]) * saved["rstd"]
    wd = dy.float() * weight.float()
    c1, c2 = (xh * wd).mean(1, keepdim=True), wd.mean(1, keepdim=True)
    dx = (wd - (xh * c1 + c2)) * saved["rstd"]
    dw, db = (dy.float() * xh).sum(0), dy.float().sum(0)
    return {"dx": dx.to(x.dtype), "dw": dw.to(weight.dtype), "db": db.to(weight.dtype)}


KERNELS = (
    Implementation(name="autograd", op="rmsnorm", forward=adapt(rmsnorm)[0]),
    Implementation(
        name="own backward", op="layernorm", forward=layernorm_forward, backward=layernorm_backward, biases=(True,)
    ),
)


def seconds_of(run: Callable[[], object], repeats: int) -> float:
    """Mean processor seconds of a call."""
    run()
    start = time.process_time()
    for _ in range(repeats):
        run()
    return (time.process_time() - start) / repeats


def sweep(implementation: Implementation, cases: int) -> None:
    op = OPS[implementation.op]
    cell = Cell(op, implementation, "fp16", "benchmark")
    extent = replace(PROFILES["quick"].extent, elements=4096)
    profile = replace(PROFILES["quick"], extent=extent, max_examples=cases, seconds=600.0, large_share=0.0)
    plan = Plan((cell,), profile, 0, "cpu", 60.0)
    run_cell(cell, replace(plan, profile=replace(profile, max_examples=50)), lambda *_: None)
    without = seconds_without_probes(cell, plan)
    wall, cpu = time.perf_counter(), time.process_time()
    verdict = run_cell(cell, plan, lambda *_: None)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    again = seconds_without_probes(cell, plan)
    rates = f"{verdict.cases / wall:.0f} a second of wall time, {verdict.cases / cpu:.0f} a second of one core"
    print(f"{op.name}, {implementation.name}: {verdict.status}, {verdict.cases} cases, {rates}")
    print(f"  the probes cost {cpu / without - 1:.0%} to {cpu / again - 1:.0%} of what looking at values alone does")
    case = Case(op=op.name, dtype="fp16", M=16, N=129, bias=op.biases[0])
    floors = dict.fromkeys(("y", "mean", "rstd", "dx", "dw", "db"), 1.0)
    whole = seconds_of(lambda: check(implementation, op, case, "cpu", Ask(Depth.OFF, floors, fused=True)), 500)
    inputs = seconds_of(lambda: make(case, op, "cpu"), 500)
    drawn = again / verdict.cases - whole
    print(
        f"  16x129: check {whole * 1e3:.2f} ms, of which inputs {inputs * 1e3:.2f}; drawing about {drawn * 1e3:.2f} ms"
    )


def seconds_without_probes(cell: Cell, plan: Plan) -> float:
    """Processor seconds of the same sweep if it looked at values only."""
    start, surely = time.process_time(), sweeping.run_surely

    def unprobed(cell, case, plan, ask):
        return surely(cell, case, plan, replace(ask, depth=Depth.OFF))

    with patch.object(sweeping, "run_surely", unprobed):
        run_cell(cell, plan, lambda *_: None)
    return time.process_time() - start


def command(*arguments: str) -> None:
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "normcheck", *arguments], capture_output=True, check=False)
    print(f"normcheck {' '.join(arguments)}: exit {done.returncode}, {time.perf_counter() - start:.2f} s")


def isolation(op: str, dtype: str) -> None:
    """What processes of their own cost 16 correct kernels: the same 150 cases each, large ones included, both ways."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sixteen.py"
        path.write_text("from normcheck.audit.mutants.correct import IMPLEMENTATIONS\n", encoding="utf-8")
        arguments = ("verify", "--impl", str(path), "--op", op, "--dtype", dtype, "--max-examples", "150")
        for how in ("--isolation", "--no-isolation"):
            command(*arguments, how)


def main() -> None:
    torch.set_num_threads(1)
    strategies.ELEMENTS = (4096,)
    strategies.SIZES_N = tuple(n for n in strategies.SIZES_N if n <= 4096)
    for implementation in KERNELS:
        sweep(implementation, CASES)
    isolation("rmsnorm", "fp16")
    command("--help")
    command("verify", "--op", "rmsnorm", "--dtype", "fp16")


if __name__ == "__main__":
    main()
