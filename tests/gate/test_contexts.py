"""The contexts of a cell, as ``normcheck verify`` tries them: after its core, in a part of its time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from normcheck import Implementation, UnsupportedCase
from normcheck.cases.case import Case
from normcheck.cases.case_line import parsed
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.circumstances import InContext
from normcheck.contexts.catalogue import CONTEXTS, contexts_on
from normcheck.gate import contexts
from normcheck.gate.contexts import chosen, failing_in_context
from normcheck.gate.plan import PROFILES, Plan
from normcheck.impls.kernels import interpreter
from normcheck.runner import compiled
from normcheck.runner.session import LocalSession, session_of
from tests.command_line import Cli
from tests.quality import context_kernels as kernels

if not torch.cuda.is_available():
    interpreter.enable()  # before torch.compile imports triton

LINE = "rmsnorm fp16 M={m} N={n} eps=1e-05 rows=tail dy=small layout=contiguous seed=1"


def verdict_of(cli: Cli, name: str, *more: str) -> tuple[int, str, dict[str, Any]]:
    done = cli(
        *("verify", "--impl", f"{kernels.__file__}:{name}", "--dtype", "bf16", "--device", "cpu"),
        *("--max-examples", "100", "--time-budget", "60", "--report", "json:report.json", *more),
    )
    (verdict,) = json.loads(Path("report.json").read_text(encoding="utf-8"))["verdicts"]
    return done.code, done.out, verdict


@pytest.mark.slow
def test_a_fault_of_a_context_fails_the_run_with_a_line_that_shows_it_again(cli: Cli) -> None:
    code, out, verdict = verdict_of(cli, "frozen_weight")
    found = verdict["failure"]
    assert (code, found["kind"], found["check"], found["output"]) == (1, "context", "frozen", "dx")
    assert "FAIL rmsnorm frozen_weight bf16: dx is wrong in another context (frozen)" in out
    assert {name: how["status"] for name, how in verdict["contexts"].items()} == {"frozen": "wrong"}
    words = found["reproduce"].partition(" --context ")
    assert (
        words[1] and cli("repro", f"{kernels.__file__}:frozen_weight", "--context", "frozen", found["case"]).code == 1
    )
    assert cli("repro", f"{kernels.__file__}:frozen_weight", found["case"]).code == 0


@pytest.mark.slow
def test_a_right_kernel_passes_and_its_report_names_every_context(cli: Cli) -> None:
    code, out, verdict = verdict_of(cli, "right")
    assert (code, verdict["status"]) == (0, "pass")
    assert {name: how["status"] for name, how in verdict["contexts"].items()} == dict.fromkeys(
        contexts_on("cpu"), "held"
    )
    assert "right in 6 contexts" in out


@pytest.mark.slow
def test_what_autocast_shows_is_told_and_fails_nothing(cli: Cli) -> None:
    code, out, verdict = verdict_of(cli, "no_autocast")
    assert (code, verdict["status"], verdict["contexts"]["autocast"]["status"]) == (0, "pass", "told")
    assert "context autocast: y.dtype=torch.float32" in " ".join(out.split())
    code, _, verdict = verdict_of(cli, "no_autocast", "--context", "autocast")
    assert (code, verdict["failure"]["check"], list(verdict["contexts"])) == (1, "autocast", ["autocast"])


@pytest.mark.slow
def test_no_contexts_leaves_them_out(cli: Cli) -> None:
    code, _, verdict = verdict_of(cli, "frozen_weight", "--no-contexts")
    assert (code, verdict["contexts"]) == (0, {})


def test_an_unknown_context_is_refused_with_those_that_there_are(cli: Cli) -> None:
    done = cli("verify", "--impl", "torch", "--context", "moon")
    assert done.code == 2 and "context=moon: expected one of inference" in done.err
    done = cli("verify", "--impl", "torch", "--context", "thread", "--no-contexts")
    assert done.code == 2 and "context=thread: expected no --no-contexts" in done.err


def test_the_cases_are_a_ragged_one_a_round_one_and_one_that_fills_the_device() -> None:
    ran = [parsed(LINE.format(m=m, n=n)) for m, n in ((1, 1), (300, 5000), (40, 33), (2, 33), (64, 128), (600, 256))]
    cases = chosen(ran, "cpu")
    assert [(case.M, case.N) for case in cases] == [(40, 33), (64, 128), (600, 256)]
    assert {(case.rows, case.dy) for case in cases} == {("blend", "normal")}
    assert {(case.M, case.N) for case in chosen(ran[:1], "cuda")} == {(1, 1)}
    few = chosen([parsed(LINE.format(m=m, n=n)) for m, n in ((128, 33), (32, 128))], "cuda")[0]
    assert (few.M, few.N) == (32, 128)  # a way for few rows that is taken without gradients tells more than a ragged N


def test_of_several_cases_the_status_that_says_most_holds() -> None:
    held, late = InContext(status="held", cases=1), InContext(status="not tried", why="late")
    assert late.joined(held).joined(late) == held
    assert held.joined(held).cases == 2


def test_what_can_end_a_process_is_tried_last() -> None:
    assert list(CONTEXTS)[-1] == "graph" and "graph" not in contexts_on("cpu")


def test_a_case_that_the_kernel_refuses_is_not_tried_and_says_so() -> None:
    """Each context takes a case with other numbers than those that ran."""

    def forward(x: torch.Tensor, weight: torch.Tensor, bias: None, *, eps: float) -> torch.Tensor:
        if x.abs().max() > 1:
            raise UnsupportedCase("its rows are too large")
        return kernels.plain(x, weight, eps)[0]

    cell = Cell(OPS["rmsnorm"], Implementation(name="mine", op="rmsnorm", forward=forward), "fp16", "mine.py")
    plan = Plan((cell,), PROFILES["quick"], 0, "cpu", 120.0, contexts=("again", "inference"))
    ran = (parsed(LINE.format(m=64, n=96).replace("rows=tail", "rows=normal") + " bias=none"),)
    with session_of(cell.implementation):
        failed, found = failing_in_context(cell, plan, ran, used=1.0)
    assert not failed
    assert found == dict.fromkeys(plan.contexts, InContext(status="not tried", why="its rows are too large"))


def test_the_first_case_of_a_context_has_a_bias_if_any_has() -> None:
    """One of three gradients may be frozen; a weight in fp32 tells less."""
    lines = [LINE.format(m=9, n=33) + more for more in (" weight_dtype=fp32 bias=none", "", " bias=none")]
    ragged, even, _ = contexts.chosen([parsed(line.replace("rmsnorm", "layernorm")) for line in lines], "cpu")
    assert ragged.bias and not even.bias


class FrozenInput(kernels.Right):
    """Its backward has no dw if nobody wants dx."""

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        dx, dw, _ = kernels.Right.backward(ctx, dy)
        return dx, dw if dw is None or ctx.needs_input_grad[0] else torch.zeros_like(dw), None


def tried(of: type[kernels.Right] | Callable[..., Tensor], *more: Case) -> tuple[str, dict[str, InContext]]:
    """The check that a function, or a Function, fails among many rows or in ``more`` cases, "" if none; how it did."""
    forward = kernels.function(of) if isinstance(of, type) else of
    implementation = Implementation(name="mine", op="rmsnorm", forward=forward)
    cell = Cell(OPS["rmsnorm"], implementation, "fp16", "mine.py")
    plan = Plan((cell,), PROFILES["quick"], 0, "cpu", 120.0, contexts=("frozen", "again"))
    ran = [parsed(LINE.format(m=m, n=n) + " bias=none") for m, n in ((65, 257), (64, 256))]
    with session_of(implementation):
        failed, found = failing_in_context(cell, plan, [*ran, *more], used=30.0)
    return "".join(f"{problem.check} {problem.output}" for result in failed for problem in result.problems), found


def test_a_missing_dw_is_seen_among_many_rows() -> None:
    assert tried(kernels.Right)[0] == ""
    assert tried(FrozenInput)[0] == "frozen dw"


_outputs: dict[int, Tensor] = {}


def one_output(x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float) -> Tensor:
    """Wrong: one row, as of one token that is decoded, has one output for all calls without gradients."""
    y: Tensor = kernels.Right.apply(x, weight, eps)
    if len(x) > 1 or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return y
    return _outputs.setdefault(y.shape[1], torch.empty_like(y)).copy_(y)


def test_a_row_alone_is_tried_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "graphs", lambda: 0)  # what another test has compiled in this process
    one = parsed(LINE.format(m=1, n=128) + " bias=none")
    assert tried(one_output)[0] == ""
    assert tried(one_output, one)[0] == "again y"
    assert tried(kernels.Right, one)[1]["again"].cases == 3


class WideOnce(kernels.Right):
    """Its backward spoils rstd of wide rows: another through the same graph is wrong."""

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        found = kernels.Right.backward(ctx, dy)
        if dy.shape[1] >= 4096:
            ctx.saved_tensors[2].data.mul_(0.5)
        return found


def test_wide_rows_are_tried_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "graphs", lambda: 0)
    wide = parsed(LINE.format(m=2, n=8192) + " bias=none")
    assert tried(WideOnce)[0] == ""
    assert tried(WideOnce, wide)[0] == "again dx"
    assert tried(kernels.Right, wide)[0] == ""


class Adds(torch.autograd.Function):
    """Right, also if y or the sum is unused, but for ``wrong_at``: rows of this length with one of them unused."""

    wrong_at = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        stored = x + residual
        y, rstd = kernels.plain(stored, weight, eps)
        ctx.save_for_backward(stored, weight, rstd)
        return y, stored

    @staticmethod
    def backward(ctx: Any, *of: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
        (dy, of_sum), (stored, weight, rstd) = of, ctx.saved_tensors
        dx, dw = kernels.gradients(torch.zeros_like(stored) if dy is None else dy, stored, weight, rstd)
        whole = dx.float() if of_sum is None else dx.float() + of_sum.float()
        whole *= 1 + (None in of and stored.shape[1] == Adds.wrong_at)
        return whole.to(dx.dtype), whole.to(dx.dtype), dw, None


@pytest.mark.parametrize("wrong_at", [0, 4097, 8192])
def test_an_output_of_wide_rows_may_be_unused(monkeypatch: pytest.MonkeyPatch, wrong_at: int) -> None:
    monkeypatch.setattr(compiled, "graphs", lambda: 0)
    monkeypatch.setattr(Adds, "wrong_at", wrong_at)

    def forward(x: Tensor, weight: Tensor, bias: None, *, eps: float, residual: Tensor) -> tuple[Tensor, Tensor]:
        y, stored = Adds.apply(x, residual, weight, eps)
        return y, stored

    own = Implementation(name="mine", op="fused_add_rmsnorm", forward=forward)
    plan = Plan((), PROFILES["quick"], 0, "cpu", 120.0, contexts=("frozen",))
    line = LINE.replace("rmsnorm", "fused_add_rmsnorm") + " bias=none"
    ran = [parsed(line.format(m=m, n=n)) for m, n in ((65, 257), (64, 256), (2, 8192), (2, 4097))]
    with session_of(own):
        failed, _ = failing_in_context(Cell(OPS[own.op], own, "fp16", "mine.py"), plan, ran, used=30.0)
    assert [result.case.N for result in failed] == [wrong_at] * bool(wrong_at)


def test_what_is_compiled_anew_has_a_time_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalSession, "graphs", 1)
    assert tried(FrozenInput)[0] == "frozen dw"
    assert {name: how.cases for name, how in tried(kernels.Right)[1].items()} == {"frozen": 1, "again": 2}
    monkeypatch.setattr(contexts, "_COMPILING", -1.0)  # nothing is left of it
    failed, found = tried(FrozenInput)
    assert not failed and found["frozen"].status == "not tried" and found["again"].cases == 2
