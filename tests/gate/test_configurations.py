"""The configurations of a cell, as ``normcheck verify`` judges them: after its core, in a part of its time in quick."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import normcheck
from normcheck.cases.case_line import parsed
from normcheck.cases.claims import claims_of
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.circumstances import Configured
from normcheck.errors import UsageError
from normcheck.gate import configurations, sweep
from normcheck.gate.configurations import InTurn, Tried, are_tried, cases_for, each_configuration, unjudged
from normcheck.gate.plan import PROFILES, Plan
from normcheck.impls.kernels.configurations import Configuration, parts
from normcheck.planner.planner import Planner
from normcheck.runner.session import session_of
from tests.command_line import Cli
from tests.quality import configuration_kernels as kernels

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted on a GPU")

BASE = parsed("rmsnorm fp16 M=24 N=33 eps=1e-05 rows=blend dy=normal layout=contiguous seed=1 bias=none")
RIGHT = kernels.kernel("right")


def cell_of(kernel: normcheck.Implementation, spec: str = "mine.py") -> Cell:
    return Cell(OPS["rmsnorm"], kernel, "fp16", spec)


def plan_of(cell: Cell, profile: str = "quick", **more: Any) -> Plan:
    return Plan((cell,), PROFILES[profile], 0, "cpu", 120.0, **more)


def verdict_of(cli: Cli, name: str, *more: str) -> tuple[int, str, dict[str, Any]]:
    done = cli(
        *("verify", "--impl", f"{kernels.__file__}:{name}", "--dtype", "fp16", "--device", "cpu", "--no-contexts"),
        *("--max-examples", "8", "--time-budget", "0.1", "--allow-thin", "--report", "json:report.json", *more),
    )
    (verdict,) = json.loads(Path("report.json").read_text(encoding="utf-8"))["verdicts"]
    return done.code, done.out, verdict


@pytest.mark.slow
@pytest.mark.usefixtures("small_core", "unshrunk")
@pytest.mark.parametrize("name", ["tail", "tail_of_dx"])
def test_a_wrong_configuration_fails_the_run_with_a_line_that_shows_it_again(name: str, cli: Cli) -> None:
    _, kernel, number, output = kernels.WRONG[name]
    code, out, verdict = verdict_of(cli, name)
    found, which = verdict["failure"], f"{kernel}:{number}"
    assert (code, found["kind"], found["output"]) == (1, "mismatch", output)
    assert found["configuration"].startswith(f"{which} (BLOCK: 64, TAIL: False")
    assert f"Configuration: {which} (BLOCK: 64, TAIL: False" in " ".join(out.split()) and "Where: " in out
    again = shlex.split(found["reproduce"])
    assert again[:5] == ["normcheck", "repro", f"{kernels.__file__}:{name}", "--configs", which]
    assert cli(*again[1:]).code == 1
    assert cli(*again[1:3], *again[5:]).code == 0


@pytest.mark.slow
@pytest.mark.usefixtures("small_core")
def test_the_line_of_a_right_kernel_counts_what_was_judged(cli: Cli) -> None:
    code, out, verdict = verdict_of(cli, "unlaunchable", "--configs", "all", "--verbose")
    assert (code, verdict["failure"]) == (0, None), out
    assert "6 of 6 configurations judged, 1 other cannot be launched" in " ".join(out.split())
    assert (verdict["configurations"]["judged"], verdict["configurations"]["allowed"]) == (6, 6)
    assert "cannot be launched; OutOfResources: out of resource" in " ".join(out.split())


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_in_python_one_configuration_is_taken_for_one_case() -> None:
    kernel, of, number, _ = kernels.WRONG["tail"]
    (verdict,) = normcheck.verify(kernel, case=str(BASE).replace("N=33", "N=67"), configs=f"{of}:{number}")
    assert verdict.failure is not None and verdict.failure.configuration == f"{of}:{number}"
    assert f"configs='{of}:{number}')" in verdict.failure.reproduce
    (verdict,) = normcheck.verify(kernel, case=str(BASE).replace("N=33", "N=67"))
    assert verdict.failure is None
    with pytest.raises(UsageError, match=r"configs=3: expected all or won; one alone is for a single case"):
        normcheck.verify(kernel, configs="3")


@pytest.mark.slow
def test_what_there_was_no_time_for_is_told_and_thin_only_if_it_is_owed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configurations, "_MOST", (1e-3, 0.0))
    cell = cell_of(RIGHT)
    plan = plan_of(cell, configs="")
    with session_of(RIGHT):
        found = each_configuration(cell, plan, [BASE], used=0.0).configured
    assert found is not None and (found.judged, found.allowed) == (0, 6)
    assert found.why == "no time was left; --configs all takes it"
    assert unjudged(plan, found) == []
    owed = [f"0 of 6 configurations were judged: {found.why}"]
    assert unjudged(plan_of(cell, configs="all"), found) == unjudged(plan_of(cell, "ci", configs=""), found) == owed
    assert unjudged(plan_of(cell, "ci", configs=""), Configured(judged=6, allowed=6)) == []


def test_a_case_that_is_wrong_whichever_is_taken_is_no_fault_of_a_configuration() -> None:
    wrong = kernels.kernel("both", [kernels.forward_config(64, TAIL=False), kernels.forward_config(32, TAIL=False)])
    cell = cell_of(wrong)
    with session_of(wrong):
        found = each_configuration(cell, plan_of(cell, configs="all"), [BASE], used=0.0)
    assert found.failed is not None and found.wrong == ""


def test_in_quick_only_the_configurations_of_a_users_kernel_are_judged() -> None:
    own, known = cell_of(RIGHT), cell_of(RIGHT, "torch")
    assert are_tried(own, plan_of(own, configs="")) and not are_tried(known, plan_of(known, configs=""))
    assert are_tried(known, plan_of(known, "ci", configs="")) and are_tried(known, plan_of(known, configs="all"))
    assert not are_tried(own, plan_of(own, "deep", configs="won"))
    assert not are_tried(own, plan_of(own, configs="all", shard=(2, 2)))


def test_a_kernel_without_a_tuner_has_no_configurations() -> None:
    (verdict,) = normcheck.verify(
        lambda x, weight, eps: torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps), op="rmsnorm", dtypes="fp32",
        max_examples=2, contexts=False, configs="all", device="cpu",
    )  # fmt: skip
    assert verdict.configurations is None and verdict.failure is None


def test_the_cases_lie_below_at_and_past_the_blocks() -> None:
    claims = claims_of(OPS["rmsnorm"], RIGHT, "fp16")
    shapes = [(case.M, case.N, case.layout) for case in cases_for(BASE, claims, [2, 16, 256], "cpu")]
    assert shapes == [
        (3, 515, "contiguous"),
        (17, 257, "strided"),
        (16, 256, "contiguous"),
        (15, 255, "contiguous"),
        (41, 17, "strided"),
        (3, 1, "contiguous"),
    ]
    assert {case.N for case in cases_for(BASE, claims, [], "cpu")} == {515, 257, 256, 255, 5, 1}


def test_a_single_configuration_is_named_by_its_number(cli: Cli) -> None:
    assert (parts("3"), parts("_norm:12")) == (("", 3), ("_norm", 12))
    done = cli("verify", "--impl", "torch", "--configs", "first")
    assert (done.code, done.err.strip()) == (2, "normcheck: configs=first: expected all or won")
    done = cli("repro", "torch", "--configs", "all", str(BASE))
    assert done.code == 2 and "configs=all: expected NUMBER or KERNEL:NUMBER, from 0" in done.err


def test_a_tuner_that_only_long_rows_reach_is_found() -> None:
    short, long = (
        kernels.kernel(name, forward) for name, forward in (("short", [kernels.forward_config(64)]), ("long", None))
    )

    def forward(x: torch.Tensor, *given: Any, eps: float) -> dict[str, torch.Tensor]:
        return dict((long if x.shape[-1] > 1000 else short).forward(x, *given, eps=eps))

    both = normcheck.Implementation(name="both", op="rmsnorm", forward=forward, backward=_no_gradients, biases=(False,))
    cell, ran = cell_of(both), [BASE, parsed(str(BASE).replace("M=24 N=33", "M=2 N=1100"))]
    with session_of(both):
        found = each_configuration(cell, plan_of(cell, configs="all"), ran, used=0.0)
    assert found.failed is None and found.configured == Configured(judged=2, allowed=2)


def test_in_a_dear_core_each_n_has_one_configuration_and_each_configuration_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allowed = tuple(Configuration(kernel="_norm", number=number) for number in range(4))
    asked: list[str] = []
    session = SimpleNamespace(configure=asked.append, configurations=allowed)
    monkeypatch.setattr(configurations, "session_of", lambda _: session)
    core: Any = SimpleNamespace(is_priced=False)
    cell = cell_of(RIGHT)
    turn = InTurn(cell, plan_of(cell, configs=""), core)

    def run(n: int) -> str:
        turn.ask(turn.of(replace(BASE, N=n)))
        turn.note(0.1)
        return turn.number

    assert run(64) == "" and not asked
    core.is_priced = True
    assert run(64) == "0"  # which tuners there are is not known yet
    numbers = {n: run(n) for n in range(1, 200)}
    assert {*numbers.values()} == {"0", "1", "2", "3"}
    core.is_priced = False  # as one configuration is built sooner than all
    assert all(run(n) == number for n, number in numbers.items())
    own = InTurn(cell, plan_of(cell, configs="won"), SimpleNamespace(is_priced=True))  # type: ignore[arg-type]
    assert own.of(BASE) == ""


@pytest.mark.parametrize(("device", "seconds", "number"), [("cuda", 20.0, "0"), ("cuda", 2.0, ""), ("cpu", 20.0, "")])
def test_a_first_case_that_takes_long_on_a_gpu_is_the_only_one_that_tunes(
    device: str, seconds: float, number: str
) -> None:
    cell, core = cell_of(RIGHT), SimpleNamespace(is_priced=False)
    turn = InTurn(cell, replace(plan_of(cell, configs=""), device=device), core)  # type: ignore[arg-type]
    for took in (seconds, 20.0):  # what later cases take tells nothing: in the plain order no clock does
        turn.note(took)
        assert turn.of(BASE) == number


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_a_configuration_that_is_wrong_in_its_turn_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two; building is taken for dear from the first case on, so that no clock says which cases run."""
    kernel = kernels.kernel("mine", [kernels.forward_config(64), kernels.forward_config(32, TAIL=False)])
    cell = cell_of(replace(kernel, backward=_no_gradients))
    monkeypatch.setattr(Planner, "is_priced", True)
    monkeypatch.setattr(sweep, "each_configuration", lambda *_: Tried())
    plan = plan_of(cell, configs="")
    plan = replace(plan, profile=replace(plan.profile, max_examples=60))
    found = sweep.run_cell(cell, plan, lambda *_: None).failure
    assert found is not None and found.configuration.startswith("_forward:1 (BLOCK: 32")
    assert f"repro mine.py --configs _forward:1 '{found.case}'" in found.reproduce


def _no_gradients(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> Any:
    from normcheck.errors import UnsupportedCase

    raise UnsupportedCase("it has no gradients")


@pytest.mark.slow
def test_a_kernel_without_triton_is_not_made_to_import_it() -> None:
    """A test suite that calls normcheck first may still choose Triton's interpreter."""
    code = """
    import sys, torch, normcheck
    def rmsnorm(x, weight, eps):
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)
    (verdict,) = normcheck.verify(rmsnorm, op="rmsnorm", dtypes="fp32", max_examples=2, device="cpu", contexts=False)
    print(verdict.failure, "triton.runtime" in sys.modules)
    """
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=without, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "None False", done.stderr
