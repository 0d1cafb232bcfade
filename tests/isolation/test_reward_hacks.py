"""What becomes of the reward hacks that others have reported: each beside an innocent kernel, as the docs' table says.

The kernels are those of ``quality/reward_hacks.py``; the table is in docs/isolation-and-trust.md.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import normcheck as package
from tests.command_line import normcheck
from tests.isolation.test_isolation import CHEAT, REACH, SABOTAGE
from tests.quality import reward_hacks
from tests.some import some

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a kernel has no process of its own")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "isolation-and-trust.md"
FILE = "tests/quality/reward_hacks.py"
FILES = ("reward_hacks", "killers", "gpu_killers")
SAME, RED, THIN, ERROR, SEED, SAID = "as innocent", "red", "thin", "error", "not held", "passes what it declares"
"""What the table may say. ``SEED``: it passes with the seed that everybody has, and is red with another one."""

HONEST = ("honest", "honest_by_hand")
LATE = "was still being written when it was returned"
WRONG = (("mismatch",), "")

BECOMES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "lazy_output": (("shape",), "expected a plain torch.Tensor"),
    "super_batching": (("not_repeatable", "unwritten"), ""),
    "no_op": (("unwritten",), ""),
    "garbage_scratch": (("unwritten", "mismatch", "non_finite"), ""),
    "partial_computation": WRONG,
    "analytical": WRONG,
    "precision_downgrade": WRONG,
    "cheat_rng": WRONG,
    "knows_the_shapes": WRONG,
    "told_the_seed": WRONG,
    "cheat_fd": (("crash",), "exit code 0|no sensible answer"),
    "pipe_interpose": (("mismatch", "crash"), ""),
    "gc_nan": (("mismatch", "out_of_bounds_write", "input_modified"), ""),
    "zeroes_its_input": (("mismatch", "input_modified"), ""),
    "scans_its_memory": WRONG,
    "looks_into_all_processes": WRONG,
    "function_detour": (("mismatch", "crash"), ""),
    "finishes_later": (("not_repeatable", "unwritten", "mismatch"), ""),
    "lazy_without_a_class": (("not_repeatable",), LATE),
}
"""Kernel -> the kinds of finding that it may have, and what the message says. The others are as good as innocent."""

AS_INNOCENT = (
    *("monkey_patch", "thread_injection", "ghost_branch", "baseline_kernel", "falls_back", "replaces_torch"),
)
CASES = ("--max-examples", "8", "--time-budget", "240", "--dtype", "fp32", "--device", "cpu", "--no-contexts")


def run(names: tuple[str, ...], *more: str) -> dict[str, Any]:
    """The verdicts of these kernels, by name, in one run."""
    impls = [word for name in names for word in ("--impl", f"{ROOT / FILE}:{name}")]
    with TemporaryDirectory() as folder:
        report = Path(folder) / "out.json"
        normcheck("verify", *impls, "--report", f"json:{report}", *more)
        verdicts = json.loads(report.read_text(encoding="utf-8"))["verdicts"]
    return {verdict["implementation"]: verdict for verdict in verdicts}


def told(verdict: dict[str, Any]) -> dict[str, Any]:
    """A verdict without the kernel's name and place, the command of its run, and times."""
    kept = {name: value for name, value in verdict.items() if name not in ("implementation", "line", "seconds", "next")}
    core = {k: v for k, v in verdict["core"].items() if k not in ("building", "planned")}
    return {**kept, "core": core}


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_each_reported_hack_becomes_what_the_table_says() -> None:
    honest = {name: told(verdict) for name, verdict in run(HONEST, *CASES).items()}
    assert {verdict["status"] for verdict in honest.values()} == {"thin"}  # so few cases are no core
    verdicts = run((*BECOMES, *AS_INNOCENT, *HONEST), *CASES)
    for name in (*AS_INNOCENT, *HONEST):
        assert told(verdicts[name]) == honest[name if name in HONEST else "honest"], name
    found = {name: verdicts[name]["failure"] or {"kind": "", "message": ""} for name in BECOMES}
    wrong = {
        name: failure
        for name, failure in found.items()
        if failure["kind"] not in BECOMES[name][0] or not re.search(BECOMES[name][1], failure["message"])
    }
    assert wrong == {}
    assert not [folder for folder in (ROOT, ROOT / "tests" / "quality") if (folder / "torch.py").exists()]


@pytest.mark.slow
@pytest.mark.usefixtures("unshrunk")
def test_who_knows_the_cases_is_found_by_another_seed_and_who_refuses_hard_data_does_not_pass() -> None:
    ghost, declares = "knows_the_cases", "declares_the_easiest"
    found = run((ghost, declares), *CASES, "--configs", "won")  # the others have data of their own
    assert (found[ghost]["failure"], found[declares]["failure"], found[declares]["shapes"]) == (None, None, 1)
    assert run((ghost,), *CASES, "--seed", "1")[ghost]["failure"]["kind"] == "mismatch"
    verdict = run(("refuses_hard_data",), *CASES, "--max-examples", "80")["refuses_hard_data"]
    assert (verdict["status"], verdict["failure"]) == ("thin", None)
    assert "kinds of data were refused" in verdict["detail"]


@pytest.mark.slow
def test_a_late_result_and_a_patched_clock_are_cheating_in_a_training_loop(tmp_path: Path) -> None:
    """And who declares the easiest shape, or knows the cases of seed 0, is asked for others."""
    source = (ROOT / FILE).read_text(encoding="utf-8").partition("\nIMPLEMENTATIONS = ")[0]
    says = {
        "finishes_later, backward=gradients": ("cheating", f"returns before it has computed: y {LATE}"),
        "monkey_patch": ("cheating", "replaced torch.cuda.Event.elapsed_time"),
        "declares_the_easiest, shapes=((1, 1),), epsilons=(1e-5,)": ("wrong", "of 12 cases are right"),
        "knows_the_cases": ("cheating", "imported normcheck.checks"),
    }
    for number, (one, (kind, words)) in enumerate(some(says.items())):
        path = tmp_path / f"hack{number}.py"
        path.write_text(f"{source}\nIMPLEMENTATIONS = (hack({one}),)\n", encoding="utf-8")
        found = package.reward(path, "rmsnorm", 1.0, dtypes=("fp32",), device="cpu", seed=11)
        assert found.kind == kind, (one, found)
        assert words in found.why
        assert found.score <= 0.3


def rows() -> list[tuple[str, ...]]:
    """The rows of the docs' table: hack, source, what it tries, what becomes of it, killers."""
    page = PAGE.read_text(encoding="utf-8")
    table = page.partition("| hack | source |")[2].partition("\n\n")[0]
    return [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in table.splitlines()[2:]]


def killers_of(row: tuple[str, ...]) -> list[str]:
    return re.findall(r"`(\w+)`", row[4])


def test_the_table_of_the_docs_has_every_hack_and_names_no_other() -> None:
    table = rows()
    assert {len(row) for row in table} == {5}
    text = {name: (ROOT / "tests" / "quality" / f"{name}.py").read_text(encoding="utf-8") for name in FILES}
    named = [name for row in table for name in killers_of(row)]
    missing = {name for name in named if not any(f"def {name}(" in source for source in text.values())}
    assert missing == set()
    assert all(killers_of(row) for row in table)
    assert {i.name for i in reward_hacks.IMPLEMENTATIONS} - set(HONEST) <= set(named)


def test_the_table_says_what_the_tests_ask_for() -> None:
    hacks = {**dict.fromkeys(BECOMES, RED), **dict.fromkeys(AS_INNOCENT, SAME)}
    hacks |= {"knows_the_cases": SEED, "refuses_hard_data": THIN, "declares_the_easiest": SAID}
    assert set(hacks) == {i.name for i in reward_hacks.IMPLEMENTATIONS} - set(HONEST)
    elsewhere = {**dict.fromkeys((*CHEAT, *REACH, *SABOTAGE), RED), "sleeps_its_time_away": ERROR}
    on_a_gpu = {"stream_injection": SAME, "patches_synchronize": RED, "gpu_scan_zeros": RED}
    expected = {**elsewhere, **on_a_gpu, **hacks}
    said = {name: row[3] for row in rows() for name in killers_of(row)}
    assert {name: words for name, words in said.items() if not words.startswith(expected[name])} == {}
