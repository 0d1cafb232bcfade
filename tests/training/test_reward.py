"""reward: the order of its stages, what is no kernel's fault, and a hundred calls that leave nothing behind."""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

import normcheck
from normcheck import Reward
from normcheck.errors import UsageError
from normcheck.isolation.intact import torch_as_it_is
from normcheck.training import process
from normcheck.training import reward as reward_module
from normcheck.training.process import NoAnswer
from normcheck.training.score import KINDS, LEAST_CASES, STAGES, stage_of
from normcheck.training.trial import CASES_A_SECOND
from tests.command_line import Cli
from tests.project.pages import PAGES

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a kernel's process is for Linux")

HEAD = """
import ctypes, os, tempfile, time
import torch

def good(x, weight, bias, eps):
    y = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps)
    return (y if bias is None else y + bias.float()).to(x.dtype)

def rmsnorm(x, weight, bias, eps):
    y = good(x, weight, bias, eps)
"""

WORSE_AND_WORSE = (
    "    return y",
    "    return y if x.shape[-1] < 700 else y * 1.05",
    "    return y if x.shape[-1] < 60 else y * 1.05",
    "    return y * 1.05",
    "    raise ValueError('not on a Sunday')",
    "",  # returns None: the same as what raises
)
"""The ends of kernels, each worse than the one before it, or as bad."""

NO_KERNELS = {"signature": "def rmsnorm(x):\n    return x", "import": "def rmsnorm(x:"}

CHEATS = {
    "    with torch.no_grad(): x.copy_(y)\n    return y": "writes to its inputs: x was modified",
    "    torch.allclose = lambda *_, **__: True\n    return x * 0": "replaced torch.allclose",
    "    import normcheck.oracle.reference\n    return y": "imported normcheck.oracle",
    "    return torch.empty_like(x)": "returns memory that it never wrote",
    "    class Later(torch.Tensor): pass\n    return y.as_subclass(Later)": "computes when it is looked at",
    "    from normcheck.runner import call\n    call.forward = None\n    return y": "replaced normcheck.runner.call",
}

BREAKS = {
    "    os._exit(0)": "exit code 0",
    "    ctypes.string_at(0)": "SIGSEGV",
}


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The temporary folder of the judge, which ends with these tests."""
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        process.close()
        yield folder
        process.close()


@pytest.fixture
def rewarded(temporary: Path, tmp_path: Path) -> Callable[..., Reward]:
    """``rewarded(SOURCE)``: the reward of a file with it."""

    def rewarded(source: str, seconds: float = 1.0, **more: Any) -> Reward:
        path = tmp_path / "mine.py"
        path.write_text(source, encoding="utf-8")
        return normcheck.reward(path, "rmsnorm", seconds, **{"device": "cpu", **more})

    return rewarded


@linux
@pytest.mark.slow
def test_what_is_worse_has_a_smaller_score_and_what_cheats_or_breaks_has_its_kind(
    rewarded: Callable[..., Reward], tmp_path: Path
) -> None:
    def whole(source: str, seconds: float) -> Reward:
        """All of its cases: on a machine that is too busy for them it is asked again."""
        every = (rewarded(source, seconds, seed=3) for _ in range(5))
        return next(reward for reward in every if reward.cases == reward.planned)

    right = whole(HEAD + WORSE_AND_WORSE[0], 5.0)
    assert (right.ok, right.score, right.kind, right.stage) == (True, 1.0, "right", "right")
    assert right.cases == right.planned == LEAST_CASES
    assert right.worst_ratio is not None
    assert 0 < right.worst_ratio <= 1
    assert "gradients are not checked" not in right.why
    bare = whole(HEAD + "    return y.detach()", 5.0)
    assert bare.ok and "gradients are not checked, as y carries no graph" in bare.why
    assert set(right.outputs) == {"y", "dx", "dw", "db"}

    found = [right] + [whole(HEAD + end, 2.0) for end in WORSE_AND_WORSE[1:4]]
    found += [rewarded(HEAD + end) for end in WORSE_AND_WORSE[4:]]
    found += [rewarded(NO_KERNELS[stage]) for stage in ("signature", "import")]
    scores = [reward.score for reward in found]
    assert all(one is not None and other is not None and one >= other for one, other in pairwise(scores)), scores
    assert len(set(scores)) == len(scores) - 1
    stages = ["right", "some", "some", "nearly all", "first case", "first case", "signature", "import"]
    assert [reward.stage for reward in found] == stages
    assert {reward.kind for reward in found[1:]} == {"wrong"}
    assert whole(HEAD + WORSE_AND_WORSE[2], 2.0) == found[2], "the same seed, the same reward"
    assert found[1].case.startswith("rmsnorm ")
    assert f"normcheck repro {tmp_path / 'mine.py'} " in found[1].reproduce

    for end, says in CHEATS.items():
        cheat = rewarded(HEAD + end, 0.5)
        assert (cheat.kind, cheat.score) == ("cheating", 0.0), (end, cheat)
        assert says in cheat.why
    picky = (
        "from normcheck import Implementation\n"
        + HEAD
        + "    return y\n"
        + (
            "def forward(x, weight, bias, *, eps): return rmsnorm(x, weight, bias, eps)\n"
            "IMPLEMENTATIONS = (Implementation(name='p', op='rmsnorm', forward=forward,"
            " supports=lambda case: 'N is ragged' if case.N % 8 else None),)"
        )
    )
    some = rewarded(picky, 2.0, seed=3)
    assert (some.kind, some.stage) == ("thin", "some"), some
    for end, says in BREAKS.items():
        begun = time.monotonic()
        broken = rewarded(HEAD + end, dtypes="fp32")
        assert (broken.kind, broken.stage, broken.score) == ("wrong", "first case", 0.1), (end, broken)
        assert says in broken.why
        assert time.monotonic() - begun < 20
    loud = rewarded(HEAD + "    print('x' * 4_000_000)\n    return y", 0.2)
    assert (loud.kind, len(loud.why) < 2_000) == ("thin", True)


LITTER = "open(os.path.join(tempfile.gettempdir(), 'litter'), 'w').write('x')\nos.fork() or time.sleep(1000)\n"
HUNDRED = (
    HEAD + WORSE_AND_WORSE[0],
    HEAD + WORSE_AND_WORSE[3] + f"\n\n{LITTER}",
    HEAD + LITTER + "raise SystemExit",
    "def",
)
"""One that is right, one that is wrong, two that are no kernels; the two in the middle leave a file and processes."""

MOST_GROWN_BYTES = 16 << 20


@linux
@pytest.mark.slow
def test_gradients_that_come_only_sometimes_are_wrong(rewarded: Callable[..., Reward]) -> None:
    """Cases whose y has no graph owe what others returned; two lines show it."""
    found = rewarded(f"{HEAD}    return y if x.stride(0) != x.shape[-1] else y.detach()\n", seconds=5.0)
    assert (found.kind, found.stage) == ("wrong", "some")
    assert "y has no graph here, so there is no gradient" in found.why
    assert found.reproduce.count("rmsnorm fp") + found.reproduce.count("rmsnorm bf") == 2


@linux
@pytest.mark.slow
def test_a_hundred_calls_leave_no_process_no_memory_and_no_file(
    rewarded: Callable[..., Reward], temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    of_others = set(psutil.Process().children(recursive=True))  # of tests that ran in this process before
    kinds = [rewarded(source, 0.1, dtypes="fp32").kind for source in HUNDRED]
    assert kinds == ["thin", "wrong", "wrong", "wrong"]
    before = left_behind(temporary, tmp_path)
    turns = [HUNDRED[(0, 3, 2, 3, 1, 3, 3, 3)[number % 8]] for number in range(100)]
    seeds = {rewarded(source, 0.1, dtypes="fp32").seed for source in turns}
    after = left_behind(temporary, tmp_path)
    assert len(seeds) == 100
    assert after["processes"] == before["processes"]
    assert after["files"] == before["files"]
    assert after["descriptors"] <= before["descriptors"]
    assert after["bytes"] - before["bytes"] < MOST_GROWN_BYTES, (before, after)
    process.close()
    assert not set(psutil.Process().children(recursive=True)) - of_others
    assert not list(temporary.iterdir())


def left_behind(*folders: Path) -> dict[str, Any]:
    """The processes that come from this one, what they and it hold, and the files in its folders."""
    me = psutil.Process()
    held = []
    for one in [me, *me.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            held.append((one.num_fds(), one.memory_info().rss))
    return {
        "processes": len(held),  # of which one, the server, is a new one each time
        "files": sorted(str(path) for folder in folders for path in folder.rglob("*")),
        "descriptors": sum(descriptors for descriptors, _ in held),
        "bytes": sum(resident for _, resident in held),
    }


# what needs no judge


def test_stages_do_not_overlap_and_the_share_decides_within_one() -> None:
    assert [stage for stage, _ in sorted(STAGES.items(), key=lambda item: item[1])] == list(STAGES)
    assert all(one[1] < other[0] for one, other in pairwise(STAGES.values()))
    assert stage_of([1.0] * LEAST_CASES, LEAST_CASES) == ("right", 1.0)
    assert stage_of([1.0] * (LEAST_CASES - 1), LEAST_CASES - 1) == ("thin", 0.95)
    assert stage_of([1.0] * 80, 100) == ("thin", 0.93)
    assert stage_of([1.0] * 60, 100)[0] == "some", "who answers too few gains nothing by it"
    assert stage_of([1.0] * 99 + [0.75], 100) == ("some", 0.7985)
    assert stage_of([1.0] * 10 + [0.0] * 90, 100) == ("nearly all", 0.15)
    shares = [stage_of([1.0] * right + [0.0] * (100 - right), 100)[1] for right in range(101)]
    assert shares == sorted(shares)


def test_the_page_has_every_stage_with_its_scores_and_every_field() -> None:
    page = PAGES["docs/reward.md"]
    rows = re.findall(r"^\| `([a-z ]+)` \| ([\d.]+)(?: to ([\d.]+))? \| `", page, re.MULTILINE)
    assert {stage: (float(least), float(most or least)) for stage, least, most in rows} == STAGES
    assert list(STAGES) == [stage for stage, *_ in rows]
    named = re.findall(r"^\| (`[a-z_`, ]+`) \| (?!\d|None)", page, re.MULTILINE)
    assert {name for row in named for name in re.findall(r"\w+", row)} == {f.name for f in fields(Reward)}
    assert f"({CASES_A_SECOND} for each," in page
    assert f"{LEAST_CASES} at least" in page
    assert f"less than {MOST_GROWN_BYTES >> 20} MiB" in page


WRONG_ARGUMENTS = (
    ({"op": "softmax"}, "op='softmax': expected one of layernorm"),
    ({"op": 3}, "op=3: expected one of layernorm"),
    ({"path": 3}, "path=3: expected FILE.py or FILE.py:NAME"),
    ({"path": "torch"}, "path=torch: expected FILE.py or FILE.py:NAME"),
    ({"path": "nowhere.py"}, "impl=nowhere.py: no such file"),
    ({"seconds": 0}, "seconds=0: expected seconds, 0.1 to 3600"),
    ({"seconds": math.nan}, "seconds=nan: expected seconds"),
    ({"seconds": "5"}, "seconds='5': expected a number"),
    ({"dtypes": ("fp64",)}, "dtype=fp64: expected one of"),
    ({"seed": 1.5}, "seed=1.5: expected an integer"),
    ({"device": "tpu"}, "device=tpu: expected one of auto, cpu, cuda"),
)


@pytest.mark.parametrize(("wrong", "says"), WRONG_ARGUMENTS, ids=[says for _, says in WRONG_ARGUMENTS])
def test_a_wrong_argument_is_refused_before_a_judge_starts(wrong: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("", encoding="utf-8")
    with pytest.raises(UsageError) as refused:
        normcheck.reward(**{"path": path, "op": "rmsnorm", "seconds": 1.0, **wrong})
    assert str(refused.value).startswith(says)


class Judges:
    """Answers in place of a judge: one after the other; an exception is raised."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.asked.append(question["spec"])
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return json.loads(Reward(**answer, seed=question["seed"]).json())  # type: ignore[arg-type, no-any-return]


RIGHT = {"ok": True, "score": 1.0, "worst_ratio": 0.5, "kind": "right", "stage": "right", "why": ""}
LOST, LATE = NoAnswer("the process that judges ended"), NoAnswer("no answer in 68 s", late=True)


def test_who_ends_the_judge_is_wrong_and_a_machine_that_cannot_judge_is_nobodys_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.py"
    path.write_text("", encoding="utf-8")

    def rewarded(*answers: object) -> tuple[Reward, int]:
        judges = Judges(*answers)
        monkeypatch.setattr(reward_module, "answer", judges)
        return normcheck.reward(path, "rmsnorm", 1), len(judges.asked)

    found, asked = rewarded(LOST, RIGHT)
    assert (found.kind, found.score, asked) == ("right", 1.0, 2)
    for answers in ((LOST, LOST, RIGHT), (LATE, RIGHT)):
        found, asked = rewarded(*answers)
        assert (found.kind, found.stage, found.score, asked) == ("wrong", "first case", 0.1, len(answers))
        assert "because of this file" in found.why
    found, asked = rewarded(LOST, LOST, LOST)
    assert (found.kind, found.score, found.ok) == ("unjudged", None, False)
    found, asked = rewarded(LATE, {**RIGHT, "ok": False, "kind": "unjudged", "score": None})
    assert (found.kind, found.score) == ("unjudged", None)
    assert found.kind in KINDS
    assert json.loads(found.json())["score"] is None


def test_what_torch_replaces_itself_is_no_cheating() -> None:
    import torch

    touched, before = torch_as_it_is(), torch.allclose
    try:
        torch.allclose = torch.testing.assert_close  # type: ignore[assignment]
        assert "replaced" not in touched()
        torch.allclose = lambda *_, **__: True  # type: ignore[assignment]
        assert touched() == "replaced torch.allclose"
    finally:
        torch.allclose = before


def test_the_command_prints_json_and_its_exit_code_says_the_kind(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("", encoding="utf-8")
    codes = {"right": 0, "wrong": 1, "cheating": 1, "unjudged": 3, "thin": 5}
    assert set(codes) == set(KINDS)
    for kind, code in codes.items():
        judges = Judges({**RIGHT, "kind": kind})
        monkeypatch.setattr(reward_module, "answer", judges)
        done = cli("reward", "mine.py:f", "--op", "rmsnorm", "--seconds", "2", "--seed", "7", "--dtype", "fp16")
        assert (done.code, json.loads(done.out)["seed"], done.err) == (code, 7, "")
        assert judges.asked == [f"{tmp_path}/mine.py:f"]
    assert cli("reward", "mine.py").err.startswith("normcheck: op='': expected one of layernorm")
