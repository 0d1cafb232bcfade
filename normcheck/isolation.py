"""Worker processes from the parent's side: started when needed, watched while they work, killed with their kin.

A worker is forked from a server that has torch imported and has never run code under test.
"""

from __future__ import annotations

import atexit
import os
import re
import select
import signal
import socket
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from normcheck import discovery
from normcheck.errors import Broken, UsageError
from normcheck.implementation import Implementation
from normcheck.memory import Surroundings
from normcheck.remote import Entry, Question, Reason, RemoteRun, broken_of
from normcheck.server import context
from normcheck.shared import DeviceMemory, HostMemory, Memory, Space
from normcheck.wire import Garbled, Inbox, Message, packed

_TAIL = 4000  # characters of a dead worker's output that are told
_FIRST = 3  # times the limit: what the first call of each kind may take, which compiles
_START = 60.0  # seconds in which a worker comes up
_OWN_LINE = re.compile(r"^Extension modules: |/normcheck/(?:worker|call|memory)\.py\"|/multiprocessing/")
"""Lines of a traceback at a crash that are about how the kernel was called."""
_STICKY = ("illegal memory access", "misaligned address", "device-side assert", "unspecified launch failure")

_alive: weakref.WeakSet[Worker] = weakref.WeakSet()


class Worker:
    """One process. ``ask`` it; once it has died it stays dead."""

    def __init__(self) -> None:
        from normcheck.worker import serve

        self.memory = HostMemory()
        self._socket, theirs = socket.socketpair()
        self._output, written = os.pipe()
        self._process = context().Process(target=serve, args=(theirs,), name="normcheck worker")
        self._process.start()
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
        self._process.join(0.2)
        code = self._process.exitcode
        self._drain()
        self.kill()
        if code is None:
            how = "its process broke off the connection"
        elif code < 0:
            how = f"its process was ended by {signal.Signals(-code).name}"
        else:
            how = f"its process ended with exit code {code}"
        text = self._tail.decode("utf-8", "replace").strip()
        lines = tuple(line for line in text.splitlines() if not _OWN_LINE.search(line))[-20:]
        return Broken("crash", "", f"{how} during {what}" + (f"; it printed last: {lines[-1]}" if lines else ""), lines)

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
            _kill_descendants(pid)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.join(5)
        self._socket.close()
        os.close(self._output)
        os.close(self.memory.fd)
        _alive.discard(self)


def _kill_descendants(root: int) -> None:
    """Kill what a process started, in whatever session that is now; the process itself is stopped and stays."""
    with suppress(ProcessLookupError):
        os.kill(root, signal.SIGSTOP)
    for _ in range(20):  # new ones may come while the old ones are looked for
        parents = _parents()
        kin, before = {root}, 0
        while len(kin) != before:
            before = len(kin)
            kin |= {pid for pid, parent in parents.items() if parent in kin}
        if kin == {root}:
            return
        for pid in kin - {root}:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _parents() -> dict[int, int]:
    """Process -> its parent, of all that are alive, as far as the system tells."""
    found: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            state, parent = entry.read_text(errors="replace").rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(entry.parent.name)] = int(parent)
    return found


@atexit.register
def _kill_all() -> None:
    """Before multiprocessing waits for its children, some of which may never end."""
    for worker in list(_alive):
        worker.kill()


class ProcessLink:
    """The way to one implementation's process: it is started with the first request, and again after it has died."""

    def __init__(self, spec: str, op: str, name: str, device: str) -> None:
        self.spec, self.op, self.name, self.device = spec, op, name, device
        self._reset()

    def _reset(self) -> None:
        self._worker: Worker | None = None
        self._runs = self._used = 0
        self._limit = self._left = _START
        self._asked: set[str] = set()
        self._overran = False
        self._posted = ""  # what was asked and not yet answered
        self.deaths = 0

    def __getstate__(self) -> tuple[str, str, str, str]:
        """Only what it is called travels to another process, not the worker."""
        return self.spec, self.op, self.name, self.device

    def __setstate__(self, state: tuple[str, str, str, str]) -> None:
        self.spec, self.op, self.name, self.device = state
        self._reset()

    def limit(self, seconds: float) -> None:
        """Begin a case, which may take this long."""
        self._limit = self._left = seconds
        if self.alive and self._worker is not None:
            self._worker.memory.give_back(self._used)
        self._used = 0

    @property
    def alive(self) -> bool:
        """Whether a process is there, and has not been asked to end."""
        return self._worker is not None and self._worker.alive

    def run(self, surroundings: Surroundings) -> RemoteRun:
        """A new run."""
        self._runs += 1
        return RemoteRun(self, self._runs, surroundings)

    def space(self, first: int) -> Space:
        """Shared memory from byte ``first`` on."""
        worker = self._running()
        return Space(self._memory(worker), first)

    def post(self, message: Message) -> None:
        """See ``remote.Link``."""
        worker = self._running()
        if self._posted:
            self.collect()  # nobody asks for it any more
        self._posted = str(message["do"])
        self._used = max(self._used, message.get("out", 0))
        worker.send(message)

    def collect(self) -> Message:
        """See ``remote.Link``."""
        what, worker = self._posted, self._worker
        assert worker is not None
        self._posted = ""
        first = what not in self._asked and not self._overran
        self._asked.add(what)
        seconds, begun = self._left + (_FIRST - 1) * self._limit * first, time.monotonic()
        try:
            answer = worker.receive(seconds, what)
        except Broken as broken:
            self.deaths += 1
            if broken.kind == "timeout":
                self._overran = True
                raise Broken("timeout", "", f"no result after timeout={self._limit:g} s, during {what}") from None
            raise
        self._left -= 0.0 if first else time.monotonic() - begun
        self._used = max(self._used, _end_of(answer))
        told = answer.get("broken")
        if isinstance(told, dict) and any(words in str(told.get("message")) for words in _STICKY):
            self.close()  # nothing works any more in its GPU context
        return answer

    def close(self) -> None:
        """End the process; the next request starts another."""
        if self._worker is not None:
            self._worker.kill()
        self._worker, self._posted = None, ""

    def _running(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            self._worker = self._asked_afresh()
        return self._worker

    def _asked_afresh(self) -> Worker:
        worker = Worker()
        self._asked, self._posted = set(), ""
        answers = [
            worker.ask(_load(self.spec, (self.op,), self.device, self._opened()), _START + self._limit, "its import"),
            worker.ask({"do": "choose", "name": self.name, "op": self.op}, _START, "its import"),
        ]
        for answer in answers:
            if "usage" in answer:
                raise Broken("exception", "", str(answer["usage"]))
            if "broken" in answer:
                raise broken_of(answer["broken"])
        return worker

    def _opened(self) -> str:
        """What opens this process's device memory in the other, "" on a CPU."""
        return _device_memory().handle if self.device == "cuda" else ""

    def _memory(self, worker: Worker) -> Memory:
        return _device_memory() if self.device == "cuda" else worker.memory


@cache
def _device_memory() -> DeviceMemory:
    """Enough for the largest case of a sweep, made once."""
    free, _ = torch.cuda.mem_get_info()
    return DeviceMemory(torch.empty(min(free // 4, 12 << 30), dtype=torch.uint8, device="cuda"))


def _end_of(answer: Message) -> int:
    """The end of the last tensor that a worker says it laid; at most what can be."""
    told = answer.get("returned")
    places = [p for p in told if isinstance(p, dict)] if isinstance(told, list) else []
    ends = [p["at"] + p["bytes"] for p in places if type(p.get("at")) is int and type(p.get("bytes")) is int]
    return min(max(ends, default=0), 1 << 40)


def _load(spec: str, ops: tuple[str, ...], device: str, memory: str = "") -> Message:
    return {"do": "load", "spec": spec, "ops": list(ops), "device": device, "memory": memory}


def select_apart(spec: str, ops: tuple[str, ...], device: str, seconds: float) -> tuple[Implementation, ...]:
    """As ``discovery.select``, but what ``spec`` names is imported by a worker. Raises UsageError."""
    worker = Worker()
    try:
        answer = worker.ask(_load(spec, ops, device), _START + seconds, "its import")
    except Broken as broken:
        raise UsageError(f"impl={spec}: importing it failed: {broken.message}") from None
    finally:
        worker.kill()
    if "usage" in answer:
        raise UsageError(str(answer["usage"]))
    if "broken" in answer:
        raise UsageError(f"impl={spec}: {broken_of(answer['broken']).message}")
    found = answer.get("found")
    if not isinstance(found, list):
        raise UsageError(f"impl={spec}: importing it failed: its process gave no sensible answer")
    return tuple(_implementation(spec, told, device) for told in found)


def _implementation(spec: str, told: Mapping[str, Any], device: str) -> Implementation:
    """An implementation in another process, from what that process tells of it."""
    try:
        link = ProcessLink(spec, str(told["op"]), str(told["name"]), device)
        entry, declared, reason = Entry(link), told["model"], told["unavailable"]
        described = Implementation(
            name=str(told["name"]),
            op=str(told["op"]),
            forward=entry,
            backward=entry if told["backward"] else None,
            supports=Question(link, "supports") if told["supports"] else None,
            unavailable=Reason(str(reason)) if reason else None,
            dtypes=tuple(told["dtypes"]),
            ranks=tuple(told["ranks"]),
            strided=bool(told["strided"]),
            model=Question(link, "model") if declared is None else dict(declared),
            shapes=None if told["shapes"] is None else tuple(tuple(shape) for shape in told["shapes"]),
            deterministic=bool(told["deterministic"]),
            batch_invariant=bool(told["batch_invariant"]),
            source=str(told["source"]),
        )
    except (KeyError, TypeError, ValueError):
        raise UsageError(f"impl={spec}: its process gave no sensible description of it") from None
    return discovery.validated(described, spec)
