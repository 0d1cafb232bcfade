"""What a kernel's process may do: write to a folder of its own, and nothing to others. Each layer alone, and all."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from normcheck.errors import NormcheckError
from normcheck.impls import _cudnn_shelf
from normcheck.impls._cudnn_shelf import StoredPlan
from normcheck.isolation import landlock, sandbox, seccomp
from normcheck.isolation.sandbox import Reach, Sandbox
from normcheck.isolation.select import reach, select_apart
from tests.isolation.test_isolation import UNSHRUNK
from tests.quality.killers import namespaces

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux holds it")
needs_landlock = pytest.mark.skipif(not landlock.version(), reason="this Linux has no Landlock")


def in_a_child(act: Callable[[], object]) -> object:
    """What ``act`` returns in a process forked from this one, as JSON has it; the name of its error if it raises."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = act()
        except BaseException as error:
            answer = type(error).__name__
        os.write(tell, json.dumps(answer).encode())
        os._exit(0)
    os.close(tell)
    with os.fdopen(told, "rb") as file:
        answer = json.loads(file.read() or b'"it ended"')
    os.waitpid(child, 0)
    return answer


@pytest.mark.slow
def test_what_a_kernel_can_reach(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.touch()
    root = os.geteuid() == 0
    loose = reach(str(file), sandboxed=False)
    assert (loose.files, loose.signals, loose.limits, loose.rights) == (True, True, True, root)
    held = reach(str(file))
    assert held == Reach(
        files=not landlock.version(), memory=False, signals=landlock.version() < 6, limits=False,
        services=sandbox.needs_sockets(), rights=False, programs=False, spaces=False,
    )  # fmt: skip
    assert loose.spaces == ("unshare" in cast(list[str], in_a_child(namespaces)))


@needs_landlock
def test_landlock_alone(tmp_path: Path) -> None:
    """Files and folders outside cannot be made, changed, cut, moved or removed; a program has no other rights."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "file").write_text("as it was", encoding="utf-8")

    def act() -> list[str]:
        sandbox._prctl(sandbox._PR_SET_NO_NEW_PRIVS, 1)
        landlock.restrict([str(inside), "/dev/null", "/not/there"])
        done = []
        for folder in (inside, outside):
            file = str(folder / "file")
            for name, attempt in {
                "make": lambda at=folder: (at / "new").touch(),
                "folder": lambda at=folder: (at / "deep").mkdir(),
                "change": lambda at=file: os.close(os.open(at, os.O_WRONLY)),
                "cut": lambda at=file: os.truncate(at, 0),
                "move": lambda at=file: os.rename(at, inside / "moved"),
                "program": lambda at=folder: subprocess.run(
                    ["touch", str(at / "by a program")], check=True, stderr=subprocess.DEVNULL
                ),
                "remove": lambda at=folder: (at / "deep").rmdir(),
                "read": lambda at=outside: (at / "file").read_text(encoding="utf-8"),
            }.items():
                try:
                    attempt()  # type: ignore[no-untyped-call]
                    done.append(f"{folder.name} {name}")
                except (OSError, subprocess.CalledProcessError):
                    pass
        return done

    every = ("make", "folder", "change", "cut", "move", "program", "remove", "read")
    assert in_a_child(act) == [*(f"inside {name}" for name in every), "outside read"]
    assert (outside / "file").read_text(encoding="utf-8") == "as it was"


def test_seccomp_alone() -> None:
    """Its own limits it may set, as a library does that raises the number of files."""

    me, high = os.getpid(), os.getpriority(os.PRIO_PROCESS, 0)

    def filtered(act: Callable[[], object], sockets: bool = False) -> object:
        def begin() -> object:
            sandbox._prctl(sandbox._PR_SET_NO_NEW_PRIVS, 1)
            seccomp.refuse_hands_on_others(sockets=sockets)
            return str(act())[:0]

        return in_a_child(begin)

    refused = "PermissionError"
    assert filtered(lambda: resource.prlimit(0, resource.RLIMIT_CORE)) == ""
    assert filtered(lambda: resource.prlimit(me, resource.RLIMIT_CORE)) == refused
    assert filtered(lambda: os.setpriority(os.PRIO_PROCESS, 0, high)) == ""
    assert filtered(lambda: os.setpriority(os.PRIO_PROCESS, me, high)) == refused
    assert filtered(socket.socketpair) == ""
    assert filtered(lambda: socket.socket(socket.AF_INET)) == ""
    assert filtered(lambda: socket.socket(socket.AF_UNIX)) == refused
    assert filtered(lambda: socket.socket(socket.AF_UNIX), sockets=True) == ""
    assert filtered(lambda: subprocess.run(["true"], check=True)) == ""


def test_seccomp_lets_nobody_be_root_in_a_namespace_of_its_own() -> None:
    """By none of three calls; threads and programs start as before, though a new C library calls clone3 for them."""
    if in_a_child(namespaces) != ["clone", "clone3", "unshare"]:
        pytest.skip("this system has no such namespaces for this user")

    def act() -> object:
        sandbox._prctl(sandbox._PR_SET_NO_NEW_PRIVS, 1)
        seccomp.refuse_hands_on_others(sockets=False)
        ran: list[str] = []
        thread = threading.Thread(target=lambda: ran.append("thread"))
        thread.start()
        thread.join()
        return [*namespaces(), *ran, subprocess.run(["echo", "program"], capture_output=True, text=True).stdout]

    assert in_a_child(act) == ["thread", "program\n"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may write there at all")
def test_the_systems_part_of_proc_is_closed_to_root(tmp_path: Path) -> None:
    """CUDA writes its threads' names to /proc, also in what a kernel starts, so all else of it must be read-only."""
    folder = Sandbox(str(tmp_path / "own"))
    folder.make()
    name = ("sh", "-c", "echo x > /proc/self/comm")

    def act() -> list[object]:
        sandbox.lock_system()
        folder.enter()
        writable = [path for path in sandbox._SYSTEM if os.access(path, os.W_OK)]
        return [writable, subprocess.run(name, check=False, stderr=subprocess.DEVNULL).returncode]

    assert in_a_child(act) == [[], 0]


def test_a_users_file_fills_no_cache_but_its_own() -> None:
    """What a judge or another kernel would run, if it came from a shared cache."""
    mine, other, own = Sandbox.of("mine.py"), Sandbox.of("other.py"), Sandbox.of("triton")
    assert (mine.caches, other.caches) == ({}, {})
    assert mine.folder == Sandbox.of("mine.py").folder == Sandbox.of("mine.py:rms").folder != other.folder
    assert {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"} <= set(own.caches)
    assert Sandbox.told(json.loads(json.dumps(own.as_message))) == own


@pytest.mark.parametrize("variable", ["CUPY_CACHE_DIR", "NUMBA_CACHE_DIR", "TVM_FFI_CACHE_DIR", "XDG_CACHE_HOME"])
def test_a_tool_that_is_asked_for_a_place_writes_in_the_sandbox(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it would write to a folder in HOME, and an import of it would end with a PermissionError."""
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/of/the/user")
    mine = Sandbox.of("mine.py")
    mine.make()

    def act() -> list[str]:
        mine.enter()
        file = Path(os.environ[variable], "compiled")
        file.write_text("by the tool", encoding="utf-8")
        return [str(file.parent.parent), os.environ["HF_HOME"]]

    assert in_a_child(act) == [mine.folder, "/of/the/user/huggingface"]


def test_plans_of_cudnn_are_shared_by_processes_of_one_spec() -> None:
    plan = StoredPlan({"x": 1}, b"of one process")

    def within(spec: str, act: Callable[[], object]) -> object:
        own = Sandbox.of(spec)
        own.make()

        def entered() -> object:
            own.enter()
            return act()

        return in_a_child(entered)

    assert within("cudnn", lambda: _cudnn_shelf.keep("key", plan)) is None
    assert within("cudnn", lambda: _cudnn_shelf.kept("key") == plan) is True
    assert within("mine.py", lambda: [_cudnn_shelf.exists(), _cudnn_shelf.kept("key")]) == [True, None]


def test_a_home_that_cannot_be_written_stops_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container's user often has none."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    own = Sandbox.of("torch")
    own.make()
    assert os.path.isdir(own.folder)
    assert not os.path.isdir(own.caches["TRITON_CACHE_DIR"])


def test_folders_of_killed_runs_are_deleted_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other: not of a run that goes on, of one that begins, or what only looks like one."""
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    names = ("normcheck-run-killed", "normcheck-run-running", "normcheck-run-begins", "normcheck-run-link", "other")
    killed, running, begins, link, other = (tmp_path / name for name in names)
    for folder in (killed, running, begins, other):
        folder.mkdir()
    (killed / "kernel").mkdir()
    for folder in (killed, running, other):
        (folder / ".lock").touch()
    link.symlink_to(other)
    held = sandbox._lock(str(running))
    made = sandbox.run_folder.__wrapped__(0)  # of another process: this one does not delete it
    assert held is not None
    os.close(held)
    assert sorted(tmp_path.iterdir()) == sorted([running, begins, link, other, Path(made)])
    assert sandbox._lock(made) is None  # it has it already


def test_without_locks_a_run_has_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems have none: then the folder of a killed run stays, and nothing else is different."""

    def none(lock: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sandbox.fcntl, "flock", none)
    folders = [sandbox.run_folder.__wrapped__(0) for _ in range(2)]
    assert sorted(map(str, tmp_path.iterdir())) == sorted(folders)


def test_a_folder_that_was_just_deleted_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    lock, deleted = sandbox.fcntl.flock, []

    def late(descriptor: int, how: int) -> None:
        if not deleted:
            deleted.append(next(tmp_path.iterdir()))
            shutil.rmtree(deleted[0])
        lock(descriptor, how)

    monkeypatch.setattr(sandbox.fcntl, "flock", late)
    made = Path(sandbox.run_folder.__wrapped__(0))
    assert made.is_dir() and [made] == [*tmp_path.iterdir()] and made not in deleted


def test_without_a_temporary_folder_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(prefix: str) -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(sandbox.tempfile, "mkdtemp", none)
    monkeypatch.setattr(sandbox, "run_folder", sandbox.run_folder.__wrapped__)
    monkeypatch.setenv("TMPDIR", "/not/there")
    with pytest.raises(NormcheckError, match="TMPDIR=/not/there: expected a folder that can be written"):
        Sandbox.of("mine.py")


WRITES = """
import os, tempfile, torch
from pathlib import Path

def forward(x, weight, bias, *, eps):
    for folder in (tempfile.gettempdir(), os.environ["TMPDIR"], os.environ["TRITON_CACHE_DIR"]):
        Path(folder, "mine").write_text("of this kernel")
    Path({there!r}).write_text("not its own")
"""


@pytest.mark.slow
def test_a_kernel_that_writes_elsewhere_is_told_why_it_may_not(tmp_path: Path) -> None:
    path = tmp_path / "writes.py"
    path.write_text(WRITES.format(there=str(tmp_path / "there")), encoding="utf-8")
    command = (sys.executable, "-c", UNSHRUNK, "verify", "--impl", f"{path}:forward", "--op", "rmsnorm")
    folder = tmp_path / "tmp"
    folder.mkdir()
    done = subprocess.run(
        (*command, "--dtype", "fp32", "--device", "cpu"),
        env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    said = " ".join(done.stdout.split())
    if landlock.version():
        assert "a kernel's process writes only to its own temporary folder here: --no-sandbox lets it" in said
        assert done.returncode == 1
        assert not (tmp_path / "there").exists()
    assert list(folder.iterdir()) == []  # its folder is gone with the run


@pytest.mark.slow
@needs_landlock
def test_a_file_that_writes_when_it_is_imported_is_told_why_it_may_not(tmp_path: Path) -> None:
    path = tmp_path / "writes.py"
    path.write_text(f"open({str(tmp_path / 'there')!r}, 'w')\n", encoding="utf-8")
    with pytest.raises(Exception, match=r"PermissionError.*--no-sandbox"):
        select_apart(f"{path}:forward", ("rmsnorm",), "cpu", 60.0)
