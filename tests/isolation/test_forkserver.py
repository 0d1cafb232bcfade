"""Root and servers: they survive what may happen to them, and a new one comes from the root for the cost of a fork.

Their roots import no torch, which is nothing to who forks whom; those of all other tests of this room do.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from normcheck.isolation import forkserver
from normcheck.isolation.process import Worker
from tests.isolation import without_torch

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")

CHECKOUT = Path(__file__).parents[2]
UNKNOWN = {"do": "nothing that a worker knows"}


@pytest.fixture(autouse=True)
def new_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has a root and a server of its own, and this process's are as they were when it ends."""
    monkeypatch.setattr(forkserver, "_servers", {})
    monkeypatch.setattr(forkserver, "_ROOT", without_torch.ROOT)
    assert answers()
    yield
    forkserver.replace(root=True)


def answers() -> bool:
    """Whether a new worker answers a request."""
    worker = Worker(None)
    try:
        return "broken" in worker.ask(UNKNOWN, 60.0, "a request")
    finally:
        worker.kill()


def server() -> psutil.Process:
    number = forkserver.pid()
    assert number is not None
    return psutil.Process(number)


def root() -> psutil.Process:
    parent = server().parent()
    assert parent is not None
    return parent


def is_gone(number: int) -> bool:
    try:
        return psutil.Process(number).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_the_root_is_a_child_and_runs_nothing_but_servers() -> None:
    assert root().ppid() == os.getpid()
    assert root().children() == [server()]


def test_a_new_server_comes_from_the_same_root() -> None:
    former, same = server(), root()
    forkserver.replace()
    assert forkserver.pid() is None
    assert answers()
    assert root() == same
    assert server() != former
    assert is_gone(former.pid)


@pytest.mark.parametrize("whose", [server, root], ids=["server", "root"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_whoever_was_killed_or_stopped_is_replaced_or_woken(whose: object, how: signal.Signals) -> None:
    assert callable(whose)
    whose().send_signal(how)
    assert answers()
    assert forkserver.sound()


@pytest.mark.parametrize("whose", [server, root], ids=["server", "root"])
def test_whoever_was_slowed_is_replaced(whose: object) -> None:
    assert callable(whose)
    slowed = whose()
    os.setpriority(os.PRIO_PROCESS, slowed.pid, 19)
    assert not forkserver.sound()
    assert answers()
    assert whose() != slowed
    assert forkserver.sound()


def test_an_interrupted_request_is_not_taken_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between request and answer: the answer comes late, and belongs to nobody."""

    def interrupted(self: object) -> int:
        raise KeyboardInterrupt

    former = server()
    with monkeypatch.context() as patched:
        patched.setattr("normcheck.isolation.forkserver._Forker._answer", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Worker(None)
    assert answers()
    assert server() != former


def test_what_the_end_of_a_process_was() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = forkserver.started(theirs)
        os.kill(child.pid, signal.SIGKILL)
        child.join(60.0)
        assert child.exitcode == -signal.SIGKILL
        child.close()


PRELOADS = """
import sys
from normcheck.isolation import forkserver
from tests.isolation import without_torch
forkserver._ROOT = without_torch.ROOT
forkserver.start_early(sys.argv[1], ("told",))
forkserver.warm()
"""


@pytest.mark.parametrize(("device", "imports"), [("cuda", True), ("cpu", False)])
def test_a_root_imports_more_on_a_gpu_if_told_to(tmp_path: Path, device: str, imports: bool) -> None:
    (tmp_path / "told.py").write_text("open('imported', 'w').close()", encoding="utf-8")
    path = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    subprocess.run([sys.executable, "-c", PRELOADS, device], cwd=tmp_path, env=path, check=True, timeout=120)
    assert (tmp_path / "imported").exists() == imports


FORKS = """
import os, sys
from normcheck.isolation import forkserver
from normcheck.isolation.process import Worker
from tests.isolation import without_torch

forkserver._ROOT = without_torch.ROOT

def answers():
    worker = Worker(None)
    answer = worker.ask({"do": "?"}, 60.0, "a request")
    worker.kill()
    return "broken" in answer

assert answers()
first = forkserver.pid()
child = os.fork()
assert answers()
if child == 0:
    assert forkserver.pid() != first
    forkserver.replace(root=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert forkserver.pid() == first and answers()
print(first)
"""


@pytest.mark.slow
def test_a_process_that_was_forked_has_a_root_of_its_own_and_none_outlives_its_process(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 90) / "tmp"  # too long for the name of a socket, of which there is none
    folder.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", FORKS],
        env={**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    number = int(done.stdout)
    assert is_gone(number)


BESIDE = """
import os, resource, signal, socket
from functools import partial
from multiprocessing import active_children
import psutil
from normcheck.isolation import forkserver
from normcheck.isolation.messages import packed
from normcheck.isolation.pool import Pool
from tests.isolation import without_torch

forkserver._ROOT = without_torch.ROOT

def answers(how):
    if how == "limited":
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, 1000))
    ours, theirs = socket.socketpair()
    child = forkserver.started(theirs)
    theirs.close()
    memory = os.memfd_create("of this worker")
    os.truncate(memory, 1 << 20)
    socket.send_fds(ours, [packed({"sandbox": None})], [memory, os.open(os.devnull, os.O_WRONLY)])
    ours.sendall(packed({"do": "?"}))
    answer = ours.recv(1 << 16)
    os.kill(child.pid, signal.SIGKILL)
    child.join(5.0)
    return b"broken" in answer, forkserver._root("").pid

def nothing():
    pass

if __name__ == "__main__":
    forkserver.start_early("cpu", ())
    for how, count in (("well", 2), ("none", 1), ("limited", 1), ("dead", 1)):
        door = None if how == "none" else forkserver.door()
        root = forkserver._root("")
        if how == "dead":
            os.kill(root.pid, 9)
            psutil.Process(root.pid).wait()
        with Pool(count, nothing, partial(forkserver.ask_early, "cpu", door)) as pool:
            pool.begin()
            found = list(pool.executor.map(answers, [how] * count))
            judges = {child.pid for child in active_children()}
            roots = {number for _, number in found}
            parents = {"root" if psutil.Process(r).ppid() == root.pid else "judge" for r in roots}
            assert parents == {"root"} or {psutil.Process(r).ppid() for r in roots} <= judges
        ended = psutil.wait_procs([psutil.Process(r) for r in roots if psutil.pid_exists(r)], timeout=20.0)[1]
        print(how, all(well for well, _ in found), parents, root.pid in roots, [p.status() for p in ended])
"""


@pytest.mark.slow
def test_a_process_that_judges_has_a_root_of_another_s_root(tmp_path: Path) -> None:
    """It imports nothing again. One of its own it has if there is none, or it is not as the process itself is.

    No process of the script imports torch, so its workers are asked without ``Worker``.
    """
    script = tmp_path / "beside.py"
    script.write_text(BESIDE, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.stdout.splitlines() == [
        "well True {'root'} False []",
        "none True {'judge'} False []",
        "limited True {'judge'} False []",
        "dead True {'judge'} False []",
    ], done.stderr
