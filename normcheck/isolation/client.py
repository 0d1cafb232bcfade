"""Client of a kernel's worker process: requests and their answers, under the time limit of a case.

The worker is started with the first request, and again after it has died. It is forked from a server that has torch
imported and has never run code under test.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from types import MappingProxyType

import torch

from normcheck.cases.case import Case
from normcheck.cases.guard_bands import PATTERNS
from normcheck.cases.inputs import Inputs
from normcheck.errors import Broken, loses_context
from normcheck.impls.kernels.configurations import Configuration
from normcheck.isolation import forkserver
from normcheck.isolation.messages import Message
from normcheck.isolation.process import Worker
from normcheck.isolation.replies import broken_of, configurations_of
from normcheck.isolation.sandbox import Sandbox
from normcheck.isolation.shared_memory import DeviceMemory, Space, shared_bytes, tensor_at
from normcheck.runner.arena import Stray
from normcheck.runner.environment import memory_bytes
from normcheck.runner.session import FIRST_CALLS

START_SECONDS = 60.0
"""Time within which a worker must have started."""


def begun(
    spec: str,
    ops: tuple[str, ...],
    device: str,
    sandbox: Sandbox | None,
    python: str = "",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Worker:
    """A new worker that has been asked to import what ``spec`` names, with these variables in its ``environment``.

    ``python``: see ``forkserver``.
    """
    worker = Worker(sandbox, python)
    message = {"do": "load", "spec": spec, "ops": list(ops), "device": device, "environment": dict(environment)}
    worker.send(message)
    return worker


class Client:
    """Sends requests to the worker of one implementation, one at a time.

    A request that is posted while another is unanswered first waits for that answer, which is thrown away.
    ``start_seconds``: for the start of a worker, beside the seconds of a case that its import may take.
    """

    def __init__(
        self,
        spec: str,
        op: str,
        name: str,
        device: str,
        sandbox: Sandbox | None,
        start_seconds: float = START_SECONDS,
        python: str = "",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._start_seconds = start_seconds
        self._spec, self._op, self._name, self._device, self._sandbox = spec, op, name, device, sandbox
        self._python, self._environment = python, environment
        self._worker: Worker | None = None
        self._next: Worker | None = None  # started, and importing, but not in use yet
        self._used = 0  # bytes of shared memory, in the present case
        self._own_bytes = 0  # of device memory for the present case alone, 0 if it needs none
        self._own: DeviceMemory | None = None
        self._opened: DeviceMemory | None = None  # the device memory that the present worker has opened
        self._held = 0  # shared memory below this byte holds the inputs of the present case
        self._cached = False  # whether torch caches here what such a case has used
        self._number = 0  # of the latest request
        self._seconds = self._seconds_left = start_seconds
        self._first_calls = FIRST_CALLS
        self._called: set[str] = set()  # kinds of requests that the worker has had time to compile for
        self._overran = False  # a first call took even that too long: no other gets time to compile
        self._unanswered = ""  # the kind of the request that has not been answered yet
        self._cases: list[Case] = []  # in the present worker
        self.before: tuple[Case, ...] = ()
        self.strays: list[Stray] = []  # that this process found once the latest answer was there
        self.eager_calls = 0  # the most that a worker told, see ``runner.compiled``
        self.asked = ""  # the configuration that autotuners are to take, see ``kernels.configurations``
        self.configurations: tuple[Configuration, ...] = ()  # those that they allowed since
        self.idle_seconds = 0.0  # of all workers until now, see ``Worker``; imports do not count

    @property
    def alive(self) -> bool:
        """Whether there is a worker that was not seen to end."""
        return self._worker is not None and self._worker.alive

    def start(self) -> None:
        """Start the next worker, without waiting for it."""
        if self._next is None:
            self._next = begun(self._spec, (self._op,), self._device, self._sandbox, self._python, self._environment)

    def wait(self) -> None:
        """Wait until the worker has started. If it does not start, the first request raises."""
        with suppress(Broken, OSError):
            self._running()

    def close(self) -> None:
        """End the worker; the next request starts another."""
        if self._worker is not None:
            self._worker.kill()
        self._worker, self._unanswered = None, ""

    def end(self) -> None:
        """End the worker, and the next one if it was started already."""
        self.close()
        if self._next is not None:
            self._next.kill()
        self._next = None

    def begin(self, case: Case, seconds: float, first_calls: float = FIRST_CALLS) -> None:
        """Begin a case: its requests together may take ``seconds``; ``before`` becomes the worker's earlier cases.

        The first request of each kind, which may compile, may take ``first_calls`` times as long.

        A huge case that needs more device memory than is shared has memory and a worker of its own, until ``finish``.
        """
        self._seconds = self._seconds_left = seconds
        self._first_calls = first_calls
        self._empty_cache()
        needed = shared_bytes(case) if case.huge and self._device == "cuda" else 0
        self._own_bytes = needed if needed and needed > _usual_bytes() else 0
        if self.alone:
            self.end()
        if not self.alive:
            self._cases = []
        self.before = tuple(self._cases)
        self._cases.append(case)
        if self.alive and self._worker is not None:
            self._worker.memory.give_back(self._used)
        self._used = self._held = 0

    @property
    def alone(self) -> bool:
        """Whether the present case has memory and a worker of its own."""
        return self._own_bytes > 0

    def finish(self) -> None:
        """End the case. If it was ``alone``, its memory goes back, and its worker ends, with what it has cached."""
        if not self.alone:
            return
        self.end()
        if self._own is not None:
            self._own.release()
        self._own, self._own_bytes, self._held = None, 0, 0
        self._cached = True

    def _empty_cache(self) -> None:
        """Give back what torch still caches here of a case that was ``alone``. Its outputs were in use until now."""
        if self._cached:
            torch.cuda.empty_cache()
        self._cached = False

    def hold(self, inputs: Inputs) -> Inputs:
        """Copies of ``inputs`` in shared memory, which calls use in place until the case is finished."""
        space = Space(self._running().memory if inputs.x.device.type == "cpu" else self._device_memory())
        held = inputs.each(lambda tensor: tensor_at(space.memory, space.copy_in(tensor)[0]))
        self._held = space.next
        return held

    @property
    def awaited(self) -> int:
        """The number of the unanswered request, 0 if there is none."""
        return self._number if self._unanswered else 0

    def space(self, first: int, device: str) -> Space:
        """Shared memory from byte ``first`` on, for tensors on ``device``: on the CPU, or where the kernel runs.

        No call uses it any more: an unanswered request is given up first.
        """
        self._give_up()
        worker = self._running()
        memory = worker.memory if device == "cpu" else self._device_memory()
        return Space(memory, max(first, self._held), self._device)

    def post(self, message: Message, space: Space | None = None) -> int:
        """Send a request, about tensors in ``space``, and return its number."""
        self._give_up()
        worker = self._running()
        if space is not None:
            message |= {**self._where(space), "region": self._region(worker, space, message)}
        if self.asked:
            message |= {"configuration": self.asked}
        self._unanswered = str(message["do"])
        self._number += 1
        self._used = max(self._used, message.get("out", 0))
        worker.send(message)
        return self._number

    def collect(self) -> Message:
        """Wait for the answer to a request. Raises Broken if the worker dies, takes too long or sends garbage.

        Also if it does not tell where it has allocated, or has returned the memory of an earlier result again.
        """
        answer, worker = self._received()
        self.strays = worker.watched.look(answer)
        return answer

    def _received(self) -> tuple[Message, Worker]:
        """The answer to a request, and who gave it."""
        what, worker = self._unanswered, self._worker
        assert worker is not None
        self._unanswered = ""
        first = what not in self._called and not self._overran
        self._called.add(what)
        seconds, begun = self._seconds_left + (self._first_calls - 1) * self._seconds * first, time.monotonic()
        idle = worker.idle_seconds
        try:
            answer = worker.receive(seconds, what)
            self.idle_seconds += worker.idle_seconds - idle
        except Broken as broken:
            if broken.kind == "timeout":
                self._overran |= first
                during = worker.doing(what)
                raise Broken("timeout", "", f"no result after timeout={self._seconds:g} s, during {during}") from None
            raise
        self._seconds_left -= 0.0 if first else time.monotonic() - begun
        self._used = max(self._used, _end_of(answer))
        eager = answer.get("eager")
        self.eager_calls = max(self.eager_calls, eager if type(eager) is int else 0)
        if self.asked and "configurations" in answer:
            self.configurations = configurations_of(answer)
        failure = answer.get("broken")
        if isinstance(failure, dict) and loses_context(str(failure.get("message"))):
            self.close()  # nothing works any more in its GPU context
        return answer, worker

    def _give_up(self) -> None:
        """Wait for the unanswered request, if any, and throw its answer away. The worker may end on it."""
        if self._unanswered and self.alive:
            answer, worker = self._received()
            with suppress(Broken):  # it is about a call that nobody asks for any more
                worker.watched.look(answer)

    def _where(self, space: Space) -> Message:
        """What the worker must know of the memory of ``space``; once, the handle that opens it."""
        if not isinstance(space.memory, DeviceMemory):
            return {"first": space.first, "mirrored": space.device != space.memory.device}
        known, self._opened = self._opened is space.memory, space.memory
        return {"opened": "" if known else space.memory.handle}

    def _region(self, worker: Worker, space: Space, message: Message) -> tuple[int, int] | None:
        """Where a call may allocate that gets what lies in ``space``: its first byte and the end; None on a GPU."""
        if self._device != "cpu":
            return None
        return worker.watched.lay(space.next - space.first, PATTERNS[message["surroundings"][-1]])

    def _device_memory(self) -> DeviceMemory:
        if not self._own_bytes:
            return _usual_memory()
        if self._own is None:
            self._own = DeviceMemory.allocated(self._own_bytes)
        return self._own

    def _running(self) -> Worker:
        if self._worker is None or not self._worker.alive:
            self._worker = self._new_worker()
        return self._worker

    def _new_worker(self) -> Worker:
        """A worker that has imported the implementation.

        One that does not start may have been hit by other code under test: it is started again from a new server.
        """
        try:
            return self._start_worker()
        except Broken as broken:
            if broken.kind == "exception":
                raise
        forkserver.replace(self._python, root=True)
        return self._start_worker()

    def _start_worker(self) -> Worker:
        if self._next is not None and not (self._next.of_this_server and forkserver.sound(self._python)):
            self._next.kill()  # code under test may have damaged it since it was started
            self._next = None
        self.start()
        assert self._next is not None
        worker, self._next, self._opened = self._next, None, None
        self._called, self._unanswered = set(), ""
        seconds = self._start_seconds + self._seconds
        answers = [
            worker.receive(seconds, "its import"),
            worker.ask({"do": "choose", "name": self._name, "op": self._op}, seconds, "its import"),
        ]
        for answer in answers:
            if "usage" in answer:
                raise Broken("exception", "", str(answer["usage"]))
            if "broken" in answer:
                raise broken_of(answer["broken"])
        return worker


@cache
def _usual_bytes() -> int:
    """Bytes of the GPU memory that all cases share but the largest, which have memory of their own."""
    return min(memory_bytes("cuda") // 4, 8 << 30)


@cache
def _usual_memory() -> DeviceMemory:
    """GPU memory that all workers share, allocated once."""
    return DeviceMemory.allocated(_usual_bytes())


def _end_of(answer: Message) -> int:
    """The byte at which the last tensor of an answer ends, according to the worker; at most 2^40."""
    returned = answer.get("returned")
    places = [p for p in returned if isinstance(p, dict)] if isinstance(returned, list) else []
    ends = [p["at"] + p["bytes"] for p in places if type(p.get("at")) is int and type(p.get("bytes")) is int]
    return min(max(ends, default=0), 1 << 40)
