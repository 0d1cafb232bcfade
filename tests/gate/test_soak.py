"""``--profile soak``: round after round of other cases, until it is stopped; nothing that was found is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import normcheck
from normcheck.errors import UsageError
from normcheck.gate import soak as soak_module
from normcheck.gate.plan import PROFILES
from normcheck.gate.soak import FOLDER, in_rounds
from normcheck.result import Coverage
from tests.command_line import Cli, Done, KernelFile
from tests.sample_runs import failed, finding, skipped, verdict

RIGHT = """
import torch

def rmsnorm(x, weight, bias=None, eps=1e-6):
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)
"""
WRONG_LATE = (
    RIGHT
    + """
right = rmsnorm

def rmsnorm(x, weight, bias=None, eps=1e-6):
    y = right(x, weight, bias, eps)
    return y * 1.01 if {condition} else y
"""
)


@pytest.fixture
def soak(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A soak in rounds of 12 cases, of one dtype."""
    short = replace(PROFILES["soak"], max_examples=12, shrink_seconds=0.0, explain_seconds=0.0)
    monkeypatch.setitem(PROFILES, "soak", short)
    argv = ("verify", "--profile", "soak", "--no-isolation", "--op", "rmsnorm", "--device", "cpu", "--allow-thin")
    argv += ("--no-contexts",)

    def run(path: Path, *more: str, dtypes: tuple[str, ...] = ("fp16",)) -> Done:
        of = [word for dtype in dtypes for word in ("--dtype", dtype)]
        return cli(*argv, *of, "--impl", str(path), "--report", "json:out.json", *more)

    return run


def report() -> dict[str, Any]:
    return json.loads(Path("out.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_rounds_until_each_cell_has_its_cases(soak: Any, kernel_file: KernelFile) -> None:
    seen = kernel_file(RIGHT.replace("wide = x.float()", "wide = x.float(); SEEN.append(tuple(x.shape))"), "SEEN = []")
    done = soak(seen, "--max-examples", "30", "--seed", "7")
    assert done.code == 0
    assert "Round 3: 36 cases in 1 cell so far, 0 failed; " in done.out
    (cell,) = report()["verdicts"]
    assert (cell["cases"], report()["budget"]["rounds"], report()["seed"]) == (36, 3, 7)
    assert report()["complete"]


@pytest.mark.slow
def test_what_fails_in_a_later_round_is_kept_and_not_run_again(soak: Any, kernel_file: KernelFile) -> None:
    """Seeds draw other sizes: a fault at a size that the first round does not have is found by a later one."""
    condition = "x.dtype == torch.float16 and x.shape[-1] % 16 == 5"
    done = soak(kernel_file(WRONG_LATE.format(condition=condition)), "--max-examples", "60", dtypes=("fp16", "fp32"))
    assert done.code == 1, done.out[-500:]
    wrong, right = report()["verdicts"]
    assert (wrong["status"], right["status"], right["cases"]) == ("fail", "thin", 60)
    assert 12 < wrong["cases"] < 60
    (note,) = [note for note in wrong["notes"] if note.startswith("found with seed ")]
    assert int(note.split()[-1]) > 0
    (kept,) = Path(FOLDER).glob("*.txt")
    assert wrong["failure"]["case"] in kept.read_text(encoding="utf-8")
    assert "Round 2: " in done.out


@pytest.mark.slow
def test_ctrl_c_is_how_it_ends(kernel_file: KernelFile, tmp_path: Path) -> None:
    path = kernel_file(RIGHT)
    argv = ("--impl", str(path), "--dtype", "fp16", "--op", "rmsnorm", "--device", "cpu", "--no-isolation")
    argv += ("--allow-thin", "--no-contexts")
    short = "import normcheck.gate.plan as p, dataclasses; from normcheck.cli.app import main; "
    short += "p.PROFILES['soak'] = dataclasses.replace(p.PROFILES['soak'], max_examples=3); main()"
    process = subprocess.Popen(
        [sys.executable, "-c", short, "verify", "--profile", "soak", *argv, "--report", "json:out.json"],
        stdout=subprocess.PIPE,
        cwd=tmp_path,
        encoding="utf-8",
    )
    assert process.stdout is not None
    while "Round 2:" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, rest  # nothing was found, and this is no failure
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["complete"]
    assert found["budget"]["rounds"] >= 2
    assert found["verdicts"][0]["cases"] >= 6


def test_stopped_before_a_round_was_complete(
    soak: Any, kernel_file: KernelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*arguments: object, **options: object) -> Any:
        return (), False

    monkeypatch.setattr(soak_module, "swept", stopped)
    assert soak(kernel_file(RIGHT)).code == 130


def test_sigint_ends_it_in_the_background_of_a_script(
    soak: Any, kernel_file: KernelFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``normcheck verify --profile soak & ... kill -INT $!``: such a shell has SIGINT ignored from the start."""
    swept = soak_module.swept

    def stopped(*arguments: Any, **options: Any) -> Any:
        done = swept(*arguments, **options)
        os.kill(os.getpid(), signal.SIGINT)
        return done

    monkeypatch.setattr(soak_module, "swept", stopped)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert soak(kernel_file(RIGHT), "--max-examples", "24").code == 130
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("more", [("--watch",), ("--shard", "1/2")])
def test_options_that_it_has_no_use_for(soak: Any, kernel_file: KernelFile, more: tuple[str, ...]) -> None:
    done = soak(kernel_file(RIGHT), *more)
    assert (done.code, f"profile=soak {more[0][2:]}" in done.err) == (2, True)


def test_it_never_ends_in_a_test_suite() -> None:
    with pytest.raises(UsageError, match="profile=soak: expected one of quick, ci, deep"):
        normcheck.verify(lambda x, weight, bias, eps: x, op="rmsnorm", profile="soak")


def test_a_cell_of_several_rounds() -> None:
    """It passes if it was whole in one of them, and fails if it failed in any."""
    whole = Coverage(planned=9, run=9)
    some = Coverage(planned=9, run=3, missed=("no layout strided",))
    thin, passed = verdict(status="thin", detail="core not finished", core=some), verdict(core=whole)
    both = in_rounds([thin, passed])
    assert (both.status, both.detail, both.core, both.cases) == ("pass", "", whole, 400)
    assert in_rounds([thin, thin]).status == "thin"
    wrong = failed(finding(), implementation="triton", dtype="bf16")
    assert in_rounds([passed, wrong]).failure == wrong.failure
    assert in_rounds([skipped(implementation="triton")]).status == "skip"
