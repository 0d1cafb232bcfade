"""The servers that workers are forked from, from the side of the process that asks: start, wake, replace, end.

``server.py`` is what they do. There is one root, which imports torch beside this process, and one server at a time,
which the root has forked. Code under test may kill, stop or slow whatever it comes from.

An interpreter of another environment has a root and a server of its own. Functions take its path as ``python``; ""
stands for the one that runs this process.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass

from normcheck.isolation.descendants import kill_children, kill_descendants
from normcheck.isolation.interpreter import folder_of_normcheck, is_child
from normcheck.isolation.messages import packed
from normcheck.isolation.server import CODE
from normcheck.runner import nvidia_driver

_WAKE_SECONDS, _MOST_WAKES = 1.0, 120
"""One that does not answer is woken so often, in case somebody has stopped it, and then given up."""

_ASKED_SECONDS = 60.0
"""Within which another process's root forks one: it may import yet."""

_MOST_WAKES_ELSEWHERE = 30
"""Another interpreter has been tried before, so it starts sooner or not at all."""

_ROOT = "import sys; sys.path[:] = {}; from normcheck.isolation import server; server.main({}, {}, {!r})"

COMPILED = ("torch._dynamo",)
"""What torch.compile and Liger import, which takes most of the start of their processes: a root may have it."""


UNKNOWN = 256
"""The exit code, which no process has, of one whose server ended before it could tell."""


class Child:
    """A process from a server. ``sentinel``: a file that can be read once it has ended."""

    def __init__(self, pid: int, sentinel: int) -> None:
        self.pid, self.sentinel = pid, sentinel
        self.exitcode: int | None = None

    def join(self, seconds: float) -> None:
        """Wait until it has ended, then ``exitcode`` is set: minus the signal's number; UNKNOWN if its server ended."""
        if self.exitcode is not None:
            return
        poll = select.poll()
        poll.register(self.sentinel, select.POLLIN)
        if poll.poll(seconds * 1000):
            told = os.read(self.sentinel, CODE.size)
            self.exitcode = CODE.unpack(told)[0] if len(told) == CODE.size else UNKNOWN

    def close(self) -> None:
        """Give the file back, when nobody waits any more."""
        os.close(self.sentinel)


@dataclass(frozen=True)
class _State:
    """Settings of a process that its children inherit, and that any process of the same user can change."""

    limits: tuple[tuple[int, int], ...]
    cores: frozenset[int]
    nice: int
    oom: str


_LIMITS = sorted({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})


def _state(number: int) -> _State | None:
    """The state of a process, None if it has ended."""
    try:
        limits = tuple(resource.prlimit(number, limit) for limit in _LIMITS)
        with open(f"/proc/{number}/oom_score_adj", encoding="ascii") as file:
            oom = file.read()
        cores, nice = frozenset(os.sched_getaffinity(number)), os.getpriority(os.PRIO_PROCESS, number)
    except OSError:
        return None
    return _State(limits, cores, nice, oom)


class _Forker:
    """The root or a server: a process that forks on request, and its state after it did so first."""

    def __init__(self, pid: int, control: socket.socket, python: str) -> None:
        self.pid, self._control, self._python = pid, control, python
        self._usable = True
        self._first: _State | None = None

    @property
    def sound(self) -> bool:
        """Whether it can be asked, and has the state that it had after its first fork, if there was one."""
        return self._usable and (self._first is None or _state(self.pid) == self._first)

    def fork(self) -> tuple[Child, socket.socket]:
        """A new process from it, and our side of its socket. Raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            return self.forked(theirs), ours
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def forked(self, connection: socket.socket) -> Child:
        """A new process from it, which has ``connection``. Raises OSError."""
        sentinel, status = os.pipe()
        try:
            request = packed({"folder": _folder(), "path": None if self._python else sys.path})
            sent = socket.send_fds(self._control, [request], [connection.fileno(), status])
            self._control.sendall(request[sent:])
            pid = self._answer()
        except BaseException:  # a late answer would be taken for that to another request
            self.close()
            os.close(sentinel)
            raise
        finally:
            os.close(status)
        if self._first is None:
            self._first = _state(self.pid)
        return Child(pid, sentinel)

    def _answer(self) -> int:
        """The process id of what it has forked. It is woken every second, in case somebody stops it.

        That of another interpreter must be a child of this forker: any process with that id will be killed.
        """
        poll, told = select.poll(), b""
        poll.register(self._control.fileno(), select.POLLIN)
        for _ in range(_MOST_WAKES_ELSEWHERE if self._python else _MOST_WAKES):
            if not poll.poll(_WAKE_SECONDS * 1000):
                self.send(signal.SIGCONT)
                continue
            chunk = self._control.recv(CODE.size - len(told))
            told += chunk
            if not chunk:
                raise ConnectionError("the process that forks others has ended")
            if len(told) == CODE.size:
                number = int(CODE.unpack(told)[0])
                if self._python and not is_child(number, self.pid):
                    raise ConnectionError("the process that forks others answers nonsense")
                return number
        raise TimeoutError("the process that forks others does not answer")

    def send(self, which: signal.Signals) -> None:
        """Send it a signal, if it is there."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, which)

    def close(self) -> None:
        """Ask it no more; it ends when it sees that."""
        self._usable = False
        self._control.close()


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return "/"


@dataclass
class _Servers:
    """What this process has started of an interpreter: ``program`` is the process of the root. ``owner``: this process,
    by its id. ``door``: through which other processes may ask the root for one of theirs; ``asked``: the side of this
    process of one that it has asked for.
    """

    owner: int
    program: subprocess.Popen[bytes] | None = None
    root: _Forker | None = None
    server: _Forker | None = None
    door: socket.socket | None = None
    asked: socket.socket | None = None


_servers: dict[str, _Servers] = {}
_lock = threading.RLock()
_modules: tuple[str, ...] = ()  # of torch, which the root imports as well


def _ours(python: str) -> _Servers:
    """What this process has started: a process that was forked from it starts its own, and leaves those alone."""
    own = _servers.get(python)
    if own is None or own.owner != os.getpid():
        for forker in () if own is None else (own.root, own.server):
            if forker is not None:
                forker.close()
        own = _servers[python] = _Servers(os.getpid())
    return own


def _root(python: str) -> _Forker:
    """The root. It is started if it is not there, and then imports for two seconds while this process goes on."""
    own = _ours(python)
    if own.root is None and own.asked is not None:
        asked, own.asked = own.asked, None
        own.root = _of_another(asked)
    if own.root is None:
        path = f"[{folder_of_normcheck()!r}, *sys.path]" if python else repr(sys.path)
        ours, theirs = socket.socketpair()
        own.door, inside = socket.socketpair(type=socket.SOCK_SEQPACKET)  # which keeps requests of several apart
        with theirs, inside:
            files = theirs.fileno(), inside.fileno()
            argv = [python or sys.executable, "-c", _ROOT.format(path, *files, () if python else _modules)]
            own.program = subprocess.Popen(argv, pass_fds=files, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        own.root = _Forker(own.program.pid, ours, python)
    return own.root


def _of_another(asked: socket.socket) -> _Forker | None:
    """The root that another process's has forked for this one; None if that is not there, or not as this process is."""
    poll = select.poll()
    poll.register(asked.fileno(), select.POLLIN)
    told = b""
    with suppress(OSError):
        told = asked.recv(CODE.size) if poll.poll(_ASKED_SECONDS * 1000) else b""
    number = int(CODE.unpack(told)[0]) if len(told) == CODE.size else 0
    if number and _state(number) == _state(os.getpid()):
        return _Forker(number, asked, "")
    asked.close()
    return None


def _server(python: str) -> _Forker:
    """The present server, forked from the root if there is none."""
    own = _ours(python)
    if own.server is None:
        child, control = _root(python).fork()
        child.close()
        own.server = _Forker(child.pid, control, python)
    return own.server


def pid(python: str = "") -> int | None:
    """The server's process id, None if there is none."""
    server = _ours(python).server
    return None if server is None else server.pid


def warm() -> None:
    """Have a server, and wait until it is there: the next process then costs a fork. Raises OSError."""
    with _lock:
        _server("")


def started(connection: socket.socket, python: str = "") -> Child:
    """A new process from the server, which serves ``connection`` as a worker does. Raises OSError.

    If code under test has stopped the server or the root, killed it, or changed its limits, the process comes from new
    ones.
    """
    with _lock:
        if not sound(python):
            replace(python)
        wake(python)
        failed = OSError()
        for root in (False, True, True):
            try:
                return _server(python).forked(connection)
            except OSError as error:
                failed = error
            replace(python, root=root)
        raise failed


def sound(python: str = "") -> bool:
    """Whether root and server, if they are there, still have the state with which they started."""
    own = _ours(python)
    return all(forker is None or forker.sound for forker in (own.root, own.server))


def wake(python: str = "") -> None:
    """Let root and server continue, in case somebody has stopped them."""
    own = _ours(python)
    for forker in (own.root, own.server):
        if forker is not None:
            forker.send(signal.SIGCONT)


def replace(python: str = "", *, root: bool = False) -> None:
    """Kill the server and all processes that come from it; the next process comes from a new server.

    ``root``: replace the root as well, as is done in any case if it is not as it was.
    """
    with _lock:
        own = _ours(python)
        server, own.server = own.server, None
        if server is not None:
            _end(server)
        if own.root is None:
            return
        if root or not own.root.sound:
            former, own.root = own.root, None
            _end(former)
            if own.program is not None:
                own.program.wait()
        else:
            kill_children(own.root.pid, but=())  # what the server has left behind


def _end(forker: _Forker) -> None:
    """Kill a process and its descendants."""
    try:
        kill_descendants(forker.pid)
    finally:  # Ctrl-C in there must not leave it stopped
        forker.send(signal.SIGKILL)
        forker.close()


def end() -> None:
    """Kill servers and roots, of which one may be stopped or still importing, when this process ends."""
    for own in map(_ours, tuple(_servers)):
        for forker in (own.server, own.root):
            if forker is not None:
                forker.send(signal.SIGKILL)


def start_early(device: str, modules: tuple[str, ...] = ()) -> None:
    """Start the root now: it imports torch, and without a GPU Triton's interpreter, while this process does.

    ``modules``: others that it imports, of torch alone, on a GPU.
    """
    global _modules
    _as_on(device)
    _modules = () if _lacks_gpu(device) else modules
    with _lock:
        _root("")


def ask_early(device: str, door: socket.socket | None) -> None:
    """Ask for a root through the ``door`` of another process's, which has imported all, or start one as it would be."""
    _as_on(device)
    with _lock:
        own = _ours("")
        if door is None:
            _root("")
            return
        own.asked, theirs = socket.socketpair()
        with theirs, suppress(OSError):
            socket.send_fds(door, [b"1"], [theirs.fileno()])


def door() -> socket.socket | None:
    """Through which other processes may ask the root of this one for one of theirs; None if it has none."""
    own = _ours("")
    return own.door if own.root is not None and own.root.sound else None


def _lacks_gpu(device: str) -> bool:
    return device == "cpu" or (device == "auto" and not nvidia_driver.present())


def _as_on(device: str) -> None:
    if _lacks_gpu(device):
        os.environ["TRITON_INTERPRET"] = "1"  # which the root inherits
