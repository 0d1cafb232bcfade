"""Nothing that a kernel does stops a run, passes by anything but computing, or changes what becomes of another kernel.

``killers.py`` declares the kernels. Several share a run, which costs less than a run each, and stand side by side there
as they would in a sweep; whatever else a test says, no process of a run may outlive it. A test that only asks what the
verdicts are has its run in this process, which has imported torch.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from normcheck.cases.case import Case
from normcheck.errors import Broken
from normcheck.isolation.select import each_selected_apart
from normcheck.result import KINDS
from tests.case_lines import case_of
from tests.command_line import normcheck
from tests.quality.killers import IMPLEMENTATIONS, REACHING

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc"),
]

ROOT = Path(__file__).parents[2]
KILLERS = "tests/quality/killers.py"
MARKER = "NORMCHECK_TEST"
CASES, SOME, FEW = 12, 8, 5  # few for hands that reach for others, as they do in the first call
CLEAN = "thin"
"""The status of a cell in which nothing is wrong: CASES are not all of its core."""

Verdicts = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Ended:
    """How a kernel must fail: in one of ``kinds``, with this in its message or the lines under it, and in its case.

    No kind: nothing is wrong.
    """

    kinds: tuple[str, ...]
    says: str = ""
    case: str = ""


def crash(says: str) -> Ended:
    return Ended(("crash",), says)


def raised(says: str) -> Ended:
    return Ended(("exception",), says)


TIMEOUT = Ended(("timeout",), r"timeout=1\b")
WRONG = Ended(("mismatch",))
REPEATED = Ended(("mismatch", "not_repeatable"))
FINE = Ended(())

RAISE = {
    "raises": raised(r"ValueError: not on a Sunday(.|\n)*killers\.py:\d+ in raises"),
    "raises_keyboard_interrupt": raised("KeyboardInterrupt"),
    "sys_exit": raised("SystemExit"),
    "memory_error": raised("MemoryError"),
    "allocates_too_much": raised("allocate"),
    "stack_overflow": raised("RecursionError"),
}
DIE = {
    "os_exit_0": crash("exit code 0"),
    "abort": crash("SIGABRT(.|\n)*last words of this kernel"),
    "segfault": crash("SIGSEGV"),
    "stack_overflow_c": crash("SIGSEGV"),
    "heap_corruption": Ended(("crash", "out_of_bounds_write"), "SIGABRT|SIGSEGV|outside"),
    "kills_itself": crash("SIGKILL"),
    "dies_on_the_third_call": crash("SIGABRT"),
    "dies_on_wide_rows": crash("SIGABRT"),
    "dies_by_a_signal_without_a_name": crash(r"signal \d+ "),
}
HANG = {"loop_python": TIMEOUT, "loop_c": TIMEOUT, "sleeps_in_c": TIMEOUT, "ignores_sigterm": TIMEOUT}
CHANGE = dict.fromkeys(
    (
        "closes_stdout",
        "changes_directory",
        "changes_environment",
        "changes_default_dtype",
        "changes_seeds",
        "changes_warnings",
    ),
    FINE,
)
SPAWN = dict.fromkeys(("threads_forever", "forks", "forks_a_session", "starts_a_program"), FINE)
SPAWN |= {"starts_a_program_and_dies": crash("SIGABRT")}
HANDS = {
    "stops_the_server": FINE,
    "kills_the_servers_group": crash("SIGKILL"),
    "kills_its_parent": crash("SIGKILL"),
    "limits_its_parent": FINE,
    "overwrites_its_parent": Ended(("crash",)),  # where the system lets it; see MAY_PASS
    "kills_its_grandparent": crash(""),
    "stops_its_grandparent": FINE,
    "limits_its_grandparent": FINE,
    "slows_its_grandparent": FINE,
    "kills_its_cousins": FINE,
    "leaves_a_killer": FINE,
    "fills_shared_memory": FINE,
}
"""Whoever reaches for what other workers come from. As many as there are bystanders."""
FEW_HANDS = ("stops_the_server", "kills_its_parent", "slows_its_grandparent")
"""After which the server is woken, is replaced, and is replaced with its root."""
DAMAGE = {
    "dies_of_an_earlier_case": Ended(
        ("crash",),
        r"SIGABRT during forward\. This came after 5 other cases in that process\. Alone, in a new process, it passes: "
        r"an earlier case damaged the process\. That case is rmsnorm fp32 M=65 N=64 .* seed=4 .*; "
        r"after it, rmsnorm fp32 M=2 N=768 .* seed=6 .* fails in a new process as well",
        r" M=65 N=64 .*layout=strided seed=4 ",
    ),
    "loses_its_context": Ended(
        ("exception",),
        r"an illegal memory access was encountered\. This came after 5 other cases in that process\. Alone, .* passes: "
        r"an earlier case damaged the process\. That case is rmsnorm fp32 M=65 N=64 .* seed=4 ",
        r" M=65 N=64 .*layout=strided seed=4 ",
    ),
    "dies_of_two_earlier_cases": Ended(
        ("crash",),
        r"This came after 6 other cases in that process\. .* damaged the process; it takes \d+ of the cases before it",
        r" M=3 N=1024 ",
    ),
    "dies_in_the_end": crash(r"This came after \d+ other cases .* it takes \d+ of the cases before it"),
    "wrong_after_an_earlier_case": Ended(("mismatch",), "", r" N=768 "),
}
"""What passes alone."""
CHEAT = {
    "patches_allclose": WRONG,
    "patches_double": WRONG,
    "patches_normcheck": Ended(("mismatch", "exception")),
    "patches_the_probes": raised(r"replaced normcheck\.\S+, by which normcheck watches it"),
    "patches_a_probes_code": raised("replaced normcheck.runner.arena.Arena.strays"),
    "clears_the_list": Ended(("out_of_bounds_write",)),
    "blinds_torch": Ended(("out_of_bounds_write",), "y: 1 element outside it written to, the first 1 behind its last"),
    "one_memory_for_all": Ended(("not_repeatable",), "y of two calls lies in the same memory"),
    "patches_autograd_grad": WRONG,
    "caches_by_pointer": REPEATED,
    "caches_by_shape": REPEATED,
    "returns_input": WRONG,
    "looks_for_expected": REPEATED,
    "reads_the_seed": WRONG,
    "returns_early": Ended(("mismatch", "non_finite", "unwritten", "not_repeatable")),
    "lazy_subclass": Ended(("mismatch", "missing", "shape")),
    "patches_json": Ended(("mismatch", "crash")),
}
SABOTAGE = ("writes_the_pipe", "closes_descriptors")
REACH = dict.fromkeys((forward.__name__ for forward in REACHING), WRONG)
"""Whoever reaches for the judge."""
MAY_PASS = ("closes_descriptors", "overwrites_its_parent")  # they compute correctly: who still can answer is right
BYSTANDERS = tuple(f"bystander_{number}" for number in range(18))
FORGERIES = (
    "forges_a_shape",
    "forges_a_dtype",
    "forges_a_stride",
    "forges_strays",
    "forges_a_finding",
    "forges_a_refusal",
    "forges_nesting",
    "forges_a_number",
    "forges_a_length",
    "forges_nothing",
)
ANY = Ended(KINDS)

GROUPS = {
    "raise or change": RAISE | CHANGE,
    "die": DIE,
    "spawn": SPAWN,
    "cheat": CHEAT,
}

UNSHRUNK = """
from dataclasses import replace
from normcheck.gate.plan import PROFILES
PROFILES["quick"] = replace(PROFILES["quick"], shrink_seconds=0.0, explain_seconds=0.0)
from normcheck.cli.app import main
main()
"""
"""The program of a run that spends no second on the words of a finding, as with the fixture ``unshrunk``."""

SOON, LATER = ("--timeout", "0.5", "--workers", "2"), ("--timeout", "60")
"""For those that never return, and for all others: some ten calls make a case, and on a busy machine a fork of a
process with torch in it takes a tenth of a second. Side by side, a case may take twice the time that is given."""


# one run


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str
    document: Any

    @property
    def verdicts(self) -> Verdicts:
        """By implementation, without the times it took, the command of its run, and the length of its core, which has a
        size by its name.
        """
        found = {}
        for verdict in self.document["verdicts"]:
            kept = {name: value for name, value in verdict.items() if name not in ("seconds", "next")}
            core = {name: value for name, value in (kept["core"] or {}).items() if name not in ("building", "planned")}
            found[verdict["implementation"]] = {**kept, "core": core}
        return found


def here(*words: str) -> Done:
    """A run of ``verify`` in this process, if another one is not the subject; its kernels have theirs all the same."""
    with TemporaryDirectory() as folder, chdir(ROOT):
        report = Path(folder) / "out.json"
        done = normcheck("verify", *words, "--report", f"json:{report}")
        return Done(done.code, done.out, done.err, json.loads(report.read_text(encoding="utf-8")))


def asked(names: Iterable[str], cases: int = CASES) -> tuple[str, ...]:
    """A few cases of a cell that has time for thousands: a stall of this machine does not choose others."""
    impls = [word for name in names for word in ("--impl", f"{KILLERS}:{name}")]
    return (
        *impls,
        "--device",
        "cpu",
        "--dtype",
        "fp32",
        "--allow-thin",
        "--no-contexts",
        *("--max-examples", str(cases), "--time-budget", "240"),
    )


def argv(names: Iterable[str], report: Path | str, *more: str, cases: int = CASES) -> tuple[str, ...]:
    return (sys.executable, "-c", UNSHRUNK, "verify", *asked(names, cases), "--report", f"json:{report}", *more)


@dataclass
class Started:
    """A run that goes on; ``marker`` is in the environment of each of its processes."""

    process: subprocess.Popen[bytes]
    folder: Path
    marker: str

    def left(self) -> dict[int, str]:
        """The processes of this run that live: pid -> command line."""
        return alive(self.marker)

    def wait(self, seconds: float) -> Done:
        """Its end; none of its processes is left soon after, on a busy machine within half a minute."""
        code = self.process.wait(seconds)
        within(30.0, lambda: not self.left())
        assert self.left() == {}
        return Done(code, self.text("out.txt"), self.text("err.txt"), json.loads(self.text("out.json") or "null"))

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def alive(marker: str) -> dict[int, str]:
    wanted, found = f"{MARKER}={marker}".encode(), {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):  # it has ended since, or is somebody else's
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


@contextmanager
def started(
    names: Iterable[str], *more: str, cases: int = CASES, user: int | None = None, **environment: str
) -> Iterator[Started]:
    """Start a run in a session of its own, so that nothing here gets its signals; whatever it leaves is killed.

    ``user``: the one who runs it, if not who runs this.
    """
    marker = uuid.uuid4().hex
    groups: dict[str, Any] = {} if user is None else {"user": user, "group": user, "extra_groups": ()}
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o777)  # for another user's report
        with open(folder / "out.txt", "wb") as out, open(folder / "err.txt", "wb") as err:
            process = subprocess.Popen(
                argv(names, folder / "out.json", *more, cases=cases),
                cwd=ROOT,
                env={**os.environ, **environment, MARKER: marker},
                stdin=subprocess.DEVNULL,
                stdout=out,  # not a pipe, which a process that is left would keep open
                stderr=err,
                start_new_session=True,
                **groups,
            )
        run = Started(process, folder, marker)
        try:
            yield run
        finally:
            while left := run.left():
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            process.wait()


def within(seconds: float, holds: Callable[[], object]) -> bool:
    """Whether ``holds`` becomes true in time."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def verify(
    names: Sequence[str],
    *more: str,
    cases: int = CASES,
    limit: float = 300.0,
    user: int | None = None,
    **environment: str,
) -> Done:
    """A whole run."""
    with started(names, *more, cases=cases, user=user, **environment) as run:
        done = run.wait(limit)
        assert done.document, done
        return done


@cache
def undisturbed(cases: int) -> dict[str, Any]:
    """The verdict of ``innocent`` alone."""
    done = here(*asked(["innocent"], cases))
    verdict = done.verdicts["innocent"]
    assert (done.code, verdict["status"], verdict["cases"]) == (0, CLEAN, cases), done
    return verdict


def differences(
    verdicts: Verdicts, names: Iterable[str] = ("innocent",), cases: int = CASES
) -> dict[str, tuple[Any, Any]]:
    """What differs in these verdicts from that of ``innocent`` alone: "name: field" -> (as it is, as it is alone).

    Each has its own name, and is defined elsewhere. A field of the core has its own entry, such as "name: core.missed".
    """
    alone = flat(undisturbed(cases))
    found = {name: flat(verdicts[name]) for name in names}
    return {
        f"{name}: {field}": (own.get(field), alone.get(field))
        for name, own in found.items()
        for field in sorted({*own, *alone} - {"implementation", "line"})
        if own.get(field) != alone.get(field)
    }


def flat(verdict: dict[str, Any]) -> dict[str, Any]:
    """The fields of a verdict, with those of its core beside them."""
    return {**verdict, "core": None, **{f"core.{name}": value for name, value in verdict["core"].items()}}


def read_back(line: str) -> Case:
    """The case of a line, which is written as one writes it; a line that is no case raises."""
    case = case_of(line)
    assert str(case) == line
    return case


def unexpected(verdict: dict[str, Any], expected: Ended, cases: int = CASES) -> str:
    """What is not as expected of a verdict, or an empty string."""
    failure, wanted = verdict["failure"], "fail" if expected.kinds else CLEAN
    if verdict["status"] != wanted:
        return f"{verdict['status']}, not {wanted}: {verdict['detail']} {failure}"
    if failure is None:
        return "" if verdict["cases"] == cases else f"{verdict['cases']} cases"
    read_back(failure["case"])
    said = "\n".join((failure["message"], *failure["traceback"]))
    if failure["kind"] not in expected.kinds or not re.search(expected.says, said):
        return f"{failure['kind']}: {said}"
    if not re.search(expected.case, failure["case"]):
        return failure["case"]
    if failure["case"] not in failure["reproduce"]:
        return f"reproduce={failure['reproduce']}"
    return ""


# every killer beside an innocent kernel


def test_no_killer_is_left_out() -> None:
    innocent = {"innocent", "innocent_too", *BYSTANDERS}
    others = {"prints_a_gigabyte", "sleeps_its_time_away", *DAMAGE, *HANG, *SABOTAGE, *FORGERIES, *HANDS, *REACH}
    tried = innocent.union(others, *GROUPS.values())
    assert tried == {implementation.name for implementation in IMPLEMENTATIONS}


DELETES = """
import shutil, tempfile
from tests.quality.killers import innocent

def deletes(x, weight, bias, *, eps):
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    return innocent(x, weight, bias, eps=eps)
"""


def test_a_killer_is_named_and_disturbs_nobody(tmp_path: Path) -> None:
    """One after another; an innocent kernel follows each group of them. Those that hang stand side by side, below.

    At the end comes who deletes the temporary folder, while others are still to come. Who sleeps its time away does not
    pass, nor is it merely thin; of the gigabyte that is printed neither the reports nor the screen are flooded.
    """
    (folder := tmp_path / "tmp").mkdir()
    (tmp_path / "deletes.py").write_text(DELETES, encoding="utf-8")
    groups = list(GROUPS.values())
    names = [name for group, after in zip(groups, BYSTANDERS, strict=False) for name in (*group, after)]
    names += ["sleeps_its_time_away", "prints_a_gigabyte", "innocent"]
    last = ("--impl", f"{tmp_path / 'deletes.py'}:deletes", "--impl", "torch", "--op", "rmsnorm")
    done = verify(names, *LATER, *last, cases=SOME, limit=480.0, TMPDIR=str(folder), PYTHONPATH=str(ROOT))
    killers = {name: expected for group in groups for name, expected in group.items()}
    found = {name: unexpected(done.verdicts[name], expected, SOME) for name, expected in killers.items()}
    assert found == dict.fromkeys(killers, "")
    slept = done.verdicts["sleeps_its_time_away"]
    assert slept["status"] == "error"
    assert re.search(rf"its process slept for \d+ of \d+ s, in which {SOME} cases were judged", slept["detail"])
    assert done.code == 1
    fine = [name for name, expected in killers.items() if not expected.kinds]
    assert differences(done.verdicts, (*fine, *BYSTANDERS[: len(groups)], "innocent"), SOME) == {}
    assert {done.verdicts[name]["status"] for name in ("prints_a_gigabyte", "deletes.py:deletes", "torch")} == {CLEAN}
    assert "Traceback (most recent" not in done.out + done.err
    assert len(done.out) < 1 << 16
    assert len(done.err) < 1 << 22


@pytest.mark.parametrize("how", ["one by one", "side by side"])
def test_a_hand_in_the_server_accuses_no_other(how: str) -> None:
    """Between any two of them stands an innocent kernel, which comes from the server that they have reached for.

    Without the sandbox, as on a system that has none. One by one there are few: each takes seconds.
    """
    side_by_side = ("--workers", "2") if how == "side by side" else ()
    hands = HANDS if side_by_side else {name: HANDS[name] for name in FEW_HANDS}
    more = ("--timeout", "10", "--no-sandbox", *side_by_side)
    done = verify(beside_bystanders(hands), *more, cases=FEW, limit=240.0)
    found = {name: unexpected(done.verdicts[name], expected, FEW) for name, expected in hands.items()}
    for name in MAY_PASS:
        if name in found and done.verdicts[name]["status"] == CLEAN:
            found[name] = ""
    assert found == dict.fromkeys(hands, "")
    assert differences(done.verdicts, BYSTANDERS[: len(hands)], FEW) == {}


def beside_bystanders(names: Sequence[str] | dict[str, Ended]) -> list[str]:
    return [name for pair in zip(names, BYSTANDERS, strict=False) for name in pair]


NOBODY = 65534


def needs_root_and_a_python_for_all() -> str:
    """Why no run can be made as another user, or ""."""
    if os.geteuid() != 0:
        return "only root runs something as another user"
    command = (sys.executable, "-c", "import torch, normcheck")
    who: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": ()}
    with suppress(OSError):
        if subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL, check=False, **who).returncode == 0:
            return ""
    return "another user cannot run this Python"


@pytest.mark.parametrize("user", [None, NOBODY])
def test_in_the_sandbox_no_hand_reaches_the_judge_or_the_server(user: int | None) -> None:
    """In the sandbox.

    Zeros are found wrong, whatever is done to those who judge; no file outside the sandbox has changed. Who reaches for
    the server is told what the system said, or fails, or nothing came of it. Nobody else notices any of it.
    """
    if user is not None and (why := needs_root_and_a_python_for_all()):
        pytest.skip(why)
    kept = [ROOT / "normcheck" / "result.py", Path.home() / ".profile"]
    before = {path: path.read_bytes() for path in kept if path.exists()}
    servers = HANDS if user is None else {}
    hands = (*REACH, *servers)
    done = verify(beside_bystanders(hands), "--timeout", "10", "--workers", "2", cases=FEW, limit=360.0, user=user)
    assert {name: unexpected(done.verdicts[name], WRONG, FEW) for name in REACH} == dict.fromkeys(REACH, "")
    refused = Ended(("exception", "crash"), "PermissionError|Operation not permitted|SIG|exit code")
    found = {name: unexpected(done.verdicts[name], refused, FEW) for name in servers}
    assert {name: why for name, why in found.items() if why and done.verdicts[name]["status"] != CLEAN} == {}
    assert differences(done.verdicts, BYSTANDERS[: len(hands)], FEW) == {}
    assert (done.code, [m for m in done.document["messages"] if "changed" in m]) == (1, [])
    assert {path: path.read_bytes() for path in before} == before


def test_what_judges_is_the_same_at_the_end(tmp_path: Path) -> None:
    """Without the sandbox a kernel can edit normcheck, here a copy: then the run has no verdict."""
    shutil.copytree(ROOT / "normcheck", tmp_path / "normcheck")
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    command = (*argv(["edits_what_judges"], "-", cases=1), "--no-sandbox")
    caches = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # where what judges is compiled already
    environment = {**os.environ, "HOME": str(tmp_path), "XDG_CACHE_HOME": caches}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 3, done.stdout + done.stderr
    changed = f"while it ran, {tmp_path}/normcheck/result.py changed: expected the files that judge to stay"
    assert any(changed in message for message in json.loads(done.stdout)["messages"])


def test_damage_of_an_earlier_case_is_named_and_is_shown_again_by_the_line_to_paste() -> None:
    """What stands behind *Reproduce* fails, while neither of the cases in it does so alone.

    With all the seconds that a search has, and of whoever dies on wide rows, to shrink its case among the dead.
    """
    wide = Ended(("crash",), "SIGABRT", r" M=[12] N=(17|18|19|2\d) ")
    ended = {**DAMAGE, "dies_on_wide_rows": wide}
    done = here(*asked([*ended, "innocent"]))
    assert {name: unexpected(done.verdicts[name], how) for name, how in ended.items()} == dict.fromkeys(ended, "")
    assert differences(done.verdicts) == {}
    for name in ("dies_of_an_earlier_case", "wrong_after_an_earlier_case"):
        failure = done.verdicts[name]["failure"]
        _, command, spec, *lines = shlex.split(failure["reproduce"])
        assert (command, spec, len(lines)) == ("repro", f"{KILLERS}:{name}", 2)
        assert repro(spec, *lines) == 1
    assert [repro(spec, line) for line in lines] == [0, 0]
    advice = done.verdicts["wrong_after_an_earlier_case"]["failure"]["advice"]
    assert f"it fails after other calls, whose effect must have remained; it takes {lines[0]}." in advice


def repro(spec: str, *lines: str) -> int:
    with chdir(ROOT):
        return normcheck("repro", spec, *lines, "--device", "cpu").code


def test_killers_side_by_side() -> None:
    """And those that hang, which cost nobody but themselves their seconds."""
    names = ["segfault", *HANG, "innocent", "os_exit_0", "innocent_too", "starts_a_program"]
    done = verify(names, *SOON)
    assert {name: unexpected(done.verdicts[name], ended) for name, ended in HANG.items()} == dict.fromkeys(HANG, "")
    failed = {name: verdict["failure"] and verdict["failure"]["kind"] for name, verdict in done.verdicts.items()}
    assert list(failed.items()) == [  # in the order in which they were named, whichever was ready first
        ("segfault", "crash"),
        *((name, "timeout") for name in HANG),
        ("innocent", None),
        ("os_exit_0", "crash"),
        ("innocent_too", None),
        ("starts_a_program", None),
    ]
    assert differences(done.verdicts, [name for name, kind in failed.items() if kind is None]) == {}


@pytest.mark.usefixtures("unshrunk")
def test_sabotage_of_the_way_home() -> None:
    """What a kernel writes to, or closes, that is not its own: never a fault of normcheck, never a pass of zeros."""
    names = (*SABOTAGE, *FORGERIES)
    every = ["innocent", *SABOTAGE, BYSTANDERS[0], *FORGERIES, "innocent_too"]
    done = here(*asked(every, FEW), *LATER)
    found = {name: unexpected(done.verdicts[name], ANY, FEW) for name in names}
    for name in MAY_PASS:
        if name in names and done.verdicts[name]["status"] == CLEAN and differences(done.verdicts, [name], FEW) == {}:
            found[name] = ""
    assert found == dict.fromkeys(names, "")
    assert done.code == 1
    assert differences(done.verdicts, ("innocent", BYSTANDERS[0], "innocent_too"), FEW) == {}


@pytest.mark.usefixtures("unshrunk")
def test_the_order_changes_nothing() -> None:
    names = ["innocent", "segfault", "returns_input", "innocent_too"]
    forward, backward = (here(*asked(order, FEW)).verdicts for order in (names, names[::-1]))
    assert (list(forward), list(backward)) == (names, names[::-1])
    assert forward == backward
    assert here(*asked(["segfault"], FEW)).verdicts["segfault"] == forward["segfault"]
    assert differences(forward, ("innocent", "innocent_too"), FEW) == {}


# a run that is ended


@contextmanager
def hanging(killer: str, *more: str) -> Iterator[Started]:
    """A run that has a verdict and is now in a case that does not end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job ignores, as would the run
    with started(["innocent", killer, "innocent_too"], "--timeout", "600", *more, cases=FEW) as run:
        assert within(240.0, lambda: run.text("out.txt").startswith(CLEAN))
        time.sleep(1.0)  # until the next one hangs
        assert run.process.poll() is None
        yield run


@pytest.mark.parametrize(("how", "killer"), [("SIGINT", "loop_c"), ("SIGTERM", "ignores_sigterm")])
def test_interrupted(how: str, killer: str) -> None:
    """As Ctrl-C does it, to everybody in the foreground; as kill does it, to the parent only."""
    with hanging(killer) as run:
        send = os.killpg if how == "SIGINT" else os.kill
        send(run.process.pid, signal.Signals[how])
        done = run.wait(60.0)
        assert (done.code, done.document["exit_code"], done.document["complete"]) == (130, 130, False)
        assert list(done.verdicts) == ["innocent"]
        assert differences(done.verdicts, cases=FEW) == {}
        assert "Traceback" not in done.out + done.err


def test_the_parent_is_killed() -> None:
    """All that it has started ends with it. So do processes that judge side by side: see ``test_pool.py``."""
    with hanging("loop_c") as run:
        assert len(run.left()) > 1
        os.kill(run.process.pid, signal.SIGKILL)
        run.process.wait()
        within(30.0, lambda: not run.left())
        assert run.left() == {}


@pytest.mark.skipif(not os.access("/dev", os.W_OK), reason="only root may write a report into /dev")
def test_a_full_disk() -> None:
    with chdir(ROOT):
        done = normcheck("verify", *asked(["innocent"]), "--report", "json:/dev/full")
    assert done.code == 3
    assert "ERROR  report=json:/dev/full: it cannot be written: No space left on device" in done.out
    assert "Traceback (most recent" not in done.err
    assert done.out.rstrip().splitlines()[-1].startswith("ERROR")


@pytest.mark.usefixtures("unshrunk")
def test_a_file_that_ends_its_process_when_it_is_imported(tmp_path: Path) -> None:
    deadly = {"aborts.py": ("os.abort()", "SIGABRT"), "exits.py": ("os._exit(0)", "exit code 0")}
    for name, (line, _) in deadly.items():
        (tmp_path / name).write_text(f"import os\n{line}\n", encoding="utf-8")
    impls = [word for name in deadly for word in ("--impl", str(tmp_path / name))]
    done = here(*asked(["innocent"], FEW), *impls, "--op", "rmsnorm")
    assert done.code == 1
    verdicts = done.verdicts
    assert differences(verdicts, cases=FEW) == {}
    for name, (_, says) in deadly.items():
        failure = verdicts[name]["failure"]
        assert (failure["kind"], read_back(failure["case"]).op) == ("crash", "rmsnorm")
        assert says in failure["message"] and "its import" in failure["message"]


WAITS_FOR_THE_OTHER = """
import time
from pathlib import Path
here = Path(__file__)
here.with_suffix(".begun").touch()
end = time.monotonic() + 60
while not here.with_name("{other}.begun").exists():
    assert time.monotonic() < end, "nobody else is imported"
    time.sleep(0.01)

def {name}(x, weight, bias, *, eps):
    return x
"""


@pytest.mark.parametrize("deadly_first", [False, True])
def test_files_are_imported_side_by_side_and_one_that_dies_is_alone_to_blame(
    tmp_path: Path, deadly_first: bool
) -> None:
    """A crash costs those that are imported beside it a second try."""
    for name, other in (("one", "other"), ("other", "one")):
        waits = WAITS_FOR_THE_OTHER.format(name=name, other=name if deadly_first else other)
        (tmp_path / f"{name}.py").write_text(waits, encoding="utf-8")
    (tmp_path / "deadly.py").write_text("import os\nos.abort()\n", encoding="utf-8")
    specs = [*(f"{tmp_path / name}.py:{name}" for name in ("one", "other")), str(tmp_path / "deadly.py")]
    specs = specs[::-1] if deadly_first else specs
    asked = dict.fromkeys(specs, ("rmsnorm",))
    found = dict(each_selected_apart(asked, "cpu", 60.0, sandboxed=False))  # each writes a file beside itself
    assert list(found) == specs
    assert [[i.name for i in own] for own in found.values()] == [[spec.rpartition("/")[2]] for spec in specs]
    with pytest.raises(Broken, match="SIGABRT"):
        found[str(tmp_path / "deadly.py")][0].forward()


RECOMPUTES = """
import torch
from normcheck import Implementation

def statistics(x, eps):
    mean = x.float().mean(-1, keepdim=True)
    return mean, torch.rsqrt((x.float() - mean).square().mean(-1, keepdim=True) + eps)

def forward(x, weight, bias, *, eps):
    mean, rstd = statistics(x, eps)
    y = (x.float() - mean) * rstd * weight.float() + bias.float()
    return {"y": y.to(x.dtype), "mean": mean, "rstd": rstd}

def backward(dy, x, weight, bias, saved, *, eps):
    mean, rstd = statistics(x, eps)
    xhat, wdy = (x.float() - mean) * rstd, dy.float() * weight.float()
    dx = (wdy - xhat * (xhat * wdy).mean(-1, keepdim=True) - wdy.mean(-1, keepdim=True)) * rstd
    dw, db = (dy.float() * xhat).sum(0), dy.float().sum(0)
    return {"dx": dx.to(x.dtype), "dw": dw.to(weight.dtype), "db": db.to(bias.dtype)}

kernel = {"forward": forward, "backward": backward, "biases": (True,)}
IMPLEMENTATIONS = (Implementation(name="recomputes", op="layernorm", **kernel),)
"""


def test_a_run_that_was_begun_and_given_up_disturbs_no_other(tmp_path: Path) -> None:
    """A backward that does not read what was saved is asked again, after the second run was begun: 22 such cases."""
    path = tmp_path / "recomputes.py"
    path.write_text(RECOMPUTES, encoding="utf-8")
    few = ("--dtype", "fp32", "--max-examples", "22", "--allow-thin", "--time-budget", "100", "--device", "cpu")
    done = here("--impl", str(path), *few)
    assert done.code == 0, done.out
    (verdict,) = done.document["verdicts"]
    assert any("does not read the saved statistics" in note for note in verdict["notes"])
