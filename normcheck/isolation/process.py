"""A worker process from its parent's side: started, asked, watched while it works, killed with its kin."""

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
from normcheck.isolation.descendants import kill_descendants, parents
from normcheck.isolation.messages import Garbled, Inbox, Message, packed
from normcheck.isolation.shared_memory import HostMemory

_ENDING = 0.5  # seconds in which a process that has closed its connection ends
_TAIL = 4000  # characters of a dead worker's output that are told
_OWN_LINE = re.compile(
    r"^Extension modules: |/multiprocessing/"
    r"|/normcheck/(?:isolation/worker|runner/call|runner/arena|cases/guard_bands)\.py\""
)
"""Lines of a traceback at a crash that are about how the kernel was called."""

_TRACE_LINE = re.compile(r"^(?:Fatal Python error: |Current thread |Stack \(most recent|  File \"|  <)")
"""Lines of such a traceback, which are not what the kernel printed."""

_alive: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """One process. ``ask`` it; once it has died it stays dead."""

    def __init__(self) -> None:
        from normcheck.isolation.worker import serve

        self.memory = HostMemory()
        self._socket, theirs = socket.socketpair()
        self._output, written = os.pipe()
        self._process = forkserver.started(serve, theirs)
        self._server = forkserver.pid()
        socket.send_fds(self._socket, [b"x"], [self.memory.fd, written])
        theirs.close()
        os.close(written)
        self._inbox, self._tail = Inbox(), b""
        self._number = 0  # of the latest request; an answer has the same
        self.alive = True
        self._poll = select.poll()
        for source in (self._socket.fileno(), self._output, self._process.sentinel):
            self._poll.register(source, select.POLLIN)
        _alive.add(self)

    @property
    def pid(self) -> int | None:
        """The parent of the process that runs the code under test, which ends as that does."""
        return self._process.pid

    @property
    def of_this_server(self) -> bool:
        """Whether it is from the server that now is; one that was replaced took its processes along."""
        return self._server == forkserver.pid()

    def ask(self, message: Message, seconds: float, what: str) -> Message:
        """The answer to a request. Raises Broken where there is none within ``seconds``; then the process is gone."""
        self.send(message)
        return self.receive(seconds, what)

    def send(self, message: Message) -> None:
        """Begin a request. Whether it arrived shows when the answer is waited for."""
        self._number += 1
        with suppress(ConnectionError):
            self._socket.sendall(packed({**message, "number": self._number}))

    def receive(self, seconds: float, what: str) -> Message:
        """The answer to the request that was sent; see ``ask``."""
        end = time.monotonic() + seconds
        try:
            while (answer := self._inbox.next()) is None:
                left = end - time.monotonic()
                if left <= 0:
                    raise Broken("timeout", "", f"{what} gave no result in time")
                self._listen(left, what)
            if answer.get("number") != self._number:
                raise Garbled
        except (Garbled, ConnectionError):
            raise self._died(what) from None
        except BaseException:
            self.kill()  # whatever it answers later would be taken for the answer to something else
            raise
        return answer

    def _listen(self, seconds: float, what: str) -> None:
        """Wait for bytes of an answer, of what the process prints, or for its end."""
        ready = {source for source, _ in self._poll.poll(seconds * 1000 + 1)}
        if self._output in ready:
            self._hear()
        if self._socket.fileno() in ready:
            chunk = self._socket.recv(1 << 16)
            if not chunk:
                raise self._died(what)
            self._inbox.add(chunk)
        elif self._process.sentinel in ready:
            raise self._died(what)

    def _hear(self) -> None:
        chunk = os.read(self._output, 1 << 16)
        if not chunk:
            self._poll.unregister(self._output)
        self._tail = (self._tail + chunk)[-_TAIL:]

    def _died(self, what: str) -> Broken:
        """How the process ended, which it does here if it has not yet; and the last that it printed."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)  # it tells how the process ended, and may have been stopped
        self._process.join(_ENDING)
        code = self._process.exitcode
        self._drain()
        self.kill()
        if code is None:
            how = "its process broke off the connection"
        elif code < 0:
            how = f"its process was ended by {_signal(-code)}"
        else:
            how = f"its process ended with exit code {code}"
        text = self._tail.decode("utf-8", "replace").strip()
        lines = tuple(line for line in text.splitlines() if line.strip() and not _OWN_LINE.search(line))[-20:]
        last = next((line for line in reversed(lines) if not _TRACE_LINE.search(line)), "")
        return Broken("crash", "", f"{how} during {what}" + (f"; it printed last: {last}" if last else ""), lines)

    def _drain(self) -> None:
        for _ in range(1000):
            ready = {source for source, _ in self._poll.poll(0)}
            if self._output not in ready:
                return
            self._hear()

    def kill(self) -> None:
        """End the process and whatever it started."""
        if not self.alive:
            return
        self.alive = False
        pid = self._process.pid
        if pid is not None:
            kill_descendants(pid)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        forkserver.wake()
        self._process.join(5)
        _alive.discard(self)
        _kill_orphans()
        self._socket.close()
        os.close(self._output)
        os.close(self.memory.fd)


def _signal(number: int) -> str:
    """The name of a signal; real-time ones have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _kill_orphans() -> None:
    """Kill what workers that have ended left behind: the server has adopted it."""
    adopted_by, workers = forkserver.pid(), {worker.pid for worker in _alive}
    if adopted_by is None:
        return
    for pid, parent in parents().items():
        if parent == adopted_by and pid not in workers:
            kill_descendants(pid)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


@atexit.register
def _kill_all() -> None:
    """Before multiprocessing waits for its children, some of which may never end."""
    forkserver.wake()
    for worker in list(_alive):
        worker.kill()
