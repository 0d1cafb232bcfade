"""Implementations in processes of their own: what they declare, and the way to them, which is opened when it is needed.

A worker is forked from a server that has torch imported and has never run code under test.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from normcheck.cases.case import Case
from normcheck.errors import Broken, UsageError
from normcheck.impls import discovery, source_location
from normcheck.impls.implementation import Implementation
from normcheck.isolation import forkserver
from normcheck.isolation.messages import Message
from normcheck.isolation.process import Worker
from normcheck.isolation.proxies import Ended, Entry, Question, Reason
from normcheck.isolation.remote_run import RemoteRun
from normcheck.isolation.replies import broken_of
from normcheck.isolation.shared_memory import DeviceMemory, Memory, Space
from normcheck.runner.arena import Surroundings
from normcheck.runner.environment import memory as machine_memory

_FIRST = 3  # times the limit: what the first call of each kind may take, which compiles
_START = 60.0  # seconds in which a worker comes up
_STICKY = ("illegal memory access", "misaligned address", "device-side assert", "unspecified launch failure")


class ProcessLink:
    """The way to one implementation's process: it is started with the first request, and again after it has died."""

    def __init__(self, spec: str, op: str, name: str, device: str) -> None:
        self.spec, self.op, self.name, self.device = spec, op, name, device
        self._reset()

    def _reset(self) -> None:
        self._worker: Worker | None = None
        self._started: Worker | None = None  # the next one, on its way
        self._runs = self._used = self._posts = 0
        self._limit = self._left = _START
        self._asked: set[str] = set()
        self._overran = False
        self._posted = ""  # what was asked and not yet answered
        self._begun: list[Case] = []  # in the process that now is
        self._before: tuple[Case, ...] = ()

    def __getstate__(self) -> tuple[str, str, str, str]:
        """Only what it is called travels to another process, not the worker."""
        return self.spec, self.op, self.name, self.device

    def __setstate__(self, state: tuple[str, str, str, str]) -> None:
        self.spec, self.op, self.name, self.device = state
        self._reset()

    def limit(self, seconds: float, case: Case) -> None:
        """Begin a case, which may take this long."""
        self._limit = self._left = seconds
        if not self.alive:
            self._begun = []
        self._before = tuple(self._begun)
        self._begun.append(case)
        if self.alive and self._worker is not None:
            self._worker.memory.give_back(self._used)
        self._used = 0

    @property
    def before(self) -> tuple[Case, ...]:
        """See ``remote.Link``."""
        return self._before

    @property
    def alive(self) -> bool:
        """Whether a process is there, and has not been asked to end."""
        return self._worker is not None and self._worker.alive

    def run(self, surroundings: Surroundings) -> RemoteRun:
        """A new run."""
        self._runs += 1
        return RemoteRun(self, self._runs, surroundings)

    def space(self, first: int) -> Space:
        """Shared memory from byte ``first`` on; nothing that runs still uses it."""
        self._give_up()
        return Space(self._memory(self._running()), first)

    def _give_up(self) -> None:
        """Wait for an answer that nobody asks for any more. The process may be another afterwards."""
        if self._posted and self.alive:
            self.collect()

    @property
    def awaited(self) -> int:
        """See ``remote.Link``."""
        return self._posts if self._posted else 0

    def post(self, message: Message) -> int:
        """See ``remote.Link``."""
        self._give_up()
        worker = self._running()
        self._posted = str(message["do"])
        self._posts += 1
        self._used = max(self._used, message.get("out", 0))
        worker.send(message)
        return self._posts

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

    def renew(self) -> None:
        """See ``remote.Link``."""
        self.close()
        forkserver.replace()

    def end(self) -> None:
        """End the process, and the next one as well."""
        self.close()
        if self._started is not None:
            self._started.kill()
        self._started = None

    def begin(self) -> None:
        """Start the next process, without waiting for it: it is there when it is needed."""
        if self._started is None:
            self._started = Worker()
            self._started.send(_load(self.spec, (self.op,), self.device, self._opened()))

    def ready(self) -> None:
        """Wait until the process is there. Where it does not come up, the first call says so."""
        with suppress(Broken):
            self._running()

    def _running(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            self._worker = self._asked_afresh()
        return self._worker

    def _asked_afresh(self) -> Worker:
        """The next process, once it has imported the implementation.

        One that does not come up may have been hit by other code under test: it is started again from a new server.
        """
        try:
            return self._come_up()
        except Broken as broken:
            if broken.kind == "exception":
                raise
        forkserver.replace()
        return self._come_up()

    def _come_up(self) -> Worker:
        if self._started is not None and not (self._started.of_this_server and forkserver.sound()):
            self._started.kill()  # what has come up already may have been damaged on the way
            self._started = None
        self.begin()
        assert self._started is not None
        worker, self._started = self._started, None
        self._asked, self._posted = set(), ""
        answers = [
            worker.receive(_START + self._limit, "its import"),
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
    size = min(machine_memory("cuda") // 4, 8 << 30)
    return DeviceMemory(torch.empty(size, dtype=torch.uint8, device="cuda"))


def _end_of(answer: Message) -> int:
    """The end of the last tensor that a worker says it laid; at most what can be."""
    told = answer.get("returned")
    places = [p for p in told if isinstance(p, dict)] if isinstance(told, list) else []
    ends = [p["at"] + p["bytes"] for p in places if type(p.get("at")) is int and type(p.get("bytes")) is int]
    return min(max(ends, default=0), 1 << 40)


def _load(spec: str, ops: tuple[str, ...], device: str, memory: str = "") -> Message:
    return {"do": "load", "spec": spec, "ops": list(ops), "device": device, "memory": memory}


def select_apart(spec: str, ops: tuple[str, ...], device: str, seconds: float) -> tuple[Implementation, ...]:
    """As ``discovery.select``, but what ``spec`` names is imported by a worker. Raises UsageError.

    Of a file that ends or hangs its process on the way nothing is known but the ops asked for: it is what each says.
    """
    try:
        answer = _imported(_load(spec, ops, device), _START + seconds)
    except Broken as broken:
        ended = Ended(broken.kind, broken.message, broken.frames)
        unknown = ops or tuple(discovery.ops())[:1]
        return tuple(Implementation(name=Path(spec).name, op=op, forward=ended, source=spec) for op in unknown)
    if "usage" in answer:
        raise UsageError(str(answer["usage"]))
    if "broken" in answer:
        raise UsageError(f"impl={spec}: {broken_of(answer['broken']).message}")
    found = answer.get("found")
    if not isinstance(found, list):
        raise UsageError(f"impl={spec}: expected an import that leaves its process alone, which answered nonsense")
    return tuple(_implementation(spec, told, device) for told in found)


def _imported(load: Message, seconds: float) -> Message:
    """What a process answers that is there for this import alone. One that crashes is tried again from a new server."""
    try:
        return _asked_once(load, seconds)
    except Broken as broken:
        if broken.kind != "crash":
            raise
    forkserver.replace()
    return _asked_once(load, seconds)


def _asked_once(load: Message, seconds: float) -> Message:
    worker = Worker()
    try:
        return worker.ask(load, seconds, "its import")
    finally:
        worker.kill()


def _implementation(spec: str, told: Mapping[str, Any], device: str) -> Implementation:
    """An implementation in another process, from what that process tells of it."""
    try:
        link = ProcessLink(spec, str(told["op"]), str(told["name"]), device)
        entry, declared, reason = Entry(link, source_location.told(told["place"])), told["model"], told["unavailable"]
        described = Implementation(
            name=str(told["name"]),
            op=str(told["op"]),
            forward=entry,
            backward=entry if told["backward"] else None,
            supports=Question(link, "supports") if told["supports"] else None,
            unavailable=Reason(str(reason)) if reason else None,
            dtypes=tuple(told["dtypes"]),
            ranks=tuple(told["ranks"]),
            biases=tuple(told["biases"]),
            strided=bool(told["strided"]),
            weight_dtypes=tuple(told["weight_dtypes"]),
            overwrites=tuple(told["overwrites"]),
            model=Question(link, "model") if declared is None else dict(declared),
            shapes=None if told["shapes"] is None else tuple(tuple(shape) for shape in told["shapes"]),
            deterministic=bool(told["deterministic"]),
            batch_invariant=bool(told["batch_invariant"]),
            source=str(told["source"]),
        )
    except (KeyError, TypeError, ValueError):
        raise UsageError(
            f"impl={spec}: expected an import that leaves its process alone, which answered nonsense"
        ) from None
    return discovery.validated(described, spec)
