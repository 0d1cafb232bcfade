"""A file under test is checked again when it is saved: what failed before first, and a run that hangs is given up."""

from __future__ import annotations

import io
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import rich
from rich.console import Console

from normcheck.errors import NormcheckError, UsageError
from normcheck.gate import watch
from normcheck.gate.options import VerifyOptions
from normcheck.gate.watch import Saves, watched
from normcheck.runner.interruption import interruptible
from tests.command_line import Cli

KERNEL = """
import time, torch

def rmsnorm(x, weight, bias, *, eps):
    {first}
    wide = x.float()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + {eps}) * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)
"""
RIGHT, WRONG = (KERNEL.format(first="pass", eps=eps) for eps in ("eps", "2 * eps"))
HANGS = KERNEL.format(first="time.sleep(1000)", eps="eps")


UNSHRUNK = """
import dataclasses
import normcheck.gate.plan as plan
from normcheck.cli.app import main

brief = dataclasses.replace(plan.PROFILES["quick"], shrink_seconds=0.0, explain_seconds=0.0)
plan.PROFILES["quick"] = brief
main()
"""
"""``normcheck``, which shrinks no failure and explains none: when it looks again is the subject."""


class Watching:
    """``normcheck verify --watch`` on a file, as a user has it in another window."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "mine.py"
        self.save(WRONG)
        command = (sys.executable, "-u", "-c", UNSHRUNK, "verify", "--impl", "mine.py", "--dtype", "fp32")
        self.process = subprocess.Popen(
            (*command, "--device", "cpu", "--max-examples", "24", "--no-contexts", "--watch"),
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line.rstrip())

    def save(self, text: str) -> None:
        self.file.write_text(text, encoding="utf-8")

    def until(self, wanted: str, seconds: float = 40.0) -> list[str]:
        """The lines up to the first one with ``wanted`` in it."""
        found: list[str] = []
        end = time.monotonic() + seconds
        while not found or wanted not in found[-1]:
            try:
                found.append(self.lines.get(timeout=max(0.01, end - time.monotonic())))
            except queue.Empty:
                pytest.fail(f"no {wanted!r} within {seconds} s, only:\n" + "\n".join(found))
        return found


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[Watching]:
    started = Watching(tmp_path)
    yield started
    if started.process.poll() is None:
        for child in psutil.Process(started.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                child.kill()
        started.process.kill()
    started.process.wait()


@pytest.mark.slow
def test_each_save_is_checked_and_what_failed_before_comes_first(watching: Watching) -> None:
    watching.until("FAIL  1 of 1 cell failed: rmsnorm/mine.py:rmsnorm fp32")
    watching.until("Watching ")

    watching.save(RIGHT)
    first = watching.until("passes now: what failed before in rmsnorm mine.py:rmsnorm fp32")
    assert "saved: mine.py" in first[0]
    assert not any("cases," in line for line in first)  # no cell was run to its end before
    watching.until("THIN  1 of 1 cell thin")  # 24 cases
    watching.until("Watching ")

    watching.save(WRONG)
    watching.until("FAIL rmsnorm mine.py:rmsnorm fp32: y is wrong")
    watching.until("Watching ")

    watching.save("def (")
    watching.until("importing it raised SyntaxError")
    watching.until("Watching ")

    watching.save(HANGS)
    watching.until("saved: mine.py")
    time.sleep(1.0)
    watching.save(RIGHT)  # the run that hangs is given up
    watching.until("passes now: what failed before")
    watching.until("Watching ")

    children = psutil.Process(watching.process.pid).children(recursive=True)
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(20) == 5  # of the last whole run, which is thin
    assert not [child for child in psutil.wait_procs(children, 10)[1] if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_ctrl_c_in_a_run_ends_it_as_any_other(watching: Watching) -> None:
    watching.until("Watching ")
    watching.save(HANGS)
    watching.until("saved: mine.py")
    time.sleep(1.0)
    watching.process.send_signal(signal.SIGINT)
    assert watching.process.wait(20) == 130
    watching.until("INCOMPLETE")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("verify --watch", "watch: expected --impl with a file of yours, such as mine.py"),
        ("verify --watch --impl torch", "watch: expected --impl with a file of yours, such as mine.py"),
    ],
)
def test_there_must_be_something_to_watch(cli: Cli, line: str, said: str) -> None:
    done = cli(*line.split())
    assert done.code == 2
    assert said in done.err


def test_without_what_watches_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"watch: expected watchfiles; pip install .*\[watch\]"):
        watched(VerifyOptions(impl=("mine.py",)))


def test_what_is_watched(tmp_path: Path) -> None:
    """Folders of files, one each; of a package its own. Nothing is imported for it."""
    one, other = (tmp_path / name / "mine.py" for name in ("a", "b"))
    specs = (f"{one}", f"{one}:rmsnorm", f"{other}:x", "torch", "rich.no.such.module:name", "sys:x", "__main__:x")
    folders = watched(VerifyOptions(impl=specs))
    assert folders == (str(one.parent), str(other.parent), str(Path(rich.__file__).parent))


def seen(saves: Saves, seconds: float) -> bool:
    """Wait until it has seen a save, but no longer than this."""
    end = time.monotonic() + seconds
    while not saves.saved and time.monotonic() < end:
        time.sleep(0.02)
    return saves.saved


def looking(saves: Saves, folder: Path) -> None:
    """Wait until it looks, however busy this machine is: until it has seen a save."""
    for _ in range(100):
        (folder / "seen.py").write_text("x", encoding="utf-8")
        if seen(saves, 0.3):
            break
    with saves.run():  # clears what was seen
        pass


def saves_in(folder: Path, act: Callable[[], object]) -> tuple[str, ...]:
    with Saves((str(folder),)) as saves:
        looking(saves, folder)
        act()
        assert seen(saves, 30.0)
        return saves.names


@pytest.mark.slow
def test_files_that_are_no_sources_start_nothing(tmp_path: Path) -> None:
    def act() -> None:
        for name in ("mine.py~", ".mine.py.swp", "notes.md", "report.json"):
            (tmp_path / name).write_text("x", encoding="utf-8")
        (tmp_path / "__pycache__").mkdir()
        (tmp_path / "__pycache__" / "mine.py").write_text("x", encoding="utf-8")
        time.sleep(0.5)
        (tmp_path / "kernel.cu").write_text("x", encoding="utf-8")

    assert saves_in(tmp_path, act) == ("kernel.cu",)


@pytest.mark.slow
def test_what_kernels_compile_starts_nothing(tmp_path: Path) -> None:
    """The folder of a run may lie in the one that is watched, as /tmp does."""

    def act() -> None:
        own = tmp_path / "normcheck-run-abc" / "triton"
        own.mkdir(parents=True)
        time.sleep(0.3)
        (own / "launcher.c").write_text("x", encoding="utf-8")
        time.sleep(0.5)
        (tmp_path / "mine.py").write_text("x", encoding="utf-8")

    assert saves_in(tmp_path, act) == ("mine.py",)


def test_a_folder_that_cannot_be_watched_is_said(tmp_path: Path) -> None:
    with Saves((str(tmp_path / "none"),)) as saves, pytest.raises(NormcheckError, match="folders that can be watched"):
        saves.wait()


def test_a_run_that_does_not_end_by_itself_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_PATIENCE_SECONDS", 0.1)
    with Saves((str(tmp_path),)) as saves, interruptible(signal.SIGINT):  # as ``watch``: a background job ignores it
        looking(saves, tmp_path)
        begun = time.monotonic()

        def hangs() -> None:
            with saves.run():
                (tmp_path / "mine.py").write_text("x", encoding="utf-8")
                time.sleep(90)

        with pytest.raises(KeyboardInterrupt):
            hangs()
        assert time.monotonic() - begun < 45
        assert saves.saved and saves.names == ("mine.py",)
        with saves.run():
            assert not saves.saved


def test_a_terminal_is_cleared_and_a_pipe_is_not() -> None:
    terminal, pipe = Console(file=io.StringIO(), force_terminal=True), Console(file=io.StringIO())
    for console in (terminal, pipe):
        watch._clear(console)
    assert "\x1b[2J" in terminal.file.getvalue()  # type: ignore[attr-defined]
    assert pipe.file.getvalue() == ""  # type: ignore[attr-defined]
