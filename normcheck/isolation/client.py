"""Client of a kernel's worker process: requests and their answers, under the time limit of a case.

The worker is started with the first request, and again after it has died. It is forked from a server that has torch
imported and has never run code under test.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType

from normcheck.cases.case import Case
from normcheck.cases.guard_bands import PATTERNS
from normcheck.cases.inputs import Inputs
from normcheck.errors import Broken, loses_context
from normcheck.impls.kernels.configurations import Configuration
from normcheck.isolation import forkserver
from normcheck.isolation.case_memory import CaseMemory
from normcheck.isolation.messages import Message
from normcheck.isolation.process import Worker
from normcheck.isolation.replies import broken_of, configurations_of, count_of
from normcheck.isolation.sandbox import Sandbox
from normcheck.isolation.shared_memory import Space, tensor_at
from normcheck.isolation.spare import Spare, begun
from normcheck.runner.arena import Stray
from normcheck.runner.session import FIRST_CALLS

START_SECONDS = 60.0
"""Time within which a worker must have started."""


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
        self._op, self._name, self._device, self._python = op, name, device, python
        self._worker: Worker | None = None
        self._spare = Spare(lambda: begun(spec, (op,), device, sandbox, python, environment), python)
        self._memory = CaseMemory(device)
        self._number = 0  # of the latest request
        self._seconds = self._seconds_left = start_seconds
        self._first_calls = FIRST_CALLS
        self._called: set[str] = set()  # kinds of requests that the worker has had time to compile for
        self._overran = False  # a first call took even that too long: no other gets time to compile
        self._unanswered = ""  # the kind of the request that has not been answered yet
        self._cases: list[Case] = []  # in the present worker
        self.before: tuple[Case, ...] = ()
        self.strays: list[Stray] = []  # that this process found once the latest answer was there
        self.eager_calls = self.graphs = 0  # the most that a worker told, see ``runner.compiled``
        self.asked = ""  # the configuration that autotuners are to take, see ``kernels.configurations``
        self.configurations: tuple[Configuration, ...] = ()  # those that they allowed since
        self.idle_seconds = 0.0  # of all workers until now, see ``Worker``; imports do not count
        self.waited_seconds = 0.0  # for answers, but for those that a worker has had time to compile for

    @property
    def alive(self) -> bool:
        """Whether there is a worker that was not seen to end."""
        return self._worker is not None and self._worker.alive

    def start(self) -> None:
        """Start the next worker, without waiting for it."""
        self._spare.start()

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
        self._spare.kill()

    def begin(self, case: Case, seconds: float, first_calls: float = FIRST_CALLS) -> None:
        """Begin a case: its requests together may take ``seconds``; ``before`` becomes the worker's earlier cases.

        The first request of each kind, which may compile, may take ``first_calls`` times as long.
        A huge case that needs more device memory than is shared has memory and a worker of its own, until ``finish``.
        """
        self._seconds = self._seconds_left = seconds
        self._first_calls = first_calls
        used = self._memory.begin(case)
        if self.alone:
            self.end()
        if not self.alive:
            self._cases = []
        self.before = tuple(self._cases)
        self._cases.append(case)
        if self.alive and self._worker is not None:
            self._worker.memory.give_back(used)

    @property
    def alone(self) -> bool:
        """Whether the present case has memory and a worker of its own."""
        return self._memory.alone

    def finish(self) -> None:
        """End the case. If it was ``alone``, its memory goes back, and its worker ends, with what it has cached."""
        if self.alone:
            self.end()
            self._memory.finish()

    def hold(self, inputs: Inputs) -> Inputs:
        """Copies of ``inputs`` in shared memory, which calls use in place until the case is finished."""
        space = Space(self._running().memory if inputs.x.device.type == "cpu" else self._memory.of_device())
        held = inputs.each(lambda tensor: tensor_at(space.memory, space.copy_in(tensor)[0]))
        self._memory.held = space.next
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
        memory = worker.memory if device == "cpu" else self._memory.of_device()
        return Space(memory, max(first, self._memory.held), self._device)

    def post(self, message: Message, space: Space | None = None) -> int:
        """Send a request, about tensors in ``space``, and return its number."""
        self._give_up()
        worker = self._running()
        if space is not None:
            region = _region(worker, space, message) if self._device == "cpu" else None
            message |= {**self._memory.where(space), "region": region}
        if self.asked:
            message |= {"configuration": self.asked}
        self._unanswered = str(message["do"])
        self._number += 1
        self._memory.use(message.get("out", 0))
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
        waited = 0.0 if first or worker.overtime else time.monotonic() - begun
        self._seconds_left -= waited
        self.waited_seconds += waited
        self._memory.use(_end_of(answer))
        self.eager_calls = max(self.eager_calls, count_of(answer, "eager"))
        self.graphs = max(self.graphs, count_of(answer, "graphs"))
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
        worker = self._spare.taken()
        self._memory.opened = None
        self._called, self._unanswered = set(), ""
        _choose(worker, self._name, self._op, self._start_seconds + self._seconds)
        return worker


def _choose(worker: Worker, name: str, op: str, seconds: float) -> None:
    """Wait for the worker's import, and let it choose the implementation. Raises Broken if that cannot be."""
    answers = [
        worker.receive(seconds, "its import"),
        worker.ask({"do": "choose", "name": name, "op": op}, seconds, "its import"),
    ]
    for answer in answers:
        if "usage" in answer:
            raise Broken("exception", "", str(answer["usage"]))
        if "broken" in answer:
            raise broken_of(answer["broken"])


def _region(worker: Worker, space: Space, message: Message) -> tuple[int, int] | None:
    """Where a call on a CPU may allocate that gets what lies in ``space``: its first byte and the end."""
    return worker.watched.lay(space.next - space.first, PATTERNS[message["surroundings"][-1]])


def _end_of(answer: Message) -> int:
    """The byte at which the last tensor of an answer ends, according to the worker; at most 2^40."""
    returned = answer.get("returned")
    places = [p for p in returned if isinstance(p, dict)] if isinstance(returned, list) else []
    ends = [p["at"] + p["bytes"] for p in places if type(p.get("at")) is int and type(p.get("bytes")) is int]
    return min(max(ends, default=0), 1 << 40)
