"""A worker process from its parent's side: start it, send requests, watch it work, kill it with its descendants."""

from __future__ import annotations

import atexit
import os
import re
import select
import signal
import socket
import time
import weakref
from contextlib import suppress

from normcheck.errors import Broken
from normcheck.isolation import forkserver
from normcheck.isolation.descendants import busy_seconds, kill_children, kill_descendants
from normcheck.isolation.messages import Garbled, Inbox, Message, packed
from normcheck.isolation.replies import WITH_ITS_SERVER
from normcheck.isolation.sandbox import Sandbox, close_memory
from normcheck.isolation.shared_memory import HostMemory
from normcheck.isolation.watched_memory import WatchedMemory

_LOOK_SECONDS = 0.1  # after so long it is looked whether a process that does not answer does anything
_BUILDING = 3.0  # times the seconds of an answer it may take at most; they begin anew with each thing that is built
_ENDING_SECONDS = 0.5  # a process that has closed its connection ends within these
_NONSENSE_SECONDS = 0.1  # one that sends nonsense goes on, but for one that was about to end
_TAIL_BYTES = 4000  # of a dead worker's output are reported
_OWN_LINE = re.compile(
    r"^Extension modules: "
    r"|/normcheck/(?:isolation/(?:server|worker|calls)|runner/(?:call|kernel_errors|run|arena)|cases/guard_bands)\.py\""
)
"""Lines of a crash's traceback about normcheck's call of the kernel, which a report leaves out."""

_TRACE_LINE = re.compile(r"^(?:Fatal Python error: |Current thread |Stack \(most recent|  File \"|  <)")
"""Lines of a crash's traceback, which the kernel did not print."""

_alive: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """One worker process, for requests by ``ask``. It is not started again after it has died.

    ``sandbox``: where it may write; then this process's memory is closed to it. None: wherever this process may.
    ``python``: the interpreter that it runs in, as ``forkserver`` takes it.
    """

    def __init__(self, sandbox: Sandbox | None, python: str = "") -> None:
        if sandbox is not None:
            close_memory()
            sandbox.make()
        self.memory = HostMemory()
        self.watched = WatchedMemory(self.memory)
        self._socket, theirs = socket.socketpair()
        self._output, written = os.pipe()
        self._python, self._sandbox = python, sandbox
        self._process = forkserver.started(theirs, python)
        self._server = forkserver.pid(python)
        told = packed({"sandbox": None if sandbox is None else sandbox.as_message})
        socket.send_fds(self._socket, [told], [self.memory.fd, written])
        theirs.close()
        os.close(written)
        self._inbox, self._tail = Inbox(), b""
        self._number = 0  # of the latest request; its answer carries the same number
        self.overtime = False  # whether its latest answer took longer than asked, as it built one thing after another
        self.idle_seconds = 0.0  # of long waits for it, in which it neither computed nor waited for a processor
        self.alive = True
        self._poll = select.poll()
        for source in (self._socket.fileno(), self._output, self._process.sentinel):
            self._poll.register(source, select.POLLIN)
        _alive.add(self)

    @property
    def pid(self) -> int:
        """Process id of the parent of the process that runs the code under test; it ends as its child does."""
        return self._process.pid

    @property
    def of_this_server(self) -> bool:
        """Whether the present server started it; a server that was replaced took its processes along."""
        return self._server == forkserver.pid(self._python)

    def ask(self, message: Message, seconds: float, what: str) -> Message:
        """Send a request and wait for its answer. If none comes within ``seconds``: kill the process, raise Broken."""
        self.send(message)
        return self.receive(seconds, what)

    def send(self, message: Message) -> None:
        """Send a request. If it does not arrive, ``receive`` raises."""
        self._number += 1
        with suppress(ConnectionError):
            self._socket.sendall(packed({**message, "number": self._number}))

    def receive(self, seconds: float, what: str) -> Message:
        """Wait for the answer to the latest request; see ``ask``.

        As long as something is compiled, as by a tuner with sixty configurations on a busy machine, it does not hang.
        """
        begun = time.monotonic()
        due = begun + seconds
        looked: tuple[float, float] | None = None
        try:
            while (answer := self._inbox.next()) is None:
                now = time.monotonic()
                if now >= due and self._sandbox is not None:
                    built = now - (time.time() - self._sandbox.last_built())
                    due = min(max(begun, built) + seconds, begun + _BUILDING * seconds)
                if now >= due:
                    raise Broken("timeout", "", f"{what} gave no result in time")
                if looked is None and now >= begun + _LOOK_SECONDS:
                    looked = now, busy_seconds(self.pid)
                end = due if looked else min(due, begun + _LOOK_SECONDS)
                self._listen(end - now, what)
            if answer.get("number") != self._number:
                raise Garbled
        except Garbled:
            raise self._died(what, _NONSENSE_SECONDS) from None
        except ConnectionError:
            raise self._died(what) from None
        except BaseException:
            self.kill()  # a late answer would be taken for the answer to another request
            raise
        self.overtime = due > begun + seconds
        if looked is not None:
            then, busy = looked
            self.idle_seconds += max(0.0, time.monotonic() - then - (busy_seconds(self.pid) - busy))
        return answer

    def _listen(self, seconds: float, what: str) -> None:
        """Wait for bytes of an answer, for printed output, or for the end of the process."""
        ready = {source for source, _ in self._poll.poll(seconds * 1000 + 1)}
        if self._output in ready:
            self._read_output()
        if self._socket.fileno() in ready:
            chunk = self._socket.recv(1 << 16)
            if not chunk:
                raise self._died(what)
            self._inbox.add(chunk)
        elif self._process.sentinel in ready:
            raise self._died(what)

    def _read_output(self) -> None:
        chunk = os.read(self._output, 1 << 16)
        if not chunk:
            self._poll.unregister(self._output)
        self._tail = (self._tail + chunk)[-_TAIL_BYTES:]

    def doing(self, what: str) -> str:
        """What the worker is doing for a request, in words; ``what``: the request."""
        return "backward, by torch autograd through y" if self.memory.in_autograd else what

    def _died(self, what: str, seconds: float = _ENDING_SECONDS) -> Broken:
        """Kill the process if it has not ended in ``seconds``. Return, as Broken, how, and what it printed last."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)  # this parent ends as the process did, but may have been stopped
        self._process.join(seconds)
        code = self._process.exitcode
        self._drain()
        self.kill()
        if code is None:
            how = "its process broke off the connection"
        elif code == forkserver.UNKNOWN:
            how = WITH_ITS_SERVER
        elif code < 0:
            how = f"its process was ended by {_signal(-code)}"
        else:
            how = f"its process ended with exit code {code}"
        text = self._tail.decode("utf-8", "replace").strip()
        lines = tuple(line for line in text.splitlines() if line.strip() and not _OWN_LINE.search(line))[-20:]
        last = next((line for line in reversed(lines) if not _TRACE_LINE.search(line)), "")
        return Broken(
            "crash", "", f"{how} during {self.doing(what)}" + (f"; it printed last: {last}" if last else ""), lines
        )

    def _drain(self) -> None:
        for _ in range(1000):
            ready = {source for source, _ in self._poll.poll(0)}
            if self._output not in ready:
                return
            self._read_output()

    def kill(self) -> None:
        """Kill the process and its descendants."""
        if not self.alive:
            return
        self.alive = False
        try:
            kill_descendants(self.pid)
        finally:  # Ctrl-C in there must not leave it stopped
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        forkserver.wake(self._python)
        self._process.join(5)
        _alive.discard(self)
        _kill_orphans(self._python)
        self._process.close()
        self._socket.close()
        os.close(self._output)
        os.close(self.memory.fd)


def _signal(number: int) -> str:
    """The name of a signal; real-time ones have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kill_orphans(python: str) -> None:
    """Kill the processes that ended workers have left behind, and the server has adopted."""
    server = forkserver.pid(python)
    if server is not None:
        kill_children(server, but={worker.pid for worker in _alive})


@atexit.register
def _kill_all() -> None:
    """Kill all workers, then what they come from."""
    for worker in list(_alive):
        worker.kill()
    forkserver.end()
