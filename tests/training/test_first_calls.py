"""In a training loop compiling, tuning and planning are no lateness: a first call has time, and a hang has an end."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import normcheck
from normcheck import Reward
from normcheck.cases.case import Case
from normcheck.cases.core import core
from normcheck.cases.ops import OPS
from normcheck.checks.cell import Cell
from normcheck.checks.check import Result
from normcheck.gate.plan import PROFILES
from normcheck.impls.implementation import Implementation
from normcheck.oracle.tolerances import Model
from normcheck.training import trial
from normcheck.training.score import stage_of
from normcheck.training.sequence import LEAST_SHAPES, CellCases
from normcheck.training.trial import Asked, judged
from tests.inner_loop import parametrize

HERE = Path(__file__).parent
SLOW_FIRST = HERE.parent / "quality" / "got_past" / "slow_first.py"
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a kernel's process is for Linux")

HEAD = """
import os, tempfile, time
import torch

FLAG = os.path.join(tempfile.gettempdir(), "hung_once")

def rmsnorm(x, weight, eps):
    y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype)
"""


@linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "price", "seconds"),
    [(SLOW_FIRST, "SECONDS = 0.4", 5.0), (HERE / "tuned_by_sleep.py", "CONFIGS, SECONDS = 10, 0.04", 2.0)],
    ids=["a new N", "whatever is new"],
)
def test_a_right_kernel_that_is_slow_at_first_is_right_and_a_wrong_one_wrong(
    path: Path, price: str, seconds: float, tmp_path: Path
) -> None:
    """A quarter of what they take, or less, in as much less time: what is dear is so by its share of the seconds."""
    text, cheaper = re.subn(r"^(CONFIGS, )?SECONDS = .*$", price, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert cheaper == 1 and "\n    return (wide" in text
    slow = tmp_path / "slow.py"
    slow.write_text(text, encoding="utf-8")
    found = normcheck.reward(slow, "rmsnorm", seconds, dtypes=("fp16",), device="cpu")
    assert found.kind == "right" or (found.kind == "thin" and found.score and found.score >= 0.85), found
    assert "first calls took" in found.why
    wrong = tmp_path / "wrong.py"
    wrong.write_text(text.replace("return (", "return 1.05 * ("), encoding="utf-8")
    found = normcheck.reward(wrong, "rmsnorm", 1.0, dtypes=("fp16",), device="cpu")
    assert found.kind == "wrong" and found.stage in ("nearly all", "some"), found  # "some" if a case was late besides


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU; torch sees none here")
def test_a_kernel_that_triton_tunes_is_right_on_a_gpu() -> None:
    found = normcheck.reward(HERE / "tuned.py", "rmsnorm", 5.0, device="cuda")
    assert found.kind == "right" or (found.kind == "thin" and found.score and found.score >= 0.85), found


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], tuple[Reward, float]]:
    """``hurried(END)``: the reward of a kernel with this end, and its seconds, if a first call may take 1 s.

    After a hang each call has half of that.
    """
    monkeypatch.setattr(trial, "FIRST_CALL_SECONDS", 1.0)
    monkeypatch.setattr(trial, "_CASE_SECONDS", 0.5)

    def reward(end: str) -> tuple[Reward, float]:
        path = tmp_path / "mine.py"
        path.write_text(HEAD + end, encoding="utf-8")
        asked = Asked(spec=str(path), op="rmsnorm", dtypes=("fp16", "fp32"), seconds=1.0, seed=3, device="cpu")
        begun = time.monotonic()
        return judged(asked), time.monotonic() - begun

    return reward


@linux
@pytest.mark.slow
def test_who_hangs_twice_is_wrong_in_its_time_and_who_hangs_once_is_not(
    hurried: Callable[[str], tuple[Reward, float]],
) -> None:
    found, seconds = hurried("    while True: pass")
    assert (found.kind, found.stage, found.cases) == ("wrong", "first case", 1), found
    assert "no result after timeout=1 s" in found.why
    assert 2 * 0.95 <= seconds < 20, "in a call of 1 s, and again"
    found, _ = hurried("    while x.shape[-1] > 600: pass\n    return y")
    assert (found.kind, found.stage) == ("wrong", "some"), found
    once = "    if not os.path.exists(FLAG):\n        open(FLAG, 'w').close()\n        time.sleep(1000)\n    return y"
    found, seconds = hurried(once)
    assert found.kind == "thin", repr(found)
    assert found.score and found.score > 0.2 and seconds > 0.95


def test_who_is_right_until_time_is_over_computes_nothing_else() -> None:
    assert stage_of([1.0] * 3, 60) == ("some", 0.23)
    assert stage_of([1.0] * 3, 60, refused=1) == ("nearly all", 0.15)
    assert stage_of([1.0, 1.0, 0.9], 60) == ("nearly all", 0.15)
    assert stage_of([1.0] * 60, 60, narrow=True) == ("thin", 0.95)


# the cases of a cell, without a process


def cell() -> Cell:
    shapes = ((4, 16),)
    mine = Implementation(name="m", op="rmsnorm", forward=lambda *_, **__: None, shapes=shapes, epsilons=(1e-5,))
    return Cell(OPS["rmsnorm"], mine, "bf16", "tests")


def run(
    cases: CellCases, seconds: Callable[[Case], float], *, refuses: bool = False, pays: bool = True
) -> Iterator[Case]:
    """The cases that are given to a kernel that takes so many ``seconds``, without those that are repeated."""
    spent = 0.0
    while True:
        again = cases.repeats
        planned = cases.next(over=spent - cases.building > 5.0, pays=pays)
        if planned is None:
            return
        case, took = planned.case, seconds(planned.case)
        refused = "odd" if refuses and case.N % 2 else ""
        spent += took
        cases.saw(planned, Result(case, Model(), refused=refused), took)
        if not again:
            yield case


def tuned(price: float) -> Callable[[Case], float]:
    """A call takes 10 ms, and one at a new N or with another dtype of weights the ``price`` beside."""
    seen: set[object] = set()

    def seconds(case: Case) -> float:
        key = case.N, case.weight_dtype
        new = key not in seen
        seen.add(key)
        return 0.03 + price * new

    return seconds


@pytest.mark.parametrize("refuses", [False, True])
def test_who_builds_nothing_has_the_cases_of_its_seed_whatever_it_declares_or_refuses(refuses: bool) -> None:
    one = cell()
    free = replace(one, implementation=replace(one.implementation, shapes=None, epsilons=None))
    expected = core(free.claims, PROFILES["quick"].extent, 5)[:20]
    cases = CellCases(one, 5, "cpu", 20, 5 / 3, 20.0)
    assert list(run(cases, lambda case: 0.03, refuses=refuses)) == [planned.case for planned in expected]
    assert (cases.planned, cases.run, cases.dear) == (20, 20, False)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@parametrize("price", [0.4, 1.5, 4.0], inner=1)
def test_first_calls_are_paid_for_few_shapes_and_all_cases_run(price: float, device: str) -> None:
    cases = CellCases(cell(), 5, device, 20, 5 / 3, 20.0)
    given = list(run(cases, tuned(price)))
    assert len(given) == cases.planned == 20
    assert cases.dear and not cases.narrow
    assert cases.shapes >= LEAST_SHAPES
    assert len({(case.N, case.weight_dtype) for case in given}) * price <= 20.0 + price
    assert len(set(given)) == len(given)


def test_a_kernel_that_was_wrong_gets_no_more_first_calls() -> None:
    cases = CellCases(cell(), 5, "cpu", 20, 5 / 3, 20.0)
    given = list(run(cases, tuned(4.0), pays=False))
    assert (len(given), cases.shapes, cases.narrow) == (20, 2, True)  # the second shows that a new N is dear
    assert len({(case.N, case.weight_dtype) for case in given}) == 2
